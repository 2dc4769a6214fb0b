"""State of an item: a message of a topic, as a group that pops has it (clients#queue-items).

    queues of the topic, of the group's retry topics    ready, leased, retry, or done    by the pop state of the queue
    timer, delay levels                                 delayed, or retry if it waits for a retry topic
    dead letters                                        dead

`Items` reads a running broker, or the tables that `Replay.look` makes from the files of a store. A page examines a
bounded number of messages, and none before the first that is not done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from heapq import nsmallest
from itertools import chain, islice, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from mqstore.broker.background.context import Tables, messages_of
from mqstore.broker.delay.levels import deliver_time_ms
from mqstore.broker.delay.route import due_of
from mqstore.broker.pop.orderinfo import OrderInfo
from mqstore.broker.pop.state import QueueState
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.redelivery.dead_letters import DeadLetters
from mqstore.broker.redelivery.reason import EXPIRED, reason_of
from mqstore.broker.tables.names import SCHEDULE_TOPIC, TIMER_TOPIC, QueueKey, dlq_topic, is_retry_topic, retry_topics
from mqstore.broker.tables.priorities import highest_first
from mqstore.errors import ConfigError, ReadOnlyStoreError
from mqstore.files.lock import refusal_to_reader
from mqstore.layout.messageid import is_message_id
from mqstore.layout.properties import REAL_TOPIC
from mqstore.log.message import Message

if TYPE_CHECKING:
    from mqstore.broker.delay.timerqueries import TimerQueries
    from mqstore.broker.items.files import TimerFiles

State = Literal["ready", "leased", "retry", "delayed", "dead"]
STATES: Final[tuple[State, ...]] = ("ready", "leased", "retry", "delayed", "dead")
Place = tuple[str, int, int]
"""Topic, queue id, and the offset where a page begins. In the timer's topic it is a physical offset."""
Levels = Callable[[], Mapping[int, tuple[int, int]]]
"""Function that returns (next offset, queue end) by delay level."""
PAGE: Final = 256
"""Maximum number of messages that a page examines."""
_PAGE_BYTES: Final = 4 << 20


class Item(NamedTuple):
    """Item that is not done. `QueueItem` says more of its fields."""

    message: Message
    """Its newest copy. The `unique_key` is the same in every copy."""
    state: State
    attempt: int
    until_ms: int | None = None
    """Wall-clock time at which the lease ends, or at which a delayed or retrying item becomes ready."""
    holder: str = ""
    reason: str = ""
    progress: str = ""


class ItemPage(NamedTuple):
    """Some items. If there are none, a later page can have some."""

    items: list[Item]
    after: Place | None
    """Where the next page begins. None: this is the last one."""


class Status(NamedTuple):
    """State of a message in a queue that a group pops."""

    state: State
    until_ms: int | None = None
    holder: str = ""
    reason: str = ""
    progress: str = ""
    before: int | None = None
    """Number of deliveries before the present or next one. None: the message has it."""

    def item(self, message: Message) -> Item:
        before = message.reconsume_times + (self.state == "retry") if self.before is None else self.before
        reason = self.reason or (reason_of(message) if self.state == "ready" else "")
        return Item(message, self.state, before + 1, self.until_ms, self.holder, reason, self.progress)


_READY: Final = Status("ready")
_Found = tuple[list[tuple[int, Item]], int | None]
"""(place, item) of some items, and where the next page begins."""


