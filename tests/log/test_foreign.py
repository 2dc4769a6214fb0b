"""What a RocketMQ broker keeps of queues that mqstore does not write: light queues, batch queues, addresses in units,
RocksDB. Nothing of it is taken for damage, and nothing done here takes it from the broker.

The stores and `said.json`, what the Java engine said of them, are `tests/golden/foreign.tar.xz`, made with 5.3.3:
topic `orders` with two queues of six messages each, tags `even` and `odd`, keys k0 to k11.

    light      each message is in %LMQ%a and %LMQ%b, in the first, or in the second
    batch      five batches of three, topic `grouped`, and a thirteenth message of `orders`
    addresses  enableConsumeQueueExt
    rocksdb    RocksDBMessageStore
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mqstore import StoreConfig
from mqstore.errors import InvalidMessageError
from mqstore.layout.arrays.dispatch import few, light_queues, rows_of
from mqstore.layout.arrays.scan import Headers, walk
from mqstore.layout.consumequeue import LAST_ADDRESS
from mqstore.layout.properties import encode_properties
from mqstore.log.reading.directory import walk_queue
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from tests.log.support import files, open_in

NAMES = ("light", "batch", "addresses", "rocksdb")
SMALL = StoreConfig(index_slots=53, index_entries=200)

Unit = tuple[int, int, int]


def said(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """What the Java engine said: (topic, queue id) -> its units, its messages' places."""
    lines = json.loads((path.parent / "said.json").read_text())[path.name]
    return {(line["topic"], line["queue_id"]): line for line in lines}


def opened(path: Path, mode: Any = "r", **options: Any) -> Any:
    return open_in(mode, path, config=SMALL, **options)


def units(path: Path, topic: str, queue_id: int) -> list[Unit]:
    with opened(path) as store:
        found = [tuple(unit) for unit in store.units(topic, queue_id, 0, 1000).tolist()]
        return cast(list[Unit], found)


def crash(path: Path) -> None:
    (path / "abort").write_text("1")


@pytest.mark.parametrize("name", NAMES)
def test_sound_foreign_store_is_found_sound(foreign: Callable[[str], Path], name: str) -> None:
    before = files(foreign(name))
    with opened(foreign(name)) as store:
        assert list(store.verifier().findings()) == []
        assert len(store.foreign()) == (name != "light")
    assert files(foreign(name)) == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("crashed", [False, True])
def test_recovery_keeps_foreign_queues(foreign: Callable[[str], Path], name: str, full: bool, crashed: bool) -> None:
    path = foreign(name)
    if crashed:
        crash(path)
    before = files(path)
    report = recover_store(path, RecoverOptions(full=full), config=SMALL)
    assert report.findings == []
    assert report.rebuilt.units == (12 if name == "rocksdb" else 0)  # of files: there were none
    after = files(path)
    for file in before:
        if file.startswith(("commitlog", "consumequeue", "batchconsumequeue", "compaction")):
            assert after[file] == before[file], file
    # RocketMQ does not start with queues of both kinds, and reads its log again only if it finds the mark.
    assert not (path / "consumequeue" / "grouped").exists()
    assert (path / "abort").exists() == (name == "rocksdb" or (crashed and name == "batch"))


@pytest.mark.parametrize("few_left", [0, 3])
def test_light_queues_are_built_as_the_java_engine_wrote_them(foreign: Callable[[str], Path], few_left: int) -> None:
    path = foreign("light")
    for (topic, queue_id), line in said(path).items():
        assert units(path, topic, queue_id) == [tuple(unit) for unit in line["units"]]
        folder = path / "consumequeue" / topic / str(queue_id)
        if few_left:
            file = folder / f"{0:020d}"
            file.write_bytes(file.read_bytes()[: 20 * few_left].ljust(1000, b"\0"))
        else:
            shutil.rmtree(folder)
    crash(path)
    report = recover_store(path, RecoverOptions(), config=SMALL)
    assert report.rebuilt.units == 8 + 8 + 12 - 4 * few_left
    for (topic, queue_id), line in said(path).items():
        assert units(path, topic, queue_id) == [tuple(unit) for unit in line["units"]]
    with opened(path) as store:
        assert list(store.verifier().findings()) == []


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_light_queues_are_read(foreign: Callable[[str], Path], mode: Any) -> None:
    path = foreign("light")
    with opened(path, mode) as store:
        for (topic, queue_id), line in said(path).items():
            places = line["messages"]
            assert [message.physical_offset for message in store.iter(topic, queue_id)] == places
            assert [message.offset for message in store.iter(topic, queue_id)] == [*range(len(places))]
            for at in range(len(places)):  # one at a time: another way
                [message] = store.read(topic, queue_id, at, 1)
                assert (message.topic, message.offset, message.physical_offset) == (topic, at, places[at])
            assert all(not hasattr(each, "kind") for each in walk_queue(store, topic, queue_id))
        assert [m.tag for m in store.read("%LMQ%a", tags="odd")] == ["odd"] * 4


def test_unwanted_light_unit_is_damage(foreign: Callable[[str], Path]) -> None:
    path = foreign("light")
    file = path / "consumequeue" / "%LMQ%b" / "0" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    data[0:20], data[20:40] = data[20:40], data[0:20]
    file.write_bytes(data)
    with opened(path) as store:
        assert {finding.kind for finding in store.verifier().findings()} == {"bad_unit"}
        assert [message.offset for message in store.read("%LMQ%b", 0, 0, 100)] == [2, 3, 4, 5, 6, 7]
    recover_store(path, RecoverOptions(full=True), config=SMALL)
    assert units(path, "%LMQ%b", 0) == [tuple(unit) for unit in said(path)["%LMQ%b", 0]["units"]]


