"""Rows from tasks to other tasks, sorted on their way by Spark's shuffle. Imports no pyspark: it is given a session.

    task  --scatter-->  (key, position, data), ...  --Spark-->  all of a key in one place, by position  --gather-->  R

Spark sorts in Java and spills to disk, and both functions see rows pass by, so no process needs more memory for more
rows. What `gather` makes is collected, and has to be small. Either may be run a second time, for a task that failed,
and at the same time as the first.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from mqstore.errors import MQStoreError
from mqstore.spark.jobs.shape import Failure, described
from mqstore.spark.workers import settle

__all__ = ["Row", "shuffle"]

T = TypeVar("T")
R = TypeVar("R")
Row = tuple[int, int, bytes]
"""Key, position, data. A key is 0 or more. Data should be a few KiB: a batch of Spark has so many rows as were small
enough before."""

_ROWS = "key int, position long, data binary"
_FAILED = -1
"""The key of a row that is an error: MQStoreError and OSError reach the driver as what they are, as in `run`."""


def shuffle(
    spark: Any,
    tasks: Sequence[T],
    scatter: Callable[[T], Iterator[Row]],
    gather: Callable[[Iterator[Row]], Iterator[R]],
    keys: int,
    title: str = "mqstore",
) -> list[R]:
    """What `gather` makes of the rows that `scatter` makes of `tasks`, in any order.

    A call of `gather` gets all rows of some of the `keys`, key by key, each by position; the functions are ones of a
    module, or partials of these. How many calls: `spark.sql.shuffle.partitions`, at most. The session is one that `run`
    has used. Raises as `run` does.
    """
    if not tasks:
        return []
    parts = max(1, min(keys, int(spark.conf.get("spark.sql.shuffle.partitions"))))
    context = spark.sparkContext
    with described(context, title):
        # Not `mapInArrow`, which wants pandas.
        rows = context.parallelize([*tasks], len(tasks)).flatMap(partial(_scatter, scatter))
        frame = spark.createDataFrame(rows, _ROWS, verifySchema=False)
        ordered = frame.repartition(parts, "key").sortWithinPartitions("key", "position")
        outcomes = ordered.rdd.mapPartitions(partial(_gather, gather)).collect()
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise outcome.error()
    return [*outcomes]


def _scatter(function: Callable[[T], Iterator[Row]], task: T) -> Iterator[Row]:
    settle()
    try:
        yield from function(task)
    except (MQStoreError, OSError) as error:
        yield _FAILED, 0, pickle.dumps(Failure.of(error))


def _gather(function: Callable[[Iterator[Row]], Iterator[R]], given: Iterator[Any]) -> Iterator[R | Failure]:
    settle()
    rows = (tuple(row) for row in given)
    first = next(rows, None)
    if first is None:
        return
    if first[0] == _FAILED:  # before all others
        yield pickle.loads(first[2])
        return
    try:
        yield from function(chain([first], rows))
    except (MQStoreError, OSError) as error:
        yield Failure.of(error)
