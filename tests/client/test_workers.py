"""Threads for jobs and timers, and the end of a handler's call (clients#runtime)."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from mqstore import SimulatedClock, cancelled
from mqstore.client.push.workers import Awaited, Flow, Worker, Workers, current
from mqstore.clock import SYSTEM_CLOCK
from tests.client.support import ended, in_thread, until
from tests.holding import new_threads


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def workers(clock: SimulatedClock) -> Workers:
    return Workers("t", clock, 2, threads=False)


@pytest.fixture
def threaded() -> Iterator[Callable[[int], Workers]]:
    made: list[Workers] = []

    def make(number: int) -> Workers:
        made.append(Workers("t", SYSTEM_CLOCK, number, threads=True))
        return made[-1]

    yield make
    for each in made:
        each.stop(5)


class Value:
    """Something to hold on to."""


# --- time ----------------------------------------------------------------------------------------------------------


def test_timers_fire_in_the_order_in_which_they_are_due(workers: Workers, clock: SimulatedClock) -> None:
    fired: list[str] = []
    for name, delay_ms in (("late", 30), ("first", 10), ("same", 10)):
        workers.later(delay_ms, partial(fired.append, name))

    assert workers.run_once() == 10
    clock.advance(9)
    workers.run_once()
    assert fired == []
    clock.advance(1)
    assert workers.run_once() == 30
    clock.advance(20)
    assert workers.run_once() is None
    assert fired == ["first", "same", "late"]


def test_failures_stop_neither_jobs_nor_timers(workers: Workers) -> None:
    seen: list[str] = []
    workers.submit(lambda worker: 1 / 0)
    workers.submit(lambda worker: seen.append("job"))
    workers.later(0, lambda: 1 / 0)
    workers.later(0, lambda: seen.append("timer"))
    workers.run_once()
    assert seen == ["timer", "job"]


def test_failure_without_listener_is_ignored(workers: Workers) -> None:
    workers.submit(lambda worker: exec("raise SystemExit"))
    with pytest.raises(SystemExit):
        workers.run_once()


# --- calls ---------------------------------------------------------------------------------------------------------


def test_a_call_ends_in_time_or_lapses_and_never_both() -> None:
    worker, messages = Worker(), [Value()]
    worker.begin(messages)  # type: ignore[arg-type]
    assert worker.lapse(worker.calls - 1) == ()  # an earlier one
    assert worker.lapse(worker.calls) is messages
    worker.end()
    assert worker.lapsed == worker.calls

    worker.begin(messages)  # type: ignore[arg-type]
    worker.end()
    assert worker.lapse(worker.calls) == ()
    assert worker.lapsed != worker.calls  # so its result counts


def test_a_call_that_begins_in_the_middle_of_a_lapse_is_not_what_lapses() -> None:
    """The next call of a thread begins without the lock: between two looks of who lapses the one before."""

    class Worker2(Worker):
        """Whose next call begins as soon as its number was looked at."""

        switched = False

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "calls" and not Worker2.switched:
                Worker2.switched = True
                self.messages = ()
                self.begin(["second"])  # type: ignore[list-item]
            return value

    worker = Worker2()
    Worker2.switched = True
    worker.begin(["first"])  # type: ignore[list-item]
    Worker2.switched = False
    assert list(worker.lapse(1)) in ([], ["first"])
    assert worker.messages == ["second"]


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


def test_cancelled_belongs_to_the_call_of_its_thread(workers: Workers) -> None:
    seen: list[bool] = []

    def job(worker: Worker) -> None:
        seen.append(cancelled())
        worker.is_cancelled = lambda: True
        seen.append(cancelled())
        worker.is_cancelled = lambda: False
        worker.begin([Value()])  # type: ignore[list-item]
        worker.lapse(worker.calls)
        seen.append(cancelled())
        worker.begin([Value()])  # type: ignore[list-item]
        seen.append(cancelled())
        worker.end()
        worker.is_cancelled = None

    workers.submit(job)
    workers.run_once()
    assert seen == [False, True, True, False]
    assert not cancelled()
    assert current() is None


# --- threads -------------------------------------------------------------------------------------------------------


def test_submitted_jobs_finish_before_stop(
    threaded: Callable[[int], Workers],
) -> None:
    before = set(threading.enumerate())
    workers = threaded(3)
    workers.start()
    done: list[int] = []
    for i in range(100):
        workers.submit(lambda worker, i=i: done.append(i))  # type: ignore[misc]
    assert workers.stop(10)
    assert sorted(done) == list(range(100))
    assert not new_threads(before)
    assert workers.stop(10)  # again is harmless


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
        self.looks = 0
        self.done: Callable[[BaseException | None], object] | None = None

    def start(self, done: Callable[[BaseException | None], object]) -> None:
        self.done = done
        self.begun.set()

    def look(self) -> None:
        self.looks += 1

    def cancel(self, then: Callable[[], object]) -> None:
        raise AssertionError

    def stack(self) -> str:
        return "elsewhere"

    def end(self, error: BaseException | None = None) -> None:
        assert self.begun.wait(10)
        assert self.done is not None
        self.done(error)


class Ended(Elsewhere):
    """Something that has ended before anybody can wait for it."""

    def start(self, done: Callable[[BaseException | None], object]) -> None:
        done(None)


def test_a_job_that_waits_holds_a_worker_and_no_thread(threaded: Callable[[int], Workers]) -> None:
    workers = threaded(20)
    workers.threads = 1
    workers.start()
    places = [Elsewhere() for _ in range(30)]
    done: list[int] = []

    def job(i: int, worker: Worker) -> Flow[None]:
        worker.is_cancelled = lambda: i % 2 == 1
        yield places[i]
        assert current() is worker
        assert cancelled() is (i % 2 == 1)
        done.append(i)

    for i in range(30):
        workers.submit(partial(job, i))
    for place in places[:20]:
        assert place.begun.wait(10)
    assert not any(place.begun.is_set() for place in places[20:])  # nobody is free for them
    assert {worker.stack() for worker in workers.all} == {"elsewhere"}
    for i in (7, 3):
        places[i].end()
    for i in (20, 21):
        assert places[i].begun.wait(10)
    assert done == [7, 3]
    for i in range(30):
        if i not in done:
            places[i].end()
    assert workers.stop(10)
    assert sorted(done) == list(range(30))


def test_outside_error_is_raised_to_its_waiter(workers: Workers) -> None:
    seen: list[object] = []

    def job(worker: Worker) -> Flow[None]:
        place = Elsewhere()
        workers.later(0, lambda: place.end(KeyError("x")))
        try:
            yield place
        except KeyError as error:
            seen.append(error.args)
        yield Ended()
        seen.append(current() is worker)
        raise ValueError("the job's own")

    workers.submit(job)
    while len(seen) < 2:
        workers.run_once()
    assert seen == [("x",), True]
    workers.submit(lambda worker: seen.append(worker is workers.all[0]))  # it is free again
    workers.run_once()
    assert seen[2:] == [True]


def test_endless_outside_call_is_reported_and_leaves_no_thread(threaded: Callable[[int], Workers]) -> None:
    before = set(threading.enumerate())
    workers, place, seen = threaded(3), Elsewhere(), list[str]()
    workers.start()

    def job(worker: Worker) -> Flow[None]:
        try:
            yield place
        finally:
            seen.append("let go")

    workers.submit(job)
    assert place.begun.wait(10)
    assert not workers.stop(0.01)
    assert not new_threads(before)
    assert not seen
    place.end()  # late, and yet its job is to let go of what it has
    until(lambda: seen and not new_threads(before))


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


@pytest.mark.parametrize("stops", [False, True])
def test_outside_call_is_polled_until_its_end(
    threaded: Callable[[int], Workers], monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """It may be on an event loop that somebody closes: then `look` is how it ends."""
    monkeypatch.setattr("mqstore.client.push.workers.LOOK_MS", 5)

    class Lost(Elsewhere):
        def look(self) -> None:
            super().look()
            if self.looks == 3:
                self.end(RuntimeError("the loop has ended"))

    workers, places, seen = threaded(2), [Lost(), Lost()], list[str]()
    workers.start()

    def job(worker: Worker) -> Flow[None]:
        for place in places:  # one after the other: it goes on to be looked at
            try:
                yield place
            except RuntimeError as error:
                seen.append(str(error))

    workers.submit(job)
    if stops:
        assert workers.stop(10)
    else:
        assert places[1].begun.wait(10)
    until(lambda: len(seen) == 2)
    assert places[0].looks == 3


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
