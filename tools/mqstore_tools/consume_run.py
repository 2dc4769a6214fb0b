"""A run of `mqstore consume`, and its push consumer.

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
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, Literal

from mqstore import Interceptor, Message, QueueRef, Reject, RetryPolicy, Store, cancelled
from mqstore.admin import retry_topics
from mqstore.errors import GroupNotFoundError
from mqstore_tools.actions import Commands, Enough, Failed, Printer
from mqstore_tools.render import note

Start = Literal["earliest", "latest"] | datetime

_NO_TIMEOUT_S: Final = 7 * 86_400
"""Handler timeout of the consumer. It is long because --exec-timeout limits commands."""
_LOOK_S: Final = 0.02
_HEAR_S: Final = 0.5
"""Longest wait of the main thread. A signal that comes just before a wait is handled after it."""


@dataclass(frozen=True)
class Asked:
    """Options for a source."""

    topics: tuple[str, ...]
    group: str
    ordered: bool | None
    """None means the group's setting."""
    tags: str
    sql: str | None
    start: Start | None
    """None means the group's setting."""
    workers: int


class Run(Interceptor):
    """State that all threads of a run share: counts, the first error, and the request to stop."""

    def __init__(self, work: Printer | Commands, limit: int | None) -> None:
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

    def do(self, message: Message) -> None:
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
        """Count a settled message."""
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


def supervise(run: Run, source: Source, idle_exit: float | None) -> None:
    """Start the source, wait for a reason to stop, and stop it."""
    with _signals(run.bell):
        try:
            source.start()
        except BaseException:
            source.stop()
            raise
        run.active_at = time.monotonic()
        signals = 0
        while not run.stopping.is_set():
            if _ring(run.bell, idle_exit, run) == "signal":
                signals += 1
                run.stop("signal")
            elif idle_exit is not None and run.idle_s() >= idle_exit and (idle_exit or source.drained()):
                run.stop("idle")
        stopper = threading.Thread(target=_stop, args=(run, source), name="mqstore-consume-stop", daemon=True)
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


def _stop(run: Run, source: Source) -> None:
    try:
        source.stop()
    except BaseException as error:
        run.fail(error)
    run.bell.put("stopped")


@contextmanager
def _signals(bell: SimpleQueue[str]) -> Iterator[None]:
    """Put the first two of SIGINT and SIGTERM into `bell`. The third ends the process, which loses nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    left = 2

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal left
        left -= 1
        if not left:
            for each in before:
                signal.signal(each, signal.SIG_DFL)
        bell.put("signal")

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, ring)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _NotOurs(logging.Filter):
    """Filter that drops log records about `Enough`, which is not a failure."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and any(isinstance(each, Enough) for each in record.args))


@contextmanager
def quiet() -> Iterator[None]:
    logger, ours = logging.getLogger("mqstore"), _NotOurs()
    logger.addFilter(ours)
    try:
        yield
    finally:
        logger.removeFilter(ours)


class Source:
    """Push consumer whose handler calls the run."""

    def __init__(self, store: Store, run: Run, asked: Asked, policy: RetryPolicy | None) -> None:
        self.broker = store.broker
        self.run = run
        self.asked = asked
        self._held: set[QueueRef] = set()
        """Ordered queues blocked by a message that waits for its next attempt."""
        for topic in asked.topics:
            if self.broker.topics.get(topic) is None:
                note(f"topic {topic} does not exist yet; waiting for it")
        self._consumer = store.push_consumer(
            asked.group,
            workers=asked.workers,
            ordered=asked.ordered,
            start=asked.start,
            retry=policy,
            consume_timeout=_NO_TIMEOUT_S,
            interceptors=[run],
        )
        for topic in asked.topics:
            self._consumer.subscribe(topic, self._handle, tags=asked.tags, sql=asked.sql)

    def _handle(self, message: Message) -> None:
        self._held.discard(message.queue)
        try:
            self.run.do(message)
        except Enough:
            while not cancelled():  # the consumer stops at SystemExit, without waiting for messages that still run
                time.sleep(_LOOK_S / 4)
            raise
        except Failed:
            if self._consumer.ordered:
                self._held.add(message.queue)
            raise

    def start(self) -> None:
        self._consumer.start()

    def stop(self) -> None:
        """Stop, and return when running handlers have ended and committed offsets are on disk."""
        self._consumer.stop(float("inf"))

    def drained(self) -> bool:
        """Return True if no message can be delivered now. Failed ones wait for their next attempt."""
        if not self._consumer.assignment().issuperset(self.queues()):
            return False
        left = [ref for ref, lag in self.lags().items() if lag and ref not in self._held]
        # The lag of a queue that was read to its end is retries that wait for their time.
        return all(self.broker.committed(self.asked.group, *ref) == self.broker.max_offset(*ref) for ref in left)

    def lags(self) -> dict[QueueRef, int]:
        """Return the number of messages not done, by wanted queue. Empty until the group exists."""
        topics, group = self.asked.topics, self.asked.group
        wanted = {*topics, *(name for topic in topics for name in retry_topics(group, topic))}
        try:
            lags = self.broker.lag(group)
        except GroupNotFoundError:
            return {}
        return {ref: lag for ref, lag in lags.items() if ref.topic in wanted}

    def lag(self) -> int:
        return sum(self.lags().values())

    def queues(self) -> Iterator[QueueRef]:
        for topic in self.asked.topics:
            if (config := self.broker.topics.get(topic)) is not None:
                yield from (QueueRef(topic, i) for i in range(config.read_queues))
