"""Messages as Arrow record batches, straight from the mapped log: numpy and pyarrow, no Spark.

The rows of `spark.read.format("mqstore")`, of `Store.to_arrow` and of `mqstore export --to`. A column is only read if
it is requested, at this cost:

    unit         20 bytes of the consume queue for each message. No record is read, so no damage is found
    header       one or two cache lines of each record
    body         its bytes, copied once
    properties   its bytes, copied once and parsed for all messages together
    record       all its bytes, copied once

Values are those of `mqstore export`, row by row. Times are UTC timestamps instead of milliseconds. A time outside the
years 1 to 9999, which only a damaged or foreign record has, is null.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mqstore.columnar.arrow import cut, spread, text
from mqstore.columnar.rows import Cost, OnCorrupt, Piece, PieceReader, Policy
from mqstore.errors import ConfigError, FormatError
from mqstore.files.segment import place_in_file
from mqstore.layout.bodyref import is_reference
from mqstore.layout.compression import MissingPackageError, inflate
from mqstore.layout.hosts import IPV4_BYTES, decode_host
from mqstore.layout.messageid import encode_message_id
from mqstore.layout.properties import KEYS, TAGS, UNIQ_KEY, is_reserved
from mqstore.layout.record import BORN_HOST_AT, BORN_HOST_V6, COMPRESSED, STORE_HOST_AT_V4, STORE_HOST_V6
from mqstore.log.commitlog import QueueRef
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.records import RemovedBodyError
from mqstore.log.recovery.report import Finding, Kind

_Int64s = npt.NDArray[np.int64]
_ENOUGH_ROWS = 4096
"""A batch of this many rows costs little more for each row than a larger one."""
_YEAR_1_MS, _YEAR_9999_MS = -62_135_596_800_000, 253_402_300_799_999

_STRING, _TIME = pa.string(), pa.timestamp("us", tz="UTC")
_HEADERS: Final = "array<struct<key:string,value:binary>>"
ARROW_TYPES: Final[Mapping[str, Any]] = {
    "string": _STRING,
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": _TIME,
    "map<string,string>": pa.map_(_STRING, _STRING),
    _HEADERS: pa.list_(pa.struct([("key", _STRING), ("value", pa.binary())])),
}
"""The types of columns and views, in SQL and in Arrow."""


@dataclass(frozen=True, slots=True)
class Column:
    """Column with its type in SQL, its cost (`body`: the body as it was sent) and its meaning."""

    name: str
    sql: str
    cost: Cost
    meaning: str

    @property
    def type(self) -> Any:
        return ARROW_TYPES[self.sql]


_TABLE: Final[tuple[tuple[str, str, Cost, str], ...]] = (
    ("store", "string", "unit", "the store's id: its name in a set, else its absolute path"),
    ("topic", "string", "unit", "the topic"),
    ("queue_id", "int", "unit", "the queue of the topic"),
    ("queue_offset", "bigint", "unit", "the position in the queue"),
    ("body", "binary", "body", "the message as it was sent, inflated if it was stored compressed"),
    ("keys", "string", "properties", "the keys it can be found by, separated by spaces"),
    ("tags", "string", "properties", "its tag"),
    ("properties", "map<string,string>", "properties", "all its properties"),
    ("born_timestamp", "timestamp", "header", "when the producer made it"),
    ("store_timestamp", "timestamp", "header", "when it was stored"),
    ("born_host", "string", "header", "`ip:port` of the producer"),
    ("store_host", "string", "header", "`ip:port` of the store"),
    ("reconsume_times", "int", "header", "how often it was delivered before"),
    ("flag", "int", "header", "the user's number"),
    ("sys_flag", "int", "header", "the stored bits: compression, transaction, host kinds"),
    ("body_crc", "int", "header", "the stored checksum; profile `mqstore` has it over the whole record"),
    ("message_id", "string", "header", "address of this stored copy"),
    ("unique_key", "string", "properties", "what stays the same in every copy, if the producer set it"),
    ("physical_offset", "bigint", "unit", "position of the record in the commitlog"),
    ("size", "int", "unit", "bytes of the whole record"),
    ("tags_code", "bigint", "unit", "hash of the tag; of a delayed message the time of its delivery"),
    ("error", "string", "body", "why the row has no record; only with onCorrupt `keep`"),
    ("record", "binary", "record", "the stored bytes, for a copy; only if it is named"),
    ("key", "binary", "properties", "Kafka's name of `keys`; this one and the rest only if named"),
    ("value", "binary", "body", "Kafka's name of `body`"),
    ("partition", "int", "unit", "Kafka's name of `queue_id`"),
    ("offset", "bigint", "unit", "Kafka's name of `queue_offset`"),
    ("timestamp", "timestamp", "header", "Kafka's name of `store_timestamp`"),
    ("timestampType", "int", "unit", "1: `timestamp` is the time when the message was stored"),
    ("headers", _HEADERS, "properties", "the properties that are the user's own, in their order; null if none"),
)
COLUMNS: Final[Mapping[str, Column]] = {row[0]: Column(*row) for row in _TABLE}
"""Every column, in the order of a row."""
_KAFKA: Final = {
    "key": "keys",
    "value": "body",
    "topic": "topic",
    "partition": "queue_id",
    "offset": "queue_offset",
    "timestamp": "store_timestamp",
    "timestampType": "timestampType",
    "headers": "headers",
}
"""The columns of Spark's Kafka source, in its order, and our columns with their values."""
_ONLY_NAMED: Final = {"error", "record", *_KAFKA} - {"topic"}


