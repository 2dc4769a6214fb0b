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
    YES_NO,
    Option,
    OptionTable,
    boolean,
    count,
    duration_s,
    local_path,
    text,
    word,
)

__all__ = ["APP_NAME", "FOR_THE_STREAM", "ONLY_FOR_WRITING", "SINK_OPTIONS", "SinkOptions", "Target", "as_markdown"]

Target = Literal["store", "set", "inbox"]

FOR_THE_STREAM: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of a `writeStream` that Spark itself reads, and hands on."""

APP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a `txnAppId` may be: it begins the names of folders, and some that begin otherwise mean something else."""
_LAST_VERSION: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write, checked. Fields as in `SINK_OPTIONS`."""

    path: str
    topic: str | None = None
    target: Target = "store"
    queues: int = 8
    flush: Literal["commit", "none"] = "commit"
    validate: bool = True
    txn_app_id: str | None = None
    txn_version: int | None = None
    max_rows_per_shard: int | None = None
    lock_timeout_s: float = 30.0
    staging_ttl_s: float = 7 * 86400.0
    confirm_overwrite: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SinkOptions:
        """The options as Spark gives them. ConfigError names option, value and what is accepted."""
        values = SINK_OPTIONS.parse(given)
        if "path" not in values:
            raise ConfigError("no target: give .save(PATH), or .option('path', PATH)")
        options = cls(**values)
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


def _path(value: str) -> str:
    return resolved(local_path(value).removeprefix("file://").removeprefix("file:"))


def _app(value: str) -> str:
    if not APP_NAME.fullmatch(value):
        raise ValueError("no such name")
    return value


SINK_OPTIONS: Final = OptionTable(
    (
        Option("path", "path", "", "a path", "the store, or the store set (as does `.save(path)`)", _path),
        Option("topic", "topic", "column `topic`", "a topic", "where all rows go; wins over the column", text),
        Option(
            "target",
            "target",
            "store",
            "store, set or inbox",
            "append to a store that nobody has open; add stores to a set; hand over to the process that has it open",
            word("store", "set", "inbox"),
        ),
        Option(
            "queues",
            "queues",
            "8",
            f"a number from 1 to {QUEUES_MAX}",
            "queues of a topic that is not there yet",
            count(1, QUEUES_MAX),
        ),
        Option(
            "flush",
            "flush",
            "commit",
            "commit or none",
            "commit: all is on disk before it counts; none, for throw-away data: a power cut may damage it",
            word("commit", "none"),
        ),
        Option(
            "validate",
            "validate",
            "true",
            YES_NO,
            "false changes nothing: every rule of a put is checked. Column `record` copies messages as they are",
            boolean,
        ),
        Option(
            "txnAppId",
            "txn_app_id",
            "",
            "1 to 100 letters, digits, '.', '_' and '-'; the first a letter or a digit",
            "batch: who writes. With txnVersion: a version that was written, or a smaller one, is not written again",
            _app,
        ),
        Option("txnVersion", "txn_version", "", "a number from 0", "batch: see txnAppId", count(0, _LAST_VERSION)),
        Option(
            "maxRowsPerShard",
            "max_rows_per_shard",
            "no limit",
            "a number from 1",
            "rows of a shard, which with target=set is a store: one task may make several",
            count(1),
        ),
        Option(
            "lockTimeout",
            "lock_timeout_s",
            "30s",
            "seconds, or a number with ms, s, m, h or d",
            "how long to wait for whoever has the target open for writing",
            duration_s,
        ),
        Option(
            "stagingTtl",
            "staging_ttl_s",
            "7d",
            "seconds, or a number with ms, s, m, h or d",
            "age at which what a crashed job left is deleted by the next one that writes there",
            duration_s,
        ),
        Option(
            "confirmOverwrite",
            "confirm_overwrite",
            "false",
            YES_NO,
            "lets overwrite take the old messages of a store's topics from their consumers (target=store)",
            boolean,
        ),
    ),
    FOR_THE_STREAM,
)
"""Every option of the sink."""


ONLY_FOR_WRITING: Final = frozenset(name.lower() for name in SINK_OPTIONS.options) - {"path"} | FOR_THE_STREAM
"""Names in small letters. Spark makes one object for a format's options, and does not say whether to read or to write;
one of these tells."""


def as_markdown() -> str:
    """The table for the documentation."""
    return SINK_OPTIONS.as_markdown()
