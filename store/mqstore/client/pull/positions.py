"""Positions of a pull consumer in its queues (clients#pull-consumer).

Each queue has four offsets::

    committed <= done <= next <= read
                  │       │       └── next read of the broker; the loop must still hand out the messages below
                  │       └── next message to return: `position`
                  └── earlier polls returned everything below, and the caller has come back since: auto_commit
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final

from mqstore.client.group.groupsettings import GroupProgress
from mqstore.client.interceptors import Interceptors
from mqstore.contract import BrokerContract, Filter, ReadResult
from mqstore.errors import (
    ConfigError,
    GroupNotFoundError,
    MQStoreError,
    NotPermittedError,
    OffsetOutOfRangeError,
    TopicNotFoundError,
)
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.log.writing.log_tail import as_queue
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

_PASSES: Final = 8
"""Number of times that one look goes over queues whose filters pass nothing."""

_FILTERED: Final = frozenset({"FOUND", "NO_MATCHED_MESSAGE", "MESSAGE_WAS_REMOVING"})
_EMPTY: Final = frozenset({"NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE"})


class Position:
    __slots__ = ("done", "missing", "next", "paused", "queue", "read")

    def __init__(self, queue: QueueRef, offset: int) -> None:
        self.queue = queue
        self.done = self.next = self.read = offset
        self.paused = False
        self.missing = False
        """True if it was logged that the queue does not exist."""

    def move(self, offset: int) -> None:
        self.done = self.next = self.read = offset


class Positions:
    """All positions of one consumer. Callers hold the consumer's lock, except for `save`."""

    def __init__(
        self,
        broker: BrokerContract,
        group: str,
        progress: GroupProgress,
        hooks: Interceptors,
        filter_of: Callable[[str], Filter | None],
        auto_commit: bool,
    ) -> None:
        """`filter_of` returns the filter of a topic. With `auto_commit`, `Broker.save` saves the positions, too."""
        self._broker = broker
        self.group = group
        self._progress = progress
        self._hooks = hooks
        self._filter_of = filter_of
        self._auto_commit = auto_commit
        self.by_queue: dict[QueueRef, Position] = {}
        self.turns: deque[Position] = deque()
        """All positions, the one to be read next first."""
        self.ahead: deque[tuple[Position, Message, int]] = deque()
        """Messages that were read and not returned, each with the queue's `next` after it is returned.
        The loop, or a failed read, has left them."""
        self._returned: set[Position] = set()
        """Positions whose `next` the last poll moved."""
        self.uncommitted: set[Position] = set()
        """Positions whose `done` was not committed."""
        self._committing = Lock()
        """Held while an offset is read and committed. A save by another thread must not undo a later commit."""

    def add(self, begins: Mapping[QueueRef, int]) -> None:
        """Read these queues, too, each from its offset on."""
        for queue in sorted(begins):
            position = self.by_queue[queue] = Position(queue, begins[queue])
            self.turns.append(position)
        if self._auto_commit:
            self._broker.listen("save", self.save)

    def drop(self, queues: Iterable[QueueRef]) -> None:
        for queue in queues:
            position = self.by_queue.pop(queue, None)
            if position is not None:
                self.turns.remove(position)
                self._returned.discard(position)
                self.uncommitted.discard(position)
                self.read_again(position)
        if not self.by_queue:
            self._broker.unlisten("save", self.save)

    def chosen(self, queues: Sequence[QueueRef]) -> list[Position]:
        """Return the positions of `queues`, or all. Raises ConfigError as `own` does."""
        return [self.own(queue) for queue in queues] if queues else list(self.turns)

    def own(self, queue: QueueRef) -> Position:
        """Return the position of a queue. Raises ConfigError for a queue that the consumer does not have."""
        position = self.by_queue.get(as_queue(queue))
        if position is None:
            has = named(sorted(self.by_queue)[:8]) or "none (with `subscribe` they come by a poll)"
            raise ConfigError(f"queue {queue[1]} of {queue[0]!r} is not this consumer's now; it has {has}")
        return position

    def read_some(self, count: int, by_hand: bool) -> bool:
        """Read up to `count` messages, one queue after the other. Return True if another look may find more."""
        for _ in range(_PASSES):
            moved = False
            for _ in range(len(self.turns)):
                position = self.turns[0]
                self.turns.rotate(-1)  # before reading, so that a failing queue does not block the others
                if not position.paused:
                    moved |= self._read(position, count - len(self.ahead), by_hand)
                    if len(self.ahead) >= count:
                        return True
            if self.ahead or not moved:
                return moved
        return True

    def _read(self, position: Position, count: int, by_hand: bool) -> bool:
        """Read from one queue. Return False if it has nothing for now."""
        queue, offset = position.queue, position.read
        try:
            result = self._broker.read(*queue, offset, count, filter=self._filter_of(queue.topic), group=self.group)
        except (TopicNotFoundError, ConfigError) as error:
            if by_hand:
                raise
            if not position.missing:  # a rebalance will drop it, or the topic is created again
                position.missing = True
                _log.warning("group %s: %s", self.group, error)
            return False
        position.missing = False
        if result.messages:
            self._keep(position, result)
            return True
        if result.status == "OFFSET_OVERFLOW_ONE" or (result.status in _EMPTY and offset == 0):
            return False
        self.move(position, result.next_offset)
        if result.status not in _FILTERED and result.next_offset != offset:
            _log.warning(
                "group %s continues at %d of %s/%d, not at %d: %s",
                self.group,
                result.next_offset,
                *queue,
                offset,
                result.status,
            )
            self._hooks.notify(self._hooks.on_offset_reset, queue, offset, result.next_offset)
        # A reset to the present offset is now done, so look again.
        return result.next_offset != offset or result.status == "OFFSET_RESET"

    def _keep(self, position: Position, result: ReadResult) -> None:
        kept = self._hooks.receiving(result.messages) if self._hooks.on_receive else result.messages
        if not kept:
            self.move(position, result.next_offset)
            return
        self.ahead.extend((position, message, message.offset + 1) for message in kept[:-1])
        self.ahead.append((position, kept[-1], result.next_offset))
        position.read = result.next_offset

    def deliver(self, count: int) -> list[Message]:
        """Return up to `count` of the messages that were read."""
        messages: list[Message] = []
        while self.ahead and len(messages) < count:
            position, message, after = self.ahead.popleft()
            position.next = after
            self._returned.add(position)
            messages.append(message)
        return messages

    def read_again(self, position: Position) -> None:
        """Forget the messages of a queue that were read and not returned."""
        if self.ahead:
            self.ahead = deque(entry for entry in self.ahead if entry[0] is not position)
        position.read = position.next

    def move(self, position: Position, offset: int) -> None:
        """Continue at another offset. Everything below counts as done."""
        position.move(offset)
        self.uncommitted.add(position)

    def settle(self) -> None:
        """Note that the caller is done with the messages that were handed out."""
        for position in self._returned:
            position.done = position.next
        self.uncommitted |= self._returned
        self._returned.clear()

    def checked(self, offsets: Mapping[QueueRef, int], lost: Container[QueueRef]) -> dict[Position, int]:
        """Return the offsets to commit, without `lost` queues. Raises ConfigError or OffsetOutOfRangeError."""
        if not isinstance(offsets, Mapping):
            raise ConfigError(f"offsets are given as a mapping, {{('orders', 0): 17}}, not {offsets!r:.80}")
        chosen = {}
        for queue, offset in offsets.items():
            if as_queue(queue) in lost:
                continue
            position = self.own(queue)
            end = self._broker.max_offset(*position.queue)
            if type(offset) is not int or not 0 <= offset <= end:
                raise OffsetOutOfRangeError(f"offset {offset!r} of {position.queue} does not lie in 0..{end}", 0, end)
            chosen[position] = offset
        return chosen

    def commit_all(self) -> None:
        """Commit all positions. An error of one queue does not stop the others, and is raised at the end."""
        failed: list[MQStoreError] = []
        for position in list(self.uncommitted):
            try:
                self.commit(position)
                self.uncommitted.discard(position)
            except MQStoreError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def save(self) -> None:
        """Commit everything that is done. Any thread may call it."""
        self.commit_done(self.uncommitted)

    def commit_done(self, positions: Iterable[Position]) -> None:
        """Commit without a request, so errors are logged, except those of a store that does not work at all."""
        for position in list(positions):
            self.uncommitted.discard(position)
            try:
                self.commit(position)
            except (OffsetOutOfRangeError, TopicNotFoundError, GroupNotFoundError, NotPermittedError) as error:
                _log.warning("group %s: %s was not committed (%s)", self.group, position.queue, error)

    def commit(self, position: Position, offset: int | None = None) -> None:
        """Commit an offset of a queue, by default that of its settled messages."""
        with self._committing:
            to = position.done if offset is None else offset
            self._progress.commit(position.queue, to)


def named(queues: Iterable[QueueRef]) -> str:
    return ", ".join(f"{topic}/{queue_id}" for topic, queue_id in sorted(queues))
