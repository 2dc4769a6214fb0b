"""The options of `spark.read.format("mqstore")`: one table, from which they are checked, and documented.

Spark hands options over as strings under case-insensitive names. A name that is not here is refused, with the nearest
that is; a value that does not fit is refused with its option, itself and what would. Knows no Spark.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from mqstore.broker import sql92
from mqstore.errors import ConfigError
from mqstore.spark.rows import OnCorrupt

__all__ = ["OPTIONS", "Offsets", "Option", "SourceOptions", "as_markdown"]

View = Literal["messages", "queues", "segments", "groups"]
Offsets = Literal["earliest", "latest"] | dict[str, Any]
"""A word, or the parsed JSON: topic -> queue id -> offset, with several stores one level more."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_GIVEN_BY_SPARK: Final = frozenset({"owner", "provider", "location"})


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
    starting_offsets: Offsets = "earliest"
    ending_offsets: Offsets = "latest"
    starting_timestamp_ms: int | None = None
    ending_timestamp_ms: int | None = None
    starting_group: str | None = None
    scan: Literal["auto", "queue", "log"] = "auto"
    columns: tuple[str, ...] | None = None
    include_properties: bool = True
    body_as: Literal["binary", "string"] = "binary"
    decompress: bool = True
    verify: bool = True
    read_up_to: Literal["dispatched", "flushed"] = "dispatched"
    on_corrupt: OnCorrupt = "fail"
    fail_on_data_loss: bool = True
    min_partitions: int = 1
    max_rows_per_batch: int = 20_000
    max_bytes_per_batch: int = 8 << 20
    view: View = "messages"
    push_down: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """The options as Spark gives them. ConfigError names option, value and what is accepted."""
        values: dict[str, Any] = {}
        said: dict[str, str] = {}
        paths = [name for name in ("path", "paths", "pathsfile") if name in {key.lower() for key in given}]
        if len(paths) > 1:
            raise ConfigError(f"options {' and '.join(paths)} both say where the stores are; give one of them")
        for name, text in given.items():
            option = _BY_NAME.get(name.lower())
            if option is None:
                if name.lower() in _GIVEN_BY_SPARK:
                    continue
                raise ConfigError(f"no option {name!r}{_nearest(name)}; there are {', '.join(OPTIONS)}")
            if option.field in said:
                raise ConfigError(f"options {said[option.field]!r} and {name!r} are the same; give one of them")
            said[option.field] = name
            try:
                values[option.field] = option.parse(text)
            except ValueError as error:
                raise ConfigError(f"option {option.name}={text!r}: {error}; {option.accepts}") from error
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        if not self.paths:
            raise ConfigError("no store: give .load(PATH), or one of the options path, paths, pathsFile")
        wanted = {"subscribe": self.topics, "subscribePattern": self.topic_pattern, "assign": self.assign}
        given = [name for name, value in wanted.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"options {' and '.join(given)} exclude each other; give one of them")
        if self.starting_group is not None and self.starting_timestamp_ms is not None:
            raise ConfigError("options startingGroup and startingTimestamp exclude each other; give one of them")


def _nearest(name: str) -> str:
    known = {**{option.name.lower(): option.name for option in OPTIONS.values()}, **dict.fromkeys(_BY_NAME)}
    found = difflib.get_close_matches(name.lower(), known, 1, 0.6)
    return f"; did you mean {_BY_NAME[found[0]].name!r}?" if found else ""


# -- values ------------------------------------------------------------------------------------------------------------


def _word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        for word in words:
            if text.lower() == word.lower():
                return word
        raise ValueError("no such word")

    return parse


def _boolean(text: str) -> bool:
    return _word("true", "false")(text) == "true"


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise ValueError("too small")
        return number

    return parse


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("it names nothing")
    return names


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error


def _sql(text: str) -> str:
    sql92.compile(text)
    return text


def _assign(text: str) -> dict[str, list[int]]:
    value = json.loads(text)
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
            elif depth < 2 or not key.isdecimal() or type(inner) is not int or inner < -2:
                raise ValueError("not that form")

    value = json.loads(text)
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


def _one_path(text: str) -> list[str]:
    return [_text(text)]


def _paths(text: str) -> dict[str, str] | list[str]:
    value = json.loads(text)
    names = value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("not that form")
    found: dict[str, str] | list[str] = value
    return found


