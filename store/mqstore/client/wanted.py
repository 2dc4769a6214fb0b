"""Subscription of a consumer to a topic, the same for all consumers (clients#message-rules)."""

from __future__ import annotations

from typing import NamedTuple

from mqstore.broker.broker import Broker
from mqstore.broker.filters import Filter, as_filter
from mqstore.broker.members import Expression
from mqstore.broker.names import check_user_topic, is_dlq_topic, is_system_topic
from mqstore.errors import ConfigError, FilterError

__all__ = ["Wanted", "wanted"]


class Wanted(NamedTuple):
    """Choice of messages of a topic."""

    expression: Expression
    """Kind and text, as members register it."""
    filter: Filter | None


def wanted(broker: Broker, topic: str, tags: str = "*", sql: str | None = None) -> Wanted:
    """Return the choice of messages of `topic` by tags or by an SQL92 expression.
    Raises InvalidMessageError or NotPermittedError for a name that no user topic has, FilterError, and ConfigError for
    both.

    A blank choice of tags is refused. The engine takes it for no tag at all, which no message has, so the group would
    skip everything (delivery#tags).
    """
    # Existing topics may have other names: dead letters, or topics of a Java broker.
    if (
        type(topic) is not str
        or is_system_topic(topic)
        or not (is_dlq_topic(topic) or broker.topics.get(topic) is not None)
    ):
        check_user_topic(topic)
    if sql is not None:
        if tags != "*":
            raise ConfigError(f"topic {topic!r}: give tags or sql, not both")
        return Wanted(("SQL92", sql), broker.filter(sql, "SQL92"))
    if tags and not tags.strip():
        raise FilterError(f"topic {topic!r}: tags is blank, and would let nothing through; '*' is everything", 0)
    return Wanted(("TAG", tags), as_filter(tags))
