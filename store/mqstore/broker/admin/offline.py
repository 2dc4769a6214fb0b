"""Changes that an operator makes while no broker runs, by the command or by scripts.

    reset, delete_group, delete_topic     tables, and the pop log, which would bring back what they forget
    cancel                                a record in the timer topic
    everything else                       `parts`: topics, groups, dead letters

No message is delivered, redelivered, expired or dropped meanwhile, since no service runs. Messages that were in flight
when the broker ended stay in flight. The next broker decides whether to release them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Literal

from mqstore.broker.delay.timer import TimerService
from mqstore.broker.parts import Parts, delete_group, open_parts
from mqstore.broker.pop.service import PopService
from mqstore.broker.reading import Reads
from mqstore.broker.retry import Retries
from mqstore.broker.waiting import Waiters
from mqstore.log.commitlog import QueueRef
from mqstore.log.store import MessageStore
from mqstore.options import StoreConfig

__all__ = ["Offline", "offline"]


class Offline:
    """A store that is open for writing, and its tables. Use `offline`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mqstore.engine.MessageStore(folder).close()
    ...     with offline(folder) as opened:
    ...         created = opened.parts.topics.create("orders", queues=2)
    ...         group = opened.parts.groups.create("billing")
    ...         opened.reset("billing", "orders", None, "earliest")
    {QueueRef(topic='orders', queue_id=0): 0, QueueRef(topic='orders', queue_id=1): 0}
    """

    def __init__(self, store: MessageStore) -> None:
        self.parts: Parts = open_parts(store)
        self._opened = ExitStack()
        self._opened.callback(self.parts.offsets.persist)  # runs last, since saving the others moves offsets

    @cached_property
    def _pop(self) -> PopService:
        """Pop service with its state from the log. It then hears of topics and groups that are deleted."""
        parts = self.parts
        waiters = Waiters(parts, _nothing)
        self._opened.callback(waiters.close)
        pop = PopService(parts, _nothing, waiters, Reads(parts), Retries(parts).dead_letter)
        self._opened.callback(pop.close)
        self._opened.callback(pop.persist)  # runs before it is closed
        return pop

    def reset(
        self, group: str, topic: str, queue_id: int | None, to: Literal["earliest", "latest"] | datetime | int
    ) -> dict[QueueRef, int]:
        """Reset a group as `Broker.reset` does. Its messages are no longer in flight: receipts have expired."""
        return Reads(self.parts).reset(group, topic, queue_id, to, on_reset=self._pop.reset)

    def delete_group(self, group: str) -> None:
        """Delete a group: settings, committed offsets, and what it has in flight.
        Its dead letters and retries stay. A group without settings has only committed offsets to delete. Raises
        GroupNotFoundError if it has neither."""
        if self.parts.groups.get(group) is not None:
            self._pop  # noqa: B018  (listens)
        delete_group(self.parts, group)

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic as `TopicTable.delete` does. Its messages are no longer in flight."""
        self._pop  # noqa: B018  (listens)
        self.parts.topics.delete(topic, force=force)

    def cancel(self, handle: str) -> bool:
        """Cancel a message as `Broker.recall` does. Durable when it returns True."""
        timer = TimerService(self.parts, _nothing)
        try:
            cancelled = timer.recall(handle)
            timer.persist()
        finally:
            timer.close()
        if cancelled:
            self.parts.store.flush()
        return cancelled

    def close(self) -> None:
        """Save all changes. If one part fails the others are still saved, and then its error is raised."""
        self._opened.close()


@contextmanager
def offline(path: str | os.PathLike[str], *, config: StoreConfig | None = None) -> Iterator[Offline]:
    """Open the store in directory `path` for changes by an operator. Never creates a store.
    Raises what opening for writing raises: StoreLockedError while a broker runs, NotAStoreError without a store."""
    config = replace(config or StoreConfig(), release_in_flight=False)
    with MessageStore(path, create=False, config=config) as store:
        opened = Offline(store)
        try:
            yield opened
        finally:
            opened.close()


def _nothing() -> None:
    """Do nothing: there is no housekeeper to wake."""
