"""Consume-queue units and index entries of many records, built from their bytes in array passes.

    record  ->  queue (topic, queue id), slot (queue offset), unit (physical offset, size, tags code)
            ->  the same unit in each light queue that it names: `light_queues`
            ->  index entries: hash of topic#UNIQ_KEY, then of topic#key for each word of KEYS      (format#key-hash)

A record in a batch queue, a kind of file that only RocketMQ writes, has no unit (`batch_topics`, and whole batches).

Compiled code reads the properties of ordinary records, `_code` and `_index_hashes` those of others. Arrays have a fixed
cost, too high for one message with a waiting reader. So `few` reads up to eight ordinary records with a struct each,
and returns the same `Output`.

Damaged bytes give useless rows, never an error or a read outside the buffer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from mqstore import arrays as np
from mqstore.errors import FormatError
from mqstore.layout.arrays.scan import Headers, Run, slices
from mqstore.layout.consumequeue import LAST_ADDRESS, UNIT, VOID_SIZE, unit_dtype
from mqstore.layout.javahash import index_hash, java_hash, tag_hash
from mqstore.layout.properties import (
    DELAY,
    INNER_MULTI_DISPATCH,
    INNER_MULTI_QUEUE_OFFSET,
    KEYS,
    TAGS,
    UNIQ_KEY,
    decode_properties,
)
from mqstore.layout.record import (
    INNER_BATCH,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    TRANSACTION_ROLLBACK,
    measure,
)
from mqstore.native import kernel

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    _Int64s = np.NDArray[np.int64]
    _Int32s = np.NDArray[np.int32]
    _Bools = np.NDArray[np.bool_]


SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
LIGHT_PREFIX = "%LMQ%"
"""Prefix of light queues, of which RocketMQ's MQTT gateway creates hundreds of thousands."""
_NEVER_LIGHT = (SCHEDULE_TOPIC, "rmq_sys_wheel_timer")
_RETRY_PREFIX = "%RETRY%"
_NUMBER = re.compile("[0-9]{1,18}")

FEW_RECORDS = 8
"""Up to this number of records, one struct at a time is faster than arrays."""
FEW_WITHOUT_NUMPY = 512
"""The same if numpy is not imported yet, which takes as long as some thousand records."""

_START = Struct(">ii").unpack_from  # totalSize, magic

# Rows of the table that `kernel.list` fills.
_LISTED_ROWS = 10
_TAGS_CODE, _SLOT, _QUEUE_TOPIC, _QUEUE_NUMBER, _QUEUE_END, *_ = range(_LISTED_ROWS)


class Edges(NamedTuple):
    """First and last record of a queue in `Queues`."""

    queue: tuple[str, int]
    start: int
    """Index of its first record."""
    stop: int
    """Index after its last record."""
    low: int
    """Queue offset of the first record."""
    high: int
    """Queue offset of the last one."""
    begin: int
    """Physical offset of the first record."""
    end: int
    """Physical offset after the last one."""
    straight: bool
    """True if the queue offsets are consecutive."""


class Queues(NamedTuple):
    """Records that queues list, in order of topic and queue id, those of each queue in log order."""

    names: list[tuple[str, int]]
    """Topic and queue id of each queue."""
    stops: _Int64s
    """Index after the last record of each queue."""
    slots: _Int64s
    units: np.NDArray[np.void]
    """Array of `unit_dtype`."""

    def each(self) -> Iterator[tuple[str, int, _Int64s, np.NDArray[np.void]]]:
        """Yield (topic, queue id, queue offsets, units) of each queue."""
        start = 0
        for (topic, queue_id), stop in zip(self.names, self.stops.tolist(), strict=True):
            yield topic, queue_id, self.slots[start:stop], self.units[start:stop]
            start = stop

    def edges(self) -> Iterator[Edges]:
        """Yield the edges of each queue. Nearly all of thousands of queues can be checked by these alone, since a look
        at an array of each takes longer than all else."""
        if not self.names:
            return iter(())
        starts, last, physical = np.append(0, self.stops[:-1]), self.stops - 1, self.units["physical_offset"]
        breaks = np.flatnonzero(np.diff(self.slots) != 1)
        straight = breaks.searchsorted(starts) == breaks.searchsorted(last)
        after = physical[last].astype(np.int64) + self.units["size"][last]
        columns = (starts, self.stops, self.slots[starts], self.slots[last], physical[starts], after, straight)
        return map(Edges, self.names, *_lists(*columns))


