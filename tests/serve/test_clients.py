"""What clients do for each other: groups shared with members of the server's process, replies, recalls
(remoting-server, sections 6 and 7)."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Store, StoreConfig
from mqstore.engine import SimulatedClock
from mqstore.errors import NotPermittedError, SubscriptionConflictError
from tests.serve.support import HEART_BEAT, ORDERS, PULL, PULL_ORDERS, ROUTE, SEND, UNLOCK, Client, queues_of, serving

REPLY, RECALL = 325, 370


def members(client: Client) -> list[str]:
    answer = client.ask(38, {"consumerGroup": "billing"})
    found: list[str] = json.loads(answer.body)["consumerIdList"] if answer.code == 0 else []
    return found


PUSH = {"orders": "*", "%RETRY%billing": "*"}
"""Subscriptions of a push consumer of RocketMQ: its own retries, too."""


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [False, True])
def test_client_and_own_consumer_share_the_queues(client: Client, store: Store, order: bool) -> None:
    store.broker.groups.create("billing", orderly=order)
    client.heartbeat("c2", **PUSH)
    client.notice()
    seen: list[str] = []
    here = threading.Semaphore(0)

    def handle(message: mqstore.Message) -> None:
        seen.append(message.body.decode())
        here.release()

    consumer = store.push_consumer("billing", mode="queue", ordered=order, client_id="c1")
    consumer.subscribe("orders", handler=handle)
    with consumer:
        assert client.notice().code == 40
        assert members(client) == ["c1", "c2"]
        for queue in range(4):
            store.put("orders", str(queue).encode(), queue_id=queue)
        assert here.acquire(timeout=20)
        assert here.acquire(timeout=20)
        client.ask(35, {"clientID": "c2", "consumerGroup": "billing"})  # it leaves the other two queues to us
        assert here.acquire(timeout=20)
        assert here.acquire(timeout=20)
        client.heartbeat("c2", **PUSH)  # it comes back for them
        while client.lock("c2", 2) == []:
            client.notice()
    assert sorted(seen) == ["0", "1", "2", "3"]
    assert set(seen[:2]) == {"0", "1"}
    assert members(client) == ["c2"]


def test_own_member_is_refused_where_a_client_subscribes_otherwise(client: Client, store: Store) -> None:
    client.heartbeat("c2", orders="paid")
    consumer = store.pull_consumer("billing")
    consumer.subscribe("orders", "new")
    with consumer, pytest.raises(SubscriptionConflictError, match="'c2'"):
        consumer.poll(0)
    with pytest.raises(mqstore.errors.GroupInUseError):
        store.broker.delete_group("billing")


def test_conflict_of_clients_is_logged_once(
    address: tuple[str, int], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(address) as other:
        client.heartbeat("c1", orders="paid")
        for _ in range(2):
            assert other.heartbeat("c2", orders="new").code == 0
        assert members(client) == ["c1", "c2"]
    [text] = [record.message for record in caplog.records if "cannot be refused" in record.message]
    assert "'c2' subscribes to orders (TAG new), but 'c1'" in text


def test_heartbeat_without_subscriptions_keeps_them(client: Client, store: Store) -> None:
    changed: list[str] = []
    store.broker.listen("members", changed.append)
    client.heartbeat("c1", orders="paid")
    client.notice()
    consumer = {"groupName": "billing", "messageModel": "CLUSTERING", "subscriptionDataSet": []}
    beat = {"clientID": "c1", "consumerDataSet": [consumer], "withoutSub": True}
    assert client.ask(HEART_BEAT, body=json.dumps(beat).encode()).code == 0
    members(client)
    assert client.notices == []
    assert store.broker.members.subscriptions("billing") == {"orders": ("TAG", "paid")}
    assert changed == ["billing"]


def test_group_that_may_not_broadcast_does_not(client: Client, store: Store) -> None:
    store.broker.groups.create("billing", consume_broadcast_enable=False)
    consumer = {"groupName": "billing", "messageModel": "BROADCASTING", "subscriptionDataSet": []}
    client.ask(HEART_BEAT, body=json.dumps({"clientID": "c1", "consumerDataSet": [consumer]}).encode())
    assert client.ask(PULL, PULL_ORDERS).code == NotPermittedError.code


def test_release_of_a_queue_is_a_notice(address: tuple[str, int], client: Client) -> None:
    """A 4.x client would ask again only 20 s later."""
    with Client(address) as other:
        other.heartbeat("c2")
        client.heartbeat("c1")
        other.lock("c2", 0)
        client.notice()
        client.ask(38, {"consumerGroup": "billing"})
        assert client.notices == []
        other.ask(UNLOCK, body=queues_of("billing", "c2", 0))
        assert client.notice().code == 40


def test_resend_beside_own_consumers_is_a_retry(client: Client, store: Store) -> None:
    """Own consumers lock their queues also without order, which makes no dead letter of a client's resend."""
    client.heartbeat("c2", **PUSH)
    consumer = store.push_consumer("billing", mode="queue", client_id="c1")
    consumer.subscribe("orders", handler=lambda message: None)
    with consumer:
        while not any(lock.group == "billing" for lock in store.broker.locks.snapshot()):
            client.ask(38, {"consumerGroup": "billing"})
        assert client.ask(SEND, ORDERS | {"b": "%RETRY%billing", "j": 1, "l": 16}, b"bad").code == 0
    assert [letter.body for letter in store.dead_letters("billing")] == []


