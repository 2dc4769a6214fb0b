"""Check that the records of units verify and belong to them (format#readers, format#verifies).

units of one segment -> its mapping -> compiled check, or numpy, or one by one -> which of them are good
"""

from __future__ import annotations

import mmap
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mqstore.files.segment import Segment
from mqstore.layout.dispatch import is_listed
from mqstore.layout.record import (
    BODY_LENGTH_BYTES,
    MAGIC_AT,
    MAGIC_V1,
    MIN_RECORD_BYTES,
    QUEUE_ID_AT,
    Checksum,
    body_length_at,
    check_record,
)
from mqstore.layout.scan import Headers, gather, topic_is, verify
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.news import News
from mqstore.log.parts import StoreParts
from mqstore.log.stretch import FEW
from mqstore.native import kernel

__all__ = ["Checked", "RecordChecker", "ordinary_bodies", "sound_records"]

_QUEUE = Struct(">iiqqi").unpack_from  # queueId, flag, queueOffset, physicalOffset, sysFlag
_I4 = Struct(">i").unpack_from


class Checked(NamedTuple):
    """Result of checking the records of some units."""

    buffer: mmap.mmap | None
    """Mapping that holds the records, or None if there is no such file."""
    good: npt.NDArray[np.bool_]
    headers: Headers | None = None
    """Header fields, if all records are good and the check has read them (see `Stretch`)."""
    body_ends: npt.NDArray[np.int64] | None = None


class RecordChecker:
    def __init__(self, parts: StoreParts, news: News, *, passes_over_bad: bool) -> None:
        """With `passes_over_bad` a record that does not verify is damage.
        A reader beside another process checks it again, since it may be just being written."""
        self.passes_over_bad = passes_over_bad
        self.kernel = kernel if parts.config.verify_reads and parts.checksum == "crc32c-record" else None
        """Compiled checks, if there are any for these records."""
        self._run = parts.log_files
        self._news = news
        self._checksum = parts.checksum
        self._verify_reads = parts.config.verify_reads

    def segment_at(self, physical: int, stop: int) -> tuple[Segment, mmap.mmap] | None:
        """Return the segment of records in [physical, stop) and its mapping, or None.
        A file may end early for a reader, as at the start of a bulk append, and the rest may have come since. So the
        segments are listed again before such a record is checked."""
        segment = self._run.find(physical)
        if segment is None or segment.start + segment.length < min(stop, segment.end):
            self._news.list_again()
            segment = self._run.find(physical)
        if segment is None:
            return None
        try:
            return segment, self._run.mapping(segment)
        except FileNotFoundError:  # another process's retention took it
            self._news.list_again()
            return None

    def check(
        self,
        queue: ConsumeQueue,
        physical: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
    ) -> Checked:
        """Check the records of units. Return their mapping, and which of them verify as what the units say."""
        stops = physical + sizes
        there = self.segment_at(int(physical[0]), int(stops.max()))
        if there is None:
            return Checked(None, np.zeros(len(physical), np.bool_))
        segment, buffer = there
        starts = physical - segment.start
        if self.kernel is not None:
            unit = queue.queue_id, queue.topic_bytes
            found = ordinary_bodies(buffer, starts, physical, sizes, slots, *unit, copied=False, checksums=True)
            if found is not None:
                return Checked(buffer, np.ones(len(starts), np.bool_), None, found[0])
        if self._verify_reads and len(starts) <= FEW:
            units = zip(*(column.tolist() for column in (starts, physical, sizes, slots)), strict=True)
            return Checked(buffer, np.array([self._is_sound(queue, buffer, *unit) for unit in units], np.bool_))
        checksum = self._checksum if self._verify_reads else None
        rows, headers = sound_records(queue, buffer, starts, physical, sizes, slots, checksum)
        good = np.zeros(len(starts), np.bool_)
        good[rows] = True
        return Checked(buffer, good, headers if good.all() else None)

    def _is_sound(
        self, queue: ConsumeQueue, buffer: mmap.mmap, start: int, physical: int, size: int, slot: int
    ) -> bool:
        """Return what `sound_records` does for one record, without the fixed cost of arrays."""
        check = check_record(buffer, start, len(buffer), physical, self._checksum)
        if check.status != "ok" or check.size != size:
            return False
        queue_id, _, queue_offset, _, sys_flag = _QUEUE(buffer, start + QUEUE_ID_AT)
        if queue_id == queue.queue_id and queue_offset == slot:
            at = start + body_length_at(sys_flag)
            at += BODY_LENGTH_BYTES + _I4(buffer, at)[0]
            topic = queue.topic_bytes
            length = len(topic).to_bytes(1 if _I4(buffer, start + MAGIC_AT)[0] == MAGIC_V1 else 2, "big")
            if buffer[at : at + len(length) + len(topic)] == length + topic:
                return True
        return is_listed(buffer, start, queue.topic, queue.queue_id, slot)


