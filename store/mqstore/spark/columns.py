"""Messages as Arrow record batches, straight from the mapped log: numpy and pyarrow, no Spark.

The rows of `spark.read.format("mqstore")`, of `Store.to_arrow` and of `mqstore export --to`. A column costs
what it needs, and only if it is asked for:

    unit         20 bytes of the consume queue a message; no record is looked at, so none is found damaged
    header       one or two cache lines of each record
    body         its bytes, copied once
    properties   its bytes, copied once and taken apart for all messages together
    record       all its bytes, copied once

Values are those of `mqstore export`, row by row; times are UTC timestamps in place of milliseconds. A time outside the
years 1 to 9999, which only a damaged or foreign record has, is null.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqstore.broker import sql92
from mqstore.errors import ConfigError, FormatError
from mqstore.files.segments import place_in_file
from mqstore.layout.compression import MissingPackageError, inflate
from mqstore.layout.hosts import IPV4_BYTES, decode_host
from mqstore.layout.messageid import encode_message_id
from mqstore.layout.properties import KEYS, TAGS, UNIQ_KEY, decode_properties, is_reserved
from mqstore.layout.record import BORN_HOST_AT, BORN_HOST_V6, COMPRESSED, STORE_HOST_AT_V4, STORE_HOST_V6
from mqstore.log.commitlog import QueueRef
from mqstore.log.recovery.report import Finding, Kind
from mqstore.log.store import MessageStore
from mqstore.log.tagfilter import TagFilter, parse_tags
from mqstore.spark.arrow import cut, laid, spread, text
from mqstore.spark.rows import OnCorrupt, Piece, Policy, QueueScan, at_once, log_batches

__all__ = [
    "COLUMNS",
    "Column",
    "ColumnReader",
    "arrow_schema",
    "as_markdown",
    "check_columns",
    "check_once",
    "default_columns",
    "table_of",
]

Cost = Literal["unit", "header", "body", "properties", "record"]
_Int64s = npt.NDArray[np.int64]
_YEAR_1_MS, _YEAR_9999_MS = -62_135_596_800_000, 253_402_300_799_999

_STRING, _TIME = pa.string(), pa.timestamp("us", tz="UTC")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its Arrow type, the same in Spark's words, what it costs, and what it holds."""

    name: str
    type: Any
    sql: str
    cost: Cost
    meaning: str


