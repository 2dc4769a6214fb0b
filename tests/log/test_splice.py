"""Splicing staged shards: the result is that of puts one by one, all of it or nothing, and once (spark#splice)."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from mqstore import Message, Profile, Retention, SimulatedClock
from mqstore.admin import inspect_store
from mqstore.errors import (
    ConfigError,
    CorruptStoreError,
    FlushFailedError,
    FormatError,
    MQStoreError,
    StoreBusyError,
    StoreClosedError,
    StoreFullError,
    StoreIOError,
    UnsupportedStoreError,
)
from tests.faults import CHANGES, STEP, FaultyFileSystem
from tests.log.recovering import rebuild_config, recover
from tests.log.splicesupport import Halfway, Row, described, kill_in_splice, put_one_by_one, shown, stage, staged
from tests.log.support import SEGMENT, files, flip, kill, open_in, open_store
from tests.waiting import ended, in_thread

ROWS = [Row(b"row %04d " % i * (1 + i % 9), "orders" if i % 3 else "clicks", i % 2) for i in range(60)]
PROFILES: list[Profile] = ["mqstore", "rocketmq"]
TXN_FILE = "config/spark/txn.json"


def log_of(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(root).items() if name.startswith(("commitlog", "consumequeue", "index"))}


def state_of(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / TXN_FILE).read_text())
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the store will be."""
    return tmp_path / "store"


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard of ROWS."""
    return stage(tmp_path / "shard", ROWS)


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_a_splice_leaves_the_bytes_that_puts_one_by_one_would(tmp_path: Path, profile: Profile) -> None:
    long = "%RETRY%" + "g" * 140  # V2
    rows = [
        *ROWS,
        Row(b"", "orders", 1),
        Row(b"x" * 700, long, 3, {"KEYS": "k1 k2", "TAGS": "A"}),
        Row(b"six", "orders", 0, {"KEYS": "k3"}, flag=-5, born_host="[2001:db8::1]:9876"),
        *ROWS,
    ]
    with open_store(tmp_path / "puts", profile=profile) as store:
        store.put("orders", b"before", 1)
        put_one_by_one(store, rows)
        store.put("orders", b"behind", 1)
        wanted = shown(store)
        host = "127.0.0.1:0"
    shards = [stage(tmp_path / str(i), rows[i * 50 : i * 50 + 50], profile, store_host=host) for i in range(3)]
    with open_store(tmp_path / "spliced", profile=profile) as store:
        first = store.put("orders", b"before", 1)
        result = store.splice(shards, app="job", version=7)
        behind = store.put("orders", b"behind", 1)
        assert shown(store) == wanted
        assert (result.already, result.records) == (False, len(rows))
        assert result.first_offset == first.physical_offset + first.size
        assert result.end_offset <= behind.physical_offset
        assert result.offsets[long, 3] == (0, 1)
        assert result.offsets["orders", 1] == (1, behind.offset)
        assert [m.body for m in store.find(long, key="k2")] == [b"x" * 700]
    assert log_of(tmp_path / "spliced") == log_of(tmp_path / "puts")
    assert "intent" not in state_of(tmp_path / "spliced")
    with open_store(tmp_path / "spliced", "r") as store:
        assert list(store.verify()) == []
        assert store.clean_shutdown


_rows = st.lists(
    st.builds(
        Row,
        body=st.binary(max_size=900),
        topic=st.sampled_from(["a", "bb", "%RETRY%" + "z" * 130]),
        queue_id=st.integers(0, 3),
        properties=st.dictionaries(st.sampled_from(["KEYS", "TAGS", "colour"]), st.text("abc", min_size=1), max_size=3),
        flag=st.integers(-(1 << 31), (1 << 31) - 1),
        born_host=st.sampled_from(["127.0.0.1:0", "[::1]:5"]),
    ),
    max_size=25,
)


@given(
    before=st.lists(st.binary(max_size=900), max_size=5),
    shards=st.lists(_rows, max_size=4),
    profile=st.sampled_from(PROFILES),
)
def test_shards_equal_puts(
    tmp_path_factory: pytest.TempPathFactory, before: list[bytes], shards: list[list[Row]], profile: Profile
) -> None:
    root = tmp_path_factory.mktemp("any")
    with open_store(root / "puts", profile=profile) as store:
        for body in before:
            store.put("a", body)
        for rows in shards:
            put_one_by_one(store, rows)
        end, wanted = store.max_offset, shown(store)
    with open_store(root / "spliced", profile=profile) as store:
        for body in before:
            store.put("a", body)
        folders = [stage(root / f"{i}", rows, profile) for i, rows in enumerate(shards)]
        result = store.splice(folders, app="a", version=0)
        assert (store.max_offset, shown(store)) == (end, wanted)
        assert result.records == sum(map(len, shards))
    assert log_of(root / "spliced") == log_of(root / "puts")


def test_segments_roll_where_puts_roll_at_every_alignment(tmp_path: Path) -> None:
    rows = [Row(b"x" * 40), Row(b"y" * 7), Row(b"z" * 3900), Row(b"w")]
    shard = stage(tmp_path / "shard", rows)
    sizes = [len(staged(row)) for row in rows]
    filled = len(staged(Row(b"")))
    both = sum(sizes[:2])
    for free in [*range(8, 11), *range(sizes[0] + 6, sizes[0] + 11), *range(both + 6, both + 11)]:
        body = b"f" * (SEGMENT - free - filled)
        names = (tmp_path / f"puts-{free}", tmp_path / f"spliced-{free}")
        ends = []
        for name in names:
            with open_store(name) as store:
                store.put("orders", body)
                if name is names[0]:
                    put_one_by_one(store, rows)
                else:
                    store.splice([shard], app="a", version=0)
                store.put("orders", b"last")
                ends.append(store.max_offset)
        assert ends[0] == ends[1], free
        assert log_of(names[0]) == log_of(names[1]), free


@pytest.mark.parametrize("remembered", [0, 30, 1000])
def test_windows_below_a_shard_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: int) -> None:
    monkeypatch.setattr("mqstore.log.bulk.splice._REMEMBERED", remembered)
    monkeypatch.setattr("mqstore.log.bulk.shard.Shard.window_bytes", lambda it: min(it.bytes, max(700, it.largest)))
    shards = [stage(tmp_path / f"{i}", ROWS) for i in range(2)]
    with open_store(tmp_path / "puts") as store:
        put_one_by_one(store, ROWS + ROWS)
        store.dispatch()
    with open_store(tmp_path / "spliced") as store:
        store.splice(shards, app="a", version=0)
        store.dispatch()
    assert log_of(tmp_path / "spliced") == log_of(tmp_path / "puts")


def test_a_store_with_durability_flush_shows_it_at_once(root: Path, shard: Path) -> None:
    with open_store(root, durability="flush") as store:
        store.splice([shard], app="a", version=0)
        assert sum(map(len, shown(store).values())) == len(ROWS)
        assert store.stats().flush_lag_bytes == 0


def test_splice_wakes_waiters(root: Path, shard: Path) -> None:
    with open_in("rw", root) as store:
        store.put("clicks", b"first")
        waiting = in_thread(lambda: store.wait("clicks", 0, 1, 30))
        store.splice([shard], app="a", version=0)
        assert ended(*waiting)


# -- once --------------------------------------------------------------------------------------------------------------


def test_a_version_is_spliced_once_and_an_older_one_never(tmp_path: Path, root: Path, shard: Path) -> None:
    with open_store(root) as store:
        assert not store.splice([shard], app="a", version=3).already
        before = log_of(root), state_of(root)
        for version in (3, 2, 0):
            result = store.splice([shard], app="a", version=version)
            assert (result.already, result.records, result.offsets) == (True, 0, {})
        # Nothing is looked at: the shards of a commit that is done may be gone.
        assert store.splice([tmp_path / "gone"], app="a", version=1).already
        assert (log_of(root), state_of(root)) == before
        assert not store.splice([shard], app="b", version=0).already
    with open_store(root) as store:  # remembered
        assert store.splice([shard], app="a", version=3).already
        assert not store.splice([shard], app="a", version=4).already
        assert sum(map(len, shown(store).values())) == 3 * len(ROWS)


def test_a_splice_that_nobody_will_repeat_leaves_no_entry(tmp_path: Path) -> None:
    """And one that fails before its intent is written, when the file says what it would say in the end, is not taken
    for done."""
    fs = FaultyFileSystem()
    shard = stage(tmp_path / "a", ROWS)
    with open_store(tmp_path / "store", fs=fs) as store:
        store.splice([], app="kept", version=1)
        assert not store.splice([], app="job", version=0, remembered=False).already
        fs.fail("create", errno.ENOSPC, path_part="txn.json")
        with pytest.raises(StoreFullError):
            store.splice([shard], app="job", version=0, remembered=False)
        assert store.splice([shard], app="job", version=0, remembered=False).records == len(ROWS)
        assert store.spliced_version("job") == -1
    assert [*state_of(tmp_path / "store")["apps"]] == ["kept"]
    with open_store(tmp_path / "store") as store:
        assert sum(map(len, shown(store).values())) == len(ROWS)


def test_application_table_forgets_the_oldest(root: Path) -> None:
    """Beyond 10,000 those that were not used for 30 days, beyond 100,000 all."""
    day_ms = 86_400_000

    def spliced(apps: dict[str, int], *new: str) -> dict[str, Any]:
        """Return the table that had these times by application, after a splice of each new one."""
        open_store(root).close()
        path = root / TXN_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {app: {"version": 0, "used_ms": used_ms} for app, used_ms in apps.items()}
        path.write_text(json.dumps({"version": 1, "apps": table}))
        with open_store(root, clock=SimulatedClock(100 * day_ms)) as store:
            for app in new:
                store.splice([], app=app, version=0)
        found: dict[str, Any] = state_of(root)["apps"]
        return found

    old = spliced({f"old-{i}": i for i in range(9_999)}, "new", "newer")
    assert len(old) == 10_000
    assert "old-0" not in old
    assert {"old-1", "new", "newer"} < old.keys()
    assert len(spliced({f"busy-{i}": 99 * day_ms for i in range(100_000)}, "one")) == 100_000


@pytest.mark.parametrize(
    ("app", "version"), [("", 0), (None, 0), ("a", -1), ("a", True), ("a", 1.0), ("a", 1 << 63), ("é" * 128, 0)]
)
def test_a_bad_app_or_version_is_refused(tmp_path: Path, app: Any, version: Any) -> None:
    with open_store(tmp_path / "store") as store:
        with pytest.raises(ConfigError):
            store.splice([], app=app, version=version)
        assert not (tmp_path / "store" / "config").exists()


# -- bad shards --------------------------------------------------------------------------------------------------------


def _patched(position: int, data: bytes, row: int = 5) -> Callable[[Path], None]:
    """Change a record of a shard, and the shard's CRC with it."""

    def change(folder: Path) -> None:
        records = [staged(each) for each in ROWS]
        records[row] = records[row][:position] + data + records[row][position + len(data) :]
        (folder / "records.bin").write_bytes(b"".join(records))
        _say(folder, crc32c=crc32c(b"".join(records)))

    return change


