"""What Spark waits for before the first task of a query over many stores (S16 of the design).

    python -m bench.spark_plan [--stores N] [--queues N] [--rounds N]

Small stores side by side, 16 queues each, as a fleet has them; page cache warm. Planning opens each store, asks every
queue for its ends, and cuts what there is into partitions. No Spark: it would call the same function. Beside it:

    listed   the same folders walked by `os.walk`, and each file of theirs asked for its length
    bounds   each store opened by `MessageStore`, and `offsets` of each of its queues asked for

Goal: a thousand stores of 16 queues in less than 3 seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from bench.goals import ROUNDS, Side, measure, report
from mqstore import StoreConfig
from mqstore.engine import MessageStore, ReadOnlyMessageStore
from mqstore.jobs.options import SourceOptions
from mqstore.jobs.plan import plan


def make(folder: Path, stores: int, queues: int) -> None:
    """Store after store, each written by itself: a copy would be the same store twice."""
    config = StoreConfig(segment_bytes=1 << 16, consumequeue_units=1000, index_slots=100, index_entries=400)
    for number in range(stores):
        with MessageStore(folder / f"store-{number:05d}", config=config) as store:
            for each in range(4 * queues):
                store.put(f"topic-{each % queues // 4}", b"x" * 100, each % 4, keys=f"k{each}")


def listed(folder: Path) -> None:
    for path, _, names in os.walk(folder):
        for name in names:
            os.stat(os.path.join(path, name))


def bounds(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        with ReadOnlyMessageStore(path) as store:
            for topic in store.topics():
                for ref in store.queues(topic):
                    store.offsets(*ref)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--stores", type=int, default=1000)
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "fleet"
        folder.mkdir()
        make(folder, given.stores, given.queues)
        options = SourceOptions.parse({"path": str(folder / "*")})
        messages = sum(piece.stop - piece.start for task in plan(options) for piece in task)
        if messages != given.stores * given.queues * 4:
            raise SystemExit(f"planned {messages} messages, there are {given.stores * given.queues * 4}")
        sides: dict[str, Side] = {
            "plan": lambda: plan(options),
            "bounds": lambda: bounds(folder),
            "listed": lambda: listed(folder),
        }
        best = measure(sides, given.rounds)
    print(f"{given.stores:,} stores of {given.queues} queues")
    for side, seconds in best.items():
        print(f"  {side:8} {seconds:6.2f} s  {seconds / given.stores * 1000:6.2f} ms a store")
    print(f"  plan / bounds: {best['plan'] / best['bounds']:.2f}")
    if (given.stores, given.queues) == (1000, 16):
        report("S16", "seconds to plan a thousand stores of 16 queues", best["plan"], 3, most=True)


if __name__ == "__main__":
    main()
