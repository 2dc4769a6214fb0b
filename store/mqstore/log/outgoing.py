"""What a caller may put: bodies, tags, keys, properties, and the bytes they become (clients#message).

Every check is made before anything is written, and names the argument that breaks a rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from datetime import datetime
from difflib import get_close_matches
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeAlias

from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import (
    CRC32,
    INNER_MULTI_QUEUE_OFFSET,
    KEYS,
    SHARDINGKEY,
    TAGS,
    UNIQ_KEY,
    encode_properties,
    is_reserved,
)
from mqstore.options import Durability, Duration

if TYPE_CHECKING:
    from mqstore.log.message import Message

__all__ = [
    "MAX_MESSAGE_GROUP",
    "ROUTING",
    "SLOTS",
    "Body",
    "Copy",
    "OutgoingMessage",
    "check_integer",
    "checked_group",
    "checked_pairs",
    "checked_text",
    "flat_body",
    "key_words",
    "no_such_option",
    "refuse_options",
    "refuse_routing",
    "tail_of",
    "tail_of_bytes",
    "user_properties",
    "without_place",
]

Body = bytes | bytearray | memoryview

Copy: TypeAlias = "tuple[Message, str, int, bytes]"
"""A stored message on its way to another queue: message, topic, queue id, and the encoded properties that it has there,
each closed by 0x02. A bare tuple: there are hundreds of thousands a second of them."""

_OF_RECORD = (CRC32.encode() + b"\1", INNER_MULTI_QUEUE_OFFSET.encode() + b"\1")
_CONTROL = frozenset(map(chr, (*range(32), *range(0x7F, 0xA0))))

MAX_MESSAGE_GROUP = 63
"""Bytes (clients#message-rules)."""
ROUTING = ("message_group", "delay", "deliver_at", "delay_level")
"""Options of a put that say where a message goes, or when; at most one of them."""


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message on its way in: a body with all that a put can be told about it.

    What stands behind the star says where it goes, and when: for a producer and its interceptors. A put of many to one
    queue has that from the call, and refuses a message that asks for something else.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store, store.producer() as producer:
    ...     messages = [b"a", mqstore.OutgoingMessage(b"b", topic="mails", tag="new")]
    ...     [receipt.topic for receipt in producer.send_many("orders", messages)]
    ['orders', 'mails']
    """

    body: Body
    tag: str | None = None
    keys: str | Iterable[str] | None = None
    properties: Mapping[str, str] | None = None
    unique_key: str | None = None
    flag: int = 0
    _: KW_ONLY
    topic: str | None = None
    """None: the one that the call names; so with the others."""
    queue_id: int | None = None
    durability: Durability | None = None
    message_group: str | int | None = None
    """A whole number stands for its digits."""
    delay: Duration | None = None
    deliver_at: datetime | float | None = None
    delay_level: int | None = None
    compressed: Literal["zlib"] | None = None
    """How the body was compressed already; whoever reads it gets it inflated."""


_ONE_BY_ONE = (*ROUTING, "compressed")
"""Options that only messages put one by one may have."""
_ELSEWHERE = ("queue_id", "durability", *_ONE_BY_ONE)
_elsewhere = attrgetter(*_ELSEWHERE)
_NOWHERE = (None,) * len(_ELSEWHERE)
SLOTS = attrgetter("body", "tag", "keys", "properties", "unique_key", "flag", "topic", *_ELSEWHERE)(OutgoingMessage)
"""Descriptors of a message's attributes in the order that `kernel.message_parts` takes them in."""


def refuse_routing(message: OutgoingMessage, topic: str) -> None:
    """InvalidMessageError for a message that a put of many to one queue of `topic` could not treat as it asks."""
    asked = _elsewhere(message)
    if asked == _NOWHERE and message.topic in (None, topic):
        return
    wrong = next((name for name, value in zip(_ELSEWHERE, asked, strict=True) if value is not None), "topic")
    advice = "use" if wrong in _ONE_BY_ONE else "give it to the call, or use"
    raise InvalidMessageError(
        f"a message asks for {wrong} {getattr(message, wrong)!r}, and many are put to one queue in one way; "
        f"{advice} Producer.send_many",
        wrong,
    )


def refuse_options(options: Mapping[str, object]) -> None:
    """Refuse options of a put of many: InvalidMessageError for those that one message may have, which names what takes
    them, and TypeError for those that there are not."""
    known = {field.name for field in fields(OutgoingMessage)} - {"body", "topic"}
    unknown = options.keys() - known
    if unknown:
        raise no_such_option(unknown, known)
    for name in (name for name, value in options.items() if value is not None):
        how = (
            f"use Producer.send_many(topic, bodies, {name}=...), or put for each message"
            if name in _ONE_BY_ONE
            else f"give each message its own: OutgoingMessage(body, {name}=...)"
        )
        raise InvalidMessageError(f"put_many puts all messages to one queue at once, without {name}; {how}", name)


def no_such_option(names: Iterable[str], known: Iterable[str]) -> TypeError:
    """The error for options of a put that there are not."""
    wrong = sorted(names)
    close = get_close_matches(wrong[0], known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return TypeError(f"there is no option {', '.join(map(repr, wrong))} of a message{hint}")


def flat_body(body: object) -> bytes:
    """`body` as bytes, and no class derived from them. InvalidMessageError for what has none."""
    if type(body) is bytes:
        return body
    if isinstance(body, (bytes, bytearray, memoryview)):
        return memoryview(body).tobytes()
    hint = "; encode it first" if isinstance(body, str) else ""
    raise InvalidMessageError(f"a body is bytes, not {type(body).__name__}{hint}", "body")


def check_integer(value: object, bits: int, field: str) -> None:
    """InvalidMessageError unless `value` is an integer of `bits` bits, signed."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise InvalidMessageError(f"{field} {value!r} is not an integer of {bits} bits", field)


def checked_text(value: object, field: str, forbidden: str, rule: str) -> str:
    """`value`, if it is a str, not blank, and free of `forbidden` and of control characters."""
    if not isinstance(value, str) or not value.strip() or any(c in value for c in forbidden):
        raise InvalidMessageError(f"{field} {value!r}: {rule}", field)
    if not value.isprintable() and not _CONTROL.isdisjoint(value):
        raise InvalidMessageError(f"{field} {value!r} holds a control character", field)
    return value


def key_words(keys: object) -> tuple[str, ...]:
    """The keys that `put` was given, one or several. InvalidMessageError for what is neither."""
    if not isinstance(keys, Iterable):
        raise InvalidMessageError(f"keys are a str or several, not {keys!r:.80}", "keys")
    return (keys,) if isinstance(keys, str) else tuple(keys)


def checked_group(group: object) -> str:
    """Return `group` as text; a whole number stands for its digits. InvalidMessageError for what is blank, too long, or
    neither a str nor an int."""
    if isinstance(group, int) and not isinstance(group, bool):
        group = str(int(group))
    checked = checked_text(group, "message_group", "", "a message group is a str or an int, and not blank")
    if len(checked.encode(errors="surrogatepass")) > MAX_MESSAGE_GROUP:
        raise InvalidMessageError(
            f"message_group {checked[:40]!r}... is longer than {MAX_MESSAGE_GROUP} bytes", "message_group"
        )
    return checked


def checked_pairs(properties: object) -> Mapping[str, str]:
    """`properties`, if they are a mapping."""
    if not isinstance(properties, Mapping):
        raise InvalidMessageError(f"properties are a mapping of str to str, not {properties!r:.80}", "properties")
    return properties


def user_properties(
    tag: str | None = None,
    keys: str | Iterable[str] | None = None,
    properties: Mapping[str, str] | None = None,
    unique_key: str | None = None,
    message_group: str | int | None = None,
) -> dict[str, str]:
    """What `put` was given, as stored properties. InvalidMessageError names the argument that breaks a rule."""
    stored: dict[str, str] = {}
    for name, value in checked_pairs(properties or {}).items():
        checked_text(name, "properties", "", "names and values are str, and not blank")
        checked_text(value, "properties", "", f"the value of {name!r} is a str, and not blank")
        if is_reserved(name):
            raise InvalidMessageError(f"property {name!r} is reserved; use the argument made for it", "properties")
        stored[name] = value
    if keys is not None:
        words = key_words(keys)
        for word in words:
            checked_text(word, "keys", " ", "a key is a str without spaces, and not empty")
        if words:
            stored[KEYS] = " ".join(words)
    if tag is not None:
        stored[TAGS] = checked_text(tag, "tag", "|", "a tag is a str without '|', and not blank")
    if unique_key is not None:
        stored[UNIQ_KEY] = checked_text(unique_key, "unique_key", "", "a str, and not blank")
    if message_group is not None:
        stored[SHARDINGKEY] = checked_group(message_group)
    return stored


def tail_of(plain_tail: bytes, properties: Mapping[str, str]) -> bytes:
    """What stands behind a body: topic and properties with their lengths. `plain_tail` is that without properties."""
    return tail_of_bytes(plain_tail, encode_properties(properties))


def tail_of_bytes(plain_tail: bytes, properties: bytes) -> bytes:
    """As `tail_of`, of properties that are encoded already, by `without_place`."""
    properties = without_place(properties)
    return b"".join((plain_tail[:-2], len(properties).to_bytes(2, "big"), properties))


def without_place(properties: bytes) -> bytes:
    """Return encoded properties without those that belong to another record, or the same object if there are none.

    A `__CRC32#` would make this record fail its check (format#crc-tail). The numbers of light queues would list it in
    the place of the other one.
    """
    for name in _OF_RECORD:
        if properties.find(name) >= 0:  # `in` looks for an integer first, and takes three times as long
            properties = b"\2".join(piece for piece in properties.split(b"\2") if not piece.startswith(name))
    return properties
