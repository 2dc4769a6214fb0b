"""How far a broadcasting client has come, in a file of its own (clients#positions, clients#broadcasting).

    <folder>/<client id>/<group>.json        {"offsets": {"orders": {"0": 12, "1": 250}}}

How a file is written, that it is never absent, partial or silently reset, is `files.jsonfile`'s business. One object
for a file at a time: who takes over from another one reloads.

    update(q, n)            n, forwards or backwards; with increase_only: unless less is known
    update_and_freeze(q, n) n, and every later update is ignored until `remove`: late acknowledgements of what was read
                            before a queue was taken back must not undo it
    remove(q)               what is in memory; the file keeps what it has
    reload()                all that is in memory, for what is in the file by now
    get(q)                  what is in memory, else in the file
    persist()               memory into the file, whose other entries stay
    lower(end_of)           where queues were shortened, their ends

Of RocketMQ's file only the idea is kept: its keys are JSON objects, which no JSON reader takes, and it is rewritten in
place.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
from collections.abc import Callable, Iterable
from operator import index
from pathlib import Path
from typing import Any

from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.errors import ConfigError, CorruptStoreError
from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem
from mqstore.files.jsonfile import load_json, save_json
from mqstore.log.commitlog import QueueRef

__all__ = ["LOCAL_OFFSETS", "LocalOffsets", "check_local_offsets", "lower_all"]

_log = logging.getLogger("mqstore")

LOCAL_OFFSETS = "local_offsets"
"""Folder of a store for its writer's clients."""
_MEMBER = "offsets"


