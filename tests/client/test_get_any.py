"""Waiting for several queues at once, with threads and with coroutines: the order, the wait, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import Queue, QueueEmpty, QueueShutDown, SimulatedClock, Store
from mqstore.errors import ConfigError, StoreClosedError
from mqstore.signalsafe import Bell
from tests.client.support import ended, in_thread, parked, until


class Sync:
    """Queues of one store, and `mqstore.get_any`."""

    def __init__(self, path: Path) -> None:
        self.store: Any = mqstore.open(path)
        self.made: dict[str, Any] = {}

    def queue(self, name: str) -> Queue:
        queue: Queue = self.made.setdefault(name, self.store.queue(name, codec=mqstore.TEXT))
        return queue

    @property
    def sync(self) -> Store:
        found: Store = self.store
        return found

    def take(self, *names: str, timeout: float | None = 20) -> str:
        for name in names:
            self.queue(name)
        task = mqstore.get_any([self.made[name] for name in names], timeout)
        task.ack()
        return f"{task.message.topic} {task.value}"

    def close(self) -> None:
        self.store.close()


class Coroutines(Sync):
    """The same with `mqstore.aio.get_any`, on a loop in a thread."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.made = {}
        self.store = self.run(lambda: mqstore.aio.open(path))

    def run(self, make: Callable[[], Any]) -> Any:
        async def main() -> Any:
            return await make()

        return asyncio.run_coroutine_threadsafe(main(), self.loop).result(30)

    def queue(self, name: str) -> Queue:
        if name not in self.made:
            self.made[name] = self.run(lambda: self.store.queue(name, codec=mqstore.TEXT))
        queue: Queue = self.made[name].sync
        return queue

    @property
    def sync(self) -> Store:
        found: Store = self.store.sync
        return found

    def take(self, *names: str, timeout: float | None = 20) -> str:
        for name in names:
            self.queue(name)
        queues = [self.made[name] for name in names]
        task = self.run(lambda: mqstore.aio.get_any(queues, timeout))
        self.run(task.ack)
        return f"{task.message.topic} {task.value}"

    def close(self) -> None:
        with suppress(StoreClosedError):
            self.run(self.store.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(params=[Sync, Coroutines], ids=["threads", "coroutines"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sync]:
    way: Sync = request.param(tmp_path / "store")
    yield way
    way.close()


def test_items_come_in_the_order_of_the_queues(way: Sync) -> None:
    for name in ("low", "high", "middle"):
        way.queue(name).put_many("ab")
    taken = [way.take("high", "middle", "low") for _ in range(6)]
    assert taken == ["high a", "high b", "middle a", "middle b", "low a", "low b"]


@pytest.mark.parametrize("name", ["high", "low"])
def test_it_waits_for_an_item_of_any_queue(way: Sync, name: str) -> None:
    queue = way.queue(name)
    thread, found = in_thread(lambda: way.take("high", "low", timeout=None))
    until(lambda: parked(way.sync.broker) == 2)
    queue.put("x")
    assert ended(thread, found) == f"{name} x"
    assert parked(way.sync.broker) == 0


def test_it_waits_for_an_item_that_failed(way: Sync) -> None:
    queue = way.queue("low")
    queue.put("x")
    task = queue.get()
    thread, found = in_thread(lambda: way.take("high", "low"))
    until(lambda: parked(way.sync.broker) == 2)
    task.nack(delay=0)
    assert ended(thread, found) == "low x"


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_nothing_in_time(way: Sync, timeout: float) -> None:
    with pytest.raises(QueueEmpty, match="nothing to get from 'high', 'low'"):
        way.take("high", "low", timeout=timeout)
    assert parked(way.sync.broker) == 0


def test_no_queue_at_all(way: Sync) -> None:
    with pytest.raises(ConfigError, match="takes a list of one or more"):
        way.take()


def test_a_queue_that_was_shut_down_gives_the_rest_and_is_left_out(way: Sync) -> None:
    way.queue("high").put("last")
    way.queue("high").shutdown()
    way.queue("low").put("x")
    assert [way.take("high", "low") for _ in range(2)] == ["high last", "low x"]
    thread, found = in_thread(lambda: way.take("high", "low"))
    until(lambda: parked(way.sync.broker) == 1)
    way.queue("low").put("y")
    assert ended(thread, found) == "low y"


def test_a_shutdown_of_all_queues_ends_the_wait(way: Sync) -> None:
    way.queue("high")
    thread, found = in_thread(lambda: way.take("high", "low"))
    until(lambda: parked(way.sync.broker) == 2)
    way.queue("high").shutdown()
    until(lambda: parked(way.sync.broker) == 1)
    way.queue("low").shutdown(immediate=True)
    assert isinstance(ended(thread, found), QueueShutDown)


def test_closing_the_store_ends_the_wait(way: Sync) -> None:
    thread, found = in_thread(lambda: way.take("high", "low"))
    until(lambda: parked(way.sync.broker) == 2)
    way.sync.close()
    assert isinstance(ended(thread, found), StoreClosedError)


def test_an_item_that_it_does_not_take_wakes_another_receiver(way: Sync) -> None:
    """A message wakes one receiver. The wait has a turn of both queues, and uses that of one."""
    high, low = way.queue("high"), way.queue("low")
    thread, found = in_thread(lambda: way.take("high", "low"))
    until(lambda: parked(way.sync.broker) == 2)
    other, got = in_thread(lambda: low.get(timeout=20).value)
    until(lambda: parked(way.sync.broker) == 3)
    high.put("y")
    low.put("x")
    assert [ended(thread, found), ended(other, got)] == ["high y", "x"]


def test_an_interrupted_wait_passes_its_turn_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mqstore.open(tmp_path / "store") as store:
        high, low = (store.queue(name, codec=mqstore.TEXT) for name in ("high", "low"))
        others = []

        class Interrupted(Bell):
            """Bell whose owner is interrupted when it rings, while another receiver waits for the same queue."""

            def wait(self, timeout_s: float | None = None) -> bool:
                others.append(in_thread(lambda: low.get(timeout=20).value))
                until(lambda: parked(store.broker) == 3)
                low.put("x")
                assert super().wait(20)
                raise KeyboardInterrupt

        monkeypatch.setattr("mqstore.getany.Bell", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            mqstore.get_any([high, low])
        assert ended(*others[0]) == "x"
        assert parked(store.broker) == 0


def test_queues_of_several_stores(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "one") as one, mqstore.open(tmp_path / "two") as two:
        queues = [store.queue("jobs", codec=mqstore.TEXT) for store in (one, two)]
        for number in (1, 0):
            thread, found = in_thread(lambda: mqstore.get_any(queues, 20))
            until(lambda: parked(one.broker) and parked(two.broker))
            queues[number].put(str(number))
            assert ended(thread, found).value == str(number)


def test_a_cancelled_wait_has_taken_nothing(tmp_path: Path) -> None:
    async def main() -> list[str]:
        async with mqstore.aio.open(tmp_path / "store") as store:
            queues = [await store.queue(name, codec=mqstore.TEXT) for name in ("high", "low")]
            wait = asyncio.create_task(mqstore.aio.get_any(queues))
            while parked(store.sync.broker) < 2:
                await asyncio.sleep(0.001)
            wait.cancel()
            await asyncio.gather(wait, return_exceptions=True)
            assert parked(store.sync.broker) == 0
            for _ in range(30):
                wait = asyncio.create_task(mqstore.aio.get_any(queues))
                await asyncio.sleep(0)
                put = asyncio.create_task(queues[1].put("x"))
                await asyncio.sleep(0.002)
                wait.cancel()
                await put
                task = (await asyncio.gather(wait, return_exceptions=True))[0]
                if isinstance(task, asyncio.CancelledError):
                    task = await mqstore.aio.get_any(queues, 20)
                assert task.attempt == 1
                await task.ack()
            return [queue.name for queue in queues if await queue.qsize() or parked(store.sync.broker)]

    assert asyncio.run(main()) == []


def test_by_a_clock_of_its_own_it_looks_at_once(tmp_path: Path) -> None:
    config = mqstore.StoreConfig(clock=SimulatedClock())
    with mqstore.open(tmp_path / "store", config=config) as store:
        queue = store.queue("jobs", codec=mqstore.TEXT)
        queue.put("x", priority=3)
        assert mqstore.get_any([queue], 0).value == "x"
