"""Statistics of a store: counters, latencies, lags (delivery#statistics), and errors of its background tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mqstore.logger import log as _log

_BUCKETS = 40


class Histogram:
    """Durations in buckets of powers of two nanoseconds. Bucket i counts durations below 2**i ns.

    >>> histogram = Histogram()
    >>> for nanoseconds in (900, 1000, 1100, 70_000): histogram.add(nanoseconds)
    >>> histogram.buckets()
    {1024: 2, 2048: 1, 131072: 1}
    """

    __slots__ = ("_counts", "longest_ns")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.longest_ns = 0

    def add(self, nanoseconds: int) -> None:
        if nanoseconds > self.longest_ns:
            self.longest_ns = nanoseconds
        bucket = nanoseconds.bit_length()
        self._counts[bucket if bucket < _BUCKETS else _BUCKETS - 1] += 1

    def buckets(self) -> dict[int, int]:
        """Return the number of durations by upper bound in nanoseconds. The bound before is the lower one."""
        return {1 << bucket: number for bucket, number in enumerate(self._counts) if number}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Snapshot of the statistics of a store.

    Counters run from opening. Lags and sizes are as of now, in bytes. In a store opened for reading, counters of a
    writer have their defaults.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     _ = store.put_many("t", [b"a", b"b"])
    ...     stats = store.stats()
    ...     stats.puts, stats.put_bytes == stats.max_offset, stats.errors
    (2, True, {})
    """

    puts: int = 0
    """Number of appended messages that have a queue offset."""
    put_bytes: int = 0
    """Bytes appended, BLANKs included."""
    failed_puts: int = 0
    """Number of failed puts: refused, not stored, or not known to be on disk."""
    gets: int
    """Number of messages returned."""
    get_bytes: int
    """Bytes of the records of the returned messages."""
    dispatched: int = 0
    """Number of messages that got a unit."""
    put_latency_ns: dict[int, int] = field(default_factory=dict, repr=False)
    """Sampled put durations, one of 64 in each queue: upper bound in nanoseconds -> count."""
    put_longest_ns: int = 0
    """Longest sampled put duration in nanoseconds."""
    flush_latency_ns: dict[int, int] = field(default_factory=dict, repr=False)
    """Durations of commitlog syncs: upper bound in nanoseconds -> count."""
    dispatch_lag_bytes: int = 0
    """Bytes appended and not yet visible to readers."""
    flush_lag_bytes: int = 0
    """Bytes appended and not yet known to be on disk."""
    index_pending: int = 0
    """Number of index entries that wait for disk space."""
    min_offset: int
    """Physical offset of the first byte in the log."""
    max_offset: int
    """Physical offset of the next record."""
    segments: int
    commitlog_bytes: int
    """Bytes of segment files."""
    disk_ratio: float
    """Used part of the file system of the log, as `df` counts it."""
    opened_ms: int
    """Wall time at which the store was opened."""
    queues: int
    bad_records: int
    """Number of records that failed verification when they were read, and were skipped."""
    inbox_spliced: int = 0
    """Number of bundles of the inbox that were appended since opening (spark#inbox)."""
    inbox_refused: int = 0
    """Number of bundles that were moved to `inbox/refused/` since opening."""
    errors: dict[str, str] = field(default_factory=dict)
    """Last error by background task, and under "clock" a warning. Empty without errors."""


class TaskErrors:
    """Current error of each background task of the store at `path`. A new error is logged once."""

    def __init__(self, path: Path) -> None:
        self.messages: dict[str, str] = {}
        """Messages by task. A task that succeeds again is removed."""
        self._path = path

    def note(self, task: str, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        if self.messages.get(task) != text:
            _log.error("%s: %s: %s", self._path, task, text)
            self.messages[task] = text

    def warn(self, task: str, text: str) -> None:
        """Record a state that is not a failure. It is logged once, until `clear`."""
        if task not in self.messages:
            _log.warning("%s: %s: %s", self._path, task, text)
            self.messages[task] = text

    def clear(self, task: str) -> None:
        self.messages.pop(task, None)

    def attempt(self, task: str, call: Callable[[], object]) -> None:
        """Call `call`, and record its error."""
        try:
            call()
            self.clear(task)
        except Exception as error:
            self.note(task, error)
