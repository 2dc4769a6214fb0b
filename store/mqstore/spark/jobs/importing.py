"""Rows of files as messages: Parquet, JSON lines, CSV; with Spark also Delta, and SQL expressions (spark.md B7, B6).

    mapping     what a message is made of -> a column of the files, or an SQL expression over them
    task        a file, or some row groups of a large one: read, cast, encoded, staged
    publish     the shards in the order of the files (`mqstore.spark.publish`), so rows lie in the log as in the files

Columns are read by Arrow in the tasks, with Spark and without: so the result is the same. Of JSON lines Arrow takes
names and types from the beginning of a file; there may be more further on, so we look at all of it first. Only what
Arrow has no words for (expressions, Delta) is first made to Parquet by Spark, under the target's `_staging`, and a
wanted order by Spark or, without it, in the memory of this process; the tasks then read those files.

A row that a message cannot be made of is refused: its value does not fit, or a put would not take it. Refused rows end
the import before anything is published, or with `refused` go to Parquet files there, each with its reason.

An import is known to its target by its id, as a replay is: run again, it writes nothing. Knows no pyspark.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.dataset as ds
import pyarrow.json as pajson
import pyarrow.parquet as pq

from mqstore.errors import ConfigError, InvalidMessageError
from mqstore.files.beneath import resolved
from mqstore.files.filesystem import REAL
from mqstore.spark import publish
from mqstore.spark.encode import Encoded, Encoder
from mqstore.spark.inputs import INPUTS
from mqstore.spark.jobs.rewrite import app_of, remove_if_empty
from mqstore.spark.jobs.shape import Progress, Shaped, run
from mqstore.spark.sinkoptions import SinkOptions
from mqstore.spark.staging import STAGING, ShardInfo, make_folders, transaction_folder, write_shards

__all__ = ["Format", "ImportPlan", "ImportReport", "import_plan", "import_rows"]

Format = Literal["parquet", "json", "csv", "delta"]
_FORMATS: Final = ("parquet", "json", "csv", "delta")
_NUMBER: Final = re.compile("0|[1-9][0-9]{0,17}")
_PROPERTY: Final = "properties."
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_ROWS = 8192
_TASK_BYTES = 128 << 20
_JSON_BYTES = 16 << 20
"""Of a file that are parsed at once."""
_REASONS = 20
_UTC_US: Final = pa.timestamp("us", "UTC")
_TYPES: Final[Mapping[str, Any]] = {
    "binary": pa.binary(),
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": _UTC_US,
}


@dataclass(frozen=True, slots=True)
class ImportPlan(Shaped):
    """What an import would read."""

    files: int
    bytes: int
    rows: int | None
    """None where only reading tells: all but Parquet."""
    tasks: int


@dataclass(frozen=True, slots=True)
class ImportReport(Shaped):
    """What an import has done."""

    id: str
    dest: str
    target: str
    already: bool
    """The target had it before; nothing was read."""
    read: int
    messages: int
    bytes: int
    """Of records."""
    refused: int
    topics: Mapping[str, int]
    """Messages by topic; delayed ones under that of the engine where they wait."""
    reasons: Mapping[str, int]
    """Refused rows by reason, the most frequent ones."""
    refused_files: tuple[str, ...]
    stores: tuple[str, ...]
    """target=set: ids of the new stores."""
    seconds: float


def import_rows(
    spark: Any,
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dest: str | os.PathLike[str],
    *,
    format: Format = "parquet",  # noqa: A002 - what Spark calls it
    mapping: Mapping[str, str] | None = None,
    topic: str | None = None,
    order: str | Sequence[str] | None = None,
    target: str = "store",
    queues: int = 8,
    refused: str | os.PathLike[str] | None = None,
    validate: bool = True,
    id: str | None = None,  # noqa: A002
    progress: Progress | None = None,
) -> ImportReport:
    """Put the rows of `source` (files, folders, globs) as messages into `dest`. `spark`: a session, or None to run
    here; expressions and Delta need one.

    `mapping`: what a message is made of (a column of `docs/spark-writing.md`, or `properties.NAME`) -> a column of the
    files, or an SQL expression; None: columns that have such names. `topic`: where all of them go. `order`: columns to
    sort all rows by, each maybe with ` desc`. `refused`: a folder for rows that are refused. `validate=False`: as the
    sink's option. Numbers are taken as times in ms since the epoch, times without a zone as UTC.

    Raises ConfigError for arguments, InvalidMessageError for the first refused row if `refused` is None; then nothing
    was published.
    """
    started = time.monotonic()
    job = _Job.of(source, dest, format, mapping, topic, order, target, queues, refused, validate, id)
    options = job.options
    if publish.is_settled(options, job.app, 0):
        return ImportReport(job.id, options.path, target, True, 0, 0, 0, 0, {}, {}, (), (), time.monotonic() - started)
    plain = job.plainly_mapped(spark)
    plan = publish.plan_target(options)
    made = not os.path.lexists(options.path)
    folder = Path(options.path) / STAGING / f"{job.app}-0.rows-{secrets.token_hex(6)}"
    published = None
    try:
        work, tasks = (job.work(plan), job.tasks()) if plain else job.rewritten(spark, folder, plan)
        staged = run(spark, tasks, partial(_stage, work), progress, f"mqstore import to {options.path}")
        shards = [shard for each in staged for shard in each.shards]
        files = _place_refused(job, staged)
        if shards:
            published = publish.commit(options, publish.Commit(job.app, 0, shards, writer=job.writer))
    finally:
        REAL.remove_tree(folder)
        if published is None:
            publish.abort(options, job.app, 0, writer=job.writer)
        remove_if_empty(str(folder.parent))
        if made:
            remove_if_empty(options.path)
        if job.refused is not None:
            # What a killed run has left goes with the first that succeeds.
            REAL.remove_tree(job.refused_staging if published is None else job.refused_staging.parent)
            remove_if_empty(str(job.refused_staging.parent))
            remove_if_empty(job.refused)
    topics: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for shard in shards:
        for (name, _), count in shard.queues.items():
            topics[name] += count
    for each in staged:
        reasons.update(each.reasons)
    return ImportReport(
        job.id,
        options.path,
        target,
        published is not None and published.already,
        sum(each.read for each in staged),
        sum(shard.records for shard in shards),
        sum(shard.bytes for shard in shards),
        reasons.total(),
        dict(sorted(topics.items())),
        dict(reasons.most_common(_REASONS)),
        files,
        published.stores if published is not None else (),
        time.monotonic() - started,
    )


def import_plan(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dest: str | os.PathLike[str],
    *,
    format: Format = "parquet",  # noqa: A002
    mapping: Mapping[str, str] | None = None,
    topic: str | None = None,
    order: str | Sequence[str] | None = None,
    target: str = "store",
    queues: int = 8,
    refused: str | os.PathLike[str] | None = None,
    validate: bool = True,
    id: str | None = None,  # noqa: A002
) -> ImportPlan:
    """What `import_rows` would read. Raises what it raises before it begins, but for expressions, which only Spark can
    check."""
    job = _Job.of(source, dest, format, mapping, topic, order, target, queues, refused, validate, id)
    publish.plan_target(job.options)
    files = [] if format == "delta" else job.files
    size = sum(os.path.getsize(path) for path in files)
    rows = sum(pq.read_metadata(path).num_rows for path in files) if format == "parquet" else None
    return ImportPlan(len(files), size, rows, 0 if format == "delta" else len(job.tasks()))


# -- what is to be done ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    """Some rows: a file, or row groups of it."""

    number: int
    path: str
    groups: tuple[int, ...] | None = None
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class _Work:
    """What tasks are told."""

    app: str
    writer: str
    options: SinkOptions
    plan: publish.Plan
    format: str
    base: str
    """Folder above the files: the parts of their paths below it that read name=value are columns, too."""
    mapping: Mapping[str, str]
    refused: str | None
    """Folder in which refused rows are staged; None: the first one ends it."""
    tells: bool = True
    """Whether file and row mean something to who asked."""


@dataclass(frozen=True, slots=True)
class _Job:
    source: tuple[str, ...]
    options: SinkOptions
    format: str
    mapping: Mapping[str, str]
    order: tuple[str, ...]
    refused: str | None
    id: str
    app: str
    files: list[str] = field(default_factory=list)
    schema: Any = None
    """Of the files, partitions included; None for Delta."""
    writer: str = field(default_factory=lambda: secrets.token_hex(16))
    """Where it stages, messages and refused rows, apart from the same import that was started a second time."""

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        dest: str | os.PathLike[str],
        format: str,  # noqa: A002
        mapping: Mapping[str, str] | None,
        topic: str | None,
        order: str | Sequence[str] | None,
        target: str,
        queues: int,
        refused: str | os.PathLike[str] | None,
        validate: bool,
        name: str | None,
    ) -> _Job:
        if format not in _FORMATS:
            raise ConfigError(f"format={format!r}: there are {', '.join(_FORMATS)}")
        given = {"path": os.path.abspath(os.fspath(dest)), "target": target, "queues": str(queues)}
        given |= {"validate": "true" if validate else "false"} | ({} if topic is None else {"topic": topic})
        options = SinkOptions.parse(given)
        paths = tuple(map(os.path.abspath, [source] if isinstance(source, str | os.PathLike) else source))
        by = (order,) if isinstance(order, str) else tuple(order or ())
        place = None if refused is None else resolved(os.path.abspath(os.fspath(refused)))
        said = [paths, format, dict(mapping or {}), topic, by, options.path, target, queues, validate]
        name = name or hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=10).hexdigest()
        app = app_of("import", name)
        if format == "delta":
            if mapping is None:
                raise ConfigError("format=delta: give a mapping; only Spark knows the columns of a table")
            return cls(paths, options, format, _checked(mapping, topic), by, place, name, app)
        files = _files(paths)
        if format == "json":
            wanted = {*(INPUTS if mapping is None else mapping.values()), *(each.removesuffix(" desc") for each in by)}
            there = _json_columns(files[0], wanted, until_found=True)
            if not there:
                raise ConfigError(f"{files[0]} has no rows, and the columns are those of the first file: leave it out")
            folders = {each.name: each.type for each in _folders(files, _base(paths))}
            schema = pa.schema({**folders, **there})
        else:
            schema = _dataset(files, format, _base(paths), ()).schema
        if mapping is None:
            mapping = {name: name for name in schema.names if name in INPUTS}
        return cls(paths, options, format, _checked(mapping, topic), by, place, name, app, files, schema)

    @property
    def refused_staging(self) -> Path:
        return Path(self.refused or "", f"_{self.app}", self.writer)

    def plainly_mapped(self, spark: Any) -> bool:
        """Whether the tasks can read the files as they are. ConfigError for what needs Spark, if there is none."""
        names = () if self.schema is None else self.schema.names
        strange = [f"{what}={of!r}" for what, of in self.mapping.items() if of not in names]
        if spark is None and (strange or self.format == "delta"):
            raise ConfigError(
                "format=delta needs Spark"
                if self.format == "delta"
                else f"mapping: {', '.join(strange)} names no column; there are {', '.join(names)}. If it is an SQL "
                "expression, it needs Spark"
            )
        missing = [by for by in self.order if by.removesuffix(" desc") not in names] if spark is None else []
        if missing:
            raise ConfigError(f"order: {', '.join(missing)} is no column; there are {', '.join(names)}")
        return not strange and not self.order and self.format != "delta"

    def work(self, plan: publish.Plan) -> _Work:
        refused = None if self.refused is None else str(self.refused_staging)
        return _Work(self.app, self.writer, self.options, plan, self.format, _base(self.source), self.mapping, refused)

    def tasks(self) -> list[_Task]:
        found: list[_Task] = []
        for path in self.files:
            for groups, first in _groups(path) if self.format == "parquet" else [(None, 0)]:
                found.append(_Task(len(found), path, groups, first))
        return found

    def rewritten(self, spark: Any, folder: Path, plan: publish.Plan) -> tuple[_Work, list[_Task]]:
        """Have the rows in Parquet files, mapped and in order, and read those."""
        make_folders(folder)
        made = folder / "rows"
        names = {what: f"c{number}" for number, what in enumerate(self.mapping)}
        if spark is not None:
            _by_spark(spark, self, names, str(made))
        else:
            table = _sorted(self._table(), self.order)
            os.mkdir(made)
            columns = [table.column(of) for of in self.mapping.values()]
            pq.write_table(pa.table(columns, names=[*names.values()]), made / "part-0.parquet")
        refused = None if self.refused is None else str(self.refused_staging)
        work = _Work(self.app, self.writer, self.options, plan, "parquet", str(made), names, refused, tells=False)
        tasks: list[_Task] = []
        for path in _files((str(made),)):
            for groups, first in _groups(path):
                tasks.append(_Task(len(tasks), path, groups, first))
        return work, tasks

    def _table(self) -> Any:
        """All rows, in memory."""
        base = _base(self.source)
        try:
            if self.format != "json":
                return _dataset(self.files, self.format, base, self.mapping.values()).to_table()
            names = [*dict.fromkeys([*self.mapping.values(), *(each.removesuffix(" desc") for each in self.order)])]
            kinds = _folders(self.files, base)
            batches = [batch for path in self.files for batch in _json_rows(path, base, names, kinds)]
            return pa.concat_tables([pa.Table.from_batches([each]) for each in batches], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(f"{', '.join(self.source)} cannot be read as {self.format}: {error}") from error


def _sorted(table: Any, order: Sequence[str]) -> Any:
    """As Spark has it: what is null is smaller than all else."""
    keys: list[tuple[str, str]] = []
    by = pa.table({"row": np.arange(len(table))})
    for number, each in enumerate(order):
        values = table.column(each.removesuffix(" desc"))
        way = "descending" if each.endswith(" desc") else "ascending"
        by = by.append_column(f"valid{number}", values.is_valid().cast(pa.int8()))
        by = by.append_column(f"value{number}", values)
        keys += [(f"valid{number}", way), (f"value{number}", way)]
    return table.take(pc.sort_indices(by, sort_keys=[*keys, ("row", "ascending")]))


def _by_spark(spark: Any, job: _Job, names: Mapping[str, str], out: str) -> None:
    """What needs Spark, done by it; the columns that are not expressions by their names, whatever these are."""
    reader = spark.read.format(job.format)
    if job.format == "csv":
        reader = reader.option("header", "true")
    frame = reader.load([*job.source])
    texts = {each.name for each in _folders(job.files, _base(job.source)) if each.type == pa.string()}
    if texts:  # Spark would take 007 for 7
        schema = frame.schema.jsonValue()
        for each in schema["fields"]:
            each["type"] = "string" if each["name"] in texts else each["type"]
        frame = reader.schema(type(frame.schema).fromJson(schema)).load([*job.source])
    if job.order:
        frame = frame.orderBy(*(_by(frame, each) for each in job.order))
    columns = []
    for what, of in job.mapping.items():
        text = "`" + of.replace("`", "``") + "`" if of in frame.columns else of
        columns.append(f"{text} as {names[what]}")
    frame.selectExpr(*columns).write.parquet(out)


def _by(frame: Any, text: str) -> Any:
    column = frame[text.removesuffix(" desc")]
    return column.desc() if text.endswith(" desc") else column.asc()


def _checked(mapping: Mapping[str, str], topic: str | None) -> dict[str, str]:
    """ConfigError for what no message is made of."""
    unknown = [what for what in mapping if what not in INPUTS and not what.removeprefix(_PROPERTY)]
    unknown += [what for what in mapping if what not in INPUTS and not what.startswith(_PROPERTY)]
    if unknown:
        raise ConfigError(
            f"mapping: a message has no {', '.join(map(repr, unknown))}; there are {', '.join(INPUTS)}, and "
            f"{_PROPERTY}NAME for each property"
        )
    if "body" not in mapping:
        raise ConfigError("mapping: say what the body is, as in {'body': 'payload'}")
    if topic is None and "topic" not in mapping:
        raise ConfigError("no topic: map one, or give topic")
    if "properties" in mapping and any(what.startswith(_PROPERTY) for what in mapping):
        raise ConfigError("mapping: properties, or properties by name, not both")
    return dict(mapping)


def _files(paths: Sequence[str]) -> list[str]:
    """The files, in the order of `paths`, those of a folder by name; what begins with `_` or `.` is no data."""
    found: list[str] = []
    for path in paths:
        for each in sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]:
            if os.path.isdir(each):
                inside = [Path(folder, name) for folder, _, names in os.walk(each) for name in names]
                found += sorted(str(file) for file in inside if _is_data(file.relative_to(each)))
            elif os.path.exists(each):
                found.append(each)
    if not found:
        raise ConfigError(f"no file in {', '.join(paths)}")
    return found


def _is_data(path: Path) -> bool:
    return not any(part[0] in "_." for part in path.parts)


def _base(paths: Sequence[str]) -> str:
    """The folder above all."""
    folders = [path if os.path.isdir(path) else os.path.dirname(path) for path in paths]
    while any(glob.has_magic(folder) for folder in folders):
        folders = [os.path.dirname(folder) if glob.has_magic(folder) else folder for folder in folders]
    return os.path.commonpath(folders)


def _dataset(files: Sequence[str], format: str, base: str, columns: Any) -> Any:  # noqa: A002
    """As Arrow sees them. CSV is text until it is known what it is to be: types guessed from a file's first lines
    would differ from file to file."""
    how: Any = format
    try:
        if format == "csv":
            names = [*columns] or _header(files[0])
            convert = pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=[""],
            )
            how = ds.CsvFileFormat(convert_options=convert)
        return ds.dataset(
            [*files],
            format=how,
            partitioning=ds.partitioning(_folders(files, base), flavor="hive"),
            partition_base_dir=base,
        )
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{files[0]} cannot be read as {format}: {error}") from error


def _blocks(path: str) -> Iterator[bytes]:
    """Whole lines of a file, unpacked by its name as Arrow does it."""
    with io.BufferedReader(pa.input_stream(path)) as file:
        while block := file.read(_JSON_BYTES):
            block += file.readline()
            if not block.isspace():
                yield block


def _parsed(block: bytes, **options: Any) -> Any:
    how = pajson.ReadOptions(use_threads=False, block_size=len(block))
    return pajson.read_json(pa.BufferReader(block), how, pajson.ParseOptions(**options))


def _json_columns(path: str, wanted: Collection[str], *, until_found: bool = False) -> dict[str, Any]:
    """The columns of a file and their types, by all of its lines; or `until_found`, as far as all that are wanted have
    been seen. ConfigError for damage, and for a wanted column that changes its kind."""
    found: dict[str, Any] = {}
    try:
        for block in _blocks(path):
            for field in _guessed(block, frozenset(wanted)):
                kind = _untimed(field.type)
                if field.name in wanted and field.name in found:
                    both = [pa.schema({field.name: each}) for each in (found[field.name], kind)]
                    kind = pa.unify_schemas(both, promote_options="permissive").types[0]
                found[field.name] = kind
            if until_found and found.keys() >= set(wanted):
                break
    except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as json: {error}") from error
    return found


def _guessed(block: bytes, wanted: frozenset[str]) -> Any:
    """The columns of some lines, with the types that Arrow sees in them."""
    try:
        return _parsed(block).schema
    except pa.ArrowInvalid as error:
        # Perhaps since a column that nobody wants is now a number and now text. That is no reason to stop.
        try:
            rows = [json.loads(line) for line in block.splitlines() if line.strip()]
            less = [{name: row[name] for name in row.keys() & wanted} for row in rows]
        except (ValueError, AttributeError):
            raise error from None
        return _parsed("\n".join(map(json.dumps, less)).encode()).schema


def _untimed(kind: Any) -> Any:
    """A type that was guessed, with text for times: JSON knows none, and text is not to be written in another way since
    it looks like one. Where a message has a time, it is made of the text later."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_untimed(kind.value_type))
    return pa.struct([(each.name, _untimed(each.type)) for each in kind]) if pa.types.is_struct(kind) else kind