def test_after_a_kill_only_the_clients_that_held_locks_get_them(tmp_path: Path) -> None:
    """Such a client works on its messages for up to 30 s, although the server has forgotten its locks."""
    killed, saved = tmp_path / "killed", tmp_path / "mq" / "config" / "locks.json"
    with mqstore.open(tmp_path / "mq") as store, serving(store) as address, Client(address) as client:
        store.create_topic("orders")
        for client_id in ("c1", "c2"):
            client.heartbeat(client_id)
        assert client.lock("c1", 0) == [0]
        while not saved.exists() or "c1" not in saved.read_text():
            client.ask(38, {"consumerGroup": "billing"})
        shutil.copytree(tmp_path / "mq", killed, ignore=shutil.ignore_patterns("lock", "*.sock"))
    clock = SimulatedClock()
    config = StoreConfig(clock=clock)
    with mqstore.open(killed, config=config) as store, serving(store) as address, Client(address) as client:
        assert [client.lock("c2", 0), client.lock("c1", 0), client.lock("c2", 0, group="others")] == [[], [0], [0]]
        clock.advance(60_001)
        assert client.lock("c2", 0) == [0]
    with mqstore.open(killed) as store, serving(store) as address, Client(address) as client:
        assert client.lock("c3", 0) == [0]  # it was closed


# -- replies and recalls ----------------------------------------------------------------------------------------------

REQUEST = "CORRELATION_ID\x01id-1\x02REPLY_TO_CLIENT\x01p1\x02TTL\x013000\x02"


def produce(client: Client, client_id: str) -> None:
    beat = {"clientID": client_id, "producerDataSet": [{"groupName": "producers"}]}
    assert client.ask(HEART_BEAT, body=json.dumps(beat).encode()).code == 0


def test_reply_reaches_the_client_that_asked(address: tuple[str, int], client: Client, store: Store) -> None:
    produce(client, "p1")
    assert client.ask(SEND, ORDERS | {"i": REQUEST}, b"?").code == 0
    with Client(address) as consumer:
        asked = Client.record(consumer.ask(PULL, PULL_ORDERS))
        assert asked.properties["CLUSTER"] == "DefaultCluster"
        reply = ORDERS | {"b": "DefaultCluster_REPLY_TOPIC", "i": REQUEST, "k": "false"}
        waiting = consumer.send(REPLY, reply, b"!")
        pushed = client.notice()
        assert (pushed.code, pushed.body, pushed.fields["properties"]) == (326, b"!", REQUEST)
        required = "producerGroup topic defaultTopic defaultTopicQueueNums queueId sysFlag bornTimestamp flag bornHost"
        assert {*required.split(), "storeHost", "storeTimestamp"} <= pushed.fields.keys()
        client.reply(pushed, 0)
        assert dict(consumer.answer(waiting).fields) == {"msgId": "0", "queueId": "0", "queueOffset": "0"}
        waiting = consumer.send(REPLY, reply, b"!")
        client.reply(client.notice(), 1, remark="no such request")
        answer = consumer.answer(waiting)
        assert (answer.code, answer.remark) == (1, "no such request")
        waiting = consumer.send(REPLY, reply, b"!")
        client.notice()
        client.socket.close()
        assert consumer.answer(waiting).code == 1
        assert consumer.ask(REPLY, reply).code == 1
        assert consumer.ask(REPLY, reply | {"i": ""}).code == 1
    assert store.topics() == ["orders"]


