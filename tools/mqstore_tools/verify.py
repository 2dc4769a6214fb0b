"""`mqstore verify`: is everything in the store as it should be? Prints what `mqstore.log.verify` finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click

from mqstore import Finding, MessageStore
from mqstore.broker.configchecks import CONFIG_CHECKS
from mqstore.files.quiet import QUIET
from mqstore.log.known import load_known
from mqstore.log.verify import Verifier
from mqstore_tools.render import VERSION, as_json, console, note, print_finding, progress, show_bytes
from mqstore_tools.shared import (
    FINDINGS,
    StoreCommand,
    directory_argument,
    index_options,
    java_config,
    json_option,
    note_front,
)

__all__ = ["verify"]

_MANY = 1000
"""Findings that people are shown; programs get all of them."""


@click.command(
    cls=StoreCommand,
    short_help="Check everything, checksums included. Changes nothing.",
    epilog="""\b
Examples:
  mqstore verify var/mq && echo all is well
  mqstore verify var/mq --json | jq -r '.findings[].kind' | sort | uniq -c""",
)
@directory_argument
@index_options
@click.option("--all", "all_findings", is_flag=True, help="List known damage too.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    directory: Path,
    index_slots: int | None,
    index_entries: int | None,
    all_findings: bool,
    json_output: bool,
) -> None:
    """Check every record, unit, index entry and JSON file of the store in DIR, checksums included.

    Changes nothing, and may run beside a writer. Exit code 1 when anything new is found; docs/recovery.md tells what
    each finding means, and `recover` mends what can be mended. Damage in the log that `recover` has reported before is
    known: it is counted, and listed with --all or --json.
    """
    out = _Output(json_output=json_output, all_findings=all_findings)
    with MessageStore(directory, "r", config=java_config(index_slots, index_entries), fs=QUIET) as store:
        verifier = store.verifier(CONFIG_CHECKS)
        known = load_known(store.path, store.manifest.commitlog_segment_bytes, store.fs)
        began = verifier.front
        with progress("verifying", _progress_of(verifier)):
            for finding in verifier.findings():
                out.add(finding, known=finding in known)
        out.end(verifier)
        for text in store.foreign():
            note(text)
        note_front(began, verifier.front)
    if out.kinds:
        ctx.exit(FINDINGS)


def _progress_of(verifier: Verifier) -> Callable[[], tuple[int, int]]:
    return lambda: (verifier.done_bytes, verifier.total_bytes)


class _Output:
    """Findings on their way out. They go as they come, since a store can be damaged in more places than memory has room
    for; but the first few wait, so that it is still possible to begin again."""

    def __init__(self, *, json_output: bool, all_findings: bool) -> None:
        self.kinds: Counter[str] = Counter()
        """New findings by kind."""
        self._known = 0
        self._listed = 0
        self._started = False
        self._json = json_output
        self._all = all_findings
        self._waiting: list[tuple[Finding, bool]] = []

    def add(self, finding: Finding, *, known: bool) -> None:
        self._waiting.append((finding, known))
        if len(self._waiting) >= _MANY:
            self._flush()

    def _flush(self) -> None:
        if self._json and not self._started:
            print(f'{as_json(VERSION)[:-1]},\n  "findings": [', end="")
        self._started = True
        for finding, known in self._waiting:
            if known:
                self._known += 1
            else:
                self.kinds[finding.kind] += 1
            if known and not self._all and not self._json:
                continue
            if self._json:
                row = {**finding.as_dict(), "known": known}
                print(f"{',' if self._listed else ''}\n    {as_json(row)}", end="")
            elif self._listed < _MANY:
                print_finding(finding, prefix="known " if known else "")
            self._listed += 1
        self._waiting = []

    def end(self, verifier: Verifier) -> None:
        self._flush()
        if self._json:
            counts = {name: getattr(verifier, name) for name in ("messages", "bytes", "body_checksum_only")}
            rest = as_json({"ok": not self.kinds, **counts})
            print(f"{chr(10) + '  ' if self._listed else ''}],\n  {rest[1:]}")
            return
        screen = console()
        if self._listed > _MANY:
            screen.print(f"... and {self._listed - _MANY} more; --json has all")
        found = ", ".join(f"{number} x {kind}" for kind, number in self.kinds.most_common())
        verdict = f"found: {found}" if self.kinds else "nothing new" if self._known else "all is well"
        if self._known:
            verdict += f"; {self._known} known" + ("" if self._all else " (--all lists them)")
        screen.print(f"{verifier.messages} records, {show_bytes(verifier.bytes)} verified; {verdict}")
        if verifier.body_checksum_only:
            screen.print(
                f"{verifier.body_checksum_only} records have a checksum of their body only: altered properties and "
                "header fields are not noticed"
            )
