"""A seat in a group: who may join, whose queues are whose, who is told of what (clients#group, clients#rebalance)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import mqstore
from mqstore import QueueRef, SimulatedClock
from mqstore.broker.broker import Broker
from mqstore.broker.tables.locks import LEASE_MS
from mqstore.broker.tables.members import Mode
from mqstore.client.allocation import Strategy, avg
from mqstore.client.membership import Membership, client_id_of
from mqstore.errors import ConfigError, GroupInUseError
from mqstore.log.store import MessageStore

ALL = {"orders": ("TAG", "*")}
Q = [QueueRef("orders", i) for i in range(4)]
CLUSTERING = Mode("queue")
BROADCASTING = Mode("queue", broadcasting=True)


class Seat(Membership):
    """One that counts how often it was told."""

    def __init__(self, broker: Broker, client_id: str, mode: Mode = CLUSTERING, strategy: Strategy = avg) -> None:
        self.told = 0
        super().__init__(broker, "g", client_id, mode, strategy, self._tell)

    def _tell(self) -> None:
        self.told += 1

    def news(self) -> int:
        """How often it was told since the last call."""
        told, self.told = self.told, 0
        return told

    def mine(self) -> set[QueueRef]:
        return set().union(*self.share().values())

    def rebalance(self) -> set[QueueRef]:
        """As a consumer does: give what is another's, take what is mine; what is held then."""
        mine = self.mine()
        self.give(self.held - mine)
        self.take(mine - self.held)
        return set(self.held)


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def broker(tmp_path: Path, clock: SimulatedClock) -> Iterator[Broker]:
    with Broker(MessageStore(tmp_path, config=mqstore.StoreConfig(clock=clock))) as broker:
        broker.topics.create("orders", queues=4)
        broker.groups.create("g")
        yield broker


@pytest.fixture
def seat(broker: Broker) -> Callable[..., Seat]:
    def join(client_id: str, mode: Mode = CLUSTERING, strategy: Strategy = avg) -> Seat:
        seat = Seat(broker, client_id, mode, strategy)
        seat.join(ALL)
        return seat

    return join


# --- who may join --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["", ".", "..", "a/b", "a b", "ü", "x" * 121, 7, "a\n"])
def test_a_client_id_is_a_name_that_a_folder_can_have(wrong: object) -> None:
    with pytest.raises(ConfigError, match="client id"):
        client_id_of(wrong)


def test_client_ids_of_rocketmq_s_form_are_fine() -> None:
    for fine in ("10.0.0.1@1#1", "4711-0badcafe", "x" * 120, "..."):
        assert client_id_of(fine) == fine


def test_joining_triggers_a_rebalance(seat: Callable[..., Seat]) -> None:
    """What happened before it listened it has not heard of."""
    assert seat("c1").news() >= 1


# --- whose queues are whose ----------------------------------------------------------------------------------------


