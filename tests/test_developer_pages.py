"""The pages for people who change mqstore name only what there is: files, make targets, and names in the code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT, ROOT / "store" / "mqstore")
"""Folders that a path on a page may begin in."""
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "docs/debugging.md")]

_PATH = re.compile(r"(?<![\w/.<%-])(?:[\w.-]+/)*(?:[\w-]+\.(?:py|c|h|md|toml|yml|java)|[\w.-]+/)(?![\w*/.])")


def _code(page: Path) -> str:
    """Return what a page shows as code, a piece a line: blocks, and what stands between backticks."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(?:.*\n)*?```|^ {4}.*", text, re.M)
    return "\n".join([*blocks, *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)])


def _paths(page: Path) -> set[str]:
    return set(_PATH.findall(_code(page).replace(".venv/bin/", "")))


def _exists(path: str) -> bool:
    """Return True if a file has this path. `NAME` stands for any name that a reader chooses."""
    return any(next(folder.glob(path.rstrip("/").replace("NAME", "*")), None) is not None for folder in FOLDERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_named_on_a_page_exists(page: Path) -> None:
    named = _paths(page)

    assert named
    assert [path for path in sorted(named) if not _exists(path)] == []


@pytest.mark.parametrize("page", [*PAGES, *WORKFLOWS], ids=lambda page: page.name)
def test_every_make_target_named_on_a_page_exists(page: Path) -> None:
    [targets] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    code = _code(page) if page.suffix == ".md" else page.read_text(encoding="utf-8")
    named = re.findall(r"(?:^|run: | {4})make ([a-z0-9-]+)", code, re.M)

    assert set(named) - set(targets.split()) == set()


def test_every_test_that_make_names_exists() -> None:
    """pytest with `-n` ends without a test, and without a word why, if one of its files is not there."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [targets] = re.findall(r"^\.PHONY: help demo (.*)$", makefile, re.M)
    given = ("PYTHON=python3", "JOBS=1")  # otherwise make looks for them again for each line that names them
    command = ["make", "--dry-run", "--directory", str(ROOT), *given, *targets.split()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?<![\w/.])tests/[\w/.]*\w", shown))

    assert "tests/crash" in named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_each_workflow_calls_make() -> None:
    steps = [step for file in WORKFLOWS for step in re.findall(r"run: (.*)", file.read_text(encoding="utf-8"))]

    assert steps
    assert [step for step in steps if not step.startswith("make ")] == []


_STEP = re.compile(r"^\d+\. .*?(?=^\d+\. |\n\n|\Z)", re.S | re.M)
_NAME = re.compile(r"(?!NAME)(?:\w+\.)*(\w*[A-Z_]\w*)")


def test_contributing_lists_only_existing_names() -> None:
    """A step such as "`columnar/columns.py`: a row in `_TABLE`" leads to a name, which somebody may have changed."""
    missing = []
    for step in _STEP.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        spans = re.findall(r"`([^`\n]+)`", step)
        paths = [span.replace("NAME", "*") for span in spans if _PATH.fullmatch(span)]
        files = [file for path in paths for folder in FOLDERS for file in folder.glob(path)]
        text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        names = [found[1] for span in spans if (found := _NAME.fullmatch(span))]
        missing += [name for name in names if files and not re.search(rf"\b{name}\b", text)]

    assert missing == []


def test_each_room_shows_at_most_a_dozen_names() -> None:
    """A reader looks for a noun in the folder of its room (ARCHITECTURE.md)."""
    folders = {module.parent for module in (ROOT / "store/mqstore").rglob("*/__init__.py")}
    shown = {
        folder: {*folder.glob("*.py"), *folder.glob("*/__init__.py")} - {folder / "__init__.py"} for folder in folders
    }

    assert len(folders) > 20
    assert {folder: len(names) for folder, names in shown.items() if len(names) > 12} == {}
