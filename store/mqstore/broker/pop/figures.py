"""Measurements of pop, for statistics and for retention, which asks what is in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from mqstore.broker.mechanism import Pin
from mqstore.broker.names import QueueKey
from mqstore.broker.pop.fifo import FifoQueues
from mqstore.broker.pop.state import Counts, Standing
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.retention import physical_of

__all__ = ["PopFigures"]


class PopFigures:
    """Measurements of all queue states, each read under its lock."""

    def __init__(self, tables: PopTables, fifo: FifoQueues) -> None:
        self._tables = tables
        self._fifo = fifo

    def counts(self) -> Iterator[tuple[QueueKey, Counts]]:
        """Yield the counts of each queue since the last call. Queues without a change are left out."""
        while self._tables.last_counts:
            yield self._tables.last_counts.pop()
        for key, state in list(self._tables.states.items()):
            if state.pops or state.acked:  # read without the lock: a later change is for the next call
                with state.lock:
                    found = state.counts()
                if found is not None:
                    yield key, found

    def standing(self, key: QueueKey) -> Standing | None:
        """Return the standing of the group in a queue.
        Returns None if the group has not popped from the queue since the store was opened and nothing is in flight."""
        state = self._tables.states.get(key)
        if state is None or state.cursor < 0:
            return None
        with state.lock:
            record = self._tables.order(state)
            if record is not None:
                return self._fifo.standing(state, record, self._tables.clock.now_ms())
            return state.standing()

    def backlog(self, now_ms: int) -> tuple[int, int, int]:
        """Return (overdue deliveries, ms that the first of them has waited, open batches).
        Overdue deliveries wait to be redelivered. An open batch has a message that is not settled."""
        overdue, first_ms, batches = 0, now_ms, 0
        for state in list(self._tables.states.values()):
            with state.lock:
                batches += state.open_batches
                for at_ms in state.overdue(now_ms):
                    overdue += 1
                    first_ms = min(first_ms, at_ms)
        return overdue, now_ms - first_ms, batches

    def held(self) -> Iterable[Pin]:
        """Yield the oldest message in flight of each queue.
        Retention that keeps nothing else for a group uses this. Messages that wait for a receiver are not included:
        released ones, and FIFO ones that are visible again."""
        store, now_ms = self._tables.store, self._tables.clock.now_ms()
        for key, state in list(self._tables.states.items()):
            with state.lock:
                record = self._tables.order(state)
                held = [] if record is None else record.held(state.cursor, now_ms)
                offset = min(chain(state.in_flight, held), default=None)
            if offset is not None and store.offsets_or_none(key.topic, key.queue_id) is not None:
                physical = physical_of(store, key.topic, key.queue_id, offset)
                if physical is not None:
                    yield Pin(physical, key.topic, key.queue_id, key.group, "in flight")
