"""The offsets of a broadcasting client: clients#offset-vectors, clients#positions, and the file."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from mqstore.broker.localoffsets import LocalOffsets, lower_all
from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import ConfigError, CorruptStoreError, StoreFullError
from mqstore.files.filesystem import FILE_MODE, REAL
from mqstore.log.commitlog import QueueRef
from tests.faults import FaultyFileSystem

Q0, Q1, OTHER = QueueRef("orders", 0), QueueRef("orders", 1), QueueRef("bills", 0)


def opened(folder: Path, **options: object) -> LocalOffsets:
    return LocalOffsets(folder / "local_offsets", "cache-1", "prices", **options)  # type: ignore[arg-type]


@pytest.fixture
def offsets(tmp_path: Path) -> LocalOffsets:
    return opened(tmp_path)


def test_an_update_sets_forwards_and_backwards(offsets: LocalOffsets) -> None:
    offsets.update(Q0, 1024)
    offsets.update(Q0, 1023)

    assert offsets.get(Q0) == 1023


def test_an_update_that_may_only_increase_does_not_decrease(offsets: LocalOffsets) -> None:
    offsets.update(Q0, 1023)
    offsets.update(Q0, 1022, increase_only=True)
    assert offsets.get(Q0) == 1023
    offsets.update(Q0, 1024, increase_only=True)
    assert offsets.get(Q0) == 1024
    offsets.update(Q1, 0, increase_only=True)
    assert offsets.get(Q1) == 0


def test_a_frozen_offset_stays_until_it_is_removed(offsets: LocalOffsets) -> None:
    offsets.update(Q0, 5)
    offsets.update_and_freeze(Q0, 3)
    offsets.update(Q0, 9)
    offsets.update(Q0, 9, increase_only=True)
    offsets.update_and_freeze(Q0, 9)
    offsets.update(Q1, 1)
    assert (offsets.get(Q0), offsets.get(Q1)) == (3, 1)
    offsets.remove(Q0)
    offsets.update(Q0, 9)
    assert offsets.get(Q0) == 9


def test_what_is_removed_is_unknown_again(offsets: LocalOffsets) -> None:
    assert offsets.get(Q0) is None
    offsets.update(Q0, 1)
    offsets.remove(Q0)
    offsets.remove(Q1)

    assert offsets.get(Q0) is None


def test_the_file_is_standard_json(tmp_path: Path, offsets: LocalOffsets) -> None:
    offsets.update(Q0, 12)
    offsets.update(Q1, 250)
    offsets.update(OTHER, 0)
    offsets.persist()

    file = tmp_path / "local_offsets" / "cache-1" / "prices.json"
    assert json.loads(file.read_text()) == {"offsets": {"orders": {"0": 12, "1": 250}, "bills": {"0": 0}}}
    assert file.stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_before_it_is_persisted_nor_when_nothing_changed(
    tmp_path: Path, offsets: LocalOffsets
) -> None:
    flushed: list[bool] = []
    offsets = opened(tmp_path, flush=lambda: flushed.append(offsets.path.exists()))
    offsets.persist()
    assert not (tmp_path / "local_offsets").exists()
    offsets.update(Q0, 1)
    assert not offsets.path.exists()
    offsets.persist()
    before = offsets.path.stat().st_ino
    offsets.update(Q0, 1)
    offsets.persist()

    assert offsets.path.stat().st_ino == before
    assert flushed == [False]  # once, and before the file was there


def test_a_new_object_goes_on_where_the_file_says(tmp_path: Path, offsets: LocalOffsets) -> None:
    offsets.update(Q0, 12)
    offsets.persist()
    offsets.update(Q0, 13)

    assert opened(tmp_path).get(Q0) == 12
    again = opened(tmp_path)
    again.update(Q1, 1)
    again.persist()
    assert (opened(tmp_path).get(Q0), opened(tmp_path).get(Q1)) == (12, 1)


def test_who_takes_over_reads_the_file_anew(tmp_path: Path, offsets: LocalOffsets) -> None:
    before = opened(tmp_path)
    offsets.update(Q0, 5)
    offsets.persist()
    before.update(Q0, 1)
    before.reload()
    assert before.get(Q0) == 5
    before.persist()
    assert opened(tmp_path).get(Q0) == 5


def test_removing_leaves_the_file_as_it_is(tmp_path: Path, offsets: LocalOffsets) -> None:
    offsets.update(Q0, 12)
    offsets.persist()
    offsets.update(Q0, 20)
    offsets.remove(Q0)
    offsets.persist()

    assert offsets.get(Q0) == opened(tmp_path).get(Q0) == 12


def test_persisting_some_queues_leaves_the_entries_of_the_others(tmp_path: Path, offsets: LocalOffsets) -> None:
    offsets.update(Q0, 1)
    offsets.update(Q1, 1)
    offsets.persist()
    offsets.update(Q0, 2)
    offsets.update(Q1, 2)
    offsets.persist([Q1])

    assert (opened(tmp_path).get(Q0), opened(tmp_path).get(Q1)) == (1, 2)
    assert (offsets.get(Q0), offsets.get(Q1)) == (2, 2)
    offsets.persist()
    assert opened(tmp_path).get(Q0) == 2


def test_members_that_nobody_here_knows_survive(tmp_path: Path, offsets: LocalOffsets) -> None:
    offsets.path.parent.mkdir(parents=True)
    offsets.path.write_text('{"offsets": {"orders": {"0": 3}}, "written by": "a newer one"}')
    again = opened(tmp_path)
    again.update(Q1, 4)
    again.persist()

    assert json.loads(offsets.path.read_text()) == {
        "offsets": {"orders": {"0": 3, "1": 4}},
        "written by": "a newer one",
    }


def test_a_damaged_file_falls_back_to_its_backup(tmp_path: Path, offsets: LocalOffsets) -> None:
    for offset in (1, 2):
        offsets.update(Q0, offset)
        offsets.persist()
    offsets.path.write_bytes(b"\0" * 40)

    assert opened(tmp_path).get(Q0) == 1
    assert len(list(offsets.path.parent.glob("prices.json.corrupt-*"))) == 1


def test_progress_of_which_only_the_backup_is_left_is_lowered_too(tmp_path: Path, offsets: LocalOffsets) -> None:
    """Its file was looked for, and not found; the client went on by the backup, behind where the queue was cut, and
    passed over what was put there since."""
    for offset in (9, 10):
        offsets.update(Q0, offset)
        offsets.persist()
    offsets.path.unlink()

    lower_all(tmp_path, lambda topic, queue_id: 5, fs=REAL, clock=SYSTEM_CLOCK, file_mode=FILE_MODE)

    assert opened(tmp_path).get(Q0) == 5


@pytest.mark.parametrize("content", [b"", b"[]", b'{"offsets": 7}', b'{"offsets": {"orders": {"0": "12"}}}'])
def test_offsets_are_never_reset_silently(tmp_path: Path, offsets: LocalOffsets, content: bytes) -> None:
    offsets.path.parent.mkdir(parents=True)
    offsets.path.write_bytes(content)

    with pytest.raises(CorruptStoreError, match="begins anew") as raised:
        opened(tmp_path)
    assert raised.value.repair == f"rm {offsets.path} {offsets.path}.bak"


def test_an_entry_that_cannot_be_is_left_out_and_reported(
    tmp_path: Path, offsets: LocalOffsets, caplog: pytest.LogCaptureFixture
) -> None:
    offsets.path.parent.mkdir(parents=True)
    offsets.path.write_text('{"offsets": {"orders": {"0": -1, "x": 3, "1": 4}}}')
    again = opened(tmp_path)

    assert (again.get(Q0), again.get(Q1)) == (None, 4)
    assert len(caplog.records) == 2


def test_after_a_failed_write_the_file_is_as_it_was_and_the_next_call_writes(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    offsets = opened(tmp_path, fs=fs)
    offsets.update(Q0, 1)
    offsets.persist()
    offsets.update(Q0, 2)
    fs.fail("pwrite", errno.ENOSPC)
    with pytest.raises(StoreFullError):
        offsets.persist()
    assert opened(tmp_path).get(Q0) == 1
    assert offsets.get(Q0) == 2
    offsets.persist()
    assert opened(tmp_path).get(Q0) == 2


@pytest.mark.parametrize(("client_id", "group"), [("..", "g"), ("a/b", "g"), ("", "g"), ("c", "../g"), ("c", "")])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, client_id: str, group: str) -> None:
    with pytest.raises(ConfigError):
        LocalOffsets(tmp_path, client_id, group)


def test_numbers_below_zero_are_refused(offsets: LocalOffsets) -> None:
    for queue, offset in ((Q0, -1), (QueueRef("orders", -1), 0)):
        with pytest.raises(ConfigError):
            offsets.update(queue, offset)
    assert offsets.get(Q0) is None