def ordinary_bodies(
    buf: mmap.mmap | bytes,
    starts: npt.NDArray[np.int64],
    physical: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    queue_id: int,
    topic: bytes,
    *,
    copied: bool,
    checksums: bool,
    headers: bool = False,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8] | None, Headers | None] | None:
    """Check the records at `starts`, to which units of a queue lead, by one compiled pass.

    Returns None if they are not all sound and ordinary, or without compiled parts. Then Python has to check them.

    Otherwise returns a tuple. Its first item is the end of each body in `buf`, or -1 for a body that is compressed or
    has a host that is not IPv4. With `copied` the second is all bodies together, unless there is a -1. With `headers`
    the third is the headers, which is cheaper than gathering them again. Without `checksums`, those over whole records
    are not compared (format#verifies).
    """
    if kernel is None:
        return None
    view = memoryview(buf)
    fine, ends = np.empty(len(starts), np.bool_), np.empty(len(starts), np.int64)
    # The sizes may be anything. Those of good records add up to no more than the view, unless they overlap.
    bodies = np.empty(min(int(sizes.sum()), len(view)), np.uint8) if copied else None
    table = np.empty((6, len(starts)), np.int64) if headers else None
    length = kernel.check_units(
        *(view, starts, physical, sizes, slots, queue_id, topic, fine, ends, bodies, table, checksums)
    )
    if not fine.all():
        return None
    found = None
    if table is not None:
        found = gather(buf, starts)
        found.take_parts(table)
        if (found.physical_offset != physical).any():  # changed meanwhile, as by another process's recovery
            return None
    return ends, None if bodies is None or length < 0 else bodies[:length], found


def sound_records(
    queue: ConsumeQueue,
    buffer: mmap.mmap | bytes,
    starts: npt.NDArray[np.int64],
    physical: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    checksum: Checksum | None,
) -> tuple[npt.NDArray[np.intp], Headers]:
    """Return the indices of units whose record at `starts` verifies as theirs, and these headers.
    With `checksum` None, checksums are not compared (format#readers, format#verifies)."""
    rows = np.flatnonzero((starts + sizes <= len(buffer)) & (sizes >= MIN_RECORD_BYTES))
    headers = gather(buffer, starts[rows])
    fine = headers.ok & (headers.size == sizes[rows]) & (headers.physical_offset == physical[rows])
    if not fine.all():
        rows = rows[fine]
        headers = gather(buffer, starts[rows])
    fine = np.ones(len(rows), np.bool_) if checksum is None else verify(buffer, headers, checksum)
    own = (headers.queue_id == queue.queue_id) & (headers.queue_offset == slots[rows])
    own &= topic_is(buffer, headers, queue.topic_bytes)
    for i in np.flatnonzero(fine & ~own).tolist():
        fine[i] = is_listed(buffer, int(starts[rows[i]]), queue.topic, queue.queue_id, int(slots[rows[i]]))
    if not fine.all():
        rows = rows[fine]
        headers = gather(buffer, starts[rows])
    return rows, headers
