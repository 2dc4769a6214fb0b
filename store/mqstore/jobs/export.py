"""Export of messages to a folder of Parquet files, written by the tasks.

    DEST/topic=orders/date=2026-01-31/part-00003-9f2c.parquet

    1  tasks     write and sync their files in a hidden folder next to DEST, .NAME.xxxx, with a folder for each attempt
    2  driver    moves the files of the successful attempts into one folder
    3  driver    renames this folder to DEST, which must be new or empty: the step that publishes the export

A run that fails deletes its hidden folder. A run that is killed leaves it, and no DEST.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Unpack
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mqstore.columnar.columns import check_columns
from mqstore.errors import ConfigError
from mqstore.files.filesystem import REAL
from mqstore.jobs.options.options import SourceOptions, local_path
from mqstore.jobs.options.selection import Selection, Shaped, Stores, select
from mqstore.jobs.reading.plan import QueueSlice
from mqstore.jobs.reading.tasks import policy_of, read_slices
from mqstore.jobs.runner import Runner, Where

_PARTS: Final = ("store", "topic", "queue_id", "date")
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_DIFFERENT: Final = frozenset(
    {"body", "message_id", "unique_key", "queue_offset", "physical_offset", "born_timestamp", "store_timestamp"}
)
"""Columns without dictionary encoding: their values rarely repeat, and it costs a quarter of the writing."""
_GROUP_ROWS: Final = 1 << 17
"""Largest number of rows of a row group."""
_ROUND_BYTES: Final = 64 << 20
"""Bytes of rows that a task collects in memory before it writes a new file in each folder."""


@dataclass(frozen=True, slots=True)
class ExportResult(Shaped):
    """Result of an export."""

    path: str
    """Folder of the files. It is only created if there are messages."""
    messages: int
    record_bytes: int
    """Bytes of the records of these messages in their stores."""
    files: int
    file_bytes: int
    damaged: int
    """Messages skipped, with `onCorrupt=skip`."""
    seconds: float


def export_parquet(
    stores: Stores | Selection,
    dest: str | os.PathLike[str],
    *,
    topics: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    partition_by: Sequence[str] = ("topic", "date"),
    **where: Unpack[Where],
) -> ExportResult:
    """Write the messages of `stores` to Parquet files in the folder `dest`, which must be new or empty.

    Columns in `partition_by`, some of `store`, `topic`, `queue_id` and `date` (UTC day of storing), become folders.
    Each task writes one or more files for each of their values. `columns` are those of the Spark source, all by
    default. `spark` and `progress`: see `mqstore.jobs`.

    All files become visible in one step, or none. Raises ConfigError for invalid arguments and for a `dest` that is not
    empty, and the errors of reading.
    """
    started = time.monotonic()
    selection, path = select(stores, topics=topics), local_path(dest)
    if selection.options.on_corrupt == "keep":
        raise ConfigError("option onCorrupt=keep: use onCorrupt=skip, which counts the damaged messages")
    target = _target(selection, path)
    # A random name, so that two runs never share a folder.
    staging = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{secrets.token_hex(8)}")
    chosen = _columns(selection.options, columns, partition_by)
    work = partial(_write, selection.options, staging, chosen, tuple(partition_by))
    runner = Runner(**where)
    tasks = selection.queue_tasks(slots=runner.slots)
    try:
        if tasks:
            REAL.make_folders(staging)
        written = runner.run([*enumerate(tasks)], work, f"mqstore export to {path}")
        sizes = [size for each in written for size in each.files.values()]
        if sizes:
            _publish(staging, target, written)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return ExportResult(
        path,
        sum(each.messages for each in written),
        sum(each.record_bytes for each in written),
        len(sizes),
        sum(sizes),
        sum(each.damaged for each in written),
        time.monotonic() - started,
    )


def _target(selection: Selection, path: str) -> str:
    """Return the resolved path of the folder. ConfigError if it is in a store, or not empty."""
    target = os.path.realpath(path)
    for store in selection.stores():
        if Path(target).is_relative_to(os.path.realpath(store.path)):
            raise ConfigError(f"dest={path!r} is in the store {store.path!r}")
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise _taken(target)
    return target


def _taken(target: str) -> ConfigError:
    return ConfigError(f"{target} exists and is not an empty folder: give a new or empty folder")


def _columns(options: SourceOptions, columns: Sequence[str] | None, partition_by: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the files, at least one."""
    if set(partition_by) - {*_PARTS} or len(set(partition_by)) < len(partition_by):
        raise ConfigError(f"partition_by={tuple(partition_by)!r}: give some of {', '.join(_PARTS)}, each once")
    named = columns if columns is not None else options.columns
    chosen = check_columns(named, properties=options.include_properties)
    chosen = tuple(name for name in chosen if name not in partition_by)
    if not chosen:
        raise ConfigError("the files would have no column: name one that is not in partition_by")
    return chosen


