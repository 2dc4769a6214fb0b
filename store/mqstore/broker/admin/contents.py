"""Contents of a store directory: the value of `mqstore inspect --json`.

    {"path", "profile", "checksum", "store_id", "clean_shutdown", "writer_alive", "recovery_needed",
     "undispatched_bytes", "incomplete_queue": None or {"topic", "queue_id"},
     "commitlog":  {"min_offset", "max_offset", "segment_bytes", "messages",
                    "segments": [{"file", "start", "end", "length", "used", "messages",
                                  "first_store_timestamp_ms", "last_store_timestamp_ms"}, ...],
                    "damaged": [[start, end], ...]},
     "topics":     {TOPIC: {"queues": {"0": {"min_offset", "max_offset",
                                             "min_physical_offset", "max_physical_offset"}}}},
     "index":      {"files", "entries", "slots", "entries_per_file"},
     "checkpoint": {"physic_msg_timestamp_ms", "logics_msg_timestamp_ms", "index_msg_timestamp_ms",
                    "confirm_physical_offset", "flushed", "dispatched", "clean_end"},
     "splice":     {"pending": None or {"app", "version", "start"}, "inbox": [name, ...], "refused": [name, ...],
                    "staged": [name, ...]},
     "consumer_offsets": {GROUP: {TOPIC: {"0": n}}}, "delay_offsets": {"1": n}, "order_info": {"TOPIC@GROUP": {...}},
     "problems":   [sentence, ...], "broker": {...}}

Offsets are physical (bytes in the commitlog), except a queue's `min_offset` and `max_offset`, which count messages. A
`max_` is exclusive: the end of a record, or the next offset. A queue without messages has -1 for its physical offsets.
A segment covers the bytes [`start`, `end`), its file has `length` bytes, and records fill `used`. `damaged` has at most
1000 ranges of the log. `undispatched_bytes` are whole records that are in no queue yet. `incomplete_queue` is a queue
that lacks messages of the log while no writer has the store. There may be more. `order_info` is the broker's table as
it is in the file. `inspect.py` has the members of `broker`.

This takes no lock, needs no `config/`, and changes nothing, not even file times (see `files.quiet`). It follows
lengths, magic numbers and offsets of the log. It computes no checksums, since `verify` does that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqstore import arrays as np
from mqstore.broker.admin.inspect import inspect_broker
from mqstore.broker.tables.configchecks import CONFIG_CHECKS
from mqstore.broker.tables.configfile import object_member
from mqstore.broker.tables.external_offsets import ExternalOffsetFiles
from mqstore.errors import MQStoreError
from mqstore.files.jsonfile import load_json
from mqstore.files.lock import writer_alive
from mqstore.files.readonly_fs import QUIET
from mqstore.files.safe_open import resolved
from mqstore.files.segment import place_in_file
from mqstore.layout.consumequeue import UNIT, VOID_SIZE, is_message
from mqstore.log.bulk.inbox import inbox_state
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.names import is_path_safe
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.scanning.scanner import NEVER_TORN, Bad, End, Good, scan_log, until_torn

_MAX_PROBLEMS = 1000
"""Maximum number of sentences in `problems`. A damaged store may have millions of faults."""
_CHECKPOINT = (
    *("physic_msg_timestamp_ms", "logics_msg_timestamp_ms", "index_msg_timestamp_ms", "confirm_physical_offset"),
    *("flushed", "dispatched", "clean_end"),
)


def inspect_store(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Return the content of the store in directory `path` as plain values, as described in the module.

    Works on stores that are damaged, not closed, a Java broker's, or being written. `progress` is called with (bytes
    done, total bytes). Raises NotAStoreError, CorruptStoreError (the manifest), UnsupportedStoreError, StoreIOError and
    ReadOnlyStoreError.

    >>> import tempfile
    >>> from mqstore.log.store import MessageStore
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with MessageStore(folder) as store:
    ...         receipt = store.put("orders", b"hello")
    ...     found = inspect_store(folder)
    >>> found["commitlog"]["messages"], found["topics"]["orders"]["queues"]["0"]["max_offset"], found["clean_shutdown"]
    (1, 1, True)
    """
    path = Path(resolved(path))
    problems: list[str] = []
    live = writer_alive(path, QUIET)
    with _BoundedStore(path, fs=QUIET) as store:
        if live:
            store.stop_at(store.parts.listed_end())
        manifest = store.manifest
        problems += [*manifest.problems, *([manifest.derived] if manifest.derived else [])]
        problems += [
            f"{os.path.basename(p.file)}: {p.kind}: {p.detail}"
            for p in [*store.parts.load_problems, *store.parts.missing_in_front()]
        ]
        problems += [f"{finding.file}: {finding.detail}" for finding in store.parts.index_findings]
        problems += [f"consumequeue/{name}: this folder cannot be a queue" for name in store.queue_table.unsafe_names]
        problems += store.foreign()
        topics: dict[str, Any] = {}
        dispatched = 0
        for queue in sorted(store.queue_table, key=lambda q: (q.topic, q.queue_id)):
            if not queue.max_offset:
                continue
            first, end = store.bounds[queue]
            if end <= store.log_files.end:  # else the unit is dangling, which `verify` reports
                dispatched = max(dispatched, end)
            topics.setdefault(queue.topic, {"queues": {}})["queues"][str(queue.queue_id)] = {
                "min_offset": queue.min_offset,
                "max_offset": queue.max_offset,
                "min_physical_offset": first,
                "max_physical_offset": end,
            }
        commitlog, undispatched, torn = _walk_log(store, dispatched, problems, progress, live=live)
        incomplete = store.unlisted_queue()
        checkpoint = store.parts.checkpoint
        if torn and not live:
            problems.append(torn)
        index_limit = store.index.entries_per_file
        entries = sum(min(max(0, header.next_entry - 1), index_limit) for _, header in store.index.headers())
        found = {
            "path": os.fspath(path),
            "profile": manifest.profile,
            "checksum": manifest.checksum,
            "store_id": manifest.store_id,
            "clean_shutdown": store.clean_shutdown,
            "writer_alive": live,
            "recovery_needed": not live and (not store.clean_shutdown or bool(torn) or undispatched > 0),
            "undispatched_bytes": undispatched,
            "incomplete_queue": None if incomplete is None else incomplete._asdict(),
            "commitlog": commitlog,
            "topics": topics,
            "index": {
                "files": len(store.index.files),
                "entries": entries,
                "slots": store.index.slots,
                "entries_per_file": index_limit,
            },
            "checkpoint": {name: getattr(checkpoint, name) for name in _CHECKPOINT},
        }
        broker = inspect_broker(store)
        pending = store.pending_splice
        inbox = inbox_state(path, QUIET)
        found["splice"] = {
            "pending": None
            if pending is None
            else {"app": pending.app, "version": pending.version, "start": pending.start},
            "inbox": list(inbox.waiting),
            "refused": list(inbox.refused),
            "staged": list(inbox.staged),
        }
        problems += [
            f"inbox/refused/{name}: this bundle could not be spliced; see its reason.txt" for name in inbox.refused
        ]
    found["consumer_offsets"] = _consumer_offsets(path, problems)
    found["delay_offsets"] = _table(path, "delayOffset.json", "offsetTable", problems)
    found["order_info"] = _table(path, "consumerOrderInfo.json", "table", problems)
    for name in ("topics.json", "subscriptionGroup.json"):  # the broker's view has their values, if it can load them
        _table(path, name, "", problems)
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [f"and {len(problems) - _MAX_PROBLEMS} more: see `mqstore verify`"]
    return {**found, "problems": problems, "broker": broker}


