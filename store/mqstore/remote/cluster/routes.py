"""Routes of an Apache RocketMQ cluster: bodies as fastjson writes them, and the queues of a topic by number.

A queue of RocketMQ is named by broker and id, and a queue here by one number. The queues of a topic are numbered from
0, by broker name and id, when the client first sees the topic. Queues that come later get the next numbers, and queues
that go keep theirs. So a number never changes while the client runs, but another client may number in another way.

The specification numbers a broker, not a queue (broker number << 14 | id). Then most topics would have no queue 0, to
which `Queue` and many programs send, and no loop over `range(read_queues)` would meet an existing queue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqstore.broker.tables.topics import PERM_READ, PERM_WRITE, TopicConfig
from mqstore.remoting.codes import MASTER
from mqstore.remoting.shapes import loads

_TOKENS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|(?<=[{,])(\d+|\{[^{}]*\})(?=:)')
"""A text, which is skipped, or the key of an object that is a number or an object."""


def fastjson(body: bytes) -> dict[str, Any]:
    """Return the object of a body. Keys that are numbers or objects become the texts of those.
    Raises FormatError if it is none.

    >>> list(fastjson(b'{0:"a",{"queueId":1}:"b"}'))
    ['0', '{"queueId":1}']
    """
    text = body.decode("utf-8", "replace")
    return loads(_TOKENS.sub(lambda found: json.dumps(found[1]) if found[1] else found[0], text))


class Place(NamedTuple):
    """Queue of a broker, and its permissions."""

    broker: str
    queue_id: int
    readable: bool
    writable: bool

    def body(self, topic: str) -> dict[str, Any]:
        """Return the queue as RocketMQ's bodies name it."""
        return {"brokerName": self.broker, "queueId": self.queue_id, "topic": topic}


@dataclass(frozen=True, slots=True)
class RoutedTopic(TopicConfig):
    """Topic of a cluster. Queue `i` is `places[i]`."""

    places: tuple[Place, ...] = ()
    numbers: Mapping[tuple[str, int], int] = field(default_factory=dict, hash=False, repr=False)
    """Number of a queue by broker and id."""

    @property
    def queue_ids(self) -> list[int]:
        """Numbers of the readable queues, in the order in which Java clients divide them."""
        return [self.numbers[place[:2]] for place in sorted(self.places) if place.readable]

    @property
    def writable_ids(self) -> list[int]:
        """Numbers of the writable queues, in the same order."""
        return [self.numbers[place[:2]] for place in sorted(self.places) if place.writable]

    @property
    def brokers(self) -> list[str]:
        """Names of the brokers with readable queues."""
        return sorted({place.broker for place in self.places if place.readable})


def addresses(datas: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the address of each broker that takes messages, by name."""
    return {data["brokerName"]: data["brokerAddrs"][MASTER] for data in datas if MASTER in data["brokerAddrs"]}


def routed(name: str, route: Mapping[str, Any], known: RoutedTopic | None = None) -> RoutedTopic:
    """Return a topic by its route. `known` is the topic as this client has seen it before: numbers stay."""
    there = addresses(route["brokerDatas"])
    found: dict[tuple[str, int], Place] = {}
    for data in route["queueDatas"]:
        broker, perm, read, write = (data[key] for key in ("brokerName", "perm", "readQueueNums", "writeQueueNums"))
        for i in range(max(read, write) if broker in there else 0):
            readable, writable = i < read and perm & PERM_READ != 0, i < write and perm & PERM_WRITE != 0
            found[broker, i] = Place(broker, i, readable, writable)
    before = () if known is None else tuple(place[:2] for place in known.places)
    keys = [*before, *sorted(found.keys() - set(before))]
    places = tuple(found.get(key) or Place(*key, readable=False, writable=False) for key in keys)
    perm = PERM_READ * any(place.readable for place in places) + PERM_WRITE * any(place.writable for place in places)
    return RoutedTopic(
        name, len(places), len(places), perm, places=places, numbers={key: i for i, key in enumerate(keys)}
    )


def spread(queues: int, brokers: int) -> list[int]:
    """Return how many queues each broker gets of a new topic with so many.

    >>> spread(5, 2), spread(1, 2)
    ([3, 2], [1, 0])
    """
    each, more = divmod(queues, brokers)
    return [each + (i < more) for i in range(brokers)]
