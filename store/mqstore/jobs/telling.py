"""Behaviour in Spark's Python workers: errors in our words, warnings once, quick tasks.

Spark shows the traceback of a failed worker: the message is its last line, behind frames that tell a user nothing. A
worker leaves the traceback out where SPARK_HIDE_TRACEBACK is set, and ends once it has written an error. So it is set
on the way out, for errors of ours only: a bug keeps its traceback.
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

__all__ = ["of_store", "plain_errors", "settle", "warn_once"]

_HIDE = "SPARK_HIDE_TRACEBACK"
_log = logging.getLogger("mqstore")
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
    """Context around everything that Spark calls of us: errors of mqstore leave without a traceback.
    Decorates functions too, but not generators."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, MQStoreError):
            if _in_a_worker():
                os.environ[_HIDE] = "1"
            # One frame of ours is left, and no error behind it: its text is in the message.
            raise error.with_traceback(None) from None


def _in_a_worker() -> bool:
    """Return True in a process that Spark started."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


def settle() -> None:
    """Prepare a worker. Call this when a task, or a call of a data source, begins.

    A worker collects garbage after each task: some 30 ms for the objects of imported modules. These are exempted,
    unless the environment variable `MQSTORE_GC_FREEZE` is 0; frozen garbage in cycles stays. Reading ahead in a second
    thread ends: Spark runs as many tasks as it has processors. Other processes are left alone.
    """
    global _settled
    if len(sys.modules) > _settled and _in_a_worker():
        stay_alone()
        if os.environ.get("MQSTORE_GC_FREEZE") != "0":
            gc.freeze()
        _settled = len(sys.modules)


@contextmanager
def of_store(path: str) -> Iterator[None]:
    """Context around reading one store: errors name it.
    Damage is reported with the store's path, and an error of the system with its remedy in `_REMEDIES`."""
    try:
        yield
    except CorruptStoreError as error:
        if path in str(error):
            raise
        named = CorruptStoreError(f"{path}: {error}", error.file, error.position)
        named.repair = error.repair  # the text has it already
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