def default_columns(*, keep: bool = False, properties: bool = True) -> tuple[str, ...]:
    """Return the columns of a row if none are chosen, with or without `error` and `properties`."""
    left_out = _ONLY_NAMED - ({"error"} if keep else set()) | (set() if properties else {"properties"})
    return tuple(name for name in COLUMNS if name not in left_out)


def check_columns(columns: Sequence[str] | None, *, keep: bool = False, properties: bool = True) -> tuple[str, ...]:
    """Return `columns`, the default ones for None, or those of Spark's Kafka source for `kafka`.
    Raises ConfigError. `keep` and `properties` are those of `default_columns`."""
    if columns is None:
        return default_columns(keep=keep, properties=properties)
    if tuple(columns) == ("kafka",):
        return tuple(_KAFKA)
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise ConfigError(f"columns: no column {', '.join(map(repr, unknown))}; there are {', '.join(COLUMNS)}")
    return check_once(columns)


def check_once(columns: Sequence[str]) -> tuple[str, ...]:
    """Return `columns` if none is named twice, else raise ConfigError."""
    if len(set(columns)) < len(columns):
        raise ConfigError(f"columns: a column is named twice in {', '.join(columns)}; leave one out")
    return tuple(columns)


def arrow_schema(columns: Iterable[str]) -> Any:
    return pa.schema([(name, COLUMNS[name].type) for name in columns])


# -- columns of a piece ------------------------------------------------------------------------------------------------
# Each function returns the values of sound records.


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


def _properties(piece: Piece) -> Any:
    pairs, count = piece.pairs, len(piece)
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
    """Return (pairs whose names stay, pairs whose values they get), or None if no name is repeated.
    As in a dict, a name keeps the place of the first pair and gets the value of the last."""
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
        return text(spread(values, pairs.blob[chosen], len(piece)))

    return column


def _host(*, store: bool) -> Callable[[Piece], Any]:
    def column(piece: Piece) -> Any:
        headers = piece.headers
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
    """Return the topics of the records, for a scan of the log or of several queues."""
    headers = piece.headers
    at = headers.topic_position
    coded = cut(piece.buffer, at, at + headers.topic_size).dictionary_encode()
    return text(coded.dictionary).take(coded.indices)


def _body(piece: Piece) -> Any:
    if piece.bodies is not None:
        return piece.bodies
    starts = piece.headers.body_position
    return cut(piece.buffer, starts, starts + piece.headers.body_size)


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
    "record": lambda piece: cut(piece.buffer, piece.headers.positions, piece.headers.positions + piece.sizes),
    "headers": _user_headers,
}


# -- batches of pieces -------------------------------------------------------------------------------------------------


