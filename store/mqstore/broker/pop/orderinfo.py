"""Order info: the last batch that a FIFO group popped from each queue, and whether it may pop the next
(delivery#order-info).

One record a (topic, group, queue). Pure state: no clock (`now_ms` is a parameter), no file (the pop service writes
`as_json` to ``consumerOrderInfo.json`` and replays its log), no idea of how messages are read or who waits for them.

A record says of each message of the batch whether it is acknowledged and, if not, until when it stays invisible::

                      update: popped                            ack (same pop time)
    (no record)  ───────────────────►  unacked, invisible  ──────────────────────────►  acked
                                        │            ▲
              now >= its visible time   │            │  change of its visible time
                                        ▼            │
                                       unacked, visible ── next update: a new record, redeliveries + 1

The queue is *blocked* while one unacked message is invisible. Once none is, the next pop begins at the first unacked
message and replaces the record: order is kept, and receipts of the old batch are dead because their pop time differs.
Redeliveries are counted against the batch before, message by message, and forgotten for messages that a batch skips.

The same file keeps the failed attempts of groups that consume orderly in the queue model (delivery#order-file):
an *attempt entry* has pop time 0, so that it blocks no pop and takes no acknowledgement, here and in RocketMQ.

Either kind of record also says which of its messages have failed and are not settled (`Suspended`): since when, and
why. This is for people: nothing depends on it, and RocketMQ passes over the member `susp` of the file.

Locking: a pop, an ack or a change spans several calls here and the offsets besides, so each (topic, group, queue) has a
lock of its own in the pop service. The lock of this table is a leaf below it; it makes one call atomic, and
`as_json` a copy of whole records.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple, NoReturn

from mqstore.broker.pop import receipts
from mqstore.broker.pop.time import is_visible

__all__ = [
    "BATCH_MAX",
    "ERROR_CHARS",
    "ILLEGAL",
    "NO_COMMIT",
    "Counts",
    "OrderInfo",
    "OrderInfoTable",
    "Suspended",
    "check_order_info",
]

ILLEGAL: Final = -1
"""From an acknowledgement: the offset is not of the batch. The caller raises InvalidReceiptError."""
NO_COMMIT: Final = -2
"""From an acknowledgement: not of the batch that counts; nothing was changed and there is nothing to commit."""
BATCH_MAX: Final = 63
"""Most offsets in one record: Java's shift of the bitmap wraps at 64, and bit 63 is its sign (delivery#order-info)."""
IDLE_MS: Final = 86_400_000
"""A record not popped again for longer than this is dropped, unless it holds attempts that are still to count."""

ERROR_CHARS: Final = 300
"""Longest text of an error that is kept of a suspended queue."""

_I32_MAX, _I64_MAX = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class Suspended:
    """A message that has failed and holds up its queue: nothing behind it is handled before it is settled.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder).broker as broker:
    ...     _ = broker.put("orders", b"hello", queue_id=0)
    ...     [delivery] = broker.pop("billing", "orders", order=True)
    ...     _ = broker.nack("billing", "orders", delivery.receipt, error="the database is away")
    ...     [(queue, suspended)] = broker.suspended("billing").items()
    ...     queue.queue_id, suspended.offset, suspended.attempt, suspended.error
    (0, 0, 1, 'the database is away')
    """

    offset: int
    attempt: int
    """The attempt that failed last, from 1."""
    since_ms: int
    """When its first attempt failed, in ms since the epoch."""
    error: str
    """Of the last failure, at most 300 characters; empty if nothing was said."""


