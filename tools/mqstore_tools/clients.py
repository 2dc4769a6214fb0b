"""`mqstore clients`: show who is connected to a server, and members of a group that subscribe differently."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from mqstore_tools.render import Cells, pick, show_tables
from mqstore_tools.session import server_of, show_ms, target_argument
from mqstore_tools.shared import command, finish


@command(
    short_help="Show who is connected to a server. Changes nothing.",
    examples="""
  mqstore clients var/mq
  mqstore clients 127.0.0.1:9876 --json | jq -r '.clients[].client_id'
  mqstore clients var/mq --conflicts || page-somebody""",
)
@target_argument
@click.option("--conflicts", is_flag=True, help="Only groups whose members subscribe differently. Exit with 1 if any.")
def clients(target: Path, conflicts: bool) -> None:
    """Show the clients of the server that has the store in DIR open, or listens at HOST:PORT.

    These are RocketMQ's clients, and processes that called `mqstore.connect`. A client without groups sends or reads
    only. The last heartbeat is the last request of a client that sends none. Waiting calls are receives without a
    message, for example.

    Members of a group that subscribe differently get messages that they do not want, and skip others. RocketMQ's
    clients cannot be refused, so such groups are shown here.
    """
    with server_of(target) as store:
        found = store.clients()
    differing = list(_conflicts(found))
    groups = [(row["group"], *_member(each)) for row in differing for each in row["members"]]
    tables: list[Cells] = [("members that subscribe differently", _MEMBERS, groups)] if groups else []
    shown: dict[str, Any] = {"conflicts": differing}
    if not conflicts:
        shown = {"clients": found, **shown}
        members = [(each["group"], *_member(each)) for row in found for each in row["groups"]]
        tables = [("", _CLIENTS, [*map(_cells, found)]), *([("", _MEMBERS, members)] if members else []), *tables]
    show_tables(shown, *tables, empty="no conflicts" if conflicts else "no clients")
    finish(conflicts and differing)


_CLIENTS = ("client", "address", "language", "version", "produces for", "heartbeat", "waiting calls>")
_MEMBERS = ("group", "client", "mode", "subscriptions")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    seen_ms = max(0, time.time_ns() // 1_000_000 - row["seen_ms"])
    produces = " ".join(row["produces"]) or "-"
    return (*pick(row, "client_id peer language version"), produces, show_ms(seen_ms), row["parked"])


def _member(row: dict[str, Any]) -> tuple[object, ...]:
    found = [" ".join(pick(each, "topic kind expression")) for each in row["subscriptions"]]
    return row["client_id"], row["mode"], ", ".join(found) or "-"


def _conflicts(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each group whose members do not subscribe alike, or of which only some broadcast."""
    members: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for each in row["groups"]:
            members.setdefault(each["group"], []).append(each)
    for group, each_of in sorted(members.items()):
        if len({_meaning(each) for each in each_of}) > 1:
            yield {"group": group, "members": [{k: v for k, v in each.items() if k != "group"} for each in each_of]}


def _meaning(member: dict[str, Any]) -> tuple[object, ...]:
    """Return a value that is the same for members that receive the same messages."""
    wanted = [
        (each["topic"], each["kind"], *sorted(tag.strip() for tag in each["expression"].split("||")))
        if each["kind"] == "TAG"
        else (each["topic"], each["kind"], each["expression"].strip())
        for each in member["subscriptions"]
    ]
    return "broadcasting" in member["mode"], *wanted
