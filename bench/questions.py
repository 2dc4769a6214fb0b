"""All questions, with what is wanted: the least ratio of rates, or the greatest ratio of times.

A peer with None is shown for comparison only. Reasons behind goals and peers are in docs/benchmarks.md.
"""

from __future__ import annotations

from typing import Literal

from bench import delivery, engine, everyday, peers, servers
from bench.harness import Question, Side

__all__ = ["QUESTIONS"]

_MANY = {128: 400_000, 1024: 100_000}
_SOME = {128: 40_000, 1024: 40_000}

_ENGINE = (
    Question(
        name="put",
        title="put one at a time, durability append",
        group="engine",
        ours=engine.PUT,
        peers={
            peers.QUEUELIB: 2,
            peers.SQLITE: 5,
            peers.PERSIST_QUEUE: 50,
            servers.REDIS_ADD: None,
        },
        messages=_MANY,
    ),
    Question(
        name="put_java",
        title="put one at a time with tag and keys, beside RocketMQ's own store",
        group="engine",
        ours=everyday.PUT_TAG_KEYS,
        peers={servers.JAVA_PUT: 1},
        messages={128: 200_000, 1024: 200_000},
    ),
    Question(
        name="put_many",
        title="put_many of 1000, durability append",
        group="engine",
        ours=engine.PUT_MANY,
        peers={peers.LMDB_PUT: 1.5, peers.LMDB_PUTMULTI: 1.5},
        messages=_MANY,
    ),
    Question(
        name="flush_1",
        title="put one at a time, durability flush, 1 thread",
        group="engine",
        ours=engine.FLUSH_1,
        peers={peers.DSYNC: 0.95, peers.SQLITE_TABLE_PUT_FULL: None, servers.REDIS_ADD_ALWAYS: None},
        messages={128: 10_000, 1024: 10_000},
        sync_first=True,
    ),
    Question(
        name="flush_16",
        title="put one at a time, durability flush, 16 threads",
        group="engine",
        ours=engine.FLUSH_16,
        peers={engine.FLUSH_1: 6, peers.DSYNC: None},
        messages={128: 16_000, 1024: 16_000},
        sync_first=True,
    ),
    Question(
        name="read_messages",
        title="read a queue from end to end as messages, taking each body",
        group="engine",
        ours=engine.READ,
        peers={peers.LMDB_CURSOR: 1},
        messages=_MANY,
    ),
    Question(
        name="reput",
        title="build consume queues from the commit log",
        group="engine",
        ours=engine.REPUT,
        peers={engine.PUT: 3},
        messages=_MANY,
    ),
    Question(
        name="recovery",
        title="open after a crash, the whole log scanned and verified",
        group="engine",
        ours=engine.RECOVERY,
        peers={engine.CRC32C_SWEEP: 0.3, engine.CRC32C_RECORDS: 0.3},
        messages=_MANY,
        unit="bytes",
    ),
    Question(
        name="open",
        title="open a cleanly closed store of 200 segments",
        group="engine",
        ours=engine.OPEN,
        # Eight times the messages in as many segments: only noise may tell the two apart.
        peers={engine.OPEN_FEWER: 0.8},
        limit=(100, "ms"),
        messages=_MANY,
        unit="calls",
    ),
)

