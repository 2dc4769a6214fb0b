"""Rows of a frame as records of a store, contiguous and complete except for their position (spark#encode).

    body, flag, born_timestamp                            fields of the record
    topic, queue_id                                       fields of the record; each batch checks its distinct topics
    keys, tags, unique_key, sharding_key, properties      properties, in the order of a producer's put
    delay_level, deliver_time, delay_seconds              the record goes to the engine's topic of waiting messages
    value, key, partition, headers                        names of Spark's Kafka sink: `_from_kafka`
    record                                                the whole record: `_Copies`

queueOffset, physicalOffset, storeTimestamp and the checksum are 0, since the bulk append sets them. Arrow joins arrays
of pieces (header, body, topic, each property) row by row, so the records are contiguous in one buffer. Only text that
is not printable ASCII and delayed rows are handled one by one. Every rule of a put is applied before the first byte is
returned. The module is long because each column has its own rules.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as error:  # pragma: no cover
    raise ImportError("writing columns needs pyarrow: pip install 'mqstore[spark]', or pyarrow alone") from error

from mqstore.broker.delay.route import delay_route
from mqstore.broker.routing.selection import group_queue, jump_hash_many
from mqstore.broker.tables.names import is_system_topic
from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.columnar.arrow import cut, fixed, flat, nulls, odd_rows, sizes_of, small, text
from mqstore.columnar.inputs import INPUTS, KAFKA, Rules, TopicRule, is_kafka
from mqstore.errors import InvalidMessageError, MQStoreError
from mqstore.layout import properties as props
from mqstore.layout import record
from mqstore.layout.arrays.encode import header_dtype
from mqstore.layout.arrays.scan import Headers, everywhere, has_crc_tail, verify
from mqstore.layout.hosts import IPV4_BYTES, LOCAL_HOST
from mqstore.layout.javahash import java_hash_many
from mqstore.log.writing.log_tail import QueueRef
from mqstore.log.writing.outgoing import MAX_MESSAGE_GROUP, checked_text

_Int64s = npt.NDArray[np.int64]
_Int32s = npt.NDArray[np.int32]
_Bools = npt.NDArray[np.bool_]

_SLICE_ROWS = 16_384
_SLICE_BYTES = 64 << 20
"""Limit of bodies. Arrow counts the bytes of an array in 32 bits, and a slice is in memory three times meanwhile."""


class Encoded(NamedTuple):
    data: memoryview
    """Contiguous records."""
    sizes: _Int64s
    """Size of each record in bytes."""
    queues: dict[QueueRef, int]
    """Number of records by queue."""
    topics: dict[str, TopicRule | None]
    """Topics that the records go to, at once or after a delay, each with its rule. None for engine topics."""

    @property
    def records(self) -> int:
        return len(self.sizes)


# -- identity ----------------------------------------------------------------------------------------------------------

_ROW_DIGITS: Final = 10


def _digest(app: str, version: int, partition: int) -> bytes:
    return hashlib.blake2b(f"{app}\0{version}\0{partition}".encode(), digest_size=16).digest()


def derived_prefix(app: str, version: int, partition: int) -> str:
    """Return the first 24 of the 34 digits of a derived unique key: "01", like keys of 5.x clients, and a hash.
    The other ten digits are the row number."""
    return "01" + _digest(app, version, partition).hex().upper()[: 34 - 2 - _ROW_DIGITS]


# -- the encoder -------------------------------------------------------------------------------------------------------

_HEADER: Final = header_dtype(IPV4_BYTES, IPV4_BYTES)

# As scalars of Arrow: from bytes it would infer the type each time, for which it searches modules on disk.
_NAME_END, _PAIR_END, _NOTHING = (pa.scalar(each, pa.binary()) for each in (b"\x01", b"\x02", b""))

_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_MADE_FOR: Final = ", ".join(f"{each.property}: {name}" for name, each in INPUTS.items() if each.property)
_REFUSED: Final = pa.array(sorted(props.REFUSED))


class Encoder:
    """Encoder of the rows of one task, batch by batch. It counts the rows.
    The same rows in the same order, for the same (app, version, partition), give the same queues and unique keys."""

    def __init__(
        self,
        rules: Rules,
        *,
        app: str,
        version: int,
        partition: int,
        topic: str | None = None,
        max_rows: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`topic` takes precedence over the column. A piece has at most `max_rows` rows."""
        self.rules = rules
        self.partition = partition
        self.row = 0
        """Number of rows encoded so far."""
        self.topic = topic
        self._max_rows = min(max_rows or _SLICE_ROWS, _SLICE_ROWS)
        self.clock = clock
        self.prefix = np.frombuffer(derived_prefix(app, version, partition).encode(), np.uint8)
        first_turn = int.from_bytes(_digest(app, version, partition)[-4:], "big")
        self.turns: dict[str, int] = defaultdict(lambda: first_turn)
        """Next queue of each topic in round-robin order. Topics that alternate would fill only half of a shared one."""
        self.called: Mapping[str, str] = {}
        """Names of columns in errors, if the frame had them under other names."""

    def encode(self, batch: Any) -> Iterator[Encoded]:
        """Yield the records of a RecordBatch whose columns have passed `check_columns`, in pieces.
        Raises InvalidMessageError for a row. Then nothing of the row's piece is returned."""
        columns = {each.name: small(batch.column(i)) for i, each in enumerate(batch.schema)}
        self.called = {}
        if is_kafka(columns):
            columns = _from_kafka(columns)
            self.called = {here: name for name, here in KAFKA.items()} | {"sharding_key": "key"}
        start = 0
        kind = _Copies if "record" in columns else _Slice
        ends = np.cumsum(sizes_of(columns["record" if "record" in columns else "body"]))
        while start < len(batch):
            before = int(ends[start - 1]) if start else 0
            stop = min(start + self._max_rows, int(np.searchsorted(ends, before + _SLICE_BYTES, "right")))
            stop = min(max(stop, start + 1), len(batch))
            rows = stop - start
            yield kind(self, {name: each.slice(start, rows) for name, each in columns.items()}, rows).encode()
            self.row += rows
            start = stop


