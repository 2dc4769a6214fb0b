"""What does the persistent queue cost beside the store under it, and beside other queues on disk?

`put` stores bytes with durability "append". Getting takes an item, looks at it, and acknowledges it.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import delivery, peers
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

QUEUE_PUT = Question(
    "queue_put",
    "put items into a Queue one by one",
    delivery.QUEUE_PUT,
    (delivery.PUT, peers.QUEUELIB),
    messages={128: 40_000, 1024: 40_000},
)
QUEUE_GET = Question(
    "queue_get",
    "get and acknowledge items of a Queue one by one",
    delivery.QUEUE_GET,
    (peers.SQLITE_ACK_QUEUE, peers.LITEQUEUE, peers.LOCALQUEUE, peers.DISKCACHE_DEQUE),
    messages={128: 20_000, 1024: 20_000},
)
QUESTIONS = (QUEUE_PUT, QUEUE_GET)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", QUEUE_PUT.sides, ids=lambda side: side.name)
def test_queue_put(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, QUEUE_PUT, side, body_bytes)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", QUEUE_GET.sides, ids=lambda side: side.name)
def test_queue_get(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, QUEUE_GET, side, body_bytes)
