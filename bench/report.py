"""Rows of answers as tables for a terminal, and as a Markdown report with plots (matplotlib, where it is installed)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.results import Row, Run, number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["summary", "table", "write_run"]

_HEADINGS = ("question", "body", "beside", "value", "spread", "goal", "verdict", "figures")
_LEGEND = (
    "Values are medians over the rounds, with the lowest and the highest. `x rate`: our rate divided by the other's."
    " `x time`: our time divided by the other's. Latencies: percentiles in ms. `before`: median of up to ten earlier"
    " runs like this one. docs/benchmarks.md says what each question asks."
)
_RECENT_RUNS = 10
"""Earlier runs whose median a value is compared with."""
_MET, _NOT_MET, _NEUTRAL = "#2a7f62", "#c8553d", "#6b7a8f"
_VERDICTS = {None: "", True: "met", False: "not met"}
_PERCENTILES = ("50", "90", "99", "99.9", "max")


def cells(row: Row) -> tuple[str, ...]:
    """A row as texts, under `_HEADINGS`."""
    goal = "" if row.goal is None else f"{'>=' if row.more_is_better else '<='} {number_text(row.goal)}"
    value = "" if row.value is None else f"{number_text(row.value)} {row.unit}"
    spread = "" if row.value is None else f"{number_text(row.low)} .. {number_text(row.high)}"
    return row.question, f"{row.body_bytes} B", row.beside, value, spread, goal, _VERDICTS[row.met], row.said


def table(title: str, rows: Sequence[Row]) -> Table:
    """Rows for a terminal."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in _HEADINGS:
        made.add_column(heading, justify="right" if heading in ("body", "value", "spread", "goal") else "left")
    for row in rows:
        made.add_row(*cells(row), style={None: "", True: "green", False: "red"}[row.met])
    return made


def summary(run: Run) -> str:
    """Say how many goals are met."""
    verdicts = [row.met for row in run.rows if row.met is not None]
    return f"{sum(verdicts)} of {len(verdicts)} goals met"


def write_run(run: Run, earlier: Sequence[Run], folder: Path) -> Path:
    """Write `results.json`, `report.md` and its plots into `folder`, add a line to `history.jsonl` there.

    `earlier` is the history so far. Its runs on the same machine with the same share of messages are what "before"
    means. Returns the path of the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(run.to_json(indent=2) + "\n")
    with (folder / "history.jsonl").open("a") as file:
        file.write(run.to_json() + "\n")
    alike = [old for old in earlier if run.comparable(old)]
    lines = ["# Benchmarks of mqstore", "", *_circumstances(run), "", f"**{summary(run)}.** {_LEGEND}", ""]
    if find_spec("matplotlib") is None:
        lines += ["There are no plots, since matplotlib is not installed (the extra `bench` has it).", ""]
    else:
        lines += [_plot(name, title, draw, folder) for name, title, draw in _drawings(run, alike)]
    for group in dict.fromkeys(row.group for row in run.rows):
        lines += [
            f"## {group.capitalize()}",
            "",
            *_markdown([row for row in run.rows if row.group == group], alike),
            "",
        ]
    path = folder / "report.md"
    path.write_text("\n".join(lines))
    return path


def _circumstances(run: Run) -> list[str]:
    said = run.circumstances
    versions = ", ".join(f"{name} {version}" for name, version in said["versions"].items() if version)
    machine = ", ".join(str(value) for value in said["machine"].values())
    return [
        f"Begun {said['started']}, commit {said['commit'] or 'unknown'}, load average {said['load']:.1f}.",
        f"{said['rounds']} rounds, {said['share']:g} of the messages. {machine} processors.",
        f"Versions: {versions}.",
    ]


def before(row: Row, earlier: Sequence[Run]) -> float | None:
    """Median of a row's value over the last runs that have it."""
    found = [old.by_key()[row.key].value for old in earlier if row.key in old.by_key()]
    values = [value for value in found if value is not None]
    return statistics.median(values[-_RECENT_RUNS:]) if values else None


def _markdown(rows: Sequence[Row], earlier: Sequence[Run]) -> list[str]:
    lines = [f"| {' | '.join(_HEADINGS)} | before |", "|---" * (len(_HEADINGS) + 1) + "|"]
    for row in rows:
        shown = [cell.replace("|", "\\|") for cell in cells(row)]
        lines.append(f"| {' | '.join([*shown, number_text(before(row, earlier))])} |")
    return lines


