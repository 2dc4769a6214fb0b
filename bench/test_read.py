"""How many messages a second come out of one queue that is in the page cache, as objects and as columns?

Checksums are verified, as is the default; LMDB keeps none.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import engine, peers
from bench.harness import BODY_SIZES, Question, Side, under_benchmark

READ_MESSAGES = Question(
    "read_messages",
    "read a queue from end to end as messages, taking each body",
    engine.READ_MESSAGES,
    (peers.LMDB_CURSOR,),
    messages={128: 400_000, 1024: 100_000},
)
QUESTIONS = (READ_MESSAGES,)


@pytest.mark.parametrize("body_bytes", BODY_SIZES)
@pytest.mark.parametrize("side", READ_MESSAGES.sides, ids=lambda side: side.name)
def test_read(benchmark: Any, side: Side, body_bytes: int) -> None:
    under_benchmark(benchmark, READ_MESSAGES, side, body_bytes)
