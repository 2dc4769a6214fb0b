"""Common parts of the commands of `mqstore spark`: their session and its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from mqstore.errors import ConfigError
from mqstore_tools.many import pairs

__all__ = ["session", "session_options", "spark_errors"]

F = TypeVar("F", bound=Callable[..., Any])


def session_options(command: F) -> F:
    """Add the options that say where Spark runs."""
    command = click.option("--conf", metavar="NAME=VALUE", multiple=True, help="A setting of Spark; may be repeated.")(
        command
    )
    return click.option(
        "--master", metavar="URL", default="", help="Where Spark runs; local[*] if nothing says otherwise."
    )(command)


@contextmanager
def session(master: str, conf: tuple[str, ...]) -> Iterator[Any]:
    """Return a session that ends with the command. Raises SparkMissingError."""
    settings = pairs("--conf", conf)
    from mqstore.spark import sessions

    spark = sessions.session("mqstore spark", {**({"spark.master": master} if master else {}), **settings})
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def spark_errors() -> Iterator[None]:
    """Context of a query. Its errors become wrong usage, with the first line of what Spark says."""
    try:
        yield
    except Exception as error:
        condition = getattr(error, "getCondition", None)
        if condition is None:
            raise
        said = str(error).strip().split("\n\nJVM stacktrace", 1)[0].splitlines()
        raise ConfigError(said[0] if said else repr(error)) from error
