"""What a subscription lets through: tags by hash and by name, or an SQL92 expression (delivery#filters).

A filter is asked twice: `units` for many units of a queue, then `accepts` for each message, whose word is final. Units
know only the tag's hash: tag filters guess from it, SQL filters let every unit pass.

    expression                      kind TAG (delivery#tags)                     kind SQL92 (delivery#sql92)
    None, empty                     everything                                   error
    *                               everything                                   error
    A || B                          tags A and B, trimmed; empty pieces dropped  error
    || (bars and nothing else)      error                                        error
    blank, or blanks between bars   no message                                   error
    * || A                          a tag named * and tag A                      error

The log's own `parse_tags` differs: there a person reads a store and is told of a filter that cannot mean anything; here
subscriptions mean what RocketMQ takes them to mean. Units of `SCHEDULE_TOPIC` bear times in place of hashes: whoever
reads that topic does so without a filter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mqstore.broker import sql92
from mqstore.broker.javanumbers import JAVA_BLANKS
from mqstore.errors import FilterError
from mqstore.layout.properties import TAGS
from mqstore.log.tagfilter import TagFilter, UnitFilter, refuse_single_bar

if TYPE_CHECKING:
    from mqstore.log.message import Message

__all__ = ["CACHED", "Filter", "FilterKind", "SqlSubscription", "TagSubscription", "as_filter", "parse_filter"]

FilterKind = Literal["TAG", "SQL92"]

CACHED = 100
"""Expressions whose filter, or error, is remembered."""


class Filter(UnitFilter, Protocol):
    """What a subscription lets through. Immutable and shared between threads.

    >>> paid = parse_filter("paid || refunded")
    >>> paid.matches({"TAGS": "paid"}), paid.matches({"TAGS": "created"})
    (True, False)
    >>> parse_filter("price > 5", "SQL92").matches({"price": "7"})
    True
    """

    @property
    def expression(self) -> str:
        """As the subscriber wrote it."""

    @property
    def kind(self) -> FilterKind: ...

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Whether a message with all these stored properties passes."""


class TagSubscription(TagFilter):
    """Passes messages whose tag is one of `tags`; none at all if there are none."""

    __slots__ = ("expression",)

    def __init__(self, expression: str, tags: frozenset[str]) -> None:
        super().__init__(tags)
        self.expression = expression

    @property
    def kind(self) -> FilterKind:
        return "TAG"

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Whether the tag in `properties` is one of `tags`."""
        return properties.get(TAGS) in self.tags

    def __repr__(self) -> str:
        return f"TagSubscription({self.expression!r})"


class SqlSubscription:
    """Passes messages on whose properties, the system's included, an SQL92 expression is True."""

    __slots__ = ("_expression", "expression")

    def __init__(self, expression: sql92.Expression) -> None:
        self.expression = expression.text
        self._expression = expression

    @property
    def kind(self) -> FilterKind:
        return "SQL92"

    def units(self, tags_codes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """All of them: a unit says nothing about properties."""
        return np.ones(len(tags_codes), np.bool_)

    def accepts(self, message: Message) -> bool:
        """Whether the expression is True on the properties of `message`; see `Expression.matches` for errors."""
        return self._expression.matches(message.stored_properties())

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Whether the expression is True on `properties`."""
        return self._expression.matches(properties)

    def __repr__(self) -> str:
        return f"SqlSubscription({self.expression!r})"


def parse_filter(expression: str | None, kind: str = "TAG") -> Filter | None:
    """The filter that `expression` stands for; None for one that passes everything.

    Raises FilterError with the `.position` in the expression.

    >>> parse_filter("paid || refunded").matches({"TAGS": "paid"})
    True
    >>> parse_filter("amount > 100", "SQL92").matches({"amount": "99"})
    False
    >>> parse_filter("*") is None
    True
    """
    if not isinstance(expression, str | None):
        raise FilterError(f"a filter is a str, not {type(expression).__name__}", 0)
    parsed = _parsed(expression or "", kind)
    if isinstance(parsed, FilterError):
        # A copy: tracebacks of all who ask would pile up on the one that is remembered.
        raise FilterError(str(parsed), parsed.position)
    return parsed


@lru_cache(maxsize=CACHED)
def _parsed(expression: str, kind: str) -> Filter | FilterError | None:
    try:
        if kind == "TAG":
            return _parse_tags(expression)
        if kind == "SQL92":
            return _parse_sql(expression)
        return FilterError(f"filter type {kind!r} is not known; use 'TAG' or 'SQL92'", 0)
    except FilterError as error:
        return FilterError(str(error), error.position)  # without the frames that it was raised through


def _parse_tags(expression: str) -> TagSubscription | None:
    if expression in ("", "*"):
        return None
    pieces = expression.split("||")
    if not any(pieces):
        raise FilterError(f"tags {expression!r}: bars with no tag beside them; write 'A || B', or '*' for every tag", 0)
    return TagSubscription(expression, frozenset(piece.strip(JAVA_BLANKS) for piece in pieces) - {""})


def _parse_sql(expression: str) -> SqlSubscription:
    if not expression:
        raise FilterError("an SQL92 filter needs an expression; to receive everything use tags '*'", 0)
    return SqlSubscription(sql92.compile(expression))


def as_filter(given: Filter | str | None) -> Filter | None:
    """A filter as callers name it: an expression over tags, a parsed filter, or None for everything.

    FilterError for text that looks like SQL, or has a single bar. A tag that a Java client has given such a name SQL92
    finds.
    """
    if not isinstance(given, str):
        return given
    refuse_single_bar(given)
    at = next((i for i, c in enumerate(given) if c in "<>='\"()"), None)
    if at is not None:
        raise FilterError(f"{given!r} is no choice of tags; for SQL92: Broker.filter(expression, 'SQL92')", at)
    return parse_filter(given)
