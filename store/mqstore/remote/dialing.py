"""Sockets to servers: addresses, connecting, TLS, and time limits."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqstore.errors import ConfigError, MQStoreError
from mqstore.files.filesystem import REAL
from mqstore.layout.jsontext import decode
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    import ssl  # not at run time: most clients need none

    Tls = ssl.SSLContext | str | PathLike[str] | bool | None
    """Settings of TLS: a context, a file of certificates to trust, True for those of the system, or None for no TLS."""

_ANNOUNCEMENT_BYTES: Final = 1 << 16
Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


def address_of(text: str) -> Address:
    """Return the address in a text: `host:port`, `[::1]:port`, `unix:/path`, or a path. Raises ConfigError.

    >>> address_of("127.0.0.1:9876"), address_of("[::1]:9876"), address_of("unix:/run/mq.sock"), address_of("mq.sock")
    (('127.0.0.1', 9876), ('::1', 9876), '/run/mq.sock', 'mq.sock')
    """
    if text.startswith("unix:"):
        return text.removeprefix("unix:")
    if "/" in text or text.endswith(".sock"):
        return text
    host, found, port = text.rpartition(":")
    if not found or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"an address is host:port, unix:/path or a directory that is served, not {text!r:.200}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def tls_context(tls: Tls) -> ssl.SSLContext | None:
    """Return the context of the option `tls`. Raises ConfigError for a file that has no certificates."""
    if tls is None or tls is False:
        return None
    import ssl

    if isinstance(tls, ssl.SSLContext):
        return tls
    try:
        return ssl.create_default_context(cafile=None if tls is True else os.fspath(tls))
    except TypeError:
        raise ConfigError(f"tls must be True, an ssl.SSLContext or a file, not {tls!r:.80}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{os.fspath(tls)} has no certificates in PEM: {error}") from None  # type: ignore[arg-type]


def announced(directory: Path) -> tuple[int | None, list[str]]:
    """Return the process id and the endpoints in the serve.json of a directory, which a killed server leaves.
    (None, []) without one."""
    with suppress(OSError, MQStoreError, LookupError, TypeError):
        file = directory / "serve.json"
        value: Any = decode(REAL.read_whole(file, _ANNOUNCEMENT_BYTES)) if file.is_file() else {}
        return value["pid"], [str(each) for each in value["endpoints"]]
    return None, []


def is_ready(sock: Any, events: int, timeout_s: float) -> bool:
    """Return True once a socket is ready for `events` of `select.poll`, and False after a time.
    Raises ConnectionResetError if it was closed here."""
    poll = select.poll()  # not `select.select`, which refuses descriptors above 1,023
    try:
        poll.register(sock, events)
    except ValueError:
        raise ConnectionResetError("the connection was closed") from None
    return bool(poll.poll(timeout_s * 1000))


class _Secured:
    """A socket with TLS, for one thread that reads and others that send. A TLS object is for one thread at a time, so
    each step has a lock, and nobody waits with it."""

    def __init__(self, sock: ssl.SSLSocket, timeout_s: float) -> None:
        sock.settimeout(0)
        self._socket, self._timeout_s, self._lock = sock, timeout_s, Lock()
        self.fileno, self.close, self.detach = sock.fileno, sock.close, sock.detach
        # Not that of TLS, after which Python would send what another thread has without encryption.
        self.shutdown = partial(socket.socket.shutdown, sock)

    def _try(self, step: Callable[..., Any], *args: Any) -> Any:
        import ssl

        while True:
            try:
                with self._lock:
                    return step(*args)
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            if not is_ready(self._socket, events, self._timeout_s):
                raise TimeoutError("timed out")

    def recv(self, size: int, flags: int = 0) -> bytes:
        if flags:  # a look, without waiting: at the bytes of the network
            return socket.socket.recv(self._socket, size, flags)
        data: bytes = self._try(self._socket.recv, size)
        return data

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._try(self._socket.send, view) :]


def dialed(address: Address, timeout_s: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Return a connected socket, over TCP with TLS if there is a context. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX) if isinstance(address, str) else socket.create_connection(address, timeout_s)
    try:
        if isinstance(address, str):
            sock.settimeout(timeout_s)
            sock.connect(address)
            return sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname=address[0])
    except BaseException:
        sock.close()
        raise


def limited(sock: socket.socket, timeout_s: float) -> Any:
    """Return a socket whose calls end after a time. The kernel does it: Python would poll first, a system call more."""
    if hasattr(sock, "context"):
        return _Secured(sock, timeout_s)  # type: ignore[arg-type]
    if type(sock) is socket.socket:
        sock.settimeout(None)
        seconds, rest = divmod(round(timeout_s * 1e6), 1_000_000)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, rest))
    else:
        sock.settimeout(timeout_s)
    return sock
