"""What clients can make a server hold is limited, and nobody else is served worse (remoting-server, section 14.3)."""

from __future__ import annotations

import gc
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest

import mqstore
from mqstore import Store, StoreConfig
from mqstore.files.filesystem import FileSystem
from mqstore.remoting.frames import Frame, encode
from mqstore.serve import Limits, listening
from tests.serve.support import ORDERS, PULL, PULL_ORDERS, ROUTE, SEND, Client, resident_bytes, serving
from tests.waiting import is_readable


@pytest.mark.skipif(not resident_bytes(), reason="resident memory is read from /proc")
def test_client_that_reads_no_answers_fills_no_memory(store: Store) -> None:
    """One received block can hold a thousand requests. It is not enough to receive no more."""
    store.put("orders", bytes(1 << 18), queue_id=0)
    texts = {name: str(value) for name, value in PULL_ORDERS.items()}
    pulls = range(100, 700)
    block = b"".join(encode(Frame(PULL, texts, opaque=pull, binary=True)) for pull in pulls)  # 150 MiB of answers
    with serving(store) as address, Client(address) as slow, Client(address) as other:
        slow.ask(PULL, PULL_ORDERS)
        before = resident_bytes()
        slow.socket.sendall(block)
        for _ in range(20):
            assert other.ask(ROUTE, {"topic": "orders"}).code == 0
            time.sleep(0.01)
        assert resident_bytes() - before < 40 << 20
        assert {len(slow.answer(pull).body) > 1 << 18 for pull in pulls} == {True}


def test_requests_of_a_client_that_reads_no_answers_are_not_received(store: Store) -> None:
    store.put("orders", bytes(1 << 18), queue_id=0)
    texts = {name: str(value) for name, value in PULL_ORDERS.items()}
    block = encode(Frame(PULL, texts, binary=True)) * 4000
    with serving(store) as address, Client(address) as slow, Client(address) as other:
        slow.socket.settimeout(1)
        sent = 0
        with suppress(TimeoutError):
            while sent < 64 << 20:
                sent += slow.socket.send(block)
        assert sent < 64 << 20  # the sockets' own buffers are a few MiB
        assert other.ask(ROUTE, {"topic": "orders"}).code == 0


@contextmanager
def stopped_loop(store: Store, monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]) -> Iterator[None]:
    """Keep the server's loop in one request meanwhile."""
    begun, done = threading.Event(), threading.Event()

    def committed(*_: object) -> int:
        begun.set()
        done.wait(20)
        return 0

    monkeypatch.setattr(store.broker, "committed", committed)
    with Client(address) as client:
        request = client.send(14, {"consumerGroup": "billing", "topic": "orders", "queueId": 0})
        assert begun.wait(20)
        try:
            yield
        finally:
            done.set()
            client.answer(request)


def test_client_with_many_requests_lets_others_have_their_turn(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: str(value) for name, value in ORDERS.items()}
    block = encode(Frame(SEND, texts, b"many", flag=2, binary=True)) * 700
    with serving(store) as address, Client(address) as many, Client(address) as one:
        for client in (many, one):
            client.ask(ROUTE, {"topic": "orders"})
        with stopped_loop(store, monkeypatch, address):
            many.socket.sendall(block)
            send = one.send(SEND, ORDERS, b"one")
        assert int(one.answer(send).fields["queueOffset"]) <= 257
        many.ask(ROUTE, {"topic": "orders"})
    assert len(list(store.iter("orders"))) == 701


