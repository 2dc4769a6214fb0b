"""The folder `tmp` of a store, in which files are prepared before they are renamed into place.

    tmp/<purpose>.<number>      the purpose is "cq", "index", "timerwheel" or the 20 digits of a segment
    tmp/room                    not prepared for anything: it reserves disk blocks (`log/writing/room.py`)

A crash leaves such files, and the next writer removes them. Other files in the folder do not belong to mqstore and are
left alone. Earlier versions used the purpose alone, or "cq-" and a number. Such files are removed, too.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mqstore.files.filesystem import FileSystem, StrPath

_OURS = re.compile(r"(?:[0-9]{20}|cq|index|timerwheel)(?:[.-][0-9]+)?")

#: Distinguishes files that several threads and stores prepare at the same time.
_numbers = itertools.count()


def temporary_path(folder: StrPath, purpose: str) -> str:
    """Return an unused path in `folder`, for a file to be created with O_EXCL."""
    assert _OURS.fullmatch(purpose), f"{purpose} would not be removed after a crash"
    while True:
        path = os.path.join(folder, f"{purpose}.{next(_numbers)}")
        if not os.path.lexists(path):  # files that are not ours stay there
            return path


@contextmanager
def new_file(fs: FileSystem, folder: StrPath, purpose: str, target: StrPath, mode: int) -> Iterator[int]:
    """Yield a descriptor of a new file in `folder`, which gets the name `target` at the end, in one step.
    If the caller raises, the file is removed. The caller syncs everything that must be durable before the rename."""
    path = temporary_path(folder, purpose)
    try:
        with fs.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode) as fd:
            yield fd
        fs.replace(path, target)
    except BaseException:
        fs.unlink(path, missing_ok=True)
        raise


def remove_temporaries(fs: FileSystem, folder: StrPath) -> None:
    """Remove the files in `folder` that a crash left."""
    for name, _ in fs.scandir_files(folder):
        path = os.path.join(folder, name)
        if _OURS.fullmatch(name) and not os.path.islink(path):
            fs.unlink(path, missing_ok=True)
