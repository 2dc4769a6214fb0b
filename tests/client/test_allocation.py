"""Strategies: the tables of clients#strategies, the formula there, and what every strategy must keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import QueueRef, fixed_queues
from mqstore.client.group.allocation import STRATEGIES, Strategy, avg, circle, strategy_named
from mqstore.errors import ConfigError


def queues(count: int) -> list[QueueRef]:
    return [QueueRef("T", i) for i in range(count)]


def members(count: int) -> list[str]:
    return [f"c{i:03}" for i in range(count)]


def shares(strategy: Strategy, queue_count: int, names: list[str]) -> list[list[int]]:
    return [[queue.queue_id for queue in strategy(name, queues(queue_count), names)] for name in names]


@pytest.mark.parametrize(
    ("queue_count", "member_count", "expected"),
    [
        (8, 3, [[0, 3, 6], [1, 4, 7], [2, 5]]),
        (10, 4, [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),
        (16, 5, [[0, 5, 10, 15], [1, 6, 11], [2, 7, 12], [3, 8, 13], [4, 9, 14]]),
        (7, 2, [[0, 2, 4, 6], [1, 3, 5]]),
        (4, 4, [[0], [1], [2], [3]]),
        (3, 4, [[0], [1], [2], []]),
        (1, 2, [[0], []]),
    ],
)
def test_circle_gives_in_turns(queue_count: int, member_count: int, expected: list[list[int]]) -> None:
    assert shares(circle, queue_count, members(member_count)) == expected


@given(st.integers(1, 60), st.integers(1, 20))
def test_avg_is_the_formula_of_clients_strategies(n: int, c: int) -> None:
    for i, share in enumerate(shares(avg, n, members(c))):
        m = n % c
        size = 1 if n <= c else n // c + (1 if m > 0 and i < m else 0)
        start = i * size if m > 0 and i < m else i * size + m
        assert share == list(range(start, start + max(0, min(size, n - start))))


@pytest.mark.parametrize("name", STRATEGIES)
@given(queue_count=st.integers(1, 60), names=st.sets(st.text("abc.@#-1", min_size=1, max_size=9), min_size=1))
def test_every_queue_goes_to_exactly_one_member(name: str, queue_count: int, names: set[str]) -> None:
    given_out = [queue for share in shares(STRATEGIES[name], queue_count, sorted(names)) for queue in share]

    assert sorted(given_out) == list(range(queue_count))


@pytest.mark.parametrize("strategy", STRATEGIES.values())
def test_a_client_that_is_no_member_has_nothing(strategy: Strategy) -> None:
    assert list(strategy("stranger", queues(8), members(3))) == []


def test_fixed_queues_are_had_as_far_as_they_are_there() -> None:
    mine = fixed_queues([QueueRef("T", 9), QueueRef("T", 1), QueueRef("U", 0)])

    assert list(mine("c", queues(4), ["a"])) == [QueueRef("T", 1)]
    assert list(mine("c", [QueueRef("U", 0), QueueRef("U", 1)], ["a"])) == [QueueRef("U", 0)]


def test_a_strategy_is_a_name_or_a_function() -> None:
    assert strategy_named("avg") is avg
    assert strategy_named("circle") is circle
    assert strategy_named("circle") is circle
    own = fixed_queues([])
    assert strategy_named(own) is own
    wrong: object
    for wrong in ("AVG", "machine_room", None, 3):
        with pytest.raises(ConfigError, match=r"'avg', 'circle'"):
            strategy_named(wrong)
