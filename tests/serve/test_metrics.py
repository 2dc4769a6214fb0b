"""What a server says of itself: Prometheus' text, one line a client, the loop's lag (remoting-server, 14 and 21)."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
import urllib.error
import urllib.request

import pytest

from mqstore import Store
from tests.serve.support import HEART_BEAT, ORDERS, PULL, PULL_ORDERS, SEND, Client, serving


@pytest.fixture
def metrics() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
    return host, port


def samples(address: tuple[str, int]) -> dict[str, str]:
    with urllib.request.urlopen("http://{}:{}/metrics".format(*address), timeout=20) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_prometheus_sees_the_server_and_its_store(store: Store, metrics: tuple[str, int]) -> None:
    with serving(store, metrics=metrics) as address, Client(address) as client, Client(address) as other:
        client.heartbeat("c1")
        for _ in range(3):
            client.ask(SEND, ORDERS, b"hello")
        client.ask(SEND, ORDERS | {"e": 99})
        client.ask(9999)
        client.send(PULL, PULL_ORDERS | {"queueId": 1, "sysFlag": 6, "suspendTimeoutMillis": 60_000})
        other.ask(106)
        found = samples(metrics)
    of_server = {name: value for name, value in found.items() if "_server_" in name and "lag" not in name}
    assert of_server == {
        "mqstore_server_connections": "2",
        "mqstore_server_clients": "1",
        "mqstore_server_waiting_calls": "1",
        'mqstore_server_requests_total{code="11"}': "1",
        'mqstore_server_requests_total{code="34"}': "1",
        'mqstore_server_requests_total{code="106"}': "1",
        'mqstore_server_requests_total{code="310"}': "4",
        'mqstore_server_answers_total{code="0"}': "5",
        'mqstore_server_answers_total{code="3"}': "1",
        'mqstore_server_answers_total{code="29"}': "1",
        "mqstore_server_refused_total": "0",
    }
    assert [value for name, value in found.items() if name.startswith("rocketmq_messages_in_total")] == ["3"]


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 "),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 "),
        (b"\r\n\r\n", b"HTTP/1.1 405 "),
        (b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 "),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", b""),
    ],
)
def test_other_requests_for_metrics_are_refused(
    store: Store, metrics: tuple[str, int], request_bytes: bytes, answer: bytes
) -> None:
    with serving(store, metrics=metrics), socket.create_connection(metrics, timeout=20) as client:
        client.sendall(request_bytes)
        try:
            found = client.recv(13)
        except ConnectionError:
            found = b""
    assert found == answer


def test_one_line_says_that_a_client_comes_and_one_that_it_goes(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mqstore")
    with serving(store) as address:
        with Client(address) as client:
            for _ in range(3):
                client.heartbeat("10.0.0.1@7")
                producer = {"clientID": "10.0.0.1@7", "producerDataSet": [{"groupName": "shop"}]}
                client.ask(HEART_BEAT, body=json.dumps(producer).encode())
                client.ask(SEND, ORDERS, b"hello")
            peer = "{}:{}".format(*client.socket.getsockname())
        with Client(address) as other:
            while "has gone" not in caplog.text:
                other.ask(106)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines == [
        f"client 10.0.0.1@7 has come: PYTHON 479, from {peer}, groups billing",
        f"client 10.0.0.1@7 has gone: PYTHON 479, from {peer}, groups billing, shop",
    ]


def test_late_loop_is_logged(
    store: Store, metrics: tuple[str, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store.broker, "committed", lambda *_: time.sleep(1.5))
    with serving(store, metrics=metrics) as address, Client(address) as client:
        client.ask(14, {"consumerGroup": "billing", "topic": "orders", "queueId": 0})
        while "late to its clients" not in caplog.text:
            client.ask(106)
        assert int(samples(metrics)["mqstore_server_loop_lag_milliseconds"]) > 100
    [late] = re.findall(r"the server came (\d+) ms late", caplog.text)
    assert int(late) > 100