class Counts(NamedTuple):
    """How often the messages of a batch were delivered before, as a pop answers it (delivery#order-rules)."""

    queue_id: int
    per_offset: dict[int, int]
    """Queue offset -> redeliveries, those with any."""
    queue: int
    """The fewest redeliveries in the batch; 0 as soon as one message is new."""

    def of(self, offset: int) -> int:
        """`reconsume_times` of a delivered message: its own entry, else that of the queue (delivery#receipt)."""
        return self.per_offset.get(offset, self.queue)

    def count_string(self, mark: int = 0) -> str:
        """orderCountInfo of delivery#info-strings; `mark` is `receipts.topic_mark` of the topic that was read."""
        items = [receipts.offset_count_item(mark, self.queue_id, x, n) for x, n in self.per_offset.items()]
        return receipts.join_items([*items, receipts.count_item(mark, self.queue_id, self.queue)])


@dataclass(slots=True)
class OrderInfo:
    """One batch of one queue. Offsets are absolute here; distances to the first are the file's affair."""

    offsets: tuple[int, ...]
    """Queue offsets that were delivered, ascending; with gaps where a filter passed messages over."""
    pop_time_ms: int
    """Of the pop; acknowledgements must carry it. 0: an attempt entry, or a file from before there were pop times."""
    invisible_ms: int | None
    """As the pop asked for; None or 0 in files of old: `blocks` then takes that of the pop which asks."""
    updated_ms: int
    """When the record was made; only for dropping idle ones."""
    attempt_id: str | None = None
    """Of the receive: the same id is the same attempt, repeated because its answer was lost."""
    acked: int = 0
    """Bit i: `offsets[i]` is acknowledged."""
    counts: dict[int, int] | None = None
    """Offset -> redeliveries, or failed attempts, where there are any. None on the first batch of a queue."""
    visible_ms: dict[int, int] | None = None
    """Offset -> when it becomes visible, where that was changed after the pop."""
    released: int = 0
    """Bit i: `offsets[i]` was given back unseen, so that its next delivery is no redelivery."""
    suspended: dict[int, Suspended] = field(default_factory=dict)
    """By offset: messages that have failed and are not settled."""
    unknown: dict[str, Any] = field(default_factory=dict)
    """Members of the file's entry that are not understood here, kept on rewriting (delivery#tables)."""

    @property
    def counts_attempts(self) -> bool:
        """Whether this is an attempt entry (delivery#order-file)."""
        return self.pop_time_ms == 0 and bool(self.counts)

    def before(self, end: int) -> OrderInfo:
        """The record without the offsets from `end` on."""
        count = sum(offset < end for offset in self.offsets)
        bits = (1 << count) - 1

        def kept(numbers: Mapping[int, int] | None) -> dict[int, int] | None:
            return None if numbers is None else {offset: n for offset, n in numbers.items() if offset < end}

        return replace(
            self,
            offsets=self.offsets[:count],
            counts=kept(self.counts),
            visible_ms=kept(self.visible_ms),
            acked=self.acked & bits,
            released=self.released & bits,
            suspended={offset: each for offset, each in self.suspended.items() if offset < end},
        )

    def suspend(self, offset: int, attempt: int, now_ms: int, error: str) -> None:
        """Note that an attempt at a message failed."""
        before = self.suspended.get(offset)
        since_ms = now_ms if before is None else before.since_ms
        self.suspended[offset] = Suspended(offset, attempt, since_ms, error[:ERROR_CHARS])

    def suspended_at(self, committed: int) -> Suspended | None:
        """The first message from offset `committed` on that has failed and is not settled."""
        unsettled = (offset for offset in self.unacked() if offset >= committed)
        return next((self.suspended[offset] for offset in unsettled if offset in self.suspended), None)

    def visible_at(self, offset: int) -> int:
        """When a message of the batch becomes visible."""
        return (self.visible_ms or {}).get(offset, self.pop_time_ms + (self.invisible_ms or 0))

    def is_visible(self, offset: int, now_ms: int) -> bool:
        """Whether that delivery is over."""
        return is_visible(self.pop_time_ms, self.visible_at(offset), now_ms)

    def unacked(self) -> list[int]:
        return [offset for i, offset in enumerate(self.offsets) if not self.acked >> i & 1]

    def blocks(self, attempt_id: str | None, invisible_ms: int, now_ms: int) -> bool:
        """`check_block` of delivery#order-rules. May set `invisible_ms`, as RocketMQ does."""
        if self.pop_time_ms == 0 or not self.offsets or (attempt_id is not None and attempt_id == self.attempt_id):
            return False
        if not self.invisible_ms or self.invisible_ms <= 0:
            self.invisible_ms = invisible_ms
        return not all(self.is_visible(offset, now_ms) for offset in self.unacked())

    def next_offset(self) -> int:
        """First unacked offset, one past the last when there is none, NO_COMMIT for an empty batch."""
        if not self.offsets:
            return NO_COMMIT
        first = (~self.acked & self.acked + 1).bit_length() - 1  # the lowest bit that is not set
        return self.offsets[first] if first < len(self.offsets) else self.offsets[-1] + 1

    def lock_free_ms(self, now_ms: int) -> int | None:
        """`lock_free_time` of delivery#order-rules: when to look again whether the queue is free.

        The time of the first message that is invisible, not of the last: looking may find the queue still blocked.
        """
        if not self.offsets:
            return None
        unacked = self.unacked()
        if not unacked:
            return now_ms
        if not self.invisible_ms or self.invisible_ms <= 0:
            return None
        times = (self.visible_at(offset) for offset in unacked if not self.is_visible(offset, now_ms))
        return next(times, now_ms)

    def redelivered(self, attempt_id: str | None, offsets: Sequence[int]) -> dict[int, int]:
        """Redeliveries of a batch `offsets` that is popped after this one, those with any."""
        before = self.counts or {}
        if attempt_id is not None and attempt_id == self.attempt_id:
            return dict(before)
        # What an attempt entry counts has failed already; what a pop delivered counts as failed by coming again.
        ended = 0 if self.counts_attempts else 1
        index = {offset: i for i, offset in enumerate(self.offsets)}
        now = {
            offset: before.get(offset, 0) + (0 if self.released >> index[offset] & 1 else ended)
            for offset in offsets
            if offset in index
        }
        return {offset: n for offset, n in now.items() if n}

    def counts_from(self, committed: int) -> bool:
        """Whether the next delivery of any message from offset `committed` on would count an attempt by this record."""
        return bool(self.redelivered(None, [offset for offset in self.unacked() if offset >= committed]))

    def as_json(self) -> dict[str, Any]:
        """The entry of the file (delivery#order-file); members without a value are left out."""
        first = self.offsets[0] if self.offsets else 0
        entry: dict[str, Any] = {
            **self.unknown,
            "a": self.attempt_id,
            "cm": self.acked,
            "i": self.invisible_ms,
            "l": self.updated_ms,
            "o": [*self.offsets[:1], *(offset - first for offset in self.offsets[1:])],
            "oc": None if self.counts is None else {str(offset): n for offset, n in self.counts.items()},
            "ot": None if self.visible_ms is None else {str(offset): ms for offset, ms in self.visible_ms.items()},
            "popTime": self.pop_time_ms,
            "rel": self.released or None,
            "susp": {str(each.offset): [each.attempt, each.since_ms, each.error] for each in self.suspended.values()}
            or None,
        }
        return {name: value for name, value in entry.items() if value is not None}

    @classmethod
    def from_json(cls, entry: object, where: str) -> OrderInfo:
        """Read any of the three shapes of delivery#order-info. ValueError says what of `where` cannot be."""
        if not isinstance(entry, dict):
            _refuse(where, f"an object is expected, not {type(entry).__name__}")
        offsets = _offsets(entry.get("o"), f"{where}.o")
        acked = _integer(entry.get("cm") or 0, f"{where}.cm")
        info = cls(
            offsets=offsets,
            pop_time_ms=_integer(entry.get("popTime") or 0, f"{where}.popTime"),
            invisible_ms=None if entry.get("i") is None else _integer(entry["i"], f"{where}.i", minimum=-_I64_MAX),
            updated_ms=_integer(entry.get("l") or 0, f"{where}.l"),
            attempt_id=entry.get("a"),
            acked=acked,
            counts=_numbers(entry.get("oc"), f"{where}.oc"),
            visible_ms=_numbers(entry.get("ot"), f"{where}.ot"),
            released=_integer(entry.get("rel") or 0, f"{where}.rel"),
            suspended=_suspended(entry.get("susp"), f"{where}.susp"),
            unknown={name: value for name, value in entry.items() if name not in _MEMBERS and value is not None},
        )
        if info.attempt_id is not None and not isinstance(info.attempt_id, str):
            _refuse(f"{where}.a", f"a string is expected, not {type(info.attempt_id).__name__}")
        # An attempt entry has no bits set, so no shift can wrap: a batch of the queue model may be longer.
        if len(offsets) > BATCH_MAX and (info.pop_time_ms or acked or info.released):
            _refuse(f"{where}.o", f"{len(offsets)} offsets; a batch has at most {BATCH_MAX}")
        return info


