"""`mqstore quarantine`: list, print and restore messages that recovery has cut (`mqstore.broker.admin.salvage.cut`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mqstore import Message
from mqstore.admin import cut_messages, restore_cut
from mqstore.engine import Finding
from mqstore.errors import FormatError
from mqstore_tools.export import lines
from mqstore_tools.render import (
    VERSION,
    FindingPrinter,
    as_json,
    export_row,
    json_asked,
    note,
    print_if_json,
    progress,
    safe,
    when,
)
from mqstore_tools.session import DefaultGroup, dry_run_option
from mqstore_tools.shared import directory_argument, finish, output_option

_files_argument = click.argument("files", metavar="[FILE]...", nargs=-1)


@click.group(
    cls=DefaultGroup,
    short_help="List, print and restore messages that recovery has cut.",
    examples="""
  mqstore quarantine var/mq                          # the same as: mqstore quarantine list var/mq
  mqstore quarantine export var/mq --output cut.jsonl
  mqstore quarantine restore var/mq --dry-run
  mqstore quarantine restore var/mq --json""",
)
def quarantine() -> None:
    """List the messages that recovery has cut from the log of a store, print them, or append them again.

    Their bytes are in files in DIR/cut. FILE is a name that `list` shows. Without it, a command uses all files that
    were not restored. Restored files are kept as restored/FILE. See `mqstore quarantine COMMAND --help`.
    """


@quarantine.command(
    "list",
    short_help="List the messages that were cut. Changes nothing.",
    examples="""
  mqstore quarantine list var/mq
  mqstore quarantine list var/mq restored/00000000000067108864-1760000000000
  mqstore quarantine list var/mq --json | jq '.files[].messages[].keys'""",
)
@directory_argument
@_files_argument
def list_(directory: Path, files: tuple[str, ...]) -> None:
    """List the whole messages that recovery has cut from the store in DIR, with their old places.

    For each file it prints the number of messages and of bytes outside messages. Such bytes are also reported on
    stderr. Exit code 1 if there are any, or if an entry of DIR/cut is not a regular file.
    """
    printer = FindingPrinter()
    before = f'{as_json(VERSION)[:-1]}, "files": ['  # printed once there is no error
    count = 0
    for file, found in cut_messages(directory, files):
        contents = _Contents(found, printer)
        if json_asked():
            print(before + f'{{"file": {as_json(file.name)}, "physical_offset": {file.start}, "messages": [')
            before = ","
            _print_json(contents)
        else:
            _print_text(file.name, contents)
        count += 1
    if json_asked():
        print("]}" if count else before + "]}")
    elif not count:
        note("nothing was cut, or all of it was restored")
    finish(printer.findings)


class _Contents:
    """Whole messages of a file, to iterate over. All else is reported and counted."""

    def __init__(self, found: Iterator[Message | Finding], printer: FindingPrinter) -> None:
        self._found, self._printer = found, printer
        self.messages = self.other_bytes = 0

    def __iter__(self) -> Iterator[Message]:
        for item in self._found:
            if isinstance(item, Finding):
                self.other_bytes += item.length
                self._printer.print(item)
            else:
                self.messages += 1
                yield item


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


def _print_json(contents: _Contents) -> None:
    """Print the rest of a file's object. Its messages may be too many to hold them all."""
    for i, message in enumerate(contents):
        print(("," if i else "") + as_json(_row(message)))
    print(f'], "count": {contents.messages}, "other_bytes": {contents.other_bytes}}}')


def _print_text(name: str, contents: _Contents) -> None:
    print(safe(name))
    for row in map(_row, contents):
        facts = [
            f"{row['topic']}/{row['queue_id']}@{row['queue_offset']}",
            f"at {row['physical_offset']}",
            when(row["store_timestamp_ms"]),
            f"{row['size']} bytes",
        ]
        facts += [f"tag={row['tag']}"] if row["tag"] is not None else []
        facts += [f"keys={' '.join(row['keys'])}"] if row["keys"] else []
        print(safe("    " + "  ".join(facts)))
    print(f"    {contents.messages} messages, {contents.other_bytes} bytes outside messages")


