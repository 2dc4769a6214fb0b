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
from tests.tools.support import process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_with_the_store_closed(tmp_path: Path, number: int) -> None:
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (server, address), Client(address) as client:
        assert client.ask(SEND, ORDERS, b"hello").code == 0
        server.send_signal(number)
        assert server.wait(20) == 0
    with mqstore.open(tmp_path / "mq") as store:
        assert store.recovery.clean_shutdown
        assert [message.body for message in store.iter("orders")] == [b"hello"]


def test_answered_sends_survive_a_kill(tmp_path: Path) -> None:
    bodies = [str(number).encode() for number in range(200)]
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (server, address), Client(address) as client:
        for body in bodies:
            assert client.ask(SEND, ORDERS, body).code == 0
        server.kill()
        server.wait(20)
    with mqstore.open(tmp_path / "mq") as store:
        assert [message.body for message in store.iter("orders", 0)] == bodies


def test_store_is_used_by_one_process(tmp_path: Path) -> None:
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0"), pytest.raises(mqstore.errors.StoreLockedError):
        mqstore.open(tmp_path / "mq")


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":9876"])
def test_address_that_is_none_is_refused(tmp_path: Path, listen: str) -> None:
    result = command("serve", tmp_path / "mq", "--listen", listen)
    assert (result.exit_code, "is not HOST:PORT" in result.stderr) == (2, True)
    assert not (tmp_path / "mq").exists()


@pytest.mark.parametrize("listen", ["0.0.0.0:9876", "[::]:9876", "10.1.2.3:9876", "queue.example:9876"])
def test_address_of_other_machines_needs_a_word(tmp_path: Path, listen: str) -> None:
    result = command("serve", tmp_path / "mq", "--listen", listen)
    assert (result.exit_code, "--insecure-bind" in result.stderr) == (2, True)
    assert not (tmp_path / "mq").exists()


def test_address_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = command("serve", tmp_path / "mq", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (result.exit_code, "already in use" in result.stderr) == (3, True)


def test_insecure_bind_and_advertise(tmp_path: Path) -> None:
    options = ["--listen", "0.0.0.0:0", "--insecure-bind", "--advertise", "queue.example:9876", "--flush"]
    with started(tmp_path / "mq", *options) as (_, (_, port)), Client(("127.0.0.1", port)) as client:
        assert client.ask(SEND, ORDERS, b"hello").code == 0
        assert b'"0":"queue.example:9876"' in client.ask(ROUTE, {"topic": "orders"}).body


def test_ready_line_as_json(tmp_path: Path) -> None:
    server = process("serve", tmp_path / "mq", "--listen", "127.0.0.1:0", "--json")
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        assert (ready["ready"], ready["endpoints"][0].startswith("127.0.0.1:")) == (True, True)
    finally:
        server.kill()
        server.communicate()


def test_clients_that_come_and_go_are_on_stderr(tmp_path: Path) -> None:
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (server, address):
        with Client(address) as client:
            client.heartbeat("10.0.0.1@7\x1b[31m")
        assert server.stderr is not None
        lines = [server.stderr.readline().decode() for _ in range(2)]
    assert [line.split(":")[1].split()[-2:] for line in lines] == [["has", "come"], ["has", "gone"]]
    assert "\x1b" not in "".join(lines)


def test_metrics_of_other_machines_need_a_word(tmp_path: Path) -> None:
    result = command("serve", tmp_path / "mq", "--listen", "127.0.0.1:0", "--metrics", "0.0.0.0:0")
    assert (result.exit_code, "--insecure-bind" in result.stderr) == (2, True)
