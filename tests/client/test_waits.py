"""Consumers that are asked for messages wait for them, with threads and with coroutines: what ends a wait, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.errors import QueueShutDown, StoreClosedError
from tests.client.support import ended, in_thread, parked, until
from tests.conformance.consumers import Kind, World, kinds

ASKED = kinds(lambda kind: kind.leases or kind.family == "pull")
ASK = {
    "queue": lambda consumer: consumer.get(timeout=30),
    "simple": lambda consumer: consumer.receive(wait=30),
    "pull": lambda consumer: consumer.poll(30),
}
every_kind = pytest.mark.parametrize("kind", ASKED, ids=str)
leasing = pytest.mark.parametrize("kind", [kind for kind in ASKED if kind.leases], ids=str)
ordered = pytest.mark.parametrize("kind", [kind for kind in ASKED if kind.ordered], ids=str)


@pytest.fixture
def world(kind: Kind, tmp_path: Path) -> Iterator[World]:
    world = World(kind, tmp_path / "store")
    world.store.create_topic(world.topic, queues=1)
    yield world
    world.close()


class Wait:
    """A call that waits for a message, until `outcome`."""

    def __init__(self, world: World, consumer: Any) -> None:
        self._world = world
        ask = partial(ASK[world.kind.family], consumer.consumer)
        if not world.kind.aio:
            self._thread = in_thread(ask)
        else:
            world.run(lambda: setattr(self, "_task", asyncio.ensure_future(ask())))
        until(self._is_parked)

    def _is_parked(self) -> int:
        self._world.run(asyncio.sleep if self._world.kind.aio else int, 0)
        return parked(self._world.store.broker)

    def outcome(self) -> Any:
        """Return (text, attempt) of what was found, or the type of the error."""
        try:
            found = self._world.run(lambda: self._task) if self._world.kind.aio else ended(*self._thread)
        except Exception as error:
            found = error
        if isinstance(found, Exception):
            return type(found)
        each = found if isinstance(found, list) else [found]
        return [(getattr(one, "message", one).text(), one.attempt) for one in each]


@every_kind
def test_message_ends_the_wait(world: World) -> None:
    wait = Wait(world, world.consumer())
    world.put("a")
    world.settle()
    assert wait.outcome() == [("a", 1)]
    assert parked(world.store.broker) == 0


@leasing
def test_next_attempt_ends_the_wait(world: World) -> None:
    consumer = world.consumer()
    world.put("a")
    lease = consumer.take()
    wait = Wait(world, consumer)
    lease.nack(5)
    world.advance(5)
    assert wait.outcome() == [("a", 2)]


@leasing
def test_replayed_dead_letter_ends_the_wait(world: World) -> None:
    consumer = world.consumer()
    world.put("a")
    consumer.take().reject()
    wait = Wait(world, consumer)
    world.store.dead_letters(world.group).replay()
    world.settle()
    assert wait.outcome() == [("a", 1)]


@ordered
def test_ack_of_the_one_before_ends_the_wait(world: World) -> None:
    consumer = world.consumer()
    world.put("a", "b")
    lease = consumer.take()
    wait = Wait(world, consumer)
    lease.ack()
    world.settle()
    assert wait.outcome() == [("b", 1)]


@every_kind
def test_end_of_the_consumer_ends_the_wait(world: World) -> None:
    consumer = world.consumer()
    wait = Wait(world, consumer)
    consumer.close()
    assert wait.outcome() == (QueueShutDown if world.kind.family == "queue" else [])
    assert parked(world.store.broker) == 0
    with pytest.raises((QueueShutDown, StoreClosedError)):
        world.run(ASK[world.kind.family], consumer.consumer)


@every_kind
@pytest.mark.parametrize("what", ["store", "broker"])
def test_end_of_the_store_ends_the_wait(world: World, what: str) -> None:
    """A store closes its consumers first. After a close of the broker they get an error."""
    wait = Wait(world, world.consumer())
    world.run((world.aio if world.kind.aio else world.store).close) if what == "store" else world.store.broker.close()
    closed_first = what == "store" and world.kind.family != "queue"
    assert wait.outcome() == ([] if closed_first else StoreClosedError)
    with suppress(mqstore.MQStoreError):
        world.run(world.store.close)
