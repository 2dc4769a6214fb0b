"""The options of `spark.read.format("mqstore")`: a table that checks and documents them (`optiontable`). Spark-free."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from mqstore.broker import sql92
from mqstore.broker.names import check_group, is_system_group
from mqstore.errors import ConfigError
from mqstore.log.tagfilter import parse_tags
from mqstore.spark.optiontable import (
    Option,
    OptionTable,
    choice,
    duration_s,
    flag,
    local_path,
    names,
    number,
    option,
    options_of,
    text,
)
from mqstore.spark.positions import ANY, EARLIEST, LATEST, Key, Offsets

if TYPE_CHECKING:  # it would need pyarrow, which planning does not
    from mqstore.spark.rows import OnCorrupt

__all__ = [
    "OPTIONS",
    "QUEUE_ID",
    "SOURCE_OPTIONS",
    "Option",
    "SourceOptions",
    "interval_ms",
    "not_for",
]

View = Literal["messages", "queues", "segments", "groups", "delay", "traffic", "verify"]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
QUEUE_ID: Final = re.compile("0|[1-9][0-9]{0,9}")
"""As queues are looked up. Another spelling of a number would name none of them."""
_BATCH_MAX: Final = 1 << 30
"""Arrow counts the bytes of a column of a batch in 32 bits (`arrow.laid`). Half of them: a batch may have as much again
in bodies that were stored compressed."""


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


def _offsets(others: int, text: str) -> Offsets:
    """Return offsets by queue, and that of all others as `ANY`: `others`, unless the text is earliest or latest. The
    store of a queue is "" if the text does not name it."""
    if text.lower() in ("earliest", "latest"):
        return {ANY: EARLIEST if text.lower() == "earliest" else LATEST}
    found = {ANY: others}

    def add(value: Any, *names: str) -> None:
        if isinstance(value, dict) and value and len(names) < 3:
            for name, inner in value.items():
                add(inner, *names, name)
        elif type(value) is int and value >= EARLIEST and len(names) > 1:
            *store, topic, queue_id = names
            if not QUEUE_ID.fullmatch(queue_id):
                raise ValueError(f"{queue_id!r} is no queue id")
            found[Key("".join(store), topic, int(queue_id))] = value
        else:
            raise ValueError("not that form")

    add(_parsed(text))
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
    """Milliseconds of what traffic is added up by. ValueError for less than a second.

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
    paths = [local_path(path) for path in found]
    return dict(zip(value, paths, strict=True)) if isinstance(value, dict) else paths


def _paths_file(text: str) -> dict[str, str] | list[str]:
    try:
        with open(text, encoding="utf-8") as file:
            return _paths(file.read())
    except OSError as error:
        raise ValueError(f"it cannot be read: {error}") from error


# -- the options -----------------------------------------------------------------------------------------------------


_WHERE = "earliest, latest, or JSON {topic: {queue id: offset}} with -2 for earliest and -1 for latest"
_WHEN = "milliseconds since 1970, or ISO 8601, UTC unless it says otherwise"
_PATHS = 'a JSON array of paths, or {"id": "path"}'

