"""`mqstore produce`: send messages from the command line, files, lines, JSON lines or CSV.

    bytes --Lines--> lines --_records--> records --Recipe--> messages --_Run--> the store
                                     |                      |
                                     +-- a bad one ---------+--> stop (exit 2), or count it (--skip-bad, exit 1)

Lines are stored before the command waits for more input, so `tail -f log | mqstore produce` keeps up. Messages are
stored in pieces, with one wait for the disk each. Messages of a piece that may go to any queue go to the same one.
"""

from __future__ import annotations

import csv
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click

from mqstore import JSON, MQStoreError, OutgoingMessage, SendReceipt, StoreConfig
from mqstore.admin import check_message, check_user_topic, look
from mqstore.errors import ConnectionLostError, FormatError, InvalidMessageError, NotAStoreError
from mqstore_tools.builder import Format, NoMessage, Recipe, Record
from mqstore_tools.multi_store import duration, pairs
from mqstore_tools.render import json_asked, note, print_json, progress, safe, show_bytes
from mqstore_tools.session import connected, dry_run_option, open_store, target_argument
from mqstore_tools.shared import INTERRUPTED, NumberRange, command, finish, on_signals

_PIECE = 1000
_PIECE_BYTES = 4 << 20
_BLOCK_BYTES = 256 << 10
_LINE_BYTES = 64 << 20
"""Limit of a line. A longer one is an error."""
_PIECES_A_SECOND = 10
"""Number of pieces with --rate."""
_BAD_SHOWN = 10


@command(
    short_help="Send messages: one body, files, lines, JSON lines or CSV.",
    examples="""
  mqstore produce var/mq orders --body 'hello' --tag created --key o-17 --property region=eu
  mqstore produce var/mq orders invoice.pdf --format file
  seq 1000 | mqstore produce 127.0.0.1:9876 numbers
  mqstore produce var/mq orders orders.jsonl --format jsonl --key @id --message-group @customer
  mqstore produce var/mq orders orders.csv --format csv --body-is-record --tag imported --dry-run
  mqstore export var/old --topic orders | mqstore produce var/mq orders --exported
  tail -f app.log | mqstore produce var/mq logs --rate 500 --flush""",
)
@target_argument
@click.argument("topic")
@click.argument(
    "files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path, dir_okay=False, allow_dash=True)
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["lines", "jsonl", "csv", "file"]),
    default="lines",
    help="lines: each line is a body. jsonl: each line is a JSON object. csv: rows below a header of names. file: "
    "each FILE is a body.",
)
@click.option("--body", metavar="TEXT", help="Send this one body instead of reading a FILE.")
@click.option("--key", "keys", metavar="VALUE", multiple=True, help="Key to find the message by; may be repeated.")
@click.option("--tag", metavar="VALUE", help="Tag, for readers that filter.")
@click.option("--message-group", metavar="VALUE", help="Messages with the same group go to one queue, in order.")
@click.option("--unique-key", metavar="VALUE", help="Id that all copies of the message share; usually @FIELD.")
@click.option("--property", "properties", metavar="NAME=VALUE", multiple=True, help="User property; may be repeated.")
@click.option("--delay", type=duration, metavar="TIME", help="Deliver after this time: seconds, or 90s, 5m, 2h, 1d.")
@click.option(
    "--body-field",
    "--body-column",
    "body_field",
    metavar="FIELD",
    default="body",
    help="Field of a JSON object or row that is the body.",
)
@click.option("--exported", is_flag=True, help="The input is the output of `mqstore export`.")
@click.option("--body-is-record", is_flag=True, help="Use the whole object or row as the body, as JSON.")
@click.option("--queue-id", type=click.IntRange(0), help="Send all messages to this queue.")
@click.option("--rate", type=NumberRange(0, min_open=True), metavar="N", help="At most N messages per second.")
@click.option("--flush", is_flag=True, help="Wait until messages are on disk before sending more.")
@click.option("--skip-bad", is_flag=True, help="Skip bad lines and exit with 1, instead of stopping at the first.")
@click.option("--create/--no-create", default=True, help="Create the store if DIR has none.")
@dry_run_option
def produce(
    target: Path,
    topic: str,
    files: tuple[Path, ...],
    format_: Format,
    body: str | None,
    keys: tuple[str, ...],
    tag: str | None,
    message_group: str | None,
    unique_key: str | None,
    properties: tuple[str, ...],
    delay: float | None,
    body_field: str,
    exported: bool,
    body_is_record: bool,
    queue_id: int | None,
    rate: float | None,
    flush: bool,
    skip_bad: bool,
    create: bool,
    dry_run: bool,
) -> None:
    """Send a message to TOPIC in the store in DIR for each line of the FILEs or stdin (-), or one --body.

    VALUE is a text, or @FIELD for the value of that field of a JSON object or row, if it is not empty. A text that
    begins with @ is written with @@. Without these options the fields key (or keys), tag, message_group, unique_key,
    delay (seconds), deliver_at, delay_level, flag and properties are used. In CSV a column property.NAME is a property.
    Other fields are ignored.

    Stores the messages before a bad line, reports the line and stops; --skip-bad continues. Holds the writer's lock
    while it runs, or sends to the server that has the store open. If the server is killed, the command reports how many
    messages are stored. Ctrl-C or SIGTERM: the messages that were read are stored, and their number is reported.
    """
    if exported and format_ in ("csv", "file"):
        raise click.UsageError("the output of `mqstore export` is JSON lines: leave out --format")
    if body is not None:
        if files or format_ != "lines" or exported:
            raise click.UsageError("--body is the only message: leave out FILE, --format and --exported")
        format_ = "file"
    recipe = Recipe(
        "jsonl" if exported else format_,
        {"tag": tag, "message_group": message_group, "unique_key": unique_key},
        keys,
        pairs("--property", properties),
        delay,
        body_field,
        exported=exported,
        body_is_record=body_is_record,
    )
    check_user_topic(topic)
    stop = _Interrupt()
    run = _Run(topic, stop, None if dry_run else rate)
    sources = _sources(files or (Path("-"),), run) if body is None else [("--body", io.BytesIO(os.fsencode(body)))]
    sending = _target(target, topic, queue_id, dry_run=dry_run, create=create, flush=flush)
    with on_signals(stop.ring), sending as (run.send, recipe.max_message_size):
        try:
            run.send_all(sources, recipe, skip_bad=skip_bad)
        except MQStoreError as error:
            run.count(error.receipts)
            if json_asked():
                run.show(dry_run=dry_run, failed=str(error))
            if not isinstance(error, _BadLineError):
                perhaps = f", and of the next {run.perhaps} perhaps some" if run.perhaps else ""
                note(f"{run.messages} messages were stored before this error{perhaps}:")
            raise
    run.show(dry_run=dry_run)
    finish(stop.asked, INTERRUPTED)
    finish(run.bad)


