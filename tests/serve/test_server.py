"""The server as clients see it: routes, sends, pulls, groups, errors (remoting-server, sections 3 to 10)."""

from __future__ import annotations

import json
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Store, StoreConfig
from mqstore.engine import SimulatedClock
from tests.serve.support import LITE_PULL, ORDERS, PULL, PULL_ORDERS, ROUTE, SEND, UNLOCK, Client, queues_of, serving


@pytest.fixture
def store(mq_store: Store) -> Store:
    """Without a topic."""
    return mq_store


# -- routes -----------------------------------------------------------------------------------------------------------


def test_route_names_the_address_that_the_client_has_reached(client: Client, store: Store) -> None:
    store.create_topic("orders", queues=3)
    route = json.loads(client.ask(ROUTE, {"topic": "orders"}).body)
    host, port = client.socket.getpeername()
    assert route["brokerDatas"][0]["brokerAddrs"] == {"0": f"{host}:{port}"}
    assert route["queueDatas"] == [
        {"brokerName": "mqstore", "perm": 6, "readQueueNums": 3, "topicSysFlag": 0, "writeQueueNums": 3}
    ]


def test_advertised_address_is_in_every_route(store: Store) -> None:
    store.create_topic("orders")
    with serving(store, advertise="queue.example:9876") as address, Client(address) as client:
        route = json.loads(client.ask(ROUTE, {"topic": "orders"}).body)
        assert route["brokerDatas"][0]["brokerAddrs"] == {"0": "queue.example:9876"}
        cluster = json.loads(client.ask(106).body)
        assert cluster["brokerAddrTable"]["mqstore"]["brokerAddrs"] == {"0": "queue.example:9876"}
        assert cluster["clusterAddrTable"] == {"DefaultCluster": ["mqstore"]}


def test_routes_of_other_topics(client: Client) -> None:
    assert client.ask(ROUTE, {"topic": "nowhere"}).code == 17
    assert json.loads(client.ask(ROUTE, {"topic": "TBW102"}).body)["queueDatas"][0]["perm"] == 7
    assert client.ask(ROUTE, {"topic": "%RETRY%billing"}).code == 0  # it exists before the first retry


# -- send -------------------------------------------------------------------------------------------------------------


def test_sent_message_is_stored_with_all_its_fields(client: Client, store: Store) -> None:
    properties = "TAGS\x01paid\x02KEYS\x01o-1 o-2\x02color\x01red\x02UNIQ_KEY\x010A0B\x02"
    answer = client.ask(SEND, ORDERS | {"e": 2, "h": 7, "i": properties}, b"hello")
    assert (answer.code, answer.fields["queueId"], answer.fields["queueOffset"]) == (0, "2", "0")
    assert answer.fields["transactionId"] == "0A0B"
    [message] = store.read("orders", 2, 0)
    assert (message.body, message.tag, message.keys, message.flag) == (b"hello", "paid", ("o-1", "o-2"), 7)
    assert (message.properties["color"], message.unique_key) == ("red", "0A0B")
    assert message.born_timestamp_ms == 1_700_000_000_000
    assert message.born_host == "{}:{}".format(*client.socket.getsockname())
    assert message.message_id == answer.fields["msgId"]


def test_send_without_unique_key_gets_one(client: Client, store: Store) -> None:
    key = client.ask(SEND, ORDERS, b"").fields["transactionId"]
    assert [message.unique_key for message in store.read("orders", 0, 0)] == [key]
    assert len(key) == 34


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"c": "OTHER"}, 17),  # only the model TBW102 creates a topic
        ({"b": "a b"}, 13),
        ({"b": "SCHEDULE_TOPIC_XXXX"}, 16),
        ({"e": 99}, 29),
        ({"e": "x"}, 29),
        ({"g": 1 << 63}, 29),
        ({"e": None}, 29),
        ({"i": "a\x01" + "x" * 40_000}, 13),
    ],
)
def test_refused_send_stores_nothing(
    address: tuple[str, int], store: Store, changed: dict[str, Any], code: int
) -> None:
    fields = {name: value for name, value in {**ORDERS, **changed}.items() if value is not None}
    with Client(address) as client:
        answer = client.ask(SEND, fields, b"hello")
    assert (answer.code, answer.remark is not None) == (code, True)
    assert not [message for topic in store.topics() for message in store.iter(topic)]


