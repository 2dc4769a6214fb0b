"""Walk, read and verify many records of a commitlog at once with numpy (format#record).

Recovery, dispatch, verification and columnar reads get their speed here: there is no Python object per record where it
can be avoided. Positions are relative to the buffer. `record` has all constants.

    read_run     consecutive records that verify: the next four, in one pass with compiled parts
    walk         starts of consecutive records, by following totalSize
    Headers      their fields as arrays, each built on first use
    topic_is     mask of the records of a topic
    verify       mask of the records whose checksums are right (format#crc-tail, format#checksum)
    whole_runs   all records that verify, wherever they start and whatever their offsets
    find_next    the next record that verifies, wherever it starts: resynchronisation after damage (format#opening)
    check_place  the check of a place where a run ends: a BLANK, or damage
    content_end  start of the zeros at the end of a file

All functions must accept damaged bytes. Nothing reads outside the buffer, every length is compared with the available
room before it is used, and every loop advances by at least the smallest record.

Strided arrays over the buffer are common: `everywhere` has the value at any position, and indexing by positions gathers
the needed values.
"""

from __future__ import annotations

import sys
import zlib
from functools import cached_property, partial
from itertools import repeat
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqstore import arrays as np
from mqstore.layout import record as _record
from mqstore.layout.arrays.encode import header_dtype
from mqstore.layout.hosts import IPV4_BYTES, IPV6_BYTES
from mqstore.layout.properties import CRC32, CRC_TAIL_BYTES
from mqstore.layout.record import (
    BLANK_BYTES,
    IPV6_EXTRA,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
    Check,
    Checksum,
    check_record,
    crc_tail_fault,
    record_checksum,
)
from mqstore.native import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import ReadableBuffer

    _Int64s = np.NDArray[np.int64]
    _Int32s = np.NDArray[np.int32]
    _Bools = np.NDArray[np.bool_]


_HOSTS: Final = (_record.BORN_HOST_V6, _record.STORE_HOST_V6)
_MOVED: Final = ("store_timestamp_ms", "reconsume_times", "prepared_transaction_offset", "body_size")
"""Fields that an IPv6 host before them moves."""

# Both magics begin with the same three bytes, so one of two 16-bit values is at an even address, wherever a magic is.
_MAGIC_BYTES: Final = MAGIC_V1.to_bytes(4, "big", signed=True)
_TAIL_NAME: Final = int.from_bytes(CRC32.encode(), "big")
_EVEN_PAIR: Final = int.from_bytes(_MAGIC_BYTES[:2], sys.byteorder)
_ODD_PAIR: Final = int.from_bytes(_MAGIC_BYTES[1:3], sys.byteorder)

_BLOCK_BYTES = 1 << 19  # examined at once; stays in the cache between the passes over it
_PATIENCE = 16  # `find_next` reads this many times its range before it distrusts large candidates
_PAGE_BYTES = 4096
_ZEROS = bytes(1 << 16)
_RUN_RECORDS = 8192

# Rows of the two tables that `kernel.sweep` fills: 64 and 32 bits.
_LONG_ROWS: Final = 7
_POSITION, _QUEUE_OFFSET, _STORE_TIMESTAMP, _PROPERTIES, _PROPERTIES_SIZE, _TOPIC_FIRST, _TOPIC_SIZE = range(_LONG_ROWS)
_INT_ROWS: Final = 5
_COVERED: Final[tuple[Checksum, ...]] = ("crc32c-record", "crc32-body")
"""Kinds of checksums, by their numbers in `kernel.sweep`, which begin with 1."""
_SIZE_ROW, _QUEUE_ID, _SYS_FLAG, _TOPIC, _TAIL = range(_INT_ROWS)
_ROW_SPACE: Final = 72
"""Unused items after each row, since rows that begin powers of two apart share a line of the cache."""


