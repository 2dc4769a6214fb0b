# ruff: noqa: A002  (`filter` is the word of the engine contract, clients#contract)
"""The broker: who gets which message, when, and what is remembered of it. The door of this room.

Clients use only these operations (clients#contract). Arguments and results are plain values, times
integer milliseconds, receipts strings, so that a socket could carry them. Nothing blocks but `wait` and a `pop` that is
given time to wait.

    put ---> road ---> log ---> dispatcher ---> waiters ---> read, pop
              ^                     |
              +---- delay, timer, retry, revive, transactions (housekeeper: run_once)

One thread, the housekeeper, drives every mechanism. A store with a clock of its own has no thread: call `run_once`.

Long because the whole contract of clients is here: a method checks what it is given and passes it to a mechanism.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Unpack

from mqstore.broker.admin.metrics import Metrics
from mqstore.broker.admin.statistics import StatisticsSnapshot
from mqstore.broker.asyncput import AsyncPuts
from mqstore.broker.begun import Begun
from mqstore.broker.deadletters import DeadLetterExpiry, DeadLetters
from mqstore.broker.delay.levels import DelayService
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.filters import Filter, as_filter, parse_filter
from mqstore.broker.groups import GroupTable
from mqstore.broker.housekeeper import Housekeeper
from mqstore.broker.locks import QueueLocks
from mqstore.broker.members import Members, Mode
from mqstore.broker.names import check_user_topic
from mqstore.broker.offsets import OffsetTable
from mqstore.broker.parts import Mechanism, Parts, Pin, delete_group, open_parts
from mqstore.broker.pop.orderinfo import Suspended
from mqstore.broker.pop.service import Delivery, PopService
from mqstore.broker.reading import Loss, ReadResult, Reads
from mqstore.broker.retention import RetentionService
from mqstore.broker.retry import Retries
from mqstore.broker.road import SendOptions
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
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.outgoing import Body, OutgoingMessage
from mqstore.log.stats import StoreStats
from mqstore.log.store import MessageStore
from mqstore.log.writer import Sending, compiled_put
from mqstore.options import Durability, Duration, milliseconds, seconds

__all__ = ["Broker"]

_log = logging.getLogger("mqstore")

Start = Literal["earliest", "latest"] | datetime


@dataclass(frozen=True, slots=True)
class BrokerStats:
    """A snapshot of everything a broker counts."""

    store: StoreStats
    counters: StatisticsSnapshot
    delay_levels: dict[int, tuple[int, int]]
    """(next queue offset to look at, end of the queue) of each level that was ever used."""
    timer_waiting: int
    """Messages that wait for a moment of their own."""
    in_flight: int
    """Messages popped and not settled."""
    open_transactions: int
    oldest_pin: Pin | None
    """What keeps the front of the log, and for whom."""
    errors: dict[str, str]
    """What stopped a mechanism in its last run."""


class Broker(Closing, Sending):
    """Delivery on a store that is open for writing; closing it closes the store.

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
            raise ReadOnlyStoreError(f"{store.path} was opened for reading; a broker needs mode='rw'")
        if store.retention_bound is not None:
            raise ConfigError(f"{store.path} has a broker already: two would deliver everything twice")
        self.store = store
        self._closed = False
        self._housekeeper = Housekeeper(str(store.path), store.clock)
        try:
            self._open(store)
        except BaseException:  # the store is ours, and with it the lock of its directory
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
        self._locks = QueueLocks(parts.clock, self._check_open)
        self._members = Members(self._may_join, parts.groups)
        self._retries = Retries(parts)
        self._reads = Reads(parts)
        self._async_puts = AsyncPuts(store)
        wake = self._housekeeper.waker
        self.offsets.wake = wake("offsets")
        self._waiters = Waiters(parts, wake("waiters"))
        self._delay = DelayService(parts, wake("delay"), self._retries.dead_letter)
        self._timer = TimerService(parts, wake("timer"))
        self._begun = Begun(parts)
        self._pop = PopService(
            parts, wake("pop"), self._waiters, self._reads, self._retries.dead_letter, begun=self._begun
        )
        self._transactions = Transactions(parts, wake("transactions"))
        keepers: dict[str, Mechanism] = {
            "offsets": parts.offsets,
            "waiters": self._waiters,
            "delay": self._delay,
            "timer": self._timer,
            "pop": self._pop,
            "transactions": self._transactions,
            "dead letters": DeadLetterExpiry(parts, wake("dead letters")),
        }
        self._retention = RetentionService(
            parts, [*keepers.values()], rollers=(self._delay, self._timer), held=self._pop.figures.held
        )
        self._metrics = Metrics(
            parts,
            reads=self._reads,
            pop=self._pop,
            delay=self._delay,
            timer=self._timer,
            transactions=self._transactions,
        )
        self._mechanisms: dict[str, Mechanism] = {
            **keepers,
            "retention": self._retention,
            "statistics": self._metrics,
        }
        for name, mechanism in self._mechanisms.items():
            self._housekeeper.add(name, mechanism.run_once)
        store.enter_topics_by(self._enter_topics)
        self.topics.on_change.append(self._topic_changed)
        self.groups.on_change.append(self._waiters.wake_group)  # behind pop's, which forgets what it knew of the group
        self._sender = parts.road._sender
        if store.config.clock is None:
            self._housekeeper.run("pop")  # what receivers of the process before held is there for who asks first
            self._housekeeper.start()

    def _topic_changed(self, topic: str) -> None:
        config = self.topics.get(topic)
        if config is None or not config.readable:
            self._waiters.wake_all(topic)  # who waits finds that it is gone, or not to be read, and says so

    def _enter_topics(self, wanted: Mapping[str, int]) -> None:
        """Enter the topics of a bundle that Spark has left in the store's inbox, unless they are there."""
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
        """Append one message, as `Road.put` says."""
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
        """Append many messages to one queue (None: whose turn it is), with one flush wait. Errors as of `put`.
        `options` are those of one message: InvalidMessageError says what takes them."""
        return self._parts.road.put_many(topic, bodies, queue_id=queue_id, durability=durability, **options)

    def put_async(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> Future[SendReceipt]:
        """As `put`, never waiting for the disk: with durability "flush" the future is done at the next sync, which all
        that wait share; else it is done on return."""
        synced = (options.get("durability") or self.store.durability) == "flush"
        if synced:
            options["durability"] = "append"
        return self._async_puts.put(lambda: self.put(topic, body, queue_id=queue_id, **options), synced=synced)

    def recall(self, recall_handle: str) -> bool:
        """Cancel a message delayed to a moment; whether it was still waiting. InvalidReceiptError for no handle."""
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
        """What a queue holds from `offset` on, as far as `filter` passes it. Never blocks; with `group` its permissions
        count, a reset is honoured, and what it lost to retention is counted."""
        return self._reads.read(
            topic, queue_id, offset, max_messages, max_bytes=max_bytes, filter=as_filter(filter), group=group
        )

    def filter(self, expression: str, kind: Literal["TAG", "SQL92"] = "TAG") -> Filter | None:
        """What to give `read`, `wait` and `pop` for an expression over tags or properties; None for one that passes
        everything. FilterError points at the place that is wrong."""
        return parse_filter(expression, kind)

    def wait(
        self, topic: str, queue_id: int, offset: int, timeout: Duration, filter: Filter | str | None = None
    ) -> bool:
        """Block until a message at or behind `offset` passes `filter`, or a read would move on; False when `timeout`
        seconds have passed."""
        return self._waiters.wait(topic, queue_id, offset, seconds(timeout, "timeout"), as_filter(filter))

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Offset of the first message that still counts; `max_offset` of an empty queue."""
        self._check_open()
        return self._reads.min_offset(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Offset of the next message to come."""
        self._check_open()
        return self._reads.max_offset(topic, queue_id)

    def offset_for_time(
        self, topic: str, queue_id: int, timestamp_ms: int, bound: Literal["lower", "upper"] = "lower"
    ) -> int:
        """Offset of the first message stored at or after `timestamp_ms` (upper: of the last one not after it)."""
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
        """As `wait`, without a thread: `callback(worth_a_read)` is called once, by whoever dispatches; False: the time
        is over. It wakes another thread and does no more: it must neither block nor put or read anything."""
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
        """Have `callback(worth_a_pop)` called once, as that of `add_waiter`, when a pop may find something. Of several
        that wait one is called for each message."""
        deadline_ms = self._deadline(timeout)
        return self._pop.add_waiter(group, topic, queue_id, as_filter(filter), callback, deadline_ms, order=order)

    def remove_waiter(self, waiter: Waiter) -> bool:
        """Let a waiter go; False: its callback has been called, or is about to be."""
        return self._waiters.remove_waiter(waiter)

    def wake_one(self, group: str, topic: str, queue_id: int = -1) -> None:
        """Let another that waits to pop have the turn of one whose callback was called and who will not pop."""
        self._waiters.wake_one(group, topic, queue_id)

    def _deadline(self, timeout: Duration | None) -> int | None:
        if timeout is None or timeout == math.inf:
            return None
        return self._clock.monotonic_ms() + milliseconds(timeout, "timeout")

    # -- progress ---------------------------------------------------------------------------------------------------

    def committed(self, group: str, topic: str, queue_id: int) -> int | None:
        """Where the group goes on; None: it never committed."""
        self._check_open()
        return self.offsets.committed(group, topic, queue_id)

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
        """Note that the group has consumed everything below `offset`. "flush": on disk before this returns. With
        `owner`, NotPermittedError if another client holds the queue's lock. OffsetOutOfRangeError for an offset or a
        queue that does not exist."""
        self._check_open()
        self.groups.need(group)
        config = self.topics.need(topic)
        end = (self.store.offsets_or_none(topic, queue_id) or (0, 0))[1]
        if not 0 <= queue_id < max(config.read_queues, config.write_queues) or not 0 <= offset <= end:
            raise OffsetOutOfRangeError(f"offset {offset} of {topic}/{queue_id} does not lie in 0..{end}", 0, end)
        if owner is not None and self._locks.owner(group, QueueRef(topic, queue_id)) not in (owner, None):
            raise NotPermittedError(f"queue {queue_id} of {topic!r} is locked for another member of {group!r}")
        self.offsets.commit(group, topic, queue_id, offset, durability=durability)
        if owner is not None:  # a late acknowledgement may have made pop note where the group was
            self._pop.end(group, topic, queue_id)

    def start_of(self, group: str, topic: str, queue_id: int, start: Start | None = None) -> int:
        """Where the group goes on, or begins if it never committed (`start`; None: as the group says); the latter is
        committed at once."""
        self._check_open()
        return self._reads.first_position(group, topic, queue_id, start)

    def reset(self, group: str, topic: str, queue_id: int | None, to: int | Start) -> dict[QueueRef, int]:
        """Let the group go on at an offset, a time, "earliest" or "latest", in one queue or all of a topic; the offsets
        set. Commits of what was read before are dropped until the group has read or popped from there.

        On disk when this returns, for nobody would say it again. When saving fails (as `OffsetTable.save`) this raises,
        and the reset counts all the same, until a crash: it is on disk with the next save."""
        self._check_open()
        offsets = self._reads.reset(group, topic, queue_id, to, on_reset=self._pop.reset)
        self._waiters.wake_all(topic)
        self._parts.offsets.save()
        return offsets

    def lag(self, group: str) -> dict[QueueRef, int]:
        """Messages of each queue that the group has not consumed, those in flight included; its retry topics count.
        A queue in which the group has not started is left out. GroupNotFoundError for a group that has neither settings
        nor progress: how far it is behind is not known."""
        self._check_open()
        lags = self._metrics.lag(group)
        if not lags and self.groups.get(group) is None:
            raise GroupNotFoundError(
                f"{self.store.path} has no group {group!r}: no settings, no progress, so its lag is not known"
            )
        return {QueueRef(*queue): messages for queue, messages in lags.items()}

    def delete_group(self, group: str) -> None:
        """Forget a group: its settings, its progress, what it has in flight; its dead letters stay. GroupInUseError
        while it has members, GroupNotFoundError when nothing is known of it."""
        self._check_open()
        if members := self._members.members(group):
            raise GroupInUseError(f"group {group!r} has members: {', '.join(members[:10])}; let them leave first")
        delete_group(self._parts, group)

    def attempts(self, group: str, topic: str, queue_id: int) -> dict[int, int]:
        """Failed attempts of an orderly group, by offset."""
        self._check_open()
        return self._pop.attempts(group, topic, queue_id)

    @property
    def begun(self) -> Begun:
        """What the handlers of this process begin, and what those of the one before had begun."""
        return self._begun

    def note_attempt(
        self, group: str, topic: str, queue_id: int, offset: int, attempts: int, *, error: str = ""
    ) -> None:
        """Note how often an orderly group has failed at a message, and the error of the last attempt. On disk within a
        second."""
        self._check_open()
        self._pop.note_attempt(group, topic, queue_id, offset, attempts, error)

    def suspended(self, group: str) -> dict[QueueRef, Suspended]:
        """Return the queues that a failed message of an ordered group holds up.

        A queue is listed from the first failure of its message until that message is settled, also while the next
        attempt runs. It does not matter whether the group pops with `order=True` or has ordered push consumers."""
        return {QueueRef(*queue): suspended for queue, suspended in self._pop.suspended(group).items()}

    # -- members and locks ------------------------------------------------------------------------------------------

    @property
    def members(self) -> Members:
        """Who consumes, and what: `register`, `unregister`, `members`, `on_change`. One may leave a closed store."""
        return self._members

    @property
    def locks(self) -> QueueLocks:
        """Leases on queues for orderly consumers: `try_lock_batch`, `unlock_batch`."""
        return self._locks

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
        at_once: bool = False,
    ) -> list[Delivery]:
        """Take up to `n` (at most 32) messages; each is invisible to the group for `invisible` seconds, and comes again
        unless it is acknowledged by then. `order`: nothing behind an unsettled message of its queue is delivered; that
        comes again with all behind it of its batch, with `skip_acked` without those that were acknowledged. Waits up to
        `poll` seconds for a first message.

        `at_once`: if that takes no wait for a lock or the disk, for callers such as an event loop. Else the result is
        empty, and says nothing about what is there."""
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
            at_once,
        )
        if not found:  # in a forked child a queue that was drained looks empty, for ever
            self._check_open()
        return found

    def ack(
        self,
        group: str,
        topic: str,
        receipts: Sequence[str],
        *,
        durability: Durability | None = None,
    ) -> None:
        """Settle deliveries. Again is harmless; ReceiptExpiredError once a message was put up for redelivery,
        InvalidReceiptError for what is no receipt of this group and topic."""
        self._pop.ack(group, topic, receipts, durability)

    def ack_at_once(self, group: str, topic: str, receipts: Sequence[str]) -> bool:
        """Acknowledge without waiting for a lock or the disk, for callers such as an event loop. Return False if it had
        to wait: then call `ack`."""
        return self._pop.ack_at_once(group, topic, receipts)

    def change_invisible(
        self, group: str, topic: str, receipt: str, invisible: Duration, *, durability: Durability | None = None
    ) -> str:
        """Make a delivery visible again in `invisible` seconds from now; the receipt that replaces the given one."""
        return self._pop.change_invisible(group, topic, receipt, milliseconds(invisible, "invisible"), durability)

    def renew(
        self, group: str, topic: str, receipt: str, invisible: Duration, *, durability: Durability | None = None
    ) -> str:
        """As `change_invisible`, for a delivery still being worked on: the receipt stays good, and is returned."""
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
        """Give a delivery back as failed: it comes again after `delay`, None: by the group's retry policy. `error` is
        shown by `suspended`, for a queue that is popped in order."""
        delay_ms = None if delay is None else milliseconds(delay, "delay")
        return self._pop.nack(group, topic, receipt, delay_ms, durability, error=error)

    def release(self, group: str, topic: str, receipts: Sequence[str], *, durability: Durability | None = None) -> None:
        """Give deliveries back unseen: they come again at once, the attempt not counted."""
        self._pop.release(group, topic, receipts, durability)

    def dead_letter(
        self, group: str, topic: str, receipt: str, reason: str, *, durability: Durability | None = None
    ) -> None:
        """Move a delivery to the group's dead letters and settle it."""
        self._pop.dead_letter(group, topic, receipt, reason, durability)

    def take_losses(self, group: str) -> tuple[Loss, ...]:
        """What the group, popping, has lost since somebody last asked: messages that retention took before they were
        popped, or before they were settled. Each is told once, to whoever asks first; a consumer with an interceptor
        for `on_offset_reset` asks by itself. `stats().counters.lost` is the sum. Who reads has it in the result."""
        return self._reads.take_losses(group)

    def pending(self, group: str) -> list[Any]:
        """Deliveries of the group that are in flight."""
        self._check_open()
        return self._pop.pending(group)

    # -- failures ---------------------------------------------------------------------------------------------------

    def end_pops(self, group: str, topic: str, queue_id: int) -> None:
        """The group reads a queue by offset from now on: what it has popped there and not settled it will read, and
        receipts that are out expire. What a put raises."""
        self._check_open()
        self._pop.end(group, topic, queue_id)

    def pop_retry_topics(self, group: str, topic: str) -> list[str]:
        """Return the names of the topics in which a group that pops has its failed messages of `topic`; they need not
        be there. One that reads has them in `%RETRY%group`, be they of any topic."""
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
        """Have a message that failed come again, to this group alone: after `delay`, by level, or (level 0) by the
        group's policy; to its dead letters when its attempts are used up, or `delay_level` is negative. `attempts` is
        the number of attempts that have ended; None: one more than the message's `reconsume_times`."""
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
        """What the group gave up: list, replay, purge."""
        self._check_open()
        return DeadLetters(self._parts, group)

    # -- transactions -----------------------------------------------------------------------------------------------

    @property
    def transactions(self) -> Transactions:
        """Half messages: `begin`, `end`, `on_check`."""
        return self._transactions

    # -- looking at it ----------------------------------------------------------------------------------------------

    def stats(self) -> BrokerStats:
        """A snapshot; takes as long as looking at the front of every queue."""
        levels = {f"delay level {number}": text for number, text in dict(self._delay.errors).items()}
        errors = {**self._housekeeper.errors, **levels}
        store = self.store.stats()  # before what it tells to be behind is dispatched
        self._metrics.refresh()
        return BrokerStats(
            store=store,
            counters=self._parts.statistics.snapshot(),
            delay_levels=self._delay.progress(),
            timer_waiting=self._timer.waiting(),
            in_flight=self._pop.in_flight(),
            open_transactions=self._transactions.open_count(),
            oldest_pin=self._retention.oldest_pin(),
            errors=errors,
        )

    def prometheus(self) -> str:
        """Counters and gauges as Prometheus scrapes them (text format 0.0.4); as `stats`, and a look at every queue
        that a group has progress in."""
        return self._metrics.prometheus()

    def _check_open(self) -> None:
        """For calls that the store does not refuse by itself once it is closed. What is only noted in memory would be
        written by nobody, and what is only read there is not what others have made of it since."""
        if self._closed or self.store.closed:
            raise StoreClosedError(
                f"{self.store.path} was closed (or this process was forked from its owner); open it again"
            )

    def _may_join(self, group: str, mode: Mode) -> None:
        """For who registers, be it a consumer of this process or one that a server stands for."""
        self._check_open()
        known = self.groups.get(group)
        if mode.broadcasting and known is not None:
            known.check_broadcast()

    # -- keeping house ----------------------------------------------------------------------------------------------

    def run_once(self, now_ms: int | None = None) -> int | None:
        """Everything that is due, for who owns the clock: dispatch, mechanisms, the store's own work; when to come
        again (wall ms)."""
        now_ms = self._clock.now_ms() if now_ms is None else now_ms
        self.store.dispatch()
        due_ms = self._housekeeper.run_once(now_ms)
        self.store.run_once(self._clock.monotonic_ms())
        self.store.dispatch()
        return due_ms if due_ms is None else self._housekeeper.next_due_ms(now_ms)

    def save(self) -> None:
        """Write progress and tables now."""
        self.offsets.save()

    def close(self, timeout: Duration = 30) -> None:
        """Let running work end, write every table, and close the store. Calling it again only closes the store, as
        `MessageStore.close` says."""
        timeout_s = seconds(timeout, "timeout")
        try:
            if self._closed:
                return
            self._closed = True
            self._waiters.close()  # first: who is parked may go while the rest ends
            if not self._housekeeper.stop(timeout_s):
                _log.error("%s: a mechanism is still running after %s s", self.store.path, timeout_s)
            self._async_puts.close()
            # Offsets last: what the others write moves them.
            for name, mechanism in reversed(self._mechanisms.items()):
                try:
                    mechanism.close()
                except Exception:  # the store is closed, and the others persist, whatever one of them met
                    _log.exception("%s: %s: not persisted", self.store.path, name)
        finally:
            self.store.close(timeout)

    def __repr__(self) -> str:
        return f"<Broker on {str(self.store.path)!r}{' closed' if self._closed else ''}>"
