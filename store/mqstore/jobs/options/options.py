"""Options of `spark.read`, `readStream`, `write` and `writeStream` with format mqstore.

Two tables, one for the source and one for the sink, check the options and document them. Spark passes options as
strings with case-insensitive names.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from mqstore.broker.reads.filters import sql92
from mqstore.broker.tables.names import check_group, is_system_group
from mqstore.broker.tables.topics import QUEUES_MAX
from mqstore.errors import ConfigError, FormatError
from mqstore.files.safe_open import resolved
from mqstore.jobs.options.optiontable import (
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
from mqstore.layout.jsontext import decode
from mqstore.log.reading.tagfilter import parse_tags

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
_SCHEME: Final = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:|file://(?!/)")
APP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Pattern of `txnAppId`. Folders are named by it, so it must not begin with a dot, for example."""
_BATCH_MAX: Final = 1 << 30
"""Half of Arrow's limit for a column of a batch, which has 32-bit offsets (`arrow.laid`).

A batch may have as much again in bodies that were stored compressed.
"""
_FOR_THE_STREAM: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of a `writeStream` that Spark itself reads."""


# -- offsets -----------------------------------------------------------------------------------------------------------

EARLIEST: Final = -2
LATEST: Final = -1
"""Special offsets in the options, the same as in those of Kafka's source."""


class Key(NamedTuple):
    """A queue, or a whole log: topic "" and queue -1."""

    store: str
    topic: str = ""
    queue_id: int = -1

    def __str__(self) -> str:
        return f"{self.store}: {self.topic}, queue {self.queue_id}" if self.topic else f"{self.store}: the log"


ANY: Final = Key("")
"""All queues and logs that are not named."""
Offsets = dict[Key, int]
"""Offset of each queue (queue offset) or log (physical offset)."""


def queue_id_of(text: str) -> int:
    """Return the queue id of a name in JSON. ValueError for another spelling, such as leading zeros."""
    if not _QUEUE_ID.fullmatch(text):
        raise ValueError(f"{text!r} is not a queue id")
    return int(text)


NO_TABLES: Final = (
    "Spark does not pass the options of a table (CREATE TABLE, saveAsTable, writeTo) to its queries: use CREATE "
    "TEMPORARY VIEW name USING mqstore OPTIONS (path '...'), or .save(PATH) to write"
)


def refuse_table(given: Iterable[str]) -> None:
    """Raise ConfigError for a table of Spark's catalog, since Spark does not pass its options to a query."""
    if any(name.lower() == "provider" for name in given):  # added only by CREATE TABLE without columns
        raise ConfigError(NO_TABLES)


# -- values ------------------------------------------------------------------------------------------------------------


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression ({error})") from error


def _sql(text: str) -> str:
    sql92.compile(text)
    return text


def _tags(value: str) -> str:
    parse_tags(text(value), "")
    return value


