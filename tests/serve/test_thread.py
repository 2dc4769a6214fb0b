"""`Store.serve`: a server in a thread of the program that owns the store."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore.errors import ConfigError, ReadOnlyStoreError, StoreBusyError, StoreClosedError
from mqstore.signalsafe import Lock
from tests.children import in_child, speaking_child
from tests.holding import new_threads
from tests.serve.support import ORDERS, ROUTE, SEND, Client, address
from tests.tools.support import environment


def test_clients_share_the_store_with_its_owner(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq") as store:
        with store.serve(["127.0.0.1:0", "127.0.0.1:0"]) as server:
            assert server.address == server.endpoints[0]
            for each in (*map(address, server.endpoints[:2]), store.path / "serve.sock"):
                with Client(each) as client:
                    assert client.ask(SEND, ORDERS, b"hello").code == 0
        with pytest.raises(ConnectionRefusedError):
            Client(address(server.address))
        assert [message.body for message in store.iter("orders")] == [b"hello"] * 3
        server.close()


def test_closing_the_store_disconnects_its_clients(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = mqstore.open(tmp_path / "mq")
    server = store.serve("127.0.0.1:0")
    with Client(address(server.address)) as client:
        assert client.ask(ROUTE, {"topic": "orders"}).code
        store.close()
        with pytest.raises(ConnectionResetError):
            client.receive()
    assert not new_threads(before)
    assert not {"serve.sock", "serve.json"} & set(os.listdir(tmp_path / "mq"))


def test_address_that_is_taken_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "a") as first, mqstore.open(tmp_path / "b") as second:
        taken = first.serve("127.0.0.1:0").address
        before = set(threading.enumerate())
        with pytest.raises(OSError, match=f"already in use.*{taken.rpartition(':')[2]}"):
            second.serve(taken)
        assert not new_threads(before)
        with second.serve("127.0.0.1:0") as server, Client(address(server.address)) as client:
            assert client.ask(ROUTE, {"topic": "orders"}).code


@pytest.mark.parametrize(
    ("listen", "text"),
    [
        ("9876", "HOST:PORT"),
        ("localhost:http", "HOST:PORT"),
        ("localhost:65536", "HOST:PORT"),
        (":9876", "HOST:PORT"),
        ("0.0.0.0:9876", "insecure_bind=True"),
        ("[::]:9876", "insecure_bind=True"),
        (["127.0.0.1:0", "example.org:9876"], "insecure_bind=True"),
    ],
)
def test_address_that_cannot_be_meant_is_refused(tmp_path: Path, listen: str | list[str], text: str) -> None:
    with mqstore.open(tmp_path / "mq") as store, pytest.raises(ConfigError, match=text):
        store.serve(listen)


def test_store_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq") as store:
        with mqstore.open(tmp_path / "mq", "r") as reader, pytest.raises(ReadOnlyStoreError):
            reader.serve("127.0.0.1:0")
        with Lock(), pytest.raises(StoreBusyError):  # as in a signal handler that has interrupted a call
            _called_by(mqstore, lambda: store.serve("127.0.0.1:0"))
    with pytest.raises(StoreClosedError):
        store.serve("127.0.0.1:0")


def _called_by(module: Any, call: Callable[[], object]) -> None:
    """Make a call as if the module had made it."""
    exec("call()", {"__name__": f"{module.__name__}.store", "call": call})


def test_child_of_a_fork_keeps_no_client_waiting(tmp_path: Path) -> None:
    store = mqstore.open(tmp_path / "mq")
    server = store.serve("127.0.0.1:0")
    client = Client(address(server.address))
    other = Client(address(server.address))
    assert client.ask(SEND, ORDERS, b"hello").code == other.ask(SEND, ORDERS, b"hello").code == 0

    def end() -> None:
        server.close()
        store.close()

    assert in_child(end) == 0
    assert client.ask(SEND, ORDERS, b"hello").code == 0  # the child's `close` has ended nothing

    def wait(pipe: int) -> None:
        os.write(pipe, b"x")
        threading.Event().wait()

    with speaking_child(wait) as (_, reader):
        os.read(reader, 1)
        store.close()
        for each in (client, other):
            with each, pytest.raises(ConnectionResetError):
                each.receive()
        with pytest.raises(ConnectionRefusedError):
            Client(address(server.address))


def test_program_that_closes_nothing_ends_cleanly(tmp_path: Path) -> None:
    program = "import mqstore, sys; store = mqstore.open(sys.argv[1]); store.serve('127.0.0.1:0'); store.put('t', b'x')"
    command = [sys.executable, "-X", "dev", "-c", program, str(tmp_path / "mq")]
    ended = subprocess.run(command, env=environment(), capture_output=True, timeout=60)
    # asyncio's debug mode reports slow callbacks on a loaded machine
    said = [line for line in ended.stderr.splitlines() if not line.startswith(b"Executing <")]
    assert (ended.returncode, ended.stdout, said) == (0, b"", [])
    with mqstore.open(tmp_path / "mq") as store:
        assert store.recovery.clean_shutdown
        assert [message.body for message in store.iter("t")] == [b"x"]


def test_asyncio_store_serves_until_it_is_closed(tmp_path: Path) -> None:
    async def main() -> str:
        async with mqstore.aio.open(tmp_path / "mq") as store:
            server = await store.serve("127.0.0.1:0")
            with Client(address(server.address)) as client:
                assert client.ask(SEND, ORDERS, b"hello").code == 0
            return server.address

    with pytest.raises(ConnectionRefusedError):
        Client(address(asyncio.run(main())))
