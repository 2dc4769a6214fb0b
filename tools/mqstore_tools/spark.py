"""`mqstore spark`: SQL and Python over stores in Spark, and cleanup of its jobs. Only the last needs no pyspark."""

from __future__ import annotations

import base64
import code
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import click

from mqstore.errors import ConfigError
from mqstore_tools.multi_store import (
    Messages,
    duration,
    message_options,
    session,
    session_options,
    spark_errors,
    usable,
)
from mqstore_tools.render import as_json, body_text, console, json_asked, note, progress, show_tables, table
from mqstore_tools.session import Commands, dry_run_option

_BODY_BYTES = 80


@click.group(
    cls=Commands,
    short_help="Run jobs over many or large stores in Spark.",
    epilog="""\b
Examples:
  mqstore spark sql var/mq "select topic, count(*) from messages group by 1" --json

\b
Exit codes: 0 done, 1 findings, 2 wrong usage, 3 no Java or no pyspark, or a
store that cannot be read.
`mqstore spark COMMAND --help` has details and examples.""",
)
def spark() -> None:
    """Run jobs over stores in Spark, on this machine or a cluster.

    Needs `pip install 'mqstore[spark]'` and Java 17. STORES are directories, store sets, or globs in quotes.
    """


@spark.command(
    short_help="Delete uncommitted files of Spark jobs.",
    examples="""
  mqstore spark clean var/mq --dry-run --older-than 0s    # show all staged files, of running jobs as well
  mqstore spark clean var/mq fleet/set --older-than 7d""",
)
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--older-than",
    type=duration,
    default="7d",
    metavar="TIME",
    help="Only files unchanged for this time (36h). If it is shorter than a job, files of a running job are deleted.",
)
@dry_run_option
def clean(targets: tuple[Path, ...], older_than: float, dry_run: bool) -> None:
    """Delete files that crashed Spark jobs have left in stores and store sets.
    These are files in TARGET/_staging and, in a set, stores that its manifest does not list. None of them is a message.
    Each commit deletes files older than its option stagingTtl."""
    with usable():
        from mqstore.jobs import clean_target
    found: list[Path] = []
    for target in targets:
        if not target.is_dir():
            raise ConfigError(f"{target} is not a folder")
        found += clean_target(target, older_than, dry_run=dry_run)
    value = {"dry_run": dry_run, "deleted": [{"path": str(path)} for path in found]}
    cells = ("would delete" if dry_run else "deleted", ("path",), [(path,) for path in found])
    show_tables(value, cells)


@spark.command(
    short_help="Query stores in SQL.",
    examples="""
  mqstore spark sql var/mq "select topic, count(*) from messages group by 1"
  mqstore spark sql 'fleet/*' "select * from groups where lag > 1000"
  mqstore spark sql var/mq "select body from messages where tags = 'paid'" --out paid --format json
  mqstore spark sql var/mq "select * from messages" --from 1h --json | jq .topic""",
)
@message_options
@session_options
@click.argument("query")
@click.option("--out", metavar="DIR", help="Write the rows to files in this folder, which must not exist yet.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["parquet", "json", "csv", "orc"]),
    default="parquet",
    help="Format of the files in --out.",
)
@click.option("--max-rows", type=click.IntRange(1), metavar="N", default=1000, help="Limit of rows.")
def sql(
    messages: Messages,
    master: str | None,
    conf: tuple[str, ...],
    query: str,
    out: str | None,
    format_: str,
    max_rows: int,
) -> None:
    """Run QUERY, in Spark's SQL, over views of the stores in DIR.

    The views are `messages`, `queues`, `segments`, `groups`, `delay`, `traffic` and `verify`. Options filter
    `messages`. --json prints one object per line, bodies in base64. Only columns named in the query are read.
    """
    with usable():
        from mqstore.spark import sql as ask
    chosen = messages.select()
    with session(master, conf) as spark, progress("asking", _tasks_of(spark), of_bytes=False), spark_errors():
        frame = ask(spark, chosen, query)
        if out is not None:
            frame.write.format(format_).mode("errorifexists").save(str(Path(out).absolute()))
            note(f"written to {out}")
            return
        rows = [*islice(frame.limit(max_rows + 1).toLocalIterator(), max_rows + 1)]
        names = frame.columns
    _print(names, rows[:max_rows])
    if len(rows) > max_rows:
        note(f"more than {max_rows} rows; use a larger --max-rows, or --out for all")


def _tasks_of(spark: Any) -> Callable[[], tuple[int, int]]:
    """Return a function that counts (tasks done, tasks) of Spark's active stages."""
    tracker = spark.sparkContext.statusTracker()

    def count() -> tuple[int, int]:
        stages = [
            found for number in tracker.getActiveStageIds() if (found := tracker.getStageInfo(number)) is not None
        ]
        return sum(each.numCompletedTasks for each in stages), sum(each.numTasks for each in stages)

    return count


def _print(names: list[str], rows: list[Any]) -> None:
    if json_asked():
        for row in rows:
            print(as_json({name: _plain(value) for name, value in zip(names, row, strict=True)}))
    elif not rows:
        note("no rows")
    else:
        console().print(table("", names, [[_cell(value) for value in row] for row in rows]))


def _plain(value: Any) -> Any:
    """Convert a value of Spark for JSON."""
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _cell(value: Any) -> str:
    """Convert a value of Spark to text for a table."""
    if isinstance(value, bytes | bytearray):
        return body_text(bytes(value), _BODY_BYTES)
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    if isinstance(value, dict):
        return " ".join(f"{key}={each}" for key, each in value.items())
    return "-" if value is None else str(value)


@spark.command(
    short_help="Start Python with a Spark session, and stores as views.",
    examples="""
  mqstore spark shell var/mq
  echo 'print(messages.count())' | mqstore spark shell var/mq""",
    json_help="",
)
@message_options
@session_options
def shell(messages: Messages, master: str | None, conf: tuple[str, ...]) -> None:
    """Start Python with a session `spark` and a data frame for each view of the stores in DIR.
    The views are `messages`, `queues`, `segments`, `groups`, `delay`, `traffic` and `verify`, also in `spark.sql`.
    Options filter `messages`."""
    with usable():
        from mqstore.spark import create_views
    chosen = messages.select()
    with session(master, conf) as spark:
        with spark_errors():
            views = create_views(spark, chosen)
        note(f"spark {spark.version}; views: {', '.join(views)}")
        names = {"spark": spark, **{view: spark.table(view) for view in views}}
        code.interact(banner="", local=names, exitmsg="")
