"""What every file of `config/` does alike: members of others survive, damage is told, versions count."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mqstore import SimulatedClock, StoreConfig
from mqstore.broker.broker import Broker
from mqstore.broker.context import Parts
from mqstore.broker.tables.configfile import ConfigFile, DataVersion, member
from mqstore.errors import CorruptStoreError, ReadOnlyStoreError, StoreFullError, StoreIOError
from mqstore.files.filesystem import FileSystem
from mqstore.log.store import MessageStore
from tests.broker.support import in_threads, new_parts
from tests.faults import FaultyFileSystem
from tests.log.support import open_store


def _shape(value: dict[str, Any]) -> None:
    if type(value.get("n", 0)) is not int:
        raise ValueError("n must be an integer")


def _file(root: Path, *, fs: FileSystem | None = None, mode: str = "rw") -> ConfigFile:
    store = SimpleNamespace(
        check_open=lambda: None,
        path=root,
        fs=fs or FileSystem(),
        clock=SimulatedClock(),
        config=StoreConfig(),
        mode=mode,
        closed=False,
    )
    return ConfigFile(cast(MessageStore, store), "x.json", _shape)


def test_a_file_never_written_loads_as_none_and_makes_no_folder(tmp_path: Path) -> None:
    file = _file(tmp_path)
    assert file.load() is None
    assert file.problems == []
    assert list(tmp_path.iterdir()) == []


def test_members_of_another_program_survive_rewriting_twice(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "x.json").write_text('{"n":1,"theirs":{0:[1,2]},"more":null}')
    file = _file(tmp_path)
    file.load()
    file.save({"n": 2})
    file.save({"n": 3})
    assert json.loads((tmp_path / "config" / "x.json").read_text()) == {"n": 3, "theirs": {"0": [1, 2]}, "more": None}


def test_unsynced_folder_is_synced_by_the_next_save(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    file = _file(tmp_path, fs=fs)
    fs.fail("sync_directory", errno.EIO)
    with pytest.raises(StoreIOError):
        file.save({"n": 1})
    before = len(fs.changes())
    file.save({"n": 1})
    assert ("sync_directory", str(tmp_path)) in [(call.operation, call.path) for call in fs.changes()[before:]]


def test_file_of_a_killed_process_is_synced_before_it_is_backup(tmp_path: Path) -> None:
    """It may be of a quick save: a power cut would tear the file and its backup at once."""
    _file(tmp_path).save({"n": 1})
    fs = FaultyFileSystem()
    file = _file(tmp_path, fs=fs)
    file.load()
    file.save({"n": 2})
    file.save({"n": 3})
    steps = [(call.operation, Path(call.path).name) for call in fs.changes() if call.operation in ("fdatasync", "link")]
    assert steps == [
        ("fdatasync", "x.json"),
        *[("fdatasync", "x.json.tmp"), ("link", "x.json")],
        *[("fdatasync", "x.json.tmp"), ("link", "x.json")],
    ]


def test_a_damaged_file_falls_back_to_its_backup_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = _file(tmp_path)
    file.save({"n": 1})
    file.save({"n": 2})
    (tmp_path / "config" / "x.json").write_text('{"n":"two"}')  # decodes, but has the wrong shape
    file = _file(tmp_path)
    assert file.load() == {"n": 1}
    assert len(file.problems) == 1
    assert "n must be an integer" in file.problems[0]
    assert caplog.messages == file.problems


def test_without_a_good_copy_loading_names_the_file_and_the_command(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "x.json").write_bytes(bytes(40))
    with pytest.raises(CorruptStoreError, match=r"x\.json.*mqstore recover .* --rebuild config") as caught:
        _file(tmp_path).load()
    assert str(tmp_path) in (caught.value.repair or "")
    assert (tmp_path / "config" / "x.json").read_bytes() == bytes(40)


def test_a_reader_moves_nothing_and_saves_nothing(tmp_path: Path) -> None:
    writer = _file(tmp_path)
    writer.save({"n": 1})
    writer.save({"n": 2})
    (tmp_path / "config" / "x.json").write_text("{")
    before = sorted(path.name for path in (tmp_path / "config").iterdir())
    reader = _file(tmp_path, mode="r")
    assert reader.load() == {"n": 1}
    with pytest.raises(ReadOnlyStoreError):
        reader.save({"n": 3})
    assert sorted(path.name for path in (tmp_path / "config").iterdir()) == before


def test_a_failed_save_leaves_the_old_value_and_may_be_repeated(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    file = _file(tmp_path, fs=fs)
    file.save({"n": 1})
    fs.fail("pwrite", errno.ENOSPC, path_part="x.json")
    with pytest.raises(StoreFullError):
        file.save({"n": 2, "new": True})
    assert _file(tmp_path).load() == {"n": 1}
    file.save({"n": 3})
    assert _file(tmp_path).load() == {"n": 3}  # not the "new" of the save that failed


@pytest.mark.parametrize(
    ("stored", "version"),
    [
        (None, DataVersion(0, 0, 0)),
        ({}, DataVersion(0, 0, 0)),
        ({"counter": 7, "timestamp": 5}, DataVersion(7, 0, 5)),  # RocketMQ 4.x has no stateVersion
        ({"counter": 7, "stateVersion": 2, "timestamp": 5}, DataVersion(7, 2, 5)),
        ({"counter": None}, DataVersion(0, 0, 0)),
    ],
)
def test_data_version_of_any_rocketmq_is_read(stored: dict[str, int] | None, version: DataVersion) -> None:
    assert DataVersion.from_json(stored) == version


def test_the_next_data_version_counts_and_takes_the_time() -> None:
    assert DataVersion(7, 2, 5).next(9) == DataVersion(8, 0, 9)
    assert DataVersion(7, 2, 5).next(9, 3).as_json() == {"counter": 10, "stateVersion": 0, "timestamp": 9}


@pytest.mark.parametrize(("value", "kind"), [(True, int), (1, bool), (1.0, int), ("1", int), ([], dict)])
def test_a_member_of_another_type_is_no_member(value: object, kind: type) -> None:
    with pytest.raises(ValueError, match="x must be of type"):
        member({"x": value}, "x", kind, None)


# -- the tables of a broker --------------------------------------------------------------------------------------------

WRONG = {
    "topics.json": [
        *('{"topicConfigTable":[]}', '{"topicConfigTable":{"a":4}}', '{"topicConfigTable":{"a":{"perm":"6"}}}'),
        *('{"topicConfigTable":{"a":{"readQueueNums":4.0}}}', '{"topicConfigTable":{"a":{"order":0}}}'),
        '{"topicConfigTable":{"a":{"attributes":{"message.type":1}}}}',
        '{"dataVersion":[]}',
    ],
    "subscriptionGroup.json": [
        *('{"subscriptionGroupTable":[]}', '{"subscriptionGroupTable":{"g":7}}', '{"forbiddenTable":{"g":4}}'),
        '{"subscriptionGroupTable":{"g":{"retryMaxTimes":"16"}}}',
        '{"subscriptionGroupTable":{"g":{"retryMaxTimes":true}}}',
        '{"subscriptionGroupTable":{"g":{"consumeEnable":1}}}',
        '{"subscriptionGroupTable":{"g":{"groupRetryPolicy":{"customizedRetryPolicy":{"next":[1.5]}}}}}',
        '{"subscriptionGroupTable":{"g":{"mqstoreStart":"middle"}}}',
        *('{"forbiddenTable":{"g":{"t":"4"}}}', '{"dataVersion":7}'),
    ],
    "consumerOffset.json": [
        *("[]", '{"offsetTable":[]}', '{"offsetTable":{"t@g":7}}', '{"dataVersion":{"counter":"1"}}'),
        *(f'{{"offsetTable":{{"t@g":{{"0":{offset}}}}}}}' for offset in ('"7"', "7.0", "true")),
        *(
            f'{{"sentLetters":{{"%DLQ%g":{letters}}}}}'
            for letters in (3, {}, [3], [[1]], [[2, 1]], [[1, 1]], [[1, 2], [2, 3]], [[-1, 2]], '[["1", 2]]')
        ),
    ],
    "delayOffset.json": [
        *("[]", '{"offsetTable": 3}'),
        *(
            f'{{"offsetTable": {{{entry}}}}}'
            for entry in ('"1": "2"', '"1": true', '"1": -1', '"x": 1', '"0": 1', '"-1": 1')
        ),
    ],
}


def written(store: Path, file: str, text: str) -> Path:
    """A file of a store's tables, which it has twice: as its own backup, too."""
    open_store(store).close()
    for name in (f"{file}.bak", file):
        path = store / "config" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return path


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in WRONG.items() for text in ("", *texts)])
def test_a_file_of_the_wrong_shape_is_damaged_and_never_taken_for_empty(tmp_path: Path, file: str, text: str) -> None:
    path = written(tmp_path / "s", file, text)
    with pytest.raises(CorruptStoreError, match=f"{file}.*--rebuild config"):
        Broker(open_store(tmp_path / "s"))
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("topics.json", text) for text in ("{}", '{"topicConfigTable":null}')),
        *(("subscriptionGroup.json", f'{{"subscriptionGroupTable":{value}}}') for value in ("null", '{"g":null}')),
        *(("consumerOffset.json", f'{{"offsetTable":{value}}}') for value in ("null", '{"t@g":null,"u@g":{"0":null}}')),
    ],
)
def test_absent_and_null_members_are_defaults(tmp_path: Path, file: str, text: str) -> None:
    written(tmp_path / "s", file, text)
    parts = new_parts(tmp_path / "s", segment_bytes=4096)
    assert (parts.topics.names(), parts.groups.names(), parts.offsets.of_group("g")) == ([], [], {})
    assert parts.topics.problems == parts.offsets.problems == []
    parts.store.close()


@pytest.mark.parametrize(
    ("table", "call", "file"), [("topics", "for_send", "topics.json"), ("groups", "require", "subscriptionGroup.json")]
)
def test_threads_that_need_an_entry_at_once_make_one(parts: Parts, table: str, call: str, file: str) -> None:
    tables, found, told = getattr(parts, table), [], []
    tables.on_change.append(told.append)
    in_threads(*[lambda: found.append(getattr(tables, call)("a"))] * 8)
    assert len({id(config) for config in found}) == 1
    assert told == ["a"]
    assert json.loads((parts.store.path / "config" / file).read_text())["dataVersion"]["counter"] == 1
