"""Messages as `get` prints them: two lines for people, the object of `export` for programs."""

from __future__ import annotations

import base64
from typing import Any

import click

from mqstore import Message
from mqstore.errors import FormatError
from mqstore.layout.compression import MissingPackageError
from mqstore.log.message import row_of
from mqstore_tools.render import as_json, body_text, note, safe, when

__all__ = ["body_bytes_option", "export_row", "print_message", "raw_bodies_option"]

_BODY_BYTES = 1024

body_bytes_option = click.option(
    "--body-bytes",
    type=click.IntRange(0),
    default=_BODY_BYTES,
    show_default=True,
    help="How much of each body people are shown.",
)


raw_bodies_option = click.option(
    "--raw-bodies", is_flag=True, help="Leave compressed bodies as they are stored; sys_flag says how."
)


def export_row(message: Message, *, raw_body: bool = False) -> dict[str, Any]:
    """Return the message as `export` writes it: stored names and units, `body` in base64.

    Raises FormatError or MissingPackageError when a compressed body cannot be inflated, unless `raw_body` leaves it as
    it is stored.
    """
    row = row_of(message, stored=raw_body)
    row["body"] = base64.b64encode(row["body"]).decode("ascii")
    return row


def print_message(message: Message, *, json_output: bool, body_bytes: int, raw_body: bool = False) -> bool:
    """Print one message. Return False if its body could not be inflated, as told on stderr."""
    try:
        if json_output:
            print(as_json(export_row(message, raw_body=raw_body)))
            return True
        body = body_text(message.body_view if raw_body else message.body, body_bytes)
        fine = True
    except (FormatError, MissingPackageError) as error:
        note(f"{message.topic}, queue {message.queue_id}, offset {message.offset}: {error}")
        if json_output:
            return False
        body, fine = body_text(message.body_view, body_bytes), False
    facts = [f"{message.topic}/{message.queue_id}@{message.offset}", when(message.store_timestamp_ms)]
    if message.tag is not None:
        facts.append(f"tag={message.tag}")
    if message.keys:
        facts.append(f"keys={' '.join(message.keys)}")
    facts += [f"{name}={value}" for name, value in message.properties.items()]
    facts.append(f"id={message.message_id}")
    print(safe("  ".join(facts)))
    print(f"    {body}")
    return fine
