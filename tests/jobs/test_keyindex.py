"""Option `keys`: the index saves reading, and changes no row. Without Spark."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore as library
from mqstore import OutgoingMessage
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading import keyindex
from mqstore.jobs.reading.plan import QueueSlice, plan
from mqstore.jobs.reading.tasks import read_slices
from mqstore.layout.checkpoint import decode, encode
from tests.columnar.support import Odd, many, odd_records, read_all, rows_of, write_store
from tests.conftest import Golden
from tests.log.support import flip, open_store


@pytest.fixture(autouse=True)
def slices_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an index is asked in stores of a few messages."""
    monkeypatch.setattr(keyindex, "SLICE_COST", 0)


def read(path: Path, keys: str, **options: str) -> tuple[list[tuple[Any, ...]], int]:
    """(topic, queue id, offset, keys of the rows, how many slots were planned)."""
    names = ("topic", "queue_id", "queue_offset", "keys")
    given = SourceOptions.parse({"path": str(path), "keys": keys, "includeSystemTopics": "true", **options})
    slices = [piece for group in plan(given) for piece in group]
    assert all(isinstance(piece, QueueSlice) for piece in slices)
    rows = rows_of(read_slices(given, names, "binary", slices))
    return sorted(tuple(row.values()) for row in rows), sum(piece.stop - piece.start for piece in slices)


def scanned(path: Path, *keys: str) -> list[tuple[Any, ...]]:
    """The same rows, by a look at every message."""
    rows = rows_of(read_all(path, ("topic", "queue_id", "queue_offset", "keys"), keys=keys))
    return sorted(tuple(row.values()) for row in rows)


def crash(path: Path, dispatched: int) -> None:
    """As if its owner had been killed, with units and entries of records below `dispatched` on disk."""
    (path / "abort").touch()
    file = path / "checkpoint"
    file.write_bytes(encode(replace(decode(file.read_bytes()), dispatched=dispatched, clean_end=-1)).ljust(4096, b"\0"))


def test_only_the_slots_of_the_keys_are_planned(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(400))
    found, planned = read(path, "k5, k390")
    assert found == [("orders", 0, 1, "k5"), ("t", 1, 97, "k390")]
    assert planned < 30  # of 401; the records where one of the seven files ends and the next begins are looked at
    assert read(path, "nobody")[0] == []
    for options in ({"subscribe": "t"}, {"assign": '{"orders":[0]}', "startingOffsets": '{"orders":{"0":2}}'}):
        found, planned = read(path, "k5", **options)
        assert found == []
        assert planned < 20


def test_a_queue_is_scanned_where_slices_would_cost_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_store(tmp_path / "s", many(24))
    monkeypatch.setattr(keyindex, "SLICE_COST", 1000)
    assert read(path, "k5") == ([("orders", 0, 1, "k5")], 19)  # of 25: a queue with nothing to look at costs nothing


def test_near_slots_are_one_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyindex, "SLICE_COST", 10)
    keys = dict.fromkeys((15, 26, 38, *range(40, 50)), "k") | dict.fromkeys((0, 99), "other")
    with open_store(tmp_path / "s", segment_bytes=1 << 16) as store:
        store.put_many("t", [OutgoingMessage(b"x", keys=keys.get(i)) for i in range(100)])
    planned = plan(SourceOptions.parse({"path": str(tmp_path / "s"), "keys": "k"}))
    slices = [piece for group in planned for piece in group if isinstance(piece, QueueSlice)]
    assert [(piece.start, piece.stop) for piece in slices] == [(0, 1), (15, 27), (38, 50), (99, 100)]


@pytest.mark.parametrize("damage", ["none", "gone", "short", "crashed", "record"])
def test_without_an_index_to_rely_on_the_queue_is_scanned(tmp_path: Path, damage: str) -> None:
    path = write_store(tmp_path / "s", many(60))
    [*_, newest] = sorted((path / "index").iterdir())
    if damage == "gone":
        shutil.rmtree(path / "index")
    elif damage == "short":
        newest.write_bytes(newest.read_bytes()[:-20])
    elif damage == "crashed":
        crash(path, 0)
    elif damage == "record":
        with library.open(path, "r") as store:
            place = store.read("orders", 0, 3)[0].physical_offset
        log = path / "commitlog" / f"{0:020d}"
        flip(log, place + 90)
        found, planned = read(path, "k13", onCorrupt="skip")  # k13 is in it: all of its topic is read
        assert found == []
        assert planned > 30
        return
    found, planned = read(path, "k5")
    assert found == [("orders", 0, 1, "k5")]
    assert (planned < 10) == (damage == "none")


