"""Ctrl-C at every point of every call: the store goes on, closes, and has everything that it acknowledged.

Two ways to look. `test_every_point` raises at each point of a call where CPython may run a signal handler, one after
the other (`tests/interrupts.py`). `test_real_signals` sends SIGINT to a process that works, at random moments, in
threads and under asyncio.

`make interrupts` tries every point; `make test` a few of each call, other ones for each MQSTORE_CAMPAIGN_SEED.
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import GroupNotFoundError, QueueEmpty, QueueFull, QueueRef, SendReceipt, Store, StoreConfig
from tests.interrupts import run_interrupted

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",  # finalizers of iterators that were interrupted
    "ignore::ResourceWarning",
)

SEED = int(os.environ.get("MQSTORE_CAMPAIGN_SEED", 1))
POINTS = int(os.environ.get("MQSTORE_CAMPAIGN_ROUNDS", 6))
"""How many points of each call are tried. `make interrupts` says more than there are."""
MAX_POINTS = 4000
"""No call has so many. Points of a first call, which creates things, are more than those of later ones."""
HANG_S = 20
SIGNALS = min(50 * POINTS, 5000)
"""To a process that works. They come in bursts: the pauses between them are of random length."""
MEAN_PAUSE_S = 0.004


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


def put_everything(work: Work) -> None:
    work.keep(tag="a", keys=["k"], properties={"a": "b"})


def put_group(work: Work) -> None:
    work.keep(message_group="g")


def put_durable(work: Work) -> None:
    work.keep(durability="flush")


def put_delay(work: Work) -> None:
    work.store.put("t", b"later", delay=30)


def put_level(work: Work) -> None:
    work.store.put("t", b"later", delay_level=2)


def recall(work: Work) -> None:
    handle = work.store.put("t", b"later", delay=30).recall_handle
    assert handle is not None
    work.store.recall(handle)


def put_many(work: Work) -> None:
    bodies = [work.body() for _ in range(20)]
    work.put.extend(zip(work.store.put_many("t", bodies, queue_id=1), bodies, strict=True))


def put_large(work: Work) -> None:
    work.store.put("t", bytes(9000), queue_id=2)  # rolls every few calls


def create_topic(work: Work) -> None:
    work.number += 1
    work.store.create_topic(f"made-{work.number}")


def read_back(work: Work) -> None:
    receipt = work.keep(queue_id=0)
    [message] = work.store.read("t", 0, receipt.offset)
    assert message.body == work.put[-1][1]


def iterate(work: Work) -> None:
    for count, _ in enumerate(work.store.iter("t")):
        if count > 5:
            break


def find(work: Work) -> None:
    key = f"k{work.number}"
    work.keep(keys=key)
    assert len(work.store.find("t", key=key)) == 1


def look(work: Work) -> None:
    work.store.read_columns("t", 0, 0, 8)
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


def commit(work: Work) -> None:
    work.store.commit_offset("reader", QueueRef("t", 0), 0, durability="flush")


def a_queue(store: Store, **options: Any) -> mqstore.Queue:
    return store.queue("q", visibility=0.2, **options)


def get_and_ack(work: Work) -> None:
    work.tool.put(b"x")
    work.tool.get(timeout=5).ack()


def get_and_nack(work: Work) -> None:
    work.tool.put(b"x")
    work.tool.get(timeout=5).nack(delay=0)


def get_and_reject(work: Work) -> None:
    work.tool.put(b"x")
    work.tool.get(timeout=5).reject("no")


def get_and_extend(work: Work) -> None:
    work.tool.put(b"x")
    task = work.tool.get(timeout=5)
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


def join(work: Work) -> None:
    work.tool.join(timeout=0.001)


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


def dead_letters(work: Work) -> None:
    list(work.tool.dead_letters)


def simple(store: Store) -> Any:
    consumer = store.simple_consumer("simple")
    consumer.subscribe("t")
    return consumer


def receive(work: Work) -> None:
    work.keep()
    for delivery in work.tool.receive(2, visibility=0.2, wait=1):
        delivery.ack()


def pull(store: Store) -> Any:
    consumer = store.pull_consumer("pull")
    consumer.subscribe("t")
    return consumer


def poll(work: Work) -> None:
    work.keep()
    work.tool.poll(timeout=1)
    work.tool.commit()


def poll_nothing(work: Work) -> None:
    work.tool.poll(timeout=0.001)


def push(work: Work, **options: Any) -> None:
    done = threading.Event()
    consumer = work.store.push_consumer(f"push-{'-'.join(options) or 'plain'}", workers=1, **options)
    consumer.subscribe("t", lambda message: done.set())
    try:
        consumer.start()
        work.keep()
    finally:
        consumer.stop(timeout=5)


def push_pop(work: Work) -> None:
    push(work, mode="pop")


def push_ordered(work: Work) -> None:
    push(work, ordered=True)


def producer(store: Store) -> mqstore.Producer:
    return store.producer("producer", checker=lambda message: True)


def send(work: Work) -> None:
    work.tool.send("t", b"x")


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
    "put with tag, keys, properties": (nothing, put_everything),
    "put of a message group": (nothing, put_group),
    "put, durable": (nothing, put_durable),
    "put with a delay": (nothing, put_delay),
    "put with a delay level": (nothing, put_level),
    "put that rolls": (nothing, put_large),
    "put_many": (nothing, put_many),
    "recall": (nothing, recall),
    "create_topic": (nothing, create_topic),
    "read": (nothing, read_back),
    "iter": (nothing, iterate),
    "find": (nothing, find),
    "look": (nothing, look),
    "verify": (nothing, verify),
    "snapshot": (nothing, snapshot),
    "commit_offset": (nothing, commit),
    "get, ack": (a_queue, get_and_ack),
    "get, nack": (a_queue, get_and_nack),
    "get, reject": (a_queue, get_and_reject),
    "get, extend": (a_queue, get_and_extend),
    "get_many": (a_queue, get_many),
    "iter of a queue": (a_queue, drain),
    "get that waits": (a_queue, get_nothing),
    "join": (a_queue, join),
    "put that waits for room": (bounded, put_bounded),
    "ordered get, ack": (ordered, get_and_ack),
    "ordered get, nack": (ordered, get_and_nack),
    "dead letters": (a_queue, dead_letters),
    "simple consumer": (simple, receive),
    "pull consumer": (pull, poll),
    "pull consumer that waits": (pull, poll_nothing),
    "push consumer": (nothing, push),
    "push consumer, pop": (nothing, push_pop),
    "push consumer, ordered": (nothing, push_ordered),
    "producer": (producer, send),
    "producer in the background": (producer, submit),
    "producer, made and closed": (nothing, make_producer),
    "transaction": (producer, transact),
}


def open_store(path: Path) -> Store:
    return mqstore.open(path, config=StoreConfig(segment_bytes=1 << 16))


def start(path: Path, make: Callable[[Store], Any]) -> Work:
    """A store in which everything is there that a first call creates."""
    store = open_store(path)
    for queue_id in range(4):
        store.put("t", b"first", queue_id=queue_id, tag="a", keys="first")
    store.put("t", b"later", delay=30)
    store.put("t", b"later", delay_level=1)
    return Work(store, make(store))


def in_time(call: Callable[[], object]) -> None:
    """`call` from another thread. A hang is an AssertionError; whatever it raises is raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    if thread.is_alive():
        faulthandler.dump_traceback()
        raise AssertionError("the store hangs")
    if errors:
        raise errors[0]


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


