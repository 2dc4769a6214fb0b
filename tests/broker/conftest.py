"""The bench of tests that go through the broker's door, and a store with its tables for those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqstore.broker.background.context import Parts
from mqstore.broker.broker import Broker
from mqstore.clock import SimulatedClock
from tests.broker.popsupport import PopBench
from tests.broker.support import Bench, new_parts, shrink_timer_log
from tests.broker.timersupport import Timers


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """An object of the test module's class `Bench`, or of the common one if the module has none."""
    bench = getattr(request.module, "Bench", Bench)(tmp_path / "store")
    yield bench
    if not bench.broker.store.closed:
        bench.broker.close()


@pytest.fixture
def broker(bench: Bench) -> Broker:
    """The broker of `bench`, with a topic `t` of one queue."""
    bench.broker.topics.create("t", queues=1)
    return bench.broker


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = new_parts(tmp_path / "store")
    yield parts
    parts.store.close()


@pytest.fixture
def pops(tmp_path: Path) -> Iterator[PopBench]:
    """A pop service alone, with a topic `t` of one queue."""
    with PopBench(tmp_path / "store", queues=1) as pops:
        yield pops


@pytest.fixture
def timers(tmp_path: Path) -> Iterator[Timers]:
    """A timer service alone."""
    made = Timers(tmp_path / "store")
    yield made
    if not made.parts.store.closed:
        made.close()


@pytest.fixture
def few_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten units to a file of the timer's log, of stores that are made afterwards."""
    shrink_timer_log(monkeypatch)
