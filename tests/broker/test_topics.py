"""Topics: which there are, how they come and go, and that numbering outlives them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.tables.names import QueueKey
from mqstore.broker.tables.offsets import OffsetTable
from mqstore.broker.tables.topics import TopicConfig, TopicTable
from mqstore.errors import ConfigError, InvalidMessageError, NotPermittedError, TopicNotFoundError
from mqstore.log.store import MessageStore
from tests.broker.support import TableBench
from tests.conftest import Golden
from tests.log.support import open_store

SYSTEM_TOPICS = (
    *("SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"),
    *("rmq_sys_wheel_timer", "rmq_sys_REVIVE_LOG_DefaultCluster", "rmq_sys_pop_log", "TBW102", "SELF_TEST_TOPIC"),
    *("BenchmarkTest", "OFFSET_MOVED_EVENT", "RMQ_SYS_TRACE_TOPIC", "CHECKPOINT_TOPIC"),
)


class Topics(TableBench[TopicTable]):
    """A store, its topics and offsets, and the topics' file."""

    def __init__(self, path: Path, **config: Any) -> None:
        super().__init__(path, "topics.json", self._load_both, **config)

    def _load_both(self, store: MessageStore) -> TopicTable:
        self.offsets = OffsetTable(store)
        return TopicTable(store, self.offsets)


@pytest.fixture
def topics(tmp_path: Path) -> Any:
    topics = Topics(tmp_path / "s")
    yield topics
    topics.store.close()


# -- coming into being -------------------------------------------------------------------------------------------------


def test_the_first_send_makes_a_topic_of_four_queues(topics: Topics) -> None:
    assert topics.table.get("orders") is None
    config = topics.table.for_send("orders")
    assert config == TopicConfig("orders", 4, 4, 6)
    assert topics.table.get("orders") is config
    assert topics.stored() == {
        "dataVersion": {"counter": 1, "stateVersion": 0, "timestamp": 1_700_000_000_000},
        "topicConfigTable": {
            "orders": {
                "attributes": {},
                "order": False,
                "perm": 6,
                "readQueueNums": 4,
                "topicName": "orders",
                "writeQueueNums": 4,
            }
        },
    }
    assert topics.again().get("orders") == config


def test_a_known_topic_costs_nothing_but_the_look_up(topics: Topics) -> None:
    topics.table.for_send("a")
    topics.table.for_send("a")
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    found = topics.table.for_send("a"), topics.table.get("a")
    sys.setprofile(None)
    assert called == ["for_send", "get"]
    assert found[0] is found[1] is not None


def test_auto_create_off_still_creates_retry_topics(tmp_path: Path) -> None:
    topics = Topics(tmp_path / "s", auto_create_topics=False)
    with pytest.raises(TopicNotFoundError, match="auto_create_topics"):
        topics.table.for_send("a")
    with pytest.raises(NotPermittedError, match="send_back"):
        topics.table.for_send("%RETRY%g")
    assert topics.table.ensure("%RETRY%g") == TopicConfig("%RETRY%g", 1, 1, 6)
    assert topics.table.ensure("%DLQ%g").read_queues == 1
    topics.table.create("a")
    assert topics.table.for_send("a").name == "a"
    topics.store.close()


def test_nobody_sends_to_creates_alters_or_deletes_a_topic_of_the_engine(topics: Topics) -> None:
    table = topics.table
    for name in SYSTEM_TOPICS:
        table.ensure(name, 2)
        for call in (table.for_send, table.create, table.delete, lambda name: table.alter(name, perm=4)):
            with pytest.raises(NotPermittedError):
                call(name)
        assert table.require(name) == TopicConfig(name, 2, 2)
    assert table.names() == []
    assert table.names(system=True) == sorted(SYSTEM_TOPICS)


@pytest.mark.parametrize("name", ["", "a@b", "..", "%DLQ%g", "ä", "x" * 128, 7])
def test_no_topic_comes_into_being_under_a_name_that_cannot_be(topics: Topics, name: Any) -> None:
    for call in (topics.table.for_send, topics.table.create):
        with pytest.raises(InvalidMessageError):
            call(name)
    assert not topics.file.exists()


