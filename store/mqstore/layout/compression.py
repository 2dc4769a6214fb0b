"""Inflation of bodies that producers compressed (format#flags). sysFlag bit 0: compressed. Bits 8-10: the type.

    bits 8-10   0x000 zlib (old writers)   0x100 LZ4 frames   0x200 Zstandard frames   0x300 zlib

The store keeps bodies as they are sent. The packages `lz4` and `zstandard` are imported when a body needs them. The
output is bounded, so a small record cannot exhaust a reader's memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

from mqstore.errors import FormatError, MQStoreError
from mqstore.layout.record import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_TYPE_MASK, COMPRESSION_ZLIB, COMPRESSION_ZSTD

MAX_INFLATED_BYTES: Final = 256 << 20

# zstandard's decompression object has no output limit, so its input is passed in slices. The densest possible block has
# 128 KiB in 4 bytes, so a slice of 256 bytes exceeds the limit by 8 MiB at most.
_ZSTD_SLICE_BYTES: Final = 256


class MissingPackageError(MQStoreError, ImportError):
    """Error for a body whose compression needs the package `name`, which is not installed."""


def inflate(sys_flag: int, body: bytes, max_bytes: int = MAX_INFLATED_BYTES) -> bytes:
    """Return the body as the application sent it. It is `body` itself unless `sys_flag` marks it as compressed.

    Consecutive frames (LZ4, Zstandard) are one body. Bytes after the end of a zlib stream are ignored, as by Java.
    Raises `FormatError` (field "body", position within it) for another format, a truncated stream, and a result over
    `max_bytes`. The field is "sys_flag" for an unknown type. Raises `MissingPackageError` if the package for the format
    is missing.
    """
    if not sys_flag & COMPRESSED:
        return body
    kind = sys_flag & COMPRESSION_TYPE_MASK
    inflater = _INFLATERS.get(kind)
    if inflater is None:
        raise FormatError(f"compression type {kind >> 8} is unknown", "sys_flag", 0)
    return inflater(body, max_bytes)


def _inflate_zlib(body: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(body, max_bytes + 1)  # one more than allowed shows that the output exceeds the limit
    except zlib.error as error:
        raise FormatError(f"the body is not a zlib stream: {error}", "body", 0) from error
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    if not stream.eof:
        raise FormatError("the zlib stream of the body is truncated", "body", len(body))
    return data


def _inflate_lz4(body: bytes, max_bytes: int) -> bytes:
    try:
        import lz4.frame
    except ImportError as error:
        raise _missing("lz4") from error

    def frame(data: bytes, room: int) -> tuple[bytes, bytes, bool]:
        stream = lz4.frame.LZ4FrameDecompressor()
        out = stream.decompress(data, max_length=room)
        return out, stream.unused_data or b"", stream.eof

    # The binding raises plain RuntimeError for every error of the C library.
    return _inflate_frames(body, max_bytes, frame, RuntimeError, "LZ4")


def _inflate_zstd(body: bytes, max_bytes: int) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise _missing("zstandard") from error

    def frame(data: bytes, room: int) -> tuple[bytes, bytes, bool]:
        stream = zstandard.ZstdDecompressor().decompressobj()
        pieces: list[bytes] = []
        for start in range(0, len(data), _ZSTD_SLICE_BYTES):
            end = start + _ZSTD_SLICE_BYTES
            pieces.append(stream.decompress(data[start:end]))
            room -= len(pieces[-1])
            if stream.eof or room <= 0:
                return b"".join(pieces), stream.unused_data + data[end:], stream.eof
        return b"".join(pieces), b"", stream.eof

    return _inflate_frames(body, max_bytes, frame, zstandard.ZstdError, "Zstandard")


def _inflate_frames(
    body: bytes,
    max_bytes: int,
    frame: Callable[[bytes, int], tuple[bytes, bytes, bool]],
    failure: type[Exception],
    name: str,
) -> bytes:
    """Inflate consecutive frames. `frame` inflates the first one: (output, bytes after it, True if it ended)."""
    pieces: list[bytes] = []
    size, rest = 0, body
    while rest or not pieces:
        at = len(body) - len(rest)
        try:
            data, rest, ended = frame(rest, max_bytes + 1 - size)
        except failure as error:
            raise FormatError(f"the body is not a {name} frame: {error}", "body", at) from error
        size += len(data)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if not ended:
            raise FormatError(f"the {name} frame of the body is truncated", "body", len(body))
        pieces.append(data)
    return b"".join(pieces)


def _too_large(max_bytes: int) -> FormatError:
    return FormatError(f"the body inflates to more than the limit of {max_bytes} bytes", "body", 0)


def _missing(package: str) -> MissingPackageError:
    return MissingPackageError(
        f"the body is compressed with {package}, which is not installed; run: pip install {package}", name=package
    )


_INFLATERS: Final[dict[int, Callable[[bytes, int], bytes]]] = {
    0: _inflate_zlib,
    COMPRESSION_LZ4: _inflate_lz4,
    COMPRESSION_ZSTD: _inflate_zstd,
    COMPRESSION_ZLIB: _inflate_zlib,
}
