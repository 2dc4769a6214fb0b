"""Message properties: names (format#property-names), bytes, and the CRC tail that may close them.

    name 0x01 value 0x02   name 0x01 value 0x02   ...          UTF-8, no escaping, at most 32767 bytes together

    CRC tail, the last 20 bytes of a record that has one:
    5F 5F 43 52 43 33 32 23 "__CRC32#" | 01 | ten ASCII digits, LEAST significant first | 02

The names are RocketMQ's (`MessageConst`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mqstore.errors import FormatError, InvalidMessageError

# --- names (format#property-names) ------------------------------------------------------------------------------------

KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
UNIQ_KEY: Final = "UNIQ_KEY"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QID: Final = "REAL_QID"
RETRY_TOPIC: Final = "RETRY_TOPIC"
RECONSUME_TIME: Final = "RECONSUME_TIME"
MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
TRAN_MSG: Final = "TRAN_MSG"
PGROUP: Final = "PGROUP"
TRANSACTION_ID: Final = "__transactionId__"
TRAN_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
CHECK_IMMUNITY_TIME_IN_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
SHARDINGKEY: Final = "__SHARDINGKEY"
POP_CK: Final = "POP_CK"
FIRST_POP_TIME: Final = "1ST_POP_TIME"
INNER_NUM: Final = "INNER_NUM"
INNER_BASE: Final = "INNER_BASE"
INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
CRC32: Final = "__CRC32#"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
TIMER_DEL_UNIQKEY: Final = "TIMER_DEL_UNIQKEY"
TIMER_DELAY_LEVEL: Final = "TIMER_DELAY_LEVEL"
# These names are ours: why a message was dead-lettered, or is redelivered, and the wall-clock time from which it is not
# delivered for the first time.
DLQ_REASON: Final = "dlq_reason"
RETRY_REASON: Final = "mqstore_retry_reason"
EXPIRES_MS: Final = "mqstore_expires_ms"

_OTHERS: Final = (
    "MIN_OFFSET MAX_OFFSET CONSUME_START_TIME POP_CK_OFFSET DUP_INFO MSG_REGION TRACE_ON TRACE_CONTEXT CLUSTER "
    "MSG_TYPE INSTANCE_ID BUYER_ID EXTEND_UNIQ_INFO __BORNHOST BORN_TIMESTAMP CORRELATION_ID REPLY_TO_CLIENT TTL "
    "ARRIVE_TIME PUSH_REPLY_TIME TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG REDIRECT PROPERTY_FORWARD_QUEUE_ID"
)
"""Reserved names of RocketMQ that mqstore does not read."""

RESERVED: Final = frozenset(_OTHERS.split()).union(
    value for name, value in [*globals().items()] if name.isupper() and name[0] != "_" and isinstance(value, str)
)
"""All names above."""

REFUSED: Final = RESERVED - {EXPIRES_MS}
"""Names that a put refuses as properties. EXPIRES_MS is not among them: a client passes the expiry as a property."""

# Properties with this prefix belong to a request and must not be stored.
TRANSIENT_PREFIX: Final = "__RMQ.TRANSIENT."


def is_reserved(name: str) -> bool:
    """Return True for a name that no user property has: in `RESERVED`, or with `TRANSIENT_PREFIX`."""
    return name in RESERVED or name.startswith(TRANSIENT_PREFIX)


def is_refused(name: str) -> bool:
    """Return True for a name that a put refuses as a property: in `REFUSED`, or with `TRANSIENT_PREFIX`."""
    return name in REFUSED or name.startswith(TRANSIENT_PREFIX)


def user_properties(stored: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that an application set, of those stored with a message.

    >>> user_properties({"TAGS": "created", "region": "eu"})
    {'region': 'eu'}
    """
    return {name: value for name, value in stored.items() if not is_reserved(name)}


# --- copies of a failed message (delivery#send-back) ------------------------------------------------------------------
#
#     copy                          lacks, besides those above           made by
#     retry of a popped message     DELAY, TIMER_*, POP_CK, the reason   broker/pop/unordered.py
#     other retry, dead letter      1ST_POP_TIME, EXPIRES_MS             broker/redelivery/retry.py
#     replayed dead letter          marks of its failures                broker/redelivery/dead_letters.py

