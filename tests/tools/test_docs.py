"""docs/commands.md is the commands' help, all of it, as it is today."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mqstore_tools.docs import page
from mqstore_tools.main import COMMANDS

_COMMANDS_MD = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_is_fresh() -> None:
    # In a process of its own, as `make docs` runs it: click remembers in a command how its help was first asked for.
    path = os.pathsep.join(str(Path(__file__).parents[2] / folder) for folder in ("store", "tools"))
    run = subprocess.run(
        [sys.executable, "-m", "mqstore_tools.docs"],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1"},
    )

    assert _COMMANDS_MD.read_text(encoding="utf-8") == run.stdout, "run `make docs`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert f"\n## mqstore {name}\n" in _COMMANDS_MD.read_text(encoding="utf-8")


def test_every_sub_command_is_documented() -> None:
    text = _COMMANDS_MD.read_text(encoding="utf-8")

    assert all(f"\n## mqstore {name}\n" in text for name in ("topics delete", "offsets reset", "dlq purge"))


def test_the_page_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = page()
    monkeypatch.setenv("COLUMNS", "40")

    assert page() == wide
