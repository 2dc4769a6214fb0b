"""`make demo`, or `python -m examples.demo`: a real workload, killed twice, and the bookkeeping afterwards.

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

A kill leaves further lines in the store that nobody was told of. Lines are put in one order, and a crash leaves a
prefix of the log. So the next writer counts the messages in the store and goes on behind them: it may neither lose nor
repeat a line. Each claim that is printed is a check. A check that fails makes the exit code 1.
"""

from __future__ import annotations

import hashlib
import io
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
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
from mqstore.broker.routing.selection import group_queue
from mqstore.broker.tables.configchecks import CONFIG_CHECKS
from mqstore.engine import Finding
from mqstore.layout.consumequeue import UNIT_BYTES
from mqstore.layout.indexfile import ENTRY_BYTES, HEADER_BYTES, SLOT_BYTES, IndexHeader
from mqstore.layout.properties import KEYS, SHARDINGKEY, TAGS
from mqstore.layout.record import BODY_AT_V4
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore.log.store import MessageStore
from mqstore.log.writing.outgoing import MAX_MESSAGE_GROUP
from mqstore_tools import render
from mqstore_tools.inspect import show_store
from mqstore_tools.shared import NumberRange, command, findings_on_stderr, finish

__all__ = ["Source", "demo", "read_sources"]

TOPIC, QUEUES = "stdlib", 8
KILLS = ((0.25, 0.45), (0.6, 0.8))
"""Shares of all lines between which each kill falls."""
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the standard library, and the place of its lines."""

    group: str
    path: str
    queue_id: int
    tag: str
    lines: int
    sha256: str


def _lines(path: str) -> list[bytes]:
    """Return the lines of a file with their ends. Bytes behind the last newline are one more line."""
    return io.BytesIO(Path(path).read_bytes()).readlines()


def read_sources(root: Path, limit_bytes: float, rng: random.Random) -> list[Source]:
    """Return a random sample of about `limit_bytes` of the readable .py files below `root`, in order.

    Installed packages, empty files, and files whose path is too long for a message group are left out.
    """
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _FOREIGN]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    paths = sorted(path for path in paths if os.access(path, os.R_OK) and os.path.getsize(path))
    rng.shuffle(paths)
    sources: list[Source] = []
    total = 0
    while paths and total < limit_bytes:
        path = paths.pop()
        group = quote(os.fsencode(os.path.relpath(path, root)))
        if len(group) > MAX_MESSAGE_GROUP:
            continue  # a few of CPython's own tests: the engine would store them, `Store.put` and RocketMQ refuse them
        lines = _lines(path)
        data = b"".join(lines)
        total += len(data)
        tag = group.partition("/")[0].removesuffix(".py")
        digest = hashlib.sha256(data).hexdigest()
        sources.append(Source(group, path, group_queue(group, QUEUES), tag, len(lines), digest))
    return sorted(sources, key=lambda source: source.group)


def _write(parent: Connection[Any, Any], root: str, sources: list[Source], ack_lines: int) -> None:
    """Put every line that is not in the store yet, and report to the parent.
    Facts are sent once the store is open, then the number of lines on disk after each group. Each waits for an
    answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends this process
    begin = time.perf_counter()
    with MessageStore(root) as store:
        done = sum(store.offsets(*ref)[1] for topic in store.topics() for ref in store.queues(topic))
        seconds = time.perf_counter() - begin
        parent.send({"open_seconds": seconds, "recovery": store.recovery.as_dict(), "first_line": done})
        lines = ((source, number, line) for source in sources for number, line in enumerate(_lines(source.path)))
        for source, number, line in islice(lines, done, None):
            properties = {SHARDINGKEY: source.group, TAGS: source.tag, KEYS: f"{source.group}:{number}"}
            store.append(TOPIC, source.queue_id, line, properties=properties)
            done += 1
            if done % ack_lines == 0:
                store.flush()
                parent.send(done)
                parent.recv()
        store.flush()
        parent.send(done)


def _read(root: str, queue_id: int) -> tuple[dict[str, tuple[int, str]], int]:
    """Consume a queue. Return ({group: (lines, SHA-256)}, lines that came twice or in the wrong place)."""
    files: dict[str, tuple[int, Any]] = {}
    wrong = 0
    with ReadOnlyMessageStore(root) as store:
        for message in store.iter(TOPIC, queue_id):
            properties = message.stored_properties()
            group, _, number = properties[KEYS].rpartition(":")
            lines, digest = files.get(group) or (0, hashlib.sha256())
            wrong += int(number) != lines or properties[SHARDINGKEY] != group
            digest.update(message.body)
            files[group] = lines + 1, digest
    return {group: (lines, digest.hexdigest()) for group, (lines, digest) in files.items()}, wrong


