"""Program that `test_interrupts` sends SIGINT to: it works on a store until its input ends, and says what is done.

    python -m tests.campaigns.interrupted FOLDER threads|asyncio SEED

Each line of its output is a message whose put has returned (`put QUEUE OFFSET BODY`), or at the end `closed N`: the
store answered a probe and was closed, after N calls that a signal had interrupted.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import mqstore
import mqstore.aio
from mqstore import SendReceipt
from tests.campaigns import calls

SLOW = {"snapshot", "verify", "push consumer", "push consumer, pop", "push consumer, ordered"}
DEADLINE_S = 170


def say(receipt: SendReceipt, body: bytes) -> None:
    line = f"put {receipt.queue.topic} {receipt.queue.queue_id} {receipt.offset} {body.decode()}\n"
    os.write(1, line.encode())


class Signals:
    """SIGINT as KeyboardInterrupt while a call is at work, and only then: the program itself is not under test."""

    def __init__(self) -> None:
        self.armed = False
        self.count = 0
        self.ended = False
        signal.signal(signal.SIGINT, self._come)
        threading.Thread(target=self._listen, daemon=True).start()

    def _come(self, number: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            self.count += 1
            raise KeyboardInterrupt

    def _listen(self) -> None:
        sys.stdin.buffer.read()
        self.ended = True

    def run(self, call: Callable[[], object]) -> None:
        try:
            self.armed = True
            call()
            self.armed = False
        except KeyboardInterrupt:
            pass


def in_threads(path: Path, seed: int) -> int:
    """Every kind of call in the main thread, beside two threads that put, get and acknowledge."""
    rng = random.Random(seed)
    store = calls.open_store(path)
    store.create_topic("t", queues=4)  # an interrupted put may not have created it before the first read
    works = {name: calls.Work(store, make(store)) for name, (make, _) in calls.CALLS.items()}
    for name, work in works.items():  # imports modules: of a class, Python makes an interrupt there a RuntimeError
        calls.CALLS[name][1](work)
    signals = Signals()
    failures: list[BaseException] = []

    def beside(number: int) -> None:
        queue = store.queue("beside", visibility=1)
        try:
            while not signals.ended:
                body = b"%d" % rng.getrandbits(40)
                say(store.put("beside-log", body, queue_id=number), body)
                queue.put(body)
                for task in queue.get_many(4):
                    task.ack()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=beside, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    names = [name for name in calls.CALLS if name not in SLOW] * 8 + sorted(SLOW)
    while not signals.ended:
        name = rng.choice(names)
        work = works[name]
        signals.run(lambda: calls.CALLS[name][1](work))  # noqa: B023
        for receipt, body in work.put:
            say(receipt, body)
        work.put.clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    calls.probe(store)
    store.close(10)
    return signals.count


async def in_a_loop(path: Path, seed: int) -> int:
    """Calls under asyncio, each cancelled by the signals that come meanwhile."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    running: list[asyncio.Task[None]] = []
    count = 0

    def cancel() -> None:
        nonlocal count
        for task in running:
            count += 1
            task.cancel()

    def listen() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(ended.set)

    loop.add_signal_handler(signal.SIGINT, cancel)
    threading.Thread(target=listen, daemon=True).start()
    async with mqstore.aio.open(path) as store:
        queue = await store.queue("q", visibility=1)

        async def put() -> None:
            body = b"%d" % rng.getrandbits(40)
            say(await store.put("t", body), body)

        async def put_durable() -> None:
            body = b"%d" % rng.getrandbits(40)
            say(await store.put("t", body, durability="flush"), body)

        async def get() -> None:
            await queue.put(b"x")
            task = await queue.get(timeout=5)
            await task.ack()

        async def nack() -> None:
            await queue.put(b"x")
            task = await queue.get(timeout=5)
            await task.nack(delay=0)

        async def read() -> None:
            async for _ in store.iter("t"):
                break

        while not ended.is_set():
            running[:] = [loop.create_task(call()) for call in rng.choices((put, put_durable, get, nack, read), k=3)]
            done = await asyncio.gather(*running, return_exceptions=True)
            running.clear()
            for error in done:
                if error is not None and not isinstance(error, asyncio.CancelledError | mqstore.QueueEmpty):
                    raise error
        await put()
        await get()
    return count


def main() -> None:
    path, mode, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    count = in_threads(path, seed) if mode == "threads" else asyncio.run(in_a_loop(path, seed))
    os.write(1, f"closed {count}\n".encode())
    # CPython would end by SIGINT if a signal has ever interrupted `exec`, as dataclasses of a lazy import use it.
    os._exit(0)


if __name__ == "__main__":
    main()