def status_of(state: QueueState, order: OrderInfo | None, offset: int, now_ms: int, owner: str = "") -> Status | None:
    """Return the status of the message at `offset` of a queue that a group pops, or None if it is done.
    Call under the queue's lock. `order` is its batch in order (`PopTables.order`), `owner` the broker's process."""
    if offset in state.skipped:
        return None
    if order is None:
        batch = state.in_flight.get(offset)
        if batch is None:
            return _READY if offset >= state.cursor or offset in state.released else None
        until_ms, before = batch.visible_at(offset), None
    elif offset > order.offsets[-1]:
        return _READY
    elif offset not in order.unacked(state.cursor):
        return None  # also one that a filter refused
    else:
        batch, until_ms, before = state.fifo, order.visible_at(offset), order.attempt(offset) - 1
        free = order.is_visible(offset, now_ms)
        if (free or state.reason(batch, offset)) and offset not in order.among(order.released):
            before += 1
        if free:
            return Status("ready", reason=(state.reason(batch, offset) or EXPIRED).text, before=before)
    if reason := state.reason(batch, offset):
        return Status("retry" if reason.counts else "delayed", until_ms, "", reason.text, before=before)
    holder = owner if batch is not None and batch.local else state.holders.get(offset, "")
    return Status("leased", until_ms, holder, "", state.progress.get(offset, ""), before)


def check_state(state: object) -> None:
    """Raise ConfigError unless it is a state or None."""
    if state is not None and state not in STATES:
        raise ConfigError(f"the state of an item is {', '.join(STATES[:-1])} or {STATES[-1]}, not {state!r:.40}")


def unsettled(state: QueueState, order: OrderInfo | None, begin: int, count: int, wanted: State | None) -> list[int]:
    """Return the first `count` delivered offsets from `begin` on that are not done, ascending. Call under the lock.
    Without those that cannot be in the `wanted` state. It passes over the messages in flight, or if these are fewer
    over the offsets from the first of them to the cursor."""
    if order is not None:
        return order.unacked(max(begin, state.cursor))[:count]
    pools = [*[state.in_flight] * (wanted != "ready"), *[state.released] * (wanted in (None, "ready"))]
    span = range(max(begin, state.advance()), state.cursor)
    if len(span) < 8 * sum(map(len, pools)):
        return list(islice((offset for offset in span if any(offset in pool for pool in pools)), count))
    return nsmallest(count, (offset for offset in chain(*pools) if offset >= begin))