Draw = Callable[["Axes"], int]
"""Draws, and returns the number of its lines."""


def _drawings(run: Run, earlier: Sequence[Run]) -> list[tuple[str, str, Draw]]:
    """Name of the file, title, and what draws it; only of plots for which there is something to show."""
    wanted = [row for row in run.rows if row.met is not None]
    latencies = [row for row in run.rows if row.value is not None and "99.9" in row.figures]
    runs = [*earlier[-_RECENT_RUNS:], run]
    shared = [row for key, row in run.by_key().items() if any(key in old.by_key() for old in runs[:-1])]
    found: list[tuple[str, str, Draw, bool]] = [
        ("goals", "How far each goal is reached (1: exactly)", lambda axes: _draw_goals(axes, wanted), bool(wanted)),
        ("latency", "Latency from put to handler", lambda axes: _draw_latencies(axes, latencies), bool(latencies)),
        (
            "history",
            "Change since the first of these runs",
            lambda axes: _draw_history(axes, shared, runs),
            bool(shared),
        ),
    ]
    return [(name, title, draw) for name, title, draw, there in found if there]


def _plot(name: str, title: str, draw: Draw, folder: Path) -> str:
    """Draw one picture; return the line of Markdown that shows it."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    figure.set_size_inches(10, 1.2 + 0.22 * draw(axes))
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / f"{name}.png", dpi=110)
    return f"![{title}]({name}.png)\n"


def _label(row: Row) -> str:
    return f"{row.question}, {row.body_bytes} B" + f" / {row.beside}" * bool(row.beside)


def _by_rows(axes: Axes, labels: Sequence[str]) -> None:
    """One line a label, from top to bottom."""
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _logarithmic(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)


def _draw_goals(axes: Axes, rows: Sequence[Row]) -> int:
    _by_rows(axes, [f"{_label(row)}  ({cells(row)[5]})" for row in rows])
    for place, row in enumerate(rows):
        colour = _MET if row.met else _NOT_MET
        reached = [row.gain(row.goal, each) or 0 for each in (row.low, row.value, row.high)]
        axes.plot(reached, [place] * 3, "-o", color=colour, linewidth=2, markersize=5, markevery=[1])
    axes.axvline(1, color="black", linewidth=1)
    _logarithmic(axes, "times the goal: right of the line is met; the bar is the spread of the rounds")
    return len(rows)


def _draw_latencies(axes: Axes, rows: Sequence[Row]) -> int:
    """A mark for each percentile."""
    _by_rows(axes, [row.question + f", {row.beside}" * bool(row.beside) for row in rows])
    markers = dict(zip(_PERCENTILES, "o^sD|", strict=True))
    for place, row in enumerate(rows):
        values = [row.figures[name] for name in _PERCENTILES]
        axes.plot(values, [place] * len(values), color=_NEUTRAL, linewidth=1, alpha=0.6)
        for (name, marker), value in zip(markers.items(), values, strict=True):
            label = ("max" if name == "max" else f"{name} %") if place == 0 else None
            axes.plot(value, place, marker, color=_NEUTRAL, markersize=6, label=label)
    _logarithmic(axes, "milliseconds after the message was due")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12 if len(rows) < 10 else -0.08), ncols=5, frameon=False)
    return len(rows)


def _draw_history(axes: Axes, rows: Sequence[Row], runs: Sequence[Run]) -> int:
    """Questions from top to bottom, runs from left to right; a colour for how much better or worse than at first."""
    _by_rows(axes, [_label(row) for row in rows])
    grid: list[list[Any]] = []
    for row in rows:
        found = [run.by_key()[row.key].value if row.key in run.by_key() else None for run in runs]
        first = next(value for value in found if value is not None)
        grid.append([row.gain(first, value) if value else float("nan") for value in found])
    mesh = axes.imshow(grid, aspect="auto", cmap="RdYlGn", vmin=0.5, vmax=1.5, alpha=0.7)
    for place, line in enumerate(grid):
        for at, gain in enumerate(line):
            if gain == gain:  # not NaN
                axes.text(at, place, f"{gain:.2f}", ha="center", va="center", fontsize=7)
    names = [f"{run.circumstances['started'][5:16]}\n{(run.circumstances['commit'] or '')[:8]}" for run in runs]
    axes.set_xticks(range(len(runs)), names, fontsize=7)
    axes.figure.colorbar(mesh, ax=axes, shrink=0.5, label="times as good as at first")
    return len(rows)
