"""Where the log begins is noted beside the log, so that the loss of its first segments is told."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mqstore import SendReceipt
from mqstore.broker.admin.contents import inspect_store
from mqstore.engine import Finding
from mqstore.errors import StoreFullError
from mqstore.layout.checkpoint import decode
from mqstore.log.snapshot import point_in_time
from mqstore.log.snapshot.copy import snapshot_store
from mqstore.log.store import MessageStore
from tests.faults import Crash, FaultyFileSystem
from tests.log.support import SEGMENT, checkpointed, kill, open_store, overwrite, reboot, segment

BODY = b"x" * 600


def make(
    path: Path, *, crash: bool = False, flush: bool = True, segments: int = 4, **options: Any
) -> list[SendReceipt]:
    store = open_store(path, **options)
    receipts = []
    while store.max_offset < segments * SEGMENT - len(BODY):
        receipts.append(store.put("t", BODY, keys=f"k{len(receipts)}"))
    store.dispatch()
    if flush:
        checkpointed(store)
    if crash:
        kill(store)
    else:
        store.close()
    return receipts


def noted(path: Path) -> int | None:
    return decode((path / "checkpoint").read_bytes()).log_start


def missing(findings: list[Finding]) -> list[tuple[str, str, int]]:
    return [(finding.kind, finding.file, finding.length) for finding in findings]


def bodies_left(store: MessageStore) -> list[int]:
    return [message.physical_offset for message in store.iter("t", 0)]


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("crash", [False, True], ids=["closed", "killed"])
def test_lost_first_segments_are_reported_until_retention(path: Path, crash: bool, lost: int) -> None:
    """The log silently began at the second segment."""
    receipts = make(path, crash=crash)
    for number in range(lost):
        segment(path, number).unlink()
    kept = [receipt.physical_offset for receipt in receipts if receipt.physical_offset >= lost * SEGMENT]
    told = [("missing_segment", f"commitlog/{0:020d}", lost * SEGMENT)]
    with open_store(path, "r") as reader:
        assert missing(list(reader.verify())) == told
    for _ in range(2):
        with open_store(path) as store:
            assert missing(store.recovery.findings) == told
            assert missing(list(store.verify())) == told
            assert bodies_left(store) == kept
            assert store.offsets("t") == (len(receipts) - len(kept), len(receipts))
    with open_store(path) as store:
        assert store.put("t", b"more").offset == len(receipts)
        store.dispatch()
        assert store.drop_before((lost + 1) * SEGMENT) == [f"{lost * SEGMENT:020d}"]
        assert list(store.verify()) == []
    with open_store(path) as store:
        assert store.recovery.findings == []
        assert list(store.verify()) == []
    assert noted(path) == (lost + 1) * SEGMENT


def test_a_crash_in_retention_is_no_loss(tmp_path: Path) -> None:
    nth, crashed = 0, True
    while crashed:
        nth, crashed = nth + 1, False
        path = tmp_path / f"store-{nth}"
        receipts = make(path)
        fs = FaultyFileSystem()
        store = open_store(path, fs=fs)
        fs.crash(nth)
        try:
            store.drop_before(2 * SEGMENT)
        except Crash:
            crashed = True
        fs.heal()
        kill(store)
        with open_store(path, "r") as reader:
            assert list(reader.verify()) == []
        with open_store(path) as store:
            assert store.recovery.findings == []
            left = store.min_offset
            assert left in ((0, SEGMENT, 2 * SEGMENT) if crashed else (2 * SEGMENT,))
            assert bodies_left(store) == [r.physical_offset for r in receipts if r.physical_offset >= left]
            assert list(store.verify()) == []
        assert noted(path) == left
    assert nth > 4, "it was never killed between the note and the last of two files"


def test_unsynced_first_segment_ends_the_log(path: Path) -> None:
    """What remains is a prefix of the log, also of one whose first file's name a power cut took (reliability#p2)."""
    make(path, crash=True, flush=False)
    reboot(path)
    segment(path, 0).unlink()
    with open_store(path) as store:
        assert store.recovery.findings == []
        assert {os.path.basename(cut.file) for cut in store.recovery.truncated} == {
            f"{number * SEGMENT:020d}" for number in (1, 2, 3)
        }
        assert store.recovery.kept, "whole records are kept"
        assert (store.min_offset, store.max_offset) == (0, 0)
        receipt = store.put("t", b"anew")
        assert (receipt.offset, receipt.physical_offset) == (0, 0)
        assert list(store.verify()) == []
    with open_store(path) as store:
        assert store.recovery.findings == []
        assert [message.body for message in store.iter("t", 0)] == [b"anew"]


