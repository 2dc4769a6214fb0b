"""What tasks save when a store is checked: two of Spark's beside one process (S12 of the design).

    python -m bench.spark_verify [--messages N] [--rounds N] [--without-spark]

One store on a warm page cache: four topics of four queues, interleaved, bodies of 100 to 300 bytes, three properties.
Of the size that makes somebody think of Spark: a GiB takes one process less than a second, and Spark some tenths before
and between its tasks. Seconds, the best of some rounds in which every side has its turn, after two that do not count.
Every side does the whole of it:

    `MessageStore.verify`; `verify`, the tasks one after the other here; with `spark=session` on local[2]

Goal: two tasks at least 1.6 times as fast as one process. One process reads ahead on a second processor if it has one,
which a task does not; `one processor` is the same held to one, where the system knows how.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from bench.goals import ROUNDS, Side, measure, report
from bench.spark_columns import make
from mqstore import MessageStore
from mqstore.jobs import verify
from mqstore.spark import session

_CONF = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
}


def one_process(path: Path) -> None:
    with MessageStore(path, "r") as store:
        assert not list(store.verify())


def checked(spark: Any, path: Path) -> None:
    assert verify(path, spark=spark).ok


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
    parser.add_argument("--without-spark", action="store_true", help="only the sides of one process")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        make(path, given.messages)
        spark = None if given.without_spark else session("bench", _CONF)
        sides: dict[str, Side] = {
            "verify, one process": lambda: one_process(path),
            "verify, tasks one by one": lambda: checked(None, path),
        }
        if hasattr(os, "sched_setaffinity"):
            sides["verify, one processor"] = lambda: on_one_processor(lambda: one_process(path))
        if spark is not None:
            sides["verify, two tasks"] = lambda: checked(spark, path)
        best = measure(sides, given.rounds)
        size = sum(file.stat().st_size for file in (path / "commitlog").iterdir())
        print(f"{given.messages:,} messages, {size >> 20} MiB of segments")
        for name, seconds in best.items():
            print(f"  {name:26} {seconds:6.2f} s  {size / seconds / (1 << 20):5.0f} MiB/s")
        if spark is not None:
            for one, goal in (("verify, one processor", 1.6), ("verify, one process", None)):
                if one in best:
                    report("S12", f"{one}, time / that of two tasks", best[one] / best["verify, two tasks"], goal)
            spark.stop()


if __name__ == "__main__":
    main()
