"""`mqstore demo`: a real workload, killed twice, and the bookkeeping afterwards.

Every line of the Python standard library's sources becomes a message:

    topic          stdlib
    queue          consistent hash of the message group, as RocketMQ's proxy chooses it
    body           the line, with its line end
    __SHARDINGKEY  message group: the file, relative to the library, percent-encoded      asyncio/queues.py
    KEYS           the line                                                               asyncio/queues.py:17
    TAGS           top-level package or module                                            asyncio

    writer process     put_batch, ..., put_batch, flush, acknowledge, ...   SIGKILL   open, ask what is there, go on ...
    reader processes   consume the queues, put each file together, SHA-256
    this process       plans, kills, compares, breaks a copy and has it mended

A line is acknowledged once it is on disk: the writer flushes after some thousand lines, reports them over a pipe, and
goes on when that was noted. At any moment there may be lines in the store that nobody knows of; a kill leaves them
there. The next writer may neither lose nor repeat them, so it asks the store what lies behind the last acknowledged
offset of each queue.

Nothing here is trusted that can be checked: each claim printed is a check, and one that fails makes the exit code 1.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import random
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import mqstore
from mqstore.broker.admin.contents import inspect_store
from mqstore.broker.admin.inspect import inspect_broker
from mqstore.broker.configchecks import CONFIG_CHECKS
from mqstore.broker.selection import group_queue
from mqstore.layout.batch import encode_batch
from mqstore.layout.consumequeue import UNIT_BYTES
from mqstore.layout.indexfile import ENTRY_BYTES, HEADER_BYTES, SLOT_BYTES, IndexHeader
from mqstore.layout.properties import KEYS, NAME_END, PAIR_END, SHARDINGKEY, TAGS, encode_properties
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore_tools import render
from mqstore_tools.inspect import show_store
from mqstore_tools.shared import FINDINGS, NumberRange, StoreCommand, findings_told, json_option

__all__ = ["Source", "demo", "read_sources"]

TOPIC = "stdlib"
QUEUES = 8
KILLS = ((0.25, 0.45), (0.6, 0.8))
"""Between which shares of all lines each kill falls."""
BATCH_LINES = 256
ACK_GROUPS = 50
"""Acknowledgements in a whole run, about; a group of lines is flushed and acknowledged together."""
ACK_LINES_MAX = 16_384
LOOK_UPS = 200
READERS_MAX = 4
WIDTH_MAX = 100
"""Columns: longer lines are hard to read."""
RECORD_OVERHEAD_BYTES = 200
"""Header, topic, properties, unit and index entry of a line, about: for the estimate of what a run needs on disk."""
FIXED_BYTES = 300 << 20
BODY_AT = 88
"""Where the body begins in a record with IPv4 hosts."""

_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}


# --- the workload ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the standard library, and where its lines go."""

    group: str
    path: str
    queue_id: int
    tag: str
    lines: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Ack:
    """All lines before line `line` of file `file` are on disk; `offsets` is the next offset of each queue."""

    file: int = 0
    line: int = 0
    lines: int = 0
    offsets: Mapping[int, int] = field(default_factory=dict)


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends; bytes behind the last newline are one more."""
    return io.BytesIO(data).readlines()


def read_sources(root: Path, limit_bytes: int | None, rng: random.Random) -> list[Source]:
    """Return the readable .py files below `root` in order, without installed packages.

    With a limit a random sample of whole files of about so many bytes, smaller when the library is.
    """
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _FOREIGN)
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    paths = sorted(path for path in paths if os.access(path, os.R_OK))
    if limit_bytes is not None:
        rng.shuffle(paths)
    sources: list[Source] = []
    total = 0
    for path in paths:
        if limit_bytes is not None and total >= limit_bytes:
            break
        data = Path(path).read_bytes()
        total += len(data)
        group = quote(os.fsencode(os.path.relpath(path, root)))
        tag = group.partition("/")[0].removesuffix(".py")
        digest = hashlib.sha256(data).hexdigest()
        sources.append(Source(group, path, group_queue(group, QUEUES), tag, len(_lines(data)), len(data), digest))
    return sorted(sources, key=lambda source: source.group)


def _key_of(text: str) -> tuple[str, int]:
    """Group and line number of a KEYS property."""
    group, _, line = text.rpartition(":")
    return group, int(line)


# --- the writer process ----------------------------------------------------------------------------------------------


def _stored_behind(store: mqstore.engine.MessageStore, acked: Ack) -> tuple[dict[int, int], dict[str, int], int, int]:
    """What the store holds behind the last acknowledged line: (next offset of each queue, next line of each file met
    there, how many lines those are, how many acknowledged ones are missing)."""
    offsets = dict(acked.offsets)
    next_line: dict[str, int] = {}
    behind = 0
    for ref in store.queues(TOPIC) if TOPIC in store.topics() else ():
        offset, end = acked.offsets.get(ref.queue_id, 0), store.offsets(*ref)[1]
        for message in store.iter(*ref, start=offset) if end > offset else ():
            group, line = _key_of(message.keys[0])
            next_line[group] = line + 1
            behind += 1
        offsets[ref.queue_id] = end
    lost = sum(max(0, offset - offsets[queue_id]) for queue_id, offset in acked.offsets.items())
    return offsets, next_line, behind, lost


def _write(parent: Connection[Any, Any], root: str, sources: Sequence[Source], acked: Ack, ack_lines: int) -> None:
    """Put every line from `acked` on that is not in the store yet. Sends facts once the store is open, then an `Ack`
    for each group, and waits for an answer to each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends us
    begin = time.perf_counter()
    with mqstore.engine.MessageStore(root) as store:
        opened = time.perf_counter() - begin
        offsets, next_line, behind, lost = _stored_behind(store, acked)
        recovery = store.recovery.as_dict()
        parent.send({"open_seconds": opened, "recovery": recovery, "unacknowledged": behind, "lost": lost})
        lines_done = acked.lines + behind
        unflushed = 0
        for i, source in enumerate(sources[acked.file :], acked.file):
            common = encode_properties({SHARDINGKEY: source.group, TAGS: source.tag})
            prefix = common + KEYS.encode() + NAME_END + source.group.encode() + b":"
            lines = _lines(Path(source.path).read_bytes())
            first = max(acked.line if i == acked.file else 0, next_line.get(source.group, 0))
            for at in range(first, len(lines), BATCH_LINES):
                chunk = lines[at : at + BATCH_LINES]
                wire = encode_batch((0, line, b"%b%d%b" % (prefix, n, PAIR_END)) for n, line in enumerate(chunk, at))
                receipts = store.put_batch(TOPIC, wire, source.queue_id)
                offsets[source.queue_id] = receipts[-1].offset + 1
                lines_done += len(chunk)
                unflushed += len(chunk)
                if unflushed >= ack_lines:
                    store.flush()
                    parent.send(Ack(i, at + len(chunk), lines_done, dict(offsets)))
                    parent.recv()
                    unflushed = 0
        store.flush()
        parent.send(Ack(len(sources), 0, lines_done, offsets))


