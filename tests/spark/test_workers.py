"""How Spark treats a worker between tasks, and what a task of ours changes of it."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from mqstore.jobs import errors
from mqstore.jobs.errors import settle
from mqstore.jobs.runner import Runner
from mqstore.log.reading.prefetch import Prefetch


def run(spark: Any, tasks: list[Any], function: Any) -> list[Any]:
    return Runner(spark=spark).run(tasks, function)


class Seen(NamedTuple):
    worker: int
    frozen: int
    collected: bool
    """Whether the cycle that the task before left here is gone."""


class Cycle:
    def __init__(self) -> None:
        self.me = self


_left: weakref.ref[Cycle] | None = None


def look(given: Cycle) -> Seen:
    """A task: `given` is garbage behind it, but in a cycle, and nothing here collects."""
    global _left
    gc.disable()
    seen = Seen(os.getpid(), gc.get_freeze_count(), _left is not None and _left() is None)
    _left = weakref.ref(given)
    return seen


def late(_: int) -> int:
    sys.modules["late"] = ModuleType("late")
    return os.getpid()


def reader(_: int) -> bool:
    """Whether a thread of its own reads ahead."""
    with Prefetch[threading.Thread]("reader") as ahead:
        ahead.begin(threading.current_thread)
        return ahead.result() is not threading.current_thread()


def by_worker(rounds: list[Seen]) -> list[list[Seen]]:
    found: dict[int, list[Seen]] = {}
    for seen in rounds:
        found.setdefault(seen.worker, []).append(seen)
    return [*found.values()]


def collect_again(_: int) -> None:
    gc.enable()


@pytest.fixture
def context(spark: Any) -> Iterator[Any]:
    yield spark.sparkContext
    spark.sparkContext.parallelize(range(8), 8).map(collect_again).collect()


def test_outside_of_a_worker_nothing_is_frozen_and_threads_read_ahead() -> None:
    before = gc.get_freeze_count()
    settle()
    assert gc.get_freeze_count() == before
    assert run(None, [0], reader) == [True]


@pytest.mark.spark
def test_a_worker_is_used_again_and_collects_after_each_task(context: Any) -> None:
    """What makes freezing worth it, and what keeps garbage from staying: none of it is documented."""
    rdd = context.parallelize([Cycle()], 1).map(look)
    rounds = [rdd.collect()[0] for _ in range(6)]

    assert len({seen.worker for seen in rounds}) < len(rounds)
    assert all(seen.collected for again in by_worker(rounds) for seen in again[1:])


@pytest.mark.spark
def test_tasks_of_ours_freeze_what_is_imported_but_not_with_every_task(spark: Any, context: Any) -> None:
    rounds = [run(spark, [Cycle()], look)[0] for _ in range(12)]

    assert all(seen.frozen > 10_000 for seen in rounds), "all that the modules have made"
    left = [seen.collected for again in by_worker(rounds) for seen in again[3:]]
    assert left
    assert all(left), "what was there when a later task began"


@pytest.mark.spark
def test_modules_that_come_later_are_frozen_by_the_next_task(spark: Any, context: Any) -> None:
    before = {seen.worker: seen.frozen for seen in (run(spark, [Cycle()], look)[0] for _ in range(8))}
    worker = run(spark, [0], late)[0]
    after = {seen.worker: seen.frozen for seen in (run(spark, [Cycle()], look)[0] for _ in range(8))}

    assert after[worker] > before[worker]


@pytest.mark.spark
def test_tasks_that_share_the_processors_read_nothing_ahead(spark: Any, context: Any) -> None:
    assert run(spark, [0, 1], reader) == [False, False]


@pytest.mark.parametrize(("value", "times"), [(None, 1), ("1", 1), ("0", 0)])
def test_a_variable_switches_freezing_off(monkeypatch: pytest.MonkeyPatch, value: str | None, times: int) -> None:
    """What mqstore does to a worker stays for all tasks of the session."""
    calls: list[str] = []
    monkeypatch.setattr(errors, "_settled", 0)
    monkeypatch.setattr(errors, "_in_a_worker", lambda: True)
    monkeypatch.setattr(errors, "stay_alone", lambda: None)
    monkeypatch.setattr("gc.freeze", lambda: calls.append("freeze"))
    monkeypatch.delenv("MQSTORE_GC_FREEZE", raising=False)
    if value is not None:
        monkeypatch.setenv("MQSTORE_GC_FREEZE", value)
    settle()
    assert calls == ["freeze"] * times


@pytest.mark.spark
def test_planning_freezes_what_is_imported(spark: Any, tmp_path: Path) -> None:
    """Workers that plan are used again, too, and collect after each call."""
    from mqstore.spark.source import MQStoreDataSource

    class Frozen(MQStoreDataSource):
        @classmethod
        def name(cls) -> str:
            return "frozen"

        def schema(self) -> Any:
            raise RuntimeError(f"{gc.get_freeze_count()} frozen to make it")

        def reader(self, schema: Any) -> Any:
            super().reader(schema)
            raise RuntimeError(f"{gc.get_freeze_count()} frozen to read")

    spark.dataSource.register(Frozen)
    frame = spark.read.format("frozen")
    with pytest.raises(Exception, match=r"\d{5} frozen to make it"):
        frame.load(str(tmp_path))
    with pytest.raises(Exception, match=r"\d{5} frozen to read"):
        frame.schema("topic string").load(str(tmp_path)).collect()
