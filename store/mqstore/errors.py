"""Every error that mqstore raises, and when it occurs.

The tree is rooted at `MQStoreError`. Additional built-in bases keep existing `except` clauses working:
`except OSError` catches a full disk, `except ValueError` a bad argument. Each message names the problem,
the place (file and position), and what to do next.
"""

from __future__ import annotations

import copyreg
import errno
import os
import queue
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NoReturn

__all__ = [
    "ConfigError",
    "ConnectionLostError",
    "CorruptStoreError",
    "EvaluationError",
    "FilterError",
    "FlushFailedError",
    "FlushTimeoutError",
    "FormatError",
    "GroupInUseError",
    "GroupNotFoundError",
    "InvalidMessageError",
    "InvalidReceiptError",
    "MQStoreError",
    "MissingFileError",
    "NotAStoreError",
    "NotPermittedError",
    "NotSupportedError",
    "OffsetOutOfRangeError",
    "QueueEmpty",
    "QueueFull",
    "QueueShutDown",
    "ReadOnlyStoreError",
    "ReceiptExpiredError",
    "ResultCode",
    "SendError",
    "StoreBusyError",
    "StoreClosedError",
    "StoreFullError",
    "StoreIOError",
    "StoreLockedError",
    "SubscriptionConflictError",
    "TopicNotFoundError",
    "TransactionStateError",
    "UnsupportedStoreError",
    "raise_os_error",
]


class ResultCode(IntEnum):
    """RocketMQ's codes for errors, for tools that know them (delivery#codes).

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     try:
    ...         store.put("a b", b"")
    ...     except mqstore.MQStoreError as error:
    ...         print(error.code.name, int(error.code))
    MESSAGE_ILLEGAL 13
    """

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    FLUSH_DISK_TIMEOUT = 10
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    INVALID_PARAMETER = 29
    NO_MESSAGE = 208
    ILLEGAL_OPERATION = 604


class MQStoreError(Exception):
    """Base class of all errors of mqstore.

    >>> import json, mqstore, pathlib, tempfile
    >>> def report(call, *args, **options):
    ...     try:
    ...         call(*args, **options)
    ...     except mqstore.MQStoreError as error:
    ...         print(type(error).__name__)

    Bad arguments:

    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     report(store.put, "a b", b"")  # no topic has a blank in its name
    ...     report(store.put, "SCHEDULE_TOPIC_XXXX", b"")  # the engine's own
    ...     report(store.create_topic, "t", queues=0)
    ...     report(store.simple_consumer, "g", {"t": "paid|refunded"})
    ...     report(store.read, "nowhere", 0, 0)
    ...     report(store.broker.delete_group, "nobody")
    ...     store.create_topic("t")
    ...     _ = store.broker.groups.create("g")
    ...     report(store.broker.reset, "g", "t", 0, 99)
    InvalidMessageError
    NotPermittedError
    ConfigError
    FilterError
    TopicNotFoundError
    GroupNotFoundError
    OffsetOutOfRangeError

    Conflicts with others:

    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     member = store.simple_consumer("g", {"t": "paid"})
    ...     report(store.simple_consumer, "g", {"t": "created"})
    ...     other = store.pull_consumer("g")
    ...     other.subscribe("t")
    ...     report(other.poll, 0)
    ...     report(mqstore.open, folder)
    ...     with mqstore.open(folder, "r") as reader:
    ...         report(reader.put, "t", b"")
    SubscriptionConflictError
    GroupInUseError
    StoreLockedError
    ReadOnlyStoreError

    Queues, receipts and transactions:

    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     queue = store.queue("jobs", maxsize=1)
    ...     report(queue.get_nowait)
    ...     first = queue.put(b"a")
    ...     report(queue.put_nowait, b"b")
    ...     queue.shutdown()
    ...     report(queue.put, b"b")
    ...     broker = store.broker
    ...     [delivery] = broker.pop("jobs", "jobs")
    ...     _ = broker.nack("jobs", "jobs", delivery.receipt)
    ...     report(broker.ack, "jobs", "jobs", [delivery.receipt])
    ...     report(broker.ack, "jobs", "jobs", ["a receipt"])
    ...     half = broker.transactions.begin("jobs", b"b", producer_group="till")
    ...     broker.transactions.end(half, "rollback")
    ...     report(broker.transactions.end, half, "commit")
    QueueEmpty
    QueueFull
    QueueShutDown
    ReceiptExpiredError
    InvalidReceiptError
    TransactionStateError

    State of a directory:

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report(mqstore.open, folder, "r")
    ...     store = mqstore.open(f"{folder}/mq")
    ...     _ = pathlib.Path(folder, "mq").rename(f"{folder}/moved")
    ...     report(store.close)
    ...     manifest = pathlib.Path(folder, "moved", "mqstore.json")
    ...     newer = json.loads(manifest.read_text()) | {"schema": 99}
    ...     _ = manifest.write_text(json.dumps(newer))
    ...     report(mqstore.open, manifest.parent)
    ...     _ = manifest.write_text("{")
    ...     report(mqstore.open, manifest.parent)
    ...     report(mqstore.TEXT.decode, bytes([255]))
    NotAStoreError
    MissingFileError
    UnsupportedStoreError
    CorruptStoreError
    FormatError
    >>> report(reader.read, "t", 0, 0)
    StoreClosedError
    """

    code: ResultCode = ResultCode.SYSTEM_ERROR
    receipts: Sequence[object] = ()
    """Receipts of the messages that a failed `put_many` of several chunks had stored: the first of the call.
    Empty in every other case, where nothing of the call was stored."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes, since the arguments of many classes are not their `args`."""
        state = {"args": self.args, **self.__dict__}
        for name in ("errno", "strerror", "filename"):  # of an OSError
            if (value := getattr(self, name, None)) is not None:
                state[name] = value
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]


