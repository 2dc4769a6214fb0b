"""Bytes that a failed attempt writes to the log: the body once, or not at all where order allows reading it again.

Measured between two calls of a handler that always fails. A body is 50,000 bytes, so small records do not matter.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, RetryPolicy
from tests.client.pushsupport import PushBench

BODY = bytes(range(250)) * 200
ATTEMPTS = 5

# (options of the consumer, profile, copies of the body for each failed attempt)
TABLE: dict[str, tuple[dict[str, Any], str, int]] = {
    "queue, by level": ({}, "mqstore", 1),
    "queue, by timer": ({"retry": RetryPolicy(delays=[7])}, "mqstore", 1),
    "queue, at once": ({"retry": RetryPolicy(delays=[0])}, "mqstore", 1),
    "queue, by level, for Java": ({}, "rocketmq", 2),
    "queue, by timer, for Java": ({"retry": RetryPolicy(delays=[7])}, "rocketmq", 2),
    "pop": ({"mode": "pop"}, "mqstore", 1),
    "queue, in order": ({"ordered": True}, "mqstore", 0),
    "pop, in order": ({"ordered": True, "mode": "pop"}, "mqstore", 0),
}


@pytest.mark.parametrize("case", TABLE)
def test_failed_attempt_writes_the_body_at_most_once(tmp_path: Path, case: str) -> None:
    options, profile, copies = TABLE[case]
    bench = PushBench(tmp_path / "store", profile=profile, segment_bytes=1 << 20)
    seen: list[tuple[int, bytes, int]] = []

    def handler(message: Message) -> None:
        if len(seen) < ATTEMPTS:
            seen.append((message.attempt, message.body, bench.broker.store.max_offset))
            raise ValueError("poison")

    bench.put(BODY)
    bench.consumer(handler, **options)
    bench.advance(300)
    assert [(attempt, body) for attempt, body, _ in seen] == [(i + 1, BODY) for i in range(ATTEMPTS)]
    ends = [end for _, _, end in seen]
    written = [(after - before) / len(BODY) for before, after in pairwise(ends)]
    assert all(copies <= each < copies + 0.1 for each in written), written
    bench.close()
