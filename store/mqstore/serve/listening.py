"""Sockets of a server: TCP addresses, a Unix socket, and those that a service manager hands over.

    bound socket -> accept, in the loop -> Unix socket: is its user ours? -> Connection
                       |                   TCP with TLS: first byte 22    -> TLS -> Connection
                       |
                       +-- as many connections as allowed: accepting pauses, clients wait in the backlog

`serve.json` in the store's directory names the endpoints while the server runs, for `mqstore.connect(path)`:

    {"pid": 4711, "version": "0.1.0", "endpoints": ["127.0.0.1:9876", "unix:/var/lib/mq/serve.sock"]}

Source: remoting-server, sections 3, 14.4 and 18.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import ipaddress
import json
import os
import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqstore.errors import ConfigError
from mqstore.files.filesystem import free_descriptors
from mqstore.logger import log as _log
from mqstore.serve.connection import Connection, endpoint_of
from mqstore.version import VERSION

if TYPE_CHECKING:
    from mqstore.serve.server import Server

Address = tuple[str, int]
"""Host and port. Port 0 is any free one."""
SOCKET_NAME: Final = "serve.sock"
_NOTICE_NAME: Final = "serve.json"
_UNIX_PATH_BYTES_MAX: Final = 107
"""Longest path of a Unix socket on Linux."""
_BACKLOG: Final = 512
_ACCEPTS_A_TURN: Final = 64
_FIRST_DESCRIPTOR: Final = 3
_FILES: Final = 64
"""Descriptors that connections leave to the store."""
_NO_DESCRIPTOR_S: Final = 1.0
"""Pause of accepting when the process has no free descriptor."""
_GREETING_S: Final = 10
"""Time for the first byte, and for the handshake of TLS."""
_HANDSHAKE: Final = b"\x16"
"""First byte of a client's TLS. A frame begins by its length, which is smaller than 0x16000000."""
_SILENT_S: Final = 60
"""Time after which the system begins to ask a TCP client that sends nothing, and has nothing to read, for a sign.
A machine without power says no goodbye, and its waiting calls would stay."""
_UCRED: Final = struct.Struct("3i")
"""Process, user and group of the peer of a Unix socket."""


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's if that is installed, with which a call takes less of the server's time."""
    with suppress(ImportError):
        loop: asyncio.AbstractEventLoop = import_module("uvloop").new_event_loop()
        return loop
    return asyncio.new_event_loop()


def parsed_address(text: str) -> Address:
    """Return host and port of `HOST:PORT`. An IPv6 host is in brackets. Raises ConfigError.

    >>> parsed_address("127.0.0.1:9876"), parsed_address("[::1]:0")
    (('127.0.0.1', 9876), ('::1', 0))
    """
    host, _, port = str(text).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{text!r:.200} is not HOST:PORT, such as 127.0.0.1:9876 or [::1]:9876")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return True for a host that only processes of this machine reach."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def refuse_other_machines(hosts: Iterable[str], otherwise: str) -> None:
    """Raise ConfigError for a host that other machines reach, which must not happen unasked while clients need no
    password. `otherwise` says how to ask for it."""
    for host in hosts:
        if not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines, and clients need no password: listen on 127.0.0.1, or "
                f"{otherwise}"
            )


def bind_all(addresses: Iterable[Address], unix: Path | None) -> list[socket.socket]:
    """Listen at TCP addresses, with a socket for each IP address, and on a Unix socket.
    Raises OSError if an address is taken, and ConfigError if the path of the Unix socket is too long."""
    bound: list[socket.socket] = []
    try:
        for address in addresses:
            bound += _bind(address)
        if unix is not None:
            bound.append(bind_unix(unix))
    except BaseException:
        close(bound)
        raise
    return bound


def _bind(address: Address) -> list[socket.socket]:
    host, port = address
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, *_, name in dict.fromkeys(found):
        try:
            sockets.append(socket.create_server(name, family=family, backlog=_BACKLOG))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # as ::1 of localhost without IPv6
                close(sockets)
                raise
            missing = error
    if missing is not None and not sockets:
        raise missing
    return sockets


def bind_unix(path: Path) -> socket.socket:
    """Listen on a Unix socket that only this user can use. The file of a server that was killed is replaced.
    Raises ConfigError if the path is too long, and OSError if a server listens there."""
    path = path.absolute()
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES_MAX:
        raise ConfigError(f"{path} has more than {_UNIX_PATH_BYTES_MAX} bytes, too many for a Unix socket")
    if path.is_socket():
        if _is_listening(path):
            raise OSError(errno.EADDRINUSE, "a server listens on this Unix socket already", str(path))
        path.unlink()
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        path.chmod(0o600)  # nobody can connect before `listen`
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, error.strerror, str(path)) from None
    return bound


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)  # it listens, or its backlog is full


def unix_path(directory: Path) -> Path | None:
    """Return the path of a store's Unix socket, in its directory, or if that is too long, in the user's folder for
    sockets. None if there is not such a folder, or its path is too long as well."""
    path = directory.absolute() / SOCKET_NAME
    paths = [path]
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        paths.append(Path(folder, f"mqstore-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.sock"))
    return next((each for each in paths if len(os.fsencode(each)) <= _UNIX_PATH_BYTES_MAX), None)


def inherited() -> list[socket.socket]:
    """Return the listening sockets that a service manager has opened for this process, as systemd does
    (`sd_listen_fds`). Only the first call finds them.
    Raises OSError or ConfigError if one is not a listening socket."""
    process, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if process != str(os.getpid()) or not count.isdecimal():
        return []
    found = [socket.socket(fileno=number) for number in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count))]
    for each in found:
        each.set_inheritable(False)
        if each.type != socket.SOCK_STREAM or not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ConfigError(f"descriptor {each.fileno()} is not a listening socket: ListenStream= makes one")
    return found


def close(sockets: Iterable[socket.socket]) -> None:
    """Close sockets that `bind` and `bind_unix` have opened, and remove the files of Unix sockets."""
    for each in sockets:
        _unlink(each)
        each.close()


def _unlink(bound: socket.socket) -> None:
    if bound.family == socket.AF_UNIX:
        with suppress(OSError):
            Path(bound.getsockname()).unlink()


class Listening:
    """The accept loop of a server. For the loop's thread."""

    def __init__(
        self,
        server: Server,
        own: list[socket.socket],
        given: Sequence[socket.socket],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare to accept on sockets: the server's `own`, which it closes at its end, and others. With `tls` a client
        of TCP may begin by a handshake."""
        self._tls = tls
        self._limit = min(server.limits.connections, max(1, free_descriptors() - _FILES))
        self._server = server
        self._own = own
        self._given = given
        self._starting: set[asyncio.Task[None]] = set()
        self._paused = False
        self._is_full = False
        """True from the first connection that had to wait. It is logged once."""
        self.endpoints = [endpoint_of(each.getsockname()) for each in (*own, *given)]

    @property
    def sockets(self) -> list[socket.socket]:
        """Sockets that clients connect to."""
        return [*self._own, *self._given]

    @property
    def count(self) -> int:
        """Number of connections, with those that are being accepted."""
        return self._server.connections + len(self._starting)

    def start(self) -> None:
        self._paused = False
        for each in self.sockets:
            each.setblocking(False)
            self._server.loop.add_reader(each, self._accept, each)

    def stop(self) -> None:
        """Accept no more, and close the server's own sockets."""
        self._pause()
        for task in self._starting:
            task.cancel()
        close(self._own)

    def hide(self) -> bool:
        """Remove the Unix socket's path, and accept who has found it before. Return True if there was somebody: then
        the path leads to a new socket."""
        for each in self._own:
            _unlink(each)
            self._accept(each)
        if not self._starting:
            return False
        self._pause()
        for number, each in enumerate(self._own):
            if each.family == socket.AF_UNIX:
                self._own[number] = bind_unix(Path(each.getsockname()))
                each.close()
        self.start()
        return True

    def _pause(self) -> None:
        self._paused = True
        for each in self.sockets:
            self._server.loop.remove_reader(each)

    def resume(self) -> None:
        """Accept again after a connection was closed."""
        if self._paused and not self._server.stopping:
            self.start()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            limit = self._limit
            if self.count >= limit:
                self._pause()
                if self._server.connections >= limit and not self._is_full:
                    self._is_full = True
                    _log.warning("there are %d connections; further ones wait until one is closed", limit)
                return
            self._is_full = False
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("no connection is accepted for %s s: %s", _NO_DESCRIPTOR_S, error)
                self._pause()
                self._server.loop.call_later(_NO_DESCRIPTOR_S, self.resume)
                return
            accepted.setblocking(False)
            _keep_alive(accepted)
            task = self._server.loop.create_task(self._serve(accepted))
            self._starting.add(task)
            task.add_done_callback(partial(self._started, accepted))

    def _started(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        # Here rather than in the task: one that is cancelled before its first step never enters its `try`.
        if task.cancelled():
            accepted.close()
        elif error := task.exception():
            accepted.close()
            fault = None if isinstance(error, OSError) else error  # an OSError also for TLS, and after the time
            _log.warning("a connection is refused: %s", str(error) or "its client was silent", exc_info=fault)
        self.resume()

    async def _serve(self, accepted: socket.socket) -> None:
        if not _is_ours(accepted):
            raise PermissionError("a Unix socket is for its owner's processes")
        tls = None
        if self._tls is not None and accepted.family != socket.AF_UNIX:
            tls = self._tls if await self._first_byte(accepted) == _HANDSHAKE else None
        # No time limit without TLS: it would be an error.
        limit_s = None if tls is None else _GREETING_S
        await self._server.loop.connect_accepted_socket(
            lambda: Connection(self._server), accepted, ssl=tls, ssl_handshake_timeout=limit_s
        )

    async def _first_byte(self, accepted: socket.socket) -> bytes:
        """Wait for a byte, and leave it in the socket."""
        loop = self._server.loop
        arrived = asyncio.Event()
        loop.add_reader(accepted, arrived.set)
        try:
            async with asyncio.timeout(_GREETING_S):
                await arrived.wait()
        finally:
            loop.remove_reader(accepted)
        return accepted.recv(1, socket.MSG_PEEK)


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS settings of a server. Raises ConfigError if the files are not a certificate and its key."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{certificate} and {key} are not a certificate and its key in PEM: {error}") from None
    return context


def _keep_alive(accepted: socket.socket) -> None:
    if accepted.family == socket.AF_UNIX:
        return
    with suppress(OSError):  # the client has just left
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("IDLE", _SILENT_S), ("INTVL", max(1, _SILENT_S // 6)), ("CNT", 6)):
            if (option := getattr(socket, f"TCP_KEEP{name}", None)) is not None:
                accepted.setsockopt(socket.IPPROTO_TCP, option, value)


def _is_ours(accepted: socket.socket) -> bool:
    """Return True unless another user than ours and root is at the other end of a Unix socket. Systems that do not tell
    rely on the mode of the file."""
    if accepted.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = _UCRED.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid in (0, os.getuid())


def announce(directory: Path, endpoints: Sequence[str]) -> None:
    """Write `serve.json` in one step. It is of use only while this process runs, so it is not synced."""
    new = directory / f"{_NOTICE_NAME}.tmp"
    new.write_text(json.dumps({"pid": os.getpid(), "version": VERSION, "endpoints": list(endpoints)}) + "\n")
    new.replace(directory / _NOTICE_NAME)


def withdraw(directory: Path) -> None:
    """Remove `serve.json`."""
    with suppress(OSError):  # the directory may be gone
        (directory / _NOTICE_NAME).unlink()
