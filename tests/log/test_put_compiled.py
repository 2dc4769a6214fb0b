"""A compiled put does what Python does, or leaves it to Python; `put` is a method like any other, compiled or not."""

from __future__ import annotations

import inspect
import pydoc
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqstore import Durability, OutgoingMessage, SendReceipt, SimulatedClock, Store, StoreConfig, native
from mqstore.broker.broker import Broker
from mqstore.broker.routing.router import Router
from mqstore.errors import ConfigError, InvalidMessageError, StoreClosedError
from mqstore.log import commitlog as commitlog_module
from mqstore.log.store import MessageStore
from mqstore.log.writing import writer as writer_module
from tests.log.support import act_behind
from tests.without import Door, append_compiled, compiled, put_by_python

kernel: Any = native.kernel

Puts = list[tuple[Any, dict[str, Any]]]

_TEXT = st.text(st.sampled_from("ab_| \t\x7f\x85\xa0\u2003\ud800\U0001f600é订"), max_size=5)
_PROPERTIES = st.dictionaries(_TEXT | st.sampled_from(["KEYS", "__CRC32#"]), _TEXT | st.just("v" * 3000), max_size=3)
_FLAGS = st.sampled_from([None, 0, 7, -(2**31), 2**31, True, 1.0])
_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "tag": st.none() | _TEXT,
    "keys": st.none() | _TEXT | st.lists(_TEXT, max_size=3) | st.lists(_TEXT, max_size=3).map(tuple) | st.integers(),
    "properties": st.none() | _PROPERTIES,
    "unique_key": st.none() | _TEXT,
    "flag": _FLAGS,
}
_MORE: dict[str, st.SearchStrategy[Any]] = {
    "message_group": st.none() | _TEXT | st.sampled_from(["g" * 63, "g" * 64, "é" * 31, "é" * 32, 7]),
    "durability": st.sampled_from([None, "append", "flush", "maybe", 1]),
    "queue_id": st.sampled_from([None, 0, 1, 2**14, True, "0"]),
    "colour": st.just("red"),
}


def log_of(
    folder: Path, puts: Puts, host: str | None, durability: Durability, name: str = "put", *, by_python: bool = False
) -> tuple[bytes, list[Any], int]:
    """The commitlog that these calls of method `name` make, the receipt or the error of each, and how many failed."""
    clock = SimulatedClock(1_700_000_000_000)
    options: Any = {"store_host": host} if host else {}
    config = StoreConfig(clock=clock, segment_bytes=4096, max_message_size=1400, **options)
    results: list[Any] = []
    with MessageStore(folder, durability=durability, config=config) as store:
        if by_python:
            put_by_python(store)
        for body, options in puts:
            try:
                results.append(tuple(getattr(store, name)("topic", body, **options)))
            except (InvalidMessageError, ConfigError, TypeError) as error:
                results.append((type(error), str(error)))
            clock.advance(len(body) % 3)
        failed = store.stats().failed_puts
        return b"".join(path.read_bytes() for path in sorted((folder / "commitlog").iterdir())), results, failed


@compiled
@example([(b"x", {name: None}) for name in ("delay", "deliver_at", "delay_level", "compressed")], None, "append")
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1500).map(lambda n: b"b" * n) | st.just(bytearray(b"array")),
            st.fixed_dictionaries({}, optional=_OPTIONS | _MORE),
        ),
        max_size=8,
    ),
    st.sampled_from([None, "[2001:db8::1]:9"]),
    st.sampled_from(["append", "flush"]),
)
def test_compiled_put_agrees_with_python(
    tmp_path_factory: pytest.TempPathFactory, puts: Puts, host: str | None, durability: Durability
) -> None:
    ours = log_of(tmp_path_factory.mktemp("compiled"), puts, host, durability)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commitlog_module, "kernel", None)
        assert log_of(tmp_path_factory.mktemp("python"), puts, host, durability, by_python=True) == ours


_MESSAGE_VALUES: dict[str, list[Any]] = {
    "body": [b"", bytearray(b"array"), "text"],
    "tag": [None, "a", "a|b"],
    "keys": ["k", ["k", "l"], ("k",), [], 5, "a b"],
    "properties": [{"n": "v"}, {}, {"KEYS": "x"}, {"_n": "v"}, {"n": "v" * 3000}],
    "unique_key": ["u", ""],
    "flag": [None, 0, 7, -(2**31), 2**31, True, 1.0],
    "topic": ["topic", "other"],
    "queue_id": [0, 1],
    "durability": ["append"],
    "message_group": ["g"],
    "delay": [1, 0],
    "deliver_at": [1.0],
    "delay_level": [0],
    "compressed": ["zlib"],
}
_ALONE: Puts = [
    ([b"first", OutgoingMessage(**{"body": b"x", name: value})], {})
    for name, values in _MESSAGE_VALUES.items()
    for value in values
]


_MIXED = [bytearray(b"for Python"), OutgoingMessage(b"x", unique_key="u"), b"last"]


@compiled
@example([*_ALONE, (_MIXED, {})])
@given(st.lists(st.tuples(st.lists(st.builds(OutgoingMessage, st.just(b"x"), **_OPTIONS)), st.just({})), max_size=4))
def test_compiled_parts_of_messages_are_those_of_python(tmp_path_factory: pytest.TempPathFactory, puts: Puts) -> None:
    found = log_of(tmp_path_factory.mktemp("compiled"), puts, None, "append", "put_many")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "kernel", None)
        assert log_of(tmp_path_factory.mktemp("python"), puts, None, "append", "put_many") == found


