"""Messages handled one batch after the other, queue by queue (client-semantics A7).

    task of a queue:   closing                          end
                       lock not renewed for 30 s        have it renewed, come back in 100 ms
                       at it for longer than a slice    come back after others had their turn
                       take a batch; none               end: the next pull begins a new task
                       handler ---> done                commit, go on
                               |--> failed, tries left  back to the front; the queue is suspended
                               +--> failed, none left   dead letter first, then commit; go on

There is at most one task of a queue, and a message is not begun before its predecessor is settled. How often a message
failed is kept by the broker, and survives a restart. What is given up leaves a hole in the order: with
`max_attempts=None` a message that always fails stops its queue for ever instead.

With `max_uncommitted` a handler gets a transaction and says itself what is done (A7.6): until then messages stay open,
and a bound on their number and age makes it impossible that they pile up unseen, as with RocketMQ's autoCommit=false.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from mqstore.broker.broker import Broker
from mqstore.client.assignment import Assignment
from mqstore.client.handling import Failure, Handling, Subscription, as_sent
from mqstore.client.processqueue import ProcessQueue
from mqstore.client.workers import Worker, Workers
from mqstore.errors import MQStoreError, StoreClosedError, UncommittedBatchError
from mqstore.log.message import Message
from mqstore.options import Duration, seconds

__all__ = ["BatchTx", "OrderlyService"]

_log = logging.getLogger("mqstore")

LOCK_LATE_MS = 100
SUSPEND_MIN_MS, SUSPEND_MAX_MS = 10, 30_000
TX_MAX_MS = 60_000
"""How long messages may be left open by a handler that takes a transaction."""
TICK_MS = 1_000
SEND_BACK_AGAIN_MS = 5_000


class BatchTx:
    """What a handler with `max_uncommitted` decides by: everything it was given since the last commit. It may
    leave that open, and is then given more.

    >>> tx = BatchTx()
    >>> tx.commit()
    >>> tx.rollback(2)
    Traceback (most recent call last):
        ...
    RuntimeError: this batch was committed already
    """

    __slots__ = ("decision", "delay_ms")

    def __init__(self) -> None:
        self.decision = ""
        """"commit", "rollback", or nothing yet."""
        self.delay_ms: int | None = None

    def commit(self) -> None:
        """All of it is done once the handler has returned."""
        self._decide("commit")

    def rollback(self, delay: Duration | None = None) -> None:
        """All of it comes again, after `delay` seconds (None: as for a failure); it counts as an attempt."""
        self.delay_ms = None if delay is None else int(seconds(delay, "delay") * 1000)
        self._decide("rollback")

    def _decide(self, decision: str) -> None:
        if self.decision not in ("", decision):
            done = "committed" if self.decision == "commit" else "rolled back"
            raise RuntimeError(f"this batch was {done} already")
        self.decision = decision


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
        time_slice_ms: int,
        broadcasting: bool,
    ) -> None:
        """`suspend_ms` None: the delays of the group's retry policy if it has its own, else one second."""
        self.assignment: Assignment
        self._broker = broker
        self._group = group
        self._workers = workers
        self._handling = handling
        self._batch_size = batch_size
        self._timeout_ms = consume_timeout_ms
        self._suspend_ms = suspend_ms
        self._slice_ms = time_slice_ms
        self._broadcasting = broadcasting
        self._clock = broker.store.clock
        self._open_since: dict[ProcessQueue, int] = {}
        """When the first of the messages was handled that are left open, `max_uncommitted`."""
        self._seen: dict[Worker, tuple[int, int]] = {}
        self._ticking = False

    def accept(self, worker: Worker, queue: ProcessQueue, messages: Sequence[Message], idle: bool) -> None:
        if idle:
            self._run(queue, worker)

    def _resubmit(self, queue: ProcessQueue, delay_ms: int = 0) -> None:
        job = partial(self._run, queue)
        if delay_ms:
            self._workers.later(delay_ms, partial(self._workers.submit, job))
        else:
            self._workers.submit(job)

    # -- the task of a queue ----------------------------------------------------------------------------------------

    def _run(self, queue: ProcessQueue, worker: Worker) -> None:
        if not self.assignment.enter(queue):
            return
        worker.is_cancelled = lambda: queue.closing
        if not self._ticking:
            self._ticking = True
            self._workers.later(TICK_MS, self._tick)
        again_ms: int | None
        try:
            again_ms = self._turn(queue, worker, self._clock.monotonic_ms())
        except (
            MQStoreError
        ) as error:  # it could not be noted, or the group has gone: nothing is lost by waiting
            if not isinstance(error, StoreClosedError):
                self._handling.report(error)
            self._open_since.pop(queue, None)
            queue.rollback()
            again_ms = SEND_BACK_AGAIN_MS
        finally:
            worker.is_cancelled = None
            self.assignment.leave(queue)
        if again_ms is not None:
            self._resubmit(queue, again_ms)

    def _turn(self, queue: ProcessQueue, worker: Worker, begin_ms: int) -> int | None:
        """Handle messages until there is a reason to stop: when to go on (ms from now), None: somebody else says."""
        while not queue.closing:
            now_ms = self._clock.monotonic_ms()
            if not self._broadcasting and queue.lock_expired(now_ms):
                self.assignment.renew_soon()
                return LOCK_LATE_MS
            if now_ms - begin_ms > self._slice_ms:
                return 0
            batch = queue.take(self._batch_size)
            if not batch:
                return None
            wait_ms = self._handle(queue, worker, batch)
            if wait_ms is not None:
                return wait_ms
        return None

    def _handle(self, queue: ProcessQueue, worker: Worker, batch: list[Message]) -> int | None:
        """One batch: None to go on, else for how long the queue is suspended."""
        shown = [as_sent(message) for message in batch] if queue.queue.topic.startswith("%") else batch
        subscription = self.assignment.subscription_of(queue, shown[0])
        if subscription is None:
            return self._failed(queue, batch, Failure("retry", "nobody subscribes to its topic any more"), 0.0)
        if subscription.max_uncommitted is not None:
            return self._transact(queue, worker, subscription, subscription.max_uncommitted, shown)
        failure, took_ms = self._handling.call(worker, subscription, shown)
        if failure is None:
            if self.assignment.settle_taken(queue, None):
                self._handling.settled(shown, "ack", took_ms)
            return None
        if failure.failed is not None:
            batch, failure = self._suffix(queue, batch, failure, took_ms)
            if not batch:
                return None
        return self._failed(queue, batch, failure, took_ms)

    def _suffix(
        self, queue: ProcessQueue, batch: list[Message], failure: Failure, took_ms: float
    ) -> tuple[list[Message], Failure]:
        """Settle what stands before the messages that failed, which must be the end of the batch: those that failed."""
        failed = failure.failed or ()
        offsets = [message.offset for message in batch]
        names = sorted(message.offset for message in failed)
        if names != offsets[len(offsets) - len(names) :]:
            why = "BatchFailure of an ordered consumer must name the end of the batch; all of it is taken for failed"
            self._handling.report(ValueError(why), batch[0])
            return batch, Failure("retry", why)
        good = batch[: len(batch) - len(names)]
        if good and self.assignment.settle_taken(queue, good):
            self._handling.settled(good, "ack", took_ms)
        return batch[len(good) :], failure

    # -- failures ---------------------------------------------------------------------------------------------------

    def _failed(self, queue: ProcessQueue, batch: list[Message], failure: Failure, took_ms: float) -> int | None:
        """Count the attempt; give up what has had its last, and suspend the queue for the rest."""
        if queue.dropped:
            return None
        ref = queue.queue
        if self._broadcasting:
            attempts = dict.fromkeys((message.offset for message in batch), 1)
            limit = None
        else:
            limit = self._broker.groups.need(self._group).max_attempts
            known = self._broker.attempts(self._group, *ref)
            attempts = {message.offset: known.get(message.offset, 0) + 1 for message in batch}
        dead = [
            message
            for message in batch
            if failure.kind == "reject" or (limit is not None and attempts[message.offset] >= limit)
        ]
        for message in dead:
            if not self._bury(queue, message, failure, attempts[message.offset], took_ms):
                rest = [each for each in batch if queue.is_taken(each)]
                queue.again(rest)
                return SEND_BACK_AGAIN_MS
        rest = [message for message in batch if message not in dead]
        if not rest:
            return None
        if not self._broadcasting:
            for message in rest:
                self._broker.note_attempt(self._group, *ref, message.offset, attempts[message.offset])
        self._handling.settled([as_sent(message) for message in rest], "retry", took_ms)
        queue.again(rest)
        return self._pause_ms(failure, attempts[rest[0].offset])

    def _bury(self, queue: ProcessQueue, message: Message, failure: Failure, attempts: int, took_ms: float) -> bool:
        """Give a message up: a dead letter, then settled. In that order a crash makes two letters, never none."""
        if self._broadcasting:
            _log.warning("group %s: %s/%d, offset %d is passed over", self._group, *message.queue, message.offset)
        else:
            why = failure.reason if failure.kind == "reject" else f"attempt {attempts} failed: {failure.reason}"
            try:
                self._broker.send_back(self._group, message.physical_offset, delay_level=-1, reason=why)
            except StoreClosedError:
                return False
            except Exception as error:
                self._handling.report(error, message)
                return False
        if self.assignment.settle_taken(queue, [message]):
            self._handling.settled([as_sent(message)], "dlq", took_ms)
        return True

    def _pause_ms(self, failure: Failure, attempts: int) -> int:
        if failure.delay_s is not None:
            wait_ms = int(failure.delay_s * 1000)
        elif self._suspend_ms is not None:
            wait_ms = self._suspend_ms
        else:
            policy = self._broker.groups.need(self._group).retry_policy
            wait_ms = 1_000 if policy.kind == "levels" else policy.delay_ms(attempts)
        return min(max(wait_ms, SUSPEND_MIN_MS), SUSPEND_MAX_MS)

    # -- transactions -----------------------------------------------------------------------------------------------

    def _transact(
        self, queue: ProcessQueue, worker: Worker, subscription: Subscription, bound: int, batch: list[Message]
    ) -> int | None:
        """Hand over a batch with everything still open before it; None to go on."""
        tx = BatchTx()
        since_ms = self._open_since.setdefault(queue, self._clock.monotonic_ms())
        failure, took_ms = self._handling.call(worker, subscription, batch, tx)
        if failure is None and tx.decision == "commit":
            del self._open_since[queue]
            if self.assignment.settle_taken(queue, None):
                self._handling.settled(batch, "ack", took_ms)
            return None
        if failure is None and not tx.decision:
            too_many = queue.taken >= bound
            if not too_many and self._clock.monotonic_ms() - since_ms < TX_MAX_MS:
                return None
            error = UncommittedBatchError(
                f"group {self._group!r}: {queue.taken} messages of {queue.queue.topic}/{queue.queue.queue_id} were "
                f"left open, {bound} may be, for at most {TX_MAX_MS // 1000} s: they come again. Call commit() or rollback()"
            )
            self._handling.report(error, batch[0])
            failure = Failure("retry", str(error))
        elif failure is None:
            failure = Failure("retry", "rolled back", None if tx.delay_ms is None else tx.delay_ms / 1000)
        self._open_since.pop(queue, None)
        return self._failed(queue, queue.all_taken(), failure, took_ms)

    # -- what takes long --------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Timer thread: handlers that hang, which is only told (A7.8), and messages that were left open too long."""
        now_ms = self._clock.monotonic_ms()
        seen, self._seen = self._seen, {}
        for worker in self._workers.busy():
            call, since_ms = seen.get(worker, (-1, now_ms))
            if call != worker.calls:
                since_ms = now_ms
            elif call != worker.lapsed and now_ms - since_ms >= self._timeout_ms:
                self._lapse(worker, call)
            self._seen[worker] = (worker.calls, since_ms)
        for queue, since_ms in list(self._open_since.items()):
            if queue.dropped:
                self._open_since.pop(queue, None)
            elif now_ms - since_ms >= TX_MAX_MS and queue.claim():  # no task is at it, and none was going to be
                self._resubmit_overdue(queue)
        if not self._seen and not self._open_since:
            self._ticking = False
            if not self._workers.busy():
                return
            self._ticking = True
        self._workers.later(TICK_MS, self._tick)

    def _resubmit_overdue(self, queue: ProcessQueue) -> None:
        def roll_back(worker: Worker) -> None:
            if not self.assignment.enter(queue):
                return
            wait_ms = 0
            try:
                taken = queue.all_taken()
                self._open_since.pop(queue, None)
                if taken:
                    error = UncommittedBatchError(
                        f"group {self._group!r}: {len(taken)} messages of {queue.queue.topic}/{queue.queue.queue_id} "
                        f"were left open for {TX_MAX_MS // 1000} s: they come again. Call commit() or rollback()"
                    )
                    self._handling.report(error, taken[0])
                    wait_ms = self._failed(queue, taken, Failure("retry", str(error)), 0.0) or 0
            finally:
                self.assignment.leave(queue)
            self._resubmit(queue, wait_ms)

        self._workers.submit(roll_back)

    def _lapse(self, worker: Worker, call: int) -> None:
        messages = worker.messages
        worker.lapsed = call
        if worker.calls != call or not messages:
            return
        stack = worker.stack()
        for message in messages[:1]:
            _log.error(
                "group %s: %s/%d, offset %d has been in its handler for %g s, and everything behind it waits. The "
                "handler is at\n%s",
                self._group,
                *message.queue,
                message.offset,
                self._timeout_ms / 1000,
                stack,
            )
            self._handling.hooks.tell(self._handling.hooks.on_timeout, message, stack)
