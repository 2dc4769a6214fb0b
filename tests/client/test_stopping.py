"""Stopping and closing at a bad moment: amid a signal, out of a handler, before a block runs, while handlers hang."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import Message, Store, cancelled
from mqstore.client.push.workers import at_signals
from tests.children import fork
from tests.client.aiosupport import in_store
from tests.client.pushsupport import hook
from tests.client.support import ended, in_thread, subscribed, until, workers_of
from tests.holding import new_threads


def test_interrupted_stop_has_given_the_queues_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group stood still for a minute, and a second `stop` did nothing."""
    store.create_topic("t", queues=2)
    first = subscribed(store, print).start()

    def interrupted(timeout_s: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workers_of(first), "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.stop()
    first.stop()
    assert store.broker.members.members("g") == []
    workers_of(first).stop(30)
    got = threading.Event()
    second = subscribed(store, lambda message: got.set())
    with second:
        store.put("t", b"x")
        assert got.wait(20)


def test_stop_in_a_signal_handler_during_stop_does_not_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated SIGTERM took the whole timeout, and then whoever supervises sends SIGKILL."""
    store.create_topic("t", queues=1)
    consumer = subscribed(store, print).start()
    stop, again = workers_of(consumer).stop, []

    def stopping(timeout_s: float) -> bool:
        again.append(consumer.stop(3600))  # as the handler of a signal that comes now
        return stop(timeout_s)

    monkeypatch.setattr(workers_of(consumer), "stop", stopping)
    assert consumer.stop(30)
    assert again == [False]


@pytest.mark.parametrize(
    ("mode", "ordered", "late"),
    [
        ("queue", False, None),
        ("queue", True, ValueError("late")),
        ("pop", False, ValueError("late")),
        ("pop", True, None),
    ],
)
def test_hanging_handler_is_void_and_the_rest_is_settled(
    store: Store, mode: Any, ordered: bool, late: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go, before = threading.Event(), threading.Event(), set(threading.enumerate())
    flags: list[bool] = []

    def handle(message: Message) -> None:
        if message.body == b"1":
            begun.set()
            go.wait(20)
            flags.append(cancelled())
            if late is not None:
                raise late

    store.create_topic("t", queues=1)
    store.put_many("t", [b"0", b"1", b"2"])
    consumer = subscribed(store, handle, mode=mode, ordered=ordered, workers=1).start()
    assert begun.wait(20)
    assert [consumer.stop(0.05), consumer.stop(0.05)] == [False, False]
    assert "handlers still run" in caplog.text
    assert store.broker.members.members("g") == []
    for then in (go.set, lambda: None):
        assert sum(store.lag("g").values()) == 2  # neither settled nor sent back
        assert [each.offset for each in store.broker.pending("g")] == [1] * (mode == "pop")  # the last one is released
        then()
        assert not new_threads(before)
    assert flags == [True]
    assert store.broker.topics.get("%RETRY%g") is None


@in_store
async def test_consumer_does_not_run_if_its_block_was_not_entered(store: mqstore.aio.Store) -> None:
    await store.create_topic("t", queues=1)

    async def handle(message: Message) -> None:
        raise AssertionError(message)

    for turns in range(4):
        consumer = await store.push_consumer("g")
        consumer.subscribe("t", handle)

        async def use(consumer: mqstore.aio.PushConsumer = consumer) -> None:
            async with consumer:
                await asyncio.sleep(600)

        task = asyncio.create_task(use())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert "running" not in repr(consumer)
    assert store.sync.broker.members.members("g") == []


def test_handler_may_close_the_store(tmp_path: Path) -> None:
    """It waited for itself until its time was over and the handler was cancelled: the message came again."""

    async def run() -> None:
        store = await mqstore.aio.open(tmp_path / "s")
        await store.create_topic("t", queues=1)
        ended = asyncio.Event()

        async def handle(message: Message) -> None:
            await store.close(timeout=600)
            ended.set()

        consumer = await store.push_consumer("g")
        consumer.subscribe("t", handle)
        await consumer.start()
        await store.put("t", b"x")
        await asyncio.wait_for(ended.wait(), 60)
        await store.close()

    asyncio.run(run())
    with mqstore.open(tmp_path / "s") as again:
        assert again.lag("g") == {mqstore.QueueRef("t", 0): 0}


# --- several consumers -----------------------------------------------------------------------------------------------


class Crowd:
    """Consumers whose handlers hang, and one that is at many messages."""

    def __init__(self, store: Store, hung: int, options: dict[str, Any]) -> None:
        self.let_go = threading.Event()
        self.begun = 0
        hang = threading.Semaphore(0)

        def hangs(message: Message) -> None:
            hang.release()
            self.let_go.wait(60)

        def goes_on(message: Message) -> None:
            self.begun += 1
            self.let_go.wait(0.002)

        store.put_many("busy", [b"x"] * 3_000, queue_id=0)
        store.put("t", b"x")
        for i in range(hung):
            consumer = store.push_consumer(f"hung{i}", workers=1, **options)
            consumer.subscribe("t", hangs)
            consumer.start()
        self.busy = store.push_consumer("busy", workers=1, **options)
        self.busy.subscribe("busy", goes_on)
        self.busy.start()
        for _ in range(hung):
            assert hang.acquire(timeout=20)
        until(lambda: self.begun)


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"mode": "pop"}, {"mode": "pop", "ordered": True}])
def test_store_close_waits_once_and_begins_no_handler(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each had the whole timeout, one after the other, and those whose turn had not come went on with new messages."""
    store = mqstore.open(tmp_path / "s")
    crowd = Crowd(store, 12, options)
    begin, begun = time.monotonic(), crowd.begun
    store.close(0.7)
    took_s = time.monotonic() - begin
    crowd.let_go.set()
    assert crowd.begun <= begun + 50  # on their way while `close` is called
    assert 0.6 < took_s < 6  # one after the other takes more than eight, and a busy machine less than two
    assert caplog.text.count("handlers still run") == 12  # of those that do; the other one has ended in time


def test_exit_waits_once_for_all_stores(tmp_path: Path) -> None:
    """With four consumers in handlers that hung it took 20 s."""
    program = """
        import sys, threading, mqstore, mqstore.store
        mqstore.store._EXIT_S = 0.5
        begun = threading.Semaphore(0)
        def hangs(message):
            begun.release()
            threading.Event().wait()
        for i in range(6):
            if i % 3 == 0:
                store = mqstore.open(f"{sys.argv[1]}/{i}")
                store.put("t", b"x")
            consumer = store.push_consumer(f"g{i}", workers=1)
            consumer.subscribe("t", hangs)
            consumer.start()
        for _ in range(6):
            assert begun.acquire(timeout=20)
        import time
        print(time.time(), flush=True)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=True, timeout=60, capture_output=True
    )
    assert time.time() - float(ran.stdout) < 4


def test_submitted_messages_are_stored_while_handlers_hang(tmp_path: Path) -> None:
    store = mqstore.open(tmp_path / "s")
    crowd = Crowd(store, 1, {})
    producer = store.producer(linger=30)
    future = producer.submit("late", b"x")
    store.close(0.2)
    crowd.let_go.set()
    assert future.result(0).queue.topic == "late"


def test_aio_store_close_waits_once_for_all_consumers(tmp_path: Path) -> None:
    async def run() -> tuple[float, int, int]:
        store = await mqstore.aio.open(tmp_path / "s")
        crowd = await asyncio.to_thread(Crowd, store.sync, 5, {})
        begun = asyncio.Event()

        async def handle(message: Message) -> None:
            begun.set()
            await asyncio.sleep(600)

        consumer = await store.push_consumer("g")
        consumer.subscribe("t", handle)
        await consumer.start()
        await begun.wait()
        begin, before = time.monotonic(), crowd.begun
        await store.close(1.5)
        crowd.let_go.set()
        return time.monotonic() - begin, before, crowd.begun

    took_s, before, after = asyncio.run(run())
    assert after <= before + 50
    assert took_s < 6  # one after the other takes nine


def test_idle_consumers_are_closed_before_hanging_ones(tmp_path: Path) -> None:
    """A process that is killed while it waits for one handler has the progress of the others on disk."""
    store = mqstore.open(tmp_path / "s")
    revoked: list[bool] = []

    idle = hook(on_revoke=lambda queues: revoked.append(not crowd.let_go.is_set()))
    before = [store.push_consumer(f"idle{i}", workers=1, interceptors=[idle]) for i in range(4)]
    for consumer in before:
        consumer.subscribe("nothing", print)
        consumer.start()
    store.create_topic("nothing", queues=1)
    until(lambda: all(consumer.assignment() for consumer in before))
    crowd = Crowd(store, 3, {})
    closing = in_thread(lambda: store.close(20))
    try:
        until(lambda: len(revoked) == 4)
    finally:
        crowd.let_go.set()
    ended(*closing, 30)
    assert revoked == [True] * 4


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that a handler of the program, such as that of uvicorn, has got."""
    numbers: list[int] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, lambda number, frame: numbers.append(number))
    yield numbers
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ended_before", [0, 1, 2])
def test_signal_ends_every_run_of_a_loop(tmp_path: Path, heard: list[int], number: int, ended_before: int) -> None:
    """Only the last one of two queues ended, and a server with a run in its lifespan did not."""
    before = signal.getsignal(number)

    async def main() -> None:
        started = asyncio.Event()

        async def handle(delivered: Any) -> None:
            started.set()

        if number == signal.SIGINT:
            signal.signal(number, before)  # in place of the handler of `asyncio.run`
        async with mqstore.aio.open(tmp_path / "store") as store:
            queues = [await store.queue(name) for name in ("a", "b")]
            consumer = await store.push_consumer("g")
            consumer.subscribe("t", handle)
            runs = [asyncio.create_task(run) for run in (*(q.run(handle) for q in queues), consumer.run())]
            await store.put("t", b"x")
            await started.wait()
            for queue, run in zip(queues[:ended_before], runs, strict=False):
                await queue.shutdown()
                await run

            signal.raise_signal(number)

            await asyncio.wait_for(asyncio.gather(*runs), 30)
        assert heard == [number]
        assert signal.getsignal(number) is before

    asyncio.run(main())


