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
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mqstore
from bench import peers, servers
from bench.harness import Load, Row, Side, Work, asked, each, needs_modules, side

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
        with subprocess.Popen([*map(str, command), "--unix", f"{folder}/s"], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout.readline().startswith(b"ready")
                with mqstore.connect(directory / "mq") as store:
                    yield store
            finally:
                process.terminate()


Make = Callable[[Any, list[bytes]], Callable[[], object]]
"""Function of (store or client of Redis, bodies) that returns the timed part."""


@contextmanager
def of_server(directory: Path, load: Load, *, server: Callable[[Path], Any], make: Make) -> Iterator[Work]:
    bodies = load.bodies()
    with server(directory) as client:
        run = make(client, bodies)
        yield lambda: (run(), len(bodies))[1]


def peer(name: str, make: Make) -> Side:
    redis = side(f"Redis {name}", of_server, server=servers.redis_client, make=make)
    return replace(redis, missing=servers.redis_missing)


# -- one client --------------------------------------------------------------------------------------------------------


def used(store: Any) -> Any:
    """Create the topic. Creating segment, queue and folders belongs to the first message of a store, not to each."""
    store.create_topic("bench", queues=1)
    store.put("bench", b"")
    return store


def put(store: Any, bodies: list[bytes]) -> Callable[[], object]:
    return each(bodies, partial(used(store).put, "bench"))


def put_in_flight(store: Any, bodies: list[bytes]) -> Callable[[], object]:
    start = used(store).broker.put_async

    def put_part(part: Sequence[bytes]) -> None:
        for future in [start("bench", body) for body in part]:
            future.result()

    return each(cut(bodies, _FLIGHT), put_part)


def put_many(store: Any, bodies: list[bytes]) -> Callable[[], object]:
    return each(cut(bodies, _BATCH), partial(used(store).put_many, "bench"))


def filled(store: Any, bodies: list[bytes]) -> Any:
    queue = store.queue("bench")
    each(cut(bodies, 500), queue.put_many)()
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


def in_flight(client: Any, bodies: list[bytes], call: Callable[[Any, bytes], object]) -> Work:
    """Return a timed part that makes the calls with each body, 64 of them in one pipeline."""

    def run(part: Sequence[bytes]) -> None:
        pipeline = client.pipeline(transaction=False)
        for body in part:
            call(pipeline, body)
        pipeline.execute()

    return each(cut(bodies, _FLIGHT), run)


def lpush_in_flight(client: Any, bodies: list[bytes]) -> Callable[[], object]:
    return in_flight(client, bodies, lambda pipeline, body: pipeline.lpush("bench", body))


def lpush_many(client: Any, bodies: list[bytes]) -> Callable[[], object]:
    return each(cut(bodies, _BATCH), lambda part: client.lpush("bench", *part))


def brpoplpush(client: Any, bodies: list[bytes]) -> Callable[[], object]:
    lpush_many(client, bodies)()
    return each(bodies, lambda _: client.lrem("taken", 1, client.brpoplpush("bench", "taken")))


def xreadgroup(client: Any, bodies: list[bytes], *, acks: bool = True, count: int = _BATCH) -> Callable[[], object]:
    client.xgroup_create("bench", "group", id="0", mkstream=True)
    in_flight(client, bodies, lambda pipeline, body: pipeline.xadd("bench", {"body": body}))()

    def run() -> None:
        while found := client.xreadgroup("group", "consumer", {"bench": ">"}, count=count):
            [[_, items]] = found
            assert {len(fields[b"body"]) for _, fields in items} == {len(bodies[0])}
            if acks:
                client.xack("bench", "group", *[number for number, _ in items])

    return run


XREAD_1 = peer("XREADGROUP", partial(xreadgroup, acks=False, count=1))
XREAD_32 = peer("XREADGROUP of 32", partial(xreadgroup, acks=False))


def one_client(make: Make, beside: Mapping[Side, float | None]) -> Row:
    return side(f"mqstore {make.__name__}, served", of_server, server=served, make=make), _LOAD, beside


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


def put_all(open_queue: OpenShared, directory: Path, parts: list[Any], ready: Any, begin: Any) -> None:
    """Put the items, in a process of its own."""
    with open_queue(directory) as (put_some, _):
        ready.set()
        begin.wait()
        each(parts, put_some)()


@contextmanager
def relay(
    directory: Path, load: Load, *, open_queue: OpenShared, size: int = 1, share: float = 1, serve: bool = False
) -> Iterator[Work]:
    context = multiprocessing.get_context("spawn")
    bodies = load.bodies(share)
    ready, begin = context.Event(), context.Event()
    with served(directory) if serve else nullcontext(), open_queue(directory) as (_, take):
        child = context.Process(target=put_all, args=(open_queue, directory, cut(bodies, size), ready, begin))
        child.start()
        ready.wait()

        def work() -> int:
            begin.set()
            left = len(bodies)
            while left > 0:
                left -= take()
            return len(bodies)

        yield work
        child.join()


def relay_of(name: str, open_queue: peers.Open, share: float) -> Side:
    shared = partial(one_by_one, open_queue=open_queue)
    relayed = side(f"{name}, two processes", relay, open_queue=shared, share=share)
    return replace(relayed, missing=needs_modules(name.split()[0]))


def two_processes(size: int, **goals: float | None) -> Row:
    ours = side("mqstore Queue", relay, open_queue=partial(connected, size=size), size=size, serve=True)
    return ours, _LOAD, {_RELAYS[name]: goal for name, goal in goals.items()}


_RELAYS = {
    "litequeue": relay_of("litequeue", peers.litequeue, 0.3),
    "persistqueue": relay_of("persistqueue SQLiteAckQueue", peers.persist_queue, 0.05),
    "huey": relay_of("huey SqliteStorage", huey, 0.3),
}
test_served = asked(
    {
        # One client process, messages of 1 KiB.
        "served[put]": one_client(put, {peer("LPUSH", lpush): 0.9}),
        "served[put_64_in_flight]": one_client(put_in_flight, {peer("LPUSH, 64 in flight", lpush_in_flight): 0.8}),
        "served[put_32]": one_client(put_many, {peer("LPUSH of 32", lpush_many): 1.2}),
        "served[get_and_ack]": one_client(get, {peer("BRPOPLPUSH and LREM", brpoplpush): 0.8}),
        "served[get_and_ack_32]": one_client(get_many, {peer("XREADGROUP of 32 and XACK", xreadgroup): 1.2}),
        "served[pull_32]": one_client(read, {XREAD_1: 4, XREAD_32: None}),
        # One process puts while the other takes and acknowledges, one item or 32 at a time.
        "items_through_two_processes[1]": two_processes(1, litequeue=1, persistqueue=None, huey=None),
        "items_through_two_processes[32]": two_processes(_BATCH, litequeue=8, persistqueue=5, huey=5),
    }
)
