"""Compare every part of a store with the commitlog, and say what does not agree (store-format 9.7).

Reads only, and never trusts: what is found is yielded as `Finding`s, in the order log, queues, index, JSON. `mqstore
verify` prints them, tests assert on them, `mqstore recover` mends what they name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mqstore.errors import CorruptStoreError, MQStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import load_json
from mqstore.files.segments import LoadProblem, SegmentRun
from mqstore.layout.checkpoint import Checkpoint
from mqstore.layout.consumequeue import UNIT_BYTES, is_void
from mqstore.layout.dispatch import Rows, rows_of, under_another_table
from mqstore.layout.record import Checksum
from mqstore.log.consumequeue import ConsumeQueue, QueueTable
from mqstore.log.index import Index
from mqstore.log.names import is_path_safe
from mqstore.log.report import Finding, Kind
from mqstore.log.scanner import Bad, End, Good, scan_log, sort_out

__all__ = ["Verifier", "Wanted", "index_faults"]


Wanted = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Index entries that the log asks for: (key hash, physical offset, store timestamp in ms)."""


def _fingerprints(hashes: npt.NDArray[np.int32], physical: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """One number for (hash, physical offset); equal pairs are equal, others almost never."""
    mixed = physical.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return mixed ^ hashes.astype(np.uint64)


def index_faults(index: Index, wanted: Sequence[Wanted]) -> list[Finding]:
    """Where the index does not say what the log asks of it: keys without an entry, and times that are not those of the
    records, which would hide a key from a query by time. Records that are not among `wanted` cannot be judged."""
    findings = []
    hashes = np.concatenate([np.zeros(0, np.int32), *(part[0] for part in wanted)])
    physical = np.concatenate([np.zeros(0, np.int64), *(part[1] for part in wanted)])
    stamps = np.concatenate([np.zeros(0, np.int64), *(part[2] for part in wanted)])
    capacity = index.entries_per_file
    there = np.unique(
        np.concatenate([np.zeros(0, np.uint64), *(_fingerprints(*f.entries(capacity)) for f in index.files)])
    )
    asked = _fingerprints(hashes, physical)
    missing = len(asked)
    if len(there):
        at = np.searchsorted(there, asked)
        at[at == len(there)] = 0
        missing = int(np.count_nonzero(there[at] != asked))
    if missing:
        name = f"index/{index.files[0].name}" if index.files else "index"
        findings.append(Finding("bad_index", name, 0, 0, f"{missing} keys of the log have no entry"))
    if not len(physical):
        return findings
    order = np.argsort(physical, kind="stable")
    physical, stamps = physical[order], stamps[order]
    for file in index.files:
        header = file.header
        _, places = file.entries(capacity)
        if not len(places):
            continue
        at = np.minimum(np.searchsorted(physical, places), len(physical) - 1)
        known = physical[at] == places
        times = stamps[at]
        seconds = (
            np.maximum(times - header.begin_timestamp_ms, 0) // 1000 if header.begin_timestamp_ms > 0 else times * 0
        )
        wrong = known & (np.minimum(seconds, 0x7FFF_FFFF) != file.seconds(capacity))
        wrong[0] = False  # RocketMQ counts that one from the end of the file before (6.3)
        name = f"index/{file.name}"
        if wrong.any():
            detail = f"{int(np.count_nonzero(wrong))} entries bear another time than their records"
            findings.append(Finding("bad_index", name, 0, 0, detail))
        if (known[0] and times[0] != header.begin_timestamp_ms) or (known[-1] and times[-1] != header.end_timestamp_ms):
            detail = "begin and end are not the times of the first and the last entry"
            findings.append(Finding("bad_index", name, 0, 16, detail))
    return findings


class Verifier:
    """One pass over a store. `messages` and `bytes` count what verified; read them when `findings` is exhausted."""

    def __init__(
        self,
        root: Path,
        run: SegmentRun,
        queues: QueueTable,
        index: Index,
        *,
        checkpoint: Checkpoint,
        has_checkpoint: bool,
        checksum: Checksum,
        delay_table_ms: Sequence[int],
        clean: bool,
        live: bool,
        problems: Sequence[LoadProblem],
        index_findings: Sequence[Finding],
        fs: FileSystem,
    ) -> None:
        self.messages = 0
        self.bytes = 0
        self.done_bytes = 0
        """How far the log has been read, for a progress bar; `total_bytes` in the end."""
        self.total_bytes = len(run.starts) * run.segment_bytes
        self._root = root
        self._run = run
        self._queues = queues
        self._index = index
        self._checkpoint = checkpoint
        self._has_checkpoint = has_checkpoint
        self._checksum = checksum
        self._delay_table_ms = delay_table_ms
        self._clean = clean
        self._live = live
        self._problems = problems
        self._index_findings = index_findings
        self._fs = fs
        self._next_slot: dict[ConsumeQueue, int] = {}
        self._last_seen: dict[ConsumeQueue, int] = {}
        self._entries_wanted: list[Wanted] = []

    def findings(self) -> Iterator[Finding]:
        """Everything that is not as it should be; nothing for a store in order."""
        yield from self._folders()
        yield from self._log()
        for queue in self._queues:
            yield from self._queue_tail(queue)
        yield from self._index_files()
        yield from self._json_files()

    # -- the log and what each record asks for ----------------------------------------------------------------------

    def _folders(self) -> Iterator[Finding]:
        for problem in self._problems:
            if problem.kind == "missing_segment":
                continue  # found again by the scan, with the records around it
            at = problem.position % self._run.segment_bytes if problem.kind == "segment_size" else 0
            name = "commitlog/" + os.path.basename(problem.file)
            yield Finding("segment_size", name, at, problem.length, problem.detail)
        for name in self._queues.unsafe_names:
            yield Finding("unsafe_name", f"consumequeue/{name}", 0, 0, "no queue can be made of this folder")
        for path, length in self._queues.short_files:
            name = os.path.relpath(path, self._root)
            missing = self._queues.segment_bytes - length
            yield Finding("segment_size", name, length, missing, f"{length} bytes instead of {length + missing}")
        if not self._has_checkpoint and self._run.starts:
            yield Finding("bad_checkpoint", "checkpoint", 0, 0, "missing or too short; opening will read the whole log")
        elif self._has_checkpoint and self._checkpoint.flushed is None and self._checksum == "crc32c-record":
            # In the other profile a Java broker may have been at work, which is no fault.
            yield Finding("bad_checkpoint", "checkpoint", 64, 36, "the watermarks do not fit their checksum")

    def _where(self, position: int) -> tuple[str, int]:
        start = position - position % self._run.segment_bytes
        return f"commitlog/{start:020d}", position - start

    def _log(self) -> Iterator[Finding]:
        starts = self._run.starts
        if not starts:
            return
        first = starts[0]
        for event in scan_log(self._run, first, self._checksum):
            if isinstance(event, Good):
                rows = rows_of(event.buffer, event.headers, event.base, self._delay_table_ms)
                self.messages += len(rows)
                self.bytes += int(rows.size.sum(dtype=np.int64))
                self.done_bytes = event.end - first
                yield from self._units(rows)
                self._entries(rows)
            elif isinstance(event, Bad):
                name, at = self._where(event.start)
                yield Finding(event.kind, name, at, event.end - event.start, event.detail)
            elif isinstance(event, End):
                yield from self._end(event)
        self.done_bytes = self.total_bytes

    def _end(self, end: End) -> Iterator[Finding]:
        if self._live:
            return  # a record may be half-way in
        name, at = self._where(end.position)
        once = max(self._checkpoint.flushed or 0, self._checkpoint.clean_end or 0)
        if end.position < once:
            detail = f"the log once reached {once} and was synced; {end.detail or 'zeros'}"
            yield Finding("lost_tail", name, at, once - end.position, detail)
        elif end.detail:
            yield Finding("torn_tail", name, at, self._run.segment_bytes - at, end.detail)

    # -- consume queues ---------------------------------------------------------------------------------------------

    def _units(self, rows: Rows) -> Iterator[Finding]:
        for topic, queue_id, chosen in rows.by_queue():
            if queue_id < 0 or not is_path_safe(topic):
                name, at = self._where(int(rows.physical_offset[chosen[0]]))
                yield Finding("unsafe_name", name, at, 0, f"topic {topic!r}, queue {queue_id} can be no folder")
                continue
            queue = self._queues.create(topic, queue_id)
            offsets = rows.queue_offset[chosen]
            physical = rows.physical_offset[chosen]
            expected = self._next_slot.get(queue)
            runs, odd = sort_out(expected, self._last_seen.get(queue, 0), offsets, physical)
            for i in odd:
                name, at = self._where(int(physical[i]))
                detail = f"queueOffset {offsets[i]} of {topic}/{queue_id} does not follow those around it"
                yield Finding("bad_record", name, at, int(rows.size[chosen[i]]), detail)
            for low, high in runs:
                first = int(offsets[low])
                if expected is None:
                    yield from self._front(queue, first)
                elif first > expected:
                    yield from self._no_record(queue, expected, first)
                yield from self._compare(queue, first, rows.units(chosen[low:high]))
                expected = first + high - low
                self._next_slot[queue] = expected
            self._last_seen[queue] = int(physical[-1])

    def _front(self, queue: ConsumeQueue, stop: int) -> Iterator[Finding]:
        """Units before the queue's first record must be those of records that retention took."""
        first = self._run.starts[0] if self._run.starts else 1 << 62
        for at, units in queue.chunks(queue.first_offset(), min(stop, queue.max_offset)):
            wrong = (units["physical_offset"] >= first) & ~is_void(units)
            yield from self._ranges(queue, "bad_unit", at, wrong, "the unit's record is not in the log")

    def _compare(self, queue: ConsumeQueue, first: int, wanted: npt.NDArray[np.void]) -> Iterator[Finding]:
        if not self._clean or self._live:
            # Not dispatched yet: whoever opens the store next, or holds it now, builds these.
            wanted = wanted[: max(0, queue.max_offset - first)]
        found = queue.units(first, len(wanted))
        wrong = found != under_another_table(queue.topic, found, wanted)
        if wrong.any():
            missing = found["size"] == 0
            yield from self._ranges(queue, "missing_units", first, wrong & missing, "no unit for a record of the log")
            yield from self._ranges(queue, "bad_unit", first, wrong & ~missing, "the unit differs from its record")

    def _no_record(self, queue: ConsumeQueue, low: int, high: int) -> Iterator[Finding]:
        for at, units in queue.chunks(low, min(high, queue.max_offset)):
            yield from self._ranges(queue, "bad_unit", at, ~is_void(units), "the unit's record is not in the log")

    def _queue_tail(self, queue: ConsumeQueue) -> Iterator[Finding]:
        known = self._next_slot.get(queue)
        if known is None:
            yield from self._front(queue, queue.max_offset)  # no record of this queue is in the log
        elif not self._live:
            yield from self._no_record(queue, known, queue.max_offset)

    def _ranges(
        self, queue: ConsumeQueue, kind: Kind, first: int, wrong: npt.NDArray[np.bool_], detail: str
    ) -> Iterator[Finding]:
        """A finding for each run of wrong units that lie together in one file."""
        at = np.flatnonzero(wrong)
        if not len(at):
            return
        per = self._queues.units_per_segment
        slots = at + first
        breaks = np.flatnonzero((np.diff(slots) > 1) | (np.diff(slots // per) > 0)) + 1
        for group in np.split(slots, breaks):
            segment, index = divmod(int(group[0]), per)
            file = f"consumequeue/{queue.topic}/{queue.queue_id}/{segment * self._queues.segment_bytes:020d}"
            units = f"unit {group[0]}" if len(group) == 1 else f"units {group[0]}..{group[-1]}"
            yield Finding(kind, file, index * UNIT_BYTES, len(group) * UNIT_BYTES, f"{units}: {detail}")

    # -- index and JSON ---------------------------------------------------------------------------------------------

    def _entries(self, rows: Rows) -> None:
        """Note the keys of these records that the index should have."""
        physical = rows.physical_offset[rows.entry_row]
        if self._checkpoint.flushed is not None and self._clean and not self._live:
            inside = np.ones(len(physical), np.bool_)  # ours, and closed: every key has its entry
        else:
            # Outside of what the files span the index may simply begin later, or lag behind.
            files = [file.header for file in self._index.files if file.header.next_entry > 1]
            if not files:
                return
            inside = (physical >= files[0].begin_physical_offset) & (physical < files[-1].end_physical_offset)
        if inside.any():
            stamps = rows.store_timestamp_ms[rows.entry_row[inside]]
            self._entries_wanted.append((rows.entry_hash[inside], physical[inside], stamps))

    def _index_files(self) -> Iterator[Finding]:
        yield from self._index_findings
        yield from self._index.check()
        yield from index_faults(self._index, self._entries_wanted)

    def _json_files(self) -> Iterator[Finding]:
        folder = self._root / "config"
        names = {"mqstore.json"} if (self._root / "mqstore.json.bak").exists() else set()
        paths = [self._root / name for name in names]
        if folder.is_dir():
            found = {n.removesuffix(".bak") for n in os.listdir(folder) if n.endswith((".json", ".json.bak"))}
            paths += [folder / name for name in sorted(found)]
        for path in paths:
            name = str(path.relative_to(self._root))
            try:
                _, problems = load_json(path, writer=False, fs=self._fs)
            except CorruptStoreError as error:
                yield Finding("bad_json", name, error.position or 0, 0, str(error))
            except (MQStoreError, OSError) as error:
                yield Finding("bad_json", name, 0, 0, str(error))
            else:
                for problem in problems:
                    yield Finding("bad_json", name, 0, 0, problem)