def _lists(*columns: np.NDArray[Any]) -> list[list[Any]]:
    return [column.tolist() for column in columns]


def _names(topics: Sequence[str], *columns: np.NDArray[Any]) -> list[tuple[str, int]]:
    """Return `Queues.names`. The columns have the index of each queue's topic, and its id."""
    return [(topics[topic], queue_id) for topic, queue_id in zip(*_lists(*columns), strict=True)]


class Output(NamedTuple):
    """Units by queue and index entries to write for a range of the log."""

    queues: Sequence[tuple[str, int, list[int] | range | _Int64s, bytes]]
    """(topic, queue id, queue offsets, the units of these slots), each in log order."""
    entry_hash: Sequence[int] | _Int32s
    entry_physical_offset: Sequence[int] | _Int64s
    entry_store_timestamp_ms: Sequence[int] | _Int64s
    last_store_timestamp_ms: int | None
    """Store time of the last record, or None without records."""


@dataclass(slots=True)
class Rows:
    """Records in log order, one row each, then a row for each light queue that lists a record.
    `entry_*` are index entries in put order. `entry_row` is the row of each entry."""

    records: int
    """Number of rows that are records. The others repeat one, except for topic, queue id and queue offset."""
    topics: list[str]
    topic: _Int32s
    """Index in `topics` for each row."""
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
    known_queues: Queues | None = None
    """Result of `queues`, if known."""

    def __len__(self) -> int:
        return self.records

    @property
    def record_bytes(self) -> int:
        return int(self.size[: self.records].sum(dtype=np.int64))

    def units(self, rows: _Int64s | slice) -> np.NDArray[np.void]:
        """Return the consume-queue units of `rows` as an array of `unit_dtype`."""
        physical = self.physical_offset[rows]
        units = np.empty(len(physical), unit_dtype())
        units["physical_offset"] = physical
        units["size"] = self.size[rows]
        units["tags_code"] = self.tags_code[rows]
        return units

    def queues(self) -> Queues:
        """Return what each queue lists."""
        if self.known_queues is None:
            chosen = np.flatnonzero(self.has_unit)
            key = self.topic[chosen].astype(np.int64) << 32 | self.queue_id[chosen].astype(np.int64) & 0xFFFF_FFFF
            order = np.argsort(key, kind="stable")
            stops = np.append(np.flatnonzero(np.diff(key[order])) + 1, len(order))[: len(order)]
            chosen = chosen[order]
            last = chosen[stops - 1]
            names = _names(self.topics, self.topic[last], self.queue_id[last])
            self.known_queues = Queues(names, stops, self.queue_offset[chosen], self.units(chosen))
        return self.known_queues

    def entries(self, start: int = 0) -> tuple[_Int32s, _Int64s, _Int64s]:
        """Return (key hash, physical offset, store time) of the index entries of records from `start` on."""
        physical = self.physical_offset[self.entry_row]  # ascending
        first = int(np.searchsorted(physical, start))
        return self.entry_hash[first:], physical[first:], self.store_timestamp_ms[self.entry_row[first:]]

    def output(self) -> Output:
        """Return the units and entries to write for these records."""
        at = self.entry_row
        return Output(
            [(topic, queue_id, slots, units.tobytes()) for topic, queue_id, slots, units in self.queues().each()],
            self.entry_hash,
            self.physical_offset[at],
            self.store_timestamp_ms[at],
            int(self.store_timestamp_ms[self.records - 1]) if self.records else None,
        )


