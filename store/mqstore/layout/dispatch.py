"""What consume queues and the index need to know of many records, drawn from their bytes in array passes (5.2).

    record  ->  queue (topic, queue id), slot (queue offset), unit (physical offset, size, tags code)
            ->  index entries: hash of topic#UNIQ_KEY, then of topic#key for each word of KEYS      (6.2)

Properties are `name 01 value 02 ...` (2.4). The properties of all records are laid end to end with an 02 between, so
that every pair of every record ends at an 02; the pairs, their names and values are then found for all at once. Where
few distinct properties stand in many records (a tag, no keys), only the distinct ones are looked at.

Pure: fed with damaged bytes it gives useless rows, never an error or a read outside the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mqstore.layout.consumequeue import UNIT_DTYPE
from mqstore.layout.javahash import index_hash_many, java_hash, java_hash_many
from mqstore.layout.properties import DELAY, decode_properties
from mqstore.layout.scan import Headers

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["SCHEDULE_TOPIC", "Rows", "rows_of"]

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"

_TRANSACTION = 0xC
_COMMIT, _ROLLBACK = 0x8, 0xC
_Int64s = npt.NDArray[np.int64]
_Int32s = npt.NDArray[np.int32]
_Bools = npt.NDArray[np.bool_]

_NAME_KEYS = int.from_bytes(b"KEYS", "big")
_NAME_TAGS = int.from_bytes(b"TAGS", "big")
_NAME_UNIQ = int.from_bytes(b"UNIQ", "big")
_NAME__KEY = int.from_bytes(b"_KEY", "big")
_SPACE = 0x20
_FEW = 8
"""Distinct properties are worth finding when records share them at least this many to one."""


@dataclass(slots=True)
class Rows:
    """Records in log order, a row each. `entry_*` are index entries in the order of putting; `entry_row` says whose."""

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

    def __len__(self) -> int:
        return len(self.physical_offset)

    def units(self, rows: _Int64s | slice) -> npt.NDArray[np.void]:
        """The consume-queue units of `rows`, as an array of `UNIT_DTYPE`."""
        physical = self.physical_offset[rows]
        units = np.empty(len(physical), UNIT_DTYPE)
        units["physical_offset"] = physical
        units["size"] = self.size[rows]
        units["tags_code"] = self.tags_code[rows]
        return units

    def by_queue(self) -> list[tuple[str, int, _Int64s]]:
        """(topic, queue id, indices of its rows that have a unit, in log order) for each queue."""
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


def rows_of(buf: ReadableBuffer, headers: Headers, base: int, delay_table_ms: Sequence[int]) -> Rows:
    """Rows for the records of `headers`, all of which must be `ok`; `base` is the physical offset of `buf[0]`.

    `delay_table_ms` holds the milliseconds of each delay level, level 1 first (4.2).
    """
    view = memoryview(buf)
    count = len(headers)
    topics, topic = _topics(view, headers)
    transaction = headers.sys_flag & _TRANSACTION
    has_unit = (transaction == 0) | (transaction == _COMMIT)
    prefixes = np.array([java_hash(f"{name}#") for name in topics], np.int32)
    tags, entry_row, entry_hash = _tags_and_entries(view, headers, prefixes, topic)
    indexed = (transaction != _ROLLBACK)[entry_row]
    if not indexed.all():
        entry_row, entry_hash = entry_row[indexed], entry_hash[indexed]
    store_timestamp_ms = headers.store_timestamp_ms
    if SCHEDULE_TOPIC in topics:
        _deliver_times(view, headers, np.flatnonzero(topic == topics.index(SCHEDULE_TOPIC)), tags, delay_table_ms)
    return Rows(
        topics=topics,
        topic=topic,
        queue_id=headers.queue_id,
        queue_offset=headers.queue_offset,
        physical_offset=headers.positions + base,
        size=headers.size,
        tags_code=tags,
        store_timestamp_ms=store_timestamp_ms,
        has_unit=has_unit if count else np.zeros(0, np.bool_),
        entry_row=entry_row,
        entry_hash=entry_hash,
    )


def _slices(view: memoryview, starts: _Int64s, sizes: _Int64s) -> list[bytes]:
    return [bytes(view[a:b]) for a, b in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]


def _topics(view: memoryview, headers: Headers) -> tuple[list[str], _Int64s]:
    """Distinct topics, and the index of each record's. Bytes that are not UTF-8 become surrogates: no folder's name."""
    count = len(headers)
    if not count:
        return [], np.zeros(0, np.int64)
    starts, sizes = headers.topic_position, headers.topic_size
    size = int(sizes[0])
    if bool((sizes == size).all()):
        first = bytes(view[int(starts[0]) : int(starts[0]) + size])
        data = np.frombuffer(view, np.uint8)
        same = data[starts[:, None] + np.arange(size)] == np.frombuffer(first, np.uint8)
        if bool(same.all()):
            return [first.decode("utf-8", "surrogateescape")], np.zeros(count, np.int64)
    numbers: dict[bytes, int] = {}
    index = [numbers.setdefault(name, len(numbers)) for name in _slices(view, starts, sizes)]
    return [name.decode("utf-8", "surrogateescape") for name in numbers], np.array(index, np.int64)


def _tags_and_entries(
    view: memoryview, headers: Headers, prefixes: _Int32s, topic: _Int64s
) -> tuple[_Int64s, _Int64s, _Int32s]:
    """(tags code per record, row per index entry, hash per index entry)."""
    count = len(headers)
    tags = np.zeros(count, np.int64)
    none = np.zeros(0, np.int64), np.zeros(0, np.int32)
    sizes = headers.properties_size
    rows = np.flatnonzero(sizes)
    if not len(rows):
        return tags, *none
    blobs = _slices(view, headers.properties_position[rows], sizes[rows])
    numbers = dict.fromkeys(blobs, 0)
    if len(numbers) * _FEW <= len(blobs):
        for number, blob in enumerate(numbers):
            numbers[blob] = number
        which = np.fromiter(map(numbers.__getitem__, blobs), np.int64, len(blobs))
        pairs = _Pairs(list(numbers))
        tags[rows] = pairs.tags_code()[which]
        key_blob, key_start, key_size = pairs.keys()
        if not len(key_blob):
            return tags, *none
        # Entries of each distinct blob, repeated for every record that bears it.
        per_blob = np.bincount(key_blob, minlength=len(numbers))
        first = np.cumsum(per_blob) - per_blob
        repeats = per_blob[which]
        entry_row = np.repeat(rows, repeats)
        within = np.arange(len(entry_row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        key = np.repeat(first[which], repeats) + within
        key_start, key_size = key_start[key], key_size[key]
    else:
        pairs = _Pairs(blobs)
        tags[rows] = pairs.tags_code()
        key_blob, key_start, key_size = pairs.keys()
        if not len(key_blob):
            return tags, *none
        entry_row = rows[key_blob]
    hashes = index_hash_many(pairs.data, key_start, key_size, initial=prefixes[topic[entry_row]])
    return tags, entry_row, hashes


class _Pairs:
    """The `name 01 value 02` pairs of many properties blobs, found together."""

    def __init__(self, blobs: list[bytes]) -> None:
        self.data = data = np.frombuffer(b"\x02".join(blobs) + b"\x02", np.uint8)
        self._count = len(blobs)
        sizes = np.fromiter(map(len, blobs), np.int64, len(blobs))
        blob_ends = np.cumsum(sizes + 1) - 1
        ends = np.flatnonzero(data == 2)
        starts = np.empty_like(ends)
        starts[0] = 0
        starts[1:] = ends[:-1] + 1
        separators = np.append(np.flatnonzero(data == 1), len(data))
        separator = separators[np.searchsorted(separators, starts)]
        # The parse rule of 2.4: at least three characters, a name, a separator, a value.
        good = (ends - starts >= 3) & (separator > starts) & (separator < ends - 1)
        starts, ends, separator = starts[good], ends[good], separator[good]
        self._blob = np.searchsorted(blob_ends, ends)
        self._value = separator + 1
        self._value_size = ends - separator - 1
        name_size = separator - starts
        word = np.ndarray((max(0, len(data) - 3),), ">u4", data.data, strides=(1,))
        # A pair has at least three bytes and the 02 behind it, so four bytes from its start lie inside.
        head = word[starts] if len(starts) else np.zeros(0, ">u4")
        four, eight = name_size == 4, name_size == 8
        self._tags = np.flatnonzero(four & (head == _NAME_TAGS))
        self._keys = np.flatnonzero(four & (head == _NAME_KEYS))
        unique = np.flatnonzero(eight & (head == _NAME_UNIQ))
        self._unique = unique[word[starts[unique] + 4] == _NAME__KEY] if len(unique) else unique

    def _last_of_each(self, pairs: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """`pairs` without those that a later pair of the same blob overrides (2.4: the last one wins)."""
        blob = self._blob[pairs]
        return pairs[np.append(blob[1:] != blob[:-1], True)] if len(pairs) else pairs

    def tags_code(self) -> _Int64s:
        """Java hash of TAGS for each blob, 0 without (4.2)."""
        codes = np.zeros(self._count, np.int64)
        pairs = self._last_of_each(self._tags)
        if len(pairs):
            codes[self._blob[pairs]] = java_hash_many(self.data, self._value[pairs], self._value_size[pairs])
        return codes

    def keys(self) -> tuple[_Int64s, _Int64s, _Int64s]:
        """(blob, start, size) of each key to index: UNIQ_KEY first, then the words of KEYS, by blob."""
        unique = self._last_of_each(self._unique)
        keys = self._last_of_each(self._keys)
        starts, sizes = self._value[keys], self._value_size[keys]
        blob = self._blob[keys]
        if len(keys):
            spaces = np.flatnonzero(self.data == _SPACE)
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
        blob = np.concatenate((self._blob[unique], blob))
        order = np.argsort(blob, kind="stable")
        return (
            blob[order],
            np.concatenate((self._value[unique], starts))[order],
            np.concatenate((self._value_size[unique], sizes))[order],
        )


def _deliver_times(
    view: memoryview, headers: Headers, rows: npt.NDArray[np.intp], tags: _Int64s, delay_table_ms: Sequence[int]
) -> None:
    """Units of delayed messages bear the time of delivery in place of the tags code (4.2)."""
    blobs = _slices(view, headers.properties_position[rows], headers.properties_size[rows])
    for row, blob in zip(rows.tolist(), blobs, strict=True):
        level = decode_properties(blob).get(DELAY, "")
        if level.isascii() and level.isdigit() and len(level) < 10 and int(level) > 0:
            delay_ms = delay_table_ms[min(int(level), len(delay_table_ms)) - 1] if delay_table_ms else 1000
            tags[row] = headers.store_timestamp_ms[row] + delay_ms
