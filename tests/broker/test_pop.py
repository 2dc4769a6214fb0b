"""Popping without order: what is delivered, what settles it, and what comes again (delivery#pop)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.broker.filters import parse_filter
from mqstore.broker.names import POP_LOG_TOPIC, QueueKey, dlq_topic, pop_retry_topic
from mqstore.broker.pop.state import Batch, QueueState
from mqstore.errors import (
    ConfigError,
    GroupNotFoundError,
    InvalidReceiptError,
    NotPermittedError,
    ReceiptExpiredError,
    StoreFullError,
    TopicNotFoundError,
)
from tests.broker.popsupport import PopBench, bodies
from tests.broker.support import full

RETRY = pop_retry_topic("g", "t")
RETRY_V1 = pop_retry_topic("g", "t", 1)
DLQ = dlq_topic("g")
INVISIBLE_MS = 60_000


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PopBench]:
    with PopBench(tmp_path / "store") as bench:
        bench.parts.topics.create("t", queues=1)
        yield bench


# -- the first delivery -----------------------------------------------------------------------------------------------


def test_a_delivery_tells_what_a_receiver_needs(bench: PopBench) -> None:
    bench.put("t", 1)
    now_ms = bench.now_ms
    [delivery] = bench.pop()
    assert (delivery.topic, delivery.queue_id, delivery.attempt) == ("t", 0, 1)
    assert delivery.visible_at_ms == now_ms + INVISIBLE_MS
    assert delivery.receipt == f"0 {now_ms} 60000 0 0 mqstore 0 0"


def test_two_groups_do_not_see_each_other(bench: PopBench) -> None:
    bench.put("t", 2)
    assert bodies(bench.pop(n=2)) == bodies(bench.pop(group="other", n=2)) == [b"0", b"1"]


def test_all_queues_are_popped_from_wherever_it_begins(tmp_path: Path) -> None:
    for lucky in (0.20, 0.21, 0.22, 0.23, 0.99):
        with PopBench(tmp_path / f"{lucky}", rng=lambda lucky=lucky: lucky) as bench:
            bench.parts.topics.create("t", queues=3)
            for queue_id in range(3):
                bench.put("t", 2, queue_id=queue_id)
            found = bench.pop(n=5)
            assert len({(d.queue_id, d.message.offset) for d in found}) == 5
            assert found[0].queue_id == int(lucky * 100) % 3
            assert len(bench.pop(n=5)) == 1


def test_one_queue_can_be_named(tmp_path: Path) -> None:
    with PopBench(tmp_path / "store") as bench:
        bench.parts.topics.create("t", queues=2)
        bench.put("t", 1, queue_id=0)
        bench.put("t", 1, queue_id=1)
        assert [d.queue_id for d in bench.pop(queue_id=1, n=5)] == [1]
        with pytest.raises(ConfigError, match=r"0\.\.1"):
            bench.pop(queue_id=2)


@pytest.mark.parametrize(("start", "expected"), [("earliest", [b"0", b"1"]), ("latest", []), (None, [b"0", b"1"])])
def test_a_new_group_begins_where_it_is_told_and_that_is_committed(
    bench: PopBench, start: Any, expected: list[bytes]
) -> None:
    bench.put("t", 2)
    assert bodies(bench.pop(n=5, start=start)) == expected
    assert bench.committed() == (2 if start == "latest" else 0)
    bench.put("t", 1, first=2)
    assert bodies(bench.pop(n=5)) == [b"2"]


def test_a_group_begins_where_its_config_says(bench: PopBench) -> None:
    bench.put("t", 2)
    bench.parts.groups.create("g", start="latest")
    assert bench.pop(n=5) == []


@pytest.mark.parametrize(
    ("n", "invisible_ms"), [(0, 60_000), (33, 60_000), (1, 99), (1, 12 * 3_600_000 + 1), (-1, 100)]
)
def test_numbers_out_of_range_are_refused(bench: PopBench, n: int, invisible_ms: int) -> None:
    bench.put("t", 1)
    with pytest.raises(ConfigError):
        bench.pop(n=n, invisible_ms=invisible_ms)
    assert len(bench.pop(n=32, invisible_ms=100)) == 1


def test_unknown_and_forbidden_names_are_refused(bench: PopBench) -> None:
    bench.put("t", 1)
    with pytest.raises(TopicNotFoundError):
        bench.pop(topic="nowhere")
    with pytest.raises(GroupNotFoundError):
        bench.pop(group="a b")
    bench.parts.groups.create("off", consume_enable=False)
    with pytest.raises(NotPermittedError):
        bench.pop(group="off")
    bench.parts.topics.alter("t", perm=2)
    with pytest.raises(NotPermittedError):
        bench.pop()
    with pytest.raises(ConfigError, match="durability"):
        bench.pop(durability="soon")


def test_what_was_refused_is_refused_after_it_was_allowed(bench: PopBench) -> None:
    bench.put("t", 2)
    assert len(bench.pop()) == 1
    bench.parts.groups.alter("g", consume_enable=False)
    with pytest.raises(NotPermittedError):
        bench.pop()
    bench.parts.groups.alter("g", consume_enable=True)
    assert len(bench.pop()) == 1


# -- acknowledging ----------------------------------------------------------------------------------------------------


def test_only_what_is_not_acknowledged_comes_again_as_a_copy_in_the_retry_topic(bench: PopBench) -> None:
    bench.put("t", 5, tag="a", keys=["k1", "k2"], properties={"mine": "yes"})
    first = bench.pop(n=5)
    pop_time_ms = bench.now_ms
    bench.ack(first[0], first[2], first[3])
    assert bench.committed() == 1
    bench.advance(INVISIBLE_MS)
    assert bench.committed() == 5
    copies = bench.read(RETRY)
    assert [copy.body for copy in copies] == [b"1", b"4"]
    for copy, original in zip(copies, (first[1], first[4]), strict=True):
        assert copy.reconsume_times == 1
        assert copy.tag == "a"
        assert copy.keys == ("k1", "k2")
        assert copy.properties == {"mine": "yes"}
        assert copy.born_timestamp_ms == original.message.born_timestamp_ms
        assert copy.unique_key == original.message.message_id
        assert copy.stored_properties()["1ST_POP_TIME"] == str(pop_time_ms)
    again = bench.pop(n=5)
    assert bodies(again) == [b"1", b"4"]
    assert [d.attempt for d in again] == [2, 2]
    assert {d.topic for d in again} == {"t"}
    assert {d.receipt.split()[4] for d in again} == {"2"}


def test_a_copy_is_not_delayed_again(bench: PopBench) -> None:
    # A Java broker's delivered copy still bears DELAY: the put hook would divert the retry copy once more.
    bench.parts.store.append("t", 0, b"late", properties={"DELAY": "3", "TIMER_DELAY_SEC": "9", "TAGS": "a"})
    bench.pop()
    bench.advance(INVISIBLE_MS)
    [copy] = bench.read(RETRY)
    assert copy.stored_properties().keys() & {"DELAY", "TIMER_DELAY_SEC", "REAL_TOPIC"} == set()


def test_acknowledging_twice_changes_nothing(bench: PopBench) -> None:
    bench.put("t", 2)
    first, second = bench.pop(n=2)
    bench.ack(first)
    size = bench.log_size()
    bench.ack(first)
    assert bench.log_size() == size
    assert bench.service.in_flight() == 1
    bench.ack(first, second)
    bench.ack(second, first)
    assert bench.committed() == 2


def test_a_late_receipt_settles_until_the_copy_exists_and_then_it_has_expired(bench: PopBench) -> None:
    bench.put("t", 2)
    first, second = bench.pop(n=2)
    bench.clock.advance(INVISIBLE_MS + 5)  # the housekeeper has not come yet
    bench.ack(first)
    bench.settle()
    assert [copy.body for copy in bench.read(RETRY)] == [b"1"]
    bench.ack(first)
    size = bench.log_size()
    with pytest.raises(ReceiptExpiredError) as caught:
        bench.ack(second)
    assert list(caught.value.receipts) == [second.receipt]
    assert bench.log_size() == size
    assert bodies(bench.pop(n=5)) == [b"1"]


def test_of_many_receipts_the_late_ones_are_told_and_the_others_settle(bench: PopBench) -> None:
    bench.put("t", 3)
    late = bench.pop(invisible_ms=1_000)
    good = bench.pop(n=2)
    bench.advance(1_000)
    with pytest.raises(ReceiptExpiredError) as caught:
        bench.ack(good[0], *late, good[1])
    assert list(caught.value.receipts) == [late[0].receipt]
    assert bench.service.in_flight() == 0
    bench.ack(*bench.pop())
    bench.advance(INVISIBLE_MS)
    assert bench.pop(n=5) == []


@pytest.mark.parametrize(
    "receipt",
    [
        "nonsense",
        "0 {now} 60000 0 0 mqstore 7 0",
        "0 {now} 60000 0 0 mqstore 0 99",
        "0 {now} 60000 0 1 mqstore 0 0",
        "0 {now} 60000 0 2 mqstore 0 0",
        "0 {now} 60000 0 3 mqstore 0 0",
        "0 {now} 99999999999999999999 0 0 mqstore 0 0",
        "0 {now} 60000 999 0 mqstore 0 99",
    ],
)
def test_what_is_no_receipt_is_refused_and_nothing_of_the_call_is_settled(bench: PopBench, receipt: str) -> None:
    bench.put("t", 1)
    [delivery] = bench.pop()
    receipt = receipt.format(now=bench.now_ms)
    size = bench.log_size()
    calls: list[Callable[[], object]] = [
        lambda: bench.service.ack("g", "t", [delivery.receipt, receipt]),
        lambda: bench.service.release("g", "t", [delivery.receipt, receipt]),
        lambda: bench.service.change_invisible("g", "t", receipt, 1_000),
        lambda: bench.service.nack("g", "t", receipt),
        lambda: bench.service.dead_letter("g", "t", receipt, "why"),
    ]
    for call in calls:
        with pytest.raises(InvalidReceiptError):
            call()
    assert bench.log_size() == size
    assert bench.service.in_flight() == 1


def test_receipts_of_another_group_or_topic_are_refused(bench: PopBench) -> None:
    bench.put("t", 1)
    [delivery] = bench.pop()
    with pytest.raises(InvalidReceiptError):
        bench.service.ack("stranger", "t", delivery.receipt)
    with pytest.raises(TopicNotFoundError):
        bench.service.ack("g", "nowhere", delivery.receipt)
    assert bench.service.in_flight() == 1


# -- another visible time ---------------------------------------------------------------------------------------------


def test_a_receipt_changed_in_the_millisecond_of_its_pop_is_dead_all_the_same(bench: PopBench) -> None:
    bench.put("t", 1)
    [delivery] = bench.pop()
    receipt = bench.service.change_invisible("g", "t", delivery.receipt, INVISIBLE_MS)
    assert receipt != delivery.receipt
    with pytest.raises(ReceiptExpiredError):
        bench.service.change_invisible("g", "t", delivery.receipt, INVISIBLE_MS)
    bench.service.ack("g", "t", receipt)


@pytest.mark.parametrize("invisible_ms", [-1, 12 * 3_600_000 + 1])
def test_a_time_out_of_range_is_refused(bench: PopBench, invisible_ms: int) -> None:
    bench.put("t", 1)
    [delivery] = bench.pop()
    with pytest.raises(ConfigError):
        bench.service.change_invisible("g", "t", delivery.receipt, invisible_ms)
    with pytest.raises(ConfigError):
        bench.service.nack("g", "t", delivery.receipt, invisible_ms)
    bench.ack(delivery)


def test_a_nack_with_a_delay_waits_that_long(bench: PopBench) -> None:
    bench.put("t", 1)
    [delivery] = bench.pop()
    bench.clock.advance(1)
    assert bench.service.nack("g", "t", delivery.receipt, 0)
    bench.settle()
    [again] = bench.pop()
    assert again.attempt == 2


# -- dead letters -----------------------------------------------------------------------------------------------------


def test_the_last_attempt_ends_as_a_dead_letter_at_once(bench: PopBench) -> None:
    bench.parts.groups.create("g", retry_max_times=2)  # 3 attempts
    bench.put("t", 1)
    for attempt in (1, 2, 3):
        [delivery] = bench.pop()
        assert delivery.attempt == attempt
        bench.advance(INVISIBLE_MS)
    [dead] = bench.read(DLQ)
    assert dead.body == b"0"
    properties = dead.stored_properties()
    assert properties["DLQ_ORIGIN_TOPIC"] == "t"
    assert "attempt 3 of 3" in properties["dlq_reason"]
    assert [copy.reconsume_times for copy in bench.read(RETRY)] == [1, 2]
    with pytest.raises(ReceiptExpiredError):
        bench.ack(delivery)
    bench.advance(10 * INVISIBLE_MS)
    assert bench.pop() == []
    assert bench.committed(topic=RETRY) == 2


def test_a_delivery_can_be_moved_to_the_dead_letters(bench: PopBench) -> None:
    bench.put("t", 1)
    [delivery] = bench.pop()
    bench.service.dead_letter("g", "t", delivery.receipt, "cannot be parsed")
    [dead] = bench.read(DLQ)
    assert dead.properties["dlq_reason"] == "cannot be parsed"
    assert bench.committed() == 1
    with pytest.raises(ReceiptExpiredError):
        bench.service.dead_letter("g", "t", delivery.receipt, "again")
    bench.advance(INVISIBLE_MS)
    assert bench.read(RETRY) == []


def test_copies_over_the_limit_are_never_delivered(bench: PopBench) -> None:
    bench.put("t", 3)
    for _ in range(3):
        bench.pop(n=3)
        bench.advance(INVISIBLE_MS)
    bench.parts.groups.alter("g", retry_max_times=2)  # what waits has had its three attempts
    assert bench.pop(n=3) == []
    assert [dead.body for dead in bench.read(DLQ)] == [b"0", b"1", b"2"]
    assert bench.committed(topic=RETRY) == bench.parts.store.offsets(RETRY)[1]


def test_unlimited_attempts_never_end(bench: PopBench) -> None:
    bench.parts.groups.create("g", retry_max_times=2**31 - 1)
    bench.put("t", 1)
    for attempt in range(1, 30):
        [delivery] = bench.pop(invisible_ms=100)
        assert delivery.attempt == attempt
        bench.advance(100)


# -- given back -------------------------------------------------------------------------------------------------------


class Walked(dict[int, Any]):
    """Counts how often all of it is looked at."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        self.walks += 1
        return super().__iter__()


