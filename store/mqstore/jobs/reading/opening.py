"""Opening of stores by queries and tasks: for reading, without a lock or a change to any file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from mqstore.errors import ConfigError, MQStoreError, NotAStoreError
from mqstore.files.lock import writer_alive
from mqstore.files.readonly_fs import QUIET
from mqstore.jobs.errors import of_store, warn_once
from mqstore.jobs.options.options import SourceOptions
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.names import is_path_safe
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.options import StoreConfig

_Store = TypeVar("_Store", bound=ReadOnlyMessageStore)
_FEW_MAPPINGS: Final = StoreConfig(max_mappings=4)
"""Few mappings: mapped pages count as a worker's memory, and a mapping keeps the disk space of a deleted segment."""


@dataclass(frozen=True, slots=True)
class StoreName:
    """A store's absolute path, and its id in rows: a given name, or else the path."""

    id: str
    path: str


def open_store(store: StoreName) -> ReadOnlyMessageStore:
    """Open the store for reading, without a lock. Errors such as NotAStoreError name the path."""
    with of_store(store.path):
        return ReadOnlyMessageStore(store.path, fs=QUIET)


class SlicedStore(ReadOnlyMessageStore):
    """Store for planning or reading slices. It opens only the queues requested by `load`.
    To find the ends of all queues can take longer than to read a few messages of one."""

    def _load_queues(self) -> None:
        pass

    def named(self, options: SourceOptions) -> list[ConsumeQueue]:
        """Return the non-empty queues of the topics that the options name, sorted."""
        if options.assign is not None:
            refs = {(topic, queue_id) for topic, ids in options.assign.items() for queue_id in ids}
        else:
            refs = {*self.queue_table.on_disk(options.topics or ())}
        found = [queue for ref in sorted(refs) if (queue := self.load(*ref)) is not None]
        return [queue for queue in found if queue.next_offset]

    def load(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue with its bounds, or None if it does not exist."""
        queue = self.queue_table.get(topic, queue_id)
        # The name may come from a stream's checkpoint, which may contain any text.
        place = ConsumeQueue(self.queue_table, topic, queue_id).directory if is_path_safe(topic) else ""
        if queue is None and os.path.isdir(place):
            queue = self.queue_table.create(topic, queue_id)
            queue.load(exact=not self.clean_shutdown)
            self._bound(queue)
        return queue


def open_sliced(store: StoreName) -> SlicedStore:
    """Open the store for reading slices. Raises like `open_store`."""
    with of_store(store.path):
        return SlicedStore(store.path, fs=QUIET, config=_FEW_MAPPINGS)


def opened(
    store: StoreName, options: SourceOptions, opening: Callable[[StoreName], _Store], *, missing_ok: bool = False
) -> _Store | None:
    """Open the store for a query. If it cannot be opened and the options allow it, warn and return None.
    None also for a store that does not exist, if `missing_ok`."""
    try:
        return opening(store)
    except (MQStoreError, OSError) as error:
        if options.fail_on_data_loss and not options.ignore_corrupt_files:
            if missing_ok and isinstance(error, NotAStoreError):
                return None
            raise
        text = f"{store.path}: {error}" if store.path not in str(error) else str(error)
        warn_once(f"mqstore: {text}; skipped because of failOnDataLoss=false or ignoreCorruptFiles=true")
        return None


def queues_of(store: StoreReader) -> list[ConsumeQueue]:
    """Return the non-empty queues of a store that was just opened, sorted by topic and queue id.
    `topics`, `queues` and `offsets` of the store would look for changes at every call: half the planning time."""
    return sorted((queue for queue in store.queue_table if queue.next_offset), key=lambda queue: queue.ref)


def check_queues(
    name: StoreName, store: ReadOnlyMessageStore, queues: Sequence[object], options: SourceOptions, *, job: bool = False
) -> None:
    """Raise ConfigError for a store that lost queues: messages would be missing. `queues` are those with messages.
    A query that allows data loss only gets a warning, a job never. Messages that a running writer has not dispatched
    yet are not lost."""
    parts = store.parts
    if store.clean_shutdown and parts.checkpoint.queues is not None:
        lost = parts.has_lost_queues()
    else:
        lost = not queues and parts.has_records() and not writer_alive(name.path)
    if lost:
        text = f"consume queues of {name.path} are lost, so messages would be missing: `mqstore recover` rebuilds them"
        if job or options.fail_on_data_loss:
            raise ConfigError(f"{text}. spark.read with readBy=log reads without queues")
        warn_once(f"{text}; failOnDataLoss=false reads the remaining ones")
