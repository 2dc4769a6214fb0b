"""Messages as columns: numbers as numpy arrays, texts and bodies as Arrow large-binary pairs.

A column is computed for thousands of messages by a few array operations, and only if it is asked for. Cost classes:
slots and units cost 20 bytes a message, header fields a cache line, bodies their bytes, properties a parse.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mqstore.errors import ConfigError
from mqstore.layout.compression import inflate
from mqstore.layout.hosts import decode_host
from mqstore.layout.messageid import encode_message_id
from mqstore.layout.properties import KEYS, TAGS, UNIQ_KEY, decode_properties
from mqstore.layout.record import BODY_AT_V4, COMPRESSED
from mqstore.layout.scan import Headers
from mqstore.log.stretch import Stretch
from mqstore.native import kernel

__all__ = ["NAMES", "Binary", "Columns", "columns_of"]

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Binary:
    """Variable-length values laid end to end: value i is `data[offsets[i]:offsets[i + 1]]`. Arrow's large binary.

    `valid` marks values that are there at all; None: all are.

    >>> texts = Binary(np.array([0, 2, 2, 5]), np.frombuffer(b"abcde", np.uint8))
    >>> len(texts), texts[2], texts.tolist()
    (3, b'cde', [b'ab', b'', b'cde'])
    """

    offsets: _Int64s
    data: npt.NDArray[np.uint8]
    valid: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> bytes | None:
        if self.valid is not None and not self.valid[i]:
            return None
        return self.data[self.offsets[i] : self.offsets[i + 1]].tobytes()

    def tolist(self) -> list[bytes | None]:
        """Each value as bytes, None where there is none."""
        return [self[i] for i in range(len(self))]


Column = npt.NDArray[Any] | Binary | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Columns(Mapping[str, Column]):
    """Arrays of equal length by column name. `next_offset`: the queue offset to go on at.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     _ = store.put_many("t", [b"a", b"bc"], queue_id=0)
    ...     columns = store.read_columns("t", 0, 0, 100, columns=("queue_offset", "body"))
    ...     columns["queue_offset"].tolist(), columns["body"].tolist(), columns.count, columns.next_offset
    ([0, 1], [b'a', b'bc'], 2, 2)
    """

    arrays: dict[str, Column]
    count: int
    next_offset: int = field(compare=False)

    def __getitem__(self, name: str) -> Column:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        """Number of columns; the number of messages is `count`."""
        return len(self.arrays)


def _headers(stretches: Sequence[Stretch]) -> Iterator[Headers]:
    return (stretch.headers for stretch in stretches)


def _records(stretches: Sequence[Stretch]) -> Iterator[tuple[mmap.mmap | bytes, Headers]]:
    return ((stretch.buffer, stretch.headers) for stretch in stretches)


def _numbers(name: str) -> Callable[[Sequence[Stretch]], Column]:
    def column(stretches: Sequence[Stretch]) -> Column:
        parts = [getattr(stretch.headers, name) for stretch in stretches]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return column


def _tags_code(stretches: Sequence[Stretch]) -> Column:
    return np.concatenate([stretch.tags_codes for stretch in stretches])


def _bytes_at(buffer: mmap.mmap | bytes, starts: _Int64s, sizes: _Int64s) -> npt.NDArray[np.uint8]:
    """The bytes [starts, starts + sizes) of `buffer`, end to end, copied."""
    size = int(sizes[0])
    if bool((sizes == size).all()):
        if not size:
            return np.zeros(0, np.uint8)
        everywhere: npt.NDArray[np.void] = np.ndarray((len(buffer) - size + 1,), f"V{size}", buffer, 0, (1,))
        return everywhere[starts].view(np.uint8)
    if kernel is not None:
        joined = np.empty(int(sizes.sum()), np.uint8)
        kernel.join(buffer, starts, sizes, joined)
        return joined
    pieces = [buffer[a:b] for a, b in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]
    return np.frombuffer(b"".join(pieces), np.uint8)


def _binary(
    parts: Sequence[npt.NDArray[np.uint8]], sizes: _Int64s, valid: npt.NDArray[np.bool_] | None = None
) -> Binary:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return Binary(offsets, parts[0] if len(parts) == 1 else np.concatenate(parts), valid)


def _of_values(values: Sequence[str | bytes | None]) -> Binary:
    encoded = [b"" if v is None else v.encode("utf-8", "surrogateescape") if isinstance(v, str) else v for v in values]
    sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
    valid = None if None not in values else np.fromiter((v is not None for v in values), np.bool_, len(values))
    return _binary([np.frombuffer(b"".join(encoded), np.uint8)], sizes, valid)


def _body(stretches: Sequence[Stretch]) -> Column:
    if all(bool(stretch.plain.all()) for stretch in stretches):
        # Then bodies lie at a fixed place, and no length inside the records has to be followed.
        sizes = [stretch.plain_sizes for stretch in stretches]
        pieces = [
            stretch.bodies
            if stretch.bodies is not None
            else _bytes_at(stretch.buffer, stretch.starts + BODY_AT_V4, size)
            for stretch, size in zip(stretches, sizes, strict=True)
        ]
        return _binary(pieces, np.concatenate(sizes))
    compressed = any(bool((headers.sys_flag & COMPRESSED).any()) for headers in _headers(stretches))
    if compressed:
        bodies: list[str | bytes | None] = []
        for buffer, headers in _records(stretches):
            ends = headers.body_position + headers.body_size
            for start, end, flag in zip(
                headers.body_position.tolist(), ends.tolist(), headers.sys_flag.tolist(), strict=True
            ):
                stored = buffer[start:end]
                bodies.append(inflate(flag, stored) if flag & COMPRESSED else stored)
        return _of_values(bodies)
    parts = [_bytes_at(buffer, headers.body_position, headers.body_size) for buffer, headers in _records(stretches)]
    return _binary(parts, np.concatenate([headers.body_size for headers in _headers(stretches)]).astype(np.int64))


def _properties(stretches: Sequence[Stretch]) -> list[dict[str, str]]:
    decoded: list[dict[str, str]] = []
    seen: dict[bytes, dict[str, str]] = {}
    for buffer, headers in _records(stretches):
        ends = headers.properties_position + headers.properties_size
        for start, end in zip(headers.properties_position.tolist(), ends.tolist(), strict=True):
            blob = buffer[start:end]
            value = seen.get(blob)
            if value is None:
                value = decode_properties(blob)
                if len(seen) < 4096:
                    seen[blob] = value
            decoded.append(value)
    return decoded


def _property(name: str) -> Callable[[Sequence[Stretch]], Column]:
    def column(stretches: Sequence[Stretch]) -> Column:
        return _of_values([properties.get(name) for properties in _properties(stretches)])

    return column


def _hosts(*, store: bool) -> Callable[[Sequence[Stretch]], list[bytes]]:
    def hosts(stretches: Sequence[Stretch]) -> list[bytes]:
        found = []
        for buffer, headers in _records(stretches):
            at = headers.positions + (56 + headers.born_host_size if store else 48)
            sizes = headers.store_host_size if store else headers.born_host_size
            found += [buffer[a:b] for a, b in zip(at.tolist(), (at + sizes).tolist(), strict=True)]
        return found

    return hosts


def _host_column(*, store: bool) -> Callable[[Sequence[Stretch]], Column]:
    raw = _hosts(store=store)

    def column(stretches: Sequence[Stretch]) -> Column:
        names: dict[bytes, str] = {}
        hosts = raw(stretches)
        for host in set(hosts):
            names[host] = decode_host(host)
        return _of_values([names[host] for host in hosts])

    return column


def _message_id(stretches: Sequence[Stretch]) -> Column:
    hosts = _hosts(store=True)(stretches)
    offsets = np.concatenate([headers.physical_offset for headers in _headers(stretches)]).tolist()
    return _of_values([encode_message_id(host, at) for host, at in zip(hosts, offsets, strict=True)])


_MAKERS: dict[str, Callable[[Sequence[Stretch]], Column]] = {
    "physical_offset": _numbers("physical_offset"),
    "size": _numbers("size"),
    "body": _body,
    "tags": _property(TAGS),
    "keys": _property(KEYS),
    "properties": _properties,
    "flag": _numbers("flag"),
    "sys_flag": _numbers("sys_flag"),
    "born_timestamp_ms": _numbers("born_timestamp_ms"),
    "born_host": _host_column(store=False),
    "store_timestamp_ms": _numbers("store_timestamp_ms"),
    "store_host": _host_column(store=True),
    "reconsume_times": _numbers("reconsume_times"),
    "prepared_transaction_offset": _numbers("prepared_transaction_offset"),
    "message_id": _message_id,
    "unique_key": _property(UNIQ_KEY),
    "tags_code": _tags_code,
}
NAMES = ("topic", "queue_id", "queue_offset", *_MAKERS)
"""Every column, in the order of clients#message-names."""
_INT32 = frozenset({"size", "flag", "sys_flag", "reconsume_times"})
_INT64 = frozenset(
    {"physical_offset", "born_timestamp_ms", "store_timestamp_ms", "prepared_transaction_offset", "tags_code"}
)