def _parsed(text: str) -> Any:
    """Parse JSON. ValueError for a repeated name, because the last one would silently win."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is given twice")
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
    `ANY` has the offset of unnamed queues: `others`, unless the text is earliest or latest. The store is "" if not
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
    # Rounded up, because store times are whole milliseconds.
    return -((_EPOCH - when) // timedelta(milliseconds=1))


def _group(text: str) -> str:
    group = check_group(text)
    if is_system_group(group):
        raise ValueError("this is a system group")
    return group


def interval_ms(value: str) -> int:
    """Parse the interval of a traffic count. Return milliseconds. ValueError for less than a second.

    >>> interval_ms("5m")
    300000
    """
    found = round(duration_s(value) * 1000)
    if found < 1000:
        raise ValueError("too short")
    return found


def checked_path(value: str) -> str:
    """Return the absolute path of a local path, without `file:`. Raises ValueError for any other scheme.

    Executors and later batches have other working directories. A URL of another scheme would be taken for a folder's
    name, and a job would silently write below its working directory. So would a relative path in Spark Connect, where
    Python workers run in a temporary folder of the session.

    >>> checked_path("file:///var/mq")
    '/var/mq'
    """
    if found := _SCHEME.match(value):
        raise ValueError(f"{found[0]!r} is not supported, only paths of mounted file systems (a folder: ./NAME)")
    if value.startswith("~"):
        raise ValueError("'~' is not expanded; give the whole path (a folder: ./NAME)")
    path = value.removeprefix("file://") if value.startswith("file://") else value.removeprefix("file:")
    if not path.strip():
        raise ValueError("it is empty")
    if os.path.isabs(path):
        return os.path.normpath(path)
    here, session = resolved(os.curdir), os.environ.get("SPARK_JOB_ARTIFACT_UUID", "default")
    if session != "default" and os.path.basename(here) == session:
        raise ValueError("a relative path would be in a temporary folder of this Spark session: give the whole path")
    if glob.has_magic(path) and not os.path.isdir(path):
        here = glob.escape(here)
    return os.path.normpath(os.path.join(here, path))


def local_path(path: str | os.PathLike[str]) -> str:
    """Return `checked_path(path)`. Raises ConfigError instead of ValueError."""
    try:
        return checked_path(os.fspath(path))
    except ValueError as error:
        raise ConfigError(f"cannot use the path {os.fspath(path)!r}: {error}") from error


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
        raise ValueError(f"cannot be read ({error})") from error


def _path(value: str) -> str:
    return resolved(checked_path(value))


def _app(value: str) -> str:
    if not APP_NAME.fullmatch(value):
        raise ValueError("invalid name")
    return value


# -- the source --------------------------------------------------------------------------------------------------------


_WHERE = "earliest, latest, or JSON {topic: {queue id: offset}} with -2 for earliest and -1 for latest"
_BEGIN = "earliest; for a stream, latest"
_WHEN = "milliseconds since 1970, or ISO 8601 (UTC by default)"
_DURATION: Final = "seconds, or a number with ms, s, m, h or d"
_PATHS = 'a JSON array of paths, or {"id": "path"}'

_PLACES: Final = (
    Option(
        *("path", "paths", "", "a path", "store, store set, or glob of stores (same as `.load(path)`)"),
        lambda path: [checked_path(path)],
    ),
    Option(
        *("paths", "paths", "", _PATHS, "several of these; ids become the column `store` (same as `.load([a, b])`)"),
        _paths,
    ),
    Option(
        *("pathsFile", "paths", "", f"a file with {_PATHS}", "the same from a file, such as a fleet's catalogue"),
        _paths_file,
    ),
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Checked options of a query. A field has the name of its option, unless noted."""

    paths: dict[str, str] | list[str] = field(default_factory=list)
    """Value of option `path`, `paths` or `pathsFile`."""
    topics: tuple[str, ...] | None = option(
        None, "names, separated by commas", "topics to read", names, name="subscribe", shown="all users' topics"
    )
    topic_pattern: re.Pattern[str] | None = option(
        None, "a regular expression", "topics whose whole name matches", _pattern, name="subscribePattern"
    )
    assign: dict[str, list[int]] | None = option(None, 'JSON {"topic": [queue id, ...]}', "queues to read", _assign)
    include_system_topics: bool = flag(False, "include system, retry and dead-letter topics")
    tags: str | None = option(
        None, "`A || B`, or `*`", "only messages with these tags: by hash, then by the record", _tags, shown="*"
    )
    filter: str | None = option(
        None, "an SQL92 expression", "only messages whose properties match; evaluated in the task", _sql
    )
    keys: tuple[str, ...] | None = option(
        None, "keys, separated by commas", "only messages with one of these keys", names
    )
    starting_offsets: Offsets | None = option(
        None, _WHERE, "first offset; with several stores {store: {...}}", _offsets(EARLIEST), shown=_BEGIN
    )
    ending_offsets: Offsets | None = option(
        None, _WHERE, "end offset, exclusive; with several stores {store: {...}}", _offsets(LATEST), shown="latest"
    )
    starting_timestamp_ms: int | None = option(
        None, _WHEN, "begin at the first message stored at or after this time; overrides startingOffsets", _instant
    )
    ending_timestamp_ms: int | None = option(
        None, _WHEN, "end before the first message stored at or after this time; overrides endingOffsets", _instant
    )
    starting_offsets_by_timestamp: Offsets | None = option(
        None,
        "JSON {topic: {queue id: milliseconds since 1970}}",
        "startingTimestamp of single queues; startingOffsets applies to the others",
        _instants,
    )
    starting_group: str | None = option(
        None, "a consumer group", "begin at its committed offsets, or at the oldest message of other queues", text
    )
    read_by: Literal["auto", "queue", "log"] = choice(
        *("auto", "queue", "log"), meaning="read consume queues or the log; auto: queues for a stream or if any exist"
    )
    columns: tuple[str, ...] | None = option(
        None,
        "names, separated by commas, or kafka",
        "columns of the rows; kafka: those of Kafka's source",
        names,
        shown="all",
    )
    include_properties: bool = flag(True, "include column `properties`")
    include_headers: bool = flag(True, "include column `headers` of columns=kafka")
    body_as: Literal["binary", "string"] = choice(
        "binary", "string", meaning="type of `body`; string has U+FFFD for bytes that are not UTF-8"
    )
    decompress: bool = flag(True, "decompress bodies that are stored compressed")
    verify: bool = flag(True, "compare each record's checksum; magic, offsets and lengths are always compared")
    isolation: Literal["dispatched", "flushed"] = choice(
        "dispatched",
        "flushed",
        meaning="flushed: only messages on disk, by the store's checkpoint; safe in a power cut",
    )
    on_corrupt: OnCorrupt = choice(
        *("fail", "skip", "keep"),
        meaning="handling of damaged messages; keep: nulls, with the reason in column `error`",
    )
    fail_on_data_loss: bool = flag(True, "fail if messages, a queue or a store are gone; else read the remaining ones")
    ignore_corrupt_files: bool = flag(False, "skip a store that cannot be opened, with a warning that names it")
    min_partitions: int = number(
        1, "smallest number of tasks, if there are as many messages", shown="one per 128 MiB or 500 000 messages"
    )
    max_rows_per_batch: int = number(20_000, "rows of an Arrow batch", _BATCH_MAX)
    max_bytes_per_batch: int = number(8 << 20, "bytes of an Arrow batch, or one message that is larger", _BATCH_MAX)
    view: View = choice(*get_args(View), meaning="table to read")
    interval_ms: int = option(
        60_000, "a duration from 1s (30s, 5m, 1h)", "interval of a row of the view `traffic`", interval_ms, shown="1m"
    )
    max_offsets_per_trigger: int | None = number(
        None, "stream: limit of messages of a batch, shared among queues by their backlogs (pyspark 4.2)"
    )
    max_bytes_per_trigger: int | None = number(
        None, "stream: limit of bytes of records of a batch, or one message that is larger (pyspark 4.2)"
    )
    min_offsets_per_trigger: int | None = number(None, "stream: wait for this many messages, or for maxTriggerDelay")
    max_trigger_delay_s: float = option(
        900.0, _DURATION, "stream: longest time between batches, if messages wait", duration_s, shown="15m"
    )
    commit_group: str | None = option(
        None, "a consumer group", "stream: publish its offsets as this group's, for the lag of each store", _group
    )

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """Parse options given by Spark. ConfigError names the option, its value and the accepted values."""
        options = cls(**SOURCE_OPTIONS.parse(given))
        if not options.paths:
            raise ConfigError(
                "no store: give .load(PATH), or one of the options path, paths, pathsFile; to write, .save(PATH). "
                + NO_TABLES
            )
        for several in _EXCLUSIVE:
            if len(both := options.set_among(several)) > 1:
                raise ConfigError(f"options {' and '.join(both)} exclude each other; give only one")
        if not options.include_properties and "properties" in (options.columns or ()):
            raise ConfigError("options columns, with properties, and includeProperties=false exclude each other")
        if any(name.lower() == "includeheaders" for name in given) and options.columns != ("kafka",):
            raise ConfigError("option includeHeaders needs columns=kafka; with other columns, name `headers` or not")
        return options

    def set_among(self, options: Iterable[str]) -> list[str]:
        """Return the options that differ from their default."""
        plain = SourceOptions()
        of = {name: SOURCE_OPTIONS.options[name].field for name in options}
        return [name for name in of if getattr(self, of[name]) != getattr(plain, of[name])]

    def refuse(self, options: Iterable[str], why: str) -> None:
        """Raise ConfigError if one of these options differs from its default."""
        for name in self.set_among(options):
            raise ConfigError(f"option {name}{why}")

    def for_batch(self) -> SourceOptions:
        """Return these options for `spark.read`.
        Raises ConfigError for options that need a stream, or that views do not support."""
        if self.view != "messages":
            self.refuse(
                not_for(self.view),
                f" is for messages, but the view {self.view} has a row for a whole queue or store: leave it out, and "
                "choose rows by where()",
            )
        self.refuse(_ONLY_STREAM, " is for spark.readStream, not for spark.read: leave it out")
        return self

    def for_stream(self) -> SourceOptions:
        """Return these options for `spark.readStream`. ConfigError for options that only a batch supports.
        Limits and `commitGroup` need a stream of queues."""
        if self.read_by == "log":
            self.refuse(_ONLY_STREAM, " needs queues, but readBy=log has one position for a store: use readBy=queue")
        self.refuse(_ONLY_BATCH, " is for spark.read, not for spark.readStream: leave it out")
        return self