def _say(folder: Path, **changes: Any) -> None:
    path = folder / "shard.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _with_row(row: Row) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        rows = [*ROWS, row]
        records = [staged(each) for each in rows]
        (folder / "records.bin").write_bytes(b"".join(records))
        (folder / "shard.json").write_text(json.dumps(described(rows, records, "mqstore")))

    return change


def _say_queues(queues: Any) -> Callable[[Path], None]:
    return lambda folder: _say(folder, queues=queues)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no json": (lambda f: (f / "shard.json").unlink(), "shard.json: the file is missing"),
    "no records": (lambda f: (f / "records.bin").unlink(), "records.bin: the file is missing"),
    "json that is none": (lambda f: (f / "shard.json").write_text("{"), "shard.json: not JSON"),
    "a newer version": (lambda f: _say(f, version=2), "version"),
    "another profile": (lambda f: _say(f, profile="rocketmq"), "profile 'rocketmq'"),
    "no count": (lambda f: _say(f, records=None), "records must be a number"),
    "another count": (lambda f: _say(f, records=len(ROWS) + 1), "its queues get 60 records"),
    "a negative count": (lambda f: _say(f, bytes=-1), "bytes must be a number"),
    "queues that are none": (_say_queues([]), "queues must be an object"),
    "counts that are none": (_say_queues({"orders": 3}), "must be an object"),
    "other queues": (_say_queues({"orders": {"0": 60}}), "queues: shard.json says"),
    "a queue that cannot be": (_say_queues({"orders": {"16384": 60}}), "0..16383"),
    "a queue that is no number": (_say_queues({"orders": {"-1": 60}}), "0..16383"),
    "a count that is none": (_say_queues({"orders": {"0": "60"}}), "has '60' records"),
    "a topic that cannot be": (_say_queues({"../up": {"0": 60}}), "topic"),
    "a larger record said": (lambda f: _say(f, largest=5000), "largest record has 5000 bytes"),
    "another largest": (lambda f: _say(f, largest=4000), "largest"),
    "cut short": (lambda f: os.truncate(f / "records.bin", 100), "it has 100 bytes"),
    "a flipped bit": (lambda f: flip(f / "records.bin", 95), "it is damaged"),
    "a size that leads out": (_patched(0, (1 << 20).to_bytes(4, "big"), len(ROWS) - 1), "no whole record"),
    "a size too small": (_patched(0, (20).to_bytes(4, "big")), "no whole record"),
    "no magic": (_patched(4, b"\0\0\0\0"), "no whole record"),
    "a BLANK": (_patched(4, 0xCBD43194.to_bytes(4, "big")), "no whole record"),
    "lengths that do not add up": (_patched(84, (3).to_bytes(4, "big")), "inner lengths"),
    "a queue offset": (_patched(27, b"\1"), "queue_offset"),
    "a physical offset": (_patched(35, b"\1"), "physical_offset"),
    "a store time": (_patched(63, b"\1"), "store_timestamp"),
    "a checksum": (_patched(11, b"\1"), "checksum"),
    "a queue id that cannot be": (_patched(12, b"\xff\xff\xff\xff"), "queue_id"),
    "a prepared message": (_patched(39, b"\4"), "sys_flag"),
    "a rolled back message": (_patched(39, b"\x0c"), "sys_flag"),
    "an inner batch": (_patched(39, b"\x80"), "sys_flag"),
    "a record too large": (_with_row(Row(b"x" * 4000)), "largest record"),
    "a topic of the record that cannot be": (_with_row(Row(b"", "a/b")), "topic"),
    "a CRC property": (_with_row(Row(b"", properties={"__CRC32#": "1234567890"})), "__CRC32#"),
    "a number that is none": (_with_row(Row(b"odd", properties={"INNER_NUM": "x"})), "INNER_NUM"),
    "the same at an even place": (_with_row(Row(b"even", properties={"INNER_NUM": "x"})), "INNER_NUM"),
    "a delay that is none": (_with_row(Row(b"", "SCHEDULE_TOPIC_XXXX", properties={"DELAY": "x"})), "DELAY"),
    "a pipe for records": (
        lambda f: ((f / "records.bin").unlink(), os.mkfifo(f / "records.bin")),
        "not a regular file",
    ),
    "a pipe for shard.json": (lambda f: ((f / "shard.json").unlink(), os.mkfifo(f / "shard.json")), "not a regular"),
    "a link": (
        lambda f: ((f / "records.bin").rename(f / "else"), (f / "records.bin").symlink_to(f / "else")),
        "records.bin",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_shard_is_refused_and_nothing_of_the_splice_is_written(tmp_path: Path, name: str) -> None:
    good, bad = stage(tmp_path / "good", ROWS), stage(tmp_path / "bad", ROWS)
    change, why = BAD[name]
    change(bad)
    with open_store(tmp_path / "store") as store:
        store.put("orders", b"before")
        before = files(tmp_path / "store")
        with pytest.raises((FormatError, StoreIOError)) as caught:
            store.splice([good, bad], app="a", version=0)
        assert str(bad) in str(caught.value)
        assert why in str(caught.value)
        assert files(tmp_path / "store") == before
        assert not store.splice([good], app="a", version=0).already
        assert store.put("orders", b"behind").offset == len(shown(store)["orders", 0]) - 1
        assert list(store.verify()) == []


def test_a_body_over_the_limit_of_messages_is_refused(tmp_path: Path) -> None:
    shard = stage(tmp_path / "shard", [Row(b"x" * 101)])
    with open_store(tmp_path / "store", max_message_size=100) as store, pytest.raises(FormatError, match="max_message"):
        store.splice([shard], app="a", version=0)


def test_a_body_that_looks_like_a_reserved_name_is_nothing_to_be_refused(tmp_path: Path) -> None:
    rows = [Row(b"x" * i + b"INNER_NUM\x01x\x02", properties={"note": "R_NN"}) for i in range(8)]
    with open_store(tmp_path / "store") as store:
        assert store.splice([stage(tmp_path / "shard", rows)], app="a", version=0).records == 8


# -- meanwhile ---------------------------------------------------------------------------------------------------------


def test_progress_counts_every_byte_checked_and_copied(tmp_path: Path) -> None:
    shards = [stage(tmp_path / "a", ROWS), stage(tmp_path / "b", ROWS[:7])]
    size = sum((shard / "records.bin").stat().st_size for shard in shards)
    progress = Halfway(lambda: None)
    with open_store(tmp_path / "store") as store:
        store.splice(shards, app="a", version=0, progress=progress)
    assert progress.seen[-1] == (2 * size, 2 * size)
    assert [done for done, _ in progress.seen] == sorted(done for done, _ in progress.seen)


@pytest.mark.parametrize("profile", PROFILES)
def test_nobody_sees_a_record_before_the_splice_is_recorded(tmp_path: Path, root: Path, profile: Profile) -> None:
    shard = stage(tmp_path / "shard", ROWS, profile)
    seen = []

    def look() -> None:
        store.dispatch()
        seen.append(shown(store))
        assert store.max_offset == end
        with open_store(root, "r") as reader:
            seen.append(shown(reader))
            assert list(reader.verify()) == []
            assert late.stats().commitlog_bytes == SEGMENT
        seen.append(shown(late))
        found = inspect_store(root)
        assert found["commitlog"]["max_offset"] == end
        assert found["splice"]["pending"] == {"app": "a", "version": 0, "start": end}
        assert found["problems"] == []

    with open_store(root, profile=profile) as store:
        store.put("orders", b"before")
        store.dispatch()
        end = store.max_offset
        with open_store(root, "r") as late:
            store.splice([shard], app="a", version=0, progress=Halfway(look))
            assert seen == [{("orders", 0): [b"before"]}] * 3
            store.dispatch()
            assert sum(map(len, shown(store).values())) == 1 + len(ROWS)
            late.news.list_again()
            assert shown(late) == shown(store)
        assert inspect_store(root)["splice"]["pending"] is None


_WAYS: dict[str, Callable[[Any, Message], object]] = {
    "many": lambda store, last: [m.body for m in store.get("orders", 0, 0, 100).messages],
    "few": lambda store, last: [m.body for m in store.get("orders", 0, last.offset - 1, 2).messages],
    "lengths": lambda store, last: len(store.get("orders", 0, 1, 100).messages),  # read without checksums
    "iter": lambda store, last: [m.body for m in store.iter("orders", 0, start=1)],
    "first id": lambda store, last: store.at(store.units("alone", 0, 1, 1)["physical_offset"].item()).body,
    "last id": lambda store, last: store.at(last.physical_offset).body,
    "first time": lambda store, last: store.offset_at("alone", 0, last.store_timestamp_ms, "upper"),
    "last time": lambda store, last: store.offset_at("orders", 0, last.store_timestamp_ms, "upper"),
}
"""Ways to read what a splice brought: "alone" has its first message, "orders" its last one, which is given."""


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("rows", [ROWS[:24], ROWS], ids=["one segment", "several segments"])
@pytest.mark.parametrize("since", ["opened", "listed", "half-listed"])
def test_a_reader_that_met_the_splice_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since: str, rows: list[Row], way: str
) -> None:
    """It has cut the log off where the splice begins, and finds units that lead beyond before it lists files anew."""
    monkeypatch.setattr(
        "mqstore.log.reading.change_feed.time", SimpleNamespace(monotonic=lambda: 0.0)
    )  # time for no listing
    root, clock = tmp_path / "store", SimulatedClock()
    shard = stage(tmp_path / "shard", [Row(b"first", "alone"), *rows])
    readers = []

    def meet() -> None:
        reader = early or open_store(root, "r", verify_reads=way != "lengths")
        readers.append(reader)
        reader.topics()
        assert reader.log_files.limit == store.max_offset

    with open_store(root, clock=clock) as store:
        store.put("orders", b"before")
        store.put("alone", b"before")
        store.dispatch()
        early = open_store(root, "r", verify_reads=way != "lengths") if since == "listed" else None
        clock.advance(1000)
        store.splice([shard], app="a", version=0, progress=Halfway(meet))
        store.dispatch()
        assert (len(store.log_files.starts) > 1) == (rows is ROWS), "the rows do not fill what they should"
        [reader] = readers
        with reader:
            if since == "half-listed":
                reader.news.stop_at_splice()  # another thread has got so far, and no further
            *_, last = store.iter("orders", 0)
            read = _WAYS[way]
            assert read(reader, last) == read(store, last)
            assert reader.stats().bad_records == 0


