"""Methods that the asyncio classes only forward. `make docs` writes this file (`mqstore_tools/forwards.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

from mqstore import queue, store
from mqstore.aio.made import Pages
from mqstore.aio.puts import Puts
from mqstore.aio.twin import Twin, owned
from mqstore.broker import deadletters
from mqstore.broker.deadletters import Replay
from mqstore.broker.road import SendOptions
from mqstore.client import delivery, producer, pullconsumer, pushconsumer, simpleconsumer
from mqstore.client.consumerstats import ConsumerStats
from mqstore.client.groupsettings import Start
from mqstore.client.preparing import Selector
from mqstore.client.pullconsumer import Told
from mqstore.client.simpleconsumer import PendingInfo
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.log.outgoing import Body, OutgoingMessage
from mqstore.log.recovery.report import Finding, RecoveryReport
from mqstore.log.snapshot.take import SnapshotReport
from mqstore.log.stats import StoreStats
from mqstore.options import Durability, Duration

StoreT = TypeVar("StoreT", bound="store.Store")
QueueT = TypeVar("QueueT", bound="queue.Queue")
TaskT = TypeVar("TaskT", bound="queue.Task")
ProducerT = TypeVar("ProducerT", bound="producer.Producer")
SimpleConsumerT = TypeVar("SimpleConsumerT", bound="simpleconsumer.SimpleConsumer")
PullConsumerT = TypeVar("PullConsumerT", bound="pullconsumer.PullConsumer")
PushConsumerT = TypeVar("PushConsumerT", bound="pushconsumer.PushConsumer")
LeaseT = TypeVar("LeaseT", bound="delivery.Lease")
DeliveryT = TypeVar("DeliveryT", bound="delivery.Delivery")
DeadLettersT = TypeVar("DeadLettersT", bound="deadletters.DeadLetters")


class StoreForwards(Twin[StoreT]):
    """Methods and properties that `Store` only forwards.
    Methods run on the store's thread unless they say otherwise. A cancelled call has not begun, or runs to its end."""

    __slots__ = ()
    _puts: Puts

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self.sync.path

    @property
    def mode(self) -> str:
        """ "rw" or "r"."""
        return self.sync.mode

    @property
    def recovery(self) -> RecoveryReport:
        """Report of the opening: how the store was closed, what was cut and rebuilt."""
        return self.sync.recovery

    async def create_topic(self, name: str, *, queues: int = 4, exist_ok: bool = True) -> None:
        """Create a topic. An existing topic is left unchanged, and a different number of queues is logged.
        Raises ConfigError for an existing topic without `exist_ok`, InvalidMessageError for a bad name."""
        return await self._call(self.sync.create_topic, name, queues=queues, exist_ok=exist_ok)

    async def topics(self, *, system: bool = False) -> list[str]:
        """Return the topic names, sorted. System topics are included only if `system` is true.
        In mode "r" only topics with a message are included."""
        return await self._call(self.sync.topics, system=system)

    async def queues(self, topic: str) -> list[QueueRef]:
        """Return the queues of a topic. Raises TopicNotFoundError."""
        return await self._call(self.sync.queues, topic)

    async def recall(self, recall_handle: str) -> bool:
        """Cancel a message that was put with `delay` or `deliver_at`. Return True if it was still waiting."""
        return await self._call(self.sync.recall, recall_handle)

    async def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        *,
        max_bytes: int | None = None,
        tags: str | None = "*",
    ) -> list[Message]:
        """Return the messages of a queue from `offset` on, or [] at the end.

        The list has at most `max_messages` messages, while `iter` yields all. `tags` is an expression such as "paid ||
        refunded". Unreadable messages are skipped, and each damaged file is logged once at level ERROR.

        Raises TopicNotFoundError, OffsetOutOfRangeError (with the bounds), and FilterError.
        """
        return await self._call(self.sync.read, topic, queue_id, offset, max_messages, max_bytes=max_bytes, tags=tags)

    async def to_arrow(
        self,
        topic: str,
        queue_id: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        start: datetime | int | None = None,
        stop: datetime | int | None = None,
        tags: str | None = "*",
        on_corrupt: Literal["fail", "skip", "keep"] = "fail",
    ) -> Any:
        """Return the messages of a queue, or of a topic queue by queue, as a `pyarrow.Table`.
        It is for pandas, DuckDB, Polars, or Parquet. Rows and columns are those of `spark.read.format("mqstore")`
        (`docs/spark-options.md`). Other columns than the requested ones are not decoded.

        `start` and `stop` (exclusive) are store times, or with `queue_id` offsets. None stands for no limit. At a
        damaged message, `on_corrupt` "fail" raises CorruptStoreError, "skip" leaves the message out, and "keep" adds a
        row whose `error` describes it. Raises TopicNotFoundError, ConfigError, and FilterError; without pyarrow
        ImportError.
        """
        return await self._call(
            self.sync.to_arrow,
            topic,
            queue_id,
            owned(columns),
            start=start,
            stop=stop,
            tags=tags,
            on_corrupt=on_corrupt,
        )

    async def find(
        self,
        topic: str,
        *,
        key: str | None = None,
        unique_key: str | None = None,
        start: datetime | None = None,
        stop: datetime | None = None,
        limit: int = 32,
    ) -> list[Message]:
        """Return the messages with a key, or a unique key, stored between two times, newest first."""
        return await self._call(
            self.sync.find, topic, key=key, unique_key=unique_key, start=start, stop=stop, limit=limit
        )

    async def get(self, message_id: str) -> Message:
        """Return the message with that id. Raises LookupError if gone, InvalidMessageError for a bad id."""
        return await self._call(self.sync.get, message_id)

    async def offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return (offset of the first message, offset of the next one to come)."""
        return await self._call(self.sync.offsets, topic, queue_id)

    async def offset_at(self, topic: str, queue_id: int, when: datetime) -> int:
        """Return the offset of the first message stored at or after `when`, or the end if there is none."""
        return await self._call(self.sync.offset_at, topic, queue_id, when)

    async def committed(self, group: str, queue: QueueRef) -> int | None:
        """Return the group's committed offset in a queue, or None if there is none."""
        return await self._call(self.sync.committed, group, owned(queue))

    async def commit_offset(
        self, group: str, queue: QueueRef, offset: int, *, durability: Durability | None = None
    ) -> None:
        """Note that the group has consumed everything below `offset`. Raises OffsetOutOfRangeError.
        It is on disk when this returns with "flush", else within `commit_interval`."""
        return await self._call(self.sync.commit_offset, group, owned(queue), offset, durability=durability)

    async def lag(self, group: str) -> dict[QueueRef, int]:
        """Return the number of unconsumed messages of the group in each queue that it has started.
        Raises GroupNotFoundError for an unknown group."""
        return await self._call(self.sync.lag, group)

    async def stats(self) -> StoreStats:
        """Return statistics of the log: puts, bytes, latencies, lags, errors.
        For delivery call `store.broker.stats()`."""
        return await self._call(self.sync.stats)

    async def flush(self) -> None:
        """Return once everything put before is on disk."""
        return await self._call(self.sync.flush)

    async def put_many(
        self,
        /,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        *,
        queue_id: int | None = None,
        durability: Durability | None = None,
        **options: object,
    ) -> Sequence[SendReceipt]:
        """Append many messages to one queue, with one wait for the disk. Raises what `put` raises.
        With `queue_id` None queues take turns. A kill leaves the first messages of a call, from none to all: give them
        unique keys, and put again what `find` does not find. Other options are those of an `OutgoingMessage`. For a
        delay or message group use `Producer.send_many`.

        Stores messages in the order of the calls. If cancelled, it has not begun, or runs to its end.
        """
        self._check()
        return await self._puts.in_order(
            partial(
                self.sync.put_many,
                topic,
                owned(bodies),
                queue_id=queue_id,
                durability=durability,
                **{name: owned(value) for name, value in options.items()},
            )
        )

    def verify(self) -> AsyncIterator[Finding]:
        """Check every record, unit and index entry, without changes (format#damage).

        For `async for`. Other calls of this store wait while a page is read.
        """
        return Pages(self._bridge, self.sync.verify)

    async def snapshot(
        self, target: str | PathLike[str], *, link: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> SnapshotReport:
        """Copy the store as it is now to the folder `target`, while it is in use.
        The folder must be empty or not exist. All progress is saved first. The copy is a cleanly closed store, and was
        read back. `findings` of the report lists its faults, normally none. Leased messages are redelivered in it. With
        `link` closed segments get a second name (hard links), not a copy. It calls `progress(bytes done, of all)`.

        After an error nothing of it is left. Raises ConfigError for an occupied target, StoreLockedError if another
        call writes it, StoreFullError, StoreIOError, and StoreBusyError if topics change all the time.

        Runs on a thread of its own, and calls back there. If cancelled, it runs to its end.
        """
        self._check()
        return await asyncio.to_thread(self.sync.snapshot, target, link=link, progress=progress)


class QueueForwards(Twin[QueueT]):
    """Methods and properties that `Queue` only forwards.
    Methods run on the store's thread unless they say otherwise. A cancelled call has not begun, or runs to its end."""

    __slots__ = ()

    async def qsize(self) -> int:
        """Return the number of items that are ready, leased, or waiting for another attempt.
        Delayed items count once due. Raises StoreClosedError."""
        return await self._call(self.sync.qsize)

    async def empty(self) -> bool:
        """Return True if everything is done."""
        return await self._call(self.sync.empty)

    async def full(self) -> bool:
        """Return True if a `put` would wait."""
        return await self._call(self.sync.full)


class TaskForwards(Twin[TaskT]):
    """Methods and properties that `Task` only forwards."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """Item that was put. Raises FormatError if the queue's codec cannot decode it.
        Inside `with` that is a failed attempt."""
        return self.sync.value


class ProducerForwards(Twin[ProducerT]):
    """Methods and properties that `Producer` only forwards.
    Methods run on the store's thread unless they say otherwise. A cancelled call has not begun, or runs to its end."""

    __slots__ = ()
    _puts: Puts

    async def send_oneway(
        self,
        topic: str,
        body: Body,
        *,
        queue_id: int | None = None,
        selector: Selector | None = None,
        **options: Unpack[SendOptions],
    ) -> None:
        """Store a message that may be lost, as `send` does, but without waiting for the disk or retrying.
        `durability=` can still ask to wait. Only errors of the caller are raised; errors of the engine are logged.

        Stores messages in the order of the calls. If cancelled, it has not begun, or runs to its end.
        """
        self._check()
        return await self._puts.in_order(
            partial(
                self.sync.send_oneway,
                topic,
                owned(body),
                queue_id=queue_id,
                selector=selector,
                **{name: owned(value) for name, value in options.items()},
            )
        )

    async def send_many(
        self,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        *,
        queue_id: int | None = None,
        **options: Unpack[SendOptions],
    ) -> Sequence[SendReceipt]:
        """Store many messages, with one wait for the disk. Return their receipts, in order.

        Options of an `OutgoingMessage` go before those of the call. Messages without delay, message group or
        compression go to one queue, in chunks of about `max_message_size` bytes. Other messages are put one by one.
        Each queue keeps the given order. Nothing is compressed here. All are checked before the first is stored. Raises
        what `send` raises. `error.receipts` are those of the stored messages, the first of the call. A kill may leave
        some, too: see `Store.put_many`.

        Stores messages in the order of the calls. If cancelled, it has not begun, or runs to its end.
        """
        self._check()
        return await self._puts.in_order(
            partial(
                self.sync.send_many,
                topic,
                owned(bodies),
                queue_id=queue_id,
                **{name: owned(value) for name, value in options.items()},
            )
        )

    async def flush(self, timeout: Duration | None = None) -> None:
        """Wait until everything submitted before is stored, with its durability. Nothing lingers.
        Futures have the errors of their messages. Raises FlushTimeoutError after `timeout` seconds, and at once in the
        callback of a future, which would wait for itself. The rest is stored later. Raises StoreClosedError after
        `close`.

        Runs on a thread of its own, and calls back there. If cancelled, it runs to its end.
        """
        self._check()
        return await asyncio.to_thread(self.sync.flush, timeout)

    async def run_once(self, now_ms: int | None = None) -> int | None:
        """Write submitted messages that are due, for a store with its own clock.
        Return when to call again (wall ms), or None for the next `submit`."""
        return await self._call(self.sync.run_once, now_ms)


class SimpleConsumerForwards(Twin[SimpleConsumerT]):
    """Methods and properties that `SimpleConsumer` only forwards.
    Methods run on the store's thread unless they say otherwise. A cancelled call has not begun, or runs to its end."""

    __slots__ = ()

    @property
    def subscriptions(self) -> dict[str, str]:
        """Expressions over tags or properties, by topic."""
        return self.sync.subscriptions

    @property
    def closed(self) -> bool:
        """True if it receives no more."""
        return self.sync.closed

    async def subscribe(self, topic: str, *, tags: str = "*", sql: str | None = None) -> None:
        """Receive from a topic, too. The topic may be created later.
        Messages with one of `tags` ("paid || refunded"; "*" for all), or for which the SQL92 expression over their
        properties holds, are received. The whole group skips the others. A topic that is already subscribed gets the
        new expression. Raises InvalidMessageError for a bad name, FilterError and NotPermittedError. After the first
        `receive`, raises GroupInUseError and SubscriptionConflictError, since members of a group subscribe alike. Then
        nothing has changed."""
        return await self._call(self.sync.subscribe, topic, tags=tags, sql=sql)

    async def unsubscribe(self, topic: str) -> None:
        """Stop receiving from a topic. Received messages may still be settled. Raises as `subscribe` does."""
        return await self._call(self.sync.unsubscribe, topic)

    async def pending(self) -> list[PendingInfo]:
        """Return the messages that members of the group hold unsettled, by topic, queue and offset."""
        return await self._call(self.sync.pending)


class PullConsumerForwards(Twin[PullConsumerT]):
    """Methods and properties that `PullConsumer` only forwards.
    Methods run on the store's thread unless they say otherwise. A cancelled call has not begun, or runs to its end."""

    __slots__ = ()

    async def subscribe(
        self,
        *topics: str,
        tags: str = "*",
        sql: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
    ) -> None:
        """Read a share of the queues of these topics, too. Other members read the other queues.
        The first poll makes the consumer a member of the group. Before that it affects nobody.

        Messages with one of `tags` ("paid || refunded"), or for which the SQL92 expression over their properties holds,
        are returned. The others are skipped, for the whole group. A topic that is already subscribed gets the new
        expression. A topic that does not exist yet is awaited.

        Polls and `close` call `on_assign` with new queues and `on_revoke` with queues that leave. They replace earlier
        ones. `on_assign` may seek, and `on_revoke` may commit the rest, unless the queue was lost. Raises ConfigError
        after `assign` or without a topic, InvalidMessageError for a bad name, FilterError, and NotPermittedError.
        Raises SubscriptionConflictError for a member that is not alone, since all members of a group subscribe alike.
        After an error nothing has changed.
        """
        return await self._call(
            self.sync.subscribe, *topics, tags=tags, sql=sql, on_assign=on_assign, on_revoke=on_revoke
        )

    async def unsubscribe(self, *topics: str) -> None:
        """Stop reading these topics, or all if none is named. The next poll releases their queues.
        Raises what `subscribe` raises."""
        return await self._call(self.sync.unsubscribe, *topics)

    async def assign(self, *queues: QueueRef) -> None:
        """Read these queues and no others, without membership in the group, locks, or rebalancing.
        Other consumers may read them too. Queues that it had already keep their positions.

        Raises ConfigError after `subscribe` or for an unknown queue, TopicNotFoundError, and NotPermittedError. Then
        nothing has changed.
        """
        return await self._call(self.sync.assign, *map(owned, queues))

    async def assignment(self) -> frozenset[QueueRef]:
        """Return the queues that it reads now."""
        return await self._call(self.sync.assignment)

    async def position(self, queue: QueueRef) -> int:
        """Return the offset of the next poll. Raises ConfigError for a queue that is not ours."""
        return await self._call(self.sync.position, owned(queue))

    async def committed(self, queue: QueueRef) -> int | None:
        """Return the group's committed offset in any queue, or None if there is none."""
        return await self._call(self.sync.committed, owned(queue))

    async def commit(
        self, offsets: Mapping[QueueRef, int] | None = None, *, durability: Durability | None = None
    ) -> None:
        """Commit all that polls returned, or everything below `offsets`, those of the next messages.
        With "flush" it is on disk when this returns.

        Raises ConfigError for a queue that is not ours, and OffsetOutOfRangeError. Then nothing is committed. Raises
        NotPermittedError if queues were lost to another member. The others are committed.
        """
        return await self._call(self.sync.commit, owned(offsets), durability=durability)

    async def seek(self, queue: QueueRef, to: int | Start) -> None:
        """Continue at an offset, at "earliest", "latest", or the first message stored at or after a datetime.
        The datetime must be aware. A poll that waits notices it, too. Raises ConfigError for a queue that is not ours
        or a bad place, OffsetOutOfRangeError (with the bounds) for an offset."""
        return await self._call(self.sync.seek, owned(queue), to)

    async def pause(self, *queues: QueueRef) -> None:
        """Stop reading these queues, or all if none is named, until `resume`. They stay this consumer's.
        Raises ConfigError for a queue that is not ours."""
        return await self._call(self.sync.pause, *map(owned, queues))

    async def resume(self, *queues: QueueRef) -> None:
        """Read these queues again, or all if none is named. Raises ConfigError as `pause` does."""
        return await self._call(self.sync.resume, *map(owned, queues))

    async def paused(self) -> frozenset[QueueRef]:
        """Return the queues that are not read until `resume`."""
        return await self._call(self.sync.paused)

    @property
    def closed(self) -> bool:
        """True if it reads no more."""
        return self.sync.closed


class PushConsumerForwards(Twin[PushConsumerT]):
    """Methods and properties that `PushConsumer` only forwards.
    Methods run on the store's thread unless they say otherwise. A cancelled call has not begun, or runs to its end."""

    __slots__ = ()

    async def pause(self, *queues: QueueRef) -> None:
        """Stop fetching from these queues, or from all if none is named. They stay assigned.
        Messages that are here are still handled."""
        return await self._call(self.sync.pause, *map(owned, queues))

    async def resume(self, *queues: QueueRef) -> None:
        """Fetch from these queues again, or from all if none is named."""
        return await self._call(self.sync.resume, *map(owned, queues))

    async def assignment(self) -> frozenset[QueueRef]:
        """Return the queues that are handled here now. In mode "pop" there are none."""
        return await self._call(self.sync.assignment)

    async def seek(self, queue: QueueRef, to: int | Start) -> None:
        """Continue at another offset of an assigned queue. Cached messages and their commits are dropped.
        Raises ConfigError for a queue that is not assigned, and OffsetOutOfRangeError."""
        return await self._call(self.sync.seek, owned(queue), to)

    async def stats(self) -> ConsumerStats:
        """Return a snapshot of the statistics."""
        return await self._call(self.sync.stats)


class LeaseForwards(Twin[LeaseT]):
    """Methods and properties that `Lease` only forwards.
    Methods run on the store's thread unless they say otherwise. A cancelled call has not begun, or runs to its end."""

    __slots__ = ()

    @property
    def message(self) -> Message:
        """Message under the topic it was sent to, with its `attempt`.
        Its `queue` is where it is stored, which can be the group's retry topic."""
        return self.sync.message

    @property
    def attempt(self) -> int:
        """Number of this delivery of its message, from 1."""
        return self.sync.attempt

    @property
    def expires_at(self) -> float:
        return self.sync.expires_at

    @property
    def settled(self) -> bool:
        """True if it was acknowledged, released or rejected by this object."""
        return self.sync.settled

    async def nack(self, delay: Duration | None = None) -> None:
        """Give a failed message back. It is redelivered in `delay` seconds, at most 12 h.
        With None the retry policy decides. After its last attempt the message is a dead letter. Raises
        ReceiptExpiredError as `ack` does, and ConfigError for a bad delay."""
        return await self._call(self.sync.nack, delay)

    async def extend(self, visibility: Duration) -> None:
        """Make the lease end `visibility` seconds from now, at most 12 h, sooner or later than before.
        Raises ReceiptExpiredError as `ack` does and after settling, and ConfigError for bad seconds."""
        return await self._call(self.sync.extend, visibility)

    async def reject(self, reason: str = "") -> None:
        """Dead-letter the message with the reason. Raises ReceiptExpiredError as `ack` does."""
        return await self._call(self.sync.reject, reason)


class DeliveryForwards(Twin[DeliveryT]):
    """Methods and properties that `Delivery` only forwards."""

    __slots__ = ()

    @property
    def receipt(self) -> str:
        """Receipt handle for `Broker.ack` and similar methods, to settle the message from elsewhere."""
        return self.sync.receipt

    @property
    def received_at(self) -> float:
        return self.sync.received_at


class DeadLettersForwards(Twin[DeadLettersT]):
    """Methods and properties that `DeadLetters` only forwards.
    Methods run on the store's thread unless they say otherwise. A cancelled call has not begun, or runs to its end."""

    __slots__ = ()

    def select(
        self,
        *,
        offsets: Iterable[int] | None = None,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: Callable[[Message], bool] | None = None,
    ) -> AsyncIterator[Message]:
        """Yield the chosen letters, oldest first. They are read as they are consumed.
        Chosen are letters among `offsets` that were stored in [start_ms, stop_ms), and for which the function
        `where` returns True. Raises ConfigError for an invalid offset.

        For `async for`. Other calls of this store wait while a page is read.
        """
        return Pages(
            self._bridge,
            partial(self.sync.select, offsets=owned(offsets), start_ms=start_ms, stop_ms=stop_ms, where=where),
        )

    async def replay(
        self,
        offsets: Iterable[int | Message] | None = None,
        *,
        all_groups: bool = False,
        to_topic: str | None = None,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: Callable[[Message], bool] | None = None,
        dry_run: bool = False,
    ) -> Replay:
        """Send letters again to this group only, as new: attempt 1, no trace of retries, the same unique key.

        With `all_groups` each goes to the topic it came from, for every group that consumes it. With `to_topic` all go
        to that topic. Letters are chosen as by `select`, without those that become dead letters meanwhile. A letter
        that was sent again is no longer listed, and no later replay sends it.

        At least once: the copies are on disk before the letters are removed. The replay stops at the first letter that
        cannot be sent, after all before it were sent and removed. It then raises GroupNotFoundError, NotPermittedError,
        TopicNotFoundError, InvalidMessageError, or what a put raises. `dry_run` writes nothing, and raises the same for
        topics that cannot be sent to.
        """
        return await self._call(
            self.sync.replay,
            owned(offsets),
            all_groups=all_groups,
            to_topic=to_topic,
            start_ms=start_ms,
            stop_ms=stop_ms,
            where=where,
            dry_run=dry_run,
        )

    async def purge(
        self, *, before_offset: int | None = None, before_ms: int | None = None, dry_run: bool = False
    ) -> int:
        """Remove all letters, or those below `before_offset`, or stored before `before_ms`. Return how many.
        The change is on disk when it returns. Space is freed when retention deletes the segments. `dry_run` only
        counts."""
        return await self._call(self.sync.purge, before_offset=before_offset, before_ms=before_ms, dry_run=dry_run)