class _BoundedStore(ReadOnlyMessageStore):
    """Store that notes the bounds of each queue while its file is open: of many queues only some files stay open."""

    def _load_queues(self) -> None:
        self.bounds: dict[ConsumeQueue, tuple[int, int]] = {}
        super()._load_queues()

    def _bound(self, queue: ConsumeQueue) -> None:
        super()._bound(queue)
        self.bounds[queue] = _physical_bounds(queue)


def _physical_bounds(queue: ConsumeQueue) -> tuple[int, int]:
    """Return (physical offset of the first message, end of the last record), or (-1, -1) without one."""
    ends = [UNIT.unpack(queue.kept(offset, 1)) for offset in (queue.min_offset, queue.max_offset - 1)]
    if all(physical >= 0 < size < VOID_SIZE for physical, size, _ in ends):  # usually, and arrays take longer
        return ends[0][0], sum(ends[1][:2])
    ways = queue.held(queue.min_offset, queue.max_offset), queue.held_before(queue.max_offset, 64)
    first, last = (next(filter(len, (units[is_message(units)] for _, units in way)), None) for way in ways)
    if first is None or last is None:
        return -1, -1
    return int(first["physical_offset"][0]), int(last["physical_offset"][-1]) + int(last["size"][-1])


def _walk_log(
    store: StoreReader, dispatched: int, problems: list[str], progress: Callable[[int, int], None] | None, *, live: bool
) -> tuple[dict[str, Any], int, str]:
    """Return the `commitlog` part, the undispatched bytes, and the reason why the log ends, or "".
    Undispatched bytes are those of whole records at or beyond `dispatched` that a queue should list. The reason
    describes bytes after the last record."""
    run = store.log_files
    size = run.segment_bytes
    segments: dict[int, dict[str, Any]] = {
        segment.start: {
            "file": f"commitlog/{os.path.basename(segment.path)}",
            "start": segment.start,
            "end": segment.end,
            "length": segment.length,
            "used": 0,
            "messages": 0,
            "first_store_timestamp_ms": None,
            "last_store_timestamp_ms": None,
        }
        for segment in run.segments()
    }
    first = run.min_offset
    end, undispatched, torn = first, 0, ""
    damaged: list[tuple[int, int]] = []

    def drop_before(front: int) -> None:
        for start in [start for start in segments if start < front]:
            del segments[start]

    events = scan_log(run, first, store.checksum, checksums=False, on_front=drop_before)
    # While a writer runs, all records before the end that is read here are complete.
    for event in until_torn(events, lambda: NEVER_TORN if live else store.parts.torn_from()) if segments else ():
        if isinstance(event, Good):
            for start, stop, stamps in event.by_segment(size):
                entry = segments[start]
                if entry["first_store_timestamp_ms"] is None:
                    entry["first_store_timestamp_ms"] = stamps.item(0)
                entry["last_store_timestamp_ms"] = stamps.item(-1)
                entry["messages"] += len(stamps)
                entry["used"] = stop - start
            end = event.end
            if event.end > dispatched:
                undispatched += _without_queue(store, event, dispatched)
            if progress is not None:
                progress(event.end - first, run.end - first)
        elif isinstance(event, Bad):
            damaged += [(event.start, event.end)] * (len(damaged) < _MAX_PROBLEMS)
            file, at = place_in_file(event.start, size)
            problems.append(f"{file}: {event.kind} at {at}, {event.end - event.start} bytes: {event.detail}")
        elif isinstance(event, End):
            end = event.position
            if event.detail:
                file, at = place_in_file(event.position, size)
                torn = f"{file}: the log ends at {at}: {event.detail}"
    return (
        {
            "min_offset": min(segments, default=end) if first else first,
            "max_offset": end,
            "segment_bytes": size,
            "messages": sum(entry["messages"] for entry in segments.values()),
            "segments": list(segments.values()),
            "damaged": damaged,
        },
        undispatched,
        torn,
    )


