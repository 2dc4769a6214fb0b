"""Loops of background work pause, so that the application's threads run (`mqstore/threads.py`)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import mqstore
from tests.waiting import until

COUNT = 40


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each thread that pauses. By its clock each slice is over at once."""
    names: list[str] = []
    seconds = itertools.count()
    clock = SimpleNamespace(
        perf_counter=lambda: next(seconds), sleep=lambda _: names.append(threading.current_thread().name)
    )
    monkeypatch.setattr("mqstore.threads.time", clock)
    return names


def put_many(store: mqstore.Store, count: int = 20 * COUNT) -> None:
    store.put_many("jobs", [mqstore.OutgoingMessage(b"x", tag="t")] * count)  # with a tag: the dispatcher reads each


def delay(store: mqstore.Store) -> None:
    for _ in range(COUNT):
        store.put("jobs", b"x", delay=3600)


def delay_for_now(store: mqstore.Store) -> None:
    for _ in range(COUNT):
        store.put("jobs", b"x", delay=0.001)


def delay_by_level(store: mqstore.Store) -> None:
    for _ in range(COUNT):
        store.put("jobs", b"x", delay_level=1)


def let_expire(store: mqstore.Store) -> None:
    put_many(store, COUNT)
    consumer = store.simple_consumer("group", {"jobs": "*"}, visibility=0.1)
    for _ in range(COUNT):
        assert consumer.receive(1)


@pytest.mark.parametrize(
    ("work", "small", "thread", "number"),
    [
        # Any thread: the housekeeper dispatches, too, if it needs what is not yet visible.
        pytest.param(put_many, "log.writing.dispatcher._BATCH", "", COUNT, id="dispatch"),
        pytest.param(delay, "", "housekeeper", COUNT, id="timer_places"),
        pytest.param(delay_for_now, "", "housekeeper", 2 * COUNT, id="timer_delivers"),
        pytest.param(delay_by_level, "broker.delay.levels._BATCH_UNITS", "housekeeper", COUNT, id="level_delivers"),
        pytest.param(let_expire, "broker.pop.unordered._CHUNK", "housekeeper", COUNT, id="pop_redelivers"),
    ],
)
def test_background_work_pauses_for_other_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pauses: list[str],
    work: Callable[[mqstore.Store], None],
    small: str,
    thread: str,
    number: int,
) -> None:
    if small:
        monkeypatch.setattr(f"mqstore.{small}", 1)
    with mqstore.open(tmp_path / "store") as store:
        work(store)
        until(lambda: sum(name.startswith(f"mqstore-{thread}") for name in pauses) >= number)
    assert threading.current_thread().name not in pauses