class _Slice:
    """Rows that are being encoded."""

    def __init__(self, encoder: Encoder, columns: Mapping[str, Any], rows: int) -> None:
        self._encoder = encoder
        self._rules = encoder.rules
        self._columns = columns
        self._rows = rows
        self._now_ms = encoder.clock.now_ms()
        self._found: dict[str, TopicRule | None] = {}
        """Topics in order of appearance, by which rows are numbered. Engine topics come last."""

    def encode(self) -> Encoded:
        body = self._body()
        topics = self._topics()
        groups = self._text("sharding_key")
        queues = self._queues(topics, groups)
        parts, sizes = self._properties(topics, queues, groups)
        topic, magics = self._topic_pieces(topics)
        header = self._header(magics, queues, sizes_of(body), sizes_of(topic), sizes)
        joined = pc.binary_join_element_wise(fixed(header), body, topic, fixed(sizes.astype(">i2")), *parts, _NOTHING)
        data, edges = flat(joined)
        total = header["size"]
        assert np.array_equal(np.diff(edges), total), "the size of a record is wrong"
        return Encoded(memoryview(data.data), total.astype(np.int64), self._counted(topics, queues), self._found)

    def _properties(self, topics: _Int32s, queues: _Int64s, groups: Any) -> tuple[list[Any], _Int64s]:
        """Return the encoded properties of each row, as columns to be joined, and their total sizes.

        The topic and queue of delayed rows are changed to those in which they wait."""
        entries = self._entries()
        found = {
            props.KEYS: self._keys(),
            props.TAGS: self._text("tags"),
            props.UNIQ_KEY: self._unique(),
            props.SHARDINGKEY: groups,
        }
        texts = {name: values for name, values in found.items() if values is not None}
        parts = [] if entries is None else [entries.bytes]
        parts += [_property(name, values) for name, values in texts.items()]
        delayed = self._delayed()
        if len(delayed):
            parts = self._route(delayed, parts, topics, queues, entries, texts)
        sizes = np.zeros(self._rows, np.int64)
        for part in parts:
            sizes += sizes_of(part)
        self._check_sizes(sizes, props.MAX_PROPERTIES_BYTES, "properties", _LONG)
        return parts, sizes

    def _topic_pieces(self, topics: _Int32s) -> tuple[Any, _Int64s]:
        """Return the topic of each row as in its record, length included, and the magic of the record."""
        names = [name.encode() for name in self._found]
        widths = [1 if len(name) <= record.MAX_TOPIC_BYTES_V1 else 2 for name in names]
        pieces = [len(name).to_bytes(width, "big") + name for name, width in zip(names, widths, strict=True)]
        magics = np.where(np.array(widths) == 1, record.MAGIC_V1, record.MAGIC_V2)
        return pa.array(pieces, pa.binary()).take(topics), magics[topics]

    def _header(
        self, magics: _Int64s, queues: _Int64s, body_sizes: _Int64s, topic_sizes: _Int64s, sizes: _Int64s
    ) -> npt.NDArray[np.void]:
        """Return the fields before the body, given the `sizes` of the properties."""
        total = record.BODY_AT_V4 + body_sizes + topic_sizes + record.PROPERTIES_LENGTH_BYTES + sizes
        self._check_sizes(total, self._rules.max_record_bytes, "body")
        header = np.zeros(self._rows, _HEADER)
        header["size"] = total
        header["magic"] = magics
        header["queue_id"] = queues
        header["flag"] = self._numbers("flag", 0)
        header["born_timestamp_ms"] = self._times("born_timestamp", self._now_ms, up=False)
        header["born_host"] = header["store_host"] = LOCAL_HOST
        header["body_size"] = body_sizes
        return header

    # -- errors ------------------------------------------------------------------------------------------------------

    def _refuse(self, row: int, column: str, value: str, rule: str) -> NoReturn:
        column = self._encoder.called.get(column, column)
        where = f"row {self._encoder.row + row} of partition {self._encoder.partition}, column {column!r}"
        raise InvalidMessageError(": ".join(filter(None, (where, value, rule))), column)

    def _refuse_first(
        self, wrong: _Bools, column: str, value: Callable[[int], object], rule: str, row_of: Callable[[int], int] = int
    ) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            self._refuse(row_of(first), column, str(value(first)), rule)

    def _check_sizes(self, sizes: _Int64s, limit: int, column: str, rule: str = "") -> None:
        """Refuse the first row with more bytes than `limit`."""
        self._refuse_first(sizes > limit, column, lambda i: f"{sizes[i]} bytes", rule or _large(limit))

    def _judged(self, row: int, column: str, judge: Callable[[], Any]) -> Any:
        """Return the result of `judge`. If it refuses, the error names the row."""
        try:
            return judge()
        except MQStoreError as error:
            reason = str(error)
            self._refuse(row, column, "", reason if len(reason) < 500 else f"{reason[:300]} ... {reason[-150:]}")

    def _check(self, values: Any, column: str, row_of: Callable[[int], int] = int) -> None:
        """Refuse the first value that a property, a topic or a group must not have."""
        forbidden, rule = (
            ("|", "use text without '|', and not blank") if column == "tags" else ("", "use text, not blank")
        )
        for i in odd_rows(values, forbidden.encode()):
            row = row_of(i)
            try:
                value = values[i].as_py()
            except UnicodeDecodeError:
                stored = values.slice(i, 1).cast(pa.binary())[0].as_py()
                self._refuse(row, column, f"{stored[:40]!r}", "it is not UTF-8; decode it with its own charset")
            self._judged(row, column, lambda value=value: checked_text(value, column, forbidden, rule))  # type: ignore[misc]

    # -- columns -----------------------------------------------------------------------------------------------------

    def _body(self) -> Any:
        body = self._columns["body"].cast(pa.binary())
        if body.null_count:
            self._refuse_first(nulls(body), "body", lambda _: "null", "a message has a body, which may be empty")
        self._check_sizes(sizes_of(body), self._rules.max_body_bytes, "body")
        return body

    def _topics(self) -> _Int32s:
        """Return the number of each row's topic."""
        if self._encoder.topic is not None:
            self._topic_rule(0, self._encoder.topic)
            return np.zeros(self._rows, np.int32)
        column = self._columns["topic"]
        if column.null_count:
            self._refuse_first(nulls(column), "topic", lambda _: "null", "give each row a topic, or option topic")
        self._check(column, "topic")
        coded = column.dictionary_encode()
        numbers: _Int32s = coded.indices.to_numpy().astype(np.int32)
        for number, name in enumerate(coded.dictionary.to_pylist()):
            self._topic_rule(int(np.argmax(numbers == number)), name)
        return numbers

    def _topic_rule(self, row: int, name: str) -> None:
        self._found[name] = self._judged(row, "topic", lambda: self._rules.topic(name))

    def _queues(self, topics: _Int32s, keys: Any) -> _Int64s:
        rules = [rule for rule in self._found.values() if rule is not None]
        queues = np.full(self._rows, -1, np.int64)
        given = self._columns.get("queue_id")
        if given is not None:
            present = ~nulls(given)
            queues[present] = given.drop_null().to_numpy()
            bound = np.array([rule.queues for rule in rules], np.int64)[topics]
            self._refuse_first(
                present & ((queues < 0) | (queues >= bound)),
                "queue_id",
                lambda i: f"{queues[i]}: the queues of its topic are 0 to {bound[i] - 1}",
                "a topic that is not there yet gets as many as option queues says",
            )
        write = np.array([rule.write_queues for rule in rules], np.int64)[topics]
        if keys is not None:
            rule = f"a message group takes {MAX_MESSAGE_GROUP} at most; hash longer ones: md5(sharding_key)"
            self._check_sizes(sizes_of(keys), MAX_MESSAGE_GROUP, "sharding_key", rule)
            rows = np.flatnonzero((queues < 0) & ~nulls(keys))
            if len(rows):
                queues[rows] = self._group_queues(keys.take(pa.array(rows)), write[rows])
        free = np.flatnonzero(queues < 0)
        for number, name in enumerate(self._found):
            mine = free[topics[free] == number] if len(self._found) > 1 else free
            queues[mine] = (self._encoder.turns[name] + np.arange(len(mine))) % write[mine]
            self._encoder.turns[name] += len(mine)
        return queues

    def _group_queues(self, keys: Any, write: _Int64s) -> _Int64s:
        if self._rules.group_hash != "jump":
            pairs = zip(keys.to_pylist(), write.tolist(), strict=True)
            return np.array([group_queue(key, count, self._rules.group_hash) for key, count in pairs], np.int64)
        return jump_hash_many(java_hash_many(*flat(keys)), write)

    def _text(self, name: str) -> Any:
        """Return a column of text, checked, or None if the frame lacks it."""
        values = self._columns.get(name)
        if values is None or values.null_count == len(values):
            return None
        self._check(values, name)
        return values

    def _keys(self) -> Any:
        values = self._columns.get("keys")
        if values is None or pa.types.is_string(values.type):
            return self._text("keys")
        words = small(pc.list_flatten(values))
        row_of = pc.list_parent_indices(values).to_numpy().item
        self._refuse_first(nulls(words), "keys", lambda _: "null", "leave it out of the array: filter()", row_of)
        self._check(words, "keys", row_of)
        blank = pc.match_substring(words, " ").to_numpy(zero_copy_only=False)
        self._refuse_first(
            blank, "keys", lambda i: repr(words[i].as_py()[:40]), "a key of an array has no blanks", row_of
        )
        joined = pc.binary_join(values.cast(pa.list_(pa.string())), " ")
        return pc.if_else(pc.equal(pc.binary_length(joined), 0), pa.scalar(None, pa.string()), joined)

    def _unique(self) -> Any:
        """Return the column, with derived keys in its gaps."""
        given = self._text("unique_key")
        if given is not None and not given.null_count:
            return given
        rows = self._rows
        digits = np.empty((rows, 34), np.uint8)
        digits[:, :-_ROW_DIGITS] = self._encoder.prefix
        numbers = np.arange(self._encoder.row, self._encoder.row + rows, dtype=">u8").tobytes().hex().upper()
        digits[:, -_ROW_DIGITS:] = np.frombuffer(numbers.encode(), np.uint8).reshape(rows, 16)[:, -_ROW_DIGITS:]
        derived = fixed(digits).cast(pa.string())
        return derived if given is None else pc.coalesce(given, derived)

    def _entries(self) -> _Entries | None:
        column = self._columns.get("properties")
        if column is None or column.null_count == len(column):
            return None
        entries = _Entries(column)
        if self._encoder.called:  # a map of Spark's has each name once
            rule = "a name is repeated, and a property has one value; keep one of them"
            self._refuse_first(entries.repeated(), "properties", lambda _: "", rule)
        for values in (entries.names, entries.values):
            self._check(values, "properties", entries.rows.item)
        reserved = pc.or_(pc.is_in(entries.names, _REFUSED), pc.starts_with(entries.names, props.TRANSIENT_PREFIX))
        self._refuse_first(
            reserved.to_numpy(zero_copy_only=False),
            "properties",
            lambda i: repr(entries.names[i].as_py()),
            f"the name is reserved; use a column ({_MADE_FOR}), or column 'record', which copies whole messages",
            entries.rows.item,
        )
        return entries

    def _numbers(self, name: str, default: int) -> _Int64s:
        values = self._columns.get(name)
        if values is None:
            return np.full(self._rows, default, np.int64)
        found: _Int64s = values.cast(pa.int64()).fill_null(default).to_numpy()
        return found

    def _times(self, name: str, default_ms: int, *, up: bool) -> _Int64s:
        """Return a column of times in ms, each rounded down, or `up`."""
        values = self._columns.get(name)
        if values is None:
            return np.full(self._rows, default_ms, np.int64)
        raw = values.cast(pa.timestamp("us")).cast(pa.int64()).fill_null(0).to_numpy()  # Spark's unit
        times = -(-raw // 1000) if up else raw // 1000
        return cast(_Int64s, np.where(nulls(values), default_ms, times))

    # -- delayed rows ------------------------------------------------------------------------------------------------

    def _delayed(self) -> npt.NDArray[np.intp]:
        """Return the rows that are delayed. Refuses two delays in a row."""
        delayed = np.zeros(self._rows, np.bool_)
        given = [~nulls(self._columns[name]) for name in _DELAYS if name in self._columns]
        if given:
            rule = f"of {', '.join(_DELAYS)} only one"
            self._refuse_first(np.sum(given, axis=0) > 1, "delay_level", lambda _: "not alone", rule)
        rule = f"a delay is 0 or more; max_delay allows {self._rules.max_delay_ms // 1000} seconds"
        for name in ("delay_level", "delay_seconds"):
            numbers = self._numbers(name, 0)
            self._refuse_first((numbers < 0) | (numbers >= _TOO_LONG), name, numbers.item, rule)
            delayed |= numbers > 0
        if "deliver_time" in self._columns:
            delayed |= ~nulls(self._columns["deliver_time"])
        return np.flatnonzero(delayed)

    def _route(
        self,
        delayed: npt.NDArray[np.intp],
        parts: list[Any],
        topics: _Int32s,
        queues: _Int64s,
        entries: _Entries | None,
        texts: Mapping[str, Any],
    ) -> list[Any]:
        """Give delayed rows the topic, queue and properties that a put would give them.

        Changes `topics` and `queues`, and inserts the properties before the other parts."""
        names, rules = list(self._found), self._rules
        numbers = {name: number for number, name in enumerate(names)}
        # Topic and queue of a record with these properties, as in `Router.route` (delivery#level-put).
        route = partial(delay_route, now_ms=lambda: self._now_ms, levels=rules.levels, max_delay_ms=rules.max_delay_ms)
        levels, waits = self._numbers("delay_level", 0), self._numbers("delay_seconds", 0)
        times = self._times("deliver_time", -1, up=True)
        replaced: list[bytes] = []
        for row in delayed.tolist():
            stored = entries.of(row) if entries is not None else {}
            for name, values in texts.items():
                value = values[row].as_py()
                if value is not None:
                    stored[name] = value
            if levels[row]:
                column, stored[props.DELAY] = "delay_level", str(levels[row])
            elif waits[row]:
                column, stored[props.TIMER_DELAY_SEC] = "delay_seconds", str(waits[row])
            else:
                column, stored[props.TIMER_DELIVER_MS] = "deliver_time", str(times[row])
            place = names[topics[row]], int(queues[row])
            routed = self._judged(row, column, partial(route, *place, stored))
            topic, queue_id, stored = routed or (*place, stored)
            replaced.append(self._judged(row, "properties", partial(props.encode_properties, stored)))
            topics[row] = numbers.setdefault(topic, len(numbers))
            queues[row] = queue_id
        for topic in numbers:
            self._found.setdefault(topic, None)
        mask = np.zeros(self._rows, np.bool_)
        mask[delayed] = True
        cleared = [pc.if_else(pa.array(mask), _NOTHING, part) for part in parts]
        whole = pc.replace_with_mask(cleared[0], pa.array(mask), pa.array(replaced, pa.binary()))
        return [whole, *cleared[1:]]

    def _counted(self, topics: _Int32s, queues: _Int64s) -> dict[QueueRef, int]:
        names = list(self._found)
        pairs, counts = np.unique(topics.astype(np.int64) << 32 | queues, return_counts=True)
        return {
            QueueRef(names[pair >> 32], pair & 0xFFFF_FFFF): number
            for pair, number in zip(pairs.tolist(), counts.tolist(), strict=True)
        }


class _Copies(_Slice):
    """Rows that are stored records, copied as bytes except for fields that depend on their position.

    given       topic and queue id, if the row or the option names others
    zero        queueOffset, physicalOffset, storeTimestamp, checksum, as in each staged record. The store time is the
                target's: retention and searches by time rely on times that do not step back within a log
    left out    a CRC tail (format#crc-tail), which would be wrong
    """

    def encode(self) -> Encoded:
        stored = self._columns["record"]
        self._refuse_first(nulls(stored), "record", lambda _: "null", "its message was damaged; leave such rows out")
        data, edges = flat(stored)
        headers = self._gather(data.data, edges)
        own = text(cut(data, headers.topic_position, headers.topic_position + headers.topic_size))
        tails = has_crc_tail(data.data, headers)
        property_sizes = headers.properties_size - np.where(tails, props.CRC_TAIL_BYTES, 0)
        properties = cut(data, headers.properties_position, headers.properties_position + property_sizes)
        self._refuse_unfit(headers, own, properties, _origin(data.data, headers))
        places = {"topic": own, "queue_id": pa.array(headers.queue_id)}
        given = {name: values for name, values in self._columns.items() if name in places}
        self._columns = places | {name: pc.coalesce(values, places[name]) for name, values in given.items()}
        topics = self._topics()
        queues = self._queues(topics, None)
        topic_at = headers.topic_position - np.where(headers.magic == record.MAGIC_V2, 2, 1)
        lengths = fixed(property_sizes.astype(">i2"))
        topic, magics = self._topic_pieces(topics)
        parts = (cut(data, headers.positions, topic_at), topic, lengths, properties)
        data, edges = flat(pc.binary_join_element_wise(*parts, _NOTHING))
        data, starts, sizes = data.copy(), edges[:-1].astype(np.int64), np.diff(edges).astype(np.int64)
        self._check_sizes(sizes, self._rules.max_record_bytes, "record")
        everywhere(data, ">i4")[starts + record.TOTAL_SIZE_AT] = sizes
        everywhere(data, ">i4")[starts + record.MAGIC_AT] = magics
        everywhere(data, ">i4")[starts + record.CHECKSUM_AT] = 0
        everywhere(data, ">i4")[starts + record.QUEUE_ID_AT] = queues
        everywhere(data, ">i8")[starts + record.QUEUE_OFFSET_AT] = 0
        everywhere(data, ">i8")[starts + record.PHYSICAL_OFFSET_AT] = 0
        everywhere(data, ">i8")[starts + record.STORE_TIMESTAMP_AT_V4 + (headers.born_host_size - IPV4_BYTES)] = 0
        return Encoded(memoryview(data.data), sizes, self._counted(topics, queues), self._found)

    def _gather(self, data: memoryview, edges: _Int32s) -> Headers:
        """Return the fields of the records that fill `data`. Refuses damaged records and other bytes."""
        sizes = np.diff(edges)
        rule = "it is not a record: its lengths do not add up"
        self._refuse_first(sizes < record.MIN_RECORD_BYTES, "record", lambda i: f"{sizes[i]} bytes", rule)
        headers = Headers(data, edges[:-1])
        self._refuse_first(~headers.ok | (headers.size != sizes), "record", lambda i: f"{sizes[i]} bytes", rule)
        holds = verify(data, headers, "crc32c-record")
        if not holds.all():  # the bytes do not show their profile. Without a body `crc32-body` is 0
            holds |= verify(data, headers, "crc32-body") & ((headers.body_size > 0) | (headers.checksum == 0))
        self._refuse_first(~holds, "record", _origin(data, headers), "it is damaged: its checksum is wrong")
        return headers

    def _refuse_unfit(self, headers: Headers, topics: Any, properties: Any, origin: Callable[[int], str]) -> None:
        """Refuse sound records that are not messages of a user, or that the target cannot number."""
        engines = pa.array([name for name in pc.unique(topics).to_pylist() if is_system_topic(name)], pa.string())
        mark = headers.sys_flag & record.TRANSACTION_MASK
        limit = self._rules.max_body_bytes
        for wrong, rule in (
            (
                pc.is_in(topics, engines).to_numpy(zero_copy_only=False),
                "its topic belongs to the engine; messages waiting there are copied when they are delivered",
            ),
            ((mark != 0) & (mark != record.TRANSACTION_COMMIT), "its transaction is not committed"),
            (headers.sys_flag & record.INNER_BATCH != 0, "it is a batch in one record; copy its messages by `body`"),
            (headers.body_size > limit, f"its body is too large; {_large(limit)}"),
        ):
            self._refuse_first(wrong, "record", origin, rule)
        for row in np.flatnonzero(pc.match_substring(properties, "INNER_").to_numpy(zero_copy_only=False)).tolist():
            blob = properties[row].as_py()
            wrong = record.unreadable_number(b"", blob)
            if props.INNER_MULTI_DISPATCH in props.decode_properties(blob):
                wrong = "it is also in light queues, with offsets of its own store"
            if wrong:
                self._refuse(row, "record", origin(row), wrong)


class _Entries:
    """Entries of a column of maps, concatenated, and the stored properties built from them."""

    def __init__(self, column: Any) -> None:
        pair = [("key", column.type.key_type), ("value", column.type.item_type)]
        lists = column.view(pa.list_(pa.struct(pair)))
        entries = pc.list_flatten(lists)
        self._column = column
        self.rows = pc.list_parent_indices(lists).to_numpy()
        """Row of each entry."""
        self.names, self.values = (small(pc.struct_field(entries, i)) for i in (0, 1))

    @property
    def bytes(self) -> Any:
        """Stored properties, one value for each row. The end of one row's entries is the start of the next one's."""
        names, values = self.names.cast(pa.binary()), self.values.cast(pa.binary())
        pieces = pc.binary_join_element_wise(names, _NAME_END, values, _PAIR_END, _NOTHING)
        data, edges = flat(pieces.fill_null(_NOTHING) if pieces.null_count else pieces)
        count = len(self._column)
        ends = edges[np.append(0, np.bincount(self.rows, minlength=count).cumsum())]
        return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])

    def of(self, row: int) -> dict[str, str]:
        return {name: value for name, value in self._column[row].as_py() or () if value is not None}

    def repeated(self) -> _Bools:
        """Return a mask of the rows that have a name more than once."""
        names = self.names.dictionary_encode().indices.to_numpy().astype(np.int64)
        _, first = np.unique(self.rows * max(1, len(names)) + names, return_index=True)
        return np.bincount(np.delete(self.rows, first), minlength=len(self._column)) > 0


