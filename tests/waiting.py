"""Waiting for what another thread or process does."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any


def until(happened: Callable[[], object], limit_s: float = 60, pause_s: float = 0.01) -> None:
    """Return when `happened()` is true. The test fails after `limit_s`."""
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, f"it did not happen within {limit_s:g} s"
        time.sleep(pause_s)


def is_readable(file: Any, wait_s: float = 0) -> bool:
    """Return True once a file or socket has something to read, and False after a time.
    `select.select` refuses descriptors above 1,023, which a process of many tests may have."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))
