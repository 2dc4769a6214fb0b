"""What retention may delete: nothing that somebody still needs (broker-semantics 2.6; design.md, "Retention never
surprises").

    topic                  oldest record needed
    user, retry            at the smallest offset that any group committed; the first one where no group ever did
    dead letters           at the queue's logical start, which replay, purge and expiry move
    the engine's own       as the mechanism says whose it is (`pins`)
    discarded half         none

The bound is the smallest of these; with `unconsumed="drop"` of the last three rows: what the engine still has to
deliver is kept whatever the policy. What pins the log, and for whom, is shown, for it is what keeps the disk full.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mqstore.broker.names import START_GROUP, is_dlq_topic, is_system_topic
from mqstore.broker.parts import Mechanism, Parts, Pin
from mqstore.layout.consumequeue import is_void
from mqstore.log.store import MessageStore
from mqstore.options import Retention

__all__ = ["RetentionService", "all_pins", "oldest_pin"]

_log = logging.getLogger("mqstore")
_INTERVAL_MS = 10_000
_CHUNK_UNITS = 4096


def physical_of(store: MessageStore, topic: str, queue_id: int, offset: int) -> int | None:
    """Where the first record at or behind `offset` of a queue lies; None behind the last."""
    while len(units := store.units(topic, queue_id, offset, _CHUNK_UNITS)):
        live = np.flatnonzero((units["size"] > 0) & ~is_void(units))
        if len(live):
            return int(units["physical_offset"][live[0]])
        offset += len(units)
    return None


def all_pins(parts: Parts, mechanisms: Iterable[Mechanism], *, unconsumed: bool = True) -> Iterator[Pin]:
    """The oldest record that each mechanism needs, and, with `unconsumed`, each queue."""
    for mechanism in mechanisms:
        yield from mechanism.pins()
    if not unconsumed:
        return
    store, offsets = parts.store, parts.offsets
    for topic in store.topics():
        if is_system_topic(topic):
            continue
        groups = sorted(offsets.groups_of(topic))
        for ref in store.queues(topic):
            first, end = store.offsets(topic, ref.queue_id)
            start = max(first, offsets.start_of(topic, ref.queue_id))
            if is_dlq_topic(topic):
                needed, group, why = start, START_GROUP, "dead letters, not replayed, purged or expired"
            elif not groups:
                needed, group, why = start, "", "no group has consumed it"
            else:
                needed, group = min(
                    (start if (offset := offsets.committed(each, topic, ref.queue_id)) is None else offset, each)
                    for each in groups
                )
                needed, why = max(needed, start), "not consumed"
            if needed < end:
                physical = physical_of(store, topic, ref.queue_id, needed)
                if physical is not None:
                    yield Pin(physical, topic, ref.queue_id, group, why)


def oldest_pin(parts: Parts, mechanisms: Iterable[Mechanism], *, unconsumed: bool = True) -> Pin | None:
    """What keeps the front of the log, None when nothing does."""
    pins = all_pins(parts, mechanisms, unconsumed=unconsumed)
    return min(pins, default=None, key=lambda pin: pin.physical_offset)


class RetentionService:
    """Keeps the bound of the store, and cleans by the default policy where the store was given none of its own."""

    def __init__(self, parts: Parts, mechanisms: Sequence[Mechanism]) -> None:
        self._parts = parts
        self._mechanisms = mechanisms
        self._due_ms = 0
        self._told: Pin | None = None
        parts.store.retention_bound = self.bound

    def bound(self, policy: Retention) -> int:
        """The smallest physical offset that is still needed."""
        pin = oldest_pin(self._parts, self._mechanisms, unconsumed=policy.unconsumed == "keep")
        if pin is None:
            return self._parts.store.max_offset
        if self._told is None or pin[1:] != self._told[1:]:
            _log.info("the log is kept from %d on for %s/%d %s: %s", *pin)
        self._told = pin
        return pin.physical_offset

    def run_once(self, now_ms: int) -> int | None:
        if self._parts.config.retention is not None:
            return None  # the store cleans by itself, within our bound
        if now_ms >= self._due_ms or now_ms < self._due_ms - _INTERVAL_MS:
            self._due_ms = now_ms + _INTERVAL_MS
            self._parts.store.clean(Retention())
        return self._due_ms

    def close(self) -> None:
        self._parts.store.retention_bound = None

    def pins(self) -> Iterable[Pin]:
        return ()
