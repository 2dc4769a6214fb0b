"""Answers beside their goals."""

from __future__ import annotations

from typing import Any

import pytest

from bench.goals import Answer, as_lines, summary


def answer(*values: float, unit: str = "x rate", goal: float | None = None, **changed: Any) -> Answer:
    return Answer(**{"question": "put", "beside": "queuelib", "unit": unit, "values": values, "goal": goal, **changed})


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
        ("MiB", 300, 301, True),
        ("s", 2, 1, False),
        ("x rate", 2.0, None, None),
    ],
)
def test_goal_is_the_least_rate_or_the_greatest_time(unit: str, value: float, goal: float | None, met: bool) -> None:
    assert answer(value, unit=unit, goal=goal).met is met
    assert answer(unit=unit, goal=goal).met is None


def test_value_is_the_median_of_the_rounds() -> None:
    made = answer(9.0, 1.0, 2.0, goal=3, note="5 k/s beside 2 k/s")

    assert made.value == 2.0
    assert made.cells() == ("put", "queuelib", "2 x rate", "1 .. 9", ">= 3", "not met", "5 k/s beside 2 k/s")
    assert answer(goal=3, unit="ms").cells() == ("put", "queuelib", "", "", "<= 3", "", "")


def test_table_has_a_line_for_each_answer() -> None:
    answers = [answer(2.0, goal=1), answer(0.5, goal=1), answer(7.0), answer(goal=1, note="left out: no server")]

    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in as_lines(answers)]

    assert rows[0][:2] == ["question", "beside"]
    assert rows[1] == ["---"] * len(rows[0])
    assert [row[5:] for row in rows[2:]] == [["met", ""], ["not met", ""], ["", ""], ["", "left out: no server"]]
    assert summary(answers) == "1 of 2 goals met"
