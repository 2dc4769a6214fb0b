"""Columns of a frame to be written, and the limits and topics of its target (spark#encode).

Columns are found by name, in any order. A column with another name or type is refused. If a misspelt `tag` were
ignored, nobody would notice before a consumer filters by tag. Rules are plain values, sent to tasks.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from mqstore.broker.routing.selection import GroupHash
from mqstore.broker.tables.names import check_user_topic
from mqstore.errors import ConfigError, InvalidMessageError
from mqstore.layout.properties import DELAY, KEYS, SHARDINGKEY, TAGS, TIMER_DELAY_SEC, TIMER_DELIVER_MS, UNIQ_KEY
from mqstore.log.commitlog import ALLOWANCE
from mqstore.options import DEFAULT_DELAY_LEVELS, DEFAULT_MESSAGE_BYTES, Profile, StoreConfig, delay_table_ms, seconds


@dataclass(frozen=True, slots=True)
class Input:
    """Column of a frame. `types` are its SQL types, `absent` is the value if it is null or missing."""

    name: str
    types: tuple[str, ...]
    absent: str
    meaning: str
    property: str | None = None
    """Stored property of this column, if it is stored as one."""


_TABLE: Final = (
    Input("body", ("binary", "string"), "refused", "the message; may be empty"),
    Input("topic", ("string",), "refused", "where it goes; option `topic` wins"),
    Input("tags", ("string",), "none", "one tag; no `|`", TAGS),
    Input("keys", ("string", "array<string>"), "none", "keys to find it by: separated by blanks, or an array", KEYS),
    Input(
        "properties",
        ("map<string,string>",),
        "none",
        "all else; reserved names, control characters and blank texts are refused, a null value is left out",
    ),
    Input("queue_id", ("int",), "by sharding_key", "the queue; wins over sharding_key"),
    Input(
        "sharding_key",
        ("string",),
        "by turns",
        "message group: all messages of one go to one queue, the same that a producer puts them to",
        SHARDINGKEY,
    ),
    Input("delay_level", ("int",), "no delay", "wait by a level of the store's table; 0 is none", DELAY),
    Input("deliver_time", ("timestamp",), "no delay", "wait until then", TIMER_DELIVER_MS),
    Input(
        "delay_seconds", ("int", "bigint"), "no delay", "wait so long, from when the task writes it", TIMER_DELAY_SEC
    ),
    Input("born_timestamp", ("timestamp",), "now", "when it came into being"),
    Input("flag", ("int",), "0", "the user's number"),
    Input(
        "unique_key",
        ("string",),
        "derived",
        "the same in all copies of a message; derived from txnAppId and txnVersion (of a stream: from query and "
        "batch), partition and row, so that readers can leave out copies",
        UNIQ_KEY,
    ),
    Input(
        "record",
        ("binary",),
        "refused",
        "a whole message as it was stored, in place of `body` and all else except `topic` and `queue_id`",
    ),
)

INPUTS: Final[Mapping[str, Input]] = {each.name: each for each in _TABLE}
"""Every column by its name."""
KAFKA: Final = {"value": "body", "key": "keys", "topic": "topic", "partition": "queue_id", "headers": "properties"}
"""The columns of Spark's Kafka sink, and their names here."""
_KAFKA_TYPES: Final = {"key": ("binary", "string"), "headers": ("array<struct<key:string,value:binary>>",)}
_KAFKA_INPUTS: Final[Mapping[str, Input]] = {
    name: replace(INPUTS[here], name=name, types=_KAFKA_TYPES.get(name, INPUTS[here].types))
    for name, here in KAFKA.items()
}
_BESIDE_RECORD: Final = ("topic", "queue_id")


def is_kafka(names: Collection[str]) -> bool:
    """Return True for the columns of Spark's Kafka sink: `value`, and neither `body` nor `record`."""
    return "value" in names and "body" not in names and "record" not in names


def check_columns(types: Mapping[str, str], *, topic: str | None) -> None:
    """Raise ConfigError unless a frame of these columns (name -> SQL type) can be written. `topic` is the option."""
    kafka = is_kafka(types)
    table = _KAFKA_INPUTS if kafka else INPUTS
    for name, kind in types.items():
        known = table.get(name)
        if known is None:
            close = difflib.get_close_matches(name.lower(), table, 1, 0.6)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            rest = "Put other values into properties, a map<string,string>"
            if kafka:
                rest = "A frame with `value` counts as one of Kafka's; with `body` in its place there are others"
            raise ConfigError(
                f"column {name!r} cannot be written{hint} The columns are {', '.join(table)}. {rest}; drop or rename it"
            )
        if kind not in known.types:
            wanted = " or ".join(known.types)
            raise ConfigError(
                f"column {name!r} is {kind}, and must be {wanted}: cast it, or to_json() it if it is nested"
            )
    if "record" in types:
        others = [name for name in types if name not in ("record", *_BESIDE_RECORD)]
        if others:
            raise ConfigError(
                f"column 'record' is a whole message: drop {', '.join(others)}; the other columns may be "
                f"{', '.join(_BESIDE_RECORD)}"
            )
        return
    if "body" not in types and not kafka:
        raise ConfigError(f"column 'body' is missing; the frame has {', '.join(types) or 'none'}")
    if topic is None and "topic" not in types:
        raise ConfigError("no topic: add column 'topic', or give option topic")


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
