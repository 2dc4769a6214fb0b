"""Waiting for the first item of several queues (clients#get-any)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from mqstore.client.codecs import T
from mqstore.client.task import Task
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


def get_any(queues: Iterable[Queue[T]], timeout: Duration | None = None) -> Task[T]:
    """Return the next item of the first of `queues` that has one, leased as by `Queue.get`.

    It waits for at most `timeout` seconds, without polling, and then raises QueueEmpty. The queues may be of several
    stores, opened or connected. `task.message.topic` is that of the queue. Queues that were shut down and are empty are
    left out. Raises QueueShutDown once that are all of them, ConfigError for no queue, and the errors of `Queue.get`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     high, low = store.queue("high"), store.queue("low")
    ...     receipts = low.put(b"newsletter"), high.put(b"password reset")
    ...     [mqstore.get_any([high, low], timeout=1).value for _ in range(2)]
    [b'password reset', b'newsletter']
    """
    left = queues_of(queues, Queue)
    end = math.inf if timeout is None else time.monotonic() + seconds(timeout, "timeout")
    waits: dict[Queue[T], Wait] = {}
    try:
        while True:
            for queue in tuple(left):
                try:
                    task = queue.get(block=False)
                except QueueEmpty:
                    task = None
                except QueueShutDown:
                    left.remove(queue)
                    if not left:
                        raise
                    continue
                waits.pop(queue, None)  # the look has used its turn
                if task is not None:
                    return task
            if time.monotonic() >= end:
                raise QueueEmpty(f"nothing to get from {', '.join(repr(queue.name) for queue in left)}")
            bell = Bell()
            for queue in left:
                waits[queue] = queue._when_ready(bell.ring)
            bell.wait(None if end == math.inf else end - time.monotonic())
            for wait in waits.values():
                wait.end()  # before the look, so that each turn is used by it or passed on
    finally:
        for wait in waits.values():
            wait.cancel()
