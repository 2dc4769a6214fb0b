"""Nothing that a store holds steers a terminal, and what is shown can be told apart."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from mqstore_tools.render import as_json, body_text, safe, table, when
from tests.tools.support import SHOULD_NOT_REACH_A_SCREEN

ANY_TEXT = st.text(st.characters(codec=None, categories=None, exclude_categories=()))


@given(ANY_TEXT)
def test_safe_text_is_one_printable_line(text: str) -> None:
    shown = safe(text)

    assert shown.isprintable()
    assert not SHOULD_NOT_REACH_A_SCREEN.search(shown)
    if text.isprintable():
        assert shown == text


@given(st.binary())
def test_a_body_can_be_read_back_from_what_is_shown(body: bytes) -> None:
    shown = body_text(body)

    assert shown.isprintable()
    back = b""
    rest = shown
    while rest:
        if not rest.startswith("\\"):
            back += rest[0].encode()
            rest = rest[1:]
            continue
        width = {"x": 4, "u": 6, "U": 10}.get(rest[1], 2)
        escape, rest = rest[:width], rest[width:]
        if escape[1] == "x":
            code = int(escape[2:], 16)
            # Below 0x80 a character is its byte; from there on \xNN stands for a byte that is no UTF-8, or for a C1
            # control: both read back as what they were, one of the two.
            options = [bytes([code])] if code < 0x80 else [bytes([code]), chr(code).encode()]
            back += next(option for option in options if body.startswith(back + option))
        elif escape[1] in "uU":
            back += chr(int(escape[2:], 16)).encode()
        else:
            back += {"n": b"\n", "r": b"\r", "t": b"\t", "\\": b"\\"}[escape[1]]
    assert back == body


def test_a_long_body_is_cut_and_its_length_told() -> None:
    assert body_text(b"x" * 10, 4) == "xxxx... 10 bytes"
    assert body_text(b"x" * 4, 4) == "xxxx"
    assert body_text("é".encode() * 3, 3) == "é\\xc3... 6 bytes"


@example({"\x7f": "\x1b\x9b\u202e"})
@given(st.recursive(ANY_TEXT | st.integers() | st.none(), lambda inner: st.dictionaries(ANY_TEXT, inner)))
def test_json_is_printable_ascii_and_reads_back(value: object) -> None:
    text = as_json(value)

    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == value


def test_cells_of_tables_are_text_not_markup() -> None:
    [cell] = table("t", ("a",), [["[red]x[/red] :smile: \x1b[0m"]]).columns[0].cells

    assert str(cell) == "[red]x[/red] :smile: \\x1b[0m"


def test_times_beyond_the_calendar_are_numbers() -> None:
    assert when(1_700_000_000_123) == "2023-11-14 22:13:20.123Z"
    assert when(1 << 62) == f"{1 << 62} ms"
    assert when(-(1 << 63)) == f"{-(1 << 63)} ms"
    assert when(0) == when(None) == "-"
