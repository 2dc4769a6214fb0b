"""Does dispatch keep well ahead of puts: how fast are consume queues rebuilt from the commit log?"""

from __future__ import annotations

from typing import Any

import pytest

from bench import engine
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

REPUT = Question(
    "reput",
    "build consume queues from the commit log",
    engine.REPUT,
    (engine.PUT,),
    messages={128: 400_000, 1024: 100_000},
)
QUESTIONS = (REPUT,)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", REPUT.sides, ids=lambda side: side.name)
def test_reput(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, REPUT, side, body_bytes)
