"""The data source for PySpark: `spark.read.format("mqstore").load(path)`.

    driver's planner process    __init__, schema, reader, partitions
    executors' workers          read: opens the store that a slice names, yields Arrow batches

Spark pickles readers and forks workers. So nothing here is opened before `read`, and nothing stays open after it.
Filters are not pushed down (spark#pushdown).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceWriter,
        InputPartition,
    )
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType
except ImportError as error:  # pragma: no cover
    raise ImportError("mqstore on Spark needs pyspark 4.1 or later: pip install 'mqstore[spark]'") from error

from mqstore.columnar.columns import COLUMNS, arrow_schema, check_columns, check_once
from mqstore.errors import ConfigError
from mqstore.jobs.errors import plain_errors, settle
from mqstore.jobs.options.options import (
    ONLY_FOR_WRITING,
    SINK_OPTIONS,
    SOURCE_OPTIONS,
    SinkOptions,
    SourceOptions,
    refuse_table,
)
from mqstore.jobs.options.optiontable import unknown_option
from mqstore.jobs.reading.plan import plan
from mqstore.jobs.views import VIEWS, view_batch, view_stores
from mqstore.spark.slices import SliceReader


def register_source(spark: Any) -> None:
    """Register the data source in a session."""
    spark.dataSource.register(MQStoreDataSource)


class MQStoreDataSource(DataSource):
    """Data source for messages of stores, and for views of stores."""

    @plain_errors()
    def __init__(self, options: Any) -> None:
        settle()
        super().__init__(options)
        self._raw = dict(options)
        refuse_table(self._raw)
        writing = [name for name in self._raw if name.lower() in ONLY_FOR_WRITING]
        reading = [name for name in self._raw if name in SOURCE_OPTIONS and name not in SINK_OPTIONS]
        if writing and reading:
            raise ConfigError(f"option {writing[0]!r} is for writing and {reading[0]!r} for reading; leave one out")
        if writing:
            SinkOptions.parse(self._raw)
        else:
            self._columns  # noqa: B018  (parsed now, so that errors are raised at `load`)

    @cached_property
    def _given(self) -> SourceOptions:
        """Options of a query."""
        try:
            return SourceOptions.parse(self._raw)
        except ConfigError as error:
            passed = SINK_OPTIONS.passed_over
            unknown = [name for name in self._raw if name not in SOURCE_OPTIONS and name.lower() not in passed]
            if not unknown:
                raise
            name = unknown[0]  # Spark does not say whether it reads or writes
            if name in SINK_OPTIONS:
                there = ", ".join(SOURCE_OPTIONS.options)
                raise ConfigError(f"option {name!r} is for writing; to read there are {there}") from error
            raise unknown_option(name, SINK_OPTIONS, SOURCE_OPTIONS) from error

    @cached_property
    def _columns(self) -> list[str]:
        return _columns_of(self._given)

    @classmethod
    def name(cls) -> str:
        return "mqstore"

    @plain_errors()
    def schema(self) -> StructType:
        kinds = _kinds(self._given)
        return StructType([StructField(name, kinds[name]) for name in self._columns])

    @plain_errors()
    def reader(self, schema: StructType) -> DataSourceReader:
        settle()
        options = self._given.for_batch()
        body_as = _check_schema(options, schema)
        return MQStoreReader(options, [field.name for field in schema.fields], body_as)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from mqstore.spark.stream import RefusedStream, stream_reader

        settle()
        try:
            options = self._given.for_stream()
            return stream_reader(options, [field.name for field in schema.fields], _check_schema(options, schema))
        except ConfigError as error:
            return RefusedStream(error)  # Spark would hide this error in its own

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from mqstore.spark.sink import batch_writer

        settle()
        return batch_writer(self._raw, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from mqstore.spark.sink import stream_writer

        settle()
        return stream_writer(self._raw, schema, overwrite)


def _columns_of(options: SourceOptions) -> list[str]:
    """Return the columns of a row, by the options. Raises ConfigError."""
    if options.view != "messages":
        known = VIEWS[options.view].columns
        unknown = [name for name in options.columns or () if name not in known]
        if unknown:
            raise ConfigError(
                f"option columns: the view {options.view} has no {', '.join(map(repr, unknown))}; its columns are "
                f"{', '.join(known)}"
            )
        return list(known if options.columns is None else check_once(options.columns))
    keep = options.on_corrupt == "keep"
    columns = check_columns(options.columns, keep=keep, properties=options.include_properties)
    return [name for name in columns if name != "headers" or options.include_headers]


def _kinds(options: SourceOptions) -> dict[str, DataType]:
    """Return the types of all possible columns."""
    schema = arrow_schema(COLUMNS) if options.view == "messages" else VIEWS[options.view].schema
    kinds = {field.name: field.dataType for field in from_arrow_schema(schema)}
    return kinds | {"body": StringType()} if options.view == "messages" and options.body_as == "string" else kinds


def _check_schema(options: SourceOptions, schema: StructType) -> Any:
    """Check the schema of a query, and return the type in which to read bodies. Raises ConfigError."""
    known = _kinds(options)
    if not schema.fields:
        raise ConfigError("schema: it needs at least one column, else no rows are returned; queue_offset costs least")
    check_once(schema.names)
    as_string = False
    for field in schema.fields:
        if field.name not in known:
            raise ConfigError(f"schema: no column {field.name!r}; there are {', '.join(known)}")
        kind = known[field.name]
        if field.name == "body" and options.view == "messages" and field.dataType in (BinaryType(), StringType()):
            kind = field.dataType
            as_string = kind == StringType()
        if field.dataType != kind or not field.nullable:
            has, given = kind.simpleString(), field.dataType.simpleString() + " not null" * (not field.nullable)
            raise ConfigError(
                f"schema: column {field.name!r} is {has}, not {given}; columns and their values can be null"
            )
    return "string" if as_string else "binary"


class MQStoreReader(SliceReader, DataSourceReader):
    """Reader of a query, which plans on the driver and reads in tasks."""

    @plain_errors()
    def partitions(self) -> list[InputPartition]:
        if self._options.view != "messages":
            # By name, not by index: a plan is used again, and by then a glob or a set may have other stores.
            return [InputPartition(name) for name in view_stores(self._options)]
        return [InputPartition(slices) for slices in plan(self._options, by_region=True)]

    def _read(self, value: Any) -> Iterator[Any]:
        if self._options.view == "messages":
            yield from super()._read(value)
        else:
            yield view_batch(self._options.view, value, self._options).select(self._columns)
