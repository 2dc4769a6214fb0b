"""Files of an opened store, and how its last writer ended.

`MessageStore`, recovery, verify, exports, jobs and the broker's inspection use them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mqstore.clock import Clock
from mqstore.files.descriptors import DescriptorCache
from mqstore.files.filesystem import FileSystem, free_descriptors
from mqstore.files.segment import LoadProblem, segment_name
from mqstore.files.segments import SegmentRun
from mqstore.files.segmentwriter import SegmentWriter
from mqstore.layout.checkpoint import ENCODED_BYTES, FILE_BYTES, Checkpoint, decode, encode, is_plausible
from mqstore.layout.consumequeue import VOID_SIZE
from mqstore.log.derived.consumequeue import QueueTable
from mqstore.log.derived.index import Index
from mqstore.log.directory.manifest import Manifest
from mqstore.log.recovery.report import Finding
from mqstore.log.recovery.scanning.scanner import (
    NEVER_TORN,
    End,
    Event,
    first_record_time,
    scan_log,
    until_torn,
    watermark,
)
from mqstore.options import StoreConfig, delay_table_ms

NO_INDEX = "there is no index"
"""Doubt about a store whose index was lost, or of whose messages none has a key."""


class StoreParts:
    """Files of a store, with the sizes of its manifest. A file is opened when it is loaded or first used."""

    def __init__(
        self, root: Path, manifest: Manifest, config: StoreConfig, fs: FileSystem, clock: Clock, *, writable: bool
    ) -> None:
        # Limit of cached descriptors, and of mappings. Together they leave half of the free ones to the program.
        budget = max(4, min(config.max_mappings, free_descriptors() // 4))
        self.root = root
        self.manifest = manifest
        self.config = config
        self.fs = fs
        self.clock = clock
        self.checksum = manifest.checksum
        self.delay_table_ms = delay_table_ms(manifest.delay_levels)
        folder, size = root / "commitlog", manifest.commitlog_segment_bytes
        self.log_files = (
            SegmentWriter(folder, root / "tmp", size, fs=fs, max_mappings=budget, file_mode=config.file_mode)
            if writable
            else SegmentRun(folder, size, fs=fs, max_mappings=budget)
        )
        self.descriptors = DescriptorCache(fs, budget, writable=writable)
        self.queue_table = QueueTable(self, own=writable)
        self.index = Index(self, writable=writable)
        self.checkpoint_file = CheckpointFile(root, fs, config.file_mode)
        self.checkpoint = self.checkpoint_file.current
        """Checkpoint of the last writer, then of this one. It lacks the changes that recovery saves."""
        self.has_checkpoint = False
        self.clean = False
        """True if the last writer closed the store."""
        self.machine_ran_on = False
        """True if the last writer was killed, and the machine has not restarted since."""
        self.load_problems: list[LoadProblem] = []
        """Problems with the names and sizes of segment files."""
        self.index_findings: Sequence[Finding] = ()
        """Index files of the wrong length, which are not in `index.files`."""

    @property
    def log_writer(self) -> SegmentWriter:
        """`log_files` of a store that is open for writing."""
        assert isinstance(self.log_files, SegmentWriter), "the store is open for reading"
        return self.log_files

    def load_checkpoint(self) -> None:
        self.has_checkpoint = self.checkpoint_file.load()
        self.checkpoint = self.checkpoint_file.current

    def bad_checkpoint(self) -> Finding | None:
        """Return the finding about a checkpoint that is missing or invalid."""
        if not self.has_checkpoint and self.log_files.starts:
            return Finding(
                "bad_checkpoint", "checkpoint", 0, 0, "missing, or not a checkpoint; opening will read the whole log"
            )
        if self.has_checkpoint and self.checkpoint.flushed is None and self.checksum == "crc32c-record":
            # In the other profile a Java broker may have written it, which is not a fault.
            return Finding("bad_checkpoint", "checkpoint", 64, 36, "the watermarks do not fit their checksum")
        return None

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Save the checkpoint, durably."""
        self.checkpoint_file.save(checkpoint)
        self.checkpoint = checkpoint

    def close(self) -> None:
        self.log_files.close()
        self.descriptors.close()
        self.index.close()

    def watermark(self, start: int | None = None) -> int:
        """Return the watermark: the physical offset below which the log was synced (format#watermark).
        The log must not be empty or open for writing. `scanner.watermark` describes `start`. It may read the log."""
        return watermark(self.log_files, self.checkpoint, self.checksum, clean=self.clean, start=start)

    def torn_from(self, start: int | None = None) -> int:
        """Return the physical offset from which the next opening treats bad bytes as a torn tail.
        May read much of the log, as `watermark` does."""
        return NEVER_TORN if self.machine_ran_on else self.watermark(start)

    def has_records(self) -> bool:
        """Return True if the log has a record, listed in a queue or not."""
        return not isinstance(next(self._events(self.log_files.min_offset)), End)

    def _events(self, start: int) -> Iterator[Event]:
        """Yield the events of a scan by lengths alone. Retention may delete segments during the scan."""
        return scan_log(self.log_files, start, self.checksum, checksums=False, on_front=lambda _: None)

    def listed_end(self) -> int:
        """Return the end of the records listed in queues, or of the log if the queues are lost. For readers."""
        end = max((sum(queue.last_message()[:2]) for queue in self.queue_table), default=0)
        return min(end, self.log_files.end) if end else self.readable_end(self.log_files.min_offset)

    def readable_end(self, start: int) -> int:
        """Return the end of the last record from `start` on that recovery would keep. For readers.
        If the writer was killed during a batch, parts of it may follow a hole. Beyond the watermark the log ends at the
        first hole."""
        end = start
        for event in until_torn(self._events(start), self.torn_from):
            if isinstance(event, End):
                end = event.position
        return end

    def missing_in_front(self) -> list[LoadProblem]:
        """Return the segments that are missing at the start of the log.
        Retention saves the start of the log before it deletes a segment. So the saved start is read after the segments
        were listed."""
        starts = sorted((*self.log_files.starts, *map(int, self.log_files.unreadable)))
        checkpoint = CheckpointFile(self.root, self.fs, self.config.file_mode)
        checkpoint.load()
        noted = checkpoint.current.log_start
        if not starts or noted is None or noted >= starts[0]:
            return []
        detail = f"the log begins at {noted}, but no file has [{noted}, {starts[0]})"
        path = str(self.log_files.directory / segment_name(noted))
        return [LoadProblem(path, "missing_segment", noted, starts[0] - noted, detail)]

    def misplaced(self) -> list[LoadProblem]:
        """Return the misnamed segment files, which a reader shows under their right names."""
        return [
            LoadProblem(name, "segment_name", place, 0, f"contains the records of {segment_name(place)}")
            for name, place in self.log_files.places.items()
        ]

    def has_no_queues(self) -> bool:
        """Return True if the log has records and no queue exists.
        A Java broker's directory does not save which queues there were."""
        queues = self.queue_table
        others = queues.in_rocksdb or queues.batch_topics or queues.deleted
        return not (len(queues) or others) and self.has_records()

    def has_lost_queues(self) -> bool:
        """Return True if queues lack files or ends that the last clean close saved."""
        noted = self.checkpoint.queues
        return noted is not None and noted != self.queue_table.digest()

    def has_all_queues(self) -> bool:
        """Return True if all queues and their ends are as the last clean close saved them."""
        noted = self.checkpoint.queues
        return self.clean and noted is not None and noted == self.queue_table.digest()

    def last_record(self, end: int) -> int:
        """Return the physical offset of the newest listed record of a log that ends at `end`.
        The checkpoint saves it, and opening uses it to prove a clean end."""
        newest = -1
        for queue in self.queue_table:
            if queue.max_offset > 0:
                physical, size, _ = queue.unit(queue.max_offset - 1)
                if size < VOID_SIZE:
                    newest = max(newest, physical)
        known = newest >= self.log_files.min_offset
        return newest if known else min(self.checkpoint.confirm_physical_offset, end)

    def index_doubt(self) -> str:
        """Return why the index of a reader may lack keys, judged by its files, or "" without a reason."""
        if self.index_findings:
            return f"{self.index_findings[0].file} is damaged"
        newest_ms = max((file.header.end_timestamp_ms for file in self.index.files), default=0)
        synced_ms = self.checkpoint.index_msg_timestamp_ms
        if newest_ms < synced_ms and self.log_files.starts:
            first_ms = first_record_time(self.log_files, self.log_files.starts[0], self.checksum)
            if first_ms is not None and first_ms <= synced_ms:  # otherwise retention has removed those files
                return "index files are missing"
        return "" if self.index.files or not self.has_records() else NO_INDEX


