"""`mqstore verify`: is everything in the store as it should be? Prints what `mqstore.log.verify` finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click

from mqstore import Finding, MessageStore
from mqstore.broker.configchecks import CONFIG_CHECKS
from mqstore.files.quiet import QUIET
from mqstore.log.verify import Verifier
from mqstore_tools.render import as_json, console, finding_line, note, progress, show_bytes
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
@json_option
@click.pass_context
def verify(
    ctx: click.Context, directory: Path, index_slots: int | None, index_entries: int | None, json_output: bool
) -> None:
    """Check every record, unit, index entry and JSON file of the store in DIR, checksums included.

    Changes nothing, and may run beside a writer. Exit code 1 when anything is found; docs/recovery.md tells what each
    finding means, and `recover` mends what can be mended.
    """
    out = _Output(json_output=json_output)
    with MessageStore(directory, "r", config=java_config(index_slots, index_entries), fs=QUIET) as store:
        verifier = store.verifier(CONFIG_CHECKS)
        began = verifier.front
        with progress("verifying", _progress_of(verifier)):
            for finding in verifier.findings():
                out.add(finding)
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

    def __init__(self, *, json_output: bool) -> None:
        self.kinds: Counter[str] = Counter()
        self.started = False
        self._json = json_output
        self._waiting: list[Finding] = []

    def add(self, finding: Finding) -> None:
        self._waiting.append(finding)
        if len(self._waiting) >= _MANY:
            self._flush()

    def _flush(self) -> None:
        if self._json and not self.started:
            print('{\n  "findings": [', end="")
        self.started = True
        for finding in self._waiting:
            if self._json:
                print(f"{',' if self.kinds else ''}\n    {as_json(finding.as_dict())}", end="")
            elif self.kinds.total() < _MANY:
                print(finding_line(finding))
            self.kinds[finding.kind] += 1
        self._waiting = []

    def end(self, verifier: Verifier) -> None:
        self._flush()
        if self._json:
            counts = {name: getattr(verifier, name) for name in ("messages", "bytes", "body_checksum_only")}
            rest = as_json({"ok": not self.kinds, **counts})
            print(f"{chr(10) + '  ' if self.kinds else ''}],\n  {rest[1:]}")
            return
        screen = console()
        if self.kinds.total() > _MANY:
            screen.print(f"... and {self.kinds.total() - _MANY} more; --json has all")
        found = ", ".join(f"{number} x {kind}" for kind, number in self.kinds.most_common())
        verdict = f"found: {found}" if self.kinds else "all is well"
        screen.print(f"{verifier.messages} records, {show_bytes(verifier.bytes)} verified; {verdict}")
        if verifier.body_checksum_only:
            screen.print(
                f"{verifier.body_checksum_only} records have a checksum of their body only: altered properties and "
                "header fields are not noticed"
            )