def test_signal_during_a_start_ends_the_run(tmp_path: Path, heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` raised StoreClosedError, because the consumer was stopped before it had started."""

    async def main() -> None:
        async with mqstore.aio.open(tmp_path / "store") as store:
            consumer = await store.push_consumer("g")
            consumer.subscribe("t", print)
            stopped = threading.Event()
            start, stop = consumer.sync.start, consumer.sync.stop

            def start_late() -> object:
                asyncio.run_coroutine_threadsafe(asyncio.to_thread(signal.raise_signal, signal.SIGTERM), loop).result()
                until(lambda: heard == [signal.SIGTERM])
                stopped.wait(0.3)
                return start()

            def stop_and_tell(timeout: Any) -> bool:
                ended = stop(timeout)
                stopped.set()
                return ended

            loop = asyncio.get_running_loop()
            monkeypatch.setattr(consumer.sync, "start", start_late)
            monkeypatch.setattr(consumer.sync, "stop", stop_and_tell)
            assert await consumer.run() is True

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["queue", "push_consumer"])
def test_signal_that_does_not_wake_the_loop_ends_the_run(tmp_path: Path, heard: list[int], kind: str) -> None:
    """Like one that comes right before the loop waits. A thread that raises it does not wake the loop either."""

    async def main() -> None:
        async with mqstore.aio.open(tmp_path / "store") as store:
            started = asyncio.Event()

            async def handle(delivered: Any) -> None:
                started.set()

            if kind == "queue":
                queue = await store.queue("t")
                run = asyncio.create_task(queue.run(handle))
            else:
                consumer = await store.push_consumer("g")
                consumer.subscribe("t", handle)
                run = asyncio.create_task(consumer.run())
            await store.put("t", b"x")
            await started.wait()
            threading.Timer(0.2, signal.raise_signal, [signal.SIGTERM]).start()

            await asyncio.wait_for(run, 30)

    asyncio.run(main())


def test_child_forked_by_a_handler_dies_of_a_signal(store: Store) -> None:
    """It called `stop` of its copy of the run, so `terminate` of a process or a pool had no effect."""
    codes: list[int] = []
    reader, writer = os.pipe()

    def work() -> None:
        os.write(writer, b".")
        until(lambda: False)

    def handle(task: mqstore.Task) -> None:
        pid = fork(work, limit_s=10)
        os.read(reader, 1)  # a signal during the fork is lost
        os.kill(pid, signal.SIGTERM)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    queue = store.queue("jobs")
    queue.put(b"a")
    queue.shutdown()
    queue.run(handle)

    os.close(reader)
    os.close(writer)
    assert codes == [-signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_handler_that_would_exit_does_not_end_a_run_before_its_grace(tmp_path: Path, number: int) -> None:
    """It ended the loop, which cancelled the handlers of items. The handler of SIGINT of `asyncio.run` would, too."""

    def leave(*_: object) -> None:
        sys.exit(1)

    async def handle(task: Any) -> None:
        signal.raise_signal(number)
        await asyncio.sleep(0)

    async def main() -> int:
        async with mqstore.aio.open(tmp_path / "store") as store:
            queue = await store.queue("jobs")
            await queue.put(b"a")
            return (await queue.run(handle, grace=30)).handled

    before = signal.signal(signal.SIGTERM, leave)
    try:
        assert asyncio.run(main()) == 1
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, before)


def test_run_of_the_main_thread_returns_though_the_program_would_exit(store: Store) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        queue = store.queue("jobs")
        queue.put(b"a")

        assert queue.run(lambda task: signal.raise_signal(signal.SIGTERM), grace=30).handled == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handler_set_within_a_run_is_called_once_and_may_call_that_before(heard: list[int]) -> None:
    """With a second run that began after it, it called itself by way of the runs' handler, without end."""
    called: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with at_signals(lambda: called.append("outer"), on_loop=True):
        replaced: Any = signal.getsignal(signal.SIGTERM)

        def server(number: int, frame: Any) -> None:
            called.append("server")
            replaced(number, frame)

        signal.signal(signal.SIGTERM, server)
        with at_signals(lambda: called.append("inner"), on_loop=True):
            signal.raise_signal(signal.SIGTERM)
        assert called == ["inner", "server", "outer"]
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is server
        signal.signal(signal.SIGTERM, replaced)  # as uvicorn does at its end
    assert signal.getsignal(signal.SIGTERM) is before
    with at_signals(lambda: None):
        signal.signal(signal.SIGTERM, server)
    assert signal.getsignal(signal.SIGTERM) is server
