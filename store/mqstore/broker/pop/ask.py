"""The values that go in and out of pop: a question, a delivery, a receipt's claim (delivery#pop-request)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Literal, NamedTuple

from mqstore.broker.filters import Filter
from mqstore.broker.pop import receipts
from mqstore.errors import ReceiptExpiredError
from mqstore.log.message import Message

__all__ = ["Ask", "Claim", "Delivery", "Pending", "Start", "claim_of", "claims_of", "expired"]

Start = Literal["earliest", "latest"] | int | datetime
"""Where a group begins in a queue in which it never was; a number: ms since the epoch."""

# Receipts of our own making, in one step; whatever else comes is looked at field by field (`receipts.parse`).
_OURS = re.compile(
    r"[0-9]{1,18} ([0-9]{1,15}) ([0-9]{1,15}) (0|999) ([0-2]) mqstore ([0-9]{1,9}) ([0-9]{1,18})"
).fullmatch


class Delivery(NamedTuple):
    """A message, handed to one receiver for a while."""

    message: Message
    receipt: str
    """What acknowledges it, renews it or gives it back. Opaque."""
    visible_at_ms: int
    """When it comes again unless it was acknowledged, wall clock."""
    topic: str
    """Where it was sent to; `message.topic` may be the group's retry topic."""
    queue_id: int
    redeliveries: int | None
    """FIFO: how often it was delivered before. None: the message itself tells (`reconsume_times`)."""

    @property
    def attempt(self) -> int:
        """Which delivery this is, from 1."""
        return (self.message.reconsume_times if self.redeliveries is None else self.redeliveries) + 1


class Pending(NamedTuple):
    """A delivery in flight, as `pending` lists it."""

    topic: str
    """Where the message lies; may be a retry topic."""
    queue_id: int
    offset: int
    pop_time_ms: int
    visible_at_ms: int
    fifo: bool


class Ask(NamedTuple):
    """One pop, as each of the queues it looks at sees it."""

    topic: str
    """As the user named it."""
    invisible_ms: int
    filter: Filter | None
    start: Start | None
    attempt_id: str | None
    local: bool
    now_ms: int
    max_attempts: int | None
    skip_acked: bool
    """FIFO: what was acknowledged behind an unsettled message is not handed out again."""


class Claim(NamedTuple):
    """What a receipt says of itself."""

    offset: int
    pop_time_ms: int
    invisible_ms: int
    fifo: bool
    mark: int
    queue_id: int
    text: str


_new = tuple.__new__  # what `_make` is, without the look at the length


def claim_of(text: str) -> Claim:
    """Read a receipt. InvalidReceiptError when it is none."""
    match = _OURS(text) if type(text) is str else None
    if match is not None:
        pop_time, invisible, revive, mark, queue_id, offset = match.groups()
        return Claim(int(offset), int(pop_time), int(invisible), revive == "999", int(mark), int(queue_id), text)
    it = receipts.parse(text)
    return Claim(it.queue_offset, it.pop_time_ms, it.invisible_ms, it.fifo, it.mark, it.queue_id, text)


def claims_of(texts: Iterable[str]) -> list[Claim]:
    """`claim_of` each. Receipts of one batch differ in their last number alone, so the rest is read once."""
    claims: list[Claim] = []
    head = ""
    rest: tuple[object, ...] = ()
    for text in texts:
        before, _, last = text.rpartition(" ") if type(text) is str else ("", "", "")
        if head and before == head and last.isascii() and last.isdigit() and len(last) <= 18:
            claims.append(_new(Claim, (int(last), *rest, text)))
            continue
        claim = claim_of(text)
        claims.append(claim)
        head, rest = (before if _OURS(text) else ""), claim[1:-1]
    return claims


def expired(texts: list[str]) -> ReceiptExpiredError:
    """The error for receipts that came too late; it carries them as `receipts`."""
    more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
    error = ReceiptExpiredError(
        f"receipt {texts[0]!r}{more} came too late: the message was given to the group again, or its visible time was "
        f"changed under another receipt. Nothing was changed for it"
    )
    error.receipts = texts
    return error
