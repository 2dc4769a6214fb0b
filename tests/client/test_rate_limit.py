"""Rate limit of a worker loop, with a caller and a clock by hand: rates by counts, no key waits for another."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqstore import queueloop
from mqstore.errors import ConfigError
from mqstore.queueloop import HOLD_MS, PARK_MS, RateLimit, interval_ms


def simulated(limit: RateLimit, items: Iterable[tuple[float, str]]) -> tuple[dict[str, list[float]], Counter[str]]:
    """Ask for each (time, key) as a worker does. Return the starts of each key, and how often its items asked."""
    asks = [(at_ms, i, key) for i, (at_ms, key) in enumerate(items)]
    heapq.heapify(asks)
    starts: dict[str, list[float]] = defaultdict(list)
    asked: Counter[str] = Counter()
    while asks:
        now_ms, i, key = heapq.heappop(asks)
        wait_ms = limit.wait_ms(key, now_ms)
        asked[key] += 1
        if wait_ms <= limit.hold_ms:
            starts[key].append(now_ms + wait_ms)
        else:
            heapq.heappush(asks, (now_ms + wait_ms, i, key))
    return starts, asked


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("10/s", 100),
        ("1/s", 1000),
        ("0.5/s", 2000),
        ("1/2.5s", 2500),
        ("6/m", 10_000),
        ("90/h", 40_000),
        ("2/d", 43.2e6),
    ],
)
def test_rate_is_a_time_between_starts(rate: str, expected: float) -> None:
    assert interval_ms(rate) == expected


@pytest.mark.parametrize(
    "rate", ["", "10", "10/", "/s", "10/x", "-1/s", "0/s", "1/0s", "10 /s", "1e3/s", None, 10, b"1/s"]
)
def test_text_that_is_no_rate_is_refused(rate: object) -> None:
    with pytest.raises(ConfigError, match="rate is a number per s, m, h or d"):
        RateLimit(rate)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.sampled_from("abc")), max_size=60),
    st.sampled_from(["10/s", "1/s", "1/2.5s", "3/m"]),
    st.booleans(),
)
@settings(deadline=None)
def test_starts_of_a_key_keep_their_distance(items: list[tuple[int, str]], rate: str, holds: bool) -> None:
    limit = RateLimit(rate) if not holds else RateLimit(rate, hold_ms=float("inf"))

    starts, _ = simulated(limit, items)

    assert {key: len(each) for key, each in starts.items()} == Counter(key for _, key in items)
    for each in starts.values():
        assert all(after - before >= interval_ms(rate) - 1e-6 for before, after in pairwise(each))


def test_waiting_items_use_every_start() -> None:
    starts, _ = simulated(RateLimit("1/s"), [(0, "a")] * 1000)

    assert starts["a"] == [1000.0 * i for i in range(1000)]


def test_free_keys_start_at_once() -> None:
    starts, _ = simulated(RateLimit("1/h"), [(0, "slow")] * 5 + [(1, f"host{i}") for i in range(5)])

    assert [starts[f"host{i}"] for i in range(5)] == [[1.0]] * 5


def test_items_of_a_full_key_ask_seldom() -> None:
    """A start further than five minutes ahead is not planned. So 2,000 items ask some five times each, not 1,000."""
    _, asked = simulated(RateLimit("1/s"), [(0, "a")] * 2000)

    assert asked["a"] <= 2000 * (2 + 2000 / (PARK_MS / 1000)) / 2 + 2000


def test_short_waits_are_held_and_long_ones_given_back() -> None:
    limit = RateLimit("10/s")

    waits = [limit.wait_ms("a", 0) for _ in range(5)]

    assert waits == [0, 100, 200, 300, 400]
    assert [wait <= HOLD_MS for wait in waits] == [True, True, True, False, False]
    assert limit.wait_ms("a", 300) == 0  # the first of those comes back


def test_no_item_is_given_back_for_longer_than_the_limit() -> None:
    limit = RateLimit("1/m")

    waits = [limit.wait_ms("a", 0) for _ in range(100)]

    assert waits[:6] == [0, 60_000, 120_000, 180_000, 240_000, 300_000]
    assert set(waits[6:]) == {PARK_MS}


def test_number_of_keys_is_bounded_and_rates_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queueloop, "KEYS_MAX", 10)
    limit = RateLimit("1/s")
    largest = 0

    starts, _ = simulated(limit, [(0, f"{i % 50}") for i in range(100)])
    for _ in range(100):
        limit.wait_ms(object(), 10**9)
        largest = max(largest, len(limit._keys))

    assert largest == 10
    assert {key: len(each) for key, each in starts.items()} == {f"{i}": 2 for i in range(50)}
    assert all(after - before >= 1000 for before, after in starts.values())
