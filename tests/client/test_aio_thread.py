"""The thread that calls the engine for a loop: looks that fail or are cancelled, and a loop that has ended."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from functools import partial

import pytest

import mqstore
from mqstore.aio.loop_thread import LoopThread
from tests.client.aiosupport import run
from tests.holding import new_threads


def test_a_stop_iteration_of_the_engine_s_thread_is_an_error_like_others() -> None:
    async def main() -> None:
        bridge = LoopThread("test")
        with pytest.raises(RuntimeError, match="StopIteration"):
            await bridge.call(lambda: next(iter(())))
        bridge.close()

    run(main())


def test_failed_look_passes_its_turn() -> None:
    async def main() -> None:
        bridge, passed, looks = LoopThread("test"), list[int](), iter([None, mqstore.QueueShutDown("shut")])

        def look() -> object:
            if (error := next(looks)) is not None:
                raise error
            return None

        def park(again: Callable[[], object]) -> Callable[[], None]:
            again()
            return lambda: passed.append(1)

        with pytest.raises(mqstore.QueueShutDown):
            await bridge.look(look, park, timeout_s=None)
        assert passed == [1]
        bridge.close()

    run(main())


def test_cancelled_waiter_does_not_park() -> None:
    async def main() -> None:
        bridge, entered, go_on, cancelled = LoopThread("test"), threading.Event(), threading.Event(), list[int]()

        def park(again: Callable[[], object]) -> Callable[[], None]:
            entered.set()
            assert go_on.wait(20)
            return lambda: cancelled.append(1)

        task = asyncio.create_task(bridge.look(lambda: None, park, timeout_s=None))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        await asyncio.wait([task])
        go_on.set()
        await bridge.call(lambda: None)
        assert cancelled
        bridge.close()

    run(main())


@pytest.mark.parametrize("called", [True, False])
def test_look_that_is_made_twice_takes_one_item(called: bool) -> None:
    """By its callback and by its clock, or by its clock alone, before the loop has heard of the first result."""

    async def main() -> None:
        bridge, go_on, passed, items = LoopThread("test"), threading.Event(), [0], [None, 1, 2, 3]

        def park(again: Callable[[], object]) -> Callable[[], None]:
            bridge.submit(lambda: go_on.wait(20))
            if called:
                again()
            return lambda: passed.append(1)

        look = asyncio.create_task(bridge.look(lambda: items.pop(0), park, timeout_s=None, every_s=0.001))
        await asyncio.sleep(0.02)
        go_on.set()
        assert await look == 1
        await bridge.call(lambda: None)
        assert items == [2, 3]
        assert called or sum(passed) == 1  # what was parked was cancelled before it was looked
        bridge.close()

    run(main())


def test_late_callback_leaves_nobody_parked() -> None:
    """The look had been made by the clock meanwhile, and had parked again."""

    async def main() -> None:
        bridge, go_on, cancelled = LoopThread("test"), threading.Event(), set[int]()
        agains: list[Callable[[], object]] = []

        def park(again: Callable[[], object]) -> Callable[[], None]:
            if not agains:
                bridge.submit(lambda: go_on.wait(20))
            agains.append(again)
            return partial(cancelled.add, len(agains))

        look = asyncio.create_task(bridge.look(lambda: None, park, timeout_s=None, every_s=0.005))
        await asyncio.sleep(0.02)
        agains[0]()
        go_on.set()
        await bridge.call(lambda: None)
        look.cancel()
        await asyncio.wait([look])
        await bridge.call(lambda: None)
        assert cancelled == {1 + i for i in range(len(agains))}
        bridge.close()

    run(main())


def test_news_that_a_loop_never_heard_keeps_no_thread() -> None:
    """Unread news held the bridge, and the thread held the news. The end of the bridge ends the thread."""

    async def begin() -> LoopThread:
        return LoopThread("test")

    loop, before = asyncio.new_event_loop(), set(threading.enumerate())
    bridge = loop.run_until_complete(begin())
    assert bridge.post(bridge.check)
    loop.close()
    assert not bridge.post(bridge.check)
    del bridge
    gc.collect()
    assert not new_threads(before)


def test_a_result_for_a_loop_that_has_ended_is_undone(caplog: pytest.LogCaptureFixture) -> None:
    undone: list[int] = []
    go_on, done = threading.Event(), threading.Event()

    async def begin() -> tuple[LoopThread, asyncio.Task[int]]:
        bridge = LoopThread("test")
        bridge.submit(lambda: go_on.wait(20))
        task = asyncio.create_task(bridge.call(lambda: 7, undone.append))
        await asyncio.sleep(0)
        return bridge, task

    loop = asyncio.new_event_loop()
    bridge, task = loop.run_until_complete(begin())
    loop.close()
    go_on.set()
    bridge.submit(done.set)
    assert done.wait(20)
    assert undone == [7]
    with caplog.at_level(logging.CRITICAL, "asyncio"):  # which complains of a task that was never to end
        del task
        gc.collect()
