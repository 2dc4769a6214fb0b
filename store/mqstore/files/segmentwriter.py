"""The segments of the process that writes a run: creating, filling, syncing, cutting and removing them.

    <directory>/<20 digits>     a segment
    <tmp directory>/<20 digits>.<n>    one being prepared: it gets its full length and its first disk blocks here and is
                                then renamed into place, so that no name in <directory> is ever short (format#manifest)

Rules that keep bytes safe:

* A file is never shortened: cutting is writing zeros, dropping is unlinking. Descriptors are closed, and mappings are
  unmapped, with their last reference, since `sync` may be using one while the segment is retired.
* Bytes written through a mapping have their disk blocks beforehand (format#allocation). So a full disk is an error of
  `create`, `prepare` or `allocate`, and never a SIGBUS. A segment gets its blocks in steps ahead of the writer, which
  double from 1 MiB to a whole segment. So a small store stays small, and a busy writer does not wait.
* The last segment is mapped for writing, and so is the one before it until the next is prepared, since its end may
  still be written. All others are read-only, so that a stray memory write cannot damage bytes that are long durable.

Mappings for writing get MADV_RANDOM, which means folios of one page. On file systems with large folios (xfs, ext4 of
recent kernels) a fault that reads ahead, or a long write, fills the cache with folios of up to megabytes. One byte
stored through a mapping makes the whole folio dirty, so a sync of one record writes the folio. For the same reason
zeros are written page by page (`zero`), and `write` exists. The kernel tracks the changes of `pwrite` by block,
whatever the folio, and the page need not be made writable again after each sync. So it is faster for writers that sync
every record, and it is coherent with the mappings. A long write leaves large folios, but nothing stores to them again.
The kernel rounds down, so the page in which it ends is a separate folio. Large folios take half the time to create, so
a long range that a fast writer will soon fill gets them (`populate`).

The class is long because creating, filling, syncing and removing keep one list of segments and their blocks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from pathlib import Path

from mqstore.errors import MQStoreError, StoreIOError
from mqstore.files.descriptors import File
from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem, SyncNotBegunError, is_not_begun
from mqstore.files.segment import LoadProblem, Segment, segment_name
from mqstore.files.segments import OFFSET_END, SegmentRun
from mqstore.files.system import DONT_NEED, POPULATE_WRITE, advise
from mqstore.files.tmp import new_file, temporary_path
from mqstore.signalsafe import Lock

EXTENDED = "; extended with zeros"
"""Text that `load` adds to the detail of a short last file."""
_PAGE_BYTES = 4096

_LINUX = sys.platform == "linux"
_OPEN_AHEAD = 4
_SCAN_BYTES = 1 << 20
_ZEROS = bytes(_SCAN_BYTES)
_POPULATE_STEP_BYTES = 32 << 20  # per system call: a few ms, so that a thread that must stop can
_LARGE_FOLIOS_BYTES = 8 << 20  # a writer that syncs each record is too slow to need so many
_STEP_BYTES = 1 << 20
_SHARE = 8
"""A step of allocation takes at most this part of the free bytes. A failed one may keep the blocks it got."""


class SegmentWriter(SegmentRun):
    """The segments in one folder, for the one process that changes them.

    `sparse`: files get their length without disk blocks and are never mapped for writing. Only `write` changes them.

    `create`, `write`, `zero` and `drop_from` belong to the thread that appends. `prepare`, `allocate`, `populate`,
    `sync` and `drop_before` may run concurrently in others. Errors are those of `FileSystem`: `StoreFullError` on a
    full disk (and nothing has changed), `ReadOnlyStoreError`, `StoreIOError`.
    """

    _refuses_links = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tmp_directory: str | os.PathLike[str],
        segment_bytes: int,
        *,
        fs: FileSystem = REAL,
        max_mappings: int = 64,
        file_mode: int = FILE_MODE,
        sparse: bool = False,
    ) -> None:
        super().__init__(directory, segment_bytes, fs=fs, max_mappings=max_mappings)
        self._tmp_directory = Path(tmp_directory)
        self._file_mode = file_mode
        self._sparse = sparse
        self._prepare_lock = Lock()
        self._prepared: Segment | None = None
        self._names_changed = 0  # number of files created and removed in the folder, and how many of these are durable
        self._names_synced = 0
        self._folder_lock = Lock()
        self._step = _STEP_BYTES
        self._step_lock = Lock()

    # -- opening ----------------------------------------------------------------------------------------------------

    def load(self) -> list[LoadProblem]:
        """List the folder and repair its end (format#sizes). Return the problems.
        Empty last files are removed, and a short last one is extended with zeros."""
        problems = super().load()
        last = self.last
        for at, problem in reversed([*enumerate(problems)]):
            if problem.kind == "empty_segment" and problem.position >= self.end:
                self._remove(problem.file)
                problems[at] = problem._replace(detail="empty last file removed")
            elif problem.kind == "segment_size" and last is not None and last.start < problem.position < last.end:
                self._extend(last)
                problems[at] = problem._replace(detail=problem.detail + EXTENDED)
        self.sync_folder()
        return problems

    def refresh(self) -> bool:
        """Return False: a writer knows its segments."""
        return False

    def _extend(self, segment: Segment) -> None:
        file = File(self._fs, segment.path, os.O_RDWR)
        self._give_length(file.fd, segment.length)
        self._fs.fdatasync(file.fd)
        segment.length = segment.size

    # -- growing ----------------------------------------------------------------------------------------------------

    def prepare(self, start: int, *, populate_bytes: int = 0) -> None:
        """Prepare the segment that starts at `start` in the tmp folder, so that `create` only renames it.

        For a background thread. One prepared segment is kept. Preparing another one discards it. With `populate_bytes`
        the pages at its start are faulted in (`populate`). All segments but the last count as fully written, and are no
        longer mapped for writing.
        """
        with self._prepare_lock:
            if start in self._by_start or (self._prepared is not None and self._prepared.start == start):
                return
            self._discard_prepared()
            segment = self._make(start)
            if not self._sparse and populate_bytes:
                try:
                    self._map_to_write(segment)
                    self.populate(segment, 0, min(populate_bytes, segment.size))
                except BaseException:
                    self._fs.unlink(segment.path, missing_ok=True)
                    raise
            self._prepared = segment
        for older in self.segments()[:-1]:
            if older.writable:
                self._retire(older)

    def create(self, start: int) -> Segment:
        """Append the segment that starts at `start`, prepared or created now, and return it.
        `start` is a multiple of the size, at or after the end. The name is durable after the next `sync` or
        `sync_folder`."""
        if start % self.segment_bytes or not self.end <= start < OFFSET_END - self.segment_bytes:
            size = self.segment_bytes
            raise ValueError(f"no segment of {size} bytes can start at {start}; the run ends at {self.end}")
        with self._prepare_lock:  # if it is being prepared right now, waiting is the fastest way to get it
            if self._prepared is None or self._prepared.start != start:
                self._discard_prepared()
                self._prepared = self._make(start)
            segment = self._prepared
            path = str(self.directory / segment_name(start))
            try:
                if not self._starts:
                    self._make_folder()
                self._fs.replace(segment.path, path)
            except BaseException:
                self._discard_prepared()
                with contextlib.suppress(OSError, MQStoreError):  # Ctrl-C may come when it already has its name
                    self._fs.unlink(path, missing_ok=True)
                raise
            self._prepared = None
            segment.path = path
        with self._lock:
            self._names_changed += 1
            self._by_start[start] = segment
            self._starts = (*self._starts, start)
            self.last = segment
        for older in self.segments()[-3:-2]:  # unless `prepare` did it
            self._retire(older)
        return segment

    def _make(self, start: int) -> Segment:
        """Create a file of full length in the tmp folder, synced. A failure leaves nothing.
        A name that is renamed before its length is durable could be short after a power cut."""
        fs = self._fs
        path = temporary_path(self._tmp_directory, segment_name(start))
        fs.mkdir(self._tmp_directory, self._folder_mode(), exist_ok=True)
        try:
            file = File(fs, path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._file_mode)
            segment = Segment(start, self.segment_bytes, self.segment_bytes, path)
            segment.allocated = self._give_length(file.fd, self._affordable(0))
            fs.fdatasync(file.fd)
        except BaseException:
            fs.unlink(path, missing_ok=True)
            raise
        return segment

    def _give_length(self, fd: int, allocated: int) -> int:
        """Give a file its full length, and blocks for `allocated` bytes. Return how many bytes have them."""
        if self._sparse:
            self._fs.truncate_sparse(fd, self.segment_bytes)
            return 0
        return self._fs.allocate(fd, self.segment_bytes, allocated)

    def _affordable(self, allocated: int) -> int:
        """Return the end of the next allocation step of a segment with blocks for `allocated` bytes."""
        free = self._fs.free_bytes(self._tmp_directory)
        step = min(self._step, max(_PAGE_BYTES, free // _SHARE // _PAGE_BYTES * _PAGE_BYTES))
        return min(self.segment_bytes, allocated + step)

    def allocate(self, segment: Segment, needed: int) -> None:
        """Give a segment blocks for at least its first `needed` bytes, and for a step ahead.
        Raises StoreFullError. Then nothing has changed. Does nothing if the bytes have their blocks."""
        with self._step_lock:
            if needed <= segment.allocated:
                return
            stop = max(needed, self._affordable(segment.allocated))
            file = self.file(segment)
            self._fs.allocate_more(file.fd, segment.allocated, stop)
            segment.allocated = max(segment.allocated, stop)
            self._step = min(2 * self._step, max(self.segment_bytes, _STEP_BYTES))

    def allocated_beyond(self, offset: int) -> int:
        """Return how many bytes of disk blocks the segment has beyond `offset`, the end of the log.
        A last segment after it is being filled by a bulk append."""
        last = self.last
        return 0 if last is None or last.start > offset else max(0, last.start + last.allocated - offset)

    def _make_folder(self) -> None:
        # Synced even if it exists, since its creator may have been killed before it was durable. Once it has a segment
        # it is durable.
        self._fs.mkdir(self.directory, self._folder_mode(), exist_ok=True)
        self._fs.sync_directory(self.directory.parent)

    def _folder_mode(self) -> int:
        """Return the mode by which all who may read the files may enter their folder."""
        return self._file_mode | (self._file_mode & 0o444) >> 2

    def _discard_prepared(self) -> None:
        stale, self._prepared = self._prepared, None
        if stale is not None:
            self._fs.unlink(stale.path, missing_ok=True)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def mapping(self, segment: Segment) -> mmap.mmap:
        """Return the mapping of a segment, writable if it is the last one and the run is not sparse."""
        mapping = segment.mapping
        if mapping is not None and segment.writable:
            return mapping
        with self._lock:
            if segment is self.last and not self._sparse:
                self._mapped.pop(segment.start, None)
                self._map_to_write(segment)
            return self._mapping_of(segment)

    def _map_to_write(self, segment: Segment) -> None:
        file = File(self._fs, segment.path, os.O_RDWR)
        mapping = self._fs.map(file.fd, segment.length, writable=True)
        if hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)
        segment.mapping = mapping
        segment.writable = True

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write `data`, a buffer of single bytes, at `offset` within one segment, by a system call.
        The page cache has it on return, and mappings show it. It is the way to write to sparse runs, and the faster one
        before a sync (see the module). Raises KeyError without a segment, ValueError if `data` crosses its end."""
        segment = self.last
        if segment is None or not segment.start <= offset:
            segment = self._by_start[offset - offset % self.segment_bytes]
        if offset + len(data) > segment.end:
            raise ValueError(f"{len(data)} bytes at {offset} cross the end of {segment!r}")
        file = self.file(segment)
        self._fs.pwrite(file.fd, data, offset - segment.start)

    def write_back(self, offset: int) -> None:
        """Start writing back the segment of `offset`, as `FileSystem.write_back` does."""
        segment = self.find(offset)
        if segment is not None:
            file = self.file(segment)
            self._fs.write_back(file.fd)

    def file(self, segment: Segment) -> File:
        """Return a descriptor of the segment, open for as long as it is referred to.
        The run keeps those of the two segments that are written to."""
        file = segment.file
        if file is not None:
            return file
        with self._lock:
            file = segment.file or File(self._fs, segment.path, os.O_RDWR)
            if segment.start in self._starts[-2:]:
                segment.file = file
            return file

    def populate(self, segment: Segment, position: int, length: int) -> bool:
        """Fault in the pages of [position, position + length) of a segment for writing, ahead of the writer.
        Pages without disk blocks are left out. Changes no byte, and other threads run meanwhile. Returns False if this
        did nothing: not mapped for writing, or not supported by the system. Then the writer handles the faults."""
        with self._lock:
            mapping = segment.mapping if segment.writable else None
        if mapping is None:
            return False
        begin = position - position % mmap.PAGESIZE
        end = min(position + length, segment.allocated)
        if end - begin >= _LARGE_FOLIOS_BYTES and hasattr(mmap, "MADV_NORMAL"):
            # Not by `advise`, which lets other threads run: with a busy writer it takes milliseconds to continue.
            mapping.madvise(mmap.MADV_NORMAL, begin, end - begin)
        for step in range(begin, end, _POPULATE_STEP_BYTES):
            if not advise(mapping, step, min(_POPULATE_STEP_BYTES, end - step), POPULATE_WRITE):
                return False
        return begin < end

    def sync(self, start: int, end: int) -> None:
        """Make the bytes [start, end) durable, and the names of the segments that contain them.

        One fdatasync a segment. With the kernel's own list of dirty pages it is faster than naming the range
        (RWF_DSYNC, msync), which must walk or copy it. An error except `SyncNotBegunError` is final (format#flush):
        never call again.
        """
        last = self.last
        if (
            _LINUX
            and last is not None
            and last.start <= start < end <= last.end
            and (file := last.file) is not None
            and self._names_synced == self._names_changed
        ):
            # Every waiting put takes this branch. After the pause of a sync the caches are cold and each call counts.
            self._fs.fdatasync(file.fd)
        elif start < end:
            self._sync_many(start, end)

    def _sync_many(self, start: int, end: int) -> None:
        wanted = [segment for segment in self.segments() if segment.end > start and segment.start < end]
        try:
            # Open the segments that a put may leave unsynced, and no more: a recovery syncs all, one by one.
            opened = {segment.start: self._file_to_sync(segment) for segment in wanted[:_OPEN_AHEAD]}

            def sync(segment: Segment) -> None:
                if not _LINUX:
                    # Elsewhere a sync of the file need not include stores through a mapping.
                    mapping = segment.mapping
                    if mapping is not None and segment.writable:
                        mapping.flush()
                file = opened.pop(segment.start, None) or self._file_to_sync(segment)
                if file is not None:
                    self._fs.fdatasync(file.fd)

            self._fs.sync_each(sync, wanted)
            self.sync_folder()
        except StoreIOError as error:
            if not is_not_begun(error):
                raise
            raise SyncNotBegunError(error.errno or 0, error.strerror or "", error.filename, error.operation) from error

    def _file_to_sync(self, segment: Segment) -> File | None:
        """Return the segment's descriptor, or None if it was dropped meanwhile."""
        try:
            return self.file(segment)
        except FileNotFoundError:
            if self._by_start.get(segment.start) is segment:
                raise
            return None

    def sync_folder(self) -> None:
        """Make the set of segments durable. Makes no call if nothing changed."""
        with self._folder_lock:  # a second caller must not return before the first one is done
            changed = self._names_changed
            if self._names_synced != changed:
                self._fs.sync_directory(self.directory)
                self._names_synced = changed  # not the present value: a name may have been added during the sync

    # -- cutting ----------------------------------------------------------------------------------------------------

    def zero(self, from_offset: int) -> int:
        """Write zeros from `from_offset` to the end of its segment and sync. Return how many were written.

        Only pages with other bytes are written, and of the first page only the part from `from_offset` on. Always
        synced, since the zeros found may be those of a process that was killed before its sync (format#zeros). After
        the last segment there is nothing to do.
        """
        segment = self.find(from_offset)
        if segment is None:
            return 0
        fs = self._fs
        file = File(fs, segment.path, os.O_RDWR)
        if sys.platform == "linux":
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead, no large folios: see the module
        written = 0
        position = from_offset - segment.start
        while position < segment.length:
            # Up to a whole multiple, so that all but the first chunk are aligned to pages.
            wanted = min(_SCAN_BYTES - position % _SCAN_BYTES, segment.length - position)
            chunk = fs.pread(file.fd, wanted, position)
            if not chunk:
                break  # shorter than it was: there is nothing to zero
            if chunk != (_ZEROS if len(chunk) == len(_ZEROS) else bytes(len(chunk))):
                at = 0
                while at < len(chunk):
                    page = chunk[at : at + _PAGE_BYTES - (position + at) % _PAGE_BYTES]
                    zeros = bytes(len(page))
                    if page != zeros:
                        fs.pwrite(file.fd, zeros, position + at)
                        written += len(page)
                    at += len(page)
            position += len(chunk)
        fs.fdatasync(file.fd)
        return written

    def own(self, offset: int) -> None:
        """Give this run a copy of the file at `offset` if it has a second name, as in a snapshot.
        Call it before a cut, while a store is opened: no mapping exists yet that will be written through."""
        segment, fs = self.find(offset), self._fs
        if segment is None or fs.stat(segment.path).st_nlink < 2:
            return
        tmp, name = self._tmp_directory, segment_name(segment.start)
        source = File(fs, segment.path, os.O_RDONLY)
        found = fs.stat(source.fd)
        fs.mkdir(tmp, self._folder_mode(), exist_ok=True)
        with new_file(fs, tmp, name, segment.path, self._file_mode) as target:
            fs.truncate_sparse(target, found.st_size)
            fs.copy(source.fd, target, found.st_size)
            fs.take_after(target, found)
            fs.fdatasync(target)
        fs.sync_directory(self.directory)
        with self._lock:
            self._let_go(segment)

    def finish(self, offset: int) -> None:
        """Prepare the run to continue at `offset`: extend its segment to full length, remove empty files after it."""
        for segment in reversed(self._list([])):
            if segment.start >= offset and segment.length == 0:
                self._remove(segment.path)
        self.sync_folder()
        last = self.find(offset)
        if last is not None and last.length < last.size:
            with self._lock:
                self._let_go(last)  # a mapping is as long as the file was
            self._extend(last)

    def drop_from(self, offset: int) -> list[str]:
        """Remove all segments that start at or after `offset`, and return their names. Durable on return.
        Call it while a store is opened. After a crash in between, the next opening ends the log at `offset`, too."""
        # The last first: a Java broker that opens the store after such a crash finds no gap.
        return self._drop([segment for segment in self.segments() if segment.start >= offset][::-1])

    def drop_before(self, offset: int) -> list[str]:
        """Remove all segments that end at or before `offset`, but never the last, and return their names.
        The first one is removed first. Durable on return. Views of them stay valid, and their space is freed with the
        last view."""
        return self._drop([segment for segment in self.segments()[:-1] if segment.end <= offset])

    def _drop(self, doomed: list[Segment]) -> list[str]:
        removed = []
        for segment in doomed:
            try:
                with self._lock:  # a reader that finds a segment in the list but no file would treat that as damage
                    before = self.segments()
                    self._set([other for other in before if other is not segment])
                    try:
                        self._remove(segment.path)
                    except BaseException:
                        if self._fs.exists(segment.path):
                            self._set(before)
                        raise
                    removed.append(segment_name(segment.start))
                    self._let_go(segment)
            finally:
                # One by one: of names removed together a power cut may leave any, and a gap looks like the end.
                self.sync_folder()
        return removed

    def _remove(self, path: str) -> None:
        """Remove a name of the folder, durable with the next `sync_folder`."""
        self._fs.unlink(path, missing_ok=True)
        self._names_changed += 1

    def close(self) -> None:
        """Drop all mappings and descriptors, and remove a prepared segment. Syncs nothing."""
        with self._prepare_lock:
            self._discard_prepared()
        super().close()

    def _retire(self, segment: Segment) -> None:
        """Map this segment read-only at its next use."""
        with self._lock:
            segment.file = None
            mapping = segment.mapping
            if mapping is None or not segment.writable:
                return
            if not _LINUX:
                mapping.flush()  # its later sync could not (see `_sync_many`)
            segment.mapping = None
            segment.writable = False
        # Unmapping thousands of pages takes milliseconds, in which Python lets no other thread run. So empty it before
        # the last reference goes. Dirty pages stay dirty, and a view that is still held gets its pages again.
        advise(mapping, 0, segment.length, DONT_NEED)
