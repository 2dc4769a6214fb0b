"""`mqstore export`: write every whole message of the log as JSON lines or Parquet.

Missing messages are reported on stderr, counted, and make the exit code 1. With --to, `mqstore.jobs.export_parquet`
writes a folder of Parquet files.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

import click

from mqstore import Message, MQStoreError, QueueRef
from mqstore.admin import Search
from mqstore.engine import Finding, StoreFiles
from mqstore_tools.multi_store import (
    FILTERS,
    Messages,
    message_options,
    names,
    on_spark,
    search_of,
    spark_option,
    usable,
    with_options,
)
from mqstore_tools.render import (
    FindingPrinter,
    as_json,
    json_asked,
    note,
    note_searched,
    progress,
    raw_bodies_option,
    show_bytes,
    show_tables,
)
from mqstore_tools.shared import command, findings_on_stderr, finish, note_front, output_option, refuse_given, within

_OF_A_FOLDER = ("columns", "partition_by", "options", "master")
_OF_A_FILE = ("queue_id", "from_offset", "max_messages", "output", "raw_bodies", "unique_key", "grep")
"""Options that need --to, and options that cannot be used with it."""


@command(
    short_help="Write messages as JSON lines or Parquet. Changes nothing.",
    examples="""
  mqstore export var/mq --output all.jsonl
  mqstore export var/mq --topic orders --queue-id 0 --from-offset 100 --max-messages 10
  mqstore export var/mq | jq -r '.body | @base64d'
  mqstore export var/mq --from 1h --grep 'refused'
  mqstore export fleet/* --to lake/mq --spark local[4]
  mqstore export var/mq --to lake/errors --where "level = 'ERROR'" --from 7d""",
    json_help="Print findings and the summary as JSON, too.",
)
@message_options
@click.option("--queue-id", type=click.IntRange(0), help="Only this queue.")
@click.option("--from-offset", type=click.IntRange(0), help="Start of each queue, a queue offset.")
@click.option(
    "--limit", "--max-messages", "max_messages", type=click.IntRange(0), metavar="N", help="Stop after N messages."
)
@with_options(*FILTERS)
@output_option
@raw_bodies_option
@click.option("--to", metavar="FOLDER", type=click.Path(file_okay=False), help="Write Parquet files to this folder.")
@click.option("--columns", metavar="NAMES", help="With --to: only these columns, separated by commas.")
@click.option(
    "--partition-by",
    metavar="NAMES",
    default="topic,date",
    help="With --to: columns that become folders, of store, topic, queue_id and date (UTC day of storing).",
)
@spark_option
def export(
    messages: Messages,
    queue_id: int | None,
    from_offset: int | None,
    max_messages: int | None,
    output: Path | None,
    raw_bodies: bool,
    to: str | None,
    columns: str | None,
    partition_by: str,
    master: str | None,
    **filters: Any,
) -> None:
    """Write the messages of the store in DIR, one JSON object per line, in the order of the log.

    `body` is base64, decompressed if it was stored compressed; names and units are the stored ones. Every whole message
    that `mqstore recover` would keep is written, even after damage or if no queue lists it. Damage and missing offsets
    are reported on stderr and counted, and the exit code is then 1. With --topic all damage counts, because the topics
    of damaged messages are unknown. Only reads, and works while a writer has the store open.

    Filters such as --key, --from or --grep must all match, and choose like those of `mqstore get`: a line on stderr
    counts the messages that were read. Missing offsets are then not counted.

    With --to, write the messages of one store or many, by their queues, to Parquet files in FOLDER, with the columns of
    the Spark source (needs pyarrow). FOLDER must be new or empty, and appears when it is complete. Without --topic all
    users' topics are written, and --key also finds unique keys. --option and --spark need --to.
    """
    refuse_given(
        _OF_A_FOLDER if to is None else _OF_A_FILE, "goes with --to" if to is None else "does not go with --to"
    )
    if to is not None:
        given = {"columns": names(columns), "partition_by": names(partition_by) or ()}
        key, tags = filters["key"], filters["tags"]
        if key is not None and "," in key:
            raise click.UsageError("--key with a comma does not go with --to")
        chosen = [*messages.options, *([f"keys={key}"] if key else []), *([f"tags={tags}"] if tags != "*" else [])]
        _to_folder(replace(messages, options=tuple(chosen)), to, given, master)
        return
    if len(messages.stores) > 1:
        raise click.UsageError("several stores need --to")
    directory = Path(messages.stores[0])
    if queue_id is not None and len(messages.topics) != 1:
        raise click.UsageError("--queue-id needs one --topic")
    filters |= {name: getattr(messages, name) for name in ("start", "stop", "where")}
    search = search_of(messages.topics, queue_id, {**filters, "from_offset": from_offset or 0, "limit": max_messages})
    with findings_on_stderr():  # the warning that queues are lost: here they are not needed
        files = StoreFiles(directory)
    printer = FindingPrinter()
    with files:
        found = _Found(files, printer, search, raw_bodies)
        count = 0
        with progress("exporting") as report, lines(output, directory) as file:
            for text, number in found.lines(report, max_messages) if max_messages != 0 else ():
                file.write(text)
                count += number
                if count == max_messages:
                    break
        found.print_not_inflated()
    note_front(*files.front)
    if search:
        note_searched(search)
    ok = not (printer.findings or found.missing or search.missed)
    summary = {"ok": ok, "messages": count, "queues": len(found.queues), "missing": found.missing}
    missing = f", {found.missing} messages are missing" if found.missing else ""
    printer.sum_up(summary, f"exported {count} messages of {len(found.queues)} queues{missing}", output)
    finish(not ok)


def _to_folder(messages: Messages, to: str, given: dict[str, Any], master: str | None) -> None:
    with usable():
        from mqstore.jobs import export_parquet
    with on_spark(master) as spark, progress("exporting", of_bytes=False) as report:
        done = export_parquet(messages.select(), to, **given, spark=spark, progress=report)
    rate = done.record_bytes / max(done.seconds, 1e-9)
    facts: list[tuple[str, object]] = [
        ("folder", done.path),
        ("messages", done.messages),
        ("of records", show_bytes(done.record_bytes)),
        ("files", f"{done.files}, {show_bytes(done.file_bytes)}"),
        ("took", f"{done.seconds:.1f} s, {show_bytes(round(rate))}/s"),
    ]
    if done.damaged:
        facts.append(("damaged, skipped", done.damaged))
    cells = ("", ("", ""), facts if done.files else [])
    show_tables(done.to_dict(), cells, empty=f"no messages; {to} was not written")


@dataclass
class _Found:
    """Messages of the chosen queues in the order of the log. Missing ones are reported and counted."""

    files: StoreFiles
    printer: FindingPrinter
    search: Search
    raw_bodies: bool
    missing: int = 0
    """Number of queue offsets without a record."""
    queues: set[QueueRef] = field(default_factory=set)
    """Queues that had messages."""
    not_inflated: Counter[str] = field(default_factory=Counter)
    """Number of messages skipped for lack of a package, by error text."""

    def lines(self, progress: Callable[[int, int], None], limit: int | None) -> Iterator[tuple[str, int]]:
        """Yield (lines of JSON, how many) in the order of the log: with a `limit` one at a time.
        Raises TopicNotFoundError."""
        for messages in self.messages(progress):
            for part in [messages] if limit is None else ([message] for message in messages):
                for found in self.files.lines(part, stored=self.raw_bodies):
                    if isinstance(found, tuple):
                        yield found
                    elif isinstance(found, Finding):
                        self.printer.print(found)
                    else:
                        self.not_inflated[str(found)] += 1

    def messages(self, progress: Callable[[int, int], None]) -> Iterator[list[Message]]:
        """Yield all chosen messages, some consecutive ones of the log at a time."""
        chosen, skips = self.search, self.search.from_offset > 0
        found = chosen.run(self.files) if chosen else self.files.log(chosen.topics, chosen.queue_id, progress)
        for each in found:
            if isinstance(each, Message):
                self.queues.add(each.queue)
                yield [each]
            elif isinstance(each, Finding):
                # After the end of a store that was closed there was no message.
                self.printer.print(each, counts=not (each.kind == "torn_tail" and self.files.clean_shutdown))
            elif isinstance(each, list):
                messages = [message for message in each if message.offset >= chosen.from_offset] if skips else each
                self.queues.update(map(attrgetter("queue"), messages))
                yield messages
            else:
                self._print_gap(*each)

    def print_not_inflated(self) -> None:
        """Report each missing package."""
        for why, number in self.not_inflated.items():
            detail = f"{number} messages are skipped: {why}, or use --raw-bodies"
            self.printer.print(Finding("not_inflated", "commitlog", 0, 0, detail))

    def _print_gap(self, topic: str, queue_id: int, first: int, stop: int) -> None:
        first = max(first, self.search.from_offset)
        if first >= stop:
            return
        self.missing += stop - first
        if json_asked():
            gap = {"topic": topic, "queue_id": queue_id, "from_offset": first, "messages": stop - first}
            print(as_json({"missing": gap}), file=sys.stderr)
        else:
            offsets = f"offset {first}" if stop == first + 1 else f"offsets {first} to {stop - 1}"
            note(f"missing: {topic}, queue {queue_id}, {offsets}: no record")


@contextmanager
def lines(output: Path | None, directory: Path) -> Iterator[TextIO]:
    """Yield a text file to write: stdout, or a temporary file that becomes `output` at the end."""
    if output is None:
        yield sys.stdout
        return
    with _named(output), _target(output, directory) as path, open(path, "w", encoding="ascii", newline="\n") as file:
        yield file


@contextmanager
def _named(output: Path) -> Iterator[None]:
    """Add the file name to errors of writing. Without it, the user would think that the store's disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or isinstance(error, (MQStoreError, BrokenPipeError)):
            raise
        raise OSError(error.errno, error.strerror, str(output)) from error


@contextmanager
def _target(output: Path, directory: Path) -> Iterator[str]:
    """Yield the path of a temporary file, which is renamed to `output` when it is complete."""
    if output.exists() and not output.is_file():
        yield str(output)  # a device or a pipe, which a rename would replace
        return
    target = Path(os.path.realpath(output))
    if within(output, directory):
        raise click.UsageError(f"{output} must not be in the store's directory")
    fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        try:
            yield temporary
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
