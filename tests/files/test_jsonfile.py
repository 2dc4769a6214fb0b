"""JSON files: both dialects, a save that may die anywhere, and a load that never resets in silence."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import SimulatedClock
from mqstore.errors import CorruptStoreError, FormatError, StoreFullError, StoreIOError
from mqstore.files import jsonfile
from mqstore.files.jsonfile import (
    check_backup,
    decode_json,
    encode_entry,
    encode_json,
    load_json,
    save_json,
    set_aside_json,
)
from tests.faults import CHANGES, Crash, FaultyFileSystem

NOW_MS = 1_700_000_000_000

CONSUMER_OFFSET = """{
→"dataVersion":{
→→"counter":3,
→→"stateVersion":0,
→→"timestamp":1700000000000
→},
→"offsetTable":{
→→"OrderTopic@g1":{0:250,1:251,2:252,3:253
→→}
→}
}"""

DELAY_OFFSET = """{
→"offsetTable":{3:12,4:0
→}
}"""

CONSUMER_ORDER_INFO = """{
→"table":{
→→"OrderTopic@g1":{0:{
→→→→"cm":3,
→→→→"i":60000,
→→→→"l":1700000000005,
→→→→"o":[
→→→→→460,
→→→→→1,
→→→→→2
→→→→],
→→→→"oc":{460:1
→→→→},
→→→→"ot":{462:1700000090000
→→→→},
→→→→"popTime":1700000000000
→→→}
→→}
→}
}"""

CONSUMER_FILTER = (
    '{"filterDataByTopic":{"T":{"groupFilterData":{"g1":{"bloomFilterData":{"bitNum":112,"bitPos":[1,5,9]},'
    '"dead":false,"expression":"a > 1 , 2:"}},"topic":"T"}}}'
)


# -- dialects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        (
            CONSUMER_OFFSET,
            '{"dataVersion": {"counter": 3, "stateVersion": 0, "timestamp": 1700000000000},'
            '"offsetTable": {"OrderTopic@g1": {"0": 250, "1": 251, "2": 252, "3": 253}}}',
        ),
        (DELAY_OFFSET, '{"offsetTable": {"3": 12, "4": 0}}'),
        (
            CONSUMER_ORDER_INFO,
            '{"table": {"OrderTopic@g1": {"0": {"cm": 3, "i": 60000, "l": 1700000000005, "o": [460, 1, 2],'
            '"oc": {"460": 1}, "ot": {"462": 1700000090000}, "popTime": 1700000000000}}}}',
        ),
        (CONSUMER_FILTER, CONSUMER_FILTER),
        ("{-1:2,\n\t 3 :4}", '{"-1": 2, "3": 4}'),
        ('{"a":"{1:2,3:4}","\\"{5:":"\\\\",6:7}', '{"a": "{1:2,3:4}", "\\"{5:": "\\\\", "6": 7}'),
        ('{"same":1,"same":2}', '{"same": 2}'),
        ("{}", "{}"),
        ('\ufeff{"a":{3:12}}', '{"a": {"3": 12}}'),  # the mark that some editors put first
    ],
)
def test_both_dialects_are_read(text: str, strict: str) -> None:
    assert decode_json(text.replace("→", "\t").encode()) == json.loads(strict)


@pytest.mark.parametrize(
    ("data", "position"),
    [
        (b"", 0),
        (b"\0" * 4096, 0),
        (b"[1, 2]", 0),
        (b"null", 0),
        (b"7", 0),
        (b'{"a": NaN}', 0),
        (b'{"a": -Infinity}', 0),
        (b'{"a": 1e999}', 0),
        (b'{"a": ' + b"7" * 5000 + b"}", 0),
        (b"[" * 200_000, 0),
        (b'{"a": ' * 200_000, 0),
        (b'{"a": "\xff"}', 7),
        (b'{"a": 1}{', 0),
        (b"{'a': 1}", 0),
        ('{"ä":1,\n{2:3}\n'.encode(), 9),
        ('\ufeff{"ä":1,\n{2:3}\n'.encode(), 12),
        ("\ufeff\ufeff{}".encode(), 0),
        (CONSUMER_OFFSET.encode()[:-1], None),
        ("{\u0661:2}".encode(), 0),  # an Arabic digit one is no digit to JSON
    ],
)
def test_everything_else_is_a_format_error(data: bytes, position: int | None) -> None:
    with pytest.raises(FormatError) as caught:
        decode_json(data)
    if position is not None:
        assert caught.value.position == position


@pytest.mark.parametrize("part", [b'\\"', b'"', b"{ ", b", ", b"{1", b'{"a":{1:', b"\\", b'"\\'])
def test_hostile_input_is_read_in_one_pass(part: bytes) -> None:
    """Quadratic work on this much would outlast the test suite's time limit."""
    with pytest.raises(FormatError):
        decode_json(b'{"' + part * (1_000_000 // len(part)))


@given(st.binary(max_size=60) | st.text('{}[],:"\\-019 \n\tn', max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_a_format_error(data: bytes) -> None:
    try:
        value = decode_json(data)
    except FormatError:
        return
    assert isinstance(value, dict)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_text_is_strict_sorted_and_has_a_line_for_each_entry() -> None:
    text = '{\n  "a": "Grüße",\n  "b": {\n    "9": 2,\n    "10": {"y": {}, "z": [1, 2]}\n  },\n  "c": {}\n}\n'
    assert encode_json({"b": {10: {"z": [1, 2], "y": {}}, 9: 2}, "c": {}, "a": "Grüße"}) == text.encode()
    assert encode_json({}) == b"{}\n"
    with pytest.raises(ValueError, match="JSON"):
        encode_json({"a": float("nan")})


def test_a_lone_surrogate_is_escaped_and_other_text_is_not() -> None:
    surrogate = os.fsdecode(b"\xff")
    value = {surrogate: 1, "table": {surrogate + "ü\\": [surrogate]}}
    assert "ü".encode() in encode_json(value)
    assert decode_json(encode_json(value)) == value


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.text())
def test_an_encoded_entry_stands_for_its_value(table: dict[str, Any], name: str) -> None:
    encoded = {key: encode_entry(key, value) for key, value in table.items()}
    assert encode_json({name: encoded}) == encode_json({name: table})


# -- saving ------------------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_value_before_is_kept_as_bak(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save_json(path, {"n": 1})
    assert names(tmp_path) == ["x.json"]
    save_json(path, {"n": 2})
    save_json(path, {"n": 3})
    assert names(tmp_path) == ["x.json", "x.json.bak"]
    assert path.read_bytes() == b'{\n  "n": 3\n}\n'
    assert json.loads((tmp_path / "x.json.bak").read_bytes()) == {"n": 2}
    assert path.stat().st_mode & 0o777 == 0o600


def test_quick_saves_sync_nothing_after_the_backup(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save_json(path, {"n": 1})
    fs = FaultyFileSystem()
    save_json(path, {"n": 2}, fs, synced=False)
    steps = [(call.operation, Path(call.path).name, Path(call.target).name) for call in fs.changes()]
    assert [step for step in steps if step[0] != "unlink"] == [
        ("create", "x.json.tmp", ""),
        ("pwrite", "x.json.tmp", ""),
        ("link", "x.json", "x.json.bak.tmp"),
        ("replace", "x.json.bak.tmp", "x.json.bak"),
        ("sync_directory", tmp_path.name, ""),
        ("replace", "x.json.tmp", "x.json"),
    ]
    fs = FaultyFileSystem()
    save_json(path, {"n": 3}, fs, synced=False, back_up=False)
    assert [call.operation for call in fs.changes() if call.operation != "unlink"] == ["create", "pwrite", "replace"]
    assert json.loads((tmp_path / "x.json.bak").read_bytes()) == {"n": 1}


def test_a_relative_name_syncs_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_json("x.json", {"n": 1})
    assert load_json("x.json", writer=True) == ({"n": 1}, [])


def seeded(folder: Path, before: str) -> tuple[Path, list[dict[str, int] | None]]:
    """A file in one of the states a save may find, and the values that a load after a crash may give."""
    path = folder / "x.json"
    folder.mkdir(parents=True)
    if before == "nothing":
        return path, [None]
    save_json(path, {"n": 1})
    if before in ("both", "leftovers", "main lost"):
        save_json(path, {"n": 2})
    if before == "leftovers":
        (folder / "x.json.tmp").write_bytes(b"half a val")
        os.link(path, folder / "x.json.bak.tmp")
    if before == "main lost":  # what a Java broker leaves between its two steps
        path.unlink()
        return path, [{"n": 1}]
    return path, [{"n": 2 if before != "main" else 1}]


STATES = ["nothing", "main", "both", "leftovers", "main lost"]


@pytest.mark.parametrize(
    ("before", "torn", "no_links"),
    [*itertools.product(STATES, [False, True], [False]), ("both", True, True), ("leftovers", False, True)],
)
def test_a_crash_at_any_step_leaves_old_or_new(tmp_path: Path, before: str, torn: bool, no_links: bool) -> None:
    seen = []
    for nth in itertools.count(1):
        path, allowed = seeded(tmp_path / str(nth), before)
        existed = path.exists()
        fs = FaultyFileSystem()
        if no_links:
            fs.fail("link", errno.EPERM, times=None)
        fs.crash(nth, torn=torn)
        with contextlib.suppress(Crash):
            save_json(path, {"n": 9}, fs)
        assert path.exists() or not existed
        value, problems = load_json(path, writer=True)
        assert value in [*allowed, {"n": 9}]
        assert not problems or before == "main lost"
        backup = path.with_name("x.json.bak")
        if backup.exists():
            decode_json(backup.read_bytes())
        seen.append(value)
        save_json(path, {"n": 10})  # what the crash left is no obstacle
        assert load_json(path, writer=False).value == {"n": 10}
        assert {"x.json"} <= set(names(path.parent)) <= {"x.json", "x.json.bak"}
        if not fs.crashed:
            break
    assert nth > 5
    assert seen[0] == allowed[0]
    assert seen[-1] == {"n": 9}


@pytest.mark.parametrize(
    ("before", "number"), [*((state, errno.ENOSPC) for state in STATES), ("both", errno.EDQUOT), ("both", errno.EIO)]
)
def test_an_error_at_any_step_leaves_the_old_value_or_the_new_one(tmp_path: Path, before: str, number: int) -> None:
    for nth in itertools.count(1):
        path, allowed = seeded(tmp_path / str(nth), before)
        fs = FaultyFileSystem()
        fs.fail(CHANGES, number, nth=nth)
        caught: OSError | None = None
        try:
            save_json(path, {"n": 9}, fs)
        except (StoreFullError, StoreIOError) as error:
            caught = error
        if caught is not None:
            assert caught.errno == number
            renamed = fs.changes()[-1].operation == "sync_directory"
            assert load_json(path, writer=True).value == ({"n": 9} if renamed else allowed[0])
            assert not path.with_name("x.json.tmp").exists() or before == "leftovers"
        else:  # a link that cannot be made is a copy
            assert load_json(path, writer=True).value == {"n": 9}
        if not fs.failed:
            break
        save_json(path, {"n": 10}, fs)  # goes on when the cause is gone
        assert load_json(path, writer=False).value == {"n": 10}
    assert nth > 5


def test_a_damaged_file_does_not_replace_a_good_bak(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save_json(path, {"n": 1})
    save_json(path, {"n": 2})
    path.write_bytes(b"\0" * 13)
    save_json(path, {"n": 3})
    assert json.loads((tmp_path / "x.json.bak").read_bytes()) == {"n": 1}


def test_hard_linked_snapshots_keep_their_content(tmp_path: Path) -> None:
    """`cp -al` is a backup that many use: nothing of ours may be rewritten in place, leftovers included."""
    path = tmp_path / "x.json"
    save_json(path, {"n": 1})
    save_json(path, {"n": 2})
    (tmp_path / "x.json.tmp").write_bytes(b"left")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    before = {}
    for name in ("x.json", "x.json.bak", "x.json.tmp"):
        os.link(tmp_path / name, snapshot / name)
        before[name] = (snapshot / name).read_bytes()
    save_json(path, {"n": 3})
    save_json(path, {"n": 4})
    assert {name: (snapshot / name).read_bytes() for name in before} == before


# -- loading -----------------------------------------------------------------------------------------------------------

GOOD, BAD_ONES = b'{"n": 5}', [b"", b"\0\0\0\0", b'{"n": 5', b"[5]", b'{"wrong": 1}']


def shape(value: dict[str, Any]) -> None:
    if not isinstance(value.get("n"), int):
        raise FormatError("n is not a number", "n", 0)


def put(folder: Path, main: bytes | None, backup: bytes | None) -> Path:
    for name, content in (("x.json", main), ("x.json.bak", backup)):
        if content is not None:
            (folder / name).write_bytes(content)
    return folder / "x.json"


@pytest.mark.parametrize("backup", [None, GOOD, b"bad"])
def test_good_file_wins_over_its_backup(tmp_path: Path, backup: bytes | None) -> None:
    path = put(tmp_path, b'{"n": 6, "of the future": [1]}', backup)
    assert load_json(path, writer=True, check=shape) == ({"n": 6, "of the future": [1]}, [])


@pytest.mark.parametrize("bad", BAD_ONES)
def test_a_writer_falls_back_to_bak_and_moves_the_bad_file_aside(tmp_path: Path, bad: bytes) -> None:
    path = put(tmp_path, bad, GOOD)
    fs = FaultyFileSystem()
    value, problems = load_json(path, writer=True, check=shape, clock=SimulatedClock(NOW_MS), fs=fs)
    assert value == {"n": 5}
    assert len(problems) == 1
    assert "x.json is damaged" in problems[0]
    aside = tmp_path / f"x.json.corrupt-{NOW_MS}"
    assert str(aside) in problems[0]
    assert aside.read_bytes() == bad
    # Moved aside; then written anew, so that there are two copies again.
    operations = [call.operation for call in fs.changes()]
    assert operations == [
        "replace",
        "sync_directory",
        "unlink",
        "create",
        "pwrite",
        "fdatasync",
        "replace",
        "sync_directory",
    ]
    assert path.stat().st_mode == path.with_name("x.json.bak").stat().st_mode
    assert load_json(path, writer=True, check=shape) == ({"n": 5}, [])
    save_json(path, {"n": 7}, check=shape)
    assert load_json(path, writer=True, check=shape) == ({"n": 7}, [])


@pytest.mark.parametrize("bad", BAD_ONES[:2])
def test_a_reader_falls_back_and_changes_nothing(tmp_path: Path, bad: bytes) -> None:
    path = put(tmp_path, bad, GOOD)
    fs = FaultyFileSystem()
    value, problems = load_json(path, writer=False, check=shape, fs=fs)
    assert value == {"n": 5}
    assert len(problems) == 1
    assert fs.changes() == []
    assert path.read_bytes() == bad


def test_files_moved_aside_do_not_replace_each_other(tmp_path: Path) -> None:
    clock = SimulatedClock(NOW_MS)
    for bad in (b"first", b"second"):
        load_json(put(tmp_path, bad, GOOD), writer=True, clock=clock)
    assert (tmp_path / f"x.json.corrupt-{NOW_MS}").read_bytes() == b"first"
    assert (tmp_path / f"x.json.corrupt-{NOW_MS + 1}").read_bytes() == b"second"


def test_backup_replaces_a_missing_file_and_is_reported(tmp_path: Path) -> None:
    value, problems = load_json(put(tmp_path, None, GOOD), writer=True)
    assert value == {"n": 5}
    assert len(problems) == 1
    assert "missing" in problems[0]


@pytest.mark.parametrize("writer", [True, False])
@pytest.mark.parametrize(
    ("main", "backup"), [(b"bad", None), (b"bad", b"bad"), (b"", b""), (None, b"bad"), (None, b""), (b"", None)]
)
def test_no_good_value_left_is_an_error_that_names_the_repair(
    tmp_path: Path, main: bytes | None, backup: bytes | None, writer: bool
) -> None:
    config = tmp_path / "a store" / "config"
    config.mkdir(parents=True)
    path = put(config, main, backup)
    before = names(config)
    with pytest.raises(CorruptStoreError) as caught:
        load_json(path, writer=writer)
    assert caught.value.file == str(path)
    assert caught.value.repair == f"mqstore recover '{tmp_path}/a store' --rebuild config"
    assert str(path) in str(caught.value)
    assert caught.value.repair in str(caught.value)
    assert names(config) == before


def test_a_file_that_cannot_be_read_is_not_taken_for_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, GOOD, b'{"n": 1}')
    fs = FaultyFileSystem()
    fs.fail("pread", errno.EIO)
    with pytest.raises(StoreIOError):
        load_json(path, writer=True, fs=fs)


@pytest.mark.parametrize(("limit", "value", "text"), [("JSON_BYTES_MAX", 7, "8 bytes"), ("JSON_VALUES_MAX", 5, "6 v")])
def test_a_file_beyond_a_limit_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, text: str
) -> None:
    path = put(tmp_path, b'{"n": 1}' if limit == "JSON_BYTES_MAX" else b'{"n":[{},{},2]}', b'{"n": 1}')
    monkeypatch.setattr(jsonfile, limit, value)
    with pytest.raises(StoreIOError) as caught:
        load_json(path, writer=True)
    for part in (text, f"more than the {value}", limit, "move the file away", str(path)):
        assert part in str(caught.value)
    assert names(tmp_path) == ["x.json", "x.json.bak"]


@pytest.mark.parametrize("limit", ["JSON_BYTES_MAX", "JSON_VALUES_MAX"])
def test_unloaded_value_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    path = tmp_path / "x.json"
    save_json(path, {"n": 1})
    monkeypatch.setattr(jsonfile, limit, 20)
    with pytest.raises(StoreIOError, match=limit):
        save_json(path, {"n": list(range(40))})
    assert load_json(path, writer=False) == ({"n": 1}, [])
    assert names(tmp_path) == ["x.json"]


def test_damaged_backup_is_reported_and_replaced(tmp_path: Path) -> None:
    path = put(tmp_path, GOOD, b"bad")
    what = check_backup(path, writer=False)
    assert what is not None
    assert names(tmp_path) == ["x.json", "x.json.bak"]
    assert (check_backup(path, writer=True, clock=SimulatedClock(NOW_MS)) or "").startswith(what)
    assert names(tmp_path) == ["x.json", "x.json.bak", f"x.json.bak.corrupt-{NOW_MS}"]
    assert path.with_name("x.json.bak").read_bytes() == GOOD
    assert check_backup(path, writer=True) is None
    path.with_name("x.json.bak").unlink()
    assert check_backup(path, writer=True) is None
    assert names(tmp_path) == ["x.json", f"x.json.bak.corrupt-{NOW_MS}"]


def test_repair_moves_the_bad_ones_aside_and_keeps_the_good(tmp_path: Path) -> None:
    clock = SimulatedClock(NOW_MS)
    path = put(tmp_path, b"bad", b"")
    assert set_aside_json(path, clock=clock) == [f"{path}.corrupt-{NOW_MS}", f"{path}.bak.corrupt-{NOW_MS}"]
    assert load_json(path, writer=True) == (None, [])
    put(tmp_path, None, GOOD)
    assert set_aside_json(path, clock=clock) == []
    assert load_json(path, writer=True).value == {"n": 5}
