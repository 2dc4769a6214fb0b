"""Offset message ids: the vectors of format#vectors, the golden stores' ids, refusals, round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.errors import FormatError
from mqstore.layout.hosts import decode_host, encode_host
from mqstore.layout.messageid import decode_message_id, encode_message_id

VECTORS = [
    ("192.168.1.10:10911", 1024, "C0A8010A00002A9F0000000000000400"),
    ("[::1]:124", 3232, "000000000000000000000000000000010000007C0000000000000CA0"),
]


@pytest.mark.parametrize(("host", "offset", "text"), VECTORS)
def test_message_ids_equal_the_worked_vectors(host: str, offset: int, text: str) -> None:
    assert encode_message_id(encode_host(host), offset) == text
    assert decode_message_id(text) == (host, offset)
    assert decode_message_id(text.lower()) == (host, offset)


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "0" * 34, "0" * 55, "0" * 57, "G" * 32, " " * 32, "00 " * 10 + "00", "\u0660" * 32]
)
def test_text_that_is_no_message_id_is_refused(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        decode_message_id(text)
    assert caught.value.field == "message_id"


@pytest.mark.parametrize(("host", "offset"), [(b"", 0), (bytes(9), 0), (bytes(8), 2**63), (bytes(8), -(2**63) - 1)])
def test_invalid_id_parts_are_refused(host: bytes, offset: int) -> None:
    with pytest.raises(FormatError):
        encode_message_id(host, offset)


@given(st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20), st.integers(-(2**63), 2**63 - 1))
def test_ids_survive_a_round_trip(host: bytes, offset: int) -> None:
    text = encode_message_id(host, offset)
    assert text == text.upper()
    assert bytes.fromhex(text) == host + offset.to_bytes(8, "big", signed=True)
    assert decode_message_id(text) == (decode_host(host), offset)
