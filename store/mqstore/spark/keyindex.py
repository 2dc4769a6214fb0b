"""Where messages with wanted keys lie, by the index files: option `keys` without reading whole queues (spark B2).

    index      hash of topic#key -> physical offset        a suggestion: other keys have the same hash
    record     its queue and its queue offset
    plan       these few slots, and whatever the index does not vouch for

Tasks then read the slots as they would read the queue, and compare the keys themselves: so a plan may be too wide,
never too narrow. The index vouches for records from that of its oldest entry on, up to where its entries are known to
be on disk (a clean end, or the checkpoint's `dispatched`). Missing or odd index files, more hits than a scan is worth,
or a hit whose record cannot be read: no answer, and the queue is scanned. Knows no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from mqstore.log.commitlog import QueueRef
from mqstore.log.store import MessageStore

__all__ = ["KeyIndex"]

HITS_MAX = 10_000
"""More entries of one topic than these, and its queues are scanned."""
SLICE_COST = 1_000
"""A slice of a plan costs a task as much time as scanning about so many messages."""
_ALWAYS = 1 << 62


class KeyIndex:
    """What the index of an opened store says of some keys."""

    def __init__(self, store: MessageStore, keys: Sequence[str]) -> None:
        self._store = store
        self._keys = keys
        self._slots: dict[str, dict[QueueRef, list[int]] | None] = {}

    @cached_property
    def vouched(self) -> tuple[int, int]:
        """Physical offsets [low, high) of records whose keys are all in the index."""
        store = self._store
        entries = [file.header for file in store._index.files if file.header.next_entry > 1]
        if store._index_findings or not entries:
            return 0, 0
        high = _ALWAYS if store.clean_shutdown else store._checkpoint.current.dispatched or 0
        return entries[0].begin_physical_offset, high

    def narrowed(self, ref: QueueRef, start: int, stop: int, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The parts of [start, stop) of a queue that have to be read, ascending; `low` and `high` are the slots between
        which the index vouches (`vouched`)."""
        low, high = max(start, low), min(stop, high)
        hits = self._of_topic(ref.topic) if low < high else None
        if hits is None:
            yield start, stop
            return
        inside = [slot for slot in hits.get(ref, ()) if low <= slot < high]
        parts = [*_joined([(start, low), *((slot, slot + 1) for slot in inside), (high, stop)])]
        if len(parts) * SLICE_COST > stop - start:
            yield start, stop
        else:
            yield from parts

    def _of_topic(self, topic: str) -> dict[QueueRef, list[int]] | None:
        """Queue offsets of the hits by queue, ascending; None: nobody knows."""
        if topic not in self._slots:
            self._slots[topic] = self._look_up(topic)
        return self._slots[topic]

    def _look_up(self, topic: str) -> dict[QueueRef, list[int]] | None:
        store = self._store
        places: set[int] = set()
        for key in self._keys:
            places.update(store._index.query(topic, key, -_ALWAYS, _ALWAYS, HITS_MAX + 1 - len(places)))
            if len(places) > HITS_MAX:
                return None
        found: dict[QueueRef, list[int]] = {}
        for physical in sorted(places):
            if physical < store.min_offset:
                continue  # retention took it
            try:
                message = store.at(physical)
            except LookupError:
                return None  # what a scan makes of it, `onCorrupt` says
            found.setdefault(QueueRef(message.topic, message.queue_id), []).append(message.offset)
        return {ref: sorted(slots) for ref, slots in found.items()}


def _joined(parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ascending parts without the empty ones; near ones as one."""
    begin = end = -1
    for start, stop in parts:
        if start >= stop:
            continue
        if begin < 0:
            begin, end = start, stop
        elif start - end <= SLICE_COST:
            end = stop
        else:
            yield begin, end
            begin, end = start, stop
    if begin >= 0:
        yield begin, end
