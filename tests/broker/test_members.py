"""Group membership: who may join (clients#group), and who hears of it."""

from __future__ import annotations

import logging

import pytest

from mqstore.broker.tables.members import Members, Mode
from mqstore.errors import ConfigError, GroupInUseError, SubscriptionConflictError

ALL = {"orders": ("TAG", "*")}
QUEUE = Mode("queue")


@pytest.fixture
def members() -> Members:
    return Members()


def test_a_group_without_members_is_as_if_never_used(members: Members) -> None:
    members.register("c1", "g", ALL, QUEUE)
    assert members.unregister("c1", "g")
    assert not members.unregister("c1", "g")
    assert members.groups() == []
    assert members.mode("g") is None
    assert members.subscriptions("g") == {}
    members.register("c2", "g", {"other": ("TAG", "*")}, Mode("pop"))
    assert members.mode("g") == Mode("pop")


def test_only_its_owner_unregisters_a_member(members: Members) -> None:
    mine, other = object(), object()
    members.register("c1", "g", ALL, QUEUE, owner=mine)
    assert not members.unregister("c1", "g", owner=other)
    assert members.members("g") == ["c1"]
    assert members.unregister("c1", "g", owner=mine)
    members.register("c1", "g", ALL, QUEUE, owner=mine)
    assert members.unregister("c1", "g")  # given up, by who watches over all


@pytest.mark.parametrize(
    "other",
    [Mode("pop"), Mode("queue", ordered=True), Mode("queue", broadcasting=True), Mode("queue", strategy="circle")],
    ids=str,
)
def test_a_group_is_consumed_in_one_mode(members: Members, other: Mode) -> None:
    members.register("c1", "g", ALL, QUEUE)
    with pytest.raises(GroupInUseError, match="'g' is consumed as \\(queue, unordered, clustering\\) by 'c1'"):
        members.register("c2", "g", ALL, other)
    assert members.members("g") == ["c1"]


@pytest.mark.parametrize(
    "subscriptions",
    [{}, {"orders": ("TAG", "*"), "other": ("TAG", "*")}, {"orders": ("TAG", "a")}, {"orders": ("SQL92", "*")}],
)
def test_members_subscribe_alike(members: Members, subscriptions: dict[str, tuple[str, str]]) -> None:
    members.register("c1", "g", ALL, QUEUE)
    with pytest.raises(SubscriptionConflictError, match=r"'c2' subscribes to .*, but 'c1' .* orders \(TAG \*\)"):
        members.register("c2", "g", subscriptions, QUEUE)
    assert members.members("g") == ["c1"]
    assert members.subscriptions("g") == ALL


def test_a_lone_member_may_change_its_mind_and_one_of_two_may_not(members: Members) -> None:
    members.register("c1", "g", ALL, QUEUE)
    more = {**ALL, "other": ("TAG", "a")}
    assert members.register("c1", "g", more, Mode("pop"))
    assert members.subscriptions("g") == more
    members.register("c2", "g", more, Mode("pop"))
    with pytest.raises(SubscriptionConflictError):
        members.register("c1", "g", ALL, Mode("pop"))
    with pytest.raises(GroupInUseError):
        members.register("c1", "g", more, QUEUE)
    assert members.subscriptions("g") == more
    assert members.mode("g") == Mode("pop")


def test_registering_the_same_again_is_no_change(members: Members) -> None:
    told: list[str] = []
    members.on_change.append(told.append)
    assert members.register("c1", "g", {"orders": ("TAG", "a||b")}, QUEUE)
    assert not members.register("c1", "g", {"orders": ("TAG", "b || a")}, QUEUE)
    assert told == ["g"]


@pytest.mark.parametrize("client_id", ["", None, 7])
def test_a_client_has_a_name(members: Members, client_id: str) -> None:
    with pytest.raises(ConfigError, match="client id"):
        members.register(client_id, "g", ALL, QUEUE)
    assert members.groups() == []


def test_listener_sees_the_change_and_may_query(members: Members) -> None:
    seen: list[tuple[str, list[str]]] = []
    members.on_change.append(lambda group: seen.append((group, members.members(group))))
    members.register("c1", "g", ALL, QUEUE)
    members.register("c2", "g", ALL, QUEUE)
    members.unregister("c1", "g")
    with pytest.raises(GroupInUseError):
        members.register("c3", "g", ALL, Mode("pop"))
    members.unregister("nobody", "g")
    assert seen == [("g", ["c1"]), ("g", ["c1", "c2"]), ("g", ["c2"])]


def test_a_failing_listener_is_logged_and_keeps_nobody_from_hearing(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def fail(group: str) -> None:
        raise RuntimeError("a listener's own mistake")

    members.on_change.extend([fail, told.append])
    with caplog.at_level(logging.ERROR):
        members.register("c1", "g", ALL, QUEUE)
    assert told == ["g"]
    assert members.members("g") == ["c1"]
    assert "clients of group g have joined" in caplog.text
