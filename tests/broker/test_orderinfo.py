"""Order info: delivery#order-vectors, a model of delivery#order-rules in other words, and the file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqstore.broker.pop.orderinfo import ILLEGAL, NO_COMMIT, OrderInfo, OrderInfoTable, Suspended, check_order_info
from mqstore.broker.pop.receipts import parse_counts, topic_mark
from mqstore.files.jsonfile import decode_json, encode_json

T0 = 1_000_000
INV = 60_000
KEY = ("t", "g", 0)


def pop(at: int, offsets: Any, expected: str, attempt: str | None = None, inv: int = INV) -> Any:
    """Pop at T0+at; the count string that the answer carries."""

    def step(table: OrderInfoTable) -> None:
        counts = table.update(attempt, *KEY, T0 + at, inv, list(offsets), T0 + at)
        assert counts.count_string(topic_mark("t")) == expected

    return step


def ack(expected: int, offset: int, popped: int = 0, committed: int | None = -7) -> Any:
    """Ack `offset` with the pop time T0+popped."""

    def step(table: OrderInfoTable) -> None:
        assert table.commit_and_next(*KEY, offset, T0 + popped, committed) == expected

    return step


def change(changed: bool, offset: int, to: int, popped: int = 0) -> Any:
    def step(table: OrderInfoTable) -> None:
        assert table.update_next_visible_time(*KEY, offset, T0 + popped, T0 + to) is changed

    return step


def blocked(expected: bool, at: int, attempt: str | None = None, inv: int = INV) -> Any:
    def step(table: OrderInfoTable) -> None:
        assert table.check_block(attempt, *KEY, inv, T0 + at) is expected

    return step


def free(expected: int | None, at: int) -> Any:
    """lock_free_ms at T0+at; `expected` absolute."""

    def step(table: OrderInfoTable) -> None:
        assert table.lock_free_ms(*KEY, T0 + at) == expected

    return step


def next_is(expected: int) -> Any:
    def step(table: OrderInfoTable) -> None:
        assert table.next_offset(*KEY) == expected

    return step


def entry(**members: Any) -> Any:
    """The members of the file's entry; None: absent."""

    def step(table: OrderInfoTable) -> None:
        stored = table.as_json()["table"]["t@g"]["0"]
        assert {name: stored.get(name) for name in members} == members

    return step


def clear(table: OrderInfoTable) -> None:
    table.clear_block(*KEY)


def reload(table: OrderInfoTable) -> None:
    text = encode_json(table.as_json())
    table.load({"table": {}})
    table.load(decode_json(text))


def file_of_old(**members: Any) -> Any:
    return lambda table: table.load({"table": {"t@g": {"0": members}}})


def other_queue_popped(table: OrderInfoTable) -> None:
    table.update(None, "t", "g", 1, T0, INV, [5, 6], T0)


