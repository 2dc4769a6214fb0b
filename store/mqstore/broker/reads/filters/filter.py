"""Filters of subscriptions: tags by hash and by name, or an SQL92 expression (delivery#filters).

A filter is used twice: `prefilter` for many units of a queue, then `apply` for the messages, which is exact. A unit has
only the tag's hash, so a tag filter may pass too many units, and an SQL filter passes all.

    expression                      kind TAG (delivery#tags)                     kind SQL92 (delivery#sql92)
    None, empty                     everything                                   error
    *                               everything                                   error
    A || B                          tags A and B, trimmed; empty pieces dropped  error
    || (bars and nothing else)      error                                        error
    blank, or blanks between bars   no message                                   error
    * || A                          a tag named * and tag A                      error

`parse_tags` of the log differs: it is for people who read a store, and refuses meaningless filters. Here subscriptions
have the same meaning as in RocketMQ. Units of `SCHEDULE_TOPIC` have times instead of hashes, so that topic is read
without a filter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, Protocol

from mqstore.errors import FilterError
from mqstore.layout.properties import TAGS
from mqstore.log.reading.tagfilter import JAVA_BLANKS, TagFilter, UnitFilter, refuse_other_types, refuse_single_bar

FilterKind = Literal["TAG", "SQL92"]

CACHED = 100
"""Number of expressions whose filter is cached."""


class Filter(UnitFilter, Protocol):
    """Filter of a subscription. Immutable and shared between threads.

    >>> paid = parse_filter("paid || refunded")
    >>> paid.matches({"TAGS": "paid"}), paid.matches({"TAGS": "created"})
    (True, False)
    >>> parse_filter("price > 5", "SQL92").matches({"price": "7"})
    True
    """

    @property
    def expression(self) -> str:
        """Expression of the subscriber, unchanged."""

    @property
    def kind(self) -> FilterKind: ...

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Return True if a message with all these stored properties passes."""


class TagSubscription(TagFilter):
    """Filter for messages whose tag is one of `tags`. Without tags no message passes."""

    __slots__ = ("expression",)

    kind: Literal["TAG"] = "TAG"

    def __init__(self, expression: str, tags: frozenset[str]) -> None:
        super().__init__(tags)
        self.expression = expression

    def matches(self, properties: Mapping[str, str]) -> bool:
        return properties.get(TAGS) in self.tags

    def __reduce__(self) -> tuple[object, ...]:
        return parse_filter, (self.expression, self.kind)

    def __repr__(self) -> str:
        return f"TagSubscription({self.expression!r})"


def parse_filter(expression: str | None, kind: str = "TAG") -> Filter | None:
    """Return the filter for `expression`, or None if all messages pass.

    Raises FilterError with the `.position` in the expression.

    >>> parse_filter("paid || refunded").matches({"TAGS": "paid"})
    True
    >>> parse_filter("amount > 100", "SQL92").matches({"amount": "99"})
    False
    >>> parse_filter("*") is None
    True
    """
    if not isinstance(expression, str | None):
        raise FilterError(f"a filter must be a str, not {type(expression).__name__}", 0)
    return _parsed(expression or "", kind)


@lru_cache(maxsize=CACHED)
def _parsed(expression: str, kind: str) -> Filter | None:
    if kind == "TAG":
        return _parse_tags(expression)
    if kind == "SQL92":
        return _parse_sql(expression)
    raise FilterError(f"unknown filter type {kind!r}; use 'TAG' or 'SQL92'", 0)


def _parse_tags(expression: str) -> TagSubscription | None:
    if expression in ("", "*"):
        return None
    pieces = expression.split("||")
    if not any(pieces):
        raise FilterError(f"tags {expression!r}: a bar without a tag; write 'A || B', or '*' for every tag", 0)
    return TagSubscription(expression, frozenset(piece.strip(JAVA_BLANKS) for piece in pieces) - {""})


def _parse_sql(expression: str) -> Filter:
    from mqstore.broker.reads.filters import sql92  # few programs need it, and its expressions take long to compile

    if not expression:
        raise FilterError("an SQL92 filter needs an expression; to receive everything use tags '*'", 0)
    return sql92.compile(expression)


def as_filter(given: Filter | str | None) -> Filter | None:
    """Return a filter for a tag expression, a parsed filter, or None for all messages.
    Raises FilterError for other types, and for text that looks like SQL, or has a single bar. SQL92 can still find tags
    with such names, for example of a Java client."""
    if not isinstance(given, str):
        if given is not None and not hasattr(given, "matches"):
            refuse_other_types(given)
        return given
    refuse_single_bar(given)
    at = next((i for i, c in enumerate(given) if c in "<>='\"()"), None)
    if at is not None:
        raise FilterError(f"{given!r} is not a tag expression; for SQL92 use Broker.filter(expression, 'SQL92')", at)
    return parse_filter(given)
