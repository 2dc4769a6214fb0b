"""What consume queues and the index need to know of many records, drawn from their bytes in array passes.

    record  ->  queue (topic, queue id), slot (queue offset), unit (physical offset, size, tags code)
            ->  the same unit in each light queue that it names: `light_queues`
            ->  index entries: hash of topic#UNIQ_KEY, then of topic#key for each word of KEYS      (format#key-hash)

No unit has a record whose queue is a batch queue, another kind of file that only RocketMQ writes (`batch_topics`, and
whatever is a whole batch itself).

The properties of all records are taken apart together (`pairs`), each distinct one once.

Arrays have a fixed price, and it would be paid for each message that somebody waits for: `few` takes up to eight
records with a struct each. Both ways end in the same `Output`; whatever is not an ordinary record is left to arrays.

Pure: fed with damaged bytes it gives useless rows, never an error or a read outside the buffer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from mqstore.layout.consumequeue import LAST_ADDRESS, UNIT, UNIT_DTYPE, VOID_SIZE
from mqstore.layout.javahash import index_hash_many, java_hash, java_hash_many, tag_hash
from mqstore.layout.pairs import Pairs
from mqstore.layout.properties import (
    DELAY,
    INNER_MULTI_DISPATCH,
    INNER_MULTI_QUEUE_OFFSET,
    NAME_END,
    PAIR_END,
    decode_properties,
)
from mqstore.layout.record import (
    INNER_BATCH,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
    QUEUE_ID_AT,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    TRANSACTION_ROLLBACK,
    body_length_at,
    store_timestamp_at,
)
from mqstore.layout.scan import ROW_SPACE, Headers, Run
from mqstore.native import kernel

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "FEW_RECORDS",
    "LIGHT_PREFIX",
    "SCHEDULE_TOPIC",
    "Listed",
    "Output",
    "Rows",
    "as_kept",
    "few",
    "is_listed",
    "light_queues",
    "rows_of",
    "tags_code_at",
    "topics_of",
]

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
LIGHT_PREFIX = "%LMQ%"
"""Of the names of light queues, as RocketMQ's MQTT gateway makes them by the hundred thousand."""
_NEVER_LIGHT = (SCHEDULE_TOPIC, "rmq_sys_wheel_timer")
_RETRY_PREFIX = "%RETRY%"
_NUMBER = re.compile("[0-9]{1,18}")
_LIGHT = INNER_MULTI_DISPATCH.encode()

FEW_RECORDS = 8
"""Up to so many records one struct at a time is faster than arrays."""

_START = Struct(">ii").unpack_from  # totalSize, magic
_QUEUE = Struct(">iiqqi").unpack_from  # queueId, flag, queueOffset, physicalOffset, sysFlag
_I4 = Struct(">i").unpack_from
_I8 = Struct(">q").unpack_from
_MAX_I64 = (1 << 63) - 1
_Int64s = npt.NDArray[np.int64]
_Int32s = npt.NDArray[np.int32]
_Bools = npt.NDArray[np.bool_]

_SPACE = 0x20


# Rows of the table that `kernel.list` fills.
_LISTED_ROWS = 7
_TAGS_CODE, _ROW, _SLOT, _QUEUE_TOPIC, _QUEUE_NUMBER, _QUEUE_END, _QUEUE_FOLLOWS = range(_LISTED_ROWS)


class Listed(NamedTuple):
    """The records of a stretch that one queue lists, in log order."""

    topic: str
    queue_id: int
    rows: _Int64s
    """Which they are, of `Rows`."""
    queue_offset: _Int64s
    units: npt.NDArray[np.void]
    """As an array of `UNIT_DTYPE`."""
    follow: bool
    """Their queue offsets are consecutive."""


class Output(NamedTuple):
    """What a stretch of log gives to write: units by queue, then index entries."""

    queues: Sequence[tuple[str, int, Sequence[int] | _Int64s, bytes]]
    """(topic, queue id, queue offsets, the units of these slots), each in log order."""
    entry_hash: Sequence[int] | _Int32s
    entry_physical_offset: Sequence[int] | _Int64s
    entry_store_timestamp_ms: Sequence[int] | _Int64s
    last_store_timestamp_ms: int | None
    """Of the last record; None without one."""


