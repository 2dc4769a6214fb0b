"""Java's `String.hashCode`, the hash of tags codes and index slots, for one string or many.

    h = 0;  h = h * 31 + unit   for each UTF-16 code unit, in wrapping 32-bit arithmetic, read as signed

A character outside the BMP counts as its two surrogates. The hash of `a + b` is the hash of `b` started from the hash
of `a`. So a prefix that many strings share ("topic#") is hashed once and passed as `initial`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mqstore import arrays as np

_MASK = 0xFFFF_FFFF
_SIGN = 0x8000_0000

# Bytes processed at a time, padding included: work arrays of this size stay in the second-level cache.
_BLOCK_BYTES = 16_384


def java_hash(text: str, initial: int = 0) -> int:
    """Return `text.hashCode()` as Java computes it, a signed 32-bit integer (format#tags-code).

    `initial` is the hash of the text before `text`. A lone surrogate counts as its code unit.

    >>> java_hash("TagA"), java_hash("polygenelubricants")
    (2598919, -2147483648)
    >>> java_hash("key", java_hash("topic#")) == java_hash("topic#key")
    True
    """
    value = initial & _MASK
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (value * 31 + unit) & _MASK
    else:
        data = text.encode("utf-16-be", "surrogatepass")
        for high, low in zip(data[::2], data[1::2], strict=True):
            value = (value * 31 + (high << 8 | low)) & _MASK
    return value - 0x1_0000_0000 if value & _SIGN else value


@lru_cache(maxsize=4096)
def tag_hash(tags: str) -> int:
    """Return `java_hash` of a TAGS string, cached, since tags are few and repeat (format#tags-code)."""
    return java_hash(tags)


def index_hash(key: str, initial: int = 0) -> int:
    """Return the non-negative hash of an index key `topic#key` (format#key-hash). `initial` is that of `java_hash`.

    Java uses `Math.abs`, which leaves -2147483648 negative, and then replaces it by 0.

    >>> index_hash("polygenelubricants"), index_hash("pay-ok")
    (0, 995269343)
    """
    value = abs(java_hash(key, initial))
    return 0 if value == _SIGN else value


def java_hash_many(
    data: np.NDArray[np.uint8], starts: np.NDArray[np.integer[Any]], sizes: np.NDArray[np.integer[Any]]
) -> np.NDArray[np.int32]:
    """Return the hashes of many UTF-8 strings, int32, in the given order.

    String i is the `sizes[i]` bytes from `starts[i]` of `data`. They may overlap and be in any order. Each is hashed as
    Java would decode it: UTF-8 with replacement. Strings that are not plain ASCII are decoded and hashed one by one.
    Raises ValueError for a string outside the array.
    """
    row_starts = np.asarray(starts, dtype=np.int64)
    row_sizes = np.asarray(sizes, dtype=np.int64)
    count = len(row_starts)
    if len(row_sizes) != count:
        raise ValueError(f"{count} starts but {len(row_sizes)} sizes")
    if count == 0:
        return np.zeros(0, dtype=np.int32)
    # `starts > length - sizes` instead of `starts + sizes > length`: sums of hostile values may wrap round.
    if row_starts.min() < 0 or row_sizes.min() < 0 or bool((row_starts > len(data) - row_sizes).any()):
        raise ValueError("a row is not inside the array of bytes")

    hashes = np.empty(count, dtype=np.uint32)
    foreign = np.empty(count, dtype=np.bool_)  # rows that are not plain ASCII
    # Longest first: a block is as wide as its first row, and its rows differ little in length.
    order = np.argsort(-row_sizes, kind="stable")
    first = 0
    while first < count:
        width = int(row_sizes[order[first]])
        block = order[first : first + max(1, _BLOCK_BYTES // max(1, width))]
        hashes[block], foreign[block] = _hash_block(data, row_starts[block], row_sizes[block])
        first += len(block)
    for i in np.flatnonzero(foreign).tolist():
        start, size = int(row_starts[i]), int(row_sizes[i])
        hashes[i] = java_hash(data[start : start + size].tobytes().decode("utf-8", "replace")) & _MASK
    return hashes.view(np.int32)


def _hash_block(
    data: np.NDArray[np.uint8], starts: np.NDArray[np.int64], sizes: np.NDArray[np.int64]
) -> tuple[np.NDArray[np.uint32], np.NDArray[np.bool_]]:
    """Return hashes of rows sorted by descending size, as if all were ASCII, and a mask of rows that are not ASCII.

    The rows are right-aligned in a matrix, so that column j of all rows has the same power of 31 as its weight.
    """
    width = int(sizes[0])
    powers = _powers(1 << width.bit_length())
    positions = (starts + (sizes - width))[:, np.newaxis] + np.arange(width)
    units = data.take(positions, mode="clip")  # clipped: the padding of the first rows may be before the array
    if sizes[-1] < width:
        units[positions < starts[:, np.newaxis]] = 0
    hashes = units.astype(np.uint32) @ powers[len(powers) - width :]
    return hashes, units.max(axis=1, initial=0) >= 0x80


@lru_cache(maxsize=32)
def _powers(count: int) -> np.NDArray[np.uint32]:
    """Return 31 ** (count - 1), ..., 31, 1 modulo 2 ** 32."""
    powers = np.full(count, 31, dtype=np.uint32)
    powers[0] = 1
    result: np.NDArray[np.uint32] = np.cumprod(powers, dtype=np.uint32)[::-1].copy()
    result.flags.writeable = False
    return result
