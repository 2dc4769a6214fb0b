"""The offsets of a broadcasting client: clients#offset-vectors, clients#positions, and the file."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqstore import QueueRef
from mqstore.broker.tables.localoffsets import LocalOffsets, lower_all
from mqstore.errors import ConfigError, CorruptStoreError, StoreFullError
from mqstore.log.store import MessageStore
from tests.faults import FaultyFileSystem
from tests.log.support import open_store

Q0, Q1, OTHER = QueueRef("orders", 0), QueueRef("orders", 1), QueueRef("bills", 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    with open_store(tmp_path / "s") as store:
        yield store


def opened(store: MessageStore) -> LocalOffsets:
    """The offsets as a new process would read them."""
    return LocalOffsets(store, "cache-1", "prices")


@pytest.fixture
def offsets(store: MessageStore) -> LocalOffsets:
    return opened(store)


def test_the_file_is_standard_json(offsets: LocalOffsets) -> None:
    offsets.commit(Q0, 12)
    offsets.commit(Q1, 250)
    offsets.commit(OTHER, 0)
    offsets.save()

    assert json.loads(offsets.path.read_text()) == {"offsets": {"orders": {"0": 12, "1": 250}, "bills": {"0": 0}}}
    assert offsets.path.stat().st_mode & 0o777 == 0o600


def test_offsets_are_written_only_when_changed(store: MessageStore, offsets: LocalOffsets) -> None:
    offsets.save()
    assert not (store.path / "local_offsets").exists()
    offsets.commit(Q0, 1)
    assert not offsets.path.exists()
    offsets.save()
    before = offsets.path.stat().st_ino
    offsets.commit(Q0, 1)
    offsets.save()

    assert offsets.path.stat().st_ino == before


def test_messages_are_on_disk_before_an_offset_that_rests_on_them(tmp_path: Path) -> None:
    """Else the client would pass over what comes after a power cut."""
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        store.put("orders", b"x", 0)
        offsets = opened(store)
        offsets.commit(Q0, 1)
        before = len(fs.changes())
        offsets.save()
        changes = [(call.operation, call.path) for call in fs.changes()[before:]]
    flushed = next(i for i, (op, path) in enumerate(changes) if "commitlog" in path and "sync" in op)
    written = next(i for i, (_, path) in enumerate(changes) if path.endswith("prices.json.tmp"))
    assert flushed < written


def test_progress_of_which_only_the_backup_is_left_is_lowered_too(store: MessageStore, offsets: LocalOffsets) -> None:
    """Its file was looked for, and not found; the client went on by the backup, behind where the queue was cut, and
    passed over what was put there since."""
    for offset in (9, 10):
        offsets.commit(Q0, offset)
        offsets.save()
    offsets.path.unlink()

    lower_all(store, lambda topic, queue_id: 5)

    assert opened(store).committed(Q0) == 5


@pytest.mark.parametrize("content", [b"", b"[]", b'{"offsets": 7}', b'{"offsets": {"orders": {"0": "12"}}}'])
def test_offsets_are_never_reset_silently(store: MessageStore, offsets: LocalOffsets, content: bytes) -> None:
    offsets.path.parent.mkdir(parents=True)
    offsets.path.write_bytes(content)

    with pytest.raises(CorruptStoreError, match="starts again") as raised:
        opened(store)
    assert raised.value.repair == f"rm {offsets.path} {offsets.path}.bak"


def test_an_entry_that_cannot_be_is_left_out_and_reported(
    store: MessageStore, offsets: LocalOffsets, caplog: pytest.LogCaptureFixture
) -> None:
    offsets.path.parent.mkdir(parents=True)
    offsets.path.write_text('{"offsets": {"orders": {"0": -1, "x": 3, "1": 4}}}')
    again = opened(store)

    assert (again.committed(Q0), again.committed(Q1)) == (None, 4)
    assert len(caplog.records) == 2


def test_failed_write_leaves_the_file_and_is_repeated(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        offsets = opened(store)
        offsets.commit(Q0, 1)
        offsets.save()
        offsets.commit(Q0, 2)
        fs.fail("pwrite", errno.ENOSPC, path_part="prices.json")
        with pytest.raises(StoreFullError):
            offsets.save()
        assert opened(store).committed(Q0) == 1
        assert offsets.committed(Q0) == 2
        offsets.save()
        assert opened(store).committed(Q0) == 2


@pytest.mark.parametrize(("client_id", "group"), [("..", "g"), ("a/b", "g"), ("", "g"), ("c", "../g"), ("c", "")])
def test_names_that_lead_elsewhere_are_refused(store: MessageStore, client_id: str, group: str) -> None:
    with pytest.raises(ConfigError):
        LocalOffsets(store, client_id, group)


def test_numbers_below_zero_are_refused(offsets: LocalOffsets) -> None:
    for queue, offset in ((Q0, -1), (QueueRef("orders", -1), 0)):
        with pytest.raises(ConfigError):
            offsets.commit(queue, offset)
    assert offsets.committed(Q0) is None
