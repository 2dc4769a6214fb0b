"""`mqstore recover --carve`: whole records in any bytes become a new store, each once, at their old offsets."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from examples import shop
from mqstore import SimulatedClock, StoreConfig
from mqstore.broker.admin.salvage import carve as carving
from mqstore.engine import StoreFiles
from tests.log.support import flip
from tests.records import encode_record
from tests.tools.support import mqstore, mqstore_json, snapshot

JUNK = random.Random(1).randbytes(70_001)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("carve") / "shop"
    shop.fill(path)
    return path


def logs(store: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((store / "commitlog").glob("0*"))]


def carved(into: Path, *sources: Path, exit_code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = mqstore_json("recover", "--carve", *sources, "--into", into, exit_code=exit_code)
    return found


def differing(a: Path, b: Path) -> list[dict[str, Any]]:
    """Return the messages that differ in two stores, which have other settings."""
    found = mqstore_json("diff", a, b, exit_code=1)["differences"]
    return [row for row in found if row["kind"] == "messages"]


def messages(store: Path) -> int:
    return sum(row["messages"] for row in mqstore_json("du", store)["topics"])


IMAGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "segments without names": lambda found: found,
    "segments backwards": lambda found: found[::-1],
    "an image, records at any byte": lambda found: [JUNK + b"\0" * 4097 + b"".join(found[::-1]) + JUNK[:3]],
    "everything twice": lambda found: [*found, JUNK + b"".join(found)],
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("window", [64 << 20, 40_000])
def test_every_record_is_found_once_at_its_old_offsets(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, window: int
) -> None:
    monkeypatch.setattr(carving, "_WINDOW", window)
    monkeypatch.setattr(carving, "LARGEST", window // 4)
    sources = []
    for number, data in enumerate(IMAGES[name](logs(made))):
        sources.append(tmp_path / f"source-{number}")
        sources[-1].write_bytes(data)
    before = [source.read_bytes() for source in sources]

    found = carved(tmp_path / "new", *sources)

    count = messages(made)
    times = 2 if name == "everything twice" else 1
    assert (found["found"], found["duplicates"]) == (count * times, count * (times - 1))
    assert (found["damaged"], found["renumbered"], found["refused"], found["unlisted"]) == (0, 0, {}, 0)
    assert differing(made, tmp_path / "new") == []
    mqstore("verify", tmp_path / "new", exit_code=0)
    assert [source.read_bytes() for source in sources] == before


def test_carved_store_takes_messages_and_delivers(made: Path, tmp_path: Path) -> None:
    sources = sorted((made / "commitlog").glob("0*"))
    carved(tmp_path / "new", *sources)

    config = StoreConfig(clock=SimulatedClock(shop.BEGIN_MS + 7_200_000 + 86_400_000))
    with library.open(tmp_path / "new", config=config) as store:
        assert store.put("orders", b"more", queue_id=1).offset == 90
        store.broker.run_once()
        assert [message.body for message in store.read("orders", 0, 90)] == [b"remind"]
        assert store.queue("mail").get(timeout=0).value == b"to ada: thank you"


def test_topic_that_the_table_cannot_name_is_carved_too(tmp_path: Path) -> None:
    """Such as one of another program: reading needs no entry."""
    with library.open(tmp_path / "old", profile="rocketmq", config=StoreConfig(segment_bytes=1 << 16)) as store:
        store.put("aXb", b"x", queue_id=0)
        store.queue("jobs").put(b"y")
        store.queue("jobs").get().ack()
    [data] = logs(tmp_path / "old")
    (tmp_path / "source").write_bytes(data.replace(b"\x03aXb", b"\x03a@b"))

    assert carved(tmp_path / "new", tmp_path / "source")["refused"] == {}

    mqstore("verify", tmp_path / "new", exit_code=0)
    with library.open(tmp_path / "new", "r") as reader:
        assert [message.body for message in reader.read("a@b", 0, 0)] == [b"x"]


def record(place: int, body: bytes = b"x", offset: int = 0, **options: Any) -> bytes:
    fields: dict[str, Any] = {"queue_id": 0, "born_timestamp_ms": 1, "store_timestamp_ms": 2, **options}
    return encode_record(
        **{"topic": "t", "checksum": "crc32c-record", **fields}, body=body, queue_offset=offset, physical_offset=place
    )


def four(name: bytes) -> list[bytes]:
    """Return the records of a log."""
    found = list[bytes]()
    for number in range(4):
        found.append(record(sum(map(len, found)), name * 8 + b"%d" % number, number))
    return found


FOURS = [name * 8 + b"%d" % number for name in (b"a", b"b") for number in range(4)]


def bodies(store: Path, topic: str = "t") -> list[bytes]:
    with StoreFiles(store) as files:
        found = [each for ref in files.bounds(topic) for each in files.walk(ref)]
    return [each.body for each in found if isinstance(each, library.Message)]


@pytest.mark.parametrize("damaged", [False, True])
def test_record_in_a_body_counts_only_if_the_outer_one_is_damaged(tmp_path: Path, damaged: bool) -> None:
    inner = record(5000, b"inner")
    outer = record(100, b"before" + inner + b"after")
    source = tmp_path / "source"
    source.write_bytes(b"?" + outer)
    if damaged:
        flip(source, 90)

    found = carved(tmp_path / "new", source, exit_code=int(damaged))

    assert (found["found"], found["damaged"]) == (1, int(damaged))
    assert bodies(tmp_path / "new") == [b"inner" if damaged else b"before" + inner + b"after"]


def test_damaged_record_leaves_its_neighbours_where_they_were(made: Path, tmp_path: Path) -> None:
    with library.open(made, "r") as store:
        [message] = store.read("orders", 1, 5, 1)
    source = tmp_path / "source"
    source.write_bytes(b"".join(logs(made)))
    flip(source, message.physical_offset + 100)

    found = carved(tmp_path / "new", source, exit_code=1)

    assert (found["found"], found["damaged"]) == (messages(made) - 1, 1)
    [lost] = differing(made, tmp_path / "new")
    assert [lost[name] for name in ("topic", "queue_id", "first", "stop", "in")] == ["orders", 1, 5, 6, "a"]


def test_records_of_a_second_store_get_new_offsets(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path, name in ((first, b"a"), (second, b"b")):
        path.write_bytes(b"".join(four(name)))

    found = carved(tmp_path / "new", first, second, first, second)

    assert (found["found"], found["duplicates"], found["renumbered"]) == (16, 8, 4)
    assert bodies(tmp_path / "new") == FOURS
    note = mqstore("recover", "--carve", first, second, "--into", tmp_path / "again", exit_code=0).stderr
    assert "4 records had a place that another one has" in note


@pytest.mark.parametrize("turned", [False, True])
def test_place_that_overlaps_another_record_is_taken(tmp_path: Path, turned: bool) -> None:
    """The bytes of the place are zeros either way: they are in the body of the other record, or not yet written."""
    records = [record(0, bytes(5000), turned), record(200, b"stale", not turned)]
    source = tmp_path / "source"
    source.write_bytes(b"".join(records[::-1] if turned else records))

    found = carved(tmp_path / "new", source)

    assert (found["found"], found["renumbered"]) == (2, 1)
    assert bodies(tmp_path / "new") == [b"stale", bytes(5000)] if turned else [bytes(5000), b"stale"]


def test_second_store_keeps_its_order_if_its_files_come_in_another(tmp_path: Path) -> None:
    sources = [tmp_path / f"{number}" for number in range(8)]
    for source, piece in zip(sources, four(b"a") + four(b"b"), strict=True):
        source.write_bytes(piece)

    carved(tmp_path / "new", *sources[:4], *reversed(sources[4:]))

    assert bodies(tmp_path / "new") == FOURS


def test_records_of_rocketmq_are_recognized(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"???" + record(1 << 32, b"java", 7, checksum="crc32-body"))

    found = carved(tmp_path / "new", source)

    assert (found["profile"], found["found"]) == ("rocketmq", 1)
    with library.open(tmp_path / "new", "r") as store:
        assert [(each.offset, each.physical_offset) for each in store.read("t", 0, 7)] == [(7, 1 << 32)]


def test_hostile_places_and_names_are_put_somewhere_or_refused(tmp_path: Path) -> None:
    places = [-1, 5, (1 << 63) - 9, 1 << 61, (64 << 20) - 3, 1 << 40, (1 << 40) + 1]
    data = b"".join(record(place, b"%d" % place, n) for n, place in enumerate(places))
    data += record(300, topic="../../\x1b[2J") + record(900, topic=b"\xff\xfe", queue_id=-5)
    source = tmp_path / "source"
    source.write_bytes(data + data[:50])

    mqstore("recover", "--carve", source, "--into", tmp_path / "inner" / "new")

    assert {int(body) for body in bodies(tmp_path / "inner" / "new")} == {each for each in places if each >= 0}
    assert sorted(os.listdir(tmp_path)) == ["inner", "source"]


def test_dry_run_writes_nothing_and_counts_the_same(made: Path, tmp_path: Path) -> None:
    sources = sorted((made / "commitlog").glob("0*"))
    before = snapshot(made)

    planned = mqstore_json("recover", "--carve", *sources, "--into", tmp_path / "new", "--dry-run")

    assert not (tmp_path / "new").exists()
    assert snapshot(made) == before
    assert {**carved(tmp_path / "new", *sources), "dry_run": True} == planned


def test_wrong_use_is_refused_before_anything_is_written(made: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(record(0))
    os.mkfifo(tmp_path / "pipe")
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter").write_text("")
    for words, told in {
        ("--carve", source): "--carve needs --into",
        (made, "--into", full): "--into goes with --carve",
        ("--carve", source, "--into", full): "must be an empty folder",
        ("--carve", tmp_path / "pipe", "--into", tmp_path / "new"): "neither a file nor a block device",
    }.items():
        assert told in mqstore("recover", *words, exit_code=2).stderr
    mqstore("recover", "--carve", tmp_path / "absent", "--into", tmp_path / "new", exit_code=3)
    assert sorted(os.listdir(tmp_path)) == ["full", "pipe", "source"]
