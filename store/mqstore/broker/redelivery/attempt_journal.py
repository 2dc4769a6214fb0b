"""Journal of messages whose handlers have started, for the next process (clients#attempt-counted).

    config/begun/N    file of one push consumer, while it runs

     0      512                                              each cell: 8 bytes, little endian
    | head | cells of the first worker | of the second | ...
     head   JSON with `group`, `workers` (their number) and `cells` (per worker)

The cells of a worker name the messages of its last handler call::

    0 or more    physical offset of a message
    -2 - N       the call also has the messages after that one in its queue, up to queue offset N
    -1           end of the list; later cells are left over from earlier calls

The cells are written through a mapping. This takes no system call, and the kernel keeps the bytes when the process is
killed. A power cut may lose them. Then the attempt is not counted.

    at the next open, an unsettled message             is redelivered with
    whose handler had started                          one attempt more; after its last attempt it is a dead letter
    that a push consumer had only prefetched           the same attempt

Messages whose handler had started may have killed the process, and are suspects. The member `suspects` of
`suspects.json` lists them by group, as [topic, queue id, offset], until a handler has had them. Only one suspect is in
a handler at a time, so that the message that kills the process uses no attempt of the others.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, pairwise, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqstore import arrays as np
from mqstore.broker.background.context import Parts
from mqstore.broker.tables.names import QueueKey
from mqstore.errors import MQStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import save_json
from mqstore.layout.jsontext import decode
from mqstore.log.message import Message
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

_SUSPECTS: Final = "suspects.json"

_HEAD_BYTES: Final = 512
_CELL_BYTES: Final = 8
_BATCH_MAX: Final = 1_024
_FILE_MAX_BYTES: Final = _HEAD_BYTES + _CELL_BYTES * 1_000 * _BATCH_MAX
"""Largest file: the most workers, each with the largest batch."""
NONE: Final = -1
"""Value of the cell that ends the list."""
_UP_TO: Final = -2
"""A cell `_UP_TO - N` names the messages up to queue offset N."""
UNREAD: Final = memoryview(bytearray(_CELL_BYTES * _BATCH_MAX)).cast("q")
"""Cells of workers whose calls are not recorded. Nobody reads them."""


class Address(NamedTuple):
    """Position of a message."""

    topic: str
    queue_id: int
    offset: int


_physical_offset = attrgetter("physical_offset")


def note(cells: memoryview, messages: Sequence[Message]) -> None:
    """Write these messages to the cells of a worker."""
    places = array("q", map(_physical_offset, messages))
    end = len(places)
    cells[0] = NONE  # first, and the first message last, so that a kill in between never leaves a mixed list
    if end < len(cells):
        cells[end] = NONE
    cells[1:end] = places[1:]
    cells[0] = places[0]


def note_run(cells: memoryview, messages: Sequence[Message]) -> None:
    """Write messages of one queue, ascending, as a range. The cost does not depend on their number."""
    cells[0] = NONE
    cells[1] = _UP_TO - messages[-1].offset
    cells[0] = messages[0].physical_offset


class AttemptNotes:
    """File of one consumer, from `AttemptJournal.open` to `close`."""

    def __init__(self, fs: FileSystem, path: Path, workers: list[memoryview]) -> None:
        self._fs = fs
        self._path = path
        self.workers = workers
        """Writable `int64` cells of each worker, for `note`."""

    def close(self) -> None:
        """Remove the file.
        A handler that is still running may write to the cells, but nobody reads them."""
        try:
            self._fs.unlink(self._path, missing_ok=True)
        except MQStoreError as error:
            _log.error("cannot remove %s: %s", self._path, error)


class Suspects:
    """Messages of all groups that were in handlers when the process was killed.
    Only one of them is in a handler at a time. Thread-safe and non-blocking: an owner that must wait is called when its
    turn comes."""

    def __init__(self, save: Callable[[dict[str, set[Address]]], object] = lambda left: None) -> None:
        """Start without suspects. `save` is called under the lock after each change."""
        self.left: dict[str, set[Address]] = {}
        """Suspects by group that have not been through a handler yet. Callers must not change this."""
        self._save = save
        self._lock = Lock()
        self._inside: tuple[object, object] | None = None
        """(key, owner) that has the turn, or None."""
        self._line: deque[tuple[object, object, Callable[[], object]]] = deque()

    def holds(self, group: str, address: Address) -> bool:
        return address in self.left.get(group, ())

    def add(self, group: str, addresses: Iterable[Address]) -> None:
        self._change(group, self.left.get(group, set()).union(addresses))

    def clear(self, group: str, addresses: Iterable[Address]) -> None:
        """Remove suspects that have been through a handler, or never will be."""
        self._change(group, self.left.get(group, set()).difference(addresses))

    def _change(self, group: str, after: set[Address]) -> None:
        with self._lock:
            if after != self.left.get(group, set()):
                others = {name: each for name, each in self.left.items() if name != group}
                self.left = {**others, group: after} if after else others
                self._save(self.left)

    def come(self, key: object, owner: object, turn: Callable[[], object]) -> None:
        """Call `turn()` when it is the turn of `key`: now, or in the thread that ends the previous turn.
        The caller must call `leave` afterwards."""
        with self._lock:
            if self._inside is None:
                self._inside = key, owner
            elif self._inside[0] is not key:
                self._line.append((key, owner, turn))
                return
        turn()

    def release(self, key: object) -> None:
        """Start the next turn, if it is the turn of `key`."""
        turn = None
        with self._lock:
            if self._inside is not None and self._inside[0] is key:
                self._inside = None
                if self._line:
                    next_key, owner, turn = self._line.popleft()
                    self._inside = next_key, owner
        if turn is not None:
            turn()

    def is_in(self, key: object) -> bool:
        """Return True if it is the turn of `key`."""
        inside = self._inside
        return inside is not None and inside[0] is key

    def give_up(self, owner: object) -> None:
        """End the turn of this owner, whose handler hangs, so that others do not wait for it."""
        inside = self._inside
        if inside is not None and inside[1] is owner:
            self.release(inside[0])

    def desert(self, owner: object) -> None:
        """Remove an owner that has stopped: its waiting turns are dropped, and others do not wait for it."""
        with self._lock:
            self._line = deque(each for each in self._line if each[1] is not owner)
        self.give_up(owner)


class AttemptJournal:
    """Journal files of a store: those of a killed process, and new ones of this process."""

    def __init__(self, parts: Parts) -> None:
        """Read the files of a process that was killed. Raises StoreIOError."""
        self._parts = parts
        self._fs = parts.fs
        self._folder = parts.store.path / "config" / "begun"
        self._left_behind: list[str] = []
        folders: list[str] = []
        self.groups: dict[str, set[Address]] = {}
        """Messages whose handler had started, by group, for groups whose push consumer did not stop."""
        self.suspects = Suspects(self._save)
        if self._fs.exists(self._folder):
            self._left_behind, folders = self._fs.scandir_own(self._folder)
        for name in self._left_behind:
            if name.isdecimal():
                self._read(name)
            elif name == _SUSPECTS:
                self._load()
        taken = [int(name) for name in (*self._left_behind, *folders) if name.isdecimal()]
        self._names = count(max(taken, default=-1) + 1)

    def _read(self, name: str) -> None:
        path = self._folder / name
        try:
            data = self._fs.read_whole(path, _FILE_MAX_BYTES)
            head: Any = decode(data[:_HEAD_BYTES].rstrip(b"\0"))
            group, shape = head["group"], (head["workers"], head["cells"])
            if min(shape) < 1:
                raise ValueError(f"{shape} cells")
            found = np.frombuffer(data, "<i8", shape[0] * shape[1], _HEAD_BYTES).reshape(shape)
            addresses = self.groups.setdefault(group, set())
        except (ValueError, TypeError, KeyError, MQStoreError) as error:
            _log.warning("cannot read %s: %s. Its attempts are not counted", path, error)
            return
        for cells in found.tolist():
            for physical_offset, following in pairwise((*takewhile(NONE.__ne__, cells), NONE)):
                with suppress(LookupError, MQStoreError):  # deleted, never written, or the end of a range
                    first = self._parts.store.at(physical_offset)
                    stop = min(max(first.offset, _UP_TO - following) + 1, first.offset + _BATCH_MAX)
                    addresses.update(Address(*first.queue, offset) for offset in range(first.offset, stop))

    def forget(self) -> None:
        """Remove the files that were read. The caller has saved their results."""
        for name in self._left_behind:
            if name.isdecimal():
                self._fs.unlink(self._folder / name, missing_ok=True)

    def _load(self) -> None:
        """Load the unsettled suspects of earlier processes."""
        try:
            value: Any = decode(self._fs.read_whole(self._folder / _SUSPECTS, _FILE_MAX_BYTES))
            for group, found in value["suspects"].items():
                addresses = {Address(str(topic), int(queue_id), int(offset)) for topic, queue_id, offset in found}
                known = self._parts.groups.get(group) is not None
                self.suspects.add(group, filter(partial(self._is_open, group), addresses) if known else ())
            self._save(self.suspects.left)
        except (ValueError, TypeError, KeyError, AttributeError, MQStoreError) as error:
            _log.warning("cannot read %s: %s", self._folder / _SUSPECTS, error)

    def _is_open(self, group: str, address: Address) -> bool:
        committed = self._parts.offsets.committed(QueueKey(group, address.topic, address.queue_id))
        return committed is None or address.offset >= committed

    def _save(self, suspects: Mapping[str, set[Address]]) -> None:
        """Save the suspects without a sync.
        If they are lost, the only effect is that they are handled at the same time after the next kill."""
        path = self._folder / _SUSPECTS
        try:
            if not suspects:
                self._fs.unlink(path, missing_ok=True)
                return
            value = {"suspects": {group: sorted(addresses) for group, addresses in suspects.items()}}
            self._fs.mkdir(self._folder, exist_ok=True)
            save_json(path, value, self._fs, file_mode=self._parts.config.file_mode, synced=False, back_up=False)
        except MQStoreError as error:
            _log.warning("cannot write %s: %s", path, error)

    def open(self, group: str, workers: int, cells: int) -> AttemptNotes:
        """Return a new file, with `cells` cells for each worker. Raises StoreFullError, StoreIOError."""
        self._fs.mkdir(self._folder, exist_ok=True)
        path = self._folder / str(next(self._names))
        length = _HEAD_BYTES + _CELL_BYTES * workers * cells
        fd = self._fs.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._parts.config.file_mode)
        try:
            # The head is written last, because a file without it is ignored.
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
        return AttemptNotes(self._fs, path, [all_cells[i * cells : (i + 1) * cells] for i in range(workers)])
