"""Runner of a job's tasks: in this process, or on the executors of a Spark session.

    results = Runner(spark=session).run(tasks, function, "mqstore verify")

A task is a plain value that names its stores (`StoreName`, or pieces with a `store`). The function is a function of a
module, or a `functools.partial` of one, because executors import it by name. An error of a task is raised here, with
the path of its store. Log records of tasks reach the loggers of this process.

A session is never created here (`mqstore.spark.sessions` does).
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypedDict, TypeVar

from mqstore.errors import ConfigError, MQStoreError
from mqstore.jobs.errors import settle
from mqstore.jobs.reading.opening import StoreName

Progress = Callable[[int, int], None]
"""Called with (tasks done, tasks) after each task. With Spark it is called only at the start and the end."""

T = TypeVar("T")
R = TypeVar("R")


class Where(TypedDict, total=False):
    """Keyword arguments of every job."""

    spark: Any
    """Spark session whose executors run the tasks. Without one they run in this process."""
    progress: Progress | None


class Runner:
    """Runner of tasks in this process, or on the executors of `spark`.

    Raises ConfigError for a Spark Connect session, which has no executors to reach.
    """

    def __init__(self, spark: Any = None, progress: Progress | None = None) -> None:
        self._context = None if spark is None else _context_of(spark)
        self._progress = progress or (lambda done, total: None)
        self.slots = 1 if self._context is None else max(1, int(self._context.defaultParallelism))
        """Number of tasks that run at the same time."""

    def run(self, tasks: Sequence[T], function: Callable[[T], R], title: str = "mqstore") -> list[R]:
        """Run the tasks and return their results, in order. `title` is the name of the work in Spark's UI.

        Raises the error of the first task that failed.
        """
        if not tasks:
            return []
        self._progress(0, len(tasks))
        work = partial(_named, function)
        if self._context is not None:
            found = self._in_spark(tasks, work, title)
            self._progress(len(tasks), len(tasks))
            return found
        found = []
        for result in map(work, tasks):
            found.append(result)
            self._progress(len(found), len(tasks))
        return found

    def _in_spark(self, tasks: Sequence[T], work: Callable[[T], R], title: str) -> list[R]:
        context: Any = self._context
        ship(context)
        described = context.getLocalProperty("spark.job.description")
        context.setJobDescription(title)
        try:
            outcomes = context.parallelize([*tasks], len(tasks)).map(partial(_settled, work)).collect()
        finally:
            context.setLocalProperty("spark.job.description", described)
        for _, error, records in outcomes:
            for record in records:
                log = logging.getLogger(record.name)
                if log.isEnabledFor(record.levelno):
                    log.handle(record)
            if error is not None:
                raise error
        return [result for result, _, _ in outcomes]


# -- in the tasks ------------------------------------------------------------------------------------------------------


def _named(function: Callable[[T], R], task: T) -> R:
    """Call the function. Add the stores of the task to an error that does not name one."""
    try:
        return function(task)
    except Exception as error:
        paths = _paths_of(task)
        if paths and not any(path in str(error) for path in paths):
            where = ", ".join(paths)
            if isinstance(error, MQStoreError) and getattr(error, "errno", None) is None:
                error.args = (f"{where}: {error}",)
            else:
                error.add_note(f"in a task on {where}")
        raise


def _paths_of(task: object) -> list[str]:
    if isinstance(task, StoreName):
        return [task.path]
    if isinstance(task, list | tuple):
        return [*dict.fromkeys(path for each in task for path in _paths_of(each))]
    return _paths_of(task.store) if hasattr(task, "store") else []


def _settled(work: Callable[[T], R], task: T) -> tuple[R | None, Exception | None, list[logging.LogRecord]]:
    """Return (result, error, log records). The error is returned, since Spark would wrap it if it were raised.
    Log records are returned, since nobody reads the output of a worker."""
    settle()
    log, records, result, failed = logging.getLogger("mqstore"), SimpleQueue[logging.LogRecord](), None, None
    handler, propagate = QueueHandler(records), log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        result = work(task)
    except (MQStoreError, OSError) as error:
        failed = error
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
    return result, failed, [records.get() for _ in range(records.qsize())]


def _context_of(spark: Any) -> Any:
    try:
        return spark.sparkContext
    except Exception as error:
        raise ConfigError(
            "jobs need a session with a SparkContext, but this is a Spark Connect session: run the job on the driver"
        ) from error


@lru_cache(maxsize=1)
def ship(context: Any) -> bool:
    """Make `mqstore` importable for workers of this SparkContext. Return True if it had to be sent.

    If workers cannot import `mqstore`, it is sent to them as a zip. Its requirements (numpy, pyarrow, crc32c)
    are not sent, because they are compiled for a platform.

    The first call runs a job of one task. Register data sources afterwards, since Spark then records the import path.
    """

    def is_there(_: int) -> bool:  # local, so it is pickled by value: by name, workers would need mqstore to load it
        import importlib.util

        return importlib.util.find_spec("mqstore") is not None

    there = bool(context.parallelize([0], 1).map(is_there).collect()[0])
    if not there:
        folder = tempfile.mkdtemp(prefix="mqstore-")  # kept until exit, because later executors fetch the zip, too
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        context.addPyFile(pack(os.path.join(folder, "mqstore.zip")))
    return not there


def pack(archive: str) -> str:
    """Write the modules of the library, without the command, into a zip file. Return its path."""
    root = Path(__file__).parents[2]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted([*(root / "mqstore").rglob("*.py"), root / "pyspark_mqstore.py"]):
            file.write(path, path.relative_to(root).as_posix())
    return archive
