"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(happened: Callable[[], object], limit_s: float = 60, pause_s: float = 0.01) -> None:
    """Return when `happened()` is true. The test fails after `limit_s`."""
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, f"it did not happen within {limit_s:g} s"
        time.sleep(pause_s)