def rows_of(
    buf: ReadableBuffer, headers: Headers, base: int, delay_table_ms: Sequence[int], batch_topics: Collection[str] = ()
) -> Rows:
    """Return rows for the records of `headers`, which must all be `ok`.
    `base` is the physical offset of `buf[0]`. `delay_table_ms` has the milliseconds of each delay level, level 1 first
    (format#tags-code)."""
    view = memoryview(buf)
    topics, topic = topics_of(view, headers)
    columns = None
    light: list[int] = []
    if headers.run is not None and not batch_topics and SCHEDULE_TOPIC not in topics:
        columns = _compiled_columns(view, headers.run, len(headers), base, topics)
    if columns is None:
        columns, light = _columns_of(view, headers, topics, topic, delay_table_ms, batch_topics)
    rows = Rows(
        records=len(headers),
        topics=topics,
        topic=topic,
        queue_id=headers.queue_id,
        queue_offset=headers.queue_offset,
        physical_offset=headers.positions + base,
        size=headers.size,
        store_timestamp_ms=headers.store_timestamp_ms,
        **columns._asdict(),
    )
    return _with_light(rows, view, headers, light) if light else rows


class _Columns(NamedTuple):
    """Columns of `Rows` that are not in the records' headers."""

    tags_code: _Int64s
    has_unit: _Bools
    entry_row: _Int64s
    entry_hash: _Int32s
    known_queues: Queues | None


def _columns_of(
    view: memoryview,
    headers: Headers,
    topics: list[str],
    topic: _Int32s,
    delay_table_ms: Sequence[int],
    batch_topics: Collection[str],
) -> tuple[_Columns, list[int]]:
    """Return the columns, built record by record, and the rows of records that may name light queues."""
    transaction = headers.sys_flag & TRANSACTION_MASK
    has_unit = (transaction == 0) | (transaction == TRANSACTION_COMMIT)
    has_unit &= headers.sys_flag & INNER_BATCH == 0
    if batch_topics:
        has_unit &= ~np.isin(topic, [i for i, name in enumerate(topics) if name in batch_topics])
    tags = np.zeros(len(headers), np.int64)
    light: list[int] = []
    entry_row: list[int] = []
    entry_hash: list[int] = []
    rows = np.flatnonzero(headers.properties_size)
    blobs = map(bytes, slices(view, headers.properties_position[rows], headers.properties_size[rows]))
    fields = (rows, topic[rows], transaction[rows], headers.store_timestamp_ms[rows])
    for blob, row, which, ends, stamp in zip(blobs, *(field.tolist() for field in fields), strict=True):
        found = decode_properties(blob)
        tags[row] = _code(topics[which], found, stamp, delay_table_ms)
        if INNER_MULTI_DISPATCH in found:
            light.append(row)
        if ends != TRANSACTION_ROLLBACK:
            hashes = _index_hashes(topics[which], found)
            entry_row += [row] * len(hashes)
            entry_hash += hashes
    return _Columns(tags, has_unit, np.array(entry_row, np.int64), np.array(entry_hash, np.int32), None), light


def _compiled_columns(view: memoryview, run: Run, count: int, base: int, topics: list[str]) -> _Columns | None:
    """Return the columns, built by compiled code, or None if a record is not ordinary."""
    assert kernel is not None
    prefixes = np.array([_prefix(name) for name in topics], np.int32)
    limit = run.longs.shape[1]
    out = np.empty((_LISTED_ROWS, limit), np.int64)
    has_unit, units = np.empty(count, np.bool_), np.empty(count, unit_dtype())
    found = kernel.list(*(view, limit, count, base, run.longs, run.ints, prefixes, out, has_unit, units.view(np.uint8)))
    if found is None:
        return None
    listed, number, entry_row, entry_hash = found
    names = _names(topics, *out[_QUEUE_TOPIC:_QUEUE_END, :number])
    queues = Queues(names, out[_QUEUE_END, :number], out[_SLOT, :listed], units[:listed])
    entries = np.frombuffer(entry_row, np.int64), np.frombuffer(entry_hash, np.int32)
    return _Columns(out[_TAGS_CODE, :count], has_unit, *entries, queues)


