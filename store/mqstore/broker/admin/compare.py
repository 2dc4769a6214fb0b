"""Comparison of two stores, or of a store and its snapshot: the value of `mqstore diff --json`.

    {"a", "b", "same", "queues", "messages", "damaged": {"a", "b"}, "unlisted", "differences"}

Each of the `differences` has a `kind`:

    messages       topic, queue_id, first, stop, in, fields
    offset         group, topic, queue_id, a, b
    topic, group   name, field, a, b
    store          field, a, b

`messages` are those of queue offsets [`first`, `stop`), `in` one store ("a", "b"), or in "both" with different values
of `fields`. A record's place in the log is not a difference, and a body counts as it was before compression. A message
that is damaged in one store only is `in` the other. Records are compared byte by byte, queue by queue, in bounded
memory. Only records that are not the same bytes at the same place are decoded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqstore.broker.background.context import Tables, open_tables
from mqstore.errors import FormatError
from mqstore.files.lock import writer_alive
from mqstore.files.readonly_fs import QUIET
from mqstore.files.safe_open import resolved
from mqstore.layout.consumequeue import UNIT, UNIT_BYTES
from mqstore.log.message import Message, row_of
from mqstore.log.reading.directory import walk_queue
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.report import Finding
from mqstore.log.writing.log_tail import QueueRef

_STEP: Final = 512
_PLACE: Final = frozenset({"physical_offset", "size", "message_id", "store_host", "tags", "keys", "unique_key"})
"""Fields that depend on the place of a record, and those that are among its properties."""
_OWN: Final = frozenset({"store_id", "created_ms", "exists", "problems", "is_changed"})
"""Fields of the manifest that each store has for itself."""
_SHOWN: Final = 200
_FIELDS: Final = 20

_Range = tuple[int, int, str, tuple[str, ...]]
"""First offset, end, the store that has the messages, and the fields that differ."""


class _Side(NamedTuple):
    store: ReadOnlyMessageStore
    tables: Tables
    bounds: dict[QueueRef, tuple[int, int]]


def compare_stores(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    topic: str | None = None,
    limit: int = 100,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the differences of two stores as `mqstore diff --json` prints them. Changes nothing.

    Compares messages, committed offsets, settings of topics and groups, and the manifests. With `topic` only what
    belongs to that topic is compared. At most `limit` differences are listed, and `unlisted` counts the others.
    `progress` is called with (messages compared, all messages). Raises the errors of opening a store for reading, and
    CorruptStoreError for damaged tables.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mqstore.open(f"{folder}/a") as store:
    ...         _ = store.put_many("orders", [b"1", b"2"], queue_id=0)
    ...         _ = store.snapshot(f"{folder}/b")
    ...         _ = store.put("orders", b"3", queue_id=0)
    ...     [difference] = compare_stores(f"{folder}/a", f"{folder}/b")["differences"]
    >>> difference["in"], difference["first"], difference["stop"]
    ('a', 2, 3)
    """
    paths = [Path(resolved(each)) for each in (a, b)]
    with ExitStack() as stack:
        sides = []
        for path in paths:
            store = stack.enter_context(ReadOnlyMessageStore(path, fs=QUIET))
            if writer_alive(path, QUIET):
                store.stop_at(store.parts.listed_end())
            queues = [each for each in store.queue_table if each.max_offset and topic in (None, each.topic)]
            bounds = {each.ref: (each.min_offset, each.max_offset) for each in queues}
            sides.append(_Side(store, open_tables(store), bounds))
        work = _Comparison(sides[0], sides[1], progress)
        kept: list[dict[str, Any]] = []
        count = 0
        for count, row in enumerate(work.rows(topic), 1):
            if count <= limit:
                kept.append(row)
    return {
        "a": os.fspath(paths[0]),
        "b": os.fspath(paths[1]),
        "same": not count,
        "queues": len({*sides[0].bounds, *sides[1].bounds}),
        "messages": work.messages,
        "damaged": {"a": work.damaged[0], "b": work.damaged[1]},
        "unlisted": count - len(kept),
        "differences": kept,
    }