def test_requests_are_received_no_faster_than_handled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client whose requests take long, or many of them, would fill the memory."""
    monkeypatch.setattr(store.broker, "committed", lambda *_: time.sleep(0.003))
    fields = {"consumerGroup": "billing", "topic": "orders", "queueId": "0"}
    block = memoryview(encode(Frame(14, fields, flag=2)) * 4000)
    with serving(store) as address, Client(address) as busy, Client(address) as other:
        busy.socket.settimeout(1)  # nothing can be sent for so long when the buffers are full
        sent, until_s = 0, time.monotonic() + 4
        with suppress(TimeoutError):
            while sent < 12 << 20 and time.monotonic() < until_s:
                sent += busy.socket.send(block[sent % len(block) :])
        assert sent < 12 << 20  # of which the sockets' own buffers have a few MiB
        assert other.ask(ROUTE, {"topic": "orders"}).code == 0


def test_calls_that_wait_for_the_disk_above_the_limit_are_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    monkeypatch.setattr(store.broker, "send_back", lambda *_, **__: done.wait(20))
    back = {"offset": 0, "group": "billing", "delayLevel": 1}
    with serving(store, limits=Limits(syncs=2)) as address, Client(address) as client, Client(address) as other:
        waiting = [client.send(36, back) for _ in range(2)]
        assert client.ask(36, back).code == 2
        assert other.ask(SEND, ORDERS).code == 2
        assert other.ask(PULL, PULL_ORDERS | {"topic": "nowhere"}).code == 2  # the group is new: a file is written
        done.set()
        assert [client.answer(each).code for each in waiting] == [0, 0]
        assert other.ask(SEND, ORDERS).code == 0


def test_topics_and_groups_are_created_at_a_limited_rate(store: Store) -> None:
    with serving(store, limits=Limits(creations=3)) as address, Client(address) as client:
        assert [client.ask(SEND, ORDERS | {"b": f"t{number}"}).code for number in range(5)] == [0, 0, 0, 2, 2]
        assert client.ask(PULL, PULL_ORDERS).code == 2
        assert client.heartbeat("c1").code == 0  # is never refused
        assert client.ask(SEND, ORDERS).code == 0
    assert store.topics() == ["orders", "t0", "t1", "t2"]


@pytest.mark.parametrize(("limits", "limit"), [(Limits(), 1 << 16), (Limits(frame_bytes=4096), 4096)])
def test_frame_above_a_limit_closes_its_connection(store: Store, limits: Limits, limit: int) -> None:
    """The limit of a frame, and that of a header."""
    with serving(store, limits=limits) as address, Client(address) as client:
        assert client.ask(ROUTE, {"topic": "orders", "more": "x" * (limit - 500)}).code == 0
        client.send(ROUTE, {"topic": "orders", "more": "x" * limit})
        with pytest.raises(ConnectionError):
            client.receive()


def test_frame_too_long_by_its_body_is_not_stored(store: Store) -> None:
    with serving(store, limits=Limits(frame_bytes=4096)) as address, Client(address) as client:
        assert client.ask(SEND, ORDERS, bytes(3000)).code == 0
        client.send(SEND, ORDERS, bytes(5000))
        with pytest.raises(ConnectionError):
            client.receive()
    assert len(list(store.iter("orders"))) == 1


def test_body_above_the_limit_of_the_store_is_refused(tmp_path: Path) -> None:
    with (
        mqstore.open(tmp_path / "small", config=mqstore.StoreConfig(max_message_size=1000)) as store,
        serving(store) as address,
        Client(address) as client,
    ):
        assert (client.ask(SEND, ORDERS, bytes(1001)).code, client.ask(SEND, ORDERS, bytes(1000)).code) == (13, 0)


@pytest.mark.parametrize(("connections", "descriptors"), [(2, 1 << 20), (10_000, 66)])
def test_connections_above_the_limit_wait_until_one_is_closed(
    store: Store, monkeypatch: pytest.MonkeyPatch, connections: int, descriptors: int
) -> None:
    monkeypatch.setattr(listening, "free_descriptors", lambda: descriptors)  # 64 are left to the store
    with serving(store, limits=Limits(connections=connections)) as address, Client(address) as first:
        with Client(address) as second:
            assert {each.ask(ROUTE, {"topic": "orders"}).code for each in (first, second)} == {0}
            third = Client(address)
            waiting = third.send(ROUTE, {"topic": "orders"})
            assert first.ask(ROUTE, {"topic": "orders"}).code == 0
            assert not is_readable(third.socket, 0.1)
        with third:
            assert third.answer(waiting).code == 0


@pytest.mark.parametrize("limits", [Limits(parked_by_connection=3), Limits(parked=3)])
def test_pulls_above_the_limit_are_answered_late_instead_of_waiting(
    store: Store, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer at once would make a Java client pull again at once."""
    monkeypatch.setattr("mqstore.serve.requests.pull._NO_WAIT_MS", 200)
    wait = PULL_ORDERS | {"sysFlag": 6, "suspendTimeoutMillis": 60_000}
    store.broker.groups.create("billing")
    with serving(store, limits=limits) as address, Client(address) as client:
        waiting = [client.send(PULL, wait) for _ in range(3)]
        begin = time.monotonic()
        assert client.ask(PULL, wait).code == 19
        assert time.monotonic() - begin > 0.15
        store.put("orders", b"here", queue_id=0)
        assert [client.answer(pull).code for pull in waiting] == [0, 0, 0]


