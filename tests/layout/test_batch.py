"""The wire form of a batch: the vector of format#vectors, damage, round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.errors import FormatError, InvalidMessageError
from mqstore.layout.batch import BatchElement, decode_batch, encode_batch

WORKED = bytes.fromhex("00 00 00 1f 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 02 6d 31 00 07 54 41 47 53 01 61 02")
elements = st.tuples(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=50), st.binary(max_size=50))


def test_an_element_equals_the_worked_vector() -> None:
    assert encode_batch([(0, b"m1", b"TAGS\x01a\x02")]) == WORKED
    assert decode_batch(WORKED) == [BatchElement(0, b"m1", b"TAGS\x01a\x02")]


def test_elements_stand_one_behind_the_other() -> None:
    assert decode_batch(WORKED + WORKED) == decode_batch(WORKED) * 2
    assert decode_batch(b"") == []


def test_magic_and_checksum_on_the_wire_are_not_looked_at() -> None:
    other = WORKED[:4] + b"\xda\xa3\x20\xa7\x01\x02\x03\x04" + WORKED[12:]
    assert decode_batch(other) == decode_batch(WORKED)


@pytest.mark.parametrize(
    ("position", "data", "field", "at"),
    [
        (0, "00000015", "total_size", 31),  # shorter than an element can be
        (0, "ffffffe1", "total_size", 31),
        (0, "00000020", "total_size", 31),  # reaches past the end
        (0, "0000001e", "properties", 53),
        (16, "ffffffff", "body", 47),
        (16, "0000000a", "body", 47),
        (16, "00000009", "properties", 60),
        (22, "0006", "properties", 53),
        (22, "ffff", "properties", 53),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(position: int, data: str, field: str, at: int) -> None:
    second = bytearray(WORKED)
    second[position : position + len(data) // 2] = bytes.fromhex(data)
    with pytest.raises(FormatError) as caught:
        decode_batch(WORKED + second)
    assert (caught.value.field, caught.value.position) == (field, at)


@pytest.mark.parametrize("cut", range(1, 31))
def test_a_batch_that_is_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(FormatError):
        decode_batch(WORKED + WORKED[:cut])


@pytest.mark.parametrize(("element", "field"), [((2**31, b"", b""), "flag"), ((0, b"", bytes(32768)), "properties")])
def test_what_an_element_cannot_hold_is_refused(element: tuple[int, bytes, bytes], field: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        encode_batch([element])
    assert caught.value.field == field


@given(st.lists(elements, max_size=10))
def test_batches_survive_a_round_trip(batch: list[tuple[int, bytes, bytes]]) -> None:
    data = encode_batch(batch)
    assert decode_batch(data) == batch
    assert decode_batch(memoryview(data)) == batch
    assert len(data) == sum(22 + len(body) + len(properties) for _, body, properties in batch)


@given(st.binary(max_size=120))
def test_any_bytes_are_a_batch_or_a_format_error(data: bytes) -> None:
    position = None
    try:
        batch = decode_batch(data)
    except FormatError as error:
        position = error.position
    if position is None:
        assert sum(22 + len(body) + len(properties) for _, body, properties in batch) == len(data)
    else:
        assert 0 <= position < len(data)
