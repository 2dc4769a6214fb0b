"""`mqstore du`: show what fills the disk, found by `broker/admin/usage.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mqstore import Retention
from mqstore.admin import disk_usage
from mqstore_tools.multi_store import duration
from mqstore_tools.render import Cells, note, progress, show_tables, when
from mqstore_tools.session import as_cells
from mqstore_tools.shared import command, directory_argument, finish

_DEFAULT = Retention()


@command(
    short_help="Show what fills the disk, and what keeps it. Changes nothing.",
    examples="""
  mqstore du var/mq
  mqstore du var/mq --max-age 1d --max-bytes 200000000
  mqstore du var/mq --json | jq '.topics[] | select(.log_bytes > 1e9) | .topic'""",
)
@directory_argument
@click.option(
    "--max-age", type=duration, metavar="TIME", help="Age of the store's retention, if it is not the default (3d)."
)
@click.option(
    "--max-bytes", type=click.IntRange(0), metavar="N", help="Size of its retention, if it is not the default (1 GiB)."
)
@click.option("--limit", type=click.IntRange(1), default=30, help="Limit of printed topics.")
def du(directory: Path, max_age: float | None, max_bytes: int | None, limit: int) -> None:
    """Show the bytes of the store in DIR by part and by topic, and those that retention will delete and when.

    One message that is still needed keeps all later ones of every topic. It is shown as the front, with the group that
    holds it and the time at which it was stored. Snapshots are copies of the store in folders next to DIR; bytes that
    are hard-linked stay on the disk until both are gone.

    Sizes of files are those on the disk, sizes of messages those of their records. JSON has all topics. Exit code 1 if
    something could not be read.
    """
    policy = Retention(
        age=_DEFAULT.age if max_age is None else max_age,
        max_bytes=_DEFAULT.max_bytes if max_bytes is None else max_bytes,
    )
    with progress("reading units", of_bytes=False) as report:
        found = disk_usage(directory, retention=policy, progress=report)
    show_tables(found, *_tables(found, limit), notes=disk_lines(found, limit))
    for section, why in found["not_shown"].items():
        note(f"not shown: {section} ({why})")
    finish(found["not_shown"])


def _tables(found: dict[str, Any], limit: int) -> list[Cells]:
    parts = [(name, *as_cells(part, "files bytes")) for name, part in found["parts"].items() if part["files"]]
    size, free, disk = as_cells(found, "bytes free_bytes disk_bytes")
    title = f"{found['path']}: {size}, {free} of {disk} are free"
    rows = [as_cells(row, "topic messages log_bytes queue_bytes consumed_bytes") for row in found["topics"][:limit]]
    snapshots = [
        (f"{each['path']}{' (left by a killed snapshot)' * each['partial']}", *as_cells(each, "bytes linked_bytes"))
        for each in found["snapshots"]
    ]
    tables: list[Cells] = [
        (title, ("part", "files>", "bytes>"), parts),
        ("", ("topic", "messages>", "in the log>", "queues>", "consumed>"), rows),
        ("", ("snapshot", "bytes>", "hard-linked>"), snapshots),
    ]
    return [each for each in tables if each[2]]


def disk_lines(found: dict[str, Any], limit: int) -> list[str]:
    log, kept, front = found["log"], found["retention"], found["front"]
    lines = [f"and {len(found['topics']) - limit} more topics; --json has all"] if len(found["topics"]) > limit else []
    size, other, unused = as_cells(log, "segment_bytes other_bytes unused_bytes")
    lines.append(f"log: {log['segments']} segments of {size}; {other} in no queue, {unused} not yet used")
    age, most, consumed, due, held = as_cells(kept, "age_ms max_bytes consumed_bytes due_bytes held_bytes")
    line = f"retention of {age} or {most}: {consumed} in whole consumed segments, {due} of that can go now"
    if kept["next_ms"] is not None:
        line += f", the next at {when(kept['next_ms'])}, the last at {when(kept['last_ms'])}"
    lines.append(line)
    if front is not None:
        group = f", group {front['group']}" if front["group"] else ""
        place = f"{front['topic']}, queue {front['queue_id']}{group} ({front['why']})"
        lines.append(f"front: {held} more could go, but for {place}, stored {when(front['since_ms'])}")
    return lines
