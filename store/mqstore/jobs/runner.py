"""Runs the tasks of a job: in this process, in a pool of processes, or on the executors of a Spark session.

    with Runner(jobs=2) as runner:
        results = runner.run(tasks, function, "mqstore verify")

A task is a plain value that names its stores (`StoreName`, or pieces with a `store`). The function belongs to a module,
or is a `functools.partial` of one, because processes and executors import it by its name. It opens the stores it needs.
An error of a task is raised here, with the path of the task's store.

Knows no pyspark: a session is used, never made (`mqstore.spark.sessions`).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from logging.handlers import QueueHandler, QueueListener
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any, TypeVar

from mqstore.errors import ConfigError, MQStoreError
from mqstore.log.ahead import stay_alone
from mqstore.spark.plan import StoreName
from mqstore.spark.shipping import ship
from mqstore.spark.telling import settle

__all__ = ["Progress", "Runner"]

Progress = Callable[[int, int], None]
"""Called with the number of tasks that are done and of all: after each task; with Spark at the beginning and the end,
as Spark shows how far it is by itself."""

T = TypeVar("T")
R = TypeVar("R")


class Runner:
    """Runs tasks in this process (`jobs=1`), in a pool of `jobs` processes, or on the executors of `spark`.

    Use it in a `with` statement: the pool is started by the first tasks that need it, and ended with the statement.
    Raises ConfigError for a number of jobs that is none, for `jobs` beside `spark`, and for a Spark Connect session,
    which has no executors to reach.
    """

    def __init__(self, jobs: int = 1, spark: Any = None, progress: Progress | None = None) -> None:
        if type(jobs) is not int or jobs < 1:
            raise ConfigError(f"jobs={jobs!r} is not a number of processes; give 1 or more")
        if spark is not None and jobs != 1:
            raise ConfigError("jobs and spark both say where tasks run; give one of them")
        self._context = None if spark is None else _context_of(spark)
        self._progress = progress or (lambda done, total: None)
        self._pool: ProcessPoolExecutor | None = None
        self._log: QueueListener | None = None
        self._has_log = True
        """False once a process may have ended in the middle of a line, for the rest of which nobody must wait."""
        self.slots = jobs if self._context is None else max(1, int(self._context.defaultParallelism))
        """Number of tasks that run at the same time."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._log is not None and self._has_log and (kind is None or issubclass(kind, Exception)):
            self._log.stop()

    @property
    def pieces(self) -> int:
        """Number of tasks to cut work into: a slot that is done early finds another one, and the progress moves."""
        return 8 if self.slots == 1 else 2 * self.slots

    def run(self, tasks: Sequence[T], function: Callable[[T], R], title: str = "mqstore") -> list[R]:
        """Return the results of the tasks, in their order. `title` is the name of the work in Spark's UI.

        Raises the error of the first task that failed.
        """
        if not tasks:
            return []
        self._progress(0, len(tasks))
        if self._context is not None:
            outcomes = self._in_spark(tasks, function, title)
        elif min(self.slots, len(tasks)) > 1:
            outcomes = self._in_pool(tasks, function)
        else:
            outcomes = self._here(tasks, function)
        for outcome in outcomes:
            if isinstance(outcome, _Failure):
                raise outcome.error()
        return outcomes

    def _here(self, tasks: Sequence[T], function: Callable[[T], R]) -> list[Any]:
        found = []
        for number, task in enumerate(tasks):
            try:
                found.append(function(task))
            except Exception as error:
                _name_store(error, task)
                raise
            self._progress(number + 1, len(tasks))
        return found

    def _in_pool(self, tasks: Sequence[T], function: Callable[[T], R]) -> list[Any]:
        if self._pool is None:
            spawn = get_context("spawn")
            lines: Queue[logging.LogRecord] = spawn.Queue()
            self._log = QueueListener(lines, _Relay())
            self._pool = ProcessPoolExecutor(self.slots, spawn, _begin_worker, (lines,))
            self._log.start()
        try:
            futures = self._submitted(self._pool, tasks, function)
            for done, future in enumerate(as_completed(futures), 1):
                if isinstance(future.result(), _Failure):
                    break  # `__exit__` cancels the tasks that have not begun
                self._progress(done, len(tasks))
            return [future.result() for future in futures if future.done()]
        except BrokenProcessPool as error:
            self._has_log = False
            raise MQStoreError(
                "a worker process ended before its task did. If it was killed for want of memory, give fewer jobs. If "
                "it did not start, call the job under `if __name__ == '__main__':`"
            ) from error

    @staticmethod
    def _submitted(
        pool: ProcessPoolExecutor, tasks: Sequence[T], function: Callable[[T], R]
    ) -> list[Future[R | _Failure]]:
        """Submit the tasks. Processes that are started for them put Ctrl-C off until `_begin_worker`."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return [pool.submit(_attempt, function, task) for task in tasks]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _in_spark(self, tasks: Sequence[T], function: Callable[[T], R], title: str) -> list[Any]:
        context: Any = self._context
        ship(context)
        described = context.getLocalProperty("spark.job.description")
        context.setJobDescription(title)
        try:
            found = list(context.parallelize([*tasks], len(tasks)).map(partial(_settled, function)).collect())
        finally:
            context.setLocalProperty("spark.job.description", described)
        self._progress(len(tasks), len(tasks))
        return found


# -- errors ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way from a task: its class, its text and its attributes, because many errors do not pickle."""

    kind: type[BaseException]
    text: str
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        attributes = dict(error.__dict__)
        if isinstance(error, OSError) and error.errno is not None:  # not in its dict
            attributes |= {"errno": error.errno, "strerror": error.strerror, "filename": error.filename}
        return cls(type(error), str(error), attributes)

    def error(self) -> BaseException:
        found = self.kind.__new__(self.kind)
        found.args = (self.text,)
        for name, value in self.attributes.items():
            setattr(found, name, value)
        return found