_MEMBERS = frozenset({"a", "c", "cm", "i", "l", "o", "oc", "ot", "popTime", "rel", "susp"})


class OrderInfoTable:
    """The records of all queues (delivery#order-rules). Safe to call from many threads; each call is atomic.

    >>> table = OrderInfoTable()
    >>> table.update(None, "orders", "billing", 0, 1_000_000, 60_000, [0, 1, 2], 1_000_000).count_string()
    '0 0 0'
    >>> table.commit_and_next("orders", "billing", 0, 1, 1_000_000, committed=0)
    0
    >>> table.check_block(None, "orders", "billing", 0, 60_000, 1_059_999)
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By "topic@group", the file's key: a key of another form, which cleaning must keep, needs no place of its
        # own, and topic and group cannot hold an "@".
        self._queues: dict[str, dict[int, OrderInfo]] = {}
        self._unknown: dict[str, Any] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """Grows with every change: what was written at one version need not be written again while it stands."""
        return self._version

    # --- pop, ack, change (delivery#order-rules) ----------------------------------------------------------------------

    def update(
        self,
        attempt_id: str | None,
        topic: str,
        group: str,
        queue_id: int,
        pop_time_ms: int,
        invisible_ms: int,
        offsets: Sequence[int],
        now_ms: int,
    ) -> Counts:
        """Note that `offsets` (ascending) were popped, in place of the batch before; how often each came before.

        ValueError for a batch that cannot be: empty, too long, not ascending, or popped at no time.
        """
        batch = tuple(offsets)
        if not 0 < len(batch) <= BATCH_MAX or any(a >= b for a, b in pairwise((-1, *batch))):
            raise ValueError(f"a batch is 1 to {BATCH_MAX} ascending offsets, not {batch!r:.200}")
        if pop_time_ms <= 0 or invisible_ms < 0:
            raise ValueError(f"pop time {pop_time_ms} must be positive, invisible time {invisible_ms} not negative")
        new = OrderInfo(batch, pop_time_ms, invisible_ms, now_ms, attempt_id)
        with self._lock:
            queues = self._queues.setdefault(_key(topic, group), {})
            old = queues.get(queue_id)
            if old is not None:
                new.counts = old.redelivered(attempt_id, batch)
                new.suspended = {offset: old.suspended[offset] for offset in batch if offset in old.suspended}
            queues[queue_id] = new
            self._version += 1
        counts = new.counts or {}
        return Counts(queue_id, dict(counts), min(counts.get(offset, 0) for offset in batch))

    def check_block(
        self, attempt_id: str | None, topic: str, group: str, queue_id: int, invisible_ms: int, now_ms: int
    ) -> bool:
        """Whether a pop by `attempt_id` (None: by someone else) finds the queue blocked. `invisible_ms` is what that
        pop asks for, and counts only for records that know none of their own."""
        with self._lock:
            record = self._find(topic, group, queue_id)
            return record is not None and record.blocks(attempt_id, invisible_ms, now_ms)

    def commit_and_next(
        self, topic: str, group: str, queue_id: int, offset: int, pop_time_ms: int, committed: int | None
    ) -> int:
        """Acknowledge `offset`, popped at `pop_time_ms`; the offset to commit, `ILLEGAL`, or `NO_COMMIT`.

        Without a record only the message at `committed` may be acknowledged: after a lost record any other would
        take the ones before it along, which nobody has consumed.
        """
        with self._lock:
            record = self._find(topic, group, queue_id)
            if record is None:
                return offset + 1 if offset == committed else NO_COMMIT
            if not record.offsets:
                return ILLEGAL
            if pop_time_ms != record.pop_time_ms or pop_time_ms == 0:
                return NO_COMMIT
            if offset not in record.offsets:
                return ILLEGAL
            record.acked |= 1 << record.offsets.index(offset)
            record.suspended.pop(offset, None)
            self._version += 1
            return record.next_offset()

    def note_failed(
        self, topic: str, group: str, queue_id: int, offset: int, attempt: int, now_ms: int, error: str
    ) -> None:
        """Note that delivery number `attempt` of a popped message failed, and why: its queue is suspended. Nothing is
        noted of a message that is settled, or not of the last batch."""
        with self._lock:
            record = self._find(topic, group, queue_id)
            if record is not None and offset in record.unacked():
                record.suspend(offset, attempt, now_ms, error)
                self._version += 1

    def suspended(
        self, group: str, committed: Callable[[str, str, int], int | None]
    ) -> dict[tuple[str, int], Suspended]:
        """(topic, queue id) -> the failed message that holds the queue up. `committed(topic, group, queue_id)` is the
        group's progress."""
        found = {
            (topic, queue_id): record.suspended_at(committed(topic, group, queue_id) or 0)
            for (topic, name, queue_id), record in self.records().items()
            if name == group and record.suspended
        }
        return {queue: suspended for queue, suspended in sorted(found.items()) if suspended is not None}

    def update_next_visible_time(
        self, topic: str, group: str, queue_id: int, offset: int, pop_time_ms: int, visible_ms: int
    ) -> bool:
        """Let `offset` become visible at `visible_ms`, sooner or later than now. False, and nothing changed, when there
        is no batch of that pop time. The offset is not checked, as in RocketMQ: an unknown one has no effect."""
        with self._lock:
            record = self._of_pop(topic, group, queue_id, pop_time_ms)
            if record is None:
                return False
            record.visible_ms = {**(record.visible_ms or {}), offset: visible_ms}
            self._version += 1
            return True

    def release(
        self, topic: str, group: str, queue_id: int, offsets: Iterable[int], pop_time_ms: int, now_ms: int
    ) -> bool:
        """Take unseen messages back (delivery#pop-log): visible at once, and their next delivery counts as this one.

        Releasing twice changes nothing more. False when there is no batch of that pop time; offsets that are not in it
        are passed over.
        """
        with self._lock:
            record = self._of_pop(topic, group, queue_id, pop_time_ms)
            if record is None:
                return False
            given = [offset for offset in offsets if offset in record.offsets]
            for offset in given:
                record.released |= 1 << record.offsets.index(offset)
            record.visible_ms = {**(record.visible_ms or {}), **dict.fromkeys(given, now_ms)}
            self._version += 1
            return True

    def clear_block(self, topic: str, group: str, queue_id: int) -> None:
        """Forget the batch: the queue's offset was reset."""
        with self._lock:
            if self._queues.get(_key(topic, group), {}).pop(queue_id, None) is not None:
                self._version += 1

    def next_offset(self, topic: str, group: str, queue_id: int) -> int:
        """First unacked offset of the batch, one past its last when all are acked, `NO_COMMIT` without a batch."""
        with self._lock:
            record = self._find(topic, group, queue_id)
            return NO_COMMIT if record is None else record.next_offset()

    def lock_free_ms(self, topic: str, group: str, queue_id: int, now_ms: int) -> int | None:
        """When to look again whether the queue is free: `now_ms` when it is, None when no time will free it."""
        with self._lock:
            record = self._find(topic, group, queue_id)
            return None if record is None else record.lock_free_ms(now_ms)

    # --- records as they are: replay, inspection -------------------------------------------------------------------

    def get(self, topic: str, group: str, queue_id: int) -> OrderInfo | None:
        """A copy of the record."""
        with self._lock:
            record = self._find(topic, group, queue_id)
            return None if record is None else _copy(record)

    def restore(self, topic: str, group: str, queue_id: int, record: OrderInfo) -> None:
        """Put `record` in place of whatever is there: what replaying the pop log found (delivery#pop-log)."""
        with self._lock:
            self._queues.setdefault(_key(topic, group), {})[queue_id] = _copy(record)
            self._version += 1

    def records(self) -> dict[tuple[str, str, int], OrderInfo]:
        """(topic, group, queue id) -> a copy of its record, of all keys that name a topic and a group."""
        with self._lock:
            return {
                (parts[0], parts[1], queue_id): _copy(record)
                for key, queues in self._queues.items()
                if len(parts := key.split("@")) == 2
                for queue_id, record in queues.items()
            }

    def cut(self, end_of: Callable[[str, int], int]) -> bool:
        """Forget what is said of offsets from the end of their queue on, (topic, queue id) -> end: other messages will
        bear them. Whether there was anything."""
        changed = False
        for (topic, group, queue_id), record in self.records().items():
            end = end_of(topic, queue_id)
            if max((*record.offsets, *(record.counts or ())), default=-1) < end:
                continue
            changed = True
            kept = record.before(end)
            if kept.offsets:
                self.restore(topic, group, queue_id, kept)
            else:
                with self._lock:
                    self._queues[_key(topic, group)].pop(queue_id, None)
                    self._version += 1
        return changed

    # --- attempts of the queue model (delivery#order-file) ------------------------------------------------------------

    def attempts(self, group: str, topic: str, queue_id: int) -> dict[int, int]:
        """Queue offset -> failed attempts, as noted; {} for a queue whose group pops."""
        with self._lock:
            record = self._find(topic, group, queue_id)
            return dict(record.counts or {}) if record is not None and record.counts_attempts else {}

    def note_attempt(
        self, group: str, topic: str, queue_id: int, offset: int, count: int, now_ms: int, error: str = ""
    ) -> None:
        """Note that the message at `offset` has failed `count` times, the last time by `error`; 0 forgets it. Takes the
        place of a batch left over from when the group popped. ValueError for what the file could not be read with
        again."""
        for what, number, most in (
            ("queue id", queue_id, _I32_MAX),
            ("offset", offset, _I64_MAX),
            ("count", count, _I32_MAX),
        ):
            if type(number) is not int or not 0 <= number <= most:
                raise ValueError(f"{what} {number!r:.40} must be an int, neither negative nor above {most}")
        if "@" in topic or "@" in group:
            raise ValueError(f"topic {topic[:150]!r} and group {group[:150]!r} must be names without an '@'")
        with self._lock:
            record = self._find(topic, group, queue_id)
            if record is None or not record.counts_attempts:
                record = OrderInfo((), 0, None, now_ms)
            record.suspend(offset, count, now_ms, error)
            counts = {**(record.counts or {}), offset: count}
            self._put_attempts(topic, group, queue_id, counts, record.suspended, now_ms)

    def drop_attempts(self, group: str, topic: str, queue_id: int, below: int) -> None:
        """Forget the attempts of messages before offset `below`: the queue has moved on. Free when there are none."""
        with self._lock:
            record = self._find(topic, group, queue_id)
            if record is None or not record.counts_attempts or not record.counts or min(record.counts) >= below:
                return
            counts = {offset: n for offset, n in record.counts.items() if offset >= below}
            self._put_attempts(topic, group, queue_id, counts, record.suspended, record.updated_ms)

    def _put_attempts(
        self,
        topic: str,
        group: str,
        queue_id: int,
        counts: dict[int, int],
        suspended: dict[int, Suspended],
        now_ms: int,
    ) -> None:
        counts = {offset: counts[offset] for offset in sorted(counts) if counts[offset]}
        suspended = {offset: suspended[offset] for offset in counts if offset in suspended}
        queues = self._queues.setdefault(_key(topic, group), {})
        if counts:
            queues[queue_id] = OrderInfo(tuple(counts), 0, None, now_ms, counts=counts, suspended=suspended)
        else:
            queues.pop(queue_id, None)
        self._version += 1

    # --- the file (delivery#order-clean, delivery#order-file) ---------------------------------------------------------

    def clean(
        self,
        now_ms: int,
        read_queues: Callable[[str], int | None],
        has_group: Callable[[str], bool],
        committed: Callable[[str, str, int], int | None],
    ) -> int:
        """Drop what nobody will ask for again, before the file is written; how many records went.

        `read_queues(topic)` is None for a topic that is gone; `committed(topic, group, queue_id)` its progress.
        Unlike RocketMQ a record stays, however old, while one of its messages is invisible: its receiver still works
        on it, and dropping the record would break the order. And while it counts attempts of a message that is not
        settled: a group that rests over a weekend must not give a poison message all its attempts anew. There is one
        such record a queue, and it goes when the queue moves on.
        """
        with self._lock:
            seen = [
                (key, parts, dict(queues)) for key, queues in self._queues.items() if len(parts := key.split("@")) == 2
            ]
            records = [record for _, _, queues in seen for record in queues.values()]
            idle = {id(record): _copy(record) for record in records if _idle(record, now_ms)}
        # The callbacks take locks of their own (topics, groups, offsets), so they are asked with ours open.
        dropped = 0
        for key, (topic, group), queues in seen:
            limit = (read_queues(topic) if has_group(group) else None) or 0
            gone = {
                queue_id: record
                for queue_id, record in queues.items()
                if queue_id >= limit
                or (
                    (old := idle.get(id(record))) is not None
                    and not old.counts_from(committed(topic, group, queue_id) or 0)
                )
            }
            with self._lock:
                dropped += self._drop(key, gone)
        return dropped

    def _drop(self, key: str, gone: dict[int, OrderInfo]) -> int:
        """Take out the records of `gone` that are still there: another may have come while the callbacks were asked."""
        queues = self._queues.get(key, {})
        dropped = [queue_id for queue_id, record in gone.items() if queues.get(queue_id) is record]
        for queue_id in dropped:
            del queues[queue_id]
        if not queues:
            self._queues.pop(key, None)
        self._version += 1 if dropped else 0
        return len(dropped)

    def as_json(self) -> dict[str, Any]:
        """The content of ``consumerOrderInfo.json``: whole records, as of one moment."""
        with self._lock:
            table = {
                key: {str(queue_id): record.as_json() for queue_id, record in queues.items()}
                for key, queues in self._queues.items()
            }
            return {**self._unknown, "table": table}

    def load(self, value: Mapping[str, Any]) -> None:
        """Take the content of the file in place of everything here. ValueError, and nothing changed, for another
        shape."""
        table, unknown = _read(value)
        with self._lock:
            self._queues, self._unknown = table, unknown
            self._version += 1

    def _find(self, topic: str, group: str, queue_id: int) -> OrderInfo | None:
        queues = self._queues.get(_key(topic, group))
        return None if queues is None else queues.get(queue_id)

    def _of_pop(self, topic: str, group: str, queue_id: int, pop_time_ms: int) -> OrderInfo | None:
        record = self._find(topic, group, queue_id)
        return record if record is not None and 0 != record.pop_time_ms == pop_time_ms else None


