"""The commitlog: one endless stream of records, laid over fixed-size segments (store-format 2.6, 5.1).

    position = start of segment + byte in segment        a record never crosses a segment's end

`append` is the only way in. Under one lock it numbers the record, packs it, stores it into the mapping and moves `end`;
`end` is moved last, so whoever reads below it, without the lock, sees whole records. Nothing here waits for a disk.

Knows segments and the record layout; knows queues only as something that has a `next_offset` to be counted up.
"""

from __future__ import annotations

import mmap
import threading
import zlib
from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple, Protocol

from crc32c import crc32c

from mqstore.clock import Clock
from mqstore.errors import InvalidMessageError, MQStoreError
from mqstore.files.segments import Segment, SegmentRun
from mqstore.layout.encode import encode_records
from mqstore.layout.messageid import encode_message_id
from mqstore.layout.record import MAGIC_V1, MAGIC_V2, Checksum, encode_blank, header_struct

__all__ = ["ALLOWANCE", "BLANK_BYTES", "CommitLog", "NumberedQueue", "QueueRef", "SendReceipt"]

BLANK_BYTES = 8
ALLOWANCE = 65_536
"""What a record may hold beyond the largest body (store-format 2.7)."""
_CRC = Struct(">I")
_NEVER = 1 << 62
_new = tuple.__new__


class QueueRef(NamedTuple):
    """One queue of a topic."""

    topic: str
    queue_id: int


class SendReceipt(NamedTuple):
    """Where a message went. `unique_key` is the same in every copy of it; the rest is the address of this copy."""

    topic: str
    queue_id: int
    offset: int
    """Queue offset."""
    physical_offset: int
    size: int
    """Bytes of the whole record."""
    store_timestamp_ms: int
    store_host: bytes
    given_unique_key: str | None

    @property
    def queue(self) -> QueueRef:
        return QueueRef(self.topic, self.queue_id)

    @property
    def message_id(self) -> str:
        """The offset message id: store host and physical offset, upper-case hex (store-format 2.8)."""
        return encode_message_id(self.store_host, self.physical_offset)

    @property
    def unique_key(self) -> str:
        """The key to deduplicate on; this copy's `message_id` when the message was put without one."""
        return self.given_unique_key or self.message_id


class NumberedQueue(Protocol):
    """What `append` needs of a queue."""

    topic: str
    queue_id: int
    next_offset: int


