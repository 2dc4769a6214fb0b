"""`mqstore export --to`: messages of stores to a folder of Parquet files; run again, what came since."""

from __future__ import annotations

from typing import Any

from mqstore_tools.many import pairs, usable
from mqstore_tools.render import console, note, print_json, progress, show_bytes, table

__all__ = ["to_folder"]

_SHOWN = 50


def to_folder(
    stores: tuple[str, ...],
    chosen: dict[str, Any],
    options: tuple[str, ...],
    to: str,
    given: dict[str, Any],
    *,
    json_output: bool,
) -> None:
    """Export the messages that `select(stores, **chosen)` chooses, with `export_parquet(..., **given)`."""
    with usable():
        from mqstore.jobs import export_parquet, select
    selection = select(stores, **chosen, options=pairs("--option", options))
    with progress("exporting", of_bytes=False) as report:
        done = export_parquet(selection, to, **given, progress=report)
    if json_output:
        print_json(done.to_dict())
    elif done.folder is None:
        note(f"nothing new for {to}")
    else:
        _show(done.to_dict())


def _show(row: dict[str, Any]) -> None:
    rate = row["record_bytes"] / max(row["seconds"], 1e-9)
    facts = [
        ("folder", f"{row['path']}/{row['folder']}"),
        ("messages", row["messages"]),
        ("of records", show_bytes(row["record_bytes"])),
        ("files", f"{row['files']}, {show_bytes(row['file_bytes'])}"),
        ("took", f"{row['seconds']:.1f} s, {show_bytes(round(rate))}/s"),
    ]
    if row["damaged"]:
        facts.append(("damaged, left out", row["damaged"]))
    console().print(table("", ("", ""), facts))
    marks = [
        (store, topic, queue, end)
        for store, topics in row["high_water"].items()
        for topic, queues in topics.items()
        for queue, end in queues.items()
    ]
    console().print(table("next time from", ("store", "topic", "queue>", "offset>"), marks[:_SHOWN]))
    if len(marks) > _SHOWN:
        note(f"and {len(marks) - _SHOWN} queues more; --json has all")
