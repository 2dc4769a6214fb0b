"""Questions about latency: from a put to a handler at a given rate, and how late delayed messages come.

Producers, store and consumer share one process, as in an application. The statistics of a benchmark are those of its
latencies.
"""

from __future__ import annotations

import queue as stdlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

import mqstore
from bench.goals import number_text
from bench.harness import RECORDED, Ask, scratch
from bench.rates import TOPIC, Arrive, Put, Receiver, run

MOST_ROUNDS = 3
WAIT_S = 0.2
pytestmark = pytest.mark.benchmark(timer=RECORDED)


@contextmanager
def push(store: mqstore.Store, arrive: Arrive, **options: Any) -> Iterator[Put]:
    consumer = store.push_consumer("bench", start="latest", **options)
    consumer.subscribe(TOPIC, lambda message: arrive(message.body))
    with consumer:
        yield partial(store.put, TOPIC)


@contextmanager
def _looping(receive: Callable[[], Sequence[bytes]], arrive: Arrive) -> Iterator[None]:
    """A thread that receives again and again."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with suppress(mqstore.QueueEmpty):
                for body in receive():
                    arrive(body)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


@contextmanager
def queue_get(store: mqstore.Store, arrive: Arrive) -> Iterator[Put]:
    jobs = store.queue("jobs")

    def receive() -> Sequence[bytes]:
        with jobs.get(timeout=0.5) as task:
            return [task.value]

    with _looping(receive, arrive):
        yield jobs.put


@contextmanager
def pull(store: mqstore.Store, arrive: Arrive) -> Iterator[Put]:
    with store.pull_consumer("bench", start="latest") as consumer:
        consumer.subscribe(TOPIC)
        with _looping(lambda: [message.body for message in consumer.poll(0.5)], arrive):
            yield partial(store.put, TOPIC)


QUESTIONS: dict[str, tuple[Receiver, int, int, float, float | None]] = {
    # Median latency of 200 messages a second, so that all threads sleep when one comes.
    "rest[push]": (push, 200, 1, 50, 1),
    "rest[ordered]": (partial(push, ordered=True), 200, 1, 50, 1),
    "rest[queue]": (queue_get, 200, 1, 50, 1),
    "rest[pull]": (pull, 200, 1, 50, 1),
    # 99th percentile of the latency of a push consumer at three rates.
    "load[1000]": (push, 1000, 4, 99, None),
    "load[10000]": (push, 10_000, 4, 99, None),
    "load[50000]": (push, 50_000, 4, 99, None),
}
"""Receiver, rate, queues, the percentile that is judged, and its goal in ms."""


@pytest.mark.parametrize("question", [*QUESTIONS], ids=[*QUESTIONS])
def test_latency(ask: Ask, question: str) -> None:
    receiver, rate, queues, judged, goal = QUESTIONS[question]
    rounds = [run(receiver, rate, ask.share, queues) for _ in range(min(ask.rounds, MOST_ROUNDS))]
    latencies, late_ms, kept = zip(*rounds, strict=True)
    note = f"put {number_text(statistics.median(late_ms))} late"
    note += f"; {statistics.median(kept):.0%} of the rate" * (statistics.median(kept) < 0.95)
    ask.latencies(latencies, judged, goal, note)


def test_many_queues(ask: Ask) -> None:
    """Messages a second with 10,000 queues, compared with 100."""
    many, few = (partial(run, push, 10_000, ask.share, ask.scaled(queues)) for queues in (10_000, 100))
    rounds = [(many(), few()) for _ in range(min(ask.rounds, MOST_ROUNDS))]
    ask.latencies([latencies for (latencies, *_), _ in rounds], 50, None)
    ask.answer("100 queues", "x rate", [ours[2] / theirs[2] for ours, theirs in rounds], 0.9)


Way = Callable[[mqstore.Store], float]
"""Has one message delivered after `WAIT_S`. Returns how late it came, in ms."""


def _late_ms(due_s: float) -> float:
    late_ms = (time.time() - due_s) * 1000
    assert late_ms >= -1, f"{-late_ms} ms early"  # the store's clock has whole milliseconds
    return late_ms


def put_delay(store: mqstore.Store, *, nacks: bool = False) -> float:
    jobs = store.queue("jobs")
    if nacks:
        jobs.put(b"x")
        task = jobs.get(timeout=10)
    due_s = time.time() + WAIT_S
    task.nack(delay=WAIT_S) if nacks else jobs.put(b"x", delay=WAIT_S)
    with jobs.get(timeout=10):
        return _late_ms(due_s)


def visibility(store: mqstore.Store) -> float:
    with store.simple_consumer("readers", {TOPIC: "*"}) as consumer:
        store.put(TOPIC, b"x")
        due_s = time.time() + WAIT_S
        assert consumer.receive(wait=10, visibility=WAIT_S)
        [delivery] = consumer.receive(wait=10)
        with delivery:
            return _late_ms(due_s)


def handler(store: mqstore.Store, **options: Any) -> float:
    due_s: list[float] = []
    late_ms: stdlib.Queue[float] = stdlib.Queue()

    def handle(message: mqstore.Message) -> None:
        if due_s:
            late_ms.put(_late_ms(due_s[0]))
            return
        due_s.append(time.time() + WAIT_S)
        raise mqstore.Retry(WAIT_S)

    consumer = store.push_consumer("handlers", **options)
    consumer.subscribe(TOPIC, handle)
    with consumer:
        store.put(TOPIC, b"x")
        return late_ms.get(timeout=10)


WAYS: dict[str, Way] = {
    "delay": put_delay,
    "nack": partial(put_delay, nacks=True),
    "visibility": visibility,
    "retry": handler,
    "retry_pop": partial(handler, mode="pop"),
}


@pytest.mark.parametrize("way", WAYS)
def test_late(ask: Ask, way: str) -> None:
    """How late a message comes to a store at rest: after a delay, a nack, an expired visibility, a failed handler."""
    with scratch() as directory, mqstore.open(directory / "store") as store:
        store.create_topic(TOPIC, queues=1)
        ask.latencies([[WAYS[way](store) for _ in range(ask.scaled(20))]], 99, 20)
