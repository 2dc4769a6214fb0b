"""Arrays that are made anew for each stretch of a long log, from memory that is there already.

The pages of a fresh array cost more than what is written to them. So one that nobody refers to any more, neither itself
nor any view of it, is handed out again.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Spares"]

_KEPT = 8
_OURS = 3
"""References to an array that is spare: the list, the loop, and the call that counts."""


class Spares:
    """For one thread. `empty` is `numpy.empty`: who asks writes before reading.

    >>> spares = Spares()
    >>> first = spares.empty((2, 1000), np.int64)
    >>> row, first = first[1], None
    >>> second = spares.empty((2, 1000), np.int64)
    >>> np.shares_memory(row, second)
    False
    >>> where, row, second = second.ctypes.data, None, None
    >>> spares.empty((2, 1000), np.int64).ctypes.data == where
    True
    """

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of that shape and kind, of any content."""
        for array in self._arrays:
            if array.shape == shape and array.dtype == dtype and sys.getrefcount(array) == _OURS:
                return array
        made: npt.NDArray[Any] = np.empty(shape, dtype)
        self._arrays.append(made)
        del self._arrays[:-_KEPT]
        return made