def test_a_pop_does_not_look_at_all_that_is_released(bench: PopBench) -> None:
    """Each pop sorted it: with 100 000 released one message took a millisecond."""
    bench.put("t", 60)
    found = [delivery for _ in range(2) for delivery in bench.pop(n=30)]
    bench.release(*found[::-1])
    state = bench.service._tables.states[QueueKey("g", "t", 0)]
    state.released = walked = Walked(state.released)
    assert [bodies(bench.pop(n=n)) for n in (1, 2)] == [[b"0"], [b"1", b"2"]]
    standing = bench.service.figures.standing(QueueKey("g", "t", 0))
    assert standing is not None
    assert standing.ready_from == 3
    assert walked.walks == 0


@given(st.lists(st.tuples(st.sampled_from(["release", "pop", "ack"]), st.integers(1, 5)), max_size=60))
def test_what_was_given_back_comes_lowest_offset_first(steps: list[tuple[str, int]]) -> None:
    """Given back twice, acknowledged after it was, or popped meanwhile."""
    state = QueueState(QueueKey("g", "t", 0))
    batch = Batch(0, range(20), 1, 1, True)
    state.in_flight = dict.fromkeys(range(20), batch)
    for name, (what, count) in enumerate(steps, 1):
        expected = sorted(state.released)[:count]
        assert state.first_released(count) == expected
        if what == "pop" and expected:
            state.add(Batch(name, expected, 1, 1, True), expected)
        elif what == "ack":
            for offset in list(state.released)[-count:]:
                state.settle(state.released[offset], [offset])
        elif what == "release":
            for offset, held in list(state.in_flight.items())[-count:]:
                state.give_back(held, [offset])
    assert state.first_released(99) == sorted(state.released)


