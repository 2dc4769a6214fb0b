"""kill -9 on consumers of a queue, and on a delay level: no more than a moment of their work is done twice.

A child works at its own pace and notes each message with the time, in a file that outlives it. Whatever is done again
after the kill must have been done less than 200 ms before it; a loaded machine gets some more.
"""

from __future__ import annotations

import os
import struct
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import mqstore
from mqstore import Message
from tests.children import speaking_child

REPEATED_MS = 200 + 400
"""The promise, and what a machine under load may add."""
RUN_MS = 1_300
"""From the first message to the kill: most of it must not be repeated, or the test proves nothing."""
PACE_S = 0.002
_NOTE = struct.Struct(">qq")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def note_in(fd: int, number: int) -> None:
    os.write(fd, _NOTE.pack(number, now_ms()))


def kill_at_work(work: Callable[[Callable[[int], None]], None], notes: Path) -> tuple[dict[int, int], int]:
    """Run `work(note)` in a child, kill it `RUN_MS` after the first note; what it noted with the times, and when it was
    killed (wall ms)."""
    fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with speaking_child(lambda pipe: work(partial(note_in, fd))):
        os.close(fd)
        give_up = time.monotonic() + 60
        while not notes.stat().st_size and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(RUN_MS / 1000)
        killed_ms = now_ms()
    data = notes.read_bytes()
    return dict(_NOTE.iter_unpack(data[: len(data) // _NOTE.size * _NOTE.size])), killed_ms


def check_repeated(done: dict[int, int], repeated: set[int], killed_ms: int) -> None:
    """`done`: number -> wall ms, before the kill."""
    assert killed_ms - min(done.values()) >= RUN_MS > 2 * REPEATED_MS
    early = {number: killed_ms - done[number] for number in repeated if killed_ms - done[number] > REPEATED_MS}
    assert not early, f"{len(early)} of {len(done)} were done up to {max(early.values())} ms before the kill, and again"


@pytest.mark.parametrize("ordered", [False, True])
def test_a_killed_consumer_repeats_a_moment_of_its_work(tmp_path: Path, ordered: bool) -> None:
    path, number_of_messages = tmp_path / "store", 4_000
    with mqstore.open(path) as store:
        store.create_topic("t", queues=4)
        for number in range(number_of_messages):
            store.put("t", b"%d" % number, queue_id=number % 4)

    def consume(store: mqstore.Store, note: Callable[[int], None], pace_s: float) -> mqstore.PushConsumer:
        def handle(message: Message) -> None:
            time.sleep(pace_s)
            note(int(message.body))

        consumer = store.push_consumer("g", ordered=ordered, workers=4, start="earliest")
        consumer.subscribe("t", handle)
        return consumer.start()

    def work(note: Callable[[int], None]) -> None:
        store = mqstore.open(path, config=mqstore.StoreConfig(commit_interval=60))
        # The first save is a synced one, which may take long on a busy disk: it is not what is measured.
        store.broker.commit("another", "t", 0, 0, durability="flush")
        consume(store, note, PACE_S)
        time.sleep(60)

    done, killed_ms = kill_at_work(work, tmp_path / "notes")
    again: list[int] = []
    with mqstore.open(path) as store:
        consumer = consume(store, again.append, 0)
        give_up = time.monotonic() + 30
        while len(done.keys() | set(again)) < number_of_messages and time.monotonic() < give_up:
            time.sleep(0.02)
        consumer.stop()
    assert done.keys() | set(again) == set(range(number_of_messages)), "a message is lost"
    check_repeated(done, done.keys() & set(again), killed_ms)


def test_a_killed_delay_level_repeats_a_moment_of_its_deliveries(tmp_path: Path) -> None:
    path = tmp_path / "store"

    def work(note: Callable[[int], None]) -> None:
        broker = mqstore.open(path).broker
        for number in range(100_000):
            broker.put("t", b"%d" % number, queue_id=0, delay_level=1)
            if number * PACE_S > 1.1:  # the first are delivered
                note(number)
            time.sleep(PACE_S)

    noted, killed_ms = kill_at_work(work, tmp_path / "notes")
    with mqstore.open(path) as store:
        give_up = time.monotonic() + 30
        broker = store.broker
        while any(at < end for at, end in broker.stats().delay_levels.values()) and time.monotonic() < give_up:
            time.sleep(0.02)
        end, messages = broker.max_offset("t", 0), list[Message]()
        while (offset := messages[-1].offset + 1 if messages else 0) < end:
            messages += broker.read("t", 0, offset, 1_000).messages
        first: dict[int, int] = {}
        for message in messages:
            first.setdefault(int(message.body), message.store_timestamp_ms)
        counts = Counter(int(message.body) for message in messages)
    assert set(counts) >= set(range(max(noted) + 1)), "a message is lost"
    done = {number: at_ms for number, at_ms in first.items() if at_ms <= killed_ms}
    check_repeated(done, {number for number, count in counts.items() if count > 1}, killed_ms)
