"""Copy of a directory: the caller chooses the files, and says when all must be on disk.

Modes and times are the original's, and so is the owner if that is permitted.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from mqstore.closing import Closing
from mqstore.files.filesystem import REAL, FileSystem

_UNSYNCED: Final = 16
"""Number of files that the system may be writing at the same time."""


class TreeCopy(Closing):
    """New directory `target`, filled from `source` by `file`, `content` and `link`.

    Names are paths within the two. `source` is read through `source_fs`. `on_bytes(count)` is called for written bytes.
    Errors are those of `FileSystem`. A name that already exists is FileExistsError.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        *,
        fs: FileSystem = REAL,
        source_fs: FileSystem = REAL,
        on_bytes: Callable[[int], object] = lambda count: None,
    ) -> None:
        self._source = source
        self._target = target
        self._fs = fs
        self._source_fs = source_fs
        self._on_bytes = on_bytes
        self._unsynced: deque[int] = deque()
        self._folders: dict[str, None] = {}
        self.folder("")

    def close(self) -> None:
        """Close the files that were not synced."""
        while self._unsynced:
            self._fs.close(self._unsynced.popleft())

    def folder(self, name: str) -> None:
        """Create a folder and its parents."""
        if name in self._folders:
            return
        if name:
            self.folder(os.path.dirname(name))
        self._fs.mkdir(self._target / name, exist_ok=True)
        self._folders[name] = None

    def content(self, name: str, content: bytes) -> None:
        """Write a file whose content was read before. The original may be gone."""
        fd = self._create(name)
        self._fs.pwrite(fd, content, 0)
        with suppress(FileNotFoundError):
            self._fs.take_after(fd, self._source_fs.stat(self._source / name))
        self._on_bytes(len(content))
        self._sync_some()

    def file(self, name: str, source: int, length: int | None = None) -> None:
        """Copy an open file, or its first `length` bytes with zeros up to its size.
        Bytes written later through a mapping get their disk blocks then."""
        found = self._source_fs.stat(source)
        length = found.st_size if length is None else length
        fd = self._create(name)
        self._fs.truncate_sparse(fd, found.st_size)
        self._fs.copy(source, fd, length)
        self._fs.take_after(fd, found)
        self._fs.write_back(fd)
        self._on_bytes(length)
        self._sync_some()

    def link(self, name: str) -> None:
        """Give the same file a second name. Both directories must be on one file system."""
        self.folder(os.path.dirname(name))
        self._fs.link(self._source / name, self._target / name)

    def sync(self) -> None:
        """Return once all copied files, and the directory itself, are on disk."""
        self._sync_some(0)
        for name in reversed(self._folders):
            with suppress(FileNotFoundError):
                self._fs.take_after(self._target / name, self._source_fs.stat(self._source / name))
            self._fs.sync_directory(self._target / name)
        self._fs.sync_directory(self._target.parent)

    def _create(self, name: str) -> int:
        self.folder(os.path.dirname(name))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        fd = self._fs.open(self._target / name, flags)
        self._unsynced.append(fd)
        return fd

    def _sync_some(self, left: int = _UNSYNCED) -> None:
        """Sync all but `left` files by the descriptors that wrote them, which receive the system's errors."""
        while len(self._unsynced) > left:
            fd = self._unsynced.popleft()
            try:
                self._fs.fdatasync(fd)
            finally:
                self._fs.close(fd)