class InvalidMessageError(MQStoreError, ValueError):
    """A message breaks a rule of topic, tag, key, property or size. Nothing was written.
    `field` names the argument."""

    code = ResultCode.MESSAGE_ILLEGAL

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class FormatError(MQStoreError, ValueError):
    """Bytes do not have the required format. `field` names the part, `position` its place in bytes."""

    def __init__(self, message: str, field: str, position: int) -> None:
        super().__init__(f"{message} (field {field} at byte {position})")
        self.field = field
        self.position = position


class FilterError(MQStoreError, ValueError):
    """A tag or SQL expression cannot be understood. `position` points into it."""

    code = ResultCode.SUBSCRIPTION_PARSE_FAILED

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class EvaluationError(MQStoreError, ValueError):
    """A property does not fit the value that it is compared with, such as `abc` and a number.
    `position` is the start of the comparison in the expression.

    >>> from mqstore.broker.reads.filters import sql92
    >>> try:
    ...     sql92.compile("n > 5").evaluate({"n": "abc"})
    ... except EvaluationError as error:
    ...     print(error)
    property n (column 1): 'abc' is not an integer of 32 bits
    """

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class ConfigError(MQStoreError, ValueError):
    """An option is out of range, or differs from the one that the store was created with."""

    code = ResultCode.INVALID_PARAMETER


class TopicNotFoundError(MQStoreError, LookupError):
    """No queue of that topic exists in the store."""

    code = ResultCode.TOPIC_NOT_EXIST


class GroupNotFoundError(MQStoreError, LookupError):
    """No consumer group of that name exists, and `auto_create_groups` is off."""

    code = ResultCode.SUBSCRIPTION_GROUP_NOT_EXIST


class GroupInUseError(MQStoreError):
    """A live member consumes the group in another mode, or has the same client id."""


class SubscriptionConflictError(MQStoreError):
    """A live member of the group subscribes to other topics or filters. All members must agree."""


class NotPermittedError(MQStoreError, PermissionError):
    """The permissions of a topic or group forbid it, or the topic belongs to the engine."""

    code = ResultCode.NO_PERMISSION


class NotSupportedError(MQStoreError, NotImplementedError):
    """The server has no such operation. The text says what to do instead."""


class TransactionStateError(MQStoreError):
    """The transaction has already ended the other way (`outcome`), or only a check may end it (`outcome` is None).
    The second applies once its immunity is over. Nothing was changed."""

    code = ResultCode.ILLEGAL_OPERATION

    def __init__(self, message: str, outcome: str | None) -> None:
        super().__init__(message)
        self.outcome = outcome


class InvalidReceiptError(MQStoreError, ValueError):
    """The text is not a receipt, or not a receipt of this group and topic."""

    code = ResultCode.MESSAGE_ILLEGAL


class ReceiptExpiredError(MQStoreError):
    """The message was already released for redelivery. Nothing was changed."""

    code = ResultCode.NO_MESSAGE


class OffsetOutOfRangeError(MQStoreError, LookupError):
    """A queue offset is below the first or above the next one. The bounds are attributes."""

    code = ResultCode.PULL_OFFSET_MOVED

    def __init__(self, message: str, min_offset: int, max_offset: int) -> None:
        super().__init__(message)
        self.min_offset = min_offset
        self.max_offset = max_offset


class NotAStoreError(MQStoreError, FileNotFoundError):
    """The directory is absent or empty, or holds something else."""


