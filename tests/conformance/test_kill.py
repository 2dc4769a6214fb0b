"""A process that is killed in a handler loses no message and no acknowledgement, whatever kind of consumer it has."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from mqstore import Message
from tests.children import in_child
from tests.conformance.consumers import KINDS, HandlerError, Kind, OpenStore, World, kinds

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kill_in_a_handler_loses_nothing(kind: Kind, tmp_path: Path, open_store: OpenStore) -> None:
    """What was acknowledged by a verb does not come again. Push and pull consumers save their progress now and then."""

    def work() -> None:
        world = World(kind, tmp_path / "store", open_store)
        consumer = world.consumer()
        world.put("a", "b", "c", "d")

        def handle(message: Message) -> None:
            if message.text() == "c":
                os.kill(os.getpid(), signal.SIGKILL)

        consumer.handle(handle)

    assert in_child(work) == -signal.SIGKILL
    world = World(kind, tmp_path / "store", open_store)
    try:
        assert not world.store.recovery.clean_shutdown
        consumer = world.consumer()
        handled = [text for text, _ in consumer.handle()]
        world.advance(100)
        consumer.close()
        assert world.lag() == 0
    finally:
        world.close()
    assert not kind.in_order or handled == sorted(handled)
    done_before = [] if kind.leases else ["a", "b"]
    assert sorted(handled) in [[*done_before[start:], "c", "d"] for start in range(len(done_before) + 1)]


@pytest.mark.parametrize("kind", kinds(lambda kind: kind.family != "pull"), ids=str)
def test_kill_keeps_failed_attempts_and_dead_letters(kind: Kind, tmp_path: Path, open_store: OpenStore) -> None:
    def fail(message: Message) -> None:
        raise HandlerError

    def work() -> None:
        world = World(kind, tmp_path / "store", open_store)
        consumer = world.consumer()
        world.put("a")
        assert consumer.handle(fail) == [("a", 1)]
        world.advance(10)
        assert consumer.handle(fail) == [("a", 2)]
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL
    world = World(kind, tmp_path / "store", open_store)
    try:
        world.advance(100)
        consumer, attempts = world.consumer(), []
        while world.lag():
            attempts += [attempt for _, attempt in consumer.handle(fail)]
            world.advance(100)
        letters = [text for text, _ in world.dead()]
    finally:
        world.close()
    if kind.commits:  # the last attempt may be repeated
        assert attempts in ([3], [2, 3], [2, 3, 3])
        assert {*letters} == {"a"}
    else:
        assert (attempts, letters) == ([3], ["a"])