def _property(name: str, values: Any) -> Any:
    """Return the stored property of each value, and an empty value for a null."""
    start = pa.scalar(f"{name}\x01".encode(), pa.binary())
    piece = pc.binary_join_element_wise(start, values.cast(pa.binary()), _PAIR_END, _NOTHING)
    return piece.fill_null(_NOTHING) if piece.null_count else piece


def _from_kafka(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a frame for Spark's Kafka sink under the names of this module.
    The key of a message is also its message group, so messages of a key keep their order. Bytes are viewed as text
    without a check. Each text is checked later, with its row."""
    found = {KAFKA[name]: values for name, values in columns.items()}
    if "keys" in found:
        found["keys"] = found["sharding_key"] = found["keys"].view(pa.string())
    if "properties" in found:
        headers = found["properties"].cast(_HEADERS)
        if pc.struct_field(pc.list_flatten(headers), "key").null_count:
            raise InvalidMessageError("column 'headers': a header has no name; leave it out with filter()", "headers")
        found["properties"] = headers.view(pa.map_(pa.string(), pa.string()))
    return found


def _origin(data: memoryview, headers: Headers) -> Callable[[int], str]:
    """Return a function that describes, for an error message, the origin of a row's record."""

    def origin(row: int) -> str:
        at = int(headers.topic_position[row])
        topic = str(data[at : at + int(headers.topic_size[row])], "utf-8", "replace")
        return f"{topic}, queue {headers.queue_id[row]}, offset {headers.queue_offset[row]}"

    return origin


_DELAYS: Final = ("delay_level", "deliver_time", "delay_seconds")
_TOO_LONG: Final = 10**18
"""Limit in seconds. A property with a longer delay is read as no delay."""
_LONG: Final = f"properties, including columns stored as such, take {props.MAX_PROPERTIES_BYTES} bytes at most"


def _large(limit: int) -> str:
    return (
        f"a message has at most {limit} bytes here, with topic and properties (max_message_size, or the size of a "
        "segment of the target); store large bodies elsewhere, and send their address"
    )
