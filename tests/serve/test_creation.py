"""Topics and groups that requests create by naming them: in a thread, in order (remoting-server, 3, 6 and 7)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import mqstore
from mqstore import Store
from mqstore.broker.tables.configfile import ConfigFile
from tests.serve.support import ORDERS, PULL, PULL_ORDERS, ROUTE, SEND, Client, serving


@pytest.fixture
def store(mq_store: Store) -> Store:
    """Without a topic."""
    return mq_store


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that write tables."""
    names: list[str] = []
    save = ConfigFile.save

    def noted(self: ConfigFile, *args: Any, **options: Any) -> None:
        names.append(threading.current_thread().name)
        save(self, *args, **options)

    monkeypatch.setattr(ConfigFile, "save", noted)
    return names


RETRY = ORDERS | {"b": "%RETRY%g1", "j": 1, "l": 16}
POP = {
    "consumerGroup": "g1",
    "topic": "orders",
    "queueId": -1,
    "maxMsgNums": 1,
    "invisibleTime": 60_000,
} | dict.fromkeys(("pollTime", "bornTime", "initMode"), 0)
REQUESTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "a send": (SEND, ORDERS | {"b": "t1"}, "t1"),
    "a batch": (320, ORDERS | {"b": "t1", "m": "true"}, "t1"),
    "a delayed send": (SEND, ORDERS | {"b": "t1", "i": "DELAY\x011\x02"}, "t1"),
    "a timed send": (SEND, ORDERS | {"b": "t1", "i": "TIMER_DELAY_SEC\x01600\x02"}, "rmq_sys_wheel_timer"),
    "a retry": (SEND, RETRY | {"i": "DELAY\x011\x02"}, "%RETRY%g1"),
    "a dead letter": (SEND, RETRY | {"j": 17}, "%DLQ%g1"),
    "a route": (ROUTE, {"topic": "%RETRY%g1"}, "%RETRY%g1"),
    "a pull": (PULL, PULL_ORDERS | {"consumerGroup": "g1"}, "g1"),
    "a commit": (15, {"consumerGroup": "g1", "topic": "orders", "queueId": 0, "commitOffset": 0}, "g1"),
    "a pop": (200050, POP, "g1"),
}


@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=list(REQUESTS))
def test_new_topics_are_not_written_in_the_loop(
    store: Store, threads: list[str], request_of: tuple[int, dict[str, Any], str]
) -> None:
    store.create_topic("orders")
    store.put("orders", b"hello", queue_id=0)
    code, fields, name = request_of
    body = b"\0\0\0\x17" + bytes(12) + b"\0\0\0\x01x" + b"\0\0" if code == 320 else b"x"
    with serving(store) as address, Client(address) as client:
        threads.clear()
        assert client.ask(code, fields, body).code in (0, 19)
        assert "mqstore-serve_0" in threads
        assert "mqstore-serve" not in threads  # the loop's
    assert name in (*store.topics(system=True), *store.broker.groups.names())


def test_heartbeat_creates_its_groups_in_a_thread(store: Store, threads: list[str]) -> None:
    with serving(store) as address, Client(address) as client:
        threads.clear()
        assert client.heartbeat("c1").code == 0
        assert set(threads) == {"mqstore-serve_0"}
    assert store.broker.groups.get("billing") is not None
    assert store.broker.topics.get("%RETRY%billing") is not None


def test_sends_stay_in_order_while_their_topic_is_created(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that finds the new topic must not overtake the one that has created it."""
    created, done = threading.Event(), threading.Event()
    create = store.broker.topics.create

    def slowly(*args: Any, **options: Any) -> Any:
        config = create(*args, **options)
        created.set()
        done.wait(20)
        return config

    monkeypatch.setattr(store.broker.topics, "create", slowly)
    with serving(store) as address, Client(address, binary=True) as client:
        sends = [client.send(SEND, ORDERS, b"0")]
        assert created.wait(20)
        sends += [client.send(SEND, ORDERS, str(number).encode()) for number in range(1, 20)]
        assert client.ask(ROUTE, {"topic": "orders"}).code == 0  # handled after them
        done.set()
        assert {client.answer(send).code for send in sends} == {0}
    assert [message.body for message in store.iter("orders", 0)] == [str(number).encode() for number in range(20)]


def test_names_of_own_clients_are_not_written_in_the_loop(store: Store, threads: list[str]) -> None:
    store.create_topic("orders")
    with serving(store) as (host, port), mqstore.connect(f"{host}:{port}") as client:
        threads.clear()
        client.put("t1", b"short")
        client.put("t2", b"long", properties={"a": "b"})
        client.put_many("t3", [b"many"])
        client.put("orders", b"later", delay=600)
        client.broker.commit("g1", "orders", 0, 0)
        assert client.broker.pop("g2", "orders", 1) == []
        with pytest.raises(mqstore.errors.InvalidMessageError):
            client.put("a b", b"")
        assert "mqstore-serve" not in threads  # the loop's
    assert {"orders", "t1", "t2", "t3"} <= set(store.topics())
    assert {"g1", "g2"} <= set(store.broker.groups.names())
