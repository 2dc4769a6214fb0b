"""Text that names popped and delayed messages: receipts and recall handles.

These functions only convert text and values. Only the pop service knows whether a receipt is still valid. Applications
treat the text as opaque. It may come back forged, so every field is checked here against the range of its type.

Receipt (delivery#receipt), fields joined by one space::

    startOffset popTime invisibleTime reviveQid mark brokerName queueId queueOffset [commitLogOffset]

Recall handle (delivery#recall)::  base64url("v1 topic brokerName deliverMs uniqKey")
"""

from __future__ import annotations

import base64
import re
from contextlib import suppress
from typing import Final, NamedTuple

from mqstore.errors import InvalidReceiptError, ReceiptExpiredError

BROKER_NAME: Final = "mqstore"

_FIFO: Final = 999
"""Value of the field reviveQid if the batch was popped in order."""
_I32_MAX = 2**31 - 1
_I64_MAX = 2**63 - 1
_N = "([0-9]{1,19})"  # no digits beyond ASCII, which int() would accept
_RECEIPT = re.compile(rf"{_N} {_N} {_N} ([0-7]|{_FIFO}) ([0-2]) [^ ]{{1,255}} {_N} {_N}(?: (?:-1|{_N}))?").fullmatch
_HANDLE = re.compile(rf"v1 ([^ ]+) [^ ]+ {_N} (.+)", re.DOTALL).fullmatch
_HANDLE_MAX = 65_536
"""Longest handle: a unique key has at most 32767 bytes, and base64 makes four characters of three."""


class Claim(NamedTuple):
    """Contents of a receipt, which names one delivery of one message."""

    offset: int
    """Queue offset."""
    pop_time_ms: int
    """Wall-clock time of the pop, the same for its whole batch.
    It distinguishes the deliveries of a message."""
    fifo: bool
    """True if the batch was popped in order."""
    mark: int
    """Topic that was read: 0 is the requested topic, 1 and 2 are its retry topics of these versions."""
    queue_id: int
    text: str


def receipt_head(
    start: int, pop_time_ms: int, invisible_ms: int, mark: int, queue_id: int, *, fifo: bool = False
) -> str:
    """Return a receipt up to its last field, the message's offset.
    Only that field differs within a batch."""
    return f"{start} {pop_time_ms} {invisible_ms} {_FIFO if fifo else 0} {mark} {BROKER_NAME} {queue_id} "


def claim_of(text: str) -> Claim:
    """Parse a receipt, checking only its form.
    Raises InvalidReceiptError for any other text."""
    match = _RECEIPT(text) if type(text) is str else None
    if match is not None:
        start, pop_time, invisible, revive, mark, queue_id, offset, physical = match.groups()
        claim = Claim(int(offset), int(pop_time), int(revive) == _FIFO, int(mark), int(queue_id), text)
        # The sum of pop time and invisible time must also be a time: beyond 64 bits it would never expire.
        fits = claim.pop_time_ms + int(invisible) <= _I64_MAX and int(physical or 0) <= _I64_MAX
        if fits and int(start) <= claim.offset <= _I64_MAX and claim.queue_id <= _I32_MAX:
            return claim
    raise InvalidReceiptError(f"{_shown(text)} is not a receipt; pass the `receipt` of a delivery unchanged")


def expired(texts: list[str]) -> ReceiptExpiredError:
    """Return the error for expired receipts, which has them as `receipts`."""
    more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
    error = ReceiptExpiredError(
        f"receipt {texts[0]!r}{more} has expired: the message was delivered to the group again or purged, or its "
        f"visible time was changed, which returned a new receipt. Nothing was changed"
    )
    error.receipts = texts
    return error


class RecallHandle(NamedTuple):
    """Name of a delayed message, by which it can be recalled before it is due."""

    topic: str
    deliver_ms: int
    """Wall-clock time of the delivery: the stored property TIMER_OUT_MS plus 1."""
    unique_key: str


def recall_handle(topic: str, deliver_ms: int, unique_key: str) -> str:
    """Return the handle of a timer message, as in `SendReceipt.recall_handle`.

    >>> parse_recall_handle(recall_handle("orders", 1_700_000_000_001, "01AB"))
    RecallHandle(topic='orders', deliver_ms=1700000000001, unique_key='01AB')
    """
    text = f"v1 {topic} {BROKER_NAME} {deliver_ms} {unique_key}"
    return base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")


def parse_recall_handle(handle: str) -> RecallHandle:
    """Parse a recall handle, with or without its padding. Raises InvalidReceiptError for any other text."""
    match = None
    if type(handle) is str and len(handle) <= _HANDLE_MAX:
        bare = handle.rstrip("=")
        with suppress(ValueError):  # no base64, or not of text
            data = base64.b64decode(bare + "=" * (-len(bare) % 4), altchars=b"-_", validate=True)
            match = _HANDLE(data.decode("utf-8", "surrogatepass"))
    if match is None or int(match[2]) > _I64_MAX:
        raise InvalidReceiptError(
            f"{_shown(handle)} is not a recall handle; pass the `recall_handle` of a put unchanged"
        )
    return RecallHandle(match[1], int(match[2]), match[3])


def _shown(text: object) -> str:
    return repr(text[:80]) if isinstance(text, str) else f"{text!r:.80}"
