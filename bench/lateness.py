"""How late does what is due come, while nothing else happens? `python -m bench.lateness [--messages N] [--only WORD]`

A store at rest, one message at a time: put with a delay, or popped and left alone, or failed, so that it is due a
second later or less; a consumer waits for it. The figure is from the moment it is due to the return of the call that
waits, or to the first line of the handler. Never early is asserted. The goal holds for 99 of 100 messages.
"""

from __future__ import annotations

import argparse
import logging
import queue as stdlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import mqstore
from bench.goals import report
from mqstore import Retry, RetryPolicy, Store

TOPIC = "bench"
GOAL_MS = 20
WAIT_S = 0.2
LONG_S = 1.35  # not a whole second, and not within the running one

Way = Callable[[Store, int], list[float]]


def _late(due_ms: float) -> float:
    late_ms = time.time() * 1000 - due_ms
    assert late_ms >= -1, f"{-late_ms} ms early"  # the store's clock has whole milliseconds
    return late_ms


def _now_ms() -> float:
    return time.time() * 1000


def _received(store: Store, due_ms: float, *, order: bool = False) -> float:
    """Wait for the message that is due; how late it comes, in ms."""
    [delivery] = store.broker.pop("readers", TOPIC, 1, poll=10, order=order)
    late_ms = _late(due_ms)
    store.broker.ack("readers", TOPIC, [delivery.receipt])
    return late_ms


def level(store: Store, count: int) -> list[float]:
    def once() -> float:
        return _received(store, store.put(TOPIC, b"x", delay_level=1).store_timestamp_ms + 1000)

    return [once() for _ in range(count)]


def timer(store: Store, count: int, wait_s: float = WAIT_S) -> list[float]:
    def once() -> float:
        due_ms = _now_ms() + wait_s * 1000
        store.put(TOPIC, b"x", delay=wait_s)
        return _received(store, due_ms)

    return [once() for _ in range(count)]


def expired(store: Store, count: int, *, order: bool = False) -> list[float]:
    def once() -> float:
        store.put(TOPIC, b"x")
        [delivery] = store.broker.pop("readers", TOPIC, 1, invisible=WAIT_S, order=order, poll=10)
        return _received(store, delivery.visible_at_ms, order=order)

    return [once() for _ in range(count)]


def released(store: Store, count: int, *, order: bool = False) -> list[float]:
    def once() -> float:
        store.put(TOPIC, b"x")
        [delivery] = store.broker.pop("readers", TOPIC, 1, order=order, poll=10)
        due_ms = _now_ms() + WAIT_S * 1000
        store.broker.change_invisible("readers", TOPIC, delivery.receipt, WAIT_S)
        return _received(store, due_ms, order=order)

    return [once() for _ in range(count)]


def queue_delay(store: Store, count: int) -> list[float]:
    jobs = store.queue("jobs")

    def once() -> float:
        due_ms = _now_ms() + WAIT_S * 1000
        jobs.put(b"x", delay=WAIT_S)
        task = jobs.get(timeout=10)
        late_ms = _late(due_ms)
        task.ack()
        return late_ms

    return [once() for _ in range(count)]


def queue_nack(store: Store, count: int, *, retry: RetryPolicy | None = None) -> list[float]:
    jobs = store.queue("jobs", retry=retry)

    def once() -> float:
        jobs.put(b"x")
        task = jobs.get(timeout=10)
        due_ms = _now_ms() + WAIT_S * 1000
        task.nack(delay=None if retry else WAIT_S)
        task = jobs.get(timeout=10)
        late_ms = _late(due_ms)
        task.ack()
        return late_ms

    return [once() for _ in range(count)]


def handler(store: Store, count: int, *, policy: bool = False, **options: Any) -> list[float]:
    """A handler fails once for each message."""
    late: stdlib.Queue[float] = stdlib.Queue()
    due: dict[bytes, float] = {}

    def handle(message: mqstore.Message) -> None:
        body = message.body
        if body in due:
            late.put(_late(due.pop(body)))
            return
        due[body] = _now_ms() + WAIT_S * 1000
        raise RuntimeError if policy else Retry(delay=WAIT_S)

    retry = RetryPolicy(16, [WAIT_S]) if policy else None
    consumer = store.push_consumer("handlers", retry=retry, **options)
    consumer.subscribe(TOPIC, handle)
    found = []
    with consumer:
        for number in range(count):
            store.put(TOPIC, b"%d" % number, queue_id=0)
            found.append(late.get(timeout=10))
    return found


def sleep(_: Store, count: int) -> list[float]:
    """Milliseconds by which `time.sleep` alone is late."""

    def once() -> float:
        due_ms = _now_ms() + WAIT_S * 1000
        time.sleep(WAIT_S)
        return _late(due_ms)

    return [once() for _ in range(count)]


WAYS: dict[str, Way] = {
    f"delay=0, but time.sleep({WAIT_S})": sleep,
    "delay level, 1 s": level,
    f"put(delay={WAIT_S})": timer,
    f"put(delay={LONG_S})": partial(timer, wait_s=LONG_S),
    f"put(delay={WAIT_S}), profile rocketmq": timer,
    f"Queue.put(delay={WAIT_S})": queue_delay,
    f"Queue: nack(delay={WAIT_S})": queue_nack,
    f"Queue: nack, by a policy of {WAIT_S} s": partial(queue_nack, retry=RetryPolicy(16, [WAIT_S])),
    "popped, not acknowledged": expired,
    "the same, in order": partial(expired, order=True),
    f"popped, change_invisible({WAIT_S})": released,
    "the same change, in order": partial(released, order=True),
    f"handler: Retry({WAIT_S}), mode queue": handler,
    f"handler: fails, policy {WAIT_S} s, mode queue": partial(handler, policy=True),
    f"handler: Retry({WAIT_S}), mode pop": partial(handler, mode="pop"),
    f"handler: Retry({WAIT_S}), ordered": partial(handler, ordered=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lateness", description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--only", default="", help="the rows whose name has this word")
    options = parser.parse_args()
    logging.disable()  # of handlers that fail on purpose
    for name, way in WAYS.items():
        if options.only not in name:
            continue
        profile: Literal["mqstore", "rocketmq"] = "rocketmq" if "rocketmq" in name else "mqstore"
        with tempfile.TemporaryDirectory() as folder, mqstore.open(folder, profile=profile) as store:
            store.create_topic(TOPIC, queues=1)
            late = sorted(way(store, options.messages))
        most = late[(len(late) * 99 - 1) // 100]
        report("", f"{name}: median {statistics.median(late):.1f}, most {late[-1]:.1f}, 99 of 100, ms", most, GOAL_MS,
               most=True)  # fmt: skip


if __name__ == "__main__":
    main()
