"""Output to the screen: tables, progress bars, JSON, without bytes that could control a terminal.

Names, keys, bodies, hosts and error texts may come from an untrusted directory. All of them pass `safe` (text) or
`body_text` (bytes), which show unprintable characters as `\\x1b`, `\\u202e` and the like. JSON is ASCII, so its own
escapes do the same.
"""

from __future__ import annotations

import base64
import json
import logging
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mqstore import Message
from mqstore.engine import Finding, row_of
from mqstore.errors import FormatError
from mqstore_tools import JSON_ASKED

if TYPE_CHECKING:
    from mqstore.admin import Search

_WIDE = 1 << 20
"""Width of output to a pipe or file, so that each row of a table is one line."""
_SEVERE = frozenset({"bad_record", "lost_tail", "missing_segment", "segment_size", "bad_json"})
"""Kinds of findings that may cost messages or settings. All others can be repaired from the log."""
LINE_S = 10.0
"""Seconds between lines of progress without a terminal."""
_ROW = 8
"""Number of bytes in a row of a field."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# -- text --------------------------------------------------------------------------------------------------------------


def _escape(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, decoded by "surrogateescape"
        code -= 0xDC00
    if code < 0x100:
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe(text: object) -> str:
    """Return `text` as one line with unprintable characters escaped.

    Escaped are control characters, line ends, bidirectional overrides and lone surrogates.

    >>> print(safe("red\\x1b[31m \\u202eabc"))
    red\\x1b[31m \\u202eabc
    """
    string = str(text)
    return string if string.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in string)


def body_text(body: bytes | memoryview, limit: int | None = None) -> str:
    """Return at most `limit` bytes of a body as one line of printable text. Backslashes are doubled.

    >>> print(body_text(b"caf\\xc3\\xa9 \\xff\\x1b[2J C:\\\\"))
    café \\xff\\x1b[2J C:\\\\
    """
    shown = bytes(body if limit is None else body[:limit])
    text = safe(shown.decode("utf-8", "surrogateescape").replace("\\", "\\\\"))
    return text if len(shown) == len(body) else f"{text}... {len(body)} bytes"


def when(timestamp_ms: int | None) -> str:
    """Return a time in ms since the epoch as text, in UTC, or a dash for None or 0."""
    if not timestamp_ms:
        return "-"
    try:
        return (_EPOCH + timedelta(milliseconds=timestamp_ms)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    except OverflowError:
        return f"{timestamp_ms} ms"


def show_bytes(count: int) -> str:
    """Return a number of bytes as text with a unit.

    >>> show_bytes(67108864), show_bytes(1000)
    ('64.0 MiB', '1000 B')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


# -- the screen --------------------------------------------------------------------------------------------------------


def console(*, stderr: bool = False) -> Console:
    """Return a rich console for the current stdout or stderr, without markup or emoji.
    Only a terminal gets colours, and not if NO_COLOR is set."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if _is_terminal(stream) else _WIDE
    return _Screen(file=stream, width=width, highlight=False, markup=False, emoji=False)


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        raise  # for StoreCommand; rich would exit with 1, which means "findings"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def note(text: object) -> None:
    """Print a line on stderr, for people."""
    print_line(safe(text), stderr=True)


def print_line(line: str, *, stderr: bool = False) -> None:
    """Print a line, on a terminal as several that fit its width."""
    stream = sys.stderr if stderr else sys.stdout
    if _is_terminal(stream):
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False) if width > 8 else line
    print(line, file=stream)


class _Titled(Table):
    """Table with a heading on one line. Rich wraps its own titles at the width of the table."""

    heading = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.heading:
            yield Text(self.heading, "table.title")
        yield from super().__rich_console__(console, options)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Iterable[object]], *, name_width: int | None = None
) -> Table:
    """Return a table. Columns whose name ends in `>` are aligned to the right.
    If all names are empty, the table has no header. Every cell passes `safe`; None is a dash. A terminal limits the
    width. In a pipe each row is one line, aligned by spaces. With `name_width` each row is one line on a terminal, too:
    cells on the left are cut to this width."""
    found = _Titled(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    found.heading = safe(title)
    cut: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"} if name_width else {"overflow": "fold"}
    for name in columns:
        right = name.endswith(">")
        found.add_column(
            name.rstrip(">"), justify="right" if right else "left", max_width=None if right else name_width, **cut
        )
    for row in rows:
        found.add_row(*(Text("-" if cell is None else safe(cell)) for cell in row))
    return found


def pick(row: Mapping[str, Any], names: str) -> list[Any]:
    """Return the members of a row whose names are given, separated by blanks."""
    return [row[name] for name in names.split()]


def print_finding(finding: Finding, *, prefix: str = "", stderr: bool = False) -> None:
    """Print a finding in one line. On a terminal its kind is red or yellow."""
    where = f"{finding.file} at {finding.position}"
    length = f", {finding.length} bytes" if finding.length else ""
    prefix = safe(prefix)
    line = Text(safe(f"{prefix}{finding.kind}: {where}{length}: {finding.detail}"))
    line.stylize("red" if finding.kind in _SEVERE else "yellow", len(prefix), len(prefix) + len(finding.kind))
    console(stderr=stderr).print(line)


def print_findings(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the findings of a report's JSON."""
    for row in rows:
        print_finding(finding_of(row))


def finding_of(row: Mapping[str, Any]) -> Finding:
    return Finding(*pick(row, "kind file position length detail"))


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON in printable ASCII. All other characters, DEL included, are escaped."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, indent=indent)


def json_asked() -> bool:
    """Return True if the command was called with --json. For the thread of the command."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(JSON_ASKED))


VERSION = {"version": 1}
"""First member of each JSON object: the version of the output format."""


def print_json(value: Any) -> None:
    """Print one JSON value, indented. An object begins with its version."""
    print(as_json(VERSION | value if isinstance(value, dict) else value, indent=2))


def print_if_json(value: Any) -> bool:
    """Print one JSON value if the command was called with --json. Return True if it was."""
    if asked := json_asked():
        print_json(value)
    return asked


class FindingPrinter:
    """Findings of a command, printed on stderr as text or JSON."""

    findings = 0

    def print(self, finding: Finding, *, counts: bool = True) -> None:
        """Print a finding, and count it if it `counts`."""
        self.findings += counts
        if json_asked():
            print(as_json(finding.as_dict()), file=sys.stderr)
        else:
            print_finding(finding, stderr=True)

    def sum_up(self, summary: dict[str, Any], text: str, output: Path | None) -> None:
        """Print the summary. JSON goes to stdout if the messages went to the file `output`, or else to stderr."""
        summary = {**summary, "findings": self.findings}
        sys.stdout.flush()  # first: if the reader has closed the pipe, no summary is printed
        if not json_asked():
            note(text + (f", {self.findings} findings" if self.findings else ""))
        elif output is None:
            print(as_json(summary), file=sys.stderr)
        else:
            print_json(summary)


Cells = tuple[str, Sequence[str], Sequence[Iterable[object]]]
"""Title, columns and rows of a table: the arguments of `table`."""


def show_tables(value: Any, *tables: Cells, empty: str = "", notes: Iterable[str] = (), stderr: bool = False) -> None:
    """Print `value` as JSON, or else the tables and `notes`. If no table has rows, `empty` is printed, if given.
    On stderr there are only tables, for people."""
    if not stderr and print_if_json(value):
        return
    if empty and not any(rows for _, _, rows in tables):
        notes, tables = [empty, *notes], ()
    for each in tables:
        console(stderr=stderr).print(table(*each))
    for line in notes:
        note(line)


# -- progress ----------------------------------------------------------------------------------------------------------


class _Polled(Progress):
    """Progress bar that calls `poll` whenever it is drawn, so that the work need not report."""

    poll: Callable[[], tuple[int, int]] | None = None

    def get_renderables(self) -> Iterator[Any]:
        if self.poll is not None:
            for task in self.tasks:
                done, total = self.poll()
                task.completed, task.total = done, max(total, 1)
        yield from super().get_renderables()


def _line_printer(title: str, of_bytes: bool) -> Callable[[int, int], None]:
    due = time.monotonic() + LINE_S
    asked = json_asked()  # here, since threads of the library may report
    show = show_bytes if of_bytes else str

    def report(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        due = time.monotonic() + LINE_S
        if asked:
            row = {**VERSION, "progress": {"title": title, "done": done, "total": total}}
            print(as_json(row), file=sys.stderr, flush=True)
        else:
            note(f"{title}: {show(done)} of {show(total)}")

    return report


@contextmanager
def progress(
    title: str, poll: Callable[[], tuple[int, int]] | None = None, *, of_bytes: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Show progress, in bytes or as a count, on stderr. Yields `report(done, total)`. Without a terminal it prints
    a line now and then. With `poll`, which returns (done, total), nothing needs to be reported."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _line_printer(title, of_bytes)
        return
    bar = _Polled(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        redirect_stdout=False,  # it may be a pipe
    )
    bar.poll = poll
    with bar:
        task = bar.add_task(safe(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


class EscapingHandler(logging.Handler):
    """Handler that prints the library's log on stderr, escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(f"{record.levelname.lower()}: {record.getMessage()}")
        except Exception:
            self.handleError(record)


body_bytes_option = click.option(
    "--body-bytes",
    type=click.IntRange(0),
    default=1024,
    help="Print at most this much of each body. JSON has whole bodies.",
)
raw_bodies_option = click.option(
    "--raw-bodies", is_flag=True, help="Do not decompress bodies; sys_flag has the compression."
)


def note_searched(search: Search, *, limited: bool = False) -> None:
    """Print on stderr the figures of a search, why it may lack messages, and that it was limited."""
    figures = search.as_dict()
    if json_asked():
        print(as_json({**VERSION, "searched": {**figures, "limited": limited}}), file=sys.stderr)
        return
    read = f"{search.messages} messages of {show_bytes(search.bytes)}, segments: {figures['segments']}"
    note(f"searched by {search.by or 'queue'}: {read}" + ("; there may be more (--limit)" if limited else ""))
    for why in search.missed:
        note(f"not searched: {why}")


def print_items(found: Mapping[str, Any]) -> bool:
    """Print what `mqstore.admin.inspect_file` found: fields with their bytes. Return False if an item has a problem."""
    in_json = print_if_json(found)
    if not in_json and not found["items"]:
        note(f"{found['path']}: no more than zeros in its {found['bytes']} bytes")
    for item in () if in_json else found["items"]:
        rows: list[tuple[object, ...]] = []
        for each in item["fields"]:
            raw, value = bytes.fromhex(each["bytes"]), each["value"]
            if each["name"].endswith("_ms") and isinstance(value, int) and value > 1 << 32:
                value = f"{value} {when(value)}"
            if len(raw) > _ROW:
                value = f"{each['size']} bytes" if isinstance(value, str) and len(value) > _ROW else value
            rows.append((each["position"], raw[:_ROW].hex(" "), each["name"], f"{value}{' !' * bool(each['problem'])}"))
            rows += [
                (each["position"] + at, raw[at : at + _ROW].hex(" "), "", body_text(raw[at : at + _ROW]))
                for at in range(_ROW, len(raw), _ROW)
            ]
            if len(raw) < each["size"]:
                rows.append(("", f"... {each['size'] - len(raw)} bytes more", "", ""))
        title = f"{item['title']}, {item['size']} bytes at byte {item['position']} of {item['kind']}"
        console().print(table(title, ("byte>", "bytes", "field", "value"), rows))
        if item["problem"]:
            note(f"problem: {item['problem']}")
    return not any(item["problem"] for item in found["items"])


def export_row(message: Message, *, raw_body: bool = False) -> dict[str, Any]:
    """Return the message as `export` writes it: stored names and units, `body` in base64.

    Raises FormatError if a compressed body cannot be inflated, and ImportError if that needs a package that is missing.
    With `raw_body` the body stays as it is stored.
    """
    row = row_of(message, stored=raw_body)
    row["body"] = base64.b64encode(row["body"]).decode("ascii")
    return row


def print_message(message: Message, *, json_output: bool, body_bytes: int, raw_body: bool = False) -> bool:
    """Print a message. If its body cannot be inflated, report that on stderr and return False."""
    try:
        if json_output:
            print(as_json(export_row(message, raw_body=raw_body)))
            return True
        body = body_text(message.body_view if raw_body else message.body, body_bytes)
        fine = True
    except (FormatError, ImportError) as error:
        note(f"{message.topic}, queue {message.queue_id}, offset {message.offset}: {error}")
        if json_output:
            return False
        body, fine = body_text(message.body_view, body_bytes), False
    facts = [f"{message.topic}/{message.queue_id}@{message.offset}", when(message.store_timestamp_ms)]
    if message.tag is not None:
        facts.append(f"tag={message.tag}")
    if message.keys:
        facts.append(f"keys={' '.join(message.keys)}")
    facts += [f"{name}={value}" for name, value in message.properties.items()]
    facts.append(f"id={message.message_id}")
    print_line(safe("  ".join(facts)))
    print_line(f"    {body}")
    return fine
