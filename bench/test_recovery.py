"""How long does opening take after a crash when every byte of the log must be verified?"""

from __future__ import annotations

from typing import Any

import pytest

from bench import engine
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

RECOVERY = Question(
    "recovery",
    "open after a crash, the whole log scanned and verified",
    engine.RECOVERY,
    (engine.CRC32C_SWEEP, engine.CRC32C_RECORDS),
    messages={128: 400_000, 1024: 100_000},
    unit="bytes",
)
QUESTIONS = (RECOVERY,)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", RECOVERY.sides, ids=lambda side: side.name)
def test_recovery(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, RECOVERY, side, body_bytes)
