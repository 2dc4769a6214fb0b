"""Mechanism: what a broker's background services have in common (ARCHITECTURE.md).

    mechanism   run_once(now_ms) -> next_run_ms     does what is due; a housekeeper thread or a test calls it
                persist()                           writes its state to disk
                close()                             releases listeners and files
                pins()                              records of the log that it still needs
    roller      waiting_below(offset)               those of them that it can relocate to the log end
                roll(offset, count, now_ms)         relocates them

Each mechanism gets a function `wake` for "something may be due before my next run". Any thread may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Mechanism", "Pin", "Roller", "Wake"]

Wake = Callable[[], None]


class Pin(NamedTuple):
    """Record that must stay, and the group that needs it."""

    physical_offset: int
    topic: str
    queue_id: int
    group: str
    why: str
    rolls: bool = False
    """True if the mechanism can relocate the message to the log end (`Roller`)."""


class Mechanism:
    """Background mechanism of a broker. Never runs, saves or closes in two threads at once (`Housekeeper.turn`)."""

    def run_once(self, now_ms: int) -> int | None:
        """Do what is due at `now_ms` (wall clock). Return the time of the next run, None: when woken."""
        raise NotImplementedError

    def persist(self) -> None:
        """Write to disk everything that the next process must know. For saving, snapshots and closing."""

    def close(self) -> None:
        """Release listeners and files. Called once, after the last `persist`, while the store is still open."""

    def pins(self) -> Iterable[Pin]:
        """Return pins of the oldest records that the mechanism still needs. This class needs none."""
        return ()


class Roller(Mechanism):
    """Mechanism that keeps messages for long, and can relocate them (delivery#retention-bound).
    Relocated messages do not hold the log that was written since. Both methods are called in the thread of
    `run_once`."""

    def waiting_below(self, physical_offset: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return physical offsets and sizes of waiting records below `physical_offset`. An estimate."""
        raise NotImplementedError

    def roll(self, physical_offset: int, count: int, now_ms: int) -> int:
        """Relocate up to `count` waiting messages, oldest first. Return how many were handled.
        They wait for the same time. 0 means that there are none, or that none can be relocated now. The copies may not
        be on disk when it returns: `pins` changes when they are. Raises what a put raises, after which relocated
        messages stay so."""
        raise NotImplementedError
