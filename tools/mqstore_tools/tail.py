"""`mqstore tail`: the newest messages of a topic, and with --follow those that come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from heapq import merge
from pathlib import Path

import click

from mqstore import Finding, Message, MessageStore, OffsetOutOfRangeError, QueueRef, TopicNotFoundError
from mqstore.files.quiet import QUIET
from mqstore.log.walk import walk_queue
from mqstore_tools.render import note, print_finding
from mqstore_tools.shared import FINDINGS, StoreCommand, directory_argument, json_option
from mqstore_tools.shown import body_bytes_option, print_message

__all__ = ["tail"]

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.001, 0.1


@click.command(
    cls=StoreCommand,
    short_help="Print the newest messages of a topic; with --follow those that come.",
    epilog="""\b
Examples:
  mqstore tail var/mq --topic orders
  mqstore tail var/mq --topic orders --follow
  mqstore tail var/mq --topic orders --queue-id 2 -n 100 --json""",
)
@directory_argument
@click.option("--topic", required=True)
@click.option("--queue-id", type=click.IntRange(0), help="One queue; without it all, merged by store time.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until interrupted.")
@click.option("-n", "count", type=click.IntRange(0), default=10, show_default=True, help="Messages to begin with.")
@click.option("--tag", metavar="EXPR", default="*", help="Only messages of these tags, as in 'created || paid'.")
@body_bytes_option
@json_option
@click.pass_context
def tail(
    ctx: click.Context,
    directory: Path,
    topic: str,
    queue_id: int | None,
    follow: bool,
    count: int,
    tag: str,
    body_bytes: int,
    json_output: bool,
) -> None:
    """Print the newest messages of a topic of the store in DIR.

    Reads beside the writer and never disturbs it. With --json one object a line, as `export` has it.
    """
    fine = True
    with MessageStore(directory, "r", fs=QUIET) as store:
        try:
            positions: dict[QueueRef, int] = {}
            findings: list[Finding] = []
            for message in _newest(store, topic, queue_id, count, tag, positions, findings, follow=follow):
                fine &= print_message(message, json_output=json_output, body_bytes=body_bytes)
            for finding in findings:
                print_finding(finding, stderr=True)
            if follow:
                for message in _coming(store, topic, queue_id, tag, positions):
                    print_message(message, json_output=json_output, body_bytes=body_bytes)
        except KeyboardInterrupt:
            if not follow:
                raise
    if not follow and (findings or not fine):
        ctx.exit(FINDINGS)


def _queues(store: MessageStore, topic: str, queue_id: int | None) -> list[QueueRef]:
    if queue_id is None:
        return store.queues(topic)
    store.offsets(topic, queue_id)
    return [QueueRef(topic, queue_id)]


def _newest(
    store: MessageStore,
    topic: str,
    queue_id: int | None,
    count: int,
    tag: str,
    positions: dict[QueueRef, int],
    findings: list[Finding],
    *,
    follow: bool,
) -> list[Message]:
    """The last `count` messages; `positions` then says where each queue goes on, `findings` what could not be read."""
    try:
        refs = _queues(store, topic, queue_id)
    except TopicNotFoundError:
        if not follow:
            raise
        return []  # its first message may be on its way
    newest: list[Message] = []
    for ref in refs:
        low, high = store.offsets(*ref)
        positions[ref] = high
        of_queue: list[Message] = []
        step = count
        while count and high > low and len(of_queue) < count:
            # Backwards, further each time: a filter, or damage, may leave few of many.
            start = max(low, high - step)
            if tag == "*":
                items = list(walk_queue(store, *ref, start, high))
                findings += [item for item in items if isinstance(item, Finding)]
                of_queue = [item for item in items if isinstance(item, Message)] + of_queue
            else:
                of_queue = list(_between(store, ref, start, high, tag)) + of_queue
            high = start
            step = min(2 * step, 4096)
        newest += of_queue[-count:] if count else []
    newest.sort(key=lambda message: (message.store_timestamp_ms, message.physical_offset))
    return newest[-count:] if count else []


def _between(store: MessageStore, ref: QueueRef, start: int, stop: int, tag: str) -> Iterator[Message]:
    """Messages of offsets [start, stop), or of those that retention has left."""
    while True:
        try:
            yield from store.iter(*ref, start=start, stop=stop, tags=tag)
            return
        except OffsetOutOfRangeError as error:  # before the first message
            start = error.min_offset


def _coming(
    store: MessageStore, topic: str, queue_id: int | None, tag: str, positions: dict[QueueRef, int]
) -> Iterator[Message]:
    """Messages from `positions` on as they come, merged within each look; queues that appear begin at their start."""
    pause = _PAUSE_MIN_S
    while True:
        try:
            for ref in _queues(store, topic, queue_id):
                positions.setdefault(ref, store.offsets(*ref)[0])
        except TopicNotFoundError:
            pass
        seen = False
        for message in merge(
            *(_round(store, ref, tag, positions) for ref in list(positions)),
            key=lambda message: (message.store_timestamp_ms, message.physical_offset),
        ):
            seen = True
            yield message
        pause = _PAUSE_MIN_S if seen else min(2 * pause, _PAUSE_MAX_S)
        time.sleep(pause)


def _round(store: MessageStore, ref: QueueRef, tag: str, positions: dict[QueueRef, int]) -> Iterator[Message]:
    try:
        while True:
            result = store.get(*ref, positions[ref], tags=tag)
            if result.status in ("OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY"):
                raise OffsetOutOfRangeError("", result.min_offset, result.max_offset)
            if result.next_offset <= positions[ref]:
                return
            positions[ref] = result.next_offset
            yield from result.messages
    except OffsetOutOfRangeError as error:
        # Retention passed us, or the writer came back after a crash and cut a torn tail.
        bound = error.min_offset if positions[ref] < error.min_offset else error.max_offset
        note(f"{ref.topic}, queue {ref.queue_id}: offset {positions[ref]} is gone; going on at {bound}")
        positions[ref] = bound
