"""Sockets of a server: where it listens, who may connect, and what names it (remoting-server, sections 3, 14.4, 18)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mqstore import Store
from mqstore.errors import ConfigError
from tests.serve.support import ORDERS, ROUTE, SEND, Client, notice, serving, started, started_line


def test_unix_socket_is_for_its_user_and_named_in_routes(store: Store) -> None:
    path = store.path / "serve.sock"
    with serving(store, unix=path) as (host, port):
        assert path.stat().st_mode & 0o777 == 0o600
        with Client(path) as client:
            assert client.ask(SEND, ORDERS, b"hello").code == 0
            route = json.loads(client.ask(ROUTE, {"topic": "orders"}).body)
        assert route["brokerDatas"][0]["brokerAddrs"] == {"0": f"unix:{path}"}
        written = notice(store.path)
        assert (written["pid"], written["endpoints"]) == (os.getpid(), [f"{host}:{port}", f"unix:{path}"])
    assert [message.body for message in store.iter("orders")] == [b"hello"]
    assert not {"serve.sock", "serve.json", "serve.json.tmp"} & set(os.listdir(store.path))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_other_user_of_the_unix_socket_is_disconnected(store: Store) -> None:
    store.path.chmod(0o711)
    connect = (
        "import os, socket, sys\nos.chdir(sys.argv[1])\nos.setuid(65534)\n"
        "with socket.socket(socket.AF_UNIX) as client:\n    client.connect('serve.sock')\n    print(client.recv(1))"
    )
    with serving(store, unix=store.path / "serve.sock"):
        (store.path / "serve.sock").chmod(0o666)
        found = subprocess.run([sys.executable, "-c", connect, store.path], capture_output=True, check=True, timeout=20)
        assert found.stdout == b"b''\n"
        with Client(store.path / "serve.sock") as client:
            assert client.ask(ROUTE, {"topic": "orders"}).code == 0


def test_socket_file_of_a_killed_server_is_replaced(store: Store) -> None:
    path = store.path / "serve.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with serving(store, unix=path), Client(path) as client:
        assert client.ask(ROUTE, {"topic": "orders"}).code == 0


def test_socket_of_another_server_stays(store: Store) -> None:
    path = store.path / "serve.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OSError, match="listens on this Unix socket already"), serving(store, unix=path):
            pass
        assert path.is_socket()


def test_path_that_no_socket_can_have_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="more than 107 bytes"), serving(store, unix=store.path / ("x" * 107)):
        pass


def test_every_address_is_served_and_routes_name_the_one_used(store: Store) -> None:
    with serving(store, ["127.0.0.1:0", "127.0.0.1:0"]):
        endpoints = notice(store.path)["endpoints"][:2]
        assert len(set(endpoints)) == 2
        for endpoint in endpoints:
            host, _, port = endpoint.rpartition(":")
            with Client((host, int(port))) as client:
                route = json.loads(client.ask(ROUTE, {"topic": "orders"}).body)
            assert route["brokerDatas"][0]["brokerAddrs"] == {"0": endpoint}


def test_store_with_a_long_path_has_its_socket_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    with TemporaryDirectory() as run:
        monkeypatch.setenv("XDG_RUNTIME_DIR", run)
        with started(folder / "mq", "--listen", "127.0.0.1:0") as (_, (host, port)):
            [path] = Path(run).iterdir()
            assert notice(folder / "mq")["endpoints"] == [f"{host}:{port}", f"unix:{path}"]
            with Client(path) as client:
                assert client.ask(SEND, ORDERS).code == 0
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with started(folder / "mq", "--listen", "127.0.0.1:0") as (_, (host, port)):
        assert notice(folder / "mq")["endpoints"] == [f"{host}:{port}"]


def test_ready_line_names_every_endpoint(tmp_path: Path) -> None:
    listen = ["--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--unix", tmp_path / "here.sock"]
    with started_line(tmp_path / "mq", *listen) as (_, line):
        remoting, unix = line.split()[1:]
        endpoints = notice(tmp_path / "mq")["endpoints"]
        assert [remoting, unix] == ["remoting=" + ",".join(endpoints[:2]), f"unix={tmp_path / 'here.sock'}"]
        assert endpoints[2] == f"unix:{tmp_path / 'here.sock'}"
