"""What does waiting for the disk cost a lone writer, and how well do sixteen share their syncs?"""

from __future__ import annotations

from typing import Any

import pytest

from bench import engine, peers
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

FLUSH_1 = Question(
    "flush_1",
    "put one at a time, durability flush, 1 thread",
    engine.FLUSH_1,
    (peers.DSYNC,),
    messages={128: 10_000, 1024: 10_000},
    sync_first=True,
)
FLUSH_16 = Question(
    "flush_16",
    "put one at a time, durability flush, 16 threads",
    engine.FLUSH_16,
    (engine.FLUSH_1, peers.DSYNC),
    messages={128: 16_000, 1024: 16_000},
    sync_first=True,
)
QUESTIONS = (FLUSH_1, FLUSH_16)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", FLUSH_16.sides, ids=lambda side: side.name)
def test_flush(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, FLUSH_16, side, body_bytes)