def check_kept(path: Path, work: Work) -> None:
    """Close, open again: everything acknowledged is there, whole, and the store is sound."""
    in_time(lambda: work.store.close(5))
    with open_store(path) as store:
        for receipt, body in work.put:
            [message] = store.read(*receipt.queue, receipt.offset, 1)
            assert message.body == body
        assert not list(store.verify())


def points_of(seed: int, wanted: int) -> list[int]:
    """Every point if that many are wanted, else a seeded choice: more of the first, for most calls have few."""
    if wanted >= MAX_POINTS:
        return list(range(MAX_POINTS))
    rng = random.Random(seed)
    return sorted({int(MAX_POINTS ** rng.random()) - 1 for _ in range(wanted)})


def told(at: int, name: str, error: BaseException, stack: list[str]) -> str:
    said = f"interrupted at point {at} of {name!r}, then {error!r}; it, or the point before it, was at"
    return "\n    ".join([said, *stack])


@pytest.mark.parametrize("name", CALLS)
def test_every_point(name: str, tmp_path: Path) -> None:
    make, step = CALLS[name]
    path = tmp_path / "store"
    work = start(path, make)
    ended = 0
    stack: list[str] = []
    for at in points_of(SEED * 1000 + list(CALLS).index(name), POINTS):
        if make is ordered:
            work.tool = make(work.store)
        try:
            stack = run_interrupted(lambda: step(work), at)
            in_time(lambda: probe(work.store))
        except BaseException as error:
            raise AssertionError(told(at, name, error, stack)) from error
        ended = 0 if stack else ended + 1
        if ended > 20:  # a later call has fewer points: whatever a first one made is there
            break
    check_kept(path, work)


