"""`mqstore queue`: items by state, by the files and by a server, and their removal."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from tests.tools.support import forked, mqstore, mqstore_json
from tests.waiting import until

NAME = "mail to.do"
ALL = {"ready": 2, "leased": 1, "retry": 1, "delayed": 1, "dead": 1}


def fill(store: Any) -> None:
    """Put items of all states."""
    queue = store.queue(NAME, codec=library.JSON, retry=library.backoff(3600))
    queue.put_many(["fails", "leased", "dead \x1b[31m", "ready", "ready"])
    queue.put("later", delay=3600)
    store.broker.recall(queue.put("cancelled", delay=3600).recall_handle)
    try:
        with queue.get():
            raise ValueError("no\x1b[2J")
    except ValueError:
        pass
    queue.get_many(2)[1].reject("no such address")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with library.open(tmp_path / "s") as store:
        fill(store)
    return tmp_path / "s"


@contextmanager
def served(path: Path) -> Iterator[str]:
    """Serve a new store by a process, and fill it by a client. Yield its address."""
    server, file = forked("serve", path, "--listen", "127.0.0.1:0"), path / "serve.json"
    try:
        until(lambda: file.exists() and json.loads(file.read_text())["pid"] == server.pid, pause_s=0.01)
        address = json.loads(file.read_text())["endpoints"][0]
        with library.connect(address) as client:
            fill(client)
        yield address
    finally:
        server.terminate()
        server.communicate()


def test_items_are_shown_by_state(path: Path) -> None:
    found = mqstore_json("queue", path, NAME)

    assert (found["name"], found["topic"], found["counts"]) == (NAME, "mail|20to|2edo", ALL)
    shown = [(item["state"], item["attempt"], item["reason"]) for item in found["items"]]
    assert shown == [
        ("retry", 2, "ValueError: no\x1b[2J"),
        ("leased", 1, ""),
        ("ready", 1, ""),
        ("ready", 1, ""),
        ("delayed", 1, ""),
        ("dead", 1, "no such address"),
    ]
    assert [item["until_ms"] is None for item in found["items"]] == [False, False, True, True, False, True]
    text = mqstore("queue", "show", path, NAME).stdout.splitlines()
    assert text[0] == "mail to.do: 2 ready, 1 leased, 1 retry, 1 delayed, 1 dead"
    assert len(text) == 2 + 6


def test_state_and_limit_choose_items(path: Path) -> None:
    for state, count in ALL.items():
        found = mqstore_json("queue", path, NAME, "--state", state)
        assert (found["counts"], [item["state"] for item in found["items"]]) == (ALL, [state] * count)
    assert [item["state"] for item in mqstore_json("queue", path, NAME, "--limit", 2)["items"]] == ["retry", "leased"]
    assert mqstore_json("queue", path, NAME, "--limit", 0)["items"] == []


def test_leases_of_an_ended_process_are_said_to_be_ready_soon(path: Path) -> None:
    """They were shown as held until a time that had passed."""
    [leased] = mqstore_json("queue", path, NAME, "--state", "leased")["items"]
    assert leased["holder"] == "an ended process: ready when the store is opened"
    with library.open(path) as store:
        store.queue(NAME, codec=library.JSON).get()
        [leased] = mqstore_json("queue", path, NAME, "--state", "leased")["items"]
        assert leased["holder"] == "the process that opened the store"


def test_server_shows_holders(tmp_path: Path) -> None:
    with served(tmp_path / "s") as address:
        for target in (tmp_path / "s", address):
            found = mqstore_json("queue", target, NAME)
            assert found["counts"] == ALL
            assert found["items"][1]["holder"].startswith(f"{socket.gethostname()}@{os.getpid()}@")


PURGES = {None: 5, **ALL}


@pytest.mark.parametrize(
    ("way", "state"), [*[("files", state) for state in PURGES], ("directory", None), ("address", "delayed")]
)
def test_purge_removes_items(tmp_path: Path, way: str, state: str | None) -> None:
    path = tmp_path / "s"
    with served(path) if way != "files" else nullcontext() as address:
        if way == "files":
            with library.open(path) as store:
                fill(store)
        target = address if way == "address" else path
        command = ["queue", "purge", target, NAME, *([] if state is None else ["--state", state])]
        row = {"name": NAME, "state": state, "count": PURGES[state]}

        assert mqstore_json(*command, "--dry-run") == {"dry_run": True, **row}
        assert "--yes" in mqstore(*command, exit_code=2).stderr
        assert mqstore_json("queue", target, NAME)["counts"] == ALL
        assert mqstore_json(*command, "--yes") == {"dry_run": False, **row}
        assert mqstore_json(*command, "--yes") == {"dry_run": False, **row, "count": 0}

        left = mqstore_json("queue", target, NAME)
        gone = [state] if state is not None else [each for each in ALL if each != "dead"]
        assert left["counts"] == ALL | dict.fromkeys(gone, 0)
        assert len(left["items"]) == sum(left["counts"].values())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nonesuch"], "no queue 'nonesuch'"),
        ([""], "one character or more"),
        (["a\nb"], "control characters"),
        (["%RETRY%mail"], "a topic of the engine"),
        ([NAME, "--state", "lost"], "lost"),
        (["x" * 200], "at most 120"),
    ],
)
def test_bad_name_or_state_is_refused(path: Path, words: list[str], text: str) -> None:
    assert text in mqstore("queue", path, *words, exit_code=2).stderr
    assert text in mqstore("queue", "purge", path, *words, "--yes", exit_code=2).stderr


def test_purge_beside_a_program_is_refused(path: Path) -> None:
    with library.open(path):
        assert mqstore_json("queue", path, NAME)["counts"]["dead"] == 1
        assert "open for writing" in mqstore("queue", "purge", path, NAME, "--yes", exit_code=3).stderr


@pytest.mark.parametrize("name", ["my jobs.x", "orders"])
@pytest.mark.parametrize("command", ["show", "purge"])
def test_missing_queue_is_named_as_typed(tmp_path: Path, command: str, name: str) -> None:
    with library.open(tmp_path / "s") as store:
        store.put("orders", b"a message of a topic that is no queue")
    result = mqstore("queue", command, tmp_path / "s", name, exit_code=2)
    assert f"has no queue {name!r}" in result.stderr
