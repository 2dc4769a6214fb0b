"""Counts of messages inside a task, so that its result is small.

    Bins    histogram of values: 16 steps to each doubling, so a percentile is off by 3 % at most
    Tally   of one queue: messages and bytes by interval, sizes, delays, retries, from the headers of records

They can be merged: parts of a queue, queues of a topic, tasks of a job. Counts, sums, minima and maxima are exact,
percentiles are exact to a bin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from mqstore.columnar.rows import Piece
from mqstore.errors import ConfigError

_Int64s = npt.NDArray[np.int64]

MAX_INTERVALS: Final = 200_000
"""Limit for a queue: a year of three minutes, two days of seconds."""
_STEP_BITS: Final = 4
_STEPS: Final = 1 << _STEP_BITS
_LARGEST: Final = 1 << 52
"""Up to this value a float represents each whole number."""
_YEAR_1_MS, _YEAR_9999_MS = -62_135_596_800_000, 253_402_300_799_999


def _bins_of(values: _Int64s) -> _Int64s:
    """Return the bin of each value: itself below 32, then 16 to a doubling. Negative values count as 0."""
    values = np.clip(values, 0, _LARGEST)
    doublings = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1
    shift = np.maximum(doublings - _STEP_BITS, 0)
    found: _Int64s = np.where(values < _STEPS, values, (shift << _STEP_BITS) + (values >> shift))
    return found


def _middle_of(bin_: int) -> int:
    if bin_ < 2 * _STEPS:
        return bin_
    shift = (bin_ >> _STEP_BITS) - 1
    return ((_STEPS | (bin_ & (_STEPS - 1))) << shift) + ((1 << shift) >> 1)


@dataclass(slots=True)
class Bins:
    """Histogram of values from 0 up."""

    counts: Counter[int] = field(default_factory=Counter)
    """Number of values in each bin."""
    largest: int = 0

    def add(self, values: _Int64s) -> None:
        """Count these values. Negative values count as 0."""
        if len(values):
            bins, counts = np.unique(_bins_of(values), return_counts=True)
            self.counts.update(dict(zip(bins.tolist(), counts.tolist(), strict=True)))
            self.largest = max(self.largest, int(values.max()))

    def merge(self, other: Bins) -> None:
        self.counts.update(other.counts)
        self.largest = max(self.largest, other.largest)

    def percentile(self, percent: float) -> int | None:
        """Return the value that `percent` percent of the values do not exceed, or None without values."""
        rank = max(1, -(-self.counts.total() * percent // 100))
        seen = 0
        for bin_, count in sorted(self.counts.items()):
            seen += count
            if seen >= rank:
                return min(_middle_of(bin_), self.largest)
        return None


class Tally:
    """Sums over the messages of a queue, or of several. It is sent from a task to the driver, and is small."""

    def __init__(self, interval_ms: int, *, by_interval: bool = False) -> None:
        """`by_interval`: also count the sizes of each interval separately, for `rows`."""
        self.interval_ms = interval_ms
        self.sizes = Bins()
        """Sizes of bodies, as they are stored (bytes)."""
        self.delays = Bins()
        """Time from produced to stored (ms), 0 where clocks disagree."""
        self.retries = 0
        """Number of messages that were delivered before."""
        self._messages: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()
        self._sizes_of: dict[int, Bins] | None = {} if by_interval else None

    def add(self, piece: Piece) -> None:
        """Count the records of a piece, which must be complete."""
        headers = piece.headers
        sizes = headers.body_size.astype(np.int64)
        stored = np.clip(headers.store_timestamp_ms, _YEAR_1_MS, _YEAR_9999_MS)
        born = np.clip(headers.born_timestamp_ms, _YEAR_1_MS, _YEAR_9999_MS)
        self.sizes.add(sizes)
        self.delays.add(np.maximum(stored - born, 0))
        self.retries += int(np.count_nonzero(headers.reconsume_times > 0))
        found, which, counts = np.unique(stored // self.interval_ms, return_inverse=True, return_counts=True)
        numbers = found.tolist()
        totals = np.bincount(which, weights=sizes, minlength=len(numbers)).astype(np.int64)
        self._messages.update(dict(zip(numbers, counts.tolist(), strict=True)))
        self._bytes.update(dict(zip(numbers, totals.tolist(), strict=True)))
        if self._sizes_of is not None:
            parts = np.split(sizes[np.argsort(which)], np.cumsum(counts)[:-1])
            for number, part in zip(numbers, parts, strict=False):
                self._sizes_of.setdefault(number, Bins()).add(part)

    def by_interval(self) -> list[tuple[int, int, int]]:
        """Return (number, messages, bytes) of each interval that has messages, in order of time.
        Raises ConfigError for more than `MAX_INTERVALS`."""
        if len(self._messages) > MAX_INTERVALS:
            raise ConfigError(
                f"interval={self.interval_ms} ms cuts a queue into {len(self._messages)} intervals, which is more than "
                f"{MAX_INTERVALS}; give a longer one, or less time"
            )
        return [(number, count, self._bytes[number]) for number, count in sorted(self._messages.items())]

    def rows(self) -> Iterator[tuple[int, int, int, Bins]]:
        """Yield (number, messages, bytes, sizes) of each interval that has messages, in order of time."""
        assert self._sizes_of is not None
        for number, messages, size in self.by_interval():
            yield number, messages, size, self._sizes_of[number]

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally, which has no sizes by interval."""
        assert self.interval_ms == other.interval_ms
        self.sizes.merge(other.sizes)
        self.delays.merge(other.delays)
        self.retries += other.retries
        self._messages.update(other._messages)
        self._bytes.update(other._bytes)
