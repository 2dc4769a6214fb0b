"""`mqstore spark dedup`: a copy of stores without messages that were there before."""

from __future__ import annotations

from typing import Any

import click

from mqstore_tools.shared import StoreCommand
from mqstore_tools.spark.common import Given, job_options, usable
from mqstore_tools.spark.copies import check_named, id_option, show_plan, show_sifted, spread_options, target_option

__all__ = ["dedup"]


@click.command(
    cls=StoreCommand,
    short_help="Copy messages into a new store, of equal ones the first.",
    epilog="""\b
Examples:
  mqstore spark dedup var/mq var/clean --topics orders
  mqstore spark dedup var/mq var/clean --by body,order_id --window 10m
  mqstore spark dedup 'fleet/*' var/one --window ever""",
)
@job_options
@click.argument("dest", type=click.Path(file_okay=False))
@click.option(
    "--by",
    default="unique_key",
    show_default=True,
    metavar="NAMES",
    help="Equal are messages of a topic that agree in these: as --key of compact.",
)
@click.option(
    "--window", default="1h", show_default=True, metavar="AGE", help="How long after the first (10m, 1h); or `ever`."
)
@spread_options
@target_option("store", "set")
@id_option
def dedup(
    given: Given,
    dest: str,
    by: str,
    window: str,
    queues: int | None,
    spread: str,
    target: str,
    run_id: str | None,
) -> None:
    """Copy STORES into DEST, which must be new, without messages that are equal to an earlier one.

    Messages that lack what they are compared by are all copied.
    """
    with usable():
        from mqstore.spark.jobs.dedup import dedup as run
        from mqstore.spark.jobs.dedup import dedup_plan
        from mqstore.spark.optiontable import duration_s
    check_named(given, run_id)
    chosen = given.select()
    try:
        window_s = None if window == "ever" else duration_s(window)
    except ValueError as error:
        raise click.UsageError(f"--window {window!r} is no time, as 10m or 1h, nor `ever`: {error}") from error
    how: dict[str, Any] = {
        "by": by,
        "window": window_s,
        "queues": queues,
        "spread": spread,
        "target": target,
        "id": run_id,
    }
    if given.dry_run:
        show_plan(given, dedup_plan(chosen, dest, **how), "dedup")
        return
    with given.running("comparing") as (spark, report):
        done = run(spark, chosen, dest, progress=report, **how)
    show_sifted(given, done, "dedup")
