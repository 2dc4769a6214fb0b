"""`mqstore du`: bytes by part and topic, what retention deletes and when, and what keeps the log."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

import mqstore as library
from mqstore import SimulatedClock, StoreConfig
from mqstore.admin import disk_usage
from tests.tools.support import mqstore, mqstore_json, snapshot

SEGMENT, DAY_MS, HOUR_MS = 1 << 14, 86_400_000, 3_600_000
BEGIN_MS = int(time.time() * 1000) - 2 * DAY_MS


class Log:
    """A store of 60 messages of half a segment's eighth, one an hour, and where each was put."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sizes, self.places, self.times = Counter[str](), list[int](), list[int]()
        clock = SimulatedClock(BEGIN_MS - 24 * HOUR_MS)
        config = StoreConfig(clock=clock, segment_bytes=SEGMENT)
        with library.open(path, config=config) as store:
            for topic in ("orders", "mail"):
                store.broker.topics.create(topic, queues=1)
            consumers = [store.simple_consumer(group, {"orders": "*", "mail": "*"}) for group in ("billing", "audit")]
            for number in range(60):
                topic = "mail" if number % 4 == 0 else "orders"
                receipt = store.put(topic, b"x" * 900, queue_id=0)
                self.sizes[topic] += receipt.size
                self.places.append(receipt.physical_offset)
                self.times.append(clock.now_ms())
                for consumer in consumers[: 1 + (number < 40)]:  # `audit` stops at message 40
                    for delivery in consumer.receive(4, wait=0):
                        delivery.ack()
                clock.advance(HOUR_MS)
                store.broker.run_once()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return Log(tmp_path_factory.mktemp("du") / "mq")


def test_bytes_of_topics_and_parts_are_those_of_records_and_files(log: Log) -> None:
    before = snapshot(log.path)
    found = mqstore_json("du", log.path)

    rows = {row["topic"]: row for row in found["topics"]}
    assert {topic: rows[topic]["log_bytes"] for topic in log.sizes} == log.sizes
    assert [rows[topic]["messages"] for topic in ("mail", "orders")] == [15, 45]
    on_disk = {p: p.lstat().st_blocks * 512 for p in log.path.rglob("*") if p.is_file()}
    assert found["bytes"] == sum(part["bytes"] for part in found["parts"].values()) == sum(on_disk.values())
    parts = {"log": "commitlog", "queues": "consumequeue", "index": "index", "config": "config"}
    for part, folder in parts.items():
        inside = [size for p, size in on_disk.items() if p.is_relative_to(log.path / folder)]
        assert found["parts"][part] == {"files": len(inside), "bytes": sum(inside)}, part
    assert found["log"]["topic_bytes"] == sum(row["log_bytes"] for row in found["topics"])
    assert (found["not_shown"], snapshot(log.path)) == ({}, before)


def test_consumed_bytes_end_at_the_slowest_group(log: Log) -> None:
    found = mqstore_json("du", log.path)
    rows, front = {row["topic"]: row for row in found["topics"]}, found["front"]

    assert (front["group"], front["topic"], front["queue_offset"]) == ("audit", "mail", 10)
    assert (front["physical_offset"], front["since_ms"]) == (log.places[40], log.times[40])
    assert rows["mail"]["consumed_bytes"] == log.sizes["mail"] * 10 // 15
    assert rows["orders"]["consumed_bytes"] == log.sizes["orders"] * 30 // 45


def test_consumed_segments_go_when_their_age_is_reached(log: Log) -> None:
    """By the rule of retention: a segment's age is that of its last message, in any topic."""
    found = mqstore_json("du", log.path, "--max-age", "60h")["retention"]

    bound = log.places[40] // SEGMENT
    last = [max(ms for at, ms in zip(log.places, log.times, strict=True) if at // SEGMENT == n) for n in range(bound)]
    due = [ms + 60 * HOUR_MS for ms in last]
    now_ms = time.time() * 1000
    later = [ms for ms in due if ms > now_ms]
    assert bound >= 2
    assert later
    assert (found["consumed_bytes"], found["due_bytes"]) == (bound * SEGMENT, (bound - len(later)) * SEGMENT)
    assert (abs(found["next_ms"] - later[0]) <= HOUR_MS, abs(found["last_ms"] - later[-1]) <= HOUR_MS) == (True, True)


def test_size_limit_shows_what_the_front_holds(log: Log) -> None:
    segments = mqstore_json("du", log.path)["log"]["segments"]
    found = mqstore_json("du", log.path, "--max-bytes", SEGMENT)["retention"]

    bound = log.places[40] // SEGMENT
    assert (found["due_bytes"], found["held_bytes"]) == (bound * SEGMENT, (segments - 1 - bound) * SEGMENT)
    assert found["next_ms"] is None


def test_segments_that_retention_deletes_meanwhile_are_left_out(log: Log, tmp_path: Path) -> None:
    """`make retention` met this: the writer deleted a segment between the listing and the look at its times."""
    store = tmp_path / "mq"
    shutil.copytree(log.path, store)

    def delete(done: int, total: int) -> None:
        if done == total:
            min((store / "commitlog").iterdir()).unlink()

    found = disk_usage(store, progress=delete)

    assert found["retention"] == disk_usage(store)["retention"]
    assert found["retention"]["consumed_bytes"] > 0


def test_snapshots_next_to_the_store_are_listed(log: Log, tmp_path: Path) -> None:
    store = tmp_path / "mq"
    shutil.copytree(log.path, store)
    mqstore("snapshot", store, tmp_path / "monday", "--link", exit_code=0)
    killed = tmp_path / "tuesday.partial-01234567"
    shutil.copytree(log.path, killed / "store")
    library.open(tmp_path / "another").close()
    os.symlink(store, tmp_path / "link")

    found = mqstore_json("du", store)["snapshots"]

    assert [(Path(each["path"]).name, each["partial"]) for each in found] == [("monday", False), (killed.name, True)]
    linked = [p for p in (store / "commitlog").iterdir() if p.stat().st_nlink > 1]
    assert linked
    assert found[0]["linked_bytes"] == sum(p.stat().st_blocks * 512 for p in linked)


@pytest.mark.parametrize("as_json", [False, True])
def test_progress_is_printed_in_lines_without_a_terminal(
    log: Log, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    assert "reading units" not in mqstore("du", log.path).stderr  # the first line comes after some seconds
    monkeypatch.setattr("mqstore_tools.render.LINE_S", 0)

    lines = mqstore("du", log.path, *["--json"] * as_json).stderr.splitlines()

    found = [line for line in lines if "reading units" in line]
    if as_json:
        rows = [json.loads(line) for line in found]
        assert {row["version"] for row in rows} == {1}
        assert rows[-1]["progress"]["done"] == rows[-1]["progress"]["total"] >= 60
    else:
        assert re.fullmatch(r"reading units: (\d+) of \1", found[-1])


def test_damaged_offsets_leave_the_sizes(log: Log, tmp_path: Path) -> None:
    store = tmp_path / "mq"
    shutil.copytree(log.path, store)
    for file in (store / "config").glob("consumerOffset.json*"):
        file.write_bytes(b"\x1b[2J")

    found = mqstore_json("du", store, exit_code=1)

    assert list(found["not_shown"]) == ["consumed"]
    assert {row["topic"]: row["log_bytes"] for row in found["topics"]}.items() >= log.sizes.items()
    assert {row["consumed_bytes"] for row in found["topics"]} == {None}
    assert found["retention"]["consumed_bytes"] == 0
    assert "not shown: consumed (" in mqstore("du", store, exit_code=1).stderr
