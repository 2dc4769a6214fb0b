"""Findings and reports of opening, verifying and recovering, as plain values."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mqstore.files.segment import LoadProblem

Kind = Literal[
    "torn_tail",
    "lost_tail",
    "bad_record",
    "queue_offset",
    "segment_size",
    "missing_segment",
    "segment_name",
    "missing_units",
    "bad_unit",
    "bad_index",
    "bad_checkpoint",
    "bad_json",
    "unsafe_name",
    "unfinished_splice",
    "not_inflated",
]
"""Kinds of findings (format#damage). docs/recovery.md explains each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a store: `length` bytes at `position` of `file`, a path below the store.

    >>> finding = Finding("bad_record", "commitlog/00000000000000000000", 4096, 200, "the checksum is another")
    >>> print(f"{finding.kind}: {finding.length} bytes from {finding.position} on")
    bad_record: 200 bytes from 4096 on
    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     _ = store.put("t", b"hello")
    ...     list(store.verify())  # findings, if there are any
    []
    """

    kind: Kind
    file: str
    position: int
    length: int
    detail: str

    @property
    def place(self) -> str:
        """File and position, for a message. A missing file has no position."""
        return self.file if self.kind == "missing_segment" else f"{self.file} at byte {self.position}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON, under the same names."""
        return asdict(self)


def finding_of(problem: LoadProblem, segment_bytes: int) -> Finding:
    """Return the finding about a problem found by listing the log's folder."""
    at = problem.place(segment_bytes) if problem.kind == "segment_size" else 0
    kind: Kind = "segment_size" if problem.kind == "empty_segment" else problem.kind
    return Finding(kind, f"commitlog/{os.path.basename(problem.file)}", at, problem.length, problem.detail)


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes [start, stop) of `file` that are no longer part of the store.

    >>> Cut("commitlog/00000000000000000000", 4096, 4300, "torn tail").as_dict()
    {'file': 'commitlog/00000000000000000000', 'from': 4096, 'to': 4300, 'reason': 'torn tail'}
    """

    file: str
    start: int
    stop: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, under the names of `mqstore recover --json`."""
        return {"file": self.file, "from": self.start, "to": self.stop, "reason": self.reason}


@dataclass(slots=True)
class Rebuilt:
    """Numbers of changed queues, written units and written index entries."""

    consume_queues: int = 0
    units: int = 0
    index_entries: int = 0


@dataclass(slots=True)
class RecoveryReport:
    """Report of an opening: findings and repairs (format#opening). Offsets and lengths are in bytes.

    `changed` is False if nothing needed repair. It is always False after a second recovery of a directory.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mqstore.open(folder) as store:
    ...         _ = store.put("t", b"hello")
    ...     with mqstore.open(folder) as store:
    ...         store.recovery.clean_shutdown, store.recovery.changed, store.recovery.findings
    (True, False, [])
    """

    clean_shutdown: bool = True
    scanned_from: int | None = None
    """First physical offset that was read, or None if nothing had to be read."""
    log_end: int = 0
    truncated: list[Cut] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    known: set[Finding] = field(default_factory=set)
    """Findings that an earlier `recover` reported, too. Filled by `recover` alone, not by an opening."""
    rebuilt: Rebuilt = field(default_factory=Rebuilt)
    renamed: dict[str, str] = field(default_factory=dict)
    """Segment files that were misnamed: old path below the store -> new path."""
    kept: list[str] = field(default_factory=list)
    """Files under `cut/` with a copy of the removed bytes. A dry run lists the files that it would create."""
    moved_to_cut: int = 0
    """Number of whole messages in these files. `mqstore quarantine` lists, exports and restores them."""
    messages: int = 0
    """Number of records that verified in the range read."""
    renumbered: int = 0
    """Number of records whose damaged queue offset was corrected from their units and neighbours."""
    damaged_ranges: int = 0
    """Number of damaged ranges of the log that are followed by whole records."""
    quarantined: int = 0
    """Number of `messages` after the first damaged range."""
    changed: bool = False
    seconds: float = 0.0

    @property
    def new(self) -> list[Finding]:
        """Findings that were not known before."""
        return [finding for finding in self.findings if finding not in self.known]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, under the names of `mqstore recover --json`."""
        plain = asdict(self)
        del plain["known"]
        plain["truncated"] = [cut.as_dict() for cut in self.truncated]
        plain["findings"] = [{**finding.as_dict(), "known": finding in self.known} for finding in self.findings]
        return plain