# -- filters ----------------------------------------------------------------------------------------------------------


def test_a_filter_chooses_and_the_rest_is_passed_over(bench: PopBench) -> None:
    for i, tag in enumerate("abcab"):
        bench.put("t", 1, first=i, tag=tag)
    tags = parse_filter("b")
    found = bench.pop(n=5, filter=tags)
    assert bodies(found) == [b"1", b"4"]
    assert bench.committed() == 1
    bench.ack(found[0])
    assert bench.committed() == 4
    bench.ack(found[1])
    assert bench.committed() == 5
    assert bench.pop(n=5) == []


def test_a_filter_that_matches_nothing_moves_the_offset(bench: PopBench) -> None:
    bench.put("t", 2_000, tag="a")
    assert bench.pop(n=5, filter=parse_filter("b")) == []
    assert bench.committed() == 2_000


def test_what_was_read_ahead_for_another_filter_is_not_delivered(bench: PopBench) -> None:
    for i in range(20):
        bench.put("t", 1, first=i, tag="ab"[i % 2])
    assert bodies(bench.pop(n=2)) == [b"0", b"1"]
    assert bodies(bench.pop(n=2, filter=parse_filter("b"))) == [b"3", b"5"]
    assert bodies(bench.pop(n=2)) == [b"6", b"7"]


