"""The report of a run: a row for each answer, what it was before, and its plots."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import report
from bench.report import write_run
from bench.results import Run, read_history
from tests.bench.support import row, run

LATENCY = {"50": 0.1, "90": 0.2, "99": 0.3, "99.9": 0.4, "max": 9.0}
RUN = run(
    row(2.5, goal=2, low=2.0, high=3.0, said="5 k/s beside 2 k/s"),
    row(1.0, goal=1.5, beside="a|b"),
    row(None, goal=1, beside="redis", said="left out: no server"),
    row(0.3, group="latency", question="mix", beside="", unit="ms", goal=1, figures=LATENCY),
)


def _lines(path: Path) -> list[list[str]]:
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in path.read_text().splitlines()
        if line.startswith("| ") and "question" not in line
    ]


def test_each_answer_is_a_row(tmp_path: Path) -> None:
    assert _lines(write_run(RUN, [], tmp_path)) == [
        ["put", "128 B", "queuelib", "2.5 x rate", "2 .. 3", ">= 2", "met", "5 k/s beside 2 k/s", ""],
        ["put", "128 B", "a\\|b", "1 x rate", "1 .. 1", ">= 1.5", "not met", "", ""],
        ["put", "128 B", "redis", "", "", ">= 1", "", "left out: no server", ""],
        ["mix", "128 B", "", "0.3 ms", "0.3 .. 0.3", "<= 1", "met", "", ""],
    ]


def test_before_is_the_median_of_earlier_runs_like_this_one(tmp_path: Path) -> None:
    alike = [run(row(value), started=str(value)) for value in (3.0, 1.0, 5.0)]
    others = [run(row(100.0), share=0.01), run(row(200.0), machine={"processors": 64})]

    lines = _lines(write_run(RUN, [*alike, *others], tmp_path))

    assert [line[-1] for line in lines] == ["3", "", "", ""]


def test_goals_met_are_counted(tmp_path: Path) -> None:
    assert "**2 of 3 goals met.**" in write_run(RUN, [], tmp_path).read_text()


@pytest.mark.parametrize(
    ("made", "earlier", "plots"),
    [
        (RUN, [], {"goals.png", "latency.png"}),
        (RUN, [run(row(3.0)), run(row(2.0, beside="other"))], {"goals.png", "latency.png", "history.png"}),
        (RUN, [run(row(3.0, beside="other"))], {"goals.png", "latency.png"}),
        (run(row(2.0)), [run(row(1.0), share=0.1)], set()),
    ],
)
def test_a_plot_is_drawn_where_there_is_something_to_show(
    tmp_path: Path, made: Run, earlier: list[Run], plots: set[str]
) -> None:
    pytest.importorskip("matplotlib")

    text = write_run(made, earlier, tmp_path).read_text()

    assert {path.name for path in tmp_path.glob("*.png")} == plots
    assert set(re.findall(r"\]\((.*?)\)", text)) == plots


def test_without_matplotlib_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)

    text = write_run(RUN, [], tmp_path).read_text()

    assert "matplotlib is not installed" in text
    assert "](" not in text


def test_a_run_is_added_to_the_history(tmp_path: Path) -> None:
    runs = [run(row(value), started=str(value)) for value in (1.0, 2.0)]
    for number, each in enumerate(runs):
        write_run(each, runs[:number], tmp_path)

    assert [each.rows for each in read_history(tmp_path / "history.jsonl")] == [each.rows for each in runs]
