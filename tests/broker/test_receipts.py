"""Receipts and recall handles: how they are read, and what is refused (delivery#receipt, delivery#recall)."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.errors import InvalidReceiptError, ResultCode

I64 = 2**63 - 1
GOOD = "4 1700000000000 60000 999 2 mqstore 3 7 4096"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mqstore.Store]:
    with mqstore.open(tmp_path_factory.mktemp("store")) as store:
        store.create_topic("t", queues=1)
        yield store


@pytest.mark.parametrize("physical", ["", " -1", " 0", " 4096", f" {I64}"])
@pytest.mark.parametrize("order", [False, True])
def test_a_receipt_has_the_fields_in_the_documented_order(tmp_path: Path, physical: str, order: bool) -> None:
    with mqstore.open(tmp_path) as store:
        store.create_topic("t", queues=1)
        store.put_many("t", [b""] * 3)
        first, second = store.broker.pop("g", "t", 2, order=order)
        head = f"0 {first.visible_at_ms - 60_000} 60000 {999 if order else 0} 0"
        assert [first.receipt, second.receipt] == [f"{head} mqstore 0 {offset}" for offset in (0, 1)]
        # A broker's own name, and the place in the log that RocketMQ adds.
        store.broker.ack("g", "t", [f"{head} another 0 {offset}{physical}" for offset in (0, 1)])
        assert store.broker.committed("g", "t", 0) == 2


def with_field(number: int, value: str) -> str:
    fields = GOOD.split(" ")
    fields[number] = value
    return " ".join(fields)


FORGED: list[Any] = [
    *("", " ", "x", None, b"4 1700000000000 60000 999 2 mqstore 3 7"),
    "4 1700000000000 60000 999 2 mqstore 3",  # seven fields
    GOOD + " 1",  # ten
    *(GOOD + " ", GOOD + "\n", " " + GOOD, GOOD.replace(" ", "  ", 1)),
    *(with_field(number, value) for number in (0, 1, 2, 3, 4, 6, 7, 8) for value in ("", "-2", "x", "1.5", "+5")),
    *(with_field(number, str(I64 + 1)) for number in (0, 1, 2, 3, 4, 6, 7, 8)),
    *(with_field(number, "-1") for number in (0, 1, 2, 3, 4, 6, 7)),
    with_field(0, "8"),  # a batch that begins behind its message
    with_field(0, "٤"),  # a digit to int(), not to us
    with_field(2, str(I64)),  # expires beyond all time
    *(with_field(3, revive) for revive in ("8", "998", "1000")),
    *(with_field(4, "3"), with_field(5, ""), with_field(6, str(2**31)), with_field(5, "b" * 1_000), "9" * 100_000),
]


def test_invalid_receipt_is_refused(store: mqstore.Store) -> None:
    for text in FORGED:
        with pytest.raises(InvalidReceiptError, match="is not a receipt") as caught:
            store.broker.ack("g", "t", [text])
        assert caught.value.code == ResultCode.MESSAGE_ILLEGAL
        assert len(str(caught.value)) < 400


# --- recall handles -------------------------------------------------------------------------------------------------


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()


@pytest.mark.parametrize("padded", [True, False])
def test_the_handle_is_base64_of_the_documented_words(store: mqstore.Store, padded: bool) -> None:
    for topic in ("t", "orders-_9", "o"):
        receipt = store.put(topic, b"", delay=3600)
        assert receipt.recall_handle is not None
        words = base64.urlsafe_b64decode(receipt.recall_handle).decode().split(" ")
        assert (*words[:3], words[4]) == ("v1", topic, "mqstore", receipt.unique_key)
        assert int(words[3]) > 1_700_000_000_000
        assert store.recall(receipt.recall_handle if padded else receipt.recall_handle.rstrip("="))


HANDLES: list[Any] = [
    *("", "=", "*", None, "A", "djEg 8J+S", "/+//", "é", "A" * 1_000_000),
    encoded("v1 t mqstore 1 k").replace("d", "d*", 1),
    encoded("v1 t mqstore 1 k") + "\n",
    *map(
        encoded,
        ("v2 t b 1 k", "v1 t b 1", "v1 t b 1 ", "v1  b 1 k", "v1 t b x k", "v1 t b -1 k", f"v1 t b {I64 + 1} k"),
    ),
    base64.urlsafe_b64encode(b"v1 t b 1 \xff").decode(),
]


def test_invalid_handle_is_refused(store: mqstore.Store) -> None:
    for handle in HANDLES:
        with pytest.raises(InvalidReceiptError) as caught:
            store.recall(handle)
        assert len(str(caught.value)) < 400
    assert store.recall(encoded("v1 t mqstore 1 k\udc80 \n")) is False  # keys may be any text