V1 = [
    pop(0, range(8), "0 0 0"),
    entry(o=list(range(8)), cm=0, oc=None, ot=None, a=None, i=INV, popTime=T0, l=T0),
    blocked(True, 0),
    free(1_060_000, 0),
    next_is(0),
]
V2 = [*V1, ack(0, 3), entry(cm=8), blocked(True, 0)]
V3 = [*V2, ack(1, 0), entry(cm=9), ack(2, 1), ack(4, 2), entry(cm=15), next_is(4)]
V4 = [*V3, ack(4, 0), ack(ILLEGAL, 9), ack(NO_COMMIT, 4, popped=-1), entry(cm=15)]
V5 = [*V3, blocked(True, 59_999), blocked(False, 60_000)]
V6 = [
    *V5,
    pop(60_000, range(4, 12), "0 qo0%4 1;0 qo0%5 1;0 qo0%6 1;0 qo0%7 1;0 0 0"),
    entry(o=[4, 1, 2, 3, 4, 5, 6, 7], cm=0, oc={"4": 1, "5": 1, "6": 1, "7": 1}),
]
V7 = [*V6, ack(NO_COMMIT, 4, popped=0), entry(cm=0), ack(5, 4, popped=60_000), entry(cm=1)]
V8 = [
    *V7,
    *(ack(offset + 1, offset, popped=60_000) for offset in range(5, 12)),
    entry(cm=255),
    blocked(False, 60_001),
    free(1_060_001, 60_001),
    ack(12, 11, popped=60_000),
    next_is(12),
]
V9_HALF = [pop(0, [0, 1, 2], "0 0 0"), ack(0, 1), change(True, 0, 5_000), free(1_005_000, 0), blocked(True, 5_000)]
V9 = [*V9_HALF, blocked(True, 59_999), free(1_060_000, 5_000), ack(0, 2), blocked(False, 5_000)]
V10 = [*V9, pop(5_000, [0, 1, 2], "0 qo0%0 1;0 qo0%1 1;0 qo0%2 1;0 0 1"), entry(ot=None, cm=0), blocked(True, 5_001)]
V11 = [
    pop(0, [0, 1], "0 0 0", inv=10_000),
    change(True, 1, 30_000),
    blocked(True, 10_000),
    free(1_030_000, 10_000),
    blocked(True, 29_999),
    blocked(False, 30_000),
    free(1_030_000, 30_000),
    change(False, 1, 99_000, popped=-1),
    blocked(False, 30_000),
    change(True, 77, 99_000),
    entry(ot={"1": 1_030_000, "77": 1_099_000}),
    blocked(False, 30_000),
]
V12 = [pop(0, [0, 1, 2], "0 0 0", "A1"), blocked(True, 0), blocked(True, 0, "A2"), blocked(False, 0, "A1")]
V13 = [
    *V12,
    ack(1, 0),
    pop(10, [1, 2, 3], "0 0 0", "A1"),
    entry(oc={}, cm=0, popTime=T0 + 10),
    ack(NO_COMMIT, 1, popped=0),
    ack(2, 1, popped=10),
    blocked(True, 60_009, "A2"),
    blocked(False, 60_010, "A2"),
    pop(60_010, [2, 3], "0 qo0%2 1;0 qo0%3 1;0 0 1", "A2"),
    entry(oc={"2": 1, "3": 1}),
]
V14 = [
    pop(0, range(8), "0 0 0", "A1"),
    ack(1, 0),
    ack(2, 1),
    blocked(True, 59_999, "A2"),
    free(1_060_000, 0),
    blocked(False, 60_000, "A2"),
    pop(60_000, range(2, 10), ";".join(f"0 qo0%{x} 1" for x in range(2, 8)) + ";0 0 0", "A2"),
    ack(NO_COMMIT, 2, popped=0),
]
V15 = [
    pop(0, range(8), "0 0 0", "A1"),
    ack(1, 0),
    ack(1, 3),
    change(True, 1, 90_000),
    reload,
    entry(a="A1", cm=9, i=60_000, oc=None, ot={"1": 1_090_000}),
    blocked(True, 30_000, "A2"),
    blocked(False, 30_000, "A1"),
    ack(2, 1),
    ack(4, 2),
]
# 9.8: RocketMQ answers offset + 1 to every ack without a record; here only to the one that the committed offset names.
V16 = [ack(6, 5, committed=5), ack(NO_COMMIT, 5, committed=4), other_queue_popped, ack(6, 5, committed=5)]
V16 += [ack(NO_COMMIT, 5, committed=None)]
V17 = [
    pop(0, [10, 13, 20], "0 0 0"),
    entry(o=[10, 3, 10]),
    ack(13, 10),
    ack(ILLEGAL, 11),
    ack(13, 20),
    ack(21, 13),
]
V18 = [
    pop(0, [5, 6], "0 0 0", inv=1_000),
    entry(oc=None),
    pop(1_000, [5, 6], "0 qo0%5 1;0 qo0%6 1;0 0 1", inv=1_000),
    pop(2_000, [5, 6], "0 qo0%5 2;0 qo0%6 2;0 0 2", inv=1_000),
    pop(3_000, [5, 6], "0 qo0%5 3;0 qo0%6 3;0 0 3", inv=1_000),
    pop(4_000, [6, 7], "0 qo0%6 4;0 0 0", inv=1_000),
    entry(oc={"6": 4}),
]
V19 = [pop(0, [0, 1, 2], "0 0 0"), clear, blocked(False, 0), next_is(NO_COMMIT), free(None, 0), ack(1, 0, committed=0)]
V20 = [
    pop(0, [0], "0 0 0", inv=0),
    free(None, 0),
    blocked(True, 0, inv=5_000),
    entry(i=5_000),
    free(1_005_000, 0),
    blocked(False, 5_000),
]
V21 = [
    pop(0, range(100, 132), "0 0 0"),
    *(ack(100, offset) for offset in range(131, 100, -1)),
    ack(132, 100),
    entry(cm=4_294_967_295),
]
V22 = [
    file_of_old(cm=1, l=T0, o=[4, 1, 2], c=3),
    blocked(False, 0),
    blocked(False, 0, inv=10**9),  # simulated clocks stand near 0, where popTime 0 + i may lie in the future
    ack(NO_COMMIT, 4, popped=0),
    ack(NO_COMMIT, 5, popped=-T0),
    next_is(5),
    pop(0, [5, 6, 7], "0 qo0%5 1;0 qo0%6 1;0 0 0"),
    ack(6, 5),
    blocked(True, 1),
]
V23 = [pop(0, [0, 1], "0 0 0"), ack(1, 0), ack(2, 1), pop(5, [2, 3], "0 0 0"), entry(oc={}, cm=0)]

