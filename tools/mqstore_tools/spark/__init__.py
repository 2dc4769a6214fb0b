"""`mqstore spark`: jobs over stores in Spark. Each sub-command is a module, imported when used."""

from __future__ import annotations

import click

from mqstore_tools.lazy import LazyGroup

__all__ = ["COMMANDS", "spark"]

COMMANDS = ("clean", "sql", "shell")
"""Names of sub-commands, in the order of the help."""


class _Commands(LazyGroup):
    package = __name__
    names = COMMANDS


@click.group(
    cls=_Commands,
    short_help="Run jobs over many or large stores in Spark.",
    epilog="""\b
Examples:
  mqstore spark sql var/mq "select topic, count(*) from messages group by topic" --json

\b
Exit codes: 0 done, 1 findings, 2 wrong usage, 3 no Java or no pyspark, or a store that cannot be read.
`mqstore spark COMMAND --help` has details and examples.""",
)
def spark() -> None:
    """Run jobs over stores in Spark, on this machine or a cluster.

    Needs `pip install 'mqstore[spark]'` and Java 17. STORES are directories, store sets, or globs in quotes.
    """
