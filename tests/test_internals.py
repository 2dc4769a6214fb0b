"""The pages of `docs/internals/` and the code agree: citations lead to anchors, promises to tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "internals"
NAMES = ("format", "delivery", "clients", "spark", "reliability")
TEXTS = {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
PROMISES = [f"p{n}" for n in range(1, 15)]

_ANCHOR = re.compile(r'<a id="([^"]*)"></a>')
_CITATION = re.compile(rf"(?<![\w/.-])({'|'.join(NAMES)})#([\w-]*)")


def _sources() -> list[Path]:
    """Return the files that may cite: code, tests and pages, but not this file."""
    found = [path for name in ("store", "tools", "bench", "tests") for path in (ROOT / name).rglob("*.*")]
    found = [path for path in found if path.suffix in (".py", ".c", ".h")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [path for path in [*found, *pages] if path != Path(__file__)]


@pytest.mark.parametrize("name", NAMES)
def test_anchors_of_a_page_are_unique_and_plain(name: str) -> None:
    anchors = _ANCHOR.findall(TEXTS[name])

    assert anchors
    assert sorted(anchors) == sorted(set(anchors))
    assert [anchor for anchor in anchors if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", anchor)] == []


def test_each_citation_leads_to_an_anchor() -> None:
    anchors = {name: set(_ANCHOR.findall(text)) for name, text in TEXTS.items()}
    cited = [
        (path.relative_to(ROOT), name, anchor)
        for path in _sources()
        for name, anchor in _CITATION.findall(path.read_text(encoding="utf-8"))
    ]

    assert len(cited) > 100
    assert [f"{path}: {name}#{anchor}" for path, name, anchor in cited if anchor not in anchors[name]] == []


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    rooms = "store|tests|broker|client|files|jobs|layout|log|spark"
    named = re.findall(rf"`((?:{rooms})/[\w./*-]+)`", page.read_text(encoding="utf-8"))
    missing = [path for path in named if not [*ROOT.glob(path), *(ROOT / "store" / "mqstore").glob(path)]]

    assert missing == []


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_names_its_tests(promise: str) -> None:
    [section] = re.findall(rf'<a id="{promise}"></a>\n(.*?)(?=<a id=|\Z)', TEXTS["reliability"], re.S)
    [tests] = re.findall(r"^- Tests: (.*?)(?=^- |\n\n|\Z)", section, re.S | re.M)
    named = re.findall(r"`(tests/[\w/]+\.py)`", tests)

    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []
