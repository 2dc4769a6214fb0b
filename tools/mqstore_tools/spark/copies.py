"""What the commands share that copy messages into other stores: their options, and how a result is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from mqstore_tools.render import console, note, print_json, show_bytes, table
from mqstore_tools.spark.common import Given

__all__ = [
    "check_named",
    "id_option",
    "show_copied",
    "show_plan",
    "show_topics",
    "spread_options",
    "target_option",
    "told_already",
]


def target_option(*kinds: str) -> Callable[[Any], Any]:
    """--target, of these."""
    return click.option(
        "--target",
        type=click.Choice(kinds),
        default=kinds[0],
        show_default=True,
        help="A store, which is made if need be; a folder of stores, to which new ones are added"
        + ("; a store that a process has open, which takes the messages over." if "inbox" in kinds else "."),
    )


id_option = click.option(
    "--id",
    "run_id",
    metavar="NAME",
    help="Names this run: given again, it writes nothing. Else the arguments name it, which wants bounds that stay "
    "where they are: with --from 24h give it.",
)


def check_named(given: Given, run_id: str | None) -> None:
    """UsageError for a run that its arguments cannot name: an age as bound is another time in the next run, which then
    would not be known as the same one, and would copy everything again."""
    for option, bound in (("--from", given.start), ("--to", given.stop)):
        if run_id is None and bound is not None and bound.moves:
            raise click.UsageError(
                f"{option} {bound.text} is another time whenever it is said, so this run could not be known again: "
                "name it by --id NAME, or give a time (2026-01-31T12:00:00Z) or an offset"
            )


def spread_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--queues and --spread."""
    for option in (
        click.option(
            "--spread",
            type=click.Choice(["queue", "key"]),
            default="queue",
            show_default=True,
            help="With --queues: a queue goes to one queue as a whole, or messages by their group.",
        ),
        click.option(
            "--queues", type=click.IntRange(1), metavar="N", help="Spread each topic over N queues; else as is."
        ),
    ):
        command = option(command)
    return command


def told_already(given: Given, row: Mapping[str, Any], name: str) -> bool:
    """Print the result as JSON, or say that there was nothing to do; whether that was all."""
    if given.json_output:
        print_json(row)
        return True
    if row["already"]:
        note(f"{name} {row['id']} was written before; nothing to do (--id NAME does it as another run)")
        return True
    return False


def show_plan(given: Given, plan: Any, name: str) -> None:
    """What --dry-run prints."""
    given.print_plan(plan)
    if plan.already and not given.json_output:
        note(f"{name} {plan.id} was written before; there would be nothing to do")


def show_copied(given: Given, done: Any, name: str) -> None:
    """What a job that copies has done."""
    row = done.to_dict() | {"messages": done.messages, "already": done.already}
    if told_already(given, row, name):
        return
    columns = ("target", "messages>", "bytes>", "stores>", "")
    cells = [
        (
            *(each["path"], each["messages"], show_bytes(each["bytes"]), len(each["stores"]) or "-"),
            "had it before" if each["already"] else "",
        )
        for each in row["dests"]
    ]
    console().print(table(f"{name} {row['id']}", columns, cells))
    topics = [(each["path"], topic, count) for each in row["dests"] for topic, count in each["topics"].items()]
    console().print(table("", ("target", "topic", "messages>"), topics))
    if row["damaged"]:
        note(f"{row['damaged']} damaged messages were left out")


def show_topics(title: str, topics: Mapping[str, int]) -> None:
    """Messages by topic."""
    console().print(table(title, ("topic", "messages>"), topics.items()))
