"""The options of `spark.read`, `readStream`, `write` and `writeStream` with format mqstore.

Two tables, one for the source and one for the sink, check the options and document them. Spark hands options over as
strings under case-insensitive names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from mqstore.broker import sql92
from mqstore.broker.names import check_group, is_system_group
from mqstore.broker.topics import QUEUES_MAX
from mqstore.errors import ConfigError, FormatError
from mqstore.files.beneath import resolved
from mqstore.jobs.optiontable import (
    Option,
    OptionTable,
    choice,
    count,
    duration_s,
    flag,
    names,
    number,
    option,
    options_of,
    text,
)
from mqstore.jobs.paths import checked_path
from mqstore.layout.jsontext import decode
from mqstore.log.tagfilter import parse_tags

if TYPE_CHECKING:  # it would need pyarrow, which planning does not
    from mqstore.columnar.rows import OnCorrupt

__all__ = [
    *("ANY", "APP_NAME", "EARLIEST", "LATEST", "NO_TABLES", "ONLY_FOR_WRITING", "SINK_OPTIONS", "SOURCE_OPTIONS"),
    *("Key", "Offsets", "SinkOptions", "SourceOptions", "interval_ms", "not_for", "queue_id_of", "refuse_table"),
]

View = Literal["messages", "queues", "segments", "groups", "delay", "traffic", "verify"]
Target = Literal["store", "set", "inbox"]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_QUEUE_ID: Final = re.compile("0|[1-9][0-9]{0,9}")
APP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A `txnAppId`. Folders are named by it, and a name that begins otherwise may mean something else."""
_BATCH_MAX: Final = 1 << 30
"""Half of what Arrow counts in the 32 bits of a column of a batch (`arrow.laid`).

A batch may have as much again in bodies that were stored compressed.
"""
_FOR_THE_STREAM: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of a `writeStream` that Spark itself reads."""


# -- offsets -----------------------------------------------------------------------------------------------------------

EARLIEST: Final = -2
LATEST: Final = -1
"""Stand for an offset in the options, as in those of Kafka's source."""


class Key(NamedTuple):
    """A queue, or a whole log: topic "" and queue -1."""

    store: str
    topic: str = ""
    queue_id: int = -1

    def __str__(self) -> str:
        return f"{self.store}: {self.topic}, queue {self.queue_id}" if self.topic else f"{self.store}: the log"


ANY: Final = Key("")
"""Every queue and log that is not named."""
Offsets = dict[Key, int]
"""Offset of each queue (queue offset) or log (physical offset)."""


def queue_id_of(text: str) -> int:
    """Return the queue id of a name in JSON. ValueError for another spelling, by which no queue is looked up."""
    if not _QUEUE_ID.fullmatch(text):
        raise ValueError(f"{text!r} is no queue id")
    return int(text)


NO_TABLES: Final = (
    "Spark keeps the options of a table (CREATE TABLE, saveAsTable, writeTo), but passes none of them to a query of "
    "it: use CREATE TEMPORARY VIEW name USING mqstore OPTIONS (path '...'), or .save(PATH) to write"
)


def refuse_table(given: Iterable[str]) -> None:
    """Raise ConfigError for the options of a table that Spark keeps: it passes none to a query."""
    if any(name.lower() == "provider" for name in given):  # added by CREATE TABLE without columns, and by nothing else
        raise ConfigError(NO_TABLES)


# -- values ------------------------------------------------------------------------------------------------------------


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error


def _sql(text: str) -> str:
    sql92.compile(text)
    return text


def _tags(value: str) -> str:
    parse_tags(text(value), "")
    return value


