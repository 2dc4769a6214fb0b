"""File systems of limited size: a tmpfs where this process may mount one, else a limit on mqstore's own calls."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqstore.files.filesystem import FileSystem, StrPath

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["blocks", "small_disk"]


def blocks(root: Path) -> int:
    """Return the number of bytes on disk below `root`, as `du` counts them."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


@contextmanager
def small_disk(path: Path, size: int, *, needs_mount: bool = False) -> Iterator[Path]:
    """Give an empty folder for which there are `size` bytes. Skips a test that `needs_mount` where nobody may mount."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        try:
            yield path
        finally:
            # Tasks and messages that a test holds keep their mappings.
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        return
    if needs_mount:
        pytest.skip("only root may mount a file system, and not in every container")
    with pytest.MonkeyPatch.context() as patch:
        _limit(patch, path, size)
        yield path


def _limit(patch: pytest.MonkeyPatch, root: Path, size: int) -> None:
    """Fail each call of this process that would take more than `size` bytes below `root`."""
    free_bytes, pwrite = FileSystem.free_bytes, FileSystem.pwrite
    allocate, allocate_more = FileSystem.allocate, FileSystem.allocate_more

    def free(fs: FileSystem, path: StrPath) -> int:
        return max(0, size - blocks(root)) if Path(path).is_relative_to(root) else free_bytes(fs, path)

    def check(fs: FileSystem, fd: int, end: int) -> None:
        """Refuse a file that would have more blocks than there are."""
        name = fs.path_of(fd)
        if Path(name).is_relative_to(root) and end - os.fstat(fd).st_blocks * 512 > size - blocks(root):
            fs._fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), fd, "write")

    def limited_pwrite(fs: FileSystem, fd: int, data: ReadableBuffer, position: int) -> None:
        check(fs, fd, position + memoryview(data).nbytes)
        pwrite(fs, fd, data, position)

    def limited_allocate(fs: FileSystem, fd: int, length: int, first: int) -> int:
        check(fs, fd, first)
        return allocate(fs, fd, length, first)

    def limited_more(fs: FileSystem, fd: int, start: int, stop: int) -> None:
        check(fs, fd, stop)
        allocate_more(fs, fd, start, stop)

    patch.setattr(FileSystem, "free_bytes", free)
    patch.setattr(FileSystem, "pwrite", limited_pwrite)
    patch.setattr(FileSystem, "allocate", limited_allocate)
    patch.setattr(FileSystem, "allocate_more", limited_more)
