"""Calls of every kind on a store, and what must hold of the store after any of them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import mqstore
from mqstore import QueueEmpty, QueueFull, QueueRef, SendReceipt, Store, StoreConfig
from mqstore.errors import GroupNotFoundError

HANG_S = 20


@dataclass
class Work:
    """A store, what works on it, and what was acknowledged."""

    store: Store
    tool: Any = None
    put: list[tuple[SendReceipt, bytes]] = field(default_factory=list)
    number: int = 0

    def body(self) -> bytes:
        self.number += 1
        return b"%08d" % self.number

    def keep(self, topic: str = "t", **options: Any) -> SendReceipt:
        """Put, and note it once `put` has returned."""
        body = self.body()
        receipt = self.store.put(topic, body, **options)
        self.put.append((receipt, body))
        return receipt


Step = Callable[[Work], object]


def nothing(store: Store) -> None:
    pass


def put_plain(work: Work) -> None:
    work.keep(queue_id=0)


def recall(work: Work) -> None:
    handle = work.store.put("t", b"later", delay=30).recall_handle
    assert handle is not None
    work.store.recall(handle)


def put_many(work: Work) -> None:
    bodies = [work.body() for _ in range(20)]
    work.put.extend(zip(work.store.put_many("t", bodies, queue_id=1), bodies, strict=True))


def create_topic(work: Work) -> None:
    work.number += 1
    work.store.create_topic(f"made-{work.number}")


def read_back(work: Work) -> None:
    receipt = work.keep(queue_id=0)
    [message] = work.store.read("t", 0, receipt.offset, 1)  # behind it may be what was delayed
    assert message.body == work.put[-1][1]


def find(work: Work) -> None:
    key = f"k{work.number}"
    work.keep(keys=key)
    assert len(work.store.find("t", key=key)) == 1


def look(work: Work) -> None:
    work.store.read("t", 0, 0, 8)
    work.store.offsets("t", 0)
    with suppress(GroupNotFoundError):
        work.store.lag("q")
    work.store.topics()
    work.store.stats()


def verify(work: Work) -> None:
    assert not list(work.store.verify())


def snapshot(work: Work) -> None:
    work.number += 1
    target = Path(work.store.path).parent / f"copy-{work.number}"  # no `tempfile`: Ctrl-C may leave its lock held
    work.store.snapshot(target)
    shutil.rmtree(target)


def a_queue(store: Store) -> mqstore.Queue:
    return store.queue("q", visibility=0.2)


def get_and(settle: Callable[[mqstore.Task], object]) -> Step:
    def step(work: Work) -> None:
        work.tool.put(b"x")
        settle(work.tool.get(timeout=5))

    return step


def extend_and_ack(task: mqstore.Task) -> None:
    task.extend(0.2)
    task.ack()


def get_many(work: Work) -> None:
    work.tool.put_many([b"x", b"y", b"z"])
    for task in work.tool.get_many(3, timeout=5):
        task.ack()


def drain(work: Work) -> None:
    work.tool.put(b"x")
    for task in work.tool:
        with task:
            pass


def get_nothing(work: Work) -> None:
    with suppress(QueueEmpty):
        work.tool.get(timeout=0.001).ack()


def bounded(store: Store) -> mqstore.Queue:
    return store.queue("bounded", maxsize=2, visibility=0.2)


def put_bounded(work: Work) -> None:
    try:
        work.tool.put(b"x", timeout=0.001)
    except QueueFull:
        for task in work.tool:
            task.ack()


def ordered(store: Store) -> mqstore.Queue:
    """One for each call: an item that an interrupted call has taken holds back all behind it for a while."""
    return store.queue(f"in-order-{len(store.topics())}", ordered=True, visibility=0.2)


def subscribed(consumer: Any) -> Any:
    consumer.subscribe("t")
    return consumer


def receive(work: Work) -> None:
    work.keep()
    for delivery in work.tool.receive(2, visibility=0.2, wait=1):
        delivery.ack()


def poll(work: Work) -> None:
    work.keep()
    work.tool.poll(timeout=1)
    work.tool.commit()


def push(**options: Any) -> Step:
    def step(work: Work) -> None:
        done = threading.Event()
        consumer = work.store.push_consumer(f"push-{'-'.join(options) or 'plain'}", workers=1, **options)
        consumer.subscribe("t", lambda message: done.set())
        try:
            consumer.start()
            work.keep()
        finally:
            consumer.stop(timeout=5)

    return step


def producer(store: Store) -> mqstore.Producer:
    return store.producer("producer", checker=lambda message: True)


def submit(work: Work) -> None:
    work.tool.submit("t", b"x").result(5)
    work.tool.flush(5)


def make_producer(work: Work) -> None:
    work.number += 1
    with work.store.producer(f"p{work.number}") as made:
        made.submit("t", b"x")


def transact(work: Work) -> None:
    with work.tool.transaction() as transaction:
        transaction.send("t", b"x")


CALLS: dict[str, tuple[Callable[[Store], Any], Step]] = {
    "put": (nothing, put_plain),
    "put with tag, keys, properties": (nothing, lambda work: work.keep(tag="a", keys=["k"], properties={"a": "b"})),
    "put of a message group": (nothing, lambda work: work.keep(message_group="g")),
    "put, durable": (nothing, lambda work: work.keep(durability="flush")),
    "put with a delay": (nothing, lambda work: work.store.put("t", b"later", delay=30)),
    "put with a delay level": (nothing, lambda work: work.store.put("t", b"later", delay_level=2)),
    "put that rolls": (nothing, lambda work: work.store.put("t", bytes(9000), queue_id=2)),  # every few calls
    "put_many": (nothing, put_many),
    "recall": (nothing, recall),
    "create_topic": (nothing, create_topic),
    "read": (nothing, read_back),
    "iter": (nothing, lambda work: list(islice(work.store.iter("t"), 6))),
    "find": (nothing, find),
    "look": (nothing, look),
    "verify": (nothing, verify),
    "snapshot": (nothing, snapshot),
    "commit_offset": (
        nothing,
        lambda work: work.store.commit_offset("reader", QueueRef("t", 0), 0, durability="flush"),
    ),
    "get, ack": (a_queue, get_and(lambda task: task.ack())),
    "get, nack": (a_queue, get_and(lambda task: task.nack(delay=0))),
    "get, reject": (a_queue, get_and(lambda task: task.reject("no"))),
    "get, extend": (a_queue, get_and(extend_and_ack)),
    "get_many": (a_queue, get_many),
    "iter of a queue": (a_queue, drain),
    "get that waits": (a_queue, get_nothing),
    "join": (a_queue, lambda work: work.tool.join(timeout=0.001)),
    "put that waits for room": (bounded, put_bounded),
    "ordered get, ack": (ordered, get_and(lambda task: task.ack())),
    "ordered get, nack": (ordered, get_and(lambda task: task.nack(delay=0))),
    "dead letters": (a_queue, lambda work: list(work.tool.dead_letters)),
    "simple consumer": (lambda store: subscribed(store.simple_consumer("simple")), receive),
    "pull consumer": (lambda store: subscribed(store.pull_consumer("pull")), poll),
    "pull consumer that waits": (
        lambda store: subscribed(store.pull_consumer("pull")),
        lambda work: work.tool.poll(timeout=0.001),
    ),
    "push consumer": (nothing, push()),
    "push consumer, pop": (nothing, push(mode="pop")),
    "push consumer, ordered": (nothing, push(ordered=True)),
    "producer": (producer, lambda work: work.tool.send("t", b"x")),
    "producer in the background": (producer, submit),
    "producer, made and closed": (nothing, make_producer),
    "transaction": (producer, transact),
}


def open_store(path: Path) -> Store:
    return mqstore.open(path, config=StoreConfig(segment_bytes=1 << 16))


def probe(store: Store) -> None:
    """The store serves another thread, and wakes one that waits."""
    receipt = store.put("probe", b"x", queue_id=0)
    assert store.read("probe", 0, receipt.offset)[0].body == b"x"
    queue = store.queue("probe-queue", visibility=0.2)
    for task in queue:
        task.ack()
    got: list[bytes] = []

    def wait() -> None:
        with queue.get(timeout=HANG_S) as task:
            got.append(task.value)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    queue.put(b"woken")
    waiting.join(HANG_S)
    assert got == [b"woken"]