# -- storing -----------------------------------------------------------------------------------------------------------

_Send = Callable[[Sequence[OutgoingMessage]], Sequence[SendReceipt]]


@contextmanager
def _target(
    target: Path, topic: str, queue_id: int | None, *, dry_run: bool, create: bool, flush: bool
) -> Iterator[tuple[_Send, int | None]]:
    """Give a function that stores a piece and returns its receipts, none in a dry run, and the largest body.
    None: that of a new store."""
    if dry_run:
        yield lambda messages: (), _plan(target, topic, queue_id, create=create)
        return
    with (
        open_store(target, create=create) as store,
        store.producer("mqstore-produce", durability="flush" if flush else "append") as producer,
    ):
        limit = store.broker.limits.max_message_size
        yield lambda messages: producer.send_many(topic, messages, queue_id=queue_id), limit


def _plan(target: Path, topic: str, queue_id: int | None, *, create: bool) -> int | None:
    """Raise the errors of opening the store and of a put to the queue. Return its largest body, if it exists."""
    queues, limit = StoreConfig().default_queues, None
    try:
        if (store := connected(target)) is not None:
            with store:
                config, limit = store.broker.topics.get(topic), store.broker.limits.max_message_size
        else:
            with look(target, alone=True) as opened:
                config, limit = opened.topics.get(topic), opened.max_message_size
        queues = queues if config is None else config.write_queues
    except NotAStoreError:
        if not create or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
            raise
    if queue_id is not None and queue_id >= queues:
        raise InvalidMessageError(
            f"queue_id must be 0..{queues - 1}, got {queue_id}: {topic!r} has {queues} queues", "queue_id"
        )
    return limit