def test_behind_the_end_that_a_power_cut_left_no_segment_is_missing(path: Path) -> None:
    """The log ends at a torn record; of the segments behind it, never synced, a name in the middle is gone."""
    make(path, crash=True, flush=False)
    reboot(path)
    overwrite(segment(path, 0), SEGMENT // 2, bytes(SEGMENT // 2))
    segment(path, 1).unlink()
    with open_store(path) as store:
        assert store.recovery.findings == []
        assert store.max_offset <= SEGMENT // 2
        assert {os.path.basename(cut.file) for cut in store.recovery.truncated} >= {
            f"{number * SEGMENT:020d}" for number in (2, 3)
        }
        assert list(store.verify()) == []


def test_the_profile_of_the_java_broker_notes_nothing(path: Path) -> None:
    """A Java broker deletes segments and leaves the note as it was."""
    receipts = make(path, profile="rocketmq")
    assert noted(path) is None
    segment(path, 0).unlink()
    with open_store(path, profile="rocketmq", segment_bytes=SEGMENT, consumequeue_units=8) as store:
        assert store.recovery.findings == []
        assert bodies_left(store) == [r.physical_offset for r in receipts if r.physical_offset >= SEGMENT]


def test_store_without_a_noted_start_gets_one(path: Path) -> None:
    make(path)
    overwrite(path / "checkpoint", 112, bytes(16))  # as a former version wrote it
    segment(path, 0).unlink()
    with open_store(path) as store:
        assert "missing_segment" not in {finding.kind for finding in store.recovery.findings}
    assert noted(path) == SEGMENT


def test_a_snapshot_beside_retention_has_lost_nothing(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is read first, and the segments are listed when retention has been there."""
    make(path)
    with open_store(path) as store:
        look = point_in_time.inbox_state

        def meanwhile(*arguments: Any) -> Any:
            store.drop_before(2 * SEGMENT)
            return look(*arguments)

        monkeypatch.setattr(point_in_time, "inbox_state", meanwhile)
        snapshot_store(path, tmp_path / "copy")
    with open_store(tmp_path / "copy") as copy:
        assert copy.recovery.findings == []
        assert list(copy.verify()) == []
        assert copy.min_offset == 2 * SEGMENT


def test_a_snapshot_of_a_log_that_lost_its_start_says_so(tmp_path: Path, path: Path) -> None:
    make(path)
    segment(path, 0).unlink()
    snapshot_store(path, tmp_path / "copy")
    with open_store(tmp_path / "copy", "r") as copy:
        assert missing(list(copy.verify())) == [("missing_segment", f"commitlog/{0:020d}", SEGMENT)]


# -- consume queue files that a power cut has left short ---------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 40])
def test_a_queue_file_cut_after_it_was_synced_is_built_again(path: Path, length: int) -> None:
    """Its records lie before the part of the log that a crash makes an opening read."""
    with open_store(path) as store:
        early = [store.put("early", BODY) for _ in range(5)]
    make(path, crash=True)
    file = path / "consumequeue" / "early" / "0" / f"{0:020d}"
    before = file.read_bytes()
    os.truncate(file, length)
    with open_store(path) as store:
        assert store.offsets("early") == (0, len(early))
        assert store.put("early", b"next").offset == len(early)
        store.dispatch()
        assert list(store.verify()) == []
    assert file.read_bytes()[: 5 * 20] == before[: 5 * 20]


def test_an_older_queue_file_that_was_cut_loses_no_message(path: Path) -> None:
    """A queue that had grown after the last checkpoint kept the hole: consumers passed over what stood in the file."""
    store = open_store(path, consumequeue_units=4)
    for number in range(20):
        store.put("t", b"%d" % number)
    checkpointed(store)
    for number in range(20, 30):
        store.put("t", b"%d" % number)
    store.dispatch()
    kill(store)
    cut = sorted((path / "consumequeue" / "t" / "0").iterdir())[1]
    os.truncate(cut, 20)
    with open_store(path) as store:
        assert [int(message.body) for message in store.iter("t", 0)] == list(range(30))


def test_a_note_that_was_not_saved_is_saved_by_the_next_retention(path: Path) -> None:
    """A full disk left the note in memory only. The next pass deleted segments, and each opening told of a loss."""
    fs = FaultyFileSystem()
    make(path)
    store = open_store(path, fs=fs)
    fs.fail("pwrite", errno.ENOSPC, path_part="checkpoint")
    with pytest.raises(StoreFullError):
        store.drop_before(2 * SEGMENT)
    fs.heal()
    store.drop_before(2 * SEGMENT)
    kill(store)
    with open_store(path) as store:
        assert store.min_offset == 2 * SEGMENT
        assert not store.recovery.findings


def test_retention_that_deletes_nothing_forgets_no_loss(path: Path) -> None:
    make(path)
    segment(path, 0).unlink()
    told = [("missing_segment", f"commitlog/{0:020d}", SEGMENT)]
    with open_store(path) as store:
        assert store.drop_before(1) == []
        assert missing(list(store.verify())) == told
    assert any("missing_segment" in problem for problem in inspect_store(path)["problems"])
