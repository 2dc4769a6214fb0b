"""Messages to Parquet, written inside the tasks. Another run writes what came since.

    DEST/export=00000001/topic=orders/date=2026-01-31/part-00003-9f2c.parquet
                        /_manifest.json
        /export=00000002/...
        /_staging/RUN/3-9f2c/...            files of a task; a week after a crash a later run deletes them

Each run that had something to read adds one folder `export=N`, whole, by one rename:

    1  tasks     write their files under _staging/RUN, a folder for each attempt, and sync them
    2  driver    moves what the tasks that counted have written into _staging/RUN/ready, and puts the manifest there
    3  driver    renames `ready` to export=N: the one step that counts
    4  driver    removes _staging/RUN

Readers of all sorts pass over names with an underscore. Of two exports into one folder that race for a number, the
second fails, since it has read what the first has written.

The manifest: {"version": 1, "number", "shape", "messages", "record_bytes", "files": [{"path", "rows", "bytes"}],
"ends": {store: {topic: {queue id: offset}}}}. `ends` are those of all runs so far: the newest manifest says where the
next run begins. Stores have ids there, mostly their paths. `shape` is what has to be the same in all runs.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
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
from mqstore.jobs.options import Key, SourceOptions, flat_offsets, nested_offsets
from mqstore.jobs.paths import local_path
from mqstore.jobs.plan import QueueSlice
from mqstore.jobs.runner import Runner, Where
from mqstore.jobs.selection import Selection, Shaped, Stores, select
from mqstore.jobs.staging import STAGING, clean
from mqstore.jobs.tasks import policy_of, read_slices
from mqstore.layout.jsontext import decode

__all__ = ["ExportResult", "export_parquet", "read_manifest"]

_MANIFEST: Final = "_manifest.json"
_FOLDER: Final = "export="
_STAGING_TTL_S: Final = 7 * 86_400
_PARTS: Final = ("store", "topic", "queue_id", "date")
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_DIFFERENT: Final = frozenset(
    {"body", "message_id", "unique_key", "queue_offset", "physical_offset", "born_timestamp", "store_timestamp"}
)
"""Columns whose values rarely repeat: looking for repeated values costs a quarter of the writing."""
_GROUP_ROWS: Final = 1 << 17
"""Most rows of a row group."""
_ROUND_BYTES: Final = 64 << 20
"""Bytes of rows that a task holds in memory before it writes them, to a new file in each folder."""

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExportResult(Shaped):
    """Result of one run of an export."""

    path: str
    folder: str | None
    """Folder added to `path`, None if there was nothing to read."""
    messages: int
    record_bytes: int
    """Bytes of the records of these messages in their stores."""
    files: int
    file_bytes: int
    damaged: int
    """Messages left out, with `onCorrupt=skip`."""
    seconds: float
    high_water: Mapping[str, Mapping[str, Mapping[str, int]]]
    """Queue offset at which the next run begins, by store, topic and queue id."""


def export_parquet(
    stores: Stores | Selection,
    dest: str | os.PathLike[str],
    *,
    topics: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    partition_by: Sequence[str] = ("topic", "date"),
    **where: Unpack[Where],
) -> ExportResult:
    """Write the messages of `stores` that `dest` does not have yet to Parquet files there.

    Each task writes one or more files for each value of `partition_by`: some of `store`, `topic`, `queue_id` and
    `date`, the UTC day of storing. They become folders. `columns` are those of the Spark source, all by default.
    `jobs`, `spark` and `progress`: see `mqstore.jobs`.

    All of it becomes visible in one step, or none. Raises ConfigError for arguments that do not fit, or not what is in
    `dest`. Raises OffsetOutOfRangeError for a queue that ends before what was exported, and when retention has deleted
    what no run has exported. Raises what reading raises.
    """
    started = time.monotonic()
    job = _Job.of(select(stores, topics=topics), dest, columns, partition_by)
    before = read_manifest(job.dest)
    runner = Runner(**where)
    tasks, passed = job.tasks(before, runner.slots), job.passed_over(before)
    if not tasks:
        return ExportResult(job.dest, None, 0, 0, 0, 0, 0, time.monotonic() - started, before["ends"])
    clean(Path(job.dest), _STAGING_TTL_S)
    try:
        REAL.make_folders(job.staging)
        with runner:
            written = runner.run([*enumerate(tasks)], partial(_write, job), f"mqstore export to {job.dest}")
        manifest = _manifest(job, before, [*tasks, *passed], written)
        _publish(job, manifest, written)
    finally:
        shutil.rmtree(job.staging, ignore_errors=True)
    return ExportResult(
        job.dest,
        f"{_FOLDER}{manifest['number']:08d}",
        manifest["messages"],
        manifest["record_bytes"],
        len(manifest["files"]),
        sum(file["bytes"] for file in manifest["files"]),
        sum(each.damaged for each in written),
        time.monotonic() - started,
        manifest["ends"],
    )


def read_manifest(dest: str | os.PathLike[str]) -> Manifest:
    """Return the newest manifest in `dest`, or one that says nothing (number 0) where there is none.

    Raises ConfigError for a file that is no manifest, or a damaged one.
    """
    names = os.listdir(dest) if os.path.exists(dest) else []
    newest = max((name for name in names if name.startswith(_FOLDER)), default=None)
    if newest is None:
        return {"version": 1, "number": 0, "shape": {}, "ends": {}}
    path = os.path.join(dest, newest, _MANIFEST)
    try:
        value: Manifest = decode(Path(path).read_bytes())
        if value["version"] != 1:
            raise ValueError(f"version {value['version']!r} instead of 1")
        # A queue id in another spelling, or an offset below 0, would pass over messages or export them again.
        ends = flat_offsets(value["ends"]).values()
        if not (
            type(value["number"]) is int
            and value["number"] > 0
            and type(value["shape"]) is dict
            and all(type(end) is int and end >= 0 for end in ends)
        ):
            raise ValueError("number, shape or ends are not what they should be")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not the manifest of an export, or it is damaged or of a newer mqstore ({error!r}): bring it "
            "back as it was, or give another folder, to which all is exported"
        ) from error
    return value


# -- what is to be done ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """An export with checked arguments. It is sent to the tasks as it is."""

    selection: Selection
    dest: str
    staging: str
    columns: tuple[str, ...]
    """Columns of the files."""
    partition_by: tuple[str, ...]

    @classmethod
    def of(
        cls,
        selection: Selection,
        dest: str | os.PathLike[str],
        columns: Sequence[str] | None,
        partition_by: Sequence[str],
    ) -> _Job:
        options = selection.options
        _refuse(options)
        strange = [name for name in partition_by if name not in _PARTS]
        if strange or len(set(partition_by)) < len(partition_by):
            raise ConfigError(f"partition_by={tuple(partition_by)!r}: each of {', '.join(_PARTS)} may be there once")
        named = columns if columns is not None else options.columns
        chosen = check_columns(named, properties=options.include_properties)
        chosen = tuple(name for name in chosen if name not in partition_by)
        if not chosen:
            raise ConfigError("no column is left for the files: name one that is not in partition_by")
        path = local_path(dest)
        for store in selection.stores():
            if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(store.path)):
                raise ConfigError(f"dest={path!r} lies in the store {store.path!r}")
        # A random name: two runs, or one and what a crash left of another, must not share a folder.
        staging = os.path.join(path, STAGING, secrets.token_hex(8))
        return cls(selection, path, staging, chosen, tuple(partition_by))

    @property
    def shape(self) -> dict[str, Any]:
        """Options that must be equal for all runs into one folder.
        With others a run would leave out messages that are recorded as exported, or files would have different columns.
        Topics may differ, since each queue has its own end."""
        options = self.selection.options
        return {
            "columns": sorted(self.columns),
            "partition_by": list(self.partition_by),
            "filter": options.filter,
            "tags": options.tags,
            "keys": None if options.keys is None else list(options.keys),
            "body_as": options.body_as,
            "decompress": options.decompress,
        }

    def check(self, before: dict[str, Any]) -> None:
        """Raise ConfigError if the last run had another shape."""
        for name, value in self.shape.items() if before["number"] else ():
            there = before["shape"].get(name)
            if there != value:
                raise ConfigError(f"{self.dest} was exported with {name}={there!r}, not {value!r}: give another folder")

    def tasks(self, before: dict[str, Any], slots: int = 1) -> list[list[QueueSlice]]:
        """Return tasks for the messages that no run has exported. Raises ConfigError as `check`."""
        self.check(before)
        return self.selection.queue_tasks(after=flat_offsets(before["ends"]), slots=slots)

    def passed_over(self, before: dict[str, Any]) -> list[list[QueueSlice]]:
        """Return the messages before the start bound that no run has exported.

        They are recorded as exported in every queue. Otherwise a later run without the bound would export old messages
        of only those queues that had nothing new this time."""
        start_ms = self.selection.options.starting_timestamp_ms
        if start_ms is None:
            return []
        left_out = self.selection.with_options(keys=None, starting_timestamp_ms=None, ending_timestamp_ms=start_ms)
        return left_out.queue_tasks(after=flat_offsets(before["ends"]))


def _refuse(options: SourceOptions) -> None:
    """Raise ConfigError for options that do not fit, or say where to begin, as the manifest does."""
    options.refuse(
        ("startingOffsets", "startingGroup"), ": an export begins where the last one ended; `start` bounds the first"
    )
    if options.read_by == "log":
        raise ConfigError("option readBy=log: an export notes where it ended in each queue: use readBy=queue")
    if options.on_corrupt == "keep":
        raise ConfigError("option onCorrupt=keep: use onCorrupt=skip, which counts the damaged messages")


# -- in the tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Written:
    """Files that a task has written."""

    folder: str
    """Folder under `_Job.staging`."""
    files: list[dict[str, Any]]
    """Files as the manifest lists them: `path` is below `folder`, and later below export=N."""
    messages: int
    record_bytes: int
    damaged: int


def _write(job: _Job, task: tuple[int, list[QueueSlice]]) -> _Written:
    """Write the task's messages into new files."""
    number, slices = task
    options = job.selection.options
    policy = policy_of(options)
    by_day = "date" in job.partition_by
    columns = [*dict.fromkeys([*job.columns, "size", *(["store_timestamp"] if by_day else [])])]
    folder = f"{number}-{secrets.token_hex(6)}"
    files: list[dict[str, Any]] = []
    waiting: dict[str, list[Any]] = {}
    waiting_bytes = record_bytes = messages = 0

    def write() -> None:
        for name, batches in waiting.items():
            target = os.path.join(name, f"part-{number:05d}-{secrets.token_hex(6)}.parquet")
            path = os.path.join(job.staging, folder, target)
            rows = _write_file(path, pa.Table.from_batches(batches))
            files.append({"path": target, "rows": rows, "bytes": os.path.getsize(path)})
        waiting.clear()

    for piece in slices:
        for batch in read_slices(options, columns, options.body_as, [piece], policy=policy):
            messages += batch.num_rows
            record_bytes += pc.sum(batch.column("size")).as_py() or 0
            for day, rows in _by_day(batch) if by_day else [("", batch)]:
                waiting.setdefault(_folder(job.partition_by, piece, day), []).append(rows.select(job.columns))
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
    """Return `name=value` as Hive writes folders, with %XX for characters that a path cannot have."""
    values = {"store": piece.store.id, "topic": piece.topic, "queue_id": str(piece.queue_id), "date": day}
    return "/".join(f"{name}={quote(values[name], safe=' ', errors='surrogateescape')}" for name in partition_by)


