"""What a caller may put: bodies, tags, keys, properties, and the bytes they become (client-semantics A1.1, A1.2).

Every check is made before anything is written, and names the argument that breaks a rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import CRC32, KEYS, TAGS, UNIQ_KEY, encode_properties, is_reserved

if TYPE_CHECKING:
    from mqstore.log.message import Message

__all__ = [
    "Body",
    "Copy",
    "OutgoingMessage",
    "check_integer",
    "flat_body",
    "tail_of",
    "tail_of_bytes",
    "user_properties",
]

Body = bytes | bytearray | memoryview

Copy: TypeAlias = "tuple[Message, str, int, bytes]"
"""A stored message on its way to another queue: message, topic, queue id, and the encoded properties that it has there,
each closed by 0x02. A bare tuple: there are hundreds of thousands a second of them."""

_CRC_PIECE = CRC32.encode() + b"\1"
_CONTROL = frozenset(map(chr, (*range(32), *range(0x7F, 0xA0))))


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A body with the options of `put`, for `put_many`."""

    body: Body
    tag: str | None = None
    keys: str | Iterable[str] | None = None
    properties: Mapping[str, str] | None = None
    unique_key: str | None = None
    flag: int = 0


def flat_body(body: object) -> bytes:
    """`body` as bytes. InvalidMessageError for what has none."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    hint = "; encode it first" if isinstance(body, str) else ""
    raise InvalidMessageError(f"a body is bytes, not {type(body).__name__}{hint}", "body")


def check_integer(value: object, bits: int, field: str) -> None:
    """InvalidMessageError unless `value` is an integer of `bits` bits, signed."""
    if not isinstance(value, int) or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise InvalidMessageError(f"{field} {value!r} is not an integer of {bits} bits", field)


def checked_text(value: object, field: str, forbidden: str, rule: str) -> str:
    """`value`, if it is a str, not blank, and free of `forbidden` and of control characters."""
    if not isinstance(value, str) or not value.strip() or any(c in value for c in forbidden):
        raise InvalidMessageError(f"{field} {value!r}: {rule}", field)
    if not value.isprintable() and not _CONTROL.isdisjoint(value):
        raise InvalidMessageError(f"{field} {value!r} holds a control character", field)
    return value


def user_properties(
    tag: str | None = None,
    keys: str | Iterable[str] | None = None,
    properties: Mapping[str, str] | None = None,
    unique_key: str | None = None,
) -> dict[str, str]:
    """What `put` was given, as stored properties. InvalidMessageError names the argument that breaks a rule."""
    stored: dict[str, str] = {}
    for name, value in (properties or {}).items():
        checked_text(name, "properties", "", "names and values are str, and not blank")
        checked_text(value, "properties", "", f"the value of {name!r} is a str, and not blank")
        if is_reserved(name):
            raise InvalidMessageError(f"property {name!r} is reserved; use the argument made for it", "properties")
        stored[name] = value
    if keys is not None:
        words = [keys] if isinstance(keys, str) else list(keys)
        for word in words:
            checked_text(word, "keys", " ", "a key is a str without spaces, and not empty")
        if words:
            stored[KEYS] = " ".join(words)
    if tag is not None:
        stored[TAGS] = checked_text(tag, "tag", "|", "a tag is a str without '|', and not blank")
    if unique_key is not None:
        stored[UNIQ_KEY] = checked_text(unique_key, "unique_key", "", "a str, and not blank")
    return stored


def tail_of(plain_tail: bytes, properties: Mapping[str, str]) -> bytes:
    """What stands behind a body: topic and properties with their lengths. `plain_tail` is that without properties."""
    return tail_of_bytes(plain_tail, encode_properties(properties))


def tail_of_bytes(plain_tail: bytes, properties: bytes) -> bytes:
    """As `tail_of`, of properties that are encoded already.

    A `__CRC32#` that came in belongs to another record: kept, it would make this one fail its check (store-format 2.5).
    """
    if properties.find(_CRC_PIECE) >= 0:  # `in` looks for an integer first, and takes three times as long
        properties = b"\2".join(piece for piece in properties.split(b"\2") if not piece.startswith(_CRC_PIECE))
    return b"".join((plain_tail[:-2], len(properties).to_bytes(2, "big"), properties))
