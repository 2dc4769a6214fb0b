"""The folder `tmp` of a store: where files are prepared before they are renamed into place.

    tmp/<purpose>.<number>      the purpose is "cq", "index", "timerwheel" or the 20 digits of a segment

A crash leaves such files, and the next writer removes them. Nothing else in the folder is mqstore's, so nothing else is
touched. Earlier versions wrote the purpose alone, or "cq-" and a number: those are removed, too.
"""

from __future__ import annotations

import itertools
import os
import re

from mqstore.files.filesystem import FileSystem, StrPath

__all__ = ["remove_temporaries", "temporary_path"]

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


def remove_temporaries(fs: FileSystem, folder: StrPath) -> None:
    """Remove the files in `folder` that a crash left there."""
    for name, _ in fs.scandir_files(folder):
        path = os.path.join(folder, name)
        if _OURS.fullmatch(name) and not os.path.islink(path):
            fs.unlink(path, missing_ok=True)
