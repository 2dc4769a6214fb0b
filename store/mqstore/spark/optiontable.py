"""Tables of options: from one table they are checked, and documented. The source and the sink have one each.

Spark hands options over as strings under case-insensitive names. A name that is not in the table is refused, with the
nearest that is, or all if none is near; a value that does not fit is refused with its option, itself and what would.
Knows no Spark.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from mqstore.errors import ConfigError

__all__ = [
    "YES_NO",
    "Option",
    "OptionTable",
    "boolean",
    "choice",
    "count",
    "duration_s",
    "flag",
    "local_path",
    "names",
    "number",
    "option",
    "options_of",
    "refuse_table",
    "text",
    "word",
]

_TABLE: Final = "provider"
"""`CREATE TABLE ... USING` and `saveAsTable` add it to the options; nothing else does."""
YES_NO: Final = "true or false"
_SHOWN: Final = 200
"""Most characters of a value in a message: JSON may name each queue of a fleet."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `accepts` and `meaning` are for people."""

    name: str
    field: str
    """Of the dataclass that the table fills."""
    default: str
    accepts: str
    meaning: str
    parse: Callable[[str], Any]
    """Raises ValueError for a value that does not fit, RecursionError for one that is nested too deeply."""


def option(
    default: Any, accepts: str, meaning: str, parse: Callable[[str], Any], *, name: str = "", shown: str | None = None
) -> Any:
    """Return a field of a dataclass that is an option.

    The option has the field's name in camel case, without its unit (`_ms`, `_s`), unless `name` is another. `shown` is
    the default as the documentation has it, if that is not its value.
    """
    return field(default=default, metadata={"option": (name, shown, accepts, meaning, parse)})


def flag(default: bool, meaning: str) -> Any:
    """Return a field that is true or false, as `option` does."""
    return option(default, YES_NO, meaning, boolean)


def choice(*words: str, meaning: str) -> Any:
    """Return a field that is one of these words, in any case, as `option` does. The first word is the default."""
    return option(words[0], f"{', '.join(words[:-1])} or {words[-1]}", meaning, word(*words))


def number(default: int | None, meaning: str, most: int | None = None, *, shown: str | None = None) -> Any:
    """Return a field that is a whole number from 1, to `most`, as `option` does."""
    return option(default, "a number from 1" + (f" to {most}" if most else ""), meaning, count(1, most), shown=shown)


def options_of(table: type) -> Iterator[Option]:
    """Return the options among the fields of a dataclass, in their order."""
    for each in fields(table):
        if "option" in each.metadata:
            name, shown, accepts, meaning, parse = each.metadata["option"]
            if shown is None:
                shown = "" if each.default is None else str(each.default)
                shown = shown.lower() if isinstance(each.default, bool) else shown
            name = name or re.sub("_(.)", lambda found: found[1].upper(), re.sub("_m?s$", "", each.name))
            yield Option(name, each.name, shown, accepts, meaning, parse)


class OptionTable:
    """Options by their names, in any case."""

    def __init__(self, options: Sequence[Option], passed_over: frozenset[str] = frozenset()) -> None:
        """`passed_over`: names, in small letters, of what Spark gives to everybody."""
        self.options: Mapping[str, Option] = {option.name: option for option in options}
        self.passed_over = passed_over
        self._by_name = {option.name.lower(): option for option in options}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._by_name

    def parse(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Field -> value of the options as Spark gives them. ConfigError names option, value and what is accepted."""
        values: dict[str, Any] = {}
        said: dict[str, str] = {}
        for name, value in given.items():
            option = self._by_name.get(name.lower())
            if option is None:
                if name.lower() in self.passed_over:
                    continue
                there = self.nearest(name) or f"; there are {', '.join(self.options)}"
                raise ConfigError(f"no option {name!r}{there}")
            if option.field in said:
                raise ConfigError(f"options {said[option.field]!r} and {name!r} are the same; give one of them")
            said[option.field] = name
            try:
                values[option.field] = option.parse(value)
            except (ValueError, RecursionError) as error:
                deep = isinstance(error, RecursionError)  # of json or re; its traceback is as long as that
                why = "it is nested too deeply" if deep else str(error)
                raise ConfigError(f"option {option.name}={value!r:.{_SHOWN}}: {why}; {option.accepts}") from (
                    None if deep else error
                )
        return values

    def nearest(self, name: str) -> str:
        """`; did you mean 'columns'?`, or nothing."""
        found = difflib.get_close_matches(name.lower(), self._by_name, 1, 0.6)
        return f"; did you mean {self._by_name[found[0]].name!r}?" if found else ""

    def as_markdown(self) -> str:
        """The table of the documentation."""
        lines = ["| Option | Default | Accepts | Meaning |", "|---|---|---|---|"]
        for option in self.options.values():
            cells = [f"`{option.name}`", option.default or "-", option.accepts, option.meaning]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n"


def refuse_table(given: Iterable[str]) -> None:
    """Raise ConfigError if the names of options are those of a table that Spark is to keep: a query would get none."""
    if any(name.lower() == _TABLE for name in given):
        raise ConfigError(
            "Spark keeps the options of a table (CREATE TABLE, saveAsTable), but passes none of them to a query of it: "
            "use CREATE TEMPORARY VIEW name USING mqstore OPTIONS (path '...'), or .save(PATH) to write"
        )


# -- values ------------------------------------------------------------------------------------------------------------


def word(*words: str) -> Callable[[str], str]:
    """One of these, in any case."""

    def parse(value: str) -> str:
        for each in words:
            if value.lower() == each.lower():
                return each
        raise ValueError("no such word")

    return parse


def boolean(value: str) -> bool:
    return word("true", "false")(value) == "true"


def count(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` on, to `most`."""

    def parse(value: str) -> int:
        number = int(value)
        if number < least:
            raise ValueError("too small")
        if most is not None and number > most:
            raise ValueError("too large")
        return number

    return parse


def names(value: str) -> tuple[str, ...]:
    """Separated by commas."""
    found = tuple(name.strip() for name in value.split(",") if name.strip())
    if not found:
        raise ValueError("it names nothing")
    return found


def text(value: str) -> str:
    """Anything but blanks."""
    if not value.strip():
        raise ValueError("it is empty")
    return value


_SCHEME: Final = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:|file://(?!/)")


def local_path(value: str) -> str:
    """A path of a mounted file system, without the `file:` that may stand before it. What else there is in front of a
    path would be taken for a folder's name: a job would write below its driver's working directory, and say done.

    >>> local_path("file:///var/mq")
    '/var/mq'
    """
    if found := _SCHEME.match(value):
        raise ValueError(f"only local paths, of a mounted file system; {found[0]!r} leads elsewhere (a folder: ./NAME)")
    if value.startswith("~"):
        raise ValueError("'~' is not replaced here: give the whole path (a folder: ./NAME)")
    return text(value.removeprefix("file://") if value.startswith("file://") else value.removeprefix("file:"))


_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(value: str) -> float:
    """Seconds.

    >>> duration_s("30"), duration_s("1.5 h"), duration_s("7d")
    (30.0, 5400.0, 604800.0)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*(ms|s|m|h|d)?", value.strip().lower())
    if found is None:
        raise ValueError("no length of time")
    return float(found[1]) * _UNITS[found[2] or "s"]
