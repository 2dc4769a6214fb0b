"""`mqstore export`: every readable message, one JSON object a line; what cannot be read is told on stderr."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import click

from mqstore import Finding, FormatError, Message, MessageStore, QueueRef
from mqstore.files.quiet import QUIET
from mqstore.layout.compression import MissingPackageError
from mqstore.log.walk import walk_queue
from mqstore_tools.render import as_json, finding_line, note, print_json, progress
from mqstore_tools.shared import FINDINGS, StoreCommand, directory_argument
from mqstore_tools.shown import export_row

__all__ = ["export"]


@click.command(
    cls=StoreCommand,
    short_help="Write messages as JSON lines. Changes nothing.",
    epilog="""\b
Examples:
  mqstore export var/mq --output all.jsonl
  mqstore export var/mq --topic orders --queue-id 0 --from-offset 100 --max-messages 10
  mqstore export var/mq | jq -r '.body | @base64d'""",
)
@directory_argument
@click.option("--topic", help="Only this topic; without it all, those of the system too.")
@click.option("--queue-id", type=click.IntRange(0), help="Only this queue.")
@click.option("--from-offset", type=click.IntRange(0), help="Begin each queue at this queue offset.")
@click.option("--max-messages", type=click.IntRange(0), help="Stop after so many in all.")
@click.option("--format", "format_", type=click.Choice(["jsonl"]), default="jsonl", show_default=True)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to FILE, which appears when it is complete, in place of stdout.",
)
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
    output: Path | None,
    json_output: bool,
) -> None:
    """Write the messages of the store in DIR, queue by queue, one JSON object a line.

    `body` is base64, inflated if it was stored compressed; names and units are the stored ones. What cannot be read is
    told on stderr, the rest is written, and the exit code is 1. Reads only, also beside a writer.
    """
    if queue_id is not None and topic is None:
        raise click.UsageError("--queue-id goes with --topic")
    findings = 0
    count = 0
    done = total = 0

    def tell(finding: Finding) -> None:
        nonlocal findings
        findings += 1
        if json_output:
            print(as_json(finding.as_dict()), file=sys.stderr)
        else:
            note(finding_line(finding))

    with MessageStore(directory, "r", fs=QUIET) as store:
        refs = [
            ref
            for name in ([topic] if topic is not None else store.topics())
            for ref in store.queues(name)
            if queue_id is None or ref.queue_id == queue_id
        ]
        if topic is not None and not refs:
            store.offsets(topic, queue_id or 0)  # says that there is no such queue
        total = sum(high - low for low, high in (store.offsets(*ref) for ref in refs))
        with _target(output, directory) as file, progress("exporting", lambda: (done, total), of_bytes=False):
            for item in _items(store, refs, from_offset):
                if max_messages is not None and count >= max_messages:
                    break
                done += 1
                if isinstance(item, Finding):
                    tell(item)
                    continue
                try:
                    line = as_json(export_row(item))
                except (FormatError, MissingPackageError) as error:
                    tell(_not_inflated(store, item, error))
                    continue
                file.write(line + "\n")
                count += 1
    if json_output and output is not None:
        print_json({"ok": not findings, "messages": count, "queues": len(refs), "findings": findings})
    elif json_output:
        print(as_json({"ok": not findings, "messages": count, "queues": len(refs)}), file=sys.stderr)
    else:
        note(f"exported {count} messages of {len(refs)} queues" + (f", {findings} findings" if findings else ""))
    if findings:
        ctx.exit(FINDINGS)


def _items(store: MessageStore, refs: list[QueueRef], from_offset: int | None) -> Iterator[Message | Finding]:
    for ref in refs:
        yield from walk_queue(store, ref.topic, ref.queue_id, from_offset)


def _not_inflated(store: MessageStore, message: Message, error: Exception) -> Finding:
    size = store.manifest.commitlog_segment_bytes
    start = message.physical_offset // size * size
    where = f"{message.topic}, queue {message.queue_id}, offset {message.offset}"
    return Finding(
        "bad_record",
        f"commitlog/{start:020d}",
        message.physical_offset - start,
        message.size,
        f"{where}: left out, its body does not inflate: {error}",
    )


@contextmanager
def _target(output: Path | None, directory: Path) -> Iterator[TextIO]:
    """Where lines go. A file gets its name only when all of it is there, so that no half of it is taken for whole."""
    if output is None:
        yield sys.stdout
        return
    folder = output.resolve().parent
    if folder == directory.resolve() or directory.resolve() in folder.parents:
        raise click.UsageError("--output must not lie in the store's directory")
    fd, temporary = tempfile.mkstemp(prefix=f".{output.name}.", dir=folder)
    try:
        with open(fd, "w", encoding="ascii", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(fd)
        os.replace(temporary, output)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
