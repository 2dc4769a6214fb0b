"""The columns that a frame to be written may have: one table to check and document them.

By name, in any order. A column with another name or type is refused. If a misspelt `tag` were ignored, nobody would
notice before a consumer filters by tag.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from mqstore.errors import ConfigError
from mqstore.layout.properties import DELAY, KEYS, SHARDINGKEY, TAGS, TIMER_DELAY_SEC, TIMER_DELIVER_MS, UNIQ_KEY


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
