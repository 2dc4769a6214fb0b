"""Consume-queue units: the vectors of format#vectors, and every unit of the golden stores against its listing."""

from __future__ import annotations

import numpy as np
import pytest

from mqstore.layout.consumequeue import UNIT, VOID_UNIT, count_messages, is_message, is_void, unit_dtype, used_units
from mqstore.layout.javahash import tag_hash


@pytest.mark.parametrize(
    ("unit", "data"),
    [
        ((1024, 176, tag_hash("TagA")), "00 00 00 00 00 00 04 00 00 00 00 b0 00 00 00 00 00 27 a8 07"),
        ((1200, 200, 1700000000123 + 10_000), "00 00 00 00 00 00 04 b0 00 00 00 c8 00 00 01 8b cf e5 8f 8b"),
        ((4096, 180, tag_hash("pay-ok")), "00 00 00 00 00 00 10 00 00 00 00 b4 ff ff ff ff c4 ad 65 21"),
        ((0, 2147483647, 0), "00 00 00 00 00 00 00 00 7f ff ff ff 00 00 00 00 00 00 00 00"),
    ],
)
def test_units_equal_the_worked_vectors(unit: tuple[int, int, int], data: str) -> None:
    assert UNIT.pack(*unit) == bytes.fromhex(data)
    assert np.frombuffer(bytes.fromhex(data), unit_dtype()).tolist() == [unit]


def test_void_is_exactly_one_pattern() -> None:
    units = [(0, 0x7FFFFFFF, 0), (1, 0x7FFFFFFF, 0), (0, 0x7FFFFFFF, 1), (0, 0x7FFFFFFE, 0), (0, 0, 0)]
    array = np.array(units, dtype=unit_dtype())
    assert is_void(array).tolist() == [True, False, False, False, False]
    assert np.frombuffer(VOID_UNIT, unit_dtype()).tolist() == [units[0]]


def test_only_a_unit_that_points_at_a_record_is_a_message() -> None:
    units = [(0, 91, 0), (0, 0x7FFFFFFF, 0), (0, 0, 0), (-1, 91, 0), (5, -91, 0), (0, 1, -1)]
    assert is_message(np.array(units, dtype=unit_dtype())).tolist() == [True, False, False, False, False, True]


@pytest.mark.parametrize(
    ("units", "count"),
    [
        ([], 0),
        ([(0, 0, 0)] * 3, 0),
        ([(0, 91, 0), (0, 0, 0)], 1),
        ([(0, 0, 0), (91, 1 << 24, 0), (0, 0, 0)], 2),
        ([(0, 0x7FFFFFFF, 0)], 1),
        ([(0, 91, 0), (91, -5, 7), (5, 0, 0), (0, 0, 0)], 1),
    ],
)
def test_used_units_end_with_the_last_positive_size(units: list[tuple[int, int, int]], count: int) -> None:
    assert used_units(b"".join(UNIT.pack(*unit) for unit in units)) == count


@pytest.mark.parametrize("times", [1, 600])
def test_few_and_many_units_are_counted_alike(times: int) -> None:
    units = [(0, 91, 0), (0, 0x7FFFFFFF, 0), (0, 0, 0), (-1, 91, 0), (5, -91, 0), (7, 0x7FFFFFFF, 0)]
    assert count_messages(b"".join(UNIT.pack(*unit) for unit in units) * times) == (
        2 * times,
        (91 + 0x7FFFFFFF) * times,
    )
