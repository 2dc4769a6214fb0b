"""Questions about a store: putting, reading, opening."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

import mqstore
from bench import peers, servers
from bench.harness import Ask, Load, Side, Work, each
from bench.peers import BATCH
from bench.sides import PUT, READ, fill, filled, outgoing, put, read
from mqstore.broker.router import SendOptions

BODIES = pytest.mark.parametrize("body", [128, 1024])
SEGMENTS = 200
MANY = {128: 400_000, 1024: 100_000}
TAG_AND_KEYS = SendOptions(tag="paid", keys=["o-7", "c-9"])


@BODIES
def test_put(ask: Ask, body: int) -> None:
    """`store.put`, one message at a time."""
    ask(PUT, Load(body, MANY[body]), {peers.QUEUELIB: 2, peers.SQLITE: 5})


@contextmanager
def put_in_turn(directory: Path, load: Load, *, queues: int) -> Iterator[Work]:
    """Put into the queues of a store in profile rocketmq in turn, four for each topic."""
    with mqstore.open(directory / "store", profile="rocketmq") as store:
        places = [(f"{load.topic}{i // 4}", i % 4) for i in range(queues)]
        for topic, queue_id in places:
            store.put(topic, b"", queue_id=queue_id)
        bodies = load.bodies()

        def work() -> int:
            for i, body in enumerate(bodies):
                topic, queue_id = places[i % queues]
                store.put(topic, body, queue_id=queue_id)
            return len(bodies)

        yield work


def test_put_rocketmq(ask: Ask) -> None:
    """`store.put` in profile rocketmq into 3,000 queues, compared with a put in profile mqstore."""
    ask(Side("mqstore put, 3,000 queues", partial(put_in_turn, queues=3000)), Load(128, 200_000), {PUT: 0.6})


def test_put_java(ask: Ask) -> None:
    """`store.put` with a tag and two keys, beside the Java store."""
    ask(Side("mqstore put, tag and keys", partial(put, **TAG_AND_KEYS)), Load(1024, 100_000), {servers.JAVA_PUT: 1})


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize(
    ("options", "goal"),
    [
        pytest.param(TAG_AND_KEYS, 1.5, id="tag_keys"),
        pytest.param({"message_group": "c-9"}, 1.7, id="group"),
        pytest.param({"message_group": "c-9", "properties": {"shop": "3", "kind": "x"}}, 1.7, id="properties"),
        pytest.param({"delay": 3600}, 3, id="delay"),
    ],
)
def test_put_options(ask: Ask, options: dict[str, Any], goal: float) -> None:
    """The time of `store.put` with options."""
    ask(Side("mqstore put with options", partial(put, **options)), Load(128, 20_000), {PUT: goal}, by="time")


@contextmanager
def put_many(directory: Path, load: Load, **options: Any) -> Iterator[Work]:
    messages = outgoing(load, options)
    with mqstore.open(directory / "store") as store:
        store.put(load.topic, b"")

        def work() -> int:
            for start in range(0, len(messages), BATCH):
                store.put_many(load.topic, messages[start : start + BATCH])
            return len(messages)

        yield work


PUT_MANY = Side("mqstore put_many", put_many)


@BODIES
def test_put_many(ask: Ask, body: int) -> None:
    """`store.put_many`, 1000 bodies at a time."""
    ask(PUT_MANY, Load(body, MANY[body]), {peers.LMDB_PUTMULTI: 4})


@pytest.mark.benchmark(timer=time.process_time)
def test_put_many_tags(ask: Ask) -> None:
    """The time of `store.put_many` of messages with tag and key."""
    ours = Side("mqstore put_many, tag and key", partial(put_many, tag="paid", keys="o-7"))
    ask(ours, Load(128, 100_000), {PUT_MANY: 3}, by="time")


@contextmanager
def put_flushed(directory: Path, load: Load, *, threads: int) -> Iterator[Work]:
    bodies = load.bodies(min(1.0, threads / 4))
    with mqstore.open(directory / "store", durability="flush") as store:
        store.put(load.topic, bodies[0])

        parts = [each(bodies[start::threads], partial(store.put, load.topic)) for start in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            yield (lambda: sum(pool.map(lambda part: part(), parts))) if threads > 1 else parts[0]


FLUSH_1 = Side("mqstore, 1 thread", partial(put_flushed, threads=1))


@BODIES
def test_flush_1(ask: Ask, body: int) -> None:
    """`store.put` with durability "flush", in one thread."""
    ask(FLUSH_1, Load(body, 10_000), {peers.DSYNC: 0.95, peers.SQLITE_PUT_FULL: None}, sync_first=True)


@BODIES
def test_flush_16(ask: Ask, body: int) -> None:
    """`store.put` with durability "flush", in 16 threads."""
    ours = Side("mqstore, 16 threads", partial(put_flushed, threads=16))
    ask(ours, Load(body, 10_000), {FLUSH_1: 6}, sync_first=True)


@contextmanager
def iterate(
    directory: Path, load: Load, *, look: Callable[[mqstore.Message], object], **options: str
) -> Iterator[Work]:
    with filled(directory, load, **options) as store:

        def work() -> int:
            for message in store.iter(load.topic, 0):
                look(message)
            assert message.offset == load.messages - 1
            return load.messages

        yield work


def body_of(message: mqstore.Message) -> bytes:
    return message.body


ITER = Side("mqstore iter", partial(iterate, look=body_of))


@pytest.mark.parametrize("body", [128, 1024])
@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(ITER, id="iter"),
        pytest.param(Side("mqstore read", partial(read, batch=32)), id="32"),
        pytest.param(READ, id="1000"),
    ],
)
def test_read(ask: Ask, ours: Side, body: int) -> None:
    """A queue from end to end, taking each body: by `store.iter`, by `store.read` of 32 (its default) or 1000."""
    ask(ours, Load(body, MANY[body]), {peers.LMDB_CURSOR: 1})


@pytest.mark.benchmark(timer=time.process_time)
def test_read_fields(ask: Ask) -> None:
    """The time of reading body, tag and keys, beside the body alone."""
    fields = partial(iterate, look=lambda m: (m.body, m.tag, m.keys), tag="paid", keys="o-7")
    plain = Side("the body alone", partial(iterate, look=body_of, tag="paid", keys="o-7"))
    ask(Side("mqstore iter, body, tag and keys", fields), Load(128, 100_000), {plain: 2.5}, by="time")


@contextmanager
def first_read(directory: Path, load: Load, *, dispatched: bool) -> Iterator[Work]:
    count = min(32, load.messages)
    with mqstore.open(directory / "store") as store:
        store.create_topic(load.topic)
        store.put_many(load.topic, load.bodies(), queue_id=0)
        if dispatched:
            store.log.dispatch()

        yield lambda: len(store.read(load.topic, 0, load.messages - count)) // count


def test_first_read(ask: Ask) -> None:
    """The time of the first read of the last messages, at once after `put_many`."""
    once_dispatched = Side("the same once dispatched", partial(first_read, dispatched=True))
    ours = Side("mqstore first read", partial(first_read, dispatched=False))
    ask(ours, Load(128, 300_000), {once_dispatched: 1.3}, by="time", unit="calls")


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
def crc32c(directory: Path, load: Load, *, by: Literal["sweep", "records"]) -> Iterator[Work]:
    """The peer of recovery, over the bytes that mqstore wrote."""
    log_end, places = crash(directory / "store", load)
    with peers.mapped_segments(directory / "store" / "commitlog") as views:
        yield {
            "sweep": partial(peers.crc32c_sweep, views, log_end),
            "records": partial(peers.crc32c_records, views, places),
        }[by]


@pytest.mark.parametrize("body", [128, 1024])
def test_recovery(ask: Ask, body: int) -> None:
    """`mqstore.open` after a crash that lost the checkpoint: the whole log is verified."""
    beside = {
        Side("bare crc32c, one sweep", partial(crc32c, by="sweep")): 0.5 if body == 1024 else 0.3,
        Side("bare crc32c, a call a record", partial(crc32c, by="records")): 0.3,
    }
    ask(Side("mqstore open after a crash", recovery), Load(body, 200_000), beside, unit="bytes")


@contextmanager
def open_clean(directory: Path, load: Load, *, share: float) -> Iterator[Work]:
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


def test_open(ask: Ask) -> None:
    """`mqstore.open` of a cleanly closed store of 200 segments."""
    fewer = Side("200 segments, an eighth of the messages", partial(open_clean, share=0.125))
    ours = Side("mqstore open", partial(open_clean, share=1.0))
    ask(ours, Load(128, 400_000), {fewer: 0.8}, unit="calls", limit=(100, "ms"))


@contextmanager
def dispatch(directory: Path, load: Load) -> Iterator[Work]:
    # With a clock of its own a store starts no threads, so nothing is dispatched before `dispatch`.
    config = mqstore.StoreConfig(clock=mqstore.clock.SystemClock())
    with mqstore.open(directory / "store", config=config) as store:
        store.create_topic(load.topic)
        for body in load.bodies():
            store.put(load.topic, body, queue_id=0)

        yield lambda: (store.log.dispatch(), store.offsets(load.topic, 0)[1])[1]


def test_dispatch(ask: Ask) -> None:
    """How fast messages become readable, beside how fast they are put."""
    ask(Side("mqstore dispatch", dispatch), Load(128, 200_000), {PUT: 3})