def _verify(path: Path) -> tuple[list[Finding], int]:
    """Return (findings, messages)."""
    with ReadOnlyMessageStore(path) as store:
        verifier = store.verifier(CONFIG_CHECKS)
        with render.progress("verifying", lambda: (verifier.done_bytes, verifier.total_bytes)):
            return list(verifier.findings()), verifier.messages


class _Demo:
    def __init__(self, console: Console, root: Path, sources: list[Source], rng: random.Random) -> None:
        self.console = console
        self.root = root
        self.store = root / "store"
        self.sources = sources
        self.rng = rng
        self.lines = sum(source.lines for source in sources)
        self.checks: list[dict[str, Any]] = []
        self.failed: list[str] = []
        size = sum(os.path.getsize(source.path) for source in sources)
        self.facts: dict[str, Any] = {"files": len(sources), "lines": self.lines, "bytes": size, "checks": self.checks}
        # A fork of a process with threads may hang, and macOS does not offer it by default.
        self.processes = multiprocessing.get_context("spawn")

    def step(self, title: str, sentence: str) -> None:
        self.console.print()
        self.console.rule(Text(title, style="bold"), align="left", style="dim")
        self.say(sentence)

    def say(self, text: str, label: str = "", style: str = "") -> None:
        """Print a paragraph, behind a label if there is one."""
        shown = Text.assemble((f"{label:10}  " if label else "", style), render.safe(text))
        self.console.print(Padding(shown, (0, 0, 0, 3), expand=False))

    def check(self, name: str, ok: bool, text: str) -> None:
        self.checks.append({"name": name, "ok": ok, "detail": text})
        self.failed += [] if ok else [name]
        self.say(text, "ok" if ok else "FAILED", "bold green" if ok else "bold red")

    def introduce(self, library: Path) -> None:
        """Print what is to be stored. FileNotFoundError when there is nothing."""
        self.step("1  The workload", f"Each line of the sources of Python {sys.version.split()[0]} is to be a message.")
        if not self.lines:
            raise FileNotFoundError(f"{library} has no Python sources: this Python came without them")
        self.say(f"{len(self.sources):,} files, {self.lines:,} lines, {self.facts['bytes'] / 1e6:,.1f} MB in {library}")
        self.say(f"topic {TOPIC}, {QUEUES} queues; message group: the file; key: file and line; tag: top-level package")

    def write(self) -> None:
        ack_lines = max(64, self.lines // 50)
        self.step(
            "2  Write, and be killed",
            f"A child process puts each line as a message, flushes after {ack_lines:,} or so and acknowledges them "
            "over a pipe. Twice it gets a SIGKILL in the middle of its work, at a random moment. The next one opens "
            "the store, which recovers it, counts the lines that are there, and goes on behind them.",
        )
        acked = 0
        runs: list[dict[str, Any]] = self.facts.setdefault("runs", [])
        for low, high in (*KILLS, (2.0, 2.0)):
            kill_at = int(self.lines * self.rng.uniform(low, high))
            run = self._run_writer(acked, ack_lines, kill_at)
            self._show_run(len(runs) + 1, run)
            runs.append(run)
            acked = run["acknowledged"]
        killed = [run["exit_code"] for run in runs] == [-signal.SIGKILL] * len(KILLS) + [0]
        text = f"{len(KILLS)} writers died of SIGKILL while writing, the last one finished by itself"
        self.check("killed", killed, text)
        lost = sum(max(0, -run["unacknowledged"]) for run in runs)
        self.check("acknowledged", lost == 0, f"{lost} acknowledged lines were lost")
        self.check("complete", acked == self.lines, f"{acked:,} messages in the queues for {self.lines:,} lines")

    def _run_writer(self, before: int, ack_lines: int, kill_at: int) -> dict[str, Any]:
        """Run and kill the writer. Return what it said, its exit code and its process id.
        Also how many lines it has acknowledged, and how many it found that were never acknowledged."""
        ours, theirs = self.processes.Pipe()
        told = (theirs, str(self.store), self.sources, ack_lines)
        process = self.processes.Process(target=_write, args=told, daemon=True)
        process.start()
        theirs.close()
        acked = before
        facts: dict[str, Any] = {"first_line": before, "recovery": {"clean_shutdown": True}}
        bar = render.progress("writing", lambda: (acked, self.lines), of_bytes=False)
        try:
            with ours, bar, suppress(EOFError, OSError):  # OSError: it was killed in the middle of sending
                facts = ours.recv()
                begin = time.perf_counter()
                for groups in count(1):
                    acked = ours.recv()
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
        report, code = run["recovery"], run["exit_code"]
        text = "made the store"
        if not report["clean_shutdown"]:
            torn = sum(cut["to"] - cut["from"] for cut in report["truncated"])
            text = (
                f"opened it in {run['open_seconds']:.2f} s: {report['messages']:,} records read again are whole, a "
                f"tail of {torn:,} bytes was cut. {run['unacknowledged']:,} lines are there of which nobody was "
                "told; they are not put again."
            )
        self.say(text, f"writer {number}")
        word = {0: "finished", -signal.SIGKILL: "SIGKILL"}.get(code, f"exit {code}")
        self.say(f"at {run['acknowledged']:,} acknowledged lines, pid {run['pid']}", word, "yellow" if code else "")

    def read(self) -> None:
        readers = max(2, min(4, os.cpu_count() or 1))
        self.step(
            "3  Read it all back",
            f"{readers} reader processes consume the {QUEUES} queues, put every file together again line by line, and "
            "compare its SHA-256 with that of the original.",
        )
        files: dict[str, tuple[int, str]] = {}
        total = misplaced = 0
        queues = sorted({source.queue_id for source in self.sources})
        with (
            self.processes.Pool(readers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool,
            render.progress("reading", of_bytes=False) as report,
        ):
            for found in pool.imap_unordered(partial(_read, str(self.store)), queues):
                files |= found[0]
                misplaced += found[1]
                total += sum(lines for lines, _ in found[0].values())
                report(total, self.lines)
        text = f"{total:,} messages read, {misplaced:,} of them twice or out of place"
        self.check("once", total == self.lines and not misplaced, text)
        wrong = [s.group for s in self.sources if files.pop(s.group, None) != (s.lines, s.sha256)]
        text = f"{len(self.sources) - len(wrong):,} of {len(self.sources):,} files have the SHA-256 of the original"
        self.check("files", not (wrong or files), text + (f"; not {', '.join(wrong[:3])}" if wrong else ""))

    def look(self) -> None:
        self.step(
            "4  Look at it",
            "What `mqstore inspect` shows of this store, some lines looked up by their key, and `mqstore verify`: "
            "every record, unit and index entry.",
        )
        with render.progress("reading the log") as report:
            self.facts["inspect"] = found = inspect_store(self.store, progress=report)
        if not self.console.quiet:
            self.console.print()
            show_store(found)
            self.console.print()
        chosen = self.rng.choices(self.sources, [each.lines for each in self.sources], k=min(200, self.lines))
        wanted = [(source, self.rng.randrange(source.lines)) for source in chosen]
        with ReadOnlyMessageStore(self.store) as store:
            right = sum(
                [hit.body for hit in store.find(TOPIC, key=f"{source.group}:{line}")] == [_lines(source.path)[line]]
                for source, line in wanted
            )
        text = f"{right} of {len(wanted)} random lines found by their key, and they alone"
        self.check("keys", right == len(wanted), text)
        findings, messages = _verify(self.store)
        text = f"verify: {messages:,} messages, {len(findings)} findings"
        self.check("verified", not findings and messages == self.lines, text)

    def damage(self) -> None:
        self.step(
            "5  Break a copy, and mend it",
            "One bit is flipped in each of three files of a copy. A consume queue and the index are made from the log, "
            "so `mqstore recover` makes them again. The log is where messages are: a damaged one cannot be mended, "
            "only noticed, told, and passed over; its neighbours stay readable.",
        )
        copy = self.root / "copy"
        shutil.copytree(self.store, copy)
        (*flips, unit), queue, damaged = self._flip_three(copy)
        before, _ = _verify(copy)
        with render.progress("recovering") as progress, findings_on_stderr():
            report = recover_store(copy, RecoverOptions(), progress=progress)
        after, _ = _verify(copy)
        told, left = ({(each.kind, each.file) for each in findings} for findings in (before, after))
        for kind, file, position in flips:
            self.say(f"{file}, byte {position:,}: {'damaged still' if (kind, file) in left else 'mended'}", kind)
        found = sum(flip[:2] in told for flip in flips)
        other = len(told - {each[:2] for each in (*flips, unit)})
        text = f"verify gave {len(before)} findings; they tell of {found} of {len(flips)} flips, and of {other} other"
        self.check("found", found == len(flips) and not other, f"{text} things")
        self.check(
            "mended",
            [finding.kind for finding in after] == ["bad_record"],
            f"recover rebuilt {report.rebuilt.units:,} units and {report.rebuilt.index_entries:,} index entries; of "
            f"what verify says now {len(after) - 1} is not the damaged message",
        )
        lines = sum(source.lines for source in self.sources if source.queue_id == queue.queue_id)
        with ReadOnlyMessageStore(copy) as store:
            offsets = [message.offset for message in store.iter(*queue)]
        text = f"queue {queue.queue_id} of the copy: {len(offsets):,} of {lines:,} messages come, all but number "
        self.check("passed_over", offsets == [i for i in range(lines) if i != damaged], f"{text}{damaged:,}")
        self.facts["damage"] = {
            "flipped": [dict(zip(("kind", "file", "position"), flip, strict=True)) for flip in flips],
            "findings": [finding.as_dict() for finding in before],
            "recovered": report.as_dict(),
            "findings_after": [finding.as_dict() for finding in after],
        }

    def _flip_three(self, copy: Path) -> tuple[list[tuple[str, str, int]], mqstore.QueueRef, int]:
        """Flip a bit of a unit, an index entry and a body.
        Return (kind, file, position) of each finding to come, the last one for the unit of the body, then the body's
        queue and offset."""

        def place(kind: str, folder: str, position: int, file_bytes: int) -> tuple[str, str, int]:
            return kind, f"{folder}/{position // file_bytes * file_bytes:020d}", position % file_bytes

        with ReadOnlyMessageStore(copy) as store:
            unit_of, body_of = self.rng.choices(store.queues(TOPIC), k=2)
            slot, damaged = (self.rng.randrange(store.offsets(*ref)[1]) for ref in (unit_of, body_of))
            [message] = store.read(*body_of, damaged, max_messages=1)
            body_at = message.physical_offset + BODY_AT_V4 + self.rng.randrange(len(message.body))
        index = min((copy / "index").iterdir())
        entry = self.rng.randrange(1, IndexHeader.decode(index.read_bytes()[:HEADER_BYTES]).next_entry)
        entry_at = HEADER_BYTES + SLOT_BYTES * store.manifest.index_slots + ENTRY_BYTES * entry
        queues, unit_bytes = f"consumequeue/{TOPIC}", store.manifest.consumequeue_segment_bytes
        unit = place("bad_unit", f"{queues}/{body_of.queue_id}", damaged * UNIT_BYTES, unit_bytes)
        flips = [
            place("bad_unit", f"{queues}/{unit_of.queue_id}", slot * UNIT_BYTES + self.rng.randrange(8), unit_bytes),
            ("bad_index", f"index/{index.name}", entry_at + self.rng.randrange(4)),
            place("bad_record", "commitlog", body_at, store.manifest.commitlog_segment_bytes),
        ]
        for _, file, position in flips:
            data = bytearray((copy / file).read_bytes())
            data[position] ^= 1 << self.rng.randrange(8)
            (copy / file).write_bytes(data)
        return [*flips, unit], body_of, damaged


@command(
    examples="""
  python -m examples.demo
  python -m examples.demo --limit-mb 2 --dir var/demo && mqstore inspect var/demo/store""",
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
def demo(directory: Path | None, limit_mb: float | None, seed: int | None) -> None:
    """Store, kill, recover, read, inspect and break a real workload.

    Every line of the Python standard library becomes a message. The writing process is killed twice with SIGKILL, and
    another goes on. Readers put every file together again and compare SHA-256. Then a copy is damaged and mended. Exit
    code 1 if any check fails.
    """
    screen = render.console()
    screen.width = min(screen.width, 100)  # longer lines are hard to read
    screen.quiet = render.json_asked()
    seed = random.randrange(1_000_000) if seed is None else seed
    rng = random.Random(seed)
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise click.BadParameter(f"{directory} is not empty", param_hint="--dir")
    keep, root = directory is not None, directory or Path(tempfile.mkdtemp(prefix="mqstore-demo-"))
    root.mkdir(parents=True, exist_ok=True)
    try:
        screen.print(Text.assemble(("mqstore", "bold"), render.safe(f", seed {seed}, in {root}")))
        library = Path(sysconfig.get_path("stdlib"))
        sources = read_sources(library, math.inf if limit_mb is None else limit_mb * 1e6, rng)
        work = _Demo(screen, root, sources, rng)
        work.introduce(library)
        for step in (work.write, work.read, work.look, work.damage):
            step()
            if work.failed:
                break
        good, total = len(work.checks) - len(work.failed), len(work.checks)
        screen.print()
        work.say(f"{good} of {total} checks hold" + (f"; these do not: {', '.join(work.failed)}" * bool(work.failed)))
        keep = keep or bool(work.failed)  # somebody will want to look
    except mqstore.MQStoreError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
        elif directory is None:
            screen.print(Text("\n   " + render.safe(f"{root} is kept")))
    if render.json_asked():
        render.print_json({"seed": seed, "directory": str(root) if keep else None, "ok": not work.failed, **work.facts})
    finish(work.failed)


if __name__ == "__main__":
    demo()
