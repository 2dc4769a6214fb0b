"""Questions, and the way their sides are timed.

A *side* is somebody who can do the work: mqstore, or a peer. It is a context manager over (directory, load) that
prepares everything unmeasured and yields the function to be timed; that function is called once and returns the amount
of work it did (messages, bytes, calls), so that slow sides may do less of it. A *question* puts our side beside others.

Each round times every side once, one right after the other, in an order that turns from round to round. A ratio is
taken within its round, since what the machine does meanwhile then weighs on both sides. The answer is the median over
the rounds, with the lowest and the highest.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from bench.results import Row

__all__ = ["BODY_SIZES", "SEED", "Load", "Question", "Sample", "Settings", "Side", "Work", "needs_modules", "scratch"]

SEED = 20_240_229
BODY_SIZES = (128, 1024)

_DISTINCT_BODIES = 1024
"""Bodies repeat after so many: random bytes are dear to make, and no side looks for repeats."""
_WARM_UP_MESSAGES = 1000
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Work = Callable[[], int]
"""The timed part; returns how much it did."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices for a run."""

    share: float = 1.0
    """Share of each question's messages, and of the seconds and queues of each latency."""
    rounds: int = 7
    body_sizes: Sequence[int] = BODY_SIZES
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A number of messages of one size; the same bytes in every run."""

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
    missing: Callable[[], str | None] = lambda: None
    """Returns why this side cannot run here, or None."""


def needs_modules(*names: str) -> Callable[[], str | None]:
    """A `Side.missing` for Python modules."""

    def missing() -> str | None:
        absent = [name for name in names if find_spec(name) is None]
        return f"{', '.join(absent)} not installed (the extra `bench` has it)" if absent else None

    return missing


class Sample(NamedTuple):
    """One timing of one side."""

    amount: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Our side beside others, each with the ratio that is wanted, or None if it is shown for comparison only."""

    name: str
    title: str
    group: str
    ours: Side
    peers: Mapping[Side, float | None]
    messages: Mapping[int, int]
    """Messages of a round by the size of their bodies in bytes."""
    ratio: Literal["x rate", "x time"] = "x rate"
    """Rates: the goal is the least ratio. Times: it is the greatest."""
    unit: Literal["messages", "bytes", "calls"] = "messages"
    clock: Literal["wall", "cpu"] = "wall"
    """CPU time of the whole process is steady on a busy machine. It fits where no thread waits for another."""
    limit: tuple[float, str] | None = None
    """An absolute goal for our side, and its unit: `k/s` or `ms`."""
    sync_first: bool = False
    """Write back everybody's dirty pages before each timing: for sides that wait for the disk."""

    def ask(self, settings: Settings) -> list[Row]:
        """Time all sides at each body size."""
        sizes = [size for size in self.messages if size in settings.body_sizes]
        return [row for size in sizes for row in self._rows(size, settings)]

    def _rows(self, body_bytes: int, settings: Settings) -> Iterator[Row]:
        load = Load(body_bytes, max(1, int(self.messages[body_bytes] * settings.share)))
        absent = {side: reason for side in self.peers if (reason := side.missing())}
        sides = [self.ours, *(side for side in self.peers if side not in absent)]
        samples = self._samples(sides, load, settings)
        ours = [sample.rate for sample in samples[self.ours]]
        if self.limit is not None:
            limit, unit = self.limit
            own = [1000 / rate if unit == "ms" else rate / 1000 for rate in ours]
            yield self._row(body_bytes, "", unit, own, limit)
        for side, goal in self.peers.items():
            if side in absent:
                yield self._row(body_bytes, side.name, self.ratio, [], goal, f"left out: {absent[side]}")
                continue
            theirs = [sample.rate for sample in samples[side]]
            figures = {"our_rate": statistics.median(ours), "their_rate": statistics.median(theirs)}
            said = " beside ".join(_rate_text(rate, self.unit) for rate in figures.values())
            pairs = zip(ours, theirs, strict=True)
            values = [our / their if self.ratio == "x rate" else their / our for our, their in pairs]
            yield self._row(body_bytes, side.name, self.ratio, values, goal, said, figures)

    def _row(
        self,
        body_bytes: int,
        beside: str,
        unit: str,
        values: Sequence[float],
        goal: float | None,
        said: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> Row:
        return Row(
            group=self.group,
            question=self.name,
            beside=beside,
            body_bytes=body_bytes,
            unit=unit,
            value=statistics.median(values) if values else None,
            low=min(values, default=None),
            high=max(values, default=None),
            goal=goal,
            said=said,
            figures=figures or {},
        )

    def _samples(self, sides: Sequence[Side], load: Load, settings: Settings) -> dict[Side, list[Sample]]:
        """Samples of each side, one a round. A small round that does not count goes before."""
        samples: dict[Side, list[Sample]] = {side: [] for side in sides}
        warm_up = Load(load.body_bytes, max(1, min(_WARM_UP_MESSAGES, load.messages // 10)))
        for side in sides:
            self._measure(side, warm_up, settings.directory)
        for number in range(settings.rounds):
            turn = number % len(sides)
            for side in [*sides[turn:], *sides[:turn]]:
                samples[side].append(self._measure(side, load, settings.directory))
        return samples

    def _measure(self, side: Side, load: Load, parent: Path | None) -> Sample:
        """Prepare `side` in a fresh directory, time its work once, tear down. The garbage collector rests meanwhile."""
        clock = _CLOCKS[self.clock]
        gc.collect()  # Not between preparation and work: a store's own threads would use the pause.
        gc.disable()
        try:
            with scratch(self.name, parent) as directory, side.prepare(directory, load) as work:
                if self.sync_first:
                    os.sync()
                begin = clock()
                amount = work()
                return Sample(amount, clock() - begin)
        finally:
            gc.enable()


def _rate_text(rate: float, unit: str) -> str:
    """A rate as people read it, of calls the time that one takes.

    >>> _rate_text(612_345.0, "messages"), _rate_text(2.5e9, "bytes"), _rate_text(80.0, "calls")
    ('612 k/s', '2.50 GB/s', '12.5 ms')
    """
    if unit == "calls":
        return f"{1000 / rate:.3g} ms"
    letter = "B" if unit == "bytes" else ""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= factor:
            digits = 2 if rate / factor < 10 else 1 if rate / factor < 100 else 0
            return f"{rate / factor:.{digits}f} {prefix}{letter}/s"
    return f"{rate:.0f} {letter}/s"


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
