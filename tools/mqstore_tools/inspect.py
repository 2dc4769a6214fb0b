"""`mqstore inspect`: show the contents of a store, found by `broker/admin/contents.py` and `inspect.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click

from mqstore import QueueRef
from mqstore.admin import inspect_file, inspect_store
from mqstore_tools.render import console, note, pick, print_if_json, print_items, progress, show_bytes, table, when
from mqstore_tools.session import show_ms
from mqstore_tools.shared import command, findings_on_stderr, finish, note_incomplete, refuse_given

_MANY = 200
"""Limit of rows of a printed table. JSON has all rows."""


@command(
    short_help="Show the contents of a store. Changes nothing.",
    examples="""
  mqstore inspect var/mq
  mqstore inspect var/mq --json | jq '.topics.orders.queues'
  mqstore inspect ~/store          # a Java broker's, running or not
  mqstore inspect --file var/mq/consumequeue/orders/0/00000000000000000000 --offset 7
  mqstore inspect --file copied.bin --as index --limit 20""",
)
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path, readable=False), required=False)
@click.option(
    "--file", metavar="PATH", type=click.Path(path_type=Path, readable=False), help="Show the bytes of this file."
)
@click.option("--as", "kind", metavar="KIND", help="Kind of the --file, such as index, if it is not recognized.")
@click.option(
    "--offset",
    type=click.IntRange(0),
    help="First item of the --file: physical offset in a log, number of a unit, slot or value.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Number of items (default 4, 1 with --offset).")
@click.pass_context
def inspect(
    ctx: click.Context,
    directory: Path | None,
    file: Path | None,
    kind: str | None,
    offset: int | None,
    limit: int | None,
) -> None:
    """Show the contents of the store in DIR: log, topics, queues, index, checkpoint, committed offsets.

    It also shows the broker's state: delay levels, timer, deliveries in flight, order info, transactions, dead letters,
    and the message that keeps the oldest segment from being deleted.

    Only reads: no byte or file time in DIR changes. Works while a writer has the store open, and on damaged stores.
    Obvious damage is listed under problems; checksums are left to `verify`. Exit code 1 if there are problems or
    errors, or if a queue lacks messages of the log, after a crash or because its files are lost. Such a queue is named
    on stderr.

    With --file, show the fields of a file of a store with their bytes: records, units, the slots of an index with
    their chains, checkpoint, timer, JSON. The file may be damaged, or a copy elsewhere. Zeros are left out. A unit
    that --offset chooses is followed by its record, in which the values of the pop log are shown, too. Exit code 1 if
    an item has a problem.
    """
    if file is not None:
        if directory is not None:
            raise click.UsageError("give DIR or --file, not both")
        limit = limit or (4 if offset is None else 1)
        found = inspect_file(file, kind=kind, offset=offset, limit=limit)
        finish(not print_items(found))
        return
    if directory is None:
        raise click.MissingParameter("give DIR or --file", ctx, ctx.command.params[0])
    refuse_given(("kind", "offset", "limit"), "goes with --file")
    with findings_on_stderr() as errors, progress("reading the log") as report:
        found = inspect_store(directory, progress=report)
    if not print_if_json(found):
        show_store(found)
    queue = found["incomplete_queue"]
    if queue is not None:
        note_incomplete(QueueRef(**queue), directory)
    finish(queue is not None or found["problems"] or found["broker"]["not_shown"] or errors)


def show_store(found: dict[str, Any]) -> None:
    """Print what `inspect_store` found, as tables."""
    screen = console()
    log, index, checkpoint = found["commitlog"], found["index"], found["checkpoint"]
    facts = [
        ("profile", f"{found['profile']}, checksum {found['checksum']}"),
        ("state", store_state(found)),
        (
            "commit log",
            f"{log['messages']} records in [{log['min_offset']}, {log['max_offset']}), {len(log['segments'])} segments "
            f"of {show_bytes(log['segment_bytes'])}",
        ),
        ("undispatched", f"{found['undispatched_bytes']} bytes"),
        ("index", f"{index['entries']} entries in {index['files']} files"),
        ("flushed", when(checkpoint["physic_msg_timestamp_ms"])),
        *_splice_facts(found["splice"]),
        *_broker_facts(found["broker"]),
    ]
    screen.print(table(found["path"], ("", ""), facts))
    queues = [
        [topic, queue_id, q["min_offset"], q["max_offset"], q["max_offset"] - q["min_offset"], *pick(q, _BYTES)]
        for topic, entry in found["topics"].items()
        for queue_id, q in entry["queues"].items()
    ]
    _table("queues", ("topic", "queue>", "first>", "next>", "messages>", "from byte>", "to byte>"), queues)
    segments = [
        [int(each["file"][-20:]), *pick(each, "used messages"), *(when(ms)[:19] for ms in pick(each, _TIMES))]
        for each in log["segments"]
    ]
    _table("segments", ("from byte>", "used>", "records>", "first stored", "last stored"), segments)
    offsets = [
        (group, topic, queue_id, offset, _behind(found, topic, queue_id, offset))
        for group, topics in found["consumer_offsets"].items()
        for topic, queues in topics.items()
        for queue_id, offset in queues.items()
    ]
    _table("consumer offsets", ("group", "topic", "queue>", "next>", "behind>"), offsets)
    _show_broker(found["broker"])
    for problem in islice(found["problems"], _MANY):
        note(f"problem: {problem}")
    for section, why in found["broker"]["not_shown"].items():
        note(f"not shown: {section.replace('_', ' ')}: {why}")


def store_state(found: dict[str, Any]) -> str:
    if found["writer_alive"]:
        return "open in a writer now"
    if found["recovery_needed"]:
        return "not closed cleanly: it is recovered when next opened for writing, or by `mqstore recover`"
    return "closed cleanly"


def _splice_facts(splice: dict[str, Any]) -> list[tuple[str, object]]:
    """Return lines about Spark's writes to this store, [] if there are none."""
    facts: list[tuple[str, object]] = []
    pending = splice["pending"]
    if pending is not None:
        what = f"version {pending['version']} of {pending['app']}"
        facts.append(
            ("splice", f"{what} from byte {pending['start']}: running, or rolled back when the store is next opened")
        )
    texts = {
        "inbox": "bundles wait for the owner of the store",
        "refused": "bundles in inbox/refused/, each with a reason.txt",
        "staged": "folders in _staging/, of running jobs, or left by crashed ones: see mqstore spark clean",
    }
    return facts + [(name, f"{len(splice[name])} {text}") for name, text in texts.items() if splice[name]]


