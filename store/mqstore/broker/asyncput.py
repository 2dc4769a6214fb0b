"""Puts that do not wait for the disk, but return futures of the receipts.

An event loop must not wait for a sync. It passes its records on and gets futures. One thread, started with the first of
them, syncs all records that have been collected meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from mqstore.errors import StoreClosedError
from mqstore.log.commitlog import SendReceipt
from mqstore.log.store import MessageStore
from mqstore.signalsafe import Bell, Future
from mqstore.threads import start_thread

__all__ = ["AsyncPuts"]


class AsyncPuts:
    """Futures of receipts whose records are stored and not yet synced."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._lock = threading.RLock()  # a signal handler may put in the middle of a put
        self._bell = Bell()
        self._waiting: list[tuple[Future[SendReceipt], SendReceipt]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, put: Callable[[], SendReceipt], *, synced: bool) -> Future[SendReceipt]:
        """Call `put`, which must not wait for the disk itself. Return its future receipt.
        The future is done when `put` returns or, with `synced`, once its record is on disk. It has the error that `put`
        raises."""
        future: Future[SendReceipt] = Future()
        future.set_running_or_notify_cancel()
        try:
            receipt = put()
        except Exception as error:
            future.set_exception(error)
            return future
        if not synced:
            future.set_result(receipt)
            return future
        with self._lock:
            if self._closed:
                future.set_exception(StoreClosedError(f"{self._store.path} is closing"))
                return future
            if self._thread is None:
                self._thread = start_thread(self, self._bell, "async-put")
            self._bell.ring()  # first: a signal handler may raise behind it. The thread waits for the lock
            self._waiting.append((future, receipt))
        return future

    def step(self) -> float | None:
        """Sync the records that wait, in the thread (`mqstore.threads`) or while closing."""
        with self._lock:
            batch, self._waiting = self._waiting, []
        if batch:
            try:
                self._store.flush()
            except Exception as error:
                for future, _ in batch:
                    future.set_exception(error)
            else:
                for future, receipt in batch:
                    future.set_result(receipt)
        return None if self._closed else math.inf

    def close(self) -> None:
        """Sync the waiting records, and refuse further ones."""
        with self._lock:
            self._closed = True
        self._bell.ring()
        if self._thread is not None and self._thread is not threading.current_thread():  # a callback calls this
            self._thread.join()
            self.step()  # what the thread has not taken
