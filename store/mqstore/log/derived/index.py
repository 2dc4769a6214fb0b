"""Index files: from a key to the physical offsets of its messages (format#index).

    index/<yyyyMMddHHmmssSSS, local time>       fixed size, mapped; sorted by name, newest last

Entries come from the dispatcher in log order and are put into the newest file. Entries without disk space wait in
memory, so that a slow or full disk never delays consume queues. The index only suggests records (format#index-query).
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import takewhile
from typing import TYPE_CHECKING

from mqstore import arrays as np
from mqstore.files.tmp import new_file
from mqstore.layout.indexfile import (
    ENTRY_BYTES,
    HEADER_BYTES,
    SLOT_BYTES,
    SLOT_DTYPE,
    IndexHeader,
    check_index,
    entry_dtype,
    file_bytes,
    put_entries,
    query_entries,
)
from mqstore.layout.javahash import index_hash
from mqstore.log.recovery.report import Finding
from mqstore.native import fence
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.log.directory.store_files import StoreParts

    _Ints = np.NDArray[np.int64] | Sequence[int]
    _Entries = tuple[np.NDArray[np.int32] | Sequence[int], _Ints, _Ints]
    """Entries as (key hashes, physical offsets, store times): arrays for many, lists for few."""

_MAX_MAPPED = 16
_MAX_UNSYNCED = 2
"""Maximum number of files open for writing. A full one keeps its descriptor until it is synced."""
_MAX_PENDING = 1 << 20
"""Maximum number of entries that wait in memory on a full disk. Beyond it the oldest are dropped."""

_STEP_BYTES = 1 << 16
"""Step in which entries get their disk blocks. Slots get theirs at creation, because on tmpfs even reading a hole of a
mapped file allocates a block."""


class _Mapped:
    """Files mapped for reading. Beyond the maximum, the one mapped first is unmapped."""

    def __init__(self) -> None:
        self._files: deque[IndexFile] = deque()
        self._lock = Lock()

    def add(self, file: IndexFile) -> None:
        with self._lock:
            self._files.append(file)
            while len(self._files) > _MAX_MAPPED:
                self._files.popleft().unmap()

    def clear(self) -> None:
        with self._lock:
            while self._files:
                self._files.popleft().unmap()


class IndexFile:
    """Index file, mapped while it is written or read.
    The file that is being written stays mapped. Others are mapped when they are read, and only few at a time. There may
    be thousands, and a mapping may cost a descriptor."""

    def __init__(self, path: str, index: Index, *, writable: bool) -> None:
        self._fs, self._length, self._entries = index.fs, index.file_bytes, index.entries_per_file
        self._mapped = index.mapped
        self._mapping: mmap.mmap | None = None
        self._final_header: IndexHeader | None = None
        self._order: tuple[int, bool] | None = None  # number of entries, and True if they ascend
        self._allocated = 0  # bytes known to have disk blocks
        self.path = path
        self.writable = writable
        self.dirty = False
        self.fd = -1
        if writable:
            self.fd = self._fs.open(path, os.O_RDWR)
            try:
                self._mapping = self._fs.map(self.fd, self._length, writable=True)
            except BaseException:
                self.close()
                raise

    def allocate(self, count: int) -> None:
        """Reserve disk blocks for the next `count` entries. Raises StoreFullError."""
        number = min(self.header.next_entry + count, self._entries)
        needed = self._length - ENTRY_BYTES * (self._entries - number)
        if needed > self._allocated:
            stop = min(needed + _STEP_BYTES, self._length)
            self._fs.allocate_more(self.fd, self._allocated, stop)
            self._allocated = stop

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def mapping(self) -> mmap.mmap:
        """Mapping of the whole file. Raises FileNotFoundError if another process's retention removed it."""
        mapping = self._mapping
        if mapping is None:
            with self._fs.opened(self.path, os.O_RDONLY) as fd:
                mapping = self._fs.map(fd, self._length, writable=False)
            self._mapping = mapping
            self._mapped.add(self)
        return mapping

    def unmap(self) -> None:
        """Release a mapping for reading. Code that still reads through it keeps it."""
        if not self.writable:
            self._mapping = None

    @property
    def header(self) -> IndexHeader:
        header = self._final_header
        if header is None:
            header = IndexHeader.decode(self.mapping)
            while not self.writable and header != (again := IndexHeader.decode(self.mapping)):
                header = again  # another process was in the middle of writing it
            fence()  # load the header before the entries that it counts
            if header.next_entry >= self._entries and not self.writable:
                self._final_header = header  # a full file does not change any more
        return header

    def places(self) -> np.NDArray[np.int64]:
        """Return the physical offset of each entry, in put order."""
        return self._table()["physical_offset"].astype(np.int64)

    def between(
        self, used: int, low: int, high: int
    ) -> tuple[np.NDArray[np.int64], np.NDArray[np.int32], np.NDArray[np.int64], np.NDArray[np.int64]]:
        """Return (number, key hash, physical offset, timeDiff) of the entries of records in `[low, high]`.
        They are in put order, and among the first `used`. Numbers begin with 0."""
        table = self._table()[:used]
        places = table["physical_offset"]
        if self._ascends(places):
            numbers = np.arange(bisect_left(places, low), bisect_right(places, high))
            some = table[numbers[0] : numbers[-1] + 1] if len(numbers) else table[:0]
        else:
            numbers = np.flatnonzero((places >= low) & (places <= high))
            some = table[numbers]
        hashes, found = some["key_hash"].astype(np.int32), some["physical_offset"].astype(np.int64)
        return numbers, hashes, found, some["seconds"].astype(np.int64)

    def _ascends(self, places: np.NDArray[np.int64]) -> bool:
        """Return True if entries are in the order of their records, as in every undamaged file."""
        if self._order is None or self._order[0] != len(places):
            self._order = len(places), not len(places) or bool((places[1:] >= places[:-1]).all())
        return self._order[1]

    def lies_outside(self, low: int, high: int) -> bool:
        """Return True if the ends of the file show that it has no entry of a record in `[low, high]`.
        Returns False if header and entries disagree about the ends, since any entry between them may match."""
        if self.header.next_entry <= 1:
            return True
        span = self.span()
        return span is not None and (span[0] > high or span[1] < low)

    def span(self) -> tuple[int, int] | None:
        """Return the physical offsets of the first and the last entry.
        Returns None without entries, or if header and entries disagree."""
        header, table = self.header, self._table()
        if not len(table):
            return None
        begin, end = table["physical_offset"][[0, -1]].tolist()
        agree = (begin, end) == (header.begin_physical_offset, header.end_physical_offset)
        return (begin, end) if agree else None

    def _table(self) -> np.NDArray[np.void]:
        used = min(max(self.header.next_entry, 1), self._entries)
        first = len(self.mapping) - ENTRY_BYTES * (self._entries - 1)
        return np.frombuffer(self.mapping, entry_dtype(), used - 1, first)

    def sync(self) -> None:
        if self.dirty and self.fd >= 0:
            self.dirty = False
            try:
                self._fs.fdatasync(self.fd)
            except BaseException:
                self.dirty = True
                raise

    def close(self) -> None:
        self._mapping = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._fs.close(fd)


