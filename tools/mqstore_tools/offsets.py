"""`mqstore offsets`: show and reset committed offsets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from mqstore_tools.render import safe, show_tables
from mqstore_tools.session import (
    DefaultGroup,
    Position,
    administer,
    ask,
    dry_run_option,
    examine,
    position,
    target_argument,
    yes_option,
)


@click.group(
    cls=DefaultGroup,
    short_help="Show and reset committed offsets.",
    examples="""
  mqstore offsets var/mq                      # the same as: mqstore offsets show var/mq
  mqstore offsets var/mq --group billing --json
  mqstore offsets reset var/mq --group billing --topic orders --to earliest --dry-run""",
)
def offsets() -> None:
    """Show and reset the committed offsets of consumer groups.

    `show` only reads, and works while a broker runs. `reset` takes the writer's lock, or lets the server do it that has
    the store open. See `mqstore offsets COMMAND --help`.
    """


@offsets.command(
    short_help="Show committed offsets. Changes nothing.",
    examples="""
  mqstore offsets show var/mq --group billing
  mqstore offsets show var/mq --topic orders --json""",
)
@target_argument
@click.option("--group", help="Only this group.")
@click.option("--topic", help="Only this topic.")
def show(target: Path, group: str | None, topic: str | None) -> None:
    """Show the committed offsets of the groups in the store in DIR, and the first and end offsets of the queues.

    For a group that pops, the next offset is that of the first unsettled message, and all unsettled messages count as
    lag, as in `mqstore lag`. `-` (null in JSON) means that the group has not started in that queue.

    The figures are those on disk. A running broker saves a commit shortly after it is made, and the offsets of groups
    that pop every few seconds.
    """
    with examine(target) as desk:
        rows = [
            {
                "group": lag.group,
                "topic": lag.topic,
                "queue_id": lag.queue_id,
                "min_offset": lag.first,
                "committed": lag.committed,
                "max_offset": lag.end,
                "behind": None if lag.committed is None else lag.messages,
                "lost": lag.lost,
            }
            for lag in desk.lag(group, topic)
        ]
    columns = ("group", "topic", "queue>", "first>", "next offset>", "end>", "behind>", "lost>")
    cells = [row.values() for row in rows]
    show_tables({"offsets": rows}, ("", columns, cells), empty="no group has committed offsets")


def _to(value: Any) -> Position | int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return position(value)


@offsets.command(
    short_help="Move a group's committed offset in a topic.",
    examples="""
  mqstore offsets reset var/mq --group billing --topic orders --to earliest --dry-run
  mqstore offsets reset var/mq --group billing --topic orders --to 2026-01-31T12:00:00Z
  mqstore offsets reset var/mq --group billing --topic orders --to 36h --yes
  mqstore offsets reset var/mq --group billing --topic orders --queue-id 2 --to 1500""",
)
@target_argument
@click.option("--group", required=True, help="Consumer group to move.")
@click.option("--topic", required=True, help="Topic in which to move it.")
@click.option("--queue-id", type=click.IntRange(0), help="Only this queue.")
@click.option(
    "--to",
    "to",
    type=_to,
    metavar="WHERE",
    required=True,
    help="earliest, latest, a queue offset, or the first message stored since a time (UTC by default) or an age (36h).",
)
@dry_run_option
@yes_option
def reset(target: Path, group: str, topic: str, queue_id: int | None, to: Any, dry_run: bool, yes: bool) -> None:
    """Move a group's committed offset in a topic of the store in DIR.

    Asks first. Skipped messages are not delivered to the group, messages after the new offset are delivered again, and
    its deliveries in flight in these queues are forgotten.
    """
    with administer(target) as desk:
        rows = _changes(desk.reset(group, topic, to, queue_id, dry_run=True))
        if dry_run:
            _report(group, rows, dry_run=True)
            return
        if not yes:
            _report(group, rows, dry_run=True, stderr=True)
        ask(safe(f"Move the offsets of group {group}?"), yes=yes)
        rows = _changes(desk.reset(group, topic, to, queue_id))
    _report(group, rows, dry_run=False)


def _changes(moves: Iterable[Any]) -> list[dict[str, Any]]:
    """Return a row per queue, with the number of messages `skipped` and of those delivered `again`."""
    rows = []
    for move in moves:
        at = move.first if move.before is None else max(move.first, move.before)
        rows.append(
            {
                **move.queue._asdict(),
                "from": move.before,
                "to": move.to,
                "skipped": max(0, move.to - at),
                "again": max(0, at - move.to),
            }
        )
    return rows


def _report(group: str, rows: list[dict[str, Any]], *, dry_run: bool, stderr: bool = False) -> None:
    title = f"{'would reset' if dry_run else 'reset'} group {group}"
    columns = ("topic", "queue>", "from>", "to>", "skipped>", "again>")
    found = {"dry_run": dry_run, "group": group, "queues": rows}
    cells = [row.values() for row in rows]
    show_tables(found, (title, columns, cells), stderr=stderr)
