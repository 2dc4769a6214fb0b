"""Push consumer: calls handlers with messages (clients#group, clients#stop).

    PushConsumer ---- Workers             threads and timers
        |        ---- Handling            calls handlers, counts, calls interceptors
        +- engine:    Assignment          mode "queue", with a ConcurrentService or an OrderlyService
                      PopEngine           mode "pop": deliveries by receipt, no owned queues

    new ---- start ----> running ---- stop ----> stopped, for ever
     ^-- it failed --+

A `start` that fails undoes its changes, and a new engine is ready for the next one.

`stop` starts no more handlers and waits for running ones. Then it releases the rest: queues, whose positions are on
disk, or deliveries. Handlers that exceed the time of `stop` do not count.

The class is long because it documents and checks all options. The classes of the table above do the work.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from mqstore.broker.pop.orderinfo import OrderInfoTable
from mqstore.broker.tables.names import check_group
from mqstore.client.consumerstats import ConsumerStats, QueueStats, topic_stats
from mqstore.client.group.allocation import Strategy, strategy_named
from mqstore.client.group.groupsettings import (
    GroupProgress,
    LocalProgress,
    check_order,
    check_start,
    enter_group,
    order_of,
    wanted,
)
from mqstore.client.group.membership import Membership, client_id_of
from mqstore.client.interceptors import Interceptor, Interceptors
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.push.assignment import Assignment
from mqstore.client.push.batches import Context
from mqstore.client.push.concurrent import ConcurrentService
from mqstore.client.push.handler_call import Handling, OnError, Subscription
from mqstore.client.push.handlers import check_handler, check_plain
from mqstore.client.push.orderly import OrderlyService
from mqstore.client.push.pop import PopEngine
from mqstore.client.push.processqueue import Limits
from mqstore.client.push.workers import Workers, at_signals
from mqstore.client.send.preparing import one_of
from mqstore.contract import AttemptNotes, BlockedQueue, BrokerContract, Mode, RetryPolicy, Start
from mqstore.errors import ConfigError, StoreClosedError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.log.writing.log_tail import as_queue
from mqstore.logger import log as _log
from mqstore.options import Duration, check_whole, seconds
from mqstore.signalsafe import Gate, Lock, check_holds_none

_SAMPLE_MS = 10_000

# A batch is a tuple, so that a handler may say `tuple[Message, ...]` as well as `Sequence[Message]`.
Handler = Callable[[Message], object] | Callable[[tuple[Message, ...]], object]
H = TypeVar("H", bound=Handler)


class PushConsumer(AbstractContextManager["PushConsumer"]):
    """Calls handlers on its own threads. `with` starts and stops it. Made by `Store.push_consumer`.

        workers            threads that run handlers; None: a few more than there are processors
        ordered            one message of a queue at a time, in order; queues side by side. A failed message holds up
                           its queue. None: the group's setting
        mode               "queue": each queue belongs to one member, with a committed offset. "pop": any member takes
                           any message, each is acknowledged alone, and a slow one holds nothing up
        model              "clustering": the members share the messages. "broadcasting": each gets all of them, with its
                           own offsets under `client_id`; failed messages are skipped, if ordered after their
                           last attempt
        start              where the group begins in a new topic: "earliest", "latest" or an aware datetime. None: the
                           group's setting
        batch_size         more than 1: handlers take a tuple of up to this many messages of one topic
        prefetch           messages of a queue held here at most (mode "pop": of all); `prefetch_bytes` likewise
        prefetch_total     messages of a topic, 1 to 6 553 500, divided by the number of its queues that are assigned
                           here (clients#topic-limits): the limit of each, if less than `prefetch`.
                           `prefetch_total_bytes` likewise, 1 to 102 400 MiB. Mode "queue" only
        max_span           number of offsets that later messages may be ahead of an unfinished one (2000). Not ordered,
                           mode "queue" only
        auto_commit        ordered, mode "queue". False: a message is settled when its handler, or a later one, returns
                           `mqstore.COMMIT`. `mqstore.ROLLBACK` redelivers all messages since the last COMMIT
        retry              when failed messages are redelivered, and after how many attempts they are dead letters;
                           None: the group's. A policy given here replaces the group's, but must equal that of other
                           members. A new ordered group retries for ever, after 1, 2, 4 s ... 60 s
        consume_timeout    seconds after which a handler is given up, and its messages redelivered. Ordered: reported
        suspend            ordered, mode "queue". Time that a failure holds its queue up, 0.01 to 60 s; None: by the
                           retry policy, at most 60 s
        strategy           mode "queue". How members share queues: "avg" (default), "circle", or a function. The same
                           for all members
        on_error           called as on_error(exception, message) with errors of handlers and of background work

    `start` creates a new group with the options given here. An option that has no meaning in the chosen mode raises
    ConfigError.

    A handler that returns has handled its message, whatever it returns. Exceptions are a coroutine or generator, which
    has not run, and `ROLLBACK` without `auto_commit=False`: both are failures. It may raise `Retry(delay)`,
    `Reject(reason)`, or for a batch `BatchFailure`. Another exception is logged, and the message is redelivered.

    >>> import mqstore, tempfile, threading
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     done = threading.Event()
    ...     consumer = PushConsumer(store.broker, "billing", workers=1)
    ...     @consumer.subscribe("orders")
    ...     def handle(message):
    ...         print(message.text())
    ...         done.set()
    ...     with consumer:
    ...         _ = store.put("orders", b"hello")
    ...         _ = done.wait(10)
    hello
    """

    def __init__(
        self,
        broker: BrokerContract,
        group: str,
        *,
        workers: int | None = None,
        ordered: bool | None = None,
        mode: Literal["queue", "pop"] = "queue",
        model: Literal["clustering", "broadcasting"] = "clustering",
        client_id: str | None = None,
        start: Start | None = None,
        batch_size: int = 1,
        prefetch: int = 1000,
        prefetch_bytes: int = 100 << 20,
        prefetch_total: int | None = None,
        prefetch_total_bytes: int | None = None,
        max_span: int | None = None,
        auto_commit: bool = True,
        retry: RetryPolicy | None = None,
        consume_timeout: Duration = 900,
        suspend: Duration | None = None,
        strategy: str | Strategy | None = None,
        interceptors: Sequence[Interceptor] = (),
        on_error: OnError | None = None,
    ) -> None:
        if on_error is not None:
            check_plain("on_error", on_error)
        one_of(model, "model", ("clustering", "broadcasting"))
        one_of(mode, "mode", ("queue", "pop"))
        one_of(auto_commit, "auto_commit", (True, False))
        broadcasting, pops = model == "broadcasting", mode == "pop"
        if broadcasting and client_id is None:
            raise ConfigError("a broadcasting consumer keeps its progress under its client_id: give one that stays")
        if broadcasting and pops:
            raise ConfigError("mode='pop' shares messages out; broadcasting takes mode='queue'")
        ordered = order_of(broker, group, ordered)
        queued = "mode='queue' with auto_commit; in mode='pop' the limits are of all queues as they are"
        elsewhere = "elsewhere the retry policy says when a message is redelivered"
        for name, value, applies, where in (
            ("suspend", suspend, ordered and not pops, f"mode='queue' with ordered=True; {elsewhere}"),
            ("max_span", max_span, not (ordered or pops), "mode='queue' without ordered=True"),
            ("auto_commit", None if auto_commit else False, ordered and not pops, "mode='queue' with ordered=True"),
            ("prefetch_total", prefetch_total, not pops and auto_commit, queued),
            ("prefetch_total_bytes", prefetch_total_bytes, not pops and auto_commit, queued),
            ("strategy", strategy, not pops, "mode='queue'; in mode='pop' no queue belongs to a member"),
            ("retry", retry, ordered or not broadcasting, "consumers that try again, not broadcasting without order"),
        ):
            if value is not None and not applies:
                raise ConfigError(f"{name} is for {where}. Leave it out")
        number = min(32, (os.cpu_count() or 1) + 4) if workers is None else check_whole("workers", workers, 1, 1_000)
        self.group = group
        self.ordered = ordered
        self.client_id = client_id_of(client_id)
        """Name of this consumer in its group."""
        self._broker = broker
        self._batch_size = check_whole("batch_size", batch_size, 1, 1_024)
        limits = Limits(
            messages=check_whole("prefetch", prefetch, 1, 65_535),
            size=check_whole("prefetch_bytes", prefetch_bytes, 1, 1 << 40),
            span=None if ordered else check_whole("max_span", 2000 if max_span is None else max_span, 1, 65_535),
            total=None if prefetch_total is None else check_whole("prefetch_total", prefetch_total, 1, 6_553_500),
            total_size=None
            if prefetch_total_bytes is None
            else check_whole("prefetch_total_bytes", prefetch_total_bytes, 1, 102_400 << 20),
            eager=not auto_commit,
        )
        timeout_ms = _milliseconds("consume_timeout", consume_timeout, 0.1, 7 * 86_400)
        self._subscriptions: dict[str, Subscription] = {}
        self._state: Literal["new", "running", "stopping", "stopped"] = "new"
        self._lock = Lock()
        """Guards the state and the subscriptions. Passed on to hooks, which may stop the consumer."""
        self._stopped = Gate()
        self._stopper: int | None = None
        self._wishes: SimpleQueue[None] = SimpleQueue()
        """Requests to stop. Not an event, whose lock is not reentrant: a signal may interrupt a wait for it."""
        self._all_ended = False
        self._left: BaseException | None = None
        """SystemExit or KeyboardInterrupt of a handler."""
        self._starts_with_topic = False
        self._notes: AttemptNotes | None = None
        """Notes of the messages in handlers, while it runs."""
        clock = broker.clock
        self._workers = Workers(f"mqstore-{group}", clock, number, self._exited, threads=not broker.own_clock)
        self._log = LimitedLog(f"group {group}", clock)
        self._handling = Handling(
            broker,
            group,
            batch=batch_size > 1,
            ordered=ordered,
            one_queue=not pops,
            interceptors=Interceptors(interceptors, self._log),
            on_error=on_error,
        )
        self._start = start
        self._retry = retry
        self._mode = Mode(mode, ordered, broadcasting)
        check_start(start)
        self._check_group()
        suspend_ms = None if suspend is None else _milliseconds("suspend", suspend, 0.01, 60)
        chosen = strategy_named("avg" if strategy is None else strategy)
        local = LocalProgress(broker, self.client_id, group, start) if broadcasting else None
        progress = local or GroupProgress(broker, group, self.client_id, start)
        self._own: OrderInfoTable | None = None
        context = Context(
            broker,
            group,
            self._workers,
            self._handling,
            batch_size=self._batch_size,
            limits=limits,
            ordered=ordered,
            broadcasting=broadcasting,
            timeout_ms=timeout_ms,
        )

        def new_engine() -> Assignment | PopEngine:
            if pops:
                return PopEngine(context, self.client_id, start=start, retry=retry)
            service: ConcurrentService | OrderlyService = ConcurrentService(context)
            if ordered:
                service = OrderlyService(context, suspend_ms=suspend_ms, auto_commit=auto_commit)
                self._own = service.own

            def changed() -> None:
                service.assignment.request_rebalance()

            seat = Membership(broker, group, self.client_id, self._mode, chosen, changed, retry=retry)
            service.assignment = Assignment(context, seat, progress, service)
            return service.assignment

        self._new_engine = new_engine
        self._engine = new_engine()

    def _check_group(self) -> None:
        """Raise an error if the group exists and must not be consumed in this way."""
        known = self._broker.groups.get(self.group)
        if known is None:
            check_group(self.group)
        elif self._mode.broadcasting:
            known.check_broadcast()
        else:
            check_order(known, self._mode.ordered)

    # -- subscriptions ----------------------------------------------------------------------------------------------

    @overload
    def subscribe(self, topic: str, handler: H, *, tags: str = "*", sql: str | None = None) -> H: ...

    @overload
    def subscribe(
        self, topic: str, handler: None = None, *, tags: str = "*", sql: str | None = None
    ) -> Callable[[H], H]: ...

    def subscribe(self, topic: str, handler: Handler | None = None, *, tags: str = "*", sql: str | None = None) -> Any:
        """Call `handler` with the messages of a topic. Without a handler, return a decorator.
        A second call for a topic replaces its handler and filter, even while running. Cached messages are not filtered
        again.

        `tags` is an expression such as "paid || refunded", `sql` an SQL92 expression over properties. The whole group
        skips other messages.

        Raises InvalidMessageError, FilterError and ConfigError. While running, raises SubscriptionConflictError if
        other members subscribe otherwise, and then nothing has changed.
        """
        if type(topic) is not str:
            raise ConfigError(
                f"a topic is a str, not {topic!r:.100}; a decorator is written @consumer.subscribe('topic')"
            )
        if handler is None:
            return partial(self._subscribe_here, topic, tags=tags, sql=sql)
        return self._subscribe_here(topic, handler, tags=tags, sql=sql)

    def _subscribe_here(self, topic: str, handler: H, /, *, tags: str, sql: str | None) -> H:
        check_handler(handler)
        new = Subscription(handler, wanted(self._broker, topic, tags, sql))
        with self._lock:
            self._change({**self._subscriptions, topic: new})
            if self._starts_with_topic and self._state == "new":
                self._lock.lend(self.start)
        return handler

    def unsubscribe(self, topic: str) -> None:
        """Stop handling a topic. Its queues are released as if another member took them."""
        with self._lock:
            self._change({name: each for name, each in self._subscriptions.items() if name != topic})

    def _change(self, after: dict[str, Subscription]) -> None:
        self._check_usable()
        if self._state == "running":
            self._lock.lend(partial(self._engine.subscribe, after))
        self._subscriptions = after

    # -- running ----------------------------------------------------------------------------------------------------

    def start(self) -> PushConsumer:
        """Start the consumer. After an error only a new group remains.
        Then it may be called again, unless a hook has stopped the consumer. Raises ConfigError without subscriptions or
        if it is running, and GroupInUseError or SubscriptionConflictError if the group's other members consume
        otherwise."""
        with self._lock:
            self._check_usable()
            if self._state == "running":
                raise ConfigError("the consumer is running already")
            if not self._subscriptions:
                raise ConfigError("the consumer handles nothing: subscribe to a topic first")
            # Not in the constructor, which must change nothing.
            self._check_group()
            enter_group(self._broker, self.group, ordered=self._mode.ordered, start=self._start, retry=self._retry)
            try:
                if not self._mode.broadcasting:  # which has no attempts
                    self._take_notes()
                self._lock.lend(partial(self._engine.start, self._subscriptions))
                self._check_usable()  # a hook may have stopped it
            except BaseException:
                self._take_back()
                raise
            self._state = "running"
            self._sample()
            self._workers.start()
        return self

    def _take_back(self) -> None:
        """Undo a failed start, and be as new."""
        failed = self._engine
        failed.halt()
        try:
            failed.close()  # its timers and jobs do nothing any more
        finally:
            self._forget_notes()
            self._handling.suspects.desert(self._handling)
            self._engine = self._new_engine()
            self._engine.pause_as(failed)  # type: ignore[arg-type]  # of the same kind

    def _sample(self) -> None:
        self._handling.statistics.run_once(0)
        self._log.log_held()
        self._workers.later(_SAMPLE_MS, self._sample)

    def _check_usable(self) -> None:
        if self._lock.is_inherited:
            raise StoreClosedError(
                f"this consumer of group {self.group!r} is the parent's; a forked child makes its own"
            )
        if self._state in ("stopping", "stopped"):
            raise StoreClosedError(f"this consumer of group {self.group!r} was stopped; make a new one")

    def run_once(self) -> int | None:
        """Run due timers and handle new messages, on this thread, for a store with its own clock.
        Return when to call again (monotonic ms). Call `Broker.run_once` first."""
        return self._workers.run_once()

    def _stop_handlers(self) -> int:
        """Start no more handlers, without waiting. Return the number of handlers that run.
        The caller stops several consumers, and calls `stop` next."""
        if self._lock.is_inherited:
            return 0
        with self._lock:
            is_running = self._state == "running"
        if is_running:
            self._engine.halt()
            self._workers.halt()
        return len(self._workers.busy())

    def stop(self, timeout: Duration = 30) -> bool:
        """Start no more handlers, wait up to `timeout` seconds for running ones, and release everything.
        Return True if all have ended, offsets are on disk, and no thread is left. Repeating it is harmless. When called
        by a handler it does not wait for that handler."""
        timeout_s = seconds(timeout, "timeout")
        if self._lock.is_inherited:
            return True
        check_holds_none()
        with self._lock:
            state = self._state
            self._state = "stopped" if state in ("new", "stopped") else "stopping"
            self._all_ended = self._all_ended or state == "new"
        if state != "running":
            # The thread that stops it may be waiting for this thread's handler, or be this thread, in a signal handler.
            if state == "stopping" and not self._workers.is_mine() and self._stopper != threading.get_ident():
                self._stopped.wait(timeout_s)
            self._wishes.put(None)
            return self._all_ended
        self._stopper = threading.get_ident()
        ended = False
        try:
            self._engine.halt()
            ended = self._workers.stop(timeout_s)
            if not ended:
                # Without the number: consumers stopped one after the other share one timeout.
                _log.error(
                    "group %s: handlers still run after the timeout of stop(); their results are ignored", self.group
                )
        finally:
            # Also after Ctrl-C or similar: other members may have its queues from now on.
            self._all_ended = ended
            try:
                self._engine.close()
                if ended:  # otherwise the next process learns which messages the handlers had
                    self._forget_notes()
            finally:
                self._handling.close()
                self._log.close()
                with self._lock:
                    self._state = "stopped"
                self._stopped.open()
                self._wishes.put(None)
        return ended

    def _take_notes(self) -> None:
        """Have the workers note the messages in their handlers."""
        self._notes = self._broker.begun.open(self.group, len(self._workers.all), self._batch_size)
        for worker, cells in zip(self._workers.all, self._notes.workers, strict=True):
            worker.cells = cells

    def _forget_notes(self) -> None:
        if self._notes is not None:
            self._notes.close()
            self._notes = None

    def run(self, stop_timeout: Duration = 30) -> bool:
        """Start, wait for SIGINT or SIGTERM, and stop. Return the result of `stop`.
        Outside the main thread it waits for a `stop` from elsewhere. A second signal has its former effect. SystemExit
        or KeyboardInterrupt of a handler stops the consumer and is raised here, so the process ends with the requested
        code."""
        with at_signals(lambda: self._wishes.put(None)):
            self.start()
            try:
                while True:
                    try:
                        self._wishes.get(timeout=1.0)
                    except Empty:
                        continue
                    break
            finally:
                ended = self.stop(stop_timeout)
        if self._left is not None:
            raise self._left
        return ended

    def _run_on_loop(self, threads: int, exited: Callable[[BaseException], bool]) -> None:
        """Prepare a consumer that was not started for handlers that run on an event loop, for `mqstore.aio`.

        Without `around_consume` hooks, for which a thread waits for each handler, at most `threads` threads begin and
        settle handlers. `exited` is called on a worker with an error that ended its job. If it returns False, the
        consumer stops by itself.
        """
        self._workers.on_exit = lambda error: None if exited(error) else self._exited(error)
        if not self._handling.hooks.around_consume:
            self._workers.threads = min(threads, self._workers.threads)

    def _exited(self, error: BaseException) -> None:
        """Stop because a handler raised SystemExit or KeyboardInterrupt. Its messages are not settled."""
        _log.error("group %s: a handler raised %r, so the consumer stops", self.group, error)
        self._left = self._left or error
        self._engine.halt()  # before another worker begins the next message
        if self._broker.own_clock:
            self.stop()
            return
        threading.Thread(target=self.stop, name=f"mqstore-{self.group}-stop", daemon=True).start()

    def __enter__(self) -> PushConsumer:
        """Start it, or let the first `subscribe` start it.
        In the second case, a member of a larger group may subscribe to one topic only. With more, it would at first
        differ from the running members."""
        if self._subscriptions:
            self.start()
        else:
            self._check_usable()
            self._starts_with_topic = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # -- manual control ---------------------------------------------------------------------------------------------

    def pause(self, *queues: QueueRef) -> None:
        """Stop fetching from these queues, or from all if none is named. They stay assigned.
        Messages that are here are still handled."""
        self._engine.pause(queues)

    def resume(self, *queues: QueueRef) -> None:
        """Fetch from these queues again, or from all if none is named."""
        self._engine.resume(queues)

    def assignment(self) -> frozenset[QueueRef]:
        """Return the queues that are handled here now. In mode "pop" there are none."""
        return self._engine.owned()

    def seek(self, queue: QueueRef, to: int | Start) -> None:
        """Continue at another offset of an assigned queue. Cached messages and their commits are dropped.
        Raises ConfigError for a queue that is not assigned, and OffsetOutOfRangeError."""
        self._engine.seek(as_queue(queue), to)

    def stats(self) -> ConsumerStats:
        """Return a snapshot of the statistics."""
        counted = self._handling.statistics.snapshot()
        infos = self._engine.infos()
        return ConsumerStats(
            group=self.group,
            client_id=self.client_id,
            topics=topic_stats(counted),
            queues={
                info.queue: QueueStats(info, committed, self._broker.max_offset(*info.queue))
                for info, committed in infos
            },
            running=len(self._workers.busy()),
            suspended=self._suspended({info.queue: committed for info, committed in infos}),
        )

    def _suspended(self, committed: Mapping[QueueRef, int | None]) -> dict[QueueRef, BlockedQueue]:
        if self._own is None:
            return self._broker.suspended(self.group)
        own = self._own.suspended(self.group, lambda key: committed.get(QueueRef(key.topic, key.queue_id)))
        return {QueueRef(*queue): suspended for queue, suspended in own.items()}

    def __repr__(self) -> str:
        return f"<PushConsumer {self.client_id} of group {self.group!r}, {self._state}>"


def _milliseconds(name: str, value: Duration, least_s: float, most_s: float) -> int:
    wanted = seconds(value, name)
    if not least_s <= wanted <= most_s or math.isinf(wanted):
        raise ConfigError(f"{name} is {value!r}; give {least_s:g} to {most_s:g} seconds")
    return round(wanted * 1000)
