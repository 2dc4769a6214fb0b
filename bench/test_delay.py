"""How fast does a backlog of delayed messages drain that is due all at once, beside putting as many messages?"""

from __future__ import annotations

from typing import Any

import pytest

from bench import delivery
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

DELAY = Question(
    "delay",
    "deliver messages that are due, from a delay level to their queue",
    delivery.DELAYED,
    (delivery.PUT, delivery.PUT_AND_DISPATCH),
    messages={128: 200_000, 1024: 100_000},
)
QUESTIONS = (DELAY,)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", DELAY.sides, ids=lambda side: side.name)
def test_delay(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, DELAY, side, body_bytes)
