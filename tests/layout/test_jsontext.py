"""JSON is decoded in one place, which bounds depth and size."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore_tools
from mqstore.errors import FormatError
from mqstore.layout.jsontext import BODY, STORE, Limits, decode, decode_all

DECODERS = {"load", "loads", "JSONDecoder", "decoder", "scanner"}
SMALL = Limits(depth=3, size=50, values=20, strict=True)


def _names_of_decoders(source: str) -> list[str]:
    """Return the names by which a module reaches a decoder of `json`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("json", "orjson"):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("json", "orjson"):
            found += [(node.module or "").rpartition(".")[2], *(each.name for each in node.names)]
    return [name for name in found if name in DECODERS]


def test_no_other_module_decodes_json() -> None:
    roots = [Path(package.__path__[0]) for package in (mqstore, mqstore_tools)]
    files = [file for root in roots for file in root.rglob("*.py")]
    found = {file.name: names for file in files if (names := _names_of_decoders(file.read_text(encoding="utf-8")))}

    assert found == {"jsontext.py": ["JSONDecoder"] * 3}, "use mqstore.layout.jsontext.decode"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a":[{"b":1}]}', {"a": [{"b": 1}]}),
        ('["[[[[", "{{{{", "\\"[[[["]', ["[[[[", "{{{{", '"[[[[']),
        ("[[],[],[]]", [[], [], []]),
        (b"\xef\xbb\xbf[1]", [1]),
        (b'"\xed\xa0\x80"', "\ud800"),
    ],
)
def test_text_within_the_limits_is_decoded(text: str | bytes, value: Any) -> None:
    assert decode(text, SMALL) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not JSON"),
        (b"[", "not JSON"),
        ("[[[[1]]]]", "nested too deeply"),
        ('{"]]]":{"]]]":{"]]]":{"]]]":1}}}}', "nested too deeply"),
        ('["\\"]]]",[[["]', "nested too deeply"),
        ("[" * 5, "nested too deeply"),
        ("[" + "1," * 20 + "1]", "more than 20 values"),
        (" " * 51, "51 characters"),
        ("NaN", "NaN is not a JSON number"),
        ("1e999", "a number is too large"),
        (b'"\xff"', "utf-8"),
        ("1" * 49 + "x", "not JSON"),
    ],
)
def test_text_beyond_the_limits_is_a_format_error(text: str | bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        decode(text, SMALL)


DEEP, MANY = b"[" * 65 + b"]" * 65, b"[" + b"1," * 1_000_000 + b"1]"


@pytest.mark.parametrize(
    "texts",
    [
        [],
        [b'{"k":1,"o":[1,2]}', b" 2 ", b'"\xc3\xa4"', b"[]"],
        [b'{"k":1}', b"", b"3"],
        [b"1],[2", b"3"],
        [b'{"a":[1', b"2]}"],
        [b'{"k":1', b'"c":2}', b'{"a":1},{"b":2}'],
        [b"1", b"2,3"],
        [b"1", b"NaN", b"2"],
        [b"1", b'"\xff"'],
        [b"\xef\xbb\xbf[1]", "[2]".encode("utf-16")],
        [b"1", DEEP, b"2"],
        [b"1", b"[" * 100_000],
        [b"1", MANY],
    ],
)
def test_many_texts_are_decoded_as_each_alone(texts: list[bytes]) -> None:
    def alone(text: bytes) -> Any:
        try:
            return decode(text)
        except FormatError as error:
            return error

    assert list(map(repr, decode_all(texts))) == list(map(repr, map(alone, texts)))


@pytest.mark.parametrize("limits", [STORE, BODY])
@pytest.mark.parametrize(("opening", "inner", "closing"), [("[", "1", "]"), ('{"a":', "1", "}")])
def test_depth_is_bounded_exactly(limits: Limits, opening: str, inner: str, closing: str) -> None:
    def nested(depth: int) -> str:
        return opening * depth + inner + closing * depth

    assert json.dumps(decode(nested(limits.depth), limits)).count(opening[0]) == limits.depth
    for depth in (limits.depth + 1, 2000, 100_000):
        with pytest.raises(FormatError, match="nested too deeply"):
            decode(nested(depth), limits)


def test_numbers_of_application_data_are_not_restricted() -> None:
    assert str(decode("[NaN, 1e999]", BODY)) == "[nan, inf]"


def test_item_that_could_not_be_read_again_is_refused() -> None:
    item: Any = 1
    for _ in range(BODY.depth + 1):
        item = [item]

    assert mqstore.JSON.decode(mqstore.JSON.encode(item[0])) == item[0]
    with pytest.raises(mqstore.MQStoreError, match="nested too deeply"):
        mqstore.JSON.encode(item)
