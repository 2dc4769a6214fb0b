"""The asyncio twins: that they offer what the sync classes do, do what those do, lose nothing when they are cancelled
wherever they may be, need no threads, and end well. `asyncio.run` runs each test; time is the loop's only where nobody
waits for it to pass."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import mqstore
from mqstore import aio
from tests.children import speaking_child
from tests.client.aiosupport import environment, in_store, on_thread, run, until, with_store
from tests.client.support import parked

# -- the same objects -------------------------------------------------------------------------------------------------

TWINS = [
    (mqstore.Store, aio.Store),
    (mqstore.Queue, aio.Queue),
    (mqstore.Task, aio.Task),
    (mqstore.Producer, aio.Producer),
    (get_type_hints(mqstore.Producer.transaction)["return"], aio.Transaction),
    (mqstore.SimpleConsumer, aio.SimpleConsumer),
    (mqstore.Delivery, aio.Delivery),
    (mqstore.PullConsumer, aio.PullConsumer),
    (mqstore.PushConsumer, aio.PushConsumer),
    (mqstore.admin.DeadLetters, aio.DeadLetters),
]
NOT_THERE = {
    (mqstore.Store, "broker"),  # and `log`, an attribute: by way of `store.sync`
    (mqstore.admin.DeadLetters, "as_new"),  # for jobs that send letters of many stores again
}
PLAIN = {  # called without await: iterators, what makes objects, decorators
    (aio.Store, "iter"),
    (aio.Store, "verify"),
    (aio.Store, "queue"),
    (aio.Queue, "items"),
    (aio.Store, "producer"),
    (aio.Store, "simple_consumer"),
    (aio.Store, "pull_consumer"),
    (aio.Store, "push_consumer"),
    (aio.Store, "dead_letters"),
    (aio.Producer, "transaction"),
    (aio.PushConsumer, "subscribe"),
    (aio.PushConsumer, "unsubscribe"),
    (aio.DeadLetters, "select"),
}
PUBLIC = [
    (sync, twin, name)
    for sync, twin in TWINS
    for name in dir(sync)
    if not name.startswith("_") and (sync, name) not in NOT_THERE
]


@pytest.mark.parametrize(("sync", "twin", "name"), PUBLIC, ids=[f"{s.__name__}.{n}" for s, _, n in PUBLIC])
def test_a_twin_offers_every_public_name_with_the_same_parameters(sync: type, twin: type, name: str) -> None:
    theirs = getattr(sync, name)
    if name in getattr(sync, "__slots__", ()) or not callable(theirs):  # an attribute is one here, too, or takes a call
        assert name in dir(twin) or name in getattr(twin, "__slots__", ())
        return

    ours = getattr(twin, name)
    assert (twin, name) in PLAIN or inspect.iscoroutinefunction(ours)
    assert ours.__name__ == name  # which is the method that it calls
    assert ours.__doc__
    assert [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()] == [
        (p.name, p.kind, p.default) for p in inspect.signature(theirs).parameters.values()
    ]


def test_a_twin_can_be_entered_and_walked_through_where_the_sync_class_can() -> None:
    missing = [
        (twin, aname)
        for sync, twin in TWINS
        for name, aname in (("__enter__", "__aenter__"), ("__exit__", "__aexit__"), ("__iter__", "__aiter__"))
        if hasattr(sync, name) and not hasattr(twin, aname)
    ]

    assert missing == []


def test_open_takes_what_the_sync_open_takes() -> None:
    assert list(inspect.signature(aio.open).parameters.values()) == list(
        inspect.signature(mqstore.open).parameters.values()
    )


def test_module_is_loaded_lazily_without_a_thread() -> None:
    code = """
        import sys, threading
        import mqstore
        assert "asyncio" not in sys.modules, "asyncio"
        mqstore.aio.open
        assert threading.active_count() == 1
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, env=environment())


# -- a store ----------------------------------------------------------------------------------------------------------


