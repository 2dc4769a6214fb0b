"""A file system that remembers what was durable and what was only written, and builds what a power cut may leave of it.

    recorded                                 after a crash
    page written, file synced since          there
    page written, not synced since           any version it had since the last sync, or one torn between two of them
    length changed, not synced since         any length it had since
    name made, moved, removed                there if one of its folders was synced since, else either way

Pages have 4096 bytes and reach the disk in any order, independently of each other; so do names. That is harsher than
any real file system, which is the point: what holds here needs no journal's help.

Stores through a mapping make no call that could be recorded, so every file that was mapped for writing is compared with
its last known state at each call, and whenever the test says so (`observe`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mqstore.files.filesystem import DIRECTORY_MODE, FILE_MODE, FileSystem, StrPath

if TYPE_CHECKING:
    import mmap

    from _typeshed import ReadableBuffer

__all__ = ["Event", "RecordingFileSystem", "build_image", "crash_point"]

PAGE = 4096
ROOT = 0


class Event(NamedTuple):
    """`kind` and its operands:

    write (node, page, bytes) · size (node, length) · sync (node,) · names ((folder, name, node or None), ...) ·
    folder (node,): a new folder · sync_folder (node,) · mark (value,)
    """

    kind: str
    operands: tuple[Any, ...]


class RecordingFileSystem(FileSystem):
    """`FileSystem` on real files below `root`, which must exist; what it holds by then counts as durable."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._root = os.fspath(root)
        self._by_path: dict[str, int] = {self._root: ROOT}
        self._by_fd: dict[int, int] = {}
        self._content: dict[int, bytearray] = {}
        self._mapped: dict[int, int] = {}
        """node -> a descriptor of our own to look at it"""
        self._next = 1
        for folder, folders, names in os.walk(root):
            for name in folders:
                self._new_folder(os.path.join(folder, name))
            for name in names:
                path = os.path.join(folder, name)
                node = self._new_file(path)
                data = Path(path).read_bytes()
                self._content[node] = bytearray(data)
                self._add("size", node, len(data))
                for page in range(0, len(data), PAGE):
                    self._add("write", node, page // PAGE, data[page : page + PAGE])
                self._add("sync", node)
            self._add("sync_folder", self._by_path[folder])

    def dispose(self) -> None:
        """End the recording: drop the descriptors that watch mappings, and the files to compare with. Events stay."""
        for fd in self._mapped.values():
            os.close(fd)
        self._mapped.clear()
        self._content.clear()

    def boot_id(self) -> str | None:
        return f"machine-{id(self)}-until-the-power-cut"

    def mark(self, value: object) -> None:
        """Note in the record that something has happened by now: an acknowledgement, say."""
        self.observe()
        self._add("mark", value)

    def observe(self) -> None:
        """Record what was stored through mappings since the last look."""
        for node, fd in self._mapped.items():
            known = self._content[node]
            found = os.pread(fd, len(known), 0)
            if found != known:
                for at in range(0, len(known), PAGE):
                    if found[at : at + PAGE] != known[at : at + PAGE]:
                        self._add("write", node, at // PAGE, found[at : at + PAGE])
                self._content[node] = bytearray(found)

    def shorten(self, path: Path, length: int) -> None:
        """Cut a file, as only other programs do. Durable on return."""
        os.truncate(path, length)
        node = self._by_path[os.fspath(path)]
        del self._content[node][length:]
        self._add("size", node, length)
        self._add("sync", node)

    # -- bookkeeping ------------------------------------------------------------------------------------------------

    def _add(self, kind: str, *operands: Any) -> None:
        self.events.append(Event(kind, operands))

    def _place(self, path: StrPath) -> tuple[int, str]:
        folder, name = os.path.split(os.fspath(path))
        return self._by_path[folder], name

    def _new_folder(self, path: str) -> None:
        node, self._next = self._next, self._next + 1
        self._by_path[path] = node
        self._add("folder", node)
        self._add("names", (*self._place(path), node))

    def _new_file(self, path: str) -> int:
        node, self._next = self._next, self._next + 1
        self._by_path[path] = node
        self._content[node] = bytearray()
        self._add("names", (*self._place(path), node))
        return node

    def _resized(self, fd: int) -> None:
        node = self._by_fd.get(fd)
        if node is None:
            return
        content, length = self._content[node], os.fstat(fd).st_size
        if length != len(content):
            del content[length:]
            content.extend(bytes(length - len(content)))
            self._add("size", node, length)

    # -- the calls --------------------------------------------------------------------------------------------------

    def open(self, path: StrPath, flags: int, mode: int = FILE_MODE) -> int:
        self.observe()
        there = os.path.lexists(path)
        fd = super().open(path, flags, mode)
        name = os.fspath(path)
        if name.startswith(self._root + os.sep):
            if not there:
                self._new_file(name)
            self._by_fd[fd] = self._by_path[name]
            if there and flags & os.O_TRUNC:
                self._resized(fd)
        return fd

    def close(self, fd: int) -> None:
        self._by_fd.pop(fd, None)
        super().close(fd)

    def _copy_some(self, source: int, target: int, position: int, length: int) -> int:
        return 0  # by `pwrite`, which is recorded

    def pwrite(self, fd: int, data: ReadableBuffer, position: int) -> None:
        self.observe()
        super().pwrite(fd, data, position)
        node = self._by_fd.get(fd)
        if node is None:
            return
        self._resized(fd)
        content = self._content[node]
        view = memoryview(data).cast("B")
        content[position : position + len(view)] = view
        for page in range(position // PAGE, -(-(position + len(view)) // PAGE)):
            self._add("write", node, page, bytes(content[page * PAGE : (page + 1) * PAGE]))

    def fdatasync(self, fd: int) -> None:
        self.observe()
        super().fdatasync(fd)
        if fd in self._by_fd:
            self._add("sync", self._by_fd[fd])

    def sync_directory(self, path: StrPath) -> None:
        self.observe()
        super().sync_directory(path)
        if os.fspath(path) in self._by_path:
            self._add("sync_folder", self._by_path[os.fspath(path)])

    def allocate(self, fd: int, length: int, first: int) -> int:
        self.observe()
        allocated = super().allocate(fd, length, first)
        self._resized(fd)
        return allocated

    def truncate_sparse(self, fd: int, length: int) -> None:
        self.observe()
        super().truncate_sparse(fd, length)
        self._resized(fd)

    def map(self, fd: int, length: int, *, writable: bool) -> mmap.mmap:
        mapping = super().map(fd, length, writable=writable)
        node = self._by_fd.get(fd)
        if writable and node is not None and node not in self._mapped:
            self._mapped[node] = os.dup(fd)
        return mapping

    def replace(self, source: StrPath, target: StrPath) -> None:
        self.observe()
        super().replace(source, target)
        node = self._by_path.pop(os.fspath(source))
        self._by_path[os.fspath(target)] = node
        below = os.fspath(source) + os.sep  # of a folder: what it holds moves along
        for path in [path for path in self._by_path if path.startswith(below)]:
            self._by_path[os.path.join(os.fspath(target), path[len(below) :])] = self._by_path.pop(path)
        self._add("names", (*self._place(source), None), (*self._place(target), node))

    def link(self, source: StrPath, target: StrPath) -> None:
        self.observe()
        super().link(source, target)
        node = self._by_path[os.fspath(target)] = self._by_path[os.fspath(source)]
        self._add("names", (*self._place(target), node))

    def unlink(self, path: StrPath, *, missing_ok: bool = False) -> None:
        self.observe()
        there = os.path.lexists(path)
        super().unlink(path, missing_ok=missing_ok)
        if there:
            node = self._by_path.pop(os.fspath(path))
            self._add("names", (*self._place(path), None))
            if node not in self._by_path.values() and node in self._mapped:
                os.close(self._mapped.pop(node))  # no crash brings it back with newer bytes than these

    def mkdir(self, path: StrPath, mode: int = DIRECTORY_MODE, *, exist_ok: bool = False) -> None:
        self.observe()
        there = os.path.isdir(path)
        super().mkdir(path, mode, exist_ok=exist_ok)
        if not there and os.fspath(path).startswith(self._root + os.sep):
            self._new_folder(os.fspath(path))

    def rmdir(self, path: StrPath) -> None:
        super().rmdir(path)
        self._by_path.pop(os.fspath(path))
        self._add("names", (*self._place(path), None))


class _Node:
    """A file: what of it is durable, and what has come since."""

    __slots__ = ("durable", "late", "length", "lengths", "versions")

    def __init__(self) -> None:
        self.durable: dict[int, bytes] = {}
        self.late: dict[int, bytes] = {}
        """Newest content of pages, where it only reaches the disk by a sync."""
        self.length = 0
        self.versions: dict[int, list[bytes]] = {}
        self.lengths: list[int] = []

    def write(self, page: int, content: bytes, *, late: bool) -> None:
        if late:
            self.late[page] = content
        else:
            self.versions.setdefault(page, []).append(content)

    def sync(self) -> None:
        for page, versions in self.versions.items():
            self.durable[page] = versions[-1]
        self.durable.update(self.late)
        self.versions.clear()
        self.late.clear()
        if self.lengths:
            self.length = self.lengths[-1]
            self.lengths.clear()

    def leave(self, path: Path, rng: random.Random, luck: float) -> None:
        """Write the file as a crash leaves it. Each unsynced change is there with probability `luck`."""
        length = rng.choice(self.lengths) if self.lengths and rng.random() < luck else self.length
        if self.lengths and luck == 1:
            length = self.lengths[-1]
        pages = dict(self.durable)
        for page, versions in self.versions.items():
            if rng.random() >= luck:
                continue
            chain = [self.durable.get(page, b""), *versions]
            at = len(chain) - 1 if luck == 1 or rng.random() < 0.5 else rng.randrange(1, len(chain))
            pages[page] = chain[at]
            if luck < 1 and rng.random() < 0.2:
                pages[page] = _torn(chain[at - 1], chain[at], rng)
        with open(path, "wb", buffering=0) as file:  # zeros are not written: files of a timer have megabytes of them
            for page, content in pages.items():
                at = page * PAGE
                if at < length and content.strip(b"\0"):
                    os.pwrite(file.fileno(), content[: length - at], at)
            file.truncate(length)


def _torn(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """A page that was on its way from `old` to `new`: the first of the changed bytes are new."""
    old = old.ljust(len(new), b"\0")
    changed = [i for i in range(len(new)) if new[i] != old[i]]
    if not changed:
        return new
    cut = rng.randrange(changed[0], changed[-1] + 1)
    return new[:cut] + old[cut : len(new)]


def crash_point(events: Sequence[Event], rng: random.Random, first: int = 1) -> int:
    """How many events come before a crash, `first` or more. Half of the crashes follow a change of names or lengths:
    they are few among thousands of pages, and decide which files there are."""
    rare = [n + 1 for n in range(first, len(events)) if events[n].kind in ("names", "size", "sync_folder")]
    return rng.choice(rare) if rare and rng.random() < 0.5 else rng.randrange(first, len(events) + 1)


def build_image(
    events: Sequence[Event], rng: random.Random, target: Path, *, in_order: bool = False, luck: float | None = None
) -> list[Any]:
    """Make `target` what a crash right after the last of `events` may leave. Returns the marks that came before it.

    `in_order`: bytes reach the disk in the order they were written, whole calls at a time; names still do as they like.
    `luck`: 1 leaves all that was done, as `kill -9` does, 0 no more than what was synced; None: chosen by `rng`.
    """
    written_until = rng.randrange(len(events)) if in_order else len(events)
    files: dict[int, _Node] = {}
    folders = {ROOT}
    operations: list[tuple[int, tuple[tuple[int, str, int | None], ...]]] = []
    synced: dict[int, int] = {}
    """Number of the last event that synced a folder."""
    marks = []
    for number, (kind, operands) in enumerate(events):
        if kind == "write":
            node, page, content = operands
            files.setdefault(node, _Node()).write(page, content, late=number > written_until)
        elif kind == "size":
            node, length = operands
            files.setdefault(node, _Node()).lengths.append(length)
        elif kind == "sync":
            files.setdefault(operands[0], _Node()).sync()
        elif kind == "names":
            operations.append((number, operands))
        elif kind == "folder":
            folders.add(operands[0])
        elif kind == "sync_folder":
            synced[operands[0]] = number
        else:
            marks.append(operands[0])
    names_luck = luck
    if luck is None or names_luck is None:
        luck = 1.0 if in_order else rng.choice((0.0, 0.3, 0.5, 0.7, 1.0))
        names_luck = rng.choice((0.0, 0.5, 0.5, 1.0))
    tree: dict[int, dict[str, int]] = {}
    for number, changes in operations:
        durable = any(synced.get(folder, -1) > number for folder, _, _ in changes)
        if durable or rng.random() < names_luck:
            for folder, name, child in changes:
                if child is None:
                    tree.setdefault(folder, {}).pop(name, None)
                else:
                    tree.setdefault(folder, {})[name] = child
    target.mkdir()
    todo = [(ROOT, target)]
    while todo:
        folder, path = todo.pop()
        for name, child in tree.get(folder, {}).items():
            if child in folders:
                (path / name).mkdir()
                todo.append((child, path / name))
            else:
                files.get(child, _Node()).leave(path / name, rng, luck)
    return marks
