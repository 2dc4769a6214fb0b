"""POP as clients see it: pops, receipts, notifications, assignments (remoting-server, section 9)."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mqstore
from mqstore import Store, StoreConfig
from mqstore.engine import SimulatedClock
from mqstore.layout.record import Record, decode_record
from mqstore.remoting.frames import Frame
from mqstore.serve import Limits, Server
from tests.serve.support import ORDERS, ROUTE, SEND, Client, serving, started

POP, ACK, PEEK, CHANGE, NOTIFY, POLLING, BATCH_ACK = 200050, 200051, 200052, 200053, 200054, 200055, 200151
QUERY_ASSIGNMENT, SET_MODE = 400, 401
POP_ORDERS: Mapping[str, Any] = {
    "consumerGroup": "billing",
    "topic": "orders",
    "queueId": -1,
    "maxMsgNums": 32,
    "invisibleTime": 60_000,
    "pollTime": 0,
    "bornTime": 0,
    "initMode": 0,
    "order": "false",
}
"""Fields of a pop of all queues of `orders`, which does not wait."""


class Popped(NamedTuple):
    """One message of a pop's answer, with the receipt that a Java client makes of it (`ExtraInfoUtil`)."""

    body: bytes
    attempt: int
    topic: str
    queue_id: int
    offset: int
    receipt: str


def popped(answer: Frame) -> list[Popped]:
    """Read the answer as `MQClientAPIImpl.processPopResponse` does."""
    fields = answer.fields
    starts = {(mark, queue): start for mark, queue, start in _parts(fields["startOffsetInfo"])}
    counts = {(mark, queue): int(count) for mark, queue, count in _parts(fields.get("orderCountInfo", ""))}
    messages = []
    for record in records(answer.body):
        mark = "0" if not record.topic.startswith("%RETRY%") else "2" if "+" in record.topic else "1"
        start, queue, offset = starts[mark, str(record.queue_id)], record.queue_id, record.queue_offset
        times = f"{fields['popTime']} {fields['invisibleTime']} {fields['reviveQid']}"
        receipt = f"{start} {times} {mark} mqstore {queue} {offset}"
        attempt = counts.get((mark, f"qo{queue}%{offset}"), record.reconsume_times) + 1
        messages.append(Popped(record.body, attempt, record.topic, queue, offset, receipt))
    named = {(mark, queue, o) for mark, queue, offsets in _parts(fields["msgOffsetInfo"]) for o in offsets.split(",")}
    assert len(named) == len(messages)
    return messages


def records(body: bytes) -> Iterator[Record]:
    at = 0
    while at < len(body):
        yield decode_record(body, at)
        at += int.from_bytes(body[at : at + 4], "big")


def _parts(text: str) -> Iterator[list[str]]:
    return (part.split(" ") for part in text.split(";") if part)


def settle(message: Popped, **more: object) -> dict[str, Any]:
    """Return the fields that acknowledge a message, or change its time."""
    named = {"topic": message.topic, "queueId": message.queue_id, "offset": message.offset}
    return {"consumerGroup": "billing", **named, "extraInfo": message.receipt, **more}


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store with the test's clock if it has one. Then no thread of the store runs by itself."""
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    with mqstore.open(tmp_path / "mq", config=StoreConfig(clock=clock)) as store:
        store.create_topic("orders", queues=4)
        yield store


# -- pop --------------------------------------------------------------------------------------------------------------


def test_popped_messages_of_all_queues_can_be_acknowledged(client: Client, store: Store) -> None:
    for number in range(40):
        store.put("orders", str(number).encode(), queue_id=number % 4)
    seen: list[bytes] = []
    while messages := popped(answer) if (answer := client.ask(POP, POP_ORDERS)).code == 0 else []:
        seen += [message.body for message in messages]
        assert [client.ask(ACK, settle(message)).code for message in messages] == [0] * len(messages)
    assert (answer.code, sorted(seen, key=int)) == (210, [str(number).encode() for number in range(40)])
    assert store.broker.lag("billing") == dict.fromkeys(store.broker.lag("billing"), 0)


