"""Messages handled by many workers at once, in no order (clients#concurrent, clients#overdue).

    pulled ---> chunk ---> worker, and others as many as are worth waking ---> handler
                                 done      settled together, when the chunk ends or 10 ms have passed
                                 failed    sent back, and settled; if that fails, again here after 5 s
                                 hung      after `consume_timeout` sent back and settled; its end counts for nothing

A chunk is what one pull brought (chunks.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from mqstore.broker.begun import PROCESS_ENDED
from mqstore.broker.broker import Broker
from mqstore.broker.names import is_dlq_topic
from mqstore.client.assignment import Assignment
from mqstore.client.chunks import SETTLE_S, Chunk, Helpers, next_of
from mqstore.client.handling import Failure, Handling, Subscription
from mqstore.client.interceptors import Settled
from mqstore.client.overdue import Overdue
from mqstore.client.processqueue import ProcessQueue
from mqstore.client.shown import as_sent, shown
from mqstore.client.workers import Flow, Worker, Workers
from mqstore.errors import ConfigError, StoreClosedError
from mqstore.log.message import Message

__all__ = ["ConcurrentService"]

SEND_BACK_AGAIN_MS = 5_000
NOBODY_AGAIN_MS = 1_000
"""When to look again whether anybody handles what nobody did: by then its queue is gone, as a rule."""
_HAND_OVER_S = 0.4


class _Chunk(Chunk[Message, Message]):
    """Messages of one queue that were pulled together."""

    __slots__ = ("alone", "first", "queue", "until")

    def __init__(self, queue: ProcessQueue, messages: Sequence[Message]) -> None:
        super().__init__(messages)
        self.queue = queue
        self.first = messages[0]
        self.until: float | None = None
        """When to leave it undone, once its queue is to go."""
        self.alone = False
        """It is a suspected message, and begins when it may (`Handling.in_turn`)."""


class ConcurrentService:
    """What a push consumer does with messages unless it is ordered."""

    ordered = False

    def __init__(
        self,
        broker: Broker,
        group: str,
        workers: Workers,
        handling: Handling,
        *,
        batch_size: int,
        consume_timeout_ms: int,
        broadcasting: bool,
    ) -> None:
        self.assignment: Assignment
        self._broker = broker
        self._group = group
        self._workers = workers
        self._handling = handling
        self._batch_size = batch_size
        self._timeout_ms = consume_timeout_ms
        self._broadcasting = broadcasting
        self._helpers = Helpers(workers, batch_size)
        self._overdue: Overdue[_Chunk] = Overdue(
            workers,
            handling,
            broker.store.clock,
            consume_timeout_ms,
            "; it is sent back",
            held_up=self._held_up,
            overdue=self._time_is_up,
        )

    def accept(self, worker: Worker, queue: ProcessQueue, messages: Sequence[Message], idle: bool) -> Flow[None]:
        if queue.attempts:
            messages = self._with_attempts(queue, messages)
            if not messages:
                return _no_work()
        chunk = _Chunk(queue, messages)
        self._helpers.begin(chunk, self._run)
        return self._run(chunk, worker)

    def _with_attempts(self, queue: ProcessQueue, messages: Sequence[Message]) -> Sequence[Message]:
        """As handlers are to see them: with the attempts that ended with a process. Without those that have had their
        last, which become dead letters."""
        limit = self._broker.groups.need(self._group).max_attempts
        live = []
        for message in messages:
            ended = queue.attempts.get(message.offset, 0)
            times = message.reconsume_times + ended
            if ended and limit is not None and times >= limit:
                last = shown(message, message.topic, times - 1)
                self._handling.has_handled(last, [last])
                self._give_up(queue, last, PROCESS_ENDED, 0.0, delay_level=-1)
            else:
                live.append(shown(message, message.topic, times))
        return live

    def _later(self, chunk: _Chunk, delay_ms: int) -> None:
        self._workers.later(delay_ms, partial(self._workers.submit, partial(self._run, chunk)))

    def _begin_alone(self, chunk: _Chunk) -> None:
        """Have a suspected message handled when that may begin. Until then it holds no worker and no queue."""
        chunk.alone = True
        self._handling.in_turn(chunk, partial(self._workers.submit, partial(self._run, chunk)))

    # -- a worker at a chunk ----------------------------------------------------------------------------------------

    def _run(self, chunk: _Chunk, worker: Worker) -> Flow[None]:
        queue = chunk.queue
        if chunk.alone and not self._handling.is_in_turn(chunk):
            self._begin_alone(chunk)
            return
        if not chunk.items or not self.assignment.enter(queue, chunk.first.offset):
            self._handling.leave(chunk)
            return
        self._overdue.begin(worker, chunk, lambda: queue.closing)
        try:
            yield from self._handle(chunk, worker)
        except Exception as error:  # no handler's: memory has run out, say. What was in hand would lie here for ever
            self._handling.report(
                error, "what is to be done around handlers failed; the queue is begun again", queue.queue
            )
            self._workers.later(NOBODY_AGAIN_MS, partial(self.assignment.begin_again, queue))
        finally:
            self._overdue.end(worker)
            try:
                self._settle(chunk)
            finally:
                self.assignment.leave(queue)
                if chunk.alone:
                    self._handling.leave(chunk)

    def _handle(self, chunk: _Chunk, worker: Worker) -> Flow[None]:
        queue, handling, helpers, size = chunk.queue, self._handling, self._helpers, self._batch_size
        retried = queue.retries
        watched = handling.watches()
        each = bool(handling.hooks.on_settle) or retried
        subscription: Subscription | None = None
        handled, took_ms = 0, 0.0
        settled_at = time.perf_counter()
        while (not queue.closing or _may_end(chunk)) and (batch := next_of(chunk.items, size)):
            if retried:
                batch = _of_one_topic(self._group, chunk.items, batch)
            if watched:
                number = handling.together(batch)
                chunk.items.extendleft(reversed(batch[number:]))
                batch = batch[:number]
                if not chunk.alone and handling.is_suspect(batch[0]):
                    self._begin_alone(_Chunk(queue, batch))
                    continue
            if retried or subscription is None:
                subscription = self.assignment.subscription_of(queue, batch[0])
            if subscription is None and retried:
                self._failed(queue, batch, Failure("retry", "nobody subscribes to its topic any more"), 0.0)
                continue
            if subscription is None:  # the queue is about to go, and its messages stay what they are
                chunk.items.extendleft(reversed(batch))
                self._later(chunk, NOBODY_AGAIN_MS)
                break
            ended = handling.call(worker, subscription, batch)
            failure, call_ms = ended if isinstance(ended, tuple) else (yield from ended)
            if chunk.alone:
                handling.has_handled(chunk, batch)
            if worker.lapsed == worker.calls:
                handling.log.say(
                    logging.WARNING, "a handler ended after consume_timeout; its result does not count", at=batch
                )
            elif queue.dropped:  # it comes again, to whoever has the queue now
                pass
            elif failure is not None:
                self._failed(queue, batch, failure, call_ms)
            else:
                chunk.done.extend(batch)
                if each:
                    handling.settled(batch, "ack", call_ms)
                else:
                    handled += len(batch)
                    took_ms += call_ms
            now = time.perf_counter()
            if call_ms > SETTLE_S * 1000 or now - settled_at > SETTLE_S:
                self._settle(chunk)
                settled_at, subscription = now, None  # there may be another handler
            helpers.pace_ms += (call_ms - helpers.pace_ms) / 16
        if handled:
            handling.counted(queue.queue.topic, handled, took_ms)

    def _settle(self, chunk: _Chunk) -> None:
        done = next_of(chunk.done, len(chunk.done))
        if done:
            self.assignment.settle(chunk.queue, done)

    # -- what failed ------------------------------------------------------------------------------------------------

    def _failed(self, queue: ProcessQueue, batch: Sequence[Message], failure: Failure, took_ms: float) -> None:
        failed = batch if failure.failed is None else failure.failed
        offsets = {message.offset for message in failed}
        good = [message for message in batch if message.offset not in offsets]
        if good:
            self._handling.settled(good, "ack", took_ms)
            self.assignment.settle(queue, good)
        if queue.dropped:  # it comes again, to whoever has the queue now
            return
        for message in failed:
            if self._broadcasting:
                what = "it failed, and is passed over: broadcasting has no retries"
                self._handling.log.say(logging.WARNING, what, at=message)
                self._end(queue, message, "dlq", took_ms)
            else:
                self._send_back(queue, message, failure, took_ms)

    def _send_back(self, queue: ProcessQueue, message: Message, failure: Failure, took_ms: float) -> None:
        if not queue.contains(message):  # its time was up, and it was sent back then
            return
        try:
            outcome = self._go_back(message, failure)
        except StoreClosedError:
            return
        except Exception as error:
            # It stays here, and holds the position: what cannot be sent back is not let go of.
            self._handling.report(error, "it failed and cannot be sent back, here again in 5 s", message)
            self._later(_Chunk(queue, [message]), SEND_BACK_AGAIN_MS)
            return
        self._end(queue, message, outcome, took_ms)

    def _go_back(self, message: Message, failure: Failure) -> Settled:
        if failure.kind == "reject":
            return self._file(message, failure.reason, delay_level=-1)
        if failure.delay_s is not None:
            try:
                return self._file(message, failure.reason, delay=failure.delay_s)
            except ConfigError as error:  # longer than the store delays anything, say: that will not change
                self._handling.report(error, "it comes again as the retry policy says", message)
        return self._file(message, failure.reason)

    def _file(self, message: Message, reason: str, **delay: Any) -> Settled:
        """Have the broker put a message into the retry topic, or to the dead letters; which it was."""
        receipt = self._broker.send_back(
            self._group, message.physical_offset, attempts=message.attempt, reason=reason, **delay
        )
        return "dlq" if is_dlq_topic(receipt.queue.topic) else "retry"

    def _end(self, queue: ProcessQueue, message: Message, outcome: Settled, took_ms: float) -> None:
        self._handling.settled([message], outcome, took_ms)
        self.assignment.settle(queue, [message])

    # -- what takes long --------------------------------------------------------------------------------------------

    def _held_up(self, worker: Worker, chunk: _Chunk) -> None:
        """Let others have the rest of a chunk."""
        if chunk.items or chunk.done:
            self._settle(chunk)
            self._helpers.ask(chunk, len(chunk.items), self._run)

    def _time_is_up(self, chunk: _Chunk, messages: Sequence[Message]) -> None:
        """A handler has had these for too long: they go back, whatever comes of it."""
        for message in messages:
            if self._broadcasting:
                self._end(chunk.queue, message, "dlq", self._timeout_ms)
            else:
                self._give_up(chunk.queue, message, "its handler hung", self._timeout_ms)

    def _give_up(
        self, queue: ProcessQueue, message: Message, reason: str, took_ms: float, delay_level: int = 0
    ) -> None:
        """Send back what no handler here is to have again: its handler hangs, or its last attempt ended with a process.
        So this is tried until it is done."""
        if queue.dropped or not queue.contains(message):
            return
        try:
            outcome = self._file(message, reason, delay_level=delay_level)
        except StoreClosedError:
            return
        except Exception as error:
            self._handling.report(error, f"{reason}, and it cannot be sent back, again in 5 s", message)
            again = partial(self._give_up, queue, message, reason, took_ms, delay_level)
            self._workers.later(SEND_BACK_AGAIN_MS, again)
            return
        self._end(queue, message, outcome, took_ms)


def _no_work() -> Flow[None]:
    yield from ()


def _may_end(chunk: _Chunk) -> bool:
    """Of a queue that is to go, what stands before a later chunk that was begun is done, too: else the position would
    stay here, and the next owner would do all of that again. For a moment: a handler that is slow must not keep `stop`
    waiting for as many messages as there are."""
    queue = chunk.queue
    if queue.dropped or chunk.first.offset >= queue.begun:
        return False
    now = time.perf_counter()
    if chunk.until is None:
        chunk.until = now + _HAND_OVER_S
    return now < chunk.until


def _of_one_topic(group: str, rest: deque[Message], batch: list[Message]) -> list[Message]:
    """Of a batch of retries those of the first one's topic, as sent; the others go back to the front of `rest`."""
    shown = [as_sent(message, group) for message in batch]
    end = next((i for i, message in enumerate(shown) if message.topic != shown[0].topic), len(shown))
    rest.extendleft(reversed(batch[end:]))
    return shown[:end]
