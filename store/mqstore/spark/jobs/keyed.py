"""Copies of stores without the messages that others make superfluous: what `compact` and `dedup` share (spark.md B7).

    pass 1    task of slices        topic, key and place of each message, into files by the hash of topic and key
    judge     task of one hash      of the messages of each key, which are left out: their places, sorted, into a file
    pass 2    task of slices        the records that are not left out, copied as bytes, in their order

No task holds more than a share of the keys: there are as many hashes as make a share of about half a million messages.
A place is (queue, offset) in one number, so a task of pass 2 finds what its slices lack by bisection in the files of
all hashes. Messages without a key are in no such file, so they are copied.

The order of two messages of one store is that of its log. Of two stores there is none but their times of storing; of
equal ones the store that was named first comes first.

All files lie in a folder under the target's `_staging`, which goes with the job. Knows no pyspark.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqstore.errors import ConfigError
from mqstore.files.filesystem import REAL
from mqstore.layout.compression import inflate
from mqstore.layout.pairs import Pairs
from mqstore.layout.properties import KEYS, SHARDINGKEY, TAGS, UNIQ_KEY
from mqstore.log.manifest import MANIFEST
from mqstore.spark import publish
from mqstore.spark.arrow import cut, spread
from mqstore.spark.jobs.rewrite import (
    Part,
    Rewrite,
    RewriteReport,
    Staged,
    execute,
    remove_if_empty,
    stage,
)
from mqstore.spark.jobs.shape import Progress, Shaped, run
from mqstore.spark.options import SourceOptions
from mqstore.spark.plan import QueueSlice, StoreName, open_store, stores_of
from mqstore.spark.rows import Piece
from mqstore.spark.sets import SET_FILE
from mqstore.spark.sinkoptions import SinkOptions
from mqstore.spark.staging import STAGING, make_folders
from mqstore.spark.tasks import policy_of, read_pieces

__all__ = ["Found", "Judge", "Rows", "TopicChange", "check_fields", "check_new", "last_of_each", "sifted"]

_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_SHARE = 500_000
_SHARES_MAX = 256
_SLOT_BITS = 44
_PROPERTY: Final[Mapping[str, str]] = {
    "keys": KEYS,
    "tags": TAGS,
    "unique_key": UNIQ_KEY,
    "sharding_key": SHARDINGKEY,
}
"""Columns that are properties; any other name is that of a property, but for `body` and what begins with `_MEMBER`."""
_MEMBER: Final = "body."
"""In front of the way to a member of a JSON body, with dots: `body.customer.id`."""
_SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("queue", pa.int32()),
        ("store", pa.int32()),
        ("slot", pa.int64()),
        ("physical", pa.int64()),
        ("stored_ms", pa.int64()),
        ("empty", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Messages of one share of the keys, as arrays. `key` numbers the keys."""

    key: _Int64s
    queue: _Int64s
    store: _Int64s
    slot: _Int64s
    physical: _Int64s
    stored_ms: _Int64s
    empty: _Bools


Judge = Callable[[Rows], _Bools]
"""Which of the rows are left out."""


@dataclass(frozen=True, slots=True)
class TopicChange(Shaped):
    """A topic of the sources, before and after."""

    topic: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Found:
    """What the passes have found."""

    rewritten: RewriteReport
    topics: tuple[TopicChange, ...]
    bytes_before: int
    keys: int
    """Different ones, by topic."""
    without_key: int


def check_fields(what: str, fields: str | Sequence[str]) -> tuple[str, ...]:
    """Names of fields that make a key. ConfigError."""
    names = tuple(name.strip() for name in fields.split(",")) if isinstance(fields, str) else tuple(fields)
    if not names or any(not name or "\x01" in name or "\x02" in name or not all(_way(name)) for name in names):
        raise ConfigError(
            f"{what}={fields!r}: give one or more of {', '.join(_PROPERTY)}, body, body.NAME for a member of a JSON "
            "body, or names of properties, with commas"
        )
    return names


