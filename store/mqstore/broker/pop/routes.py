"""Queues from which a group pops a topic. A route is cached until a topic or group changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mqstore.broker.pop.state import QueueState
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.tables.names import EXPIRY, QueueKey, is_retry_topic, pop_retry_topic, retry_topic
from mqstore.broker.tables.priorities import highest_first
from mqstore.errors import ConfigError, NotPermittedError
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.native import kernel

_RETRY_PERCENT = 20
"""Percentage of pops that look at the retry topic first."""


class Rank(NamedTuple):
    """Queue of a topic whose queues are priorities, or of its retry topic."""

    mark: int
    state: QueueState
    tail: ConsumeQueue


class Route(NamedTuple):
    """Queues that hold the messages of one topic for one group. Compiled code uses the first four members."""

    ranks: tuple[list[Rank], list[Rank]] | None
    """All queues by priority, the highest first, if the topic has priorities (delivery#priority).
    Within a priority the first list has retries last, the second has them first."""
    settled: list[QueueState] | None
    """`queues`, if `ack_at_once` may settle in them."""
    at_once: bool
    """True if `pop_at_once` may use it: messages do not expire, and no topic has redeliveries."""
    rng: Callable[[], float] | None
    """Function that returns numbers in [0, 1), or None if no choice between queues is needed."""
    topic: str
    queues: list[QueueState]
    new: list[tuple[int, QueueState]]
    """(mark, state) of `queues`."""
    retries: list[tuple[int, QueueState]]
    """(mark, state) of the retry topics that exist."""
    pops: bool
    """True if compiled code may pop from `queues`, too, since their messages do not expire."""

    def sources(self, queue_id: int = -1, order: bool = False, all_ranks: bool = True) -> list[tuple[int, QueueState]]:
        """Return (mark, state) of the queues of a pop, in the order in which it looks at them (delivery#priority).
        Most pops look at retries last, so that failing messages do not delay new ones, and some look at them first, so
        that they do not starve in a busy topic. `all_ranks` False: of priorities only those that may have a message.
        Compiled code selects the first one without retries: `first_source` of pop.c."""
        roll = 0.0 if self.rng is None else self.rng() * 100
        if self.ranks is not None and queue_id == -1 and not order:
            ranks = self.ranks[roll < _RETRY_PERCENT]
            return [each[:2] for each in ranks if all_ranks or each[2].next_offset > each[1].cursor or each[1].released]
        new = self.new if queue_id == -1 else [(0, self.queue(queue_id))]
        if at := int(roll * len(new)) % len(new):  # all are as likely, with retries first or last
            new = new[at:] + new[:at]
        if not self.retries:
            return new
        return self.retries + new if roll < _RETRY_PERCENT else new + self.retries

    def queue(self, queue_id: int) -> QueueState:
        """Return the state of one queue. Raises ConfigError if the topic does not have that queue."""
        if type(queue_id) is not int or not 0 <= queue_id < len(self.queues):
            last = len(self.queues) - 1
            raise ConfigError(f"topic {self.topic!r} has queues 0..{last} for readers, not {queue_id!r}")
        return self.queues[queue_id]


class Routes:
    """Routes of one store. A state is dropped with its topic or group."""

    def __init__(self, tables: PopTables, rng: Callable[[], float]) -> None:
        self._tables, self._rng = tables, rng
        tables.routes = {}
        self._topics, self._groups = tables.parts.topics, tables.parts.groups
        self._topics.on_change.append(self._topic_changed)
        self._groups.on_change.append(self._group_changed)
        self._topics.in_order.append(self._in_order)

    def require(self, group: str, topic: str) -> Route:
        """Return the route of a group that pops a topic. A missing group may be created.
        Raises TopicNotFoundError, GroupNotFoundError or NotPermittedError."""
        known = self._tables.routes  # before the look-ups: a change of topics or groups replaces it
        if (route := self._tables.route(group, topic)) is not None:
            return route
        self._tables.reads.check_group(group, topic)
        found = self._tables.reads.check_topic(topic)
        if found.read_queues < 1:  # only a file can have this
            raise NotPermittedError(f"topic {topic!r} has {found.read_queues} queues to read; increase read_queues")
        queues = [self._tables.state(QueueKey(group, topic, i)) for i in range(found.read_queues)]
        expiry = found.attributes.get(EXPIRY)
        for state in queues:
            state.expiry = expiry
        new = [(0, state) for state in queues]
        retries = [
            (mark, self._tables.state(QueueKey(group, name, queue_id)))
            for mark, name in self.retry_topics(group, topic)
            if (of := self._topics.get(name)) is not None
            for queue_id in range(max(1, of.read_queues))
        ]
        plain = not is_retry_topic(topic)
        rng = self._rng if len(queues) > 1 or retries else None
        pops = kernel is not None and plain and expiry is None
        at_once = plain and expiry is None and not retries and self._topics.entered(retry_topic(group)) is None
        ranks = None
        if found.by_priority:
            create = self._tables.store.queue_table.create  # in memory only
            first, again = ([Rank(*each, create(*each[1].key[1:])) for each in pairs] for pairs in (new, retries))
            ranks = highest_first(found, first + again, _queue_id), highest_first(found, again + first, _queue_id)
        route = Route(ranks, queues if plain else None, at_once, rng, topic, queues, new, retries, pops)
        known.setdefault(group, {})[topic] = route
        return route

    def retry_topics(self, group: str, topic: str) -> list[tuple[int, str]]:
        """Return (mark, name) of the topics that may hold copies of popped messages, existing or not.
        A name of version 1 is ambiguous, so it may belong to another group (delivery#system-names)."""
        names = [(2, pop_retry_topic(group, topic, 2))]
        if self._tables.parts.config.pop_retry_version == 1 or self._groups.get(f"{group}_{topic}") is None:
            names.append((1, pop_retry_topic(group, topic, 1)))
        return names

    def _topic_changed(self, topic: str) -> None:
        if self._topics.get(topic) is None:
            self._tables.drop(lambda key: key.topic == topic)
        # A new dict, not `clear`: another thread may be about to store a route made from the old tables.
        self._tables.routes = {}

    def _group_changed(self, group: str) -> None:
        if self._groups.get(group) is None:
            self._tables.drop(lambda key: key.group == group)
        self._tables.routes = {}

    def _in_order(self, group: str, topic: str) -> bool:
        """Return True if the group popped the topic in order, or has counted attempts of its messages."""
        return any(key[:2] == (group, topic) for key in self._tables.orders.records())


def _queue_id(rank: Rank) -> int:
    return rank.state.key.queue_id
