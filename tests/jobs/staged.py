"""A write without Spark: what its tasks and its driver do, for the tests of staging and publishing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from mqstore.clock import SYSTEM_CLOCK
from mqstore.columnar.encode import Encoded, Encoder
from mqstore.engine import Clock
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.jobs.options.options import SinkOptions
from mqstore.jobs.writing.publish import Commit, commit, make_member, plan_target
from mqstore.jobs.writing.staging import ShardInfo, transaction_folder, write_shards
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.log.support import all_queues


def options_of(path: Path, **given: str) -> SinkOptions:
    return SinkOptions.parse({"path": str(path), "topic": "t", **given})


def batch_of(bodies: Sequence[str], **columns: Sequence[Any]) -> pa.RecordBatch:
    types = {"delay_level": pa.int32(), "queue_id": pa.int32()}
    arrays = [pa.array(list(bodies), pa.string())]
    arrays += [pa.array(list(values), types.get(name)) for name, values in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=["body", *columns])


def records(pieces: Iterable[Encoded]) -> list[bytes]:
    """Each record of what was encoded; they lie side by side, and are as many as was said."""
    found: list[bytes] = []
    for piece in pieces:
        start = 0
        data = bytes(piece.data)
        count = len(found)
        while start < len(data):
            size = int.from_bytes(data[start : start + 4], "big")
            found.append(data[start : start + size])
            start += size
        assert (start, len(found) - count) == (len(data), piece.records)
        assert [*map(len, found[count:])] == piece.sizes.tolist()
        assert sum(piece.queues.values()) == piece.records
    return found


def stage(
    options: SinkOptions,
    app: str,
    version: int,
    partitions: Sequence[pa.RecordBatch],
    *,
    attempt: int = 0,
    fs: FileSystem = REAL,
    clock: Clock = SYSTEM_CLOCK,
) -> list[ShardInfo]:
    """What the tasks of a job do, one after the other."""
    rules = plan_target(options)
    folder = transaction_folder(Path(options.path), app, version)
    shards: list[ShardInfo] = []
    for partition, batch in enumerate(partitions):
        encoder = Encoder(
            rules,
            app=app,
            version=version,
            partition=partition,
            topic=options.topic,
            max_rows=options.max_rows_per_shard,
            clock=clock,
        )
        pieces = encoder.encode(batch)
        for shard in write_shards(
            pieces,
            folder,
            partition,
            attempt,
            profile=rules.profile,
            durable=options.target == "inbox",
            max_rows=options.max_rows_per_shard,
            fs=fs,
        ):
            if options.target == "set":
                make_member(folder, shard, options, fs=fs)
            shards.append(shard)
    return shards


def write(
    options: SinkOptions, app: str, version: int, *partitions: Sequence[str], overwrite: bool = False, **how: Any
) -> int | None:
    """A whole job."""
    shards = stage(options, app, version, [batch_of(bodies) for bodies in partitions], **how)
    return commit(options, Commit(app, version, shards, overwrite=overwrite), **how)


def bodies(path: Path) -> list[str]:
    """The bodies of all messages of a store, queue by queue; the store must verify."""
    with ReadOnlyMessageStore(path) as store:
        assert [*store.verify()] == []
        refs = all_queues(store)
        return [message.body.decode() for ref in refs for message in store.iter(*ref)]


def manifest(root: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((root / "mqstore-set.json").read_text())
    except FileNotFoundError:
        return {"stores": {}}
    return found


def set_bodies(root: Path) -> list[str]:
    """The bodies in all stores that a set's manifest names."""
    members: Mapping[str, str] = manifest(root)["stores"]
    return [body for where in members.values() for body in bodies(root / where)]
