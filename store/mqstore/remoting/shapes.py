"""Bodies of requests and answers: JSON as fastjson reads it, and the items of a batch (remoting-server, section 2)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from struct import Struct
from typing import Any, Final

from mqstore.errors import FormatError
from mqstore.layout.jsontext import decode
from mqstore.layout.properties import encode_properties

BatchItem = tuple[int, bytes, str]
"""Flag, body and properties of a message of a batch."""
_ITEM: Final = Struct(">iiiii")
_I16: Final = Struct(">h")


def dumps(value: Any) -> bytes:
    """Return a body. Numbers as keys become texts, which all clients read, and half of a surrogate pair a "?", as in
    Java."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode(errors="replace")


def queue_key(broker_name: str, topic: str, queue_id: int) -> tuple[tuple[str, str | int], ...]:
    """Return a queue as a key of `dumps_tables`."""
    return (("brokerName", broker_name), ("queueId", queue_id), ("topic", topic))


def dumps_tables(value: Any) -> bytes:
    """Return a body in which objects are keys, as fastjson writes them and no JSON parser reads them. Such a key is
    given by its members.

    >>> offsets = {queue_key("b", "orders", 3): 7}
    >>> dumps_tables({"offsetTable": offsets})
    b'{"offsetTable":{{"brokerName":"b","queueId":3,"topic":"orders"}:7}}'
    """
    return _text_of(value).encode()


def _text_of(value: Any) -> str:
    if isinstance(value, dict):
        keys = (_text_of(dict(key)) if isinstance(key, tuple) else dumps(str(key)).decode() for key in value)
        return "{" + ",".join(map(":".join, zip(keys, map(_text_of, value.values()), strict=True))) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text_of, value)) + "]"
    return dumps(value).decode()


def loads(body: bytes | str) -> dict[str, Any]:
    """Return the object of a body. Raises FormatError if it is none."""
    value = decode(body)
    if type(value) is not dict:
        raise FormatError("the body is not a JSON object", "body", 0)
    return value


@contextmanager
def read_body() -> Iterator[None]:
    """Read the members of a body: raises FormatError if one is missing or is another thing."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"the body is damaged: {error!r}", "body", 0) from None


def batch_item(flag: int, body: bytes, properties: Mapping[str, str]) -> bytes:
    """Return a message of a batch, as `batch_items` reads it. Raises InvalidMessageError for bad properties."""
    pairs = encode_properties(properties)
    head = _ITEM.pack(_ITEM.size + len(body) + _I16.size + len(pairs), 0, 0, flag, len(body))
    return b"".join((head, body, _I16.pack(len(pairs)), pairs))


def batch_items(body: bytes) -> Iterator[BatchItem]:
    """Yield the messages of a batch: i32 size | i32 0 | i32 0 | i32 flag | i32 size, body | i16 size, properties.
    Raises FormatError for another body."""
    at = 0
    while at < len(body):
        try:
            size, _, _, flag, body_bytes = _ITEM.unpack_from(body, at)
            end, start = at + size, at + _ITEM.size
            properties_at = start + body_bytes
            if not (body_bytes >= 0 and properties_at + _I16.size <= end <= len(body)):
                raise ValueError(f"a size of {size} or {body_bytes}")
            [properties_bytes] = _I16.unpack_from(body, properties_at)
            if properties_at + _I16.size + properties_bytes != end:
                raise ValueError(f"properties of {properties_bytes} bytes")
            yield flag, body[start:properties_at], body[properties_at + _I16.size : end].decode()
        except Exception as error:  # struct.error, UnicodeDecodeError, ValueError
            raise FormatError(f"the batch is damaged: {error}", "body", at) from None
        at = end


def properties_of(text: str | None) -> dict[str, str]:
    """Return the properties of a send: name, 0x01, value, 0x02, repeated. Parts without a name are ignored, as
    RocketMQ does.

    >>> list(properties_of("TAGS\\x01paid\\x02KEYS\\x01o-1\\x02").items())
    [('TAGS', 'paid'), ('KEYS', 'o-1')]
    """
    pairs = (pair.partition("\x01") for pair in (text or "").split("\x02"))
    return {name: value for name, found, value in pairs if found and name}
