"""`mqstore spark dlq`: what groups gave up in many stores, and why."""

from __future__ import annotations

from typing import Any

import click

from mqstore_tools.opened import show_ms
from mqstore_tools.render import console, note, print_json, table, when
from mqstore_tools.shared import StoreCommand
from mqstore_tools.spark.common import Given, job_options, usable

__all__ = ["dlq"]


class _ReportFirst(click.Group):
    """`mqstore spark dlq STORES...` is `mqstore spark dlq report STORES...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_ReportFirst,
    short_help="Count dead letters by group, origin and reason, or send them again.",
    epilog="""\b
Examples:
  mqstore spark dlq 'fleet/*'                 # the same as: mqstore spark dlq report 'fleet/*'
  mqstore spark dlq var/mq --group billing --json
  mqstore spark dlq resend 'fleet/*' --group billing --dry-run""",
)
def dlq() -> None:
    """Look at the dead letters of many stores, and with `resend` send them again. `mqstore dlq` shows and replays those
    of one.
    """


@dlq.command(
    cls=StoreCommand,
    short_help="Count dead letters, by group, origin and reason.",
    epilog="""\b
Examples:
  mqstore spark dlq report 'fleet/*'
  mqstore spark dlq report var/mq --group billing --from 24h --samples 10""",
)
@job_options
@click.option("--group", "groups", multiple=True, help="Only what this group gave up; may be repeated.")
@click.option("--samples", type=click.IntRange(0), default=3, show_default=True, help="Show so many of each, newest.")
@click.option("--reasons", type=click.IntRange(0), default=5, show_default=True, help="Show so many reasons of each.")
def report(given: Given, groups: tuple[str, ...], samples: int, reasons: int) -> None:
    """Count the dead letters of STORES by group and by the topic that they came from: how many, how old, why.

    --topics names topics that they came from, --from and --to when they were filed, --where tests their properties:
    with the same words `resend` sends these.
    """
    with usable():
        from mqstore.spark.jobs.dlq import dlq_plan, dlq_report
    chosen = given.select()
    if given.dry_run:
        given.print_plan(dlq_plan(chosen))
        return
    with given.running("counting") as (spark, progress):
        found = dlq_report(
            spark, chosen, groups=groups or None, samples=samples, reasons=reasons, progress=progress
        ).to_dict()
    if given.json_output:
        print_json(found)
    elif not found["total"]:
        note("no dead letters")
    else:
        _show(found)


@dlq.command(
    cls=StoreCommand,
    short_help="Send dead letters again, each once.",
    epilog="""\b
Examples:
  mqstore spark dlq resend 'fleet/*' --group billing --dry-run
  mqstore spark dlq resend var/mq --where "dlq_reason startswith 'timeout'"
  mqstore spark dlq resend var/mq --to-topic orders-again""",
)
@job_options
@click.option("--group", "groups", multiple=True, help="Only what this group gave up; may be repeated.")
@click.option("--to-topic", metavar="NAME", help="Send all of them there, and not to where each came from.")
def resend(given: Given, groups: tuple[str, ...], to_topic: str | None) -> None:
    """Send the dead letters of STORES again as new messages, in the stores where they lie, each once.

    --topics names topics that they came from, --from and --to when they were filed, --where tests their properties.
    Run again, it sends only what came since. A store that a process has open is refused: `mqstore dlq replay` is for
    that.
    """
    with usable():
        from mqstore.spark.jobs.resend import dlq_resend, resend_plan
    chosen = given.select()
    to, picked = to_topic or "origin", groups or None
    if given.dry_run:
        plan = resend_plan(chosen, to=to, groups=picked)
        if given.json_output:
            given.print_plan(plan)
        else:
            _show_letters(plan.to_dict()["letters"], "would be sent>")
        return
    with given.running("sending") as (spark, progress):
        found = dlq_resend(spark, chosen, to=to, groups=picked, progress=progress).to_dict()
    if given.json_output:
        print_json(found)
    else:
        _show_letters(found["stores"], "sent>")


def _show_letters(stores: list[dict[str, Any]], sent: str) -> None:
    columns = ("store", sent, "before>", "doubles>", "others>")
    rows = [(each["store"], each["resent"], each["before"], each["doubles"], each["others"]) for each in stores]
    console().print(table("dead letters", columns, rows))
    topics = [(each["store"], topic, count) for each in stores for topic, count in each["topics"].items()]
    if topics:
        console().print(table("", ("store", "topic", "letters>"), topics))


def _show(found: dict[str, Any]) -> None:
    screen = console()
    columns = ("group", "from", "letters>", "oldest", "newest", "attempts>")
    cells = [
        (
            *(row["group"], row["origin_topic"] or "-", row["count"]),
            *(when(row["oldest_ms"]), when(row["newest_ms"]), row["max_attempts"] + 1),
        )
        for row in found["rows"]
    ]
    screen.print(table(f"{found['total']} dead letters", columns, cells))
    for row in found["rows"]:
        title = f"{row['group']}, from {row['origin_topic'] or '-'}"
        if row["reasons"]:
            why = [(each["reason"] or "it does not say", _between(each)) for each in row["reasons"]]
            screen.print(table(f"why: {title}", ("reason", "letters>"), why))
        if row["samples"]:
            newest = [
                (
                    *(each["store"], each["queue_offset"], show_ms(row["newest_ms"] - each["store_ms"])),
                    *(" ".join(each["keys"]) or "-", each["body"]),
                )
                for each in row["samples"]
            ]
            names = ("store", "offset>", "before the newest>", "keys", "body")
            screen.print(table(f"newest: {title}", names, newest))


def _between(each: dict[str, Any]) -> str:
    least, most = each["at_least"], each["at_most"]
    return str(least) if least == most else f"{least} to {most}"
