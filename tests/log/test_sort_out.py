"""Numbers of records in a queue, sorted out by what its units confirm."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.recovery.offset_assigner import sort_out


class _Units:
    """A queue with these units, by slot: (physical offset, size)."""

    def __init__(self, units: dict[int, tuple[int, int]]) -> None:
        self._units = units
        self.max_offset = max(units) + 1

    def units(self, offset: int, count: int) -> Any:
        table = np.zeros(count, [("physical_offset", "i8"), ("size", "i4"), ("tags_code", "i8")])
        for slot in range(offset, offset + count):
            place, size = self._units.get(slot, (0, 0))
            table[slot - offset] = (place, size, 0)
        return table

    def held(self, start: int, stop: int) -> Any:
        yield start, self.units(start, max(0, stop - start))


@pytest.mark.parametrize("doubted", [False, True])
@pytest.mark.parametrize(
    ("offsets", "units", "slots"),
    [
        # 1 and 2 are kept somewhere that this reading did not reach. The others stand.
        ([0, 3, 4], {0: 0, 1: 5000, 2: 5100, 3: 100, 4: 200}, [0, 3, 4]),
        # More are missing than the bytes between can have held.
        ([0, 50, 51], {0: 0, 50: 100, 51: 200}, [0, 50, 51]),
        # A number that no unit confirms.
        ([0, 50, 2], {0: 0, 1: 100, 2: 200}, [0, 1, 2]),
        # A slot that another record has stays with that record.
        ([0, 1, 1], {0: 0, 1: 100}, [0, 1, None]),
    ],
)
def test_a_gap_condemns_no_record_that_its_unit_confirms(
    offsets: list[int], units: dict[int, int], slots: list[int | None], doubted: bool
) -> None:
    physical, sizes = np.arange(len(offsets)) * 100, np.full(len(offsets), 100, np.int32)
    queue = cast(ConsumeQueue, _Units({slot: (place, 100) for slot, place in units.items()}))

    numbers, runs, odd = sort_out(0, 0, np.array(offsets), physical, sizes, queue, lambda *_: True, doubted=doubted)

    taken: list[int | None] = [None] * len(offsets)
    for low, high in runs:
        taken[low:high] = numbers[low:high].tolist()
    assert taken == slots
    assert odd == [i for i, slot in enumerate(slots) if slot is None]
