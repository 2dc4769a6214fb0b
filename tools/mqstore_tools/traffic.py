"""`mqstore traffic`: count messages and their bytes by time."""

from __future__ import annotations

from typing import Any

import click

from mqstore_tools.multi_store import Messages, message_options, names, on_spark, spark_option
from mqstore_tools.render import Cells, progress, show_bytes, show_tables, when
from mqstore_tools.session import show_ms
from mqstore_tools.shared import command

_SHOWN = 50


@command(
    short_help="Count messages and their bytes by time.",
    examples="""
  mqstore traffic fleet/* --from 24h
  mqstore traffic var/mq --topic orders --by topic,queue_id --interval 1h
  mqstore traffic var/mq --json | jq -r '.series[] | [.start_ms, .topic, .messages] | @tsv'""",
)
@message_options
@click.option("--interval", default="1m", metavar="TIME", help="Interval of the counts (30s, 5m, 1h).")
@click.option("--by", default="topic", metavar="NAMES", help="Group by: store, topic, queue_id.")
@spark_option
def traffic(messages: Messages, interval: str, by: str, master: str | None) -> None:
    """Count the messages of the stores in DIR by the time when they were stored.

    It shows their number, their sizes, the time from producer to store, and how many are retries. `--by topic,queue_id`
    shows how even the queues are. Without --topic all users' topics and retry topics are read. Percentiles have an
    error of at most 3 %; all other figures are exact.
    """
    from mqstore.jobs import traffic_report

    chosen = messages.select()
    with on_spark(master) as spark, progress("counting", of_bytes=False) as report:
        found = traffic_report(chosen, interval=interval, by=names(by) or (), spark=spark, progress=report)
    more = len(found.rows) - _SHOWN
    notes = [f"and {more} more; --json has all"] * (more > 0)
    notes += [f"{found.damaged} damaged messages were skipped"] * (found.damaged > 0)
    show_tables(found.to_dict(), _table(found.to_dict()), empty="no messages", notes=notes)


def _table(found: dict[str, Any]) -> Cells:
    by = [name for name in found["by"] if name]
    columns = [name.replace("queue_id", "queue>") for name in by]
    columns += ["messages>", "bytes>", "per s>", "peak per s>", "size p50>", "p95>", "max>", "delay p50>", "p95>"]
    columns += ["retries>"]
    rows = [[*(row[name] for name in by), *_cells(row)] for row in found["rows"][:_SHOWN]]
    if by and len(found["rows"]) > 1:
        rows.append(["all", *[""] * (len(by) - 1), *_cells(found["total"])])
    total = found["total"]
    return f"{when(total['first_ms'])} to {when(total['last_ms'])}", columns, rows


def _cells(row: dict[str, Any]) -> list[Any]:
    sizes = [show_bytes(row[name]) for name in ("size_p50", "size_p95", "size_max")]
    delays = [show_ms(row[name]) for name in ("delay_p50_ms", "delay_p95_ms")]
    rates = [f"{row['rate']:.1f}", f"{row['peak_rate']:.1f}"]
    retries = f"{row['retries']} ({row['retries'] / row['messages']:.1%})"
    return [row["messages"], show_bytes(row["bytes"]), *rates, *sizes, *delays, retries]