def _without_queue(store: StoreReader, good: Good, dispatched: int) -> int:
    """Return the bytes of the records at or beyond `dispatched` that dispatch would give a unit."""
    rows = store.queue_table.rows_of(good.buffer, good.headers, good.base)
    safe = np.array([*map(is_path_safe, rows.topics)], np.bool_)
    records = slice(len(rows))  # light queues do not count again
    late = rows.has_unit[records] & (rows.queue_id[records] >= 0) & (rows.physical_offset[records] >= dispatched)
    late &= safe[rows.topic[records]]
    return int(rows.size[records][late].sum(dtype=np.int64))


def _consumer_offsets(root: Path, problems: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Return group -> topic -> queue id -> offset, with published offsets that wait for the owner."""
    offsets: dict[str, dict[str, dict[str, int]]] = {}
    for key, queues in _table(root, "consumerOffset.json", "offsetTable", problems).items():
        topic, at, group = key.partition("@")
        if at and "@" not in group and queues:
            offsets.setdefault(group, {})[topic] = dict(
                sorted(queues.items(), key=lambda item: (len(item[0]), item[0]))
            )
    for group, progress in ExternalOffsetFiles(root, QUIET, problems.append).look():
        for (topic, queue_id), offset in progress.items():
            offsets.setdefault(group, {}).setdefault(topic, {})[str(queue_id)] = offset
    return offsets


def _table(root: Path, name: str, field: str, problems: list[str]) -> dict[str, Any]:
    """Return a table of `config/`, in either dialect of JSON, or an empty one if it is bad.
    Adds a sentence to `problems` about a table that the broker would not load."""
    try:
        check = CONFIG_CHECKS[f"config/{name}"]
        value, found = load_json(root / "config" / name, writer=False, fs=QUIET, check=check, root=root)
    except (MQStoreError, OSError) as error:
        problems.append(f"config/{name}: {error}")
        return {}
    problems += found
    return object_member(value or {}, field)
