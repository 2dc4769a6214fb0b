"""Commands given a directory whose server runs, but does not answer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore as library
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
