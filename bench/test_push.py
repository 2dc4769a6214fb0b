"""How many messages a second reach the handler of a push consumer?

It finds a backlog in one queue, and its handler looks at the body and does nothing with it. A plain read of the same
messages shows what pulling, caching, calling and committing add.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import delivery
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

PUSH = Question(
    "push",
    "hand messages to a handler that does nothing",
    delivery.PUSH,
    (delivery.READ, delivery.PUSH_ORDERED),
    messages={128: 200_000, 1024: 100_000},
)
QUESTIONS = (PUSH,)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", PUSH.sides, ids=lambda side: side.name)
def test_push(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, PUSH, side, body_bytes)
