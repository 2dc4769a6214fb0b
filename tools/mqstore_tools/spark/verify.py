"""`mqstore spark verify`: is everything in many stores as it should be? As `mqstore verify`, in Spark's tasks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from mqstore import Finding
from mqstore_tools.render import console, note, print_finding, print_json, safe, show_bytes, table
from mqstore_tools.shared import FINDINGS, StoreCommand
from mqstore_tools.spark.common import Given, job_options, usable

__all__ = ["verify"]

_MANY = 1000
"""Findings that people are shown; programs get all of them."""


@click.command(
    cls=StoreCommand,
    short_help="Check everything, checksums included. Changes nothing.",
    epilog="""\b
Examples:
  mqstore spark verify 'fleet/*' && echo all is well
  mqstore spark verify 'fleet/*' --master spark://host:7077 --json | jq -r '.findings[] | .store' | sort | uniq -c
  mqstore spark verify var/mq --master none --no-index""",
)
@job_options
@click.option("--no-index", is_flag=True, help="Leave the index out.")
@click.option(
    "--max-errors",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Of a range of the log, tell so many findings; the others are counted.",
)
def verify(given: Given, no_index: bool, max_errors: int) -> None:
    """Check every record, unit, index entry and JSON file of STORES, checksums included, in ranges of 64 MiB.

    Changes nothing, and may run beside writers. Exit code 1 when anything is found, or a store cannot be opened;
    docs/recovery.md tells what each finding means. Whole logs are read: topics, bounds and --where are refused.
    """
    with usable():
        from mqstore.jobs import verify as job
    chosen = given.select()
    with given.running("verifying") as (spark, report):
        found = job(chosen, spark=spark, deep=not no_index, max_errors=max_errors, progress=report)
    if given.json_output:
        print_json(found.to_dict())
    else:
        _show(found)
    if not found.ok:
        click.get_current_context().exit(FINDINGS)


def _show(found: Any) -> None:
    several = len(found.stores) > 1
    for each in found.findings[:_MANY]:
        finding = Finding(each.kind, each.file, each.position, each.length, each.detail)
        print_finding(finding, prefix=f"{each.store}: " if several else "")
    if len(found.findings) > _MANY:
        note(f"... and {len(found.findings) - _MANY} more; --json has all")
    for gap in found.lost[:_MANY]:
        where = f"{gap.store}: " if several else ""
        print(safe(f"{where}lost: {gap.topic}, queue {gap.queue_id}, offsets {gap.first}..{gap.stop - 1}"))
    unlisted = sum(row.unlisted for row in found.stores)
    if unlisted:
        note(f"{unlisted} findings are not told; --max-errors tells more of them")
    bad = [row for row in found.stores if row.findings or row.error]
    if several and bad:
        rows = [(row.store, row.messages, row.findings, row.error or "") for row in bad]
        console().print(table("stores not in order", ("store", "records>", "findings>", "error"), rows))
    elif bad and bad[0].error:
        note(bad[0].error)
    kinds = Counter(each.kind for each in found.findings)
    told = ", ".join(f"{number} x {kind}" for kind, number in kinds.most_common())
    verdict = "all is well" if found.ok else f"found: {told or 'stores that cannot be read'}"
    size = show_bytes(found.bytes)
    console().print(f"{found.messages} records, {size} of {len(found.stores)} stores verified; {verdict}")