def test_unreliable_index_leads_to_a_scan(tmp_path: Path) -> None:
    """Its oldest file is gone, and after a crash its newest entries are in doubt: a part of each queue is scanned."""
    path = write_store(tmp_path / "s", many(400))
    oldest, *_, newest = sorted((path / "index").iterdir())
    assert oldest < newest
    oldest.unlink()
    with library.open(path, "r") as store:
        place = store.read("t", 0, 60)[0].physical_offset
    crash(path, place)
    newest.write_bytes(bytes(newest.stat().st_size))
    for key in ("k0", "k1", "k200", "k241", "k398", "k399"):
        found, planned = read(path, key)
        assert found == scanned(path, key) != []
        assert planned < 401


@pytest.mark.parametrize("which", [0, 1, 3, -1])
@pytest.mark.parametrize("damage", ["gone", "zeroed", "half of it zeroed"])
def test_lost_index_file_leads_to_a_scan(tmp_path: Path, damage: str, which: int) -> None:
    """The files before and behind it look whole, and were taken to speak for what lies between."""
    path = write_store(tmp_path / "s", many(400))
    file = sorted((path / "index").iterdir())[which]
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes((data[: len(data) // 2] if damage != "zeroed" else b"").ljust(len(data), bytes(1)))
    assert len(sorted((path / "index").iterdir())) >= 6
    rows = {row[-1]: row for row in scanned(path, *(f"k{i}" for i in range(400)))}
    assert len(rows) == 400
    planned = []
    for key in [*rows][::40]:
        found, slots = read(path, key)
        assert found == [rows[key]]
        planned.append(slots)
    if damage == "gone":
        assert min(planned) < max(planned) < 100  # what is around the hole, and no more


def test_a_record_with_keys_in_two_files_is_found_when_one_of_them_is_lost(tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(30)]
    with open_store(tmp_path / "s", segment_bytes=1 << 16, index_entries=9) as store:
        for i in range(10):
            store.put("t", b"x", keys=keys[3 * i : 3 * i + 3])
    expected = {key: [row] for row in scanned(tmp_path / "s", *keys) for key in row[-1].split()}
    assert [*expected] == keys
    for lost in sorted((tmp_path / "s" / "index").iterdir()):
        path = tmp_path / lost.name
        shutil.copytree(tmp_path / "s", path)
        (path / "index" / lost.name).unlink()
        assert {key: read(path, key)[0] for key in keys} == expected


def test_undurable_messages_are_scanned(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", segment_bytes=1 << 16) as store:
        for i in range(300):
            store.put("t", b"x", keys=[f"k{i}"])
        store.dispatch()
        found, _ = read(tmp_path / "s", "k299,k3")
        assert found == [("t", 0, 3, "k3"), ("t", 0, 299, "k299")]


def test_damaged_record_keeps_its_row(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(40))
    assert read(path, "k5", onCorrupt="keep")[1] == 41


@pytest.mark.parametrize("name", ["rolled", "trimmed"])
def test_keys_of_a_java_store(golden: Golden, name: str) -> None:
    path = golden(name).path
    rows = rows_of(read_all(path, ["topic", "queue_id", "queue_offset", "keys"]))
    for key in sorted({key for row in rows for key in (row["keys"] or "").split()})[:5]:
        if "," not in key:
            expected = sorted(tuple(row.values()) for row in rows if key in (row["keys"] or "").split(" "))
            assert read(path, key)[0] == expected


@given(records=st.lists(odd_records(), max_size=30), data=st.data())
def test_rows_by_index_are_those_of_a_scan(records: list[Odd], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_store(Path(folder) / "s", [Odd(properties=b"KEYS\x01a b\x02UNIQ_KEY\x01u"), *records])
        bearing = {"a", "b", "u", "nobody"} | set(words(path))
        keys = data.draw(st.lists(st.sampled_from(sorted(bearing)), min_size=1, max_size=3, unique=True))
        assert read(path, ",".join(keys))[0] == scanned(path, *keys)


def words(path: Path) -> Iterator[str]:
    for row in rows_of(read_all(path, ["keys", "unique_key"])):
        for word in [*(row["keys"] or "").split(" "), row["unique_key"] or ""]:
            if word and word == word.strip() and "," not in word:
                yield word


def test_many_equal_hits_are_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "s", segment_bytes=1 << 16) as store:
        store.put_many("t", [OutgoingMessage(b"x", keys=["k"]) for _ in range(50)])
    monkeypatch.setattr(keyindex, "HITS_MAX", 20)
    found, planned = read(tmp_path / "s", "k")
    assert (len(found), planned) == (50, 50)
