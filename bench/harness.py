"""What a question is, and how one side of it is measured.

A *side* is somebody who can do the work: mqstore, or a peer. It is a context manager over (directory, load) that
prepares everything unmeasured and yields the function to be timed; that function is called once and returns the amount
of work it did (messages, bytes or openings), so that slow sides may do less of it. A *question* puts our side beside
others at one body size. Ratios are only ever taken between sides timed within the same round: what the machine does
meanwhile then weighs on both.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

__all__ = ["BODY_SIZES", "SEED", "Load", "Question", "Sample", "Side", "Work", "measure", "scratch", "under_benchmark"]

SEED = 20_240_229
BODY_SIZES = (128, 1024)

_DISTINCT_BODIES = 1024
"""Bodies repeat after so many: random bytes are dear to make, and no side looks for repeats."""

Work = Callable[[], int]
"""The timed part; returns how much it did."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many messages of one size; the same bytes in every run."""

    body_bytes: int
    messages: int
    topic: str = "bench"

    def bodies(self, share: float = 1.0) -> list[bytes]:
        """`messages * share` bodies, at least one; `share` is below 1 for sides that would take minutes."""
        source = random.Random(SEED + self.body_bytes)
        pool = [source.randbytes(self.body_bytes) for _ in range(min(_DISTINCT_BODIES, self.messages))]
        count = max(1, int(self.messages * share))
        return (pool * (count // len(pool) + 1))[:count]

    @property
    def record_bytes(self) -> int:
        """Length of one such message in the commit log: V1, both hosts IPv4, no properties."""
        return 91 + self.body_bytes + len(self.topic)


@dataclass(frozen=True, slots=True)
class Side:
    """Somebody who can do the work. `prepare(directory, load)` yields the function to be timed."""

    name: str
    prepare: Callable[[Path, Load], AbstractContextManager[Work]]


@dataclass(frozen=True, slots=True)
class Question:
    """Our side beside others. `messages` is the load per round by body size; `quick` divides it."""

    name: str
    title: str
    ours: Side
    peers: Sequence[Side]
    messages: dict[int, int]
    unit: Literal["messages", "bytes", "openings"] = "messages"
    quick: int = 10
    limit_seconds: float | None = None
    """An absolute time that our side is held to as well."""
    sync_first: bool = False
    """Write back everybody's dirty pages before each timing: for sides that wait for the disk."""
    sides: Sequence[Side] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sides", (self.ours, *self.peers))

    def load(self, body_bytes: int, *, quick: bool = False) -> Load:
        return Load(body_bytes, max(1, self.messages[body_bytes] // (self.quick if quick else 1)))


class Sample(NamedTuple):
    """One timing of one side."""

    amount: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


@contextmanager
def scratch(name: str, parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """An empty directory, removed afterwards.

    Below `parent`, $MQSTORE_BENCH_DIR or ./var/bench, on a real disk: /tmp is memory on many systems, and a sync that
    costs nothing would answer nothing.
    """
    root = Path(parent or os.environ.get("MQSTORE_BENCH_DIR") or Path("var", "bench")).absolute()
    root.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure(question: Question, side: Side, load: Load, *, parent: Path | None = None) -> Sample:
    """Prepare `side` in a fresh directory, time its work once, tear down. The garbage collector rests meanwhile."""
    with scratch(question.name, parent) as directory, side.prepare(directory, load) as work:
        if question.sync_first:
            os.sync()
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            begin = time.perf_counter()
            amount = work()
            return Sample(amount, time.perf_counter() - begin)
        finally:
            if collecting:
                gc.enable()


def under_benchmark(benchmark: Any, question: Question, side: Side, body_bytes: int, *, rounds: int = 5) -> None:
    """The same side under pytest-benchmark's fixture and stopwatch, at the quick load."""
    load = question.load(body_bytes, quick=True)
    benchmark.group = f"{question.name}, {body_bytes} B"
    benchmark.extra_info.update(question=question.name, side=side.name, body_bytes=body_bytes, messages=load.messages)
    with ExitStack() as round_stack:

        def setup() -> tuple[tuple[Work], dict[str, Any]]:
            round_stack.close()
            directory = round_stack.enter_context(scratch(question.name))
            return (round_stack.enter_context(side.prepare(directory, load)),), {}

        benchmark.pedantic(lambda work: work(), setup=setup, rounds=rounds)
