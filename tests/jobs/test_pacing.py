"""Limits: a batch stays within them, something always moves, and no queue starves. Without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import mqstore as library
from mqstore.jobs.options.options import Key, Offsets, SourceOptions
from mqstore.jobs.reading.progress import Costs, Limit, admit, costs_of
from tests.columnar.support import Odd, many, write_store
from tests.holding import linux_only, open_files
from tests.log.support import open_store


class Sizes(Costs):
    """Messages of these sizes; what waits is misjudged by a factor of its own for each queue."""

    def __init__(self, sizes: Mapping[Key, Sequence[int]], misjudged: Mapping[Key, float] | None = None) -> None:
        self.sizes = sizes
        self.misjudged = misjudged or {}

    def weight(self, key: Key, start: int, stop: int) -> float:
        return sum(self.sizes[key][start:stop]) * self.misjudged.get(key, 1)

    def reach(self, key: Key, start: int, stop: int, budget: int) -> tuple[int, int]:
        used = 0
        while start < stop and used + self.sizes[key][start] <= budget:
            used += self.sizes[key][start]
            start += 1
        return start, used

    def cost(self, key: Key, at: int) -> int:
        return self.sizes[key][at]


def taken(before: Offsets, after: Offsets) -> dict[Key, int]:
    return {key: after[key] - before[key] for key in after if after[key] != before[key]}


def queues(*lengths: int) -> Offsets:
    return {Key("s", "t", number): length for number, length in enumerate(lengths)}


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30), st.integers(1, 3_000))
def test_a_batch_has_as_many_messages_as_it_may(lengths: list[int], most: int) -> None:
    end = queues(*lengths)
    begin = dict.fromkeys(end, 0)
    moved = taken(begin, admit(begin, end, most, Costs()))
    assert sum(moved.values()) == min(most, sum(lengths))
    assert all(moved[key] <= end[key] for key in moved)


@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=12), st.integers(1, 3_000))
@example([1, 1, 1, 1, 1, 10], 3)
def test_each_queue_has_its_share(lengths: list[int], most: int) -> None:
    """At least half of it, for up to half may go to those whose share is less than a message."""
    end = queues(*lengths)
    begin = dict.fromkeys(end, 0)
    after = admit(begin, end, most, Costs())
    for key, length in end.items():
        share = most * length / sum(lengths)
        if share >= 1:
            assert after[key] >= min(length, int(share / 2))


def test_shares_are_in_proportion() -> None:
    end = queues(60_000, 30_000, 10_000)
    assert [*admit(dict.fromkeys(end, 0), end, 1000, Costs()).values()] == [600, 300, 100]


def test_one_huge_and_many_tiny_queues_move_together() -> None:
    """Half of the limit is for those that would have nothing, so all of a thousand have moved after two batches."""
    end = queues(10_000_000, *[1] * 1000)
    at = dict.fromkeys(end, 0)
    for _ in range(30):
        before, at = at, admit(at, end, 1000, Costs())
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
        moved = taken(at, after := admit(at, end, most, Costs()))
        assert sum(moved.values()) == most
        at = after
        for key in list(end)[:2]:
            end[key] = at[key] + 1_000_000
    assert [at[key] for key in list(end)[2:]] == [3, 3, 3]


_SIZES = st.lists(st.one_of(st.integers(1, 50), st.integers(1, 5_000)), max_size=20)


@given(
    st.lists(_SIZES, min_size=1, max_size=8),
    st.integers(1, 4_000),
    st.lists(st.floats(0.01, 100), min_size=8, max_size=8),
)
def test_bytes_stay_within_the_limit_and_everything_is_read_in_the_end(
    sizes: list[list[int]], most: int, factors: list[float]
) -> None:
    by_key = {Key("s", "t", number): each for number, each in enumerate(sizes)}
    costs = Sizes(by_key, dict(zip(by_key, factors, strict=False)))
    end = {key: len(each) for key, each in by_key.items()}
    at = dict.fromkeys(end, 0)
    while at != end:
        before, at = at, admit(at, end, most, costs)
        read = [size for key in end for size in by_key[key][before[key] : at[key]]]
        assert read, "it stalls"
        assert sum(read) <= most or len(read) == 1


def test_large_messages_are_not_starved() -> None:
    """Its message is larger than the limit; it gets a batch of its own when its turn has come."""
    flood, large = Key("s", "a", 0), Key("s", "b", 0)
    costs = Sizes({flood: [10] * 200_000, large: [5_000] * 3})
    at, end = {flood: 0, large: 0}, {flood: 100_000, large: 3}
    batches = 0
    while at[large] < 3:
        before, at = at, admit(at, end, 1_000, costs)
        assert taken(before, at) in ({flood: 100}, {large: 1})
        end[flood] = min(200_000, end[flood] + 100)
        batches += 1
        assert batches < 100


# -- real stores -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("pacing") / "s", [*many(200), Odd(topic="big", body=bytes(9000))])


def test_bytes_of_queues_are_those_of_their_records(store: Path) -> None:
    options = SourceOptions.parse({"path": str(store)})
    with library.open(store, "r") as opened:
        sizes = {
            Key(str(store), *ref): [len(m._record_bytes()) for m in opened.iter(*ref)]
            for topic in opened.topics()
            for ref in opened.queues(topic)
        }
    end = {key: len(each) for key, each in sizes.items()}
    for most in (100, 999, 5_000, 1 << 30):
        at = dict.fromkeys(end, 0)
        batches = 0
        with costs_of(options, Limit(most, "bytes")) as costs:
            for key in end:
                assert costs.cost(key, 2 % end[key]) == sizes[key][2 % end[key]]
            while at != end:
                before, at = at, admit(at, end, most, costs)
                read = [size for key in end for size in sizes[key][before[key] : at[key]]]
                assert read
                assert sum(read) <= most or len(read) == 1
                batches += 1
        total = sum(sum(each) for each in sizes.values())
        # Nearly full, but for the large message, which no batch but its own can have.
        assert batches <= (202 if most == 100 else 2 * total // most + 2)


@linux_only
def test_a_fleet_is_not_open_all_at_once(tmp_path: Path) -> None:
    for number in range(12):
        with open_store(tmp_path / f"s{number:02d}", segment_bytes=1 << 14) as opened:
            for _ in range(3):
                opened.put("t", bytes(100))
    options = SourceOptions.parse({"path": f"{tmp_path}/*"})
    end = {Key(str(path), "t", 0): 3 for path in tmp_path.iterdir()}
    at = dict.fromkeys(end, 0)
    before = open_files()
    with costs_of(options, Limit(1_000, "bytes")) as costs:
        while at != end:
            at = admit(at, end, 1_000, costs)
            assert (open_files() - before).total() <= 8
    assert not open_files() - before
