"""How late does what is due come, while nothing else happens? `python -m bench.lateness [--messages N]`

A store at rest, one message at a time: put, or popped and left alone, so that it is due a second later or less; a
consumer waits for it in `pop`. The figure is from the moment it is due to the return of that call. Never early is
asserted, for the delayed ones by the store's own time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import mqstore
from mqstore.broker.broker import Broker

TOPIC = "bench"


def _received(broker: Broker, group: str, due_ms: float, *, order: bool = False) -> float:
    """Wait for the message that is due; how late it comes, in ms."""
    [delivery] = broker.pop(group, TOPIC, 1, poll=10, order=order)
    late_ms = time.time() * 1000 - due_ms
    assert late_ms >= -1, f"{-late_ms} ms early"  # the store's clock has whole milliseconds
    broker.ack(group, TOPIC, [delivery.receipt])
    return late_ms


def level(broker: Broker) -> float:
    return _received(broker, "level", broker.put(TOPIC, b"x", delay_level=1).store_timestamp_ms + 1000)


def timer(broker: Broker) -> float:
    due_ms = time.time() * 1000 + 1000
    broker.put(TOPIC, b"x", deliver_at=due_ms / 1000)
    return _received(broker, "timer", due_ms)


def again(broker: Broker, *, order: bool = False) -> float:
    group = f"again-{order}"
    broker.put(TOPIC, b"x")
    [delivery] = broker.pop(group, TOPIC, 1, invisible=0.2, order=order, poll=10)
    return _received(broker, group, delivery.visible_at_ms, order=order)


WAYS: dict[str, Callable[[Broker], float]] = {
    "delay level": level,
    "delay to a moment": timer,
    "popped, not acknowledged": again,
    "the same, in order": lambda broker: again(broker, order=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lateness", description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=20)
    options = parser.parse_args()
    print(f"{'what is due':<26} {'median':>8} {'most':>8}   milliseconds late")
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
            store.create_topic(TOPIC, queues=1)
            late = [way(store.broker) for _ in range(options.messages)]
        print(f"{name:<26} {statistics.median(late):>8.1f} {max(late):>8.1f}")


if __name__ == "__main__":
    main()
