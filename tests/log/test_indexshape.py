"""The shape of an index file, told by its content: for stores whose manifest is not there to tell."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mqstore.files.filesystem import REAL
from mqstore.layout.indexfile import file_bytes, put_entries
from mqstore.log.derived.indexshape import shape_of, shape_of_file
from tests.conftest import GoldenStore


def index_file(slots: int, entries: int, count: int, *, first_offset: int = 0, seed: int = 1) -> np.ndarray:
    """An index file with `count` entries of random hashes."""
    rng = np.random.default_rng(seed)
    data = np.zeros(file_bytes(slots, entries), np.uint8)
    hashes = rng.integers(0, 1 << 31, count)
    offsets = first_offset + np.cumsum(rng.integers(91, 5000, count)) - 91
    put_entries(data, slots, entries, hashes, offsets, np.full(count, 1_700_000_000_000))
    return data


@pytest.mark.parametrize("shape", [(53, 200), (17, 60), (100, 400), (1, 2), (7, 2), (1000, 50), (4, 16), (500, 2000)])
@pytest.mark.parametrize("fill", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("first_offset", [0, 1 << 33])
def test_entries_show_any_shape(shape: tuple[int, int], fill: float, first_offset: int) -> None:
    slots, entries = shape
    count = max(1, int((entries - 1) * fill))

    found = shape_of(index_file(slots, entries, count, first_offset=first_offset))

    # One or two entries of a small file may fit several shapes; then it is not for us to guess.
    assert found == shape or (found is None and count < 3)


@pytest.mark.parametrize("name", ["clean", "crashed", "propcrc", "rolled", "trimmed"])
def test_java_files_show_their_shape(golden: Callable[[str], GoldenStore], name: str) -> None:
    shape = (17, 60) if name in ("rolled", "trimmed") else (53, 200)
    files = sorted((golden(name).path / "index").iterdir())

    assert files
    assert {shape_of_file(file, REAL) for file in files} <= {shape, None}
    assert shape_of_file(files[0], REAL) == shape


def test_without_the_head_of_the_last_entrys_chain_there_is_no_evidence() -> None:
    data = index_file(53, 200, 150)
    data[40 : 40 + 4 * 53] = 0

    assert shape_of(data) is None


def test_bytes_of_any_kind_are_no_danger() -> None:
    rng = np.random.default_rng(7)
    for length in (0, 1, 39, 40, 41, 44, 80, 84, 85, 4252):
        shape_of(np.zeros(length, np.uint8))
        shape_of(np.full(length, 0xFF, np.uint8))
        for _ in range(20):
            shape_of(rng.integers(0, 256, length).astype(np.uint8))


def test_any_flipped_byte_gives_the_shape_or_nothing() -> None:
    data = index_file(53, 200, 150)
    for at in range(0, len(data), 7):
        data[at] ^= 0x55
        assert shape_of(data) in ((53, 200), None), at
        data[at] ^= 0x55
