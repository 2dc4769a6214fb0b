"""What a consumer subscribes to in a topic, as all kinds of consumers are told it (clients#message-rules)."""

from __future__ import annotations

from typing import NamedTuple

from mqstore.broker.broker import Broker
from mqstore.broker.filters import Filter, as_filter
from mqstore.broker.members import Expression
from mqstore.broker.names import check_user_topic, is_dlq_topic, is_system_topic
from mqstore.errors import ConfigError, FilterError

__all__ = ["Wanted", "wanted"]


class Wanted(NamedTuple):
    """Which messages of a topic."""

    expression: Expression
    """Kind and text, as members register it."""
    filter: Filter | None


def wanted(broker: Broker, topic: str, tags: str = "*", sql: str | None = None) -> Wanted:
    """Of `topic`, by tags or by an SQL92 expression. InvalidMessageError or NotPermittedError for a name that no topic
    of a user's has, FilterError, ConfigError for both.

    A blank choice of tags is refused: the engine takes it for no tag at all, which no message has, and the group would
    pass over everything (delivery#tags).
    """
    # What is there may be named otherwise: dead letters, or what a Java broker made.
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
