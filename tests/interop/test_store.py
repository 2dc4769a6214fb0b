"""What we write is what the real engine reads, field by field, by key, by time; either goes on where the other died.

`test_golden.py` has the other direction, stores that the real engine wrote, and runs with every `make test`.
"""

from __future__ import annotations

import random
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import OutgoingMessage, SimulatedClock, StoreConfig
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from tests.interop.comparing import assert_same, new_store, seen_by_java, seen_by_us
from tests.interop.javaengine import SIZES, JavaEngine, Jvm

KEYS = ("k1", "k2", "k3")
LONG = "%RETRY%" + "l" * 200  # its length takes two bytes: V2


def fill(store: mqstore.Store, count: int) -> None:
    """Messages of every sort that we write."""
    draw = random.Random(5)
    for i in range(count):
        body = draw.randbytes(draw.choice((0, 1, 40, 300, 2000)))
        store.put("plain", body, queue_id=i % 4)
        store.put("tagged", body, tag=draw.choice(("paid", "AaBB", "ünï")), keys=[f"k{i % 50}", f"o-{i}"])
        store.put("props", body, properties={"a": "b", "größe": "✓ 𝄞", "long": "v" * 300}, flag=draw.choice((0, -1, 7)))
        store.log.put(LONG, body, keys=f"k{i % 50}")
        store.put_many("many", [body, OutgoingMessage(b"second", tag="t", keys="pair"), b""], queue_id=i % 2)
        store.put("grouped", body, message_group=f"g{i % 5}", unique_key=f"0A0B0C0D{i:024X}")
        store.put("squeezed", zlib.compress(b"again and again " * 40), compressed="zlib", keys="z")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("host", ["127.0.0.1:10911", "[2001:db8::1]:10911"])
def test_java_reads_every_field_of_what_we_write(path: Path, engine: JavaEngine, host: str) -> None:
    with mqstore.open(path, profile="rocketmq", config=StoreConfig(**SIZES, store_host=host)) as store:
        fill(store, 200)
    ours = seen_by_us(path)
    assert sum(map(len, ours.values())) == 200 * 9
    engine.open(path)
    assert_same(ours, seen_by_java(engine))
    engine.close()
    assert_same(ours, seen_by_us(path))


def test_java_finds_by_key_and_by_time_what_we_find(path: Path, engine: JavaEngine) -> None:
    clock = SimulatedClock()
    begin_ms = clock.now_ms()
    draw = random.Random(7)
    with new_store(path, clock=clock) as store:
        for i in range(1500):
            store.put("t", b"%d" % i, i % 3, keys=[f"k{draw.randrange(40)}"], unique_key=f"U{i:031d}")
            clock.advance(draw.choice((0, 0, 1, 700, 2500)))
        last_ms = clock.now_ms()
        keys = {f"k{n}": [m.physical_offset for m in store.find("t", key=f"k{n}", limit=1000)] for n in range(41)}
        unique = {n: [m.physical_offset for m in store.find("t", unique_key=f"U{n:031d}")] for n in range(0, 1500, 97)}
        # Times are those of messages: for others, and beyond the end, the real engine has its own ideas.
        stamps = [m.store_timestamp_ms for m in store.iter("t", 1)][::37]
        lower = [store.offset_at("t", 1, stamp) for stamp in stamps]
        upper = [store.offset_at("t", 1, stamp, "upper") for stamp in stamps]
    engine.open(path)
    for key, offsets in keys.items():
        assert sorted(engine.query("t", key)) == sorted(offsets), key
    for n, offsets in unique.items():
        assert engine.query("t", f"U{n:031d}") == offsets
    middle_ms = (begin_ms + last_ms) // 2
    early = engine.query("t", "k3", end_ms=middle_ms)
    late = engine.query("t", "k3", begin_ms=middle_ms + 1000)
    assert early
    assert late
    assert not set(early) & set(late)
    assert [engine.at_time("t", 1, stamp) for stamp in stamps] == lower
    assert [engine.at_time("t", 1, stamp, last=True) for stamp in stamps] == upper