@dataclass(slots=True)
class Rows:
    """Records in log order, a row each; behind them, in the same order, a row more for each light queue that lists one
    of them. `entry_*` are index entries in the order of putting; `entry_row` says whose."""

    records: int
    """Rows that are records. The others repeat theirs but for topic, queue id and queue offset."""
    topics: list[str]
    topic: _Int64s
    """Per row: which of `topics`."""
    queue_id: _Int32s
    queue_offset: _Int64s
    physical_offset: _Int64s
    size: _Int32s
    tags_code: _Int64s
    store_timestamp_ms: _Int64s
    has_unit: _Bools
    """False for prepared and rollback records, which no queue lists."""
    entry_row: _Int64s
    entry_hash: _Int32s
    queues: list[Listed] | None = None
    """What `by_queue` gives, if it is known."""

    def __len__(self) -> int:
        return self.records

    @property
    def record_bytes(self) -> int:
        """Of all records."""
        return int(self.size[: self.records].sum(dtype=np.int64))

    def units(self, rows: _Int64s | slice) -> npt.NDArray[np.void]:
        """The consume-queue units of `rows`, as an array of `UNIT_DTYPE`."""
        physical = self.physical_offset[rows]
        units = np.empty(len(physical), UNIT_DTYPE)
        units["physical_offset"] = physical
        units["size"] = self.size[rows]
        units["tags_code"] = self.tags_code[rows]
        return units

    def listed(self) -> list[Listed]:
        """What each queue has of them, in order of topic and queue id."""
        if self.queues is None:
            self.queues = [
                Listed(topic, queue_id, chosen, slots, self.units(chosen), bool((np.diff(slots) == 1).all()))
                for topic, queue_id, chosen in self._by_queue()
                for slots in (self.queue_offset[chosen],)
            ]
        return self.queues

    def by_queue(self) -> list[tuple[str, int, _Int64s]]:
        """(topic, queue id, indices of its rows that have a unit, in log order) for each queue."""
        return self._by_queue() if self.queues is None else [each[:3] for each in self.queues]

    def _by_queue(self) -> list[tuple[str, int, _Int64s]]:
        chosen = np.flatnonzero(self.has_unit)
        if not len(chosen):
            return []
        queue_ids = self.queue_id[chosen]
        topics = self.topic[chosen]
        key = topics << 32 | queue_ids.astype(np.int64) & 0xFFFF_FFFF
        if bool((key == key[0]).all()):
            return [(self.topics[int(topics[0])], int(queue_ids[0]), chosen)]
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order])) + 1
        groups = []
        for group in np.split(chosen[order], bounds):
            first = int(group[0])
            groups.append((self.topics[int(self.topic[first])], int(self.queue_id[first]), group))
        return groups

    def entries(self, start: int = 0, end: int = 1 << 62) -> tuple[_Int32s, _Int64s, _Int64s]:
        """Return (key hash, physical offset, store time) of the index entries of records in [start, end) of the log."""
        physical = self.physical_offset[self.entry_row]
        wanted = (physical >= start) & (physical < end)
        return self.entry_hash[wanted], physical[wanted], self.store_timestamp_ms[self.entry_row[wanted]]

    def output(self) -> Output:
        """What to write for these records."""
        at = self.entry_row
        return Output(
            [(each.topic, each.queue_id, each.queue_offset, each.units.tobytes()) for each in self.listed()],
            self.entry_hash,
            self.physical_offset[at],
            self.store_timestamp_ms[at],
            int(self.store_timestamp_ms[self.records - 1]) if self.records else None,
        )


