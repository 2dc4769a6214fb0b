"""`mqstore spark rebuild`: consume queues and index of stores built anew from their logs, in Spark's tasks."""

from __future__ import annotations

from typing import Any

import click

from mqstore_tools.render import console, note, print_json, progress, table
from mqstore_tools.shared import StoreCommand
from mqstore_tools.spark.common import Given, job_options, usable

__all__ = ["rebuild"]

_MANY = 200


@click.command(
    cls=StoreCommand,
    short_help="Build consume queues and index anew from the log.",
    epilog="""\b
Examples:
  mqstore spark rebuild var/mq --dry-run
  mqstore spark rebuild var/mq                        # in place; no writer may have it open
  mqstore spark rebuild var/mq --dry-run --shuffle auto
  mqstore spark rebuild 'fleet/*' --what index
  mqstore spark rebuild var/mq --dest var/new --json  # leaves the store as it is""",
)
@job_options
@click.option(
    "--what",
    type=click.Choice(["queues", "index"]),
    multiple=True,
    help="What to build; without it both.",
)
@click.option(
    "--dest",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Write to this directory, which must be empty or missing; of several stores each gets a folder in it.",
)
@click.option(
    "--shuffle",
    type=click.Choice(["auto", "always", "never"]),
    help="Whether Spark sorts queues whose records do not follow each other. auto (the default): where one task would "
    "have to read much of a log again; always: all queues, so that no two tasks write to a file; never. With --dry-run "
    "it reads the logs, here, and says which way each queue goes.",
)
def rebuild(given: Given, what: tuple[Any, ...], dest: str | None, shuffle: Any) -> None:
    """Build consume queues and index of STORES anew from their logs, and put them in place of the old ones.

    The log is never written. In place the stores are locked meanwhile, and refused while a writer has one open; what is
    built equals what was there, file by file, stays as it was. After a crash the next opening of the store finishes.
    Whole logs are read: topics, bounds and --where are refused.
    """
    with usable():
        from mqstore.spark.jobs import rebuild as job
    chosen = given.select()
    asked = what or ("queues", "index")
    if given.dry_run:
        plan = job.plan_rebuild(chosen, what=asked, dest=dest)
        if shuffle is None or "queues" not in asked:
            given.print_plan(plan)
            return
        with progress("reading", of_bytes=False) as report:
            ways = job.plan_ways(chosen, shuffle=shuffle, with_spark=given.with_spark, progress=report)
        given.print_plan(plan, queues=[each.to_dict() for each in ways])
        if not given.json_output:
            _show_ways(ways)
        return
    with given.running("rebuilding") as (spark, report):
        found = job.rebuild(spark, chosen, what=asked, dest=dest, shuffle=shuffle or "auto", progress=report)
    if given.json_output:
        print_json(found.to_dict())
    else:
        _show(found)


def _show_ways(ways: Any) -> None:
    rows = [(each.store, each.topic, each.queue_id, each.way) for each in ways[:_MANY]]
    console().print(table("queues", ("store", "topic", "queue>", "way"), rows))
    if len(ways) > _MANY:
        note(f"... and {len(ways) - _MANY} more; --json has all")


def _show(found: Any) -> None:
    changed = [queue for queue in found.queues if queue.changed or queue.void]
    if changed:
        columns = ("store", "topic", "queue>", "old min>", "old max>", "min>", "max>", "units differ>", "lost>", "way")
        rows = [
            (q.store, q.topic, q.queue_id, q.old_min, q.old_max, q.new_min, q.new_max, q.changed, q.void, q.way)
            for q in changed[:_MANY]
        ]
        console().print(table("queues that differ", columns, rows))
    if len(changed) > _MANY:
        note(f"... and {len(changed) - _MANY} more; --json has all")
    for row in found.stores:
        if row.bad_stretches or row.odd_records:
            note(
                f"{row.store}: {row.bad_stretches} places of the log hold no record, {row.odd_records} records have no "
                "place in a queue; `mqstore verify` tells which"
            )
    title = "rebuilt" if found.dest is None else f"built into {found.dest}"
    facts = ("store", "records>", "queues>", "differ>", "units differ>", "index entries>", "index")
    stores = [
        (
            *(row.store, row.messages, row.queues, row.changed_queues, row.changed_units, row.index_entries),
            "differed" if row.index_changed else "",
        )
        for row in found.stores
    ]
    console().print(table(title, facts, stores))
    if found.dest is None:
        console().print("old files were replaced" if found.changed else "everything was in order; nothing was replaced")
