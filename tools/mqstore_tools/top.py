"""`mqstore top`: rates of topics, lags of groups, and what waits, right now."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mqstore.admin import operations
from mqstore_tools.render import Cells, json_asked, when
from mqstore_tools.session import as_cells, connected, target_argument
from mqstore_tools.shared import command
from mqstore_tools.watching import interval_option, watch

_WINDOW_MS = 10_000
"""Rates are those of this time, since a running program saves what groups have settled every few seconds."""
_SORTS = {"name": "name", "messages": "messages", "in": "in_per_s", "out": "out_per_s", "age": "oldest_age_ms"}
_SORTS |= {"flight": "in_flight", "dead": "dead_letters"}
"""Columns to sort by. The key of each is its first letter."""
_TOTALS = {"in/s>": "in_per_s", "out/s>": "out_per_s", "in flight>": "in_flight", "delayed>": "delayed"}
_TOTALS |= {"dead letters>": "dead_letters", "log>": "log_bytes", "free>": "free_bytes", "clients>": "clients"}
_TOPICS = {"topic": "name", "messages>": "messages", "in/s>": "in_per_s", "out/s>": "out_per_s"}
_GROUPS = {"group": "name", "lag>": "messages", "oldest is>": "oldest_age_ms", "in flight>": "in_flight"}
_GROUPS |= {"out/s>": "out_per_s", "dead>": "dead_letters", "clients>": "clients"}


@command(
    short_help="Show what happens right now. Changes nothing.",
    examples="""
  mqstore top var/mq
  mqstore top 127.0.0.1:9876 --sort age --match billing
  mqstore top var/mq --once
  mqstore top var/mq --interval 10 --json | jq -c '[.taken_ms, .in_per_s, .out_per_s]'""",
)
@target_argument
@click.option("--once", is_flag=True, help="Print one report, of the time between two looks.")
@click.option("--sort", type=click.Choice([*_SORTS]), default="messages", help="Sort by.")
@click.option("--match", metavar="TEXT", help="Only topics and groups with this text in their name.")
@interval_option
def top(target: Path, once: bool, sort: str, match: str | None, interval: float) -> None:
    """Show rates of topics, lags of groups, and what waits, every few seconds: as a page on a terminal, else as text.

    Rates are of the last ten seconds or the last interval. `in/s` counts messages that were stored, `out/s` those that
    groups have settled. `lag` includes messages in flight and retries that wait; `oldest is` is the age of the first
    message that a group has not settled. `delayed` messages wait for their time. `log` is the size of the log, and
    `free` the space left on its disk. `clients` are those of a server.

    The figures are those of the server that has the store in DIR open or listens at HOST:PORT. Without a server they
    are those on disk, which a running program saves every few seconds.

    Keys: n, m, i, o, a, f and d sort by name, messages, in, out, age, in flight and dead letters. / chooses names with
    the text that is typed, q quits. --json prints one object each interval.
    """
    looks, choice = deque([_look(target)]), _Choice(sort, match or "")

    def look() -> dict[str, Any]:
        looks.append(_look(target))
        while len(looks) > 2 and looks[-1]["taken_ms"] - looks[1]["taken_ms"] >= _WINDOW_MS:
            looks.popleft()
        view = _view(looks[0], looks[-1])
        return view | {name: choice.rows(view[name]) for name in ("topics", "groups")} if json_asked() else view

    time.sleep(min(interval, 1.0))
    keys: Any = {"press": choice.press, "hint": choice.hint}
    watch(look, choice.tables, interval=interval, once=once, **keys)


def _look(target: Path) -> dict[str, Any]:
    """Return `Operations.activity`, and the clients of the server, or None."""
    if (store := connected(target)) is None:
        return {**operations(target).activity(), "clients": None}
    with store:
        return {**store.admin.activity(), "clients": store.clients()}


def _view(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of `now`, and their growth since `before` in a second."""
    span_ms: int = max(1, now["taken_ms"] - before["taken_ms"])

    def per_s(grown: int) -> float:
        return round(max(0, grown) * 1000 / span_ms, 3)

    done: Counter[str] = Counter()
    members = None if now["clients"] is None else Counter(of["group"] for row in now["clients"] for of in row["groups"])
    topics, groups = [], []
    for name, row in now["groups"].items():
        total, earlier = [0, 0, 0], before["groups"].get(name, {"topics": {}})["topics"]
        for topic, (queues, settled, *waiting) in row["topics"].items():
            was = earlier.get(topic, [0])
            grown = max(0, settled - was[1]) if was[0] == queues else 0
            done[topic] += grown
            total = [a + b for a, b in zip(total, [grown, *waiting], strict=True)]
        found = {"messages": total[1], "oldest_age_ms": row["oldest_age_ms"], "in_flight": total[2]}
        found |= {"out_per_s": per_s(total[0]), "dead_letters": row["dead_letters"]}
        groups.append({"name": name, **found, "clients": None if members is None else members[name]})
    for name, (messages, end) in now["topics"].items():
        rates = {"in_per_s": per_s(end - before["topics"].get(name, [0, 0])[1]), "out_per_s": per_s(done[name])}
        topics.append({"name": name, "messages": messages, **rates})
    sums = {name: sum(row[name] for row in groups) for name in ("in_flight", "dead_letters")}
    rates = {"in_per_s": sum(row["in_per_s"] for row in topics), "out_per_s": per_s(done.total())}
    clients = None if now["clients"] is None else len(now["clients"])
    return {**now, "span_ms": span_ms, **rates, **sums, "clients": clients, "topics": topics, "groups": groups}


@dataclass
class _Choice:
    """Chosen rows and their order."""

    sort: str
    match: str
    typing: bool = False

    def press(self, key: str) -> bool:
        """Use a key. Returns True if it belongs to a text that is typed."""
        if not self.typing:
            self.sort = next((name for name in _SORTS if name[0] == key), self.sort)
            self.typing = key == "/"
            return False
        if key in "\r\n\x1b":
            self.typing, self.match = False, "" if key == "\x1b" else self.match
        else:
            self.match = self.match[:-1] if key in "\x7f\b" else self.match + key
        return True

    def hint(self) -> str:
        """Return the last line of the page."""
        keys = " ".join(f"{name[0]}={name}" for name in _SORTS)
        text = f"/{self.match}_ Enter, Esc=all" if self.typing else f"{keys} /{self.match or '=choose'} q=quit"
        return f"by {self.sort}: {text}"

    def rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the chosen rows, sorted: the name upwards, numbers downwards."""
        column = _SORTS[self.sort]
        chosen = sorted((row for row in rows if self.match in row["name"]), key=lambda row: row["name"])
        return chosen if column == "name" else sorted(chosen, key=lambda row: -(row.get(column) or 0))

    def tables(self, view: dict[str, Any]) -> list[Cells]:
        title = f"{view['store']} at {when(view['taken_ms'])}"
        parts = (
            (title, _TOTALS, [view]),
            ("", _TOPICS, self.rows(view["topics"])),
            ("", _GROUPS, self.rows(view["groups"])),
        )
        return [(title, [*of], [as_cells(row, " ".join(of.values())) for row in rows]) for title, of, rows in parts]
