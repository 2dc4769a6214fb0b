"""What a task does: reads its slices as Arrow record batches. Knows no Spark.

Batches and streams read by the same road. A task opens each store for itself, read-only and without a trace, and
keeps nothing when it is done. Between plan and task retention may have deleted what is wanted: then the policy of
`failOnDataLoss` is decided here (spark#stream).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, TypeGuard

from mqstore.errors import OffsetOutOfRangeError
from mqstore.spark.columns import ColumnReader
from mqstore.spark.options import SourceOptions
from mqstore.spark.plan import LogSlice, QueueSlice, Slice, StoreName, is_wanted, open_sliced
from mqstore.spark.rows import Piece, Policy
from mqstore.spark.telling import of_store

__all__ = ["policy_of", "read_pieces", "read_slices"]

_log = logging.getLogger("mqstore")
_SMALL_UNITS = 64
"""Slices up to this size are read together: alone each costs most of a millisecond, however few messages it has."""
_TOGETHER = 64
"""So many of them at most."""


def policy_of(options: SourceOptions) -> Policy:
    """How to read, as the options have it; counts what it leaves out."""
    return Policy(
        max_rows=options.max_rows_per_batch,
        max_bytes=options.max_bytes_per_batch,
        verify=options.verify,
        on_corrupt=options.on_corrupt,
    )


def read_slices(
    options: SourceOptions,
    columns: Sequence[str],
    body_as: Literal["binary", "string"],
    slices: Iterable[Slice],
    *,
    policy: Policy | None = None,
) -> Iterator[Any]:
    """Record batches of the slices, one behind the other. `policy`: that of the options, for who wants to know what it
    has counted.

    OffsetOutOfRangeError for messages that are gone, with `fail_on_data_loss`; CorruptRecordError and others as
    `ColumnReader` has it.
    """
    counted_elsewhere = policy is not None
    policy = policy or policy_of(options)
    for name, pieces in groupby(slices, key=lambda piece: piece.store):
        before = policy.corrupt, policy.removed
        with of_store(name.path), open_sliced(name) as store:
            reader = ColumnReader(
                store,
                columns,
                tags=options.tags,
                where=options.filter,
                keys=options.keys,
                decompress=options.decompress,
                body_as=body_as,
                policy=policy,
                store_id=name.id,
            )
            for group in _groups(pieces):
                parts = [(piece.topic, piece.queue_id, piece.start, piece.stop) for piece in group if _is_small(piece)]
                together = reader.at_once(parts) if parts else None
                if together is not None:
                    yield from together
                    continue
                for piece in group:
                    if isinstance(piece, QueueSlice):
                        store.load(piece.topic, piece.queue_id)
                    yield from _read(reader, options, piece, policy)
        if not counted_elsewhere:
            _tell_left_out(options, policy, name, before)


def _tell_left_out(options: SourceOptions, policy: Policy, name: StoreName, before: tuple[int, int]) -> None:
    """Log what a query has fewer rows for, as it was told to: nobody else says so."""
    corrupt, removed = policy.corrupt - before[0], policy.removed - before[1]
    if corrupt and options.on_corrupt == "skip":
        _log.warning("mqstore: %s: %d damaged messages were left out (onCorrupt=skip)", name.id, corrupt)
    if removed:
        what = "segments of messages" if options.read_by == "log" else "messages"
        _log.warning(
            "mqstore: %s: %d %s that retention has deleted were left out (failOnDataLoss=false)", name.id, removed, what
        )


def _is_small(piece: Slice) -> TypeGuard[QueueSlice]:
    return isinstance(piece, QueueSlice) and piece.stop - piece.start <= _SMALL_UNITS


def _groups(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """Small ones that are neighbours together, others alone."""
    for small, run in groupby(slices, key=_is_small):
        most = _TOGETHER if small else 1
        for _, group in groupby(enumerate(run), key=lambda numbered: numbered[0] // most):
            yield [piece for _, piece in group]


def read_pieces(
    options: SourceOptions, slices: Iterable[QueueSlice], policy: Policy
) -> Iterator[tuple[QueueSlice, Piece]]:
    """The records of each slice, checked and filtered, before columns are made of them: for who counts. A piece has to
    be done with before the next one is asked for. Raises as `read_slices`."""
    for name, pieces in groupby(slices, key=lambda piece: piece.store):
        with of_store(name.path), open_sliced(name) as store:
            reader = ColumnReader(store, (), tags=options.tags, where=options.filter, keys=options.keys, policy=policy)
            for piece in pieces:
                store.load(piece.topic, piece.queue_id)
                for each in reader.pieces(piece.topic, piece.queue_id, piece.start, piece.stop):
                    _check_loss(options, policy, piece)
                    yield piece, each
                _check_loss(options, policy, piece)


def _read(reader: ColumnReader, options: SourceOptions, piece: Slice, policy: Policy) -> Iterator[Any]:
    if isinstance(piece, QueueSlice):
        batches = reader.queue(piece.topic, piece.queue_id, piece.start, piece.stop)
    else:
        batches = reader.log(piece.start, piece.stop, is_wanted(options))
    for batch in batches:
        _check_loss(options, policy, piece)
        yield batch
    _check_loss(options, policy, piece)


def _check_loss(options: SourceOptions, policy: Policy, piece: Slice) -> None:
    if policy.removed and options.fail_on_data_loss:
        if isinstance(piece, LogSlice):
            what = f"the messages of {policy.removed} segments"
        else:
            what = f"{policy.removed} messages of {piece.topic}, queue {piece.queue_id}"
        raise OffsetOutOfRangeError(
            f"{piece.store.id}: {what} were planned to be read, but retention has deleted them meanwhile "
            "(failOnDataLoss=false reads what is left)",
            piece.start,
            piece.stop,
        )
