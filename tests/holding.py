"""What this process holds. Tests share a process: what others left open may be closed, and their threads end, at any
moment. So nothing is counted, all is told apart by name, and only what is new is somebody's fault."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

_ENDS_S = 20.0


def open_files() -> Counter[str]:
    """Names of what the descriptors of this process are for. `open_files() - before` is what is new. Nothing where that
    cannot be seen."""
    gc.collect()  # what lies in cycles is not held
    names = Counter[str]()
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(FileNotFoundError):  # the one of this very listing
            names[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return names


def mapped_files(folder: Path) -> list[str]:
    """Paths of the files below `folder` that this process has mapped, once for each mapping. Linux only."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split(None, 5)[5] for line in lines if f" {folder}/" in line)


def held(folder: Path) -> list[str]:
    """Paths of the files below `folder` that this process has open or mapped, once for each time. Linux only."""
    return [name for name in open_files().elements() if name.startswith(f"{folder}/")] + mapped_files(folder)


def new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    """Threads that are not of `before` and have not ended within some seconds either."""
    end = time.monotonic() + _ENDS_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < end:
        time.sleep(0.005)
    return left
