"""Pieces put together, and their bodies inflated, before columns are made of them.

`joined` makes batches of bounded rows and bytes, `merged` makes fewer pieces of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from mqstore.columnar.arrow import cut
from mqstore.columnar.rows import Piece, Policy
from mqstore.errors import FormatError
from mqstore.files.segment import place_in_file
from mqstore.layout.compression import MissingPackageError, inflate
from mqstore.layout.record import COMPRESSED
from mqstore.log.reader import StoreReader
from mqstore.log.recovery.report import Finding, Kind

__all__ = ["inflated", "joined", "merged", "stored_bodies"]

_ENOUGH_ROWS = 4096
"""A batch of so many rows costs little more a row than a larger one."""


def stored_bodies(piece: Piece) -> Any:
    """Return the bodies as they are stored, as an Arrow array."""
    starts = piece.headers.body_position
    return cut(piece.buffer, starts, starts + piece.headers.body_size)


def joined(pieces: Iterable[Piece], policy: Policy) -> Iterator[list[Piece]]:
    """Yield pieces by batches. Small ones are put together, which costs a copy, until there are enough rows."""
    group: list[Piece] = []
    rows = size = 0
    for piece in pieces:
        more = int(piece.sizes.sum()) if piece.records else 0
        if piece.bodies is not None:
            more = max(more, piece.bodies.nbytes)  # what was stored small may be large
        if group and (rows >= _ENOUGH_ROWS or rows + len(piece) > policy.max_rows or size + more > policy.max_bytes):
            yield group
            group, rows, size = [], 0, 0
        group.append(piece)
        rows += len(piece)
        size += more
    if group:
        yield group


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge neighbours whose records lie in one buffer into one piece, with the queue of the first.
    A column costs a piece of one row as much time as one of hundreds. Small batches of a stream have one or two
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


def inflated(pieces: Iterable[Piece], store: StoreReader, policy: Policy) -> Iterator[Piece]:
    """Yield `pieces` with compressed bodies inflated, cut where these would make a batch too large.
    A body that does not inflate is damage of its message."""
    for piece in pieces:
        if not piece.records or piece.bodies is not None:
            yield piece
            continue
        headers, low, size = piece.headers, 0, 0
        bodies: dict[int, bytes] = {}
        for row in np.flatnonzero(headers.sys_flag & COMPRESSED).tolist():
            at, stored = int(headers.body_position[row]), int(headers.body_size[row])
            try:
                body = inflate(int(headers.sys_flag[row]), piece.buffer[at : at + stored])
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
    """Yield the rows [low, high), if there are any, with these bodies in place of the stored ones."""
    if low == high:
        return
    part = piece if high - low == len(piece) else piece.take(slice(low, high))
    if bodies:
        index = np.arange(len(part), dtype=np.int32)
        index[[row - low for row in bodies]] = np.arange(len(part), len(part) + len(bodies), dtype=np.int32)
        values = pa.concat_arrays([stored_bodies(part), pa.array([*bodies.values()], pa.binary())])
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
    finding = Finding(kind, *place, int(piece.sizes[row]), f"{where}: its body does not inflate: {error}")
    yield from damaged.damaged([finding], policy)
