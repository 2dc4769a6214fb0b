"""The server process of a shared directory, as a test sees it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.serve.support import notice


def pid_of(directory: Path) -> int:
    """Return the process id of the server."""
    pid: int = notice(directory)["pid"]
    return pid


def has_ended(pid: int) -> bool:
    """Return True once there is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def starts(directory: Path) -> int:
    """Return how many servers have been started."""
    return (directory / "serve.log").read_text().count(": serving at ")
