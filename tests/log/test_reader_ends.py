"""The end of a queue as a reader in another process sees it: it grows, and may move back (format#readers)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message
from mqstore.jobs import recover
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.faults import FaultyFileSystem
from tests.log.support import SEGMENT, flip, open_store

COUNT, CUT = 20, 10
"""Messages that a reader has seen, and how many of them are left."""


def fill(path: Path, bodies: range) -> list[int]:
    """Put them, and close; where each record lies."""
    with open_store(path) as store:
        return [store.put("t", b"%03d" % n * 60).physical_offset for n in bodies]


def cut(path: Path, places: list[int]) -> None:
    """Have the log end before message CUT, which is damaged."""
    segment = places[CUT] // SEGMENT * SEGMENT
    flip(path / "commitlog" / f"{segment:020d}", places[CUT] - segment + 100)
    [recovered] = recover(path, prefix=True)
    assert recovered.report is not None
    assert recovered.report.log_end == places[CUT]


def numbers(messages: Any) -> list[int]:
    return [int(message.body[:3]) for message in messages]


def take(messages: Iterator[Message], count: int) -> list[int]:
    return [int(next(messages).body[:3]) for _ in range(count)]


def test_the_end_that_a_reader_sees_moves_back_with_that_of_the_log(tmp_path: Path) -> None:
    """It stayed where it had been: what a writer put next was passed over, up to there."""
    places = fill(tmp_path / "s", range(COUNT))
    with open_store(tmp_path / "s", "r") as reader:
        assert reader.offsets("t") == (0, COUNT)
        cut(tmp_path / "s", places)
        assert reader.offsets("t") == (0, CUT)
        assert reader.get("t", 0, COUNT).status == "OFFSET_OVERFLOW_BADLY"

        fill(tmp_path / "s", range(100, 105))
        assert reader.offsets("t") == (0, CUT + 5)
        assert numbers(reader.read("t", 0, CUT - 2)) == [8, 9, *range(100, 105)]


@pytest.mark.parametrize("queue_id", [0, None])
@pytest.mark.parametrize("more", [0, 5, COUNT])
def test_follower_continues_from_a_cut_and_reports(
    tmp_path: Path, queue_id: int | None, more: int, caplog: pytest.LogCaptureFixture
) -> None:
    places = fill(tmp_path / "s", range(COUNT))
    with open_store(tmp_path / "s", "r") as reader:
        messages = reader.iter("t", queue_id, follow=True)
        assert take(messages, COUNT) == [*range(COUNT)]
        cut(tmp_path / "s", places)
        assert reader.offsets("t") == (0, CUT)  # as the look that follows each wait would find
        fill(tmp_path / "s", range(100, 101 + more))

        with caplog.at_level(logging.WARNING, "mqstore"):
            assert take(messages, 1 + more) == [*range(100, 101 + more)]

        assert f"t/0 now ends at {CUT}, before offset {COUNT}" in caplog.text


def test_two_threads_that_look_for_news_count_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both added what they had found: the reader's end lay beyond the queue's, and what came there was passed over."""
    fill(tmp_path / "s", range(3))
    with open_store(tmp_path / "s", "r") as reader:
        assert reader.offsets("t") == (0, 3)
        fill(tmp_path / "s", range(3, 7))
        queue = type(reader.queue_table.get("t", 0))
        real = queue.units
        others = [threading.Thread(target=reader.offsets, args=("t",))]

        def interrupted(self: Any, offset: int, count: int) -> Any:
            units = real(self, offset, count)
            if count > 1 and others:
                other = others.pop()
                other.start()
                other.join(0.2)  # as far as it comes while this one is at it
                ended.append(other)
            return units

        ended: list[threading.Thread] = []
        monkeypatch.setattr(queue, "units", interrupted)
        reader.offsets("t")
        for other in ended:
            other.join()

        assert ended
        assert reader.offsets("t") == (0, 7)


def test_first_read_does_not_list_the_segments_again(tmp_path: Path) -> None:
    """A listing asks for the length of each file, of which a log may have thousands."""
    fill(tmp_path / "s", range(COUNT))
    fs = FaultyFileSystem()
    with ReadOnlyMessageStore(tmp_path / "s", fs=fs) as store:
        fs.calls.clear()
        assert store.get("t", 0, COUNT - 1, 32).next_offset == COUNT

    assert [call for call in fs.calls if call.operation.startswith("scandir")] == []
