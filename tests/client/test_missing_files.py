"""Reading past lost files: every way to read says once which file is missing (docs/reading.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mqstore
from mqstore import Message, OutgoingMessage, Store, StoreConfig

SEGMENT = 1 << 14
COUNT = 400


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store whose queue t/0 has 400 messages in several segments."""
    config = StoreConfig(segment_bytes=SEGMENT, consumequeue_units=64)
    with mqstore.open(tmp_path / "s", config=config) as store:
        store.create_topic("t", queues=1)
        store.put_many("t", [OutgoingMessage(bytes(200), tag="a")] * COUNT, queue_id=0)
    return tmp_path / "s"


def lose(path: Path, number: int, folder: str = "commitlog") -> str:
    """Remove a file of a folder. Returns its name, as a path below the store."""
    file = sorted(path.glob(f"{folder}/0*"))[number]
    file.unlink()
    return str(file.relative_to(path))


def by_read(store: Store) -> Iterator[Message]:
    offset = store.offsets("t", 0)[0]
    while found := store.read("t", 0, offset, 50):
        yield from found
        offset = found[-1].offset + 1


def by_queue(store: Store) -> Iterator[object]:
    queue = store.queue("t", codec=None)
    queue.shutdown()
    for task in queue:
        with task:
            yield task


def by_pull(store: Store) -> Iterator[Message]:
    with store.pull_consumer("g", start="earliest") as consumer:
        consumer.subscribe("t")
        while found := consumer.poll(0.1):
            yield from found


READING: dict[str, Callable[[Store], Iterator[object]]] = {
    "iter of a queue": lambda store: store.iter("t", 0),
    "iter of a topic": lambda store: store.iter("t"),
    "iter with tags": lambda store: store.iter("t", 0, tags="a || b"),
    "read": by_read,
}
WRITING = READING | {"queue": by_queue, "pull consumer": by_pull}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("mode", "way"), [("r", name) for name in READING] + [("rw", name) for name in WRITING], ids=str
)
def test_each_way_to_read_names_a_missing_segment_once(
    path: Path, caplog: pytest.LogCaptureFixture, mode: str, way: str
) -> None:
    """A reader yielded what was left without a word. A writer logged each record as one that does not verify."""
    lost = lose(path, 2)
    with mqstore.open(path, mode) as store:
        caplog.clear()  # a writer has reported the file when it opened the store
        got = sum(1 for _ in WRITING[way](store))
        [line] = told(caplog)
        again = sum(1 for _ in store.iter("t"))
        assert 0 < got == again == COUNT - store.stats().bad_records < COUNT
        assert f"missing_segment: {lost}" in line
        assert len(told(caplog)) == 1


@pytest.mark.parametrize("number", [0, 2, -1], ids=["first", "middle", "last"])
def test_a_reader_names_a_missing_segment_wherever_it_was(
    path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    lost = lose(path, number)
    with mqstore.open(path, "r") as store:
        assert 0 < sum(1 for _ in store.iter("t")) < COUNT
    [line] = told(caplog)
    assert f"missing_segment: {lost}" in line


def test_two_missing_segments_are_named_once_each(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = [lose(path, 2), lose(path, 2)]
    with mqstore.open(path, "r") as store:
        assert 0 < sum(1 for _ in store.iter("t")) < COUNT
    assert [[name in line for name in lost] for line in told(caplog)] == [[True, False], [False, True]]


def test_a_missing_file_of_a_queue_is_named_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = lose(path, 2, "consumequeue/t/0")
    with mqstore.open(path, "r") as store:
        caplog.clear()  # opening says that the queue has lost files
        assert [sum(1 for _ in store.iter("t", 0)) for _ in range(2)] == [COUNT - 64] * 2
    [line] = told(caplog)
    assert f"missing_units: {lost}" in line


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_damaged_records_of_a_file_are_reported_once(path: Path, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    with mqstore.open(path, "r") as store:
        places = [message.physical_offset for message in store.read("t", 0, 10, 5)]
    with open(path / "commitlog" / f"{0:020d}", "r+b") as file:
        for place in places:
            file.seek(place + 90)
            file.write(b"\xff")
    with mqstore.open(path, mode) as store:
        caplog.clear()
        assert sum(1 for _ in store.iter("t")) == COUNT - 5
    [line] = told(caplog)
    assert f"bad_record: commitlog/{0:020d} at byte {places[0]}: " in line
    assert "t, queue 0, offset 10" in line
    assert "mqstore verify" in line


def test_whole_store_reports_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mqstore.open(path) as store:
        for way in WRITING.values():
            assert sum(1 for _ in way(store)) == COUNT
        with mqstore.open(path, "r") as reader:
            assert sum(1 for _ in reader.iter("t")) == COUNT
    assert told(caplog) == []


def test_id_in_a_missing_segment_names_the_segment(path: Path) -> None:
    with mqstore.open(path, "r") as store:
        place = store.read("t", 0, 200, 1)[0].physical_offset
    (path / "commitlog" / (name := f"{place // SEGMENT * SEGMENT:020d}")).unlink()
    with mqstore.open(path, "r") as store, pytest.raises(LookupError, match=f"missing_segment: commitlog/{name}"):
        store.log.at(place)
