"""Options that commands for one store or many share: DIR..., --spark, and the choice of messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from mqstore.errors import ConfigError
from mqstore_tools.session import moment, to_ms

if TYPE_CHECKING:
    from mqstore.admin import Search

stores_argument = click.argument(
    "stores", metavar="DIR...", nargs=-1, required=True, type=click.Path(readable=False, allow_dash=True)
)
spark_option = click.option(
    "--spark", "master", metavar="MASTER", help="Run on Spark with this master: local[4], or the URL of a cluster."
)
topic_option = click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")


def _time(value: Any) -> datetime:
    if isinstance(value, str) and value.isdecimal():
        raise click.BadParameter(
            f"{value} is not a time (2026-01-31, 36h); for queue offsets use --option startingOffsets or endingOffsets"
        )
    return moment(value)


@dataclass(frozen=True, slots=True)
class Messages:
    """Stores and the choice of their messages, from the command line."""

    stores: tuple[str, ...]
    topics: tuple[str, ...]
    start: datetime | None
    stop: datetime | None
    where: str | None
    options: tuple[str, ...]

    def select(self) -> Any:
        """Return the selection of `mqstore.jobs.select`."""
        from mqstore.jobs import select

        options = pairs("--option", self.options)
        topics = self.topics or None
        return select(self.stores, topics=topics, start=self.start, stop=self.stop, where=self.where, options=options)


from_option = click.option(
    "--from",
    "start",
    type=_time,
    metavar="TIME",
    help="Only messages stored since a time (UTC by default) or an age (36h).",
)
until_option = click.option(
    "--until", "stop", type=_time, metavar="TIME", help="Only messages stored before a time or an age."
)
where_option = click.option(
    "--where", metavar="SQL", help="Only messages whose properties match this SQL92 expression."
)
FILTERS = (
    click.option("--key", help="Only messages with this key, newest first."),
    click.option("--unique-key", help="Only messages with this unique key, newest first."),
    click.option("--tag", "tags", metavar="EXPR", default="*", help="Only these tags, as in 'created || paid'."),
    click.option(
        "--grep", metavar="PATTERN", help="Only messages whose body has a match of this Python regular expression."
    ),
)
"""Options that choose messages of one store, with those of `message_options`: fields of `mqstore.admin.Search`."""
_CHOICE = (
    stores_argument,
    topic_option,
    from_option,
    until_option,
    where_option,
    click.option(
        "--option",
        "options",
        metavar="NAME=VALUE",
        multiple=True,
        help="Option of the Spark source (onCorrupt=skip, tags=A, verify=true, ...); may be repeated.",
    ),
)


def message_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add DIR... and the options that choose messages, given to the function as one `Messages`."""

    @functools.wraps(command)
    def with_messages(**values: Any) -> Any:
        return command(messages=Messages(**{name: values.pop(name) for name in Messages.__slots__}), **values)

    return with_options(*_CHOICE)(with_messages)


def search_of(topics: tuple[str, ...], queue_id: int | None, filters: Mapping[str, Any]) -> Search:
    """Return the search of `FILTERS`, `from_option`, `until_option` and `where_option`. Raises FilterError."""
    from mqstore.admin import Search

    given = dict(filters)
    start, stop = (None if (when := given.pop(name)) is None else to_ms(when) for name in ("start", "stop"))
    return Search(topics, queue_id, start_ms=start, stop_ms=stop, **given)


def with_options(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds these arguments and options, in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def duration(value: Any) -> float:
    """Return the value of an option, a duration, in seconds."""
    if isinstance(value, float):
        return value
    from mqstore.jobs import duration_s

    try:
        return duration_s(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a length of time, such as 36h") from None


def names(value: str | None) -> tuple[str, ...] | None:
    """Split names at commas. Return None for an option that was not given."""
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


def pairs(option: str, given: tuple[str, ...]) -> dict[str, str]:
    """Return the NAME=VALUE pairs of an `option` as a dict."""
    found = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.UsageError(f"{option} {text!r} is not NAME=VALUE")
        found[name] = value
    return found


@contextmanager
def usable() -> Iterator[None]:
    """Turn an ImportError of a job into a UsageError that says which package to install."""
    try:
        yield
    except ImportError as error:
        text = "this command needs pyarrow: pip install 'mqstore[spark]', or pyarrow alone"
        raise click.UsageError(text if "pyarrow" in str(error) else str(error)) from error


session_options = with_options(
    click.option("--master", metavar="URL", help="Master of Spark (default: Spark's own, or local[*])."),
    click.option("--conf", metavar="NAME=VALUE", multiple=True, help="Setting of Spark; may be repeated."),
)


@contextmanager
def session(master: str | None, conf: tuple[str, ...]) -> Iterator[Any]:
    """Yield a session that ends with the command. Raises SparkMissingError."""
    settings = pairs("--conf", conf)
    from mqstore import spark as library

    spark = library.session("mqstore spark", {**({"spark.master": master} if master else {}), **settings})
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def on_spark(master: str | None) -> Iterator[Any]:
    """Yield a session with the `master` of --spark, which ends with the command, or None without the option."""
    if master is None:
        yield None
        return
    with session(master, ()) as spark, spark_errors():
        yield spark


@contextmanager
def spark_errors() -> Iterator[None]:
    """Turn Spark's errors of a query into a ConfigError with the first line of their text."""
    try:
        yield
    except Exception as error:
        condition = getattr(error, "getCondition", None)
        if condition is None:
            raise
        said = str(error).strip().split("\n\nJVM stacktrace", 1)[0].splitlines()
        raise ConfigError(said[0] if said else repr(error)) from error
