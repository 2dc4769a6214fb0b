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
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import mqstore
from bench.goals import number_text
from bench.harness import RECORDED, Ask, scratch
from bench.rates import TOPIC, Arrive, Case, Put, Receiver

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
            try:
                bodies = receive()
            except mqstore.QueueEmpty:
                continue
            for body in bodies:
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


def _ask(ask: Ask, case: Case, receiver: Receiver, judged: float, goal: float | None = None) -> None:
    rounds = [case.run(receiver, ask.share) for _ in range(min(ask.rounds, MOST_ROUNDS))]
    latencies, late_ms, kept = zip(*rounds, strict=True)
    note = f"put {number_text(statistics.median(late_ms))} late"
    note += f"; {statistics.median(kept):.0%} of the rate" * (statistics.median(kept) < 0.95)
    ask.latencies(latencies, judged, goal, note)


@pytest.mark.parametrize(
    "receiver",
    [
        pytest.param(push, id="push"),
        pytest.param(partial(push, ordered=True), id="ordered"),
        pytest.param(queue_get, id="queue"),
        pytest.param(pull, id="pull"),
    ],
)
def test_rest(ask: Ask, receiver: Receiver) -> None:
    """Median latency of 200 messages a second, so that all threads sleep when one comes."""
    _ask(ask, Case(rate=200, queues=1), receiver, 50, 1)


@pytest.mark.parametrize("rate", [1000, 10_000, 50_000])
def test_load(ask: Ask, rate: int) -> None:
    """99th percentile of the latency of a push consumer at three rates."""
    _ask(ask, Case(rate=rate), push, 99)


def test_many_queues(ask: Ask) -> None:
    """Messages a second with 10,000 queues, compared with 100."""
    few, many = (Case(rate=10_000, queues=ask.scaled(queues)) for queues in (100, 10_000))
    rounds = [(many.run(push, ask.share), few.run(push, ask.share)) for _ in range(min(ask.rounds, MOST_ROUNDS))]
    ask.latencies([latencies for (latencies, *_), _ in rounds], 50, None)
    kept = [ours[2] / theirs[2] for ours, theirs in rounds]
    ask.answer("100 queues", "x rate", kept, 0.9)


Way = Callable[[mqstore.Store], float]
"""Has one message delivered after `WAIT_S`. Returns how late it came, in ms."""


def _late_ms(due_s: float) -> float:
    late_ms = (time.time() - due_s) * 1000
    assert late_ms >= -1, f"{-late_ms} ms early"  # the store's clock has whole milliseconds
    return late_ms


def put_delay(store: mqstore.Store) -> float:
    jobs = store.queue("jobs")
    due_s = time.time() + WAIT_S
    jobs.put(b"x", delay=WAIT_S)
    with jobs.get(timeout=10):
        return _late_ms(due_s)


def nack(store: mqstore.Store) -> float:
    jobs = store.queue("jobs")
    jobs.put(b"x")
    task = jobs.get(timeout=10)
    due_s = time.time() + WAIT_S
    task.nack(delay=WAIT_S)
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


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(put_delay, id="delay"),
        pytest.param(nack, id="nack"),
        pytest.param(visibility, id="visibility"),
        pytest.param(handler, id="retry"),
        pytest.param(partial(handler, mode="pop"), id="retry_pop"),
    ],
)
def test_late(ask: Ask, way: Way) -> None:
    """How late a message comes to a store at rest: after a delay, a nack, an expired visibility, a failed handler."""
    with scratch() as directory, mqstore.open(directory / "store") as store:
        store.create_topic(TOPIC, queues=1)
        ask.latencies([[way(store) for _ in range(ask.scaled(20))]], 99, 20)
