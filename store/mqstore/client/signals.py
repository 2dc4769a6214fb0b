"""Signals that stop a running consumer (clients#stop)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

__all__ = ["at_signals"]


@contextmanager
def at_signals(stop: Callable[[], object]) -> Iterator[None]:
    """On the main thread, call `stop` at SIGINT and SIGTERM. A second signal has its former effect."""
    restore: list[Callable[[], object]] = []

    def restore_all() -> None:
        for each in restore:
            each()

    def handle(number: int, frame: FrameType | None) -> None:
        restore_all()
        stop()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, handle)
            restore.append(partial(signal.signal, number, before))
    try:
        yield
    finally:
        restore_all()
