"""Pop: deliver messages, each invisible until it is acknowledged or its time is over (delivery#pop).

    pop ----> route: which queues, the retry topic first or last --> UnorderedQueues | OrderedQueues --> pop log
    ack, change_invisible, nack, release, dead_letter ---- receipt says which queue, which of the two --^
    run_once: queues whose deliveries became visible; the log's replay position; consumerOrderInfo.json

    module      knows
    request     a pop's arguments, and deliveries as values
    routes      which queues a group pops a topic from
    batch       messages popped together, their times by a clock that may be set back, receipts as text
    state       deliveries in flight in one queue, in memory
    log         form of the records
    journal     entries of receivers in this process, before the log has them
    tables      all states, locks, agenda of due queues, measurements
    unordered   redelivery by copies              ordered      redelivery by reading again
    replay      start-up                          compaction   a short log, consumerOrderInfo.json

Only `wait_for` and a pop with `poll_s` block. Each (group, topic, queue) has one lock. The tables' own locks are taken
after it, then the store's. No callback is called under a lock. A call appends its records with durability "append". If
it must wait for the disk, it first releases its locks, so that the wait does not block other calls.

The class is long because each operation on a receipt is a method here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter

from mqstore.broker.background.context import Parts
from mqstore.broker.background.service import BackgroundService, Pin, Wake
from mqstore.broker.pop.batch import SAME_MOMENT_MS, Claim, claim_of, expired
from mqstore.broker.pop.ordered import OrderedQueues
from mqstore.broker.pop.orderinfo import check_order_info
from mqstore.broker.pop.poplog.compaction import PopKeeper
from mqstore.broker.pop.poplog.log import ACK, GIVE
from mqstore.broker.pop.poplog.replay import Replay, count_begun
from mqstore.broker.pop.request import MAX_INVISIBLE_MS, MIN_INVISIBLE_MS, Delivery, Pending, PopRequest
from mqstore.broker.pop.routes import Routes
from mqstore.broker.pop.state import MAX_BATCH, NEVER_MS, QueueState
from mqstore.broker.pop.tables import DeadLetter, PopTables
from mqstore.broker.pop.unordered import UnorderedQueues
from mqstore.broker.reads.reading import Reads
from mqstore.broker.reads.waiting import Callback, Waiter, Waiters, Wanted
from mqstore.broker.redelivery.attempt_journal import AttemptJournal
from mqstore.broker.redelivery.reason import GIVEN_BACK, REASON_CHARS, Reason
from mqstore.broker.tables.configfile import ConfigFile
from mqstore.broker.tables.names import QueueKey, pop_retry_topic
from mqstore.errors import ConfigError, GroupNotFoundError, InvalidReceiptError, ReceiptExpiredError
from mqstore.options import Durability, waits_for_disk
from mqstore.threads import breathe

_ATTEMPTS_MS = 1_000
_CHUNKS = 4
"""Maximum number of chunks redelivered from one queue in one run: some thousand messages."""


class PopService(BackgroundService):
    """Consumption by receipt. Thread-safe. Opening replays the pop log."""

    def __init__(
        self,
        parts: Parts,
        wake: Wake,
        waiters: Waiters,
        reads: Reads,
        dead_letter: DeadLetter,
        *,
        begun: AttemptJournal | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """Open the service.
        `dead_letter` is `Retries.dead_letter`. `begun` has the messages whose handler had started. If it is None, each
        message that was in flight in an ended process has used an attempt. `rng` returns numbers in [0, 1), which
        choose the first queue."""
        self._parts = parts
        self._store = parts.store
        self._clock = parts.clock
        self._waiters = waiters
        self._wake = wake
        self._flush_by_default = parts.store.durability == "flush"
        self._latest_ms: float = math.inf
        """Latest wall-clock time since the clock was set back. At first its past is not known."""
        file = ConfigFile(parts.store, "consumerOrderInfo.json", check_order_info)
        self.tables = PopTables(parts, wake, waiters, reads, dead_letter, begun)
        self.orders = self.tables.orders
        self.orders.load(file.load() or {})
        as_loaded = self.tables.order_version
        self._unordered = UnorderedQueues(self.tables)
        self.pop_at_once, self.ack_at_once = self._unordered.pop_at_once, self._unordered.ack_at_once
        self._ordered = OrderedQueues(self.tables)
        Replay(self.tables).run(release=parts.config.requeue_on_open)
        self._keeper = PopKeeper(self.tables, wake, file, as_loaded)
        if begun is not None:
            if count_begun(self.tables, begun):
                self._keeper.save(self._clock.now_ms())
            begun.forget()
        self._routes = Routes(self.tables, rng)
        self.tables.begin(self.pop_at_once)

    # -- popping ----------------------------------------------------------------------------------------------------

    def pop(self, request: PopRequest, poll_s: float = 0, durability: Durability | None = None) -> list[Delivery]:
        """Deliver messages, after at most `poll_s`.
        Each batch is in the pop log before this returns, and with durability "flush" also on disk. Raises ConfigError
        for numbers out of range, TopicNotFoundError, GroupNotFoundError, NotPermittedError, and the errors of a put.
        After an error nothing was delivered. If one queue delivered before another failed, its messages are returned,
        and the next call raises the error."""
        n, invisible_ms, attempt_id = request.n, request.invisible_ms, request.attempt_id
        if type(n) is not int or not 1 <= n <= MAX_BATCH:
            raise ConfigError(f"n must be 1..{MAX_BATCH}, got {n!r}; pop several times for more messages")
        if not MIN_INVISIBLE_MS <= invisible_ms <= MAX_INVISIBLE_MS:
            raise ConfigError(
                f"invisible time must be {MIN_INVISIBLE_MS}..{MAX_INVISIBLE_MS} ms, got {invisible_ms} ms"
            )
        if attempt_id is not None and type(attempt_id) is not str:
            raise ConfigError(f"attempt_id must be a str, got {attempt_id!r:.80}")
        waits = self._flush_by_default if durability is None else waits_for_disk(durability, self._flush_by_default)
        end_ms = self._clock.monotonic_ms() + (int(poll_s * 1000) if poll_s < math.inf else math.inf) if poll_s else 0
        while not (found := self._look(request)) and poll_s:
            left_ms = end_ms - self._clock.monotonic_ms()
            if left_ms <= 0 or not self.wait_for(request, left_ms / 1000):
                break
            if self._parts.groups.get(request.group) is None:  # the next look would create the group again
                raise GroupNotFoundError(f"group {request.group!r} was deleted while a pop waited for its messages")
        if not found:
            self._store.news.check_complete()
        elif waits:
            self.flush()
        return found

    def _look(self, request: PopRequest) -> list[Delivery]:
        """Pop the messages that the queues of the request have now."""
        group, topic, queue_id, n, invisible_ms, filter_, order, _, attempt_id, local, _ = request
        if local and not order and not self.tables.journal_end:
            self.tables.journal.open()
        # Looked up each time, because the topic may have been altered during the wait.
        route = self._routes.require(group, topic)
        compiled = route.pops and filter_ is None and attempt_id is None
        found: list[Delivery] = []
        more = False
        try:
            for mark, state in route.sources(queue_id, order, bool(self._parts.offsets.resets)):
                if compiled and not mark and (done := self.tables.deliver(state, n, invisible_ms, topic, local, order)):
                    found, more = done, bool(state.ahead) and not order
                    break
                compiled = False  # only the first queue is likely to have all
                # Copies have passed the filter at their first delivery.
                wanted = request._replace(filter=None) if mark and filter_ is not None else request
                with state.lock:
                    more |= (self._ordered if order else self._unordered).pop(state, wanted, mark, found)
                if len(found) == n:
                    break
        except Exception:
            if not found:
                raise
            # The found messages are invisible now. A receiver that does not get them cannot settle them, and each
            # would lose an attempt.
        if more and found and self._waiters.parked:
            self._waiters.wake_one(group, topic, queue_id)
        return found

    # -- waiting ----------------------------------------------------------------------------------------------------

    def wait_for(self, request: PopRequest, timeout_s: float) -> bool:
        """Block until the pop may find a message. Return False after the timeout."""
        wanted = self._wanted(request)
        seen = self._waiters.seen(wanted.topic, wanted.also)
        return self._may_find(request) or self._waiters.wait(wanted._replace(seen=seen), timeout_s)

    def add_waiter(self, request: PopRequest, callback: Callback, deadline_ms: int | None = None) -> Waiter:
        """Call `callback(worth_a_pop)` once, when the pop may find a message, or at `deadline_ms`.
        The dispatching thread makes the call. `deadline_ms` is monotonic time. Each message wakes one of several
        waiters. A woken waiter that does not pop must pass it on with `Waiters.wake_one`. Raises the errors of
        `Waiters.add_waiter` and `pop`."""
        group, topic, queue_id = request[:3]
        self._routes.require(group, topic)  # first, because the creation of a group would wake the waiter
        waiter = self._waiters.add_waiter(self._wanted(request), callback, deadline_ms)
        try:
            worth_a_look = self._may_find(request)
        except BaseException:  # for example, the topic was deleted, and nothing would ever call this waiter
            self._waiters.remove_waiter(waiter)
            raise
        if worth_a_look:
            self._waiters.wake_one(group, topic, queue_id)
        return waiter

    def _wanted(self, request: PopRequest) -> Wanted:
        group, topic, queue_id = request[:3]
        return Wanted(topic, queue_id, None, request.filter, group, self.retry_topics(group, topic))

    def retry_topics(self, group: str, topic: str) -> list[str]:
        """Return the names of the topics that may hold copies of popped messages, existing or not."""
        return [name for _, name in self._routes.retry_topics(group, topic)]

    def _may_find(self, request: PopRequest) -> bool:
        sources = self._routes.require(request.group, request.topic).sources(request.queue_id, request.order)
        return any(self._holds_something(state, request.order) for _, state in sources)

    def _holds_something(self, state: QueueState, order: bool) -> bool:
        with state.lock:
            key = state.key
            # A queue that is popped in one way (with or without order) cannot be popped in the other until its
            # deliveries have ended.
            blocked = order or state.fifo is not None
            if blocked and self.orders.blocks(key, self._clock.now_ms()):
                return False
            if order and (state.in_flight or state.released):
                return False
            if state.gone or state.ahead or state.released:
                return not state.gone
            bounds = self._store.offsets_or_none(key.topic, key.queue_id)
            cursor = state.cursor if state.cursor >= 0 else self._parts.offsets.committed(key)
            if key in self._parts.offsets.resets:
                return True
            return bounds is not None and bounds[1] > max(bounds[0], cursor or 0)

    # -- settling ---------------------------------------------------------------------------------------------------

    def ack(self, group: str, topic: str, receipts: Sequence[str] | str, durability: Durability | None = None) -> None:
        """Acknowledge deliveries. Settling one again is harmless.
        The pop log has it when this returns. With durability "flush" it is also on disk. Raises InvalidReceiptError,
        and settles nothing, if a receipt is not one of this group and topic. Raises ReceiptExpiredError for messages
        that were already redelivered (its `receipts`); the others are settled."""
        waits = self._flush_by_default if durability is None else waits_for_disk(durability, self._flush_by_default)
        texts = [receipts] if isinstance(receipts, str) else receipts
        done = 0 if waits else self.ack_at_once(group, topic, texts)
        if done and done == len(texts):
            return
        late = self._settle(group, topic, texts[done:], ACK)
        if waits:
            self.flush()
        if late:
            raise expired(late)

    def release(
        self,
        group: str,
        topic: str,
        receipts: Sequence[str] | str,
        durability: Durability | None = None,
        *,
        delay_ms: int = 0,
    ) -> None:
        """Release deliveries: they are popped again before new ones, after the delay, and the attempt does not count.
        Durability and errors are those of `ack`, here and in the methods below."""
        _check_delay(delay_ms)
        texts, late = (receipts,) if isinstance(receipts, str) else receipts, list[str]()
        with self._durably(durability):
            if not delay_ms:
                late = self._settle(group, topic, texts, GIVE)
            else:
                for text in texts:
                    try:
                        with self._held(group, topic, text) as (queues, state, claim):
                            queues.change(state, claim, delay_ms, reason=GIVEN_BACK)
                    except ReceiptExpiredError:
                        late.append(text)
        if late:
            raise expired(late)

    def change_invisible(
        self,
        group: str,
        topic: str,
        receipt: str,
        invisible_ms: int,
        durability: Durability | None = None,
        *,
        renew: bool = False,
        progress: str | None = None,
    ) -> str:
        """Make a delivery visible in `invisible_ms` (0 to 12 h) from now. Return its new receipt.
        `renew`: the old receipt stays valid. `progress` is kept in memory, for `Broker.items`. Raises the errors of
        `ack`, and ConfigError for the time."""
        with self._durably(durability):
            _check_delay(invisible_ms)
            with self._held(group, topic, receipt) as (queues, state, claim):
                changed = queues.change(state, claim, invisible_ms, renew=renew)
                if progress is not None:
                    state.note_progress(claim.offset, progress[:REASON_CHARS])
                return changed

    def nack(
        self,
        group: str,
        topic: str,
        receipt: str,
        delay_ms: int | None = None,
        durability: Durability | None = None,
        *,
        error: str = "",
    ) -> str | None:
        """Settle a delivery as failed: its message is redelivered in `delay_ms`.
        `delay_ms` None uses the group's policy for this attempt. Returns the new receipt, or None after the last
        attempt, which makes the message a dead letter. `suspended` reports `error` for a queue that is popped in order.
        Raises the errors of `ack`, and ConfigError for the time."""
        with self._durably(durability):
            if delay_ms is not None:
                _check_delay(delay_ms)
            with self._held(group, topic, receipt) as (queues, state, claim):
                attempt = queues.attempt(state, claim)
                config = self._parts.groups.get(group)
                if config is None:  # deleted just now, and its deliveries with it
                    raise expired([receipt])
                if config.max_attempts is not None and attempt >= config.max_attempts:
                    last = f"attempt {attempt} of {config.max_attempts} failed" + f": {error}" * bool(error)
                    queues.dead_letter(state, claim, Reason(last))
                    return None
                delay_ms = min(config.delay_ms(attempt), MAX_INVISIBLE_MS) if delay_ms is None else delay_ms
                reason = Reason(error[:REASON_CHARS], state.holder(claim.offset))
                changed = queues.change(state, claim, delay_ms, reason=reason)
                if claim.fifo:
                    self._save_soon()
                return changed

    def dead_letter(
        self, group: str, topic: str, receipt: str, reason: str, durability: Durability | None = None
    ) -> None:
        """Move a delivery's message to the group's dead letters and settle it.
        Raises the errors of `ack`, and ReceiptExpiredError if it was settled before."""
        with self._durably(durability), self._held(group, topic, receipt) as (queues, state, claim):
            queues.dead_letter(state, claim, Reason(reason))

    @contextmanager
    def _held(
        self, group: str, topic: str, receipt: str
    ) -> Iterator[tuple[UnorderedQueues | OrderedQueues, QueueState, Claim]]:
        """Parse a receipt, and lock its queue for the block."""
        claim = claim_of(receipt)
        state = self._state_of(group, topic, claim)
        with state.lock:
            yield self._ordered if claim.fifo else self._unordered, state, claim

    def _settle(self, group: str, topic: str, texts: Sequence[str], kind: str) -> list[str]:
        """Settle each receipt in its queue. Return the expired receipts."""
        concerned: list[tuple[QueueState, list[Claim]]] = []
        for _, run in groupby(map(claim_of, texts), attrgetter("mark", "queue_id", "fifo")):
            claims = list(run)
            concerned.append((self._state_of(group, topic, *claims), claims))
        late: list[str] = []
        if self.tables.journal_map is not None and not self.tables.journal_end:
            self.tables.journal.open()
        for state, claims in concerned:
            with state.lock:
                late += (self._ordered if claims[0].fifo else self._unordered).settle(state, claims, kind)
        return late

    def _state_of(self, group: str, topic: str, *claims: Claim) -> QueueState:
        """Return the state of the queue that the receipts name, once there is room to settle them.
        Raises InvalidReceiptError if the group never popped from it, or it has no such message."""
        if (log := self._store.wakeups.log).end > log.free_until:
            self._store.room.pace()
        first = claims[0]
        last = max(claims, key=lambda claim: claim.offset) if len(claims) > 1 else first
        route = self.tables.route(group, topic)
        if route is not None and first.mark == 0 and first.queue_id < len(route.queues):
            known = route.queues[first.queue_id]
            if last.offset < known.cursor:  # popped, so the tables need not be checked
                return known
        name = topic if first.mark == 0 else pop_retry_topic(group, topic, first.mark)
        key = QueueKey(group, name, first.queue_id)
        state = self.tables.states.get(key)
        if state is None or state.cursor < 0:
            self._parts.topics.require(topic)
            if self._parts.offsets.committed(key) is None:
                raise InvalidReceiptError(
                    f"receipt {first.text!r}: group {group!r} has never popped from queue {first.queue_id} of {name!r}"
                )
            state = self.tables.state(key)
            with state.lock:
                if state.cursor < 0 and not state.gone:
                    self.tables.open(state)
        if last.offset >= state.cursor:
            bounds = self._store.offsets_or_none(name, first.queue_id)
            if bounds is None or last.offset >= bounds[1]:
                raise InvalidReceiptError(
                    f"receipt {last.text!r}: queue {first.queue_id} of {name!r} has no message {last.offset}"
                )
        return state

    @contextmanager
    def _durably(self, durability: Durability | None) -> Iterator[None]:
        """Wait for the disk after the block, which has released its locks by then. None: the store's default."""
        waits = waits_for_disk(durability, self._flush_by_default)
        yield
        if waits:
            self.flush()

    def flush(self) -> None:
        """Return when all earlier pops, settlements and puts are on disk. Raises the errors of `MessageStore.flush`."""
        self.tables.journal.fold_all()
        self._store.flush()

    # -- deliveries in flight ---------------------------------------------------------------------------------------

    def pending(self, group: str) -> list[Pending]:
        found: list[Pending] = []
        for key, state in sorted(self.tables.states.items()):
            if key.group == group:
                with state.lock:
                    found += self._pending(state)
        return found

    def _pending(self, state: QueueState) -> list[Pending]:
        _, topic, queue_id = state.key
        found = [
            Pending(topic, queue_id, offset, batch.times(offset)[0], batch.visible_at(offset), False)
            for offset, batch in sorted(state.in_flight.items())
        ]
        if (record := self.tables.order(state)) is not None:
            found += [
                Pending(topic, queue_id, offset, record.pop_time_ms, record.visible_at(offset), True)
                for offset in record.held(state.cursor, self._clock.now_ms())
            ]
        return found

    def in_flight(self) -> int:
        count = 0
        for state in list(self.tables.states.values()):
            with state.lock:
                count += len(state.in_flight) + (0 if state.fifo is None else len(self._pending(state)))
        return count

    # -- forced restarts --------------------------------------------------------------------------------------------

    def reset(self, key: QueueKey, offset: int) -> None:
        """Apply a position that `Reads.reset` has set. All deliveries in flight end, and their receipts expire."""
        state = self.tables.states.get(key)
        if state is None:
            self.orders.put(key, None)
            return
        with state.lock:
            if not state.gone:
                # In this order, so that on a full disk the reset stays pending until the next pop.
                self.tables.reset(state, offset)
                self._parts.offsets.take_reset(key)
        self._waiters.wake_one(*key)

    def end(self, key: QueueKey, *, move: bool = False) -> None:
        """End popping from a queue that the group reads from now on, from its first unsettled message.
        With `move` the unsettled messages of a group without order move to its retry topic, so that acknowledged ones
        after them are not read again. Existing receipts expire. The next pop begins where the group has read to."""
        if (state := self.tables.states.get(key)) is None or state.cursor < 0:
            return
        with self.tables.moving, self._durably(None), state.lock:
            if not state.gone:
                if move:
                    self._unordered.move_all(state)
                self.tables.reset(state, state.advance(), reads=True)
                state.cursor = state.committed = -1

    # -- attempts of orderly groups in the queue model --------------------------------------------------------------

    def note_attempt(self, key: QueueKey, offset: int, count: int, error: str = "") -> None:
        """Save failed attempts like `OrderInfoTable.note_attempt`, on disk within a second."""
        self.orders.note_attempt(key, offset, count, self._clock.now_ms(), error)
        self._save_soon()

    def _save_soon(self) -> None:
        """Save the order info within a second, because a message has failed."""
        self._keeper.save_within(_ATTEMPTS_MS, self._clock.now_ms())
        self._wake()

    # -- as a mechanism ---------------------------------------------------------------------------------------------

    def run_once(self, now_ms: int) -> int | None:
        """Redeliver visible messages, shorten the log, save the order info. Return the time of the next run."""
        failure: Exception | None = None
        if now_ms < self._latest_ms - SAME_MOMENT_MS:
            self.tables.follow_clock(now_ms)
            self._latest_ms = now_ms
        self._latest_ms = max(self._latest_ms, now_ms)
        for state in self.tables.due(now_ms):
            try:
                self._visit(state, now_ms)
            except Exception as error:  # the other queues must not wait for this one
                failure = failure or error
        next_ms = self.tables.promise(self._keeper.run_once(now_ms))
        if failure is not None:
            raise failure
        return next_ms

    def _visit(self, state: QueueState, now_ms: int) -> None:
        # Limited, so that other queues and services get their turn. The rest is announced as due at once.
        for _ in range(_CHUNKS):
            with self.tables.moving, self._durably(None), state.lock:  # released after each chunk
                if state.gone or state.announced_ms > now_ms:
                    return
                state.announced_ms = NEVER_MS
                try:
                    self._unordered.visit(state, now_ms)
                finally:
                    if state.fifo is not None:
                        self._ordered.visit(state, now_ms)
            breathe()

    def persist(self) -> None:
        self._keeper.persist()

    def close(self) -> None:
        self.tables.journal.close()

    def pins(self) -> Iterable[Pin]:
        return self._keeper.pins()


def _check_delay(delay_ms: int) -> None:
    if not 0 <= delay_ms <= MAX_INVISIBLE_MS:
        raise ConfigError(f"delay must be 0..{MAX_INVISIBLE_MS} ms, got {delay_ms} ms")