class Relay:
    """A store that goes from one engine to the other, each leaving it as it will, and a list of what is in it."""

    def __init__(self, path: Path, jvm: Jvm, seed: int) -> None:
        self.path, self.jvm = path, jvm
        self.draw = random.Random(seed)
        self.engine = JavaEngine(jvm)
        self.index_whole = True
        self.wrote: dict[tuple[str, int], list[tuple[bytes, str | None, str]]] = {}

    def _next(self) -> Iterator[tuple[str, int, bytes, dict[str, str]]]:
        for _ in range(self.draw.randrange(120)):
            topic, queue_id = self.draw.choice((("a", 0), ("a", 1), ("b", 0), (LONG, 0)))
            body = self.draw.randbytes(self.draw.choice((1, 30, 400, 5000)))
            properties = {"KEYS": f"k{self.draw.randrange(30)}", "UNIQ_KEY": f"{self.draw.getrandbits(128):032X}"}
            if self.draw.random() < 0.5:
                properties["TAGS"] = self.draw.choice("xyz")
            self.wrote.setdefault((topic, queue_id), []).append((body, properties.get("TAGS"), properties["KEYS"]))
            yield topic, queue_id, body, properties

    def _crashed(self) -> bool:
        return (self.path / "abort").exists()

    def ours(self) -> None:
        store = new_store(self.path, clock=SimulatedClock(time.time_ns() // 1_000_000))
        self._check_keys({key: [m.physical_offset for m in store.find("a", key=key, limit=10_000)] for key in KEYS})
        for topic, queue_id, body, properties in self._next():
            receipt = store.append(topic, queue_id, body, properties=properties)
            assert receipt.offset == len(self.wrote[topic, queue_id]) - 1
        if self.draw.random() < 0.5:
            store.dispatch()  # else what a crash leaves is a log without its units
        if self.draw.random() < 0.5:
            store.close()
            return
        image = self.path.with_name("image")
        shutil.copytree(self.path, image)  # what SIGKILL leaves: every byte written, nothing said of an end
        store.close()
        shutil.rmtree(self.path)
        image.rename(self.path)

    def java(self) -> None:
        # The real engine loses entries of its index to a crash, those of messages older than 3 s; `recover` finds them.
        self.index_whole = self.index_whole and not self._crashed()
        self.engine.open(self.path)
        self.check_java()
        for topic, queue_id, body, properties in self._next():
            offset, _ = self.engine.put(topic, queue_id, body, properties)
            assert offset == len(self.wrote[topic, queue_id]) - 1
        if self.draw.random() < 0.5:
            self.engine.close()
            return
        self.engine.halt()
        self.engine.__exit__()
        self.engine = JavaEngine(self.jvm)

    def check_java(self) -> None:
        self._check(seen_by_java(self.engine))
        self._check_keys({key: self.engine.query("a", key) for key in KEYS})

    def check_ours(self) -> None:
        with new_store(self.path) as store:
            wrong = [finding for finding in store.verify() if self.index_whole or "index" not in finding.kind]
            assert wrong == []
        self._check(seen_by_us(self.path))
        recover_store(self.path, RecoverOptions(full=True), config=StoreConfig(**SIZES))
        self.index_whole = True
        with new_store(self.path) as store:
            assert list(store.verify()) == []
            self._check_keys({key: [m.physical_offset for m in store.find("a", key=key, limit=10_000)] for key in KEYS})

    def _check_keys(self, found: dict[str, list[int]]) -> None:
        for key, offsets in found.items():
            count = sum(k == key for (topic, _), each in self.wrote.items() if topic == "a" for *_, k in each)
            assert len(set(offsets)) == count or not self.index_whole, key

    def _check(self, rows: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
        read = {q: [(r["body"], r["tags"], r["keys"]) for r in lines] for q, lines in rows.items()}
        assert read == self.wrote


@pytest.mark.parametrize("seed", range(6))
def test_either_goes_on_where_the_other_stopped_or_died(path: Path, jvm: Jvm, seed: int) -> None:
    relay = Relay(path, jvm, seed)
    try:
        relay.ours()
        for _ in range(8):
            relay.draw.choice((relay.ours, relay.java))()
        relay.check_ours()
        relay.engine.open(path)
        relay.check_java()
        relay.engine.close()
    finally:
        relay.engine.__exit__()


@pytest.mark.parametrize("end", ["closed", "halted"])
def test_a_topic_that_java_deleted_and_made_anew_is_the_new_one_for_both(
    path: Path, engine: JavaEngine, jvm: Jvm, end: str
) -> None:
    """Its old records stay in the log, with greater queue offsets than the new ones have."""

    def fill(topic: str, numbers: range) -> None:
        for i in numbers:
            engine.put(topic, i % 2, b"%d " % i * 50, {"KEYS": f"k{i}"})

    engine.open(path)
    fill("others", range(60))
    fill("orders", range(300))
    engine.delete_topics("orders")
    fill("others", range(60, 90))
    fill("orders", range(500, 530))
    wanted = seen_by_java(engine)
    assert [row["queue_offset"] for row in wanted["orders", 0]] == list(range(15))
    if end == "closed":
        engine.close()
    else:
        engine.halt()
    with mqstore.open(path, "r", config=StoreConfig(**SIZES)) as store:
        assert list(store.verify()) == []
    recovered = shutil.copytree(path, path.with_name("recovered"))
    report = recover_store(recovered, RecoverOptions(full=True), config=StoreConfig(**SIZES))
    assert (report.findings, report.rebuilt.units) == ([], 0)
    for each in (path, recovered):
        assert_same(seen_by_us(each), wanted)
        with JavaEngine(jvm) as other:
            other.open(each)
            assert_same(seen_by_java(other), wanted)
            other.close()


def test_topic_deleted_by_java_returns_from_records(path: Path, engine: JavaEngine) -> None:
    """As after a crash of the real engine; after a clean end that looks no further than the queues there are."""
    engine.open(path)
    for i in range(100):
        engine.put("orders", 0, b"%d" % i)
    engine.delete_topics("orders")
    engine.put("others", 0, b"last")
    engine.close()
    engine.open(path)
    assert ("orders", 0) not in engine.queues()
    engine.close()
    recovered = shutil.copytree(path, path.with_name("recovered"))
    recover_store(recovered, RecoverOptions(full=True), config=StoreConfig(**SIZES))
    assert len(seen_by_us(recovered)["orders", 0]) == 100
    (path / "abort").touch()
    engine.open(path)
    assert engine.queues()["orders", 0] == (0, 100)
    engine.close()
