"""Counting messages inside a task so that what leaves it is small, whatever it read. numpy; knows no Spark.

    Bins    how often which value: 16 steps to each doubling, so a percentile is off by 3 % at most
    Tally   of one queue: messages and bytes by interval, sizes, delays, retries

All of them can be added up: parts of a queue, queues of a topic, tasks of a job. Counts, sums, minima and maxima are
exact; percentiles are as near as a bin is narrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mqstore.errors import ConfigError

if TYPE_CHECKING:  # it would need pyarrow, which counting names does not
    from mqstore.spark.rows import Piece

__all__ = ["MAX_INTERVALS", "Bins", "Sums", "Tally"]

_Int64s = npt.NDArray[np.int64]

MAX_INTERVALS: Final = 200_000
"""Of a queue: a year of three minutes, two days of seconds."""
_STEP_BITS: Final = 4
_STEPS: Final = 1 << _STEP_BITS
_BINS: Final = 1024
_LARGEST: Final = 1 << 52
"""A float tells every whole number up to here apart."""
_YEAR_1_MS, _YEAR_9999_MS = -62_135_596_800_000, 253_402_300_799_999
_COMPACT_AT: Final = 1 << 20


# -- how often which value ---------------------------------------------------------------------------------------------


def _bins_of(values: _Int64s) -> _Int64s:
    """The bin of each value: itself below 32, then 16 to a doubling. Negative ones count as 0."""
    values = np.clip(values, 0, _LARGEST)
    doublings = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1
    shift = np.maximum(doublings - _STEP_BITS, 0)
    found: _Int64s = np.where(values < _STEPS, values, (shift << _STEP_BITS) + (values >> shift))
    return found


def _middle_of(bin_: int) -> int:
    """The middle of what falls into a bin."""
    if bin_ < 2 * _STEPS:
        return bin_
    shift = (bin_ >> _STEP_BITS) - 1
    return ((_STEPS | (bin_ & (_STEPS - 1))) << shift) + ((1 << shift) >> 1)


@dataclass(slots=True)
class Bins:
    """How often values from 0 up occurred."""

    counts: _Int64s = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    largest: int = 0

    def add(self, values: _Int64s) -> None:
        """Count these; negative ones as 0."""
        if len(values):
            self.counts += np.bincount(_bins_of(values), minlength=_BINS)
            self.largest = max(self.largest, int(values.max()))

    def merge(self, other: Bins) -> None:
        """Add what another has counted."""
        self.counts += other.counts
        self.largest = max(self.largest, other.largest)

    def percentile(self, percent: float) -> int | None:
        """The value that so many percent do not exceed; None of nothing."""
        total = int(self.counts.sum())
        if not total:
            return None
        rank = max(1, -(-total * percent // 100))
        return min(_middle_of(int(np.searchsorted(np.cumsum(self.counts), rank))), self.largest)


class Sums:
    """Sums of several values by an integer key."""

    def __init__(self, values: int) -> None:
        self._width = values
        self._parts: list[tuple[_Int64s, tuple[_Int64s, ...]]] = []
        self._added = 0
        """Rows since they were last summed up."""

    def add(self, keys: _Int64s, *values: _Int64s) -> None:
        """One row of values a key; keys may come again."""
        assert len(values) == self._width
        self._parts.append((keys, values))
        self._added += len(keys)
        if self._added > _COMPACT_AT:
            self._compact()

    def total(self) -> tuple[_Int64s, tuple[_Int64s, ...]]:
        """Keys in order, each once, and their sums."""
        self._compact()
        return self._parts[0]

    def _compact(self) -> None:
        none = np.zeros(0, np.int64)
        parts = self._parts or [(none, (none,) * self._width)]
        keys, which = np.unique(np.concatenate([keys for keys, _ in parts]), return_inverse=True)
        columns = (np.concatenate([values[i] for _, values in parts]) for i in range(self._width))
        sums = tuple(_sums(which, column, len(keys)) for column in columns)
        self._parts, self._added = [(keys, sums)], 0


def _sums(which: npt.NDArray[np.intp], values: _Int64s, count: int) -> _Int64s:
    found = np.zeros(count, np.int64)
    np.add.at(found, which, values)
    return found


# -- a queue -----------------------------------------------------------------------------------------------------------


class Tally:
    """What messages of a queue add up to."""

    def __init__(self, interval_ms: int, *, by_interval: bool = False) -> None:
        """`by_interval`: also the sizes of each interval by itself, for `rows`."""
        self.interval_ms = interval_ms
        self.sizes = Bins()
        """Of bodies, as they are stored (bytes)."""
        self.delays = Bins()
        """From produced to stored (ms); where clocks disagree, 0."""
        self.retries = 0
        """Messages that were delivered before."""
        self._by_interval = Sums(2)
        self._sizes_by_interval = Sums(1) if by_interval else None
        self._largest: dict[int, int] = {}

    def add(self, piece: Piece) -> None:
        """Count the records of a piece, all of which it must have."""
        headers = piece.headers
        assert headers is not None
        assert piece.bad is None
        sizes = headers.body_size.astype(np.int64)
        stored = np.clip(headers.store_timestamp_ms, _YEAR_1_MS, _YEAR_9999_MS)
        born = np.clip(headers.born_timestamp_ms, _YEAR_1_MS, _YEAR_9999_MS)
        self.sizes.add(sizes)
        self.delays.add(np.maximum(stored - born, 0))
        self.retries += int(np.count_nonzero(headers.reconsume_times > 0))
        numbers, which = np.unique(stored // self.interval_ms, return_inverse=True)
        count = len(numbers)
        totals = np.bincount(which, weights=sizes, minlength=count).astype(np.int64)
        self._by_interval.add(numbers, np.bincount(which, minlength=count), totals)
        if self._sizes_by_interval is not None:
            self._sizes_by_interval.add(numbers[which] * _BINS + _bins_of(sizes), np.ones(len(sizes), np.int64))
            largest = np.zeros(count, np.int64)
            np.maximum.at(largest, which, sizes)
            for number, size in zip(numbers.tolist(), largest.tolist(), strict=True):
                self._largest[number] = max(size, self._largest.get(number, 0))

    def by_interval(self) -> tuple[_Int64s, _Int64s, _Int64s]:
        """(number of the interval, messages, bytes) of each that has messages, in order of time. ConfigError for more
        intervals than anybody looks at."""
        intervals, (messages, size) = self._by_interval.total()
        if len(intervals) > MAX_INTERVALS:
            raise ConfigError(
                f"interval={self.interval_ms} ms cuts a queue into {len(intervals)} intervals, which is more than "
                f"{MAX_INTERVALS}; give a longer one, or less time"
            )
        return intervals, messages, size

    def rows(self) -> Iterator[tuple[int, int, int, Bins]]:
        """(number of the interval, messages, bytes, sizes) of each that has messages, in order of time."""
        assert self._sizes_by_interval is not None
        codes, (counts,) = self._sizes_by_interval.total()
        intervals, messages, size = self.by_interval()
        edges = np.searchsorted(codes, np.append(intervals, 1 << 52) * _BINS)
        for i, number in enumerate(intervals.tolist()):
            here = slice(int(edges[i]), int(edges[i + 1]))
            sizes = Bins(largest=self._largest[number])
            sizes.counts[codes[here] % _BINS] = counts[here]
            yield number, int(messages[i]), int(size[i]), sizes

    def merge(self, other: Tally) -> None:
        """Add what another, that has no sizes by interval, has counted."""
        assert self.interval_ms == other.interval_ms
        self.sizes.merge(other.sizes)
        self.delays.merge(other.delays)
        self.retries += other.retries
        intervals, messages, size = other.by_interval()
        self._by_interval.add(intervals, messages, size)

    def __getstate__(self) -> Mapping[str, Any]:
        self._by_interval.total()  # added up: what goes from a task is as small as it can be
        return self.__dict__
