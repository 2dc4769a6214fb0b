"""Reading of a store: from (topic, queue, offset) to messages (format#readers, format#reads).

The writer's process and readers in other processes use the same code. `log.records` finds and checks the records.

The class is long because it documents every way of reading, for both kinds of stores.
"""

from __future__ import annotations

import errno
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from mqstore import arrays as np
from mqstore.clock import SYSTEM_CLOCK
from mqstore.closing import Closing
from mqstore.errors import (
    ConfigError,
    FormatError,
    InvalidMessageError,
    MissingFileError,
    MQStoreError,
    OffsetOutOfRangeError,
    StoreClosedError,
    TopicNotFoundError,
)
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import NO_CHECKS, Check
from mqstore.files.safe_open import resolved
from mqstore.layout.consumequeue import UNIT, VOID_SIZE, unit_dtype
from mqstore.layout.messageid import decode_message_id
from mqstore.layout.record import MIN_RECORD_BYTES
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.manifest import Manifest
from mqstore.log.directory.names import is_path_safe
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.message import Message, UnitBatch, stored_bytes
from mqstore.log.reading.change_feed import ChangeFeed
from mqstore.log.reading.records import RecordReader, Request
from mqstore.log.reading.tagfilter import UnitFilter, parse_tags, refuse_other_types
from mqstore.log.recovery.report import Finding, RecoveryReport
from mqstore.log.stats import StoreStats
from mqstore.log.writing.log_tail import QueueRef
from mqstore.log.writing.retention import disk_ratio
from mqstore.options import Duration, StoreConfig
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.log.recovery.verify import Verifier

