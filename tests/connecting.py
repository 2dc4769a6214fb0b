"""Stores of tests behind a server: `mqstore.open` swapped for serve and connect, in one process.

The store, its server and the client are in this process, so that a test can move the clock and look into the store.
The client has only the connection, except for administration, which no client does: `run_once`, settings of topics and
groups. After it everything that the server has sent is taken in, as a test with a clock of its own expects.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mqstore
from mqstore.remote import broker as remote
from mqstore.remote.store import RemoteStore
from mqstore.serve.thread import ServerThread

ADMINISTRATION = {
    "": ("change_invisible", "delete_group", "reset", "run_once", "save", "stats", "wait", "prometheus"),
    "topics": ("alter", "configs", "delete", "ensure"),
    "groups": ("alter", "delete", "forbid", "names"),
    "members": ("groups", "subscriptions"),
    "transactions": ("begin", "open_count", "open_transactions"),
}
"""Methods that tests call and no client does."""


_numbers = count()


@cache
def _sockets() -> str:
    folder, owner = tempfile.mkdtemp(), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder))  # children that are forked share it
    return folder


def socket_path() -> Path:
    """Not the store's own: the server of a store that a test has killed still listens in this process."""
    return Path(_sockets(), f"{os.getpid()}-{next(_numbers)}")


class ConnectedBroker(remote.RemoteBroker):
    """The contract of `behind`, over a connection to its server."""

    def __init__(self, behind: Any) -> None:
        self.behind = behind
        """For looks of tests past the wall."""
        self.serving = ServerThread(behind, "127.0.0.1:0", unix=socket_path(), insecure_bind=False)
        super().__init__(self.serving.address)
        administer(self, behind)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") or name.startswith("__") or "behind" not in vars(self):
            raise AttributeError(name)
        return getattr(self.behind, name)

    def _call(self, name: str, args: Any, options: Any) -> Any:
        try:
            return super()._call(name, args, options)
        finally:
            settle(self, name)

    def _keep(self, key: Any, name: str, given: Any) -> Any:
        try:
            return super()._keep(key, name, given)
        finally:
            settle(self, name)

    def _park(self, name: str, args: Any, options: Any) -> Any:
        try:
            return super()._park(name, args, options)
        finally:
            settle(self, name)

    def put(self, *args: Any, **options: Any) -> Any:
        try:
            return super().put(*args, **options)
        finally:
            settle(self)

    def remove_waiter(self, waiter: Any) -> bool:
        try:
            return super().remove_waiter(waiter)
        finally:
            settle(self)

    def close(self, timeout: Any = 30) -> None:
        super().close(timeout)
        if not self.behind.closed:
            self.serving.close()
        self.behind.close(timeout)


class ServedStore(RemoteStore):
    """A connection that has its server, and closes it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.behind = mqstore.open(*args, **options)
        """For looks of tests past the wall."""
        try:
            self.serving = self.behind.serve("127.0.0.1:0", unix=socket_path())
            super().__init__(self.serving.address)
        except BaseException:
            self.behind.close()
            raise
        administer(self._broker, self.behind.broker)

    @property
    def recovery(self) -> Any:
        return self.behind.recovery

    def _close_stopped(self, timeout_s: float, until: float) -> None:
        try:
            super()._close_stopped(timeout_s, until)
        finally:
            if not self.behind.closed:
                self.serving.close()
                closing = threading.Thread(target=self.behind.close)  # whose stack shows no call that holds a lock
                closing.start()
                closing.join()


def administer(broker: Any, behind: Any) -> None:
    """Give a remote broker the clock and the administration of the one behind it."""

    def through(call: Callable[..., Any]) -> Callable[..., Any]:
        def administered(*args: Any, **options: Any) -> Any:
            try:
                return call(*args, **options)
            finally:
                broker.settle()

        return administered

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*args: Any) -> Any:
            broker.heard += 1
            return call(*args)

        return heard

    broker.heard = 0
    for name in ("requested", "call_back"):
        setattr(broker._connection, name, counted(getattr(broker._connection, name)))
    broker.clock, broker.own_clock = behind.clock, behind.own_clock
    broker.settle = lambda: settle(broker)
    broker.offsets_folder = behind.store.path
    for table in ("topics", "groups"):
        getattr(broker, table).on_change = getattr(behind, table).on_change
    for table, names in ADMINISTRATION.items():
        target, source = (getattr(each, table) if table else each for each in (broker, behind))
        for name in names:
            setattr(target, name, through(getattr(source, name)))


SETTLED = ("members.", "locks.", "transactions.", "add_", "wake_one", "topics.create")
"""Calls whose effects on others are there when they return, as in one process."""


def settle(broker: Any, name: str = "members.") -> None:
    """Return once everything that the server has sent so far has been taken in, and callbacks have run."""
    line = broker._connection.line
    if not name.startswith(SETTLED) or broker.closed or line is None or line.turn.is_held_here:
        return
    quiet = 0
    for _ in range(6):  # a callback may call, and have other callbacks called
        heard = broker.heard
        remote.RemoteBroker._call(broker, "session.ping", (), {})
        for later in (broker._asked, broker._news) if not quiet else ():
            if later._thread is not None and later._thread is not threading.current_thread():
                done = threading.Event()
                later(done.set)
                done.wait(20)
        quiet = quiet + 1 if broker.heard == heard else 0
        if quiet == 2:
            return
