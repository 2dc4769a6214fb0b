"""`mqstore lag`: as many as are not consumed, as old as the oldest of them, in flight as the broker says."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import SimulatedClock
from mqstore.errors import ReceiptExpiredError
from tests.conftest import Golden
from tests.tools.brokers import behind, broker, clock_now, lags
from tests.tools.support import mqstore, mqstore_json

STORED_MS = 1_750_000_000_000


def test_lag_counts_and_shows_the_oldest_age(tmp_path: Path) -> None:
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
    assert (found["idle"]["messages"], found["idle"]["queues"], found["idle"]["oldest_age_ms"]) == (None, [], None)
    shown = [line.split() for line in mqstore("lag", tmp_path / "s").stdout.splitlines()]
    assert ["idle", "-", "0", "0", "-"] in shown


def test_queue_without_progress_is_not_counted(path: Path) -> None:
    """The command counted all of such a queue, 8 where `broker.lag` and Prometheus told 3 (delivery#statistics)."""
    with broker(path) as running:
        for i in range(10):
            running.put("orders", b"x", queue_id=i % 2)
        running.groups.create("billing")
        running.commit("billing", "orders", 0, 2)
        told = {tuple(queue): messages for queue, messages in running.lag("billing").items()}

    assert told == {("orders", 0): 3}
    assert behind(path, "billing") == {("orders", 0): (3, 0), ("orders", 1): (0, 0)}
    [found] = mqstore_json("lag", path)["groups"]
    assert found["messages"] == 3
    assert [(row["queue_id"], row["messages"], row["committed"]) for row in found["queues"]] == [
        (0, 3, 2),
        (1, None, None),
    ]
    shown = [line.split()[:4] for line in mqstore("lag", path, "--group", "billing").stdout.splitlines()]
    assert ["orders", "0", "2", "3"] in shown
    assert ["orders", "1", "-", "-"] in shown
    assert [row["behind"] for row in mqstore_json("offsets", path)["offsets"]] == [3, None]


@given(data=st.data())
def test_the_files_say_what_the_broker_says(data: st.DataObject) -> None:
    """Whatever was popped, settled, given back, read and committed; of the closed store and of the next opening."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        clock = clock_now()
        with broker(path, clock) as running:
            running.topics.create("orders", queues=2)
            held: dict[bool, list[str]] = {False: [], True: []}
            for _ in range(data.draw(st.integers(1, 12))):
                order = data.draw(st.booleans())
                group = "in_order" if order else "standard"
                match data.draw(st.sampled_from(("put", "pop", "ack", "release", "read", "tick"))):
                    case "put":
                        running.put("orders", b"x", queue_id=data.draw(st.integers(0, 1)))
                    case "pop":
                        n, visibility_s = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((1, 3600)))
                        found = running.pop(group, "orders", n, order=order, local=False, invisible=visibility_s)
                        held[order] += [each.receipt for each in found]
                    case "ack" | "release" as verb if held[order]:
                        receipt = held[order].pop(data.draw(st.integers(0, len(held[order]) - 1)))
                        with suppress(ReceiptExpiredError):
                            (running.ack if verb == "ack" else running.release)(group, "orders", [receipt])
                    case "read":
                        at = running.start_of("reads", "orders", 0)
                        result = running.read("orders", 0, at, 2, group="reads")
                        running.commit("reads", "orders", 0, data.draw(st.integers(at, result.next_offset)))
                    case "tick":
                        clock.advance(data.draw(st.sampled_from((10, 6_000))))
                        running.run_once()
            running.store.dispatch()
            groups = [name for name in ("standard", "in_order", "reads") if running.groups.get(name) is not None]
            told = {name: {tuple(queue): n for queue, n in running.lag(name).items()} for name in groups}
            running.save()  # else files know of pops, and not of groups that found nothing
            beside = {name: lags(path, name) for name in ("standard", "in_order") if name in groups}
        closed = {name: lags(path, name) for name in groups}
        with broker(path, clock) as running:
            after = {name: {tuple(queue): n for queue, n in running.lag(name).items()} for name in groups}
    assert closed == told == after
    assert beside == {name: told[name] for name in beside}


@pytest.mark.parametrize("order", [False, True], ids=["standard", "fifo"])
def test_unsettled_pop_is_in_flight(tmp_path: Path, order: bool) -> None:
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
    assert [(each["messages"], each["in_flight"]) for each in after] == [(8, 4)]
    assert [line.split()[:4] for line in mqstore("lag", tmp_path / "s").stdout.splitlines()[-1:]] == [
        ["billing", "8", "4", "0"]
    ]
    assert [(row["committed"], row["behind"]) for row in mqstore_json("offsets", tmp_path / "s")["offsets"]] == [(1, 8)]


def test_messages_before_a_start_are_not_in_flight(path: Path) -> None:
    """As the next opening has it, which does not wait for messages that were purged."""
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


def test_a_store_without_groups_is_fine(golden: Golden) -> None:
    path = golden("rolled").path

    assert mqstore_json("lag", path)["groups"] == []
    assert "no group" in mqstore("lag", path).stderr
