"""Stores as queries and tasks open them: for reading, without a lock or a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from mqstore.errors import ConfigError, MQStoreError
from mqstore.files.lock import writer_alive
from mqstore.files.quiet import QUIET
from mqstore.jobs.options import SourceOptions
from mqstore.jobs.telling import of_store, warn_once
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.names import is_path_safe
from mqstore.log.reader import StoreReader
from mqstore.log.readonly import ReadOnlyMessageStore
from mqstore.options import StoreConfig

__all__ = ["SlicedStore", "StoreName", "check_queues", "open_sliced", "open_store", "opened", "queues_of"]

_Store = TypeVar("_Store", bound=ReadOnlyMessageStore)
_FEW_MAPPINGS: Final = StoreConfig(max_mappings=4)
"""Mapped pages count as a worker's memory, and a mapping keeps the disk space of a deleted segment."""


@dataclass(frozen=True, slots=True)
class StoreName:
    """A store's absolute path, and its id in rows: a given name, else the path."""

    id: str
    path: str


def open_store(store: StoreName, config: StoreConfig | None = None) -> ReadOnlyMessageStore:
    """Open the store for reading, without a lock or a trace. Errors such as NotAStoreError name the path."""
    with of_store(store.path):
        return ReadOnlyMessageStore(store.path, config=config, fs=QUIET)


class SlicedStore(ReadOnlyMessageStore):
    """A store of which slices are planned or read. It knows only queues asked for by `load`.
    To find the ends of all queues can take longer than to read a few messages of one."""

    def _load_queues(self) -> None:
        pass

    def named(self, options: SourceOptions) -> list[ConsumeQueue]:
        """Return the queues of the topics that the options name, as `queues_of`."""
        if options.assign is not None:
            refs = {(topic, queue_id) for topic, ids in options.assign.items() for queue_id in ids}
        else:
            refs = {*self.queue_table.on_disk(options.topics or ())}
        found = [queue for ref in sorted(refs) if (queue := self.load(*ref)) is not None]
        return [queue for queue in found if queue.next_offset]

    def load(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue with its bounds as opening finds them, None if it does not exist."""
        queue = self.queue_table.get(topic, queue_id)
        # A checkpoint may have any name.
        place = ConsumeQueue(self.queue_table, topic, queue_id).directory if is_path_safe(topic) else ""
        if queue is None and os.path.isdir(place):
            queue = self.queue_table.create(topic, queue_id)
            queue.load(exact=not self.clean_shutdown)
            self._bound(queue)
        return queue


def open_sliced(store: StoreName) -> SlicedStore:
    """Open the store as `open_store` does, to read slices."""
    with of_store(store.path):
        return SlicedStore(store.path, fs=QUIET, config=_FEW_MAPPINGS)


def opened(store: StoreName, options: SourceOptions, opening: Callable[[StoreName], _Store]) -> _Store | None:
    """Open the store for a query. Return None, with a warning, if it does not open and the options pass over it."""
    try:
        return opening(store)
    except (MQStoreError, OSError) as error:
        if options.fail_on_data_loss and not options.ignore_corrupt_files:
            raise
        text = f"{store.path}: {error}" if store.path not in str(error) else str(error)
        warn_once(f"mqstore: {text}; passed over, as failOnDataLoss=false or ignoreCorruptFiles=true has it")
        return None


def queues_of(store: StoreReader) -> list[ConsumeQueue]:
    """Return the queues of a store opened a moment ago, by topic and queue id, with their bounds.
    `topics`, `queues` and `offsets` of the store look for news with every call: half the time of planning a fleet."""
    return sorted((queue for queue in store.queue_table if queue.next_offset), key=lambda queue: queue.ref)


def check_queues(
    name: StoreName, store: ReadOnlyMessageStore, queues: Sequence[object], options: SourceOptions, *, job: bool = False
) -> None:
    """Raise ConfigError for a store that lost queues: messages would be missing. `queues` have had a message.
    For a query that allows data loss it is a warning, never for a job. What a writer that is at work has not listed yet
    is not lost."""
    parts = store.parts
    if store.clean_shutdown and parts.checkpoint.queues is not None:
        lost = parts.has_lost_queues()
    else:
        lost = not queues and parts.has_records() and not writer_alive(name.path)
    if lost:
        text = f"consume queues of {name.path} are lost, so messages would be missing: `mqstore recover` rebuilds them"
        if job or options.fail_on_data_loss:
            raise ConfigError(f"{text}. spark.read with readBy=log needs none")
        warn_once(f"{text}; failOnDataLoss=false reads what is left")
