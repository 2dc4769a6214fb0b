"""Numbers as Java reads them from text, and the order of its doubles (delivery#sql92).

RocketMQ's SQL92 filters parse properties by `Integer.parseInt`, `Long.parseLong` and `Double.parseDouble`, and compare
doubles by `Double.compareTo`, which puts -0.0 below 0.0 and NaN above all. All of it was checked against a JVM.
"""

from __future__ import annotations

import math
import re
import unicodedata

__all__ = ["JAVA_BLANKS", "double_order", "parse_double", "parse_int", "parse_long"]

# Integer.parseInt accepts what Character.digit knows: decimal digits of the BMP, no space, no fraction.
_INTEGER = re.compile(r"[+-]?(?:(?![^\0-\uffff])\d)+")
# Written so that no run of digits can be split in two ways: a failure costs one pass, not one pass per digit.
_DOUBLE = re.compile(
    r"""[+-]?(?: NaN | Infinity
      | (?: [0-9]+(?:\.[0-9]*)? | \.[0-9]+ ) (?:[eE][+-]?[0-9]+)? [fFdD]?
      | (?P<hex> 0[xX] (?: [0-9a-fA-F]+\.? | [0-9a-fA-F]*\.[0-9a-fA-F]+ ) [pP][+-]?[0-9]+ ) [fFdD]? )""",
    re.VERBOSE,
)
JAVA_BLANKS = "".join(map(chr, range(0x21)))
"""Characters that `String.trim` removes. A no-break space is not one of them."""


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
    """Return what `Integer.parseInt` returns. Raises ValueError where it fails."""
    if len(text) < 10 and text.isascii() and text.isdigit():
        return int(text)
    return _parse_integer(text, 32)


def parse_long(text: str) -> int:
    """Return what `Long.parseLong` returns. Raises ValueError where it fails."""
    if len(text) < 19 and text.isascii() and text.isdigit():
        return int(text)
    return _parse_integer(text, 64)


def parse_double(text: str) -> float:
    """Return what `Double.parseDouble` returns. Raises ValueError where it fails.
    Blanks around the number, `NaN`, `Infinity`, hex floats and a type suffix are allowed."""
    text = text.strip(JAVA_BLANKS)
    match = _DOUBLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a number")
    if match["hex"] is None:
        return float(text.rstrip("fFdD"))
    try:
        return float.fromhex(text.rstrip("fFdD"))
    except OverflowError:  # for which Java, and Python for decimals, return Infinity
        return -math.inf if text[0] == "-" else math.inf


def double_order(value: float) -> tuple[float, float]:
    """Return a key in the order of `Double.compareTo`: ... < -0.0 < 0.0 < ... < Infinity < NaN = NaN."""
    return (math.inf, 2.0) if value != value else (float(value), math.copysign(1.0, value))
