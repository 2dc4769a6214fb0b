"""`mqstore topics`: shows what there is, changes what it says, asks before what cannot be undone."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import mqstore as library
from mqstore.errors import ConfigError
from mqstore.log.derived.consumequeue import ConsumeQueue, QueueTable
from tests.tools.brokers import broker, tables
from tests.tools.support import mqstore, mqstore_json


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Topic `orders`: ten messages in two of four queues, two consumed by `billing`."""
    path = tmp_path / "s"
    with broker(path) as running:
        for i in range(10):
            running.put("orders", b"%d" % i, queue_id=i % 2)
        running.run_once()
        deliveries = running.pop("billing", "orders", 3, queue_id=0)
        running.ack("billing", "orders", [each.receipt for each in deliveries[:2]])
    return path


def test_all_folders_are_listed_as_often_for_many_topics_as_for_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were listed for each topic: with 3,000 topics `topics` took a quarter of an hour."""
    listed, refresh = [], QueueTable.refresh

    def counted(table: QueueTable, topic: str | None = None) -> list[ConsumeQueue]:
        listed[-1] += topic is None
        return refresh(table, topic)

    monkeypatch.setattr(QueueTable, "refresh", counted)
    for count in (2, 20):
        path = tmp_path / str(count)
        with broker(path) as running:
            for i in range(count):
                running.put(f"t{i}", b"x", queue_id=0)
        listed.append(0)
        assert [row["messages"] for row in mqstore_json("topics", path)["topics"]] == [1] * count
    assert listed[0] == listed[1]


def test_topic_shows_settings_and_consumers(store: Path) -> None:
    [row] = mqstore_json("topics", store)["topics"]

    assert row == {
        "name": "orders",
        "read_queues": 4,
        "write_queues": 4,
        "perm": 6,
        "order": False,
        "message_type": "UNSPECIFIED",
        "attributes": {},
        "messages": 10,
        "groups": ["billing"],
    }
    shown = mqstore("topics", "list", store)
    assert [line.split() for line in shown.stdout.splitlines() if "orders" in line] == [
        ["orders", "4", "4", "rw", "unspecified", "10", "billing"]
    ]


def test_system_topics_are_listed_on_request(store: Path) -> None:
    plain = {row["name"] for row in mqstore_json("topics", store)["topics"]}
    all_of_them = {row["name"] for row in mqstore_json("topics", store, "--system")["topics"]}

    assert plain == {"orders"}
    assert "rmq_sys_pop_log" in all_of_them > plain


def test_a_topic_is_created_altered_and_deleted(path: Path) -> None:
    library.open(path).close()

    created = mqstore_json("topics", "create", path, "orders", "--queues", 8, "--type", "fifo", "--perm", "r")
    altered = mqstore_json("topics", "alter", path, "orders", "--perm", "rw", "--write-queues", 2)
    both = mqstore_json("topics", "alter", path, "orders", "--queues", 9)

    assert (created["read_queues"], created["message_type"], created["perm"]) == (8, "FIFO", 4)
    assert (altered["read_queues"], altered["write_queues"], altered["perm"]) == (8, 2, 6)
    assert (both["read_queues"], both["write_queues"]) == (9, 9)
    with tables(path) as parts:
        config = parts.topics.require("orders")
        assert (config.read_queues, config.write_queues, config.perm, config.message_type) == (9, 9, 6, "FIFO")

    assert mqstore("topics", "delete", path, "orders", "--yes").exit_code == 0
    assert mqstore_json("topics", path)["topics"] == []


def test_deletion_removes_all_and_numbers_continue(store: Path) -> None:
    assert mqstore("topics", "delete", store, "orders", "--force", "--yes").exit_code == 0

    assert mqstore_json("topics", store)["topics"] == []
    assert mqstore_json("offsets", store)["offsets"] == []
    with broker(store) as running:
        receipt = running.put("orders", b"new", queue_id=0)
        running.run_once()
        assert receipt.offset == 5
        assert running.pending("billing") == []
        assert [each.message.body for each in running.pop("billing", "orders", 10)] == [b"new"]


def test_no_order_info_of_a_deleted_topic_is_left(store: Path) -> None:
    with broker(store) as running:
        running.pop("ledger", "orders", 2, queue_id=1, order=True, local=False)
        running.run_once()
    assert len(mqstore_json("inspect", store)["broker"]["order_info"]) == 1

    mqstore("topics", "delete", store, "orders", "--force", "--yes")

    assert mqstore_json("inspect", store)["broker"]["order_info"] == []


def test_damaged_table_exits_with_3_and_a_remedy(store: Path) -> None:
    for file in (store / "config").glob("topics.json*"):
        file.write_bytes(b"\0" * 50)

    result = mqstore("topics", store, exit_code=3)

    assert "topics.json" in result.stderr
    assert "recover" in result.stderr


def test_an_ordered_queue_names_commands_that_give_it_one_queue(tmp_path: Path) -> None:
    path = tmp_path / "a store"
    mqstore("produce", path, "jobs", stdin=b"1\n2\n3\n", exit_code=0)
    with library.open(path) as store, pytest.raises(ConfigError, match="4 queues") as caught:
        store.queue("jobs", ordered=True)

    commands = re.findall("`mqstore (.*?)`", str(caught.value))
    assert len(commands) == 2
    for command in commands:
        mqstore(*shlex.split(command), exit_code=0)

    with library.open(path) as store:
        queue = store.queue("jobs", ordered=True)
        queue.put_many([b"4", b"5"])
        assert [task.value for task in queue.get_many(9)] == [b"4", b"5"]