def rows_of(
    buf: ReadableBuffer,
    headers: Headers,
    base: int,
    delay_table_ms: Sequence[int],
    batch_topics: Collection[str] = (),
) -> Rows:
    """Rows for the records of `headers`, all of which must be `ok`; `base` is the physical offset of `buf[0]`.

    `delay_table_ms` holds the milliseconds of each delay level, level 1 first (format#tags-code).
    """
    view = memoryview(buf)
    topics, topic = topics_of(view, headers)
    prefixes = np.array([_prefix(name) for name in topics], np.int32)
    told = None
    if headers.run is not None and not batch_topics and SCHEDULE_TOPIC not in topics:
        told = _listed(view, headers.run, len(headers), base, topics, prefixes)
    named = np.zeros(0, np.int64)
    if told is None:
        transaction = headers.sys_flag & TRANSACTION_MASK
        has_unit = (transaction == 0) | (transaction == TRANSACTION_COMMIT)
        has_unit &= headers.sys_flag & INNER_BATCH == 0
        if batch_topics:
            has_unit &= ~np.isin(topic, [i for i, name in enumerate(topics) if name in batch_topics])
        tags, named, entry_row, entry_hash = _tags_and_entries(view, headers, prefixes, topic)
        indexed = (transaction != TRANSACTION_ROLLBACK)[entry_row]
        if SCHEDULE_TOPIC in topics:
            _deliver_times(view, headers, np.flatnonzero(topic == topics.index(SCHEDULE_TOPIC)), tags, delay_table_ms)
        told = _Told(tags, has_unit, entry_row[indexed], entry_hash[indexed], None)
    rows = Rows(
        records=len(headers),
        topics=topics,
        topic=topic,
        queue_id=headers.queue_id,
        queue_offset=headers.queue_offset,
        physical_offset=headers.positions + base,
        size=headers.size,
        store_timestamp_ms=headers.store_timestamp_ms,
        **told._asdict(),
    )
    return _with_light(rows, view, headers, named) if len(named) else rows


class _Told(NamedTuple):
    """What `Rows` has that is not in the records' headers."""

    tags_code: _Int64s
    has_unit: _Bools
    entry_row: _Int64s
    entry_hash: _Int32s
    queues: list[Listed] | None


def _listed(view: memoryview, run: Run, count: int, base: int, topics: list[str], prefixes: _Int32s) -> _Told | None:
    """What is told of records by compiled parts; None for what takes more patience."""
    assert kernel is not None
    empty = run.spares.empty
    out, has_unit, units = (
        empty((_LISTED_ROWS, count + ROW_SPACE), np.int64),
        empty((count,), np.bool_),
        empty((count,), UNIT_DTYPE),
    )
    limit = run.longs.shape[1]
    found = kernel.list(
        *(view, limit, count, base, run.longs, run.ints, prefixes, out, has_unit, units.view(np.uint8)),
    )
    if found is None:
        return None
    _, number, entry_row, entry_hash = found
    queues = []
    start = 0
    for which, queue_id, end, follow in out[_QUEUE_TOPIC:, :number].T.tolist():
        rows, slots = out[_ROW, start:end], out[_SLOT, start:end]
        queues.append(Listed(topics[which], queue_id, rows, slots, units[start:end], bool(follow)))
        start = end
    entries = np.frombuffer(entry_row, np.int64), np.frombuffer(entry_hash, np.int32)
    return _Told(out[_TAGS_CODE, :count], has_unit, *entries, queues)


