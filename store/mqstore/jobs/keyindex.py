"""Places of messages with wanted keys, by the index files: option `keys` without whole queues.

    index      hash of topic#key -> physical offset        a suggestion: other keys have the same hash
    record     its queue and its queue offset
    plan       these few slots, and whatever the index does not vouch for

Tasks read the slots and compare the keys themselves, so a plan may be too wide, never too narrow. Each file vouches for
the records from its first entry to its last. It does so as far as entries are known to be on disk (a clean end, or the
checkpoint's `dispatched`). All else is read, since a file may be lost (`answered`). The queue is scanned if index files
are missing or damaged, for more hits than a scan is worth, and for a hit whose record cannot be read. An entry that is
damaged in a file that looks whole is noticed only by `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import pairwise

from mqstore.log.commitlog import QueueRef
from mqstore.log.reader import StoreReader

__all__ = ["KeyIndex"]

HITS_MAX = 10_000
"""Limit of hits in one topic. Beyond it the queues are scanned."""
SLICE_COST = 1_000
"""Number of messages that a task can scan in the time that one slice costs."""
_ALWAYS = 1 << 62


class KeyIndex:
    def __init__(self, store: StoreReader, keys: Sequence[str]) -> None:
        self._store = store
        self._keys = keys
        self._hits = cache(self._look_up)

    @cached_property
    def answered(self) -> Sequence[tuple[int, int]]:
        """The ranges [low, high) of physical offsets, ascending, that the index answers for.

        All keys of the records that begin there are in it. The records where one file ends and the next begins are in
        no range, since some of their keys may be in a file that is lost, as may those of all records in between.
        """
        store, index = self._store, self._store.index
        try:
            files = [*index.files]
            while files and files[-1].header.next_entry <= 1:
                files.pop()  # just made; or lost, as if it were not there
            spans = [file.span() for file in files]
            full = all(file.header.next_entry >= index.entries_per_file for file in files[:-1])
        except FileNotFoundError:  # another process's retention took one
            return ()
        whole = [span for span in spans if span is not None]
        if store.parts.index_findings or len(whole) < len(spans) or not full:
            return ()
        if any(before[1] > behind[0] for before, behind in pairwise(whole)):
            return ()
        limit = _ALWAYS if store.clean_shutdown else store.parts.checkpoint.dispatched or 0
        return [(low + 1, min(high, limit)) for low, high in whole if low + 1 < min(high, limit)]

    def narrowed(
        self, ref: QueueRef, start: int, stop: int, vouched: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield the parts of [start, stop) of a queue that have to be read, ascending.

        `vouched` has the queue offsets [low, high) of the ranges that the index answers for (`answered`)."""
        inside = [(max(start, low), min(stop, high)) for low, high in vouched]
        inside = [(low, high) for low, high in inside if low < high]
        hits = self._hits(ref.topic) if inside else None
        if hits is None:
            yield start, stop
            return
        slots = hits.get(ref, ())
        wanted: list[tuple[int, int]] = []
        at = start
        for low, high in inside:
            wanted += [(at, low), *((slot, slot + 1) for slot in slots if low <= slot < high)]
            at = high
        parts = [*_joined([*wanted, (at, stop)])]
        if len(parts) * SLICE_COST > stop - start:
            yield start, stop
        else:
            yield from parts

    def _look_up(self, topic: str) -> dict[QueueRef, list[int]] | None:
        """Return the ascending queue offsets of the hits by queue, or None if the index cannot say."""
        store = self._store
        places: set[int] = set()
        for key in self._keys:
            places.update(store.index.query(topic, key, -_ALWAYS, _ALWAYS, HITS_MAX + 1 - len(places)))
            if len(places) > HITS_MAX:
                return None
        found: dict[QueueRef, list[int]] = {}
        try:
            for physical in sorted(places):
                if physical < store.min_offset:
                    continue  # retention took it
                message = store.at(physical)
                found.setdefault(QueueRef(message.topic, message.queue_id), []).append(message.offset)
        except LookupError:
            return None  # what a scan makes of it, `onCorrupt` says
        return {ref: sorted(slots) for ref, slots in found.items()}


def _joined(parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Drop empty parts, and join parts that lie close together. The parts are ascending."""
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
