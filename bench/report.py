"""A saved run as Markdown with plots: `python -m bench.report [RUN] [--folder DIR]`.

RUN is a file that `pytest bench --benchmark-autosave` saved, by default the newest one in .benchmarks. The plots need
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.goals import HEADINGS, Answer, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["main", "write_report"]

_LEGEND = (
    "Values are medians over the rounds, with the lowest and the highest. `x rate`: our rate divided by the other's."
    " `x time`: our time divided by the other's. docs/benchmarks.md says what each question asks."
)
_COLOURS = {True: "#2a7f62", False: "#c8553d", None: "#6b7a8f"}

Draw = Callable[["Axes"], int]
"""Draws, and returns the number of its lines."""


def write_report(run: Path, folder: Path) -> Path:
    """Write `report.md` and its plots about a saved run into `folder`. Returns the path of the report.

    Raises ValueError for a file without answers.
    """
    try:
        said = json.loads(run.read_text())
        infos = {each["name"].removeprefix("test_"): each["extra_info"] for each in said["benchmarks"]}
        answers = [Answer(**each) for info in infos.values() for each in info["answers"]]
        lines = ["# Benchmarks of mqstore", "", *_circumstances(said), "", f"**{summary(answers)}.** {_LEGEND}", ""]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run} is not a run that `pytest bench --benchmark-autosave` saved") from error
    folder.mkdir(parents=True, exist_ok=True)
    percentiles = {name: info["percentiles"] for name, info in infos.items() if "percentiles" in info}
    if find_spec("matplotlib") is None:
        lines += ["There are no plots, since matplotlib is not installed (the extra `bench` has it).", ""]
    else:
        judged = [answer for answer in answers if answer.met is not None]
        if judged:
            lines.append(_plot("goals", "How far each goal is reached", lambda axes: _draw_goals(axes, judged), folder))
        if percentiles:
            lines.append(_plot("latency", "Latency", lambda axes: _draw_latencies(axes, percentiles), folder))
    lines += [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    lines += [f"| {' | '.join(answer.cells())} |" for answer in answers]
    path = folder / "report.md"
    path.write_text("\n".join([*lines, ""]))
    return path


def _circumstances(said: Mapping[str, Any]) -> list[str]:
    machine, commit = said["machine_info"], said["commit_info"]
    packages = ", ".join(f"{name} {version}" for name, version in said["packages"].items())
    dirty = ", with uncommitted changes" if commit.get("dirty") else ""
    return [
        f"Saved {said['datetime'][:19]}, commit {(commit.get('id') or 'unknown')[:12]}{dirty}.",
        f"{said['rounds']} rounds, {said['share']:g} of the messages, load average {said['load']:.1f}.",
        f"{machine['system']} {machine['release']}, {machine['cpu']['count']} x {machine['cpu']['brand_raw']}.",
        f"Python {machine['python_version']}, {packages}.",
    ]


def _plot(name: str, title: str, draw: Draw, folder: Path) -> str:
    """Draw one picture. Returns the line of Markdown that shows it."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    figure.set_size_inches(10, 1.2 + 0.22 * draw(axes))
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(folder / f"{name}.png", dpi=110)
    return f"![{title}]({name}.png)\n"


def _by_rows(axes: Axes, labels: Sequence[str]) -> int:
    """One line a label, from top to bottom. Returns their number."""
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    return len(labels)


def _draw_goals(axes: Axes, answers: Sequence[Answer]) -> int:
    for place, each in enumerate(answers):
        reached = [each.gain(each.goal, value) or 0 for value in (min(each.values), each.value, max(each.values))]
        axes.plot(reached, [place] * 3, "-o", color=_COLOURS[each.met], linewidth=2, markersize=5, markevery=[1])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("times the goal: right of the line is met; the bar is the spread of the rounds")
    return _by_rows(axes, [f"{each.question} / {each.beside}  ({each.cells()[4]})" for each in answers])


def _draw_latencies(axes: Axes, percentiles: Mapping[str, Mapping[str, float]]) -> int:
    for place, values in enumerate(percentiles.values()):
        axes.plot(values.values(), [place] * len(values), color=_COLOURS[None], linewidth=1, alpha=0.6)
        for marker, (name, value) in zip("o^sD|", values.items(), strict=True):
            axes.plot(value, place, marker, color=_COLOURS[None], markersize=6, label=name if place == 0 else None)
    axes.set_xlabel("milliseconds after the message was due")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, frameon=False)
    return _by_rows(axes, list(percentiles))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, nargs="?", help="default: the newest file in .benchmarks")
    parser.add_argument("--folder", type=Path, default=Path("var", "bench"), help="folder for report.md and its plots")
    options = parser.parse_args(arguments)
    run = options.run or max(
        Path(".benchmarks").rglob("[0-9]*_*.json"), key=lambda path: path.stat().st_mtime, default=None
    )
    if run is None:
        parser.error("there is no saved run; `make bench` saves one")
    try:
        print(f"report: {write_report(run, options.folder)}")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
