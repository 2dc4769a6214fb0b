"""Small tables about stores, computed in the tasks, so that SQL can query metadata."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa

from mqstore.broker.admin.inspect import delay_levels, group_names, lag_of, pop_view, timer_view
from mqstore.broker.background.context import open_tables
from mqstore.columnar.columns import ARROW_TYPES
from mqstore.columnar.rows import PieceReader
from mqstore.columnar.tally import Tally
from mqstore.jobs.errors import of_store
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.opening import StoreName, open_store, opened, queues_of
from mqstore.jobs.reading.plan import Wanted, names_queue, stores_of
from mqstore.jobs.reading.tasks import policy_of
from mqstore.layout.consumequeue import is_message
from mqstore.log.commitlog import QueueRef
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.reading.reader import StoreReader
from mqstore.log.recovery.scanning.scanner import Good, scan_log
from mqstore.log.recovery.verify import verified_ranges

_BY_QUEUE: Final = ("queues", "traffic")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_Rows = Callable[[StoreReader, SourceOptions], Iterator[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class ViewTable:
    """A view: its columns with their SQL types, and the function that returns a store's rows."""

    columns: dict[str, str]
    rows: _Rows

    @property
    def schema(self) -> Any:
        return pa.schema([(name, ARROW_TYPES[kind]) for name, kind in self.columns.items()])


VIEWS: Final[dict[str, ViewTable]] = {}
"""Views by name. The functions below add themselves."""


def _view(columns: str) -> Callable[[_Rows], _Rows]:
    """Return a decorator that adds a function to `VIEWS`, with these columns in SQL."""

    def add(rows: _Rows) -> _Rows:
        VIEWS[rows.__name__.removeprefix("_")] = ViewTable(dict(each.split() for each in columns.split(", ")), rows)
        return rows

    return add


def view_stores(options: SourceOptions) -> list[StoreName]:
    """Return the stores of a view. TopicNotFoundError for a named topic or queue that no store has.
    The view `groups` is exempt, because a group's committed offset may remain after its topic is deleted."""
    names = stores_of(options)
    if options.view in _BY_QUEUE and options.fail_on_data_loss:
        wanted = Wanted(options, names)
        for name in names:
            if wanted.missing and (store := opened(name, options, open_store)) is not None:  # stop once all are found
                with store:
                    wanted.open(store, queues_of(store))
        wanted.check("reads the others")
    return names


def view_batch(view: str, store: StoreName, options: SourceOptions) -> Any:
    """Return the rows of one store, as a record batch with all columns of the view.
    A store that is skipped because of the options has no rows."""
    table = VIEWS[view]
    rows: list[tuple[Any, ...]] = []
    with of_store(store.path), opened(store, options, open_store) or nullcontext() as found:
        if found is not None:
            rows = [(store.id, *row) for row in table.rows(found, options)]
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
    """Return the store time of the first readable slot of these."""
    for slot in slots[:64]:
        found = store.get(*ref, slot, 1).messages
        if found and found[0].offset == slot:
            return _instant(found[0].store_timestamp_ms)
    return None


@_view(
    "store string, file string, base bigint, used_bytes bigint, messages bigint, "
    "first_store_timestamp timestamp, last_store_timestamp timestamp, sealed boolean, modified timestamp"
)
def _segments(store: StoreReader, _: SourceOptions) -> Iterator[tuple[Any, ...]]:
    segments = store.log_files.segments()
    seen: dict[int, tuple[int, int, int, int]] = {}
    events = scan_log(*(store.log_files, store.min_offset, store.checksum), checksums=False, on_front=lambda _: None)
    for event in events if segments else ():
        if isinstance(event, Good):
            for start, end, stamps in event.by_segment(store.log_files.segment_bytes):
                count, first = seen.get(start, (0, 0, stamps.item(0)))[1:3]
                seen[start] = (end - start, count + len(stamps), first, stamps.item(-1))
    for segment in segments:
        used, count, first_ms, last_ms = seen.get(segment.start, (0, 0, None, None))
        try:
            changed = _EPOCH + timedelta(microseconds=os.stat(segment.path).st_mtime_ns // 1000)
        except FileNotFoundError:  # retention has deleted it meanwhile
            continue
        sealed = segment is not segments[-1]
        name = os.path.basename(segment.path)
        yield name, segment.start, used, count, _instant(first_ms), _instant(last_ms), sealed, changed


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
            age_s = None if lag.oldest_ms is None else max(0, now_ms - lag.oldest_ms) // 1000
            yield (
                *(group, lag.topic, lag.queue_id, lag.committed, lag.end, lag.messages, age_s),
                *(lag.in_flight, lag.lost, _instant(lag.oldest_ms)),
            )


@_view(
    "store string, level int, delay_ms bigint, delay_offset bigint, max_offset bigint, waiting bigint, "
    "next_deliver_timestamp timestamp"
)
def _delay(store: StoreReader, _: SourceOptions) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each level, and a row without a level for the timer."""
    tables = open_tables(store)
    for level in delay_levels(tables):
        yield level.level, level.delay_ms, level.offset, level.end, level.waiting, _instant(level.next_due_ms)
    timer = timer_view(tables)
    if timer.waiting:
        yield None, None, None, None, timer.waiting, _instant(timer.next_due_ms)


@_view(
    "store string, topic string, queue_id int, interval_start timestamp, messages bigint, bytes bigint, "
    "size_p50 bigint, size_p95 bigint, size_max bigint"
)
def _traffic(store: StoreReader, options: SourceOptions) -> Iterator[tuple[Any, ...]]:
    policy = policy_of(replace(options, on_corrupt="fail" if options.on_corrupt == "fail" else "skip"))
    for queue in _wanted(store, options):
        tally = Tally(options.interval_ms, by_interval=True)
        reader = PieceReader(store, {"header"}, policy)
        for piece in reader.queue_pieces(*queue.ref, queue.min_offset, queue.max_offset):
            tally.add(piece)
        for number, messages, size, sizes in tally.rows():
            start = _instant(number * options.interval_ms)
            yield *queue.ref, start, messages, size, sizes.percentile(50), sizes.percentile(95), sizes.largest


@_view("store string, file string, first bigint, end bigint, records bigint, errors bigint, first_error string")
def _verify(store: StoreReader, _: SourceOptions) -> Iterator[tuple[Any, ...]]:
    for result, errors, first_error in verified_ranges(store.verifier()):
        base = result.range.base
        begin = result.range.low if result.first is None else result.first
        yield f"{base:020d}", base + begin, base + result.end, result.records, errors, first_error
