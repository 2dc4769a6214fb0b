"""`mqstore delay`: show and cancel delayed messages."""

from __future__ import annotations

from pathlib import Path

import click

from mqstore_tools.inspect import DELAY_COLUMNS, delay_cells
from mqstore_tools.render import json_asked, note, show_tables, when
from mqstore_tools.session import DefaultGroup, administer, dry_run_option, examine, print_done, target_argument
from mqstore_tools.shared import finish


@click.group(
    cls=DefaultGroup,
    short_help="Show and cancel delayed messages.",
    examples="""
  mqstore delay var/mq                        # the same as: mqstore delay show var/mq
  mqstore delay var/mq --json | jq .timer.waiting
  mqstore delay cancel var/mq djEgb3JkZXJzIG1xc3RvcmUgMTcwMDAwMDAwMSAwMUFC""",
)
def delay() -> None:
    """Show the messages that wait to be delivered later, or cancel one.

    `show` only reads, and works while a broker runs. `cancel` takes the writer's lock, or lets the server do it that
    has the store open. See `mqstore delay COMMAND --help`.
    """


@delay.command(
    short_help="Show delayed messages. Changes nothing.",
    examples="""
  mqstore delay show var/mq
  mqstore delay show var/mq --json | jq '.levels[] | select(.delay_ms == null)'   # orphans""",
)
@target_argument
def show(target: Path) -> None:
    """Show the delayed messages in the store in DIR: by level, retries included, and those of the timer.

    An orphan is a level that is not in the store's table of levels. The next broker moves its messages to the timer,
    where they keep their times, or delivers them at once with orphan_level_policy="deliver_now". The figures are those
    on disk: a running broker is some seconds ahead.

    The timer moves a message on that is due in more than two days. If all are, "next due" is the time at which the
    first is moved. `mqstore trace` shows when one is delivered.
    """
    with examine(target) as desk:
        found = desk.delays()
    timer = found["timer"]
    waiting = ["timer", "any", "-", "-", timer["waiting"], when(timer["next_due_ms"]), "-"]
    cells = [*map(delay_cells, found["levels"]), waiting]
    show_tables(found, ("", DELAY_COLUMNS, cells))


@delay.command(
    short_help="Cancel a delayed message of the timer.",
    examples="""
  mqstore delay cancel var/mq djEgb3JkZXJzIG1xc3RvcmUgMTcwMDAwMDAwMSAwMUFC --dry-run
  mqstore delay cancel var/mq djEgb3JkZXJzIG1xc3RvcmUgMTcwMDAwMDAwMSAwMUFC""",
)
@target_argument
@click.argument("handle")
@dry_run_option
def cancel(target: Path, handle: str, dry_run: bool) -> None:
    """Cancel the message of a recall HANDLE, which its put has returned, in the store in DIR.

    Exit code 1 if there is nothing to cancel: the message was delivered, is due, or never existed.
    """
    with administer(target) as desk:
        cancelled = desk.cancel(handle, dry_run=dry_run)
    if cancelled or json_asked():
        row = {"dry_run": dry_run, "cancelled": cancelled}
        print_done(row, "would be cancelled" if dry_run else "cancelled")
    if not cancelled:
        note("nothing to cancel: the message was delivered, is due, or never existed")
    finish(not cancelled)