_DELIVERY = (
    Question(
        name="pop_one",
        title="pop and acknowledge messages one by one",
        group="delivery",
        ours=delivery.POP_ONE,
        peers={peers.SQLITE_ACK_QUEUE: 20, peers.LITEQUEUE: 10},
        messages=_SOME,
    ),
    Question(
        name="pop_many",
        title="pop and acknowledge messages 32 at a time",
        group="delivery",
        ours=delivery.POP_MANY,
        peers={engine.READ: None},
        limit=(150, "k/s"),
        messages={128: 200_000, 1024: 100_000},
    ),
    Question(
        name="delay",
        title="deliver messages that are due, from a delay level to their queue",
        group="delivery",
        ours=delivery.DELAYED,
        peers={engine.PUT: 0.3, delivery.PUT_AND_DISPATCH: None},
        messages={128: 200_000, 1024: 100_000},
    ),
    Question(
        name="queue_put",
        title="put items into a Queue one by one",
        group="delivery",
        ours=delivery.QUEUE_PUT,
        peers={
            engine.PUT: 0.667,
            peers.QUEUELIB: None,
            peers.SQLITE_TABLE_PUT: None,
            peers.MEMORY_PUT: None,
        },
        messages=_SOME,
    ),
    Question(
        name="queue_get",
        title="get and acknowledge items of a Queue one by one",
        group="delivery",
        ours=delivery.QUEUE_GET,
        peers={
            peers.SQLITE_ACK_QUEUE: 40,
            peers.LITEQUEUE: None,
            peers.LOCALQUEUE: 5,
            peers.DISKCACHE_DEQUE: 12,
            peers.SQLITE_TABLE_GET: None,
            servers.REDIS_GET: None,
            peers.MEMORY_GET: None,
        },
        messages={128: 20_000, 1024: 20_000},
    ),
    Question(
        name="queue_flush",
        title="the same with durability flush",
        group="delivery",
        ours=delivery.QUEUE_GET_FLUSH,
        peers={peers.SQLITE_TABLE_GET_FULL: None, servers.REDIS_GET_ALWAYS: None},
        messages={128: 3000, 1024: 3000},
        sync_first=True,
    ),
    Question(
        name="push",
        title="hand messages to a handler that does nothing",
        group="delivery",
        ours=delivery.PUSH_ALONE,
        peers={engine.READ: None},
        limit=(200, "k/s"),
        messages={128: 200_000, 1024: 100_000},
    ),
)


def _everyday(
    name: str,
    title: str,
    ours: Side,
    plain: Side,
    at_most: float,
    *,
    clock: Literal["wall", "cpu"] = "cpu",
    messages: int = 20_000,
    unit: Literal["messages", "calls"] = "messages",
) -> Question:
    """A question about the time that something takes beside the plain case."""
    return Question(
        name=name,
        title=f"time of {title}",
        group="everyday",
        ours=ours,
        peers={plain: at_most},
        messages={128: messages},
        ratio="x time",
        clock=clock,
        unit=unit,
    )


_EVERYDAY = (
    _everyday("put_tag_keys", "a put with tag and keys", everyday.PUT_TAG_KEYS, everyday.PUT, 1.5),
    _everyday("put_group", "a put with a message group", everyday.PUT_GROUP, everyday.PUT, 1.7),
    _everyday("put_properties", "a put with group and properties", everyday.PUT_PROPERTIES, everyday.PUT, 1.7),
    _everyday("put_delay", "a put with a delay", everyday.PUT_DELAY, everyday.PUT, 3),
    _everyday("put_many_tags", "put_many of tagged messages", everyday.PUT_MANY_OPTIONS, everyday.PUT_MANY, 3),
    _everyday("read_fields", "reading body, tag and keys", everyday.READ_FIELDS, everyday.READ_BODY, 2.5),
    _everyday("queue_ordered", "get and ack in order", delivery.QUEUE_GET_ORDERED, delivery.QUEUE_GET, 2.5),
    _everyday(
        "queue_delayed",
        "get and ack while 20,000 messages are delayed",
        delivery.QUEUE_GET_DELAYED,
        delivery.QUEUE_GET,
        1.1,
    ),
    # From here on threads hand over to each other, or one works while another waits for it.
    _everyday("queue_asyncio", "get and ack in asyncio", everyday.ASYNCIO_GET, delivery.QUEUE_GET, 2, clock="wall"),
    _everyday("push_pop", "a push consumer in mode pop", delivery.PUSH_POP, delivery.PUSH, 1.5, clock="wall"),
    _everyday("push_ordered", "a push consumer in order", delivery.PUSH_ORDERED, delivery.PUSH, 2, clock="wall"),
    _everyday(
        "push_filter", "a push consumer with a tag", delivery.PUSH_FILTERED, delivery.PUSH_TAGGED, 1.1, clock="wall"
    ),
    _everyday(
        "first_read",
        "the first read behind a put_many of 300,000",
        everyday.FIRST_READ,
        everyday.FIRST_READ_DISPATCHED,
        1.3,
        clock="wall",
        messages=300_000,
        unit="calls",
    ),
)

QUESTIONS = (*_ENGINE, *_DELIVERY, *_EVERYDAY)
