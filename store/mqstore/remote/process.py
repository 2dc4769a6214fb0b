"""The process that `mqstore.open(path, shared=True)` starts. It reads the options from stdin; see `remote/shared.py`.

    store opened, sockets bound --> "ready" on stdout, which is then closed; stderr is the log
    an error before             --> the pickled error
    nobody connected for a while, SIGTERM --> the store is closed, and the process ends

It has a session of its own, so neither Ctrl-C in a terminal nor the end of its starter ends it.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import signal
import sys
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

from mqstore.errors import ConfigError
from mqstore.files.filesystem import REAL
from mqstore.logger import log as _log
from mqstore.remote.shared import FAILED, READY
from mqstore.serve.listening import new_loop, unix_path
from mqstore.serve.server import Server
from mqstore.store import Store

_LOG_BYTES_MAX: Final = 1 << 20
_CLOSING_S: Final = 5.0
"""Time that another writer has to close the store. Only a direct opening of this very second can be one."""


class _LogFile(RotatingFileHandler):
    """serve.log and stderr, not opened through a link. The one before it is serve.log.1."""

    def __init__(self, path: Path, mode: int) -> None:
        self._mode = mode
        super().__init__(path, maxBytes=_LOG_BYTES_MAX, backupCount=1, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))

    def _open(self) -> io.TextIOWrapper:
        descriptor = REAL.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, self._mode)
        os.dup2(descriptor, 2)  # with what C code prints when it fails
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)


def main() -> None:
    """Serve a store until nobody has been connected for a while."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a mask of the starter's thread would hold SIGTERM back
    path = Path(sys.argv[1])
    try:
        _serve(path, *pickle.load(sys.stdin.buffer))
    except BaseException as error:
        _log.exception("%s: the server has failed", path)
        _say(FAILED + pickle.dumps(error))
        raise SystemExit(1) from None


def _serve(path: Path, linger_s: float, options: dict[str, Any]) -> None:
    _log.addHandler(_LogFile(path / "serve.log", options["config"].file_mode))
    _log.setLevel(logging.INFO)
    if (unix := unix_path(path)) is None:
        raise ConfigError(
            f"{path} is too long for a Unix socket, and XDG_RUNTIME_DIR is not set: set it, or use a shorter path"
        )
    with Store(path, lock_timeout=_CLOSING_S, **options) as store, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_run(store, unix, linger_s))
    _log.info("%s: closed", path)


async def _run(store: Store, unix: Path, linger_s: float) -> None:
    loop = asyncio.get_running_loop()
    async with Server(store.broker, listen=(), unix=unix, linger_s=linger_s) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.ended.set)
        _log.info("%s: serving at %s", store.path, unix)
        _say(READY)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        await server.ended.wait()
        _log.info("%s: closing, since nobody is connected or a signal has come", store.path)


def _say(data: bytes) -> None:
    with suppress(BrokenPipeError), open(1, "wb", closefd=False) as stdout:  # the starter may be gone
        stdout.write(data)
