"""The `name 01 value 02` pairs in the properties of many records, found in a few array passes.

The properties of all records are concatenated, each closed by an 02, so that every pair of every record ends at an 02.
Pairs are separated from junk as in `decode_properties` (format#properties), but without a Python object per record.

Damaged bytes give useless pairs, never a read outside the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from mqstore import arrays as np
from mqstore.layout.arrays.scan import everywhere
from mqstore.native import kernel

if TYPE_CHECKING:
    _Int64s = np.NDArray[np.int64]


def _search(data: np.NDArray[np.uint8]) -> tuple[_Int64s, _Int64s, _Int64s]:
    """Return the starts, separators and ends of the pairs."""
    ends = np.flatnonzero(data == 2)
    starts = np.empty_like(ends)
    starts[:1] = 0
    starts[1:] = ends[:-1] + 1
    separator = np.flatnonzero(data == 1)
    if len(separator) != len(ends) or not ((separator > starts) & (separator < ends)).all():  # they do not alternate
        separators = np.append(separator, len(data))
        separator = separators[np.searchsorted(separators, starts)] if len(starts) else ends
    # The parse rule of format#properties: at least three characters, a name, a separator, a value.
    good = (ends - starts >= 3) & (separator > starts) & (separator < ends - 1)
    if not good.all():
        starts, ends, separator = starts[good], ends[good], separator[good]
    return starts, separator, ends


class Pairs:
    """Pairs of many blobs, in their order. All attributes are arrays with one element for each pair.

    `blob` is the index of its blob. `start` and `name_size` locate the name in `data`, `value` and `value_size` the
    value. `distinct` is True if no blob has a name twice, and all are ASCII. It is also False if this was not checked.


    >>> pairs = Pairs.of([b"TAGS\\x01a\\x02junk\\x02KEYS\\x01k1 k2", b"", b"TAGS\\x01b\\x02TAGS\\x01c\\x02"])
    >>> pairs.blob.tolist(), pairs.value_size.tolist(), pairs.named(b"TAGS").tolist()
    ([0, 0, 2, 2], [1, 5, 1, 1], [0, 3])
    """

    def __init__(self, data: np.NDArray[np.uint8], blob_ends: _Int64s) -> None:
        """Find the pairs in `data`.
        `blob_ends` are the ascending positions in `data` of the 02 that closes each blob. The last one closes `data`. A
        blob may contain further 02s."""
        self.data = data
        self._blob_ends = blob_ends
        if kernel is not None:
            table, room, count, self.distinct = kernel.pairs(data, blob_ends)
            rows = np.frombuffer(table, np.int64).reshape(-1, room)[:, :count] if room else np.zeros((4, 0), np.int64)
            starts, separator, ends, self.blob = rows
        else:
            starts, separator, ends = _search(data)
            self.distinct = False
        self.start: _Int64s = starts
        self._ends = ends
        self.value: _Int64s = separator + 1
        self.value_size: _Int64s = ends - self.value
        self.name_size: _Int64s = separator - starts

    @classmethod
    def of(cls, blobs: Sequence[bytes]) -> Pairs:
        """Return the pairs of `blobs`, each the properties of a record as stored."""
        data = np.frombuffer(b"\x02".join(blobs) + b"\x02", np.uint8)
        sizes = np.fromiter(map(len, blobs), np.int64, len(blobs))
        return cls(data, np.cumsum(sizes + 1) - 1)

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def blob(self) -> _Int64s:
        # Count the pairs that end by the end of each blob. That needs fewer look-ups than the blob of each pair.
        pairs = np.searchsorted(self._ends, self._blob_ends, "right")
        pairs[1:] -= pairs[:-1].copy()
        found: _Int64s = np.repeat(np.arange(len(pairs)), pairs)
        return found

    @cached_property
    def _words(self) -> np.NDArray[np.uint32]:
        """Return an array with the four bytes at each position as a big-endian number."""
        return everywhere(self.data, ">u4")

    @cached_property
    def _heads(self) -> np.NDArray[np.uint32]:
        # A pair has at least three bytes and the 02 after it, so four bytes from its start are inside.
        heads: np.NDArray[np.uint32] = self._words[self.start] if len(self.start) else np.zeros(0, np.uint32)
        return heads

    def named(self, name: bytes) -> np.NDArray[np.intp]:
        """Return the pairs with a name of 4 or 8 bytes, at most one for each blob. Of several, the last one wins."""
        pairs = np.flatnonzero((self.name_size == len(name)) & (self._heads == int.from_bytes(name[:4], "big")))
        if len(name) == 8 and len(pairs):
            pairs = pairs[self._words[self.start[pairs] + 4] == int.from_bytes(name[4:], "big")]
        else:
            assert len(name) in (4, 8), name
        if not len(pairs):
            return pairs
        blob = self.blob[pairs]
        last: np.NDArray[np.intp] = pairs[np.append(blob[1:] != blob[:-1], True)]
        return last
