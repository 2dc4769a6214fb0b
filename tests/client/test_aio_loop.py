"""What the asyncio classes do on the loop, and that nothing of it waits for a lock or the disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

import mqstore
from mqstore import aio
from mqstore.broker.broker import Broker
from mqstore.native import kernel
from tests.client.aiosupport import in_store, on_thread, slow_flush
from tests.client.support import elsewhere
from tests.without import compiled

VERBS: dict[str, Callable[[aio.Task], Awaitable[object]]] = {
    "ack": lambda task: task.ack(),
    "nack": lambda task: task.nack(0),
    "extend": lambda task: task.extend(60),
    "reject": lambda task: task.reject("bad"),
    "clean end": lambda task: leave(task, None),
    "failed end": lambda task: leave(task, ValueError("no")),
}


async def leave(task: aio.Task, error: Exception | None) -> None:
    """Leave the block of a task, by an error or without one."""
    try:
        async with task:
            if error is not None:
                raise error
    except ValueError:
        pass


async def turns(count: int = 50) -> None:
    """Let the other tasks of the loop go on."""
    for _ in range(count):
        await asyncio.sleep(0)


@contextmanager
def busy(store: aio.Store) -> Iterator[None]:
    """Keep the store's thread busy. Calls that wait for it fail after 5 seconds."""
    done = threading.Event()
    in_time: SimpleQueue[bool] = SimpleQueue()
    on_thread(store, lambda: in_time.put(done.wait(5)))
    try:
        yield
    finally:
        done.set()
    assert in_time.get(timeout=20)


@contextmanager
def held_log(store: aio.Store) -> Iterator[None]:
    """Hold the log, as a bulk append does."""
    log = store.sync.log.wakeups.log
    with log.lock:  # else an append of another thread would release it
        log.hold()
        try:
            yield
        finally:
            log.release()


def queue_lock(store: aio.Store) -> Any:
    [state] = (each for each in store.sync.broker._pop.tables.states.values() if each.key.topic == "jobs")
    return state.lock


async def leased(store: aio.Store, count: int) -> tuple[aio.Queue, list[aio.Task]]:
    """Return a queue with two items left, both read ahead, and the tasks of the `count` before them."""
    queue = await store.queue("jobs")
    await queue.put_many([b"%d" % i for i in range(count + 2)])
    tasks = [await queue.get() for _ in range(count)]
    return queue, tasks


@compiled
@in_store
async def test_get_and_ack_of_items_that_were_read_ahead_need_no_thread(store: aio.Store) -> None:
    queue, [task, in_block] = await leased(store, 2)
    with busy(store):
        async with in_block:
            await queue.ack(task)
        assert [(await queue.get()).value, (await queue.get_nowait()).value] == [b"2", b"3"]
        assert store.sync.broker.stats().in_flight == 2
    assert [task.settled, in_block.settled] == [True, True]


@compiled
@in_store
async def test_a_broker_asked_at_once_declines_what_would_wait(store: aio.Store) -> None:
    broker = store.sync.broker
    await (await store.queue("jobs")).put_many([b"0", b"1", b"2"])
    [delivery] = broker.pop("jobs", "jobs")
    assert broker.pop_at_once("nobody", "jobs", 1, 60_000, False) == []
    for n, invisible_ms in ((33, 60_000), (1, 50), (1, 50_000_000)):
        assert broker.pop_at_once("jobs", "jobs", n, invisible_ms, False) == []
    assert broker.groups.get("nobody") is None
    assert broker.stats().in_flight == 1
    assert len(broker.pop_at_once("jobs", "jobs", 1, 60_000, False)) == 1
    assert broker.ack_at_once("jobs", "jobs", [delivery.receipt]) == 1
    assert broker.stats().in_flight == 1


@in_store
async def test_prefetch_is_not_delivered_after_shutdown(store: aio.Store) -> None:
    queue, _ = await leased(store, 1)
    await queue.shutdown(immediate=True)
    with pytest.raises(mqstore.QueueShutDown):
        await queue.get()


@in_store
async def test_failed_messages_precede_the_prefetch(store: aio.Store) -> None:
    queue, _ = await leased(store, 2)
    broker = store.sync.broker
    first, second = await store.read("jobs", 0, 0, 2)
    attempts = []
    for failed, gets, count in ((first, 2, 1), (second, 1, 2)):
        broker.send_back("jobs", failed.physical_offset, delay=0)
        while (broker.store.offsets_or_none("%RETRY%jobs", 0) or (0, 0)) != (0, count):
            await asyncio.sleep(0.01)
        attempts += [(await queue.get()).attempt for _ in range(gets)]
    assert attempts == [2, 1, 2]


@pytest.mark.parametrize("lock", [held_log, queue_lock])
@pytest.mark.parametrize("what", ["get", *VERBS])
@in_store
async def test_a_lock_that_another_thread_holds_does_not_hold_up_the_loop(
    store: aio.Store, what: str, lock: Callable[[aio.Store], Any]
) -> None:
    queue, [task] = await leased(store, 1)
    with elsewhere(lock(store), 5):
        waiting = asyncio.ensure_future(queue.get() if what == "get" else VERBS[what](task))
        await turns()
        # The journal needs no lock of the log. Compiled code writes it on the loop, Python on the thread of the store.
        journal = isinstance(store.sync.broker, Broker) and what in ("get", "ack", "clean end")
        if journal and lock is held_log and kernel is None:
            await waiting
        assert waiting.done() is (journal and lock is held_log)
    await waiting
    assert task.settled is (what not in ("get", "extend"))


