"""Items of a `mqstore.Queue`, as one looks at them without a lease (clients#queue-items)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic

from mqstore.broker.delay.recall import parse_recall_handle
from mqstore.client.items.codecs import Codec, T
from mqstore.contract import BrokerContract, Item, State
from mqstore.errors import InvalidReceiptError
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import KEY_RULE, checked_text
from mqstore.options import check_whole


@dataclass(frozen=True, slots=True)
class QueueItem(Generic[T]):
    """Item that is not done, as of the time of the call. It is not leased by that.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     queue = store.queue("jobs", codec=mqstore.TEXT)
    ...     receipts = queue.put_many(["a.png", "b.png", "c.png"])
    ...     queue.get().nack(delay=60)
    ...     leased = queue.get()
    ...     [(item.value, item.state, item.attempt) for item in queue.items()]
    [('a.png', 'retry', 2), ('b.png', 'leased', 1), ('c.png', 'ready', 1)]
    """

    id: str
    """`id` of the receipt of its put."""
    state: State
    """"ready", "leased", "retry" (it failed and waits for its next attempt), "delayed", or "dead" (a dead letter)."""
    attempt: int
    """Number of its present or next delivery, from 1. Of a dead one the number of its deliveries."""
    until: float | None
    """Time in seconds since the epoch at which the lease ends, or the item becomes ready. None for other states."""
    holder: str
    """Client that leases it: "host@pid" of the process that has the store open, or the name that a client of a server
    gave itself. Empty if it is not known, as after a restart of the server."""
    reason: str
    """Error of the last attempt of a "retry" or "ready" one, or reason of a "dead" one. Empty if none was given."""
    progress: str
    """Text that the holder of the lease has set by `Task.progress`."""
    message: Message = field(repr=False)
    """Stored message, with its keys and properties."""
    _codec: Codec[T] = field(repr=False, compare=False)

    @property
    def value(self) -> T:
        """Item that was put. Raises FormatError if the queue's codec cannot decode it."""
        return self._codec.decode(self.message.body)


class QueueItems(Generic[T]):
    """Base of `Queue`."""

    _broker: BrokerContract
    _topic: str
    _codec: Codec[T]

    def _look_again(self) -> None:
        """Wake those that wait for room or for the end."""
        raise NotImplementedError

    def items(self, state: State | None = None) -> Iterator[QueueItem[T]]:
        """Yield the items that are not done, all or those in one state, without leasing them.

        First those that were delivered before, then the ready ones by offset, the delayed and the dead ones. They are
        read in pages during the iteration: an item that changes its state meanwhile can be yielded twice or not at all.
        The cost does not grow with the number of items that are done. Raises ConfigError for another state."""
        return self._items(state, 256)

    def _items(self, state: State | None, limit: int) -> Iterator[QueueItem[T]]:
        after = None
        while True:
            items, after = self._broker.items.page(self._topic, self._topic, state, after, limit)
            yield from map(self._shown, items)
            if after is None:
                return

    def _shown(self, item: Item) -> QueueItem[T]:
        message, state, attempt, until_ms, holder, reason, progress = item
        until = None if until_ms is None else until_ms / 1000
        names = holder, reason, progress
        return QueueItem(message.unique_key, state, attempt, until, *names, message, self._codec)

    def peek(self, n: int = 1) -> list[QueueItem[T]]:
        """Return the first `n` of `items()`: the oldest that are not done, leased ones included."""
        check_whole("n", n, 1)
        return list(islice(self._items(None, n), n))

    def find(self, key: str) -> list[QueueItem[T]]:
        """Return the items with this key that are not done, and the dead ones, with their states.
        The cost does not grow with the items that are done. Raises InvalidMessageError for a bad key."""
        checked_text(key, "key", " ", KEY_RULE)
        return [self._shown(item) for item in self._broker.items.by_key(self._topic, self._topic, key)]

    def cancel(self, item: SendReceipt | QueueItem[T] | str) -> bool:
        """Remove an item that nobody has: one that is ready, delayed, or waits for its next attempt.
        `item` is the receipt of its put, an item of `find`, `peek` or `items`, or the `id` of either. Returns True if
        nobody will get the item, also after `kill -9`. Returns False if it is leased, done or dead, or becomes ready at
        this very time. Raises InvalidReceiptError for another value, and the errors of `put`."""
        name = item if isinstance(item, str) else getattr(item, "id", None)
        if not isinstance(name, str):
            raise InvalidReceiptError(f"cancel takes the receipt of a put, an item, or its id, not {item!r:.80}")
        handle = getattr(item, "recall_handle", None)
        done = handle is not None and parse_recall_handle(handle).topic == self._topic and self._broker.recall(handle)
        done = done or self._broker.items.cancel(self._topic, self._topic, name)
        if done:
            self._look_again()
        return done

    def counts(self) -> dict[State, int]:
        """Return the number of items in each state, from counters. `qsize()` is that of ready, leased and retry, and
        of those that were given back with a delay.
        A delayed item that was cancelled does not count."""
        self._broker.check_open()
        return self._broker.items.counts(self._topic, self._topic)

    def purge(self, state: State | None = None) -> int:
        """Remove the items in one state, or all but dead letters. Return their number.

        Delayed, leased and retrying items are removed, too. They do not come back, also after `kill -9`, once this has
        returned. Items that are put after the call stay. A worker that holds a purged item can finish: its `ack` is
        harmless, and its other verbs raise ReceiptExpiredError. Items that were put in one of RocketMQ's delay levels
        cannot be cancelled, and stay. Raises ConfigError for another state, and for "ready" in an ordered queue while
        an earlier item is not settled. Raises the errors of `put`."""
        count = self._broker.items.purge(self._topic, self._topic, state)
        self._look_again()
        return count
