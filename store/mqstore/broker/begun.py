"""Which messages handlers have begun: after a kill it tells who may have caused it (client-semantics A6, A8).

    config/begun/N    of one push consumer, while it runs

     0     512                            8 bytes a cell, little endian
    +-----+------------------------------+---------------+---
    | head| cells of the first worker    | of the second |        head: {"group": name, "workers": w, "cells": of each}
    +-----+------------------------------+---------------+---

The cells of a worker hold the physical offsets of the messages that its handler was called with last, -1 behind the
last of them; -1 alone once its job has ended. They are written through a mapping, so they cost no system call, and the
kernel keeps them when the process is killed. A power cut may take them back: then an attempt is not counted.

    at the next open, of a message that is not settled     it comes again with
    its handler had begun                                  one attempt more; behind the last one it is a dead letter
    it was only fetched, by a push consumer                the same attempt

Where such messages come again, `Suspects` lets one at a time into a handler: whichever ends the process takes no other
of them down with it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mqstore.broker.parts import Parts
from mqstore.errors import MQStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.log.message import Message

__all__ = ["NONE", "PROCESS_ENDED", "Address", "Begun", "Notes", "Suspects", "note"]

_log = logging.getLogger("mqstore")

PROCESS_ENDED: Final = "the process ended while it was handled"
"""Why a message failed whose handler had begun when its process was killed."""

_HEAD_BYTES: Final = 512
_CELL_BYTES: Final = 8
_FILE_MAX_BYTES: Final = _HEAD_BYTES + _CELL_BYTES * 1_000 * 1_024
"""The most workers, each with the largest batch."""
NONE: Final = -1
"""A cell that holds nothing."""


class Address(NamedTuple):
    """Where a message lies."""

    topic: str
    queue_id: int
    offset: int


def note(cells: memoryview, messages: Sequence[Message]) -> None:
    """Let the cells of a worker hold these messages. The first cell last: until then it has none."""
    number = len(messages)
    if number < len(cells):
        cells[number] = NONE
    for i in range(1, number):
        cells[i] = messages[i].physical_offset
    cells[0] = messages[0].physical_offset


class Notes:
    """The file of one consumer, from `Begun.open` to `close`."""

    def __init__(self, fs: FileSystem, path: Path, workers: list[memoryview]) -> None:
        self._fs = fs
        self._path = path
        self.workers = workers
        """The cells of each worker, for `note`: `int64`, to be written."""

    def close(self) -> None:
        """Remove the file. The cells can be written on, which nobody reads: a handler may still be ending."""
        try:
            self._fs.unlink(self._path, missing_ok=True)
        except MQStoreError as error:
            _log.error("%s cannot be removed: %s", self._path, error)


class Suspects:
    """Messages of one group that were in handlers when the process was killed: one call at a time is let in.

    Thread-safe, and waits for nothing: who comes is called when it is his turn.
    """

    def __init__(self) -> None:
        self.left: set[Address] = set()
        """Those that have not been through a handler since."""
        self._lock = threading.Lock()
        self._inside: Sequence[Message] | None = None
        self._line: deque[tuple[Sequence[Message], Callable[[None], object]]] = deque()

    def among(self, messages: Sequence[Message]) -> bool:
        """Whether any of these is suspected: while one is left, so is whatever has failed before. It may have been in a
        handler beside the one that ends processes, two processes ago."""
        return any(message.attempt > 1 for message in messages) or not self.left.isdisjoint(_addresses(messages))

    def holds(self, message: Message) -> bool:
        """Whether it was in a handler when the process was killed, and has not been in one since."""
        return not self.left.isdisjoint(_addresses([message]))

    def come(self, messages: Sequence[Message], turn: Callable[[None], object]) -> None:
        """Have `turn(None)` called when no other call is inside. `leave` must follow, with the same list."""
        with self._lock:
            if self._inside is not None:
                self._line.append((messages, turn))
                return
            self._inside = messages
        turn(None)

    def leave(self, messages: Sequence[Message]) -> None:
        """These have been through a handler: the next may come in. Again is harmless."""
        turn = None
        with self._lock:
            self.left.difference_update(_addresses(messages))
            if self._inside is messages:
                self._inside, turn = self._line.popleft() if self._line else (None, None)
        if turn is not None:
            turn(None)

    def give_up(self, message: Message) -> None:
        """Its handler hangs: the others do not wait for that."""
        inside = self._inside
        if inside is not None and message in inside:
            self.leave(inside)


def _addresses(messages: Sequence[Message]) -> list[Address]:
    return [Address(*message.queue, message.offset) for message in messages]


class Begun:
    """What the files of a store say, and new ones. Of the process that has the store open for writing."""

    def __init__(self, parts: Parts) -> None:
        """Read what a process that was killed has left. Raises StoreIOError."""
        self._fs = parts.fs
        self._store = parts.store
        self._folder = parts.store.path / "config" / "begun"
        self._file_mode = parts.config.file_mode
        self._left_behind: list[str] = []
        folders: list[str] = []
        self.groups: dict[str, set[Address]] = {}
        """Group -> messages that its handlers had begun, of each group with a push consumer that did not stop."""
        self.suspects: dict[str, Suspects] = {}
        """Of the same groups."""
        if self._fs.exists(self._folder):
            self._left_behind, folders = self._fs.scandir_own(self._folder)
        for name in self._left_behind:
            self._read(name)
        taken = [int(name) for name in (*self._left_behind, *folders) if name.isdecimal()]
        self._names = count(max(taken, default=-1) + 1)

    def _read(self, name: str) -> None:
        path = self._folder / name
        try:
            data = self._fs.read_whole(path, _FILE_MAX_BYTES)
            head: Any = json.loads(data[:_HEAD_BYTES].rstrip(b"\0"))
            group, shape = head["group"], (head["workers"], head["cells"])
            if min(shape) < 1:
                raise ValueError(f"{shape} cells")
            found = np.frombuffer(data, "<i8", shape[0] * shape[1], _HEAD_BYTES).reshape(shape)
            addresses = self.groups.setdefault(group, set())
            self.suspects.setdefault(group, Suspects())
        except (ValueError, TypeError, KeyError, MQStoreError) as error:
            _log.warning("%s is not read: %s. Attempts that it tells of are not counted", path, error)
            return
        for cells in found.tolist():
            for physical_offset in takewhile(lambda cell: cell != NONE, cells):
                with suppress(LookupError, MQStoreError):  # gone since, or never written
                    message = self._store.at(physical_offset)
                    addresses.add(Address(*message.queue, message.offset))

    def forget(self) -> None:
        """Remove what was read: whoever asked for it has it on disk."""
        for name in self._left_behind:
            self._fs.unlink(self._folder / name, missing_ok=True)

    def suspect(self, group: str, address: Address) -> None:
        """Note where a message comes again that was in a handler when the process was killed."""
        self.suspects[group].left.add(address)

    def open(self, group: str, workers: int, cells: int) -> Notes:
        """A new file, for `cells` messages (the largest batch) of each worker. Raises StoreFullError, StoreIOError."""
        self._fs.mkdir(self._folder, exist_ok=True)
        path = self._folder / str(next(self._names))
        length = _HEAD_BYTES + _CELL_BYTES * workers * cells
        fd = self._fs.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._file_mode)
        try:
            # The head last: without it nothing of the file counts.
            self._fs.pwrite(fd, b"\xff" * (length - _HEAD_BYTES), _HEAD_BYTES)
            head = json.dumps({"group": group, "workers": workers, "cells": cells}, ensure_ascii=False)
            self._fs.pwrite(fd, head.encode().ljust(_HEAD_BYTES, b"\0"), 0)
            mapping = self._fs.map(fd, length, writable=True)
        except BaseException:
            self._fs.unlink(path, missing_ok=True)
            raise
        finally:
            self._fs.close(fd)
        all_cells = memoryview(mapping)[_HEAD_BYTES:].cast("q")
        return Notes(self._fs, path, [all_cells[i * cells : (i + 1) * cells] for i in range(workers)])
