"""Commitlog: one endless stream of records in segments of fixed size (format#blank, format#append).

    position = start of segment + byte in segment        a record never crosses a segment's end

Only `append` and its variants add records (format#append): Python code under one lock, or compiled code that adds one
ordinary record in one step without the lock. Large batches are written by a system call, not through the mapping. That
call waits for memory if the disk is too slow.

While Python code appends, compiled code does not (`_appending`), and the lock refuses a put of a signal handler.
"""

from __future__ import annotations

import copy
import sys
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import InvalidMessageError, MQStoreError
from mqstore.files.segment import Segment
from mqstore.layout.arrays.encode import encode_copies, encode_records
from mqstore.layout.hosts import IPV4_BYTES, LOCAL_HOST, encode_host
from mqstore.layout.record import (
    BLANK_BYTES,
    BORN_HOST_V6,
    CHECKSUM_AT,
    STORE_HOST_V6,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    encode_blank,
    header_struct,
    host_bits,
)
from mqstore.log.writing.log_tail import LogTail, QueueRef, QueueTail
from mqstore.log.writing.receipts import SendReceipt, SendReceipts
from mqstore.native import crc32c, kernel
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.log.directory.store_files import StoreParts

__all__ = ["ALLOWANCE", "ORDINARY", "CommitLog", "Fields", "OutOfReachError", "QueueRef", "SendReceipt", "SendReceipts"]

ALLOWANCE = 65_536
"""Maximum size of a record beyond the largest body (format#limits)."""
_CRC = Struct(">I")
_next_offset = attrgetter("next_offset")
_MS_NS = 1_000_000
_END_S = 0.5
"""Time to wait for an append before the last segment is closed."""
_ZEROS = bytes(1 << 18)
_AHEAD_BYTES = 8192
"""Bytes after the end of the log that have disk blocks. Opening a store reads there. On a full tmpfs, reading a hole of
a mapped file raises SIGBUS."""
_CALL_BYTES = 131_072
"""Batches of this many bytes and more are written by a system call.
The kernel then accepts whole pages as they are. Before a store through the mapping it zeroes each page. For fewer bytes
the call costs more, since it switches threads."""
_CONTINUED_BYTES = 16_384
"""The same after another batch that was written by a call: pages are not prepared there, and faults cost more."""

_NOTED_RECORDS, _NOTED_BATCHES = 8192, 256
"""Largest batch that is noted, and number of batches noted at a time: more would take too much memory."""

Result = TypeVar("Result")
_Encoded = tuple[bytearray | memoryview, Mapping[QueueTail, int], Result]
"""Bytes to store at a position, the next offset of each queue after them, and the result for the caller."""


class OutOfReachError(Exception):
    """The log has grown beyond the last position allowed for this record. Nothing was written."""


class Fields(NamedTuple):
    """Header fields that an ordinary put leaves at their defaults."""

    flag: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int | None = None
    """None means the store timestamp."""
    born_host: bytes | None = None
    """Encoded. None means the store host if that is IPv4, else 127.0.0.1:0."""
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


ORDINARY = Fields()
"""Fields of a put without a flag."""


Noted = tuple[QueueTail, bytes, int]
"""Records of one queue without properties that were appended together: the queue, and where their numbers are.

These are the first queue offset, the store timestamp, the physical offset of each record, and the end of the last one.
Bytes have them from an index on, each as i64 in big-endian order, as the receipts of a served `put_many` do."""


