"""Checks that the records of units verify and belong to these units (format#readers, format#verifies).

units of one segment, and its mapping -> compiled check, or numpy -> flags of the good ones
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

from mqstore import arrays as np
from mqstore.layout.arrays.dispatch import is_listed
from mqstore.layout.arrays.scan import Headers, topic_is, verify
from mqstore.layout.record import MIN_RECORD_BYTES, Checksum
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.native import kernel


class Checked(NamedTuple):
    """Result of checking the records of some units."""

    good: np.NDArray[np.bool_]
    headers: Headers | None = None
    """Header fields, if all records are good and the check has read them."""
    body_ends: np.NDArray[np.int64] | None = None
    """End of each body in the buffer, or -1 for a body that is compressed or has a host that is not IPv4.
    Only the compiled check computes them."""
    bodies: np.NDArray[np.uint8] | None = None
    """All bodies, concatenated, if requested and if no end is -1."""


class Units(NamedTuple):
    """Units of a queue and the starts of their records in a buffer, one array each."""

    starts: np.NDArray[np.int64]
    physical: np.NDArray[np.int64]
    sizes: np.NDArray[np.int64]
    slots: np.NDArray[np.int64]


def check_units(
    queue: ConsumeQueue,
    buffer: mmap.mmap | bytes,
    units: Units,
    checksum: Checksum | None,
    *,
    copied: bool = False,
    headers: bool = False,
) -> Checked:
    """Check which records verify and match the units of `queue` (format#readers, format#verifies).

    One compiled pass checks records if all are sound and ordinary. It keeps bodies (`copied`) and `headers` if
    requested. All others are checked by arrays. With `checksum` None, checksums of whole records are not compared.
    """
    if checksum in (None, "crc32c-record"):
        found = _ordinary(queue, buffer, units, copied=copied, headers=headers, checksums=checksum is not None)
        if found is not None:
            return found
    chosen, known = _sound(queue, buffer, units, checksum)
    good = np.zeros(len(units.starts), np.bool_)
    good[chosen] = True
    return Checked(good, known if good.all() else None)


def _ordinary(
    queue: ConsumeQueue,
    buffer: mmap.mmap | bytes,
    units: Units,
    *,
    copied: bool,
    headers: bool,
    checksums: bool,
) -> Checked | None:
    """Check records by one compiled pass. Return None without compiled parts, or unless all are sound and ordinary.
    Headers of the same pass are cheaper than gathering them again."""
    if kernel is None:
        return None
    starts, physical, sizes, _ = units
    view = memoryview(buffer)
    good, ends = np.empty(len(starts), np.bool_), np.empty(len(starts), np.int64)
    # The sizes may be damaged. Sizes of good records add up to no more than the view, unless records overlap.
    bodies = np.empty(min(int(sizes.sum()), len(view)), np.uint8) if copied else None
    table = np.empty((6, len(starts)), np.int64) if headers else None
    length = kernel.check_units(view, *units, queue.queue_id, queue.topic_bytes, good, ends, bodies, table, checksums)
    if not good.all():
        return None
    found = None
    if table is not None:
        found = Headers(buffer, starts)
        found.parts = good, *table
        if (found.physical_offset != physical).any():  # changed meanwhile, as by another process's recovery
            return None
    return Checked(good, found, ends, None if bodies is None or length < 0 else bodies[:length])


def _sound(
    queue: ConsumeQueue, buffer: mmap.mmap | bytes, units: Units, checksum: Checksum | None
) -> tuple[np.NDArray[np.intp], Headers]:
    """Check records by arrays. Return the indices of the good ones, and their headers."""
    starts, physical, sizes, slots = units
    rows = np.flatnonzero((starts + sizes <= len(buffer)) & (sizes >= MIN_RECORD_BYTES))
    headers = Headers(buffer, starts[rows])
    fine = headers.ok & (headers.size == sizes[rows]) & (headers.physical_offset == physical[rows])
    if not fine.all():
        rows = rows[fine]
        headers = Headers(buffer, starts[rows])
    fine = np.ones(len(rows), np.bool_) if checksum is None else verify(buffer, headers, checksum)
    own = (headers.queue_id == queue.queue_id) & (headers.queue_offset == slots[rows])
    own &= topic_is(buffer, headers, queue.topic_bytes)
    for i in np.flatnonzero(fine & ~own).tolist():
        fine[i] = is_listed(buffer, int(starts[rows[i]]), queue.topic, queue.queue_id, int(slots[rows[i]]))
    if not fine.all():
        rows = rows[fine]
        headers = Headers(buffer, starts[rows])
    return rows, headers
