"""kill -9 in the middle of handlers: an attempt is counted when a handler begins (clients#attempt-counted).

A child consumes for real; one message has its handler kill the process. The parent starts the next one until a child
ends by itself, and looks what became of every message. Expected numbers are those of the retry policy.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import mqstore
from tests.children import in_child

LIMIT_S = 60
PROCESS_ENDED = "the process ended while it was handled"
GOOD = [f"m{i}" for i in range(40)]
WORKERS = 4
MODES = {
    "queue": {},
    "queue, ordered": {"ordered": True},
    "pop": {"mode": "pop"},
    "pop, ordered": {"mode": "pop", "ordered": True},
}


def consume(path: Path, log_path: Path, options: dict[str, Any]) -> None:
    """Note each message and its attempt, then handle it, until all is settled. A child does this."""
    log = os.open(log_path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    seen = {line.split()[0] for line in os.read(log, 1 << 20).decode().splitlines()}

    def handle(given: Any) -> None:
        messages = given if isinstance(given, tuple) else (given,)
        for message in messages:
            os.write(log, f"{message.text()} {message.attempt}\n".encode())
        if any(message.text() == "kill" for message in messages):
            os.kill(os.getpid(), signal.SIGKILL)
        seen.update(message.text() for message in messages)

    with mqstore.open(path) as store:
        consumer = store.push_consumer("g", retry=mqstore.RetryPolicy(3, [0]), workers=WORKERS, **options)
        consumer.subscribe("t", handle)
        end = time.monotonic() + LIMIT_S
        with consumer:
            while time.monotonic() < end and not (seen.issuperset(GOOD) and len(store.dead_letters("g"))):
                time.sleep(0.01)


@pytest.mark.parametrize(("mode", "batch_size"), [("queue", 4), ("queue, ordered", 1), ("pop", 4), ("pop, ordered", 1)])
def test_only_the_message_that_kills_the_process_is_a_dead_letter(tmp_path: Path, mode: str, batch_size: int) -> None:
    path, log = tmp_path / "store", tmp_path / "log"
    with mqstore.open(path) as store:
        store.create_topic("t", queues=1)
        for text in [*GOOD[:10], "kill", *GOOD[10:]]:
            store.put("t", text.encode())

    options = {**MODES[mode], "batch_size": batch_size}
    codes = []
    for _ in range(4):
        codes.append(in_child(lambda: consume(path, log, options), LIMIT_S))
        with mqstore.open(path) as store:  # by another program: what is suspected is not forgotten
            store.put("other", b"")

    assert codes == [-signal.SIGKILL] * 3 + [0]
    attempts = defaultdict(list)
    for line in log.read_text().splitlines():
        text, attempt = line.split()
        attempts[text].append(int(attempt))
    assert attempts.pop("kill") == [1, 2, 3]
    assert set(attempts) == set(GOOD)
    # Suspected after the first kill, so alone before the second. It may be beside the killing one again at the third.
    assert max(max(each) for each in attempts.values()) <= 3
    with mqstore.open(path) as store:
        [letter] = store.dead_letters("g")
        assert (letter.text(), letter.reconsume_times, letter.properties["dlq_reason"]) == ("kill", 3, PROCESS_ENDED)
        assert not [file for file in (path / "config" / "begun").iterdir() if file.name.isdecimal()]


def kill_in_handlers(path: Path, options: dict[str, Any]) -> None:
    """Kill this process once four messages are in handlers. A child does this."""
    inside = threading.Semaphore(0)

    def handle(given: Any) -> None:
        for _ in given if isinstance(given, tuple) else (given,):
            inside.release()
        time.sleep(LIMIT_S)

    with mqstore.open(path) as store:
        consumer = store.push_consumer("g", retry=mqstore.RetryPolicy(3, [0]), workers=4, **options)
        consumer.subscribe("t", handle)
        with consumer:
            for _ in range(4):
                inside.acquire()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("mode", "batch_size"), [("queue", 1), ("pop", 4)])
def test_interrupted_messages_are_redelivered_one_by_one(tmp_path: Path, mode: str, batch_size: int) -> None:
    with mqstore.open(tmp_path) as store:
        store.create_topic("t", queues=1)
        for i in range(20):
            store.put("t", b"%02d" % i)
    options = {"mode": mode, "batch_size": batch_size, "prefetch": 4}
    assert in_child(lambda: kill_in_handlers(tmp_path, options), LIMIT_S) == -signal.SIGKILL

    lock, others, gate = threading.Lock(), threading.Semaphore(0), threading.Event()
    calls: list[tuple[int, ...]] = []

    def handle(given: Any) -> None:
        messages = given if isinstance(given, tuple) else (given,)
        with lock:
            calls.append(tuple(message.attempt for message in messages))
        if any(message.attempt == 2 for message in messages):
            assert gate.wait(LIMIT_S)
        for message in messages:
            if message.attempt == 1:
                others.release()
        done.append(len(messages))

    done: list[int] = []
    with mqstore.open(tmp_path) as store:
        consumer = store.push_consumer("g", workers=4, mode=mode, batch_size=batch_size)  # type: ignore[arg-type]
        consumer.subscribe("t", handle)
        with consumer:
            for _ in range(16):  # none of these waits for the four
                assert others.acquire(timeout=LIMIT_S)
            deadline = time.monotonic() + LIMIT_S
            while not [attempts for attempts in calls if 2 in attempts]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert [attempts for attempts in calls if 2 in attempts] == [(2,)]
            gate.set()
            while sum(done) < 20:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert [attempts for attempts in calls if 2 in attempts] == [(2,)] * 4


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_a_consumer_that_stops_begins_none_of_them(tmp_path: Path, mode: str) -> None:
    with mqstore.open(tmp_path) as store:
        store.create_topic("t", queues=1)
        for i in range(4):
            store.put("t", b"%d" % i)
    assert in_child(lambda: kill_in_handlers(tmp_path, {"mode": mode}), LIMIT_S) == -signal.SIGKILL

    inside, gate, calls = threading.Semaphore(0), threading.Event(), []

    def handle(message: mqstore.Message) -> None:
        calls.append(message.text())
        inside.release()
        assert gate.wait(LIMIT_S)

    with mqstore.open(tmp_path) as store:
        consumer = store.push_consumer("g", workers=4, mode=mode)  # type: ignore[arg-type]
        consumer.subscribe("t", handle)
        consumer.start()
        assert inside.acquire(timeout=LIMIT_S)
        assert consumer.stop(0) is False
        gate.set()
        assert consumer.stop(LIMIT_S) in (True, False)
        assert len(calls) == 1

        with store.push_consumer("g", workers=4, mode=mode) as second:  # type: ignore[arg-type]
            second.subscribe("t", handle)
            for _ in range(3):  # nobody waits for the one that had the turn
                assert inside.acquire(timeout=LIMIT_S)
