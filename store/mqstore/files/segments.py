"""Runs of fixed-size segments: folders of files that hold one endless stream of bytes (format#sizes).

    <directory>/<20 digits>     the offset in the stream of the file's first byte, a multiple of the segment size

`SegmentRun` finds, maps and reads them. `files/segmentwriter.py` creates, fills, syncs and removes them.

A file is never shortened and a mapping never closed, because a view may still use it (here or in another process). The
last reference unmaps.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections import OrderedDict
from pathlib import Path
from typing import ClassVar

from mqstore.errors import MQStoreError
from mqstore.files.descriptors import File
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.safe_open import REFUSED
from mqstore.files.segment import LoadProblem, Segment, segment_name, segment_start
from mqstore.signalsafe import Lock

OFFSET_END = 1 << 63
"""Offsets are i64. The 20 digits of a name could be greater."""
_COPY_BYTES = 1 << 20
_HEAD_BYTES = 1 << 10
_NOT_OPENED = REFUSED | {errno.EACCES, errno.EPERM, errno.EIO}
"""Errors that concern one file, not the process or the machine."""


class SegmentRun:
    """The segments in one folder, as a stream with a beginning and an end. Nothing here changes a file.

    `segment_bytes` is the size of each file. `max_mappings` is the number of read-only mappings that are kept, the most
    recently used ones. Any thread may find, map and read. Errors are those of `FileSystem`.
    """

    _refuses_links: ClassVar[bool] = False
    """True if a link in place of a file is an error, and is not followed."""

    def __init__(
        self, directory: str | os.PathLike[str], segment_bytes: int, *, fs: FileSystem = REAL, max_mappings: int = 64
    ) -> None:
        if segment_bytes <= 0 or max_mappings <= 0:
            raise ValueError(f"segment_bytes and max_mappings must be positive: {segment_bytes}, {max_mappings}")
        self.directory = Path(directory)
        self.segment_bytes = segment_bytes
        #: The segment with the greatest start, or None if the run is empty.
        self.last: Segment | None = None
        #: For readers: bytes at and beyond this offset do not count, as if the files ended there. None: all count.
        #: Used by `load` and `refresh`.
        self.limit: int | None = None
        #: For readers: right starts of misnamed files, by name. Used by `load` and `refresh`.
        self.places: dict[str, int] = {}
        #: For readers: contents of segments that have no file yet, by start. Used by `load` and `refresh`.
        self.added: dict[int, mmap.mmap] = {}
        #: For readers: why a file cannot be opened, by name. It counts as missing. Set by `load`.
        self.unreadable: dict[str, str] = {}
        #: Number of bytes of `head` that `load` may keep, in a process that ends soon.
        self.may_keep = 0
        #: Starts of segments that `joined` must not read: a scan found a damaged or unfinished one among them.
        self.alone = range(0)
        self._fs = fs
        self._max_mappings = max_mappings
        self._by_start: dict[int, Segment] = {}
        self._starts: tuple[int, ...] = ()  # sorted; replaced, never changed, so that readers need no lock
        self._heads: dict[str, bytes] = {}  # by path
        self._mapped: OrderedDict[int, Segment] = OrderedDict()  # mapped read-only, most recently used last
        self._lock = Lock()  # guards the four above and each segment's mapping and file

    @property
    def starts(self) -> tuple[int, ...]:
        """Starts of all segments, ascending."""
        return self._starts

    @property
    def min_offset(self) -> int:
        """Start of the first segment, or 0 if there is none."""
        starts = self._starts
        return starts[0] if starts else 0

    @property
    def end(self) -> int:
        """End of the last segment, or 0 if there is none."""
        last = self.last
        return last.end if last is not None else 0

    def find(self, offset: int) -> Segment | None:
        """Return the segment whose range contains `offset`, or None in a gap or outside.
        The file of a damaged segment may not reach to `offset`: compare with `length`."""
        return self._by_start.get(offset - offset % self.segment_bytes)

    def segments(self) -> list[Segment]:
        """Return all segments, ascending."""
        by_start = self._by_start
        return [segment for start in self._starts if (segment := by_start.get(start)) is not None]

    def load(self) -> list[LoadProblem]:
        """List the folder, which may be missing. Return the problems with names and lengths."""
        problems: list[LoadProblem] = []
        self._find_unreadable()
        found = self._settled(self._list(problems))
        for segment in found:
            self._check_length(segment, problems)
        self._clip(found)
        kept = [segment for segment in found if segment.length > 0]
        for before, after in itertools.pairwise(kept):
            if after.start != before.end:
                missing = after.start - before.end
                path = str(self.directory / segment_name(before.end))
                detail = f"{missing} bytes before {after.path}{self.reasons(before.end, after.start)}"
                problems.append(LoadProblem(path, "missing_segment", before.end, missing, detail))
        for name, why in self.unreadable.items():
            if not kept or not kept[0].start < int(name) < kept[-1].end:  # otherwise it is in a gap
                path = str(self.directory / name)
                problems.append(LoadProblem(path, "missing_segment", int(name), self.segment_bytes, why))
        with self._lock:
            for old in self._by_start.values():
                self._let_go(old)
            self._set(kept)
        return problems

    def _find_unreadable(self) -> None:
        """Find the files that cannot be opened. A writer raises their error, since it would cut the log there.
        Opening thousands of files takes long, so their first bytes are kept."""
        self.unreadable = {}
        self._heads.clear()
        with contextlib.suppress(FileNotFoundError):
            folder = os.fspath(self.directory)
            for name in self._fs.scandir(folder):
                try:
                    if segment_start(name) is not None:
                        self._keep_head(f"{folder}/{name}")
                except FileNotFoundError:
                    continue  # removed meanwhile
                except OSError as error:
                    if self._refuses_links or error.errno not in _NOT_OPENED:
                        raise
                    self.unreadable[name] = f"{name} cannot be opened: {error.strerror}; make it readable"

    def _keep_head(self, path: str) -> None:
        """Open a file, and keep its first bytes for `head`. Raises an error of the opening, not of the reading."""
        with self._fs.opened(path, os.O_RDONLY) as fd:
            if len(self._heads) * _HEAD_BYTES < self.may_keep:
                with contextlib.suppress(OSError, MQStoreError):
                    self._heads[path] = self._fs.pread(fd, _HEAD_BYTES, 0)

    def reasons(self, start: int, stop: int) -> str:
        """Return why files in the range of a gap cannot be opened, as the end of a sentence, or ""."""
        return "".join(f"; {why}" for name, why in self.unreadable.items() if start <= int(name) < stop)

    def refresh(self) -> bool:
        """List the folder again, since another process may write the store. Return True if anything changed.
        New segments appear, removed ones disappear, and referenced mappings stay valid."""
        listed = self._settled(self._list([]))
        self._clip(listed)
        found = {segment.start: segment for segment in listed if segment.length > 0}
        with self._lock:
            changed = False
            for start, old in self._by_start.items():
                new = found.get(start)
                if new is not None and min(new.length, new.size) == old.length and not self._is_replaced(old):
                    found[start] = old
                else:  # removed, replaced, or completed, which happens only to a file that a crash left short
                    self._let_go(old)
                    changed = True
            if changed or len(found) != len(self._by_start):
                self._set([found[start] for start in sorted(found)])
                changed = True
            for segment in found.values():
                segment.length = min(segment.length, segment.size)
        return changed

    def is_gone(self, segment: Segment) -> bool:
        """Return True if a segment whose file was not found has left the run. Lists the folder again."""
        self.refresh()
        return self._by_start.get(segment.start) is not segment

    def _is_replaced(self, segment: Segment) -> bool:
        """Return True if the segment's name now belongs to another file than the mapped one."""
        if segment.mapping is None or segment.in_memory:
            return False
        try:
            return self._fs.stat(segment.path).st_ino != segment.inode
        except FileNotFoundError:
            return True

    def extend_in_memory(self) -> None:
        """Show a short last segment as a writer's `load` would leave it: a copy with zeros after it.
        For the plan of a writer's recovery. The copy takes as much memory as the file has bytes."""
        last = self.last
        if last is None or last.length >= last.size or self.limit is not None:
            return
        there = self.mapping(last)
        whole = mmap.mmap(-1, last.size)
        for at in range(0, last.length, _COPY_BYTES):
            part = there[at : at + _COPY_BYTES]
            whole[at : at + len(part)] = part
        with self._lock:
            self._let_go(last)
            last.mapping, last.length, last.in_memory = whole, last.size, True

    def map_again(self) -> None:
        """Map each segment again at its next use, since names may have new files after a cut."""
        with self._lock:
            for segment in self._by_start.values():
                self._let_go(segment)

    def _list(self, problems: list[LoadProblem]) -> list[Segment]:
        """Return segments by the folder's names and lengths. `length` may be greater than `size`."""
        try:
            files = self._fs.scandir_files(self.directory, own=self._refuses_links)
        except FileNotFoundError:
            return []
        found = []
        folder = os.fspath(self.directory)
        for name, length in files:
            start = self.places.get(name, segment_start(name))
            if start is None or name in self.unreadable:
                continue
            path = f"{folder}/{name}"
            if start % self.segment_bytes or start >= OFFSET_END - self.segment_bytes:
                why = f"not a multiple of the segment size {self.segment_bytes}, or beyond 2**63; the file is ignored"
                problems.append(LoadProblem(path, "segment_name", start, 0, why))
            else:
                found.append(Segment(start, self.segment_bytes, length, path))
        for start, content in self.added.items():
            found.append(Segment(start, self.segment_bytes, len(content), os.path.join(folder, segment_name(start))))
            found[-1].mapping, found[-1].in_memory = content, True
        return sorted(found, key=lambda segment: segment.start) if self.places or self.added else found

    def _settled(self, listed: list[Segment]) -> list[Segment]:
        """Return the listed segments without the gaps that a writer made meanwhile.
        A listing may contain a name that is unlinked later, and miss one that is created earlier. A gap between two
        files that still exist is real."""
        if self.places:
            return listed  # a store that no process has open
        found: list[Segment] = []
        for segment in listed:
            while found and found[-1].end < segment.start:
                between = found[-1].end
                if segment_name(between) in self.unreadable:
                    break
                path = str(self.directory / segment_name(between))
                with contextlib.suppress(FileNotFoundError):
                    found.append(Segment(between, self.segment_bytes, self._fs.size(path), path))
                    continue
                # Retention unlinks the first one first. If it ran, the files before the gap do not exist any more.
                while found and not self._fs.exists(found[0].path):
                    del found[0]
                break
            found.append(segment)
        return found

    def _clip(self, found: list[Segment]) -> None:
        """End the files at `limit`."""
        if self.limit is not None:
            for segment in found:
                segment.length = max(0, min(segment.length, self.limit - segment.start))

    def _check_length(self, segment: Segment, problems: list[LoadProblem]) -> None:
        length, size = segment.length, segment.size
        detail = f"{length} bytes instead of {size}"
        if length == 0:
            problems.append(LoadProblem(segment.path, "empty_segment", segment.start, 0, detail))
        elif length > size:
            surplus = f"{detail}; the surplus is not read as part of it"
            problems.append(LoadProblem(segment.path, "segment_size", segment.end, length - size, surplus))
            segment.length = size
        elif length < size:
            problems.append(LoadProblem(segment.path, "segment_size", segment.start + length, size - length, detail))

    def mapping(self, segment: Segment) -> mmap.mmap:
        """Return the mapping of `segment`, of `length` bytes. It is created if there is none.
        The run keeps the `max_mappings` most recently used read-only ones. A reference or view keeps others alive.
        Raises FileNotFoundError if the segment was dropped meanwhile."""
        with self._lock:
            return self._mapping_of(segment)

    def _mapping_of(self, segment: Segment) -> mmap.mmap:
        """Return the result of `mapping`. The lock is held."""
        mapping = segment.mapping
        if mapping is None:
            file = File(self._fs, segment.path, os.O_RDONLY)
            mapping = self._fs.map(file.fd, segment.length, writable=False)
            if self._by_start.get(segment.start) is not segment:
                return mapping  # dropped, but the name still existed: only this caller may use it
            segment.mapping = mapping
            segment.inode = self._fs.stat(file.fd).st_ino
        if not (segment.writable or segment.in_memory):
            self._mapped[segment.start] = segment
            self._mapped.move_to_end(segment.start)
            while len(self._mapped) > self._max_mappings:
                _, oldest = self._mapped.popitem(last=False)
                oldest.mapping = None
        return mapping

    def whole(self, segment: Segment, most: int) -> list[Segment]:
        """Return the segments from `segment` on that `joined` may read, up to `most` bytes. Empty for fewer than two.
        Damaged ones, those mapped for writing, and those in `alone` must be read by their mappings."""
        found: list[Segment] = []
        here: Segment | None = segment
        while here is not None and here.length == here.size and here.start not in self.alone:
            if here.writable or here.in_memory or (len(found) + 1) * here.size > most:
                break
            found.append(here)
            here = self._by_start.get(here.end)
        return found if len(found) > 1 else []

    def head(self, segment: Segment) -> bytes:
        """Return the first bytes of a segment as `load` found them, or none if they were not kept. Forget them."""
        return b"" if segment.in_memory else self._heads.pop(segment.path, b"")

    def joined(self, segment: Segment, most: int) -> bytes:
        """Return the bytes of the segments that `whole` returns, one after the other.
        Reading small segments takes less time than mapping them. There are fewer if one cannot be read now."""
        parts: list[bytes] = []
        with contextlib.suppress(OSError, MQStoreError):  # reading it alone raises it again
            for here in self.whole(segment, most):
                with self._fs.opened(here.path, os.O_RDONLY) as fd:
                    data = self._fs.pread(fd, here.size, 0)
                if len(data) < here.size:
                    break
                parts.append(data)
        return b"".join(parts)

    def data_end(self, segment: Segment, start: int) -> int:
        """Return a position in a segment, at or after `start`, from which on there are certainly zeros.
        They may be most of the last segment, and reading them would load all into memory."""
        if segment.in_memory:
            return segment.length
        try:
            file = segment.file or File(self._fs, segment.path, os.O_RDONLY)
        except (OSError, MQStoreError):  # removed meanwhile, or no descriptor left. A mapping needs neither
            return segment.length
        return self._fs.data_end(file.fd, start, segment.length)

    def read_ahead(self, segment: Segment, start: int, stop: int) -> None:
        """Start reading bytes [start, stop) of a segment that is mapped for writing.
        Such a mapping has no automatic read-ahead (`files/segmentwriter.py`)."""
        if segment.writable:
            file = segment.file or File(self._fs, segment.path, os.O_RDONLY)
            stop = min(stop, self.data_end(segment, start))
            self._fs.read_ahead(file.fd, start, stop - start)

    def close(self) -> None:
        """Drop all mappings and descriptors."""
        with self._lock:
            for segment in self._by_start.values():
                self._let_go(segment)
            self._set([])

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
        # No call between these: a signal handler must not find only some of them changed.
        self._by_start, self._starts, self.last = by_start, starts, last