_TABLE: Final[tuple[tuple[str, Any, str, Cost, str], ...]] = (
    ("store", _STRING, "string", "unit", "the store's id: its name in a set, else its absolute path"),
    ("topic", _STRING, "string", "unit", "the topic"),
    ("queue_id", pa.int32(), "int", "unit", "the queue of the topic"),
    ("queue_offset", pa.int64(), "bigint", "unit", "the position in the queue"),
    ("body", pa.binary(), "binary", "body", "the message as it was sent, inflated if it was stored compressed"),
    ("keys", _STRING, "string", "properties", "the keys it can be found by, separated by spaces"),
    ("tags", _STRING, "string", "properties", "its tag"),
    ("properties", pa.map_(_STRING, _STRING), "map<string,string>", "properties", "all its properties"),
    ("born_timestamp", _TIME, "timestamp", "header", "when the producer made it"),
    ("store_timestamp", _TIME, "timestamp", "header", "when it was stored"),
    ("born_host", _STRING, "string", "header", "`ip:port` of the producer"),
    ("store_host", _STRING, "string", "header", "`ip:port` of the store"),
    ("reconsume_times", pa.int32(), "int", "header", "how often it was delivered before"),
    ("flag", pa.int32(), "int", "header", "the user's number"),
    ("sys_flag", pa.int32(), "int", "header", "the stored bits: compression, transaction, host kinds"),
    (
        "body_crc",
        pa.int32(),
        "int",
        "header",
        "the stored checksum; profile `mqstore` has it over the whole record",
    ),
    ("message_id", _STRING, "string", "header", "address of this stored copy"),
    ("unique_key", _STRING, "string", "properties", "what stays the same in every copy, if the producer set it"),
    ("physical_offset", pa.int64(), "bigint", "unit", "position of the record in the commitlog"),
    ("size", pa.int32(), "int", "unit", "bytes of the whole record"),
    ("tags_code", pa.int64(), "bigint", "unit", "hash of the tag; of a delayed message the time of its delivery"),
    ("error", _STRING, "string", "unit", "why the row has no record; only with onCorrupt `keep`"),
    ("record", pa.binary(), "binary", "record", "the stored bytes, for a copy; only if it is named"),
    ("key", pa.binary(), "binary", "properties", "Kafka's name of `keys`; this one and the rest only if named"),
    ("value", pa.binary(), "binary", "body", "Kafka's name of `body`"),
    ("partition", pa.int32(), "int", "unit", "Kafka's name of `queue_id`"),
    ("offset", pa.int64(), "bigint", "unit", "Kafka's name of `queue_offset`"),
    ("timestamp", _TIME, "timestamp", "header", "Kafka's name of `store_timestamp`"),
    ("timestampType", pa.int32(), "int", "unit", "1: `timestamp` is the time when the message was stored"),
    (
        "headers",
        pa.list_(pa.struct([("key", _STRING), ("value", pa.binary())])),
        "array<struct<key:string,value:binary>>",
        "properties",
        "the properties that are the user's own, in their order; null if there are none",
    ),
)
COLUMNS: Final[Mapping[str, Column]] = {row[0]: Column(*row) for row in _TABLE}
"""Every column, in the order of a row."""
_KAFKA: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
"""The columns of Spark's Kafka source, in its order."""
_SAME: Final = {"value": "body", "partition": "queue_id", "offset": "queue_offset", "timestamp": "store_timestamp"}
"""Columns that have the values of another one."""
_ONLY_NAMED: Final = {"error", "record", *_KAFKA} - {"topic"}


def as_markdown() -> str:
    """The columns, for the documentation."""
    lines = ["| Column | Type | Cost | What it is |", "|---|---|---|---|"]
    lines += [f"| `{c.name}` | `{c.sql}` | {c.cost} | {c.meaning} |" for c in COLUMNS.values()]
    return "\n".join(lines) + "\n"


def default_columns(*, keep: bool = False) -> tuple[str, ...]:
    """The columns of a row when none are chosen; `error` with `keep`."""
    return tuple(name for name in COLUMNS if name not in _ONLY_NAMED or (keep and name == "error"))


def check_columns(columns: Sequence[str] | None, *, keep: bool = False) -> tuple[str, ...]:
    """`columns` if there are such, all for None, those of Spark's Kafka source for `kafka`. ConfigError."""
    if columns is None:
        return default_columns(keep=keep)
    if tuple(columns) == ("kafka",):
        return _KAFKA
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise ConfigError(f"columns: no column {', '.join(map(repr, unknown))}; there are {', '.join(COLUMNS)}")
    return check_once(columns)


def check_once(columns: Sequence[str]) -> tuple[str, ...]:
    """`columns` if none is there twice. ConfigError."""
    if len(set(columns)) < len(columns):
        raise ConfigError(f"columns: a column is named twice in {', '.join(columns)}; leave one out")
    return tuple(columns)


def arrow_schema(columns: Sequence[str]) -> Any:
    """The Arrow schema of batches with these columns."""
    return pa.schema([(name, COLUMNS[name].type) for name in columns])


# -- columns of a piece ------------------------------------------------------------------------------------------------
# Each gives the values of the rows that have a record; `_column` puts nulls between them for those that have none.


def _int(name: str) -> Callable[[Piece], Any]:
    return lambda piece: pa.array(getattr(piece.headers, name))


def _time(name: str) -> Callable[[Piece], Any]:
    def column(piece: Piece) -> Any:
        stamps: _Int64s = getattr(piece.headers, name)
        strange = (stamps < _YEAR_1_MS) | (stamps > _YEAR_9999_MS)
        if not strange.any():
            return pa.array(stamps * 1000).view(_TIME)
        return pa.array(np.where(strange, 0, stamps) * 1000, mask=strange).view(_TIME)

    return column


