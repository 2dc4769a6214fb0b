"""`mqstore report`: a page about a store, of what inspect, du, lag, traffic and verify find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mqstore import MQStoreError
from mqstore.admin import disk_usage, inspect_store, operations
from mqstore_tools.du import _lines as disk_lines
from mqstore_tools.export import lines
from mqstore_tools.groups import group_row
from mqstore_tools.inspect import store_state
from mqstore_tools.plots import Html, bar, cell_bytes, columns, join, legend, next_step, page, strip, table, tag
from mqstore_tools.render import note, pick, print_json, progress, show_bytes, when
from mqstore_tools.session import show_ms
from mqstore_tools.shared import FINDINGS, StoreCommand, directory_argument, findings_on_stderr, json_option
from mqstore_tools.topics import topic_row

_MOST = 25
"""Number of rows of a table. The others are added up in one more row."""
_FINDINGS = 100
_UNCHECKED = (
    "Checksums, units against their records, entries of the index, and JSON files other than those shown: "
    "mqstore verify checks them, or --verify here."
)


@click.command(
    cls=StoreCommand,
    short_help="Write a page about a store, for a ticket or a meeting.",
    epilog="""\b
Examples:
  mqstore report var/mq --html mq.html
  mqstore report var/mq --html mq.html --verify || echo findings""",
)
@directory_argument
@click.option(
    "--html",
    "output",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the page to FILE, which appears when it is complete.",
)
@click.option("--verify", "check", is_flag=True, help="Check everything, too, as `mqstore verify` does.")
@json_option
@click.pass_context
def report(ctx: click.Context, directory: Path, output: Path, check: bool, json_output: bool) -> None:
    """Write one HTML page about the store in DIR: traffic, sizes, lag, delays, a map of the log, findings, settings.

    The page needs no other file, no script and no network, and can be printed. It has at most 25 rows of each kind and
    the sum of the others. --json prints everything that was found. Only reads the store, and works while a writer has
    it open. Names of topics and groups are in the page, bodies and keys of messages are not.

    Checksums are checked only with --verify, and the page says so. Exit code 1 if there are findings, or if a part
    cannot be shown.
    """
    with lines(output, directory) as file, findings_on_stderr():
        found = collect(directory, check=check)
        file.write(_page(found))
    if json_output:
        print_json(found)
    else:
        note(f"wrote {output}: {len(found['findings'])} findings")
    for section, why in found["not_shown"].items():
        note(f"not shown: {section} ({why})")
    if found["findings"] or found["not_shown"]:
        ctx.exit(FINDINGS)


def collect(directory: Path, *, check: bool = False) -> dict[str, Any]:
    """Return everything that a page shows. A part that cannot be read is None, and `not_shown` has the reason.
    Raises the errors of opening the store."""
    from mqstore.jobs import lag_report, select, traffic_report, verify

    with progress("reading the log") as report:
        store = inspect_store(directory, progress=report)
    log, stores = store["commitlog"], [str(directory)]
    size = cell_bytes(len(log["segments"]) * log["segment_bytes"], log["segment_bytes"])
    times = [each[name] for each in log["segments"] for name in _TIMES if each[name] is not None]
    interval = next_step((max(times, default=0) - min(times, default=0)) // 1000) // 1000
    desk, whole = operations(directory), select(stores, options={"onCorrupt": "skip"})

    def quick(title: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with progress(title, of_bytes=False) as report:
            return work(*arguments, progress=report, **options)

    parts: dict[str, Callable[[], Any]] = {
        "disk": lambda: quick("reading units", disk_usage, directory, cell_bytes=size),
        "lag": lambda: quick("lag", lag_report, stores).to_dict(),
        "traffic": lambda: quick("traffic", traffic_report, whole, interval=f"{interval}s", by=()).to_dict(),
        "topics": lambda: [*map(topic_row, desk.topics())],
        "groups": lambda: [*map(group_row, desk.groups())],
    }
    if check:
        parts["verify"] = lambda: quick("verifying", verify, stores, max_errors=_FINDINGS).to_dict()
    found: dict[str, Any] = {"store": store, **dict.fromkeys(parts)}
    missing = dict(store["broker"]["not_shown"])
    for name, read in parts.items():
        try:
            found[name] = read()
        except (MQStoreError, OSError, LookupError, ValueError) as error:
            missing[name] = str(error)
    if (disk := found["disk"]) is not None:
        missing |= disk["not_shown"]
    found["findings"] = [*_findings(found)]
    return {**found, "not_checked": [] if found.get("verify") else [_UNCHECKED], "not_shown": missing}


_TIMES = ("first_store_timestamp_ms", "last_store_timestamp_ms")


def _findings(found: Mapping[str, Any]) -> Iterable[str]:
    """Yield a sentence about each finding."""
    store, lag, traffic, checked = found["store"], found["lag"], found["traffic"], found.get("verify")
    yield from store["problems"]
    for queue in lag["incomplete"] if lag else ():
        yield f"{queue['topic']}, queue {queue['queue_id']}, lacks messages that are in the log: run `mqstore recover`"
    for group in lag["groups"] if lag else ():
        for row in group["queues"]:
            if (held := row["suspended"]) is not None:
                where = f"{row['topic']}, queue {row['queue_id']} of {group['group']}"
                yield f"{where} is suspended by the message at offset {held['offset']}: {held['error']}"
    if traffic and traffic["damaged"]:
        yield f"{traffic['damaged']} damaged messages are not in the traffic"
    for each in checked["findings"] if checked else ():
        yield f"{each['kind']}: {each['file']} at {each['position']}, {each['length']} bytes: {each['detail']}"
    if checked and (unlisted := sum(row["unlisted"] for row in checked["stores"])):
        yield f"and {unlisted} more: see `mqstore verify`"


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(found: Mapping[str, Any]) -> Html:
    store, disk = found["store"], found["disk"]
    sections = {
        ("Findings", ""): _found(found),
        ("Traffic", "traffic"): _traffic(found["traffic"]),
        ("Sizes", "disk"): _sizes(disk),
        ("Map of the log", "disk"): _map(store, disk),
        ("Lag by group", "lag"): _lag(found["lag"]),
        ("Delayed messages by due time", "due broker"): _delays(store["broker"]),
        ("Settings", ""): _settings(found),
    }
    taken = when(disk["taken_ms"])[:19] if disk else "-"
    log = store["commitlog"]
    facts = [
        f"{store_state(store)}; records: {log['messages']:,}; taken at {taken} UTC",
        *(disk_lines(disk, len(disk["topics"])) if disk else ()),
    ]
    body = [tag("h1", store["path"]), tag("ul", *(tag("li", each) for each in facts))]
    for (title, names), content in sections.items():
        why = [f"Not shown: {found['not_shown'][name]}" for name in names.split() if name in found["not_shown"]]
        body += [tag("h2", title), content or tag("p", *(why[:1] or ["Nothing to show."]), class_="soft")]
    return page(f"mqstore report: {store['path']}", *body)


def _found(found: Mapping[str, Any]) -> Html:
    rows = found["findings"][:_FINDINGS]
    rows += [f"and {len(found['findings']) - _FINDINGS} more; --json has all"] * (len(found["findings"]) > _FINDINGS)
    rows += [f"Not shown: {section} ({why})" for section, why in found["not_shown"].items()]
    parts = [tag("ul", *(tag("li", each) for each in rows))] if rows else [tag("p", "None.")]
    return join([*parts, *(tag("p", f"Not checked: {each}", class_="soft") for each in found["not_checked"])])


def _traffic(traffic: Mapping[str, Any] | None) -> Html | None:
    if not traffic or not traffic["series"]:
        return None
    plots: dict[str, tuple[str, dict[str, Any]]] = {
        "messages": ("Messages", {}),
        "bytes": ("Bytes of bodies", {"show": lambda size: show_bytes(round(size)), "line": True}),
    }
    total = traffic["total"]
    words = f"{total['messages']:,} messages by the time when they were stored, {show_bytes(total['bytes'])} of bodies"
    shown = [
        columns([pick(each, f"start_ms {name}") for each in traffic["series"]], title, **options)
        for name, (title, options) in plots.items()
        if total[name]
    ]
    return join([tag("p", words), *shown])


def _sizes(disk: Mapping[str, Any] | None) -> Html | None:
    if not disk or not disk["topics"]:
        return None
    names = ("messages", "log_bytes", "queue_bytes", "consumed_bytes")
    rows = _top(disk["topics"], "topic", names, "log_bytes")
    largest = max(row["log_bytes"] for row in rows[:_MOST])
    cells = (
        [row["topic"], f"{row['messages']:,}", *map(_bytes, pick(row, " ".join(names[1:]))), _share(row, largest)]
        for row in rows
    )
    parts = [(name, f"{each['files']:,}", show_bytes(each["bytes"])) for name, each in disk["parts"].items()]
    heads = ("topic", "messages>", "in the log>", "queues>", "consumed>", "|")
    return join(
        [
            table(heads, cells),
            legend(("consumed", "live", "system")),
            tag("h3", "Files"),
            table(("part", "files>", "bytes>"), parts),
        ]
    )


def _share(row: Mapping[str, Any], largest: int) -> Html:
    size, consumed = row["log_bytes"], row["consumed_bytes"]
    kinds = {"system": size} if consumed is None else {"consumed": consumed, "live": size - consumed}
    return bar(kinds, largest)


def _bytes(count: int | None) -> str | None:
    return None if count is None else show_bytes(count)


def _top(rows: Sequence[dict[str, Any]], name: str, counts: Sequence[str], by: str) -> list[dict[str, Any]]:
    """Return the largest rows by a count, and one with the sums of all others."""
    ordered = sorted(rows, key=lambda row: -(row[by] or 0))
    rest = ordered[_MOST:]
    sums = {count: sum(row[count] or 0 for row in rest) for count in counts}
    return ordered[:_MOST] + ([{**rest[0], name: f"{len(rest):,} others", **sums}] if rest else [])


def _map(store: Mapping[str, Any], disk: Mapping[str, Any] | None) -> Html | None:
    if not disk or not disk["map"]["live"]:
        return None
    found, end = disk["map"], disk["log"]["end"]
    size, kinds = found["cell_bytes"], ("damaged", "live", "consumed", "system", "dead")
    damaged = [0] * len(found["live"])
    for low, high in store["commitlog"]["damaged"]:
        for cell in range(
            max(0, (low - found["start"]) // size), min(len(damaged), -(-(high - found["start"]) // size))
        ):
            damaged[cell] = 1
    shown: list[str | None] = []
    totals = dict.fromkeys(kinds, 0)
    for number, parts in enumerate(zip(damaged, *pick(found, "live consumed system"), strict=True)):
        used = min(size, max(0, end - found["start"] - number * size))
        amounts = dict(zip(kinds, (*parts, max(0, used - sum(parts[1:]))), strict=True))
        for kind, amount in amounts.items():
            totals[kind] += amount
        shown.append("damaged" if parts[0] else max(amounts, key=amounts.__getitem__) if used else None)
    totals["damaged"] = sum(high - low for low, high in store["commitlog"]["damaged"])
    words = "; ".join(f"{kind} {show_bytes(amount)}" for kind, amount in totals.items() if amount)
    text = (
        f"A cell has {show_bytes(size)} and the colour of most of its bytes, or of damage. In all: {words or 'empty'}."
    )
    return join([tag("p", text), strip(found["start"], size, shown), legend(kinds)])


def _lag(lag: Mapping[str, Any] | None) -> Html | None:
    if not lag or not lag["groups"]:
        return None
    rows = _top(lag["groups"], "group", ("messages", "in_flight", "lost"), "messages")
    largest = max(row["messages"] or 0 for row in rows[:_MOST])
    cells = (
        [
            row["group"],
            *(None if each is None else f"{each:,}" for each in pick(row, "messages in_flight lost")),
            show_ms(row["oldest_age_ms"]),
            bar({"count": row["messages"] or 0}, largest),
        ]
        for row in rows
    )
    return table(("group", "messages>", "in flight>", "lost>", "oldest is>", "|"), cells)


def _delays(broker: Mapping[str, Any]) -> Html | None:
    counts = broker["due"]["counts"]
    if not counts:
        return None
    words = "A message that is due in more than two days counts at the time when the timer looks at it again."
    return join([columns(counts, "Messages"), tag("p", words, class_="soft")])


def _settings(found: Mapping[str, Any]) -> Html:
    store, topics, groups = found["store"], found["topics"] or [], found["groups"] or []
    facts = [
        ("profile", f"{store['profile']}, checksum {store['checksum']}"),
        ("segments", show_bytes(store["commitlog"]["segment_bytes"])),
        ("index files", f"{store['index']['entries_per_file']:,} entries, {store['index']['slots']:,} slots"),
    ]
    texts: dict[str, tuple[Sequence[dict[str, Any]], str]] = {
        "topic": (topics, "name read_queues> write_queues> perm> order message_type"),
        "group": (groups, "name registered max_attempts> retry fifo start consume broadcast"),
    }
    parts = [table(("", ""), facts)]
    for kind, (rows, names) in texts.items():
        heads = [kind, *(name.replace("_", " ") for name in names.split()[1:])]
        parts.append(table(heads, (pick(row, names.replace(">", "")) for row in rows[:_MOST])) if rows else Html(""))
        parts += [tag("p", f"and {len(rows) - _MOST:,} more {kind}s")] * (len(rows) > _MOST)
    return join(parts)
