"""Writers of `df.write.format("mqstore")` and `df.writeStream` (spark#writer-calls, spark#commit).

    planner process     writer, streamWriter      check options, columns and target; make rules for the tasks
    executors' workers  write                     rows -> records (`encode`) -> staged shards (`staging`)
    planner process     commit or abort           shards -> messages (`publish`), or nothing

Tasks take the batch of a stream from local properties, and their messages pass it to the commit. Spark does not
document these properties: a test checks the names, and without them a write fails with an error that names an
alternative.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from mqstore.columnar.encode import Encoder
from mqstore.columnar.inputs import check_columns
from mqstore.errors import ConfigError, MQStoreError
from mqstore.jobs.errors import plain_errors, settle
from mqstore.jobs.options.options import APP_NAME, NO_TABLES, SinkOptions
from mqstore.jobs.writing.publish import Commit, abort, check_lock, commit, make_member, plan_target
from mqstore.jobs.writing.staging import ShardInfo, transaction_folder, write_shards

QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"
"""Local properties of a task of a streaming query."""
EXECUTION_PROPERTIES: Final = ("spark.sql.execution.id", "spark.sql.execution.root.id")
"""Local properties of a task: the execution that writes, and the execution that the user has started."""


@dataclass
class Staged(WriterCommitMessage):
    """Message from a task to the commit."""

    app: str
    version: int
    partition: int
    shards: tuple[ShardInfo, ...]


@plain_errors()
def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """Return the writer of a job. ConfigError for invalid options, columns or target.

    Raises StoreLockedError if the target is locked, because the commit would find this only after all tasks. The writer
    of a stream does not check this, because Spark creates it again for each commit and abort.
    """
    writer = _BatchWriter(given, schema, overwrite)
    check_lock(writer.options)
    return writer


@plain_errors()
def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """Return the writer of a stream's batch, like `batch_writer`. `overwrite` means output mode `complete`."""
    return _StreamWriter(given, schema, overwrite)


class _Writer:
    """Common base of both writers: Spark needs one class for jobs and one for streams.
    It is pickled for every task, so it has only plain values."""

    is_stream = False

    def __init__(self, given: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        options = SinkOptions.parse(given)
        check_columns({each.name: each.dataType.simpleString() for each in schema.fields}, topic=options.topic)
        if overwrite:
            options.check_overwrite()
        if self.is_stream:
            options.check_stream()
        self.options = options
        self.rules = plan_target(self.options)
        self.overwrite = overwrite
        self.batch = (options.txn_app_id or f"job-{uuid.uuid4().hex}", options.txn_version or 0)
        """App and version of a job. For a stream only its tasks know them."""
        if options.topic is not None:  # checked here, once, not with the first row of each task
            try:
                self.rules.topic(options.topic)
            except MQStoreError as error:
                raise ConfigError(f"option topic={options.topic!r}: {error}") from error

    @plain_errors()
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        settle()
        context = TaskContext.get()
        assert context is not None, "write() runs in a task"
        if not self.is_stream:
            _refuse_new_table(context.getLocalProperty)
        app, version = _batch_of(context.getLocalProperty) if self.is_stream else self.batch
        options, partition = self.options, context.partitionId()
        max_rows = options.max_rows_per_shard
        encoder = Encoder(
            self.rules, app=app, version=version, partition=partition, topic=options.topic, max_rows=max_rows
        )
        folder = transaction_folder(Path(options.path), app, version)
        shards = []
        for shard in write_shards(
            (piece for batch in iterator for piece in encoder.encode(batch)),
            folder,
            partition,
            context.attemptNumber(),
            profile=self.rules.profile,
            durable=options.target == "inbox",
            max_rows=max_rows,
        ):
            if options.target == "set":
                make_member(folder, shard, options)
            shards.append(shard)
        return Staged(app, version, partition, tuple(shards))

    @plain_errors()
    def commit(self, messages: Any, *batch_id: int) -> None:
        """Publish the shards. `batch_id` is passed for a stream only, whose messages have it already."""
        if self.is_stream and None in messages:  # Spark has not called `write`, and would continue without the rows
            raise ConfigError(
                "this sink does not support trigger(continuous=...): nothing was written. Use "
                "trigger(processingTime=...) or trigger(availableNow=True), and the same checkpoint"
            )
        staged = sorted((each for each in messages if each is not None), key=lambda each: each.partition)
        if self.is_stream and not staged:
            return  # a batch without tasks: nothing was written
        app, version = (staged[0].app, staged[0].version) if self.is_stream else self.batch
        if any((each.app, each.version) != (app, version) for each in staged):
            raise ConfigError(f"tasks of different batches in one commit of {app!r}, {version}; nothing was written")
        commit(
            self.options,
            Commit(
                app,
                version,
                [shard for each in staged for shard in each.shards],
                remembered=self.is_stream or self.options.txn_app_id is not None,
                overwrite=self.overwrite,
                query=self.is_stream,
            ),
        )

    @plain_errors()
    def abort(self, messages: Any, *batch_id: int) -> None:
        who = {(each.app, each.version) for each in messages if each is not None}
        for app, version in who if self.is_stream else {self.batch}:
            abort(self.options, app, version)


class _BatchWriter(_Writer, DataSourceArrowWriter):
    """Writer of a job."""


class _StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writer of a stream's batch."""

    is_stream = True


def _refuse_new_table(local_property: Callable[[str], str | None]) -> None:
    """Raise ConfigError for a write that creates a table of Spark's catalog, which Spark drops if the write fails.
    Its options are the same as those of `save`. But its execution is part of another one, which is otherwise true only
    in `foreachBatch`."""
    execution, root = map(local_property, EXECUTION_PROPERTIES)
    if root is not None and execution != root and local_property(QUERY_PROPERTY) is None:
        raise ConfigError(NO_TABLES)


def _batch_of(local_property: Callable[[str], str | None]) -> tuple[str, int]:
    """Return the query and the number of the batch that a task writes, from its local properties."""
    query, batch = local_property(QUERY_PROPERTY), local_property(BATCH_PROPERTY)
    if query is None or batch is None or not batch.isdecimal() or not APP_NAME.fullmatch(query):
        raise ConfigError(
            f"this version of Spark does not pass the query and batch to its tasks ({QUERY_PROPERTY}={query!r}, "
            f"{BATCH_PROPERTY}={batch!r}), so a stream cannot be written exactly once. Use "
            "writeStream.foreachBatch(...), and in it frame.write.format('mqstore').mode('append') with options "
            "txnAppId, a name for the stream, and txnVersion, the number of the batch"
        )
    return query, int(batch)


def ordered(frame: DataFrame, *, key: str = "sharding_key", by: Sequence[str]) -> DataFrame:
    """Return `frame` with all rows of a key in one partition, in the order of the columns `by`.

    A task writes the rows of its partition in their order, and its rows become one block of the log. So the messages of
    a key are in their queue in the order of `by`. Tasks have no order among them. Use this last before `write`, because
    later operations may move rows (except a `drop` of columns that a message does not have). All rows without a key are
    in one partition, which may become large.
    """
    by = [by] if isinstance(by, str) else by
    return frame.repartition(key).sortWithinPartitions(*by)
