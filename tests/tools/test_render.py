"""Nothing that a store holds steers a terminal, and what is shown can be told apart."""

from __future__ import annotations

import io
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqstore.engine import Finding
from mqstore.log.recovery.report import Kind
from mqstore_tools.render import as_json, body_text, console, print_finding, print_json, safe, table, when
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


def test_long_body_is_shortened_with_its_length() -> None:
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


def test_each_json_document_that_is_an_object_has_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    for value, printed in (({"a": 1}, {"version": 1, "a": 1}), ([1], [1])):
        print_json(value)

        assert json.loads(capsys.readouterr().out) == printed


ROWS = [["orders-" + "x" * 300, 1], ["b", 20]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, columns: int = 60) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", stream)
    console().print(table("a title that is longer than a narrow table is wide", ("name", "n>"), ROWS))
    return stream.getvalue()


def test_a_table_in_a_pipe_has_a_line_a_row_and_is_cut_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    title, header, *rows = printed(io.StringIO(), monkeypatch).splitlines()

    assert title.rstrip() == "a title that is longer than a narrow table is wide"
    assert header.split() == ["name", "n"]
    assert [row.split() for row in rows] == [[str(cell) for cell in row] for row in ROWS]
    assert all(line == line.rstrip() for line in (title, header, *rows))


def test_a_title_may_be_wider_than_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", stream := io.StringIO())
    console().print(table("a title of many words", ("n>",), [[1]]))

    assert stream.getvalue().splitlines()[0].rstrip() == "a title of many words"


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(Terminal(), monkeypatch, columns=columns))

    assert max(map(len, text.splitlines())) <= columns
    assert text.count("x") >= 300


@pytest.mark.parametrize(
    ("kind", "colour"), [("bad_record", "31"), ("lost_tail", "31"), ("torn_tail", "33"), ("bad_index", "33")]
)
def test_findings_have_a_colour_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, kind: Kind, colour: str) -> None:
    finding = Finding(kind, "commitlog/" + "0" * 20, 4096, 10, "what is wrong here takes more than a line of sixty")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def shown(stream: io.StringIO) -> str:
        monkeypatch.setattr("sys.stdout", stream)
        print_finding(finding)
        return stream.getvalue()

    plain = shown(io.StringIO())
    assert plain == f"{kind}: commitlog/{'0' * 20} at 4096, 10 bytes: {finding.detail}\n"
    assert shown(Terminal()).split() == plain.replace(kind, f"\x1b[{colour}m{kind}\x1b[0m", 1).split()
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()).split() == plain.split()
    assert max(map(len, shown(Terminal()).splitlines())) <= 60
