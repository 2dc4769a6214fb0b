"""A copy of stores that has of equal messages the first alone (spark.md B7); `mqstore.spark.jobs.keyed` makes it.

Equal are messages of one topic that agree in the fields `by`; by default in their unique key, which a client gives a
message once, however often it sends it, and which the sink for Spark derives from the row. Messages that lack one of
the fields are copied.

With a window, a message is left out only if an equal one was kept, and stored at most so long before it: what comes
again later is another event. Times of storing decide then; without a window the order of the log does.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mqstore.errors import ConfigError
from mqstore.options import seconds
from mqstore.spark.copying import Spread
from mqstore.spark.jobs.compact import CompactReport, Sifting, planned
from mqstore.spark.jobs.keyed import Rows, check_fields, last_of_each
from mqstore.spark.jobs.rewrite import CopyPlan, Wishes
from mqstore.spark.jobs.shape import Progress, Selection, Stores

__all__ = ["dedup", "dedup_plan"]


def dedup(
    spark: Any,
    stores: Stores | Selection,
    dest: str,
    *,
    by: str | Sequence[str] = "unique_key",
    window: float | timedelta | None = 3600.0,
    topics: str | Sequence[str] | None = None,
    queues: int | None = None,
    spread: Spread = "queue",
    target: str = "store",
    id: str | None = None,  # noqa: A002
    progress: Progress | None = None,
) -> CompactReport:
    """Copy into `dest`, a new store or (`target="set"`) a new set, all messages but those that are equal to an earlier
    one by the fields `by` (as `key` of `compact`; `body` is one) and were stored within `window` after it (seconds, or
    a timedelta; None: ever). Everything else is as with `compact`."""
    sifting, window_ms = _deduplication(stores, dest, by, window, topics, queues, spread, target, id)
    return sifting.run(spark, partial(_again, window_ms), progress)


def dedup_plan(
    stores: Stores | Selection,
    dest: str,
    *,
    by: str | Sequence[str] = "unique_key",
    window: float | timedelta | None = 3600.0,
    topics: str | Sequence[str] | None = None,
    queues: int | None = None,
    spread: Spread = "queue",
    target: str = "store",
    id: str | None = None,  # noqa: A002
) -> CopyPlan:
    """What `dedup` with these arguments would read; it reads it twice. Raises what it raises before it begins."""
    return _deduplication(stores, dest, by, window, topics, queues, spread, target, id)[0].plan()


def _deduplication(
    stores: Stores | Selection,
    dest: str,
    by: str | Sequence[str],
    window: float | timedelta | None,
    topics: str | Sequence[str] | None,
    queues: int | None,
    spread: Spread,
    target: str,
    name: str | None,
) -> tuple[Sifting, int | None]:
    """The copy, and the window in ms (None: no end). ConfigError."""
    fields = check_fields("by", by)
    window_ms = None if window is None else int(seconds(window, "window") * 1000)
    if window_ms is not None and window_ms <= 0:
        raise ConfigError(f"window={window!r} must be above 0; None leaves out equal messages however far apart")
    wishes = Wishes({}, queues, spread)
    return planned("dedup", stores, dest, topics, fields, wishes, target, name, [window_ms]), window_ms


def _again(window_ms: int | None, rows: Rows) -> npt.NDArray[np.bool_]:
    """The rows that an equal one was kept before."""
    left_out = np.ones(len(rows.key), np.bool_)
    if window_ms is None:
        backward = np.lexsort((-rows.physical, rows.store, rows.key))
        firsts = backward[last_of_each(rows.key[backward], rows.store[backward])]
        order = firsts[np.lexsort((-rows.store[firsts], -rows.stored_ms[firsts], rows.key[firsts]))]
        left_out[order[last_of_each(rows.key[order])]] = False
        return left_out
    order = np.lexsort((rows.physical, rows.store, rows.stored_ms, rows.key))
    keys, times = rows.key[order].tolist(), rows.stored_ms[order].tolist()
    kept_key, kept_ms = -1, 0
    for row, key, at_ms in zip(order.tolist(), keys, times, strict=True):
        if key != kept_key or at_ms - kept_ms > window_ms:
            left_out[row] = False
            kept_key, kept_ms = key, at_ms
    return left_out
