"""Reuse of arrays for range after range of a long log.

The pages of a new array cost more than writing to them. So an array is reused when nothing refers to it, or to a view
into it, any more. The memory of a small array is reused by the allocator, sooner than a spare one is found.
"""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any

from mqstore import arrays as np

if TYPE_CHECKING:
    _Cell = list[np.NDArray[Any]]


_KEPT = 16
_SMALL_BYTES = 1 << 16


def _references(cell: _Cell) -> int:
    """Return the number of references to the one array in a cell."""
    return sys.getrefcount(cell[0])


_ALONE = _references([object()])  # type: ignore[list-item]
"""Number of references to an array that is only in its cell. Measured, because Python versions differ."""


class ArrayPool:
    """Pool of arrays. `empty` works as `numpy.empty`: write before you read.

    >>> spares = ArrayPool()
    >>> first = spares.empty((2, 10_000), np.int64)
    >>> row, first = first[1], None
    >>> second = spares.empty((2, 10_000), np.int64)
    >>> np.shares_memory(row, second)
    False
    >>> where, second = second.ctypes.data, None
    >>> spares.empty((2, 10_000), np.int64).ctypes.data == where
    True
    """

    def __init__(self) -> None:
        self._cells: list[_Cell] = []

    def empty(self, shape: tuple[int, ...], dtype: np.DTypeLike) -> np.NDArray[Any]:
        """Return an array of this shape and type, with any content."""
        if prod(shape) * np.dtype(dtype).itemsize < _SMALL_BYTES:
            return np.empty(shape, dtype)
        for _ in range(len(self._cells)):
            try:
                cell = self._cells.pop(0)  # so that no other thread examines it meanwhile
            except IndexError:
                break
            spare = cell[0].shape == shape and cell[0].dtype == dtype and _references(cell) == _ALONE
            array = cell[0]
            self._cells.append(cell)
            if spare:
                return array
            del array
        made: np.NDArray[Any] = np.empty(shape, dtype)
        self._cells.append([made])
        del self._cells[:-_KEPT]
        return made
