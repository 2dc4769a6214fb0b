"""The data source for PySpark, the only room that imports pyspark.

Options, plans, tasks and commits are in `mqstore.jobs`, records as columns in `mqstore.columnar`.

    source, stream   batches and streams of messages, and the small tables
    sink             writers of messages
    queries          stores as SQL views
    sessions         a session with suitable settings, and its Java

Stores are read without a lock or a change. This module must import fast, since Spark's workers import it to find the
data source.
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

_LAZY: Final = {"create_views": ".queries", "ordered": ".sink", "session": ".sessions", "sql": ".queries"}

__all__ = [*_LAZY, "register"]
__getattr__ = lazy(__name__, _LAZY)


def register(spark: SparkSession) -> None:
    """Register the data source, `spark.read.format("mqstore")`, in a session.

    Spark finds the source by itself (`pyspark_mqstore`) unless another package has a broken `pyspark_*` module, which
    hides all sources. Executors of a cluster that lack the package get it first (they must have numpy, pyarrow and
    crc32c). No setting of the session is changed. Raises ImportError with a text that says what to install,
    and ConfigError if local workers run another Python without mqstore.
    """
    from mqstore.jobs.runner import ship
    from mqstore.spark.source import register_source

    context = getattr(spark, "sparkContext", None)  # a Connect client has none: its server must have the package
    if context is not None and context.master.partition("[")[0] != "local":
        ship(context)
    elif context is not None:
        _check_python(context, ship)
    register_source(spark)


def _check_python(context: Any, ship: Callable[[Any], bool]) -> None:
    """Raise ConfigError if the workers of a local session run another Python that cannot import mqstore.
    Runs a job of one task, but only if their Python is not this one."""
    found, own = shutil.which(context.pythonExec) or "", sys.executable
    if os.path.dirname(found) == os.path.dirname(own) and os.path.samefile(found, own):
        return
    cause = None
    try:
        if not ship(context):
            return
    except Exception as error:  # the worker does not start, or Spark does not support its version
        cause = error
    raise ConfigError(
        f"Spark's workers run {context.pythonExec}, which has no mqstore. Set the environment variable "
        f"PYSPARK_PYTHON={own} before the session is created"
    ) from cause
