"""Latency from put to handler, while messages come at a given rate.

The loop is open: each message has a time at which it is due to be put, whatever happened to the messages before it.
Its latency counts from that time. So a stall shows in all messages that it held up, and not in one of them. The
system wakes the putting threads some tens of microseconds late; each row says how late they were.

The percentiles of a round are exact and count all of its messages. A row has the median of each over the rounds, and
the greatest latency of all rounds. Producers, store and consumer share one process, as in an application.
"""

from __future__ import annotations

import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import mqstore
from bench.harness import Settings, scratch
from bench.results import Row, number_text

__all__ = ["CASES", "Case"]

SECONDS = 5
MOST_ROUNDS = 3
PERCENTILES = (50, 90, 99, 99.9, 100)
_TOPIC = "bench"
_PATIENCE_S = 120
_KEPT = 0.95
"""Share of the rate that has to be handled for a rate to be kept."""

Arrive = Callable[[bytes], None]
"""To be called with the body of a message as soon as it is there."""


def percentile_name(percentile: float) -> str:
    """Name of a percentile among the figures of a row."""
    return "max" if percentile == 100 else f"{percentile:g}"


Put = Callable[..., object]
"""Put a body, with options."""
Receiver = Callable[[mqstore.Store, Arrive], AbstractContextManager[Put]]

_HEAD = struct.Struct("<qq")
"""Begin of each body: the time at which it is due to be put, in ns of `perf_counter_ns`, and its number."""


@contextmanager
def push(store: mqstore.Store, arrive: Arrive, *, ordered: bool = False) -> Iterator[Put]:
    consumer = store.push_consumer("bench", ordered=ordered, start="latest")
    consumer.subscribe(_TOPIC, lambda message: arrive(message.body))
    with consumer:
        yield partial(store.put, _TOPIC)