class LocalOffsets:
    """The offsets of one client in one group. Thread-safe.

    >>> import tempfile
    >>> queue = QueueRef("orders", 0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     offsets = LocalOffsets(folder, "cache-1", "prices")
    ...     offsets.update(queue, 12)
    ...     offsets.persist()
    ...     LocalOffsets(folder, "cache-1", "prices").get(queue)
    12
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        client_id: str,
        group: str,
        *,
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
        file_mode: int = FILE_MODE,
        flush: Callable[[], object] | None = None,
    ) -> None:
        """Load the file. `folder`: of a store's writer its `local_offsets`, of others one of their own. `flush` makes
        durable what the offsets rest on, and is called before each write: a file that is ahead of the log would have
        the client pass over what comes after a power cut.

        Raises ConfigError for names that cannot be a folder and a file, CorruptStoreError when there were offsets and
        no good copy is left, StoreIOError.
        """
        for name in (client_id, group):
            if not name or name in (".", "..") or "/" in name or "\0" in name:
                raise ConfigError(f"{name!r:.150} cannot be the name of a file; choose another client id or group")
        self.path = Path(folder) / client_id / f"{group}.json"
        self._fs = fs
        self._file_mode = file_mode
        self._flush = flush
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        """Held around a whole save; taken before `_lock`."""
        self._offsets: dict[QueueRef, int] = {}
        self._frozen: set[QueueRef] = set()
        self._clock = clock
        self._members, self._stored = self._load()
        self._folder_durable = False

    def reload(self) -> None:
        """Begin with what is in the file now: another object may have written it since this one was made. Errors as of
        the constructor."""
        with self._saving:
            members, stored = self._load()
            with self._lock:
                self._members, self._stored = members, stored
                self._offsets.clear()
                self._frozen.clear()

    def _load(self) -> tuple[dict[str, Any], dict[QueueRef, int]]:
        try:
            loaded = load_json(self.path, writer=True, fs=self._fs, clock=self._clock, check=check_local_offsets)
        except CorruptStoreError as error:
            paths = shlex.join([str(self.path), f"{self.path}.bak"])
            what = str(error).partition("; to mend it:")[0]
            raise CorruptStoreError(
                f"{what}; without them the client begins anew where `start` says", str(self.path), repair=f"rm {paths}"
            ) from error
        members = loaded.value or {}
        stored, bad = _split(check_local_offsets(members))
        for problem in [*loaded.problems, *(f"{self.path}: {what} is no offset; it is left out" for what in bad)]:
            _log.error("%s", problem)
        return members, stored

    # -- the table --------------------------------------------------------------------------------------------------

    def get(self, queue: QueueRef) -> int | None:
        """Where the client goes on in `queue`; None when nothing is known, which is not 0."""
        with self._lock:
            offset = self._offsets.get(queue)
            return self._stored.get(queue) if offset is None else offset

    def update(self, queue: QueueRef, offset: int, *, increase_only: bool = False) -> None:
        """Note that everything below `offset` is consumed. ConfigError for an offset below 0."""
        self._set(queue, offset, increase_only=increase_only, freeze=False)

    def update_and_freeze(self, queue: QueueRef, offset: int) -> None:
        """As `update`, and ignore every later update, of this sort too, until the queue is removed."""
        self._set(queue, offset, increase_only=False, freeze=True)

    def _set(self, queue: QueueRef, offset: int, *, increase_only: bool, freeze: bool) -> None:
        queue, offset = QueueRef(queue[0], index(queue[1])), index(offset)
        if offset < 0 or queue.queue_id < 0:
            raise ConfigError(f"offset {offset} of queue {queue.queue_id} of {queue.topic!r}: neither is below 0")
        with self._lock:
            if queue in self._frozen:
                return
            if not (increase_only and offset < self._offsets.get(queue, -1)):
                self._offsets[queue] = offset
            if freeze:
                self._frozen.add(queue)

    def remove(self, queue: QueueRef) -> None:
        """Forget what is in memory of `queue`, a freeze included."""
        with self._lock:
            self._offsets.pop(queue, None)
            self._frozen.discard(queue)

    def lower(self, end_of: Callable[[str, int], int]) -> None:
        """Where an offset lies behind `end_of(topic, queue id)`, it is that: what is put there from now on is new."""
        for queue, offset in self._stored.items():
            end = end_of(*queue)
            if offset > end:
                _log.warning("%s: offset %d of %s/%d lies behind the end of the queue; it is lowered to %d",
                             self.path, offset, *queue, end)  # fmt: skip
                self.update(queue, end)

    # -- the file ---------------------------------------------------------------------------------------------------

    def persist(self, queues: Iterable[QueueRef] | None = None) -> None:
        """Write what is in memory (of `queues` only) into the file; on disk when this returns. Nothing is written when
        nothing has changed. StoreFullError, StoreIOError: the file is as it was, and the next call tries again."""
        chosen = None if queues is None else set(queues)
        with self._saving:
            with self._lock:
                fresh = {queue: offset for queue, offset in self._offsets.items() if chosen is None or queue in chosen}
                merged = {**self._stored, **fresh}
                if merged == self._stored:
                    return
            self._make_folder()
            if self._flush is not None:
                self._flush()
            by_topic: dict[str, dict[str, int]] = {}
            for queue, offset in merged.items():
                by_topic.setdefault(queue.topic, {})[str(queue.queue_id)] = offset
            value = {**self._members, _MEMBER: by_topic}
            save_json(self.path, value, self._fs, check=check_local_offsets, file_mode=self._file_mode)
            with self._lock:
                self._stored = merged

    def _make_folder(self) -> None:
        if self._folder_durable:  # by each process: who made a folder may not have come as far as to sync it
            return
        client = self.path.parent
        for folder in (client.parent, client):
            self._fs.mkdir(folder, exist_ok=True)
            self._fs.sync_directory(folder.parent)
        self._folder_durable = True


def lower_all(root: Path, end_of: Callable[[str, int], int], *, fs: FileSystem, clock: Clock, file_mode: int) -> None:
    """`lower` in every file of a store, on disk when this returns. One that is damaged is left to whoever needs it.
    Errors as of `LocalOffsets.persist`."""
    folder = root / LOCAL_OFFSETS
    backups = folder.glob("*/*.json.bak")  # may be all that is left of one, and is then what its client goes by
    for path in sorted({*folder.glob("*/*.json"), *(backup.with_suffix("") for backup in backups)}):
        try:
            offsets = LocalOffsets(folder, path.parent.name, path.stem, fs=fs, clock=clock, file_mode=file_mode)
        except CorruptStoreError as error:
            _log.error("%s", error)
            continue
        offsets.lower(end_of)
        offsets.persist()


def check_local_offsets(value: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The offsets in a file. ValueError for another shape: it is then no good copy."""
    found: object = value.get(_MEMBER, {})
    if not isinstance(found, dict):
        raise ValueError(f"{_MEMBER} must be an object, not {found!r:.80}")
    for topic, queues in found.items():
        if not isinstance(queues, dict) or any(type(offset) is not int for offset in queues.values()):
            raise ValueError(f"the offsets of {topic!r:.80} must be numbers by queue, not {queues!r:.80}")
    return found


def _split(offsets: dict[str, dict[str, int]]) -> tuple[dict[QueueRef, int], list[str]]:
    """(offsets by queue, entries that cannot be such)."""
    good: dict[QueueRef, int] = {}
    bad = []
    for topic, queues in offsets.items():
        for queue_id, offset in queues.items():
            if queue_id.isascii() and queue_id.isdigit() and offset >= 0:
                good[QueueRef(topic, int(queue_id))] = offset
            else:
                bad.append(f"{topic}/{queue_id}: {offset}")
    return good, bad
