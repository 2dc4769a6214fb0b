"""The promises about a leased message: its verbs, its visibility timeout, and what a `with` block makes of its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import product

import pytest

import mqstore
from mqstore import Message, Reject, Retry
from tests.broker.support import full
from tests.conformance.consumers import LEASING, HandlerError, Lease, World

pytestmark = pytest.mark.parametrize("kind", LEASING, ids=str)


def received(world: World) -> Lease:
    consumer = world.consumer(visibility=30)
    world.put("a")
    lease = consumer.take()
    assert isinstance(lease, Lease)
    return lease


def raising(error: BaseException) -> Callable[[Message], None]:
    def act(message: Message) -> None:
        raise error

    return act


def leave(lease: Lease) -> None:
    """Release a lease. It counts as no attempt."""
    with suppress(GeneratorExit):
        lease.block(raising(GeneratorExit()))


def again(world: World) -> list[tuple[str, int]]:
    """Return what another consumer of the group can receive now."""
    found = world.consumer(visibility=30).handle()
    assert isinstance(found, list)
    return found


# -- verbs ------------------------------------------------------------------------------------------------------------


def test_ack_is_final(world: World) -> None:
    lease = received(world)
    assert not lease.settled
    lease.ack()
    lease.ack()  # harmless
    assert lease.settled
    world.advance(100)
    assert (again(world), world.lag()) == ([], 0)


def test_nack_redelivers_after_its_delay_or_the_policy(world: World) -> None:
    lease, consumer = received(world), world.consumer(visibility=30)
    for attempt, (delay, pause_s) in enumerate(((5, 5), (None, 20)), 2):
        lease.nack(delay)
        lease.nack(delay)
        world.advance(pause_s - 0.1)
        assert consumer.nothing()
        world.advance(0.1)
        lease = consumer.take()
        assert lease.seen == ("a", attempt)
    lease.ack()
    world.put("a")
    consumer.take().nack(0)
    assert again(world) == [("a", 2)]


def test_reject_writes_one_dead_letter(world: World) -> None:
    for reason in (("no such customer",), ()):
        lease = received(world)
        lease.reject(*reason)
        lease.reject("harmless")
    world.advance(100)
    assert (again(world), world.dead()) == ([], [("a", "no such customer"), ("a", "rejected")])


def test_release_redelivers_after_its_delay_without_an_attempt(world: World) -> None:
    lease, consumer = received(world), world.consumer(visibility=30)
    for delay in (0, 5, 0.5, 12 * 3600):  # more often than it may fail
        lease.release(delay)
        lease.release(1)
        if delay:
            world.clock.advance(round(1000 * delay) - 1)
            assert consumer.nothing()
        world.clock.advance(1)
        lease = consumer.take()
        assert lease.seen == ("a", 1)
    lease.ack()
    assert (world.lag(), world.dead()) == (0, [])


def test_extend_sets_the_time_left(world: World) -> None:
    lease = received(world)
    world.advance(20)
    lease.extend(60)
    assert lease.expires_at == world.clock.monotonic_ms() / 1000 + 60
    world.advance(59.9)
    assert again(world) == []
    lease.extend(1)
    world.advance(1)
    assert again(world) == [("a", 2)]


VERBS: dict[str, tuple[Callable[[Lease], object], list[tuple[str, int]]]] = {
    "ack": (Lease.ack, []),
    "nack": (Lease.nack, [("a", 2)]),
    "reject": (Lease.reject, []),
    "leave": (leave, [("a", 1)]),
    "release": (Lease.release, [("a", 1)]),
}
"""Verbs, and what can be received afterwards."""


def test_settled_lease_refuses_other_verbs(world: World) -> None:
    for first, (verb, expected) in VERBS.items():
        lease = received(world)
        verb(lease)
        for other in VERBS.keys() - {first, "leave"} - ({"release"} if first == "leave" else set()):
            with pytest.raises(mqstore.errors.ReceiptExpiredError, match="settled before"):
                VERBS[other][0](lease)
        with pytest.raises(mqstore.errors.ReceiptExpiredError, match="settled before"):
            lease.extend(100)
        world.advance(10)
        assert again(world) == expected
    assert len(world.dead()) == 1


def test_wrong_time_settles_nothing(world: World) -> None:
    lease = received(world)
    for wrong in (-1, 12 * 3600 + 1, float("nan"), float("inf")):
        for verb in (lease.nack, lease.release, lease.extend):
            with pytest.raises(mqstore.errors.ConfigError):
                verb(wrong)
    assert not lease.settled
    assert lease.expires_at == world.clock.monotonic_ms() / 1000 + 30
    lease.ack()


# -- visibility timeout -----------------------------------------------------------------------------------------------


def test_unsettled_message_is_hidden_until_its_timeout(world: World) -> None:
    lease = received(world)
    assert lease.expires_at == world.clock.monotonic_ms() / 1000 + 30
    world.advance(29.9)
    assert again(world) == []
    world.advance(0.1)
    assert again(world) == [("a", 2)]
    assert not lease.settled


def test_unsettled_message_is_dead_after_its_last_attempt(world: World) -> None:
    consumer = world.consumer(visibility=30)
    world.put("a")
    for attempt in (1, 2, 3):
        assert consumer.take().seen == ("a", attempt)
        world.advance(30)
    assert consumer.nothing()
    world.advance(30)
    assert [text for text, _ in world.dead()] == ["a"]


def test_late_verbs_change_nothing(world: World) -> None:
    consumer = world.consumer(visibility=30)
    world.put("a")
    late = consumer.take()
    world.advance(30)
    second = consumer.take()
    for verb in (late.ack, late.nack, late.reject, late.release, lambda: late.extend(100)):
        with pytest.raises(mqstore.errors.ReceiptExpiredError):
            verb()
    assert not late.settled
    assert late.expires_at < second.expires_at
    world.advance(29.9)
    assert again(world) == []
    second.ack()
    assert (world.dead(), world.lag()) == ([], 0)


def test_late_ack_counts_if_nobody_else_had_the_message(world: World) -> None:
    lease = received(world)
    world.advance(30)
    if world.kind.ordered:  # read again where it is
        lease.ack()
        assert (lease.settled, again(world)) == (True, [])
    else:  # the copy is there
        with pytest.raises(mqstore.errors.ReceiptExpiredError):
            lease.ack()
        assert not lease.settled


def test_verb_on_a_full_disk_can_be_repeated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in ("ack", "nack", "reject"):
        lease = received(world)
        with monkeypatch.context() as disk:
            for name in ("ack", "ack_at_once", "nack", "dead_letter"):
                disk.setattr(world.store.broker, name, full)
            with pytest.raises(mqstore.errors.StoreFullError):
                getattr(lease, verb)()
            with pytest.raises(HandlerError, match="mine"):
                lease.block(raising(HandlerError("mine")))
            assert not lease.settled
        getattr(lease, verb)()
        assert lease.settled
        world.advance(10)
        assert again(world) == ([("a", 2)] if verb == "nack" else [])
        assert len(world.dead()) == (verb == "reject")


# -- with -------------------------------------------------------------------------------------------------------------


def test_block_that_ends_well_acknowledges(world: World) -> None:
    seen: list[Message] = []
    received(world).block(seen.append)
    assert [(message.topic, message.body) for message in seen] == [(world.topic, b"a")]
    world.advance(100)
    assert (again(world), world.lag()) == ([], 0)


def test_block_that_raises_redelivers_and_raises(world: World) -> None:
    lease = received(world)
    with pytest.raises(HandlerError, match="mine"):
        lease.block(raising(HandlerError("mine")))
    assert lease.settled
    world.advance(9.9)
    assert again(world) == []
    world.advance(0.1)
    assert again(world) == [("a", 2)]


ENDS = None, HandlerError("mine"), GeneratorExit("left")
"""Ends of a block: well, by an error, interrupted."""


class BareRetry(Retry):
    def __init__(self) -> None:
        """Does not call the constructor of its base class."""


def test_block_obeys_retry(world: World) -> None:
    for retry, pause_s in ((Retry(5), 5), (Retry(0), 0), (Retry(), 10), (BareRetry(), 10)):
        received(world).block(raising(retry))
        if pause_s:
            world.advance(pause_s - 0.1)
            assert again(world) == []
        world.advance(0.1)
        assert again(world) == [("a", 2)]


def test_block_obeys_reject(world: World) -> None:
    received(world).block(raising(Reject("no such customer")))
    assert world.dead() == [("a", "no such customer")]
    world.advance(100)
    assert again(world) == []


def test_block_that_is_interrupted_counts_no_attempt(world: World) -> None:
    for error in (GeneratorExit,) if world.kind.aio else (KeyboardInterrupt, SystemExit):  # asyncio ends its loop
        lease = received(world)
        with pytest.raises(error):
            lease.block(raising(error()))
        assert again(world) == [("a", 1)]


def test_block_leaves_a_settled_message_settled(world: World) -> None:
    verbs = {"ack": [], "nack": [("a", 2)], "reject": [], "release": [("a", 1)]}
    for error, (verb, expected) in product(ENDS, verbs.items()):
        lease = received(world)
        with nullcontext() if error is None else pytest.raises(type(error)):
            lease.block((lambda message: None) if error is None else raising(error), verb)
        world.advance(10)
        assert again(world) == expected
    assert len(world.dead()) == len(ENDS)


def test_block_with_a_contradicting_order_raises(world: World) -> None:
    lease = received(world)
    with pytest.raises(mqstore.errors.ReceiptExpiredError, match="settled before, by ack"):
        lease.block(raising(Retry(5)), "ack")
    assert world.lag() == 0


def test_late_block_changes_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The caller sees what happened first: its own error, or that the lease had expired."""
    for error in ENDS:
        caplog.clear()
        lease = received(world)
        world.advance(30)
        second = world.consumer(visibility=30).take()
        with pytest.raises(mqstore.errors.ReceiptExpiredError if error is None else type(error)):
            lease.block((lambda message: None) if error is None else raising(error))
        assert error is None or "could not be released" in caplog.text
        second.ack()
        assert (again(world), world.lag()) == ([], 0)
