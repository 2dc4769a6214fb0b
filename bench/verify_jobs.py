"""What two processes save when a store is checked, beside one (S12 of the design).

    python -m bench.verify_jobs [--messages N] [--rounds N]

One store on a warm page cache: four topics of four queues, interleaved, bodies of 100 to 300 bytes, three properties.
Seconds, the best of some rounds in which every side has its turn, after two that do not count. Every side does the
whole of it: `MessageStore.verify`; `mqstore.jobs.verify` with one job, and with two.

Goal: two processes at least 1.6 times as fast as one. One process reads ahead on a second processor if it has one,
which a worker does not; `one processor` is the same held to one, where the system knows how.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from bench.goals import ROUNDS, Side, measure, report
from bench.spark_columns import make
from mqstore.engine import ReadOnlyMessageStore
from mqstore.jobs import verify


def one_process(path: Path) -> None:
    with ReadOnlyMessageStore(path) as store:
        assert not list(store.verify())


def checked(path: Path, jobs: int) -> None:
    assert verify(path, jobs=jobs).ok


def on_one_processor(side: Side) -> None:
    """What threads it starts run there, too."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        side()
    finally:
        os.sched_setaffinity(0, allowed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--messages", type=int, default=12_000_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        make(path, given.messages)
        sides: dict[str, Side] = {
            "verify, one process": lambda: one_process(path),
            "verify, tasks one by one": lambda: checked(path, 1),
            "verify, two processes": lambda: checked(path, 2),
        }
        if hasattr(os, "sched_setaffinity"):
            sides["verify, one processor"] = lambda: on_one_processor(lambda: one_process(path))
        best = measure(sides, given.rounds)
        size = sum(file.stat().st_size for file in (path / "commitlog").iterdir())
        print(f"{given.messages:,} messages, {size >> 20} MiB of segments")
        for name, seconds in best.items():
            print(f"  {name:26} {seconds:6.2f} s  {size / seconds / (1 << 20):5.0f} MiB/s")
        for one, goal in (("verify, one processor", 1.6), ("verify, one process", None)):
            if one in best:
                report("S12", f"{one}, time / that of two processes", best[one] / best["verify, two processes"], goal)


if __name__ == "__main__":
    main()
