"""Stored records as records of another store: copied as bytes, changed where they must be (spark.md B7).

    kept      body as stored, properties, flag, sysFlag, bornTimestamp, bornHost, reconsumeTimes, preparedOffset
    given     queueId by the target's queues; storeHost, as a put of the target has it; topic where it is renamed;
              pairs of properties in front of the others where a job marks its copies
    zero      queueOffset, physicalOffset, storeTimestamp, checksum: whoever splices a shard knows them
    left out  a CRC tail (2.5), which would be of the record that it was

Where neither topic nor properties change, records are cut out of the mapped log in one pass and a few of their fields
written over, all with numpy. Else they are joined anew from the same bytes: head and body, topic, properties. Only a
record that already bears a property which it is to get is taken apart. No record is ever decoded to text.

A copy that the target would refuse is refused here, by name, before anything is published. Knows no Spark, no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as error:  # pragma: no cover
    raise ImportError("copying records needs pyarrow: pip install 'mqstore[spark]', or pyarrow alone") from error

from mqstore.broker.selection import GroupHash, group_queue
from mqstore.errors import InvalidMessageError
from mqstore.layout.hosts import IPV4_BYTES, LOCAL_HOST
from mqstore.layout.properties import (
    CRC32,
    CRC_TAIL_BYTES,
    MAX_PROPERTIES_BYTES,
    PAIR_END,
    SHARDINGKEY,
    decode_properties,
)
from mqstore.layout.record import (
    CHECKSUM_AT,
    INNER_BATCH,
    MAGIC_AT,
    MAGIC_V1,
    MAGIC_V2,
    MAX_TOPIC_BYTES_V1,
    PHYSICAL_OFFSET_AT,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    STORE_HOST_AT_V4,
    STORE_HOST_V6,
    STORE_TIMESTAMP_AT_V4,
    TOTAL_SIZE_AT,
)
from mqstore.layout.scan import Headers
from mqstore.spark.arrow import cut
from mqstore.spark.encode import Encoded
from mqstore.spark.rows import Piece

__all__ = ["Copier", "Spread", "Target"]

_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]

Spread = Literal["queue", "key"]
"""How messages find a queue among other ones: all of a queue into one, or by message group."""
_TAIL_NAME: Final = CRC32.encode()


@dataclass(frozen=True, slots=True)
class Target:
    """Where copies of a topic's messages go. Plain values: it travels to the tasks."""

    topic: str
    queues: int | None = None
    """Spread over so many; None: each stays in the queue with its number."""
    spread: Spread = "queue"
    group_hash: GroupHash = "jump"
    max_body_bytes: int = 1 << 31
    max_record_bytes: int = 1 << 31


