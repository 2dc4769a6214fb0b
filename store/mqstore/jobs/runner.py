"""Runner of a job's tasks: in this process, in a pool, or on the executors of a Spark session.

    with Runner(jobs=2) as runner:
        results = runner.run(tasks, function, "mqstore verify")

A task is a plain value that names its stores (`StoreName`, or pieces with a `store`). The function belongs to a module,
or is a `functools.partial` of one, because processes and executors import it by name. An error of a task is raised
here, with the path of its store.

A session is used, never made (`mqstore.spark.sessions`).
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from logging.handlers import QueueHandler
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypedDict, TypeVar

from mqstore.errors import ConfigError, MQStoreError
from mqstore.jobs.plan import StoreName
from mqstore.jobs.telling import settle
from mqstore.log.ahead import stay_alone

__all__ = ["Progress", "Runner", "Where", "pack", "ship"]

Progress = Callable[[int, int], None]
"""Called with the number of tasks done and of all, after each task. With Spark it is called at the beginning and the
end."""

T = TypeVar("T")
R = TypeVar("R")


class Where(TypedDict, total=False):
    """Keyword arguments that every job takes: where its tasks run, and who is told how far they are."""

    jobs: int
    """Number of processes. 1 means this one."""
    spark: Any
    """Spark session whose executors run the tasks. Not together with `jobs`."""
    progress: Progress | None


class Runner:
    """Runner of tasks in this process (`jobs=1`), in `jobs` processes, or on the executors of `spark`.

    Use it in a `with` statement: the pool is started by the first tasks that need it, and ended with the statement.
    Raises ConfigError for a wrong number of jobs, for `jobs` beside `spark`, and for a Spark Connect session, which has
    no executors to reach.
    """

    def __init__(self, jobs: int = 1, spark: Any = None, progress: Progress | None = None) -> None:
        if type(jobs) is not int or jobs < 1:
            raise ConfigError(f"jobs={jobs!r} is not a number of processes; give 1 or more")
        if spark is not None and jobs != 1:
            raise ConfigError("jobs and spark both say where tasks run; give one of them")
        self._context = None if spark is None else _context_of(spark)
        self._progress = progress or (lambda done, total: None)
        self._pool: ProcessPoolExecutor | None = None
        self.slots = jobs if self._context is None else max(1, int(self._context.defaultParallelism))
        """Number of tasks that run at the same time."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[T], function: Callable[[T], R], title: str = "mqstore") -> list[R]:
        """Return the results of the tasks, in their order. `title` is the name of the work in Spark's UI.

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
        for result in self._in_pool(tasks, work) if min(self.slots, len(tasks)) > 1 else map(work, tasks):
            found.append(result)
            self._progress(len(found), len(tasks))
        return found

    def _in_pool(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[R]:
        # A process that starts puts Ctrl-C off until `_begin_worker`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._pool = self._pool or ProcessPoolExecutor(self.slots, get_context("spawn"), _begin_worker)
            results = self._pool.map(partial(_with_log, work), tasks)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            for result, records in results:
                for record in records:
                    log = logging.getLogger(record.name)
                    if log.isEnabledFor(record.levelno):
                        log.handle(record)
                yield result
        except BrokenProcessPool as error:
            raise MQStoreError(
                "a worker process ended before its task did. If it was killed for want of memory, give fewer jobs. If "
                "it did not start, call the job under `if __name__ == '__main__':`"
            ) from error

    def _in_spark(self, tasks: Sequence[T], work: Callable[[T], R], title: str) -> list[R]:
        context: Any = self._context
        ship(context)
        described = context.getLocalProperty("spark.job.description")
        context.setJobDescription(title)
        try:
            outcomes = context.parallelize([*tasks], len(tasks)).map(partial(_settled, work)).collect()
        finally:
            context.setLocalProperty("spark.job.description", described)
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]


# -- in the tasks ------------------------------------------------------------------------------------------------------


def _named(function: Callable[[T], R], task: T) -> R:
    """Call the function. An error names the stores of the task, unless it names one already."""
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


_log: SimpleQueue[logging.LogRecord] = SimpleQueue()
"""Log records of the tasks of a worker process, on their way to the first process."""


def _begin_worker() -> None:
    # Ctrl-C at a terminal reaches every process: this one ends, and only the first one tells of it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    stay_alone()  # no second thread that reads ahead: the other workers need that processor
    log = logging.getLogger("mqstore")
    log.addHandler(QueueHandler(_log))
    log.propagate = False


def _with_log(work: Callable[[T], R], task: T) -> tuple[R, list[logging.LogRecord]]:
    result = work(task)
    return result, [_log.get() for _ in range(_log.qsize())]


def _settled(work: Callable[[T], R], task: T) -> tuple[R | None, Exception | None]:
    """Return the result, or an error of ours, which Spark would wrap in its own errors if it were raised."""
    settle()
    try:
        return work(task), None
    except (MQStoreError, OSError) as error:
        return None, error


def _context_of(spark: Any) -> Any:
    try:
        return spark.sparkContext
    except Exception as error:
        raise ConfigError(
            "jobs need a session with a SparkContext, not one of Spark Connect: run them where the driver is"
        ) from error


@lru_cache(maxsize=1)
def ship(context: Any) -> bool:
    """Make `mqstore` importable for workers of this SparkContext. Returns True if it had to be sent.

    In local mode, and where `mqstore` is installed on every machine, workers have it. Elsewhere it is sent as a zip.
    Its requirements (numpy, pyarrow, crc32c, portalocker) are not: they are built for a machine.

    The first call costs a job of one task. Register data sources later: Spark notes then what workers may import.
    """

    def is_there(_: int) -> bool:  # made here, so it is sent by value: by name it would need what it looks for
        import importlib.util

        return importlib.util.find_spec("mqstore") is not None

    there = bool(context.parallelize([0], 1).map(is_there).collect()[0])
    if not there:
        folder = tempfile.mkdtemp(prefix="mqstore-")  # executors fetch it when they start, so it stays
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        context.addPyFile(pack(os.path.join(folder, "mqstore.zip")))
    return not there


def pack(archive: str) -> str:
    """Write the modules of the library, without the command, into a zip for imports. Return its path."""
    root = Path(__file__).parents[2]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted([*(root / "mqstore").rglob("*.py"), root / "pyspark_mqstore.py"]):
            file.write(path, path.relative_to(root).as_posix())
    return archive
