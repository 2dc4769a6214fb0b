"""Inflating bodies: what Java's clients compressed, in all formats; limits, damage and missing packages."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.errors import FormatError
from mqstore.layout.compression import MissingPackageError, inflate

lz4_frame = pytest.importorskip("lz4.frame")
zstandard = pytest.importorskip("zstandard")

KINDS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "zlib-old": (0x001, zlib.compress),
    "lz4": (0x101, lz4_frame.compress),
    "zstd": (0x201, zstandard.compress),
    "zstd-no-size": (0x201, zstandard.ZstdCompressor(write_content_size=False).compress),
    "zlib": (0x301, zlib.compress),
}
every_kind = pytest.mark.parametrize(("sys_flag", "compress"), KINDS.values(), ids=KINDS.keys())
framed = pytest.mark.parametrize(("sys_flag", "compress"), [KINDS["lz4"], KINDS["zstd"]], ids=["lz4", "zstd"])


@pytest.mark.parametrize("sys_flag", [0, 0x300, 0x700, 0x30])
def test_a_body_that_is_not_marked_is_left_alone(sys_flag: int) -> None:
    body = zlib.compress(b"x")
    assert inflate(sys_flag, body) is body


@every_kind
@given(body=st.binary(max_size=3000))
def test_bodies_survive_a_round_trip(sys_flag: int, compress: Callable[[bytes], bytes], body: bytes) -> None:
    assert inflate(sys_flag | 0x38, compress(body)) == body


@every_kind
@pytest.mark.parametrize("size", [0, 1000])
def test_the_limit_is_exact(sys_flag: int, compress: Callable[[bytes], bytes], size: int) -> None:
    packed = compress(bytes(size))
    assert inflate(sys_flag, packed, max_bytes=size) == bytes(size)
    if size:
        with pytest.raises(FormatError, match="limit"):
            inflate(sys_flag, packed, max_bytes=size - 1)


@every_kind
def test_a_bomb_is_refused_without_being_inflated(sys_flag: int, compress: Callable[[bytes], bytes]) -> None:
    packed = compress(bytes(64 << 20))
    with pytest.raises(FormatError, match="limit"):
        inflate(sys_flag, packed, max_bytes=1 << 20)


@framed
def test_a_bomb_of_many_frames_is_refused(sys_flag: int, compress: Callable[[bytes], bytes]) -> None:
    with pytest.raises(FormatError, match="limit"):
        inflate(sys_flag, compress(bytes(100)) * 50, max_bytes=4999)


@framed
def test_frames_one_behind_the_other_are_one_body(sys_flag: int, compress: Callable[[bytes], bytes]) -> None:
    assert inflate(sys_flag, compress(b"one, ") + compress(b"") + compress(b"two"), max_bytes=8) == b"one, two"


@framed
def test_garbage_behind_a_frame_is_refused(sys_flag: int, compress: Callable[[bytes], bytes]) -> None:
    packed = compress(b"one")
    with pytest.raises(FormatError) as caught:
        inflate(sys_flag, packed + b"garbage and more of it")
    assert (caught.value.field, caught.value.position) == ("body", len(packed))


def test_bytes_after_a_zlib_stream_are_ignored() -> None:
    assert inflate(0x301, zlib.compress(b"one") + b"garbage") == b"one"


@every_kind
@pytest.mark.parametrize("body", [b"", b"x", b"not compressed at all"])
def test_garbage_is_refused(sys_flag: int, compress: Callable[[bytes], bytes], body: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        inflate(sys_flag, body)
    assert caught.value.field == "body"


@every_kind
def test_a_body_that_is_cut_off_is_refused(sys_flag: int, compress: Callable[[bytes], bytes]) -> None:
    packed = compress(b"some text, some more text, " * 9)
    for cut in range(len(packed)):
        with pytest.raises(FormatError):
            inflate(sys_flag, packed[:cut])


@every_kind
@given(data=st.binary(max_size=60))
def test_any_bytes_inflate_or_are_refused(sys_flag: int, compress: Callable[[bytes], bytes], data: bytes) -> None:
    for body in (data, compress(b"text " * 5)[:20] + data):
        try:
            assert len(inflate(sys_flag, body, max_bytes=1000)) <= 1000
        except FormatError:
            continue


@pytest.mark.parametrize("kind", [0x400, 0x500, 0x600, 0x700])
def test_an_unknown_compression_is_refused(kind: int) -> None:
    with pytest.raises(FormatError) as caught:
        inflate(kind | 1, b"abc")
    assert caught.value.field == "sys_flag"


@pytest.mark.parametrize(
    ("sys_flag", "package", "module"), [(0x101, "lz4", "lz4.frame"), (0x201, "zstandard", "zstandard")]
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, sys_flag: int, package: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=f"pip install {package}") as caught:
        inflate(sys_flag, b"abc")
    assert caught.value.name == package
