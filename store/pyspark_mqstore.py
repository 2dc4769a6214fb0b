"""Found by Spark, which imports every top-level module called `pyspark_*` when it looks for a data source: so
`spark.read.format("mqstore")` works with no call before it. `mqstore.spark` has the data source.

One such module that fails hides the sources of all others. So this one never raises, and imports nothing that Spark has
not imported by then: numpy, pyarrow and the store come with the first query.
"""

from __future__ import annotations

from typing import Any

try:
    from pyspark.sql.datasource import DataSource
except ImportError:  # no Spark, or one before data sources: nobody looks for us then
    pass
else:

    class DefaultSource(DataSource):
        """Stands for `mqstore.spark.source.MQStoreDataSource`, which it becomes."""

        def __new__(cls, options: Any) -> Any:
            from mqstore.spark.source import MQStoreDataSource

            return MQStoreDataSource(options)

        @classmethod
        def name(cls) -> str:
            return "mqstore"