class Copier:
    """Makes copies for one target. `mark`: pairs, stored form, that each copy gets in front of its properties;
    `store_time`: the name of a property that says when the original was stored (ms since the epoch)."""

    def __init__(self, target: Target, *, mark: bytes = b"", store_time: str | None = None) -> None:
        self._target = target
        self._mark = mark
        self._store_time = store_time
        names = [pair.partition(b"\x01")[0] + b"\x01" for pair in mark.split(PAIR_END) if pair]
        self._new = tuple(names + ([] if store_time is None else [store_time.encode() + b"\x01"]))
        self._topic = target.topic.encode("utf-8", "surrogateescape")

    def copy(self, piece: Piece, store_id: str, rows: _Bools | None = None) -> Encoded:
        """Copies of those `rows` of a piece of a queue scan (None: all), in their order. The piece has no bad rows.

        InvalidMessageError, naming the original, for one that the target cannot take.
        """
        assert piece.bad is None
        headers = _headers_of(piece)
        chosen = np.arange(len(piece)) if rows is None else np.flatnonzero(rows)
        self._refuse(piece, store_id, chosen)
        queues = self._queues(piece, chosen)
        tails = self._tails(piece, chosen)
        plain = piece.topic == self._target.topic and not self._new and not tails.any()
        joined = self._cut(piece, chosen) if plain else self._join(piece, chosen, tails, store_id)
        data, starts, sizes = _writable(joined)
        moved = (headers.born_host_size[chosen] - IPV4_BYTES).astype(np.int64)
        if not plain:
            _at(data, ">i4", starts + TOTAL_SIZE_AT, sizes)
            _at(data, ">i4", starts + MAGIC_AT, self._magic)
        _at(data, ">i4", starts + CHECKSUM_AT, 0)
        _at(data, ">i4", starts + QUEUE_ID_AT, queues)
        _at(data, ">i8", starts + QUEUE_OFFSET_AT, 0)
        _at(data, ">i8", starts + PHYSICAL_OFFSET_AT, 0)
        _at(data, ">i8", starts + STORE_TIMESTAMP_AT_V4 + moved, 0)
        short = (headers.sys_flag[chosen] & STORE_HOST_V6) == 0  # the others keep the host that they have room for
        _at(data, "V8", (starts + STORE_HOST_AT_V4 + moved)[short], np.void(LOCAL_HOST))
        largest = int(sizes.max(initial=0))
        limit = self._target.max_record_bytes
        if largest > limit:
            self._reject(piece, store_id, int(chosen[int(np.argmax(sizes > limit))]), f"more than {limit} bytes")
        counts = np.bincount(queues) if len(queues) else np.zeros(0, np.int64)
        found = {(self._target.topic, int(queue)): int(counts[queue]) for queue in np.flatnonzero(counts)}
        return Encoded(memoryview(data.data), sizes, found, (self._target.topic,))

    # -- judging ----------------------------------------------------------------------------------------------------

    def _refuse(self, piece: Piece, store_id: str, chosen: npt.NDArray[np.intp]) -> None:
        headers = _headers_of(piece)
        limit = self._target.max_body_bytes
        for wrong, why in (
            (headers.body_size[chosen] > limit, f"the target takes bodies of {limit} bytes at most"),
            (headers.sys_flag[chosen] & INNER_BATCH != 0, "it is a batch in one record, which is not copied"),
        ):
            if wrong.any():
                self._reject(piece, store_id, int(chosen[int(np.argmax(wrong))]), why)

    def _reject(self, piece: Piece, store_id: str, row: int, why: str) -> None:
        raise InvalidMessageError(
            f"{store_id}: {piece.topic}, queue {piece.queue_id}, offset {int(piece.slots[row])} cannot be copied to "
            f"{self._target.topic!r}: {why}; leave it out (where, topics, bounds), or give the target room",
            "record",
        )

    # -- queues -----------------------------------------------------------------------------------------------------

    def _queues(self, piece: Piece, chosen: npt.NDArray[np.intp]) -> _Int64s:
        assert piece.queue_id is not None
        target = self._target
        own = piece.queue_id if target.queues is None else piece.queue_id % target.queues
        queues = np.full(len(chosen), own, np.int64)
        if target.queues is None or target.spread == "queue":
            return queues
        headers = _headers_of(piece)
        starts = headers.properties_position[chosen]
        blobs = cut(piece.buffer, starts, starts + headers.properties_size[chosen])
        name = SHARDINGKEY.encode() + b"\x01"
        for row in np.flatnonzero(pc.match_substring(blobs, name.decode()).to_numpy(zero_copy_only=False)).tolist():
            key = decode_properties(blobs[row].as_py()).get(SHARDINGKEY)
            if key is not None:
                queues[row] = group_queue(key, target.queues, target.group_hash)
        return queues

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _tails(self, piece: Piece, chosen: npt.NDArray[np.intp]) -> _Bools:
        """Which records end in a CRC tail: as the check of a shard has it."""
        headers = _headers_of(piece)
        sizes = headers.properties_size[chosen]
        found = np.zeros(len(chosen), np.bool_)
        long = np.flatnonzero(sizes >= CRC_TAIL_BYTES)
        if len(long):
            at = headers.properties_position[chosen[long]] + sizes[long] - CRC_TAIL_BYTES
            heads = cut(piece.buffer, at, at + len(_TAIL_NAME))
            found[long] = pc.equal(heads, pa.scalar(_TAIL_NAME, pa.binary())).to_numpy(zero_copy_only=False)
        return found

    def _cut(self, piece: Piece, chosen: npt.NDArray[np.intp]) -> Any:
        headers = _headers_of(piece)
        starts = headers.positions[chosen]
        return cut(piece.buffer, starts, starts + headers.size[chosen].astype(np.int64))

    def _join(self, piece: Piece, chosen: npt.NDArray[np.intp], tails: _Bools, store_id: str) -> Any:
        headers = _headers_of(piece)
        length_bytes = np.where(headers.magic[chosen] == MAGIC_V2, 2, 1)
        head = cut(piece.buffer, headers.positions[chosen], headers.topic_position[chosen] - length_bytes)
        at = headers.properties_position[chosen]
        rest = cut(piece.buffer, at, at + headers.properties_size[chosen] - np.where(tails, CRC_TAIL_BYTES, 0))
        rest = self._without_new(rest)
        parts = [] if not self._mark else [pa.scalar(self._mark, pa.binary())]
        sizes = _sizes(rest) + len(self._mark)
        if self._store_time is not None:
            stamps = pa.array(headers.store_timestamp_ms[chosen]).cast(pa.string()).cast(pa.binary())
            name = self._store_time.encode() + b"\x01"
            parts.append(pc.binary_join_element_wise(name, stamps, PAIR_END, b""))
            sizes += _sizes(parts[-1])
        if (sizes > MAX_PROPERTIES_BYTES).any():
            row = int(chosen[int(np.argmax(sizes > MAX_PROPERTIES_BYTES))])
            self._reject(piece, store_id, row, f"its properties would take more than {MAX_PROPERTIES_BYTES} bytes")
        long = len(self._topic) > MAX_TOPIC_BYTES_V1
        topic = len(self._topic).to_bytes(2 if long else 1, "big") + self._topic
        edges = np.arange(len(chosen) + 1, dtype=np.int32) * 2
        lengths = pa.Array.from_buffers(
            pa.binary(), len(chosen), [None, pa.py_buffer(edges), pa.py_buffer(sizes.astype(">i2"))]
        )
        return pc.binary_join_element_wise(head, pa.scalar(topic, pa.binary()), lengths, *parts, rest, b"")

    @property
    def _magic(self) -> int:
        return MAGIC_V2 if len(self._topic) > MAX_TOPIC_BYTES_V1 else MAGIC_V1

    def _without_new(self, blobs: Any) -> Any:
        """Properties without those that the copies get anew: of two of a name the last one counts, which these are."""
        found = np.zeros(len(blobs), np.bool_)
        for name in self._new:
            found |= pc.match_substring(blobs, name.decode()).to_numpy(zero_copy_only=False)
        if not found.any():
            return blobs
        kept = []
        for row in np.flatnonzero(found).tolist():
            pairs = blobs[row].as_py().split(PAIR_END)
            kept.append(PAIR_END.join(pair for pair in pairs if not pair.startswith(self._new)))
        return pc.replace_with_mask(blobs, pa.array(found), pa.array(kept, pa.binary()))