class CommitLog:
    """The append side and the bounds of the log. `end` is the write position, `min_offset` the first byte kept."""

    def __init__(
        self, run: SegmentRun, *, checksum: Checksum, clock: Clock, store_host: bytes, on_alarm: Callable[[], None]
    ) -> None:
        self.run = run
        self.end = 0
        self.puts = 0
        self.alarm = 0
        """Position at which a put calls `on_alarm`: one comparison in the hot path serves every kind of wake-up."""
        self.failed: MQStoreError | None = None
        """Why nothing may be written any more: a sync failed, or the store was closed."""
        self.max_record_bytes = run.segment_bytes - BLANK_BYTES
        self._checksum = checksum
        self._whole_record = checksum == "crc32c-record"
        self._now_ms = clock.now_ms
        self._store_host = store_host
        self._store_v6 = 0x20 if len(store_host) == 20 else 0
        self._pack = header_struct(8, len(store_host)).pack
        self._header_bytes = header_struct(8, len(store_host)).size
        self._on_alarm = on_alarm
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        self._base = 0
        self._limit = -1
        """A record must end at or before this position, so that a BLANK always fits behind it."""

    @property
    def min_offset(self) -> int:
        """First physical offset that the files still hold; `end` when they hold none."""
        starts = self.run.starts
        return starts[0] if starts else self.end

    def reset(self, end: int) -> None:
        """Go on appending at `end`, in the segment that holds it if there is one."""
        with self._lock:
            self.end = end
            self._mapping = None
            self._limit = -1
            segment = self.run.find(end)
            if segment is not None:
                self._enter(segment)

    def _enter(self, segment: Segment) -> None:
        self._mapping = self.run.mapping(segment)
        self._base = segment.start
        self._limit = segment.start + self.run.segment_bytes - BLANK_BYTES

    # -- appending --------------------------------------------------------------------------------------------------

    def append(
        self,
        queue: NumberedQueue,
        body: bytes | bytearray | memoryview,
        tail: bytes,
        flag: int,
        sys_flag: int,
        born_timestamp_ms: int | None,
        born_host: bytes | None,
        reconsume_times: int,
        prepared_transaction_offset: int,
        v2: bool,
        unique_key: str | None,
    ) -> SendReceipt:
        """Append one record to `queue`. `tail` is what stands behind the body; lengths were checked by the caller.

        A prepared or rollback record (sys_flag bits 2-3) takes no number of the queue. Raises StoreFullError when the
        next segment finds no room: nothing was written.
        """
        pack = self._pack
        header_bytes = self._header_bytes
        if born_host is None:
            born_host = self._store_host if not self._store_v6 else b"\x7f\0\0\1\0\0\0\0"
        elif len(born_host) == 20:
            sys_flag |= 0x10
            struct = header_struct(20, len(self._store_host))
            pack, header_bytes = struct.pack, struct.size
        sys_flag |= self._store_v6
        transaction = sys_flag & 0xC
        numbered = transaction == 0 or transaction == 8
        body_bytes = len(body)
        size = header_bytes + body_bytes + len(tail)
        checksum = 0 if self._whole_record else zlib.crc32(body) & 0x7FFF_FFFF
        with self._lock:
            position = self.end
            end = position + size
            if end > self._limit:
                position = self._roll(size)
                end = position + size
            offset = queue.next_offset if numbered else 0
            now = self._now_ms()
            data = b"".join(
                (
                    pack(
                        size,
                        MAGIC_V2 if v2 else MAGIC_V1,
                        checksum,
                        queue.queue_id,
                        flag,
                        offset,
                        position,
                        sys_flag,
                        now if born_timestamp_ms is None else born_timestamp_ms,
                        born_host,
                        now,
                        self._store_host,
                        reconsume_times,
                        prepared_transaction_offset,
                        body_bytes,
                    ),
                    body,
                    tail,
                )
            )
            mapping = self._mapping
            at = position - self._base
            mapping[at : at + size] = data  # type: ignore[index]  # _roll has set it; an assert would cost 3 % of a put
            if self._whole_record:
                _CRC.pack_into(mapping, at + 8, crc32c(data))  # type: ignore[arg-type]
            # No call between these: a signal handler's exception cannot come in the middle of the three.
            if numbered:
                queue.next_offset = offset + 1
            self.puts += 1
            self.end = end
        if end >= self.alarm:
            self._on_alarm()
        return _new(
            SendReceipt,
            (queue.topic, queue.queue_id, offset, position, size, now, self._store_host, unique_key),
        )

    def append_many(
        self,
        queue: NumberedQueue,
        bodies: Sequence[bytes],
        tails: Sequence[bytes] | bytes,
        flags: Sequence[int] | int,
        born_host: bytes | None,
        v2: bool,
    ) -> tuple[int, int, list[int], int]:
        """Append records that lie together and become visible together; all of them, or none (store-format 2.9).

        Returns (first queue offset, first physical offset, size of each, store timestamp). The caller has checked that
        their sum fits a segment.
        """
        if born_host is None:
            born_host = self._store_host if not self._store_v6 else b"\x7f\0\0\1\0\0\0\0"
        header = header_struct(len(born_host), len(self._store_host)).size
        total = header * len(bodies) + sum(map(len, bodies))
        total += len(tails) * len(bodies) if isinstance(tails, bytes) else sum(map(len, tails))
        with self._lock:
            position = self.end
            if position + total > self._limit:
                position = self._roll(total)
            offset = queue.next_offset
            now = self._now_ms()
            data, sizes = encode_records(
                bodies,
                tails,
                queue_id=queue.queue_id,
                queue_offset=offset,
                physical_offset=position,
                store_timestamp_ms=now,
                born_timestamp_ms=now,
                born_host=born_host,
                store_host=self._store_host,
                flags=flags,
                sys_flag=self._store_v6 | (0x10 if len(born_host) == 20 else 0),
                v2=v2,
                checksum=self._checksum,
            )
            at = position - self._base
            assert self._mapping is not None
            self._mapping[at : at + total] = data.data
            queue.next_offset = offset + len(bodies)
            self.puts += len(bodies)
            self.end = position + total
        if position + total >= self.alarm:
            self._on_alarm()
        return offset, position, sizes.tolist(), now

    def _roll(self, size: int) -> int:
        """Make room for `size` bytes: the position to write at. The segment is made before the BLANK that leads to it,
        so that a full disk leaves everything as it was."""
        if self.failed is not None:
            raise self.failed
        if size > self.max_record_bytes:
            raise InvalidMessageError(
                f"a record of {size} bytes does not fit a segment of {self.run.segment_bytes}; "
                f"the largest is {self.max_record_bytes}",
                "body",
            )
        position = self.end
        if self._mapping is None:
            segment = self.run.find(position)
            if segment is None:
                segment = self.run.create(position)
            self._enter(segment)
            if position + size <= self._limit:
                return position
        start = self._base + self.run.segment_bytes
        if position < start:
            segment = self.run.create(start)
            assert self._mapping is not None
            at = position - self._base
            self._mapping[at : at + BLANK_BYTES] = encode_blank(start - position)
        else:  # the segment is full to its end: recovered that way
            segment = self.run.find(start) or self.run.create(start)
        self._enter(segment)
        self.end = start
        return start

    def poison(self, error: MQStoreError) -> None:
        """Refuse every later put: a sync failed (store-format 8.1), or the store was closed."""
        with self._lock:
            self.failed = error
            self._mapping = None
            self._limit = -1
