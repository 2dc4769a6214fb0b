"""The pieces of an opened store that recovery and verify work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mqstore.clock import Clock
from mqstore.files.filesystem import FileSystem
from mqstore.files.segments import SegmentRun
from mqstore.layout.checkpoint import Checkpoint
from mqstore.layout.record import Checksum
from mqstore.log.consumequeue import QueueTable
from mqstore.log.index import Index
from mqstore.log.recovery.report import Finding
from mqstore.log.recovery.watermark import NEVER_TORN, watermark

__all__ = ["StoreParts"]


@dataclass(frozen=True, slots=True)
class StoreParts:
    """The pieces of a store, and how its last writer ended."""

    root: Path
    run: SegmentRun
    queues: QueueTable
    index: Index
    checkpoint: Checkpoint
    has_checkpoint: bool
    clean: bool
    machine_ran_on: bool
    """The last writer was killed, and the machine has been running since."""
    checksum: Checksum
    fs: FileSystem
    clock: Clock
    save_checkpoint: Callable[[Checkpoint], None]
    index_findings: Sequence[Finding]
    """Index files of the wrong length: not among `index.files`, and in the way."""

    def watermark(self, start: int | None = None) -> int:
        """Return the physical offset below which the log had been synced (format#watermark). The log is not empty, and
        no writer has it open. `start` as of `log.watermark`. May read much of the log."""
        return watermark(self.run, self.checkpoint, self.checksum, clean=self.clean, start=start)

    def torn_from(self, start: int | None = None) -> int:
        """Return the physical offset from which bad bytes are a torn tail for the next opening, as `watermark` does."""
        return NEVER_TORN if self.machine_ran_on else self.watermark(start)
