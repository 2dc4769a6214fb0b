"""`mqstore dlq`: what consumer groups gave up; sending it again, letting go of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import click

from mqstore import Message
from mqstore.broker.deadletters import DeadLetters
from mqstore.broker.inspect import group_names
from mqstore.broker.names import DLQ_PREFIX, is_dlq_topic
from mqstore.broker.offline import offline
from mqstore.broker.parts import Parts
from mqstore.errors import GroupNotFoundError
from mqstore.layout.properties import DLQ_ORIGIN_TOPIC, DLQ_REASON, RETRY_TOPIC
from mqstore.log.reader import to_ms
from mqstore_tools.opened import DefaultGroup, ask, dry_run_option, looking, moment, planning, tell, yes_option
from mqstore_tools.render import console, note, print_json, safe, table, when
from mqstore_tools.shared import FINDINGS, StoreCommand, directory_argument, json_option
from mqstore_tools.shown import body_bytes_option, print_message

__all__ = ["dlq"]

_before_option = click.option(
    "--before",
    type=moment,
    metavar="TIME",
    help="Only letters filed before: a time (UTC unless it says otherwise) or an age (30d).",
)
_offset_option = click.option(
    "--offset", "chosen", type=click.IntRange(0), multiple=True, help="This letter, by its offset; may be repeated."
)


@click.group(
    cls=DefaultGroup,
    short_help="Show, replay and purge dead letters.",
    epilog="""\b
