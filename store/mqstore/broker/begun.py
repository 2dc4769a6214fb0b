"""Which messages handlers have begun: after a kill it tells who may have caused it (client-semantics A6, A8).

    config/begun/N    of one push consumer, while it runs

     0     512                            8 bytes a cell, little endian
    +-----+------------------------------+---------------+---
    | head| cells of the first worker    | of the second |        head: {"group": name, "workers": w, "cells": of each}
    +-----+------------------------------+---------------+---

The cells of a worker name the messages that its handler was called with last, three cells at a time::

    where    physical offset of any message of their queue; -1: the rest is of an earlier call
    first    queue offset; -1: its job has ended, and the rest is of an earlier call
    last     of several that stand in line; -1: there is one

They are written through a mapping, so they cost no system call, and the kernel keeps them when the process is killed. A
power cut may take them back: then an attempt is not counted.

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
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mqstore.broker.parts import Parts
from mqstore.errors import MQStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.log.message import Message

__all__ = ["FIRST", "LAST", "NONE", "PROCESS_ENDED", "THREE", "WHERE", "Address", "Begun", "Notes", "Suspects", "note"]

_log = logging.getLogger("mqstore")

PROCESS_ENDED: Final = "the process ended while it was handled"
"""Why a message failed whose handler had begun when its process was killed."""

_HEAD_BYTES: Final = 512
_CELL_BYTES: Final = 8
_BATCH_MAX: Final = 1_024
THREE: Final = 3
"""Cells that name messages of one queue."""
_FILE_MAX_BYTES: Final = _HEAD_BYTES + _CELL_BYTES * 1_000 * THREE * _BATCH_MAX
"""The most workers, each with the largest batch."""
NONE: Final = -1
"""A cell that holds nothing."""
WHERE, FIRST, LAST = range(3)


class Address(NamedTuple):
    """Where a message lies."""

    topic: str
    queue_id: int
    offset: int


def note(cells: memoryview, messages: Sequence[Message]) -> None:
    """Let the cells of a worker name each of these messages, of whatever queues. Until that is done they name none."""
    cells[FIRST] = NONE
    end = THREE * len(messages)
    if end < len(cells):
        cells[end] = NONE
    for at in range(THREE, end, THREE):
        message = messages[at // THREE]
        cells[at], cells[at + FIRST] = message.physical_offset, message.offset
    cells[WHERE] = messages[0].physical_offset
    cells[FIRST] = messages[0].offset


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
            for at in range(0, len(cells) - LAST, THREE):
                where, first, last = cells[at : at + THREE]
                if where == NONE or first == NONE:
                    break
                with suppress(LookupError, MQStoreError):  # gone since, or never written
                    queue = self._store.at(where).queue
                    stop = min(max(first, last) + 1, first + _BATCH_MAX)
                    addresses.update(Address(*queue, offset) for offset in range(first, stop))

    def forget(self) -> None:
        """Remove what was read: whoever asked for it has it on disk."""
        for name in self._left_behind:
            self._fs.unlink(self._folder / name, missing_ok=True)

    def suspect(self, group: str, address: Address) -> None:
        """Note where a message comes again that was in a handler when the process was killed."""
        self.suspects[group].left.add(address)

    def open(self, group: str, workers: int, cells: int) -> Notes:
        """A new file, with so many `cells` for each worker. Raises StoreFullError, StoreIOError."""
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