def _write_file(path: str, table: Any) -> int:
    """Write a Parquet file and sync it. Returns its number of rows."""
    again = [name for name in table.column_names if name not in _DIFFERENT]
    if "properties" in again:
        again += ["properties.key_value.key", "properties.key_value.value"]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    pq.write_table(table, path, row_group_size=_GROUP_ROWS, compression="zstd", use_dictionary=again)
    _sync(path)
    return len(table)


# -- publishing --------------------------------------------------------------------------------------------------------


def _manifest(job: _Job, before: Manifest, over: list[list[QueueSlice]], written: list[_Written]) -> Manifest:
    ends = flat_offsets(before["ends"])
    for piece in (piece for slices in over for piece in slices):
        key = Key(piece.store.id, piece.topic, piece.queue_id)
        ends[key] = max(piece.stop, ends.get(key, 0))
    return {
        "version": 1,
        "number": before["number"] + 1,
        "shape": job.shape,
        "messages": sum(each.messages for each in written),
        "record_bytes": sum(each.record_bytes for each in written),
        "files": [file for each in written for file in each.files],
        "ends": nested_offsets(ends),
    }


def _publish(job: _Job, manifest: Manifest, written: list[_Written]) -> None:
    """Do steps 2 and 3."""
    ready = os.path.join(job.staging, "ready")
    target = os.path.join(job.dest, f"{_FOLDER}{manifest['number']:08d}")
    os.mkdir(ready)
    for folder, name in ((each.folder, file["path"]) for each in written for file in each.files):
        path = os.path.join(ready, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(os.path.join(job.staging, folder, name), path)
    manifest_path = os.path.join(ready, _MANIFEST)
    with open(manifest_path, "x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
    _sync(manifest_path)
    for path, _, _ in os.walk(ready):
        _sync(path)
    try:
        os.rename(ready, target)
    except OSError as error:
        if not os.path.exists(target):
            raise
        raise ConfigError(
            f"{job.dest}: another export has ended meanwhile and has what this one was to write; nothing of this one "
            "is kept: run it again for what is left"
        ) from error
    for each in (job.dest, os.path.dirname(job.dest)):  # which may be new itself
        _sync(each)


def _sync(path: str) -> None:
    """Sync a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
