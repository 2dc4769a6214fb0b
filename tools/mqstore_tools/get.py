"""`mqstore get`: read messages by queue offset, id, key or physical offset, the newest, or follow new ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from pathlib import Path

import click

from mqstore import Message, QueueRef
from mqstore.engine import Finding, StoreFiles
from mqstore.errors import OffsetOutOfRangeError, TopicNotFoundError
from mqstore_tools.render import body_bytes_option, note, print_finding, print_message, raw_bodies_option
from mqstore_tools.shared import (
    FINDINGS,
    StoreCommand,
    directory_argument,
    json_option,
    note_incomplete,
    refuse_given,
    was_given,
)

_MANY = 100
"""Number of unreadable records after which `get` stops searching for a readable one."""
_PAUSE_S = 0.1
_IN_A_QUEUE = ("queue_id", "offset", "tag")
_NO_GOOD = {
    "--last": ("offset", "max_messages"),
    "--follow": ("offset", "max_messages"),
    "--key": _IN_A_QUEUE,
    "--unique-key": _IN_A_QUEUE,
    "--message-id": ("topic", "max_messages", *_IN_A_QUEUE),
    "--physical-offset": ("topic", "max_messages", *_IN_A_QUEUE),
}
"""Options that have no effect with another one. They are refused, because the user expects an effect."""
_WAYS = ("last", "follow", "key", "unique_key", "message_id", "physical_offset")


@click.command(
    cls=StoreCommand,
    short_help="Print messages by offset, id or key, the newest, or follow new ones.",
    epilog="""\b
