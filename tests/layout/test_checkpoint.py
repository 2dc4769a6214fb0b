"""The checkpoint page: the vector of format#vectors, pages of the Java engine, and when the extension counts."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.layout.checkpoint import ENCODED_BYTES, FILE_BYTES, Checkpoint, decode, encode, min_timestamp
from tests.conftest import GoldenStore

WORKED = Checkpoint(1700000000123, 1700000000123, 0, 0, 1024, 1200, 1200, -1)
WORKED_EXTENSION = bytes.fromhex(
    "4d 51 53 31 00 00 00 01 00 00 00 00 00 00 04 b0 00 00 00 00 00 00 04 b0 ff ff ff ff ff ff ff ff 9b 07 62 5d"
)
I64 = st.integers(-(2**63), 2**63 - 1)
checkpoints = st.builds(Checkpoint, I64, I64, I64, I64, I64) | st.builds(
    Checkpoint, I64, I64, I64, I64, I64, I64, I64, I64, st.none() | st.integers(0, 2**64 - 1), st.none() | I64
)


def test_the_page_equals_the_worked_vector() -> None:
    page = encode(WORKED)
    assert len(page) == ENCODED_BYTES == 128
    assert page[:40] == struct.pack(">5q", 1700000000123, 1700000000123, 0, 0, 1024)
    assert page[40:64] == bytes(24)
    assert page[64:100] == WORKED_EXTENSION
    assert page[100:] == bytes(28)
    assert decode(page) == WORKED


@pytest.mark.parametrize(
    ("field", "at", "covered"),
    [("queues", 100, [*range(64, 108)]), ("log_start", 112, [*range(64, 100), *range(112, 120)])],
)
def test_later_field_needs_its_checksum(field: str, at: int, covered: list[int]) -> None:
    page = encode(replace(WORKED, **{field: 0x0102_0304_0506_0708}))
    assert page[at : at + 8] == bytes(range(1, 9))
    assert page[at + 8 : at + 12] == crc32c.crc32c(bytes(page[i] for i in covered)).to_bytes(4, "big")
    for i in (*covered, *range(at + 8, at + 12)):
        changed = decode(page[:i] + bytes([page[i] ^ 0x10]) + page[i + 1 :])
        assert getattr(changed, field) is None
        assert (changed.flushed is None) == (i < 100)
    assert getattr(decode(page[:at]), field) is None  # as a former version wrote it


@pytest.mark.parametrize("name", ["clean", "crashed", "propcrc", "rolled", "trimmed"])
def test_a_page_of_the_java_engine_has_no_extension(golden: Callable[[str], GoldenStore], name: str) -> None:
    store = golden(name)
    page = (store.path / "checkpoint").read_bytes()
    fields = struct.unpack(">5q", page[:40])
    checkpoint = decode(page)
    assert len(page) == FILE_BYTES
    assert checkpoint == Checkpoint(*fields)
    assert checkpoint.flushed is None
    assert encode(checkpoint) == page[:128]
    newest = max(message["store_timestamp_ms"] for message in store.of("message"))
    assert 0 <= checkpoint.physic_msg_timestamp_ms <= newest
    assert (checkpoint.physic_msg_timestamp_ms == 0) == (name == "crashed")


@pytest.mark.parametrize("position", [*range(0, 40, 4), *range(64, 100)])
def test_the_extension_stops_counting_when_any_covered_byte_changed(position: int) -> None:
    page = bytearray(encode(WORKED))
    page[position] ^= 0x10
    changed = decode(bytes(page))
    assert (changed.flushed, changed.dispatched, changed.clean_end) == (None, None, None)
    assert changed == Checkpoint(*struct.unpack(">5q", page[:40]))


@pytest.mark.parametrize(("position", "value"), [(64, 0x4D515332), (68, 2), (68, 0)])
def test_another_magic_or_version_does_not_count_even_with_its_crc(position: int, value: int) -> None:
    page = bytearray(encode(WORKED))
    page[position : position + 4] = value.to_bytes(4, "big")
    page[96:100] = crc32c.crc32c(bytes(page[:40] + page[64:96])).to_bytes(4, "big")
    assert decode(bytes(page)) == Checkpoint(*struct.unpack(">5q", page[:40]))


@pytest.mark.parametrize("kept", [0, 1, 8, 24, 39, 40, 64, 96, 99])
def test_short_file_counts_as_zeros(kept: int) -> None:
    short = decode(encode(WORKED)[:kept])
    assert short == Checkpoint(*struct.unpack(">5q", encode(WORKED)[:40][:kept].ljust(40, b"\0")))


@pytest.mark.parametrize("some", [{"flushed": 1}, {"clean_end": -1}, {"flushed": 1, "dispatched": 1}])
def test_half_an_extension_is_refused(some: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="together"):
        Checkpoint(**some)


@pytest.mark.parametrize(
    ("physic", "logics", "expected"), [(10_000, 9_000, 6_000), (9_000, 10_000, 6_000), (2_999, 10_000, 0), (0, 0, 0)]
)
def test_min_timestamp_is_three_seconds_before_the_older_mark(physic: int, logics: int, expected: int) -> None:
    assert min_timestamp(Checkpoint(physic, logics)) == expected


@given(checkpoints)
def test_checkpoints_survive_a_round_trip(checkpoint: Checkpoint) -> None:
    assert decode(encode(checkpoint)) == checkpoint
    assert decode(encode(checkpoint).ljust(FILE_BYTES, b"\0")) == checkpoint


@given(st.binary(max_size=160))
def test_any_bytes_decode_to_something(data: bytes) -> None:
    assert decode(data).physic_msg_timestamp_ms == int.from_bytes(data[:8].ljust(8, b"\0"), "big", signed=True)
