"""Messages to Parquet, written inside the tasks; run again, what came since.

    DEST/export=00000001/topic=orders/date=2026-01-31/part-00003-9f2c.parquet
                        /_manifest.json
        /export=00000002/...
        /_staging/RUN/3-9f2c/...            files of a task; what a crash leaves here is nobody's

Each run that had something to read adds one folder `export=N`, whole, by one rename:

    1  tasks     write their files under _staging/RUN, a folder for each attempt, and sync them
    2  driver    moves what the tasks that counted have written into _staging/RUN/ready, and puts the manifest there
    3  driver    renames `ready` to export=N: the one step that counts
    4  driver    removes _staging/RUN

Before 3 the export is as it was, and readers of all sorts, who pass over names with an underscore, see none of the new
files; after it they see all of them. Two exports into one folder that race for a number: the second fails, since it has
read what the first has written.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mqstore.errors import ConfigError, MQStoreError
from mqstore.files.filesystem import REAL
from mqstore.jobs.runner import Progress, Runner
from mqstore.spark.columns import check_columns, default_columns
from mqstore.spark.options import QUEUE_ID, Key, SourceOptions
from mqstore.spark.plan import QueueSlice
from mqstore.spark.selection import Selection, Shaped, Stores, local_path, select
from mqstore.spark.tasks import policy_of, read_slices

__all__ = ["ExportResult", "export_parquet", "read_manifest"]

_STAGING: Final = "_staging"
_MANIFEST: Final = "_manifest.json"
_FOLDER: Final = "export="
_STAGING_TTL_S: Final = 7 * 86_400
_PARTS: Final = ("store", "topic", "queue_id", "date")
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_DIFFERENT: Final = frozenset(
    {"body", "message_id", "unique_key", "queue_offset", "physical_offset", "born_timestamp", "store_timestamp"}
)
"""Columns whose values hardly ever come twice: looking for those that do costs a quarter of the writing."""
_DAY_US: Final = 86_400_000_000
_OPEN_FILES: Final = 64
_FILE_ROWS, _FILE_BYTES, _TASK_BYTES = 1 << 17, 32 << 20, 128 << 20
"""What waits in memory before it becomes a row group: of a file, and of all files of a task."""

Ends = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True, slots=True)
class ExportResult(Shaped):
    """What a run of an export has done."""

    path: str
    folder: str | None
    """The folder that it added to `path`; None if there was nothing to read."""
    messages: int
    record_bytes: int
    """Of the records of these messages in their stores."""
    files: int
    file_bytes: int
    damaged: int
    """Messages left out, with `onCorrupt=skip`."""
    seconds: float
    high_water: Mapping[str, Mapping[str, Mapping[str, int]]]
    """Where the next run begins: store, topic, queue id, queue offset."""


def export_parquet(
    stores: Stores | Selection,
    dest: str | os.PathLike[str],
    *,
    jobs: int = 1,
    spark: Any = None,
    progress: Progress | None = None,
    topics: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    partition_by: Sequence[str] = ("topic", "date"),
) -> ExportResult:
    """Write the messages of `stores` that are not in `dest` yet to Parquet files there, one for each task and each
    value of `partition_by` (of `store`, `topic`, `queue_id` and `date`, the UTC day of storing).

    `jobs`, `spark` and `progress`: see `mqstore.jobs`. `columns`: those of the Spark source, all by default; those in
    `partition_by` become folders.

    All of it becomes visible in one step, or none. Raises ConfigError for arguments that do not fit, or not what is in
    `dest`; OffsetOutOfRangeError for a queue that ends before what was exported, and when retention has deleted what no
    run has exported; what reading raises.
    """
    started = time.monotonic()
    job = _Job.of(select(stores, topics=topics), dest, columns, partition_by)
    before = read_manifest(job.dest)
    runner = Runner(jobs, spark, progress)
    tasks, passed = job.tasks(before, runner.slots), job.passed_over(before)
    if not tasks:
        return ExportResult(job.dest, None, 0, 0, 0, 0, 0, time.monotonic() - started, before["ends"])
    _clear_old_staging(job.dest)
    try:
        os.makedirs(job.staging)
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


def read_manifest(dest: str | os.PathLike[str]) -> dict[str, Any]:
    """The newest manifest in `dest`; one that says nothing (number 0) where there is none. ConfigError for what is no
    manifest, or a damaged one."""
    try:
        found = sorted(name for name in os.listdir(dest) if name.startswith(_FOLDER))
    except FileNotFoundError:
        found = []
    for name in reversed(found):
        path = os.path.join(dest, name, _MANIFEST)
        try:
            with open(path, encoding="utf-8") as file:
                value: dict[str, Any] = json.load(file)
            if value["version"] != 1:
                raise ConfigError(f"{path} is of version {value['version']!r}; this mqstore knows 1")
            for member, right in _MEMBERS.items():
                if not right(value[member]):
                    raise ValueError(f"{member} is not what it should be")
            return value
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, MQStoreError):
                raise
            raise ConfigError(
                f"{path} is no manifest of an export, or damaged ({error!r}): bring it back as it was, or give another "
                "folder, to which all is exported"
            ) from error
    return {"version": 1, "number": 0, "shape": {}, "ends": {}}


def _each(right: Callable[[Any], bool], name: Callable[[str], object] = lambda _: True) -> Callable[[Any], bool]:
    """Whether something is an object whose names and values are right."""
    return lambda value: type(value) is dict and all(name(key) and right(each) for key, each in value.items())


_MEMBERS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "number": lambda value: type(value) is int and value > 0,
    "shape": lambda value: type(value) is dict,
    # A queue id in another spelling, or an offset below 0, would pass over messages or export them again.
    "ends": _each(_each(_each(lambda end: type(end) is int and end >= 0, QUEUE_ID.fullmatch))),
}
"""What runs go by in a manifest."""


# -- what is to be done ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """An export with its arguments checked; goes to the tasks as it is."""

    selection: Selection
    dest: str
    staging: str
    columns: tuple[str, ...]
    """Of the files."""
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
        chosen = columns if columns is not None else options.columns
        if chosen is None:
            chosen = [name for name in default_columns() if options.include_properties or name != "properties"]
        chosen = [name for name in check_columns(chosen) if name not in partition_by]
        if not chosen:
            raise ConfigError("no column is left for the files: name one that is not in partition_by")
        path = local_path(dest)
        for store in selection.stores():
            if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(store.path)):
                raise ConfigError(f"dest={path!r} lies in the store {store.path!r}")
        # A random name: two runs, or one and what a crash left of another, must not share a folder.
        staging = os.path.join(path, _STAGING, secrets.token_hex(8))
        return cls(selection, path, staging, tuple(chosen), tuple(partition_by))

    @property
    def shape(self) -> dict[str, Any]:
        """What all runs into one folder have in common: else a run would leave out what it is recorded to have read, or
        files would not fit together. Topics may differ: each queue has its own end."""
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
        """Raise ConfigError if what is there is of another shape."""
        for name, value in self.shape.items() if before["number"] else ():
            there = before["shape"].get(name)
            if there != value:
                raise ConfigError(f"{self.dest} was exported with {name}={there!r}, not {value!r}: give another folder")

    def tasks(self, before: dict[str, Any], slots: int = 1) -> list[list[QueueSlice]]:
        """What no run has exported yet. ConfigError, as `check`."""
        self.check(before)
        return self.selection.queue_tasks(after=_ends(before), slots=slots)

    def passed_over(self, before: dict[str, Any]) -> list[list[QueueSlice]]:
        """What no run has exported and this one leaves out, since it lies before its start bound. It is noted as if it
        had been read, in every queue: else a later run without the bound would export the old messages of those queues
        alone that had nothing new this time."""
        start_ms = self.selection.options.starting_timestamp_ms
        if start_ms is None:
            return []
        left_out = self.selection.with_options(keys=None, starting_timestamp_ms=None, ending_timestamp_ms=start_ms)
        return left_out.queue_tasks(after=_ends(before))


def _ends(manifest: dict[str, Any]) -> dict[Key, int]:
    """Return where the last run ended in each queue."""
    return {
        Key(store, topic, int(queue_id)): end
        for store, topics in manifest["ends"].items()
        for topic, queues in topics.items()
        for queue_id, end in queues.items()
    }


def _refuse(options: SourceOptions) -> None:
    """Raise ConfigError for options that say where to begin, which the manifest does, and for some that do not fit."""
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
    """What a task has written: (path under `staging`, path under the new folder, rows, bytes) of each file."""

    files: tuple[tuple[str, str, int, int], ...]
    messages: int
    record_bytes: int
    damaged: int


def _write(job: _Job, task: tuple[int, list[QueueSlice]]) -> _Written:
    """The task's messages into files of its own."""
    number, slices = task
    options = job.selection.options
    policy = policy_of(options)
    extra = ["size", *(["store_timestamp"] if "date" in job.partition_by else [])]
    columns = [*job.columns, *(name for name in extra if name not in job.columns)]
    record_bytes = messages = 0
    with _Files(job, number) as files:
        for piece in slices:
            for batch in read_slices(options, columns, options.body_as, [piece], policy=policy):
                messages += batch.num_rows
                record_bytes += pc.sum(batch.column("size")).as_py() or 0
                for day, rows in _by_day(batch) if "date" in job.partition_by else [("", batch)]:
                    files.add(_folder(job.partition_by, piece, day), rows.select(job.columns))
        return _Written(files.finish(), messages, record_bytes, policy.corrupt)


