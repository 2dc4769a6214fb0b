"""How our code behaves in Spark's Python workers: errors in our words, warnings once, quick tasks. Knows no pyspark.

Spark hands on what a worker writes when it fails, which is a traceback with the message as its last line, behind the
frames of Spark and ours. For errors that say what, where and what to do, the way to them is noise:

    [PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: mqstore.errors.ConfigError: option ...
    [DATA_SOURCE_...] ... PythonException: mqstore.errors.CorruptStoreError: bad_record: commitlog/0... at byte 47: ...

A worker of Spark leaves the traceback out where SPARK_HIDE_TRACEBACK is set, and ends once it has written an error; so
it is set on the way out, in such a process only, and for errors of ours only: what is a bug keeps its traceback. A
Spark that does not look at it shows the shortest traceback there is.

A worker serves one task after the other, and collects garbage after each, which looks at every object that the imported
modules have made: some 30 ms for a task of nothing, ten times what the rest of it takes. `settle` takes what is there
when a task begins out of that search.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from types import TracebackType

from mqstore.errors import CorruptStoreError, MQStoreError, StoreIOError
from mqstore.log.ahead import stay_alone

__all__ = ["of_store", "plain_errors", "readable", "settle", "warn_once"]

_HIDE = "SPARK_HIDE_TRACEBACK"
_log = logging.getLogger("mqstore")
_told: set[str] = set()
_settled = 0
"""Number of modules that were imported when `settle` last did something."""


class plain_errors(ContextDecorator):  # noqa: N801  (used like a function)
    """Around everything that Spark calls of us: errors of mqstore leave it without the way they came. Decorates
    functions too, but not generators."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, MQStoreError):
            if _in_a_worker():
                os.environ[_HIDE] = "1"
            # One frame of ours is left, and no error behind it: its text is in the message.
            raise error.with_traceback(None) from None


def _in_a_worker() -> bool:
    """Whether this is a process that Spark started, and not the user's."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


def settle() -> None:
    """To be called when a task, or a call of a data source, begins. Does nothing in a process that is no worker.

    Objects are taken out of the search for garbage, for all tasks of the worker, unless the environment variable
    `MQSTORE_GC_FREEZE` is 0. Once for the modules that are imported by then: what was frozen and becomes garbage in a
    cycle stays. Reading ahead in a second thread ends: Spark runs as many tasks as it has been given processors.
    """
    global _settled
    if len(sys.modules) > _settled and _in_a_worker():
        stay_alone()
        if os.environ.get("MQSTORE_GC_FREEZE") != "0":
            gc.freeze()
        _settled = len(sys.modules)


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Around a first look at a store: what this process may not read becomes StoreIOError with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        place = error.filename if isinstance(error.filename, str) else path
        raise StoreIOError(
            error.errno, f"permission denied; let the user that Spark runs as read {path} and all in it", place, "read"
        ) from None


@contextmanager
def of_store(path: str) -> Iterator[None]:
    """Around reading one store of perhaps many: damage is told with the store that it is in, and a segment that does
    not fit into the address space of a worker with the remedy."""
    try:
        yield
    except StoreIOError as error:
        if error.errno != errno.ENOMEM:
            raise
        remedy = "no address space is left to map it; give spark.executor.pyspark.memory more, or leave it unset"
        raise StoreIOError(error.errno, remedy, error.filename, "map") from None
    except CorruptStoreError as error:
        if path in str(error):
            raise
        named = CorruptStoreError(f"{path}: {error}", error.file, error.position)
        named.repair = error.repair  # the text has it already
        raise named from None


def warn_once(text: str) -> None:
    """Log a warning, to where the workers' messages go; the same one not twice in a process."""
    if text not in _told:
        _told.add(text)
        _log.warning(text)
