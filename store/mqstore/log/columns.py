"""Messages as columns: numbers as numpy arrays, texts and bodies as Arrow large-binary pairs (client-semantics B.3).

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
from mqstore.layout.record import COMPRESSED
from mqstore.layout.scan import Headers, gather

__all__ = ["NAMES", "Binary", "Columns", "columns_of"]

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Binary:
    """Variable-length values laid end to end: value i is `data[offsets[i]:offsets[i + 1]]`. Arrow's large binary.

    `valid` marks values that are there at all; None: all are.
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
        return [self[i] for i in range(len(self))]


Column = npt.NDArray[Any] | Binary | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Columns(Mapping[str, Column]):
    """Arrays of equal length by column name. `next_offset`: the queue offset to go on at."""

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


_Stretch = tuple[mmap.mmap, Headers, _Int64s]
"""Buffer, headers, tags codes of consecutive messages in one segment."""


def _numbers(name: str) -> Callable[[list[_Stretch]], Column]:
    def column(stretches: list[_Stretch]) -> Column:
        parts = [getattr(headers, name) for _, headers, _ in stretches]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return column


def _tags_code(stretches: list[_Stretch]) -> Column:
    return np.concatenate([tags for _, _, tags in stretches])


def _bytes_at(buffer: mmap.mmap, starts: _Int64s, sizes: _Int64s) -> npt.NDArray[np.uint8]:
    """The bytes [starts, starts + sizes) of `buffer`, end to end, copied."""
    size = int(sizes[0])
    if bool((sizes == size).all()):
        data = np.frombuffer(buffer, np.uint8)
        rows = np.lib.stride_tricks.as_strided(data, (len(data) - size + 1, size), (1, 1), writeable=False)
        return rows[starts].reshape(-1)
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


def _body(stretches: list[_Stretch]) -> Column:
    compressed = any(bool((headers.sys_flag & COMPRESSED).any()) for _, headers, _ in stretches)
    if compressed:
        bodies: list[str | bytes | None] = []
        for buffer, headers, _ in stretches:
            ends = headers.body_position + headers.body_size
            for start, end, flag in zip(
                headers.body_position.tolist(), ends.tolist(), headers.sys_flag.tolist(), strict=True
            ):
                stored = buffer[start:end]
                bodies.append(inflate(flag, stored) if flag & COMPRESSED else stored)
        return _of_values(bodies)
    parts = [_bytes_at(buffer, headers.body_position, headers.body_size) for buffer, headers, _ in stretches]
    return _binary(parts, np.concatenate([headers.body_size for _, headers, _ in stretches]).astype(np.int64))


def _properties(stretches: list[_Stretch]) -> list[dict[str, str]]:
    decoded: list[dict[str, str]] = []
    seen: dict[bytes, dict[str, str]] = {}
    for buffer, headers, _ in stretches:
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


def _property(name: str) -> Callable[[list[_Stretch]], Column]:
    def column(stretches: list[_Stretch]) -> Column:
        return _of_values([properties.get(name) for properties in _properties(stretches)])

    return column


def _hosts(*, store: bool) -> Callable[[list[_Stretch]], list[bytes]]:
    def hosts(stretches: list[_Stretch]) -> list[bytes]:
        found = []
        for buffer, headers, _ in stretches:
            at = headers.positions + (56 + headers.born_host_size if store else 48)
            sizes = headers.store_host_size if store else headers.born_host_size
            found += [buffer[a:b] for a, b in zip(at.tolist(), (at + sizes).tolist(), strict=True)]
        return found

    return hosts


def _host_column(*, store: bool) -> Callable[[list[_Stretch]], Column]:
    raw = _hosts(store=store)

    def column(stretches: list[_Stretch]) -> Column:
        names: dict[bytes, str] = {}
        hosts = raw(stretches)
        for host in set(hosts):
            names[host] = decode_host(host)
        return _of_values([names[host] for host in hosts])

    return column


def _message_id(stretches: list[_Stretch]) -> Column:
    hosts = _hosts(store=True)(stretches)
    offsets = np.concatenate([headers.physical_offset for _, headers, _ in stretches]).tolist()
    return _of_values([encode_message_id(host, at) for host, at in zip(hosts, offsets, strict=True)])


_MAKERS: dict[str, Callable[[list[_Stretch]], Column]] = {
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
"""Every column, in the order of client-semantics B.2."""


def columns_of(
    topic: str,
    queue_id: int,
    stretches: Sequence[tuple[mmap.mmap, _Int64s, _Int64s]],
    slots: _Int64s,
    next_offset: int,
    columns: Sequence[str] | None,
) -> Columns:
    """The columns of the records in `stretches` (buffer, starts, tags codes), whose queue offsets are `slots`."""
    wanted = NAMES if columns is None else tuple(columns)
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ConfigError(f"no column {', '.join(map(repr, unknown))}; there are {', '.join(NAMES)}")
    count = len(slots)
    ready: list[_Stretch] = [(buffer, gather(buffer, starts), tags) for buffer, starts, tags in stretches]
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
            arrays[name] = _MAKERS[name](ready)
        else:
            arrays[name] = [] if name == "properties" else np.zeros(0, np.int64)
    return Columns(arrays, count, next_offset)
