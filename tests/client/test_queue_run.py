"""Worker loops of a queue: what they survive, what ends them, what is lost (nothing). Each test runs with threads and
with coroutines. Times only order events, except for rates, where a start may be late but never early."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Reject, Retry, RetryPolicy, aio
from mqstore.errors import ConfigError
from tests.children import speaking_child
from tests.client.support import ended, failing, in_thread, until

Handler = Callable[[Any], object]


class Ways:
    """The same program with threads, and with coroutines whose handler waits on a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def threads(self, items: list[str], handler: Handler, body: Callable[[mqstore.Queue], None], **options: Any) -> Any:
        with mqstore.open(self.path) as store:
            queue = store.queue("jobs", codec=mqstore.TEXT, retry=options.pop("retry", RetryPolicy(2, [3600])))
            queue.put_many(items)
            body(queue)
            return queue.run(handler, **options)

    def coroutines(
        self, items: list[str], handler: Handler, body: Callable[[mqstore.Queue], None], **options: Any
    ) -> Any:
        async def elsewhere(task: aio.Task) -> object:
            return await asyncio.to_thread(handler, task)

        async def main() -> Any:
            async with aio.open(self.path) as store:
                queue = await store.queue(
                    "jobs", codec=mqstore.TEXT, retry=options.pop("retry", RetryPolicy(2, [3600]))
                )
                await queue.put_many(items)
                body(queue.sync)
                return await queue.run(elsewhere, **options)

        return asyncio.run(main())


@pytest.fixture(params=["threads", "coroutines"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(Ways(tmp_path / "store"), request.param)
    return found


def counts(summary: Any) -> tuple[int, int, int, int]:
    return summary.handled, summary.failed, summary.dead_lettered, summary.released


def left(path: Path) -> dict[str, int]:
    """Attempt of each item that the store still has."""
    with mqstore.open(path) as store:
        return {task.value: task.attempt for task in store.queue("jobs", codec=mqstore.TEXT)}


def raising(error: BaseException) -> Handler:
    def handle(*_: object) -> None:
        raise error

    return handle


def drained(queue: mqstore.Queue) -> None:
    queue.shutdown()


def later(work: Callable[[], object], event: threading.Event) -> None:
    """Do `work` on another thread, once the event is set."""
    threading.Thread(target=lambda: (event.wait(20), work()), daemon=True).start()


# -- items ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda task: None, (1, 0, 0, 0)),
        (lambda task: "a result", (1, 0, 0, 0)),
        (raising(KeyError("x")), (0, 1, 0, 0)),
        (raising(Retry(delay=3600)), (0, 1, 0, 0)),
        (raising(Reject("bad")), (0, 0, 1, 0)),
        (lambda task: (each for each in task.value), (0, 1, 0, 0)),  # nobody would run the generator
    ],
)
def test_each_outcome_is_counted_once(run: Any, end: Handler, expected: tuple[int, ...]) -> None:
    summary = run(["a"], end, drained)

    assert counts(summary) == expected


def test_last_attempt_is_counted_as_dead_letter(run: Any, tmp_path: Path) -> None:
    summary = run(["a"], raising(KeyError("x")), drained, retry=RetryPolicy(1, [1]))

    assert counts(summary) == (0, 0, 1, 0)
    with mqstore.open(tmp_path / "store") as store:
        [letter] = store.dead_letters("jobs")
        assert letter.properties["dlq_reason"] == "KeyError: 'x'"