def check_order_info(value: Mapping[str, Any]) -> None:
    """Raise ValueError unless `value` is what ``consumerOrderInfo.json`` may hold: the `check` of its loading."""
    _read(value)


def _key(topic: str, group: str) -> str:
    return f"{topic}@{group}"


def _idle(record: OrderInfo, now_ms: int) -> bool:
    """Whether the cleaning drops a record by its age. Asked of a copy: `blocks` may note an invisible time."""
    return now_ms - record.updated_ms > IDLE_MS and not _copy(record).blocks(None, 0, now_ms)


_values = attrgetter(*(each.name for each in fields(OrderInfo)))


def _copy(record: OrderInfo) -> OrderInfo:
    copied = OrderInfo(*_values(record))  # `replace` is slower, and each ordered acknowledgement makes two copies
    copied.counts = None if record.counts is None else dict(record.counts)
    copied.visible_ms = None if record.visible_ms is None else dict(record.visible_ms)
    copied.suspended, copied.unknown = dict(record.suspended), dict(record.unknown)
    return copied


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(value: Mapping[str, Any]) -> tuple[dict[str, dict[int, OrderInfo]], dict[str, Any]]:
    table = value.get("table")
    if table is None:
        table = {}
    if not isinstance(table, dict):
        _refuse("table", f"an object is expected, not {type(table).__name__}")
    found: dict[str, dict[int, OrderInfo]] = {}
    for key, queues in table.items():
        if not isinstance(queues, dict):
            _refuse(key, f"an object is expected, not {type(queues).__name__}")
        found[key] = {
            _key_number(queue_id, key): OrderInfo.from_json(entry, f"{key}[{queue_id}]")
            for queue_id, entry in queues.items()
            if entry is not None
        }
    return found, {name: member for name, member in value.items() if name != "table"}