SOURCE_OPTIONS: Final = OptionTable("to read", (*_PLACES, *options_of(SourceOptions)))
_CHOOSING: Final = (
    *("tags", "filter", "keys", "isolation", "startingGroup", "startingOffsets", "endingOffsets"),
    *("startingTimestamp", "startingOffsetsByTimestamp", "endingTimestamp", "readBy", "includeProperties"),
    *("includeHeaders", "bodyAs", "decompress", "minPartitions"),
)
"""Options about messages of queues, which the small tables refuse.

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

    path: str = option("", "a path", "the store, or the store set (same as `.save(path)`)", _path)
    topic: str | None = option(None, "a topic", "topic of all rows; overrides the column", text, shown="column `topic`")
    target: Target = choice(
        *("store", "set", "inbox"),
        meaning="append to a store that is not open; add stores to a set; pass rows to the process that has it open",
    )
    queues: int = number(8, "number of queues of a new topic", QUEUES_MAX)
    txn_app_id: str | None = option(
        None,
        "1 to 100 letters, digits, '.', '_' and '-'; the first a letter or a digit",
        "batch: name of the writer. With txnVersion, a version that was written, or a smaller one, is skipped",
        _app,
    )
    txn_version: int | None = option(None, "a number from 0", "batch: see txnAppId", count(0))
    max_rows_per_shard: int | None = number(
        None, "rows of a shard, which with target=set is a store; one task may write several", shown="no limit"
    )
    lock_timeout_s: float = option(
        30.0, _DURATION, "longest wait for a process that has the target open", duration_s, shown="30s"
    )
    staging_ttl_s: float = option(
        *(7 * 86400.0, _DURATION, "age at which the next job deletes files of a crashed job", duration_s), shown="7d"
    )
    confirm_overwrite: bool = flag(
        False, "allow overwrite to hide the old messages of the written topics from all consumers (target=store)"
    )

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SinkOptions:
        """Parse options given by Spark. ConfigError names the option, its value and the accepted values."""
        options = cls(**SINK_OPTIONS.parse(given))
        if not options.path:
            raise ConfigError(f"no target: give .save(PATH), or .option('path', PATH). {NO_TABLES}")
        if (options.txn_app_id is None) != (options.txn_version is None):
            missing = "txnVersion" if options.txn_version is None else "txnAppId"
            raise ConfigError(f"options txnAppId and txnVersion go together; {missing} is missing")
        return options

    def check_stream(self) -> None:
        """Raise ConfigError for options that only a batch job supports."""
        if self.txn_app_id is not None:
            raise ConfigError(
                "options txnAppId and txnVersion are for batch writes: a stream is identified by its checkpoint, and "
                "each batch by its number; leave them out"
            )

    def check_overwrite(self) -> None:
        """Raise ConfigError if `mode("overwrite")`, or output mode `complete`, would hide messages."""
        if self.target == "store" and not self.confirm_overwrite:
            raise ConfigError(
                "overwrite, like output mode complete, would hide the old messages of the written topics from every "
                "consumer. Use mode('append'), target=set or confirmOverwrite=true"
            )
        if self.target == "inbox":
            raise ConfigError("overwrite does not work with target=inbox, since another process has the store open")


SINK_OPTIONS: Final = OptionTable("to write", [*options_of(SinkOptions)], _FOR_THE_STREAM)
ONLY_FOR_WRITING: Final = frozenset(name.lower() for name in SINK_OPTIONS.options) - {"path"} | _FOR_THE_STREAM
"""Lower-case names of options by which the source recognises a write, since Spark creates the same object for both."""
