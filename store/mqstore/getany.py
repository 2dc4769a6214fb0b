"""Waiting for the first item of several queues (clients#get-any)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic

from mqstore.client.items.codecs import T
from mqstore.client.pop.delivery import Task
from mqstore.client.waits import Wait
from mqstore.errors import ConfigError, QueueEmpty, QueueShutDown
from mqstore.options import Duration, seconds
from mqstore.queue import Queue
from mqstore.signalsafe import Bell


def queues_of(queues: Iterable[T], kind: type) -> list[T]:
    """Return the queues as a list. Raises ConfigError for none, for a single queue, whose iterator would lease its
    items, and for other objects."""
    found = [] if isinstance(queues, kind) or not isinstance(queues, Iterable) else list(queues)
    if not found or not all(isinstance(each, kind) for each in found):
        name = f"{kind.__module__.removesuffix('.queue')}.{kind.__name__}"
        raise ConfigError(f"get_any takes a list of one or more {name}, not {queues!r:.80}")
    return found


class AnyOf(Generic[T]):
    """Look at several queues, and the waits between two looks. For threads and for `mqstore.aio`."""

    def __init__(self, queues: list[Queue[T]]) -> None:
        self._left = queues
        self._waits: dict[Queue[T], Wait] = {}

    def look(self) -> tuple[Queue[T], Task[T]] | None:
        """Return the next item, and its queue. Raises QueueShutDown if all queues were shut down and are empty."""
        for wait in tuple(self._waits.values()):
            wait.end()  # before the look, so that each turn is used by it or passed on
        try:
            for queue in tuple(self._left):
                try:
                    task = queue.get(block=False)
                except QueueEmpty:
                    task = None
                except QueueShutDown:
                    self._left.remove(queue)
                    if not self._left:
                        raise
                    continue
                self._waits.pop(queue, None)  # the look has used its turn
                if task is not None:
                    return queue, task
            return None
        finally:
            self.cancel()

    def park(self, call: Callable[[], Any]) -> Callable[[], None]:
        """Have `call()` called when another look may find something. Return `cancel`."""
        for queue in self._left:
            self._waits[queue] = queue._when_ready(call)
        return self.cancel

    def cancel(self) -> None:
        """Stop waiting, and pass unused turns on."""
        waits, self._waits = self._waits, {}
        for wait in waits.values():
            wait.cancel()

    def empty(self) -> QueueEmpty:
        return QueueEmpty(f"nothing to get from {', '.join(repr(queue.name) for queue in self._left)}")


def get_any(queues: Iterable[Queue[T]], timeout: Duration | None = None) -> Task[T]:
    """Return the next item of the first of `queues` that has one, leased as by `Queue.get`.

    It waits for at most `timeout` seconds, without polling, and then raises QueueEmpty. The queues may be of several
    stores, opened or connected. `task.message.topic` is that of the queue. Queues that were shut down and are empty are
    left out. Raises QueueShutDown if none remains, ConfigError for no queue, and the errors of `Queue.get`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     high, low = store.queue("high"), store.queue("low")
    ...     receipts = low.put(b"newsletter"), high.put(b"password reset")
    ...     [mqstore.get_any([high, low], timeout=1).value for _ in range(2)]
    [b'password reset', b'newsletter']
    """
    every = AnyOf(queues_of(queues, Queue))
    end = math.inf if timeout is None else time.monotonic() + seconds(timeout, "timeout")
    try:
        while (found := every.look()) is None:
            if time.monotonic() >= end:
                raise every.empty()
            bell = Bell()
            every.park(bell.ring)
            bell.wait(end - time.monotonic())
        return found[1]
    finally:
        every.cancel()
