"""Stores that do not open, and stores that lost their queues, by every way to read them. Without Spark."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqstore import SimulatedClock
from mqstore.errors import ConfigError, MQStoreError
from mqstore.jobs import errors
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.plan import Slice, plan
from mqstore.jobs.reading.progress import StreamProgress
from mqstore.jobs.reading.tasks import read_slices
from mqstore.jobs.views import view_batch, view_stores
from tests.columnar.support import Odd, crashed_store, write_store
from tests.log.support import open_store

Spoil = Callable[[], object]


def bodies(options: SourceOptions, tasks: list[list[Slice]]) -> list[bytes]:
    batches = [batch for task in tasks for batch in read_slices(options, ["body"], "binary", task)]
    return sorted(body for batch in batches for body in batch.column("body").to_pylist())


def by_batch(options: SourceOptions, spoil: Spoil) -> list[bytes]:
    spoil()
    return bodies(options, plan(options))


def by_task(options: SourceOptions, spoil: Spoil) -> list[bytes]:
    tasks = plan(options)
    spoil()
    return bodies(options, tasks)


def by_stream(options: SourceOptions, spoil: Spoil) -> list[bytes]:
    spoil()
    progress = StreamProgress(options)
    start = progress.initial()
    end = progress.latest(start)
    assert progress.latest(end) == end
    return bodies(options, progress.partitions(start, end))


def by_logged_batch(options: SourceOptions, spoil: Spoil) -> list[bytes]:
    """Repeat a batch of a stream that was planned before."""
    progress = StreamProgress(options)
    start = progress.initial()
    end = progress.latest(start)
    spoil()
    progress = StreamProgress(options)
    tasks = progress.partitions(start, end)
    assert progress.latest(end) == end
    return bodies(options, tasks)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("lost") / "s", [Odd()])


WAYS = [by_batch, by_task, by_stream, by_logged_batch]


def source(**given: Any) -> SourceOptions:
    return SourceOptions.parse({"startingOffsets": "earliest", **given})


def of_later_schema(path: Path) -> None:
    text = (path / "mqstore.json").read_text().replace('"schema": 1', '"schema": 99')
    for name in ("mqstore.json", "mqstore.json.bak"):
        (path / name).write_text(text)


def unlike_a_store(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "notes.txt").write_text("x")


@pytest.mark.parametrize("spoil", [shutil.rmtree, unlike_a_store, of_later_schema])
@pytest.mark.parametrize("allowed", [{"failOnDataLoss": "false"}, {"ignoreCorruptFiles": "true"}, {}])
def test_store_that_does_not_open_is_passed_over_if_so_wished(
    store: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    allowed: dict[str, str],
) -> None:
    """One store of a later version stopped every query of a fleet, with failOnDataLoss=false, too."""
    for number, way in enumerate(WAYS):
        monkeypatch.setattr(errors, "_told", set())
        caplog.clear()
        good, bad = (shutil.copytree(store, tmp_path / str(number) / name) for name in ("good", "bad"))
        options = source(paths=json.dumps([str(good), str(bad)]), subscribe="t", **allowed)
        with caplog.at_level(logging.WARNING, "mqstore"):
            if not allowed:
                with pytest.raises(MQStoreError, match=str(bad)):
                    way(options, lambda bad=bad: spoil(bad))  # type: ignore[misc]
                continue
            assert way(options, lambda bad=bad: spoil(bad)) == [b"x"]  # type: ignore[misc]
        assert str(bad) in caplog.text


@pytest.mark.parametrize("option", ["failOnDataLoss", "ignoreCorruptFiles"])
def test_views_pass_over_a_store_that_does_not_open(store: Path, tmp_path: Path, option: str) -> None:
    good, bad = (shutil.copytree(store, tmp_path / name) for name in ("good", "bad"))
    of_later_schema(bad)
    given = {"paths": json.dumps([str(good), str(bad)]), "view": "queues", "subscribe": "t"}
    options = SourceOptions.parse({**given, option: str(option == "ignoreCorruptFiles").lower()})
    assert [view_batch("queues", name, options).num_rows for name in view_stores(options)] == [1, 0]
    options = SourceOptions.parse(given)
    with pytest.raises(MQStoreError, match=str(bad)):
        [view_batch("queues", name, options) for name in view_stores(options)]


@pytest.mark.parametrize("way", [by_batch, by_stream])
@pytest.mark.parametrize("read_by", ["auto", "queue", "log"])
@pytest.mark.parametrize(
    ("lost", "crashed"), [("all", False), ("topic", False), ("queue", False), ("tail", False), ("all", True)]
)
def test_lost_queues_are_never_taken_for_none(tmp_path: Path, way: Any, read_by: str, lost: str, crashed: bool) -> None:
    """Either there are all messages, or an error that says what to run. After a crash nobody knows which queues there
    were, unless all are lost."""
    path = tmp_path / "s"
    if crashed:
        crashed_store(path, 6, 0)
    else:
        write_store(path, [Odd("a", 0, b"0"), Odd("b", 0, b"1"), Odd("b", 1, b"2")])
    options = source(path=str(path), readBy=read_by, subscribePattern="a|b|orders")
    whole = by_batch(options, lambda: None)
    assert len(whole) == (6 if crashed else 3)
    queues = path / "consumequeue"
    topic = queues / ("orders" if crashed else "b")
    if lost == "tail":
        for file in (topic / "1").iterdir():
            file.write_bytes(bytes(file.stat().st_size))
    else:
        shutil.rmtree({"all": queues, "topic": topic, "queue": topic / "1"}[lost])
    if read_by == "log" or (read_by == "auto" and lost == "all" and way is by_batch):
        assert way(options, lambda: None) == whole
    else:
        with pytest.raises(ConfigError, match=f"consume queues of {path} are lost.*`mqstore recover` rebuilds them"):
            way(options, lambda: None)


def test_stream_beside_a_writer_waits_for_its_queues(tmp_path: Path) -> None:
    """What a writer has put and not listed yet is not lost."""
    with open_store(tmp_path / "s", clock=SimulatedClock()) as store:
        store.put("t", b"x")
        progress = StreamProgress(source(path=str(tmp_path / "s")))
        start = progress.initial()
        assert progress.latest(start) == start
        store.dispatch()
        assert progress.latest(start) != start
