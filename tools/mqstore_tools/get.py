"""`mqstore get`: messages by place, by key, time, tag, properties and body, the newest, or new ones as they come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import click

from mqstore import Message, QueueRef
from mqstore.admin import Search, inspect_file
from mqstore.engine import Finding, StoreFiles
from mqstore.errors import InvalidMessageError, MissingFileError, OffsetOutOfRangeError, TopicNotFoundError
from mqstore_tools.multi_store import FILTERS, from_option, search_of, until_option, where_option, with_options
from mqstore_tools.render import (
    body_bytes_option,
    json_asked,
    note,
    note_searched,
    print_finding,
    print_items,
    print_message,
    raw_bodies_option,
)
from mqstore_tools.shared import command, directory_argument, finish, note_incomplete, refuse_given, was_given

_MANY = 100
"""Number of unreadable records after which `get` stops searching for a readable one."""
_FOUND = 32
"""Default limit of a search."""
_PAUSE_S = 0.1
_CHOICE = ("topic", "queue_id", "offset", "max_messages", "start", "stop", "where", "key", "unique_key", "tags", "grep")
_NO_GOOD = {
    "last": ("offset", "max_messages"),
    "follow": ("offset", "max_messages"),
    "message_id": _CHOICE,
    "physical_offset": _CHOICE,
}
"""Options that have no effect with another one. They are refused, because the user expects an effect."""


@command(
    short_help="Print messages by place, key, time or content, or follow new ones.",
    examples="""
  mqstore get var/mq --topic orders --offset 100 --limit 5
  mqstore get var/mq --key o-17 --json
  mqstore get var/mq --from 2026-01-31T02:00 --until 2026-01-31T02:10 \\
      --grep 'card \\d+ refused'
  mqstore get var/mq --topic orders --where "amount > 100" --from 1h
  mqstore get var/mq --topic orders --last 10 --follow
  mqstore get var/mq --id 7F000001000000000000000000000400
  mqstore get var/mq --physical-offset 1024 --hex""",
)
@with_options(
    directory_argument,
    click.option("--topic", help="Topic to read or search. Default of a search: all."),
    click.option("--queue-id", type=click.IntRange(0), help="Only this queue (with --offset: default 0)."),
    click.option("--offset", type=click.IntRange(0), help="First queue offset."),
    click.option(
        "--limit",
        "--max-messages",
        "max_messages",
        type=click.IntRange(1),
        metavar="N",
        help=f"Print at most N messages (default {_FOUND}, with --offset 1).",
    ),
    click.option("--last", type=click.IntRange(1), metavar="N", help="The newest N messages, by store time."),
    click.option(
        "--follow", "-f", is_flag=True, help="Print new messages until interrupted; with --last, after the newest."
    ),
    *FILTERS,
    from_option,
    until_option,
    where_option,
    click.option("--id", "--message-id", "message_id", help="The message with this message id, or unique key."),
    click.option("--physical-offset", type=click.IntRange(0), help="The message whose record starts there."),
    click.option("--hex", "in_hex", is_flag=True, help="Print the fields of each record with their bytes."),
    body_bytes_option,
    raw_bodies_option,
)
def get(
    directory: Path,
    topic: str | None,
    queue_id: int | None,
    offset: int | None,
    max_messages: int | None,
    last: int | None,
    follow: bool,
    message_id: str | None,
    physical_offset: int | None,
    in_hex: bool,
    body_bytes: int,
    raw_bodies: bool,
    **filters: Any,
) -> None:
    """Print messages of the store in DIR.

    Choose a place: --topic with --queue-id or --offset, with --last or with --follow, --id, or --physical-offset.
    Or search: --topic, --key, --unique-key, --tag, --from, --until, --where and --grep must all match. A search without
    --topic reads all topics. Copies for a retry, a delay or a dead letter are found in the topics where they are
    stored, not by the --topic to which they were sent. A filter also chooses among the messages of a place.

    A search uses the index for keys, the queues of a --topic, or else the log, and reads only the time that is asked
    for. Keys are found newest first, everything else in the order of the log. A line on stderr counts the messages that
    were read, with --json as JSON. --grep reads bodies decompressed, as bytes; a pattern that backtracks without end
    takes its time.

    --json prints one object per line, like `export`. Exit code 1 if no message is found, or if messages may be missing
    from the output. Damage is reported on stderr, and so is a queue that lacks messages of the log, or a lost index.
    --hex also prints a damaged record at a --physical-offset; see `mqstore inspect --file` for other files.
    """
    ways = [name for name in _NO_GOOD if was_given(name)]
    if len(ways) > 1 and ways != ["last", "follow"]:
        raise click.UsageError(f"give only one of {' and '.join(map(_option, ways))}")
    if ways:
        refuse_given(_NO_GOOD[ways[0]], f"does not go with {_option(ways[0])}")
    search = search_of(() if topic is None else (topic,), queue_id, filters)
    searches = (bool(search) or queue_id is None) and offset is None and not ways
    if topic is None and not search and not {*ways} & {"message_id", "physical_offset"}:
        raise click.UsageError("give --topic, --id, --physical-offset, or a filter")
    search.limit = max_messages = last or max_messages or (_FOUND if offset is None else 1)

    def show_hex(place: int) -> bool:
        try:
            found = inspect_file(directory, offset=place, limit=1)
        except (OffsetOutOfRangeError, MissingFileError) as error:  # perhaps a writer has just deleted its segment
            note(str(error))
            return False
        return print_items(found)

    def show(message: Message) -> bool:
        if in_hex:
            return show_hex(message.physical_offset)
        return print_message(message, json_output=json_asked(), body_bytes=body_bytes, raw_body=raw_bodies)

    shown = unread = undecoded = 0
    wrong: Exception | None = None
    with StoreFiles(directory) as store:
        if in_hex and physical_offset is not None:
            finish(not show_hex(physical_offset))
            return
        found: Iterable[Message | Finding] = ()
        place = physical_offset if message_id is None else message_id
        try:
            if place is not None:
                found = _at(store, place, search)
            elif searches:
                found = search.run(store)
            elif last is not None or follow:
                found = _newest(store, topic or "", queue_id, last or 0, search, follow=follow)
            else:
                found = _walk(store, topic or "", queue_id or 0, offset, search)
            for item in found:
                if isinstance(item, Finding):
                    unread += 1
                    print_finding(item, stderr=True)
                else:
                    shown += 1
                    undecoded += not show(item)
                if follow:
                    sys.stdout.flush()  # a program that reads from the pipe waits for each message
        except KeyboardInterrupt:
            if not follow:
                raise
            return
        except (TopicNotFoundError, OffsetOutOfRangeError) as error:
            wrong = error
        incomplete = None if topic is None or shown >= max_messages else store.unlisted_queue(topic)
        if wrong is not None and incomplete is None:
            raise wrong
        bad = 0 if unread else store.bad_records
    if not shown:
        note("no message")
    if bad:
        note(f"{bad} damaged records were skipped; see `mqstore verify`")
    if incomplete is not None:
        note_incomplete(incomplete, directory)
    if search or searches:
        note_searched(search, limited=shown == max_messages)
    finish(bad or unread or incomplete is not None or search.missed or not shown or undecoded)


def _option(name: str) -> str:
    return "--id" if name == "message_id" else f"--{name.replace('_', '-')}"


def _at(store: StoreFiles, place: int | str, search: Search) -> list[Message | Finding]:
    """Return the message at a physical offset, or those with an id: the address of a record, or a unique key.
    If there is none, return the damage there. Raises LookupError, and InvalidMessageError."""
    try:
        return [store.at(place)]
    except (LookupError, InvalidMessageError) as error:
        found: list[Message | Finding] = []
        if isinstance(place, str):
            search.unique_key = place
            found = [*search.run(store)]
        if not found and isinstance(error, LookupError):
            found = [*store.damage_at(place)]
        if not found:
            raise
        return found


def _walk(
    store: StoreFiles, topic: str, queue_id: int, offset: int | None, search: Search
) -> Iterator[Message | Finding]:
    """Yield the messages from `offset` on that match, and findings for unreadable ones before the last message."""
    queue = QueueRef(topic, queue_id)
    low, high = _bounds(store, topic, queue_id)[queue]
    if offset is not None and not low <= offset < max(high, 1):
        raise OffsetOutOfRangeError(f"{topic}, queue {queue_id}, holds offsets from {low} to before {high}", low, high)
    left, bad = search.limit or _FOUND, _MANY
    for item in search.passing(store.walk(queue, offset)):
        yield item
        bad -= isinstance(item, Finding)
        left -= isinstance(item, Message)
        if not left or not bad:
            break


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
    store: StoreFiles, topic: str, queue_id: int | None, count: int, search: Search, *, follow: bool
) -> Iterator[Message | Finding]:
    """Yield the last `count` messages that match, findings for unreadable ones, and with `follow` new messages."""
    bounds: dict[QueueRef, tuple[int, int]] = {}
    try:
        bounds = _bounds(store, topic, queue_id)
    except TopicNotFoundError:
        if not follow:  # otherwise its first message may be on its way
            raise
    positions = {ref: high for ref, (_, high) in bounds.items()}
    newest: list[Message] = []
    findings: list[Finding] = []
    for ref, (low, high) in bounds.items():
        of_queue: list[Message] = []
        step = count
        while high > low and len(of_queue) < count:
            # Backwards in growing steps, because a filter or damage may leave few messages of a step.
            start = max(low, high - step)
            items = [*search.passing(store.walk(ref, start, high))]
            findings += [item for item in items if isinstance(item, Finding)]
            of_queue[:0] = [item for item in items if isinstance(item, Message)]
            high = start
            step = min(2 * step, 4096)
        newest += of_queue
    newest.sort(key=attrgetter("store_timestamp_ms", "physical_offset"))
    yield from (*(newest[-count:] if count else ()), *findings)
    while follow:  # the topic may not exist yet
        with suppress(TopicNotFoundError):
            yield from search.passing(store.follow(topic, positions, "*", queue_id))
        time.sleep(_PAUSE_S)