def test_copies_are_not_filtered_again(bench: PopBench) -> None:
    bench.put("t", 1, tag="a")
    bench.pop(filter=parse_filter("a"))
    bench.advance(INVISIBLE_MS)
    assert bodies(bench.pop(filter=parse_filter("b"))) == [b"0"]


# -- the retry topic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lucky", "expected"), [(0.19, b"0"), (0.20, b"1")])
def test_one_pop_in_five_looks_at_the_retry_topic_first(tmp_path: Path, lucky: float, expected: bytes) -> None:
    with PopBench(tmp_path / "store", rng=lambda: lucky) as bench:
        bench.parts.topics.create("t", queues=1)
        bench.put("t", 1)
        bench.pop()
        bench.advance(INVISIBLE_MS)
        bench.put("t", 1, first=1)
        assert bodies(bench.pop()) == [expected]


def test_a_batch_that_is_not_full_is_filled_from_the_retry_topic(bench: PopBench) -> None:
    bench.put("t", 2)
    bench.pop(n=2)
    bench.advance(INVISIBLE_MS)
    bench.put("t", 1, first=2)
    assert bodies(bench.pop(n=2)) == [b"2", b"0"]


def test_copies_go_to_version_1_by_option_and_both_are_read(tmp_path: Path) -> None:
    with PopBench(tmp_path / "store", pop_retry_version=1) as bench:
        bench.parts.topics.create("t", queues=1)
        bench.put("t", 1)
        bench.pop()
        bench.advance(INVISIBLE_MS)
        assert [copy.body for copy in bench.read(RETRY_V1)] == [b"0"]
        bench.reopen(pop_retry_version=2)
        bench.put("t", 1, first=1)
        bench.pop()
        bench.advance(INVISIBLE_MS)
        assert [copy.body for copy in bench.read(RETRY)] == [b"1"]
        found = bench.pop(n=5)
        assert sorted(bodies(found)) == [b"0", b"1"]
        assert {d.receipt.split()[4] for d in found} == {"1", "2"}
        bench.ack(*found)
        assert bench.service.in_flight() == 0