class CommitLog(LogTail):
    """Log for appending, and its bounds. `end` is the write position, `min_offset` the first byte kept."""

    def __init__(self, parts: StoreParts, on_alarm: Callable[[], None]) -> None:
        clock, store_host = parts.clock, encode_host(parts.config.store_host)
        self.run = run = parts.log_writer
        self.end = 0
        self.called_end = -1
        """`end` after the last large write by a call. A writer that continues there needs no prepared pages. Any other
        put there calls `_on_alarm`."""
        self._soiled = 0
        """End of the bytes of a failed put, if it is beyond `end`."""
        self.alarm = 0
        self.group = None
        self.failed: MQStoreError | None = None
        """Error that every later put raises: a sync failed, or the store was closed."""
        self.max_record_bytes = run.segment_bytes - BLANK_BYTES
        self._checksum = parts.checksum
        self._whole_record = parts.checksum == "crc32c-record"
        self._now_ns = None if clock is SYSTEM_CLOCK else (lambda: clock.now_ms() * _MS_NS)
        self._time_ns: Callable[[], int] = self._now_ns or time.time_ns
        self._receipt = SendReceipt
        self._store_host = store_host
        self._born_host = store_host if len(store_host) == IPV4_BYTES else LOCAL_HOST
        self._header = header_struct(len(self._born_host), len(store_host))
        self._host_flags = host_bits(self._born_host, store_host)
        self.header_bytes = self._header.size
        """Number of bytes before the body of an ordinary record."""
        self._on_alarm = on_alarm
        self.free_until = 0
        """Position up to which puts of applications need not ask for room (`log/writing/room.py`)."""
        self.noted: deque[Noted] = deque(maxlen=_NOTED_BATCHES)
        """Latest batches that the dispatcher need not read. It reads those that are missing here."""
        self.lock = Lock()
        """Held by appends in Python, and by a bulk append for as long as it lasts."""
        self._appending = False
        self._mapping = None
        self._file: object = None
        """Keeps `_fd` open."""
        self._fd = -1
        self._base = 0
        self._limit = -1

    @property
    def min_offset(self) -> int:
        """First physical offset in the files, or `end` without files."""
        starts = self.run.starts
        return starts[0] if starts else self.end

    def reset(self, end: int) -> None:
        """Set the end of the log, and use the segment that contains it, if there is one."""
        with self.lock:
            self.end = end
            self._soiled = 0
            self._mapping = None
            self._limit = -1
            segment = self.run.find(end)
            if segment is not None:
                self._enter(segment)

    def _enter(self, segment: Segment, *, called: bool = False) -> None:
        mapping = self.run.mapping(segment)
        file = self.run.file(segment) if called or self.group is not None else None
        fd = -1 if file is None else file.raw_fd
        # Bytes that bulk appends or an earlier process have written already have their blocks.
        segment.allocated = max(segment.allocated, self.end - segment.start)
        whole = segment.allocated >= segment.size
        end = segment.end - BLANK_BYTES if whole else segment.start + segment.allocated - _AHEAD_BYTES
        # No call from here on, and no release of a file's last reference. So nothing can interrupt these lines: neither
        # a signal handler's exception, nor another thread that sets `failed` or `free_until`.
        _before, self._file = self._file, file
        self._mapping = mapping
        self._fd = fd
        self._base = segment.start
        if self.failed is None:
            self._limit = end if end < self.free_until else self.free_until

    def append(
        self,
        queue: QueueTail,
        body: bytes,
        tail: bytes,
        fields: Fields = ORDINARY,
        unique_key: str | None = None,
        latest: int | None = None,
    ) -> SendReceipt:
        """Append one record to `queue`. `tail` has the bytes after the body.

        The caller has checked the lengths. A prepared or rollback record (sys_flag bits 2-3) gets no queue offset.
        Raises StoreFullError without room for the next segment, and OutOfReachError if the record would start
        after physical offset `latest`. Then nothing was written.
        """
        if kernel is not None and fields == ORDINARY and latest is None:
            receipt: SendReceipt | None = self._put(queue, body, tail, unique_key)
            if receipt is not None:
                return receipt
        flag, sys_flag, born_ms, born_host, reconsume_times, prepared_offset = fields
        header, host_flags = self._header, self._host_flags
        if born_host is None:
            born_host = self._born_host
        else:
            header = header_struct(len(born_host), len(self._store_host))
            host_flags = host_bits(born_host, self._store_host)
        sys_flag = sys_flag & ~(BORN_HOST_V6 | STORE_HOST_V6) | host_flags
        numbered = sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)
        size = header.size + len(body) + len(tail)
        # A put that syncs alone is written by a call: writing through the mapping faults on a page after each sync.
        by_call = self.group is not None and not self.group.busy
        with self.lock:  # as in `_append`, without its two calls
            try:
                self._appending = True
                position = self.end
                if position + size > self._limit:
                    position = self._roll(size)
                if latest is not None and position > latest:
                    raise OutOfReachError(f"the log ends at {position}, after {latest}")
                now_ms = self._time_ns() // _MS_NS
                offset = queue.next_offset if numbered else 0
                head = header.pack(
                    size,
                    queue.magic,
                    0,
                    queue.queue_id,
                    flag,
                    offset,
                    position,
                    sys_flag,
                    now_ms if born_ms is None else born_ms,
                    born_host,
                    now_ms,
                    self._store_host,
                    reconsume_times,
                    prepared_offset,
                    len(body),
                )
                data = bytearray().join((head, body, tail))
                checksum = crc32c(data) if self._whole_record else zlib.crc32(body) & 0x7FFF_FFFF
                _CRC.pack_into(data, CHECKSUM_AT, checksum)
                receipt = SendReceipt((queue.ref, offset, position, size, now_ms, self._store_host, unique_key))
                self._store(position, data, position + size, {queue: offset + 1} if numbered else {}, by_call=by_call)
            finally:
                self._appending = False
        if self.end >= self.alarm or position == self.called_end:
            self._on_alarm()
        return receipt

    def append_many(
        self, queue: QueueTail, bodies: list[bytes], tails: list[bytes] | bytes, flags: list[int] | int, body_bytes: int
    ) -> tuple[int, array[int], int]:
        """Append records that are contiguous and become visible together, all or none (format#batch).

        Returns (first queue offset, positions, store timestamp), as `SendReceipts.add` takes them. The caller has
        checked that together they fit a segment. `body_bytes` is the size of all bodies.
        """
        number = len(bodies)
        total = self.header_bytes * number + body_bytes
        total += len(tails) * number if isinstance(tails, bytes) else sum(map(len, tails))

        def encode(position: int) -> _Encoded[tuple[int, array[int], int]]:
            offset = queue.next_offset
            now_ms = self._time_ns() // _MS_NS
            data, positions = encode_records(
                bodies,
                tails,
                magic=queue.magic,
                queue_id=queue.queue_id,
                queue_offset=offset,
                physical_offset=position,
                timestamp_ms=now_ms,
                born_host=self._born_host,
                store_host=self._store_host,
                flags=flags,
                checksum=self._checksum,
            )
            return data, {queue: offset + number}, (offset, positions, now_ms)

        offset, positions, now_ms = found = self._append(total, encode)
        if tails is queue.plain_tail and number <= _NOTED_RECORDS:
            numbers = array("q", (offset, now_ms)) + positions
            if sys.byteorder == "little":
                numbers.byteswap()
            self.noted.append((queue, numbers.tobytes(), 0))
        return found

    def append_copies(
        self,
        queues: Sequence[QueueTail],
        heads: Sequence[bytes],
        bodies: Sequence[bytes],
        tails: Sequence[bytes],
        attempts: int,
    ) -> None:
        """Append copies of stored records (`encode_copies`), each to its own queue.
        They are contiguous and become visible together, all or none. The caller has checked that together they fit a
        segment."""
        total = self.header_bytes * len(heads) + sum(map(len, bodies)) + sum(map(len, tails))

        def encode(position: int) -> _Encoded[None]:
            counters = {queue: count(queue.next_offset) for queue in set(queues)}
            shown = queues if len(counters) > 1 else queues[:1]  # one stands for all
            data, _ = encode_copies(
                heads,
                bodies,
                tails,
                magics=[queue.magic for queue in shown],
                queue_ids=[queue.queue_id for queue in shown],
                queue_offsets=[next(counters[queue]) for queue in queues],
                physical_offset=position,
                timestamp_ms=self._time_ns() // _MS_NS,
                store_host=self._store_host,
                checksum=self._checksum,
                attempts=attempts,
            )
            return data, {queue: next(each) for queue, each in counters.items()}, None

        self._append(total, encode)

    def _append(self, size: int, encode: Callable[[int], _Encoded[Result]]) -> Result:
        """Store the `size` bytes that `encode` returns for a position, and return its result."""
        with self.lock:
            try:
                self._appending = True
                position = self.end
                if position + size > self._limit:
                    position = self._roll(size)
                data, numbers, result = encode(position)
                large = size >= _CALL_BYTES or (size >= _CONTINUED_BYTES and position == self.called_end)
                self._store(position, data, position + size, numbers, by_call=large or kernel is None)
            finally:
                self._appending = False
        if self.end >= self.alarm or position == self.called_end:
            self._on_alarm()
        return result

    def _roll(self, size: int, *, early: bool = False) -> int:
        """Make room for `size` bytes, in the next segment if `early`. Return the position to write at.
        The segment is created before the BLANK that points to it, so a full disk changes nothing."""
        self._check_failed()
        if size > self.max_record_bytes:
            raise InvalidMessageError(
                f"a record of {size} bytes does not fit a segment of {self.run.segment_bytes}; "
                f"the largest record has {self.max_record_bytes}",
                "body",
            )
        self._settle()
        position, run = self.end, self.run
        segment = run.find(self._base if self._mapping is not None else position) or run.create(position)
        if self._mapping is None:  # before the next segment exists: afterwards this one may be mapped read-only
            self._enter(segment)
        if not early and position + size + BLANK_BYTES <= segment.end:
            run.allocate(segment, min(position + size + _AHEAD_BYTES - segment.start, segment.size))
            self._enter(segment)
            return position
        start = segment.end
        # It may exist already, if an earlier roll failed after creating it: no descriptor for its mapping, or Ctrl-C.
        following = run.find(start) or run.create(start)
        run.allocate(following, min(size + _AHEAD_BYTES, following.size))
        if position < start:  # else the segment is full to its end, by recovery or by such a roll
            run.allocate(segment, position + BLANK_BYTES - segment.start)
            self._store(position, encode_blank(start - position), start, {}, by_call=False)
        self._enter(following)
        return start

    def set_free_until(self, position: int) -> None:
        self.free_until = position
        self._limit = -1  # the next put enters its segment again

    def end_segment(self) -> None:
        """Close the last segment at the present end of the log, so that retention can delete it.
        Does nothing while a bulk append holds the log, which may take minutes."""
        if not self.lock.is_held_here and self.lock.acquire(timeout=_END_S):
            try:
                self._appending = True
                self._roll(0, early=True)
            finally:
                self._appending = False
                self.lock.release()

    def hold(self) -> int:
        """Block every put until `release`. Return the end of the log. The caller keeps `lock` until then, and only the
        caller may write beyond that end."""
        self._check_failed()
        self._settle()
        self._appending = True
        return self.end

    def release(self, end: int | None = None) -> None:
        """Let puts continue, at `end` if the holder has written up to there. May be repeated."""
        if end is not None:
            self.end = end
        self._mapping = None  # the next put finds its segment
        self._limit = -1
        self._appending = False

    def _store(
        self,
        position: int,
        data: bytes | bytearray | memoryview,
        end: int,
        numbers: Mapping[QueueTail, int],
        *,
        by_call: bool,
    ) -> None:
        """Write `data` at `position`, advance queue offsets and move `end`: all or nothing. The lock is held.

        A batch is stored from front to back. If the process is killed, whole records remain at the front, and none
        follows a hole, which recovery would report as damage. Python may copy a slice into the mapping in any order, so
        without compiled code a batch is written by a call."""
        before = dict(zip(numbers, map(_next_offset, numbers), strict=True))
        try:
            self._soiled = position + len(data)
            if by_call:
                self.run.write(position, data)
            elif kernel is not None:
                kernel.lay(self._mapping, position - self._base, data)
            else:
                assert self._mapping is not None
                at = position - self._base
                self._mapping[at : at + len(data)] = data
            for queue, next_offset in numbers.items():
                queue.next_offset = next_offset
            if by_call and len(data) >= _CONTINUED_BYTES:
                self.called_end = end
            self.end = end
        finally:
            if self._soiled > self.end:  # also after Ctrl-C between writing the bytes and moving `end`
                self._limit = -1  # the next put wipes them if this call cannot
                for queue, next_offset in before.items():
                    queue.next_offset = next_offset
                with suppress(MQStoreError):
                    self._wipe()

    def _wipe(self) -> None:
        """Write zeros over the bytes of a failed put. Nothing is appended before that.
        After a crash, recovery would accept whole records there, although their put raised an error. A later record
        must not be written in front of such records."""
        while self._soiled > self.end:
            start = max(self.end, self._soiled - len(_ZEROS))
            self.run.write(start, _ZEROS[: self._soiled - start])
            self._soiled = start

    def settle(self) -> tuple[int, int] | None:
        """Wipe bytes after `end` that are not part of the log. Return their range, which is not synced, or None."""
        with self.lock:
            return self._settle()

    def _settle(self) -> tuple[int, int] | None:
        if self._soiled <= self.end:
            return None
        wiped = self.end, self._soiled
        self._limit = -1
        self._wipe()
        self._mapping = None  # the next put finds its segment
        return wiped

    def put_packed(self, queue: QueueTail, data: bytes, max_body: int) -> bytes | None:
        """Do `LogWriter.put_packed`, with compiled parts."""
        if self._fd < 0:
            self._extend()
        done = self._put_packed(queue, data, max_body)
        if done is None and self._extend():
            done = self._put_packed(queue, data, max_body)
        if done is not None:
            self.noted.append((queue, done, done[0] + 9))  # after a host with its size, queue id and count
        return done

    def _extend(self) -> bool:
        """Have a descriptor for `_put_packed`, and use disk blocks that were allocated ahead (`PagePrefetch`).
        Return True if there are more than before."""
        before = self._limit
        with self.lock:
            if self._mapping is not None and self.failed is None and self._soiled <= self.end:
                segment = self.run.find(self._base)
                if segment is not None:
                    self._enter(segment, called=True)
            return self._limit > before

    def has_room(self, size: int) -> bool:
        """Return True if `size` bytes fit without new disk blocks and without asking for room, and the log is free."""
        return self.end + size <= self._limit

    def _check_failed(self) -> None:
        if self.failed is not None:
            # A new error for each caller: a single error, raised repeatedly, would collect the frames of all of them.
            raise copy.copy(self.failed)

    def poison(self, error: MQStoreError) -> None:
        """Refuse every later put, after a failed sync (format#flush), a close or a fork. Waits for no put."""
        self.failed = error
        self._limit = self._fd = -1

    def close(self, error: MQStoreError) -> None:
        """Refuse every later put, and release the files."""
        self.poison(error)
        with self.lock:
            self._mapping = self._file = None
