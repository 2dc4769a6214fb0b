"""`mqstore spark import`: rows of files as messages."""

from __future__ import annotations

from typing import Any

import click

from mqstore_tools.render import console, note, print_json, show_bytes, table
from mqstore_tools.shared import StoreCommand, json_option
from mqstore_tools.spark.common import Given, names, spark_errors, usable
from mqstore_tools.spark.copies import id_option, show_topics, target_option, told_already
from mqstore_tools.spark.replay import pairs_of

__all__ = ["import_rows"]


@click.command(
    "import",
    cls=StoreCommand,
    short_help="Put rows of Parquet, JSON or CSV files into a store.",
    epilog="""\b
Examples:
  mqstore spark import events.parquet var/mq --topic events --map body=payload --map keys=id
  mqstore spark import 'in/*.jsonl' var/mq --format json --topic events --map body=text --refused refused
  mqstore spark import lake/orders var/mq --map "body=to_json(struct(*))" --map topic=kind --order at""",
)
@click.argument("source", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("dest", type=click.Path(file_okay=False))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "json", "csv", "delta"]),
    default="parquet",
    show_default=True,
    help="Of the files: json is a value a line, csv has a line of names; delta needs Spark and its package.",
)
@click.option(
    "--map",
    "mapping",
    multiple=True,
    metavar="WHAT=COLUMN",
    help="What of a message (body, topic, keys, tags, properties.NAME, ...) comes from which column, or (with Spark) "
    "SQL expression; without it columns that have such names.",
)
@click.option("--topic", metavar="NAME", help="Where all rows go.")
@click.option("--order", metavar="NAMES", help="Sort all rows by these columns; `NAME desc` the other way round.")
@click.option("--queues", type=click.IntRange(1), default=8, show_default=True, help="Of topics that are made here.")
@click.option(
    "--refused", type=click.Path(file_okay=False), metavar="DIR", help="Keep rows that are refused there, with reasons."
)
@click.option("--no-validate", is_flag=True, help="Properties may bear reserved names, as those of an export do.")
@target_option("store", "set", "inbox")
@id_option
@click.option(
    "--master",
    metavar="URL",
    default="",
    help="Where Spark runs; local[*] if nothing says otherwise. `none`: here, without Spark.",
)
@click.option("--conf", metavar="NAME=VALUE", multiple=True, help="A setting of Spark; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Print what would be read, and start no Java.")
@json_option
def import_rows(
    source: tuple[str, ...],
    dest: str,
    kind: str,
    mapping: tuple[str, ...],
    order: str | None,
    no_validate: bool,
    run_id: str | None,
    master: str,
    conf: tuple[str, ...],
    dry_run: bool,
    json_output: bool,
    **how: Any,
) -> None:
    """Put the rows of SOURCE (files, folders, globs in quotes) as messages into DEST, in their order.

    A row that a message cannot be made of ends the import, before anything is written; with --refused it goes there.
    Run again after a crash, or by mistake, it writes nothing twice.
    """
    with usable():
        from mqstore.spark.jobs.importing import import_plan
        from mqstore.spark.jobs.importing import import_rows as run
    given = Given(source, master, conf, None, None, None, None, (), dry_run, json_output)
    how |= {"format": kind, "mapping": pairs_of("--map", mapping) or None, "order": names(order), "id": run_id}
    how["validate"] = not no_validate
    if dry_run:
        given_plan = import_plan(source, dest, **how).to_dict()
        if json_output:
            print_json({"dry_run": True, "plan": given_plan})
        else:
            facts = [(name, show_bytes(value) if name == "bytes" else value) for name, value in given_plan.items()]
            console().print(table("would read", ("", ">"), facts))
        return
    with given.running("reading") as (spark, report), spark_errors():
        done = run(spark, source, dest, progress=report, **how).to_dict()
    if told_already(given, done, "import"):
        return
    facts = [
        ("target", done["dest"]),
        ("rows", done["read"]),
        ("messages", f"{done['messages']}, {show_bytes(done['bytes'])}"),
        ("refused", done["refused"]),
        ("took", f"{done['seconds']:.1f} s"),
    ]
    console().print(table(f"import {done['id']}", ("", ""), facts))
    show_topics("", done["topics"])
    if done["refused"]:
        console().print(table("refused", ("reason", "rows>"), done["reasons"].items()))
        note(f"refused rows are in {', '.join(done['refused_files'])}")
