"""Recall handle: text that names a delayed message (delivery#recall).

    base64url("v1 topic brokerName deliverMs uniqKey")

Applications treat the text as opaque. It may come back forged, so every field is checked against the range of its type.
"""

from __future__ import annotations

import base64
import re
from contextlib import suppress
from typing import NamedTuple

from mqstore.broker.tables.names import BROKER_NAME
from mqstore.errors import InvalidReceiptError

_I64_MAX = 2**63 - 1
_HANDLE = re.compile(r"v1 ([^ ]+) [^ ]+ ([0-9]{1,19}) (.+)", re.DOTALL).fullmatch
_HANDLE_MAX = 65_536
"""Longest handle: a unique key has at most 32767 bytes, and base64 makes four characters of three."""


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
        raise InvalidReceiptError(f"{handle!r:.80} is not a recall handle; pass the `recall_handle` of a put unchanged")
    return RecallHandle(match[1], int(match[2]), match[3])
