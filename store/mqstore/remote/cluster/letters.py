"""Dead letters of a group in a cluster: list and replay (remoting-server, section 13.5)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mqstore.broker.redelivery.dead_letters import DeadLetters, Replay, _Letter, origin_of
from mqstore.broker.tables.names import retry_topic
from mqstore.layout.properties import FIRST_POP_TIME, NOT_REPLAYED, RETRY_TOPIC, kept
from mqstore.log.message import Message
from mqstore.remote.cluster.degrade import refuse

if TYPE_CHECKING:
    from mqstore.remote.cluster.broker import ClusterBroker

_NOT_REPLAYED: Final = NOT_REPLAYED | {"CLUSTER", "MSG_REGION", "TRACE_ON"}
_PAGE: Final = 32


class ClusterLetters(DeadLetters):
    """Dead letters of one group. They are in a queue of each broker: offsets are those of any of these queues."""

    def __init__(self, broker: ClusterBroker, group: str) -> None:
        super().__init__(None, group)  # type: ignore[arg-type]  # the brokers have no such tables
        self._broker = broker

    def _queues(self) -> list[tuple[int, int, int]]:
        """Return (queue, first offset, end) of each queue."""
        broker, topic = self._broker, self.topic
        route = broker.topics.get(topic)
        ids = () if route is None else route.queue_ids
        return [(each, broker.min_offset(topic, each), broker.max_offset(topic, each)) for each in ids]

    @property
    def bounds(self) -> tuple[int, int]:
        """Return (lowest first offset, highest end) of the queues."""
        queues = self._queues() or [(0, 0, 0)]
        return min(start for _, start, _ in queues), max(end for _, _, end in queues)

    def __len__(self) -> int:
        """Return the number of dead letters, those that were sent again included."""
        return sum(end - start for _, start, end in self._queues())

    def select(
        self,
        *,
        offsets: Iterable[int] | None = None,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: Callable[[Message], bool] | None = None,
    ) -> Iterator[Message]:
        chosen = None if offsets is None else frozenset(offsets)
        times = range(start_ms or 0, sys.maxsize if stop_ms is None else stop_ms)
        for queue_id, at, end in self._queues():
            while at < end:
                result = self._broker.read(self.topic, queue_id, at, _PAGE)
                for message in result.messages:
                    letter = _Letter(message._batch, message._start, message.offset)
                    wanted = chosen is None or letter.offset in chosen
                    if wanted and letter.store_timestamp_ms in times and (where is None or where(letter)):
                        yield letter
                at = max(at + 1, result.next_offset)

    def replay(
        self,
        offsets: Iterable[int | Message] | None = None,
        *,
        all_groups: bool = False,
        to_topic: str | None = None,
        dry_run: bool = False,
        **chosen: Any,
    ) -> Replay:
        """Send dead letters again (`DeadLetters.replay`). They stay listed, since RocketMQ cannot remove some: a second
        replay sends them twice. Only a group that reads can get its letters alone. For one that pops, `all_groups` or
        `to_topic` is needed, and otherwise this raises NotSupportedError."""
        numbers = None if offsets is None else [each.offset if isinstance(each, Message) else each for each in offsets]
        counts: Counter[str] = Counter()
        for letter in list(self.select(offsets=numbers, **chosen)):
            properties = letter.stored_properties()
            origin = to_topic or origin_of(letter)
            target = origin if all_groups or to_topic else retry_topic(self.group)
            if target != origin and FIRST_POP_TIME in properties:
                refuse(f"a replay for group {self.group!r} alone, which pops,", "give all_groups=True, or to_topic=")
            if not dry_run:
                shown = {RETRY_TOPIC: origin} if target != origin else {}
                self._broker.copy(letter, target, kept(properties, _NOT_REPLAYED) | shown)
            counts[origin] += 1
        return Replay(dict(counts), self.bounds[0])

    def purge(self, **chosen: Any) -> NoReturn:
        """Raises NotSupportedError: the brokers delete dead letters with their old segments."""
        refuse("purging dead letters", "they go after the brokers' fileReservedTime, or with mqadmin deleteTopic")
