"""`python -m bench`: every question is asked, and answered in all forms. How fast anything is, is not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.endtoend import CASES
from bench.questions import QUESTIONS
from bench.results import read_history, read_run

ASKED = [*QUESTIONS, *CASES]


@pytest.fixture(autouse=True)
def _without_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No JVM and no Redis are started: they would take longer than everything else."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MQSTORE_ROCKETMQ", str(tmp_path))


def _run(tmp_path: Path, *arguments: str) -> int:
    places = ("--directory", str(tmp_path / "stores"), "--results", str(tmp_path / "results"))
    return main([*arguments, *places])


@pytest.mark.parametrize("group", sorted({each.group for each in ASKED}))
def test_every_question_is_answered(tmp_path: Path, group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, group, "--quick", "--share", "0.002") == 0

    run = read_run(tmp_path / "results" / "results.json")
    asked = [each.name for each in ASKED if each.group == group]
    assert list(dict.fromkeys(row.question for row in run.rows)) == asked
    assert [row for row in run.rows if row.value is None and not row.said.startswith("left out: ")] == []
    shown = capsys.readouterr().out
    report = (tmp_path / "results" / "report.md").read_text()
    assert [name for name in asked if name not in shown or f"| {name} |" not in report] == []
    assert list((tmp_path / "stores").iterdir()) == []


def test_a_run_is_one_line_more_of_the_history(tmp_path: Path) -> None:
    for _ in range(2):
        assert _run(tmp_path, "put_many", "--quick", "--share", "0.001") == 0

    runs = read_history(tmp_path / "results" / "history.jsonl")
    assert len(runs) == 2
    assert json.loads(runs[1].to_json()) == json.loads((tmp_path / "results" / "results.json").read_text())


def test_answers_before_a_failure_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr("bench.endtoend.Case.ask", fail)

    with pytest.raises(RuntimeError, match="lost"):
        _run(tmp_path, "reput", "mix", "--quick", "--share", "0.001")

    assert [row.question for row in read_run(tmp_path / "results" / "results.json").rows] == ["reput"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonesuch",), "nonesuch"),
        (("put", "--share", "-1"), "more than 0"),
        (("put", "--rounds", "-1"), "at least 1"),
        (("put", "--body", "7"), "128, 1024"),
    ],
)
def test_wrong_usage_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        _run(tmp_path, *arguments)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err.replace("'", "")  # some versions of argparse quote the choices
    assert list(tmp_path.iterdir()) == []


def test_a_history_that_holds_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "history.jsonl").write_text("not ours\n")

    with pytest.raises(SystemExit):
        _run(tmp_path, "put_many", "--quick")

    assert "line 1 of" in capsys.readouterr().err
    assert (tmp_path / "results" / "history.jsonl").read_text() == "not ours\n"


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "engine", "mix"]) == 0

    listed = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*(each.name for each in ASKED if each.group == "engine"), "mix"]


def test_names_of_questions_and_groups_differ() -> None:
    names = [each.name for each in ASKED] + sorted({each.group for each in ASKED})

    assert len(set(names)) == len(names)
