"""Behaviour in Spark's Python workers: readable errors, warnings once, quick tasks.

Spark shows the traceback of a failed worker, with the message as its last line after frames that do not help a user. A
worker omits the traceback if SPARK_HIDE_TRACEBACK is set, and ends after it has written an error. So the variable is
set when an error of mqstore leaves. Other exceptions are bugs and keep their traceback.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from types import TracebackType

from mqstore.errors import CorruptStoreError, MQStoreError, StoreIOError
from mqstore.log.reading.prefetch import stay_alone
from mqstore.logger import log as _log

_HIDE = "SPARK_HIDE_TRACEBACK"
_told: set[str] = set()
_settled = 0
"""Number of imported modules when `settle` last did something."""
_PERMISSION = "permission denied; let the user that this process runs as read the store and all in it"
_REMEDIES = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.ENOMEM: (
        "no address space is left to map it; raise the limit (on Spark, give spark.executor.pyspark.memory more, or "
        "leave it unset)"
    ),
}


class plain_errors(ContextDecorator):  # noqa: N801  (used like a function)
    """Context for everything that Spark calls: errors of mqstore are raised without a traceback.
    Also decorates functions, but not generators."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, MQStoreError):
            if _in_a_worker():
                os.environ[_HIDE] = "1"
            # This leaves one frame and no chained error, whose text is in the message anyway.
            raise error.with_traceback(None) from None


def _in_a_worker() -> bool:
    """Return True in a process started by Spark."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


def settle() -> None:
    """Prepare a worker. Call this when a task, or a call of a data source, begins.

    A worker collects garbage after each task, which takes some 30 ms for the objects of imported modules. These are
    frozen, unless the environment variable `MQSTORE_GC_FREEZE` is 0; frozen garbage in cycles is never freed. Prefetch
    in a second thread is switched off, because Spark runs one task per processor. Has no effect in other processes.
    """
    global _settled
    if len(sys.modules) > _settled and _in_a_worker():
        stay_alone()
        if os.environ.get("MQSTORE_GC_FREEZE") != "0":
            gc.freeze()
        _settled = len(sys.modules)


@contextmanager
def of_store(path: str) -> Iterator[None]:
    """Context for reading one store. Errors of damage get the store's path.
    Errors of the operating system in `_REMEDIES` get the remedy."""
    try:
        yield
    except CorruptStoreError as error:
        if path in str(error):
            raise
        named = CorruptStoreError(f"{path}: {error}", error.file, error.position)
        named.repair = error.repair  # already part of the text
        raise named from None
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        place = error.filename if isinstance(error.filename, str) else path
        raise StoreIOError(error.errno, _REMEDIES[error.errno], place, "read") from None


def warn_once(text: str) -> None:
    """Log a warning. The same text is logged once in a process."""
    if text not in _told:
        _told.add(text)
        _log.warning(text)
