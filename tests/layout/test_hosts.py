"""Host addresses: vectors of format#vectors, refusals, round trips."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.errors import FormatError, InvalidMessageError
from mqstore.layout.hosts import decode_host, encode_host


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("192.168.1.10:10911", "c0a8010a 00002a9f"),
        ("127.0.0.1:50000", "7f000001 0000c350"),
        ("[::1]:124", "00000000000000000000000000000001 0000007c"),
        ("[1050::5:600:300c:326b]:123", "10500000000000000005 0600 300c 326b 0000007b"),
        ("[::ffff:10.0.0.1]:0", "00000000000000000000ffff0a000001 00000000"),
    ],
)
def test_hosts_encode_to_address_and_a_four_byte_port(text: str, data: str) -> None:
    assert encode_host(text) == bytes.fromhex(data)
    assert decode_host(bytes.fromhex(data)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "127.0.0.1", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:99999", "127.0.0.1:1_0",
        "127.0.0.1: 1", "127.0.0.1:\u0661", "127.0.0.1:" + "9" * 5000, "localhost:80", "127.1:80", "256.0.0.1:80",
        "::1:80", "[::1]", "[::1]80", "[127.0.0.1]:80", "[fe80::1%eth0]:80", "[:80",
    ],
)  # fmt: skip
def test_text_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        encode_host(text)
    assert caught.value.field == "host"


@pytest.mark.parametrize("size", [0, 4, 7, 9, 16, 19, 21])
def test_bytes_of_another_length_are_no_host(size: int) -> None:
    with pytest.raises(FormatError):
        decode_host(bytes(size))


def test_a_port_that_no_network_has_is_still_shown() -> None:
    assert decode_host(bytes.fromhex("01020304 ffffffff")) == "1.2.3.4:-1"


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_address_survives_a_round_trip(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> None:
    data = encode_host(f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}")
    assert data == address.packed + port.to_bytes(4, "big")
    assert encode_host(decode_host(data)) == data