Examples:
  mqstore get var/mq --topic orders --offset 100 --max-messages 5
  mqstore get var/mq --topic orders --key o-17 --json
  mqstore get var/mq --topic orders --last 10 --follow
  mqstore get var/mq --message-id 7F000001000000000000000000000400
  mqstore get var/mq --physical-offset 1024""",
)
@directory_argument
@click.option("--topic", help="Topic to read, or to search with --key or --unique-key.")
@click.option("--queue-id", type=click.IntRange(0), help="Queue to read (default 0; all with --last or --follow).")
@click.option("--offset", type=click.IntRange(0), help="First queue offset (default: the first readable one).")
@click.option("--max-messages", type=click.IntRange(1), default=1, show_default=True)
@click.option("--last", type=click.IntRange(1), metavar="N", help="The newest N messages, by store time.")
@click.option(
    "--follow", "-f", is_flag=True, help="Print new messages until interrupted; with --last, after the newest."
)
@click.option("--tag", metavar="EXPR", default="*", help="Only messages with these tags, as in 'created || paid'.")
@click.option("--key", help="Messages with this key, newest first.")
@click.option("--unique-key", help="Messages with this unique key, newest first.")
@click.option("--message-id", help="The message with this offset message id.")
@click.option("--physical-offset", type=click.IntRange(0), help="The message whose record starts there.")
@body_bytes_option
@raw_bodies_option
@json_option
@click.pass_context
def get(
    ctx: click.Context,
    directory: Path,
    topic: str | None,
    queue_id: int | None,
    offset: int | None,
    max_messages: int,
    last: int | None,
    follow: bool,
    tag: str,
    key: str | None,
    unique_key: str | None,
    message_id: str | None,
    physical_offset: int | None,
    body_bytes: int,
    raw_bodies: bool,
    json_output: bool,
) -> None:
    """Print messages of the store in DIR.

    Choose one of: --topic (with --queue-id, --offset, --max-messages, --tag), --topic with --last, --follow or both
    (with --queue-id, --tag), --topic with --key or --unique-key, --message-id, or --physical-offset. --json prints one
    object per line, like `export`.

    Exit code 1 if no message is found, or if messages may be missing from the output. Damage is reported on stderr, and
    so is a queue that lacks messages of the log, or a lost index.
    """
    ways = [f"--{name.replace('_', '-')}" for name in _WAYS if was_given(ctx, name)]
    if len(ways) > 1 and ways != ["--last", "--follow"]:
        raise click.UsageError(f"give only one of {' and '.join(ways)}")
    if topic is None and (not ways or ways[0] not in ("--message-id", "--physical-offset")):
        raise click.UsageError("give --topic, --message-id or --physical-offset")
    if ways:
        refuse_given(ctx, _NO_GOOD[ways[0]], f"does not go with {ways[0]}")
    if ways and ways[0] in ("--key", "--unique-key") and not was_given(ctx, "max_messages"):
        max_messages = 32
    max_messages = last or max_messages
    positions: dict[QueueRef, int] = {}
    with StoreFiles(directory) as store:
        findings: list[Finding] = []
        messages: list[Message] = []
        incomplete: QueueRef | None = None
        place = physical_offset if message_id is None else message_id
        try:
            if last is not None or follow:
                assert topic is not None
                messages, findings = _newest(store, topic, queue_id, last or 0, tag, positions, follow=follow)
            elif place is not None:
                messages = [store.at(place)]
            elif key is not None or unique_key is not None:
                assert topic is not None
                messages = store.find(topic, key=key, unique_key=unique_key, limit=max_messages)
            elif tag != "*":
                assert topic is not None
                queue = QueueRef(topic, queue_id or 0)
                _bounds(store, *queue)
                messages = [*islice(store.iter(queue, offset, tag), max_messages)]
            else:
                assert topic is not None
                messages, findings = _walk(store, topic, queue_id or 0, offset, max_messages)
            if topic is not None and len(messages) < max_messages:
                incomplete = store.unlisted_queue(topic)
        except (TopicNotFoundError, OffsetOutOfRangeError):
            assert topic is not None
            incomplete = store.unlisted_queue(topic)
            if incomplete is None:
                raise
        except LookupError:
            findings = [] if place is None else store.damage_at(place)
            if not findings:
                raise
        shown = [
            print_message(message, json_output=json_output, body_bytes=body_bytes, raw_body=raw_bodies)
            for message in messages
        ]
        for finding in findings:
            print_finding(finding, stderr=True)
        if follow:
            assert topic is not None
            try:
                sys.stdout.flush()  # a program that reads from the pipe waits for each message
                for message in _coming(store, topic, queue_id, tag, positions):
                    print_message(message, json_output=json_output, body_bytes=body_bytes, raw_body=raw_bodies)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                return
        bad = 0 if findings else store.bad_records
        doubt = store.index_doubt() if key is not None or unique_key is not None else ""
    if not shown:
        note("no message")
    if bad:
        note(f"{bad} damaged records were skipped; see `mqstore verify`")
    if incomplete is not None:
        note_incomplete(incomplete, directory)
    if doubt:
        note(f"{doubt}, so keys may be missed: run `mqstore recover {directory} --rebuild index`")
    if bad or findings or incomplete is not None or doubt or not shown or not all(shown):
        ctx.exit(FINDINGS)


def _walk(
    store: StoreFiles, topic: str, queue_id: int, offset: int | None, max_messages: int
) -> tuple[list[Message], list[Finding]]:
    """Return the messages from `offset` on, and findings for unreadable ones before the last message."""
    queue = QueueRef(topic, queue_id)
    low, high = _bounds(store, topic, queue_id)[queue]
    if offset is not None and not low <= offset < max(high, 1):
        raise OffsetOutOfRangeError(f"{topic}, queue {queue_id}, holds offsets from {low} to before {high}", low, high)
    messages: list[Message] = []
    findings: list[Finding] = []
    for item in store.walk(queue, offset):
        if isinstance(item, Finding):
            findings.append(item)
        else:
            messages.append(item)
        if len(messages) == max_messages or len(findings) == _MANY:
            break
    return messages, findings


def _bounds(store: StoreFiles, topic: str, queue_id: int | None) -> dict[QueueRef, tuple[int, int]]:
    """Return the bounds of one queue, or of all. Raises TopicNotFoundError for a missing topic or an empty queue, and
    names queues with messages."""
    bounds = store.bounds(topic)
    if queue_id is None:
        return bounds
    if (queue := QueueRef(topic, queue_id)) not in bounds:
        there = ", ".join(str(each.queue_id) for each in bounds)
        raise TopicNotFoundError(f"queue {queue_id} of {topic!r} is empty; there are messages in {there} (--queue-id)")
    return {queue: bounds[queue]}


def _newest(
    store: StoreFiles,
    topic: str,
    queue_id: int | None,
    count: int,
    tag: str,
    positions: dict[QueueRef, int],
    *,
    follow: bool,
) -> tuple[list[Message], list[Finding]]:
    """Return the last `count` messages and findings for unreadable ones. Sets the `positions` of all queues."""
    bounds: dict[QueueRef, tuple[int, int]] = {}
    try:
        bounds = _bounds(store, topic, queue_id)
    except TopicNotFoundError:
        if not follow:  # otherwise its first message may be on its way
            raise
    newest: list[Message] = []
    findings: list[Finding] = []
    for ref, (low, high) in bounds.items():
        positions[ref] = high
        of_queue: list[Message] = []
        step = count
        while high > low and len(of_queue) < count:
            # Backwards in growing steps, because a filter or damage may leave few messages of a step.
            start = max(low, high - step)
            items = list(store.walk(ref, start, high, tag))
            findings += [item for item in items if isinstance(item, Finding)]
            of_queue[:0] = [item for item in items if isinstance(item, Message)]
            high = start
            step = min(2 * step, 4096)
        newest += of_queue
    newest.sort(key=attrgetter("store_timestamp_ms", "physical_offset"))
    return newest[-count:] if count else [], findings


def _coming(
    store: StoreFiles, topic: str, queue_id: int | None, tag: str, positions: dict[QueueRef, int]
) -> Iterator[Message]:
    """Yield new messages from `positions` on. The topic may not exist yet."""
    while True:
        with suppress(TopicNotFoundError):
            yield from store.follow(topic, positions, tag, queue_id)
        time.sleep(_PAUSE_S)
