"""Order info: delivery#order-vectors, what is kept of failures, cleaning, and the file.

How pops, acknowledgements and changes use it is tested through the pop service: `test_pop_fifo.py`, and against a model
in `tests/model/test_pop_model.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.broker.pop.orderinfo import BlockedQueue, OrderInfo, OrderInfoTable, check_order_info
from mqstore.broker.redelivery.attempt_journal import Suspects
from mqstore.broker.tables.names import QueueKey
from mqstore.files.jsonfile import decode_json, encode_json

T0 = 1_000_000
INV = 60_000
KEY = QueueKey("g", "t", 0)

Step = Callable[[OrderInfoTable], None]


def record_of(table: OrderInfoTable) -> OrderInfo:
    record = table.get(KEY)
    assert record is not None
    return record


def popped(table: OrderInfoTable, at: int, offsets: Any, attempt: str | None = None, inv: int = INV) -> OrderInfo:
    """Pop at T0+at."""
    old, record = table.get(KEY), OrderInfo(tuple(offsets), T0 + at, inv, T0 + at, attempt)
    if old is not None:
        record = old.followed_by(record)
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
    assert table.suspended("g", lambda queue: 99) == {}
    assert table.suspended("g", lambda queue: 11) == {("t", 0): BlockedQueue(12, 1, T0, "KeyError: 'id'")}
    assert not record_of(table).blocks(None, T0)


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


def test_a_record_that_was_replaced_meanwhile_is_not_forgotten() -> None:
    """Its topic was gone when cleaning looked, and was made and popped before cleaning dropped it."""
    table = OrderInfoTable()
    old, new = popped(table, 0, [0]), popped(table, 1, [0, 1])
    table.forget(KEY, old)
    assert table.get(KEY) == new


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


def test_the_file_comes_back_with_members_unknown_here() -> None:
    value: dict[str, Any] = {
        "table": {**SAMPLE["table"], "a@b@c": {}, "alone": {"0": {"o": [1], "l": 5}}},
        "dataVersion": {"n": 1},
    }
    value["table"]["fifo@G_fifo"]["0"]["new"] = {"x": 1}
    table = OrderInfoTable()
    table.load(value)
    assert table.as_json() == value
    record = table.get(QueueKey("G_fifo", "fifo", 0))
    assert record is not None
    assert (record.offsets, record.unacked()) == ((460, 461, 462, 463), [461, 462])


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
    table = OrderInfoTable()
    popped(table, 0, [0])
    before = table.as_json()
    value = {"table": {"ok@g": {"0": {"o": [1]}}, "t@g": {"0": bad}}}
    with pytest.raises(ValueError, match=r"order info: t@g\[0\]"):
        table.load(value)
    with pytest.raises(ValueError, match="order info"):
        check_order_info(value)
    assert table.as_json() == before


@pytest.mark.parametrize("value", [{"table": []}, {"table": {"t@g": []}}, {"table": {"t@g": {"x": {}}}}])
def test_a_table_of_another_shape_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="order info") as refused:
        check_order_info(value)
    assert max(map(str(refused.value).count, ("table", "t@g"))) == 1, "the place is said once"


@pytest.mark.parametrize("queues", [[], {"x": {}}, {"0": 7}], ids=json.dumps)
def test_message_about_a_long_name_is_short(queues: Any) -> None:
    with pytest.raises(ValueError, match="order info") as refused:
        check_order_info({"table": {"t" * 3_000 + "@g": queues}})
    assert len(str(refused.value)) < 600


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
    reload(table)
    popped(table, 0, [1, 2]).acknowledged([1])


# --- messages whose handler may have ended a process (broker/redelivery/attempt_journal.py) --------------------------


def test_one_suspected_message_begins_at_a_time_whoever_asks() -> None:
    suspects, told = Suspects(), []

    def come(key: str, owner: str) -> None:
        suspects.come(key, owner, partial(told.append, key))

    come("a", "first owner")
    come("a", "first owner")  # it is in turn already
    assert told == ["a", "a"]
    told.clear()
    for key, owner in (("b", "first owner"), ("c", "second owner"), ("d", "first owner"), ("e", "third owner")):
        come(key, owner)
    suspects.release("c")  # it is not its turn
    assert (told, suspects.is_in("a")) == ([], True)
    suspects.release("a")
    assert (told, suspects.is_in("b")) == (["b"], True)
    suspects.desert("first owner")  # d with it
    assert (told, suspects.is_in("c")) == (["b", "c"], True)
    suspects.give_up("first owner")  # has no turn
    assert suspects.is_in("c")
    suspects.give_up("second owner")
    assert (told, suspects.is_in("e")) == (["b", "c", "e"], True)
    suspects.release("e")
    come("f", "first owner")
    assert (told, suspects.is_in("f")) == (["b", "c", "e", "f"], True)
