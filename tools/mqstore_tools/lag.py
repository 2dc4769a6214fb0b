"""`mqstore lag`: show the lag of consumer groups and their suspended queues."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import click

from mqstore import QueueRef
from mqstore_tools.multi_store import duration, on_spark, spark_option, stores_argument, topic_option
from mqstore_tools.render import Cells, progress, show_tables, when
from mqstore_tools.session import as_cells, show_ms
from mqstore_tools.shared import command, finish, note_incomplete, refuse_given
from mqstore_tools.watching import interval_option, watch


@command(
    short_help="Show the lag of groups. Changes nothing.",
    examples="""
  mqstore lag var/mq
  mqstore lag var/mq --group billing          # queue by queue
  mqstore lag var/mq --watch --interval 10    # until q or Ctrl-C
  mqstore lag fleet/* --max-lag 10000 --max-age 15m || page-somebody
  mqstore lag var/mq --json | jq '.groups[] | select(.messages > 1000) | .group'""",
)
@stores_argument
@click.option("--group", "groups", multiple=True, help="Only this group, queue by queue; may be repeated.")
@topic_option
@click.option("--max-lag", type=click.IntRange(0), help="Exit with 1 if more messages wait for a group.")
@click.option("--max-age", type=duration, metavar="TIME", help="Exit with 1 if one of them is older (15m).")
@click.option("--watch", "watched", is_flag=True, help="Look again each interval. JSON is one object a line.")
@interval_option
@spark_option
def lag(
    stores: tuple[str, ...],
    groups: tuple[str, ...],
    topics: tuple[str, ...],
    max_lag: int | None,
    max_age: float | None,
    watched: bool,
    interval: float,
    master: str | None,
) -> None:
    """Show how many messages each group of the stores in DIR has not consumed, and the age of the oldest.

    Messages in flight, popped but not acknowledged, are included. A message that was popped and acknowledged is
    consumed, even if an earlier one is still in flight. `-` (null in JSON) means unknown: the group has not started in
    that queue. Retry topics count as topics. Retries that wait for their time count in queue 0 of
    the group's retry topic.

    A queue of an ordered group is suspended from the first failure of a message until that message is settled. The
    message, the time of its first failure, its last failed attempt and the error are shown below, and under `suspended`
    in JSON.

    The figures are those on disk. A running broker saves failures within a second, and commits shortly after they are
    made. Messages that were read but not committed are included, but not as in flight. Deliveries of a Java broker are
    unknown until mqstore has opened its store for writing.
    """
    from mqstore.jobs import lag_report

    if watched:
        refuse_given(("max_lag", "max_age", "master"), "does not go with --watch")

        def show(found: dict[str, Any]) -> list[Cells]:
            (_, *first), *others = _tables(found, by_queue=bool(groups))
            return [(when(found["taken_ms"]), *first), *others]  # type: ignore[list-item]

        look = partial(lag_report, stores, topics=topics or None, groups=groups or None)
        watch(lambda: look().to_dict(), show, interval=interval)
        return
    refuse_given(("interval",), "goes with --watch")
    with on_spark(master) as spark, progress("looking", of_bytes=False) as report:
        looked = lag_report(stores, topics=topics or None, groups=groups or None, spark=spark, progress=report)
    found = looked.to_dict()
    over = [each for each in found["groups"] if _is_over(each, max_lag, max_age)]
    found["over"] = [each["group"] for each in over]
    notes = [f"over the limit: group {each['group']}: {each['messages']} messages" for each in over]
    show_tables(found, *_tables(found, by_queue=bool(groups)), empty="no group", notes=notes)
    for each in looked.incomplete:
        note_incomplete(QueueRef(each.topic, each.queue_id), Path(each.store))
    finish(over or looked.incomplete)


def _is_over(group: dict[str, Any], max_lag: int | None, max_age_s: float | None) -> bool:
    messages, age_ms = group["messages"] or 0, group["oldest_age_ms"] or 0
    return (max_lag is not None and messages > max_lag) or (max_age_s is not None and age_ms > max_age_s * 1000)


def _tables(found: dict[str, Any], *, by_queue: bool) -> list[Cells]:
    tables: list[Cells] = []
    groups = found["groups"]
    queues = [(group["group"], row) for group in groups for row in group["queues"]]
    if by_queue:
        # Columns with the same value in all rows are left out.
        keys = [len({row["store"] for _, row in queues}) > 1, len(groups) > 1]
        names = (*compress(("store", "group"), keys), "topic", "queue>", "next offset>", *_COUNTS)
        cells = [
            (*compress((row["store"], group), keys), *as_cells(row, f"topic queue_id committed {_CELLS}"))
            for group, row in queues
        ]
        tables.append(("", names, cells))
    rows = [as_cells(each, f"group {_CELLS}") for each in groups]
    suspended = [(group, row["topic"], row["queue_id"], row["suspended"]) for group, row in queues if row["suspended"]]
    return [*tables, ("", ("group", *_COUNTS), rows), *suspended_tables(suspended, found["taken_ms"])]


_COUNTS = ("messages>", "in flight>", "lost>", "oldest is>")
_CELLS = "messages in_flight lost oldest_age_ms"


def suspended_tables(queues: Iterable[tuple[str, str, int, dict[str, Any]]], now_ms: int) -> list[Cells]:
    """Return a table of suspended queues, [] if there are none. `queues` are (group, topic, queue id, message)."""
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
    return [("queues suspended by a failed message", columns, rows)] if rows else []