def test_topic_of_a_first_send_has_the_queues_of_its_producer(client: Client, store: Store) -> None:
    client.ask(SEND, ORDERS | {"d": 3}, b"")
    client.ask(SEND, ORDERS | {"b": "many", "d": 100}, b"")
    assert (store.broker.topics.require("orders").write_queues, store.broker.topics.require("many").write_queues) == (
        3,
        8,
    )


def test_queue_below_zero_is_any_queue(client: Client, store: Store) -> None:
    for _ in range(4):
        client.ask(SEND, ORDERS | {"e": -1}, b"")
    assert [len(list(store.iter("orders", queue))) for queue in range(4)] == [1, 1, 1, 1]


def test_one_way_send_has_no_answer(client: Client, store: Store) -> None:
    first = client.send(SEND, ORDERS, b"a", flag=2)
    bad = client.send(SEND, ORDERS | {"e": 99}, b"b", flag=2)
    client.ask(SEND, ORDERS, b"c")
    assert not {first, bad} & client._answers.keys()
    assert [message.body for message in store.iter("orders", 0)] == [b"a", b"c"]


def test_delay_level_and_timer_delay_the_message(client: Client, store: Store) -> None:
    client.ask(SEND, ORDERS | {"i": "DELAY\x013\x02"}, b"later")
    answer = client.ask(SEND, ORDERS | {"i": "TIMER_DELAY_SEC\x01600\x02"}, b"much later")
    assert client.ask(PULL, PULL_ORDERS).code == 19
    assert store.broker.recall(answer.fields["recallHandle"])


def test_flushed_send_is_answered_after_the_sync_and_others_go_first(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "flushed", durability="flush") as store, serving(store) as address:
        with Client(address) as client:
            sends = [client.send(SEND, ORDERS, str(number).encode()) for number in range(50)]
            assert client.ask(ROUTE, {"topic": "TBW102"}).code == 0
            answers = [client.answer(send) for send in sends]
        assert [answer.fields["queueOffset"] for answer in answers] == [str(number) for number in range(50)]


# -- pull -------------------------------------------------------------------------------------------------------------


def test_pull_has_the_records_and_both_bounds(client: Client, store: Store) -> None:
    bodies = [str(number).encode() for number in range(10)]
    for body in bodies:
        store.put("orders", body, queue_id=0)
    answer = client.ask(PULL, PULL_ORDERS | {"queueOffset": 2, "maxMsgNums": 3})
    assert (answer.code, dict(answer.fields)) == (
        0,
        {"nextBeginOffset": "5", "minOffset": "0", "maxOffset": "10", "suggestWhichBrokerId": "0"},
    )
    assert answer.body == b"".join(message._record_bytes() for message in store.read("orders", 0, 2, 3))


@pytest.mark.parametrize(
    ("fields", "code", "next_offset"),
    [
        ({"queueOffset": 0}, 0, 2),
        ({"queueOffset": 2}, 19, 2),  # the end
        ({"queueOffset": 3}, 21, 2),
        ({"queueOffset": 1_000_000}, 21, 2),
        ({"queueOffset": 0, "subscription": "unpaid"}, 20, 2),  # none passes: read on
        ({"queueOffset": 0, "subscription": "unpaid || paid"}, 0, 2),
        ({"queueId": 1}, 19, 0),
        ({"queueId": 1, "queueOffset": 5}, 21, 0),
        ({"queueOffset": 0, "subscription": "n > 1", "expressionType": "SQL92"}, 0, 2),
        ({"subscription": "n >", "expressionType": "SQL92"}, 23, None),
        ({"topic": "nowhere"}, 17, None),
        ({"queueId": 99}, 29, None),
    ],
)
def test_answers_of_a_pull(
    address: tuple[str, int], store: Store, fields: dict[str, Any], code: int, next_offset: int | None
) -> None:
    store.put("orders", b"a", queue_id=0, tag="paid", properties={"n": "1"})
    store.put("orders", b"b", queue_id=0, tag="created", properties={"n": "2"})
    with Client(address) as client:
        answer = client.ask(PULL, PULL_ORDERS | fields)
    assert (answer.code, answer.fields.get("nextBeginOffset")) == (
        code,
        None if next_offset is None else str(next_offset),
    )