def _parsed(text: str) -> Any:
    """Return the value of JSON. ValueError for a name that stands twice: the last one would win."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is there twice")
        return found

    try:
        return decode(text, pairs=once)
    except FormatError as error:
        raise ValueError(str(error.__cause__)) from error


def _assign(text: str) -> dict[str, list[int]]:
    value = _parsed(text)
    if not isinstance(value, dict) or not value:
        raise ValueError("not that form")
    if not all(isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids) for ids in value.values()):
        raise ValueError("not that form")
    return value


def _offsets(others: int) -> Callable[[str], Offsets]:
    """Return a parser of offsets by queue.
    `ANY` is the offset of unnamed queues: `others`, unless the text is earliest or latest. The store is "" if not
    named."""

    def parse(text: str) -> Offsets:
        words = {"earliest": EARLIEST, "latest": LATEST}
        found = {ANY: words.get(text.lower(), others)}

        def add(value: Any, *names: str) -> None:
            if isinstance(value, dict) and value and len(names) < 3:
                for name, inner in value.items():
                    add(inner, *names, name)
            elif type(value) is int and value >= EARLIEST and len(names) > 1:
                *store, topic, queue_id = names
                found[Key("".join(store), topic, queue_id_of(queue_id))] = value
            else:
                raise ValueError("not that form")

        if text.lower() not in words:
            add(_parsed(text))
        return found

    return parse


def _instants(text: str) -> Offsets:
    """Parse times by queue, in ms."""
    found = _offsets(EARLIEST)(text)
    del found[ANY]
    if not found:
        raise ValueError("not that form")
    return found


def _instant(text: str) -> int:
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    when = datetime.fromisoformat(text)
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    # The first millisecond that is not before it: store times are whole milliseconds.
    return -((_EPOCH - when) // timedelta(milliseconds=1))


def _group(text: str) -> str:
    group = check_group(text)
    if is_system_group(group):
        raise ValueError("that is the engine's own bookkeeping")
    return group


def interval_ms(value: str) -> int:
    """Return the milliseconds by which traffic is added up. ValueError for less than a second.

    >>> interval_ms("5m")
    300000
    """
    found = round(duration_s(value) * 1000)
    if found < 1000:
        raise ValueError("too short")
    return found


def _paths(text: str) -> dict[str, str] | list[str]:
    value = _parsed(text)
    found = value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []
    if not found or not all(isinstance(path, str) for path in found):
        raise ValueError("not that form")
    paths = [checked_path(path) for path in found]
    return dict(zip(value, paths, strict=True)) if isinstance(value, dict) else paths


def _paths_file(text: str) -> dict[str, str] | list[str]:
    try:
        with open(checked_path(text), encoding="utf-8") as file:
            return _paths(file.read())
    except OSError as error:
        raise ValueError(f"it cannot be read: {error}") from error


def _path(value: str) -> str:
    return resolved(checked_path(value))


def _app(value: str) -> str:
    if not APP_NAME.fullmatch(value):
        raise ValueError("no such name")
    return value


# -- the source --------------------------------------------------------------------------------------------------------


_WHERE = "earliest, latest, or JSON {topic: {queue id: offset}} with -2 for earliest and -1 for latest"
_BEGIN = "earliest; of a stream: latest"
_WHEN = "milliseconds since 1970, or ISO 8601, UTC unless it says otherwise"
_DURATION: Final = "seconds, or a number with ms, s, m, h or d"
_PATHS = 'a JSON array of paths, or {"id": "path"}'

_PLACES: Final = (
    Option(
        *("path", "paths", "", "a path", "a store, a store set, or a glob of stores (as does `.load(path)`)"),
        lambda path: [checked_path(path)],
    ),
    Option(
        *("paths", "paths", "", _PATHS, "many of them; the ids become column `store` (as does `.load([a, b])`)"), _paths
    ),
    Option(
        *("pathsFile", "paths", "", f"a file that holds {_PATHS}", "the same from a file: a fleet's catalogue"),
        _paths_file,
    ),
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Checked options of a query. Each field is the option of the same name, unless it says another."""

    paths: dict[str, str] | list[str] = field(default_factory=list)
    """Value of option `path`, `paths` or `pathsFile`."""
    topics: tuple[str, ...] | None = option(
        None, "names, separated by commas", "which topics", names, name="subscribe", shown="all topics of users"
    )
    topic_pattern: re.Pattern[str] | None = option(
        None, "a regular expression", "which topics; the whole name fits", _pattern, name="subscribePattern"
    )
    assign: dict[str, list[int]] | None = option(None, 'JSON {"topic": [queue id, ...]}', "which queues", _assign)
    include_system_topics: bool = flag(False, "the engine's own topics, retries and dead letters as well")
    tags: str | None = option(
        None, "`A || B`, or `*`", "only messages with these tags: by hash, then by the record", _tags, shown="*"
    )
    filter: str | None = option(None, "an SQL92 expression", "over properties, evaluated in the task", _sql)
    keys: tuple[str, ...] | None = option(
        None, "keys, separated by commas", "only messages that have one of these keys", names
    )
    starting_offsets: Offsets | None = option(
        None, _WHERE, "where to begin; several stores: their id on top", _offsets(EARLIEST), shown=_BEGIN
    )
    ending_offsets: Offsets | None = option(
        None, _WHERE, "where to end, exclusive; likewise", _offsets(LATEST), shown="latest"
    )
    starting_timestamp_ms: int | None = option(
        None, _WHEN, "from the first message stored at or after it; wins over startingOffsets", _instant
    )
    ending_timestamp_ms: int | None = option(
        None, _WHEN, "up to the first message stored at or after it; wins over endingOffsets", _instant
    )
    starting_offsets_by_timestamp: Offsets | None = option(
        None,
        "JSON {topic: {queue id: milliseconds since 1970}}",
        "as startingTimestamp, for each queue; others begin by startingOffsets",
        _instants,
    )
    starting_group: str | None = option(
        None, "a consumer group", "begin at its committed offsets, where it has none at the oldest message", text
    )
    read_by: Literal["auto", "queue", "log"] = choice(
        *("auto", "queue", "log"), meaning="by consume queues, or by the log; auto: by queues if any, and for a stream"
    )
    columns: tuple[str, ...] | None = option(
        None,
        "names, separated by commas, or kafka",
        "which columns; kafka: those of Kafka's source",
        names,
        shown="all",
    )
    include_properties: bool = flag(True, "column `properties`")
    include_headers: bool = flag(True, "column `headers` of columns=kafka")
    body_as: Literal["binary", "string"] = choice(
        "binary", "string", meaning="type of `body`; string puts U+FFFD for what is not UTF-8"
    )
    decompress: bool = flag(True, "inflate bodies that are stored compressed")
    verify: bool = flag(True, "compare each record's checksum; magic, offsets and lengths are compared always")
    isolation: Literal["dispatched", "flushed"] = choice(
        "dispatched", "flushed", meaning="flushed: only what no power cut can take back, by the store's checkpoint"
    )
    on_corrupt: OnCorrupt = choice(
        *("fail", "skip", "keep"), meaning="for damaged messages; keep: a row with nulls, and why in column `error`"
    )
    fail_on_data_loss: bool = flag(True, "fail if wanted messages, a queue or a store are gone; else read what is left")
    ignore_corrupt_files: bool = flag(False, "pass over a store that does not open, with a warning that names it")
    min_partitions: int = number(
        1, "least number of tasks, if there are as many messages", shown="one per 128 MiB or 500 000 messages"
    )
    max_rows_per_batch: int = number(20_000, "rows of an Arrow batch", _BATCH_MAX)
    max_bytes_per_batch: int = number(8 << 20, "bytes of an Arrow batch; it has one message at least", _BATCH_MAX)
    view: View = choice(*get_args(View), meaning="which table")
    interval_ms: int = option(
        60_000, "a length of time from 1s (30s, 5m, 1h)", "of a row of the view `traffic`", interval_ms, shown="1m"
    )
    max_offsets_per_trigger: int | None = number(
        None, "stream: at most so many messages a batch, shared among queues by what waits in each (pyspark 4.2)"
    )
    max_bytes_per_trigger: int | None = number(
        None, "stream: at most so many bytes of records a batch, or a single message that is larger (pyspark 4.2)"
    )
    min_offsets_per_trigger: int | None = number(None, "stream: wait for so many messages, or for maxTriggerDelay")
    max_trigger_delay_s: float = option(
        900.0, _DURATION, "stream: longest time from batch to batch, if messages wait", duration_s, shown="15m"
    )
    commit_group: str | None = option(
        None, "a consumer group", "stream: show its progress as that group's, in the lag of each store", _group
    )

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """Parse options as Spark gives them. ConfigError names option, value and what is accepted."""
        options = cls(**SOURCE_OPTIONS.parse(given))
        if not options.paths:
            raise ConfigError(
                "no store: give .load(PATH), or one of the options path, paths, pathsFile; to write, .save(PATH). "
                + NO_TABLES
            )
        for several in _EXCLUSIVE:
            if len(both := options.set_among(several)) > 1:
                raise ConfigError(f"options {' and '.join(both)} exclude each other; give one of them")
        if not options.include_properties and "properties" in (options.columns or ()):
            raise ConfigError("options columns, with properties, and includeProperties=false exclude each other")
        if any(name.lower() == "includeheaders" for name in given) and options.columns != ("kafka",):
            raise ConfigError("option includeHeaders goes with columns=kafka; other columns: name `headers` or not")
        return options

    def set_among(self, options: Iterable[str]) -> list[str]:
        """Return those of these options that differ from their default."""
        plain = SourceOptions()
        of = {name: SOURCE_OPTIONS.options[name].field for name in options}
        return [name for name in of if getattr(self, of[name]) != getattr(plain, of[name])]

    def refuse(self, options: Iterable[str], why: str) -> None:
        """Raise ConfigError if one of these options differs from its default."""
        for name in self.set_among(options):
            raise ConfigError(f"option {name}{why}")

    def for_batch(self) -> SourceOptions:
        """Return these options for `spark.read`.
        Raises ConfigError for options that need a stream, or that no view can follow."""
        if self.view != "messages":
            self.refuse(
                not_for(self.view),
                f" is for messages, and the view {self.view} has a row for all of a queue or a store: leave it out, "
                "and choose rows by where()",
            )
        self.refuse(_ONLY_STREAM, " is for spark.readStream, not for spark.read: leave it out")
        return self

    def for_stream(self) -> SourceOptions:
        """Return these options for `spark.readStream`. ConfigError for what only a batch can do.
        Limits and `commitGroup` need a stream of queues."""
        if self.read_by == "log":
            self.refuse(_ONLY_STREAM, " goes by queues, and readBy=log has one position for a store: use readBy=queue")
        self.refuse(_ONLY_BATCH, " is for spark.read, not for spark.readStream: leave it out")
        return self


