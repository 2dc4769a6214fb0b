"""TLS and plain connections at one port (remoting-server, sections 1 and 18).

`localhost.pem` has a key and its certificate for localhost, made for these tests by openssl, valid until 2126.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqstore import Store
from mqstore.errors import ConfigError
from mqstore.remoting.frames import Frame, encode
from mqstore.serve import listening, tls_context
from tests.serve.support import ORDERS, PULL, PULL_ORDERS, ROUTE, SEND, Client, serving, started
from tests.tools.support import mqstore as command

PEM = Path(__file__).parent / "localhost.pem"


@pytest.fixture
def address(store: Store) -> Iterator[tuple[str, int]]:
    with serving(store, tls=tls_context(PEM, PEM)) as address:
        yield address


def secured(address: tuple[str, int]) -> Client:
    context = ssl.create_default_context(cafile=str(PEM))
    plain = socket.create_connection(address, timeout=20)
    return Client(context.wrap_socket(plain, server_hostname="localhost"))


def test_both_kinds_of_connections_are_served_at_one_port(address: tuple[str, int], store: Store) -> None:
    with secured(address) as tls, Client(address) as plain:
        for client in (tls, plain):
            assert client.ask(SEND, ORDERS, bytes(1 << 19)).code == 0
            assert "{}:{}".format(*address).encode() in client.ask(ROUTE, {"topic": "orders"}).body
            end = len(list(store.iter("orders")))
            waits = {"queueOffset": end, "sysFlag": 6, "suspendTimeoutMillis": 60_000}
            pull = client.send(PULL, PULL_ORDERS | waits)
            client.ask(ROUTE, {"topic": "orders"})
            store.put("orders", b"here", queue_id=0)
            assert client.answer(pull).code == 0
        assert len(tls.ask(PULL, PULL_ORDERS).body) == len(plain.ask(PULL, PULL_ORDERS).body) > 1 << 20


def test_answers_of_many_pulls_arrive_over_tls(address: tuple[str, int], store: Store) -> None:
    store.put("orders", bytes(1 << 18), queue_id=0)
    texts = {name: str(value) for name, value in PULL_ORDERS.items()}
    with secured(address) as client:
        client.socket.sendall(b"".join(encode(Frame(PULL, texts, opaque=pull)) for pull in range(100, 200)))
        assert {len(client.answer(pull).body) > 1 << 18 for pull in range(100, 200)} == {True}


@pytest.mark.parametrize("data", [b"\x16" + b"\xff" * 64, bytes.fromhex("16030100050100000103"), b"\xff" * 64])
def test_damaged_handshake_ends_only_its_connection(address: tuple[str, int], data: bytes) -> None:
    with Client(address) as client, secured(address) as other:
        client.socket.sendall(data)
        with pytest.raises(ConnectionError):
            client.receive()
        assert other.ask(ROUTE, {"topic": "orders"}).code == 0


@pytest.mark.parametrize("data", [b"", b"\x16"])
def test_silent_client_is_disconnected(
    address: tuple[str, int], data: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "_GREETING_S", 0.2)
    with Client(address) as client:
        client.socket.sendall(data)
        with pytest.raises(ConnectionError):
            client.receive()
        with secured(address) as other:
            assert other.ask(ROUTE, {"topic": "orders"}).code == 0
    assert "a connection is refused" in caplog.text


def test_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    only = tmp_path / "cert.pem"
    only.write_text(PEM.read_text().partition("-----END PRIVATE KEY-----\n")[2])
    with pytest.raises(ConfigError, match="not a certificate and its key"):
        tls_context(only, only)
    result = command("serve", tmp_path / "mq", "--listen", "127.0.0.1:0", "--tls-cert", only)
    assert (result.exit_code, "not a certificate and its key" in result.stderr) == (2, True)
    result = command("serve", tmp_path / "mq", "--listen", "127.0.0.1:0", "--tls-key", PEM)
    assert (result.exit_code, "--tls-key needs --tls-cert" in result.stderr) == (2, True)
    assert not (tmp_path / "mq").exists()


def test_command_serves_tls(tmp_path: Path) -> None:
    arguments = (tmp_path / "mq", "--listen", "127.0.0.1:0", "--tls-cert", PEM)
    with started(*arguments) as (server, address), secured(address) as client:
        assert client.ask(SEND, ORDERS, b"hello").code == 0
        server.terminate()
        assert server.wait(20) == 0
