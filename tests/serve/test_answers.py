"""Fields that clients need, in every answer (remoting-server, section 5).

A client without one of them fails silently, or with a NullPointerException. The names are those that are not null in
the header classes of RocketMQ 5.3.3, and those that section 5 adds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mqstore
from mqstore.remoting.codes import Code
from mqstore.remoting.frames import Frame
from mqstore.serve.requests import groups, pop, pull, routes, send, transactions
from tests.serve.support import HEART_BEAT, LITE_PULL, ORDERS, PULL, PULL_ORDERS, SEND, Client, serving

VERSION_4_1 = 201
"""Version of RocketMQ 4.1.0. To a server with an older one Java clients send no SQL filters."""


class Row(NamedTuple):
    """A request, the code of its answer, and what the answer must have."""

    code: int
    fields: Mapping[str, Any]
    answer: int
    needs: str = ""
    """Fields of the header."""
    body: Any = None
    """Body of the request: a value as JSON, or bytes."""
    members: str = ""
    """Members of the answer's body, by paths: `a.b` is member b of member a, or of each item of a."""


QUEUE = {"topic": "orders", "queueId": 0}
GROUP_QUEUE = QUEUE | {"consumerGroup": "billing"}
LONG = {
    "producerGroup": "producers",
    "topic": "orders",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": 4,
    "queueId": 0,
    "sysFlag": 0,
    "bornTimestamp": 1,
    "flag": 0,
}
POP = GROUP_QUEUE | {"maxMsgNums": 1, "invisibleTime": 60_000, "pollTime": 0, "bornTime": 0, "initMode": 0}
POPPED = "popTime invisibleTime reviveQid restNum"
FOUND = f"{POPPED} startOffsetInfo msgOffsetInfo"
SENT = "msgId queueId queueOffset transactionId"
PULLED = "suggestWhichBrokerId nextBeginOffset minOffset maxOffset"
TIMER = "TIMER_DELAY_SEC\x01600\x02UNIQ_KEY\x01AB\x02"
HALF = "TRAN_MSG\x01true\x02PGROUP\x01producers\x02UNIQ_KEY\x01CD\x02"
BATCH = bytes.fromhex("00000017 00000000 00000000 00000000 00000001 61 0000")
LOCKS = {"consumerGroup": "billing", "clientId": "c1", "mqSet": [QUEUE | {"brokerName": "mqstore"}]}
BEAT = {"clientID": "c1", "consumerDataSet": [], "producerDataSet": [{"groupName": "producers"}]}
ASSIGN = {"topic": "orders", "consumerGroup": "billing", "clientId": "c1", "strategyName": "AVG"}
ROWS = [
    Row(10, LONG, 0, SENT, b"a"),
    Row(SEND, ORDERS, 0, SENT, b"a"),
    Row(SEND, ORDERS | {"i": TIMER}, 0, f"{SENT} recallHandle", b"a"),
    Row(SEND, ORDERS | {"i": HALF}, 0, SENT, b"a"),
    Row(320, ORDERS | {"m": "true"}, 0, SENT, BATCH),
    *(Row(code, fields, 0, PULLED) for code in (PULL, LITE_PULL) for fields in [PULL_ORDERS]),
    Row(PULL, PULL_ORDERS | {"queueId": 1}, 19, PULLED),
    Row(PULL, PULL_ORDERS | {"subscription": "none"}, 20, PULLED),
    Row(PULL, PULL_ORDERS | {"queueOffset": 99}, 21, PULLED),
    Row(200050, POP, 0, FOUND),
    Row(200050, POP | {"order": "true", "consumerGroup": "ordered"}, 0, f"{FOUND} orderCountInfo"),
    Row(200050, POP | {"queueId": 1}, 210, POPPED),
    Row(200052, GROUP_QUEUE | {"maxMsgNums": 1}, 0, POPPED),
    Row(200052, GROUP_QUEUE | {"maxMsgNums": 1, "queueId": 1}, 19, POPPED),
    Row(200054, GROUP_QUEUE | {"pollTime": 0, "bornTime": 0}, 0, "hasMsg pollingFull"),
    Row(200055, GROUP_QUEUE, 0, "pollingNum"),
    Row(14, GROUP_QUEUE, 0, "offset"),
    Row(29, QUEUE | {"timestamp": 0}, 0, "offset"),
    Row(30, QUEUE, 0, "offset"),
    Row(31, QUEUE, 0, "offset"),
    Row(32, QUEUE, 0, "timestamp"),
    Row(HEART_BEAT, {}, 0, "IS_SUPPORT_HEART_BEAT_V2 IS_SUB_CHANGE", BEAT),
    Row(38, {"consumerGroup": "billing"}, 0, members="consumerIdList"),
    Row(41, {}, 0, "", LOCKS, "lockOKMQSet.brokerName lockOKMQSet.queueId lockOKMQSet.topic"),
    Row(
        105,
        {"topic": "orders"},
        0,
        members="brokerDatas.brokerAddrs.0 brokerDatas.brokerName brokerDatas.cluster filterServerTable "
        "queueDatas.brokerName queueDatas.perm queueDatas.readQueueNums queueDatas.writeQueueNums "
        "queueDatas.topicSysFlag",
    ),
    Row(106, {}, 0, members="brokerAddrTable.mqstore.brokerAddrs.0 clusterAddrTable.DefaultCluster"),
    Row(
        400,
        {},
        0,
        "",
        ASSIGN | {"messageModel": "CLUSTERING"},
        "messageQueueAssignments.mode messageQueueAssignments.messageQueue.queueId",
    ),
    Row(46, {}, 0, "", {"clientId": "c1", "group": "billing"}),
    Row(401, {}, 0, "", {"topic": "orders", "consumerGroup": "billing", "mode": "PULL"}),
    Row(15, GROUP_QUEUE | {"commitOffset": 1}, 0),
    Row(36, {"offset": 0, "group": "billing", "delayLevel": 1}, 0),
    Row(42, {}, 0, "", LOCKS),
    Row(35, {"clientID": "c1", "consumerGroup": "billing"}, 0),
    Row(200151, {}, 0, "", {"brokerName": "mqstore", "acks": []}),
]
ELSEWHERE = {37, 324, 325, 370, 200051, 200053}
"""Requests whose answers need an earlier answer. Other tests of this folder make them."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, int]]:
    with mqstore.open(tmp_path / "mq") as store:
        store.create_topic("orders", queues=4)
        store.broker.groups.create("ordered")
        store.put("orders", b"a", queue_id=0, tag="paid")
        store.put("orders", b"b", queue_id=0, tag="paid")
        with serving(store) as address:
            yield address


def body_of(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()


def missing(value: Any, path: str) -> list[str]:
    """Return the path if a member that it names is not there."""
    values = [value]
    for name in path.split("."):
        values = [each for found in values for each in (found if isinstance(found, list) else [found])]
        if not values or not all(isinstance(each, dict) and each.get(name) is not None for each in values):
            return [path]
        values = [each[name] for each in values]
    return []


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{Code(row.code).name}-{row.answer}")
def test_answer_has_every_field_that_clients_need(address: tuple[str, int], row: Row, binary: bool) -> None:
    with Client(address, binary=binary) as client:
        client.heartbeat("c1")
        answer: Frame = client.ask(row.code, row.fields, body_of(row.body))
    assert answer.code == row.answer, answer.remark
    assert set(row.needs.split()) <= answer.fields.keys()
    assert [path for each in row.members.split() for path in missing(json.loads(answer.body), each)] == []
    assert answer.version >= VERSION_4_1


def test_every_request_of_clients_has_a_row() -> None:
    """Requests of mqadmin have their own table in `test_admin.py`."""
    rooms = groups, pop, pull, routes, send, transactions
    assert {code for room in rooms for code in room.HANDLERS} == {row.code for row in ROWS} | ELSEWHERE
