"""The stream reader for PySpark: `spark.readStream.format("mqstore").load(path)`.

    one process per run  initialOffset, latestOffset, partitions, commit
    other processes      read, by a pickled copy of the reader; they share no state with the first

spark#stream-calls lists the calls that Spark makes. Spark hides an exception of `streamReader` in its own error, so a
reader is returned that raises it when called. pyspark 4.1 calls `latestOffset` without arguments, and has neither
limits nor available-now.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

try:
    from pyspark.sql.streaming import datasource as limits
except ImportError:  # pyspark 4.1
    limits = None

from mqstore.errors import ConfigError, MQStoreError
from mqstore.jobs.errors import plain_errors
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.progress import Limit, StreamProgress
from mqstore.spark.slices import SliceReader


class MQStoreStreamReader(SliceReader, DataSourceStreamReader):
    """Reader of a run of a streaming query."""

    def __init__(self, options: SourceOptions, columns: list[str], body_as: Any) -> None:
        super().__init__(options, columns, body_as)
        self._progress = StreamProgress(options)

    @plain_errors()
    def initialOffset(self) -> dict[str, Any]:
        return self._progress.initial()

    @plain_errors()
    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        return self._progress.latest(start, _limit_of(limit))

    @plain_errors()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(slices) for slices in self._progress.partitions(start, end)]

    @plain_errors()
    def commit(self, end: dict[str, Any]) -> None:
        self._progress.commit(end)


class RefusedStream(DataSourceStreamReader):
    """Stream reader for invalid options, which raises their error at the first call."""

    def __init__(self, error: MQStoreError) -> None:
        self._error = error

    @plain_errors()
    def _refuse(self, *_: Any) -> Any:
        raise self._error

    initialOffset = latestOffset = partitions = read = _refuse  # noqa: N815  (names of Spark)


def _limit_of(limit: Any) -> Limit | None:
    """Return the limit that Spark requests, or None. A trigger may request all messages despite the options."""
    if hasattr(limit, "max_rows"):
        return Limit(limit.max_rows, "messages")
    return Limit(limit.max_bytes, "bytes") if hasattr(limit, "max_bytes") else None


if limits is not None:

    class LimitedStreamReader(MQStoreStreamReader, limits.SupportsTriggerAvailableNow):
        """Stream reader with limits and available-now triggers."""

        def getDefaultReadLimit(self) -> Any:
            if self._options.max_offsets_per_trigger is not None:
                return limits.ReadMaxRows(self._options.max_offsets_per_trigger)
            if self._options.max_bytes_per_trigger is not None:
                return limits.ReadMaxBytes(self._options.max_bytes_per_trigger)
            return limits.ReadAllAvailable()

        def reportLatestOffset(self) -> dict[str, Any] | None:
            return self._progress.reported()

        @plain_errors()
        def prepareForTriggerAvailableNow(self) -> None:
            self._progress.fix_target()


def stream_reader(options: SourceOptions, columns: list[str], body_as: Any) -> DataSourceStreamReader:
    """Return the reader for this version of pyspark. ConfigError for a limit that it does not support."""
    if limits is not None:
        return LimitedStreamReader(options, columns, body_as)
    if options.max_offsets_per_trigger is not None or options.max_bytes_per_trigger is not None:
        raise ConfigError(
            "options maxOffsetsPerTrigger and maxBytesPerTrigger need pyspark 4.2 or later: leave them out"
        )
    return MQStoreStreamReader(options, columns, body_as)
