"""Order info: the last batch that a FIFO group popped from each queue (delivery#order-info).

The record decides whether the group may pop the next batch. It has no clock and no file: the pop service writes
`as_json` to ``consumerOrderInfo.json`` and replays its log. For each message of the batch it says whether it is
acknowledged and, if not, until when it stays invisible::

                      popped                                 acknowledged (same pop time)
    (no record)  ───────────────────►  unacked, invisible  ──────────────────────────►  acked
                                        │            ▲
              now >= its visible time   │            │  moved to another visible time
                                        ▼            │
                                       unacked, visible ── next pop: a new record, redeliveries + 1

The queue is *blocked* while one unacked message is invisible (delivery#order-rules). Afterwards the next pop begins at
the first unacked message and replaces the record. So the order is kept, and receipts of the old batch expire because
their pop time differs.

The same file keeps the failed attempts of groups that consume orderly in the queue model (delivery#order-file):
an *attempt entry* has pop time 0, so that it blocks no pop and takes no acknowledgement, here and in RocketMQ.

Records are immutable: each change makes a new record in place of the old one. A caller that changes the record of a
queue holds the queue's lock in the pop service.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mqstore.broker.pop.batch import Batch, is_visible
from mqstore.broker.redelivery.reason import REASON_CHARS, Reason
from mqstore.broker.tables.configfile import NOTHING, member, object_member
from mqstore.broker.tables.names import QueueKey
from mqstore.signalsafe import Lock

BATCH_MAX: Final = 63
"""Maximum number of offsets in one record (delivery#order-info).
Java's shift of the bitmap wraps at 64, and bit 63 is its sign."""
_I32_MAX, _I64_MAX = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class BlockedQueue:
    """Failed message that blocks its queue: no later message is handled before it is settled.

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
    """Number of the last failed attempt, from 1."""
    since_ms: int
    """Time of its first failed attempt, in ms since the epoch."""
    error: str
    """Error text of the last failure, at most 300 characters. Empty if there was none."""


class OrderInfo(NamedTuple):
    """One batch of one queue. Offsets are absolute here. The file stores distances from the first.

    >>> record = OrderInfo((0, 1, 2), 1_000_000, 60_000, 1_000_000).acknowledged([1])
    >>> record.next_offset(), record.blocks(None, 1_059_999), record.blocks(None, 1_060_000)
    (0, True, False)
    """

    offsets: tuple[int, ...]
    """Delivered queue offsets, ascending, with gaps for messages that a filter refused."""
    pop_time_ms: int
    """Time of the pop, which acknowledgements must have.
    0 for an attempt entry, or for a file from before there were pop times."""
    invisible_ms: int | None
    """Invisible time that the pop asked for. None in old files, whose messages are visible."""
    updated_ms: int
    """Time at which the record was made. Used only to drop idle records."""
    attempt_id: str | None = None
    """Id of the attempt to receive. The same id means a repeated attempt whose answer was lost."""
    acked: int = 0
    """Bit i: `offsets[i]` is acknowledged."""
    counts: dict[int, int] | None = None
    """Redeliveries or failed attempts by offset, if there are any. None on the first batch of a queue."""
    visible_ms: dict[int, int] | None = None
    """Visible times by offset, if they were changed after the pop."""
    released: int = 0
    """Bit i: `offsets[i]` was released unseen, so its next delivery is not a redelivery."""
    suspended: Mapping[int, BlockedQueue] = MappingProxyType({})
    """Messages that have failed and are not settled, by offset."""
    unknown: Mapping[str, Any] = NOTHING
    """Unknown members of the file's entry, which are kept on rewriting (delivery#tables)."""

    # --- contents --------------------------------------------------------------------------------------------------

    @property
    def counts_attempts(self) -> bool:
        """True if this is an attempt entry (delivery#order-file)."""
        return self.pop_time_ms == 0 and bool(self.counts)

    def attempt(self, offset: int) -> int:
        """Return the number of this delivery of the message, from 1."""
        return (self.counts or {}).get(offset, 0) + 1

    def suspended_at(self, committed: int) -> BlockedQueue | None:
        """Return the first message from offset `committed` on that has failed and is not settled, or None."""
        unsettled = (offset for offset in self.unacked(committed) if offset in self.suspended)
        return next((self.suspended[offset] for offset in unsettled), None)

    def visible_at(self, offset: int) -> int:
        return (self.visible_ms or {}).get(offset, self.pop_time_ms + (self.invisible_ms or 0))

    def is_visible(self, offset: int, now_ms: int) -> bool:
        return is_visible(self.pop_time_ms, self.visible_at(offset), now_ms)

    def unacked(self, begin: int = 0) -> list[int]:
        return [offset for i, offset in enumerate(self.offsets) if offset >= begin and not self.acked >> i & 1]

    def left(self, begin: int) -> int:
        """Return the bits of the unacknowledged offsets from `begin` on: bit i is for `offsets[i]`."""
        return sum(1 << i for i, offset in enumerate(self.offsets) if offset >= begin and not self.acked >> i & 1)

    def held(self, begin: int, now_ms: int) -> list[int]:
        """Return the offsets from `begin` on that are in flight: not acknowledged and not visible."""
        return [offset for offset in self.unacked(begin) if not self.is_visible(offset, now_ms)]

    def among(self, bits: int) -> list[int]:
        return [offset for i, offset in enumerate(self.offsets) if bits >> i & 1]

    def blocks(self, attempt_id: str | None, now_ms: int) -> bool:
        """Return True if the queue is blocked for `attempt_id`, None for any other (delivery#order-rules)."""
        if self.pop_time_ms == 0 or (attempt_id is not None and attempt_id == self.attempt_id):
            return False
        return any(not self.is_visible(offset, now_ms) for offset in self.unacked())

    def next_offset(self) -> int:
        """Return the first unacked offset, or the one past the last. The batch must not be empty."""
        first = (~self.acked & self.acked + 1).bit_length() - 1  # the lowest bit that is not set
        return self.offsets[first] if first < len(self.offsets) else self.offsets[-1] + 1

    def redelivered(self, attempt_id: str | None, offsets: Iterable[int]) -> dict[int, int]:
        """Return the redeliveries of a batch `offsets` that is popped after this one, without zeros."""
        before = self.counts or {}
        if attempt_id is not None and attempt_id == self.attempt_id:
            return dict(before)
        # Attempts of an attempt entry have failed already. A popped message counts as failed when it is delivered
        # again.
        ended = 0 if self.counts_attempts else 1
        index = {offset: i for i, offset in enumerate(self.offsets)}
        now = {
            offset: before.get(offset, 0) + (0 if self.released >> index[offset] & 1 else ended)
            for offset in offsets
            if offset in index
        }
        return {offset: n for offset, n in now.items() if n}

    # --- changed copies --------------------------------------------------------------------------------------------

    def followed_by(self, batch: OrderInfo) -> OrderInfo:
        """Return the record of the batch that is popped next, with what this one knows of its messages."""
        failed = {offset: self.suspended[offset] for offset in batch.offsets if offset in self.suspended}
        return batch._replace(counts=self.redelivered(batch.attempt_id, batch.offsets), suspended=failed)

    def acknowledged(self, offsets: Iterable[int]) -> OrderInfo:
        suspended = {offset: each for offset, each in self.suspended.items() if offset not in offsets}
        return self._replace(acked=self.acked | self._bits(offsets), suspended=suspended)

    def moved(self, offsets: Iterable[int], visible_ms: int, reason: Reason | None = None) -> OrderInfo:
        """Return the record with these messages visible at another time. `reason` says why no receiver holds them.
        The next delivery of those that were given back has the same attempt number (delivery#pop-log)."""
        given_back = 0 if reason is None or reason.counts else self._bits(offsets)
        visible = {**(self.visible_ms or {}), **dict.fromkeys(offsets, visible_ms)}
        return self._replace(visible_ms=visible, released=self.released | given_back)

    def failed(self, offset: int, attempt: int, now_ms: int, error: str) -> OrderInfo:
        """Return the record with a failed attempt, for operators."""
        before = self.suspended.get(offset)
        since_ms = now_ms if before is None else before.since_ms
        return self._replace(
            suspended={**self.suspended, offset: BlockedQueue(offset, attempt, since_ms, error[:REASON_CHARS])}
        )

    def before(self, end: int) -> OrderInfo:
        """Return the record without the offsets from `end` on."""
        count = sum(offset < end for offset in self.offsets)
        bits = (1 << count) - 1

        def kept(numbers: Mapping[int, int] | None) -> dict[int, int] | None:
            return None if numbers is None else {offset: n for offset, n in numbers.items() if offset < end}

        return self._replace(
            offsets=self.offsets[:count],
            counts=kept(self.counts),
            visible_ms=kept(self.visible_ms),
            acked=self.acked & bits,
            released=self.released & bits,
            suspended={offset: each for offset, each in self.suspended.items() if offset < end},
        )

    def _bits(self, offsets: Iterable[int]) -> int:
        return sum(1 << i for i, offset in enumerate(self.offsets) if offset in offsets)

    # --- in the file -----------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return the entry of the file (delivery#order-file). Members without a value are left out."""
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
    def from_json(cls, entry: object) -> OrderInfo:
        """Read any of the three shapes of delivery#order-info. Raises ValueError that says which member is wrong."""
        if not isinstance(entry, dict):
            raise ValueError(f"an object is expected, not {type(entry).__name__}")
        invisible_ms = entry.get("i")
        info = cls(
            offsets=_offsets(member(entry, "o", list, [])),
            pop_time_ms=_integer(entry.get("popTime") or 0, "popTime"),
            invisible_ms=None if invisible_ms is None else _integer(invisible_ms, "i", minimum=-_I64_MAX),
            updated_ms=_integer(entry.get("l") or 0, "l"),
            attempt_id=member(entry, "a", str, None),
            acked=_integer(entry.get("cm") or 0, "cm"),
            counts=_numbers(entry, "oc"),
            visible_ms=_numbers(entry, "ot"),
            released=_integer(entry.get("rel") or 0, "rel"),
            suspended=_suspended(entry),
            unknown={name: value for name, value in entry.items() if name not in _MEMBERS and value is not None},
        )
        # An attempt entry has no bits, so no shift can wrap: a batch of the queue model may be longer.
        if len(info.offsets) > BATCH_MAX and (info.pop_time_ms or info.acked or info.released):
            raise ValueError(f"o: {len(info.offsets)} offsets; a batch has at most {BATCH_MAX}")
        return info


def record_of(batch: Batch) -> OrderInfo:
    """Return the record of a batch that was popped after another, if only acknowledgements followed.
    Each message was delivered for the first time, and no visible time was changed."""
    distances = range(batch.count) if batch.deltas is None else batch.deltas
    offsets = tuple([batch.start + distance for distance in distances])
    acked = (1 << batch.count) - 1 & ~batch.left
    return OrderInfo(offsets, batch.pop_time_ms, batch.invisible_ms, batch.pop_time_ms, acked=acked, counts={})


_NUMBER = re.compile("0|[1-9][0-9]{0,18}").fullmatch
_MEMBERS = frozenset({"a", "c", "cm", "i", "l", "o", "oc", "ot", "popTime", "rel", "susp"})


class OrderInfoTable:
    """Records of all queues (delivery#order-rules). Thread-safe. Each call is atomic."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.entries: dict[QueueKey, OrderInfo | Batch] = {}
        """Records by queue. A batch represents its `record_of`, and compiled code changes both together."""
        self._others: dict[str, Any] = {}
        """Entries of the file's table whose key does not name a topic and a group. They are kept."""
        self._unknown: dict[str, Any] = {}
        self.version = 0
        """Number that grows with every change. State saved at the current version need not be saved again."""

    def get(self, queue: QueueKey) -> OrderInfo | None:
        entry = self.entries.get(queue)
        return entry if entry is None or isinstance(entry, OrderInfo) else record_of(entry)

    def records(self) -> dict[QueueKey, OrderInfo]:
        """Return a consistent copy of all records."""
        entries = dict(self.entries)
        return {queue: entry if isinstance(entry, OrderInfo) else record_of(entry) for queue, entry in entries.items()}

    def put(self, queue: QueueKey, entry: OrderInfo | Batch | None) -> None:
        """Replace the record of a queue, or store the batch that represents it. None: forget the queue."""
        with self._lock:
            self._put(queue, entry)

    def _put(self, queue: QueueKey, entry: OrderInfo | Batch | None) -> None:
        if entry is not None:
            self.entries[queue] = entry
        elif self.entries.pop(queue, None) is None:
            return
        self.version += 1

    def blocks(self, queue: QueueKey, now_ms: int) -> bool:
        """Return True if a receiver holds a message of the queue's last batch."""
        record = self.get(queue)
        return record is not None and record.blocks(None, now_ms)

    def suspended(self, group: str, committed: Callable[[QueueKey], int | None]) -> dict[tuple[str, int], BlockedQueue]:
        """Return the failed message that blocks a queue, by (topic, queue id), in either model.
        `committed` returns the first offset of a queue that is not settled."""
        found = {
            (queue.topic, queue.queue_id): record.suspended_at(committed(queue) or 0)
            for queue, record in self.records().items()
            if queue.group == group and record.suspended
        }
        return {queue: suspended for queue, suspended in sorted(found.items()) if suspended is not None}

    def cut(self, end_of: Callable[[str, int], int]) -> bool:
        """Forget offsets from the end of their queue on, because other messages will get them.
        `end_of` takes (topic, queue id). Returns True if anything was forgotten."""
        version = self.version
        for queue, record in self.records().items():
            end = end_of(queue.topic, queue.queue_id)
            if max((*record.offsets, *(record.counts or ())), default=-1) >= end:
                kept = record.before(end)
                self.put(queue, kept if kept.offsets else None)
        return self.version != version

    # --- attempts of the queue model (delivery#order-file) ------------------------------------------------------------

    def attempts(self, queue: QueueKey) -> dict[int, int]:
        """Return the noted failed attempts by queue offset: {} for a queue whose group pops."""
        record = self.get(queue)
        return dict(record.counts or {}) if record is not None and record.counts_attempts else {}

    def note_attempt(self, queue: QueueKey, offset: int, count: int, now_ms: int, error: str = "") -> None:
        """Note that the message at `offset` has failed `count` times, the last time by `error`.
        0 forgets it. Replaces a batch left from when the group popped. Raises ValueError for values that could not be
        read back from the file."""
        numbers = (queue.queue_id, _I32_MAX), (offset, _I64_MAX), (count, _I32_MAX)
        if any(type(n) is not int or not 0 <= n <= most for n, most in numbers) or "@" in queue.topic + queue.group:
            raise ValueError(
                f"{count!r:.40} attempts of message {offset!r:.40} of {queue!r:.300}: numbers must be ints from 0 on, "
                "and names without '@'"
            )
        with self._lock:
            record = self.get(queue)
            if record is None or not record.counts_attempts:
                record = OrderInfo((), 0, None, now_ms)
            record = record.failed(offset, count, now_ms, error)
            self._put(queue, _of_attempts({**(record.counts or {}), offset: count}, record.suspended, now_ms))

    def drop_attempts(self, queue: QueueKey, below: int) -> None:
        """Forget the attempts of messages before offset `below`. Costs nothing if there are none."""
        with self._lock:
            record = self.get(queue)
            if record is None or not record.counts_attempts or not record.counts or min(record.counts) >= below:
                return
            counts = {offset: n for offset, n in record.counts.items() if offset >= below}
            self._put(queue, _of_attempts(counts, record.suspended, record.updated_ms))

    def forget(self, queue: QueueKey, record: OrderInfo) -> None:
        """Forget a record, unless it was replaced meanwhile."""
        with self._lock:
            if self.get(queue) == record:
                self._put(queue, None)

    # --- the file (delivery#order-file) -------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``consumerOrderInfo.json``, a consistent copy of all records."""
        table: dict[str, Any] = dict(self._others)
        for (group, topic, queue_id), record in self.records().items():
            table.setdefault(f"{topic}@{group}", {})[str(queue_id)] = record.as_json()
        return {**self._unknown, "table": table}

    def load(self, value: Mapping[str, Any]) -> None:
        """Replace everything here by the content of the file.
        Raises ValueError, and changes nothing, for another shape."""
        records, others = _read(value)
        with self._lock:
            self.entries.clear()
            self.entries.update(records)
            self._others = others
            self._unknown = {name: member for name, member in value.items() if name != "table"}
            self.version += 1


def check_order_info(value: Mapping[str, Any]) -> None:
    """Raise ValueError unless `value` is a valid content of ``consumerOrderInfo.json``, for loading."""
    _read(value)


def _of_attempts(counts: Mapping[int, int], suspended: Mapping[int, BlockedQueue], now_ms: int) -> OrderInfo | None:
    """Return an attempt entry, or None without attempts."""
    left = {offset: counts[offset] for offset in sorted(counts) if counts[offset]}
    failed = {offset: suspended[offset] for offset in left if offset in suspended}
    return OrderInfo(tuple(left), 0, None, now_ms, counts=left, suspended=failed) if left else None


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(value: Mapping[str, Any]) -> tuple[dict[QueueKey, OrderInfo], dict[str, Any]]:
    """Return the records, and the entries of another form."""
    records: dict[QueueKey, OrderInfo] = {}
    others: dict[str, Any] = {}
    where = ""
    try:
        table = object_member(value, "table")
        for key, queues in table.items():
            topic, at, group = key.partition("@")
            if not at or "@" in group:
                others[key] = queues
                continue
            where = ""  # what reads the keys names the entry
            for queue_id, entry in _by_number(table, key).items():
                where = f"{key[:200]}[{queue_id}]: "
                if entry is not None:
                    records[QueueKey(group, topic, queue_id)] = OrderInfo.from_json(entry)
    except ValueError as error:
        raise ValueError(f"order info: {where}{str(error)[:300]}") from error
    return records, others


def _by_number(value: Mapping[str, Any], name: str) -> dict[int, Any]:
    """Return an object member whose keys are numbers. Only the spelling that we would write is accepted."""
    found = {}
    for key, each in object_member(value, name).items():
        if not _NUMBER(key) or int(key) > _I64_MAX:
            raise ValueError(f"{name[:200]}: key {key[:40]!r} is not a number")
        found[int(key)] = each
    return found


def _numbers(entry: Mapping[str, Any], name: str) -> dict[int, int] | None:
    if entry.get(name) is None:
        return None
    return {key: _integer(number, f"{name}[{key}]") for key, number in _by_number(entry, name).items()}


def _offsets(value: list[Any]) -> tuple[int, ...]:
    """Return absolute offsets for the file's distances from the first."""
    numbers = [_integer(number, "o") for number in value]
    offsets = (*numbers[:1], *(numbers[0] + distance for distance in numbers[1:]))
    if any(a >= b for a, b in pairwise(offsets)) or (offsets and offsets[-1] > _I64_MAX):
        raise ValueError("o: the offsets do not ascend")
    return offsets


def _suspended(entry: Mapping[str, Any]) -> dict[int, BlockedQueue]:
    found = {}
    for offset, each in _by_number(entry, "susp").items():
        if not (isinstance(each, list) and len(each) == 3 and isinstance(each[2], str)):
            raise ValueError(f"susp[{offset}]: [attempt, ms, error] is expected")
        attempt, since_ms = (_integer(number, f"susp[{offset}]") for number in each[:2])
        found[offset] = BlockedQueue(offset, attempt, since_ms, each[2])
    return found


def _integer(value: object, name: str, minimum: int = 0) -> int:
    if type(value) is not int or not minimum <= value <= _I64_MAX:
        raise ValueError(f"{name}: {str(value)[:40]!r} is not a number from {minimum} to {_I64_MAX}")
    return value