@pytest.mark.parametrize("code", [PULL, LITE_PULL])
def test_waiting_pull_is_answered_by_the_next_message(client: Client, store: Store, code: int) -> None:
    store.create_topic("orders")
    pull = client.send(code, PULL_ORDERS | {"sysFlag": 6, "suspendTimeoutMillis": 60_000})
    client.ask(ROUTE, {"topic": "orders"})  # handled after the pull
    assert pull not in client._answers
    store.put("orders", b"here", queue_id=0)
    assert client.answer(pull).fields["nextBeginOffset"] == "1"


def test_waiting_pull_ends_at_its_time(client: Client, store: Store) -> None:
    store.create_topic("orders")
    assert client.ask(PULL, PULL_ORDERS | {"sysFlag": 6, "suspendTimeoutMillis": 50}).code == 19


def test_pull_uses_the_filter_of_the_heartbeat(client: Client, store: Store) -> None:
    store.put("orders", b"a", queue_id=0, tag="paid")
    store.put("orders", b"b", queue_id=0, tag="new")
    client.heartbeat("c1", orders="new")
    answer = client.ask(PULL, PULL_ORDERS | {"sysFlag": 0, "subscription": ""})
    assert answer.body == store.read("orders", 0, 1)[0]._record_bytes()
    assert client.ask(PULL, PULL_ORDERS | {"sysFlag": 0, "topic": "others"}).code == 24


def test_pull_before_the_first_heartbeat_waits(client: Client, store: Store) -> None:
    """Clients pull at once after a restart of the server, and pause for a second if they are refused."""
    store.put("orders", b"here", queue_id=0)
    pull = client.send(PULL, PULL_ORDERS | {"sysFlag": 2, "suspendTimeoutMillis": 60_000})
    client.ask(ROUTE, {"topic": "orders"})
    assert pull not in client._answers
    client.heartbeat("c1")
    assert client.answer(pull).code == 0
    late = client.ask(PULL, PULL_ORDERS | {"sysFlag": 2, "suspendTimeoutMillis": 50, "consumerGroup": "unknown"})
    assert late.code == 24


def test_pull_commits_first(client: Client, store: Store) -> None:
    for body in (b"a", b"b", b"c"):
        store.put("orders", body, queue_id=0)
    client.ask(PULL, PULL_ORDERS | {"queueOffset": 2, "sysFlag": 5, "commitOffset": 2})
    assert store.broker.committed("billing", "orders", 0) == 2
    client.ask(PULL, PULL_ORDERS | {"queueOffset": 2, "sysFlag": 5, "commitOffset": 99})  # ignored
    assert store.broker.committed("billing", "orders", 0) == 2


# -- groups -----------------------------------------------------------------------------------------------------------


def test_consumers_hear_of_each_other(address: tuple[str, int]) -> None:
    with Client(address) as first, Client(address) as second:
        assert first.heartbeat("c1").fields["IS_SUPPORT_HEART_BEAT_V2"] == "true"
        for change in (
            lambda: None,  # the first has joined
            lambda: second.heartbeat("c2"),
            lambda: second.heartbeat("c2", orders="paid"),
            lambda: second.ask(35, {"clientID": "c2", "consumerGroup": "billing"}),
        ):
            change()
            notice = first.notice()
            assert (notice.code, notice.fields["consumerGroup"]) == (40, "billing")
            assert first.ask(38, {"consumerGroup": "billing"}).code == 0
            assert first.notices == []  # one for each change
        second.heartbeat("c2")
        first.notice()
        assert json.loads(first.ask(38, {"consumerGroup": "billing"}).body) == {"consumerIdList": ["c1", "c2"]}
        second.heartbeat("c2")  # nothing has changed
        second.ask(35, {"clientID": "c2", "consumerGroup": "billing"})
        first.notice()
        assert first.notices == []
        assert json.loads(first.ask(38, {"consumerGroup": "billing"}).body) == {"consumerIdList": ["c1"]}
        assert first.ask(38, {"consumerGroup": "nobody"}).code == 1