class CheckpointFile:
    """The file `checkpoint`. One `pwrite` writes its 128 bytes, within one sector. Then it is synced."""

    def __init__(self, root: Path, fs: FileSystem, file_mode: int) -> None:
        self.path = root / "checkpoint"
        self._fs = fs
        self._file_mode = file_mode
        self.current = Checkpoint()

    def load(self) -> bool:
        """Read the file. Return False if it is missing or cannot be a checkpoint, which counts as empty."""
        try:
            with self._fs.opened(self.path, os.O_RDONLY) as fd:
                data = self._fs.pread(fd, ENCODED_BYTES, 0)
                # A writer may be changing it, so repeat the read until two results agree.
                while data != (again := self._fs.pread(fd, ENCODED_BYTES, 0)):
                    data = again
        except FileNotFoundError:
            return False
        plausible = is_plausible(data)
        self.current = decode(data) if plausible else Checkpoint()
        return plausible

    def save(self, checkpoint: Checkpoint) -> None:
        """Write and sync `checkpoint`, unless the file already has it."""
        if checkpoint == self.current and self.path.exists():
            return
        fs = self._fs
        created = not self.path.exists()
        with fs.opened(self.path, os.O_RDWR | os.O_CREAT, self._file_mode) as fd:
            data = encode(checkpoint)
            if created or fs.size(fd) < FILE_BYTES:
                data = data.ljust(FILE_BYTES, b"\0")  # a Java broker maps the whole page
            fs.pwrite(fd, data, 0)
            fs.fdatasync(fd)
        if created:
            fs.sync_directory(self.path.parent)
        self.current = checkpoint
