"""Persistent queue with the verbs of `queue.Queue` (clients#queue).

    put ---> topic NAME, queue 0 ---> get: a task, leased for `visibility` seconds
                   ^                    |  ack, clean end of `with`    done
                   |                    |  nack, exception             again after the retry policy's delay
                   |                    |  nothing, the lease expired   again
                   |                    |  process died                again when the store is opened
                   +--------------------+  last attempt, reject        %DLQ%NAME
                      %RETRY%NAME+NAME: copies of failed items, which `get` also reads

A queue is a topic and a group, both with its name (`queue_topic`), and uses pop. All tools that know topics can use
it, and it has no other files. The topic has one queue, unless somebody else created it: then all its queues are read,
in turn. First deliveries of one queue are FIFO, and redeliveries come when they are due. In an `ordered` queue nothing
overtakes a leased item. The first `put` with a priority gives the topic a queue for each (delivery#priority).

The class is long because it has every method of `queue.Queue`, with its documentation.
"""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, cast

from mqstore.broker.tables.names import DEAD_LETTER, EXPIRY, queue_topic, retry_topic
from mqstore.broker.tables.priorities import priority_queue
from mqstore.client.group.groupsettings import begin_in, check_order, enter_group
from mqstore.client.interceptors import Settled
from mqstore.client.items.codecs import BYTES, Codec, T, encoded
from mqstore.client.items.itemoptions import BLOCKING, ItemOptions, put_item, send_options
from mqstore.client.items.queueitems import QueueItems
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.pop.delivery import LeaseContext, Task, release, visibility_seconds
from mqstore.client.pop.popsource import pop_retries
from mqstore.client.waits import Wait, Waits
from mqstore.contract import MAX_BATCH, BrokerContract, DeadLetters, Delivery, RetryPolicy
from mqstore.errors import (
    ConfigError,
    MQStoreError,
    NotSupportedError,
    QueueEmpty,
    QueueFull,
    QueueShutDown,
    ReceiptExpiredError,
    StoreClosedError,
)
from mqstore.log.commitlog import SendReceipt
from mqstore.native import kernel
from mqstore.options import Duration, check_kind, check_whole, milliseconds, seconds
from mqstore.signalsafe import Condition, Gate

if TYPE_CHECKING:
    from mqstore.queueloop import RunSummary

_LOOK_S = 0.25
"""Time after which a waiting thread looks by itself. Other consumers, or time, may settle items too."""


class _Last(threading.local):
    taken: Task[Any] | ReceiptExpiredError | tuple[str, str] | str | None = None
    """Receipt of the last item that a thread got, and its topic if that is not the queue's. Not the task, whose message
    keeps its segment (a weak reference costs a tenth of a get); only in order: a receipt stays valid after a nack."""


_get_at_once = Task._get_at_once


class QueueOptions(TypedDict, total=False):
    """Options of `Queue` that do not change its type."""

    visibility: Duration
    retry: RetryPolicy | None
    ordered: bool
    maxsize: int
    dead_letter_expired: bool | None


