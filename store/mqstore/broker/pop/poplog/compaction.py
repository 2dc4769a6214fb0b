"""Housekeeping of pop: a short log, and the order info file (delivery#pop-log).
See also delivery#order-clean and delivery#order-file.

replay position    the oldest batch with an unsettled message, but never past the log that the order info file includes
relocation         batches too far from the log end are appended again, so that a replay takes seconds and few segments
                   must be kept
order info file    saved every 10 s, within 1 s of a failed orderly attempt, and at close, after a flush of the log
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from contextlib import nullcontext, suppress

from mqstore.broker.background.service import Pin, Wake
from mqstore.broker.pop.ordered import OrderedQueues
from mqstore.broker.pop.state import QueueState
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.pop.unordered import UnorderedQueues
from mqstore.broker.tables.configfile import ConfigFile
from mqstore.broker.tables.names import POP_LOG_GROUP, POP_LOG_KEY, POP_LOG_TOPIC
from mqstore.errors import MQStoreError
from mqstore.layout.consumequeue import UNIT
from mqstore.options import seconds
from mqstore.signalsafe import Lock

_ORDER_INFO_MS = 10_000
_IDLE_MS = 86_400_000
"""Time in ms after which an unused record is dropped, unless it holds attempts that still count."""
_REPLAY_RECORDS = 100_000
_REPLAY_SEGMENTS = 4
"""Maximum distance of the oldest open batch from the log end before it is appended again. The number of records is at
least twice that of open batches. Otherwise these would be appended again and again."""
_SKIPS = 4_096
"""Maximum number of skipped messages in one record."""
_ANEW = 4_096
"""Number of batches appended again in one run."""


class PopKeeper:
    def __init__(self, tables: PopTables, wake: Wake, file: ConfigFile, saved_version: int) -> None:
        """Start housekeeping. `saved_version` is the version of the order info in `file`."""
        self._tables = tables
        self._wake = wake
        self._parts = tables.parts
        self._store = tables.store
        self._orders = tables.orders
        self._unordered, self._ordered = UnorderedQueues(tables), OrderedQueues(tables)
        self._file = file
        interval = seconds(tables.parts.config.commit_interval, "commit_interval")
        self._keep_ms = max(1, round(interval * 1000))
        self._keep_due_ms = 0
        self._save_due_ms = 0
        self._save_lock = Lock()
        self._saved_version = saved_version
        self._summed_up = self._position()
        """Log position up to which the saved file has the outcome of FIFO batches."""
        self._looked_to = self._summed_up
        """Log end at the last `_advance`. The order info includes all records before it."""
        self._rests = False
        """True if the position was at the log end at the last check: only a growth of the log wakes us."""
        with suppress(MQStoreError, OSError):  # a full disk
            self._advance()
        self._store.on_growth.append(self._on_growth)

    def _on_growth(self, topic: str, queue_id: int, begin: int, end: int) -> None:
        """Wake the housekeeper when the pop log grows. The dispatching thread calls this.
        A message that is popped and settled at once announces no earlier run than its visible time, so without this
        the replay position would not move until then."""
        if self._rests and topic == POP_LOG_TOPIC:
            self._rests = False
            self._wake()

    def save_within(self, duration_ms: int, now_ms: int) -> None:
        due_ms = now_ms + duration_ms
        self._save_due_ms = min(self._save_due_ms, due_ms) or due_ms

    def run_once(self, now_ms: int) -> int | None:
        """Move the replay position and save the order info if they are due. Return the time of the next run."""
        if now_ms >= self._keep_due_ms or now_ms < self._keep_due_ms - self._keep_ms:
            self._keep_due_ms = now_ms + self._keep_ms
            self._advance()
        self._rests = True  # set before the check: later records wake us
        times = []
        if not self._tables.journal.folded or self._position() < self._tables.log.bounds()[1]:
            self._rests = False
            times.append(self._keep_due_ms)
        if self._tables.order_version != self._saved_version:
            if not self._save_due_ms or now_ms < self._save_due_ms - _ORDER_INFO_MS:
                self._save_due_ms = now_ms + _ORDER_INFO_MS
            elif now_ms >= self._save_due_ms:
                self.save(now_ms)
            if self._save_due_ms:
                times.append(self._save_due_ms)
        return min(times, default=None)

    def persist(self) -> None:
        self._advance()
        if self._tables.order_version != self._saved_version:
            self.save(self._tables.clock.now_ms())
            self._advance()

    def pins(self) -> Iterable[Pin]:
        """Yield the record from which a replay begins. Committed offsets pin the messages in flight."""
        unit = self._store.unit_bytes(POP_LOG_TOPIC, 0, self._position(), 1)
        if unit:
            why = "popped and not settled"
            yield Pin(UNIT.unpack(unit)[0], POP_LOG_TOPIC, 0, POP_LOG_GROUP, why)

    def _position(self) -> int:
        return self._parts.offsets.committed(POP_LOG_KEY) or 0

    def _advance(self) -> None:
        """Move the replay position up to the oldest open batch, after relocating batches too far from the log end.
        It never passes the records that the order info file includes. With an older file and only a later part of the
        log, a replay would restore a batch that was replaced, or that a reset ended."""
        log, offsets, journal = self._tables.log, self._parts.offsets, self._tables.journal
        journal.fold_all()
        # Read the end first: the record of a batch that is added to its state later is after this end.
        end = log.bounds()[1]
        bound = self._rewrite_bound(end)
        position = end
        budget = _ANEW
        for state in list(self._tables.states.values()):
            with state.lock:
                self._tables.order(state)
                for batch in state.named_before(bound, budget):
                    if batch is state.fifo:
                        self._ordered.rewrite(state)
                    else:
                        self._unordered.rewrite(state, batch)
                    budget -= 1
                if state.skipped:
                    position = min(position, self._keep_skips(state, bound, end))
                oldest = state.oldest()
                if oldest is not None:
                    position = min(position, oldest.name)
                if state.noted:  # since the fold
                    position = min(position, journal.base)
        self._looked_to = end
        if self._tables.order_version == self._saved_version:
            self._summed_up = end
        elif self._summed_up < bound:
            self.save_within(0, self._tables.clock.now_ms())
        position = min(position, self._summed_up)
        if position != self._position():
            offsets.commit(POP_LOG_KEY, position)

    def _keep_skips(self, state: QueueState, bound: int, end: int) -> int:
        """Append the skipped messages named by records before log position `bound` again.
        Return the position of the first record that is needed, or `end`."""
        # Not after each pop: one that fails sets the cursor back. A pop that found only such messages has no record, so
        # after a kill only the log and the offset table show the cursor.
        passed = min(state.cursor, max(state.logged, state.committed))
        state.skipped = {offset: name for offset, name in state.skipped.items() if offset >= passed}
        old = [offset for offset, name in state.skipped.items() if name < bound]
        for at in range(0, len(old), _SKIPS):
            self._tables.skip(state, old[at : at + _SKIPS])
        return min(end, next(iter(state.skipped.values()), end))

    def _rewrite_bound(self, end: int) -> int:
        """Return the log position before which batches are appended again.
        It limits the records and segments that a replay reads."""
        low = self._tables.log.bounds()[0]
        far = self._store.max_offset - _REPLAY_SEGMENTS * self._store.manifest.commitlog_segment_bytes

        def is_near(position: int) -> bool:
            unit = self._store.unit_bytes(POP_LOG_TOPIC, 0, position, 1)
            return not unit or UNIT.unpack(unit)[0] >= far

        first = max(low, self._position())
        if far > 0 and first < end:
            first += bisect_left(range(first, end), True, key=is_near)
            low = max(low, first)
        batches = sum(state.open_batches for state in list(self._tables.states.values()))
        return max(low, end - max(_REPLAY_RECORDS, 2 * batches))

    def save(self, now_ms: int) -> None:
        """Write `consumerOrderInfo.json`. The log is flushed first, because the file must not be ahead of the log."""
        with self._save_lock:
            self._clean(now_ms)
            version, looked_to, value = self._tables.order_version, self._looked_to, self._orders.as_json()
            self._file.flush_log()
            self._file.save(value)
            self._saved_version, self._summed_up, self._save_due_ms = version, looked_to, 0

    def _clean(self, now_ms: int) -> None:
        """Drop obsolete records before the file is written (delivery#order-clean).
        Unlike in RocketMQ, an old record is kept while one of its messages is invisible: its receiver still works on
        it, and the order would break without the record. A record is also kept while it counts attempts of an unsettled
        message. Otherwise a poison message would get all its attempts again if the group pauses over a weekend."""
        topics, groups = self._parts.topics, self._parts.groups
        for queue, record in self._orders.records().items():
            topic = topics.get(queue.topic) if groups.get(queue.group) is not None else None
            gone = topic is None or queue.queue_id >= topic.read_queues
            settled = 0 if gone else self._parts.offsets.committed(queue) or 0
            self._orders.drop_attempts(queue, settled)
            if not gone and now_ms - record.updated_ms > _IDLE_MS and not record.blocks(None, now_ms):
                # Drop the record if no next delivery counts an attempt by it.
                gone = not record.redelivered(None, record.unacked(settled))
            if gone:
                state = self._tables.states.get(queue)
                with nullcontext() if state is None else state.lock:  # compiled pops do not take the table's lock
                    self._orders.forget(queue, record)
