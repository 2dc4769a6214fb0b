"""What README and docs show to be typed is typed here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _examples() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)):
            found.append((f"{page.name}-{number}", code))
    return found


@pytest.mark.parametrize("code", [code for _, code in _examples()], ids=[name for name, _ in _examples()])
def test_a_python_example_runs_as_it_stands(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_the_five_lines_of_the_readme_print_what_was_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [(_, queue), (_, log), *_] = _examples()

    for code in (queue, log):
        exec(compile(code, "README", "exec"), {"__name__": "example"})

    assert capsys.readouterr().out == "1 https://example.org\n0 created b'hello'\n"


def test_every_link_to_a_file_leads_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]

    assert broken == []
