"""`mqstore recover`: repair a store, or show the plan, by `mqstore.log.recovery.repair`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click

from mqstore.admin import carve as carve_records
from mqstore.admin import rebuild_config
from mqstore_tools.multi_store import on_spark, spark_option, stores_argument
from mqstore_tools.render import (
    console,
    json_asked,
    note,
    print_findings,
    print_if_json,
    progress,
    safe,
    show_bytes,
    show_tables,
)
from mqstore_tools.session import ask, dry_run_option, yes_option
from mqstore_tools.shared import UNUSABLE, command, findings_on_stderr, finish, refuse_given


@command(
    short_help="Repair a store. --dry-run shows the plan.",
    examples="""
  mqstore recover var/mq --dry-run            # the plan; changes nothing
  mqstore recover var/mq                      # carry it out
  mqstore recover fleet/* --spark local[4]
  mqstore recover var/mq --prefix --dry-run   # show the loss if the log ended at the first damage
  mqstore recover var/mq --rebuild config --yes
  mqstore recover --carve disk.img lost+found/#1234 --into var/carved""",
)
@stores_argument
@dry_run_option
@click.option(
    "--prefix",
    is_flag=True,
    help="End the log at the first damage, as a Java broker would. The rest is moved to DIR/cut.",
)
@click.option(
    "--rebuild",
    "rebuild",
    type=click.Choice(["config", "index"]),
    multiple=True,
    help="config: replace JSON files that do not decode by defaults (asks first). index: rebuild the index.",
)
@click.option("--carve", is_flag=True, help="DIR... are files or block devices: find whole records in their bytes.")
@click.option("--into", metavar="DIR", type=click.Path(path_type=Path), help="With --carve: new store for the records.")
@click.option(
    "--profile", type=click.Choice(["mqstore", "rocketmq"]), help="With --carve: profile of the records, if known."
)
@yes_option
@spark_option
def recover(
    stores: tuple[str, ...],
    dry_run: bool,
    prefix: bool,
    rebuild: tuple[str, ...],
    carve: bool,
    into: Path | None,
    profile: Literal["mqstore", "rocketmq"] | None,
    yes: bool,
    master: str | None,
) -> None:
    """Read the whole log of each store in DIR and make all other files agree with it.

    Every whole record is kept in its place, before and after any damage. Damage is reported. A torn record at the end
    of the log is cut. Queues, index and checkpoint are rebuilt where they differ from the log. The command may be
    killed and run again; a second run changes nothing. A store that cannot be opened is reported, and the others are
    recovered.

    Exit code 1 if there is new damage that cannot be repaired, or with --dry-run if there is work to do. Damage that
    was reported once is known: neither `recover` nor `verify` exits with 1 for it again.

    With --carve, put every whole record that is anywhere in some files, such as a disk image, into a new store, each
    once, at its old offsets. A record whose place is taken gets new ones. Exit code 1 if bytes look like a damaged
    record, or a record could not be stored.
    """
    if carve:
        if into is None or prefix or rebuild or master:
            raise click.UsageError("--carve needs --into, and takes no other option but --profile and --dry-run")
        with progress("searching") as report_progress, findings_on_stderr():
            carved = carve_records(stores, into, profile=profile, dry_run=dry_run, progress=report_progress)
        _show_carved(carved)
        finish(carved["damaged"] or carved["refused"] or not carved["found"])
        return
    refuse_given(("into", "profile"), "goes with --carve")
    if "config" in rebuild:
        if len(stores) > 1 or len(rebuild) > 1 or master:
            raise click.UsageError("--rebuild config is for one store, without other options: it loses settings")
        finish(_rebuild_config(Path(stores[0]), dry_run=dry_run, yes=yes))
        return
    from mqstore.jobs import recover as run

    in_bytes = len(stores) == 1 and master is None
    with on_spark(master) as spark, progress("recovering", of_bytes=in_bytes) as report_progress, findings_on_stderr():
        found = run(
            stores, dry_run=dry_run, prefix=prefix, rebuild_index=bool(rebuild), spark=spark, progress=report_progress
        )
    rows: list[dict[str, Any]] = []
    work = False
    for each in found:
        if each.report is None:
            rows.append({"store": each.store, "error": each.error})
            note(f"{each.store}: {each.error}")
            continue
        if len(found) > 1 and not json_asked():
            print(safe(f"{each.store}:"))
        report = each.report.as_dict()
        new = [finding for finding in report["findings"] if not finding["known"]]
        work |= bool(new) or (dry_run and report["changed"])
        if not json_asked():
            _show(report, new, dry_run=dry_run)
            _warn(new, each.orphan_levels, each.profile)
        for text in each.foreign:
            note(text)
        rows.append({**report, "orphan_levels": each.orphan_levels, "dry_run": dry_run})
        if len(found) > 1:
            rows[-1] = {"store": each.store, **rows[-1]}
    print_if_json(rows[0] if len(found) == 1 else {"dry_run": dry_run, "stores": rows})
    finish(any(each.report is None for each in found), UNUSABLE)
    finish(work)


def _show_carved(found: dict[str, Any]) -> None:
    rows = [(name, counts["messages"], show_bytes(counts["bytes"])) for name, counts in found["topics"].items()]
    if print_if_json(found):
        return
    show_tables(found, ("", ("topic", "records>", "bytes>"), rows[:_MOST]))
    counts = "{found} records found in profile {profile}, {duplicates} of them again, {damaged} damaged"
    print(safe(f"{counts.format(**found)}; {'to be put' if found['dry_run'] else 'put'} into {found['into']}"))
    if found["renumbered"]:
        note(f"{found['renumbered']} records had a place that another one has, so they have new offsets")
    if found["unlisted"]:
        note(f"{found['unlisted']} records are of an earlier generation of their topic, and in no queue")
    for why, count in found["refused"].items():
        note(f"{count} records were not stored: {why}")
    for each in found["sources"]:
        if each["unreadable_bytes"]:
            note(f"{each['path']}: {each['unreadable_bytes']} bytes could not be read")


_MOST = 100
"""Limit of printed topics. JSON has all."""
_DAMAGE = ("bad_record", "missing_segment", "segment_size")


def _warn(new: list[dict[str, Any]], orphans: Mapping[int, int], profile: str) -> None:
    for level, waiting in orphans.items():
        note(f"{waiting} messages wait in delay level {level}, which the store's table of levels does not have")
    if profile == "rocketmq" and any(finding["kind"] in _DAMAGE for finding in new):
        note(
            "a RocketMQ broker that opens this directory may end its log at the first of these, and delete the "
            "messages after it: see docs/recovery.md before you start one"
        )


def _rebuild_config(directory: Path, *, dry_run: bool, yes: bool) -> bool:
    """Replace bad JSON files by defaults, and print each change. Return True if a dry run found work."""
    if not dry_run and not yes and (planned := rebuild_config(directory, dry_run=True)):
        for sentence in planned:
            note(f"would be done: {sentence}")
        ask("The settings in these files are lost. Continue?", yes=False)
    done = rebuild_config(directory, dry_run=dry_run)
    rebuilt = {"consume_queues": 0, "units": 0, "index_entries": 0}
    row = {
        "changed": bool(done),
        "truncated": [],
        "rebuilt": rebuilt,
        "messages": 0,
        "config": done,
        "dry_run": dry_run,
    }
    if not print_if_json(row):
        for sentence in done or ["every JSON file decodes; nothing to do"]:
            print(safe(f"would be done: {sentence}" if dry_run and done else sentence))
    return dry_run and bool(done)


def _show(report: dict[str, Any], new: list[dict[str, Any]], *, dry_run: bool) -> None:
    for before, after in report["renamed"].items():
        print(safe(f"{'would rename' if dry_run else 'renamed'} {before} to {after}"))
    for cut in report["truncated"]:
        print(safe(f"{'would cut' if dry_run else 'cut'} {cut['file']} [{cut['from']}, {cut['to']}): {cut['reason']}"))
    print_findings(new)
    for path in report["kept"]:
        print(safe(f"{'would keep' if dry_run else 'kept'} {path}"))
    rebuilt = report["rebuilt"]
    if any(rebuilt.values()):
        units, queues, entries = rebuilt["units"], rebuilt["consume_queues"], rebuilt["index_entries"]
        verb = "would rebuild" if dry_run else "rebuilt"
        print(f"{verb} {units} units of {queues} queues, {entries} index entries")
    if report["damaged_ranges"]:
        print(
            f"{'would keep' if dry_run else 'kept'} {report['quarantined']} messages after the first damage; "
            f"{report['damaged_ranges']} damaged ranges"
        )
    if report["moved_to_cut"]:
        verb = "would move" if dry_run else "moved"
        print(f"{verb} {report['moved_to_cut']} whole messages to cut/; see `mqstore quarantine`")
    known = len(report["findings"]) - len(new)
    if report["changed"]:
        verdict = "would be changed" if dry_run else "was changed"
    elif new:
        verdict = "was not changed: the damage listed above remains"
    else:
        verdict = "has no new damage; nothing to do" if known else "is in order; nothing to do"
    if known:
        verdict += f"; {known} known findings (`mqstore verify --all` lists them)"
    console().print(f"{report['messages']} records verified, the log ends at {report['log_end']}; the store {verdict}")
