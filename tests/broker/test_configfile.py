"""What every file of `config/` does alike: members of others survive, damage is told, versions count."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mqstore import SimulatedClock, StoreConfig
from mqstore.broker.background.context import Parts, open_tables
from mqstore.broker.broker import Broker
from mqstore.broker.tables.configfile import ConfigFile
from mqstore.errors import CorruptStoreError, StoreFullError
from mqstore.files.filesystem import FileSystem
from mqstore.log.store import MessageStore
from tests.broker.support import new_parts
from tests.faults import FaultyFileSystem
from tests.log.support import open_store
from tests.waiting import in_threads


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


TABLES = pytest.mark.parametrize(
    ("table", "call", "file"), [("topics", "for_send", "topics.json"), ("groups", "require", "subscriptionGroup.json")]
)


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
    assert parts.topics._file.problems == parts.offsets._file.problems == []
    parts.store.close()


@TABLES
def test_threads_that_need_an_entry_at_once_make_one(parts: Parts, table: str, call: str, file: str) -> None:
    tables, found, told = getattr(parts, table), [], []
    tables.on_change.append(told.append)
    in_threads(*[lambda: found.append(getattr(tables, call)("a"))] * 8)
    assert len({id(config) for config in found}) == 1
    assert told == ["a"]
    assert json.loads((parts.store.path / "config" / file).read_text())["dataVersion"]["counter"] == 1


@TABLES
def test_change_that_cannot_be_saved_is_none(tmp_path: Path, table: str, call: str, file: str) -> None:
    fs = FaultyFileSystem()
    parts = new_parts(tmp_path / "s", fs=fs)
    found, told = getattr(parts, table), []
    first = found.create("a")
    found.on_change.append(told.append)
    for change in (
        lambda: found.create("b"),
        lambda: getattr(found, call)("b"),
        lambda: found.alter("a", **({"perm": 4} if table == "topics" else {"orderly": True})),
        lambda: found.delete("a"),
        lambda: found.ensure("%RETRY%g") if table == "topics" else found.forbid("a", "t"),
    ):
        fs.fail("create", errno.ENOSPC, path_part=file)
        with pytest.raises(StoreFullError):
            change()
        again = getattr(open_tables(parts.store), table)
        assert ([found.get("a"), *found.names()], [again.get("a"), *again.names()]) == ([first, "a"], [first, "a"])
    assert told == []
    assert getattr(found, call)("b").name == "b", "and when there is room again, it continues"
    parts.store.close()
