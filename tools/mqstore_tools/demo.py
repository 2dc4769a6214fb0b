"""`mqstore demo`: a real workload, killed twice, and the bookkeeping afterwards.

Every line of the Python standard library's sources becomes a message:

    topic          stdlib
    queue          consistent hash of the message group, as RocketMQ's proxy chooses it
    body           the line, with its line end
    __SHARDINGKEY  message group: the file, relative to the library, percent-encoded      asyncio/queues.py
    KEYS           the line                                                               asyncio/queues.py:17
    TAGS           top-level package or module                                            asyncio

    writer process     append, ..., append, flush, acknowledge, ...   SIGKILL   open, count, go on, ...
    reader processes   consume the queues, put each file together, SHA-256
    this process       plans, kills, compares, breaks a copy and has it mended

The writer acknowledges lines over a pipe once they are on disk. A kill leaves further lines in the store that nobody
was told of. Lines are put in one order, and a crash leaves a prefix of the log. So the next writer counts the messages
in the store and goes on behind them: it may neither lose nor repeat a line.

Each claim that is printed is a check. A check that fails makes the exit code 1.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

import mqstore
from mqstore.broker.admin.contents import inspect_store
from mqstore.broker.admin.inspect import inspect_broker
from mqstore.broker.configchecks import CONFIG_CHECKS
from mqstore.broker.selection import group_queue
from mqstore.engine import Finding, MessageStore, ReadOnlyMessageStore
from mqstore.layout.consumequeue import UNIT_BYTES
from mqstore.layout.indexfile import ENTRY_BYTES, HEADER_BYTES, SLOT_BYTES, IndexHeader
from mqstore.layout.properties import KEYS, SHARDINGKEY, TAGS
from mqstore.layout.record import BODY_AT_V4
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore_tools import render
from mqstore_tools.inspect import show_store
from mqstore_tools.shared import FINDINGS, NumberRange, StoreCommand, findings_told, json_option

__all__ = ["Source", "demo", "read_sources"]

TOPIC = "stdlib"
QUEUES = 8
KILLS = ((0.25, 0.45), (0.6, 0.8))
"""Each kill falls between these shares of all lines."""
ACK_GROUPS = 50
"""Approximate number of acknowledgements in a run. A group of lines is flushed and acknowledged together."""
ACK_LINES_MAX = 16_384
LOOK_UPS = 200
READERS_MAX = 4
WIDTH_MAX = 100
"""Columns: longer lines are hard to read."""

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


def _lines(path: str) -> list[bytes]:
    """Return the lines of a file with their ends. Bytes behind the last newline are one more line."""
    return io.BytesIO(Path(path).read_bytes()).readlines()


def read_sources(root: Path, limit_bytes: int | None, rng: random.Random) -> list[Source]:
    """Return the readable .py files below `root` in order, without installed packages.

    With a limit it is a random sample of whole files of about so many bytes, smaller when the library is.
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
        lines = _lines(path)
        data = b"".join(lines)
        total += len(data)
        group = quote(os.fsencode(os.path.relpath(path, root)))
        tag = group.partition("/")[0].removesuffix(".py")
        digest = hashlib.sha256(data).hexdigest()
        sources.append(Source(group, path, group_queue(group, QUEUES), tag, len(lines), len(data), digest))
    return sorted(sources, key=lambda source: source.group)