VECTORS = {
    "V1": V1, "V2": V2, "V3": V3, "V4": V4, "V5": V5, "V6": V6, "V7": V7, "V8": V8, "V9": V9, "V10": V10, "V11": V11,
    "V12": V12, "V13": V13, "V14": V14, "V15": V15, "V16": V16, "V17": V17, "V18": V18, "V19": V19, "V20": V20,
    "V21": V21, "V22": V22, "V23": V23,
}  # fmt: skip


@pytest.mark.parametrize("steps", VECTORS.values(), ids=VECTORS.keys())
def test_vector(steps: list[Any]) -> None:
    table = OrderInfoTable()
    for step in steps:
        step(table)


def test_v24_the_mark_of_a_retry_topic_is_1() -> None:
    topic = "%RETRY%g_t"
    counts = OrderInfoTable().update(None, topic, "g", 0, T0, INV, [0], T0)
    assert counts.count_string(topic_mark(topic)) == "1 0 0"


def test_v8_of_a_second_consumer_sees_only_what_the_first_left() -> None:
    """Two consumers, one queue (after V24): the second finds nothing until all is acked, then the queue is free."""
    table = OrderInfoTable()
    table.update("C1", *KEY, T0, INV, range(8), T0)
    for offset in range(7):
        table.commit_and_next(*KEY, offset, T0, 0)
        assert table.check_block("C2", *KEY, INV, T0 + 1)
    assert table.commit_and_next(*KEY, 7, T0, 0) == 8
    assert not table.check_block("C2", *KEY, INV, T0 + 1)


# --- against a model -----------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """9.2 with sets and per-message facts instead of bitmaps and deltas."""

    popped: int
    attempt: str | None
    due: dict[int, int]
    redeliveries: dict[int, int]
    done: set[int] = field(default_factory=set)

    def open(self) -> list[int]:
        return sorted(set(self.due) - self.done)


class Model:
    def __init__(self) -> None:
        self.batch: Batch | None = None

    def pop(self, attempt: str | None, now: int, inv: int, offsets: list[int]) -> dict[int, int]:
        old = self.batch
        redeliveries = {}
        for offset in offsets:
            if old is not None and attempt is not None and attempt == old.attempt:
                redeliveries[offset] = old.redeliveries.get(offset, 0)
            elif old is not None and offset in old.due:
                redeliveries[offset] = old.redeliveries.get(offset, 0) + 1
            else:
                redeliveries[offset] = 0
        carried = dict(old.redeliveries) if old is not None and attempt is not None and attempt == old.attempt else {}
        self.batch = Batch(now, attempt, dict.fromkeys(offsets, now + inv), {**carried, **redeliveries})
        return redeliveries

    def ack(self, offset: int, popped: int, committed: int) -> int:
        if self.batch is None:
            return offset + 1 if offset == committed else -2
        if popped != self.batch.popped:
            return -2
        if offset not in self.batch.due:
            return -1
        self.batch.done.add(offset)
        return self.first()

    def first(self) -> int:
        assert self.batch is not None
        return min(self.batch.open(), default=max(self.batch.due) + 1)

    def blocked(self, attempt: str | None, now: int) -> bool:
        if self.batch is None or (attempt is not None and attempt == self.batch.attempt):
            return False
        return max((self.batch.due[offset] for offset in self.batch.open()), default=now) > now

    def free_at(self, now: int) -> int | None:
        if self.batch is None:
            return None
        return next((self.batch.due[offset] for offset in self.batch.open() if self.batch.due[offset] > now), now)


attempts = st.sampled_from([None, "A", "B"])
few = st.integers(0, 12)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("pop"), attempts, st.sets(few, min_size=1, max_size=6), st.integers(1, 50)),
        st.tuples(st.just("ack"), few, st.booleans()),
        st.tuples(st.just("change"), few, st.integers(0, 80), st.booleans()),
        st.tuples(st.just("wait"), st.integers(0, 40)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("reload")),
    ),
    max_size=40,
)


