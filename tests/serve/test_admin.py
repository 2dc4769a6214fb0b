"""Administration as `mqadmin` asks for it: topics, groups, clients, offsets, messages (remoting-server, section 11).

The shapes are those of a broker 5.3.3, which has answered the same requests. Values follow from what is stored here.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Store, StoreConfig
from mqstore.engine import SimulatedClock
from tests.serve.support import ORDERS, PULL, PULL_ORDERS, SEND, Client, started

QUEUES = {0: [b"a", b"b", b"c"], 1: [b"d"]}
"""Bodies of `orders`. The key of each is its letter, and its unique key that twice."""
BEGIN_MS = 1_800_000_000_000
TIMES = {body: BEGIN_MS + 1_000 * number for number, body in enumerate(b"abcd", 1)}
"""Store times in ms: one message a second."""
OFFSETS: dict[str, dict[str, Any]] = {
    "orders/0": {"brokerOffset": 3, "consumerOffset": 2, "lastTimestamp": TIMES[ord("b")], "pullOffset": 2},
    "orders/1": {"brokerOffset": 1, "consumerOffset": 0, "lastTimestamp": 0, "pullOffset": 0},
}
"""Offsets of `billing`, which has consumed two messages of queue 0."""
ORDERS_TOPIC = json.loads("""{"topicName": "orders", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6, "order": false,
    "attributes": {}, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}""")
BILLING = json.loads("""{"groupName": "billing", "consumeEnable": true, "consumeBroadcastEnable": true,
    "consumeMessageOrderly": false, "retryQueueNums": 1, "retryMaxTimes": 16,
    "groupRetryPolicy": {"type": "CUSTOMIZED"}}""")
SUBSCRIPTION = json.loads("""{"classFilterMode": false, "codeSet": [97, 98], "expressionType": "TAG",
    "subString": "a || b", "subVersion": 0, "tagsSet": ["a", "b"], "topic": "orders"}""")
STATS: dict[str, Any] = {
    "offsetTable": {
        "orders/0": {"minOffset": 0, "maxOffset": 3, "lastUpdateTimestamp": TIMES[ord("c")]},
        "orders/1": {"minOffset": 0, "maxOffset": 1, "lastUpdateTimestamp": TIMES[ord("d")]},
    },
    "topicPutTps": 0.0,
}
UNITS = {
    "maxQueueIndex": 1,
    "minQueueIndex": 0,
    "queueData": [{"eval": False, "physicOffset": 0, "physicSize": 0, "tagsCode": ord("d")}],
    "filterData": "billing@orders is not online!",
}
IDLE = {f"stats{window}": {"avgpt": 0.0, "sum": 0, "tps": 0.0} for window in ("Minute", "Hour", "Day")}
NONE = {"counter": 0, "stateVersion": 0, "timestamp": 0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    clock = SimulatedClock(BEGIN_MS)
    with mqstore.open(tmp_path / "mq", config=StoreConfig(clock=clock)) as store:
        store.create_topic("orders", queues=2)
        for queue_id, bodies in QUEUES.items():
            for body in bodies:
                clock.advance(1_000)
                key = body.decode()
                store.put("orders", body, queue_id=queue_id, keys=[key], tag=key, unique_key=2 * key)
        store.broker.groups.create("billing")
        store.broker.commit("billing", "orders", 0, 2)
        yield store


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[Client]:
    with Client(address) as client:
        yield client


def consume(client: Client, client_id: str = "c1") -> None:
    """Be a consumer of `billing`, and a producer of `shop`."""
    consumer = {
        "groupName": "billing",
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "subscriptionDataSet": [{"topic": "orders", "subString": "a || b"}],
    }
    beat = {"clientID": client_id, "consumerDataSet": [consumer], "producerDataSet": [{"groupName": "shop"}]}
    assert client.ask(34, body=json.dumps(beat).encode()).code == 0


def value_of(body: bytes) -> Any:
    """Return a body as JSON. A queue that is a key becomes `topic/queue`."""
    key = r'\{"brokerName":"mqstore","queueId":(\d+),"topic":"([^"]+)"\}:'
    return json.loads(re.sub(key, r'"\2/\1":', body.decode()))


def body_of(store: Store, *places: tuple[int, int]) -> bytes:
    """Return the records of these messages of `orders`: queue and offset."""
    return b"".join(store.read("orders", *place, 1)[0]._record_bytes() for place in places)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        (21, {}, {"dataVersion": NONE, "topicConfigTable": {"orders": ORDERS_TOPIC}}),
        (43, {}, {"dataVersion": NONE, "offsetTable": {"orders@billing": {"0": 2}}}),
        (45, {}, {"dataVersion": NONE, "offsetTable": {}}),
        (201, {}, {"dataVersion": NONE, "forbiddenTable": {}, "subscriptionGroupTable": {"billing": BILLING}}),
        (202, {"topic": "orders"}, STATS),
        (206, {}, {"topicList": ["orders"]}),
        (208, {"consumerGroup": "billing"}, {"consumeTps": 0.0, "offsetTable": OFFSETS}),
        (208, {"consumerGroup": "billing", "topic": "orders"}, {"consumeTps": 0.0, "offsetTable": OFFSETS}),
        (208, {"consumerGroup": "nobody"}, {"consumeTps": 0.0, "offsetTable": {}}),
        (208, {"consumerGroup": "billing", "topicList": "nowhere;"}, {"consumeTps": 0.0, "offsetTable": {}}),
        (224, {"cluster": "DefaultCluster"}, {"topicList": ["orders"]}),
        (224, {"cluster": "other"}, {"topicList": []}),
        (300, {"topic": "orders"}, {"groupList": ["billing"]}),
        (315, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "orders"}, IDLE),
        (321, {"topic": "orders", "queueId": 1, "index": 0, "count": 5, "consumerGroup": "billing"}, UNITS),
        (328, {}, {"data": {}}),
        (345, {"group": "billing", "topic": "orders"}, {"group": "billing", "topic": "orders"}),
        (351, {"topic": "orders"}, ORDERS_TOPIC),
        (352, {"group": "billing"}, BILLING),
    ],
)
def test_answer_has_the_shape_of_a_broker(
    client: Client, store: Store, code: int, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    if code == 315:
        store.broker.stats()  # counts what was put
    if code == 321:
        [message] = store.read("orders", 1, 0)
        expected["queueData"][0] |= {"physicOffset": message.physical_offset, "physicSize": message.size}
    answer = client.ask(code, fields)
    assert (answer.code, value_of(answer.body)) == (0, expected)


@pytest.mark.parametrize(
    ("code", "fields", "names"),
    [
        (304, {}, ["DefaultCluster", "mqstore"]),
        (305, {}, ["DefaultCluster", "mqstore", "TBW102", "rmq_sys_wheel_timer"]),
        (343, {"group": "billing"}, ["orders"]),
    ],
)
def test_names_have_the_address_of_the_broker(
    client: Client, store: Store, address: tuple[str, int], code: int, fields: dict[str, Any], names: list[str]
) -> None:
    store.put("orders", b"later", delay=100)
    answer = value_of(client.ask(code, fields).body)
    assert answer == {"brokerAddr": "{}:{}".format(*address), "topicList": names}


def test_connections_are_those_of_the_last_heartbeats(client: Client) -> None:
    consume(client)
    here = "{}:{}".format(*client.socket.getsockname())
    me = {"clientAddr": here, "clientId": "c1", "language": "PYTHON", "version": 479}
    assert value_of(client.ask(203, {"consumerGroup": "billing"}).body) == {
        "connectionSet": [me],
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "subscriptionTable": {"orders": SUBSCRIPTION},
    }
    assert value_of(client.ask(204, {"producerGroup": "shop"}).body) == {"connectionSet": [me]}
    [shop] = value_of(client.ask(328).body)["data"]["shop"]
    assert (shop["clientId"], shop["remoteIP"]) == ("c1", f"/{me['clientAddr']}")
    found = value_of(client.ask(345, {"group": "billing", "topic": "orders"}).body)
    assert found["subscriptionData"] == SUBSCRIPTION


def test_consumers_of_this_process_are_listed(client: Client, store: Store) -> None:
    with store.pull_consumer("billing", client_id="py-1") as consumer:
        consumer.subscribe("orders", tags="a")
        consumer.poll(timeout=0)  # joins the group
        answer = value_of(client.ask(203, {"consumerGroup": "billing"}).body)
        assert client.ask(215, {"topic": "orders"}).code == 16
    [python] = answer["connectionSet"]
    assert (python["clientId"], python["language"]) == ("py-1", "PYTHON")
    assert answer["subscriptionTable"]["orders"]["tagsSet"] == ["a"]


def test_progress_of_all_groups_has_the_sums(client: Client, store: Store) -> None:
    store.broker.groups.create("idle")
    answer = value_of(client.ask(317, {"isOrder": "false"}).body)
    assert answer["consumeStatsList"] == [{"billing": [{"consumeTps": 0.0, "offsetTable": OFFSETS}]}, {"idle": []}]
    assert (answer["totalDiff"], answer["totalInflightDiff"]) == (2, 0)
    assert value_of(client.ask(317, {"isOrder": "true"}).body)["totalDiff"] == 0  # of topics with order only


def test_progress_leaves_out_topics_without_subscription(client: Client, store: Store) -> None:
    store.create_topic("old")
    store.broker.commit("billing", "old", 0, 0)
    seen = []
    for _ in range(2):
        seen.append(set(value_of(client.ask(208, {"consumerGroup": "billing"}).body)["offsetTable"]))
        consume(client)
    assert seen == [{*OFFSETS, "old/0", "old/1", "old/2", "old/3"}, {*OFFSETS}]


def test_runtime_has_what_mqadmin_prints(client: Client, store: Store) -> None:
    table = value_of(client.ask(28).body)["table"]
    assert table["putMessageTimesTotal"] == table["msgPutTotalTodayNow"] == "4"
    assert table["earliestMessageTimeStamp"] == str(TIMES[ord("a")])
    assert table["commitLogMaxOffset"] == str(store.broker.store.max_offset)
    assert {type(value) for value in table.values()} == {str}


@pytest.mark.parametrize("code", [26, 319])
def test_options_have_the_names_of_rocketmq(client: Client, code: int) -> None:
    lines = client.ask(code).body.decode().splitlines()
    assert {"brokerName=mqstore", "timerWheelEnable=true", "maxMessageSize=4194304"} <= set(lines)


# -- messages ---------------------------------------------------------------------------------------------------------

EVER = {"beginTimestamp": 0, "endTimestamp": 1 << 62}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (EVER | {"key": "b", "maxNum": 9}, [(0, 1)]),
        (EVER | {"key": "bb", "maxNum": 0, "_UNIQUE_KEY_QUERY": "true"}, [(0, 1)]),
        (EVER | {"key": "both", "maxNum": 9}, [(0, 3), (0, 4), (0, 5)]),
        (EVER | {"key": "both", "maxNum": 2}, [(0, 4), (0, 5)]),
        (EVER | {"key": "both", "maxNum": -1}, [(0, 5)]),
        (EVER | {"key": "bb", "maxNum": 9}, []),
        (EVER | {"key": "both", "maxNum": 9, "topic": "nowhere"}, []),
        ({"key": "b", "maxNum": 9, "beginTimestamp": TIMES[ord("b")], "endTimestamp": TIMES[ord("b")]}, [(0, 1)]),
        ({"key": "b", "maxNum": 9, "beginTimestamp": TIMES[ord("c")], "endTimestamp": 1 << 62}, []),
        ({"key": "b", "maxNum": 9, "beginTimestamp": -1 << 63, "endTimestamp": -1}, []),
    ],
)
def test_messages_are_found_by_key(
    client: Client, store: Store, fields: dict[str, Any], found: list[tuple[int, int]]
) -> None:
    for _ in range(3):
        store.put("orders", b"", queue_id=0, keys=["both"])
    answer = client.ask(12, {"topic": "orders"} | fields)
    assert (answer.code, answer.body) == (0 if found else 22, body_of(store, *found))


def test_message_is_viewed_by_its_offset_in_the_log(client: Client, store: Store) -> None:
    [message] = store.read("orders", 0, 2)
    assert client.ask(33, {"offset": message.physical_offset}).body == body_of(store, (0, 2))
    for offset in (message.physical_offset + 1, 1 << 60, -1):
        assert client.ask(33, {"offset": offset}).code == 1
    store.broker.topics.delete("orders", force=True)
    assert client.ask(33, {"offset": message.physical_offset}).code == 1


def test_id_of_a_message_has_the_address_of_the_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with started(tmp_path / "mq", "--listen", f"127.0.0.1:{port}") as (_, address), Client(address) as client:
        message_id = client.ask(SEND, ORDERS, b"a").fields["msgId"]
        assert message_id == f"7F000001{port:08X}{0:016X}"
        assert client.ask(33, {"offset": 0}).code == 0


# -- changes ----------------------------------------------------------------------------------------------------------


def topic(name: str, **changed: Any) -> dict[str, Any]:
    return {"topic": name, "readQueueNums": 3, "writeQueueNums": 3, "perm": 6, "order": "false"} | changed


def test_topic_is_created_then_altered(client: Client, store: Store) -> None:
    assert client.ask(17, topic("new", attributes="+message.type=FIFO", order="true")).code == 0
    config = store.broker.topics.require("new")
    assert (config.write_queues, config.message_type, config.order) == (3, "FIFO", True)
    assert client.ask(17, topic("new", perm=4, attributes="-message.type")).code == 0
    config = store.broker.topics.require("new")
    assert (config.perm, config.message_type, config.order) == (4, "UNSPECIFIED", False)


def test_lists_create_topics_and_groups(client: Client, store: Store) -> None:
    topics = [{"topicName": name, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6} for name in ("t1", "t2")]
    assert client.ask(18, body=json.dumps({"topicConfigList": topics}).encode()).code == 0
    groups = [{"groupName": name, "retryMaxTimes": 3} for name in ("g1", "g2")]
    assert client.ask(225, body=json.dumps({"groupConfigList": groups}).encode()).code == 0
    assert {"t1", "t2"} <= set(store.topics())
    assert [store.broker.groups.get(name).max_attempts for name in ("g1", "g2")] == [4, 4]  # type: ignore[union-attr]


def test_group_is_created_then_altered_then_deleted(client: Client, store: Store) -> None:
    settings = {"groupName": "new", "consumeEnable": False, "consumeBroadcastEnable": False, "retryMaxTimes": 2}
    policy = {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 7_000, "max": 9_000, "multiplier": 2}}
    for changed in (settings, settings | {"consumeEnable": True, "groupRetryPolicy": policy}):
        assert client.ask(200, body=json.dumps(changed).encode()).code == 0
    group = store.broker.groups.get("new")
    assert group is not None
    assert (group.consume_enable, group.consume_broadcast_enable, group.max_attempts) == (True, False, 3)
    assert group.delay_ms(1) == 7_000
    for _ in range(2):  # as a broker, it does not mind a group that is not there
        assert client.ask(207, {"groupName": "new"}).code == 0
    assert store.broker.groups.get("new") is None


def test_topic_and_group_with_consumers_are_not_deleted(client: Client, address: tuple[str, int], store: Store) -> None:
    with Client(address) as consumer:
        consume(consumer)
        assert client.ask(215, {"topic": "orders"}).code == 16
        assert client.ask(207, {"groupName": "billing"}).code == 16
        consumer.ask(35, {"clientID": "c1", "consumerGroup": "billing"})
    for code in (215, 215, 216, 102):
        assert client.ask(code, {"topic": "orders"}).code == 0
    assert store.topics() == ["%RETRY%billing"]


@pytest.mark.parametrize(
    ("code", "fields", "body", "answer"),
    [
        (17, topic("a b"), b"", 13),
        (17, topic("rmq_sys_x"), b"", 16),
        (17, topic("new", readQueueNums=0), b"", 29),
        (17, topic("new", perm=9), b"", 29),
        (17, topic("new", attributes="+queue.type=x"), b"", 29),
        (17, topic("new", attributes="+message.type=x"), b"", 29),
        (17, topic("orders", readQueueNums=1), b"", 29),  # it would hide messages
        (17, {"topic": "new"}, b"", 29),
        (18, {}, b"{}", 29),
        (18, {}, b'{"topicConfigList": [1]}', 29),
        (18, {}, b'{"topicConfigList": [{}]}', 13),
        (18, {}, b'{"topicConfigList": [{"topicName": "new", "attributes": [1]}]}', 29),
        (18, {}, b'{"topicConfigList": [{"topicName": "new", "readQueueNums": "x"}]}', 29),
        (18, {}, b'{"topicConfigList": [{"topicName": "new", "attributes": {"+message.type": []}}]}', 29),
        (25, {}, b"x=1", 16),
        (33, {"offset": "x"}, b"", 29),
        (101, {"namespace": "ORDER_TOPIC_CONFIG", "key": "orders"}, b"", 22),
        (200, {}, b"[]", 29),
        (200, {}, b"{}", 29),
        (200, {}, b'{"groupName": ["x"]}', 29),
        (200, {}, b'{"groupName": "new", "retryMaxTimes": "x"}', 29),
        (200, {}, b'{"groupName": "new", "retryQueueNums": 0}', 29),
        (200, {}, b'{"groupName": "CID_RMQ_SYS_x"}', 16),
        (202, {"topic": "nowhere"}, b"", 17),
        (203, {"consumerGroup": "billing"}, b"", 206),
        (204, {"producerGroup": "shop"}, b"", 1),
        (215, {"topic": "nowhere"}, b"", 0),
        (222, {"topic": "nowhere", "group": "billing", "timestamp": 0}, b"", 17),
        (222, {"topic": "orders", "group": "nobody", "timestamp": 0}, b"", 26),
        (222, {"topic": "orders", "group": "billing", "timestamp": 0, "queueId": 0, "offset": 4}, b"", 29),
        (307, {"consumerGroup": "billing", "clientId": "c1"}, b"", 1),
        (309, {"consumerGroup": "billing", "clientId": "c1", "msgId": "x"}, b"", 13),
        (315, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "nowhere"}, b"", 1),
        (318, {}, b"x=1", 16),
        (321, {"topic": "nowhere", "queueId": 0, "index": 0, "count": 1}, b"", 17),
        (351, {"topic": "nowhere"}, b"", 17),
        (352, {"group": "nobody"}, b"", 26),
    ],
)
def test_refusal_has_code_and_text_and_changes_nothing(
    client: Client,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    code: int,
    fields: dict[str, Any],
    body: bytes,
    answer: int,
) -> None:
    refused = client.ask(code, fields, body)
    assert (refused.code, bool(refused.remark)) == (answer, answer != 0)
    assert (store.topics(), store.broker.groups.names()) == (["orders"], ["billing"])
    assert "failed" not in caplog.text


# -- offsets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"timestamp": 0}, {0: 0, 1: 0}),
        ({"timestamp": -1}, {0: 3, 1: 1}),
        ({"timestamp": TIMES[ord("b")]}, {0: 1, 1: 0}),
        ({"timestamp": TIMES[ord("c")] + 1}, {0: 3, 1: 0}),
        ({"timestamp": (1 << 63) - 1}, {0: 3, 1: 1}),
        ({"timestamp": 0, "queueId": 1}, {1: 0}),
        ({"timestamp": 0, "queueId": 0, "offset": 1}, {0: 1}),
        ({"timestamp": -1, "queueId": 0, "offset": 0}, {0: 0}),
    ],
)
def test_reset_moves_offsets_and_notifies_consumers(
    client: Client, address: tuple[str, int], store: Store, fields: dict[str, Any], expected: dict[int, int]
) -> None:
    table = {f"orders/{queue_id}": offset for queue_id, offset in expected.items()}
    with Client(address) as consumer:
        consume(consumer)
        assert consumer.notice().code == 40
        answer = client.ask(222, {"topic": "orders", "group": "billing"} | fields)
        assert (answer.code, value_of(answer.body)) == (0, {"offsetTable": table})
        notice = consumer.notice()
        assert (notice.code, notice.fields["topic"], notice.body) == (220, "orders", answer.body)
    assert {queue_id: store.broker.committed("billing", "orders", queue_id) for queue_id in expected} == expected


# -- requests to clients ----------------------------------------------------------------------------------------------


def test_request_to_a_client_is_forwarded_with_its_answer(client: Client, address: tuple[str, int]) -> None:
    with Client(address) as consumer:
        consume(consumer)
        assert consumer.notice().code == 40
        asked = client.send(307, {"consumerGroup": "billing", "clientId": "c1", "jstackEnable": "true"})
        request = consumer.notice()
        assert (request.code, request.flag, request.fields["jstackEnable"]) == (307, 0, "true")
        consumer.reply(request, 0, b"all is well")
        consumer.reply(request, 0, b"said twice")
        assert client.answer(asked).body == b"all is well"


def test_message_is_handed_to_a_consumer(client: Client, address: tuple[str, int], store: Store) -> None:
    [message] = store.read("orders", 1, 0)
    fields = {"consumerGroup": "billing", "clientId": "c1", "msgId": message.message_id}
    with Client(address) as consumer:
        consume(consumer)
        assert consumer.notice().code == 40
        asked = client.send(309, fields)
        request = consumer.notice()
        assert (request.code, request.fields["brokerName"], request.body) == (309, "mqstore", body_of(store, (1, 0)))
        consumer.reply(request, 1, b"")
        assert client.answer(asked).code == 1
    missing = f"{message.message_id[:-2]}FF"
    assert client.ask(309, fields | {"msgId": missing}).code == 1


def test_client_that_leaves_answers_nothing(client: Client, address: tuple[str, int]) -> None:
    with Client(address) as consumer:
        consume(consumer)
        assert consumer.notice().code == 40
        asked = client.send(307, {"consumerGroup": "billing", "clientId": "c1"})
        assert consumer.notice().code == 307
    answer = client.answer(asked)
    assert (answer.code, answer.remark) == (1, "the client has left")


def test_pulls_are_answered_beside_administration(client: Client) -> None:
    asked = [client.send(208, {"consumerGroup": "billing"}) for _ in range(50)]
    assert client.ask(PULL, PULL_ORDERS).code == 0
    assert {client.answer(each).code for each in asked} == {0}