def _body(piece: Piece) -> Any:
    if piece.plain_bodies is not None:
        return laid(*piece.plain_bodies)
    headers = piece.headers
    assert headers is not None
    starts = headers.body_position
    stored = cut(piece.buffer, starts, starts + headers.body_size)
    if not piece.bodies:
        return stored
    index = np.arange(len(stored), dtype=np.int32)
    rows = sorted(piece.bodies)
    index[rows] = np.arange(len(stored), len(stored) + len(rows), dtype=np.int32)
    bodies = [piece.bodies[row] for row in rows]
    inflated = pa.array([body if isinstance(body, bytes) else None for body in bodies], pa.binary())
    return pa.concat_arrays([stored, inflated]).take(pa.array(index))


def _record(piece: Piece) -> Any:
    headers = piece.headers
    assert headers is not None
    return cut(piece.buffer, headers.positions, headers.positions + headers.size)


def _properties(piece: Piece) -> Any:
    pairs, count = piece.pairs, piece.records
    names = text(cut(pairs.data, pairs.start, pairs.start + pairs.name_size))
    values = text(cut(pairs.data, pairs.value, pairs.value + pairs.value_size))
    blob = pairs.blob
    kept = None if pairs.distinct else _last_of_equal_names(blob, names)
    if kept is not None:
        first, last = kept
        names, values, blob = names.take(pa.array(first)), values.take(pa.array(last)), blob[first]
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(blob, minlength=count), out=offsets[1:])
    return pa.MapArray.from_arrays(pa.array(offsets), names, values)


def _last_of_equal_names(blob: _Int64s, names: Any) -> tuple[_Int64s, _Int64s] | None:
    """(pairs whose names stay, pairs whose values they get) where a name stands twice in a message: a dict keeps the
    place of the first and the value of the last. None: nowhere."""
    if not len(blob):
        return None
    coded = names.dictionary_encode()
    codes = coded.indices.to_numpy().astype(np.int64)
    _, first, which = np.unique(blob * len(coded.dictionary) + codes, return_index=True, return_inverse=True)
    if len(first) == len(blob):
        return None
    last = np.zeros(len(first), np.int64)
    last[which] = np.arange(len(blob))  # of equal ones the last assignment stays
    first = np.sort(first)
    return first, last[which[first]]


def _user_headers(piece: Piece) -> Any:
    properties = _properties(piece)
    names = properties.keys.dictionary_encode()
    own = np.array([not is_reserved(name) for name in names.dictionary.to_pylist()], np.bool_)
    kept = own[names.indices.to_numpy()]
    edges = np.append(0, np.cumsum(kept))[properties.offsets.to_numpy()].astype(np.int32)
    mask = pa.array(kept)
    columns = [properties.keys.filter(mask), properties.items.filter(mask).cast(pa.binary())]
    structs = pa.StructArray.from_arrays(columns, ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(edges), structs, mask=pa.array(np.diff(edges) == 0))


def _property(name: str) -> Callable[[Piece], Any]:
    encoded = name.encode()

    def column(piece: Piece) -> Any:
        pairs = piece.pairs
        chosen = pairs.named(encoded)
        starts = pairs.value[chosen]
        values = cut(pairs.data, starts, starts + pairs.value_size[chosen])
        return text(spread(values, pairs.blob[chosen], piece.records))

    return column


def _host(*, store: bool) -> Callable[[Piece], Any]:
    def column(piece: Piece) -> Any:
        headers = piece.headers
        assert headers is not None
        if (headers.sys_flag & (BORN_HOST_V6 | STORE_HOST_V6)).any():
            at = BORN_HOST_AT if not store else STORE_HOST_AT_V4 - IPV4_BYTES + headers.born_host_size
            sizes = headers.store_host_size if store else headers.born_host_size
            coded = cut(piece.buffer, headers.positions + at, headers.positions + at + sizes).dictionary_encode()
            raw = coded.dictionary.to_pylist()
        else:
            words = headers.head_words(STORE_HOST_AT_V4 if store else BORN_HOST_AT)
            coded = pa.array(words.copy()).dictionary_encode()
            raw = [value.to_bytes(IPV4_BYTES, sys.byteorder) for value in coded.dictionary.to_pylist()]
        return pa.array([decode_host(host) for host in raw], _STRING).take(coded.indices)

    return column


