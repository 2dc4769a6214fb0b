"""State of one (group, topic, queue) that is popped from: the state machine of delivery#pop-state.

    offsets of a queue:   settled ... | in flight, released and settled, mixed | not popped yet
                                      ^ committed                              ^ cursor

    in flight  --settle (ack, revived, dead letter)-->  settled
    in flight  --give_back (release)-->                 released --popped again--> in flight, of another batch
    in flight  --change-->                              in flight, visible at another time
    not popped yet --skip (cancelled, expired)-->        settled: the cursor passes it
    all        --reset-->                               not popped yet, from a new cursor on

FIFO batches are kept in the order info (`orderinfo.py`), and only the last one also here (`fifo`). The fields are in a
C structure where there are compiled parts (`PopTables`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice, repeat, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from mqstore.broker.pop.batch import Batch, Timeline
from mqstore.broker.pop.orderinfo import OrderInfo
from mqstore.broker.redelivery.reason import EXPIRED, GIVEN_BACK, Reason
from mqstore.broker.tables.names import QueueKey, is_retry_topic
from mqstore.log.message import Message
from mqstore.log.reading.tagfilter import UnitFilter
from mqstore.native import kernel
from mqstore.signalsafe import Lock

MAX_BATCH = 32
"""Maximum number of messages of one pop."""
NEVER_MS = 2**63 - 1
"""Time of a queue that the housekeeper need not check."""
_COMPACT_FROM = 1_024
_TEXTS_KEPT = 65_536
"""Number of deliveries in flight whose progress or reason is kept as a text."""
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
    skipped: int = 0
    """Number of messages from `next` on that will not be delivered."""


class QueueFields:
    """Base of `QueueState`."""


if not TYPE_CHECKING and kernel is not None:
    QueueFields = kernel.QueueFields


class QueueState(QueueFields):
    """State of one (group, topic, queue). Its fields are read and written under `lock`."""

    __slots__ = (
        *("_free", "ahead_size", "backoff_ms", "expiry", "holders", "is_retry", "logged", "progress", "reasons"),
        *("revived", "skipped"),
    )

    key: QueueKey
    head: str
    """Members with which each `ck` and `rst` of the queue begins. Encoded once, because names need escaping."""
    lock: Lock
    cursor: int
    """Next offset to pop. -1 until the state is opened."""
    committed: int
    """Smallest offset that is in flight or released, or the cursor if there is none."""
    written: int
    """Committed offset that the offset table has. -1 if it is not known."""
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
    announced_ms: int
    """Time at which the housekeeper will check this queue, or `NEVER_MS`."""
    last_pop_ms: int
    reset_ms: int
    """Last pop time before a reset, after which all messages are redelivered."""
    pops: int
    """Pops since the last call of `counts`, like the three below. They are counted under the lock."""
    popped: int
    popped_bytes: int
    acked: int
    noted: bool
    """True if the journal has something that the log does not (`journal.py`)."""
    acks: dict[int, int]
    """Acknowledgements that only the journal has, of batches in the log: the batch's name, by offset."""
    gone: bool
    """True if group or topic was deleted. A thread that still has this state must look up another."""

    def __init__(self, key: QueueKey) -> None:
        self.key = key
        self.head = f'{{"t":{json.dumps(key.topic)},"c":{json.dumps(key.group)},"q":{key.queue_id},'
        self.is_retry = is_retry_topic(key.topic)
        self.expiry: str | None = None
        """Attribute `EXPIRY` of the topic. None: its messages do not expire."""
        self.lock = Lock()
        self.cursor = self.committed = self.written = -1
        self.in_flight = {}
        self.released = {}
        self._free: list[int] = []
        """Heap of the offsets in `released`, and of some that have left it."""
        self.revived: dict[int, None] = {}
        self.reasons: dict[int, tuple[Batch, Reason]] = {}
        """Deliveries in flight that no receiver holds, by offset (`reason`). In order, some may have been settled here
        and in the next dictionary."""
        self.progress: dict[int, str] = {}
        """Progress that the holders of deliveries have set, by offset."""
        self.holders: dict[int, str] = {}
        """Receivers that are in another process, by offset. Some deliveries may have been settled."""
        self.skipped: dict[int, int] = {}
        """Offsets that are settled and will not be delivered, with their log position, in the order of the log.
        Some that the cursor has passed may still be here."""
        self.timeline = Timeline()
        self._batches = 0
        self.fifo = None
        self.ahead = []
        self.ahead_at = self.ahead_from = self.ahead_next = 0
        self.ahead_size = 32
        self.ahead_filter = None
        self.announced_ms = NEVER_MS
        self.backoff_ms = 0
        """Number of ms to wait after the next put that fails."""
        self.last_pop_ms = self.reset_ms = 0
        self.pops = self.popped = self.popped_bytes = self.acked = 0
        self.noted = self.gone = False
        self.acks = {}
        self.logged = -1
        """Cursor in the last record of the log, as far as known."""

    # -- batches ----------------------------------------------------------------------------------------------------

    def add(self, batch: Batch, offsets: Sequence[int]) -> None:
        """Add a popped batch. A released offset moves from its old batch into this one."""
        if self.released:
            for offset in offsets:
                old = self.released.pop(offset, None)
                if old is not None:
                    self._strike(old, old.bits([offset]))
        self.in_flight.update(zip(offsets, repeat(batch)))
        self._batches += 1
        self.timeline.add(batch.pop_time_ms + batch.invisible_ms, batch)

    def replace(self, batch: Batch, offsets: Sequence[int]) -> None:
        """Add a batch of offsets that were popped before.
        These offsets leave their older batches."""
        if not self.in_flight.keys().isdisjoint(offsets):  # usually they are: a replay adds each batch once
            for offset in offsets:
                old = self.in_flight.pop(offset, None)
                if old is not None:
                    self._strike(old, old.bits([offset]))
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
        in_flight, released = self.in_flight, self.released
        before = len(in_flight)
        known = [offset for offset in offsets if in_flight.get(offset) is batch or released.get(offset) is batch]
        for offset in known:
            if in_flight.pop(offset, None) is None:
                released.pop(offset, None)
        self._drop_notes(known)
        self._strike(batch, batch.bits(known))
        if self.timeline.entries > _COMPACT_FROM + 2 * self._batches:
            self._compact()
        return before - len(self.in_flight)

    def release(self, batch: Batch, offsets: Iterable[int]) -> None:
        """Release deliveries that nobody has seen."""
        for offset in offsets:
            if self.in_flight.get(offset) is batch:
                del self.in_flight[offset]
                self._drop_notes((offset,))
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
        self.progress.clear()
        self.reasons.clear()
        self.holders.clear()
        self.timeline = Timeline()
        self._batches = 0
        self.fifo = None
        self.acks.clear()
        self.noted = False
        self.cursor = self.committed = self.logged = cursor
        self.skipped = self.skips() if cursor >= 0 else {}  # a cancelled message stays so
        self.drop_ahead()

    def skip(self, offsets: Iterable[int], name: int) -> None:
        """Note messages that will not be delivered, by the record at log position `name`."""
        for offset in offsets:
            self.skipped.pop(offset, None)  # to the end: the first entry is the oldest
            self.skipped[offset] = name
        kept = self.without_skipped(self.ahead[self.ahead_at :])
        if kept:
            self.ahead, self.ahead_at = kept, 0
        else:
            self.drop_ahead()

    def without_skipped(self, messages: list[Message]) -> list[Message]:
        """Return the messages that may be delivered."""
        return [message for message in messages if message.offset not in self.skipped] if self.skipped else messages

    def skips(self, begin: int = 0) -> dict[int, int]:
        """Return the part of `skipped` from offset `begin` on that the cursor has not passed."""
        begin = max(begin, self.cursor)
        return {offset: name for offset, name in self.skipped.items() if offset >= begin}

    def note_revived(self, offsets: Iterable[int]) -> None:
        self.revived.update(dict.fromkeys(offsets))
        if len(self.revived) > 2 * _REVIVED_KEPT:
            self.revived = dict.fromkeys(islice(self.revived, _REVIVED_KEPT, None))

    def note_progress(self, offset: int, text: str) -> None:
        """Note the progress of a delivery that is held."""
        self.progress[offset] = text if len(self.progress) < _TEXTS_KEPT else ""
        self._drop_settled(self.progress)

    def note_reason(self, batch: Batch, offset: int, reason: Reason | None) -> None:
        """Set what `reason` returns. None: the delivery is held again."""
        if reason is None:
            self.reasons.pop(offset, None)
            return
        if len(self.reasons) >= _TEXTS_KEPT:
            reason = EXPIRED if reason.counts else GIVEN_BACK  # one object for all, without a text
        self.reasons[offset] = batch, reason
        self._drop_settled(self.reasons)

    def reason(self, batch: Batch | None, offset: int) -> Reason | None:
        """Return the reason why no receiver holds a delivery, which waits to be redelivered. None: it is held."""
        found = self.reasons.get(offset)
        return found[1] if found is not None and found[0] is batch else None

    def is_given_back(self, batch: Batch, offset: int) -> bool:
        reason = self.reason(batch, offset)
        return reason is not None and not reason.counts

    def holds(self, batch: Batch, offset: int) -> bool:
        """Return True if a receiver in this process holds that delivery."""
        return batch.local and self.reason(batch, offset) is None

    def note_holder(self, offsets: Iterable[int], holder: str) -> None:
        """Note the receiver of deliveries."""
        self.holders.update(dict.fromkeys(offsets, holder))
        self._drop_settled(self.holders)

    def holder(self, offset: int) -> str:
        """Return the client of a server that has a delivery, or "" if the receiver is in this process or not known."""
        batch = self.in_flight.get(offset, self.fifo)
        return "" if batch is None or batch.local else self.holders.get(offset, "")

    def _drop_notes(self, offsets: Iterable[int]) -> None:
        """Forget why and how far deliveries without order were handled, as they end.
        Compiled code does not end these: a note comes with a change of the visible time."""
        for notes in (self.reasons, self.progress):
            for offset in offsets if notes else ():
                notes.pop(offset, None)

    def _drop_settled(self, notes: dict[int, Any]) -> None:
        if len(notes) > _COMPACT_FROM + 2 * len(self.in_flight):
            for offset in notes.keys() - self.in_flight.keys():
                if offset < self.cursor:  # in order, the messages of the last batch are not before it
                    del notes[offset]

    def count_failed(self, order: OrderInfo | None, now_ms: int) -> tuple[int, int]:
        """Return (failed deliveries that wait for their next attempt, deliveries that were given back for later)."""
        held: Mapping[int, Batch | None]
        held = self.in_flight if order is None else dict.fromkeys(order.held(self.cursor, now_ms), self.fifo)
        found = [reason.counts for offset, (batch, reason) in self.reasons.items() if held.get(offset) is batch]
        return found.count(True), found.count(False)

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
                batch.moved = None

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
            if batch.moved or batch.pop_time_ms > now_ms  # else its time counts; there may be a million of these
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
            in_flight, released = self.in_flight, self.released
            held = in_flight.__contains__ if not released else lambda at: at in in_flight or at in released
            self.committed = next(filter(held, range(self.committed, self.cursor)), self.cursor)
        return self.committed

    def standing(self, order: OrderInfo | None, now_ms: int) -> Standing:
        """Return the standing of the group. `order` is the queue's last batch, if it is consumed in order."""
        cursor = self.cursor
        if order is None:
            ready = next(iter(self.first_released(1)), cursor)
            counts = len(self.in_flight), len(self.released), len(self.skips())
            return Standing(self.advance(), ready, cursor, *counts)
        left = order.unacked(cursor)
        again = [offset for offset in left if order.is_visible(offset, now_ms)]
        behind = max(cursor, order.offsets[-1] + 1) if order.offsets else cursor
        first, ready = left[0] if left else behind, again[0] if again else behind
        return Standing(first, ready, behind, len(left) - len(again), len(again), len(self.skips(behind)))

    def oldest(self) -> Batch | None:
        """Return the oldest batch in the log with an unsettled message."""
        batches = [batch for batch in self.released.values() if batch.left]
        first = next(iter(self.in_flight.values()), None)
        if first is not None and first.name >= 0:  # otherwise only the journal has it
            batches.append(first)
        if self.fifo is not None and self.fifo.left:
            batches.append(self.fifo)
        return min(batches, key=lambda batch: batch.name, default=None)

    def named_before(self, bound: int, count: int) -> list[Batch]:
        """Return the first `count` open batches whose record is before log position `bound`.
        An open batch has an unsettled message."""
        found = {batch for batch in self.released.values() if batch.left and batch.name < bound}
        found.update(takewhile(lambda batch: 0 <= batch.name < bound, self.in_flight.values()))
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