def _by_day(batch: Any) -> Iterator[tuple[str, Any]]:
    """The batch by UTC days of storing; mostly it is of one."""
    stamps = batch.column("store_timestamp")
    days = stamps.cast(pa.int64()).fill_null(-(1 << 62)).to_numpy() // _DAY_US
    for day in np.unique(days).tolist():
        name = _NULL if day < -1_000_000 else str(np.datetime64(day, "D"))
        here = days == day
        yield name, batch if here.all() else batch.filter(pa.array(here))


def _folder(partition_by: Sequence[str], piece: QueueSlice, day: str) -> str:
    """As Hive has it: name=value, what a path cannot hold as %XX."""
    values = {"store": piece.store.id, "topic": piece.topic, "queue_id": str(piece.queue_id), "date": day}
    return "/".join(f"{name}={quote(values[name], safe=' ', errors='surrogateescape')}" for name in partition_by)


class _Files:
    """The Parquet files that a task has open, by folder. Rows wait until they make a row group worth having."""

    def __init__(self, job: _Job, number: int) -> None:
        self._job = job
        token = secrets.token_hex(6)
        self._folder = f"{number}-{token}"
        self._name = f"part-{number:05d}-{token}"
        self._waiting: dict[str, list[Any]] = {}
        self._bytes: dict[str, int] = {}
        self._open: dict[str, tuple[Any, str, str]] = {}
        """Least recently written first."""
        self._done: list[tuple[str, str, int, int]] = []
        self._rows: dict[str, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._open.values():
            opened[0].close()

    def add(self, folder: str, batch: Any) -> None:
        """Rows for the file of that folder."""
        waiting = self._waiting.setdefault(folder, [])
        waiting.append(batch)
        self._bytes[folder] = self._bytes.get(folder, 0) + batch.nbytes
        if self._bytes[folder] >= _FILE_BYTES or sum(each.num_rows for each in waiting) >= _FILE_ROWS:
            self._flush(folder)
        elif sum(self._bytes.values()) >= _TASK_BYTES or len(self._waiting) > _OPEN_FILES:
            for each in [*self._waiting]:
                self._flush(each)

    def finish(self) -> tuple[tuple[str, str, int, int], ...]:
        """Close all, on disk; the files."""
        for folder in [*self._waiting]:
            self._flush(folder)
        for folder in [*self._open]:
            self._close(folder)
        return tuple(self._done)

    def _flush(self, folder: str) -> None:
        batches = self._waiting.pop(folder)
        del self._bytes[folder]
        writer, path, target = self._open.pop(folder, (None, "", ""))
        if writer is None:
            if len(self._open) >= _OPEN_FILES:
                self._close(next(iter(self._open)))
            target = f"{folder}/{self._name}-{len(self._done) + len(self._open)}.parquet".lstrip("/")
            path = os.path.join(self._job.staging, self._folder, target)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            again = [name for name in self._job.columns if name not in _DIFFERENT]
            if "properties" in again:
                again += ["properties.key_value.key", "properties.key_value.value"]
            schema = batches[0].schema
            writer = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=again)
        table = pa.Table.from_batches(batches)
        writer.write_table(table, row_group_size=len(table))
        _sync(path, begin=True)
        self._rows[target] = self._rows.get(target, 0) + len(table)
        self._open[folder] = writer, path, target

    def _close(self, folder: str) -> None:
        writer, path, target = self._open.pop(folder)
        writer.close()
        _sync(path)
        staged = os.path.relpath(path, self._job.staging)
        self._done.append((staged, target, self._rows[target], os.path.getsize(path)))


