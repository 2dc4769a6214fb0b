"""The options of `spark.read.format("mqstore")`: a table that checks and documents them (`optiontable`). Spark-free."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from mqstore.broker import sql92
from mqstore.broker.names import check_group, is_system_group
from mqstore.errors import ConfigError
from mqstore.log.tagfilter import parse_tags
from mqstore.spark.optiontable import (
    YES_NO,
    Option,
    OptionTable,
    boolean,
    count,
    duration_s,
    local_path,
    names,
    text,
    word,
)

if TYPE_CHECKING:  # it would need pyarrow, which planning does not
    from mqstore.spark.rows import OnCorrupt

__all__ = [
    "CHOOSING",
    "OPTIONS",
    "QUEUE_ID",
    "SOURCE_OPTIONS",
    "Offsets",
    "Option",
    "SourceOptions",
    "as_markdown",
    "interval_ms",
    "not_for",
]

View = Literal["messages", "queues", "segments", "groups", "delay", "traffic", "verify"]
Offsets = Literal["earliest", "latest"] | dict[str, Any]
"""A word, or the parsed JSON: topic -> queue id -> offset, with several stores one level more."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
QUEUE_ID: Final = re.compile("0|[1-9][0-9]{0,9}")
"""As queues are looked up. Another spelling of a number would name none of them."""
_BATCH_MAX: Final = 1 << 30
"""Arrow counts the bytes of a column of a batch in 32 bits (`arrow.laid`). Half of them: a batch may have as much again
in bodies that were stored compressed."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a query, checked. Fields as in `OPTIONS`."""

    paths: dict[str, str] | list[str] = field(default_factory=list)
    topics: tuple[str, ...] | None = None
    topic_pattern: re.Pattern[str] | None = None
    assign: dict[str, list[int]] | None = None
    include_system_topics: bool = False
    tags: str | None = None
    filter: str | None = None
    keys: tuple[str, ...] | None = None
    starting_offsets: Offsets | None = None
    """None: not said; a batch then begins at the earliest, a stream at the latest."""
    ending_offsets: Offsets | None = None
    """None: not said; a batch then ends at the latest."""
    starting_timestamp_ms: int | None = None
    ending_timestamp_ms: int | None = None
    starting_group: str | None = None
    read_by: Literal["auto", "queue", "log"] = "auto"
    columns: tuple[str, ...] | None = None
    include_properties: bool = True
    body_as: Literal["binary", "string"] = "binary"
    decompress: bool = True
    verify: bool = True
    isolation: Literal["dispatched", "flushed"] = "dispatched"
    on_corrupt: OnCorrupt = "fail"
    fail_on_data_loss: bool = True
    min_partitions: int = 1
    max_rows_per_batch: int = 20_000
    max_bytes_per_batch: int = 8 << 20
    view: View = "messages"
    interval_ms: int = 60_000
    max_offsets_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    commit_group: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """The options as Spark gives them. ConfigError names option, value and what is accepted."""
        paths = [name for name in ("path", "paths", "pathsfile") if name in {key.lower() for key in given}]
        if len(paths) > 1:
            raise ConfigError(f"options {' and '.join(paths)} both say where the stores are; give one of them")
        options = cls(**SOURCE_OPTIONS.parse(given))
        options._check()
        return options

    def _check(self) -> None:
        if not self.paths:
            raise ConfigError(
                "no store: give .load(PATH), or one of the options path, paths, pathsFile; to write, .save(PATH). A "
                "table by name (CREATE TABLE) has no options in a query: use CREATE TEMPORARY VIEW"
            )
        wanted = {"subscribe": self.topics, "subscribePattern": self.topic_pattern, "assign": self.assign}
        given = [name for name, value in wanted.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"options {' and '.join(given)} exclude each other; give one of them")
        if self.starting_group is not None and self.starting_timestamp_ms is not None:
            raise ConfigError("options startingGroup and startingTimestamp exclude each other; give one of them")
        if not self.include_properties and "properties" in (self.columns or ()):
            raise ConfigError(
                "options columns and includeProperties=false contradict each other: columns names properties, leave "
                "one out"
            )

    def set_among(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of these options that are other than by default, with their values."""
        plain = SourceOptions()
        values = ((name, getattr(self, OPTIONS[name].field), getattr(plain, OPTIONS[name].field)) for name in names)
        return {name: value for name, value, default in values if value != default}

    def for_batch(self) -> SourceOptions:
        """These, for `spark.read`. ConfigError for what only a stream can do, and a view cannot."""
        if self.view != "messages":
            for name in self.set_among(not_for(self.view)):
                if name in _TOPICS:
                    raise ConfigError(
                        f"option {name}={self.set_among([name])[name]!r} names topics, and the view {self.view} is of "
                        "whole stores: leave it out"
                    )
                if name in _HOW_READ:
                    raise ConfigError(
                        f"option {name} says how messages are read, and the view {self.view} has none: leave it out"
                    )
                raise ConfigError(
                    f"option {name} chooses messages, and the view {self.view} is of all that a queue or a store "
                    "has: leave it out, and choose rows by where()"
                )
        return self._only_for("batch", "spark.read", "spark.readStream")

    def for_stream(self) -> SourceOptions:
        """These, for `spark.readStream`. ConfigError for what only a batch can do, or only a stream of queues."""
        if self.max_offsets_per_trigger is not None and self.max_bytes_per_trigger is not None:
            raise ConfigError(
                "options maxOffsetsPerTrigger and maxBytesPerTrigger exclude each other: Spark knows one limit a "
                "source; give one of them"
            )
        by_queue = self.set_among(("commitGroup", "maxOffsetsPerTrigger"))
        if by_queue and self.read_by == "log":
            raise ConfigError(
                f"option {next(iter(by_queue))} goes by queues, and readBy=log has one position in bytes for a store: "
                "use readBy=queue; a limit by bytes, maxBytesPerTrigger, goes with readBy=log"
            )
        return self._only_for("stream", "spark.readStream", "spark.read")

    def _only_for(self, kind: str, here: str, there: str) -> SourceOptions:
        for name in self.set_among(name for name, only in _ONLY.items() if only != kind):
            raise ConfigError(f"option {name} is for {there}, not for {here}: leave it out")
        return self


# -- values ------------------------------------------------------------------------------------------------------------


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error


def _sql(text: str) -> str:
    sql92.compile(text)
    return text


def _tags(text: str) -> str:
    if not text.strip():
        raise ValueError("it names nothing")
    parse_tags(text, "")
    return text


def _parsed(text: str) -> Any:
    """JSON; ValueError where a name stands twice, of which the last one would win."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"{name!r} is there twice")
            found[name] = value
        return found

    return json.loads(text, object_pairs_hook=once)


def _assign(text: str) -> dict[str, list[int]]:
    value = _parsed(text)
    if value == {}:
        raise ValueError("it names nothing")
    if not isinstance(value, dict) or not all(
        isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids) for ids in value.values()
    ):
        raise ValueError("not that form")
    return value


