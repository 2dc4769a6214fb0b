"""Order info: delivery#order-vectors, what is kept of failures, cleaning, and the file.

How pops, acknowledgements and changes use it is tested through the pop service: `test_pop_fifo.py`, and against a model
in `tests/model/test_pop_model.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.broker.names import QueueKey
from mqstore.broker.pop.orderinfo import BlockedQueue, OrderInfo, OrderInfoTable, check_order_info
from mqstore.files.jsonfile import decode_json, encode_json

T0 = 1_000_000
INV = 60_000
DAY = 86_400_000
KEY = QueueKey("g", "t", 0)

Step = Callable[[OrderInfoTable], None]


def record_of(table: OrderInfoTable) -> OrderInfo:
    record = table.get(KEY)
    assert record is not None
    return record


def popped(table: OrderInfoTable, at: int, offsets: Any, attempt: str | None = None, inv: int = INV) -> OrderInfo:
    """Pop at T0+at."""
    old = table.get(KEY)
    if old is None:
        record = OrderInfo(tuple(offsets), T0 + at, inv, T0 + at, attempt)
    else:
        record = old.followed_by(list(offsets), T0 + at, inv, T0 + at, attempt)
    table.put(KEY, record)
    return record


def pop(
    at: int, offsets: Any, counts: dict[int, int] | None = None, attempt: str | None = None, inv: int = INV
) -> Step:
    """Pop at T0+at; how often messages of the batch came before."""

    def step(table: OrderInfoTable) -> None:
        assert (popped(table, at, offsets, attempt, inv).counts or {}) == (counts or {})

    return step


def ack(expected: int, *offsets: int) -> Step:
    """Ack `offsets`; the offset to commit then."""

    def step(table: OrderInfoTable) -> None:
        table.put(KEY, record_of(table).acknowledged(offsets))
        assert record_of(table).next_offset() == expected

    return step


def change(offset: int, to: int) -> Step:
    return lambda table: table.put(KEY, record_of(table).moved([offset], T0 + to))


def blocked(expected: bool, at: int, attempt: str | None = None) -> Step:
    def step(table: OrderInfoTable) -> None:
        assert record_of(table).blocks(attempt, T0 + at) is expected

    return step


def entry(**members: Any) -> Step:
    """The members of the file's entry; None: absent."""

    def step(table: OrderInfoTable) -> None:
        stored = table.as_json()["table"]["t@g"]["0"]
        assert {name: stored.get(name) for name in members} == members

    return step


def reload(table: OrderInfoTable) -> None:
    text = encode_json(table.as_json())
    table.load({"table": {}})
    table.load(decode_json(text))


def file_of_old(**members: Any) -> Step:
    return lambda table: table.load({"table": {"t@g": {"0": members}}})


