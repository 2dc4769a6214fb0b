"""`mqstore cut`: list, print and restore what recovery has cut (`mqstore.broker.admin.cut`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mqstore import Message
from mqstore.broker.admin import cut as library
from mqstore.engine import Finding, MessageStore, ReadOnlyMessageStore, StoreReader
from mqstore.errors import FormatError, StoreIOError
from mqstore.files.beneath import REFUSED
from mqstore.files.lock import refuse_beside_writer
from mqstore.files.quiet import QUIET
from mqstore.layout.compression import MissingPackageError
from mqstore_tools.export import lines
from mqstore_tools.opened import DefaultGroup, dry_run_option
from mqstore_tools.render import VERSION, Told, as_json, export_row, note, print_json, progress, safe, when
from mqstore_tools.shared import FINDINGS, StoreCommand, directory_argument, json_option

__all__ = ["cut"]

_files_argument = click.argument("files", metavar="[FILE]...", nargs=-1)


@click.group(
    cls=DefaultGroup,
    short_help="Show, print and restore what recovery has cut.",
    epilog="""\b
Examples:
  mqstore cut var/mq                          # the same as: mqstore cut list var/mq
  mqstore cut export var/mq --output cut.jsonl
  mqstore cut restore var/mq --dry-run
  mqstore cut restore var/mq --json""",
)
def cut() -> None:
    """Show the messages that recovery has cut from the log of a store, print them, or append them again.

    Their bytes lie in files in DIR/cut. A FILE is named as `list` shows it; without one, all files are meant that were
    not restored. Restored files are kept: name them as restored/FILE. `mqstore cut COMMAND --help` tells more.
    """


@cut.command(
    "list",
    short_help="List what was cut, message by message. Changes nothing.",
    epilog="""\b
Examples:
  mqstore cut list var/mq
  mqstore cut list var/mq restored/00000000000067108864-1760000000000
  mqstore cut list var/mq --json | jq '.files[].messages[].keys'""",
)
@directory_argument
@_files_argument
@json_option
@click.pass_context
def list_(ctx: click.Context, directory: Path, files: tuple[str, ...], json_output: bool) -> None:
    """List what recovery has cut from the store in DIR: each whole message with its old place.

    For each file it shows how many messages it has, and how many bytes that are no message. Such bytes are also told on
    stderr. Exit code 1 when there are any, or when a name in DIR/cut is no regular file.
    """
    told = Told(json_output)
    with ReadOnlyMessageStore(directory, fs=QUIET) as store:
        found = library.cut_files(store, files)
        if json_output:
            print(f'{as_json(VERSION)[:-1]}, "files": [')
        for i, file in enumerate(found):
            tally = library.Tally(file.name)
            rows = (_row(message) for message in _messages(store, file, tally, told))
            if json_output:
                _print_json(file, tally, rows, last=i + 1 == len(found))
            else:
                _print_text(tally, rows)
        if json_output:
            print("]}")
        elif not found:
            note("nothing was cut, or all of it was restored")
    if told.findings:
        ctx.exit(FINDINGS)


def _messages(store: StoreReader, file: library.CutFile, tally: library.Tally, told: Told) -> Iterator[Message]:
    """Yield the whole messages of a file. All else is told and counted."""
    try:
        for item in library.contents(store, file):
            if isinstance(item, Finding):
                tally.other_bytes += item.length
                told.tell(item)
            else:
                tally.messages += 1
                yield item
    except StoreIOError as error:
        if error.errno not in REFUSED:
            raise
        told.tell(Finding("bad_record", f"cut/{file.name}", 0, 0, str(error.strerror)))


def _row(message: Message) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.offset,
        "physical_offset": message.physical_offset,
        "store_timestamp_ms": message.store_timestamp_ms,
        "size": message.size,
        "tag": message.tag,
        "keys": list(message.keys),
    }


def _print_json(file: library.CutFile, tally: library.Tally, rows: Iterator[dict[str, Any]], *, last: bool) -> None:
    """Print a file as a member of a list. Its messages may be too many to hold them all."""
    print(f'{{"file": {as_json(file.name)}, "physical_offset": {file.start}, "messages": [')
    for i, row in enumerate(rows):
        print(("," if i else "") + as_json(row))
    print(f'], "count": {tally.messages}, "other_bytes": {tally.other_bytes}}}' + ("" if last else ","))


def _print_text(tally: library.Tally, rows: Iterator[dict[str, Any]]) -> None:
    print(safe(tally.file))
    for row in rows:
        facts = [
            f"{row['topic']}/{row['queue_id']}@{row['queue_offset']}",
            f"at {row['physical_offset']}",
            when(row["store_timestamp_ms"]),
            f"{row['size']} bytes",
        ]
        facts += [f"tag={row['tag']}"] if row["tag"] is not None else []
        facts += [f"keys={' '.join(row['keys'])}"] if row["keys"] else []
        print(safe("    " + "  ".join(facts)))
    print(f"    {tally.messages} messages, {tally.other_bytes} bytes that are no message")


@cut.command(
    short_help="Print what was cut as JSON lines. Changes nothing.",
    cls=StoreCommand,
    epilog="""\b
