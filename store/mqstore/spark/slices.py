"""Reading of slices in a task, for queries and for streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mqstore.jobs.errors import plain_errors, settle
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.tasks import read_slices


class SliceReader:
    """Reader of slices, of which tasks get copies."""

    def __init__(self, options: SourceOptions, columns: list[str], body_as: Any) -> None:
        self._options = options
        self._columns = columns
        self._body_as = body_as

    def read(self, partition: Any) -> Iterator[Any]:
        settle()
        if partition is not None and partition.value is not None:  # else an empty batch
            with plain_errors():
                yield from self._read(partition.value)

    def _read(self, value: Any) -> Iterator[Any]:
        return read_slices(self._options, self._columns, self._body_as, value)
