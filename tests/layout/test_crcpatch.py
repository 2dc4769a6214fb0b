"""CRCs told from those of before, held against the package that computes them from the bytes."""

from __future__ import annotations

import numpy as np
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from mqstore.layout.crcpatch import with_bytes


@given(st.data())
def test_the_crc_of_changed_records_is_what_reading_them_again_gives(data: st.DataObject) -> None:
    at, width = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 50))
    tails = data.draw(st.lists(st.binary(max_size=3000), min_size=1, max_size=8))
    heads = [data.draw(st.binary(min_size=at, max_size=at)) for _ in tails]
    middles = [data.draw(st.binary(min_size=width, max_size=width)) for _ in tails]
    before = [head + bytes(width) + tail for head, tail in zip(heads, tails, strict=True)]
    after = [head + middle + tail for head, middle, tail in zip(heads, middles, tails, strict=True)]
    found = with_bytes(
        np.array([crc32c(each) for each in before], np.uint32),
        np.array([len(each) for each in before]),
        at,
        np.frombuffer(b"".join(middles), np.uint8).reshape(len(tails), width),
    )
    assert found.tolist() == [crc32c(each) for each in after]


def test_records_as_large_as_segments_are() -> None:
    before = bytes(64 << 20)
    after = bytes(20) + b"\1\2" + before[22:]
    changed = np.frombuffer(b"\1\2", np.uint8).reshape(1, 2)
    found = with_bytes(np.array([crc32c(before)], np.uint32), np.array([len(before)]), 20, changed)
    assert found.tolist() == [crc32c(after)]


def test_none_is_none() -> None:
    assert not len(with_bytes(np.empty(0, np.uint32), np.empty(0, np.int32), 20, np.empty((0, 16), np.uint8)))
