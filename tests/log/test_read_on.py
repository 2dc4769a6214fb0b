"""Reads that continue the last one: they use units that it has read already, and see what any read sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.errors import OffsetOutOfRangeError, StoreClosedError, TopicNotFoundError
from tests.log.support import flip_log, open_store

COUNTS = st.lists(st.sampled_from([1, 2, 3, 7, 32]), min_size=1, max_size=8)


def bodies(messages: Any) -> list[bytes]:
    return [message.body for message in messages]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two queues of 100 messages each, over several segments."""
    with open_store(tmp_path_factory.mktemp("both")) as store:
        for i in range(100):
            for topic in ("a", "b"):
                store.put(topic, f"{topic}{i}".encode() * (1 + i % 3))
        store.dispatch()
        yield store


@given(COUNTS, st.integers(0, 120), st.booleans())
def test_reads_in_turn_return_the_messages_of_one_read(both: Any, counts: list[int], start: int, mixed: bool) -> None:
    want = {topic: bodies(both.get(topic, 0, 0, 100).messages) for topic in ("a", "b")}
    at = {"a": min(start, 99), "b": 0}
    before = both.stats()

    for i, count in enumerate(counts):
        topic = "b" if mixed and i % 3 == 2 else "a"
        found = both.read(topic, 0, at[topic], count)
        assert bodies(found) == want[topic][at[topic] : at[topic] + count]
        assert [message.offset for message in found] == [*range(at[topic], at[topic] + len(found))]
        at[topic] += len(found)

    after = both.stats()
    read = sum(at.values()) - min(start, 99)
    assert after.gets - before.gets == read
    assert (after.get_bytes > before.get_bytes) == (read > 0)


def test_records_are_verified_when_they_are_read(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        receipts = [store.put("t", b"%d" % i) for i in range(12)]
        assert bodies(store.read("t", 0, 0, 2)) == [b"0", b"1"]
        assert bodies(store.read("t", 0, 2, 2)) == [b"2", b"3"]
        flip_log(tmp_path, receipts[5].physical_offset + 30)

        assert bodies(store.read("t", 0, 4, 3)) == [b"4", b"6", b"7"]
        assert store.stats().bad_records == 1


def test_a_read_sees_the_messages_put_since_the_last_one(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for i in range(20):
            store.put("t", b"%d" % i)
            assert bodies(store.read("t", 0, i, 2)) == [b"%d" % i]


def test_retention_ends_a_sequence_of_reads(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for i in range(100):
            store.put("t", b"%d" % i)
        store.flush()
        store.dispatch()
        assert [len(store.read("t", 0, at, 2)) for at in (0, 2)] == [2, 2]
        mapping = store.records.ahead.buffer
        store.drop_before(store.max_offset)

        with pytest.raises(OffsetOutOfRangeError):
            store.read("t", 0, 4, 2)
        store.records.drop_ahead()
        assert store.records.ahead is None or store.records.ahead.buffer is not mapping


def test_a_closed_store_continues_no_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for i in range(10):
        store.put("t", b"%d" % i)
    assert [len(store.read("t", 0, at, 2)) for at in (0, 2)] == [2, 2]
    store.close()

    with pytest.raises(StoreClosedError):
        store.read("t", 0, 4, 2)
    assert store.records.ahead is None


def test_a_read_continues_its_own_queue_alone(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for i in range(8):
            for topic, queue_id in (("a", 0), ("a", 1), ("b", 0)):
                store.put(topic, f"{topic}{queue_id} {i}".encode(), queue_id)
        store.dispatch()

        for topic, queue_id in (("a", 1), ("b", 0), ("b", 1)):
            assert [len(store.read("a", 0, at, 2)) for at in (0, 2)] == [2, 2]
            if (topic, queue_id) == ("b", 1):
                with pytest.raises(TopicNotFoundError):
                    store.read(topic, queue_id, 4, 1)
            else:
                assert bodies(store.read(topic, queue_id, 4, 1)) == [f"{topic}{queue_id} 4".encode()]


def test_a_read_uses_the_current_mapping_of_the_log(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for i in range(8):
            store.put("t", b"%d" % i)
        assert [len(store.read("t", 0, at, 2)) for at in (0, 2)] == [2, 2]
        store.log_files.map_again()

        [message] = store.read("t", 0, 4, 1)
        assert message._batch.buffer is store.log_files.find(message.physical_offset).mapping


def test_iter_stops_in_front_of_its_end_behind_damage(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        receipts = [store.put("t", b"%d" % i) for i in range(12)]
        store.dispatch()
        flip_log(tmp_path, receipts[3].physical_offset + 30)

        assert bodies(store.iter("t", 0, stop=6)) == [b"0", b"1", b"2", b"4", b"5"]
