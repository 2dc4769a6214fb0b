"""Small brokers for tests: the log's small stores (tests/log/support.py), tables over them, and time by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mqstore.broker.parts import Mechanism, Parts, open_parts
from mqstore.clock import SimulatedClock
from mqstore.files.filesystem import FileSystem
from mqstore.options import Durability, Profile
from tests.log.support import open_store

__all__ = ["START_MS", "advance", "clock_of", "new_parts", "settle"]

START_MS = 1_700_000_000_000
"""Where a `SimulatedClock` starts."""


def new_parts(
    path: Path,
    mode: Literal["rw", "r"] = "rw",
    *,
    profile: Profile | None = None,
    durability: Durability = "append",
    fs: FileSystem | None = None,
    **config: Any,
) -> Parts:
    """Open (or open again) the store at `path` without threads, with its tables. `clock=` goes on with another's time.

    Close with `parts.store.close()`; mechanisms first.
    """
    config = {"segment_bytes": 1 << 16, **config} if not (path / "commitlog").exists() else config
    return open_parts(open_store(path, mode, profile=profile, durability=durability, fs=fs, **config))


def clock_of(parts: Parts) -> SimulatedClock:
    assert isinstance(parts.clock, SimulatedClock)
    return parts.clock


def settle(parts: Parts, mechanisms: Sequence[Mechanism], *, rounds: int = 1000) -> int | None:
    """Run everything that is due now, until nothing is; when the next is."""
    now_ms = parts.clock.now_ms()
    for _ in range(rounds):
        parts.store.dispatch()
        before = parts.store.max_offset
        due = [each.run_once(now_ms) for each in mechanisms]
        parts.store.dispatch()
        if parts.store.max_offset == before and all(when is None or when > now_ms for when in due):
            return min((when for when in due if when is not None), default=None)
    raise AssertionError(f"something is due again and again at {now_ms}")


def advance(parts: Parts, mechanisms: Sequence[Mechanism], duration_ms: int) -> None:
    """Let time pass as a housekeeper would see it: from one due time to the next."""
    clock = clock_of(parts)
    until_ms = clock.now_ms() + duration_ms
    due_ms = settle(parts, mechanisms)
    while due_ms is not None and due_ms <= until_ms:
        clock.advance(max(1, due_ms - clock.now_ms()))
        due_ms = settle(parts, mechanisms)
    clock.advance(until_ms - clock.now_ms())
    settle(parts, mechanisms)
