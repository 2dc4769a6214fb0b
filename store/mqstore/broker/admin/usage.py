"""Use of a disk by a store: the value of `mqstore du --json`.

    {"path", "taken_ms", "writer_alive", "bytes", "free_bytes", "disk_bytes",
     "parts":     by name, {"files", "bytes"},
     "topics":    [{"topic", "messages", "log_bytes", "queue_bytes", "consumed_bytes"}, ...],   largest first
     "log":       {"start", "end", "segment_bytes", "segments", "topic_bytes", "other_bytes", "unused_bytes"},
     "retention": {"age_ms", "max_bytes", "consumed_bytes", "due_bytes", "next_ms", "last_ms", "held_bytes"},
     "front":     {"physical_offset", "topic", "queue_id", "queue_offset", "group", "why", "since_ms"} or null,
     "snapshots": [{"path", "bytes", "linked_bytes", "partial"}, ...],
     "map":       {"start", "cell_bytes", "consumed", "live", "system"}, with lists of bytes by cell, only on request,
     "not_shown": reasons by section}

Sizes of files count blocks of the disk. Those of messages are the lengths of their records, from the units of queues.
The log is not read. `consumed_bytes` of a topic are those before the first message that a group needs, or null for a
system topic. Of the log, `other_bytes` are in no queue, such as unused ends of segments, deleted topics, and damage.

Retention deletes whole segments. `consumed_bytes` are segments before the front, the oldest message that is still
needed (delivery#retention-bound). `due_bytes` of them are deleted as soon as a broker runs, the next ones at `next_ms`,
the last ones at `last_ms`. `held_bytes` would be deleted now if nothing needed them.
"""

from __future__ import annotations

import os
import shutil
import stat
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mqstore import arrays as np
from mqstore.broker.admin.inspect import front_of
from mqstore.broker.background.context import kept_for_consumers, open_tables
from mqstore.broker.tables.names import is_system_topic
from mqstore.errors import FormatError, MQStoreError
from mqstore.files.lock import writer_alive
from mqstore.files.readonly_fs import QUIET
from mqstore.files.safe_open import resolved
from mqstore.layout.arrays.dispatch import LIGHT_PREFIX
from mqstore.layout.consumequeue import is_message
from mqstore.layout.jsontext import decode
from mqstore.log.directory.manifest import MANIFEST
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.writing.retention import expired_before, newest_time
from mqstore.options import Retention, seconds

PARTS: Final = {
    "commitlog": "log",
    "consumequeue": "queues",
    "index": "index",
    "config": "config",
    "cut": "quarantine",
    "timerlog": "timer",
    "timerwheel": "timer",
    "inbox": "staged",
    "_staging": "staged",
}
"""Part of the store by the name of its folder or file."""
_MANIFEST_BYTES: Final = 1 << 20
_NEIGHBOURS: Final = 1000
"""Limit of folders next to the store that are examined for snapshots."""
_UNKNOWN_MS: Final = 1 << 62
_CELLS: Final = 10_000
"""Limit of the cells of a map. A damaged store may name offsets up to 2^63."""


