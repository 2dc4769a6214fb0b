"""Compiled puts of the broker: queue, delay, receipt and bytes are those of `Router.put`, or are left to it."""

from __future__ import annotations

import copy
import pickle
import resource
import zlib
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqstore import Durability, Profile
from mqstore.broker.background.context import Parts
from mqstore.broker.routing.router import DelayedReceipt
from mqstore.broker.routing.uniquekey import new_unique_key
from mqstore.errors import ConfigError, InvalidMessageError, MQStoreError
from mqstore.files.filesystem import REAL
from mqstore.files.segment import segment_name
from mqstore.layout.hosts import encode_host
from mqstore.layout.record import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from mqstore.remoting.shapes import properties_of
from mqstore.remoting.short import bodies_bytes, bodies_of, receipts_bytes
from tests.broker.support import START_MS, clock_of, new_parts
from tests.scarce import limited
from tests.without import Door, compiled, put_by_python

_START_S = START_MS / 1000
_YEAR_S = 366 * 86_400
_DELAYS: list[Any] = [
    0, 0.0, -0.0, 0.0004, 0.2, 1, 1.5, 5, _YEAR_S, _YEAR_S + 0.001, 1e300, float("inf"), float("nan"), -1, -0.0001,
    True, "soon", timedelta.max, timedelta.min, 10**400,
]  # fmt: skip
_MOMENTS: list[Any] = [
    *(_START_S + delay for delay in _DELAYS[:10]), 0, -0.0001, -1, 1e12, 1e11, float("nan"), int(_START_S) + 3, False,
    10**400, datetime.fromtimestamp(_START_S + 5, UTC), datetime(2024, 1, 1), "tomorrow",
]  # fmt: skip
_VALUES: dict[str, list[Any]] = {
    "queue_id": [None, 0, 1, 2, 3, 4, -1, True, 2**70, "0"],
    "tag": [None, "paid", "a|b"],
    "properties": [{"shop": "3"}, {"v": "v" * 1500}, {"v": "v" * 1970}, {"v": "v" * 2020}, {"REAL_TOPIC": "x"}],
    "message_group": [None, "order-1", "用户-7", "g" * 63, "g" * 64, " ", 7, True],
    "delay": [None, *_DELAYS],
    "deliver_at": [None, *_MOMENTS],
    "delay_level": [None, 0, 1, 3, 18, 19, 2**31 - 1, 2**31, -1, True, 1.5],
    "flag": [None, 0, -5, 2**31 - 1, 2**31],
    "compressed": [None, "zlib", "gzip", 1],
    "durability": [None, "append", "flush", "maybe"],
    "colour": ["red"],
}
_ALONE = [("orders", {name: value}, "u") for name, values in _VALUES.items() for value in values]
_EXCLUSIVE = {"message_group": "g", "delay": 5, "deliver_at": _START_S + 9, "delay_level": 3}
_PAIRS = [("orders", dict(two), "u") for two in combinations(_EXCLUSIVE.items(), 2)]
_OPTIONS: dict[str, st.SearchStrategy[Any]] = {name: st.sampled_from(values) for name, values in _VALUES.items()}
_OPTIONS["delay"] |= st.floats(0, 4e7) | st.timedeltas(timedelta(-1), timedelta(400))
_OPTIONS["deliver_at"] |= st.floats(_START_S - 100, _START_S + 4e7)
_ONE = st.one_of([st.fixed_dictionaries({name: values}) for name, values in _OPTIONS.items()])
"""One option, beside which all is well: of several given at once one is nearly always wrong."""
_PUTS = st.lists(
    st.tuples(
        st.sampled_from(["orders", "narrow", "new", "rmq_sys_wheel_timer"]),
        _ONE | st.fixed_dictionaries({}, optional=_OPTIONS),
        st.sampled_from(["u", "用户"]),
    ),
    max_size=8,
)