# -- publishing --------------------------------------------------------------------------------------------------------


def _manifest(
    job: _Job,
    before: dict[str, Any],
    over: Sequence[Sequence[QueueSlice]],
    written: Sequence[_Written],
) -> dict[str, Any]:
    ends: Ends = json.loads(json.dumps(before["ends"]))
    for piece in (piece for slices in over for piece in slices):
        queues = ends.setdefault(piece.store.id, {}).setdefault(piece.topic, {})
        queues[str(piece.queue_id)] = max(piece.stop, queues.get(str(piece.queue_id), 0))
    return {
        "version": 1,
        "number": before["number"] + 1,
        "shape": job.shape,
        "messages": sum(each.messages for each in written),
        "record_bytes": sum(each.record_bytes for each in written),
        "files": [
            {"path": target, "rows": rows, "bytes": size} for each in written for _, target, rows, size in each.files
        ],
        "ends": ends,
    }


def _publish(job: _Job, manifest: dict[str, Any], written: Sequence[_Written]) -> None:
    """Steps 2 and 3."""
    ready = os.path.join(job.staging, "ready")
    os.mkdir(ready)
    folders = {ready}
    for staged, target, _, _ in (file for each in written for file in each.files):
        path = os.path.join(ready, target)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(os.path.join(job.staging, staged), path)
        folder = os.path.dirname(path)
        while folder not in folders:
            folders.add(folder)
            folder = os.path.dirname(folder)
    path = os.path.join(ready, _MANIFEST)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(manifest, file, ensure_ascii=True, indent=1)
    _sync(path)
    for each in folders:
        _sync(each)
    try:
        os.rename(ready, os.path.join(job.dest, f"{_FOLDER}{manifest['number']:08d}"))
    except OSError as error:
        if not os.path.exists(os.path.join(job.dest, f"{_FOLDER}{manifest['number']:08d}")):
            raise
        raise ConfigError(
            f"{job.dest}: another export has ended meanwhile and has what this one was to write; nothing of this one "
            "is kept: run it again for what is left"
        ) from error
    for each in (job.dest, os.path.dirname(job.dest)):  # which may be new itself
        _sync(each)


def _sync(path: str, *, begin: bool = False) -> None:
    """Have a file, or the names in a folder, on disk; or `begin` with what there is of a file that grows."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if begin:
            REAL.write_back(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear_old_staging(dest: str) -> None:
    """What crashed runs have left, when it is so old that none of them can be at work still."""
    try:
        found = [*os.scandir(os.path.join(dest, _STAGING))]
    except FileNotFoundError:
        return
    for each in found:
        if time.time() - each.stat().st_mtime > _STAGING_TTL_S:
            shutil.rmtree(each.path, ignore_errors=True)