_HEX: Final = np.frombuffer(b"".join(b"%02X" % i for i in range(256)), np.uint16)


def _message_id(piece: Piece) -> Any:
    headers = piece.headers
    assert headers is not None
    count = len(headers)
    if not count or (headers.sys_flag & (BORN_HOST_V6 | STORE_HOST_V6)).any():
        at = headers.positions + (STORE_HOST_AT_V4 - IPV4_BYTES) + headers.born_host_size
        hosts = cut(piece.buffer, at, at + headers.store_host_size).to_pylist()
        places = headers.physical_offset.tolist()
        return pa.array([encode_message_id(h, p) for h, p in zip(hosts, places, strict=True)], _STRING)
    raw = np.empty((count, 2), np.uint64)
    raw[:, 0] = headers.head_words(STORE_HOST_AT_V4)
    raw[:, 1] = headers.physical_offset.astype(">i8").view(np.uint64)
    digits = _HEX[raw.view(np.uint8)]
    ends = np.arange(count + 1, dtype=np.int32) * (2 * raw.itemsize * raw.shape[1])
    return pa.Array.from_buffers(_STRING, count, [None, pa.py_buffer(ends), pa.py_buffer(digits.view(np.uint8))])


def _topic(piece: Piece) -> Any:
    """Of a log scan, and of several queues: as the records have it."""
    headers = piece.headers
    assert headers is not None
    at = headers.topic_position
    coded = cut(piece.buffer, at, at + headers.topic_size).dictionary_encode()
    return text(coded.dictionary).take(coded.indices)


_OF_RECORD: Final[Mapping[str, Callable[[Piece], Any]]] = {
    "topic": _topic,
    "queue_id": _int("queue_id"),
    "body": _body,
    "keys": _property(KEYS),
    "tags": _property(TAGS),
    "properties": _properties,
    "born_timestamp": _time("born_timestamp_ms"),
    "store_timestamp": _time("store_timestamp_ms"),
    "born_host": _host(store=False),
    "store_host": _host(store=True),
    "reconsume_times": _int("reconsume_times"),
    "flag": _int("flag"),
    "sys_flag": _int("sys_flag"),
    "body_crc": _int("checksum"),
    "message_id": _message_id,
    "unique_key": _property(UNIQ_KEY),
    "record": _record,
    "key": lambda piece: _property(KEYS)(piece).cast(pa.binary()),
    "headers": _user_headers,
}


