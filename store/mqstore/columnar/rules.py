"""Limits and topics of the target of a write (spark#encode), as plain values sent to tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mqstore.broker.names import check_user_topic
from mqstore.broker.selection import GroupHash
from mqstore.errors import InvalidMessageError
from mqstore.log.commitlog import ALLOWANCE
from mqstore.options import DEFAULT_DELAY_LEVELS, DEFAULT_MESSAGE_BYTES, Profile, StoreConfig, delay_table_ms, seconds

_DEFAULTS: Final = StoreConfig()


class TopicRule(NamedTuple):
    """Existing topic: queues to choose among, queues that a row may name, and any reason for refusal."""

    write_queues: int
    queues: int
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for records of the target store."""

    topics: Mapping[str, TopicRule] = field(default_factory=dict)
    new_queues: int = 8
    """Number of queues of a new topic."""
    group_hash: GroupHash = "jump"
    levels: int = len(delay_table_ms(DEFAULT_DELAY_LEVELS))
    max_delay_ms: int = int(seconds(_DEFAULTS.max_delay, "max_delay") * 1000)
    max_body_bytes: int = DEFAULT_MESSAGE_BYTES
    max_record_bytes: int = DEFAULT_MESSAGE_BYTES + ALLOWANCE
    profile: Profile = "mqstore"

    def topic(self, name: str) -> TopicRule:
        """Return the rule of a topic. Raises InvalidMessageError or NotPermittedError if rows may not go there."""
        known = self.topics.get(name)
        if known is None:
            check_user_topic(name)
            return TopicRule(self.new_queues, self.new_queues)
        if known.refused:
            raise InvalidMessageError(known.refused, "topic")
        return known
