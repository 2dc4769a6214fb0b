"""A topic that a Java broker deleted and made anew: the queue's files, not the old records, say what it holds. And what
is wrong with a queue is found as strictly as in a store of one life."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore.engine import Finding
from mqstore.jobs import verify
from mqstore.layout.consumequeue import UNIT_BYTES
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore.log.store import MessageStore
from tests.log.support import delete_as_java, files, note_in_checkpoint, open_store

Rows = list[tuple[int, bytes]]
SEGMENTS = {"one segment": 1 << 16, "many segments": 4096}


def put(store: MessageStore, topic: str, numbers: range) -> None:
    for i in numbers:
        store.put(topic, b"%s %05d" % (topic.encode(), i) * 6, queue_id=i % 2, keys=f"{topic}{i}")


def rows(root: Path, topic: str = "orders", queue_id: int = 0) -> Rows:
    with open_store(root, "r") as store:
        return [(message.offset, bytes(message.body)) for message in store.iter(topic, queue_id)]


def found(root: Path) -> list[Finding]:
    with open_store(root, "r") as store:
        return list(store.verify())


def kinds(root: Path) -> set[str]:
    """What is found, by one process and in ranges alike."""
    one = {finding.kind for finding in found(root)}
    assert {each.kind for each in verify(root, range_bytes=5_000).findings} == one
    return one


@pytest.fixture(params=SEGMENTS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three generations of a topic, the last one the shortest, and others between them."""
    path = tmp_path / "mq"
    size = SEGMENTS[request.param]
    with open_store(path, profile="rocketmq", segment_bytes=size, consumequeue_units=8) as store:
        put(store, "orders", range(90))
        put(store, "others", range(40))
    for numbers in (range(200, 290), range(500, 530)):
        delete_as_java(path, "orders")
        with open_store(path) as store:
            put(store, "orders", numbers)
            put(store, "others", range(4))
    return path


def test_generations_are_ordered_and_stable(root: Path, tmp_path: Path) -> None:
    before = {queue_id: rows(root, queue_id=queue_id) for queue_id in (0, 1)}
    assert [offset for offset, _ in before[0]] == list(range(15))
    assert found(root) == []
    assert kinds(root) == set()
    queues = {name: data for name, data in files(root).items() if name.startswith("consumequeue")}
    assert recover_store(root, RecoverOptions(full=True, dry_run=True)).rebuilt.units == 0
    ways = {"recover": RecoverOptions(full=True), "truncate": RecoverOptions(full=True, prefix=True)}
    for way, options in ways.items():
        copy = shutil.copytree(root, tmp_path / way)
        report = recover_store(copy, options)
        assert (report.findings, report.rebuilt.units) == ([], 0)
        assert {name: data for name, data in files(copy).items() if name.startswith("consumequeue")} == queues


@pytest.mark.parametrize("killed", [False, True])
def test_opening_keeps_the_generation(tmp_path: Path, killed: bool) -> None:
    root = tmp_path / "mq"
    with open_store(root, profile="rocketmq", segment_bytes=1 << 15, consumequeue_units=8) as store:
        put(store, "others", range(180))
        put(store, "orders", range(40))
        put(store, "others", range(2))
    delete_as_java(root, "orders")
    with open_store(root) as store:
        put(store, "orders", range(500, 530))
    before = rows(root)
    note_in_checkpoint(root, queues=None, flushed=None, dispatched=None, clean_end=None)  # as a Java broker's
    if killed:
        (root / "abort").write_text("1")
    with open_store(root) as store:
        assert store.recovery.scanned_from == (0 if killed else 1 << 15)
        assert store.recovery.findings == []
        assert store.recovery.rebuilt.units == 0
        assert store.put("orders", b"next", queue_id=0).offset == 15
    assert rows(root)[:15] == before


# -- damage: each of these was found in a store of one life, too -------------------------------------------------------


def units(root: Path, first: int) -> Path:
    """The file with unit `first` of a queue."""
    return root / "consumequeue" / "orders" / "0" / f"{first // 8 * 8 * UNIT_BYTES:020d}"


def lost(root: Path, slot: int) -> None:
    overwritten(root, slot, bytes(UNIT_BYTES))


def overwritten(root: Path, slot: int, unit: bytes) -> None:
    data = bytearray(units(root, slot).read_bytes())
    at = slot % 8 * UNIT_BYTES
    data[at : at + UNIT_BYTES] = unit
    units(root, slot).write_bytes(data)


def unit_of(root: Path, topic: str, queue_id: int, slot: int) -> bytes:
    with open_store(root, "r") as store:
        return store.queue_table.create(topic, queue_id).read(slot, 1)


def a_file_lost(root: Path) -> None:
    units(root, 0).unlink()


def first_lost(root: Path) -> None:
    lost(root, 0)


def middle_lost(root: Path) -> None:
    lost(root, 6)


def last_lost(root: Path) -> None:
    lost(root, 14)


def first_of_another(root: Path) -> None:
    overwritten(root, 0, unit_of(root, "others", 0, 1))


def first_of_its_second(root: Path) -> None:
    overwritten(root, 0, unit_of(root, "orders", 0, 1))


def middle_of_another(root: Path) -> None:
    overwritten(root, 6, unit_of(root, "orders", 1, 6))


def one_too_many(root: Path) -> None:
    overwritten(root, 15, unit_of(root, "others", 0, 1))


DAMAGES = (a_file_lost, first_lost, middle_lost, first_of_another, first_of_its_second, middle_of_another, one_too_many)


@pytest.mark.parametrize("damage", [*DAMAGES, last_lost])
def test_a_wrong_unit_is_found_and_mended(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """In a store of one life, and one whose topic was made anew, from where the new one has what the old had not."""
    for name in ("one life", "anew"):
        root = tmp_path / name
        with open_store(root, profile="rocketmq", consumequeue_units=8) as store:
            put(store, "orders" if name == "anew" else "others", range(90))
            put(store, "others", range(40))
        if name == "anew":
            with open_store(root, "r") as store:
                old = store.queue_table.create("orders", 0).max_offset
            assert old > 15
            delete_as_java(root, "orders")
        with open_store(root) as store:
            put(store, "orders", range(500, 530))
        before = rows(root)
        damage(root)
        if damage is last_lost:
            assert kinds(root) == {"missing_units"}
        else:
            assert kinds(root)
        if name == "one life" or damage in (middle_lost, middle_of_another, one_too_many, last_lost):
            recover_store(root, RecoverOptions(full=True))
            assert rows(root) == before
            assert kinds(root) == set()


def test_empty_queue_is_built_from_all_records(root: Path) -> None:
    """What a deletion leaves and what a disk loses look the same: here the records decide, as for a Java broker after a
    crash."""
    shutil.rmtree(root / "consumequeue")
    assert "missing_units" in kinds(root)
