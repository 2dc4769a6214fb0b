"""Background threads that do not keep the object alive for which they work, and yield to the application's threads.

Such a thread refers to its object only while it works, not while it waits. So a store that the program no longer
refers to is collected, and closes itself (`StoreReader.__del__`).

CPython gives each busy thread the interpreter for an interval (`sys.getswitchinterval()`, 5 ms) in turn. A background
thread would use half of the time. So loops of background work call `breathe`, which gives up the interpreter after half
a millisecond. A thread that waits for it then has a whole interval. If none waits, the work continues.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import Protocol

from mqstore.signalsafe import Bell

_SLICE_S = 0.0005
_BREATH_S = 20e-6
"""Length of a pause, in which a waiting thread wakes up. Without a pause it would miss its turn."""
_slice = threading.local()
"""`end_s` is the end of a background thread's slice, by `time.perf_counter`. Other threads have none."""


def breathe() -> None:
    """Let other threads run if this is a background thread that has worked for `_SLICE_S` without a pause."""
    if time.perf_counter() > getattr(_slice, "end_s", math.inf):
        time.sleep(_BREATH_S)
        _slice.end_s = time.perf_counter() + _SLICE_S


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
    _slice.end_s = 0.0
    while (stepping := found()) is not None and (pause_s := stepping.step()) is not None:
        del stepping
        if not pause_s:
            breathe()
        bell.wait(pause_s)
