"""`mqstore lag`: how far consumer groups are behind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from mqstore.broker.inspect import PopView, QueueLag, group_names, lag_of, pop_view
from mqstore_tools.opened import looking, show_ms
from mqstore_tools.render import console, note, print_json, table
from mqstore_tools.shared import FINDINGS, StoreCommand, directory_argument, json_option, note_incomplete
from mqstore_tools.suspended import show_suspended, suspended_of

__all__ = ["lag"]


@click.command(
    cls=StoreCommand,
    short_help="Show how far groups are behind. Changes nothing.",
    epilog="""\b
Examples:
  mqstore lag var/mq
  mqstore lag var/mq --group billing          # queue by queue
  mqstore lag var/mq --json | jq '.groups[] | select(.messages > 1000) | .group'""",
)
@directory_argument
@click.option("--group", help="Only this group, queue by queue.")
@json_option
@click.pass_context
def lag(ctx: click.Context, directory: Path, group: str | None, json_output: bool) -> None:
    """Show how many messages each group of the store in DIR has not consumed, how old the oldest of them is, and how
    many are in flight: popped and not acknowledged yet, and among the former.

    As `broker.lag` has it: popped and acknowledged is consumed, also behind a message that is still in flight. `-`
    (null in JSON) means not known: the group has not started in that queue, or, of a group, in any. Retry topics count
    as topics; what waits for its next attempt counts once that is due (`mqstore delay` shows how much waits).

    A queue of an ordered group is suspended from the first failure of a message until that message is settled. The
    message, the time of its first failure, the attempt that failed last and its error are shown below, and under
    `suspended` in JSON.

    By what is on disk: a running broker notes failures within a second, and writes its groups' progress a moment after
    it is made. Not there is how far a group has read what it has not committed: that counts, but not as in flight; nor
    what a Java broker had handed out, until mqstore has opened its store for writing.
    """
    with looking(directory) as parts:
        now_ms = parts.clock.now_ms()
        pops = pop_view(parts, now_ms)
        found = {name: lag_of(parts, name, pops) for name in (group_names(parts) if group is None else [group])}
        topics = {each.topic for queues in found.values() for each in queues}
        incomplete = parts.store.unlisted_queue(topics) if topics else None
    groups = [
        {"group": name, **_sum(queues, now_ms), "queues": [_row(each, pops, now_ms) for each in queues]}
        for name, queues in found.items()
    ]
    if json_output:
        print_json({"groups": groups})
    elif not groups:
        note("no group")
    elif group is None:
        _show(("group",), [(each["group"], each) for each in groups])
    else:
        [only] = groups
        rows = only["queues"]
        goes_on = ["-" if row["committed"] is None else row["committed"] for row in rows]
        _show(
            ("topic", "queue>", "goes on at>"),
            [(row["topic"], row["queue_id"], at, row) for row, at in zip(rows, goes_on, strict=True)],
        )
        _show(("group",), [(only["group"], only)])
    if not json_output:
        show_suspended(pops, found, now_ms)
    if incomplete is not None:
        note_incomplete(incomplete, directory)
        ctx.exit(FINDINGS)


def _row(lag: QueueLag, pops: PopView, now_ms: int) -> dict[str, Any]:
    """`committed` is null where the group has no progress."""
    return {
        "topic": lag.topic,
        "queue_id": lag.queue_id,
        "committed": lag.committed,
        **_sum([lag], now_ms),
        "suspended": suspended_of(pops, lag.group).get((lag.topic, lag.queue_id)),
    }


def _sum(queues: Iterable[QueueLag], now_ms: int) -> dict[str, Any]:
    """Of some queues together; ages in ms. `messages` is None if the group has not started in any of them."""
    queues = list(queues)
    known = [each.messages for each in queues if each.committed is not None]
    oldest_ms = min((each.oldest_ms for each in queues if each.oldest_ms is not None), default=None)
    return {
        "messages": sum(known) if known else None,
        "in_flight": sum(each.in_flight for each in queues),
        "lost": sum(each.lost for each in queues),
        "oldest_store_timestamp_ms": oldest_ms,
        "oldest_age_ms": None if oldest_ms is None else max(0, now_ms - oldest_ms),
    }


def _show(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    columns = (*names, "messages>", "in flight>", "lost>", "oldest is>")
    console().print(
        table(
            "",
            columns,
            [
                (
                    *keys,
                    "-" if sums["messages"] is None else sums["messages"],
                    sums["in_flight"],
                    sums["lost"],
                    show_ms(sums["oldest_age_ms"]),
                )
                for *keys, sums in rows
            ],
        )
    )
