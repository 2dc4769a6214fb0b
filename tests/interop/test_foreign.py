"""Kinds of queues that only the real engine writes, before and after ours was at work on the directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqstore import StoreConfig
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore.log.recovery.report import RecoveryReport
from mqstore.log.store import MessageStore
from tests.interop.javaengine import SIZES, JavaEngine, Jvm

CONFIG = StoreConfig(**SIZES)  # type: ignore[arg-type]
LIGHT = {"enableLmq": True, "enableMultiDispatch": True}
BATCH = {"mapperFileSizeBatchConsumeQueue": 46 * 50}
ADDRESSES = {"enableConsumeQueueExt": True, "mappedFileSizeConsumeQueueExt": 1 << 14}

Units = dict[tuple[str, int], list[tuple[int, int, int]]]


def recovered(path: Path) -> RecoveryReport:
    return recover_store(path, RecoverOptions(full=True), config=CONFIG)


def ours_writes(path: Path) -> None:
    """An opening for writing, with messages of our own."""
    with MessageStore(path, config=CONFIG) as store:
        for n in range(5):
            store.put("ours", b"%d" % n, 0)


def fill(engine: JavaEngine, count: int, properties: Callable[[int], dict[str, str]]) -> None:
    for n in range(count):
        engine.put("orders", n % 2, b"order %d" % n, {"KEYS": f"k{n}", "TAGS": f"t{n % 3}", **properties(n)})


def units_of(engine: JavaEngine) -> Units:
    return {key: engine.units(*key) for key in engine.queues()}


def light(n: int) -> dict[str, str]:
    queues = ["%LMQ%one"] * (n % 2 == 0) + ["%LMQ%two"] * (n % 3 == 0)
    return {"INNER_MULTI_DISPATCH": ",".join(queues)} if queues else {}


@pytest.mark.parametrize("end", ["close", "halt"])
@pytest.mark.parametrize("lost", ["nothing", "light", "all"])
def test_light_queues(jvm: Jvm, tmp_path: Path, end: str, lost: str) -> None:
    path = tmp_path / "store"
    with JavaEngine(jvm) as engine:
        engine.open(path, **LIGHT)
        fill(engine, 120, light)
        before = units_of(engine)
        getattr(engine, end)()
    assert {name for name, _ in before} == {"orders", "%LMQ%one", "%LMQ%two"}
    if lost != "nothing":
        shutil.rmtree(path / "consumequeue" if lost == "all" else path / "consumequeue" / "%LMQ%two")
    recovered(path)
    with ReadOnlyMessageStore(path, config=CONFIG) as store:
        assert list(store.verifier().findings()) == []
        for (topic, queue_id), units in before.items():
            assert [message.physical_offset for message in store.iter(topic, queue_id)] == [unit[0] for unit in units]
    ours_writes(path)
    with JavaEngine(jvm) as later:
        later.open(path, **LIGHT)
        after = units_of(later)
        assert {key: after[key] for key in before} == before
        fill(later, 7, light)  # and goes on with the numbers
        assert len(later.messages("%LMQ%one", 0)) == 60 + 4
        later.close()
    with ReadOnlyMessageStore(path, config=CONFIG) as store:
        assert list(store.verifier().findings()) == []


@pytest.mark.parametrize("end", ["close", "halt"])
def test_batch_queues(jvm: Jvm, tmp_path: Path, end: str) -> None:
    path = tmp_path / "store"
    with JavaEngine(jvm) as engine:
        engine.open(path, batch_topics=["grouped"], **BATCH)
        fill(engine, 20, lambda n: {})
        for n in range(10):
            engine.put("grouped", 0, b"batch %d" % n, {"INNER_NUM": "3"})
        fill(engine, 20, lambda n: {})
        before = engine.queues()
        getattr(engine, end)()
    if end == "halt":  # what a crash may take: the last units were on no disk
        file = path / "batchconsumequeue" / "grouped" / "0" / f"{0:020d}"
        file.write_bytes(file.read_bytes()[: 46 * 6].ljust(46 * 50, b"\0"))
    assert recovered(path).findings == []
    ours_writes(path)
    with JavaEngine(jvm) as later:
        later.open(path, batch_topics=["grouped"], **BATCH)
        assert {key: later.queues()[key] for key in before} == before
        assert later.queues()["ours", 0] == (0, 5)
        later.close()


def test_addresses(jvm: Jvm, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with JavaEngine(jvm) as engine:
        engine.open(path, **ADDRESSES)
        fill(engine, 90, lambda n: {})
        before = units_of(engine)
        engine.close()
    assert not recovered(path).changed
    with ReadOnlyMessageStore(path, config=CONFIG) as store:
        read = [message.tag for queue_id in (0, 1) for message in store.read("orders", queue_id, 0, 100, tags="t1")]
        assert read == ["t1"] * 30
    ours_writes(path)
    with JavaEngine(jvm) as later:
        later.open(path, **ADDRESSES)
        after = units_of(later)
        assert {key: after[key] for key in before} == before
        later.close()


def test_rocksdb(jvm: Jvm, tmp_path: Path) -> None:
    path = tmp_path / "store"
    rocksdb: dict[str, Any] = {"storeType": "defaultRocksDB"}
    with JavaEngine(jvm) as engine:
        engine.open(path, **rocksdb)
        fill(engine, 60, lambda n: {})
        engine.close()
    recovered(path)
    ours_writes(path)
    with ReadOnlyMessageStore(path, config=CONFIG) as store:
        assert list(store.verifier().findings()) == []
        assert [store.offsets("orders", queue_id) for queue_id in (0, 1)] == [(0, 30), (0, 30)]
    with JavaEngine(jvm) as later:
        later.open(path, **rocksdb)
        assert [len(later.messages("orders", queue_id)) for queue_id in (0, 1)] == [30, 30]
        assert len(later.messages("ours", 0)) == 5
        later.close()
