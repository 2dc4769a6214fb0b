"""The folder `tmp` of a store: where files are prepared before they are renamed into place.

    tmp/<purpose>.<number>      the purpose is "cq", "index", "timerwheel" or the 20 digits of a segment
    tmp/room                    not prepared for anything: it holds disk blocks (`log/room.py`)

A crash leaves such files, and the next writer removes them. Nothing else in the folder is mqstore's, so nothing else is
touched. Earlier versions wrote the purpose alone, or "cq-" and a number: those are removed, too.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mqstore.files.filesystem import FileSystem, StrPath

__all__ = ["new_file", "remove_temporaries", "temporary_path"]

_OURS = re.compile(r"(?:[0-9]{20}|cq|index|timerwheel)(?:[.-][0-9]+)?")

#: Tells apart what several threads and stores prepare at the same time.
_numbers = itertools.count()


def temporary_path(folder: StrPath, purpose: str) -> str:
    """Return a path in `folder` that nothing has, for a file to be created with O_EXCL."""
    assert _OURS.fullmatch(purpose), f"{purpose} would not be removed after a crash"
    while True:
        path = os.path.join(folder, f"{purpose}.{next(_numbers)}")
        if not os.path.lexists(path):  # what is not ours stays there
            return path


@contextmanager
def new_file(fs: FileSystem, folder: StrPath, purpose: str, target: StrPath, mode: int) -> Iterator[int]:
    """Give a descriptor of a new file in `folder`, which gets the name `target` at the end, in one step.
    Nothing stays behind if the caller raises. The caller syncs what has to be durable before it has its name."""
    path = temporary_path(folder, purpose)
    try:
        with fs.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode) as fd:
            yield fd
        fs.replace(path, target)
    except BaseException:
        fs.unlink(path, missing_ok=True)
        raise


def remove_temporaries(fs: FileSystem, folder: StrPath) -> None:
    """Remove the files in `folder` that a crash left there."""
    for name, _ in fs.scandir_files(folder):
        path = os.path.join(folder, name)
        if _OURS.fullmatch(name) and not os.path.islink(path):
            fs.unlink(path, missing_ok=True)