@pytest.mark.parametrize("name", ["..", "%RETRY%" + "x" * 249, "%RETRY%a@b"])
def test_the_engine_too_makes_no_topic_that_cannot_be_a_folder(topics: Topics, name: str) -> None:
    with pytest.raises(InvalidMessageError):
        topics.table.ensure(name)
    assert not topics.file.exists()
    assert topics.table.ensure("%RETRY%" + "x" * 248).read_queues == 1
    assert topics.table.for_send("x" * 127).name == "x" * 127


# -- creating ----------------------------------------------------------------------------------------------------------


def test_create_takes_counts_for_both_or_for_each(topics: Topics) -> None:
    counts = {
        name: (config.read_queues, config.write_queues)
        for name, config in {
            "a": topics.table.create("a", queues=2),
            "b": topics.table.create("b", queues=2, write_queues=1),
            "c": topics.table.create("c", read_queues=16_384),
            "d": topics.table.alter("a", queues=8),
        }.items()
    }
    assert counts == {"a": (2, 2), "b": (2, 1), "c": (16_384, 4), "d": (8, 8)}
    topics.table.alter("a", queues=12, write_queues=10)
    assert topics.table.require("a") == topics.again().require("a") == TopicConfig("a", 12, 10)


WISHES: dict[str, list[Any]] = {
    "queues": [16_385, True],
    "read_queues": [0],
    "write_queues": [0],
    "perm": [8, -1, "RW-"],
    "message_type": ["SOMETHING"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WISHES.items() for value in values])
