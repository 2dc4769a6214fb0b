"""Tokens of SQL92 filters, errors with a position in the text, and numbers parsed like in Java (delivery#sql92).

RocketMQ's SQL92 filters parse properties by `Integer.parseInt`, `Long.parseLong` and `Double.parseDouble`, and compare
doubles by `Double.compareTo`, which puts -0.0 below 0.0 and NaN above all. All of it was checked against a JVM.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import NamedTuple

from mqstore.errors import FilterError
from mqstore.log.reading.tagfilter import JAVA_BLANKS


class Token(NamedTuple):
    """Token of an SQL92 filter.
    `kind` is an upper-case keyword, an operator, or one of name, float, integer, string, end."""

    kind: str
    text: str
    at: int


_KEYWORDS = frozenset(
    {"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH", "ENDSWITH"}
)
_BLANKS = re.compile(r"[ \t\n\r\f]*")
_LINE_COMMENT = re.compile(r"--[^\n\r]*(?:\r\n|\n|\r)")
# Floats come before integers, because the first alternative that matches wins.
_TOKEN = re.compile(
    r"""(?P<name>    [A-Za-z_$][A-Za-z0-9_$]* )
      | (?P<float>   [0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)? | \.[0-9]+(?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+ )
      | (?P<integer> 0 | [1-9][0-9]*[lL]? )
      | (?P<string>  '[^']*(?:''[^']*)*' )
      | (?P<sign>    <> | >= | <= | [=<>+\-(),] )""",
    re.VERBOSE,
)
_NO_ARITHMETIC = "arithmetic is not supported, and a property name has letters, digits, _ and $ only"
HINTS = {
    "=": "equal is written =",
    "(": "functions are not supported",
    "!": "not equal is written <>",
    '"': "strings need single quotes",
    ".": "a property name has letters, digits, _ and $ only",
    "LIKE": "LIKE is not supported; use CONTAINS, STARTSWITH or ENDSWITH",
    "&": "use AND",
    "|": "use OR",
    ";": "leave it out",
    **dict.fromkeys("+-*/%", _NO_ARITHMETIC),
}


def _columns(text: str) -> int:
    """Return the number of screen columns that `text` takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text if not unicodedata.combining(c))


def error_at(text: str, at: int, problem: str, hint: str | None = None) -> FilterError:
    """Return an error with `problem`, the line of `text` at `at`, and a caret below that position."""
    before = re.split(r"\r\n|\n|\r", text[:at])
    first, line = at - len(before[-1]), len(before)
    last = re.compile(r"[\r\n]|\Z").search(text, at).start()  # type: ignore[union-attr]  # \Z is found at least
    low, high = max(first, at - 60), min(last, at + 40)
    left, right = ("".join(c if c.isprintable() else " " for c in piece) for piece in (text[low:at], text[at:high]))
    left, right = ("..." if low > first else "") + left, right + ("..." if high < last else "")
    where = f"column {at - first + 1}" if line == 1 and last == len(text) else f"line {line}, column {at - first + 1}"
    message = f"SQL92 filter, {where}: {problem}{f' ({hint})' if hint else ''}"
    return FilterError(f"{message}\n    {left}{right}\n    {' ' * _columns(left)}^", at)


class Lexer:
    """Lexer that reads on demand: RocketMQ never reads beyond the token after a complete expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._at = 0
        # A `--` without a later line end is two minus signs, so the position of the last line end is needed.
        self._last_line_end = max(text.rfind("\n"), text.rfind("\r"))

    def _skip(self) -> None:
        text = self.text
        while True:
            at = _BLANKS.match(text, self._at).end()  # type: ignore[union-attr]  # matches nothing at least
            self._at = at
            if text.startswith("/*", at):
                end = text.find("*/", at + 2)
                if end < 0:
                    raise error_at(text, at, "this comment is not closed")
                self._at = end + 2
            elif at < self._last_line_end and (comment := _LINE_COMMENT.match(text, at)):
                self._at = comment.end()
            else:
                return

    def next(self) -> Token:
        self._skip()
        text, at = self.text, self._at
        if at == len(text):
            return Token("end", "", at)
        match = _TOKEN.match(text, at)
        if match is None:
            if text[at] == "'":
                raise error_at(text, at, "this string is not closed")
            hint = HINTS["."] if text[at].isalpha() else HINTS.get(text[at])
            raise error_at(text, at, f"unexpected character {text[at]!r}", hint)
        self._at = match.end()
        kind, word = str(match.lastgroup), match[0]
        if kind == "sign":
            kind = word
        elif kind == "name" and word.upper() in _KEYWORDS:
            kind = word.upper()
        return Token(kind, word, at)


# Integer.parseInt accepts all decimal digits of the BMP, but no space and no fraction.
_INTEGER = re.compile(r"[+-]?(?:(?![^\0-\uffff])\d)+")
# Written so that no run of digits can be split in two ways: a failure costs one pass, not one pass per digit.
_DOUBLE = re.compile(
    r"""[+-]?(?: NaN | Infinity
      | (?: [0-9]+(?:\.[0-9]*)? | \.[0-9]+ ) (?:[eE][+-]?[0-9]+)? [fFdD]?
      | (?P<hex> 0[xX] (?: [0-9a-fA-F]+\.? | [0-9a-fA-F]*\.[0-9a-fA-F]+ ) [pP][+-]?[0-9]+ ) [fFdD]? )""",
    re.VERBOSE,
)


def _parse_integer(text: str, bits: int) -> int:
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 19:  # leading zeros are allowed; int() would refuse thousands of them
            digits = "".join(str(unicodedata.decimal(c)) for c in digits).lstrip("0") or "0"
        value = int(digits[:20]) * (-1 if text[0] == "-" else 1)
        if -(1 << bits - 1) <= value < 1 << bits - 1:
            return value
    raise ValueError(f"{text[:80]!r} is not an integer of {bits} bits")


def parse_int(text: str) -> int:
    """Parse like `Integer.parseInt`. Raises ValueError."""
    if len(text) < 10 and text.isascii() and text.isdigit():
        return int(text)
    return _parse_integer(text, 32)


def parse_long(text: str) -> int:
    """Parse like `Long.parseLong`. Raises ValueError."""
    if len(text) < 19 and text.isascii() and text.isdigit():
        return int(text)
    return _parse_integer(text, 64)


def parse_double(text: str) -> float:
    """Parse like `Double.parseDouble`. Raises ValueError.
    Blanks around the number, `NaN`, `Infinity`, hex floats and a type suffix are allowed."""
    text = text.strip(JAVA_BLANKS)
    match = _DOUBLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a number")
    if match["hex"] is None:
        return float(text.rstrip("fFdD"))
    try:
        return float.fromhex(text.rstrip("fFdD"))
    except OverflowError:  # Java returns Infinity, as Python does for decimals
        return -math.inf if text[0] == "-" else math.inf


def double_order(value: float) -> tuple[float, float]:
    """Return a key in the order of `Double.compareTo`: ... < -0.0 < 0.0 < ... < Infinity < NaN = NaN."""
    return (math.inf, 2.0) if value != value else (float(value), math.copysign(1.0, value))