def outcome_of(folder: Path, puts: list[Any], profile: Profile, *, by_python: bool = False) -> tuple[bytes, list[Any]]:
    """The commitlog after these puts, and of each the receipt or the error."""
    with mock.patch("random.getrandbits", return_value=5):
        parts = new_parts(folder, profile=profile)
        parts.topics.create("orders", queues=3)
        parts.topics.create("narrow", queues=4)
        parts.topics.alter("narrow", write_queues=2)
        # What is put first is for Python, until its topics and queues are there.
        for first in ({"delay": 5}, *({"delay_level": level} for level in (1, 3, 18)), {}):
            for topic in ("orders", "narrow"):
                parts.router.put(topic, b"first", unique_key="first", **cast(Any, first))
        if by_python:
            put_by_python(parts.router)
        results: list[Any] = []
        for topic, options, key in puts:
            try:
                receipt = cast(Any, parts.router.put(topic, b"body", unique_key=key, **options))
                results.append((type(receipt), tuple(receipt), receipt.recall_handle))
            except (InvalidMessageError, ConfigError, TypeError, PermissionError, ValueError) as error:
                results.append((type(error), str(error)))
            clock_of(parts).advance(500)
        parts.store.close()
    return b"".join(path.read_bytes() for path in sorted((folder / "commitlog").iterdir())), results


@compiled
@example([*_ALONE, *_PAIRS, ("orders", {}, "u"), *_ALONE], "mqstore")
@given(_PUTS, st.sampled_from(["mqstore", "rocketmq"]))
def test_compiled_broker_put_agrees_with_python(
    tmp_path_factory: pytest.TempPathFactory, puts: list[Any], profile: Profile
) -> None:
    ours = outcome_of(tmp_path_factory.mktemp("compiled"), puts, profile)
    assert outcome_of(tmp_path_factory.mktemp("python"), puts, profile, by_python=True) == ours


@compiled
@pytest.mark.parametrize(
    ("options", "is_compiled"),
    [
        ({}, True),
        ({"queue_id": 1, "tag": "a", "keys": ["k", "l"], "properties": {"n": "v"}, "unique_key": "u"}, True),
        ({"message_group": "g", "flag": 3, "durability": "append", "compressed": "zlib"}, True),
        ({"delay": 5}, True),
        ({"delay": 0.2, "tag": "a"}, True),
        ({"deliver_at": _START_S + 5}, True),
        ({"delay_level": 3}, True),
        ({"delay": timedelta(seconds=5)}, True),
        ({"deliver_at": datetime.fromtimestamp(_START_S + 5, UTC)}, False),
        ({"message_group": 7}, False),
        ({"delay": -1}, False),
        ({"delay": 1, "delay_level": 1}, False),
    ],
)
def test_broker_puts_that_are_compiled(tmp_path: Path, options: dict[str, Any], is_compiled: bool) -> None:
    parts = new_parts(tmp_path / "s", segment_bytes=1 << 20)
    for first in ({"delay": 5}, {"delay_level": 3}, {}):
        parts.router.put("orders", b"first", **cast(Any, first))
    door = Door(parts.router)
    receipt = door.put("orders", b"body", **options)
    assert door.left == ([] if is_compiled else [(("orders", b"body"), options)])
    assert (receipt is not None) == is_compiled
    parts.store.close()


def test_level_beyond_the_table_is_its_last(tmp_path: Path) -> None:
    parts = new_parts(tmp_path / "s")
    parts.router.put("orders", b"x", delay_level=18)
    parts.store.close()
    parts = new_parts(tmp_path / "s", delay_levels="1s 5s", clock=parts.clock)
    for _ in range(3):
        assert parts.router.put("orders", b"x", delay_level=18).queue == ("SCHEDULE_TOPIC_XXXX", 1)
    parts.store.close()