@pytest.mark.parametrize("what", ["get", "put", "bounded put", "send", *VERBS])
@in_store(durability="flush")
async def test_a_sync_that_is_waited_for_does_not_hold_up_the_loop(store: aio.Store, what: str) -> None:
    queue, [task] = await leased(store, 1)
    bounded = await store.queue("bounded", maxsize=5)
    producer = await store.producer()
    async with slow_flush(store) as begun:
        calls = {
            **VERBS,
            "get": lambda task: queue.get(),
            "put": lambda task: queue.put(b"x"),
            "bounded put": lambda task: bounded.put(b"x"),
            "send": lambda task: producer.send("jobs", b"x"),
        }
        waiting = asyncio.ensure_future(calls[what](task))
        await begun()
        await turns()
        assert not waiting.done()
    await waiting


@in_store
async def test_a_put_behind_a_full_segment_waits_on_the_thread(
    store: aio.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create_topic("t")
    await store.put("t", b"first", queue_id=0)
    with busy(store):
        here = await store.put("t", b"there is room", queue_id=0)
        monkeypatch.setattr(store.sync.broker, "has_room", lambda size: False)
        waiting = asyncio.ensure_future(store.put("t", b"there is none", queue_id=0))
        await turns()
        assert not waiting.done()
    assert [here.offset, (await waiting).offset] == [1, 2]


@pytest.mark.parametrize("what", ["put", "get", "ack", "clean end"])
@in_store
async def test_a_loop_of_calls_that_do_not_wait_lets_others_have_their_turn(store: aio.Store, what: str) -> None:
    queue = await store.queue("jobs")
    await queue.put_many([b"x"] * 2000)
    tasks = await queue.get_many(1000)
    calls: dict[str, Callable[[int], Awaitable[object]]] = {
        "put": lambda i: queue.put(b"x"),
        "get": lambda i: queue.get(),
        "ack": lambda i: queue.ack(tasks[i]),
        "clean end": lambda i: leave(tasks[i], None),
    }
    count = 0

    async def other() -> None:
        nonlocal count
        while True:
            count += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(other())
    for i in range(1000):
        await calls[what](i)
    others.cancel()
    assert count >= 1000 // 300


@pytest.mark.parametrize("durability", ["append", "flush"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_is_cancelled_anywhere_is_done_or_not_begun(tmp_path: Any, verb: str, durability: Any) -> None:
    """The item is settled once, and its task says so; or it is in flight, and can still be settled."""

    @in_store(durability=durability)
    async def test(store: aio.Store, steps: int) -> None:
        name = f"jobs{steps}"
        queue = await store.queue(name, retry=mqstore.RetryPolicy(5, [0]))
        await queue.put(b"x")
        task = await queue.get()
        settling = asyncio.ensure_future(VERBS[verb](task))
        await turns(steps)
        settling.cancel()
        await asyncio.wait([settling])
        await store.topics()  # behind whatever the thread was given
        assert task.settled or steps == 0 or verb == "extend"
        done = {"nack": "nack", "failed end": "nack", "reject": "reject"}.get(verb, "ack") if task.settled else "ack"
        await getattr(task, done)()  # the same verb again does nothing
        left = await queue.get_many(2, timeout=10 if done == "nack" else 0)
        assert [each.attempt for each in left] == [2] * (done == "nack")
        assert await queue.dead_letters.count() == (done == "reject")

    test(tmp_path)


@compiled
@in_store
async def test_item_of_a_cancelled_get_precedes_the_prefetch(store: aio.Store) -> None:
    """A later `get` found the next item read ahead, and overtook the one that the thread had not given back yet."""
    queue, _ = await leased(store, 1)
    taken, go_on = threading.Event(), threading.Event()
    with elsewhere(queue_lock(store), 5):
        cancelled = asyncio.ensure_future(queue.get())
        await turns()  # it looks on the thread, since the lock is held
        on_thread(store, taken.set)
        on_thread(store, lambda: go_on.wait(5))
    assert taken.wait(20)  # the loop has not heard of it
    cancelled.cancel()
    await asyncio.wait([cancelled])
    following = asyncio.ensure_future(queue.get())
    await turns()
    go_on.set()
    task = await following
    assert (task.value, task.attempt) == (b"1", 1)


@in_store
async def test_collected_block_releases_its_item(store: aio.Store) -> None:
    queue, [task] = await leased(store, 1)

    async def block() -> None:
        async with task:
            await asyncio.sleep(0)

    coroutine = block()
    coroutine.send(None)
    coroutine.close()
    assert task.settled
    assert (await queue.get()).value == b"0"


@in_store
async def test_block_of_a_closed_store_raises_its_own_error(store: aio.Store) -> None:
    _, [failed, clean] = await leased(store, 2)
    await store.close()
    with pytest.raises(ZeroDivisionError):
        async with failed:
            raise ZeroDivisionError
    with pytest.raises(mqstore.errors.StoreClosedError):
        async with clean:
            pass
