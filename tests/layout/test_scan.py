"""Scanning many records: against a record-by-record model, on the golden stores, and on damaged bytes."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.layout.arrays import scan
from mqstore.layout.arrays.scan import Headers, check_place, content_end, find_next, topic_is, verify, walk
from mqstore.layout.record import MAGIC_V1, MAGIC_V2, Checksum, check_record, decode_record, encode_blank
from tests.records import encode_record

CHECKSUMS: list[Checksum] = ["crc32c-record", "crc32-body"]
V4, V6 = bytes(8), bytes(range(20))
MAGICS = struct.pack(">iiii", 91, MAGIC_V1, 100, MAGIC_V2)


# --- building logs ---


def record(physical_offset: int, body: bytes = b"", **more: Any) -> bytes:
    """One record with something in every field."""
    fields: dict[str, Any] = {
        "topic": "orders",
        "queue_id": 3,
        "queue_offset": 2**33 + physical_offset,
        "born_timestamp_ms": 1700000000000,
        "store_timestamp_ms": 1700000000123 + physical_offset,
        "checksum": "crc32c-record",
        "properties": b"TAGS\x01a\x02",
        "flag": -7,
        "reconsume_times": 2,
        "prepared_transaction_offset": 77,
    }
    return encode_record(body=body, physical_offset=physical_offset, **(fields | more))


def log(count: int, body_bytes: Callable[[int], int], base: int = 0, **more: Any) -> bytes:
    """`count` records side by side; `body_bytes(i)` is the size of the body of record i."""
    data = bytearray()
    for i in range(count):
        data += record(base + len(data), bytes([i % 251]) * body_bytes(i), **more)
    return bytes(data)


BODIES = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 300).map(bytes),
    st.integers(1, 8).map(lambda times: MAGICS * times),  # looks like the beginnings of records
)
ROWS = st.fixed_dictionaries(
    {"body": BODIES},
    optional={
        "topic": st.sampled_from(["a", "orders", "t" * 127, "t" * 128, "t" * 255]),
        "born_host": st.sampled_from([V4, V6]),
        "store_host": st.sampled_from([V4, V6]),
        "properties": st.sampled_from([b"", b"KEYS\x01k\x02", b"x\x01" + b"y" * 200]),
        "queue_id": st.integers(-(2**31), 2**31 - 1),
        "queue_offset": st.integers(-(2**63), 2**63 - 1),
        "store_timestamp_ms": st.integers(-(2**63), 2**63 - 1),
        "sys_flag": st.sampled_from([0, 1, 8, 0x700]),
    },
)


@st.composite
def logs(draw: st.DrawFn, checksum: Checksum, max_rows: int = 80) -> bytes:
    """Records of few or many sizes side by side, perhaps damaged, with a BLANK, zeros or garbage behind."""
    kinds = draw(st.lists(ROWS, min_size=1, max_size=6))
    data = bytearray()
    for _ in range(draw(st.integers(0, 4))):
        for kind in draw(st.lists(st.sampled_from(kinds), max_size=max_rows // 4)):
            body = kind["body"]
            more = {name: value for name, value in kind.items() if name != "body"}
            if checksum == "crc32-body":
                more["crc_tail"] = len(body) % 3 == 0
            data += record(len(data), body, checksum=checksum, **more)
    data += draw(st.sampled_from([b"", encode_blank(50) + bytes(42), bytes(200), MAGICS, b"\xff" * 100]))
    if data:
        damage = st.tuples(
            st.integers(0, len(data) - 1), st.one_of(st.integers(0, 255), st.sampled_from([0, 127, 255]))
        )
        for position, value in draw(st.lists(damage, max_size=4)):
            data[position] = value
    return bytes(data)


# --- models ---


def naive_walk(data: bytes, start: int, end: int, max_records: int | None = None) -> tuple[list[int], int]:
    positions: list[int] = []
    position = start
    while end - position >= 91 and (max_records is None or len(positions) < max_records):
        size, magic = struct.unpack_from(">ii", data, position)
        if magic not in (MAGIC_V1, MAGIC_V2) or not 91 <= size <= end - position:
            break
        positions.append(position)
        position += size
    return positions, position


def naive_holds(data: bytes, position: int, checksum: Checksum) -> bool:
    """Both checksums of the record at `position`, whose lengths add up."""
    row = decode_record(data, position)
    whole = data[position : position + row.total_size]
    if checksum == "crc32c-record":
        holds = crc32c.crc32c(whole[:8] + bytes(4) + whole[12:]) == row.checksum & 0xFFFFFFFF
    else:
        holds = not row.body or zlib.crc32(row.body) & 0x7FFFFFFF == row.checksum
    tail = row.properties_bytes[-20:]
    is_tail = tail.startswith(b"__CRC32#\x01") and row.properties_bytes[-21:-20] in (b"", b"\x02")
    if is_tail:
        digits = f"{zlib.crc32(whole[:-20]) & 0x7FFFFFFF:010d}".encode()[::-1]
        holds = holds and tail == b"__CRC32#\x01" + digits + b"\x02"
    return holds


def naive_ok(data: bytes, position: int) -> bool:
    try:
        return len(decode_record(data, position).topic_bytes) > 0
    except ValueError:
        return False


# --- walk ---


@given(data=logs("crc32c-record"), numbers=st.data(), max_records=st.one_of(st.none(), st.integers(0, 30)))
def test_walk_goes_where_the_lengths_lead(data: bytes, numbers: st.DataObject, max_records: int | None) -> None:
    start = numbers.draw(st.one_of(st.sampled_from([*naive_walk(data, 0, len(data))[0], 0]), st.integers(0, len(data))))
    end = numbers.draw(st.one_of(st.just(len(data)), st.integers(start, len(data))))
    shift = numbers.draw(st.integers(0, 7))  # the buffer need not be aligned
    view = memoryview(bytes(shift) + data)[shift:]

    positions, stop = walk(view, start, end, max_records)

    assert positions.dtype == np.int64
    assert (positions.tolist(), stop) == naive_walk(data, start, end, max_records)


@pytest.mark.parametrize(
    "behind",
    [
        b"",
        bytes(500),
        encode_blank(300) + bytes(292),
        struct.pack(">ii", 90, MAGIC_V1) + bytes(500),
        struct.pack(">ii", -1, MAGIC_V1) + bytes(500),
        struct.pack(">ii", 2**31 - 1, MAGIC_V1) + bytes(500),
        struct.pack(">ii", 91, MAGIC_V1) + bytes(82),  # one byte short
        struct.pack(">ii", 91, MAGIC_V1 + 1) + bytes(100),
    ],
)
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("body_bytes", [lambda i: 20, lambda i: i * 7 % 60], ids=["uniform", "mixed"])
def test_walk_stops_before_what_is_no_record(behind: bytes, count: int, body_bytes: Callable[[int], int]) -> None:
    data = log(count, body_bytes)

    positions, stop = walk(data + behind, 0, len(data) + len(behind))

    assert len(positions) == count
    assert stop == len(data)


@pytest.mark.parametrize(("start", "end"), [(-1, 10), (0, 101), (101, 101), (60, 50)])
def test_a_range_outside_the_buffer_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="is not within a buffer of 100 bytes"):
        walk(bytes(100), start, end)
    with pytest.raises(ValueError, match="is not within a buffer of 100 bytes"):
        find_next(bytes(100), start, end, 0, "crc32-body")


def test_columns_do_not_keep_a_mapping_open() -> None:
    data = log(30, lambda i: i)
    mapping = mmap.mmap(-1, len(data))
    mapping[:] = data

    positions, _ = walk(mapping, 0, len(data))
    headers = Headers(mapping, positions)
    verified, sizes = verify(mapping, headers, "crc32c-record"), headers.size
    del headers
    mapping.close()  # BufferError if an array still lay over it

    assert verified.all()
    assert int(sizes.sum()) == len(data)


# --- Headers ---


@given(data=logs("crc32c-record"))
def test_columns_hold_what_struct_reads(data: bytes) -> None:
    positions, _ = walk(data, 0, len(data))
    headers = Headers(data, positions)

    assert headers.ok.tolist() == [naive_ok(data, position) for position in positions.tolist()]
    for topic in (b"a", b"orders", b"t" * 128):
        rows = zip(headers.ok.tolist(), positions.tolist(), strict=True)
        bears = [ok and decode_record(data, position).topic_bytes == topic for ok, position in rows]
        assert topic_is(data, headers, topic).tolist() == bears
    for i in np.flatnonzero(headers.ok).tolist():
        row = decode_record(data, int(positions[i]))
        assert (
            headers.size[i], headers.magic[i], headers.checksum[i], headers.queue_id[i], headers.flag[i],
            headers.queue_offset[i], headers.physical_offset[i], headers.sys_flag[i], headers.born_timestamp_ms[i],
            headers.store_timestamp_ms[i], headers.reconsume_times[i], headers.prepared_transaction_offset[i],
            headers.born_host_size[i], headers.store_host_size[i],
        ) == (
            row.total_size, row.magic, row.checksum, row.queue_id, row.flag,
            row.queue_offset, row.physical_offset, row.sys_flag, row.born_timestamp_ms,
            row.store_timestamp_ms, row.reconsume_times, row.prepared_transaction_offset,
            len(row.born_host), len(row.store_host),
        )  # fmt: skip
        for at, size, expected in (
            (headers.body_position, headers.body_size, row.body),
            (headers.topic_position, headers.topic_size, row.topic_bytes),
            (headers.properties_position, headers.properties_size, row.properties_bytes),
        ):
            assert data[at[i] : at[i] + size[i]] == expected


def test_positions_where_no_record_fits_are_refused() -> None:
    data = log(2, lambda i: i)

    with pytest.raises(ValueError, match="no record can start at -1"):
        Headers(data, [0, -1])
    with pytest.raises(ValueError, match="no record can start at"):
        Headers(data, [0, len(data) - 90])


@given(data=st.binary(min_size=91, max_size=300), numbers=st.data())
def test_garbage_is_never_ok_nor_read_beyond_its_end(data: bytes, numbers: st.DataObject) -> None:
    buf = bytearray(data)
    size = numbers.draw(st.integers(-5, len(buf) + 5))
    struct.pack_into(">ii", buf, 0, size, numbers.draw(st.sampled_from([MAGIC_V1, MAGIC_V2, 0])))
    buf[36:40] = numbers.draw(st.sampled_from([b"\0\0\0\0", b"\0\0\0\x10", b"\0\0\0\x20", b"\0\0\0\x30"]))

    headers = Headers(buf, [0])

    assert headers.ok.tolist() == [naive_ok(bytes(buf), 0)]
    for column in (headers.store_timestamp_ms, headers.reconsume_times, headers.prepared_transaction_offset):
        assert len(column) == 1
    if not headers.ok[0]:
        assert headers.body_size[0] == headers.topic_size[0] == headers.properties_size[0] == 0
        assert not verify(buf, headers, "crc32c-record")[0]
        assert not verify(buf, headers, "crc32-body")[0]


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (84, ">i", -1),  # bodyLength
        (84, ">i", 11),
        (84, ">i", 2**31 - 1),
        (98, ">b", -1),  # topicLength
        (98, ">b", 0),
        (98, ">b", 5),
        (98, ">b", 127),
        (105, ">h", -1),  # propertiesLength
        (105, ">h", 6),
        (105, ">h", 8),
        (36, ">i", 0x10),  # a host that is longer than the record says elsewhere
        (4, ">i", MAGIC_V2),
        (4, ">i", 0),
        (0, ">i", 200),
    ],
)
def test_lengths_that_do_not_add_up_are_not_ok(at: int, form: str, value: int) -> None:
    data = bytearray(record(0, bytes(10)))
    assert Headers(data, [0]).ok.all()

    struct.pack_into(form, data, at, value)

    assert not Headers(data, [0]).ok.any()


# --- verify ---


@pytest.mark.parametrize("checksum", CHECKSUMS)
@given(data=st.data())
def test_checksums_are_those_of_single_records(checksum: Checksum, data: st.DataObject) -> None:
    buf = data.draw(logs(checksum))
    positions, _ = walk(buf, 0, len(buf))
    if data.draw(st.booleans()):  # any rows in any order, not only runs
        positions = np.array(data.draw(st.lists(st.sampled_from(positions.tolist() or [0]))), np.int64)
        positions = positions[: 0 if len(buf) < 91 else None]
    headers = Headers(buf, positions)

    verified = verify(buf, headers, checksum)

    assert verified.tolist() == [
        ok and naive_holds(buf, position, checksum)
        for ok, position in zip(headers.ok.tolist(), positions.tolist(), strict=True)
    ]


@pytest.mark.parametrize("body_bytes", [lambda i: 128, lambda i: i * 37 % 200], ids=["uniform", "mixed"])
def test_changed_bit_of_a_long_run_is_located(body_bytes: Callable[[int], int]) -> None:
    data = bytearray(log(500, body_bytes))
    positions, _ = walk(data, 0, len(data))
    assert verify(data, Headers(data, positions), "crc32c-record").all()

    for row, offset in [(0, 8), (0, 11), (0, 40), (1, 9), (250, 8), (250, 30), (498, 60), (499, 8), (499, 90)]:
        data[positions[row] + offset] ^= 1 << row % 8
        verified = verify(data, Headers(data, positions), "crc32c-record")
        assert np.flatnonzero(~verified).tolist() == [row]
        data[positions[row] + offset] ^= 1 << row % 8


def test_a_checksum_copied_from_a_neighbour_does_not_pass() -> None:
    data = bytearray(log(30, lambda i: i))
    positions = walk(data, 0, len(data))[0].tolist()
    fields = [bytes(data[position + 8 : position + 12]) for position in positions]
    for position, field in zip(positions, fields[1:] + fields[:1], strict=True):
        data[position + 8 : position + 12] = field

    assert not verify(data, Headers(data, positions), "crc32c-record").any()


def test_an_empty_body_is_covered_by_the_record_checksum_alone() -> None:
    """9.2 row 6: RocketMQ compares no checksum of an empty body, whatever the field says."""
    data = bytearray(record(0, b"", checksum="crc32-body") + record(0, b"", checksum="crc32c-record"))
    positions = walk(data, 0, len(data))[0]
    data[8] ^= 1
    data[positions[1] + 20] ^= 1

    assert verify(data, Headers(data, positions), "crc32-body").tolist() == [True, True]
    assert verify(data, Headers(data, positions), "crc32c-record").tolist() == [False, False]


def test_a_crc_tail_covers_the_header_too() -> None:
    data = bytearray(log(10, lambda i: 20, checksum="crc32-body", crc_tail=True))
    positions = walk(data, 0, len(data))[0]
    assert verify(data, Headers(data, positions), "crc32-body").all()

    data[positions[3] + 16] ^= 1  # flag, which the body's checksum does not cover
    data[positions[5] + 108 + 27] = ord("x")  # a digit

    assert np.flatnonzero(~verify(data, Headers(data, positions), "crc32-body")).tolist() == [3, 5]


def test_a_value_that_ends_like_a_crc_tail_is_none() -> None:
    lookalike = b"k\x01v__CRC32#\x011150232550\x02"
    data = log(10, lambda i: 20, properties=lookalike)

    assert verify(data, Headers(data, walk(data, 0, len(data))[0]), "crc32c-record").all()


# --- find_next ---


@pytest.mark.parametrize("checksum", CHECKSUMS)
@given(data=st.data())
def test_find_next_finds_the_first_position_that_verifies(checksum: Checksum, data: st.DataObject) -> None:
    buf = data.draw(logs(checksum, max_rows=16))
    start = data.draw(st.integers(0, len(buf)))
    end = data.draw(st.integers(start, len(buf)))

    expected = next(
        (p for p in range(start, max(start, end - 90)) if check_record(buf, p, end, p, checksum).status == "ok"), None
    )
    with mock.patch.object(scan, "_BLOCK_BYTES", 1024):  # so small that few records already cross its borders
        assert find_next(buf, start, end, 0, checksum) == expected


def test_find_next_looks_past_damage_of_any_length() -> None:
    data = bytearray(log(3000, lambda i: i % 300, base=10**12))
    positions = walk(data, 0, len(data))[0]
    data[positions[5] : positions[2500] + 30] = bytes(positions[2500] + 30 - positions[5])

    assert find_next(data, int(positions[5]), len(data), 10**12, "crc32c-record") == positions[2501]
    assert find_next(data, int(positions[5]), int(positions[2501]) + 91, 10**12, "crc32c-record") is None
    assert find_next(data, 0, len(data), 10**12 + 1, "crc32c-record") is None


def test_find_next_finds_records_that_begin_before() -> None:
    data = log(10, lambda i: 300)
    positions, _ = walk(data, 0, len(data))
    third, fourth = (int(at) for at in positions[2:4])

    assert find_next(data, third - 5, len(data), 0, "crc32c-record", third) is None
    assert find_next(data, third - 5, len(data), 0, "crc32c-record", third + 1) == third
    assert find_next(data, third + 1, len(data), 0, "crc32c-record", fourth + 1) == fourth
    assert find_next(data, third + 1, fourth + 50, 0, "crc32c-record", fourth + 1) is None


def test_find_next_finds_a_record_behind_zeros() -> None:
    """The first bytes of its size: behind them the range seems to end in zeros."""
    for zeros in range(5):
        found = record(zeros)
        assert found[:3] == bytes(3)
        data = bytes(zeros) + found + bytes(40)
        for before in range(1, 9):
            assert find_next(data, 0, len(data), 0, "crc32c-record", zeros + before) == zeros


@given(st.binary(max_size=30), st.integers(0, 40), st.data())
def test_content_ends_behind_the_last_byte_that_is_not_zero(content: bytes, zeros: int, data: st.DataObject) -> None:
    buf = content + bytes(zeros)
    start = data.draw(st.integers(0, len(buf)))
    end = data.draw(st.integers(start, len(buf)))
    assert content_end(buf, start, end) == start + len(buf[start:end].rstrip(b"\0"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_ZEROS", bytes(7))
        assert content_end(memoryview(buf), start, end) == start + len(buf[start:end].rstrip(b"\0"))


def test_find_next_passes_over_records_inside_a_body_and_stale_ones() -> None:
    """A message may carry a piece of a log; a recycled file may hold records of its former life."""
    inner = log(3, lambda i: 10)
    outer = record(0, inner)
    stale = record(99, b"stale")
    data = bytearray(outer + stale + record(len(outer) + len(stale), b"live"))
    data[4] ^= 1

    assert find_next(data, 0, len(data), 0, "crc32c-record") == len(outer) + len(stale)


def test_find_next_reads_a_hostile_file_a_bounded_number_of_times() -> None:
    """Nested fakes, each with its own physical offset and lengths that reach the end, once made this quadratic."""
    size = 1 << 17
    step = 128
    data = bytearray(size)
    overhead = len(record(0))
    for at in range(0, size - 256, step):
        fake = record(at, bytes(size - at - overhead))
        assert len(fake) == size - at
        data[at : at + 88] = fake[:8] + bytes(4) + fake[12:88]
    data[-(overhead - 88) :] = fake[-(overhead - 88) :]
    assert Headers(bytes(data), list(range(0, size - 256, step))).ok.all()
    read_bytes = 0

    def counting(view: Any, position: int, *rest: Any) -> Any:
        nonlocal read_bytes
        read_bytes += struct.unpack_from(">i", view, position)[0]
        return check_record(view, position, *rest)

    with mock.patch.object(scan, "check_record", counting):
        assert find_next(data, 0, size, 0, "crc32c-record") is None

    assert read_bytes < 20 * size + (1 << 20)
    # And a real record behind all that is still found.
    tail = record(size, b"real")
    assert find_next(bytes(data) + tail, 0, size + len(tail), 0, "crc32c-record") == size


# --- check_place ---


def _behind(position: int) -> dict[str, tuple[bytes, bool]]:
    """What may lie behind a BLANK, and whether it shows that the BLANK is damage, by what it is."""
    return {
        "nothing": (b"", False),
        "zeros": (bytes(300), False),
        "any bytes": (b"\xda\xa3\x20\xa7" * 60, False),
        "the rest of the record that was there": (record(position, b"lost")[8:] + bytes(20), False),
        "a stale record": (bytes(10) + record(position + 8 + 10, b"stale", store_timestamp_ms=1), False),
        "the rest of the record that was there, and an older one": (
            (lost := record(position, b"lost"))[8:]
            + record(position + len(lost), b"of a clock that was set back", store_timestamp_ms=1),
            True,
        ),
        "a record of another place": (bytes(10) + record(position, b"stale"), False),
        "a whole record": (bytes(30) + record(position + 8 + 30, b"whole"), True),
        "a whole record at its end": (bytes(300) + record(position + 8 + 300, b"whole"), True),
    }


@pytest.mark.parametrize("what", _behind(0))
@pytest.mark.parametrize("base", [0, 1 << 40])
def test_a_blank_in_front_of_a_whole_record_is_damage(what: str, base: int) -> None:
    front = record(base, b"front")
    filler, is_damage = _behind(base + len(front))[what]
    data = front + encode_blank(8 + len(filler)) + filler

    check = check_place(data, len(front), len(data), base + len(front), "crc32c-record")

    assert check.status == ("bad" if is_damage else "blank")
    assert ("a whole record at" in check.detail) == is_damage
