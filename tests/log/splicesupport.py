"""Staged shards for tests, written record by record as the contract has them: nothing here is the splicer's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from mqstore.broker.broker import Broker
from mqstore.broker.tables.external_offsets import publish
from mqstore.files.filesystem import REAL
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import encode_properties
from mqstore.log.bulk.inbox import inbox_state
from mqstore.log.store import MessageStore
from tests.faults import Crash, FaultyFileSystem
from tests.log.support import all_queues, kill
from tests.records import encode_record

__all__ = [
    "Halfway",
    "Row",
    "bodies",
    "broker_on",
    "bundle",
    "kill_in_splice",
    "publish",
    "put_one_by_one",
    "refused",
    "shown",
    "stage",
    "staged",
    "waiting",
]

BORN_MS = 1_600_000_000_000


@dataclass(frozen=True)
class Row:
    """One message to be staged."""

    body: bytes
    topic: str = "orders"
    queue_id: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    flag: int = 0
    born_host: str = "127.0.0.1:0"


def staged(row: Row, store_host: str = "127.0.0.1:0") -> bytes:
    """The record of `row` as a task leaves it."""
    record = bytearray(
        encode_record(
            topic=row.topic,
            body=row.body,
            properties=encode_properties(row.properties),
            queue_id=row.queue_id,
            queue_offset=0,
            physical_offset=0,
            flag=row.flag,
            born_timestamp_ms=BORN_MS,
            born_host=encode_host(row.born_host),
            store_timestamp_ms=0,
            store_host=encode_host(store_host),
            checksum="crc32-body",
        )
    )
    record[8:12] = bytes(4)
    return bytes(record)


def stage(folder: Path, rows: Sequence[Row], profile: str = "mqstore", *, store_host: str = "127.0.0.1:0") -> Path:
    """A shard of `rows` in `folder`, which it makes."""
    records = [staged(row, store_host) for row in rows]
    return write(folder, records, described(rows, records, profile))


def described(rows: Sequence[Row], records: Sequence[bytes], profile: str) -> dict[str, Any]:
    queues: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = queues.setdefault(row.topic, {})
        counts[str(row.queue_id)] = counts.get(str(row.queue_id), 0) + 1
    data = b"".join(records)
    return {
        "version": 1,
        "profile": profile,
        "records": len(records),
        "bytes": len(data),
        "crc32c": crc32c(data),
        "largest": max(map(len, records), default=0),
        "queues": queues,
    }


def write(folder: Path, records: Sequence[bytes], said: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "records.bin").write_bytes(b"".join(records))
    (folder / "shard.json").write_text(json.dumps(said))
    return folder


def bundle(
    root: Path,
    app: str,
    version: int,
    shards: Sequence[Sequence[Row]],
    create: dict[str, int] | None = None,
    *,
    highest: dict[str, int] | None = None,
    name: str | None = None,
    profile: str = "mqstore",
) -> Path:
    """A bundle in the inbox of the store at `root`, with a shard for each of `shards`."""
    folder = root / "inbox" / (name or f"{app}-{version}")
    folder.mkdir(parents=True)
    names = [f"{i}-0-abc" for i in range(len(shards))]
    for shard, rows in zip(names, shards, strict=True):
        stage(folder / shard, rows, profile)
    said = {"version": 1, "app": app, "ver": version, "shards": names, "create": create or {}}
    if highest is not None:
        said["highest"] = highest
    (folder / "bundle.json").write_text(json.dumps(said))
    return folder


def waiting(root: Path) -> tuple[str, ...]:
    """Names of the bundles that wait in the inbox."""
    return inbox_state(root, REAL).waiting


def refused(root: Path) -> tuple[str, ...]:
    """Names of the bundles that were moved aside."""
    return inbox_state(root, REAL).refused


def broker_on(store: MessageStore) -> Broker:
    """A broker on a store that is open."""
    return Broker(store)


def put_one_by_one(store: MessageStore, rows: Sequence[Row]) -> None:
    """What a splice of `rows` must come to: each appended by itself."""
    for row in rows:
        store.append(
            row.topic,
            row.queue_id,
            row.body,
            properties=row.properties,
            flag=row.flag,
            born_timestamp_ms=BORN_MS,
            born_host=row.born_host,
        )


def shown(store: MessageStore) -> dict[tuple[str, int], list[bytes]]:
    """The bodies of every queue, each message having the offset that its place in the list says."""
    found = {}
    for ref in all_queues(store):
        first, _ = store.offsets(*ref)
        messages = list(store.iter(*ref))
        assert [message.offset for message in messages] == list(range(first, first + len(messages)))
        found[ref.topic, ref.queue_id] = [message.body for message in messages]
    return found


def bodies(store: MessageStore) -> list[bytes]:
    """Those of all queues, sorted."""
    return sorted(body for queue in shown(store).values() for body in queue)


class Halfway:
    """A progress that does something once, at the end of copying: all bytes are written, nothing is recorded."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.seen: list[tuple[int, int]] = []
        self._action = action

    def __call__(self, done: int, total: int) -> None:
        self.seen.append((done, total))
        if done == total:
            self._action()


def kill_in_splice(store: MessageStore, shards: Sequence[Path], version: int = 0) -> None:
    """Kill the owner of `store`, which has a FaultyFileSystem, when all bytes of a splice are written and nothing is
    recorded."""
    fs = store.fs
    assert isinstance(fs, FaultyFileSystem)

    def die() -> None:
        fs.crash(1)
        raise Crash

    with pytest.raises(Crash):
        store.splice(shards, app="a", version=version, progress=Halfway(die))
    fs.heal()
    kill(store)
