"""The strings that travel with popped and delayed messages: receipts, recall handles and info strings.

Pure text in, values out. Knows neither what is in flight nor whether a receipt is still good: that is the pop
service's knowledge. Whoever holds such a string treats it as opaque; what comes back may be forged, so every field is
checked here and nothing outside the types' ranges goes further.

Receipt (delivery#receipt), fields joined by one space::

    startOffset popTime invisibleTime reviveQid mark brokerName queueId queueOffset [commitLogOffset]

Recall handle (delivery#recall)::  base64url("v1 topic brokerName deliverMs uniqKey")

Info strings (delivery#info-strings), items joined by ``;``::

    startOffsetInfo   mark queueId startOffset
    msgOffsetInfo     mark queueId offset,offset,...
    orderCountInfo    mark queueId count         and         mark qo<queueId>%<offset> count
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from mqstore.broker.names import RETRY_PREFIX
from mqstore.errors import InvalidReceiptError

__all__ = [
    "BROKER_NAME",
    "FIFO_REVIVE_QID",
    "RecallHandle",
    "Receipt",
    "count_item",
    "format",
    "join_items",
    "messages_item",
    "offset_count_item",
    "parse",
    "parse_counts",
    "parse_messages",
    "parse_recall_handle",
    "parse_starts",
    "recall_handle",
    "start_item",
    "topic_mark",
]

BROKER_NAME: Final = "mqstore"
FIFO_REVIVE_QID: Final = 999
"""In place of a revive queue: the batch was popped in FIFO mode."""

Mark = Literal[0, 1, 2]
"""Which kind of topic a message was read from: 0 a plain one, 1 a retry topic `group_topic`, 2 `group+topic`."""

_I32_MAX = 2**31 - 1
_I64_MAX = 2**63 - 1
# A broker name of 255 characters and eight numbers of 19 digits fit easily; more is not worth splitting.
_TEXT_MAX = 1024
# One spelling a number: no sign, no leading zeros, none of the digits beyond ASCII that int() would take.
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,18})\Z")


# --- receipts (delivery#receipt) --------------------------------------------------------------------------------------


class Receipt(NamedTuple):
    """What names one delivery of one message. Offsets are queue offsets, but for the last; times are in ms.

    >>> text = format(Receipt(4, 1_700_000_000_000, 60_000, 0, 0, BROKER_NAME, 2, 7, 4096))
    >>> text
    '4 1700000000000 60000 0 0 mqstore 2 7 4096'
    >>> parse(text).expires_ms
    1700000060000
    """

    start_offset: int
    """First offset of the batch that the message was delivered with."""
    pop_time_ms: int
    """Wall clock of the pop; one for its whole batch, and what tells one delivery of a message from the next."""
    invisible_ms: int
    revive_qid: int
    """0 to 7, or `FIFO_REVIVE_QID`."""
    mark: int
    """`topic_mark` of the topic that was really read."""
    broker: str
    queue_id: int
    queue_offset: int
    commitlog_offset: int = -1
    """Physical offset of the record; -1 when the receipt does not say."""

    @property
    def expires_ms(self) -> int:
        """Wall clock from which the message is visible again, unless that was changed: `expires_ms <= now_ms`."""
        return self.pop_time_ms + self.invisible_ms

    @property
    def fifo(self) -> bool:
        return self.revive_qid == FIFO_REVIVE_QID


def format(receipt: Receipt) -> str:  # noqa: A001 - used as receipts.format
    """The receipt as text; without a ninth field when the physical offset is not known."""
    return " ".join(map(str, receipt if receipt.commitlog_offset >= 0 else receipt[:-1]))


def parse(text: str) -> Receipt:
    """Read a receipt back. InvalidReceiptError names the first bad field; only the form is checked."""
    fields = _bounded(text, "receipt").split(" ")
    if len(fields) not in (8, 9):
        raise InvalidReceiptError(f"receipt {_shown(text)} has {len(fields)} fields; 8 or 9 are expected")
    start_offset = _number(fields[0], "start offset", _I64_MAX, text)
    pop_time_ms = _number(fields[1], "pop time", _I64_MAX, text)
    # Both together must be a time, too: a sum beyond 64 bits would never expire.
    invisible_ms = _number(fields[2], "invisible time", _I64_MAX - pop_time_ms, text)
    revive_qid = _number(fields[3], "revive queue", FIFO_REVIVE_QID, text)
    if 7 < revive_qid < FIFO_REVIVE_QID:
        raise InvalidReceiptError(f"receipt {_shown(text)}: revive queue {revive_qid} is neither 0 to 7 nor 999")
    mark = _number(fields[4], "topic mark", 2, text)
    if not fields[5]:
        raise InvalidReceiptError(f"receipt {_shown(text)}: the broker name is empty")
    queue_id = _number(fields[6], "queue id", _I32_MAX, text)
    queue_offset = _number(fields[7], "queue offset", _I64_MAX, text)
    if queue_offset < start_offset:
        raise InvalidReceiptError(f"receipt {_shown(text)}: offset {queue_offset} lies before its batch")
    physical = -1 if len(fields) == 8 or fields[8] == "-1" else _number(fields[8], "commitlog offset", _I64_MAX, text)
    return Receipt(
        start_offset, pop_time_ms, invisible_ms, revive_qid, mark, fields[5], queue_id, queue_offset, physical
    )


# --- recall handles (delivery#recall) ---------------------------------------------------------------------------------


class RecallHandle(NamedTuple):
    """What names a delayed message, so that it can be recalled before it is due."""

    topic: str
    broker: str
    deliver_ms: int
    """When the message may be delivered, wall clock: the property TIMER_OUT_MS plus 1 of what is stored."""
    unique_key: str


def recall_handle(topic: str, deliver_ms: int, unique_key: str, broker: str = BROKER_NAME) -> str:
    """The handle of a timer message, as `SendReceipt.recall_handle` carries it.

    >>> parse_recall_handle(recall_handle("orders", 1_700_000_000_001, "01AB"))
    RecallHandle(topic='orders', broker='mqstore', deliver_ms=1700000000001, unique_key='01AB')
    """
    text = f"v1 {topic} {broker} {deliver_ms} {unique_key}"
    return base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")


def parse_recall_handle(handle: str) -> RecallHandle:
    """Read a handle back, with or without its padding. InvalidReceiptError for anything that is none."""
    # A unique key is at most a record's properties, 32767 bytes; base64 makes four characters of three bytes.
    bare = _bounded(handle, "recall handle", 65_536).rstrip("=")
    try:
        data = base64.b64decode(bare + "=" * (-len(bare) % 4), altchars=b"-_", validate=True)
        text = data.decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError) as error:
        raise InvalidReceiptError(f"recall handle {_shown(handle)} is not base64 of text") from error
    fields = text.split(" ", 4)  # the unique key comes last, because it alone may hold spaces
    if len(fields) != 5 or fields[0] != "v1" or not all(fields):
        raise InvalidReceiptError(f"recall handle {_shown(handle)} does not say v1, topic, broker, time and unique key")
    return RecallHandle(fields[1], fields[2], _number(fields[3], "deliver time", _I64_MAX, handle), fields[4])


# --- info strings (delivery#info-strings) -----------------------------------------------------------------------------


def topic_mark(topic: str) -> Mark:
    """The mark of a topic name: pop retry topics of version 2 are those with a `+`, which no user's name has."""
    if not topic.startswith(RETRY_PREFIX):
        return 0
    return 2 if "+" in topic else 1