def test_a_put_of_another_thread_waits_and_lies_behind(root: Path, shard: Path) -> None:
    receipts = []
    putters = [
        threading.Thread(target=lambda: receipts.append(store.put("late", b"1"))),
        threading.Thread(target=lambda: receipts.extend(store.put_many("late", [b"2", b"3"]))),
    ]

    def begin() -> None:
        for putter in putters:
            putter.start()
            putter.join(0.02)
            assert putter.is_alive()

    with open_store(root) as store:
        result = store.splice([shard], app="a", version=0, progress=Halfway(begin))
        for putter in putters:
            putter.join(30)
        assert len(receipts) == 3
        assert all(receipt.physical_offset >= result.end_offset for receipt in receipts)
        assert sorted(body for body in shown(store)["late", 0]) == [b"1", b"2", b"3"]


def test_signal_handler_is_refused_during_a_splice(root: Path, shard: Path) -> None:
    refused = []

    def handle() -> None:
        for call in (
            lambda: store.put("orders", b"x"),
            lambda: store.put_many("orders", [b"x"]),
            lambda: store.splice([shard], app="b", version=0),
            store.close,
        ):
            with pytest.raises(StoreBusyError):
                call()
            refused.append(call)

    with open_store(root) as store:
        store.splice([shard], app="a", version=0, progress=Halfway(handle))
        assert len(refused) == 4
        assert sum(map(len, shown(store).values())) == len(ROWS)


