"""Options of a store, with their defaults (format#sizes).

`StoreConfig()` shows the whole policy. The first seven fields are saved in the store's manifest. Of these only
`delay_levels` and `max_message_size` can change later. Other values of the other five raise `ConfigError`. All further
fields may differ between openings.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from mqstore.clock import Clock
from mqstore.errors import ConfigError

Duration = float | timedelta
"""Length of time as a person types it: seconds, or a `timedelta`."""

Durability = Literal["append", "flush"]
"""Where a message is when `put` returns: "append" in the page cache, "flush" on disk.
Both survive a kill of the process."""

Profile = Literal["mqstore", "rocketmq"]

DEFAULT_DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
DEFAULT_MESSAGE_BYTES = 4 << 20

_INT_MAX = 0x7FFF_FFFF
UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL = re.compile(r"(\d{1,9})([smhd])")


def check_durability(durability: object) -> None:
    """Raise ConfigError for an unknown durability."""
    if durability not in ("append", "flush"):
        raise ConfigError(f"durability must be 'append' or 'flush', not {durability!r}")


def waits_for_disk(durability: Durability | None, by_default: bool) -> bool:
    """Return True if a call of this durability waits for the disk. None means the store's default.
    Raises ConfigError for an unknown durability.

    >>> waits_for_disk(None, True), waits_for_disk("append", True)
    (True, False)
    """
    if durability is None:
        return by_default
    check_durability(durability)
    return durability == "flush"


def seconds(duration: Duration, name: str) -> float:
    """Return `duration` in seconds. Raises ConfigError, naming the option, if it is negative or not a number.

    >>> seconds(timedelta(minutes=1), "age")
    60.0
    """
    if isinstance(duration, (bool, str, bytes, bytearray)):  # `float` accepts them
        raise ConfigError(f"{name} must be seconds or a timedelta, not {duration!r:.80}")
    try:
        value = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    except OverflowError:
        raise ConfigError(f"{name} is too large for a number of seconds") from None
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be seconds or a timedelta, not {duration!r:.80}") from None
    if not value >= 0:  # also refuses NaN
        raise ConfigError(f"{name} must be zero or more seconds, not {duration!r}")
    return value


def milliseconds(duration: Duration, name: str) -> int:
    """Return `duration` in milliseconds. Raises ConfigError as `seconds` does, and if it is infinite.

    >>> milliseconds(timedelta(minutes=1), "age")
    60000
    """
    if type(duration) is int and duration >= 0:
        return duration * 1000
    wanted = seconds(duration, name)
    if wanted == math.inf:
        raise ConfigError(f"{name} must be finite, not {duration!r}")
    return round(wanted * 1000)


def check_whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value`. Raises ConfigError unless it is an integer from `low` to `high`, both included."""
    if type(value) is int and low <= value and (high is None or value <= high):
        return value
    rule = f"from {low}" if high is None else f"in {low}..{high}"
    raise ConfigError(f"{name} must be a whole number {rule}, not {value!r:.80}")