def _paths_file(text: str) -> dict[str, str] | list[str]:
    try:
        with open(text, encoding="utf-8") as file:
            return _paths(file.read())
    except OSError as error:
        raise ValueError(f"it cannot be read: {error}") from error


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `accepts` and `meaning` are for people."""

    name: str
    field: str
    default: str
    accepts: str
    meaning: str
    parse: Callable[[str], Any]
    aliases: tuple[str, ...] = ()


_YES_NO = "true or false"
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
        _names,
        ("topic",),
    ),
    Option(
        "subscribePattern", "topic_pattern", "", "a regular expression", "which topics; the whole name fits", _pattern
    ),
    Option("assign", "assign", "", 'JSON {"topic": [queue id, ...]}', "which queues", _assign),
    Option(
        "includeSystemTopics",
        "include_system_topics",
        "false",
        _YES_NO,
        "the engine's own topics, retries and dead letters as well",
        _boolean,
    ),
    Option(
        "tags",
        "tags",
        "*",
        "`A || B`, or `*`",
        "only messages with these tags, by hash before a record is looked at, then exactly",
        _text,
        ("subExpression",),
    ),
    Option("filter", "filter", "", "an SQL92 expression", "over properties, evaluated in the task", _sql),
    Option("keys", "keys", "", "keys, separated by commas", "only messages that bear one of these keys", _names),
    Option(
        "startingOffsets",
        "starting_offsets",
        "earliest",
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
        _text,
    ),
    Option(
        "scan",
        "scan",
        "auto",
        "auto, queue or log",
        "by consume queues, or by ranges of the commitlog, which needs none; auto: by queues if there are any",
        _word("auto", "queue", "log"),
    ),
    Option("columns", "columns", "all", "names, separated by commas", "which columns; the others cost nothing", _names),
    Option("includeProperties", "include_properties", "true", _YES_NO, "column `properties`", _boolean),
    Option(
        "bodyAs",
        "body_as",
        "binary",
        "binary or string",
        "type of `body`; string puts U+FFFD for what is not UTF-8",
        _word("binary", "string"),
    ),
    Option("decompress", "decompress", "true", _YES_NO, "inflate bodies that are stored compressed", _boolean),
    Option(
        "verify",
        "verify",
        "true",
        _YES_NO,
        "compare each record's checksum; magic, offsets and lengths are compared always",
        _boolean,
    ),
    Option(
        "readUpTo",
        "read_up_to",
        "dispatched",
        "dispatched or flushed",
        "flushed: only what no power cut can take back, by the store's checkpoint",
        _word("dispatched", "flushed"),
    ),
    Option(
        "onCorrupt",
        "on_corrupt",
        "fail",
        "fail, skip or keep",
        "what becomes of a damaged message; keep: a row with nulls, and why in column `error`",
        _word("fail", "skip", "keep"),
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        "true",
        _YES_NO,
        "fail if wanted messages, or a wanted queue, are gone; else read what is left",
        _boolean,
    ),
    Option(
        "minPartitions",
        "min_partitions",
        "one per 128 MiB or 500 000 messages",
        "a number from 1",
        "at least so many tasks, if there are as many messages; large queues are cut, small ones put together",
        _count(1),
    ),
    Option("maxRowsPerBatch", "max_rows_per_batch", "20000", "a number from 1", "rows of an Arrow batch", _count(1)),
    Option(
        "maxBytesPerBatch",
        "max_bytes_per_batch",
        "8388608",
        "a number from 1",
        "bytes of an Arrow batch; it has one message at least",
        _count(1),
    ),
    Option(
        "view",
        "view",
        "messages",
        "messages, queues, segments or groups",
        "which table",
        _word("messages", "queues", "segments", "groups"),
    ),
    Option(
        "pushDown",
        "push_down",
        "false",
        _YES_NO,
        "take over filters from Spark, for a frame that is used in one query only (see `spark.md`)",
        _boolean,
    ),
)

OPTIONS: Final[Mapping[str, Option]] = {option.name: option for option in _TABLE}
"""Every option by its name."""
_BY_NAME: Final = {name.lower(): option for option in _TABLE for name in (option.name, *option.aliases)}


def as_markdown() -> str:
    """The table for the documentation."""
    lines = ["| Option | Default | Accepts | Meaning |", "|---|---|---|---|"]
    for option in _TABLE:
        also = "".join(f", `{alias}`" for alias in option.aliases)
        cells = (f"`{option.name}`{also}", option.default or "-", option.accepts, option.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
