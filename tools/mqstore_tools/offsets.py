"""`mqstore offsets`: set where consumer groups go on. `mqstore lag` shows where they are."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import click

from mqstore.broker.admin.offline import offline
from mqstore.broker.parts import Tables
from mqstore.broker.reading import Reads
from mqstore.log.commitlog import QueueRef
from mqstore_tools.opened import ask, dry_run_option, moment, planning, yes_option
from mqstore_tools.render import console, print_json, safe, table
from mqstore_tools.shared import StoreCommand, directory_argument, json_option

__all__ = ["offsets"]

To = Literal["earliest", "latest"] | datetime | int
_WORDS: dict[str, Literal["earliest", "latest"]] = {"earliest": "earliest", "latest": "latest"}


@click.group(
    short_help="Reset where groups go on.",
    epilog="""\b
Examples:
  mqstore offsets reset var/mq --group billing --topic orders --to earliest --dry-run""",
)
def offsets() -> None:
    """Reset the offsets at which consumer groups go on. `mqstore lag --group` shows them."""


def _to(value: Any) -> To:
    """The type of `--to`."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return _WORDS.get(value) or moment(value)


@offsets.command(
    cls=StoreCommand,
    short_help="Let a group go on somewhere else.",
    epilog="""\b
Examples:
  mqstore offsets reset var/mq --group billing --topic orders --to earliest --dry-run
  mqstore offsets reset var/mq --group billing --topic orders --to 2026-01-31T12:00:00Z
  mqstore offsets reset var/mq --group billing --topic orders --to 36h --yes
  mqstore offsets reset var/mq --group billing --topic orders --queue-id 2 --to 1500""",
)
@directory_argument
@click.option("--group", required=True, help="The group.")
@click.option("--topic", required=True)
@click.option("--queue-id", type=click.IntRange(0), help="One queue; without it all.")
@click.option(
    "--to",
    "to",
    type=_to,
    metavar="WHERE",
    required=True,
    help="earliest, latest, a queue offset, a time (UTC unless it says otherwise) or an age (36h): the first message "
    "stored since.",
)
@dry_run_option
@yes_option
@json_option
def reset(
    directory: Path,
    group: str,
    topic: str,
    queue_id: int | None,
    to: To,
    dry_run: bool,
    yes: bool,
    json_output: bool,
) -> None:
    """Let a group go on at another place of a topic in the store in DIR.

    Asks first: messages that are skipped are not delivered to the group, others are delivered again, and what it has in
    flight in these queues is forgotten.
    """
    with planning(directory) as tables:
        queues = range(tables.topics.need(topic).read_queues)
        before = {queue: tables.offsets.committed(group, topic, queue) for queue in queues}
        # In memory only: the tables of a store that is read are never written.
        planned = Reads(tables).reset(group, topic, queue_id, to)
        rows = _changes(tables, planned, before)
    if dry_run:
        _tell(group, rows, dry_run=True, json_output=json_output)
        return
    if not yes:
        _tell(group, rows, dry_run=True, json_output=False, stderr=True)
    ask(safe(f"Let group {group} go on there?"), yes=yes)
    with offline(directory) as desk:
        done = desk.reset(group, topic, queue_id, to)
        rows = _changes(desk.parts, done, before)
    _tell(group, rows, dry_run=False, json_output=json_output)


def _changes(tables: Tables, targets: dict[QueueRef, int], before: dict[int, int | None]) -> list[dict[str, Any]]:
    """A row a queue. `skipped`: messages the group will not get; `again`: those that it gets once more."""
    rows = []
    for ref, target in sorted(targets.items()):
        low = max((tables.store.offsets_or_none(*ref) or (0, 0))[0], tables.offsets.start_of(*ref))
        old = before.get(ref.queue_id)
        at = low if old is None else max(low, old)
        rows.append(
            {
                "topic": ref.topic,
                "queue_id": ref.queue_id,
                "from": old,
                "to": target,
                "skipped": max(0, target - at),
                "again": max(0, at - target),
            }
        )
    return rows


def _tell(group: str, rows: list[dict[str, Any]], *, dry_run: bool, json_output: bool, stderr: bool = False) -> None:
    title = f"{'would reset' if dry_run else 'reset'} group {group}"
    columns = ("topic", "queue>", "from>", "to>", "skipped>", "again>")
    if json_output:
        print_json({"dry_run": dry_run, "group": group, "queues": rows})
    else:
        console(stderr=stderr).print(table(title, columns, [row.values() for row in rows]))
