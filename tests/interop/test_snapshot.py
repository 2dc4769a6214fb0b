"""A copy of what the real engine has open is a store that it opens, with all that it had been told to keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore
from mqstore import StoreConfig
from mqstore.log.snapshot.copy import snapshot_store
from tests.interop.comparing import assert_same, seen_by_java, seen_by_us
from tests.interop.javaengine import SIZES, JavaEngine, Jvm
from tests.waiting import until


@pytest.fixture
def second(jvm: Jvm) -> Iterator[JavaEngine]:
    with JavaEngine(jvm) as started:
        yield started


def fill(engine: JavaEngine, numbers: range) -> None:
    for i in numbers:
        engine.put("t", i % 3, b"%d" % i * 50, {"KEYS": f"k{i % 10}", "TAGS": "even" if i % 2 == 0 else "odd"})


def shown(path: Path) -> dict[tuple[str, int], list[bytes]]:
    return {queue: [row["body"] for row in rows] for queue, rows in seen_by_us(path).items()}


def timer_offset(path: Path) -> int:
    """Return `lastTimerQueueOffset` of a broker's checkpoint, which it saves each second.
    RocketMQ delivers a message twice if the copy has its timer unit, but not yet this offset."""
    return int.from_bytes((path / "config" / "timercheck").read_bytes()[16:24], "big")


@pytest.mark.parametrize("link", [False, True])
def test_of_a_store_that_java_has_open(tmp_path: Path, engine: JavaEngine, second: JavaEngine, link: bool) -> None:
    engine.open(tmp_path / "mq")
    fill(engine, range(1500))
    before, found = seen_by_java(engine), engine.query("t", "k3")
    assert found
    report = snapshot_store(tmp_path / "mq", tmp_path / "copy", link=link)
    assert (report.plan.writer_alive, report.messages, report.findings, report.truncated) == (True, 1500, [], [])
    fill(engine, range(1500, 1600))

    assert_same(seen_by_us(tmp_path / "copy"), before)
    second.open(tmp_path / "copy")
    assert_same(seen_by_java(second), before)
    assert second.query("t", "k3") == found
    fill(second, range(5000, 5200))
    grown = seen_by_java(second)
    second.close()
    engine.close()

    assert_same(seen_by_us(tmp_path / "copy"), grown)
    assert sum(map(len, seen_by_us(tmp_path / "mq").values())) == 1600
    with mqstore.open(tmp_path / "copy", "r", config=StoreConfig(**SIZES)) as copy:
        assert list(copy.verify()) == []


def test_of_a_broker_with_messages_that_wait(tmp_path: Path, engine: JavaEngine, second: JavaEngine) -> None:
    with mqstore.open(tmp_path / "mq", profile="rocketmq", config=StoreConfig(**SIZES)) as store:
        store.create_topic("late", queues=1)
        store.broker.commit("billing", "late", 0, 0)
    engine.start_broker(tmp_path / "mq")
    engine.put("late", 0, b"at once")
    engine.put("late", 0, b"level 3", {"DELAY": "3"})
    engine.put("late", 0, b"a moment", {"TIMER_DELIVER_MS": str(time.time_ns() // 1_000_000 + 10_000)})
    until(lambda: engine.queues()["late", 0][1] == 1, pause_s=0.2)
    until(lambda: timer_offset(tmp_path / "mq") == 1, pause_s=0.05)
    report = snapshot_store(tmp_path / "mq", tmp_path / "copy")
    assert report.findings == []
    assert report.plan.writer_alive
    wanted = [b"a moment", b"at once", b"level 3"]

    second.start_broker(tmp_path / "copy")
    until(lambda: second.queues()["late", 0][1] >= 3, pause_s=0.2)
    assert sorted(row["body"] for row in seen_by_java(second)["late", 0]) == wanted
    assert "orders" not in second.config()["topics"]["topicConfigTable"]
    assert second.config()["offsets"]["offsetTable"]["late@billing"] == {"0": 0}
    until(lambda: engine.queues()["late", 0][1] >= 3, pause_s=0.2)  # and the original goes on, as if nothing had been
    assert sorted(row["body"] for row in seen_by_java(engine)["late", 0]) == wanted
    second.close()
    engine.close()
    assert shown(tmp_path / "copy")["late", 0][0] == b"at once"


def test_of_a_broker_that_ours_takes_over(tmp_path: Path, engine: JavaEngine) -> None:
    with mqstore.open(tmp_path / "mq", profile="rocketmq", config=StoreConfig(**SIZES)) as store:
        store.create_topic("late", queues=1)
    engine.start_broker(tmp_path / "mq")
    engine.put("late", 0, b"at once")
    engine.put("late", 0, b"level 3", {"DELAY": "3"})
    engine.put("late", 0, b"a moment", {"TIMER_DELIVER_MS": str(time.time_ns() // 1_000_000 + 8_000)})
    until(lambda: engine.queues()["late", 0][1] == 1, pause_s=0.2)
    until(lambda: timer_offset(tmp_path / "mq") == 1, pause_s=0.05)
    assert snapshot_store(tmp_path / "mq", tmp_path / "copy").findings == []
    engine.close()
    with mqstore.open(tmp_path / "copy", config=StoreConfig(**SIZES)) as copy:
        until(lambda: copy.offsets("late", 0)[1] == 3, pause_s=0.2)
    assert sorted(shown(tmp_path / "copy")["late", 0]) == [b"a moment", b"at once", b"level 3"]
