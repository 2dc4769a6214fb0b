"""Producers and consumers of the asyncio twins: what they do as the sync ones do, handlers as tasks of the loop, and
how those end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import QueueRef, aio
from tests.broker.support import full
from tests.children import speaking_child
from tests.client.aiosupport import in_store, run, slow_flush, until, until_news, with_store
from tests.client.pushsupport import hook
from tests.client.support import parked

AGAIN = mqstore.RetryPolicy(3, [0])


# -- producers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["append", "flush"])
@in_store
async def test_sends_and_submits_are_stored_in_call_order(store: aio.Store, durability: Any) -> None:
    async with store.producer(durability=durability, max_inflight=7) as producer:
        bodies = [b"%04d" % i + bytes(40_000 if i % 9 == 0 else 0) for i in range(100)]
        calls = [
            asyncio.create_task(
                producer.submit("t", body, queue_id=0) if i % 2 else producer.send("t", body, queue_id=0)
            )
            for i, body in enumerate(bodies)
        ]
        receipts = [await each if isinstance(each, asyncio.Future) else each for each in await asyncio.gather(*calls)]
    assert [each.offset for each in receipts] == list(range(100))
    assert [m.body async for m in store.iter("t", 0)] == bodies


@in_store
async def test_nothing_overtakes_what_the_writer_has_not_stored(
    store: aio.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create_topic("t")
    go_on, put = threading.Event(), store.sync.broker.put

    def slow(topic: str, body: bytes, **options: Any) -> mqstore.SendReceipt:
        assert len(body) == 1 or go_on.wait(20)
        return put(topic, body, **options)

    monkeypatch.setattr(store.sync.broker, "put", slow)
    async with store.producer() as producer:
        calls = [asyncio.create_task(producer.send("t", body, queue_id=0)) for body in (bytes(50_000), b"b")]
        for _ in range(20):
            await store.topics()
        calls.append(asyncio.create_task(producer.send("t", b"c", queue_id=0)))
        await store.topics()
        go_on.set()
        assert [each.offset for each in await asyncio.gather(*calls)] == [0, 1, 2]


@in_store
async def test_engine_errors_come_with_the_future(store: aio.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with store.producer() as producer:
        with pytest.raises(mqstore.errors.InvalidMessageError):
            await producer.submit("t", b"x", queue_id=99)
        await producer.send("t", b"x")
    monkeypatch.setattr(store.sync.broker, "put", full)
    async with store.producer() as producer:
        future = await producer.submit("t", b"x")
        for call in (future, producer.send("t", b"x")):
            with pytest.raises(mqstore.errors.StoreFullError):
                await call


@in_store
async def test_no_more_is_on_its_way_than_may_be_and_the_loop_goes_on(store: aio.Store) -> None:
    await store.create_topic("t")
    async with store.producer(durability="flush", max_inflight=3) as producer:
        async with slow_flush(store):
            submits = [asyncio.create_task(producer.submit("t", b"%d" % i, queue_id=0)) for i in range(10)]
            await until(lambda: sum(each.done() for each in submits) >= 3)
            for _ in range(50):
                await asyncio.sleep(0)
            assert sum(each.done() for each in submits) == 3
            assert await store.topics() == ["t"]
        futures = await asyncio.gather(*submits)
        assert [(await each).offset for each in futures] == list(range(10))


@in_store
async def test_lingering_messages_are_stored_on_flush_or_wait(store: aio.Store) -> None:
    await store.create_topic("t")
    async with store.producer(durability="flush", linger=30, max_inflight=2) as producer:
        futures = [await producer.submit("t", b"%d" % i, queue_id=0) for i in range(5)]
        await producer.flush(20)
        assert [(await each).offset for each in futures] == list(range(5))


@in_store
async def test_a_flush_says_when_it_takes_too_long(store: aio.Store) -> None:
    await store.create_topic("t")
    async with store.producer(durability="flush") as producer:
        async with slow_flush(store):
            future = await producer.submit("t", b"x")
            with pytest.raises(mqstore.errors.FlushTimeoutError):
                await producer.flush(0.001)
        await producer.flush()
        assert future.done()


# -- consumers that are asked -----------------------------------------------------------------------------------------


@in_store
async def test_closing_a_consumer_ends_its_waits_with_nothing(store: aio.Store) -> None:
    await store.put("t", b"x")
    simple = await store.simple_consumer("g", {"t": "*"})
    pull = await store.pull_consumer("p")
    await pull.subscribe("t")
    async for delivery in simple:
        await delivery.ack()
        break
    assert len(await pull.poll()) == 1
    waits = [asyncio.create_task(each) for each in (simple.receive(wait=60), pull.poll(60))]
    loops = [asyncio.create_task(_all(each)) for each in (simple, pull)]
    await until(lambda: parked(store.sync.broker) >= 4)
    await simple.close()
    await pull.close()
    assert await asyncio.gather(*waits, *loops) == [[], [], [], []]
    assert await _all(simple) == await _all(pull) == []
    for late in (simple.receive(), pull.poll()):
        with pytest.raises(mqstore.errors.StoreClosedError):
            await late


async def _all(items: Any) -> list[Any]:
    return [each async for each in items]


@in_store
async def test_task_that_closes_commits_only_its_own_polls(store: aio.Store) -> None:
    await store.put("t", b"x", queue_id=0)
    for same, committed in ((False, 0), (True, 1)):
        consumer = await store.pull_consumer(f"g{same}")
        await consumer.subscribe("t")
        polled = consumer.poll() if same else asyncio.create_task(consumer.poll())
        assert len(await polled) == 1
        await consumer.close()
        assert await store.committed(f"g{same}", QueueRef("t", 0)) == committed


# -- push consumers ---------------------------------------------------------------------------------------------------


@in_store
async def test_handler_that_raises_cancelled_has_failed(store: aio.Store) -> None:
    attempts = []
    done = asyncio.Event()
    consumer = await store.push_consumer("g", retry=AGAIN)

    @consumer.subscribe("t")
    async def handle(message: mqstore.Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise asyncio.CancelledError
        done.set()

    await store.put("t", b"x")
    async with consumer:
        await done.wait()
    assert attempts == [1, 2]


@pytest.mark.parametrize("mode", ["queue", "pop"])
@pytest.mark.parametrize("ordered", [False, True])
@in_store
async def test_handlers_that_run_hold_no_thread(store: aio.Store, ordered: bool, mode: Any) -> None:
    """A hundred at a time, as many as there are workers, between the threads of the consumer and those of the store."""

    full, go_on = asyncio.Event(), asyncio.Event()
    running = ended = threads = 0

    async def handle(message: mqstore.Message) -> None:
        nonlocal running, ended, threads
        running += 1
        if running == 100:
            threads = threading.active_count()
            full.set()
        await go_on.wait()
        ended += 1

    await store.create_topic("t", queues=120)
    for i in range(120):
        await store.put("t", b"x", queue_id=i)
    before = threading.active_count()
    consumer = await store.push_consumer("g", workers=100, ordered=ordered, mode=mode)
    consumer.subscribe("t", handle)
    async with consumer, asyncio.timeout(60):
        await full.wait()
        assert (await consumer.stats()).running == 100
        go_on.set()
        await until(lambda: ended == 120)
    assert threads - before <= 4 + 1  # and the one for timers


@in_store
async def test_around_handlers_that_an_interceptor_wraps_there_is_a_thread_each(store: aio.Store) -> None:
    """`around_consume` is a plain function: it sees the call end."""
    seen: list[str] = []

    class Around(mqstore.Interceptor):
        def around_consume(self, call: Any, messages: Any) -> None:
            try:
                call()
            except ValueError:
                seen.append("raised")
                raise
            seen.append("ended")

    all_here = asyncio.Barrier(6)
    done = 0

    async def handle(message: mqstore.Message) -> None:
        nonlocal done
        if message.attempt == 1:
            async with asyncio.timeout(20):
                await all_here.wait()
            assert not seen
            raise ValueError("again")
        done += 1

    consumer = await store.push_consumer("g", workers=6, retry=AGAIN, interceptors=[Around()])
    consumer.subscribe("t", handle)
    async with consumer:
        await store.put_many("t", [b"x"] * 6)
        await until(lambda: done == 6)
    assert sorted(seen) == ["ended"] * 6 + ["raised"] * 6


@pytest.mark.parametrize("where", ["awaiting", "blocking"])
@pytest.mark.parametrize("mode", ["queue", "pop"])
@in_store
async def test_timeout_hook_gets_the_stack_of_a_hanging_handler(store: aio.Store, mode: Any, where: str) -> None:
    stacks: list[str] = []
    told = threading.Event()

    def on_timeout(message: mqstore.Message, stack: str) -> None:
        stacks.append(stack)
        told.set()

    async def hang_here() -> None:
        if where == "blocking":
            told.wait(20)
        else:
            await asyncio.Event().wait()

    async def handle(message: mqstore.Message) -> None:
        await hang_here()

    consumer = await store.push_consumer(
        "g", mode=mode, consume_timeout=0.1, interceptors=[hook(on_timeout=on_timeout)]
    )
    consumer.subscribe("t", handle)
    async with asyncio.timeout(20):
        await consumer.start()
        await store.put("t", b"x")
        await until(lambda: stacks)
        await consumer.stop(0)
    assert "in handle" in stacks[0]
    assert "in hang_here" in stacks[0]
    assert "in wait" in stacks[0].rpartition("in hang_here")[2]


@pytest.mark.parametrize("end", ["at once", "cleans up", "goes on"])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("mode", ["queue", "pop"])
@in_store
async def test_overdue_handler_is_cancelled_before_redelivery(
    store: aio.Store, monkeypatch: pytest.MonkeyPatch, mode: Any, hooked: bool, end: str
) -> None:
    """It ran on beside the next attempt of its message. One that goes on all the same holds its message up for a
    while only."""
    monkeypatch.setattr(aio.pushconsumer, "_GRACE_S", 0.01 if end == "goes on" else 20)
    events: list[str] = []
    again = asyncio.Event()

    async def handle(message: mqstore.Message) -> None:
        attempt = message.attempt
        events.append(f"begin {attempt}")
        if attempt == 2:
            again.set()
            return
        try:
            await asyncio.Event().wait()
        finally:
            if end == "cleans up":
                for _ in range(10):
                    await asyncio.sleep(0)
            elif end == "goes on":
                await again.wait()
            events.append(f"end {attempt}")

    interceptors = [hook(around_consume=lambda call, messages: call())] if hooked else []
    consumer = await store.push_consumer(
        "g", mode=mode, consume_timeout=0.1, retry=AGAIN, interceptors=interceptors, workers=2
    )
    consumer.subscribe("t", handle)
    async with consumer:
        await store.put("t", b"x")
        await until(lambda: len(events) == 3)
    assert events == ["begin 1", *(["begin 2", "end 1"] if end == "goes on" else ["end 1", "begin 2"])]


@pytest.mark.parametrize("mode", ["queue", "pop"])
@in_store
async def test_overdue_handler_of_an_ordered_consumer_is_not_cancelled(store: aio.Store, mode: Any) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    events: list[str] = []

    async def handle(message: mqstore.Message) -> None:
        await told.wait()
        await asyncio.sleep(0)
        events.append(message.text())

    telling = hook(on_timeout=lambda message, stack: loop.call_soon_threadsafe(told.set))
    consumer = await store.push_consumer("g", mode=mode, ordered=True, consume_timeout=0.1, interceptors=[telling])
    consumer.subscribe("t", handle)
    async with consumer:
        await store.put("t", b"x")
        await until(lambda: events)
    assert events == ["x"]


@in_store
async def test_a_plain_function_is_called_on_the_loop(store: aio.Store) -> None:
    threads = []
    done = asyncio.Event()

    def handle(message: mqstore.Message) -> None:
        threads.append(threading.current_thread())
        done.set()

    consumer = await store.push_consumer("g")
    consumer.subscribe("t")(handle)
    async with consumer:
        await store.put("t", b"x")
        await done.wait()
    assert threads == [threading.main_thread()]


@in_store
async def test_a_push_consumer_is_steered_as_its_sync_twin(store: aio.Store) -> None:
    seen: list[bytes] = []

    async def handle(message: mqstore.Message) -> None:
        seen.append(message.body)

    consumer = await store.push_consumer("g", workers=1)
    with pytest.raises(mqstore.errors.ConfigError):
        consumer.subscribe("t", "no handler")  # type: ignore[arg-type]
    consumer.subscribe("t", handle)
    async with consumer:
        consumer.subscribe("u", handle)
        consumer.unsubscribe("t")
        await store.put("t", b"0")
        await store.put("u", b"1")
        await until(lambda: seen)
    assert seen == [b"1"]
    with pytest.raises(mqstore.errors.StoreClosedError):
        consumer.subscribe("v", handle)


@in_store
async def test_stop_waits_for_handlers(store: aio.Store) -> None:
    begun, go_on, told = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(message: mqstore.Message) -> None:
        assert not aio.cancelled()
        begun.set()
        while not aio.cancelled():
            await asyncio.sleep(0.001)
        told.set()
        await go_on.wait()
        await store.topics()  # the store's thread is there for handlers that end

    consumer = await store.push_consumer("g")
    consumer.subscribe("t", handle)
    await consumer.start()
    receipt = await store.put("t", b"x")
    await begun.wait()
    stopping = asyncio.create_task(consumer.stop())
    await told.wait()
    assert not stopping.done()
    go_on.set()
    assert await stopping
    assert await store.committed("g", receipt.queue) == 1
    assert await consumer.stop()  # again
    assert not aio.cancelled()


@pytest.mark.parametrize("mode", ["queue", "pop"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("by_close", [False, True], ids=["stop", "close"])
def test_unfinished_handlers_are_cancelled_and_redelivered(
    tmp_path: Path, ordered: bool, mode: Any, by_close: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = []

    async def test(store: aio.Store) -> None:
        begun = asyncio.Event()

        async def handle(message: mqstore.Message) -> None:
            if message.body == b"good":
                return
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.body)
                raise

        consumer = await store.push_consumer("g", mode=mode, ordered=ordered, workers=1)
        consumer.subscribe("t", handle)
        await store.put_many("t", [b"good", b"hangs", b"behind"], queue_id=0)
        await consumer.start()
        await begun.wait()
        if by_close:
            await store.close(timeout=0.3)
        else:
            assert not await consumer.stop(timeout=0)

    with_store(test, tmp_path)
    assert cancelled == [b"hangs"]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]

    async def again(store: aio.Store) -> None:
        seen = []
        done = asyncio.Event()

        async def handle(message: mqstore.Message) -> None:
            seen.append((message.body, message.attempt))
            if message.body == b"behind":
                done.set()

        consumer = await store.push_consumer("g", mode=mode, ordered=ordered, workers=1)
        consumer.subscribe("t", handle)
        async with consumer:
            await done.wait()
        assert seen == [(b"hangs", 1), (b"behind", 1)]

    with_store(again, tmp_path)


@in_store
async def test_a_handler_may_stop_its_consumer(store: aio.Store) -> None:
    results = []

    async def handle(message: mqstore.Message) -> None:
        results.append(await consumer.stop())

    consumer = await store.push_consumer("g")
    consumer.subscribe("t", handle)
    await consumer.start()
    receipt = await store.put("t", b"x")
    await until(lambda: results)
    assert await consumer.stop()
    assert results == [False]
    assert await store.committed("g", receipt.queue) == 1


def test_the_end_of_the_loop_settles_nothing_that_was_not_done(tmp_path: Path) -> None:
    async def main() -> None:
        store = await aio.open(tmp_path / "store")
        stores.append(store)
        begun = asyncio.Event()

        async def handle(message: mqstore.Message) -> None:
            asyncio.current_task()._log_destroy_pending = False  # type: ignore[union-attr]  # of one begun too late
            begun.set()
            await asyncio.Event().wait()

        consumer = await store.push_consumer("g", retry=AGAIN)
        consumer.subscribe("t", handle)
        await consumer.start()
        await store.put_many("t", [b"a", b"b"], queue_id=0)
        await begun.wait()

    stores: list[aio.Store] = []
    asyncio.run(main())
    stores[0].sync.close()
    with mqstore.open(tmp_path / "store") as store:
        offset = store.committed("g", QueueRef("t", 0)) or 0
        left = [m.body for m in store.read("t", 0, offset)]
        # What asyncio.run cancelled counts as a failure, and comes again. A handler that began after that was cut off,
        # and settled nothing.
        again = [m.body for m in store.read("%RETRY%g", 0, 0)] if "%RETRY%g" in store.topics(system=True) else []
        assert sorted({*left, *again}) == [b"a", b"b"]


@pytest.mark.parametrize("when", ["in it", "before it"])
def test_a_loop_that_is_closed_under_a_handler_keeps_nobody_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    gc.collect()
    caplog.clear()  # what other tests left is not looked at

    async def main() -> aio.Store:
        store = await aio.open(tmp_path / "store")
        begun = asyncio.Event()

        async def handle(message: mqstore.Message) -> None:
            asyncio.current_task()._log_destroy_pending = False  # type: ignore[union-attr]  # it is meant to
            begun.set()
            await asyncio.Event().wait()

        consumer = await store.push_consumer("g")
        consumer.subscribe("t", handle)
        await consumer.start()
        if when == "in it":
            await store.put("t", b"a")
            await begun.wait()
        else:
            store.sync.put("t", b"a")
            until_news(store)  # a worker wants it begun; the loop stands still meanwhile
        return store

    loop = asyncio.new_event_loop()
    store = loop.run_until_complete(main())
    loop.close()
    store.sync.close()
    gc.collect()
    assert "still run" not in caplog.text
    assert "destroyed" not in caplog.text
    with mqstore.open(tmp_path / "store") as again:
        assert sum(again.broker.lag("g").values()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_ends_with_a_signal_when_handlers_have_ended(tmp_path: Path, number: signal.Signals) -> None:
    async def main(pipe: int) -> None:
        async with aio.open(tmp_path / "store") as store:
            consumer = await store.push_consumer("g")

            @consumer.subscribe("t")
            async def handle(message: mqstore.Message) -> None:
                os.write(pipe, b"begun")
                while not aio.cancelled():
                    await asyncio.sleep(0.001)
                ended.append(message.body)

            ended: list[bytes] = []
            await store.put("t", b"x", queue_id=0)
            assert await consumer.run()
            assert ended == [b"x"]
            assert await store.committed("g", QueueRef("t", 0)) == 1
        os.write(pipe, b"ended")
        signal.pause()

    with speaking_child(lambda pipe: asyncio.run(main(pipe))) as (pid, pipe):
        assert os.read(pipe, 10) == b"begun"
        os.kill(pid, number)
        assert os.read(pipe, 10) == b"ended"


def test_a_handler_that_exits_ends_the_loop_and_settles_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "store") as store:
            consumer = await store.push_consumer("g")

            @consumer.subscribe("t")
            async def handle(message: mqstore.Message) -> None:
                raise SystemExit(3)

            await consumer.start()
            await store.put("t", b"x", queue_id=0)
            await asyncio.Event().wait()

    with pytest.raises(SystemExit, match="3"):
        run(main())
    with mqstore.open(tmp_path / "store") as store:
        assert store.recovery.clean_shutdown
        assert not store.committed("g", QueueRef("t", 0))