def test_clients_groups_and_topics_above_the_limit_are_ignored(store: Store) -> None:
    limits = Limits(clients=2, groups=1, subscriptions=1)
    with serving(store, limits=limits) as address, Client(address) as client:
        for number in range(4):
            client.heartbeat(f"c{number}")
        assert client.ask(38, {"consumerGroup": "billing"}).body == b'{"consumerIdList":["c0","c1"]}'
        client.heartbeat("c0", group="other")
        client.heartbeat("c1", orders="*", payments="*")
        assert client.ask(38, {"consumerGroup": "other"}).code == 1


def test_client_that_leaves_ends_its_waiting_pulls(store: Store) -> None:
    wait = PULL_ORDERS | {"sysFlag": 6, "suspendTimeoutMillis": 60_000}
    with serving(store, limits=Limits(parked=2)) as address:
        for _ in range(3):
            with Client(address) as client:
                for _ in range(2):
                    client.send(PULL, wait)
                client.ask(ROUTE, {"topic": "orders"})
        with Client(address) as client:
            waiting = [client.send(PULL, wait) for _ in range(2)]
            client.ask(ROUTE, {"topic": "orders"})
            store.put("orders", b"here", queue_id=0)
            assert [client.answer(pull).code for pull in waiting] == [0, 0]


def test_stopping_server_answers_sends_that_wait_for_the_disk(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "flushed", durability="flush") as store:
        with serving(store) as address:
            client = Client(address)
            sends = [client.send(SEND, ORDERS, bytes(10)) for _ in range(200)]
            codes = [client.answer(sends[0]).code]
        with client, suppress(ConnectionError):  # requests that it has not read are not answered
            for send in sends[1:]:
                codes.append(client.answer(send).code)
        assert set(codes) <= {0, 1500}  # stored, or refused because the server stops
        assert len(list(store.iter("orders"))) >= codes.count(0) > 0


def test_answers_that_a_client_does_not_read_keep_no_segment_mapped(store: Store) -> None:
    """Retention could not free the disk space of the segment."""

    def views() -> int:
        return sum(isinstance(each, memoryview) and isinstance(each.obj, mmap.mmap) for each in gc.get_objects())

    store.put("orders", bytes(1 << 18), queue_id=0)
    before = views()
    with serving(store) as address, Client(address) as slow, Client(address) as other:
        pulls = [slow.send(PULL, PULL_ORDERS) for _ in range(40)]
        for _ in range(1000):  # an answer that is just being sent has one
            other.ask(ROUTE, {"topic": "orders"})
            if views() == before:
                break
        assert views() == before
        assert {len(slow.answer(pull).body) for pull in pulls} == {len(other.ask(PULL, PULL_ORDERS).body)}


@pytest.mark.parametrize("properties", ["UNIQ_KEY\x01u\x02", "DELAY\x011\x02"])  # stored as it came, and rewritten
def test_send_to_a_full_disk_is_refused(tmp_path: Path, properties: str) -> None:
    config = StoreConfig(segment_bytes=1 << 20)
    with (
        mock.patch.object(FileSystem, "free_bytes", return_value=8 << 20) as free_bytes,
        mqstore.open(tmp_path / "full", config=config) as full,
        serving(full) as address,
        Client(address) as client,
    ):
        sends = {**ORDERS, "i": properties}
        assert client.ask(SEND, sends).code == 0
        free_bytes.return_value = 0
        codes = [client.ask(SEND, sends, bytes(1 << 18)).code for _ in range(20)]
        assert codes == sorted(codes)
        assert set(codes) == {0, 14}
        free_bytes.return_value = 8 << 20
        assert client.ask(SEND, sends, bytes(1 << 18)).code == 0