def light_queues(topic: str, queue_id: int, properties: bytes) -> list[tuple[str, int, int]]:
    """Return (topic, queue id, queue offset) of the light queues that list a record.

    RocketMQ writes a unit for each name in INNER_MULTI_DISPATCH, with the number in INNER_MULTI_QUEUE_OFFSET. A broker
    has no other list of such a queue's messages. Empty for records of the engine's own topics.

    >>> light_queues("orders", 3, b"INNER_MULTI_DISPATCH\x01%LMQ%a,plain\x02INNER_MULTI_QUEUE_OFFSET\x017,0\x02")
    [('%LMQ%a', 0, 7), ('plain', 3, 0)]
    """
    found = decode_properties(properties)
    names, numbers = (found.get(name, "").split(",") for name in (INNER_MULTI_DISPATCH, INNER_MULTI_QUEUE_OFFSET))
    for parts in names, numbers:  # as Java splits: a missing number of the last queue makes the lists differ
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


def _with_light(rows: Rows, view: memoryview, headers: Headers, light: list[int]) -> Rows:
    """Return `rows`, followed by rows of the light queues that the records in rows `light` may name."""
    numbers = {name: i for i, name in enumerate(rows.topics)}
    of_row: list[int] = []
    queues: list[tuple[int, int, int]] = []
    named = np.array(light)[rows.has_unit[light]]
    blobs = map(bytes, slices(view, headers.properties_position[named], headers.properties_size[named]))
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
        topic=np.append(rows.topic, topic.astype(np.int32)),
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


def topics_of(view: memoryview, headers: Headers) -> tuple[list[str], _Int32s]:
    """Return distinct topics and each record's index. Invalid UTF-8 becomes surrogates, which no folder name has."""
    known = headers.topics()
    if known is not None:
        return [name.decode("utf-8", "surrogateescape") for name in known[0]], known[1]
    numbers: dict[bytes, int] = {}
    names = map(bytes, slices(view, headers.topic_position, headers.topic_size))
    index = [numbers.setdefault(name, len(numbers)) for name in names]
    return [name.decode("utf-8", "surrogateescape") for name in numbers], np.array(index, np.int32)


_LONGEST_DELAY_MS = 10 * 366 * 86_400_000


