"""Engine of a push consumer in mode "pop", which owns no queues (clients#pop-push, clients#overdue).

    fetch: look ---- found ---> units of work ---> workers ---> handler ---> settled
            ^ \\---- nothing --> waits at all topics, without a thread
            | \\---- no room --> until something is settled

    a unit is                                    and its end
    standard  a chunk of one topic, which        done: acknowledged together, when the chunk ends or 10 ms have passed.
              several workers may be at          failed: released, or a dead letter
    ordered   a line: messages found in one      one batch after the other, the next when this one is settled. Failed:
              queue, in order                    given back, all after it released; the queue is blocked until then

Failures wait in the engine, not here. There a crash does not lose their attempts, and meanwhile no worker and no
message is held. Leases of unsettled messages are renewed (renewal.py). A settlement that fails, because the disk is
full, is tried again every second until the consumer stops. The next one of its line begins when it has succeeded.

The class is long because fetching, handling and settling share one lock and the room that is left.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from mqstore.broker.tables.names import is_retry_topic
from mqstore.client.group.groupsettings import Wanted
from mqstore.client.interceptors import Settled
from mqstore.client.pop.delivery import as_delivered, fail
from mqstore.client.pop.popsource import PopSource
from mqstore.client.pop.renewal import Held, Renewer
from mqstore.client.push.batches import WORTH_MS, BatchSource, Chunk, ChunkRunner, Context
from mqstore.client.push.handler_call import Failure, Subscription
from mqstore.client.push.handlers import shortened
from mqstore.client.push.processqueue import QueueInfo
from mqstore.client.push.workers import Flow, Worker
from mqstore.contract import MAX_BATCH, Delivery, RetryPolicy, Start
from mqstore.errors import ConfigError, InvalidReceiptError, MQStoreError, ReceiptExpiredError, StoreClosedError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message, stored_bytes

VISIBILITY_MS = 60_000
RENEW_MS = 5_000
HOLD_MS = 20_000
"""Time within which fetched messages should begin, so that almost no lease is renewed before."""
FETCH_MAX = 256
FETCH_AGAIN_MS = SETTLE_AGAIN_MS = 1_000
SUSPEND_MIN_S, SUSPEND_MAX_S, DELAY_MAX_S = 0.01, 60.0, 12 * 3600.0
_receipt, _queue = attrgetter("receipt"), attrgetter("message.queue")


class Unit(Chunk):
    """Messages that are settled in one topic.
    In order they are of one queue, but may have been sent to several topics. Without order they were sent to one."""

    __slots__ = ("held",)

    def __init__(
        self, home: BatchSource, topic: str, held: Held, messages: Sequence[Message] | None = None, *, ordered: bool
    ) -> None:
        """`messages` are some of `held`. None means all."""
        super().__init__(home, topic, held.messages() if messages is None else messages, apart=ordered)
        self.held = held

    def receipts(self, messages: Sequence[Message]) -> list[str]:
        """Return the receipts of messages that are not settled."""
        return list(map(_receipt, map(self.held.deliveries.__getitem__, map(id, messages))))


class Settling:
    """Settlement steps that run in order, each until it succeeds."""

    __slots__ = ("steps", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.steps: deque[tuple[Callable[[], Settled], Sequence[Message], float]] = deque()
        """Tuples (function, messages, milliseconds that their handlers took)."""


class PopEngine(ChunkRunner[Unit]):
    """Fetches, handles and settles messages by the workers of one push consumer."""

    def __init__(self, context: Context, client_id: str, *, start: Start | None, retry: RetryPolicy | None) -> None:
        super().__init__(context)
        broker, group, ordered, handling = context.broker, context.group, context.ordered, context.handling
        self._limits = context.limits
        self._source = PopSource(
            broker, group, client_id, ordered=ordered, start=start, retry=retry, on_loss=handling.hooks.loss_teller()
        )
        self.closing = False
        self.dropped = False
        """States of a `BatchSource`. The lock guards them and the attributes below, except the renewer's."""
        self._units: dict[Unit, None] = {}
        """Units with messages that were not started."""
        self._size = 0
        """Number of bytes of the unsettled messages."""
        self._fetcher: object | None = None
        """Token of the worker that fetches, of which there is at most one."""
        self._fetch_worker: Worker | None = None
        self._fetch_max = MAX_BATCH
        """Number of messages to fetch at once: as many of the last size as fit into a quarter of the limit."""
        self._is_full = False
        self._is_paused = False
        self._settlings: dict[Settling, None] = {}
        """Settlements that wait to be tried again."""
        self._renewer = Renewer(broker, group, VISIBILITY_MS, handling.log)

    # -- the engine of a push consumer ------------------------------------------------------------------------------

    def start(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Join the group. Raises GroupInUseError, SubscriptionConflictError or NotPermittedError."""
        self._source.change(self._wanted(subscriptions), join=True)
        self._handling.subscriptions = subscriptions
        self._broker.listen("save", self.settle_done)
        self._workers.later(RENEW_MS, self._renew)
        self._rouse()

    def subscribe(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Change topics or filters. Raises the errors of `start`, and then nothing has changed.
        Messages of topics that are no longer handled are released."""
        self._source.change(self._wanted(subscriptions))
        self._handling.subscriptions = subscriptions
        self._rouse()

    def _wanted(self, subscriptions: Mapping[str, Subscription]) -> dict[str, Wanted]:
        return {topic: each.wanted for topic, each in subscriptions.items()}

    def halt(self) -> None:
        with self._lock:
            self.closing = True
        self._source.waits.ring()

    def close(self) -> None:
        """Release messages that were not started, try once more to settle the others, and leave the group."""
        self._broker.unlisten("save", self.settle_done)
        self.settle_done()
        with self._lock:
            self.closing = self.dropped = True
            settlings, self._settlings = list(self._settlings), {}
            units = list(self._units)
        for settling in settlings:
            self._go_through(settling, last=True)
        for unit in units:
            self._release(unit, unit.take_rest())
        self._renewer.clear()  # messages of hanging handlers are not renewed, and so redelivered
        self._source.leave()

    def pause(self, queues: Sequence[QueueRef]) -> None:
        """Stop fetching. Raises ConfigError if queues are named."""
        self._no_queues(queues)
        with self._lock:
            self._is_paused = True
        self._source.waits.ring()  # a paused consumer must not be called

    def pause_as(self, other: PopEngine) -> None:
        """Stop fetching if `other` is paused. Call it before `start`."""
        self._is_paused = other._is_paused

    def resume(self, queues: Sequence[QueueRef]) -> None:
        self._no_queues(queues)
        with self._lock:
            self._is_paused = False
        self._rouse()

    def _no_queues(self, queues: Sequence[QueueRef]) -> None:
        if queues:
            raise ConfigError("a consumer in mode 'pop' owns no queues: pause or resume all, without arguments")

    def seek(self, ref: QueueRef, to: int | Start) -> None:
        raise ConfigError(
            f"{ref}: a consumer in mode 'pop' has no positions; broker.reset(group, ...) sets the group's"
        )

    def owned(self) -> frozenset[QueueRef]:
        return frozenset()

    def infos(self) -> list[tuple[QueueInfo, int | None]]:
        return []

    # -- fetching ---------------------------------------------------------------------------------------------------

    def _rouse(self) -> None:
        """Have a worker fetch, unless one does. Any thread may call it."""
        with self._lock:
            idle = self.closing or self._is_paused
            if self._fetcher is not None and not idle:
                return  # the present fetcher looks again before it ends
            self._fetcher = token = None if idle else object()
        if token is None:
            self._pass_on()
        else:
            self._workers.submit(partial(self._fetch, token))

    def _pass_on(self, ticket: str | None = None) -> None:
        """Pass on the turns that were given to a consumer that does not look."""
        ticket = ticket or self._source.waits.next_turn()
        while ticket is not None:
            self._source.waits.pass_on(ticket)
            ticket = self._source.waits.next_turn()

    def _fetch(self, token: object, worker: Worker) -> Flow[None]:
        waits = self._source.waits
        ticket = waits.next_turn()
        while room := self._begin_fetch(token, worker):
            generation = waits.generation  # before the look, so that later changes end the wait
            begin = time.perf_counter()
            found: list[Delivery] = []
            try:
                topics = self._source.topics(ticket)
                found = [] if topics is None else self._source.look(topics, ticket, room, VISIBILITY_MS / 1000)
                ticket = None
                if not found:
                    self._end_fetch(token)  # before waiting, since the callback may come at once
                    if topics is not None:
                        waits.add(topics, self._rouse, generation, keep=True)
                    return
                units = self._take_in(found, (time.perf_counter() - begin) * 1000)
            except StoreClosedError:
                self._end_fetch(token)
                return
            except Exception as error:
                self._handling.report(error, "fetching failed, again in a second")
                self._source.release(found)
                self._end_fetch(token)
                self._workers.later(FETCH_AGAIN_MS, self._rouse)
                return
            for unit in units[1:]:
                self._workers.submit(partial(self.begin, unit))
            if units and len(self._workers.all) > 1 and self.pace_ms > WORTH_MS:
                self._hand_over(worker)
            try:
                if units:
                    yield from self.begin(units[0], worker)
            except BaseException:
                self._end_fetch(token)
                self._workers.later(FETCH_AGAIN_MS, self._rouse)
                raise
        self._pass_on(ticket)

    def _begin_fetch(self, token: object, worker: Worker) -> int:
        """Return how many messages to look for, or 0 if this fetch must end."""
        with self._lock:
            if self._fetcher is not token:
                return 0
            room = self._room()
            if room <= 0 or self.closing or self._is_paused or not self._source.wanted:
                self._fetcher = self._fetch_worker = None
                self._is_full = room <= 0
                return 0
            self._fetch_worker = worker
            return min(room, self._fetch_max)

    def _end_fetch(self, token: object) -> None:
        with self._lock:
            if self._fetcher is token:
                self._fetcher = self._fetch_worker = None

    def _room(self) -> int:
        return 0 if self._size >= self._limits.size else self._capacity() - len(self._renewer)

    def _capacity(self) -> int:
        """Return how many messages to hold: as many as the workers are likely to begin soon."""
        each = max(2, int(HOLD_MS / max(self.pace_ms, 0.01)))
        return min(self._limits.messages, each * len(self._workers.all) * self._context.batch_size)

    def _take_in(self, found: list[Delivery], took_ms: float) -> list[Unit]:
        groups: dict[tuple[str, str | int], list[Delivery]] = {}
        for (topic, _), together in groupby(found, _queue):
            if not self._ordered and not is_retry_topic(topic):  # usually a whole pop
                groups.setdefault((topic, topic), []).extend(together)
                continue
            for delivery in together:
                message = as_delivered(delivery)
                part = delivery.queue_id if self._ordered else message.topic
                shown = delivery if message is delivery.message else delivery._replace(message=message)
                groups.setdefault((delivery.topic, part), []).append(shown)
        units = [Unit(self, topic, Held(group), ordered=self._ordered) for (topic, _), group in groups.items()]
        expires_ms = self._clock.monotonic_ms() + VISIBILITY_MS - int(took_ms)
        size = sum([stored_bytes(unit.items) for unit in units])
        with self._lock:
            if not (is_closed := self.dropped):
                for unit in units:
                    self._renewer.add(unit.held, expires_ms)
                self._units.update(dict.fromkeys(units))
                self._size += size
                if not self._ordered:  # an ordered queue gives nothing after the first pop
                    fitting = self._limits.size * len(found) // (4 * size)
                    self._fetch_max = max(MAX_BATCH, min(fitting, FETCH_MAX))
        if is_closed:
            self._source.release(found)
            return []
        for unit in units:
            self._handling.pulled(unit.topic, len(unit.items), took_ms)
        if self._handling.hooks.on_receive:
            self._leave_out(units)
        return [unit for unit in units if unit.items]

    def _leave_out(self, units: Sequence[Unit]) -> None:
        """Acknowledge the messages that interceptors leave out."""
        messages = [message for unit in units for message in unit.items]
        left = set(map(id, self._handling.hooks.receiving(messages)))
        for unit in units:
            all_of_it = unit.take_rest()
            unit.items.extend(message for message in all_of_it if id(message) in left)
            out = [message for message in all_of_it if id(message) not in left]
            if out:
                try:
                    self._ack(unit, out)
                except MQStoreError as error:  # it is redelivered, and left out again
                    what = "left out by an interceptor, and could not be acknowledged"
                    self._handling.log.say(logging.WARNING, what, at=out, error=error)
                self._forget(unit, out)

    # -- units ------------------------------------------------------------------------------------------------------

    def run(self, unit: Unit, worker: Worker) -> Flow[None]:
        try:
            yield from self.work(unit, worker)
        finally:
            if self.closing:
                self._release(unit, unit.take_rest())
            if not unit.items:
                with self._lock:
                    self._units.pop(unit, None)

    def part(self, unit: Unit, messages: Sequence[Message]) -> Unit:
        part = Unit(self, unit.topic, unit.held, messages, ordered=self._ordered)
        with self._lock:
            self._units[part] = None
        return part

    def settle(self, unit: Unit) -> bool:
        """Settle the handled messages of a unit. Return False if a line must wait for another try."""
        return not unit.done or self._go_through(self._settling_of(unit)) or not self._ordered

    def failed(self, unit: Unit, messages: Sequence[Message], failure: Failure, each_ms: float) -> bool:
        """Give messages back. If they are not dead-lettered, the rest of a line is released."""
        settling = self._settling_of(unit)
        for message in messages:
            settling.steps.append((partial(self._fail, unit, message, failure), [message], each_ms))
        return self._go_through(settling) or not self._ordered

    def unwanted(self, unit: Unit, messages: Sequence[Message]) -> bool:
        """Release all that is left of a unit, because nobody subscribes to the topic of these messages."""
        self._release(unit, [*messages, *unit.take_rest()])
        return False

    def broke(self, unit: Unit, error: Exception) -> None:
        self._handling.report(error, "settling messages failed")
        self._release(unit, unit.take_rest())

    # -- settling ---------------------------------------------------------------------------------------------------

    def _settling_of(self, unit: Unit) -> Settling:
        """Return the settlement of the handled messages of a unit."""
        settling = Settling(unit)
        done, took_ms = unit.take_done()
        if done:
            settling.steps.append((partial(self._ack, unit, done), done, took_ms))
        return settling

    def _ack(self, unit: Unit, messages: Sequence[Message]) -> Settled:
        self._broker.ack(self._group, unit.topic, unit.receipts(messages))
        return "ack"

    def _fail(self, unit: Unit, message: Message, failure: Failure) -> Settled:
        delivery = unit.held.deliveries[id(message)]
        if failure.kind == "reject":
            self._broker.dead_letter(self._group, delivery.topic, delivery.receipt, failure.reason)
            return "dlq"
        most_s = SUSPEND_MAX_S if self._ordered else DELAY_MAX_S
        delay_s = shortened(failure.delay_s, most_s, self._handling.log, message)
        if delay_s is not None and self._ordered:
            delay_s = max(delay_s, SUSPEND_MIN_S)
        outcome = fail(self._broker, self._group, delivery, failure.reason, delay_s)
        if self._ordered and outcome == "retry":
            self._release(unit, unit.take_rest())
        return outcome

    def _go_through(self, settling: Settling, last: bool = False) -> bool:
        """Run all steps. Return False if some are tried again later. Then a line continues after them."""
        unit, log = settling.unit, self._handling.log
        while settling.steps:
            act, messages, took_ms = settling.steps[0]
            told = messages
            try:
                outcome = act()
            except (ReceiptExpiredError, InvalidReceiptError) as error:
                receipts = unit.receipts(messages)
                late = set(error.receipts) if len(messages) > 1 else {*receipts}
                told = [message for message, each in zip(messages, receipts, strict=True) if each not in late]
                outcome = "ack"  # for the messages that were in time
                log.say(logging.WARNING, "handled too late, it is redelivered", at=messages[0], error=error)
                if self._ordered:  # redelivered to another, and the later messages follow
                    self._release(unit, unit.take_rest())
            except StoreClosedError:
                settling.steps.clear()
                return False
            except Exception as error:
                if last:
                    log.say(logging.ERROR, "it is not settled, and is redelivered", at=messages[0], error=error)
                    return False
                self._handling.report(error, "it cannot be settled yet", messages[0])
                with self._lock:
                    self._settlings[settling] = None
                self._workers.later(SETTLE_AGAIN_MS, partial(self._workers.submit, partial(self._again, settling)))
                return False
            settling.steps.popleft()
            self._forget(unit, messages)
            if told:
                self._handling.settled(told, outcome, took_ms)
        return True

    def _again(self, settling: Settling, worker: Worker) -> Flow[None]:
        with self._lock:
            if settling not in self._settlings:
                return
            del self._settlings[settling]
        if self._go_through(settling) and self._ordered:
            yield from self.run(settling.unit, worker)

    def _release(self, unit: Unit, messages: Sequence[Message]) -> None:
        """Release messages that no handler has seen."""
        if messages:
            try:
                self._broker.release(self._group, unit.topic, unit.receipts(messages))
            except MQStoreError as error:
                self._handling.log.say(logging.WARNING, "could not be released", at=messages, error=error)
            self._forget(unit, messages)

    def _forget(self, unit: Unit, messages: Sequence[Message]) -> None:
        gone = self._renewer.remove(unit.held, messages)
        with self._lock:
            self._size = self._size - stored_bytes(gone) if len(self._renewer) else 0
            # Not for each settled message, since a pop should fetch more than one.
            roused = self._is_full and self._room() > 0 and 2 * len(self._renewer) <= self._capacity()
            self._is_full = self._is_full and not roused
        if roused:
            self._rouse()

    # -- time -------------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Renew leases that are due, on the timer thread."""
        if not self.dropped:
            self._workers.later(RENEW_MS, self._renew)  # first, so that no error ends it
            self._renewer.run_once(self._clock.monotonic_ms())

    def overdue(self, unit: Unit, messages: Sequence[Message]) -> None:
        self.failed(unit, messages, Failure("retry", "its handler hung"), self._context.timeout_ms)

    def _held_up(self, worker: Worker, chunk: Unit) -> None:
        super()._held_up(worker, chunk)
        self._hand_over(worker)

    def _hand_over(self, worker: Worker) -> None:
        """Let another worker fetch in place of `worker`, if `worker` is the one that fetches."""
        with self._lock:
            if self._fetch_worker is not worker or self._fetcher is None:
                return
            self._fetcher = token = object()
            self._fetch_worker = None
        self._workers.submit(partial(self._fetch, token))