class ColumnReader:
    """Reads one store by columns. Not for several threads.

    `columns`: names of `COLUMNS`, None for all. `tags`: as for `MessageStore.read`; `where`: an SQL92 expression over
    properties; `keys`: keys or unique keys of which a message must bear one. `decompress` False leaves bodies as they
    are stored, `body_as` "string" makes them text. `policy.verify` compares checksums, which costs about as much as
    reading a body; without it every length, magic and offset is still checked. `policy.on_corrupt`: "fail" raises
    CorruptStoreError at the first damaged message, "skip" leaves such messages out (`policy.corrupt` counts them),
    "keep" gives a row that has what its unit says, null elsewhere, and `error`; of one whose body does not inflate only
    the body is null. Columns that come from units alone are read without a look at the records.

    Raises ConfigError for columns that there are not.
    """

    def __init__(
        self,
        store: MessageStore,
        columns: Sequence[str] | None = None,
        *,
        tags: str | None = None,
        where: str | None = None,
        keys: Sequence[str] | None = None,
        decompress: bool = True,
        body_as: Literal["binary", "string"] = "binary",
        policy: Policy | None = None,
        store_id: str | None = None,
    ) -> None:
        self.store = store
        self.policy = policy or Policy()
        self.columns = check_columns(columns, keep=self.policy.on_corrupt == "keep")
        self.schema = arrow_schema(self.columns)
        if body_as == "string" and "body" in self.columns:
            at = self.columns.index("body")
            self.schema = self.schema.set(at, pa.field("body", _STRING))
        self._tags = tags
        self._passes = _passes(where, keys)
        self._inflates = decompress and not {"body", "value"}.isdisjoint(self.columns)
        self._store_id = str(store.path) if store_id is None else store_id

    def queue(self, topic: str, queue_id: int, start: int, stop: int) -> Iterator[Any]:
        """Record batches of queue offsets [start, stop), in order; nothing for a queue that is not there."""
        chosen = parse_tags(self._tags, topic)
        costs = {COLUMNS[name].cost for name in self.columns}
        filtered = chosen is not None or self._passes is not None
        bodies, headers = "body" in costs and not filtered, filtered or not costs <= {"unit", "body"}
        scan = QueueScan(self.store, self.policy, bodies=bodies, headers=headers)
        records = filtered or not costs <= {"unit"}
        for pieces in scan.batches(topic, queue_id, start, stop, records=records, tags=chosen):
            yield from self._batches(pieces, chosen)

    def at_once(self, parts: Sequence[tuple[str, int, int, int]]) -> Iterator[Any] | None:
        """As `queue` of each (topic, queue id, start, stop), one behind the other, in as few batches as can be. None if
        something about them wants a closer look, or if nothing is gained: for `queue` to read them one by one."""
        if self._tags is not None or all(COLUMNS[name].cost == "unit" for name in self.columns):
            return None
        whole = at_once(self.store, parts, self.policy)
        return None if whole is None else self._batches([whole], None)

    def pieces(self, topic: str, queue_id: int, start: int, stop: int) -> Iterator[Piece]:
        """As `queue`, checked and filtered, before columns are made: for who counts. A piece has to be done with before
        the next one is asked for."""
        chosen = parse_tags(self._tags, topic)
        for pieces in QueueScan(self.store, self.policy).batches(topic, queue_id, start, stop, tags=chosen):
            yield from self._chosen(pieces, chosen)

    def log(self, start: int, stop: int, wanted: Callable[[str], bool] = lambda topic: True) -> Iterator[Any]:
        """Record batches of the messages whose records begin at physical offsets [start, stop), in log order, of the
        topics that `wanted` says yes to. `stop` lies at or below the end of what has been dispatched."""
        chosen = None if self._tags is None else parse_tags(self._tags, "")
        for pieces in log_batches(self.store, start, stop, self.policy, wanted):
            yield from self._batches(pieces, chosen)

    # -- batches ----------------------------------------------------------------------------------------------------

    def _batches(self, pieces: list[Piece], tags: TagFilter | None) -> Iterator[Any]:
        pieces = self._chosen(pieces, tags)
        if self._inflates:
            pieces = [each for piece in pieces for each in self._inflated(piece) if len(each)]
        group: list[Piece] = []
        room = self.policy.max_bytes
        for piece in pieces:
            size = sum(map(len, piece.bodies.values()))
            if group and size > room:  # what was stored small may be large
                yield self._batch(group)
                group, room = [], self.policy.max_bytes
            group.append(piece)
            room -= size
        if any(map(len, group)):
            yield self._batch(group)

    def _chosen(self, pieces: list[Piece], tags: TagFilter | None) -> list[Piece]:
        """What the filters leave."""
        if tags is not None:
            pieces = [piece for each in pieces if len(piece := _only(each, _bearing(each, tags)))]
        if self._passes is not None:
            pieces = [piece for each in pieces if len(piece := _only(each, _passing(each, self._passes)))]
        return pieces

    def _inflated(self, piece: Piece) -> Iterator[Piece]:
        """`piece` with its compressed bodies inflated; cut where they would make a batch too large."""
        headers = None if piece.plain_bodies is not None else piece.headers
        rows = [] if headers is None else np.flatnonzero(headers.sys_flag & COMPRESSED).tolist()
        low = total = 0
        bodies: dict[int, bytes | str] = {}
        for row in rows:
            body = self._body_of(piece, row)
            if total and total + len(body) > self.policy.max_bytes:
                yield self._with_bodies(piece, low, row, bodies)
                low, total, bodies = row, 0, {}
            bodies[row] = body
            total += len(body)
        yield self._with_bodies(piece, low, piece.records, bodies) if rows else piece

    def _with_bodies(self, piece: Piece, low: int, high: int, bodies: dict[int, bytes | str]) -> Piece:
        """The records [low, high) of a piece with these bodies, and the rows without a record that stand before them.
        Records whose body does not inflate are left out, unless they are kept."""
        row_of = np.arange(len(piece)) if piece.bad is None else np.flatnonzero(~piece.bad)
        first, stop = int(row_of[low]) if low else 0, int(row_of[high]) if high < len(row_of) else len(piece)
        part = piece if high - low == len(row_of) else piece.take(slice(first, stop), slice(low, high))
        sound = np.ones(high - low, np.bool_)
        sound[[row - low for row, body in bodies.items() if isinstance(body, str)]] = False
        if self.policy.on_corrupt != "keep" and not sound.all():
            part = part.take(sound, sound)  # no row without a record: those are not kept either
            bodies = {row: body for row, body in bodies.items() if sound[row - low]}
            number = np.cumsum(sound) - 1
        else:
            number = np.arange(high - low)
        part.bodies = {int(number[row - low]): body for row, body in bodies.items()}
        return part

    def _body_of(self, piece: Piece, row: int) -> bytes | str:
        """The body of a compressed record; if it does not inflate, which is damage, the text for its row."""
        headers = piece.headers
        assert headers is not None
        at, size = int(headers.body_position[row]), int(headers.body_size[row])
        try:
            return inflate(int(headers.sys_flag[row]), piece.buffer[at : at + size])
        except (FormatError, MissingPackageError) as error:
            at, size = int(headers.topic_position[row]), int(headers.topic_size[row])
            topic = str(piece.buffer[at : at + size], "utf-8", "replace")
            where = f"{topic}, queue {headers.queue_id[row]}, offset {headers.queue_offset[row]}"
            missing = isinstance(error, MissingPackageError)
            detail = str(error) if missing else f"{where}: its body does not inflate: {error}"
            kind: Kind = "not_inflated" if missing else "bad_record"
            place = place_in_file(int(headers.physical_offset[row]), self.store.manifest.commitlog_segment_bytes)
            self.policy.damage(Finding(kind, *place, int(headers.size[row]), detail))
            return detail

    def _batch(self, pieces: list[Piece]) -> Any:
        arrays = []
        for field in self.schema:
            parts = [self._column(piece, field.name) for piece in pieces]
            array = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
            if array.type != field.type:
                array = text(array) if pa.types.is_string(field.type) else array.cast(field.type)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, piece: Piece, name: str) -> Any:
        name = _SAME.get(name, name)
        known = self._of_unit(piece, name)
        if known is not None:
            return known
        count = len(piece)
        if not piece.records:
            return pa.nulls(count, COLUMNS[name].type)
        values = self._tags_code(piece) if name == "tags_code" else _OF_RECORD[name](piece)
        return values if piece.bad is None else spread(values, np.flatnonzero(~piece.bad), count)

    def _of_unit(self, piece: Piece, name: str) -> Any:
        """A column that is known without the records; None for one that is not."""
        count = len(piece)
        match name:
            case "store":
                return pa.repeat(pa.scalar(self._store_id, _STRING), count)
            case "topic" if piece.topic is not None:
                topic = piece.topic.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                return pa.repeat(pa.scalar(topic, _STRING), count)
            case "queue_id" if piece.queue_id is not None:
                return pa.repeat(pa.scalar(piece.queue_id, pa.int32()), count)
            case "queue_offset":
                return _or_null(piece.slots)
            case "physical_offset":
                return _or_null(piece.physical)
            case "size":
                return _or_null(piece.sizes.astype(np.int32))
            case "tags_code" if piece.tags_codes is not None:
                return pa.array(piece.tags_codes)
            case "timestampType":
                return pa.repeat(pa.scalar(1, pa.int32()), count)
            case "error":
                return _errors(piece)
        return None

    def _tags_code(self, piece: Piece) -> Any:
        """Of a log scan: what dispatch would put into the unit."""
        assert piece.headers is not None
        rows = self.store.rows_of(piece.buffer, piece.headers, piece.base)
        return pa.array(rows.tags_code[: len(rows)])


