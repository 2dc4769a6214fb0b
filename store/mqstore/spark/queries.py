"""Stores as SQL views: `messages`, and each of the source's small tables.

Spark asks a Python source for every column of a frame, even if a query does not use it. So `sql` searches the text for
names of columns, and leaves the others out of `messages`. If the text is not clear (a `*` other than `count(*)`, a
table without a select, pipes) all columns are included.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

from mqstore.columnar.columns import default_columns
from mqstore.jobs.options.options import View, not_for
from mqstore.jobs.options.selection import Selection, Stores, select
from mqstore.jobs.views import VIEWS

_MESSAGES: Final = "messages"
_WORD: Final = re.compile(r"[a-z_][a-z0-9_]*")
_COUNT_ALL: Final = re.compile(r"\bcount\s*\(\s*\*\s*\)")
_UNCLEAR: Final = re.compile(r"\*|\|>|--|/\*|\bnatural\b|\btable\b|\bdescribe\b|\bexcept\s*\(|\(\s*from\b")
"""Text that may name no columns, or hide names."""
_ALWAYS: Final = "queue_offset"
"""Column of a frame for a query without columns. It is the cheapest, since only units are read."""


def columns_of(query: str, *, keep: bool = False) -> tuple[str, ...] | None:
    """Return the columns of `messages` that a query can mean, or None for all.

    There may be more than the query uses, never fewer.

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
    """Create temporary views `messages`, `queues`, `segments`, `groups` and so on. Return their names.
    Raises ConfigError, and Spark's errors."""
    return _create(spark, select(stores), (_MESSAGES, *VIEWS), None)


def sql(spark: Any, stores: Stores | Selection, query: str) -> Any:
    """Create the views of `create_views` that a query names, and return its frame.

    The views remain until the session ends, or until the next query of other stores. `messages` has the columns that
    this query names. Raises ConfigError, and Spark's errors."""
    chosen = select(stores)
    named = set(_WORD.findall(query.lower()))
    wanted = tuple(name for name in (_MESSAGES, *VIEWS) if name in named)
    _create(spark, chosen, wanted, columns_of(query, keep=chosen.options.on_corrupt == "keep"))
    return spark.sql(query)


def _create(
    spark: Any, selection: Selection, wanted: tuple[str, ...], columns: tuple[str, ...] | None
) -> tuple[str, ...]:
    columns = columns or selection.options.columns
    for name in wanted:
        unfit = {"columns", "view", *(option.lower() for option in not_for(cast(View, name)) if name != _MESSAGES)}
        source = spark.read.format("mqstore").option("view", name)
        source = source.options(**{key: value for key, value in selection.given.items() if key.lower() not in unfit})
        if name == _MESSAGES and columns is not None:
            source = source.option("columns", ",".join(columns))
        source.load().createOrReplaceTempView(name)
    return wanted
