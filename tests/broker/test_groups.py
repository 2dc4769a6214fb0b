"""Groups: their settings and how they are stored, when failed messages come back, what is forbidden."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mqstore import RetryPolicy, backoff, exponential
from mqstore.broker.tables.groups import GroupConfig, GroupTable
from mqstore.errors import ConfigError, GroupNotFoundError, NotPermittedError
from tests.broker.support import TableBench

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
FOR_EVER = 2_147_483_647


Groups = TableBench[GroupTable]


def opened(path: Path, **config: Any) -> Groups:
    """Open the groups of a store and their file."""
    return TableBench(path, "subscriptionGroup.json", GroupTable, **config)


@pytest.fixture
def groups(tmp_path: Path) -> Any:
    groups = opened(tmp_path / "s")
    yield groups
    groups.store.close()


# -- delays: the tables of delivery#backoff ----------------------------------------------------------------------------

ATTEMPT_MS = [1 * SECOND, 5 * SECOND, 10 * SECOND, 30 * SECOND, *(n * MINUTE for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10))]
ATTEMPT_MS += [20 * MINUTE, 30 * MINUTE]


def test_a_popped_message_waits_a_second_first() -> None:
    policy = RetryPolicy()
    assert [policy.delay(attempt) * SECOND for attempt in range(1, 17)] == ATTEMPT_MS
    assert policy.delay(FOR_EVER) == 7_200
    after_s = [policy._next_delay_ms(count) // SECOND for count in (-1, 0, 15, FOR_EVER)]
    assert after_s == [10, 10, 7_200, 7_200]
    with pytest.raises(ConfigError):
        policy.delay(0)


@pytest.mark.parametrize(
    ("policy", "expected_ms"),
    [
        (exponential(0.005, 5, 1), [5, 25, 125, 625, 1000, 1000]),
        (exponential(), [5_000, 10_000, 20_000, 40_000]),
        (exponential(1, 2, 3), [1_000, 2_000, 3_000, 3_000]),
        (backoff(1, 5), [1_000, 5_000, 5_000]),
        (RetryPolicy(delays=[0]), [0, 0, 0]),
        (RetryPolicy(delays=[1, 2]), [1_000, 2_000, 2_000, 2_000]),
        (RetryPolicy(delays=[timedelta(minutes=1), 0.25]), [60_000, 250, 250]),
    ],
)
def test_a_policy_of_ones_own_starts_with_its_first_entry_in_every_model(
    policy: RetryPolicy, expected_ms: list[int]
) -> None:
    config = GroupConfig("g", retry_policy=policy)
    assert [config.delay_ms(attempt) for attempt in range(1, len(expected_ms) + 1)] == expected_ms
    assert [policy._next_delay_ms(r) for r in range(len(expected_ms))] == expected_ms


def test_an_exponent_has_a_bound_so_that_no_attempt_number_takes_for_ever() -> None:
    policy = exponential(1, 10**6, 7200)
    assert policy.delay(2**31) * SECOND == policy._next_delay_ms(2**31) == 2 * HOUR
    slow = exponential(0.001, 2, timedelta(days=36_500))
    assert slow._next_delay_ms(32) == slow._next_delay_ms(33) == 2**32


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetryPolicy(0),
        lambda: RetryPolicy(True),
        lambda: RetryPolicy(2**31),
        lambda: RetryPolicy(delays=[]),
        lambda: RetryPolicy(3, 10),  # type: ignore[arg-type]
        lambda: RetryPolicy(3, "30"),
        lambda: RetryPolicy(delays=[-1]),
        lambda: RetryPolicy(delays=[float("nan")]),
        lambda: exponential(factor=0),
        lambda: exponential(-1),
    ],
)
def test_a_policy_that_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


# -- attempts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queues", [0, -1])
def test_a_file_without_retry_queues_means_no_retries_and_is_kept(queues: int) -> None:
    config = GroupConfig.from_json("g", {"retryQueueNums": queues})
    assert config.max_attempts == 1
    assert config.as_json()["retryQueueNums"] == queues
    assert config.as_json()["retryMaxTimes"] == 16


# -- coming into being -------------------------------------------------------------------------------------------------


ORDERED_PAUSES_S = [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    ("settings", "max_attempts", "pauses_s"),
    [
        ({}, None, ORDERED_PAUSES_S),
        ({"max_attempts": 5}, 5, ORDERED_PAUSES_S),
        ({"retry_max_times": 4}, 5, ORDERED_PAUSES_S),
        ({"retry_policy": RetryPolicy(3, [7])}, 3, [7, 7]),
        ({"retry_policy": RetryPolicy()}, 17, [1, 5, 10, 30, 60]),
        ({"orderly": False}, 17, [1, 5, 10, 30, 60]),
    ],
)
def test_an_ordered_group_retries_for_ever_by_default(
    groups: Groups, settings: dict[str, Any], max_attempts: int | None, pauses_s: list[int]
) -> None:
    groups.table.create("g", **{"orderly": True, **settings})
    config = groups.again().require("g")
    assert config.max_attempts == max_attempts
    assert [config.delay_ms(attempt) / 1000 for attempt in range(1, len(pauses_s) + 1)] == pauses_s


def test_an_unknown_group_comes_into_being_with_its_first_use_and_stays(groups: Groups) -> None:
    assert groups.table.get("g") is None
    config = groups.table.require("g")
    assert config == GroupConfig("g")
    assert groups.again().get("g") == config
    assert groups.stored()["subscriptionGroupTable"]["g"] == {
        "consumeBroadcastEnable": True,
        "consumeEnable": True,
        "consumeMessageOrderly": False,
        "groupName": "g",
        "groupRetryPolicy": {"type": "CUSTOMIZED"},
        "retryMaxTimes": 16,
        "retryQueueNums": 1,
    }


@pytest.mark.parametrize("name", ["", "a@b", "..", "%RETRY%g", "ä", "x" * 121])
def test_no_group_comes_into_being_under_a_name_that_cannot_be(groups: Groups, name: str) -> None:
    with pytest.raises(GroupNotFoundError, match="cannot be created"):
        groups.table.require(name)
    with pytest.raises(ConfigError):
        groups.table.create(name)
    assert not groups.file.exists()
    assert groups.table.require("x" * 120).name == "x" * 120


def test_the_engines_own_groups_are_nobody_elses(groups: Groups) -> None:
    for call in (groups.table.require, groups.table.create):
        with pytest.raises(NotPermittedError):
            call("CID_RMQ_SYS_START")
    assert not groups.file.exists()


def test_with_auto_create_off_only_create_makes_groups(tmp_path: Path) -> None:
    groups = opened(tmp_path / "s", auto_create_groups=False)
    with pytest.raises(GroupNotFoundError, match="auto_create_groups"):
        groups.table.require("g")
    created = groups.table.create("g", orderly=True)
    assert groups.table.require("g") is created
    groups.store.close()


# -- changing ----------------------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "consume_enable": False,
    "consume_broadcast_enable": False,
    "orderly": True,
    "retry_queues": 3,
    "retry_policy": RetryPolicy(5, delays=[1, 60]),
    "start": "latest",
}


def test_each_setting_survives_a_restart_and_touches_no_other(groups: Groups) -> None:
    for name, value in (*EVERYTHING.items(), ("start", 1_700_000_000_000)):
        groups.table.create(name)
        groups.table.alter(name, **{name: value})
        assert groups.again().require(name) == GroupConfig(name, **{name: value})


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        (RetryPolicy(), {"type": "CUSTOMIZED"}),
        (RetryPolicy(delays=[1, 2]), {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1000, 2000]}}),
        (
            exponential(1, 3, 60),
            {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 1000, "max": 60_000, "multiplier": 3}},
        ),
    ],
)
def test_a_policy_is_stored_in_rocketmqs_members(groups: Groups, policy: RetryPolicy, stored: dict[str, Any]) -> None:
    groups.table.create("g", retry_policy=policy)
    assert groups.stored()["subscriptionGroupTable"]["g"]["groupRetryPolicy"] == stored
    assert groups.again().require("g").retry_policy == policy


def test_retries_and_a_policy_given_together_make_one_policy(groups: Groups) -> None:
    config = groups.table.create("g", retry_policy=RetryPolicy(9, delays=[1]), retry_max_times=3)
    assert (config.max_attempts, str(config.retry_policy)) == (4, "1s")
    assert groups.table.alter("g", retry_max_times=FOR_EVER).max_attempts is None
    assert groups.again().require("g").delay_ms(7) == 1000


SETTINGS: dict[str, list[Any]] = {
    "retry_queues": [0, -1],
    "retry_max_times": [2**31],
    "max_attempts": [0, True],
    "consume_enable": [1],
    "start": ["middle", -1],
    "retry_policy": [17],
    "unknown": [{}],  # what is kept of members of RocketMQ's file
    "no_such_setting": [1],
}


@pytest.mark.parametrize(
    "settings",
    [
        *({name: value} for name, values in SETTINGS.items() for value in values),
        {"max_attempts": 3, "retry_max_times": 3},
    ],
)
def test_a_setting_that_cannot_be_makes_and_changes_no_group(groups: Groups, settings: dict[str, Any]) -> None:
    groups.table.create("g")
    before = groups.file.read_bytes()
    for change in (groups.table.create, groups.table.alter):
        with pytest.raises(ConfigError, match="max_attempts" if "max_attempts" in settings else "."):
            change("h" if change == groups.table.create else "g", **settings)
    assert groups.file.read_bytes() == before
    assert (groups.table.names(), groups.table.require("g")) == (["g"], GroupConfig("g"))


def test_creating_twice_is_an_error_unless_it_may_exist(groups: Groups) -> None:
    first = groups.table.create("g", orderly=True)
    with pytest.raises(ConfigError, match="exists already"):
        groups.table.create("g", exist_ok=False)
    assert groups.table.create("g") is first


def test_missing_group_cannot_be_changed(groups: Groups) -> None:
    for call in (
        lambda: groups.table.alter("g", orderly=True),
        lambda: groups.table.delete("g"),
        lambda: groups.table.forbid("g", "t"),
    ):
        with pytest.raises(GroupNotFoundError):
            call()
    assert not groups.file.exists()


def test_deleted_group_and_its_bans_stay_deleted(groups: Groups) -> None:
    groups.table.create("g")
    groups.table.create("other")
    groups.table.forbid("g", "t")
    groups.table.delete("g")
    for table in (groups.table, groups.again()):
        assert table.names() == ["other"]
        assert table.may_read("g", "t")


def test_listeners_hear_of_each_change_once_it_can_be_seen(groups: Groups) -> None:
    seen: list[tuple[str, GroupConfig | None]] = []
    groups.table.on_change.append(lambda name: seen.append((name, groups.again().get(name))))
    created = groups.table.create("g")
    altered = groups.table.alter("g", orderly=True)
    groups.table.alter("g", orderly=True)  # nothing changes
    groups.table.delete("g")
    assert seen == [("g", created), ("g", altered), ("g", None)]


# -- forbidden bits ----------------------------------------------------------------------------------------------------


def test_ban_is_saved_beside_unknown_bits(groups: Groups) -> None:
    table = groups.write('{"forbiddenTable":{"g":{"t":1,"w":1}},"subscriptionGroupTable":{"g":{}}}')
    assert table.may_read("g", "t")  # the bit of reading is another one
    table.forbid("g", "t")
    table.forbid("g", "u")
    assert groups.stored()["forbiddenTable"] == {"g": {"t": 0b101, "u": 0b100, "w": 1}}
    assert not table.may_read("g", "t")
    table.forbid("g", "t", on=False)
    table.forbid("g", "u", on=False)
    assert table.may_read("g", "u")
    assert groups.stored()["forbiddenTable"] == {"g": {"t": 1, "w": 1}}


def test_clearing_the_last_bit_of_a_topic_leaves_other_topics_alone(groups: Groups) -> None:
    groups.table.create("g")
    groups.table.forbid("g", "t")
    groups.table.forbid("g", "u")
    groups.table.forbid("g", "t", on=False)
    for table in (groups.table, groups.again()):  # RocketMQ drops the whole group here, and does not save it
        assert (table.may_read("g", "t"), table.may_read("g", "u")) == (True, False)
    groups.table.forbid("g", "u", on=False)
    assert groups.stored()["forbiddenTable"] == {}


# -- files of others ---------------------------------------------------------------------------------------------------

JAVAS = """{
\t"dataVersion":{
\t\t"counter":41,
\t\t"stateVersion":3,
\t\t"timestamp":1600000000000
\t},
\t"forbiddenTable":{"g1":{"T":4}},
\t"subscriptionGroupTable":{
\t\t"g1":{
\t\t\t"attributes":{"lite.bind.topic":"x"},
\t\t\t"brokerId":0,
\t\t\t"consumeEnable":false,
\t\t\t"consumeMessageOrderly":true,
\t\t\t"groupName":"g1",
\t\t\t"groupRetryPolicy":{
\t\t\t\t"exponentialRetryPolicy":{"initial":1000,"max":3000,"multiplier":2},
\t\t\t\t"newest":7,
\t\t\t\t"type":"EXPONENTIAL"
\t\t\t},
\t\t\t"retryMaxTimes":-1,
\t\t\t"subscriptionDataSet":[{"namespace":"n","topic":"T"}],
\t\t\t"whichBrokerWhenConsumeSlowly":1
\t\t},
\t\t"a|b%c":{},
\t\t"CID_RMQ_SYS_TRANS":{}
\t},
\t"lastTable":{1:2}
}"""


def test_java_file_is_read_and_unknown_fields_are_kept(groups: Groups) -> None:
    table = groups.write(JAVAS)
    config = table.require("g1")
    assert (config.consume_enable, config.orderly, config.max_attempts) == (False, True, 1)
    assert [config.delay_ms(attempt) for attempt in (1, 2, 3)] == [1000, 2000, 3000]
    assert not table.may_read("g1", "T")
    assert table.require("a|b%c") == GroupConfig("a|b%c")  # reading is wider than creating
    assert (table.names(), table.names(system=True)[0]) == (["a|b%c", "g1"], "CID_RMQ_SYS_TRANS")

    table.alter("g1", consume_enable=True, retry_max_times=4)
    stored = groups.stored()
    assert stored["dataVersion"] == {"counter": 42, "stateVersion": 0, "timestamp": 1_700_000_000_000}
    assert stored["lastTable"] == {"1": 2}
    assert stored["forbiddenTable"] == {"g1": {"T": 4}}
    entry = stored["subscriptionGroupTable"]["g1"]
    assert entry["subscriptionDataSet"] == [{"namespace": "n", "topic": "T"}]
    assert entry["attributes"] == {"lite.bind.topic": "x"}
    assert entry["groupRetryPolicy"] == {
        "exponentialRetryPolicy": {"initial": 1000, "max": 3000, "multiplier": 2},
        "newest": 7,
        "type": "EXPONENTIAL",
    }
    assert (entry["consumeEnable"], entry["retryMaxTimes"]) == (True, 4)
    table.alter("g1", retry_policy=RetryPolicy())
    assert groups.stored()["subscriptionGroupTable"]["g1"]["groupRetryPolicy"] == {"type": "CUSTOMIZED"}


@pytest.mark.parametrize("stored", [{}, {"customizedRetryPolicy": {}}, {"customizedRetryPolicy": {"next": []}}])
def test_a_policy_without_a_list_is_the_standard_one(stored: dict[str, Any]) -> None:
    assert RetryPolicy._from_json(stored) == RetryPolicy()


def test_numbers_below_zero_in_a_file_wait_for_nothing() -> None:
    listed = RetryPolicy._from_json({"customizedRetryPolicy": {"next": [-5, 7]}})
    assert [listed.delay(1), listed.delay(2)] == [0, 0.007]
    grown = RetryPolicy._from_json({"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": -1, "multiplier": -2}})
    assert [grown.delay(n) for n in (1, 2)] == [0, 0]
