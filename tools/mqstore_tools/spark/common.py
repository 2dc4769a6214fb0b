"""What the commands of `mqstore spark` share: their options, and the session they ask for.

A command is a function of a `Given`, which has the options of all jobs, and of its own options:

    @click.command(cls=StoreCommand, short_help=..., epilog=...)      errors become a line and an exit code
    @job_options                                                      STORES... --master --conf --topics --from ...
    @click.option(...)
    def lag(given: Given, max_lag: int | None) -> None: ...

It makes the selection first (wrong usage ends there), and only then asks for a session.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from mqstore import ConfigError
from mqstore_tools.many import bound, duration, names, pairs, usable
from mqstore_tools.shared import json_option

__all__ = [
    "Given",
    "bound",
    "duration",
    "job_options",
    "names",
    "spark_errors",
    "usable",
]


@dataclass(frozen=True, slots=True)
class Given:
    """The options of all jobs, as they were given."""

    stores: tuple[str, ...]
    master: str
    conf: tuple[str, ...]
    topics: str | None
    start: int | datetime | None
    stop: int | datetime | None
    where: str | None
    options: tuple[str, ...]
    json_output: bool

    def select(self, **options: str) -> Any:
        """The messages that are meant, as `mqstore.spark.selection.select` has it. ConfigError."""
        with usable():
            from mqstore.spark.selection import select
        return select(
            self.stores,
            topics=self.topics,
            start=self.start,
            stop=self.stop,
            where=self.where,
            options={**options, **pairs("--option", self.options)},
        )

    @contextmanager
    def session(self) -> Iterator[Any]:
        """Return a session that ends with the command. Raises SparkMissingError."""
        conf = pairs("--conf", self.conf)
        from mqstore.spark.sessions import session

        spark = session("mqstore spark", {**({"spark.master": self.master} if self.master else {}), **conf})
        try:
            yield spark
        finally:
            spark.stop()


@contextmanager
def spark_errors() -> Iterator[None]:
    """Around what a query can do wrong: the first line of what Spark says of it, which is wrong usage, and no trace."""
    try:
        yield
    except Exception as error:
        condition = getattr(error, "getCondition", None)
        if condition is None:
            raise
        said = str(error).strip().split("\n\nJVM stacktrace", 1)[0].splitlines()
        raise ConfigError(said[0] if said else repr(error)) from error


_OPTIONS = (
    click.argument("stores", metavar="STORES...", nargs=-1, required=True),
    click.option(
        "--master",
        metavar="URL",
        default="",
        help="Where Spark runs; local[*] if nothing says otherwise.",
    ),
    click.option("--conf", metavar="NAME=VALUE", multiple=True, help="A setting of Spark; may be repeated."),
    click.option("--topics", metavar="NAMES", help="Only these topics, separated by commas; without it all of users."),
    click.option(
        "--from",
        "start",
        type=bound,
        metavar="WHERE",
        help="Begin at this queue offset of each queue, at this time (UTC unless it says otherwise), or so long ago "
        "(36h).",
    ),
    click.option("--to", "stop", type=bound, metavar="WHERE", help="End before it, likewise."),
    click.option("--where", metavar="SQL", help="Only messages whose properties fulfil this SQL92 expression."),
    click.option(
        "--option",
        "options",
        metavar="NAME=VALUE",
        multiple=True,
        help="An option of the Spark source (onCorrupt=skip, tags=A, minPartitions=8, ...); may be repeated.",
    ),
    json_option,
)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """STORES and the options of all jobs, given to the function as one `Given` before its own."""

    @functools.wraps(command)
    def with_given(**values: Any) -> Any:
        common = {name: values.pop(name) for name in Given.__slots__}
        return command(Given(**common), **values)

    decorated: Callable[..., Any] = with_given
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
