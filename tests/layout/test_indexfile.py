"""Index files: the vector of format#vectors, the golden stores' index files, and a model that puts one by one."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqstore.errors import FormatError
from mqstore.layout import indexfile
from mqstore.layout.arrays.scan import walk
from mqstore.layout.indexfile import (
    ENTRY_BYTES,
    HEADER_BYTES,
    IndexHeader,
    check_index,
    file_bytes,
    put_entries,
    query_entries,
    slots_entries_from_length,
)
from mqstore.layout.javahash import index_hash
from mqstore.layout.properties import decode_properties
from mqstore.layout.record import TRANSACTION_MASK, TRANSACTION_ROLLBACK, Record, decode_record
from tests.conftest import GoldenStore

SHAPES = {"clean": (53, 200), "crashed": (53, 200), "propcrc": (53, 200), "rolled": (17, 60), "trimmed": (17, 60)}
ALWAYS = (0, 2**62)

Put = tuple[int, int, int]

VECTOR: list[Put] = [
    (index_hash("OrderTopic#7F00000104D218B4AAC208A2B1C00000"), 1024, 1700000000123),
    (index_hash("OrderTopic#ORD-1"), 1024, 1700000000123),
    (index_hash("OrderTopic#ORD-1"), 2048, 1700000002999),
]
VECTOR_BYTES = bytes.fromhex(
    "00 00 01 8b cf e5 68 7b 00 00 01 8b cf e5 73 b7 00 00 00 00 00 00 04 00"
    "00 00 00 00 00 00 08 00 00 00 00 01 00 00 00 04"
    "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 03"
    + "00"
    * 20
    + "5b ea 41 df 00 00 00 00 00 00 04 00 00 00 00 00 00 00 00 00"
    "56 99 7f c3 00 00 00 00 00 00 04 00 00 00 00 00 00 00 00 01"
    "56 99 7f c3 00 00 00 00 00 00 08 00 00 00 00 02 00 00 00 02" + "00" * 20 * 12
)


def put(buf: bytearray, slots: int, entries: int, puts: Sequence[Put]) -> int:
    """`put_entries` from rows."""
    hashes, offsets, times = zip(*puts, strict=True) if puts else ((), (), ())
    return put_entries(buf, slots, entries, hashes, offsets, times)


def put_one_by_one(buf: bytearray, slots: int, entries: int, puts: Sequence[Put]) -> int:
    """format#index-put as it is written there; shares nothing with the code under test."""
    done = 0
    for key_hash, offset, time in puts:
        begin, end, begin_offset, end_offset, used, count = struct.unpack_from(">qqqqii", buf, 0)
        count = count or 1
        if count >= entries:
            break
        slot_at = 40 + 4 * (key_hash % slots)
        (old,) = struct.unpack_from(">i", buf, slot_at)
        if old <= 0 or old > count:
            old = 0
        seconds = 0
        if count > 1 and begin > 0 and time > begin:
            seconds = min((time - begin) // 1000, 2**31 - 1)
        struct.pack_into(">iqii", buf, 40 + 4 * slots + 20 * count, key_hash, offset, seconds, old)
        struct.pack_into(">i", buf, slot_at, count)
        if count <= 1:
            begin, begin_offset = time, offset
        end, end_offset = time, offset
        used = (used + (old == 0) + 2**31) % 2**32 - 2**31  # goes round as Java's does
        struct.pack_into(">qqqqii", buf, 0, begin, end, begin_offset, end_offset, used, count + 1)
        done += 1
    return done


def query_one_by_one(buf: bytes, slots: int, key_hash: int, begin_ms: int, end_ms: int, limit: int) -> list[int]:
    """format#index-query as it is written there, `begin` widened by 999 ms."""
    begin = struct.unpack_from(">q", buf, 0)[0]
    count = struct.unpack_from(">i", buf, 36)[0] or 1
    (number,) = struct.unpack_from(">i", buf, 40 + 4 * (key_hash % slots))
    found: list[int] = []
    if count <= 1 or number > count:
        return found
    while number > 0 and len(found) < limit:
        entry_hash, offset, seconds, previous = struct.unpack_from(">iqii", buf, 40 + 4 * slots + 20 * number)
        time = begin + 1000 * seconds
        if time < begin_ms - 999:
            break
        if entry_hash == key_hash and time <= end_ms:
            found.append(offset)
        if previous in (0, number) or previous > count:
            break
        number = previous
    return found


# --- vectors and golden stores ---


def test_the_puts_of_the_vector_make_its_bytes() -> None:
    buf = bytearray(file_bytes(4, 16))

    assert put(buf, 4, 16, VECTOR) == 3

    assert len(buf) == 376
    assert buf == VECTOR_BYTES


def test_a_query_finds_a_message_inside_its_second_and_stops_at_older_ones() -> None:
    key = VECTOR[1][0]

    # The second message of that key was stored at ...2999, which the file remembers as ...2123.
    assert query_entries(VECTOR_BYTES, 4, key, 1700000002999, 1700000002999, 10) == [2048]
    assert query_entries(VECTOR_BYTES, 4, key, 1700000003123, 1700000009999, 10) == []
    assert query_entries(VECTOR_BYTES, 4, key, 0, 1700000002122, 10) == [1024]
    assert query_entries(VECTOR_BYTES, 4, key, 0, 1700000000122, 10) == []


@pytest.mark.parametrize("java_diff", [0, 3, 3600])
def test_first_entry_has_the_time_of_its_file(java_diff: int) -> None:
    """In its second and later files RocketMQ counts entry 1 from the end of the file before: a query by time then
    took it for a message stored `java_diff` seconds later, and did not find it."""
    begin_ms, unique = 1700000000123, VECTOR[0][0]
    buf = bytearray(VECTOR_BYTES)
    struct.pack_into(">i", buf, 40 + 4 * 4 + 20 * 1 + 12, java_diff)

    assert query_entries(buf, 4, unique, begin_ms, begin_ms, 10) == [1024]
    assert query_entries(buf, 4, unique, begin_ms - 9_000_000, begin_ms, 10) == [1024]
    assert query_entries(buf, 4, unique, begin_ms + 1000, begin_ms + 9_000_000, 10) == []


def test_shape_is_guessed_only_for_the_default_ratio() -> None:
    assert slots_entries_from_length(file_bytes(5_000_000, 20_000_000)) == (5_000_000, 20_000_000)
    assert slots_entries_from_length(8_400_040) == (100_000, 400_000)
    assert slots_entries_from_length(file_bytes(53, 200)) is None
    assert slots_entries_from_length(HEADER_BYTES) is None
    assert slots_entries_from_length(0) is None


def records_of(store: GoldenStore) -> dict[int, Record]:
    """Every record of the log, in its order, by physical offset."""
    return {
        start + position: decode_record(data, position)
        for start, data in store.segments
        for position in walk(data, 0, len(data))[0].tolist()
    }


def keys_of(record: Record) -> list[str]:
    """What is indexed of a record (format#key-hash), in order; rollback records are not indexed."""
    if record.sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK:
        return []
    properties = decode_properties(record.properties_bytes)
    keys = [properties["UNIQ_KEY"]] if "UNIQ_KEY" in properties else []
    return keys + [key for key in properties.get("KEYS", "").split(" ") if key]


@pytest.mark.parametrize("name", ["clean", "crashed", "propcrc", "rolled"])
def test_index_files_of_the_java_engine_come_out_byte_for_byte(name: str, golden: Callable[[str], GoldenStore]) -> None:
    store = golden(name)
    slots, entries = SHAPES[name]
    puts = [
        (index_hash(f"{record.topic}#{key}"), offset, record.store_timestamp_ms)
        for offset, record in records_of(store).items()
        for key in keys_of(record)
    ]

    for file in sorted((store.path / "index").iterdir()):
        theirs = bytearray(file.read_bytes())
        ours = bytearray(file_bytes(slots, entries))
        puts = puts[put(ours, slots, entries, puts) :]
        # Java's entry 1 of a later file counts its seconds from another file's end.
        entry_1 = HEADER_BYTES + 4 * slots + ENTRY_BYTES
        theirs[entry_1 + 12 : entry_1 + 16] = bytes(4)
        assert ours == theirs, file.name
    assert puts == []


# --- against the model ---

HASHES = st.one_of(st.integers(0, 12), st.integers(0, 2**31 - 1))
TIMES = st.one_of(st.integers(0, 10_000), st.integers(-(2**40), 2**40))
PUTS = st.lists(st.tuples(HASHES, st.integers(0, 2**40), TIMES), max_size=40)


@given(batches=st.lists(PUTS, max_size=4), slots=st.integers(1, 9), entries=st.integers(1, 60))
@example(batches=[[(1, 5, 0), (1, 6, 9999)]], slots=1, entries=9)  # no begin time: no difference either
@example(batches=[[(1, 5, 1), (1, 6, 2**45)]], slots=1, entries=9)  # clamped
def test_many_at_once_are_the_same_bytes_as_one_by_one(batches: list[list[Put]], slots: int, entries: int) -> None:
    ours, model = bytearray(file_bytes(slots, entries)), bytearray(file_bytes(slots, entries))

    for batch in batches:
        assert put(ours, slots, entries, batch) == put_one_by_one(model, slots, entries, batch)

    assert ours == model


@given(
    noise=st.binary(min_size=file_bytes(3, 12), max_size=file_bytes(3, 12)),
    count=st.integers(0, 12),
    table=st.lists(st.integers(-2, 14) | st.just(2**31 - 1), min_size=3, max_size=3),
    used=st.sampled_from([0, 2, -1, 2**31 - 1]),
    puts=PUTS,
)
@example(noise=bytes(file_bytes(3, 12)), count=3, table=[4, 4, 2], used=0, puts=[(0, 5, 5), (1, 5, 5), (2, 5, 5)])
def test_damaged_slots_are_treated_as_one_by_one(
    noise: bytes, count: int, table: list[int], used: int, puts: list[Put]
) -> None:
    ours = bytearray(noise)
    struct.pack_into(">ii3i", ours, 32, used, count, *table)
    model = bytearray(ours)

    assert put(ours, 3, 12, puts) == put_one_by_one(model, 3, 12, puts)

    assert ours == model


@given(puts=PUTS, slots=st.integers(1, 5), data=st.data())
def test_queries_find_what_a_walk_by_the_rules_finds(puts: list[Put], slots: int, data: st.DataObject) -> None:
    buf = bytearray(file_bytes(slots, 60))
    put(buf, slots, 60, puts)
    key_hash = data.draw(st.sampled_from([row[0] for row in puts])) if puts else 0
    begin, end = data.draw(TIMES), data.draw(TIMES)
    limit = data.draw(st.integers(0, 10))

    expected = query_one_by_one(buf, slots, key_hash, begin, end, limit)
    assert query_entries(buf, slots, key_hash, begin, end, limit) == expected


@given(puts=st.lists(st.tuples(HASHES, st.integers(0, 2**40)), max_size=50), slots=st.integers(1, 5))
def test_new_files_have_no_problem(puts: list[tuple[int, int]], slots: int) -> None:
    buf = bytearray(file_bytes(slots, 60))
    rows = sorted((offset, key_hash) for key_hash, offset in puts)
    put(buf, slots, 60, [(key_hash, offset, 1000 + offset) for offset, key_hash in rows])

    assert check_index(buf, slots, 60) == []


# --- limits and refusals ---


def test_refused_puts_write_nothing() -> None:
    buf = bytearray(VECTOR_BYTES)

    with pytest.raises(ValueError, match="hash"):
        put(buf, 4, 16, [(1, 1, 1), (-1, 1, 1)])
    with pytest.raises(ValueError, match="hash"):
        put(buf, 4, 16, [(2**31, 1, 1)])
    with pytest.raises(ValueError, match="2 hashes"):
        put_entries(buf, 4, 16, [1, 2], [1], [1])
    with pytest.raises(FormatError, match="too few for 4 slots"):
        put(buf, 4, 17, [(1, 1, 1)])
    with pytest.raises(ValueError, match="slots"):
        put(buf, 0, 16, [(1, 1, 1)])
    assert buf == VECTOR_BYTES


@pytest.mark.parametrize("count", [-1, 17, 2**31 - 1])
def test_a_header_that_cannot_be_is_refused_by_put_and_reported_by_check(count: int) -> None:
    buf = bytearray(VECTOR_BYTES)
    struct.pack_into(">i", buf, 36, count)

    with pytest.raises(FormatError, match="indexCount"):
        put(buf, 4, 16, VECTOR)
    assert [problem.field for problem in check_index(buf, 4, 16)] == ["indexCount"]


# --- damage ---


@pytest.mark.parametrize(
    ("position", "form", "value", "field"),
    [
        (16, ">q", 1023, "beginPhyOffset"),
        (24, ">q", 2049, "endPhyOffset"),
        (32, ">i", 2, "hashSlotCount"),
        (40, ">i", 1, "slot"),
        (52, ">i", 2, "slot"),
        (52, ">i", 4, "slot"),
        (76, ">i", -5, "keyHash"),
        (76 + 24, ">q", 1023, "physicalOffset"),  # before that of the entry before
        (76 + 32, ">i", -1, "timeDiff"),
        (76 + 36, ">i", 2, "prevEntry"),  # leads to itself
        (76 + 36, ">i", 3, "prevEntry"),  # a loop of two
        (76 + 36, ">i", -1, "prevEntry"),
    ],
)
def test_a_changed_field_is_reported(position: int, form: str, value: int, field: str) -> None:
    buf = bytearray(VECTOR_BYTES)
    struct.pack_into(form, buf, position, value)

    assert (position, field) in [(problem.position, problem.field) for problem in check_index(buf, 4, 16)]


def test_a_chain_through_an_entry_of_another_slot_is_reported() -> None:
    buf = bytearray(VECTOR_BYTES)
    struct.pack_into(">i", buf, 76 + 20, 5)  # the key hash of entry 2 now belongs into slot 1

    assert [problem.field for problem in check_index(buf, 4, 16)] == ["prevEntry", "slot", "hashSlotCount"]


def test_a_file_of_another_length_is_reported() -> None:
    assert [problem.field for problem in check_index(VECTOR_BYTES[:-1], 4, 16)] == ["length"]
    assert [problem.field for problem in check_index(VECTOR_BYTES + b"\0", 4, 16)] == ["length"]
    assert [problem.field for problem in check_index(b"", 4, 16)] == ["length"]


def test_many_problems_of_a_kind_are_counted_in_one() -> None:
    buf = bytearray(VECTOR_BYTES)
    for entry in (1, 2, 3):
        struct.pack_into(">i", buf, 56 + 20 * entry + 12, -1)

    assert [problem.detail for problem in check_index(buf, 4, 16)] == ["timeDiff -1, and 2 more like it"]


@given(
    noise=st.binary(max_size=file_bytes(3, 12)),
    count=st.integers(-2, 20),
    links=st.lists(st.integers(-2, 14), min_size=12, max_size=12),
    table=st.lists(st.integers(-2, 14), min_size=3, max_size=3),
)
def test_queries_and_checks_of_garbage_end(noise: bytes, count: int, links: list[int], table: list[int]) -> None:
    buf = bytearray(file_bytes(3, 12))
    buf[: len(noise)] = noise
    struct.pack_into(">i3i", buf, 36, count, *table)
    for entry, link in enumerate(links):
        struct.pack_into(">ii", buf, 52 + 20 * entry + 12, 1, link)

    assert len(query_entries(buf, 3, 7, 0, 2**62, 1000)) < 12
    check_index(buf, 3, 12)


@pytest.mark.parametrize("entries", [0, 1, 2, 3])
def test_a_query_of_a_cut_file_stays_inside(entries: int) -> None:
    cut = VECTOR_BYTES[: file_bytes(4, entries)]

    assert query_entries(cut, 4, VECTOR[1][0], *ALWAYS, 10) == []
    with pytest.raises(FormatError, match="too few for 4 slots"):
        query_entries(cut[: HEADER_BYTES + 15], 4, VECTOR[1][0], *ALWAYS, 10)


def test_a_fence_stands_before_and_behind_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processors may see stores in another order: a slot must not lead to an entry that is not there yet."""
    buf = bytearray(file_bytes(4, 64))
    assert put(buf, 4, 64, [(3, 1024, 1000)]) == 1
    before, shown = bytes(buf), []
    monkeypatch.setattr(indexfile, "kernel", None)
    monkeypatch.setattr(indexfile, "fence", lambda: shown.append(bytes(buf)))

    assert put(buf, 4, 64, [(3, 2048, 1000), (3, 2049, 1000)]) == 2

    header, table = slice(0, HEADER_BYTES), HEADER_BYTES + 4 * 4
    assert shown == [before[:table] + buf[table:], buf[header] + before[HEADER_BYTES:table] + buf[table:]]


def test_a_query_takes_the_slot_before_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    buf = bytearray(file_bytes(4, 64))
    assert put(buf, 4, 64, [(3, 1024, 1000)]) == 1

    def put_meanwhile() -> None:
        monkeypatch.undo()
        put(buf, 4, 64, [(3, 2048, 1000)])

    monkeypatch.setattr(indexfile, "fence", put_meanwhile)
    assert query_entries(buf, 4, 3, *ALWAYS, 10) == [1024]
    assert query_entries(buf, 4, 3, *ALWAYS, 10) == [2048, 1024]


_PUTS = """
import mmap, sys
from mqstore.layout.indexfile import put_entries
with open(sys.argv[1], "r+b") as file:
    buf = mmap.mmap(file.fileno(), 0)
for number in range(1, 3_001):
    put_entries(buf, 4, 40_000, [0] * 10, [number] * 10, [1] * 10)
"""


def test_a_reader_in_another_process_never_sees_fewer_entries_than_before(tmp_path: Path) -> None:
    """`struct.pack_into` clears what it is going to write: now and then a file that was being filled had no entry."""
    path = tmp_path / "index"
    path.write_bytes(bytes(file_bytes(4, 40_000)))
    with open(path, "r+b") as file:
        buf = mmap.mmap(file.fileno(), 0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen([sys.executable, "-c", _PUTS, str(path)], env=environment)
    seen, fewer = 0, 0
    while writer.poll() is None:
        for _ in range(1000):
            count = IndexHeader.decode(buf).next_entry
            fewer += count < seen
            seen = max(seen, count)

    assert writer.returncode == 0
    assert (fewer, IndexHeader.decode(buf).next_entry) == (0, 30_001)
