"""Receipts and recall handles: how they are read, and what is refused (delivery#receipt, delivery#recall)."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.broker.pop.receipts import Claim, claim_of, parse_recall_handle, recall_handle
from mqstore.errors import InvalidReceiptError, ResultCode

I64 = 2**63 - 1
GOOD = "4 1700000000000 60000 999 2 mqstore 3 7 4096"


@pytest.mark.parametrize("physical", ["", " -1", " 0", " 4096", f" {I64}"])
def test_a_receipt_has_the_fields_in_the_documented_order(physical: str) -> None:
    text = "4 1700000000000 60000 999 2 mqstore 3 7" + physical
    assert claim_of(text) == Claim(7, 1_700_000_000_000, True, 2, 3, 4, text)
    assert not claim_of(text.replace("999", "7")).fifo


def with_field(number: int, value: str) -> str:
    fields = GOOD.split(" ")
    fields[number] = value
    return " ".join(fields)


FORGED: list[Any] = [
    "",
    " ",
    "x",
    None,
    b"4 1700000000000 60000 999 2 mqstore 3 7",
    "4 1700000000000 60000 999 2 mqstore 3",  # seven fields
    GOOD + " 1",  # ten
    GOOD + " ",
    GOOD + "\n",
    " " + GOOD,
    GOOD.replace(" ", "  ", 1),
    *(with_field(number, value) for number in (0, 1, 2, 3, 4, 6, 7, 8) for value in ("", "-2", "x", "1.5", "+5")),
    *(with_field(number, str(I64 + 1)) for number in (0, 1, 2, 3, 4, 6, 7, 8)),
    *(with_field(number, "-1") for number in (0, 1, 2, 3, 4, 6, 7)),
    with_field(0, "8"),  # a batch that begins behind its message
    with_field(0, "٤"),  # a digit to int(), not to us
    with_field(2, str(I64)),  # expires beyond all time
    with_field(3, "8"),
    with_field(3, "998"),
    with_field(3, "1000"),
    with_field(4, "3"),
    with_field(5, ""),
    with_field(6, str(2**31)),
    with_field(5, "b" * 1_000),
    "9" * 100_000,
]


@pytest.mark.parametrize("text", FORGED, ids=lambda text: repr(text)[:40])
def test_invalid_receipt_is_refused(text: Any) -> None:
    with pytest.raises(InvalidReceiptError) as caught:
        claim_of(text)
    assert caught.value.code == ResultCode.MESSAGE_ILLEGAL
    assert len(str(caught.value)) < 400


# --- recall handles -------------------------------------------------------------------------------------------------


def test_the_handle_is_base64_of_the_documented_words() -> None:
    handle = recall_handle("orders", 1_700_000_000_001, "7F0000010001")
    assert base64.urlsafe_b64decode(handle) == b"v1 orders mqstore 1700000000001 7F0000010001"


@given(
    st.text("abcXYZ019_-%|", min_size=1),
    st.integers(0, I64),
    st.text(min_size=1, max_size=60) | st.text(st.characters(exclude_categories=()), min_size=1, max_size=9),
    st.booleans(),
)
def test_a_handle_comes_back_the_same_with_or_without_padding(topic: str, ms: int, key: str, padded: bool) -> None:
    handle = recall_handle(topic, ms, key)
    assert parse_recall_handle(handle if padded else handle.rstrip("=")) == (topic, ms, key)


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "handle",
    [
        "",
        "=",
        "*",
        None,
        "A",
        "djEg 8J+S",
        "/+//",
        recall_handle("t", 1, "k").replace("t", "t*", 1),
        recall_handle("t", 1, "k") + "\n",
        "é",
        encoded("v2 t b 1 k"),
        encoded("v1 t b 1"),
        encoded("v1 t b 1 "),
        encoded("v1  b 1 k"),
        encoded("v1 t b x k"),
        encoded("v1 t b -1 k"),
        encoded(f"v1 t b {I64 + 1} k"),
        base64.urlsafe_b64encode(b"v1 t b 1 \xff").decode(),
        "A" * 1_000_000,
    ],
    ids=lambda handle: repr(handle)[:30],
)
def test_invalid_handle_is_refused(handle: Any) -> None:
    with pytest.raises(InvalidReceiptError) as caught:
        parse_recall_handle(handle)
    assert len(str(caught.value)) < 400
