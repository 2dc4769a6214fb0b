"""Generated files are as the code makes them today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs import native_table, page, with_tables
from tests.tools.support import environment

_ROOT = Path(__file__).parents[1]


def test_the_page_of_the_commands_is_fresh() -> None:
    # In a process of its own, as `make docs` runs it: click remembers in a command how its help was first asked for.
    name = _ROOT / "docs" / "commands.md"
    run = subprocess.run(
        [sys.executable, "-m", "scripts.docs", str(name)],
        capture_output=True,
        encoding="utf-8",
        check=True,
        cwd=_ROOT,
        env={**environment(), "PYTHONUTF8": "1"},
    )

    assert name.read_text(encoding="utf-8") == run.stdout, "run `make docs`"


def test_generated_tables_are_fresh() -> None:
    options = (_ROOT / "docs" / "spark-options.md").read_text(encoding="utf-8")

    assert with_tables(options) == options, "run `make docs`"
    assert (_ROOT / "store" / "native" / "table.h").read_text(encoding="utf-8") == native_table(), "run `make docs`"


def test_each_table_of_spark_is_on_its_page() -> None:
    found = re.findall(r"^<!-- table: .* -->\n\n\|", (_ROOT / "docs" / "spark-options.md").read_text(), re.M)

    assert len(found) == 5


def test_the_page_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = page()
    monkeypatch.setenv("COLUMNS", "40")

    assert page() == wide
