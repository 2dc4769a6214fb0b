"""How long after a put does a waiting consumer have the message? `python -m bench.wakeup [--messages N]`

One message at a time, with pauses, so that everybody sleeps when it comes. The time runs from before the put to the
first line of the handler, or to the return of the call that waited; the rows differ in who waits. The last one is what
the machine takes to wake a thread at all: two threads that pass an event to and fro.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mqstore

PAUSE_S = 0.005

Put = Callable[[], object]
Told = Callable[[], object]
"""To be called as soon as the message is there."""


@contextmanager
def push(store: mqstore.Store, told: Told, *, ordered: bool = False) -> Iterator[Put]:
    consumer = store.push_consumer(f"push-{ordered}", ordered=ordered, start="latest")
    consumer.subscribe("bench", lambda message: told())
    with consumer:
        yield lambda: store.put("bench", b"x", queue_id=0)


@contextmanager
def _looping(put: Put, wait: Callable[[], object], end: Callable[[], object], told: Told) -> Iterator[Put]:
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            if wait():
                told()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    yield put
    stop.set()
    end()
    thread.join(10)


@contextmanager
def queue(store: mqstore.Store, told: Told) -> Iterator[Put]:
    jobs = store.queue("jobs")

    def wait() -> bool:
        try:
            task = jobs.get(timeout=1)
        except mqstore.QueueEmpty:
            return False
        task.ack()
        return True

    with _looping(lambda: jobs.put(b"x"), wait, lambda: None, told) as put:
        yield put


@contextmanager
def wait(store: mqstore.Store, told: Told) -> Iterator[Put]:
    next_offset = store.broker.max_offset("bench", 0)

    def waited() -> bool:
        nonlocal next_offset
        found = store.broker.wait("bench", 0, next_offset, 1)
        next_offset += found
        return found

    with _looping(lambda: store.put("bench", b"x", queue_id=0), waited, lambda: None, told) as put:
        yield put


@contextmanager
def event(store: mqstore.Store, told: Told) -> Iterator[Put]:
    bell = threading.Event()

    def waited() -> bool:
        found = bell.wait(1)
        bell.clear()
        return found

    with _looping(bell.set, waited, lambda: None, told) as put:
        yield put


WAITERS = {
    "push consumer": push,
    "push consumer, ordered": lambda store, told: push(store, told, ordered=True),
    "Queue.get": queue,
    "Broker.wait": wait,
    "a bare event": event,
}


def measure(name: str, messages: int) -> list[float]:
    """Seconds of each message, sorted."""
    took: list[float] = []
    arrived = threading.Event()
    came_at = 0.0

    def told() -> None:
        nonlocal came_at
        came_at = time.perf_counter()
        arrived.set()

    with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
        store.create_topic("bench", queues=1)
        store.put("bench", b"first", queue_id=0)
        with WAITERS[name](store, told) as put:
            time.sleep(0.2)
            for _ in range(messages):
                arrived.clear()
                begin = time.perf_counter()
                put()
                assert arrived.wait(10), "lost"
                took.append(came_at - begin)
                time.sleep(PAUSE_S)
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.wakeup", description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1000)
    options = parser.parse_args()
    print(f"{'who waits':<24} {'median':>9} {'90 %':>9} {'99 %':>9}   microseconds")
    for name in WAITERS:
        took = measure(name, options.messages)
        marks = [statistics.median(took), took[int(len(took) * 0.9)], took[int(len(took) * 0.99)]]
        print(f"{name:<24} " + " ".join(f"{mark * 1e6:>9.0f}" for mark in marks))


if __name__ == "__main__":
    main()
