"""Comparison of the index with the keys of records: missing entries, and entries with another time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mqstore.log.index import Index
from mqstore.log.recovery.report import Finding

__all__ = ["IndexTally", "Wanted", "tally_index"]

Wanted = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Index entries that the log asks for: (key hash, physical offset, store timestamp in ms)."""


@dataclass(slots=True)
class IndexTally:
    """Differences between the index and what some records ask for.
    Tallies of parts of the log can be added, since a key has its entry at one physical offset."""

    missing: int = 0
    """Keys without an entry."""
    wrong_times: dict[str, int] = field(default_factory=dict)
    """Entries by file whose time differs from their record's. They would hide a key from a query by time."""
    wrong_ends: set[str] = field(default_factory=set)
    """Files whose begin or end is not the time of their first or last entry."""

    def add(self, other: IndexTally) -> None:
        self.missing += other.missing
        for name, count in other.wrong_times.items():
            self.wrong_times[name] = self.wrong_times.get(name, 0) + count
        self.wrong_ends |= other.wrong_ends

    def findings(self, index: Index) -> Iterator[Finding]:
        if self.missing:
            name = f"index/{index.files[0].name}" if index.files else "index"
            yield Finding("bad_index", name, 0, 0, f"{self.missing} keys of the log have no entry")
        for file in index.files:
            name = f"index/{file.name}"
            if file.name in self.wrong_times:
                detail = f"{self.wrong_times[file.name]} entries bear another time than their records"
                yield Finding("bad_index", name, 0, 0, detail)
            if file.name in self.wrong_ends:
                detail = "begin and end are not the times of the first and the last entry"
                yield Finding("bad_index", name, 0, 16, detail)


def _fingerprints(hashes: npt.NDArray[np.int32], physical: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return one number for each (hash, physical offset). Different pairs almost never have the same."""
    mixed = physical.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return mixed ^ hashes.astype(np.uint64)


def tally_index(index: Index, wanted: Sequence[Wanted]) -> IndexTally:
    """Compare the index with the `wanted` entries.
    Only files and entries in the part of the log that `wanted` covers count."""
    tally = IndexTally()
    hashes = np.concatenate([np.zeros(0, np.int32), *(part[0] for part in wanted)])
    physical = np.concatenate([np.zeros(0, np.int64), *(part[1] for part in wanted)])
    stamps = np.concatenate([np.zeros(0, np.int64), *(part[2] for part in wanted)])
    if not len(physical):
        return tally
    asked = _fingerprints(hashes, physical)
    if (physical[1:] < physical[:-1]).any():
        order = np.argsort(physical, kind="stable")
        physical, stamps = physical[order], stamps[order]
    low, high = int(physical[0]), int(physical[-1])
    there = [np.zeros(0, np.uint64)]
    matched = 0
    for file, header in index.headers():
        last = header.next_entry - 2  # a writer may have added more by now; `header` has the end of the last
        try:
            if file.lies_outside(low, high):
                continue
            here, keys, places, diffs = file.between(last + 1, low, high)
        except FileNotFoundError:  # another process's retention took it
            continue
        if not len(here):
            continue
        there.append(_fingerprints(keys, places))
        # In an intact index the entries are in the order of `wanted`, so nothing has to be searched.
        met = slice(matched, matched + len(places))
        if np.array_equal(physical[met], places):
            known, times = np.ones(len(places), np.bool_), stamps[met]
            matched += len(places)
        else:
            at = np.searchsorted(physical, places)
            known, times = physical[at] == places, stamps[at]
        seconds = (
            np.maximum(times - header.begin_timestamp_ms, 0) // 1000 if header.begin_timestamp_ms > 0 else times * 0
        )
        wrong = known & (np.minimum(seconds, 0x7FFF_FFFF) != diffs)
        wrong &= here != 0  # RocketMQ counts the first entry from the end of the file before (format#index-put)
        if wrong.any():
            tally.wrong_times[file.name] = int(np.count_nonzero(wrong))
        begins, ends = known & (here == 0), known & (here == last)
        if (times[begins] != header.begin_timestamp_ms).any() or (times[ends] != header.end_timestamp_ms).any():
            tally.wrong_ends.add(file.name)
    found = np.concatenate(there)
    if np.array_equal(found, asked):
        return tally
    tally.missing = len(asked)
    if len(found):
        found.sort()
        at = np.searchsorted(found, asked)
        at[at == len(found)] = 0
        tally.missing = int(np.count_nonzero(found[at] != asked))
    return tally
