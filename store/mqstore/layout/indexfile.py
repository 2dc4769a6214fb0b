"""The index file: a hash table on disk from `topic#key` to physical offsets (format#index).

    0            40                40 + 4 slots              40 + 4 slots + 20 entries
    | header 40  | slots x i32     | entries x 20            |

    header  0  8 i64 beginTimestamp   store time of the first entry, ms
            8  8 i64 endTimestamp     store time of the last entry, ms
           16  8 i64 beginPhyOffset   physical offset of the first entry
           24  8 i64 endPhyOffset     physical offset of the last entry
           32  4 i32 hashSlotCount    slots in use
           36  4 i32 indexCount       number of the next entry; the first is 1, and 0 in a fresh file means 1
    slot    0  4 i32 newest entry of the chain, 0 = empty
    entry   0  4 i32 keyHash          not negative (format#key-hash); its slot is keyHash % slots
            4  8 i64 physicalOffset
           12  4 i32 timeDiff         whole seconds after beginTimestamp, 0..2147483647
           16  4 i32 prevEntry        the next older entry of the chain, 0 = end

Entry e is at 40 + 4 slots + 20 e. A file does not contain its number of slots: the manifest has it, or it is guessed
from the length.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqstore import arrays as np
from mqstore.errors import FormatError
from mqstore.native import fence, kernel

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


_HEADER: Final = struct.Struct(">qqqqii")
_SLOT: Final = struct.Struct(">i")
_ENTRY: Final = struct.Struct(">iqii")

HEADER_BYTES: Final = _HEADER.size
SLOT_BYTES: Final = _SLOT.size
ENTRY_BYTES: Final = _ENTRY.size

# Positions in the header and in an entry, each derived from the one before.
_BEGIN_TIMESTAMP_AT: Final = 0
_END_TIMESTAMP_AT: Final = _BEGIN_TIMESTAMP_AT + 8
_BEGIN_OFFSET_AT: Final = _END_TIMESTAMP_AT + 8
_END_OFFSET_AT: Final = _BEGIN_OFFSET_AT + 8
_USED_SLOTS_AT: Final = _END_OFFSET_AT + 8
_NEXT_ENTRY_AT: Final = _USED_SLOTS_AT + 4
_ENTRY_HASH_AT: Final = 0
ENTRY_OFFSET_AT: Final = _ENTRY_HASH_AT + 4
_ENTRY_SECONDS_AT: Final = ENTRY_OFFSET_AT + 8
_ENTRY_PREVIOUS_AT: Final = _ENTRY_SECONDS_AT + 4

SLOT_DTYPE: Final = ">i4"

_MAX_I32: Final = 0x7FFF_FFFF
_SECOND_MS: Final = 1000
_DEFAULT_ENTRIES_PER_SLOT: Final = 4  # of the Java broker's defaults and of ours (format#sizes)


@cache
def entry_dtype() -> np.dtype[np.void]:
    """Return the dtype of entries: key_hash, physical_offset, seconds, previous."""
    return np.dtype([("key_hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])


class IndexHeader(NamedTuple):
    """The first 40 bytes of an index file. Times are store times in ms."""

    begin_timestamp_ms: int = 0
    end_timestamp_ms: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    used_slots: int = 0
    next_entry: int = 1

    def encode(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def decode(cls, buf: ReadableBuffer) -> IndexHeader:
        """Read the first 40 bytes of `buf`. An indexCount of 0 reads as 1. Raises FormatError if `buf` is shorter."""
        with memoryview(buf) as view:
            if view.nbytes < HEADER_BYTES:
                raise FormatError(f"an index file has at least {HEADER_BYTES} bytes, not {view.nbytes}", "header", 0)
            # Copied first: `unpack` reads byte after byte, and another process may be writing them.
            header = cls(*_HEADER.unpack(bytes(view[:HEADER_BYTES])))
        return header if header.next_entry else header._replace(next_entry=1)


class IndexProblem(NamedTuple):
    """Fault in an index file: `position` in bytes from its start, and the examined `field`."""

    position: int
    field: str
    detail: str


def file_bytes(slots: int, entries: int) -> int:
    """Return the length of a file of that shape. It has room for `entries - 1`, since entry 0 is never used.

    >>> file_bytes(100_000, 400_000)
    8400040
    """
    return HEADER_BYTES + SLOT_BYTES * slots + ENTRY_BYTES * entries


def slots_entries_from_length(length: int) -> tuple[int, int] | None:
    """Return the (slots, entries) of a file of `length` bytes, or None if no shape fits.

    A guess for stores without a manifest (format#sizes). It assumes four entries a slot. Other shapes may have the same
    length.

    >>> slots_entries_from_length(420_000_040)
    (5000000, 20000000)
    """
    slots, rest = divmod(length - HEADER_BYTES, file_bytes(1, _DEFAULT_ENTRIES_PER_SLOT) - HEADER_BYTES)
    return (slots, slots * _DEFAULT_ENTRIES_PER_SLOT) if slots > 0 and rest == 0 else None


def _check_length(view: memoryview, slots: int, entries: int) -> None:
    if slots < 1 or entries < 1:
        raise ValueError(f"slots and entries must be at least 1, got {slots} and {entries}")
    if view.nbytes < file_bytes(slots, entries):
        raise FormatError(
            f"{view.nbytes} bytes are too few for {slots} slots and {entries} entries", "length", view.nbytes
        )


def put_entries(
    buf: WriteableBuffer,
    slots: int,
    entries: int,
    hashes: np.NDArray[np.integer[Any]] | Sequence[int],
    physical_offsets: np.NDArray[np.integer[Any]] | Sequence[int],
    store_timestamps_ms: np.NDArray[np.integer[Any]] | Sequence[int],
) -> int:
    """Put entries in order until the file is full. Return their number (format#index-put).

    `buf` is the whole file, writable. The three sequences have the same length. The caller leaves out entries that the
    file already has (physical offsets below endPhyOffset). The bytes are those of single puts, except that entry 1 gets
    timeDiff 0 instead of one relative to another file.

    Entries are stored before the header that counts them, and the header before the slots, with a fence between. So a
    reader that loads slot, header and entry in this order never gets the number of a missing entry. Header and slots
    are assigned whole. `pack_into` clears its target first, and a reader in another process could find no entry at all.
    If a signal handler raises in between, header and slots are restored, so that the caller can put the same entries
    again. If it raises after compiled code, which cannot be interrupted, the header counts all entries.

    Raises ValueError for a negative hash or unequal lengths. Raises FormatError for a short buffer or an indexCount
    that is impossible in this shape. Then nothing was written.
    """
    with memoryview(buf) as view:
        _check_length(view, slots, entries)
    header = IndexHeader.decode(buf)
    if not 1 <= header.next_entry <= entries:
        detail = f"indexCount {header.next_entry} in a file of {entries} entries"
        raise FormatError(detail, "indexCount", _NEXT_ENTRY_AT)
    if not len(hashes) == len(physical_offsets) == len(store_timestamps_ms):
        raise ValueError(f"{len(hashes)} hashes, {len(physical_offsets)} offsets, {len(store_timestamps_ms)} times")
    count = min(len(hashes), entries - header.next_entry)
    columns = hashes[:count], physical_offsets[:count], store_timestamps_ms[:count]
    if kernel is not None:
        int64s = (
            array("q", each) if isinstance(each, list) else np.ascontiguousarray(each, np.int64) for each in columns
        )
        kernel.put_entries(buf, slots, header.next_entry, *int64s)
    elif count:
        _put_each(buf, slots, header, *columns)
    return count


def _put_each(
    buf: WriteableBuffer,
    slots: int,
    header: IndexHeader,
    hashes: np.NDArray[np.integer[Any]] | Sequence[int],
    physical_offsets: np.NDArray[np.integer[Any]] | Sequence[int],
    store_timestamps_ms: np.NDArray[np.integer[Any]] | Sequence[int],
) -> None:
    """Put at least one entry, and no more than fit, as `put_entries` does."""
    rows = [*zip(map(int, hashes), map(int, physical_offsets), map(int, store_timestamps_ms), strict=True)]
    if any(not 0 <= key_hash <= _MAX_I32 for key_hash, _, _ in rows):
        raise ValueError("a key hash must be within 0..2147483647")
    _, physical_offset, time = rows[0]
    begin = header
    if header.next_entry <= 1:
        begin = header._replace(begin_timestamp_ms=time, begin_physical_offset=physical_offset)
    opened = 0
    newest: dict[int, int] = {}  # by position of the slot
    stored: dict[int, int] = {}
    number = header.next_entry
    at = HEADER_BYTES + SLOT_BYTES * slots + ENTRY_BYTES * number
    for key_hash, physical_offset, time in rows:
        slot = HEADER_BYTES + SLOT_BYTES * (key_hash % slots)
        previous = newest.get(slot)
        if previous is None:
            (previous,) = _SLOT.unpack_from(buf, slot)
            stored[slot] = previous
            if not 0 < previous <= number:  # empty, or damaged: no entry has this number yet
                previous = 0
                opened += 1
        newest[slot] = number
        seconds = 0
        if begin.begin_timestamp_ms > 0:
            seconds = min(max(0, (time - begin.begin_timestamp_ms) // _SECOND_MS), _MAX_I32)
        _ENTRY.pack_into(buf, at, key_hash, physical_offset, seconds, previous)
        number += 1
        at += ENTRY_BYTES
    after = begin._replace(
        end_timestamp_ms=time,
        end_physical_offset=physical_offset,
        used_slots=_wrapped(begin.used_slots + opened),
        next_entry=number,
    )
    with memoryview(buf) as view:
        try:
            fence()
            view[:HEADER_BYTES] = after.encode()
            fence()
            _link(view, newest)
        except BaseException:
            _link(view, stored)
            view[:HEADER_BYTES] = header.encode()
            raise


def _link(view: memoryview, numbers: Mapping[int, int]) -> None:
    """Point slots, given by their position, to the entries of these numbers."""
    for slot, number in numbers.items():
        view[slot : slot + SLOT_BYTES] = _SLOT.pack(number)


def _wrapped(value: int) -> int:
    """Wrap a counter that damage has set near the limit, as Java does."""
    return (value + 0x8000_0000) % 0x1_0000_0000 - 0x8000_0000


def query_entries(buf: ReadableBuffer, slots: int, key_hash: int, begin_ms: int, end_ms: int, limit: int) -> list[int]:
    """Return physical offsets of entries with this hash and a time in `[begin_ms, end_ms]`, newest first.

    Returns at most `limit`. Entries have whole seconds, so up to 999 ms before `begin_ms` are included. Compare topic,
    key and store time with the record. The caller chooses files by begin and end of their headers.

    A chain ends at 0, at an unused number, at an entry older than `begin_ms`, and where it does not point to an older
    entry. So it ends in any file, however damaged. Raises FormatError if `buf` is shorter than header and slots.
    """
    with memoryview(buf) as view:
        table = HEADER_BYTES + SLOT_BYTES * slots
        if slots < 1 or view.nbytes < table:
            raise FormatError(f"{view.nbytes} bytes are too few for {slots} slots", "length", view.nbytes)
        # The slot is loaded before the header, the reverse of the order in `put_entries`.
        slot = HEADER_BYTES + SLOT_BYTES * (key_hash % slots)
        (number,) = _SLOT.unpack(bytes(view[slot : slot + SLOT_BYTES]))
        fence()
        header = IndexHeader.decode(view)
        last = min(header.next_entry, (view.nbytes - table) // ENTRY_BYTES - 1)
        found: list[int] = []
        if header.next_entry <= 1 or number > last:
            return found
        earliest = begin_ms - (_SECOND_MS - 1)
        while number > 0 and len(found) < limit:
            stored_hash, physical_offset, seconds, previous = _ENTRY.unpack_from(view, table + ENTRY_BYTES * number)
            if seconds < 0:
                break
            if number == 1:
                seconds = 0  # RocketMQ counts the first one from the end of the previous file (format#index-put)
            time = header.begin_timestamp_ms + _SECOND_MS * seconds
            if time < earliest:
                break  # the rest of the chain is even older
            if stored_hash == key_hash and time <= end_ms:
                found.append(physical_offset)
            if previous >= number:
                break
            number = previous
        return found


def check_index(
    buf: ReadableBuffer, slots: int, entries: int, writing: AbstractContextManager[object] | None = None
) -> list[IndexProblem]:
    """Return the faults of a whole index file, an empty list for a file that Java's engine or ours wrote.

    Checks the length, and the header against the entries that it counts. Each slot and entry must point to an older
    entry of the same slot. The first fault of each kind is reported, with their number.

    Does not check the records that entries point to, or the header's two times, since clocks step back. `writing` is
    the lock of a thread that may put entries meanwhile. Held while header and slots are copied, since later entries
    would change both; an entry that the header counts does not change.
    """
    with memoryview(buf) as view:
        length = view.nbytes
    problems: list[IndexProblem] = []
    if length != (wanted := file_bytes(slots, entries)):
        problems.append(IndexProblem(min(length, wanted), "length", f"{length} bytes instead of {wanted}"))
        if length < wanted:
            return problems
    view = memoryview(buf)
    _check_length(view, slots, entries)
    slot_table = np.frombuffer(view, SLOT_DTYPE, slots, HEADER_BYTES)
    entry_table = np.frombuffer(view, entry_dtype(), entries, HEADER_BYTES + SLOT_BYTES * slots)
    with writing or nullcontext():
        header, head = IndexHeader.decode(buf), slot_table.astype(np.int64)
    if not 1 <= header.next_entry <= entries:
        # Without a valid count it is unknown which entries exist.
        detail = f"{header.next_entry} in a file of {entries} entries"
        return [*problems, IndexProblem(_NEXT_ENTRY_AT, "indexCount", detail)]

    table = HEADER_BYTES + SLOT_BYTES * slots
    used = entry_table[1 : header.next_entry]
    number = np.arange(1, header.next_entry)
    key_hash, previous = used["key_hash"].astype(np.int64), used["previous"].astype(np.int64)
    physical_offset = used["physical_offset"].astype(np.int64)

    def report(bad: np.NDArray[np.bool_], start: int, stride: int, field: str, values: np.NDArray[np.int64]) -> None:
        rows = np.flatnonzero(bad)
        if len(rows):
            first = int(rows[0])
            many = f", and {len(rows) - 1} more like it" if len(rows) > 1 else ""
            problems.append(IndexProblem(start + stride * first, field, f"{field} {int(values[first])}{many}"))

    first_entry = table + ENTRY_BYTES
    report(key_hash < 0, first_entry, ENTRY_BYTES, "keyHash", key_hash)
    wrong = physical_offset < 0
    wrong[1:] |= physical_offset[1:] < physical_offset[:-1]
    report(wrong, first_entry + ENTRY_OFFSET_AT, ENTRY_BYTES, "physicalOffset", physical_offset)
    seconds = used["seconds"].astype(np.int64)
    report(seconds < 0, first_entry + _ENTRY_SECONDS_AT, ENTRY_BYTES, "timeDiff", seconds)
    # previous < number makes loops impossible. Equal slots all along a chain make every entry reachable by its key.
    slot = key_hash % slots
    astray = (previous < 0) | (previous >= number)
    linked = np.flatnonzero(~astray & (previous > 0))
    astray[linked] = slot[linked] != slot[previous[linked] - 1]
    report(astray, first_entry + _ENTRY_PREVIOUS_AT, ENTRY_BYTES, "prevEntry", previous)

    newest = np.zeros(slots, np.int64)
    np.maximum.at(newest, slot, number)
    report(head != newest, HEADER_BYTES, SLOT_BYTES, "slot", head)

    if len(used):
        found = (
            (_BEGIN_OFFSET_AT, "beginPhyOffset", header.begin_physical_offset, physical_offset[0]),
            (_END_OFFSET_AT, "endPhyOffset", header.end_physical_offset, physical_offset[-1]),
        )
        problems += [IndexProblem(at, field, f"{field} {value}") for at, field, value, right in found if value != right]
    in_use = int(np.count_nonzero(newest))
    if header.used_slots != in_use:
        detail = f"{header.used_slots}, but {in_use} slots are in use"
        problems.append(IndexProblem(_USED_SLOTS_AT, "hashSlotCount", detail))
    return problems