def test_recalled_message_is_not_delivered(tmp_path: Path) -> None:
    clock = SimulatedClock()
    with (
        mqstore.open(tmp_path / "timer", config=StoreConfig(clock=clock)) as store,
        serving(store) as address,
        Client(address) as client,
    ):
        timer = ORDERS | {"i": "TIMER_DELAY_SEC\x0160\x02UNIQ_KEY\x01AB\x02"}
        recalled = client.ask(SEND, timer, b"recalled").fields["recallHandle"]
        assert client.ask(SEND, timer | {"i": "TIMER_DELAY_SEC\x0160\x02"}, b"kept").code == 0
        for second in range(62):
            if second in (0, 1, 30):  # the client may repeat it
                answer = client.ask(RECALL, {"topic": "orders", "recallHandle": recalled, "producerGroup": "producers"})
                assert (answer.code, dict(answer.fields)) == (0, {"msgId": "AB"})
            store.broker.run_once()
            clock.advance(1_000)
        store.broker.run_once()
        assert [message.body for message in store.iter("orders")] == [b"kept"]


@pytest.mark.parametrize(
    ("changed", "code"),
    [({"recallHandle": "garbage"}, 604), ({"topic": "others"}, 604), ({"topic": "nowhere"}, 17)],
)
def test_refused_recalls(client: Client, store: Store, changed: dict[str, Any], code: int) -> None:
    store.create_topic("others")
    handle = client.ask(SEND, ORDERS | {"i": "TIMER_DELAY_SEC\x01600\x02"}, b"later").fields["recallHandle"]
    assert client.ask(RECALL, {"topic": "orders", "recallHandle": handle} | changed).code == code


def test_recall_of_a_delivered_message_is_refused(client: Client, store: Store) -> None:
    handle = client.ask(SEND, ORDERS | {"i": "TIMER_DELAY_MS\x011\x02"}, b"now").fields["recallHandle"]
    assert client.ask(PULL, PULL_ORDERS | {"sysFlag": 6, "suspendTimeoutMillis": 20_000}).code == 0
    assert client.ask(RECALL, {"topic": "orders", "recallHandle": handle}).code == 604


@pytest.mark.parametrize("topic", ["ns%orders", "RMQ_SYS_TRACE_TOPIC"])
def test_clients_send_to_namespaces_and_traces(client: Client, store: Store, topic: str) -> None:
    client.ask(ROUTE, {"topic": topic})
    assert client.ask(SEND, ORDERS | {"b": topic}, b"a").code == 0
    client.heartbeat("c1", "ns%billing", **{topic: "*"})
    pull = PULL_ORDERS | {"topic": topic, "consumerGroup": "ns%billing", "sysFlag": 2, "suspendTimeoutMillis": 20_000}
    assert Client.record(client.ask(PULL, pull)).body == b"a"


@pytest.mark.parametrize("topic", ["%orders", "orders%", "a%%b", "%LMQ%orders"])
def test_names_of_the_engine_are_refused(client: Client, store: Store, topic: str) -> None:
    assert client.ask(SEND, ORDERS | {"b": topic}, b"a").code == 13


def test_topic_known_only_by_its_messages_takes_sends_of_any_model(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "known") as store:
        store.put("orders", b"a", queue_id=0)
    (tmp_path / "known" / "config" / "topics.json").unlink()
    (tmp_path / "known" / "config" / "topics.json.bak").unlink(missing_ok=True)
    with mqstore.open(tmp_path / "known") as store, serving(store) as address, Client(address) as client:
        assert client.ask(SEND, ORDERS | {"c": "OTHER"}, b"b").code == 0
        assert [message.body for message in store.iter("orders")] == [b"a", b"b"]