def _offsets(value: object, where: str) -> tuple[int, ...]:
    """Distances to the first, as the file has them, made absolute."""
    if value is None:
        return ()
    if not isinstance(value, list):
        _refuse(where, f"a list is expected, not {type(value).__name__}")
    numbers = [_integer(number, where) for number in value]
    offsets = (*numbers[:1], *(numbers[0] + distance for distance in numbers[1:]))
    if any(a >= b for a, b in pairwise(offsets)) or (offsets and offsets[-1] > _I64_MAX):
        _refuse(where, "the offsets do not ascend")
    return offsets


def _numbers(value: object, where: str) -> dict[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        _refuse(where, f"an object is expected, not {type(value).__name__}")
    return {_key_number(name, where): _integer(number, f"{where}[{name}]") for name, number in value.items()}


def _suspended(value: object, where: str) -> dict[int, Suspended]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        _refuse(where, f"an object is expected, not {type(value).__name__}")
    found = {}
    for name, each in value.items():
        if not (isinstance(each, list) and len(each) == 3 and isinstance(each[2], str)):
            _refuse(f"{where}[{name}]", "[attempt, ms, error] is expected")
        offset = _key_number(name, where)
        attempt, since_ms = (_integer(number, f"{where}[{name}]") for number in each[:2])
        found[offset] = Suspended(offset, attempt, since_ms, each[2])
    return found


def _key_number(name: object, where: str) -> int:
    """A number that serves as a key: JSON has it as text, and only the spelling that we would write is taken."""
    text = str(name)
    if not (text.isascii() and text.isdigit() and len(text) <= 19) or str(int(text)) != text:
        _refuse(where, f"key {text[:40]!r} is not a number")
    return _integer(int(text), where)


def _integer(value: object, where: str, minimum: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= _I64_MAX:
        _refuse(where, f"{str(value)[:40]!r} is not a number from {minimum} to {_I64_MAX}")
    return value


def _refuse(where: str, why: str) -> NoReturn:
    raise ValueError(f"order info: {where[:200]}: {why}")