# -- in the tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Written:
    """Files that a task has written."""

    folder: str
    """Folder of the attempt in the hidden folder."""
    files: dict[str, int]
    """Size of each file, by its path in `folder`, which is also its path in DEST."""
    messages: int
    record_bytes: int
    damaged: int


def _write(
    options: SourceOptions,
    staging: str,
    chosen: tuple[str, ...],
    partition_by: tuple[str, ...],
    task: tuple[int, list[QueueSlice]],
) -> _Written:
    """Write the task's messages, with the `chosen` columns, into new files."""
    number, slices = task
    policy = policy_of(options)
    by_day = "date" in partition_by
    columns = [*dict.fromkeys([*chosen, "size", *(["store_timestamp"] if by_day else [])])]
    folder = f"{number}-{secrets.token_hex(6)}"
    files: dict[str, int] = {}
    waiting: dict[str, list[Any]] = {}
    waiting_bytes = record_bytes = messages = 0

    def write() -> None:
        for name, batches in waiting.items():
            target = os.path.join(name, f"part-{number:05d}-{secrets.token_hex(6)}.parquet")
            path = os.path.join(staging, folder, target)
            _write_file(path, pa.Table.from_batches(batches))
            files[target] = os.path.getsize(path)
        waiting.clear()

    for piece in slices:
        for batch in read_slices(options, columns, options.body_as, [piece], policy=policy):
            messages += batch.num_rows
            record_bytes += pc.sum(batch.column("size")).as_py() or 0
            for day, rows in _by_day(batch) if by_day else [("", batch)]:
                waiting.setdefault(_folder(partition_by, piece, day), []).append(rows.select(chosen))
            waiting_bytes += batch.nbytes
            if waiting_bytes >= _ROUND_BYTES:
                write()
                waiting_bytes = 0
    write()
    return _Written(folder, files, messages, record_bytes, policy.corrupt)


def _by_day(batch: Any) -> Iterator[tuple[str, Any]]:
    """Split the batch by UTC day of storing. Most batches have one day."""
    days = batch.column("store_timestamp").cast(pa.timestamp("us")).cast(pa.date32())
    coded = days.dictionary_encode(null_encoding="encode")
    for number, day in enumerate(coded.dictionary.to_pylist()):
        rows = batch if len(coded.dictionary) == 1 else batch.filter(pc.equal(coded.indices, number))
        yield _NULL if day is None else str(day), rows


def _folder(partition_by: Sequence[str], piece: QueueSlice, day: str) -> str:
    """Return a folder `name=value` in Hive's style, with %XX for characters not allowed in a path."""
    values = {"store": piece.store.id, "topic": piece.topic, "queue_id": str(piece.queue_id), "date": day}
    return "/".join(f"{name}={quote(values[name], safe=' ', errors='surrogateescape')}" for name in partition_by)


def _write_file(path: str, table: Any) -> None:
    again = [name for name in table.column_names if name not in _DIFFERENT]
    if "properties" in again:
        again += ["properties.key_value.key", "properties.key_value.value"]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    pq.write_table(table, path, row_group_size=_GROUP_ROWS, compression="zstd", use_dictionary=again)
    _sync(path)


# -- publishing --------------------------------------------------------------------------------------------------------


def _publish(staging: str, target: str, written: list[_Written]) -> None:
    """Move the files and rename the folder (steps 2 and 3)."""
    ready = os.path.join(staging, "ready")
    for folder, name in ((each.folder, name) for each in written for name in each.files):
        path = os.path.join(ready, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(os.path.join(staging, folder, name), path)
    for path, _, _ in os.walk(ready):
        _sync(path)
    try:
        os.rename(ready, target)
    except OSError as error:
        if os.path.isdir(target) and os.listdir(target):
            raise _taken(target) from error
        raise
    _sync(os.path.dirname(target))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
