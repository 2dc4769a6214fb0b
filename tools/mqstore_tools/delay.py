"""`mqstore delay`: what waits to be delivered later, and cancelling it."""

from __future__ import annotations

from pathlib import Path

import click

from mqstore.admin import look, offline
from mqstore_tools.inspect import DELAY_COLUMNS, delay_cells
from mqstore_tools.opened import DefaultGroup, dry_run_option, planning, tell
from mqstore_tools.render import note, show_tables, when
from mqstore_tools.shared import FINDINGS, directory_argument, json_option

__all__ = ["delay"]


@click.group(
    cls=DefaultGroup,
    short_help="Show what waits for later; cancel it.",
    epilog="""\b
Examples:
  mqstore delay var/mq                        # the same as: mqstore delay show var/mq
  mqstore delay var/mq --json | jq .timer.waiting
  mqstore delay cancel var/mq djEgb3JkZXJzIG1xc3RvcmUgMTcwMDAwMDAwMDAwMSAwMUFC""",
)
def delay() -> None:
    """Show the messages that wait to be delivered later, or cancel one.

    `show` reads, also beside a running broker; `cancel` takes the writer's lock. `mqstore delay COMMAND --help` tells
    more.
    """


@delay.command(
    short_help="Show what waits for later. Changes nothing.",
    epilog="""\b
Examples:
  mqstore delay show var/mq
  mqstore delay show var/mq --json | jq '.levels[] | select(.delay_ms == null)'   # orphans""",
)
@directory_argument
@json_option
def show(directory: Path, json_output: bool) -> None:
    """Show what waits in the store in DIR: by level, retries too, and by the timer.

    A level that the table does not have is an orphan. The next broker moves its messages to the timer, where they keep
    their times, or delivers them at once with orphan_level_policy="deliver_now". The figures are those on disk: a
    running broker is some seconds ahead.
    """
    with look(directory) as opened:
        found = opened.delays()
    timer = found["timer"]
    waiting = ["timer", "any", "-", "-", timer["waiting"], when(timer["next_due_ms"]), "-"]
    cells = [*map(delay_cells, found["levels"]), waiting]
    show_tables(found, ("", DELAY_COLUMNS, cells), json_output=json_output)


@delay.command(
    short_help="Cancel a message that waits for a moment of its own.",
    epilog="""\b
Examples:
  mqstore delay cancel var/mq djEgb3JkZXJzIG1xc3RvcmUgMTcwMDAwMDAwMDAwMSAwMUFC --dry-run
  mqstore delay cancel var/mq djEgb3JkZXJzIG1xc3RvcmUgMTcwMDAwMDAwMDAwMSAwMUFC""",
)
@directory_argument
@click.argument("handle")
@dry_run_option
@json_option
@click.pass_context
def cancel(ctx: click.Context, directory: Path, handle: str, dry_run: bool, json_output: bool) -> None:
    """Cancel the message of a recall HANDLE, which its put has returned, in the store in DIR.

    Exit code 1 when there is nothing to cancel: it was delivered, it is due, or there never was such a message.
    """
    if dry_run:
        with planning(directory) as opened:
            cancelled = opened.cancel(handle, dry_run=True)
    else:
        with offline(directory) as opened:
            cancelled = opened.cancel(handle)
    if cancelled or json_output:
        row = {"dry_run": dry_run, "cancelled": cancelled}
        tell(row, "would be cancelled" if dry_run else "cancelled", json_output=json_output)
    if not cancelled:
        note("nothing to cancel: delivered, due, or never there")
        ctx.exit(FINDINGS)
