"""A process that is stopped (SIGSTOP) in the middle of a handler for longer than a lease, and goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import mqstore
from mqstore.broker import locks
from mqstore.client import assignment
from mqstore.log.message import Message
from tests.children import speaking_child

LEASE_MS = 500
NEVER_MS = 600_000
HANDLER_S = 1.5
"""Longer than the stop, which counts as time."""


def work(path: Path, ordered: bool, pipe: int) -> None:
    """One member that is in a handler, and one that looks at the shares all the time and would take over. What begins
    and ends is said over `pipe`."""
    setattr(locks, "LEASE_MS", LEASE_MS)  # noqa: B010  (a constant)
    with mqstore.open(path) as store:
        store.create_topic("t", queues=1)

        def member(name: str, rebalance_ms: int) -> None:
            def handle(message: Message) -> None:
                os.write(pipe, name.encode() + b"<")
                time.sleep(HANDLER_S)
                os.write(pipe, name.encode() + b">")

            assignment.RENEW_MS, assignment.REBALANCE_MS = NEVER_MS, rebalance_ms
            consumer = store.push_consumer("g", ordered=ordered, workers=1, client_id=name, start="earliest")
            consumer.subscribe("t", handle)
            consumer.start()

        member("a", NEVER_MS)
        member("b", 50)
        store.put("t", b"x")
        store.put("t", b"y")
        time.sleep(60)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_queue_at_work_stays_with_its_member_over_a_stop(tmp_path: Path, ordered: bool) -> None:
    said = b""
    with speaking_child(lambda pipe: work(tmp_path / "store", ordered, pipe)) as (pid, reader):
        said += os.read(reader, 2)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(LEASE_MS * 1.4 / 1000)
        os.kill(pid, signal.SIGCONT)
        while len(said) < 6 and (more := os.read(reader, 2)):
            said += more
    assert said[:4] == b"a<a>", "another member was in a handler of the queue before the first one's had ended"
    assert said[4:] in (b"a<", b"b<")
