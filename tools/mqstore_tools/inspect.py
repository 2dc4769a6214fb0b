"""`mqstore inspect`: what a store holds. Shows what `mqstore.log.inspect` finds."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import click

from mqstore.log.inspect import inspect_store
from mqstore_tools.render import console, note, print_json, progress, show_bytes, table, when
from mqstore_tools.shared import StoreCommand, directory_argument, index_options, java_config, json_option

__all__ = ["inspect"]

_MANY = 200
"""Rows of a table for people; programs get all of them."""


@click.command(
    cls=StoreCommand,
    short_help="Show what a store holds. Changes nothing.",
    epilog="""\b
Examples:
  mqstore inspect var/mq
  mqstore inspect var/mq --json | jq '.topics.orders.queues'
  mqstore inspect ~/store          # a Java broker's, running or not""",
)
@directory_argument
@index_options
@json_option
def inspect(directory: Path, index_slots: int | None, index_entries: int | None, json_output: bool) -> None:
    """Show what the store in DIR holds: log, topics, queues, index, checkpoint, consumers' offsets.

    Reads only: bytes and times of the directory stay as they are, also beside a writer. Works on damaged stores; what
    is plainly wrong is listed under problems, but checksums are left to `verify`, and so is the exit code 1.
    """
    with progress("reading the log") as report:
        found = inspect_store(directory, config=java_config(index_slots, index_entries), progress=report)
    if json_output:
        print_json(found)
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    screen = console()
    log, index, checkpoint = found["commitlog"], found["index"], found["checkpoint"]
    if found["writer_alive"]:
        state = "open in a writer now"
    elif found["recovery_needed"]:
        state = "not closed cleanly: the next opening for writing, or `mqstore recover`, brings it in order"
    else:
        state = "closed cleanly"
    facts = [
        ("profile", f"{found['profile']}, checksum {found['checksum']}"),
        ("state", state),
        (
            "commit log",
            f"{log['messages']} records in [{log['min_offset']}, {log['max_offset']}), {len(log['segments'])} segments "
            f"of {show_bytes(log['segment_bytes'])}",
        ),
        ("undispatched", f"{found['undispatched_bytes']} bytes"),
        ("index", f"{index['entries']} entries in {index['files']} files"),
        ("flushed", when(checkpoint["physic_msg_timestamp_ms"])),
    ]
    screen.print(table(found["path"], ("", ""), facts))
    _table(
        "queues",
        ("topic", "queue>", "first>", "next>", "messages>", "from byte>", "to byte>"),
        [
            (
                topic,
                queue_id,
                q["min_offset"],
                q["max_offset"],
                q["max_offset"] - q["min_offset"],
                q["min_physical_offset"],
                q["max_physical_offset"],
            )
            for topic, entry in found["topics"].items()
            for queue_id, q in entry["queues"].items()
        ],
    )
    _table(
        "segments",
        ("file", "length>", "used>", "records>", "first stored", "last stored"),
        [
            (
                segment["file"],
                segment["length"],
                segment["used"],
                segment["messages"],
                when(segment["first_store_timestamp_ms"]),
                when(segment["last_store_timestamp_ms"]),
            )
            for segment in log["segments"]
        ],
    )
    _table(
        "consumer offsets",
        ("group", "topic", "queue>", "next>", "behind>"),
        [
            (group, topic, queue_id, offset, _behind(found, topic, queue_id, offset))
            for group, topics in found["consumer_offsets"].items()
            for topic, queues in topics.items()
            for queue_id, offset in queues.items()
        ],
    )
    _table("delay levels", ("level>", "next>"), list(found["delay_offsets"].items()))
    for problem in islice(found["problems"], _MANY):
        note(f"problem: {problem}")


def _behind(found: dict[str, Any], topic: str, queue_id: str, offset: int) -> object:
    queue = found["topics"].get(topic, {}).get("queues", {}).get(queue_id)
    return "-" if queue is None else max(0, queue["max_offset"] - offset)


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    if rows:
        screen = console()
        screen.print()
        screen.print(table(title, columns, rows[:_MANY]))
        if len(rows) > _MANY:
            screen.print(f"... and {len(rows) - _MANY} more; --json has all")
