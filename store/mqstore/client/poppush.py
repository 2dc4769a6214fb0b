"""What a push consumer does in mode "pop": deliveries by receipt, no queue is anybody's (clients#pop-push).

    fetch: look ---- found ---> units of work ---> workers ---> handler ---> settled
            ^ \\---- nothing --> waits at all topics, without a thread
            | \\---- no room --> until something is settled

    a unit is                                    and what becomes of it
    standard  a chunk of one topic, which        done: acknowledged together, when the chunk ends or 10 ms have passed.
              several workers may be at          failed: given back, or a dead letter
    ordered   a line: what was found in one      one batch after the other, the next when this one is settled. Failed:
              queue, in order                    given back, all behind it released; the queue is blocked until then

Failures wait in the engine, not here: their attempts are counted where a crash does not lose them, and no worker and no
message is held meanwhile. What is here and not settled is renewed (renewal.py). A settlement that fails, since the disk
is full, is tried again after 0.1 to 1 s until the consumer stops; the next of its line begins when it is through.

A standard handler that takes longer than `consume_timeout` is given up: its message comes again, its result counts for
nothing. Of an ordered one it is only told: if its message came again meanwhile, two would be at the same queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from operator import attrgetter

from mqstore.broker.broker import Broker, Start
from mqstore.broker.groups import RetryPolicy
from mqstore.broker.pop import service as pop
from mqstore.client.chunks import SETTLE_S, WORTH_MS, Helpers, next_of
from mqstore.client.delivery import fail
from mqstore.client.handling import Ended, Failure, Handling, Subscription
from mqstore.client.interceptors import Settled
from mqstore.client.outcome import shortened
from mqstore.client.overdue import Overdue
from mqstore.client.popitems import SETTLE_AGAIN_MAX_MS, Item, Settling, Unit, failed_of
from mqstore.client.popsource import PopSource
from mqstore.client.processqueue import Limits, QueueInfo
from mqstore.client.renewal import Renewer
from mqstore.client.wanted import Wanted
from mqstore.client.workers import Flow, Worker, Workers
from mqstore.errors import ConfigError, InvalidReceiptError, MQStoreError, ReceiptExpiredError, StoreClosedError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message

__all__ = ["PopEngine"]

LOAN_MS = 60_000
HOLD_MS = 20_000
"""No more is fetched than is likely to be begun within this time, so that next to nothing is ever renewed unbegun."""
FETCH_AGAIN_MS = 1_000
SUSPEND_MIN_S, SUSPEND_MAX_S, DELAY_MAX_S = 0.01, 60.0, 12 * 3600.0

_topic = attrgetter("topic")


class PopEngine:
    """Fetches, handles and settles by way of the workers of one push consumer."""

    def __init__(
        self,
        broker: Broker,
        group: str,
        client_id: str,
        workers: Workers,
        handling: Handling,
        *,
        ordered: bool,
        batch_size: int,
        start: Start | None,
        retry: RetryPolicy | None,
        limits: Limits,
        consume_timeout_ms: int,
    ) -> None:
        self._broker = broker
        self._group = group
        self._workers = workers
        self._handling = handling
        self._ordered = ordered
        self._batch_size = batch_size
        self._limits = limits
        self._timeout_ms = consume_timeout_ms
        self._overdue: Overdue[Unit] = Overdue(
            workers,
            handling,
            broker.store.clock,
            consume_timeout_ms,
            ", and its queue waits" if ordered else ", and comes again",
            held_up=self._held_up,
            overdue=self._time_is_up,
        )
        self._clock = broker.store.clock
        self._source = PopSource(
            broker,
            group,
            client_id,
            ordered=ordered,
            start=start,
            retry=retry,
            on_loss=handling.hooks.loss_teller(),
        )
        self._subscriptions: Mapping[str, Subscription] = {}
        self._helpers = Helpers(workers, batch_size)
        self._lock = threading.Lock()
        """Of all below."""
        self._items: dict[Item, None] = {}
        """What is here and not settled."""
        self._size = 0
        """Its bytes."""
        self._fetcher: object | None = None
        """A token of who fetches: at most one does."""
        self._fetch_worker: Worker | None = None
        self._is_full = False
        self._is_paused = False
        self._is_halted = False
        self._is_closed = False
        self._settlings: dict[Settling, None] = {}
        """Those that wait to be tried again."""
        self._renewer: Renewer[Item] = Renewer(broker, group, LOAN_MS, handling.log)
        self._renew_ms: int | None = None
        """When the renewer's timer is due."""

    # -- the engine of a push consumer ------------------------------------------------------------------------------

    def start(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Join the group. GroupInUseError, SubscriptionConflictError, NotPermittedError."""
        self._source.change(self._wanted(subscriptions), join=True)
        self._subscriptions = subscriptions
        self._rouse()

    def subscribe(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Other topics or filters; the same errors, and then nothing has changed. What is here of a topic that nobody
        handles any more is released."""
        self._source.change(self._wanted(subscriptions))
        self._subscriptions = subscriptions
        self._rouse()

    def _wanted(self, subscriptions: Mapping[str, Subscription]) -> dict[str, Wanted]:
        return {topic: each.wanted for topic, each in subscriptions.items()}

    def halt(self) -> None:
        """Begin nothing any more."""
        with self._lock:
            self._is_halted = True
        self._source.waits.ring()

    def close(self) -> None:
        """Release what was not begun, try once more to settle what was, and leave the group."""
        with self._lock:
            self._is_halted = self._is_closed = True
            settlings, self._settlings = list(self._settlings), {}
        for settling in settlings:
            self._go_through(settling, last=True)
        self._release([item for item in list(self._items) if not item.is_begun])
        self._renewer.remove(*self._items)  # handlers that hang: nobody renews them, so they come again
        self._source.leave()

    def pause(self, queues: Sequence[QueueRef]) -> None:
        """Fetch nothing more. ConfigError for some queues only."""
        self._no_queues(queues)
        with self._lock:
            self._is_paused = True
        self._source.waits.ring()  # who is not going to look is not to be called

    def pause_as(self, other: PopEngine) -> None:
        """Before `start`: fetch nothing if `other` was to fetch nothing."""
        self._is_paused = other._is_paused

    def resume(self, queues: Sequence[QueueRef]) -> None:
        self._no_queues(queues)
        with self._lock:
            self._is_paused = False
        self._rouse()

    def _no_queues(self, queues: Sequence[QueueRef]) -> None:
        if queues:
            raise ConfigError(
                "a consumer in mode 'pop' has no queues of its own: pause or resume all, without arguments"
            )

    def seek(self, ref: QueueRef, to: int | Start) -> None:
        """ConfigError: no queue is assigned."""
        raise ConfigError(
            f"{ref}: a consumer in mode 'pop' has no positions; broker.reset(group, ...) sets the group's"
        )

    def owned(self) -> frozenset[QueueRef]:
        """None."""
        return frozenset()

    def infos(self) -> list[tuple[QueueInfo, int | None]]:
        """None."""
        return []

    # -- fetching ---------------------------------------------------------------------------------------------------

    def _rouse(self) -> None:
        """Have somebody fetch, unless somebody does. From any thread."""
        with self._lock:
            idle = self._is_halted or self._is_paused
            if self._fetcher is not None and not idle:
                return  # that one looks again before it ends
            self._fetcher = token = None if idle else object()
        if token is None:
            self._pass_on()
        else:
            self._workers.submit(partial(self._fetch, token))

    def _pass_on(self, turn: str | None = None) -> None:
        """The turns that were given to a consumer that does not look."""
        turn = turn or self._source.waits.next_turn()
        while turn is not None:
            self._source.waits.pass_on(turn)
            turn = self._source.waits.next_turn()

    def _fetch(self, token: object, worker: Worker) -> Flow[None]:
        waits = self._source.waits
        turn = waits.next_turn()
        while room := self._begin_fetch(token, worker):
            rings = waits.rings  # before the look: what changes later ends the wait
            begin = time.perf_counter()
            found: list[pop.Delivery] = []
            try:
                topics = self._source.topics(turn)
                found = [] if topics is None else self._source.look(topics, turn, room, LOAN_MS / 1000)
                turn = None
                if not found:
                    self._end_fetch(token)  # before waiting, for the call may come at once
                    if topics is not None:
                        waits.add(topics, self._rouse, rings, keep=True)
                    return
                units = self._take_in(found, (time.perf_counter() - begin) * 1000)
            except StoreClosedError:
                self._end_fetch(token)
                return
            except Exception as error:
                self._handling.report(error, "fetching failed, again in a second")
                self._source.give_back(found)
                self._end_fetch(token)
                self._workers.later(FETCH_AGAIN_MS, self._rouse)
                return
            for unit in units[1:]:
                self._workers.submit(partial(self._run, unit))
            if units and self._helpers.others and self._helpers.pace_ms > WORTH_MS:
                self._hand_over(worker)
            try:
                if units:
                    yield from self._run(units[0], worker)
            except BaseException:
                self._end_fetch(token)
                self._workers.later(FETCH_AGAIN_MS, self._rouse)
                raise
        self._pass_on(turn)

    def _begin_fetch(self, token: object, worker: Worker) -> int:
        """How many messages to look for; 0: this is the wrong one, or the wrong moment, to fetch."""
        with self._lock:
            if self._fetcher is not token:
                return 0
            room = self._room()
            if room <= 0 or self._is_halted or self._is_paused or not self._source.wanted:
                self._fetcher = self._fetch_worker = None
                self._is_full = room <= 0
                return 0
            self._fetch_worker = worker
            return min(room, pop.MAX_BATCH)

    def _end_fetch(self, token: object) -> None:
        with self._lock:
            if self._fetcher is token:
                self._fetcher = self._fetch_worker = None

    def _room(self) -> int:
        return 0 if self._size >= self._limits.size else self._capacity() - len(self._items)

    def _capacity(self) -> int:
        """How many messages to hold: as many as the workers are likely to begin before long."""
        each = max(2, int(HOLD_MS / max(self._helpers.pace_ms, 0.01)))
        return min(self._limits.messages, each * len(self._workers.all) * self._batch_size)

    def _take_in(self, found: list[pop.Delivery], took_ms: float) -> list[Unit]:
        items = [Item(delivery) for delivery in found]
        expires_ms = self._clock.monotonic_ms() + LOAN_MS - int(took_ms)
        with self._lock:
            if not (is_closed := self._is_closed):
                self._items.update(dict.fromkeys(items))
                self._size += sum([item.size for item in items])
        if is_closed:
            self._source.give_back(found)
            return []
        self._renewer.add([(item, item.delivery.topic, item.delivery.receipt) for item in items], expires_ms)
        self._renew_at(expires_ms - LOAN_MS // 3)
        units: dict[tuple[str, str | int], list[Item]] = {}
        for item in items:
            part = item.delivery.queue_id if self._ordered else item.topic
            units.setdefault((item.delivery.topic, part), []).append(item)
        for (topic, _), each in units.items():
            self._handling.pulled(topic, len(each), took_ms)
        if self._handling.hooks.on_receive:
            self._leave_out(units.values(), items)
        return [Unit(each) for each in units.values() if each]

    def _leave_out(self, units: Iterable[list[Item]], items: list[Item]) -> None:
        """What the interceptors do not want is done."""
        left = {id(message) for message in self._handling.hooks.receiving([item.message for item in items])}
        for each in units:
            out = [item for item in each if id(item.message) not in left]
            if out:
                each[:] = [item for item in each if id(item.message) in left]
                try:
                    self._ack(out)
                except MQStoreError as error:  # it comes again, and is left out again
                    what = "left out by an interceptor, and could not be acknowledged"
                    self._handling.log.say(logging.WARNING, what, at=[item.message for item in out], error=error)
                self._forget(out)

    # -- a worker at a unit -----------------------------------------------------------------------------------------

    def _run(self, unit: Unit, worker: Worker) -> Flow[None]:
        if not self._ordered:
            self._helpers.begin(unit, self._join_in)
        return self._join_in(unit, worker)

    def _join_in(self, unit: Unit, worker: Worker) -> Flow[None]:
        if not unit.items:
            return
        self._overdue.begin(worker, unit, lambda: self._is_halted)
        try:
            yield from (self._run_line if self._ordered else self._run_chunk)(unit, worker)
        finally:
            self._overdue.end(worker)
            self._handling.leave(unit)

    def _run_chunk(self, chunk: Unit, worker: Worker) -> Flow[None]:
        handling, settled_at = self._handling, time.perf_counter()
        watches, alone = handling.watches(), False
        subscriptions: Mapping[str, Subscription] | None = None
        subscription: Subscription | None = None
        try:
            while not self._is_halted and (batch := next_of(chunk.items, self._batch_size)):
                if len(batch) > 1:
                    batch = self._of_one_call(chunk, batch)
                if subscriptions is not self._subscriptions:
                    subscriptions, subscription = self._subscriptions, self._subscription(chunk, batch)
                if subscription is None:
                    return
                if watches and (alone := handling.is_suspect(batch[0].message)) and not handling.is_in_turn(chunk):
                    self._begin_alone(Unit(batch))
                    continue
                failure, took_ms = yield from self._handle(subscription, batch, worker)
                if alone:
                    handling.has_handled(chunk, [batch[0].message])
                if self._counts(batch, worker):
                    failed, each_ms = failed_of(batch, failure), took_ms / len(batch)
                    if good := [item for item in batch if item not in failed] if failed else batch:
                        chunk.done.append((good, each_ms * len(good)))
                    if failed and failure is not None:
                        self._give_back(failed, failure, each_ms)
                now = time.perf_counter()
                if took_ms > SETTLE_S * 1000 or now - settled_at > SETTLE_S:
                    self._settle_done(chunk)
                    settled_at = now
        finally:
            self._settle_done(chunk)

    def _run_line(self, line: Unit, worker: Worker) -> Flow[None]:
        handling = self._handling
        watches, alone = handling.watches(), False
        while line.items and not self._is_halted:
            batch = next_of(line.items, self._batch_size)
            if len(batch) > 1:
                batch = self._of_one_call(line, batch)
            if (subscription := self._subscription(line, batch)) is None:
                return
            if watches and (alone := handling.is_suspect(batch[0].message)) and not handling.is_in_turn(line):
                self._begin_alone(Unit([*batch, *line.items]))
                return
            failure, took_ms = yield from self._handle(subscription, batch, worker)
            if alone:
                handling.has_handled(line, [batch[0].message])
            if not self._counts(batch, worker):
                return
            failed = failed_of(batch, failure)
            if failed != batch[len(batch) - len(failed) :]:
                failure, failed = handling.not_the_end(batch[0].message), batch
            good = batch[: len(batch) - len(failed)]
            each_ms = took_ms / len(batch)
            settling = Settling(line)
            if good:
                settling.steps.append((partial(self._ack, good), good, each_ms * len(good)))
            if failed and failure is not None:
                self._add_failures(settling, failed, failure, each_ms)
            if not self._go_through(settling):
                return  # `_again` goes on when that is settled

    def _begin_alone(self, unit: Unit) -> None:
        """Submit a unit that begins with a suspected message once that message may be handled."""
        self._handling.in_turn(unit, partial(self._workers.submit, partial(self._run, unit)))

    def _of_one_call(self, unit: Unit, batch: list[Item]) -> list[Item]:
        """What of these goes to one handler, and may be in one call. The others go back to the front of the unit."""
        number = len(list(takewhile(batch[0].topic.__eq__, map(_topic, batch))))
        if self._handling.watches():
            number = self._handling.together([item.message for item in batch[:number]])
        unit.items.extendleft(reversed(batch[number:]))
        return batch[:number]

    def _subscription(self, unit: Unit, batch: list[Item]) -> Subscription | None:
        """Who handles the batch's topic. Nobody any more: all that is left of the unit is released."""
        first = batch[0]
        subscription = self._subscriptions.get(first.topic) or self._subscriptions.get(first.delivery.topic)
        if subscription is None:
            self._release([*batch, *next_of(unit.items, len(unit.items))])
        return subscription

    def _handle(self, subscription: Subscription, batch: list[Item], worker: Worker) -> Flow[Ended]:
        """What the handler made of it, and in how many milliseconds."""
        for item in batch:
            item.is_begun = True
        try:
            ended = self._handling.call(worker, subscription, [item.message for item in batch])
            failure, took_ms = ended if isinstance(ended, tuple) else (yield from ended)
        except BaseException:  # Ctrl-C: nothing is settled, `close` gives it back
            for item in batch:
                item.is_begun = False
            raise
        self._helpers.pace_ms += (took_ms - self._helpers.pace_ms) / 16
        return failure, took_ms

    def _counts(self, batch: list[Item], worker: Worker) -> bool:
        """Whether the result of a call counts: its messages were not given up meanwhile."""
        if not self._is_closed and (self._ordered or worker.lapsed != worker.calls):
            return True
        what = "a handler ended after consume_timeout or stop; its result does not count"
        self._handling.log.say(logging.WARNING, what, at=[item.message for item in batch])
        return False

    # -- settling ---------------------------------------------------------------------------------------------------

    def _settle_done(self, chunk: Unit) -> None:
        done = next_of(chunk.done, len(chunk.done))
        if done:
            items = [item for batch, _ in done for item in batch]
            settling = Settling()
            settling.steps.append((partial(self._ack, items), items, sum(took_ms for _, took_ms in done)))
            self._go_through(settling)

    def _give_back(self, failed: Sequence[Item], failure: Failure, each_ms: float) -> None:
        settling = Settling()
        self._add_failures(settling, failed, failure, each_ms)
        self._go_through(settling)

    def _add_failures(self, settling: Settling, failed: Sequence[Item], failure: Failure, each_ms: float) -> None:
        """Steps that give `failed` back. Of a line: then all behind it, unless the failed ones are given up."""
        for item in failed:
            settling.steps.append((partial(self._fail, item, failure, settling.line), [item], each_ms))

    def _ack(self, items: Sequence[Item]) -> Settled:
        self._broker.ack(self._group, items[0].delivery.topic, [item.delivery.receipt for item in items])
        return "ack"

    def _fail(self, item: Item, failure: Failure, line: Unit | None) -> Settled:
        delivery = item.delivery
        if failure.kind == "reject":
            self._broker.dead_letter(self._group, delivery.topic, delivery.receipt, failure.reason)
            return "dlq"
        most_s = SUSPEND_MAX_S if self._ordered else DELAY_MAX_S
        delay_s = shortened(failure.delay_s, most_s, self._handling.log, item.message)
        if delay_s is not None and self._ordered:
            delay_s = max(delay_s, SUSPEND_MIN_S)
        outcome = fail(self._broker, self._group, delivery, failure.reason, delay_s)
        if line is not None and outcome == "retry":
            self._release(next_of(line.items, len(line.items)))
        return outcome

    def _go_through(self, settling: Settling, last: bool = False) -> bool:
        """Whether all steps are through. If not they are tried again by and by, and the line goes on then."""
        while settling.steps:
            act, items, took_ms = settling.steps[0]
            told: Sequence[Item] = items
            try:
                outcome = act()
            except (ReceiptExpiredError, InvalidReceiptError) as error:
                late = set(error.receipts) if len(items) > 1 else {items[0].delivery.receipt}
                told = [item for item in items if item.delivery.receipt not in late]
                outcome = "ack"  # those of the call that were in time
                self._handling.log.say(
                    logging.WARNING, "handled too late, it comes again", at=items[0].message, error=error
                )
                if settling.line is not None:  # to another, and what stands behind it after it
                    self._release(next_of(settling.line.items, len(settling.line.items)))
            except StoreClosedError:
                settling.steps.clear()
                return False
            except Exception as error:
                if last:
                    self._handling.log.say(
                        logging.ERROR, "it is not settled, and comes again", at=items[0].message, error=error
                    )
                    return False
                self._handling.report(error, "it cannot be settled yet", items[0].message)
                self._try_again(settling)
                return False
            settling.steps.popleft()
            self._forget(items)
            if told:
                self._handling.settled([item.message for item in told], outcome, took_ms)
        return True

    def _try_again(self, settling: Settling) -> None:
        with self._lock:
            self._settlings[settling] = None
        delay_ms, settling.delay_ms = settling.delay_ms, min(2 * settling.delay_ms, SETTLE_AGAIN_MAX_MS)
        self._workers.later(delay_ms, partial(self._workers.submit, partial(self._again, settling)))

    def _again(self, settling: Settling, worker: Worker) -> Flow[None]:
        with self._lock:
            if settling not in self._settlings:
                return
            del self._settlings[settling]
        if self._go_through(settling) and settling.line is not None:
            yield from self._run(settling.line, worker)

    def _release(self, items: Sequence[Item]) -> None:
        """Give back unseen."""
        topics: dict[str, list[Item]] = {}
        for item in items:
            topics.setdefault(item.delivery.topic, []).append(item)
        for topic, each in topics.items():
            try:
                self._broker.release(self._group, topic, [item.delivery.receipt for item in each])
            except MQStoreError as error:
                self._handling.log.say(
                    logging.WARNING, "could not be given back", at=[item.message for item in each], error=error
                )
        self._forget(items)

    def _forget(self, items: Sequence[Item]) -> None:
        self._renewer.remove(*items)
        with self._lock:
            for item in items:
                if item in self._items:
                    del self._items[item]
                    self._size -= item.size
            # Not for each one that goes: a pop is worth more than one message.
            roused = self._is_full and self._room() > 0 and 2 * len(self._items) <= self._capacity()
            self._is_full = self._is_full and not roused
        if roused:
            self._rouse()

    # -- time -------------------------------------------------------------------------------------------------------

    def _renew_at(self, due_ms: int) -> None:
        """Have the renewer run at that time, unless it does so before."""
        with self._lock:
            if self._is_closed or (self._renew_ms is not None and self._renew_ms <= due_ms):
                return
            self._renew_ms = due_ms
        self._workers.later(due_ms - self._clock.monotonic_ms(), partial(self._renew, due_ms))

    def _renew(self, due_ms: int) -> None:
        """Timer thread."""
        with self._lock:
            if self._renew_ms != due_ms:
                return  # an earlier one has been set
            self._renew_ms = None
        next_ms = self._renewer.run_once(self._clock.monotonic_ms())
        if next_ms is not None:
            self._renew_at(next_ms)

    def _time_is_up(self, unit: Unit, messages: Sequence[Message]) -> None:
        """Handlers have had these for `consume_timeout`. Of ordered ones it is only told."""
        if self._ordered:
            return
        ids = {id(message) for message in messages}
        with self._lock:
            items = [item for item in self._items if id(item.message) in ids]
        self._give_back(items, Failure("retry", "its handler hung"), self._timeout_ms)

    def _held_up(self, worker: Worker, unit: Unit) -> None:
        """Let others have the rest of a chunk, and another one fetch."""
        if not self._ordered:
            self._settle_done(unit)
            self._helpers.ask(unit, len(unit.items), self._join_in)
        self._hand_over(worker)

    def _hand_over(self, worker: Worker) -> None:
        """Let another fetch in place of `worker`, if that is the one who does."""
        with self._lock:
            if self._fetch_worker is not worker or self._fetcher is None:
                return
            self._fetcher = token = object()
            self._fetch_worker = None
        self._workers.submit(partial(self._fetch, token))
