"""`mqstore verify`: check one store or many, and print the findings of `mqstore.jobs.verify`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from mqstore_tools.multi_store import on_spark, spark_option, stores_argument
from mqstore_tools.render import console, finding_of, json_asked, note, print_finding, print_json, progress, show_bytes
from mqstore_tools.shared import UNUSABLE, command, findings_on_stderr, finish, note_front

_LISTED = 10_000
"""Limit of listed findings of a range, since there may be more than memory can hold."""
_SHOWN = 1000
"""Limit of printed findings. JSON has all."""


@command(
    short_help="Check everything, checksums included. Changes nothing.",
    examples="""
  mqstore verify var/mq && echo all is well
  mqstore verify fleet/* --spark local[4]
  mqstore verify var/mq --json | jq -r '.findings[].kind' | sort | uniq -c""",
)
@stores_argument
@click.option("--all", "all_findings", is_flag=True, help="List known damage too.")
@spark_option
def verify(stores: tuple[str, ...], all_findings: bool, master: str | None) -> None:
    """Check every record, unit, index entry and JSON file of the stores in DIR, checksums included.

    Changes nothing, and works while a writer has the store open. Exit code 1 if there are new findings.
    docs/recovery.md explains each kind, and `recover` repairs what can be repaired. Damage in the log that `recover`
    has reported before is known: it is counted, and listed with --all or --json. If a store cannot be opened, the
    others are checked, and the exit code is 3.
    """
    from mqstore.jobs import verify as run

    with on_spark(master) as spark, progress("verifying", of_bytes=False) as report, findings_on_stderr():
        found = run(stores, spark=spark, progress=report, max_errors=_LISTED).to_dict()
    several = len(found["stores"]) > 1
    new: Counter[str] = Counter(finding["kind"] for finding in found["findings"] if not finding["known"])
    failed = {row["store"]: row["error"] for row in found["stores"] if row["error"] is not None}
    if json_asked():
        _print_json(found, ok=not new and not failed, failed=failed if several else None)
    for row in found["stores"]:
        if row["error"] is not None:
            note(f"{row['store']}: {row['error']}" if several else row["error"])
        if row["unlisted"]:
            why = f"a part of the log has more than {_LISTED}"
            note(f"{row['store']}: {row['unlisted']} more findings are not listed: {why}")
        for text in row["foreign"]:
            note(text)
        note_front(*row["front"])
    if not json_asked():
        _show(found, new, len(failed), all_findings=all_findings)
    finish(failed, UNUSABLE)
    finish(new)


def _print_json(found: dict[str, Any], *, ok: bool, failed: dict[str, str] | None) -> None:
    """Print the report. The store of each finding, and `failed`, are only for several stores."""
    sums = {"messages": found["messages"], "bytes": found["bytes"], "body_checksum_only": _body_checksum_only(found)}
    findings = found["findings"]
    if failed is None:
        findings = [{name: value for name, value in each.items() if name != "store"} for each in findings]
    print_json({"ok": ok, **sums, **({} if failed is None else {"errors": failed}), "findings": findings})


def _show(found: dict[str, Any], new: Counter[str], failed: int, *, all_findings: bool) -> None:
    """Print the findings, the amounts checked, and the verdict."""
    known = len(found["findings"]) - new.total()
    listed = [finding for finding in found["findings"] if all_findings or not finding["known"]]
    for each in listed[:_SHOWN]:
        store = f"{each['store']}: " if len(found["stores"]) > 1 else ""
        print_finding(finding_of(each), prefix=store + ("known " if each["known"] else ""))
    screen = console()
    if len(listed) > _SHOWN:
        screen.print(f"... and {len(listed) - _SHOWN} more; --json has all")
    kinds = ", ".join(f"{number} x {kind}" for kind, number in new.most_common())
    verdict = f"found: {kinds}" if kinds else "nothing new" if known else "all is well"
    if failed:
        verdict = f"{failed} stores cannot be read" + (f"; {verdict}" if kinds else "")
    if known:
        verdict += f"; {known} known" + ("" if all_findings else " (--all lists them)")
    screen.print(f"{found['messages']} records, {show_bytes(found['bytes'])} verified; {verdict}")
    if count := _body_checksum_only(found):
        screen.print(
            f"{count} records have a checksum of their body only: changed properties or header fields are not detected"
        )


def _body_checksum_only(found: dict[str, Any]) -> int:
    return sum(row["body_checksum_only"] for row in found["stores"])
