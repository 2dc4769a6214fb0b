"""The queues of a push consumer: which it has, and what is pulled from them (clients#rebalance, clients#pull).

    rebalance (timer thread)                       pull (any worker)
    share - owned  ---> lock ---> begin ---> pull ----> FOUND              cached, dispatched; pull again, or wait
    owned - share  ---> closing ---> gone               NO_MATCHED         on at once
                                                        NO_NEW_MSG         wait for a message, 15 s at most
                                                        OFFSET_ILLEGAL     dropped, begun anew at the right offset
                                                        full, paused       until there is room, until it is resumed

Of every queue there is exactly one pull: being made, submitted, waiting for messages, for room, for `resume`, or for a
timer. Whoever takes one of these away puts the next in its place.

A queue that is to go is closed first: nothing of it is started any more, and what runs still counts. Once nothing runs
it is dropped and its lock given back: no queue is given up under a running handler. As long as one runs the lock does
not run out, either (`enter`).

The file is long because rebalance and pull change the same state of a queue under one lock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from mqstore.broker.broker import Broker
from mqstore.broker.filters import Filter
from mqstore.broker.reading import ReadResult
from mqstore.broker.waiting import Waiter
from mqstore.client.handling import Handling, Subscription
from mqstore.client.membership import Membership
from mqstore.client.processqueue import Limits, ProcessQueue, QueueInfo
from mqstore.client.progress import Progress, Start, place
from mqstore.client.workers import Flow, Worker, Workers
from mqstore.errors import (
    ConfigError,
    GroupInUseError,
    MQStoreError,
    NotPermittedError,
    StoreClosedError,
    SubscriptionConflictError,
    TopicNotFoundError,
)
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.log.tip import as_queue

__all__ = ["Assignment", "Service"]

_log = logging.getLogger("mqstore")

REBALANCE_MS = 20_000
UNBALANCED_MS = 1_000
COMMIT_MS = 10
"""Between two commits of a queue that is being worked on."""
LOCK_FAILED_MS = 500
RENEW_MS = 20_000
SAVE_MS = 5_000
PULL_FAILED_MS = 1_000
HOLD_S = 15.0
"""The longest wait for messages: whatever goes wrong with a wake-up is over then."""
PULL_IDLE_MS = 120_000


class Service(Protocol):
    """What is done with the messages of a queue."""

    def accept(self, worker: Worker, queue: ProcessQueue, messages: Sequence[Message], idle: bool) -> Flow[None]:
        """Messages were pulled and cached. Called by the worker that pulled, after the next pull is on its way. `idle`:
        no worker is at the queue, and the service is to see to it."""

    def close(self) -> None:
        """Settle what is done: what still runs counts for nothing."""


class Assignment:
    """The queues that one member has, from `start` to `close`."""

    def __init__(
        self,
        broker: Broker,
        group: str,
        *,
        membership: Membership,
        progress: Progress,
        workers: Workers,
        handling: Handling,
        service: Service,
        limits: Limits,
        retries: str | None,
    ) -> None:
        """`retries`: the topic of the group's retries; None: it has none, and its progress is this client's own. The
        retries of pop are read as well: the group may have popped before."""
        self.group = group
        self.membership = membership
        self.progress = progress
        self._broker = broker
        self._clock = broker.store.clock
        self._workers = workers
        self._handling = handling
        self._hooks = handling.hooks
        self._service = service
        self._limits = limits
        self._retries = retries
        self._topics: frozenset[str] = frozenset()
        """What is consumed."""
        self._lock = threading.Lock()
        self._queues: dict[QueueRef, ProcessQueue] = {}
        self._leaving: dict[QueueRef, ProcessQueue] = {}
        """Closed, with handlers that run."""
        self._waits: dict[ProcessQueue, Waiter] = {}
        """The waiter of each queue that waits for messages."""
        self._paused = False
        self._paused_queues: set[QueueRef] = set()
        self._halted = self._closed = False
        self._stirred = False
        self._full_times = 0

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Join the group and take what is ours. Before the workers are started."""
        self._join(subscriptions)
        self.progress.reload()
        if self._paused:  # nothing is taken yet, but what comes from now on is found
            for share in self.membership.share().values():
                for ref in share:
                    self.progress.begin(ref)
        self._rebalance()
        self._workers.later(RENEW_MS, partial(self._every, RENEW_MS, self._renew))
        self._workers.later(REBALANCE_MS, partial(self._every, REBALANCE_MS, self._sweep))
        if self._retries is None:
            self._workers.later(SAVE_MS, partial(self._every, SAVE_MS, self.progress.save))

    def _every(self, period_ms: int, work: Callable[[], object]) -> None:
        """Timer thread: do this now and every `period_ms`. What it raises is told, and stops nothing."""
        if self._halted:
            return
        try:
            work()
        except StoreClosedError:
            pass
        except Exception as error:
            self._handling.report(error, f"what is done every {period_ms / 1000:g} s failed")
        self._workers.later(period_ms, partial(self._every, period_ms, work))

    def subscribe(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Other topics, or other filters: what is cached is not filtered again (clients#broadcasting)."""
        self._join(subscriptions)
        for queue in self._owned(()):  # those that wait do so by the filters of before
            with queue.settling:
                waiter = self._waits.pop(queue, None)
            if waiter is not None and self._broker.remove_waiter(waiter):
                self._submit_pull(queue)
        self.stir()

    def _join(self, subscriptions: Mapping[str, Subscription]) -> None:
        wanted = {name: each.wanted.expression for name, each in subscriptions.items()}
        if self._retries is not None:
            wanted[self._retries] = ("TAG", "*")
        self.membership.join(wanted)
        self._handling.subscriptions, self._topics = subscriptions, frozenset(wanted)

    def _filter(self, topic: str) -> Filter | None:
        subscription = self._handling.subscriptions.get(topic)
        return None if subscription is None else subscription.wanted.filter

    def _pop_retries(self) -> Iterable[str]:
        """Names of the topics in which the group has what it failed at as long as it popped. Whether one of them is
        another group's may change, so they are no part of what members agree on."""
        if self._retries is None:
            return
        for topic in self._handling.subscriptions:
            yield from self._broker.pop_retry_topics(self.group, topic)

    def stir(self) -> None:
        """Something has changed: look at the shares soon. From any thread."""
        with self._lock:
            if self._stirred or self._halted:
                return
            self._stirred = True
        self._workers.later(0, self._look)

    def halt(self) -> None:
        """Start no handler and no pull any more."""
        with self._lock:
            self._halted = True
            queues = [*self._queues.values(), *self._leaving.values()]
        for queue in queues:
            self._close(queue)

    def close(self) -> None:
        """After `halt`: what still runs counts for nothing; progress is on disk, the seat and the locks are given up.
        Not the lock of a queue whose handler runs: that is given when it ends."""
        self._service.close()
        with self._lock:
            queues = [*self._queues.values(), *self._leaving.values()]
            self._queues.clear()
            self._leaving.clear()
        self._closed = True
        for queue in queues:
            with queue.settling:
                self._commit_rest(queue)
                queue.dropped = True
            queue.clear()
        try:
            self.progress.save()
        finally:
            self.membership.leave()
            self._tell_revoked(queues)

    # -- whose queues -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Timer thread: rebalance; if that fails, again in a second."""
        try:
            self._rebalance()
        except StoreClosedError:
            return
        except Exception as error:
            self._handling.report(error, "dividing the queues failed, again in a second")
            if isinstance(error, GroupInUseError | SubscriptionConflictError):
                self._lose(self._owned(()))  # we were given up, and are not let in again: they are others' now
            self._workers.later(UNBALANCED_MS, self.stir)

    def _rebalance(self) -> None:
        with self._lock:
            self._stirred = False
            if self._halted:
                return
        if self._paused:  # nothing moves; `resume` looks again (clients#broadcasting)
            return
        topics = self._topics.union(self._pop_retries())
        shares = self.membership.share(topics)
        with self._lock:
            owned = dict(self._queues)
            leaving = set(self._leaving)
        lost = [
            queue for ref, queue in owned.items() if ref.topic not in topics or ref not in shares.get(ref.topic, (ref,))
        ]
        for queue in lost:
            self._revoke(queue)
        wanted = {ref for share in shares.values() for ref in share}
        wanted -= owned.keys() | leaving
        taken: set[QueueRef] = set()
        begun: set[QueueRef] = set()
        try:
            taken = self.membership.take(wanted) if wanted else taken
            begun.update(ref for ref in sorted(taken) if self._begin(ref))
        finally:
            self._set_out(begun)
        if begun != wanted:
            self._workers.later(LOCK_FAILED_MS if taken != wanted else UNBALANCED_MS, self.stir)

    def _begin(self, ref: QueueRef, offset: int | None = None, *, announce: bool = True) -> bool:
        """Own a queue whose lock we hold, for `_set_out`; False: it is given back, and tried again later."""
        try:
            begin = self.progress.begin(ref) if offset is None else offset
        except MQStoreError as error:
            if not isinstance(error, StoreClosedError):
                self._handling.report(error, "cannot be begun yet", ref)
            self.membership.give([ref])
            return False
        queue = ProcessQueue(ref, begin, self._clock.monotonic_ms(), self._limits)
        queue.committed = begin if offset is None else None
        if self._retries is not None:
            queue.attempts = self._broker.attempts(self.group, *ref)
        queue.unannounced = queue.submitted = announce and bool(self._hooks.on_assign)
        with self._lock:
            if self._halted:
                return False
            queue.paused = ref in self._paused_queues
            self._queues[ref] = queue
        return True

    def _set_out(self, begun: Collection[QueueRef]) -> None:
        """Divide the limits of the topics, then pull what was begun."""
        self._divide()
        with self._lock:
            queues = [self._queues[ref] for ref in sorted(begun) if ref in self._queues]
        new = [queue for queue in queues if queue.unannounced]
        known = [queue for queue in queues if not queue.unannounced]
        if new:
            self._workers.submit(partial(self._announce, new))
        for queue in known:
            self._submit_pull(queue)

    def _announce(self, queues: Sequence[ProcessQueue], worker: Worker) -> None:
        """Tell `on_assign`, by a worker: the timer thread renews locks, and a hook may take its time. Then pull."""
        ours = [queue for queue in queues if self.enter(queue)]  # one that is to go was never here
        for queue in ours:
            queue.unannounced = False
        try:
            if ours:
                self._hooks.tell(self._hooks.on_assign, frozenset(queue.queue for queue in ours))
        finally:
            for queue in ours:
                self._submit_pull(queue)
                self.leave(queue)

    def _divide(self) -> None:
        """Timer thread: divide the limits of each topic by the number of its queues here. A queue that has room
        now is pulled."""
        queues = self._owned(())
        number = Counter(queue.queue.topic for queue in queues)
        for queue in queues:
            queue.limits = self._limits.divided(number[queue.queue.topic])
            self.refill(queue)

    def _revoke(self, queue: ProcessQueue) -> None:
        with self._lock:
            if self._queues.get(queue.queue) is not queue:
                return
            del self._queues[queue.queue]
            self._leaving[queue.queue] = queue
        queue.restart_at = None
        self._close(queue)
        self._gone(queue)

    def _close(self, queue: ProcessQueue) -> None:
        with queue.settling:
            queue.closing = True
        waiter = self._waits.pop(queue, None)
        if waiter is not None:
            self._broker.remove_waiter(waiter)

    def _gone(self, queue: ProcessQueue) -> None:
        """Timer thread: a queue that was closed is another's from here on, unless it is at work."""
        with queue.settling:
            if queue.running:  # `leave` comes back here
                return
            with self._lock:
                if self._leaving.get(queue.queue) is not queue:
                    return
                del self._leaving[queue.queue]
            self._commit_rest(queue)
            queue.dropped = True
        queue.clear()
        self.membership.give([queue.queue])
        self._tell_revoked([queue])
        self.stir()

    def _tell_revoked(self, queues: Sequence[ProcessQueue]) -> None:
        told = frozenset(queue.queue for queue in queues if not queue.unannounced)
        if told:
            self._hooks.tell(self._hooks.on_revoke, told)

    def _ended(self, queue: ProcessQueue) -> None:
        """Timer thread: nothing of a closed queue runs any more."""
        self._gone(queue)
        self._restart(queue)

    def _renew(self) -> None:
        """Timer thread: keep the locks."""
        lost = self.membership.renew()
        self._lose([queue for queue in self._owned(()) if queue.queue in lost])

    def _lose(self, queues: Sequence[ProcessQueue]) -> None:
        """These are another's already: what runs counts for nothing, our commits would take his back."""
        for queue in queues:
            _log.warning("group %s lost the lock of %s/%d", self.group, *queue.queue)
            with queue.settling:
                queue.closing = queue.dropped = True
            self._revoke(queue)

    def _sweep(self) -> None:
        """Every 20 s: what no event has told of."""
        now_ms = self._clock.monotonic_ms()
        for queue in self._owned(()):
            if queue.throttled:
                self._ask_for_reset(queue)
            elif now_ms - queue.last_pull_ms <= PULL_IDLE_MS:
                continue
            elif not (queue.submitted or queue.parked or queue.paused or self._paused):
                _log.error("group %s: %s/%d was not pulled for two minutes; it is begun anew", self.group, *queue.queue)
                self._revoke(queue)
        self._look()

    def _ask_for_reset(self, queue: ProcessQueue) -> None:
        """A queue that is full, perhaps of what is stuck, does not pull, and so hears of no reset: that may be what is
        to get it going again."""
        if self.progress.committed(queue.queue) == queue.committed or self._retries is None:
            return
        offset = queue.next_offset
        result = self._broker.read(*queue.queue, offset, 1, group=self.group)
        if result.status == "OFFSET_RESET":
            self._moved(queue, offset, result)

    # -- pulling ----------------------------------------------------------------------------------------------------

    def _submit_pull(self, queue: ProcessQueue) -> None:
        """From any thread, even one in the middle of a dispatch: it must not wait for anything."""
        queue.submitted = True
        self._workers.submit(partial(self._pull, queue))

    def _pull(self, queue: ProcessQueue, worker: Worker) -> Flow[None]:
        if queue.closing:
            return
        queue.last_pull_ms = self._clock.monotonic_ms()
        queue.submitted = False
        with queue.settling:
            if self._paused or queue.paused:
                queue.parked = True  # whoever resumes it sees this, or we would have seen that
                return
        messages_max, bytes_max = queue.room()
        if not messages_max:
            self._full_times += 1
            if self._full_times % 1_000 == 1:
                _log.info("group %s: %s/%d is full: %s", self.group, *queue.queue, queue.info(queue.last_pull_ms))
            if queue.begins_to_have_room():
                self._submit_pull(queue)
            return
        offset, topic = queue.next_offset, queue.queue.topic
        try:
            result = self._broker.read(
                topic,
                queue.queue.queue_id,
                offset,
                messages_max,
                max_bytes=bytes_max,
                filter=self._filter(topic),
                group=self.group,
            )
            messages, idle = self._take_in(queue, offset, result, self._clock.monotonic_ms() - queue.last_pull_ms)
        except StoreClosedError:
            return
        except Exception as error:
            self._pull_failed(queue, error)
            return
        if messages:
            yield from self._service.accept(worker, queue, messages, idle)

    def _pull_failed(self, queue: ProcessQueue, error: Exception) -> None:
        if isinstance(error, TopicNotFoundError | NotPermittedError | ConfigError):
            self.stir()  # it was deleted or altered: the share says so
        self._handling.log.say(
            logging.ERROR, "cannot be read, again in a second", at=queue.queue, error=error, traceback=True
        )
        self._workers.later(PULL_FAILED_MS, partial(self._submit_pull, queue))

    def _take_in(
        self, queue: ProcessQueue, offset: int, result: ReadResult, took_ms: float
    ) -> tuple[Sequence[Message], bool]:
        """Do what follows from a pull, the next one last: if anything before it fails, that is where it is put. What
        is to be handled, and whether nobody is at the queue."""
        status, next_offset = result.status, result.next_offset
        if status == "FOUND":
            self._handling.pulled(queue.queue.topic, len(result.messages), took_ms)
            messages = self._hooks.receiving(result.messages) if self._hooks.on_receive else result.messages
            idle = queue.put(messages, next_offset)
            if not messages:
                self._step_over(queue)
            if next_offset >= result.max_offset:
                self._wait(queue)
            else:
                self._submit_pull(queue)
            return messages, idle
        if status in ("NO_MATCHED_MESSAGE", "MESSAGE_WAS_REMOVING"):
            queue.put((), next_offset)
            self._step_over(queue)
            self._submit_pull(queue)
        elif status == "OFFSET_OVERFLOW_ONE" or (offset == 0 and status.startswith("NO_M")):
            queue.put((), offset)
            self._wait(queue)
        else:
            self._moved(queue, offset, result)
        return (), False

    def _step_over(self, queue: ProcessQueue) -> None:
        """A stretch of which nothing is for us still moves the position, once nothing before it waits."""
        with queue.settling:
            if not queue.dropped and not len(queue):
                self._commit(queue, queue.position())

    def _wait(self, queue: ProcessQueue) -> None:
        """Pull again when there is a message."""
        ref = queue.queue
        # Under the lock: it may be called, and another parked by who pulls then, before this one is noted.
        with queue.settling:
            if queue.closing:
                return
            try:
                self._waits[queue] = self._broker.add_waiter(
                    *ref,
                    queue.next_offset,
                    lambda worth: self._submit_pull(queue),
                    filter=self._filter(ref.topic),
                    timeout=HOLD_S,
                )
            except StoreClosedError:
                return
            except Exception as error:  # too many wait, say
                self._pull_failed(queue, error)

    def _moved(self, queue: ProcessQueue, offset: int, result: ReadResult) -> None:
        """What we asked for does not exist, or the group was reset: drop what we have, and begin anew."""
        new = result.next_offset
        if result.status != "OFFSET_RESET":
            say = _log.error if offset > result.max_offset else _log.warning
            say("group %s: %s/%d has no offset %d; it goes on at %d", self.group, *queue.queue, offset, new)
        self._hooks.tell(self._hooks.on_offset_reset, queue.queue, offset, new)
        self._begin_anew(queue, new)

    def _begin_anew(self, queue: ProcessQueue, offset: int, *, asked: bool = False) -> bool:
        """Whether it will be; not if it is given up, or is begun anew already: elsewhere, only if that is `asked`."""
        with queue.settling:
            if queue.dropped and not (asked and queue.restart_at is not None):
                return False
            is_first = queue.restart_at is None  # else a restart is on its way, and finds the new offset
            queue.restart_at = offset
            queue.closing = queue.dropped = True  # whoever ends late must not drag the new position
            self._commit(queue, offset)
        self._close(queue)
        if is_first:
            self._workers.later(0, partial(self._restart, queue))
        return True

    def begin_again(self, queue: ProcessQueue) -> None:
        """Pull again all that is not settled: somebody has lost hold of what he had of it."""
        self._begin_anew(queue, queue.position())

    def _restart(self, queue: ProcessQueue) -> None:
        with queue.settling, self._lock:
            if self._queues.get(queue.queue) is not queue or queue.restart_at is None:
                return
            if queue.running:  # in vain, but not twice at a time: `leave` comes back here
                return
            del self._queues[queue.queue]
            offset, queue.restart_at = queue.restart_at, None
        queue.clear()
        begun = self._begin(queue.queue, offset, announce=queue.unannounced)
        self._set_out([queue.queue] if begun else ())
        if not begun:
            self.stir()

    # -- for the services -------------------------------------------------------------------------------------------

    def enter(self, queue: ProcessQueue, first: int = 0) -> bool:
        """A worker begins to work on messages of a queue that were pulled from offset `first` on; False: it must not.
        Of one that is to go it may, as long as later ones were begun: they hand over as if none had overtaken. The lock
        of the queue holds until the last worker has left."""
        with queue.settling:
            if (queue.closing or self._halted) and (queue.dropped or first >= queue.begun):
                return False
            if not queue.running and not self.membership.begin_work(queue.queue):
                self._workers.later(0, partial(self._lose, [queue]))
                return False
            queue.begun = max(queue.begun, first)
            queue.running += 1
            return True

    def leave(self, queue: ProcessQueue) -> None:
        """It does so no longer."""
        with queue.settling:
            queue.running -= 1
            self._commit_rest(queue)
            if not queue.running:
                self.membership.end_work(queue.queue)
            last = queue.closing and not queue.running
        if last and self._closed:
            self.membership.give([queue.queue])
        elif last:
            self._workers.later(0, partial(self._ended, queue))

    def settle(self, queue: ProcessQueue, messages: Sequence[Message]) -> bool:
        """Settle messages, and commit what that makes the position. Return False if they count for nothing any more."""
        with queue.settling:
            if queue.dropped:
                return False
            now_ms = self._clock.monotonic_ms()
            offset = queue.remove(messages, now_ms)
            if offset >= 0:
                self._settled_to(queue, offset, now_ms)
        self.refill(queue)
        return True

    def refill(self, queue: ProcessQueue) -> None:
        """Pull again if that had to wait for room and there is enough now."""
        if queue.throttled and queue.begins_to_have_room():
            self._submit_pull(queue)

    def _settled_to(self, queue: ProcessQueue, offset: int, now_ms: int) -> None:
        """Commit a position, or have `leave` do so: an ordered queue has a new one with each message."""
        queue.settled_to = offset
        if now_ms - queue.last_commit_ms >= COMMIT_MS:
            self._commit(queue, offset)

    def _commit_rest(self, queue: ProcessQueue) -> None:
        if queue.settled_to is not None and not queue.dropped:
            self._commit(queue, queue.settled_to)

    def _commit(self, queue: ProcessQueue, offset: int) -> None:
        queue.settled_to = None
        queue.last_commit_ms = self._clock.monotonic_ms()
        if offset == queue.committed:
            return
        try:
            self.progress.commit(queue.queue, offset)
            queue.committed = offset
        except MQStoreError as error:  # closing, or the topic has gone: the messages come again, as they may
            what = f"offset {offset} is not committed"
            self._handling.log.say(logging.WARNING, what, at=queue.queue, error=error, like="commit")

    # -- by hand ----------------------------------------------------------------------------------------------------

    def pause(self, queues: Sequence[QueueRef]) -> None:
        """Pull nothing from these queues, which stay ours; none: from any. What is cached is still handled."""
        with self._lock:  # a queue that is being begun has seen this, or is seen here
            self._paused = self._paused or not queues
            self._paused_queues.update(as_queue(ref) for ref in queues)
        for queue in self._owned(queues):
            queue.paused = True

    def pause_as(self, other: Assignment) -> None:
        """Before `start`: pause what was paused in `other`."""
        self._paused, self._paused_queues = other._paused, set(other._paused_queues)

    def resume(self, queues: Sequence[QueueRef]) -> None:
        """Go on with these; none: with all."""
        with self._lock:
            self._paused = self._paused and bool(queues)
            self._paused_queues.difference_update([as_queue(ref) for ref in queues] or list(self._paused_queues))
        if not queues:
            self.stir()
        for queue in self._owned(queues):
            with queue.settling:
                queue.paused = False
                goes_on = queue.parked and not self._paused
                queue.parked = queue.parked and not goes_on
            if goes_on:
                self._submit_pull(queue)

    def _owned(self, queues: Sequence[QueueRef]) -> list[ProcessQueue]:
        with self._lock:
            refs = [as_queue(ref) for ref in queues] or list(self._queues)
            return [self._queues[ref] for ref in refs if ref in self._queues]

    def owned(self) -> frozenset[QueueRef]:
        """The queues that are ours now."""
        with self._lock:
            return frozenset(self._queues)

    def seek(self, ref: QueueRef, to: int | Start) -> None:
        """Drop what is cached of a queue and go on elsewhere. ConfigError for a queue that is not ours,
        OffsetOutOfRangeError for an offset that it does not have."""
        owned = self._owned([ref])
        if not owned:
            raise ConfigError(f"queue {ref.queue_id} of {ref.topic!r} is not assigned to this consumer now")
        offset = place(self._broker, ref, to)
        if not self._begin_anew(owned[0], offset, asked=True):
            raise ConfigError(f"queue {ref.queue_id} of {ref.topic!r} is just being given up; nothing has changed")
        self.progress.save()  # no crash is to undo what was asked for

    def infos(self) -> list[tuple[QueueInfo, int | None]]:
        """What is cached of each queue, and the committed offset."""
        now_ms = self._clock.monotonic_ms()
        return [(queue.info(now_ms), self.progress.committed(queue.queue)) for queue in self._owned(())]