@compiled
@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, b""),
        ({"tag": None}, b""),
        ({"tag": "a b", "keys": "k"}, b"KEYS\1k\2TAGS\1a b\2"),
        ({"keys": ["k", "l"], "unique_key": "u"}, b"KEYS\1k l\2UNIQ_KEY\1u\2"),
        ({"keys": ()}, b""),
        ({"message_group": "g", "properties": {"n": "v", "订": "单"}}, "n\1v\2订\1单\2__SHARDINGKEY\1g\2".encode()),
        ({"flag": -5, "durability": "flush"}, b""),
        ({"properties": {"n": "v" * 3000}}, None),
        ({"properties": {"_n": "v"}}, None),
        ({"delay": 1}, None),
    ],
)
def test_puts_that_are_compiled(tmp_path: Path, options: dict[str, Any], stored: bytes | None) -> None:
    with MessageStore(tmp_path) as store:
        door = Door(store)
        receipt = door.put("t", b"body", 0, **options)
        assert door.left == ([(("t", b"body", 0), options)] if stored is None else [])
        if stored is not None:
            [message] = store.read("t")
            assert (message._encoded_properties, message.flag) == (stored, options.get("flag", 0))
            assert receipt.unique_key == options.get("unique_key", receipt.message_id)


@compiled
@pytest.mark.parametrize("sender", [None, 5, object()])
def test_other_sender_is_left_to_python(sender: object) -> None:
    door = Door(sender)
    door.put("t", b"", 0, tag="a")
    delattr(door, "_sender")
    door.put("t", b"")
    assert door.left == [(("t", b"", 0), {"tag": "a"}), (("t", b""), {})]


_NEEDS: dict[str, Any] = {
    "tip": kernel and kernel.LogTail(),
    "putters": {},
    "reserved": frozenset(),
    "max_body": 9,
    "flushes": False,
    **dict.fromkeys(("finish", "after", "note"), len),
}
_BROKER: dict[str, Any] = {
    **dict.fromkeys(("topics", "group_queue", "group_hash", "keys", "timer_topic", "schedule_topic"), ""),
    "counters": {},
    "delayed": SendReceipt,
    "precision_ms": 1000,
}


@compiled
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *[("tip", 5), ("putters", []), ("reserved", []), ("max_body", "9")],
        *[("counters", []), ("delayed", list), ("precision_ms", 0), ("other", 1)],
    ],
)
def test_a_sender_of_something_else_is_not_made(name: str, wrong: object) -> None:
    with pytest.raises(TypeError):
        kernel.Sender(**_NEEDS | _BROKER | {name: wrong})


# -- beside puts by Python, which hold the log's lock ------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("call", ["crc32c", "_CRC.pack_into", "encode_blank", "encode_records", "encode_copies"])
def test_a_compiled_put_does_not_come_in_the_middle_of_one_by_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A large record or batch would have to begin again behind it, and another would come meanwhile."""
    declined: list[object] = []

    def put() -> None:
        with ThreadPoolExecutor(1) as pool:
            declined.append(pool.submit(append_compiled, store, "t", b"x").result(60))

    with MessageStore(tmp_path, config=StoreConfig(segment_bytes=4096)) as store:
        store.put("t", bytes(2100))
        messages = store.read("t")
        act_behind(monkeypatch, call, put)
        if call == "encode_records":
            store.put_many("t", [b"1"])
        elif call == "encode_copies":
            store.copy_many([(message, "t", 0, b"") for message in messages])
        else:
            store.append("t", 0, bytes(2100), reconsume_times=1)
        assert declined == [None]
        assert append_compiled(store, "t", b"behind").offset == 2
        assert len(store.read("t")) == 3
        assert list(store.verify()) == []


# -- a method like any other, with compiled parts or without -----------------------------------------------------------


def test_put_is_replaced_on_an_object_and_in_the_class(store: MessageStore) -> None:
    with mock.patch.object(store, "put") as put:
        store.put("t", b"x")
    put.assert_called_once_with("t", b"x")
    with mock.patch.object(MessageStore, "put") as put:
        store.put("t", b"x")
    put.assert_called_once_with("t", b"x")
    assert store.put("t", b"x").offset == 0


@pytest.mark.parametrize("door", [MessageStore, Router, Broker, Store])
def test_put_says_what_it_does_and_takes(door: Any) -> None:
    kinds = {name: parameter.kind for name, parameter in inspect.signature(door.put).parameters.items()}
    assert list(kinds) == ["self", "topic", "body", "queue_id", "options"]
    assert kinds["options"] is inspect.Parameter.VAR_KEYWORD
    helped = re.sub(r"[\s|]+", " ", pydoc.plain(pydoc.render_doc(door)))  # 3.13 gives each parameter a line
    assert re.search(r" put\( ?self, topic[^)]*\) -> [^)]*? Append one message", helped)


def test_put_on_what_is_no_open_store_is_an_error(tmp_path: Path) -> None:
    put: Any = MessageStore.put
    with pytest.raises(TypeError):
        put()
    with pytest.raises(AttributeError):
        put(MessageStore.__new__(MessageStore), "t", b"x")
    with MessageStore(tmp_path) as store:
        store.put("t", b"x")
    with pytest.raises(StoreClosedError):
        store.put("t", b"x")


@pytest.mark.parametrize("size", [1, 7, 8, 9, 100, 16_384, 16_385])
def test_checksum_of_profile_rocketmq_is_zlibs_of_the_body(tmp_path: Path, size: int) -> None:
    body = bytes(i * 7 % 251 for i in range(size))
    with Store(tmp_path / "store", profile="rocketmq") as store:
        receipt = store.put("orders", body, queue_id=0)
        [message] = store.read(*receipt.queue, receipt.offset)

    assert int.from_bytes(message._record_bytes()[8:12], "big") == zlib.crc32(body) & 0x7FFF_FFFF
