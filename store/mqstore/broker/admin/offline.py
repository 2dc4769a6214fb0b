"""Changes that an operator makes while no broker runs: the door for the command, and for scripts.

    reset, delete_group, delete_topic     tables, and the pop log, which would bring back what they forget
    cancel                                a record in the timer topic
    everything else                       `parts`: topics, groups, dead letters

Nothing is delivered, redelivered, expired or dropped meanwhile, for no mechanism runs: each only loads its state when
it is needed, and writes it down at the end. What receivers held when the broker ended stays as it is, too: to release
it is the next broker's to decide.
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
    ...     with offline(folder) as desk:
    ...         created = desk.parts.topics.create("orders", queues=2)
    ...         group = desk.parts.groups.create("billing")
    ...         desk.reset("billing", "orders", None, "earliest")
    {QueueRef(topic='orders', queue_id=0): 0, QueueRef(topic='orders', queue_id=1): 0}
    """

    def __init__(self, store: MessageStore) -> None:
        self.parts: Parts = open_parts(store)
        self._opened = ExitStack()
        self._opened.callback(self.parts.offsets.close)  # last: what the others write moves offsets

    @cached_property
    def _pop(self) -> PopService:
        """Pop with its state from the log; from then on it hears of topics and groups that go."""
        parts = self.parts
        waiters = Waiters(parts, _nothing)
        self._opened.callback(waiters.close)
        pop = PopService(parts, _nothing, waiters, Reads(parts), Retries(parts).dead_letter)
        self._opened.callback(pop.close)
        return pop

    def reset(
        self, group: str, topic: str, queue_id: int | None, to: Literal["earliest", "latest"] | datetime | int
    ) -> dict[QueueRef, int]:
        """As `Broker.reset`: what was in flight there is no longer, and receipts that are out have expired."""
        return Reads(self.parts).reset(group, topic, queue_id, to, on_reset=self._pop.reset)

    def delete_group(self, group: str) -> None:
        """Forget a group: settings, progress, what it has in flight. Its dead letters and retries stay. If it never had
        settings, its progress alone. GroupNotFoundError when it has neither."""
        if self.parts.groups.get(group) is not None:
            self._pop  # noqa: B018  (listens)
        delete_group(self.parts, group)

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """As `TopicTable.delete`, and nothing of it stays in flight."""
        self._pop  # noqa: B018  (listens)
        self.parts.topics.delete(topic, force=force)

    def cancel(self, handle: str) -> bool:
        """As `Broker.recall`; durable when it returns True."""
        timer = TimerService(self.parts, _nothing)
        try:
            cancelled = timer.recall(handle)
        finally:
            timer.close()
        if cancelled:
            self.parts.store.flush()
        return cancelled

    def close(self) -> None:
        """Write down what changed. Whatever one part meets, the others are written; then it is raised."""
        self._opened.close()


@contextmanager
def offline(path: str | os.PathLike[str], *, config: StoreConfig | None = None) -> Iterator[Offline]:
    """The store in directory `path`, opened for changing it by hand. Raises what opening for writing raises, foremost
    StoreLockedError while a broker runs; NotAStoreError where there is none: none is made."""
    config = replace(config or StoreConfig(), release_in_flight=False)
    with MessageStore(path, create=False, config=config) as store:
        desk = Offline(store)
        try:
            yield desk
        finally:
            desk.close()


def _nothing() -> None:
    """No housekeeper is there to be woken."""
