"""`mqstore spark lag`: how far groups are behind in many stores, and whether they catch up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from mqstore import ConfigError
from mqstore_tools.opened import show_ms
from mqstore_tools.render import console, note, print_json, table, when
from mqstore_tools.shared import FINDINGS, StoreCommand
from mqstore_tools.spark.common import Given, duration, job_options, usable

__all__ = ["lag"]


_STUCK = 50


@click.command(
    cls=StoreCommand,
    short_help="How far groups are behind, and whether they catch up.",
    epilog="""\b
Examples:
  mqstore spark lag 'fleet/*'
  mqstore spark lag var/mq --wait 30s                     # two looks: rates, and queues that are stuck
  mqstore spark lag var/mq --json > now.json; mqstore spark lag var/mq --previous now.json
  mqstore spark lag 'fleet/*' --group billing --max-lag 10000 --max-age 15m || page-somebody""",
)
@job_options
@click.option("--group", "groups", multiple=True, help="Only this group; may be repeated.")
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="Show so many, largest lag first.")
@click.option("--max-lag", type=click.IntRange(0), help="Exit code 1 if a group has more messages left on a topic.")
@click.option("--max-age", type=duration, metavar="TIME", help="Exit code 1 if one of them is older than this (15m).")
@click.option(
    "--previous",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Compare with an earlier look: the output of this command with --json.",
)
@click.option("--wait", type=duration, metavar="TIME", help="Look twice, so long apart (30s), and compare.")
def lag(
    given: Given,
    groups: tuple[str, ...],
    top: int,
    max_lag: int | None,
    max_age: float | None,
    previous: Path | None,
    wait: float | None,
) -> None:
    """Show how many messages each group has not consumed in STORES, by topic, and how old the oldest of them is.

    Two looks also tell what is consumed and what arrives a second, how long the rest takes, and which queues are stuck:
    there are messages, and the group's offset does not move. By what is on disk: a running broker writes its groups'
    progress within a few seconds. It counts all that is left: bounds and --where are refused.
    """
    with usable():
        from mqstore.spark.jobs.lag import lag_plan, lag_report
    if previous is not None and wait is not None:
        raise click.UsageError("--previous and --wait both say what to compare with; give one of them")
    chosen = given.select()
    before = None if previous is None else _read(previous)
    if given.dry_run:
        given.print_plan(lag_plan(chosen))
        return
    with given.running("looking") as (spark, report):
        if wait is not None:
            before = lag_report(spark, chosen, groups=groups or None, top=top).to_dict()
            time.sleep(wait)
        found = lag_report(spark, chosen, groups=groups or None, top=None, previous=before, progress=report)
    over = [
        row
        for row in found.rows
        if (max_lag is not None and row.lag > max_lag) or (max_age is not None and row.lag_seconds > max_age)
    ]
    row = found.to_dict()
    row["over"] = [{"group": each.group, "topic": each.topic} for each in over]
    row["rows"] = row["rows"][:top]
    if given.json_output:
        print_json(row)
    else:
        _show(row, compared=before is not None)
        for each in over:
            note(f"over the limit: group {each.group} on {each.topic}: {each.lag} messages")
    if over:
        click.get_current_context().exit(FINDINGS)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) or {}  # `null` is no report, and not that there is none
    except ValueError as error:
        raise ConfigError(f"--previous {str(path)!r} is no output of `mqstore spark lag --json`: {error}") from error


def _show(found: dict[str, Any], *, compared: bool) -> None:
    if not found["rows"]:
        note("no group")
        return
    columns = ["group", "topic", "queues>", "messages>", "oldest is>", "in flight>", "lost>"]
    title = ""
    if compared:
        columns += ["consumed/s>", "arriving/s>", "done in>", "stuck>"]
        title = f"compared with {when(found['previous_ms'])}"
    rows = []
    for row in found["rows"]:
        cells = [row["group"], row["topic"], row["queues"], row["lag"], show_ms(round(row["lag_seconds"] * 1000))]
        cells += [row["in_flight"], row["lost"]]
        if compared:
            cells += [_rate(row["consumed_per_second"]), _rate(row["arriving_per_second"])]
            cells += [show_ms(None if row["seconds_left"] is None else round(row["seconds_left"] * 1000))]
            cells += [row["stuck_queues"]]
        rows.append(cells)
    console().print(table(title, columns, rows))
    if found["groups"] > len(rows):
        note(f"and {found['groups'] - len(rows)} more; --top shows them")
    stuck = [row for row in found["queues"] if row["stuck"]]
    if stuck:
        fields = ("store", "group", "topic", "queue_id", "committed", "lag")
        names = ("store", "group", "topic", "queue>", "stays at>", "messages>")
        console().print(table("stuck", names, [[row[field] for field in fields] for row in stuck[:_STUCK]]))
        if len(stuck) > _STUCK:
            note(f"and {len(stuck) - _STUCK} queues more; --json has all")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
