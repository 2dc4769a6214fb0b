"""Lookup of messages by key in the index files, so that the option `keys` need not read whole queues.

    index      hash of topic#key -> physical offset        only a candidate: other keys may have the same hash
    record     its queue and its queue offset
    plan       these few slots, and all ranges that the index does not cover

Tasks read the slots and compare the keys, so a plan may be too wide, but never too narrow. Each file covers the records
from its first entry to its last, as far as entries are known to be on disk (a clean end, or the checkpoint's
`dispatched`). All other records are read, since a file may be lost (`answered`). The queue is scanned if index files
are missing or damaged, if there are more hits than a scan is worth, and if the record of a hit cannot be read. A
damaged entry in a file that looks whole is found only by `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import pairwise

from mqstore.log.commitlog import QueueRef
from mqstore.log.reading.reader import StoreReader

HITS_MAX = 10_000
"""Limit of hits in one topic. With more hits the queues are scanned."""
SLICE_COST = 1_000
"""Cost of one slice: the number of messages that a task can scan in the same time."""
_ALWAYS = 1 << 62


class KeyIndex:
    def __init__(self, store: StoreReader, keys: Sequence[str]) -> None:
        self._store = store
        self._keys = keys
        self._hits = cache(self._look_up)

    @cached_property
    def answered(self) -> Sequence[tuple[int, int]]:
        """Ascending ranges [low, high) of physical offsets that the index covers.

        All keys of the records that begin in a range are in the index. Records at the border of two files are in no
        range, since a file between these two may be lost, and with it some of their keys.
        """
        store, index = self._store, self._store.index
        try:
            files = [*index.files]
            while files and files[-1].header.next_entry <= 1:
                files.pop()  # just created, or its entries are lost: treat it as missing
            spans = [file.span() for file in files]
            full = all(file.header.next_entry >= index.entries_per_file for file in files[:-1])
        except FileNotFoundError:  # another process's retention has deleted one
            return ()
        whole = [span for span in spans if span is not None]
        if store.parts.index_findings or len(whole) < len(spans) or not full:
            return ()
        if any(before[1] > after[0] for before, after in pairwise(whole)):
            return ()
        limit = _ALWAYS if store.clean_shutdown else store.parts.checkpoint.dispatched or 0
        return [(low + 1, min(high, limit)) for low, high in whole if low + 1 < min(high, limit)]

    def narrowed(
        self, ref: QueueRef, start: int, stop: int, covered: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield the parts of [start, stop) of a queue that must be read, ascending.

        `covered` are the queue offsets [low, high) of the ranges that the index covers (`answered`)."""
        inside = [(max(start, low), min(stop, high)) for low, high in covered]
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
        """Return the ascending queue offsets of the hits by queue, or None if the queues must be scanned."""
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
                    continue  # deleted by retention
                message = store.at(physical)
                found.setdefault(QueueRef(message.topic, message.queue_id), []).append(message.offset)
        except LookupError:
            return None  # damaged: the scan handles it as `onCorrupt` says
        return {ref: sorted(slots) for ref, slots in found.items()}


def _joined(parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Drop empty parts, and join parts that are close together. The parts are ascending."""
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
