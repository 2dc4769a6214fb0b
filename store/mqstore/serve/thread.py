"""Server in a thread of the program that owns the store: `Store.serve`.

    thread of the program    serve -> waits until it listens           close -> waits until it has stopped
    thread mqstore-serve               loop: Server.start ... Server.stop

The thread is a daemon: a program that ends closes its stores first, and they close their servers.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from mqstore.closing import Closing
from mqstore.logger import log as _log
from mqstore.serve.listening import new_loop, parsed_address, refuse_other_machines, unix_path
from mqstore.serve.server import Server
from mqstore.signalsafe import Future, check_holds_none, in_each_child

if TYPE_CHECKING:
    from mqstore.broker.broker import Broker

_running: WeakSet[ServerThread] = in_each_child(lambda server: server.leave_to_parent())


class ServerThread(Closing):
    """Server of an open store, in a thread. Made by `Store.serve`, and closed by `with`, `close` or `Store.close`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     with store.serve("127.0.0.1:0") as server:
    ...         server.address.rpartition(":")[0]
    '127.0.0.1'
    """

    endpoints: list[str]
    """Where it listens: `host:port`, and `unix:path`."""

    def __init__(
        self,
        broker: Broker,
        listen: str | Iterable[str],
        *,
        unix: str | os.PathLike[str] | None,
        insecure_bind: bool,
        **options: Any,
    ) -> None:
        """Start a server as `Store.serve` does."""
        addresses = [parsed_address(each) for each in ([listen] if isinstance(listen, str | int) else listen)]
        if not insecure_bind and options.get("users") is None:
            refuse_other_machines([host for host, _ in addresses], "pass users= or insecure_bind=True")
        self._server = Server(
            broker, listen=addresses, unix=unix_path(broker.store.path) if unix is None else Path(unix), **options
        )
        self._ready: Future[list[str]] = Future()
        self._stop = asyncio.Event()
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._run, name="mqstore-serve", daemon=True)
        try:
            _running.add(self)
            self._thread.start()
            self.endpoints = self._ready.result()
        except BaseException:  # of the server's start, or of a signal handler
            self.close()
            raise

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if self._ready.done():
                _log.exception("%s: the server has ended", self._server.broker.store.path)
            else:
                self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        async with self._server:
            self._ready.set_result(self._server.endpoints)
            await self._stop.wait()

    @property
    def address(self) -> str:
        """First address at which it listens."""
        return self.endpoints[0]

    def close(self) -> None:
        """Accept nothing more, answer waiting calls, and disconnect every client. The store stays open.
        Repeating it is harmless, and so is a call in a forked child. Raises StoreBusyError in a signal handler that
        interrupted a call with a lock."""
        check_holds_none()
        if self._thread.ident is None:  # the system had no thread left
            self._loop.close()
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def leave_to_parent(self) -> None:
        """Give up the sockets in a forked child: else they would outlive the parent, with nobody who answers."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._server.descriptors():
            os.dup2(null, descriptor, inheritable=False)  # not closed: objects of the loop still have the number
        os.close(null)