@dataclass
class _Run:
    """A run: reads, collects messages into pieces, stores them, at most `rate` per second, and counts."""

    topic: str
    stop: _Interrupt
    rate: float | None
    send: _Send = field(init=False)
    messages: int = 0
    body_bytes: int = 0
    bad: int = 0
    perhaps: int = 0
    """Messages whose answer was lost with the connection to a server."""
    read_bytes: int = 0
    total_bytes: int = 0
    begin: float = field(default_factory=time.monotonic)
    queues: dict[tuple[str, int], tuple[int, SendReceipt, SendReceipt]] = field(default_factory=dict)
    """(messages, first receipt, last receipt) by topic and queue id."""
    _piece: list[OutgoingMessage] = field(default_factory=list)
    _piece_bytes: int = 0
    _first_piece: float | None = None

    def send_all(self, sources: Iterable[tuple[str, BinaryIO]], recipe: Recipe, *, skip_bad: bool) -> None:
        """Read records, make messages and store them."""
        with progress(f"to {self.topic}", (lambda: (self.read_bytes, self.total_bytes)) if self.total_bytes else None):
            for name, stream in sources:
                for number, record in _records(recipe, Lines(stream, self)):
                    try:
                        message = recipe.message(record)
                    except NoMessage as error:
                        bad = f"{name}, line {number}: {error}"
                        if not skip_bad:
                            self.store()
                            text = f"{bad}; {self.messages} messages before it were stored"
                            raise _BadLineError(text, "body") from error
                        self._skip(bad)
                    else:
                        self._add(message)
                    if self.stop.asked:
                        break
                self.store()
                if self.stop.asked:
                    return

    def _add(self, message: OutgoingMessage) -> None:
        most = _PIECE if self.rate is None else max(1, min(_PIECE, int(self.rate / _PIECES_A_SECOND)))
        self._piece.append(message)
        self._piece_bytes += len(message.body)
        if len(self._piece) >= most or self._piece_bytes >= _PIECE_BYTES:
            self.store()

    def store(self) -> None:
        if not self._piece:
            return
        self._wait()
        piece, size = self._piece, self._piece_bytes
        self._piece, self._piece_bytes = [], 0
        try:
            receipts = self.send(piece)
        except ConnectionLostError as error:
            self.perhaps = len(piece) - len(error.receipts) if error.sent else 0
            raise
        self.messages += len(piece) - len(receipts)  # a dry run has no receipts
        self.body_bytes += size
        self.count(receipts)

    def _wait(self) -> None:
        if self.rate is None:
            return
        now = time.monotonic()
        if self._first_piece is None:
            self._first_piece = now
        pause_s = self._first_piece + self.messages / self.rate - now
        if pause_s > 0:
            with self.stop.waiting(quietly=True):
                time.sleep(pause_s)

    def count(self, receipts: Iterable[object]) -> None:
        for receipt in receipts:
            assert isinstance(receipt, SendReceipt)
            self.messages += 1
            count, first, _ = self.queues.get(receipt.queue, (0, receipt, receipt))
            self.queues[receipt.queue] = (count + 1, first, receipt)

    def _skip(self, bad: str) -> None:
        self.bad += 1
        if self.bad <= _BAD_SHOWN:
            note(f"{bad}: skipped")
        elif self.bad == _BAD_SHOWN + 1:
            note("further bad lines are only counted")

    def show(self, *, dry_run: bool, failed: str | None = None) -> None:
        """Print the counts. `failed` is the error that ended the run."""
        seconds, queues = time.monotonic() - self.begin, sorted(self.queues.items())
        interrupted = failed is None and self.stop.asked
        if json_asked():
            row: dict[str, Any] = {
                "topic": self.topic,
                "messages": self.messages,
                "body_bytes": self.body_bytes,
                "bad_lines": self.bad,
                "seconds": round(seconds, 3),
                "dry_run": dry_run,
                "interrupted": interrupted,
                "queues": [
                    {"topic": t, "queue_id": q, "messages": n, "first": _receipt(a), "last": _receipt(b)}
                    for (t, q), (n, a, b) in queues
                ],
            }
            print_json(row if failed is None else row | {"failed": failed, "perhaps_stored": self.perhaps})
            return
        verb = "would send" if dry_run else "interrupted; sent" if interrupted else "sent"
        speed = "" if dry_run or seconds <= 0 else f" in {seconds:.2f} s, {self.messages / seconds:,.0f} a second"
        print(safe(f"{verb} {self.messages} messages, {show_bytes(self.body_bytes)}, to {self.topic}{speed}"))
        for (t, q), (n, a, b) in queues:
            print(safe(f"  {t}/{q}: {n}, offsets {a.offset}..{b.offset}"))
        if self.bad:
            print(f"{self.bad} bad lines were skipped")


