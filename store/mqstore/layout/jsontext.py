"""Decoding of JSON. No other module decodes it, since the text may come from a store written by anyone.

Python's decoder calls itself for each level of nesting, and a value takes up to 600 times its bytes in memory. So depth
and size are checked before anything is decoded (`Limits`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from mqstore.errors import FormatError


class Limits(NamedTuple):
    """Bounds of a JSON text. A text within `depth` never exhausts the stack of its reader."""

    depth: int
    """Maximum number of arrays and objects around a value."""
    size: int
    """Maximum number of characters or bytes."""
    values: int
    """Maximum number of commas and opening brackets, wherever they are."""
    strict: bool
    """True to refuse NaN and infinite numbers, which cannot be written again."""


STORE = Limits(depth=64, size=32 << 20, values=1_000_000, strict=True)
"""Bounds for text written by the engine or a Java broker: files, records and notes."""
BODY = Limits(depth=500, size=1 << 31, values=1 << 31, strict=False)
"""Bounds for text written by applications: bodies of messages, and lines to import."""

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def decode(text: str | bytes, limits: Limits = STORE, *, pairs: Callable[[list[Any]], Any] | None = None) -> Any:
    """Return the value of a JSON text. Bytes are UTF-8, or the encoding shown by their first four.

    `pairs` builds a value from an object's members, and may raise ValueError. Raises FormatError for text that is not
    JSON, or is beyond `limits`. Its `position` counts characters.

    >>> decode(b'{"so":7,"d":[0,1]}')
    {'so': 7, 'd': [0, 1]}
    >>> decode('{"a":' * 2000)
    Traceback (most recent call last):
    mqstore.errors.FormatError: not usable JSON: nested too deeply, beyond 64 levels (field json at byte 0)
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8" if text[:2] == b'{"' else json.detect_encoding(text), "surrogatepass")
        check(text, limits)
        decoder = _STRICT if limits.strict else _LENIENT
        if pairs is not None:
            decoder = json.JSONDecoder(object_pairs_hook=pairs)
        try:  # `decode` looks for blanks on both sides, which takes half as long again as a record of the pop log
            value, end = decoder.scan_once(text, 0)  # type: ignore[attr-defined]
            if not text[end:].strip(" \t\n\r"):
                return value
        except StopIteration:
            pass
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        raise FormatError(f"not JSON: {error.msg} in line {error.lineno}", "json", error.pos) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of 5000 digits, a stack that is nearly full
        raise FormatError(f"not usable JSON: {error}", "json", 0) from error


def decode_all(texts: Sequence[bytes]) -> list[Any]:
    """Return the values of many JSON texts, with a FormatError in place of each that `decode` refuses.
    Limits are checked for all together, in half the time, unless one is bad, or they are large or deep."""
    brackets = [text.count(b"[") + text.count(b"{") for text in texts]
    if max(brackets, default=0) <= STORE.depth and sum(map(len, texts)) <= STORE.size:
        with suppress(ValueError, StopIteration, RecursionError):
            if sum(brackets) + sum(text.count(b",") for text in texts) <= STORE.values:
                decoded = [text.decode("utf-8", "surrogatepass") for text in texts]
                scanned = [_STRICT.scan_once(text, 0) for text in decoded]  # type: ignore[attr-defined]
                if all(end == len(text) for (_, end), text in zip(scanned, decoded, strict=True)):
                    return [value for value, _ in scanned]
    return [_value_or_error(text) for text in texts]


def _value_or_error(text: bytes) -> Any:
    try:
        return decode(text)
    except FormatError as error:
        return error


def check(text: str, limits: Limits) -> None:
    """Raise ValueError if a JSON text is beyond `limits`."""
    brackets = text.count("{") + text.count("[")
    if len(text) > limits.size:
        raise ValueError(f"{len(text)} characters, more than {limits.size}")
    if brackets + text.count(",") > limits.values:
        raise ValueError(f"more than {limits.values} values")
    if brackets <= limits.depth:
        return
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > limits.depth:
            raise ValueError(f"nested too deeply, beyond {limits.depth} levels")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):  # 1e999
        raise ValueError(f"a number is too large ({len(digits)} characters)")
    return number


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_LENIENT = json.JSONDecoder()
