"""Java's string hash: the values of format#vectors that a JVM confirmed, and a slow model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.layout.javahash import index_hash, java_hash, java_hash_many, tag_hash

CONFIRMED_WITH_A_JVM = [
    ("TagA", 2598919),
    ("TagB", 2598920),
    ("TagC", 2598921),
    ("订单", 1129459),
    ("😀", 1772899),  # two surrogates
    ("Aa", 2112),
    ("BB", 2112),
    ("pay-ok", -995269343),
    ("polygenelubricants", -2147483648),
    ("撤单", 820017),
    ("", 0),
]

any_text = st.text(st.characters(exclude_categories=()), max_size=60)  # surrogates included
utf8_text = st.text(max_size=80)


def many(rows: list[bytes]) -> npt.NDArray[np.int32]:
    """The hashes of rows that lie side by side in one array."""
    edges = np.cumsum([0, *map(len, rows)])
    return java_hash_many(np.frombuffer(b"".join(rows), np.uint8), edges)


def model(text: str) -> int:
    """4.2 word for word, over UTF-16 units and unbounded integers, the wrap-around left to the end."""
    data = text.encode("utf-16-le", "surrogatepass")
    units = [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)]
    value: int = sum(unit * 31 ** (len(units) - 1 - i) for i, unit in enumerate(units)) % 2**32
    return value - 2**32 if value >= 2**31 else value


@pytest.mark.parametrize(("text", "value"), CONFIRMED_WITH_A_JVM)
def test_java_hash_equals_what_a_jvm_computes(text: str, value: int) -> None:
    assert java_hash(text) == value
    assert tag_hash(text) == value
    assert many([text.encode()]).tolist() == [value]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("OrderTopic#7F00000104D218B4AAC208A2B1C00000", 1542078943),
        ("OrderTopic#ORD-1", 1452900291),
        ("polygenelubricants", 0),  # abs(-2147483648) overflows in Java
        ("pay-ok", 995269343),
    ],
)
def test_index_hash_equals_the_worked_index_file(key: str, value: int) -> None:
    assert index_hash(key) == value


@given(any_text)
def test_java_hash_equals_the_model(text: str) -> None:
    assert java_hash(text) == model(text)


@given(st.lists(utf8_text.map(str.encode) | st.binary(max_size=80), max_size=30))
def test_many_hashes_equal_single_ones(rows: list[bytes]) -> None:
    result = many(rows)
    assert result.dtype == np.int32
    assert result.tolist() == [model(row.decode("utf-8", "replace")) for row in rows]


@pytest.mark.parametrize("row", [b"\x80", b"\0\x80", b"\x80" * 300, b"\xff", b"\xed\xa0\x80"])
def test_the_smallest_byte_that_is_not_ascii_is_seen(row: bytes) -> None:
    assert many([b"a", row, b"", b"b"]).tolist() == [97, model(row.decode("utf-8", "replace")), 0, 98]
