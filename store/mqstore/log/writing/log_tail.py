"""Bases of `CommitLog` and `ConsumeQueue` with the state that a put needs, compiled where possible.

With `native.kernel` both store their numbers as C integers, and `LogTail._put` stores an ordinary record in one call
that no signal and no other thread interrupts. Without it these are plain classes, and there is no `_put`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from mqstore.errors import ConfigError
from mqstore.files.flusher import GroupCommit
from mqstore.native import kernel


class QueueRef(NamedTuple):
    """Queue of a topic.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     receipt = store.put("orders", b"", queue_id=3)
    ...     topic, queue_id = receipt.queue
    ...     receipt.queue, receipt.queue == ("orders", 3), store.log.offsets(topic, queue_id)
    (QueueRef(topic='orders', queue_id=3), True, (0, 1))
    """

    topic: str
    queue_id: int


def as_queue(queue: object) -> QueueRef:
    """Return `queue`, any pair of a topic and a queue id, as a QueueRef. Raises ConfigError for other values.

    >>> as_queue(("orders", 3))
    QueueRef(topic='orders', queue_id=3)
    """
    match queue:
        case QueueRef():
            return queue
        case (str() as topic, SupportsIndex() as queue_id):
            return QueueRef(topic, index(queue_id))
    raise ConfigError(f"a queue must be a pair of a topic and a queue id, such as ('orders', 0), not {queue!r:.80}")


class QueueTail:
    """State of a queue that a put needs."""

    __slots__ = ("magic", "next_offset", "plain_tail", "queue_id", "ref")

    next_offset: int
    """Offset of the next message."""
    queue_id: int
    magic: int
    """Magic number of its records: V1, or V2 for a long topic."""
    ref: QueueRef
    """Name of the queue, for receipts."""
    plain_tail: bytes
    """Topic and empty properties in the encoding at the end of a record. Set with `magic` at the first put."""


class LogTail:
    """State of the log that a put needs."""

    end: int
    """Write position."""
    alarm: int
    """Position at which a put calls `_on_alarm`. One comparison on the hot path serves all wake-ups."""
    group: GroupCommit | None
    """Group commit if every put waits for its sync, else None."""
    _base: int
    """Start of the segment of `_mapping`."""
    _limit: int
    """A record must end at or before this position, so that a BLANK always fits after it."""
    _mapping: mmap.mmap | None
    _fd: int
    """Descriptor of the segment for `_put`, if every put waits for its sync, and for `_put_packed`. With -1 Python code
    does these puts, and packed messages are stored through the mapping."""
    _whole_record: bool
    """True if the checksum covers the whole record. `_put` supports only this kind."""
    _appending: bool
    """True while Python code appends. `_put` then leaves all puts to Python code, where those of other threads wait,
    and those of signal handlers are refused."""
    _now_ns: Callable[[], int] | None
    """None means the system's clock."""
    _on_alarm: Callable[[], None]
    _born_host: bytes
    _store_host: bytes
    _receipt: type[tuple[Any, ...]]

    if TYPE_CHECKING:

        def _put(self, queue: QueueTail, body: bytes, tail: bytes, unique_key: str | None) -> Any:
            """Append one ordinary record and return its receipt, or do nothing and return None.
            It returns None if the put needs more than storing. It needs no lock."""

        def _put_packed(self, queue: QueueTail, data: bytes, max_body: int) -> bytes | None:
            """Append the messages of a packed `put_many` (`remoting/short.py`), and return their packed receipts, or do
            nothing and return None. They become visible together, also for a signal handler. It needs no lock."""


if not TYPE_CHECKING and kernel is not None:
    QueueTail, LogTail = kernel.QueueTail, kernel.LogTail
