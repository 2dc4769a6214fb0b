"""Questions about a process that imports a library, and puts and gets one item: its time, and its memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest

from bench.harness import Ask, needs_modules, scratch

PROGRAM = """
import sys, time
begin = time.perf_counter()
import {module}
{statements}
took_ms = (time.perf_counter() - begin) * 1000
pages = int(open("/proc/self/statm").read().split()[1])
import json
print(json.dumps({{"ms": took_ms, "MiB": pages * 4096 / 2**20}}))
"""
FIRST_ITEMS = {
    "mqstore": """
queue = mqstore.open(sys.argv[1]).queue("jobs")
queue.put(b"item")
queue.get().ack()
""",
    "sqlite3": """
db = sqlite3.connect(sys.argv[1] + "/queue.db", isolation_level=None)
db.execute("CREATE TABLE job (id INTEGER PRIMARY KEY, body BLOB)")
db.execute("INSERT INTO job (body) VALUES (?)", (b"item",))
db.execute("DELETE FROM job RETURNING body").fetchall()
""",
    "diskcache": """
queue = diskcache.Deque(directory=sys.argv[1])
queue.append(b"item")
queue.popleft()
""",
    "persistqueue": """
queue = persistqueue.SQLiteAckQueue(sys.argv[1])
queue.put(b"item")
queue.ack(queue.get())
""",
}
"""Statements by the library that they need."""


def first_item(module: str) -> dict[str, float]:
    with scratch() as directory:
        program = PROGRAM.format(module=module, statements=FIRST_ITEMS[module])
        run = [sys.executable, "-c", program, str(directory)]
        compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # else each round compiles every module
        done = subprocess.run(run, check=True, capture_output=True, env=compiled)
        measured: dict[str, float] = json.loads(done.stdout)
        return measured


@pytest.mark.parametrize(("unit", "goal"), [("ms", 60), ("MiB", 25)])
def test_first_item(ask: Ask, unit: str, goal: float) -> None:
    """`import`, and the first put and get in a new store, in a new process: the time, or the memory of the process."""
    peers = [name for name in FIRST_ITEMS if needs_modules(name)() is None]
    rounds = [{name: first_item(name)[unit] for name in peers} for _ in range(1 + ask.rounds)][1:]
    ask.benchmark.pedantic(lambda: None)
    ours = [each["mqstore"] for each in rounds]
    ask.answer("", unit, ours, goal)
    for name in peers[1:]:
        theirs = [each[name] for each in rounds]
        note = f"{statistics.median(ours):.3g} against {statistics.median(theirs):.3g} {unit}"
        ask.answer(name, "x time", [our / their for our, their in zip(ours, theirs, strict=True)], None, note)
