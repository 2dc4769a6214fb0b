"""`mqstore spark`: jobs over stores that Spark runs. Each sub-command is a module, imported when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util

import click

__all__ = ["COMMANDS", "spark"]

COMMANDS = (
    "clean",
    "sql",
    "shell",
)
"""Each is the click command `NAME` in module `mqstore_tools.spark.NAME`, in the order of the help."""


def _module(name: str) -> str:
    return f"{__name__}.{name}"


class _LazyJobs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if importlib.util.find_spec(_module(name)) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = getattr(importlib.import_module(_module(cmd_name)), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_LazyJobs,
    short_help="Run jobs over many or large stores in Spark.",
    epilog="""\b
Examples:
  mqstore spark sql var/mq "select topic, count(*) from messages group by topic" --json

\b
Exit codes: 0 done, 1 findings, 2 wrong usage, 3 no Java or no pyspark, or a store that cannot be read.
`mqstore spark COMMAND --help` tells more, with examples.""",
)
def spark() -> None:
    """Run jobs over stores in Spark, on this machine or a cluster. Needs `pip install 'mqstore[spark]'` and Java 17.

    STORES are directories, store sets, or globs in quotes.
    """
