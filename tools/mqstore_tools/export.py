"""`mqstore export`: every readable message, a JSON object a line or a row of Parquet; what cannot be read is told on
stderr."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import click

from mqstore import Finding, FormatError, Message, MessageStore, MQStoreError, QueueRef
from mqstore.files.quiet import QUIET
from mqstore.layout.compression import MissingPackageError
from mqstore.log.walk import walk_queue
from mqstore_tools.render import as_json, note, print_finding, print_json, progress
from mqstore_tools.shared import FINDINGS, StoreCommand, directory_argument, note_front, within
from mqstore_tools.shown import export_row, raw_bodies_option

__all__ = ["export"]

_Bounds = dict[QueueRef, tuple[int, int]]
"""First and next offset of each queue."""


@click.command(
    cls=StoreCommand,
    short_help="Write messages as JSON lines or Parquet. Changes nothing.",
    epilog="""\b
Examples:
  mqstore export var/mq --output all.jsonl
  mqstore export var/mq --topic orders --queue-id 0 --from-offset 100 --max-messages 10
  mqstore export var/mq | jq -r '.body | @base64d'
  mqstore export var/mq --format parquet --output all.parquet""",
)
@directory_argument
@click.option("--topic", help="Only this topic; without it all, those of the system too.")
@click.option("--queue-id", type=click.IntRange(0), help="Only this queue.")
@click.option("--from-offset", type=click.IntRange(0), help="Begin each queue at this queue offset.")
@click.option("--max-messages", type=click.IntRange(0), help="Stop after so many in all.")
@click.option("--format", "format_", type=click.Choice(["jsonl", "parquet"]), default="jsonl", show_default=True)
@click.option("--columns", metavar="NAMES", help="With parquet: only these columns, separated by commas.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to FILE, which appears when it is complete, in place of stdout.",
)
@raw_bodies_option
@click.option("--json", "json_output", is_flag=True, help="Findings and the summary as JSON too.")
@click.pass_context
def export(
    ctx: click.Context,
    directory: Path,
    topic: str | None,
    queue_id: int | None,
    from_offset: int | None,
    max_messages: int | None,
    format_: str,
    columns: str | None,
    output: Path | None,
    raw_bodies: bool,
    json_output: bool,
) -> None:
    """Write the messages of the store in DIR, queue by queue, one JSON object a line or one row of a Parquet file.

    In JSON `body` is base64, inflated if it was stored compressed; names and units are the stored ones. Parquet, which
    needs pyarrow and --output, has the columns of the Spark source, times as timestamps and bodies as bytes. What
    cannot be read is told on stderr, the rest is written, and the exit code is 1. Messages that a crash left in no
    queue are not written, and a line on stderr says so. Reads only, also beside a writer.
    """
    if queue_id is not None and topic is None:
        raise click.UsageError("--queue-id goes with --topic")
    if format_ == "parquet" and output is None:
        raise click.UsageError("--format parquet goes with --output")
    if columns is not None and format_ != "parquet":
        raise click.UsageError("--columns goes with --format parquet")
    findings = 0
    count = 0
    done = total = 0
    not_inflated: Counter[str] = Counter()

    def tell(finding: Finding) -> None:
        if finding.kind == "not_inflated":
            not_inflated[finding.detail] += 1
        else:
            show(finding)

    def show(finding: Finding) -> None:
        nonlocal findings
        findings += 1
        if json_output:
            print(as_json(finding.as_dict()), file=sys.stderr)
        else:
            print_finding(finding, stderr=True)

    with MessageStore(directory, "r", fs=QUIET) as store:
        refs = [
            ref
            for name in ([topic] if topic is not None else store.topics())
            for ref in store.queues(name)
            if queue_id is None or ref.queue_id == queue_id
        ]
        if store.has_unlisted():
            text = "a crash left messages in the log that queues do not list, and those are not exported: open the "
            text += "store for writing once, or `mqstore recover` it"
            note(as_json({"warning": text}) if json_output else text)
        if topic is not None and not refs:
            store.offsets(topic, queue_id or 0)  # says that there is no such queue
        bounds = {ref: store.offsets(*ref) for ref in refs}  # once: what comes meanwhile is not written
        began = store.min_offset
        total = sum(high - low for low, high in bounds.values())
        with progress("exporting", lambda: (done, total), of_bytes=False):
            if format_ == "parquet":
                assert output is not None
                names = None if columns is None else [name.strip() for name in columns.split(",")]
                batches = _batches(store, bounds, from_offset, names, tell, inflates=not raw_bodies)
                with _named(output), _target(output, directory) as path, _parquet(path, next(batches)) as write:
                    for batch in batches:
                        batch = batch[: None if max_messages is None else max_messages - count]
                        write(batch)
                        done = count = count + batch.num_rows
                        if count == max_messages:
                            break
            else:
                with _lines(output, directory) as file:
                    for item in _items(store, bounds, from_offset):
                        if max_messages is not None and count >= max_messages:
                            break
                        done += 1
                        if isinstance(item, Finding):
                            tell(item)
                            continue
                        try:
                            line = as_json(export_row(item, raw_body=raw_bodies))
                        except (FormatError, MissingPackageError) as error:
                            tell(_not_inflated(store, item, error))
                            continue
                        file.write(line + "\n")
                        count += 1
        for why, number in not_inflated.items():
            detail = f"{number} messages are left out: {why}, or use --raw-bodies"
            show(Finding("not_inflated", "commitlog", 0, 0, detail))
        ended = store.min_offset
    note_front(began, ended)
    if json_output and output is not None:
        print_json({"ok": not findings, "messages": count, "queues": len(refs), "findings": findings})
    elif json_output:
        print(as_json({"ok": not findings, "messages": count, "queues": len(refs)}), file=sys.stderr)
    else:
        note(f"exported {count} messages of {len(refs)} queues" + (f", {findings} findings" if findings else ""))
    if findings:
        ctx.exit(FINDINGS)


def _items(store: MessageStore, bounds: _Bounds, from_offset: int | None) -> Iterator[Message | Finding]:
    for ref, (_, high) in bounds.items():
        yield from walk_queue(store, *ref, from_offset, high)


def _not_inflated(store: MessageStore, message: Message, error: Exception) -> Finding:
    size = store.manifest.commitlog_segment_bytes
    start = message.physical_offset // size * size
    file, at = f"commitlog/{start:020d}", message.physical_offset - start
    if isinstance(error, MissingPackageError):
        return Finding("not_inflated", file, at, message.size, str(error))
    where = f"{message.topic}, queue {message.queue_id}, offset {message.offset}"
    return Finding("bad_record", file, at, message.size, f"{where}: left out, its body does not inflate: {error}")


def _batches(
    store: MessageStore,
    bounds: _Bounds,
    from_offset: int | None,
    columns: list[str] | None,
    tell: Callable[[Finding], None],
    *,
    inflates: bool,
) -> Iterator[Any]:
    """The schema, then record batches of all queues."""
    try:
        from mqstore.spark.columns import ColumnReader
        from mqstore.spark.rows import Policy
    except ImportError as error:
        raise click.UsageError(f"--format parquet: {error}") from error
    policy = Policy(max_rows=50_000, on_corrupt="skip", tell=tell)
    with ColumnReader(store, columns, policy=policy, decompress=inflates) as reader:
        yield reader.schema
        for ref, (_, high) in bounds.items():
            low, _ = store.offsets(*ref)
            yield from reader.queue(*ref, max(low, from_offset or 0), high)


@contextmanager
def _parquet(path: str, schema: Any) -> Iterator[Callable[[Any], None]]:
    from pyarrow import parquet

    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        yield writer.write_batch


@contextmanager
def _lines(output: Path | None, directory: Path) -> Iterator[TextIO]:
    """Where lines of text go."""
    if output is None:
        yield sys.stdout
        return
    with _named(output), _target(output, directory) as path, open(path, "w", encoding="ascii", newline="\n") as file:
        yield file


@contextmanager
def _named(output: Path) -> Iterator[None]:
    """A write that fails does not say of which file it was: of a full disk a person would look at the store's."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or isinstance(error, (MQStoreError, BrokenPipeError)):
            raise
        raise OSError(error.errno, error.strerror, str(output)) from error


@contextmanager
def _target(output: Path, directory: Path) -> Iterator[str]:
    """A file to write. It gets its name only when all of it is there, so that no half of it is taken for whole."""
    if output.exists() and not output.is_file():
        yield str(output)  # a device or a pipe: to rename a file over it would take it away
        return
    target = Path(os.path.realpath(output))
    if within(output, directory):
        raise click.UsageError("--output must not lie in the store's directory")
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