# --- the reader processes --------------------------------------------------------------------------------------------


def _read(root: str, queue_id: int) -> tuple[int, dict[str, tuple[int, str]], int, int]:
    """Consume a queue: (messages, {group: (lines, SHA-256)}, messages that came again, messages in the wrong place)."""
    next_line: dict[str, int] = {}
    digests: dict[str, Any] = {}
    seen = duplicates = misplaced = 0
    with mqstore.engine.MessageStore(root, "r") as store:
        for message in store.iter(TOPIC, queue_id):
            properties = message.stored_properties()
            group, line = _key_of(properties[KEYS])
            expected = next_line.get(group, 0)
            seen += 1
            if line < expected:
                duplicates += 1
                continue
            misplaced += line > expected or properties[SHARDINGKEY] != group
            digests.setdefault(group, hashlib.sha256()).update(message.body)
            next_line[group] = line + 1
    files = {group: (next_line[group], digest.hexdigest()) for group, digest in digests.items()}
    return seen, files, duplicates, misplaced


# --- the parent ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Flip:
    """A place where bytes are wrong, and the kind of finding that it must give."""

    what: str
    kind: str
    file: str
    position: int

    def explains(self, finding: mqstore.engine.Finding) -> bool:
        """Return True if `finding` is about this byte. A finding in an index names its file only."""
        inside = finding.position <= self.position < finding.position + finding.length
        return finding.kind == self.kind and finding.file == self.file and (inside or self.kind == "bad_index")