def test_a_wish_that_cannot_be_makes_and_changes_no_topic(topics: Topics, name: str, value: Any) -> None:
    before = topics.table.create("a", message_type="FIFO")
    for change in (
        lambda: topics.table.create("b", **{name: value}),
        lambda: topics.table.alter("a", **{name: value}),
        lambda: topics.table.alter("a", order=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError):
            change()
    assert topics.table.configs() == topics.again().configs() == [before]


def test_creating_twice_is_an_error_unless_it_may_exist(topics: Topics) -> None:
    first = topics.table.create("a", queues=2)
    with pytest.raises(ConfigError, match="exists already"):
        topics.table.create("a", exist_ok=False)
    assert topics.table.create("a", queues=9) is first
    topics.fill("found")
    with pytest.raises(ConfigError, match="exists already"):
        topics.table.create("found", exist_ok=False)


# -- altering ----------------------------------------------------------------------------------------------------------


def test_missing_topic_cannot_be_changed(topics: Topics) -> None:
    for call in (topics.table.require, topics.table.delete, lambda name: topics.table.alter(name, perm=4)):
        with pytest.raises(TopicNotFoundError):
            call("a")


def test_queues_are_removed_from_writers_first(topics: Topics) -> None:
    topics.table.create("a", queues=4)
    topics.fill("a", 3, 2)
    for both_at_once in ({"read_queues": 2}, {"read_queues": 2, "write_queues": 2}):
        with pytest.raises(ConfigError, match=r"write_queues|written and never read"):
            topics.table.alter("a", **both_at_once)  # type: ignore[arg-type]
    topics.table.alter("a", write_queues=2)
    with pytest.raises(ConfigError, match=r"queues 3 have"):
        topics.table.alter("a", read_queues=2)  # no group was ever there
    topics.offsets.commit(QueueKey("g", "a", 3), 2)
    topics.offsets.commit(QueueKey("h", "a", 3), 1)
    with pytest.raises(ConfigError, match=r"queues 3 have"):
        topics.table.alter("a", read_queues=2)
    topics.offsets.commit(QueueKey("h", "a", 3), 2)
    topics.offsets.commit(QueueKey("k", "a", 0), 0)  # was never in queue 3, so it has all of it before it
    with pytest.raises(ConfigError, match=r"queues 3 have"):
        topics.table.alter("a", read_queues=2)
    topics.offsets.commit(QueueKey("k", "a", 3), 2)
    assert topics.table.alter("a", read_queues=2).read_queues == 2


def test_more_writers_than_readers_and_hidden_messages_need_force(topics: Topics) -> None:
    topics.table.create("a", queues=4)
    topics.fill("a", 3)
    with pytest.raises(ConfigError, match="never read"):
        topics.table.alter("a", write_queues=5)
    assert topics.table.alter("a", write_queues=5, force=True).write_queues == 5
    assert topics.table.alter("a", perm=4).write_queues == 5  # what is so already stops no other change
    assert topics.table.alter("a", read_queues=1, write_queues=1, force=True).read_queues == 1


# -- found topics ------------------------------------------------------------------------------------------------------


def test_a_topic_with_queues_and_no_entry_exists_in_memory_only(topics: Topics) -> None:
    topics.fill("old|name", 2)
    config = topics.table.require("old|name")
    assert (config.read_queues, config.write_queues, config.perm) == (3, 3, 6)
    assert topics.table.for_send("old|name") is config
    assert topics.table.names() == ["old|name"]
    assert not topics.file.exists()


@pytest.mark.parametrize("name", ["clean", "trimmed"])
def test_a_java_brokers_directory_shows_all_its_topics(golden: Golden, name: str) -> None:
    """The golden directories have no `config/`: topics are what their consume queues say."""
    java = golden(name)
    expected: dict[str, int] = {}
    for queue in java.of("queue"):
        if queue["max_offset"]:
            expected[queue["topic"]] = max(expected.get(queue["topic"], 0), queue["queue_id"] + 1)
    before = {path.name for path in java.path.iterdir()}
    with open_store(java.path) as store:
        table = TopicTable(store, OffsetTable(store))
        assert {config.name: config.read_queues for config in table.configs()} == expected
        assert all(config.read_queues == config.write_queues and config.perm == 6 for config in table.configs())
        assert set(table.names()) <= set(table.names(system=True)) == set(expected)
    assert "config" not in {path.name for path in java.path.iterdir()} - before


# -- deleting ----------------------------------------------------------------------------------------------------------


def test_a_deleted_topic_is_gone_but_its_numbers_go_on(topics: Topics) -> None:
    topics.table.for_send("a")
    topics.fill("a", 0, 3)
    topics.fill("a", 2, 1)
    topics.table.delete("a")
    ends = [topics.offsets.bounds("a", queue_id) for queue_id in range(3)]
    topics.store.close()
    reopened = Topics(topics.path)
    assert ends == [reopened.offsets.bounds("a", queue_id) for queue_id in range(3)] == [(3, 3), (0, 0), (1, 1)]
    assert topics.table.entered("a") is reopened.table.entered("a") is None
    assert reopened.table.get("a") is None
    assert reopened.table.names() == []
    assert reopened.table.for_send("a").write_queues == 4
    assert reopened.store.put("a", b"new", 0).offset == 3
    assert reopened.offsets.bounds("a", 0) == (3, 4)
    reopened.store.close()
    topics.store = open_store(topics.path)


def test_a_message_that_slips_in_while_a_topic_goes_is_not_lost(topics: Topics) -> None:
    topics.fill("a", 1, 2)
    topics.table.delete("a")
    assert topics.table.get("a") is None
    topics.fill("a", 1)
    assert topics.table.require("a").read_queues == 2
    assert topics.offsets.bounds("a", 1) == (2, 3)


def test_a_topic_in_use_is_deleted_only_by_force(topics: Topics) -> None:
    topics.table.for_send("a")
    topics.fill("a", 0, 3)
    topics.offsets.commit(QueueKey("g", "a", 0), 1)
    topics.offsets.commit(QueueKey("h", "other", 0), 0)
    with pytest.raises(ConfigError, match=r"consumed by g;.*`force`"):
        topics.table.delete("a")
    assert topics.table.get("a") is not None
    topics.table.delete("a", force=True)
    assert topics.offsets.groups_of("a") == set()
    assert topics.offsets.groups_of("other") == {"h"}
    assert topics.table.for_send("a")
    with pytest.raises(ConfigError):
        topics.table.create("a", exist_ok=False)
    topics.offsets.move_start("a", 0, 1)
    topics.table.delete("a")  # a logical start is no group's progress


def test_pop_retry_topics_go_with_their_topic_and_no_others(topics: Topics) -> None:
    topics.table.for_send("a")
    kept = ["%RETRY%g", "%RETRY%g+ba", "%RETRY%g_a", "b+a"]
    for name in ["%RETRY%g+a", "%RETRY%h+a", *kept[:3]]:
        topics.table.ensure(name)
        topics.fill(name)
    topics.fill("b-a")
    told: list[str] = []
    topics.table.on_change.append(told.append)
    topics.table.delete("a")
    assert topics.table.names() == ["%RETRY%g", "%RETRY%g+ba", "%RETRY%g_a", "b-a"]
    assert topics.again().names() == topics.table.names()
    assert sorted(told) == ["%RETRY%g+a", "%RETRY%h+a", "a"]


# -- the file ----------------------------------------------------------------------------------------------------------


JAVAS = """{
\t"dataVersion":{
\t\t"counter":3,
\t\t"timestamp":1600000000000
\t},
\t"topicConfigTable":{
\t\t"OrderTopic":{
\t\t\t"attributes":{
\t\t\t\t"message.type":"LITE",
\t\t\t\t"cleanup.policy":"COMPACTION"
\t\t\t},
\t\t\t"order":true,
\t\t\t"perm":6,
\t\t\t"priorities":{1:2},
\t\t\t"readQueueNums":20000,
\t\t\t"topicFilterType":"MULTI_TAG",
\t\t\t"topicName":"OrderTopic",
\t\t\t"topicSysFlag":3,
\t\t\t"writeQueueNums":4
\t\t},
\t\t"TBW102":{"perm":7,"readQueueNums":8,"topicName":"TBW102","writeQueueNums":8},
\t\t"%RETRY%a|b":{},
\t\t"../x":{"perm":6}
\t},
\t"newer":[1]
}"""


def test_java_file_is_read_and_unknown_fields_are_kept(topics: Topics, caplog: pytest.LogCaptureFixture) -> None:
    table = topics.write(JAVAS)
    config = table.require("OrderTopic")
    assert (config.read_queues, config.write_queues, config.order) == (20_000, 4, True)
    assert config.message_type == "UNSPECIFIED"
    assert table.require("%RETRY%a|b") == TopicConfig("%RETRY%a|b", 16, 16)  # RocketMQ's defaults, not ours
    assert table.get("../x") is None
    [problem] = caplog.messages
    assert "'../x' cannot be a topic" in problem
    assert table.names() == ["%RETRY%a|b", "OrderTopic"]
    assert table.for_send("new").write_queues == 4  # not TBW102's eight

    table.alter("OrderTopic", order=False)
    stored = topics.stored()
    before = json.loads(JAVAS.replace("{1:2}", '{"1":2}'))
    assert stored["newer"] == [1]
    assert stored["dataVersion"]["counter"] == 5
    assert stored["topicConfigTable"]["OrderTopic"] == {**before["topicConfigTable"]["OrderTopic"], "order": False}
    assert stored["topicConfigTable"]["../x"] == {"perm": 6}
    assert stored["topicConfigTable"]["TBW102"].items() >= before["topicConfigTable"]["TBW102"].items()


def test_offsets_left_by_a_deletion_cut_short_can_be_deleted(topics: Topics) -> None:
    """Without an entry such a topic does not exist any more once its messages are gone."""
    topics.fill("a", 0, 2)
    topics.offsets.commit(QueueKey("g", "a", 0), 1)
    topics.store.delete_topics(["a"])
    assert topics.table.get("a") is None
    topics.table.delete("a", force=True)
    assert topics.offsets.groups_of("a") == set()
    with pytest.raises(TopicNotFoundError):
        topics.table.delete("a")
