"""What the commands of `mqstore spark` share: their options, and the session they ask for.

A command is a function of a `Given`, which has the options of all jobs, and of its own options:

    @click.command(cls=StoreCommand, short_help=..., epilog=...)      errors become a line and an exit code
    @job_options                                                      STORES... --master --conf --topic --from ...
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

from mqstore.errors import ConfigError
from mqstore_tools.many import (
    between_options,
    duration,
    option_option,
    pairs,
    topic_option,
    usable,
    where_option,
)
from mqstore_tools.shared import json_option

__all__ = [
    "Given",
    "duration",
    "job_options",
    "spark_errors",
    "usable",
]


@dataclass(frozen=True, slots=True)
class Given:
    """The options of all jobs, as they were given."""

    stores: tuple[str, ...]
    master: str
    conf: tuple[str, ...]
    topics: tuple[str, ...]
    start: datetime | None
    stop: datetime | None
    where: str | None
    options: tuple[str, ...]
    json_output: bool

    def select(self, **options: str) -> Any:
        """The messages that are meant, as `mqstore.spark.selection.select` has it. ConfigError."""
        with usable():
            from mqstore.spark.selection import select
        return select(
            self.stores,
            topics=self.topics or None,
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
    topic_option,
    between_options,
    where_option,
    option_option,
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
