"""Service that handles messages in order, one batch after the other in each queue (clients#orderly).

    task of a queue:   closing                          end
                       at it for longer than a slice    continue after others had their turn
                       take a line; none                end: the next pull begins a new task
                       handler ---> done                continue, and settle together (batches.py)
                               |--> failed, tries left  settle, the rest back to the front; the queue is suspended
                               +--> failed, none left   settle, dead-letter it, settle that; continue
                       without `auto_commit`: done      nothing is settled before COMMIT; ROLLBACK puts all of it back

A queue has at most one task, and no message is started before its predecessor is done. The broker keeps the number of
failures of a message, also over a restart. A message that always fails stops its queue for ever, unless the group
limits attempts. Then it becomes a dead letter, and leaves a hole in the order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import chain

from mqstore.broker.pop.orderinfo import OrderInfoTable
from mqstore.broker.redelivery.reason import PROCESS_ENDED
from mqstore.broker.tables.names import QueueKey
from mqstore.client.pop.delivery import as_sent, shown
from mqstore.client.push.assignment import Assignment
from mqstore.client.push.batches import NOBODY_AGAIN_MS, Chunk, ChunkRunner, Context
from mqstore.client.push.handler_call import Failure
from mqstore.client.push.handlers import shortened
from mqstore.client.push.processqueue import ProcessQueue
from mqstore.client.push.workers import Flow, Worker
from mqstore.errors import ConfigError, MQStoreError, StoreClosedError
from mqstore.log.message import Message

SUSPEND_MIN_MS, SUSPEND_MAX_MS = 10, 60_000
SLICE_MS = 60_000
"""Time after which a queue yields the thread to others."""
LINE_MAX = 1_024
"""Maximum number of messages that a worker takes of a queue at once."""
AGAIN_MS = 5_000
"""Pause after a failure outside of handlers, such as a dead letter that could not be stored."""


class _Line(Chunk):
    """Messages that one worker has taken of a queue."""

    __slots__ = ("again_ms", "begin_ms", "failed", "parted", "queue")

    def __init__(self, queue: ProcessQueue, messages: Sequence[Message], failed: dict[int, int]) -> None:
        super().__init__(queue, queue.queue.topic, messages, apart=queue.retries)
        self.queue = queue
        self.done = queue.handled  # without auto_commit they wait for a later line's COMMIT
        self.alone_to = queue.alone_to
        self.failed = failed
        """Number of failures of messages, by offset."""
        self.begin_ms = 0
        """Time at which the worker came to the queue (monotonic ms)."""
        self.again_ms: int | None = None
        """Time for which the queue is suspended, or None."""
        self.parted = False
        """True if the queue continues with a part of this line, when a suspected message may begin."""


class OrderlyService(ChunkRunner[_Line]):
    assignment: Assignment

    def __init__(self, context: Context, *, suspend_ms: int | None, auto_commit: bool) -> None:
        """With `suspend_ms` None the delays of the group's retry policy are used."""
        super().__init__(context)
        self._suspend_ms = suspend_ms
        self._auto_commit = auto_commit
        self.own = OrderInfoTable() if context.broadcasting else None
        """Failed attempts of a broadcasting consumer. The broker keeps those of a group."""

    def accept(self, worker: Worker, queue: ProcessQueue, messages: Sequence[Message], idle: bool) -> Flow[None]:
        if idle:
            yield from self._begin(queue, worker)

    def _resubmit(self, queue: ProcessQueue, delay_ms: int) -> None:
        self._workers.later(delay_ms, partial(self._workers.submit, partial(self._begin, queue)))

    def _begin(self, queue: ProcessQueue, worker: Worker) -> Flow[None]:
        line = self._next_line(queue)
        if line is not None:
            yield from self.run(line, worker)

    def _next_line(self, queue: ProcessQueue) -> _Line | None:
        """Take messages as a handler sees them, with their original topic and their attempts.
        Return None if there are none. From then on the queue may have another task."""
        taken = queue.take(LINE_MAX)
        if not taken:
            return None
        if queue.retries:
            taken = [as_sent(message, self._group) for message in taken]
        failed = self._failed_before(queue)
        if failed:
            taken = [shown(each, each.topic, each.reconsume_times + failed.get(each.offset, 0)) for each in taken]
            end = next((i for i, each in enumerate(taken) if self._has_had_its_last(each)), len(taken)) or 1
            queue.again(taken[end:])
            taken = taken[:end]
        return _Line(queue, taken, failed)

    def run(self, first: _Line, worker: Worker) -> Flow[None]:
        """Have the worker handle a line and the next lines of its queue, until there is a reason to stop."""
        queue, begin_ms = first.queue, self._clock.monotonic_ms()
        if not self.assignment.acquire(queue):
            self._handling.suspects.release(first)
            return
        try:
            for line in chain((first,), iter(partial(self._next_line, queue), None)):
                line.begin_ms = begin_ms
                if line.failed and self._has_had_its_last(line.items[0]):
                    self._give_up_first(line)
                else:
                    yield from self.work(line, worker)
                queue.alone_to = line.alone_to
                if line.parted:
                    return
                queue.again(line.items)
                if queue.closing:
                    return
                if not self._auto_commit and queue.is_stuck():  # nothing can come before a COMMIT
                    why = f"{len(queue)} messages were handled without COMMIT, and prefetch allows no more"
                    self._handling.report(ConfigError(why), "they are delivered again", queue.queue)
                    self._roll_back(line, AGAIN_MS)
                if line.again_ms is None and self._has_had_its_slice(line):
                    line.again_ms = 0
                if line.again_ms is not None:
                    self._resubmit(queue, line.again_ms)
                    return
        finally:
            self.assignment.release(queue)

    def part(self, line: _Line, messages: Sequence[Message]) -> _Line:
        """Return a line with `messages`, which were taken from `line` and are its whole rest."""
        line.parted = True
        return _Line(line.queue, messages, line.failed)

    def settle(self, line: _Line, *, commit: bool = False) -> bool:
        done, took_ms = line.take_done() if self._auto_commit or commit else ([], 0.0)
        if done and self.assignment.settle(line.queue, done):
            self._handling.settled(done, "ack", took_ms)
        return not self._has_had_its_slice(line)

    def concluded(self, line: _Line, messages: list[Message], decision: Failure, took_ms: float) -> bool:
        """Settle or put back all messages that were handled since the last decision, with these."""
        if self._auto_commit or decision.kind not in ("commit", "rollback"):
            return super().concluded(line, messages, decision, took_ms)
        if decision.kind == "rollback":
            self._roll_back(line, self._pause_ms(decision, messages[0]))
            return False
        line.done.append((messages, took_ms))
        goes_on = self.settle(line, commit=True)
        self.assignment.save()
        self.assignment.progress.save()  # so that a kill brings none of them again
        return goes_on

    def _roll_back(self, line: _Line, again_ms: int) -> None:
        line.items.clear()
        line.done.clear()
        line.queue.rollback()
        line.again_ms = again_ms

    def _has_had_its_slice(self, line: _Line) -> bool:
        return self._clock.monotonic_ms() - line.begin_ms > SLICE_MS

    def broke(self, line: _Line, error: Exception) -> None:
        """Try again later after an error outside of handlers, such as a failed write or a deleted group.
        Waiting loses nothing, while a task that just ended would leave its queue without a task."""
        if not isinstance(error, StoreClosedError):
            what = "settling or committing messages failed, again in 5 s"
            self._handling.report(error, what, line.queue.queue)
        self._roll_back(line, AGAIN_MS)

    def _has_had_its_last(self, message: Message) -> bool:
        """Return True if the message's last attempt ended with the process.
        For other messages a handler decides, since the limit may have been lowered meanwhile."""
        group = self._broker.groups.get(self._group)
        limit = None if group is None else group.max_attempts
        return limit is not None and message.reconsume_times >= limit and self._handling.is_suspect(message)

    def _give_up_first(self, line: _Line) -> None:
        """Dead-letter the first message, whose last attempt ended with the process."""
        first = line.items[0]
        last = shown(first, first.topic, first.reconsume_times - 1)
        if self._dead_letter(line.queue, last, Failure("reject", PROCESS_ENDED.text), 0.0):
            self._handling.has_handled(line, [line.items.popleft()])
        else:
            line.again_ms = AGAIN_MS

    def unwanted(self, line: _Line, messages: Sequence[Message]) -> bool:
        if line.queue.retries:
            topic = messages[0].topic
            why = f"a retry of topic {topic!r}, to which nobody of group {self._group!r} subscribes any more"
            self._handling.report(ConfigError(why), "it is redelivered", messages[0])
            return self.failed(line, messages, Failure("retry", why), 0.0)
        line.items.extendleft(reversed(messages))
        line.again_ms = NOBODY_AGAIN_MS
        return False

    def failed(self, line: _Line, messages: Sequence[Message], failure: Failure, each_ms: float) -> bool:
        """Count the attempt, dead-letter messages without further attempts, and suspend the queue for others."""
        self.settle(line)
        queue = line.queue
        if queue.dropped:
            return False
        limit = self._broker.groups.require(self._group).max_attempts
        again: list[Message] = []
        stuck = False
        for message in messages:
            last = failure.kind == "reject" or (limit is not None and message.attempt >= limit)
            if last and not stuck and self._dead_letter(queue, message, failure, each_ms):
                continue
            stuck = stuck or last
            again.append(message)
        if not again:
            return True
        self._note(line, again, failure.reason)
        self._handling.settled(again, "retry", each_ms * len(again))
        line.items.extendleft(reversed(again))
        line.again_ms = AGAIN_MS if stuck else self._pause_ms(failure, again[0])
        return False

    def _dead_letter(self, queue: ProcessQueue, message: Message, failure: Failure, took_ms: float) -> bool:
        """Dead-letter a message, then settle it. In this order a crash makes two dead letters, never none."""
        why = failure.reason
        if failure.kind != "reject":
            why = f"attempt {message.attempt} failed: {why}"
        if self._context.broadcasting:
            self._handling.log.say(
                logging.WARNING, f"it is passed over: {why}", at=message, like=("passed over", failure.kind)
            )
        else:
            try:
                self._broker.send_back(self._group, message, delay_level=-1, attempts=message.attempt, reason=why)
            except StoreClosedError:
                return False
            except Exception as error:
                self._handling.report(error, "no dead letter can be made of it", message)
                if isinstance(error, MQStoreError) or not isinstance(error, LookupError):
                    return False
                # Retention has removed the record meanwhile. It has expired, and no later try will find it.
        if self.assignment.settle(queue, [message]):
            self._handling.settled([message], "dlq", took_ms)
        return True

    def _failed_before(self, queue: ProcessQueue) -> dict[int, int]:
        if self.own is None:
            return self._broker.attempts(self._group, *queue.queue)
        return self.own.attempts(QueueKey(self._group, *queue.queue))

    def _note(self, line: _Line, messages: Sequence[Message], error: str) -> None:
        """Count one more failed attempt of each of these messages, the first unsettled ones."""
        ref = line.queue.queue
        for message in messages:
            times = line.failed.get(message.offset, 0) + 1
            if self.own is None:
                self._broker.note_attempt(self._group, *ref, message.offset, times, error=error)
            else:
                self.own.note_attempt(QueueKey(self._group, *ref), message.offset, times, self._clock.now_ms(), error)
        if self.own is not None:
            self.own.drop_attempts(QueueKey(self._group, *ref), messages[0].offset)

    def _pause_ms(self, failure: Failure, first: Message) -> int:
        delay_s = shortened(failure.delay_s, SUSPEND_MAX_MS / 1000, self._handling.log, first)
        if delay_s is not None:
            wait_ms = int(delay_s * 1000)
        elif self._suspend_ms is not None:
            wait_ms = self._suspend_ms
        else:
            wait_ms = self._broker.groups.require(self._group).delay_ms(first.attempt)
        return min(max(wait_ms, SUSPEND_MIN_MS), SUSPEND_MAX_MS)