def test_keys_of_delayed_messages_are_those_of_the_process_in_turn(parts: Parts) -> None:
    parts.router.put("orders", b"first", delay=5)
    keys = [new_unique_key(), parts.router.put("orders", b"x", delay=5).unique_key, new_unique_key()]
    assert [len(key) for key in keys] == [34] * 3
    assert len({key[:18] for key in keys}) == 1
    seconds = [int(key[18:26], 16) for key in keys]
    assert seconds == sorted(seconds)
    assert [int(key[26:], 16) - int(keys[0][26:], 16) & 0xFFFF_FFFF for key in keys] == [0, 1, 2]
    assert parts.store.find("rmq_sys_wheel_timer", unique_key=keys[1])


def test_the_receipt_of_a_delayed_message_is_a_value(parts: Parts) -> None:
    for prepare in (lambda _: None, put_by_python):
        prepare(parts.router)
        receipt = parts.router.put("orders", b"x", delay=5, unique_key="u")
        assert type(receipt) is DelayedReceipt
        assert hash(receipt) == hash(tuple(receipt))
        for again in (copy.copy(receipt), pickle.loads(pickle.dumps(receipt))):
            assert (type(again), again, again.recall_handle) == (DelayedReceipt, receipt, receipt.recall_handle)


# -- the engine's own records -----------------------------------------------------------------------------------------


def test_a_level_wins_over_a_timer(parts: Parts) -> None:
    topic, queue_id, properties = parts.router.route(
        "orders", 1, {"DELAY": "2", "TIMER_DELIVER_MS": "5", "TIMER_DELAY_SEC": "6", "TIMER_DELAY_MS": "7", "k": "v"}
    )
    assert (topic, queue_id) == ("SCHEDULE_TOPIC_XXXX", 1)
    assert properties == {"DELAY": "2", "REAL_TOPIC": "orders", "REAL_QID": "1", "k": "v"}
    for level in ("0", "-1", "no number", ""):
        assert parts.router.route("orders", 1, {"DELAY": level}) == ("orders", 1, {"DELAY": level})


@pytest.mark.parametrize(
    ("sys_flag", "diverted"),
    [(0, True), (TRANSACTION_COMMIT, True), (TRANSACTION_PREPARED, False), (TRANSACTION_ROLLBACK, False)],
)
def test_only_plain_and_committed_records_are_delayed(parts: Parts, sys_flag: int, diverted: bool) -> None:
    assert (parts.router.route("orders", 1, {"DELAY": "2"}, sys_flag)[0] == "SCHEDULE_TOPIC_XXXX") == diverted


def test_copy_keeps_its_origin_and_a_compressed_body(parts: Parts) -> None:
    born: dict[str, Any] = {"flag": 7, "born_timestamp_ms": 123, "born_host": "10.1.2.3:4567"}
    stored = zlib.compress(b"text " * 100)
    receipt = parts.store.append("orders", 0, stored, properties={"k": "v"}, reconsume_times=2, sys_flag=1, **born)
    [original] = parts.store.read("orders")

    parts.router.copy(original, "other", 0, {"k": "w"}, reconsume_times=3)

    [copied] = parts.store.read("other")
    assert {name: getattr(copied, name) for name in born} == born
    assert (bytes(copied.body_view), copied.body, copied.reconsume_times) == (stored, b"text " * 100, 3)
    assert copied.stored_properties() == {"k": "w", "ORIGIN_MESSAGE_ID": receipt.message_id}
    assert copied.unique_key == original.unique_key == receipt.message_id


# -- records of a server's clients -------------------------------------------------------------------------------------

