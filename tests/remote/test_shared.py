"""The server that processes of one directory share: its start, its end, its options (remoting-server, section 17)."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import SimulatedClock, StoreConfig
from mqstore.errors import (
    ConfigError,
    ConnectionLostError,
    MQStoreError,
    NotAStoreError,
    StoreIOError,
    StoreLockedError,
)
from mqstore.remote.shared import Starter
from tests.children import speaking_child
from tests.holding import linux_only
from tests.remote.servers import has_ended, pid_of, starts
from tests.serve.support import ORDERS, ROUTE, SEND, Client
from tests.waiting import until


def starter(path: Path, **options: Any) -> Starter:
    return Starter(path, **{"linger_s": 0.1, **options})


def reached(one: Starter) -> Client:
    """Connect, again if the server was about to end."""
    while True:
        client = Client(one.dial())
        try:
            client.ask(ROUTE)
            return client
        except ConnectionError:
            client.socket.close()


def test_first_process_starts_the_server_and_the_last_lets_it_end(tmp_path: Path) -> None:
    one = starter(tmp_path / "mq")
    with reached(one) as client, Client(starter(tmp_path / "mq").dial()) as other:
        assert client.ask(SEND, ORDERS, b"first").code == 0
        time.sleep(0.3)
        assert other.ask(SEND, ORDERS, b"second").code == 0  # a client that does nothing is one, too
        pid = pid_of(tmp_path / "mq")
    until(lambda: has_ended(pid))
    with mqstore.open(tmp_path / "mq") as store:
        assert store.recovery.clean_shutdown
        assert [message.body for message in store.iter("orders")] == [b"first", b"second"]
        assert not list(store.verify())
    with reached(one) as client:
        assert client.ask(SEND, ORDERS, b"third").code == 0
    assert starts(tmp_path / "mq") == 2


def test_server_that_was_killed_is_started_again(tmp_path: Path) -> None:
    one = starter(tmp_path / "mq")
    with reached(one) as client:
        assert client.ask(SEND, ORDERS, b"before").code == 0
        os.kill(pid_of(tmp_path / "mq"), signal.SIGKILL)
        with pytest.raises(ConnectionError):
            client.ask(ROUTE)
    with reached(one) as client:
        assert client.ask(SEND, ORDERS, b"after").code == 0
        pid = pid_of(tmp_path / "mq")
        os.kill(pid, signal.SIGTERM)
        until(lambda: has_ended(pid))
    with mqstore.open(tmp_path / "mq", lock_timeout=20) as store:
        assert store.recovery.clean_shutdown
        assert [message.body for message in store.iter("orders")] == [b"before", b"after"]


def test_writer_that_is_being_killed_is_waited_for(tmp_path: Path) -> None:
    store = mqstore.open(tmp_path / "mq")
    notice = {"pid": os.getpid(), "endpoints": ["unix:/nowhere"]}  # as of a killed server, whose files are still open
    (tmp_path / "mq" / "serve.json").write_text(json.dumps(notice))
    closing = threading.Timer(0.2, store.close)
    closing.start()
    with Client(starter(tmp_path / "mq").dial()) as client:
        assert client.ask(SEND, ORDERS).code == 0
    closing.join()


def test_processes_that_begin_at_once_start_one_server(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: starter(tmp_path / "mq").dial(), range(8)))
    for each in found:
        with Client(each) as client:
            assert client.ask(SEND, ORDERS, b"hello").code == 0
    assert starts(tmp_path / "mq") == 1


def test_directory_that_is_opened_directly_is_locked(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq"), pytest.raises(StoreLockedError, match=f"process {os.getpid()}") as caught:
        starter(tmp_path / "mq").dial()
    assert caught.value.pid == os.getpid()
    assert not (tmp_path / "mq" / "serve.log").exists()  # nothing was started


def test_program_that_serves_its_store_is_found(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq") as store:
        server = store.serve(())
        with Client(starter(tmp_path / "mq").dial()) as client:
            assert client.ask(SEND, ORDERS, b"hello").code == 0
        server.close()
        with pytest.raises(StoreLockedError):
            starter(tmp_path / "mq").dial()


@linux_only
def test_server_inherits_nothing_of_its_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "secret")
    monkeypatch.setenv("TZ", "UTC")
    inheritable = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with Client(starter(tmp_path / "mq").dial()):
            pid = pid_of(tmp_path / "mq")
            process = Path(f"/proc/{pid}")
            environment = process.joinpath("environ").read_bytes()
            assert (b"secret" in environment, b"\0TZ=UTC\0" in b"\0" + environment) == (False, True)
            assert os.readlink(process / "cwd") == "/"
            assert str(tmp_path) not in {os.readlink(each) for each in process.joinpath("fd").iterdir()}
            assert os.getsid(pid) != os.getsid(0)
            with pytest.raises(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # it is no child of its starter, which need not wait for it
            os.kill(pid, signal.SIGTERM)
            until(lambda: has_ended(pid))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(inheritable)


def test_forked_child_does_not_keep_the_right_to_start(tmp_path: Path) -> None:
    one = starter(tmp_path / "mq")

    def wait(pipe: int) -> None:
        os.write(pipe, b"x")
        threading.Event().wait()

    with one._locked() as lock:
        assert lock is not None
        with one._locked() as again:
            assert again is None
        child = speaking_child(wait)
        _, reader = child.__enter__()
        os.read(reader, 1)
    try:
        with one._locked() as lock:
            assert lock is not None
    finally:
        child.__exit__(None, None, None)


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_of_the_first_process_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mqstore")
    first = starter(tmp_path / "mq", config=StoreConfig(auto_create_topics=False, default_queues=2))
    with Client(first.dial()) as client:
        assert client.ask(SEND, ORDERS).code == 17
        for same in ({}, {"config": StoreConfig(default_queues=2)}):
            starter(tmp_path / "mq", **same).dial().close()
        assert not caplog.records
        other = StoreConfig(default_queues=3, max_delay=timedelta(hours=1))
        starter(tmp_path / "mq", durability="flush", config=other).dial().close()
    [record] = caplog.records
    options = "durability='flush', max_delay=datetime.timedelta(seconds=3600), default_queues=3"
    assert record.getMessage().endswith(f"no effect ({options})")


# -- what cannot be served --------------------------------------------------------------------------------------------


def _foreign(path: Path) -> None:
    path.mkdir()
    path.joinpath("letter.txt").write_text("Dear Sir")


def _other_sizes(path: Path) -> None:
    mqstore.open(path, config=StoreConfig(segment_bytes=1 << 20)).close()


def _occupied(path: Path) -> None:
    path.joinpath("serve.sock").mkdir(parents=True)


@pytest.mark.parametrize(
    ("prepare", "options", "kind", "text"),
    [
        (_foreign, {}, NotAStoreError, "letter.txt"),
        (lambda path: None, {"create": False}, NotAStoreError, "no such directory"),
        (lambda path: None, {"config": StoreConfig(clock=SimulatedClock())}, ConfigError, "clock"),
        (lambda path: None, {"durability": "sync"}, ConfigError, "durability"),
        (_other_sizes, {"config": StoreConfig(segment_bytes=2 << 20)}, ConfigError, "segment_bytes"),
        (_occupied, {}, StoreIOError, "starting a server failed.*serve.sock"),
    ],
    ids=["foreign", "absent", "clock", "durability", "sizes", "socket"],
)
def test_store_that_cannot_be_shared_says_why(
    tmp_path: Path,
    prepare: Callable[[Path], object],
    options: dict[str, Any],
    kind: type[MQStoreError],
    text: str,
) -> None:
    prepare(tmp_path / "mq")
    before = {*tmp_path.rglob("*")}
    with pytest.raises(kind, match=text):
        starter(tmp_path / "mq", **options).dial()
    assert {*tmp_path.rglob("*")} == before or prepare is _occupied  # only that server has been started


def test_long_path_needs_a_folder_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("x" * 100) / "mq"
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        starter(path).dial()
    with tempfile.TemporaryDirectory(dir="/tmp") as run:  # a short path
        monkeypatch.setenv("XDG_RUNTIME_DIR", run)
        with Client(starter(path).dial()) as client:
            monkeypatch.delenv("XDG_RUNTIME_DIR")
            with Client(starter(path).dial()) as other:
                assert client.ask(SEND, ORDERS).code == other.ask(SEND, ORDERS).code == 0
            assert len(os.listdir(run)) == 1
        pid = pid_of(path)
        until(lambda: has_ended(pid))


@pytest.mark.parametrize(
    ("program", "text"), [("/nowhere/python", "No such file"), (shutil.which("false"), "it was killed")]
)
def test_interpreter_that_does_not_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, text: str
) -> None:
    monkeypatch.setattr(spawn, "get_executable", lambda: program)
    with pytest.raises(StoreIOError, match=f"starting a server failed.*{text}"):
        starter(tmp_path / "mq").dial()
    with mqstore.open(tmp_path / "mq"):
        pass


def test_frozen_program_does_not_start_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of PyInstaller started itself in place of a server, that one again, and so on."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(StoreIOError, match=r"frozen program .* serve\(\)"):
        starter(tmp_path / "mq").dial()
    monkeypatch.setattr(spawn, "get_executable", lambda: shutil.which("false"))  # another program is started
    with pytest.raises(StoreIOError, match="it was killed"):
        starter(tmp_path / "mq").dial()


def test_log_of_the_server_is_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "mq"
    folder.mkdir()
    (folder / "serve.log").write_bytes(b"x" * (1 << 20))
    (folder / "serve.log.1").write_bytes(b"y" * (1 << 20))
    with Client(starter(folder).dial()):
        assert (folder / "serve.log.1").read_bytes()[:1] == b"x"
        assert starts(folder) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", '{"pid": 1, "endpoints": [7]}', '{"pid": 1, "endpoints": ["unix:", "unix:/"]}']
)
def test_damaged_announcement_is_as_none(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "mq"
    folder.mkdir()
    for name in ("serve.json", "serve.start"):
        (folder / name).write_text(text)
    with Client(starter(folder, durability="flush").dial()) as client:
        assert client.ask(SEND, ORDERS).code == 0


def test_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "mq").mkdir()
    (tmp_path / "mq" / "serve.log").symlink_to(precious)
    with pytest.raises(StoreIOError):
        starter(tmp_path / "mq").dial()
    assert precious.read_text() == "keep"


def test_stopped_server_is_waited_for_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.remote.shared._PATIENCE_S", 0.05)
    with starter(tmp_path / "mq")._locked() as lock:
        assert lock is not None
        with pytest.raises(ConnectionLostError, match=r"see .*/serve\.log"):
            starter(tmp_path / "mq").dial()
