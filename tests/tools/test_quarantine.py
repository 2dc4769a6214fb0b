"""`mqstore quarantine`: what recovery has cut is listed, printed and appended again."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from tests.broker.cutsupport import SENT, all_of, cut_from, make, open_again
from tests.log.support import files, flip_log, open_store
from tests.tools.brokers import broker, clock_now
from tests.tools.support import mqstore, mqstore_json, snapshot

BAD = 20


@pytest.fixture
def receipts(tmp_path: Path) -> list[Any]:
    """Of the messages that were put to `store`, which was cut from `BAD` on."""
    found = make(tmp_path / "store")
    cut_from(tmp_path / "store", found[BAD])
    return found


@pytest.fixture
def store(receipts: list[Any], tmp_path: Path) -> Path:
    return tmp_path / "store"


def names(store: Path) -> list[str]:
    return sorted(each.name for each in (store / "cut").iterdir() if each.is_file())


def test_list_shows_each_message_and_what_is_none(store: Path, receipts: list[Any]) -> None:
    before = snapshot(store)

    found = mqstore_json("quarantine", "list", store, exit_code=1)["files"]

    assert [file["file"] for file in found] == names(store)
    assert [file["physical_offset"] for file in found] == [int(name[:20]) for name in names(store)]
    assert [file["count"] for file in found] == [len(file["messages"]) for file in found]
    assert [file["other_bytes"] for file in found] == [receipts[BAD].size] + [0] * (len(found) - 1)
    rows = [row for file in found for row in file["messages"]]
    for row, sent, receipt in zip(rows, SENT[BAD + 1 :], receipts[BAD + 1 :], strict=True):
        assert row == {
            "topic": sent.topic,
            "queue_id": sent.queue_id,
            "queue_offset": receipt.offset,
            "physical_offset": receipt.physical_offset,
            "store_timestamp_ms": receipt.store_timestamp_ms,
            "size": receipt.size,
            "tag": sent.properties.get("TAGS"),
            "keys": sent.properties.get("KEYS", "").split(),
        }
    assert snapshot(store) == before


def test_list_for_people_names_places_and_counts(store: Path, receipts: list[Any]) -> None:
    with open_again(store):
        result = mqstore("quarantine", store, exit_code=1)

    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == names(store)
    assert sum(" bytes  " in line or line.endswith(" bytes") for line in lines) == len(SENT) - BAD - 1
    [paid, *_] = [n for n in range(BAD + 1, len(SENT)) if "TAGS" in SENT[n].properties]
    [line] = [line for line in lines if f"at {receipts[paid].physical_offset} " in line]
    assert line.split()[0] == f"{SENT[paid].topic}/{SENT[paid].queue_id}@{receipts[paid].offset}"
    assert line.endswith("tag=paid  keys=k-1 k-2")
    assert f"{receipts[BAD].size} bytes outside messages" in result.stdout
    assert f"bad_record: cut/{names(store)[0]} at 0, {receipts[BAD].size} bytes" in result.stderr


def test_only_whole_messages_are_exit_code_0(store: Path) -> None:
    assert mqstore("quarantine", "list", store, names(store)[1]).exit_code == 0


def test_a_store_of_which_nothing_was_cut_says_so(tmp_path: Path) -> None:
    make(tmp_path / "s")
    assert mqstore_json("quarantine", "list", tmp_path / "s") == {"files": []}
    for command in (["list"], ["restore"], ["restore", "--dry-run"]):
        result = mqstore("quarantine", *command, tmp_path / "s")
        assert (result.exit_code, "nothing was cut" in result.stderr) == (0, True)


def test_export_prints_the_rows_that_export_printed_before_the_cut(tmp_path: Path) -> None:
    store = tmp_path / "store"
    receipts = make(store)
    behind = {receipt.physical_offset for receipt in receipts[BAD + 1 :]}
    rows = [json.loads(line) for line in mqstore("export", store).stdout.splitlines()]
    wanted = sorted((row for row in rows if row["physical_offset"] in behind), key=lambda row: row["physical_offset"])
    cut_from(store, receipts[BAD])

    printed = mqstore("quarantine", "export", store)
    written = mqstore("quarantine", "export", store, "--output", tmp_path / "out.jsonl", "--json")

    assert [json.loads(line) for line in printed.stdout.splitlines()] == wanted
    assert [base64.b64decode(row["body"]) for row in wanted] == [each.body for each in SENT[BAD + 1 :]]
    assert (tmp_path / "out.jsonl").read_text() == printed.stdout
    assert printed.exit_code == written.exit_code == 1
    assert json.loads(written.stdout) == {
        "version": 1,
        "ok": False,
        "messages": len(wanted),
        "files": len(names(store)),
        "findings": 1,
    }
    assert mqstore("quarantine", "export", store, "--output", store / "cut/x").exit_code == 2


def test_restore_says_what_it_will_do_and_does_it_once(store: Path) -> None:
    before = snapshot(store)
    plan = mqstore_json("quarantine", "restore", store, "--dry-run", exit_code=1)
    assert snapshot(store) == before

    done = mqstore_json("quarantine", "restore", store, exit_code=1)

    assert (plan["dry_run"], done["dry_run"], plan["files"]) == (True, False, done["files"])
    assert [(row["topic"], row["queue_id"], row["messages"]) for row in done["queues"]] == [
        (row["topic"], row["queue_id"], row["messages"]) for row in plan["queues"]
    ]
    assert all(row["end_offset"] - row["first_offset"] == row["messages"] for row in done["queues"])
    assert mqstore_json("quarantine", "restore", store) == {"dry_run": False, "files": [], "queues": []}
    with open_store(store, "r") as reader:
        assert all_of(reader) == SENT[:BAD] + SENT[BAD + 1 :]
    assert names(store) == []
    assert mqstore_json("verify", store)["findings"] == []


def test_restore_for_people_counts_by_file_and_queue(store: Path) -> None:
    total = len(SENT) - BAD - 1
    plan, done = (mqstore("quarantine", "restore", store, *more).stdout.splitlines() for more in (["--dry-run"], []))

    assert [line.replace("to append", "appended") for line in plan] == done[: len(plan)]
    assert sum(int(line.split()[1]) for line in plan) == total
    assert sum(int(line.split()[-1]) - int(line.split()[2]) for line in done[len(plan) :]) == total


def test_a_restored_file_can_be_listed_and_exported_by_name(store: Path) -> None:
    [first, second, *_] = names(store)
    wanted = mqstore_json("quarantine", "list", store, second)["files"][0]["messages"]
    exported = mqstore("quarantine", "export", store, second).stdout
    mqstore("quarantine", "restore", store)

    [found] = mqstore_json("quarantine", "list", store, f"restored/{second}")["files"]

    assert (found["file"], found["messages"]) == (f"restored/{second}", wanted)
    assert mqstore("quarantine", "export", store, f"restored/{second}").stdout == exported
    for name in (first, "../store/mqstore.json", "restored/../restoring.json"):
        assert mqstore("quarantine", "list", store, name).exit_code == 2


def test_messages_larger_than_the_limit_of_today_come_back(path: Path) -> None:
    large = os.urandom(5 << 20)
    with open_store(path, max_message_size=6 << 20, segment_bytes=16 << 20) as store:
        bad = store.put("t", b"x" * 20)
        store.put("t", large)
    flip_log(path, bad.physical_offset + 100)
    mqstore("recover", path, "--prefix")

    assert mqstore("quarantine", "restore", path).exit_code == 1
    with library.open(path, "r") as store:
        assert [message.body for message in store.read("t", 0, 0)] == [large]


@pytest.mark.parametrize("command", ["list", "export", "restore"])
def test_a_fifo_and_a_link_in_cut_are_named_and_not_opened(store: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    os.mkfifo(store / "cut" / f"{0:020d}-1")
    (store / "cut" / f"{0:020d}-2").symlink_to(tmp_path / "precious")
    before = files(store / "commitlog")

    result = mqstore("quarantine", command, store, exit_code=3 if command == "restore" else 1)

    assert f"cut/{0:020d}-1" in result.stderr
    if command != "restore":
        assert f"cut/{0:020d}-2" in result.stderr
        assert "orders" in result.stdout
    assert files(store / "commitlog") == before


def test_delayed_and_grouped_messages_are_delivered_after_a_restore(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", clock_now()
    with broker(path, clock) as running:
        bad = running.put("orders", b"damaged" * 5, queue_id=0)
        running.put("orders", b"grouped", message_group="customer 7")
        running.put("orders", b"by level", queue_id=0, delay_level=3)
        running.put("orders", b"by time", queue_id=0, deliver_at=clock.now_ms() / 1000 + 60)
    flip_log(path, bad.physical_offset + 100)
    mqstore("recover", path, "--prefix")

    assert mqstore("quarantine", "restore", path).exit_code == 1
    with broker(path, clock) as running:
        for _ in range(30):
            clock.advance(5000)
            running.run_once()
        store = running.store
        found = [
            (message.body, message.message_group)
            for ref in store.queues("orders")
            for message in store.read(*ref, store.offsets(*ref)[0], 99)
        ]
    assert sorted(found) == [(b"by level", None), (b"by time", None), (b"grouped", "customer 7")]


def test_restored_messages_reach_their_group(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", clock_now()
    with broker(path, clock) as running:
        bad = running.put("orders", b"damaged" * 5, queue_id=0)
        for body in (b"a", b"b"):
            running.put("orders", body, queue_id=0)
        running.run_once()
        running.commit("billing", "orders", 0, 3)
    flip_log(path, bad.physical_offset + 100)
    mqstore("recover", path, "--prefix")

    mqstore("quarantine", "restore", path)

    with broker(path, clock) as running:
        start = running.committed("billing", "orders", 0)
        assert start is not None
        assert [message.body for message in running.store.read("orders", 0, start, 9)] == [b"a", b"b"]