def _partition(path: str, base: str) -> dict[str, Any]:
    """The columns that a file has by its name=value folders; the value is that of all rows. A number is what is spelled
    as one: a topic 007 is not 7."""
    named = [part.partition("=") for part in Path(os.path.relpath(path, base)).parent.parts if "=" in part]
    texts = {name: None if value == _NULL else unquote(value) for name, _, value in named}
    numbers = {name: int(text) for name, text in texts.items() if text is not None and _NUMBER.fullmatch(text)}
    return {name: pa.scalar(value) for name, value in {**texts, **numbers}.items()}


def _folders(files: Sequence[str], base: str) -> Any:
    """The types of such columns, of all files together: text, unless all are numbers. What Arrow and Spark take for
    numbers and times by themselves is more."""
    kinds: dict[str, set[Any]] = {}
    for path in files:
        for name, value in _partition(path, base).items():
            kinds.setdefault(name, set()).add(value.type)
    number, null = pa.int64(), pa.null()
    return pa.schema(
        [(name, number if number in each <= {number, null} else pa.string()) for name, each in kinds.items()]
    )


def _json_rows(path: str, base: str, names: Sequence[str], kinds: Any = None) -> Iterator[Any]:
    """The columns `names` of a file, or of its folders; null where neither has one. `kinds`: as of `_folders`, for who
    puts those of several files together. Raises as `_json_columns`."""
    there = _json_columns(path, names)
    folders = {name: value for name, value in _partition(path, base).items() if name not in there}
    if kinds is not None:
        folders = {name: value.cast(kinds.field(name).type) for name, value in folders.items()}
    # Each name is asked for, as rows that have none of these columns would not be counted.
    schema = pa.schema([(name, there.get(name, pa.null())) for name in names])
    for block in _blocks(path):
        for batch in _parsed(block, explicit_schema=schema, unexpected_field_behavior="ignore").to_batches():
            columns = [
                pa.repeat(folders[name], len(batch)) if name in folders else batch.column(name) for name in names
            ]
            yield pa.RecordBatch.from_arrays(columns, names=[*names])