V3 = [
    *(pop(0, range(8)), entry(o=list(range(8)), cm=0, oc=None, ot=None, a=None, i=INV, popTime=T0, l=T0)),
    *(blocked(True, 0), ack(0, 3), entry(cm=8), blocked(True, 0)),
    *(ack(1, 0), entry(cm=9), ack(2, 1), ack(4, 2), entry(cm=15)),
]
V6 = [
    *V3,
    *(ack(4, 0), entry(cm=15), blocked(True, 59_999), blocked(False, 60_000)),
    pop(60_000, range(4, 12), dict.fromkeys(range(4, 8), 1)),
    entry(o=[4, 1, 2, 3, 4, 5, 6, 7], cm=0, oc={"4": 1, "5": 1, "6": 1, "7": 1}),
]
V9 = [
    *(pop(0, [0, 1, 2]), ack(0, 1), change(0, 5_000), blocked(True, 5_000), blocked(True, 59_999)),
    *(ack(0, 2), blocked(False, 5_000)),
]
VECTORS = {
    "V1 to V3": V3,
    "V4 to V6": V6,
    "V7, V8": [
        *(*V6, ack(5, 4), entry(cm=1), *(ack(offset + 1, offset) for offset in range(5, 12)), entry(cm=255)),
        *(blocked(False, 60_001), ack(12, 11)),
    ],
    "V9, V10": [*(*V9, pop(5_000, [0, 1, 2], dict.fromkeys(range(3), 1)), entry(ot=None, cm=0), blocked(True, 5_001))],
    "V11": [
        *(pop(0, [0, 1], inv=10_000), change(1, 30_000), blocked(True, 10_000), blocked(True, 29_999)),
        *(blocked(False, 30_000), entry(ot={"1": 1_030_000})),
    ],
    "V12, V13": [
        *(pop(0, [0, 1, 2], attempt="A1"), blocked(True, 0), blocked(True, 0, "A2"), blocked(False, 0, "A1")),
        *(ack(1, 0), pop(10, [1, 2, 3], attempt="A1"), entry(oc={}, cm=0, popTime=T0 + 10), ack(2, 1)),
        *(blocked(True, 60_009, "A2"), blocked(False, 60_010, "A2"), pop(60_010, [2, 3], {2: 1, 3: 1}, "A2")),
    ],
    "V14": [
        *(pop(0, range(8), attempt="A1"), ack(1, 0), ack(2, 1), blocked(True, 59_999, "A2")),
        *(blocked(False, 60_000, "A2"), pop(60_000, range(2, 10), dict.fromkeys(range(2, 8), 1), "A2")),
    ],
    "V15": [
        *(pop(0, range(8), attempt="A1"), ack(1, 0), ack(1, 3), change(1, 90_000), reload),
        entry(a="A1", cm=9, i=60_000, oc=None, ot={"1": 1_090_000}),
        *(blocked(True, 30_000, "A2"), blocked(False, 30_000, "A1"), ack(2, 1), ack(4, 2)),
    ],
    "V17": [pop(0, [10, 13, 20]), entry(o=[10, 3, 10]), ack(13, 10), ack(13, 20), ack(21, 13)],
    "V18": [
        *(pop(0, [5, 6], inv=1_000), entry(oc=None)),
        *(pop(1_000 * n, [5, 6], {5: n, 6: n}, inv=1_000) for n in (1, 2, 3)),
        *(pop(4_000, [6, 7], {6: 4}, inv=1_000), entry(oc={"6": 4})),
    ],
    "V21": [
        *(pop(0, range(100, 132)), *(ack(100, offset) for offset in range(131, 100, -1)), ack(132, 100)),
        entry(cm=4_294_967_295),
    ],
    "V22": [
        *(file_of_old(cm=1, l=T0, o=[4, 1, 2], c=3), blocked(False, 0), blocked(False, -T0)),
        *(pop(0, [5, 6, 7], {5: 1, 6: 1}), ack(6, 5), blocked(True, 1)),
    ],
    "V23": [pop(0, [0, 1]), ack(1, 0), ack(2, 1), pop(5, [2, 3]), entry(oc={}, cm=0)],
    "63 messages": [pop(0, range(63)), *(ack(n + 1, n) for n in range(63)), entry(cm=2**63 - 1)],
}


@pytest.mark.parametrize("steps", VECTORS.values(), ids=VECTORS.keys())
def test_vector(steps: list[Step]) -> None:
    table = OrderInfoTable()
    for step in steps:
        step(table)


def test_releasing_twice_and_across_a_restart_is_releasing_once() -> None:
    table = OrderInfoTable()
    popped(table, 0, [0, 1])
    popped(table, 1, [0, 1])
    for _ in range(2):
        table.put(KEY, record_of(table).given_back([1, 77], T0 + 2))
        reload(table)
    assert record_of(table).is_visible(1, T0 + 2)
    assert popped(table, INV, [0, 1]).counts == {0: 2, 1: 1}


# --- failures, and attempts of the queue model (delivery#order-file) --------------------------------------------------


def test_attempts_survive_a_restart_in_the_documented_shape() -> None:
    table = OrderInfoTable()
    table.note_attempt(QueueKey("g", "t", 0), 12, 1, T0, "KeyError: 'id'")
    table.note_attempt(QueueKey("g", "t", 0), 10, 3, T0 + 1)
    assert table.as_json()["table"]["t@g"]["0"] == {
        "popTime": 0,
        "cm": 0,
        "o": [10, 2],
        "oc": {"10": 3, "12": 1},
        "l": T0 + 1,
        "susp": {"10": [3, T0 + 1, ""], "12": [1, T0, "KeyError: 'id'"]},
    }
    reload(table)
    assert table.attempts(QueueKey("g", "t", 0)) == {10: 3, 12: 1}
    assert table.suspended("g", past) == {}
    assert table.suspended("g", lambda queue: 11) == {("t", 0): BlockedQueue(12, 1, T0, "KeyError: 'id'")}
    assert not record_of(table).blocks(None, T0)


