"""Record batch: messages of one queue whose records lie in one segment, in queue order, as arrays.

A read finds batches, and its caller gets views of them. All their records have been checked. For few messages a read
keeps no arrays, only a `UnitBatch` that their views share.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from mqstore.layout.consumequeue import UNIT, UNIT_BYTES
from mqstore.layout.record import BODY_AT_V4, BORN_HOST_V6, COMPRESSED, STORE_HOST_V6
from mqstore.layout.scan import Headers, gather
from mqstore.log.tip import QueueRef

__all__ = ["SMALL_BATCH", "RecordBatch", "UnitBatch"]

_Int64s = npt.NDArray[np.int64]
_NOT_PLAIN = COMPRESSED | BORN_HOST_V6 | STORE_HOST_V6
SMALL_BATCH = 16
"""For up to this many units, one struct at a time is no slower than arrays."""


@dataclass(slots=True)
class RecordBatch:
    """Messages of one queue in one segment.
    `starts` and `sizes` are those of the records in `buffer`, `tags_codes` and `slots` those of their units."""

    queue: QueueRef
    buffer: mmap.mmap | bytes
    starts: _Int64s
    sizes: _Int64s
    tags_codes: _Int64s
    slots: _Int64s
    known_headers: Headers | None
    """Headers of these records, if the check has gathered them already."""
    known_ends: _Int64s | None = None
    """`body_ends`, if the check has found them already."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def headers(self) -> Headers:
        if self.known_headers is None:
            self.known_headers = gather(self.buffer, self.starts)
        return self.known_headers

    def only(self, chosen: npt.NDArray[np.bool_]) -> RecordBatch:
        """Return the messages that a mask chooses."""
        starts, sizes, codes, slots = (each[chosen] for each in (self.starts, self.sizes, self.tags_codes, self.slots))
        return RecordBatch(self.queue, self.buffer, starts, sizes, codes, slots, None)

    def tags_code(self, slot: int) -> int:
        """Return the tags code of the unit in `slot`."""
        return int(self.tags_codes[np.searchsorted(self.slots, slot)])

    @property
    def plain(self) -> npt.NDArray[np.bool_]:
        """Mask of the bodies that need only a slice: stored as sent, behind two IPv4 hosts."""
        plain: npt.NDArray[np.bool_]
        plain = self.known_ends >= 0 if self.known_ends is not None else (self.headers.sys_flag & _NOT_PLAIN) == 0
        return plain

    @property
    def plain_sizes(self) -> _Int64s:
        """Sizes in bytes of the plain bodies. Those of other bodies have no meaning."""
        if self.known_ends is not None:
            return self.known_ends - self.starts - BODY_AT_V4
        return self.headers.plain_body_size.astype(np.int64)

    def body_ends(self) -> Iterable[int]:
        """Return the end of each record's body, or -1 if it is compressed or has a host that is not IPv4.
        The ends are computed for all at once, unless there are few."""
        if self.known_ends is not None:
            known: list[int] = self.known_ends.tolist()
            return known
        if len(self.starts) <= SMALL_BATCH:
            return repeat(-1)
        plain = self.plain
        ends = self.starts + self.plain_sizes + BODY_AT_V4
        values: list[int] = (ends if plain.all() else np.where(plain, ends, -1)).tolist()
        return values


class UnitBatch:
    """Messages of one queue in one segment, without arrays: enough to make `Message`s of."""

    __slots__ = ("_first", "_units", "buffer", "queue")

    def __init__(self, queue: QueueRef, buffer: mmap.mmap | bytes, units: bytes, first: int) -> None:
        """`units` are those of the slots from `first` on, of these messages and maybe of others."""
        self.queue = queue
        self.buffer = buffer
        self._units = units
        self._first = first

    def tags_code(self, slot: int) -> int:
        code: int = UNIT.unpack_from(self._units, (slot - self._first) * UNIT_BYTES)[2]
        return code
