"""`mqstore dlq`: show, replay and purge dead letters."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from mqstore.admin import look
from mqstore_tools.multi_store import on_spark, spark_option, stores_argument
from mqstore_tools.render import (
    body_bytes_option,
    json_asked,
    note,
    print_if_json,
    print_message,
    progress,
    safe,
    show_tables,
    when,
)
from mqstore_tools.session import (
    DefaultGroup,
    administer,
    connected,
    dry_run_option,
    is_address,
    moment,
    purge_after_asking,
    target_argument,
    to_ms,
    yes_option,
)
from mqstore_tools.shared import finish

_before_option = click.option(
    "--before",
    type=moment,
    metavar="TIME",
    help="Only dead letters stored before a time (UTC by default) or an age (30d).",
)
_offset_option = click.option(
    "--offset", "chosen", type=click.IntRange(0), multiple=True, help="Only this offset; may be repeated."
)


@click.group(
    cls=DefaultGroup,
    short_help="Show, replay and purge dead letters.",
    examples="""
  mqstore dlq fleet/*                         # the same as: mqstore dlq list fleet/*
  mqstore dlq show var/mq --group billing --json
  mqstore dlq replay var/mq --group billing --dry-run
  mqstore dlq purge var/mq --group billing --before 30d""",
)
def dlq() -> None:
    """Show, replay or purge dead letters: messages that failed in all attempts of a group.

    `list` and `show` only read, and work while a broker runs. The others take the writer's lock, or let the server do
    it that has the store open. See `mqstore dlq COMMAND --help`.
    """


@dlq.command(
    "list",
    short_help="Count dead letters. Changes nothing.",
    examples="""
  mqstore dlq list fleet/*                    # number and reasons, by group
  mqstore dlq list var/mq --group billing --before 7d""",
)
@stores_argument
@click.option("--group", "groups", multiple=True, help="Only dead letters of this group; may be repeated.")
@_before_option
@spark_option
def list_(stores: tuple[str, ...], groups: tuple[str, ...], before: datetime | None, master: str | None) -> None:
    """Count the dead letters of the stores in DIR by group and original topic.
    Also shows their age and the most frequent reasons. `mqstore dlq show` prints the dead letters of a group."""
    from mqstore.jobs import dlq_report, select

    letters = select(stores, stop=before)
    with on_spark(master) as spark, progress("counting", of_bytes=False) as report:
        found = dlq_report(letters, groups=groups or None, spark=spark, progress=report).to_dict()
    cells = [
        (
            *(row["group"], row["origin_topic"] or "-", row["count"]),
            *(when(row["oldest_ms"]), when(row["newest_ms"]), row["max_attempts"]),
        )
        for row in found["rows"]
    ]
    columns = ("group", "from", "dead letters>", "oldest stored", "newest stored", "attempts>")
    counts = (f"{found['total']} dead letters", columns, cells)
    reasons = [
        (row["group"], row["origin_topic"] or "-", reason or "no reason given", count)
        for row in found["rows"]
        for reason, count in row["reasons"].items()
    ]
    why = ("why", ("group", "from", "reason", "dead letters>"), reasons)
    show_tables(found, counts, why, empty="no dead letters")


def _ms(before: datetime | None) -> int | None:
    return None if before is None else to_ms(before)


@dlq.command(
    short_help="Print dead letters. Changes nothing.",
    examples="""
  mqstore dlq show var/mq --group billing --offset 17
  mqstore dlq show var/mq --group billing --json | jq -r '.body | @base64d'""",
)
@target_argument
@click.option("--group", required=True, help="Group of the dead letters.")
@_offset_option
@_before_option
@body_bytes_option
def show(target: Path, group: str, chosen: tuple[int, ...], before: datetime | None, body_bytes: int) -> None:
    """Print dead letters of the store in DIR with their bodies, all or those chosen by options.

    --json prints one object per line, like `export`. Exit code 1 if an --offset has no dead letter.
    """
    printed: set[int] = set()
    fine = True
    with connected(target) if is_address(target) else look(target) as opened:
        for letter in opened.dead_letters(group).select(offsets=chosen or None, stop_ms=_ms(before)):
            fine &= print_message(letter, json_output=json_asked(), body_bytes=body_bytes)
            printed.add(letter.offset)
    missing = ", ".join(map(str, sorted(set(chosen) - printed)))
    if not printed and not missing:
        note("no dead letters")
    if missing:
        note(f"no dead letter at offset {missing}")
    finish(missing or not fine)


@dlq.command(
    short_help="Send dead letters to their group again.",
    examples="""
  mqstore dlq replay var/mq --group billing --dry-run
  mqstore dlq replay var/mq --group billing --offset 17 --offset 18
  mqstore dlq replay fleet/* --where "dlq_reason = 'timeout'" --all-groups
  mqstore dlq replay var/mq --group billing --to orders-repaired""",
)
@stores_argument
@click.option("--group", "groups", multiple=True, help="Only dead letters of this group; may be repeated.")
@_offset_option
@_before_option
@click.option("--topic", "topics", multiple=True, help="Only dead letters from this original topic; may be repeated.")
@click.option("--where", metavar="SQL", help="Only dead letters whose properties match this SQL92 expression.")
@click.option("--all-groups", is_flag=True, help="Send each to its original topic, where every group receives it.")
@click.option("--to", "to_topic", metavar="TOPIC", help="Send all to this topic, where every group receives them.")
@dry_run_option
@spark_option
def replay(
    stores: tuple[str, ...],
    groups: tuple[str, ...],
    chosen: tuple[int, ...],
    before: datetime | None,
    topics: tuple[str, ...],
    where: str | None,
    all_groups: bool,
    to_topic: str | None,
    dry_run: bool,
    master: str | None,
) -> None:
    """Send dead letters of the stores in DIR again as new messages, all or those chosen by options.

    Only their own group receives them, unless --all-groups or --to is given. A dead letter that was sent is no longer
    listed, and a later replay does not send it again. All stores are checked first. If a dead letter cannot be sent, or
    there is none at an --offset, nothing is sent. A store that a server has open must be the only one.
    """
    from mqstore.jobs import dlq_resend, select

    how: dict[str, Any] = {"all_groups": all_groups, "to_topic": to_topic, "dry_run": dry_run}
    if master is None and (store := _served(stores)) is not None:
        choice = {"topics": topics or None, "before_ms": _ms(before), "where": where, "offsets": chosen or None}
        with store:
            sent = store.admin.replay(groups or None, **choice, **how)
        rows = [
            {"store": stores[0], "group": group, "count": each.count, "topics": each.topics, "min_offset": each.start}
            for group, each in sent.items()
        ]
        found = {"dry_run": dry_run, "count": sum(row["count"] for row in rows), "letters": rows}
    else:
        letters = select(stores, topics=topics or None, stop=before, where=where)
        with on_spark(master) as spark, progress("sending", of_bytes=False) as report:
            found = dlq_resend(
                letters, groups=groups or None, offsets=chosen or None, **how, spark=spark, progress=report
            ).to_dict()
    if print_if_json(found):
        return
    several = len({row["store"] for row in found["letters"]}) > 1
    for row in found["letters"]:
        way = "to" if all_groups or to_topic else "from"
        where_ = ", ".join(f"{count} {way} {topic}" for topic, count in row["topics"].items())
        verb = "would send" if dry_run else "sent"
        text = f"{verb} {row['count']} dead letters of {row['group']}: {where_}"
        print(safe(f"{row['store']}: {text}" if several else text))
    if not found["count"]:
        print("no dead letters to send")


def _served(stores: tuple[str, ...]) -> Any:
    """Return the store, connected, if there is only one and a server has it, or else None."""
    if len(stores) == 1:
        return connected(Path(stores[0]))
    if addresses := [each for each in stores if is_address(Path(each))]:
        raise click.UsageError(f"{addresses[0]} must be the only store")
    return None


@dlq.command(
    short_help="Delete dead letters.",
    examples="""
  mqstore dlq purge var/mq --group billing --before 30d --dry-run
  mqstore dlq purge var/mq --group billing --before 30d --yes
  mqstore dlq purge var/mq --group billing    # all, after a prompt""",
)
@target_argument
@click.option("--group", required=True, help="Group of the dead letters.")
@_before_option
@dry_run_option
@yes_option
def purge(target: Path, group: str, before: datetime | None, dry_run: bool, yes: bool) -> None:
    """Delete dead letters of a group in the store in DIR: the oldest, or all. Asks first.

    They are no longer listed or replayed, and no longer keep segments from being deleted.
    """
    with administer(target) as desk:
        purge = partial(desk.purge, group, before_ms=_ms(before))
        what, row = f"dead letters of {group}", {"group": group}
        purge_after_asking(purge(dry_run=True), what, row, purge, dry_run=dry_run, yes=yes)