class _Comparison:
    """Comparison of two opened stores, and its counts."""

    def __init__(self, a: _Side, b: _Side, progress: Callable[[int, int], None] | None) -> None:
        self._sides = a, b
        self._progress = progress or (lambda done, total: None)
        self._refs = sorted({*a.bounds, *b.bounds})
        self._total = sum(high - low for ref in self._refs for low, high, where in self._parts(ref) if where == "ab")
        self.messages = 0
        self.damaged = [0, 0]

    def rows(self, topic: str | None) -> Iterator[dict[str, Any]]:
        """Yield the differences."""
        a, b = (side.tables for side in self._sides)
        if topic is None:
            yield from _settings({"kind": "store"}, *(side.store.manifest for side in self._sides))
        for kind, left, right in (("group", a.groups, b.groups), ("topic", a.topics, b.topics)):
            for name in sorted({*left.names(system=True), *right.names(system=True)}):
                if topic is None or (kind, name) == ("topic", topic):
                    yield from _settings({"kind": kind, "name": name}, left.get(name), right.get(name))
        for group in sorted(a.offsets.groups() | b.offsets.groups()):
            mine, other = a.offsets.of_group(group), b.offsets.of_group(group)
            for ref in sorted(mine.keys() | other.keys()):
                if topic in (None, ref[0]):
                    head = {"kind": "offset", "group": group, "topic": ref[0], "queue_id": ref[1]}
                    yield from _unequal(head, mine.get(ref), other.get(ref))
        for ref in self._refs:
            for first, stop, where, names in _joined(self._queue(ref)):
                head = {"kind": "messages", **ref._asdict(), "first": first, "stop": stop}
                yield {**head, "in": where, "fields": [*names]}

    def _parts(self, ref: QueueRef) -> Iterator[tuple[int, int, str]]:
        """Yield the ranges of a queue's offsets that are in "a", "b" or "ab"."""
        bounds = [side.bounds.get(ref, (0, 0)) for side in self._sides]
        for low, high in pairwise(sorted({*bounds[0], *bounds[1]})):
            yield low, high, "".join(name for name, (a, b) in zip("ab", bounds, strict=True) if a <= low < b)

    def _queue(self, ref: QueueRef) -> Iterator[_Range]:
        """Yield the differences of a queue, in order."""
        for low, high, where in self._parts(ref):
            if len(where) == 1:
                yield low, high, where, ()
            for start in range(low, high, _STEP) if where == "ab" else ():
                end = min(start + _STEP, high)
                if not self._is_same(ref, start, end):
                    yield from self._records(ref, start, end)
                self.messages += end - start
                self._progress(self.messages, self._total)

    def _is_same(self, ref: QueueRef, start: int, stop: int) -> bool:
        """Return True if both stores have the same bytes at the same places, without decoding them."""
        units, others = (side.store.unit_bytes(*ref, start, stop - start) for side in self._sides)
        if units != others or len(units) != (stop - start) * UNIT_BYTES:
            return False
        try:
            return all(
                size > 0 and (found := _raw(self._sides[0], at, size)) and found == _raw(self._sides[1], at, size)
                for at, size, _ in UNIT.iter_unpack(units)
            )
        except FileNotFoundError:  # deleted by retention
            return False

    def _records(self, ref: QueueRef, start: int, stop: int) -> Iterator[_Range]:
        left, right = (self._messages(number, ref, start, stop) for number in range(2))
        for offset in range(start, stop):
            mine, other = left.get(offset), right.get(offset)
            if mine is not None and other is not None:
                values, others = _values(mine), _values(other)
                names = values.keys() | others.keys()
                if wrong := sorted(name for name in names if values.get(name) != others.get(name)):
                    yield offset, offset + 1, "both", tuple(wrong[:_FIELDS])
            elif mine is not other:
                yield offset, offset + 1, "b" if mine is None else "a", ()

    def _messages(self, number: int, ref: QueueRef, start: int, stop: int) -> dict[int, Message]:
        found = {}
        for item in walk_queue(self._sides[number].store, *ref, start, stop):
            if isinstance(item, Finding):
                self.damaged[number] += 1
            else:
                found[item.offset] = item
        return found


def _joined(ranges: Iterable[_Range]) -> Iterator[_Range]:
    """Join adjacent ranges with the same difference."""
    last: _Range | None = None
    for each in ranges:
        if last is not None and (last[1], *last[2:]) == (each[0], *each[2:]):
            each = (last[0], *each[1:])
        elif last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def _raw(side: _Side, physical: int, size: int) -> bytes:
    """Return the bytes of a record, or b"" if the log has no record of this size there."""
    run = side.store.log_files
    segment = run.find(physical)
    if segment is None:
        return b""
    at, buffer = physical - segment.start, run.mapping(segment)
    return buffer[at : at + size] if buffer[at : at + 4] == size.to_bytes(4, "big") else b""


def _values(message: Message) -> dict[str, Any]:
    """Return the fields of a message that may differ."""
    try:
        row = row_of(message)
    except (FormatError, ImportError):  # the body cannot be inflated
        row = row_of(message, stored=True)
    properties = {f"property {name}": value for name, value in row.pop("properties").items()}
    return {name: value for name, value in row.items() if name not in _PLACE} | properties


def _unequal(head: dict[str, Any], a: object, b: object) -> Iterator[dict[str, Any]]:
    if a != b:
        yield {**head, "a": _plain(a), "b": _plain(b)}


def _settings(head: dict[str, Any], a: Any, b: Any) -> Iterator[dict[str, Any]]:
    if a is None or b is None:
        yield from _unequal({**head, "field": "exists"}, a is not None, b is not None)
        return
    for name in (name for name in type(a).__annotations__ if name not in _OWN):
        yield from _unequal({**head, "field": name}, getattr(a, name), getattr(b, name))


def _plain(value: object) -> object:
    """Return a value for JSON. Others than numbers are text of bounded length."""
    if value is None or isinstance(value, bool | int):
        return value
    return str(dict(value) if isinstance(value, Mapping) else value)[:_SHOWN]
