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


def java_hash_many(data: np.NDArray[np.uint8], edges: np.NDArray[np.integer[Any]]) -> np.NDArray[np.int32]:
    """Return the hashes of short UTF-8 strings that are side by side in `data`, given the edges between them.

    All strings are hashed byte by byte together. Those that are not plain ASCII are decoded, with replacement as in
    Java, and hashed one by one. The time is proportional to the longest one.

    >>> java_hash_many(np.frombuffer(b"TagATagB", np.uint8), np.array([0, 4, 8])).tolist()
    [2598919, 2598920]
    """
    starts, sizes = edges[:-1], np.diff(edges)
    hashes = np.zeros(len(sizes), np.uint32)
    for at in range(int(sizes.max(initial=0))):
        rows = np.flatnonzero(sizes > at)
        hashes[rows] = hashes[rows] * np.uint32(31) + data[starts[rows] + at]
    foreign = np.searchsorted(edges, np.flatnonzero(data >= 0x80), "right") - 1
    for row in np.unique(foreign).tolist():
        hashes[row] = java_hash(data[edges[row] : edges[row + 1]].tobytes().decode("utf-8", "replace")) & _MASK
    return hashes.view(np.int32)
