"""Rows of answers: when a goal is met, and runs in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.results import UNITS, ResultsError, circumstances, number_text, read_history, read_run
from tests.bench.support import row, run


@pytest.mark.parametrize(
    ("unit", "value", "goal", "met"),
    [
        ("x rate", 2.0, 1.5, True),
        ("x rate", 1.5, 1.5, True),
        ("x rate", 1.4, 1.5, False),
        ("k/s", 149.0, 150, False),
        ("x time", 1.4, 1.5, True),
        ("x time", 1.6, 1.5, False),
        ("ms", 0.2, 1, True),
        ("ms", 1.2, 1, False),
        ("x rate", 2.0, None, None),
        ("x rate", None, 2.0, None),
    ],
)
def test_a_goal_is_the_least_rate_or_the_greatest_time(
    unit: str, value: float | None, goal: float | None, met: bool | None
) -> None:
    assert row(value, unit=unit, goal=goal).met is met


@pytest.mark.parametrize(("unit", "gain"), [("x rate", 2.0), ("k/s", 2.0), ("x time", 0.5), ("ms", 0.5)])
def test_more_of_a_time_is_worse(unit: str, gain: float) -> None:
    assert set(UNITS) == {"x rate", "k/s", "x time", "ms"}
    assert row(4.0, unit=unit).gain(2.0) == gain


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, ""), (0.95432, "0.954"), (12.249, "12.2"), (99.94, "99.9"), (1034.4, "1034")],
)
def test_numbers_are_shown_to_three_figures(number: float | None, text: str) -> None:
    assert number_text(number) == text


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = run(row(goal=1.5, said="a", figures={"99": 1.0}), row(None, beside="redis"), **circumstances(share=0.5))
    (tmp_path / "results.json").write_text(made.to_json(indent=2))

    read = read_run(tmp_path / "results.json")

    assert (read.circumstances, read.rows) == (made.circumstances, made.rows)
    assert [each["met"] for each in json.loads(made.to_json())["results"]] == [True, None]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("results.json", ""),
        ("results.json", "[]"),
        ("results.json", '{"results": []}'),
        ("results.json", '{"version": 1, "results": []}'),
        ("results.json", '{"version": 2, "results": []}'),
        ("results.json", '{"version": 1, "share": 1, "machine": 1, "started": 1, "results": [{"unit": "km"}]}'),
        ("history.jsonl", "{"),
        ("history.jsonl", ""),
    ],
)
def test_other_files_are_refused_by_their_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(ResultsError, match=name):
        read_run(tmp_path / name)


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"none\.json cannot be read"):
        read_run(tmp_path / "none.json")


def test_of_a_history_the_newest_other_run_is_taken(tmp_path: Path) -> None:
    runs = [run(row(float(day)), started=f"2026-11-0{day}") for day in (1, 2, 3)]
    path = tmp_path / "history.jsonl"
    path.write_text("".join(each.to_json() + "\n" for each in runs))

    assert read_run(path).rows == runs[2].rows
    assert read_run(path, other_than=runs[2]).rows == runs[1].rows


def test_a_new_folder_has_an_empty_history(tmp_path: Path) -> None:
    assert read_history(tmp_path / "history.jsonl") == []


def test_runs_of_other_machines_or_sizes_are_not_comparable() -> None:
    assert run().comparable(run(started="later", commit="def"))
    assert not run().comparable(run(share=0.01))
    assert not run().comparable(run(machine={"processors": 64}))
