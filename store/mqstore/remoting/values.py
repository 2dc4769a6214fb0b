"""Values of the engine contract as bytes: a codec for each type hint, made once (remoting-server, section 12).

    body = i32 size | JSON text of that size | blobs, one after the other

    None, bool, int, float, str, Any     as in JSON; a float that JSON does not have, as its text
    bytes                                its size; the bytes are the next blob
    datetime, timedelta                  ISO text; seconds
    list, tuple, set, Mapping            list of the items, or of (key, value)
    NamedTuple, dataclass                list of the fields
    X | None                             null, or X
    X | Y                                (place in the union, value)
    Message                              queue, offset, hash of its tag; its record is the next blob
    Filter                               expression and kind

A value that is read has the type of its hint, or FormatError names it. None of it is code.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import cache
from struct import Struct
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from mqstore.broker.reads.filters.filter import Filter, parse_filter
from mqstore.broker.routing.router import DelayedReceipt
from mqstore.broker.tables.groups import RetryPolicy
from mqstore.errors import ConfigError, FormatError
from mqstore.layout.consumequeue import UNIT
from mqstore.layout.jsontext import Limits, decode
from mqstore.layout.record import MIN_RECORD_BYTES, PHYSICAL_OFFSET_AT, SYS_FLAG_AT
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message, UnitBatch
from mqstore.log.writing.outgoing import Body, flat_body
from mqstore.options import Duration

_SIZE: Final = Struct(">i")
_PHYSICAL: Final = slice(PHYSICAL_OFFSET_AT, SYS_FLAG_AT)
_LIMITS: Final = Limits(depth=32, size=32 << 20, values=2_000_000, strict=True)


class Blobs:
    """Blobs of a body that is read, in their order."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, size: Any) -> bytes:
        end = self._at + size if type(size) is int and size >= 0 else -1
        if not 0 <= end <= len(self._data):
            raise FormatError(f"a blob of {size!r:.40} bytes is not there", "body", self._at)
        found = self._data[self._at : end]
        self._at = end
        return found


class Codec(NamedTuple):
    """Codec of one type."""

    write: Callable[[Any, list[bytes]], Any]
    """(value, blobs) -> JSON value. Appends blobs."""
    read: Callable[[Any, Blobs], Any]
    """(JSON value, blobs) -> value. Raises FormatError for another type."""
    fits: Callable[[Any], bool]
    """Return True for a value of the type, by which the members of a union are distinguished."""


def dumps(value: Any, blobs: Iterable[bytes] = ()) -> bytes:
    """Return the body of a JSON value and its blobs. Raises ConfigError for a value that cannot travel."""
    try:
        text = _JSON.encode(value).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"an argument cannot be sent to a server: {error}") from None
    return b"".join((_SIZE.pack(len(text)), text, *blobs))


def loads(body: bytes) -> tuple[Any, Blobs]:
    """Return the JSON value of a body, and its blobs. Raises FormatError."""
    size = _SIZE.unpack_from(body)[0] if len(body) >= _SIZE.size else -1
    end = _SIZE.size + size
    if not 0 <= size <= len(body) - _SIZE.size:
        raise FormatError(f"the body has no text of {size} bytes", "body", 0)
    return decode(body[_SIZE.size : end], _LIMITS), Blobs(body, end)


def _number(value: Any) -> int:
    try:
        return operator.index(value)  # of numpy
    except TypeError:
        raise TypeError(f"{value!r:.80} has another type than the method takes") from None


_JSON: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_number)


def _wrong(value: Any, hint: str) -> FormatError:
    return FormatError(f"a value must be {hint}, not {value!r:.80}", "body", 0)


def _plain(*kinds: type) -> Codec:
    """Return the codec of a type that JSON has. The reader checks it, so that a wrong argument fails there."""

    def read(value: Any, _: Blobs) -> Any:
        if type(value) not in kinds:
            raise _wrong(value, " or ".join(kind.__name__ for kind in kinds))
        return value

    return _of(kinds, lambda value, _: value, read)


def _of(kind: Any, write: Callable[[Any, list[bytes]], Any], read: Callable[[Any, Blobs], Any]) -> Codec:
    """Return the codec of a class, of which its values are instances."""
    return Codec(write, read, lambda value: isinstance(value, kind))


def _read_float(value: Any, _: Blobs) -> float:
    if type(value) is str and value in ("inf", "-inf", "nan"):
        return float(value)
    if type(value) not in (int, float):
        raise _wrong(value, "a number")
    number: float = value
    return number


def _write_float(value: Any, _: list[bytes]) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if not isinstance(value, float) or math.isfinite(value) else repr(float(value))


def _write_bytes(value: Any, blobs: list[bytes]) -> int:
    blob = flat_body(value)
    blobs.append(blob)
    return len(blob)


