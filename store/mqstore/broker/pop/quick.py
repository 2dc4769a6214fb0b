"""Fields of a queue, a batch and a timeline of pop, compiled where possible.
They are bases of the classes in state.py.

With `native.kernel` the fields are in C structures, and `PopFields` delivers a batch, or settles some, by one
call. Without it these are plain classes, and the two methods do not exist. The rules are in standard.py, fifo.py and
state.py, which handle all cases that the compiled methods decline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mqstore.log.message import Message
from mqstore.log.tagfilter import UnitFilter
from mqstore.log.tip import Numbered, Tip
from mqstore.native import kernel
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.broker.names import QueueKey
    from mqstore.broker.offsets import OffsetTable
    from mqstore.broker.pop.ask import Delivery
    from mqstore.broker.pop.orderinfo import OrderInfo
    from mqstore.broker.pop.state import Batch, QueueState, Timeline

__all__ = ["BatchFields", "PopFields", "QueueFields", "TimelineFields"]


class BatchFields:
    """The messages of one pop."""

    __slots__ = ("count", "deltas", "failed", "invisible_ms", "left", "local", "moved", "name", "pop_time_ms", "start")

    name: int
    """Position of the `ck` in the pop log. -1 for a settled batch, which is not looked for there."""
    start: int
    count: int
    """Number of messages."""
    pop_time_ms: int
    invisible_ms: int
    deltas: tuple[int, ...] | None
    """Distances of the offsets from `start`. None means 0, 1, 2 ..."""
    left: int
    """Bit i: the i-th message is in flight or released."""
    moved: dict[int, tuple[int, int]] | None
    """Offset -> (pop time, invisible ms) of deliveries whose time was changed."""
    local: bool
    """True if the receiver is in this process and ends with it."""
    failed: set[int] | None
    """Offsets that failed and wait to be redelivered. No receiver holds them."""


class TimelineFields:
    """Visible times of deliveries, as a map from millisecond to batches."""

    __slots__ = ("_buckets", "_times", "entries")

    _buckets: dict[int, Batch | list[Batch]]
    """A single batch is stored without a list: a list of one would double the memory."""
    _times: list[int]
    """Keys of `_buckets`, as a heap."""
    entries: int


class QueueFields:
    """State of one (group, topic, queue). Its fields are read and written under `lock`."""

    __slots__ = (
        "_batches",
        "acked",
        "ahead",
        "ahead_at",
        "ahead_filter",
        "ahead_from",
        "ahead_next",
        "announced_ms",
        "committed",
        "cursor",
        "fifo",
        "gone",
        "head",
        "in_flight",
        "key",
        "last_pop_ms",
        "lock",
        "popped",
        "popped_bytes",
        "pops",
        "released",
        "reset_ms",
        "timeline",
        "written",
    )

    key: QueueKey
    head: str
    lock: Lock
    cursor: int
    """Next offset to pop. -1 until the state is opened."""
    committed: int
    """Smallest offset that is in flight or released. Without one, the cursor."""
    written: int | None
    """Committed offset that the offset table has."""
    in_flight: dict[int, Batch]
    """Batches in flight by offset. The first entry is the oldest: insertion follows the batches' names."""
    released: dict[int, Batch]
    """Released deliveries, by offset. They are popped before the cursor moves on."""
    timeline: Timeline
    _batches: int
    """Number of batches with an unsettled message."""
    fifo: Batch | None
    """The last FIFO batch. The order info, which may be this batch itself, knows its messages' state."""
    ahead: list[Message]
    """Prefetched messages. Reading one message costs as much as reading many."""
    ahead_at: int
    ahead_from: int
    """Cursor value at which the rest of `ahead` is next."""
    ahead_next: int
    """Offset behind the last unit that was read for `ahead`."""
    ahead_filter: UnitFilter | None
    announced_ms: int | None
    """Time at which the housekeeper will check this queue."""
    last_pop_ms: int
    reset_ms: int
    """Last pop time before a reset, after which all messages are redelivered."""
    pops: int
    """Pops since the last call of `counts`, like the three below. They are counted under the lock."""
    popped: int
    popped_bytes: int
    acked: int
    gone: bool
    """True if group or topic was deleted. A thread that still has this state must look up another."""


class PopFields:
    """Fields that compiled methods need besides a queue's state. If `_tip` is None they decline."""

    _tip: Tip | None
    _queue: Numbered
    """Queue of the pop log."""
    _pop_tail: bytes
    """Bytes behind the body of a `ck` record."""
    _ack_tail: bytes
    _max_body: int
    _resets: dict[QueueKey, int]
    """Pending resets of the offset table."""
    _orders: dict[QueueKey, OrderInfo | BatchFields]
    """Entries of the order info table."""
    _order_changes = 0
    """Number of changes to the order info by compiled code."""
    _offsets: OffsetTable
    _freed: Callable[[QueueState], None]
    """Callback for a queue whose last FIFO batch is settled. Called without its lock."""
    _batch: type[BatchFields]
    _delivery: type[tuple[Any, ...]]

    if TYPE_CHECKING:

        def hand_out(
            self, state: QueueFields, n: int, invisible_ms: int, topic: str, local: bool, in_order: bool
        ) -> list[Delivery] | None:
            """Pop the next `n` messages, which must be prefetched neighbours. Takes the state's lock.
            Returns None, with nothing changed, for any other case of `pop` of `StandardQueues` or `FifoQueues`."""

        def settle(self, states: list[QueueState], receipts: Sequence[str]) -> int:
            """Acknowledge deliveries from queues of `states`, a list by queue id. Takes the states' locks.
            Returns the number of settled receipts, from the front. It stops, with no further change, at the first
            receipt that `settle` of `StandardQueues` or `FifoQueues` must handle. In order, all receipts must be of one
            batch."""


if not TYPE_CHECKING and kernel is not None:
    BatchFields, TimelineFields = kernel.BatchFields, kernel.TimelineFields
    QueueFields, PopFields = kernel.QueueFields, kernel.PopFields
