"""Shards: the files that a task of a write stages for the commit, and their cleanup (spark#stage, step 1).

    <root>/_staging/<app>-<version>/<partition>-<attempt>-<random>/
        records.bin    adjacent records, without their offsets
        shard.json     description of the records; written last
        store/         with target=set, instead of these two: a store with the records

`root` is the store or the set, because a commit renames within one file system. A commit uses one attempt of each
partition. The others are deleted with the folder of their transaction. If two drivers have the same (app, version) and
one is aborted, the commit of the other raises an error because its shards are missing.
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

from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.columnar.encode import Encoded
from mqstore.columnar.inputs import TopicRule
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.log.bulk.shard import shard_json
from mqstore.log.writing.log_tail import QueueRef
from mqstore.native import crc32c
from mqstore.options import Profile

STAGING: Final = "_staging"
_BUFFER_BYTES = 4 << 20
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A finished shard, as a task reports it to the commit. Small and plain, since it is pickled."""

    name: str
    """Name of its folder in the folder of its transaction."""
    records: int
    bytes: int
    largest: int
    queues: dict[QueueRef, int]
    """Number of records by queue."""
    topics: dict[str, TopicRule | None]
    """Rules of topics, like in `Encoded`."""


def transaction_folder(root: Path, app: str, version: int) -> Path:
    """Return the staging folder of (app, version). `app` matches `options.APP_NAME`."""
    return root / STAGING / f"{app}-{version}"


def make_folders(path: Path, fs: FileSystem = REAL) -> None:
    """Create `path` and its missing parents, and sync each parent."""
    if not fs.make_folders(path):
        fs.sync_directory(path.parent)  # the process that created it may have been killed before this sync


class ShardWriter:
    """Writer of one shard. `abandon` before `finish` deletes it. `clean` deletes leftovers of killed processes."""

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
        for start in range(0, len(piece.data), _BUFFER_BYTES):  # so the checksum finds the bytes in the CPU's cache
            data = piece.data[start : start + _BUFFER_BYTES]
            self._fs.pwrite(self._fds[0], data, self._size)
            self._crc = crc32c(data, self._crc)
            self._size += len(data)
        self.records += piece.records
        self._largest = max(self._largest, int(piece.sizes.max(initial=0)))
        self._queues.update(piece.queues)
        self._topics.update(piece.topics)

    def finish(self, profile: Profile, *, durable: bool) -> ShardInfo:
        """Write `shard.json`, which marks the records as whole. If `durable`, the records are synced first."""
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
    """Stage the encoded rows of a task, in their order. Without rows no shard is made.

    Only shards for an inbox have to be `durable`, because the store's owner reads them later. A commit to another
    target checks the shards at once and syncs the result, and a crash before that loses the write as a whole.

    `max_rows` limits the rows of a shard, so there may be several. If this raises, the unfinished shard is deleted."""
    with ExitStack() as unfinished:
        writer: ShardWriter | None = None
        for piece in pieces:
            if writer is not None and max_rows is not None and writer.records + piece.records > max_rows:
                yield writer.finish(profile, durable=durable)
                writer = None
            if writer is None:
                writer = ShardWriter(transaction, partition, attempt, fs)
                unfinished.callback(writer.abandon)
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
    """Delete staged folders of `root` that have not changed for `ttl_s` seconds, even of running jobs.
    `others` are further folders to check. Return the folders that were deleted, or would be with `dry_run`, newest
    last. For a store set use `publish.clean_target`."""
    now_s = clock.now_ms() / 1000
    ages_s = {path: max(0.0, now_s - _changed_s(path)) for path in (*folders(root / STAGING, fs), *others)}
    old = sorted((path for path in ages_s if ages_s[path] >= ttl_s), key=lambda path: -ages_s[path])
    for path in () if dry_run else old:
        fs.remove_tree(path)
    return old


def folders(path: Path, fs: FileSystem = REAL) -> list[Path]:
    """Return the folders in `path`, without links, or [] if `path` does not exist."""
    try:
        found = [path / name for name in fs.scandir_directories(path)]
    except FileNotFoundError:
        return []
    return [each for each in found if not each.is_symlink()]


def _changed_s(path: Path) -> float:
    """Return the time of the last change in a folder, or infinity if a file is deleted meanwhile."""
    try:
        return max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        return math.inf
