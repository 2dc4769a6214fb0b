"""What README and docs show to be typed is typed here."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import mqstore
from mqstore.engine import Finding
from tests.pages import PAGES, ROOT, examples
from tests.tools.support import mqstore as command

SHARING = {page: [code for code in examples(page) if "TemporaryDirectory(" not in code] for page in PAGES}
"""Those that leave something behind, and find what others have left."""
EXAMPLES = [pytest.param(code, id=f"{page.name}-{i}") for page in PAGES for i, code in enumerate(examples(page))]


def _type(code: str, name: str = "example") -> None:
    logger = logging.getLogger("mqstore")
    level = logger.level
    try:
        # dont_inherit: an example has only the `from __future__` that it writes.
        exec(compile(code, name, "exec", dont_inherit=True), {"__name__": "example"})
    finally:
        logger.setLevel(level)  # or the logs that later tests look for would be missing


@pytest.mark.parametrize("code", EXAMPLES)
def test_a_python_example_runs_as_it_stands(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    _type(code)


def test_examples_of_all_pages_run_twice_in_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are typed by who reads on, and a second time by who wants to see a page again. One page closed a topic
    that the next puts to. Examples that shared a topic or a group found each other's messages, and those that left an
    item unsettled met it again."""
    monkeypatch.chdir(tmp_path)
    first = [ROOT / "README.md", ROOT / "docs" / "tutorial.md"]

    for page in [*first, *(page for page in PAGES if page not in first)]:
        for again in ("", ", again"):
            for number, code in enumerate(SHARING[page]):
                _type(code, f"{page.name}-{number}{again}")


MECHANISMS = (
    *("delays", "filters", "pop", "reading", "retention", "retry-and-dead-letters", "topics-and-groups"),
    "transactions",
)


GUIDES = (
    *("asyncio", "coming-from", "consumer-options", "debugging", "delivery", "logging", "producers", "pull-consumer"),
    *("push-consumer", "queue", "simple-consumer", "small-disks", "testing", "tutorial"),
    *("processes", "job-programs"),
)


@pytest.mark.parametrize("name", [*MECHANISMS, *GUIDES])
def test_a_page_begins_with_its_purpose_and_a_program(name: str) -> None:
    title, purpose, *_ = (ROOT / "docs" / f"{name}.md").read_text().split("\n\n")
    before_second_section = (ROOT / "docs" / f"{name}.md").read_text().split("\n## ")[:2]

    assert title.startswith("# ")
    assert purpose[0].isalpha()
    assert "```python" in "".join(before_second_section)
    if name in MECHANISMS:
        assert re.search(r"^## Guarantees( and limits)?\n\n- ", (ROOT / "docs" / f"{name}.md").read_text(), re.M)


def test_each_kind_of_finding_is_explained_once() -> None:
    text = (ROOT / "docs" / "recovery.md").read_text()
    table = text.partition("\n## Findings\n")[2].partition("\n## ")[0]

    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == sorted(get_args(get_type_hints(Finding)["kind"]))


def test_examples_with_a_simulated_clock_have_their_own_directory() -> None:
    assert [code for page in PAGES for code in examples(page) if "SimulatedClock(" in code and '"mq"' in code] == []


def test_the_five_lines_of_the_readme_print_what_was_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    queue, log, *_ = examples(ROOT / "README.md")

    _type(queue)
    _type(log)

    assert capsys.readouterr().out == "1 https://example.org\n0 created b'hello'\n"


def test_readme_produce_command_reads_key_and_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"id": "o-1", "customer": "ada", "body": "paid"}\n')
    [line] = re.findall(r"^    mqstore (produce .*)$", (ROOT / "README.md").read_text(), re.M)

    command(*shlex.split(line))

    with mqstore.open("var/mq", mode="r") as store:
        [message] = store.iter("orders")
        assert (message.keys, message.message_group, message.body) == (("o-1",), "ada", b"paid")


def _anchors(page: Path) -> set[str]:
    """The names that a page's headings can be linked by."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = {re.sub(r"[^\w\- ]", "", found.lower()) for found in re.findall(r"^#+ (.*)$", text, re.M)}
    return {heading.replace(" ", "-") for heading in headings} | {*re.findall(r'<a id="([^"]*)"></a>', text)}


def _leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    return file.exists() and (not anchor or anchor in _anchors(file))


def test_every_link_to_a_file_or_a_heading_leads_somewhere() -> None:
    links: list[tuple[Path, str]] = [
        (page, target)
        for page in [*PAGES, *(ROOT / "docs" / "internals").glob("*.md")]
        for target in re.findall(r"\]\(([^):]+)\)", page.read_text())
    ]

    assert [f"{page.name}: {target}" for page, target in links if not _leads_somewhere(page, target)] == []


def test_the_reading_loop_of_the_readme_reads_more_than_32_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`read` returns 32 messages at most, and the loop ended there."""
    monkeypatch.chdir(tmp_path)
    [code] = [code for code in examples(ROOT / "README.md") if "receipt.offset" in code]
    [put] = re.findall(r"^    receipt = store\.put\(.*\)$", code, re.M)

    _type(code.replace(put, f"{put}\n    store.put_many('orders', [b'more'] * 40, queue_id=receipt.queue.queue_id)"))

    assert len(capsys.readouterr().out.splitlines()) == 41