@quarantine.command(
    short_help="Print the messages that were cut as JSON lines. Changes nothing.",
    examples="""
  mqstore quarantine export var/mq --output cut.jsonl
  mqstore quarantine export var/mq | jq -r '.body | @base64d'
  mqstore quarantine export var/mq | mqstore produce other/mq orders --exported""",
    json_help="Print findings and the summary as JSON, too.",
)
@directory_argument
@_files_argument
@output_option
def export(directory: Path, files: tuple[str, ...], output: Path | None) -> None:
    """Print the messages that recovery has cut from the store in DIR, as `mqstore export` does.

    One JSON object per line. `queue_offset` and `physical_offset` are the old place of the message. Bytes outside
    messages are reported on stderr, and the exit code is 1 then.
    """
    printer = FindingPrinter()
    count = of_files = 0
    with lines(output, directory) as target:
        for file, found in cut_messages(directory, files):
            of_files += 1
            for message in _Contents(found, printer):
                try:
                    line = as_json(export_row(message))
                except (FormatError, ImportError) as error:
                    at = message.physical_offset - file.start
                    detail = f"skipped, its body does not inflate ({error})"
                    printer.print(Finding("bad_record", f"cut/{file.name}", at, message.size, detail))
                    continue
                target.write(line + "\n")
                count += 1
    summary = {"ok": not printer.findings, "messages": count, "files": of_files}
    printer.sum_up(summary, f"exported {count} messages of {of_files} files", output)
    finish(printer.findings)


@quarantine.command(
    "restore",
    short_help="Append the messages that were cut to the log again.",
    examples="""
  mqstore quarantine restore var/mq --dry-run
  mqstore quarantine restore var/mq
  mqstore quarantine restore var/mq 00000000000067108864-1760000000000 --json""",
)
@directory_argument
@_files_argument
@dry_run_option
def restore_(directory: Path, files: tuple[str, ...], dry_run: bool) -> None:
    """Append the messages that recovery has cut from the store in DIR to the log again.

    They are appended in the order of their old offsets, and the files are moved to DIR/cut/restored. A message keeps
    its queue, body and properties. It gets a new offset, so groups receive it even if they had consumed it before it
    was cut. A delay level starts again; a fixed delivery time stays. A topic that no longer exists is created again.

    All files are restored, or none. The command may be killed and run again, and no message is appended twice. A
    message that is still at its old place in the log is not appended.

    Messages of transactions that were not committed are not restored: nobody could see them, and their producers can no
    longer end them. Neither are the engine's own records (rmq_sys_...), which refer to old places. Both stay in the
    file. Exit code 1 if messages cannot be restored, or if there are bytes outside messages.
    """
    with progress("restoring") as report:
        restored = restore_cut(directory, files, dry_run=dry_run, progress=report)
    done = restored.as_dict()
    if not print_if_json({"dry_run": dry_run, **done}):
        _report(done, dry_run=dry_run)
    finish(any(each["refused"] or each["other_bytes"] for each in done["files"]))


def _report(done: dict[str, Any], *, dry_run: bool) -> None:
    for each in done["files"]:
        facts = [f"{each['appended']} {'to append' if dry_run else 'appended'}"]
        for count, what in (
            (each["in_place"], "still in the log"),
            (each["repeated"], "also in an earlier file"),
            (each["bookkeeping"], "records of the engine left out"),
            *((count, f"not restored: {reason}") for reason, count in each["refused"].items()),
        ):
            facts += [f"{count} {what}"] if count else []
        facts += [f"{each['other_bytes']} bytes outside messages"] if each["other_bytes"] else []
        print(safe(f"{each['file']}: {each['messages']} messages, {', '.join(facts)}"))
    for queue in done["queues"]:
        if queue["first_offset"] is not None:
            place = f"{queue['topic']}/{queue['queue_id']}"
            print(safe(f"{place}: offsets {queue['first_offset']} to before {queue['end_offset']}"))
    if not done["files"]:
        note("nothing was cut, or all of it was restored")
