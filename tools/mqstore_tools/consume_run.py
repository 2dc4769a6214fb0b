"""A run of `mqstore consume`: a push consumer, and its supervision.

    message --> ticket --> work --> settled
                  | none left: --max-messages, a signal, an error
                  +--> Enough: not settled, redelivered, no attempt counted

The main thread only supervises: signals, --idle-exit and --max-messages end the run. The consumer has its own threads.
A signal handler only puts an item into `bell`. It must not take a lock, which the main thread may hold.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Final

from mqstore import Interceptor, Message, QueueRef, Reject, RetryPolicy, Store, cancelled
from mqstore.admin import retry_topics
from mqstore.errors import GroupNotFoundError
from mqstore_tools.actions import Commands, Enough, Failed, Printer
from mqstore_tools.render import note
from mqstore_tools.session import Position
from mqstore_tools.shared import on_signals

_NO_TIMEOUT_S: Final = 7 * 86_400
"""Handler timeout of the consumer. It is long because --exec-timeout limits commands."""
_SIGNALS: Final = 2
_LOOK_S: Final = 0.02
_HEAR_S: Final = 0.5
"""Longest wait of the main thread. A signal that comes just before a wait is handled after it."""


class Run(Interceptor):
    """A push consumer that does `work` on each message, and the state of the run that all threads share.

    `ordered`, `start` and `retry` None mean the group's setting."""

    def __init__(
        self,
        store: Store,
        topics: tuple[str, ...],
        group: str,
        work: Printer | Commands,
        limit: int | None,
        *,
        tags: str,
        sql: str | None,
        ordered: bool | None,
        start: Position | None,
        workers: int,
        retry: RetryPolicy | None,
    ) -> None:
        self.topics = topics
        self.group = group
        self.work = work
        self.bell: SimpleQueue[str] = SimpleQueue()
        """Wakes the main thread. A SimpleQueue, because its `put` is safe in a signal handler."""
        self.stopping = threading.Event()
        self.why = ""
        self.error: BaseException | None = None
        self.taken = 0
        self.outcomes: Counter[str] = Counter()
        self.failing: set[str] = set()
        """Messages whose last attempt failed and that will be redelivered."""
        self.running = 0
        self.active_at = time.monotonic()
        self._limit = limit
        self._lock = threading.Lock()
        self._held: set[QueueRef] = set()
        """Ordered queues blocked by a message that waits for its next attempt."""
        self._broker = store.broker
        for topic in topics:
            if self._broker.topics.get(topic) is None:
                note(f"topic {topic} does not exist yet; waiting for it")
        self.consumer = store.push_consumer(
            group,
            workers=workers,
            ordered=ordered,
            start=start,
            retry=retry,
            consume_timeout=_NO_TIMEOUT_S,
            interceptors=[self],
        )
        for topic in topics:
            self.consumer.subscribe(topic, self._handle, tags=tags, sql=sql)

    def stop(self, why: str) -> None:
        """Handle no more messages. The first reason is kept."""
        with self._lock:
            self._stop(why)

    def _stop(self, why: str) -> None:
        if not self.stopping.is_set():
            self.why = why
            self.stopping.set()
            self.bell.put("stop")

    def fail(self, error: BaseException) -> None:
        """Stop because of an error that no message caused."""
        with self._lock:
            if self.error is None:
                self.error = error
            self._stop("error")

    def _handle(self, message: Message) -> None:
        self._held.discard(message.queue)
        try:
            self._do(message)
        except Enough:
            while not cancelled():  # the consumer stops at SystemExit, without waiting for messages that still run
                time.sleep(_LOOK_S / 4)
            raise
        except Failed:
            if self.consumer.ordered:
                self._held.add(message.queue)
            raise

    def _do(self, message: Message) -> None:
        """Handle a message. Raises Failed or Reject, and Enough to release it."""
        with self._lock:
            if self.stopping.is_set():
                raise Enough
            self.taken += 1
            self.running += 1
            if self.taken == self._limit:
                self._stop("max-messages")
        try:
            self.work(message)
        except (Failed, Reject, Enough):
            raise
        except BaseException as error:
            self.fail(error)
            raise Enough from error
        finally:
            with self._lock:
                self.running -= 1
                self.active_at = time.monotonic()

    def on_settle(self, message: Message, outcome: str, seconds: float) -> None:
        key = message.system_properties.get("ORIGIN_MESSAGE_ID", message.message_id)
        with self._lock:
            self.outcomes[outcome] += 1
            if outcome == "retry":
                self.failing.add(key)
            else:
                self.failing.discard(key)

    def idle_s(self) -> float:
        """Return the time in seconds since a message was handled."""
        return 0.0 if self.running else time.monotonic() - self.active_at

    def end(self) -> None:
        """Stop the consumer, and return when running handlers have ended and committed offsets are on disk."""
        self.consumer.stop(float("inf"))

    def drained(self) -> bool:
        """Return True if no message can be delivered now. Failed ones wait for their next attempt."""
        if not self.consumer.assignment().issuperset(self._queues()):
            return False
        left = [ref for ref, lag in self._lags().items() if lag and ref not in self._held]
        # The lag of a queue that was read to its end is retries that wait for their time.
        return all(self._broker.committed(self.group, *ref) == self._broker.max_offset(*ref) for ref in left)

    def _queues(self) -> Iterator[QueueRef]:
        for topic in self.topics:
            if (config := self._broker.topics.get(topic)) is not None:
                yield from (QueueRef(topic, i) for i in range(config.read_queues))

    def _lags(self) -> dict[QueueRef, int]:
        """Return the number of messages not done, by wanted queue. Empty until the group exists."""
        wanted = {*self.topics, *(name for topic in self.topics for name in retry_topics(self.group, topic))}
        try:
            lags = self._broker.lag(self.group)
        except GroupNotFoundError:
            return {}
        return {ref: lag for ref, lag in lags.items() if ref.topic in wanted}

    def lag(self) -> int:
        return sum(self._lags().values())


