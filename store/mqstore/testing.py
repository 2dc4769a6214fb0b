"""Stores for the tests of an application (`docs/testing.md`).

pytest has them as fixtures, which the installed package brings along (`pytest_mqstore`):

    mq_store     a new, small store, closed and removed after the test
    mq_clock     its clock: with it time passes only by `mq_clock.advance`
    mq_server    address of a server of `mq_store`, for `mqstore.connect` and `mqstore.aio.connect`

>>> clock = StoreClock()
>>> with temporary_store(clock=clock) as store:
...     jobs = store.queue("jobs")
...     receipt = jobs.put(b"later", delay=3600)
...     clock.advance(3_600_000)
...     jobs.get(block=False).value
b'later'
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mqstore
from mqstore.clock import SimulatedClock

__all__ = ["StoreClock", "temporary_store"]

SMALL = {"segment_bytes": 8 << 20, "consumequeue_units": 1024, "index_slots": 1000, "index_entries": 4000}
"""Sizes of the files of a store whose tests put little. A segment has room for the largest message."""


class StoreClock(SimulatedClock):
    """Clock of a store that only a test moves. Its store has no background threads."""

    __slots__ = ("store",)

    store: mqstore.Store | None

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        super().__init__(now_ms)
        self.store = None

    def advance(self, duration_ms: int) -> None:
        """Move the clock, and let the store do everything that is due then, as `store.broker.run_once` does."""
        super().advance(duration_ms)
        if self.store is not None:
            self.store.broker.run_once()


@contextmanager
def temporary_store(*, clock: StoreClock | None = None, **config: Any) -> Iterator[mqstore.Store]:
    """Open a store in a new temporary directory, and close and remove it at the end.
    `config` are options of `StoreConfig`. Without a clock it has the system's, and the threads of a store."""
    options = mqstore.StoreConfig(**{**SMALL, "clock": clock, **config})
    with (
        tempfile.TemporaryDirectory(prefix="mqstore-", ignore_cleanup_errors=True) as folder,
        mqstore.open(folder, config=options) as store,
    ):
        if clock is not None:
            clock.store = store
        yield store
