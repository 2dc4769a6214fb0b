"""What the jobs share that copy messages: `mqstore.jobs.runner` and `mqstore.spark.selection` by their former names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mqstore.jobs.runner import Progress, Runner
from mqstore.spark.selection import Bound, Plan, Selection, Shaped, Stores, select

__all__ = ["Bound", "Plan", "Progress", "Selection", "Shaped", "Stores", "run", "select", "slots_of"]

T = TypeVar("T")
R = TypeVar("R")


def slots_of(spark: Any) -> int:
    """Return how many tasks run at once in a session; 1 without one."""
    return Runner(spark=spark).slots


def run(
    spark: Any, tasks: Sequence[T], function: Callable[[T], R], progress: Progress | None = None, title: str = "mqstore"
) -> list[R]:
    """Return what `function` makes of each task, in their order."""
    with Runner(spark=spark, progress=progress) as runner:
        return runner.run(tasks, function, title)
