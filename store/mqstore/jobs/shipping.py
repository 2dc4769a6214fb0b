"""The package for executors that lack it, sent by a SparkContext.

In local mode, and where `mqstore` is installed on every machine, workers have it. Elsewhere it is sent as a zip. Its
requirements (numpy, pyarrow, crc32c, portalocker) are not: they are built for a machine.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["pack", "ship"]


@lru_cache(maxsize=1)
def ship(context: Any) -> bool:
    """Make `mqstore` importable for workers of this SparkContext. Returns True if it had to be sent.

    The first call costs a job of one task. Register data sources later: Spark notes then what workers may import.
    """

    def is_there(_: int) -> bool:  # made here, so it is sent by value: by name it would need what it looks for
        import importlib.util

        return importlib.util.find_spec("mqstore") is not None

    there = bool(context.parallelize([0], 1).map(is_there).collect()[0])
    if not there:
        folder = tempfile.mkdtemp(prefix="mqstore-")  # executors fetch it when they start, so it stays
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        context.addPyFile(pack(os.path.join(folder, "mqstore.zip")))
    return not there


def pack(archive: str) -> str:
    """Write the modules of the library, without the command, into a zip for imports. Return its path."""
    root = Path(__file__).parents[2]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted([*(root / "mqstore").rglob("*.py"), root / "pyspark_mqstore.py"]):
            file.write(path, path.relative_to(root).as_posix())
    return archive