def _read_datetime(value: Any, _: Blobs) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _wrong(value, "a time") from None


def _write_message(message: Any, blobs: list[bytes]) -> Any:
    whole = message._whole()
    blobs.append(record := bytes(whole._record_bytes()))
    return [*whole.queue, message.offset, whole.tags_code, len(record)]


def message_of(value: Any, blobs: Blobs) -> Message:
    """Return a message that was written."""
    topic, queue_id, offset, tags_code, size = _items(value, 5)
    record = blobs.take(size)
    if not all(type(each) is int for each in (queue_id, offset, tags_code)) or type(topic) is not str:
        raise _wrong(value, "a message")
    if len(record) < MIN_RECORD_BYTES or int.from_bytes(record[:4], "big") != len(record):
        raise _wrong(value, "a message with its record")
    unit = UNIT.pack(int.from_bytes(record[_PHYSICAL], "big", signed=True), len(record), tags_code)
    return Message(UnitBatch(QueueRef(topic, queue_id), record, unit, offset), 0, offset)


_STORED: Final = tuple[str, int, int, int, int, int, str, str | None]
_DELAYED: Final = tuple[str, int, int, int, int, int, str, str | None, str, int]
"""Receipts: topic, queue, offset, physical offset, size, time, host, unique key; topic and time of a delayed one."""


def _read_receipt(value: Any, blobs: Blobs) -> SendReceipt:
    is_delayed = len(_items(value)) == len(get_args(_DELAYED))
    items = codec_of(_DELAYED if is_delayed else _STORED).read(value, blobs)
    topic, queue_id, *numbers, host, key = items[:8]
    try:
        found = (QueueRef(topic, queue_id), *numbers, bytes.fromhex(host), key)
    except ValueError:
        raise _wrong(value, "a receipt") from None
    return DelayedReceipt((*found, *items[8:])) if is_delayed else SendReceipt(found)


def _write_receipt(receipt: Any, _: list[bytes]) -> Any:
    queue, offset, physical_offset, size, stamp, host, *rest = receipt
    return [*queue, offset, physical_offset, size, stamp, host.hex(), *rest]


def _read_policy(value: Any, _: Blobs) -> RetryPolicy:
    policy, attempts = _items(value, 2)
    try:
        return RetryPolicy._from_json(policy).with_attempts(attempts)
    except (ValueError, AttributeError, TypeError):
        raise _wrong(value, "a retry policy") from None


def _items(value: Any, count: int | None = None) -> list[Any]:
    if type(value) is not list or (count is not None and len(value) != count):
        raise _wrong(value, "a list" if count is None else f"a list of {count}")
    return value


def _read_filter(value: Any, _: Blobs) -> Filter | None:
    expression, kind = _items(value, 2)
    if type(expression) is not str or type(kind) is not str:
        raise _wrong(value, "a filter")
    return parse_filter(expression, kind)


_ANY = Codec(lambda value, _: value, lambda value, _: value, lambda value: True)
_NONE = Codec(lambda value, _: None, lambda value, _: None, lambda value: value is None)
_NUMBER = _of(int | float | timedelta, _write_float, _read_float)
_BYTES = _of(bytes | bytearray | memoryview, _write_bytes, lambda value, blobs: blobs.take(value))
_KNOWN: Final[Mapping[Any, Codec]] = {
    Any: _ANY,
    object: _ANY,
    NoneType: _NONE,
    bool: _plain(bool),
    int: _plain(int),
    str: _plain(str),
    float: _NUMBER,
    Duration: _NUMBER,
    bytes: _BYTES,
    Body: _BYTES,
    datetime: _of(datetime, lambda value, _: value.isoformat(), _read_datetime),
    Message: _of(Message, _write_message, message_of),
    SendReceipt: _of(SendReceipt, _write_receipt, _read_receipt),
    RetryPolicy: _of(RetryPolicy, lambda value, _: [value._as_json(), value.max_attempts], _read_policy),
    Filter: Codec(
        lambda value, _: [value.expression, value.kind], _read_filter, lambda value: hasattr(value, "expression")
    ),
}


