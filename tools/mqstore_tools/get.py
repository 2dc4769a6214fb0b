"""`mqstore get`: read single messages, by queue offset, id, key or physical offset."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Literal

import click

from mqstore import Finding, Message, MessageStore, OffsetOutOfRangeError, QueueRef, TopicNotFoundError
from mqstore.files.quiet import QUIET
from mqstore.layout.messageid import decode_message_id
from mqstore.log.walk import damage_at, walk_queue
from mqstore_tools.render import note, print_finding
from mqstore_tools.shared import (
    FINDINGS,
    StoreCommand,
    directory_argument,
    index_options,
    java_config,
    json_option,
    note_incomplete,
)
from mqstore_tools.shown import body_bytes_option, print_message, raw_bodies_option

__all__ = ["get"]

_MANY = 100
"""Unreadable records after which `get` gives up looking for a readable one."""
_IN_A_QUEUE = ("queue_id", "offset", "tag")
_NO_GOOD = {
    "--key": _IN_A_QUEUE,
    "--unique-key": _IN_A_QUEUE,
    "--message-id": ("topic", "max_messages", *_IN_A_QUEUE),
    "--physical-offset": ("topic", "max_messages", *_IN_A_QUEUE),
}
"""Options that a way of asking has no use for: whoever gave them would take the answer for one that heeds them."""


@click.command(
    cls=StoreCommand,
    short_help="Print messages by offset, id, key or physical offset.",
    epilog="""\b
