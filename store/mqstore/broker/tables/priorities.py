"""Priorities of messages: in a topic with priorities the id of a queue is the priority (delivery#priority).

put            the queue of its priority; the first one gives the topic a queue for each
delivery       the highest queue first, retries included
delay, retry   keeps the queue, which is REAL_QID of a delayed record, and the same queue of the retry topic
dead letter    REAL_QID is the priority, by which a replay selects the queue
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from mqstore.broker.delay.route import number
from mqstore.broker.tables.names import QueueKey, queue_name
from mqstore.errors import ConfigError
from mqstore.layout.properties import REAL_QID

if TYPE_CHECKING:
    from mqstore.broker.tables.offsets import OffsetTable
    from mqstore.broker.tables.topics import TopicConfig, TopicTable
    from mqstore.contract import TopicCalls
    from mqstore.log.message import Message

PRIORITIES = 10
"""Number of priorities, and of queues of a topic that `give_priorities` has made."""

_T = TypeVar("_T")


def priority_queue(topics: TopicCalls, topic: str, priority: int | None, *, ordered: bool = False) -> int:
    """Return the queue of the topic for items of a priority. A topic with one queue gets one for each.
    Raises ConfigError for another priority than 0 to 9, for an `ordered` queue, and for a topic that has no priorities,
    but several queues."""
    if priority is None:
        return 0
    if type(priority) is not int or not 0 <= priority < PRIORITIES:
        raise ConfigError(f"priority is 0 to {PRIORITIES - 1}, not {priority!r:.80}")
    if not priority:
        return 0
    if ordered:
        name = queue_name(topic)
        raise ConfigError(
            f"queue {name!r} is ordered, so no item overtakes another: give no priority, or another queue"
        )
    highest = topics.for_priority(topic).write_queues - 1
    return priority if priority < highest else highest


def give_priorities(topics: TopicTable, offsets: OffsetTable, name: str) -> TopicConfig:
    """Return the topic with priorities. See `TopicTable.for_priority`."""
    if topics.get(name) is None:
        topics.create(name, queues=1)
    config = topics.for_send(name)
    if not config.by_priority:
        if config.read_queues != 1 or config.write_queues != 1:
            raise ConfigError(
                f"topic {name!r} has {max(config.read_queues, config.write_queues)} queues that are no priorities. "
                f"Use another name, or alter it: broker.topics.alter({name!r}, message_type='PRIORITY')"
            )
        config = topics.alter(name, queues=PRIORITIES, message_type="PRIORITY")
        for group in offsets.groups_of(name):
            for queue_id in config.queue_ids:
                offsets.begin(QueueKey(group, name, queue_id))
    return config


def highest_first(config: TopicConfig, queues: Iterable[_T], queue_id: Callable[[_T], int]) -> list[_T]:
    """Return `queues` of the topic and its retry topics by priority, the highest first, if it has priorities."""
    return sorted(queues, key=lambda queue: -queue_id(queue)) if config.by_priority else list(queues)


def retry_queue(config: TopicConfig | None, queue_id: int) -> int:
    """Return the queue of a retry topic for copies from this queue of the topic: its priority, or 0 without any."""
    return queue_id if config is not None and config.by_priority else 0


def letter_properties(config: TopicConfig | None, queue_id: int) -> dict[str, str]:
    """Return the properties by which a dead letter from this queue of the topic keeps its priority."""
    return {REAL_QID: str(queue_id)} if config is not None and config.by_priority else {}


def letter_priority(config: TopicConfig | None, letter: Message) -> int:
    """Return the priority of a dead letter from the topic, which is 0 if the topic has none."""
    if config is None or not config.by_priority:
        return 0
    return min(max(number(letter._stored_property(REAL_QID)) or 0, 0), config.write_queues - 1)
