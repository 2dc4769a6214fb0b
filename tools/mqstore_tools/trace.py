"""`mqstore trace`: tell what happened to a message."""

from __future__ import annotations

from typing import Any

import click

from mqstore_tools.multi_store import on_spark, spark_option, stores_argument
from mqstore_tools.render import pick, progress, safe, show_tables, when
from mqstore_tools.shared import command, finish


@command(
    short_help="Tell what happened to a message, and where it is.",
    examples="""
  mqstore trace var/mq order-4711
  mqstore trace var/mq orders/0@48 --group billing
  mqstore trace var/mq 7F000001000000000000000000000400 --json
  mqstore trace fleet/* order-4711            # in many stores""",
)
@stores_argument
@click.argument("key", metavar="KEY|ID|OFFSET")
@click.option("--group", "groups", multiple=True, help="Only this group; may be repeated.")
@spark_option
def trace(stores: tuple[str, ...], key: str, groups: tuple[str, ...], master: str | None) -> None:
    """Tell what happened to the messages with this key, id or place, and where they are, for each group.

    KEY is one of a message's keys, its unique key, or the unique name of a queue's item. ID is a message id, such as
    `receipt.id`. OFFSET is TOPIC/QUEUE@OFFSET, or the physical offset of a record. The first of these that leads to a
    message counts.

    Copies for delays, retries and dead letters are followed. Events come from the log, the log of pops with its
    journal, and `cut/`: stored, delayed, delivered, failed with which error, lease ended, retry, dead letter,
    acknowledged. A lease ends at the time at which it was due. A delivery within the program that succeeds at once, and
    a read by offset, leave no record: the message is then done, by the committed offset.

    Notes on stderr say what cannot be known, since it was deleted or is damaged. Exit code 1 if no message is found.
    """
    from mqstore.jobs import trace as follow

    with on_spark(master) as spark, progress("looking", of_bytes=False) as report:
        found = follow(stores, key, groups, spark=spark, progress=report).to_dict()
    tables = [table for message in found["messages"] for table in _tables(message, several=len(stores) > 1)]
    notes = [f"not known: {why}" for why in found["missed"]]
    show_tables(found, *tables, empty=f"no message has the key {found['key']}", notes=notes)
    finish(not found["messages"])


def _tables(message: dict[str, Any], *, several: bool) -> list[tuple[str, tuple[str, ...], list[list[object]]]]:
    facts = [f"{message['store']}: {message['topic']}" if several else message["topic"]]
    facts += [f"tag={message['tag']}"] if message["tag"] is not None else []
    facts += [f"keys={' '.join(message['keys'])}"] if message["keys"] else []
    facts.append(f"id={message['unique_key']}")
    events = [
        [
            when(row["at_ms"]),
            *pick(row, "event group"),
            "{topic}/{queue_id}@{queue_offset}".format(**row),
            _details(row),
        ]
        for row in message["events"]
    ]
    states = [["now", row["state"], row["group"], "", _details(row)] for row in message["groups"]]
    return [(safe("  ".join(facts)), ("time", "event", "group", "message", "details"), events + states)]


def _details(row: dict[str, Any]) -> str:
    facts = [f"attempt {row['attempt']}"] * (row["attempt"] is not None)
    name = row.get("event") or row["state"]
    until = {"delivered": "until", "extended": "until", "leased": "until", "stored": "expires"}.get(name, "due")
    day, due = when(row.get("at_ms"))[:11], when(row["until_ms"])
    facts += [f"{until} {due.removeprefix(day)}"] * (row["until_ms"] is not None)
    return ", ".join([*facts, *filter(None, (row.get("holder"), row["reason"]))])