def test_loops_survive_failing_items(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    done = []

    def handle(task: Any) -> None:
        if task.value.startswith("bad"):
            raise KeyError(task.value)
        done.append(task.value)

    items = [f"{kind}{i}" for i in range(40) for kind in ("bad", "good")]
    summary = run(items, handle, drained, workers=2, retry=RetryPolicy(2, [3600]))

    assert sorted(done) == sorted(f"good{i}" for i in range(40))
    assert counts(summary) == (40, 40, 0, 0)
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "attempt 1 failed: KeyError: 'bad" in logged[0].getMessage()
    assert logged[0].exc_info
    assert len(logged) == 1  # the others are counted in a line like it
    assert f"queue jobs: run ended: {summary}" in caplog.text


def test_item_that_the_codec_refuses_is_a_failed_attempt(run: Any, tmp_path: Path) -> None:
    def body(queue: mqstore.Queue) -> None:
        queue._broker.put("jobs", b"\xff", queue_id=0)
        queue.shutdown()

    assert counts(run(["a"], lambda task: task.value, body)) == (1, 1, 0, 0)


def test_loops_survive_a_queue_that_fails(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.queueloop.PAUSE_S", 0)

    def body(queue: mqstore.Queue) -> None:
        busy = mqstore.errors.StoreBusyError("busy")
        monkeypatch.setattr(queue._broker, "pop", failing(queue._broker.pop, busy))
        monkeypatch.setattr(queue, "_get_at_once", lambda visibility=None: None)
        queue.shutdown()

    assert counts(run(["a", "b"], lambda task: None, body, workers=1)) == (2, 0, 0, 0)


def test_long_handler_keeps_its_item(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queues: list[mqstore.Queue] = []
    renewed = threading.Event()
    seen = []

    def handle(task: Any) -> None:
        broker = queues[0]._broker
        [first] = broker.pending("jobs")
        assert renewed.wait(20)
        [lease] = broker.pending("jobs")
        seen.append((task.attempt, lease.offset == first.offset, lease.visible_at_ms > first.visible_at_ms + 500))

    def body(queue: mqstore.Queue) -> None:
        queue._visibility_s, queue._visibility_ms = 1.5, 1500
        renew = queue._broker.renew
        monkeypatch.setattr(queue._broker, "renew", lambda *lease, **more: (renew(*lease, **more), renewed.set())[0])
        queues.append(queue)
        queue.shutdown()

    assert counts(run(["a"], handle, body, workers=2)) == (1, 0, 0, 0)
    assert seen == [(1, True, True)], "delivered once, and its lease is longer"


# -- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate_per", [None, lambda item: "all"])
def test_starts_keep_their_distance(run: Any, rate_per: Any) -> None:
    starts: list[float] = []

    def body(queue: mqstore.Queue) -> None:
        threading.Thread(target=lambda: (queue.join(30), queue.shutdown()), daemon=True).start()

    summary = run(list("abcdef"), lambda task: starts.append(time.monotonic()), body, rate="10/s", rate_per=rate_per)

    assert counts(summary) == (6, 0, 0, 0)
    assert starts[-1] - starts[0] >= 0.49  # five distances; a start is late if its thread was


def test_item_of_a_limited_key_holds_up_no_other(run: Any, tmp_path: Path) -> None:
    hosts = ["slow/1", "slow/2", "slow/3", "a/1", "b/1", "c/1"]
    done: list[str] = []

    def handle(task: Any) -> None:
        done.append(task.value)

    summary = run(hosts, handle, drained, workers=1, rate="1/h", rate_per=lambda url: url.partition("/")[0])

    assert done == ["slow/1", "a/1", "b/1", "c/1"]
    assert counts(summary) == (4, 0, 0, 0)
    with mqstore.open(tmp_path / "store") as store:
        assert store.queue("jobs").qsize() == 2


def test_item_given_back_for_its_rate_loses_no_attempt(run: Any) -> None:
    attempts: list[tuple[str, int]] = []

    def body(queue: mqstore.Queue) -> None:
        threading.Thread(target=lambda: (queue.join(30), queue.shutdown()), daemon=True).start()

    def handle(task: Any) -> None:
        attempts.append((task.value, task.attempt))

    run(list("abc"), handle, body, rate="3/s", rate_per=len)  # a third of a second is longer than an item is held

    assert sorted(attempts) == [("a", 1), ("b", 1), ("c", 1)]


@pytest.mark.parametrize("rate_per", [lambda item: item.missing, lambda item: [item]])
def test_function_of_an_item_that_fails_is_a_failed_attempt(run: Any, rate_per: Any) -> None:
    assert counts(run(["a"], lambda task: None, drained, rate="1/s", rate_per=rate_per)) == (0, 1, 0, 0)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_immediate_shutdown_lets_running_handlers_end(run: Any, tmp_path: Path) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def handle(task: Any) -> None:
        begun.set()
        assert stopped.wait(20)

    def body(queue: mqstore.Queue) -> None:
        later(lambda: (queue.shutdown(immediate=True), stopped.set()), begun)

    summary = run(["a", "b"], handle, body, workers=1)

    assert counts(summary) == (1, 0, 0, 0)
    assert left(tmp_path / "store") == {"b": 1}


@pytest.mark.parametrize("immediate", [False, True])
def test_item_of_a_hanging_handler_is_released(
    run: Any, tmp_path: Path, immediate: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    begun, over = threading.Event(), threading.Event()

    def handle(task: Any) -> None:
        begun.set()
        over.wait(20)

    def end(queue: mqstore.Queue) -> None:
        queue.shutdown(immediate)
        until(lambda: "run ended" in caplog.text)
        over.set()  # the loop waits for its thread

    def body(queue: mqstore.Queue) -> None:
        later(lambda: end(queue), begun)

    summary = run(["a"], handle, body, grace=0.1)

    assert counts(summary) == (0, 0, 0, 1)
    assert left(tmp_path / "store") == {"a": 1}


def test_closed_store_ends_the_run(tmp_path: Path) -> None:
    store = mqstore.open(tmp_path / "store")
    queue, begun = store.queue("jobs"), threading.Event()
    thread, outcome = in_thread(lambda: queue.run(lambda task: begun.set()))
    queue.put(b"a")
    assert begun.wait(20)
    until(queue.empty)

    store.close()

    assert counts(ended(thread, outcome)) == (1, 0, 0, 0)


def test_exit_of_a_handler_is_raised_by_run(tmp_path: Path) -> None:
    """The item was ready again before the run ended, so that all other workers called the handler with it, too."""
    with mqstore.open(tmp_path / "store") as store:
        queue = store.queue("jobs", codec=mqstore.TEXT)
        queue.put("a")
        calls = []

        def handle(task: mqstore.Task) -> None:
            calls.append(task.value)
            sys.exit(3)

        with pytest.raises(SystemExit, match="3"):
            queue.run(handle, workers=8)

        assert calls == ["a"]
        assert queue.get_nowait().attempt == 1


def test_handler_sees_that_the_run_ends(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "store") as store:
        queue = store.queue("jobs")
        queue.put(b"a")

        def handle(task: mqstore.Task) -> None:
            assert not mqstore.cancelled()
            queue.shutdown(immediate=True)
            until(mqstore.cancelled)

        assert counts(queue.run(handle)) == (1, 0, 0, 0)


def test_run_outside_the_main_thread_leaves_signals_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with mqstore.open(tmp_path / "store") as store:
        queue, begun = store.queue("jobs"), threading.Event()
        queue.put(b"a")
        thread, outcome = in_thread(lambda: queue.run(lambda task: begun.set()))
        assert begun.wait(20)

        assert signal.getsignal(signal.SIGTERM) is before
        queue.shutdown()

        assert counts(ended(thread, outcome)) == (1, 0, 0, 0)


# -- signals, in a child with a ledger --------------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def lines(pipe: int) -> Iterator[str]:
    """Lines of the child."""
    with os.fdopen(os.dup(pipe)) as file:
        yield from (line.rstrip("\n") for line in file)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_the_run_and_nothing_is_lost(run: Any, tmp_path: Path, number: int) -> None:
    items = [str(i) for i in range(200)]

    def work(pipe: int) -> None:
        def handle(task: Any) -> None:
            os.write(pipe, f"{task.value} {task.attempt}\n".encode())
            time.sleep(0.005)

        before = [signal.getsignal(each) for each in SIGNALS]
        summary = run(items, handle, lambda queue: None, grace=20)
        assert [signal.getsignal(each) for each in SIGNALS] == before
        os.write(pipe, f"ended {summary.handled}\n".encode())
        signal.pause()

    ledger: list[str] = []
    with speaking_child(work) as (pid, pipe):
        for line in lines(pipe):
            ledger.append(line)
            if len(ledger) == 20:
                os.kill(pid, number)
            if line.startswith("ended"):
                break

    *begun, last = ledger
    assert last == f"ended {len(begun)}"
    rest = left(tmp_path / "store")
    assert Counter([line.split()[0] for line in begun] + list(rest)) == Counter(items)
    assert {line.split()[1] for line in begun} | {str(attempt) for attempt in rest.values()} == {"1"}


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_a_run_without_items_at_once(run: Any, number: int) -> None:
    def work(pipe: int) -> None:
        timer = threading.Timer(0.3, os.kill, [os.getpid(), number])
        os.write(pipe, f"{counts(run([], print, lambda queue: timer.start(), grace=math.inf))}".encode())
        signal.pause()

    with speaking_child(work, limit_s=30) as (_, pipe):
        assert os.read(pipe, 20) == b"(0, 0, 0, 0)"


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("way", ["threads", "coroutines"])
def test_second_signal_ends_the_run_at_once(tmp_path: Path, way: str, number: int) -> None:
    """The first one is sent by the handler, which hangs."""

    def work(pipe: int) -> None:
        def threads() -> None:
            def handle(task: mqstore.Task) -> None:
                os.kill(os.getpid(), number)
                until(mqstore.cancelled)
                os.write(pipe, b"stopping\n")
                time.sleep(60)

            with mqstore.open(tmp_path / "store") as store:
                queue = store.queue("jobs", codec=mqstore.TEXT)
                queue.put("a")
                queue.run(handle, grace=60)

        async def coroutines() -> None:
            async def handle(task: aio.Task) -> None:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0)
                os.write(pipe, b"stopping\n")
                await asyncio.sleep(60)

            async with aio.open(tmp_path / "store") as store, store.queue("jobs", codec=mqstore.TEXT) as queue:
                await queue.put("a")
                await queue.run(handle, grace=60)

        try:
            threads() if way == "threads" else asyncio.run(coroutines())
        except KeyboardInterrupt:
            os.write(pipe, f"{left(tmp_path / 'store')}\n".encode())
        signal.pause()

    with speaking_child(work) as (pid, pipe):
        told = lines(pipe)
        assert next(told) == "stopping"
        os.kill(pid, number)
        assert next(told) == "{'a': 1}"


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers must be"),
        ({"workers": 1.5}, "workers must be"),
        ({"grace": -1}, "grace must be"),
        ({"rate": "ten"}, "rate is a number per s, m, h or d"),
        ({"rate_per": len}, "needs a rate"),
        ({"rate": "1/s", "rate_per": "host"}, "rate_per is a function"),
    ],
)
def test_bad_options_are_refused(run: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run([], print, drained, **options)


async def _coroutine(task: object) -> None: ...


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (None, "a handler is something to call"),
        (lambda: None, "called with one argument"),
        (_coroutine, "coroutine function; those are for mqstore.aio"),
    ],
)
def test_function_that_is_no_handler_is_refused(tmp_path: Path, handler: Any, words: str) -> None:
    with mqstore.open(tmp_path / "store") as store, pytest.raises(ConfigError, match=words):
        store.queue("jobs").run(handler)


