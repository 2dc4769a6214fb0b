"""Arrow arrays built from bytes scattered over a mapped file, without a Python object for each value.

Arrow's binary arrays need contiguous values, and records have headers between them. So bytes are copied.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mqstore.layout.arrays.scan import collect

try:
    import pyarrow as pa
except ImportError as error:  # pragma: no cover
    raise ImportError("columns as Arrow need pyarrow: pip install 'mqstore[spark]', or pyarrow alone") from error

_Int64s = npt.NDArray[np.int64]
_Int32s = npt.NDArray[np.int32]
_Bools = npt.NDArray[np.bool_]
_MOST = 1 << 31
"""Upper bound of the bytes in a binary array."""


def cut(buffer: mmap.mmap | bytes | npt.NDArray[np.uint8], starts: _Int64s, ends: _Int64s) -> Any:
    """Return the bytes [starts, ends) of `buffer`, which has less than 2 GiB, as a binary array."""
    sizes = ends - starts
    if int(sizes.sum()) < _MOST:  # they may overlap
        return laid(collect(buffer, starts, sizes), sizes)  # type: ignore[arg-type]
    view = memoryview(buffer)  # type: ignore[arg-type]
    return pa.array([bytes(view[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)], pa.binary())


def laid(data: npt.NDArray[np.uint8], sizes: _Int64s) -> Any:
    """Return the contiguous values in `data`, less than 2 GiB, as a binary array, without a copy."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def spread(values: Any, rows: npt.NDArray[np.integer[Any]], count: int) -> Any:
    """Return `count` rows, of which `rows` have the values, in that order, and the others are null."""
    if len(rows) == count:
        return values
    index = np.zeros(count, np.int32)
    absent = np.ones(count, np.bool_)
    index[rows] = np.arange(len(rows), dtype=np.int32)
    absent[rows] = False
    return values.take(pa.array(index, mask=absent))


def text(values: Any) -> Any:
    """Convert binary to string. Bytes that are not UTF-8 become U+FFFD, as in `decode_properties`."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        decoded: Sequence[str | None] = [
            None if value is None else value.decode("utf-8", "replace") for value in values.to_pylist()
        ]
        return pa.array(decoded, pa.string())


def flat(values: Any) -> tuple[npt.NDArray[np.uint8], _Int32s]:
    """Return the bytes of a string or binary array, and the edges of its values in them."""
    _, edges, data = values.buffers()
    if not len(values):
        return np.zeros(0, np.uint8), np.zeros(1, np.int32)
    found = np.frombuffer(edges, np.int32, len(values) + 1, values.offset * 4)
    bytes_ = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return bytes_[found[0] : found[-1]], found - found[0]


def sizes_of(values: Any) -> _Int64s:
    """Return the number of bytes of each value, 0 for a null."""
    sizes = np.diff(flat(values)[1]).astype(np.int64)
    if values.null_count:
        sizes[nulls(values)] = 0
    return sizes


def nulls(values: Any) -> _Bools:
    found: _Bools = values.is_null().to_numpy(zero_copy_only=False)
    return found


def fixed(rows: npt.NDArray[Any]) -> Any:
    """Return a C-contiguous array, one row for each value, as binary."""
    count = len(rows)
    edges = np.arange(count + 1, dtype=np.int32) * (rows.nbytes // max(1, count))
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(edges), pa.py_buffer(rows)])


_SMALL: Final = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}


def small(values: Any) -> Any:
    """Return the array with 32-bit offsets, if Spark was configured to use 64."""
    kind = _SMALL.get(values.type)
    return values if kind is None else values.cast(kind)


def odd_rows(values: Any, forbidden: bytes) -> list[int]:
    """Return the indices of values to examine: empty, with a leading blank, or with bytes that need a check.
    These are all except printable ASCII, and those in `forbidden`."""
    data, edges = flat(values)
    suspect = (data - np.uint8(0x20)) > 0x5E  # wraps round, so bytes below the blank are large, too
    for byte in forbidden:
        suspect |= data == byte
    odd = np.diff(edges) == 0
    full = np.flatnonzero(~odd)
    odd[full] = data[edges[full]] == 0x20
    if suspect.any():
        odd[np.searchsorted(edges, np.flatnonzero(suspect), "right") - 1] = True
    if values.null_count:
        odd &= ~nulls(values)
    return np.flatnonzero(odd).tolist()
