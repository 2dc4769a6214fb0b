"""Every error that mqstore raises, and when it occurs (client-semantics B.7).

The tree is rooted at `MQStoreError`. Additional built-in bases keep existing `except` clauses working:
`except OSError` sees a full disk, `except ValueError` a bad argument. Each message says what was wrong,
where (file and position), and what to do next.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import NoReturn

__all__ = [
    "ConfigError",
    "CorruptStoreError",
    "FilterError",
    "FlushFailedError",
    "FlushTimeoutError",
    "FormatError",
    "InvalidMessageError",
    "MQStoreError",
    "NotAStoreError",
    "OffsetOutOfRangeError",
    "ReadOnlyStoreError",
    "SendError",
    "StoreBusyError",
    "StoreClosedError",
    "StoreFullError",
    "StoreIOError",
    "StoreLockedError",
    "TopicNotFoundError",
    "UnsupportedStoreError",
    "raise_os_error",
]


class MQStoreError(Exception):
    """The root of everything below."""

    receipts: Sequence[object] = ()
    """Raised by a `put_many` that takes several chunks: the receipts of what it had stored before, the first messages
    of the call. Empty in every other case: then nothing of the call was stored."""


class InvalidMessageError(MQStoreError, ValueError):
    """A message breaks a rule of topic, tag, key, property or size; nothing was written. `field` names the argument."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class FormatError(MQStoreError, ValueError):
    """Bytes are not what their format demands. `field` names what was being read, `position` where (bytes)."""

    def __init__(self, message: str, field: str, position: int) -> None:
        super().__init__(f"{message} (field {field} at byte {position})")
        self.field = field
        self.position = position


class FilterError(MQStoreError, ValueError):
    """A tag or SQL expression cannot be understood; `position` points into it."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class ConfigError(MQStoreError, ValueError):
    """An option is out of range, or differs from what the store was created with."""


class TopicNotFoundError(MQStoreError, LookupError):
    """No queue of that topic exists in the store."""

    def __str__(self) -> str:  # LookupError shares KeyError's habit of quoting; keep the plain sentence
        return str(self.args[0]) if self.args else ""


class OffsetOutOfRangeError(MQStoreError, LookupError):
    """A queue offset lies below the first or above the next one; the bounds are attributes."""

    def __init__(self, message: str, min_offset: int, max_offset: int) -> None:
        super().__init__(message)
        self.min_offset = min_offset
        self.max_offset = max_offset


class NotAStoreError(MQStoreError, FileNotFoundError):
    """The directory is absent or empty, or holds something else."""


class StoreLockedError(MQStoreError, BlockingIOError):
    """Another writer holds the directory: `pid`, `host`, `since` (ms since the epoch) as far as its lock file tells."""

    def __init__(self, message: str, pid: int | None = None, host: str | None = None, since: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host
        self.since = since


class ReadOnlyStoreError(MQStoreError, PermissionError):
    """A change was asked of a store that was opened read-only, or that lies on a read-only mount."""


class StoreClosedError(MQStoreError, ValueError):
    """The store was closed, or belongs to the parent of this forked process."""


class CorruptStoreError(MQStoreError, OSError):
    """A file that opening cannot do without is damaged. `repair` is the command that mends it."""

    def __init__(self, message: str, file: str, position: int | None = None, repair: str | None = None) -> None:
        super().__init__(f"{message}; to mend it: {repair}" if repair else message)
        self.file = file
        self.position = position
        self.repair = repair


class UnsupportedStoreError(MQStoreError, OSError):
    """Written by a newer mqstore: its `schema` or a name in `requires` is unknown here. Nothing was touched."""

    def __init__(self, message: str, schema: int, requires: tuple[str, ...]) -> None:
        super().__init__(message)
        self.schema = schema
        self.requires = requires


class StoreIOError(MQStoreError, OSError):
    """The operating system refused: `errno`, `filename`, and the `operation` that met it."""

    def __init__(self, number: int, message: str, filename: str, operation: str) -> None:
        super().__init__(number, message, filename)
        self.operation = operation

    def __str__(self) -> str:
        return f"{self.operation} failed on {self.filename}: {self.strerror}"


class SendError(MQStoreError):
    """A message could not be stored, or not as durably as asked."""


class FlushTimeoutError(SendError, TimeoutError):
    """Stored and visible, but not known to be on disk within `flush_timeout`. `receipt` tells where it is."""

    def __init__(self, message: str, receipt: object = None) -> None:
        super().__init__(message)
        self.receipt = receipt


class FlushFailedError(SendError, OSError):
    """An fsync failed: what the disk holds is unknown, so nothing more is written until the store is reopened."""


class StoreBusyError(SendError):
    """A transient refusal; the same call may succeed a moment later."""


class StoreFullError(SendError, OSError):
    """No space or quota left (`errno` ENOSPC or EDQUOT). Nothing was written (but see `receipts`); what is stored stays
    readable."""

    def __init__(self, number: int, message: str, filename: str, operation: str) -> None:
        super().__init__(number, message, filename)
        self.operation = operation

    def __str__(self) -> str:
        return f"{self.operation} failed on {self.filename}: {self.strerror}; free some space, then try again"


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def raise_os_error(error: OSError, filename: str | os.PathLike[str], operation: str) -> NoReturn:
    """Raise `error` as what callers of a store can act on.

    ENOSPC and EDQUOT become `StoreFullError`, EROFS and EACCES/EPERM `ReadOnlyStoreError`, all else `StoreIOError`.
    """
    number = error.errno or errno.EIO
    text = error.strerror or str(error)
    name = os.fspath(filename)
    if number in _FULL:
        raise StoreFullError(number, text, name, operation) from error
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        raise ReadOnlyStoreError(number, f"{operation} not permitted: {text}", name) from error
    raise StoreIOError(number, text, name, operation) from error