def test_a_failed_message_is_known_until_it_is_acknowledged() -> None:
    table = OrderInfoTable()
    popped(table, 0, [4, 5, 6])
    table.put(KEY, record_of(table).failed(5, 1, T0 + 1, "no").failed(4, 1, T0 + 2, ""))
    popped(table, 3, [4, 5])
    table.put(KEY, record_of(table).failed(5, 2, T0 + 4, "not yet"))
    reload(table)
    assert table.suspended("g", lambda queue: 4) == {("t", 0): BlockedQueue(4, 1, T0 + 2, "")}
    assert table.suspended("h", lambda queue: 4) == {}
    ack(5, 4)(table)
    assert table.suspended("g", lambda queue: 0) == {("t", 0): BlockedQueue(5, 2, T0 + 1, "not yet")}
    ack(6, 5)(table)
    assert table.suspended("g", lambda queue: 0) == {}


def test_failures_of_offsets_that_are_gone_are_forgotten() -> None:
    table = OrderInfoTable()
    for offset in (3, 4):
        table.note_attempt(QueueKey("g", "t", 0), offset, 1, T0, "no")
    assert table.cut(lambda topic, queue_id: 4)
    assert list(record_of(table).suspended) == [3]
    assert not table.cut(lambda topic, queue_id: 4)


def test_attempts_are_dropped_when_the_queue_moves_on() -> None:
    table = OrderInfoTable()
    for offset in range(100):  # an orderly consumer's batch may be longer than a pop's
        table.note_attempt(QueueKey("g", "t", 0), offset, 2, T0)
    reload(table)
    table.drop_attempts(QueueKey("g", "t", 0), 0)
    assert len(table.attempts(QueueKey("g", "t", 0))) == 100
    table.drop_attempts(QueueKey("g", "t", 0), 98)
    assert table.attempts(QueueKey("g", "t", 0)) == {98: 2, 99: 2}
    table.note_attempt(QueueKey("g", "t", 0), 98, 0, T0)
    assert table.attempts(QueueKey("g", "t", 0)) == {99: 2}
    table.drop_attempts(QueueKey("g", "t", 0), 100)
    assert table.get(KEY) is None


def test_a_pop_after_orderly_attempts_goes_on_counting_from_them() -> None:
    """Three failed attempts, then the group pops: this delivery is the fourth, three redeliveries."""
    table = OrderInfoTable()
    table.note_attempt(QueueKey("g", "t", 0), 10, 3, T0)
    assert popped(table, 0, [10, 11]).counts == {10: 3}
    table.drop_attempts(QueueKey("g", "t", 0), 99)
    assert table.attempts(QueueKey("g", "t", 0)) == {}
    blocked(True, 1)(table)


