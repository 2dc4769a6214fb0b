"""The options of `df.write.format("mqstore")` and `df.writeStream`: a table (`optiontable`), as that of the source.

Knows no Spark. spark#commit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from mqstore.broker.topics import QUEUES_MAX
from mqstore.errors import ConfigError
from mqstore.files.beneath import resolved
from mqstore.spark.optiontable import (
    OptionTable,
    choice,
    count,
    duration_s,
    flag,
    local_path,
    number,
    option,
    options_of,
    text,
)

__all__ = ["APP_NAME", "FOR_THE_STREAM", "ONLY_FOR_WRITING", "SINK_OPTIONS", "SinkOptions", "Target"]

Target = Literal["store", "set", "inbox"]

FOR_THE_STREAM: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of a `writeStream` that Spark itself reads, and hands on."""

APP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a `txnAppId` may be: it begins the names of folders, and some that begin otherwise mean something else."""
_LAST_VERSION: Final = (1 << 63) - 1


_DURATION: Final = "seconds, or a number with ms, s, m, h or d"


def _path(value: str) -> str:
    return resolved(local_path(value))


def _app(value: str) -> str:
    if not APP_NAME.fullmatch(value):
        raise ValueError("no such name")
    return value


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write, checked."""

    path: str = option("", "a path", "the store, or the store set (as does `.save(path)`)", _path)
    topic: str | None = option(None, "a topic", "where all rows go; wins over the column", text, shown="column `topic`")
    target: Target = choice(
        *("store", "set", "inbox"),
        meaning="append to a store that nobody has open; add stores to a set; hand over to the process that has it "
        "open",
    )
    queues: int = number(8, "queues of a topic that is not there yet", QUEUES_MAX)
    flush: Literal["commit", "none"] = choice(
        "commit", "none", meaning="none changes nothing: all is on disk before it counts"
    )
    validate: bool = flag(
        True, "false changes nothing: every rule of a put is checked. Column `record` copies messages as they are"
    )
    txn_app_id: str | None = option(
        None,
        "1 to 100 letters, digits, '.', '_' and '-'; the first a letter or a digit",
        "batch: who writes. With txnVersion: a version that was written, or a smaller one, is not written again",
        _app,
    )
    txn_version: int | None = option(None, "a number from 0", "batch: see txnAppId", count(0, _LAST_VERSION))
    max_rows_per_shard: int | None = number(
        None, "rows of a shard, which with target=set is a store: one task may make several", shown="no limit"
    )
    lock_timeout_s: float = option(
        30.0, _DURATION, "how long to wait for a process that has the target open", duration_s, shown="30s"
    )
    staging_ttl_s: float = option(
        *(7 * 86400.0, _DURATION, "age at which the next job deletes what a crashed one left", duration_s), shown="7d"
    )
    confirm_overwrite: bool = flag(
        False, "lets overwrite take the old messages of a store's topics from their consumers (target=store)"
    )

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SinkOptions:
        """The options as Spark gives them. ConfigError names option, value and what is accepted."""
        options = cls(**SINK_OPTIONS.parse(given))
        if not options.path:
            raise ConfigError("no target: give .save(PATH), or .option('path', PATH)")
        if (options.txn_app_id is None) != (options.txn_version is None):
            missing = "txnVersion" if options.txn_version is None else "txnAppId"
            raise ConfigError(f"options txnAppId and txnVersion go together; {missing} is missing")
        return options

    def check_stream(self) -> None:
        """ConfigError for what only a batch job can ask for."""
        if self.txn_app_id is not None:
            raise ConfigError(
                "options txnAppId and txnVersion belong to batch writes: a stream is known by its checkpoint, and each "
                "batch by its number; leave them out"
            )

    def check_overwrite(self) -> None:
        """ConfigError where `mode("overwrite")`, or output mode `complete`, would destroy what it may not."""
        if self.target == "store" and not self.confirm_overwrite:
            raise ConfigError(
                "overwrite, which output mode complete is too, would take the messages of the topics it writes from "
                "every consumer: a queue is not a table. Write with mode('append'), or to target=set, or say "
                "confirmOverwrite=true"
            )
        if self.target == "inbox":
            raise ConfigError("overwrite does not go with target=inbox: the store belongs to another; append to it")


SINK_OPTIONS: Final = OptionTable([*options_of(SinkOptions)], FOR_THE_STREAM)
"""Every option of the sink."""
ONLY_FOR_WRITING: Final = frozenset(name.lower() for name in SINK_OPTIONS.options) - {"path"} | FOR_THE_STREAM
"""Names in small letters. Spark makes one object for a format's options, and does not say whether to read or to write;
one of these tells."""