SOURCE_OPTIONS: Final = OptionTable("to read", (*_PLACES, *options_of(SourceOptions)))
_CHOOSING: Final = (
    *("tags", "filter", "keys", "isolation", "startingGroup", "startingOffsets", "endingOffsets"),
    *("startingTimestamp", "startingOffsetsByTimestamp", "endingTimestamp", "readBy", "includeProperties"),
    *("includeHeaders", "bodyAs", "decompress", "minPartitions"),
)
"""Options that choose messages of queues, or say how to read them. The small tables refuse them.

All tables accept `interval` and `onCorrupt`, so that a session can give the same options to all.
"""
_TOPICS: Final = ("subscribe", "subscribePattern", "assign", "includeSystemTopics")
_OF_STORES: Final = ("segments", "delay", "verify")
_EXCLUSIVE: Final = (
    ("subscribe", "subscribePattern", "assign"),
    ("startingGroup", "startingTimestamp", "startingOffsetsByTimestamp"),
    ("maxOffsetsPerTrigger", "maxBytesPerTrigger"),
)
_ONLY_BATCH: Final = ("endingOffsets", "endingTimestamp", "view", "interval")
_ONLY_STREAM: Final = (
    *("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "commitGroup"),
)


def not_for(view: View) -> tuple[str, ...]:
    """Return the options that a view refuses."""
    return (*_CHOOSING, *_TOPICS) if view in _OF_STORES else _CHOOSING


# -- the sink ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Checked options of a write."""

    path: str = option("", "a path", "the store, or the store set (as does `.save(path)`)", _path)
    topic: str | None = option(None, "a topic", "where all rows go; wins over the column", text, shown="column `topic`")
    target: Target = choice(
        *("store", "set", "inbox"),
        meaning="append to a store that is not open; add stores to a set; hand over to the process that has it open",
    )
    queues: int = number(8, "queues of a topic that is not there yet", QUEUES_MAX)
    txn_app_id: str | None = option(
        None,
        "1 to 100 letters, digits, '.', '_' and '-'; the first a letter or a digit",
        "batch: who writes. With txnVersion: a version that was written, or a smaller one, is not written again",
        _app,
    )
    txn_version: int | None = option(None, "a number from 0", "batch: see txnAppId", count(0))
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
        """Parse options as Spark gives them. ConfigError names option, value and what is accepted."""
        options = cls(**SINK_OPTIONS.parse(given))
        if not options.path:
            raise ConfigError(f"no target: give .save(PATH), or .option('path', PATH). {NO_TABLES}")
        if (options.txn_app_id is None) != (options.txn_version is None):
            missing = "txnVersion" if options.txn_version is None else "txnAppId"
            raise ConfigError(f"options txnAppId and txnVersion go together; {missing} is missing")
        return options

    def check_stream(self) -> None:
        """Raise ConfigError for options that only a batch job can have."""
        if self.txn_app_id is not None:
            raise ConfigError(
                "options txnAppId and txnVersion belong to batch writes: a stream is known by its checkpoint, and each "
                "batch by its number; leave them out"
            )

    def check_overwrite(self) -> None:
        """Raise ConfigError if `mode("overwrite")`, or output mode `complete`, would destroy messages."""
        if self.target == "store" and not self.confirm_overwrite:
            raise ConfigError(
                "overwrite, which output mode complete is too, would take the messages of the topics it writes from "
                "every consumer: a queue is not a table. Write with mode('append'), or to target=set, or say "
                "confirmOverwrite=true"
            )
        if self.target == "inbox":
            raise ConfigError("overwrite does not go with target=inbox: the store belongs to another; append to it")


SINK_OPTIONS: Final = OptionTable("to write", [*options_of(SinkOptions)], _FOR_THE_STREAM)
"""Every option of the sink."""
ONLY_FOR_WRITING: Final = frozenset(name.lower() for name in SINK_OPTIONS.options) - {"path"} | _FOR_THE_STREAM
"""Names in small letters. Spark makes one object for a format, and only these tell that it is to write."""