def test_a_retry_topic_of_version_1_that_may_be_another_groups_is_left_alone(bench: PopBench) -> None:
    bench.parts.groups.create("g_t")
    bench.parts.topics.ensure(RETRY_V1, 1)
    bench.parts.store.put(RETRY_V1, b"of the queue model")
    assert bench.pop(n=5) == []


# -- reset, deletion --------------------------------------------------------------------------------------------------


def test_a_reset_during_flight_begins_anew_and_expires_what_is_out(bench: PopBench) -> None:
    bench.put("t", 6)
    out = bench.pop(n=4)
    bench.ack(out[3])
    bench.reset(1)
    for delivery in out[1:3]:
        with pytest.raises(ReceiptExpiredError):
            bench.ack(delivery)
    again = bench.pop(n=5)  # in the same millisecond: the old receipts must not fit the new deliveries
    assert bodies(again) == [b"1", b"2", b"3", b"4", b"5"]
    for delivery in out[1:]:
        with pytest.raises(ReceiptExpiredError):
            bench.ack(delivery)
    bench.ack(*again)
    assert bench.committed() == 6
    bench.advance(INVISIBLE_MS)
    assert bench.read(RETRY) == []


def test_a_reset_that_nobody_told_of_counts_at_the_next_pop(bench: PopBench) -> None:
    bench.put("t", 6)
    bench.pop(n=4)
    bench.parts.offsets.reset(QueueKey("g", "t", 0), 5)
    assert bodies(bench.pop(n=5)) == [b"5"]