def test_a_splice_within_a_splice_is_refused_from_its_first_step_on(root: Path, shard: Path) -> None:
    """While shards are still being checked, too: both would find their version to be new."""
    steps = []

    def again(done: int, total: int) -> None:
        steps.append("check" if 2 * done <= total else "copy")
        for app in ("a", "b"):
            with pytest.raises(StoreBusyError):
                store.splice([shard], app=app, version=0)

    with open_store(root) as store:
        assert store.splice([shard], app="a", version=0, progress=again).records == len(ROWS)
        assert {*steps} == {"check", "copy"}
        assert sum(map(len, shown(store).values())) == len(ROWS)
        assert store.splice([shard], app="a", version=0).already
        assert not store.splice([shard], app="b", version=0).already


def test_closing_undoes_a_splice(root: Path, shard: Path) -> None:
    closer = threading.Thread(target=lambda: store.close())

    def close() -> None:
        closer.start()
        while not store.wakeups.stopping:
            pass

    store = open_store(root)
    store.put("orders", b"before")
    with pytest.raises(StoreClosedError):
        store.splice([shard], app="a", version=0, progress=Halfway(close))
    closer.join(30)
    with pytest.raises(StoreClosedError):
        store.splice([shard], app="a", version=0)
    with open_store(root) as store:
        assert store.recovery.clean_shutdown
        assert not store.recovery.changed
        assert shown(store) == {("orders", 0): [b"before"]}
        assert not store.splice([shard], app="a", version=0).already


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_ctrl_c_at_any_window_leaves_the_store_as_before(
    root: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqstore.log.bulk.shard.Shard.window_bytes", lambda it: min(it.bytes, max(2000, it.largest)))
    calls = 0
    with open_store(root) as store:
        store.put("orders", b"before")
        store.flush()
        before = log_of(root)

        def interrupt(done: int, total: int) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt

        for at in range(1, 100):
            calls = 0
            try:
                result = store.splice([shard], app="a", version=0, progress=interrupt)
            except KeyboardInterrupt:
                assert log_of(root) == before
                assert "intent" not in json.dumps(state_of(root) if at > 7 else {})
            else:
                break
        assert at > 10, "the windows were too few to tell"
        assert result.records == len(ROWS)
        assert list(store.verify()) == []


def test_ctrl_c_as_soon_as_puts_are_held_lets_them_in_again(
    root: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(root) as store:
        hold = type(store.wakeups.log).hold

        def interrupted(log: object) -> int:
            hold(log)
            raise KeyboardInterrupt

        monkeypatch.setattr("mqstore.log.commitlog.CommitLog.hold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.splice([shard], app="a", version=0)
        monkeypatch.undo()
        assert store.put("orders", b"behind").physical_offset == 0
        assert not store.splice([shard], app="a", version=0).already


def test_a_shard_that_changes_while_it_is_copied_is_found_and_taken_back(tmp_path: Path) -> None:
    good, bad = stage(tmp_path / "good", ROWS), stage(tmp_path / "bad", ROWS)
    changed = []

    def change(done: int, total: int) -> None:
        if done == total // 2 and not changed:  # all are checked, none is copied
            flip(bad / "records.bin", 95)
            changed.append(done)

    with open_store(tmp_path / "store") as store:
        store.put("orders", b"before")
        before = log_of(tmp_path / "store")
        with pytest.raises(FormatError, match="damaged"):
            store.splice([good, bad], app="a", version=0, progress=change)
        assert log_of(tmp_path / "store") == before
        assert store.put("orders", b"behind").offset == 1


def test_retention_forgets_what_it_saw_of_a_splice_that_was_taken_back(root: Path, shard: Path) -> None:
    """It keeps the newest time of full segments. Of one that was half copied and is filled otherwise that is wrong."""
    clock, policy = SimulatedClock(), Retention(age=60)

    def look() -> None:
        assert store.expired(policy) == 0
        raise KeyboardInterrupt

    with open_store(root, clock=clock) as store:
        store.put("orders", b"before")
        with pytest.raises(KeyboardInterrupt):
            store.splice([shard], app="a", version=0, progress=Halfway(look))
        clock.advance(3_600_000)
        for _ in range(4):
            store.put("orders", b"x" * 1000)
        assert len(store.log_files.starts) == 2
        assert store.expired(policy) == 0


_TIGHT = {
    "max_bytes": Retention(age=None, max_bytes=4 * SEGMENT, disk_ratio=None),
    "disk_ratio": Retention(age=None, max_bytes=None, disk_ratio=0.5),
}


@pytest.mark.parametrize("limit", _TIGHT)
def test_nothing_is_deleted_for_half_a_splice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Three segments are committed where four may be (of a disk of eight), and the splice needs more than one."""
    usage = SimpleNamespace(f_blocks=8, f_frsize=SEGMENT)

    def statvfs(path: object) -> SimpleNamespace:
        usage.f_bfree = usage.f_bavail = 8 - len(store.log_files.starts)
        return usage

    monkeypatch.setattr("mqstore.log.writing.retention.os", SimpleNamespace(statvfs=statvfs))
    shard = stage(tmp_path / "shard", [Row(b"x" * 1000) for _ in range(8)])

    def clean() -> None:
        assert len(store.log_files.starts) > 4
        assert store.clean(_TIGHT[limit]) == []

    def clean_and_fail() -> None:
        clean()
        raise KeyboardInterrupt

    with open_store(tmp_path / "store") as store:
        for i in range(8):
            store.put("orders", b"%1000d" % i)
        store.dispatch()
        store.flush()
        assert len(store.log_files.starts) == 3
        before = shown(store)
        with pytest.raises(KeyboardInterrupt):
            store.splice([shard], app="a", version=0, progress=Halfway(clean_and_fail))
        assert shown(store) == before
        store.splice([shard], app="a", version=0, progress=Halfway(clean))
        store.dispatch()
        store.clean(_TIGHT[limit])  # now they count
        assert len(store.log_files.starts) == 4


def test_full_disk_undoes_a_splice(root: Path, shard: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(root, fs=fs) as store:
        store.put("orders", b"before")
        fs.fail("allocate", errno.ENOSPC, nth=2)
        with pytest.raises(StoreFullError):
            store.splice([shard], app="a", version=0)
        assert shown(store) == {("orders", 0): [b"before"]}
        assert store.put("orders", b"between").offset == 1
        fs.fail({"create", "pwrite"}, errno.ENOSPC, nth=1, times=None, path_part="txn.json")
        with pytest.raises(StoreFullError):
            store.splice([shard], app="a", version=0)
        fs.heal()
        assert store.splice([shard], app="a", version=0).offsets["orders", 0][0] == 2
        assert list(store.verify()) == []


KINDS = sorted((CHANGES | {"pread", "open"}) - {"mkdir", "rmdir", "truncate_sparse", "allocate_more"})


@pytest.mark.parametrize("kind", KINDS)
def test_failed_splice_is_all_or_nothing(tmp_path: Path, kind: str) -> None:
    """Disk errors at each third call of a kind; then the program goes on (reliability#p8). `make crash` tries all."""
    shards = [stage(tmp_path / "a", ROWS[:30]), stage(tmp_path / "b", ROWS[30:])]
    total = sum(1 for row in ROWS if (row.topic, row.queue_id) == ("orders", 0))
    for nth in range(1, 60, 1 if STEP == 1 else 3):
        root = tmp_path / f"store-{nth}"
        fs = FaultyFileSystem()
        store = open_store(root, fs=fs)
        store.put("orders", b"before")
        store.splice([], app="old", version=5)
        fs.fail(kind, errno.EIO, nth=nth)
        failed: MQStoreError | None = None
        try:
            store.splice(shards, app="a", version=0)
        except MQStoreError as error:
            failed = error
        fs.heal()
        if isinstance(failed, FlushFailedError) or store.wakeups.log.failed is not None:
            with pytest.raises(FlushFailedError):
                store.put("orders", b"refused")
            store.close()
            store = open_store(root, fs=fs)
        messages = shown(store)["orders", 0]
        assert len(messages) in (1, 1 + total), (nth, failed)
        expected = len(messages) > 1
        store.put("orders", b"between")
        assert store.splice(shards, app="a", version=0).already == expected
        assert store.splice([], app="old", version=5).already
        assert sorted(shown(store)["orders", 0][:: total + 1]) == [b"before", b"between"] or not expected
        assert len(shown(store)["orders", 0]) == 2 + total
        assert list(store.verify()) == []
        store.close()
        with open_store(root) as store:
            assert not store.recovery.changed
        if not fs.failed:
            assert failed is None
            assert nth > 1, f"a splice makes no call of the kind {kind}"
            return
    raise AssertionError("the calls never end")


# -- undoing -----------------------------------------------------------------------------------------------------------


def crash_in_a_splice(root: Path, shard: Path, profile: Profile = "mqstore") -> int:
    """Leave `root` as a kill does when all is written and nothing recorded; where the log ended before."""
    store = open_store(root, profile=profile, fs=FaultyFileSystem())
    store.put("orders", b"before")
    store.dispatch()
    end: int = store.max_offset
    kill_in_splice(store, [shard], version=3)
    return end


@pytest.mark.parametrize("profile", PROFILES)
def test_opening_undoes_what_a_kill_cut_short_and_says_so(tmp_path: Path, root: Path, profile: Profile) -> None:
    shard = stage(tmp_path / "shard", ROWS, profile)
    end = crash_in_a_splice(root, shard, profile)
    with open_store(root, "r") as reader:
        assert shown(reader) == {("orders", 0): [b"before"]}
        [finding] = reader.verify()
        assert (finding.kind, finding.position) == ("unfinished_splice", end)
    found = inspect_store(root)
    assert found["recovery_needed"]
    assert found["undispatched_bytes"] == 0
    with open_store(root) as store:
        [finding] = store.recovery.findings
        assert (finding.kind, finding.file, finding.position) == ("unfinished_splice", f"commitlog/{0:020d}", end)
        assert finding.length > sum(len(staged(row)) for row in ROWS)
        assert "'a'" in finding.detail
        assert [cut.reason for cut in store.recovery.truncated] == ["unfinished_splice"] * 3
        assert store.recovery.changed
        assert store.max_offset == end
        assert store.put("orders", b"behind").offset == 1
        assert not store.splice([shard], app="a", version=3).already
    with open_store(root) as store:
        assert not store.recovery.changed


def test_dry_run_reports_a_splice_and_changes_nothing(root: Path, shard: Path) -> None:

    crash_in_a_splice(root, shard)
    before = files(root)
    report = recover(root, dry_run=True)
    assert [finding.kind for finding in report.findings] == ["unfinished_splice"]
    assert report.changed
    assert files(root) == before


def test_an_intent_is_not_acted_on_where_somebody_else_has_written(tmp_path: Path, root: Path) -> None:
    """A Java broker knows nothing of the file: it takes whole records for stored, and goes on behind them."""
    shard = stage(tmp_path / "shard", ROWS, "rocketmq")
    end = crash_in_a_splice(root, shard, "rocketmq")
    intent = (root / TXN_FILE).read_bytes()
    (root / TXN_FILE).unlink()
    with open_store(root) as store:  # stands for the broker: it finds the records and puts one of its own
        store.clock.advance(1000)  # type: ignore[attr-defined]
        store.put("orders", b"theirs")
        held = shown(store)
    (root / TXN_FILE).write_bytes(intent)
    os.truncate(root / "checkpoint", 40)  # as a broker leaves it to us
    with open(root / "abort", "w"):
        pass
    with open_store(root) as store:
        [finding] = [f for f in store.recovery.findings if f.kind == "unfinished_splice"]
        assert "another writer" in finding.detail
        assert shown(store) == held
        assert store.max_offset > end
    assert "intent" not in state_of(root)


def test_an_intent_below_the_flushed_watermark_is_stale(root: Path, shard: Path) -> None:
    with open_store(root) as store:
        store.put("orders", b"before")
        start, now_ms = store.max_offset, store.clock.now_ms()
        store.splice([shard], app="a", version=0)
        held = shown(store)
    intent = {"app": "a", "version": 0, "start": start, "stamp_ms": now_ms}
    value = {"version": 1, "apps": {}, "intent": intent}
    (root / TXN_FILE).write_text(json.dumps(value))  # an old copy that was put back
    with open_store(root, "r") as reader:
        assert shown(reader) == held
    with open_store(root) as store:
        [finding] = store.recovery.findings
        assert "flushed" in finding.detail
        assert shown(store) == held


def test_an_intent_from_the_backup_of_a_damaged_file_is_not_acted_on(root: Path, shard: Path) -> None:
    store = open_store(root)
    store.splice([shard], app="a", version=0)
    held = shown(store)
    kill(store)
    assert "intent" in json.loads((root / f"{TXN_FILE}.bak").read_text())
    (root / TXN_FILE).write_bytes(b"")
    with open_store(root, "r") as reader:
        assert shown(reader) == held
    with open_store(root) as store:
        assert [f.kind for f in store.recovery.findings] == ["unfinished_splice", "bad_json"]
        assert "backup" in store.recovery.findings[0].detail
        assert shown(store) == held


def test_damaged_table_stops_the_opening(root: Path, shard: Path) -> None:

    with open_store(root) as store:
        store.splice([shard], app="a", version=0)
        held = shown(store)
    for name in (TXN_FILE, f"{TXN_FILE}.bak"):
        (root / name).write_bytes(b"\0" * 100)
    with pytest.raises(CorruptStoreError, match="--rebuild config"):
        open_store(root)
    with open_store(root, "r") as reader:
        assert shown(reader) == held
    assert any("txn.json" in line for line in rebuild_config(root))
    with open_store(root) as store:
        assert shown(store) == held


@pytest.mark.parametrize("backup", [False, True])
def test_the_file_of_a_newer_program_is_refused_and_left_alone(root: Path, shard: Path, backup: bool) -> None:
    with open_store(root) as store:
        store.splice([shard], app="a", version=0)
    path = root / TXN_FILE
    newer = json.dumps({"version": 2, "apps": "something else"})
    path.write_text(newer)
    if backup:
        path.write_bytes(b"")
        Path(f"{path}.bak").write_text(newer)
    before = files(root / "config")
    modes: list[Literal["r", "rw"]] = ["r", "rw"]
    for mode in modes:
        with pytest.raises(UnsupportedStoreError) as caught:
            open_store(root, mode)
        assert str(path) in str(caught.value)
        assert "version 2" in str(caught.value)
        assert caught.value.schema == 2
    assert files(root / "config") == before


def test_members_of_a_newer_program_survive(root: Path) -> None:
    with open_store(root) as store:
        store.splice([], app="a", version=0)
    path = root / TXN_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "future": [1]}))
    with open_store(root) as store:
        store.splice([], app="b", version=0)
    assert state_of(root)["future"] == [1]
    assert state_of(root)["apps"].keys() == {"a", "b"}


def test_the_first_record_of_a_store_may_be_spliced_and_undone(root: Path, shard: Path) -> None:
    store = open_store(root)

    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.splice([shard], app="a", version=0, progress=interrupt)
    assert (store.min_offset, store.max_offset) == (0, 0)
    store.close()
    with open_store(root) as store:
        assert not store.recovery.changed
        assert store.splice([shard], app="a", version=0).first_offset == 0
        assert list(store.verify()) == []
