"""Counts for plots: bytes of the log by cell and state, and delayed messages by due time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy.typing as npt

from mqstore import arrays as np
from mqstore.broker.names import SCHEDULE_TOPIC
from mqstore.log.reading.reader import StoreReader

_CELLS: Final = 10_000
"""Limit of cells. A damaged store may name offsets up to 2^63."""
_INTERVALS: Final = 500
_UNITS: Final = 1 << 16
"""Number of units read at once."""


class LogMap:
    """Bytes of records in each cell of the log, which begins at `start` and ends at `end`."""

    KINDS: Final = ("consumed", "live", "system")

    def __init__(self, start: int, end: int, cell_bytes: int) -> None:
        self.start, self.end = start, end
        self.cell_bytes = max(1, cell_bytes, -(-(end - start) // _CELLS))
        shape = len(self.KINDS), -(-(end - start) // self.cell_bytes) + 1
        self._bytes = np.zeros(shape, np.int64)
        self._whole = np.zeros(shape, np.int64)
        """Changes, from each cell to the next, of the number of records that fill the cell."""

    def add(self, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], consumed: int | None) -> None:
        """Add records. The first `consumed` of them are consumed, the others live. None: of a system topic."""
        parts = [(2, slice(None))] if consumed is None else [(0, slice(consumed)), (1, slice(consumed, None))]
        for kind, part in parts:
            size, at = sizes[part].astype(np.int64), offsets[part].astype(np.int64)
            inside = (size > 0) & (at >= self.start) & (at <= self.end - size)
            low = at[inside] - self.start
            high = low + size[inside]
            first, last = low // self.cell_bytes, (high - 1) // self.cell_bytes
            several = last > first
            np.add.at(self._bytes[kind], first, np.minimum(high, (first + 1) * self.cell_bytes) - low)
            np.add.at(self._bytes[kind], last[several], (high - last * self.cell_bytes)[several])
            np.add.at(self._whole[kind], first[several] + 1, 1)
            np.add.at(self._whole[kind], last[several], -1)

    def as_dict(self) -> dict[str, Any]:
        """Return the `map` of `disk_usage`."""
        cells = (self._bytes + self._whole.cumsum(axis=1) * self.cell_bytes)[:, :-1]
        rows = dict(zip(self.KINDS, cells.tolist(), strict=True))
        return {"start": self.start, "cell_bytes": self.cell_bytes, **rows}


def due_counts(
    store: StoreReader, levels: Iterable[tuple[int, int, int, int | None]], timer: Iterable[npt.ArrayLike]
) -> dict[str, Any]:
    """Return the number of delayed messages by due time, the `due` of `inspect_broker`.

    `levels` are (queue id, offset, end, due time of the first message in ms), `timer` has due times (ms). A message of
    the timer that is due in more than two days counts at the time at which it is moved on.
    """
    times = [np.asarray(each, np.int64) for each in timer]
    for queue_id, offset, end, known in levels:
        while offset < end and len(units := store.units(SCHEDULE_TOPIC, queue_id, offset, min(_UNITS, end - offset))):
            offset += len(units)
            codes = units["tags_code"].astype(np.int64)
            times.append(np.where(codes > 0, codes, known or 0))  # RocketMQ may store an address here
    due = np.concatenate(times) if times else np.empty(0, np.int64)
    seconds = 1 + (int(due.max()) - int(due.min())) // (_INTERVALS * 1000) if len(due) else 1
    starts, counts = np.unique(due // (seconds * 1000), return_counts=True)
    rows = zip((starts * seconds * 1000).tolist(), counts.tolist(), strict=True)
    return {"interval_ms": seconds * 1000, "counts": [[*row] for row in rows]}
