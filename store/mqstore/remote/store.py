"""The store object of `mqstore.connect`: `Store` over a connection (remoting-server, section 13).

Everything that needs only the contract is that of `Store`. Reads of the log are calls, and iterations read a page at a
time. Whatever needs the files themselves is refused, or done on the server.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn
from weakref import WeakSet

from mqstore.broker.admin.operations import Operations
from mqstore.errors import ConfigError, ConnectionLostError, NotSupportedError, StoreLockedError
from mqstore.files.lock import refuse_beside_writer
from mqstore.files.readonly_fs import QUIET
from mqstore.log.commitlog import QueueRef
from mqstore.log.reading.iteration import IteratingReader
from mqstore.log.recovery.report import Finding, RecoveryReport
from mqstore.log.snapshot.copy import SnapshotReport
from mqstore.options import Duration, seconds
from mqstore.remote.broker import RemoteBroker
from mqstore.remote.cluster.broker import ClusterBroker
from mqstore.remote.dialing import announced, tls_context
from mqstore.remoting.signing import signer
from mqstore.signalsafe import Bell, in_each_child
from mqstore.store import Store

if TYPE_CHECKING:
    from mqstore.remote.dialing import Tls

_stores: WeakSet[RemoteStore] = in_each_child(lambda store: store._begin())


class _Queue:
    """A queue of the server, for iterations. Its bounds are as of now."""

    cuts, cut_to = 0, 0

    def __init__(self, log: Any, topic: str, queue_id: int) -> None:
        self._log = log
        self.ref = QueueRef(topic, queue_id)
        self.topic, self.queue_id = topic, queue_id

    @property
    def min_offset(self) -> int:
        return int(self._log.offsets(*self.ref)[0])

    @property
    def max_offset(self) -> int:
        return int(self._log.offsets(*self.ref)[1])


class _News:
    """Growth of queues of the server."""

    def __init__(self, broker: RemoteBroker) -> None:
        self._broker = broker

    def wait(self, queue: _Queue, offset: int, timeout_s: float, is_closed: Callable[[], bool]) -> None:
        bell = Bell()
        waiter = self._broker.add_waiter(*queue.ref, offset, lambda worth: bell.ring(), timeout=timeout_s)
        try:
            bell.wait()
        finally:
            self._broker.remove_waiter(waiter)


class RemoteLog(IteratingReader):
    """Log of a server: `get`, `find`, bounds and iterations. It has no files."""

    mode: ClassVar[Literal["r", "rw"]] = "rw"

    def __init__(self, broker: RemoteBroker) -> None:
        self._broker = broker
        self.path = Path(broker.name)
        self.news: Any = _News(broker)
        self.records: Any = SimpleNamespace(ahead=None)  # the server reads ahead
        vars(self).update(vars(broker.log))  # the calls themselves

    @property
    def closed(self) -> bool:
        return self._broker.closed

    def check_open(self) -> None:
        self._broker.check_open()

    def queue_named(self, topic: str, queue_id: int, offset: int | None = None) -> Any:
        """Return a queue. Raises TopicNotFoundError."""
        queue = _Queue(self, topic, queue_id)
        if offset is None:
            self.offsets(topic, queue_id)
        return queue

    @property
    def max_offset(self) -> int:
        """End of the log, in bytes."""
        return int(self.stats().max_offset)

    def _verifier_until(self, until: int | None) -> NoReturn:
        raise ConfigError(f"{self.path} is verified by its server: call Store.verify")

    def close(self, timeout: Duration = 30) -> None:
        """Do nothing: the broker has the connection."""


class RemoteStore(Store):
    """The store of a server, opened by `mqstore.connect`. Thread-safe.

    It is a `Store`, except that the files are the server's: `path` is its directory there, `snapshot` writes there, and
    `recovery` and `to_arrow` are refused. After a fork the child has a connection of its own."""

    def __init__(
        self,
        address: str | PathLike[str],
        *,
        timeout: Duration = 10,
        access_key: str | None = None,
        secret_key: str | None = None,
        tls: Tls = None,
        dial: Callable[[], socket.socket] | None = None,
    ) -> None:
        """Connect as `mqstore.connect` does, or by `dial`, which returns a connected socket."""
        self._prepare()
        timeout_s = seconds(timeout, "timeout")
        options = {"sign": signer(access_key, secret_key), "tls": tls_context(tls)}
        broker: Any = _connected(os.fspath(address), timeout_s, dial, options)
        self._broker = broker
        self.log: Any = RemoteLog(broker)
        self._register()
        _stores.add(self)

    def _begin(self) -> None:
        """Give a forked child locks of its own."""
        broker: Any = self._broker
        if isinstance(broker, RemoteBroker):
            broker._begin()
        for queue in list(self._made["queue"]):
            queue._begin()

    @property
    def admin(self) -> Operations:
        """What an operator sees and changes (`mqstore.admin.operations`), done by the server.
        Raises NotSupportedError for a cluster."""
        return self._server().admin

    def clients(self) -> list[dict[str, Any]]:
        """Return the clients of the server, as `mqstore clients --json` prints them.
        Raises NotSupportedError for a cluster."""
        return self._server().session.clients()

    def _server(self) -> RemoteBroker:
        broker: Any = self.broker
        if not isinstance(broker, RemoteBroker):
            raise NotSupportedError(f"{broker.name} is a cluster of Apache RocketMQ: its own mqadmin does this")
        return broker

    def _refuse_here(self, name: str, instead: str) -> NoReturn:
        raise ConfigError(f"{name} needs the files of {self.path}, which a server has open: {instead}")

    @property
    def recovery(self) -> RecoveryReport:
        """Refused: the server has logged it."""
        self._refuse_here("recovery", "the server has logged its report")

    def to_arrow(self, *args: Any, **options: Any) -> Any:
        """Refused: `mqstore.open(path, "r")` reads the files next to the server."""
        self._refuse_here("to_arrow", f"mqstore.open({str(self.path)!r}, 'r').to_arrow(...) reads them next to it")

    def serve(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: the store is served already."""
        self._refuse_here("serve", "connect to that server, at its address or at this directory")

    def verify(self) -> Iterator[Finding]:
        """Check everything on the server, as `Store.verify`. Yields at most 10,000 findings."""
        yield from self.log.verify()

    def snapshot(
        self, target: str | PathLike[str], *, link: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> SnapshotReport:
        """Copy the store to the folder `target` on the server's machine, as `Store.snapshot`.
        `progress` is called once, at the end."""
        report: SnapshotReport = self.log.snapshot(os.fspath(target), link=link)
        if progress is not None:
            progress(report.log_end, report.log_end)
        return report


def _connected(
    address: str, timeout_s: float, dial: Callable[[], socket.socket] | None, options: dict[str, Any]
) -> RemoteBroker | ClusterBroker:
    """Connect to a server, or to the cluster of a name server, which knows no hello."""
    if dial is None and ";" in address:
        return ClusterBroker(address, timeout=timeout_s, **options)
    if dial is not None or not os.path.isdir(address):
        try:
            return RemoteBroker(address, timeout_s=timeout_s, dial=dial, **options)  # type: ignore[abstract]  # methods are set by the table
        except NotSupportedError:
            return ClusterBroker(address, timeout=timeout_s, **options)
    failure = ConnectionLostError(f"no server has {address} open; start one with: mqstore serve {address}", sent=False)
    failure.errno = errno.ENOENT  # a server that does not answer has none
    for endpoint, has_lock in _announced(Path(address)):
        try:
            broker = RemoteBroker(endpoint, timeout_s=timeout_s, **options)  # type: ignore[abstract]
        except ConnectionLostError as error:
            failure = error if has_lock else failure
            continue
        except (ConfigError, NotSupportedError):
            if has_lock:
                raise
            continue
        if has_lock or _is_same(broker.name, address):
            return broker
        broker.close()  # it serves another store: this directory is a copy of it
    raise failure


def _is_same(name: str, path: str) -> bool:
    with suppress(OSError):
        return os.path.samefile(name, path)
    return False


def _announced(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the endpoints in the file that a server has left in a directory, and True if it has the writer's lock.
    Otherwise it was killed, or the directory is a copy. Only a Unix socket is worth a try then: a supervisor keeps it
    until the next server runs, and nobody else has taken it."""
    pid, endpoints = announced(path)
    holder: int | None = None
    try:
        refuse_beside_writer(path, QUIET)
    except StoreLockedError as error:
        holder = error.pid
    has_lock = holder is not None and holder == pid
    for each in sorted(endpoints, key=lambda each: not each.startswith("unix:")):
        if has_lock or each.startswith("unix:"):
            yield each, has_lock


def connect(
    address: str | PathLike[str],
    *,
    timeout: Duration = 10,
    access_key: str | None = None,
    secret_key: str | None = None,
    tls: Tls = None,
) -> RemoteStore:
    """Connect to a store that another process serves (`mqstore serve`), or to an Apache RocketMQ cluster.

    `address` is `host:port`, the path of a Unix socket, or the served directory itself. For a cluster it is the name
    servers, `host:port;host:port`. docs/cluster.md lists the differences. Any number of processes may be
    connected, and each may fork. A connection that is lost is made again: calls wait for that at most `timeout`
    seconds, and are repeated if that is harmless. A put is repeated only with a `unique_key`.

    With `access_key` and `secret_key` each request is signed, for a server with `--auth`, where the key must be one of
    an administrator, or a cluster with access keys. With `tls` connections by TCP use TLS, for a server with
    `--tls-cert` or such a cluster. It is a file of certificates to trust, in PEM, True for those that the system
    trusts, or an `ssl.SSLContext`. The certificate must name the host of the address. A Unix socket needs neither.

    Raises ConnectionLostError without a server or with an untrusted one, ConfigError for an address or a server of
    another kind.
    """
    return RemoteStore(address, timeout=timeout, access_key=access_key, secret_key=secret_key, tls=tls)
