"""View of a broker's state from its files, without a lock or a change, even while a broker runs.

    levels      delayOffset.json, the schedule topic's queues              delivery#levels
    timer       timercheck, timer log, timer topic                         delivery#timer
    in flight   consumerOrderInfo.json, pop log, consumerOffset.json       delivery#pop-log
    halves      half topic, op topic                                       delivery#transactions
    lag         offsets and pop log, compared with the ends of queues      delivery#statistics
    pins        all of these: the record that keeps the front of the log   delivery#retention-bound

A running broker may not have saved the commits of the last seconds. Two numbers may be of different times.

The value of the `broker` member of `mqstore inspect --json`, times in ms since the epoch:

    {"delay_levels":   [{"level", "delay_ms", "offset", "end", "waiting", "next_due_ms", "overdue_ms"}, ...]
     "timer":          {"waiting", "next_due_ms"},
     "due":            {"interval_ms", "counts"}, with [start_ms, messages] of each interval that has any,
     "in_flight":      [{"group", "topic", "queue_id", "fifo", "messages", "local", "first_offset", "next_visible_ms"}],
     "order_info":     [{"group", "topic", "queue_id", "pop_time_ms", "offsets", "unacked", "redeliveries",
                         "next_visible_ms", "attempts"}, ...]
     "transactions":   {"open", "given_up", "newest_given_up": [{"transaction_id", "topic", "producer_group",
                        "checks", "queue_offset", "store_timestamp_ms"}, ...]},
     "dead_letters":   {GROUP: n},
     "oldest_pin":     {"physical_offset", "topic", "queue_id", "queue_offset", "group", "why", "rolls", "reach"}
                       or null,
     "not_shown":      {SECTION: why, ...}}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from mqstore import arrays as np
from mqstore.broker.admin.metrics import WaitingRetries, measure
from mqstore.broker.background.context import Parts, Tables, messages_of, open_tables
from mqstore.broker.background.retention import all_pins, physical_of
from mqstore.broker.background.service import Pin, oldest_of
from mqstore.broker.delay.levels import deliver_time_ms, due_counts, overdue_ms
from mqstore.broker.delay.recall import parse_recall_handle
from mqstore.broker.delay.route import (
    PRECISION_MS,
    Cancellations,
    copies_of,
    due_of,
    number,
    placement,
    recallable,
    slot_of,
)
from mqstore.broker.delay.timercheck import JavaProgress, Progress, TimerCheck
from mqstore.broker.delay.timerfiles import CANCELS, TimerFilesDamaged, TimerLog
from mqstore.broker.delay.timerunits import due_times, units_from, waiting_units
from mqstore.broker.pop.orderinfo import BlockedQueue, OrderInfo, check_order_info
from mqstore.broker.pop.poplog.replay import Replay
from mqstore.broker.pop.state import Standing
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.reads.reading import Reads
from mqstore.broker.reads.waiting import Waiters
from mqstore.broker.redelivery.dead_letters import letters_of
from mqstore.broker.redelivery.references import reach_of
from mqstore.broker.tables.configfile import ConfigFile, object_member
from mqstore.broker.tables.names import (
    POP_LOG_GROUP,
    POP_LOG_KEY,
    POP_LOG_TOPIC,
    SCHEDULE_GROUP,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANS_CHECK_TOPIC,
    QueueKey,
)
from mqstore.broker.transactions.service import Transactions
from mqstore.errors import GroupNotFoundError, MQStoreError, TopicNotFoundError
from mqstore.layout.javahash import java_hash
from mqstore.layout.properties import (
    PGROUP,
    REAL_TOPIC,
    TIMER_DEL_UNIQKEY,
    TIMER_OUT_MS,
    TRANSACTION_CHECK_TIMES,
    UNIQ_KEY,
)
from mqstore.log.message import Message
from mqstore.log.reading.reader import StoreReader

_LOOKS = 3
"""Maximum number of attempts to read files that a writer may remove meanwhile."""
_GIVEN_UP_SHOWN = 100
_GIVEN_UP = {"transaction_id": UNIQ_KEY, "topic": REAL_TOPIC, "producer_group": PGROUP}
_GIVEN_UP |= {"checks": TRANSACTION_CHECK_TIMES}
"""Property of each member of a transaction that was given up."""


# -- delay levels ------------------------------------------------------------------------------------------------------


class LevelView(NamedTuple):
    """One delay level whose queue has ever held a message."""

    level: int
    delay_ms: int | None
    """None for an orphan, a level no longer in the table. The next broker moves its messages to the timer."""
    offset: int
    """Next queue offset to read, as saved on disk."""
    end: int
    waiting: int
    next_due_ms: int | None
    """Due time of the first waiting message. None if no message waits, or its unit is damaged."""
    overdue_ms: int
    """For how long the oldest waiting message is overdue, or 0."""


def delay_levels(tables: Tables) -> list[LevelView]:
    """Return the levels in use, orphans included.
    Raises CorruptStoreError if `delayOffset.json` and its backup are damaged."""
    store = tables.store
    try:
        queues = store.queues(SCHEDULE_TOPIC)
    except TopicNotFoundError:
        return []
    value = ConfigFile(store, "delayOffset.json").load() or {}
    stored = object_member(value, "offsetTable")
    views = []
    for ref in queues:
        level = ref.queue_id + 1
        low, high = store.offsets(*ref)
        known = stored.get(str(level), 0)
        offset = min(high, max(low, known if type(known) is int else 0))
        delay_ms = store.delay_table_ms[ref.queue_id] if ref.queue_id < len(store.delay_table_ms) else None
        due_ms = _due_ms(store, level, offset) if offset < high else None
        late_ms = overdue_ms(store, level, offset, tables.clock.now_ms())
        views.append(LevelView(level, delay_ms, offset, high, high - offset, due_ms, late_ms))
    return views


def level_offsets(tables: Tables) -> Callable[[], dict[int, tuple[int, int]]]:
    """Return a function that reads (next offset, end) of each level in use at its first call."""
    return cache(lambda: {view.level: (view.offset, view.end) for view in delay_levels(tables)})


def _due_ms(store: StoreReader, level: int, offset: int) -> int | None:
    units = store.units(SCHEDULE_TOPIC, level - 1, offset, 1)
    if len(units) and int(units["tags_code"][0]) > 0:
        return int(units["tags_code"][0])
    # RocketMQ may store the address of an extension here, which mqstore does not have (delivery#level-unit).
    messages = store.get(SCHEDULE_TOPIC, level - 1, offset, 1).messages
    return deliver_time_ms(store.delay_table_ms, level, messages[0].store_timestamp_ms) if messages else None


# -- the timer ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TimerView:
    """Messages that wait in the timer."""

    waiting: int = 0
    """Number of messages. A cancelled message counts until its due time."""
    next_due_ms: int | None = None
    """Time at which the first one is delivered, or moved on if it is due in more than two days."""
    physical_offset: int | None = None
    """Physical offset of the oldest record among them."""
    topics: Counter[int] = field(default_factory=Counter)
    """Number of messages by the hash of the topic that they wait for."""
    cancels: Counter[int] = field(default_factory=Counter)
    """Number of cancellations by the hash of the topic."""
    due: list[np.ArrayLike] = field(default_factory=list)
    """Due times of the messages (ms)."""
    records: list[tuple[np.ArrayLike, np.ArrayLike]] = field(default_factory=list)
    """(hashes of topics, physical offsets) of the messages, in the order of the offsets."""

    def add(self, count: int, due_ms: int, physical_offset: int) -> None:
        self.waiting += count
        self.next_due_ms = due_ms if self.next_due_ms is None else min(self.next_due_ms, due_ms)
        old = self.physical_offset
        self.physical_offset = physical_offset if old is None else min(old, physical_offset)


def timer_view(tables: Tables) -> TimerView:
    """Return the waiting messages, by the timer's last checkpoint and later messages of its topic.
    Reads 52 bytes for each message. If the files are lost or damaged it reads each message itself, as the timer will
    when it rebuilds them."""
    store = tables.store
    bounds = store.offsets_or_none(TIMER_TOPIC, 0)
    if bounds is None:
        return TimerView()
    check = TimerCheck(store.path / "config" / "timercheck", tables.fs, tables.config.file_mode)
    placed: TimerView | None = None
    found = before = None
    for _ in range(_LOOKS):  # a running timer may have deleted segments that the checkpoint names
        found, before = check.load(), found
        placed = _placed(tables, found) if isinstance(found, Progress) else None
        if placed is not None or found == before:
            break
    done_ms, done_until = _done(found)
    begin = found.queue_offset if placed is not None and found is not None else 0
    view = placed or TimerView()
    for message in messages_of(store, TIMER_TOPIC, max(begin, bounds[0]), bounds[1]):
        due_ms, topic_hash = _placed_until(message), java_hash(message._stored_property(REAL_TOPIC) or "")
        if due_ms is None:
            view.cancels[topic_hash] += TIMER_DEL_UNIQKEY in message.stored_properties()
        elif not (message.offset < done_until and slot_of(due_ms) < done_ms):
            view.add(1, due_ms, message.physical_offset)
            view.topics[topic_hash] += 1
            view.due.append([due_ms])
            view.records.append(([topic_hash], [message.physical_offset]))
    return view


def _done(found: Progress | JavaProgress | None) -> tuple[int, int]:
    """Return (ms, queue offset) below which messages without a unit are done.
    These are messages below the offset whose slot is before ms."""
    if found is None:
        return 0, 0
    if isinstance(found, JavaProgress):
        return found.read_ms, found.queue_offset
    if found.queue_offset < found.skip_until:
        return found.skip_ms, found.skip_until
    late = found.late_offset
    return found.read_ms, found.queue_offset if late < 0 else min(late, found.queue_offset)


def _placed(tables: Tables, progress: Progress) -> TimerView | None:
    """Return the messages with a unit in the timer log, or None if the log differs from the checkpoint."""
    store = tables.store
    size = store.manifest.timerlog_segment_bytes
    mode = tables.config.file_mode
    log = TimerLog(store.path / "timerlog", store.path / "tmp", size, tables.fs, mode, writable=False)
    view = TimerView()
    try:
        log.load(progress.log_low, progress.log_end)
        _, units = units_from(log, progress.log_low, progress.read_ms)
        view.cancels.update(units["topic_hash"][units["magic"] & CANCELS != 0].tolist())
        units = units[waiting_units(units, progress)[0]]
        view.records.append((units["topic_hash"], units["physical_offset"]))
        if len(units):
            view.due.append(due := due_times(units))
            view.add(len(units), int(due.min()), int(units["physical_offset"].min()))
            view.topics.update(units["topic_hash"].tolist())
    except (TimerFilesDamaged, FileNotFoundError):
        return None
    finally:
        log.close()
    return view


def _placed_until(message: Message) -> int | None:
    """Return the time until which a message of the timer topic waits in its slot.
    Returns None for a cancellation, and for a message that cannot wait."""
    properties = message.stored_properties()
    out_ms = number(properties.get(TIMER_OUT_MS))
    if out_ms is None or not properties.get(REAL_TOPIC) or TIMER_DEL_UNIQKEY in properties:
        return None
    slot_ms, rolls = placement(message.store_timestamp_ms, slot_of(out_ms + 1))
    return slot_ms + PRECISION_MS if rolls else due_of(properties)


def is_waiting(tables: Tables, handle: str, now_ms: int) -> bool:
    """Return True if its topic shows that the message of a handle can be cancelled (delivery#recall).
    Raises InvalidReceiptError for a bad handle."""
    wanted = parse_recall_handle(handle)
    if tables.store.offsets_or_none(TIMER_TOPIC, 0) is None:
        return False
    found = copies_of(tables.store, wanted)
    recalled = Cancellations(found)
    return not all(map(recalled.cover, recallable(found, now_ms)))


# -- popped messages ---------------------------------------------------------------------------------------------------


class InFlight(NamedTuple):
    """Deliveries of one queue that are not settled."""

    group: str
    topic: str
    """Topic that holds the messages. It may be a retry topic."""
    queue_id: int
    fifo: bool
    messages: int
    local: int
    """Number of these messages whose receiver is in the broker's process. The next opening releases them."""
    first_offset: int
    next_visible_ms: int
    """Time at which the first of these messages is redelivered."""


@dataclass(frozen=True, slots=True)
class PopView:
    """Messages in flight, as the order info file and the pop log have them (delivery#pop-log)."""

    in_flight: list[InFlight] = field(default_factory=list)
    orders: list[dict[str, Any]] = field(default_factory=list)
    """Rows of `order_info`: the last batch of each FIFO queue.
    A queue that is consumed in order without popping has the failed attempts, and a pop time of 0. The queue is blocked
    until `next_visible_ms` at least."""
    standings: dict[QueueKey, Standing] = field(default_factory=dict)
    """Standing of each queue that the order info file and the pop log know."""
    suspended: dict[QueueKey, BlockedQueue] = field(default_factory=dict)
    """Failed message that blocks a queue, in either model."""
    retries: Callable[[QueueKey], int] = lambda key: 0
    """Number of retries that wait. The first call reads the delay levels."""

    def count(self, key: QueueKey) -> int:
        return sum(each.messages for each in self.in_flight if each[:3] == key)


def looked_pops(tables: Tables) -> PopTables:
    """Return the tables of pop as the next opening will find them. Raises the errors of `pop_view`."""
    nobody = SimpleNamespace(wake_one=lambda *_: None)  # receivers are in the process of the broker
    found = PopTables(_as_parts(tables), lambda: None, cast(Waiters, nobody), Reads(tables), _no_letter)
    found.orders.load(ConfigFile(tables.store, "consumerOrderInfo.json", check_order_info).load() or {})
    Replay(found).look()
    return found


def _no_letter(*_: object, **__: object) -> None:
    raise AssertionError("a view stores no dead letters")


def pop_view(tables: Tables, now_ms: int) -> PopView:
    """Return the messages in flight and the standing of queues, as the next opening will find them.
    Messages held by receivers in the broker's own process still count. Deliveries of a Java broker count only after
    mqstore has taken them over. Raises CorruptStoreError if `consumerOrderInfo.json` and its backup are damaged."""
    pop_tables = looked_pops(tables)
    timer = cache(lambda: timer_view(tables).topics)
    retries = WaitingRetries(tables.store, level_offsets(tables), lambda topic: timer()[java_hash(topic)])
    view = PopView(retries=retries.count)
    for key, record in sorted(pop_tables.orders.records().items()):
        if tables.groups.get(key.group) is not None and record.offsets:
            committed = tables.offsets.committed(key) or 0
            state = pop_tables.states.get(key)
            local = state is not None and state.fifo is not None and state.fifo.local
            _note_order(view, key, record, committed, now_ms, local=local)
            suspended = record.suspended_at(committed)
            if suspended is not None:
                view.suspended[key] = suspended
    for key, state in sorted(pop_tables.states.items()):
        if state.cursor >= 0:
            view.standings[key] = state.standing(pop_tables.order(state), now_ms)
        low, high = tables.store.offsets_or_none(key.topic, key.queue_id) or (0, 0)
        low = tables.offsets.start_of(key.topic, key.queue_id)
        held = {offset: batch for offset, batch in state.in_flight.items() if low <= offset < high}
        if held and tables.groups.get(key.group) is not None:
            ours = sum(batch.local for batch in held.values())
            next_ms = min(batch.visible_at(offset) for offset, batch in held.items())
            view.in_flight.append(InFlight(*key, False, len(held), ours, min(held), next_ms))
    view.in_flight.sort()
    return view


def _note_order(view: PopView, key: QueueKey, record: OrderInfo, committed: int, now_ms: int, *, local: bool) -> None:
    group, topic, queue_id = key
    row: dict[str, Any] = {"group": group, "topic": topic, "queue_id": queue_id, "pop_time_ms": 0, "offsets": []}
    row |= {"unacked": [], "redeliveries": {}, "next_visible_ms": None, "attempts": {}}
    counts = (record.counts or {}).items()
    if record.counts_attempts:
        row["attempts"] = {str(offset): n for offset, n in counts if offset >= committed}
        if row["attempts"]:
            view.orders.append(row)
        return
    unacked = [offset for offset in record.unacked() if offset >= committed]
    invisible = {offset: record.visible_at(offset) for offset in unacked if not record.is_visible(offset, now_ms)}
    if record.pop_time_ms == 0:  # written by a RocketMQ that kept no pop times, so the times are not known
        invisible = {}
    next_ms = min(invisible.values(), default=None)
    row |= {"pop_time_ms": record.pop_time_ms, "offsets": list(record.offsets), "unacked": unacked}
    row |= {"redeliveries": {str(offset): n for offset, n in counts}, "next_visible_ms": next_ms}
    view.orders.append(row)
    if next_ms is not None:
        count = len(invisible)
        view.in_flight.append(
            InFlight(group, topic, queue_id, True, count, count if local else 0, min(invisible), next_ms)
        )


def _as_parts(tables: Tables) -> Parts:
    """Return the tables as `Parts`, for objects that only read. A store opened for reading takes no puts."""
    return cast(Parts, tables)


# -- lag ---------------------------------------------------------------------------------------------------------------


class QueueLag(NamedTuple):
    """Lag of a group in one queue."""

    group: str
    topic: str
    queue_id: int
    first: int
    """Offset of the first message that counts."""
    committed: int | None
    """First offset that is not settled. None if the group has no committed offset here."""
    end: int
    """Offset of the next message."""
    messages: int
    """Number of messages not consumed, those in flight included. 0 without a committed offset."""
    lost: int
    """Number of messages that retention, expiry or a purge removed before the group consumed them."""
    in_flight: int
    """Number of messages popped and not settled. Messages read but not committed are not in the files."""
    oldest_ms: int | None
    """Store time of the first message that is not consumed. None without one, or if it is damaged."""


def group_names(tables: Tables) -> list[str]:
    """Return every consumer group that has settings or committed offsets."""
    return sorted({*tables.groups.names(), *tables.offsets.groups()})


def lag_of(tables: Tables, group: str, pops: PopView) -> list[QueueLag]:
    """Return the lag of each queue in topics where the group has committed offsets or messages in flight.
    Its retry topics are included. Raises GroupNotFoundError if the group has neither settings nor committed offsets."""
    progress = tables.offsets.of_group(group)
    if not progress and tables.groups.get(group) is None:
        raise GroupNotFoundError(f"{tables.store.path} has no group {group!r}: no settings, no committed offsets")
    found: list[QueueLag] = []
    # A running broker may have popped from a queue, or failed in it, without having saved its offsets yet.
    files = {*pops.standings, *pops.suspended}
    known: dict[str, set[int]] = {}
    for topic, queue_id in (*progress, *((each.topic, each.queue_id) for each in files if each.group == group)):
        known.setdefault(topic, set()).add(queue_id)
    for topic, queues in sorted(known.items()):
        with suppress(TopicNotFoundError):
            queues |= {ref.queue_id for ref in tables.store.queues(topic)}
        found += (_lag(tables, QueueKey(group, topic, queue_id), pops) for queue_id in sorted(queues))
    return found


def _lag(tables: Tables, key: QueueKey, pops: PopView) -> QueueLag:
    store, offsets = tables.store, tables.offsets
    popped = pops.standings.get(key)
    # The pop log of a running broker is newer than its saved offsets, which may be seconds old.
    committed = offsets.committed(key) if popped is None else popped.first
    low, high = offsets.bounds(key.topic, key.queue_id)
    lag = None if committed is None else measure(store, offsets, key, committed, popped, pops.retries(key))
    if lag is None or committed is None:
        return QueueLag(*key, low, committed, high, 0, 0, 0, None)
    oldest_ms = None
    if lag.messages > lag.waiting:
        messages = store.get(key.topic, key.queue_id, lag.standing.first, 1).messages
        oldest_ms = messages[0].store_timestamp_ms if messages else None
    # Popped messages that were deleted still count as in flight until their visibility timeout ends.
    lost = max(0, low - (committed if popped is None else popped.next))
    return QueueLag(*key, low, committed, lag.end, lag.messages, lost, lag.standing.in_flight, oldest_ms)


# -- pins --------------------------------------------------------------------------------------------------------------


def oldest_pin(tables: Tables, transactions: Transactions, levels: Iterable[LevelView], timer: TimerView) -> Pin | None:
    """Return the pin that keeps the front of the log, by the files on disk, or None if there is none."""
    return oldest_of(_pins(tables, transactions, levels, timer))


def _pins(tables: Tables, transactions: Transactions, levels: Iterable[LevelView], timer: TimerView) -> Iterator[Pin]:
    store, reach = tables.store, reach_of(tables.store.manifest)
    yield from all_pins(tables, [transactions])
    for view in levels:
        physical = physical_of(store, SCHEDULE_TOPIC, view.level - 1, view.offset) if view.waiting else None
        if physical is not None:
            why = f"delay level {view.level} has messages that wait"
            yield Pin(physical, SCHEDULE_TOPIC, view.level - 1, SCHEDULE_GROUP, why, reach=reach)
    if timer.physical_offset is not None:
        why = "the oldest message that waits for its time"
        yield Pin(timer.physical_offset, TIMER_TOPIC, 0, "", why, reach=reach)
    bounds = store.offsets_or_none(POP_LOG_TOPIC, 0)
    if bounds is not None:
        position = max(bounds[0], tables.offsets.committed(POP_LOG_KEY) or 0)
        physical = physical_of(store, POP_LOG_TOPIC, 0, position)
        if physical is not None:
            yield Pin(physical, POP_LOG_TOPIC, 0, POP_LOG_GROUP, "where the replay of the pop log begins")


# -- all of it ---------------------------------------------------------------------------------------------------------


def inspect_broker(store: StoreReader) -> dict[str, Any]:
    """Return the broker's state in a store that is open for reading, as plain values (see the module).

    Never fails because of files in `config/`. A section that cannot be shown is in `not_shown` with the reason.
    """
    found: dict[str, Any] = {}
    not_shown: dict[str, str] = {}
    sections: dict[str, Callable[[], Any]] = {}
    try:
        sections = sections_of(open_tables(store))
    except (MQStoreError, OSError) as error:
        not_shown["broker"] = str(error)
    for section, look in sections.items():
        try:
            found[section] = look()
        except (MQStoreError, OSError, LookupError, ValueError) as error:
            not_shown[section] = str(error)
    return {**_EMPTY, **found, "not_shown": not_shown}


_EMPTY: dict[str, Any] = {
    "delay_levels": [],
    "timer": {"waiting": 0, "next_due_ms": None},
    "due": {"interval_ms": 1000, "counts": []},
    "in_flight": [],
    "order_info": [],
    "transactions": {"open": 0, "given_up": 0, "newest_given_up": []},
    "dead_letters": {},
    "oldest_pin": None,
}


def sections_of(tables: Tables) -> dict[str, Callable[[], Any]]:
    """Return a function for each section. State that several sections need is read once.
    If reading it fails, all of them fail."""
    levels = cache(lambda: delay_levels(tables))
    timer = cache(lambda: timer_view(tables))
    pops = cache(lambda: pop_view(tables, tables.clock.now_ms()))
    transactions = cache(lambda: Transactions(_as_parts(tables), lambda: None))
    return {
        "delay_levels": lambda: [view._asdict() for view in levels()],
        "timer": lambda: {"waiting": timer().waiting, "next_due_ms": timer().next_due_ms},
        "due": lambda: due_counts(
            tables.store, [(each.level - 1, *each[2:4], each[5]) for each in levels()], timer().due
        ),
        "in_flight": lambda: [view._asdict() for view in pops().in_flight],
        "order_info": lambda: pops().orders,
        "transactions": lambda: _transactions(tables, transactions()),
        "dead_letters": lambda: {each.group: count for each in letters_of(tables) if (count := len(each))},
        "oldest_pin": lambda: _pin_row(tables.store, oldest_pin(tables, transactions(), levels(), timer())),
    }


def front_of(tables: Tables) -> dict[str, Any] | None:
    """Return the `oldest_pin` of `inspect_broker`. Raises its errors, where `inspect_broker` has `not_shown`."""
    found: dict[str, Any] | None = sections_of(tables)["oldest_pin"]()
    return found


def _transactions(tables: Tables, transactions: Transactions) -> dict[str, Any]:
    store = tables.store
    low, high = store.offsets_or_none(TRANS_CHECK_TOPIC, 0) or (0, 0)
    newest = []
    for message in messages_of(store, TRANS_CHECK_TOPIC, max(low, high - _GIVEN_UP_SHOWN), high):
        properties = message.stored_properties()
        row = {name: properties.get(stored) for name, stored in _GIVEN_UP.items()}
        newest.append(row | {"queue_offset": message.offset, "store_timestamp_ms": message.store_timestamp_ms})
    return {"open": transactions.open_count(), "given_up": high - low, "newest_given_up": newest}


def _pin_row(store: StoreReader, pin: Pin | None) -> dict[str, Any] | None:
    if pin is None:
        return None
    try:
        queue_offset: int | None = store.at(pin.physical_offset).offset
    except LookupError:  # the record is damaged, but a pin keeps it anyway
        queue_offset = None
    return {**pin._asdict(), "queue_offset": queue_offset}