def test_locks_of_a_client_that_is_gone_are_free(address: tuple[str, int]) -> None:
    with Client(address) as other:
        other.heartbeat("c2")
        with Client(address) as client:
            client.heartbeat("c1")
            assert client.lock("c1", 0, 1) == [0, 1]
            assert other.lock("c2", 1, 2) == [2]
            client.ask(UNLOCK, body=queues_of("billing", "c1", 0))
        while other.lock("c2", 0, 1, 2) != [0, 1, 2]:  # the connection is closed: the others divide its queues
            other.notice()


def test_offsets_of_groups_and_queues(client: Client, store: Store) -> None:
    begin_ms = int(time.time() * 1000) - 1
    for body in (b"a", b"b", b"c"):
        store.put("orders", body, queue_id=0)
    queue = {"topic": "orders", "queueId": 0}
    group = queue | {"consumerGroup": "billing"}
    first = store.read("orders", 0, 0)[0].store_timestamp_ms
    assert client.ask(14, group).fields == {"offset": "0"}  # a young queue is read from its beginning
    assert client.ask(14, group | {"setZeroIfNotFound": "false"}).code == 22
    assert client.ask(15, group | {"commitOffset": 2}).code == 0
    assert client.ask(14, group).fields == {"offset": "2"}
    assert client.ask(15, group | {"commitOffset": 4}).code == 29
    assert client.ask(30, queue).fields == {"offset": "3"}
    assert client.ask(31, queue).fields == {"offset": "0"}
    assert client.ask(32, queue).fields == {"timestamp": str(first)}
    assert client.ask(32, queue | {"queueId": 1}).fields == {"timestamp": "-1"}
    assert client.ask(29, queue | {"timestamp": begin_ms}).fields == {"offset": "0"}
    assert client.ask(30, queue | {"topic": "nowhere"}).code == 17


def test_message_that_is_sent_back_is_redelivered_then_dead(client: Client, store: Store) -> None:
    receipt = store.put("orders", b"bad", queue_id=0)
    client.heartbeat("c1")
    back = {"offset": receipt.physical_offset, "group": "billing", "delayLevel": 1, "maxReconsumeTimes": 1}
    assert client.ask(36, back).code == 0
    retry = PULL_ORDERS | {"topic": "%RETRY%billing", "sysFlag": 6, "suspendTimeoutMillis": 20_000}
    assert client.ask(PULL, retry).code == 0
    [again] = store.read("%RETRY%billing", 0, 0)
    assert (again.body, again.reconsume_times) == (b"bad", 1)
    client.ask(36, back | {"offset": again.physical_offset})
    assert [letter.body for letter in store.dead_letters("billing")] == [b"bad"]


@pytest.mark.parametrize(
    ("ordered", "times", "topic"),
    [(False, 1, "%RETRY%billing"), (False, 17, "%DLQ%billing"), (True, 1, "%DLQ%billing")],
)
def test_resend_of_a_consumer_is_a_retry_or_a_dead_letter(
    client: Client, store: Store, ordered: bool, times: int, topic: str
) -> None:
    client.heartbeat("c1")
    if ordered:
        client.lock("c1", 0)
    resend = ORDERS | {"b": "%RETRY%billing", "j": times, "l": 16, "i": "DELAY\x011\x02"}
    assert client.ask(SEND, resend, b"bad").code == 0
    if topic == "%RETRY%billing":
        wait = PULL_ORDERS | {"topic": topic, "sysFlag": 6, "suspendTimeoutMillis": 20_000}
        assert client.ask(PULL, wait).code == 0
    assert [message.body for message in store.iter(topic, 0)] == [b"bad"]


# -- errors and limits ------------------------------------------------------------------------------------------------


def test_unknown_request_is_answered_so(client: Client) -> None:
    assert client.ask(9999).code == 3
    assert client.ask(ROUTE, {"topic": "TBW102"}).code == 0


