"""How many messages a second can be popped and acknowledged, one by one and in batches?

A message is taken, its body looked at, and acknowledged: by then both are on record. persist-queue's SQLiteAckQueue and
litequeue do the same with one message a call; a plain read leaves nothing on record, and shows what delivery adds.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import delivery, peers
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

POP_ONE = Question(
    "pop_one",
    "pop and acknowledge messages one by one",
    delivery.POP_ONE,
    (peers.SQLITE_ACK_QUEUE, peers.LITEQUEUE),
    messages={128: 40_000, 1024: 40_000},
)
POP_MANY = Question(
    "pop_many",
    "pop and acknowledge messages 32 at a time",
    delivery.POP_MANY,
    (delivery.READ,),
    messages={128: 200_000, 1024: 100_000},
)
QUESTIONS = (POP_ONE, POP_MANY)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", POP_ONE.sides, ids=lambda side: side.name)
def test_pop_one(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, POP_ONE, side, body_bytes)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", POP_MANY.sides, ids=lambda side: side.name)
def test_pop_many(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, POP_MANY, side, body_bytes)
