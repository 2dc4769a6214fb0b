"""`mqstore spark dedup`: a copy of stores without messages that were there before."""

from __future__ import annotations

from typing import Any

import click

from mqstore_tools.shared import StoreCommand
from mqstore_tools.spark.common import Given, duration, job_options, usable
from mqstore_tools.spark.copies import check_named, id_option, sift, spread_options, target_option

__all__ = ["dedup"]


def _window(value: Any) -> float | str:
    return "ever" if value == "ever" else duration(value)


@click.command(
    cls=StoreCommand,
    short_help="Copy messages into a new store, of equal ones the first.",
    epilog="""\b
Examples:
  mqstore spark dedup var/mq var/clean --topics orders
  mqstore spark dedup var/mq var/clean --by body,order_id --window 10m
  mqstore spark dedup var/mq var/clean --by body.order.id --topics orders
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
    "--window",
    type=_window,
    default="1h",
    show_default=True,
    metavar="AGE",
    help="How long after the first (10m, 1h); or `ever`.",
)
@spread_options
@target_option("store", "set")
@id_option
def dedup(
    given: Given,
    dest: str,
    by: str,
    window: float | str,
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
    check_named(given, run_id)
    how: dict[str, Any] = {
        "by": by,
        "window": None if window == "ever" else window,
        "queues": queues,
        "spread": spread,
        "target": target,
        "id": run_id,
    }
    sift(given, "dedup", dedup_plan, run, dest, **how)
