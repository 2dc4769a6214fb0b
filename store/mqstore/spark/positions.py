"""How far a stream has come, and how Spark keeps that in its checkpoint (spark#stream). Knows no Spark.

`{"v":1,"s":{store:{topic:{queue:n}}}}`, n the queue offset of the next message; with readBy=log, which has one position
a store, `{"v":1,"p":{store:physical offset}}`. Spark compares offsets as text, so each has one spelling: sorted.

A store without a name of its own goes by its absolute path, however the query spelled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from mqstore.errors import ConfigError

__all__ = ["ANY", "EARLIEST", "LATEST", "Key", "Offsets", "decode_offset", "encode_offset"]

_VERSION = 1
EARLIEST: Final = -2
LATEST: Final = -1
"""Stand for an offset in the options, as in those of Kafka's source."""


class Key(NamedTuple):
    """A queue; of a log, topic "" and queue -1."""

    store: str
    topic: str = ""
    queue_id: int = -1

    def __str__(self) -> str:
        return f"{self.store}: {self.topic}, queue {self.queue_id}" if self.topic else f"{self.store}: the log"


ANY: Final = Key("")
"""Every queue and log that is not named."""
Offsets = dict[Key, int]
"""Offset of each queue (queue offset) or log (physical offset)."""


def encode_offset(offsets: Mapping[Key, int], *, by_log: bool) -> dict[str, Any]:
    """Return the JSON of an offset, its names sorted.

    >>> encode_offset({Key("s", "t", 10): 5, Key("s", "t", 9): 0}, by_log=False)
    {'v': 1, 's': {'s': {'t': {'9': 0, '10': 5}}}}
    """
    if by_log:
        return {"v": _VERSION, "p": {key.store: offsets[key] for key in sorted(offsets)}}
    stores: dict[str, dict[str, dict[str, int]]] = {}
    for key in sorted(offsets):
        stores.setdefault(key.store, {}).setdefault(key.topic, {})[str(key.queue_id)] = offsets[key]
    return {"v": _VERSION, "s": stores}


def decode_offset(value: Any, *, by_log: bool) -> Offsets:
    """Return the offsets of such a JSON. ConfigError for another version or `readBy`, and for a damaged one."""
    if not isinstance(value, dict) or value.get("v") != _VERSION:
        raise ConfigError(
            f"the checkpoint has no offset of this source in version {_VERSION}, but {value!r:.200}: use the mqstore "
            "that wrote it, or a new checkpoint"
        )
    was, now = (("queue", "log")[log] for log in ("p" in value, by_log))
    if was != now:
        raise ConfigError(
            f"the checkpoint is of a stream with readBy={was}, this one has readBy={now}: positions of one mean "
            f"nothing to the other. Say readBy={was}, or take a new checkpoint"
        )
    try:
        if by_log:
            found = {Key(store): position for store, position in value["p"].items()}
        else:
            found = {
                Key(store, topic, int(queue_id)): offset
                for store, topics in value["s"].items()
                for topic, queues in topics.items()
                for queue_id, offset in queues.items()
            }
        if not all(type(offset) is int and offset >= 0 for offset in found.values()):
            raise ValueError("an offset is a whole number from 0")
    except (KeyError, AttributeError, ValueError) as error:
        raise ConfigError(f"the checkpoint has a damaged offset ({error}): {value!r:.200}") from error
    return found
