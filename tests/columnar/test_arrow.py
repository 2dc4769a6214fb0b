"""Cutting values out of a buffer, in whatever order and however they overlap."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.columnar.arrow import cut, spread, text

_RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12)


def edges(ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.array([start for start, _ in ranges], np.int64)
    return starts, starts + np.array([size for _, size in ranges], np.int64)


@given(_RANGES, st.booleans())
def test_cuts_equal_slices(ranges: list[tuple[int, int]], ordered: bool) -> None:
    data = bytes(range(80))
    if ordered:  # side by side, as records are
        at = 0
        for i, (_, size) in enumerate(ranges):
            ranges[i] = (min(at, 80 - size % 6), size % 6)
            at += size % 6 + 1
    found = cut(data, *edges(ranges))
    found.validate(full=True)
    assert found.to_pylist() == [data[start : start + size] for start, size in ranges]


def test_unsorted_values_keep_their_order() -> None:
    data = b"abcdefghij"
    assert cut(data, np.array([6, 0, 3]), np.array([8, 2, 3])).to_pylist() == [b"gh", b"ab", b""]


def test_values_are_spread_over_rows() -> None:
    values = pa.array(["a", "b"])
    assert spread(values, np.array([3, 1]), 5).to_pylist() == [None, "b", None, "a", None]
    assert spread(values, np.array([0, 1]), 2) is values


@pytest.mark.parametrize("good", [True, False])
def test_text_is_utf8_or_has_the_mark_for_what_is_not(good: bool) -> None:
    values = ["grün".encode(), None, b"", b"ok" if good else b"\xff\x00ok\xc3"]
    assert text(pa.array(values, pa.binary())).to_pylist() == ["grün", None, "", "ok" if good else "\ufffd\0ok\ufffd"]
