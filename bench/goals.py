"""Answers beside their goals: `python -m bench.goals FILE` prints those of a saved run, a file in .benchmarks."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNITS = {"x rate": True, "x time": False, "k/s": True, "ms": False, "s": False, "MiB": False}
"""Units of a value. True: more is better. The first two are ratios: our rate, or our time, divided by the other's."""
HEADINGS = ("question", "beside", "value", "spread", "goal", "verdict", "figures")


@dataclass(frozen=True, slots=True)
class Answer:
    """A finding of one question: beside a peer, or a value that stands alone."""

    question: str
    """Name and parameters of the question, as in `pytest -k`."""
    beside: str
    """Name of the peer. Empty for a value that stands alone."""
    unit: str
    """One of `UNITS`."""
    values: Sequence[float]
    """One for each round. Empty if the peer was left out, and `note` gives the reason."""
    goal: float | None = None
    """The least value, or the greatest one if less is better. None: shown for comparison only."""
    note: str = ""
    """Absolute figures, for people."""

    @property
    def value(self) -> float | None:
        """Median over the rounds."""
        return statistics.median(self.values) if self.values else None

    @property
    def met(self) -> bool | None:
        """Return True if the goal is reached, and None without a goal or a value."""
        if not self.value or not self.goal:
            return None
        return self.value >= self.goal if UNITS[self.unit] else self.value <= self.goal

    def cells(self) -> tuple[str, ...]:
        """Return the texts of a row, under `HEADINGS`."""
        goal = "" if self.goal is None else f"{'>=' if UNITS[self.unit] else '<='} {number_text(self.goal)}"
        value = "" if self.value is None else f"{number_text(self.value)} {self.unit}"
        spread = f"{number_text(min(self.values))} .. {number_text(max(self.values))}" if self.values else ""
        verdict = {None: "", True: "met", False: "not met"}[self.met]
        return self.question, self.beside, value, spread, goal, verdict, self.note


def summary(answers: Sequence[Answer]) -> str:
    verdicts = [answer.met for answer in answers if answer.met is not None]
    return f"{sum(verdicts)} of {len(verdicts)} goals met"


def as_lines(answers: Sequence[Answer]) -> list[str]:
    """Return a table in Markdown: a line with the headings, a rule, and a line for each answer."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(answer.cells() for answer in answers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]


def number_text(number: float | None) -> str:
    """Return a number to three figures.

    >>> number_text(0.95432), number_text(12.249), number_text(1034.4), number_text(None)
    ('0.954', '12.2', '1034', '')
    """
    return "" if number is None else f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def rate_text(rate: float, unit: str) -> str:
    """Return a rate as people read it; for calls, the time of one.

    >>> rate_text(612_345.0, "messages"), rate_text(2.5e9, "bytes"), rate_text(80.0, "calls")
    ('612 k/s', '2.5 GB/s', '12.5 ms')
    """
    if unit == "calls":
        return f"{number_text(1000 / rate)} ms"
    letter = "B" if unit == "bytes" else ""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= factor:
            return f"{number_text(rate / factor)} {prefix}{letter}/s"
    return f"{rate:.0f} {letter}/s"


if __name__ == "__main__":
    saved = json.loads(Path(sys.argv[1]).read_text())
    of_run = [Answer(**each) for asked in saved["benchmarks"] for each in asked["extra_info"]["answers"]]
    print(*as_lines(of_run), sep="\n")
