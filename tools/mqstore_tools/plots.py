"""Pages of `mqstore report`: HTML elements, and plots as inline SVG. A page needs no script and no other file.

All text and all attributes pass `escaped`, and only elements made by `tag` are not escaped again. The output is ASCII.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count, groupby

from mqstore_tools.render import safe, show_bytes, when
from mqstore_tools.session import show_ms

STYLES = {
    "page": ("#ffffff", "#16181d", ""),
    "ink": ("#1b1f27", "#e6e8ec", ""),
    "soft": ("#5d6674", "#9aa3b2", ""),
    "line": ("#d9dde4", "#343a46", ""),
    "count": ("#2f6fd0", "#6ea2f2", "messages"),
    "live": ("#2f6fd0", "#6ea2f2", "needed by a group, or not consumed by any"),
    "consumed": ("#9bd0a8", "#3f7d54", "by every group of the topic"),
    "system": ("#b9a3e3", "#7a63b0", "records of mqstore itself"),
    "dead": ("#e8c268", "#94722a", "in no queue: deleted topics, unused ends of segments"),
    "damaged": ("#c9252d", "#ff5a5f", "not a whole record"),
}
"""Light and dark colour and meaning of each style. Paper has the light ones."""
_SHEET = """
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:60rem;margin:1.5rem auto;
padding:0 1rem;-webkit-print-color-adjust:exact;print-color-adjust:exact}
h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}
h3{font-size:.95rem;margin:1rem 0 .25rem}p,ul{margin:.4rem 0}.soft{color:var(--soft)}
li,p,td:first-child{overflow-wrap:anywhere}td:first-child{min-width:9rem}
table{border-collapse:collapse;width:100%;margin-bottom:1rem}
td,th{padding:.15rem .9rem .15rem 0;text-align:left;vertical-align:top;overflow-wrap:break-word}
th{font-weight:600;color:var(--soft)}tr{border-bottom:1px solid var(--line)}svg{display:block;width:100%}
.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.wide{width:30%;min-width:7rem;padding-right:0;vertical-align:middle}.bar{height:.7rem}
.key{display:inline-block;width:.8rem;height:.8rem;margin:0 .35rem 0 0;vertical-align:-.1rem}
.legend span{margin-right:1.2rem;white-space:nowrap}text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--line);fill:none}
@media print{body{font-size:9pt;margin:0;max-width:none}h2,h3,p{break-after:avoid}tr,svg,li{break-inside:avoid}}
"""
CELLS, _ROWS = 128, 40
"""Cells in a row of a strip, and rows of a strip."""
_WIDTH, _LEFT, _RIGHT, _HIGH = 760, 80, 750, 120
"""Width of a plot, left and right end of its area, and height of its area."""
_STEPS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800)
_WEEK_S, _COLUMNS = 604_800, 72


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(value: object) -> Html:
    """Return any text as HTML, with markup and unprintable characters escaped.

    >>> print(escaped("<b>\\x1b\\u202e'caf\\xe9"))
    &lt;b&gt;\\x1b\\u202e&#x27;caf&#233;
    """
    return Html(html.escape(safe(value)).encode("ascii", "xmlcharrefreplace").decode("ascii"))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """Return an element. Content that is not `Html` is escaped. `_` in the name of an attribute becomes `-`."""
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"' for key, value in attributes.items())
    inner = "".join(each if isinstance(each, Html) else escaped(each) for each in content)
    return Html(f"<{name}{words}>{inner}</{name}>")


def page(title: str, *content: Html) -> Html:
    light, dark = ("".join(f"--{name}:{each[at]};" for name, each in STYLES.items()) for at in (0, 1))
    fills = "".join(f".{name}{{fill:var(--{name});background:var(--{name})}}" for name in [*STYLES][4:])
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}"
    style = tag("style", Html(f":root{{color-scheme:light;{light}}}{dark}{fills}{_SHEET}"))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    metas = Html(f'<meta charset="us-ascii"><meta http-equiv="Content-Security-Policy" content="{policy}">')
    head = tag("head", metas, tag("title", title), style)
    return Html(f"<!DOCTYPE html>{tag('html', head, tag('body', *content), lang='en')}\n")


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Html:
    """Return a table. Columns whose name ends in `>` have numbers, and one named `|` has bars."""
    kinds = ["number" if name.endswith(">") else "wide" if name == "|" else "text" for name in columns]
    head = [tag("th", name.rstrip(">|"), class_=kind) for name, kind in zip(columns, kinds, strict=True)]
    body = (
        tag("tr", *(tag("td", _shown(cell), class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    )
    return tag("table", tag("thead", tag("tr", *head)), *body)


def _shown(cell: object) -> object:
    if isinstance(cell, int):
        return ("no", "yes")[cell] if isinstance(cell, bool) else f"{cell:,}"
    return "-" if cell is None else cell


def legend(*names: str) -> Html:
    parts = (tag("span", tag("i", class_=f"key {name}"), f"{name}: {STYLES[name][2]}") for name in names)
    return tag("p", *parts, class_="legend soft")


def bar(parts: Mapping[str, int], largest: int) -> Html:
    """Return a bar of values by style, as long as their share of `largest`. Larger ones, which are sums, have none."""
    rects, at = [], 0.0
    for style, value in parts.items() if 0 < sum(parts.values()) <= largest else ():
        width = max(0.5 * (value > 0), 100 * value / largest)
        rects.append(tag("rect", x=f"{at:.2f}", width=f"{width:.2f}", height=1, class_=style))
        at += width
    return tag("svg", *rects, viewBox="0 0 100 1", preserveAspectRatio="none", class_="bar", aria_hidden="true")


def interval_ms(span_ms: int) -> int:
    """Return the length of an interval of which at most 72 cover a time.

    >>> interval_ms(0), interval_ms(7_200_000), interval_ms(10**12)
    (1000, 120000, 19353600000)
    """
    steps_ms = (step * 1000 for step in chain(_STEPS_S, (_WEEK_S << number for number in count())))
    return next(step for step in steps_ms if span_ms // step < _COLUMNS - 1)


def short(number: float) -> str:
    return f"{number:,}" if number < 1e7 else f"{number:.3g}"


def columns(rows: Iterable[Sequence[int]], title: str, show: Callable[[int], str] = short) -> Html:
    """Return a plot of (time in ms, value > 0) as at most 72 columns."""
    points = sorted((row[0], row[1]) for row in rows)
    step = interval_ms(points[-1][0] - points[0][0])
    first = points[0][0] // step
    sums = [0] * (points[-1][0] // step - first + 1)
    for at, value in points:
        sums[at // step - first] += value
    wide, most, marks = (_RIGHT - _LEFT) / len(sums), max(sums), []
    for value in sorted({0, most // 2, most}):
        y = 8 + _HIGH * (1 - value / most)
        marks.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        marks.append(tag("text", show(value), x=_LEFT - 8, y=f"{y + 4:.1f}", text_anchor="end"))
    for part in range(5) if len(sums) > 4 else (0, 4)[: len(sums)]:
        number, anchor = part * len(sums) // 4, "end" if part == 4 else "middle"
        label = when((first + number) * step or 1)[: 16 if step >= 60_000 else 19]
        marks.append(tag("text", label, x=f"{_LEFT + number * wide:.1f}", y=_HIGH + 24, text_anchor=anchor))
    for number, value in enumerate(sums):
        high = max(1, _HIGH * value / most)
        box = {"x": _LEFT + number * wide, "y": 8 + _HIGH - high, "width": min(40, wide * 0.85), "height": high}
        marks += [tag("rect", **{name: f"{size:.1f}" for name, size in box.items()}, class_="count")] if value else []
    svg = tag("svg", *marks, viewBox=f"0 0 {_WIDTH} {_HIGH + 32}", role="img", aria_label=title)
    return tag("div", tag("h3", f"{title} per {show_ms(step)}"), svg)


def cell_bytes(segments: int, segment_bytes: int) -> int:
    """Return the size of the cells of a map of the log. A row of a strip has whole segments."""
    return max(1, -(-segments // _ROWS) * segment_bytes // CELLS)


def strip(start: int, cell: int, kinds: Sequence[str | None]) -> Html:
    """Return a strip of the styles of cells of `cell` bytes each, wrapped into rows. None is empty."""
    marks, wide = [], (_RIGHT - 146) / CELLS
    for y, row in enumerate(range(0, len(kinds), CELLS)):
        line = kinds[row : row + CELLS]
        marks.append(tag("text", f"{start + row * cell:,}", x=138, y=y * 14 + 11, text_anchor="end"))
        marks.append(tag("rect", x=146, y=y * 14 + 1, width=f"{len(line) * wide:.1f}", height=12, class_="grid"))
        at = 0
        for kind, same in groupby(line):
            number = sum(1 for _ in same)
            if kind is not None:
                label = tag("title", f"{kind}: {show_bytes(number * cell)} from byte {start + (row + at) * cell}")
                box = {"x": f"{146 + at * wide:.1f}", "y": y * 14 + 1, "width": f"{number * wide:.1f}"}
                marks.append(tag("rect", label, **box, height=12, class_=kind))
            at += number
    high = -(-len(kinds) // CELLS) * 14 + 2
    return tag("svg", *marks, viewBox=f"0 0 {_WIDTH} {high}", role="img", aria_label="map of the log")
