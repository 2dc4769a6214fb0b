"""`mqstore serve`, as started from a shell."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

import mqstore
from tests.serve.support import ORDERS, ROUTE, SEND, Client, started
from tests.tools.support import mqstore as command
from tests.tools.support import running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_with_the_store_closed(tmp_path: Path, number: int) -> None:
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (server, address), Client(address) as client:
        assert client.ask(SEND, ORDERS, b"hello").code == 0
        server.send_signal(number)
        assert server.wait(20) == 0
    with mqstore.open(tmp_path / "mq") as store:
        assert store.recovery.clean_shutdown
        assert [message.body for message in store.iter("orders")] == [b"hello"]


def test_store_is_used_by_one_process(tmp_path: Path) -> None:
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0"), pytest.raises(mqstore.errors.StoreLockedError):
        mqstore.open(tmp_path / "mq")


@pytest.mark.parametrize(
    "options", [["--listen"], ["--listen", "127.0.0.1:0", "--metrics"], ["--supervise", "--listen"]]
)
def test_address_that_is_taken_is_an_error(tmp_path: Path, options: list[str]) -> None:
    """It left an empty store."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = command("serve", tmp_path / "mq", *options, f"127.0.0.1:{taken.getsockname()[1]}")
    assert (result.exit_code, "already in use" in result.stderr) == (3, True)
    assert list(tmp_path.iterdir()) == []


def test_insecure_bind_and_advertise(tmp_path: Path) -> None:
    options = ["--listen", "0.0.0.0:0", "--insecure-bind", "--advertise", "queue.example:9876", "--flush"]
    with started(tmp_path / "mq", *options) as (_, (_, port)), Client(("127.0.0.1", port)) as client:
        assert client.ask(SEND, ORDERS, b"hello").code == 0
        assert b'"0":"queue.example:9876"' in client.ask(ROUTE, {"topic": "orders"}).body


def test_ready_line_as_json(tmp_path: Path) -> None:
    with running("serve", tmp_path / "mq", "--listen", "127.0.0.1:0", "--json") as server:
        ready = json.loads(server.stdout.readline())
    assert (ready["ready"], ready["endpoints"][0].startswith("127.0.0.1:")) == (True, True)


def test_clients_that_come_and_go_are_on_stderr(tmp_path: Path) -> None:
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (server, address):
        with Client(address) as client:
            client.heartbeat("10.0.0.1@7\x1b[31m")
        assert server.stderr is not None
        lines = [server.stderr.readline().decode() for _ in range(2)]
    assert [line.split(":")[1].split()[-2:] for line in lines] == [["has", "come"], ["has", "gone"]]
    assert "\x1b" not in "".join(lines)
