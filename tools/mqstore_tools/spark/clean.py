"""`mqstore spark clean`: delete uncommitted files of Spark jobs. Needs neither pyspark nor Java."""

from __future__ import annotations

from pathlib import Path

import click

from mqstore.errors import ConfigError
from mqstore_tools.multi_store import duration, usable
from mqstore_tools.render import console, print_json, table
from mqstore_tools.shared import StoreCommand, json_option

__all__ = ["clean"]


@click.command(
    cls=StoreCommand,
    short_help="Delete uncommitted files of Spark jobs.",
    epilog="""\b
Examples:
  mqstore spark clean var/mq --dry-run --older-than 0s    # show all staged files, of running jobs as well
  mqstore spark clean var/mq fleet/set --older-than 7d""",
)
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--older-than",
    type=duration,
    default="7d",
    show_default=True,
    metavar="TIME",
    help="Only files unchanged for this time (36h). If it is shorter than a job, files of a running job are deleted.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
@json_option
def clean(targets: tuple[Path, ...], older_than: float, dry_run: bool, json_output: bool) -> None:
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
    if json_output:
        print_json({"dry_run": dry_run, "deleted": [{"path": str(path)} for path in found]})
        return
    rows = [(str(path),) for path in found]
    console().print(table("would delete" if dry_run else "deleted", ("path",), rows))
