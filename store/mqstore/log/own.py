"""Check that a store's own names are regular files and folders, before a writer changes anything.

With a link in place of a store's own file or folder, the writer would change, move or remove files elsewhere. So such a
store is refused (`files/beneath.py` also refuses each call). Other names are not checked. The folders of the log and of
the consume queues, which may be 100,000, are checked when they are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mqstore.files.filesystem import FileSystem
from mqstore.log.manifest import MANIFEST

__all__ = ["check_own"]

_FOLDERS: Final = frozenset(
    {"commitlog", "config", "consumequeue", "cut", "inbox", "index", "local_offsets", "timerlog", "tmp", "_staging"}
)
_FILES: Final = frozenset(
    {"abort", "checkpoint", "lock", "timerwheel", *(MANIFEST + end for end in ("", ".bak", ".tmp", ".bak.tmp"))}
)
_LISTED: Final = ("config", "cut", "index", "local_offsets", "timerlog")


def check_own(root: Path, fs: FileSystem) -> None:
    """Raise StoreIOError if one of the store's own names is a link, a FIFO or the like, and name it."""
    if not root.exists():
        return
    there = fs.scandir(root)
    for name in there:
        if name in _FOLDERS:
            fs.check_own(root / name, "folder")
        elif name in _FILES:
            fs.check_own(root / name, "regular file")
    for name in _LISTED:
        if name in there:
            _check_below(root / name, fs)


def _check_below(folder: Path, fs: FileSystem) -> None:
    _, folders = fs.scandir_own(folder)
    for name in folders:
        _check_below(folder / name, fs)
