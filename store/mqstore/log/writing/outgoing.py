"""Checks and encoding of put arguments: bodies, tags, keys, properties (clients#message).

Every check precedes the first write. Its error names the argument that breaks a rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import CRC32, INNER_MULTI_QUEUE_OFFSET, KEYS, SHARDINGKEY, TAGS, UNIQ_KEY, is_refused
from mqstore.options import Durability, Duration

if TYPE_CHECKING:
    from mqstore.log.message import Message


Body = bytes | bytearray | memoryview

Copy: TypeAlias = "tuple[Message, str, int, bytes]"
"""Stored message to copy to a queue: message, topic, queue id, and encoded properties there.
Each property ends with 0x02. A bare tuple, since hundreds of thousands are made each second."""

_OF_RECORD = (CRC32.encode() + b"\1", INNER_MULTI_QUEUE_OFFSET.encode() + b"\1")
_CONTROL = frozenset(map(chr, (*range(32), *range(0x7F, 0xA0))))

MAX_MESSAGE_GROUP = 63
"""Maximum number of bytes (clients#message-rules)."""
ROUTING = ("message_group", "delay", "deliver_at", "delay_level")
"""Options that set where, or when, a message is delivered. At most one may be given."""


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """Message to put: a body and the options of a put.

    The keyword options set where and when it is delivered. A producer and its interceptors use them. A put of many to
    one queue has these options itself, and refuses a message with different ones.

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
    """None means the topic of the call. The same is true of the other options."""
    queue_id: int | None = None
    durability: Durability | None = None
    message_group: str | int | None = None
    """Message group. An integer means its digits."""
    delay: Duration | None = None
    deliver_at: datetime | float | None = None
    delay_level: int | None = None
    compressed: Literal["zlib"] | None = None
    """Compression of the given body. Readers get the body inflated."""


_ONE_BY_ONE = (*ROUTING, "compressed")
"""Options that are only possible for messages put one by one."""
_ELSEWHERE = ("queue_id", "durability", *_ONE_BY_ONE)
_elsewhere = attrgetter(*_ELSEWHERE)
_NOWHERE = (None,) * len(_ELSEWHERE)
SLOTS = attrgetter("body", "tag", "keys", "properties", "unique_key", "flag", "topic", *_ELSEWHERE)(OutgoingMessage)
"""Descriptors of a message's attributes in the order that `kernel.message_parts` expects."""


def refuse_routing(message: OutgoingMessage, topic: str) -> None:
    """Raise InvalidMessageError for a message with options that a put of many to one queue cannot honour."""
    asked = _elsewhere(message)
    if asked == _NOWHERE and message.topic in (None, topic):
        return
    wrong = next((name for name, value in zip(_ELSEWHERE, asked, strict=True) if value is not None), "topic")
    advice = "use" if wrong in _ONE_BY_ONE else "give it to the call, or use"
    raise InvalidMessageError(
        f"the message has {wrong} {getattr(message, wrong)!r}, but this call puts all messages to one queue alike; "
        f"{advice} Producer.send_many",
        wrong,
    )


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise an error for options of a put of many.
    InvalidMessageError says how to set an option that a message may have. TypeError is for unknown options."""
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
        raise InvalidMessageError(f"put_many puts all messages to one queue and has no option {name}; {how}", name)


def no_such_option(names: Iterable[str], known: Iterable[str]) -> TypeError:
    """Return the error for unknown options of a put."""
    from difflib import get_close_matches

    wrong = sorted(names)
    close = get_close_matches(wrong[0], known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return TypeError(f"unknown message option {', '.join(map(repr, wrong))}{hint}")


def flat_body(body: object) -> bytes:
    """Return `body` as exactly `bytes`. Raises InvalidMessageError for other types."""
    if type(body) is bytes:
        return body
    if isinstance(body, (bytes, bytearray, memoryview)):
        return memoryview(body).tobytes()
    hint = "; encode it first" if isinstance(body, str) else ""
    raise InvalidMessageError(f"body must be bytes, not {type(body).__name__}{hint}", "body")


def check_integer(value: object, bits: int, field: str) -> None:
    """Raise InvalidMessageError unless `value` is a signed integer of `bits` bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise InvalidMessageError(f"{field} {value!r} is not an integer of {bits} bits", field)


def checked_text(value: object, field: str, forbidden: str, rule: str) -> str:
    """Return `value`, if it is a str, not blank, and free of `forbidden` and of control characters."""
    if not isinstance(value, str) or not value.strip() or any(c in value for c in forbidden):
        raise InvalidMessageError(f"{field} {value!r}: {rule}", field)
    if not value.isprintable() and not _CONTROL.isdisjoint(value):
        raise InvalidMessageError(f"{field} {value!r} contains a control character", field)
    return value


KEY_RULE: Final = "a key must be a str without spaces, and not empty"


def key_words(keys: object) -> tuple[str, ...]:
    """Return the keys as a tuple, given one or several. Raises InvalidMessageError for other types."""
    if not isinstance(keys, Iterable) or isinstance(keys, bytes):
        raise InvalidMessageError(f"keys must be a str or several, not {keys!r:.80}", "keys")
    return (keys,) if isinstance(keys, str) else tuple(keys)


def checked_group(group: object) -> str:
    """Return `group` as text. An integer means its digits.
    Raises InvalidMessageError if it is blank, too long, or neither a str nor an int."""
    if isinstance(group, int) and not isinstance(group, bool):
        group = str(int(group))
    checked = checked_text(group, "message_group", "", "it must be a str or an int, and not blank")
    if len(checked.encode(errors="surrogatepass")) > MAX_MESSAGE_GROUP:
        raise InvalidMessageError(
            f"message_group {checked[:40]!r}... is longer than {MAX_MESSAGE_GROUP} bytes", "message_group"
        )
    return checked


def checked_pairs(properties: object) -> Mapping[str, str]:
    """Return `properties` if it is a mapping, else raise InvalidMessageError."""
    if not isinstance(properties, Mapping):
        raise InvalidMessageError(f"properties must be a mapping of str to str, not {properties!r:.80}", "properties")
    return properties


def user_properties(
    tag: str | None = None,
    keys: str | Iterable[str] | None = None,
    properties: Mapping[str, str] | None = None,
    unique_key: str | None = None,
    message_group: str | int | None = None,
) -> dict[str, str]:
    """Return the options of `put` as stored properties. Raises InvalidMessageError for the first invalid one."""
    stored: dict[str, str] = {}
    for name, value in checked_pairs(properties or {}).items():
        checked_text(name, "properties", "", "names and values must be str, and not blank")
        checked_text(value, "properties", "", f"the value of {name!r} must be a str, and not blank")
        if is_refused(name):
            raise InvalidMessageError(f"property {name!r} is reserved; use the argument for it", "properties")
        stored[name] = value
    if keys is not None:
        words = key_words(keys)
        for word in words:
            checked_text(word, "keys", " ", KEY_RULE)
        if words:
            stored[KEYS] = " ".join(words)
    if tag is not None:
        stored[TAGS] = checked_text(tag, "tag", "|", "a tag must be a str without '|', and not blank")
    if unique_key is not None:
        stored[UNIQ_KEY] = checked_text(unique_key, "unique_key", "", "it must be a str, and not blank")
    if message_group is not None:
        stored[SHARDINGKEY] = checked_group(message_group)
    return stored


def tail_of_bytes(plain_tail: bytes, properties: bytes) -> bytes:
    """Return the bytes after a body: topic and encoded properties with their lengths.
    `plain_tail` is the result without properties. Those of another record are left out (`without_place`)."""
    properties = without_place(properties)
    return b"".join((plain_tail[:-2], len(properties).to_bytes(2, "big"), properties))


def without_place(properties: bytes) -> bytes:
    """Return encoded properties without those that belong to another record, or the same object if there are none.

    A `__CRC32#` would make this record fail its check (format#crc-tail). The numbers of light queues would list this
    record in the other one's place.
    """
    for name in _OF_RECORD:
        if properties.find(name) >= 0:  # not `in`, which looks for an integer first, and takes three times as long
            properties = b"\2".join(piece for piece in properties.split(b"\2") if not piece.startswith(name))
    return properties
