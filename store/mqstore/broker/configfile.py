"""A file of `config/`: what every table of the broker does alike to be read and written (broker-semantics 0.4).

Knows that such a file is an object with members, some of them another program's; not what any member means. How bytes
reach the disk, and what is done about a damaged file, is `files.jsonfile`'s business.

    load    the members; those that nobody here knows are remembered
    save    `value` over the remembered members: what a newer mqstore or a Java broker added survives our rewriting
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqstore.clock import Clock
from mqstore.errors import ReadOnlyStoreError, StoreClosedError
from mqstore.files.filesystem import FILE_MODE, FileSystem
from mqstore.files.jsonfile import load_json, save_json

__all__ = ["ConfigFile", "DataVersion", "member", "object_member"]

_log = logging.getLogger("mqstore")


def member(entry: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """`entry[name]`, which must be exactly of `kind`; `default` where it is absent or null, as RocketMQ has it.

    Raises ValueError for another type: that makes the whole file a bad one (store-format 11.2). Exactly: to Python
    `true` is an integer, to the engine that wrote the file it is not.
    """
    value = entry.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r:.80}")
    return value


def object_member(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`value[name]`, an object; {} where it is absent or null. ValueError for another type."""
    found: dict[str, Any] = member(value, name, dict, None) or {}
    return found


@dataclass(frozen=True, slots=True)
class DataVersion:
    """RocketMQ's version of a table, compared by its tools to see which copy is newer.

    >>> DataVersion().next(1_700_000_000_000).as_json()
    {'counter': 1, 'stateVersion': 0, 'timestamp': 1700000000000}
    """

    counter: int = 0
    state_version: int = 0
    timestamp_ms: int = 0

    def next(self, now_ms: int, steps: int = 1) -> DataVersion:
        """The version `steps` changes later."""
        return DataVersion(self.counter + steps, 0, now_ms)

    def as_json(self) -> dict[str, int]:
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp_ms}

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> DataVersion:
        """Of the `dataVersion` of a file; None, and members that RocketMQ 4.x did not have yet, count as 0."""
        value = value or {}
        return cls(*(member(value, name, int, 0) for name in ("counter", "stateVersion", "timestamp")))


class ConfigFile:
    """One JSON file of a store's `config/`. Not thread-safe: its table calls it under the table's own lock."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fs: FileSystem,
        clock: Clock,
        check: Callable[[dict[str, Any]], object] | None = None,
        writer: bool = True,
        file_mode: int = FILE_MODE,
        closed: Callable[[], bool] | None = None,
    ) -> None:
        """`check(value)` raises ValueError for an object of the wrong shape, which then counts as damaged. Without
        `writer` nothing is ever changed on disk, nor once `closed()` says that the store was."""
        self.path = Path(path)
        self.problems: list[str] = []
        """What was amiss at `load`, a sentence each; logged once."""
        self._fs = fs
        self._clock = clock
        self._check = check
        self._writer = writer
        self._file_mode = file_mode
        self._closed = closed
        self._members: dict[str, Any] = {}
        self._folder_durable = False

    def load(self) -> dict[str, Any] | None:
        """The value of the file or of its backup; None when neither was ever written.

        Raises CorruptStoreError when there was a value and no good copy of it is left: the command that gives it up is
        in the message, for it is never given up unasked (P10). StoreIOError when a file cannot be read.
        """
        value, problems = load_json(
            self.path, writer=self._writer, fs=self._fs, clock=self._clock, check=self._check, root=self.path.parents[1]
        )
        for problem in problems:
            self.report(problem)
        self._members = value or {}
        return value

    def report(self, problem: str) -> None:
        """Add to `problems`, and tell the log."""
        self.problems.append(problem)
        _log.warning("%s", problem)

    def save(self, value: dict[str, Any]) -> None:
        """Write `value` durably, and with it the members of the loaded file that it does not name.

        Raises StoreFullError, StoreIOError, ReadOnlyStoreError, StoreClosedError: what the file said before then still
        stands.
        """
        if not self._writer:
            raise ReadOnlyStoreError(f"{self.path} is of a store that was opened for reading; open it with mode='rw'")
        if self._closed is not None and self._closed():  # who holds the lock by now may have written another value
            raise StoreClosedError(f"{self.path.parents[1]} was closed; open it again")
        if not self._folder_durable:  # by the first save of each process: who made the folder may not have come so far
            folder = self.path.parent
            self._fs.mkdir(folder, exist_ok=True)
            self._fs.sync_directory(folder.parent)
            self._folder_durable = True
        merged = {**self._members, **value}
        save_json(self.path, merged, self._fs, check=self._check, file_mode=self._file_mode)
        self._members = merged
