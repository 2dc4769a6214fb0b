"""Index files: from a key to the physical offsets of its messages (store-format 6).

    index/<yyyyMMddHHmmssSSS, local time>       fixed size, mapped; sorted by name, newest last

Entries come from the dispatcher in log order and go into the newest file; a full file is followed by a new one. What a
file cannot take yet (no room on the disk) waits in memory, so that a slow or full disk never holds up consume queues.
The index only ever suggests: who asks compares topic and key on the record itself.
"""

from __future__ import annotations

import mmap
import os
import threading
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mqstore.clock import Clock
from mqstore.files.filesystem import FileSystem
from mqstore.layout.indexfile import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    IndexHeader,
    check_index,
    file_bytes,
    put_entries,
    query_entries,
)
from mqstore.layout.javahash import index_hash
from mqstore.log.report import Finding

__all__ = ["Index", "IndexFile"]

_MAX_PENDING = 1 << 20
"""Entries kept in memory while the disk is full, before the oldest are given up and counted."""


class IndexFile:
    """One index file and its mapping."""

    __slots__ = ("_fs", "dirty", "fd", "mapping", "path", "writable")

    def __init__(self, path: str, length: int, fs: FileSystem, *, writable: bool) -> None:
        self._fs = fs
        self.path = path
        self.writable = writable
        self.dirty = False
        self.fd = fs.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self.mapping: mmap.mmap = fs.map(self.fd, length, writable=writable)
        except BaseException:
            fs.close(self.fd)
            raise
        if not writable:
            fs.close(self.fd)  # a mapping keeps its file by itself
            self.fd = -1

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def header(self) -> IndexHeader:
        return IndexHeader.decode(self.mapping)

    def entries(self, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """(key hash, physical offset) of all entries, in the order they were put; `count` is the file's capacity."""
        used = min(max(self.header.next_entry, 1), count)
        first = len(self.mapping) - ENTRY_BYTES * (count - 1)
        table = np.frombuffer(self.mapping, ENTRY_DTYPE, used - 1, first)
        return table["key_hash"].astype(np.int32), table["physical_offset"].astype(np.int64)

    def sync(self) -> None:
        if self.dirty and self.fd >= 0:
            self.dirty = False
            try:
                self._fs.fdatasync(self.fd)
            except BaseException:
                self.dirty = True
                raise

    def close(self) -> None:
        if self.fd >= 0:
            self._fs.close(self.fd)
            self.fd = -1


class Index:
    """All index files of a store, oldest first."""

    def __init__(
        self,
        root: Path,
        tmp: Path,
        slots: int,
        entries: int,
        *,
        fs: FileSystem,
        clock: Clock,
        writable: bool,
        file_mode: int,
    ) -> None:
        self._root = str(root)
        self._tmp = str(tmp)
        self.slots = slots
        self.entries_per_file = entries
        self.file_bytes = file_bytes(slots, entries)
        self._fs = fs
        self._clock = clock
        self._writable = writable
        self._file_mode = file_mode
        self._lock = threading.Lock()
        self.files: list[IndexFile] = []
        self._pending: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        self._pending_count = 0
        self.dropped_entries = 0
        """Entries given up because the disk stayed full; `mqstore recover --rebuild index` brings them back."""

    # -- files ------------------------------------------------------------------------------------------------------

    def load(self) -> list[Finding]:
        """Map what is there; a file of another length is reported and left alone."""
        findings = []
        known = {file.name for file in self.files}
        for name, length in self._fs.scandir_files(self._root) if os.path.isdir(self._root) else []:
            if len(name) != 17 or not (name.isascii() and name.isdigit()) or name in known:
                continue
            if length != self.file_bytes:
                detail = f"{length} bytes where an index file of {self.slots} slots has {self.file_bytes}"
                findings.append(Finding("bad_index", f"index/{name}", 0, length, detail))
                continue
            path = os.path.join(self._root, name)
            self.files.append(IndexFile(path, length, self._fs, writable=False))
        self.files.sort(key=lambda file: file.name)
        return findings

    def refresh(self) -> None:
        """Find files that another process has made since, and forget those it has removed."""
        present = set(self._fs.scandir(self._root)) if os.path.isdir(self._root) else set()
        self.files = [file for file in self.files if file.name in present]
        if present - {file.name for file in self.files}:
            self.load()

    def check(self) -> list[Finding]:
        """What is wrong in the files' bytes. That the log's keys are all there is for `verify` to find out."""
        findings = []
        for file in self.files:
            for at, field, detail in check_index(file.mapping, self.slots, self.entries_per_file):
                findings.append(Finding("bad_index", f"index/{file.name}", at, 0, f"{field}: {detail}"))
        return findings

    @property
    def entry_count(self) -> int:
        """Entries in all files."""
        return sum(max(0, file.header.next_entry - 1) for file in self.files)

    @property
    def end_physical_offset(self) -> int:
        """Physical offset of the newest record that has an entry; -1 when none has."""
        for file in reversed(self.files):
            header = file.header
            if header.next_entry > 1:
                return header.end_physical_offset
        return -1

    def _current(self) -> IndexFile:
        """The file to put into; a new one when the newest is full."""
        if self.files:
            file = self.files[-1]
            if file.header.next_entry < self.entries_per_file:
                if not file.writable:
                    self.files[-1] = file = IndexFile(file.path, self.file_bytes, self._fs, writable=True)
                return file
        file = self._create()
        self.files.append(file)
        return file

    def _create(self) -> IndexFile:
        fs = self._fs
        fs.mkdir(self._root, exist_ok=True)
        stamp = int(datetime.fromtimestamp(self._clock.now_ms() / 1000).strftime("%Y%m%d%H%M%S%f")[:17])
        if self.files:
            stamp = max(stamp, int(self.files[-1].name) + 1)  # names sort by age even if the clock stepped back
        path = os.path.join(self._root, f"{stamp:017d}")
        temporary = os.path.join(self._tmp, "index")
        fs.unlink(temporary, missing_ok=True)
        fd = fs.open(temporary, os.O_RDWR | os.O_CREAT, self._file_mode)
        try:
            fs.allocate(fd, self.file_bytes)
        except BaseException:
            fs.close(fd)
            fs.unlink(temporary)
            raise
        fs.close(fd)
        fs.replace(temporary, path)
        fs.sync_directory(self._root)
        return IndexFile(path, self.file_bytes, fs, writable=True)

    # -- entries ----------------------------------------------------------------------------------------------------

    def put(
        self,
        hashes: npt.NDArray[np.int32],
        physical_offsets: npt.NDArray[np.int64],
        store_timestamps_ms: npt.NDArray[np.int64],
    ) -> None:
        """Add entries, in log order. Raises StoreFullError or StoreIOError when a new file is needed and cannot be
        made; the entries then wait and go first the next time."""
        if len(hashes):
            self._pending.append((hashes, physical_offsets, store_timestamps_ms))
            self._pending_count += len(hashes)
        while self._pending_count > _MAX_PENDING and len(self._pending) > 1:
            lost = len(self._pending.pop(0)[0])
            self._pending_count -= lost
            self.dropped_entries += lost
        with self._lock:
            while self._pending:
                hashes, physical, stamps = self._pending[0]
                file = self._current()
                done = put_entries(file.mapping, self.slots, self.entries_per_file, hashes, physical, stamps)
                file.dirty = True
                self._pending_count -= done
                if done == len(hashes):
                    del self._pending[0]
                else:
                    self._pending[0] = (hashes[done:], physical[done:], stamps[done:])

    @property
    def pending(self) -> int:
        """Entries that wait for room on the disk."""
        return self._pending_count

    def query(self, topic: str, key: str, begin_ms: int, end_ms: int, limit: int) -> list[int]:
        """Physical offsets of records that may bear `key`, newest first, at most `limit` (6.4).

        Times are rounded outward by a second: entries count seconds. Other keys of equal hash may be among them.
        """
        found: list[int] = []
        hash_ = index_hash(f"{topic}#{key}")
        with self._lock:
            files = list(self.files)
        for file in reversed(files):
            header = file.header
            if header.next_entry <= 1 or header.begin_timestamp_ms > end_ms or header.end_timestamp_ms < begin_ms - 999:
                continue
            found += query_entries(file.mapping, self.slots, hash_, begin_ms - 999, end_ms, limit - len(found))
            if len(found) >= limit:
                break
        return found

    # -- durability and retention -----------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        return any(file.dirty for file in self.files)

    def sync(self) -> None:
        """Make every entry put so far durable."""
        for file in list(self.files):
            file.sync()

    def full_end_timestamp_ms(self) -> int:
        """End timestamp of the newest full file: what RocketMQ keeps in its checkpoint. 0 when none is full."""
        for file in reversed(self.files):
            header = file.header
            if header.next_entry >= self.entries_per_file:
                return header.end_timestamp_ms
        return 0

    def drop_before(self, min_physical: int) -> int:
        """Delete leading files, never the last, whose newest record lies below `min_physical`; how many (8.4)."""
        dropped = 0
        while len(self.files) > 1 and self.files[0].header.end_physical_offset < min_physical:
            with self._lock:
                file = self.files.pop(0)
            file.close()
            self._fs.unlink(file.path)
            dropped += 1
        if dropped:
            self._fs.sync_directory(self._root)
        return dropped

    def remove(self, files: list[IndexFile]) -> None:
        """Delete `files`, to be built anew."""
        for file in files:
            with self._lock:
                self.files.remove(file)
            file.close()
            self._fs.unlink(file.path)
        if files:
            self._fs.sync_directory(self._root)

    def close(self) -> None:
        for file in self.files:
            file.close()
        self.files = []
