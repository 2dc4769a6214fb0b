"""Items to bytes and back, and what is neither."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore import BYTES, JSON, TEXT

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4),
    max_leaves=12,
)


@given(st.binary())
def test_bytes_of_every_kind_come_back_as_bytes(data: bytes) -> None:
    for item in (data, bytearray(data), memoryview(data)):
        stored = BYTES.encode(item)
        assert type(stored) is bytes
        assert BYTES.decode(stored) == data


def test_a_bytearray_that_is_changed_afterwards_changes_nothing() -> None:
    item = bytearray(b"one")
    stored = BYTES.encode(item)
    item[:] = b"two"
    assert stored == b"one"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_stored_as_utf8(text: str) -> None:
    assert TEXT.encode(text) == text.encode("utf-8")
    assert TEXT.decode(TEXT.encode(text)) == text


@given(_JSON)
def test_json_comes_back(value: Any) -> None:
    try:
        stored = JSON.encode(value)
    except mqstore.errors.InvalidMessageError:
        assert any(0xD800 <= ord(c) < 0xE000 for c in repr(value).encode().decode("unicode_escape"))
        return
    assert JSON.decode(stored) == value


def test_json_is_plain_utf8_without_spaces() -> None:
    assert JSON.encode({"ü": [1, None, "x"]}) == '{"ü":[1,null,"x"]}'.encode()


@pytest.mark.parametrize(
    ("codec", "item"),
    [
        (BYTES, "text"),
        (BYTES, 7),
        (BYTES, None),
        (TEXT, b"bytes"),
        (TEXT, "\ud800"),
        (JSON, b"bytes"),
        (JSON, {1, 2}),
        (JSON, float("nan")),
        (JSON, float("inf")),
        (JSON, "\ud800"),
    ],
)
def test_unsupported_value_is_refused(codec: mqstore.Codec, item: Any) -> None:
    with pytest.raises(mqstore.errors.InvalidMessageError) as caught:
        codec.encode(item)
    assert caught.value.field == "body"


def test_deep_or_circular_value_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    for item in (circle, deep):
        with pytest.raises(mqstore.errors.InvalidMessageError):
            JSON.encode(item)


@pytest.mark.parametrize(
    ("codec", "body", "position"),
    [(TEXT, b"ab\xff", 2), (JSON, b"{", 1), (JSON, b"", 0), (JSON, b"1 2", 2), (JSON, b"[" * 100_000, 0)],
)
def test_undecodable_body_is_located(codec: mqstore.Codec, body: bytes, position: int) -> None:
    with pytest.raises(mqstore.errors.FormatError) as caught:
        codec.decode(body)
    assert caught.value.position == position


def test_many_items_are_encoded_like_one(mq_store: mqstore.Store) -> None:
    """Plain bytes are not encoded one by one."""
    queue = mq_store.queue("jobs")
    queue.put_many([b"a", bytearray(b"b"), memoryview(b"c")])
    queue.put_many([b"d"])
    for codec, items in ((BYTES, [b"e", "text"]), (TEXT, [b"bytes"])):
        with pytest.raises(mqstore.errors.InvalidMessageError):
            mq_store.queue("jobs", codec=codec).put_many(items)
    assert [task.value for task in queue.get_many(9)] == [b"a", b"b", b"c", b"d"]