_NAMES = ["UNIQ_KEY", "TAGS", "KEYS", "TAGS", "shop", "é", "", "DELAY", "TIMER_DELAY_MS", "__CRC32#", "INNER_NUM"]
_NAMES += ["TIMER_OUT_MS", "TRAN_MSG", "UNIQ_KEYS", "CORRELATION_ID"]
_PAIR = st.tuples(st.sampled_from(_NAMES), st.sampled_from(["1", "paid", "订", "", "a\1b", "v" * 3000, "\ud800"]))
_SENT_PROPERTIES = st.builds(
    lambda pairs, end: "\2".join(f"{name}\1{value}" for name, value in pairs) + end,
    st.lists(_PAIR, max_size=4).map(lambda pairs: [("UNIQ_KEY", "u"), *pairs]) | st.lists(_PAIR, max_size=3),
    st.sampled_from(["", "\2", "\2\2", "\2TAGS", "\1"]),
)
_I32 = st.sampled_from([0, 0, 1, -5, 2**31 - 1, 2**31, -(2**31) - 1])
_SENT = st.tuples(
    st.sampled_from(["orders", "unseen", "t" * 200]),
    st.sampled_from([0, 1, 7]),
    st.sampled_from([b"", b"body", b"b" * 3000, b"b" * 70_000]),
    _SENT_PROPERTIES,
    _I32,
    st.sampled_from([0, 1, 0x301, 2, 4, 8, 12, 16, 32, 128, 2**31]),
    st.sampled_from([0, START_MS, -1, 2**63 - 1, 2**63]),
    st.sampled_from(["10.1.2.3:4567", "[2001:db8::1]:9"]),
    _I32,
)


def stored(folder: Path, sent: list[Any], durability: Durability, *, by_python: bool) -> tuple[bytes, list[Any]]:
    """The commitlog after these records, and of each the receipt or the error."""
    parts = new_parts(folder, durability=durability, max_message_size=1 << 16)
    parts.router.append("orders", 0, b"first", {})
    results: list[Any] = []
    for topic, queue_id, body, text, flag, sys_flag, born_ms, host, times in sent:
        numbers = flag, sys_flag, born_ms, encode_host(host), times
        fields: Any = {"flag": flag, "sys_flag": sys_flag, "born_timestamp_ms": born_ms, "born_host": host}
        receipt = None
        try:
            if not by_python:
                receipt = parts.router.append_plain(topic, queue_id, body, text, *numbers)
            if receipt is None:
                receipt = parts.router.append(
                    topic, queue_id, body, properties_of(text), reconsume_times=times, **fields
                )
            results.append((type(receipt), tuple(receipt)))
        except InvalidMessageError as error:
            results.append((type(error), str(error)))
        clock_of(parts).advance(500)
    parts.store.close()
    return b"".join(path.read_bytes() for path in sorted((folder / "commitlog").iterdir())), results


@compiled
@given(st.lists(_SENT, max_size=8), st.sampled_from(["append", "append", "flush"]))
def test_compiled_append_of_sent_records_agrees_with_python(
    tmp_path_factory: pytest.TempPathFactory, sent: list[Any], durability: Durability
) -> None:
    with mock.patch("mqstore.broker.delay.route.new_unique_key", return_value="drawn"):
        ours = stored(tmp_path_factory.mktemp("compiled"), sent, durability, by_python=False)
        assert stored(tmp_path_factory.mktemp("python"), sent, durability, by_python=True) == ours


@compiled
@pytest.mark.parametrize(
    ("text", "sys_flag", "is_compiled"),
    [
        ("UNIQ_KEY\1u\2", 0, True),
        ("TAGS\1a\2KEYS\1k l\2UNIQ_KEY\1u\2WAIT\1true\2é\1订\2CLUSTER\1c\2", 0x301, True),
        ("UNIQ_KEY\1u", 0, True),  # 5.x sends it without the last separator
        ("", 0, False),
        ("TAGS\1a\2", 0, False),  # its key must be drawn
        ("UNIQ_KEY\1u\2UNIQ_KEY\1v\2", 0, False),
        ("UNIQ_KEY\1u\2a\1\2", 0, False),
        ("UNIQ_KEY\1u\2junk\2", 0, False),
        *[(f"UNIQ_KEY\1u\2{name}\0011\2", 0, False) for name in ("DELAY", "TIMER_DELAY_SEC", "TRAN_MSG", "INNER_NUM")],
        ("UNIQ_KEY\1u\2", TRANSACTION_PREPARED, False),
    ],
)
def test_sent_records_that_are_compiled(parts: Parts, text: str, sys_flag: int, is_compiled: bool) -> None:
    parts.router.append("orders", 0, b"first", {})
    numbers = 7, sys_flag, 5, encode_host("10.1.2.3:4"), 2
    receipt = parts.router.append_plain("orders", 0, b"body", text, *numbers)
    assert (receipt is not None) == is_compiled
    if receipt is not None:
        [message] = parts.store.read("orders", 0, 1)
        assert (message.flag, message.born_timestamp_ms, message.born_host) == (7, 5, "10.1.2.3:4")
        assert (message.reconsume_times, message.unique_key, receipt.unique_key) == (2, "u", "u")
        assert message.stored_properties() == properties_of(text)