def _attempt(function: Callable[[T], R], task: T) -> R | _Failure:
    try:
        return function(task)
    except (MQStoreError, OSError) as error:
        _name_store(error, task)
        return _Failure.of(error)
    except Exception as error:
        _name_store(error, task)
        raise


def _settled(function: Callable[[T], R], task: T) -> R | _Failure:
    settle()
    return _attempt(function, task)


def _name_store(error: Exception, task: object) -> None:
    """Have an error name the stores of its task, unless it names one of them already."""
    paths = _paths_of(task)
    if not paths or any(path in str(error) for path in paths):
        return
    where = ", ".join(paths)
    if isinstance(error, MQStoreError) and getattr(error, "errno", None) is None:
        error.args = (f"{where}: {error}",)
    else:
        error.add_note(f"in a task on {where}")


def _paths_of(task: object) -> list[str]:
    if isinstance(task, StoreName):
        return [task.path]
    if isinstance(task, list | tuple):
        return [*dict.fromkeys(path for each in task for path in _paths_of(each))]
    return _paths_of(task.store) if hasattr(task, "store") else []


# -- processes ---------------------------------------------------------------------------------------------------------


class _Relay(logging.Handler):
    """Hands what workers log to the loggers of this process."""

    def emit(self, record: logging.LogRecord) -> None:
        log = logging.getLogger(record.name)
        if log.isEnabledFor(record.levelno):
            log.handle(record)


def _begin_worker(lines: Queue[logging.LogRecord]) -> None:
    # Ctrl-C at a terminal reaches every process: this one ends, and only the first one tells of it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    stay_alone()  # no second thread that reads ahead: the other workers need that processor
    log = logging.getLogger("mqstore")
    log.addHandler(QueueHandler(lines))
    log.propagate = False


# -- Spark -------------------------------------------------------------------------------------------------------------


def _context_of(spark: Any) -> Any:
    try:
        return spark.sparkContext
    except Exception as error:
        raise ConfigError(
            "jobs need a session with a SparkContext, not one of Spark Connect: run them where the driver is"
        ) from error
