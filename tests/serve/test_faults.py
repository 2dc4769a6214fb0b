"""Clients that send anything, vanish, read nothing, have another clock or version, and full disks (remoting-server,
sections 14.3, 15.1 and 21). `make serve-faults N=100000` sends that many frames."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mqstore
from mqstore import Store
from mqstore.broker.tables.members import Mode
from mqstore.clock import SystemClock
from mqstore.errors import ConfigError, MQStoreError, QueueEmpty, ReceiptExpiredError, StoreFullError
from mqstore.remote import line as client_side
from mqstore.remoting.calls import BY_CODE, CALLS, error_of
from mqstore.remoting.codes import Code
from mqstore.remoting.frames import Frame, encode
from mqstore.serve import Limits, Server
from tests.children import in_child
from tests.serve.support import ORDERS, PULL, PULL_ORDERS, ROUTE, SEND, Client, resident_bytes, serving, started
from tests.smalldisk import small_disk
from tests.waiting import until

FRAMES = int(os.environ.get("MQSTORE_CAMPAIGN_FRAMES", "3000"))
"""Number of random frames (`make serve-faults`)."""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """Servers that a test starts."""
    found: list[Server] = []
    init = Server.__init__
    monkeypatch.setattr(Server, "__init__", lambda self, *args, **kw: (found.append(self), init(self, *args, **kw))[1])
    return found


def kept(server: Server) -> list[object]:
    """Return what the server keeps of its clients."""
    tables = (server.connections, server.parked, server.syncing, server._unheard, server.own._sessions)
    return [each for each in (*tables, server.registry.clients, server.broker.members.groups()) if each]


# -- random frames ----------------------------------------------------------------------------------------------------

NUMBERS = [0, 1, -1, 2, 32, 1000, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 10**40, 0.5, 1e308, True]
TEXTS = ["", "orders", "billing", "nobody", "\0", "%RETRY%billing", "%DLQ%billing", "SCHEDULE_TOPIC_XXXX", "x" * 300]
TEXTS += ["\ud800", "../../x", "a b", "SQL92", "a >", "flush", "latest", "inf", "nan", "0 1 60000 0 0 mqstore 0 0"]
FIELDS = ORDERS | PULL_ORDERS | {"pollTime": 5, "group": "billing", "clientID": "c", "clientId": "c", "key": "k"}
FIELDS |= {"groupName": "billing", "invisibleTime": 1000, "perm": 6, "readQueueNums": 4, "writeQueueNums": 4}
FIELDS |= {"extraInfo": "0 1 60000 0 0 mqstore 0 0", "producerGroup": "p", "commitOrRollback": 8, "cluster": "x"}
QUEUE = {"topic": "orders", "brokerName": "mqstore", "queueId": 0}
BODIES: list[Any] = [
    {"clientID": "c", "producerDataSet": [{"groupName": "p"}], "consumerDataSet": [{"groupName": "billing"}]},
    {"consumerGroup": "billing", "clientId": "c", "mqSet": [QUEUE]},
    {"clientId": "c", "group": "billing", "subscriptionData": {"topic": "orders", "subString": "a", "x": "SQL92"}},
    {"topic": "orders", "consumerGroup": "billing", "clientId": "c", "messageModel": "CLUSTERING", "mode": "POP"},
    {
        "brokerName": "m",
        "acks": [{"c": "g", "t": "t", "r": "0", "so": 0, "q": 0, "rq": 0, "pt": 0, "it": 1, "b": "AQ=="}],
    },
    {"groupName": "billing", "retryMaxTimes": 3, "topicConfigList": [{"topicName": "t2", "perm": 6}]},
]
SNAPSHOT = CALLS["log.snapshot"].code
"""A request that writes where it says is not sent at random."""


def recorded(store: Store) -> list[Frame]:
    """Return the requests of a client that uses everything."""
    frames: dict[tuple[int, bool], Frame] = {}

    def note(frame: Frame, *rest: Any) -> bytes:
        frames.setdefault((frame.code, bool(frame.fields)), frame)
        return encode(frame, *rest)

    with (
        mock.patch.object(client_side, "encode", note),
        serving(store) as there,
        mqstore.connect("{}:{}".format(*there)) as remote,
    ):
        with remote.queue("jobs") as jobs:
            jobs.put_many([b"1", b"2", b"3", b"4"])
            jobs.put(b"5", delay=100)
            jobs.get().nack()
            jobs.get().reject()
            jobs.get_many(2, timeout=1)
            list(jobs.dead_letters.select())
            jobs.dead_letters.replay()
        with remote.producer("p", checker=lambda message: True) as producer, producer.transaction() as transaction:
            transaction.send("orders", b"half")
        remote.put("orders", b"6", queue_id=0, properties={"a": "1"}, keys="k", unique_key="u", message_group=None)
        remote.broker.recall(remote.put("orders", b"7", delay=100).recall_handle or "")
        seen = []
        consumer = remote.push_consumer("billing", ordered=True)
        consumer.subscribe("orders", seen.append)
        with consumer:
            until(lambda: len(seen) == 2)
        with remote.pull_consumer("pulls") as pulls:
            pulls.subscribe("orders")
            pulls.poll(timeout=1)
            pulls.commit(durability="flush")
        with remote.simple_consumer("simple", {"orders": "a || b"}) as simple:
            simple.receive(wait=0.01)
            simple.pending()
        list(remote.iter("orders"))
        remote.find("orders", key="k"), remote.stats(), remote.lag("billing"), remote.topics(), remote.flush()
    return list(frames.values())


class Noise:
    """Random frames: of RocketMQ's requests, of calls of mqstore's client, of neither."""

    def __init__(self, good: list[Frame], chance: random.Random) -> None:
        self._good, self._chance = good, chance

    def junk(self, depth: int = 0) -> Any:
        kind = self._chance.random()
        if kind < 0.8 or depth > 3:
            return self._chance.choice([*NUMBERS, *TEXTS, None])
        items = [self.junk(depth + 1) for _ in range(self._chance.randrange(4))]
        return items if kind < 0.95 else {str(item): item for item in items}

    def changed(self, value: Any) -> Any:
        """Return a JSON value with one change in it."""
        if not isinstance(value, dict | list) or not value or self._chance.random() < 0.1:
            return self.junk()
        items: Any = value.copy()
        key = self._chance.choice(list(items) if isinstance(items, dict) else range(len(items)))
        if self._chance.random() < 0.1:
            del items[key]
        else:
            items[key] = self.changed(items[key])
        return items

    def own(self) -> tuple[int, dict[str, Any], bytes]:
        frame = self._chance.choice(self._good)
        fields, body = dict(frame.fields), frame.body
        if fields:
            fields = self.changed(fields)
        elif body:
            end = 4 + int.from_bytes(body[:4], "big")
            text = json.dumps(self.changed(json.loads(body[4:end]))).encode()
            body = len(text).to_bytes(4, "big") + text + body[end:]
        return frame.code, fields if isinstance(fields, dict) else {}, body

    def rocketmq(self) -> tuple[int, dict[str, Any], bytes]:
        code = self._chance.choice(list(Code))
        fields = {field.name: FIELDS.get(field.name, "1") for field in code.fields}
        if fields and self._chance.random() < 0.7:
            fields = self.changed(fields)
        body = self._chance.choice([*BODIES, "", 7])
        return code, fields if isinstance(fields, dict) else {}, json.dumps(self.changed(body)).encode()

    def frame(self, number: int) -> bytes:
        """Return the bytes of one frame, seldom damaged."""
        code, fields, body = self._chance.choice([self.own, self.rocketmq])()
        if self._chance.random() < 0.02:
            code = self._chance.choice([self._chance.randrange(-(2**15), 2**15), 31_000 + self._chance.randrange(100)])
        code = 0 if code == SNAPSHOT else code
        texts = {name: str(value) for name, value in fields.items()}
        flag = self._chance.choice([0] * 20 + [1, 2, 3])
        if abs(code) < 2**15 and self._chance.random() < 0.5:
            texts = {each.encode(errors="replace").decode(): of for each, of in texts.items()}
            damaged = bytearray(encode(Frame(code, texts, body, opaque=number, flag=flag, binary=True)))
        else:
            header = json.dumps({"code": code, "opaque": number, "flag": flag, "extFields": texts}).encode()
            damaged = bytearray(struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body)
        if self._chance.random() < 0.002:
            damaged[self._chance.randrange(len(damaged))] ^= 1 << self._chance.randrange(8)
        return bytes(damaged)


@pytest.mark.timeout(120 + FRAMES // 50)
def test_random_frames_harm_nobody(
    store: Store,
    servers: list[Server],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    chance = random.Random(FRAMES)
    noise = Noise(recorded(store), chance)
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.ERROR)
    hello = CALLS["session.hello"]
    begin_bytes = 0
    with serving(store) as there, Client(there) as other:
        for start in range(1 << 20, FRAMES + (1 << 20), 320):
            with Client(there) as client:
                if chance.random() < 0.8:
                    client.ask(hello.code, body=hello.request({"protocol": 1, "client": f"c{chance.randrange(3)}"}))
                with suppress(OSError, MQStoreError):
                    for first in range(start, start + 320, 32):
                        client.socket.sendall(b"".join(noise.frame(first + each) for each in range(32)))
                        client.ask(ROUTE, {"topic": "TBW102"})
                        client.notices.clear()
                        client._answers.clear()
            assert other.ask(ROUTE, {"topic": "TBW102"}).code == 0
            begin_bytes = begin_bytes or resident_bytes()
        assert resident_bytes() - begin_bytes < 64 << 20
        assert not [record.getMessage() for record in caplog.records if record.exc_info], caplog.text
        other.socket.close()
        until(lambda: not kept(servers[-1]))
        with Client(there) as client:
            assert client.ask(SEND, ORDERS | {"b": "after"}, b"hello").code == 0
    assert not list(store.verify())


def test_half_of_a_surrogate_pair_harms_nobody(store: Store) -> None:
    """One producer group with such a name failed every list of producers."""
    body = json.dumps({"clientID": "c", "producerDataSet": [{"groupName": "\ud800"}]}).encode()
    with serving(store) as there, Client(there) as client:
        assert client.ask(34, body=body).code == 0
        assert b'"?"' in client.ask(Code.GET_ALL_PRODUCER_INFO).body


# -- clients that vanish, or do not read ------------------------------------------------------------------------------


def test_client_that_reads_a_byte_at_a_time_is_disconnected(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put("orders", bytes(1 << 20), queue_id=0)
    texts = {name: str(value) for name, value in PULL_ORDERS.items()}
    with serving(store, limits=Limits(stalled_s=0.3)) as there, Client(there) as slow, Client(there) as other:
        slow.socket.sendall(encode(Frame(PULL, texts, binary=True)) * 64)
        with pytest.raises(ConnectionError):  # noqa: PT012
            while True:
                slow.socket.recv(1)
                slow.socket.sendall(b"\0")
                assert other.ask(ROUTE, {"topic": "orders"}).code == 0
                time.sleep(0.02)
    assert "it reads no answers" in caplog.text


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the system's own time for it is hours")
def test_system_looks_for_clients_that_vanished(store: Store, servers: list[Server]) -> None:
    """A machine without power sends no FIN, and its waiting calls would stay."""
    with serving(store) as there, Client(there) as client:
        client.ask(ROUTE, {"topic": "orders"})
        with socket.socket(fileno=os.dup(servers[0].descriptors()[-1])) as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_two_thousand_waiting_calls_hold_up_nobody(store: Store, servers: list[Server]) -> None:
    wait = PULL_ORDERS | {"sysFlag": 6, "suspendTimeoutMillis": 600_000}
    pop = PULL_ORDERS | {"maxMsgNums": 1, "invisibleTime": 60_000, "pollTime": 600_000, "initMode": 0}
    store.create_topic("jobs", queues=1)
    for group in ("billing", "workers"):
        store.broker.groups.create(group)
    with serving(store) as there, ExitStack() as stack:
        clients = [stack.enter_context(Client(there)) for _ in range(20)]
        now = {"bornTime": round(time.time() * 1000), "topic": "jobs", "consumerGroup": "workers"}
        pulls = [(client, client.send(PULL, wait)) for client in clients for _ in range(50)]
        pops = [(client, client.send(200_050, pop | now)) for client in clients for _ in range(50)]
        until(lambda: servers[0].parked == 2_000)
        with Client(there) as other:
            for number in range(200):
                assert other.ask(SEND, ORDERS | {"b": "apart"}, b"%d" % number).code == 0
        store.put("orders", b"hello", queue_id=0)
        assert {client.answer(pull).code for client, pull in pulls} == {0}
        store.put_many("jobs", [b"%d" % number for number in range(1_000)])
        assert len({client.answer(each).fields["msgOffsetInfo"] for client, each in pops}) == 1_000
        stack.close()
        until(lambda: not kept(servers[0]))


def test_member_goes_with_its_connection_whatever_that_says(store: Store, servers: list[Server]) -> None:
    """Another hello, or the end of a membership of another owner, made it stay for ever."""
    hello, register, unregister = (CALLS[name] for name in ("session.hello", "members.register", "members.unregister"))
    member = {"client_id": "c", "group": "billing", "subscriptions": {"orders": ("TAG", "*")}, "owner": "us"}
    member["mode"] = Mode("queue", False, False, "avg")
    foreign = {"client_id": "c", "group": "billing", "owner": "others"}
    with serving(store) as there:
        for last in (hello.request({"protocol": 1, "client": "b"}), unregister.request(foreign)):
            with Client(there) as client:
                client.ask(hello.code, body=hello.request({"protocol": 1, "client": "a"}))
                assert client.ask(register.code, body=register.request(member)).code == 0
                assert store.broker.members.members("billing") == ["c"]
                assert client.ask(unregister.code if b"others" in last else hello.code, body=last).code == 0
            until(lambda: not kept(servers[0]))


# -- another version --------------------------------------------------------------------------------------------------


def test_client_of_another_version_is_answered(store: Store) -> None:
    def body(values: object) -> bytes:
        text = json.dumps(values).encode()
        return len(text).to_bytes(4, "big") + text

    store.put("orders", b"hello", queue_id=0)
    read = CALLS["log.get"]
    few = {"topic": "orders", "queue_id": 0, "offset": 0}
    unknown = max(set(range(31_000, 31_098)) - BY_CODE.keys())
    with serving(store) as there, Client(there) as client:
        refused = client.ask(31_000, body=body({"protocol": 99, "client": "c"}))
        with pytest.raises(ConfigError, match=r"speaks number 1 .* the client 99: install the same version"):
            raise error_of(refused.code, refused.remark, refused.body)
        assert client.ask(31_000, {"later": "x"}, body({"protocol": 1, "client": "c"})).code == 0
        assert read.result(client.ask(read.code, body=body(few)).body).messages[0].body == b"hello"
        newer = client.ask(read.code, body=body(few | {"shape": "round"}))
        with pytest.raises(ConfigError, match="no argument 'shape'; this server may be older than its client"):
            raise error_of(newer.code, newer.remark, newer.body)
        assert client.ask(unknown, body=body({})).code == 3
        assert client.ask(SEND, ORDERS | {"zz": "later"}, b"hello").code == 0


# -- clocks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def skew(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Hours by which the clock of this process, and of its children, is wrong."""
    hours = [0]
    monkeypatch.setattr(SystemClock, "now_ms", lambda self: time.time_ns() // 1_000_000 + hours[0] * 3_600_000)
    return hours


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_clock_of_the_server_decides(tmp_path: Path, skew: list[int], hours: int) -> None:
    def work() -> None:
        skew[0] = hours
        with mqstore.connect(tmp_path / "mq") as remote, remote.queue("jobs") as jobs:
            jobs.put(b"now")
            jobs.put(b"later", delay=1.5)
            with jobs.get(timeout=10) as task:
                assert task.value == b"now"
                with pytest.raises(QueueEmpty):
                    jobs.get(timeout=0.1)  # neither the leased item nor the delayed one
                task.extend(30)
            assert not jobs.join(timeout=0.1)
            with jobs.get(timeout=20) as task:
                assert task.value == b"later"
            assert jobs.join(timeout=20)

    with started(tmp_path / "mq", "--listen", "127.0.0.1:0"):
        assert in_child(work) == 0


@pytest.mark.parametrize("hours", [-1, 1])
def test_clock_that_jumps_loses_nothing(store: Store, skew: list[int], hours: int) -> None:
    with serving(store) as there, mqstore.connect("{}:{}".format(*there)) as remote:
        consumer = remote.push_consumer("billing", mode="pop")
        found: list[bytes] = []
        consumer.subscribe("orders", lambda message: found.append(message.body))
        with consumer, remote.queue("jobs", visibility=1) as jobs:
            jobs.put_many([b"%d" % number for number in range(20)])
            taken = jobs.get_many(10, timeout=10)
            remote.put("orders", b"before")
            skew[0] = hours
            remote.put("orders", b"after")
            done = set()
            for task in taken:  # whose leases the jump may have ended
                with suppress(ReceiptExpiredError):
                    task.ack()
                    done.add(task.value)
            until(lambda: {b"before", b"after"} <= set(found))
            skew[0] = 0
            while len(done) < 20:
                with jobs.get(timeout=30) as task:
                    assert task.value not in done
                    done.add(task.value)


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_full_disk_is_an_error_of_the_call_and_ends(tmp_path: Path) -> None:
    config = mqstore.StoreConfig(segment_bytes=1 << 20)
    with small_disk(tmp_path / "disk", 24 << 20) as disk, mqstore.open(disk / "mq", config=config) as store:
        with (
            serving(store) as there,
            mqstore.connect("{}:{}".format(*there)) as remote,
            Client(there) as client,
            remote.queue("jobs") as jobs,
            remote.producer("p") as producer,
        ):
            jobs.put(b"first")
            remote.put("orders", b"first", queue_id=0)
            filler = disk / "filler"
            filler.write_bytes(b"")
            with suppress(OSError), filler.open("ab") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            puts = [
                lambda: remote.put("orders", bytes(1 << 18), queue_id=0),
                lambda: remote.broker.put_async("orders", bytes(1 << 18)).result(20),
                lambda: remote.put_many("orders", [bytes(1 << 18)] * 4),
                lambda: jobs.put(bytes(1 << 18)),
                lambda: producer.send("orders", bytes(1 << 18)),
            ]
            for put in puts:
                with pytest.raises(StoreFullError):  # noqa: PT012
                    for _ in range(100):
                        put()
            assert 14 in {client.ask(SEND, ORDERS, bytes(1 << 18)).code for _ in range(8)}
            assert remote.read("orders", 0, 0)[0].body == b"first"
            filler.unlink()
            for put in puts:
                put()
            assert client.ask(SEND, ORDERS, bytes(1 << 18)).code == 0
            with jobs.get(timeout=10) as task:
                assert task.value == b"first"
        assert not list(store.verify())
