"""Pieces of work put together into tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.jobs.verifying import TASK_BYTES, _Piece, bundles
from mqstore.log.recovery.ranges import RANGE_BYTES
from mqstore.spark.plan import StoreName

MIB = 1 << 20


def work(store: str, weight: int) -> _Piece:
    return _Piece(StoreName(store, store), file=("x", weight))


def ranges(count: int, weight: int = RANGE_BYTES, store: str = "s") -> list[_Piece]:
    return [work(store, weight)] * count


@pytest.mark.parametrize(
    ("pieces", "tasks", "sizes"),
    [
        (ranges(15), 4, [4, 4, 4, 3]),  # two tasks for each of two slots
        (ranges(15), 100, [1] * 15),  # no task is too small to be worth it
        (ranges(3), 4, [1, 1, 1]),
        (ranges(64), 2, [16] * 4),  # nor so large that much is lost with it
        (ranges(100, MIB), 4, [63, 37]),
        ([each for i in range(200) for each in ranges(1, 0, str(i))], 4, [64, 64, 64, 8]),  # to open one weighs, too
        (ranges(2, 4 * TASK_BYTES), 4, [1, 1]),
        ([], 4, []),
    ],
)
def test_tasks_are_even_and_neither_small_nor_huge(pieces: list[_Piece], tasks: int, sizes: list[int]) -> None:
    assert [len(task) for task in bundles(pieces, tasks)] == sizes


def test_ranges_that_were_cut_small_are_tasks_of_their_own() -> None:
    assert [len(task) for task in bundles(ranges(7, 900), 2, 900)] == [1] * 7


@given(
    weights=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2 * TASK_BYTES)), max_size=60),
    tasks=st.integers(1, 200),
)
def test_every_piece_is_in_one_task_in_order_and_no_task_is_over_full(
    weights: list[tuple[int, int]], tasks: int
) -> None:
    pieces = [work(str(store), weight) for store, weight in weights]

    found = bundles(pieces, tasks)

    assert [piece for task in found for piece in task] == pieces
    for task in found:
        if len(task) > 1:
            assert sum(piece.weight for piece in task[:-1]) + task[-1].weight / 2 <= TASK_BYTES
