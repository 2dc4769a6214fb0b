"""The programs of docs/job-programs.md do what the page says, and again when they are started again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import mqstore
from tests.pages import ROOT, examples

CRAWLER, WEB, OUTBOX, NIGHTLY, TYPED = examples(ROOT / "docs" / "job-programs.md")
Typed = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Typed:
    """Run a program in an empty directory, and return its output."""
    monkeypatch.chdir(tmp_path)

    def run(code: str) -> str:
        exec(compile(code, "program", "exec", dont_inherit=True), {"__name__": "program"})
        return capfd.readouterr().out

    return run


def test_programs_are_short() -> None:
    lines = [len([line for line in code.splitlines() if line]) for code in (CRAWLER, WEB, OUTBOX, NIGHTLY, TYPED)]

    assert all(10 <= each <= 30 for each in lines)


def test_crawler_gets_each_page_once_a_day(run: Typed) -> None:
    pages = 5  # of three hosts

    assert run(CRAWLER).startswith(f"{pages} handled, 0 failed")
    assert run(CRAWLER).startswith("0 handled, 0 failed")


def test_crawler_spaces_the_pages_of_a_host(run: Typed) -> None:
    seconds = re.search(r"in ([\d.]+) s", run(CRAWLER))

    assert seconds is not None
    assert float(seconds[1]) >= 1.0  # two of its hosts have two pages


def test_web_service_does_each_job_once(run: Typed) -> None:
    expected = sorted(f"small /{number}.png" for number in range(8))

    assert sorted(re.findall(r"small /\d.png", run(WEB))) == expected
    assert sorted(re.findall(r"small /\d.png", run(WEB))) == expected


def test_outbox_puts_what_the_database_has_committed(run: Typed, tmp_path: Path) -> None:
    assert sorted(run(OUTBOX).splitlines()[:2]) == ["ship order 1", "ship order 2"]
    assert sorted(run(OUTBOX).splitlines()[:2]) == ["ship order 3", "ship order 4"]


def test_outbox_of_a_crash_after_the_put_is_put_once(run: Typed) -> None:
    """The row was not deleted. The relay finds it again."""
    crashed = OUTBOX.replace(
        "            transaction.execute(delete", "            raise SystemExit  # transaction.execute(delete"
    )
    with pytest.raises(SystemExit):
        run(crashed)

    assert sorted(run(OUTBOX).splitlines()[:-1]) == [f"ship order {number}" for number in (1, 2, 3, 4)]


def test_nightly_jobs_are_planned_once(run: Typed, tmp_path: Path) -> None:
    for _ in range(2):
        assert " tick\n" in run(NIGHTLY)

    with mqstore.open(tmp_path / "mq") as store:
        planned = [item.value for item in store.queue("nightly", codec=mqstore.TEXT).items()]
    assert sorted(planned) == ["clean", "report", "tick"]


def test_priority_passes_a_thousand_mails(run: Typed) -> None:
    assert "must be Mail, not dict" in run(TYPED)