@given(steps)
@settings(max_examples=300, deadline=None)
def test_every_answer_is_that_of_a_model(steps: list[tuple[Any, ...]]) -> None:
    table, model, now, popped = OrderInfoTable(), Model(), 1_000, 0
    for step in steps:
        match step:
            case ("pop", attempt, offsets, inv):
                now += 1  # pop times differ, as they do between requests that a queue lock separates
                popped = now
                counts = table.update(attempt, *KEY, now, inv, sorted(offsets), now)
                expected = model.pop(attempt, now, inv, sorted(offsets))
                assert {offset: counts.of(offset) for offset in offsets} == expected
                assert counts.queue == min(expected.values())
            case ("ack", offset, good):
                time = popped if good else popped - 1
                assert table.commit_and_next(*KEY, offset, time, 3) == model.ack(offset, time, 3)
            case ("change", offset, delta, good):
                table.update_next_visible_time(*KEY, offset, popped if good else popped - 1, now + delta)
                if good and model.batch is not None and offset in model.batch.due:
                    model.batch.due[offset] = now + delta
            case ("wait", delta):
                now += delta
            case ("clear",):
                clear(table)
                model.batch = None
            case _:
                reload(table)
        for attempt in (None, "A", "B"):
            assert table.check_block(attempt, *KEY, 7, now) is model.blocked(attempt, now)
        assert table.lock_free_ms(*KEY, now) == model.free_at(now)
        assert table.next_offset(*KEY) == (-2 if model.batch is None else model.first())


@given(st.sets(st.integers(0, 2**62), min_size=1, max_size=63), st.data())
def test_committing_never_passes_an_unacked_message(offsets: set[int], data: st.DataObject) -> None:
    table = OrderInfoTable()
    batch = sorted(offsets)
    table.update(None, *KEY, T0, INV, batch, T0)
    rest = set(batch)
    for offset in data.draw(st.permutations(batch)):
        rest.discard(offset)
        assert table.commit_and_next(*KEY, offset, T0, None) == min(rest, default=batch[-1] + 1)


# --- what a batch may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", [[], [3, 3], [4, 3], [-1, 0], range(64)])
def test_a_batch_that_cannot_be_changes_nothing(offsets: Any) -> None:
    table = OrderInfoTable()
    table.update(None, *KEY, T0, INV, [1, 2], T0)
    before = table.as_json()
    with pytest.raises(ValueError, match="ascending"):
        table.update(None, *KEY, T0 + 1, INV, list(offsets), T0 + 1)
    assert table.as_json() == before


@pytest.mark.parametrize(("popped", "invisible"), [(0, 1), (-1, 1), (T0, -1)])
def test_times_that_cannot_be_are_refused(popped: int, invisible: int) -> None:
    with pytest.raises(ValueError, match="pop time"):
        OrderInfoTable().update(None, *KEY, popped, invisible, [0], T0)


def test_63_messages_are_acked_without_wrapping() -> None:
    table = OrderInfoTable()
    table.update(None, *KEY, T0, INV, range(63), T0)
    assert [table.commit_and_next(*KEY, offset, T0, 0) for offset in range(63)] == list(range(1, 64))
    assert table.as_json()["table"]["t@g"]["0"]["cm"] == 2**63 - 1


def test_queues_groups_and_topics_are_apart() -> None:
    table = OrderInfoTable()
    table.update(None, *KEY, T0, INV, [0], T0)
    for other in (("t", "g", 1), ("t", "h", 0), ("u", "g", 0)):
        assert not table.check_block(None, *other, INV, T0)
    assert table.check_block(None, *KEY, INV, T0)


# --- given back unseen (delivery#pop-log) -----------------------------------------------------------------------------


def test_a_released_message_is_free_at_once_and_its_delivery_does_not_count() -> None:
    table = OrderInfoTable()
    table.update(None, *KEY, T0, INV, [0, 1, 2], T0)
    table.commit_and_next(*KEY, 0, T0, 0)
    assert table.release(*KEY, [1, 2, 77], T0, T0 + 5)
    assert not table.check_block(None, *KEY, INV, T0 + 5)
    counts = table.update(None, *KEY, T0 + 5, INV, [1, 2], T0 + 5)
    assert (counts.of(1), counts.of(2)) == (0, 0)
    entry(oc={})(table)  # only redeliveries are written
    assert table.update(None, *KEY, T0 + INV + 5, INV, [1, 2], T0).count_string() == "0 qo0%1 1;0 qo0%2 1;0 0 1"


def test_releasing_twice_and_across_a_restart_is_releasing_once() -> None:
    table = OrderInfoTable()
    table.update(None, *KEY, T0, INV, [0, 1], T0)
    table.update(None, *KEY, T0 + 1, INV, [0, 1], T0 + 1)
    table.release(*KEY, [1], T0 + 1, T0 + 2)
    reload(table)
    table.release(*KEY, [1], T0 + 1, T0 + 2)
    counts = table.update(None, *KEY, T0 + INV, INV, [0, 1], T0 + INV)
    assert (counts.of(0), counts.of(1)) == (2, 1)


