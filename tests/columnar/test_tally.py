"""Counting in a task: what is added up in parts is what counting all at once gives, and bounds hold."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.columnar import tally as module
from mqstore.columnar.rows import PieceReader, Policy
from mqstore.columnar.tally import Bins, Tally
from mqstore.errors import ConfigError
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.columnar.support import many, write_store

VALUES = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 1 << 40), st.just((1 << 52) - 1)), min_size=1)


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@given(values=VALUES, percent=st.sampled_from([1, 50, 95, 99, 100]), cut=st.integers(0, 100))
def test_a_percentile_is_within_a_bin_of_the_true_one(values: list[int], percent: int, cut: int) -> None:
    bins, rest = Bins(), Bins()
    bins.add(ints(values[:cut]))
    rest.add(ints(values[cut:]))
    bins.merge(rest)
    true = sorted(values)[max(1, -(-len(values) * percent // 100)) - 1]

    found = bins.percentile(percent)

    assert found is not None
    assert abs(found - true) <= true / 32
    assert found <= max(values) == bins.largest


def test_small_values_are_exact_and_negative_ones_count_as_nothing() -> None:
    bins = Bins()
    bins.add(ints([-5, *range(32)]))

    assert [bins.percentile(100 * (i + 2) / 33) for i in range(32)] == [*range(32)]
    assert bins.percentile(1) == 0
    assert Bins().percentile(50) is None


def test_a_tally_in_parts_is_the_tally_of_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_store(tmp_path_factory.mktemp("tally") / "s", many(300))

    def of(cuts: list[int]) -> Tally:
        whole = Tally(7)
        with ReadOnlyMessageStore(path) as store:
            for low, high in pairwise([0, *cuts, 75]):
                one = Tally(7)
                for piece in PieceReader(store, {"header"}, Policy()).queue_pieces("t", 0, low, high):
                    one.add(piece)
                whole.merge(pickle.loads(pickle.dumps(one)))
        return whole

    one, three = of([]), of([20, 21])

    assert one.by_interval() == three.by_interval()
    assert (one.sizes, one.delays) == (three.sizes, three.delays)
    assert sum(messages for _, messages, _ in one.by_interval()) == 75


def test_too_many_intervals_are_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_INTERVALS", 9)
    path = write_store(tmp_path_factory.mktemp("tally") / "s", many(300))
    tally = Tally(1)
    with ReadOnlyMessageStore(path) as store:
        for piece in PieceReader(store, {"header"}, Policy()).queue_pieces("t", 0, 0, 75):
            tally.add(piece)

    with pytest.raises(ConfigError, match="interval=1 ms cuts a queue into 75 intervals, which is more than 9"):
        tally.by_interval()
