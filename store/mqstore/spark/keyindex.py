"""Where messages with wanted keys lie, by the index files: option `keys` without reading whole queues (spark B2).

    index      hash of topic#key -> physical offset        a suggestion: other keys have the same hash
    record     its queue and its queue offset
    plan       these few slots, and whatever the index does not vouch for

Tasks then read the slots as they would read the queue, and compare the keys themselves: so a plan may be too wide,
never too narrow. Each file vouches for the records from that of its first entry to that of its last, as far as entries
are known to be on disk (a clean end, or the checkpoint's `dispatched`); what lies between two files may be of one that
is lost, so it is looked at (`answered`). Missing or odd index files, more hits than a scan is worth, or a hit whose
record cannot be read: no answer, and the queue is scanned. An entry that is damaged in a file that looks whole is not
noticed here, but by `verify`. Knows no Spark.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.log.store import MessageStore

__all__ = ["Answered", "KeyIndex", "answered", "bears"]

HITS_MAX = 10_000
"""More entries of one topic than these, and its queues are scanned."""
SLICE_COST = 1_000
"""A slice of a plan costs a task as much time as scanning about so many messages."""
_ALWAYS = 1 << 62
_NEAR = 16
"""Records from the end of one file to the begin of the next are looked at one by one, if they are no more."""


class KeyIndex:
    """What the index of an opened store says of some keys."""

    def __init__(self, store: MessageStore, keys: Sequence[str]) -> None:
        self._store = store
        self._keys = keys
        self._slots: dict[str, dict[QueueRef, list[int]] | None] = {}

    @cached_property
    def answered(self) -> Answered:
        """What the index answers for."""
        return answered(self._store)

    def narrowed(
        self, ref: QueueRef, start: int, stop: int, vouched: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """The parts of [start, stop) of a queue that have to be read, ascending; `vouched` are the slots [low, high) of
        the ranges that are `answered`."""
        inside = [(max(start, low), min(stop, high)) for low, high in vouched]
        inside = [(low, high) for low, high in inside if low < high]
        hits = self._of_topic(ref.topic) if inside else None
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

    @cached_property
    def _at_seams(self) -> list[int]:
        """Physical offsets of the records at seams that bear a key. LookupError: one cannot be read."""
        return [place for place in self.answered.seams if bears(self._store.at(place), self._keys)]

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
        try:
            for physical in sorted(places.union(self._at_seams)):
                if physical < store.min_offset:
                    continue  # retention took it
                message = store.at(physical)
                found.setdefault(QueueRef(message.topic, message.queue_id), []).append(message.offset)
        except LookupError:
            return None  # what a scan makes of it, `onCorrupt` says
        return {ref: sorted(slots) for ref, slots in found.items()}


def bears(message: Message, keys: Collection[str]) -> bool:
    """Whether one of `keys` is among a message's keys, or is its unique key."""
    return message.unique_key in keys or not set(keys).isdisjoint(message.keys)


class Answered(NamedTuple):
    """What an index answers for, by physical offsets."""

    ranges: tuple[tuple[int, int], ...]
    """[low, high), ascending: the keys of records that begin there are in the index, but for those at seams."""
    seams: frozenset[int]
    """Records where one file ends or begins: some of their keys may be in another, which may be lost."""


def answered(store: MessageStore) -> Answered:
    """What the index of an opened store answers for. Entries fill one file after the other, so behind a file that is
    full the next one begins with the next record that has keys. Where that is not near, a file may be lost between the
    two, and what lies there is not answered for; nor is what lies before the first file and behind the last."""
    nothing = Answered((), frozenset())
    index = store._index
    try:
        files = [*index.files]
        while files and files[-1].header.next_entry <= 1:
            files.pop()  # just made; or lost, as if it were not there
        spans = [file.span(index.entries_per_file) for file in files]
        full = all(file.header.next_entry >= index.entries_per_file for file in files[:-1])
    except FileNotFoundError:  # another process's retention took one
        return nothing
    whole = [span for span in spans if span is not None]
    if store._index_findings or not whole or len(whole) < len(spans) or not full:
        return nothing
    if any(before[1] > behind[0] for before, behind in pairwise(whole)):
        return nothing
    limit = _ALWAYS if store.clean_shutdown else store._checkpoint.current.dispatched or 0
    ranges, seams = [], {whole[0][0]}
    low, high = whole[0]
    for begin, end in whole[1:]:
        near = _from_to(store, high, begin)
        if near is None:
            ranges.append((low, high))
            low, near = begin, [begin]
        seams.update(near)
        high = end
    with suppress(LookupError):
        last = store.at(high).size
        seams.add(high)
        high += last
    ranges.append((low, high))
    clipped = tuple((low, min(high, limit)) for low, high in ranges if low < min(high, limit))
    return Answered(clipped, frozenset(seam for seam in seams if seam < limit))


def _from_to(store: MessageStore, first: int, last: int) -> list[int] | None:
    """The physical offsets of records from `first` to `last`, both with them. None: there are many, or who knows."""
    places = [first]
    while places[-1] < last and len(places) < _NEAR:
        try:
            places.append(places[-1] + store.at(places[-1]).size)
        except LookupError:
            return None
    return places if places[-1] == last else None


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
