"""How many messages a second go in a thousand at a time?"""

from __future__ import annotations

from typing import Any

import pytest

from bench import engine, peers
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

PUT_MANY = Question(
    "put_many",
    "put_many of 1000, durability append",
    engine.PUT_MANY,
    (peers.LMDB_PUT, peers.LMDB_PUTMULTI),
    messages={128: 400_000, 1024: 100_000},
)
QUESTIONS = (PUT_MANY,)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", PUT_MANY.sides, ids=lambda side: side.name)
def test_put_many(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, PUT_MANY, side, body_bytes)
