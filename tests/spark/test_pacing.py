"""Limits: a batch stays within them, something always moves, and no queue starves. Without Spark."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqstore.spark.options import Key, Offsets
from mqstore.spark.pacing import admit


def taken(before: Offsets, after: Offsets) -> dict[Key, int]:
    return {key: after[key] - before[key] for key in after if after[key] != before[key]}


def queues(*lengths: int) -> Offsets:
    return {Key("s", "t", number): length for number, length in enumerate(lengths)}


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30), st.integers(1, 3_000))
def test_a_batch_has_as_many_messages_as_it_may(lengths: list[int], most: int) -> None:
    end = queues(*lengths)
    begin = dict.fromkeys(end, 0)
    moved = taken(begin, admit(begin, end, most))
    assert sum(moved.values()) == min(most, sum(lengths))
    assert all(moved[key] <= end[key] for key in moved)


@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=12), st.integers(1, 3_000))
@example([1, 1, 1, 1, 1, 10], 3)
def test_each_queue_has_its_share(lengths: list[int], most: int) -> None:
    """At least half of it, for up to half may go to those whose share is less than a message."""
    end = queues(*lengths)
    begin = dict.fromkeys(end, 0)
    after = admit(begin, end, most)
    for key, length in end.items():
        share = most * length / sum(lengths)
        if share >= 1:
            assert after[key] >= min(length, int(share / 2))


def test_shares_are_in_proportion() -> None:
    end = queues(60_000, 30_000, 10_000)
    assert [*admit(dict.fromkeys(end, 0), end, 1000).values()] == [600, 300, 100]


def test_one_huge_and_many_tiny_queues_move_together() -> None:
    """Half of the limit is for those that would have nothing, so all of a thousand have moved after two batches."""
    end = queues(10_000_000, *[1] * 1000)
    at = dict.fromkeys(end, 0)
    for _ in range(30):
        before, at = at, admit(at, end, 1000)
        moved = taken(before, at)
        assert sum(moved.values()) == 1000
        assert moved[Key("s", "t", 0)] >= 499
    assert all(at[key] == 1 for key in end if key.queue_id)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_limit_below_the_number_of_queues_serves_all_in_turn(most: int) -> None:
    """Although the large ones never run dry: what is taken of them is put again."""
    end = queues(1_000_000, 1_000_000, 3, 3, 3)
    at = dict.fromkeys(end, 0)
    for _ in range(400):
        moved = taken(at, after := admit(at, end, most))
        assert sum(moved.values()) == most
        at = after
        for key in list(end)[:2]:
            end[key] = at[key] + 1_000_000
    assert [at[key] for key in list(end)[2:]] == [3, 3, 3]
