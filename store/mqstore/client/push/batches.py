"""Messages that came together, and the workers that hand them to handlers.

    chunk: items ---- the next batch ---> handler ---> done      settled together, at the end or after 10 ms
                                            |
                                            +--------> failed    at once: the owner of the chunk decides

Without order several workers may be at one chunk. Others are invited if handlers were slow lately, since waking a
thread for less work than that is a loss. The next tick corrects a wrong guess. In order one worker is at a
chunk, and after a failure the owner decides if it continues (clients#concurrent, clients#orderly).

A chunk knows neither queues nor receipts. The subclasses of `ChunkRunner` do, and decide what becomes of its messages:
for mode "queue" `ConcurrentService` or `OrderlyService`, for mode "pop" `PopEngine`.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from mqstore.client.push.handler_call import Failure, Handling, Subscription
from mqstore.client.push.processqueue import Limits
from mqstore.client.push.workers import Flow, Worker, Workers
from mqstore.contract import BrokerContract
from mqstore.log.message import Message
from mqstore.signalsafe import Lock

TICK_MS = 50
IDLE_TICKS = 20
"""Number of ticks without work after which ticks end, so that an idle consumer does not wake."""

T = TypeVar("T")
C = TypeVar("C", bound="Chunk")

SETTLE_S = 0.01
"""Longest time that a handled message waits to be settled together with others."""
WORTH_MS = 1.0
"""Handling that takes this long is worth another thread."""
NOBODY_AGAIN_MS = 1_000
"""Pause before looking again for a subscriber of messages that have none.
By then their queue has usually left."""


@dataclass(frozen=True, slots=True)
class Context:
    """Objects that the parts of one push consumer share."""

    broker: BrokerContract
    group: str
    workers: Workers
    handling: Handling
    batch_size: int
    limits: Limits
    ordered: bool
    broadcasting: bool
    timeout_ms: int
    """`consume_timeout`."""


class BatchSource(Protocol):
    """Source of the messages of a chunk: a queue, or a consumer in mode "pop"."""

    closing: bool
    """True if no more messages are started."""
    dropped: bool
    """True if the results of handlers that still run do not count."""


class Chunk:
    """Messages in the order in which handlers get them."""

    __slots__ = ("alone_to", "apart", "done", "home", "invited", "items", "topic")

    def __init__(self, home: BatchSource, topic: str, messages: Iterable[Message], *, apart: bool = False) -> None:
        self.home = home
        self.topic = topic
        """Topic in which the messages are stored. They may have been sent to others."""
        self.items = deque(messages)
        self.done: deque[tuple[Sequence[Message], float]] = deque()
        """Messages that one call handled and that are not settled, and the milliseconds of the call."""
        self.apart = apart
        """If true, each call is settled alone. The messages may have several topics."""
        self.alone_to = -1
        """Offset up to which ordered messages are handled one at a time."""
        self.invited = 0
        """Number of workers that were invited to the chunk and have not arrived."""

    def may_end(self) -> bool:
        """Return True if messages are still started although the home is closing."""
        return False

    def take_rest(self) -> list[Message]:
        return next_of(self.items, len(self.items))

    def take_done(self) -> tuple[list[Message], float]:
        """Take the messages to settle, and the milliseconds that their handlers took."""
        messages: list[Message] = []
        took_ms = 0.0
        for batch, each_ms in next_of(self.done, len(self.done)):
            messages += batch
            took_ms += each_ms
        return messages, took_ms


class ChunkRunner(ABC, Generic[C]):
    """Hands the messages of chunks to the handlers of one consumer, and detects handlers that take long
    (clients#overdue).

    a worker begins ---> a tick every 50 ms, until no worker was at anything for a second
    at a tick            still in the call of the previous tick: its chunk is settled and shared (`_held_up`)
                         in one call for `consume_timeout`: logged and reported. Without order the call is cancelled if
                         it can be, and then `overdue(chunk, messages)`
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker = context.broker
        self._clock = context.broker.clock
        self._group = context.group
        self._workers = context.workers
        self._handling = context.handling
        self._ordered = context.ordered
        self._at: dict[Worker, C | None] = dict.fromkeys(context.workers.all)
        """Chunk that each worker is at."""
        self._seen: dict[Worker, tuple[int, int]] = {}
        """Call that a worker was in at the last tick, and when that call was first seen."""
        self._lock = Lock()
        """Guards the numbers of invited workers, `_ticking`, and the state of a `PopEngine`."""
        self._ticking = False
        self._idle_ticks = 0
        self._others = len(context.workers.all) - 1
        self.pace_ms = WORTH_MS
        """Recent average duration of a handler call. The first call may be slow."""

    @abstractmethod
    def run(self, chunk: C, worker: Worker) -> Flow[None]:
        """Handle the rest of a chunk in the worker, by `work`."""

    @abstractmethod
    def part(self, chunk: C, messages: Sequence[Message]) -> C:
        """Return a chunk with `messages`, which were taken from `chunk`."""

    @abstractmethod
    def settle(self, chunk: C) -> bool:
        """Settle the handled messages of a chunk. Return False if its worker must stop."""

    @abstractmethod
    def failed(self, chunk: C, messages: Sequence[Message], failure: Failure, each_ms: float) -> bool:
        """Deal with messages that a handler failed at, `each_ms` milliseconds each.
        Return False if the worker must stop."""

    @abstractmethod
    def unwanted(self, chunk: C, messages: Sequence[Message]) -> bool:
        """Deal with messages of a topic without subscription. Return False if the worker must stop."""

    @abstractmethod
    def broke(self, chunk: C, error: Exception) -> None:
        """Deal with the rest of a chunk after an error outside of handlers."""

    def overdue(self, chunk: C, messages: Sequence[Message]) -> None:
        """Give up messages whose handler exceeded `consume_timeout`, on the timer thread. Not called if ordered."""

    def submit(self, chunk: C) -> None:
        self._workers.submit(partial(self.run, chunk))

    def begin(self, chunk: C, worker: Worker) -> Flow[None]:
        """Begin a chunk in a worker. If handlers are slow, ask other workers to help."""
        if not self._ordered:
            batches = -(-len(chunk.items) // self._context.batch_size)
            self._ask(chunk, min(batches - 1, int(batches * self.pace_ms / WORTH_MS)))
        return self.run(chunk, worker)

    def _ask(self, chunk: C, number: int) -> None:
        """Invite workers until up to `number` are on their way to a chunk."""
        with self._lock:
            number = min(number, self._others) - chunk.invited
            chunk.invited += max(0, number)
        for _ in range(number):
            self._workers.submit(partial(self._come, chunk))

    def _come(self, chunk: C, worker: Worker) -> Flow[None]:
        with self._lock:
            chunk.invited -= 1
        return self.run(chunk, worker)

    def settle_done(self) -> None:
        """Settle the handled messages of the chunks that workers are at. Their handlers may hang."""
        for chunk in list(filter(None, self._at.values())):
            self.settle(chunk)

    def _begin_ticks(self) -> None:
        with self._lock:
            if self._ticking:
                return
            self._ticking = True
        self._workers.later(TICK_MS, self._tick)

    def _tick(self) -> None:
        """Look once, on the timer thread, and schedule the next tick while there is work."""
        try:
            self._idle_ticks = 0 if self._look() else self._idle_ticks + 1
        finally:  # the next tick comes even after a hook's error
            with self._lock:
                self._ticking = False  # before the check, so that work that begins later starts its own ticks
                self._ticking = goes_on = self._idle_ticks < IDLE_TICKS or any(self._at.values())
            if goes_on:
                self._workers.later(TICK_MS, self._tick)

    def _look(self) -> bool:
        """Look for workers that are in a call for long. Return True if any worker is at work."""
        now_ms = self._clock.monotonic_ms()
        seen, self._seen = self._seen, {}
        busy = False
        for worker, chunk in self._at.items():
            if chunk is None:
                continue
            busy = True
            if not worker.messages:
                continue
            call, since_ms = seen.get(worker, (-1, now_ms))
            if call != worker.calls:
                since_ms = now_ms
            elif call != worker.lapsed and now_ms - since_ms >= self._context.timeout_ms:
                self._lapse(worker, chunk, call)
            else:
                self._held_up(worker, chunk)
            self._seen[worker] = (worker.calls, since_ms)
        return busy

    def _lapse(self, worker: Worker, chunk: C, call: int) -> None:
        messages = worker.lapse(call)
        if not messages:  # it has just ended
            return
        stack = worker.stack()
        then = ", and all later messages wait" if self._ordered else ", and is given up"
        what = f"has been in its handler for {self._context.timeout_ms / 1000:g} s{then}"
        self._handling.log.say(logging.ERROR, what, at=messages, like=stack, stack=stack)
        for message in messages:
            self._handling.timed_out(message, stack, self._context.timeout_ms)
        if self._ordered:  # the order of the queue depends on how this call ends
            return
        overdue = partial(self.overdue, chunk, messages)
        if (awaited := worker.awaits) is None:
            overdue()
        else:
            awaited.cancel(partial(self._workers.later, 0, overdue))

    def _held_up(self, worker: Worker, chunk: C) -> None:
        """Settle handled messages and share the rest of a chunk with other workers, on the timer thread."""
        if chunk.items or chunk.done:
            self.settle(chunk)
            if not self._ordered:
                self._ask(chunk, len(chunk.items))

    def work(self, chunk: C, worker: Worker) -> Flow[None]:
        """Hand the messages of a chunk to handlers, batch by batch, until there is a reason to stop."""
        self._at[worker] = chunk
        worker.is_cancelled = lambda: chunk.home.closing
        if not self._ticking:
            self._begin_ticks()
        try:
            try:
                yield from self._hand_out(chunk, worker)
            finally:
                self.settle(chunk)
        except Exception as error:
            self.broke(chunk, error)
        finally:
            worker.is_cancelled = self._at[worker] = None
            self._handling.suspects.release(chunk)

    def _hand_out(self, chunk: C, worker: Worker) -> Flow[None]:
        handling, size = self._handling, self._context.batch_size
        home, items, ordered = chunk.home, chunk.items, self._ordered
        watches, alone = handling.watches(), False
        each = chunk.apart or bool(handling.hooks.on_settle)
        subscriptions: Mapping[str, Subscription] | None = None
        subscription: Subscription | None = None
        settled_at = time.perf_counter()
        while (not home.closing or chunk.may_end()) and (batch := next_of(items, size)):
            if len(batch) > 1:
                batch = self._of_one_call(chunk, batch, watches)
            if subscriptions is not handling.subscriptions or chunk.apart:
                subscriptions = handling.subscriptions
                subscription = subscriptions.get(batch[0].topic) or subscriptions.get(chunk.topic)
            if subscription is None:
                if self.unwanted(chunk, batch):
                    continue
                return
            if watches and (alone := handling.is_suspect(batch[0])) and not handling.suspects.is_in(chunk):
                rest = chunk.take_rest() if ordered else []
                part = self.part(chunk, [*batch, *rest])
                handling.in_turn(part, partial(self.submit, part))
                continue
            try:
                ended = handling.call(worker, subscription, batch)
                failure, took_ms = ended if isinstance(ended, tuple) else (yield from ended)
            except BaseException:  # Ctrl-C or similar: nothing is settled, and the owner releases the rest
                items.extendleft(reversed(batch))
                raise
            if alone:
                worker.rest()  # before another worker begins the next suspected message, which may end the process
                handling.has_handled(chunk, batch)
            self.pace_ms += (took_ms - self.pace_ms) / 16
            if home.dropped or (worker.lapsed == worker.calls and not ordered):
                what = "a handler ended after consume_timeout or stop; its result does not count"
                handling.log.say(logging.WARNING, what, at=batch)
            elif failure is None:
                chunk.done.append((batch, took_ms))
            elif not self.concluded(chunk, batch, failure, took_ms):
                return
            if each or worker.ended_at - settled_at >= SETTLE_S:
                settled_at = worker.ended_at
                if not self.settle(chunk):
                    return

    def _of_one_call(self, chunk: C, batch: list[Message], watches: bool) -> list[Message]:
        """Return the first messages of a batch that one call may have. Put the others back in front.
        In order a message that failed before is alone. It is not a plain `Message` (delivery.py), a fast check."""
        number = len(batch)
        if chunk.apart:
            number = len(list(takewhile(batch[0].topic.__eq__, [message.topic for message in batch])))
        if self._ordered:
            again = (i for i in range(number) if type(batch[i]) is not Message and batch[i].reconsume_times)
            number = 1 if batch[0].offset <= chunk.alone_to else next(again, number) or 1
        if watches:
            number = self._handling.together(batch[:number])
        chunk.items.extendleft(reversed(batch[number:]))
        return batch[:number]

    def concluded(self, chunk: C, batch: list[Message], failure: Failure, took_ms: float) -> bool:
        """Settle the handled messages of a batch, and deal with the failed ones.

        In order no message after a failed one is done, and only the first failed one counts an attempt. A batch that
        failed without naming it is handed out again at once, one message at a time."""
        if failure.kind == "rollback":
            self._handling.report(TypeError(failure.reason), "it failed", batch[0])
        failed, untried = failure.failed, failure.untried
        if failed is None:
            failed, untried = ((), tuple(batch)) if self._ordered and len(batch) > 1 else (tuple(batch), ())
        named = {*map(id, failed), *map(id, untried)}
        good = [message for message in batch if id(message) not in named]
        if self._ordered:
            good = list(takewhile(lambda message: id(message) not in named, batch))
            rest = tuple(batch[len(good) :])
            failed = tuple(message for message in rest[:1] if message in failed)
            untried = rest[len(failed) :]
            if untried and not failed:
                chunk.alone_to = batch[-1].offset
        each_ms = took_ms / len(batch)
        if good:
            chunk.done.append((good, each_ms * len(good)))
        chunk.items.extendleft(reversed(untried))
        return not failed or self.failed(chunk, failed, failure, each_ms)


def next_of(items: deque[T], number: int) -> list[T]:
    """Take up to `number` items from the front. Other threads may take items at the same time."""
    taken: list[T] = []
    try:
        while len(taken) < number:  # cheaper than a range, as long as one is taken at a time
            taken.append(items.popleft())
    except IndexError:
        pass
    return taken
