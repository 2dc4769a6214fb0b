"""TLS and plain connections at one port (remoting-server, sections 1 and 18).

`localhost.pem` has a key and its certificate for localhost, made for these tests by openssl, valid until 2126.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mqstore.aio
from mqstore import Store
from mqstore.errors import ConfigError, ConnectionLostError
from mqstore.remoting.frames import Frame, encode
from mqstore.serve import Users, listening, tls_context
from tests.serve.support import ORDERS, PULL, PULL_ORDERS, ROUTE, SEND, Client, serving, started
from tests.tools.support import mqstore as command
from tests.waiting import until

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


# -- mqstore's own clients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tls", [PEM, str(PEM), ssl.create_default_context(cafile=str(PEM))], ids=lambda tls: type(tls).__name__
)
def test_own_clients_use_tls(address: tuple[str, int], store: Store, tls: Any) -> None:
    """One thread reads while others send, and a look at a silent connection finds it alive."""
    seen: list[bytes] = []
    with mqstore.connect(f"localhost:{address[1]}", tls=tls) as remote:
        connection: Any = vars(remote.broker)["_connection"]
        assert connection.line._socket._socket.version() == "TLSv1.3"
        consumer = remote.push_consumer("g")
        consumer.subscribe("orders", lambda message: seen.append(message.body))
        consumer.start()
        remote.put("orders", bytes(1 << 20))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: remote.put_many("orders", [b"%d" % i] * 20), range(20)))
        futures = [remote.broker.put_async("orders", b"x") for _ in range(100)]
        assert len({future.result().physical_offset for future in futures}) == 100
        until(lambda: len(seen) == 501)
        consumer.stop()
        line = connection.line
        line.received_s -= 60
        remote.put("orders", b"y")
        assert connection.line is line
    assert len(list(store.iter("orders"))) == 502


def test_own_clients_of_asyncio_use_tls(address: tuple[str, int]) -> None:
    async def main() -> str:
        async with mqstore.aio.connect(f"localhost:{address[1]}", tls=PEM) as remote:
            return (await remote.put("orders", b"x")).topic

    assert asyncio.run(main()) == "orders"


@pytest.mark.parametrize(
    ("host", "tls", "error", "text"),
    [
        ("localhost", True, ConnectionLostError, "self-signed certificate"),
        ("0.0.0.0", PEM, ConnectionLostError, "IP address mismatch"),
        ("localhost", PEM.parent / "nothing.pem", ConfigError, "has no certificates"),
        ("localhost", Path(__file__), ConfigError, "has no certificates"),
        ("localhost", 3, ConfigError, "tls must be True, an ssl.SSLContext or a file, not 3"),
    ],
)
def test_certificate_that_is_not_trusted_is_refused(
    address: tuple[str, int], host: str, tls: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        mqstore.connect(f"{host}:{address[1]}", tls=tls, timeout=1)


def test_server_without_tls_is_refused(store: Store) -> None:
    with serving(store) as address, pytest.raises(ConnectionLostError):
        mqstore.connect(f"localhost:{address[1]}", tls=PEM, timeout=0.5)


def test_commands_use_tls_and_keys_of_the_environment(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "users.toml"
    file.write_text('[operator]\nsecret = "text"\nadmin = true\n')
    file.chmod(0o600)
    with serving(store, tls=tls_context(PEM, PEM), users=Users(file)) as address:
        where = f"localhost:{address[1]}"
        assert "16" in command("topics", "list", where).stderr
        for name, value in (("ACCESS_KEY", "operator"), ("SECRET_KEY", "text"), ("CACERT", PEM)):
            monkeypatch.setenv(f"MQSTORE_{name}", str(value))
        result = command("topics", "list", where)
        assert (result.exit_code, "orders" in result.stdout) == (0, True)
        monkeypatch.setenv("MQSTORE_CACERT", str(Path(__file__)))
        assert "has no certificates" in command("topics", "list", where).stderr


# -- damage -----------------------------------------------------------------------------------------------------------


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
