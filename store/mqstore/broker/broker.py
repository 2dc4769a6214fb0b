# ruff: noqa: A002  (`filter` is the word of the engine contract, clients#contract)
"""The broker: the engine contract (`contract.py`) on a store of this process.

    put ---> router ---> log ---> dispatcher ---> waiters ---> read, pop
              ^                       |
              +---- delay, timer, retry, redelivery, transactions (housekeeper: run_once)

One thread, the housekeeper, runs every service. A store with its own clock has no thread: call `run_once`.

The module is long because it has the whole contract. A method checks its arguments and calls a service. The contract
documents its operations. The others are administration.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal, TypeVar, Unpack

from mqstore.broker.admin.metrics import Metrics
from mqstore.broker.admin.statistics import StatisticsSnapshot
from mqstore.broker.background.context import Parts, delete_group, open_parts
from mqstore.broker.background.retention import RetentionService
from mqstore.broker.background.service import BackgroundService, Housekeeper, Pin
from mqstore.broker.delay.levels import DelayService
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.items.changes import KeptNames, WritableItems
from mqstore.broker.pop.orderinfo import BlockedQueue
from mqstore.broker.pop.request import Delivery, Pending, PopRequest
from mqstore.broker.pop.service import PopService
from mqstore.broker.reads.filters.filter import Filter, as_filter, parse_filter
from mqstore.broker.reads.reading import Loss, ReadResult, Reads
from mqstore.broker.reads.waiting import Callback, Waiter, Waiters, Wanted
from mqstore.broker.redelivery.attempt_journal import AttemptJournal
from mqstore.broker.redelivery.dead_letters import DeadLetterExpiry, DeadLetters
from mqstore.broker.redelivery.reason import Reason
from mqstore.broker.redelivery.retry import Retries
from mqstore.broker.routing.router import AsyncPuts, SendOptions
from mqstore.broker.tables.groups import GroupTable
from mqstore.broker.tables.localoffsets import LocalOffsets, clients_of, refuse_clients
from mqstore.broker.tables.locks import QueueLocks
from mqstore.broker.tables.members import Members, Mode
from mqstore.broker.tables.names import QueueKey, check_user_topic
from mqstore.broker.tables.offsets import OffsetTable
from mqstore.broker.tables.topics import QUEUES_MAX, TopicTable
from mqstore.broker.transactions.service import Transactions
from mqstore.closing import Closing
from mqstore.contract import BrokerContract, Limits, Start
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
from mqstore.log.message import Message
from mqstore.log.stats import StoreStats
from mqstore.log.store import MessageStore
from mqstore.log.writing.outgoing import Body, OutgoingMessage
from mqstore.log.writing.writer import RecordOptions
from mqstore.logger import log as _log
from mqstore.native import Sending, compiled_put, kernel
from mqstore.options import Durability, Duration, milliseconds, seconds
from mqstore.signalsafe import check_holds_none

Result = TypeVar("Result")


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
    """Number of messages that wait on the timer."""
    in_flight: int
    """Number of messages popped and not settled."""
    open_transactions: int
    oldest_pin: Pin | None
    """Pin that keeps the front of the log, or None."""
    errors: dict[str, str]
    """Error of each mechanism that failed in its last run."""


class Broker(Closing, Sending, BrokerContract):
    """Delivery on a store that is open for writing. Closing the broker closes the store.

    >>> import tempfile
    >>> from mqstore.log.store import MessageStore
    >>> with tempfile.TemporaryDirectory() as folder, Broker(MessageStore(folder)) as broker:
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
        store.room.bound = lambda policy: 0  # nothing is deleted before the needs of consumers are known
        self.store = store
        self.name = str(store.path)
        self.clock = store.clock
        self.is_remote, self.own_clock = False, store.config.clock is not None
        self.limits = Limits(store.manifest.max_message_size, store.config.max_delay)
        self.durability = store.durability
        self.shared = {}
        self.turns = None
        self._closed = False
        self._housekeeper = Housekeeper(self.name, store.clock)
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
        self.locks = QueueLocks(parts.clock, self._check_open)
        self.members = Members(self._may_join, parts.groups)
        self._listeners = {
            "topics": self.topics.on_change,
            "members": self.members.on_change,
            "locks": self.locks.on_release,
            "save": self.members.on_save,
        }
        self._retries = Retries(parts)
        self._reads = Reads(parts)
        self._async_puts = AsyncPuts(store)
        wake = self._housekeeper.waker
        self.offsets.wake = wake("offsets")
        self._waiters = Waiters(parts, wake("waiters"))
        self._delay = DelayService(parts, wake("delay"), self._retries.dead_letter)
        self._timer = TimerService(parts, wake("timer"))
        self.begun = AttemptJournal(parts)
        self._pop = PopService(
            parts, wake("pop"), self._waiters, self._reads, self._retries.dead_letter, begun=self.begun
        )
        # Not methods: a call between costs as much as some of the work.
        at_once = self._pop if kernel is None else self._pop.tables
        self.pop_at_once = at_once.pop_at_once
        self.ack_at_once = at_once.ack_at_once
        self.has_room = store.wakeups.log.has_room
        self.save_offsets = parts.offsets.save
        self._statistics = parts.statistics  # a server shows counters without the cost of `stats`
        self.transactions = Transactions(parts, wake("transactions"))
        keepers: dict[str, BackgroundService] = {
            "offsets": parts.offsets,
            "waiters": self._waiters,
            "delay": self._delay,
            "timer": self._timer,
            "pop": self._pop,
            "transactions": self.transactions,
            "dead letters": DeadLetterExpiry(parts),
        }
        self._retention = RetentionService(
            parts, [*keepers.values(), KeptNames(parts)], rollers=(self._delay, self._timer)
        )
        pop, delay, timer = self._pop, self._delay, self._timer
        self._metrics = Metrics(
            parts, reads=self._reads, pop=pop, delay=delay, timer=timer, transactions=self.transactions
        )
        owner = f"{os.uname().nodename}@{os.getpid()}"
        self.items = WritableItems(parts, pop.tables, timer, delay.progress, self._metrics.waiting.of_topic, owner)
        # In this order they run. In the opposite order they are saved: offsets last, since the others change them.
        for name, mechanism in {**keepers, "retention": self._retention, "statistics": self._metrics}.items():
            self._housekeeper.add(name, mechanism)
        store._enter_topics_by(self._enter_topics)
        self.topics.on_change.append(self._topic_changed)
        self.groups.on_change.append(self._waiters.wake_group)  # after pop's callback, which drops the group's state
        store.closer = self.close
        store.check_open()  # the process may have ended before it could close the broker
        self._router = parts.router
        self._sender = parts.router._sender
        self._append_plain, self._put_packed = parts.router.append_plain, parts.router.put_packed
        # First: nothing is delivered or counted before the messages that an ended process held are back.
        self._housekeeper.run("pop")
        if not self.own_clock:
            self._housekeeper.start()
        store.room.settle = lambda: self._housekeeper.soon(self._save)
        store.room.start()

    closed = property(attrgetter("store.closed"))  # producers look with each message

    def check_open(self) -> None:
        self.store.check_open()

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
        """Append one message as `Router.put` does."""
        return self._router.put(topic, body, queue_id=queue_id, **options)

    def put_many(
        self,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        *,
        queue_id: int | None = None,
        durability: Durability | None = None,
        **options: object,
    ) -> Sequence[SendReceipt]:
        return self._router.put_many(topic, bodies, queue_id=queue_id, durability=durability, **options)

    def put_async(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> Future[SendReceipt]:
        return self._without_wait(partial(self.put, topic, body, queue_id=queue_id), {**options})

    def _append_async(
        self, topic: str, queue_id: int, body: Body, properties: Mapping[str, str], **options: Unpack[RecordOptions]
    ) -> Future[SendReceipt]:
        """Append a record with all its fields, reserved properties included, for a server. The future is that of
        `put_async`. The caller has checked topic and queue. Raises StoreFullError, as a put does."""
        self.store.writer.check_room(len(body))
        return self._without_wait(partial(self._router.append, topic, queue_id, body, properties), {**options})

    def _without_wait(self, put: Callable[..., SendReceipt], options: dict[str, Any]) -> Future[SendReceipt]:
        """Call `put` without its wait for the disk. The future waits instead, for a sync that many puts share."""
        synced = (options.get("durability") or self.store.durability) == "flush"
        if synced:
            options["durability"] = "append"
        return self._async_puts.put(partial(put, **options), synced=synced)

    def sync(self) -> None:
        self._pop.flush()

    def recall(self, recall_handle: str) -> bool:
        return self._timer.recall(recall_handle)

    def message_at(self, receipt: SendReceipt) -> Message:
        return self.store.at(receipt.physical_offset)

    def find(self, topic: str, *, unique_key: str, limit: int = 32) -> list[Message]:
        return self.store.find(topic, unique_key=unique_key, limit=limit)

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
        return self._reads.read(
            topic, queue_id, offset, max_messages, max_bytes=max_bytes, filter=as_filter(filter), group=group
        )

    def filter(self, expression: str, kind: Literal["TAG", "SQL92"] = "TAG") -> Filter | None:
        return parse_filter(expression, kind)

    def wait(
        self, topic: str, queue_id: int, offset: int, timeout: Duration, filter: Filter | str | None = None
    ) -> bool:
        """Block until a message at or after `offset` passes `filter`, or a read would move on.
        Returns False after `timeout` seconds."""
        return self._waiters.wait(Wanted(topic, queue_id, offset, as_filter(filter)), seconds(timeout, "timeout"))

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self._bounds(topic, queue_id)[0]

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self._bounds(topic, queue_id)[1]

    def _bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        self._check_open()
        self.topics.require(topic)
        return self.offsets.bounds(topic, queue_id)

    def offset_for_time(
        self, topic: str, queue_id: int, timestamp_ms: int, bound: Literal["lower", "upper"] = "lower"
    ) -> int:
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
        return self._waiters.add_waiter(
            Wanted(topic, queue_id, offset, as_filter(filter)), callback, self._deadline(timeout)
        )

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
        request = PopRequest(group, topic, queue_id, filter=as_filter(filter), order=order)
        return self._pop.add_waiter(request, callback, self._deadline(timeout))

    def remove_waiter(self, waiter: Waiter) -> bool:
        return self._waiters.remove_waiter(waiter)

    def wake_one(self, group: str, topic: str, queue_id: int = -1) -> None:
        self._waiters.wake_one(group, topic, queue_id)

    def _deadline(self, timeout: Duration | None) -> int | None:
        if timeout is None or timeout == math.inf:
            return None
        return self.clock.monotonic_ms() + milliseconds(timeout, "timeout")

    # -- committed offsets ------------------------------------------------------------------------------------------

    def committed(self, group: str, topic: str, queue_id: int) -> int | None:
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
        self._check_open()
        self.groups.require(group)
        config = self.topics.require(topic)
        end = (self.store.offsets_or_none(topic, queue_id) or (0, 0))[1]
        if not 0 <= queue_id < max(config.read_queues, config.write_queues) or not 0 <= offset <= end:
            raise OffsetOutOfRangeError(f"offset {offset} of {topic}/{queue_id} does not lie in 0..{end}", 0, end)
        if owner is not None and self.locks.owner(group, QueueRef(topic, queue_id)) not in (owner, None):
            raise NotPermittedError(f"queue {queue_id} of {topic!r} is locked for another member of {group!r}")
        key = QueueKey(group, topic, queue_id)
        self._pop.end(key)
        self.offsets.commit(key, offset, durability=durability)

    def start_of(self, group: str, topic: str, queue_id: int, start: Start | None = None) -> int:
        self._check_open()
        return self._reads.first_position(QueueKey(group, topic, queue_id), start)

    def local_offsets(self, client_id: str, group: str) -> LocalOffsets:
        self._check_open()
        return LocalOffsets(self.store, client_id, group)

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
        self._check_open()
        return self._pop.orders.attempts(QueueKey(group, topic, queue_id))

    def note_attempt(
        self, group: str, topic: str, queue_id: int, offset: int, attempts: int, *, error: str = ""
    ) -> None:
        self._check_open()
        self._pop.note_attempt(QueueKey(group, topic, queue_id), offset, attempts, error)

    def suspended(self, group: str) -> dict[QueueRef, BlockedQueue]:
        self._check_open()
        found = self._pop.orders.suspended(group, self.offsets.committed)
        return {QueueRef(*queue): suspended for queue, suspended in found.items()}

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
        acks: Sequence[str] = (),
    ) -> list[Delivery]:
        if acks:
            self._pop.ack(group, topic, acks, durability)
        chosen = None if filter is None else as_filter(filter)
        invisible_ms = invisible * 1000 if type(invisible) is int else milliseconds(invisible, "invisible")
        order, local = bool(order), bool(local)
        values = group, topic, queue_id, n, invisible_ms, chosen, order, start, attempt_id, local, skip_acked
        request = tuple.__new__(PopRequest, values)  # a third of the time of a call
        poll_s = 0.0
        if poll:
            self._check_open()
            poll_s = seconds(poll, "poll")
        found = self._pop.pop(request, poll_s, durability)
        if not found:  # in a forked child a drained queue looks empty for ever
            self._check_open()
        return found

    def ack(self, group: str, topic: str, receipts: Sequence[str], *, durability: Durability | None = None) -> None:
        self._pop.ack(group, topic, receipts, durability)

    def change_invisible(
        self, group: str, topic: str, receipt: str, invisible: Duration, *, durability: Durability | None = None
    ) -> str:
        """Make a delivery visible in `invisible` seconds from now. Return its new receipt."""
        return self._pop.change_invisible(group, topic, receipt, milliseconds(invisible, "invisible"), durability)

    def renew(
        self,
        group: str,
        topic: str,
        receipt: str,
        invisible: Duration,
        *,
        progress: str | None = None,
        durability: Durability | None = None,
    ) -> str:
        invisible_ms = milliseconds(invisible, "invisible")
        return self._pop.change_invisible(
            group, topic, receipt, invisible_ms, durability, renew=True, progress=progress
        )

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
        delay_ms = None if delay is None else milliseconds(delay, "delay")
        return self._pop.nack(group, topic, receipt, delay_ms, durability, error=error)

    def release(
        self,
        group: str,
        topic: str,
        receipts: Sequence[str],
        *,
        delay: Duration = 0,
        durability: Durability | None = None,
    ) -> None:
        self._pop.release(group, topic, receipts, durability, delay_ms=milliseconds(delay, "delay"))

    def dead_letter(
        self, group: str, topic: str, receipt: str, reason: str, *, durability: Durability | None = None
    ) -> None:
        self._pop.dead_letter(group, topic, receipt, reason, durability)

    def take_losses(self, group: str) -> tuple[Loss, ...]:
        return self._reads.take_losses(group)

    def pending(self, group: str) -> list[Pending]:
        self._check_open()
        return self._pop.pending(group)

    # -- failures ---------------------------------------------------------------------------------------------------

    def release_all(self, group: str, topic: str, queue_id: int) -> None:
        self._check_open()
        self._pop.end(QueueKey(group, topic, queue_id), move=True)

    def pop_retry_topics(self, group: str, topic: str) -> list[str]:
        return self._pop.retry_topics(group, topic)

    def send_back(
        self,
        group: str,
        message: Message | SendReceipt | int,
        *,
        delay_level: int = 0,
        delay: Duration | None = None,
        max_reconsume: int | None = None,
        attempts: int | None = None,
        reason: str | None = None,
        durability: Durability | None = None,
    ) -> SendReceipt:
        return self._retries.send_back(
            group,
            message if isinstance(message, int) else message.physical_offset,
            delay_level=delay_level,
            delay_ms=None if delay is None else milliseconds(delay, "delay"),
            max_reconsume=max_reconsume,
            attempts=attempts,
            reason=Reason(reason) if reason else None,
            durability=durability,
        )

    def dead_letters(self, group: str) -> DeadLetters:
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
        """Raise StoreClosedError after closing: values in memory may be older than those that others have saved."""
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
        now_ms = self.clock.now_ms() if now_ms is None else now_ms
        self.store.dispatch()
        due_ms = self._housekeeper.run_once(now_ms)
        self.store.run_once(self.clock.monotonic_ms())
        self.store.dispatch()
        return due_ms if due_ms is None else self._housekeeper.next_due_ms(now_ms)

    def save(self) -> None:
        """Write to disk everything that `close` would write. Raises the errors of that, after saving the rest."""
        self.saved(lambda: None)

    def saved(self, work: Callable[[], Result]) -> Result:
        self._check_open()
        with self._housekeeper.turn:
            self._save()
            return work()

    def _save(self) -> None:
        if errors := self._housekeeper.persist([*self.members.on_save, self.store.flush]):
            raise errors[0]

    def close(self, timeout: Duration = 30) -> None:
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