Examples:
  mqstore cut export var/mq --output cut.jsonl
  mqstore cut export var/mq | jq -r '.body | @base64d'
  mqstore cut export var/mq | mqstore produce other/mq orders --exported""",
)
@directory_argument
@_files_argument
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to FILE, which appears when it is complete, in place of stdout.",
)
@click.option("--json", "json_output", is_flag=True, help="Findings and the summary as JSON too.")
@click.pass_context
def export(ctx: click.Context, directory: Path, files: tuple[str, ...], output: Path | None, json_output: bool) -> None:
    """Print the messages that recovery has cut from the store in DIR, as `mqstore export` does.

    A JSON object a line: `queue_offset` and `physical_offset` say where each message lay. Bytes that are no message are
    told on stderr, and the exit code is 1 then.
    """
    told = Told(json_output)
    count = 0
    with ReadOnlyMessageStore(directory, fs=QUIET) as store, lines(output, directory) as target:
        found = library.cut_files(store, files)
        for file in found:
            for message in _messages(store, file, library.Tally(file.name), told):
                try:
                    line = as_json(export_row(message))
                except (FormatError, MissingPackageError) as error:
                    at = message.physical_offset - file.start
                    detail = f"left out, its body does not inflate: {error}"
                    told.tell(Finding("bad_record", f"cut/{file.name}", at, message.size, detail))
                    continue
                target.write(line + "\n")
                count += 1
    summary = {"ok": not told.findings, "messages": count, "files": len(found)}
    told.sum_up(summary, f"exported {count} messages of {len(found)} files", output)
    if told.findings:
        ctx.exit(FINDINGS)


@cut.command(
    "restore",
    short_help="Append what was cut to the log again.",
    epilog="""\b
Examples:
  mqstore cut restore var/mq --dry-run
  mqstore cut restore var/mq
  mqstore cut restore var/mq 00000000000067108864-1760000000000 --json""",
)
@directory_argument
@_files_argument
@dry_run_option
@json_option
@click.pass_context
def restore_(ctx: click.Context, directory: Path, files: tuple[str, ...], dry_run: bool, json_output: bool) -> None:
    """Append the messages that recovery has cut from the store in DIR to the log again.

    They come in the order of their old offsets, and the files are moved to DIR/cut/restored. Each message keeps its
    queue and all that it was sent with. It gets a new offset, so groups receive it even if they had consumed it before
    it was cut. A delay level starts over; a fixed time of delivery stays. A topic that does not exist any more comes
    back with its messages.

    All files are restored, or none. The command may be killed and run again, and no message comes twice. A message that
    still lies at its place in the log is left alone.

    Two things are not restored, and stay in the file. Messages of transactions that were not committed are one: nobody
    could see them, and their producers can no longer end them. The engine's own notes (rmq_sys_...) are the other, for
    they speak of old places. Exit code 1 when messages cannot be restored, or bytes are no message.
    """
    with progress("restoring") as report:
        done = (_plan if dry_run else _restore)(directory, files, report)
    if json_output:
        print_json({"dry_run": dry_run, **_as_dict(done)})
    else:
        _tell(done, dry_run=dry_run)
    if any(tally.refused or tally.other_bytes for tally in done.files):
        ctx.exit(FINDINGS)


def _plan(directory: Path, files: tuple[str, ...], report: library.Progress) -> library.Restore:
    with ReadOnlyMessageStore(directory, fs=QUIET) as store:
        refuse_beside_writer(directory, QUIET)
        return library.restore(store, files, dry_run=True, progress=report)


def _restore(directory: Path, files: tuple[str, ...], report: library.Progress) -> library.Restore:
    with MessageStore(directory, create=False) as store:
        return library.restore(store, files, progress=report)


def _as_dict(done: library.Restore) -> dict[str, Any]:
    queues = []
    for ref, count in sorted(done.queues.items()):
        first, end = done.offsets.get(ref, (None, None))
        row = {**ref._asdict(), "messages": count, "first_offset": first, "end_offset": end}
        queues.append(row)
    return {"files": [tally.as_dict() for tally in done.files], "queues": queues}


def _tell(done: library.Restore, *, dry_run: bool) -> None:
    for tally in done.files:
        facts = [f"{tally.appended} {'to append' if dry_run else 'appended'}"]
        for count, what in (
            (tally.in_place, "still in the log"),
            (tally.repeated, "also in an earlier file"),
            (tally.bookkeeping, "notes of the engine left out"),
            *((count, f"not restored: {reason}") for reason, count in tally.refused.items()),
        ):
            facts += [f"{count} {what}"] if count else []
        facts += [f"{tally.other_bytes} bytes are no message"] if tally.other_bytes else []
        print(safe(f"{tally.file}: {tally.messages} messages, {', '.join(facts)}"))
    for (topic, queue_id), (first, end) in sorted(done.offsets.items()):
        print(safe(f"{topic}/{queue_id}: offsets {first} to before {end}"))
    if not done.files:
        note("nothing was cut, or all of it was restored")
