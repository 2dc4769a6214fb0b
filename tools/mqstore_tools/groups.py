"""`mqstore groups`: show and change consumer groups."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import datetime
from operator import methodcaller
from pathlib import Path
from typing import Any

import click

from mqstore import RetryPolicy, exponential
from mqstore.jobs import duration_s
from mqstore_tools.lag import suspended_tables
from mqstore_tools.multi_store import with_options
from mqstore_tools.render import show_tables, when
from mqstore_tools.session import (
    DefaultGroup,
    carry_out,
    delete_after_asking,
    dry_run_option,
    examine,
    position,
    target_argument,
    to_ms,
    yes_option,
)


@click.group(
    cls=DefaultGroup,
    short_help="Show, create, alter and delete consumer groups.",
    examples="""
  mqstore groups var/mq                       # the same as: mqstore groups list var/mq
  mqstore groups show var/mq billing --json
  mqstore groups create var/mq billing --max-attempts 5 --retry '10s 1m 10m'
  mqstore groups alter var/mq billing --retry '5s x2 2h'
  mqstore groups delete var/mq billing --dry-run""",
)
def groups() -> None:
    """Show, create, alter and delete consumer groups.

    `list` and `show` only read, and work while a broker runs. The others take the writer's lock, or let the server do
    it that has the store open. See `mqstore groups COMMAND --help`.
    """


@groups.command(
    "list",
    short_help="Show groups. Changes nothing.",
    examples="""
  mqstore groups list var/mq
  mqstore groups list var/mq --json | jq '.groups[] | select(.registered | not)'""",
)
@target_argument
def list_(target: Path) -> None:
    """Show the groups of the store in DIR: attempts, retry delays, where they start, topics they consume.

    A group that has committed offsets, but no entry in config/subscriptionGroup.json, is shown with default settings.
    Queues of ordered groups that a failed message blocks are listed below with the message, the time of its first
    failure, its last failed attempt and the error. `mqstore lag` lists them, too.
    """
    _show(target, None)


@groups.command(
    "show",
    short_help="Show one group. Changes nothing.",
    examples="""
  mqstore groups show var/mq billing
  mqstore groups show var/mq billing --json | jq '.suspended[].error'""",
)
@target_argument
@click.argument("group")
def show(target: Path, group: str) -> None:
    """Show the group GROUP of the store in DIR as `mqstore groups list` does, with blocked queues.

    --json prints the same object as in `groups list`. An unknown group is an error.
    """
    _show(target, group)


def _show(target: Path, only: str | None) -> None:
    now_ms = time.time_ns() // 1_000_000
    with examine(target) as desk:
        rows = [{**group_row(view), "suspended": _suspended(view)} for view in desk.groups(only)]
    columns = ("group", "attempts>", "retries after", "fifo", "start", "may", "topics")
    cells = [
        (
            row["name"] if row["registered"] else f"{row['name']} (no entry)",
            row["max_attempts"] or "no limit",
            row["retry"],
            "yes" if row["fifo"] else "no",
            when(row["start"]) if isinstance(row["start"], int) else row["start"],
            _may(row),
            " ".join(row["topics"]) or "-",
        )
        for row in rows
    ]
    queues = [(row["name"], failed["topic"], failed["queue_id"], failed) for row in rows for failed in row["suspended"]]
    found = {"groups": rows} if only is None else rows[0]
    show_tables(found, ("", columns, cells), *suspended_tables(queues, now_ms))


def _suspended(view: Any) -> list[dict[str, Any]]:
    return [{**queue._asdict(), **asdict(failed)} for queue, failed in view.suspended.items()]


def group_row(view: Any) -> dict[str, Any]:
    shown = view.config
    return {
        "name": shown.name,
        "registered": view.registered,
        "max_attempts": shown.max_attempts,
        "retry": str(shown.retry_policy),
        "fifo": shown.orderly,
        "start": shown.start,
        "consume": shown.consume_enable,
        "broadcast": shown.consume_broadcast_enable,
        "topics": view.topics,
    }


def _may(row: dict[str, Any]) -> str:
    return "not consume" if not row["consume"] else "consume, broadcast" if row["broadcast"] else "consume"


def _retry(value: Any) -> RetryPolicy:
    """Parse the value of `--retry`: `standard`, a list of delays, or `INITIAL xFACTOR MAXIMUM`."""
    words = str(value).split()
    if words == ["standard"]:
        return RetryPolicy()
    try:
        if len(words) == 3 and words[1][:1] == "x":
            first, last = map(duration_s, (words[0], words[2]))
            return exponential(first, int(words[1][1:]), last)
        return RetryPolicy(delays=[duration_s(word) for word in words])
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not 'standard', a list as in '10s 1m 10m', or growing as in '5s x2 2h'"
        ) from None


def _start(value: Any) -> str | int:
    found = position(value)
    return to_ms(found) if isinstance(found, datetime) else found


def _attempts(value: Any) -> int:
    """Parse the value of `--max-attempts`. 0 means no limit."""
    return 0 if value == "unlimited" else int(click.IntRange(1, 0x7FFF_FFFE).convert(value, None, None))


_settings = with_options(
    click.option(
        "--max-attempts",
        type=_attempts,
        metavar="N",
        help="Attempts before a message becomes a dead letter, or unlimited. Default for a new group: 17; unlimited "
        "with --fifo.",
    ),
    click.option(
        "--retry",
        type=_retry,
        metavar="DELAYS",
        help="Delays before a failed message is redelivered: standard, a list ('10s 1m 10m'), or growing ('5s x2 2h'). "
        "Default for a new group: standard; '1s x2 1m' with --fifo.",
    ),
    click.option(
        "--start",
        type=_start,
        metavar="START",
        help="Start in queues without a committed offset: earliest, latest, a time or an age (36h).",
    ),
    click.option("--fifo/--no-fifo", default=None, help="Are popped messages delivered in order?"),
    click.option("--consume/--no-consume", default=None, help="May it consume at all?"),
    click.option("--broadcast/--no-broadcast", default=None, help="May each member receive every message?"),
)
"""Options of `create` and `alter`."""


def _given(
    *, start: str | int | None, fifo: bool | None, consume: bool | None, broadcast: bool | None, **retry: Any
) -> dict[str, Any]:
    """Return the given settings as arguments of the library."""
    settings = {"start": start, "orderly": fifo, "consume_enable": consume, "consume_broadcast_enable": broadcast}
    return {"settings": {name: value for name, value in settings.items() if value is not None}, **retry}


@groups.command(
    short_help="Create a group.",
    examples="""
  mqstore groups create var/mq billing
  mqstore groups create var/mq billing --max-attempts 5 --retry '10s 1m 10m' --start latest
  mqstore groups create var/mq ledger --fifo --max-attempts 5""",
)
@target_argument
@click.argument("name")
@_settings
@dry_run_option
def create(target: Path, name: str, dry_run: bool, **typed: Any) -> None:
    """Create the consumer group NAME in the store in DIR.

    A group created with --fifo retries for ever: a message that always fails blocks its queue. Give --max-attempts if
    such a message should become a dead letter instead.
    """
    change = methodcaller("set_group", name, create=True, dry_run=dry_run, **_given(**typed))
    carry_out(f"create group {name}", target, change, group_row, dry_run=dry_run)


@groups.command(
    short_help="Change a group.",
    examples="""
  mqstore groups alter var/mq billing --max-attempts 3
  mqstore groups alter var/mq billing --no-consume         # stop deliveries to all members""",
)
@target_argument
@click.argument("name")
@_settings
@dry_run_option
def alter(target: Path, name: str, dry_run: bool, **typed: Any) -> None:
    """Change the given settings of the consumer group NAME in the store in DIR."""
    if all(value is None for value in typed.values()):
        raise click.UsageError("give --max-attempts, --retry, --start, --fifo, --consume or --broadcast")
    change = methodcaller("set_group", name, dry_run=dry_run, **_given(**typed))
    carry_out(f"alter group {name}", target, change, group_row, dry_run=dry_run)


@groups.command(
    short_help="Delete a group and its committed offsets.",
    examples="""
  mqstore groups delete var/mq billing --dry-run
  mqstore groups delete var/mq billing --yes""",
)
@target_argument
@click.argument("name")
@dry_run_option
@yes_option
def delete(target: Path, name: str, dry_run: bool, yes: bool) -> None:
    """Delete the consumer group NAME in the store in DIR: settings, committed offsets, deliveries in flight.

    Asks first. No message is deleted: its dead letters and messages that wait for a retry remain. A new group with this
    name starts like any other.
    """

    def describe(view: Any) -> tuple[str, dict[str, Any]]:
        what = f"group {name}"
        what += f" and its offsets in {', '.join(view.topics)}" if view.topics else ""
        return what, {"name": name, "topics": view.topics}

    def delete(desk: Any, **how: Any) -> Any:
        return desk.delete_group(name, **how)

    delete_after_asking(target, delete, describe, dry_run=dry_run, yes=yes)
