"""`mqstore diff`: compare two stores, by `broker/admin/compare.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mqstore.admin import compare_stores
from mqstore_tools.render import note, pick, print_if_json, print_line, progress, safe
from mqstore_tools.shared import command, finish

_FOLDER = click.Path(path_type=Path, readable=False)


@command(
    short_help="Compare two stores, or a store and its snapshot. Changes nothing.",
    examples="""
  mqstore diff var/mq /backup/mq-monday
  mqstore diff old/mq new/mq --topic orders
  mqstore diff var/mq /backup/mq-monday --json | jq '.differences[] | select(.kind == "offset")'""",
)
@click.argument("a", type=_FOLDER)
@click.argument("b", type=_FOLDER)
@click.option("--topic", help="Only the messages, committed offsets and settings of this topic.")
@click.option("--limit", type=click.IntRange(1), default=100, help="Limit of listed differences.")
def diff(a: Path, b: Path, topic: str | None, limit: int) -> None:
    """Compare the stores in folders A and B: messages, committed offsets, settings of topics and groups, manifests.

    Messages are compared by topic, queue and queue offset: all bytes but their place in the log. Adjacent messages with
    the same difference are one line. Exit code 0 if the stores are the same, and 1 if they differ.
    """
    with progress("comparing", of_bytes=False) as report:
        found = compare_stores(a, b, topic=topic, limit=limit, progress=report)
    if not print_if_json(found):
        for row in found["differences"]:
            print_line(safe(_line(row)))
        more = f" ({found['unlisted']} not listed: --limit)" if found["unlisted"] else ""
        count = len(found["differences"]) + found["unlisted"]
        compared = f"compared {found['messages']} messages in both of {found['queues']} queues"
        note(f"{compared}: {f'{count} differences{more}' if count else 'no difference'}")
    for name, path in (("a", a), ("b", b)):
        if found["damaged"][name]:
            note(f"{path}: {found['damaged'][name]} places are damaged, see mqstore verify")
    finish(not found["same"])


def _line(row: dict[str, Any]) -> str:
    if row["kind"] == "messages":
        topic, queue_id, first, stop = pick(row, "topic queue_id first stop")
        how = f"differ in {', '.join(row['fields'])}" if row["in"] == "both" else f"are only in {row['in'].upper()}"
        return f"messages {topic}/{queue_id} [{first}, {stop}) {how}"
    what = f"offset of {row['group']} in {row['topic']}/{row['queue_id']}" if row["kind"] == "offset" else row["kind"]
    names = " ".join(str(row[name]) for name in ("name", "field") if name in row)
    a, b = ("-" if value is None else value for value in pick(row, "a b"))
    return f"{what} {names}".rstrip() + f": {a} in A, {b} in B"