class StoreLockedError(MQStoreError, BlockingIOError):
    """Another writer holds the directory.
    `pid`, `host` and `since` (ms since the epoch) are set if its lock file has them."""

    def __init__(self, message: str, pid: int | None = None, host: str | None = None, since: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host
        self.since = since


class ReadOnlyStoreError(MQStoreError, PermissionError):
    """The store was opened read-only, or is on a read-only mount, and cannot be changed."""

    code = ResultCode.NO_PERMISSION

    def __str__(self) -> str:
        if self.filename is None:
            return super().__str__()
        return f"{self.filename}: {self.strerror}; this process must be allowed to read the store, or to write it"


class StoreClosedError(MQStoreError, ValueError):
    """The store was closed, or belongs to the parent of this forked process."""

    code = ResultCode.SERVICE_NOT_AVAILABLE


class ConnectionLostError(MQStoreError, ConnectionError):
    """The connection to a server was lost, and no other could be made in time.
    With `sent` the call may have been done: a message is perhaps stored. Otherwise nothing was sent.

    >>> import mqstore
    >>> from mqstore.errors import ConnectionLostError
    >>> try:
    ...     mqstore.connect("127.0.0.1:1", timeout=0.1)
    ... except ConnectionLostError as error:
    ...     error.sent
    False
    """

    code = ResultCode.SERVICE_NOT_AVAILABLE

    def __init__(self, message: str, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class CorruptStoreError(MQStoreError, OSError):
    """A file that opening needs is damaged. `repair` is the command that repairs it."""

    def __init__(self, message: str, file: str, position: int | None = None, repair: str | None = None) -> None:
        super().__init__(f"{message}. Repair it with: {repair}" if repair else message)
        self.file = file
        self.position = position
        self.repair = repair


class UnsupportedStoreError(MQStoreError, OSError):
    """A newer mqstore wrote the store. This one does not know its `schema`, or a name in `requires`.
    Nothing was changed."""

    def __init__(self, message: str, schema: int, requires: tuple[str, ...]) -> None:
        super().__init__(message)
        self.schema = schema
        self.requires = requires


class _SystemError(MQStoreError, OSError):
    _advice = ""

    def __init__(self, number: int, message: str, filename: str, operation: str) -> None:
        super().__init__(number, message, filename)
        self.operation = operation

    def __str__(self) -> str:
        return f"{self.operation} failed on {self.filename}: {self.strerror}{self._advice}"


class StoreIOError(_SystemError):
    """The operating system refused an `operation` on `filename`. `errno` is its reason."""


class MissingFileError(StoreIOError, FileNotFoundError):
    """A file or folder does not exist. If a store loses its directory while it is open, every call raises this."""


class SendError(MQStoreError):
    """A message could not be stored, or not as durably as requested.

    Reactions:

    >>> import errno, mqstore
    >>> from mqstore.errors import *
    >>> def after(error):
    ...     try:
    ...         raise error
    ...     except StoreBusyError:
    ...         return "repeat the call a little later"
    ...     except FlushTimeoutError:
    ...         return "it is stored, and will be on disk; repeat it only if a duplicate does no harm"
    ...     except FlushFailedError:
    ...         return "check the disk, then reopen the store"
    ...     except StoreFullError:
    ...         return "free some space"
    ...     except SendError:
    ...         return "any other error of a put"
    ...     except StoreIOError:  # not a SendError, since reading may raise it, too
    ...         return "error of the system: " + error.strerror
    >>> after(StoreFullError(errno.ENOSPC, "No space left on device", "commitlog/0", "put"))
    'free some space'
    >>> after(StoreIOError(errno.EIO, "Input/output error", "commitlog/0", "read"))
    'error of the system: Input/output error'
    """


class FlushTimeoutError(SendError, TimeoutError):
    """The message is stored and visible, but perhaps not on disk within `flush_timeout`.
    The sync may also have failed to start, without a free descriptor or in a signal handler: see `__cause__`.
    `receipt` is the message's receipt."""

    code = ResultCode.FLUSH_DISK_TIMEOUT

    def __init__(self, message: str, receipt: object = None) -> None:
        super().__init__(message)
        self.receipt = receipt


class FlushFailedError(SendError, OSError):
    """An fsync failed, so the disk's content is unknown. Reopen the store to write again."""

    code = ResultCode.SERVICE_NOT_AVAILABLE


class StoreBusyError(SendError):
    """The store is busy for a short time. Repeat the call."""

    code = ResultCode.SYSTEM_BUSY


class StoreFullError(SendError, _SystemError):
    """No space or quota is left (`errno` ENOSPC or EDQUOT). Nothing was written, except what `receipts` lists.
    Stored messages stay readable."""

    code = ResultCode.SERVICE_NOT_AVAILABLE
    _advice = "; free some space, then try again"


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class QueueEmpty(MQStoreError, queue.Empty):  # noqa: N818  (as the standard library's, which it is)
    """The queue is empty, or nothing arrived in time."""


class QueueFull(MQStoreError, queue.Full):  # noqa: N818
    """The queue is full, and no room became free in time. Nothing was put."""


class QueueShutDown(MQStoreError, getattr(queue, "ShutDown", Exception)):  # type: ignore[misc]  # noqa: N818  # 3.13
    """The queue was shut down. Nothing was put or taken."""


def raise_os_error(error: OSError, filename: str | os.PathLike[str], operation: str) -> NoReturn:
    """Raise `error` as an error of mqstore.

    ENOSPC and EDQUOT become `StoreFullError`, EROFS, EACCES and EPERM `ReadOnlyStoreError`, all else `StoreIOError`.
    A FileNotFoundError stays one, since callers catch it.
    """
    number = error.errno or errno.EIO
    text = error.strerror or str(error)
    name = os.fspath(filename)
    if number in _FULL:
        raise StoreFullError(number, text, name, operation) from error
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        raise ReadOnlyStoreError(number, f"{operation} not permitted: {text}", name) from error
    raise (MissingFileError if number == errno.ENOENT else StoreIOError)(number, text, name, operation) from error