def disk_usage(
    path: str | os.PathLike[str],
    *,
    retention: Retention | None = None,
    cell_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the bytes of the store at `path`, and why they are kept, as `mqstore du --json` prints it.

    `retention` is the policy of its writer, by default the default one, since it is not in the files. With `cell_bytes`
    the result has a map of the log in cells of that size, or larger ones if these were too many. `progress` is called
    with (units read, all units). Reads 20 bytes for each message, and the names of files. Changes nothing. Raises the
    errors of opening a store for reading.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mqstore.open(folder) as store:
    ...         size = store.put("orders", b"hello").size
    ...     found = disk_usage(folder)
    >>> [(row["messages"], row["log_bytes"] == size, row["consumed_bytes"]) for row in found["topics"]]
    [(1, True, 0)]
    """
    root = Path(resolved(path))
    policy = retention or Retention()
    not_shown: dict[str, str] = {}
    with ReadOnlyMessageStore(root, fs=QUIET) as store:
        files, queue_bytes, linked = _parts(root)
        result = {"path": os.fspath(root), "taken_ms": store.clock.now_ms(), **files}
        needed: dict[tuple[str, int], int] | None = None
        front = None
        try:
            tables = open_tables(store)
            needed = {(each.topic, each.queue_id): each.first for each in kept_for_consumers(tables)}
            front = front_of(tables)
        except (MQStoreError, OSError, LookupError, ValueError) as error:
            not_shown["front" if needed is not None else "consumed"] = str(error)
        cells = LogMap(store.log_files.min_offset, store.log_files.end, cell_bytes) if cell_bytes is not None else None
        result["topics"] = _topics(store, needed, queue_bytes, cells, progress)
        if cells is not None:
            result["map"] = cells.as_dict()
        listed = max(store.parts.listed_end(), store.log_files.min_offset)
        topic_bytes = sum(row["log_bytes"] for row in result["topics"])
        result["log"] = {
            "start": store.log_files.min_offset,
            "end": listed,
            "segment_bytes": store.log_files.segment_bytes,
            "segments": len(store.log_files.starts),
            "topic_bytes": topic_bytes,
            "other_bytes": max(0, listed - store.log_files.min_offset - topic_bytes),
            "unused_bytes": max(0, store.log_files.end - listed),
        }
        bound = listed if front is None else max(0, front["physical_offset"] - front["reach"])
        known = front is not None or not not_shown
        while True:
            try:
                first = store.log_files.min_offset
                result["retention"] = _retention(store, policy, bound if known else first, listed)
                break
            except FileNotFoundError:  # a writer has just deleted the first segments
                store.news.list_again()
        if front is not None:
            since = None
            with suppress(LookupError):
                since = store.at(front["physical_offset"]).store_timestamp_ms
            del front["rolls"], front["reach"]
            front["since_ms"] = since
        result["front"] = front
        result["snapshots"] = [*_snapshots(root, store.manifest.store_id, linked)]
    return {**result, "not_shown": not_shown}


def _parts(root: Path) -> tuple[dict[str, Any], Counter[str], set[tuple[int, int]]]:
    """Return sizes by part, those of queues by topic, and the files that have several names, as (device, inode)."""
    parts: dict[str, Counter[str]] = {name: Counter() for name in dict.fromkeys([*PARTS.values(), "other"])}
    queue_bytes, linked = Counter[str](), set[tuple[int, int]]()
    for name, found in _files(root):
        first, _, rest = name.partition(os.sep)
        size = found.st_blocks * 512
        parts[PARTS.get(first, "other")].update(files=1, bytes=size)
        if first == "consumequeue":
            queue_bytes[rest.partition(os.sep)[0]] += size
        if found.st_nlink > 1:
            linked.add((found.st_dev, found.st_ino))
    disk = shutil.disk_usage(root)
    files = {
        "writer_alive": writer_alive(root, QUIET),
        "bytes": sum(part["bytes"] for part in parts.values()),
        "free_bytes": disk.free,
        "disk_bytes": disk.total,
        "parts": {name: {"files": part["files"], "bytes": part["bytes"]} for name, part in parts.items()},
    }
    return files, queue_bytes, linked


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path below `root`, status) of each file, links themselves included. Files that vanish are left out."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in QUIET.scandir(root / folder):
                with suppress(FileNotFoundError):
                    path = os.path.join(folder, name)
                    found = os.lstat(root / path)
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(path)
                    else:
                        yield path, found


def _topics(
    store: ReadOnlyMessageStore,
    needed: dict[tuple[str, int], int] | None,
    queue_bytes: Counter[str],
    cells: LogMap | None,
    progress: Callable[[int, int], None] | None,
) -> list[dict[str, Any]]:
    queues = [*store.queue_table]
    total, done = sum(queue.max_offset - queue.min_offset for queue in queues), 0
    rows: dict[str, dict[str, Any]] = {}
    for queue in queues:
        row = rows.setdefault(
            queue.topic,
            {
                "topic": queue.topic,
                "messages": 0,
                "log_bytes": 0,
                "queue_bytes": queue_bytes[queue.topic],
                "consumed_bytes": None if needed is None or is_system_topic(queue.topic) else 0,
            },
        )
        first = queue.max_offset if needed is None else needed.get((queue.topic, queue.queue_id), queue.max_offset)
        for offset, units in queue.held(queue.min_offset, queue.max_offset):
            sizes = units["size"] * is_message(units)
            row["messages"] += int((sizes > 0).sum())
            if not queue.topic.startswith(LIGHT_PREFIX):  # the user's topic has the same records
                row["log_bytes"] += int(sizes.sum(dtype="i8"))
                if cells is not None:
                    consumed = 0 if needed is None else max(0, first - offset)
                    cells.add(units["physical_offset"], sizes, None if is_system_topic(queue.topic) else consumed)
                if row["consumed_bytes"] is not None:
                    row["consumed_bytes"] += int(sizes[: max(0, first - offset)].sum(dtype="i8"))
            done += len(units)
            if progress is not None:
                progress(done, total)
    return sorted(rows.values(), key=lambda row: (-row["log_bytes"] - row["queue_bytes"], row["topic"]))


def _retention(store: ReadOnlyMessageStore, policy: Retention, bound: int, end: int) -> dict[str, Any]:
    """Return when retention deletes the segments before `bound`, the first byte that must stay."""
    run, now_ms = store.log_files, store.clock.now_ms()
    segments = [segment for segment in run.segments() if segment.start < end]
    starts = [segment.start for segment in segments]
    full = len(segments[:-1])
    age_ms = None if policy.age is None else int(seconds(policy.age, "age") * 1000)

    def due_ms(number: int) -> int:
        """Return the time at which a segment is old enough."""
        newest = None if age_ms is None else newest_time(run, starts[number], now_ms, {})
        return _UNKNOWN_MS if newest is None or age_ms is None else newest + age_ms

    by_size = expired_before(run, replace(policy, age=None), end, now_ms, {}) if segments else 0
    # Times ascend along the log, so few segments need to be read.
    old = bisect_left(range(full), now_ms, key=due_ms)
    expired = max(bisect_left(starts, by_size), old)
    consumed = max(0, min(full, bisect_left(starts, bound + 1) - 1))
    size = run.segment_bytes
    later = [due_ms(each) for each in (expired, consumed - 1)] if expired < consumed else [_UNKNOWN_MS] * 2
    next_ms, last_ms = (None if each == _UNKNOWN_MS else each for each in later)
    return {
        "age_ms": age_ms,
        "max_bytes": policy.max_bytes,
        "consumed_bytes": consumed * size,
        "due_bytes": min(expired, consumed) * size,
        "next_ms": next_ms,
        "last_ms": last_ms,
        "held_bytes": max(0, expired - consumed) * size,
    }


def _snapshots(root: Path, store_id: str, linked: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the copies of the store in folders next to it, also those that a killed snapshot has left."""
    with suppress(MQStoreError, OSError):
        for name in QUIET.scandir(root.parent)[:_NEIGHBOURS]:
            folder = root.parent / name
            inner = folder / "store" if ".partial-" in name else folder
            try:
                if folder == root or not stat.S_ISDIR(os.lstat(inner).st_mode):
                    continue
                manifest = decode(QUIET.read_whole(inner / MANIFEST, _MANIFEST_BYTES))
            except (MQStoreError, OSError, FormatError):
                continue
            if store_id and isinstance(manifest, dict) and manifest.get("store_id") == store_id:
                sizes = Counter[bool]()
                for _, found in _files(folder):
                    sizes[(found.st_dev, found.st_ino) in linked] += found.st_blocks * 512
                row = {"path": os.fspath(folder), "bytes": sizes[False], "linked_bytes": sizes[True]}
                yield {**row, "partial": inner != folder}


class LogMap:
    """Bytes of records in each cell of the log, which begins at `start` and ends at `end`."""

    KINDS: Final = ("consumed", "live", "system")

    def __init__(self, start: int, end: int, cell_bytes: int) -> None:
        self.start, self.end = start, end
        self.cell_bytes = max(1, cell_bytes, -(-(end - start) // _CELLS))
        shape = len(self.KINDS), -(-(end - start) // self.cell_bytes) + 1
        self._bytes = np.zeros(shape, np.int64)
        self._whole = np.zeros(shape, np.int64)
        """Changes, from each cell to the next, of the number of records that fill the cell."""

    def add(self, offsets: np.NDArray[np.int64], sizes: np.NDArray[np.int64], consumed: int | None) -> None:
        """Add records. The first `consumed` of them are consumed, the others live. None: of a system topic."""
        parts = [(2, slice(None))] if consumed is None else [(0, slice(consumed)), (1, slice(consumed, None))]
        for kind, part in parts:
            size, at = sizes[part].astype(np.int64), offsets[part].astype(np.int64)
            inside = (size > 0) & (at >= self.start) & (at <= self.end - size)
            low = at[inside] - self.start
            high = low + size[inside]
            first, last = low // self.cell_bytes, (high - 1) // self.cell_bytes
            several = last > first
            np.add.at(self._bytes[kind], first, np.minimum(high, (first + 1) * self.cell_bytes) - low)
            np.add.at(self._bytes[kind], last[several], (high - last * self.cell_bytes)[several])
            np.add.at(self._whole[kind], first[several] + 1, 1)
            np.add.at(self._whole[kind], last[several], -1)

    def as_dict(self) -> dict[str, Any]:
        """Return the `map` of `disk_usage`."""
        cells = (self._bytes + self._whole.cumsum(axis=1) * self.cell_bytes)[:, :-1]
        rows = dict(zip(self.KINDS, cells.tolist(), strict=True))
        return {"start": self.start, "cell_bytes": self.cell_bytes, **rows}