def supervise(run: Run, idle_exit: float | None) -> None:
    """Start the consumer, wait for a reason to stop, and stop it."""
    heard: list[int] = []

    def ring(number: int, _: object) -> None:
        heard.append(number)
        if len(heard) == _SIGNALS:  # the third ends the process, which loses nothing
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
        run.bell.put("signal")

    with on_signals(ring):
        try:
            run.consumer.start()
        except BaseException:
            run.end()
            raise
        run.active_at = time.monotonic()
        signals = 0
        while not run.stopping.is_set():
            if _ring(run.bell, idle_exit, run) == "signal":
                signals += 1
                run.stop("signal")
            elif idle_exit is not None and run.idle_s() >= idle_exit and (idle_exit or run.drained()):
                run.stop("idle")
        stopper = threading.Thread(target=_stop, args=(run,), name="mqstore-consume-stop", daemon=True)
        stopper.start()
        if signals and run.running:
            note(f"waiting for {run.running} running messages; interrupt again to kill them")
        while (word := _ring(run.bell, None, run)) != "stopped":
            signals += word == "signal"
            if signals > 1:
                run.work.kill()
        stopper.join()


def _ring(bell: SimpleQueue[str], idle_exit: float | None, run: Run) -> str:
    wait_s = _HEAR_S if idle_exit is None else max(_LOOK_S, min(idle_exit - run.idle_s(), _HEAR_S))
    try:
        return bell.get(timeout=wait_s)
    except Empty:
        return ""


def _stop(run: Run) -> None:
    try:
        run.end()
    except BaseException as error:
        run.fail(error)
    run.bell.put("stopped")


@contextmanager
def quiet() -> Iterator[None]:
    """Drop log records about `Enough`, which is not a failure."""

    def is_failure(record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and any(isinstance(each, Enough) for each in record.args))

    logger = logging.getLogger("mqstore")
    logger.addFilter(is_failure)
    try:
        yield
    finally:
        logger.removeFilter(is_failure)
