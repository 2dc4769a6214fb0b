"""Messages popped together, the times at which they become visible again (delivery#clock), their records and receipts.

    pop time       time of the pop, or of the last change of the receipt, which names it
    visible time   time at which the message is redelivered; the time between the two is the invisible time

Both are stored, so both are wall time. If the clock is set back by less than the invisible time, a delivery lasts
longer by that much. If it is set back by more, the delivery would hide its message for as long as the clock was wrong,
so it counts as over. A later change uses the new clock, so its visible time may be before its pop time.

A batch names many offsets, so a million messages in flight cost a million dict entries and no more objects than there
were pops. The fields of both classes are in C structures where there are compiled parts (`PopTables`).

Receipt (delivery#receipt), fields joined by one space::

    startOffset popTime invisibleTime reviveQid mark brokerName queueId queueOffset [commitLogOffset]

Applications treat it as opaque. It may come back forged, so every field is checked against the range of its type. Only
the pop service knows whether it is still valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mqstore.broker.tables.names import BROKER_NAME
from mqstore.errors import InvalidReceiptError, ReceiptExpiredError
from mqstore.native import kernel

SAME_MOMENT_MS = 1_000
"""Number of ms that a pop time may be ahead of a clock that was not set back."""
_FIFO: Final = 999
"""Value of the field reviveQid if the batch was popped in order."""
_I32_MAX = 2**31 - 1
_I64_MAX = 2**63 - 1
_N = "([0-9]{1,19})"  # no digits beyond ASCII, which int() would accept
_RECEIPT = re.compile(rf"{_N} {_N} {_N} ([0-7]|{_FIFO}) ([0-2]) [^ ]{{1,255}} {_N} {_N}(?: (?:-1|{_N}))?").fullmatch


def pop_time(now_ms: int, last_ms: int) -> int:
    """Return `now_ms`, or `last_ms` + 1 if that is at most a second later.
    The pop time distinguishes two deliveries of a message, so it must grow. But after a clock was set back it is
    `now_ms`, because old times must not keep messages invisible."""
    return last_ms + 1 if now_ms <= last_ms < now_ms + SAME_MOMENT_MS else now_ms


def is_visible(pop_time_ms: int, visible_ms: int, now_ms: int) -> bool:
    """Return True if a delivery is over.
    Either its visible time has come, or its pop time is farther in the future than its invisible time can explain.

    >>> is_visible(1_000_000, 1_060_000, 1_059_999), is_visible(1_000_000, 1_060_000, 1_060_000)
    (False, True)
    >>> is_visible(1_000_000, 1_060_000, 1_000_000 - 60_000), is_visible(1_000_000, 1_060_000, 1_000_000 - 61_001)
    (False, True)
    """
    if visible_ms <= now_ms:
        return True
    lasts_ms = visible_ms - pop_time_ms
    return lasts_ms >= -SAME_MOMENT_MS and pop_time_ms - now_ms > max(0, lasts_ms) + SAME_MOMENT_MS


class BatchFields:
    """Base of `Batch`."""


class TimelineFields:
    """Base of `Timeline`."""


if not TYPE_CHECKING and kernel is not None:
    BatchFields, TimelineFields = kernel.BatchFields, kernel.TimelineFields


class Batch(BatchFields):
    """Messages of one pop."""

    __slots__ = ()

    name: int
    """Position of the `ck` in the pop log. -1 for a settled batch without a `ck`. Lower: it is in `journal.py`."""
    start: int
    count: int
    """Number of messages."""
    pop_time_ms: int
    invisible_ms: int
    deltas: tuple[int, ...] | None
    """Distances of the offsets from `start`. None means 0, 1, 2 ..."""
    left: int
    """Bit i: the i-th message is in flight or released."""
    moved: dict[int, tuple[int, int]] | None
    """Offset -> (pop time, invisible ms) of deliveries whose time was changed."""
    local: bool
    """True if the receiver is in this process and ends with it."""

    def __init__(self, name: int, offsets: Sequence[int], pop_time_ms: int, invisible_ms: int, local: bool) -> None:
        """Take `offsets` in ascending order."""
        start, count = offsets[0], len(offsets)
        self.name = name
        self.start = start
        self.count = count
        self.pop_time_ms = pop_time_ms
        self.invisible_ms = invisible_ms
        self.deltas = None if offsets[-1] - start == count - 1 else tuple([offset - start for offset in offsets])
        self.left = (1 << count) - 1
        self.moved = None
        self.local = local

    def times(self, offset: int) -> tuple[int, int]:
        """Return (pop time, invisible ms) of one delivery."""
        if self.moved is not None and offset in self.moved:
            return self.moved[offset]
        return self.pop_time_ms, self.invisible_ms

    def visible_at(self, offset: int) -> int:
        pop_time_ms, invisible_ms = self.times(offset)
        return pop_time_ms + invisible_ms

    def is_visible(self, offset: int, now_ms: int) -> bool:
        """Return True if that delivery is over."""
        pop_time_ms, invisible_ms = self.times(offset)
        return is_visible(pop_time_ms, pop_time_ms + invisible_ms, now_ms)

    def bits(self, offsets: list[int]) -> int:
        """Return the bit mask of some messages. Raises ValueError if the batch does not contain one."""
        places = [offset - self.start for offset in offsets]
        if self.deltas is not None:
            places = [self.deltas.index(place) for place in places]
        if places and places == [*range(places[0], places[0] + len(places))]:  # of thousands, at once
            return (1 << len(places)) - 1 << places[0]
        return sum({1 << place for place in places})

    def open_offsets(self) -> Iterable[int]:
        """Return the offsets that are not settled, ascending."""
        if self.deltas is None and self.left == (1 << self.count) - 1:
            return range(self.start, self.start + self.count)  # also of thousands, as after a restart
        return self._open_offsets()

    def _open_offsets(self) -> Iterator[int]:
        left, i = self.left, 0
        while left:
            if left & 1:
                yield self.start + (i if self.deltas is None else self.deltas[i])
            left >>= 1
            i += 1


class Timeline(TimelineFields):
    """Visible times of deliveries. An entry is a hint: only its batch knows whether a message is due."""

    __slots__ = ()

    _buckets: dict[int, Batch | list[Batch]]
    """A single batch is stored without a list: a list of one would double the memory."""
    _times: list[int]
    """Keys of `_buckets`, as a heap."""
    entries: int
    asked: int
    """Number of requests to drop settled entries since that was last done."""

    def __init__(self) -> None:
        self._buckets = {}
        self._times = []
        self.entries = self.asked = 0

    def add(self, at_ms: int, batch: Batch) -> None:
        there = self._buckets.get(at_ms)
        if there is None:
            self._buckets[at_ms] = batch
            heappush(self._times, at_ms)
        elif isinstance(there, list):
            there.append(batch)
        else:
            self._buckets[at_ms] = [there, batch]
        self.entries += 1

    def due(self, now_ms: int) -> Iterator[Batch]:
        """Yield the batches to check by `now_ms`, in any order. They stay in the timeline."""
        if self._times and self._times[0] <= now_ms:
            for at_ms in self._buckets:
                if at_ms <= now_ms:
                    yield from self._at(at_ms)

    def first(self) -> int | None:
        """Return the first time at which a batch with an unsettled message must be checked."""
        while self._times:
            if any(batch.left for batch in self._at(self._times[0])):
                return self._times[0]
            self._pop()
        return None

    def take(self, now_ms: int, limit: int) -> list[Batch]:
        """Remove and return up to `limit` of the batches to check by `now_ms`."""
        due: list[Batch] = []
        while self._times and self._times[0] <= now_ms and len(due) < limit:
            there, room = self._buckets[self._times[0]], limit - len(due)
            if isinstance(there, list) and len(there) > room:  # from its end, because it may hold a million
                taken: Sequence[Batch] = there[-room:]
                del there[-room:]
                self.entries -= room
            else:
                taken = self._pop()
            due += (batch for batch in taken if batch.left)
        return due

    def compact(self) -> None:
        """Drop settled batches."""
        live = {at_ms: [batch for batch in self._at(at_ms) if batch.left] for at_ms in self._buckets}
        self._buckets = {at_ms: each if len(each) > 1 else each[0] for at_ms, each in live.items() if each}
        self._times = sorted(self._buckets)  # a sorted list is a heap
        self.entries = sum(map(len, live.values()))
        self.asked = 0

    def _at(self, at_ms: int) -> Sequence[Batch]:
        there = self._buckets[at_ms]
        return there if isinstance(there, list) else (there,)

    def _pop(self) -> Sequence[Batch]:
        at_ms = heappop(self._times)
        there = self._at(at_ms)
        del self._buckets[at_ms]
        self.entries -= len(there)
        return there


ENTRY: Final = Struct("=qq")
"""Size of the body and position in the pop log, before the body of an entry of the journal."""


def pop_body(
    head: str, offsets: Sequence[int], pop_time_ms: int, invisible_ms: int, cursor: int, more: str = ""
) -> bytes:
    """Return the body of the record of a batch: its ascending offsets, the cursor after it, and more members."""
    start = offsets[0]
    distances = ",".join([str(offset - start) for offset in offsets])
    body = f'{head}"so":{start},"pt":{pop_time_ms},"it":{invisible_ms},"d":[{distances}],"nx":{cursor}{more}}}'
    return body.encode()


def settled_body(batch: int, offsets: Iterable[int], more: str = "") -> bytes:
    """Return the body of the record that some offsets of one batch were acknowledged, revived or released."""
    return f'{{"k":{batch},"o":[{",".join(map(str, offsets))}]{more}}}'.encode()


def entry_bytes(size: int) -> int:
    """Return the length of an entry with a body of this size."""
    return ENTRY.size + (size + 7) // 8 * 8


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
    raise InvalidReceiptError(f"{text!r:.80} is not a receipt; pass the `receipt` of a delivery unchanged")


def expired(texts: list[str]) -> ReceiptExpiredError:
    """Return the error for expired receipts, which has them as `receipts`."""
    more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
    error = ReceiptExpiredError(
        f"receipt {texts[0]!r}{more} has expired: the message was delivered to the group again or purged, or its "
        f"visible time was changed, which returned a new receipt. Nothing was changed"
    )
    error.receipts = texts
    return error