@in_store
async def test_errors_are_those_of_the_sync_twin(store: aio.Store) -> None:
    with pytest.raises(mqstore.errors.TopicNotFoundError):
        await store.read("none", 0, 0)
    with pytest.raises(mqstore.errors.InvalidMessageError):
        await store.put("t", "text")  # type: ignore[arg-type]
    with pytest.raises(mqstore.errors.ConfigError):
        await store.queue("q", maxsize=-1)
    await store.put("t", b"x", queue_id=0)
    with pytest.raises(mqstore.errors.OffsetOutOfRangeError):
        await store.read("t", 0, 7)
    with pytest.raises(mqstore.errors.OffsetOutOfRangeError):
        async for _ in store.iter("t", 0, start=9):
            pass
    with pytest.raises(mqstore.errors.StoreLockedError):
        await aio.open(store.path)
    with pytest.raises(AttributeError, match="mode can only be read"):
        store.mode = "r"  # type: ignore[misc]


@in_store
async def test_object_that_was_not_awaited_says_so(store: aio.Store) -> None:
    with pytest.raises(AttributeError, match="no 'put' before `await`, as in `queue = await"):
        store.queue("jobs").put(b"x")  # type: ignore[attr-defined]


@in_store
async def test_arguments_count_as_they_were_when_the_call_began(store: aio.Store) -> None:
    """A caller that does not wait, or was cancelled, may use its lists and buffers for something else."""

    queue = (await store.put_many("t", [b"0", b"1"], queue_id=0))[0].queue
    async with (
        store.producer() as producer,
        store.pull_consumer("g", auto_commit=False) as consumer,
        store.queue("q") as jobs,
    ):
        await consumer.assign(queue)
        for body in (b"dead 0", b"dead 1"):
            await jobs.put(body)
            await (await jobs.get()).reject()
        go_on = threading.Event()
        on_thread(store, lambda: go_on.wait(20))  # nothing below begins before it is changed
        bodies, buffer, offsets, commits = [b"2", bytearray(b"3")], bytearray(b"6"), [0], {queue: 1}
        letters = jobs.dead_letters.select(offsets=offsets)
        calls = [
            store.put_many("t", bodies, queue_id=0),
            producer.send_many("t", (each for each in [b"4", b"5"]), queue_id=0),
            producer.send_oneway("t", buffer, queue_id=0),
            consumer.commit(commits),
            jobs.dead_letters.replay(offsets, dry_run=True),
        ]
        tasks = [asyncio.create_task(each) for each in calls]
        await asyncio.sleep(0)
        bodies[1][:] = b"x"  # type: ignore[index]
        bodies.append(b"late")
        buffer[:] = b"x"
        offsets.append(1)
        commits[queue] = 2
        go_on.set()
        *_, replay = await asyncio.gather(*tasks)
        assert [m.body async for m in store.iter("t", 0)] == [b"%d" % i for i in range(7)]
        assert await store.committed("g", queue) == 1
        assert replay.count == 1
        assert [letter.body async for letter in letters] == [b"dead 0"]


@pytest.mark.parametrize("size", [1, 100_000], ids=["on the loop", "on the thread"])
@pytest.mark.parametrize("durability", ["append", "flush"])
@in_store
async def test_puts_are_stored_in_the_order_of_the_calls(store: aio.Store, size: int, durability: Any) -> None:
    # Every seventh is large, and so the thread's.
    await store.create_topic("t")
    bodies = [b"%04d" % i + bytes(size if i % 7 == 0 else 1) for i in range(200)]
    receipts = await asyncio.gather(*(store.put("t", body, queue_id=0, durability=durability) for body in bodies))
    assert [each.offset for each in receipts] == list(range(200))
    assert [m.body for m in await store.read("t", 0, 0, 200)] == bodies
    many = store.put_many("t", [b"many"] * 3, queue_id=0, durability=durability)
    stored, last = await asyncio.gather(many, store.put("t", b"last", queue_id=0, durability=durability))
    assert [each.offset for each in (*stored, last)] == [200, 201, 202, 203]