def light_queues(topic: str, queue_id: int, properties: bytes) -> list[tuple[str, int, int]]:
    """(topic, queue id, queue offset) of the queues that list a record besides its own: RocketMQ writes a unit for each
    name in INNER_MULTI_DISPATCH, with the number that it has put into INNER_MULTI_QUEUE_OFFSET. Such a queue has no
    records, and a broker no other trace of what is in it. Empty for what the engine's own topics hold.

    >>> light_queues("orders", 3, b"INNER_MULTI_DISPATCH\x01%LMQ%a,plain\x02INNER_MULTI_QUEUE_OFFSET\x017,0\x02")
    [('%LMQ%a', 0, 7), ('plain', 3, 0)]
    """
    found = decode_properties(properties)
    names, numbers = (found.get(name, "").split(",") for name in (INNER_MULTI_DISPATCH, INNER_MULTI_QUEUE_OFFSET))
    for parts in names, numbers:  # as Java splits: a queue that got no number, the last one, makes the lists differ
        while parts and not parts[-1]:
            parts.pop()
    if len(names) != len(numbers) or topic in _NEVER_LIGHT or topic.startswith(_RETRY_PREFIX):
        return []
    queues = []
    for name, number in zip(names, numbers, strict=True):
        if "/" in name:
            continue
        if not _NUMBER.fullmatch(number):
            break
        queues.append((name, 0 if name.startswith(LIGHT_PREFIX) else queue_id, int(number)))
    return queues


def _with_light(rows: Rows, view: memoryview, headers: Headers, named: _Int64s) -> Rows:
    """`rows`, and those of the light queues that the records in rows `named` may name."""
    numbers = {name: i for i, name in enumerate(rows.topics)}
    of_row: list[int] = []
    queues: list[tuple[int, int, int]] = []
    named = named[rows.has_unit[named]]
    blobs = _slices(view, headers.properties_position[named], headers.properties_size[named])
    for row, blob in zip(named.tolist(), blobs, strict=True):
        for name, its_id, number in light_queues(rows.topics[rows.topic[row]], int(rows.queue_id[row]), blob):
            of_row.append(row)
            queues.append((numbers.setdefault(name, len(numbers)), its_id, number))
    if not of_row:
        return rows
    again = np.append(np.arange(rows.records), of_row)
    topic, queue_id, queue_offset = (np.array(column, np.int64) for column in zip(*queues, strict=True))
    return Rows(
        records=rows.records,
        topics=[*numbers],
        topic=np.append(rows.topic, topic),
        queue_id=np.append(rows.queue_id, queue_id.astype(rows.queue_id.dtype)),
        queue_offset=np.append(rows.queue_offset, queue_offset),
        physical_offset=rows.physical_offset[again],
        size=rows.size[again],
        tags_code=rows.tags_code[again],
        store_timestamp_ms=rows.store_timestamp_ms[again],
        has_unit=rows.has_unit[again],
        entry_row=rows.entry_row,
        entry_hash=rows.entry_hash,
    )


def _slices(view: memoryview, starts: _Int64s, sizes: _Int64s) -> list[bytes]:
    return [view[a:b].tobytes() for a, b in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]


def topics_of(view: memoryview, headers: Headers) -> tuple[list[str], _Int64s]:
    """Distinct topics, and the index of each record's. Bytes that are not UTF-8 become surrogates: no folder's name."""
    known = headers.topics()
    if known is not None:
        return [name.decode("utf-8", "surrogateescape") for name in known[0]], known[1].astype(np.int64)
    numbers: dict[bytes, int] = {}
    names = _slices(view, headers.topic_position, headers.topic_size)
    index = [numbers.setdefault(name, len(numbers)) for name in names]
    return [name.decode("utf-8", "surrogateescape") for name in numbers], np.array(index, np.int64)


