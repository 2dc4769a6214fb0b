"""Threads for jobs and timers at bad moments that no consumer shows (clients#runtime)."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from mqstore import SimulatedClock
from mqstore.client.interceptors import Interceptors
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.push.handler_call import Handling
from mqstore.client.push.workers import Awaited, Flow, Worker, Workers
from mqstore.clock import SYSTEM_CLOCK
from tests.client.pushsupport import PushBench
from tests.client.support import ended, in_thread


@pytest.fixture
def workers() -> Workers:
    return Workers("t", SimulatedClock(), 2, print, threads=False)


@pytest.fixture
def threaded() -> Iterator[Callable[[int], Workers]]:
    made: list[Workers] = []

    def make(number: int) -> Workers:
        made.append(Workers("t", SYSTEM_CLOCK, number, print, threads=True))
        return made[-1]

    yield make
    for each in made:
        each.stop(5)


class Value:
    """Something to hold on to."""


def test_failures_stop_neither_jobs_nor_timers(workers: Workers) -> None:
    seen: list[str] = []
    workers.submit(lambda worker: 1 / 0)
    workers.submit(lambda worker: seen.append("job"))
    workers.later(0, lambda: 1 / 0)
    workers.later(0, lambda: seen.append("timer"))
    workers.run_once()
    assert seen == ["timer", "job"]


def test_many_calls_that_end_while_they_lapse_have_one_outcome_each() -> None:
    """The timer thread used to say that a call had lapsed and then to find that it had ended, while the worker had
    looked in between: its message was neither settled nor sent back, and held its queue for good."""
    worker, lapsed = Worker(), set[int]()
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            call = worker.calls
            if worker.lapse(call):
                lapsed.add(call)

    watcher = in_thread(watch)
    void = set[int]()
    for _ in range(20_000):
        worker.begin([Value()])  # type: ignore[list-item]
        worker.end()
        if worker.lapsed == worker.calls:
            void.add(worker.calls)
    stop.set()
    ended(*watcher)
    assert void == lapsed


# --- threads -------------------------------------------------------------------------------------------------------


def test_after_stop_nothing_is_held(threaded: Callable[[int], Workers]) -> None:
    """Jobs and timers hold messages, and those the segments they lie in."""
    workers = threaded(1)
    workers.start()
    held: list[weakref.ref[Any]] = []
    for give in (workers.submit, partial(workers.later, 60_000)):
        value = Value()
        held.append(weakref.ref(value))
        give(lambda *_, value=value: None)  # type: ignore[misc]
        del value
    workers.stop(10)
    workers.submit(lambda worker: None)
    gc.collect()
    assert [ref() for ref in held] == [None, None]


# --- what goes on without a thread -----------------------------------------------------------------------------------


class Elsewhere(Awaited):
    """Something that ends when the test says so."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.done: Callable[[BaseException | None], object] | None = None

    def start(self, done: Callable[[BaseException | None], object]) -> None:
        self.done = done
        self.begun.set()

    def look(self) -> None: ...

    def cancel(self, then: Callable[[], object]) -> None:
        raise AssertionError

    def stack(self) -> str:
        return "elsewhere"

    def end(self, error: BaseException | None = None) -> None:
        assert self.begun.wait(10)
        assert self.done is not None
        self.done(error)


def test_outside_call_that_ended_was_in_time(
    threaded: Callable[[int], Workers],
) -> None:
    workers, place, go, blocked = threaded(2), Elsewhere(), threading.Event(), threading.Event()
    workers.threads = 1
    workers.start()
    ended: list[float] = []

    def job(worker: Worker) -> Flow[None]:
        worker.begin([Value()])  # type: ignore[list-item]
        yield place
        ended.append(worker.ended_at)

    workers.submit(job)
    assert place.begun.wait(10)
    [worker] = workers.busy()
    workers.submit(lambda worker: (blocked.set(), go.wait(10)))
    assert blocked.wait(10)
    before = time.perf_counter()
    place.end()
    after = time.perf_counter()
    assert worker.lapse(worker.calls) == ()
    go.set()
    assert workers.stop(10)
    assert before <= ended[0] <= after


def test_threadless_stop_waits_for_the_run(workers: Workers) -> None:
    """It used to throw away that something had ended, and the run waited for that for ever."""
    places, done = [Elsewhere(), Elsewhere()], list[int]()
    settling, halted = threading.Event(), threading.Event()

    def job(i: int, worker: Worker) -> Flow[None]:
        yield places[i]
        if i == 0:
            places[1].end()
            settling.set()
            assert halted.wait(10)
            time.sleep(0.02)
        done.append(i)

    for i in range(2):
        workers.submit(partial(job, i))
    runner = in_thread(workers.run_once)
    assert places[1].begun.wait(10)
    places[0].end()
    assert settling.wait(10)
    workers.halt()
    halted.set()
    assert workers.stop(10)
    ended(*runner)
    assert done == [0, 1]


def test_late_worker_of_a_stopped_consumer_blocks_no_suspected_message(bench: PushBench) -> None:
    told: list[str] = []
    first, second = (
        Handling(
            bench.broker,
            "g",
            batch=False,
            ordered=False,
            one_queue=True,
            interceptors=Interceptors(()),
            on_error=None,
        )
        for _ in range(2)
    )
    first.in_turn("a", lambda: told.append("a"))
    first.close()
    first.in_turn("b", lambda: told.append("b"))  # its job is forgotten
    second.in_turn("c", lambda: told.append("c"))
    assert told[-1] == "c"
    assert second.suspects.is_in("c")


class Kind:
    """It makes lines alike."""


def test_kinds_without_end_take_no_memory_without_end() -> None:
    log, kinds = LimitedLog("", SimulatedClock()), weakref.WeakSet[Kind]()
    for i in range(10_000):
        kinds.add(kind := Kind())
        log.say(logging.DEBUG, f"kind {i}", like=kind)
    assert len(kinds) < 5_000