Examples:
  mqstore get var/mq --topic orders --offset 100 --max-messages 5
  mqstore get var/mq --topic orders --key o-17 --json
  mqstore get var/mq --message-id 7F000001000000000000000000000400
  mqstore get var/mq --physical-offset 1024""",
)
@directory_argument
@click.option("--topic", help="Topic to read, or to search with --key or --unique-key.")
@click.option("--queue-id", type=click.IntRange(0), default=0, show_default=True)
@click.option("--offset", type=click.IntRange(0), help="First queue offset; without it the first there is.")
@click.option("--max-messages", type=click.IntRange(1), default=1, show_default=True)
@click.option("--tag", metavar="EXPR", default="*", help="Only messages of these tags, as in 'created || paid'.")
@click.option("--key", help="Messages that bear this key, newest first.")
@click.option("--unique-key", help="Messages of this unique key, newest first.")
@click.option("--message-id", help="The message with this offset message id.")
@click.option("--physical-offset", type=click.IntRange(0), help="The message whose record starts there.")
@body_bytes_option
@raw_bodies_option
@index_options
@json_option
@click.pass_context
def get(
    ctx: click.Context,
    directory: Path,
    topic: str | None,
    queue_id: int,
    offset: int | None,
    max_messages: int,
    tag: str,
    key: str | None,
    unique_key: str | None,
    message_id: str | None,
    physical_offset: int | None,
    body_bytes: int,
    raw_bodies: bool,
    index_slots: int | None,
    index_entries: int | None,
    json_output: bool,
) -> None:
    """Print messages of the store in DIR.

    One way of asking at a time: --topic (with --queue-id, --offset, --max-messages, --tag), --topic with --key or
    --unique-key, --message-id, or --physical-offset. With --json one object a line, as `export` has it.

    Exit code 1 if there is no such message, or if there may be more than is shown: damage is named on stderr, and so is
    a queue that lacks messages of the log, or an index that is lost.
    """
    ways = [name for name, value in _ways(key, unique_key, message_id, physical_offset) if value is not None]
    if len(ways) > 1:
        raise click.UsageError(f"{' and '.join(ways)}: one of them")
    if topic is None and (not ways or ways[0] in ("--key", "--unique-key")):
        raise click.UsageError("give --topic, --message-id or --physical-offset")
    for name in _NO_GOOD[ways[0]] if ways else ():
        if _given(ctx, name):
            raise click.UsageError(f"--{name.replace('_', '-')} does not go with {ways[0]}")
    if ways and ways[0] in ("--key", "--unique-key") and not _given(ctx, "max_messages"):
        max_messages = 32
    with MessageStore(directory, "r", config=java_config(index_slots, index_entries), fs=QUIET) as store:
        findings: list[Finding] = []
        messages: list[Message] = []
        incomplete: QueueRef | None = None
        try:
            if ways or tag != "*":
                messages = _find(
                    store, topic, queue_id, offset, max_messages, tag, key, unique_key, message_id, physical_offset
                )
            else:
                assert topic is not None
                messages, findings = _walk(store, topic, queue_id, offset, max_messages)
            if topic is not None and len(messages) < max_messages:
                incomplete = store.unlisted_queue({topic})
        except (TopicNotFoundError, OffsetOutOfRangeError):
            assert topic is not None
            incomplete = store.unlisted_queue({topic})
            if incomplete is None:
                raise
        except LookupError:
            place = physical_offset if message_id is None else decode_message_id(message_id)[1]
            findings = [] if place is None else [*damage_at(store, place)]
            if not findings:
                raise
        shown = [
            print_message(message, json_output=json_output, body_bytes=body_bytes, raw_body=raw_bodies)
            for message in messages
        ]
        for finding in findings:
            print_finding(finding, stderr=True)
        bad = 0 if findings else store.stats().bad_records
        doubt = store.index_doubt() if key is not None or unique_key is not None else ""
    if not shown:
        note("no message")
    if bad:
        note(f"{bad} records do not verify and were passed over; see `mqstore verify`")
    if incomplete is not None:
        note_incomplete(incomplete, directory)
    if doubt:
        note(f"{doubt}, so keys may be missed: run `mqstore recover {directory} --rebuild index`")
    if bad or findings or incomplete is not None or doubt or not shown or not all(shown):
        ctx.exit(FINDINGS)


def _ways(
    key: str | None, unique_key: str | None, message_id: str | None, physical_offset: int | None
) -> list[tuple[str, object]]:
    return [
        ("--key", key),
        ("--unique-key", unique_key),
        ("--message-id", message_id),
        ("--physical-offset", physical_offset),
    ]


def _given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _walk(
    store: MessageStore, topic: str, queue_id: int, offset: int | None, max_messages: int
) -> tuple[list[Message], list[Finding]]:
    """The messages from `offset` on, and what cannot be read before the last of them."""
    _check_queue(store, topic, queue_id)
    low, high = store.offsets(topic, queue_id)
    if offset is not None and not low <= offset < max(high, 1):
        raise OffsetOutOfRangeError(f"{topic}, queue {queue_id}, holds offsets from {low} to before {high}", low, high)
    messages: list[Message] = []
    findings: list[Finding] = []
    for item in walk_queue(store, topic, queue_id, offset):
        if isinstance(item, Finding):
            findings.append(item)
        else:
            messages.append(item)
        if len(messages) == max_messages or len(findings) == _MANY:
            break
    return messages, findings


def _find(
    store: MessageStore,
    topic: str | None,
    queue_id: int,
    offset: int | None,
    max_messages: int,
    tag: str,
    key: str | None,
    unique_key: str | None,
    message_id: str | None,
    physical_offset: int | None,
) -> list[Message]:
    if message_id is not None:
        return [store.get_by_id(message_id)]
    if physical_offset is not None:
        return [store.at(physical_offset)]
    assert topic is not None
    if key is not None or unique_key is not None:
        store.queues(topic)  # an unknown topic is said to be one
        return store.find(topic, key=key, unique_key=unique_key, limit=max_messages)
    _check_queue(store, topic, queue_id)
    start: Literal["earliest"] | int = "earliest" if offset is None else offset
    return [*islice(store.iter(topic, queue_id, start=start, tags=tag), max_messages)]


def _check_queue(store: MessageStore, topic: str, queue_id: int) -> None:
    """TopicNotFoundError for a topic that is not there, or a queue without messages; that tells which have some."""
    held = [queue.queue_id for queue in store.queues(topic)]
    if queue_id not in held:
        there = ", ".join(map(str, held))
        raise TopicNotFoundError(
            f"queue {queue_id} of {topic!r} holds nothing; there are messages in {there} (--queue-id)"
        )