def start_item(mark: int, queue_id: int, start_offset: int) -> str:
    """One item of startOffsetInfo: where the batch of a queue begins."""
    return f"{mark} {queue_id} {start_offset}"


def messages_item(mark: int, queue_id: int, offsets: Iterable[int]) -> str:
    """One item of msgOffsetInfo: the offsets that were delivered from a queue."""
    return f"{mark} {queue_id} {','.join(map(str, offsets))}"


def count_item(mark: int, queue_id: int, count: int) -> str:
    """One item of orderCountInfo: redeliveries of all messages of a queue's batch that have no item of their own."""
    return f"{mark} {queue_id} {count}"


def offset_count_item(mark: int, queue_id: int, offset: int, count: int) -> str:
    """One item of orderCountInfo: redeliveries of one message."""
    return f"{mark} qo{queue_id}%{offset} {count}"


def join_items(items: Iterable[str]) -> str:
    return ";".join(items)


def parse_starts(text: str) -> dict[str, int]:
    """startOffsetInfo as `mark@queueId` -> start offset. InvalidReceiptError for another form or an item twice.

    >>> parse_starts("0 0 4;2 0 17")
    {'0@0': 4, '2@0': 17}
    """
    return {key: _number(value, "start offset", _I64_MAX, text) for key, value in _items(text).items()}


def parse_messages(text: str) -> dict[str, list[int]]:
    """msgOffsetInfo as `mark@queueId` -> offsets. Errors as of `parse_starts`."""
    return {
        key: [_number(offset, "offset", _I64_MAX, text) for offset in value.split(",")]
        for key, value in _items(text).items()
    }


def parse_counts(text: str) -> dict[str, int]:
    """orderCountInfo as `mark@queueId` and `mark@qo<queueId>%<offset>` -> count. Errors as of `parse_starts`."""
    return {key: _number(value, "count", _I32_MAX, text) for key, value in _items(text).items()}


def _items(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in text.split(";") if text else ():
        fields = item.split(" ")
        if len(fields) != 3:
            raise InvalidReceiptError(f"info {_shown(text)}: item {_shown(item)} has {len(fields)} fields, not 3")
        key = f"{fields[0]}@{fields[1]}"
        if key in found:
            raise InvalidReceiptError(f"info {_shown(text)} tells {_shown(key)} twice")
        found[key] = fields[2]
    return found


def _bounded(text: object, what: str, limit: int = _TEXT_MAX) -> str:
    if not isinstance(text, str):
        raise InvalidReceiptError(f"a {what} is a str, not {type(text).__name__}")
    if len(text) > limit:
        raise InvalidReceiptError(f"{what} {_shown(text)} has {len(text)} characters; {limit} is the most")
    return text


def _number(field: str, what: str, limit: int, text: str) -> int:
    if _NUMBER.match(field) is None or int(field) > limit:
        raise InvalidReceiptError(f"{_shown(text)}: {what} {_shown(field)} is not a number from 0 to {limit}")
    return int(field)


def _shown(text: str) -> str:
    return repr(text[:80])
