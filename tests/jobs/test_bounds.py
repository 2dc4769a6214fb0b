"""Planning learns the bounds of thousands of queues in one look: the same that an opened store tells. Without Spark."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import StoreConfig
from mqstore.jobs.opening import StoreName, open_store, queues_of
from mqstore.layout.consumequeue import VOID_UNIT
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.columnar.support import SEGMENT, Odd, odd_records, write_store
from tests.conftest import GOLDEN_NAMES, Golden
from tests.log.support import all_queues


def assert_bounds_are_those_of_the_store(path: Path) -> None:
    with open_store(StoreName("s", str(path))) as opened:
        found = {queue.ref: (queue.min_offset, queue.max_offset) for queue in queues_of(opened)}
    with ReadOnlyMessageStore(path) as opened:
        refs = all_queues(opened)
        assert [*found] == refs
        assert found == {ref: opened.offsets(*ref) for ref in refs}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_bounds_of_a_java_store(golden: Golden, name: str) -> None:
    assert_bounds_are_those_of_the_store(golden(name).path)


@given(
    records=st.lists(odd_records(), max_size=40),
    segments_gone=st.integers(0, 2),
    crashed=st.booleans(),
    torn=st.lists(st.integers(0, 63), max_size=3),
)
def test_bounds_of_any_store(records: list[Odd], segments_gone: int, crashed: bool, torn: list[int]) -> None:
    """After retention, with units that are void or were torn out, after a crash."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_store(Path(folder) / "s", [*records, *[Odd(body=bytes(2000))] * 8])
        for segment in sorted((path / "commitlog").iterdir())[:-1][:segments_gone]:
            segment.unlink()
        for number, unit in enumerate(torn):
            file = path / "consumequeue" / "t" / "0" / f"{0:020d}"
            data = bytearray(file.read_bytes())
            data[unit * 20 : unit * 20 + 20] = VOID_UNIT if number else bytes(20)
            file.write_bytes(data)
        if crashed:
            (path / "abort").touch()
        assert_bounds_are_those_of_the_store(path)


def test_bounds_beside_a_writer(tmp_path: Path) -> None:
    with MessageStore(tmp_path / "s", config=StoreConfig(segment_bytes=SEGMENT, consumequeue_units=16)) as store:
        for i in range(100):
            store.put("t", bytes(i), queue_id=i % 3)
            if i % 7 == 0:
                store.dispatch()
                assert_bounds_are_those_of_the_store(tmp_path / "s")
