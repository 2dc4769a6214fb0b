"""Stores as views of SQL: `messages`, and each of the source's small tables.

Spark asks a Python source for every column that a frame has, whatever a query uses. So `sql` looks at the text first:
columns that it does not name are left out of `messages`. When that cannot be told (a `*` that is no `count(*)`, a table
without a select, pipes) all columns are there.

Knows no pyspark: the session it is given does.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

from mqstore.spark.columns import default_columns
from mqstore.spark.options import View, not_for
from mqstore.spark.selection import Selection, Stores, select
from mqstore.spark.views import VIEWS

__all__ = ["columns_of", "create_views", "sql"]

_MESSAGES: Final = "messages"
_WORD: Final = re.compile(r"[a-z_][a-z0-9_]*")
_COUNT_ALL: Final = re.compile(r"\bcount\s*\(\s*\*\s*\)")
_UNCLEAR: Final = re.compile(r"\*|\|>|--|/\*|\bnatural\b|\btable\b|\bdescribe\b|\bexcept\s*\(|\(\s*from\b")
"""What may ask for columns without naming them, or hide names."""
_ALWAYS: Final = "queue_offset"
"""A frame has one column at least; this one costs nothing but its unit."""


def columns_of(query: str, *, keep: bool = False) -> tuple[str, ...] | None:
    """The columns of `messages` that a query can mean; None for all. More than it uses, maybe, and never fewer.

    >>> columns_of("select topic, count(*) from messages where Tags = 'a' group by topic")
    ('topic', 'tags')
    >>> columns_of("select * from messages")
    """
    text = _COUNT_ALL.sub("count()", query.lower())
    if _UNCLEAR.search(text) or not re.match(r"\s*(select|with)\b", text):
        return None
    named = set(_WORD.findall(text))
    return tuple(name for name in default_columns(keep=keep) if name in named) or (_ALWAYS,)


def create_views(spark: Any, stores: Stores | Selection) -> tuple[str, ...]:
    """Make `messages` and each small table (`queues`, `segments`, `groups`, `delay`, `traffic`, `verify`) a temporary
    view of the session; their names. Raises ConfigError, and what Spark raises."""
    return _create(spark, select(stores), (_MESSAGES, *VIEWS), None)


def sql(spark: Any, stores: Stores | Selection, query: str) -> Any:
    """The frame of a query over temporary views of `stores`: `messages`, `queues`, `segments`, `groups`, `delay`,
    `traffic`, `verify`. The views stay until the session ends, or the next query over other stores; `messages` has the
    columns that this query names. Raises ConfigError, and what Spark raises."""
    chosen = select(stores)
    named = set(_WORD.findall(query.lower()))
    wanted = tuple(name for name in (_MESSAGES, *VIEWS) if name in named)
    columns = columns_of(query, keep=chosen.options.on_corrupt == "keep")
    _create(spark, chosen, wanted, columns)
    try:
        return spark.sql(query)
    except Exception as error:
        condition = getattr(error, "getCondition", lambda: None)()
        if columns is None or not str(condition).startswith("UNRESOLVED_COLUMN"):
            raise
    # Misspelt, and Spark suggests columns that it has; or named in a way that `columns_of` misses.
    _create(spark, chosen, wanted, None)
    return spark.sql(query)


def _create(
    spark: Any, selection: Selection, wanted: tuple[str, ...], columns: tuple[str, ...] | None
) -> tuple[str, ...]:
    given = {name: value for name, value in selection.given.items() if name.lower() not in ("columns", "view")}
    for name in wanted:
        source = spark.read.format("mqstore")
        if name == _MESSAGES:
            frame = _messages(source.options(**given), selection, columns)
        else:
            unfit = {option.lower() for option in not_for(cast(View, name))}
            whole = {option: value for option, value in given.items() if option.lower() not in unfit}
            frame = source.options(**whole).option("view", name).load()
        frame.createOrReplaceTempView(name)
    return wanted


def _messages(source: Any, selection: Selection, columns: tuple[str, ...] | None) -> Any:
    for name, bound in zip(("startingTimestamp", "endingTimestamp"), selection.times_ms, strict=True):
        if abs(bound) < 1 << 62:
            source = source.option(name, str(bound))
    columns = columns or selection.options.columns
    (low, high), bounded = selection.offsets, selection.offsets != Selection(selection.options).offsets
    if columns is not None:
        kept = (*columns, *(("queue_offset",) if bounded and "queue_offset" not in columns else ()))
        source = source.option("columns", ",".join(kept))
    frame = source.load()
    return frame.where(f"queue_offset >= {low} and queue_offset < {high}") if bounded else frame