def test_waiting_pop_is_answered_by_the_next_message(client: Client, store: Store) -> None:
    pop = client.send(POP, POP_ORDERS | {"pollTime": 60_000})
    client.ask(ROUTE, {"topic": "orders"})  # handled after the pop
    assert pop not in client._answers
    assert (
        client.ask(POLLING, {"consumerGroup": "billing", "topic": "orders", "queueId": -1}).fields["pollingNum"] == "1"
    )
    assert (
        client.ask(POLLING, {"consumerGroup": "billing", "topic": "orders", "queueId": 0}).fields["pollingNum"] == "0"
    )
    store.put("orders", b"here")
    assert [message.body for message in popped(client.answer(pop))] == [b"here"]


def test_message_of_a_client_that_is_gone_wakes_another(
    address: tuple[str, int], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message wakes one of several pops. It comes while the server forgets the pop that it wakes."""
    remove, bodies = store.broker.remove_waiter, iter([b"here"])

    def remove_late(waiter: Any) -> bool:
        for body in bodies:
            store.put("orders", body)
            store.log.dispatch()
        return remove(waiter)

    monkeypatch.setattr(store.broker, "remove_waiter", remove_late)
    store.broker.groups.create(POP_ORDERS["consumerGroup"])  # or a thread does it, and a pop is parked later
    with Client(address) as stays:
        gone = Client(address)
        gone.send(POP, POP_ORDERS | {"pollTime": 60_000})
        gone.ask(ROUTE, {"topic": "orders"})
        pop = stays.send(POP, POP_ORDERS | {"pollTime": 60_000})
        stays.ask(ROUTE, {"topic": "orders"})
        gone.socket.close()
        assert [message.body for message in popped(stays.answer(pop))] == [b"here"]


def test_many_waiting_pops_get_every_message_once(address: tuple[str, int], store: Store) -> None:
    seen: list[bytes] = []

    def consume() -> None:
        with Client(address) as client:
            while b"end" not in (bodies := [m.body for m in popped(client.ask(POP, wait))]):
                seen.extend(bodies)

    wait = POP_ORDERS | {"pollTime": 20_000, "maxMsgNums": 1}
    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(100):
        store.put("orders", str(number).encode(), queue_id=number % 4)
    while len(seen) < 100:
        threads[0].join(0.01)
    for _ in threads:
        store.put("orders", b"end")
    for thread in threads:
        thread.join(20)
    assert sorted(seen, key=int) == [str(number).encode() for number in range(100)]


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"topic": "nowhere"}, 17),
        ({"queueId": 4}, 29),
        ({"maxMsgNums": 33}, 29),
        ({"maxMsgNums": 0}, 29),
        ({"invisibleTime": 1}, 29),
        ({"invisibleTime": -1}, 29),
        ({"exp": "n >", "expType": "SQL92"}, 23),
        ({"consumerGroup": "a b"}, 26),
        ({"pollTime": "soon"}, 29),
        ({"bornTime": None}, 29),
        ({"exp": "new", "expType": "TAG"}, 210),
        ({"initMode": 1}, 210),
        ({"exp": "n = 1", "expType": "SQL92"}, 0),
    ],
)
def test_answers_of_a_pop(address: tuple[str, int], store: Store, changed: dict[str, Any], code: int) -> None:
    store.put("orders", b"a", tag="paid", properties={"n": "1"})
    fields = {name: value for name, value in {**POP_ORDERS, **changed}.items() if value is not None}
    with Client(address) as client:
        answer = client.ask(POP, fields)
    assert (answer.code, bool(answer.body)) == (code, code == 0)
    if code in (0, 210):
        assert {"popTime", "invisibleTime", "reviveQid", "restNum"} <= answer.fields.keys()
    else:
        assert answer.remark


def test_too_many_waiting_pops_are_answered_so(store: Store) -> None:
    store.broker.groups.create("billing")
    with serving(store, limits=Limits(parked_by_connection=1)) as address, Client(address) as client:
        client.send(POP, POP_ORDERS | {"pollTime": 60_000})
        assert client.ask(POP, POP_ORDERS | {"pollTime": 60_000}).code == 209
        answer = client.ask(NOTIFY, POP_ORDERS | {"pollTime": 60_000})
        assert dict(answer.fields) == {"hasMsg": "false", "pollingFull": "true"}


# -- receipts: the cases of section 9 ---------------------------------------------------------------------------------


def test_receipt_before_a_change_is_refused(client: Client, store: Store, clock: SimulatedClock) -> None:
    store.put("orders", b"a")
    [message] = popped(client.ask(POP, POP_ORDERS))
    clock.advance(10)
    changed = client.ask(CHANGE, settle(message, invisibleTime=120_000))
    assert changed.code == 0
    assert client.ask(ACK, settle(message)).code == 13
    assert client.ask(CHANGE, settle(message, invisibleTime=1_000)).code == 13
    times = [changed.fields[name] for name in ("popTime", "invisibleTime", "reviveQid")]
    new = f"{message.offset} {' '.join(times)} 0 mqstore {message.queue_id} {message.offset}"  # as a Java client does
    assert client.ask(ACK, settle(message._replace(receipt=new))).code == 0


def test_late_ack_is_refused(client: Client, store: Store, clock: SimulatedClock) -> None:
    store.put("orders", b"a")
    [message] = popped(client.ask(POP, POP_ORDERS))
    clock.advance(60_001)
    store.broker.run_once()
    answer = client.ask(ACK, settle(message))
    assert (answer.code, "has expired" in (answer.remark or "")) == (13, True)
    assert client.ask(CHANGE, settle(message, invisibleTime=1_000)).code == 13


def test_second_ack_and_foreign_receipts(client: Client, store: Store) -> None:
    store.put("orders", b"a")
    [message] = popped(client.ask(POP, POP_ORDERS))
    assert [client.ask(ACK, settle(message)).code for _ in range(2)] == [0, 0]
    assert client.ask(ACK, settle(message, consumerGroup="others")).code == 13
    assert client.ask(ACK, settle(message, topic="nowhere")).code == 17
    for receipt in ("", "garbage", "1 2 3", message.receipt + " 1 1", message.receipt.replace(" 0 ", " 9 ", 1)):
        assert client.ask(ACK, settle(message, extraInfo=receipt)).code == 13


def test_failed_message_is_redelivered_from_the_retry_topic(
    client: Client, store: Store, clock: SimulatedClock
) -> None:
    store.put("orders", b"a")
    [message] = popped(client.ask(POP, POP_ORDERS))
    assert client.ask(CHANGE, settle(message, invisibleTime=2_000)).code == 0
    clock.advance(2_001)
    store.broker.run_once()
    [again] = popped(client.ask(POP, POP_ORDERS))
    assert (again.body, again.topic, again.attempt) == (b"a", "%RETRY%billing+orders", 2)
    assert again.receipt.split(" ")[4] == "2"
    assert client.ask(ACK, settle(again)).code == 0
    assert client.ask(POP, POP_ORDERS).code == 210
    assert store.broker.pending("billing") == []


def test_ordered_batch_is_answered_again_only_to_its_attempt(client: Client, store: Store) -> None:
    for body in (b"a", b"b"):
        store.put("orders", body, queue_id=0)
    ordered = POP_ORDERS | {"order": "true", "attemptId": "one"}
    first = client.ask(POP, ordered)
    assert first.fields["reviveQid"] == "999"
    assert client.ask(POP, ordered | {"attemptId": "two"}).code == 210
    again = popped(client.ask(POP, ordered))
    assert [(message.body, message.attempt) for message in again] == [(b"a", 1), (b"b", 1)]
    assert client.ask(ACK, settle(popped(first)[0])).code == 13  # the answer that was lost
    assert [client.ask(ACK, settle(message)).code for message in again] == [0, 0]
    assert client.ask(POP, ordered).code == 210


def test_failed_ordered_message_counts_its_attempts(client: Client, store: Store, clock: SimulatedClock) -> None:
    store.put("orders", b"a", queue_id=1)
    ordered = POP_ORDERS | {"order": "true"}
    [message] = popped(client.ask(POP, ordered))
    assert client.ask(CHANGE, settle(message, invisibleTime=1_000)).code == 0
    assert client.ask(POP, ordered).code == 210
    clock.advance(1_001)
    [again] = popped(client.ask(POP, ordered))
    assert (again.body, again.attempt) == (b"a", 2)


def test_answer_has_one_pop_time_and_the_rest_comes_at_once(
    client: Client, store: Store, clock: SimulatedClock
) -> None:
    """Two queues whose last batches have different times are delivered again by their attempt id."""
    for queue in range(2):
        store.put("orders", str(queue).encode(), queue_id=queue)
    ordered = POP_ORDERS | {"order": "true", "attemptId": "one"}
    [zero] = popped(client.ask(POP, ordered | {"queueId": 0}))
    clock.advance(5)
    [one] = popped(client.ask(POP, ordered | {"queueId": 1}))
    assert (zero.body, one.body) == (b"0", b"1")
    clock.advance(-5)  # so that the pop times of the queues still differ
    messages = [*popped(client.ask(POP, ordered)), *popped(client.ask(POP, ordered | {"attemptId": "two"}))]
    assert sorted(message.body for message in messages) == [b"0", b"1"]
    assert [client.ask(ACK, settle(message)).code for message in messages] == [0, 0]


def test_batch_ack_settles_every_named_message(client: Client, store: Store) -> None:
    for number in range(12):
        store.put("orders", str(number).encode(), queue_id=1)
    start, time_ms, invisible, revive, mark, *_ = popped(client.ask(POP, POP_ORDERS))[0].receipt.split(" ")
    bits = base64.b64encode(bytes((0b1111_0111, 0b0000_1111))).decode()  # all but 3, as java.util.BitSet
    entry = {"c": "billing", "t": "orders", "r": mark, "so": int(start), "q": 1, "rq": int(revive)}
    acks = [entry | {"pt": int(time_ms), "it": int(invisible), "b": bits}]
    assert client.ask(BATCH_ACK, body=json.dumps({"brokerName": "mqstore", "acks": acks}).encode()).code == 0
    assert [each.offset for each in store.broker.pending("billing")] == [3]
    assert client.ask(BATCH_ACK, body=json.dumps({"acks": acks}).encode()).code == 0  # again: harmless
    acks[0]["pt"] = 1
    assert client.ask(BATCH_ACK, body=json.dumps({"acks": acks}).encode()).code == 0  # expired: as a real broker
    for damaged in ({"b": "AB=" * 9_000}, {"b": "?"}, {"so": "x"}, {"r": "7"}, {"q": None}, {"so": 1 << 70}):
        body = json.dumps({"acks": [acks[0] | damaged]}).encode()
        assert client.ask(BATCH_ACK, body=body).code in (13, 29)
    assert client.ask(BATCH_ACK, body=b'{"acks": 5}').code == 29


def test_flushed_acks_wait_for_one_sync_and_other_calls_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mqstore.open(tmp_path / "flushed", durability="flush") as store, serving(store) as address:
        for number in range(30):
            store.put("orders", str(number).encode(), durability="append", queue_id=0)
        with Client(address) as client:
            messages = popped(client.ask(POP, POP_ORDERS | {"pollTime": 20_000}))
            flush, disk, syncs = store.log.flush, threading.Event(), []

            def flush_late() -> None:
                syncs.append(disk.wait(20))
                flush()

            monkeypatch.setattr(store.log, "flush", flush_late)
            acks = [client.send(ACK, settle(message)) for message in messages]
            bad = client.send(ACK, settle(messages[0], extraInfo="garbage"))
            assert client.ask(ROUTE, {"topic": "orders"}).code == 0
            assert not {*acks} & client._answers.keys()
            disk.set()
            assert [client.answer(ack).code for ack in acks] == [0] * len(messages)
            assert client.answer(bad).code == 13
            assert len(syncs) <= 2
            monkeypatch.undo()
        assert store.broker.pending("billing") == []


@pytest.mark.parametrize("options", [[], ["--flush"]], ids=["append", "flush"])
def test_answered_sends_acks_and_receipts_survive_a_kill(tmp_path: Path, options: list[str]) -> None:
    command = [tmp_path / "mq", "--listen", "127.0.0.1:0", *options]
    bodies = [b"%03d" % number for number in range(400)]
    with started(*command) as (server, address), Client(address) as client:
        sends = [client.send(SEND, ORDERS | {"e": number % 4}, body) for number, body in enumerate(bodies)]
        assert {client.answer(send).code for send in sends} == {0}
        first = popped(client.ask(POP, POP_ORDERS | {"pollTime": 20_000}))
        done, held = first[::2], first[1::2]
        assert [client.ask(ACK, settle(message)).code for message in done] == [0] * len(done)
        for number in range(200):  # nobody waits for these
            client.send(SEND, ORDERS | {"e": number % 4}, b"late")
        server.kill()
        server.wait()
    with started(*command) as (_, address), Client(address) as client:
        assert [client.ask(ACK, settle(message)).code for message in held] == [0] * len(held)
        rest: list[bytes] = []
        while (answer := client.ask(POP, POP_ORDERS)).code == 0:
            rest += [message.body for message in popped(answer)]
    assert sorted({*rest} - {b"late"}) == sorted({*bodies} - {message.body for message in first})


# -- looking ----------------------------------------------------------------------------------------------------------


def test_peek_shows_what_the_next_pop_gets(client: Client, store: Store) -> None:
    peek = {"consumerGroup": "billing", "topic": "orders", "queueId": 0, "maxMsgNums": 2}
    assert client.ask(PEEK, peek).code == 26
    for body in (b"a", b"b", b"c"):
        store.put("orders", body, queue_id=0)
    popped(client.ask(POP, POP_ORDERS | {"maxMsgNums": 1, "queueId": 0}))
    for _ in range(2):
        assert [record.body for record in records(client.ask(PEEK, peek).body)] == [b"b", b"c"]
    assert len(store.broker.pending("billing")) == 1
    answer = client.ask(PEEK, peek | {"queueId": 1})
    assert (answer.code, answer.fields["restNum"]) == (19, "0")
    assert client.ask(PEEK, peek | {"topic": "nowhere"}).code == 17


def test_notification_says_that_a_message_has_come(client: Client, store: Store) -> None:
    look = {"consumerGroup": "billing", "topic": "orders", "queueId": -1, "pollTime": 60_000, "bornTime": 0}
    waiting = client.send(NOTIFY, look)
    pop = client.send(POP, POP_ORDERS | {"pollTime": 60_000})
    client.ask(ROUTE, {"topic": "orders"})
    assert not client._answers
    store.put("orders", b"a")
    assert dict(client.answer(waiting).fields) == {"hasMsg": "true", "pollingFull": "false"}
    assert [message.body for message in popped(client.answer(pop))] == [b"a"]  # a notification takes nobody's turn
    store.put("orders", b"b")
    assert client.ask(NOTIFY, look).fields["hasMsg"] == "true"
    assert client.ask(NOTIFY, look | {"topic": "nowhere"}).code == 17


# -- assignments ------------------------------------------------------------------------------------------------------


def assignments(client: Client, client_id: str, **changed: str) -> list[tuple[str, int]] | None:
    body = {"topic": "orders", "consumerGroup": "billing", "clientId": client_id, "strategyName": "AVG"}
    answer = client.ask(QUERY_ASSIGNMENT, body=json.dumps(body | {"messageModel": "CLUSTERING"} | changed).encode())
    assert answer.code == 0
    found = json.loads(answer.body).get("messageQueueAssignments")
    return found if found is None else sorted((each["mode"], each["messageQueue"]["queueId"]) for each in found)


def set_mode(client: Client, mode: str, share: int = 0, topic: str = "orders") -> int:
    body = {"topic": topic, "consumerGroup": "billing", "mode": mode, "popShareQueueNum": share}
    return client.ask(SET_MODE, body=json.dumps(body).encode()).code


@pytest.mark.parametrize(
    ("mode", "share", "members", "first", "second"),
    [
        (None, 0, 2, [("PULL", 0), ("PULL", 1)], [("PULL", 2), ("PULL", 3)]),
        ("PULL", 3, 2, [("PULL", 0), ("PULL", 1)], [("PULL", 2), ("PULL", 3)]),
        ("POP", 0, 2, [("POP", -1)], [("POP", -1)]),
        ("POP", 1, 4, [("POP", 0), ("POP", 1)], [("POP", 1), ("POP", 2)]),
        ("POP", 9, 2, [("POP", q) for q in range(4)], [("POP", q) for q in range(4)]),
        ("POP", 1, 6, [("POP", 0)], [("POP", 1)]),
    ],
)
def test_assignment_follows_the_request_mode(
    client: Client, mode: str | None, share: int, members: int, first: list[Any], second: list[Any]
) -> None:
    for number in range(members):
        client.heartbeat(f"c{number}")
    if mode is not None:
        assert set_mode(client, mode, share) == 0
    assert [assignments(client, "c0"), assignments(client, "c1")] == [first, second]


def test_assignments_without_members_topic_or_strategy(client: Client) -> None:
    assert assignments(client, "c0") is None
    client.heartbeat("c0")
    assert assignments(client, "c0", topic="nowhere") is None
    assert assignments(client, "c0", strategyName="MINE") is None
    assert assignments(client, "stranger") == []
    assert assignments(client, "c0", strategyName="AVG_BY_CIRCLE") == [("PULL", queue) for queue in range(4)]
    assert assignments(client, "any", messageModel="BROADCASTING") == [("PULL", queue) for queue in range(4)]
    assert client.ask(QUERY_ASSIGNMENT, body=b'{"topic": 5}').code == 29


def test_request_modes_are_kept_in_rocketmq_s_file(client: Client, store: Store) -> None:
    assert set_mode(client, "POP", 2) == 0
    assert set_mode(client, "POP", topic="%RETRY%billing") == 16
    assert set_mode(client, "OTHER") == 29
    assert set_mode(client, "POP", -1) == 29
    file = store.path / "config" / "messageRequestMode.json"
    entry = {"topic": "orders", "consumerGroup": "billing", "mode": "POP", "popShareQueueNum": 2}
    assert json.loads(file.read_text()) == {"messageRequestModeMap": {"orders": {"billing": entry}}}
    with serving(store, unix=store.path / "other.sock") as address, Client(address) as other:  # loaded again
        for member in ("c0", "c1"):
            other.heartbeat(member)
        assert assignments(other, "c0") == [("POP", queue) for queue in range(4)]


def test_damaged_request_modes_are_reported(store: Store) -> None:
    file = store.path / "config" / "messageRequestMode.json"
    file.write_text('{"messageRequestModeMap": {"orders": {"billing": {"mode": 5}}}}')
    with pytest.raises(mqstore.errors.CorruptStoreError):
        Server(store.broker)
