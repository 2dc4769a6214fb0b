"""Suspended queues, as `mqstore lag`, `mqstore groups list` and `groups show` show them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from mqstore.broker.admin.inspect import PopView
from mqstore_tools.opened import show_ms
from mqstore_tools.render import Cells, when

__all__ = ["suspended_of", "suspended_tables"]


def suspended_of(pops: PopView, group: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the failed message that holds up each (topic, queue id), as JSON has it."""
    return {
        (key.topic, key.queue_id): asdict(each) for key, each in sorted(pops.suspended.items()) if key.group == group
    }


def suspended_tables(queues: Iterable[tuple[str, str, int, dict[str, Any]]], now_ms: int) -> list[Cells]:
    """Return a table of suspended queues (group, topic, queue id, failed message), if there are any."""
    rows = [
        (
            *queue,
            row["offset"],
            row["attempt"],
            when(row["since_ms"]),
            show_ms(max(0, now_ms - row["since_ms"])),
            row["error"],
        )
        for *queue, row in queues
    ]
    columns = ("group", "topic", "queue>", "offset>", "attempt>", "since", "for>", "last error")
    return [("suspended by a message that failed", columns, rows)] if rows else []