def check_kind(name: str, value: object, kind: Any, words: str) -> None:
    """Raise ConfigError unless `value` is of this type, described in `words`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {words}, not {value!r:.80}")


def delay_table_ms(levels: str) -> tuple[int, ...]:
    """Return the milliseconds of each delay level, level 1 first (delivery#levels).

    >>> delay_table_ms("1s 5s 2h")
    (1000, 5000, 7200000)
    """
    if not isinstance(levels, str):
        raise ConfigError(f"delay_levels must be text such as {DEFAULT_DELAY_LEVELS!r}, not {levels!r:.80}")
    table = []
    for word in levels.split():
        match = _LEVEL.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"delay_levels: {word!r} is not a number followed by s, m, h or d, as in {DEFAULT_DELAY_LEVELS!r}"
            )
        table.append(int(match[1]) * UNIT_MS[match[2]])
    if not table:
        raise ConfigError(f"delay_levels is empty; the default is {DEFAULT_DELAY_LEVELS!r}")
    return tuple(table)


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits beyond which whole commitlog segments are deleted, oldest first (format#retention).

    The segment being written is never deleted. Without consumer groups, each limit alone is enough to delete a segment.
    None means no limit.

    >>> Retention().age, Retention(age=None, max_bytes=100 << 20).max_bytes  # all of 100 MiB, however old
    (datetime.timedelta(days=3), 104857600)
    """

    age: Duration | None = timedelta(hours=72)
    """Delete a segment whose last message was stored longer ago than this."""
    max_bytes: int | None = 1 << 30
    """Keep at most about this many bytes of commitlog."""
    disk_ratio: float | None = None
    """Also delete while the file system is fuller than this (0..1)."""
    unconsumed: Literal["keep", "drop"] = "keep"
    """Keep messages that a group has not consumed, or drop them and notify the group.
    Only a broker uses it, since the log alone knows no groups."""

    def __post_init__(self) -> None:
        if self.age is not None:
            seconds(self.age, "retention.age")
        if self.max_bytes is not None:
            check_whole("retention.max_bytes", self.max_bytes, 0)
        ratio: object = self.disk_ratio
        if ratio is not None and (not isinstance(ratio, int | float) or not 0 < ratio <= 1):
            raise ConfigError(f"retention.disk_ratio must be above 0 and at most 1, not {ratio!r:.80}")
        if self.unconsumed not in ("keep", "drop"):
            raise ConfigError(f"retention.unconsumed must be 'keep' or 'drop', not {self.unconsumed!r}")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Options of `mqstore.open`. Sizes are bytes, durations seconds or `timedelta`.

    >>> StoreConfig(segment_bytes=1 << 20).default_queues
    4
    """

    segment_bytes: int | None = None
    """Length of a commitlog segment, at least 1024. None means 64 MiB (profile `rocketmq`: 1 GiB)."""
    consumequeue_units: int | None = None
    """Number of 20-byte units in a consume-queue file. None means 16 384 (`rocketmq`: 300 000)."""
    index_slots: int | None = None
    """Number of hash slots of an index file. None means 100 000 (`rocketmq`: 5 000 000)."""
    index_entries: int | None = None
    """Number of entries of an index file. None means 400 000 (`rocketmq`: 20 000 000)."""
    group_hash: Literal["jump", "siphash24"] | None = None
    """Hash by which a message group picks its queue. None means the store's own, `jump` for a new one."""
    delay_levels: str | None = None
    """Table of the delay levels. None means the store's own. It may change later."""
    max_message_size: int | None = None
    """Largest body that `put` accepts. None means the store's own, 4 MiB for a new one. It may change later."""

    retention: Retention | None = None
    """Retention policy. None deletes only by `clean` and `drop_before`. For a broker None means `Retention()`."""
    flush_interval: Duration = 0.5
    """Time between two checks of the flusher, which syncs if four pages of 4 KiB are dirty."""
    full_flush_interval: Duration = 10.0
    """Time between two syncs of all dirty pages."""
    flush_timeout: Duration = 5.0
    """Time that a put waits for its sync before it raises `FlushTimeoutError`."""
    max_delay: Duration = timedelta(days=366)
    """Longest delay of a message."""
    auto_create_topics: bool = True
    """Create an unknown topic when a message is put to it."""
    default_queues: int = 4
    """Default number of queues of a new topic."""
    auto_create_groups: bool = True
    """Create an unknown group when it is first used."""
    commit_interval: Duration = 5.0
    """Time between two syncs of the groups' committed offsets. A power cut loses later commits.
    A killed process loses at most the commits of the last 200 ms."""
    requeue_on_open: bool = True
    """At the next open, redeliver messages that a killed process had popped and not acknowledged."""
    pop_retry_version: Literal[1, 2] = 2
    """Version of the topics for redelivered copies of popped messages."""
    dlq_retention: Duration | None = timedelta(days=30)
    """Age at which a dead letter expires. None means never."""
    orphan_level_policy: Literal["keep", "deliver_now"] = "keep"
    """Delivery of messages whose delay level was removed from the table: at their own times, or at once."""

    verify_reads: bool = True
    """Check every record's checksum before its message is returned."""
    max_mappings: int = 4096
    """Maximum number of mappings and descriptors kept open. Fewer if few descriptors are free."""
    store_host: str = "127.0.0.1:0"
    """Address written into records. It is part of the offset message id."""
    file_mode: int = 0o600
    """Permissions of created files. Folders get the matching search bits."""
    clock: Clock | None = None
    """Clock. None means the system's clock. With any other, the store starts no thread: call `run_once`."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("segment_bytes", 1024, _INT_MAX),
            ("consumequeue_units", 1, _INT_MAX // 20),
            ("index_slots", 1, _INT_MAX),
            ("index_entries", 2, _INT_MAX),
            ("max_message_size", 0, _INT_MAX),
            ("max_mappings", 4, _INT_MAX),
        ):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low, high)
        check_whole("default_queues", self.default_queues, 1, 16_384)
        for name, allowed in (("pop_retry_version", (1, 2)), ("orphan_level_policy", ("keep", "deliver_now"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")
        if self.group_hash not in (None, "jump", "siphash24"):
            raise ConfigError(f"group_hash must be 'jump' or 'siphash24', not {self.group_hash!r}")
        if self.delay_levels is not None:
            delay_table_ms(self.delay_levels)
        seconds(self.flush_timeout, "flush_timeout")
        for name in ("flush_interval", "full_flush_interval", "max_delay", "commit_interval"):
            milliseconds(getattr(self, name), name)
        if self.dlq_retention is not None:
            milliseconds(self.dlq_retention, "dlq_retention")
