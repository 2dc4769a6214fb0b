"""`mqstore topics`: show and change topics."""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path
from typing import Any

import click

from mqstore_tools.render import pick, show_tables
from mqstore_tools.session import (
    DefaultGroup,
    carry_out,
    delete_after_asking,
    dry_run_option,
    examine,
    target_argument,
    yes_option,
)

_OF_GROUPS = ("%RETRY%", "%DLQ%")
"""Prefixes of topics that have retries and dead letters."""
_QUEUES = click.IntRange(1, 16_384)
_TYPES = click.Choice(["unspecified", "normal", "fifo", "delay", "transaction", "mixed"], case_sensitive=False)
_PERM = click.Choice(["r", "w", "rw", "none"])
_PERMS = {"none": 0, "w": 2, "r": 4, "rw": 6}


@click.group(
    cls=DefaultGroup,
    short_help="Show, create, alter and delete topics.",
    examples="""
  mqstore topics var/mq                       # the same as: mqstore topics list var/mq
  mqstore topics var/mq --json | jq -r '.topics[].name'
  mqstore topics create var/mq orders --queues 8 --type fifo
  mqstore topics alter 127.0.0.1:9876 orders --perm r
  mqstore topics delete var/mq orders --dry-run""",
)
def topics() -> None:
    """Show, create, alter and delete topics.

    `list` only reads, and works while a broker runs. The others take the writer's lock, or let the server do it that
    has the store open. See `mqstore topics COMMAND --help`.
    """


@topics.command(
    "list",
    short_help="Show topics. Changes nothing.",
    examples="""
  mqstore topics list var/mq
  mqstore topics list var/mq --system --json""",
)
@target_argument
@click.option("--system", is_flag=True, help="Include retry, dead-letter and system topics.")
def list_(target: Path, system: bool) -> None:
    """Show the topics of the store in DIR: queues, permissions, type, messages, and groups that consume them.

    A topic without an entry in config/topics.json, for example because config/ is missing, is shown with the queues
    that have messages.
    """
    with examine(target) as desk:
        rows = [topic_row(view) for view in desk.topics(system)]
    rows = [row for row in rows if system or not row["name"].startswith(_OF_GROUPS)]
    cells = [
        [
            *pick(row, "name read_queues write_queues"),
            _perm_text(row["perm"]),
            row["message_type"].lower(),
            row["messages"],
            " ".join(row["groups"]) or "-",
        ]
        for row in rows
    ]
    columns = ("topic", "read queues>", "write queues>", "perm", "type", "messages>", "groups")
    show_tables({"topics": rows}, ("", columns, cells))


def _perm_text(perm: int) -> str:
    return "".join(letter for letter, bit in (("r", 4), ("w", 2)) if perm & bit) or "none"


def topic_row(view: Any) -> dict[str, Any]:
    """Return a topic as JSON has it."""
    names = ("name", "read_queues", "write_queues", "perm", "order", "message_type")
    row = {name: getattr(view.config, name) for name in names}
    return {**row, "attributes": dict(view.config.attributes), "messages": view.messages, "groups": view.groups}


@topics.command(
    short_help="Create a topic.",
    examples="""
  mqstore topics create var/mq orders
  mqstore topics create var/mq orders --queues 8 --type fifo
  mqstore topics create var/mq orders --dry-run""",
)
@target_argument
@click.argument("name")
@click.option("--queues", type=_QUEUES, help="Number of queues (default 4).")
@click.option("--type", "type_", type=_TYPES, help="Type of its messages (default unspecified).")
@click.option("--perm", type=_PERM, default="rw", help="Permissions: r to read, w to write.")
@dry_run_option
def create(target: Path, name: str, queues: int | None, type_: str | None, perm: str, dry_run: bool) -> None:
    """Create the topic NAME in the store in DIR."""
    message_type = None if type_ is None else type_.upper()
    change = methodcaller("create_topic", name, queues, _PERMS[perm], message_type, dry_run=dry_run)
    carry_out(f"create topic {name}", target, change, topic_row, dry_run=dry_run)


@topics.command(
    short_help="Change a topic.",
    examples="""
  mqstore topics alter var/mq orders --perm r              # refuse new messages
  mqstore topics alter var/mq orders --write-queues 4      # fewer queues: first for senders, and
  mqstore topics alter var/mq orders --read-queues 4       # for readers once the others are drained""",
)
@target_argument
@click.argument("name")
@click.option("--queues", type=_QUEUES, help="Number of queues.")
@click.option("--read-queues", type=_QUEUES, help="Number of queues that consumers read.")
@click.option("--write-queues", type=_QUEUES, help="Number of queues that producers write to.")
@click.option("--perm", type=_PERM, help="Permissions: r to read, w to write.")
@click.option("--type", "type_", type=_TYPES, help="Type of its messages.")
@click.option("--force", is_flag=True, help="Even if messages remain in queues that nobody reads, or order is lost.")
@dry_run_option
def alter(
    target: Path,
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str | None,
    type_: str | None,
    force: bool,
    dry_run: bool,
) -> None:
    """Change the given settings of the topic NAME in the store in DIR.

    The queue of a message group depends on the number of write queues. With another number a group continues in
    another queue, and its order across the change is lost. A topic that is being consumed needs --force for this.
    """
    if all(value is None for value in (queues, read_queues, write_queues, perm, type_)):
        raise click.UsageError("give --queues, --read-queues, --write-queues, --perm or --type")

    settings = {
        "queues": queues,
        "read_queues": read_queues,
        "write_queues": write_queues,
        "perm": None if perm is None else _PERMS[perm],
        "message_type": None if type_ is None else type_.upper(),
    }
    change = methodcaller("alter_topic", name, settings, force=force, dry_run=dry_run)
    carry_out(f"alter topic {name}", target, change, topic_row, dry_run=dry_run)


@topics.command(
    short_help="Delete a topic, its messages and its committed offsets.",
    examples="""
  mqstore topics delete var/mq orders --dry-run
  mqstore topics delete var/mq orders --force --yes""",
)
@target_argument
@click.argument("name")
@click.option("--force", is_flag=True, help="Even if groups consume it. Messages they have not consumed are lost.")
@dry_run_option
@yes_option
def delete(target: Path, name: str, force: bool, dry_run: bool, yes: bool) -> None:
    """Delete the topic NAME in the store in DIR: its messages, its retries, and all groups' offsets in it.

    Asks first. If the topic is created again, its queue offsets continue. Disk space is freed as segments are deleted.
    """

    def describe(view: Any) -> tuple[str, dict[str, Any]]:
        what = f"topic {name}, {view.messages} messages"
        what += f", the offsets of {', '.join(view.groups)}" if view.groups else ""
        return what, {"name": name, "messages": view.messages, "groups": view.groups}

    def delete(desk: Any, **how: Any) -> Any:
        return desk.delete_topic(name, force=force, **how)

    delete_after_asking(target, delete, describe, dry_run=dry_run, yes=yes)
