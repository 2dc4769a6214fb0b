"""Messages handled one batch after the other, queue by queue (clients#orderly).

    task of a queue:   closing                          end
                       at it for longer than a slice    come back after others had their turn
                       take a batch; none               end: the next pull begins a new task
                       handler ---> done                commit, go on
                               |--> failed, tries left  back to the front; the queue is suspended
                               +--> failed, none left   dead letter first, then commit; go on

There is at most one task of a queue, and a message is not begun before its predecessor is settled. How often a message
failed is kept by the broker, and survives a restart. A message that always fails stops its queue for ever, unless the
group has a limit of attempts: then it is given up, and leaves a hole in the order.

RocketMQ's autoCommit=false has no counterpart: a handler that wants to commit many messages at once takes them
as one batch (`batch_size`), and its end is the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mqstore.broker.begun import PROCESS_ENDED
from mqstore.broker.broker import Broker
from mqstore.broker.pop.orderinfo import OrderInfoTable
from mqstore.client.assignment import Assignment
from mqstore.client.chunks import SETTLE_S
from mqstore.client.handling import Failure, Handling
from mqstore.client.outcome import shortened
from mqstore.client.overdue import Overdue
from mqstore.client.processqueue import ProcessQueue
from mqstore.client.shown import as_sent, shown
from mqstore.client.workers import Flow, Worker, Workers
from mqstore.errors import ConfigError, MQStoreError, StoreClosedError
from mqstore.log.message import Message

__all__ = ["OrderlyService"]

NOBODY_AGAIN_MS = 1_000
"""When to look again whether anybody handles what nobody did: by then its queue is gone, as a rule."""
SUSPEND_MIN_MS, SUSPEND_MAX_MS = 10, 60_000
SLICE_MS = 60_000
"""After this time a queue lets others have the thread."""
WAITS_MS = -1
"""In place of a pause: the queue goes on when its first message, a suspected one, may begin."""
AGAIN_MS = 5_000
"""After what is no failure of a handler: a dead letter that could not be filed, a store that refuses."""


@dataclass(slots=True)
class _Task:
    """One worker at one queue, until it ends or lets another have the thread."""

    queue: ProcessQueue
    worker: Worker
    begin_ms: int
    failed: dict[int, int]
    """How often messages failed, by offset."""
    watches: bool
    """There may be suspected messages."""
    each: bool
    """Messages are counted one by one: they are of several topics, or interceptors are told of each."""
    handled: int = 0
    """Messages that were handled well, and are not counted yet."""
    took_ms: float = 0.0


class OrderlyService:
    """What an ordered push consumer does with messages."""

    ordered = True

    def __init__(
        self,
        broker: Broker,
        group: str,
        workers: Workers,
        handling: Handling,
        *,
        batch_size: int,
        consume_timeout_ms: int,
        suspend_ms: int | None,
        broadcasting: bool,
    ) -> None:
        """`suspend_ms` None: the delays of the group's retry policy."""
        self.assignment: Assignment
        self._broker = broker
        self._group = group
        self._workers = workers
        self._handling = handling
        self._batch_size = batch_size
        self._suspend_ms = suspend_ms
        self._broadcasting = broadcasting
        self._clock = broker.store.clock
        self._overdue: Overdue[ProcessQueue] = Overdue(
            workers, handling, self._clock, consume_timeout_ms, ", and everything behind it waits"
        )
        self.own = OrderInfoTable() if broadcasting else None
        """Failed attempts of a broadcasting consumer. Those of a group are kept by the broker."""

    def accept(self, worker: Worker, queue: ProcessQueue, messages: Sequence[Message], idle: bool) -> Flow[None]:
        if idle:
            yield from self._run(queue, worker)

    def _resubmit(self, queue: ProcessQueue, delay_ms: int = 0) -> None:
        job = partial(self._run, queue)
        if delay_ms:
            self._workers.later(delay_ms, partial(self._workers.submit, job))
        else:
            self._workers.submit(job)

    # -- the task of a queue ----------------------------------------------------------------------------------------

    def _run(self, queue: ProcessQueue, worker: Worker) -> Flow[None]:
        if not self.assignment.enter(queue):
            self._handling.leave(queue)
            return
        self._overdue.begin(worker, queue, lambda: queue.closing)
        again_ms: int | None = None
        handling, begin_ms = self._handling, self._clock.monotonic_ms()
        each = queue.retries or bool(handling.hooks.on_settle)
        task = _Task(queue, worker, begin_ms, self._failed_before(queue), handling.watches(), each)
        try:
            again_ms = yield from self._turn(task)
        except Exception as error:
            # Not a handler's: something could not be noted, the group has gone. Nothing is lost by waiting, and a task
            # that just ended would leave its queue to nobody.
            if not isinstance(error, StoreClosedError):
                handling.report(error, "what is to be done around handlers failed, again in 5 s", queue.queue)
            queue.rollback()
            again_ms = AGAIN_MS
        finally:
            self._overdue.end(worker)
            self._count(task)
            self.assignment.leave(queue)
            if again_ms != WAITS_MS:
                handling.leave(queue)
        if again_ms is not None and again_ms != WAITS_MS:
            self._resubmit(queue, again_ms)

    def _turn(self, task: _Task) -> Flow[int | None]:
        """Handle messages until there is a reason to stop: when to go on (ms from now), None: somebody else says."""
        queue = task.queue
        while not queue.closing:
            if queue.last_settle_ms - task.begin_ms > SLICE_MS:
                return 0
            batch = queue.take(self._batch_size)
            if not batch:  # from here on the queue may have another task
                return None
            wait_ms = yield from self._handle(task, batch)
            if wait_ms is not None:
                return wait_ms
        return None

    def _handle(self, task: _Task, taken: list[Message]) -> Flow[int | None]:
        """One batch: None to go on, else for how long the queue is suspended."""
        queue = task.queue
        batch = self._shown(task, taken)
        subscription = self.assignment.subscription_of(queue, batch[0])
        if subscription is None:
            return self._unwanted(task, batch)
        if task.failed and self._has_had_its_last(batch[0]):
            queue.again(batch[1:])
            last = shown(batch[0], batch[0].topic, batch[0].reconsume_times - 1)
            if self._bury(queue, last, Failure("reject", PROCESS_ENDED), 0.0):
                self._handling.has_handled(queue, batch[:1])
                return None
            queue.again(batch[:1])
            return AGAIN_MS
        number, alone = len(batch), False
        if task.watches:
            number = self._handling.together(batch)
            alone = self._handling.is_suspect(batch[0])
        batch = self._cut(queue, batch, number)
        if alone and not self._handling.is_in_turn(queue):
            queue.again(batch)  # first: the turn may come at once
            self._handling.in_turn(queue, partial(self._resubmit, queue))
            return WAITS_MS
        ended = self._handling.call(task.worker, subscription, batch)
        failure, took_ms = ended if isinstance(ended, tuple) else (yield from ended)
        if alone:
            self._handling.has_handled(queue, batch)
        if failure is None:
            if self.assignment.settle_taken(queue, batch):
                if task.each:
                    self._handling.settled(batch, "ack", took_ms)
                else:
                    task.handled += len(batch)
                    task.took_ms += took_ms
                    if task.took_ms > SETTLE_S * 1000:
                        self._count(task)
            return None
        if failure.failed is not None:
            batch, failure, took_ms = self._suffix(queue, batch, failure, took_ms)
            if not batch:
                return None
        return self._failed(task, batch, failure, took_ms)

    def _count(self, task: _Task) -> None:
        if task.handled:
            self._handling.counted(task.queue.queue.topic, task.handled, task.took_ms)
            task.handled, task.took_ms = 0, 0.0

    def _has_had_its_last(self, message: Message) -> bool:
        """Whether its last attempt ended with the process. Of others a handler has the last word: their limit may have
        been lowered since."""
        limit = self._broker.groups.need(self._group).max_attempts
        return limit is not None and message.reconsume_times >= limit and self._handling.is_suspect(message)

    def _shown(self, task: _Task, batch: list[Message]) -> list[Message]:
        """As a handler is to see them: under the topic they were sent to, with the attempts they had."""
        if task.queue.retries:
            batch = [as_sent(message, self._group) for message in batch]
        if not task.failed:
            return batch
        failed = task.failed
        return [shown(each, each.topic, each.reconsume_times + failed.get(each.offset, 0)) for each in batch]

    def _cut(self, queue: ProcessQueue, batch: list[Message], number: int) -> list[Message]:
        """At most so many (one or more) from the front of `batch`, all of one topic. The others go back."""
        if len(batch) == 1:
            return batch
        topic = batch[0].topic
        end = next((i for i, message in enumerate(batch) if i >= number or message.topic != topic), len(batch))
        if end < len(batch):
            queue.again(batch[end:])
        return batch[:end]

    def _unwanted(self, task: _Task, batch: list[Message]) -> int | None:
        """Nobody subscribes to this topic."""
        queue = task.queue
        if not queue.retries:  # not any more: the queue is about to be given up, and these with it
            queue.again(batch)
            return NOBODY_AGAIN_MS
        batch = self._cut(queue, batch, len(batch))
        why = f"a retry of topic {batch[0].topic!r}, to which nobody of group {self._group!r} subscribes any more"
        self._handling.report(ConfigError(why), "it comes again", batch[0])
        return self._failed(task, batch, Failure("retry", why), 0.0)

    def _suffix(
        self, queue: ProcessQueue, batch: list[Message], failure: Failure, took_ms: float
    ) -> tuple[list[Message], Failure, float]:
        """Settle what stands before the messages that failed, which must be the end of the batch: those, and their part
        of the time."""
        names = sorted({message.offset for message in failure.failed or ()})
        good = batch[: len(batch) - len(names)]
        if names != [message.offset for message in batch[len(good) :]]:
            return batch, self._handling.not_the_end(batch[0]), took_ms
        each_ms = took_ms / len(batch)
        if good and self.assignment.settle_taken(queue, good):
            self._handling.settled(good, "ack", each_ms * len(good))
        return batch[len(good) :], failure, each_ms * len(names)

    # -- failures ---------------------------------------------------------------------------------------------------

    def _failed(self, task: _Task, batch: Sequence[Message], failure: Failure, took_ms: float) -> int | None:
        """Count the attempt; give up what has had its last, and suspend the queue for the rest."""
        queue = task.queue
        if queue.dropped:
            return None
        limit = self._broker.groups.need(self._group).max_attempts
        again: list[Message] = []
        stuck = False
        for message in batch:
            last = failure.kind == "reject" or (limit is not None and message.attempt >= limit)
            if last and not stuck and self._bury(queue, message, failure, took_ms):
                continue
            stuck = stuck or last
            again.append(message)
        if not again:
            return None
        self._note(task, again, failure.reason)
        self._handling.settled(again, "retry", took_ms)
        queue.again(again)
        return AGAIN_MS if stuck else self._pause_ms(failure, again[0])

    def _bury(self, queue: ProcessQueue, message: Message, failure: Failure, took_ms: float) -> bool:
        """Give a message up: a dead letter, then settled. In that order a crash makes two letters, never none."""
        why = failure.reason
        if failure.kind != "reject":
            why = f"attempt {message.attempt} failed: {why}"
        if self._broadcasting:
            self._handling.log.say(
                logging.WARNING, f"it is passed over: {why}", at=message, like=("passed over", failure.kind)
            )
        else:
            try:
                self._broker.send_back(
                    self._group, message.physical_offset, delay_level=-1, attempts=message.attempt, reason=why
                )
            except StoreClosedError:
                return False
            except Exception as error:
                self._handling.report(error, "no dead letter can be made of it", message)
                if isinstance(error, MQStoreError) or not isinstance(error, LookupError):
                    return False
                # Retention took it while we tried: no later try will find it, and it has expired for everybody.
        if self.assignment.settle_taken(queue, [message]):
            self._handling.settled([message], "dlq", took_ms)
        return True

    def _failed_before(self, queue: ProcessQueue) -> dict[int, int]:
        kept = self._broker if self.own is None else self.own
        return kept.attempts(self._group, *queue.queue)

    def _note(self, task: _Task, batch: Sequence[Message], error: str) -> None:
        """One more failed attempt of each of these, the first that are not settled."""
        ref, first = task.queue.queue, batch[0].offset
        failed = {offset: times for offset, times in task.failed.items() if offset >= first}
        for message in batch:
            failed[message.offset] = times = failed.get(message.offset, 0) + 1
            if self.own is None:
                self._broker.note_attempt(self._group, *ref, message.offset, times, error=error)
            else:
                self.own.note_attempt(self._group, *ref, message.offset, times, self._clock.now_ms(), error)
        task.failed = failed
        if self.own is not None:
            self.own.drop_attempts(self._group, *ref, first)

    def _pause_ms(self, failure: Failure, first: Message) -> int:
        delay_s = shortened(failure.delay_s, SUSPEND_MAX_MS / 1000, self._handling.log, first)
        if delay_s is not None:
            wait_ms = int(delay_s * 1000)
        elif self._suspend_ms is not None:
            wait_ms = self._suspend_ms
        else:
            wait_ms = self._broker.groups.need(self._group).delay_ms(first.attempt)
        return min(max(wait_ms, SUSPEND_MIN_MS), SUSPEND_MAX_MS)