def _header(path: str) -> list[str]:
    with pacsv.open_csv(path) as reader:
        return [*reader.schema.names]


def _groups(path: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """Row groups of a Parquet file, as many together as make a task, and the number of their first row."""
    metadata = pq.read_metadata(path)
    group: list[int] = []
    size = rows = first = 0
    for number in range(metadata.num_row_groups):
        each = metadata.row_group(number)
        if group and size + each.total_byte_size > _TASK_BYTES:
            yield tuple(group), first
            group, size, first = [], 0, rows
        group.append(number)
        size += each.total_byte_size
        rows += each.num_rows
    if group:
        yield tuple(group), first


# -- in the tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Staged:
    """What a task tells the driver."""

    shards: tuple[ShardInfo, ...]
    read: int
    reasons: Mapping[str, int]
    refused: str | None
    """The file of its refused rows."""


class _Refused:
    """The rows of a task that are refused, and the file they go to."""

    def __init__(self, work: _Work, task: _Task) -> None:
        self._work = work
        self._task = task
        self._writer: Any = None
        self.path: str | None = None
        self.reasons: Counter[str] = Counter()

    def add(self, batch: Any, first: int, reasons: Mapping[int, str]) -> None:
        """Rows of a batch as it was read, whose first row has that number in the file."""
        if not reasons:
            return
        rows = sorted(reasons)
        where = [f"{self._task.path}, row {first + row}" if self._work.tells else "a row" for row in rows]
        if self._work.refused is None:
            raise InvalidMessageError(
                f"{where[0]}: {reasons[rows[0]]}; refused=DIR (--refused) leaves such rows out, and keeps them there",
                "row",
            )
        self.reasons.update(reasons.values())
        told = self._work.tells
        table = pa.Table.from_batches([batch.take(pa.array(rows, pa.int64()))])
        table = table.append_column("_reason", pa.array([reasons[row] for row in rows], pa.string()))
        table = table.append_column("_file", pa.array([self._task.path if told else None] * len(rows), pa.string()))
        table = table.append_column("_row", pa.array([first + row if told else None for row in rows], pa.int64()))
        if self._writer is None:
            os.makedirs(self._work.refused, exist_ok=True)
            self.path = os.path.join(self._work.refused, f"{self._task.number}-{secrets.token_hex(6)}.parquet")
            self._writer = pq.ParquetWriter(self.path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _stage(work: _Work, task: _Task) -> _Staged:
    options = work.options
    folder = transaction_folder(Path(options.path), work.app, 0, work.writer)
    refused = _Refused(work, task)
    counts: Counter[str] = Counter()
    shards = []
    try:
        pieces = _encoded(work, task, refused, counts)
        for shard in write_shards(pieces, folder, task.number, 0, profile=work.plan.profile):
            if options.target == "set":
                publish.make_member(folder, shard, options)
            shards.append(shard)
    finally:
        refused.close()
    return _Staged(tuple(shards), counts["read"], dict(refused.reasons), refused.path)


def _encoded(work: _Work, task: _Task, refused: _Refused, counts: Counter[str]) -> Iterator[Encoded]:
    options = work.options

    def encoder() -> Encoder:
        return Encoder(
            work.plan.rules,
            app=work.app,
            version=0,
            partition=task.number,
            topic=options.topic,
            validate=options.validate,
        )

    ours = encoder()
    row = task.first_row
    for batch in _batches(work, task):
        columns, reasons = _mapped(work.mapping, batch)
        good = np.array([number for number in range(len(batch)) if number not in reasons], np.int64)
        rows = columns if len(good) == len(batch) else columns.take(pa.array(good))
        try:
            pieces = [*ours.encode(rows)]
        except InvalidMessageError:
            bad: dict[int, str] = {}
            _find_bad(encoder, rows, 0, bad)
            reasons |= {int(good[number]): why for number, why in bad.items()}
            kept = np.array([number for number in range(len(rows)) if number not in bad], np.int64)
            pieces = [*ours.encode(rows.take(pa.array(kept)))]
        refused.add(batch, row, reasons)
        counts["read"] += len(batch)
        row += len(batch)
        yield from (piece for piece in pieces if piece.records)


def _batches(work: _Work, task: _Task) -> Iterator[Any]:
    """The mapped columns of a task's rows; null where the file has no such column. ConfigError for damage."""
    names = [*dict.fromkeys(work.mapping.values())]
    try:
        for batch in _read(work, task, names):
            there = batch.schema.names
            columns = {name: batch.column(name) if name in there else pa.nulls(len(batch)) for name in names}
            whole = pa.RecordBatch.from_arrays([*columns.values()], names=names)
            for start in range(0, len(whole), _ROWS):
                yield whole.slice(start, _ROWS)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{task.path} cannot be read as {work.format}: {error}") from error


def _read(work: _Work, task: _Task, names: Sequence[str]) -> Iterator[Any]:
    """The rows of a task, with those of the columns that it has."""
    if work.format == "json":
        yield from _json_rows(task.path, work.base, names)
        return
    dataset = _dataset([task.path], work.format, work.base, names)
    there = [name for name in names if name in dataset.schema.names]
    [fragment] = dataset.get_fragments()
    if task.groups is not None:
        fragment = fragment.subset(row_group_ids=[*task.groups])
    yield from fragment.to_batches(dataset.schema, columns=there, batch_size=_ROWS, use_threads=False)


def _find_bad(encoder: Callable[[], Encoder], rows: Any, first: int, bad: dict[int, str]) -> None:
    """Which of the rows the encoder refuses, and why: by halves, as it names one row at a time."""
    if not len(rows):
        return
    try:
        for _ in encoder().encode(rows):
            pass
    except InvalidMessageError as error:
        if len(rows) == 1:
            said = str(error).partition(", ")[2] or str(error)
            bad[first] = said.replace("validate=false", "validate=False (--no-validate)")
            return
        half = len(rows) // 2
        _find_bad(encoder, rows.slice(0, half), first, bad)
        _find_bad(encoder, rows.slice(half), first + half, bad)


# -- casts -------------------------------------------------------------------------------------------------------------


def _mapped(mapping: Mapping[str, str], batch: Any) -> tuple[Any, dict[int, str]]:
    """The columns of a message, and why rows cannot have them."""
    reasons: dict[int, str] = {}
    columns: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    for what, of in mapping.items():
        values = batch.column(of)
        values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        if what.startswith(_PROPERTY):
            properties[what.removeprefix(_PROPERTY)] = _cast(what, values, pa.string(), reasons)
        else:
            columns[what] = _cast(what, values, _type_of(what, values.type), reasons)
    if properties:
        columns["properties"] = _map_of(properties, len(batch))
    for what in ("body", "topic"):
        if what in columns and columns[what].null_count:
            for row in np.flatnonzero(columns[what].is_null().to_numpy(zero_copy_only=False)).tolist():
                reasons.setdefault(row, f"column '{what}': null")
    return pa.RecordBatch.from_arrays([*columns.values()], names=[*columns]), reasons


def _type_of(what: str, kind: Any) -> Any:
    """What a column becomes: the type of the message's that is nearest to that of the file's."""
    if what == "keys" and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return pa.list_(pa.string())
    if what == "properties":
        return pa.map_(pa.string(), pa.string())
    if what == "body":
        binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
        return pa.binary() if binary else pa.string()
    return pa.string() if what == "keys" else _TYPES[INPUTS[what].types[-1]]


def _cast(what: str, values: Any, kind: Any, reasons: dict[int, str]) -> Any:
    if pa.types.is_timestamp(kind):
        values = _as_times(values, reasons, what)
    if values.type.equals(kind):
        return values
    try:
        return values.cast(kind)
    except pa.ArrowNotImplementedError as error:
        raise ConfigError(
            f"mapping: {what} cannot be made of {values.type} ({error}); Spark can, by an expression as to_json(column)"
        ) from error
    except (pa.ArrowInvalid, UnicodeDecodeError):
        found = []
        for row, value in enumerate(values):
            try:
                found.append(value.cast(kind).as_py() if value.is_valid else None)
            except (pa.ArrowInvalid, UnicodeDecodeError) as error:
                reasons.setdefault(row, f"column {what!r}: {error}")
                found.append(None)
        return pa.array(found, kind)


def _as_times(values: Any, reasons: dict[int, str], what: str) -> Any:
    """Times with a zone."""
    kind = values.type
    if pa.types.is_integer(kind):
        return values.cast(pa.int64()).cast(pa.timestamp("ms")).cast(_UTC_US)
    if pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz is None):
        return values.cast(pa.timestamp("us"), safe=False).cast(_UTC_US)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return values
    found: list[datetime | None] = []
    for row, text in enumerate(values.to_pylist()):
        try:
            time_ = None if text is None else _moment(text)
        except ValueError as error:
            reasons.setdefault(row, f"column {what!r}: {error}")
            time_ = None
        found.append(time_)
    return pa.array(found, _UTC_US)


def _moment(text: str) -> datetime:
    if text.lstrip("-").isdecimal():
        return datetime.fromtimestamp(int(text) / 1000, UTC)
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _map_of(properties: Mapping[str, Any], rows: int) -> Any:
    """A map a row, of columns."""
    count = len(properties)
    keys = pa.array([*properties] * rows, pa.string())
    columns = pa.concat_arrays([*properties.values()])
    index = (np.arange(rows)[:, None] + np.arange(count) * rows).reshape(-1)
    edges = pa.array(np.arange(rows + 1, dtype=np.int32) * count)
    return pa.MapArray.from_arrays(edges, keys, columns.take(pa.array(index)))


# -- refused rows ------------------------------------------------------------------------------------------------------


def _place_refused(job: _Job, staged: Sequence[_Staged]) -> tuple[str, ...]:
    """Put the files of refused rows where they were asked for, in place of those of a run that failed. Before the
    commit: after it nobody would make them again."""
    if job.refused is None:
        return ()
    for old in glob.glob(os.path.join(glob.escape(job.refused), f"{job.app}-*.parquet")):
        os.unlink(old)
    found = []
    for number, path in enumerate(each.refused for each in staged):
        if path is not None:
            found.append(os.path.join(job.refused, f"{job.app}-{number:05d}.parquet"))
            os.replace(path, found[-1])
    return tuple(found)
