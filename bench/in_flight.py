"""A million deliveries in flight: what they take of memory, and what a restart with them takes of time.

    python -m bench.in_flight [--messages N] [--batch N]

Prints figures, and is no question of `compare`: there is nobody to hold them against. Goals: 500 MiB, and seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import mqstore
from bench.harness import scratch
from mqstore.broker.broker import Broker


def resident_bytes() -> int:
    """Memory of this process that is its own: without the pages of mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell the anonymous memory of a process")


def measure(messages: int, batch: int) -> dict[str, float]:
    with scratch("in-flight") as directory:
        with Broker(mqstore.engine.MessageStore(directory / "store")) as broker:
            broker.topics.create("bench", queues=1)
            for _ in range(0, messages, 1000):
                broker.put_many("bench", [b"." * 128] * 1000)
            broker.store.dispatch()
            gc.collect()
            before = resident_bytes()
            popped = 0
            while popped < messages:
                popped += len(broker.pop("g", "bench", batch, invisible=12 * 3600, local=False))
            gc.collect()
            held = resident_bytes() - before
            assert broker.stats().in_flight == messages
        begin = time.perf_counter()
        with Broker(mqstore.engine.MessageStore(directory / "store")) as broker:
            seconds = time.perf_counter() - begin
            assert broker.stats().in_flight == messages
            assert broker.pop("g", "bench") == []
    return {"messages": messages, "batch": batch, "mebibytes": held / (1 << 20), "restart_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.in_flight", description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1, help="messages a pop, 1 to 32")
    options = parser.parse_args()
    print(json.dumps(measure(options.messages, options.batch), indent=2))


if __name__ == "__main__":
    main()
