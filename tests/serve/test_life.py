"""Start and end of a server: given sockets, a supervisor, idle ends, SIGTERM (remoting-server, sections 14 and 17)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import mqstore
from mqstore import Store
from mqstore.remoting.frames import Frame, encode
from mqstore.serve import Server
from tests.serve.support import (
    ORDERS,
    PULL,
    PULL_ORDERS,
    ROUTE,
    SEND,
    Client,
    address,
    notice,
    serving,
    started,
)
from tests.tools.support import environment, process

# -- sockets of a service manager -------------------------------------------------------------------------------------


HAND_OVER = """
import os, sys
given, command = sys.argv[1].split(","), sys.argv[2:]
for number, each in enumerate(given, 3):
    os.dup2(int(each), number)
os.execve(command[0], command, os.environ | {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(given))})
"""


def handed_over(directory: Path, *sockets: socket.socket) -> subprocess.Popen[bytes]:
    """Start the command as systemd does: with listening sockets as the descriptors from 3."""
    command = [sys.executable, "-m", "mqstore_tools.main", "serve", str(directory)]
    numbers = [each.fileno() for each in sockets]
    return subprocess.Popen(
        [sys.executable, "-c", HAND_OVER, ",".join(map(str, numbers)), *command],
        env=environment(),
        pass_fds=numbers,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_sockets_of_a_service_manager_are_served_and_left(tmp_path: Path) -> None:
    path = tmp_path / "mq.sock"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        early = Client(tcp.getsockname())  # connects before the server exists
        waiting = early.send(SEND, ORDERS, b"early")
        server = handed_over(tmp_path / "mq", tcp, unix)
        try:
            with early, Client(path) as client:
                assert early.answer(waiting).code == 0
                assert client.ask(SEND, ORDERS, b"late").code == 0
                host, port = tcp.getsockname()
                assert notice(tmp_path / "mq")["endpoints"] == [f"{host}:{port}", f"unix:{path}"]
            server.terminate()
            assert server.wait(20) == 0
        finally:
            server.kill()
            server.communicate()
        assert path.is_socket()
    with mqstore.open(tmp_path / "mq") as store:
        assert [message.body for message in store.iter("orders")] == [b"early", b"late"]


def test_socket_that_other_machines_reach_needs_a_word(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as tcp:
        server = handed_over(tmp_path / "mq", tcp)
        _, err = server.communicate(timeout=20)
    assert (server.returncode, b"--insecure-bind" in err, (tmp_path / "mq").exists()) == (2, True, False)


def test_descriptor_that_is_not_a_listening_socket_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        server = handed_over(tmp_path / "mq", datagrams)
        _, err = server.communicate(timeout=20)
    assert (server.returncode, b"descriptor 3 is not a listening socket" in err) == (2, True)


# -- a supervisor -----------------------------------------------------------------------------------------------------


def kill_children(directory: Path, times: int) -> None:
    """Kill the server again and again, each time once it serves."""
    killed = 0
    for _ in range(times):
        while (pid := notice(directory)["pid"]) == killed:
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        killed = pid


def test_kill_of_a_supervised_server_fails_no_send(tmp_path: Path) -> None:
    directory = tmp_path / "mq"
    answered = 0
    with started(directory, "--supervise", "--listen", "127.0.0.1:0") as (parent, address):
        assert notice(directory)["pid"] != parent.pid
        killer = threading.Thread(target=kill_children, args=(directory, 3))
        killer.start()
        client, more = Client(address), 50
        while more:
            more -= not killer.is_alive()
            try:
                assert client.ask(SEND, ORDERS, str(answered).encode()).code == 0
                answered += 1
            except ConnectionError:
                client.socket.close()
                client = Client(address)  # is never refused
        client.socket.close()
        parent.terminate()
        assert parent.wait(20) == 0
    assert not {"serve.sock", "serve.json"} & set(os.listdir(directory))
    with mqstore.open(directory) as store:
        bodies = [int(message.body) for message in store.iter("orders", 0)]
    assert sorted(set(bodies)) == list(range(answered))
    assert len(bodies) <= answered + 3  # one that was stored and not answered, for each kill


def test_child_of_a_killed_supervisor_ends(tmp_path: Path) -> None:
    options = ["--supervise", "--listen", "127.0.0.1:0"]
    with started(tmp_path / "mq", *options) as (parent, address), Client(address) as client:
        client.ask(SEND, ORDERS, b"hello")
        parent.kill()
        with mqstore.open(tmp_path / "mq", lock_timeout=20) as store:
            assert store.recovery.clean_shutdown


def test_supervised_server_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq"):
        server = process("serve", tmp_path / "mq", "--supervise", "--listen", "127.0.0.1:0")
        _, err = server.communicate(timeout=20)
    assert (server.returncode, b"is open for writing" in err) == (3, True), err


# -- an idle end ------------------------------------------------------------------------------------------------------


def test_client_that_comes_at_the_last_moment_is_served(store: Store) -> None:
    path = store.path / "serve.sock"

    async def main() -> None:
        async with Server(store.broker, listen=(), unix=path, linger_s=3600) as server:
            with Client(path) as late:  # in the backlog, since the loop does not run
                server._end_if_idle()
                assert not server.ended.is_set()
                assert notice(store.path)["endpoints"] == [f"unix:{path}"]
                with Client(path) as next_one:
                    for client in (late, next_one):
                        assert (await asyncio.to_thread(client.ask, ROUTE, {"topic": "orders"})).code == 0
            server._end_if_idle()
            while server.connections:
                await asyncio.sleep(0.01)
            server._end_if_idle()
            assert server.ended.is_set()
            assert not {"serve.sock", "serve.json"} & set(os.listdir(store.path))

    asyncio.run(main())


# -- SIGTERM ----------------------------------------------------------------------------------------------------------


def test_stopping_server_answers_what_waits_and_refuses_what_comes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    monkeypatch.setattr(store.broker, "send_back", lambda *_, **__: done.wait(20))
    back = {"offset": 0, "group": "billing", "delayLevel": 1}
    with ExitStack() as stack:
        client = Client(stack.enter_context(serving(store)))
        pull = client.send(PULL, PULL_ORDERS | {"sysFlag": 6, "suspendTimeoutMillis": 60_000})
        at_disk = client.send(36, back)
        client.ask(ROUTE, {"topic": "orders"})
        stopping = threading.Thread(target=stack.pop_all().close)
        stopping.start()
        with client:
            assert client.answer(pull).code == 19
            assert client.ask(SEND, ORDERS, b"refused").code == 1500
            done.set()
            assert client.answer(at_disk).code == 0
            with pytest.raises(ConnectionError, match="closed by the server"):
                client.receive()
        stopping.join(20)
    assert not list(store.iter("orders"))


def test_last_answers_reach_a_client_that_sends_on(store: Store) -> None:
    """The system discards sent answers if a socket is closed that has received more."""
    with ExitStack() as stack:
        client = Client(stack.enter_context(serving(store)))
        client.ask(ROUTE, {"topic": "orders"})  # it is served before the server stops
        block = encode(Frame(ROUTE, {"topic": "orders"}, opaque=1 << 16)) * 50

        def send() -> None:
            with suppress(OSError):
                while True:
                    client.socket.sendall(block)

        sender = threading.Thread(target=send)
        sender.start()
        stopping = threading.Thread(target=stack.pop_all().close)
        stopping.start()
        with pytest.raises(ConnectionError, match="closed by the server"):  # not reset  # noqa: PT012
            while True:
                client.receive()
        client.socket.shutdown(socket.SHUT_RDWR)
        for thread in (sender, stopping):
            thread.join(20)
        client.socket.close()


def test_client_that_comes_while_the_server_stops_is_disconnected(store: Store) -> None:
    # A socket that only the collector closes is a ResourceWarning, which fails the test.
    async def main() -> bytes:
        async with Server(store.broker, listen=[("127.0.0.1", 0)], unix=None) as server:
            client = socket.create_connection(address(server.endpoints[0]), timeout=10)
            for _ in range(2):  # accepted, and its task not yet begun
                await asyncio.sleep(0)
        with client:
            return client.recv(1)

    assert not asyncio.run(main())
