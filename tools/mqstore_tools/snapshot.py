"""`mqstore snapshot`: copy a store, even while it is in use, by `mqstore.log.snapshot._take`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mqstore import admin
from mqstore_tools.render import console, note, print_findings, print_if_json, progress, safe, show_bytes
from mqstore_tools.shared import command, directory_argument, findings_on_stderr, finish


@command(
    short_help="Copy a store, even while it is in use.",
    examples="""
  mqstore snapshot var/mq /backup/mq-monday
  mqstore snapshot var/mq /backup/mq-monday --dry-run      # print its size and the free space
  mqstore snapshot var/mq var/mq-now --link && mqstore export var/mq-now --to lake/mq""",
)
@directory_argument
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option(
    "--link",
    is_flag=True,
    help="Hard-link closed segments instead of copying them: fast, no space, only on the same file system.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be copied.")
def snapshot(directory: Path, destination: Path, link: bool, dry_run: bool) -> None:
    """Copy the store in DIR to DEST, a folder that does not exist yet. The store may be in use.

    DEST is a cleanly closed store with everything that was stored before the command started. All checksums are
    verified before the copy gets its name, so DEST is complete or does not exist. A killed command leaves
    DEST.partial-..., which you can delete. Messages that were in flight are redelivered in DEST, as after a crash. Exit
    code 1 if DIR has damage, which DEST then has, too; see docs/recovery.md.
    """
    if dry_run:
        plan = admin.snapshot(directory, destination, link=link, dry_run=True).plan.as_dict()
        if not print_if_json({"dry_run": True, "plan": plan}):
            _show_plan(plan)
        return
    with progress("copying and verifying") as report_progress, findings_on_stderr():
        done = admin.snapshot(directory, destination, link=link, progress=report_progress).as_dict()
    if not print_if_json({"dry_run": False, **done}):
        _show(done)
    finish(done["findings"])


def _show_plan(plan: dict[str, Any]) -> None:
    room = "" if plan["bytes"] <= plan["free_bytes"] else "; that may be too little"
    print(
        safe(
            f"would copy {plan['store']} ({'in use' if plan['writer_alive'] else 'not in use'}) to {plan['snapshot']}: "
            f"{_amount(plan)}; {show_bytes(plan['free_bytes'])} are free there{room}"
        )
    )
    _print_left(plan)


def _show(done: dict[str, Any]) -> None:
    print_findings(done["findings"])
    for cut in done["truncated"]:
        print(safe(f"not copied: {cut['file']} [{cut['from']}, {cut['to']}): {cut['reason']}"))
    _print_left(done)
    verified = f"{done['messages']} records verified, the log ends at {done['log_end']}"
    console().print(safe(f"{done['snapshot']}: {_amount(done)}; {verified}"))


def _amount(plan: dict[str, Any]) -> str:
    parts = [f"{show_bytes(plan['bytes'])} in {plan['files']} files"]
    if plan["linked"]:
        parts.append(f"{plan['linked']} of {plan['segments']} segments hard-linked")
    if plan["bundles"]:
        parts.append(f"{plan['bundles']} bundles that wait in the inbox")
    return ", ".join(parts)


def _print_left(plan: dict[str, Any]) -> None:
    for text in plan["left"]:
        note(f"not copied: {text}")