def _errors(piece: Piece) -> Any:
    if piece.bad is None and not piece.bodies:
        return pa.nulls(len(piece), _STRING)
    bad = np.zeros(len(piece), np.bool_) if piece.bad is None else piece.bad
    row_of_record = np.flatnonzero(~bad)
    texts = dict(zip(np.flatnonzero(bad).tolist(), piece.errors, strict=True))
    texts |= {int(row_of_record[row]): text for row, text in piece.bodies.items() if isinstance(text, str)}
    return pa.array([texts.get(row) for row in range(len(piece))], _STRING)


def _or_null(values: npt.NDArray[np.signedinteger[Any]]) -> Any:
    """Null in place of -1, which stands for what nobody knows."""
    absent = values == -1
    return pa.array(values, mask=absent) if absent.any() else pa.array(values)


def _only(piece: Piece, passes: npt.NDArray[np.bool_] | None) -> Piece:
    """The rows whose record passes, and those that have no record: nobody knows what they were."""
    if passes is None or passes.all():
        return piece
    rows = passes
    if piece.bad is not None:
        rows = piece.bad.copy()
        rows[~piece.bad] = passes
    return piece.take(rows, passes)


def _bearing(piece: Piece, tags: TagFilter) -> npt.NDArray[np.bool_] | None:
    """Return which records have one of the tags; None if no record was looked at."""
    if piece.headers is None or not piece.records:
        return None
    found: npt.NDArray[np.bool_] = pc.is_in(_property(TAGS)(piece), pa.array(sorted(tags.tags))).to_numpy(False)
    return found


