"""Sockets to servers: addresses, connecting, and time limits."""

from __future__ import annotations

import socket
import struct

from mqstore.errors import ConfigError

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


def dialed(address: Address, timeout_s: float) -> socket.socket:
    if not isinstance(address, str):
        sock = socket.create_connection(address, timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def limit(sock: socket.socket, timeout_s: float) -> None:
    """Have calls on a socket end after a time, by the kernel. Python would poll first: one more system call."""
    if type(sock) is socket.socket:
        sock.settimeout(None)
        seconds, rest = divmod(round(timeout_s * 1e6), 1_000_000)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, rest))
    else:
        sock.settimeout(timeout_s)
