"""`mqstore spark compact`: a copy of stores with the last message of each key."""

from __future__ import annotations

from typing import Any

import click

from mqstore_tools.shared import StoreCommand
from mqstore_tools.spark.common import Given, duration, job_options, usable
from mqstore_tools.spark.copies import check_named, id_option, sift, spread_options, target_option

__all__ = ["compact"]


@click.command(
    cls=StoreCommand,
    short_help="Copy the last message of each key into a new store.",
    epilog="""\b
Examples:
  mqstore spark compact var/mq var/compacted --topics devices
  mqstore spark compact 'fleet/*' lake/latest --target set --key device --retention 7d""",
)
@job_options
@click.argument("dest", type=click.Path(file_okay=False))
@click.option(
    "--key",
    default="keys",
    show_default=True,
    metavar="NAMES",
    help="What makes the key: keys, tags, unique_key, sharding_key, body, body.NAME for a member of a JSON body, or "
    "names of properties, with commas.",
)
@click.option("--no-tombstones", is_flag=True, help="A message without a body is one as any other.")
@click.option(
    "--retention", type=duration, metavar="AGE", help="Leave out tombstones that are older (7d, 12h, or seconds)."
)
@spread_options
@target_option("store", "set")
@id_option
def compact(
    given: Given,
    dest: str,
    key: str,
    no_tombstones: bool,
    retention: float | None,
    queues: int | None,
    spread: str,
    target: str,
    run_id: str | None,
) -> None:
    """Copy into DEST, which must be new, of each topic and key of STORES the last message, in the order of its queue.

    Messages without a key are all copied. A message without a body is a tombstone: what its key was is gone; it stays
    until --retention.
    """
    with usable():
        from mqstore.spark.jobs.compact import compact as run
        from mqstore.spark.jobs.compact import compact_plan
    check_named(given, run_id)
    how: dict[str, Any] = {
        "key": key,
        "tombstones": not no_tombstones,
        "retention": retention,
        "queues": queues,
        "spread": spread,
        "target": target,
        "id": run_id,
    }
    sift(given, "compact", compact_plan, run, dest, **how)
