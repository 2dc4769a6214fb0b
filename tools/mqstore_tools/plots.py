"""Pages of `mqstore report`: HTML elements, and plots as inline SVG. A page needs no script and no other file.

All text and all attributes pass `escaped`. Only what `tag` made is put into a page as it is. The output is ASCII.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mqstore_tools.render import safe, show_bytes, when

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
CELLS, _ROWS = 128, 40
"""Cells in a row of a strip, and rows of a strip."""
_WIDTH, _LEFT, _HIGH = 760, 80, 120
"""Width of a plot, that of its labels at the left, and height of its area."""
_STEPS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800)
_COLUMNS = 72


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


def join(parts: Iterable[Html]) -> Html:
    return Html("".join(parts))


def short(number: float) -> str:
    """Return a number as text of few characters.

    >>> short(999_999), short(12_345_678), short(9.3e18)
    ('999,999', '12.3 M', '9.3 E')
    """
    if abs(number) < 1e6:
        return f"{number:,.0f}"
    power = min(6, (len(str(int(abs(number)))) - 1) // 3)
    return f"{number / 1000**power:.1f} {' kMGTPE'[power]}"


def css() -> Html:
    """Return the style sheet of a page."""
    light, dark = ("".join(f"--{name}:{colours[at]};" for name, colours in STYLES.items()) for at in (0, 1))
    fills = "".join(f".{name}{{fill:var(--{name});background:var(--{name})}}" for name in [*STYLES][4:])
    return Html(
        f"<style>:root{{color-scheme:light;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}{fills}{_SHEET}</style>"
    )


_SHEET = """
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:60rem;margin:1.5rem auto;
padding:0 1rem;-webkit-print-color-adjust:exact;print-color-adjust:exact}
h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}
h3{font-size:.95rem;margin:1rem 0 .25rem}p,ul{margin:.4rem 0}.soft{color:var(--soft)}
li,p,td:first-child{overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;margin-bottom:1rem}
td,th{padding:.15rem .9rem .15rem 0;text-align:left;vertical-align:top;overflow-wrap:break-word}
th{font-weight:600;color:var(--soft)}tr{border-bottom:1px solid var(--line)}
.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.wide{width:30%;min-width:7rem;padding-right:0;vertical-align:middle}svg{display:block;width:100%}
.bar{height:.7rem}.key{display:inline-block;width:.8rem;height:.8rem;margin:0 .35rem 0 0;vertical-align:-.1rem}
.legend span{margin-right:1.2rem;white-space:nowrap}
text{fill:var(--soft);font-size:11px}.grid{stroke:var(--line)}.curve{stroke:var(--count);fill:none;stroke-width:2}
@media print{body{font-size:9pt;margin:0;max-width:none}h2,h3{break-after:avoid}tr,svg,li{break-inside:avoid}}
"""


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Html:
    """Return a table. Columns whose name ends in `>` have numbers, and those named `|` have bars."""
    kinds = [
        {"class_": "number"} if name.endswith(">") else {"class_": "wide"} if name == "|" else {} for name in columns
    ]
    head = join(tag("th", name.rstrip(">|"), **kind) for name, kind in zip(columns, kinds, strict=True))
    body = (
        tag("tr", *(tag("td", _shown(cell), **kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows
    )
    return tag("table", tag("tr", head) if any(columns) else Html(), *body)


def _shown(cell: object) -> object:
    return "-" if cell is None else ("no", "yes")[cell] if isinstance(cell, bool) else cell


def legend(names: Iterable[str]) -> Html:
    parts = (tag("span", tag("i", class_=f"key {name}"), f"{name}: {STYLES[name][2]}") for name in names)
    return tag("p", *parts, class_="legend soft")


def bar(parts: Mapping[str, int], largest: int) -> Html:
    """Return a bar of values by style, as long as their share of `largest`. Larger ones, which are sums, have none."""
    rects, at = [], 0.0
    for style, value in parts.items() if sum(parts.values()) <= largest else ():
        width = max(0.5, 100 * value / max(1, largest)) if value > 0 else 0
        rects.append(tag("rect", x=round(at, 2), width=round(width, 2), height=1, class_=style))
        at += width
    return tag("svg", *rects, viewBox="0 0 100 1", preserveAspectRatio="none", class_="bar", aria_hidden="true")


def columns(
    rows: Iterable[Sequence[int]], title: str, show: Callable[[float], str] = short, *, line: bool = False
) -> Html:
    """Return a plot of (time in ms, value) as columns or as a line, in intervals that make at most 72 columns."""
    points = [(at, value) for at, value in rows if value]
    low, high = min(at for at, _ in points), max(at for at, _ in points)
    step = next_step((high - low) // 1000)
    first = low // step
    sums = [0] * (high // step - first + 1)
    for at, value in points:
        sums[at // step - first] += value
    wide, most = (_WIDTH - _LEFT - 10) / len(sums), max(sums)
    marks: list[Html] = []
    for value in {0, most // 2, most} if most > 1 else {0, most}:
        y = 8 + _HIGH * (1 - value / most)
        marks += [
            tag("line", x1=_LEFT, x2=_WIDTH - 10, y1=round(y, 1), y2=round(y, 1), class_="grid"),
            tag("text", show(value), x=_LEFT - 8, y=round(y + 4, 1), text_anchor="end"),
        ]
    for part in range(5) if len(sums) >= 5 else (0, 4) if len(sums) > 1 else (0,):
        number = part * len(sums) // 4
        label = when((first + number) * step or 1)[: 16 if step >= 60_000 else 19]
        anchor = "end" if part == 4 else "middle"
        marks.append(tag("text", label, x=round(_LEFT + number * wide, 1), y=_HIGH + 24, text_anchor=anchor))
    tops = [(round(_LEFT + n * wide, 1), round(8 + _HIGH * (1 - value / most), 1)) for n, value in enumerate(sums)]
    if line and len(sums) > 1:
        path = " ".join(f"{round(x + wide / 2, 1)},{y}" for x, y in tops)
        marks.append(tag("polyline", points=path, class_="curve"))
    else:
        marks += [
            tag(
                "rect",
                x=x,
                y=min(y, _HIGH + 7),
                width=round(min(40, wide * 0.85), 1),
                height=round(max(1, _HIGH + 8 - y), 1),
                class_="count",
            )
            for (x, y), value in zip(tops, sums, strict=True)
            if value
        ]
    heading = tag("h3", f"{title}, by {_words(step // 1000)}")
    return join([heading, tag("svg", *marks, viewBox=f"0 0 {_WIDTH} {_HIGH + 32}", role="img", aria_label=title)])


def next_step(span_s: int) -> int:
    """Return the length of an interval (ms) of which at most 72 cover a time.

    >>> next_step(0), next_step(7200), next_step(10**9)
    (1000, 120000, 14515200000)
    """
    step = next((each for each in _STEPS_S if span_s // each < _COLUMNS - 1), _STEPS_S[-1])
    while span_s // step >= _COLUMNS - 1:
        step *= 2
    return step * 1000


def _words(seconds: int) -> str:
    units = ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))
    size, unit = next(each for each in units if seconds % each[0] == 0)
    count = seconds // size
    return unit if count == 1 else f"{count:,} {unit}s"


def cell_bytes(log_bytes: int, segment_bytes: int) -> int:
    """Return the size of the cells of a map of the log. A row of a strip has whole segments."""
    segments = max(1, -(-log_bytes // max(1, segment_bytes)))
    return max(1, -(-segments // _ROWS) * segment_bytes // CELLS)


def strip(start: int, cell: int, kinds: Sequence[str | None]) -> Html:
    """Return a strip of the styles of cells of `cell` bytes each, wrapped into rows. None is empty."""
    marks, wide = [], (_WIDTH - 150) / CELLS
    rows = -(-len(kinds) // CELLS)
    for row in range(rows):
        line = kinds[row * CELLS : (row + 1) * CELLS]
        at, y = start + row * CELLS * cell, row * 14
        marks.append(tag("text", f"{at:,}" if at < 1e13 else f"{at:.3e}", x=138, y=y + 11, text_anchor="end"))
        marks.append(
            tag("rect", x=146, y=y + 1, width=round(len(line) * wide, 1), height=12, class_="grid", fill="none")
        )
        begin = 0
        for end in range(1, len(line) + 1):
            if end == len(line) or line[end] != line[begin]:
                if (kind := line[begin]) is not None:
                    label = tag("title", f"{kind}: {show_bytes((end - begin) * cell)} from byte {at + begin * cell}")
                    box = {"x": round(146 + begin * wide, 1), "y": y + 1, "width": round((end - begin) * wide, 1)}
                    marks.append(tag("rect", label, **box, height=12, class_=kind))
                begin = end
    return tag("svg", *marks, viewBox=f"0 0 {_WIDTH} {rows * 14 + 2}", role="img", aria_label="map of the log")


def page(title: str, *content: Any) -> Html:
    policy = tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'")
    metas = (
        f'<meta charset="us-ascii">{policy.removesuffix("</meta>")}<meta name="viewport" content="width=device-width">'
    )
    head = tag("head", Html(metas), tag("title", title), css())
    return Html(f"<!DOCTYPE html>{tag('html', head, tag('body', *content), lang='en')}\n")
