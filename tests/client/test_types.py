"""Types of queues and tasks, as type checkers see them."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_overloads, get_type_hints

import pytest

import mqstore
from tests.pages import ROOT

CHECKED = ROOT / "tests" / "client" / "typed_queues.py"


def test_queues_have_the_types_of_their_codecs(tmp_path: Path) -> None:
    """By pyright. mypy checks the same file in `make lint`.

    basedpyright is pyright with its own Node.js. It loads nothing at its start, as pyright's package does.
    """
    beside = str(Path(sys.executable).parent)
    program = shutil.which("basedpyright", path=beside) or shutil.which("basedpyright") or shutil.which("pyright")
    if program is None:
        pytest.skip("neither pyright nor basedpyright is installed: pip install basedpyright")
    copied = Path(shutil.copy(CHECKED, tmp_path))
    settings = {
        "include": [copied.name],
        "extraPaths": [str(ROOT / "store")],
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "pythonVersion": "3.11",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run([program, "-p", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_typed_options_are_those_of_a_queue() -> None:
    parameters = set(inspect.signature(mqstore.Queue).parameters) - {"broker", "name", "codec"}
    for overload in get_overloads(mqstore.Store.queue):
        [options] = get_args(get_type_hints(overload)["options"])
        assert set(options.__annotations__) == parameters
    assert list(inspect.signature(mqstore.Store.queue).parameters)[:2] == ["self", "name"]