def _passing(piece: Piece, passes: Callable[[dict[str, str]], bool]) -> npt.NDArray[np.bool_] | None:
    """Which records have properties that pass; each distinct set of properties is asked for once."""
    headers = piece.headers
    if headers is None or not piece.records:
        return None
    starts = headers.properties_position
    coded = cut(piece.buffer, starts, starts + headers.properties_size).dictionary_encode()
    verdicts = np.array([passes(decode_properties(blob)) for blob in coded.dictionary.to_pylist()], np.bool_)
    found: npt.NDArray[np.bool_] = verdicts[coded.indices.to_numpy()]
    return found


def _passes(where: str | None, keys: Sequence[str] | None) -> Callable[[dict[str, str]], bool] | None:
    """What the properties of a message must fulfil; None: nothing. FilterError."""
    if where is None and keys is None:
        return None
    matches = sql92.compile(where).matches if where is not None else lambda properties: True
    wanted = None if keys is None else frozenset(keys) - {""}

    def passes(properties: dict[str, str]) -> bool:
        if wanted is not None and wanted.isdisjoint((*properties.get(KEYS, "").split(" "), properties.get(UNIQ_KEY))):
            return False
        return matches(properties)

    return passes


def table_of(
    store: MessageStore,
    refs: Sequence[QueueRef],
    columns: Sequence[str] | None,
    start: datetime | int | None,
    stop: datetime | int | None,
    tags: str | None,
    on_corrupt: OnCorrupt,
) -> Any:
    """The messages of these queues, one queue behind the other, as a table; see `Store.to_arrow`."""
    if len(refs) > 1 and (isinstance(start, int) or isinstance(stop, int)):
        raise ConfigError("start and stop as offsets belong to one queue: give queue_id, or times")
    policy = Policy(verify=store.config.verify_reads, on_corrupt=on_corrupt)
    batches: list[Any] = []
    reader = ColumnReader(store, columns, tags=tags, policy=policy)
    for ref in refs:
        low, high = store.offsets(*ref)
        bounds = [
            bound if at is None else at if isinstance(at, int) else store.offset_at(*ref, at)
            for at, bound in ((start, low), (stop, high))
        ]
        batches += reader.queue(*ref, max(low, bounds[0]), min(high, bounds[1]))
    return pa.Table.from_batches(batches, reader.schema)