def test_a_topic_that_is_not_there_has_no_share_and_is_logged_once(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    first = Seat(broker, "c1")
    first.join({"later": ("TAG", "*")})

    with caplog.at_level(logging.INFO, "mqstore"):
        assert first.share() == first.share() == {}
    assert len(caplog.records) == 1
    first.news()
    broker.put("later", b"x")
    assert first.news() == 1
    assert first.share() == {"later": {QueueRef("later", i) for i in range(4)}}


def test_a_strategy_that_fails_or_invents_queues_moves_nothing(
    seat: Callable[..., Seat], caplog: pytest.LogCaptureFixture
) -> None:
    answer: list[Sequence[QueueRef]] = [Q]

    def strange(client_id: str, queues: Sequence[QueueRef], members: Sequence[str]) -> Sequence[QueueRef]:
        assert (client_id, list(queues), list(members)) == ("c1", Q, ["c1"])
        return answer[0]

    first = seat("c1", strategy=strange)
    assert first.share() == {"orders": set(Q)}
    for wrong in ([QueueRef("orders", 4)], [QueueRef("other", 0)], None, [7]):
        answer[0] = wrong  # type: ignore[assignment]
        assert first.share() == {}
    assert len(caplog.records) == 1
    answer[0] = [Q[1], Q[1]]
    assert first.share() == {"orders": {Q[1]}}


def test_a_topic_that_may_not_be_read_is_nobody_s(seat: Callable[..., Seat], broker: Broker) -> None:
    first = seat("c1")
    broker.topics.alter("orders", perm=2)

    assert first.share() == {"orders": frozenset()}


# --- handing over --------------------------------------------------------------------------------------------------


def test_only_lock_requesters_are_notified(seat: Callable[..., Seat]) -> None:
    first, second = seat("c1"), seat("c2")
    first.rebalance()
    second.rebalance()
    first.news(), second.news()
    first.give([Q[0]])

    assert (first.news(), second.news()) == (0, 0)


def test_queue_of_another_member_is_dropped(seat: Callable[..., Seat], broker: Broker) -> None:
    first = seat("c1")
    first.rebalance()
    second = seat("c2")
    second.rebalance()
    third = seat("c0")  # of four queues among three: c0 has 0 and 1, c1 has 2, c2 has 3
    assert second.mine() == {Q[3]}
    second.news()
    first.give([Q[2]])
    assert second.news() == 0
    first.give([Q[3]])
    assert second.news() == 1
    assert third.mine() == {Q[0], Q[1]}


def test_a_queue_at_work_is_not_for_another_who_has_taken_the_name(seat: Callable[..., Seat]) -> None:
    first = seat("c1")
    first.rebalance()
    assert first.begin_work(Q[0])
    first.leave()
    second = seat("c1")
    assert second.rebalance() == set(Q[1:])
    first.end_work(Q[0])
    assert second.rebalance() == set(Q)
    first.give(Q)

    assert second.renew() == set()


def test_work_on_a_queue_of_a_broadcast_needs_no_lock(seat: Callable[..., Seat]) -> None:
    first = seat("c1", BROADCASTING)
    assert first.begin_work(Q[0])
    first.end_work(Q[0])


def test_changes_of_other_groups_are_ignored(seat: Callable[..., Seat], broker: Broker) -> None:
    first = seat("c1")
    first.news()
    broker.groups.create("h")
    other = Membership(broker, "h", "c1", CLUSTERING, avg, lambda: None)
    other.join(ALL)
    other.take(Q)
    other.leave()
    broker.topics.create("bills")

    assert first.news() == 0


# --- who hangs -----------------------------------------------------------------------------------------------------


def test_member_without_queues_loses_its_seat(seat: Callable[..., Seat], broker: Broker, clock: SimulatedClock) -> None:
    """Else a queue that comes later would be nobody's: the share of one who never takes it."""
    seats = [seat(f"c{i}") for i in range(5)]
    assert seats[4].mine() == set()
    for _ in range(4):
        clock.advance(20_000)
        for each in seats[:4]:
            each.renew()
    broker.topics.alter("orders", read_queues=5)

    assert set().union(*(each.mine() for each in seats[:4])) == {*Q, QueueRef("orders", 4)}


def test_a_lone_member_loses_nothing_by_being_away(seat: Callable[..., Seat], clock: SimulatedClock) -> None:
    first = seat("c1")
    first.rebalance()
    clock.advance(10 * LEASE_MS)

    assert first.renew() == set()
    assert first.rebalance() == set(Q)


def test_the_client_id_of_one_who_hangs_is_free_after_the_lease(
    seat: Callable[..., Seat], broker: Broker, clock: SimulatedClock
) -> None:
    first = seat("c1")
    first.rebalance()
    clock.advance(LEASE_MS)
    with pytest.raises(GroupInUseError):
        seat("c1")
    clock.advance(1)
    second = seat("c1")
    assert second.rebalance() == set(Q)

    for call in (first.renew, first.share):  # its locks look like those of the first one
        with pytest.raises(GroupInUseError, match="client_id"):
            call()
    first.leave()
    assert second.renew() == set()
    assert broker.members.members("g") == ["c1"]
