"""Known damage of a log: ranges that `recover` has reported and that cannot be repaired.

`verify` reads them to distinguish known damage from new damage.

    config/knownDamage.json   {"ranges": {"bad_record": [[4096, 4300]], "missing_segment": [[16384, 32768]]}}

A range is [start, stop) in physical offsets, which are never used twice. So it means the same bytes until retention
deletes them. Each `recover` writes the ranges that it found, and so drops deleted ones. A finding is known if a range
of its kind contains its bytes. Damage that reaches beyond a known range is new.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from mqstore.errors import MQStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import load_json, save_json
from mqstore.files.segment import segment_start
from mqstore.log.recovery.report import Finding

KNOWN_FILE: Final = "config/knownDamage.json"
_RANGES_MAX: Final = 100_000
"""Maximum number of ranges in the file: a third of the maximum of a JSON file.
Later damage stays new."""

_Range = tuple[int, int]


class KnownDamage:
    """Ranges of the log by kind of finding. `finding in known` costs a binary search."""

    def __init__(self, ranges: Mapping[str, Iterable[_Range]], segment_bytes: int) -> None:
        self.ranges = {kind: sorted(set(found)) for kind, found in ranges.items()}
        self._segment_bytes = segment_bytes
        self._stops = {kind: [*accumulate((stop for _, stop in found), max)] for kind, found in self.ranges.items()}

    def __contains__(self, finding: Finding) -> bool:
        place = _place(finding, self._segment_bytes)
        if place is None:
            return False
        start, stop = place
        before = bisect_right(self.ranges.get(finding.kind, []), start, key=lambda found: found[0])
        return before > 0 and stop <= self._stops[finding.kind][before - 1]


def load_known(root: Path, segment_bytes: int, fs: FileSystem) -> KnownDamage:
    """Return the known damage of a store. A bad file counts as empty. `verify` reports it separately."""
    try:
        value = load_json(root / KNOWN_FILE, writer=False, fs=fs, root=root, check=check_known).value
    except (MQStoreError, OSError):
        value = None
    ranges = {} if value is None else value["ranges"]
    return KnownDamage({kind: map(tuple, found) for kind, found in ranges.items()}, segment_bytes)


def save_known(
    root: Path, before: KnownDamage, findings: Iterable[Finding], log_end: int, segment_bytes: int, fs: FileSystem
) -> None:
    """Save the ranges of `findings` below `log_end`. Later bytes will be written again.
    Writes nothing if the ranges equal those of `before`. Durable on return. Raises the errors of `save_json`."""
    ranges: dict[str, set[_Range]] = {}
    room = _RANGES_MAX
    for finding in findings:
        place = _place(finding, segment_bytes)
        lasts = place is not None and ((place[0] < log_end and place[1] <= log_end) or finding.kind == "segment_name")
        if place is not None and lasts and room > 0:
            ranges.setdefault(finding.kind, set()).add(place)
            room -= 1
    found = KnownDamage(ranges, segment_bytes).ranges
    if found != before.ranges:
        fs.mkdir((root / KNOWN_FILE).parent, exist_ok=True)
        fs.sync_directory(root)
        save_json(root / KNOWN_FILE, {"ranges": found}, fs, check=check_known)


def check_known(value: dict[str, Any]) -> None:
    """Raise ValueError unless `value` is a table of known damage."""
    ranges = value.get("ranges")
    if not isinstance(ranges, dict):
        raise ValueError(f"'ranges' must be an object, not {ranges!r:.80}")
    for kind, found in ranges.items():
        if not isinstance(found, list) or not all(map(_is_range, found)):
            raise ValueError(f"ranges: {kind!r:.80} must have ranges of physical offsets, not {found!r:.80}")


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(offset) is int for offset in value)
        and 0 <= value[0] <= value[1] < 1 << 63
    )


def _place(finding: Finding, segment_bytes: int) -> _Range | None:
    """Return the log range of a finding, or None.
    A finding about another file, or about the surplus of a segment, has no range."""
    if finding.file == "commitlog":  # all of it
        return finding.position, finding.position + finding.length
    folder, _, name = finding.file.rpartition("/")
    start = segment_start(name) if folder == "commitlog" else None
    if start is None or finding.position >= segment_bytes:
        return None
    start += finding.position
    return start, start + finding.length
