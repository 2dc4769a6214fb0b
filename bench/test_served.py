"""Questions about a served store (`mqstore serve`, `mqstore.connect`) beside Redis and SQLite queues.

One client process calls one server process over a Unix socket, or two processes share a queue: one puts while the other
takes and acknowledges. Redis has an append-only file that is synced each second, and hiredis. Every side keeps what a
kill -9 of all processes would leave.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mqstore
from bench import peers, servers
from bench.harness import Ask, Load, Side, Work, each, needs_modules

_LOAD = Load(1024, 6400)
_FLIGHT = 64
"""Puts in flight."""
_BATCH = 32
_PATIENCE_S = 0.0005
"""Pause of a queue that cannot wait, when it is empty."""


def cut(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


@contextmanager
def served(directory: Path) -> Iterator[mqstore.Store]:
    """Serve a new store, and yield a connection to it."""
    with tempfile.TemporaryDirectory(prefix="mq-") as folder:  # the name of a socket has to be short
        command = [Path(sys.executable).with_name("mqstore"), "serve", directory / "mq", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen([*map(str, command), "--unix", f"{folder}/s"], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"ready")
            with mqstore.connect(directory / "mq") as store:
                yield store
        finally:
            process.terminate()
            process.communicate()


@contextmanager
def ours(directory: Path, load: Load, *, work: Callable[[Any, list[bytes]], Callable[[], object]]) -> Iterator[Work]:
    bodies = load.bodies()
    with served(directory) as store:
        run = work(store, bodies)
        yield lambda: (run(), len(bodies))[1]


@contextmanager
def redis(directory: Path, load: Load, *, work: Callable[[Any, list[bytes]], Callable[[], object]]) -> Iterator[Work]:
    bodies = load.bodies()
    with servers.redis_client(directory) as client:
        run = work(client, bodies)
        yield lambda: (run(), len(bodies))[1]


def side(work: Callable[[Any, list[bytes]], Callable[[], object]]) -> Side:
    return Side(f"mqstore {work.__name__}, served", partial(ours, work=work))


def peer(name: str, work: Callable[[Any, list[bytes]], Callable[[], object]]) -> Side:
    return Side(f"Redis {name}", partial(redis, work=work), servers.redis_missing)


# -- one client: (store or client of Redis, bodies) -> the timed part --------------------------------------------------


def put(store: Any, bodies: list[bytes]) -> Callable[[], object]:
    store.create_topic("bench", queues=1)
    return each(bodies, partial(store.put, "bench"))


def put_in_flight(store: Any, bodies: list[bytes]) -> Callable[[], object]:
    store.create_topic("bench", queues=1)
    start = store.broker.put_async

    def run() -> None:
        for part in cut(bodies, _FLIGHT):
            for future in [start("bench", body) for body in part]:
                future.result()

    return run


def put_many(store: Any, bodies: list[bytes]) -> Callable[[], object]:
    store.create_topic("bench", queues=1)
    return each(cut(bodies, _BATCH), partial(store.put_many, "bench"))


def filled(store: Any, bodies: list[bytes]) -> Any:
    queue = store.queue("bench")
    for part in cut(bodies, 500):
        queue.put_many(part)
    return queue


def get(store: Any, bodies: list[bytes]) -> Callable[[], object]:
    queue = filled(store, bodies)

    def run() -> None:
        task = queue.get()
        for _ in bodies[1:]:
            assert len(task.value) == len(bodies[0])
            task = queue.get(done=[task])
        task.ack()

    return run


def get_many(store: Any, bodies: list[bytes]) -> Callable[[], object]:
    queue = filled(store, bodies)

    def run() -> None:
        tasks: list[Any] = []
        while tasks := queue.get_many(_BATCH, done=tasks):
            assert {len(task.value) for task in tasks} == {len(bodies[0])}

    return run


def read(store: Any, bodies: list[bytes]) -> Callable[[], object]:
    filled(store, bodies)

    def run() -> None:
        offset = 0
        while messages := store.broker.read("bench", 0, offset, _BATCH).messages:
            assert {len(message.body) for message in messages} == {len(bodies[0])}
            offset += len(messages)
        assert offset == len(bodies)

    return run


def lpush(client: Any, bodies: list[bytes]) -> Callable[[], object]:
    return each(bodies, partial(client.lpush, "bench"))


def lpush_in_flight(client: Any, bodies: list[bytes]) -> Callable[[], object]:
    def run() -> None:
        for part in cut(bodies, _FLIGHT):
            pipeline = client.pipeline(transaction=False)
            for body in part:
                pipeline.lpush("bench", body)
            pipeline.execute()

    return run


def lpush_many(client: Any, bodies: list[bytes]) -> Callable[[], object]:
    return each(cut(bodies, _BATCH), lambda part: client.lpush("bench", *part))


def brpoplpush(client: Any, bodies: list[bytes]) -> Callable[[], object]:
    lpush_many(client, bodies)()

    def run() -> None:
        for _ in bodies:
            client.lrem("taken", 1, client.brpoplpush("bench", "taken"))

    return run


def stream_of(client: Any, bodies: list[bytes]) -> None:
    client.xgroup_create("bench", "group", id="0", mkstream=True)
    for part in cut(bodies, _FLIGHT):
        pipeline = client.pipeline(transaction=False)
        for body in part:
            pipeline.xadd("bench", {"body": body})
        pipeline.execute()


def xreadgroup(client: Any, bodies: list[bytes], *, acks: bool = True, count: int = _BATCH) -> Callable[[], object]:
    stream_of(client, bodies)

    def run() -> None:
        while found := client.xreadgroup("group", "consumer", {"bench": ">"}, count=count):
            [[_, items]] = found
            assert {len(fields[b"body"]) for _, fields in items} == {len(bodies[0])}
            if acks:
                client.xack("bench", "group", *[number for number, _ in items])

    return run


QUESTIONS: Mapping[str, tuple[Any, Mapping[Side, float | None]]] = {
    "put": (put, {peer("LPUSH", lpush): 0.9}),
    "put_64_in_flight": (put_in_flight, {peer("LPUSH, 64 in flight", lpush_in_flight): 0.8}),
    "put_32": (put_many, {peer("LPUSH of 32", lpush_many): 1.2}),
    "get_and_ack": (get, {peer("BRPOPLPUSH and LREM", brpoplpush): 0.8}),
    "get_and_ack_32": (get_many, {peer("XREADGROUP of 32 and XACK", xreadgroup): 1.2}),
    "pull_32": (
        read,
        {
            peer("XREADGROUP", partial(xreadgroup, acks=False, count=1)): 4,
            peer("XREADGROUP of 32", partial(xreadgroup, acks=False)): None,
        },
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_served(ask: Ask, question: str) -> None:
    """One client process, messages of 1 KiB."""
    work, beside = QUESTIONS[question]
    ask(side(work), _LOAD, beside)


# -- two processes -----------------------------------------------------------------------------------------------------

Shared = tuple[Callable[[Sequence[bytes]], object], Callable[[], int]]
"""Functions that put items, and that take and acknowledge some, and return how many."""
OpenShared = Callable[[Path], AbstractContextManager[Shared]]


@contextmanager
def connected(directory: Path, *, size: int) -> Iterator[Shared]:
    with mqstore.connect(directory / "mq") as store:
        queue, tasks = store.queue("bench"), list[Any]()

        def take() -> int:
            tasks[:] = queue.get_many(size, None, done=tasks[:])
            return len(tasks)

        yield (queue.put_many if size > 1 else lambda items: queue.put(items[0])), take
        for task in tasks:
            task.ack()


@contextmanager
def one_by_one(directory: Path, *, open_queue: peers.Open) -> Iterator[Shared]:
    with open_queue(directory) as (put_one, take_one):

        def take() -> int:
            try:
                return int(take_one() is not None)
            except Exception:  # each library has another word for "empty"
                time.sleep(_PATIENCE_S)
                return 0

        yield lambda items: put_one(items[0]), take


@contextmanager
def huey(directory: Path) -> Iterator[peers.Opened]:
    from huey.storage import SqliteStorage

    with closing(SqliteStorage(filename=str(directory / "huey.db"), strict_fifo=True)) as storage:
        yield storage.enqueue, storage.dequeue


def put_all(
    open_queue: OpenShared, directory: Path, load: Load, share: float, size: int, ready: Any, begin: Any
) -> None:
    """Put the items, in a process of its own."""
    parts = cut(load.bodies(share), size)
    with open_queue(directory) as (put_some, _):
        ready.set()
        begin.wait()
        for part in parts:
            put_some(part)


@contextmanager
def relay(
    directory: Path, load: Load, *, open_queue: OpenShared, size: int = 1, share: float = 1, serve: bool = False
) -> Iterator[Work]:
    context = multiprocessing.get_context("spawn")
    count = len(load.bodies(share))
    ready, begin = context.Event(), context.Event()
    with served(directory) if serve else tempfile.TemporaryDirectory(), open_queue(directory) as (_, take):
        child = context.Process(target=put_all, args=(open_queue, directory, load, share, size, ready, begin))
        child.start()
        ready.wait()

        def work() -> int:
            begin.set()
            left = count
            while left > 0:
                left -= take()
            return count

        yield work
        child.join()


def relay_of(name: str, open_queue: peers.Open, share: float) -> Side:
    shared = partial(one_by_one, open_queue=open_queue)
    return Side(
        f"{name}, two processes", partial(relay, open_queue=shared, share=share), needs_modules(name.split()[0])
    )


_LITEQUEUE = relay_of("litequeue", peers.litequeue, 0.3)
_PERSIST_QUEUE = relay_of("persistqueue SQLiteAckQueue", peers.persist_queue, 0.05)
_HUEY = relay_of("huey SqliteStorage", huey, 0.3)


GOALS: Mapping[int, Mapping[Side, float | None]] = {
    1: {_LITEQUEUE: 1, _PERSIST_QUEUE: None, _HUEY: None},
    _BATCH: {_LITEQUEUE: 8, _PERSIST_QUEUE: 5, _HUEY: 5},
}


@pytest.mark.parametrize("size", GOALS)
def test_items_through_two_processes(ask: Ask, size: int) -> None:
    """One process puts while the other takes and acknowledges, one item or 32 at a time."""
    shared = partial(connected, size=size)
    ask(Side("mqstore Queue", partial(relay, open_queue=shared, size=size, serve=True)), _LOAD, GOALS[size])