class Items:
    """Items of all queues of a store. As thread-safe as the tables."""

    def __init__(
        self,
        tables: Tables,
        pops: PopTables,
        timer: TimerQueries | TimerFiles,
        levels: Levels,
        waiting: Callable[[str], int],
        owner: str = "",
    ) -> None:
        """`waiting` returns the number of messages that wait for a topic. `owner` is the broker's process."""
        self._tables, self._pops, self._timer, self._levels, self._waiting = tables, pops, timer, levels, waiting
        self._owner = owner

    def of(self, group: str, topic: str, copies: Sequence[Message]) -> Item | None:
        """Return the item that has these copies, unless it is done or dead. Raises TopicNotFoundError."""
        with self._pops.moving:
            found = self._alive(group, topic, lambda key: [each for each in copies if each.queue == key[1:]])
            return next(found, None)

    def _alive(self, group: str, topic: str, messages: Callable[[QueueKey], Iterable[Message]]) -> Iterator[Item]:
        """Yield the items among `messages` of each queue that are neither done nor dead. Call under `moving`."""
        names = {topic, *retry_topics(group, topic)}
        # Where it waits comes first: it is put to its queue before it stops to wait.
        for message in messages(QueueKey(group, TIMER_TOPIC, 0)):
            if message._stored_property(REAL_TOPIC) in names and self._timer.waits(message):
                yield _delayed(message, topic, due_of(message.stored_properties()))
        for level, bounds in self._levels().items():
            for message in messages(QueueKey(group, SCHEDULE_TOPIC, level - 1)):
                if message.offset in range(*bounds) and message._stored_property(REAL_TOPIC) in names:
                    yield self._of_level(topic, names, level, bounds, message.offset, 1)[0][0][1]
        for key in self._keys(group, topic):
            for message in messages(key):
                with self._state(key) as (state, order):
                    status = status_of(state, order, message.offset, self._tables.clock.now_ms(), self._owner)
                if status is not None:
                    yield status.item(message)

    def _letters(self, group: str, letters: Iterable[Message]) -> Iterator[Item]:
        """Yield those of `letters` that were neither purged nor replayed."""
        return map(_dead, DeadLetters(self._tables, group).select(offsets=[each.offset for each in letters]))

    def _copies(self, unique_key: str, key: QueueKey) -> Iterable[Message]:
        """Return the messages of a queue with this unique key, or those that may not be done."""
        store = self._tables.store
        found = [each for each in store.find(key.topic, unique_key=unique_key) if each.queue_id == key.queue_id]
        if found or not is_message_id(unique_key):
            return found
        # It was put without a unique key, so that neither the first one nor its copies are in the index.
        if is_retry_topic(key.topic):
            low, high = self._tables.offsets.bounds(key.topic, key.queue_id)
            begin = max(low, self._tables.offsets.committed(key) or 0)
            again = messages_of(store, key.topic, begin, high, key.queue_id)
            return [each for each in again if each.unique_key == unique_key]
        with suppress(LookupError):
            first = store.get_by_id(unique_key)
            found = [first] if first.queue == key[1:] else []
        return found

    def page(
        self, group: str, topic: str, state: State | None = None, after: Place | None = None, limit: int = PAGE
    ) -> ItemPage:
        """Return some items, of one state or all: failed ones, the others by offset, then delayed and dead ones.
        `after` is that of the page before. Raises ConfigError for another state, and TopicNotFoundError."""
        check_state(state)
        sources = list(self._sources(group, topic, state))
        names = [source[:2] for source in sources]
        at, begin = (names.index(after[:2]), after[2]) if after is not None and after[:2] in names else (0, 0)
        left, size, found = max(1, min(limit, PAGE)), 0, list[Item]()
        for (topic, queue_id, read), start in zip(sources[at:], chain([begin], repeat(0)), strict=False):
            if not left:
                return ItemPage(found, (topic, queue_id, start))
            items, following = read(start, left)
            for place, item in items:
                size += item.message.size
                if found and size > _PAGE_BYTES:
                    return ItemPage(found, (topic, queue_id, place))
                if state in (None, item.state):
                    found.append(item)
            if following is not None:
                return ItemPage(found, (topic, queue_id, following))
            left -= len(items)
        return ItemPage(found, None)

    def counts(self, group: str, topic: str) -> dict[State, int]:
        """Return the number of items in each state, from counters. Raises TopicNotFoundError."""
        found: dict[State, int] = dict.fromkeys(STATES, 0)
        now_ms = self._tables.clock.now_ms()
        with self._pops.moving:
            for key in self._keys(group, topic):
                with self._state(key) as (state, order):
                    standing, (failed, given) = state.standing(order, now_ms), state.count_failed(order, now_ms)
                low, high = self._tables.offsets.bounds(key.topic, key.queue_id)
                found["ready"] += standing.again + max(0, high - max(low, standing.next)) - standing.skipped
                found["retry"] += failed
                found["delayed"] += given
                found["leased"] += standing.in_flight - failed - given
            found["retry"] += sum(map(self._waiting, retry_topics(group, topic)))
            found["delayed"] += self._waiting(topic)
            found["dead"] = len(DeadLetters(self._tables, group))
        return found

    def purge(self, group: str, topic: str, state: State | None = None) -> int:
        """See `WritableItems`. Raises ReadOnlyStoreError."""
        raise ReadOnlyStoreError(refusal_to_reader(self._tables.store.path, self._tables.fs))

    # -- sources -----------------------------------------------------------------------------------------------------

    def _keys(self, group: str, topic: str) -> list[QueueKey]:
        """Return the queues of the topic and its retry topics in which the group has started, the highest priority
        first, and then retries."""
        topics, offsets, known = self._tables.topics, self._tables.offsets, self._pops.states
        # Also a retry topic without a committed offset: beside a writer that is not saved yet.
        home = topics.require(topic)
        configs = [*map(topics.get, sorted(retry_topics(group, topic))), home]
        keys = [QueueKey(group, config.name, i) for config in configs if config for i in range(config.read_queues)]
        keys = highest_first(home, keys, attrgetter("queue_id"))
        return [key for key in keys if key in known or offsets.committed(key) is not None]

    def _sources(
        self, group: str, topic: str, wanted: State | None
    ) -> Iterator[tuple[str, int, Callable[[int, int], _Found]]]:
        """Yield (topic, queue id, reader) of each place that may have items in the wanted state."""
        if wanted != "dead":
            for key in self._keys(group, topic):
                yield key.topic, key.queue_id, partial(self._of_queue, key, wanted)
        if names := self._waiting_names(group, topic, wanted):
            yield TIMER_TOPIC, 0, partial(self._of_timer, topic, names)
            for level, bounds in sorted(self._levels().items()):
                yield SCHEDULE_TOPIC, level - 1, partial(self._of_level, topic, names, level, bounds)
        if wanted in (None, "dead"):
            yield dlq_topic(group), 0, partial(self._of_letters, DeadLetters(self._tables, group))

    @staticmethod
    def _waiting_names(group: str, topic: str, wanted: State | None) -> set[str]:
        """Return the topics for which items in the wanted state wait in the timer or a delay level."""
        again = retry_topics(group, topic)
        return {None: {topic, *again}, "delayed": {topic}, "retry": again}.get(wanted, set())

    @contextmanager
    def _state(self, key: QueueKey) -> Iterator[tuple[QueueState, OrderInfo | None]]:
        """Lock the state of a queue and yield it, with its batch in order. A queue that is not open has a new one."""
        state = self._pops.states.get(key)
        if state is None or state.cursor < 0:
            state = QueueState(key)
            state.cursor = state.committed = self._tables.offsets.committed(key) or 0
        with state.lock:
            yield state, self._pops.order(state)

    def _of_queue(self, key: QueueKey, wanted: State | None, begin: int, count: int) -> _Found:
        low, high = self._tables.offsets.bounds(key.topic, key.queue_id)
        begin, now_ms = max(begin, low), self._tables.clock.now_ms()
        with self._state(key) as (state, order):
            offsets = unsettled(state, order, begin, count, wanted)
            if wanted in (None, "ready"):
                front = max(begin, state.standing(order, now_ms).next)
                offsets += range(front, min(high, front + count - len(offsets)))
            known = {each: status_of(state, order, each, now_ms, self._owner) for each in offsets}
        found = [
            (offset, status.item(message))
            for (offset, status), message in zip(known.items(), self._pops.messages(key, offsets), strict=True)
            if status is not None and message is not None
        ]
        return found, offsets[-1] + 1 if len(offsets) == count else None

    def _of_timer(self, topic: str, names: Collection[str], begin: int, count: int) -> _Found:
        messages, following = self._timer.page(names, begin, count)
        due = [(each, due_of(each.stored_properties())) for each in messages]
        return [(each.physical_offset, _delayed(each, topic, due_ms)) for each, due_ms in due], following

    def _of_level(
        self, topic: str, names: Collection[str], level: int, bounds: tuple[int, int], begin: int, count: int
    ) -> _Found:
        begin, store = max(begin, bounds[0]), self._tables.store
        stop = min(bounds[1], begin + count)
        found = [
            (each.offset, _delayed(each, topic, deliver_time_ms(store.delay_table_ms, level, each.store_timestamp_ms)))
            for each in messages_of(store, SCHEDULE_TOPIC, begin, stop, level - 1)
            if each._stored_property(REAL_TOPIC) in names
        ]
        return found, stop if stop < bounds[1] else None

    @staticmethod
    def _of_letters(letters: DeadLetters, begin: int, count: int) -> _Found:
        begin, high = max(begin, letters.bounds[0]), letters.bounds[1]
        stop = min(high, begin + count)
        found = [(each.offset, _dead(each)) for each in letters.select(offsets=range(begin, stop))]
        return found, stop if stop < high else None


def _delayed(message: Message, topic: str, due_ms: int) -> Item:
    state: State = "delayed" if message._stored_property(REAL_TOPIC) == topic else "retry"
    return Item(message, state, message.attempt, due_ms, reason=reason_of(message))


def _dead(letter: Message) -> Item:
    return Item(letter, "dead", letter.reconsume_times, reason=reason_of(letter))
