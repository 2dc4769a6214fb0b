"""Reading of the records that units of a queue point to (format#readers, format#reads).

    unit of the queue -> record in a mapped segment -> checks -> Message, a view of the mapping

For the writer a record that does not verify is damage, which is skipped and counted. For another process it may be a
half-written record, so reading stops before it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from itertools import pairwise, repeat
from typing import Any, NamedTuple

from mqstore import arrays as np
from mqstore.errors import FormatError
from mqstore.files.lock import writer_alive
from mqstore.files.segment import Segment, place_in_file
from mqstore.layout.arrays.dispatch import SCHEDULE_TOPIC, tags_code_at
from mqstore.layout.bodyref import place_of
from mqstore.layout.consumequeue import UNIT, UNIT_BYTES, VOID_SIZE, is_message
from mqstore.layout.record import MIN_RECORD_BYTES, check_record, decode_record
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.names import TIMER_TOPIC
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.message import Find, Message, UnitBatch
from mqstore.log.reading.change_feed import ChangeFeed
from mqstore.log.reading.checking import Checked, Units, check_units
from mqstore.log.reading.tagfilter import UnitFilter
from mqstore.log.recovery.offset_assigner import LOST_SEGMENTS
from mqstore.log.recovery.report import Finding
from mqstore.log.writing.log_tail import QueueRef
from mqstore.logger import log as _log
from mqstore.native import kernel

_COMPILED_UNITS = 4096
"""Maximum number of units read at once. Their messages keep all of them in memory."""
_AHEAD_UNITS = 1024
"""Number of units read by a read that continues the last one. Units that the writer has published do not change."""
_LOOK_AHEAD_UNITS = 256
_WAITING_TOPICS = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})
"""Topics whose records may refer to the body of an earlier record."""


class RemovedBodyError(FormatError):
    """Retention has removed the record that had the body. Nothing needs the body any more."""


class Request(NamedTuple):
    """Read of the units [offset, offset + units) of a queue."""

    queue: ConsumeQueue
    offset: int
    units: int
    unit_filter: UnitFilter | None
    max_messages: int
    max_bytes: int | None
    is_first: bool
    """True if nothing was found before. Then the first message is returned, whatever its size."""
    tell: bool
    """True if skipped messages are logged."""


class Ahead:
    """Units of a queue, from offset `first` on, that were read before their messages are asked for."""

    __slots__ = ("batch", "buffer", "first", "next_offset", "queue", "segment", "start", "stop", "units")

    def __init__(
        self, queue: ConsumeQueue, segment: Segment, batch: UnitBatch, units: bytes, first: int, next_offset: int
    ) -> None:
        self.queue = queue
        self.segment = segment
        self.start = segment.start
        self.batch = batch
        self.buffer = batch.buffer
        self.units = units
        self.first = first
        self.stop = first + len(units) // UNIT_BYTES
        self.next_offset = next_offset
        """End of the last read: a read from this offset on continues it."""


class RecordReader:
    def __init__(
        self, parts: StoreParts, news: ChangeFeed, check_open: Callable[[], None], *, passes_over_bad: bool
    ) -> None:
        """With `passes_over_bad` a record that does not verify is damage.
        A reader of another process's store checks it again, since it may be half-written."""
        self.passes_over_bad = passes_over_bad
        self._verify_reads = parts.config.verify_reads
        whole = self._verify_reads and parts.checksum == "crc32c-record"
        self._read_units: Any = kernel.read_units if kernel is not None and whole else None
        """Compiled read of plain records, if there is one."""
        self.bytes_read = 0
        """Bytes of the returned records."""
        self.bad: set[int] = set()
        """Physical offsets of records that did not verify."""
        self._root, self._run, self._checksum = parts.root, parts.log_files, parts.checksum
        self._parts = parts
        self._news = news
        self._check_open = check_open
        self.ahead: Ahead | None = None
        """Units of the last read, for a read that continues it."""
        self._told: set[str] = set()
        """Files whose loss or damage was logged."""

    def segment_at(self, physical: int, stop: int) -> tuple[Segment, mmap.mmap] | None:
        """Return the segment of records in [physical, stop) and its mapping, or None.
        A file may end early for a reader, as at the start of a bulk append, and may have grown since. So the segments
        are listed again before such a record is checked."""
        segment = self._run.find(physical)
        if segment is None or segment.start + segment.length < min(stop, segment.end):
            self._news.list_again()
            segment = self._run.find(physical)
        if segment is None:
            return None
        try:
            return segment, self._run.mapping(segment)
        except FileNotFoundError:  # another process's retention removed it
            self._news.list_again()
            return None

    def check(
        self,
        queue: ConsumeQueue,
        physical: np.NDArray[np.int64],
        sizes: np.NDArray[np.int64],
        slots: np.NDArray[np.int64],
    ) -> tuple[mmap.mmap | None, Checked]:
        """Check the records of units of one segment. Return its mapping (None if the file is gone) and the result."""
        there = self.segment_at(int(physical[0]), int((physical + sizes).max()))
        if there is None:
            return None, Checked(np.zeros(len(physical), np.bool_))
        segment, buffer = there
        units = Units(physical - segment.start, physical, sizes, slots)
        return buffer, check_units(queue, buffer, units, self._checksum if self._verify_reads else None)

    def views(self, asked: Request) -> tuple[list[Message], int, bool]:
        """Return the messages, the offset after the last unit consumed, and whether `max_bytes` ended the read."""
        found = None if self._read_units is None else self._compiled(asked)
        messages, after, stop = self._locate(asked) if found is None else found
        if (unit_filter := asked.unit_filter) is not None:
            messages = unit_filter.apply(messages)
        return messages, after, stop

    def _compiled(self, asked: Request) -> tuple[list[Message], int, bool] | None:
        """Read as `_locate` does, up to the first unit that is not an ordinary message of the same segment.
        Returns None if that is the first unit. Then nothing has changed, and `_locate` handles it."""
        queue, offset, count, unit_filter, max_messages, max_bytes, is_first, _ = asked
        ahead = self.ahead
        if unit_filter is None and ahead is not None and ahead.queue is queue and ahead.next_offset == offset:
            count = max(count, min(_AHEAD_UNITS, queue.max_offset - offset))
        units = queue.read(offset, min(count, _COMPILED_UNITS))
        physical, size, _ = UNIT.unpack_from(units)
        if not 0 < size < VOID_SIZE or physical < 0:
            return None
        there = self.segment_at(physical, physical + size)
        if there is None:
            return None
        segment, buffer = there
        budget = -1 if max_bytes is None else min(max(max_bytes, 0), 1 << 62)
        messages: list[Message]
        batch = UnitBatch(queue.ref, buffer, units, offset, self.finder(queue.topic))
        messages, looked, total, stop = self._read_units(
            Message,
            batch,
            buffer,
            segment.start,
            units,
            offset,
            0,
            None if unit_filter is None else unit_filter.hashes,
            max_messages,
            queue.queue_id,
            queue.topic_bytes,
            -budget - 2 if is_first and budget >= 0 else budget,
        )
        if not looked and not stop:
            return None
        if unit_filter is None and self.passes_over_bad:
            self.ahead = Ahead(queue, segment, batch, units, offset, offset + looked)
        self.bytes_read += total
        return messages, offset + looked, stop

    def continued(self, ahead: Ahead, topic: str, queue_id: int, offset: int, count: int) -> list[Message]:
        """Return `count` messages, or [] if that takes more than the units read ahead."""
        queue = ahead.queue
        if (
            topic != queue.topic
            or queue_id != queue.queue_id
            or not 0 < count <= ahead.stop - offset
            or offset < queue.min_offset
            or ahead.segment.mapping is not ahead.buffer  # retention deleted it, or the store was closed
        ):
            return []
        found: list[Message]
        found, _, total, _ = self._read_units(
            Message,
            ahead.batch,
            ahead.buffer,
            ahead.start,
            ahead.units,
            ahead.first,
            offset - ahead.first,
            None,
            count,
            queue_id,
            queue.topic_bytes,
            -1,
        )
        if len(found) < count:
            return []
        ahead.next_offset = offset + count
        self.bytes_read += total
        return found

    def drop_ahead(self) -> None:
        """Drop the mapping of a deleted segment, which would keep its disk space."""
        ahead = self.ahead
        if ahead is not None and ahead.segment.mapping is not ahead.buffer:
            self.ahead = None

    def _locate(self, asked: Request) -> tuple[list[Message], int, bool]:
        """Return the messages of the units whose records are good. The other results are those of `views`."""
        queue, size = asked.queue, self._run.segment_bytes
        units, chosen, after, stop = self._choose(asked)
        slots = chosen + asked.offset
        physical, sizes = (units[name][chosen].astype(np.int64) for name in ("physical_offset", "size"))
        encoded = units.tobytes()
        messages: list[Message] = []
        bounds = (np.flatnonzero(np.diff(physical // size)) + 1).tolist()
        for low, high in pairwise([0, *bounds, len(chosen)] if len(chosen) else []):
            here = slice(low, high)
            buffer, checked = self.check(queue, physical[here], sizes[here], slots[here])
            good = checked.good
            if buffer is None and physical[low] < self._run.min_offset:
                queue.correct_min(self._run.min_offset)  # retention deleted it meanwhile
                if messages:  # the next read reports it
                    after, stop = int(slots[low]), True
                    break
                continue
            if not good.all():
                self._check_open()  # closing the store meanwhile unmaps the segments, which is not damage
                bad = ~good
                if not self.passes_over_bad and high == len(physical) and bad[-1]:
                    # Another process may be writing this record, so it ends the read. If a later record verifies, it is
                    # damage instead.
                    whole = int(np.flatnonzero(good)[-1]) + 1 if good.any() else 0
                    if not self._verifies_behind(queue, int(slots[-1]) + 1):
                        after, stop = int(slots[low + whole]), True
                        bad[whole:] = False
                        if asked.tell and not writer_alive(self._root, self._parts.fs):
                            loss = self.loss_at(int(physical[low + whole]), 0, queue.ref, after)
                            self.log_lost(loss, "Reading the queue ends there")
                for slot, position in zip(slots[here][bad].tolist(), physical[here][bad].tolist(), strict=True):
                    if len(self.bad) < 100_000:
                        self.bad.add(position)
                    if asked.tell:
                        self.log_lost(self.loss_at(position, 0, queue.ref, slot))
            if buffer is None:
                continue
            batch = UnitBatch(queue.ref, buffer, encoded, asked.offset, self.finder(queue.topic))
            starts = physical[here][good] - physical[low] // size * size
            messages += map(Message, repeat(batch), starts.tolist(), slots[here][good].tolist())
            self.bytes_read += int(sizes[here][good].sum())
        return messages, after, stop

    def _choose(self, asked: Request) -> tuple[np.NDArray[np.void], np.NDArray[np.intp], int, bool]:
        """Return the units, indices of those that the read asks for, the offset after the last one, and a flag.
        The flag is True if `max_bytes` ended the read. A hole is logged as lost."""
        queue, offset, count, unit_filter, max_messages, max_bytes, is_first, tell = asked
        units = queue.units(offset, count)
        live = is_message(units)
        if unit_filter is not None:
            live &= unit_filter.prefilter(units["tags_code"].astype(np.int64))
        chosen = np.flatnonzero(live)
        after, stop = offset + count, False
        if len(chosen) >= max_messages:
            chosen = chosen[:max_messages]
            after = offset + int(chosen[-1]) + 1
        if max_bytes is not None:
            taken = np.cumsum(units["size"][chosen], dtype=np.int64)
            fits = max(int(np.searchsorted(taken, max_bytes, side="right")), int(is_first))
            if fits < len(chosen):
                after, stop = offset + int(chosen[fits]), True
                chosen = chosen[:fits]
        holes = offset + np.flatnonzero(units["size"][: after - offset] <= 0)
        if len(holes):  # retention may have removed their file
            front = self.find_front(queue)
            for slot in holes[holes >= front].tolist() if tell else ():
                self.log_lost(queue.missing_units(slot, slot))
        return units, chosen, after, stop

    def find_front(self, queue: ConsumeQueue) -> int:
        """Return the first offset of `queue` that retention has kept. Lists the log again."""
        self._news.list_again()
        queue.correct_min(self._run.min_offset)
        return queue.min_offset

    def _verifies_behind(self, queue: ConsumeQueue, slot: int) -> bool:
        """Return True if any unit at or after `slot` points to a record that verifies."""
        while slot < queue.max_offset:
            count = min(queue.max_offset - slot, _LOOK_AHEAD_UNITS)
            units = queue.units(slot, count)
            live = np.flatnonzero(is_message(units))
            physical = units["physical_offset"][live].astype(np.int64)
            sizes = units["size"][live].astype(np.int64)
            segments = physical // self._run.segment_bytes
            for segment in np.unique(segments):
                here = segments == segment
                _, checked = self.check(queue, physical[here], sizes[here], live[here] + slot)
                if checked.good.any():
                    return True
            slot += count
        return False

    def loss_at(self, physical: int, length: int, ref: QueueRef, slot: int) -> Finding:
        """Return the finding for a unit whose record cannot be read: `missing_segment` or `bad_record`."""
        message = f"{ref.topic}, queue {ref.queue_id}, offset {slot}"
        missing = self.missing_segment(physical)
        if missing is not None:
            detail = f"{message}: its file is missing"
            return Finding("missing_segment", missing, 0, self._run.segment_bytes, detail)
        place = place_in_file(max(physical, 0), self._run.segment_bytes)
        return Finding("bad_record", *place, length, f"{message}: the record does not verify")

    def missing_segment(self, physical: int) -> str | None:
        """Return the missing commitlog file of the offset, as a path below the store, or None.

        Also returns None for an offset that retention has removed, or that is far beyond the end of the log.
        """
        size, run = self._run.segment_bytes, self._run
        if run.find(physical) is not None or not self._run.min_offset <= physical < run.end + LOST_SEGMENTS * size:
            return None
        return place_in_file(physical, size)[0]

    def log_lost(self, finding: Finding, then: str = "Unreadable messages there are skipped") -> None:
        """Log a loss found by a read, once for each file. `then` is its consequence."""
        if finding.file not in self._told:
            self._told.add(finding.file)
            _log.error(
                "%s: %s: %s: %s. %s. Run `mqstore verify` to see all damage",
                *(self._root, finding.kind, finding.place, finding.detail, then),
            )

    def at(self, physical_offset: int) -> Message:
        """Return the message whose record starts at `physical_offset`. Raises LookupError without a valid one."""
        self._check_open()
        stop = physical_offset + MIN_RECORD_BYTES
        there = self.segment_at(physical_offset, stop) if physical_offset >= 0 else None
        if there is None:
            self._check_open()  # closing the store meanwhile unmaps the segments
            missing = self.missing_segment(physical_offset)
            why = "" if missing is None else f": missing_segment: {missing}"
            raise LookupError(f"{self._root} has nothing at physical offset {physical_offset}{why}")
        segment, buffer = there
        at = physical_offset - segment.start
        check = check_record(buffer, at, len(buffer), physical_offset, self._checksum)
        if check.status != "ok":
            raise LookupError(f"{self._root} has no message at physical offset {physical_offset}: {check.detail}")
        return self.decoded(buffer, segment.start, at)

    def decoded(self, buffer: mmap.mmap | bytes, base: int, at: int) -> Message:
        """Return the message of the record at byte `at` of a segment that starts at `base`. The record is verified."""
        record = decode_record(buffer, at)
        code = tags_code_at(buffer, at, self._parts.delay_table_ms)
        unit = UNIT.pack(base + at, record.total_size, code)
        ref = QueueRef(record.topic, record.queue_id)
        batch = UnitBatch(ref, buffer, unit, record.queue_offset, self.finder(record.topic))
        return Message(batch, at, record.queue_offset)

    def finder(self, topic: str) -> Find | None:
        """Return a function that finds bodies which records of `topic` refer to, or None if all have their own."""
        return self.origin if topic in _WAITING_TOPICS and self._checksum == "crc32c-record" else None

    def origin(self, reference: bytes) -> Message:
        """Return the message whose body `reference` names.
        Raises RemovedBodyError if retention has removed its record, and FormatError if it cannot be read."""
        place = place_of(reference)
        try:
            message = self.at(place)
            why = "another record is there"
        except LookupError as error:
            if place < self._run.min_offset:
                raise RemovedBodyError(f"its body was in the deleted record at {place}", "body", 0) from None
            message, why = None, str(error)
        if message is None or message._reference() != reference:
            raise FormatError(f"its body is in the record at {place}, which cannot be read: {why}", "body", 0)
        return message