def test_releasing_an_old_batch_changes_nothing() -> None:
    table = OrderInfoTable()
    table.update(None, *KEY, T0, INV, [0], T0)
    before = table.as_json()
    assert not table.release(*KEY, [0], T0 - 1, T0)
    assert not table.release("t", "g", 1, [0], T0, T0)
    assert table.as_json() == before


# --- attempts of the queue model (delivery#order-file) ----------------------------------------------------------------


def test_attempts_survive_a_restart_in_the_documented_shape() -> None:
    table = OrderInfoTable()
    table.note_attempt("g", "t", 0, 12, 1, T0, "KeyError: 'id'")
    table.note_attempt("g", "t", 0, 10, 3, T0 + 1)
    assert table.as_json()["table"]["t@g"]["0"] == {
        "popTime": 0,
        "cm": 0,
        "o": [10, 2],
        "oc": {"10": 3, "12": 1},
        "l": T0 + 1,
        "susp": {"10": [3, T0 + 1, ""], "12": [1, T0, "KeyError: 'id'"]},
    }
    reload(table)
    assert table.attempts("g", "t", 0) == {10: 3, 12: 1}
    assert table.suspended("g", past) == {}
    assert table.suspended("g", lambda *queue: 11) == {("t", 0): Suspended(12, 1, T0, "KeyError: 'id'")}


def test_a_failed_message_is_known_until_it_is_acknowledged() -> None:
    table = OrderInfoTable()
    table.update(None, *KEY, T0, INV, [4, 5, 6], T0)
    table.note_failed(*KEY, 5, 1, T0 + 1, "no")
    table.note_failed(*KEY, 4, 1, T0 + 2, "")
    table.note_failed(*KEY, 7, 1, T0 + 2, "never popped")
    table.update(None, *KEY, T0 + 3, INV, [4, 5], T0 + 3)
    table.note_failed(*KEY, 5, 2, T0 + 4, "not yet")
    reload(table)
    assert table.suspended("g", lambda *queue: 4) == {("t", 0): Suspended(4, 1, T0 + 2, "")}
    assert table.suspended("h", lambda *queue: 4) == {}

    table.commit_and_next(*KEY, 4, T0 + 3, 4)
    assert table.suspended("g", lambda *queue: 5) == {("t", 0): Suspended(5, 2, T0 + 1, "not yet")}
    table.commit_and_next(*KEY, 5, T0 + 3, 5)
    table.note_failed(*KEY, 5, 3, T0 + 5, "too late")
    table.update(None, *KEY, T0 + 6, INV, [5, 6], T0 + 6)
    assert table.suspended("g", lambda *queue: 0) == {}


def test_failures_of_offsets_that_are_gone_are_forgotten() -> None:
    table = OrderInfoTable()
    for offset in (3, 4):
        table.note_attempt("g", "t", 0, offset, 1, T0, "no")
    assert table.cut(lambda topic, queue_id: 4)
    record = table.get(*KEY)
    assert record is not None
    assert list(record.suspended) == [3]


def test_attempts_block_no_pop_and_take_no_ack() -> None:
    table = OrderInfoTable()
    table.note_attempt("g", "t", 0, 10, 3, T0)
    assert not table.check_block(None, *KEY, 10**12, T0)
    assert table.commit_and_next(*KEY, 10, T0, 10) == NO_COMMIT
    assert table.commit_and_next(*KEY, 10, 0, 10) == NO_COMMIT
    assert not table.update_next_visible_time(*KEY, 10, 0, T0)


def test_attempts_are_dropped_when_the_queue_moves_on() -> None:
    table = OrderInfoTable()
    for offset in (10, 11, 12):
        table.note_attempt("g", "t", 0, offset, 2, T0)
    table.drop_attempts("g", "t", 0, 10)
    assert table.attempts("g", "t", 0) == {10: 2, 11: 2, 12: 2}
    table.drop_attempts("g", "t", 0, 12)
    assert table.attempts("g", "t", 0) == {12: 2}
    table.drop_attempts("g", "t", 0, 13)
    assert table.attempts("g", "t", 0) == {}
    assert table.get(*KEY) is None


def test_an_attempt_of_0_forgets_it() -> None:
    table = OrderInfoTable()
    table.note_attempt("g", "t", 0, 10, 2, T0)
    table.note_attempt("g", "t", 0, 10, 0, T0)
    assert table.attempts("g", "t", 0) == {}


