"""Frames in an order that a store keeps (spark.md B6, "Order")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mqstore.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["ordered"]


def ordered(frame: DataFrame, *, key: str = "sharding_key", by: Sequence[str]) -> DataFrame:
    """`frame` with all rows of a key in one partition, and there in the order of the columns `by`.

    A task writes the rows of its partition in their order, and what it wrote goes into the log as one block: so the
    messages of a key follow each other in a queue as `by` says. Across tasks Spark knows no order. Use it last before
    `write`: what comes after it may move rows, but for a `drop` of columns that a message does not have. Rows without a
    key all meet in one partition, which may become large.

    ConfigError for a column that is not there, and for no `by`.
    """
    by = [by] if isinstance(by, str) else list(by)
    missing = [name for name in (key, *by) if name not in frame.columns]
    if missing:
        raise ConfigError(
            f"ordered: the frame has no column {', '.join(map(repr, missing))}; there are {', '.join(frame.columns)}"
        )
    if not by:
        raise ConfigError("ordered: by names no column; without one the rows of a key have no order, as in by=['time']")
    return frame.repartition(key).sortWithinPartitions(*by)