def _way(name: str) -> list[str]:
    """The members that lead to a value in a JSON body; none for other fields."""
    return name.removeprefix(_MEMBER).split(".") if name.startswith(_MEMBER) else []


def check_new(options: SinkOptions, app: str, version: int) -> None:
    """ConfigError unless the target is new, or has this very run: what is left out is never left out of anything that
    is there."""
    root = Path(options.path)
    if options.target not in ("store", "set"):
        raise ConfigError(f"target={options.target!r}: the result is a new store, or a new set")
    if publish.is_committed(options, app, version):
        return
    if (root / SET_FILE).exists():
        if stores_of(SourceOptions(paths=[options.path])):
            raise ConfigError(f"{root} is a store set that has stores: the result is a new one, give another folder")
    elif (root / MANIFEST).exists() or (root / "commitlog").exists():
        with open_store(StoreName(options.path, options.path)) as store:
            if store.topics():
                raise ConfigError(f"{root} is a store that has messages: the result is a new one, give another folder")


def last_of_each(*by: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Of rows that are sorted by `by`, the last of each run of equal ones."""
    changed = np.zeros(len(by[0]), np.bool_)
    changed[-1:] = True
    for column in by:
        changed[:-1] |= column[1:] != column[:-1]
    return np.flatnonzero(changed)


# -- the passes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    """What all tasks of the first two passes are told."""

    source: SourceOptions
    folder: str
    fields: tuple[str, ...]
    shares: int
    queues: Mapping[tuple[str, str, int], int]
    """(store id, topic, queue id) -> number."""
    stores: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Listed:
    """What a task of pass 1 gives back."""

    files: tuple[str | None, ...]
    """By share."""
    counts: Mapping[str, int]
    bytes: int
    without_key: int


@dataclass(frozen=True, slots=True)
class _Judged:
    file: str
    keys: int


def sifted(
    spark: Any,
    rewrite: Rewrite,
    parts: Sequence[Part],
    name: str,
    fields: tuple[str, ...],
    judge: Judge,
    *,
    progress: Progress | None,
    title: str,
) -> Found:
    """Run the three passes into the one target of `rewrite`. `judge`: a function of a module, or a partial of one.
    Raises as `execute`."""
    options = rewrite.to[0].options
    if publish.is_committed(options, rewrite.app, rewrite.version):
        return Found(execute(spark, rewrite, parts, name), (), 0, 0, 0)
    made = not os.path.lexists(options.path)
    folder = Path(options.path) / STAGING / f"{rewrite.app}-{rewrite.version}.keys-{secrets.token_hex(6)}"
    make_folders(folder)
    try:
        work = _work(rewrite, parts, str(folder), fields)
        listed = run(spark, [*parts], partial(_list, work), progress, f"{title}: keys")
        shares = [tuple(found for each in listed if (found := each.files[share])) for share in range(work.shares)]
        judged = run(spark, [*enumerate(shares)], partial(_judge, work, judge), progress, f"{title}: choosing")
        left_out = tuple(each.file for each in judged)
        rewritten = execute(
            spark,
            rewrite,
            parts,
            name,
            work=partial(_copy, work, left_out),
            progress=progress,
            title=f"{title}: copying",
        )
    finally:
        REAL.remove_tree(folder)
        remove_if_empty(str(folder.parent))
        if made:
            remove_if_empty(options.path)
    before: Counter[str] = Counter()
    for each in listed:
        before.update(each.counts)
    after = rewritten.dests[0].topics
    topics = tuple(TopicChange(topic, count, after.get(topic, 0)) for topic, count in sorted(before.items()))
    return Found(
        rewritten,
        topics,
        sum(each.bytes for each in listed),
        sum(each.keys for each in judged),
        sum(each.without_key for each in listed),
    )


def _work(rewrite: Rewrite, parts: Sequence[Part], folder: str, fields: tuple[str, ...]) -> _Work:
    slices = [piece for part in parts for piece in part.slices]
    messages = sum(piece.stop - piece.start for piece in slices)
    queues = dict.fromkeys((piece.store.id, piece.topic, piece.queue_id) for piece in slices)
    stores = [name.id for name in stores_of(rewrite.source)]
    return _Work(
        rewrite.source,
        folder,
        fields,
        min(_SHARES_MAX, 1 + messages // _SHARE),
        {key: number for number, key in enumerate(queues)},
        {name: number for number, name in enumerate(stores)},
    )


def _list(work: _Work, part: Part) -> _Listed:
    """Pass 1."""
    policy = policy_of(work.source)
    token = secrets.token_hex(6)
    writers: dict[int, Any] = {}
    files: list[str | None] = [None] * work.shares
    counts: Counter[str] = Counter()
    size = without_key = 0
    try:
        for piece, found in read_pieces(work.source, part.slices, policy):
            counts[piece.topic] += len(found)
            size += int(found.sizes.sum())
            rows = _keyed(work, piece, found)
            without_key += len(found) - len(rows)
            for share, batch in _shared(rows, work.shares):
                if share not in writers:
                    files[share] = path = os.path.join(work.folder, f"{share}-{part.number}-{token}.arrow")
                    writers[share] = pa.ipc.new_stream(path, _SCHEMA)
                writers[share].write_batch(batch)
    finally:
        for writer in writers.values():
            writer.close()
    return _Listed(tuple(files), dict(counts), size, without_key)


def _shared(rows: Any, shares: int) -> list[tuple[int, Any]]:
    if not len(rows):
        return []
    if shares == 1:
        return [(0, rows)]
    coded = rows.column("key").dictionary_encode()
    hashes = np.array([zlib.crc32(key) % shares for key in coded.dictionary.to_pylist()], np.int64)
    mine = hashes[coded.indices.to_numpy()]
    return [(share, rows.filter(pa.array(mine == share))) for share in np.unique(mine).tolist()]


def _keyed(work: _Work, piece: QueueSlice, found: Piece) -> Any:
    """The rows of a piece that have a key."""
    headers = found.headers
    assert headers is not None
    parts = [_field(found, name) for name in work.fields]
    topic = piece.topic.encode("utf-8", "surrogateescape")
    key = pc.binary_join_element_wise(pa.scalar(topic, pa.binary()), *parts, b"\x02")  # null where one of them is
    count = len(found)
    queue, store = work.queues[piece.store.id, piece.topic, piece.queue_id], work.stores[piece.store.id]
    rows = pa.RecordBatch.from_arrays(
        [
            key,
            pa.array(np.full(count, queue, np.int32)),
            pa.array(np.full(count, store, np.int32)),
            pa.array(found.slots),
            pa.array(found.physical),
            pa.array(headers.store_timestamp_ms),
            pa.array(headers.body_size == 0),
        ],
        schema=_SCHEMA,
    )
    return rows.filter(key.is_valid()) if key.null_count else rows


def _field(found: Piece, name: str) -> Any:
    """What a field holds in each row, as bytes; null where there is none."""
    headers = found.headers
    assert headers is not None
    if name == "body":
        bodies = cut(found.buffer, headers.body_position, headers.body_position + headers.body_size)
        digests = [hashlib.blake2b(body.as_buffer(), digest_size=20).hexdigest() for body in bodies]
        return pa.array(digests, pa.string()).cast(pa.binary())
    if way := _way(name):
        return pa.array([_member(found, row, way) for row in range(len(found))], pa.binary())
    pairs = found.pairs
    named = _named(pairs, _PROPERTY.get(name, name).encode())
    values = cut(pairs.data, pairs.value[named], pairs.value[named] + pairs.value_size[named])
    return spread(values, pairs.blob[named], len(found)) if len(named) else pa.nulls(len(found), pa.binary())


def _member(found: Piece, row: int, way: Sequence[str]) -> bytes | None:
    """A member of a message's body as JSON, so that 1 and "1" differ; None where the body is no JSON that has it."""
    headers = found.headers
    assert headers is not None
    start = int(headers.body_position[row])
    stored = bytes(found.buffer[start : start + int(headers.body_size[row])])
    try:
        value = json.loads(inflate(int(headers.sys_flag[row]), stored))
    except (ValueError, RecursionError):  # FormatError is one
        return None
    for name in way:
        value = value.get(name) if isinstance(value, dict) else None
    return None if value is None else json.dumps(value, sort_keys=True).encode()


def _named(pairs: Pairs, name: bytes) -> npt.NDArray[np.intp]:
    """The pairs of that name, one a record at most: of several the last one counts (store-format 2.4)."""
    alike = np.flatnonzero(pairs.name_size == len(name))
    if not len(alike):
        return alike
    starts = pairs.start[alike]
    names = cut(pairs.data, starts, starts + len(name))
    same: _Bools = pc.equal(names, pa.scalar(name, pa.binary())).to_numpy(zero_copy_only=False)
    alike = alike[same]
    return alike[last_of_each(pairs.blob[alike])] if len(alike) else alike


def _judge(work: _Work, judge: Judge, share: tuple[int, tuple[str, ...]]) -> _Judged:
    """The messages of a share of the keys that are left out."""
    number, files = share
    batches = []
    for path in files:
        with pa.memory_map(path) as source:
            batches += pa.ipc.open_stream(source).read_all().to_batches()
    table = pa.Table.from_batches(batches, _SCHEMA).combine_chunks()
    out = os.path.join(work.folder, f"out-{number}-{secrets.token_hex(6)}.npy")
    if not len(table):
        np.save(out, np.zeros(0, np.int64))
        return _Judged(out, 0)
    coded = table.column("key").combine_chunks().dictionary_encode()
    columns = {name: table.column(name).to_numpy().astype(np.int64) for name in _SCHEMA.names[1:-1]}
    rows = Rows(coded.indices.to_numpy().astype(np.int64), **columns, empty=table.column("empty").to_numpy())
    left_out = judge(rows)
    np.save(out, np.sort(rows.queue[left_out] << _SLOT_BITS | rows.slot[left_out]))
    return _Judged(out, len(coded.dictionary))


def _copy(work: _Work, left_out: tuple[str, ...], rewrite: Rewrite, part: Part) -> Staged:
    """Pass 2."""
    files = [np.load(path, mmap_mode="r") for path in left_out]
    try:
        return stage(rewrite, part, sift=_Sieve(work, files))
    finally:
        del files


class _Sieve:
    """Which rows of a piece nobody has left out."""

    def __init__(self, work: _Work, files: Sequence[_Int64s]) -> None:
        self._work = work
        self._files = files
        self._slice: QueueSlice | None = None
        self._slots: _Int64s = np.zeros(0, np.int64)

    def __call__(self, piece: QueueSlice, found: Piece) -> _Bools | None:
        if piece != self._slice:
            self._slice, self._slots = piece, self._of(piece)
        if not len(self._slots):
            return None
        at = np.minimum(np.searchsorted(self._slots, found.slots), len(self._slots) - 1)
        kept: _Bools = self._slots[at] != found.slots
        return kept

    def _of(self, piece: QueueSlice) -> _Int64s:
        base = self._work.queues[piece.store.id, piece.topic, piece.queue_id] << _SLOT_BITS
        parts: list[_Int64s] = []
        for file in self._files:
            low, high = np.searchsorted(file, [base | piece.start, base | piece.stop])
            parts.append(np.asarray(file[low:high]) - base)
        slots = np.concatenate([np.zeros(0, np.int64), *parts])
        found: _Int64s = np.sort(slots)
        return found
