"""Waiting for several queues at once, with threads and with coroutines: the order, the wait, and the end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import QueueEmpty, QueueShutDown
from mqstore.errors import StoreClosedError
from mqstore.signalsafe import Bell
from tests.client.doors import Doors
from tests.client.support import ended, in_thread, parked, until


class Way:
    """Queues, and `get_any`, by one door."""

    def __init__(self, doors: Doors) -> None:
        self.doors = doors
        self.made: dict[str, Any] = {}

    def queue(self, name: str) -> Any:
        return self.made.get(name) or self.made.setdefault(name, self.doors.queue(name, codec=mqstore.TEXT))

    def put(self, name: str, value: str) -> None:
        self.queue(name).put(value)
        self.doors.settle()

    def take(self, *names: str, timeout: float | None = 20) -> str:
        task = self.doors.mqstore.get_any([self.queue(name) for name in names], timeout)
        task.ack()
        return f"{task.message.topic} {task.value}"

    def waiting(self, *names: str, timeout: float | None = 20) -> tuple[threading.Thread, list[Any]]:
        """Take in another thread, which waits."""
        started = in_thread(lambda: self.take(*names, timeout=timeout))
        until(lambda: parked(self.doors.broker) == len(names))
        return started


@pytest.fixture
def way(doors: Doors) -> Way:
    return Way(doors)


def test_items_come_in_the_order_of_the_queues(way: Way) -> None:
    for name in ("low", "high", "middle"):
        way.queue(name).put_many("ab")
    taken = [way.take("high", "middle", "low") for _ in range(6)]
    assert taken == ["high a", "high b", "middle a", "middle b", "low a", "low b"]


@pytest.mark.parametrize("name", ["high", "low"])
def test_it_waits_for_an_item_of_any_queue(way: Way, name: str) -> None:
    thread, found = way.waiting("high", "low", timeout=None)
    way.put(name, "x")
    assert ended(thread, found) == f"{name} x"
    assert parked(way.doors.broker) == 0


def test_it_waits_for_an_item_that_failed(way: Way) -> None:
    queue = way.queue("low")
    queue.put("x")
    task = queue.get()
    thread, found = way.waiting("high", "low")
    task.nack(delay=0)
    way.doors.settle()
    assert ended(thread, found) == "low x"


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_nothing_in_time(way: Way, timeout: float) -> None:
    with pytest.raises(QueueEmpty, match="nothing to get from 'high', 'low'"):
        way.take("high", "low", timeout=timeout)
    assert parked(way.doors.broker) == 0


def test_a_queue_that_was_shut_down_gives_the_rest_and_is_left_out(way: Way) -> None:
    way.queue("high").put("last")
    way.queue("high").shutdown()
    way.queue("low").put("x")
    assert [way.take("high", "low") for _ in range(2)] == ["high last", "low x"]
    thread, found = in_thread(lambda: way.take("high", "low"))
    until(lambda: parked(way.doors.broker) == 1)
    way.put("low", "y")
    assert ended(thread, found) == "low y"


def test_a_shutdown_of_all_queues_ends_the_wait(way: Way) -> None:
    thread, found = way.waiting("high", "low")
    way.queue("high").shutdown()
    until(lambda: parked(way.doors.broker) == 1)
    way.queue("low").shutdown(immediate=True)
    assert isinstance(ended(thread, found), QueueShutDown)


def test_closing_the_store_ends_the_wait(way: Way) -> None:
    thread, found = way.waiting("high", "low")
    way.doors.store.close()
    assert isinstance(ended(thread, found), StoreClosedError)


def test_an_item_that_it_does_not_take_wakes_another_receiver(way: Way) -> None:
    """A message wakes one receiver. The wait has a turn of both queues, and uses that of one."""
    thread, found = way.waiting("high", "low")
    other, got = in_thread(lambda: way.queue("low").get(timeout=20).value)
    until(lambda: parked(way.doors.broker) == 3)
    way.queue("high").put("y")
    way.put("low", "x")
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