@in_store
async def test_follower_gets_old_and_new_messages(store: aio.Store) -> None:
    await store.put("t", b"0", queue_id=0)
    seen = []
    there = asyncio.Event()

    async def follow() -> None:
        async for message in store.iter("t", follow=True):
            seen.append(message.body)
            there.set()

    follower = asyncio.create_task(follow())
    for i in range(1, 5):
        await there.wait()
        there.clear()
        await store.put("t", b"%d" % i, queue_id=i % 4)
    while len(seen) < 5:
        await asyncio.sleep(0)
    assert seen == [b"0", b"1", b"2", b"3", b"4"]
    follower.cancel()


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [("earliest", 4, b"0123"), (2, 5, b"234"), ("latest", 6, b"45"), (datetime(2000, 1, 1, tzinfo=UTC), 1, b"0")],
)
@in_store
async def test_follower_of_a_queue_respects_its_bounds(
    store: aio.Store, monkeypatch: pytest.MonkeyPatch, start: Any, stop: int, expected: bytes
) -> None:
    monkeypatch.setattr("mqstore.aio.store._NEW_QUEUES_S", 3600)  # it is called back
    for i in range(4):
        await store.put("t", b"%d" % i, queue_id=0)
    messages = store.iter("t", 0, start=start, stop=stop, follow=True)
    first = asyncio.create_task(anext(messages))
    await asyncio.sleep(0)
    await store.read("t", 0, 0)  # behind its look
    for i in range(4, 8):
        await store.put("t", b"%d" % i, queue_id=0)
    assert b"".join([(await first).body, *[m.body async for m in messages]]) == expected


def test_follower_of_another_process_polls(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "store") as writer:
        writer.put("t", b"a", queue_id=0)
        writer.log.dispatch()  # readers see what has been

        async def test(store: aio.Store) -> None:
            messages = store.iter("t", follow=True)
            assert (await anext(messages)).body == b"a"
            step = asyncio.create_task(anext(messages))
            await asyncio.sleep(0)
            await store.read("t", 0, 0)
            writer.put("t", b"b", queue_id=0)
            assert (await step).body == b"b"

        with_store(test, tmp_path, mode="r")