@pytest.mark.parametrize(("offset", "count"), [(-1, 1), (1, -1)])
def test_negative_attempts_are_refused(offset: int, count: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        OrderInfoTable().note_attempt(QueueKey("g", "t", 0), offset, count, T0)


# --- cleaning (delivery#order-clean) ----------------------------------------------------------------------------------


def popped_table(*keys: QueueKey) -> OrderInfoTable:
    table = OrderInfoTable()
    for key in keys:
        table.put(key, OrderInfo((0,), T0, INV, T0))
    return table


def past(_queue: QueueKey) -> int:
    """The group has moved on, everywhere."""
    return 1_000_000


def clean(table: OrderInfoTable, now_ms: int, committed: Callable[[QueueKey], int | None] = past) -> list[Any]:
    """Clean where there is a topic "t" with 4 queues, and a group "g"; what is left."""
    table.clean(now_ms, {"t": 4}.get, {"g"}.__contains__, committed, lambda queue: nullcontext())
    return list(table.records())


def test_entry_with_attempts_is_not_idle() -> None:
    """After a weekend a poison message had all its attempts again."""
    table, noted = popped_table(KEY), OrderInfoTable()
    noted.note_attempt(QueueKey("g", "t", 0), 5, 16, T0)
    for each in (table, noted):
        assert clean(each, T0 + 30 * DAY, lambda _: None) == [KEY]
    assert popped(table, 30 * DAY, [0]).counts == {0: 1}
    assert noted.attempts(QueueKey("g", "t", 0)) == {5: 16}
    assert clean(noted, T0, lambda _: 5) == [KEY]
    assert clean(noted, T0, lambda _: 6) == []


def test_empty_entry_is_idle() -> None:
    for become in (lambda record: record.acknowledged([0]), lambda record: record.given_back([0], T0)):
        table = OrderInfoTable()
        table.put(KEY, become(OrderInfo((0,), T0, INV, T0)))
        assert clean(table, T0 + 30 * DAY, lambda _: None) == []


def test_cleaning_drops_what_has_no_topic_no_group_or_no_queue() -> None:
    table = popped_table(KEY, QueueKey("g", "t", 4), QueueKey("g", "gone", 0), QueueKey("nobody", "t", 0))
    assert clean(table, T0) == [KEY]
    assert list(table.as_json()["table"]) == ["t@g"]


@pytest.mark.parametrize(("age", "left"), [(DAY, [KEY]), (DAY + 1, [])])
def test_a_record_idle_for_more_than_a_day_is_dropped(age: int, left: list[Any]) -> None:
    assert clean(popped_table(KEY), T0 + age) == left


def test_a_record_whose_message_is_still_invisible_is_not_idle() -> None:
    """Renewed for two days by a receiver that works on: dropping it would let the queue be popped again."""
    table = popped_table(KEY)
    change(0, 2 * DAY + 1)(table)
    assert clean(table, T0 + 2 * DAY) == [KEY]
    assert clean(table, T0 + 2 * DAY + 1) == []


def test_keys_of_another_form_are_kept_and_empty_entries_are_not() -> None:
    table = OrderInfoTable()
    table.load({"table": {"a@b@c": {}, "alone": {"0": {"o": [1], "l": 5}}, "t@g": {}}})
    clean(table, T0 + 3 * DAY)
    assert set(table.as_json()["table"]) == {"a@b@c", "alone"}


def test_a_batch_popped_while_cleaning_asks_about_its_topic_stays() -> None:
    """The topic was gone when cleaning looked, and was made and popped before cleaning dropped."""
    table = popped_table(KEY)

    def read_queues(topic: str) -> int | None:
        popped(table, 1, [0, 1])
        return None

    table.clean(T0 + 1, read_queues, lambda group: True, past, lambda queue: nullcontext())
    assert record_of(table).offsets == (0, 1)


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
    record = table.get(QueueKey("G_fifo", "fifo", 0))
    assert record is not None
    assert record.offsets == (460, 461, 462, 463)
    assert record.unacked() == [461, 462]


@pytest.mark.parametrize(
    ("text", "offsets", "pop_time_ms", "invisible"),
    [
        ('{"table":{"t@g":{0:{"c":2,"cm":1,"l":7,"o":[4,1]}}}}', (4, 5), 0, None),
        ('{"table":{"t@g":{0:{"cm":1,"i":9,"l":7,"o":[4],"oc":{4:1},"popTime":8}}}}', (4,), 8, 9),
        ('{"table":{"t@g":{"0":{"a":null,"cm":0,"l":7,"o":[],"popTime":8}}}}', (), 8, None),
    ],
)
def test_the_shapes_of_all_versions_are_read(
    text: str, offsets: tuple[int, ...], pop_time_ms: int, invisible: int | None
) -> None:
    table = OrderInfoTable()
    table.load(decode_json(text.encode()))
    record = record_of(table)
    assert (record.offsets, record.pop_time_ms, record.invisible_ms) == (offsets, pop_time_ms, invisible)
    assert "c" not in table.as_json()["table"]["t@g"]["0"]


def test_members_unknown_here_are_kept_on_rewriting() -> None:
    value = {
        "table": {"t@g": {"0": {"o": [1], "cm": 0, "l": 1, "popTime": 5, "new": {"x": 1}}}},
        "dataVersion": {"n": 1},
    }
    table = OrderInfoTable()
    table.load(value)
    ack(2, 1)(table)
    assert table.as_json()["dataVersion"] == {"n": 1}
    entry(new={"x": 1})(table)


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
def test_unknown_version_is_refused(bad: Any) -> None:
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
    table.drop_attempts(QueueKey("g", "t", 0), 5)
    table.blocks(KEY, T0)
    clean(table, T0)
    reload(table)
    popped(table, 0, [1, 2]).acknowledged([1])


def test_the_version_grows_with_every_change_and_only_then() -> None:
    table = OrderInfoTable()
    record = OrderInfo((0, 1), T0, INV, T0)
    changes: list[tuple[bool, Callable[[], object]]] = [
        (True, lambda: table.put(KEY, record)),
        (True, lambda: table.put(KEY, record.acknowledged([0]))),
        (True, lambda: table.put(KEY, None)),
        (True, lambda: table.note_attempt(QueueKey("g", "t", 0), 1, 1, T0)),
        (False, lambda: table.drop_attempts(QueueKey("g", "t", 0), 1)),
        (True, lambda: table.drop_attempts(QueueKey("g", "t", 0), 2)),
        (False, lambda: table.put(KEY, None)),
        (True, lambda: table.put(QueueKey("g", "gone", 0), record)),
        (True, lambda: clean(table, T0)),
        (False, lambda: clean(table, T0)),
    ]
    for grows, change_it in changes:
        before = table.version
        change_it()
        assert (table.version > before) is grows