def _empty(name: str) -> Column:
    """The column of no message, of the same kind as any other."""
    if name == "properties":
        return []
    if name in _INT64:
        return np.zeros(0, np.int64)
    if name in _INT32:
        return np.zeros(0, np.int32)
    return _of_values([])


def columns_of(
    topic: str, queue_id: int, stretches: Sequence[Stretch], next_offset: int, columns: Sequence[str] | None
) -> Columns:
    """The columns of the messages in `stretches`, which are of one queue."""
    wanted = NAMES if columns is None else tuple(columns)
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ConfigError(f"no column {', '.join(map(repr, unknown))}; there are {', '.join(NAMES)}")
    stretches = [stretch for stretch in stretches if len(stretch)]
    slots = np.concatenate([np.zeros(0, np.int64), *(stretch.slots for stretch in stretches)])
    count = len(slots)
    arrays: dict[str, Column] = {}
    for name in wanted:
        if name == "topic":
            data = np.frombuffer(topic.encode("utf-8", "surrogateescape") * count, np.uint8)
            width = len(data) // count if count else 0
            arrays[name] = Binary(np.arange(count + 1, dtype=np.int64) * width, data)
        elif name == "queue_id":
            arrays[name] = np.full(count, queue_id, np.int32)
        elif name == "queue_offset":
            arrays[name] = slots
        elif count:
            arrays[name] = _MAKERS[name](stretches)
        else:
            arrays[name] = _empty(name)
    return Columns(arrays, count, next_offset)
