"""Tables of options, which check and document them, and parsers of their values.

Names may be written in any case. The error for an unknown name suggests the nearest one, or lists all. The error for an
invalid value lists the accepted ones.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from mqstore.errors import ConfigError

__all__ = [
    *("Option", "OptionTable", "choice", "count", "duration_s", "flag", "names", "number", "option", "options_of"),
    *("text", "unknown_option", "word"),
]

_LAST: Final = (1 << 63) - 1


def word(*words: str) -> Callable[[str], str]:
    """Return a parser of one of these lower-case words, which accepts any case."""

    def parse(value: str) -> str:
        if value.lower() not in words:
            raise ValueError("unknown value")
        return value.lower()

    return parse


def count(least: int, most: int = _LAST) -> Callable[[str], int]:
    def parse(value: str) -> int:
        number = int(value)
        if not least <= number <= most:
            raise ValueError("out of range")
        return number

    return parse


def names(value: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in value.split(",") if name.strip())
    if not found:
        raise ValueError("it names nothing")
    return found


def text(value: str) -> str:
    """Parse any text that is not blank."""
    if not value.strip():
        raise ValueError("it is empty")
    return value


_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(value: str) -> float:
    """Parse a duration. Return seconds. Raises ValueError.

    >>> duration_s("30"), duration_s("1.5 h"), duration_s("7d")
    (30.0, 5400.0, 604800.0)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*(ms|s|m|h|d)?", value.strip().lower())
    if found is None:
        raise ValueError("not a duration")
    return float(found[1]) * _UNITS[found[2] or "s"]


@dataclass(frozen=True, slots=True)
class Option:
    """An option. `accepts` and `meaning` are used in the documentation and in errors."""

    name: str
    field: str
    """Field of the dataclass that the table fills."""
    default: str
    accepts: str
    meaning: str
    parse: Callable[[str], Any]
    """Raises ValueError for an invalid value."""


def option(
    default: Any, accepts: str, meaning: str, parse: Callable[[str], Any], *, name: str = "", shown: str | None = None
) -> Any:
    """Return a dataclass field for an option.

    The option has the field's name in camel case, without its unit (`_ms`, `_s`), unless `name` is given. `shown` is
    the default in the documentation, if it differs from the value.
    """
    return field(default=default, metadata={"option": (name, shown, accepts, meaning, parse)})


def flag(default: bool, meaning: str) -> Any:
    """Return a field for an option that is true or false."""
    return option(default, "true or false", meaning, lambda value: word("true", "false")(value) == "true")


def choice(*words: str, meaning: str) -> Any:
    """Return a field for an option that is one of these words, in any case. The first one is the default."""
    return option(words[0], f"{', '.join(words[:-1])} or {words[-1]}", meaning, word(*words))


def number(default: int | None, meaning: str, most: int = 0, *, shown: str | None = None) -> Any:
    """Return a field for an option that is a whole number from 1 to `most`."""
    accepts = "a number from 1" + (f" to {most}" if most else "")
    return option(default, accepts, meaning, count(1, most or _LAST), shown=shown)


def options_of(table: type) -> Iterator[Option]:
    """Return the options among the fields of a dataclass, in their order."""
    for each in fields(table):
        if "option" in each.metadata:
            name, shown, accepts, meaning, parse = each.metadata["option"]
            if shown is None:
                shown = "" if each.default is None else str(each.default).lower()
            name = name or re.sub("_(.)", lambda found: found[1].upper(), re.sub("_m?s$", "", each.name))
            yield Option(name, each.name, shown, accepts, meaning, parse)


class OptionTable:
    """Options by their names, in any case."""

    def __init__(self, purpose: str, options: Sequence[Option], passed_over: frozenset[str] = frozenset()) -> None:
        """`passed_over`: lower-case names of options that Spark itself uses and passes on."""
        self.purpose = purpose
        self.options: Mapping[str, Option] = {option.name: option for option in options}
        self.passed_over = passed_over
        self._by_name = {option.name.lower(): option for option in options}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._by_name

    def parse(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Parse options given by Spark. Return values by field. ConfigError for a wrong name or value."""
        values: dict[str, Any] = {}
        said: dict[str, str] = {}
        for name, value in given.items():
            option = self._by_name.get(name.lower())
            if option is None:
                if name.lower() in self.passed_over:
                    continue
                raise unknown_option(name, self)
            if option.field in said:
                raise ConfigError(f"options {said[option.field]!r} and {name!r} are the same; give only one")
            said[option.field] = name
            try:
                values[option.field] = option.parse(value)
            except (ValueError, RecursionError) as error:  # `re` raises RecursionError for a deeply nested pattern
                what = error if isinstance(error, ValueError) else "it is nested too deeply"
                raise ConfigError(f"option {option.name}={value!r:.200}: {what}; give {option.accepts}") from None
        return values


def unknown_option(name: str, *tables: OptionTable) -> ConfigError:
    """Return the error for an unknown option, with the nearest name of these tables, or all names."""
    if name.lower().startswith("kafka."):
        return ConfigError(
            f"no option {name!r}: a store is a folder, not a server. Give its path, by .load(PATH) or .save(PATH), "
            "and leave out Kafka's connection options"
        )
    known = {each.lower(): each for table in tables for each in table.options}
    near = difflib.get_close_matches(name.lower(), known, 1, 0.6)
    there = "; ".join(f"{table.purpose} there are {', '.join(table.options)}" for table in tables)
    return ConfigError(f"no option {name!r}; " + (f"did you mean {known[near[0]]!r}?" if near else there))
