"""What the commands share that take one store or many: DIR..., --jobs, and the choice of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

import click

from mqstore_tools.opened import moment

__all__ = [
    "between_options",
    "duration",
    "jobs_option",
    "names",
    "option_option",
    "pairs",
    "stores_argument",
    "topic_option",
    "usable",
    "where_option",
]

F = TypeVar("F", bound=Callable[..., Any])

stores_argument = click.argument("stores", metavar="DIR...", nargs=-1, required=True)
jobs_option = click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Work in N processes."
)
topic_option = click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
where_option = click.option(
    "--where", metavar="SQL", help="Only messages whose properties fulfil this SQL92 expression."
)
option_option = click.option(
    "--option",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    help="An option of the Spark source (onCorrupt=skip, tags=A, verify=true, ...); may be repeated.",
)


def _time(value: Any) -> datetime:
    if isinstance(value, str) and value.isdecimal():
        raise click.BadParameter(
            f"{value} is no time (2026-01-31, 36h); for queue offsets use --option startingOffsets or endingOffsets"
        )
    return moment(value)


def between_options(command: F) -> F:
    """Options --from and --until, given to the command as `start` and `stop`."""
    command = click.option("--until", "stop", type=_time, metavar="TIME", help="End before it, likewise.")(command)
    return click.option(
        "--from",
        "start",
        type=_time,
        metavar="TIME",
        help="Begin at this time of storing (UTC unless it says otherwise), or so long ago (36h).",
    )(command)


def duration(value: Any) -> float:
    """Convert the value of an option: a length of time, in seconds."""
    if isinstance(value, float):
        return value
    from mqstore.spark.options import duration_s

    try:
        return duration_s(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is {error}; as in 36h") from error


def names(value: str | None) -> tuple[str, ...] | None:
    """Return names that are separated by commas; None for an option that was not given."""
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


def pairs(option: str, given: tuple[str, ...]) -> dict[str, str]:
    """Return the values of an `option` that is given as NAME=VALUE, by name."""
    found = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.UsageError(f"{option} {text!r} is not NAME=VALUE")
        found[name] = value
    return found


@contextmanager
def usable() -> Iterator[None]:
    """Make the import of a job that lacks a package wrong usage: the text says what to install."""
    try:
        yield
    except ImportError as error:
        text = "this command needs pyarrow: pip install 'mqstore[spark]', or pyarrow alone"
        raise click.UsageError(text if "pyarrow" in str(error) else str(error)) from error