def test_flags_of_a_client_make_no_transaction(client: Client, store: Store) -> None:
    """The bits 4 and 8 of sysFlag would make it a half message, or one that no reader counts."""
    client.ask(SEND, ORDERS | {"f": 0xF | 0x30}, zlib.compress(b"hello"))
    [message] = store.read("orders", 0, 0)
    assert (message.body, message.sys_flag) == (b"hello", 3)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"clientID": ""}', b'{"clientID": "c", "consumerDataSet": [1]}'])
def test_damaged_heartbeat_is_refused(client: Client, body: bytes) -> None:
    assert client.ask(34, body=body).code == 29
    assert client.ask(38, {"consumerGroup": "billing"}).code == 1


@pytest.mark.parametrize("code", [46, 41, 200151], ids=["client config", "locks", "acks"])
@pytest.mark.parametrize("value", ["orders", 7, ["orders"], {"expressionType": ["SQL92"]}, [{"topic": "orders"}]])
def test_body_whose_members_are_other_things_is_refused(
    client: Client, code: int, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    body = dict.fromkeys(("subscriptionData", "mqSet", "acks"), value)
    answer = client.ask(code, body=json.dumps(body).encode())
    is_filter = code == 46 and isinstance(value, dict)
    assert answer.code == (0 if is_filter else 29)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes.fromhex("16030100c8010000c40303")])
def test_bytes_that_are_no_frame_close_only_their_connection(
    address: tuple[str, int], data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(address) as client, Client(address) as other:
        client.socket.sendall(data)
        with pytest.raises(ConnectionError):
            client.receive()
        assert other.ask(ROUTE, {"topic": "TBW102"}).code == 0
    assert "is disconnected" in caplog.text


# -- transactions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "seen"), [(8, [b"pay"]), (12, []), (0, [])])
def test_prepared_message_is_visible_only_after_a_commit(
    client: Client, store: Store, outcome: int, seen: list[bytes]
) -> None:
    half = client.ask(SEND, ORDERS | {"i": "TRAN_MSG\x01true\x02PGROUP\x01producers\x02UNIQ_KEY\x01AB\x02"}, b"pay")
    assert (half.code, half.fields["transactionId"], half.fields["queueOffset"]) == (0, "AB", "0")
    assert client.ask(PULL, PULL_ORDERS).code == 19
    end = {
        "producerGroup": "producers",
        "tranStateTableOffset": half.fields["queueOffset"],
        "commitLogOffset": int(half.fields["msgId"][16:], 16),
        "commitOrRollback": outcome,
        "msgId": "AB",
        "transactionId": "AB",
    }
    assert client.ask(37, end | {"producerGroup": "others"}).code == 29
    assert client.ask(37, end | {"commitLogOffset": 1}).code == 29
    assert client.ask(37, end | {"commitOrRollback": 7}).code == 29
    assert client.ask(37, end).code == 0
    assert [message.body for message in store.iter("orders")] == seen


def test_producer_is_asked_about_an_open_transaction(tmp_path: Path) -> None:
    clock = SimulatedClock()
    with (
        mqstore.open(tmp_path / "checks", config=StoreConfig(clock=clock)) as store,
        serving(store) as address,
        Client(address) as client,
        Client(address) as other,
    ):
        for each, group in ((client, "producers"), (other, "others")):
            beat = {"clientID": group, "producerDataSet": [{"groupName": group}]}
            assert each.ask(34, body=json.dumps(beat).encode()).code == 0
        client.ask(SEND, ORDERS | {"i": "TRAN_MSG\x01true\x02UNIQ_KEY\x01AB\x02k\x01v\x02"}, b"pay")
        clock.advance(6_000)
        store.broker.run_once()
        while not client.notices:
            client.receive()
        [check] = client.notices
        assert (check.code, check.fields["transactionId"], check.fields["topic"]) == (39, "AB", "orders")
        record = Client.record(check)
        assert (record.topic, record.queue_id, record.body) == ("orders", 0, b"pay")
        end = {name: check.fields[name] for name in ("tranStateTableOffset", "commitLogOffset", "msgId")}
        answer = {"producerGroup": "producers", "commitOrRollback": 8, "fromTransactionCheck": "true"}
        assert client.ask(37, end | answer | {"transactionId": "AB"}).code == 0
        assert [message.body for message in store.iter("orders")] == [b"pay"]
        assert other.notices == []