# -- asyncio alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancels", [1, 2])
def test_cancelled_run_stops_as_after_a_signal(tmp_path: Path, cancels: int) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "store") as store:
            queue = await store.queue("jobs", codec=mqstore.TEXT)
            begun, over = asyncio.Event(), asyncio.Event()
            await queue.put_many(["a", "b"])

            async def handle(task: aio.Task) -> None:
                begun.set()
                await over.wait()

            running = asyncio.create_task(queue.run(handle, workers=1))
            await begun.wait()
            for _ in range(cancels):
                running.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            over.set() if cancels == 1 else None
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())

    assert left(tmp_path / "store") == ({"b": 1} if cancels == 1 else {"a": 1, "b": 1})


def test_handler_cancelled_by_something_else_has_failed(tmp_path: Path) -> None:
    async def main() -> Any:
        async with aio.open(tmp_path / "store") as store, store.queue("jobs") as queue:
            await queue.put_many([b"a", b"b"])
            await queue.shutdown()

            async def handle(task: aio.Task) -> None:
                if task.value == b"a":
                    inner = asyncio.create_task(asyncio.sleep(60))
                    inner.cancel()
                    await inner

            return await queue.run(handle, workers=1)

    assert counts(asyncio.run(main())) == (1, 1, 0, 0)


def test_item_of_a_coroutine_that_cannot_be_cancelled_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mqstore.aio.queue._CANCEL_S", 0.05)

    async def main() -> Any:
        async with aio.open(tmp_path / "store") as store, store.queue("jobs", codec=mqstore.TEXT) as queue:
            over = asyncio.Event()
            await queue.put("a")

            async def handle(task: aio.Task[str]) -> None:
                await queue.shutdown()
                while not over.is_set():
                    try:
                        await over.wait()
                    except asyncio.CancelledError:
                        continue

            summary = await queue.run(handle, grace=0.05)
            over.set()
            return summary

    assert counts(asyncio.run(main())) == (0, 0, 0, 1)
    assert "the handlers of 1 items did not end in time" in caplog.text
    assert left(tmp_path / "store") == {"a": 1}
