"""The note of queue ends that a recovery leaves for the next broker (reliability#p3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqstore.files.filesystem import REAL
from mqstore.log.recovery.queueends import QueueEnds, forget_ends, load_ends, note_ends


def test_of_several_notes_the_least_counts_until_progress_is_written(tmp_path: Path) -> None:
    note_ends(tmp_path, {("t", 0): 43}, 9000, REAL, 0o600)
    assert list(tmp_path.iterdir()) == [], "nobody keeps any progress"
    progress = tmp_path / "config" / "consumerOffset.json"
    progress.parent.mkdir()
    progress.write_text("{}")
    note_ends(tmp_path, {("t", 0): 43, ("t", 1): 7}, 9000, REAL, 0o600)
    assert load_ends(tmp_path, REAL) == QueueEnds({("t", 0): 43, ("t", 1): 7}, 9000)
    note_ends(tmp_path, {("t", 0): 50, ("t", 1): 5, ("u", 0): 3}, 9500, REAL, 0o600)
    noted = load_ends(tmp_path, REAL)
    assert noted == QueueEnds({("t", 0): 43, ("t", 1): 5, ("u", 0): 0}, 9000), "u was not there then"
    assert noted.of("v", 0) == 0
    progress.rename(progress.with_name("consumerOffset.json.bak"))
    assert load_ends(tmp_path, REAL) == noted, "the backup says the same"
    progress.write_text('{"more": 1}')
    assert load_ends(tmp_path, REAL) is None, "whoever wrote that knew how far they went"
    note_ends(tmp_path, {("t", 0): 50}, 9900, REAL, 0o600)
    assert load_ends(tmp_path, REAL) == QueueEnds({("t", 0): 50}, 9900)
    progress.write_text("damaged")
    assert load_ends(tmp_path, REAL) == QueueEnds({("t", 0): 50}, 9900), "its backup comes in its place"


def test_a_note_is_taken_where_only_the_backup_is_left(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "consumerOffset.json.bak").write_text("{}")
    note_ends(tmp_path, {("t", 0): 43}, 9000, REAL, 0o600)
    (tmp_path / "config" / "consumerOffset.json").write_text("{}")  # as a recovery mends it
    assert load_ends(tmp_path, REAL) == QueueEnds({("t", 0): 43}, 9000)


@pytest.mark.parametrize(
    "harm", [b"", b"{", b"[]", b'{"ends": 5, "log": 1, "of": []}', b'{"ends": {"t": {"0": "x"}}, "log": 1, "of": []}']
)
def test_a_note_that_cannot_be_read_counts_as_the_worst(tmp_path: Path, harm: bytes) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "queueEnds.json").write_bytes(harm)
    assert load_ends(tmp_path, REAL) == QueueEnds({}, 0, readable=False)
    forget_ends(tmp_path, REAL)
    assert load_ends(tmp_path, REAL) is None
