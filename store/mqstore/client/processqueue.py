"""What a consumer holds of one queue: pulled, and not settled (clients#process-queue).

    put(pulled) ---> waiting ---> remove(settled)                                concurrent: in any order
                     waiting ---> take(n) ---> taken ---> remove(settled)        orderly: by one worker
                        ^                        |------> again(messages), rollback()
                        +------------------------+

    open ----> closing ---------------------> dropped
               pulls nothing, starts          nothing that is still running counts
               nothing; what runs counts

The position is the offset of the first message that is not settled, or where the next pull begins: everything below it
is done with, whatever finished first. Messages come in ascending order, and both maps keep it: an OrderedDict, since
finding the first key of a plain one takes the longer the more were deleted before it.

Knows nothing of threads but its lock, of brokers, or of handlers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mqstore.broker.names import is_retry_topic
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message, stored_bytes

__all__ = ["Limits", "ProcessQueue", "QueueInfo"]

_PULL_MAX = 1_024
"""Messages of one pull at most: a worker is at it for milliseconds."""
_PULL_BYTES = 256 << 10
_ROOM_MIN = 256
"""Free places that end a pause, unless the half of all is less: pulls of a few messages cost as much as large ones."""
_BEHIND_ALL = 1 << 63
"""No message has that offset."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a consumer may hold of one queue (clients#pull)."""

    messages: int = 1_000
    size: int = 100 << 20
    """Bytes as stored."""
    span: int | None = 2_000
    """Between the first offset that is not settled and the last that was pulled, be that settled or not: what comes
    again after a crash. None: any."""
    total: int | None = None
    """Messages of one topic, in all its queues together; None: as many as the queues may hold."""
    total_size: int | None = None
    """Their bytes likewise."""

    def divided(self, queues: int) -> Limits:
        """Return the limits of one queue of a topic that has `queues` queues here. A queue may always hold one
        message and one byte, or it would stand still.

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
    """One queue of a consumer, for `stats` and logs."""

    queue: QueueRef
    messages: int
    """Pulled and not settled, those in handlers included."""
    size: int
    """Their bytes."""
    first: int | None
    """Offset of the first of them."""
    taken: int
    """Number of these that the worker of an ordered consumer has taken."""
    next_offset: int
    """Where the next pull begins."""
    throttled: bool
    """Whether it waits for room."""
    idle_ms: int
    """Since a message was settled last; with messages and a large number it is stuck."""


class ProcessQueue:
    """The cache of one queue. Thread-safe.

    >>> from types import SimpleNamespace
    >>> queue = ProcessQueue(QueueRef("orders", 0), 100, 0, size_of=lambda messages: len(messages))
    >>> messages = [SimpleNamespace(offset=offset) for offset in range(100, 104)]
    >>> queue.put(messages, 104)
    True
    >>> queue.remove(messages[1:2]), queue.remove(messages[:1]), queue.remove(messages[2:])
    (100, 102, 104)
    """

    def __init__(
        self,
        queue: QueueRef,
        next_offset: int,
        now_ms: int,
        limits: Limits = Limits(),
        *,
        size_of: Callable[[Sequence[Message]], int] = stored_bytes,
    ) -> None:
        """`next_offset`: where to begin. `now_ms`, here and below: of the monotonic clock. `size_of`: their bytes."""
        self.queue = queue
        self.retries = is_retry_topic(queue.topic)
        """Whether its messages failed before, and may be of several topics."""
        self.next_offset = next_offset
        self.settling = threading.Lock()
        """Held while a position is worked out and committed: so they are committed in order, and none once dropped."""
        self.closing = False
        self.dropped = False
        self.paused = False
        self.parked = False
        """A pull came while the queue was paused: who resumes it has to pull."""
        self.throttled = False
        """A pull found no room: who makes room has to pull."""
        self.submitted = False
        """A pull is on its way to a worker, for as long as they are all busy."""
        self.active = False
        """Orderly: some worker is at it, or will be."""
        self.restart_at: int | None = None
        """Dropped, to be pulled anew from here once nothing of it runs."""
        self.committed: int | None = None
        """The position committed last."""
        self.settled_to: int | None = None
        """One that is to be committed."""
        self.last_commit_ms = now_ms - 1_000
        self.begun = -1
        """Where the last pull began of which something was begun to be handled."""
        self.running = 0
        """Workers that are at its messages now, or in `on_assign`."""
        self.attempts: Mapping[int, int] = {}
        """Attempts that ended with a process that was killed, by offset. Unless it is orderly."""
        self.unannounced = False
        """`on_assign` is to be called, and to return before anything is pulled."""
        self.last_pull_ms = self.last_settle_ms = now_ms
        self.limits = limits
        """How much it may hold. Less than before: what is beyond that stays, and nothing is pulled until it is done."""
        self._size_of = size_of
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, Message] = OrderedDict()
        self._taken: OrderedDict[int, Message] = OrderedDict()
        self._size = 0
        self._highest = -1

    def __len__(self) -> int:
        """Messages pulled and not settled."""
        return len(self._waiting) + len(self._taken)

    # -- coming in --------------------------------------------------------------------------------------------------

    def room(self) -> tuple[int, int]:
        """(messages, bytes) that are to be pulled now; (0, 0) while it is full, and then `begins_to_have_room` will say
        when it no longer is."""
        with self._lock:
            limits = self.limits
            messages, size = limits.messages - len(self), limits.size - self._size
            if messages <= 0 or size <= 0 or (limits.span is not None and self._span() > limits.span):
                self.throttled = True
                return 0, 0
            return min(messages, _PULL_MAX), min(size, _PULL_BYTES)

    def put(self, messages: Sequence[Message], next_offset: int) -> bool:
        """Take in what was pulled, in ascending order, and where the next pull begins. Orderly: True if no worker is at
        it, and one has to be found now."""
        size = self._size_of(messages)
        with self._lock:
            waiting = self._waiting
            for message in messages:
                offset = message.offset
                if offset in waiting:  # pulled twice: the bytes are the same
                    size -= self._size_of((message,))
                waiting[offset] = message
            if messages:
                self._highest = max(self._highest, messages[-1].offset)
            self._size += size
            self.next_offset = next_offset
            found = bool(waiting) and not self.active
            self.active = self.active or found
            return found

    # -- done -------------------------------------------------------------------------------------------------------

    def remove(self, messages: Sequence[Message], now_ms: int | None = None) -> int:
        """Settle `messages`, in any order, taken or not. Return the position then, -1 if there was nothing to settle.
        Those that are not here any more count for nothing."""
        with self._lock:
            waiting, taken = self._waiting, self._taken
            if not waiting and not taken:
                return -1
            gone = [m for m in messages if waiting.pop(m.offset, None) or taken.pop(m.offset, None)]
            if gone:
                self._size = self._size - self._size_of(gone) if len(self) else 0
            if now_ms is not None:
                self.last_settle_ms = now_ms
            return self._position()

    def contains(self, message: Message) -> bool:
        """Whether it waits to be settled."""
        return message.offset in self._waiting

    # -- by one worker, in order ------------------------------------------------------------------------------------

    def take(self, number: int) -> list[Message]:
        """The next messages, up to `number`; none: there are none, and no worker is at it any more."""
        with self._lock:
            batch: list[Message] = []
            behind = next(reversed(self._taken), -1)
            while self._waiting and len(batch) < number:
                offset, message = self._waiting.popitem(last=False)
                self._taken[offset] = message
                batch.append(message)
            if batch and batch[0].offset < behind:  # it came again while later ones were still taken
                self._taken = OrderedDict(sorted(self._taken.items()))
            if not batch:
                self.active = False
            return batch

    def again(self, messages: Sequence[Message]) -> None:
        """Put these of what was taken back to the front, in order."""
        with self._lock:
            ahead = next(iter(self._waiting), _BEHIND_ALL)
            back = sorted((m.offset for m in messages if m.offset in self._taken), reverse=True)
            for offset in back:
                self._waiting[offset] = self._taken.pop(offset)
                self._waiting.move_to_end(offset, last=False)
            if back and ahead < back[0]:  # something before them had come back already
                self._waiting = OrderedDict(sorted(self._waiting.items()))

    def rollback(self) -> list[Message]:
        """Put back all that was taken; which that was."""
        with self._lock:
            taken = list(self._taken.values())
        self.again(taken)
        return taken

    # -- where it stands --------------------------------------------------------------------------------------------

    def position(self) -> int:
        """Everything below this offset is settled."""
        with self._lock:
            return self._position()

    def begins_to_have_room(self) -> bool:
        """Whether a pull was refused for want of room, and there is enough now; says so once."""
        limits = self.limits
        free = min(_ROOM_MIN, (limits.messages + 1) // 2)
        if limits.messages - len(self._waiting) - len(self._taken) < free:  # without the lock, for it is asked often
            return False
        with self._lock:
            if not self.throttled or self._size > limits.size * 3 // 4:
                return False
            if limits.span is not None and self._span() > limits.span:
                return False
            self.throttled = False
            return True

    def clear(self) -> None:
        """Forget all messages."""
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
        return first if first < _BEHIND_ALL else max(self._highest + 1, self.next_offset)

    def _span(self) -> int:
        # Not to the last that waits: while one message is stuck and all behind it are done at once there is no
        # span by that, and as many as there are would come again (clients#concurrent).
        return self._highest - next(iter(self._waiting)) if self._waiting else 0