def test_a_deleted_topic_takes_its_deliveries_along(bench: PopBench) -> None:
    bench.put("t", 3)
    bench.pop(n=2)
    bench.parts.topics.delete("t", force=True)
    bench.parts.topics.create("t", queues=1)
    bench.put("t", 1, first=7)
    bench.advance(INVISIBLE_MS)
    assert bodies(bench.pop(n=5)) == [b"7"]
    bench.crash()
    assert [(p.topic, p.offset) for p in bench.service.pending("g")] in ([("t", 3)], [])
    bench.settle()
    assert bodies(bench.pop(n=5)) == [b"7"]


# -- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [False, True])
def test_a_pop_that_cannot_be_logged_hands_out_nothing(
    bench: PopBench, monkeypatch: pytest.MonkeyPatch, order: bool
) -> None:
    bench.put("t", 3)
    monkeypatch.setitem(bench.service._tables.log._put, "ck", full)
    with pytest.raises(StoreFullError):
        bench.pop(n=2, order=order)
    monkeypatch.undo()
    assert bodies(bench.pop(n=5, order=order)) == [b"0", b"1", b"2"]


def test_a_copy_that_cannot_be_put_is_put_later_and_nothing_is_lost(
    bench: PopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put("t", 200)
    for _ in range(7):
        bench.pop(n=32)
    puts = iter(range(70))
    copy = bench.parts.road.copy

    def some(*args: Any, **options: Any) -> Any:
        if next(puts, None) is None:
            full()
        return copy(*args, **options)

    monkeypatch.setattr(bench.parts.road, "copy", some)
    with pytest.raises(StoreFullError):
        bench.advance(INVISIBLE_MS)
    assert len(bench.read(RETRY)) == 70
    monkeypatch.undo()
    bench.advance(INVISIBLE_MS)
    assert sorted(copy.body for copy in bench.read(RETRY)) == sorted(str(i).encode() for i in range(200))
    assert bench.committed() == 200


def test_an_ack_that_cannot_be_logged_settles_nothing(bench: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("t", 1)
    [delivery] = bench.pop()
    monkeypatch.setitem(bench.service._tables.log._put, "ack", full)
    with pytest.raises(StoreFullError):
        bench.ack(delivery)
    monkeypatch.undo()
    assert bench.committed() == 0
    bench.ack(delivery)
    assert bench.committed() == 1


def test_a_message_that_retention_took_in_flight_is_given_up_and_counted(bench: PopBench) -> None:
    bench.put("t", 3, body_bytes=30_000)
    bench.pop(n=3)
    bench.put("t", 2, first=3, body_bytes=30_000)
    bench.parts.store.flush()
    bench.parts.store.dispatch()
    bench.parts.store.drop_before(bench.parts.store.max_offset)
    assert bench.parts.store.offsets("t")[0] > 0
    bench.advance(INVISIBLE_MS)
    assert bench.service.in_flight() == 0
    kept = [copy.body[:1] for copy in bench.read(RETRY)]
    lost = sum(bench.parts.statistics.snapshot().lost.values())
    assert len(kept) + lost == 3
    assert lost > 0


def test_positions_below_the_first_message_are_counted_as_lost(bench: PopBench) -> None:
    bench.pop()
    bench.put("t", 6, body_bytes=30_000)
    bench.parts.store.flush()
    bench.parts.store.dispatch()
    bench.parts.store.drop_before(bench.parts.store.max_offset)
    low, _ = bench.parts.store.offsets("t")
    assert low > 0
    [delivery] = bench.pop()
    assert delivery.message.offset == low
    assert sum(bench.parts.statistics.snapshot().lost.values()) == low


# -- what is shown, and waiting ---------------------------------------------------------------------------------------


def test_a_parked_receiver_is_woken_by_a_message_a_copy_and_a_release(bench: PopBench) -> None:
    fired: list[bool] = []
    assert bench.pop() == []

    def park() -> None:
        fired.clear()
        bench.service.add_waiter("g", "t", -1, None, fired.append)
        bench.settle()

    park()
    assert fired == []
    bench.put("t", 1)
    bench.settle()
    assert fired == [True]
    [delivery] = bench.pop()
    park()
    assert fired == []
    bench.release(delivery)
    bench.settle()
    assert fired == [True]
    bench.pop()
    park()
    assert fired == []
    bench.advance(INVISIBLE_MS)
    assert fired == [True]
    park()  # the copy is there already
    assert fired == [True]


def test_a_receiver_that_left_something_over_wakes_the_next(bench: PopBench) -> None:
    fired: list[str] = []
    assert bench.pop() == []
    for name in ("a", "b"):
        bench.service.add_waiter("g", "t", -1, None, lambda _, name=name: fired.append(name))
    bench.parts.store.put_many("t", [b"0", b"1", b"2"])
    bench.settle()
    bench.pop()
    bench.settle()
    assert fired == ["a", "b"]


def test_who_cannot_wait_is_not_left_parked(bench: PopBench) -> None:
    with pytest.raises(TopicNotFoundError):
        bench.service.add_waiter("g", "nowhere", -1, None, lambda worth: None)
    assert bench.service._waiters.parked == 0


def test_waiting_for_what_is_there_does_not_wait(bench: PopBench) -> None:
    bench.put("t", 1)
    assert bench.service.wait_for("g", "t", -1, None, False, 100)
    bench.pop()
    assert not bench.service.wait_for("g", "t", -1, None, False, 0)


def test_the_pop_log_has_the_records_of_delivery_pop_log(bench: PopBench) -> None:
    bench.put("t", 4)
    now_ms = bench.now_ms
    first = bench.pop(n=3)
    bench.ack(first[0], first[2])
    bench.service.change_invisible("g", "t", first[1].receipt, 1_000)
    bench.release(*bench.pop())
    bench.advance(1_000)
    log = bench.read(POP_LOG_TOPIC)
    assert [(record.tag, record.json()) for record in log] == [
        ("ck", {"t": "t", "c": "g", "q": 0, "so": 0, "pt": now_ms, "it": 60_000, "d": [0, 1, 2], "nx": 3, "l": 1}),
        ("ack", {"k": 0, "o": [0, 2]}),
        ("chg", {"k": 0, "o": 1, "pt": now_ms + 1, "it": 999}),
        ("ck", {"t": "t", "c": "g", "q": 0, "so": 3, "pt": now_ms, "it": 60_000, "d": [0], "nx": 4, "l": 1}),
        ("rel", {"k": 3, "o": [3]}),
        ("rev", {"k": 0, "o": [1]}),
    ]


@pytest.mark.parametrize("order", [False, True])
def test_receiver_waits_for_deliveries_of_the_other_order(bench: PopBench, order: bool) -> None:
    """It looked again at once, found nothing, and so on: a core at 100% until its time was over."""
    bench.put("t", 4)
    bench.pop(order=not order)
    assert not bench.service.wait_for("g", "t", -1, None, order, 0)
    woken: list[bool] = []
    bench.service.add_waiter("g", "t", -1, None, woken.append, order=order)
    bench.settle()
    assert woken == []
    if not order:  # once the batch in order has ended
        bench.advance(60_000)
        assert woken == [True]


def test_released_retry_wakes_a_receiver_of_another_queue(tmp_path: Path) -> None:
    """Whoever waits on a queue is given retries as well, but only who waited on queue 0 was told."""
    woken: list[bool] = []
    with PopBench(tmp_path) as bench:
        bench.put("t", 1, queue_id=3)
        bench.pop(invisible_ms=1_000)
        bench.advance(1_000)
        [retry] = bench.pop()
        bench.service.add_waiter("g", "t", 3, None, woken.append)
        bench.release(retry)
        bench.settle()
        assert woken == [True]
        assert bodies(bench.pop(queue_id=3)) == [b"0"]
