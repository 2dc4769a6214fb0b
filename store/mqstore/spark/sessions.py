"""A Spark session for a notebook, a script or the command: Java found, quiet, and the data source known."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from mqstore.errors import ConfigError, MQStoreError
from mqstore.spark import java, register

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

__all__ = ["SparkMissingError", "session"]

_SECRET: Final = re.compile("(?i)secret|password|token|access.?key")
"""Names of settings whose values Spark does not show either."""
_NO_PYSPARK: Final = "Spark jobs need pyspark 4.1 or later: pip install 'mqstore[spark]'"

_QUIET: Final = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}
_LOCAL: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": str(max(8, 2 * (os.cpu_count() or 1))),
}
"""With its executors in its own process, a driver has nobody to listen to: no port is open to others. The 200 parts
that Spark makes of what it shuffles cost a stream with state seconds a batch."""


class SparkMissingError(MQStoreError):
    """There is no pyspark, or no Java for it. The text says what to install."""


def session(app: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return a Spark session in which the format `mqstore` is registered.

    A session that this process has already keeps its settings. A new one runs on this machine unless `conf` has a
    `spark.master`. It is quiet (no user interface, no progress bars, errors only), has times in UTC and few shuffle
    partitions; `conf` wins. `JAVA_HOME` is set if Java is found elsewhere.
    Raises SparkMissingError, also for a Java with which Spark does not start, and ConfigError for such settings.
    """
    home = java.find()
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise SparkMissingError(_NO_PYSPARK + ("" if home else f"; {java.MISSING}")) from None
    if home is None:
        raise SparkMissingError(java.MISSING)
    running = SparkSession.getActiveSession()
    if running is not None:
        register(running)  # its executors may lack the package
        return running
    given = dict(conf or {})
    settings = {"spark.app.name": app or "mqstore", **_QUIET}
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else `spark-submit` has said where
        settings["spark.master"] = "local[*]"
    os.environ["JAVA_HOME"] = str(home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if (settings | given).get("spark.master", "").startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= _LOCAL
    builder = SparkSession.builder
    for name, value in (settings | given).items():
        builder = builder.config(name, value)
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # prints the stack of a failing query
    try:
        spark = builder.getOrCreate()
        register(spark)  # reads settings that nobody has looked at until then
    except (ImportError, MQStoreError):
        raise
    except Exception as error:
        raise _unstarted(error, home, settings | given, given) from error
    return spark


def _unstarted(error: Exception, home: Path, settings: Mapping[str, str], given: Mapping[str, str]) -> MQStoreError:
    """Return the error for a session that Spark did not start. Java says itself why it ends, on stderr."""
    names = dict.fromkeys(["spark.master", *given])
    shown = {name: "..." if _SECRET.search(name) else settings[name] for name in names if name in settings}
    what = f"Spark did not start with the Java of {home}, {', '.join(map('='.join, shown.items()))}"
    if getattr(error, "getCondition", lambda: None)() == "JAVA_GATEWAY_EXITED":
        return SparkMissingError(f"{what}; what it said stands above: {java.UNFIT}; or give settings that it knows")
    # Of an error in Java the first line says who called, and the last cause what is wrong.
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("An error occurred")]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    return ConfigError(f"{what}: {[repr(error), *lines[:1], *causes][-1]}")