@in_store
async def test_follower_of_an_empty_topic_is_called_back(store: aio.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.aio.store._NEW_QUEUES_S", 3600)
    await store.create_topic("t", queues=2)
    step = asyncio.create_task(anext(store.iter("t", follow=True)))
    await asyncio.sleep(0)
    await store.topics()  # behind its look
    await store.put("t", b"x", queue_id=1)
    assert (await step).body == b"x"


@in_store
async def test_follower_sees_new_queues(store: aio.Store) -> None:
    await store.create_topic("t", queues=1)
    messages = store.iter("t", follow=True)
    step = asyncio.create_task(anext(messages))
    await asyncio.sleep(0)
    await store.read("t", 0, 0)
    store.sync.broker.topics.alter("t", read_queues=2, write_queues=2)
    await store.put("t", b"x", queue_id=1)
    assert (await step).body == b"x"


# -- a queue ----------------------------------------------------------------------------------------------------------


@in_store
async def test_waits_end_with_their_time(store: aio.Store) -> None:
    async with store.queue("jobs", maxsize=1) as queue:
        with pytest.raises(mqstore.QueueEmpty):
            await queue.get(timeout=0.001)
        assert await queue.get_many(3, timeout=0.001) == []
        await queue.put(b"x")
        with pytest.raises(mqstore.QueueFull):
            await queue.put_nowait(b"y")
        waiting = []
        for _ in range(2):  # alone, and behind another
            with pytest.raises(mqstore.QueueFull):
                await queue.put(b"y", timeout=0.001)
            waiting.append(asyncio.create_task(queue.put(b"z")))
            await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
    other = await store.queue("jobs")
    await other.shutdown(immediate=True)
    for call in (queue.put(b"y"), queue.get(), other.put(b"y"), other.get()):
        with pytest.raises(mqstore.QueueShutDown):
            await call
    async with store.simple_consumer("g", {"t": "*"}) as simple, store.pull_consumer("p") as pull:
        await pull.subscribe("t")
        assert await simple.receive(wait=0.001) == await pull.poll(0.001) == []


@in_store
async def test_done_tasks_are_acknowledged_before_a_get(store: aio.Store) -> None:
    queue = await store.queue("jobs")
    await queue.put_many([b"1", b"2", b"3"])
    first = await queue.get()
    second = await queue.get(done=[first])
    [third] = await queue.get_many(5, done=[second])
    assert (first.settled, second.settled, third.value, await queue.qsize()) == (True, True, b"3", 1)


@in_store
async def test_task_done_is_for_what_the_task_of_the_loop_got_last(store: aio.Store) -> None:
    queue = await store.queue("jobs")
    await queue.put_many([b"0", b"1", b"2"])
    all_have_one = asyncio.Barrier(3)

    async def work() -> bool:
        task = await queue.get()
        await all_have_one.wait()
        await queue.task_done()
        return task.settled

    assert await asyncio.gather(*[work() for _ in range(3)]) == [True] * 3


@in_store
async def test_ack_and_shutdown_call_a_put_that_waits(store: aio.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.aio.queue._LOOK_S", 3600)
    queue = await store.queue("jobs", maxsize=1)
    await queue.put(b"0")
    put = asyncio.create_task(queue.put(b"1"))
    for _ in range(3):
        await queue.qsize()  # behind its look
    await (await queue.get()).ack()
    await asyncio.wait_for(put, 60)
    put = asyncio.create_task(queue.put(b"2"))
    for _ in range(3):
        await queue.qsize()
    await queue.shutdown()
    with pytest.raises(mqstore.QueueShutDown):
        await asyncio.wait_for(put, 60)


@in_store
async def test_walking_through_a_queue_ends_when_nothing_is_ready(store: aio.Store) -> None:
    queue = await store.queue("jobs")
    await queue.put_many([b"a", b"b"])
    values = []
    async for task in queue:
        async with task:
            values.append(task.value)
    assert values == [b"a", b"b"]


@in_store
async def test_cancelled_block_counts_no_attempt(store: aio.Store) -> None:
    queue = await store.queue("jobs")
    await queue.put(b"x")
    consumer = await store.simple_consumer("g", {"jobs": "*"})
    for lease in (await queue.get(), (await consumer.receive())[0]):
        with pytest.raises(asyncio.CancelledError):
            async with lease:
                raise asyncio.CancelledError
    assert (await queue.get(timeout=10)).attempt == 1
    assert (await consumer.receive(wait=10))[0].attempt == 1


@in_store
async def test_newcomer_waits_behind_waiting_puts(store: aio.Store) -> None:
    queue = await store.queue("jobs", maxsize=1)
    await queue.put(b"0")
    puts = [asyncio.create_task(queue.put(b"%d" % i)) for i in (1, 2)]
    for _ in range(3):
        await queue.qsize()  # behind the look of both
    await (await queue.get()).ack()
    puts.append(asyncio.create_task(queue.put(b"3")))
    values = []
    while len(values) < 3:
        async with await queue.get() as task:
            values.append(task.value)
    await asyncio.gather(*puts)
    assert values == [b"1", b"2", b"3"]


@in_store
async def test_join_waits_for_the_last_item(store: aio.Store) -> None:
    queue = await store.queue("jobs")
    await queue.put(b"x")
    assert not await queue.join(0)
    task = await queue.get()
    joining = asyncio.create_task(queue.join())
    await queue.qsize()
    assert not joining.done()
    await task.ack()
    assert await joining


@in_store
async def test_join_does_not_wait_for_what_an_immediate_shutdown_left_there(store: aio.Store) -> None:
    queue = await store.queue("jobs")
    await queue.put(b"x")
    joining = asyncio.create_task(queue.join())
    await queue.qsize()
    await queue.shutdown(immediate=True)
    assert await joining is False
    assert await queue.join() is False


# -- cancelled --------------------------------------------------------------------------------------------------------


def drain(store: aio.Store) -> None:
    """Hold up the loop until the store's thread has done what it was given: answers are there, and not heard."""
    done = threading.Event()
    on_thread(store, done.set)
    assert done.wait(20)


async def cancelled_after(
    steps: int, coroutine: Coroutine[Any, Any, Any], each_step: Callable[[], object] = lambda: None
) -> tuple[bool, Any]:
    """Cancel it when it has had so many turns of the loop: whether that ended it, and what it returned if not."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(steps):
        await asyncio.sleep(0)
        each_step()
    task.cancel()
    try:
        return False, await task
    except asyncio.CancelledError:
        return True, None


STEPS = pytest.mark.parametrize("steps", range(8))


Between = Callable[[aio.Store], object]
"""What happens between two steps."""
DRAINED = pytest.mark.parametrize("between", [lambda store: None, drain], ids=["thread behind", "thread ahead"])


@DRAINED
@pytest.mark.parametrize("coming", [None, 0, 1, 2, 3], ids=lambda at: "there" if at is None else f"put at {at}")
@in_store
async def test_a_get_that_is_cancelled_anywhere_has_taken_nothing(
    store: aio.Store, steps: int, between: Between, coming: int | None
) -> None:
    queue = await store.queue(f"jobs{steps}")
    step = 0

    def each_step() -> None:
        nonlocal step
        if coming == step:
            queue.sync.put(b"x")
        step += 1
        between(store)

    if coming is None:
        await queue.put(b"x")
    cancelled, task = await cancelled_after(steps, queue.get(), each_step)
    if coming is not None and coming >= step:
        await queue.put(b"x")
    if cancelled:
        task = await queue.get(timeout=20)
    assert (task.value, task.attempt) == (b"x", 1)
    assert await queue.get_many(10) == []
    await task.ack()
    assert await queue.empty()


@DRAINED
@pytest.mark.parametrize("consumer", [False, True], ids=["queue", "simple consumer"])
@in_store
async def test_cancelled_waiter_passes_its_turn(store: aio.Store, steps: int, between: Between, consumer: bool) -> None:
    queue = await store.queue(f"jobs{steps}")
    simple = await store.simple_consumer(f"g{steps}", {f"jobs{steps}": "*"})

    async def get() -> Any:
        return (await simple.receive(wait=30))[0] if consumer else await queue.get(timeout=30)

    first, second = asyncio.create_task(get()), asyncio.create_task(get())
    await until(lambda: parked(store.sync.broker) == 2)
    await queue.put(b"x")
    for _ in range(steps):
        await asyncio.sleep(0)
        between(store)
    first.cancel()
    [had] = await asyncio.gather(first, return_exceptions=True)
    if not isinstance(had, asyncio.CancelledError):
        await queue.put(b"x")
    assert (await second).attempt == 1


@DRAINED
@in_store
async def test_cancelled_receive_and_poll_take_nothing(store: aio.Store, steps: int, between: Between) -> None:
    bodies = [b"%d" % i for i in range(5)]
    await store.put_many(f"t{steps}", bodies, queue_id=0)
    simple = await store.simple_consumer(f"simple{steps}", {f"t{steps}": "*"})
    cancelled, found = await cancelled_after(steps, simple.receive(3), partial(between, store))
    if cancelled:
        found = await simple.receive(3)
    assert [(each.message.body, each.attempt) for each in found] == [(body, 1) for body in bodies[:3]]

    pull = await store.pull_consumer(f"pull{steps}")
    await pull.subscribe(f"t{steps}")
    cancelled, found = await cancelled_after(steps, pull.poll(max_messages=3), partial(between, store))
    if cancelled:
        await pull.commit()  # of nothing: what was polled in vain is not done
        assert await store.committed(f"pull{steps}", mqstore.QueueRef(f"t{steps}", 0)) == 0
        found = await pull.poll(max_messages=3)
    assert [each.body for each in found] == bodies[:3]
    assert [each.body for each in await pull.poll()] == bodies[3:]

    other = await store.pull_consumer(f"other{steps}")
    await other.subscribe(f"t{steps}")
    walked = aiter(other)
    cancelled, message = await cancelled_after(steps, anext(walked), partial(between, store))
    if cancelled:
        message = await anext(walked)
    assert [message.body, (await anext(walked)).body] == bodies[:2]


@DRAINED
@pytest.mark.parametrize("follow", [False, True])
@in_store
async def test_a_step_of_an_iteration_that_is_cancelled_skips_nothing(
    store: aio.Store, steps: int, between: Between, follow: bool
) -> None:
    bodies = [b"%03d" % i for i in range(70)]
    await store.put_many(f"t{steps}", bodies, queue_id=0)
    messages = store.iter(f"t{steps}", 0, stop=70 if follow else None, follow=follow)
    seen = []
    while len(seen) < 70:
        cancelled, message = await cancelled_after(
            steps if len(seen) % 64 in (0, 63) else 50,
            anext(messages),
            partial(between, store),
        )
        seen.append((await anext(messages) if cancelled else message).body)
    assert seen == bodies


@DRAINED
@pytest.mark.parametrize("durability", ["append", "flush"])
@in_store
async def test_a_put_that_is_cancelled_is_stored_whole_or_not_at_all(
    store: aio.Store, steps: int, between: Between, durability: Any
) -> None:
    large = bytearray(b"x" * 100_000)
    queue = await store.queue(f"jobs{steps}", maxsize=10)
    puts: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: store.put(f"t{steps}", b"small", queue_id=0, durability=durability),
        lambda: store.put(f"t{steps}", large, queue_id=0, durability=durability),
        lambda: store.put_many(f"t{steps}", [b"many"] * 3, queue_id=0, durability=durability),
        lambda: queue.put(b"item"),
    ]
    for put in puts:
        await cancelled_after(steps, put(), partial(between, store))
    large[:] = b"y" * 100_000
    await store.put(f"t{steps}", b"last", queue_id=0)
    bodies = [m.body async for m in store.iter(f"t{steps}", 0)]
    assert bodies.pop() == b"last"
    assert set(bodies) <= {b"small", b"x" * 100_000, b"many"}
    assert bodies.count(b"many") in (0, 3)
    assert await queue.qsize() in (0, 1)


@DRAINED
@pytest.mark.parametrize("durability", ["append", "flush"])
@in_store
async def test_a_send_that_is_cancelled_leaves_the_producer_as_it_was(
    store: aio.Store, steps: int, between: Between, durability: Any
) -> None:
    async with store.producer(durability=durability, max_inflight=2) as producer:
        for coroutine in (
            producer.send(f"t{steps}", b"a", queue_id=0),
            producer.submit(f"t{steps}", bytes(50_000), queue_id=0),
            producer.submit(f"t{steps}", b"c", queue_id=0),
            producer.send_many(f"t{steps}", [b"d", b"d"], queue_id=0),
        ):
            await cancelled_after(steps, coroutine, partial(between, store))
        futures = [await producer.submit(f"t{steps}", b"%d" % i, queue_id=0) for i in range(6)]
        await producer.flush()
        offsets = [(await each).offset for each in futures]
    assert "closed" in repr(producer)
    stored = [m.body async for m in store.iter(f"t{steps}", 0)]
    assert [stored[offset] for offset in offsets] == [b"%d" % i for i in range(6)]
    assert offsets == sorted(offsets)
    others = [body for offset, body in enumerate(stored) if offset not in offsets]  # late ones between them too
    assert not Counter(others) - Counter([b"a", bytes(50_000), b"c", b"d", b"d"])


@DRAINED
@in_store
async def test_a_transaction_that_is_cancelled_is_rolled_back_or_committed_whole(
    store: aio.Store, steps: int, between: Between
) -> None:
    async def block() -> None:
        async with store.producer() as producer, producer.transaction() as tx:
            await tx.send(f"t{steps}", b"a", queue_id=0)
            await tx.send(f"t{steps}", b"b", queue_id=0)

    cancelled, _ = await cancelled_after(3 * steps, block(), partial(between, store))
    await store.put(f"t{steps}", b"last", queue_id=0)
    bodies = [m.body async for m in store.iter(f"t{steps}", 0)]
    assert bodies in ([b"last"], [b"a", b"b", b"last"])
    assert cancelled or len(bodies) == 3
    assert store.sync.broker.stats().open_transactions == 0


@STEPS
def test_an_opening_that_is_cancelled_leaves_the_store_closed(tmp_path: Path, steps: int) -> None:
    async def main() -> None:
        async def open_() -> aio.Store:
            return await aio.open(tmp_path / "store")

        cancelled, store = await cancelled_after(steps, open_())
        if not cancelled:
            await store.close()
        async with asyncio.timeout(20):
            while True:
                try:
                    async with aio.open(tmp_path / "store") as again:
                        assert again.recovery.clean_shutdown
                        return
                except mqstore.errors.StoreLockedError:  # it is being closed
                    await asyncio.sleep(0.01)

    run(main())


@DRAINED
@in_store
async def test_a_consumer_that_is_cancelled_before_anybody_has_it_is_no_member(
    store: aio.Store, steps: int, between: Between
) -> None:
    await store.create_topic("t")

    async def make() -> aio.SimpleConsumer:
        return await store.simple_consumer(f"g{steps}", {"t": "*"})

    cancelled, _ = await cancelled_after(steps, make(), partial(between, store))
    await store.topics()
    assert len(store.sync.broker.members.members(f"g{steps}")) == (0 if cancelled else 1)


@STEPS
def test_a_closing_that_is_cancelled_comes_to_its_end(tmp_path: Path, steps: int) -> None:
    async def main() -> None:
        store = await aio.open(tmp_path / "store")
        await store.put("t", b"x", queue_id=0)
        consumer = await store.pull_consumer("g")
        await consumer.subscribe("t")
        assert len(await consumer.poll()) == 1
        await cancelled_after(steps, consumer.close())
        assert "closed" in repr(consumer) or steps == 0
        await cancelled_after(steps, store.close())
        assert store.closed or steps == 0
        await store.close()

    run(main())
    with mqstore.open(tmp_path / "store") as store:
        assert store.recovery.clean_shutdown


# -- many -------------------------------------------------------------------------------------------------------------


@in_store
async def test_a_thousand_who_get_and_put_need_no_thread_and_lose_nothing(store: aio.Store) -> None:
    queue = await store.queue("jobs")
    gets = [asyncio.create_task(queue.get()) for _ in range(1000)]
    await until(lambda: parked(store.sync.broker) == 1000)
    threads = set(threading.enumerate())
    for each in gets[::10]:
        each.cancel()
    puts = [asyncio.create_task(queue.put(b"%d" % i)) for i in range(1000)]
    got = [each for i, each in enumerate(gets) if i % 10]
    values = [task.value for task in await asyncio.gather(*got)]
    await asyncio.gather(*puts)
    values += [task.value for task in await queue.get_many(1000)]
    assert sorted(values, key=int) == [b"%d" % i for i in range(1000)]
    assert not set(threading.enumerate()) - threads


@in_store
async def test_thousand_puts_waiting_for_room_succeed(store: aio.Store) -> None:
    queue = await store.queue("jobs", maxsize=50)
    puts = [asyncio.create_task(queue.put(b"%d" % i)) for i in range(1000)]
    values = []
    while len(values) < 1000:
        for task in await queue.get_many(50, timeout=20):
            values.append(task.value)
            await task.ack()
    await asyncio.gather(*puts)
    assert values == [b"%d" % i for i in range(1000)]


# -- the end ----------------------------------------------------------------------------------------------------------


def test_closing_a_store_ends_all_waits(tmp_path: Path) -> None:
    async def main() -> None:
        store = await aio.open(tmp_path / "store")
        await store.create_topic("t")
        queue = await store.queue("jobs")
        full = await store.queue("full", maxsize=1)
        await full.put(b"x")
        simple = await store.simple_consumer("g", {"t": "*"})
        nowhere = await store.simple_consumer("n", {"comes-later": "*"})
        pull = await store.pull_consumer("p")
        await pull.subscribe("t")
        waiting = [
            asyncio.create_task(each)
            for each in (
                *(queue.get(), full.put(b"y"), full.join(), anext(store.iter("t", follow=True))),
                *(nowhere.receive(wait=60), pull.poll(60)),
            )
        ]
        await until(lambda: parked(store.sync.broker) >= 3)
        await store.close()
        *failed, received, polled = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in failed] == [mqstore.errors.StoreClosedError] * 4
        assert (received, polled) == ([], [])  # their consumers were closed, as those of the sync store
        for late in (store.put("t", b""), queue.get(), store.topics(), simple.receive(), pull.poll(), queue.put(b"")):
            with pytest.raises(mqstore.errors.StoreClosedError):
                await late

    run(main())


def test_no_thread_is_left_when_a_store_is_closed_or_forgotten(tmp_path: Path) -> None:
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("mqstore-aio")]

    def end_of_threads() -> list[str]:
        gc.collect()
        for each in threading.enumerate():
            if each.name.startswith("mqstore-aio"):
                each.join(20)
        return threads()

    assert end_of_threads() == []  # of other tests

    async def main() -> None:
        async with aio.open(tmp_path / "a") as store:
            await store.put("t", b"x")
            assert len(threads()) == 1
        forgotten = await aio.open(tmp_path / "b")
        await forgotten.put("t", b"x")
        forgotten.sync.close()

    run(main())
    assert end_of_threads() == []


def test_end_of_a_loop_releases_pending_messages(tmp_path: Path) -> None:
    stores = []

    async def main() -> None:
        store = await aio.open(tmp_path / "store")
        stores.append(store)
        queue = await store.queue("jobs")
        await queue.put(b"x")
        hold = threading.Event()
        on_thread(store, lambda: hold.wait(20))
        get = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(hold.set)
        del get  # asyncio.run cancels it

    asyncio.run(main())
    sync = stores[0].sync
    drain(stores[0])
    task = sync.queue("jobs").get(timeout=20)
    assert task.attempt == 1
    sync.close()


def test_every_loop_may_have_a_store_and_none_another_s(tmp_path: Path) -> None:
    ready, done = threading.Event(), threading.Event()
    theirs: list[Any] = []

    async def other() -> None:
        async with aio.open(tmp_path / "b") as store:
            queue = await store.queue("jobs")
            theirs.extend((store, queue))
            await queue.put(b"b")
            task = await queue.get()
            theirs.append(task)
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, done.wait)

    async def main() -> None:
        async with aio.open(tmp_path / "a") as store:
            await store.put("t", b"a")
            await asyncio.get_running_loop().run_in_executor(None, ready.wait)
            their_store, their_queue, their_task = theirs
            for use in (
                *(their_store.put("t", b""), their_store.put_many("t", [b""]), their_store.topics(), their_queue.get()),
                *(their_task.ack(), their_task.nack(), their_task.extend(1), their_task.reject(), their_store.close()),
            ):
                with pytest.raises(RuntimeError, match="another event loop"):
                    await use

    thread = threading.Thread(target=lambda: asyncio.run(other()))
    thread.start()
    try:
        run(main())
    finally:
        done.set()
        thread.join(20)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_ctrl_c_leaves_a_store_that_was_closed(tmp_path: Path) -> None:
    async def tick() -> None:  # asyncio.run does not hear a signal that comes just before its loop falls asleep
        while True:
            await asyncio.sleep(0.05)

    async def main(pipe: int) -> None:
        async with aio.open(tmp_path / "store") as store, store.queue("jobs") as queue:
            ticking = asyncio.create_task(tick())
            await queue.put(b"x")
            task = await queue.get()
            os.write(pipe, b"waiting")
            async with task:
                await queue.get()
            ticking.cancel()

    def work(pipe: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in a shell's background
        try:
            asyncio.run(main(pipe))
        except KeyboardInterrupt:
            os.write(pipe, b"interrupted")
        signal.pause()

    with speaking_child(work) as (pid, pipe):
        assert os.read(pipe, 20) == b"waiting"
        os.kill(pid, signal.SIGINT)
        assert os.read(pipe, 20) == b"interrupted"
    with mqstore.open(tmp_path / "store") as store:
        assert store.recovery.clean_shutdown
        assert store.queue("jobs").get(block=False).attempt == 1  # the block's end gave it back unseen
