"""kill -9: a child process puts for real and says over a pipe what was acknowledged; the parent kills it and looks.

    reliability#p1   every acknowledged put is there, in order, each queue without a gap; so for reliability#p2
    reliability#p7   wherever the kill lands, in opening, rolling, retention or closing, the next opening mends it

What a killed process wrote is in the page cache, so "append" promises as much as "flush" here; power cuts are
`test_images.py`, and so are kills at any change.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mqstore import SimulatedClock, StoreConfig
from tests.children import killed_child
from tests.log.support import open_in

SIZES = {"segment_bytes": 8192, "consumequeue_units": 32, "index_slots": 16, "index_entries": 128}
QUEUES = 3
_ACK = struct.Struct(">cq")
"""What the child says: `a` n: message n is acknowledged; `d` p: retention may take what lies below p; else a phase that
begins now: `o`pening, `c`losing, `r`etention."""


def body_of(n: int) -> bytes:
    return (b"%09d " % n) * (1 + n * 7919 % 40)


def number_of(body: bytes) -> int:
    n = int(body[:9])
    assert body == body_of(n)
    return n


def held(store: Any) -> range:
    """The numbers of all messages in the store, which must be without a gap over all queues together."""
    numbers = []
    for queue_id in range(QUEUES):
        try:
            low, high = store.offsets("t", queue_id)
        except LookupError:
            continue
        mine = []
        for message in store.iter("t", queue_id):
            mine.append(number_of(message.body))
        assert len(mine) == high - low, f"queue {queue_id} has a gap"
        assert mine == sorted(mine)
        numbers += mine
    numbers.sort()
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


# --- the child ---


def produce(path: Path, pipe: int, seed: int) -> None:
    """Open, put, roll, drop and close until somebody stops it."""
    rng = random.Random(seed)

    def say(kind: bytes, value: int = 0) -> None:
        os.write(pipe, _ACK.pack(kind, value))

    config = StoreConfig(**SIZES, flush_interval=0.005, full_flush_interval=0.005)
    while True:
        say(b"o")
        store = open_in("rw", path, config=config)
        n = held(store).stop
        for _ in range(rng.randrange(20, 200)):
            step = rng.random()
            if step < 0.9:
                store.put("t", body_of(n), n % QUEUES, keys=f"k{n}", durability="flush" if step < 0.1 else "append")
                say(b"a", n)
                n += 1
            elif step < 0.96:
                count = rng.randrange(1, 20)
                for i in range(count):
                    store.put("t", body_of(n + i), (n + i) % QUEUES, durability="append")
                store.flush()
                n += count
                say(b"a", n - 1)
            elif n > 100:
                store.flush()
                store.dispatch()
                bound = store.min_offset + 2 * SIZES["segment_bytes"]
                say(b"d", bound)
                say(b"r")
                store.drop_before(bound)
        say(b"c")
        store.close()


def rounds(path: Path, rng: random.Random, count: int) -> Iterator[tuple[int, int]]:
    """Run the child and kill it, `count` times; yields (last acknowledged number, bound of retention) after each."""
    acknowledged, bound = -1, 0
    for _ in range(count):
        phase = rng.choice((b"a", b"a", b"a", b"o", b"c", b"r"))
        left = rng.randrange(1, 300) if phase == b"a" else rng.randrange(1, 3)
        pending = b""
        seed = rng.getrandbits(32)

        def heard(data: bytes) -> bool:
            nonlocal acknowledged, bound, left, pending
            pending += data
            whole = len(pending) // _ACK.size * _ACK.size
            for kind, value in _ACK.iter_unpack(pending[:whole]):
                if kind == b"a":
                    acknowledged = max(acknowledged, value)
                elif kind == b"d":
                    bound = max(bound, value)
                left -= kind == phase  # noqa: B023
            pending = pending[whole:]
            return left <= 0

        killed_child(lambda pipe: produce(path, pipe, seed), heard, rng.randrange(20_000))  # noqa: B023
        yield acknowledged, bound


def test_no_acknowledged_message_is_lost_to_kill_9(tmp_path: Path) -> None:
    rng = random.Random(20240607)
    path = tmp_path / "store"
    for i, (acknowledged, bound) in enumerate(rounds(path, rng, 12)):
        if i % 3 == 2:
            continue  # let the next child recover, and be killed in it
        with open_in("rw", path, config=StoreConfig(clock=SimulatedClock(), **SIZES)) as store:
            assert store.recovery.findings == []
            assert store.min_offset <= bound
            there = held(store)
            assert there.stop > acknowledged, f"round {i}: {acknowledged} was acknowledged, {there} is there"
        if i % 6 == 0:
            with open_in("r", path) as store:
                assert list(store.verify()) == []
