"""Purge: remove the items of a queue that were put before the call (clients#queue-items).

    delayed, and retries in the timer      a cancellation for each
    a queue, in all states                 one record: it continues at its end, with nothing in flight
    ready ones after the cursor            two records: a batch that reaches the end, and its acknowledgement
    leased, retrying, released ones        an acknowledgement for each batch

Nothing moves from one place to another meanwhile: the timer and `PopTables.moving` are locked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mqstore.broker.context import Parts
from mqstore.broker.delay.timerqueries import TimerQueries
from mqstore.broker.items.state import Items, State, check_state, status_of, unsettled
from mqstore.broker.names import QueueKey
from mqstore.broker.pop.ordered import OrderedQueues
from mqstore.broker.pop.receipts import Claim
from mqstore.broker.pop.request import Delivery
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.pop.unordered import UnorderedQueues
from mqstore.broker.redelivery.dead_letters import DeadLetters
from mqstore.errors import ConfigError
from mqstore.options import Durability, waits_for_disk


class Purging(Items):
    """Items of a store that is open for writing."""

    def __init__(self, parts: Parts, pops: PopTables, timer: TimerQueries, *others: Any) -> None:
        super().__init__(parts, pops, timer, *others)
        self._parts, self._timers = parts, timer
        self._ways = UnorderedQueues(pops), OrderedQueues(pops)

    def note_holder(self, group: str, found: Iterable[Delivery], holder: str) -> None:
        """Note which client of a server has received some deliveries."""
        for each in found:
            state = self._pops.states.get(QueueKey(group, each.message.topic, each.message.queue_id))
            if state is not None:
                with state.lock:
                    state.note_holder(each.message.offset, holder)

    def purge(self, group: str, topic: str, state: State | None = None) -> int:
        """Remove the items in one state, or all but dead letters. Return their number. It is as durable as a put.

        Items that are put after the call stay. A purged lease ends: its acknowledgement is harmless, and its other
        verbs raise ReceiptExpiredError. Messages in RocketMQ's delay levels cannot be cancelled, and stay; one that a
        level has delivered in the last ten seconds may be delivered again after a kill. Raises
        ConfigError for another state, and for "ready" in a queue that is popped in order while an earlier item is not
        settled. Raises TopicNotFoundError, and the errors of a put."""
        check_state(state)
        if state == "dead":
            return DeadLetters(self._parts, group).purge()
        ends: dict[QueueKey, int] = {}

        def begin() -> int:
            ends.update((key, self._parts.offsets.bounds(*key[1:])[1]) for key in self._keys(group, topic))
            return self._parts.store.max_offset

        with self._pops.moving:
            count = self._timers.cancel_all(self._waiting_names(group, topic, state), begin)
            count += sum(self._purge(key, end, state) for key, end in ends.items())
        self._timers.persist()  # a kill would let the timer deliver again messages that were delivered and purged
        self._flush_if(None)
        return count

    def _flush_if(self, durability: Durability | None) -> None:
        """Flush the log if a call of this durability waits for the disk. None means the store's default."""
        if waits_for_disk(durability, self._parts.store.durability == "flush"):
            self._parts.store.flush()

    def _purge(self, key: QueueKey, end: int, wanted: State | None) -> int:
        """Remove the items of one queue before `end`."""
        pops, now_ms, state = self._pops, self._tables.clock.now_ms(), self._pops.state(key)
        low = self._tables.offsets.bounds(key.topic, key.queue_id)[0]
        with state.lock:
            if not pops.ready(state, None):
                return 0
            order = pops.order(state)
            standing = state.standing(order, now_ms)
            first = max(low, standing.next)
            skipped = sum(offset < end for offset in state.skips(first))
            ready = max(0, end - first - skipped) if wanted in (None, "ready") else 0
            known = {each: status_of(state, order, each, now_ms) for each in unsettled(state, order, low, end, wanted)}
            chosen = [o for o, status in known.items() if o < end and status and wanted in (None, status.state)]
            if standing.next <= end and (wanted is None or (ready and not standing.in_flight + standing.again)):
                pops.reset(state, end)
                return len(chosen) + ready
            if ready and order is not None:
                raise ConfigError(
                    f"{key.topic!r} is consumed in order, and item {standing.first} is not settled: the ready ones "
                    "after it can be purged only together with it, in all states"
                )
            claims, count = [], len(chosen) + ready
            if ready:
                batch = pops.log_batch(state, [first], now_ms, 0, end, local=False)
                state.add(batch, [first])
                state.cursor = end
                state.drop_ahead()
                chosen.append(first)
            for offset in chosen:
                if offset in state.released:
                    self._ways[0].cancel(state, offset)
                else:
                    pop_time_ms = state.in_flight[offset].times(offset)[0] if order is None else order.pop_time_ms
                    claims.append(Claim(offset, pop_time_ms, order is not None, 0, key.queue_id, ""))
            self._ways[order is not None].settle(state, claims)
            pops.commit(state)
            return count
