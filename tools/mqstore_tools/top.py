"""`mqstore top` shows rates, lags and waiting messages of a store, live."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mqstore.admin import operations
from mqstore_tools.render import Cells, pick, show_bytes, when
from mqstore_tools.session import connected, show_ms, target_argument
from mqstore_tools.shared import StoreCommand, json_option
from mqstore_tools.watching import interval_option, show_once, watch

_WINDOW_MS = 10_000
"""Rates are those of this time: a running program saves what groups have settled every few seconds."""
_SORTS = {
    "name": "name",
    "messages": "messages",
    "in": "in_per_s",
    "out": "out_per_s",
    "age": "oldest_age_ms",
    "flight": "in_flight",
    "dead": "dead_letters",
}
"""Columns to sort by. The key of each is its first letter."""
_SHOWN = ("topics and groups", "topics", "groups")


@dataclass
class _Choice:
    """Selection and order of the rows."""

    sort: str
    match: str
    shown: int = 0
    typing: bool = False

    def press(self, key: str) -> bool:
        """Use a key. Returns False if it means nothing here."""
        if self.typing:
            if key in "\n\r\x1b":
                self.typing, self.match = False, "" if key == "\x1b" else self.match
            else:
                self.match = self.match[:-1] if key in "\x7f\b" else self.match + key
            return True
        self.sort = next((name for name in _SORTS if name[0] == key), self.sort)
        self.shown = (self.shown + (key == "\t")) % len(_SHOWN)
        self.typing = key == "/"
        return key == "/"

    def hint(self) -> str:
        if self.typing or self.match:
            return f"/{self.match}" + ("_  (Enter, Esc)" if self.typing else "  by " + self.sort)
        return f"sort: {' '.join(f'{name[0]}={name}' for name in _SORTS)} ({self.sort})  / Tab q"

    def rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the chosen rows, sorted: the name upwards, numbers downwards."""
        column = _SORTS[self.sort]
        chosen = sorted((row for row in rows if self.match in row["name"]), key=lambda row: row["name"])
        return chosen if column == "name" else sorted(chosen, key=lambda row: -(row.get(column) or 0))

    def tables(self, view: dict[str, Any]) -> list[Cells]:
        totals = "in_per_s out_per_s in_flight delayed dead_letters"
        sizes = [show_bytes(view[name]) for name in ("log_bytes", "free_bytes")]
        head = [*_rates(pick(view, totals)), *sizes, view["clients"]]
        found: list[Cells] = [(f"{view['store']} at {when(view['taken_ms'])}", _TOTALS, [head])]
        if self.shown != 2:
            names = "name messages in_per_s out_per_s"
            found.append(("", _TOPICS, [_rates(pick(row, names)) for row in self.rows(view["topics"])]))
        if self.shown != 1:
            names = "in_flight out_per_s dead_letters clients"
            cells = [
                [*pick(row, "name messages"), show_ms(row["oldest_age_ms"]), *_rates(pick(row, names))]
                for row in self.rows(view["groups"])
            ]
            found.append(("", _GROUPS, cells))
        return found


_TOTALS = ("in/s>", "out/s>", "in flight>", "delayed>", "dead letters>", "log>", "free>", "clients>")
_TOPICS = ("topic", "messages>", "in/s>", "out/s>")
_GROUPS = ("group", "lag>", "oldest is>", "in flight>", "out/s>", "dead>", "clients>")


def _rates(cells: list[Any]) -> list[Any]:
    return [f"{cell:.1f}" if isinstance(cell, float) else cell for cell in cells]


