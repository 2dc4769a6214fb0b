"""Ctrl-C at every point of every call: the store goes on, closes, and has everything that it acknowledged.

Two ways to look. `test_every_point` raises at each point of a call where CPython may run a signal handler, one after
the other (`tests/interrupts.py`). `test_real_signals` sends SIGINT to a process that works, at random moments, in
threads and under asyncio.

`make interrupts` tries every point; `make test` a few of each call, other ones for each MQSTORE_CAMPAIGN_SEED.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Store
from tests.campaigns.calls import CALLS, HANG_S, Work, a_queue, nothing, open_store, ordered, probe, put_plain
from tests.interrupts import is_with_safe, points_in, run_interrupted
from tests.waiting import ended, in_thread

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",  # finalizers of iterators that were interrupted
    "ignore::ResourceWarning",
)

SEED = int(os.environ.get("MQSTORE_CAMPAIGN_SEED", 1))
POINTS = int(os.environ.get("MQSTORE_CAMPAIGN_ROUNDS", 3))
"""Number of points tried in each call. `make interrupts` gives more than any call has, except a snapshot."""
MAX_POINTS = 4000
SIGNALS = min(50 * POINTS, 5000)
"""To a process that works. They come in bursts: the pauses between them are of random length."""
MEAN_PAUSE_S = 0.004


def start(path: Path, make: Callable[[Store], Any]) -> Work:
    """A store in which everything is there that a first call creates."""
    store = open_store(path)
    for queue_id in range(4):
        store.put("t", b"first", queue_id=queue_id, tag="a", keys="first")
    store.put("t", b"later", delay=30)
    store.put("t", b"later", delay_level=1)
    return Work(store, make(store))


def in_time(call: Callable[[], object]) -> None:
    """`call` from another thread. A hang is an AssertionError; whatever it raises is raised."""
    thread, outcome = in_thread(call)
    thread.join(HANG_S)
    if thread.is_alive():
        faulthandler.dump_traceback()
    if isinstance(found := ended(thread, outcome, 0), Exception):
        raise found


def check_kept(path: Path, work: Work) -> None:
    """Close, open again: everything acknowledged is there, whole, and the store is sound."""
    in_time(lambda: work.store.close(5))
    with open_store(path) as store:
        for receipt, body in work.put:
            [message] = store.read(*receipt.queue, receipt.offset, 1)
            assert message.body == body
        assert not list(store.verify())


def points_of(seed: int, call: Callable[[], object]) -> list[int]:
    """Choose points of a call, which is run twice: the first one imports modules, whose points would hide its own.

    If all are wanted: more than it has, for a first call in a store, which creates things, has more than this one."""
    call()
    count = points_in(call)
    if POINTS >= MAX_POINTS >= count:
        return list(range(MAX_POINTS))
    return sorted(random.Random(seed).sample(range(count), min(POINTS, count)))


def told(at: int, name: str, error: BaseException, stack: list[str]) -> str:
    said = f"interrupted at point {at} of {name!r}, then {error!r}; it, or the point before it, was at"
    return "\n    ".join([said, *stack])


@pytest.mark.parametrize("name", CALLS)
def test_every_point(name: str, tmp_path: Path) -> None:
    make, step = CALLS[name]
    path = tmp_path / "store"
    other = start(tmp_path / "other", make)
    points = points_of(SEED * 1000 + list(CALLS).index(name), lambda: step(other))
    other.store.close(5)
    work = start(path, make)
    ended = 0
    stack: list[str] = []
    for at in points:
        if make is ordered:
            work.tool = make(work.store)
        try:
            stack = run_interrupted(lambda: step(work), at)
            in_time(lambda: probe(work.store))
        except BaseException as error:
            raise AssertionError(told(at, name, error, stack)) from error
        ended = 0 if stack else ended + 1
        if ended > 20:  # a later call has fewer points: whatever a first one made is there
            break
    check_kept(path, work)


def test_a_waiting_thread_is_woken(tmp_path: Path) -> None:
    """A call that was interrupted while it woke others has woken them, or the next message does."""
    path = tmp_path / "store"
    work = start(path, nothing)
    other = work.store.queue("other")
    for at in points_of(SEED, lambda: (other.put(b"x"), work.store.offsets("other", 0))):
        queue = work.store.queue(f"waited-{at % 50}", visibility=60)
        for task in queue:
            task.ack()
        got: list[mqstore.Task] = []
        waiting = [threading.Thread(target=lambda: got.append(queue.get(timeout=HANG_S)), daemon=True) for _ in "ab"]  # noqa: B023
        for thread in waiting:
            thread.start()
        while len(queue._waits.broker._waiters.parked) < len(waiting):
            pass

        def put_and_show() -> None:
            queue.put(b"x")  # noqa: B023
            work.store.offsets(queue.name, 0)  # noqa: B023  (dispatches, and wakes)

        stack = run_interrupted(put_and_show, at)
        try:
            in_time(lambda: queue.put_many([b"x", b"x"]))  # noqa: B023
            for thread in waiting:
                thread.join(HANG_S)
            assert len(got) == len(waiting)
        except BaseException as error:
            raise AssertionError(told(at, "waking", error, stack)) from error
        for task in got:
            task.ack()
        if not stack:
            break
    check_kept(path, work)


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_opening_at_every_point(mode: Any, tmp_path: Path) -> None:
    """The next opening finds no lock of the one that was interrupted, nor anything to complain of."""
    path = tmp_path / "store"
    work = start(path, nothing)
    put_plain(work)
    work.store.close()
    for at in points_of(SEED, lambda: mqstore.open(path, mode).close()):
        opened: list[Store] = []
        stack = run_interrupted(lambda: opened.append(mqstore.open(path, mode)), at)  # noqa: B023
        for store in opened:
            store.close()
        if not stack:
            break
        try:
            in_time(lambda: open_store(path).close())
        except BaseException as error:
            raise AssertionError(told(at, "opening", error, stack)) from error
    work.store = open_store(path)
    check_kept(path, work)


def test_closing_at_every_point(tmp_path: Path) -> None:
    """A second `close` ends what an interrupted one has begun."""
    path = tmp_path / "store"
    work = start(path, nothing)
    others = [open_store(tmp_path / name) for name in ("a", "b")]
    for at in points_of(SEED, lambda: others.pop().close()):
        put_plain(work)
        queue = a_queue(work.store)
        queue.put(b"x")
        queue.get(timeout=5).ack()
        stack = run_interrupted(work.store.close, at)
        try:
            in_time(work.store.close)
            work.store = open_store(path)
        except BaseException as error:
            raise AssertionError(told(at, "closing", error, stack)) from error
        if not stack:
            break
    check_kept(path, work)


@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_real_signals(mode: str, tmp_path: Path) -> None:
    """SIGINT at random moments: the store closes in time, and nothing acknowledged is lost."""
    if not is_with_safe():
        pytest.skip("this CPython leaves locks held (its issue 148874; docs/design.md, Signals)")
    rng = random.Random(SEED)
    path = tmp_path / "store"
    start(path, nothing).store.close()
    command = [sys.executable, "-m", "tests.campaigns.interrupted", str(path), mode, str(SEED)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "store")])}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=errors
        )
        assert child.stdin is not None
        while output.tell() == 0 and child.poll() is None:  # it has begun
            time.sleep(0.01)
            output.seek(0, os.SEEK_END)
        for _ in range(SIGNALS):
            time.sleep(rng.expovariate(1 / MEAN_PAUSE_S))
            child.send_signal(signal.SIGINT)
        child.stdin.close()
        child.wait()
        for file in (output, errors):
            file.seek(0)
        told, complaints = output.read().decode().splitlines(), errors.read().decode()
    assert child.returncode == 0, complaints
    assert told[-1].startswith("closed ")
    assert int(told[-1].split()[1]) > SIGNALS // 4
    with open_store(path) as store:
        queues = [queue for topic in store.topics() for queue in store.queues(topic)]
        found = {(*queue, message.offset): message.body for queue in queues for message in store.iter(*queue)}
        for line in told[:-1]:
            _, topic, queue_id, offset, body = line.split()
            assert found[topic, int(queue_id), int(offset)] == body.encode()
        assert not list(store.verify())
