"""docs/operating.md: each question has its command, and the command prints what the page shows.

A block `console` has commands after `$ `, each followed by its output. `...` in it stands for anything.
"""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from examples import shop
from tests.pages import ROOT
from tests.tools.support import mqstore

PAGE = (ROOT / "docs" / "operating.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```", PAGE, re.S | re.M)
COMMANDS = [
    (words.replace("\\\n", "").strip(), shown)
    for block in BLOCKS
    for words, shown in re.findall(r"^\$ ((?:.*\\\n)*.*\n)((?:(?!\$ ).*\n)*)", block, re.M)
]
WIDE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_each_section_is_a_question_with_a_command_and_its_output() -> None:
    _, *sections = re.split(r"^## ", PAGE, flags=re.M)

    assert [each.partition("\n")[0] for each in sections if not re.match(r"[^\n]*\?\n", each)] == []
    assert [each.partition("\n")[0] for each in sections if not re.search(r"^\$ mqstore .*\n[^$`]", each, re.M)] == []


def test_commands_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page: some need a folder that an earlier one has made."""
    monkeypatch.chdir(tmp_path)
    shop.fill(tmp_path / "shop")
    different = []
    for words, shown in COMMANDS[1:]:
        name, *arguments = shlex.split(words)
        assert name == "mqstore"
        result = mqstore(*arguments)
        printed = result.stdout + result.stderr
        if not doctest.OutputChecker().check_output(shown, printed, WIDE):
            different.append((words, shown, printed))

    assert different == []