def test_dropping_attempts_leaves_a_popped_batch_alone() -> None:
    table = OrderInfoTable()
    table.update(None, *KEY, T0, INV, [0, 1], T0)
    table.update(None, *KEY, T0 + 1, INV, [0, 1], T0)
    table.drop_attempts("g", "t", 0, 99)
    assert table.attempts("g", "t", 0) == {}
    assert table.check_block(None, *KEY, INV, T0 + 1)


def test_a_pop_after_orderly_attempts_goes_on_counting_from_them() -> None:
    """Three failed attempts, then the group pops: this delivery is the fourth, three redeliveries."""
    table = OrderInfoTable()
    table.note_attempt("g", "t", 0, 10, 3, T0)
    counts = table.update(None, *KEY, T0, INV, [10, 11], T0)
    assert (counts.of(10), counts.of(11)) == (3, 0)


@pytest.mark.parametrize(("offset", "count"), [(-1, 1), (1, -1)])
def test_negative_attempts_are_refused(offset: int, count: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        OrderInfoTable().note_attempt("g", "t", 0, offset, count, T0)


def test_more_attempts_than_a_batch_holds_are_kept() -> None:
    """An orderly consumer's batch may be longer than a pop's."""
    table = OrderInfoTable()
    for offset in range(100):
        table.note_attempt("g", "t", 0, offset, 1, T0)
    reload(table)
    assert len(table.attempts("g", "t", 0)) == 100


# --- cleaning (delivery#order-clean) ----------------------------------------------------------------------------------

DAY = 86_400_000


def popped_table(*keys: tuple[str, str, int]) -> OrderInfoTable:
    table = OrderInfoTable()
    for key in keys:
        table.update(None, *key, T0, INV, [0], T0)
    return table


def past(_topic: str, _group: str, _queue_id: int) -> int:
    """The group has moved on, everywhere."""
    return 1_000_000


def not_past(_topic: str, _group: str, _queue_id: int) -> int | None:
    return None


def clean_late(table: OrderInfoTable, committed: Callable[[str, str, int], int | None]) -> int:
    return table.clean(T0 + 30 * DAY, {"t": 4}.get, {"g"}.__contains__, committed)


def test_what_counts_attempts_of_a_message_that_is_not_settled_is_not_idle() -> None:
    """After a weekend a poison message had all its attempts again."""
    popped, noted = popped_table(KEY), OrderInfoTable()
    noted.note_attempt("g", "t", 0, 5, 16, T0)
    for table in (popped, noted):
        assert clean_late(table, not_past) == 0
    assert popped.update(None, *KEY, T0 + 30 * DAY, INV, [0], T0 + 30 * DAY).per_offset == {0: 1}
    assert noted.attempts("g", "t", 0) == {5: 16}
    assert clean_late(noted, lambda *_: 5) == 0
    assert clean_late(noted, lambda *_: 6) == 1


def test_what_counts_nothing_any_more_is_idle() -> None:
    acked, released = popped_table(KEY), popped_table(KEY)
    for offset in acked.records()[KEY].offsets:
        acked.commit_and_next(*KEY, offset, T0, 0)
    released.release(*KEY, released.records()[KEY].offsets, T0, T0)
    for table in (acked, released):
        assert clean_late(table, not_past) == 1


def test_cleaning_drops_what_has_no_topic_no_group_or_no_queue() -> None:
    table = popped_table(("t", "g", 0), ("t", "g", 4), ("gone", "g", 0), ("t", "nobody", 0))
    dropped = table.clean(T0, {"t": 4}.get, {"g"}.__contains__, past)
    assert dropped == 3
    assert list(table.records()) == [("t", "g", 0)]
    assert list(table.as_json()["table"]) == ["t@g"]


@pytest.mark.parametrize(("age", "kept"), [(DAY, 1), (DAY + 1, 0)])
def test_a_record_idle_for_more_than_a_day_is_dropped(age: int, kept: int) -> None:
    table = popped_table(KEY)
    table.clean(T0 + age, {"t": 4}.get, {"g"}.__contains__, past)
    assert len(table.records()) == kept


def test_a_record_whose_message_is_still_invisible_is_not_idle() -> None:
    """Renewed for two days by a receiver that works on: dropping it would let the queue be popped again."""
    table = popped_table(KEY)
    table.update_next_visible_time(*KEY, 0, T0, T0 + 2 * DAY + 1)
    assert table.clean(T0 + 2 * DAY, {"t": 4}.get, {"g"}.__contains__, past) == 0
    assert table.check_block(None, *KEY, INV, T0 + 2 * DAY)
    assert table.clean(T0 + 2 * DAY + 1, {"t": 4}.get, {"g"}.__contains__, past) == 1


def test_keys_of_another_form_are_kept_and_empty_entries_are_not() -> None:
    table = OrderInfoTable()
    table.load({"table": {"a@b@c": {}, "alone": {"0": {"o": [1], "l": 5}}, "t@g": {}}})
    table.clean(T0 + 3 * DAY, {}.get, set().__contains__, past)
    assert set(table.as_json()["table"]) == {"a@b@c", "alone"}


def test_a_batch_popped_while_cleaning_asks_about_its_topic_stays() -> None:
    """The topic was gone when cleaning looked, and was made and popped before cleaning dropped."""
    table = popped_table(KEY)

    def read_queues(topic: str) -> int | None:
        table.update(None, *KEY, T0 + 1, INV, [0, 1], T0 + 1)
        return None

    assert table.clean(T0 + 1, read_queues, lambda group: True, past) == 0
    assert table.commit_and_next(*KEY, 0, T0 + 1, 0) == 1


# --- the file (delivery#order-info, delivery#order-file) --------------------------------------------------------------

SAMPLE = {
    "table": {
        "fifo@G_fifo": {
            "0": {
                "a": "A1", "cm": 9, "i": 60000, "l": 1703644544701, "o": [460, 1, 2, 3], "oc": {"460": 1},
                "ot": {"461": 1703644600000}, "popTime": 1703644544701,
            }
        }
    }
}  # fmt: skip


def test_the_sample_of_the_file_comes_back_the_same() -> None:
    table = OrderInfoTable()
    table.load(SAMPLE)
    assert table.as_json() == SAMPLE
    record = table.get("fifo", "G_fifo", 0)
    assert record is not None
    assert record.offsets == (460, 461, 462, 463)
    assert record.unacked() == [461, 462]


@pytest.mark.parametrize(
    ("text", "offsets", "popped", "invisible"),
    [
        ('{"table":{"t@g":{0:{"c":2,"cm":1,"l":7,"o":[4,1]}}}}', (4, 5), 0, None),
        ('{"table":{"t@g":{0:{"cm":1,"i":9,"l":7,"o":[4],"oc":{4:1},"popTime":8}}}}', (4,), 8, 9),
        ('{"table":{"t@g":{"0":{"a":null,"cm":0,"l":7,"o":[],"popTime":8}}}}', (), 8, None),
    ],
)
def test_the_shapes_of_all_versions_are_read(
    text: str, offsets: tuple[int, ...], popped: int, invisible: int | None
) -> None:
    table = OrderInfoTable()
    table.load(decode_json(text.encode()))
    record = table.get(*KEY)
    assert record is not None
    assert (record.offsets, record.pop_time_ms, record.invisible_ms) == (offsets, popped, invisible)
    assert "c" not in table.as_json()["table"]["t@g"]["0"]


def test_an_empty_batch_blocks_nothing_and_takes_no_ack() -> None:
    table = OrderInfoTable()
    table.load({"table": {"t@g": {"0": {"o": [], "popTime": T0, "i": INV}}}})
    assert not table.check_block(None, *KEY, INV, T0)
    assert table.commit_and_next(*KEY, 0, T0, 0) == ILLEGAL
    assert table.next_offset(*KEY) == NO_COMMIT
    assert table.lock_free_ms(*KEY, T0) is None


def test_members_unknown_here_are_kept_on_rewriting() -> None:
    value = {
        "table": {"t@g": {"0": {"o": [1], "cm": 0, "l": 1, "popTime": 5, "new": {"x": 1}}}},
        "dataVersion": {"n": 1},
    }
    table = OrderInfoTable()
    table.load(value)
    table.commit_and_next(*KEY, 1, 5, 0)
    written = table.as_json()
    assert written["dataVersion"] == {"n": 1}
    assert written["table"]["t@g"]["0"]["new"] == {"x": 1}


BAD_ENTRIES: list[Any] = [
    7, [], {"o": 3}, {"o": [1, 0]}, {"o": [2, 1, 1]}, {"o": [-1]}, {"o": ["1"]}, {"o": [True]}, {"o": [1.0]},
    {"o": [2**63 - 1, 1]}, {"o": [1], "cm": -1}, {"o": [1], "cm": "x"}, {"o": [1], "cm": 2**63}, {"o": [1], "a": 5},
    {"o": [1], "oc": []}, {"o": [1], "oc": {"x": 1}}, {"o": [1], "oc": {"01": 1}}, {"o": [1], "oc": {"1": -1}},
    {"o": [1], "ot": {"1": None}}, {"o": [1], "popTime": "now"}, {"o": [1], "i": 1.5}, {"o": [1], "l": -5},
    {"o": [0, *range(1, 64)], "popTime": 1}, {"o": [0, *range(1, 64)], "cm": 1},
    {"o": [1], "susp": []}, {"o": [1], "susp": {"x": [1, 1, ""]}}, {"o": [1], "susp": {"1": [1, 1]}},
    {"o": [1], "susp": {"1": [1, 1, 1]}}, {"o": [1], "susp": {"1": ["1", 1, ""]}},
    {"o": [1], "susp": {"1": [1, -1, ""]}},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_ENTRIES, ids=lambda value: json.dumps(value)[:30])
def test_what_no_version_writes_is_refused_whole(bad: Any) -> None:
    table = popped_table(KEY)
    before = table.as_json()
    value = {"table": {"ok@g": {"0": {"o": [1]}}, "t@g": {"0": bad}}}
    with pytest.raises(ValueError, match=r"order info: t@g\[0\]"):
        table.load(value)
    with pytest.raises(ValueError, match="order info"):
        check_order_info(value)
    assert table.as_json() == before


@pytest.mark.parametrize("value", [{"table": []}, {"table": {"t@g": []}}, {"table": {"t@g": {"x": {}}}}])
def test_a_table_of_another_shape_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="order info"):
        check_order_info(value)


