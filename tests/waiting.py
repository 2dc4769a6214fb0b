"""Waiting for what another thread or process does, and for a clock that a test moves."""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mqstore import SimulatedClock


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


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` in a thread. What it returns or raises comes into the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def ended(thread: threading.Thread, outcome: list[Any], timeout_s: float = 20) -> Any:
    """Return what the thread has returned or raised, once it has ended."""
    thread.join(timeout_s)
    assert not thread.is_alive()
    return outcome[0]


def in_threads(*calls: Callable[[], object]) -> None:
    """Run all `calls` at once. What any of them raises fails the test."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        gate.wait()
        call()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # by 5 ms each is done before the next begins
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            for future in [pool.submit(run, call) for call in calls]:
                future.result()
    finally:
        sys.setswitchinterval(interval)


def pass_time(clock: SimulatedClock, duration_ms: int, settle: Callable[[], int | None]) -> None:
    """Let time pass from one due time to the next, as the housekeeper would.
    `settle` does what is due, and returns the next due time."""
    until_ms = clock.now_ms() + duration_ms
    while (due_ms := settle()) is not None and due_ms <= until_ms:
        clock.advance(max(1, due_ms - clock.now_ms()))
    clock.advance(max(0, until_ms - clock.now_ms()))
    settle()
