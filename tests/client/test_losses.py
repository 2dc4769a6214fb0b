"""What a group that pops loses to retention its consumers are told, each loss once (delivery#read-status)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore import QueueRef, Retention
from tests.client.popsupport import Bench
from tests.client.pushsupport import Told, commit_unchecked, note_losses
from tests.conformance.consumers import Kind, World, kinds
from tests.log.support import flip

Q = QueueRef("t", 0)
in_groups = pytest.mark.parametrize("kind", kinds(lambda kind: kind.family != "queue"), ids=str)
POLICY: dict[str, Any] = {"segment_bytes": 4096, "retention": Retention(age=60, unconsumed="drop")}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store", **POLICY)
    bench.store.create_topic("t", queues=1)
    yield bench
    bench.store.close()


@pytest.fixture
def world(kind: Kind, tmp_path: Path) -> Iterator[World]:
    """Group g, and topic t of one queue."""
    world = World(kind, tmp_path / "store", **POLICY)
    world.topic, world.group = Q.topic, "g"
    world.store.create_topic("t", queues=1)
    world.store.broker.groups.create("g", orderly=kind.ordered)
    yield world
    world.close()


def put_and_lose(bench: Bench) -> int:
    """100 messages, of which retention takes all but those of the last segment; the first that is left."""
    bench.store.put_many("t", [bytes(100)] * 100)
    for _ in range(3):
        bench.advance(30)
    return bench.broker.min_offset("t", 0)


def stats_lost(bench: Bench, group: str = "g") -> int:
    return sum(lost for (name, *_), lost in bench.broker.stats().counters.lost.items() if name == group)


@in_groups
def test_each_loss_is_reported_once(world: World) -> None:
    """It stood in `stats()` and in the log alone: consumers by queue were told, those by pop were not."""
    witness = Told()
    consumer = world.consumer(interceptors=[witness])
    assert consumer.handle() == []
    resets, lost = [], 0
    for begin in (0, 100):
        world.store.put_many("t", [bytes(100)] * 100)
        for _ in range(3):
            world.advance(30)
        first = world.store.offsets("t", 0)[0]
        assert begin < first < begin + 100
        resets.append(("reset", Q, begin, first))
        lost += first - begin
        assert len(consumer.handle()) == begin + 100 - first
        assert consumer.handle() == []
        assert [news for news in witness.news if news[0] == "reset"] == resets
        if not world.kind.commits:
            assert sum(world.store.broker.stats().counters.lost.values()) == lost


@in_groups
def test_offset_beyond_the_end_is_moved_back_and_reported(world: World) -> None:
    """A crash that cut the end of the log leaves such an offset."""
    witness = Told()
    world.put("0", "1")
    commit_unchecked(world.store.broker, 9)
    consumer = world.consumer(interceptors=[witness])
    assert consumer.handle() == []
    assert [news for news in witness.news if news[0] == "reset"] == [("reset", Q, 9, 2)]
    world.put("2")
    assert consumer.handle() == [("2", 1)]
    consumer.close()
    assert world.store.committed("g", Q) == 3


def test_popped_message_lost_before_redelivery_is_reported(bench: Bench) -> None:
    """Retention keeps what is in flight; damage may take it all the same, and one who waits for messages is woken."""
    witness = Told()
    consumer = bench.consumer(interceptors=[witness], visibility=1)
    receipts = bench.store.put_many("t", [b"x"] * 5)
    assert len(consumer.receive(5, wait=0)) == 5
    for receipt in receipts:
        flip(bench.path / "commitlog" / f"{0:020}", receipt.physical_offset + receipt.size - 1)
    called: list[bool] = []
    consumer._when_ready(lambda: called.append(True))
    bench.advance(2)
    assert called
    consumer.receive(wait=0)
    assert witness.news == [("reset", Q, 0, 5)]
    assert stats_lost(bench) == 5
    consumer.close()


def test_direct_pop_queries_losses(bench: Bench) -> None:
    bench.broker.start_of("g", "t", 0)
    bench.broker.start_of("reads", "t", 0)
    first = put_and_lose(bench)
    assert bench.broker.take_losses("g") == ()
    bench.broker.pop("g", "t")
    [loss] = bench.broker.take_losses("g")
    assert (loss.queue, loss.old, loss.new) == (Q, 0, first)
    assert bench.broker.take_losses("g") == ()
    bench.broker.read("t", 0, 0, group="reads")  # is told in the result
    assert bench.broker.take_losses("reads") == ()


def test_losses_that_nobody_asks_for_are_bounded(bench: Bench) -> None:
    note_losses(bench.broker, [(i, i + 1) for i in range(0, 6000, 2)])
    found = bench.broker.take_losses("g")
    assert len(found) == 1024
    assert (found[-1].old, found[-1].new) == (5998, 5999)
