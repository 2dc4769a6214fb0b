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

A line is acknowledged once it is on disk: the writer flushes after some thousand lines and reports them over a pipe. At
any moment there are lines in the store that nobody was told of; a kill leaves them there. The next writer may neither
lose nor repeat them, so it asks the store what lies behind the last acknowledged offset of each queue.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import click
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import mqstore
from mqstore.broker.admin.contents import inspect_store
from mqstore.broker.configchecks import CONFIG_CHECKS
from mqstore.layout.batch import encode_batch
from mqstore.layout.consumequeue import UNIT_BYTES
from mqstore.layout.hosts import encode_host
from mqstore.layout.indexfile import ENTRY_BYTES, HEADER_BYTES, SLOT_BYTES, IndexHeader
from mqstore.layout.javahash import java_hash
from mqstore.layout.properties import KEYS, NAME_END, PAIR_END, SHARDINGKEY, TAGS, encode_properties
from mqstore.layout.record import header_struct
from mqstore.log.recovery import RecoverOptions
from mqstore.log.repair import recover_store
from mqstore_tools import render
from mqstore_tools.shared import FINDINGS, NumberRange, StoreCommand, findings_told, json_option

__all__ = ["Source", "demo", "line_count", "queue_of", "read_sources"]

TOPIC = "stdlib"
QUEUES = 8
KILLS = ((0.25, 0.45), (0.6, 0.8))
"""Between which shares of all lines each kill falls."""
BATCH_LINES = 256
ACK_GROUPS = 50
"""Acknowledgements in a whole run, about; a group of lines is flushed and acknowledged together."""
ACK_LINES_MAX = 16_384
WINDOW = 6
"""Groups that the writer may be ahead of what the parent has seen. The last kill is planned at 0.8 of all lines or
before, so a parent that is slow to strike still meets a writer that has not finished."""
LOOK_UPS = 200
PROGRESS_MESSAGES = 16_384
WIDTH_MAX = 100
"""Columns: longer lines are hard to read."""
RECORD_OVERHEAD_BYTES = 200
"""Header, topic, properties, unit and index entry of a line, about: for the estimate of what a run needs on disk."""
FIXED_BYTES = 300 << 20

_QUEUE_COLUMNS = {
    "first>": "min_offset",
    "next>": "max_offset",
    "from byte>": "min_physical_offset",
    "to byte>": "max_physical_offset",
}
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}
_MASK_64 = (1 << 64) - 1


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


def queue_of(group: str, queues: int) -> int:
    """The queue of a message group: Guava's consistent hash of the Java hash (broker-semantics 12).

    >>> [queue_of(group, 4) for group in ("", "order-1", "order-2")]
    [0, 3, 2]
    """
    state = java_hash(group) & _MASK_64
    candidate = 0
    while True:
        state = (state * 2862933555777941757 + 1) & _MASK_64
        following = int((candidate + 1) / (((state >> 33) + 1) / (1 << 31)))
        if following >= queues:
            return candidate
        candidate = following


def line_count(data: bytes) -> int:
    """How many lines `data` has; what stands behind the last newline is one, if it is not empty.

    >>> [line_count(data) for data in (b"", b"a", b"a\\n", b"a\\r\\nb")]
    [0, 1, 1, 2]
    """
    return data.count(b"\n") + (not data.endswith(b"\n") if data else 0)


