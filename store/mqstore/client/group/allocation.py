"""Strategies that divide a topic's queues among the members of a group (clients#strategies).

    name                strategy                                                        8 queues, 3 members
    "avg"               contiguous shares, the first members have one more              0-2    3-5    6-7
    "circle"            one after the other, in turns                                   0,3,6  1,4,7  2,5
    fixed_queues(...)   these, regardless of other members (RocketMQ's CONFIG)

Strategies are pure functions. For another division, write a function of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from mqstore.errors import ConfigError
from mqstore.log.commitlog import QueueRef
from mqstore.log.writing.log_tail import as_queue

Strategy = Callable[[str, Sequence[QueueRef], Sequence[str]], Sequence[QueueRef]]
"""Function `(my client id, the queues of one topic, the members) -> my queues`.
Queues and members are sorted, unique and not empty. A client that is not a member has no queues. Each queue must go to
exactly one member."""


def avg(client_id: str, queues: Sequence[QueueRef], members: Sequence[str]) -> Sequence[QueueRef]:
    """Return contiguous shares whose sizes differ by at most one, the larger ones first.

    >>> [queue.queue_id for queue in avg("b", [QueueRef("t", i) for i in range(8)], ["a", "b", "c"])]
    [3, 4, 5]
    """
    if client_id not in members:
        return ()
    size, more = divmod(len(queues), len(members))
    i = members.index(client_id)
    begin = i * size + min(i, more)
    return queues[begin : begin + size + (i < more)]


def circle(client_id: str, queues: Sequence[QueueRef], members: Sequence[str]) -> Sequence[QueueRef]:
    """Return every n-th queue of n members, so that neighbours go to different members.

    >>> [queue.queue_id for queue in circle("b", [QueueRef("t", i) for i in range(8)], ["a", "b", "c"])]
    [1, 4, 7]
    """
    return queues[members.index(client_id) :: len(members)] if client_id in members else ()


def fixed_queues(queues: Iterable[QueueRef | tuple[str, int]]) -> Strategy:
    """Return a `strategy=` that gives this member those of `queues` that exist.
    Other members are ignored, and nobody checks that the members' lists fit together. If two list a queue, one gets its
    lock. A queue in no list is not consumed. Raises ConfigError for an entry that is not a queue.

    >>> fixed_queues([("t", 1)])("a", [QueueRef("t", 0), QueueRef("t", 1)], ["a", "b"])
    [QueueRef(topic='t', queue_id=1)]
    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     store.create_topic("orders", queues=2)
    ...     with store.pull_consumer("billing", strategy=mqstore.fixed_queues([("orders", 1)])) as consumer:
    ...         consumer.subscribe("orders")
    ...         _ = consumer.poll(0)
    ...         consumer.assignment()
    frozenset({QueueRef(topic='orders', queue_id=1)})
    """
    fixed = frozenset(as_queue(queue) for queue in queues)
    return lambda client_id, there, members: [queue for queue in there if queue in fixed]


STRATEGIES: dict[str, Strategy] = {"avg": avg, "circle": circle}


def name_of(strategy: Strategy) -> str:
    """Return the name by which members of a group agree on a strategy.
    All strategies that `fixed_queues` makes have the same name.
    """
    named = next((name for name, each in STRATEGIES.items() if each is strategy), None)
    called = getattr(strategy, "__qualname__", None) or type(strategy).__qualname__
    return named or f"{strategy.__module__}.{called}"


def strategy_named(strategy: object) -> Strategy:
    """Return the strategy of that name, or the function itself. Raises ConfigError for an unknown name."""
    if callable(strategy):
        return cast(Strategy, strategy)
    found = STRATEGIES.get(strategy) if isinstance(strategy, str) else None
    if found is None:
        raise ConfigError(
            f"strategy {strategy!r}: there are {', '.join(map(repr, STRATEGIES))}; or give "
            f"mqstore.fixed_queues(queues), or a function (client_id, queues, members) -> queues"
        )
    return found
