"""View of a store directory for an operator, and changes while no broker runs, by the command or by scripts.

    look        opens the directory for reading, also while a broker runs. A change is checked, and then refused
    offline     opens it for writing

    reset, deletions    tables, and the pop log, else it would restore the deleted state
    cancel              a record in the timer topic
    everything else     `topics`, `groups`, `dead_letters`

No message is delivered, redelivered, expired or dropped meanwhile, since no service runs. Messages that were in flight
when the broker ended stay in flight. The next broker decides whether to release them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

from mqstore.broker.admin.inspect import PopView, QueueLag, group_names, is_waiting, lag_of, pop_view
from mqstore.broker.background.context import Parts, delete_group, open_parts, open_tables
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.items.changes import WritableItems
from mqstore.broker.items.files import items_of, waiting_of
from mqstore.broker.items.state import Items
from mqstore.broker.pop.service import PopService
from mqstore.broker.reads.reading import Reads, Start
from mqstore.broker.reads.waiting import Waiters
from mqstore.broker.redelivery.dead_letters import DeadLetters
from mqstore.broker.redelivery.retry import Retries
from mqstore.errors import GroupNotFoundError, ReadOnlyStoreError
from mqstore.files.lock import refusal_to_reader, refuse_beside_writer
from mqstore.files.readonly_fs import QUIET
from mqstore.log.commitlog import QueueRef
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from mqstore.options import StoreConfig


class Offline:
    """Tables of a store directory without a broker, and what an operator may see and change. Use `look` or `offline`.
    `mqstore.admin.operations` has more, such as deletions.

    `topics`, `groups` and `offsets` are the tables, as of a broker.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mqstore.open(folder).close()
    ...     with offline(folder) as opened:
    ...         created = opened.topics.create("orders", queues=2)
    ...         group = opened.groups.create("billing")
    ...         opened.reset("billing", "orders", None, "earliest")
    ...     with look(folder) as opened:
    ...         opened.groups.names(), [(lag.queue_id, lag.committed, lag.messages) for lag in opened.lag("billing")]
    {QueueRef(topic='orders', queue_id=0): 0, QueueRef(topic='orders', queue_id=1): 0}
    (['billing'], [(0, 0, 0), (1, 0, 0)])
    """

    def __init__(self, store: StoreReader, saving: ExitStack) -> None:
        self._parts = open_parts(store) if isinstance(store, MessageStore) else None
        tables = self.tables = open_tables(store) if self._parts is None else self._parts
        self.topics, self.groups, self.offsets = tables.topics, tables.groups, tables.offsets
        self._saving = saving  # if one part fails the others are still saved, and then its error is raised
        if self._parts is not None:
            self._saving.callback(self.offsets.persist)  # runs last, since saving the others moves offsets

    # -- looking ----------------------------------------------------------------------------------------------------

    @property
    def max_message_size(self) -> int:
        """Largest body that the store accepts, in bytes."""
        return self.tables.store.manifest.max_message_size

    @cached_property
    def _pops(self) -> PopView:
        return pop_view(self.tables, self.tables.clock.now_ms())

    def lag(self, group: str) -> list[QueueLag]:
        """Return the lag of a group in each queue where it has started, in its retry topics too.
        Raises GroupNotFoundError if the group has neither settings nor committed offsets."""
        return lag_of(self.tables, group, self._pops)

    def dead_letters(self, group: str) -> DeadLetters:
        """Return the dead letters of a group. Raises GroupNotFoundError if the group has left no trace."""
        letters = DeadLetters(self.tables, group)
        if self.topics.get(letters.topic) is None and group not in group_names(self.tables):
            raise GroupNotFoundError(
                f"{self.tables.store.path} has no group {group!r}: no dead letters, no settings, no committed offsets"
            )
        return letters

    @cached_property
    def items(self) -> Items:
        """Items of queues by state (`ItemCalls`). Of a store that is only read, `purge` raises ReadOnlyStoreError."""
        if self._parts is None:
            return items_of(self.tables)
        timer = TimerService(self._parts, lambda: None)
        self._saving.callback(timer.close)
        self._saving.callback(timer.persist)
        return WritableItems(self._parts, self._pop.tables, timer, *waiting_of(self._parts, timer.waiting_for))

    # -- changing ---------------------------------------------------------------------------------------------------

    def _writing(self) -> Parts:
        if self._parts is None:
            raise ReadOnlyStoreError(refusal_to_reader(self.tables.store.path, self.tables.fs))
        return self._parts

    @cached_property
    def _pop(self) -> PopService:
        """Pop service with its state from the log. It handles the deletion of topics and groups."""
        parts = self._writing()
        waiters = Waiters(parts, lambda: None)
        self._saving.callback(waiters.close)
        pop = PopService(parts, lambda: None, waiters, Reads(parts), Retries(parts).dead_letter)
        self._saving.callback(pop.close)
        self._saving.callback(pop.persist)  # runs before it is closed
        return pop

    def reset(self, group: str, topic: str, queue_id: int | None, to: Start | int) -> dict[QueueRef, int]:
        """Reset a group as `Broker.reset` does. Its messages are no longer in flight: receipts have expired.
        Of a store that is only read, the offsets change in memory: the result is the plan."""
        on_reset = None if self._parts is None else self._pop.reset
        return Reads(self.tables).reset(group, topic, queue_id, to, on_reset=on_reset)

    def _delete_group(self, group: str) -> None:
        """Delete a group: settings, committed offsets, and deliveries in flight.
        Its dead letters and retries stay. A group without settings has only committed offsets to delete. Raises
        GroupNotFoundError if it has neither."""
        parts = self._writing()
        if self.groups.get(group) is not None:
            self._pop  # noqa: B018  (listens)
        delete_group(parts, group)

    def _delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic as `TopicTable.delete` does. Its messages are no longer in flight."""
        if self._parts is not None:
            self._pop  # noqa: B018  (listens)
        self.topics.delete(topic, force=force)

    def _cancel(self, handle: str, *, dry_run: bool = False) -> bool:
        """Cancel a message as `Broker.recall` does. Durable when it returns True.
        With `dry_run` only return whether it can be cancelled."""
        if dry_run:
            return is_waiting(self.tables, handle, self.tables.clock.now_ms())
        parts = self._writing()
        timer = TimerService(parts, lambda: None)
        try:
            cancelled = timer.recall(handle)
            timer.persist()
        finally:
            timer.close()
        if cancelled:
            parts.store.flush()
        return cancelled


@contextmanager
def look(path: str | os.PathLike[str], *, alone: bool = False) -> Iterator[Offline]:
    """Open the store in directory `path` to look at it, also while a broker runs. Leaves no trace.
    With `alone`, for the plan of a change: raises StoreLockedError, naming the holder, if there is a writer."""
    with ReadOnlyMessageStore(path, fs=QUIET) as store, ExitStack() as saving:
        opened = Offline(store, saving)
        if alone:
            refuse_beside_writer(path, QUIET)
        yield opened


@contextmanager
def offline(path: str | os.PathLike[str], *, config: StoreConfig | None = None) -> Iterator[Offline]:
    """Open the store in directory `path` for changes by an operator. Never creates a store.
    Raises the errors of opening for writing: StoreLockedError while a broker runs, NotAStoreError without a store."""
    config = replace(config or StoreConfig(), requeue_on_open=False)
    with MessageStore(path, create=False, config=config) as store, ExitStack() as saving:
        yield Offline(store, saving)