_ANY_LEAF = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
_ANY_NAME = st.sampled_from(["table", "t@g", "0", "o", "cm", "oc", "ot", "popTime", "i", "a", "l", "rel"])
_ANY_JSON = st.recursive(
    _ANY_LEAF | st.floats(allow_nan=False, allow_infinity=False),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(_ANY_NAME | st.text(max_size=3), children, max_size=5)
    ),
    max_leaves=20,
)


@given(_ANY_JSON)
def test_any_json_is_read_or_refused_and_what_is_read_works(value: Any) -> None:
    table = OrderInfoTable()
    try:
        table.load({"table": {"t@g": {"0": value}}})
    except ValueError:
        return
    table.drop_attempts("g", "t", 0, 5)
    table.check_block(None, *KEY, INV, T0)
    table.lock_free_ms(*KEY, T0)
    table.commit_and_next(*KEY, 1, 1, 1)
    table.clean(T0, {"t": 4}.get, {"g"}.__contains__, past)
    reload(table)
    table.update(None, *KEY, T0, INV, [1, 2], T0)


# --- copies and versions --------------------------------------------------------------------------------------------


def test_copies_handed_out_and_in_are_copies() -> None:
    table = OrderInfoTable()
    known = Suspended(4, 1, T0, "no")
    mine = OrderInfo((4, 6), T0, INV, T0, counts={4: 1}, visible_ms={6: T0 + 9}, suspended={4: known})
    table.restore(*KEY, mine)
    assert mine.counts is not None
    mine.counts[4] = 99
    mine.suspended.clear()
    mine.acked = 3
    handed = table.get(*KEY)
    assert handed is not None
    assert handed.counts == {4: 1}
    assert handed.suspended == {4: known}
    handed.suspended.clear()
    handed.acked = 3
    assert table.suspended("g", lambda *queue: 0) == {("t", 0): known}
    assert table.next_offset(*KEY) == 4