def _receipt(receipt: SendReceipt) -> dict[str, object]:
    names = ("physical_offset", "store_timestamp_ms", "message_id", "unique_key")
    return {"queue_offset": receipt.offset, **{name: getattr(receipt, name) for name in names}}


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


class _Interrupt:
    """Ctrl-C or SIGTERM, postponed while messages are stored. It ends a wait at once."""

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False

    def ring(self, *_: object) -> None:
        again, self.asked = self.asked, True
        if self._waiting or again:
            raise KeyboardInterrupt

    @contextmanager
    def waiting(self, *, quietly: bool = False) -> Iterator[None]:
        """Let Ctrl-C interrupt at once. With `quietly` it only ends the wait."""
        self._waiting = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            if not quietly:
                raise
        finally:
            self._waiting = False


# -- reading -----------------------------------------------------------------------------------------------------------


class Lines:
    """Lines of a stream, without their line ends. Iteration ends early when interrupted.
    Messages are stored before each read, which may have to wait for input."""

    def __init__(self, stream: BinaryIO, run: _Run) -> None:
        self._stream = stream
        self._run = run
        self.stop = run.stop
        self.number = 0
        """Number of the last line."""

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        while block := self._read():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self.number += 1
                yield line
            if len(rest) > _LINE_BYTES:
                raise InvalidMessageError(f"line {self.number + 1} is longer than {show_bytes(_LINE_BYTES)}", "body")
        if rest and not self.stop.asked:  # an interrupted read may have only the first part of the line
            self.number += 1
            yield rest

    def rest(self, max_bytes: int | None) -> Iterator[bytes]:
        """Yield the rest of the stream as one body, unless interrupted. InvalidMessageError if it is too large."""
        data = b""
        while block := self._read():
            data += block
            if len(data) > (max_bytes or 0):
                check_message(OutgoingMessage(data), max_bytes)
        if not self.stop.asked:
            self.number = 1
            yield data

    def _read(self) -> bytes:
        self._run.store()
        if self.stop.asked:
            return b""
        try:
            with self.stop.waiting():
                block = self._stream.read1(_BLOCK_BYTES)  # type: ignore[attr-defined]  # every buffered stream has it
        except KeyboardInterrupt:
            return b""
        self._run.read_bytes += len(block)
        return bytes(block)


def _sources(files: Sequence[Path], run: _Run) -> Iterator[tuple[str, BinaryIO]]:
    """Yield (name, stream) of each file, opened one after the other. All must exist at the start."""
    for file in files:
        if str(file) != "-":
            with open(file, "rb"):
                run.total_bytes += file.stat().st_size

    def opened() -> Iterator[tuple[str, BinaryIO]]:
        for file in files:
            if str(file) == "-":
                yield "stdin", sys.stdin.buffer
            else:
                with open(file, "rb") as stream:
                    yield str(file), stream

    return opened()


class _BadLineError(InvalidMessageError):
    """An invalid message, with its place in the input."""


def _records(recipe: Recipe, lines: Lines) -> Iterator[tuple[int, Record]]:
    """Yield (line number, record). Lines that the format cannot read become `NoMessage`."""
    if (format_ := recipe.format) == "csv":
        yield from _rows(lines)
        return
    for line in lines.rest(recipe.max_message_size) if format_ == "file" else lines:
        if format_ in ("lines", "file"):
            yield lines.number, line
        elif line.strip():
            yield lines.number, _object(line)


def _object(line: bytes) -> Record:
    try:
        found = JSON.decode(line)
    except FormatError as error:
        return NoMessage(str(error).removeprefix("the item is "))
    return found if isinstance(found, dict) else NoMessage("a JSON value, but not an object")


def _rows(lines: Lines) -> Iterator[tuple[int, Record]]:
    text = (line.decode("utf-8", "surrogateescape") + "\n" for line in lines)
    reader = csv.reader(text, strict=True)
    names: list[str] | None = None
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.stop.asked:  # inside a cell of several lines
                return
            yield lines.number, NoMessage(f"not CSV: {error}")
            continue
        if names is None:
            names = [name.removeprefix("\ufeff").strip() for name in row]
            if len(set(names)) != len(names):
                raise InvalidMessageError(f"line {lines.number}: the header has a field twice, {names}", "body")
        elif row and len(row) != len(names):
            yield lines.number, NoMessage(f"{len(row)} fields, but the header has {len(names)}")
        elif row:
            yield lines.number, dict(zip(names, row, strict=True))
