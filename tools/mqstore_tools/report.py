"""`mqstore report`: traffic by time; a page about a store, with the results of inspect, du, lag and verify, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mqstore import MQStoreError
from mqstore.admin import disk_usage, inspect_store, operations
from mqstore_tools.du import disk_lines
from mqstore_tools.export import lines
from mqstore_tools.groups import group_row
from mqstore_tools.inspect import store_state
from mqstore_tools.multi_store import Messages, message_options, names, on_spark, spark_option
from mqstore_tools.plots import Html, bar, cell_bytes, columns, interval_ms, legend, page, strip, table, tag
from mqstore_tools.render import Cells, note, pick, print_if_json, progress, show_bytes, show_tables, when
from mqstore_tools.session import as_cells, show_ms, to_ms
from mqstore_tools.shared import command, findings_on_stderr, finish, refuse_given
from mqstore_tools.topics import topic_row

_MOST, _FINDINGS, _PRINTED = 25, 100, 50
"""Number of rows of a table on the page, of findings, and of printed rows. The page adds up others in one more row."""
_UNCHECKED = "Checksums, units against their records, entries of the index: use --verify, or mqstore verify."
_TIMES = "first_store_timestamp_ms last_store_timestamp_ms"


@command(
    short_help="Show traffic by time, or write a page about a store.",
    examples="""
  mqstore report fleet/* --from 24h
  mqstore report var/mq --topic orders --by topic,queue_id --interval 1h
  mqstore report var/mq --json | jq -r '.traffic.series[] | [.start_ms, .topic, .messages] | @tsv'
  mqstore report var/mq --html mq.html
  mqstore report var/mq --html mq.html --verify || echo findings""",
)
@message_options
@click.option("--interval", metavar="TIME", help="Interval of the counts (30s, 5m, 1h). Default: 1m; fits the page.")
@click.option("--by", default="topic", metavar="NAMES", help="Group by: store, topic, queue_id.")
@click.option(
    "--html",
    "output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the page to FILE, which appears when it is complete.",
)
@click.option("--verify", "check", is_flag=True, help="With --html: check everything, as `mqstore verify` does.")
@spark_option
def report(
    messages: Messages, interval: str | None, by: str, output: Path | None, check: bool, master: str | None
) -> None:
    """Count the messages of the stores in DIR by the time when they were stored, or write a page about one store.

    It shows their number, their sizes, the time from producer to store, and how many are retries. `--by topic,queue_id`
    shows how even the queues are. Without --topic all users' topics and retry topics are read. Percentiles have an
    error of at most 3 %; all other figures are exact.

    With --html, write one HTML page: traffic, sizes, lag, delays, a map of the log, findings, settings. --topic, --from
    and the like choose its traffic. The page needs no other file, no script and no network, and can be printed. It has
    at most 25 rows of each kind and the sum of the others. --json prints everything that was found. Names of topics and
    groups are in the page, bodies and keys of messages are not. Checksums are checked only with --verify, and the page
    says so. Exit code 1 if there are findings, or if a part cannot be shown.
    """
    if output is None:
        refuse_given(("check",), "goes with --html")
        _show_traffic(messages, interval or "1m", names(by) or (), master)
        return
    refuse_given(("by", "master"), "does not go with --html")
    if len(messages.stores) > 1:
        raise click.UsageError("--html is for one store")
    directory = Path(messages.stores[0])
    with lines(output, directory) as file, findings_on_stderr():
        found = _collect(directory, messages, interval, check=check)
        file.write(_page(found))
    if not print_if_json(found):
        note(f"wrote {output}: {len(found['findings'])} findings")
    for section, why in found["not_shown"].items():
        note(f"not shown: {section} ({why})")
    finish(found["findings"] or found["not_shown"])


def _show_traffic(messages: Messages, interval: str, by: Sequence[str], master: str | None) -> None:
    from mqstore.jobs import traffic_report

    chosen = messages.select()
    with on_spark(master) as spark, progress("counting", of_bytes=False) as of_job:
        found = traffic_report(chosen, interval=interval, by=by, spark=spark, progress=of_job).to_dict()
    more = len(found["rows"]) - _PRINTED
    notes = [f"and {more} more; --json has all"] * (more > 0)
    notes += [f"{found['damaged']} damaged messages were skipped"] * (found["damaged"] > 0)
    show_tables({"traffic": found}, _traffic_table(found), empty="no messages", notes=notes)


def _traffic_table(found: dict[str, Any]) -> Cells:
    by = [name for name in found["by"] if name]
    columns = [name.replace("queue_id", "queue>") for name in by]
    columns += ["messages>", "bytes>", "per s>", "peak per s>", "size p50>", "p95>", "max>", "delay p50>", "p95>"]
    columns += ["retries>"]
    rows = [[*(row[name] for name in by), *_traffic_cells(row)] for row in found["rows"][:_PRINTED]]
    if by and len(found["rows"]) > 1:
        rows.append(["all", *[""] * (len(by) - 1), *_traffic_cells(found["total"])])
    return " to ".join(map(when, pick(found["total"], "first_ms last_ms"))), columns, rows


def _traffic_cells(row: dict[str, Any]) -> list[Any]:
    rates = [f"{row['rate']:.1f}", f"{row['peak_rate']:.1f}"]
    sizes = map(show_bytes, pick(row, "size_p50 size_p95 size_max"))
    delays = map(show_ms, pick(row, "delay_p50_ms delay_p95_ms"))
    retries = f"{row['retries']} ({row['retries'] / row['messages']:.1%})"
    return [row["messages"], show_bytes(row["bytes"]), *rates, *sizes, *delays, retries]


def _collect(directory: Path, messages: Messages, interval: str | None, *, check: bool) -> dict[str, Any]:
    """Return everything that a page shows. A part that cannot be read is None, and `not_shown` has the reason."""
    from mqstore.jobs import lag_report, traffic_report, verify

    with progress("reading the log") as of_log:
        store = inspect_store(directory, progress=of_log)
    segments = store["commitlog"]["segments"]
    chosen = replace(messages, options=("onCorrupt=skip", *messages.options)).select()
    times = [time for each in segments for time in pick(each, _TIMES) if time is not None] or [0]
    low, high = (to_ms(each) if each else None for each in (messages.start, messages.stop))
    span_ms = min(max(times), high or max(times)) - max(min(times), low or 0)
    every = interval or f"{interval_ms(max(0, span_ms)) // 1000}s"
    cell = cell_bytes(len(segments), store["commitlog"]["segment_bytes"])
    desk = operations(directory)
    parts: dict[str, Callable[[Any], Any]] = {
        "disk": lambda report: disk_usage(directory, cell_bytes=cell, progress=report),
        "lag": lambda report: lag_report([directory], progress=report).to_dict(),
        "traffic": lambda report: traffic_report(chosen, interval=every, by=(), progress=report).to_dict(),
        "topics": lambda _: [*map(topic_row, desk.topics())],
        "groups": lambda _: [*map(group_row, desk.groups())],
    }
    if check:
        parts["verify"] = lambda report: verify([directory], max_errors=_FINDINGS, progress=report).to_dict()
    found: dict[str, Any] = {"store": store, **dict.fromkeys(parts)}
    missing = dict(store["broker"]["not_shown"])
    for name, read in parts.items():
        try:
            with progress(name, of_bytes=False) as of_part:
                found[name] = read(of_part)
        except (MQStoreError, OSError, LookupError, ValueError) as error:
            missing[name] = str(error)
    missing |= found["disk"]["not_shown"] if found["disk"] else {}
    unchecked = [] if found.get("verify") else [_UNCHECKED]
    return {**found, "findings": [*_findings(found)], "not_checked": unchecked, "not_shown": missing}


def _findings(found: Mapping[str, Any]) -> Iterable[str]:
    """Yield a sentence about each finding."""
    yield from found["store"]["problems"]
    lag = found["lag"] or {"incomplete": (), "groups": ()}
    for queue in lag["incomplete"]:
        yield f"{queue['topic']}, queue {queue['queue_id']}, lacks messages that are in the log: run `mqstore recover`"
    for group, row in ((each["group"], row) for each in lag["groups"] for row in each["queues"]):
        if held := row["suspended"]:
            why = f"suspended by its failed message at offset {held['offset']} ({held['error']})"
            yield f"{row['topic']}, queue {row['queue_id']} of group {group}, is {why}"
    if found["traffic"] and (damaged := found["traffic"]["damaged"]):
        yield f"{damaged} damaged messages are not in the traffic"
    checked = found.get("verify") or {"findings": (), "stores": ()}
    for each in checked["findings"]:
        yield f"{each['kind']}: {each['file']} at {each['position']}, {each['length']} bytes: {each['detail']}"
    if unlisted := sum(row["unlisted"] for row in checked["stores"]):
        yield f"and {unlisted} more: see `mqstore verify`"


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(found: Mapping[str, Any]) -> Html:
    store, disk, missing = found["store"], found["disk"], found["not_shown"]
    facts = [f"{store_state(store)}; {store['commitlog']['messages']:,} records"]
    facts += [f"taken at {when(disk['taken_ms'])}", *disk_lines(disk, len(disk["topics"]))] if disk else []
    body = [tag("h1", store["path"]), tag("ul", *(tag("li", each) for each in facts))]
    for title, (needed, show) in _SECTIONS.items():
        why = [f"Not shown: {missing[name]}" for name in needed.split() if name in missing]
        content = [] if why else show(found)
        body += [tag("h2", title), *(content or [tag("p", *(why[:1] or ["Nothing to show."]), class_="soft")])]
    return page(f"mqstore report: {store['path']}", *body)


def _checked(found: Mapping[str, Any]) -> list[Html]:
    rows, more = found["findings"][:_FINDINGS], len(found["findings"]) - _FINDINGS
    rows += [f"and {more} more; --json has all"] * (more > 0)
    rows += [f"Not shown: {section} ({why})" for section, why in found["not_shown"].items()]
    rows += [f"Not checked: {each}" for each in found["not_checked"]]
    return [tag("ul", *(tag("li", each) for each in [*([] if found["findings"] else ["No findings."]), *rows]))]


def _traffic(found: Mapping[str, Any]) -> list[Html]:
    series, total = found["traffic"]["series"], found["traffic"]["total"]
    text = f"{total['messages']:,} messages with bodies of {show_bytes(total['bytes'])}, by the time of storing"
    plots = [columns([pick(each, "start_ms messages") for each in series], "Messages")] if series else []
    if total["bytes"]:
        plots.append(columns([pick(each, "start_ms bytes") for each in series], "Bytes of bodies", show_bytes))
    return [tag("p", text), *plots] if plots else []


def _sizes(found: Mapping[str, Any]) -> list[Html]:
    def cells(row: Mapping[str, Any]) -> tuple[dict[str, int], Iterable[object]]:
        size, consumed = pick(row, "log_bytes consumed_bytes")
        kinds = {"system": size} if consumed is None else {"consumed": consumed, "live": size - consumed}
        return kinds, as_cells(row, "messages log_bytes queue_bytes consumed_bytes")

    parts = [(name, *as_cells(each, "files bytes")) for name, each in found["disk"]["parts"].items()]
    heads = ("topic", "messages>", "in the log>", "queues>", "consumed>", "|")
    shown = _largest(found["disk"]["topics"], "log_bytes", heads, cells)
    return shown and [*shown, legend("consumed", "live", "system"), table(("files of", "number>", "bytes>"), parts)]


def _lag(found: Mapping[str, Any]) -> list[Html]:
    def cells(row: Mapping[str, Any]) -> tuple[dict[str, int], Iterable[object]]:
        return {"count": row["messages"] or 0}, as_cells(row, "messages in_flight lost oldest_age_ms")

    heads = ("group", "messages>", "in flight>", "lost>", "oldest is>", "|")
    return _largest(found["lag"]["groups"], "messages", heads, cells)


def _largest(rows: Sequence[Any], by: str, heads: Sequence[str], cells: Callable[[Any], Any]) -> list[Html]:
    """Return a table of the largest rows by a count, and the sums, or latest times, of the others.
    `cells` returns (bar, cells)."""
    rows = sorted(rows, key=lambda row: -(row[by] or 0))
    rest, largest = rows[_MOST:], rows[0][by] or 0 if rows else 0
    if rest:
        known = {name: [row[name] for row in rest if isinstance(row[name], int)] for name in rest[0]}
        sums = {name: max(each) if name.endswith("_ms") else sum(each) for name, each in known.items() if each}
        rows = [*rows[:_MOST], {**rest[0], **sums, heads[0]: f"{len(rest):,} others"}]
    shown = ((row[heads[0]], *cells(row)[1], bar(cells(row)[0], largest)) for row in rows)
    return [table(heads, shown)] if rows else []


def _map(found: Mapping[str, Any]) -> list[Html]:
    cells, end = found["disk"]["map"], found["disk"]["log"]["end"]
    start, size = pick(cells, "start cell_bytes")
    damaged, shown, totals = set[int](), list[str | None](), dict.fromkeys(("live", "consumed", "system", "dead"), 0)
    for low, high in found["store"]["commitlog"]["damaged"]:
        damaged.update(range(max(0, low - start) // size, min(len(cells["live"]), -(-(high - start) // size))))
    for number, known in enumerate(zip(*pick(cells, "live consumed system"), strict=True)):
        used = min(size, max(0, end - start - number * size))
        amounts = dict(zip(totals, (*known, max(0, used - sum(known))), strict=True))
        totals = {kind: total + amounts[kind] for kind, total in totals.items()}
        shown.append("damaged" if number in damaged else max(amounts, key=amounts.__getitem__) if used else None)
    words = ", ".join(f"{kind} {show_bytes(total)}" for kind, total in totals.items() if total)
    lost = sum(high - low for low, high in found["store"]["commitlog"]["damaged"])
    text = f"{words}; {show_bytes(lost)} are damaged. A cell of {show_bytes(size)} shows damage, or most of its bytes."
    return [tag("p", text), strip(start, size, shown), legend("damaged", *totals)] if words else []


def _delays(found: Mapping[str, Any]) -> list[Html]:
    text = "A message that is due in more than two days counts at the time when the timer looks at it again."
    counts = found["store"]["broker"]["due"]["counts"]
    return [columns(counts, "Messages"), tag("p", text, class_="soft")] if counts else []


def _settings(found: Mapping[str, Any]) -> list[Html]:
    store, index = found["store"], found["store"]["index"]
    files = f"index files of {index['entries_per_file']:,} entries, {index['slots']:,} slots"
    size = show_bytes(store["commitlog"]["segment_bytes"])
    parts = [tag("p", f"Profile {store['profile']}, checksum {store['checksum']}, segments of {size}, {files}.")]
    for kind, members in _SETTINGS.items():
        rows = found[f"{kind}s"] or []
        cells = (pick(row, f"name {members.replace('>', '')}") for row in rows[:_MOST])
        parts += [table([kind, *(name.replace("_", " ") for name in members.split())], cells)] if rows else []
        parts += [tag("p", f"and {len(rows) - _MOST:,} more {kind}s")] * (len(rows) > _MOST)
    return parts


_SETTINGS = {
    "topic": "read_queues> write_queues> perm> order message_type",
    "group": "registered max_attempts> retry fifo start consume broadcast",
}
_SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[Html]]]] = {
    "Findings": ("", _checked),
    "Traffic": ("traffic", _traffic),
    "Sizes": ("disk", _sizes),
    "Map of the log": ("disk", _map),
    "Lag by group": ("lag", _lag),
    "Delayed messages by due time": ("due broker", _delays),
    "Settings": ("", _settings),
}
"""Headings, with the names in `not_shown` that they depend on."""