def test_the_version_grows_with_every_change_and_only_then() -> None:
    table = OrderInfoTable()
    changes: list[Any] = [
        lambda: table.update(None, *KEY, T0, INV, [0, 1], T0),
        lambda: table.commit_and_next(*KEY, 0, T0, 0),
        lambda: table.update_next_visible_time(*KEY, 1, T0, T0),
        lambda: table.note_failed(*KEY, 1, 1, T0, "no"),
        lambda: table.release(*KEY, [1], T0, T0),
        lambda: table.clear_block(*KEY),
        lambda: table.note_attempt("g", "t", 0, 1, 1, T0),
        lambda: table.drop_attempts("g", "t", 0, 2),
        lambda: table.restore(*KEY, OrderInfo((1,), T0, INV, T0)),
        lambda: table.clean(T0, {}.get, set().__contains__, past),
    ]
    versions = [table.version]
    for change_it in changes:
        change_it()
        versions.append(table.version)
    assert all(a < b for a, b in itertools.pairwise(versions))
    table.commit_and_next(*KEY, 5, T0 - 1, 0)
    table.check_block(None, *KEY, INV, T0)
    table.clear_block(*KEY)
    table.drop_attempts("g", "t", 0, 2)
    table.clean(T0, {}.get, set().__contains__, past)
    assert table.version == versions[-1]


def test_count_strings_are_what_the_parser_reads() -> None:
    table = OrderInfoTable()
    table.update(None, *KEY, T0, INV, [3, 4], T0)
    counts = table.update(None, *KEY, T0 + 1, INV, [3, 5], T0 + 1)
    assert parse_counts(counts.count_string(2)) == {"2@qo0%3": 1, "2@0": 0}