def read_sources(root: Path, limit_bytes: int | None, rng: random.Random) -> tuple[list[Source], list[str]]:
    """The .py files below `root` in order, without installed packages, and those that could not be read.

    With a limit a random sample of whole files of about so many bytes, smaller when the library is.
    """
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _FOREIGN)
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    paths.sort()
    if limit_bytes is not None:
        rng.shuffle(paths)
    sources = []
    unreadable = []
    total = 0
    for path in paths:
        if limit_bytes is not None and total >= limit_bytes:
            break
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            unreadable.append(str(error))
            continue
        total += len(data)
        group = quote(os.fsencode(os.path.relpath(path, root)))
        sources.append(
            Source(
                group=group,
                path=path,
                queue_id=queue_of(group, QUEUES),
                tag=group.partition("/")[0].removesuffix(".py"),
                lines=line_count(data),
                size=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
    sources.sort(key=lambda source: source.group)
    return sources, unreadable


def _key_of(text: str) -> tuple[str, int]:
    """Group and line number of a KEYS property."""
    group, _, line = text.rpartition(":")
    return group, int(line)


# --- the writer process ----------------------------------------------------------------------------------------------


def _stored_behind(store: mqstore.MessageStore, acked: Ack) -> tuple[dict[int, int], dict[str, int], int, int]:
    """What the store holds behind the last acknowledged line: (next offset of each queue, next line of each file met
    there, how many lines those are, how many acknowledged ones are missing)."""
    offsets = dict(acked.offsets)
    next_line: dict[str, int] = {}
    behind = 0
    for ref in store.queues(TOPIC) if TOPIC in store.topics() else ():
        offset, end = acked.offsets.get(ref.queue_id, 0), store.offsets(*ref)[1]
        if end > offset:
            for message in store.iter(*ref, start=offset):
                group, line = _key_of(message.keys[0])
                next_line[group] = line + 1
                behind += 1
        offsets[ref.queue_id] = end
    lost = sum(max(0, offset - offsets[queue_id]) for queue_id, offset in acked.offsets.items())
    return offsets, next_line, behind, lost


def _write(
    acks: Connection[Any, Any],
    answers: Connection[Any, Any],
    root: str,
    sources: Sequence[Source],
    acked: Ack,
    ack_lines: int,
) -> None:
    """Put every line from `acked` on that is not in the store yet. Sends ("opened", facts), then an ("ack", Ack) for
    each group; each is answered, and the writer runs no more than `WINDOW` answers ahead."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends us
    begin = time.perf_counter()
    with mqstore.MessageStore(root) as store:
        opened = time.perf_counter() - begin
        offsets, next_line, behind, lost = _stored_behind(store, acked)
        facts = {
            "open_seconds": opened,
            "recovery": store.recovery.as_dict(),
            "unacknowledged": behind,
            "lost": lost,
        }
        acks.send(("opened", facts))
        lines_done = acked.lines + behind
        unflushed = unanswered = 0
        for i in range(acked.file, len(sources)):
            source = sources[i]
            common = encode_properties({SHARDINGKEY: source.group, TAGS: source.tag})
            prefix = common + KEYS.encode() + NAME_END + source.group.encode() + b":"
            lines = io.BytesIO(Path(source.path).read_bytes()).readlines()
            first = max(acked.line if i == acked.file else 0, next_line.get(source.group, 0))
            for at in range(first, len(lines), BATCH_LINES):
                chunk = lines[at : at + BATCH_LINES]
                wire = encode_batch((0, line, b"%b%d%b" % (prefix, n, PAIR_END)) for n, line in enumerate(chunk, at))
                receipts = store.put_batch(TOPIC, wire, source.queue_id)
                offsets[source.queue_id] = receipts[-1].offset + 1
                lines_done += len(chunk)
                unflushed += len(chunk)
                if unflushed < ack_lines:
                    continue
                store.flush()
                acks.send(("ack", Ack(i, at + len(chunk), lines_done, dict(offsets))))
                unflushed = 0
                unanswered += 1
                while unanswered > WINDOW or answers.poll():
                    answers.recv()
                    unanswered -= 1
        store.flush()
        acks.send(("ack", Ack(len(sources), 0, lines_done, offsets)))


# --- the reader processes --------------------------------------------------------------------------------------------


def _read(parent: Connection[Any, Any], root: str, queue_ids: Sequence[int]) -> None:
    """Consume queues. Sends ("read", messages so far) and at last the kind "result", with {group: (lines, SHA-256)},
    how many messages came again, and how many in the wrong place."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    next_line: dict[str, int] = {}
    digests: dict[str, Any] = {}
    seen = duplicates = misplaced = 0
    with mqstore.MessageStore(root, "r") as store:
        for queue_id in queue_ids:
            for message in store.iter(TOPIC, queue_id):
                properties = message.stored_properties()
                group, line = _key_of(properties[KEYS])
                expected = next_line.get(group, 0)
                seen += 1
                if not seen % PROGRESS_MESSAGES:
                    parent.send(("read", seen))
                if line < expected:
                    duplicates += 1
                    continue
                if line > expected or properties[SHARDINGKEY] != group:
                    misplaced += 1
                if not expected:
                    digests[group] = hashlib.sha256()
                digests[group].update(message.body)
                next_line[group] = line + 1
    files = {group: (next_line[group], digest.hexdigest()) for group, digest in digests.items()}
    parent.send(("result", seen, files, duplicates, misplaced))


# --- the parent ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """What one writer process did."""

    first_line: int
    acknowledged: int
    """Lines acknowledged in the end, over all runs so far."""
    exit_code: int | None
    facts: dict[str, Any]
    seconds: float
    """From the opened store to the last acknowledgement."""


@dataclass(frozen=True, slots=True)
class _Flip:
    """A bit that was flipped, and the kind of finding that it must give."""

    what: str
    file: str
    position: int
    kind: str

    def explains(self, finding: mqstore.Finding) -> bool:
        """Whether `finding` is about this byte. An index is a web of chains: what is found in it names the file."""
        inside = finding.position <= self.position < finding.position + finding.length
        return finding.kind == self.kind and finding.file == self.file and (inside or self.kind == "bad_index")


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

    def say(self, text: str, label: str = "", style: str = "", label_style: str = "") -> None:
        """A paragraph, behind a label if there is one."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        if label:
            grid.add_column(width=9)
        grid.add_column()
        grid.add_row(*([Text(label, style=label_style)] if label else []), Text(render.safe(text), style=style))
        self.show(grid)

    def show(self, table: Table) -> None:
        self.console.print(Padding(table, (0, 0, 0, 3), expand=False))

    def check(self, name: str, ok: bool, text: str) -> None:
        self.checks.append({"name": name, "ok": ok, "detail": text})
        self.say(text, "ok" if ok else "FAILED", label_style="bold green" if ok else "bold red")

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[tuple[Progress, Any]]:
        progress = Progress(
            TextColumn("   {task.description:<9}", markup=False),
            BarColumn(40),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with progress:
            yield progress, progress.add_task(label, total=max(1, total))

    @property
    def ok(self) -> bool:
        """Whether every check so far held."""
        return all(check["ok"] for check in self.checks)

    # -- 1: the workload --------------------------------------------------------------------------------------------

    def introduce(self, library: Path, unreadable: Sequence[str]) -> None:
        """Say what is to be stored. FileNotFoundError when there is nothing."""
        self.step("The workload", f"Each line of the sources of Python {sys.version.split()[0]} is to be a message.")
        if not self.lines:
            raise FileNotFoundError(f"{library} has no Python sources: this Python came without them")
        self.say(
            f"{len(self.sources):,} files, {self.lines:,} lines, {_mb(self.size)} in {library}"
            + (f"; {len(unreadable)} files cannot be read and are left out" if unreadable else "")
        )
        self.say(f"topic {TOPIC}, {QUEUES} queues; message group: the file; key: file and line; tag: top-level package")

    def needed_bytes(self) -> int:
        """Room that the store and its copy take on disk, about."""
        return 2 * (self.size + self.lines * RECORD_OVERHEAD_BYTES + FIXED_BYTES)

    # -- 2: writing and being killed --------------------------------------------------------------------------------

    def write(self) -> None:
        ack_lines = max(64, min(ACK_LINES_MAX, self.lines // ACK_GROUPS))
        self.step(
            "Write, and be killed",
            f"A child process puts each line as a message, flushes after {ack_lines:,} or so and acknowledges them "
            "over a pipe. Twice it gets a SIGKILL in the middle of its work, at a random moment. The next one opens "
            "the store, which recovers it, asks it what is there beyond the last acknowledged line, and goes on.",
        )
        acked = Ack()
        runs: list[_Run] = []
        for low, high in (*KILLS, (2.0, 2.0)):
            kill_at = int(self.lines * self.rng.uniform(low, high))
            acked, run = self._run_writer(acked, ack_lines, kill_at, len(runs) + 1)
            runs.append(run)
            if run.exit_code not in (0, -signal.SIGKILL):
                break
        kills = len(KILLS)
        self.check(
            "killed",
            [run.exit_code for run in runs] == [-signal.SIGKILL] * kills + [0],
            f"{kills} writers died of SIGKILL while writing, the last one finished by itself",
        )
        lost = sum(run.facts.get("lost", 0) for run in runs)
        self.check("acknowledged", lost == 0, f"{lost} acknowledged lines were lost")
        self.check(
            "complete",
            acked.lines == self.lines and sum(acked.offsets.values()) == self.lines,
            f"{sum(acked.offsets.values()):,} messages in the queues for {self.lines:,} lines",
        )
        self.facts["runs"] = [
            {
                "first_line": run.first_line,
                "acknowledged": run.acknowledged,
                "exit_code": run.exit_code,
                **run.facts,
            }
            for run in runs
        ]
        busy = sum(run.seconds for run in runs)
        put = sum(run.acknowledged - run.first_line for run in runs)
        share = put / max(1, self.lines)
        self.rates.append(("put, flushed in groups", put / busy, self.size * share / busy, "lines of source"))

    def _run_writer(self, acked: Ack, ack_lines: int, kill_at: int, number: int) -> tuple[Ack, _Run]:
        acks, their_acks = self.processes.Pipe(duplex=False)
        their_answers, answers = self.processes.Pipe(duplex=False)
        process = self.processes.Process(
            target=_write,
            args=(their_acks, their_answers, str(self.store_path), self.sources, acked, ack_lines),
            daemon=True,
        )
        process.start()
        their_acks.close()
        their_answers.close()
        facts: dict[str, Any] = {}
        first = acked.lines
        begin = last = time.perf_counter()
        groups = 0
        killed = False
        try:
            with acks, answers, self.bar(f"writer {number}", self.lines) as (progress, task):
                progress.update(task, completed=acked.lines)
                while True:
                    try:
                        kind, value = acks.recv()
                    except (EOFError, OSError):  # OSError: it was killed in the middle of sending
                        break
                    if kind == "opened":
                        facts = value
                        first += facts["unacknowledged"]
                        begin = last = time.perf_counter()
                        self._show_opening(number, facts)
                    elif kind == "ack":
                        acked = value
                        groups += 1
                        last = time.perf_counter()
                        progress.update(task, completed=acked.lines)
                        if not killed:
                            with suppress(BrokenPipeError):  # it may have finished
                                answers.send(None)
                        if acked.lines >= kill_at and not killed:
                            # Anywhere within the next two groups: between a put and its acknowledgement, or in a put.
                            time.sleep(self.rng.uniform(0, 2 * (last - begin) / groups))
                            process.kill()
                            killed = True
                process.join()
        finally:
            if process.is_alive():
                process.kill()
                process.join()
        if process.exitcode == -signal.SIGKILL:
            self.say(f"at {acked.lines:,} acknowledged lines, pid {process.pid}", "SIGKILL", label_style="yellow")
        elif process.exitcode == 0:
            self.say(f"at {acked.lines:,} acknowledged lines", "finished")
        else:
            self.say(f"with exit code {process.exitcode}", "ended", label_style="red")
        return acked, _Run(first, acked.lines, process.exitcode, facts, max(last - begin, 1e-9))

    def _show_opening(self, number: int, facts: dict[str, Any]) -> None:
        if number == 1:
            self.say("made the store", "writer 1")
            return
        report = facts["recovery"]
        start = report["scanned_from"]
        read = 0 if start is None else report["log_end"] - start
        torn = sum(cut["to"] - cut["from"] for cut in report["truncated"])
        rebuilt = report["rebuilt"]
        self.say(
            f"opened it in {facts['open_seconds']:.2f} s. Of {_mb(report['log_end'])} of log the last {_mb(read)} were "
            f"read again: {report['messages']:,} records are whole, "
            + (f"a torn tail of {torn:,} bytes was cut" if torn else "none is torn")
            + f". Built {rebuilt['units']:,} consume-queue units and {rebuilt['index_entries']:,} index entries. "
            f"{facts['unacknowledged']:,} lines are there of which nobody was told; they are not put again.",
            f"writer {number}",
        )

    # -- 3: reading -------------------------------------------------------------------------------------------------

    def read(self) -> None:
        count = max(2, min(4, os.cpu_count() or 1))
        self.step(
            "Read it all back",
            f"{count} reader processes consume the {QUEUES} queues, put every file together again line by line, and "
            "compare its SHA-256 with that of the original.",
        )
        shares: list[list[int]] = [[] for _ in range(count)]
        loads = [0] * count
        sizes = [sum(s.lines for s in self.sources if s.queue_id == q) for q in range(QUEUES)]
        for queue_id in sorted(range(QUEUES), key=sizes.__getitem__, reverse=True):
            if sizes[queue_id]:
                least = loads.index(min(loads))
                shares[least].append(queue_id)
                loads[least] += sizes[queue_id]
        workers: dict[Connection[Any, Any], Any] = {}
        seen: dict[Connection[Any, Any], int] = {}
        files: dict[str, tuple[int, str]] = {}
        duplicates = misplaced = 0
        begin = time.perf_counter()
        try:
            for share in filter(None, shares):
                ours, theirs = self.processes.Pipe(duplex=False)
                process = self.processes.Process(target=_read, args=(theirs, str(self.store_path), share), daemon=True)
                process.start()
                theirs.close()
                workers[ours] = process
            with self.bar("reading", self.lines) as (progress, task):
                talking = set(workers)
                while talking:
                    for ready in wait(list(talking)):
                        ours = cast("Connection[Any, Any]", ready)
                        try:
                            kind, seen[ours], *result = ours.recv()
                        except (EOFError, OSError):
                            talking.remove(ours)
                            continue
                        if kind == "result":
                            files |= result[0]
                            duplicates += result[1]
                            misplaced += result[2]
                        progress.update(task, completed=sum(seen.values()))
            seconds = time.perf_counter() - begin
        finally:
            for ours, process in workers.items():
                ours.close()
                process.kill()  # one that has finished does not mind
                process.join()
        empty = (0, hashlib.sha256().hexdigest())
        wrong = [s.group for s in self.sources if files.get(s.group, empty) != (s.lines, s.sha256)]
        strange = set(files) - {source.group for source in self.sources}
        total = sum(seen.values())
        self.check(
            "once",
            total == self.lines and not duplicates and not misplaced,
            f"{total:,} messages read, {duplicates:,} of them twice, {misplaced:,} out of place",
        )
        self.check(
            "files",
            not wrong and not strange,
            f"{len(self.sources) - len(wrong):,} of {len(self.sources):,} files have the SHA-256 of the original"
            + (f"; not {', '.join(wrong[:3])}" if wrong else ""),
        )
        self.facts["read"] = {
            "readers": len(workers),
            "messages": total,
            "duplicates": duplicates,
            "misplaced": misplaced,
            "files": len(self.sources) - len(wrong),
        }
        self.rates.append(
            (
                f"read by {len(workers)} processes, start included",
                total / seconds,
                self.size / seconds,
                "lines of source",
            )
        )

    # -- 4: looking at it -------------------------------------------------------------------------------------------

    def look(self) -> None:
        self.step(
            "Look at it",
            "What `mqstore inspect` shows of this store, some lines looked up by their key, and `mqstore verify`: "
            "every record, unit and index entry.",
        )
        self._inspect()
        with mqstore.MessageStore(self.store_path, "r") as store:
            wanted = []
            full = [source for source in self.sources if source.lines]
            for source in self.rng.choices(full, weights=[s.lines for s in full], k=min(LOOK_UPS, self.lines)):
                wanted.append((source, self.rng.randrange(source.lines)))
            begin = time.perf_counter()
            found = [store.find(TOPIC, key=f"{source.group}:{line}") for source, line in wanted]
            seconds = time.perf_counter() - begin
            texts = {s.path: io.BytesIO(Path(s.path).read_bytes()).readlines() for s, _ in wanted}
            right = sum(
                [message.body for message in messages] == [texts[source.path][line]]
                for (source, line), messages in zip(wanted, found, strict=True)
            )
        self.check(
            "keys", right == len(wanted), f"{right} of {len(wanted)} random lines found by their key, and they alone"
        )
        self.rates.append(("look up by key", len(wanted) / max(seconds, 1e-9), 0.0, "look-ups"))
        findings, verified, size, seconds = self._verify(self.store_path)
        self.check(
            "verified",
            not findings and verified == self.lines,
            f"verify: {verified:,} messages, {_mb(size)}, {len(findings)} findings",
        )
        self.rates.append(("verify everything", verified / seconds, size / seconds, "records of log"))

    def _inspect(self) -> None:
        with render.progress("reading the log") as report:
            found = inspect_store(self.store_path, progress=report)
        self.facts["inspect"] = found
        log, index = found["commitlog"], found["index"]
        self.say(
            f"profile {found['profile']}, checksum {found['checksum']}; "
            f"{'closed cleanly' if found['clean_shutdown'] else 'not closed cleanly'}; {log['messages']:,} records "
            f"in [{log['min_offset']:,}, {log['max_offset']:,}); {index['entries']:,} index entries"
        )
        self.console.print()
        segments = [
            (s["file"], render.show_bytes(s["length"]), render.show_bytes(s["used"]), f"{s['messages']:,}")
            for s in log["segments"]
        ]
        self.show(render.table("", ("segment", "length>", "used>", "records>"), segments))
        self.console.print()
        queues = [
            (f"{topic}/{queue_id}", *(f"{q[name]:,}" for name in _QUEUE_COLUMNS.values()))
            for topic, entry in found["topics"].items()
            for queue_id, q in entry["queues"].items()
        ]
        self.show(render.table("", ("queue", *_QUEUE_COLUMNS), queues))
        self.console.print()

    def _verify(self, path: Path) -> tuple[list[mqstore.Finding], int, int, float]:
        """(findings, messages, bytes, seconds)."""
        begin = time.perf_counter()
        with mqstore.MessageStore(path, "r") as store:
            verifier = store.verifier(CONFIG_CHECKS)
            with render.progress("verifying", lambda: (verifier.done_bytes, verifier.total_bytes)):
                findings = list(verifier.findings())
        return findings, verifier.messages, verifier.bytes, time.perf_counter() - begin

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
        flips, orphan, queue_id, damaged = self._flip_three(copy)
        before, *_ = self._verify(copy)
        begin = time.perf_counter()
        with render.progress("recovering") as progress, findings_told():
            report = recover_store(copy, RecoverOptions(), progress=progress)
        seconds = time.perf_counter() - begin
        after, *_ = self._verify(copy)
        rows = []
        for flip in flips:
            hits = [finding for finding in before if flip.explains(finding)]
            rows.append(
                (
                    f"{flip.what}: {flip.file}, byte {flip.position:,}",
                    hits[0].kind if hits else "nothing",
                    "damaged still" if any(map(flip.explains, after)) else "mended",
                )
            )
        self.show(render.table("", ("a bit of", "verify", "after recover"), rows))
        self.console.print()
        found = sum(any(map(flip.explains, before)) for flip in flips)
        other = [finding for finding in before if not any(flip.explains(finding) for flip in (*flips, orphan))]
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
        self._read_around(copy, queue_id, damaged)
        self.facts["damage"] = {
            "flipped": [asdict(flip) for flip in flips],
            "findings": [finding.as_dict() for finding in before],
            "recovered": report.as_dict(),
            "findings_after": [finding.as_dict() for finding in after],
        }
        self.rates.append(("recover everything", report.messages / seconds, report.log_end / seconds, "records of log"))

    def _flip_three(self, copy: Path) -> tuple[list[_Flip], _Flip, int, int]:
        """Flip a bit of a unit, an index entry and a body. Returns these; the place of that body's unit, which has lost
        its record and is to be found as well; and the queue and the offset of that body."""
        rng = self.rng
        with mqstore.MessageStore(copy, "r") as store:
            manifest = store.manifest
            refs = store.queues(TOPIC)
            unit_of, body_of = rng.choice(refs), rng.choice(refs)
            slot = rng.randrange(store.offsets(*unit_of)[1])
            damaged = rng.randrange(store.offsets(*body_of)[1])
            [message] = store.read(*body_of, damaged, max_messages=1)
            physical, host = message.physical_offset, encode_host(message.store_host)
            body = message.body
        per_file = manifest.consumequeue_segment_bytes
        unit_file, unit_at = divmod(slot * UNIT_BYTES, per_file)
        index_file = min((copy / "index").iterdir())
        with open(index_file, "rb") as stream:
            entries = IndexHeader.decode(stream.read(HEADER_BYTES)).next_entry
        entry_at = HEADER_BYTES + SLOT_BYTES * manifest.index_slots + ENTRY_BYTES * rng.randrange(1, entries)
        log_file, record_at = divmod(physical, manifest.commitlog_segment_bytes)
        flips = [
            _Flip(
                "a consume-queue unit",
                f"consumequeue/{TOPIC}/{unit_of.queue_id}/{unit_file * per_file:020d}",
                unit_at + rng.randrange(8),
                "bad_unit",
            ),
            _Flip("an index entry", f"index/{index_file.name}", entry_at + rng.randrange(4), "bad_index"),
            _Flip(
                "a message body",
                f"commitlog/{log_file * manifest.commitlog_segment_bytes:020d}",
                record_at + header_struct(len(host), len(host)).size + rng.randrange(len(body)),
                "bad_record",
            ),
        ]
        for flip in flips:
            with open(copy / flip.file, "r+b") as stream:
                stream.seek(flip.position)
                [byte] = stream.read(1)
                stream.seek(flip.position)
                stream.write(bytes([byte ^ 1 << rng.randrange(8)]))
        orphan_file, orphan_at = divmod(damaged * UNIT_BYTES, per_file)
        orphan = _Flip(
            "its unit",
            f"consumequeue/{TOPIC}/{body_of.queue_id}/{orphan_file * per_file:020d}",
            orphan_at,
            "bad_unit",
        )
        return flips, orphan, body_of.queue_id, damaged

    def _read_around(self, copy: Path, queue_id: int, damaged: int) -> None:
        """Consume the queue of the damaged message: everything but that must come."""
        expected = sum(source.lines for source in self.sources if source.queue_id == queue_id)
        with mqstore.MessageStore(copy, "r") as store:
            offsets = [message.offset for message in store.iter(TOPIC, queue_id)]
        self.check(
            "passed_over",
            offsets == [offset for offset in range(expected) if offset != damaged],
            f"queue {queue_id} of the copy: {len(offsets):,} of {expected:,} messages come, all but number {damaged:,}",
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self, seconds: float) -> dict[str, Any]:
        self.step("What it came to", "Rates of this run on this machine, with everything else that was going on.")
        rows = [
            (what, f"{items:,.0f}", unit, f"{size / 1e6:,.0f}" if size else "")
            for what, items, size, unit in self.rates
        ]
        self.show(render.table("", ("", "a second>", "", "MB/s>"), rows))
        failed = [check["name"] for check in self.checks if not check["ok"]]
        self.console.print()
        self.say(
            f"{len(self.checks) - len(failed)} of {len(self.checks)} checks hold, {seconds:.0f} s"
            + (f"; these do not: {', '.join(failed)}" if failed else ""),
            style="bold red" if failed else "bold green",
        )
        return {
            "ok": not failed,
            "files": len(self.sources),
            "lines": self.lines,
            "bytes": self.size,
            "checks": self.checks,
            **self.facts,
            "rates": [
                {"what": what, "items_per_second": items, "bytes_per_second": size, "items": unit}
                for what, items, size, unit in self.rates
            ],
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
        sources, unreadable = read_sources(library, None if limit_mb is None else int(limit_mb * 1e6), rng)
        work = _Demo(screen, root, sources, rng)
        work.introduce(library, unreadable)
        free = shutil.disk_usage(root).free
        if free < work.needed_bytes():
            raise click.UsageError(
                f"{root} has {_mb(free)} free, this takes about {_mb(work.needed_bytes())}: use --dir or --limit-mb"
            )
        for step in (work.write, work.read, work.look, work.damage):
            step()
            if not work.ok:
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
    if not work.ok:
        ctx.exit(FINDINGS)