def _joined(pieces: Iterable[Piece], policy: Policy) -> Iterator[list[Piece]]:
    """Yield pieces by batches. Small ones are combined, which costs a copy, until there are enough rows."""
    group: list[Piece] = []
    rows = size = 0
    for piece in pieces:
        more = int(piece.sizes.sum()) if piece.records else 0
        if piece.bodies is not None:
            more = max(more, piece.bodies.nbytes)  # a body that is small in the log may be large when inflated
        if group and (rows >= _ENOUGH_ROWS or rows + len(piece) > policy.max_rows or size + more > policy.max_bytes):
            yield group
            group, rows, size = [], 0, 0
        group.append(piece)
        rows += len(piece)
        size += more
    if group:
        yield group


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge neighbours whose records are in one buffer into one piece, with the queue of the first.
    A column takes as long for a piece of one row as for one of hundreds, and small batches of a stream have one or two
    messages of each of many queues."""
    found: list[Piece] = []
    for (_, records, stored), run in groupby(pieces, lambda each: (id(each.buffer), each.records, each.bodies is None)):
        first, *others = run
        if others and records:
            same = [first, *others]
            names = ["slots", "physical", "sizes", "positions"] + ["tags_codes"] * (first.tags_codes is not None)
            arrays: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in same]) for name in names}
            bodies = None if stored else pa.concat_arrays([each.bodies for each in same])
            first, others = replace(first, **arrays, bodies=bodies), []
        found += [first, *others]
    return found


def _inflated(pieces: Iterable[Piece], store: StoreReader, policy: Policy) -> Iterator[Piece]:
    """Yield `pieces` with compressed bodies inflated, cut where these would make a batch too large.
    A body that cannot be inflated is damage of its message."""
    for piece in pieces:
        if not piece.records or piece.bodies is not None:
            yield piece
            continue
        headers, low, size = piece.headers, 0, 0
        bodies: dict[int, bytes] = {}
        for row in np.flatnonzero(headers.sys_flag & COMPRESSED).tolist():
            at, stored = int(headers.body_position[row]), int(headers.body_size[row])
            flags = int(headers.sys_flag[row])
            try:
                if is_reference(flags):
                    body = store.at(int(piece.physical[row])).body
                else:
                    body = inflate(flags, piece.buffer[at : at + stored])
            except (RemovedBodyError, LookupError):
                policy.removed += 1
                yield from _with_bodies(piece, low, row, bodies)
                low, size, bodies = row + 1, 0, {}
                continue
            except (FormatError, MissingPackageError) as error:
                yield from _with_bodies(piece, low, row, bodies)
                yield from _not_inflated(piece, row, error, store, policy)
                low, size, bodies = row + 1, 0, {}
                continue
            if size and size + len(body) > policy.max_bytes:
                yield from _with_bodies(piece, low, row, bodies)
                low, size, bodies = row, 0, {}
            bodies[row] = body
            size += len(body)
        yield from _with_bodies(piece, low, len(piece), bodies)


def _with_bodies(piece: Piece, low: int, high: int, bodies: Mapping[int, bytes]) -> Iterator[Piece]:
    """Yield the rows [low, high), if there are any, with these bodies instead of the stored ones."""
    if low == high:
        return
    part = piece if high - low == len(piece) else piece.take(slice(low, high))
    if bodies:
        index = np.arange(len(part), dtype=np.int32)
        index[[row - low for row in bodies]] = np.arange(len(part), len(part) + len(bodies), dtype=np.int32)
        values = pa.concat_arrays([_body(part), pa.array([*bodies.values()], pa.binary())])
        part.bodies = values.take(pa.array(index))
    yield part


def _not_inflated(piece: Piece, row: int, error: Exception, store: StoreReader, policy: Policy) -> Iterator[Piece]:
    headers = piece.headers
    place = place_in_file(int(piece.physical[row]), store.manifest.commitlog_segment_bytes)
    kind: Kind = "not_inflated" if isinstance(error, MissingPackageError) else "bad_record"
    at, size = int(headers.topic_position[row]), int(headers.topic_size[row])
    damaged = piece.take(slice(row, row + 1))
    damaged.topic, damaged.queue_id = str(piece.buffer[at : at + size], "utf-8", "replace"), int(headers.queue_id[row])
    where = f"{damaged.topic}, queue {damaged.queue_id}, offset {headers.queue_offset[row]}"
    finding = Finding(kind, *place, int(piece.sizes[row]), f"{where}: its body does not inflate ({error})")
    yield from damaged.damaged([finding], policy)


# -- reader ------------------------------------------------------------------------------------------------------------


class ColumnReader(PieceReader):
    """Reads one store by columns. Not for several threads.

    `columns`: names of `COLUMNS`, None for all. `PieceReader` describes `tags`, `where` and `keys`. `decompress` False
    leaves bodies as they are stored, `body_as` "string" converts them to text. `policy.verify` compares checksums,
    which costs about as much as reading a body. Without it every length, magic and offset is still checked.
    `policy.on_corrupt` "fail" raises CorruptStoreError at the first damaged message. "skip" leaves such messages out,
    and `policy.corrupt` counts them. "keep" yields a row with the values of its unit, `error`, and null elsewhere.
    Columns of units alone are read without the records.

    Raises ConfigError for unknown columns.
    """

    def __init__(
        self,
        store: StoreReader,
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
        policy = policy or Policy()
        self.columns = check_columns(columns, keep=policy.on_corrupt == "keep")
        costs = {COLUMNS[name].cost for name in self.columns}
        super().__init__(store, costs, policy, tags=tags, where=where, keys=keys)
        self.schema = arrow_schema(self.columns)
        if body_as == "string" and "body" in self.columns:
            at = self.columns.index("body")
            self.schema = self.schema.set(at, pa.field("body", _STRING))
        self._inflates = decompress and "body" in costs
        self._store_id = str(store.path) if store_id is None else store_id

    def queue(self, topic: str, queue_id: int, start: int, stop: int) -> Iterator[Any]:
        """Yield Arrow batches of queue offsets [start, stop), in order. A queue that does not exist has none."""
        return self.batches(self.queue_pieces(topic, queue_id, start, stop))

    def log(self, start: int, stop: int, wanted: Callable[[str], bool] = lambda topic: True) -> Iterator[Any]:
        """Yield batches of the messages whose records begin at physical offsets [start, stop), in log order.
        Only topics for which `wanted` returns True. `stop` is at or below the end of the dispatched messages."""
        return self.batches(self.log_pieces(start, stop, wanted))

    def batches(self, pieces: Iterable[Piece]) -> Iterator[Any]:
        """Yield record batches of pieces of this reader. Small ones are combined."""
        if self._inflates:
            pieces = _inflated(pieces, self.store, self.policy)
        for group in _joined(pieces, self.policy):
            yield self._batch(group)

    def _batch(self, pieces: list[Piece]) -> Any:
        arrays = []
        together = _merged(pieces)
        for field in self.schema:
            name = _KAFKA.get(field.name, field.name)
            # Each piece has its own queue.
            parts = [self._column(piece, name) for piece in (pieces if name in ("topic", "queue_id") else together)]
            array = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
            if array.type != field.type:
                array = text(array) if pa.types.is_string(field.type) else array.cast(field.type)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, piece: Piece, name: str) -> Any:
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
            case "error" if piece.errors:
                return pa.array(piece.errors, _STRING)
        if name == "error" or piece.errors:
            return pa.nulls(count, COLUMNS[name].type)
        if name == "tags_code":  # in a log scan: the value that dispatch would put into the unit
            rows = self.store.queue_table.rows_of(piece.buffer, piece.headers, piece.base)
            return pa.array(rows.tags_code[: len(rows)])
        return _OF_RECORD[name](piece)


def _or_null(values: npt.NDArray[np.signedinteger[Any]]) -> Any:
    """Return an array with null instead of -1, which means unknown."""
    absent = values == -1
    return pa.array(values, mask=absent) if absent.any() else pa.array(values)


def table_of(
    store: StoreReader,
    refs: Sequence[QueueRef],
    columns: Sequence[str] | None,
    start: datetime | int | None,
    stop: datetime | int | None,
    tags: str | None,
    on_corrupt: OnCorrupt,
) -> Any:
    """Return the messages of these queues as a table, one queue after the other. `Store.to_arrow` describes it."""
    if len(refs) > 1 and (isinstance(start, int) or isinstance(stop, int)):
        raise ConfigError("start and stop are offsets of one queue: give queue_id, or times")
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
