"""Shards: what a task of a write leaves for the commit, and how leftovers go (spark#stage, step 1).

    <root>/_staging/<app>-<version>/<partition>-<attempt>-<random>/
        records.bin    adjacent records, places not known
        shard.json     what they are; written last
        store/         target=set: in place of these, the same as a store

`root` is the store, or the set: a commit is renames within one file system. A commit names one attempt of each
partition. Others go with the folder of their transaction. If two drivers have one (app, version) and one is aborted,
the commit of the other finds its shards gone, and says so.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import crc32c

from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.columnar.encode import Encoded
from mqstore.columnar.rules import TopicRule
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.log.bulk.shard import shard_json
from mqstore.log.tip import QueueRef
from mqstore.options import Profile

__all__ = ["STAGING", "ShardInfo", "clean", "folders", "make_folders", "transaction_folder", "write_shards"]

STAGING: Final = "_staging"
_BUFFER_BYTES = 4 << 20
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A finished shard, as a task reports it to the commit. Small and plain, since it travels."""

    name: str
    """Name of its folder, within that of its transaction."""
    records: int
    bytes: int
    largest: int
    queues: dict[QueueRef, int]
    """Number of records by queue."""
    topics: dict[str, TopicRule | None]
    """Rules of topics, as in `Encoded`."""


def transaction_folder(root: Path, app: str, version: int) -> Path:
    """Return the folder in which the tasks of (app, version) stage. `app` is an `options.APP_NAME`."""
    return root / STAGING / f"{app}-{version}"


def make_folders(path: Path, fs: FileSystem = REAL) -> None:
    """Make `path` and its missing parents, each durable in the one above."""
    if not fs.make_folders(path):
        fs.sync_directory(path.parent)  # whoever made it may have been killed before it was durable


class ShardWriter:
    """Writer of one shard. `abandon` before `finish` deletes it, `clean` what a killed process left."""

    def __init__(self, transaction: Path, partition: int, attempt: int, fs: FileSystem) -> None:
        self.folder = transaction / f"{partition}-{attempt}-{secrets.token_hex(6)}"
        self.records = 0
        self._fs = fs
        self._size = 0
        self._crc = 0
        self._largest = 0
        self._queues: Counter[QueueRef] = Counter()
        self._topics: dict[str, TopicRule | None] = {}
        make_folders(self.folder, fs)
        self._fds = [fs.open(self.folder / "records.bin", _NEW)]

    def abandon(self) -> None:
        """Delete the shard unless it is finished."""
        if self._fds:
            self._close(sync=False)
            with suppress(OSError):
                self._fs.remove_tree(self.folder)

    def write(self, piece: Encoded) -> None:
        for start in range(0, len(piece.data), _BUFFER_BYTES):  # while the bytes are in the processor's cache
            data = piece.data[start : start + _BUFFER_BYTES]
            self._fs.pwrite(self._fds[0], data, self._size)
            self._crc = crc32c.crc32c(data, self._crc)
            self._size += len(data)
        self.records += piece.records
        self._largest = max(self._largest, int(piece.sizes.max(initial=0)))
        self._queues.update(piece.queues)
        self._topics.update(piece.topics)

    def finish(self, profile: Profile, *, durable: bool) -> ShardInfo:
        """Write the file that says that the records are whole. If `durable`, the records are synced before it."""
        self._close(sync=durable)
        content = shard_json(
            profile, records=self.records, size=self._size, crc=self._crc, largest=self._largest, queues=self._queues
        )
        self._fds = [self._fs.open(self.folder / "shard.json", _NEW)]
        self._fs.pwrite(self._fds[0], content, 0)
        self._close(sync=durable)
        if durable:
            self._fs.sync_directory(self.folder)
        return ShardInfo(self.folder.name, self.records, self._size, self._largest, dict(self._queues), self._topics)

    def _close(self, *, sync: bool) -> None:
        while self._fds:
            fd = self._fds.pop()
            try:
                if sync:
                    self._fs.fdatasync(fd)
            finally:
                self._fs.close(fd)


def write_shards(
    pieces: Iterable[Encoded],
    transaction: Path,
    partition: int,
    attempt: int,
    *,
    profile: Profile,
    durable: bool,
    max_rows: int | None = None,
    fs: FileSystem = REAL,
) -> Iterator[ShardInfo]:
    """Stage the encoded rows of a task, in their order. Without rows there is no shard.

    Shards have to be `durable` for an inbox alone, whose owner takes them in later. A commit of another target reads
    and checks them at once, and syncs what it makes of them; before that, nothing counts in any crash.

    `max_rows` limits the rows of a shard, so there may be several. If this raises, the unfinished shard is deleted."""
    with ExitStack() as begun:
        writer: ShardWriter | None = None
        for piece in pieces:
            if writer is not None and max_rows is not None and writer.records + piece.records > max_rows:
                yield writer.finish(profile, durable=durable)
                writer = None
            if writer is None:
                writer = ShardWriter(transaction, partition, attempt, fs)
                begun.callback(writer.abandon)
            writer.write(piece)
        if writer is not None:
            yield writer.finish(profile, durable=durable)


def clean(
    root: Path,
    ttl_s: float,
    *,
    others: Iterable[Path] = (),
    dry_run: bool = False,
    clock: Clock = SYSTEM_CLOCK,
    fs: FileSystem = REAL,
) -> list[Path]:
    """Delete everything staged under `root` that nobody has touched for `ttl_s` seconds.
    Running jobs are not spared. `others` are further folders. Returns what was deleted, or would be with `dry_run`,
    newest last. For a store set use `publish.clean_target`."""
    now_s = clock.now_ms() / 1000
    ages_s = {path: max(0.0, now_s - _changed_s(path)) for path in (*folders(root / STAGING, fs), *others)}
    old = sorted((path for path in ages_s if ages_s[path] >= ttl_s), key=lambda path: -ages_s[path])
    for path in () if dry_run else old:
        fs.remove_tree(path)
    return old


def folders(path: Path, fs: FileSystem = REAL) -> list[Path]:
    """Return the folders in `path`, sorted and without links, or [] if `path` does not exist."""
    try:
        found = [path / name for name in fs.scandir_directories(path)]
    except FileNotFoundError:
        return []
    return [each for each in found if not each.is_symlink()]


def _changed_s(path: Path) -> float:
    """Return the time of the last change in a folder, or the present time if a file vanishes meanwhile."""
    try:
        return max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        return math.inf
