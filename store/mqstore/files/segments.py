"""Runs of fixed-size segments: a folder of files that together hold one endless stream of bytes (format#sizes).

    <directory>/<20 digits>     the offset in the stream of the file's first byte, a multiple of the segment size
    <tmp directory>/<20 digits>.<n>    one being prepared: it gets its full length and its disk blocks here and is then
                                renamed into place, so that no name in <directory> is ever short (format#manifest)

Knows nothing of what the bytes mean, how far they are written, or when to sync; it knows how to keep them safe:

* A file is never shortened and a mapping never closed, because a view may still look through it (here or in another
  process): cutting is writing zeros, dropping is unlinking, and unmapping is left to the last reference. The same
  goes for descriptors: `sync` may be using one while the segment is retired.
* What is written through a mapping has its disk blocks beforehand, so that a full disk is an error of `create` or
  `prepare` and never a SIGBUS.
* The last segment of a writer is mapped for writing, and the one before it until the next is prepared, for its end
  may still be written; all others read-only, so that a stray store can't damage what was long durable.

Why the mappings for writing are told MADV_RANDOM: on file systems with large folios (xfs, ext4 of recent kernels) a
fault that reads ahead, or a long write, fills the cache with folios of up to megabytes, and one byte stored through a
mapping makes the whole folio dirty, so that a sync of one record writes all of it. Random means folios of one page.
For the same reason zeros are written page by page (`zero`), and `write` exists: the kernel tracks by block what
`pwrite` changes, whatever the folio, and the page needn't be made writable again after each sync, so that it is the
faster way in for writers that sync every record. It is coherent with the mappings. A long write leaves large
folios, which nobody stores to again: the kernel rounds down, so the page it ends in is a folio of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from mqstore.errors import MQStoreError, StoreIOError
from mqstore.files.descriptors import File
from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem, SyncNotBegunError, is_not_begun
from mqstore.files.segment import LoadProblem, Segment, segment_name, segment_start
from mqstore.files.tmp import new_file, temporary_path

__all__ = ["EXTENDED", "SegmentRun"]

EXTENDED = "; extended with zeros"
"""What `load` adds to the detail of a short last file, as a writer."""
_PAGE_BYTES = 4096

_LINUX = sys.platform == "linux"
_OPEN_AHEAD = 4
_OFFSET_END = 1 << 63  # offsets are i64; 20 digits could say more
_SCAN_BYTES = 1 << 20
_ZEROS = bytes(_SCAN_BYTES)
_POPULATE_STEP_BYTES = 32 << 20  # one system call's worth: a few ms, so that a thread that must stop can


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, unknown to the mmap module
_DONT_NEED = 4  # MADV_DONTNEED


def _find_madvise() -> Callable[[mmap.mmap, int, int, int], bool]:
    """madvise by way of ctypes, which lets other threads run meanwhile (mmap.madvise does not)."""

    def cannot(mapping: mmap.mmap, position: int, length: int, advice: int) -> bool:
        return False

    if sys.platform != "linux":
        return cannot
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):  # a static interpreter
        return cannot
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int

    def advise(mapping: mmap.mmap, position: int, length: int, advice: int) -> bool:
        anchor = ctypes.c_char.from_buffer(mapping)  # exports the buffer: the mapping stays while this lives
        while True:
            if madvise(ctypes.addressof(anchor) + position, length, advice) == 0:
                return True
            if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
                return False

    return advise


_madvise = _find_madvise()


class SegmentRun:
    """The segments in one folder, as a stream with a beginning and an end.

    `segment_bytes`: size of each file. `writable`: whether this process is the writer; a reader's calls of what
    changes anything are AssertionError. `sparse`: files get their length without disk blocks and are never mapped for
    writing, only `write` changes them. `max_mappings`: how many read-only mappings are kept, the last used first.

    Any thread may find, map and read. `create`, `write`, `zero` and `drop_from` belong to the one that appends;
    `prepare`, `populate`, `sync` and `drop_before` may run beside it in others. Errors are those of `FileSystem`:
    `StoreFullError` when there is no room (and nothing has changed), `ReadOnlyStoreError`, `StoreIOError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = SegmentRun(Path(folder) / "log", Path(folder) / "tmp", 4096, writable=True)
    ...     segment = run.create(0)
    ...     run.mapping(segment)[10:15] = b"hello"
    ...     run.sync(10, 15)
    ...     run.write(15, b" world")
    ...     run.mapping(segment)[10:21], run.min_offset, run.end
    (b'hello world', 0, 4096)
    """

    __slots__ = (
        "_by_start",
        "_file_mode",
        "_folder_lock",
        "_fs",
        "_lock",
        "_mapped",
        "_max_mappings",
        "_names_changed",
        "_names_synced",
        "_prepare_lock",
        "_prepared",
        "_sparse",
        "_starts",
        "_tmp_directory",
        "directory",
        "last",
        "limit",
        "places",
        "segment_bytes",
        "writable",
    )

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tmp_directory: str | os.PathLike[str],
        segment_bytes: int,
        *,
        fs: FileSystem = REAL,
        writable: bool,
        max_mappings: int = 64,
        file_mode: int = FILE_MODE,
        sparse: bool = False,
    ) -> None:
        if segment_bytes <= 0 or max_mappings <= 0:
            raise ValueError(f"segment_bytes and max_mappings must be positive: {segment_bytes}, {max_mappings}")
        self.directory = Path(directory)
        self.segment_bytes = segment_bytes
        self.writable = writable
        #: The segment with the greatest start; None when the run is empty.
        self.last: Segment | None = None
        #: For readers: bytes at and beyond this offset do not count, as if the files ended there. None: all count.
        #: Looked at by `load` and `refresh`.
        self.limit: int | None = None
        #: For readers: where files begin whose names say something else, by name. Looked at by `load` and `refresh`.
        self.places: dict[str, int] = {}
        self._tmp_directory = Path(tmp_directory)
        self._fs = fs
        self._max_mappings = max_mappings
        self._file_mode = file_mode
        self._sparse = sparse
        self._by_start: dict[int, Segment] = {}
        self._starts: tuple[int, ...] = ()  # sorted; replaced, never changed, so that readers need no lock
        self._mapped: OrderedDict[int, Segment] = OrderedDict()  # mapped read-only, the last used at the end
        self._lock = threading.RLock()  # guards the four above and each segment's mapping and file
        self._prepare_lock = threading.Lock()
        self._prepared: Segment | None = None
        self._names_changed = 0  # files created and removed in the folder, and how many of these changes are durable
        self._names_synced = 0
        self._folder_lock = threading.Lock()

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def starts(self) -> tuple[int, ...]:
        """The starts of all segments, ascending."""
        return self._starts

    @property
    def min_offset(self) -> int:
        """Where the first segment starts; 0 when there is none."""
        starts = self._starts
        return starts[0] if starts else 0

    @property
    def end(self) -> int:
        """Where the last segment ends; 0 when there is none."""
        last = self.last
        return last.end if last is not None else 0

    def find(self, offset: int) -> Segment | None:
        """The segment whose range holds `offset`; None in a gap or outside. Of a damaged segment the file may hold
        less than that: compare with `length`."""
        return self._by_start.get(offset - offset % self.segment_bytes)

    def segments(self) -> list[Segment]:
        """All segments, ascending, as of now."""
        by_start = self._by_start
        return [segment for start in self._starts if (segment := by_start.get(start)) is not None]

    # -- opening ----------------------------------------------------------------------------------------------------

    def load(self) -> list[LoadProblem]:
        """List the folder (none there: an empty run) and, as a writer, mend its end (format#sizes): empty
        last files are removed, a short last one is extended with zeros. Whatever was found amiss is returned."""
        problems: list[LoadProblem] = []
        found = self._list(problems)
        if not self.writable:
            found = self._settled(found)
        if self.writable:
            at = len(problems)
            while found and found[-1].length == 0:
                segment = found.pop()
                self._fs.unlink(segment.path, missing_ok=True)
                self._names_changed += 1
                gone = LoadProblem(segment.path, "empty_segment", segment.start, 0, "empty last file removed")
                problems.insert(at, gone)
            self.sync_folder()
        for segment in found:
            self._check_length(segment, segment is found[-1], problems)
        self._clip(found)
        kept = [segment for segment in found if segment.length > 0]
        for before, behind in itertools.pairwise(kept):
            if behind.start != before.end:
                missing = behind.start - before.end
                path = str(self.directory / segment_name(before.end))
                problems.append(
                    LoadProblem(path, "missing_segment", before.end, missing, f"{missing} bytes before {behind.path}")
                )
        with self._lock:
            for old in self._by_start.values():
                self._let_go(old)
            self._set(kept)
        return problems

    def refresh(self) -> bool:
        """List the folder again, for readers of a store that another process writes: new segments appear, removed
        ones vanish, mappings that somebody holds stay valid. True when anything changed."""
        assert not self.writable, "a writer knows its segments"
        listed = self._settled(self._list([]))
        self._clip(listed)
        found = {segment.start: segment for segment in listed if segment.length > 0}
        with self._lock:
            changed = False
            for start, old in self._by_start.items():
                new = found.get(start)
                if new is not None and min(new.length, new.size) == old.length and not self._is_replaced(old):
                    found[start] = old
                else:  # removed; another by now (`own`); or completed, which happens only to what a crash left short
                    self._let_go(old)
                    changed = True
            if changed or len(found) != len(self._by_start):
                self._set([found[start] for start in sorted(found)])
                changed = True
            for segment in found.values():
                segment.length = min(segment.length, segment.size)
        return changed

    def is_gone(self, segment: Segment) -> bool:
        """Return True if a segment whose file was not found has left the run. A reader lists the folder again."""
        if not self.writable:
            self.refresh()
        return self._by_start.get(segment.start) is not segment

    def _is_replaced(self, segment: Segment) -> bool:
        """Whether its name is another file's by now than the one that is mapped, which nobody writes to any more."""
        if segment.mapping is None or segment.in_memory:
            return False
        try:
            return self._fs.stat(segment.path).st_ino != segment.inode
        except FileNotFoundError:
            return True

    def extend_in_memory(self) -> None:
        """Show a short last segment as a writer's `load` would leave it, for who plans what a writer would do: a copy
        with zeros behind, which takes as much memory as the file has bytes."""
        assert not self.writable, "a writer extends the file"
        last = self.last
        if last is None or last.length >= last.size or self.limit is not None:
            return
        there = self.mapping(last)
        whole = mmap.mmap(-1, last.size)
        for at in range(0, last.length, _SCAN_BYTES):
            part = there[at : at + _SCAN_BYTES]
            whole[at : at + len(part)] = part
        with self._lock:
            self._let_go(last)
            last.mapping, last.length, last.in_memory = whole, last.size, True

    def map_anew(self) -> None:
        """Have each segment mapped again when it is asked for: behind a cut, files of the same names may be others."""
        assert not self.writable, "a writer's segments are its own"
        with self._lock:
            for segment in self._by_start.values():
                self._let_go(segment)

    def _list(self, problems: list[LoadProblem]) -> list[Segment]:
        """Segments by what names and lengths the folder has; `length` as found, even if greater than `size`."""
        try:
            files = self._fs.scandir_files(self.directory, own=self.writable)
        except FileNotFoundError:
            return []
        found = []
        folder = os.fspath(self.directory)
        for name, length in files:
            start = self.places.get(name, segment_start(name))
            if start is None:
                continue
            path = os.path.join(folder, name)
            if start % self.segment_bytes or start >= _OFFSET_END - self.segment_bytes:
                why = f"not a multiple of the segment size {self.segment_bytes}, or beyond 2**63; the file is ignored"
                problems.append(LoadProblem(path, "segment_name", start, 0, why))
            else:
                found.append(Segment(start, self.segment_bytes, length, path))
        return sorted(found, key=lambda segment: segment.start) if self.places else found  # sorted by name

    def _settled(self, listed: list[Segment]) -> list[Segment]:
        """Return what a reader has listed without the gaps that a writer made meanwhile: a listing may show a name that
        is unlinked later, and not one that is made earlier. A gap between two files that are there is a real one."""
        if self.places:
            return listed  # of a store that nobody has open
        found: list[Segment] = []
        for segment in listed:
            while found and found[-1].end < segment.start:
                between = found[-1].end
                path = str(self.directory / segment_name(between))
                with contextlib.suppress(FileNotFoundError):
                    found.append(Segment(between, self.segment_bytes, self._fs.size(path), path))
                    continue
                # Retention unlinks the first one first: was it at work, the files before the gap are gone by now.
                while found and not self._fs.exists(found[0].path):
                    del found[0]
                break
            found.append(segment)
        return found

    def _clip(self, found: list[Segment]) -> None:
        """Let the files of a reader end at `limit`."""
        if self.limit is not None:
            for segment in found:
                segment.length = max(0, min(segment.length, self.limit - segment.start))

    def _check_length(self, segment: Segment, is_last: bool, problems: list[LoadProblem]) -> None:
        length, size = segment.length, segment.size
        if length == size:
            return
        detail = f"{length} bytes instead of {size}"
        if length == 0:
            problems.append(LoadProblem(segment.path, "empty_segment", segment.start, 0, detail))
        elif length > size:
            surplus = f"{detail}; the surplus is ignored"
            problems.append(LoadProblem(segment.path, "segment_size", segment.end, length - size, surplus))
            segment.length = size
        else:
            if is_last and self.writable:
                self._extend(segment)
                detail += EXTENDED
            problems.append(LoadProblem(segment.path, "segment_size", segment.start + length, size - length, detail))

    def _extend(self, segment: Segment) -> None:
        file = File(self._fs, segment.path, os.O_RDWR)
        self._give_length(file.fd)
        self._fs.fdatasync(file.fd)
        segment.length = segment.size

    # -- growing ----------------------------------------------------------------------------------------------------

    def prepare(self, start: int, *, populate_bytes: int = 0) -> None:
        """Make the segment that starts at `start` ready in the tmp folder, for a background thread: `create(start)`
        then only renames it. One is kept; preparing another gives up the first. With `populate_bytes` the pages of
        its beginning are faulted in (`populate`). All but the last segment are taken for fully written, and what
        keeps them ready for writing is given back here, where nobody waits for it."""
        assert self.writable, "only a writer prepares segments"
        with self._prepare_lock:
            if start in self._by_start or (self._prepared is not None and self._prepared.start == start):
                return
            self._discard_prepared()
            segment = self._make(start)
            if not self._sparse and populate_bytes:
                try:
                    segment.mapping = self._map(segment, writable=True)
                    segment.writable = True
                    self.populate(segment, 0, min(populate_bytes, segment.size))
                except BaseException:
                    self._fs.unlink(segment.path, missing_ok=True)
                    raise
            self._prepared = segment
        for older in self.segments()[:-1]:
            if older.writable:
                self._retire(older)

    def create(self, start: int) -> Segment:
        """Append the segment that starts at `start` (a multiple of the size, behind the last) and return it: the
        prepared one if there is one, else made now. Its name is durable after the next `sync` or `sync_folder`."""
        assert self.writable, "only a writer creates segments"
        if start % self.segment_bytes or not self.end <= start < _OFFSET_END - self.segment_bytes:
            size = self.segment_bytes
            raise ValueError(f"no segment of {size} bytes can start at {start}; the run ends at {self.end}")
        with self._prepare_lock:  # when it is being prepared right now, waiting is the shortest way to have it
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
                with contextlib.suppress(OSError, MQStoreError):  # Ctrl-C comes when it has its name already
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
        """A file of full length in the tmp folder, synced: a name that is renamed before its length is durable
        could come back short after a power cut. Nothing stays behind when it fails."""
        fs = self._fs
        path = temporary_path(self._tmp_directory, segment_name(start))
        fs.mkdir(self._tmp_directory, self._folder_mode(), exist_ok=True)
        try:
            file = File(fs, path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._file_mode)
            self._give_length(file.fd)
            fs.fdatasync(file.fd)
        except BaseException:
            fs.unlink(path, missing_ok=True)
            raise
        return Segment(start, self.segment_bytes, self.segment_bytes, path)

    def _give_length(self, fd: int) -> None:
        if self._sparse:
            self._fs.truncate_sparse(fd, self.segment_bytes)
        else:
            self._fs.allocate(fd, self.segment_bytes)

    def _make_folder(self) -> None:
        # Synced even when it is there: whoever made it may have been killed before it was durable. Once it holds a
        # segment it is.
        self._fs.mkdir(self.directory, self._folder_mode(), exist_ok=True)
        self._fs.sync_directory(self.directory.parent)

    def _folder_mode(self) -> int:
        """Whoever may read the files may enter their folder."""
        return self._file_mode | (self._file_mode & 0o444) >> 2

    def _discard_prepared(self) -> None:
        stale, self._prepared = self._prepared, None
        if stale is not None:
            self._fs.unlink(stale.path, missing_ok=True)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def mapping(self, segment: Segment) -> mmap.mmap:
        """The mapping of `segment`, made when there is none: `length` bytes, writable for the last of a writer's.

        The run keeps `max_mappings` read-only ones and lets go of the one unused for longest; whoever holds a
        reference or a view keeps it alive. FileNotFoundError when the segment was dropped meanwhile."""
        with self._lock:
            wanted = self.writable and not self._sparse and segment is self.last
            mapping = segment.mapping
            if mapping is None or (wanted and not segment.writable):
                mapping = self._map(segment, writable=wanted)
                if self._by_start.get(segment.start) is not segment:
                    return mapping  # dropped, but the name was still there: for this caller alone
                segment.mapping = mapping
                segment.writable = wanted
            if segment.writable or segment.in_memory:
                self._mapped.pop(segment.start, None)
            else:
                self._mapped[segment.start] = segment
                self._mapped.move_to_end(segment.start)
                while len(self._mapped) > self._max_mappings:
                    _, oldest = self._mapped.popitem(last=False)
                    oldest.mapping = None
            return mapping

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Put `data` at `offset`, within one segment, by a system call: the page cache has it on return, mappings show
        it. The way to write to sparse runs, and the faster one before a sync (see the module). KeyError where there is
        no segment, ValueError when `data` (of bytes) crosses its end."""
        segment = self.last
        if segment is None or not segment.start <= offset:
            segment = self._by_start[offset - offset % self.segment_bytes]
        if offset + len(data) > segment.end:
            raise ValueError(f"{len(data)} bytes at {offset} cross the end of {segment!r}")
        file = self.file(segment)
        self._fs.pwrite(file.fd, data, offset - segment.start)

    def write_back(self, offset: int) -> None:
        """Have the system begin to write the segment of `offset`, which is synced later (`FileSystem.write_back`)."""
        segment = self.find(offset)
        if segment is not None:
            file = self.file(segment)
            self._fs.write_back(file.fd)

    def file(self, segment: Segment) -> File:
        """Its descriptor, which stays open for as long as it is referred to."""
        return segment.file or self._open(segment)

    def data_end(self, segment: Segment, start: int) -> int:
        """A position in a segment, `start` or behind it, from which on there are zeros to its end, for all that can be
        told without reading them. They may be most of the last one, and to look at them would bring all into memory."""
        if segment.in_memory:
            return segment.length
        try:
            file = segment.file or File(self._fs, segment.path, os.O_RDONLY)
        except (OSError, MQStoreError):  # removed meanwhile, or no descriptor left: a mapping needs neither
            return segment.length
        return self._fs.data_end(file.fd, start, segment.length)

    def read_ahead(self, segment: Segment, start: int, stop: int) -> None:
        """For who is about to read bytes [start, stop) of a segment: a mapping for writing reads nothing ahead
        by itself, but waits for every page (see the module). Nothing to do for others."""
        if segment.writable:
            file = self.file(segment)
            stop = min(stop, self.data_end(segment, start))
            self._fs.read_ahead(file.fd, start, stop - start)

    def populate(self, segment: Segment, position: int, length: int) -> bool:
        """Fault in the pages of [position, position + length) of a segment for writing, ahead of the writer, while
        other threads run. Changes no byte. False when this did nothing: not mapped for writing, or not supported by
        the system; the writer then meets the faults itself."""
        with self._lock:
            mapping = segment.mapping if segment.writable else None
        if mapping is None:
            return False
        begin = position - position % mmap.PAGESIZE
        end = min(position + length, segment.size)
        for step in range(begin, end, _POPULATE_STEP_BYTES):
            if not _madvise(mapping, step, min(_POPULATE_STEP_BYTES, end - step), _POPULATE_WRITE):
                return False
        return begin < end

    def sync(self, start: int, end: int) -> None:
        """Make the bytes [start, end) durable, and the names of the segments that hold them.

        One fdatasync a segment: with the kernel's own list of dirty pages it beats naming the range (RWF_DSYNC,
        msync), which must walk or copy it. An error is final (format#flush): never call again; but for
        `SyncNotBegunError`."""
        last = self.last
        if (
            _LINUX
            and last is not None
            and last.start <= start < end <= last.end
            and (file := last.file) is not None
            and self._names_synced == self._names_changed
        ):
            # The way of every put that waits: after the pause of a sync the caches are cold and each call counts.
            self._fs.fdatasync(file.fd)
        elif start < end:
            self._sync_many(start, end)

    def _sync_many(self, start: int, end: int) -> None:
        assert self.writable, "only a writer syncs"
        wanted = [segment for segment in self.segments() if segment.end > start and segment.start < end]
        try:
            # Those that a put leaves behind, and no more: a recovery syncs all there are, one by one.
            opened = {segment.start: self._file_to_sync(segment) for segment in wanted[:_OPEN_AHEAD]}
            for segment in wanted:
                if not _LINUX:
                    # Elsewhere a sync of the file need not include what was stored through a mapping.
                    mapping = segment.mapping
                    if mapping is not None and segment.writable:
                        mapping.flush()
                file = opened.pop(segment.start, None) or self._file_to_sync(segment)
                if file is not None:
                    self._fs.fdatasync(file.fd)
            self.sync_folder()
        except StoreIOError as error:
            if not is_not_begun(error):
                raise
            raise SyncNotBegunError(error.errno or 0, error.strerror or "", error.filename, error.operation) from error

    def _file_to_sync(self, segment: Segment) -> File | None:
        """Its descriptor; None when it was dropped a moment ago."""
        try:
            return self.file(segment)
        except FileNotFoundError:
            if self._by_start.get(segment.start) is segment:
                raise
            return None

    def sync_folder(self) -> None:
        """Make names durable: which segments there are. Nothing to do: no call."""
        with self._folder_lock:  # who finds another at it must not return before that one is done
            changed = self._names_changed
            if self._names_synced != changed:
                self._fs.sync_directory(self.directory)
                self._names_synced = changed  # not what it is by now: a name may have come while we synced

    # -- cutting ----------------------------------------------------------------------------------------------------

    def zero(self, from_offset: int) -> int:
        """Write zeros from `from_offset` to the end of its segment, where they are not yet, and sync. Returns how many
        bytes were written. Behind the last segment: nothing to do.

        Only pages that hold something else are written, and of the first only what lies behind `from_offset`. Always
        synced, since the zeros found may be those of a process that was killed before its sync (format#zeros)."""
        assert self.writable, "only a writer cuts"
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
                break  # shorter than it was: nothing there to be zeroed
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
        """Before a cut at `offset`: if the file there has a second name, as one of a snapshot has (`log/snapshot`),
        give this run a copy of it. For who opens a store: nobody has a mapping yet that will be written through."""
        assert self.writable, "only a writer cuts"
        segment, fs = self.find(offset), self._fs
        if segment is None or fs.stat(segment.path).st_nlink < 2:
            return
        tmp, name = self._tmp_directory, segment_name(segment.start)
        source = File(fs, segment.path, os.O_RDONLY)
        found = fs.stat(source.fd)
        fs.mkdir(tmp, self._folder_mode(), exist_ok=True)
        with new_file(fs, tmp, name, segment.path, self._file_mode) as target:
            fs.allocate(target, found.st_size)
            fs.copy(source.fd, target, found.st_size)
            fs.take_after(target, found)
            fs.fdatasync(target)
        fs.sync_directory(self.directory)
        with self._lock:
            self._let_go(segment)

    def finish(self, offset: int) -> None:
        """The run goes on at `offset`: the segment that holds it gets its full length, and files without a byte from
        there on go."""
        empty = [s for s in self._list([]) if s.start >= offset and s.length == 0]
        for segment in reversed(empty):
            self._fs.unlink(segment.path, missing_ok=True)
            self._names_changed += 1
        self.sync_folder()
        last = self.find(offset)
        if last is not None and last.length < last.size:
            with self._lock:
                self._let_go(last)  # a mapping is as long as the file was
            self._extend(last)

    def drop_from(self, offset: int) -> list[str]:
        """Remove all segments that start at or behind `offset`, the last one first, so that a crash in between leaves
        no gap. Returns the removed names. Durable on return."""
        doomed = [segment for segment in self.segments() if segment.start >= offset]
        return self._drop(doomed[::-1])

    def drop_before(self, offset: int) -> list[str]:
        """Remove all segments that end at or before `offset`, the first one first, never the last one. Returns the
        removed names. Durable on return. Views of them stay valid; their space returns with the last view."""
        return self._drop([segment for segment in self.segments()[:-1] if segment.end <= offset])

    def _drop(self, doomed: list[Segment]) -> list[str]:
        assert self.writable, "only a writer removes segments"
        removed = []
        for segment in doomed:
            try:
                with self._lock:  # whoever finds a segment in the list and then no file would take that for damage
                    before = self.segments()
                    self._set([other for other in before if other is not segment])
                    try:
                        self._fs.unlink(segment.path, missing_ok=True)
                    except BaseException:
                        if self._fs.exists(segment.path):
                            self._set(before)
                        raise
                    removed.append(segment_name(segment.start))
                    self._names_changed += 1
                    self._let_go(segment)
            finally:
                # One by one: of names that go together a power cut may leave any, and a gap looks like the end.
                self.sync_folder()
        return removed

    def close(self) -> None:
        """Let go of all mappings and descriptors and remove what was prepared. Syncs nothing."""
        with self._prepare_lock:
            self._discard_prepared()
        with self._lock:
            for segment in self._by_start.values():
                self._let_go(segment)
            self._set([])

    # -- beneath ----------------------------------------------------------------------------------------------------

    def _map(self, segment: Segment, *, writable: bool) -> mmap.mmap:
        file = File(self._fs, segment.path, os.O_RDWR if writable else os.O_RDONLY)
        mapping = self._fs.map(file.fd, segment.length, writable=writable)
        if not self.writable:
            segment.inode = self._fs.stat(file.fd).st_ino
        if writable and hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)
        return mapping

    def _open(self, segment: Segment) -> File:
        """A descriptor of the segment; kept for the two that are written to, else for this call."""
        assert self.writable, "only a writer writes"
        with self._lock:
            if segment.file is not None:
                return segment.file
            file = File(self._fs, segment.path, os.O_RDWR)
            if segment.start in self._starts[-2:]:
                segment.file = file
            return file

    def _retire(self, segment: Segment) -> None:
        """No more writing to this one: it goes on with a read-only mapping, made when asked for."""
        with self._lock:
            segment.file = None
            mapping = segment.mapping
            if mapping is None or not segment.writable:
                return
            if not _LINUX:
                mapping.flush()  # its later sync could not: see `_sync_many`
            segment.mapping = None
            segment.writable = False
        # Unmapping thousands of pages takes milliseconds, in which Python lets no other thread run; so empty it before
        # the last reference goes. What is dirty stays so, and a view that is still held finds its pages again.
        _madvise(mapping, 0, segment.length, _DONT_NEED)

    def _let_go(self, segment: Segment) -> None:
        """Drop the references of a segment that leaves the run. The lock is held."""
        self._mapped.pop(segment.start, None)
        segment.mapping = None
        segment.writable = False
        segment.in_memory = False
        segment.file = None

    def _set(self, segments: list[Segment]) -> None:
        """Make `segments`, ascending, the content of the run. The lock is held."""
        by_start = {segment.start: segment for segment in segments}
        starts, last = tuple(by_start), segments[-1] if segments else None
        # No call between these: a signal handler must not find some of them.
        self._by_start, self._starts, self.last = by_start, starts, last
