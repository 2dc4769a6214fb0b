"""Tasks, which read their slices: as Arrow record batches, or as pieces, which need no pyarrow.

A task opens each store itself, read-only, and closes it at the end. Retention may have deleted planned messages
meanwhile: `failOnDataLoss` is applied here (spark#stream).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, Literal

from mqstore.columnar.rows import Cost, Piece, PieceReader, Policy
from mqstore.errors import OffsetOutOfRangeError
from mqstore.jobs.errors import of_store
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.opening import StoreName, open_sliced, opened
from mqstore.jobs.reading.plan import LogSlice, QueueSlice, Slice, is_wanted
from mqstore.logger import log as _log


def policy_of(options: SourceOptions) -> Policy:
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
    """Yield record batches of the slices, one slice after the other.
    Pass a `policy` to read its counts; the default is that of the options. Raises OffsetOutOfRangeError for deleted
    messages, with `fail_on_data_loss`, and CorruptRecordError and others like `ColumnReader`."""
    from mqstore.columnar.columns import ColumnReader  # here, because it needs pyarrow

    logs_skipped = policy is None
    policy = policy or policy_of(options)
    filters = _filters(options)
    for name, run in groupby(slices, key=lambda piece: piece.store):
        before = policy.corrupt, policy.removed
        with of_store(name.path), opened(name, options, open_sliced) or nullcontext() as store:
            if store is None:  # skipped
                continue
            reader = ColumnReader(
                store,
                columns,
                decompress=options.decompress,
                body_as=body_as,
                policy=policy,
                store_id=name.id,
                **filters,
            )
            yield from reader.batches(piece for each in run for piece in _pieces(options, reader, each))
        if logs_skipped:
            _log_skipped(options, policy, name, before)


def read_pieces(
    options: SourceOptions, costs: Collection[Cost], slices: Iterable[QueueSlice], policy: Policy
) -> Iterator[tuple[QueueSlice, Piece]]:
    """Yield the checked and filtered records of each slice, for counting without columns.
    `costs` are those of `PieceReader`. Raises like `read_slices`."""
    for name, run in groupby(slices, key=lambda piece: piece.store):
        with of_store(name.path), opened(name, options, open_sliced) or nullcontext() as store:
            if store is None:  # skipped
                continue
            reader = PieceReader(store, costs, policy, **_filters(options))
            for each in run:
                for piece in _pieces(options, reader, each):
                    yield each, piece


def _filters(options: SourceOptions) -> dict[str, Any]:
    return {"tags": options.tags, "where": options.filter, "keys": options.keys}


def _pieces(options: SourceOptions, reader: PieceReader, each: Slice) -> Iterator[Piece]:
    """Yield the pieces of a slice. Raises OffsetOutOfRangeError for deleted messages."""
    if isinstance(each, QueueSlice):
        pieces = reader.queue_pieces(each.topic, each.queue_id, each.start, each.stop)
    else:
        pieces = reader.log_pieces(each.start, each.stop, is_wanted(options))
    for piece in pieces:
        _check_loss(options, reader.policy, each)
        yield piece
    _check_loss(options, reader.policy, each)


def _log_skipped(options: SourceOptions, policy: Policy, name: StoreName, before: tuple[int, int]) -> None:
    """Log the number of messages that a query skips, because its result does not show them."""
    corrupt, removed = policy.corrupt - before[0], policy.removed - before[1]
    if corrupt and options.on_corrupt == "skip":
        _log.warning("mqstore: in %s %d damaged messages were skipped (onCorrupt=skip)", name.id, corrupt)
    if removed:
        what = "segments of messages" if options.read_by == "log" else "messages"
        _log.warning(
            "mqstore: in %s %d %s deleted by retention were skipped (failOnDataLoss=false)", name.id, removed, what
        )


def _check_loss(options: SourceOptions, policy: Policy, piece: Slice) -> None:
    if policy.removed and options.fail_on_data_loss:
        if isinstance(piece, LogSlice):
            what = f"the messages of {policy.removed} segments"
        else:
            what = f"{policy.removed} messages of {piece.topic}, queue {piece.queue_id}"
        raise OffsetOutOfRangeError(
            f"{piece.store.id}: {what} were planned, but retention has deleted them meanwhile "
            "(failOnDataLoss=false reads the remaining ones)",
            piece.start,
            piece.stop,
        )
