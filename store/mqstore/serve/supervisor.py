"""A parent process that holds a server's sockets, so that clients can connect while the server is started again.

    parent: sockets --fork--> child: opens the store, serves, says that it is ready
       |                        |
       |                        +-- killed: another child, after a pause. New connections wait in the backlog meanwhile
       +-- SIGTERM: passed on. The exit code is the child's
       +-- killed: the child sees the end of its link, and stops

A closed port makes the three tries of a Java client fail within 4 ms, an open one makes them wait (remoting-server,
section 14.4). The parent opens no store and starts no thread, so a child begins as a process of its own would.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

from mqstore.logger import log as _log
from mqstore.serve.listening import close

_PAUSE_S: Final = 0.2
_PAUSE_S_MAX: Final = 10.0
_STEADY_S: Final = 10.0
"""Seconds that a child has to run for the next pause to be short."""


def supervise(bound: Sequence[socket.socket]) -> socket.socket:
    """Fork. In the child return its link to the parent: write a byte once it is ready, and stop at its end.

    The parent does not return: it starts the child again whenever it is killed or fails, and raises SystemExit with the
    exit code of a child that has been asked to stop, has ended with 0, or was never ready. It closes the sockets that
    `bind_all` has opened for its children.
    """
    child = 0
    stops: list[int] = []  # signals that asked for the end

    def stop(number: int, _frame: FrameType | None) -> None:
        stops.append(number)
        if child:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    old = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    code, pause_s, was_ready = 0, _PAUSE_S, False
    while not stops:
        ours, link = socket.socketpair()
        started_s = time.monotonic()
        child = os.fork()
        if not child:
            ours.close()
            for number, handler in old.items():
                signal.signal(number, handler)
            return link
        link.close()
        if stops:
            os.kill(child, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        was_ready = _was_ready(ours) or was_ready
        if stops or code == 0 or not was_ready:
            break
        pause_s = _PAUSE_S if time.monotonic() - started_s > _STEADY_S else pause_s
        ended = f"was killed by signal {-code}" if code < 0 else f"has failed with exit code {code}"
        _log.error("the server %s and is started again after %.1f s", ended, pause_s)
        until_s, code = time.monotonic() + pause_s, 0
        while not stops and time.monotonic() < until_s:
            time.sleep(0.05)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)
    close(bound)
    raise SystemExit(code if code >= 0 else 128 - code)


def _was_ready(ours: socket.socket) -> bool:
    with ours, suppress(OSError):
        return ours.recv(1, socket.MSG_DONTWAIT) != b""
    return False