def _place(folder: str, position: int, file_bytes: int) -> tuple[str, int]:
    """The file of a run of equal files that holds byte `position`, and where in it."""
    return f"{folder}/{position // file_bytes * file_bytes:020d}", position % file_bytes


class _Demo:
    def __init__(self, console: Console, root: Path, sources: Sequence[Source], rng: random.Random) -> None:
        self.console = console
        self.root = root
        self.store_path = root / "store"
        self.sources = sources
        self.rng = rng
        self.lines = sum(source.lines for source in sources)
        self.size = sum(source.size for source in sources)
        self.checks: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.rates: list[tuple[str, float, float, str]] = []
        """What, items a second, bytes a second, items."""
        # spawn: a fork of a process with threads is nobody's friend, and macOS does not even offer it by default.
        self.processes = multiprocessing.get_context("spawn")
        self._step = 0

    # -- printing ---------------------------------------------------------------------------------------------------

    def step(self, title: str, sentence: str) -> None:
        self._step += 1
        self.console.print()
        self.console.rule(Text(f"{self._step}  {title}", style="bold"), align="left", style="dim")
        self.say(sentence, style="italic")

    def say(self, text: str, label: str = "", style: str = "") -> None:
        """Print a paragraph, behind a label if there is one."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        if label:
            grid.add_column(width=9)
        grid.add_row(*([Text(label, style=style)] if label else []), Text(render.safe(text), "" if label else style))
        self.show(grid)

    def show(self, table: Table) -> None:
        self.console.print(Padding(table, (0, 0, 0, 3), expand=False))

    def check(self, name: str, ok: bool, text: str) -> None:
        self.checks.append({"name": name, "ok": ok, "detail": text})
        self.say(text, "ok" if ok else "FAILED", "bold green" if ok else "bold red")

    def rate(self, what: str, items: int, size: float, seconds: float, unit: str) -> None:
        self.rates.append((what, items / max(seconds, 1e-9), size / max(seconds, 1e-9), unit))

    @property
    def failed(self) -> list[str]:
        return [check["name"] for check in self.checks if not check["ok"]]

    # -- 1: the workload --------------------------------------------------------------------------------------------

    def introduce(self, library: Path) -> None:
        """Say what is to be stored. FileNotFoundError when there is nothing."""
        self.step("The workload", f"Each line of the sources of Python {sys.version.split()[0]} is to be a message.")
        if not self.lines:
            raise FileNotFoundError(f"{library} has no Python sources: this Python came without them")
        self.say(f"{len(self.sources):,} files, {self.lines:,} lines, {_mb(self.size)} in {library}")
        self.say(f"topic {TOPIC}, {QUEUES} queues; message group: the file; key: file and line; tag: top-level package")
        needed = 2 * (self.size + self.lines * RECORD_OVERHEAD_BYTES + FIXED_BYTES)  # the store and its copy
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise click.UsageError(
                f"{self.root} has {_mb(free)} free, this takes about {_mb(needed)}: use --dir or --limit-mb"
            )

    # -- 2: writing and being killed --------------------------------------------------------------------------------

    def write(self) -> None:
        ack_lines = max(64, min(ACK_LINES_MAX, self.lines // ACK_GROUPS))
        self.step(
            "Write, and be killed",
            f"A child process puts each line as a message, flushes after {ack_lines:,} or so and acknowledges them "
            "over a pipe. Twice it gets a SIGKILL in the middle of its work, at a random moment. The next one opens "
            "the store, which recovers it, asks it what is there beyond the last acknowledged line, and goes on.",
        )
        acked, busy, put = Ack(), 0.0, 0
        runs: list[dict[str, Any]] = []
        for low, high in (*KILLS, (2.0, 2.0)):
            before, kill_at = acked.lines, int(self.lines * self.rng.uniform(low, high))
            acked, exit_code, facts, seconds = self._run_writer(acked, ack_lines, kill_at, len(runs) + 1)
            first = before + facts.get("unacknowledged", 0)
            runs.append({"first_line": first, "acknowledged": acked.lines, "exit_code": exit_code, **facts})
            busy, put = busy + seconds, put + acked.lines - first
            if exit_code not in (0, -signal.SIGKILL):
                break
        self.facts["runs"] = runs
        self.check(
            "killed",
            [run["exit_code"] for run in runs] == [-signal.SIGKILL] * len(KILLS) + [0],
            f"{len(KILLS)} writers died of SIGKILL while writing, the last one finished by itself",
        )
        lost = sum(run.get("lost", 0) for run in runs)
        self.check("acknowledged", lost == 0, f"{lost} acknowledged lines were lost")
        stored = sum(acked.offsets.values())
        complete = acked.lines == stored == self.lines
        self.check("complete", complete, f"{stored:,} messages in the queues for {self.lines:,} lines")
        self.rate("put, flushed in groups", put, self.size * put / self.lines, busy, "lines of source")

    def _run_writer(
        self, acked: Ack, ack_lines: int, kill_at: int, number: int
    ) -> tuple[Ack, int | None, dict[str, Any], float]:
        """(last acknowledgement, exit code, what the writer said of itself, seconds until the acknowledgement)."""
        ours, theirs = self.processes.Pipe()
        arguments = (theirs, str(self.store_path), self.sources, acked, ack_lines)
        process = self.processes.Process(target=_write, args=arguments, daemon=True)
        process.start()
        theirs.close()
        facts: dict[str, Any] = {}
        begin = last = time.perf_counter()
        groups, pause = 0, self.rng.random()
        bar = render.progress(f"writer {number}", lambda: (acked.lines, self.lines), of_bytes=False)
        try:
            with ours, bar, suppress(EOFError, OSError):  # OSError: it was killed in the middle of sending
                facts = ours.recv()
                begin = time.perf_counter()
                while True:
                    acked = ours.recv()
                    groups += 1
                    last = time.perf_counter()
                    with suppress(BrokenPipeError):  # it has ended; perhaps not all that it sent was read
                        ours.send(None)
                    if acked.lines >= kill_at:
                        # Anywhere within the next group: in a put, between puts, in the flush.
                        time.sleep(pause * (last - begin) / groups)
                        process.kill()
            process.join()
        finally:
            process.kill()  # one that has ended does not mind
            process.join()
        self._show_opening(number, facts)
        label, style = {0: ("finished", ""), -signal.SIGKILL: ("SIGKILL", "yellow")}.get(
            process.exitcode or 0, (f"exit {process.exitcode}", "red")
        )
        self.say(f"at {acked.lines:,} acknowledged lines, pid {process.pid}", label, style)
        return acked, process.exitcode, facts, last - begin

    def _show_opening(self, number: int, facts: dict[str, Any]) -> None:
        report = facts.get("recovery", {"clean_shutdown": True})
        if report["clean_shutdown"]:
            self.say("made the store", f"writer {number}")
            return
        torn = sum(cut["to"] - cut["from"] for cut in report["truncated"])
        self.say(
            f"opened it in {facts['open_seconds']:.2f} s. Of {_mb(report['log_end'])} of log the last "
            f"{_mb(report['log_end'] - (report['scanned_from'] or 0))} were read again: {report['messages']:,} records "
            f"are whole, {f'a torn tail of {torn:,} bytes was cut' if torn else 'none is torn'}. Built "
            f"{report['rebuilt']['units']:,} consume-queue units and {report['rebuilt']['index_entries']:,} index "
            f"entries. {facts['unacknowledged']:,} lines are there of which nobody was told; they are not put again.",
            f"writer {number}",
        )

    # -- 3: reading -------------------------------------------------------------------------------------------------

    def read(self) -> None:
        count = max(2, min(READERS_MAX, os.cpu_count() or 1))
        self.step(
            "Read it all back",
            f"{count} reader processes consume the {QUEUES} queues, put every file together again line by line, and "
            "compare its SHA-256 with that of the original.",
        )
        files: dict[str, tuple[int, str]] = {}
        total = duplicates = misplaced = 0
        queues = sorted({source.queue_id for source in self.sources if source.lines})
        begin = time.perf_counter()
        with (
            self.processes.Pool(count, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool,
            render.progress("reading", of_bytes=False) as report,
        ):
            for found in pool.imap_unordered(partial(_read, str(self.store_path)), queues):
                files |= found[1]
                total, duplicates, misplaced = total + found[0], duplicates + found[2], misplaced + found[3]
                report(total, self.lines)
        seconds = time.perf_counter() - begin
        empty = (0, hashlib.sha256().hexdigest())
        wrong = [s.group for s in self.sources if files.get(s.group, empty) != (s.lines, s.sha256)]
        self.check(
            "once",
            total == self.lines and not duplicates and not misplaced,
            f"{total:,} messages read, {duplicates:,} of them twice, {misplaced:,} out of place",
        )
        self.check(
            "files",
            not wrong and set(files) <= {source.group for source in self.sources},
            f"{len(self.sources) - len(wrong):,} of {len(self.sources):,} files have the SHA-256 of the original"
            + (f"; not {', '.join(wrong[:3])}" if wrong else ""),
        )
        self.rate(f"read by {count} processes, start included", total, self.size, seconds, "lines of source")

    # -- 4: looking at it -------------------------------------------------------------------------------------------

    def look(self) -> None:
        self.step(
            "Look at it",
            "What `mqstore inspect` shows of this store, some lines looked up by their key, and `mqstore verify`: "
            "every record, unit and index entry.",
        )
        with render.progress("reading the log") as report:
            found = inspect_store(self.store_path, progress=report)
        found["broker"] = inspect_broker(self.store_path)
        self.facts["inspect"] = found
        self.console.print()
        if not self.console.quiet:
            show_store(found)
        self.console.print()
        full = [source for source in self.sources if source.lines]
        chosen = self.rng.choices(full, weights=[s.lines for s in full], k=min(LOOK_UPS, self.lines))
        wanted = [(source, self.rng.randrange(source.lines)) for source in chosen]
        with mqstore.engine.MessageStore(self.store_path, "r") as store:
            begin = time.perf_counter()
            hits = [store.find(TOPIC, key=f"{source.group}:{line}") for source, line in wanted]
            seconds = time.perf_counter() - begin
            right = sum(
                [message.body for message in messages] == [_lines(Path(source.path).read_bytes())[line]]
                for (source, line), messages in zip(wanted, hits, strict=True)
            )
        all_right = right == len(wanted)
        self.check("keys", all_right, f"{right} of {len(wanted)} random lines found by their key, and they alone")
        self.rate("look up by key", len(wanted), 0, seconds, "look-ups")
        begin = time.perf_counter()
        findings, messages, size = self._verify(self.store_path)
        self.check(
            "verified",
            not findings and messages == self.lines,
            f"verify: {messages:,} messages, {_mb(size)}, {len(findings)} findings",
        )
        self.rate("verify everything", messages, size, time.perf_counter() - begin, "records of log")

    def _verify(self, path: Path) -> tuple[list[mqstore.engine.Finding], int, int]:
        """(findings, messages, bytes)."""
        with mqstore.engine.MessageStore(path, "r") as store:
            verifier = store.verifier(CONFIG_CHECKS)
            with render.progress("verifying", lambda: (verifier.done_bytes, verifier.total_bytes)):
                return list(verifier.findings()), verifier.messages, verifier.bytes

    # -- 5: breaking a copy -----------------------------------------------------------------------------------------

    def damage(self) -> None:
        self.step(
            "Break a copy, and mend it",
            "One bit is flipped in each of three files of a copy. A consume queue and the index are made from the log, "
            "so `mqstore recover` makes them again. The log is where messages are: a damaged one cannot be mended, "
            "only noticed, told, and passed over; its neighbours stay readable.",
        )
        copy = self.root / "copy"
        shutil.copytree(self.store_path, copy)
        flips, unit, queue, damaged = self._flip_three(copy)
        before, *_ = self._verify(copy)
        begin = time.perf_counter()
        with render.progress("recovering") as progress, findings_told():
            report = recover_store(copy, RecoverOptions(), progress=progress)
        seconds = time.perf_counter() - begin
        after, *_ = self._verify(copy)
        rows = [
            (
                f"{flip.what}: {flip.file}, byte {flip.position:,}",
                flip.kind if any(map(flip.explains, before)) else "nothing",
                "damaged still" if any(map(flip.explains, after)) else "mended",
            )
            for flip in flips
        ]
        self.show(render.table("", ("a bit of", "verify", "after recover"), rows))
        self.console.print()
        found = sum(any(map(flip.explains, before)) for flip in flips)
        other = [finding for finding in before if not any(flip.explains(finding) for flip in (*flips, unit))]
        self.check(
            "found",
            found == len(flips) and not other,
            f"verify gave {len(before)} findings; they tell of {found} of {len(flips)} flips, and {len(other)} of "
            "something else",
        )
        self.check(
            "mended",
            [finding.kind for finding in after] == ["bad_record"],
            f"recover wrote {report.rebuilt.units:,} unit{'s' * (report.rebuilt.units != 1)} and "
            f"{report.rebuilt.index_entries:,} index entries anew; of what verify says now {len(after) - 1} is not the "
            "damaged message",
        )
        expected = sum(source.lines for source in self.sources if source.queue_id == queue.queue_id)
        with mqstore.engine.MessageStore(copy, "r") as store:
            offsets = [message.offset for message in store.iter(*queue)]
        self.check(
            "passed_over",
            offsets == [offset for offset in range(expected) if offset != damaged],
            f"queue {queue.queue_id} of the copy: {len(offsets):,} of {expected:,} messages come, all but number "
            f"{damaged:,}",
        )
        self.facts["damage"] = {
            "flipped": [asdict(flip) for flip in flips],
            "findings": [finding.as_dict() for finding in before],
            "recovered": report.as_dict(),
            "findings_after": [finding.as_dict() for finding in after],
        }
        self.rate("recover everything", report.messages, report.log_end, seconds, "records of log")

    def _flip_three(self, copy: Path) -> tuple[list[_Flip], _Flip, mqstore.QueueRef, int]:
        """Flip a bit of a unit, an index entry and a body. Return these; the unit of the body, which is a finding, too,
        for it has lost its record; and the queue and the offset of the body."""
        rng = self.rng
        with mqstore.engine.MessageStore(copy, "r") as store:
            manifest = store.manifest
            unit_of, body_of = rng.choices(store.queues(TOPIC), k=2)
            slot, damaged = (rng.randrange(store.offsets(*ref)[1]) for ref in (unit_of, body_of))
            [message] = store.read(*body_of, damaged, max_messages=1)
            body_at = message.physical_offset + BODY_AT + rng.randrange(len(message.body))
        index = min((copy / "index").iterdir())
        entry = rng.randrange(1, IndexHeader.decode(index.read_bytes()[:HEADER_BYTES]).next_entry)
        entry_at = HEADER_BYTES + SLOT_BYTES * manifest.index_slots + ENTRY_BYTES * entry

        def unit(ref: mqstore.QueueRef, slot: int) -> tuple[str, int]:
            folder = f"consumequeue/{TOPIC}/{ref.queue_id}"
            return _place(folder, slot * UNIT_BYTES, manifest.consumequeue_segment_bytes)

        file, at = unit(unit_of, slot)
        flips = [
            _Flip("a consume-queue unit", "bad_unit", file, at + rng.randrange(8)),
            _Flip("an index entry", "bad_index", f"index/{index.name}", entry_at + rng.randrange(4)),
            _Flip("a message body", "bad_record", *_place("commitlog", body_at, manifest.commitlog_segment_bytes)),
        ]
        for flip in flips:
            with open(copy / flip.file, "r+b") as stream:
                stream.seek(flip.position)
                [byte] = stream.read(1)
                stream.seek(flip.position)
                stream.write(bytes([byte ^ 1 << rng.randrange(8)]))
        return flips, _Flip("its unit", "bad_unit", *unit(body_of, damaged)), body_of, damaged

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self, seconds: float) -> dict[str, Any]:
        self.step("What it came to", "Rates of this run on this machine, with everything else that was going on.")
        rows = [
            (what, f"{items:,.0f}", unit, f"{size / 1e6:,.0f}" if size else "")
            for what, items, size, unit in self.rates
        ]
        self.show(render.table("", ("", "a second>", "", "MB/s>"), rows))
        self.console.print()
        self.say(
            f"{len(self.checks) - len(self.failed)} of {len(self.checks)} checks hold, {seconds:.0f} s"
            + (f"; these do not: {', '.join(self.failed)}" if self.failed else ""),
            style="bold red" if self.failed else "bold green",
        )
        names = ("what", "items_per_second", "bytes_per_second", "items")
        return {
            "ok": not self.failed,
            "files": len(self.sources),
            "lines": self.lines,
            "bytes": self.size,
            "checks": self.checks,
            **self.facts,
            "rates": [dict(zip(names, rate, strict=True)) for rate in self.rates],
            "seconds": seconds,
        }


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


# --- the command -----------------------------------------------------------------------------------------------------


@click.command(
    cls=StoreCommand,
    epilog="""\b
