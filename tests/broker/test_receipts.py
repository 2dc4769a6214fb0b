"""Receipts, recall handles and info strings: round trips (delivery#receipt, delivery#info-strings)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.broker.names import pop_retry_topic, retry_topic
from mqstore.broker.pop import receipts
from mqstore.broker.pop.ask import claim_of, claims_of
from mqstore.broker.pop.receipts import Receipt, parse_recall_handle, recall_handle, topic_mark
from mqstore.errors import InvalidReceiptError, ResultCode

I64 = 2**63 - 1
GOOD = "4 1700000000000 60000 999 2 mqstore 3 7 4096"

any_receipt = st.builds(
    lambda start, popped, invisible, revive, mark, broker, queue, distance, physical: Receipt(
        start, popped, invisible, revive, mark, broker, queue, start + distance, physical
    ),
    st.integers(0, I64 // 2),
    st.integers(0, I64 // 2),
    st.integers(0, I64 // 2),
    st.sampled_from([*range(8), 999]),
    st.integers(0, 2),
    st.text(st.characters(codec="utf-8", exclude_characters=" "), min_size=1, max_size=20),
    st.integers(0, 2**31 - 1),
    st.integers(0, 31),
    st.integers(-1, I64),
)


@given(any_receipt)
def test_a_receipt_comes_back_the_same(receipt: Receipt) -> None:
    assert receipts.parse(receipts.format(receipt)) == receipt


_LAST = st.sampled_from(["4", "5", "007", "x", "", " 6", "+6", "1_0", "\u0663", "9" * 18, "9" * 19, "7 4096"])
_HEAD = st.sampled_from(
    ["4 170 60 0 0 mqstore 0", "4 170 60 0 1 mqstore 0", "4 170 60 999 0 mqstore 3", "4 170 60 0 0 other 0", "4"]
)


@given(st.lists(st.tuples(_HEAD, _LAST), max_size=8))
def test_many_receipts_are_read_as_each_is(parts: list[tuple[str, str]]) -> None:
    texts = [f"{head} {last}" for head, last in parts]

    def read(all_of_them: Callable[[list[str]], object]) -> object:
        try:
            return all_of_them(texts)
        except InvalidReceiptError as error:
            return str(error)

    assert read(claims_of) == read(lambda texts: list(map(claim_of, texts)))


def test_the_fields_stand_in_the_documented_order() -> None:
    assert receipts.parse(GOOD) == Receipt(
        start_offset=4,
        pop_time_ms=1_700_000_000_000,
        invisible_ms=60_000,
        revive_qid=999,
        mark=2,
        broker="mqstore",
        queue_id=3,
        queue_offset=7,
        commitlog_offset=4096,
    )


@pytest.mark.parametrize("text", [GOOD.rsplit(" ", 1)[0], GOOD.rsplit(" ", 1)[0] + " -1"])
def test_a_receipt_without_its_ninth_field_knows_no_physical_offset(text: str) -> None:
    receipt = receipts.parse(text)
    assert receipt.commitlog_offset == -1
    assert len(receipts.format(receipt).split(" ")) == 8


def test_a_receipt_tells_when_it_expires_and_which_mode_it_is_of() -> None:
    receipt = receipts.parse(GOOD)
    assert receipt.expires_ms == 1_700_000_060_000
    assert receipt.fifo
    assert not receipt._replace(revive_qid=7).fifo


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
    with_field(0, "04"),
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
def test_what_is_no_receipt_is_refused(text: Any) -> None:
    with pytest.raises(InvalidReceiptError) as caught:
        receipts.parse(text)
    assert caught.value.code == ResultCode.MESSAGE_ILLEGAL
    assert len(str(caught.value)) < 400


@given(st.text(max_size=80) | st.text("0123456789 -", max_size=40))
def test_any_text_is_a_receipt_in_its_one_spelling_or_refused(text: str) -> None:
    try:
        receipt = receipts.parse(text)
    except InvalidReceiptError:
        return
    assert receipts.format(receipt) == text.removesuffix(" -1")


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
    assert parse_recall_handle(handle if padded else handle.rstrip("=")) == (topic, "mqstore", ms, key)


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
def test_what_is_no_handle_is_refused(handle: Any) -> None:
    with pytest.raises(InvalidReceiptError) as caught:
        parse_recall_handle(handle)
    assert len(str(caught.value)) < 400


# --- info strings ---------------------------------------------------------------------------------------------------


def test_marks_tell_the_kind_of_topic() -> None:
    marks = [
        topic_mark(topic) for topic in ("t", retry_topic("g"), pop_retry_topic("g", "t", 1), pop_retry_topic("g", "t"))
    ]
    assert marks == [0, 1, 1, 2]


def test_items_have_the_documented_form() -> None:
    assert receipts.join_items([receipts.start_item(0, 3, 17), receipts.start_item(2, 0, 4)]) == "0 3 17;2 0 4"
    assert receipts.messages_item(0, 3, [17, 18, 20]) == "0 3 17,18,20"
    assert receipts.count_item(1, 0, 2) == "1 0 2"
    assert receipts.offset_count_item(0, 3, 17, 2) == "0 qo3%17 2"


def test_info_strings_are_keyed_by_mark_and_second_field() -> None:
    assert receipts.parse_starts("0 3 17;2 0 4") == {"0@3": 17, "2@0": 4}
    assert receipts.parse_messages("0 3 17,18;0 0 1") == {"0@3": [17, 18], "0@0": [1]}
    assert receipts.parse_counts("0 qo3%17 2;0 3 0") == {"0@qo3%17": 2, "0@3": 0}
    assert receipts.parse_starts("") == {}


PARSERS: list[Callable[[str], object]] = [receipts.parse_starts, receipts.parse_messages, receipts.parse_counts]


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("text", ["0 3 17;0 3 18", "0 3", "0 3 17 1", "0 3 17;", ";", "0 3 x", "0 3 -1", "0 3 "])
def test_twisted_info_strings_are_refused(parser: Callable[[str], object], text: str) -> None:
    with pytest.raises(InvalidReceiptError):
        parser(text)
