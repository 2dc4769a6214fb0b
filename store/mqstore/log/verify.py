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
from mqstore.layout.dispatch import Rows, rows_of
from mqstore.layout.record import Checksum
from mqstore.log.consumequeue import ConsumeQueue, QueueTable
from mqstore.log.index import Index
from mqstore.log.names import is_path_safe
from mqstore.log.report import Finding, Kind
from mqstore.log.reput import slot_runs
from mqstore.log.scanner import Bad, End, Good, scan_log

__all__ = ["Verifier", "missing_entries"]


def _fingerprints(hashes: npt.NDArray[np.int32], physical: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """One number for (hash, physical offset); equal pairs are equal, others almost never."""
    mixed = physical.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return mixed ^ hashes.astype(np.uint64)


def missing_entries(index: Index, wanted: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]) -> int:
    """How many of the entries `wanted`, arrays of (hash, physical offset), are in no index file."""
    present = [np.zeros(0, np.uint64)]
    present += [_fingerprints(*file.entries(index.entries_per_file)) for file in index.files]
    there = np.unique(np.concatenate(present))
    missing = 0
    for hashes, physical in wanted:
        asked = _fingerprints(hashes, physical)
        at = np.searchsorted(there, asked)
        at[at == len(there)] = 0
        missing += int(np.count_nonzero(there[at] != asked)) if len(there) else len(asked)
    return missing


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
        self._entries_wanted: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = []

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
        if not self._has_checkpoint and self._run.starts:
            yield Finding("bad_checkpoint", "checkpoint", 0, 0, "missing or too short; opening will read the whole log")

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
            expected = self._next_slot.get(queue, int(offsets[0]))
            for low, high in slot_runs(expected, offsets):
                first = int(offsets[low])
                if first > expected:
                    yield from self._no_record(queue, expected, first)
                yield from self._compare(queue, first, rows.units(chosen[low:high]))
                expected = first + high - low
            self._next_slot[queue] = expected

    def _compare(self, queue: ConsumeQueue, first: int, wanted: npt.NDArray[np.void]) -> Iterator[Finding]:
        if not self._clean or self._live:
            # Not dispatched yet: whoever opens the store next, or holds it now, builds these.
            wanted = wanted[: max(0, queue.max_offset - first)]
        found = queue.units(first, len(wanted))
        wrong = found != wanted
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
            # No record of this queue is in the log: all of its units must be older than the log.
            min_physical = self._run.starts[0] if self._run.starts else 1 << 62
            for at, units in queue.chunks(queue.first_offset(), queue.max_offset):
                wrong = (units["physical_offset"] >= min_physical) & ~is_void(units)
                yield from self._ranges(queue, "bad_unit", at, wrong, "the unit's record is not in the log")
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
        files = [file.header for file in self._index.files if file.header.next_entry > 1]
        if not files or not len(rows.entry_row):
            return
        physical = rows.physical_offset[rows.entry_row]
        # Outside of what the files span the index may simply begin later, or lag behind.
        inside = (physical >= files[0].begin_physical_offset) & (physical < files[-1].end_physical_offset)
        if inside.any():
            self._entries_wanted.append((rows.entry_hash[inside], physical[inside]))

    def _index_files(self) -> Iterator[Finding]:
        yield from self._index_findings
        yield from self._index.check()
        missing = missing_entries(self._index, self._entries_wanted)
        if missing:
            name = f"index/{self._index.files[0].name}" if self._index.files else "index"
            yield Finding("bad_index", name, 0, 0, f"{missing} keys of the log have no entry")

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