def test_a_waiting_thread_is_woken(tmp_path: Path) -> None:
    """A call that was interrupted while it woke others has woken them, or the next message does."""
    path = tmp_path / "store"
    work = start(path, nothing)
    for at in points_of(SEED, POINTS):
        queue = work.store.queue(f"waited-{at % 50}", visibility=60)
        for task in queue:
            task.ack()
        got: list[mqstore.Task] = []
        waiting = [threading.Thread(target=lambda: got.append(queue.get(timeout=HANG_S)), daemon=True) for _ in "ab"]  # noqa: B023
        for thread in waiting:
            thread.start()
        while queue._waits.broker._waiters.parked < len(waiting):
            pass

        def put_and_show() -> None:
            queue.put(b"x")  # noqa: B023
            work.store.offsets(queue.name, 0)  # noqa: B023  (dispatches, and wakes)

        stack = run_interrupted(put_and_show, at)
        try:
            in_time(lambda: queue.put_many([b"x", b"x"]))  # noqa: B023
            for thread in waiting:
                thread.join(HANG_S)
            assert len(got) == len(waiting)
        except BaseException as error:
            raise AssertionError(told(at, "waking", error, stack)) from error
        for task in got:
            task.ack()
        if not stack:
            break
    check_kept(path, work)


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_opening_at_every_point(mode: Any, tmp_path: Path) -> None:
    """The next opening finds no lock of the one that was interrupted, nor anything to complain of."""
    path = tmp_path / "store"
    work = start(path, nothing)
    put_plain(work)
    work.store.close()
    for at in points_of(SEED, POINTS):
        opened: list[Store] = []
        stack = run_interrupted(lambda: opened.append(mqstore.open(path, mode)), at)  # noqa: B023
        for store in opened:
            store.close()
        if not stack:
            break
        try:
            in_time(lambda: open_store(path).close())
        except BaseException as error:
            raise AssertionError(told(at, "opening", error, stack)) from error
    work.store = open_store(path)
    check_kept(path, work)


def test_closing_at_every_point(tmp_path: Path) -> None:
    """A second `close` ends what an interrupted one has begun."""
    path = tmp_path / "store"
    work = start(path, nothing)
    for at in points_of(SEED, POINTS):
        put_plain(work)
        queue = a_queue(work.store)
        queue.put(b"x")
        queue.get(timeout=5).ack()
        stack = run_interrupted(work.store.close, at)
        try:
            in_time(work.store.close)
            work.store = open_store(path)
        except BaseException as error:
            raise AssertionError(told(at, "closing", error, stack)) from error
        if not stack:
            break
    check_kept(path, work)


@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_real_signals(mode: str, tmp_path: Path) -> None:
    """SIGINT at random moments: the store closes in time, and nothing acknowledged is lost."""
    rng = random.Random(SEED)
    path = tmp_path / "store"
    start(path, nothing).store.close()
    command = [sys.executable, "-m", "tests.campaigns.interrupted", str(path), mode, str(SEED)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "store")])}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=errors
        )
        assert child.stdin is not None
        while output.tell() == 0 and child.poll() is None:  # it has begun
            time.sleep(0.01)
            output.seek(0, os.SEEK_END)
        for _ in range(SIGNALS):
            time.sleep(rng.expovariate(1 / MEAN_PAUSE_S))
            child.send_signal(signal.SIGINT)
        child.stdin.close()
        child.wait()
        for file in (output, errors):
            file.seek(0)
        told, complaints = output.read().decode().splitlines(), errors.read().decode()
    assert child.returncode == 0, complaints
    assert told[-1].startswith("closed ")
    assert int(told[-1].split()[1]) > SIGNALS // 4
    with open_store(path) as store:
        for line in told[:-1]:
            _, topic, queue_id, offset, body = line.split()
            [message] = store.read(topic, int(queue_id), int(offset), 1)
            assert message.body == body.encode()
        assert not list(store.verify())
