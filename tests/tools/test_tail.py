"""`mqstore tail`: the newest of all queues by store time, and what comes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import mqstore as library
from mqstore import SimulatedClock, StoreConfig
from tests.conftest import GoldenStore
from tests.tools.support import mqstore, process

Golden = Callable[[str], GoldenStore]


def fill(path: Path) -> None:
    """Messages 0..29 in three queues by turns, each a millisecond behind the other."""
    clock = SimulatedClock()
    with library.MessageStore(path, config=StoreConfig(clock=clock)) as store:
        for i in range(30):
            clock.advance(1)
            store.put("orders", b"%d" % i, i % 3, tag="tens" if i % 10 == 0 else None)
        store.dispatch()


def shown(path: Path, *options: object) -> list[int]:
    result = mqstore("tail", path, "--topic", "orders", *options)
    assert result.exit_code == 0, result.output
    return [int(line) for line in result.stdout.splitlines() if line.startswith("    ")]


def test_the_newest_of_all_queues_merged_by_store_time(tmp_path: Path) -> None:
    fill(tmp_path / "s")

    assert shown(tmp_path / "s") == list(range(20, 30))
    assert shown(tmp_path / "s", "-n", 2) == [28, 29]
    assert shown(tmp_path / "s", "-n", 0) == []
    assert shown(tmp_path / "s", "-n", 1000) == list(range(30))


def test_the_newest_of_one_queue(tmp_path: Path) -> None:
    fill(tmp_path / "s")

    assert shown(tmp_path / "s", "--queue-id", 1, "-n", 3) == [22, 25, 28]


def test_a_filter_looks_as_far_back_as_it_has_to(tmp_path: Path) -> None:
    fill(tmp_path / "s")

    assert shown(tmp_path / "s", "--tag", "tens", "-n", 2) == [10, 20]


def test_json_is_what_export_has(golden: Golden) -> None:
    path = golden("clean").path
    exported = set(mqstore("export", path, "--topic", "orders").stdout.splitlines())

    lines = mqstore("tail", path, "--topic", "orders", "-n", 7, "--json").stdout.splitlines()

    assert len(lines) == 7
    assert set(lines) <= exported


def test_an_unknown_topic_is_wrong_usage(tmp_path: Path) -> None:
    fill(tmp_path / "s")

    assert mqstore("tail", tmp_path / "s", "--topic", "nonesuch").exit_code == 2
    assert mqstore("tail", tmp_path / "s", "--topic", "orders", "--queue-id", 9).exit_code == 2


@pytest.mark.parametrize("queue", [[], ["--queue-id", 0]], ids=["all queues", "one queue"])
def test_follow_shows_what_another_process_puts_until_interrupted(tmp_path: Path, queue: list[object]) -> None:
    with library.MessageStore(tmp_path / "s") as store:
        store.put("other", b"so that there is a store")
        store.dispatch()
        child = process("tail", tmp_path / "s", "--topic", "orders", "--follow", "--json", *queue)
        assert child.stdout is not None
        try:
            seen = []
            for i in range(3):  # the topic, and later two more messages, appear under its eyes
                store.put("orders", b"%d" % i)
                store.dispatch()
                seen.append(json.loads(child.stdout.readline())["queue_offset"])
            child.send_signal(signal.SIGINT)
            rest, error = child.communicate(timeout=60)
        finally:
            child.kill()

    assert seen == [0, 1, 2]
    assert (child.returncode, rest, error) == (0, b"", b"")


def test_damage_at_the_end_is_told_and_hides_nothing_before_it(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    with library.MessageStore(tmp_path / "s", "r") as store:
        [last] = store.read("orders", 2, 9)
    with open(tmp_path / "s" / "commitlog" / f"{0:020d}", "r+b") as file:
        file.seek(last.physical_offset + 88)
        file.write(b"\xff")

    result = mqstore("tail", tmp_path / "s", "--topic", "orders", "-n", 3)

    assert result.exit_code == 1
    assert [int(line) for line in result.stdout.splitlines() if line.startswith("    ")] == [26, 27, 28]
    assert result.stderr.startswith("bad_record: commitlog/")
