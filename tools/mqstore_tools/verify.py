"""`mqstore verify`: is everything in one store or many as it should be? Prints what `log/recovery` finds."""

from __future__ import annotations

from collections import Counter

import click

from mqstore import Finding, MessageStore, StoreConfig
from mqstore.broker.configchecks import CONFIG_CHECKS
from mqstore.files.quiet import QUIET
from mqstore.jobs.verifying import VerifiedStore, VerifyFinding
from mqstore.jobs.verifying import verify as run
from mqstore.log.recovery.known import load_known
from mqstore.spark.selection import select
from mqstore_tools.many import jobs_option, stores_argument
from mqstore_tools.render import VERSION, as_json, console, note, print_finding, progress, show_bytes
from mqstore_tools.shared import (
    FINDINGS,
    UNUSABLE,
    StoreCommand,
    index_options,
    java_config,
    json_option,
    note_front,
)

__all__ = ["verify"]

_MOST = 1_000_000
"""Findings of a range of the log that are listed, if several processes or stores are at work."""
_MANY = 1000
"""Findings that people are shown; programs get all of them."""


@click.command(
    cls=StoreCommand,
    short_help="Check everything, checksums included. Changes nothing.",
    epilog="""\b
Examples:
  mqstore verify var/mq && echo all is well
  mqstore verify fleet/* --jobs 4
  mqstore verify var/mq --json | jq -r '.findings[].kind' | sort | uniq -c""",
)
@stores_argument
@index_options
@click.option("--all", "all_findings", is_flag=True, help="List known damage too.")
@jobs_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    stores: tuple[str, ...],
    index_slots: int | None,
    index_entries: int | None,
    all_findings: bool,
    jobs: int,
    json_output: bool,
) -> None:
    """Check every record, unit, index entry and JSON file of the stores in DIR, checksums included.

    Changes nothing, and may run beside a writer. Exit code 1 when anything new is found; docs/recovery.md tells what
    each finding means, and `recover` mends what can be mended. Damage in the log that `recover` has reported before is
    known: it is counted, and listed with --all or --json. A store that cannot be opened does not keep the others from
    being checked; the exit code is then 3.
    """
    config = java_config(index_slots, index_entries)
    names = select(stores).stores()
    out = _Output(json_output=json_output, all_findings=all_findings, several=len(names) > 1)
    if len(names) == 1 and jobs == 1:
        _verify_one(names[0].path, config, out)
    else:
        with progress("verifying", of_bytes=False) as report:
            found = run(stores, jobs=jobs, progress=report, config=config, max_errors=_MOST)
        for row in found.stores:
            out.store(row.store, row.error)
            if row.error is None:
                _tell(out, row, [each for each in found.findings if each.store == row.store], config)
        out.end(found.messages, found.bytes, sum(row.body_checksum_only for row in found.stores))
    if out.failed:
        ctx.exit(UNUSABLE)
    if out.kinds:
        ctx.exit(FINDINGS)


def _verify_one(path: str, config: StoreConfig, out: _Output) -> None:
    """Check a store in this process. Findings are printed as they come: memory may not have room for all."""
    with MessageStore(path, "r", config=config, fs=QUIET) as store:
        verifier = store.verifier(CONFIG_CHECKS)
        known = load_known(store.path, store.manifest.commitlog_segment_bytes, store.fs)
        began = verifier.front
        with progress("verifying", lambda: (verifier.done_bytes, verifier.total_bytes)):
            for finding in verifier.findings():
                out.add(finding, known=finding in known)
        out.end(verifier.messages, verifier.bytes, verifier.body_checksum_only)
        for text in store.foreign():
            note(text)
        note_front(began, verifier.front)


def _tell(out: _Output, row: VerifiedStore, findings: list[VerifyFinding], config: StoreConfig) -> None:
    with MessageStore(row.path, "r", config=config, fs=QUIET) as store:
        known = load_known(store.path, store.manifest.commitlog_segment_bytes, store.fs)
        for each in findings:
            finding = Finding(each.kind, each.file, each.position, each.length, each.detail)
            out.add(finding, known=finding in known)
        if row.unlisted:
            note(f"{row.unlisted} more findings of {row.store} are not listed; check it without --jobs to see all")
        for text in store.foreign():
            note(text)


class _Output:
    """Findings on their way out. They go as they come, since a store can be damaged in more places than memory has room
    for; but the first few wait, so that it is still possible to begin again."""

    def __init__(self, *, json_output: bool, all_findings: bool, several: bool) -> None:
        self.kinds: Counter[str] = Counter()
        """New findings by kind."""
        self.failed: dict[str, str] = {}
        """Why stores could not be read, by store."""
        self._several = several
        self._store = ""
        self._known = 0
        self._listed = 0
        self._started = False
        self._json = json_output
        self._all = all_findings
        self._waiting: list[tuple[Finding, bool]] = []

    def store(self, name: str, error: str | None) -> None:
        """Begin with the findings of another store."""
        self._flush()
        self._store = name
        if error is not None:
            self.failed[name] = error
            note(f"{name}: {error}" if self._several else error)

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
                if self._several:
                    row = {"store": self._store, **row}
                print(f"{',' if self._listed else ''}\n    {as_json(row)}", end="")
            elif self._listed < _MANY:
                store = f"{self._store}: " if self._several else ""
                print_finding(finding, prefix=store + ("known " if known else ""))
            self._listed += 1
        self._waiting = []

    def end(self, messages: int, size: int, body_checksum_only: int) -> None:
        """Print what was checked, and the verdict."""
        self._flush()
        if self._json:
            counts = {"messages": messages, "bytes": size, "body_checksum_only": body_checksum_only}
            failed = {"errors": self.failed} if self._several else {}
            rest = as_json({"ok": not self.kinds and not self.failed, **counts, **failed})
            print(f"{chr(10) + '  ' if self._listed else ''}],\n  {rest[1:]}")
            return
        screen = console()
        if self._listed > _MANY:
            screen.print(f"... and {self._listed - _MANY} more; --json has all")
        found = ", ".join(f"{number} x {kind}" for kind, number in self.kinds.most_common())
        verdict = f"found: {found}" if self.kinds else "nothing new" if self._known else "all is well"
        if self.failed:
            verdict = f"{len(self.failed)} stores cannot be read" + (f"; {verdict}" if self.kinds else "")
        if self._known:
            verdict += f"; {self._known} known" + ("" if self._all else " (--all lists them)")
        screen.print(f"{messages} records, {show_bytes(size)} verified; {verdict}")
        if body_checksum_only:
            screen.print(
                f"{body_checksum_only} records have a checksum of their body only: altered properties and header "
                "fields are not noticed"
            )
