"""The data source for PySpark, the only room that imports pyspark.

Options, plans, tasks and commits are in `mqstore.jobs`, records as columns in `mqstore.columnar`.

    source, stream   batches and streams of messages, and the small tables
    sink             rows become messages
    queries          stores as views of SQL
    sessions         a session with settings that suit, and the Java that it needs

Reads stores without a lock and without a trace. This module imports nothing heavy: Spark's workers import it to find
the data source.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mqstore.errors import ConfigError
from mqstore.lazy import lazy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mqstore.spark.queries import create_views as create_views
    from mqstore.spark.queries import sql as sql
    from mqstore.spark.sessions import session as session
    from mqstore.spark.sink import ordered as ordered

_LAZY: Final = {
    "create_views": ".queries",
    "ordered": ".sink",
    "session": ".sessions",
    "sql": ".queries",
}

__all__ = [*_LAZY, "register"]
__getattr__ = lazy(__name__, _LAZY)


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("mqstore")` known to a session.

    Not needed where Spark finds the source by itself (`pyspark_mqstore`), but it depends on nobody else's modules. One
    broken `pyspark_*` module hides all sources that are found that way. Executors of a cluster that lack the package
    are sent it first (numpy, pyarrow, crc32c and portalocker they need to have). No setting of the session is changed.
    ImportError says what to install. Raises ConfigError if local workers run another Python, which has no mqstore.
    """
    from mqstore.jobs.runner import ship
    from mqstore.spark.source import register_source

    context = getattr(spark, "sparkContext", None)  # a Connect client has none: there the server brings the package
    if context is not None and context.master.partition("[")[0] != "local":
        ship(context)
    elif context is not None:
        _check_python(context, ship)
    register_source(spark)


def _check_python(context: Any, ship: Callable[[Any], bool]) -> None:
    """Raise ConfigError if the workers of a local session run another Python, in which mqstore cannot be imported.
    Costs a job of one task, only if their Python is not this one."""
    found, own = shutil.which(context.pythonExec) or "", sys.executable
    if os.path.dirname(found) == os.path.dirname(own) and os.path.samefile(found, own):
        return
    cause = None
    try:
        if not ship(context):
            return
    except Exception as error:  # it does not start, or Spark refuses its version
        cause = error
    raise ConfigError(
        f"Spark's workers run {context.pythonExec}, which has no mqstore. Set the environment variable "
        f"PYSPARK_PYTHON={own} before the session is made"
    ) from cause
