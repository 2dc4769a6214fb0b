"""Arrow arrays of bytes that lie scattered over a mapped file: side by side in one copy.

Arrow's binary arrays need their values side by side, and records have headers between them, so a copy there must be:
by compiled parts, or a Python object a value without them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mqstore.native import kernel

try:
    import pyarrow as pa
except ImportError as error:  # pragma: no cover
    raise ImportError("columns as Arrow need pyarrow: pip install 'mqstore[spark]', or pyarrow alone") from error

__all__ = ["cut", "laid", "spread", "text"]

_Int64s = npt.NDArray[np.int64]
_MOST = 1 << 31
"""Bytes of a binary array are fewer."""


def cut(buffer: mmap.mmap | bytes | npt.NDArray[np.uint8], starts: _Int64s, ends: _Int64s) -> Any:
    """The bytes [starts, ends) of `buffer`, which has less than 2 GiB, as a binary array."""
    sizes = ends - starts
    if kernel is not None and (total := int(sizes.sum())) < _MOST:  # they may overlap
        joined = np.empty(total, np.uint8)
        kernel.join(buffer, starts, sizes, joined)
        return laid(joined, sizes)
    view = memoryview(buffer)  # type: ignore[arg-type]
    return pa.array([bytes(view[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)], pa.binary())


def laid(data: npt.NDArray[np.uint8], sizes: _Int64s) -> Any:
    """Values that lie side by side in `data`, less than 2 GiB, as a binary array: nothing is copied."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def spread(values: Any, rows: npt.NDArray[np.integer[Any]], count: int) -> Any:
    """`count` rows of which `rows` have the values, in that order, and the others null."""
    if len(rows) == count:
        return values
    index = np.zeros(count, np.int32)
    absent = np.ones(count, np.bool_)
    index[rows] = np.arange(len(rows), dtype=np.int32)
    absent[rows] = False
    return values.take(pa.array(index, mask=absent))


def text(values: Any) -> Any:
    """Binary as string. Bytes that are not UTF-8 become U+FFFD, as `decode_properties` has it."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        decoded: Sequence[str | None] = [
            None if value is None else value.decode("utf-8", "replace") for value in values.to_pylist()
        ]
        return pa.array(decoded, pa.string())