# -- packed messages of a server's clients -----------------------------------------------------------------------------

_BYTE = st.integers(0, 9)
_BODY = st.binary(max_size=9) | st.sampled_from([b"b" * 1000, b"b" * 16_384, b"b" * 16_385, b"b" * 70_000])
_PACKED = st.lists(_BODY, max_size=40).map(bodies_bytes)
_DAMAGED = st.builds(lambda data, at, other: data[:at] + other + data[at + 1 :], _PACKED, _BYTE, st.binary())
_BATCH = st.tuples(
    st.sampled_from(["orders", "orders", "narrow", "new", "rmq_sys_wheel_timer"]),
    st.sampled_from([None, None, 0, 1, 3, 99]),
    _PACKED,
) | st.tuples(st.just("orders"), st.just(0), _DAMAGED)


def packed(parts: Parts, topic: str, queue_id: int | None, data: bytes, *, by_python: bool) -> bytes | tuple[type, str]:
    """Return the answer to a `put_many`, or its error."""
    try:
        done = queue_id if by_python else parts.router.put_packed(topic, data, queue_id)
        if isinstance(done, bytes):
            return done
        return receipts_bytes(parts.router.put_many(topic, bodies_of(data), queue_id=done))
    except MQStoreError as error:
        return type(error), str(error)


def stored_batches(folder: Path, batches: list[Any], *, by_python: bool, **config: Any) -> tuple[bytes, list[Any]]:
    """Return the commitlog after these batches, with the answer or error of each, and the records that are read."""
    fs = None if by_python else REAL  # compiled code writes by calls if no file system must see them
    parts = new_parts(folder, fs=fs, segment_bytes=1 << 19, max_message_size=1 << 16, **config)
    parts.topics.create("orders", queues=3)
    parts.topics.create("narrow", queues=4)
    parts.topics.alter("narrow", write_queues=2)
    queues = [(topic, queue_id) for topic in ("orders", "narrow") for queue_id in range(2)]
    for topic, queue_id in queues:
        parts.router.put_many(topic, [b"first"], queue_id=queue_id)
    results: list[Any] = []
    for batch in batches:
        results.append(packed(parts, *batch, by_python=by_python))
        clock_of(parts).advance(500)
    results += [(message.offset, message.body) for queue in queues for message in parts.store.read(*queue, 0, 999)]
    parts.store.close()
    return b"".join(path.read_bytes() for path in sorted((folder / "commitlog").iterdir())), results


@compiled
@given(
    st.lists(_BATCH, max_size=12),
    st.sampled_from(["mqstore", "rocketmq"]),
    st.sampled_from(["append", "append", "flush"]),
    st.sampled_from(["127.0.0.1:0", "[2001:db8::1]:9"]),
)
def test_packed_messages_are_stored_as_by_python(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Any], profile: Profile, durability: Durability, host: str
) -> None:
    config: Any = {"profile": profile, "durability": durability, "store_host": host}
    with mock.patch("random.getrandbits", return_value=5):
        ours = stored_batches(tmp_path_factory.mktemp("compiled"), batches, by_python=False, **config)
        assert stored_batches(tmp_path_factory.mktemp("python"), batches, by_python=True, **config) == ours


