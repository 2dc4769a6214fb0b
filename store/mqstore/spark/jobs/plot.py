"""Reports as pictures, drawn by matplotlib into a file: PNG, SVG or PDF, as its name has it.

No window, no state of matplotlib's that others would see, and colours that eyes of all sorts tell apart. Names come
from stores, so no part of them is taken for a formula.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from mqstore.errors import ConfigError
from mqstore.spark.jobs.lag import LagReport, LagRow
from mqstore.spark.jobs.traffic import TrafficPoint, TrafficReport

__all__ = ["check_plot", "plot_lag", "plot_traffic"]

_KINDS: Final = (".png", ".svg", ".pdf")
_MISSING: Final = "a plot needs matplotlib: pip install 'mqstore[plot]'"
_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_OTHERS, _INK, _FAINT = "#9A9A9A", "#222222", "#D9D9D9"
_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))
_BARS: Final = 25
_POINTS: Final = 20_000
_NAME: Final = 40


def check_plot(path: str | os.PathLike[str]) -> None:
    """Whether a plot can be drawn to this file: ConfigError for a name that says no format, or a folder that is not
    there; ImportError without matplotlib."""
    where = Path(path)
    if where.suffix.lower() not in _KINDS:
        raise ConfigError(f"plot {str(where)!r}: its name ends in none of {', '.join(_KINDS)}")
    if not where.absolute().parent.is_dir():
        raise ConfigError(f"plot {str(where)!r}: there is no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(_MISSING)


def plot_traffic(report: TrafficReport, path: str | os.PathLike[str]) -> None:
    """Messages and bytes a second over time; the six groups with most messages, and the others together."""
    check_plot(path)
    figure = _figure(10, 6.2)
    rates, sizes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    total = report.total
    by = " and ".join(name.replace("queue_id", "queue") for name in report.by)
    _title(
        figure,
        f"Messages by {by}" if by else "Messages",
        f"{total.messages:,} messages, {_bytes(total.bytes)}; each point adds up {_length(report.interval_ms)}",
    )
    if not report.series:
        rates.text(0.5, 0.5, "no messages", transform=rates.transAxes, ha="center", color=_OTHERS)
    lines = [(name, colour, *_grid(points, report.interval_ms)) for name, colour, points in _series(report)]
    seconds = report.interval_ms / 1000
    most = max((max(size) for *_, size in lines), default=0) / seconds
    unit, factor = next((each for each in _UNITS if most >= each[1]), _UNITS[-1])
    for name, colour, times, messages, size in lines:
        style = {"color": colour, "label": name, "linewidth": 1.4, "marker": "o" if len(times) == 1 else None}
        rates.plot(times, [each / seconds for each in messages], **style)
        sizes.plot(times, [each / seconds / factor for each in size], **style)
    rates.set_ylabel("messages a second")
    sizes.set_ylabel(f"bodies ({unit} a second)")
    _time_axis(sizes)
    for axes in (rates, sizes):
        axes.set_ylim(bottom=0)
        _clean(axes, grid="y")
    if lines and report.by:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "alignment": "left"}
        rates.legend(**place, frameon=False, fontsize=9, title=by)
    _save(figure, path)


def plot_lag(report: LagReport, path: str | os.PathLike[str]) -> None:
    """A bar for each group and topic, the largest lag first; with two looks, its colour says which way it goes."""
    check_plot(path)
    rows = [row for row in report.rows if row.lag][:_BARS]
    figure = _figure(10, 1.9 + 0.34 * max(3, len(rows)))
    axes = figure.subplots()
    others = sum(1 for row in report.rows if row.lag) - len(rows)
    when = datetime.fromtimestamp(report.taken_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    more = f"; {others} smaller ones are not shown" if others > 0 else ""
    _title(figure, "Messages not consumed, by group and topic", f"{report.total_lag:,} in all, {when}{more}")
    if not rows:
        axes.text(0.5, 0.5, "nothing is left to consume", transform=axes.transAxes, ha="center", color=_OTHERS)
    states = [_state(row) for row in rows]
    places = range(len(rows))
    axes.barh(places, [row.lag for row in rows], color=[_STATES[state] for state in states], height=0.72)
    axes.set_yticks(places, [_short(f"{row.group} · {row.topic}") for row in rows])
    axes.invert_yaxis()
    most = max((row.lag for row in rows), default=1)
    for place, row in zip(places, rows, strict=True):
        text = f" {row.lag:,}, {_length(round(row.lag_seconds * 1000))} old"
        axes.text(row.lag, place, text, va="center", fontsize=8.5, color=_INK)
    axes.set_xlabel("messages")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlim(0, most * 1.25)  # room for what stands behind the longest bar
    _clean(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    shown = [state for state in _STATES if state in states]
    if shown and shown != ["not compared"]:
        from matplotlib.patches import Patch

        handles = [Patch(color=_STATES[state], label=state) for state in shown]
        axes.legend(handles=handles, loc="lower right", frameon=True, framealpha=0.9, edgecolor=_FAINT, fontsize=9)
    _save(figure, path)


_STATES: Final = {
    "stuck": "#D55E00",
    "falling behind": "#E69F00",
    "keeping up": "#56B4E9",
    "catching up": "#009E73",
    "not compared": "#0072B2",
}


def _state(row: LagRow) -> str:
    if row.consumed_per_second is None or row.arriving_per_second is None:
        return "not compared"
    if row.stuck_queues:
        return "stuck"
    difference = row.consumed_per_second - row.arriving_per_second
    return "catching up" if difference > 0 else "falling behind" if difference < 0 else "keeping up"


# -- lines -------------------------------------------------------------------------------------------------------------


def _series(report: TrafficReport) -> list[tuple[str, str, list[TrafficPoint]]]:
    """Name, colour and points of each line; those of the smaller groups added up."""
    groups: dict[tuple[object, ...], list[TrafficPoint]] = {}
    for point in report.series:
        groups.setdefault((point.store, point.topic, point.queue_id), []).append(point)
    lines = [
        (_short(" · ".join(str(each) for each in group if each is not None) or "all"), colour, points)
        for (group, points), colour in zip(groups.items(), _COLOURS, strict=False)
    ]
    rest: dict[int, tuple[int, int]] = {}
    for points in [*groups.values()][len(_COLOURS) :]:
        for point in points:
            messages, size = rest.get(point.start_ms, (0, 0))
            rest[point.start_ms] = messages + point.messages, size + point.bytes
    if rest:
        others = [TrafficPoint(None, None, None, start, *rest[start]) for start in sorted(rest)]
        lines.append((f"{len(groups) - len(_COLOURS)} others", _OTHERS, others))
    return lines


def _grid(points: Sequence[TrafficPoint], interval_ms: int) -> tuple[list[datetime], list[int], list[int]]:
    """With a zero for each interval in between that has no messages, unless these are very many."""
    found = {point.start_ms: (point.messages, point.bytes) for point in points}
    first, last = points[0].start_ms, points[-1].start_ms
    starts: Sequence[int] = range(first, last + 1, interval_ms)
    if len(starts) > _POINTS:  # an end for each stretch, so that lines drop to zero between them
        edges = {start + step for start in found for step in (-interval_ms, 0, interval_ms)}
        starts = sorted(edge for edge in edges if first <= edge <= last)
    values = [found.get(start, (0, 0)) for start in starts]
    times = [datetime.fromtimestamp(start / 1000, UTC) for start in starts]
    return times, [messages for messages, _ in values], [size for _, size in values]


# -- what all plots share ----------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _title(figure: Any, title: str, below: str) -> None:
    axes = figure.axes[0]
    axes.set_title(below, loc="left", fontsize=9.5, color="#555555", pad=10)
    style = {"fontsize": 13, "fontweight": "bold", "color": _INK}
    axes.annotate(title, (0, 1), (0, 27), xycoords="axes fraction", textcoords="offset points", **style)


def _clean(axes: Any, *, grid: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_OTHERS)
    axes.grid(axis=grid, color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, color=_OTHERS)


def _time_axis(axes: Any) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(tz=UTC, minticks=4, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))
    axes.set_xlabel("time of storing (UTC)")


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Under its name when it is complete."""
    where = Path(path)
    temporary = where.with_name(f".{where.name}.{os.getpid()}{where.suffix}")
    try:
        figure.savefig(temporary)
        os.replace(temporary, where)
    finally:
        temporary.unlink(missing_ok=True)


def _short(name: str) -> str:
    """A name as a label: printable, not too long, and nothing that matplotlib would typeset."""
    text = "".join(char if char.isprintable() else "?" for char in name).replace("$", r"\$")
    return text if len(text) <= _NAME else f"{text[: _NAME // 2]}…{text[-_NAME // 2 + 1 :]}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _length(ms: int) -> str:
    """A length of time, roughly."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms} ms"