def as_kept(
    topic: str, found: np.NDArray[np.void], wanted: np.NDArray[np.void], *, has_addresses: bool
) -> np.NDArray[np.void]:
    """Return `wanted` with the tags codes of `found` that cannot be derived from records.

    `wanted` has the units derived from the same records of a queue. An address in a file next to the queue cannot be
    derived. Nor can the delivery time of another delay table, since a message keeps its time (delivery#level-crash).
    Tables have whole seconds, so a difference of whole seconds is attributed to another table. No flipped bit causes
    such a difference.
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


def few(
    buf: ReadableBuffer,
    start: int,
    end: int,
    base: int,
    delay_table_ms: Sequence[int],
    batch_topics: Collection[str] = (),
    limit: int = FEW_RECORDS,
) -> Output | None:
    """Return the `Output` of at most `limit` ordinary records that fill `[start, end)`, else None.
    The result equals that of `walk`, `Headers` and `rows_of`. Arguments are those of `rows_of`."""
    view = memoryview(buf)
    starts = _chain(view, start, end, limit)
    if starts is None:
        return None
    numbers: dict[str, int] = {}
    queues: dict[tuple[int, int], tuple[str, int, list[int], list[bytes]]] = {}
    hashes: list[int] = []
    physical_offsets: list[int] = []
    stamps: list[int] = []
    stamp = None
    for at in starts:
        record = _fields(view, at)
        if record is None:
            return None
        size, queue_id, queue_offset, sys_flag, stamp, topic, properties = record
        found = decode_properties(properties)
        if sys_flag & INNER_BATCH or topic in batch_topics or INNER_MULTI_DISPATCH in found:
            return None
        transaction = sys_flag & TRANSACTION_MASK
        number = numbers.setdefault(topic, len(numbers))
        if transaction in (0, TRANSACTION_COMMIT):
            code = _code(topic, found, stamp, delay_table_ms)
            key = number, queue_id & 0xFFFF_FFFF
            _, _, offsets, units = queues.setdefault(key, (topic, queue_id, [], []))
            offsets.append(queue_offset)
            units.append(UNIT.pack(base + at, size, code))
        if transaction != TRANSACTION_ROLLBACK:
            own = _index_hashes(topic, found)
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
    """Return the tags code of the unit of the `ok` record at `position` (format#tags-code)."""
    record = _fields(memoryview(buf), position)
    if record is None:
        return 0
    *_, stamp, topic, properties = record
    return _code(topic, decode_properties(properties), stamp, delay_table_ms)


def is_listed(buf: ReadableBuffer, position: int, topic: str, queue_id: int, slot: int) -> bool:
    """Return True if the `ok` record at `position` names this slot of a light queue."""
    record = _fields(memoryview(buf), position)
    assert record is not None
    _, own_id, *_, own, properties = record
    return (topic, queue_id, slot) in light_queues(own, own_id, properties)


def _chain(view: memoryview, start: int, end: int, limit: int) -> list[int] | None:
    """Return the starts of at most `limit` records that fill `[start, end)`, else None."""
    starts: list[int] = []
    last = min(end, len(view)) - MIN_RECORD_BYTES
    while start <= last and len(starts) < limit:
        size, magic = _START(view, start)
        if magic not in (MAGIC_V1, MAGIC_V2) or size < MIN_RECORD_BYTES:
            return None
        starts.append(start)
        start += size
    return starts if start == end else None


def _fields(view: memoryview, at: int) -> tuple[int, int, int, int, int, str, bytes] | None:
    """Return (size, queue id, queue offset, sysFlag, store time, topic, properties) of the record at `at`.
    Returns None unless the record is `ok` (`Headers`)."""
    try:
        shape = measure(view, at, len(view))
    except FormatError:
        return None
    size, _, _, queue_id, _, queue_offset, _, sys_flag, _, _, stamp, *_ = shape.head
    topic = bytes(view[shape.topic_at : shape.topic_at + shape.topic_size]).decode("utf-8", "surrogateescape")
    properties = bytes(view[shape.properties_at : shape.properties_at + shape.properties_size])
    return (size, queue_id, queue_offset, sys_flag, stamp, topic, properties) if topic else None


def _code(topic: str, found: Mapping[str, str], stamp: int, delay_table_ms: Sequence[int]) -> int:
    """Return a unit's tags code: the hash of TAGS, or a delay level's delivery time (format#tags-code).
    A time wraps round beyond 64 bits, since a damaged one may be huge."""
    if topic == SCHEDULE_TOPIC:
        level = found.get(DELAY, "")
        if level.isascii() and level.isdigit() and len(level) < 10 and int(level) > 0:
            delay_ms = delay_table_ms[min(int(level), len(delay_table_ms)) - 1] if delay_table_ms else 1000
            return (stamp + delay_ms + (1 << 63)) % (1 << 64) - (1 << 63)
    return tag_hash(found.get(TAGS, ""))


def _index_hashes(topic: str, found: Mapping[str, str]) -> list[int]:
    """Return hashes of one record's index entries (format#key-hash): UNIQ_KEY first, then the words of KEYS."""
    return [index_hash(key, _prefix(topic)) for key in (found.get(UNIQ_KEY), *found.get(KEYS, "").split(" ")) if key]


@lru_cache(maxsize=1024)
def _prefix(topic: str) -> int:
    """Return the hash of the text before each key of a topic."""
    return java_hash(f"{topic}#")