@click.command(
    cls=StoreCommand,
    short_help="Show what happens right now. Changes nothing.",
    epilog="""\b
Examples:
  mqstore top var/mq
  mqstore top 127.0.0.1:9876 --sort age --match billing
  mqstore top var/mq --once
  mqstore top var/mq --interval 10 --json | jq -c '[.taken_ms, .in_per_s, .out_per_s]'""",
)
@target_argument
@click.option("--once", is_flag=True, help="Print one report, of the messages between two looks.")
@click.option("--sort", type=click.Choice([*_SORTS]), default="messages", show_default=True, help="Sort by.")
@click.option("--match", default="", metavar="TEXT", help="Only topics and groups with this text in their name.")
@interval_option
@json_option
def top(target: Path, once: bool, sort: str, match: str, interval: float, json_output: bool) -> None:
    """Show rates of topics, lags of groups, and what waits, every few seconds: as a page on a terminal, else as text.

    Rates are of the last ten seconds or the last interval. `in/s` counts messages that were stored, `out/s` those that
    groups have settled. `lag` includes messages in flight and retries that wait; `oldest is` is the age of the first
    message that a group has not settled. `delayed` messages wait for their time. `log` is the size of the log, and
    `free` the space left on its disk. `clients` are those of a server.

    The figures are those of the server that has the store in DIR open or listens at HOST:PORT. Without a server they
    are those on disk, which a running program saves every few seconds.

    Keys: n, m, i, o, a, f and d sort by name, messages, in, out, age, in flight and dead letters. / chooses names with
    the text that is typed, Tab topics or groups or both, q quits. --json prints one object each interval.
    """
    looks: deque[dict[str, Any]] = deque([_look(target)])
    choice = _Choice(sort, match)

    def look() -> dict[str, Any]:
        looks.append(_look(target))
        while len(looks) > 2 and looks[-1]["taken_ms"] - looks[1]["taken_ms"] >= _WINDOW_MS:
            looks.popleft()
        view = _view(looks[0], looks[-1])
        return view | {name: choice.rows(view[name]) for name in ("topics", "groups")} if json_output else view

    time.sleep(min(interval, 1.0))
    if once:
        show_once(look(), choice.tables, json_output=json_output)
    else:
        watch(look, choice.tables, interval=interval, json_output=json_output, press=choice.press, hint=choice.hint)


def _look(target: Path) -> dict[str, Any]:
    """Return `Operations.activity`, and the clients of the server, or None."""
    store = connected(target)
    if store is None:
        return {**operations(target).activity(), "clients": None}
    with store:
        return {**store.admin.activity(), "clients": store.clients()}


def _view(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a report: the counts of `now`, and their growth since `before` in a second."""
    span_s: float = max(1, now["taken_ms"] - before["taken_ms"]) / 1000

    def per_s(grown: int) -> float:
        return round(max(0, grown) / span_s, 3)

    done: dict[str, dict[str, int]] = {}
    for group, row in now["groups"].items():
        earlier = before["groups"].get(group, {"topics": {}})["topics"]
        for topic, sums in row["topics"].items():
            was = earlier.get(topic)
            compared = was is not None and was["queues"] == sums["queues"]
            done.setdefault(group, {})[topic] = max(0, sums["done"] - was["done"]) if compared else 0
    members: list[str] = [each["group"] for client in now["clients"] or () for each in client["groups"]]
    topics = [
        {
            "name": name,
            "messages": row["messages"],
            "in_per_s": per_s(row["end"] - before["topics"].get(name, {"end": 0})["end"]),
            "out_per_s": per_s(sum(by_topic.get(name, 0) for by_topic in done.values())),
        }
        for name, row in now["topics"].items()
    ]
    groups = [
        {
            "name": name,
            "messages": sum(sums["messages"] for sums in row["topics"].values()),
            "oldest_age_ms": row["oldest_age_ms"],
            "in_flight": sum(sums["in_flight"] for sums in row["topics"].values()),
            "out_per_s": per_s(sum(done.get(name, {}).values())),
            "dead_letters": row["dead_letters"],
            "clients": None if now["clients"] is None else members.count(name),
        }
        for name, row in now["groups"].items()
    ]
    return {
        **{name: now[name] for name in ("store", "taken_ms", "log_bytes", "free_bytes", "delayed")},
        "span_ms": now["taken_ms"] - before["taken_ms"],
        "in_per_s": round(sum(row["in_per_s"] for row in topics), 3),
        "out_per_s": round(sum(row["out_per_s"] for row in groups), 3),
        "in_flight": sum(row["in_flight"] for row in groups),
        "dead_letters": sum(row["dead_letters"] for row in groups),
        "clients": None if now["clients"] is None else len(now["clients"]),
        "topics": topics,
        "groups": groups,
    }