def _write(parent: Connection[Any, Any], root: str, sources: Sequence[Source], ack_lines: int) -> None:
    """Put every line that is not in the store yet. Send facts once the store is open, then the number of lines on disk
    after each group, and wait for an answer to each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends this process
    begin = time.perf_counter()
    with MessageStore(root) as store:
        found = sum(store.offsets(*ref)[1] for ref in store.queues(TOPIC)) if TOPIC in store.topics() else 0
        seconds = time.perf_counter() - begin
        parent.send({"open_seconds": seconds, "recovery": store.recovery.as_dict(), "first_line": found})
        before, done, flushed = 0, found, found
        for source in sources:
            lines = _lines(source.path)
            properties = {SHARDINGKEY: source.group, TAGS: source.tag}
            for number in range(max(0, found - before), len(lines)):
                properties[KEYS] = f"{source.group}:{number}"
                store.append(TOPIC, source.queue_id, lines[number], properties=properties)
                done += 1
                if done - flushed >= ack_lines:
                    store.flush()
                    parent.send(done)
                    parent.recv()
                    flushed = done
            before += len(lines)
        store.flush()
        parent.send(done)


def _read(root: str, queue_id: int) -> tuple[int, dict[str, tuple[int, str]], int]:
    """Consume a queue. Return (messages, {group: (lines, SHA-256)}, messages that came twice or in the wrong place)."""
    next_line: dict[str, int] = {}
    digests: dict[str, Any] = {}
    seen = wrong = 0
    with ReadOnlyMessageStore(root) as store:
        for message in store.iter(TOPIC, queue_id):
            properties = message.stored_properties()
            group, _, number = properties[KEYS].rpartition(":")
            seen += 1
            wrong += int(number) != next_line.get(group, 0) or properties[SHARDINGKEY] != group
            digests.setdefault(group, hashlib.sha256()).update(message.body)
            next_line[group] = int(number) + 1
    files = {group: (next_line[group], digest.hexdigest()) for group, digest in digests.items()}
    return seen, files, wrong


def _verify(path: Path) -> tuple[list[Finding], int]:
    """Return (findings, messages)."""
    with ReadOnlyMessageStore(path) as store:
        verifier = store.verifier(CONFIG_CHECKS)
        with render.progress("verifying", lambda: (verifier.done_bytes, verifier.total_bytes)):
            return list(verifier.findings()), verifier.messages


# --- the parent ------------------------------------------------------------------------------------------------------

_Place = tuple[str, str, int]
"""Kind of the finding that a wrong byte must give, file, and position of the byte in the file."""


def _place(kind: str, folder: str, position: int, file_bytes: int) -> _Place:
    """Return the place of byte `position` in a run of equal files."""
    return kind, f"{folder}/{position // file_bytes * file_bytes:020d}", position % file_bytes


class _Demo:
    def __init__(self, console: Console, root: Path, sources: Sequence[Source], rng: random.Random) -> None:
        self.console = console
        self.root = root
        self.store = root / "store"
        self.sources = sources
        self.rng = rng
        self.lines = sum(source.lines for source in sources)
        self.size = sum(source.size for source in sources)
        self.checks: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        # A fork of a process with threads may hang, and macOS does not offer it by default.
        self.processes = multiprocessing.get_context("spawn")
        self._step = 0

    def step(self, title: str, sentence: str) -> None:
        self._step += 1
        self.console.print()
        self.console.rule(Text(f"{self._step}  {title}", style="bold"), align="left", style="dim")
        self.say(sentence)

    def say(self, text: str, label: str = "", style: str = "") -> None:
        """Print a paragraph, behind a label if there is one."""
        shown = Text.assemble((f"{label:10}  " if label else "", style), render.safe(text))
        self.console.print(Padding(shown, (0, 0, 0, 3), expand=False))

    def check(self, name: str, ok: bool, text: str) -> None:
        self.checks.append({"name": name, "ok": ok, "detail": text})
        self.say(text, "ok" if ok else "FAILED", "bold green" if ok else "bold red")

    @property
    def failed(self) -> list[str]:
        return [check["name"] for check in self.checks if not check["ok"]]

    # -- the steps --------------------------------------------------------------------------------------------------

    def introduce(self, library: Path) -> None:
        """Say what is to be stored. FileNotFoundError when there is nothing."""
        self.step("The workload", f"Each line of the sources of Python {sys.version.split()[0]} is to be a message.")
        if not self.lines:
            raise FileNotFoundError(f"{library} has no Python sources: this Python came without them")
        self.say(f"{len(self.sources):,} files, {self.lines:,} lines, {_mb(self.size)} in {library}")
        self.say(f"topic {TOPIC}, {QUEUES} queues; message group: the file; key: file and line; tag: top-level package")

    def write(self) -> None:
        ack_lines = max(64, min(ACK_LINES_MAX, self.lines // ACK_GROUPS))
        self.step(
            "Write, and be killed",
            f"A child process puts each line as a message, flushes after {ack_lines:,} or so and acknowledges them "
            "over a pipe. Twice it gets a SIGKILL in the middle of its work, at a random moment. The next one opens "
            "the store, which recovers it, counts the lines that are there, and goes on behind them.",
        )
        acked = 0
        runs: list[dict[str, Any]] = []
        self.facts["runs"] = runs
        for low, high in (*KILLS, (2.0, 2.0)):
            kill_at = int(self.lines * self.rng.uniform(low, high))
            run = self._run_writer(acked, ack_lines, kill_at)
            self._show_run(len(runs) + 1, run)
            runs.append(run)
            acked = run["acknowledged"]
            if run["exit_code"] not in (0, -signal.SIGKILL):
                break
        killed = [run["exit_code"] for run in runs] == [-signal.SIGKILL] * len(KILLS) + [0]
        text = f"{len(KILLS)} writers died of SIGKILL while writing, the last one finished by itself"
        self.check("killed", killed, text)
        lost = sum(max(0, -run["unacknowledged"]) for run in runs)
        self.check("acknowledged", lost == 0, f"{lost} acknowledged lines were lost")
        complete = acked == self.lines
        self.check("complete", complete, f"{acked:,} messages in the queues for {self.lines:,} lines")

    def _run_writer(self, before: int, ack_lines: int, kill_at: int) -> dict[str, Any]:
        """Return what the writer said of itself, its exit code, its process id, how many lines it has acknowledged, and
        how many it found that were never acknowledged."""
        ours, theirs = self.processes.Pipe()
        arguments = (theirs, str(self.store), self.sources, ack_lines)
        process = self.processes.Process(target=_write, args=arguments, daemon=True)
        process.start()
        theirs.close()
        acked = before
        facts: dict[str, Any] = {"first_line": before, "recovery": {"clean_shutdown": True}}
        bar = render.progress("writing", lambda: (acked, self.lines), of_bytes=False)
        try:
            with ours, bar, suppress(EOFError, OSError):  # OSError: it was killed in the middle of sending
                facts = ours.recv()
                begin, groups = time.perf_counter(), 0
                while True:
                    acked = ours.recv()
                    groups += 1
                    with suppress(BrokenPipeError):  # it has ended; perhaps not all that it sent was read
                        ours.send(None)
                    if acked >= kill_at:
                        # Anywhere within the next group: in a put, between puts, in the flush.
                        time.sleep(self.rng.random() * (time.perf_counter() - begin) / groups)
                        process.kill()
            process.join()
        finally:
            process.kill()  # one that has ended does not mind
            process.join()
        end = {"exit_code": process.exitcode, "pid": process.pid, "acknowledged": acked}
        return {**facts, **end, "unacknowledged": facts["first_line"] - before}

    def _show_run(self, number: int, run: dict[str, Any]) -> None:
        report = run["recovery"]
        if report["clean_shutdown"]:
            self.say("made the store", f"writer {number}")
        else:
            torn = sum(cut["to"] - cut["from"] for cut in report["truncated"])
            self.say(
                f"opened it in {run['open_seconds']:.2f} s: {report['messages']:,} records read again are whole, a "
                f"tail of {torn:,} bytes was cut. {run['unacknowledged']:,} lines are there of which nobody was "
                "told; they are not put again.",
                f"writer {number}",
            )
        code = run["exit_code"]
        word = {0: "finished", -signal.SIGKILL: "SIGKILL"}.get(code, f"exit {code}")
        self.say(f"at {run['acknowledged']:,} acknowledged lines, pid {run['pid']}", word, "yellow" if code else "")

    def read(self) -> None:
        count = max(2, min(READERS_MAX, os.cpu_count() or 1))
        self.step(
            "Read it all back",
            f"{count} reader processes consume the {QUEUES} queues, put every file together again line by line, and "
            "compare its SHA-256 with that of the original.",
        )
        files: dict[str, tuple[int, str]] = {}
        total = misplaced = 0
        queues = sorted({source.queue_id for source in self.sources if source.lines})
        with (
            self.processes.Pool(count, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool,
            render.progress("reading", of_bytes=False) as report,
        ):
            for found in pool.imap_unordered(partial(_read, str(self.store)), queues):
                files |= found[1]
                total, misplaced = total + found[0], misplaced + found[2]
                report(total, self.lines)
        text = f"{total:,} messages read, {misplaced:,} of them twice or out of place"
        self.check("once", total == self.lines and not misplaced, text)
        empty = (0, hashlib.sha256().hexdigest())
        wrong = [s.group for s in self.sources if files.get(s.group, empty) != (s.lines, s.sha256)]
        same = not wrong and set(files) <= {source.group for source in self.sources}
        text = f"{len(self.sources) - len(wrong):,} of {len(self.sources):,} files have the SHA-256 of the original"
        self.check("files", same, text + (f"; not {', '.join(wrong[:3])}" if wrong else ""))

    def look(self) -> None:
        self.step(
            "Look at it",
            "What `mqstore inspect` shows of this store, some lines looked up by their key, and `mqstore verify`: "
            "every record, unit and index entry.",
        )
        with render.progress("reading the log") as report:
            self.facts["inspect"] = found = inspect_store(self.store, progress=report)
        found["broker"] = inspect_broker(self.store)
        if not self.console.quiet:
            self.console.print()
            show_store(found)
            self.console.print()
        full = [source for source in self.sources if source.lines]
        chosen = self.rng.choices(full, weights=[s.lines for s in full], k=min(LOOK_UPS, self.lines))
        wanted = [(source, self.rng.randrange(source.lines)) for source in chosen]
        with ReadOnlyMessageStore(self.store) as store:
            hits = [store.find(TOPIC, key=f"{source.group}:{line}") for source, line in wanted]
            right = sum(
                [message.body for message in messages] == [_lines(source.path)[line]]
                for (source, line), messages in zip(wanted, hits, strict=True)
            )
        text = f"{right} of {len(wanted)} random lines found by their key, and they alone"
        self.check("keys", right == len(wanted), text)
        findings, messages = _verify(self.store)
        text = f"verify: {messages:,} messages, {len(findings)} findings"
        self.check("verified", not findings and messages == self.lines, text)

    def damage(self) -> None:
        self.step(
            "Break a copy, and mend it",
            "One bit is flipped in each of three files of a copy. A consume queue and the index are made from the log, "
            "so `mqstore recover` makes them again. The log is where messages are: a damaged one cannot be mended, "
            "only noticed, told, and passed over; its neighbours stay readable.",
        )
        copy = self.root / "copy"
        shutil.copytree(self.store, copy)
        flips, unit, queue, damaged = self._flip_three(copy)
        before, _ = _verify(copy)
        with render.progress("recovering") as progress, findings_told():
            report = recover_store(copy, RecoverOptions(), progress=progress)
        after, _ = _verify(copy)
        told, left = ({(each.kind, each.file) for each in findings} for findings in (before, after))
        for kind, file, position in flips:
            self.say(f"{file}, byte {position:,}: {'damaged still' if (kind, file) in left else 'mended'}", kind)
        found = sum(flip[:2] in told for flip in flips)
        other = len(told - {flip[:2] for flip in (*flips, unit)})
        text = f"verify gave {len(before)} findings; they tell of {found} of {len(flips)} flips, and of {other} other"
        self.check("found", found == len(flips) and not other, f"{text} things")
        self.check(
            "mended",
            [finding.kind for finding in after] == ["bad_record"],
            f"recover rebuilt {report.rebuilt.units:,} units and {report.rebuilt.index_entries:,} index entries; of "
            f"what verify says now {len(after) - 1} is not the damaged message",
        )
        count = sum(source.lines for source in self.sources if source.queue_id == queue.queue_id)
        with ReadOnlyMessageStore(copy) as store:
            offsets = [message.offset for message in store.iter(*queue)]
        text = f"queue {queue.queue_id} of the copy: {len(offsets):,} of {count:,} messages come, all but number "
        self.check("passed_over", offsets == [i for i in range(count) if i != damaged], f"{text}{damaged:,}")
        self.facts["damage"] = {
            "flipped": [dict(zip(("kind", "file", "position"), flip, strict=True)) for flip in flips],
            "findings": [finding.as_dict() for finding in before],
            "recovered": report.as_dict(),
            "findings_after": [finding.as_dict() for finding in after],
        }

    def _flip_three(self, copy: Path) -> tuple[list[_Place], _Place, mqstore.QueueRef, int]:
        """Flip a bit of a unit, an index entry and a body. Return these; the unit of the body, which is a finding, too,
        for it has lost its record; and the queue and the offset of the body."""
        rng = self.rng
        with ReadOnlyMessageStore(copy) as store:
            manifest = store.manifest
            unit_of, body_of = rng.choices(store.queues(TOPIC), k=2)
            slot, damaged = (rng.randrange(store.offsets(*ref)[1]) for ref in (unit_of, body_of))
            [message] = store.read(*body_of, damaged, max_messages=1)
            body_at = message.physical_offset + BODY_AT_V4 + rng.randrange(len(message.body))
        index = min((copy / "index").iterdir())
        entry = rng.randrange(1, IndexHeader.decode(index.read_bytes()[:HEADER_BYTES]).next_entry)
        entry_at = HEADER_BYTES + SLOT_BYTES * manifest.index_slots + ENTRY_BYTES * entry

        def unit(ref: mqstore.QueueRef, position: int) -> _Place:
            folder = f"consumequeue/{TOPIC}/{ref.queue_id}"
            return _place("bad_unit", folder, position, manifest.consumequeue_segment_bytes)

        flips = [
            unit(unit_of, slot * UNIT_BYTES + rng.randrange(8)),
            ("bad_index", f"index/{index.name}", entry_at + rng.randrange(4)),
            _place("bad_record", "commitlog", body_at, manifest.commitlog_segment_bytes),
        ]
        for _, file, position in flips:
            with open(copy / file, "r+b") as stream:
                stream.seek(position)
                [byte] = stream.read(1)
                stream.seek(position)
                stream.write(bytes([byte ^ 1 << rng.randrange(8)]))
        return flips, unit(body_of, damaged * UNIT_BYTES), body_of, damaged

    def summary(self) -> dict[str, Any]:
        sizes = {"files": len(self.sources), "lines": self.lines, "bytes": self.size}
        return {"ok": not self.failed, **sizes, "checks": self.checks, **self.facts}


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
    help="Work here, in DIR/store and DIR/copy, and leave both there. New or empty. Without it a temporary directory, "
    "which stays only if a check fails.",
)
@click.option("--limit-mb", type=NumberRange(min=0, min_open=True), help="Only a sample of about so much source.")
@click.option("--seed", type=int, help="Repeats the sample, the plan of the kills and the damage of another run.")
@json_option
@click.pass_context
def demo(
    ctx: click.Context, directory: Path | None, limit_mb: float | None, seed: int | None, json_output: bool
) -> None:
    """Store, kill, recover, read, inspect and break a real workload.

    Every line of the Python standard library becomes a message. The writing process is killed twice with SIGKILL, and
    another goes on; readers put every file together again and compare SHA-256; then a copy is damaged and mended. Exit
    code 1 if any check fails.
    """
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
    keep = directory is not None
    root = directory or Path(tempfile.mkdtemp(prefix="mqstore-demo-"))
    try:
        screen.print(Text.assemble(("mqstore demo", "bold"), render.safe(f", seed {seed}, in {root}")))
        library = Path(sysconfig.get_path("stdlib"))
        sources = read_sources(library, None if limit_mb is None else int(limit_mb * 1e6), rng)
        work = _Demo(screen, root, sources, rng)
        work.introduce(library)
        for step in (work.write, work.read, work.look, work.damage):
            step()
            if work.failed:
                break
        good, count = len(work.checks) - len(work.failed), len(work.checks)
        screen.print()
        work.say(f"{good} of {count} checks hold" + (f"; these do not: {', '.join(work.failed)}" * bool(work.failed)))
        keep = keep or bool(work.failed)  # somebody will want to look
    except mqstore.MQStoreError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
        elif directory is None:
            screen.print()
            screen.print(Text(render.safe(f"   {root} is kept")))
    if json_output:
        render.print_json({"seed": seed, "directory": str(root) if keep else None, **work.summary()})
    if work.failed:
        ctx.exit(FINDINGS)
