"""Cache of one queue's messages that were pulled and are not settled (clients#process-queue).

    put(pulled) ---> waiting ---> remove(settled)                                concurrent: in any order
                     waiting ---> take(n) ---> taken ---> remove(settled)        orderly: by one worker
                        ^                        |------> again(messages), rollback()
                        +------------------------+

    open ----> closing ---------------------> dropped
               pulls nothing, starts          results of running handlers are ignored
               nothing; results of running handlers count

Messages come in ascending order, and both maps keep it. They are OrderedDicts, because finding the first key of a plain
dict takes longer the more keys were deleted before it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mqstore.broker.tables.names import is_retry_topic
from mqstore.contract import Waiter
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message, stored_bytes
from mqstore.signalsafe import Lock

_PULL_MAX = 1_024
"""Maximum number of messages of one pull, which keeps a worker for milliseconds."""
_PULL_BYTES = 256 << 10
_ROOM_MIN = 256
"""Free places that end a pause, at most half of all. Small pulls cost as much as large ones."""
_BEHIND_ALL = 1 << 63
"""Offset above that of every message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the messages of one queue that a consumer may hold (clients#pull)."""

    messages: int = 1_000
    size: int = 100 << 20
    """Bytes as stored."""
    span: int | None = 2_000
    """Maximum distance from the first unsettled offset to the last one cached. None: no limit.
    It limits the redeliveries after a crash."""
    total: int | None = None
    """Messages of one topic in all its queues. None: as many as the queues may hold."""
    total_size: int | None = None
    """Bytes of one topic in all its queues, likewise."""
    eager: bool = False
    """True if any room ends a pause, since the rest may be taken by messages that wait for a commit."""

    def divided(self, queues: int) -> Limits:
        """Return the limits of one queue of a topic that has `queues` queues here.
        A queue may always hold one message and one byte. Otherwise it would stop.

        >>> limits = Limits(total=1024)
        >>> [limits.divided(queues).messages for queues in (1, 2, 3)]
        [1000, 512, 341]
        """
        messages, size = self.messages, self.size
        if self.total is not None:
            messages = min(messages, max(1, self.total // queues))
        if self.total_size is not None:
            size = min(size, max(1, self.total_size // queues))
        return replace(self, messages=messages, size=size)


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """State of one queue of a consumer, for `stats` and logs."""

    queue: QueueRef
    messages: int
    """Number of messages pulled and not settled, including those in handlers."""
    size: int
    """Number of their bytes."""
    first: int | None
    """Offset of the first of these messages."""
    taken: int
    """Number of messages that the worker of an ordered consumer has taken."""
    next_offset: int
    """Offset at which the next pull begins."""
    throttled: bool
    """True if it waits for room."""
    idle_ms: int
    """Time since the last message was settled. A queue with messages and a large number is stuck."""


class ProcessQueue:
    """Cache of one queue. Thread-safe.

    >>> from types import SimpleNamespace
    >>> queue = ProcessQueue(QueueRef("orders", 0), 100, 0)
    >>> messages = [SimpleNamespace(offset=offset, size=9) for offset in range(100, 104)]
    >>> queue.put(messages, 104)
    True
    >>> queue.remove(messages[1:2]), queue.remove(messages[:1]), queue.remove(messages[2:])
    (100, 102, 104)
    """

    def __init__(self, queue: QueueRef, next_offset: int, now_ms: int, limits: Limits = Limits()) -> None:
        """The first pull begins at `next_offset`. `now_ms`, here and below, is monotonic time."""
        self.queue = queue
        self.retries = is_retry_topic(queue.topic)
        """True if its messages have failed before. Then they may have several topics."""
        self.next_offset = next_offset
        self.settling = Lock()
        """Held while a position is determined and committed, so commits are in order, and end when dropped."""
        self.closing = False
        self.dropped = False
        self.paused = False
        self.parked = False
        """True if a pull came while the queue was paused. `resume` then has to pull."""
        self.throttled = False
        """True if a pull found no room. The code that makes room then has to pull."""
        self.submitted = False
        """True if a pull is on its way to a worker. It waits while all workers are busy."""
        self.active = False
        """True if a worker of an ordered consumer is at the queue, or will be."""
        self.waiter: Waiter | None = None
        """Set while it waits for messages. Guarded by `settling`."""
        self.restart_at: int | None = None
        """Offset from which a dropped queue is pulled again, once none of its handlers runs."""
        self.committed: int | None = None
        """Position that was committed last."""
        self.settled_to: int | None = None
        """Position that is still to be committed."""
        self.last_commit_ms = now_ms - 1_000
        self.begun = -1
        """Highest first offset of a pull whose messages were started."""
        self.running = 0
        """Number of workers that are at its messages now, or in `on_assign`."""
        self.handled: deque[tuple[Sequence[Message], float]] = deque()
        """Messages that were handled in order and not settled, and the milliseconds of each call."""
        self.alone_to = -1
        """Offset up to which ordered messages are handled one at a time, since their batch has failed."""
        self.attempts: Mapping[int, int] = {}
        """Number of attempts that ended with a killed process, by offset. Unused if ordered."""
        self.unannounced = False
        """True if `on_assign` must be called, and return, before anything is pulled."""
        self.last_pull_ms = self.last_settle_ms = now_ms
        self.limits = limits
        """Limits of the queue. If they shrink, nothing is pulled until the excess messages are done."""
        self._lock = Lock()
        self._waiting: OrderedDict[int, Message] = OrderedDict()
        self._taken: OrderedDict[int, Message] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """Return the number of messages pulled and not settled."""
        return len(self._waiting) + len(self._taken)

    # -- coming in --------------------------------------------------------------------------------------------------

    def room(self) -> tuple[int, int]:
        """Return (messages, bytes) that may be pulled now, or (0, 0) while it is full.
        Then `begins_to_have_room` reports when there is room."""
        with self._lock:
            limits = self.limits
            messages, size = min(limits.messages - len(self), self._span_left()), limits.size - self._size
            if messages <= 0 or size <= 0:
                self.throttled = True
                return 0, 0
            return min(messages, _PULL_MAX), min(size, _PULL_BYTES)

    def within_span(self, messages: Sequence[Message], next_offset: int) -> tuple[Sequence[Message], int]:
        """Return the first of these pulled messages, as many as the span allows, and the start of the next pull.
        A filter may have passed over any number of offsets between them."""
        with self._lock:
            last = next(iter(self._waiting), messages[0].offset) + (self.limits.span or _BEHIND_ALL)
        if messages[-1].offset <= last:
            return messages, next_offset
        within = [each for each in messages if each.offset <= last]
        return within, messages[len(within)].offset

    def put(self, messages: Sequence[Message], next_offset: int) -> bool:
        """Add pulled messages, in ascending order, and set the start of the next pull.
        For an ordered consumer, return True if no worker is at the queue, and one has to be found now."""
        size = stored_bytes(messages)
        with self._lock:
            self._waiting.update([(message.offset, message) for message in messages])
            self._size += size
            self.next_offset = next_offset
            found = bool(self._waiting) and not self.active
            self.active = self.active or found
            return found

    # -- done -------------------------------------------------------------------------------------------------------

    def remove(self, messages: Sequence[Message], now_ms: int | None = None) -> int:
        """Settle `messages`, taken or not, in any order. Return the new position, or -1 if nothing is here.
        Messages that are no longer here are ignored."""
        with self._lock:
            waiting, taken = self._waiting, self._taken
            if not waiting and not taken:
                return -1
            gone = [m for m in messages if waiting.pop(m.offset, None) or taken.pop(m.offset, None)]
            if gone:
                self._size = self._size - stored_bytes(gone) if len(self) else 0
            if now_ms is not None:
                self.last_settle_ms = now_ms
            return self._position()

    def contains(self, message: Message) -> bool:
        """Return True if the message waits to be settled."""
        return message.offset in self._waiting

    # -- by one worker, in order ------------------------------------------------------------------------------------

    def take(self, number: int) -> list[Message]:
        """Take the next messages, up to `number`. If there are none, no worker is at the queue any more."""
        with self._lock:
            batch: list[Message] = []
            behind = next(reversed(self._taken), -1)
            while self._waiting and len(batch) < number:
                offset, message = self._waiting.popitem(last=False)
                self._taken[offset] = message
                batch.append(message)
            if batch and batch[0].offset < behind:  # it was put back while later ones were still taken
                self._taken = OrderedDict(sorted(self._taken.items()))
            if not batch:
                self.active = False
            return batch

    def again(self, messages: Sequence[Message]) -> None:
        """Put these taken messages back to the front, in order."""
        with self._lock:
            ahead = next(iter(self._waiting), _BEHIND_ALL)
            back = sorted((m.offset for m in messages if m.offset in self._taken), reverse=True)
            for offset in back:
                self._waiting[offset] = self._taken.pop(offset)
                self._waiting.move_to_end(offset, last=False)
            if back and ahead < back[0]:  # earlier messages were already put back
                self._waiting = OrderedDict(sorted(self._waiting.items()))

    def rollback(self) -> None:
        """Put back all taken messages."""
        with self._lock:
            taken = list(self._taken.values())
        self.again(taken)

    def is_stuck(self) -> bool:
        """Return True if nothing waits, and nothing can be pulled before taken messages are settled."""
        with self._lock:
            full = len(self._taken) >= self.limits.messages or self._size >= self.limits.size
            return full and not self._waiting

    # -- state ------------------------------------------------------------------------------------------------------

    def position(self) -> int:
        with self._lock:
            return self._position()

    def begins_to_have_room(self) -> bool:
        """Return True, once, if a pull was refused for lack of room and there is enough now."""
        limits = self.limits
        free = 1 if limits.eager else min(_ROOM_MIN, (limits.messages + 1) // 2)
        if limits.messages - len(self._waiting) - len(self._taken) < free:  # without the lock, since it is called often
            return False
        with self._lock:
            if not self.throttled or self._size > (limits.size - 1 if limits.eager else limits.size * 3 // 4):
                return False
            if limits.span is not None and self._span_left() < min(_ROOM_MIN, (limits.span + 1) // 2):
                return False
            self.throttled = False
            return True

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._taken.clear()
            self._size = 0

    def info(self, now_ms: int) -> QueueInfo:
        with self._lock:
            firsts = [next(iter(each)) for each in (self._taken, self._waiting) if each]
            return QueueInfo(
                queue=self.queue,
                messages=len(self),
                size=self._size,
                first=min(firsts, default=None),
                taken=len(self._taken),
                next_offset=self.next_offset,
                throttled=self.throttled,
                idle_ms=now_ms - self.last_settle_ms,
            )

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _position(self) -> int:
        first = min(next(iter(self._taken), _BEHIND_ALL), next(iter(self._waiting), _BEHIND_ALL))
        return first if first < _BEHIND_ALL else self.next_offset

    def _span_left(self) -> int:
        """Return the number of offsets that may be pulled, by the span."""
        # Not counted from the last cached message: later ones may be done, and are redelivered after a crash.
        return next(iter(self._waiting), self.next_offset) + (self.limits.span or _BEHIND_ALL) + 1 - self.next_offset
