"""Values of calls: what is written is read again, and nothing else is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore import OutgoingMessage, QueueRef, RetryPolicy, errors
from mqstore.broker.reads.filters.filter import Filter, parse_filter
from mqstore.contract import NOT_ASKED, BlockedQueue, GroupConfig, Mode, NobodyAsked, TopicConfig, TransactionHandle
from mqstore.errors import ConfigError, FormatError, MQStoreError
from mqstore.options import Duration
from mqstore.remoting.calls import CALLS, TABLES, code_of, error_body, error_of, is_known
from mqstore.remoting.values import codec_of, dumps, loads

BODY = bytes | bytearray | memoryview
TEXTS = st.text(max_size=20)
NUMBERS = st.integers(-(2**63), 2**63)
VALUES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (type(None), st.none()),
    (bool, st.booleans()),
    (int, NUMBERS),
    (float, st.floats(allow_nan=False)),
    (str, TEXTS),
    (BODY, st.binary()),
    (int | None, NUMBERS | st.none()),
    (str | int | None, TEXTS | NUMBERS | st.none()),
    (Literal["earliest", "latest"] | datetime, st.sampled_from(["earliest", "latest"]) | st.datetimes()),
    (datetime, st.datetimes(timezones=st.just(UTC) | st.just(timezone(timedelta(minutes=-90))))),
    (list[int], st.lists(NUMBERS)),
    (set[str], st.sets(TEXTS)),
    (tuple[str, int], st.tuples(TEXTS, NUMBERS)),
    (tuple[int, ...], st.lists(NUMBERS).map(tuple)),
    (Mapping[str, tuple[str, str]], st.dictionaries(TEXTS, st.tuples(TEXTS, TEXTS))),
    (dict[QueueRef, bytes], st.dictionaries(st.builds(QueueRef, TEXTS, NUMBERS), st.binary())),
    (Mode, st.builds(Mode, st.sampled_from(["queue", "pop"]), st.booleans(), st.booleans(), TEXTS | st.none())),
    (TransactionHandle, st.builds(TransactionHandle, TEXTS, TEXTS, TEXTS, NUMBERS, NUMBERS)),
    (BlockedQueue, st.builds(BlockedQueue, NUMBERS, NUMBERS, NUMBERS, TEXTS)),
    (TopicConfig, st.builds(TopicConfig, TEXTS, NUMBERS, NUMBERS, NUMBERS, st.booleans())),
    (OutgoingMessage, st.builds(OutgoingMessage, st.binary(), TEXTS, st.lists(TEXTS) | TEXTS, delay=st.floats(0, 9))),
    (RetryPolicy, st.builds(RetryPolicy, st.integers(1, 99) | st.none(), st.lists(st.integers(0, 99), min_size=1))),
    (GroupConfig, st.builds(GroupConfig, TEXTS, start=st.sampled_from(["earliest", "latest"]) | NUMBERS)),
    (bool | NobodyAsked | None, st.sampled_from([True, False, None, NOT_ASKED])),
]


def travelled(hint: Any, value: Any) -> Any:
    codec, blobs = codec_of(hint), list[bytes]()
    text = codec.write(value, blobs)
    return codec.read(*loads(dumps(text, blobs)))


@pytest.mark.parametrize(("hint", "values"), VALUES, ids=[str(hint) for hint, _ in VALUES])
@given(data=st.data())
def test_value_is_read_as_it_was_written(hint: Any, values: st.SearchStrategy[Any], data: st.DataObject) -> None:
    value = data.draw(values)
    assert travelled(hint, value) == value


@pytest.mark.parametrize("value", [math.inf, -math.inf, timedelta(seconds=1.5)])
def test_durations_travel(value: Any) -> None:
    assert travelled(Duration, value) == (value.total_seconds() if isinstance(value, timedelta) else value)


@pytest.mark.parametrize("text", ["a || b", "*|| c"])
def test_filter_travels_as_its_expression(text: str) -> None:
    assert travelled(Filter | str | None, parse_filter(text)).expression == text


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (int, "true"),
        (int, '"7"'),
        (int, "1.0"),
        (bool, "1"),
        (str, "7"),
        (float, '"7"'),
        (datetime, '"yesterday"'),
        (BODY, "4"),
        (BODY, "-1"),
        (Literal["a", "b"], '"c"'),
        (Literal["a", "b"], "[]"),
        (list[int], '{"a":1}'),
        (list[int], '["a"]'),
        (tuple[int, int], "[1]"),
        (QueueRef, '["t","0"]'),
        (dict[str, int], "[1]"),
        (str | int, "7"),
        (str | int, "[2,7]"),
        (str | int, "[true,7]"),
        (RetryPolicy, '[{"customizedRetryPolicy":{"next":["a"]}},3]'),
        (RetryPolicy, "[{},0]"),
        (mqstore.SendReceipt, '["t",0,1,2,3,4,"zz",null]'),
        (mqstore.Message, '["t",0,0,0,3]'),
        (Filter, '["|| ||","SQL92"]'),
        (NobodyAsked, '"asked"'),
    ],
)
def test_value_of_another_type_is_refused(hint: Any, text: str) -> None:
    body = len(text).to_bytes(4, "big") + text.encode() + b"abc"
    with pytest.raises(MQStoreError):
        codec_of(hint).read(*loads(body))


@given(st.binary(max_size=40))
def test_any_bytes_are_refused_or_read(body: bytes) -> None:
    for call in (CALLS["put"], CALLS["pop"], CALLS["locks.try_lock_batch"]):
        with pytest.raises(MQStoreError):
            call.arguments(body)


@given(st.recursive(st.none() | NUMBERS | TEXTS, lambda each: st.lists(each) | st.dictionaries(TEXTS, each)))
def test_any_json_is_refused_or_read(value: Any) -> None:
    for call in CALLS.values():
        given = dict.fromkeys(call._codecs, value)
        text = json.dumps(given).encode()
        with suppress(ConfigError, FormatError):
            call.arguments(len(text).to_bytes(4, "big") + text)


def test_every_method_of_the_contract_is_a_call() -> None:
    """Or is made by hand in `RemoteBroker`, without a call."""
    by_hand = {
        *("check_open", "listen", "unlisten", "put_async", "filter", "remove_waiter", "local_offsets", "dead_letters"),
        *("saved", "close", "closed", "transactions.on_check", "letters", "session", "log"),
    }
    for table, protocol in TABLES.items():
        names = {name for name, each in vars(protocol).items() if callable(each) and not name.startswith("_")}
        full = {f"{table}.{name}" if table else name for name in names}
        assert full - CALLS.keys() - by_hand == set()


KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, MQStoreError)]


@pytest.mark.parametrize("kind", [*KINDS, LookupError, TypeError, ValueError], ids=lambda kind: kind.__name__)
def test_error_is_raised_as_the_same_class(kind: type[Exception]) -> None:
    error = kind.__new__(kind)
    error.args = ("a text",)
    error.position = 7  # type: ignore[attr-defined]

    again = error_of(code_of(error), None, error_body(error))

    assert (type(again), again.args, vars(again)) == (kind, error.args, vars(error))


def test_receipts_of_an_error_travel(tmp_path: Path) -> None:
    with mqstore.open(tmp_path) as store:
        receipt = store.put("t", b"a")
    error = errors.FlushTimeoutError("late", receipt)
    error.receipts = [receipt]

    again = error_of(1, None, error_body(error))

    assert isinstance(again, errors.FlushTimeoutError)
    assert (again.receipt, again.receipts) == (receipt, [receipt])


def test_error_of_the_server_itself_stays_there() -> None:
    assert not is_known(ZeroDivisionError())
    assert not is_known(AttributeError())
    assert str(error_of(1, "the server failed", b"")) == "the server answers 1: the server failed"
    assert type(error_of(1, None, dumps(["KeyboardInterrupt", ["x"], {}]))) is MQStoreError


def test_value_of_another_class_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match="an argument must be RetryPolicy or NoneType, not 3"):
        codec_of(RetryPolicy | None).write(3, [])
    with pytest.raises(ConfigError, match="b'x' has another type than the method takes"):
        dumps(b"x")
