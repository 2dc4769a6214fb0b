"""Small tables about stores, so that metadata is SQL too. Computed in the tasks, a store each. Knows no Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa

from mqstore.broker.admin.inspect import group_names, lag_of, pop_view
from mqstore.broker.parts import open_tables
from mqstore.errors import NotAStoreError
from mqstore.layout.consumequeue import is_message
from mqstore.log.commitlog import QueueRef
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.reader import StoreReader
from mqstore.spark.columns import ARROW_TYPES
from mqstore.spark.options import SourceOptions
from mqstore.spark.plan import StoreName, Wanted, names_queue, open_store, queues_of, stores_of
from mqstore.spark.telling import of_store, warn_once

__all__ = ["VIEWS", "as_markdown", "view_batch", "view_stores"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_Rows = Callable[[StoreReader, SourceOptions], Iterator[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class ViewTable:
    """A view: its columns with their SQL types, and the function that makes a store's rows."""

    columns: dict[str, str]
    rows: _Rows

    @property
    def schema(self) -> Any:
        return pa.schema([(name, ARROW_TYPES[kind]) for name, kind in self.columns.items()])


VIEWS: Final[dict[str, ViewTable]] = {}
"""The views by name: functions below."""


def _view(columns: str) -> Callable[[_Rows], _Rows]:
    """Return a decorator that adds a function to `VIEWS`, with these columns, which are written as in SQL."""

    def add(rows: _Rows) -> _Rows:
        VIEWS[rows.__name__.removeprefix("_")] = ViewTable(dict(each.split() for each in columns.split(", ")), rows)
        return rows

    return add


def view_stores(options: SourceOptions) -> list[StoreName]:
    """The stores that a view is of. TopicNotFoundError for a topic or queue that is named and that no store has, as a
    query of messages has it; of `groups` it may have been deleted, and a group's progress be there still."""
    names = stores_of(options)
    if options.view == "queues" and options.fail_on_data_loss:
        wanted = Wanted(options, names)
        for name in names:
            if wanted.missing:  # opening them all is work
                with open_store(name) as store:
                    wanted.open(store, queues_of(store))
        wanted.check("reads what there is")
    return names


def view_batch(view: str, store: StoreName, options: SourceOptions) -> Any:
    """The rows of one store, as a record batch with all columns of the view. None, and a warning, of one that is gone
    where that is allowed (`failOnDataLoss=false`), else NotAStoreError."""
    table = VIEWS[view]
    rows: list[tuple[Any, ...]] = []
    with of_store(store.path):
        try:
            opened = open_store(store)
        except NotAStoreError as error:
            if options.fail_on_data_loss:
                raise
            warn_once(f"mqstore: {error}; with failOnDataLoss=false the view {view} has no row of it")
        else:
            with opened:
                rows = [(store.id, *row) for row in table.rows(opened, options)]
    return pa.RecordBatch.from_pylist([dict(zip(table.columns, row, strict=True)) for row in rows], table.schema)


def _instant(ms: int | None) -> datetime | None:
    try:
        return None if ms is None else _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return None


def _wanted(store: StoreReader, options: SourceOptions) -> list[ConsumeQueue]:
    wanted = names_queue(options)
    return [queue for queue in queues_of(store) if wanted(*queue.ref)]


@_view(
    "store string, topic string, queue_id int, min_offset bigint, max_offset bigint, messages bigint, "
    "first_store_timestamp timestamp, last_store_timestamp timestamp, bytes bigint, state string"
)
def _queues(store: StoreReader, options: SourceOptions) -> Iterator[tuple[Any, ...]]:
    for queue in _wanted(store, options):
        ref, low, high = queue.ref, queue.min_offset, queue.max_offset
        messages = size = 0
        holes = False
        for _, units in queue.chunks(low, high):
            there = is_message(units)
            messages += int(there.sum())
            size += int(units["size"][there].sum(dtype=np.int64))
            holes |= bool((units["size"] <= 0).any())
        first, last = (_time_of(store, ref, at) for at in (range(low, high), range(high - 1, low - 1, -1)))
        yield ref.topic, ref.queue_id, low, high, messages, first, last, size, "holes" if holes else "whole"


def _time_of(store: StoreReader, ref: QueueRef, slots: range) -> datetime | None:
    """Store time of the first of these, up to a few, that can be read."""
    for slot in slots[:64]:
        found = store.get(*ref, slot, 1).messages
        if found and found[0].offset == slot:
            return _instant(found[0].store_timestamp_ms)
    return None


@_view(
    "store string, group string, topic string, queue_id int, committed_offset bigint, max_offset bigint, "
    "lag bigint, lag_seconds bigint, in_flight bigint, lost bigint, oldest_store_timestamp timestamp"
)
def _groups(store: StoreReader, options: SourceOptions) -> Iterator[tuple[Any, ...]]:
    wanted = names_queue(options)
    tables = open_tables(store)
    now_ms = tables.clock.now_ms()
    pops = pop_view(tables, now_ms)
    for group in group_names(tables):
        for lag in lag_of(tables, group, pops):
            if not wanted(lag.topic, lag.queue_id):
                continue
            behind = None if lag.oldest_ms is None else max(0, now_ms - lag.oldest_ms) // 1000
            yield (
                *(group, lag.topic, lag.queue_id, lag.committed, lag.end, lag.messages, behind),
                *(lag.in_flight, lag.lost, _instant(lag.oldest_ms)),
            )


def as_markdown() -> str:
    """The views and their columns, for the documentation."""
    lines = ["| View | Columns |", "|---|---|"]
    for view, table in VIEWS.items():
        lines.append(f"| `{view}` | {', '.join(f'`{name}` {kind}' for name, kind in table.columns.items())} |")
    return "\n".join(lines) + "\n"
