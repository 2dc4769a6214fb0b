"""How much longer everyday work takes than the plain case, both in one run.

    python -m bench.everyday [--messages N] [--quick]

CPU time of the whole process, so that a busy machine does not count; wall time where several threads hand over to each
other (asyncio, push consumers). Sides in turn, the best of seven rounds. Durability "append".
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mqstore
from bench.goals import Side, measure, report
from mqstore.engine import MessageStore

BODY = b"x" * 128


def ratio(side: Side, plain: Side, rounds: int, clock: Callable[[], float] = time.process_time) -> float:
    """Time of `side` by that of `plain`."""
    best = measure({"side": side, "plain": plain}, rounds, 1, clock=clock)
    return best["side"] / best["plain"]


def get_and_ack(queue: mqstore.Queue, count: int) -> None:
    for _ in range(count):
        queue.ack(queue.get())


@contextmanager
def opened() -> Iterator[mqstore.Store]:
    with tempfile.TemporaryDirectory() as folder, mqstore.open(Path(folder) / "s") as store:
        yield store


def puts(count: int, rounds: int) -> None:
    with opened() as store:

        def putting(**options: Any) -> Side:
            return lambda: [store.put("t", BODY, **options) for _ in range(count)]

        for what, options, goal in (
            ("put with tag and keys", {"tag": "paid", "keys": ["o-7", "c-9"]}, 1.5),
            ("put with a message group", {"message_group": "c-9"}, 1.7),
            ("put with group and properties", {"message_group": "c-9", "properties": {"shop": "3", "kind": "x"}}, 1.7),
            ("put with a delay", {"delay": 3600}, 3),
        ):
            report("", f"{what} / put", ratio(putting(**options), putting(), rounds), goal, most=True)
        messages = [mqstore.OutgoingMessage(BODY, tag="paid", keys=f"o-{i}") for i in range(count)]
        bodies = [BODY] * count
        found = ratio(lambda: store.put_many("t", messages), lambda: store.put_many("t", bodies), rounds)
        report("", "put_many of messages with tag and key / of bodies", found, 3, most=True)


def reads(count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, MessageStore(folder) as store:
        for i in range(count):
            store.put("t", BODY, tag="paid", keys=f"o-{i}")

        def reading(look: Callable[[mqstore.Message], object]) -> Side:
            return lambda: [look(m) for at in range(0, count, 32) for m in store.read("t", 0, at, 32)]

        found = ratio(reading(lambda m: (m.body, m.tag, m.keys)), reading(lambda m: m.body), rounds)
        report("", "read of body, tag and keys / of the body", found, 2.5, most=True)


def queues(count: int, rounds: int) -> None:
    with opened() as store:
        plain, ordered, delayed = store.queue("plain"), store.queue("ordered", ordered=True), store.queue("delayed")

        def through(queue: mqstore.Queue) -> float:
            queue.put_many([BODY] * count)
            begin = time.process_time()
            get_and_ack(queue, count)
            return time.process_time() - begin

        for _ in range(20_000):
            delayed.put(BODY, delay=3600)
        best = {queue.name: float("inf") for queue in (plain, ordered, delayed)}
        for _ in range(rounds):
            for queue in (plain, ordered, delayed):
                best[queue.name] = min(best[queue.name], through(queue))
        report("", "ordered queue, get and ack / unordered", best["ordered"] / best["plain"], 2.5, most=True)
        report("", "get and ack beside 20,000 that wait / without", best["delayed"] / best["plain"], 1.1, most=True)


def in_asyncio(count: int, rounds: int) -> None:
    async def through() -> float:
        with tempfile.TemporaryDirectory() as folder:
            async with mqstore.aio.open(folder) as store:
                queue = await store.queue("q")
                await queue.put_many([BODY] * count)
                begin = time.perf_counter()
                for _ in range(count):
                    item = await queue.get()
                    await queue.ack(item)
                return time.perf_counter() - begin

    def plain() -> float:
        with opened() as store:
            queue = store.queue("q")
            queue.put_many([BODY] * count)
            begin = time.perf_counter()
            get_and_ack(queue, count)
            return time.perf_counter() - begin

    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        best = [min(best[0], asyncio.run(through())), min(best[1], plain())]
    report("", "asyncio, get and ack / without asyncio", best[0] / best[1], 2, most=True)


def pushed(count: int, rounds: int) -> None:
    def through(tags: str = "*", **options: Any) -> Side:
        def run() -> None:
            with opened() as store:
                messages = [mqstore.OutgoingMessage(BODY, tag="paid")] * count
                store.create_topic("t", queues=4)
                for queue_id in range(4):
                    store.put_many("t", messages[: count // 4], queue_id=queue_id)
                done, lock, left = threading.Event(), threading.Lock(), [count // 4 * 4]

                def handle(message: mqstore.Message) -> None:
                    with lock:
                        left[0] -= 1
                        if not left[0]:
                            done.set()

                consumer = store.push_consumer("g", start="earliest", **options)
                consumer.subscribe("t", handle, tags=tags)
                with consumer:
                    assert done.wait(120)

        return run

    for what, options, goal in (
        ("by pop", {"mode": "pop"}, 1.5),
        ("in order", {"ordered": True}, 2),
        ("with a tag filter", {"tags": "paid"}, 1.1),
    ):
        found = ratio(through(**options), through(), rounds, time.perf_counter)
        report("", f"push consumer {what} / push consumer", found, goal, most=True)


def first_read(count: int, rounds: int) -> None:
    def reading(*, dispatched: bool) -> float:
        with tempfile.TemporaryDirectory() as folder, MessageStore(folder) as store:
            store.put_many("t", [BODY] * count)
            if dispatched:
                store.dispatch()
            begin = time.perf_counter()
            assert len(store.read("t", 0, count - 32, 32)) == 32
            return time.perf_counter() - begin

    times = [(reading(dispatched=False), reading(dispatched=True)) for _ in range(rounds)]
    behind, there = map(min, zip(*times, strict=True))
    report("", f"first read behind a put_many of {count:,} / once dispatched", behind / there, 1.3, most=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.everyday", description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages, three rounds")
    options = parser.parse_args()
    count, rounds = (options.messages // 10, 3) if options.quick else (options.messages, 7)
    for question in (puts, reads, queues, in_asyncio, pushed):
        question(count, rounds)
    first_read(300_000, rounds)


if __name__ == "__main__":
    main()
