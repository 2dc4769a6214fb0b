"""The dispatcher: units and index entries as the Java engine builds them, seen at once, whatever the disk does.

format#unit, format#dispatch and format#index; expected bytes are the golden stores' own files.
"""

from __future__ import annotations

import errno
import random
import shutil
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqstore import OutgoingMessage, SimulatedClock, StoreConfig
from mqstore.errors import StoreFullError, StoreIOError
from mqstore.layout.hosts import encode_host
from mqstore.log.derived import index as index_module
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore.log.store import MessageStore
from mqstore.log.writing.dispatcher import Dispatcher, slot_runs
from mqstore.remoting.short import bodies_bytes
from tests.conftest import GOLDEN_NAMES, Golden, GoldenStore
from tests.faults import FaultyFileSystem
from tests.log.support import SEGMENT, all_queues, files, flip_log, open_store, units_of, until_parked
from tests.records import encode_record
from tests.waiting import ended, in_thread

VOID = (0, 0x7FFFFFFF, 0)
HOST = encode_host("127.0.0.1:0")


# -- as the Java engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "missing"), [*((name, "both") for name in GOLDEN_NAMES), ("crashed", "consumequeue"), ("clean", "index")]
)
def test_units_and_index_are_rebuilt_as_the_java_engine_wrote_them(golden: Golden, name: str, missing: str) -> None:
    java = golden(name)
    original = java.units
    (bounds,) = java.of("store")
    for folder in ("consumequeue", "index"):
        if missing in (folder, "both"):
            shutil.rmtree(java.path / folder)
    # With its files gone nothing tells the size of a queue's.
    with open_store(java.path, consumequeue_units=bounds["consumequeue_segment_bytes"] // 20) as store:
        if missing != "consumequeue":  # an index is rebuilt by an opening only where reading finds it behind
            store.close()
            recover_store(java.path, RecoverOptions(full=True))
    rebuilt = GoldenStore(name, java.path, java.lines).units
    with open_store(java.path) as store:
        living = {(line["topic"], line["queue_id"]) for line in java.of("message")}
        assert {key for key, data in rebuilt.items() if data.strip(b"\0")} == living
        for (topic, queue_id), data in rebuilt.items():
            base = int(min(p.name for p in (java.path / "consumequeue" / topic / str(queue_id)).iterdir()))
            first, end = store.offsets(topic, queue_id)
            expected = original[topic, queue_id][first * 20 : end * 20]
            assert data[first * 20 - base : end * 20 - base] == expected
            assert not data[end * 20 - base :].strip(b"\0")
        for line in java.of("key"):
            found = store.find(line["topic"], key=line["key"], limit=10_000)
            found += store.find(line["topic"], unique_key=line["key"], limit=10_000)
            assert {m.physical_offset for m in found} >= set(line["physical_offsets"])
            if name != "trimmed":  # where the Java engine misses some
                assert {m.physical_offset for m in found} == set(line["physical_offsets"])
        assert list(store.verify()) == []


def test_the_unit_vectors(tmp_path: Path) -> None:
    """format#vectors: a tag whose hash is negative, the least of hashes, a delay level, no tag, odd tags."""
    clock = SimulatedClock(1_700_000_000_123)
    hashes = {
        "TagA": 2598919, "TagB": 2598920, "pay-ok": -995269343, "polygenelubricants": -2147483648, "订单": 1129459,
        "撤单": 820017, "😀": 1772899, "Aa": 2112, "BB": 2112, None: 0,
    }  # fmt: skip
    with open_store(tmp_path / "s", clock=clock) as store:
        receipts = [store.put("t", b"x", tag=tag) for tag in hashes]
        delayed = [
            store.append("SCHEDULE_TOPIC_XXXX", 2, b"x", properties={"DELAY": level, "TAGS": "TagA"})
            for level in ("3", "18", "99", "0", "-1")
        ]
    expected = [(r.physical_offset, r.size, code) for r, code in zip(receipts, hashes.values(), strict=True)]
    assert units_of(tmp_path / "s", "t") == expected
    codes = [unit[2] for unit in units_of(tmp_path / "s", "SCHEDULE_TOPIC_XXXX", 2)]
    now = 1_700_000_000_123
    # level 3 is 10 s; beyond the table its last entry, 2 h; a level that is none leaves the hash
    assert codes == [now + 10_000, now + 7_200_000, now + 7_200_000, 2598919, 2598919]
    assert len(delayed) == len(codes)


@pytest.mark.parametrize(("seed", "durability"), [*enumerate(["append", "flush"] * 2)])
def test_batches_get_the_units_that_reading_gives(tmp_path: Path, seed: int, durability: Any) -> None:
    """The dispatcher need not read a batch that was just put, but writes what a rebuild reads: also if puts fail, or
    batches stand beside single messages and other batches, or end a segment."""
    draw, faulty = random.Random(seed), FaultyFileSystem()
    small = {"segment_bytes": 1 << 18, "consumequeue_units": 1000}
    with open_store(tmp_path / "s", durability=durability, fs=faulty, **small) as store:
        for _ in range(200):
            topic, queue_id = draw.choice("ab"), draw.randrange(2)
            items: list[Any] = [draw.randbytes(draw.randrange(30)) for _ in range(draw.choice([2, 15, 16, 64, 1500]))]
            action = draw.choice(["put", "tags", "dispatch", "fail", *["many", "packed"] * 4])
            if action == "tags":
                items = [OutgoingMessage(item, tag="t") for item in items]
            elif action == "fail":
                faulty.fail("pwrite", errno.EIO, path_part="commitlog", times=draw.choice([1, 2]))
            with suppress(StoreIOError):
                if action == "put":
                    store.put(topic, b"y", queue_id, tag="t")
                elif action == "dispatch":
                    store.dispatch()
                elif action != "packed" or store.writer.put_packed(topic, bodies_bytes(items), queue_id) is None:
                    store.put_many(topic, items, queue_id)
        store.dispatch()
        bounds = {queue: store.offsets(*queue) for queue in all_queues(store)}
    units = {queue: units_of(tmp_path / "s", *queue) for queue in bounds}
    assert faulty.failed
    assert sum(map(len, units.values())) > 10_000
    shutil.rmtree(tmp_path / "s" / "consumequeue")
    with open_store(tmp_path / "s") as store:
        assert {queue: store.offsets(*queue) for queue in bounds} == bounds
        assert list(store.verify()) == []
    assert {queue: units_of(tmp_path / "s", *queue) for queue in bounds} == units


def test_batches_are_dispatched_without_reading_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("few", "read_run"):
        monkeypatch.setattr(f"mqstore.log.writing.dispatcher.{name}", None)
    bodies = [b"%d" % i for i in range(32)]
    with open_store(tmp_path / "s", segment_bytes=1 << 20) as store:
        assert np.arange(1) == [0], "the dispatcher does not load numpy"
        for queue_id in (0, 1, 0):
            store.put_many("t", bodies, queue_id)
            if store.writer.put_packed("t", bodies_bytes(bodies), queue_id) is None:  # without compiled parts
                store.put_many("t", bodies, queue_id)
        store.dispatch()
        for queue_id, repeats in ((0, 4), (1, 2)):
            assert [message.body for message in store.read("t", queue_id, 0, 999)] == bodies * repeats


def test_batches_after_the_visible_end_are_not_dispatched(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", segment_bytes=1 << 20) as store:
        store.put_many("t", [b"a"] * 32)
        synced, visible_end = store.max_offset, store._dispatcher.visible_end
        store.put_many("t", [b"b"] * 32)
        store._dispatcher.visible_end = lambda: synced
        store.dispatch()
        assert store.offsets("t", 0) == (0, 32)
        store._dispatcher.visible_end = visible_end
        store.dispatch()
        assert store.offsets("t", 0) == (0, 64)


def test_time_of_the_last_dispatched_record_is_not_that_of_a_later_batch(tmp_path: Path) -> None:
    clock = SimulatedClock()
    with open_store(tmp_path / "s", segment_bytes=1 << 20, clock=clock) as store:
        store.put_many("t", [b"a"] * 32)
        synced, first_ms = store.max_offset, clock.now_ms()
        clock.advance(60_000)
        store.put_many("t", [b"b"] * 32)
        store._dispatcher.visible_end = lambda: synced
        store.dispatch()
        assert store._dispatcher.last_store_timestamp_ms == first_ms


def test_duplicate_keys_prepared_and_rollback_records_in_the_index(store: MessageStore) -> None:
    """Prepared records have keys but no unit, rollback records neither (format#dispatch)."""
    for i, sys_flag in enumerate((0, 0x4, 0x8, 0xC)):
        store.append("t", 0, b"%d" % i, properties={"KEYS": f"k{i} k{i}", "UNIQ_KEY": f"u{i}"}, sys_flag=sys_flag)
    assert [len(store.find("t", key=f"k{i}")) for i in range(4)] == [1, 1, 1, 0]
    assert [len(store.find("t", unique_key=f"u{i}")) for i in range(4)] == [1, 1, 1, 0]
    assert [m.body for m in store.read("t")] == [b"0", b"2"]
    assert sum(file.header.next_entry - 1 for file in store.index.files) == 3 * 3


# -- what a log may hold that no put of ours writes ------------------------------------------------------------------


def java_log(path: Path, records: list[tuple[bytes, int, int, bytes]]) -> list[int]:
    """A Java broker's directory with one segment of (topic, queue id, queue offset, body); where each record lies."""
    data = bytearray()
    positions = []
    for topic, queue_id, queue_offset, body in records:
        positions.append(len(data))
        data += encode_record(
            topic=topic,
            body=body,
            queue_id=queue_id,
            queue_offset=queue_offset,
            physical_offset=len(data),
            store_timestamp_ms=1_700_000_000_000,
            born_timestamp_ms=1_700_000_000_000,
            born_host=HOST,
            store_host=HOST,
            checksum="crc32-body",
        )
    (path / "commitlog").mkdir(parents=True)
    (path / "commitlog" / f"{0:020d}").write_bytes(bytes(data).ljust(SEGMENT, b"\0"))
    return positions


def test_the_slot_of_a_record_that_was_lost_is_void(tmp_path: Path) -> None:
    positions = java_log(tmp_path / "s", [(b"t", 0, i, b"%d" % i) for i in range(12)])
    for lost in (3, 4, 8):
        flip_log(tmp_path / "s", positions[lost] + 88)
    with open_store(tmp_path / "s", consumequeue_units=8) as store:
        assert store.offsets("t") == (0, 12)
        assert [m.offset for m in store.read("t")] == [i for i in range(12) if i not in (3, 4, 8)]
        assert store.get("t", 0, 3, 1).next_offset == 6
        assert store.put("t", b"next").offset == 12
    units = units_of(tmp_path / "s", "t")
    assert [units[i] for i in (3, 4, 8)] == [VOID] * 3
    assert [unit[0] for i, unit in enumerate(units[:12]) if unit != VOID] == [
        p for i, p in enumerate(positions) if i not in (3, 4, 8)
    ]


def test_a_queue_that_begins_late_begins_in_its_file(tmp_path: Path) -> None:
    """format#sizes and format#void: the file is the one that holds the slot; what lies before it there is void. So
    it is when that file is lost and made again, with a later one there."""
    java_log(tmp_path / "s", [(b"t", 0, i, b"%d" % i) for i in range(21, 27)])
    files = [tmp_path / "s" / "consumequeue" / "t" / "0" / f"{slot * 20:020d}" for slot in (16, 24)]
    for _ in range(2):
        with open_store(tmp_path / "s", consumequeue_units=8) as store:
            assert store.offsets("t") == (21, 27)
            assert [m.body for m in store.read("t", 0, 21)] == [b"%d" % i for i in range(21, 27)]
        assert sorted(files[0].parent.iterdir()) == files
        assert units_of(tmp_path / "s", "t")[:5] == [VOID] * 5
        files[0].unlink()


UNSAFE = [b"../evil", b"..", b".", b"a/b", b"/etc", b"nul\0", b"line\n", b"\x1b[31m", b"\xff\xfe", b"\xc2\x85"]


@pytest.mark.parametrize("topic", UNSAFE)
def test_a_topic_that_is_no_folder_name_makes_no_file(tmp_path: Path, topic: bytes) -> None:
    records = [(b"fine", 0, 0, b"a"), (topic, 0, 0, b"b"), (b"fine", -1, 0, b"c"), (b"fine", 0, 1, b"d")]
    positions = java_log(tmp_path / "in" / "s", records)
    with open_store(tmp_path / "in" / "s") as store:
        assert store.topics() == ["fine"]
        assert [m.body for m in store.read("fine")] == [b"a", b"d"]
        assert [store.at(position).body for position in positions] == [b"a", b"b", b"c", b"d"]
        assert {f.kind for f in store.recovery.findings} == {f.kind for f in store.verify()} == {"unsafe_name"}
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert [p.name for p in (tmp_path / "in").iterdir()] == ["s"]
    assert {name.split("/")[1] for name in files(tmp_path / "in" / "s") if name.startswith("consumequeue")} == {"fine"}


@pytest.mark.parametrize(
    "topic", [b"dots.in.it", b"plus+sign", "ünïcode-订单".encode(), b" space ", b"t" * 255, b"...", b"~"]
)
def test_reading_is_wider_than_putting(tmp_path: Path, topic: bytes) -> None:
    java_log(tmp_path / "s", [(topic, 0, 0, b"a"), (topic, 0x7FFFFFFF, 0, b"b")])
    with open_store(tmp_path / "s") as store:
        name = topic.decode()
        assert store.topics() == [name]
        assert [m.body for m in store.iter(name)] == [b"a", b"b"]
        assert list(store.verify()) == []
    with open_store(tmp_path / "s", "r") as store:
        assert [m.body for m in store.iter(name)] == [b"a", b"b"]


def test_damage_before_the_dispatcher_is_skipped(tmp_path: Path) -> None:
    """A record that turns bad between append and dispatch: its slot becomes void, those behind it are built."""
    with open_store(tmp_path / "s") as store:
        receipts = [store.put("t", b"%d" % i) for i in range(6)]
        flip_log(tmp_path / "s", receipts[2].physical_offset + 5)  # its magic
        assert [m.body for m in store.read("t")] == [b"0", b"1", b"3", b"4", b"5"]
        assert store.offsets("t") == (0, 6)
        assert store.put("t", b"6").offset == 6


# -- what the disk refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "part"), [("pwrite", "consumequeue"), ("truncate_sparse", "tmp/cq"), ("replace", "tmp/cq")]
)
def test_put_is_refused_while_a_unit_finds_no_room(tmp_path: Path, operation: str, part: str) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        store.put_many("t", [b"%d" % i for i in range(8)])  # fills a file of units
        assert len(store.read("t")) == 8
        fs.fail(operation, errno.ENOSPC, times=None, path_part=part)
        assert store.put("t", b"8", keys="k").physical_offset > 0
        with pytest.raises(StoreFullError):
            store.dispatch()
        for _ in range(3):
            with pytest.raises(StoreFullError):
                store.put("t", b"refused", keys="k")
            with pytest.raises(StoreFullError, match="cannot be shown"):
                store.read("t", 0, 8)
            assert len(store.read("t")) == 8
        assert store.stats().dispatch_lag_bytes > 0
        fs.heal()
        store.put("t", b"9", keys="k")
        assert sorted(int(m.body) for m in store.iter("t")) == list(range(10))
        assert len(store.find("t", key="k", limit=100)) == 2
        assert store.stats().dispatch_lag_bytes == 0
        assert list(store.verify()) == []


def test_a_queue_is_seen_though_another_found_no_room(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        store.put("a", b"0")
        store.put("b", b"0")
        store.dispatch()
        grown: list[str] = []
        store.on_growth.append(lambda topic, *_: grown.append(topic))
        fs.fail("pwrite", errno.ENOSPC, path_part="consumequeue/b", times=None)
        store.put("a", b"1")
        store.put("b", b"1")
        with pytest.raises(StoreFullError):
            store.dispatch()
        assert (store.offsets("a"), grown) == ((0, 2), ["a"])  # whoever waits there was told
        fs.heal()
        assert store.offsets("b") == (0, 2)


def test_full_disk_of_the_index_stops_no_queue(tmp_path: Path) -> None:
    """It once did: queues stopped growing, and each retry put the waiting keys in line again."""
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        fs.fail("allocate", errno.ENOSPC, times=None, path_part="tmp/index")
        for i in range(50):
            store.put("t", b"%d" % i, keys=f"k{i}")
            assert len(store.read("t", 0, i)) == 1
        assert store.stats().index_pending == 50
        assert store.stats().dispatch_lag_bytes == 0
        store.run_once(0)
        store.run_once(60_000)
        assert "No space" in store.stats().errors["index"]
        fs.heal()
        store.run_once(120_000)
        assert store.stats().index_pending == 0
        assert "index" not in store.stats().errors
        assert [[m.offset for m in store.find("t", key=f"k{i}")] for i in range(50)] == [[i] for i in range(50)]
        assert sum(file.header.next_entry - 1 for file in store.index.files) == 50


def test_unindexed_keys_are_found_after_reopening(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    store = open_store(tmp_path / "s", fs=fs)
    store.put("t", b"0", keys="k0")
    store.run_once(0)
    store.run_once(60_000)  # a checkpoint that says: dispatched
    fs.fail("allocate", errno.ENOSPC, times=None, path_part="tmp/index")
    for i in range(1, 60):
        store.put("t", b"%d" % i, keys=f"k{i}")
    store.run_once(120_000)
    store.close()
    with open_store(tmp_path / "s") as store:
        assert store.clean_shutdown is False
        assert [[m.offset for m in store.find("t", key=f"k{i}")] for i in range(60)] == [[i] for i in range(60)]


@pytest.mark.parametrize("entries", [5, 40])
def test_ctrl_c_behind_the_index_keeps_keys_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """Also where the entries have filled their file."""
    put_entries = index_module.put_entries

    def put_and_raise(*arguments: Any) -> int:
        monkeypatch.undo()
        put_entries(*arguments)
        raise KeyboardInterrupt

    config = StoreConfig(clock=SimulatedClock(), index_slots=7, index_entries=entries)
    with MessageStore(tmp_path / "s", config=config) as store:
        for i in range(20):
            store.put("t", b"", keys=[f"k{i}"])
        monkeypatch.setattr(index_module, "put_entries", put_and_raise)
        with pytest.raises(KeyboardInterrupt):
            store.dispatch()
        store.put("t", b"", keys=["last"])
        for i in range(20):
            assert [message.offset for message in store.find("t", key=f"k{i}")] == [i]
        assert len(store.find("t", key="last")) == 1
        assert not list(store.verifier().findings())
        assert sum(header.next_entry - 1 for _, header in store.index.headers()) == 21


def test_an_index_file_that_is_full_is_followed_by_one_of_a_later_name(tmp_path: Path) -> None:
    """Names are local time stamps and must sort by age, however many files a millisecond sees and the clock goes."""
    clock = SimulatedClock(1_700_000_000_000)
    with open_store(tmp_path / "s", clock=clock) as store:
        for i in range(200):
            store.put("t", b"", keys=[f"k{i}", "all"])
            store.dispatch()
            clock.set_wall(1_700_000_000_000 - i % 3 * 3_600_000)
        names = [p.name for p in sorted((tmp_path / "s" / "index").iterdir())]
        assert len(names) == -(-400 // 31)
        firsts = [struct.unpack_from(">q", (tmp_path / "s" / "index" / n).read_bytes(), 16)[0] for n in names]
        assert firsts == sorted(firsts)
        assert sum(file.writable for file in store.index.files) <= 2  # each costs a descriptor and a mapping
        assert [m.offset for m in store.find("t", key="all", limit=1000)] == list(range(199, -1, -1))


# -- waking ----------------------------------------------------------------------------------------------------------


def test_wait_ends_with_its_message(store: MessageStore) -> None:
    """Any new message once ended it."""
    store.put("t", b"0")
    waiting = in_thread(lambda: (store.wait("t", 0, 3, timeout=1 << 40), store.offsets("t")[1]))
    for i in range(1, 4):
        until_parked(store)
        store.put("t", b"%d" % i)
        store.dispatch()
    assert ended(*waiting) == (True, 4)


@pytest.mark.parametrize(("durability", "chunks", "seen"), [("append", 1, 0), ("append", 2, 20), ("flush", 2, 20)])
def test_put_many_of_several_chunks_dispatches_them(tmp_path: Path, durability: Any, chunks: int, seen: int) -> None:
    config = StoreConfig(clock=SimulatedClock(), max_message_size=4096)  # no thread dispatches
    with MessageStore(tmp_path / "s", durability=durability, config=config) as store:
        store.put_many("t", [bytes(2000 * chunks)] * 20)
        queue = store.queue_table.get("t", 0)
        assert queue is not None
        assert queue.max_offset == seen
        assert len(store.read("t", 0, 0)) == 20


@pytest.mark.parametrize("durability", ["append", "flush"])
def test_no_wake_up_is_lost(tmp_path: Path, durability: Any) -> None:
    """Ping-pong over two queues: each put answers what the other side has waited for. One lost wake-up ends it."""
    rounds = 250
    config = StoreConfig(segment_bytes=1 << 16, consumequeue_units=64, index_slots=16, index_entries=32)
    with MessageStore(tmp_path / "s", durability=durability, config=config) as store:
        store.put("ping", b"0")
        store.put("pong", b"0")
        mix: Any = ("append", None)

        def answer() -> None:
            for i in range(1, rounds):
                assert store.wait("ping", 0, i, timeout=3600)
                store.put("pong", b"%d" % i, durability=mix[i % 2])

        answering = in_thread(answer)
        for i in range(1, rounds):
            store.put("ping", b"%d" % i, durability=mix[(i + i // 2) % 2])
            assert store.wait("pong", 0, i, timeout=3600)
        assert ended(*answering) is None
        assert store.offsets("ping") == store.offsets("pong") == (0, rounds)


def test_closing_lets_every_waiter_go(tmp_path: Path) -> None:
    store: MessageStore = open_store(tmp_path / "s")
    store.put("t", b"0")
    waiting = [in_thread(lambda: store.wait("t", 0, 1, timeout=3600)) for _ in range(5)]
    until_parked(store, 5)
    store.close()
    assert [ended(*each) for each in waiting] == [False] * 5


def test_wait_at_closing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its last look and its parking all others had been woken: it slept until its time was up."""
    store: MessageStore = open_store(tmp_path / "s")
    store.put("t", b"0")
    wait = Dispatcher.wait

    def late(*arguments: Any) -> bool:
        store.close()
        return wait(*arguments)

    monkeypatch.setattr(Dispatcher, "wait", late)
    assert store.wait("t", 0, 1, timeout=3600) is False


def test_waiter_hears_of_messages_before_a_full_disk(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        store.put("t", b"0")
        queue = store.queue_table.get("t", 0)
        assert queue is not None
        queue.next_offset += 1  # a number that was given and lost, so that the units are written in two pieces
        store.put("t", b"2")
        grown: list[int] = []
        store.on_growth.append(lambda *grew: grown.append(grew[3]))
        fs.fail("pwrite", errno.ENOSPC, path_part="consumequeue", nth=2)
        with pytest.raises(StoreFullError):
            store.dispatch()
        assert grown == [1]
        fs.heal()
        assert store.offsets("t") == (0, 3)


def test_reader_of_a_busy_writer_sees_earlier_messages(store: MessageStore) -> None:
    store.put("t", b"0")
    # A writer that has always put another one when a pass is over.
    store.on_growth.append(lambda *_: store.put("t", b"more") if store.stats().puts < 1000 else None)
    assert [message.body for message in store.read("t", 0, 0, 1)] == [b"0"]
    assert store.stats().puts < 10


def test_a_waiting_reader_goes_before_the_next_dispatch(store: MessageStore) -> None:
    """Beside constant puts the background thread has always more to do, and took the lock again at once."""
    came, passes = threading.Event(), []

    def end() -> int:
        if threading.current_thread() is reader:
            came.set()
        return store.max_offset

    def noted(*_: object) -> None:
        passes.append(threading.current_thread())
        if len(passes) == 1:
            store.put("t", b"more")
            reader.start()
            came.wait()

    dispatcher = Dispatcher(store.parts, store.wakeups.log, end)
    dispatcher.listeners.append(noted)
    reader = threading.Thread(target=dispatcher.run_once)
    store.put("t", b"0")
    dispatcher.run_again()
    dispatcher.run_again()
    reader.join()
    assert passes[1] is reader


@pytest.mark.parametrize(
    ("end", "offsets", "runs"),
    [(5, range(5, 8), [(0, 3)]), (6, range(5, 8), [(1, 3)]), (8, range(5, 8), []), (0, range(5, 8), [(0, 3)])],
)
def test_consecutive_slots_are_as_those_of_a_list(end: int, offsets: range, runs: list[tuple[int, int]]) -> None:
    assert slot_runs(end, offsets) == slot_runs(end, [*offsets]) == runs
