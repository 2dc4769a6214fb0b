"""Service that has many workers handle messages, in no order (clients#concurrent, clients#overdue).

pulled ---> chunk ---> worker, and others as many as are worth waking ---> handler
                             done      settled together (batches.py)
                             failed    sent back, and settled; if that fails, again here after 5 s
                             hung      after `consume_timeout` sent back and settled; its end counts for nothing
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from mqstore.broker.redelivery.reason import PROCESS_ENDED
from mqstore.broker.tables.names import is_dlq_topic
from mqstore.client.interceptors import Settled
from mqstore.client.pop.delivery import as_sent, shown
from mqstore.client.push.assignment import Assignment
from mqstore.client.push.batches import NOBODY_AGAIN_MS, Chunk, ChunkRunner
from mqstore.client.push.handler_call import Failure
from mqstore.client.push.processqueue import ProcessQueue
from mqstore.client.push.workers import Flow, Worker
from mqstore.errors import ConfigError, StoreClosedError
from mqstore.log.message import Message

SEND_BACK_AGAIN_MS = 5_000
_HAND_OVER_S = 0.4


class _Chunk(Chunk):
    """Messages of one queue that were pulled together."""

    __slots__ = ("first", "queue", "until")

    def __init__(self, queue: ProcessQueue, messages: Sequence[Message]) -> None:
        super().__init__(queue, queue.queue.topic, messages, apart=queue.retries)
        self.queue = queue
        self.first = messages[0].offset
        self.until: float | None = None
        """Time at which to leave the chunk undone, once its queue must leave."""

    def may_end(self) -> bool:
        """Return True for a short time if a later chunk of the queue was started.

        Otherwise the position would stay before this chunk, and the next owner of the queue would repeat the later
        messages. The time is short because `stop` waits: a slow handler must not get all messages."""
        if self.queue.dropped or self.first >= self.queue.begun:
            return False
        now = time.perf_counter()
        if self.until is None:
            self.until = now + _HAND_OVER_S
        return now < self.until


class ConcurrentService(ChunkRunner[_Chunk]):
    assignment: Assignment

    def accept(self, worker: Worker, queue: ProcessQueue, messages: Sequence[Message], idle: bool) -> Flow[None]:
        if queue.attempts:
            messages = self._with_attempts(queue, messages)
            if not messages:
                return
        if queue.retries:
            messages = [as_sent(message, self._group) for message in messages]
        yield from self.begin(_Chunk(queue, messages), worker)

    def _with_attempts(self, queue: ProcessQueue, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with the attempts that ended with a process counted in.
        Messages that have had their last attempt are left out and become dead letters."""
        limit = self._broker.groups.require(self._group).max_attempts
        live = []
        for message in messages:
            ended = queue.attempts.get(message.offset, 0)
            times = message.reconsume_times + ended
            if ended and limit is not None and times >= limit:
                last = shown(message, message.topic, times - 1)
                self._handling.has_handled(last, [last])
                self._send_back(queue, last, Failure("reject", PROCESS_ENDED.text), 0.0, again_here=False)
            else:
                live.append(shown(message, message.topic, times))
        return live

    # -- a worker at a chunk ----------------------------------------------------------------------------------------

    def run(self, chunk: _Chunk, worker: Worker) -> Flow[None]:
        if not chunk.items or not self.assignment.acquire(chunk.queue, chunk.first):
            self._handling.suspects.release(chunk)
            return
        try:
            yield from self.work(chunk, worker)
        finally:
            self.assignment.release(chunk.queue)

    def part(self, chunk: _Chunk, messages: Sequence[Message]) -> _Chunk:
        return _Chunk(chunk.queue, messages)

    def settle(self, chunk: _Chunk) -> bool:
        """Settle the handled messages of a chunk. Return True: the worker continues in any case."""
        done, took_ms = chunk.take_done()
        if done and self.assignment.settle(chunk.queue, done):
            self._handling.settled(done, "ack", took_ms)
        return True

    def unwanted(self, chunk: _Chunk, messages: Sequence[Message]) -> bool:
        """Deal with messages of a topic without subscription. A retry counts as failed again.
        Other messages wait, since their queue is about to leave."""
        if chunk.queue.retries:
            return self.failed(chunk, messages, Failure("retry", "nobody subscribes to its topic any more"), 0.0)
        chunk.items.extendleft(reversed(messages))
        self._workers.later(NOBODY_AGAIN_MS, partial(self.submit, chunk))
        return False

    def broke(self, chunk: _Chunk, error: Exception) -> None:
        """Begin the queue again after an error outside of handlers, such as a full memory.
        The messages that the worker had would never be handled otherwise."""
        what = "settling or committing messages failed; restarting the queue"
        self._handling.report(error, what, chunk.queue.queue)
        queue = chunk.queue
        self._workers.later(NOBODY_AGAIN_MS, lambda: self.assignment.begin_again(queue, queue.position()))

    # -- failed messages --------------------------------------------------------------------------------------------

    def failed(
        self, chunk: _Chunk, messages: Sequence[Message], failure: Failure, each_ms: float, *, again_here: bool = True
    ) -> bool:
        """Send the messages back, or pass over them."""
        for message in messages:
            if self._context.broadcasting:
                what = "it failed, and is passed over: broadcasting has no retries"
                self._handling.log.say(logging.WARNING, what, at=message)
                self._end(chunk.queue, message, "dlq", each_ms)
            else:
                self._send_back(chunk.queue, message, failure, each_ms, again_here=again_here)
        return True

    def _send_back(
        self, queue: ProcessQueue, message: Message, failure: Failure, took_ms: float, *, again_here: bool = True
    ) -> None:
        """Send a message back and settle it, unless it was sent back before, as one whose handler hung.
        If that fails, a handler has it again in 5 s. With `again_here` false no handler here may, and this repeats it:
        the handler still hangs, or the last attempt ended with a process."""
        if queue.dropped or not queue.contains(message):
            return
        try:
            outcome = self._go_back(message, failure)
        except StoreClosedError:
            return
        except Exception as error:
            # The message stays here and holds the position, so that it is not lost.
            self._handling.report(error, "it cannot be sent back, again in 5 s", message)
            again = partial(self._send_back, queue, message, failure, took_ms, again_here=False)
            if again_here:
                again = partial(self.submit, _Chunk(queue, [message]))
            self._workers.later(SEND_BACK_AGAIN_MS, again)
            return
        self._end(queue, message, outcome, took_ms)

    def _go_back(self, message: Message, failure: Failure) -> Settled:
        if failure.kind == "reject":
            return self._file(message, failure.reason, delay_level=-1)
        if failure.delay_s is not None:
            try:
                return self._file(message, failure.reason, delay=failure.delay_s)
            except ConfigError as error:  # perhaps above the longest delay of the store, now and later
                self._handling.report(error, "it is redelivered as the retry policy says", message)
        return self._file(message, failure.reason)

    def _file(self, message: Message, reason: str, **delay: Any) -> Settled:
        """Have the broker put a message into the retry topic or the dead letters. Return which."""
        receipt = self._broker.send_back(self._group, message, attempts=message.attempt, reason=reason, **delay)
        return "dlq" if is_dlq_topic(receipt.queue.topic) else "retry"

    def _end(self, queue: ProcessQueue, message: Message, outcome: Settled, took_ms: float) -> None:
        self._handling.settled([message], outcome, took_ms)
        self.assignment.settle(queue, [message])

    def overdue(self, chunk: _Chunk, messages: Sequence[Message]) -> None:
        """Send back messages that a handler has had for too long. Its result no longer counts."""
        hung = Failure("retry", "its handler hung")
        self.failed(chunk, messages, hung, self._context.timeout_ms, again_here=False)