@contextmanager
def _looping(put: Put, wait: Callable[[], bytes | None], arrive: Arrive) -> Iterator[Put]:
    """A thread that waits again and again."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            body = wait()
            if body is not None:
                arrive(body)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield put
    finally:
        stop.set()
        thread.join(10)


@contextmanager
def queue_get(store: mqstore.Store, arrive: Arrive) -> Iterator[Put]:
    jobs = store.queue("jobs")

    def wait() -> bytes | None:
        try:
            task = jobs.get(timeout=0.5)
        except mqstore.QueueEmpty:
            return None
        task.ack()
        return bytes(task.value)

    with _looping(jobs.put, wait, arrive) as put:
        yield put


@contextmanager
def broker_wait(store: mqstore.Store, arrive: Arrive) -> Iterator[Put]:
    offset = store.broker.max_offset(_TOPIC, 0)

    def wait() -> bytes | None:
        nonlocal offset
        if not store.broker.wait(_TOPIC, 0, offset, 0.5):
            return None
        [message] = store.read(_TOPIC, 0, offset, 1)
        offset += 1
        return message.body

    with _looping(partial(store.put, _TOPIC, queue_id=0), wait, arrive) as put:
        yield put


@contextmanager
def bare_event(store: mqstore.Store, arrive: Arrive) -> Iterator[Put]:
    """No store at all: what the machine takes to wake a thread."""
    bell, bodies = threading.Event(), deque[bytes]()

    def wait() -> bytes | None:
        while not bodies:
            if not bell.wait(0.5):
                return None
            bell.clear()
        return bodies.popleft()

    def put(body: bytes) -> None:
        bodies.append(body)
        bell.set()

    with _looping(put, wait, arrive) as made:
        yield made


class Kind(NamedTuple):
    """One kind of messages."""

    options: mqstore.SendOptions
    series: str = ""
    """Row that their latency counts in. Empty for messages that are handled at once."""
    delay_s: float = 0
    fails: bool = False
    """The handler asks for one retry after `RETRY_S`. The second delivery counts in the row `retried`."""


PLAIN = Kind({})
A_DAYS_MIX = (
    *[PLAIN] * 40,
    *[Kind({"tag": "paid"})] * 3,
    *[Kind({"tag": "paid", "keys": ["o-7", "c-9"]})] * 3,
    *[Kind({"message_group": "c-9"})] * 2,
    Kind({"delay": 0.5}, "delayed", delay_s=0.5),
    Kind({}, fails=True),
)
"""Fifty messages: 80 % plain, 12 % with tag or keys, 4 % of a group, 2 % delayed, 2 % whose handler fails once."""
RETRY_S = 0.2


def kind_of(kinds: Sequence[Kind], number: int) -> Kind:
    """Messages take turns through the kinds."""
    return kinds[number % len(kinds)]


class Arrivals:
    """Arrivals of messages, as handlers see them."""

    def __init__(self, kinds: Sequence[Kind], messages: int) -> None:
        self.kinds = kinds
        self.last_ns = 0
        """Time of the last arrival that was neither delayed nor retried."""
        self.done = threading.Event()
        self._expected = messages + sum(kind_of(kinds, number).fails for number in range(messages))
        self._found: list[tuple[str, float]] = []
        self._due_again_ns: dict[int, int] = {}

    @property
    def left(self) -> int:
        return self._expected - len(self._found)

    def arrive(self, body: bytes) -> None:
        """Take one message. Raises Retry, as a handler does, for one that is to fail and has not."""
        now_ns = time.perf_counter_ns()
        due_ns, number = _HEAD.unpack_from(body)
        kind = kind_of(self.kinds, number)
        again_ns = self._due_again_ns.get(number)
        series = kind.series if again_ns is None else "retried"
        due_ns = due_ns + int(kind.delay_s * 1e9) if again_ns is None else again_ns
        self._found.append((series, (now_ns - due_ns) / 1e6))
        if not series:
            self.last_ns = max(self.last_ns, now_ns)
        if not self.left:
            self.done.set()
        if kind.fails and again_ns is None:
            self._due_again_ns[number] = time.perf_counter_ns() + int(RETRY_S * 1e9)
            raise mqstore.Retry(RETRY_S)

    def latencies_ms(self) -> dict[str, list[float]]:
        """Latencies by series."""
        series = sorted({name for name, _ in self._found})
        return {name: [latency for each, latency in self._found if each == name] for name in series}


class Round(NamedTuple):
    """Findings of one round of a case."""

    latencies_ms: dict[str, list[float]]
    """By series."""
    late_ms: list[float]
    """How late each put began."""
    kept: float
    """Share of the rate at which messages were handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Messages at one rate, and the receiver that waits for them."""

    name: str
    title: str
    rate: int
    """Messages a second, of all threads together."""
    threads: int = 1
    queues: int = 4
    body_bytes: int = 128
    receiver: Receiver = push
    kinds: Sequence[Kind] = (PLAIN,)
    judged: float = 99
    """The percentile that is the value of the answer."""
    goal_ms: float | None = None
    group: str = "latency"

    def ask(self, settings: Settings) -> list[Row]:
        """Run some rounds, each in a new store. One row for each series."""
        messages = max(self.threads, len(self.kinds), int(self.rate * SECONDS * settings.share))
        queues = max(1, int(self.queues * min(1, settings.share)))
        rounds = []
        for _ in range(min(settings.rounds, MOST_ROUNDS)):
            with scratch(self.name, settings.directory) as directory:
                rounds.append(self._round(directory, messages, queues))
        return [self._row(series, rounds) for series in rounds[0].latencies_ms]

    def _round(self, directory: Path, messages: int, queues: int) -> Round:
        arrivals = Arrivals(self.kinds, messages)
        with mqstore.open(directory / "store") as store:
            store.create_topic(_TOPIC, queues=queues)
            for queue_id in range(queues):  # so that no file has to be made while the clock runs
                store.put(_TOPIC, b"", queue_id=queue_id)
            with self.receiver(store, arrivals.arrive) as put:
                time.sleep(0.2)  # the receiver waits by then
                begin_ns, late_ms = self._produce(put, messages)
                if not arrivals.done.wait(_PATIENCE_S):
                    raise RuntimeError(f"{arrivals.left} of {messages} messages did not arrive within {_PATIENCE_S} s")
        kept = messages * 1e9 / self.rate / (arrivals.last_ns - begin_ns)
        return Round(arrivals.latencies_ms(), late_ms, kept)

    def _produce(self, put: Put, messages: int) -> tuple[int, list[float]]:
        """Put each message when it is due. Returns when the first was, in ns, and how late each was, in ms."""
        interval_ns = 1_000_000_000 / self.rate
        padding = bytes(self.body_bytes - _HEAD.size)
        late_ms: list[float] = []
        errors: list[BaseException] = []
        begin_ns = time.perf_counter_ns() + 20_000_000

        def produce(first: int) -> None:
            try:
                for number in range(first, messages, self.threads):
                    due_ns = begin_ns + int(number * interval_ns)
                    while (left_ns := due_ns - time.perf_counter_ns()) > 0:
                        time.sleep(left_ns / 1e9)
                    late_ms.append(-left_ns / 1e6)
                    put(_HEAD.pack(due_ns, number) + padding, **kind_of(self.kinds, number).options)
            except BaseException as error:  # handed to the caller
                errors.append(error)

        crew = [threading.Thread(target=produce, args=(first,)) for first in range(self.threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        if errors:
            raise errors[0]
        return begin_ns, late_ms

    def _row(self, series: str, rounds: Sequence[Round]) -> Row:
        by_round = [np.percentile(each.latencies_ms[series], PERCENTILES, method="inverted_cdf") for each in rounds]
        found = dict(zip(PERCENTILES, np.median(by_round, axis=0).tolist(), strict=True))
        found[100] = float(np.max(by_round))
        judged = [float(each[PERCENTILES.index(self.judged)]) for each in by_round]
        late = statistics.median(late for each in rounds for late in each.late_ms)
        kept = statistics.median(each.kept for each in rounds)
        said = ", ".join(f"{percentile_name(name)} {number_text(value)}" for name, value in found.items())
        return Row(
            group=self.group,
            question=self.name,
            beside=series,
            body_bytes=self.body_bytes,
            unit="ms",
            value=found[self.judged],
            low=min(judged),
            high=max(judged),
            goal=None if series else self.goal_ms,
            said=f"{said}; put {number_text(late)} late" + f"; {kept:.0%} of the rate" * (kept < _KEPT),
            figures={**{percentile_name(name): value for name, value in found.items()}, "late": late, "kept": kept},
        )


CASES = (
    *(
        Case(
            name=name,
            title=f"ms from a put at rest: {title}",
            rate=200,
            queues=1,
            receiver=receiver,
            judged=50,
            goal_ms=goal,
        )
        for name, title, receiver, goal in (
            ("rest_push", "a push consumer", push, 1),
            ("rest_ordered", "a push consumer in order", partial(push, ordered=True), 1),
            ("rest_queue", "Queue.get", queue_get, 1),
            ("rest_wait", "Broker.wait and read", broker_wait, 1),
            ("rest_event", "a bare event without a store", bare_event, None),
        )
    ),
    *(
        Case(name=f"rate_{rate // 1000}k", title=f"ms from put to handler at {rate:,} messages a second", rate=rate)
        for rate in (1_000, 10_000, 50_000)
    ),
    *(
        Case(name=f"threads_{threads}", title=f"the same at 10,000, {threads} threads", rate=10_000, threads=threads)
        for threads in (4, 16)
    ),
    *(
        Case(
            name=f"queues_{queues}",
            title=f"the same at 10,000, number of queues: {queues:,}",
            rate=10_000,
            queues=queues,
        )
        for queues in (1, 100, 10_000)
    ),
    *(
        Case(name=f"body_{name}", title=f"the same at 100, bodies of {name}", rate=100, body_bytes=size)
        for name, size in (("16B", 16), ("1KiB", 1 << 10), ("64KiB", 64 << 10), ("1MiB", 1 << 20))
    ),
    Case(name="mix", title="the same at 1,000, a day's mix of messages", rate=1_000, kinds=A_DAYS_MIX),
)