Examples:
  mqstore demo
  mqstore demo --limit-mb 2 --dir var/demo && mqstore inspect var/demo/store""",
)
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Work here, in DIR/store and DIR/copy, and leave both there. New or empty. Default: a temporary directory.",
)
@click.option("--keep", is_flag=True, help="Leave the temporary directory. One with a failed check stays anyway.")
@click.option("--limit-mb", type=NumberRange(min=0, min_open=True), help="Only a sample of about so much source.")
@click.option("--seed", type=int, help="Repeats the sample, the plan of the kills and the damage of another run.")
@json_option
@click.pass_context
def demo(
    ctx: click.Context,
    directory: Path | None,
    keep: bool,
    limit_mb: float | None,
    seed: int | None,
    json_output: bool,
) -> None:
    """Store, kill, recover, read, inspect and break a real workload.

    Every line of the Python standard library becomes a message. The writing process is killed twice with SIGKILL, and
    another goes on; readers put every file together again and compare SHA-256; then a copy is damaged and mended. Exit
    code 1 if any check fails.
    """
    begin = time.perf_counter()
    screen = render.console()
    screen.width = min(screen.width, WIDTH_MAX)
    screen.quiet = json_output
    if seed is None:
        seed = random.SystemRandom().randrange(1_000_000)
    rng = random.Random(seed)
    if directory is not None:
        if directory.exists() and any(directory.iterdir()):
            raise click.BadParameter(f"{directory} is not empty", ctx, param_hint="--dir")
        directory.mkdir(parents=True, exist_ok=True)
        keep = True
    root = directory or Path(tempfile.mkdtemp(prefix="mqstore-demo-"))
    try:
        screen.print(
            Text.assemble(
                ("mqstore demo", "bold"),
                render.safe(f", seed {seed}, in {root}{'' if keep else ', removed at the end'}"),
            )
        )
        library = Path(sysconfig.get_path("stdlib"))
        sources = read_sources(library, None if limit_mb is None else int(limit_mb * 1e6), rng)
        work = _Demo(screen, root, sources, rng)
        work.introduce(library)
        for step in (work.write, work.read, work.look, work.damage):
            step()
            if work.failed:
                keep = True  # somebody will want to look
                break
        summary = work.finish(time.perf_counter() - begin)
    except mqstore.MQStoreError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
        elif directory is None:
            screen.print(Text(render.safe(f"\n   {root} is kept")))
    if json_output:
        render.print_json({"seed": seed, "directory": str(root) if keep else None, **summary})
    if work.failed:
        ctx.exit(FINDINGS)
