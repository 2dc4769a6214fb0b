"""How long does opening a cleanly closed store take, and does that grow with what is stored?

Two stores of 200 segments each, one with eight times the messages of the other, so that only messages differ.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import engine
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

OPEN = Question(
    "open",
    "open a cleanly closed store of 200 segments",
    engine.OPEN,
    (engine.OPEN_FEWER,),
    messages={128: 400_000, 1024: 100_000},
    unit="openings",
    limit_seconds=0.100,
)
QUESTIONS = (OPEN,)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", OPEN.sides, ids=lambda side: side.name)
def test_open(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, OPEN, side, body_bytes)
