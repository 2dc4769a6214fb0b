"""Background threads that do not keep the object alive for which they work.

Such a thread refers to its object only while it works, not while it waits. So a store that the program no longer
refers to is collected, and closes itself (`StoreReader.__del__`).
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from mqstore.signalsafe import Bell


class HoldingBell(Bell):
    """Bell by which a waiting thread keeps an object alive while it is `held`, such as one with unfinished work."""

    __slots__ = ("held",)
    held: object


class Stepping(Protocol):
    def step(self) -> float | None:
        """Do the due work. Return the seconds to wait for a ring at most, or None to end the thread."""


def start_thread(stepping: Stepping, bell: Bell, name: str) -> threading.Thread:
    """Start a daemon thread that calls `stepping.step()` until it returns None, or `stepping` was collected."""
    thread = threading.Thread(target=_run, args=(weakref.ref(stepping), bell), name=f"mqstore-{name}", daemon=True)
    thread.start()
    return thread


def _run(found: weakref.ref[Stepping], bell: Bell) -> None:
    while (stepping := found()) is not None and (pause_s := stepping.step()) is not None:
        del stepping
        bell.wait(pause_s)
