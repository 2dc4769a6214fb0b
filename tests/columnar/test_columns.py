"""The columnar reader gives what `mqstore export` gives, row by row, whatever is in the store and however it is cut."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore import StoreConfig
from mqstore.columnar.columns import COLUMNS, ColumnReader, arrow_schema, default_columns
from mqstore.columnar.rows import Policy
from mqstore.engine import Finding
from mqstore.errors import ConfigError, CorruptStoreError, TopicNotFoundError
from mqstore.layout.arrays import scan
from mqstore.layout.record import BODY_AT_V4
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.columnar.support import (
    Odd,
    as_exported,
    as_row,
    by_log,
    exported,
    instant,
    log_end,
    many,
    odd_records,
    read_all,
    rows_of,
    write_store,
)
from tests.conftest import GOLDEN_NAMES, Golden
from tests.log.support import flip, open_store, overwrite
from tests.records import encode_record


def in_log_order(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(lines, key=lambda line: line["physical_offset"])


# -- the same as an export ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "verify"), [*((name, True) for name in GOLDEN_NAMES), ("clean", False)])
def test_rows_of_a_java_store_are_those_of_its_export(golden: Golden, name: str, verify: bool) -> None:
    path = golden(name).path
    rows = rows_of(read_all(path, policy=Policy(verify=verify)))
    assert [as_exported(row) for row in rows] == [as_row(line) for line in exported(path)]
    assert {row["store"] for row in rows} == {str(path)}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_hashes_and_checksums_of_a_java_store_are_those_that_java_lists(golden: Golden, name: str) -> None:
    java = golden(name)
    listed = {line["physical_offset"]: (line["tags_code"], line["body_crc"]) for line in java.of("message")}
    wanted = ["physical_offset", "tags_code", "body_crc"]
    for batches in (read_all(java.path, wanted), by_log(java.path, [], wanted)):
        found = {row["physical_offset"]: (row["tags_code"], row["body_crc"]) for row in rows_of(batches)}
        assert found == listed


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_the_log_of_a_java_store_read_in_ranges_has_the_same_rows(golden: Golden, name: str) -> None:
    path = golden(name).path
    cuts = [1, 777, 5000, 30_000, 65_535, 65_536, 65_537, 99_999]
    rows = rows_of(by_log(path, cuts, policy=Policy(on_corrupt="skip")))
    assert [as_exported(row) for row in rows] == [as_row(line) for line in in_log_order(exported(path))]


@given(
    records=st.lists(odd_records(), max_size=40),
    profile=st.sampled_from(["mqstore", "rocketmq"]),
    max_rows=st.sampled_from([1, 3, 20_000]),
    max_bytes=st.sampled_from([1, 500, 8 << 20]),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=4),
    verify=st.booleans(),
)
def test_rows_of_any_store_are_those_of_its_export(
    records: list[Odd], profile: str, max_rows: int, max_bytes: int, cuts: list[int], verify: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_store(Path(folder) / "s", records, profile)
        expected = exported(path)

        def policy() -> Policy:
            return Policy(max_rows=max_rows, max_bytes=max_bytes, verify=verify)

        batches = read_all(path, policy=policy())
        assert [as_exported(row) for row in rows_of(batches)] == [as_row(line) for line in expected]
        assert all(0 < batch.num_rows <= max_rows for batch in batches)
        scanned = rows_of(by_log(path, cuts, policy=policy()))
        assert [as_exported(row) for row in scanned] == [as_row(line) for line in in_log_order(expected)]
        listed = {row["physical_offset"]: row["tags_code"] for row in rows_of(batches)}
        assert {row["physical_offset"]: row["tags_code"] for row in scanned} == listed


@given(records=st.lists(odd_records(), min_size=1, max_size=20), data=st.data())
def test_a_column_alone_is_what_it_is_among_all(records: list[Odd], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_store(Path(folder) / "s", [Odd(body=zlib.compress(b"plain"), sys_flag=0x301), *records])
        whole = rows_of(read_all(path, [*COLUMNS]))
        for name in data.draw(st.lists(st.sampled_from([*COLUMNS]), min_size=6, max_size=6, unique=True)):
            batches = read_all(path, [name])
            assert rows_of(batches) == [{name: row[name]} for row in whole]
            assert all(batch.schema == arrow_schema([name]) for batch in batches)


@given(records=st.lists(odd_records(), min_size=1, max_size=30), tags=st.sampled_from(["abc", "TAGS || a", "*", "�"]))
def test_a_tag_filter_lets_pass_what_read_lets_pass(records: list[Odd], tags: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        odd = [Odd(properties=b"TAGS\x01abc\x02TAGS\x01a"), Odd(properties=b"TAGS\x01abc"), *records]
        path = write_store(Path(folder) / "s", odd)
        with ReadOnlyMessageStore(path) as store:
            expected = [
                (*ref, message.offset)
                for topic in store.topics()
                for ref in store.queues(topic)
                for message in store.iter(*ref, tags=tags)
            ]
        names = ["topic", "queue_id", "queue_offset"]
        assert [tuple(row.values()) for row in rows_of(read_all(path, names, tags=tags))] == expected
        scanned = [tuple(row.values()) for row in rows_of(by_log(path, [], names, tags=tags))]
        assert sorted(scanned) == sorted(expected)


def test_the_log_lists_what_dispatch_would(tmp_path: Path) -> None:
    records = [Odd(), Odd(queue_id=-1), Odd(topic="../etc"), Odd(sys_flag=4), Odd(sys_flag=8), Odd(sys_flag=12), Odd()]
    path = write_store(tmp_path / "s", records)
    for batches in (read_all(path), by_log(path, [])):
        found = [(row["topic"], row["queue_offset"], row["sys_flag"]) for row in rows_of(batches)]
        assert sorted(found) == [("seed", 0, 0), ("t", 0, 0), ("t", 1, 8), ("t", 2, 0)]


def test_tags_with_one_hash_differ(tmp_path: Path) -> None:
    records = [Odd(properties=b"TAGS\x01Aa\x02"), Odd(properties=b"TAGS\x01BB\x02")]  # equal in Java's hash
    path = write_store(tmp_path / "s", records)
    assert [row["tags"] for row in rows_of(read_all(path, ["tags"], tags="BB"))] == ["BB"]


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_keeps_to_its_bytes_also_when_bodies_were_stored_small(tmp_path: Path) -> None:
    packed = [Odd(body=zlib.compress(bytes([i]) * 3000), sys_flag=0x301) for i in range(20)]
    path = write_store(tmp_path / "s", packed)
    batches = read_all(path, ["topic", "body"], policy=Policy(max_bytes=10_000))
    bodies = [row["body"] for row in rows_of(batches) if row["topic"] == "t"]
    assert bodies == [bytes([i]) * 3000 for i in range(20)]
    assert max(batch.nbytes for batch in batches) < 10_500
    assert len(batches) >= 7


def test_bodies_that_inflate_to_a_batch_each_are_read(tmp_path: Path) -> None:
    """Each cut of the messages that were found together was a call within the last one: some thousand were too many."""
    packed = Odd(body=zlib.compress(bytes(200_000)), sys_flag=0x301)
    path = write_store(tmp_path / "s", [packed] * 1200, segment_bytes=1 << 20)
    with ReadOnlyMessageStore(path) as store:
        batches = ColumnReader(store, ["body"], policy=Policy(max_bytes=390_000)).queue("t", 0, 0, 1200)
        assert sum(batch.num_rows for batch in batches) == 1200


def test_few_batches_are_made_of_many_segments(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(3000))
    batches = read_all(path, ["body"])
    assert len(batches) == 5  # a queue each, and the seed's


def test_batches_outlive_the_reader_and_the_store(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(50))
    expected = [as_row(line) for line in exported(path)]
    batches = read_all(path)
    shutil.rmtree(path)
    assert [as_exported(row) for row in rows_of(batches)] == expected


@pytest.mark.parametrize("odd", [None, "compressed", "host", "size"])
def test_bodies_that_were_copied_with_the_check_are_those_of_the_messages(tmp_path: Path, odd: str | None) -> None:
    """Over several segments, with one among them that cannot simply be copied; or a unit whose size says gigabytes."""
    bodies = [bytes([i]) * (i * 37 % 300) for i in range(70)]
    with open_store(tmp_path / "s") as store:
        for i, body in enumerate(bodies):
            if i == 40 and odd == "compressed":
                store.append("t", 0, zlib.compress(body), sys_flag=1)
            elif i == 40 and odd == "host":
                store.append("t", 0, body, born_host="[::1]:80")
            else:
                store.put("t", body)
    wanted = list(range(70))
    if odd == "size":
        file = tmp_path / "s" / "consumequeue" / "t" / "0" / f"{40 // 8 * 160:020d}"
        data = bytearray(file.read_bytes())
        data[8:12] = (0x7FFF_0000).to_bytes(4, "big")
        file.write_bytes(data)
        wanted.remove(40)
    batches = read_all(tmp_path / "s", ["body", "queue_offset"], policy=Policy(on_corrupt="skip"))
    assert [(row["queue_offset"], row["body"]) for row in rows_of(batches)] == [(i, bodies[i]) for i in wanted]


def test_columns_from_units_alone_touch_no_record(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(50))
    shutil.rmtree(path / "commitlog")
    (path / "commitlog").mkdir()
    with ReadOnlyMessageStore(path) as store:
        reader = ColumnReader(store, ["queue_offset", "size", "tags_code"])
        assert sum(batch.num_rows for batch in reader.queue("t", 0, 0, 12)) == 12


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, list[int]]:
    """40 messages of one queue, four of them damaged in ways that are found in four places; which."""
    path = write_store(tmp_path / "s", [Odd(body=b"%04d" % i * 9) for i in range(40)])
    with ReadOnlyMessageStore(path) as store:
        places = store.units("t", 0, 0, 40)["physical_offset"].tolist()
    log = path / "commitlog" / f"{0:020d}"
    flip(log, places[3] + 90)  # body: the checksum
    flip(log, places[10] + 35)  # its own offset
    flip(log, places[11] + 3)  # its length
    flip(log, places[39] + 4)  # its magic
    return path, [3, 10, 11, 39]


def test_damage_is_left_out_and_counted(damaged: tuple[Path, list[int]]) -> None:
    path, bad = damaged
    told: list[Finding] = []
    policy = Policy(on_corrupt="skip", tell=told.append)
    rows = rows_of(read_all(path, ["topic", "queue_offset", "body"], policy=policy))
    found = [row["queue_offset"] for row in rows if row["topic"] == "t"]
    assert found == [i for i in range(40) if i not in bad]
    assert all(row["body"] == b"%04d" % row["queue_offset"] * 9 for row in rows if row["topic"] == "t")
    assert (policy.corrupt, [finding.kind for finding in told]) == (4, ["bad_record"] * 4)


def test_damage_is_kept_as_a_row_that_says_so(damaged: tuple[Path, list[int]]) -> None:
    path, bad = damaged
    rows = [row for row in rows_of(read_all(path, policy=Policy(on_corrupt="keep"))) if row["topic"] == "t"]
    assert [row["queue_offset"] for row in rows] == [*range(40)]
    for row in rows:
        if row["queue_offset"] in bad:
            known = ("store", "topic", "queue_id", "queue_offset", "physical_offset", "size", "tags_code", "error")
            assert {name for name, value in row.items() if value is not None} == set(known)
            assert row["error"].endswith(f"offset {row['queue_offset']}: the record does not verify")
        else:
            assert row["error"] is None
            assert row["body"] == b"%04d" % row["queue_offset"] * 9


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    """It was told as records that do not verify, in a file that is not there."""
    with MessageStore(tmp_path, config=StoreConfig(segment_bytes=4096)) as store:
        places = [store.put("t", bytes(200)).physical_offset for _ in range(60)]
    (tmp_path / "commitlog" / f"{4096:020d}").unlink()
    lost = [slot for slot, place in enumerate(places) if place // 4096 == 1]
    assert lost
    for read in (read_all, lambda path, **options: by_log(path, [], **options)):
        with pytest.raises(CorruptStoreError, match=f"^missing_segment: commitlog/{4096:020d}: .*"):
            read(tmp_path)
        told: list[Finding] = []
        rows = rows_of(read(tmp_path, policy=Policy(on_corrupt="skip", tell=told.append)))
        assert [row["queue_offset"] for row in rows] == [slot for slot in range(60) if slot not in lost]
        assert {(finding.kind, finding.file) for finding in told} == {("missing_segment", f"commitlog/{4096:020d}")}


def test_lengths_are_checked_without_checksums(damaged: tuple[Path, list[int]]) -> None:
    policy = Policy(on_corrupt="skip", verify=False)
    rows = rows_of(read_all(damaged[0], ["topic", "queue_offset", "body"], policy=policy))
    assert [r["queue_offset"] for r in rows if r["topic"] == "t"] == [i for i in range(40) if i not in (10, 11, 39)]


@pytest.mark.parametrize("lost", ["nothing", "a bit", "a segment", "the end of a segment"])
def test_records_of_a_tag_that_lie_far_apart_are_checked_as_all_others(tmp_path: Path, lost: str) -> None:
    """Each is read by itself, and no segment is mapped for it."""
    with MessageStore(tmp_path, config=StoreConfig(segment_bytes=200_000)) as store:
        places = [
            store.put("t", b"%d" % i * 15_000, tag="ab"[i % 2], keys=[f"k{i}"]).physical_offset for i in range(40)
        ]
    tagged = [slot for slot in range(40) if slot % 2 == 0]
    victim = tagged[6]
    number, position = divmod(places[victim], 200_000)
    log = tmp_path / "commitlog" / f"{number * 200_000:020d}"
    there = [slot for slot in tagged if places[slot] // 200_000 == number]
    bad = {"nothing": [], "a bit": [victim], "a segment": there}.get(lost, [slot for slot in there if slot >= victim])
    data = bytearray(log.read_bytes())
    data[position + 200] ^= lost == "a bit"
    log.write_bytes(data if lost != "the end of a segment" else data[: position + 200])
    if lost == "a segment":
        log.unlink()
    names = ["queue_offset", "body", "tags", "keys"]
    policy = Policy(on_corrupt="skip")
    found = [tuple(row.values()) for row in rows_of(read_all(tmp_path, names, policy=policy, tags="a"))]
    assert found == [(i, b"%d" % i * 15_000, "a", f"k{i}") for i in tagged if i not in bad]
    assert policy.corrupt == len(bad)


def test_a_hole_in_a_queue_is_damage(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(body=b"%d" % i) for i in range(20)])
    overwrite(path / "consumequeue" / "t" / "0" / f"{0:020d}", 5 * 20, bytes(40))
    told: list[Finding] = []
    rows = rows_of(read_all(path, ["topic", "queue_offset"], policy=Policy(on_corrupt="skip", tell=told.append)))
    assert [r["queue_offset"] for r in rows if r["topic"] == "t"] == [i for i in range(20) if i not in (5, 6)]
    assert [(finding.kind, finding.position) for finding in told] == [("missing_units", 100), ("missing_units", 120)]
    kept = rows_of(read_all(path, policy=Policy(on_corrupt="keep")))
    assert [r["queue_offset"] for r in kept if r["topic"] == "t"] == [*range(20)]
    assert [r["queue_offset"] for r in kept if r["error"]] == [5, 6]
    with pytest.raises(CorruptStoreError, match="no unit"):
        read_all(path)


def test_a_filter_passes_damaged_messages_that_are_kept_and_no_others(tmp_path: Path) -> None:
    """Nobody knows what they bore."""
    path = write_store(
        tmp_path / "s", [Odd(properties=b"TAGS\x01%c\x02n\x01%d" % (b"ab"[i % 2], i)) for i in range(12)]
    )
    with ReadOnlyMessageStore(path) as store:
        places = store.units("t", 0, 0, 12)["physical_offset"].tolist()
    log = path / "commitlog" / f"{0:020d}"
    for row in (2, 5):
        flip(log, places[row] + 88)
    names = ["topic", "queue_offset", "error"]
    for options, wanted in (({"tags": "a"}, {0, 2, 4, 6, 8, 10}), ({"where": "n > 7"}, {2, 5, 8, 9, 10, 11})):
        rows = rows_of(read_all(path, names, policy=Policy(on_corrupt="keep"), **options))
        found = {row["queue_offset"] for row in rows if row["topic"] == "t"}
        # Of a damaged message the unit still knows the hash of the tag: 5 bore another.
        assert found == wanted
        assert {row["queue_offset"] for row in rows if row["error"]} == found & {2, 5}


def test_keys_and_expressions_choose_messages(tmp_path: Path) -> None:
    blobs = [b"KEYS\x01k1 k2", b"KEYS\x01k2\x02n\x015", b"UNIQ_KEY\x01k1\x02n\x01x", b"", b"n\x017\x02n\x015"]
    path = write_store(tmp_path / "s", [Odd(properties=blob) for blob in blobs])
    for options, expected in (
        ({"keys": ["k1"]}, [0, 2]),
        ({"keys": ["k1", "k2", "k3"]}, [0, 1, 2]),
        ({"where": "n = 5"}, [1, 4]),
        ({"where": "n = 5", "keys": ["k2"]}, [1]),
        ({"keys": [""]}, []),
    ):
        for batches in (
            read_all(path, ["topic", "queue_offset"], **options),
            by_log(path, [], ["topic", "queue_offset"], **options),
        ):
            assert [row["queue_offset"] for row in rows_of(batches) if row["topic"] == "t"] == expected, options


def test_a_void_unit_is_no_message_and_no_damage(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(body=b"%d" % i) for i in range(5)])
    overwrite(path / "consumequeue" / "t" / "0" / f"{0:020d}", 2 * 20, bytes(8) + b"\x7f\xff\xff\xff" + bytes(8))
    assert [row["body"] for row in rows_of(read_all(path, ["body"]))][1:] == [b"0", b"1", b"3", b"4"]


@pytest.mark.parametrize(
    ("source", "target"), [(("b", 0, 0), ("a", 0, 0)), (("a", 1, 0), ("a", 0, 0)), (("a", 0, 1), ("a", 0, 0))]
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_unit_that_points_at_another_units_record_is_damage(
    tmp_path: Path, source: tuple[str, int, int], target: tuple[str, int, int], verify: bool
) -> None:
    """Of another topic, another queue, another slot."""
    records = [Odd(topic="a"), Odd(topic="b"), Odd(topic="a", queue_id=1), Odd(topic="a")]
    path = write_store(tmp_path / "s", records)

    def file(topic: str, queue_id: int, _: int) -> Path:
        return path / "consumequeue" / topic / str(queue_id) / f"{0:020d}"

    unit = file(*source).read_bytes()[20 * source[2] :][:20]
    data = bytearray(file(*target).read_bytes())
    data[20 * target[2] : 20 * target[2] + 20] = unit
    file(*target).write_bytes(data)
    policy = Policy(on_corrupt="skip", verify=verify)
    names = ["topic", "queue_id", "queue_offset"]
    found = [tuple(row.values())[:3] for row in rows_of(read_all(path, [*names, "message_id"], policy=policy))]
    assert found == [
        key for key in [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0), ("seed", 0, 0)] if key != target
    ]
    assert policy.corrupt == 1


@pytest.mark.parametrize("kind", ["skip", "keep", "fail"])
@pytest.mark.parametrize("scan", ["queue", "log"])
def test_body_that_does_not_inflate_is_damage(tmp_path: Path, kind: Any, scan: str) -> None:
    good = Odd(body=zlib.compress(b"good"), sys_flag=1)
    path = write_store(tmp_path / "s", [good, Odd(body=b"no zlib", sys_flag=1), good, Odd(body=b"plain")])

    def read(*columns: str, **options: Any) -> list[dict[str, Any]]:
        names = ["topic", *columns]
        batches = read_all(path, names, **options) if scan == "queue" else by_log(path, [], names, **options)
        return [row for row in rows_of(batches) if row["topic"] == "t"]

    assert len(read("flag", policy=Policy(on_corrupt=kind))) == 4
    stored = [row["body"] for row in read("body", policy=Policy(on_corrupt=kind), decompress=False)]
    assert stored == [good.body, b"no zlib", good.body, b"plain"]
    policy = Policy(on_corrupt=kind)
    if kind == "fail":
        with pytest.raises(CorruptStoreError, match=r"t, queue 0, offset 1: its body does not inflate"):
            read("body", policy=policy)
        return
    rows = read("body", "queue_offset", *(["error"] if kind == "keep" else []), policy=policy)
    if kind == "skip":
        assert [row["body"] for row in rows] == [b"good", b"good", b"plain"]
    else:
        assert [row["body"] for row in rows] == [b"good", None, b"good", b"plain"]
        assert [row["queue_offset"] for row in rows] == [0, 1, 2, 3]
        assert "does not inflate" in rows[1]["error"]
    assert policy.corrupt == 1


@pytest.mark.parametrize("scan", ["queue", "log"])
def test_error_column_finds_the_same_damage_beside_any_column(tmp_path: Path, scan: str) -> None:
    """`where error is not null` found nothing, unless another column had the records read."""
    path = write_store(tmp_path / "s", [Odd(body=b"%04d" % i * 9, sys_flag=int(i == 5)) for i in range(12)])
    with ReadOnlyMessageStore(path) as store:
        places = store.units("t", 0, 0, 12)["physical_offset"].tolist()
    flip(path / "commitlog" / f"{0:020d}", places[3] + 90)  # body: the checksum; 5 does not inflate
    for name in COLUMNS:
        names = [*dict.fromkeys([name, "physical_offset", "error"])]
        policy = Policy(on_corrupt="keep")
        batches = read_all(path, names, policy=policy) if scan == "queue" else by_log(path, [], names, policy=policy)
        assert [row["physical_offset"] for row in rows_of(batches) if row["error"]] == [places[3], places[5]], name


def test_messages_that_retention_took_meanwhile_are_counted_not_damage(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(body=bytes([i % 256]) * 500) for i in range(100)])
    with ReadOnlyMessageStore(path) as store:
        low, high = store.offsets("t", 0)
        (path / "commitlog" / f"{0:020d}").unlink()
        policy = Policy()
        rows = rows_of(ColumnReader(store, ["body", "queue_offset"], policy=policy).queue("t", 0, low, high))
    assert policy.removed + len(rows) == 100
    assert policy.removed > 10
    assert rows[0]["queue_offset"] == policy.removed


def test_log_scan_distinguishes_loss_and_retention(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(body=bytes([i % 256]) * 900) for i in range(100)])
    with ReadOnlyMessageStore(path) as store:
        end = log_end(store)
        segments = [Path(segment.path) for segment in store.log_files.segments()]
        assert len(segments) > 4
        segments[2].unlink()
        policy = Policy(on_corrupt="skip")
        rows = rows_of(ColumnReader(store, ["queue_offset", "topic"], policy=policy).log(0, end))
        assert (policy.corrupt, policy.removed) == (1, 0)
        offsets = [row["queue_offset"] for row in rows if row["topic"] == "t"]
        assert len(offsets) == len({*offsets})
        assert 70 < len(offsets) < 90
        with pytest.raises(CorruptStoreError, match="no file holds"):
            [*ColumnReader(store, ["body"]).log(0, end)]
    with ReadOnlyMessageStore(path) as store:  # another, which has none of them mapped
        segments[0].unlink()
        segments[1].unlink()
        policy = Policy()
        left = rows_of(ColumnReader(store, ["queue_offset"], policy=policy).log(0, end))
        assert (policy.corrupt, policy.removed) == (0, 3)
        assert [row["queue_offset"] for row in left] == offsets[-len(left) :]


# -- use ---------------------------------------------------------------------------------------------------------------


def test_wrong_columns_are_refused_with_the_list_of_those_there_are(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [])
    with ReadOnlyMessageStore(path) as store:
        with pytest.raises(ConfigError, match="no column 'bodies'; there are store, topic, "):
            ColumnReader(store, ["body", "bodies"])
        with pytest.raises(ConfigError, match="twice"):
            ColumnReader(store, ["body", "body"])


# -- Store.to_arrow ----------------------------------------------------------------------------------------------------


def test_a_store_gives_a_table_of_a_topic_while_it_is_open_for_writing(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "s") as store:
        store.create_topic("t", queues=2)
        assert store.to_arrow("t").num_rows == 0
        for i in range(10):
            store.put("t", b"%d" % i, queue_id=i % 2, tag="ab"[i // 5])
        whole = store.to_arrow("t", columns=["queue_id", "queue_offset", "body"])
        assert whole["body"].to_pylist() == [b"%d" % i for i in (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)]
        assert whole.column_names == ["queue_id", "queue_offset", "body"]
        assert store.to_arrow("t", 1, ["body"], start=1, stop=3)["body"].to_pylist() == [b"3", b"5"]
        assert store.to_arrow("t", 0, ["body"], tags="b")["body"].to_pylist() == [b"6", b"8"]
        assert store.to_arrow("t").schema == arrow_schema(default_columns())
        with pytest.raises(TopicNotFoundError):
            store.to_arrow("u")
        with pytest.raises(ConfigError, match="one queue"):
            store.to_arrow("t", start=3)


def test_a_table_begins_and_ends_at_times(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(40))
    with mqstore.open(path, "r") as store:
        times = [instant(1_700_000_000_000 + i) for i in (10, 30)]
        found = store.to_arrow("orders", columns=["store_timestamp"], start=times[0], stop=times[1])
        expected = {instant(1_700_000_000_000 + i) for i in range(11, 30, 2)}
        assert set(found["store_timestamp"].to_pylist()) == expected


def test_importing_mqstore_imports_neither_arrow_nor_spark() -> None:
    code = "import sys, mqstore; print([m for m in sys.modules if 'arrow' in m or 'spark' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- records of queues that share the log ------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["none", "body", "size", "number", "checksum"])
def test_records_of_a_queue_that_shares_the_log_are_checked_each(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many are checked in one run, in which one bad record must not hide or spoil others."""
    path = write_store(tmp_path / "s", many(400), segment_bytes=1 << 18)
    expected = [as_exported(row) for row in rows_of(read_all(path, policy=Policy(verify=False)))]
    with ReadOnlyMessageStore(path) as store:
        places = [int(store.units("orders", 1, slot, 1)["physical_offset"][0]) for slot in (0, 40, 99)]
    at = {"body": 90, "size": 3, "number": 27, "checksum": 10}
    log = path / "commitlog" / f"{0:020d}"
    for place in places if damage != "none" else ():
        flip(log, place + at[damage], 2)
    if damage != "none":
        expected = [row for row in expected if row["physical_offset"] not in places]
    for compiled in (scan.kernel, None):
        monkeypatch.setattr(scan, "kernel", compiled)
        found = rows_of(read_all(path, policy=Policy(on_corrupt="skip")))
        assert [as_exported(row) for row in found] == expected
    kept = rows_of(read_all(path, policy=Policy(on_corrupt="keep")))
    assert len(kept) == 401
    assert [row["queue_offset"] for row in kept if row["error"]] == ([] if damage == "none" else [0, 40, 99])


def test_body_of_nested_records_adds_no_rows(tmp_path: Path) -> None:
    """Reading began at the first record that verified behind the cut: who may put had others read what he liked."""
    with MessageStore(tmp_path / "s", config=StoreConfig(segment_bytes=1 << 16)) as store:
        store.put("t", b"before")
        at = store.max_offset + BODY_AT_V4
        inner = b""
        for _ in range(50):
            inner += encode_record(
                topic="bank",
                body=b"pay mallory",
                queue_id=0,
                queue_offset=7,
                physical_offset=at + len(inner),
                born_timestamp_ms=1,
                store_timestamp_ms=1,
                checksum=store.manifest.checksum,
            )
        places = [store.put("t", body).physical_offset for body in (inner, b"after", b"end")]
    assert places[1] - places[0] > 5_000

    for cut in (places[0], places[0] + 1, at, at + 1, at + 2_500, places[1] - 1, places[1], places[1] + 1):
        rows = rows_of(by_log(tmp_path / "s", [cut], ["topic", "queue_offset"]))
        assert [tuple(row.values()) for row in rows] == [("t", i) for i in range(4)]
