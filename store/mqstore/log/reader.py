"""Reading a store: from (topic, queue, offset) to messages (format#readers, format#reads).

    unit of the queue -> record in a mapped segment -> checks -> Message, a view of the mapping

The same code serves the writer's own process and readers in others; what differs is how they learn of news
(`log.news`) and what a record that does not verify means: to the writer it is damage, to be passed over and counted;
to another process it may be a record that is just being written, so reading stops before it.

Whatever reads, `_tell_lost` logs what it passes over: one line for each file while the store is open.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import numpy.typing as npt

from mqstore.clock import Clock
from mqstore.errors import (
    FormatError,
    InvalidMessageError,
    OffsetOutOfRangeError,
    StoreClosedError,
    TopicNotFoundError,
)
from mqstore.files.filesystem import FileSystem
from mqstore.files.lock import writer_alive
from mqstore.files.segments import SegmentRun, place_in_file
from mqstore.layout.consumequeue import UNIT, UNIT_BYTES, UNIT_DTYPE, VOID_SIZE, is_void
from mqstore.layout.dispatch import tags_code_at
from mqstore.layout.messageid import decode_message_id
from mqstore.layout.record import (
    MIN_RECORD_BYTES,
    Checksum,
    check_record,
    decode_record,
)
from mqstore.log.checking import RecordChecker
from mqstore.log.consumequeue import ConsumeQueue, QueueTable
from mqstore.log.foreign import foreign
from mqstore.log.index import Index
from mqstore.log.iteration import iterate
from mqstore.log.manifest import Manifest
from mqstore.log.message import Message, stored_bytes
from mqstore.log.names import is_path_safe
from mqstore.log.news import News
from mqstore.log.recovery.report import Finding
from mqstore.log.stretch import Few, Stretch
from mqstore.log.tagfilter import UnitFilter, parse_tags
from mqstore.log.tip import QueueRef

__all__ = ["LOST_SEGMENTS", "Bound", "GetResult", "StoreReader"]

_log = logging.getLogger("mqstore")

Bound = Literal["lower", "upper"]
_SCAN_UNITS = 800
"""Units looked at for one filtered read (format#reads)."""
_COMPILED_UNITS = 4096
"""Units read at once: their messages keep them all."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOOK_AHEAD_UNITS = 256
LOST_SEGMENTS = 1024
"""A unit that points further behind the end of the log is a damaged one, and no sign of a lost segment."""


@dataclass(frozen=True, slots=True)
class GetResult:
    """What a read found. `next_offset` is where to go on; bounds are those at the time of the read (format#reads).

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     _ = store.put_many("t", [b"a", b"b", b"c"], queue_id=0)
    ...     found = store.log.get("t", 0, 1)
    ...     end = store.log.get("t", 0, found.next_offset)
    ...     found.status, [message.body for message in found.messages], end.status, end.next_offset
    ('FOUND', [b'b', b'c'], 'OFFSET_OVERFLOW_ONE', 3)
    """

    status: Literal[
        "FOUND",
        "NO_MATCHED_MESSAGE",
        "MESSAGE_WAS_REMOVING",
        "NO_MESSAGE_IN_QUEUE",
        "NO_MATCHED_LOGIC_QUEUE",
        "OFFSET_TOO_SMALL",
        "OFFSET_OVERFLOW_ONE",
        "OFFSET_OVERFLOW_BADLY",
    ]
    messages: list[Message]
    next_offset: int
    min_offset: int
    max_offset: int


def to_ms(when: datetime) -> int:
    """Milliseconds since the epoch of an aware datetime; InvalidMessageError for one that knows no zone.

    >>> to_ms(datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC))
    1700000000123
    """
    if when.tzinfo is None:
        raise InvalidMessageError(f"{when!r} has no time zone; datetime.now(timezone.utc), for one, has", "when")
    return (when - _EPOCH) // timedelta(milliseconds=1)


class StoreReader:
    """Everything about a store that does not change it. `MessageStore` is what a program opens."""

    path: Path
    mode: str
    manifest: Manifest
    _closed: bool = False
    log_files: SegmentRun
    queue_table: QueueTable
    index: Index
    fs: FileSystem
    clock: Clock
    checksum: Checksum
    delay_table_ms: tuple[int, ...]
    news: News
    checker: RecordChecker

    def _init_reader(self) -> None:
        self._gets = 0
        self._get_bytes = 0
        self._bad: set[int] = set()
        self._told: set[str] = set()
        """Files whose loss or damage the log has a line about."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child of the process that opened the store."""
        return self._closed

    def check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.path} was closed (or this process was forked from its owner); open it again")

    # -- what there is ----------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Names of the topics that have a queue, sorted."""
        self.check_open()
        self.news.catch_up(None)
        return sorted({queue.topic for queue in self.queue_table if queue.max_offset or queue.next_offset})

    def queues(self, topic: str) -> list[QueueRef]:
        """The queues of `topic`, by queue id; TopicNotFoundError without one."""
        self.check_open()
        self.news.catch_up(None, topic)
        found = [QueueRef(topic, q.queue_id) for q in self.queue_table.of(topic) if q.max_offset or q.next_offset]
        if not found:
            raise TopicNotFoundError(f"{self.path} has no topic {topic!r}")
        return found

    def foreign(self) -> list[str]:
        """What a RocketMQ broker keeps in this directory that mqstore does not know, a sentence each."""
        return foreign(self.path, self.queue_table, self.fs)

    def queue_named(self, topic: str, queue_id: int, offset: int | None = None) -> ConsumeQueue:
        """The queue, brought up to date unless `offset` is known to be there already."""
        if self._closed:
            self.check_open()
        queue = self.queue_table.get(topic, queue_id)
        if queue is None or not queue.next_offset:  # a refused put may have left a queue without a message
            if is_path_safe(topic):
                self.news.catch_up(None, topic)
                queue = self.queue_table.get(topic, queue_id)
            if queue is None or not queue.next_offset:
                raise TopicNotFoundError(f"{self.path} has no queue {queue_id} of topic {topic!r}")
        elif offset is None or offset >= queue.max_offset:
            self.news.catch_up(queue)
        return queue

    def offsets(self, topic: str, queue_id: int = 0) -> tuple[int, int]:
        """(offset of the first message, offset of the next one to come) of a queue."""
        queue = self.queue_named(topic, queue_id)
        return queue.min_offset, queue.max_offset

    def offsets_or_none(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """As `offsets`, for who asks often: None for a queue that no message was put to, and no look for news of
        other processes."""
        queue = self.queue_table.get(topic, queue_id)
        if queue is None:
            return None
        if self.mode == "rw":
            self.news.catch_up(queue)
        return (queue.min_offset, queue.max_offset) if queue.next_offset else None

    def units(self, topic: str, queue_id: int, offset: int, max_units: int) -> npt.NDArray[np.void]:
        """Units of a queue from `offset` on as an array (physical_offset, size, tags_code), unread and unverified; none
        for a queue or an offset that does not exist."""
        queue = self.queue_table.get(topic, queue_id)
        if queue is None:
            return np.empty(0, UNIT_DTYPE)
        if offset + max_units > queue.max_offset:
            self.news.catch_up(queue)
        if offset < queue.min_offset:
            return np.empty(0, UNIT_DTYPE)
        return queue.units(offset, max(0, min(max_units, queue.max_offset - offset)))

    # -- messages ---------------------------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        queue_id: int = 0,
        offset: int = 0,
        max_messages: int = 32,
        *,
        max_bytes: int | None = None,
        tags: str | None = "*",
    ) -> list[Message]:
        """Messages of a queue from `offset` on; [] at the end. The first is returned however big it is.

        Raises TopicNotFoundError, OffsetOutOfRangeError (which carries the bounds), FilterError. Messages that cannot
        be read are passed over and counted (`stats().bad_records`). The log names each file that they are lost from
        once.
        """
        result = self.get(topic, queue_id, offset, max_messages, max_bytes=max_bytes, tags=tags)
        if result.messages:
            return result.messages
        if result.status in ("OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY"):
            raise OffsetOutOfRangeError(
                f"offset {offset} of {topic}/{queue_id} is not between {result.min_offset} and {result.max_offset}",
                result.min_offset,
                result.max_offset,
            )
        while offset < result.next_offset < result.max_offset and not result.messages:
            offset = result.next_offset
            result = self.get(topic, queue_id, offset, max_messages, max_bytes=max_bytes, tags=tags)
        return result.messages

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        *,
        max_bytes: int | None = None,
        tags: str | UnitFilter | None = "*",
        tell: bool = True,
    ) -> GetResult:
        """As `read`, with a status in place of errors, and where to go on (format#reads). `tags`: or a filter.

        Without `tell` nothing is logged about messages that are passed over, for a caller that reports them itself.
        """
        # Who could be given more than is known looks for news first: a thread sees what it has put.
        queue = self.queue_named(topic, queue_id, offset + max(max_messages, 1) - 1)
        low, high = queue.min_offset, queue.max_offset
        if high == 0:
            return GetResult("NO_MESSAGE_IN_QUEUE", [], 0, low, high)
        if offset < low:
            return GetResult("OFFSET_TOO_SMALL", [], low, low, high)
        if offset >= high:
            status: Literal["OFFSET_OVERFLOW_ONE", "OFFSET_OVERFLOW_BADLY"] = (
                "OFFSET_OVERFLOW_ONE" if offset == high else "OFFSET_OVERFLOW_BADLY"
            )
            return GetResult(status, [], high, low, high)
        if tags is None or isinstance(tags, str):
            unit_filter: UnitFilter | None = parse_tags(tags, topic) if tags != "*" else None
        else:
            unit_filter = tags
        messages: list[Message] = []
        position = offset
        budget = max_bytes
        limit = min(high, offset + max(_SCAN_UNITS, max_messages)) if unit_filter is not None else high
        while position < limit and len(messages) < max_messages:
            count = min(limit - position, max(1, max_messages - len(messages)))
            if unit_filter is not None:
                count = min(limit - position, max(count, 256))
            before = position
            found, position, stop = self._views(
                queue, position, count, unit_filter, max_messages - len(messages), budget, not messages, tell
            )
            if before < queue.min_offset and not (found and found[0].offset == before):
                position = before  # retention took what comes here, and perhaps many behind: who asks for it is told
                break
            messages += found
            if stop:
                break
            if budget is not None:
                budget -= stored_bytes(found)
        if offset < queue.min_offset and not (messages and messages[0].offset == offset):  # retention came in between
            low, high = queue.min_offset, queue.max_offset
            return GetResult("OFFSET_TOO_SMALL", [], low, low, high)
        if messages:
            self._gets += len(messages)
            return GetResult("FOUND", messages, position, low, high)
        filtered = unit_filter is not None or position == offset
        return GetResult("NO_MATCHED_MESSAGE" if filtered else "MESSAGE_WAS_REMOVING", [], position, low, high)

    def _views(
        self,
        queue: ConsumeQueue,
        offset: int,
        count: int,
        unit_filter: UnitFilter | None,
        max_messages: int,
        max_bytes: int | None,
        first_is_free: bool,
        tell: bool,
    ) -> tuple[list[Message], int, bool]:
        """(messages among units [offset, offset + count), offset behind the last unit consumed, whether to stop)."""
        asked = queue, offset, count, unit_filter, max_messages, max_bytes, first_is_free
        kernel = self.checker.kernel
        found = None if kernel is None else self._compiled(kernel, *asked)
        if found is not None:
            messages, after, stop = found
        else:
            stretches, after, stop = self._locate(*asked, tell=tell)
            messages = []
            for stretch in stretches:
                starts, slots = stretch.starts.tolist(), stretch.slots.tolist()
                messages += map(Message, repeat(stretch), starts, slots, stretch.body_ends())
                self._get_bytes += int(stretch.sizes.sum())
        if unit_filter is not None:
            messages = [message for message in messages if unit_filter.accepts(message)]
        return messages, after, stop

    def _compiled(
        self,
        kernel: ModuleType,
        queue: ConsumeQueue,
        offset: int,
        count: int,
        unit_filter: UnitFilter | None,
        max_messages: int,
        max_bytes: int | None,
        first_is_free: bool,
    ) -> tuple[list[Message], int, bool] | None:
        """What `_locate` leads to, up to the first unit that is no ordinary message of the segment that the first one
        lies in. None, and nothing has happened, when that is the very first: `_locate` deals with it."""
        count = min(count, _COMPILED_UNITS)
        units = queue.read(offset, count)
        chosen: npt.NDArray[np.int64] | None = None
        first, after, stop = 0, offset + count, False
        if unit_filter is not None:
            rows = np.frombuffer(units, UNIT_DTYPE)
            if ((rows["size"] <= 0) | (rows["size"] == VOID_SIZE) | (rows["physical_offset"] < 0)).any():
                return None
            chosen = np.flatnonzero(unit_filter.units(rows["tags_code"].astype(np.int64))).astype(np.int64)
            if len(chosen) > max_messages:
                after, stop = offset + int(chosen[max_messages]), True
                chosen = chosen[:max_messages]
            if not len(chosen):
                return [], after, stop
            first = int(chosen[0])
        elif count > max_messages:
            after, stop = offset + max_messages, True
            units = units[: max_messages * UNIT_BYTES]
        physical, size, _ = UNIT.unpack_from(units, first * UNIT_BYTES)
        if not 0 < size < VOID_SIZE or physical < 0:
            return None
        there = self.checker.segment_at(physical, physical + size)
        if there is None:
            return None
        segment, buffer = there
        budget = -1 if max_bytes is None else min(max(max_bytes, 0), 1 << 62)
        messages: list[Message]
        messages, looked, total, spent = kernel.read_units(
            Message,
            Few(queue.ref, buffer, units, offset),
            buffer,
            segment.start,
            units,
            offset,
            chosen,
            queue.queue_id,
            queue.topic_bytes,
            -budget - 2 if first_is_free and budget >= 0 else budget,
        )
        if not messages and not spent:
            return None
        if looked < (len(units) // UNIT_BYTES if chosen is None else len(chosen)):
            after, stop = offset + (looked if chosen is None else int(chosen[looked])), spent
        self._get_bytes += total
        return messages, after, stop

    def _locate(
        self,
        queue: ConsumeQueue,
        offset: int,
        count: int,
        unit_filter: UnitFilter | None,
        max_messages: int,
        max_bytes: int | None,
        first_is_free: bool,
        tell: bool = True,
    ) -> tuple[list[Stretch], int, bool]:
        """Where the records of units [offset, offset + count) lie, checked; the offset behind the last unit consumed;
        and whether a limit ended it."""
        units = queue.units(offset, count)
        physical = units["physical_offset"].astype(np.int64)
        sizes = units["size"].astype(np.int64)
        tags = units["tags_code"].astype(np.int64)
        after, stop = offset + count, False
        live = (sizes > 0) & (physical >= 0)
        if (sizes == VOID_SIZE).any():
            live &= ~is_void(units)
        if unit_filter is not None:
            live &= unit_filter.units(tags)
        chosen: npt.NDArray[np.intp] | None = None
        if not live.all():
            chosen = np.flatnonzero(live)
            if (sizes <= 0).any():  # retention may have taken the file they were in
                front = self.find_front(queue)
                holes = offset + np.flatnonzero(sizes <= 0)
                for slot in holes[holes >= front].tolist() if tell else ():
                    self._tell_lost(queue.missing_units(slot, slot))
        if chosen is None and count > max_messages:
            chosen = np.arange(max_messages)
            after, stop = offset + max_messages, True
        elif chosen is not None and len(chosen) > max_messages:
            after, stop = offset + int(chosen[max_messages]), True
            chosen = chosen[:max_messages]
        if max_bytes is not None:
            taken = np.cumsum(sizes if chosen is None else sizes[chosen])
            fits = int(np.searchsorted(taken, max_bytes, side="right"))
            fits = max(fits, 1 if first_is_free else 0)
            if fits < len(taken):
                chosen = np.arange(count) if chosen is None else chosen
                after, stop = offset + int(chosen[fits]), True
                chosen = chosen[:fits]
        if chosen is not None:
            physical, sizes, tags = physical[chosen], sizes[chosen], tags[chosen]
            slots = chosen + offset
        else:
            slots = np.arange(offset, offset + count)
        stretches: list[Stretch] = []
        bounds = np.flatnonzero(np.diff(physical // self.log_files.segment_bytes)) + 1
        for low, high in zip([0, *bounds.tolist()], [*bounds.tolist(), len(physical)], strict=True):
            if low == high:
                continue
            here = slice(low, high)
            checked = self.checker.check(queue, physical[here], sizes[here], slots[here])
            buffer, good = checked.buffer, checked.good
            if buffer is None and physical[low] < self._first_kept():
                queue.correct_min(self._first_kept())  # retention took it meanwhile
                if stretches:  # to be told when it is asked for
                    after, stop = int(slots[low]), True
                    break
                continue
            if not good.all():
                self.check_open()  # a close meanwhile takes the segments away: no damage, and nothing to pass over
                bad = ~good
                if not self.checker.passes_over_bad and high == len(physical) and bad[-1]:
                    # Another process's writer may be at work there: what does not verify yet ends the read, unless
                    # something behind it does. Then it is damage.
                    whole = int(np.flatnonzero(good)[-1]) + 1 if good.any() else 0
                    if not self._verifies_behind(queue, int(slots[-1]) + 1):
                        after, stop = int(slots[low + whole]), True
                        bad[whole:] = False
                        if tell and not writer_alive(self.path, self.fs):
                            loss = self.loss_at(int(physical[low + whole]), 0, queue.ref, after)
                            self._tell_lost(loss, "Reading the queue ends there")
                self._note_bad(queue, slots[here][bad], physical[here][bad], tell)
            if buffer is None:
                continue
            starts = physical[here] - physical[low] // self.log_files.segment_bytes * self.log_files.segment_bytes
            stretch = Stretch(
                queue.ref,
                buffer,
                starts,
                sizes[here],
                tags[here],
                slots[here],
                checked.headers,
                checked.body_ends,
            )
            stretches.append(stretch if good.all() else stretch.only(good))
        return stretches, after, stop

    def find_front(self, queue: ConsumeQueue) -> int:
        """Return the first offset of `queue` that retention has left by now. Lists the log again."""
        self.news.list_again()
        queue.correct_min(self._first_kept())
        return queue.min_offset

    def _first_kept(self) -> int:
        """Where the log begins, as far as this process knows."""
        starts = self.log_files.starts
        return starts[0] if starts else 0

    def _verifies_behind(self, queue: ConsumeQueue, slot: int) -> bool:
        """Whether any unit at or behind `slot` leads to a record that verifies."""
        while slot < queue.max_offset:
            count = min(queue.max_offset - slot, _LOOK_AHEAD_UNITS)
            units = queue.units(slot, count)
            live = np.flatnonzero((units["size"] > 0) & (units["physical_offset"] >= 0) & ~is_void(units))
            physical = units["physical_offset"][live].astype(np.int64)
            sizes = units["size"][live].astype(np.int64)
            segments = physical // self.log_files.segment_bytes
            for segment in np.unique(segments):
                here = segments == segment
                if self.checker.check(queue, physical[here], sizes[here], live[here] + slot).good.any():
                    return True
            slot += count
        return False

    def _note_bad(
        self, queue: ConsumeQueue, slots: npt.NDArray[np.int64], physical: npt.NDArray[np.int64], tell: bool
    ) -> None:
        for slot, position in zip(slots.tolist(), physical.tolist(), strict=True):
            if len(self._bad) < 100_000:
                self._bad.add(position)
            if tell:
                self._tell_lost(self.loss_at(position, 0, queue.ref, slot))

    def loss_at(self, physical: int, length: int, ref: QueueRef, slot: int) -> Finding:
        """Return the finding for the record of a unit that cannot be read: a `missing_segment` or a `bad_record`."""
        message = f"{ref.topic}, queue {ref.queue_id}, offset {slot}"
        missing = self.missing_segment(physical)
        if missing is not None:
            detail = f"{message}: the file that held it is missing"
            return Finding("missing_segment", missing, 0, self.log_files.segment_bytes, detail)
        place = place_in_file(max(physical, 0), self.log_files.segment_bytes)
        return Finding("bad_record", *place, length, f"{message}: the record does not verify")

    def missing_segment(self, physical: int) -> str | None:
        """Return the missing commitlog file, as a path below the store, that held the offset. None if it is there.

        None also for an offset that retention has removed, or that lies far behind the end of the log.
        """
        size, run = self.log_files.segment_bytes, self.log_files
        if run.find(physical) is not None or not self._first_kept() <= physical < run.end + LOST_SEGMENTS * size:
            return None
        return place_in_file(physical, size)[0]

    def _tell_lost(self, finding: Finding, then: str = "Messages that cannot be read there are passed over") -> None:
        """Log a loss that a read has met, unless the same file was named before."""
        if finding.file not in self._told:
            self._told.add(finding.file)
            _log.error(
                "%s: %s: %s: %s. %s. Run `mqstore verify` to see all that is damaged",
                *(self.path, finding.kind, finding.place, finding.detail, then),
            )

    # -- single messages --------------------------------------------------------------------------------------------

    def at(self, physical_offset: int) -> Message:
        """The message whose record starts at `physical_offset`. LookupError when no record that verifies does."""
        self.check_open()
        stop = physical_offset + MIN_RECORD_BYTES
        there = self.checker.segment_at(physical_offset, stop) if physical_offset >= 0 else None
        if there is None:
            self.check_open()  # a close meanwhile takes the segments away
            missing = self.missing_segment(physical_offset)
            why = "" if missing is None else f": missing_segment: {missing}"
            raise LookupError(f"{self.path} holds nothing at physical offset {physical_offset}{why}")
        segment, buffer = there
        at = physical_offset - segment.start
        check = check_record(buffer, at, len(buffer), physical_offset, self.checksum)
        if check.status != "ok":
            raise LookupError(f"{self.path} holds no message at physical offset {physical_offset}: {check.detail}")
        record = decode_record(buffer, at)
        code = tags_code_at(buffer, at, self.delay_table_ms)
        unit = UNIT.pack(physical_offset, record.total_size, code)
        few = Few(QueueRef(record.topic, record.queue_id), buffer, unit, record.queue_offset)
        return Message(few, at, record.queue_offset)

    def get_by_id(self, message_id: str) -> Message:
        """The message with this offset message id. LookupError: gone, or not the start of a record;
        InvalidMessageError: no message id."""
        try:
            _, physical_offset = decode_message_id(message_id)
        except FormatError as error:
            raise InvalidMessageError(f"{message_id!r} is no message id: {error}", "message_id") from error
        return self.at(physical_offset)

    def find(
        self,
        topic: str,
        *,
        key: str | None = None,
        unique_key: str | None = None,
        start_ms: int = 0,
        stop_ms: int = (1 << 62),
        limit: int = 32,
    ) -> list[Message]:
        """Messages of `topic` that bear `key` (or `unique_key`), stored in [start_ms, stop_ms], newest first.

        The index suggests by hash and second; topic, key and time are then compared on each record.
        """
        self.check_open()
        if (key is None) == (unique_key is None):
            raise InvalidMessageError("give key= or unique_key=, one of them", "key")
        wanted = key if key is not None else unique_key
        assert wanted is not None
        self.news.catch_up(None)
        found: dict[int, Message] = {}
        asked = limit
        while True:
            offsets = self.index.query(topic, wanted, start_ms, stop_ms, asked)
            for physical_offset in offsets:
                if physical_offset in found:
                    continue
                try:
                    message = self.at(physical_offset)
                except LookupError:
                    continue  # retention took it, or it is damaged
                bears = wanted in message.keys if key is not None else message.unique_key == wanted
                if bears and message.topic == topic and start_ms <= message.store_timestamp_ms <= stop_ms:
                    found[physical_offset] = message
            if len(found) >= limit or len(offsets) < asked:
                break
            asked *= 4  # other keys of the same hash took places
        return sorted(found.values(), key=lambda m: m.physical_offset, reverse=True)[:limit]

    # -- time -------------------------------------------------------------------------------------------------------

    def offset_at(self, topic: str, queue_id: int, when: datetime | int, bound: Bound = "lower") -> int:
        """The offset that belongs to a time (an aware datetime, or ms since the epoch), format#time-search.

        `"lower"`: the first message stored at or after it, the end if there is none. `"upper"`: the last message stored
        at or before it, the first if there is none.
        """
        stamp = to_ms(when) if isinstance(when, datetime) else when
        queue = self.queue_named(topic, queue_id)
        low, high = queue.min_offset, queue.max_offset
        first, end = low, high
        # Smallest slot with time >= stamp ("lower") or > stamp ("upper").
        while low < high:
            middle = (low + high) // 2
            probe, time_ms = self._time_at_or_after(queue, middle, high)
            if time_ms is None or time_ms > stamp or (time_ms == stamp and bound == "lower"):
                high = middle
            else:
                low = probe + 1
        return low if bound == "lower" else max(first, min(low - 1, end - 1)) if end > first else first

    def _time_at_or_after(self, queue: ConsumeQueue, slot: int, end: int) -> tuple[int, int | None]:
        """(slot, store time) of the first readable message in [slot, end)."""
        while slot < end:
            unit = queue.read(slot, 1)
            physical, size, _ = UNIT.unpack(unit)
            there = (
                self.checker.segment_at(physical, physical + size) if 0 < size < VOID_SIZE and physical >= 0 else None
            )
            if there is not None:
                segment, buffer = there
                start = physical - segment.start
                if start + size <= len(buffer) and size >= MIN_RECORD_BYTES:
                    return slot, Message(Few(queue.ref, buffer, unit, slot), start, slot).store_timestamp_ms
            slot += 1
            if there is None and size != VOID_SIZE:  # retention may have taken it, and many behind it
                slot = max(slot, self.find_front(queue))
        return end, None

    # -- iteration --------------------------------------------------------------------------------------------------

    def iter(
        self,
        topic: str,
        queue_id: int | None = None,
        *,
        start: Literal["earliest", "latest"] | datetime | int = "earliest",
        stop: int | None = None,
        follow: bool = False,
        tags: str | None = "*",
    ) -> Iterator[Message]:
        """Messages of one queue in order, or with `queue_id` None of all queues of the topic merged by store time.

        `start`: a word, a time, or (one queue) an offset; `stop`: the offset to end before, or None for the end as of
        now. With `follow` it waits for more, for ever; of several queues it then yields what has come, merged within
        each round. Where a writer has had to cut what a reader had seen already, following goes on there, and the log
        says so. The same holds where retention overtakes the reader. Messages that cannot be read are passed over as by
        `read`. An offset as `start` that is not there is an OffsetOutOfRangeError.
        """
        return iterate(self, topic, queue_id, start=start, stop=stop, follow=follow, tags=tags)
