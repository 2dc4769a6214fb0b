"""`mqstore spark export`: messages to Parquet; run again, what came since."""

from __future__ import annotations

import click

from mqstore_tools.render import console, note, print_json, show_bytes, table
from mqstore_tools.shared import StoreCommand
from mqstore_tools.spark.common import Given, job_options, names, usable

__all__ = ["export"]

_SHOWN = 50


@click.command(
    cls=StoreCommand,
    short_help="Write messages to Parquet; run again, what came since.",
    epilog="""\b
Examples:
  mqstore spark export var/mq lake/mq
  mqstore spark export 'fleet/*' lake/mq --topics orders,billing --dry-run
  mqstore spark export var/mq lake/mq --columns topic,keys,body --partition-by topic
  mqstore spark export var/mq lake/errors --where "level = 'ERROR'" --from 7d""",
)
@job_options
@click.argument("dest", type=click.Path(file_okay=False))
@click.option("--columns", metavar="NAMES", help="Only these columns, separated by commas.")
@click.option(
    "--partition-by",
    metavar="NAMES",
    default="topic,date",
    show_default=True,
    help="What becomes folders: store, topic, queue_id and date, the UTC day of storing.",
)
@click.option(
    "--compression",
    type=click.Choice(["zstd", "snappy", "gzip", "lz4", "brotli", "none"]),
    default="zstd",
    show_default=True,
    help="Of the Parquet files.",
)
@click.option(
    "--txn",
    metavar="NAME:NUMBER",
    help="A name for what writes here, and the number of this run: a number written before is skipped.",
)
def export(given: Given, dest: str, columns: str | None, partition_by: str, compression: str, txn: str | None) -> None:
    """Write the messages of STORES to Parquet files under the folder DEST that are not there yet.

    Each run adds a folder `export=N` as a whole, and notes where it ended in each queue: the next one begins there.
    """
    with usable():
        from mqstore.jobs import export_parquet
    chosen = given.select()
    parts, picked = names(partition_by) or (), names(columns)
    transaction = None if txn is None else _transaction(txn)
    with given.running("exporting") as (spark, report):
        done = export_parquet(
            chosen,
            dest,
            spark=spark,
            columns=picked,
            partition_by=parts,
            compression=compression,
            txn=transaction,
            progress=report,
        )
    if given.json_output:
        print_json(done.to_dict())
    elif done.skipped:
        note(f"{txn} was written to {dest} before; nothing to do")
    elif done.folder is None:
        note(f"nothing new for {dest}")
    else:
        _show(done)


def _transaction(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition(":")
    if not name or not number.isdecimal():
        raise click.UsageError(f"--txn {text!r} is not NAME:NUMBER")
    return name, int(number)


def _show(done: object) -> None:
    row = done.to_dict()  # type: ignore[attr-defined]
    rate = row["record_bytes"] / max(row["seconds"], 1e-9)
    facts = [
        ("folder", f"{row['path']}/{row['folder']}"),
        ("messages", row["messages"]),
        ("of records", show_bytes(row["record_bytes"])),
        ("files", f"{row['files']}, {show_bytes(row['file_bytes'])}"),
        ("took", f"{row['seconds']:.1f} s, {show_bytes(round(rate))}/s"),
    ]
    if row["damaged"]:
        facts.append(("damaged, left out", row["damaged"]))
    console().print(table("", ("", ""), facts))
    marks = [
        (store, topic, queue, end)
        for store, topics in row["high_water"].items()
        for topic, queues in topics.items()
        for queue, end in queues.items()
    ]
    console().print(table("next time from", ("store", "topic", "queue>", "offset>"), marks[:_SHOWN]))
    if len(marks) > _SHOWN:
        note(f"and {len(marks) - _SHOWN} queues more; --json has all")