def _tags_and_entries(
    view: memoryview, headers: Headers, prefixes: _Int32s, topic: _Int64s
) -> tuple[_Int64s, _Int64s, _Int64s, _Int32s]:
    """(tags code per record, rows that may name light queues, row per index entry, hash per index entry)."""
    tags = np.zeros(len(headers), np.int64)
    sizes = headers.properties_size
    rows = np.flatnonzero(sizes)
    if not len(rows):
        return tags, rows, rows, np.zeros(0, np.int32)
    numbers: dict[bytes, int] = {}
    blobs = _slices(view, headers.properties_position[rows], sizes[rows])
    which = np.array([numbers.setdefault(blob, len(numbers)) for blob in blobs], np.int64)
    pairs = Pairs.of(list(numbers))
    tags[rows] = _tags_code(pairs, len(numbers))[which]
    light = np.unique(pairs.blob[pairs.name_size == len(INNER_MULTI_DISPATCH)])  # by a name of its length
    named = rows[np.isin(which, light)]
    # Entries of each distinct blob, repeated for every record that bears it.
    key_blob, key_start, key_size = _keys(pairs)
    per_blob = np.bincount(key_blob, minlength=len(numbers))
    first = np.cumsum(per_blob) - per_blob
    repeats = per_blob[which]
    entry_row = np.repeat(rows, repeats)
    within = np.arange(len(entry_row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    key = np.repeat(first[which], repeats) + within
    hashes = index_hash_many(pairs.data, key_start[key], key_size[key], initial=prefixes[topic[entry_row]])
    return tags, named, entry_row, hashes


def _tags_code(pairs: Pairs, count: int) -> _Int64s:
    """Java hash of TAGS for each of `count` blobs, 0 without (format#tags-code)."""
    codes = np.zeros(count, np.int64)
    tags = pairs.named(b"TAGS")
    if len(tags):
        codes[pairs.blob[tags]] = java_hash_many(pairs.data, pairs.value[tags], pairs.value_size[tags])
    return codes


def _keys(pairs: Pairs) -> tuple[_Int64s, _Int64s, _Int64s]:
    """(blob, start, size) of each key to index: UNIQ_KEY first, then the words of KEYS, by blob."""
    unique = pairs.named(b"UNIQ_KEY")
    keys = pairs.named(b"KEYS")
    starts, sizes = pairs.value[keys], pairs.value_size[keys]
    blob = pairs.blob[keys]
    if len(keys):
        spaces = np.flatnonzero(pairs.data == _SPACE)
        owner = np.searchsorted(starts, spaces, side="right") - 1
        spaces = spaces[(owner >= 0) & (spaces < (starts + sizes)[owner])]
        if len(spaces):
            # Every word begins at a value's start or behind a space, and ends at a space or a value's end.
            ends = np.sort(np.concatenate((starts + sizes, spaces)))
            value_starts = starts
            starts = np.sort(np.concatenate((starts, spaces + 1)))
            sizes = ends - starts
            blob = blob[np.searchsorted(value_starts, starts, side="right") - 1]
            words = sizes > 0
            starts, sizes, blob = starts[words], sizes[words], blob[words]
    if not len(unique):
        return blob, starts, sizes
    blob = np.concatenate((pairs.blob[unique], blob))
    order = np.argsort(blob, kind="stable")
    return (
        blob[order],
        np.concatenate((pairs.value[unique], starts))[order],
        np.concatenate((pairs.value_size[unique], sizes))[order],
    )


def _deliver_times(
    view: memoryview, headers: Headers, rows: npt.NDArray[np.intp], tags: _Int64s, delay_table_ms: Sequence[int]
) -> None:
    """Units of delayed messages bear the time of delivery in place of the tags code (format#tags-code)."""
    blobs = _slices(view, headers.properties_position[rows], headers.properties_size[rows])
    for row, blob in zip(rows.tolist(), blobs, strict=True):
        delay_ms = _delay_ms(blob, delay_table_ms)
        if delay_ms is not None:
            # Of arrays, which wrap in silence where a damaged time is near the end of all.
            tags[row : row + 1] = headers.store_timestamp_ms[row : row + 1] + delay_ms


_LONGEST_DELAY_MS = 10 * 366 * 86_400_000


def as_kept(
    topic: str, found: npt.NDArray[np.void], wanted: npt.NDArray[np.void], *, has_addresses: bool
) -> npt.NDArray[np.void]:
    """`wanted`, the units that the records of a queue ask for, with the tags codes that `found` has for the same
    records where no record can tell them: an address in a file beside the queue; and a time of delivery that may come
    from another delay table, for a message keeps the time it was given (delivery#level-crash).

    Every table has whole seconds, so a time that is whole seconds off is taken for one; no flipped bit makes such.
    """
    codes = found["tags_code"].astype(np.int64)
    other = (codes <= LAST_ADDRESS) & has_addresses
    if topic == SCHEDULE_TOPIC:
        off_ms = codes - wanted["tags_code"].astype(np.int64)
        other |= (off_ms != 0) & (off_ms % 1000 == 0) & (np.abs(off_ms) <= _LONGEST_DELAY_MS)
    elif not other.any():
        return wanted
    other &= (found["physical_offset"] == wanted["physical_offset"]) & (found["size"] == wanted["size"])
    other &= wanted["size"] != VOID_SIZE
    if not other.any():
        return wanted
    kept = wanted.copy()
    kept["tags_code"][other] = found["tags_code"][other]
    return kept


def _delay_ms(properties: bytes, delay_table_ms: Sequence[int]) -> int | None:
    """How long the level in DELAY means to wait; None when there is no level."""
    level = decode_properties(properties).get(DELAY, "")
    if level.isascii() and level.isdigit() and len(level) < 10 and int(level) > 0:
        return delay_table_ms[min(int(level), len(delay_table_ms)) - 1] if delay_table_ms else 1000
    return None


# --- few ------------------------------------------------------------------------------------------------------------


def few(
    buf: ReadableBuffer,
    start: int,
    end: int,
    base: int,
    delay_table_ms: Sequence[int],
    batch_topics: Collection[str] = (),
) -> Output | None:
    """What `walk`, `gather` and `rows_of` would give for `[start, end)`, if at most `FEW_RECORDS` records fill it
    exactly and each is `ok`; None if not, or if one is anything but ordinary. Arguments as of `rows_of`.
    """
    view = memoryview(buf)
    starts = _chain(view, start, end)
    if starts is None:
        return None
    numbers: dict[bytes, int] = {}
    queues: dict[tuple[int, int], tuple[str, int, list[int], list[bytes]]] = {}
    hashes: list[int] = []
    physical_offsets: list[int] = []
    stamps: list[int] = []
    stamp = None
    for at in starts:
        record = _ordinary(view, at)
        if record is None:
            return None
        size, queue_id, queue_offset, sys_flag, stamp, topic_bytes, properties = record
        topic = topic_bytes.decode("utf-8", "surrogateescape")
        if sys_flag & INNER_BATCH or topic in batch_topics or properties.find(_LIGHT) >= 0:
            return None
        tags, unique, keys = _named(properties) if properties else (b"", b"", b"")
        transaction = sys_flag & TRANSACTION_MASK
        number = numbers.setdefault(topic_bytes, len(numbers))
        if transaction in (0, TRANSACTION_COMMIT):
            code = _code(topic, tags, properties, stamp, delay_table_ms)
            if code > _MAX_I64:
                return None
            key = number, queue_id & 0xFFFF_FFFF
            _, _, offsets, units = queues.setdefault(key, (topic, queue_id, [], []))
            offsets.append(queue_offset)
            units.append(UNIT.pack(base + at, size, code))
        if (unique or keys) and transaction != TRANSACTION_ROLLBACK:
            own = _index_hashes(topic, unique, keys)
            hashes += own
            physical_offsets += [base + at] * len(own)
            stamps += [stamp] * len(own)
    ordered = (queues[key] for key in sorted(queues)) if len(queues) > 1 else queues.values()
    return Output(
        [(topic, queue_id, offsets, b"".join(units)) for topic, queue_id, offsets, units in ordered],
        hashes,
        physical_offsets,
        stamps,
        stamp,
    )


def tags_code_at(buf: ReadableBuffer, position: int, delay_table_ms: Sequence[int]) -> int:
    """The tags code that the unit of the record at `position`, which must be `ok`, bears (format#tags-code)."""
    view = memoryview(buf)
    record = _ordinary(view, position)
    if record is None:
        return 0
    topic, properties = record[5].decode("utf-8", "surrogateescape"), record[6]
    return _code(topic, _named(properties)[0], properties, record[4], delay_table_ms)


def is_listed(buf: ReadableBuffer, position: int, topic: str, queue_id: int, slot: int) -> bool:
    """Whether the record at `position`, which must be `ok`, says that it is in that slot of a light queue."""
    record = _ordinary(memoryview(buf), position)
    assert record is not None
    own = record[5].decode("utf-8", "surrogateescape")
    return (topic, queue_id, slot) in light_queues(own, record[1], record[6])


def _chain(view: memoryview, start: int, end: int) -> list[int] | None:
    """Starts of the records that fill `[start, end)`; None when they are many, or something else lies there."""
    starts: list[int] = []
    last = min(end, len(view)) - MIN_RECORD_BYTES
    while start <= last and len(starts) < FEW_RECORDS:
        size, magic = _START(view, start)
        if magic not in (MAGIC_V1, MAGIC_V2) or size < MIN_RECORD_BYTES:
            return None
        starts.append(start)
        start += size
    return starts if start == end else None


def _ordinary(view: memoryview, at: int) -> tuple[int, int, int, int, int, bytes, bytes] | None:
    """(size, queue id, queue offset, sysFlag, store time, topic, properties) of the record at `at`, None unless it is
    what `Headers.ok` calls so. Its magic is V1 or V2, and it is as long as the smallest and within the buffer."""
    size, magic = _START(view, at)
    queue_id, _, queue_offset, _, sys_flag = _QUEUE(view, at + QUEUE_ID_AT)
    body = at + body_length_at(sys_flag) + 4
    length_size = 1 if magic == MAGIC_V1 else 2
    spare = at + size - body - length_size - 2  # what body, topic and properties share
    if spare <= 0:
        return None
    (body_size,) = _I4(view, body - 4)
    spare -= body_size
    if body_size < 0 or spare <= 0:
        return None
    topic = body + body_size + length_size
    topic_size = view[topic - 1] if length_size == 1 else view[topic - 2] << 8 | view[topic - 1]
    spare -= topic_size
    properties = topic + topic_size + 2
    # A length with the sign bit set is negative, and topics and properties of such lengths are none.
    if not 0 < topic_size < (0x80 if length_size == 1 else 0x8000) or not 0 <= spare < 0x8000:
        return None
    if view[properties - 2] << 8 | view[properties - 1] != spare:
        return None
    return (
        size,
        queue_id,
        queue_offset,
        sys_flag,
        _I8(view, at + store_timestamp_at(sys_flag))[0],
        bytes(view[topic : topic + topic_size]),
        bytes(view[properties : properties + spare]),
    )


def _named(properties: bytes) -> tuple[bytes, bytes, bytes]:
    """Values of TAGS, UNIQ_KEY and KEYS, b"" without: the last of each that has one, as readers parse them."""
    found: dict[bytes, bytes] = {}
    for piece in properties.split(PAIR_END):
        name, _, value = piece.partition(NAME_END)
        if value:
            found[name] = value
    get = found.get
    return get(b"TAGS", b""), get(b"UNIQ_KEY", b""), get(b"KEYS", b"")


def _code(topic: str, tags: bytes, properties: bytes, stamp: int, delay_table_ms: Sequence[int]) -> int:
    if topic == SCHEDULE_TOPIC:
        delay_ms = _delay_ms(properties, delay_table_ms)
        if delay_ms is not None:
            return stamp + delay_ms
    return tag_hash(tags.decode("utf-8", "replace")) if tags else 0


def _index_hashes(topic: str, unique: bytes, keys: bytes) -> list[int]:
    """Hashes of the index entries of one record (format#key-hash): UNIQ_KEY first, then the words of KEYS."""
    wanted = [unique] if unique else []
    wanted += [word for word in keys.split(b" ") if word]
    prefix = _prefix(topic)
    hashes = [abs(java_hash(key.decode("utf-8", "replace"), prefix)) for key in wanted]
    return [0 if value > 0x7FFF_FFFF else value for value in hashes]


@lru_cache(maxsize=1024)
def _prefix(topic: str) -> int:
    """Hash of what stands before each key of a topic."""
    return java_hash(f"{topic}#")
