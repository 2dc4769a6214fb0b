"""`mqstore put`: append messages from the command line, a file, or the lines of stdin."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import click

from mqstore import (
    ConfigError,
    Durability,
    InvalidMessageError,
    MQStoreError,
    NotAStoreError,
    OutgoingMessage,
    SendReceipt,
    StoreConfig,
)
from mqstore.broker.names import is_system_topic
from mqstore.errors import NotPermittedError
from mqstore.files.lock import refuse_beside_writer
from mqstore.files.quiet import QUIET
from mqstore.log.names import check_topic
from mqstore.log.outgoing import user_properties
from mqstore.log.store import MessageStore
from mqstore.log.writer import MAX_QUEUE_ID
from mqstore_tools.opened import looking
from mqstore_tools.render import as_json, note, safe
from mqstore_tools.shared import StoreCommand, directory_argument, json_option

__all__ = ["put"]

_CHUNK = 1000
_CHUNK_BYTES = 4 << 20


@click.command(
    cls=StoreCommand,
    short_help="Append messages.",
    epilog="""\b
Examples:
  mqstore put var/mq orders 'hello' --tag created --key o-17 --property region=eu
  mqstore put var/mq orders --file invoice.pdf --durability flush
  seq 1000 | mqstore put var/mq numbers -      # a message a line
  mqstore put var/mq orders hello --dry-run --no-create""",
)
@directory_argument
@click.argument("topic")
@click.argument("body", required=False)
@click.option(
    "--file", "file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The body is in FILE."
)
@click.option("--tag", help="Tag, for readers that filter.")
@click.option("--key", "keys", multiple=True, help="Key to find the message by; may be repeated.")
@click.option("--unique-key", help="What stays the same in every copy of the message.")
@click.option("--property", "properties", metavar="NAME=VALUE", multiple=True, help="User property; may be repeated.")
@click.option("--queue-id", type=click.IntRange(0, MAX_QUEUE_ID), default=0, show_default=True)
@click.option(
    "--durability",
    type=click.Choice(["append", "flush"]),
    default="append",
    show_default=True,
    help="append: in the page cache when this returns; flush: on disk.",
)
@click.option("--create/--no-create", default=True, show_default=True, help="Make the store if DIR holds none.")
@click.option("--dry-run", is_flag=True, help="Check everything, write nothing.")
@json_option
def put(
    directory: Path,
    topic: str,
    body: str | None,
    file: Path | None,
    tag: str | None,
    keys: tuple[str, ...],
    unique_key: str | None,
    properties: tuple[str, ...],
    queue_id: int,
    durability: Durability,
    create: bool,
    dry_run: bool,
    json_output: bool,
) -> None:
    """Append BODY to TOPIC in the store in DIR; with BODY - each line of stdin, without its line end, is a message.

    One queue of the log, and nothing else: no turns, message groups or delays. For those see `mqstore produce`.

    Takes the writer's lock for as long as it runs. Prints where the message went; with --json one object a message.
    """
    if is_system_topic(topic) or topic.startswith("%"):  # retries and dead letters carry marks that this does not make
        raise click.UsageError(f"topic {topic!r} belongs to the engine; choose another name")
    if (body is None) == (file is None):
        raise click.UsageError("give BODY, - for the lines of stdin, or --file: one of them")
    if unique_key is not None and body == "-":
        raise click.UsageError("--unique-key belongs to one message, not to the lines of stdin")
    pairs: dict[str, str] = {}
    for pair in properties:
        name, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"--property {pair!r} is not NAME=VALUE")
        pairs[name] = value

    def message(data: bytes) -> OutgoingMessage:
        return OutgoingMessage(data, tag, keys or None, pairs or None, unique_key)

    if file is not None:
        bodies: Iterator[bytes] = iter([_read(file)])
    elif body == "-":
        bodies = _lines(sys.stdin.buffer)
    else:
        assert body is not None
        bodies = iter([os.fsencode(body)])
    _check_table(directory, topic, queue_id)
    if dry_run:
        check_topic(topic)
        user_properties(tag, keys or None, pairs or None, unique_key)
        count, size = _dry_run(directory, bodies, create=create)
        plan = {"dry_run": True, "topic": topic, "queue_id": queue_id, "messages": count, "body_bytes": size}
        print(
            as_json(plan) if json_output else safe(f"would put {count} messages, {size} bytes, to {topic}/{queue_id}")
        )
        return
    total = 0
    first: SendReceipt | None = None
    last: SendReceipt | None = None

    def took(receipts: Sequence[SendReceipt]) -> None:
        nonlocal total, first, last
        total += len(receipts)
        first, last = first or receipts[0], receipts[-1]
        if json_output:
            for receipt in receipts:
                print(as_json(_receipt(receipt)))

    with MessageStore(directory, create=create, durability=durability) as store:
        try:
            for chunk in _chunks(bodies):
                took(store.put_many(topic, [message(data) for data in chunk], queue_id))
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, MQStoreError) and error.receipts:
                took(cast(Sequence[SendReceipt], error.receipts))
            if body == "-" and total:  # or they would be put again with the rest
                note(f"the first {total} lines were stored, none behind them:")
            raise
        if total == 0:
            note("no line, no message")
        elif not json_output and first is not None and last is not None:
            offsets = f"offset {first.offset}" if total == 1 else f"offsets {first.offset}..{last.offset}"
            identity = f", id {first.message_id}" if total == 1 else ""
            noun = "message" if total == 1 else "messages"
            print(safe(f"put {total} {noun} to {topic}/{queue_id}, {offsets}{identity}"))


def _check_table(directory: Path, topic: str, queue_id: int) -> None:
    """Refuse a queue that no consumer would ever look into, and a topic that is closed for writing, as the broker's
    table of topics has it. A topic that is not in it has the queues that are put to."""
    try:
        with looking(directory) as parts:
            config = parts.topics.entered(topic)
    except NotAStoreError:  # to be made, or refused, by who opens it for writing
        return
    if config is None:
        return
    if not config.writable:
        raise NotPermittedError(f"topic {topic!r} may not be written to (perm {config.perm}); alter it to 6")
    queues = max(config.write_queues, config.read_queues)
    if queue_id >= queues:
        raise InvalidMessageError(
            f"queue_id {queue_id} does not lie in 0..{queues - 1}, the queues of {topic!r}; nobody would read it",
            "queue_id",
        )


def _receipt(receipt: SendReceipt) -> dict[str, object]:
    return {
        "topic": receipt.topic,
        "queue_id": receipt.queue_id,
        "queue_offset": receipt.offset,
        "physical_offset": receipt.physical_offset,
        "size": receipt.size,
        "store_timestamp_ms": receipt.store_timestamp_ms,
        "message_id": receipt.message_id,
        "unique_key": receipt.unique_key,
    }


def _too_long(what: str) -> InvalidMessageError:
    limit = StoreConfig().max_message_size
    return InvalidMessageError(f"{what} has more than {limit} bytes, the most that a body may have", "body")


def _read(file: Path) -> bytes:
    limit = StoreConfig().max_message_size
    with open(file, "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise _too_long(str(file))
    return data


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines without their ends. One that no message could hold is refused before it fills the memory."""
    limit = StoreConfig().max_message_size
    number = 0
    while line := stream.readline(limit + 2):
        number += 1
        line = line.removesuffix(b"\n")
        if len(line) > limit:
            raise _too_long(f"line {number}")
        yield line


def _chunks(bodies: Iterator[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for body in bodies:
        chunk.append(body)
        size += len(body)
        if len(chunk) >= _CHUNK or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _dry_run(directory: Path, bodies: Iterator[bytes], *, create: bool) -> tuple[int, int]:
    """(messages, bytes of bodies) that would be put; raises what opening for writing would."""
    try:
        with MessageStore(directory, "r", fs=QUIET) as store:
            room = store.manifest.commitlog_segment_bytes
        refuse_beside_writer(directory, QUIET)
    except NotAStoreError:
        if not create or (directory.exists() and not (directory.is_dir() and not any(directory.iterdir()))):
            raise
        room = 64 << 20
    count = size = 0
    for body in bodies:
        if len(body) >= room:
            raise ConfigError(f"a body of {len(body)} bytes does not fit a segment of {room}")
        count += 1
        size += len(body)
    return count, size
