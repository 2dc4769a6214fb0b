"""Commands given a directory whose server runs, but does not answer."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore as library
from mqstore.errors import ConnectionLostError
from tests.tools.support import mqstore

SILENT = "no server answers at 127.0.0.1:1"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A store that this process has open, and announces at a port where nobody listens."""
    with library.open(tmp_path / "s") as store:
        store.queue("jobs").put(b"x")
        notice = {"pid": os.getpid(), "endpoints": ["127.0.0.1:1"]}
        (tmp_path / "s" / "serve.json").write_text(json.dumps(notice))
        yield tmp_path / "s"


@pytest.mark.parametrize("name", ["queue DIR jobs", "top DIR --once"])
def test_figures_of_the_files_are_shown_with_a_note(path: Path, name: str) -> None:
    result = mqstore(*[path if word == "DIR" else word for word in name.split()], exit_code=0)
    assert SILENT in result.stderr
    assert "jobs" in result.stdout


@pytest.mark.parametrize("name", ["clients DIR", "produce DIR jobs --body y", "topics create DIR new"])
def test_an_error_says_that_the_server_does_not_answer(path: Path, name: str) -> None:
    result = mqstore(*[path if word == "DIR" else word for word in name.split()], exit_code=3)
    assert SILENT in result.stderr
    assert "no server has" not in result.stderr


def test_a_killed_server_is_not_mentioned(path: Path) -> None:
    (path / "serve.json").write_text(json.dumps({"pid": 1, "endpoints": ["127.0.0.1:1"]}))
    assert mqstore("queue", path, "jobs", exit_code=0).stderr == ""
    assert "no server has" in mqstore("clients", path, exit_code=3).stderr


def test_a_server_that_keeps_a_command_waiting_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs cost a command 20 seconds without a word."""
    said, texts = threading.Event(), list[object]()

    def connect(*_: object, **__: object) -> None:
        assert said.wait(60)
        raise ConnectionLostError("nothing was received", sent=False)

    monkeypatch.setattr("mqstore_tools.session._SILENCE_S", 0.01)
    monkeypatch.setattr("mqstore_tools.session.note", lambda text: (texts.append(text), said.set()))
    monkeypatch.setattr(library, "connect", connect)
    mqstore("queue", path, "jobs", exit_code=0)
    assert texts[0] == f"{path}: the server has not answered yet; waiting for it"