def _broker_facts(broker: dict[str, Any]) -> list[tuple[str, object]]:
    """Return lines about the broker's state, [] for a store that no broker ever used."""
    facts: list[tuple[str, object]] = []
    pin, timer, transactions = broker["oldest_pin"], broker["timer"], broker["transactions"]
    if pin is not None:
        offset = "" if pin["queue_offset"] is None else f" at {pin['queue_offset']}"
        group = f", group {pin['group']}" if pin["group"] else ""
        where = f"{pin['topic']}, queue {pin['queue_id']}{offset}{group}: {pin['why']}"
        facts.append(("kept from", f"{max(0, pin['physical_offset'] - pin['reach'])} on, for {where}"))
    if timer["waiting"]:
        facts.append(("timer", f"{timer['waiting']} messages wait, the first until {when(timer['next_due_ms'])}"))
    if transactions["open"] or transactions["given_up"]:
        facts.append(("transactions", f"{transactions['open']} open, {transactions['given_up']} given up"))
    if broker["dead_letters"]:
        counts = ", ".join(f"{count} of {group}" for group, count in broker["dead_letters"].items())
        facts.append(("dead letters", counts))
    return facts


_BYTES = "min_physical_offset max_physical_offset"
_TIMES = "first_store_timestamp_ms last_store_timestamp_ms"
_QUEUE = "group topic queue_id"


DELAY_COLUMNS = ("level>", "delay>", "next>", "end>", "waiting>", "next due", "overdue>")


def delay_cells(level: dict[str, Any]) -> list[object]:
    delay = "orphan" if level["delay_ms"] is None else show_ms(level["delay_ms"])
    late = show_ms(level["overdue_ms"]) if level["overdue_ms"] else "-"
    return [level["level"], delay, *pick(level, "offset end waiting"), when(level["next_due_ms"]), late]


def _show_broker(broker: dict[str, Any]) -> None:
    _table("delay levels", DELAY_COLUMNS, [*map(delay_cells, broker["delay_levels"])])
    in_flight = [
        [*pick(each, f"{_QUEUE} messages first_offset"), "fifo" if each["fifo"] else "-", when(each["next_visible_ms"])]
        for each in broker["in_flight"]
    ]
    _table("in flight", ("group", "topic", "queue>", "messages>", "from>", "order", "visible again"), in_flight)
    order = [
        [
            *pick(each, _QUEUE),
            *map(_span, pick(each, "offsets unacked")),
            *map(when, pick(each, "pop_time_ms next_visible_ms")),
            " ".join(f"{offset}:{count}" for offset, count in each["attempts"].items()) or "-",
        ]
        for each in broker["order_info"]
    ]
    columns = ("group", "topic", "queue>", "batch", "not settled", "popped", "blocked until", "failed attempts")
    _table("order info", columns, order)
    names = "transaction_id topic producer_group checks queue_offset"
    newest = broker["transactions"]["newest_given_up"]
    given_up = [[*pick(each, names), when(each["store_timestamp_ms"])] for each in newest]
    _table("transactions given up", ("id", "topic", "producer group", "checks>", "offset>", "stored"), given_up)


def _span(offsets: list[int]) -> str:
    """Return offsets as text, runs as ranges.

    >>> _span([4, 5, 6, 9]), _span([])
    ('4-6 9', '-')
    """
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset == runs[-1][1] + 1:
            runs[-1][1] = offset
        else:
            runs.append([offset, offset])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "-"


def _behind(found: dict[str, Any], topic: str, queue_id: str, offset: int) -> object:
    queue = found["topics"].get(topic, {}).get("queues", {}).get(queue_id)
    return "-" if queue is None else max(0, queue["max_offset"] - offset)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    if rows:
        screen = console()
        screen.print()
        screen.print(table(title, columns, rows[:_MANY]))
        if len(rows) > _MANY:
            screen.print(f"... and {len(rows) - _MANY} more; --json has all")
