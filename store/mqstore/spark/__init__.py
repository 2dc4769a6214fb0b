"""Stores as tables: the columnar reader, and the data source for PySpark that is made of it.

    columns   messages of a queue or of the log as Arrow record batches; numpy and pyarrow, no Spark
    options   the options of the data source, one table
    plan      which messages a query reads, cut into partitions
    source    the data source: thin
    java      where a Java for Spark is

Reads stores without a lock and without a trace. This module imports nothing heavy: Spark's workers import it to find
the data source, and `Store.to_arrow` to find the reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("mqstore")` known to a session.

    Not needed where Spark finds the source by itself (`pyspark_mqstore`), but it depends on nobody else's modules: one
    broken `pyspark_*` module hides all sources that are found that way. ImportError says what to install.
    """
    from mqstore.spark.source import register_source

    register_source(spark)