@cache
def codec_of(hint: Any) -> Codec:
    """Return the codec of a type hint. Raises TypeError for a type that cannot travel.

    >>> codec = codec_of(dict[QueueRef, int | None])
    >>> body = dumps(codec.write({QueueRef("orders", 3): 7}, []))
    >>> body[4:]
    b'[[["orders",3],7]]'
    >>> codec.read(*loads(body))
    {QueueRef(topic='orders', queue_id=3): 7}
    """
    if hint in _KNOWN:
        return _KNOWN[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _chosen(args)
    if origin in (Union, UnionType):
        return _union(args)
    kind: Any = origin or hint
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            each = {member.value: member for member in kind}
            return Codec(
                lambda value, _: value.value, lambda value, _: each[_one_of(value, each)], lambda value: value in kind
            )
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return _record(kind, get_type_hints(kind), kind)
        if is_dataclass(kind):
            hints = get_type_hints(kind)
            return _record(kind, {each.name: hints[each.name] for each in fields(kind) if each.init}, kind)
        if issubclass(kind, tuple) and args[-1] is not Ellipsis:
            return _record(kind, dict(enumerate(args)), lambda *values: values)
        if kind is dict or issubclass(kind, Mapping):
            return _mapping(*args)
        if kind in (list, set, frozenset, tuple) or issubclass(kind, Iterable):
            make = set if issubclass(kind, AbstractSet) else tuple if issubclass(kind, tuple) else list
            return _many(make, codec_of(args[0] if args else Any))
    raise TypeError(f"{hint} cannot travel")


def _one_of(value: Any, chosen: Iterable[Any]) -> Any:
    if not isinstance(value, str | int | None) or value not in chosen:
        raise _wrong(value, f"one of {', '.join(map(str, chosen))}")
    return value


def _chosen(chosen: Sequence[Any]) -> Codec:
    return _of(str, lambda value, _: value, lambda value, _: _one_of(value, chosen))


def _union(args: Sequence[Any]) -> Codec:
    optional = NoneType in args
    for group in (Duration, Body):  # unions that are one type here
        if set(get_args(group)) <= set(args):
            args = [group, *(arg for arg in args if arg not in get_args(group))]
    codecs = [codec_of(arg) for arg in args if arg is not NoneType]
    if len(codecs) == 1:
        [only] = codecs

        def write_one(value: Any, blobs: list[bytes]) -> Any:
            try:
                return None if value is None else only.write(value, blobs)
            except AttributeError:
                raise ConfigError(f"an argument must be {' or '.join(map(_name, args))}, not {value!r:.80}") from None

        return Codec(
            write_one,
            lambda value, blobs: None if value is None else only.read(value, blobs),
            lambda value: value is None or only.fits(value),
        )

    def write(value: Any, blobs: list[bytes]) -> Any:
        if value is None:
            return None
        for i, each in enumerate(codecs):
            if each.fits(value):
                return [i, each.write(value, blobs)]
        raise ConfigError(f"an argument must be {' or '.join(map(_name, args))}, not {value!r:.80}")

    def read(value: Any, blobs: Blobs) -> Any:
        if value is None and optional:
            return None
        i, inner = _items(value, 2)
        if type(i) is not int or not 0 <= i < len(codecs):
            raise _wrong(value, " or ".join(map(_name, args)))
        return codecs[i].read(inner, blobs)

    return Codec(write, read, lambda value: any(each.fits(value) for each in codecs))


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))


def _record(kind: type, hints: Mapping[Any, Any], make: Callable[..., Any]) -> Codec:
    """Return the codec of a tuple with a type for each place, or of a dataclass."""
    names, codecs = list(hints), [codec_of(hint) for hint in hints.values()]
    in_order = issubclass(kind, tuple)
    values: Callable[[Any], Iterable[Any]] = (
        iter if in_order else lambda value: [getattr(value, name) for name in names]
    )

    def write(value: Any, blobs: list[bytes]) -> Any:
        if not isinstance(value, tuple if in_order else kind):
            raise ConfigError(f"an argument must be {_name(kind)}, not {value!r:.80}")
        return [codec.write(item, blobs) for codec, item in zip(codecs, values(value), strict=True)]

    def read(value: Any, blobs: Blobs) -> Any:
        items = [codec.read(item, blobs) for codec, item in zip(codecs, _items(value, len(codecs)), strict=True)]
        return make(*items) if in_order else make(**dict(zip(names, items, strict=True)))

    return _of(kind, write, read)


def _many(make: Callable[[list[Any]], Any], item: Codec) -> Codec:
    def write(values: Any, blobs: list[bytes]) -> Any:
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            return values  # refused where it is read
        return [item.write(value, blobs) for value in values]

    def read(value: Any, blobs: Blobs) -> Any:
        return make([item.read(each, blobs) for each in _items(value)])

    return Codec(
        write, read, lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    )


def _mapping(key: Any, value: Any) -> Codec:
    keys, values = codec_of(key), codec_of(value)

    def write(given: Any, blobs: list[bytes]) -> Any:
        if not isinstance(given, Mapping):
            return given  # refused where it is read
        return [[keys.write(each, blobs), values.write(of, blobs)] for each, of in given.items()]

    def read(given: Any, blobs: Blobs) -> Any:
        pairs = (_items(pair, 2) for pair in _items(given))
        return {keys.read(each, blobs): values.read(of, blobs) for each, of in pairs}

    return _of(Mapping, write, read)