class Queue(QueueItems[T]):
    """Persistent queue with the verbs of `queue.Queue`. Thread-safe. Its items outlive the process.

    `get` leases an item. If it is not settled within `visibility` seconds (0.1 s to 12 h), it is redelivered. After the
    process died, it is redelivered as soon as the store is opened. So each item is handled at least once, seldom twice.

        ordered     an item that is leased, or waits for its next attempt, holds back all after it. A property of the
                    queue: set when it is created, the same for all afterwards
        retry       when a failed item is redelivered, and after how many attempts it is a dead letter; None: the
                    queue's. A new one has 17 attempts with pauses from 1 s to 30 min; a new ordered one has no limit,
                    with pauses from 1 s to 60 s. A policy given here replaces the queue's, but must equal that of
                    live consumers of its group
        codec       `BYTES` (default, and None), `TEXT`, `JSON`, or an object with `encode` and `decode`. With a
                    `Codec[Job]` it is a `Queue[Job]` for type checkers
        maxsize     `put` waits while this many items are not done; 0: no limit
        dead_letter_expired
                    True: an item that has expired (`expires=` of `put`) becomes a dead letter. False: it is dropped.
                    None: as the queue has it. A new one drops it

    Raises ConfigError for a name that is empty, too long, or has control characters, for bad options, for an `ordered`
    that differs from the queue's, and for `ordered` with a topic that has several queues. Raises GroupInUseError for
    a `retry` that differs from that of the group's live consumers.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     queue = store.queue("jobs", codec=mqstore.TEXT)
    ...     receipts = queue.put_many(["a.png", "b.png"])
    ...     first = queue.get()
    ...     first.nack(delay=0)  # failed: it is redelivered
    ...     [(task.value, task.attempt) for task in (queue.get(), queue.get(timeout=10))]
    [('b.png', 1), ('a.png', 2)]
    """

    def __init__(
        self,
        broker: BrokerContract,
        name: str,
        *,
        visibility: Duration = 60,
        retry: RetryPolicy | None = None,
        ordered: bool = False,
        codec: Codec[T] | None = None,
        maxsize: int = 0,
        dead_letter_expired: bool | None = None,
    ) -> None:
        topic = queue_topic(name)
        codec = cast(Codec[T], BYTES) if codec is None else codec
        if not (callable(getattr(codec, "encode", None)) and callable(getattr(codec, "decode", None))):
            raise ConfigError(f"codec must have encode and decode, as mqstore.TEXT, not {codec!r:.80}")
        check_whole("maxsize", maxsize, 0)
        check_kind("ordered", ordered, bool, "True or False")
        check_kind("retry", retry, RetryPolicy | None, "a mqstore.RetryPolicy or None")
        check_kind("dead_letter_expired", dead_letter_expired, bool | None, "True, False or None")
        self.name = name
        self._topic = topic
        """Name of its topic and group, which is the queue's name if a topic can have it."""
        self._retries = retry_topic(topic)
        self._broker = broker
        self._codec = codec
        self._ordered = ordered
        self._maxsize = maxsize
        self._visibility_s = visibility_seconds(visibility)
        self._visibility_ms = _visibility_ms(visibility)
        self._shut: str = ""
        """State: "" is open, "put" allows no puts, "all" allows neither puts nor gets."""
        self._begin()
        self._last = _Last()
        group = broker.groups.get(topic)
        if group is not None:
            check_order(group, ordered)
        broker.members.check_retry("this Queue", topic, retry)
        config = broker.topics.create(topic, queues=1)
        if ordered and not config.read_queues == config.write_queues == 1:
            place = shlex.join([broker.name, topic])
            raise ConfigError(
                f"topic {topic!r} has {config.read_queues} queues, and an ordered Queue has one. Choose another name, "
                f"or consume what the topic holds (`mqstore consume {place} --group {shlex.quote(topic)} --ordered "
                f"--idle-exit 0`) and run `mqstore topics alter {place} --queues 1 --force`"
            )
        enter_group(broker, topic, ordered=ordered, retry=retry)
        if retry is not None:
            broker.members.set_retry("this Queue", topic, retry)
        begin_in(broker, topic, topic, "earliest")
        if dead_letter_expired is not None and (config.attributes.get(EXPIRY) == DEAD_LETTER) != dead_letter_expired:
            broker.topics.expire(topic, dead_letter_expired)

    def _begin(self) -> None:
        """Create locks and waits. Repeated in a forked child if that may use the queue, as it may that of a server."""
        broker, name = self._broker, self._topic
        self._changed = Condition()
        """Notified when an item was settled, or the queue was shut."""
        self._callbacks: set[Callable[[], object]] = set()
        """Functions to call then, once. While threads wait for that, `_notify` is one."""
        self._runs: set[Callable[[], object]] = set()
        """Functions to call at a shutdown, one for each `run`."""
        self._waits = Waits(broker, name, order=self._ordered)
        """Waits of the threads in `get`."""
        self._log = LimitedLog(f"group {self.name}", broker.clock)
        waiting = None if self._ordered else self._callbacks
        self._context = LeaseContext(broker, name, waiting, self._settled, self._log, self._visibility_s, self._codec)

    # -- in ---------------------------------------------------------------------------------------------------------

    def put(
        self, item: T, block: bool = True, timeout: Duration | None = None, **options: Unpack[ItemOptions]
    ) -> SendReceipt:
        """Store an item, and return its receipt, whose `id` names it in all later calls.

        `options` are those of `ItemOptions`: delay, priority, key, tag, properties, expires, unique, unique_for. With
        `unique` the receipt may be that of an earlier item of this name, and nothing is stored. With `maxsize`, raises
        QueueFull if it is full, after `timeout` seconds if `block`. Raises QueueShutDown after `shutdown`, and
        InvalidMessageError for an item that the codec refuses. Raises that or ConfigError for a bad option, and the
        errors of `Broker.put`. After an error nothing is stored.
        """
        body = self._codec.encode(item)
        if self._shut:  # inline `_check_puts`: one call less
            self._check_puts()
        if self._maxsize:
            with self._changed:
                self._wait_for_room(1, block, timeout)
                return self._put(body, options)
        elif not options:  # inline `_put`: one call less
            return self._broker.put(self._topic, body, queue_id=0)
        elif len(options) == 1 and (priority := options.get("priority")):  # likewise
            queue_id = priority_queue(self._broker.topics, self._topic, priority, ordered=self._ordered)
            return self._broker.put(self._topic, body, queue_id=queue_id)
        return self._put(body, options)

    def _check_puts(self) -> None:
        if self._shut:
            raise QueueShutDown(f"queue {self.name!r} was shut down")

    def _put(self, body: bytes, options: ItemOptions) -> SendReceipt:
        return put_item(self._broker, self._topic, body, options, ordered=self._ordered)

    def _append(self, body: bytes, options: ItemOptions) -> Future[SendReceipt] | None:
        """Put an encoded item, for `mqstore.aio`. Return a future for the disk, or None if it is full."""
        self._check_puts()
        with self._changed:
            try:
                self._wait_for_room(1, False, None)
            except QueueFull:
                return None
            if BLOCKING.isdisjoint(options):
                return self._broker.put_async(
                    self._topic, body, queue_id=0, **send_options(self._broker, self._topic, options)
                )
            stored = Future[SendReceipt]()
            stored.set_result(self._put(body, options))
            return stored

    def put_nowait(self, item: T, **options: Unpack[ItemOptions]) -> SendReceipt:
        """Put an item as `put` does, but raise QueueFull instead of waiting."""
        return self.put(item, block=False, **options)

    def put_many(self, items: Iterable[T], *, priority: int = 0) -> Sequence[SendReceipt]:
        """Store many items of a priority at once, which is far quicker than one by one, and return their receipts.
        Raises the errors of `put`. Raises QueueFull at once if they do not fit into `maxsize`; then nothing is
        stored."""
        bodies = encoded(self._codec, items)
        self._check_puts()
        queue_id = priority_queue(self._broker.topics, self._topic, priority, ordered=self._ordered)
        if self._maxsize:
            with self._changed:
                self._wait_for_room(len(bodies), False, None)
                return self._broker.put_many(self._topic, bodies, queue_id=queue_id)
        return self._broker.put_many(self._topic, bodies, queue_id=queue_id)

    def _wait_for_room(self, count: int, block: bool, timeout: Duration | None) -> None:
        """Wait for room. The caller holds the lock."""

        def look() -> bool | None:
            self._check_puts()
            return self.qsize() + count <= self._maxsize or None

        if not self._until(look, timeout if block else 0):
            raise QueueFull(f"queue {self.name!r} has {self.qsize()} items of {self._maxsize}")

    def _until(self, look: Callable[[], bool | None], timeout: Duration | None) -> bool | None:
        """Return the result of `look`, repeated when an item was settled until it is not None. None after `timeout`
        seconds. The caller holds the lock."""
        end = math.inf if timeout is None else time.monotonic() + seconds(timeout, "timeout")
        while True:
            self._callbacks.add(self._notify)  # before the look, which sees every item that was settled earlier
            if (found := look()) is not None or (left := end - time.monotonic()) <= 0:
                return found
            self._changed.wait(min(left, _LOOK_S))

    # -- out --------------------------------------------------------------------------------------------------------

    def get(
        self,
        block: bool = True,
        timeout: Duration | None = None,
        *,
        visibility: Duration | None = None,
        done: Sequence[Task[T]] = (),
    ) -> Task[T]:
        """Return the next item, leased for `visibility` seconds (None: the queue's).
        If `block`, it waits for at most `timeout` seconds. Raises QueueEmpty without an item, QueueShutDown after
        `shutdown`. The tasks in `done` are acknowledged first, as by `Task.ack`. Over a connection (`mqstore.connect`)
        both together are one call."""
        timeout_s = None if timeout is None else seconds(timeout, "timeout")
        visibility_ms = self._visibility_ms if visibility is None else _visibility_ms(visibility)
        if not (done or self._shut):
            task = _get_at_once(self._context, self._topic, visibility_ms, self._ordered)
            if task is not None:
                self._last.taken = task if self._ordered else task._delivery.receipt
                return task
        left = self._to_ack(done) if done else None
        task = Task(self._context, self._take(1, block, timeout_s, visibility_ms / 1000, left)[0])
        self._last.taken = task if self._ordered else (task._delivery.topic, task._delivery.receipt)
        return task

    def _get_at_once(self, visibility: Duration | None = None) -> Task[T] | None:
        """Get an item that is prefetched, for an event loop: without waiting for a lock, so only by compiled code.
        None does not mean that there is none. `task_done` does not count it."""
        visibility_ms = self._visibility_ms if visibility is None else _visibility_ms(visibility)
        if self._shut or kernel is None:
            return None
        return _get_at_once(self._context, self._topic, visibility_ms, self._ordered)

    def get_nowait(self) -> Task[T]:
        """Get an item as `get` does, but raise QueueEmpty instead of waiting."""
        return self.get(block=False)

    def _to_ack(self, done: Sequence[Task[T]]) -> list[Task[T]]:
        """Acknowledge tasks, and return those that the next pop of this queue acknowledges instead."""
        left, compiled = [], self._broker._sender is not None
        for task in done:
            if self._shut or not task._is_poppable(self._context, self._topic):
                task.ack()
            elif not (compiled and task._ack_at_once()):
                left.append(task)
        return left

    def get_many(self, max_items: int, timeout: Duration | None = 0, *, done: Sequence[Task[T]] = ()) -> list[Task[T]]:
        """Return up to `max_items` items at once, or [] after `timeout` seconds (None: wait for ever).
        Tasks that are `done` are acknowledged first, as `get` does it.
        Each is settled alone. An ordered queue returns at most 32, and then no more until all of them are settled.
        It redelivers failed items before later ones, and none that is done."""
        check_whole("max_items", max_items, 1)
        tasks: list[Task[T]] = []
        unacked = self._to_ack(done) if done else None
        try:
            block, left = timeout is None or bool(timeout), timeout
            while len(tasks) < max_items:
                found = self._take(min(max_items - len(tasks), MAX_BATCH), block, left, self._visibility_s, unacked)
                unacked = None
                tasks += [Task(self._context, delivery) for delivery in found]
                self._last.taken = tasks[-1] if self._ordered else (found[-1].topic, found[-1].receipt)
                block, left = False, None
        except QueueEmpty:
            pass
        except MQStoreError:
            if not tasks:
                raise
        except BaseException:  # Ctrl-C, or an error of a signal handler: no caller will get the items
            release(tasks)
            raise
        return tasks

    def _take(
        self,
        count: int,
        block: bool,
        timeout: Duration | None,
        visibility_s: float,
        done: Sequence[Task[T]] | None = None,
        stop: Gate | None = None,
    ) -> list[Delivery]:
        """Return at least one delivery. Tasks that are `done` are acknowledged before the first look.
        Raises QueueShutDown once `stop` is open and the waits were rung, too."""
        end = None if timeout is None else time.monotonic() + seconds(timeout, "timeout")
        ticket, topics, ordered = None, self._broker.topics, self._ordered
        try:
            while True:
                generation = self._waits.generation  # before the look, so that a later `shutdown` ends the wait
                shut = self._shut  # and earlier puts are seen
                try:
                    if shut == "all" or (stop is not None and stop.is_open):
                        raise QueueShutDown(f"queue {self.name!r} was shut down")
                    found, acks = [], [task._delivery.receipt for task in done or ()]
                    if topics.entered(self._retries) is not None:
                        if acks:
                            self._broker.ack(self._topic, self._topic, acks)
                        found, acks = self._pop_retries(count, visibility_s), []
                    if not found:
                        # Skip items of an ordered batch that were acknowledged after a redelivered one.
                        found = self._broker.pop(
                            self._topic,
                            self._topic,
                            count,
                            invisible=visibility_s,
                            order=ordered,
                            skip_acked=ordered,
                            acks=acks,
                        )
                    for task in done or ():
                        task._note("ack", "ack")
                    done = None
                except BaseException:
                    if ticket is not None:  # for an item that another object of this queue may get
                        self._waits.pass_on(ticket)
                    raise
                if found:
                    return found
                if shut:
                    raise QueueShutDown(f"queue {self.name!r} was shut down, and is empty")
                left = None if end is None else end - time.monotonic()
                if not block or (left is not None and left <= 0):
                    raise QueueEmpty(f"nothing to get from queue {self.name!r}")
                ticket = self._waits.wait(self._topics(), math.inf if left is None else left, generation)
        except StoreClosedError:
            if self._shut:  # and closed right after that: the shutdown has already reached the caller
                raise QueueShutDown(f"queue {self.name!r} was shut down") from None
            raise

    def _pop_retries(self, count: int, visibility_s: float) -> list[Delivery]:
        """Pop redeliveries, which go first. While failed items wait for their delay, others pass."""
        if len(self._topics()) == 1:
            return []
        ordered = self._ordered
        found, _ = pop_retries(
            self._broker, self._topic, (self._topic,), count, visibility_s, order=ordered, skip_acked=ordered
        )
        return found

    def _topics(self) -> Sequence[tuple[str, None]]:
        """Return the topics that may have items, with the group's retry topic once nobody reads by offset."""
        if self._broker.topics.entered(self._retries) is None or self._broker.members.mode(self._topic) is not None:
            return ((self._topic, None),)
        return (self._topic, None), (self._retries, None)

    def _when_ready(self, callback: Callable[[], object]) -> Wait:
        """Call `callback()` once, under the rules of `Waits.add`, when another `get(block=False)` may find an item.
        It is also called when the queue is shut. Then get, or call `cancel` of the result."""
        generation = self._waits.generation
        return self._waits.add(self._topics(), callback, -1 if self._shut else generation)

    def __iter__(self) -> Iterator[Task[T]]:
        """Yield tasks until nothing is ready. It does not wait for the next attempts of failed items.
        An exception in `with task:` ends the caller's loop, unless it is caught there."""
        while True:
            try:
                task = self.get(block=False)
            except (QueueEmpty, QueueShutDown):
                return
            yield task

    def run(
        self,
        handler: Callable[[Task[T]], object],
        workers: int = 4,
        *,
        rate: str | None = None,
        rate_per: Callable[[T], Hashable] | None = None,
        grace: Duration = 30,
    ) -> RunSummary:
        """Handle items in `workers` threads, until SIGTERM, SIGINT or `shutdown`. Log and return a summary.

        `handler(task)` is the body of a `with task:` block. Its end acknowledges the item, and its exception is logged,
        and is a failed attempt. `Retry` and `Reject` are obeyed. The lease is renewed while it runs.

            rate       limit of starts, such as "10/s", "90/h" or "1/2.5s": evenly spaced, without bursts
            rate_per   function of an item. The rate then applies to the items of each result, such as a host. An item
                       that has to wait longer than 0.25 s is given back meanwhile, and holds up no other
            grace      seconds after which the run ends when that was asked for. Then the items of running handlers are
                       released, and their attempts do not count. Their threads cannot be ended

        At SIGTERM, SIGINT and `shutdown(immediate=True)` no further item is taken. After `shutdown()` the items that
        are ready are handled, too. A second signal raises KeyboardInterrupt here. Signals are handled only in the main
        thread, and their former handlers are restored. SystemExit of a handler stops the run, and is raised here. In a
        handler `mqstore.cancelled()` is True when no further item is taken. Each run has its own rate.

        Raises ConfigError for bad options, and for a coroutine function as handler: that is for `mqstore.aio`.

        >>> import mqstore, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
        ...     jobs = store.queue("jobs", codec=mqstore.TEXT)
        ...     receipts = jobs.put_many(["a", "b", "c"])
        ...     jobs.shutdown()  # no more puts, so that the run ends when nothing is ready
        ...     summary = jobs.run(lambda task: task.value.index("b"), workers=2)  # ValueError for "a" and "c"
        ...     summary.handled, summary.failed, jobs.qsize()
        (1, 2, 2)
        """
        from mqstore.queueloop import ThreadRun

        return ThreadRun(self, handler, workers, rate, rate_per, grace).run()

    # -- done -------------------------------------------------------------------------------------------------------

    def ack(self, task: Task[T]) -> None:
        """Call `task.ack()`."""
        task.ack()

    def nack(self, task: Task[T], delay: Duration | None = None) -> None:
        """Call `task.nack(delay)`."""
        task.nack(delay)

    def task_done(self) -> None:
        """Acknowledge the last item of this thread, as in `queue.Queue`. Raises ValueError if there is none."""
        taken = self._last.taken
        if taken is None:
            raise ValueError("task_done() called, but this thread has no item that it did not call it for")
        if isinstance(taken, ReceiptExpiredError):
            raise taken
        if isinstance(taken, Task):
            taken.ack()
        else:
            topic, receipt = (self._topic, taken) if isinstance(taken, str) else taken
            self._broker.ack(self._topic, topic, [receipt])
        self._last.taken = None  # only now, so that it can be repeated if the disk is full
        self._look_again()

    def _settled(self, task: Task[T], outcome: Settled) -> None:
        if self._last.taken is task:
            late = ReceiptExpiredError(f"the last item of this thread was settled before, by {outcome}")
            self._last.taken = task._delivery.receipt if outcome == "ack" else late
        self._look_again()

    def _look_again(self) -> None:
        """Call all who wait, once: an item was settled, or the queue was shut."""
        while self._callbacks:
            with suppress(KeyError):  # another thread was quicker
                self._callbacks.pop()()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _when_changed(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call `callback()`, which must be quick, once an item was settled or the queue is shut, for `mqstore.aio`.
        Return a function to cancel that. It is called at once if there may be room, or if everything is done."""
        self._callbacks.add(callback)
        if self._shut or self.qsize() < max(1, self._maxsize):  # since the caller looked
            self._look_again()
        return partial(self._callbacks.discard, callback)

    def join(self, timeout: Duration | None = None) -> bool:
        """Wait until nothing is ready, leased, delayed, or waiting for another attempt.
        Return False after `timeout` seconds, or if an immediate `shutdown` left items."""
        with self._changed:
            return bool(self._until(self._is_done, timeout))

    def _is_done(self) -> bool | None:
        """Return True if everything is done, False if the rest will not be taken any more, or None."""
        if not self.qsize():  # otherwise the delayed ones, which take longer to count, make no difference
            delayed = 0  # before the size, because items move from there to the others
            with suppress(NotSupportedError):  # by a cluster, whose delayed items count once due
                delayed = self.counts()["delayed"]
            if not delayed + self.qsize():
                return True
        return False if self._shut == "all" else None

    # -- state ------------------------------------------------------------------------------------------------------

    def qsize(self) -> int:
        """Return the number of items that are ready, leased, or waiting for another attempt.
        Delayed items count once due. Raises StoreClosedError."""
        self._broker.check_open()  # otherwise a thread that waits would wait for ever
        return sum(self._broker.lag(self._topic).values())

    def __len__(self) -> int:
        return self.qsize()

    def __bool__(self) -> bool:
        return True  # an empty queue is a queue

    def empty(self) -> bool:
        """Return True if everything is done."""
        return not self.qsize()

    def full(self) -> bool:
        """Return True if a `put` would wait."""
        return bool(self._maxsize) and self.qsize() >= self._maxsize

    @property
    def dead_letters(self) -> DeadLetters:
        """Items that were rejected or failed too often, to list, replay and purge."""
        return self._broker.dead_letters(self._topic)

    # -- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse further puts. `get` continues until nothing is ready, or with `immediate` stops at once.
        Waiting callers get QueueShutDown. The items stay stored, and leased tasks can still be settled. Allowed in a
        signal handler. In a forked child it does nothing."""
        if self._changed.is_inherited:
            return
        with self._changed:
            self._shut = "all" if immediate or self._shut == "all" else "put"
        self._look_again()
        self._waits.ring()
        for wake in tuple(self._runs):
            wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown(immediate=True)
        self._log.close()  # not in `shutdown`: a signal handler may come while its lock is held

    def __repr__(self) -> str:
        state = ", closed" if self._broker.closed else ", shut down" if self._shut else ""
        if not self._broker.is_remote:
            with suppress(Exception):  # closed, or a full disk: a repr never raises
                state = f": {self.qsize()} items{state}"
        return f"<Queue {self.name!r} on {self._broker.name!r}{state}>"


def _visibility_ms(visibility: Duration) -> int:
    """Return the result of `visibility_seconds` in milliseconds."""
    return milliseconds(visibility_seconds(visibility), "visibility")