Examples:
  mqstore dlq var/mq                          # the same as: mqstore dlq list var/mq
  mqstore dlq var/mq --group billing --json
  mqstore dlq show var/mq --group billing --offset 17
  mqstore dlq replay var/mq --group billing --dry-run
  mqstore dlq purge var/mq --group billing --before 30d""",
)
def dlq() -> None:
    """Show dead letters, the messages that a group could not consume in all its attempts; replay or purge them.

    `list` and `show` read, also beside a running broker; the others take the writer's lock. `mqstore dlq COMMAND
    --help` tells more.
    """


@dlq.command(
    "list",
    cls=StoreCommand,
    short_help="List dead letters. Changes nothing.",
    epilog="""\b
Examples:
  mqstore dlq list var/mq                     # how many each group has
  mqstore dlq list var/mq --group billing --before 7d""",
)
@directory_argument
@click.option("--group", help="The letters of this group; without it, how many each group has.")
@_before_option
@click.option("--max-messages", type=click.IntRange(1), default=100, show_default=True, help="List no more than these.")
@json_option
def list_(directory: Path, group: str | None, before: datetime | None, max_messages: int, json_output: bool) -> None:
    """List the dead letters of the store in DIR, oldest first: where each came from, and why it was given up."""
    if group is None and before is not None:
        raise click.UsageError("--before goes with --group")
    with looking(directory) as parts:
        if group is None:
            _count(parts, json_output=json_output)
            return
        letters = _letters(parts, group)
        start, end = letters.bounds
        rows = [_row(letter) for letter in islice(letters.select(stop_ms=_ms(before)), max_messages + 1)]
    more, rows = len(rows) > max_messages, rows[:max_messages]
    if json_output:
        print_json({"group": group, "min_offset": start, "max_offset": end, "letters": rows, "more": more})
        return
    if not rows:
        note("no dead letters")
        return
    console().print(
        table(
            f"dead letters of {group}, offsets {start} to before {end}",
            ("offset>", "filed", "from", "attempts>", "keys", "why"),
            [
                (
                    row["queue_offset"],
                    when(row["store_timestamp_ms"]),
                    row["origin_topic"] or "-",
                    row["attempts"],
                    " ".join(row["keys"]) or "-",
                    row["reason"] or "-",
                )
                for row in rows
            ],
        )
    )
    if more:
        note(f"and more; --max-messages lists more than {max_messages}")


def _count(parts: Parts, *, json_output: bool) -> None:
    names = [topic[len(DLQ_PREFIX) :] for topic in parts.store.topics() if is_dlq_topic(topic)]
    rows: list[dict[str, Any]] = []
    for name in names:
        letters = DeadLetters(parts, name)
        first = next(iter(letters), None)
        oldest_ms = None if first is None else first.store_timestamp_ms
        rows.append({"group": name, "letters": len(letters), "oldest_store_timestamp_ms": oldest_ms})
    if json_output:
        print_json({"groups": rows})
    elif not rows:
        note("no dead letters")
    else:
        cells = [(row["group"], row["letters"], when(row["oldest_store_timestamp_ms"])) for row in rows]
        console().print(table("", ("group", "letters>", "oldest filed"), cells))


def _row(letter: Message) -> dict[str, Any]:
    properties = letter.stored_properties()
    return {
        "queue_offset": letter.offset,
        "store_timestamp_ms": letter.store_timestamp_ms,
        "origin_topic": properties.get(DLQ_ORIGIN_TOPIC) or properties.get(RETRY_TOPIC),
        "attempts": letter.reconsume_times,
        "keys": list(letter.keys),
        "tag": letter.tag,
        "unique_key": letter.unique_key,
        "reason": properties.get(DLQ_REASON),
    }


def _letters(parts: Parts, group: str) -> DeadLetters:
    """The dead letters of a group. GroupNotFoundError for one of which there is no trace: its name is misspelt."""
    letters = DeadLetters(parts, group)
    if parts.topics.get(letters.topic) is None and group not in group_names(parts):
        raise GroupNotFoundError(
            f"{parts.store.path} has no group {group!r}: no dead letters, no settings, no progress"
        )
    return letters


def _ms(when_: datetime | None) -> int | None:
    return None if when_ is None else to_ms(when_)


@dlq.command(
    cls=StoreCommand,
    short_help="Print dead letters whole. Changes nothing.",
    epilog="""\b
Examples:
  mqstore dlq show var/mq --group billing --offset 17
  mqstore dlq show var/mq --group billing --json | jq -r '.body | @base64d'""",
)
@directory_argument
@click.option("--group", required=True, help="The group that gave them up.")
@_offset_option
@_before_option
@body_bytes_option
@json_option
@click.pass_context
def show(
    ctx: click.Context,
    directory: Path,
    group: str,
    chosen: tuple[int, ...],
    before: datetime | None,
    body_bytes: int,
    json_output: bool,
) -> None:
    """Print dead letters of the store in DIR with their bodies: those chosen, or all.

    With --json one object a line, as `export` has it. Exit code 1 when a letter that was named is not there.
    """
    printed: set[int] = set()
    fine = True
    with looking(directory) as parts:
        for letter in _chosen(_letters(parts, group), chosen, before):
            fine &= print_message(letter, json_output=json_output, body_bytes=body_bytes)
            printed.add(letter.offset)
    missing = ", ".join(map(str, sorted(set(chosen) - printed)))
    if not printed and not missing:
        note("no dead letters")
    if missing:
        note(f"no dead letter at offset {missing}")
    if missing or not fine:
        ctx.exit(FINDINGS)


def _missing(letters: DeadLetters, chosen: tuple[int, ...]) -> str:
    """Those of the chosen offsets at which no letter is."""
    there = {letter.offset for letter in _chosen(letters, chosen, None)} if chosen else set()
    return ", ".join(map(str, sorted(set(chosen) - there)))


def _chosen(letters: DeadLetters, chosen: tuple[int, ...], before: datetime | None) -> Iterator[Message]:
    return letters.select(offsets=chosen or None, stop_ms=_ms(before))


# -- changes -----------------------------------------------------------------------------------------------------------


@dlq.command(
    cls=StoreCommand,
    short_help="Send dead letters again to their group.",
    epilog="""\b
Examples:
  mqstore dlq replay var/mq --group billing --dry-run
  mqstore dlq replay var/mq --group billing --offset 17 --offset 18
  mqstore dlq replay var/mq --group billing --all-groups
  mqstore dlq replay var/mq --group billing --to orders-repaired""",
)
@directory_argument
@click.option("--group", required=True, help="The group that gave them up.")
@_offset_option
@_before_option
@click.option("--all-groups", is_flag=True, help="Send each to the topic it came from, for every group of that topic.")
@click.option("--to", "to_topic", metavar="TOPIC", help="Send all of them to this topic, for every group of it.")
@dry_run_option
@json_option
@click.pass_context
def replay(
    ctx: click.Context,
    directory: Path,
    group: str,
    chosen: tuple[int, ...],
    before: datetime | None,
    all_groups: bool,
    to_topic: str | None,
    dry_run: bool,
    json_output: bool,
) -> None:
    """Send dead letters of the store in DIR again, as new: those chosen, or all.

    Only the group that gave them up gets them, unless --all-groups or --to is given. Letters that were sent are listed
    no more, and are not sent by a later replay. Exit code 1, and nothing is sent, when a letter that was named is not
    there.
    """
    how = {"all_groups": all_groups, "to_topic": to_topic, "stop_ms": _ms(before)}
    way = "to" if all_groups or to_topic else "from"
    with planning(directory) as parts:
        missing = _missing(_letters(parts, group), chosen)
        if missing:
            note(f"no dead letter at offset {missing}; nothing is sent")
            ctx.exit(FINDINGS)
        planned = _replay(parts, group, chosen, how, dry_run=True)
    if dry_run:
        tell({"dry_run": True, **planned}, _replay_text("would send", way, planned), json_output=json_output)
        return
    if not planned["count"]:
        tell({"dry_run": False, **planned}, "no dead letters to send", json_output=json_output)
        return
    with offline(directory) as desk:
        done = _replay(desk.parts, group, chosen, how, dry_run=False)
    tell({"dry_run": False, **done}, _replay_text("sent", way, done), json_output=json_output)


def _replay(parts: Parts, group: str, chosen: tuple[int, ...], how: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
    found = _letters(parts, group).replay(chosen or None, dry_run=dry_run, **how)
    return {"group": group, "count": found.count, "topics": dict(found.topics), "min_offset": found.start}


def _replay_text(verb: str, way: str, row: dict[str, Any]) -> str:
    where = ", ".join(f"{count} {way} {topic}" for topic, count in row["topics"].items())
    return f"{verb} {row['count']} dead letters of {row['group']}" + (f": {where}" if where else "")


@dlq.command(
    cls=StoreCommand,
    short_help="Let go of dead letters.",
    epilog="""\b
Examples:
  mqstore dlq purge var/mq --group billing --before 30d --dry-run
  mqstore dlq purge var/mq --group billing --before-offset 100 --yes
  mqstore dlq purge var/mq --group billing    # all of them; asks first""",
)
@directory_argument
@click.option("--group", required=True, help="The group that gave them up.")
@_before_option
@click.option("--before-offset", type=click.IntRange(0), help="Only letters before this offset.")
@dry_run_option
@yes_option
@json_option
def purge(
    directory: Path,
    group: str,
    before: datetime | None,
    before_offset: int | None,
    dry_run: bool,
    yes: bool,
    json_output: bool,
) -> None:
    """Let go of the oldest dead letters of a group in the store in DIR, or of all. Asks first.

    They are never listed or replayed again, and no longer hold disk space, which comes back as segments are dropped.
    """

    def change(parts: Parts, *, dry_run: bool) -> int:
        return _letters(parts, group).purge(before_offset=before_offset, before_ms=_ms(before), dry_run=dry_run)

    with planning(directory) as parts:
        count = change(parts, dry_run=True)
    row = {"dry_run": dry_run, "group": group, "count": count}
    if dry_run or not count:
        text = f"would purge {count} dead letters of {group}" if count else "no dead letters to purge"
        tell(row, text, json_output=json_output)
        return
    ask(safe(f"Purge {count} dead letters of {group}?"), yes=yes)
    with offline(directory) as desk:
        row["count"] = change(desk.parts, dry_run=False)
    tell(row, f"purged {row['count']} dead letters of {group}", json_output=json_output)
