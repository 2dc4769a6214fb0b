"""What pop knows of a queue, a batch and a timeline: bases of those in state.py, compiled where possible.

With `native.kernel` their fields are those of C structures, and `Desk` hands out a batch, or settles messages of one,
in one call. Without it these are plain classes, and the two methods are not there to be called. The rules stand in
standard.py, fifo.py and state.py, which do whatever the compiled ones decline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mqstore.log.message import Message
from mqstore.log.tagfilter import UnitFilter
from mqstore.log.tip import Numbered, Tip
from mqstore.native import kernel

if TYPE_CHECKING:
    from mqstore.broker.names import QueueKey
    from mqstore.broker.pop.ask import Delivery
    from mqstore.broker.pop.orderinfo import OrderInfo
    from mqstore.broker.pop.state import Batch, QueueState, Timeline

__all__ = ["Desk", "Lending", "Lent", "Timed"]


class Lent:
    """The messages of one pop."""

    __slots__ = ("count", "deltas", "failed", "invisible_ms", "left", "local", "moved", "name", "pop_time_ms", "start")

    name: int
    """Position of the `ck` in the pop log; -1: not looked for there, since all of it is settled."""
    start: int
    count: int
    """Number of messages."""
    pop_time_ms: int
    invisible_ms: int
    deltas: tuple[int, ...] | None
    """Distances of the offsets to `start`; None: 0, 1, 2 ..."""
    left: int
    """Bit i: the i-th message is in flight or released."""
    moved: dict[int, tuple[int, int]] | None
    """Offset -> (pop time, invisible ms) of deliveries whose time was changed."""
    local: bool
    """Whether its receiver lives in this process, and dies with it."""
    failed: set[int] | None
    """Offsets that it gave back, to come again later: these nobody holds."""


class Timed:
    """When deliveries become visible: millisecond -> batches to look at."""

    __slots__ = ("_buckets", "_times", "entries")

    _buckets: dict[int, Batch | list[Batch]]
    """A lone batch stands for itself: a list of one would cost as much again."""
    _times: list[int]
    """The keys of `_buckets`, a heap."""
    entries: int


class Lending:
    """One (group, topic, queue). Fields are read and written under `lock`, by whoever holds it."""

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
    lock: threading.Lock
    cursor: int
    """Next offset to pop; -1: not opened yet."""
    committed: int
    """Smallest offset that is in flight or released; the cursor if none is."""
    written: int | None
    """What the offset table was told."""
    in_flight: dict[int, Batch]
    """By offset. Insertion order is that of the batches' names, so the first entry is the oldest."""
    released: dict[int, Batch]
    """Given back: popped again before the cursor moves on."""
    timeline: Timeline
    _batches: int
    """Batches with something unsettled."""
    fifo: Batch | None
    """The last FIFO batch. What is known of its messages is in the order info, which may be this batch itself."""
    ahead: list[Message]
    """Read and not popped yet: reading one at a time costs as much as reading many."""
    ahead_at: int
    ahead_from: int
    """The cursor for which the rest of `ahead` is what comes next."""
    ahead_next: int
    """Offset behind the last unit that `ahead` accounts for."""
    ahead_filter: UnitFilter | None
    announced_ms: int | None
    """When the housekeeper will look at this queue."""
    last_pop_ms: int
    reset_ms: int
    """The last pop time before a reset, after which all comes again."""
    pops: int
    """With the three below: since `counts` was asked last. Whoever pops or settles has the lock anyway."""
    popped: int
    popped_bytes: int
    acked: int
    gone: bool
    """Dropped from the table (group or topic deleted): whoever still holds it looks for another."""


class Desk:
    """What the compiled ways need besides a queue's state; `_tip` None: there is none, and they decline."""

    _tip: Tip | None
    _queue: Numbered
    """The pop log's."""
    _pop_tail: bytes
    """What stands behind the body of a `ck` record."""
    _ack_tail: bytes
    _max_body: int
    _resets: dict[QueueKey, int]
    """Pending ones, of the offset table."""
    _orders: dict[QueueKey, OrderInfo | Lent]
    """Entries of the order info."""
    _order_changes = 0
    """Number of changes of the order info that were made here."""
    _commit: Callable[[str, str, int, int], None]
    """`note` of the offset table."""
    _freed: Callable[[QueueState], None]
    """Called without the lock of a queue whose last batch in order is settled."""
    _batch: type[Lent]
    _delivery: type[tuple[Any, ...]]

    if TYPE_CHECKING:

        def hand_out(
            self, state: Lending, n: int, now_ms: int, invisible_ms: int, topic: str, local: bool, in_order: bool
        ) -> list[Delivery] | None:
            """Pop the next `n` messages; None, with nothing changed, when it takes more than `pop` of `StandardQueues`
            or `FifoQueues` does for neighbours that were read ahead. Takes the state's lock."""

        def settle(self, states: list[QueueState], receipts: Sequence[str]) -> int:
            """Acknowledge deliveries from queues of `states`, a list by queue id. Return how many are settled, from the
            front: nothing is changed from where it takes more than `settle` of `StandardQueues` or `FifoQueues` does
            for messages in flight. In order all must be of one batch. Takes the states' locks."""


if not TYPE_CHECKING and kernel is not None:
    Lent, Timed, Lending, Desk = kernel.Lent, kernel.Timed, kernel.Lending, kernel.Desk
