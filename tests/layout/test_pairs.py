"""Pairs of many blobs are what `decode_properties` finds in each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mqstore.layout.arrays.pairs import Pairs
from mqstore.layout.properties import decode_properties
from mqstore.native import kernel

_BYTES = st.one_of(
    st.binary(max_size=12),
    st.lists(st.sampled_from([b"\x01", b"\x02", b"TAGS", b"KEYS", b"UNIQ_KEY", b"a", b"\xff"]), max_size=9).map(
        b"".join
    ),
)


def found(pairs: Pairs, count: int) -> list[dict[str, str]]:
    """The pairs by blob, with the last of equal names."""
    data = pairs.data.tobytes()
    decoded: list[dict[str, str]] = [{} for _ in range(count)]
    rows = zip(pairs.blob, pairs.start, pairs.name_size, pairs.value, pairs.value_size, strict=True)
    for blob, start, name_size, value, value_size in rows:
        name = data[start : start + name_size].decode("utf-8", "replace")
        decoded[blob][name] = data[value : value + value_size].decode("utf-8", "replace")
    return decoded


@given(st.lists(_BYTES, max_size=8))
def test_the_pairs_of_blobs_are_their_properties(blobs: list[bytes]) -> None:
    pairs = Pairs.of(blobs)
    expected = [decode_properties(blob) for blob in blobs]
    assert found(pairs, len(blobs)) == expected
    for name in ("TAGS", "KEYS", "UNIQ_KEY"):
        chosen = pairs.named(name.encode())
        values = {
            int(pairs.blob[i]): pairs.data[pairs.value[i] : pairs.value[i] + pairs.value_size[i]].tobytes()
            for i in chosen
        }
        assert len(values) == len(chosen)
        assert {row: value.decode("utf-8", "replace") for row, value in values.items()} == {
            row: properties[name] for row, properties in enumerate(expected) if name in properties
        }


@given(st.lists(_BYTES, max_size=8))
def test_distinct_is_never_said_of_a_name_that_comes_twice(blobs: list[bytes]) -> None:
    pairs = Pairs.of(blobs)
    names = [
        (blob, pairs.data[start : start + size].tobytes())
        for blob, start, size in zip(pairs.blob.tolist(), pairs.start, pairs.name_size, strict=True)
    ]
    ascii_names = all(name.isascii() for _, name in names)
    assert pairs.distinct == (kernel is not None and ascii_names and len(set(names)) == len(names))


def test_distinct_is_not_found_out_of_very_many() -> None:
    """Comparing all with all would take hostile properties minutes."""
    few, many = (b"".join(b"n%d\x01v\x02" % i for i in range(count)) for count in (64, 65))
    assert Pairs.of([few, few]).distinct == (kernel is not None)
    assert not Pairs.of([few, many]).distinct


@given(st.lists(_BYTES, min_size=1, max_size=8))
def test_blobs_laid_out_by_the_caller_are_the_same(blobs: list[bytes]) -> None:
    data = b"".join(blob + b"\x02" for blob in blobs)
    ends = np.cumsum([len(blob) + 1 for blob in blobs]) - 1
    assert found(Pairs(np.frombuffer(data, np.uint8), ends), len(blobs)) == [decode_properties(blob) for blob in blobs]
