"""State of one (group, topic, queue) that is popped from: the state machine of delivery#pop-state.

    offsets of a queue:   settled ... | in flight, released and settled, mixed | not popped yet
                                      ^ committed                              ^ cursor

    in flight  --settle (ack, revived, dead letter)-->  settled
    in flight  --give_back (release)-->                 released --popped again--> in flight, of another batch
    in flight  --change-->                              in flight, visible at another time
    all        --reset-->                               not popped yet, from a new cursor on

A batch names many offsets, so a million messages in flight cost a million dict entries and no more objects than there
were pops. Visible times are kept in buckets of one millisecond. A pop adds to a bucket. Entries leave it when their
time has come, or when most entries of all buckets are settled.

The fields of all three classes are in C structures where there are compiled parts, which pop and settle single messages
by them (`PopTables`).

FIFO batches are kept in the order info (`orderinfo.py`), and only the last one also here (`fifo`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, repeat, takewhile
from typing import TYPE_CHECKING, NamedTuple

from mqstore.broker.names import QueueKey
from mqstore.broker.pop.log import queue_head
from mqstore.broker.pop.request import is_visible
from mqstore.log.message import Message
from mqstore.log.reading.tagfilter import UnitFilter
from mqstore.native import kernel
from mqstore.signalsafe import Lock

__all__ = ["MAX_BATCH", "Batch", "Counts", "QueueState", "Standing", "Timeline"]

MAX_BATCH = 32
"""Maximum number of messages of one pop."""
_COMPACT_FROM = 1_024
_REVIVED_KEPT = 65_536
"""Number of redelivered offsets to remember.
They distinguish a late acknowledgement from a repeated one."""


class Counts(NamedTuple):
    """Counts of events in one queue over some time."""

    pops: int
    """Number of pops that found messages, which is the number of batches."""
    messages: int
    """Number of messages delivered, for the first time or again."""
    size: int
    """Stored size of these messages in bytes."""
    acked: int


class Standing(NamedTuple):
    """Standing of a group in a queue."""

    first: int
    """First offset that is not settled."""
    ready_from: int
    """First offset that may be delivered now."""
    next: int
    """First offset that was not delivered yet."""
    in_flight: int
    again: int
    """Number of messages before `next` that may be delivered again."""


class BatchFields:
    """Base of `Batch`."""


class TimelineFields:
    """Base of `Timeline`."""


class QueueFields:
    """Base of `QueueState`."""


if not TYPE_CHECKING and kernel is not None:
    BatchFields, TimelineFields, QueueFields = kernel.BatchFields, kernel.TimelineFields, kernel.QueueFields


class Batch(BatchFields):
    """Messages of one pop, stored as one `ck` record."""

    __slots__ = ()

    name: int
    """Position of the `ck` in the pop log. -1 for a settled batch without a `ck`."""
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
    failed: set[int] | None
    """Offsets that failed and wait to be redelivered. No receiver holds them."""

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
        self.failed = None

    def times(self, offset: int) -> tuple[int, int]:
        """Return (pop time, invisible ms) of one delivery."""
        if self.moved is not None and offset in self.moved:
            return self.moved[offset]
        return self.pop_time_ms, self.invisible_ms

    def holds(self, offset: int) -> bool:
        """Return True if a receiver in this process holds that delivery."""
        return self.local and (self.failed is None or offset not in self.failed)

    def note_failed(self, offset: int, failed: bool) -> None:
        """Note that a delivery has failed, or is held again."""
        if failed:
            self.failed = (self.failed or set()) | {offset}
        elif self.failed is not None:
            self.failed.discard(offset)

    def visible_at(self, offset: int) -> int:
        pop_time_ms, invisible_ms = self.times(offset)
        return pop_time_ms + invisible_ms

    def is_visible(self, offset: int, now_ms: int) -> bool:
        """Return True if that delivery is over."""
        pop_time_ms, invisible_ms = self.times(offset)
        return is_visible(pop_time_ms, pop_time_ms + invisible_ms, now_ms)

    def bit(self, offset: int) -> int:
        """Return the bit mask of one message. Raises ValueError if the batch does not contain it."""
        distance = offset - self.start
        return 1 << (distance if self.deltas is None else self.deltas.index(distance))

    def open_offsets(self) -> Iterator[int]:
        """Yield the offsets that are not settled, ascending."""
        left, i = self.left, 0
        while left:
            if left & 1:
                yield self.start + (i if self.deltas is None else self.deltas[i])
            left >>= 1
            i += 1


class Timeline(TimelineFields):
    """Visible times of deliveries. An entry is a hint: only its batch knows whether a message is due."""

    __slots__ = ("asked",)

    _buckets: dict[int, Batch | list[Batch]]
    """A single batch is stored without a list: a list of one would double the memory."""
    _times: list[int]
    """Keys of `_buckets`, as a heap."""
    entries: int

    def __init__(self) -> None:
        self._buckets = {}
        self._times = []
        self.entries = 0
        self.asked = 0
        """Number of requests to drop settled entries since that was last done."""

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
        buckets: dict[int, Batch | list[Batch]] = {}
        self.entries = 0
        for at_ms in self._buckets:
            live = [batch for batch in self._at(at_ms) if batch.left]
            if live:
                buckets[at_ms] = live if len(live) > 1 else live[0]
                self.entries += len(live)
        self._buckets = buckets
        self._times = list(buckets)
        heapify(self._times)
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


class QueueState(QueueFields):
    """State of one (group, topic, queue). Its fields are read and written under `lock`."""

    __slots__ = ("_free", "ahead_size", "backoff_ms", "revived")

    key: QueueKey
    head: str
    lock: Lock
    cursor: int
    """Next offset to pop. -1 until the state is opened."""
    committed: int
    """Smallest offset that is in flight or released, or the cursor if there is none."""
    written: int | None
    """Committed offset that the offset table has."""
    in_flight: dict[int, Batch]
    """Batches in flight by offset. The first entry is the oldest: insertion follows the batches' names."""
    released: dict[int, Batch]
    """Released deliveries, by offset. They are popped before the cursor moves on."""
    timeline: Timeline
    _batches: int
    """Number of batches with an unsettled message."""
    fifo: Batch | None
    """The last FIFO batch. The order info, which may be this batch itself, knows its messages' state."""
    ahead: list[Message]
    """Prefetched messages. Reading one message costs as much as reading many."""
    ahead_at: int
    ahead_from: int
    """Cursor value at which the rest of `ahead` is next."""
    ahead_next: int
    """Offset after the last unit that was read for `ahead`."""
    ahead_filter: UnitFilter | None
    announced_ms: int | None
    """Time at which the housekeeper will check this queue."""
    last_pop_ms: int
    reset_ms: int
    """Last pop time before a reset, after which all messages are redelivered."""
    pops: int
    """Pops since the last call of `counts`, like the three below. They are counted under the lock."""
    popped: int
    popped_bytes: int
    acked: int
    gone: bool
    """True if group or topic was deleted. A thread that still has this state must look up another."""

    def __init__(self, key: QueueKey) -> None:
        self.key = key
        self.head = queue_head(key)
        self.lock = Lock()
        self.cursor = self.committed = -1
        self.written = None
        self.in_flight = {}
        self.released = {}
        self._free: list[int] = []
        """Heap of the offsets in `released`, and of some that have left it."""
        self.revived: dict[int, None] = {}
        self.timeline = Timeline()
        self._batches = 0
        self.fifo = None
        self.ahead = []
        self.ahead_at = self.ahead_from = self.ahead_next = 0
        self.ahead_size = 32
        self.ahead_filter = None
        self.announced_ms = None
        self.backoff_ms = 0
        """Number of ms to wait after the next put that fails."""
        self.last_pop_ms = self.reset_ms = 0
        self.pops = self.popped = self.popped_bytes = self.acked = 0
        self.gone = False

    # -- batches ----------------------------------------------------------------------------------------------------

    def add(self, batch: Batch, offsets: Sequence[int]) -> None:
        """Add a popped batch. A released offset moves from its old batch into this one."""
        if self.released:
            for offset in offsets:
                old = self.released.pop(offset, None)
                if old is not None:
                    self._strike(old, old.bit(offset))
        self.in_flight.update(zip(offsets, repeat(batch)))
        self._batches += 1
        self.timeline.add(batch.pop_time_ms + batch.invisible_ms, batch)

    def replace(self, batch: Batch, offsets: Sequence[int]) -> None:
        """Add a batch of offsets that were popped before.
        These offsets leave their older batches."""
        for offset in offsets:
            old = self.in_flight.pop(offset, None)
            if old is not None:
                self._strike(old, old.bit(offset))
        self.add(batch, offsets)
        self.last_pop_ms = max(self.last_pop_ms, batch.pop_time_ms)

    def change(self, batch: Batch, offset: int, pop_time_ms: int, invisible_ms: int) -> None:
        """Change the visible time of a delivery."""
        if batch.moved is None:
            batch.moved = {}
        batch.moved[offset] = pop_time_ms, invisible_ms
        self.timeline.add(pop_time_ms + invisible_ms, batch)
        if self.timeline.entries > _COMPACT_FROM + 2 * self._batches:
            self._compact()

    def settle(self, batch: Batch, offsets: Iterable[int]) -> int:
        """Settle messages of the batch. Return how many of them were in flight.
        Messages that are settled already, or were popped again, are ignored."""
        bits = 0
        before = len(self.in_flight)
        in_flight, start, deltas = self.in_flight, batch.start, batch.deltas
        for offset in offsets:
            if in_flight.get(offset) is batch:
                del in_flight[offset]
            elif self.released.get(offset) is batch:
                del self.released[offset]
            else:
                continue
            bits |= 1 << offset - start if deltas is None else batch.bit(offset)
        self._strike(batch, bits)
        if self.timeline.entries > _COMPACT_FROM + 2 * self._batches:
            self._compact()
        return before - len(self.in_flight)

    def release(self, batch: Batch, offsets: Iterable[int]) -> None:
        """Release deliveries that nobody has seen."""
        for offset in offsets:
            if self.in_flight.get(offset) is batch:
                del self.in_flight[offset]
                self.released[offset] = batch
                heappush(self._free, offset)
        if len(self._free) > _COMPACT_FROM + 2 * len(self.released):
            self._free = sorted(self.released)  # a sorted list is a heap

    def first_released(self, count: int) -> list[int]:
        """Return the first `count` released offsets, ascending.
        The cost does not grow with their number. They stay released until they are popped or settled."""
        found: list[int] = []
        while self._free and len(found) < count:
            offset = heappop(self._free)
            if offset in self.released and offset not in found[-1:]:  # released twice, it may be in the heap twice
                found.append(offset)
        for offset in found:
            heappush(self._free, offset)
        return found

    def clear(self, cursor: int) -> None:
        """Forget all deliveries and continue at `cursor`."""
        self.in_flight.clear()
        self.released.clear()
        self._free.clear()
        self.revived.clear()
        self.timeline = Timeline()
        self._batches = 0
        self.fifo = None
        self.cursor = self.committed = cursor
        self.drop_ahead()

    def note_revived(self, offsets: Iterable[int]) -> None:
        self.revived.update(dict.fromkeys(offsets))
        if len(self.revived) > 2 * _REVIVED_KEPT:
            self.revived = dict.fromkeys(islice(self.revived, _REVIVED_KEPT, None))

    def _compact(self) -> None:
        # There may be nothing to drop, if all times of a batch were changed. So only some calls check all entries.
        self.timeline.asked += 1
        if 4 * self.timeline.asked > self.timeline.entries:
            self.timeline.compact()

    def _strike(self, batch: Batch, bits: int) -> None:
        if batch.left and bits:
            batch.left &= ~bits
            if not batch.left:
                self._batches -= 1
                batch.moved = batch.failed = None

    # -- measurements ------------------------------------------------------------------------------------------------

    def counts(self) -> Counts | None:
        """Return the counts since the last call, or None if nothing happened."""
        if not self.pops and not self.acked:
            return None
        found = Counts(self.pops, self.popped, self.popped_bytes, self.acked)
        self.pops = self.popped = self.popped_bytes = self.acked = 0
        return found

    @property
    def open_batches(self) -> int:
        """Number of batches with a message that is not settled."""
        return self._batches + (self.fifo is not None and self.fifo.left != 0)

    def overdue(self, now_ms: int) -> Iterator[int]:
        """Yield the visible times of deliveries that wait for the housekeeper to redeliver them."""
        # After a failed put the timeline has later times. Then all deliveries in flight are checked.
        batches = self.in_flight.values() if self.backoff_ms else self.timeline.due(now_ms)
        for batch in dict.fromkeys(batches):
            for offset in batch.open_offsets():
                if self.in_flight.get(offset) is batch and batch.is_visible(offset, now_ms):
                    yield batch.visible_at(offset)

    def follow_clock(self, now_ms: int) -> bool:
        """Make deliveries due that are over because the clock was set back.
        Returns True if there are any."""
        over = [
            batch
            for batch in dict.fromkeys(self.in_flight.values())
            for offsets in [batch.open_offsets() if batch.moved else (batch.start,)]
            if any(batch.visible_at(offset) > now_ms and batch.is_visible(offset, now_ms) for offset in offsets)
        ]
        for batch in over:
            self.timeline.add(now_ms, batch)
        return bool(over)

    # -- positions --------------------------------------------------------------------------------------------------

    def advance(self) -> int:
        """Move `committed` up to the first offset that is not settled, and return it."""
        if not self.in_flight and not self.released:
            self.committed = self.cursor
        else:
            # Each offset is passed once, so this costs no more than popping it did.
            at, cursor, in_flight, released = self.committed, self.cursor, self.in_flight, self.released
            while at < cursor and at not in in_flight and at not in released:
                at += 1
            self.committed = at
        return self.committed

    def standing(self) -> Standing:
        """Return the standing of the group in a queue that is not consumed in order."""
        ready = next(iter(self.first_released(1)), self.cursor)
        return Standing(self.advance(), ready, self.cursor, len(self.in_flight), len(self.released))

    def oldest(self) -> Batch | None:
        """Return the oldest batch with an unsettled message."""
        batches = [batch for batch in self.released.values() if batch.left]
        first = next(iter(self.in_flight.values()), None)
        if first is not None:
            batches.append(first)
        if self.fifo is not None and self.fifo.left:
            batches.append(self.fifo)
        return min(batches, key=lambda batch: batch.name, default=None)

    def named_before(self, bound: int, count: int) -> list[Batch]:
        """Return the first `count` open batches whose record is before log position `bound`.
        An open batch has an unsettled message."""
        found = {batch for batch in self.released.values() if batch.left and batch.name < bound}
        found.update(takewhile(lambda batch: batch.name < bound, self.in_flight.values()))
        if self.fifo is not None and self.fifo.left and self.fifo.name < bound:
            found.add(self.fifo)
        return sorted(found, key=lambda batch: batch.name)[:count]

    # -- prefetch ---------------------------------------------------------------------------------------------------

    def take_ahead(self, count: int) -> list[Message]:
        """Take up to `count` prefetched messages, and move the cursor past them."""
        at = self.ahead_at
        found = self.ahead[at : at + count]
        if found:
            self.ahead_at = at = at + len(found)
            if at < len(self.ahead):
                self.cursor = self.ahead_from = found[-1].offset + 1
            else:
                self.cursor = self.ahead_from = self.ahead_next
                self.ahead = []
                self.ahead_at = 0
        return found

    def drop_ahead(self) -> None:
        """Drop the prefetched messages. The next read starts at the cursor."""
        self.ahead = []
        self.ahead_at = 0
        self.ahead_from = self.ahead_next = self.cursor
