"""How many messages a second go in one at a time, each in the page cache when its put returns?"""

from __future__ import annotations

from typing import Any

import pytest

from bench import engine, peers
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

PUT = Question(
    "put",
    "put one at a time, durability append",
    engine.PUT,
    (peers.QUEUELIB, peers.SQLITE, peers.PERSIST_QUEUE),
    messages={128: 400_000, 1024: 100_000},
)
QUESTIONS = (PUT,)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", PUT.sides, ids=lambda side: side.name)
def test_put(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, PUT, side, body_bytes)
