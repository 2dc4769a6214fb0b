"""`mqstore lag`: as many as are not consumed, as old as the oldest of them, in flight as the broker says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore import SimulatedClock
from tests.conftest import GoldenStore
from tests.tools.brokers import behind, broker, clock_now
from tests.tools.support import mqstore, mqstore_json

Golden = Callable[[str], GoldenStore]
STORED_MS = 1_750_000_000_000


def test_a_lag_counts_what_is_not_consumed_and_tells_the_age_of_its_first(tmp_path: Path) -> None:
    clock = SimulatedClock(STORED_MS)
    with broker(tmp_path / "s", clock) as running:
        for i in range(10):
            running.put("orders", b"%d" % i, queue_id=i % 2)
            clock.advance(1000)
        running.groups.create("billing")
        running.groups.create("idle")
        running.commit("billing", "orders", 0, 5)
        running.commit("billing", "orders", 1, 2)

    found = {each["group"]: each for each in mqstore_json("lag", tmp_path / "s")["groups"]}

    billing = found["billing"]
    assert (billing["messages"], billing["in_flight"], billing["lost"]) == (3, 0, 0)
    assert billing["oldest_store_timestamp_ms"] == STORED_MS + 5_000  # the third of queue 1
    assert billing["oldest_age_ms"] > 0
    assert [(row["queue_id"], row["messages"], row["oldest_store_timestamp_ms"]) for row in billing["queues"]] == [
        (0, 0, None),
        (1, 3, STORED_MS + 5_000),
    ]
    assert (found["idle"]["messages"], found["idle"]["queues"], found["idle"]["oldest_age_ms"]) == (0, [], None)


def test_a_queue_in_which_a_group_never_committed_counts_whole(tmp_path: Path) -> None:
    """As retention has it: nobody can tell that group from one that has not come there yet."""
    with broker(tmp_path / "s") as running:
        for queue_id in (0, 1, 1):
            running.put("orders", b"x", queue_id=queue_id)
        running.groups.create("billing")
        running.commit("billing", "orders", 0, 1)

    assert behind(tmp_path / "s", "billing") == {("orders", 0): (0, 0), ("orders", 1): (2, 0)}


@pytest.mark.parametrize("order", [False, True], ids=["standard", "fifo"])
def test_what_is_popped_and_not_settled_is_in_flight(tmp_path: Path, order: bool) -> None:
    clock = clock_now()
    with broker(tmp_path / "s", clock) as running:
        running.topics.create("orders", queues=1)
        for i in range(10):
            running.put("orders", b"%d" % i)
        running.run_once()
        popped = running.pop("billing", "orders", 6, order=order, local=False, invisible=600)
        running.ack("billing", "orders", [popped[0].receipt, popped[3].receipt])
        running.run_once()
        pending = len(running.pending("billing"))

        beside = mqstore_json("lag", tmp_path / "s", "--group", "billing")["groups"]

    after = mqstore_json("lag", tmp_path / "s", "--group", "billing")["groups"]
    assert pending == 4
    assert [each["in_flight"] for each in beside] == [4]
    assert [(each["messages"], each["in_flight"]) for each in after] == [(9, 4)]
    assert [line.split()[:4] for line in mqstore("lag", tmp_path / "s").stdout.splitlines()[-1:]] == [
        ["billing", "9", "4", "0"]
    ]


def test_what_lies_before_a_queues_start_is_not_in_flight(tmp_path: Path) -> None:
    """As the next opening has it, which does not wait for messages that were purged."""
    path = tmp_path / "s"
    with broker(path) as running:
        running.topics.create("orders", queues=1)
        for i in range(5):
            running.put("orders", b"%d" % i)
        running.run_once()
        running.pop("billing", "orders", 3, local=False)
        running.offsets.move_start("orders", 0, 2)

    told = behind(path, "billing")

    with broker(path) as running:
        assert told == {("orders", 0): (3, len(running.pending("billing")))} == {("orders", 0): (3, 1)}


def test_a_retry_topic_counts_as_a_topic(tmp_path: Path) -> None:
    clock = clock_now()
    with broker(tmp_path / "s", clock) as running:
        running.topics.create("orders", queues=1)
        running.put("orders", b"x")
        running.run_once()
        running.pop("billing", "orders", 1, invisible=1)
        clock.advance(1500)
        running.run_once()
        running.pop("billing", "orders", 1, invisible=600)
        running.run_once()

    assert behind(tmp_path / "s", "billing") == {("%RETRY%billing+orders", 0): (1, 1), ("orders", 0): (0, 0)}


def test_one_group_is_shown_queue_by_queue(tmp_path: Path) -> None:
    with broker(tmp_path / "s") as running:
        running.put("orders", b"x", queue_id=3)
        running.groups.create("billing")
        running.commit("billing", "orders", 3, 0)

    shown = mqstore("lag", tmp_path / "s", "--group", "billing").stdout

    assert ["orders", "3", "1", "0", "0"] in [line.split()[:5] for line in shown.splitlines()]


def test_an_unknown_group_is_2_and_a_store_without_groups_is_fine(golden: Golden) -> None:
    path = golden("rolled").path

    assert mqstore("lag", path, "--group", "nonesuch").exit_code == 2
    assert mqstore_json("lag", path) == {"groups": []}
    assert "no group" in mqstore("lag", path).stderr
