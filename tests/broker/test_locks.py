"""Queue locks: the table and the list of tests of delivery#locks, a model, and clients that race."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqstore import QueueRef, SimulatedClock
from mqstore.broker.tables.locks import LEASE_MS, QueueLock, QueueLocks
from tests.waiting import in_threads

Q = [QueueRef("orders", i) for i in range(4)]


@pytest.fixture
def locks(clock: SimulatedClock) -> QueueLocks:
    return QueueLocks(clock)


def test_lock_listing_shows_owner_age_and_expiry(locks: QueueLocks, clock: SimulatedClock) -> None:
    locks.try_lock("h", Q[1], "c2")
    clock.advance(LEASE_MS)
    locks.try_lock("g", Q[0], "c1")
    clock.advance(1)
    assert locks.snapshot() == [QueueLock("g", Q[0], "c1", 1, False), QueueLock("h", Q[1], "c2", LEASE_MS + 1, True)]


def test_a_lock_at_work_is_nobody_else_s_however_old(locks: QueueLocks, clock: SimulatedClock) -> None:
    """Nor is it of a consumer that takes the client id of one that was stopped."""
    locks.try_lock("g", Q[0], "c1")
    assert locks.begin_work("g", Q[0], "c1")
    clock.advance(10 * LEASE_MS)
    assert not locks.try_lock("g", Q[0], "c2")
    assert not locks.try_lock("g", Q[0], "c1")
    assert locks.unlock_batch("g", Q, "c1") == set()
    assert locks.owner("g", Q[0]) == "c1"
    assert [lock.expired for lock in locks.snapshot()] == [False]

    locks.end_work("g", Q[0])
    assert locks.try_lock("g", Q[0], "c2")


def test_lost_lock_refuses_work(locks: QueueLocks, clock: SimulatedClock) -> None:
    assert not locks.begin_work("g", Q[0], "c1")
    locks.try_lock("g", Q[0], "c1")
    assert not locks.begin_work("g", Q[0], "c2")
    clock.advance(LEASE_MS + 1)
    assert locks.begin_work("g", Q[0], "c1")  # it ran out, and nobody has taken it since
    assert not locks.begin_work("g", Q[0], "c1")  # another consumer of that name
    locks.end_work("g", Q[0])
    locks.try_lock("g", Q[0], "c2")
    assert not locks.begin_work("g", Q[0], "c1")


def test_dropped_client_loses_its_locks_at_work_too(locks: QueueLocks) -> None:
    """It may leave all groups, or some. Listeners are called only for groups whose locks it held."""
    notified: list[str] = []
    for group in ("g", "h"):
        locks.try_lock_batch(group, Q[:2], "c1")
        locks.try_lock(group, Q[2], "c2")
        locks.begin_work(group, Q[0], "c1")
    locks.try_lock("i", Q[0], "c2")
    locks.on_release.append(notified.append)
    locks.drop("c1", ["g", "i"])
    held = [(lock.group, lock.queue, lock.client_id) for lock in locks.snapshot()]
    rest = [("g", Q[2], "c2"), ("h", Q[0], "c1"), ("h", Q[1], "c1"), ("h", Q[2], "c2"), ("i", Q[0], "c2")]
    assert (held, notified) == (rest, ["g"])
    locks.drop("c1")
    locks.drop("c1")
    assert ([lock.client_id for lock in locks.snapshot()], notified) == (["c2"] * 3, ["g", "h"])


def test_released_locks_notify_listeners(locks: QueueLocks, clock: SimulatedClock) -> None:
    """Outside the mutex: they may look, and take."""
    told = []
    locks.on_release.append(lambda group: told.append((group, locks.try_lock(group, Q[0], "c2"))))
    locks.try_lock_batch("g", Q[:2], "c1")
    locks.unlock_batch("g", Q, "c3")
    locks.unlock_batch("h", Q, "c1")
    assert told == []
    locks.unlock_batch("g", Q, "c1")
    assert told == [("g", True)]


# --- a model -------------------------------------------------------------------------------------------------------

clients = st.sampled_from(["c1", "c2", "c3"])
calls = st.sampled_from(["lock", "renew", "unlock", "wait"])
operations = st.lists(
    st.tuples(calls, st.sampled_from("gh"), clients, st.sets(st.sampled_from(Q)), st.integers(0, 3)), max_size=40
)


@given(operations)
@example(  # taken after 60,001 ms, not 60,000; renewed though it ran out if nobody has it; given back though it ran out
    [
        ("lock", "g", "c1", {Q[0], Q[1], Q[2]}, 0),
        ("lock", "h", "c2", {Q[0]}, 0),
        ("wait", "g", "c1", set(), 2),
        ("lock", "g", "c2", {Q[1], Q[2]}, 0),
        ("unlock", "g", "c2", {Q[2]}, 0),
        ("renew", "g", "c1", {*Q}, 0),
        ("wait", "g", "c1", set(), 1),
        ("wait", "g", "c1", set(), 1),
        ("lock", "g", "c2", {Q[0]}, 0),
        ("wait", "g", "c1", set(), 2),
        ("unlock", "g", "c1", {*Q}, 0),
    ]
)
def test_every_answer_is_that_of_a_model(steps: list[tuple[str, str, str, set[QueueRef], int]]) -> None:
    """The model notes owner and end of each lock. An owner may renew or give back a lock that has run out, until
    another client has taken it."""
    clock = SimulatedClock()
    locks = QueueLocks(clock)
    noted: dict[tuple[str, QueueRef], tuple[str, int]] = {}
    for what, group, client, queues, turns in steps:
        now = clock.monotonic_ms()
        held = {queue: noted[group, queue] for queue in queues if (group, queue) in noted}
        own = {queue for queue, (owner, _) in held.items() if owner == client}
        if what == "wait":
            clock.advance(turns * 30_000 + (turns == 2))
        elif what == "unlock":
            assert locks.unlock_batch(group, queues, client) == own
            for queue in own:
                del noted[group, queue]
        else:
            free = {queue for queue in queues if queue not in held or held[queue][1] < now}
            got = own if what == "renew" else own | free
            assert (locks.renew_batch if what == "renew" else locks.try_lock_batch)(group, iter(queues), client) == got
            noted.update({(group, queue): (client, now + LEASE_MS) for queue in got})
        now = clock.monotonic_ms()
        live = {key: owner for key, (owner, end) in noted.items() if now <= end}
        assert {(g, queue): owner for g in "gh" for queue in Q if (owner := locks.owner(g, queue))} == live


# --- races ---------------------------------------------------------------------------------------------------------


def test_two_clients_never_both_hold_a_lease(locks: QueueLocks) -> None:
    """Each client writes its name on the queue when it gets the lock, and wipes it off before giving it back."""
    on_queue: dict[QueueRef, str] = {}
    turns = [0] * 4

    def consume(number: int) -> None:
        me = f"c{number}"
        while turns[number] < 200:
            for queue in locks.try_lock_batch("g", Q[:2], me):
                assert on_queue.setdefault(queue, me) == me
                assert locks.owner("g", queue) == me
                assert on_queue.pop(queue) == me
                locks.unlock_batch("g", [queue], me)
                turns[number] += 1

    in_threads(*(lambda number=number: consume(number) for number in range(4)))
    assert locks.snapshot() == []


class BarrierClock(SimulatedClock):
    """A clock that, once armed, lets another thread have a go each time it was read: the widest window for a race."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Any = None

    def monotonic_ms(self) -> int:
        now = super().monotonic_ms()
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return now


def test_a_renewal_that_read_the_clock_holds_off_a_take_over() -> None:
    """RocketMQ renews without the mutex: c1 finds its lock live in its last millisecond, c2 takes it over in the next,
    c1's renewal lands, and both believe. Here c2 waits until c1 is done, and is refused."""
    clock = BarrierClock()
    locks = QueueLocks(clock)
    locks.try_lock("g", Q[0], "c1")
    clock.advance(LEASE_MS)
    taken: list[bool] = []

    def take_over() -> None:
        clock.advance(1)
        thread.start()
        thread.join(0.05)  # time enough to get in, if nothing held it off; a passing run depends on no timing

    thread = threading.Thread(target=lambda: taken.append(locks.try_lock("g", Q[0], "c2")))
    clock.meanwhile = take_over
    assert locks.renew_batch("g", [Q[0]], "c1") == {Q[0]}
    thread.join()
    assert taken == [False]
    assert locks.owner("g", Q[0]) == "c1"