Bound = Literal["lower", "upper"]
GetStatus = Literal[
    "FOUND",
    "NO_MATCHED_MESSAGE",
    "MESSAGE_WAS_REMOVING",
    "NO_MESSAGE_IN_QUEUE",
    "NO_MATCHED_LOGIC_QUEUE",
    "OFFSET_TOO_SMALL",
    "OFFSET_OVERFLOW_ONE",
    "OFFSET_OVERFLOW_BADLY",
]
_SCAN_UNITS = 800
"""Number of units examined by one filtered read (format#reads)."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ROCKSDB_TABLES = ("topics", "subscriptionGroups", "consumerOffsets", "metadata", "rdb")
"""Folders of config/ that RocketMQ may keep in RocksDB."""
_TOPICS_SHOWN = 8


class GetResult(NamedTuple):
    """Result of a read. Continue at `next_offset`. Bounds are as of the read (format#reads).

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     _ = store.put_many("t", [b"a", b"b", b"c"], queue_id=0)
    ...     found = store.log.get("t", 0, 1)
    ...     end = store.log.get("t", 0, found.next_offset)
    ...     found.status, [message.body for message in found.messages], end.status, end.next_offset
    ('FOUND', [b'b', b'c'], 'OFFSET_OVERFLOW_ONE', 3)
    """

    status: GetStatus
    messages: list[Message]
    next_offset: int
    min_offset: int
    max_offset: int


def outside(queue: QueueRef, offset: int, result: GetResult) -> OffsetOutOfRangeError:
    """Return the error for an offset that a read did not find."""
    bounds = result.min_offset, result.max_offset
    text = f"offset {offset} of {queue.topic}/{queue.queue_id} is not between {bounds[0]} and {bounds[1]}"
    return OffsetOutOfRangeError(text, *bounds)


def to_ms(when: datetime) -> int:
    """Return ms since the epoch of an aware datetime. Raises InvalidMessageError for one without a zone.

    >>> to_ms(datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC))
    1700000000123
    """
    if when.tzinfo is None:
        raise InvalidMessageError(f"{when!r} has no time zone; use an aware one as datetime.now(timezone.utc)", "when")
    return (when - _EPOCH) // timedelta(milliseconds=1)


class StoreReader(Closing):
    """Base of stores opened for reading or for writing, with all operations that change nothing.

    A program opens `ReadOnlyMessageStore` or `MessageStore`. They differ in how they find new messages (`log.news`),
    and in the meaning of a record that does not verify (`log.records`).
    """

    mode: ClassVar[Literal["r", "rw"]]
    manifest: Manifest
    parts: StoreParts
    news: ChangeFeed
    records: RecordReader
    recovery: RecoveryReport
    """Report of opening: findings and repairs."""
    _closed = _released = True
    """`_closed` means that the store cannot be used, `_released` that all resources are freed.
    Both are true until the store is open."""
    _is_lost = False
    """True if the directory was removed or moved while the store was open."""
    _parent: int | None = None
    """Id of the process that opened the store, in its forked child."""

    def __init__(self, path: str | os.PathLike[str], config: StoreConfig | None, fs: FileSystem) -> None:
        self._close_lock = Lock()
        if config is not None and not isinstance(config, StoreConfig):
            raise ConfigError(f"config must be a mqstore.StoreConfig, not {config!r:.80}")
        self._place = resolved(path)
        self.path = Path(self._place)
        self.config = config = config or StoreConfig()
        self.fs = fs
        self.clock = config.clock or SYSTEM_CLOCK
        self._gets = 0
        self.closer: Callable[[], object] = self.close
        """Function that closes the store and everything built on it."""

    def _set_parts(self, parts: StoreParts) -> None:
        self.parts = parts
        self.delay_table_ms = parts.delay_table_ms
        self.checksum = parts.checksum
        self.log_files = parts.log_files
        self.queue_table = parts.queue_table
        self.index = parts.index

    def _read_by(self, news: ChangeFeed) -> None:
        self.news = news
        self.records = RecordReader(self.parts, news, self.check_closed, passes_over_bad=self.mode == "rw")
        self._opened_ms = self.clock.now_ms()

    @property
    def closed(self) -> bool:
        """True if `close` was called, the directory is gone, or this is a forked child of the opening process."""
        return self._closed

    def _opened(self) -> None:
        """Mark the store as open, and save the identity of its directory."""
        self._directory = self._look()
        self._closed = self._released = False

    def _look(self) -> tuple[int, int] | None:
        """Return the identity of the directory that is now at the path, or None if there is none."""
        try:
            found = os.stat(self._place)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    def check_open(self) -> None:
        """Raise StoreClosedError if the store was closed, and MissingFileError if its directory is gone."""
        self.is_lost()
        self.check_closed()

    def check_closed(self) -> None:
        """Raise StoreClosedError or MissingFileError as `check_open` does, but do not check the directory."""
        if self._closed:
            raise self._refusal()

    def is_lost(self) -> bool:
        """Return True if the directory was removed or moved while the store was open. Then every call fails.
        Another directory at the path is not used: it is not locked, and may be another store."""
        if not self._closed and self._look() != self._directory:
            self._lose()
        return self._is_lost

    def _lose(self) -> None:
        self._is_lost = self._closed = True

    def _refusal(self) -> MQStoreError:
        """Return the error that every call to a closed store raises."""
        if self._is_lost:
            text = "the directory was removed or moved while the store was open; close it, then open its new path"
            return MissingFileError(errno.ENOENT, text, self._place, "looking for the store")
        step = "open it again"
        if self._parent is not None:
            step = f"use it in process {self._parent}, which forked this one, or close it there and open it here"
        return StoreClosedError(f"{self.path} was closed: {step}")

    def __del__(self) -> None:
        """Close an unreferenced store, as file objects do. Its threads do not count as references (`threads`)."""
        if not self._released:
            try:
                warnings.warn(f"{self.path} was not closed", ResourceWarning, stacklevel=1, source=self)
            finally:
                with suppress(MissingFileError):  # already logged
                    self.closer()

    @abstractmethod
    def close(self, timeout: Duration = 30) -> None:
        """Close all files and free all resources."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.path)!r}{' closed' if self._closed else ''}>"

    # -- topics and queues ------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return the names of the topics that have a queue, sorted."""
        self.check_open()
        self.news.catch_up(None)
        return sorted({queue.topic for queue in self.queue_table if queue.is_there})

    def queues(self, topic: str) -> list[QueueRef]:
        """Return the queues of `topic`, by queue id. Raises TopicNotFoundError if there is none."""
        self.check_open()
        self.news.catch_up(None, topic)
        found = [queue.ref for queue in self.queue_table.of(topic) if queue.is_there]
        if not found:
            raise TopicNotFoundError(f"{self.path} has no topic {topic!r}")
        return found

    def foreign(self) -> list[str]:
        """Return a sentence for each kind of file in this directory that only a RocketMQ broker uses.

        These files are not damage, and are left unchanged (format#manifest).
        """
        found, queues = [], self.queue_table
        if queues.batch_topics:
            names = ", ".join(sorted(queues.batch_topics)[:_TOPICS_SHOWN])
            more = " ..." if len(queues.batch_topics) > _TOPICS_SHOWN else ""
            found.append(
                f"batchconsumequeue/: RocketMQ has batch queues of {names}{more}. They are neither read nor changed. "
                "A store with an unclean end keeps its mark until a broker has brought them up to date"
            )
        if queues.in_rocksdb:
            found.append(
                "consumequeue/: RocketMQ keeps the queues in RocksDB, which is neither read nor changed. Opening for "
                "writing builds mqstore's queue files next to it. The mark of an unclean end stays until a broker has "
                "brought its queues up to date"
            )
        if queues.has_addresses:
            found.append(
                "consumequeue_ext/: RocketMQ has bit maps and tags of messages there. Filters read the records instead"
            )
        if tables := [name for name in _ROCKSDB_TABLES if _is_rocksdb(self.path / "config" / name, self.fs)]:
            found.append(
                f"config/: RocketMQ keeps tables in RocksDB ({', '.join(tables)}), which are neither read nor changed. "
                "Settings and offsets found only there look missing. Export them with RocketMQ's mqadmin"
            )
        return found

    def queue_named(self, topic: str, queue_id: int, offset: int | None = None) -> ConsumeQueue:
        """Return the queue, brought up to date unless `offset` is known to exist already."""
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
        """Return the offsets of a queue's first message and of its next one."""
        queue = self.queue_named(topic, queue_id)
        return queue.min_offset, queue.max_offset

    def offsets_or_none(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """Return the result of `offsets`, or None for a queue without messages.
        It suits frequent calls, since it does not look for messages of other processes."""
        queue = self.queue_table.get(topic, queue_id)
        if queue is None:
            self.check_closed()
            return None
        if self.mode == "rw":
            self.news.catch_up(queue)
        return (queue.min_offset, queue.max_offset) if queue.next_offset else None

    def deleted_at(self, topic: str) -> int:
        """Return the physical offset below which messages of the topic are deleted. It is usually 0."""
        return self.queue_table.deleted.get(topic, 0)

    def units(self, topic: str, queue_id: int, offset: int, max_units: int) -> np.NDArray[np.void]:
        """Return units of a queue from `offset` on as an array (physical_offset, size, tags_code).
        The array is empty if queue or offset does not exist. The records are neither read nor verified."""
        return np.frombuffer(self.unit_bytes(topic, queue_id, offset, max_units), unit_dtype())

    def unit_bytes(self, topic: str, queue_id: int, offset: int, max_units: int) -> bytes:
        """Return the bytes of the units that `units` returns."""
        queue = self.queue_table.get(topic, queue_id)
        if queue is None:
            return b""
        if offset + max_units > queue.max_offset:
            self.news.catch_up(queue)
        if offset < queue.min_offset:
            return b""
        return queue.read(offset, max(0, min(max_units, queue.max_offset - offset)))

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
        """Return messages of a queue from `offset` on, or [] at the end. The first may have any size.

        Raises TopicNotFoundError, OffsetOutOfRangeError (with the bounds), FilterError. Unreadable messages are skipped
        and counted (`stats().bad_records`). Each file with such messages is logged once.
        """
        ahead = self.records.ahead
        if (
            ahead is not None
            and offset == ahead.next_offset
            and tags == "*"
            and max_bytes is None
            and not self._closed
            and (found := self.records.continued(ahead, topic, queue_id, offset, max_messages))
        ):
            self._gets += max_messages
            return found
        result = self.get(topic, queue_id, offset, max_messages, max_bytes=max_bytes, tags=tags)
        if result.messages:
            return result.messages
        if result.status in ("OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY"):
            raise outside(QueueRef(topic, queue_id), offset, result)
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
        """Read as `read` does, but return a status instead of errors, and the next offset (format#reads).

        `tags` may also be a filter. With `tell` false, skipped messages are not logged. This suits callers that report
        them.
        """
        # Look for new messages first if the read could return more than is known, so that a thread sees its own puts.
        queue = self.queue_named(topic, queue_id, offset + max(max_messages, 1) - 1)
        low, high = queue.min_offset, queue.max_offset
        if offset >= high:
            self.news.check_complete()
        if high == 0:
            return GetResult("NO_MESSAGE_IN_QUEUE", [], 0, low, high)
        if offset < low:
            return GetResult("OFFSET_TOO_SMALL", [], low, low, high)
        if offset >= high:
            status: GetStatus = "OFFSET_OVERFLOW_ONE" if offset == high else "OFFSET_OVERFLOW_BADLY"
            return GetResult(status, [], high, low, high)
        if tags is None or isinstance(tags, str):
            unit_filter: UnitFilter | None = parse_tags(tags, topic) if tags != "*" else None
        else:
            if not hasattr(tags, "prefilter"):
                refuse_other_types(tags)
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
            left = max_messages - len(messages)
            found, position, stop = self.records.views(
                Request(queue, position, count, unit_filter, left, budget, not messages, tell)
            )
            if before < queue.min_offset and not (found and found[0].offset == before):
                position = before  # retention deleted the messages here, and the next read will report it
                break
            messages += found
            if stop:
                break
            if budget is not None:
                budget -= stored_bytes(found)
        if offset < queue.min_offset and not (messages and messages[0].offset == offset):  # retention ran meanwhile
            low, high = queue.min_offset, queue.max_offset
            return GetResult("OFFSET_TOO_SMALL", [], low, low, high)
        if messages:
            self._gets += len(messages)
            return GetResult("FOUND", messages, position, low, high)
        filtered = unit_filter is not None or position == offset
        return GetResult("NO_MATCHED_MESSAGE" if filtered else "MESSAGE_WAS_REMOVING", [], position, low, high)

    # -- single messages --------------------------------------------------------------------------------------------

    def at(self, physical_offset: int) -> Message:
        """Return the message whose record starts at `physical_offset`. Raises LookupError without a valid one."""
        return self.records.at(physical_offset)

    def get_by_id(self, message_id: str) -> Message:
        """Return the message with this offset message id.
        Raises LookupError if no record starts there any more, InvalidMessageError if it is not a message id."""
        try:
            _, physical_offset = decode_message_id(message_id)
        except FormatError as error:
            raise InvalidMessageError(f"{message_id!r} is not a message id: {error}", "message_id") from error
        message = self.at(physical_offset)
        if physical_offset < self.deleted_at(message.topic):
            raise LookupError(f"{message_id!r} is a message of topic {message.topic!r}, which was deleted")
        return message

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
        """Return messages of `topic` with this `key` or `unique_key`, newest first.

        Only messages stored in [start_ms, stop_ms] are returned. The index finds candidates by hash and second. Then
        topic, key and time of each record are compared.
        """
        self.check_open()
        if (key is None) == (unique_key is None):
            raise InvalidMessageError("give either key= or unique_key=", "key")
        wanted = key if key is not None else unique_key
        assert wanted is not None
        self.news.catch_up(None)
        found: dict[int, Message] = {}
        asked = limit
        while True:
            offsets = self.index.query(topic, wanted, start_ms, stop_ms, asked)
            for physical_offset in offsets:
                if physical_offset in found or physical_offset < self.deleted_at(topic):
                    continue
                try:
                    message = self.at(physical_offset)
                except LookupError:
                    continue  # retention deleted it, or it is damaged
                matches = wanted in message.keys if key is not None else message.unique_key == wanted
                if matches and message.topic == topic and start_ms <= message.store_timestamp_ms <= stop_ms:
                    found[physical_offset] = message
            if len(found) >= limit or len(offsets) < asked:
                break
            asked *= 4  # some results had other keys of the same hash
        return sorted(found.values(), key=lambda m: m.physical_offset, reverse=True)[:limit]

    # -- time -------------------------------------------------------------------------------------------------------

    def offset_at(self, topic: str, queue_id: int, when: datetime | int, bound: Bound = "lower") -> int:
        """Return the offset for a time, an aware datetime or ms since the epoch (format#time-search).

        `"lower"` means the first message stored at or after it, or the end if there is none. `"upper"` means the last
        message stored at or before it, or the first if there is none.
        """
        stamp = to_ms(when) if isinstance(when, datetime) else when
        queue = self.queue_named(topic, queue_id)
        low, high = queue.min_offset, queue.max_offset
        first, end = low, high
        # Search the smallest slot with time >= stamp ("lower") or > stamp ("upper").
        while low < high:
            middle = (low + high) // 2
            probe, time_ms = self._time_at_or_after(queue, middle, high)
            if time_ms is None or time_ms > stamp or (time_ms == stamp and bound == "lower"):
                high = middle
            else:
                low = probe + 1
        return low if bound == "lower" else max(first, min(low - 1, end - 1)) if end > first else first

    def _time_at_or_after(self, queue: ConsumeQueue, slot: int, end: int) -> tuple[int, int | None]:
        """Return (slot, store time) of the first readable message in [slot, end), or (end, None)."""
        while slot < end:
            unit = queue.read(slot, 1)
            physical, size, _ = UNIT.unpack(unit)
            there = (
                self.records.segment_at(physical, physical + size) if 0 < size < VOID_SIZE and physical >= 0 else None
            )
            if there is not None:
                segment, buffer = there
                start = physical - segment.start
                if start + size <= len(buffer) and size >= MIN_RECORD_BYTES:
                    return slot, Message(UnitBatch(queue.ref, buffer, unit, slot), start, slot).store_timestamp_ms
            slot += 1
            if there is None and size != VOID_SIZE:  # retention may have deleted it, and many after it
                slot = max(slot, self.records.find_front(queue))
        return end, None

    # -- inspection -------------------------------------------------------------------------------------------------

    @property
    def clean_shutdown(self) -> bool:
        """True if the last writer had closed the store when it was opened here."""
        return self.parts.clean

    @property
    def min_offset(self) -> int:
        """Physical offset of the first byte in the log."""
        return self.log_files.min_offset

    @property
    @abstractmethod
    def max_offset(self) -> int:
        """Physical offset of the next record. For a reader, the end of the last file."""

    def stats(self) -> StoreStats:
        """Return a snapshot of counters, lags and sizes."""
        return StoreStats(
            gets=self._gets,
            get_bytes=self.records.bytes_read,
            min_offset=self.min_offset,
            max_offset=self.max_offset,
            segments=len(self.log_files.starts),
            commitlog_bytes=len(self.log_files.starts) * self.log_files.segment_bytes,
            disk_ratio=disk_ratio(self.log_files),
            opened_ms=self._opened_ms,
            queues=len(self.queue_table),
            bad_records=len(self.records.bad),
        )

    def verifier(
        self, json_checks: Mapping[str, Check] = NO_CHECKS, *, until: int | None = None, max_errors: int | None = None
    ) -> Verifier:
        """Return a `Verifier` of this store: `findings()` checks everything, attributes show progress.

        `json_checks` are checks of JSON files beyond decoding, by path within the store (`broker.configchecks`). With
        `until`, a writer has used the store since, and records from this physical offset on are not checked. While a
        writer runs, a reader's default is the end of the listed records. `max_errors` limits the findings for each
        range of the log. None means no limit."""
        self.check_open()
        return self._verifier_until(until)(json_checks=json_checks, max_errors=max_errors)

    @abstractmethod
    def _verifier_until(self, until: int | None) -> Callable[..., Verifier]:
        """Return the `Verifier` of this store without the other options of `verifier`."""

    def verify(self) -> Iterator[Finding]:
        """Yield a finding for each fault of the store (format#damage)."""
        return self.verifier().findings()


def _is_rocksdb(folder: Path, fs: FileSystem) -> bool:
    if not folder.is_dir():
        return False
    inside = [folder, *(folder / name for name in fs.scandir_directories(folder))]  # RocketMQ may add one more level
    return any(fs.exists(each / "CURRENT") for each in inside)
