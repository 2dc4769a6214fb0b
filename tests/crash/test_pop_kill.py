"""kill -9 on workers of a queue: acknowledged items never return, others do at once, as their next attempt.

A child gets and acknowledges for real, several items at a time, and reports each call over a pipe. The parent kills it
and starts the next one. The journal of pops is small in some runs, so that a kill often meets its folding.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
from pathlib import Path

import pytest

import mqstore
from mqstore.broker.pop import journal
from tests.children import speaking_child

ITEMS = 20_000
KILLS = 12
_SAY = struct.Struct(">chh")
"""`g` item attempt: got; `a` item 0: its ack has returned."""


def consume(path: Path, pipe: int, seed: int) -> None:
    rng = random.Random(seed)
    held = []
    with mqstore.open(path) as store:
        queue = store.queue("jobs", visibility=3600, retry=mqstore.RetryPolicy(1000, [0]))
        while True:
            task = queue.get(timeout=30)
            os.write(pipe, _SAY.pack(b"g", int(task.value), task.attempt))
            held.append(task)
            while len(held) > rng.randrange(6):
                done = held.pop(rng.randrange(len(held)))
                done.ack()
                os.write(pipe, _SAY.pack(b"a", int(done.value), 0))
            if rng.random() < 0.01:
                store.broker.sync()


@pytest.mark.parametrize("file_bytes", [1024, 1 << 18])
@pytest.mark.parametrize("seed", range(3))
def test_killed_workers_keep_acks_and_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, file_bytes: int
) -> None:
    monkeypatch.setattr(journal, "_FILE_BYTES", file_bytes)
    rng = random.Random(seed)
    with mqstore.open(tmp_path) as store:
        store.queue("jobs").put_many([str(n).encode() for n in range(ITEMS)])
    attempts: dict[int, int] = {}
    acked: set[int] = set()
    surprises = 0
    for turn in range(KILLS):
        with speaking_child(lambda pipe, turn=turn: consume(tmp_path, pipe, seed * 100 + turn)) as (pid, pipe):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
            said, wanted = b"", rng.randrange(1, 1500)
            while len(said) < wanted:
                said += os.read(pipe, 4096)
            os.kill(pid, signal.SIGKILL)
            while more := os.read(pipe, 4096):
                said += more
        for kind, item, attempt in _SAY.iter_unpack(said):
            if kind == b"a":
                acked.add(item)
                continue
            assert item not in acked, f"item {item} was acknowledged"
            surprises += attempt != attempts.get(item, 0) + 1
            assert attempts.get(item, 0) < attempt <= turn + 1
            attempts[item] = attempt
    assert surprises <= KILLS, "more than the last call of each child, which it could not report"
    assert len(acked) > KILLS
    with mqstore.open(tmp_path) as store:
        rest = {int(task.value): task.attempt for task in store.queue("jobs").get_many(ITEMS)}
    assert not acked & rest.keys()
    assert len(rest) + len(acked) >= ITEMS - KILLS
    surprises += sum(attempt != attempts.get(item, 0) + 1 for item, attempt in rest.items())
    assert surprises <= KILLS
