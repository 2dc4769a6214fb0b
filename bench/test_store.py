"""Questions about a store: putting, reading, opening."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mqstore
from bench import peers, servers
from bench.harness import CPU, Load, Row, Side, Work, asked, each, of_both, side
from bench.peers import BATCH
from bench.sides import PUT, READ, fill, in_store, outgoing, put, read

SEGMENTS = 200


@in_store(profile="rocketmq")
def put_in_turn(store: mqstore.Store, load: Load, *, queues: int) -> Work:
    """Put into the queues in turn, four for each topic."""
    places = [(f"{load.topic}{i // 4}", i % 4) for i in range(queues)]
    for topic, queue_id in places:
        store.put(topic, b"", queue_id=queue_id)
    bodies = load.bodies()

    def work() -> int:
        for i, body in enumerate(bodies):
            topic, queue_id = places[i % queues]
            store.put(topic, body, queue_id=queue_id)
        return len(bodies)

    return work


@in_store()
def put_many(store: mqstore.Store, load: Load, **options: Any) -> Work:
    messages = outgoing(load, options)
    store.put(load.topic, b"")

    def work() -> int:
        for start in range(0, len(messages), BATCH):
            store.put_many(load.topic, messages[start : start + BATCH])
        return len(messages)

    return work


@contextmanager
def put_flushed(directory: Path, load: Load, *, threads: int) -> Iterator[Work]:
    bodies = load.bodies(min(1.0, threads / 4))
    with mqstore.open(directory / "store", durability="flush") as store:
        store.put(load.topic, bodies[0])
        parts = [each(bodies[start::threads], partial(store.put, load.topic)) for start in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            yield (lambda: sum(pool.map(lambda part: part(), parts))) if threads > 1 else parts[0]


def body_of(message: mqstore.Message) -> bytes:
    return message.body


@in_store()
def iterate(store: mqstore.Store, load: Load, *, look: Callable[[Any], object] = body_of, **options: str) -> Work:
    fill(store, load, **options)

    def work() -> int:
        for message in store.iter(load.topic, 0):
            look(message)
        assert message.offset == load.messages - 1
        return load.messages

    return work


@in_store()
def first_read(store: mqstore.Store, load: Load, *, dispatched: bool = False) -> Work:
    count = min(32, load.messages)
    store.create_topic(load.topic)
    store.put_many(load.topic, load.bodies(), queue_id=0)
    if dispatched:
        store.log.dispatch()
    return lambda: len(store.read(load.topic, 0, load.messages - count)) // count


def crash(path: Path, load: Load) -> tuple[int, list[tuple[int, int, int]]]:
    """Fill a store and leave it as a crash that lost the checkpoint does: opening must scan all of it.

    Returns the end of the log and each record's place (segment, begin, end).
    """
    with mqstore.open(path) as store:
        receipts = fill(store, load)
    (path / "abort").write_text("0")
    (path / "checkpoint").unlink()
    segment_bytes = next(file for file in (path / "commitlog").iterdir() if file.name.isdigit()).stat().st_size
    begins = (divmod(receipt.physical_offset, segment_bytes) for receipt in receipts)
    places = [(segment, begin, begin + load.record_bytes) for segment, begin in begins]
    return receipts[-1].physical_offset + load.record_bytes, places


@contextmanager
def reopened(path: Path, done: int, messages: int | None = None) -> Iterator[Work]:
    """Open a store. `messages` is what queue 0 must hold then."""
    opened: list[mqstore.Store] = []
    with ExitStack() as stack:
        yield lambda: (opened.append(stack.enter_context(mqstore.open(path))), done)[1]
        assert messages is None or [store.offsets("bench", 0)[1] for store in opened] == [messages]


@contextmanager
def recovery(directory: Path, load: Load) -> Iterator[Work]:
    log_end, _ = crash(directory / "store", load)
    with reopened(directory / "store", log_end, load.messages) as work:
        yield work


@contextmanager
def crc32c(directory: Path, load: Load, *, by_record: bool = False) -> Iterator[Work]:
    """The peer of recovery, over the bytes that mqstore wrote."""
    log_end, places = crash(directory / "store", load)
    with peers.mapped_segments(directory / "store" / "commitlog") as views:
        sweep, records = partial(peers.crc32c_sweep, views, log_end), partial(peers.crc32c_records, views, places)
        yield records if by_record else sweep


@contextmanager
def open_clean(directory: Path, load: Load, *, share: float = 1) -> Iterator[Work]:
    """Open a cleanly closed store of 200 segments that hold `load.messages * share` messages."""
    # 8 bytes stay free behind the last record of a segment; 1024 is the smallest segment there is.
    per_segment = max(int(load.messages * share) // SEGMENTS, -(-1016 // load.record_bytes))
    config = mqstore.StoreConfig(segment_bytes=per_segment * load.record_bytes + 8)
    with mqstore.open(directory / "store", config=config) as store:
        # A batch rolls as a whole; one that is as long as a segment leaves none half empty.
        fill(store, Load(load.body_bytes, per_segment * SEGMENTS, load.topic), per_segment)
    found = sum(file.name.isdigit() for file in (directory / "store" / "commitlog").iterdir())
    assert found == SEGMENTS, f"{found} segments instead of {SEGMENTS}"
    with reopened(directory / "store", 1) as work:
        yield work


# With a clock of its own a store starts no threads, so nothing is dispatched before `dispatch`.
@in_store(config=mqstore.StoreConfig(clock=mqstore.clock.SystemClock()))
def dispatch(store: mqstore.Store, load: Load) -> Work:
    store.create_topic(load.topic)
    for body in load.bodies():
        store.put(load.topic, body, queue_id=0)
    return lambda: (store.log.dispatch(), store.offsets(load.topic, 0)[1])[1]


PUT_MANY = Side("mqstore put_many", put_many)
PUT_FIELDS = side("mqstore put_many, tag and key", put_many, tag="paid", keys="o-7")
FLUSH_1 = side("mqstore, 1 thread", put_flushed, threads=1)
FLUSH_16 = side("mqstore, 16 threads", put_flushed, threads=16)
ITER = side("mqstore iter", iterate)
ITER_BODY = side("the body alone", iterate, tag="paid", keys="o-7")
ITER_FIELDS = side("mqstore iter, fields", iterate, look=lambda m: (m.body, m.tag, m.keys), tag="paid", keys="o-7")
FIRST_READ = side("mqstore first read", first_read)
FIRST_READ_DISPATCHED = side("the same once dispatched", first_read, dispatched=True)
OPEN = side("mqstore open", open_clean)
OPEN_LESS = side("200 segments, an eighth of the messages", open_clean, share=0.125)
CRASHED = Side("mqstore open after a crash", recovery)
SWEEP, RECORDS = side("bare crc32c, one sweep", crc32c), side("bare crc32c, a call a record", crc32c, by_record=True)
MANY, FLUSHED, TAG_AND_KEYS = (400_000, 100_000), (10_000, 10_000), {"tag": "paid", "keys": ["o-7", "c-9"]}


def put_options(goal: float, **options: Any) -> Row:
    """The time of `store.put` with options."""
    return side("mqstore put with options", put, **options), Load(128, 20_000), {PUT: goal}, CPU


test_store = asked(
    {
        # `store.put`, one at a time; in profile rocketmq into 3,000 queues; with a tag and two keys beside Java.
        **of_both("put", PUT, MANY, {peers.QUEUELIB: 2, peers.SQLITE: 5}),
        "put_rocketmq": (side("mqstore put, 3,000 queues", put_in_turn, queues=3000), Load(128, 200_000), {PUT: 0.6}),
        "put_java": (side("mqstore put, tag, keys", put, **TAG_AND_KEYS), Load(1024, 100_000), {servers.JAVA_PUT: 1}),
        "put_options[tag_keys]": put_options(1.5, **TAG_AND_KEYS),
        "put_options[group]": put_options(1.7, message_group="c-9"),
        "put_options[properties]": put_options(1.7, message_group="c-9", properties={"shop": "3", "kind": "x"}),
        "put_options[delay]": put_options(3, delay=3600),
        # `store.put_many`, 1000 bodies at a time; the time of messages with tag and key.
        **of_both("put_many", PUT_MANY, MANY, {peers.LMDB_PUTMULTI: 4}),
        "put_many_tags": (PUT_FIELDS, Load(128, 100_000), {PUT_MANY: 3}, CPU),
        # `store.put` with durability "flush".
        **of_both("flush_1", FLUSH_1, FLUSHED, {peers.DSYNC: 0.95, peers.SQLITE_PUT_FULL: None}, sync_first=True),
        **of_both("flush_16", FLUSH_16, FLUSHED, {FLUSH_1: 6}, sync_first=True),
        # A queue from end to end, taking each body: by `store.iter`, by `store.read` of 32 (its default) or 1000.
        **of_both("read[iter]", ITER, MANY, {peers.LMDB_CURSOR: 1}),
        **of_both("read[32]", side("mqstore read", read, batch=32), MANY, {peers.LMDB_CURSOR: 1}),
        **of_both("read[1000]", READ, MANY, {peers.LMDB_CURSOR: 1}),
        # The time of reading body, tag and keys, beside the body alone.
        "read_fields": (ITER_FIELDS, Load(128, 100_000), {ITER_BODY: 2.5}, CPU),
        # The time of the first read of the last messages, at once after `put_many`.
        "first_read": (FIRST_READ, Load(128, 300_000), {FIRST_READ_DISPATCHED: 1.3}, {"by": "time", "unit": "calls"}),
        # `mqstore.open` after a crash that lost the checkpoint: the whole log is verified.
        "recovery[128]": (CRASHED, Load(128, 200_000), {SWEEP: 0.3, RECORDS: 0.3}, {"unit": "bytes"}),
        "recovery[1024]": (CRASHED, Load(1024, 200_000), {SWEEP: 0.5, RECORDS: 0.3}, {"unit": "bytes"}),
        # `mqstore.open` of a cleanly closed store of 200 segments.
        "open": (OPEN, Load(128, 400_000), {OPEN_LESS: 0.8}, {"unit": "calls", "limit": (100, "ms")}),
        # How fast messages become readable, beside how fast they are put.
        "dispatch": (Side("mqstore dispatch", dispatch), Load(128, 200_000), {PUT: 3}),
    }
)
