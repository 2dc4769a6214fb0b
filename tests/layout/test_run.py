"""Consecutive records read in one pass, and what queues and index are told of them: by compiled parts as by numpy.

Every log here is read both ways and compared in full, whole and with each kind of damage. Without compiled parts both
ways are the same one, and the model of `check_record` is what remains.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.layout.arrays.dispatch import Rows, rows_of
from mqstore.layout.arrays.scan import Headers, content_end, read_run
from mqstore.layout.javahash import index_hash, java_hash
from mqstore.layout.record import Checksum, check_record, encode_blank
from mqstore.native import kernel
from tests.records import encode_record
from tests.without import compiled, compiled_parts_left_out

CHECKSUMS: list[Checksum] = ["crc32c-record", "crc32-body"]
BASE = 1 << 33
DELAYS = (1000, 5000)
COLUMNS = (
    *("positions", "size", "magic", "checksum", "queue_id", "flag", "queue_offset", "physical_offset", "sys_flag"),
    *("store_timestamp_ms", "body_position", "body_size", "topic_position", "topic_size", "properties_position"),
    *("properties_size", "ok"),
)
V6 = bytes(range(20))
PROPERTIES = (
    b"",
    b"TAGS\x01a\x02",
    b"TAGS\x01a",
    b"KEYS\x01k1  k2 \x02UNIQ_KEY\x01u 1\x02TAGS\x01polygenelubricants\x02",
    b"KEYS\x01 \x02",
    b"TAGS\x01a\x02TAGS\x01b\x02KEYS\x01x\x02KEYS\x01y z",
    b"TAGS\x01\x02UNIQ_KEY\x01v\x01w\x02\x02\x01\x01\x02",
    b"TAGS\x01\xe8\xae\xa2\x02",
    b"KEYS\x01\xff\x02",
    b"UNIQ_KEY\x01\xf0\x9f\x98\x80\x02",
    b"INNER_MULTI_DISPATCH\x01%LMQ%q,r\x02INNER_MULTI_QUEUE_OFFSET\x014,5\x02",
    b"twentylettersofaname\x01v\x02",
    b"DELAY\x012\x02TAGS\x01a\x02",
    b"x\x01" + b"y" * 300 + b"\x02",
    b"a\x01b\x02__CRC32#\x011150232550\x02",
    b"__CRC32#\x01wrong\x02",
    b"__CRC32#\x011150232550\x02",  # nothing but that
    b"__CRC32#\x010000000000\x02",
    b"v\x01" + b"_" * 11 + b"__CRC32#\x01115023255\x02",
)
RECORDS = st.fixed_dictionaries(
    {"body": st.one_of(st.binary(max_size=30), st.integers(0, 2000).map(bytes))},
    optional={
        "topic": st.sampled_from(["a", "b", "orders", "SCHEDULE_TOPIC_XXXX", b"\xff\xfe", "t" * 127, "t" * 200]),
        "queue_id": st.sampled_from([0, 1, 7, -1, 2**31 - 1]),
        "queue_offset": st.integers(-(2**63), 2**63 - 1),
        "store_timestamp_ms": st.integers(-(2**63), 2**63 - 1),
        "properties": st.sampled_from(PROPERTIES),
        "sys_flag": st.sampled_from([0, 1, 4, 8, 0xC, 0x80, 0x40]),
        "born_host": st.just(V6),
        "store_host": st.just(V6),
    },
)


def encoded(rows: list[dict[str, Any]], checksum: Checksum = "crc32c-record", **more: Any) -> tuple[bytes, list[int]]:
    """Records side by side, as they lie from `BASE` on, and where each starts."""
    data, starts = bytearray(), []
    for i, row in enumerate(rows):
        fields: dict[str, Any] = {"topic": "orders", "queue_id": 3, "queue_offset": i, "store_timestamp_ms": 1_000 + i}
        fields |= {"born_timestamp_ms": 7, "physical_offset": BASE + len(data), "checksum": checksum}
        starts.append(len(data))
        data += encode_record(**(fields | more | row))
    return bytes(data), starts


def columns_of(headers: Headers) -> dict[str, list[Any]]:
    return {name: getattr(headers, name).tolist() for name in COLUMNS}


def told(rows: Rows) -> dict[str, Any]:
    """All that a `Rows` says; the names of topics in place of their numbers."""
    found = {
        name: getattr(rows, name).tolist()
        for name in (
            *("queue_id", "queue_offset", "physical_offset", "size", "tags_code", "store_timestamp_ms", "has_unit"),
            *("entry_row", "entry_hash"),
        )
    }
    found |= {"records": rows.records, "topics": rows.topics, "topic": rows.topic.tolist()}
    queues = rows.queues()
    found["listed"] = [(*where, slots.tolist(), units.tobytes()) for *where, slots, units in queues.each()]
    found["edges"] = [*queues.edges()]
    output = rows.output()
    found["output"] = [(topic, queue_id, list(offsets), units) for topic, queue_id, offsets, units in output.queues]
    found["last"] = output.last_store_timestamp_ms
    return found


def everything(data: bytes, start: int, stop: int, checksum: Checksum, limit: int, checksums: bool) -> list[Any]:
    """All runs of a log: after each, the next one begins a byte further, so that damage is looked at from all sides."""
    found = []
    at = start
    while at < stop:
        headers, end, _ = read_run(data, at, stop, BASE, checksum, limit, checksums=checksums)
        if len(headers) or at == start:  # of nothing as much is told everywhere, and most bytes begin nothing
            rows = rows_of(data, headers, BASE, DELAYS)
            found.append((at, end, columns_of(headers), told(rows)))
        else:
            found.append((at, end))
        at = end if len(headers) else max(end, at + 1)
    return found


def check_both(data: bytes, start: int, stop: int, checksum: Checksum, limit: int, checksums: bool = True) -> list[Any]:
    found = everything(data, start, stop, checksum, limit, checksums)
    with compiled_parts_left_out():
        assert found == everything(data, start, stop, checksum, limit, checksums)
    return found


@compiled
@pytest.mark.parametrize("checksum", CHECKSUMS)
@given(st.data())
def test_any_log_is_read_alike(checksum: Checksum, data: st.DataObject) -> None:
    rows = data.draw(st.lists(RECORDS, max_size=12))
    log, starts = encoded(rows, checksum)
    log += data.draw(st.sampled_from([b"", bytes(200), encode_blank(100), b"\x01" * 120]))
    limit = data.draw(st.sampled_from([1, 2, 3, 4, 5, 100]))
    stop = data.draw(st.sampled_from([len(log), *starts]))
    check_both(log, 0, stop, checksum, limit, checksums=data.draw(st.booleans()))


@compiled
@pytest.mark.parametrize("checksum", CHECKSUMS)
@given(st.data())
def test_damaged_logs_are_read_alike(checksum: Checksum, data: st.DataObject) -> None:
    rows = data.draw(st.lists(RECORDS, min_size=1, max_size=8))
    log, starts = encoded(rows, checksum)
    damaged = bytearray(log)
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.sampled_from(starts)) + data.draw(st.integers(0, 130))
        kind = data.draw(st.sampled_from(["flip", "zeros", "cut", "size", "offset", "copy", "any"]))
        begin = min(begin, len(damaged) - 1)
        if kind == "flip":
            damaged[begin] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "zeros":
            end = min(len(damaged), begin + data.draw(st.integers(1, 600)))
            damaged[begin:end] = bytes(end - begin)
        elif kind == "cut":
            damaged = damaged[: max(1, begin)]
        elif kind in ("size", "offset"):
            at = data.draw(st.sampled_from(starts))
            if at + 40 <= len(damaged):
                shape, place = (">i", at) if kind == "size" else (">q", at + 28)
                low = -(1 << 8 * struct.calcsize(shape) - 1)
                value = data.draw(st.one_of(st.integers(-2, 3000), st.integers(low, ~low)))
                struct.pack_into(shape, damaged, place, value)
        elif kind == "copy":  # a stale record, whole but for its place
            other = data.draw(st.sampled_from(starts))
            damaged = damaged[:begin] + log[other : other + 400] + damaged[begin:]
        else:
            damaged[begin : begin + 4] = data.draw(st.binary(min_size=4, max_size=4))
    check_both(bytes(damaged), 0, len(damaged), checksum, data.draw(st.sampled_from([1, 3, 50])))


@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_a_run_ends_before_each_flipped_bit(checksum: Checksum) -> None:
    """Of every byte of a record, the first, second and third of those whose checksums are computed side by side."""
    log, starts = encoded([{"body": bytes(20 + i), "properties": b"TAGS\x01a\x02"} for i in range(7)], checksum)
    for which in (2, 3, 4):
        for place in range(starts[which], starts[which + 1]):
            damaged = bytearray(log)
            damaged[place] ^= 1 << place % 8
            headers, end, _ = read_run(bytes(damaged), 0, len(log), BASE, checksum, 100)
            model = check_record(damaged, starts[which], len(log), BASE + starts[which], checksum)
            if checksum == "crc32c-record":
                assert model.status == "bad"
            if model.status == "bad":
                assert (len(headers), end) == (which, starts[which]), place
            else:
                assert len(headers) == 7, place


@pytest.mark.parametrize("sizes", [[5000, 10, 0, 900, 900, 901], [0, 0, 3000, 3000, 0], [767, 768, 769, 1536, 2000, 1]])
def test_long_and_short_records_lie_side_by_side(sizes: list[int]) -> None:
    random = np.random.default_rng(7)
    log, starts = encoded([{"body": random.bytes(size)} for size in sizes])
    headers, end, _ = read_run(log, 0, len(log), BASE, "crc32c-record", 100)
    assert (headers.positions.tolist(), end) == (starts, len(log))
    for place in random.integers(0, len(log), 300).tolist():
        damaged = bytearray(log)
        damaged[place] ^= 0x10
        _, end, _ = read_run(bytes(damaged), 0, len(log), BASE, "crc32c-record", 100)
        assert end == max(start for start in starts if start <= place)


@pytest.mark.parametrize("topics", [1, 2, 40])
@pytest.mark.parametrize("queues", [1, 3, 40])
def test_many_queues_are_separated(topics: int, queues: int) -> None:
    random = np.random.default_rng(topics * 100 + queues)
    rows = []
    for _ in range(300):
        topic, queue = random.integers(topics), random.integers(queues)
        rows.append({"topic": f"topic-{topic}", "queue_id": int(queue), "body": b"", "properties": PROPERTIES[3]})
    log, _ = encoded(rows)
    [(_, _, _, found)] = check_both(log, 0, len(log), "crc32c-record", 1000)
    assert len(found["entry_hash"]) == 3 * 300
    assert len({(topic, queue) for topic, queue, *_ in found["listed"]}) == len(
        {(r["topic"], r["queue_id"]) for r in rows}
    )


def test_the_hash_that_has_no_absolute_value_is_zero() -> None:
    """Math.abs leaves -2 ** 31 as it is, and 0 is put in its place (format#key-hash)."""
    rest = (2**31 - java_hash("orders#" + "<" * 7)) % 2**32
    key = ""
    for _ in range(7):  # "<" is 60, and the digits to base 31 are added to such
        rest, digit = divmod(rest, 31)
        key = chr(60 + digit) + key
    assert java_hash(f"orders#{key}") == -(2**31)
    log, _ = encoded([{"body": b"", "properties": f"KEYS\x01{key} k\x02UNIQ_KEY\x01{key}\x02".encode()}])
    [(_, _, _, found)] = check_both(log, 0, len(log), "crc32c-record", 9)
    assert found["entry_hash"] == [0, 0, index_hash("orders#k")]


@pytest.mark.parametrize("before", [b"", b"a\x01b\x02"])
def test_a_crc_tail_that_does_not_fit_ends_a_run(before: bytes) -> None:
    """Though the checksum over the whole record fits."""
    log, _ = encoded([{"body": b"x", "properties": before + b"__CRC32#\x010000000000\x02"}])
    [(_, end, columns, _), *_] = check_both(log, 0, len(log), "crc32c-record", 9)
    assert (end, columns["positions"]) == (0, [])


@pytest.mark.parametrize("gap", [0, 1, -1, 1 << 62])
def test_consecutive_slots_are_known_for_such(gap: int) -> None:
    log, _ = encoded([{"body": b"", "queue_offset": i + (gap if i > 4 else 0)} for i in range(9)])
    [(_, _, _, found)] = check_both(log, 0, len(log), "crc32c-record", 100)
    [edges] = found["edges"]
    assert edges.straight is (gap == 0)


def test_a_time_that_no_delay_can_be_added_to_is_no_error() -> None:
    """A damaged one, of profile `rocketmq`: numpy warned of what it did to a single number."""
    stamp = 2**63 - 1
    row = {"body": b"", "topic": "SCHEDULE_TOPIC_XXXX", "store_timestamp_ms": stamp, "properties": b"DELAY\x012\x02"}
    log, _ = encoded([row])
    [(_, _, _, found)] = check_both(log, 0, len(log), "crc32c-record", 9)
    assert found["tags_code"] == [stamp + DELAYS[1] - 2**64]


def test_batch_topics_have_no_units() -> None:
    log, _ = encoded([{"body": b"", "topic": name} for name in ("a", "b", "a")])
    headers, _, _ = read_run(log, 0, len(log), BASE, "crc32c-record", 100)
    assert [name for name, _ in rows_of(log, headers, BASE, DELAYS, {"a"}).queues().names] == ["b"]


def test_one_byte_that_is_not_zero_is_found_wherever_it_stands() -> None:
    for size in (1, 127, 128, 300):
        for place in range(size):
            data = bytearray(size)
            data[place] = 1 << place % 8
            found = [content_end(data, start) for start in (0, place, size)]
            assert found == [place + 1, place + 1, size]
            if place + 1 < size:
                assert content_end(data, place + 1) == place + 1
            assert content_end(data, 0, place) == 0
    far = bytearray(5 << 20)
    for place in (0, (1 << 20) - 1, 1 << 20, (4 << 20) + 77, len(far) - 1):
        far[place] = 1
        assert content_end(far) == place + 1


SIZE = 1024
REST = SIZE - 98  # after a record of 98 bytes


@compiled
@pytest.mark.parametrize(
    ("end", "found"),
    [
        (encode_blank(REST).ljust(REST, b"\0"), [0, SIZE]),
        (encoded([{"body": bytes(REST - 97)}], physical_offset=BASE + 98)[0], [0, 98, SIZE]),
        (encoded([{"body": bytes(REST - 97 - 8)}], physical_offset=BASE + 98)[0] + encode_blank(8), [0, 98, SIZE]),
        (encode_blank(REST).ljust(REST - 1, b"\0") + b"x", [0]),
        (encode_blank(REST - 1).ljust(REST, b"\0"), [0]),
        (bytes(REST), [0]),
        (encoded([{"body": bytes(REST - 97 - 7)}], physical_offset=BASE + 98)[0] + bytes(7), [0, 98]),
        (encoded([{"body": bytes(REST)}], physical_offset=BASE + 98)[0], [0]),
    ],
    ids=["blank", "full", "least blank", "byte after blank", "wrong blank", "zeros", "no room for a blank", "crossing"],
)
def test_run_continues_after_the_unused_end_of_a_segment(end: bytes, found: list[int]) -> None:
    first, after = (encoded([{"body": b"x"}], physical_offset=BASE + at)[0] for at in (0, SIZE))
    blank = encode_blank(SIZE).ljust(SIZE, b"\0")
    headers, stop, _ = read_run(
        first + end + after.ljust(SIZE, b"x") + blank, 0, 3 * SIZE, BASE, "crc32c-record", 100, segment_bytes=SIZE
    )
    assert headers.positions.tolist() == found
    assert stop == found[-1] + headers.size.item(-1)
    limited, stop, _ = read_run(first + end + after + blank, 0, SIZE, BASE, "crc32c-record", 100, segment_bytes=SIZE)
    assert limited.positions.tolist() == found[:-1] + found[-1:] * (found[-1] < SIZE)
    assert (stop == SIZE) == (SIZE in found)


@compiled
def test_bad_arguments_are_refused() -> None:
    assert kernel is not None
    log, _ = encoded([{"body": b"x"}] * 3)
    longs, ints = np.zeros((7, 4), np.int64), np.zeros((5, 4), np.int32)
    for start, stop, limit in ((-1, 5, 4), (5, 4, 4), (0, len(log) + 1, 4), (0, len(log), 5), (0, len(log), -1)):
        with pytest.raises(ValueError, match=r"are not within|expected"):
            kernel.sweep(log, start, stop, BASE, limit, True, 0, longs, ints, 0)
    for start, end in ((-1, 5), (5, 4), (0, len(log) + 1)):
        with pytest.raises(ValueError, match="is not within"):
            kernel.meet(log, start, end)
    count, *_ = kernel.sweep(log, 0, len(log), BASE, 4, True, 0, longs, ints, 0)
    assert count == 3
    prefixes, out, units = np.zeros(1, np.int32), np.zeros((10, 4), np.int64), np.zeros(60, np.uint8)
    given = (longs, ints, prefixes, out, np.zeros(3, np.bool_), units)
    assert kernel.list(log, 4, 3, BASE, *given)[:2] == (3, 1)
    for limit, count in ((4, 4), (4, -1), (3, 3), (2, 3)):
        with pytest.raises(ValueError, match=r"records of|expected"):
            kernel.list(log, limit, count, BASE, *given)
    with pytest.raises(ValueError, match="out: expected"):
        kernel.list(log, 4, 3, BASE, *given[:3], out[:, :3].copy(), *given[4:])
    for table, row, value in (
        (longs, 3, len(log)),
        (longs, 3, -1),
        (longs, 4, 1 << 40),
        (longs, 4, -1),
        (ints, 3, 1),
        (ints, 3, -1),
    ):
        before = table[row, 1]
        table[row, 1] = value
        longs[4, 1] = max(int(longs[4, 1]), 1) if table is longs and row == 3 else longs[4, 1]
        assert kernel.list(log, 4, 3, BASE, *given) is None
        table[row, 1] = before
        longs[4, 1] = 0
    assert kernel.list(log, 4, 3, BASE, *given) is not None