def _bytes_of(buf: ReadableBuffer) -> memoryview:
    view = memoryview(buf)
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def walk(buf: ReadableBuffer, start: int, end: int, max_records: int | None = None) -> tuple[_Int64s, int]:
    """Follow the chain of records that starts at `start` and stays within `end`.

    Returns `(positions, stop)`: int64 starts of the records, and the position after the last one. A record counts
    if its magic is V1 or V2, and its totalSize is at least the smallest possible and does not cross `end`. Nothing else
    is checked. So at `stop` there is a BLANK, zeros, damage or `end`, or the next record if `max_records` ended the
    walk.

    Raises ValueError if the range is not within the buffer.
    """
    view = _bytes_of(buf)
    if not 0 <= start <= end <= len(view):
        raise ValueError(f"the range {start}..{end} is not within a buffer of {len(view)} bytes")
    budget = sys.maxsize if max_records is None else max_records
    if kernel is not None:
        found, stop = kernel.walk(view, start, end, budget)
        return np.frombuffer(found, np.int64), stop
    positions: list[int] = []
    append, head = positions.append, Struct(">iI").unpack_from
    magics = {MAGIC_V1 & 0xFFFF_FFFF, MAGIC_V2 & 0xFFFF_FFFF}
    position, last = start, end - MIN_RECORD_BYTES
    for _ in repeat(None, min(budget, (end - start) // MIN_RECORD_BYTES)):
        if position > last:
            break
        size, magic = head(view, position)
        if size < MIN_RECORD_BYTES or size > end - position or magic not in magics:
            break
        append(position)
        position += size
    return np.array(positions, np.int64), position


def read_run(
    buf: ReadableBuffer,
    start: int,
    stop: int,
    base: int,
    checksum: Checksum,
    limit: int,
    *,
    checksums: bool = True,
    met: int = 0,
    segment_bytes: int = 0,
) -> tuple[Headers, int, int]:
    """Return the headers of consecutive records from `start` on that verify and begin before `stop`.

    Returns at most `limit`. `base` is the physical offset of byte 0 of `buf`. A record's own offset must be right. All
    of format#verifies is checked except for numbers in properties, and for checksums if `checksums` is False.

    Returns (headers, end, met). The last record ends at `end`. If there are fewer than `limit`, the next one does not
    verify, or `stop` comes next. `met` is the end of the mapping's pages that were loaded: pass it to the next call.
    With `segment_bytes`, for compiled parts, `buf` has several segments of this size, each with a BLANK or full.
    """
    view = _bytes_of(buf)
    if kernel is None:
        headers, end = _read_run(view, start, stop, base, checksum, limit, checksums=checksums)
        return headers, end, met
    room = min(limit, max(0, stop - start) // MIN_RECORD_BYTES + 1) + _ROW_SPACE
    longs, ints = np.empty((_LONG_ROWS, room), np.int64), np.empty((_INT_ROWS, room), np.int32)
    covered = _COVERED.index(checksum) + 1 if checksums else 0
    count, end, topics, tails, met = kernel.sweep(
        *(view, start, stop, base, min(limit, room), covered, met, longs, ints, segment_bytes)
    )
    good = count
    if checksums and tails:
        for row in np.flatnonzero(ints[_TAIL, :count]).tolist():
            begin, size = int(longs[_POSITION, row]), int(ints[_SIZE_ROW, row])
            if crc_tail_fault(view, begin, begin + size, int(longs[_PROPERTIES_SIZE, row])):
                good = row
                break
    if good < count:
        end, count = int(longs[_POSITION, good]), good
        topics = int(ints[_TOPIC, :good].max(initial=-1)) + 1
    if count < limit // 4:  # so that a few headers do not keep the memory of many
        longs, ints = longs[:, :count].copy(), ints[:, :count].copy()
    return Headers(view, longs[_POSITION, :count], run=Run(longs, ints, topics)), end, met


def _read_run(
    view: memoryview, start: int, stop: int, base: int, checksum: Checksum, limit: int, *, checksums: bool
) -> tuple[Headers, int]:
    """Read a run step by step: `read_run` without compiled code."""
    positions, end = walk(view, start, len(view), limit)
    if len(positions) and positions[-1] >= stop:
        inside = int(np.searchsorted(positions, stop))
        positions, end = positions[:inside], int(positions[inside])
    headers = Headers(view, positions)
    good = headers.ok & (headers.physical_offset == headers.positions + base)
    count = len(good) if bool(good.all()) else int(np.argmin(good))
    if checksums:
        if count < len(positions):
            headers = Headers(view, positions[:count])
        holds = verify(view, headers, checksum)
        count = count if bool(holds.all()) else int(np.argmin(holds))
    if count < len(positions):
        return Headers(view, positions[:count]), int(positions[count])
    return headers, end


def _candidates(view: memoryview, start: int, stop: int, end: int) -> _Int64s:
    """Return ascending starts in `[start, stop)` with a magic and a possible size."""
    stop = min(stop, end - MIN_RECORD_BYTES + 1)
    if stop <= start:
        return np.empty(0, np.int64)
    low, high = start + _record.MAGIC_AT, stop + _record.MAGIC_AT + len(_MAGIC_BYTES)
    data: np.NDArray[np.uint8] = np.ndarray((len(view),), np.uint8, view)
    pairs = data[low : high - (high - low) % 2].view(np.uint16)
    if not pairs.flags.aligned:  # comparing aligned values is much faster. A magic at `low` also shows one byte later
        low += 1
        pairs = data[low : high - (high - low) % 2].view(np.uint16)
    odd = pairs == _ODD_PAIR
    hits = np.flatnonzero((pairs == _EVEN_PAIR) | odd)
    found = hits * 2 - odd[hits] + (low - _record.MAGIC_AT)
    found = found[(found >= start) & (found < stop)]
    heads = _column(view, found, ">i8")  # totalSize in the upper half, magic in the lower
    size, magic = heads >> 32, heads.astype(np.int32)
    good = ((magic == MAGIC_V1) | (magic == MAGIC_V2)) & (size >= MIN_RECORD_BYTES) & (found + size <= end)
    result: _Int64s = found[good]
    return result


def _column(view: memoryview, positions: _Int64s, dtype: np.DTypeLike) -> np.NDArray[np.signedinteger]:
    """Return the big-endian integers at `positions`, in native order. Raises IndexError if one is outside."""
    return everywhere(view, dtype)[positions].astype(np.dtype(dtype).newbyteorder("="))


def everywhere(view: memoryview | np.NDArray[np.uint8], dtype: np.DTypeLike) -> np.NDArray[Any]:
    """Return an array whose element i is the value at byte i of `view`. Writing to it writes to `view`."""
    kind = np.dtype(dtype)
    return np.ndarray((max(0, len(view) - kind.itemsize + 1),), kind, view, 0, (1,))


def slices(view: memoryview, starts: _Int64s, sizes: np.NDArray[np.signedinteger]) -> map[memoryview]:
    """Return the bytes of many values."""
    return map(view.__getitem__, map(slice, starts.tolist(), (starts + sizes).tolist()))


class Run(NamedTuple):
    """Tables that `kernel.sweep` fills for consecutive records, all of them ok.
    A record has a column, and there are more columns than records. `topics` is the number of distinct topics."""

    longs: _Int64s
    ints: _Int32s
    topics: int


def _int32s(name: str) -> cached_property[_Int32s]:
    return cached_property(lambda headers: headers.heads[name].astype(np.int32))


def _int64s(name: str) -> cached_property[_Int64s]:
    return cached_property(lambda headers: headers.heads[name].astype(np.int64))


def _part(column: int) -> cached_property[_Int64s]:
    return cached_property(lambda headers: headers.parts[column])


class Headers:
    """Fields of many records as numpy arrays, each built on first use and then kept.

    `positions` are the record starts (int64, bytes from the start of the buffer). Columns are native-endian, int32 or
    int64 as in the record. Positions and sizes of body, topic and properties are in bytes, as int64. Do not write to
    them.

    `ok` is True if the magic is V1 or V2, the record is within the buffer, its topic is not empty and its inner lengths
    add up to its size. In other rows the columns after bornTimestamp have no meaning, and those of body, topic and
    properties are zero, so that slicing by them is harmless.

    The columns own their memory, but this object holds the buffer: drop it before closing a mapping.
    """

    def __init__(self, buf: ReadableBuffer, positions: np.ArrayLike, run: Run | None = None) -> None:
        """Raises ValueError if a position is negative or leaves no room for the smallest record. Any other damage makes
        `ok` False in that row."""
        self._view = _bytes_of(buf)
        self.run = run
        """Tables of these records, if `read_run` has found them at `positions`."""
        self.positions: _Int64s = np.ascontiguousarray(positions, np.int64)
        if run is not None:
            self._take_run(run, len(self.positions))
        elif len(self.positions):
            low, high = int(self.positions.min()), int(self.positions.max())
            if low < 0 or high + MIN_RECORD_BYTES > len(self._view):
                raise ValueError(f"no record can start at {low if low < 0 else high} in {len(self._view)} bytes")

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def heads(self) -> np.NDArray[np.void]:
        """Return the fields before the body (`HEADER_FIELDS`), hosts of IPv6 cut to the size of IPv4."""
        # One copy of 88 bytes a record, so that every later column reads dense memory instead of the segment.
        positions, kind = self.positions, header_dtype(IPV4_BYTES, IPV4_BYTES)
        if kernel is not None:
            heads = collect(self._view, positions, np.full(len(positions), kind.itemsize, np.int64)).view(kind)
        else:
            heads = everywhere(self._view, f"V{kind.itemsize}")[positions].view(kind)
        flags = heads["sys_flag"].astype(np.int32) & sum(_HOSTS)
        for bits in np.unique(flags).tolist() if flags.any() else ():  # seldom
            moved = header_dtype(*(IPV6_BYTES if bits & host else IPV4_BYTES for host in _HOSTS))
            room = np.minimum(heads["size"], len(self._view) - positions)  # a damaged record may lack it
            rows = np.flatnonzero((flags == bits) & (room >= MIN_RECORD_BYTES - kind.itemsize + moved.itemsize))
            found = everywhere(self._view, moved)[positions[rows]]
            for name in _MOVED:
                heads[name][rows] = found[name]
        return heads

    def head_words(self, at: int) -> np.NDArray[np.uint64]:
        """Return the eight bytes at `at` of each header as native numbers, strided. Do not write to them."""
        heads = self.heads
        words: np.NDArray[np.uint64] = heads.view(np.uint8).reshape(-1, heads.itemsize)[:, at : at + 8].view(np.uint64)
        return words[:, 0]

    size = _int32s("size")
    magic = _int32s("magic")
    checksum = _int32s("checksum")
    """Checksum field as stored, in either profile."""
    queue_id = _int32s("queue_id")
    flag = _int32s("flag")
    queue_offset = _int64s("queue_offset")
    physical_offset = _int64s("physical_offset")
    sys_flag = _int32s("sys_flag")
    born_timestamp_ms = _int64s("born_timestamp_ms")

    store_timestamp_ms = _int64s("store_timestamp_ms")
    reconsume_times = _int32s("reconsume_times")
    prepared_transaction_offset = _int64s("prepared_transaction_offset")

    @cached_property
    def born_host_size(self) -> _Int32s:
        """Size of address and port from position 48: 8 or 20."""
        return np.where(self.sys_flag & _record.BORN_HOST_V6, IPV6_BYTES, IPV4_BYTES).astype(np.int32)

    @cached_property
    def store_host_size(self) -> _Int32s:
        """Size of address and port from position 56 + born_host_size: 8 or 20."""
        return np.where(self.sys_flag & _record.STORE_HOST_V6, IPV6_BYTES, IPV4_BYTES).astype(np.int32)

    def _take_run(self, run: Run, count: int) -> None:
        longs, ints = run.longs[:, :count], run.ints[:, :count]
        self.queue_offset, self.store_timestamp_ms = longs[_QUEUE_OFFSET], longs[_STORE_TIMESTAMP]
        self.properties_position, self.properties_size = longs[_PROPERTIES], longs[_PROPERTIES_SIZE]
        self.size, self.queue_id, self.sys_flag = ints[_SIZE_ROW], ints[_QUEUE_ID], ints[_SYS_FLAG]
        self.ok = np.ones(count, np.bool_)

    def topics(self) -> tuple[list[bytes], _Int32s] | None:
        """Return distinct topics in order of appearance, and each record's index, or None if unknown."""
        run = self.run
        if run is None:
            return None
        starts, sizes = run.longs[_TOPIC_FIRST, : run.topics].tolist(), run.longs[_TOPIC_SIZE, : run.topics].tolist()
        names = [self._view[at : at + size].tobytes() for at, size in zip(starts, sizes, strict=True)]
        return names, run.ints[_TOPIC, : len(self)]

    @cached_property
    def parts(self) -> tuple[_Bools, _Int64s, _Int64s, _Int64s, _Int64s, _Int64s, _Int64s]:
        """Return `ok`, then position and size of body, topic and properties. Lengths are compared before use.
        Set by a caller that has computed them."""
        if kernel is not None:
            good, table = np.empty(len(self), np.bool_), np.empty((6, len(self)), np.int64)
            kernel.measure(self._view, self.positions, good, table)
            return good, *table
        # With arrays, since reading, verification and recovery take the parts of all records.
        positions, size, magic, flags = self.positions, self.size.astype(np.int64), self.magic, self.sys_flag
        extra = sum((flags & host != 0).astype(np.int64) * IPV6_EXTRA for host in _HOSTS)
        body_size = self.heads["body_size"].astype(np.int64)
        second = (magic == MAGIC_V2).astype(np.int64)  # V2 has one more byte of topicLength
        spare = size - MIN_RECORD_BYTES - extra - second  # bytes left for body, topic and properties
        ok = (magic == MAGIC_V1) | (second != 0)
        ok &= (spare > 0) & (positions + size <= len(self._view)) & (body_size >= 0) & (body_size < spare)

        data: np.NDArray[np.uint8] = np.ndarray((len(self._view),), np.uint8, self._view)
        body = positions + self.heads.itemsize + extra
        at = np.where(ok, body + body_size, 0)
        topic_size = data.view(np.int8)[at].astype(np.int64)
        rows = np.flatnonzero(ok & (second != 0))
        topic_size[rows] = _column(self._view, at[rows], ">i2")
        topic = at + 1 + second
        spare -= body_size
        ok &= (topic_size > 0) & (topic_size <= spare)

        at = np.where(ok, topic + topic_size, 0)
        properties_size = _column(self._view, at, ">i2").astype(np.int64)
        ok &= properties_size == spare - topic_size
        parts = (body, body_size, topic, topic_size, at + 2, properties_size)
        for column in parts:
            column[~ok] = 0
        return ok, *parts

    @cached_property
    def ok(self) -> _Bools:
        return self.parts[0]

    body_position = _part(1)
    body_size = _part(2)
    topic_position = _part(3)
    topic_size = _part(4)
    """Length of the UTF-8 topic in bytes."""
    properties_position = _part(5)
    properties_size = _part(6)


def collect(buf: ReadableBuffer, starts: _Int64s, sizes: _Int64s) -> np.NDArray[np.uint8]:
    """Return the bytes of values scattered over `buf`, concatenated in a new array. They may overlap."""
    if kernel is not None:
        data = np.empty(int(sizes.sum()), np.uint8)
        kernel.join(buf, starts, sizes, data)
        return data
    return np.frombuffer(bytearray().join(slices(memoryview(buf), starts, sizes)), np.uint8)


def verify(buf: ReadableBuffer, headers: Headers, checksum: Checksum) -> _Bools:
    """Return a mask of the records of `headers`, which are in `buf`, whose checksums are right.

    `crc32c-record` covers the whole record with the checksum field read as zero. `crc32-body` covers the stored body,
    and an empty body is not checked. A `__CRC32#` tail is compared, too, if there is one. Rows whose lengths do not add
    up (`Headers.ok`) are False. Does not check that a record is at its physicalOffset (compare the column), or that its
    numbers can be read (format#verifies).
    """
    view = _bytes_of(buf)
    result = headers.ok.copy()
    rows = np.flatnonzero(result)
    if not len(rows):
        return result
    starts, sizes = headers.positions[rows], headers.size[rows].astype(np.int64)
    stored = headers.checksum[rows]
    if checksum == "crc32c-record":
        computed = map(partial(record_checksum, view), starts.tolist(), sizes.tolist())
        result[rows] = np.fromiter(computed, np.int32, len(rows)) == stored
    else:
        bodies, body_sizes = headers.body_position[rows], headers.body_size[rows]
        found = np.fromiter(map(zlib.crc32, slices(view, bodies, body_sizes)), np.uint32, len(rows))
        result[rows] = ((found & 0x7FFF_FFFF) == stored.view(np.uint32)) | (body_sizes == 0)

    tail = np.flatnonzero(has_crc_tail(view, headers)[rows])
    for row, at, end in zip(rows[tail].tolist(), starts[tail].tolist(), (starts + sizes)[tail].tolist(), strict=True):
        result[row] &= not crc_tail_fault(view, at, end, int(headers.properties_size[row]))
    return result


def has_crc_tail(buf: ReadableBuffer, headers: Headers) -> _Bools:
    """Return a mask of the records, which are in `buf`, that end with `__CRC32#`, a checksum of the whole record."""
    found: _Bools = headers.properties_size >= CRC_TAIL_BYTES
    rows = np.flatnonzero(found)
    ends = headers.positions[rows] + headers.size[rows]
    found[rows] = _column(_bytes_of(buf), ends - CRC_TAIL_BYTES, ">i8") == _TAIL_NAME
    return found


def topic_is(buf: ReadableBuffer, headers: Headers, topic: bytes) -> _Bools:
    """Return a mask of the records, which are in `buf`, that have this topic, given as UTF-8."""
    view = _bytes_of(buf)
    same: _Bools = headers.topic_size == len(topic)
    rows = np.flatnonzero(same)
    if len(rows) and topic:
        found = everywhere(view, f"V{len(topic)}")[headers.topic_position[rows]].view(np.uint8)
        found = found.reshape(len(rows), len(topic))
        same[rows] = (found == np.frombuffer(topic, np.uint8)).all(axis=1)
    return same


def content_end(buf: ReadableBuffer, start: int = 0, end: int | None = None) -> int:
    """Return the position after the last non-zero byte in `[start, end)`, or `start` if there is none.

    >>> content_end(b"ab\\0c\\0\\0"), content_end(b"ab\\0c\\0\\0", 4), content_end(b"ab\\0c", 0, 3)
    (4, 4, 2)
    """
    view = _bytes_of(buf)
    high = len(view) if end is None else end
    while high > start:
        low = max(start, high - len(_ZEROS))
        block = view[low:high].tobytes()
        if block != _ZEROS[: len(block)]:
            return low + len(block.rstrip(b"\0"))
        high = low
    return start


def find_next(
    buf: ReadableBuffer, start: int, end: int, base: int, checksum: Checksum, before: int | None = None
) -> int | None:
    """Return the first position in `[start, end)` where a record verifies and ends by `end`, else None.

    `base` is the physical offset of byte 0 of `buf`. A record must be at its own physicalOffset, so copies of records
    inside a body do not count. With `before` it must begin below that position, and may reach beyond. Raises ValueError
    if the range is not within `buf`.

    A hostile file can be full of candidates that each claim all later bytes. So candidates of more than a page are
    ignored once the range has been read many times in vain.
    """
    view = _bytes_of(buf)
    if not 0 <= start <= end <= len(view):
        raise ValueError(f"the range {start}..{end} is not within a buffer of {len(view)} bytes")
    stop = end if before is None else min(before, end)
    data = np.frombuffer(view, np.uint8)
    budget = _PATIENCE * (end - start) + _BLOCK_BYTES
    for low in range(start, stop, _BLOCK_BYTES):
        # Usually there are only zeros, which are detected ten times as fast as candidates. A record that begins in a
        # block may have its magic after the block, and zeros before the magic.
        if not data[low : min(low + _BLOCK_BYTES + _record.MAGIC_AT + len(_MAGIC_BYTES), end)].any():
            continue
        found = _candidates(view, low, min(low + _BLOCK_BYTES, stop), end)
        found = found[_column(view, found + _record.PHYSICAL_OFFSET_AT, ">i8") == found + base]
        headers = Headers(view, found)
        for position, size in zip(found[headers.ok].tolist(), headers.size[headers.ok].tolist(), strict=True):
            budget -= size
            if budget < 0 and size > _PAGE_BYTES:
                continue
            if check_record(view, position, end, base + position, checksum).status == "ok":
                return int(position)
    return None


def whole_runs(buf: ReadableBuffer, stop: int, checksum: Checksum) -> Iterator[Headers | None]:
    """Yield consecutive records that verify and begin in `[0, stop)`, whatever their physical offsets are.

    A new run begins where the next record does not continue the last one, and after some thousand records. Records in
    the body of a record that verifies are not searched for. Yields None for bytes that look like a record, but do not
    verify. Like `find_next` it ignores large candidates after it has read the buffer many times in vain.
    """
    view = _bytes_of(buf)
    data, end, done = np.frombuffer(view, np.uint8), len(view), 0
    budget = _PATIENCE * end
    for low in range(0, stop, _BLOCK_BYTES):
        high = min(low + _BLOCK_BYTES, stop)
        if high <= done or not data[low : high + _record.MAGIC_AT + len(_MAGIC_BYTES)].any():
            continue
        found = _candidates(view, max(low, done), high, end)
        headers = Headers(view, found)
        good = headers.ok & (headers.physical_offset >= 0)
        columns = found[good], headers.size[good], headers.physical_offset[good]
        for position, size, place in zip(*(each.tolist() for each in columns), strict=True):
            if position < done:
                continue
            budget -= size
            if budget < 0 and size > _PAGE_BYTES:
                continue
            if check_record(view, position, end, place, checksum).status != "ok":
                yield None
                continue
            run, done, _ = read_run(view, position, stop, place - position, checksum, _RUN_RECORDS)
            if not len(run):  # a record that this check refuses counts, but ends its run
                run, done = Headers(view, np.array([position])), position + size
            yield run


def check_place(
    buf: ReadableBuffer, position: int, limit: int, physical_offset: int, checksum: Checksum, used: int | None = None
) -> Check:
    """Check the bytes at `buf[position]` as `check_record` does, but do not accept a BLANK before records.
    Nothing is written after a BLANK in its segment, which begins at `buf[0]`. So if a record verifies there, before
    `used` (None: `limit`), the BLANK is damage, unless that record is stale (format#blank)."""
    check = check_record(buf, position, limit, physical_offset, checksum)
    if check.status != "blank":
        return check
    view, base = _bytes_of(buf), physical_offset - position
    first = position + BLANK_BYTES
    later = find_next(view, first, max(first, min(limit, len(view)) if used is None else used), base, checksum)
    if later is None:
        return check
    front = walk(view, 0, position)[0][-1:]
    is_later = bool((np.diff(Headers(view, [*front, later]).store_timestamp_ms) >= 0).all())
    if is_later or _column(view, np.array([position + _record.PHYSICAL_OFFSET_AT]), ">i8")[0] == physical_offset:
        return Check("bad", 0, f"an end-of-segment marker, but there is a whole record at {base + later}", "magic")
    return check