def test_a_copy_is_in_no_light_queue(foreign: Callable[[str], Path]) -> None:
    """It has a place of its own, and the numbers are those of the record it was copied from."""
    path = foreign("light")
    with opened(path, "rw") as store:
        message = next(store.iter("orders", 0))
        store.copy_many([(message, "elsewhere", 0, message._encoded_properties)])
        store.append("elsewhere", 0, b"again", properties=message.stored_properties())
        store.dispatch()
        assert store.offsets("%LMQ%a", 0) == (0, 8)
        assert store.offsets("elsewhere", 0) == (0, 2)
    with opened(path) as store:
        assert list(store.verifier().findings()) == []


def test_few_records_leave_light_queues_to_arrays(foreign: Callable[[str], Path]) -> None:
    path = foreign("light")
    log = (path / "commitlog" / f"{0:020d}").read_bytes()
    end = max(place + size for line in said(path).values() for place, size, _ in line["units"])
    positions, _ = walk(log, 0, len(log))
    for count in (1, len(positions)):
        rows = rows_of(log, Headers(log, positions[:count]), 0, (1000,))
        assert len(rows) == count
        assert rows.record_bytes == (int(positions[count]) if count < len(positions) else end)
        queues = {(topic, queue_id): len(units) for topic, queue_id, _, units in rows.queues().each()}
        assert queues["%LMQ%a", 0] == (1 if count == 1 else 8)
    assert few(log, 0, int(positions[2]), 0, (1000,)) is None


@pytest.mark.parametrize(
    ("topic", "named", "numbers", "queues"),
    [
        ("orders", "%LMQ%a", "7", [("%LMQ%a", 0, 7)]),
        ("orders", "%LMQ%a,%LMQ%b", "7,0", [("%LMQ%a", 0, 7), ("%LMQ%b", 0, 0)]),
        ("orders", "plain", "7", [("plain", 3, 7)]),
        ("orders", "%LMQ%a,plain", "7,", []),  # Java sees one number for two names
        ("orders", "plain,%LMQ%a", ",7", []),  # it fails at the first
        ("orders", "%LMQ%a,%LMQ%b", "7", []),
        ("orders", "%LMQ%a", "", []),
        ("orders", "%LMQ%a", "x", []),
        ("orders", "../a,%LMQ%a", "1,2", [("%LMQ%a", 0, 2)]),
        ("%RETRY%g", "%LMQ%a", "7", []),
        ("SCHEDULE_TOPIC_XXXX", "%LMQ%a", "7", []),
        ("rmq_sys_wheel_timer", "%LMQ%a", "7", []),
    ],
)
def test_light_queues_of_a_record(topic: str, named: str, numbers: str, queues: list[Any]) -> None:
    given = {"INNER_MULTI_DISPATCH": named} | ({"INNER_MULTI_QUEUE_OFFSET": numbers} if numbers else {})
    assert light_queues(topic, 3, encode_properties(given)) == queues


def test_nobody_puts_to_a_topic_with_batch_queues(foreign: Callable[[str], Path]) -> None:
    path = foreign("batch")
    with opened(path, "rw") as store:
        with pytest.raises(InvalidMessageError, match="'grouped' has batch queues"):
            store.put("grouped", b"x")
        assert store.put("orders", b"x").offset == 7
        assert store.topics() == ["orders"]
    assert not (path / "abort").exists()
    assert not (path / "consumequeue" / "grouped").exists()


@pytest.mark.parametrize("tags", ["even", "odd", "even || odd"])
def test_tags_are_found_behind_addresses(foreign: Callable[[str], Path], tags: str) -> None:
    path = foreign("addresses")
    with opened(path) as store:
        assert all(unit[2] <= LAST_ADDRESS for unit in store.units("orders", 0, 0, 6).tolist())
        found = [
            (m.queue_id, m.offset) for queue_id in (0, 1) for m in store.read("orders", queue_id, 0, 100, tags=tags)
        ]
    wanted = [(q, n) for q in (0, 1) for n in range(6) if ("even", "odd")[q] in tags]
    assert found == wanted


def test_such_a_code_is_damage_where_there_are_no_files_for_addresses(foreign: Callable[[str], Path]) -> None:
    path = foreign("addresses")
    shutil.rmtree(path / "consumequeue_ext")
    with opened(path) as store:
        assert {finding.kind for finding in store.verifier().findings()} == {"bad_unit"}
    recover_store(path, RecoverOptions(full=True), config=SMALL)
    assert [tuple(unit) for unit in said(path)["orders", 0]["units"]] == units(path, "orders", 0)


def test_queues_in_files_are_built_beside_rocksdb(foreign: Callable[[str], Path]) -> None:
    path = foreign("rocksdb")
    kept = {name: data for name, data in files(path).items() if name.startswith("consumequeue")}
    with opened(path, "rw") as store:
        for (topic, queue_id), line in said(path).items():
            assert [message.physical_offset for message in store.iter(topic, queue_id)] == line["messages"]
    assert kept.items() <= files(path).items()


@pytest.mark.parametrize("folder", ["consumerOffsets", "topics", "rdb/config-storage-1"])
def test_rocksdb_tables_are_reported(foreign: Callable[[str], Path], folder: str) -> None:
    path = foreign("light")
    (path / "config" / folder).mkdir(parents=True)
    with opened(path) as store:
        assert store.foreign() == []
    (path / "config" / folder / "CURRENT").write_text("MANIFEST-000005\n")
    with opened(path) as store:
        [sentence] = store.foreign()
        assert f"({folder.partition('/')[0]})" in sentence