NOT_REDELIVERED: Final = frozenset({DELAY, POP_CK, RETRY_REASON, *(name for name in RESERVED if name[:6] == "TIMER_")})
"""Properties of a delay and a delivery that are over.
A copy that kept those of a delay would be delayed once more, or (TIMER_OUT_MS) never again."""
NOT_RETRIED: Final = NOT_REDELIVERED | {FIRST_POP_TIME, EXPIRES_MS}
"""With FIRST_POP_TIME a dead letter would be replayed to a group that pops, with EXPIRES_MS it would expire then."""
NOT_REPLAYED: Final = NOT_RETRIED | {
    *(DLQ_ORIGIN_MESSAGE_ID, DLQ_ORIGIN_TOPIC, DLQ_REASON, MAX_RECONSUME_TIMES),
    *(REAL_QID, REAL_TOPIC, RECONSUME_TIME, RETRY_TOPIC, WAIT),
}
"""A replayed dead letter keeps UNIQ_KEY and ORIGIN_MESSAGE_ID, since it is still the same message."""


def kept(stored: Mapping[str, str], without: frozenset[str]) -> dict[str, str]:
    """Return the properties of a message that a copy keeps, `without` one of the sets above."""
    return {name: value for name, value in stored.items() if name not in without}


# --- bytes (format#properties) ----------------------------------------------------------------------------------------

NAME_END: Final = b"\x01"
PAIR_END: Final = b"\x02"
MAX_PROPERTIES_BYTES: Final = 32767  # propertiesLength is a signed i16


def encode_properties(properties: Mapping[str, str | None]) -> bytes:
    """Return the stored bytes: pairs in the order of the mapping, without those whose value is None.

    Raises `InvalidMessageError` (field "properties") for an empty name or value, and for 0x01 or 0x02 in either, since
    nothing is escaped. Also raises it for text that UTF-8 cannot encode, and beyond 32767 bytes.

    >>> encode_properties({"TAGS": "a", "WAIT": None})
    b'TAGS\\x01a\\x02'
    """
    pieces: list[str] = []
    for name, value in properties.items():
        if value is None:
            continue
        if not name or not value:
            raise InvalidMessageError(f"property {name!r} has an empty {'value' if name else 'name'}", "properties")
        if "\x01" in name or "\x02" in name or "\x01" in value or "\x02" in value:
            raise InvalidMessageError(f"property {name[:80]!r} contains a separator (0x01 or 0x02)", "properties")
        pieces.append(f"{name}\x01{value}\x02")
    try:
        data = "".join(pieces).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidMessageError(f"properties are not valid Unicode text: {error}", "properties") from error
    if len(data) > MAX_PROPERTIES_BYTES:
        raise InvalidMessageError(
            f"properties take {len(data)} bytes, the limit is {MAX_PROPERTIES_BYTES}", "properties"
        )
    return data


def decode_properties(data: bytes) -> dict[str, str]:
    """Decode properties as leniently as RocketMQ does (format#properties). Never fails.

    A piece without a name, without a value or without 0x01 is ignored. The first 0x01 of a piece separates. The last of
    several equal names wins. Bytes that are not UTF-8 become U+FFFD.

    >>> decode_properties(b"TAGS\\x01a\\x02junk\\x02KEYS\\x01k1 k2")
    {'TAGS': 'a', 'KEYS': 'k1 k2'}
    """
    properties: dict[str, str] = {}
    for piece in str(data, "utf-8", "replace").split("\x02"):
        name, _, value = piece.partition("\x01")
        if name and value:
            properties[name] = value
    return properties


# --- CRC tail (format#crc-tail) ---------------------------------------------------------------------------------------

_TAIL_START: Final = CRC32.encode() + NAME_END
_TAIL_DIGITS: Final = 10
CRC_TAIL_BYTES: Final = len(_TAIL_START) + _TAIL_DIGITS + len(PAIR_END)


def decode_crc_tail(properties: bytes) -> int | None:
    """Return the value in the CRC tail that closes `properties`, or None without a tail.

    Raises `FormatError` (position within `properties`) if a tail begins there but its digits or its end are damaged.
    """
    start = len(properties) - CRC_TAIL_BYTES
    if not properties.startswith(_TAIL_START, max(start, 0)) or start < 0:
        return None
    if start > 0 and properties[start - 1 : start] != PAIR_END:
        return None  # the name is part of another property's value
    digits = properties[start + len(_TAIL_START) : -len(PAIR_END)]
    if not digits.isdigit() or not properties.endswith(PAIR_END):
        raise FormatError("the CRC property is not ten digits and 0x02", CRC32, start)
    return int(digits[::-1])
