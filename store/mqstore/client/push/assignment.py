"""Queues of a push consumer, and their pulls (clients#rebalance, clients#pull, clients#revoke).

    rebalance (timer thread)                       pull (any worker)
    share - owned  ---> lock ---> begin ---> pull ----> FOUND              cached, dispatched; pull again, or wait
    owned - share  ---> closing ---> gone               NO_MATCHED         on at once
                                                        NO_NEW_MSG         wait for a message, 15 s at most
                                                        OFFSET_ILLEGAL     dropped, restarted at the right offset
                                                        full, paused       until there is room, until it is resumed

Each queue has exactly one pull: being made, submitted, or waiting for messages, for room, for `resume` or for a timer.
Code that takes away one of these puts the next in its place.

The class is long because every state of a queue changes under one lock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

from mqstore.broker.tables.names import retry_topic
from mqstore.client.group.groupsettings import Progress, place
from mqstore.client.group.membership import Membership
from mqstore.client.push.batches import Context
from mqstore.client.push.handler_call import Subscription
from mqstore.client.push.processqueue import ProcessQueue, QueueInfo
from mqstore.client.push.workers import Flow, Worker
from mqstore.contract import Filter, ReadResult, Start
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
from mqstore.log.writing.log_tail import as_queue
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

REBALANCE_MS = 20_000
LOOK_FAILED_MS = PULL_FAILED_MS = 1_000
COMMIT_MS = 10
"""Time between two commits of a queue that is being worked on."""
LOCK_FAILED_MS = 500
SAVE_MS = 5_000
HOLD_S = 15.0
"""Longest wait for messages. It ends every fault of a wake-up."""
PULL_IDLE_MS = 120_000


class Service(Protocol):
    """Handling of the messages of a queue: a `ChunkRunner`."""

    def accept(self, worker: Worker, queue: ProcessQueue, messages: Sequence[Message], idle: bool) -> Flow[None]:
        """Handle messages that were pulled and cached, on the worker that pulled them.
        The next pull is on its way. If `idle`, no worker is at the queue, and the service must see to it."""

    def settle_done(self) -> None: ...


class Assignment:
    """Queues that one member has, from `start` to `close`."""

    def __init__(self, context: Context, membership: Membership, progress: Progress, service: Service) -> None:
        self.group = context.group
        self.membership = membership
        self.progress = progress
        self._broker = context.broker
        self._clock = context.broker.clock
        self._workers = context.workers
        self._handling = context.handling
        self._hooks = context.handling.hooks
        self._service = service
        self._limits = context.limits
        self._retries = None if context.broadcasting else retry_topic(context.group)
        """Topic of the group's retries. A broadcasting client has none, and keeps its own offsets."""
        self._topics: frozenset[str] = frozenset()
        self._lock = Lock()
        self._queues: dict[QueueRef, ProcessQueue] = {}
        self._leaving: dict[QueueRef, ProcessQueue] = {}
        """Closed queues whose handlers still run."""
        self._paused = False
        self._paused_queues: set[QueueRef] = set()
        self._halted = self._closed = self._stirred = False

    # -- start and stop ---------------------------------------------------------------------------------------------

    def start(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Join the group and take our share. Call it before the workers start."""
        self._join(subscriptions)
        self.progress.reload()
        self._broker.listen("save", self.save)
        if self._paused:  # nothing is taken yet, but later messages are found
            for ref in chain.from_iterable(self.membership.share().values()):
                self.progress.begin(ref)
        self._rebalance()
        self._workers.later(REBALANCE_MS, partial(self._every, REBALANCE_MS, self._sweep))
        if self._retries is None:
            self._workers.later(SAVE_MS, partial(self._every, SAVE_MS, self.save))

    def _every(self, period_ms: int, work: Callable[[], object]) -> None:
        """Do `work` now and every `period_ms`, on the timer thread. Errors are reported, and stop nothing."""
        if self._halted:
            return
        try:
            work()
        except StoreClosedError:
            pass
        except Exception as error:
            self._handling.report(error, f"a task that runs every {period_ms / 1000:g} s failed")
        self._workers.later(period_ms, partial(self._every, period_ms, work))

    def subscribe(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Change topics or filters. Cached messages are not filtered again (clients#broadcasting)."""
        self._join(subscriptions)
        for queue in self._owned(()):  # queues that wait still use the old filters
            with queue.settling:
                waiter, queue.waiter = queue.waiter, None
            if waiter is not None and self._broker.remove_waiter(waiter):
                self._submit_pull(queue)
        self.request_rebalance()

    def _join(self, subscriptions: Mapping[str, Subscription]) -> None:
        wanted = {name: each.wanted.expression for name, each in subscriptions.items()}
        if self._retries is not None:
            wanted[self._retries] = ("TAG", "*")
        self.membership.join(wanted)
        self.progress.enter(wanted)
        self._handling.subscriptions, self._topics = subscriptions, frozenset(wanted)

    def _filter(self, topic: str) -> Filter | None:
        subscription = self._handling.subscriptions.get(topic)
        return None if subscription is None else subscription.wanted.filter

    def request_rebalance(self) -> None:
        """Rebalance soon, since something has changed. Any thread may call it."""
        with self._lock:
            if self._stirred or self._halted:
                return
            self._stirred = True
        self._workers.later(0, self._look)

    def halt(self) -> None:
        with self._lock:
            self._halted = True
            queues = [*self._queues.values(), *self._leaving.values()]
        for queue in queues:
            self._close(queue)

    def close(self) -> None:
        """Save the offsets, leave the group and release the locks. Call it after `halt`.
        Running handlers no longer count. The lock of a queue with a running handler is released when that ends."""
        self._service.settle_done()
        with self._lock:
            queues = [*self._queues.values(), *self._leaving.values()]
            self._queues, self._leaving = {}, {}
        self._closed = True
        for queue in queues:
            with queue.settling:
                self._commit_rest(queue)
                queue.dropped = True
            queue.clear()
        self._broker.unlisten("save", self.save)
        try:
            self.progress.save()
        finally:
            self.membership.leave()
            self._notify_revoked(queues)

    def save(self) -> None:
        """Settle and commit handled messages, and save offsets that this client keeps itself."""
        self._service.settle_done()
        for queue in self._owned(()):
            with queue.settling:
                self._commit_rest(queue)
        if self._retries is None:
            self.progress.save()

    # -- rebalance --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Renew the locks and rebalance, on the timer thread. If that fails, try again in a second."""
        try:
            lost = self.membership.renew()
            self._lose([queue for queue in self._owned(()) if queue.queue in lost])
            self._rebalance()
        except StoreClosedError:
            return
        except Exception as error:
            self._handling.report(error, "dividing the queues failed, again in a second")
            if isinstance(error, GroupInUseError | SubscriptionConflictError):
                self._lose(self._owned(()))  # the group has dropped us and refuses us: others have the queues now
            self._workers.later(LOOK_FAILED_MS, self.request_rebalance)

    def _rebalance(self) -> None:
        with self._lock:
            self._stirred = False
            if self._halted:
                return
        if self._paused:  # nothing moves; `resume` looks again (clients#broadcasting)
            return
        # Members need not agree on retry topics of popping, since the owner of such a topic may change.
        subscribed = () if self._retries is None else self._handling.subscriptions
        topics = self._topics.union(*(self._broker.pop_retry_topics(self.group, topic) for topic in subscribed))
        shares = self.membership.share(topics)
        with self._lock:
            owned, leaving = dict(self._queues), set(self._leaving)
        lost = [
            queue for ref, queue in owned.items() if ref.topic not in topics or ref not in shares.get(ref.topic, (ref,))
        ]
        for queue in lost:
            self._revoke(queue)
        wanted = {ref for share in shares.values() for ref in share}
        wanted -= owned.keys() | leaving
        begun: set[QueueRef] = set()
        try:
            if wanted:
                begun.update(ref for ref in sorted(self.membership.take(wanted)) if self._begin(ref))
        finally:
            self._set_out(begun)
        if begun != wanted:
            self._workers.later(LOCK_FAILED_MS, self.request_rebalance)

    def _begin(self, ref: QueueRef, offset: int | None = None, *, announce: bool = True) -> bool:
        """Own a queue whose lock we hold, for `_set_out`. Return False if it is released, to be tried later."""
        try:
            begin = self.progress.begin(ref) if offset is None else offset
        except MQStoreError as error:
            if not isinstance(error, StoreClosedError):
                self._handling.report(error, "cannot be started yet", ref)
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
        """Divide the limits of the topics, then pull the queues that were started."""
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
        """Call `on_assign` on a worker, then pull.
        The timer thread must renew locks, and a hook may take its time."""
        ours = [queue for queue in queues if self.acquire(queue)]  # a closing queue is not announced
        for queue in ours:
            queue.unannounced = False
        try:
            if ours:
                self._hooks.notify(self._hooks.on_assign, frozenset(queue.queue for queue in ours))
        finally:
            for queue in ours:
                self._submit_pull(queue)
                self.release(queue)

    def _divide(self) -> None:
        """Divide the limits of each topic by the number of its queues here, on the timer thread.
        Queues that now have room are pulled."""
        queues = self._owned(())
        number = Counter(queue.queue.topic for queue in queues)
        limits = {topic: self._limits.divided(count) for topic, count in number.items()}
        for queue in queues:
            queue.limits = limits[queue.queue.topic]
            self.refill(queue)

    def _revoke(self, queue: ProcessQueue) -> None:
        with self._lock:
            if self._queues.get(queue.queue) is not queue:
                return
            del self._queues[queue.queue]
            self._leaving[queue.queue] = queue
        queue.restart_at = None
        self._close(queue)
        self._ended(queue)

    def _close(self, queue: ProcessQueue) -> None:
        with queue.settling:
            queue.closing = True
            waiter, queue.waiter = queue.waiter, None
        if waiter is not None:
            self._broker.remove_waiter(waiter)

    def _ended(self, queue: ProcessQueue) -> None:
        """Release or restart a closed queue, on the timer thread, unless a worker is at it."""
        with queue.settling:
            if queue.running:  # `release` comes back here
                return
            with self._lock:
                leaves = self._leaving.get(queue.queue) is queue
                if leaves:
                    del self._leaving[queue.queue]
            if leaves:
                self._commit_rest(queue)
                queue.dropped = True
        if not leaves:
            self._restart(queue)
            return
        queue.clear()
        self.membership.give([queue.queue])
        self._notify_revoked([queue])
        self.request_rebalance()

    def _notify_revoked(self, queues: Sequence[ProcessQueue]) -> None:
        if told := frozenset(queue.queue for queue in queues if not queue.unannounced):
            self._hooks.notify(self._hooks.on_revoke, told)

    def _lose(self, queues: Sequence[ProcessQueue]) -> None:
        """Drop queues that another member already has. Our commits would set its offsets back."""
        for queue in queues:
            _log.warning("group %s lost the lock of %s/%d", self.group, *queue.queue)
            with queue.settling:
                queue.closing = queue.dropped = True
            self._revoke(queue)

    def _sweep(self) -> None:
        """Look every 20 s for changes that no event has reported. Locks come first: others take them after 60 s."""
        self._look()
        for queue in self._owned(()):
            if queue.throttled:
                self._ask_for_reset(queue)
            elif self._clock.monotonic_ms() - queue.last_pull_ms > PULL_IDLE_MS and not (
                queue.submitted or queue.parked or queue.paused or self._paused
            ):
                _log.error("group %s: %s/%d was not pulled for two minutes; restarting it", self.group, *queue.queue)
                self._revoke(queue)

    def _ask_for_reset(self, queue: ProcessQueue) -> None:
        """Read once from a full queue to see if the group was reset.
        A full queue does not pull, so it would not notice. A reset may be meant to free it from stuck messages."""
        if self._retries is not None and self.progress.committed(queue.queue) != queue.committed:
            offset = queue.next_offset
            result = self._broker.read(*queue.queue, offset, 1, group=self.group)
            if result.status == "OFFSET_RESET":
                self._moved(queue, offset, result)

    # -- pulling ----------------------------------------------------------------------------------------------------

    def _submit_pull(self, queue: ProcessQueue) -> None:
        """Make a worker pull. Any thread may call this, even during a dispatch, so it must not wait."""
        queue.submitted = True
        self._workers.submit(partial(self._pull, queue))

    def _pull(self, queue: ProcessQueue, worker: Worker) -> Flow[None]:
        if queue.closing:
            return
        queue.last_pull_ms = self._clock.monotonic_ms()
        queue.submitted = False
        with queue.settling:
            if self._paused or queue.paused:
                queue.parked = True  # `resume` sees this, or we would have seen its change
                return
        messages_max, bytes_max = queue.room()
        if not messages_max:
            if queue.begins_to_have_room():
                self._submit_pull(queue)
            return
        offset, wanted = queue.next_offset, self._filter(queue.queue.topic)
        try:
            result = self._broker.read(
                *queue.queue, offset, messages_max, max_bytes=bytes_max, filter=wanted, group=self.group
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
            self.request_rebalance()  # the topic was deleted or altered
        what = "cannot be read, again in a second"
        self._handling.log.say(logging.ERROR, what, at=queue.queue, error=error, traceback=True)
        self._workers.later(PULL_FAILED_MS, partial(self._submit_pull, queue))

    def _take_in(
        self, queue: ProcessQueue, offset: int, result: ReadResult, took_ms: float
    ) -> tuple[Sequence[Message], bool]:
        """Act on the result of a pull. Return the messages to handle, and True if no worker is at the queue.
        The next pull is scheduled last. After an error the caller schedules it."""
        status, next_offset = result.status, result.next_offset
        if status == "FOUND":
            messages, next_offset = queue.within_span(result.messages, next_offset)
            self._handling.pulled(queue.queue.topic, len(messages), took_ms)
            messages = self._hooks.receiving(messages)
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
        """Move the position past messages that are not for us, unless messages are cached."""
        with queue.settling:
            if not queue.dropped and not len(queue):
                self._commit(queue, queue.position())

    def _wait(self, queue: ProcessQueue) -> None:
        ref = queue.queue
        # Under the lock: the callback may run, and the next pull park another waiter, before this one is stored.
        with queue.settling:
            if queue.closing:
                return
            try:
                queue.waiter = self._broker.add_waiter(
                    *ref,
                    queue.next_offset,
                    lambda worth: self._submit_pull(queue),
                    filter=self._filter(ref.topic),
                    timeout=HOLD_S,
                )
            except StoreClosedError:
                return
            except Exception as error:  # for example, too many waiters
                self._pull_failed(queue, error)

    def _moved(self, queue: ProcessQueue, offset: int, result: ReadResult) -> None:
        """Drop the cached messages and begin again at another offset.
        The requested offset does not exist, or the group was reset."""
        new = result.next_offset
        if result.status != "OFFSET_RESET":
            say = _log.error if offset > result.max_offset else _log.warning
            say("group %s: %s/%d has no offset %d; it continues at %d", self.group, *queue.queue, offset, new)
        self._hooks.notify(self._hooks.on_offset_reset, queue.queue, offset, new)
        self.begin_again(queue, new)

    def begin_again(self, queue: ProcessQueue, offset: int, *, asked: bool = False) -> bool:
        """Restart a queue at `offset`. Return False if it is being given up or already restarted.
        In the second case `asked` replaces the offset, and this returns True."""
        with queue.settling:
            if queue.dropped and not (asked and queue.restart_at is not None):
                return False
            is_first = queue.restart_at is None  # otherwise a restart is scheduled, and finds the new offset
            queue.restart_at = offset
            queue.closing = queue.dropped = True  # late handlers must not change the new position
            self._commit(queue, offset)
        self._close(queue)
        if is_first:
            self._workers.later(0, partial(self._restart, queue))
        return True

    def _restart(self, queue: ProcessQueue) -> None:
        with queue.settling, self._lock:
            # Results of running handlers are void, but must not overlap the next: `leave` calls this again.
            if self._queues.get(queue.queue) is not queue or queue.restart_at is None or queue.running:
                return
            del self._queues[queue.queue]
            offset, queue.restart_at = queue.restart_at, None
        queue.clear()
        begun = self._begin(queue.queue, offset, announce=queue.unannounced)
        self._set_out([queue.queue] if begun else ())
        if not begun:
            self.request_rebalance()

    # -- for the services -------------------------------------------------------------------------------------------

    def acquire(self, queue: ProcessQueue, first: int = 0) -> bool:
        """Note that a worker begins messages that were pulled at offset `first`. Return False if it must not.
        With a closing queue it may, as long as later messages were started, so the next owner need not repeat those.
        The lock of the queue holds until the last worker has left."""
        with queue.settling:
            if (queue.closing or self._halted) and (queue.dropped or first >= queue.begun):
                return False
            if not queue.running and not self.membership.begin_work(queue.queue):
                self._workers.later(0, partial(self._lose, [queue]))
                return False
            queue.begun = max(queue.begun, first)
            queue.running += 1
            return True

    def release(self, queue: ProcessQueue) -> None:
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
        """Settle messages and commit the resulting position. Return False if they no longer count."""
        with queue.settling:
            if queue.dropped:
                return False
            now_ms = self._clock.monotonic_ms()
            if (offset := queue.remove(messages, now_ms)) >= 0:
                queue.settled_to = offset
                if now_ms - queue.last_commit_ms >= COMMIT_MS:  # otherwise `leave` or `save` commits it
                    self._commit(queue, offset)
        self.refill(queue)
        return True

    def refill(self, queue: ProcessQueue) -> None:
        """Pull again if a pull had to wait for room and there is enough now."""
        if queue.throttled and queue.begins_to_have_room():
            self._submit_pull(queue)

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
        except MQStoreError as error:  # closing, or the topic was deleted: the messages may be redelivered
            what = f"offset {offset} is not committed"
            self._handling.log.say(logging.WARNING, what, at=queue.queue, error=error, like="commit")

    # -- manual control ---------------------------------------------------------------------------------------------

    def pause(self, queues: Sequence[QueueRef]) -> None:
        with self._lock:  # a queue that begins now has seen this, or is found below
            self._paused = self._paused or not queues
            self._paused_queues.update(as_queue(ref) for ref in queues)
        for queue in self._owned(queues):
            queue.paused = True

    def pause_as(self, other: Assignment) -> None:
        self._paused, self._paused_queues = other._paused, set(other._paused_queues)

    def resume(self, queues: Sequence[QueueRef]) -> None:
        with self._lock:
            self._paused = self._paused and bool(queues)
            self._paused_queues.difference_update([as_queue(ref) for ref in queues] or list(self._paused_queues))
        if not queues:
            self.request_rebalance()
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
        return frozenset(queue.queue for queue in self._owned(()))

    def seek(self, ref: QueueRef, to: int | Start) -> None:
        if not (owned := self._owned([ref])):
            raise ConfigError(f"queue {ref.queue_id} of {ref.topic!r} is not assigned to this consumer now")
        offset = place(self._broker, ref, to)
        if not self.begin_again(owned[0], offset, asked=True):
            raise ConfigError(f"queue {ref.queue_id} of {ref.topic!r} is just being given up; nothing has changed")
        self.progress.save()  # a crash must not undo the seek

    def infos(self) -> list[tuple[QueueInfo, int | None]]:
        """Return the state of each queue and its cache, with its committed offset."""
        now_ms = self._clock.monotonic_ms()
        return [(queue.info(now_ms), self.progress.committed(queue.queue)) for queue in self._owned(())]