_PLACES: Final = (
    Option(
        *("path", "paths", "", "a path", "a store, a store set, or a glob of stores (as does `.load(path)`)"),
        lambda path: [local_path(path)],
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
    """The options of a query, checked. Each field is the option of the same name, unless it says another."""

    paths: dict[str, str] | list[str] = field(default_factory=list)
    """From option `path`, `paths` or `pathsFile`."""
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
        *(None, _WHERE, "where to begin; several stores: their id on top", partial(_offsets, EARLIEST)),
        shown="earliest; of a stream: latest",
    )
    ending_offsets: Offsets | None = option(
        *(None, _WHERE, "where to end, exclusive; likewise", partial(_offsets, LATEST)), shown="latest"
    )
    starting_timestamp_ms: int | None = option(
        None, _WHEN, "from the first message stored at or after it; wins over startingOffsets", _instant
    )
    ending_timestamp_ms: int | None = option(
        None, _WHEN, "up to the first message stored at or after it; wins over endingOffsets", _instant
    )
    starting_group: str | None = option(
        None, "a consumer group", "begin at its committed offsets, where it has none at the oldest message", text
    )
    read_by: Literal["auto", "queue", "log"] = choice(
        *("auto", "queue", "log"),
        meaning="by consume queues, or by ranges of the commitlog, which needs none; auto: by queues if there are any, "
        "and for a stream always",
    )
    columns: tuple[str, ...] | None = option(
        *(None, "names, separated by commas, or kafka"),
        *("which columns; the others cost nothing; kafka: those of Spark's Kafka source", names),
        shown="all",
    )
    include_properties: bool = flag(True, "column `properties`")
    body_as: Literal["binary", "string"] = choice(
        "binary", "string", meaning="type of `body`; string puts U+FFFD for what is not UTF-8"
    )
    decompress: bool = flag(True, "inflate bodies that are stored compressed")
    verify: bool = flag(True, "compare each record's checksum; magic, offsets and lengths are compared always")
    isolation: Literal["dispatched", "flushed"] = choice(
        "dispatched", "flushed", meaning="flushed: only what no power cut can take back, by the store's checkpoint"
    )
    on_corrupt: OnCorrupt = choice(
        *("fail", "skip", "keep"),
        meaning="what becomes of a damaged message; keep: a row with nulls, and why in column `error`",
    )
    fail_on_data_loss: bool = flag(True, "fail if wanted messages, or a wanted queue, are gone; else read what is left")
    min_partitions: int = number(
        1,
        "at least so many tasks, if there are as many messages; large queues are cut, small ones put together",
        shown="one per 128 MiB or 500 000 messages",
    )
    max_rows_per_batch: int = number(20_000, "rows of an Arrow batch", _BATCH_MAX)
    max_bytes_per_batch: int = number(8 << 20, "bytes of an Arrow batch; it has one message at least", _BATCH_MAX)
    view: View = choice(*get_args(View), meaning="which table")
    interval_ms: int = option(
        *(60_000, "a length of time from 1s (30s, 5m, 1h)", "of what a row of the view `traffic` adds up", interval_ms),
        shown="1m",
    )
    max_offsets_per_trigger: int | None = number(
        None, "stream: at most so many messages a batch, shared among queues by what waits in each (pyspark 4.2)"
    )
    max_bytes_per_trigger: int | None = number(
        None, "stream: at most so many bytes of records a batch, or a single message that is larger (pyspark 4.2)"
    )
    commit_group: str | None = option(
        None,
        "a consumer group",
        "stream: show its progress as that group's, in the lag of each store; the only thing that is ever written",
        _group,
    )

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """The options as Spark gives them. ConfigError names option, value and what is accepted."""
        options = cls(**SOURCE_OPTIONS.parse(given))
        options._check()
        return options

    def _check(self) -> None:
        if not self.paths:
            raise ConfigError(
                "no store: give .load(PATH), or one of the options path, paths, pathsFile; to write, .save(PATH). A "
                "table by name (CREATE TABLE) has no options in a query: use CREATE TEMPORARY VIEW"
            )
        for several in _EXCLUSIVE:
            if len(given := self.set_among(several)) > 1:
                raise ConfigError(f"options {' and '.join(given)} exclude each other; give one of them")
        if not self.include_properties and "properties" in (self.columns or ()):
            raise ConfigError(
                "options columns and includeProperties=false contradict each other: columns names properties, leave "
                "one out"
            )

    def set_among(self, options: Iterable[str]) -> list[str]:
        """Return those of these options that do not have their default."""
        plain = SourceOptions()
        of = {name: OPTIONS[name].field for name in options}
        return [name for name in of if getattr(self, of[name]) != getattr(plain, of[name])]

    def refuse(self, options: Iterable[str], why: str) -> None:
        """Raise ConfigError if one of these options does not have its default."""
        for name in self.set_among(options):
            raise ConfigError(f"option {name}{why}")

    def for_batch(self) -> SourceOptions:
        """Return these options, for `spark.read`. ConfigError for what only a stream can do, and a view cannot."""
        if self.view != "messages":
            self.refuse(
                not_for(self.view),
                f" is for messages, and the view {self.view} has a row for all of a queue or a store: leave it out, "
                "and choose rows by where()",
            )
        self.refuse(_ONLY_STREAM, " is for spark.readStream, not for spark.read: leave it out")
        return self

    def for_stream(self) -> SourceOptions:
        """Return these options, for `spark.readStream`. ConfigError for what only a batch can do, or only a stream of
        queues."""
        if self.read_by == "log":
            self.refuse(_ONLY_STREAM, " goes by queues, and readBy=log has one position for a store: use readBy=queue")
        self.refuse(_ONLY_BATCH, " is for spark.read, not for spark.readStream: leave it out")
        return self


SOURCE_OPTIONS: Final = OptionTable((*_PLACES, *options_of(SourceOptions)))
OPTIONS: Final[Mapping[str, Option]] = SOURCE_OPTIONS.options
"""Every option by its name."""
_CHOOSING: Final = (
    *("tags", "filter", "keys", "isolation", "startingGroup", "startingOffsets", "endingOffsets"),
    *("startingTimestamp", "endingTimestamp", "readBy", "includeProperties", "bodyAs", "decompress", "minPartitions"),
)
"""Options that choose messages of queues, or say how they are read. The small tables refuse them. All tables accept
`interval` and `onCorrupt`, which only some use, so that a session can give the same options to all of them."""
_TOPICS: Final = ("subscribe", "subscribePattern", "assign", "includeSystemTopics")
_OF_STORES: Final = ("segments", "delay", "verify")
_EXCLUSIVE: Final = (
    ("subscribe", "subscribePattern", "assign"),
    ("startingGroup", "startingTimestamp"),
    ("maxOffsetsPerTrigger", "maxBytesPerTrigger"),
)
_ONLY_BATCH: Final = ("endingOffsets", "endingTimestamp", "view", "interval")
_ONLY_STREAM: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "commitGroup")


def not_for(view: View) -> tuple[str, ...]:
    """The options that a small table does not go by, and refuses."""
    return (*_CHOOSING, *_TOPICS) if view in _OF_STORES else _CHOOSING
