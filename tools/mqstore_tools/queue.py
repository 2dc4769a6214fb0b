"""`mqstore queue`: show and purge the items of a queue."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from mqstore.admin import look, offline, queue_topic
from mqstore.errors import FormatError, TopicNotFoundError
from mqstore_tools.render import body_bytes_option, body_text, export_row, safe, show_tables, when
from mqstore_tools.session import (
    DefaultGroup,
    connected,
    dry_run_option,
    purge_after_asking,
    target_argument,
    yes_option,
)

_state_option = click.option(
    "--state", type=click.Choice(["ready", "leased", "retry", "delayed", "dead"]), help="Only items in this state."
)
_name_argument = click.argument("name", metavar="NAME")


@click.group(
    cls=DefaultGroup,
    short_help="Show and purge the items of a queue.",
    examples="""
  mqstore queue var/mq downloads              # the same as: mqstore queue show var/mq downloads
  mqstore queue var/mq downloads --state retry
  mqstore queue purge var/mq downloads --dry-run""",
)
def queue() -> None:
    """Show the items of a queue by state, or remove some.

    `show` only reads, and works while a program has the store open. `purge` takes the writer's lock, or lets the server
    do it that has the store open. See `mqstore queue COMMAND --help`.
    """


@contextmanager
def _items(target: Path, name: str, opening: Callable[[Path], AbstractContextManager[Any]] = look) -> Iterator[Any]:
    """Yield the items of a server's store, or of a directory that no server has. Raises TopicNotFoundError for a name
    that no queue has: nobody has opened one, or it is that of a topic."""
    topic, store = queue_topic(name), connected(target)
    with opening(target) if store is None else store as opened:
        broker = opened if store is None else store.broker
        if broker.topics.get(topic) is None or broker.groups.get(topic) is None:
            raise TopicNotFoundError(
                f"{target} has no queue {name!r}; `mqstore inspect {target}` lists topics and groups"
            )
        yield broker.items


def _row(item: Any) -> dict[str, Any]:
    try:
        message = export_row(item.message)
    except (FormatError, ImportError):  # it cannot be decompressed
        message = export_row(item.message, raw_body=True)
    return {**item._asdict(), "id": item.message.unique_key, "message": message}


def _cells(row: dict[str, Any], body_bytes: int) -> tuple[object, ...]:
    who = row["holder"] or row["reason"] or "-", row["progress"] or "-"
    body = body_text(base64.b64decode(row["message"]["body"]), body_bytes)
    return row["state"], row["attempt"], when(row["until_ms"]), *who, row["id"], body


@queue.command(
    short_help="Show the items of a queue by state. Changes nothing.",
    examples="""
  mqstore queue show var/mq downloads
  mqstore queue show localhost:9876 downloads --state leased
  mqstore queue show var/mq downloads --json | jq .counts.ready""",
)
@target_argument
@_name_argument
@_state_option
@click.option("--limit", type=click.IntRange(0), default=20, help="Maximum number of items to show.")
@body_bytes_option
def show(target: Path, name: str, state: str | None, limit: int, body_bytes: int) -> None:
    """Show the queue NAME in the store in DIR: the number of items by state, and the first items.

    Items that were delivered come first, then ready ones in order, delayed ones and dead letters. If a server has the
    store open, it answers. Otherwise the figures are those on disk: a program that has the store open is some seconds
    ahead, and the holders of leases are not known.
    """
    topic, items, after = queue_topic(name), list[Any](), None
    with _items(target, name) as found:
        counts = found.counts(topic, topic)
        while len(items) < limit:
            page, after = found.page(topic, topic, state, after, min(limit, 256))
            items += page[: limit - len(items)]
            if after is None:
                break
        rows = [_row(item) for item in items]
    cells = [_cells(row, body_bytes) for row in rows]
    columns = ("state", "attempt>", "until", "holder or reason", "progress", "id", "body")
    title = ", ".join(f"{count} {each}" for each, count in counts.items() if count) or "no items"
    value = {"name": name, "topic": topic, "counts": counts, "items": rows}
    show_tables(value, (safe(f"{name}: {title}"), columns, cells))


@queue.command(
    short_help="Remove the items of a queue.",
    examples="""
  mqstore queue purge var/mq downloads --dry-run
  mqstore queue purge var/mq downloads --state delayed --yes
  mqstore queue purge var/mq downloads        # all but dead letters, after a prompt""",
)
@target_argument
@_name_argument
@_state_option
@dry_run_option
@yes_option
def purge(target: Path, name: str, state: str | None, dry_run: bool, yes: bool) -> None:
    """Remove the items of the queue NAME in the store in DIR: those in one state, or all but dead letters. Asks first.

    Leased items are removed, too: a worker that has one can finish, and it is not redelivered if that fails.
    """
    topic = queue_topic(name)
    what = f"{state or ''} items of {name}".strip()
    with _items(target, name, partial(look, alone=True)) as found:
        counts = found.counts(topic, topic)
    count = sum(counts.values()) - counts["dead"] if state is None else counts[state]

    def remove() -> int:
        with _items(target, name, offline) as found:
            removed: int = found.purge(topic, topic, state)
            return removed

    purge_after_asking(count, what, {"name": name, "state": state}, remove, dry_run=dry_run, yes=yes)