@compiled
@pytest.mark.parametrize(
    ("data", "config", "is_compiled"),
    [
        (bodies_bytes([b"a"]), {}, True),
        (bodies_bytes([b"", b"b" * 70_000, b""]), {}, True),
        (bodies_bytes([b"a"]), {"durability": "flush"}, False),
        (bodies_bytes([b"a" * 1000] * 120), {}, False),  # written by a call
        (bodies_bytes([b"a" * 1001]), {"max_message_size": 1000}, False),
        (bodies_bytes([b"a" * 1000] * 100), {}, True),
        (bodies_bytes([b"a"]), {"segment_bytes": 1 << 16}, False),  # no room until Python has asked for it
        (bodies_bytes([]), {}, False),
        (b"", {}, False),
        (bodies_bytes([b"a"])[:-1], {}, False),
        (bodies_bytes([b"a"]) + b"a", {}, False),
        (b"\xff\xff\xff\xff" + bytes(4), {}, False),
        (b"\x7f\xff\xff\xff" + bytes(4), {}, False),
        (b"\0\0\0\x02\xff\xff\xff\xff\0\0\0\1", {}, False),
    ],
)
def test_packed_messages_that_are_compiled(
    tmp_path: Path, data: bytes, config: dict[str, Any], is_compiled: bool
) -> None:
    parts = new_parts(tmp_path / "s", fs=REAL, **{"segment_bytes": 1 << 20, **config})
    parts.router.put_many("orders", [b"first"], queue_id=1)
    before = parts.store.max_offset
    done = parts.router.put_packed("orders", data, 1)
    assert (isinstance(done, bytes), parts.store.max_offset > before) == (is_compiled, is_compiled)
    if not is_compiled:
        assert done == 1


@compiled
@pytest.mark.parametrize("written_bytes", [0, 20_000])
def test_packed_messages_that_cannot_be_written_leave_no_byte(tmp_path: Path, written_bytes: int) -> None:
    """Whole records after the end of the log would be recovered after a crash."""
    parts = new_parts(tmp_path / "s", fs=REAL, segment_bytes=1 << 20)
    parts.router.put_many("orders", [b"first"], queue_id=1)
    log, file = parts.store._log, tmp_path / "s" / "commitlog" / segment_name(0)
    bodies, end, before = [b"a" * 100] * 500, log.end, file.read_bytes()
    assert log.put_packed(parts.store.writer.queue_to_put("orders", 1), b"", 1000) is None  # now it has a descriptor
    with limited(resource.RLIMIT_FSIZE, end + written_bytes):
        assert log._put_packed(parts.store.writer.queue_to_put("orders", 1), bodies_bytes(bodies), 1000) is None
    assert (log.end, file.read_bytes()) == (end, before)
    assert [receipt.offset for receipt in parts.router.put_many("orders", bodies, queue_id=1)] == [*range(1, 501)]
    assert [message.body for message in parts.store.read("orders", 1, 0, 999)] == [b"first", *bodies]


@compiled
def test_disk_blocks_are_allocated_ahead_of_packed_messages(tmp_path: Path) -> None:
    """Otherwise each step, of a MiB at first, would take the way of other messages, whose pages must be prepared."""
    parts = new_parts(tmp_path / "s", fs=REAL, segment_bytes=1 << 24)
    parts.topics.create("orders", queues=1)
    data, declined = bodies_bytes([b"a" * 1000] * 32), []
    for i in range(400):
        parts.store.run_once(i)  # the flusher's work
        if not isinstance(parts.router.put_packed("orders", data, 0), bytes):
            declined.append(i)
            parts.router.put_many("orders", bodies_of(data), queue_id=0)
    assert declined == [0]  # creates the segment
    assert len([*parts.store.iter("orders", 0)]) == 400 * 32
