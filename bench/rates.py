"""Messages that are put at a given rate, and their latencies.

The loop is open: each message has a time at which it is due to be put, whatever happened to the messages before it.
Its latency counts from that time, so a stall shows in all messages that it held up.
"""

from __future__ import annotations

import statistics
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import mqstore
from bench.harness import scratch

SECONDS = 3
TOPIC = "bench"
_PATIENCE_S = 120
_PADDING = bytes(120)
_DUE_NS = struct.Struct("<q")
"""Begin of each body: the time at which it is due to be put, in ns of `perf_counter_ns`."""

Arrive = Callable[[bytes], None]
"""Called with the body of each message as soon as it is received."""
Put = Callable[[bytes], object]
Receiver = Callable[[mqstore.Store, Arrive], AbstractContextManager[Put]]


class Arrivals:
    """Latencies of messages, as handlers see them."""

    def __init__(self, messages: int) -> None:
        self.done = threading.Event()
        self.latencies_ms: list[float] = []
        self._messages = messages

    def arrive(self, body: bytes) -> None:
        now_ns = time.perf_counter_ns()
        self.latencies_ms.append((now_ns - _DUE_NS.unpack_from(body)[0]) / 1e6)  # atomic, as a counter would not be
        if len(self.latencies_ms) == self._messages:
            self.done.set()


def run(receiver: Receiver, rate: int, share: float, queues: int = 4) -> tuple[list[float], float, float]:
    """Put messages at a rate, in a second, into a new store, with a receiver that waits for them. Returns the latencies
    in ms, how late puts began in the median, in ms, and the share of the rate at which messages were handled."""
    messages = max(1, int(rate * SECONDS * share))
    arrivals = Arrivals(messages)
    with scratch() as directory, mqstore.open(directory / "store") as store:
        store.create_topic(TOPIC, queues=queues)
        for queue_id in range(queues):  # so that no file has to be made while the clock runs
            store.put(TOPIC, b"", queue_id=queue_id)
        with receiver(store, arrivals.arrive) as put:
            time.sleep(0.2)  # the receiver waits by then
            begin_ns, late_ms = produce(put, rate, messages)
            if not arrivals.done.wait(_PATIENCE_S):
                raise RuntimeError(f"some of {messages} messages did not arrive within {_PATIENCE_S} s")
            kept = messages * 1e9 / rate / (time.perf_counter_ns() - begin_ns)
    return arrivals.latencies_ms, statistics.median(late_ms), kept


def produce(put: Put, rate: int, messages: int) -> tuple[int, list[float]]:
    """Put each message when it is due. Returns when the first was, in ns, and how late each was, in ms."""
    late_ms: list[float] = []
    begin_ns = time.perf_counter_ns() + 20_000_000
    for number in range(messages):
        due_ns = begin_ns + int(number * 1e9 / rate)
        while (left_ns := due_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / 1e9)
        late_ms.append(-left_ns / 1e6)
        put(_DUE_NS.pack(due_ns) + _PADDING)
    return begin_ns, late_ms