def _headers_of(piece: Piece) -> Headers:
    assert piece.headers is not None, "a queue scan for records has looked at them"
    return piece.headers


def _sizes(values: Any) -> _Int64s:
    sizes: _Int64s = pc.binary_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    return sizes


def _writable(joined: Any) -> tuple[npt.NDArray[np.uint8], _Int64s, _Int64s]:
    """(the bytes of a binary array that was just made, open for writing; where its values begin; their sizes)."""
    count = len(joined)
    if not count:
        return np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64)
    _, offsets, data = joined.buffers()
    edges = np.frombuffer(offsets, np.int32, count + 1, joined.offset * 4).astype(np.int64)
    found = np.frombuffer(data, np.uint8)[edges[0] : edges[-1]]
    if not found.flags.writeable:  # Arrow hands its buffers out for reading, though nobody else has this one
        found = found.copy()
    return found, edges[:-1] - edges[0], np.diff(edges)


def _at(data: npt.NDArray[np.uint8], kind: str, positions: _Int64s, values: Any) -> None:
    """Write values at any positions."""
    if len(positions):
        dtype = np.dtype(kind)
        everywhere: npt.NDArray[Any] = np.ndarray((len(data) - dtype.itemsize + 1,), dtype, data.data, 0, (1,))
        everywhere[positions] = values
