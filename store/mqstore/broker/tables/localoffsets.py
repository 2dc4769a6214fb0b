"""Offsets of a broadcasting client, in a separate file (clients#positions, clients#broadcasting).

    local_offsets/<client id>/<group>.json        {"offsets": {"orders": {"0": 12, "1": 250}}}

A commit changes memory at once, forwards or backwards, and the file with the next `save`. Only one object at a time
uses a file; the next one reloads it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqstore.broker.tables.configfile import ConfigFile
from mqstore.errors import ConfigError, CorruptStoreError
from mqstore.log.commitlog import QueueRef
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.log.reading.reader import StoreReader

LOCAL_OFFSETS = "local_offsets"
"""Folder of a store for the clients of its writer."""
_MEMBER = "offsets"


class LocalOffsets:
    """Offsets of one client in one group. Thread-safe.

    >>> import tempfile
    >>> from mqstore.log.store import MessageStore
    >>> queue = QueueRef("orders", 0)
    >>> with tempfile.TemporaryDirectory() as folder, MessageStore(folder) as store:
    ...     offsets = LocalOffsets(store, "cache-1", "prices")
    ...     offsets.commit(queue, 12)
    ...     offsets.save()
    ...     LocalOffsets(store, "cache-1", "prices").committed(queue)
    12
    """

    def __init__(self, store: StoreReader, client_id: str, group: str) -> None:
        """Load the file.
        Raises ConfigError for names that cannot be a folder and a file, CorruptStoreError if there were offsets and no
        good copy is left, StoreIOError."""
        for name in (client_id, group):
            if not name or name in (".", "..") or "/" in name or "\0" in name:
                raise ConfigError(f"{name!r:.150} cannot be the name of a file; choose another client id or group")
        self._file = ConfigFile(store, f"{client_id}/{group}.json", check_local_offsets, folder=LOCAL_OFFSETS)
        self.path = self._file.path
        self._lock = Lock()
        self._saving = Lock()
        """Lock for a whole save, taken before `_lock`."""
        self._offsets: dict[QueueRef, int] = {}
        self._saved: dict[QueueRef, int] = {}
        self.reload()

    def reload(self) -> None:
        """Load the file again, because another object may have written it. Raises like the constructor."""
        with self._saving:
            try:
                value = self._file.load() or {}
            except CorruptStoreError as error:
                paths = shlex.join([str(self.path), f"{self.path}.bak"])
                what = str(error).partition(". Repair it with:")[0]
                raise CorruptStoreError(
                    f"{what}; without these files the client starts again at `start`",
                    str(self.path),
                    repair=f"rm {paths}",
                ) from error
            stored: dict[QueueRef, int] = {}
            for topic, queues in check_local_offsets(value).items():
                for queue_id, offset in queues.items():
                    if queue_id.isascii() and queue_id.isdigit() and offset >= 0:
                        stored[QueueRef(topic, int(queue_id))] = offset
                    else:
                        self._file.report(f"{self.path}: {topic}/{queue_id}: {offset} is not an offset; it is ignored")
            with self._lock:
                self._offsets, self._saved = stored, dict(stored)

    def committed(self, queue: QueueRef) -> int | None:
        """Return the client's offset in `queue`, or None if it is not known, which is not 0."""
        return self._offsets.get(queue)

    def commit(self, queue: QueueRef, offset: int) -> None:
        """Commit that everything below `offset` is consumed. Raises ConfigError for an offset below 0."""
        queue, offset = QueueRef(queue[0], index(queue[1])), index(offset)
        if offset < 0 or queue.queue_id < 0:
            raise ConfigError(f"offset {offset} of queue {queue.queue_id} of {queue.topic!r} must not be negative")
        with self._lock:
            self._offsets[queue] = offset

    def save(self) -> None:
        """Save the offsets. They are on disk when this returns. Without changes nothing is written.
        After StoreFullError or StoreIOError the file is as it was, and the next call tries again."""
        with self._saving:
            with self._lock:
                offsets = dict(self._offsets)
            if offsets == self._saved:
                return
            # Otherwise the file could be ahead of the log after a power cut, and the client would skip messages.
            self._file.flush_log()
            by_topic: dict[str, dict[str, int]] = {}
            for queue, offset in offsets.items():
                by_topic.setdefault(queue.topic, {})[str(queue.queue_id)] = offset
            self._file.save({_MEMBER: by_topic})
            self._saved = offsets

    def lower(self, end_of: Callable[[str, int], int]) -> None:
        """Lower offsets above `end_of(topic, queue id)` to that end, because later messages are new."""
        for queue, offset in self._saved.items():
            end = end_of(*queue)
            if offset > end:
                _log.warning("%s: offset %d of %s/%d is above the end of the queue; it is lowered to %d",
                             self.path, offset, *queue, end)  # fmt: skip
                self.commit(queue, end)


def clients_of(store: StoreReader, group: str) -> list[str]:
    """Return the clients that have saved offsets in a group."""
    return [path.parent.name for path in _files(store) if path.stem == group]


def refuse_clients(group: str, clients: Iterable[str]) -> None:
    """Raise ConfigError if there are `clients`, because each of them has its own offsets, and the group has none."""
    if names := ", ".join(clients):
        raise ConfigError(
            f"group {group!r} broadcasts, so each member ({names}) has its own offsets. Start the member, and use "
            "`consumer.seek` to move it, or `consumer.stats()` for its lag"
        )


def _files(store: StoreReader) -> list[Path]:
    folder = store.path / LOCAL_OFFSETS
    backups = folder.glob("*/*.json.bak")  # a backup may be the only copy, which its client then uses
    return sorted({*folder.glob("*/*.json"), *(backup.with_suffix("") for backup in backups)})


def lower_all(store: StoreReader, end_of: Callable[[str, int], int]) -> None:
    """Lower the offsets in every file of a store. The files are on disk when this returns.
    A damaged file is skipped, since its client reports it. Raises like `LocalOffsets.save`."""
    for path in _files(store):
        try:
            offsets = LocalOffsets(store, path.parent.name, path.stem)
        except CorruptStoreError as error:
            _log.error("%s", error)
            continue
        offsets.lower(end_of)
        offsets.save()


def check_local_offsets(value: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the offsets in a file. Raises ValueError for another shape."""
    found: object = value.get(_MEMBER, {})
    if not isinstance(found, dict):
        raise ValueError(f"{_MEMBER} must be an object, not {found!r:.80}")
    for topic, queues in found.items():
        if not isinstance(queues, dict) or any(type(offset) is not int for offset in queues.values()):
            raise ValueError(f"the offsets of {topic!r:.80} must be numbers by queue, not {queues!r:.80}")
    return found
