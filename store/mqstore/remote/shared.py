"""The server that the first process of a directory starts: `mqstore.open(path, shared=True)` (remoting-server, 17).

    connect to the Unix socket of serve.json ---- a server answers --> done
      ^   |
      |   +-- nobody: lock serve.start
      |         |           |
      |       taken       got it, and still nobody: a writer without a socket? -> StoreLockedError
      |         |           |
      +- pause -+           +-- start a server, hand the lock over to it, and wait until it is ready or has failed
      ^                                   |
      +-----------------------------------+

The server keeps the lock until its process ends. So a locked serve.start means that a server starts, serves or closes,
and waiting for it helps. The file has the options of the process that has started the server.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import (
    ConfigError,
    ConnectionLostError,
    FormatError,
    MQStoreError,
    NotPermittedError,
    StoreIOError,
    StoreLockedError,
    raise_os_error,
)
from mqstore.files.filesystem import REAL
from mqstore.files.lock import refuse_beside_writer
from mqstore.files.safe_open import resolved
from mqstore.layout.jsontext import decode
from mqstore.log.directory import manifest
from mqstore.logger import log as _log
from mqstore.options import Durability, Duration, Profile, StoreConfig, check_durability, seconds
from mqstore.remote.dialing import announced, dialed
from mqstore.remote.store import RemoteStore

READY: Final = b"ready\n"
FAILED: Final = b"\0failed\n"
"""It comes before a pickled error."""
_PATIENCE_S: Final = 60.0
"""Time to wait for a server that another process starts, or that closes its store."""
_PAUSE_S: Final = (0.005, 0.03)
_FILE_BYTES_MAX: Final = 1 << 16
_LINGER_S: Final = 1.0
"""Time that a server waits for the next client."""
_DEFAULTS: Final = {"durability": "append"} | {each.name: each.default for each in fields(StoreConfig)}
_PROGRAM: Final = "import os; os.fork() and os._exit(0)\nfrom mqstore.remote.process import main; main()"
"""It forks first, so that the server is not a child of a process that does not wait for it."""
_ENVIRONMENT: Final = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|XDG_RUNTIME_DIR|VIRTUAL_ENV|MQSTORE_.*|PYTHONHOME|"
    "PYTHONPYCACHEPREFIX|PYTHONDONTWRITEBYTECODE|LD_LIBRARY_PATH|DYLD_LIBRARY_PATH|DYLD_FALLBACK_LIBRARY_PATH"
)
"""Variables that a server gets from its starter. Others may have secrets, and it outlives the starter."""

_locks: set[int] = set()
"""Descriptors of serve.start. A forked child must not keep one: the lock would outlive the server."""


def _begin_child() -> None:
    while _locks:
        with suppress(OSError):
            os.close(_locks.pop())


os.register_at_fork(after_in_child=_begin_child)


class Starter:
    """Connects a process to the server of a directory, and starts the server if there is none. Thread-safe."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        profile: Profile | None = None,
        durability: Durability = "append",
        lock_timeout: Duration = 0,
        config: StoreConfig | None = None,
        linger_s: float | None = None,
    ) -> None:
        """Prepare to connect to the server of the store in `path`, with the options of `mqstore.open`.
        The server ends when nobody has been connected for `linger_s`."""
        check_durability(durability)
        config = config or StoreConfig()
        if config.clock is not None:
            raise ConfigError("a clock belongs to one process: open the store without it, or without shared=True")
        self.path = Path(resolved(path))
        self._options: dict[str, Any] = {
            "create": create,
            "profile": profile,
            "durability": durability,
            "config": config,
        }
        self._linger_s = _LINGER_S if linger_s is None else linger_s
        self._lock_timeout_s = seconds(lock_timeout, "lock_timeout")
        given = {"durability": durability} | {each.name: getattr(config, each.name) for each in fields(config)}
        self._chosen = {name: repr(value) for name, value in given.items() if value != _DEFAULTS[name]}
        """Options that are not the defaults."""

    def dial(self) -> socket.socket:
        """Return a socket that is connected to the server. Waits while a server starts, or closes its store.

        Raises StoreLockedError if another process has opened the directory directly, and the errors of `mqstore.open`.
        Raises StoreIOError if no server can be started, NotPermittedError for the server of another user, and
        ConnectionLostError if a server neither serves nor ends."""
        begun_s = time.monotonic()
        while (found := self._connected() or self._started(begun_s + self._lock_timeout_s)) is None:
            if time.monotonic() > begun_s + max(_PATIENCE_S, self._lock_timeout_s):
                raise ConnectionLostError(
                    f"the server of {self.path} does not answer; see {self.path / 'serve.log'}", sent=False
                )
            time.sleep(random.uniform(*_PAUSE_S))
        self._warn_of_other_options()
        return found

    def _connected(self) -> socket.socket | None:
        _, endpoints = announced(self.path)
        if (address := next((each[5:] for each in endpoints if each.startswith("unix:")), None)) is None:
            return None
        try:
            return dialed(address, _PATIENCE_S)
        except PermissionError as error:
            raise NotPermittedError(f"the server of {self.path} belongs to another user") from error
        except OSError:
            return None  # nobody listens there

    def _started(self, until_s: float) -> socket.socket | None:
        """Start a server and connect to it.
        Returns None if another process has the lock, or before `until_s` the store."""
        with self._locked() as lock:
            if lock is None:
                return None
            if (found := self._connected()) is None:
                try:
                    refuse_beside_writer(self.path)
                except StoreLockedError as error:
                    was_killed = error.pid is not None and error.pid == announced(self.path)[0]
                    if not was_killed and time.monotonic() >= until_s:
                        raise
                    return None  # the system is about to close the files of a killed server
                self._start(lock)
        return found or self._connected()

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """Lock serve.start. Yields its descriptor, or None if it is locked elsewhere."""
        name = self.path / "serve.start"
        if not REAL.exists(name):
            chosen = {name: self._options[name] for name in ("create", "profile", "config")}
            # It raises before there is a file of ours.
            manifest.resolve(self.path, writer=True, clock=SYSTEM_CLOCK, fs=REAL, **chosen)
            REAL.make_folders(self.path)
        with REAL.opened(name, os.O_RDWR | os.O_CREAT, self._options["config"].file_mode) as lock:
            _locks.add(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = True
            except BlockingIOError:
                taken = False
            except OSError as error:
                raise_os_error(error, name, "lock")
            try:
                yield lock if taken else None
            finally:
                _locks.discard(lock)

    def _start(self, lock: int) -> None:
        """Start a server, which inherits the lock, and wait until clients can connect. Raises its error."""
        text = json.dumps(self._chosen).encode()
        REAL.pwrite(lock, text.ljust(REAL.size(lock)), 0)
        from multiprocessing import spawn  # for programs in which Python is embedded: `multiprocessing.set_executable`

        if getattr(sys, "frozen", False) and os.fsdecode(spawn.get_executable()) == sys.executable:
            why = "this frozen program would start itself; open the store in one process, and call its serve()"
            raise StoreIOError(errno.ENOTSUP, why, os.fspath(self.path), "starting a server")
        search = os.pathsep.join(os.path.abspath(each) for each in sys.path if each)
        kept = {name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
        try:
            process = subprocess.Popen(
                [spawn.get_executable(), "-P", "-c", _PROGRAM, str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
                cwd="/",
                env={**kept, "PYTHONPATH": search},
                start_new_session=True,
            )
        except OSError as error:
            raise_os_error(error, spawn.get_executable(), "starting a server")
        with process:
            said, _ = process.communicate(pickle.dumps((self._linger_s, self._options)))
        if said == READY:
            return
        printed, failed, pickled = said.partition(FAILED)
        raised: BaseException | None = pickle.loads(pickled) if failed else None
        if isinstance(raised, MQStoreError):
            raise raised
        why = printed.decode(errors="replace").strip()[-500:] or "it was killed" if raised is None else str(raised)
        number = getattr(raised, "errno", None) or 0
        raise StoreIOError(number, f"{why}; see also serve.log", os.fspath(self.path), "starting a server")

    def _warn_of_other_options(self) -> None:
        """Log which options have no effect, since the server was started with others."""
        if not self._chosen:
            return
        with (
            suppress(FileNotFoundError, FormatError, AttributeError),
            REAL.opened(self.path / "serve.start", os.O_RDONLY) as file,
        ):
            theirs = decode(REAL.pread(file, _FILE_BYTES_MAX, 0))
            other = [f"{name}={text}" for name, text in self._chosen.items() if theirs.get(name) != text]
            if other:
                _log.warning(
                    "%s: the process that started the server chose other options, and these have no effect (%s)",
                    self.path,
                    ", ".join(other),
                )


def open_shared(path: str | os.PathLike[str], mode: str = "rw", **options: Any) -> RemoteStore:
    """Open a store as `mqstore.open` does with `shared=True`. Raises the errors of `Starter.dial`."""
    if mode != "rw":
        raise ConfigError(f"shared=True is for mode 'rw'; any number of processes may open with mode {mode!r} as it is")
    starter = Starter(path, **options)
    return RemoteStore(starter.path, dial=starter.dial)
