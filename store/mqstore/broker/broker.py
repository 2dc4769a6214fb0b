# ruff: noqa: A002  (`filter` is the word of the engine contract, clients#contract)
"""The broker: the door of delivery, with one method for each operation of clients.

Clients use only these operations (clients#contract). Arguments and results are plain values that a socket could carry:
times are integer milliseconds, receipts are strings. Only `wait` and a `pop` with `poll` block.

    put ---> road ---> log ---> dispatcher ---> waiters ---> read, pop
              ^                     |
              +---- delay, timer, retry, revive, transactions (housekeeper: run_once)

One thread, the housekeeper, drives every mechanism. A store with its own clock has no thread: call `run_once`.

The module is long because it has the whole contract of clients. A method checks its arguments and calls a mechanism.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar, Unpack

from mqstore.broker.admin.metrics import Metrics
from mqstore.broker.admin.statistics import StatisticsSnapshot
from mqstore.broker.begun import Begun
from mqstore.broker.deadletters import DeadLetterExpiry, DeadLetters
from mqstore.broker.delay.levels import DelayService
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.filters import Filter, as_filter, parse_filter
from mqstore.broker.groups import GroupTable
from mqstore.broker.localoffsets import clients_of, refuse_clients
from mqstore.broker.locks import QueueLocks
from mqstore.broker.mechanism import Housekeeper, Mechanism, Pin
from mqstore.broker.members import Members, Mode
from mqstore.broker.names import QueueKey, check_user_topic
from mqstore.broker.offsets import OffsetTable
from mqstore.broker.parts import Parts, delete_group, open_parts
from mqstore.broker.pop.orderinfo import Suspended
from mqstore.broker.pop.service import Delivery, PopService
from mqstore.broker.reading import Loss, ReadResult, Reads
from mqstore.broker.retention import RetentionService
from mqstore.broker.retry import Retries
from mqstore.broker.road import AsyncPuts, SendOptions
from mqstore.broker.topics import QUEUES_MAX, TopicTable
from mqstore.broker.transactions import Transactions
from mqstore.broker.waiting import Callback, Waiter, Waiters
from mqstore.closing import Closing
from mqstore.errors import (
    ConfigError,
    GroupInUseError,
    GroupNotFoundError,
    NotPermittedError,
    OffsetOutOfRangeError,
    ReadOnlyStoreError,
    StoreClosedError,
)
from mqstore.files.lock import refusal_to_reader
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.outgoing import Body, OutgoingMessage
from mqstore.log.stats import StoreStats
from mqstore.log.store import MessageStore
from mqstore.log.writer import Sending, compiled_put
from mqstore.options import Durability, Duration, milliseconds, seconds
from mqstore.signalsafe import check_holds_none

__all__ = ["Broker"]

_log = logging.getLogger("mqstore")

Result = TypeVar("Result")
Start = Literal["earliest", "latest"] | datetime


@dataclass(frozen=True, slots=True)
class BrokerStats:
    """Snapshot of all counters of a broker."""

    store: StoreStats
    counters: StatisticsSnapshot
    delay_levels: dict[int, tuple[int, int]]
    """(next queue offset to look at, end of the queue) of each level that was ever used."""
    delay_overdue_ms: dict[int, int]
    """For how long the oldest message of a level is overdue, if one is."""
    timer_waiting: int
    """Number of messages that wait for a moment of any delay."""
    in_flight: int
    """Number of messages popped and not settled."""
    open_transactions: int
    oldest_pin: Pin | None
    """Pin that keeps the front of the log, or None."""
    errors: dict[str, str]
    """Error of each mechanism that failed in its last run."""


class Broker(Closing, Sending):
    """Delivery on a store that is open for writing. Closing the broker closes the store.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Broker(mqstore.engine.MessageStore(folder)) as broker:
    ...     receipt = broker.put("orders", b"hello")
    ...     [delivery] = broker.pop("billing", "orders")
    ...     broker.ack("billing", "orders", [delivery.receipt])
    ...     delivery.message.body, delivery.attempt, broker.pop("billing", "orders")
    (b'hello', 1, [])
    """

    def __init__(self, store: MessageStore) -> None:
        if store.mode != "rw":
            raise ReadOnlyStoreError(refusal_to_reader(store.path, store.fs))
        if store.room.bound is not None:
            raise ConfigError(f"{store.path} has a broker already: two would deliver everything twice")
        store.room.bound = lambda policy: 0  # nothing is deleted before it is known what consumers need
        self.store = store
        self._closed = False
        self._housekeeper = Housekeeper(str(store.path), store.clock)
        try:
            self._open(store)
        except BaseException:  # the broker owns the store, and with it the lock of its directory
            self._housekeeper.stop(0)
            store.close()
            raise

    def _open(self, store: MessageStore) -> None:
        self._parts: Parts = open_parts(store)
        parts = self._parts
        self.topics: TopicTable = parts.topics
        self.groups: GroupTable = parts.groups
        self.offsets: OffsetTable = parts.offsets
        self._clock = parts.clock
        self.locks = QueueLocks(parts.clock, self._check_open)
        """Leases on queues for orderly consumers: `try_lock_batch`, `unlock_batch`."""
        self.members = Members(self._may_join, parts.groups)
        """Registry of members: `register`, `unregister`, `members`, `on_change`.
        A member may unregister after the store was closed."""
        self._retries = Retries(parts)
        self._reads = Reads(parts)
        self._async_puts = AsyncPuts(store)
        wake = self._housekeeper.waker
        self.offsets.wake = wake("offsets")
        self._waiters = Waiters(parts, wake("waiters"))
        self._delay = DelayService(parts, wake("delay"), self._retries.dead_letter)
        self._timer = TimerService(parts, wake("timer"))
        self.begun = Begun(parts)
        """Notes of the messages that handlers have begun, in this process and the one before."""
        self._pop = PopService(
            parts, wake("pop"), self._waiters, self._reads, self._retries.dead_letter, begun=self.begun
        )
        # Not methods: a call between costs as much as some of the work.
        self._pop_at_once = self._pop.pop_at_once
        self._ack_at_once = self._pop.ack_at_once
        self.transactions = Transactions(parts, wake("transactions"))
        """Half messages: `begin`, `end`, `on_check`."""
        keepers: dict[str, Mechanism] = {
            "offsets": parts.offsets,
            "waiters": self._waiters,
            "delay": self._delay,
            "timer": self._timer,
            "pop": self._pop,
            "transactions": self.transactions,
            "dead letters": DeadLetterExpiry(parts, wake("dead letters")),
        }
        self._retention = RetentionService(parts, [*keepers.values()], rollers=(self._delay, self._timer))
        pop, delay, timer = self._pop, self._delay, self._timer
        self._metrics = Metrics(
            parts, reads=self._reads, pop=pop, delay=delay, timer=timer, transactions=self.transactions
        )
        # In this order they run. In the opposite order they are saved: offsets last, since the others change them.
        for name, mechanism in {**keepers, "retention": self._retention, "statistics": self._metrics}.items():
            self._housekeeper.add(name, mechanism)
        store._enter_topics_by(self._enter_topics)
        self.topics.on_change.append(self._topic_changed)
        self.groups.on_change.append(self._waiters.wake_group)  # after pop's callback, which drops the group's state
        store.closer = self.close
        self._sender = parts.road._sender
        # First: nothing is delivered or counted before the messages that an ended process held are back.
        self._housekeeper.run("pop")
        if store.config.clock is None:
            self._housekeeper.start()
        store.room.settle = lambda: self._housekeeper.soon(self._save)
        store.room.start()

    def _topic_changed(self, topic: str) -> None:
        if (config := self.topics.get(topic)) is None:
            self._metrics.forget(topic=topic)
        if config is None or not config.readable:
            self._waiters.wake_all(topic)  # a waiter then finds that it is gone or not readable, and raises

    def _enter_topics(self, wanted: Mapping[str, int]) -> None:
        """Create the topics of a staged batch that Spark left in the store's inbox, unless they exist."""
        for name, queues in wanted.items():
            check_user_topic(name)
            if queues > QUEUES_MAX:
                raise ConfigError(f"topic {name!r} cannot have {queues} queues; the limit is {QUEUES_MAX}")
        for name, queues in wanted.items():
            self.topics.ensure(name, queues)

    # -- in ---------------------------------------------------------------------------------------------------------

    @compiled_put
    def put(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> SendReceipt:
        """Append one message as `Road.put` does."""
        return self._parts.road.put(topic, body, queue_id=queue_id, **options)

    def put_many(
        self,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        *,
        queue_id: int | None = None,
        durability: Durability | None = None,
        **options: object,
    ) -> Sequence[SendReceipt]:
        """Append many messages to one queue, with one flush wait. `queue_id` None: the next queue in turn.
        Raises what `put` raises. `options` are those of one message: InvalidMessageError says which method takes
        them."""
        return self._parts.road.put_many(topic, bodies, queue_id=queue_id, durability=durability, **options)

    def put_async(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> Future[SendReceipt]:
        """Append one message as `put` does, without waiting for the disk.
        With durability "flush" the future is done at the next sync, which all waiting puts share. Otherwise it is done
        on return. A signal handler may call this at any time. If the message cannot be stored before the handler has
        returned, a thread does it afterwards."""
        synced = (options.get("durability") or self.store.durability) == "flush"
        if synced:
            options["durability"] = "append"
        return self._async_puts.put(lambda: self.put(topic, body, queue_id=queue_id, **options), synced=synced)

    def recall(self, recall_handle: str) -> bool:
        """Cancel a message delayed to a moment. Return True if it was still waiting.
        Raises InvalidReceiptError if `recall_handle` is not a handle."""
        return self._timer.recall(recall_handle)

    # -- out, by offset ---------------------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        *,
        max_bytes: int | None = None,
        filter: Filter | str | None = None,
        group: str | None = None,
    ) -> ReadResult:
        """Return a queue's messages from `offset` on that pass `filter`. Never blocks.
        With `group` its permissions count, a pending reset is applied, and messages lost to retention are counted."""
        return self._reads.read(
            topic, queue_id, offset, max_messages, max_bytes=max_bytes, filter=as_filter(filter), group=group
        )

    def filter(self, expression: str, kind: Literal["TAG", "SQL92"] = "TAG") -> Filter | None:
        """Return the filter for an expression over tags or properties, for `read`, `wait` and `pop`.
        Returns None if all messages pass. Raises FilterError with the position of the mistake."""
        return parse_filter(expression, kind)

    def wait(
        self, topic: str, queue_id: int, offset: int, timeout: Duration, filter: Filter | str | None = None
    ) -> bool:
        """Block until a message at or behind `offset` passes `filter`, or a read would move on.
        Returns False after `timeout` seconds."""
        return self._waiters.wait(topic, queue_id, offset, seconds(timeout, "timeout"), as_filter(filter))

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the first message that still counts, or `max_offset` of an empty queue. Raises
        TopicNotFoundError."""
        self._check_open()
        return self._reads.min_offset(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the next message that will be put. Raises TopicNotFoundError."""
        self._check_open()
        return self._reads.max_offset(topic, queue_id)

    def offset_for_time(
        self, topic: str, queue_id: int, timestamp_ms: int, bound: Literal["lower", "upper"] = "lower"
    ) -> int:
        """Return the offset of the first message stored at or after `timestamp_ms`.
        With bound "upper" it is the last message stored at or before `timestamp_ms`."""
        return self._reads.offset_for_time(topic, queue_id, timestamp_ms, bound)

    def add_waiter(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        callback: Callback,
        *,
        filter: Filter | str | None = None,
        timeout: Duration | None = None,
    ) -> Waiter:
        """Call `callback(worth_a_read)` once, when `wait` would return.
        The dispatching thread calls it, or after the timeout the housekeeper, with False. The callback may only wake
        another thread. It must not block, put or read."""
        return self._waiters.add_waiter(topic, queue_id, offset, as_filter(filter), callback, self._deadline(timeout))

    def add_pop_waiter(
        self,
        group: str,
        topic: str,
        callback: Callback,
        *,
        queue_id: int = -1,
        filter: Filter | str | None = None,
        order: bool = False,
        timeout: Duration | None = None,
    ) -> Waiter:
        """Call `callback(worth_a_pop)` once, when a pop may find a message, under the rules of `add_waiter`.
        Each message wakes one of several waiters."""
        deadline_ms = self._deadline(timeout)
        return self._pop.add_waiter(group, topic, queue_id, as_filter(filter), callback, deadline_ms, order=order)

    def remove_waiter(self, waiter: Waiter) -> bool:
        """Remove a waiter. Return False if its callback has been called, or is about to be."""
        return self._waiters.remove_waiter(waiter)

    def wake_one(self, group: str, topic: str, queue_id: int = -1) -> None:
        """Pass a turn on to another waiting receiver, if the one called back will not pop."""
        self._waiters.wake_one(group, topic, queue_id)

    def _deadline(self, timeout: Duration | None) -> int | None:
        if timeout is None or timeout == math.inf:
            return None
        return self._clock.monotonic_ms() + milliseconds(timeout, "timeout")

    # -- committed offsets ------------------------------------------------------------------------------------------

    def committed(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the group's committed offset, or None if it never committed."""
        self._check_open()
        return self.offsets.committed(QueueKey(group, topic, queue_id))

    def commit(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        durability: Durability | None = None,
        owner: str | None = None,
    ) -> None:
        """Note that the group has consumed everything below `offset`.
        With "flush" it is on disk before this returns. A group that commits reads, so what it has popped from the queue
        ends, and receipts expire. With `owner`, raises NotPermittedError if another client holds the queue's lock.
        Raises OffsetOutOfRangeError for an offset or a queue that does not exist."""
        self._check_open()
        self.groups.need(group)
        config = self.topics.need(topic)
        end = (self.store.offsets_or_none(topic, queue_id) or (0, 0))[1]
        if not 0 <= queue_id < max(config.read_queues, config.write_queues) or not 0 <= offset <= end:
            raise OffsetOutOfRangeError(f"offset {offset} of {topic}/{queue_id} does not lie in 0..{end}", 0, end)
        if owner is not None and self.locks.owner(group, QueueRef(topic, queue_id)) not in (owner, None):
            raise NotPermittedError(f"queue {queue_id} of {topic!r} is locked for another member of {group!r}")
        key = QueueKey(group, topic, queue_id)
        self._pop.end(key)
        self.offsets.commit(key, offset, durability=durability)

    def start_of(self, group: str, topic: str, queue_id: int, start: Start | None = None) -> int:
        """Return the group's committed offset, or commit and return the offset where it begins.
        `start` decides where a group begins that never committed; None: the group's configuration does."""
        self._check_open()
        return self._reads.first_position(QueueKey(group, topic, queue_id), start)

    def reset(self, group: str, topic: str, queue_id: int | None, to: int | Start) -> dict[QueueRef, int]:
        """Move the group's committed offset in one queue or all of a topic. Return the offsets set.
        `to` is an offset, a time, "earliest" or "latest". Later commits of earlier reads are dropped until the group
        has read or popped from there. The change is on disk when this returns. If saving fails (see `OffsetTable.save`)
        this raises, and the reset counts until a crash. Raises ConfigError for a group that broadcasts."""
        self._check_open()
        self.members.check_clustering(group)
        offsets = self._reads.reset(group, topic, queue_id, to, on_reset=self._pop.reset)
        self._waiters.wake_all(topic)
        self._parts.offsets.save()
        return offsets

    def lag(self, group: str) -> dict[QueueRef, int]:
        """Return the number of messages of each queue that the group has not consumed.
        Messages in flight and retries count, also retries that wait. A queue in which the group has not started is left
        out. Raises GroupNotFoundError for a group without settings and committed offsets, whose lag is not known, and
        ConfigError for one that broadcasts."""
        self._check_open()
        self.members.check_clustering(group)
        if not (lags := self._metrics.lag(group)):
            if self.groups.get(group) is None:
                raise GroupNotFoundError(
                    f"{self.store.path} has no group {group!r}: no settings, no progress, so its lag is not known"
                )
            refuse_clients(group, clients_of(self.store, group))
        return {QueueRef(*queue): messages for queue, messages in lags.items()}

    def delete_group(self, group: str) -> None:
        """Forget a group: its settings, committed offsets and deliveries in flight. Dead letters stay.
        Raises GroupInUseError while it has members, GroupNotFoundError for an unknown group."""
        self._check_open()
        if members := self.members.members(group):
            raise GroupInUseError(f"group {group!r} has members: {', '.join(members[:10])}; let them leave first")
        delete_group(self._parts, group)
        self.locks.forget(group)
        self._metrics.forget(group=group)

    def attempts(self, group: str, topic: str, queue_id: int) -> dict[int, int]:
        """Return the failed attempts of an orderly group, by offset."""
        self._check_open()
        return self._pop.attempts(QueueKey(group, topic, queue_id))

    def note_attempt(
        self, group: str, topic: str, queue_id: int, offset: int, attempts: int, *, error: str = ""
    ) -> None:
        """Note the number of failed attempts of an orderly group at a message, and the last error.
        It is on disk within a second."""
        self._check_open()
        self._pop.note_attempt(QueueKey(group, topic, queue_id), offset, attempts, error)

    def suspended(self, group: str) -> dict[QueueRef, Suspended]:
        """Return the queues of an ordered group that a failed message blocks.
        A queue is listed from the first failure of its message until that message is settled, also while the next
        attempt runs. The group may pop with `order=True` or have ordered push consumers."""
        self._check_open()
        return {QueueRef(*queue): suspended for queue, suspended in self._pop.suspended(group).items()}

    # -- out, by receipt --------------------------------------------------------------------------------------------

    def pop(
        self,
        group: str,
        topic: str,
        n: int = 1,
        *,
        queue_id: int = -1,
        invisible: Duration = 60,
        poll: Duration = 0,
        filter: Filter | str | None = None,
        order: bool = False,
        start: Start | None = None,
        attempt_id: str | None = None,
        local: bool = True,
        durability: Durability | None = None,
        skip_acked: bool = False,
    ) -> list[Delivery]:
        """Deliver up to `n` (at most 32) messages, each invisible to the group for `invisible` seconds.
        A message is redelivered unless it is acknowledged by then. With `order`, nothing behind an unsettled message of
        its queue is delivered. That message is redelivered with all later ones of its batch, or with `skip_acked` only
        with those that were not acknowledged. Waits up to `poll` seconds for a first message."""
        chosen = None if filter is None else as_filter(filter)
        invisible_ms = milliseconds(invisible, "invisible")
        poll_s = 0.0
        if poll:
            self._check_open()
            poll_s = seconds(poll, "poll")
        found = self._pop.pop(
            group,
            topic,
            queue_id,
            n,
            invisible_ms,
            poll_s,
            chosen,
            order,
            start,
            attempt_id,
            local,
            durability,
            skip_acked,
        )
        if not found:  # in a forked child a drained queue looks empty for ever
            self._check_open()
        return found

    def ack(self, group: str, topic: str, receipts: Sequence[str], *, durability: Durability | None = None) -> None:
        """Acknowledge deliveries. Settling one again is harmless.
        Raises ReceiptExpiredError for a message that was redelivered, InvalidReceiptError for a receipt that is not one
        of this group and topic."""
        self._pop.ack(group, topic, receipts, durability)

    def change_invisible(
        self, group: str, topic: str, receipt: str, invisible: Duration, *, durability: Durability | None = None
    ) -> str:
        """Make a delivery visible in `invisible` seconds from now. Return its new receipt."""
        return self._pop.change_invisible(group, topic, receipt, milliseconds(invisible, "invisible"), durability)

    def renew(
        self, group: str, topic: str, receipt: str, invisible: Duration, *, durability: Durability | None = None
    ) -> str:
        """Extend a delivery that is still being handled. The receipt stays valid, and is returned."""
        return self._pop.renew(group, topic, receipt, milliseconds(invisible, "invisible"), durability)

    def nack(
        self,
        group: str,
        topic: str,
        receipt: str,
        delay: Duration | None = None,
        *,
        error: str = "",
        durability: Durability | None = None,
    ) -> str | None:
        """Settle a delivery as failed: it is redelivered after `delay`.
        `delay` None uses the group's retry policy. `error` is shown by `suspended` for a queue that is popped in
        order."""
        delay_ms = None if delay is None else milliseconds(delay, "delay")
        return self._pop.nack(group, topic, receipt, delay_ms, durability, error=error)

    def release(self, group: str, topic: str, receipts: Sequence[str], *, durability: Durability | None = None) -> None:
        """Release unseen deliveries: they are redelivered at once, and the attempt does not count."""
        self._pop.release(group, topic, receipts, durability)

    def dead_letter(
        self, group: str, topic: str, receipt: str, reason: str, *, durability: Durability | None = None
    ) -> None:
        """Move a delivery to the group's dead letters and settle it."""
        self._pop.dead_letter(group, topic, receipt, reason, durability)

    def take_losses(self, group: str) -> tuple[Loss, ...]:
        """Return the messages that the group, by popping, has lost since the last call.
        Retention removed them before they were popped or settled. Each loss is returned once, to the first caller. A
        consumer with an interceptor for `on_offset_reset` calls this itself. `stats().counters.lost` is the sum. A
        reader finds its losses in the result of `read`."""
        return self._reads.take_losses(group)

    def pending(self, group: str) -> list[Any]:
        """Return the group's deliveries in flight, by topic, queue and offset."""
        self._check_open()
        return self._pop.pending(group)

    # -- failures ---------------------------------------------------------------------------------------------------

    def end_pops(self, group: str, topic: str, queue_id: int) -> None:
        """End popping from a queue that the group now reads by offset, with its pop retry topics.
        Messages popped without order and not settled move there, to be delivered at their time. In order they are read
        from the first on. Existing receipts expire. Raises what a put raises."""
        self._check_open()
        self._pop.end(QueueKey(group, topic, queue_id), move=True)

    def pop_retry_topics(self, group: str, topic: str) -> list[str]:
        """Return the names of the topics that hold failed messages of `topic` for a group that pops.
        The topics need not exist. A group that reads has its failed messages of any topic in `%RETRY%group`."""
        return self._pop.retry_topics(group, topic)

    def send_back(
        self,
        group: str,
        physical_offset: int,
        *,
        delay_level: int = 0,
        delay: Duration | None = None,
        max_reconsume: int | None = None,
        attempts: int | None = None,
        reason: str | None = None,
        durability: Durability | None = None,
    ) -> SendReceipt:
        """Redeliver a failed message to this group only, or dead-letter it.
        The delay is `delay`, a level, or with level 0 the group's policy. The message becomes a dead letter if it has
        no attempt left, or `delay_level` is negative. `attempts` is the number of attempts that have ended; None: one
        more than the message's `reconsume_times`."""
        return self._retries.send_back(
            group,
            physical_offset,
            delay_level=delay_level,
            delay_ms=None if delay is None else milliseconds(delay, "delay"),
            max_reconsume=max_reconsume,
            attempts=attempts,
            reason=reason,
            durability=durability,
        )

    def dead_letters(self, group: str) -> DeadLetters:
        """Return the group's dead letters, to list, replay or purge."""
        self._check_open()
        return DeadLetters(self._parts, group)

    # -- statistics -------------------------------------------------------------------------------------------------

    def stats(self) -> BrokerStats:
        """Return a snapshot of all counters. It reads the front of every queue."""
        errors = self._housekeeper.errors | {f"delay level {n}": text for n, text in dict(self._delay.errors).items()}
        store = self.store.stats()  # before its undispatched messages are dispatched
        self._metrics.refresh()
        return BrokerStats(
            store=store,
            counters=self._parts.statistics.snapshot(),
            delay_levels=self._delay.progress(),
            delay_overdue_ms=self._delay.overdue_ms(),
            timer_waiting=self._timer.waiting(),
            in_flight=self._pop.in_flight(),
            open_transactions=self.transactions.open_count(),
            oldest_pin=self._retention.oldest_pin(),
            errors=errors,
        )

    def prometheus(self) -> str:
        """Return counters and gauges for Prometheus (text format 0.0.4).
        It costs as much as `stats`, and a look at every queue that a group has committed offsets in."""
        return self._metrics.prometheus()

    def _check_open(self) -> None:
        """Raise StoreClosedError after closing: a value in memory may be older than what others have saved since."""
        self.store.check_closed()
        if self._closed:
            raise StoreClosedError(f"{self.store.path} is closing; open it again")

    def _may_join(self, group: str, mode: Mode) -> None:
        """Raise if a member may not register: a consumer of this process, or a client of a server."""
        self._check_open()
        if mode.broadcasting and (known := self.groups.get(group)) is not None:
            known.check_broadcast()

    # -- keeping house ----------------------------------------------------------------------------------------------

    def run_once(self, now_ms: int | None = None) -> int | None:
        """Run all due work: dispatch, mechanisms, the store. Return the time of the next run (wall ms).
        For applications that own the clock."""
        now_ms = self._clock.now_ms() if now_ms is None else now_ms
        self.store.dispatch()
        due_ms = self._housekeeper.run_once(now_ms)
        self.store.run_once(self._clock.monotonic_ms())
        self.store.dispatch()
        return due_ms if due_ms is None else self._housekeeper.next_due_ms(now_ms)

    def save(self) -> None:
        """Write to disk everything that `close` would write. Raises what that raises, after saving the rest."""
        self.saved(lambda: None)

    def saved(self, work: Callable[[], Result]) -> Result:
        """Save as `save` does, and return `work()`. No mechanism runs in between, so snapshots have what was saved."""
        self._check_open()
        with self._housekeeper.turn:
            self._save()
            return work()

    def _save(self) -> None:
        if errors := self._housekeeper.persist([*self.members.on_save, self.store.flush]):
            raise errors[0]

    def close(self, timeout: Duration = 30) -> None:
        """Wait for running work, save every table, and close the store.
        Calling it again only closes the store, as `MessageStore.close` does. In a forked child it does nothing. Raises
        StoreBusyError in a signal handler that interrupted a call with a lock."""
        timeout_s = seconds(timeout, "timeout")
        if self._housekeeper.turn.is_inherited:
            return
        check_holds_none()
        try:
            if self._closed:
                return
            self._closed = True
            self._waiters.close()  # first: waiting callers may leave while the rest ends
            self._async_puts.close()
            # A store without its directory cannot be saved, and says so.
            if not self._housekeeper.close(timeout_s, persist=not self.store.is_lost()):
                _log.error("%s: a mechanism is still running after %s s", self.store.path, timeout_s)
        finally:
            self.store.close(timeout)

    def __repr__(self) -> str:
        return f"<Broker on {str(self.store.path)!r}{' closed' if self._closed else ''}>"