class Index:
    """Index files of a store, oldest first."""

    def __init__(self, parts: StoreParts, *, writable: bool) -> None:
        self._parts = parts
        self._root = str(parts.root / "index")
        self.slots = parts.manifest.index_slots
        self.entries_per_file = parts.manifest.index_entries
        self.file_bytes = file_bytes(self.slots, self.entries_per_file)
        self.fs = parts.fs
        self._writable = writable
        self.mapped = _Mapped()
        self._lock = Lock()
        self._sync_lock = Lock()
        self.files: list[IndexFile] = []
        self._pending: list[_Entries] = []
        self._begun: tuple[IndexFile, int] | None = None
        """File and number of the first waiting entry, while the waiting entries are being put."""
        self._end = 0
        """Entries of records below this physical offset have been put."""
        self.dropped_entries = 0
        """Number of entries dropped while the disk was full. `mqstore recover --rebuild index` restores them."""

    # -- files ------------------------------------------------------------------------------------------------------

    def load(self) -> list[Finding]:
        """List the index files. Report a file of another length, and leave it alone."""
        findings = []
        known = {file.name for file in self.files}
        for name, length in self.fs.scandir_files(self._root) if os.path.isdir(self._root) else []:
            if len(name) != 17 or not (name.isascii() and name.isdigit()) or name in known:
                continue
            if length != self.file_bytes:
                detail = f"the file has {length} bytes, an index file of {self.slots} slots has {self.file_bytes}"
                findings.append(Finding("bad_index", f"index/{name}", 0, length, detail))
                continue
            path = os.path.join(self._root, name)
            self.files.append(IndexFile(path, self, writable=False))
        self.files.sort(key=lambda file: file.name)
        return findings

    def refresh(self) -> None:
        """Find files that another process has created since, and forget files it has removed."""
        present = set(self.fs.scandir(self._root)) if os.path.isdir(self._root) else set()
        self.files = [file for file in self.files if file.name in present]
        if present - {file.name for file in self.files}:
            self.load()

    def headers(self) -> Iterator[tuple[IndexFile, IndexHeader]]:
        """Yield the files and their headers. Skip files that another process's retention has removed."""
        for file in self.files:
            try:
                header = file.header
            except FileNotFoundError:
                continue
            yield file, header

    def check(self, *, live: bool = False) -> list[Finding]:
        """Return findings about the bytes of the files. `verify` checks whether all keys of the log have entries.
        With `live` another process may be filling the newest file, which is then not checked."""
        return [finding for file in self.files for finding in self.check_file(file, live=live)]

    def check_file(self, file: IndexFile, *, live: bool = False) -> list[Finding]:
        """Return the findings of `check` for one file. A file that another process's retention removed has none."""
        try:
            if live and not self._writable and file.header.next_entry < self.entries_per_file:
                return []  # slots, entries and header are never read at the same time
            mapping = file.mapping
        except FileNotFoundError:
            return []
        problems = check_index(mapping, self.slots, self.entries_per_file, self._lock)
        return [Finding("bad_index", f"index/{file.name}", at, 0, f"{field}: {text}") for at, field, text in problems]

    @property
    def end_physical_offset(self) -> int:
        """Physical offset of the newest record that has an entry, or -1 if there is none."""
        for file in reversed(self.files):
            header = file.header
            if header.next_entry > 1:
                return header.end_physical_offset
        return -1

    def _current(self) -> tuple[IndexFile, int]:
        """Return the file to put into, and the number of its next entry. A full file is followed by a new one."""
        if self.files:
            file = self.files[-1]
            number = file.header.next_entry
            if number < self.entries_per_file:
                if not file.writable:
                    self.files[-1] = file = IndexFile(file.path, self, writable=True)
                return file, number
        if len(self.files) >= _MAX_UNSYNCED and self.files[-_MAX_UNSYNCED].writable:
            self.sync()
        file = self._create()
        self.files.append(file)
        return file, file.header.next_entry

    def _create(self) -> IndexFile:
        fs = self.fs
        if not self.files:
            # Synced even if it exists, since its creator may have been killed before the sync.
            fs.mkdir(self._root, exist_ok=True)
            fs.sync_directory(os.path.dirname(self._root))
        stamp = int(datetime.fromtimestamp(self._parts.clock.now_ms() / 1000).strftime("%Y%m%d%H%M%S%f")[:17])
        if self.files:
            stamp = max(stamp, int(self.files[-1].name) + 1)  # names sort by age even if the clock stepped back
        path = os.path.join(self._root, f"{stamp:017d}")
        with new_file(fs, self._parts.root / "tmp", "index", path, self._parts.config.file_mode) as fd:
            fs.allocate(fd, self.file_bytes, HEADER_BYTES + SLOT_BYTES * self.slots)
            fs.fdatasync(fd)  # before the rename: a power cut must not leave a shorter file with this name
        fs.sync_directory(self._root)
        return IndexFile(path, self, writable=True)

    # -- entries ----------------------------------------------------------------------------------------------------

    def put(
        self,
        hashes: np.NDArray[np.int32] | Sequence[int],
        physical_offsets: np.NDArray[np.int64] | Sequence[int],
        store_timestamps_ms: np.NDArray[np.int64] | Sequence[int],
        *,
        end: int,
    ) -> None:
        """Add the entries of all records below the physical offset `end`, in log order.

        Entries of records below the `end` of an earlier call are skipped, since an interrupted pass is repeated.
        Raises StoreFullError or StoreIOError if a new file is needed and cannot be created. The entries then wait for
        the next call.
        """
        if len(hashes) and physical_offsets[0] < self._end:
            begin = bisect_left(physical_offsets, self._end)
            hashes, physical_offsets = hashes[begin:], physical_offsets[begin:]
            store_timestamps_ms = store_timestamps_ms[begin:]
        if len(hashes):
            # No call between these two lines: a signal handler cannot raise there.
            self._pending += ((hashes, physical_offsets, store_timestamps_ms),)
            self._end = end
        while len(self._pending) > 1 and self.pending > _MAX_PENDING:
            self._begun = None
            self.dropped_entries += len(self._pending.pop(0)[0])
        self.put_pending()

    def put_pending(self) -> None:
        """Put the entries that wait. Raises the errors of `put`."""
        with self._lock:
            while self._pending:
                hashes, physical, stamps = self._pending[0]
                count = len(hashes)
                if self._begun is None:
                    self._begun = self._current()
                    file, _ = self._begun
                    file.dirty = True
                    file.allocate(count)
                    done = put_entries(file.mapping, self.slots, self.entries_per_file, hashes, physical, stamps)
                else:  # a signal handler raised in the lines above, so the entries may be in the file
                    file, number = self._begun
                    done = file.header.next_entry - number
                # No call from here on: a signal handler cannot raise.
                if done == count:
                    del self._pending[0]
                else:
                    self._pending[0] = (hashes[done:], physical[done:], stamps[done:])
                self._begun = None

    @property
    def pending(self) -> int:
        """Number of entries that wait for disk space."""
        return sum(len(hashes) for hashes, _, _ in list(self._pending)) if self._pending else 0

    def query(self, topic: str, key: str, begin_ms: int, end_ms: int, limit: int) -> list[int]:
        """Return the physical offsets of records that may have `key`, newest first (format#index-query).

        Returns at most `limit`. Times are rounded outward by a second, since entries count seconds. Records with other
        keys of the same hash may be included.
        """
        found: list[int] = []
        hash_ = index_hash(f"{topic}#{key}")
        with self._lock:
            files = list(self.files)
        for file in reversed(files):
            try:
                header, mapping = file.header, file.mapping
            except FileNotFoundError:  # another process's retention removed it
                continue
            times = (header.begin_timestamp_ms, header.end_timestamp_ms)  # unordered if the clock was set back
            if header.next_entry <= 1 or min(times) > end_ms or max(times) < begin_ms - 999:
                continue
            found += query_entries(mapping, self.slots, hash_, begin_ms, end_ms, limit - len(found))
            if len(found) >= limit:
                break
        return found

    # -- durability and retention -----------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        return any(file.dirty for file in self.files)

    def sync(self) -> None:
        """Make every entry put so far durable."""
        with self._sync_lock:  # the dispatcher retires files, the flusher may be syncing the same
            files = list(self.files)
            for file in files:
                file.sync()
            for file in files[:-1]:
                if file.writable and not file.dirty:  # it is full and synced
                    file.writable = False
                    file.close()

    def sync_all(self) -> None:
        """Make every file and its name durable, also files of a killed process."""
        for file in list(self.files):
            with self.fs.opened(file.path, os.O_RDONLY) as fd:
                self.fs.fdatasync(fd)
        if self.files:
            self.fs.sync_directory(self._root)
            self.fs.sync_directory(os.path.dirname(self._root))

    def is_ahead(self, file: IndexFile) -> bool:
        """Return True if a slot points to an entry that the header does not count.
        Then a power cut lost the header's page, and with it the chain of that slot."""
        table = np.frombuffer(file.mapping, SLOT_DTYPE, self.slots, HEADER_BYTES)
        return bool((table >= max(1, file.header.next_entry)).any())

    def full_end_timestamp_ms(self) -> int:
        """Return the end timestamp of the newest full file, as in RocketMQ's checkpoint, or 0 without one."""
        for file in reversed(self.files):
            header = file.header
            if header.next_entry >= self.entries_per_file:
                return header.end_timestamp_ms
        return 0

    def drop_before(self, min_physical: int) -> int:
        """Delete the leading files whose newest record is below `min_physical`. Return their number.
        The last file is never deleted."""
        old = [*takewhile(lambda file: file.header.end_physical_offset < min_physical, self.files[:-1])]
        self.remove(old)
        return len(old)

    def remove(self, files: list[IndexFile]) -> None:
        """Delete `files`."""
        for file in files:
            with self._lock:
                self.files.remove(file)
            file.close()
            self.fs.unlink(file.path)
        if files:
            self.fs.sync_directory(self._root)

    def close(self) -> None:
        for file in self.files:
            file.close()
        self.files = []
        self.mapped.clear()