def _offsets(text: str) -> Offsets:
    if text.lower() in ("earliest", "latest"):
        return "earliest" if text.lower() == "earliest" else "latest"

    def check(value: Any, depth: int) -> None:
        if not isinstance(value, dict) or not value or depth > 3:
            raise ValueError("not that form")
        for key, inner in value.items():
            if isinstance(inner, dict):
                check(inner, depth + 1)
            elif depth < 2 or type(inner) is not int or inner < -2:
                raise ValueError("not that form")
            elif not QUEUE_ID.fullmatch(key):
                raise ValueError(f"{key!r} is no queue id")

    value = _parsed(text)
    check(value, 1)
    found: dict[str, Any] = value
    return found


def _instant(text: str) -> int:
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    when = datetime.fromisoformat(text)
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    # The first millisecond that is not before it: store times are whole milliseconds.
    return -((_EPOCH - when) // timedelta(milliseconds=1))


def _group(text: str) -> str:
    try:
        group = check_group(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if is_system_group(group):
        raise ValueError("that is the engine's own bookkeeping")
    return group


def interval_ms(value: str) -> int:
    """Milliseconds of what traffic is added up by. ValueError for less than a second.

    >>> interval_ms("5m")
    300000
    """
    found = round(duration_s(value) * 1000)
    if found < 1000:
        raise ValueError("too short")
    return found


def _one_path(value: str) -> list[str]:
    return [local_path(value)]


def _paths(text: str) -> dict[str, str] | list[str]:
    value = _parsed(text)
    names = value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("not that form")
    found: dict[str, str] | list[str] = value
    for name in names:
        local_path(name)
    return found


def _paths_file(text: str) -> dict[str, str] | list[str]:
    try:
        with open(text, encoding="utf-8") as file:
            return _paths(file.read())
    except OSError as error:
        raise ValueError(f"it cannot be read: {error}") from error


# -- the table ---------------------------------------------------------------------------------------------------------


_WHERE = "earliest, latest, or JSON {topic: {queue id: offset}} with -2 for earliest and -1 for latest"
_WHEN = "milliseconds since 1970, or ISO 8601, UTC unless it says otherwise"
_PATHS = 'a JSON array of paths, or {"id": "path"}'

_TABLE: Final = (
    Option(
        "path", "paths", "", "a path", "a store, a store set, or a glob of stores (as does `.load(path)`)", _one_path
    ),
    Option(
        "paths", "paths", "", _PATHS, "many of them; the ids become column `store` (as does `.load([a, b])`)", _paths
    ),
    Option(
        "pathsFile",
        "paths",
        "",
        f"a file that holds {_PATHS}",
        "the same from a file: a fleet's catalogue",
        _paths_file,
    ),
    Option(
        "subscribe",
        "topics",
        "all topics of users",
        "names, separated by commas",
        "which topics",
        names,
    ),
    Option(
        "subscribePattern", "topic_pattern", "", "a regular expression", "which topics; the whole name fits", _pattern
    ),
    Option("assign", "assign", "", 'JSON {"topic": [queue id, ...]}', "which queues", _assign),
    Option(
        "includeSystemTopics",
        "include_system_topics",
        "false",
        YES_NO,
        "the engine's own topics, retries and dead letters as well",
        boolean,
    ),
    Option(
        "tags",
        "tags",
        "*",
        "`A || B`, or `*`",
        "only messages with these tags, by hash before a record is looked at, then exactly",
        _tags,
    ),
    Option("filter", "filter", "", "an SQL92 expression", "over properties, evaluated in the task", _sql),
    Option("keys", "keys", "", "keys, separated by commas", "only messages that bear one of these keys", names),
    Option(
        "startingOffsets",
        "starting_offsets",
        "earliest; of a stream: latest",
        _WHERE,
        "where to begin; several stores: their id on top",
        _offsets,
    ),
    Option("endingOffsets", "ending_offsets", "latest", _WHERE, "where to end, exclusive; likewise", _offsets),
    Option(
        "startingTimestamp",
        "starting_timestamp_ms",
        "",
        _WHEN,
        "from the first message stored at or after it; wins over startingOffsets",
        _instant,
    ),
    Option(
        "endingTimestamp",
        "ending_timestamp_ms",
        "",
        _WHEN,
        "up to the first message stored at or after it; wins over endingOffsets",
        _instant,
    ),
    Option(
        "startingGroup",
        "starting_group",
        "",
        "a consumer group",
        "begin at its committed offsets, where it has none at the oldest message",
        text,
    ),
    Option(
        "readBy",
        "read_by",
        "auto",
        "auto, queue or log",
        "by consume queues, or by ranges of the commitlog, which needs none; auto: by queues if there are any, "
        "and for a stream always",
        word("auto", "queue", "log"),
    ),
    Option(
        "columns",
        "columns",
        "all",
        "names, separated by commas, or kafka",
        "which columns; the others cost nothing; kafka: those of Spark's Kafka source",
        names,
    ),
    Option("includeProperties", "include_properties", "true", YES_NO, "column `properties`", boolean),
    Option(
        "bodyAs",
        "body_as",
        "binary",
        "binary or string",
        "type of `body`; string puts U+FFFD for what is not UTF-8",
        word("binary", "string"),
    ),
    Option("decompress", "decompress", "true", YES_NO, "inflate bodies that are stored compressed", boolean),
    Option(
        "verify",
        "verify",
        "true",
        YES_NO,
        "compare each record's checksum; magic, offsets and lengths are compared always",
        boolean,
    ),
    Option(
        "isolation",
        "isolation",
        "dispatched",
        "dispatched or flushed",
        "flushed: only what no power cut can take back, by the store's checkpoint",
        word("dispatched", "flushed"),
    ),
    Option(
        "onCorrupt",
        "on_corrupt",
        "fail",
        "fail, skip or keep",
        "what becomes of a damaged message; keep: a row with nulls, and why in column `error`",
        word("fail", "skip", "keep"),
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        "true",
        YES_NO,
        "fail if wanted messages, or a wanted queue, are gone; else read what is left",
        boolean,
    ),
    Option(
        "minPartitions",
        "min_partitions",
        "one per 128 MiB or 500 000 messages",
        "a number from 1",
        "at least so many tasks, if there are as many messages; large queues are cut, small ones put together",
        count(1),
    ),
    Option(
        "maxRowsPerBatch",
        "max_rows_per_batch",
        "20000",
        f"a number from 1 to {_BATCH_MAX}",
        "rows of an Arrow batch",
        count(1, _BATCH_MAX),
    ),
    Option(
        "maxBytesPerBatch",
        "max_bytes_per_batch",
        "8388608",
        f"a number from 1 to {_BATCH_MAX}",
        "bytes of an Arrow batch; it has one message at least",
        count(1, _BATCH_MAX),
    ),
    Option(
        "view",
        "view",
        "messages",
        "messages, queues, segments, groups, delay, traffic or verify",
        "which table",
        word("messages", "queues", "segments", "groups", "delay", "traffic", "verify"),
    ),
    Option(
        "interval",
        "interval_ms",
        "1m",
        "a length of time from 1s (30s, 5m, 1h)",
        "of what a row of the view `traffic` adds up",
        interval_ms,
    ),
    Option(
        "maxOffsetsPerTrigger",
        "max_offsets_per_trigger",
        "",
        "a number from 1",
        "stream: at most so many messages a batch, shared among queues by what waits in each (pyspark 4.2)",
        count(1),
    ),
    Option(
        "maxBytesPerTrigger",
        "max_bytes_per_trigger",
        "",
        "a number from 1",
        "stream: at most so many bytes of records a batch, or a single message that is larger (pyspark 4.2)",
        count(1),
    ),
    Option(
        "commitGroup",
        "commit_group",
        "",
        "a consumer group",
        "stream: show its progress as that group's, in the lag of each store; the only thing that is ever written",
        _group,
    ),
)

SOURCE_OPTIONS: Final = OptionTable(_TABLE)
OPTIONS: Final[Mapping[str, Option]] = SOURCE_OPTIONS.options
"""Every option by its name."""
_HOW_READ: Final = ("readBy", "includeProperties", "bodyAs", "decompress", "minPartitions")
CHOOSING: Final = (
    "tags",
    "filter",
    "keys",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingGroup",
    "isolation",
    *_HOW_READ,
)
"""Options that choose messages of queues, and that say how they are read: the small tables do not go by them. What one
of these tables goes by (`interval`, `onCorrupt`) all take: a session has all of them with the same options."""
_TOPICS: Final = ("subscribe", "subscribePattern", "assign", "includeSystemTopics")
_OF_STORES: Final = ("segments", "delay", "verify")
_ONLY: Final = {
    "endingOffsets": "batch",
    "endingTimestamp": "batch",
    "view": "batch",
    "interval": "batch",
    "maxOffsetsPerTrigger": "stream",
    "maxBytesPerTrigger": "stream",
    "commitGroup": "stream",
}


def not_for(view: View) -> tuple[str, ...]:
    """The options that a small table does not go by, and refuses."""
    return (*CHOOSING, *_TOPICS) if view in _OF_STORES else CHOOSING


def as_markdown() -> str:
    """The table for the documentation."""
    return SOURCE_OPTIONS.as_markdown()
