"""How the sides of a question take turns.

A *side* is a participant that can do the work: mqstore, or a peer. It is a context manager over (directory, load) that
prepares everything unmeasured and yields the function to be timed. That function is called once and returns the amount
of work that it did (messages, bytes, calls), so slow sides may do less.

A question is a pytest-benchmark whose statistics are those of our side. Around each of its rounds every other side is
timed once, in an order that turns from round to round. A ratio is taken within its round, since other work on the
machine then affects both sides.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest

from bench.goals import Answer, number_text, rate_text

PERCENTILES = {"50 %": 50, "90 %": 90, "99 %": 99, "99.9 %": 99.9, "max": 100}
_SEED = 20_240_229
_DISTINCT_BODIES = 1024
"""Bodies repeat after this number: random bytes are slow to make, and no side looks for repeats."""
_WARM_UP_MESSAGES = 1000
QUICK_SHARE = 0.01
"""Share of the messages at which a run only shows that everything works: without warm-up, and without syncs before."""

Work = Callable[[], int]
"""The timed part. Returns the amount of work that it did."""


@dataclass(frozen=True, slots=True)
class Load:
    """A number of messages of one size; the same bytes in every run."""

    body_bytes: int
    messages: int
    topic: str = "bench"

    def bodies(self, share: float = 1.0) -> list[bytes]:
        """Return `messages * share` bodies, at least one. `share` is below 1 for sides that would take minutes."""
        source = random.Random(_SEED + self.body_bytes)
        pool = [source.randbytes(self.body_bytes) for _ in range(min(_DISTINCT_BODIES, self.messages))]
        count = max(1, int(self.messages * share))
        return (pool * (count // len(pool) + 1))[:count]

    @property
    def record_bytes(self) -> int:
        """Length of one such message in the commit log: V1, both hosts IPv4, no properties."""
        return 91 + self.body_bytes + len(self.topic)


@dataclass(frozen=True, slots=True)
class Side:
    """A participant that can do the work. `prepare(directory, load)` yields the function to be timed."""

    name: str
    prepare: Callable[[Path, Load], AbstractContextManager[Work]]
    missing: Callable[[], str | None] = lambda: None
    """Returns why this side cannot run here, or None."""


def ready(name: str, call: Callable[[], object], missing: Callable[[], str | None] = lambda: None) -> Side:
    """Return a side that needs no preparation, and does one call."""

    @contextmanager
    def prepare(directory: Path, load: Load) -> Iterator[Work]:
        yield lambda: (call(), 1)[1]

    return Side(name, prepare, missing)


def side(name: str, prepare: Callable[..., AbstractContextManager[Work]], **options: Any) -> Side:
    """Return a side that is prepared with these options."""
    return Side(name, partial(prepare, **options))


CPU: Final[Mapping[str, Any]] = {"cpu": True, "by": "time"}
"""How to ask about the CPU time of the process. It is steady on a busy machine, and fits where no thread waits."""
Row = tuple[Any, ...]
"""Question in a table: the first arguments of `Ask`, and perhaps a dict with others. "cpu": measure CPU time."""


def of_both(name: str, ours: Side, messages: Sequence[int], beside: Any, **how: Any) -> dict[str, Row]:
    """Return the question for bodies of 128 B and of 1 KiB. `messages` are their numbers."""
    loads = zip((128, 1024), messages, strict=True)
    return {f"{name}[{body}]": (ours, Load(body, count), beside, how) for body, count in loads}


def asked(table: Mapping[str, Row]) -> Callable[..., None]:
    """Return a test that asks each question of a table, by its name."""
    timer = pytest.mark.benchmark(timer=time.process_time)
    names = [pytest.param(name, id=name, marks=[timer] * ("cpu" in row[-1])) for name, row in table.items()]

    @pytest.mark.parametrize("question", names)
    def test(ask: Ask, question: str) -> None:
        ours, load, beside, *how = table[question]
        ask(ours, load, beside, **{name: value for each in how for name, value in each.items() if name != "cpu"})

    return test


def each(items: Sequence[Any], call: Callable[[Any], object]) -> Work:
    """Return a timed part that calls with each item."""

    def work() -> int:
        for item in items:
            call(item)
        return len(items)

    return work


def needs_modules(*names: str) -> Callable[[], str | None]:
    """Return a `Side.missing` for Python modules."""

    def missing() -> str | None:
        absent = [name for name in names if find_spec(name) is None]
        return f"{', '.join(absent)} not installed (the extra `bench` has it)" if absent else None

    return missing


class Recorded:
    """A timer of benchmarks whose rounds were measured before: it advances by what each of them took."""

    __name__ = "recorded"
    _now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


RECORDED = Recorded()


@dataclass(slots=True)
class Ask:
    """Asks one question, and keeps its answers."""

    benchmark: Any
    """Fixture of pytest-benchmark."""
    name: str
    rounds: int
    share: float = 1.0
    timer: Callable[[], float] = time.perf_counter
    answers: list[Answer] = field(default_factory=list)

    def __call__(
        self,
        ours: Side,
        load: Load,
        beside: Mapping[Side, float | None],
        *,
        by: Literal["rate", "time"] = "rate",
        unit: Literal["messages", "bytes", "calls"] = "messages",
        limit: tuple[float, str] | None = None,
        sync_first: bool = False,
    ) -> None:
        """Time `ours` and the sides `beside`, each with the goal of its ratio or None.

        A goal is the least ratio of rates, or the greatest ratio of times. `limit` is an absolute goal for our side and
        its unit, "k/s" or "ms". `sync_first` writes back all dirty pages before each timing, for sides that wait for
        the disk.
        """
        load = replace(load, messages=self.scaled(load.messages))
        absent = {side: reason for side in beside if (reason := side.missing())}
        sides = [ours, *(side for side in beside if side not in absent)]
        rates: dict[Side, list[float]] = {side: [] for side in sides}
        amounts: list[int] = []
        later: list[Side] = []

        def measure(side: Side, load: Load) -> float:
            with self._prepared(side, load, sync_first) as work:
                begin = self.timer()
                amount = work()
                return amount / (self.timer() - begin or 1e-9)

        def setup() -> tuple[tuple[Work], dict[str, Any]]:
            turn = len(amounts) % len(sides)
            order = [*sides[turn:], *sides[:turn]]
            place = order.index(ours)
            later[:] = order[place + 1 :]
            for side in order[:place]:
                rates[side].append(measure(side, load))
            return (stack.enter_context(self._prepared(ours, load, sync_first)),), {}

        def teardown(_: Work) -> None:
            stack.close()
            for side in later:
                rates[side].append(measure(side, load))

        for side in sides if self.share > QUICK_SHARE else ():  # a small round that does not count
            measure(side, replace(load, messages=max(1, min(_WARM_UP_MESSAGES, load.messages // 10))))
        with ExitStack() as stack:
            work = lambda prepared: amounts.append(prepared())  # noqa: E731
            self.benchmark.pedantic(work, setup=setup, teardown=teardown, rounds=self.rounds)
        if self.benchmark.disabled:
            return
        timed = zip(amounts, self.benchmark.stats.stats.data, strict=True)
        rates[ours] = [amount / seconds for amount, seconds in timed]
        texts = {side: rate_text(statistics.median(each), unit) for side, each in rates.items()}
        if limit is not None:
            values = [1000 / rate if limit[1] == "ms" else rate / 1000 for rate in rates[ours]]
            self.answer("", limit[1], values, limit[0], texts[ours])
        for side, goal in beside.items():
            if side in absent:
                self.answer(side.name, f"x {by}", [], goal, f"left out: {absent[side]}")
                continue
            pairs = zip(rates[ours], rates[side], strict=True)
            values = [our / their if by == "rate" else their / our for our, their in pairs]
            self.answer(side.name, f"x {by}", values, goal, f"{texts[ours]} beside {texts[side]}")

    def latencies(self, rounds: Sequence[Sequence[float]], judged: float, goal: float | None, note: str = "") -> None:
        """Answer with a percentile of the latencies in ms. They become the rounds of the benchmark (`RECORDED`)."""
        every = iter([latency / 1000 for each in rounds for latency in each])
        count = sum(map(len, rounds))
        self.benchmark.pedantic(RECORDED.advance, setup=lambda: ((next(every),), {}), rounds=count)
        by_round = [np.percentile(each, [*PERCENTILES.values()], method="inverted_cdf").tolist() for each in rounds]
        found = {name: statistics.median(each) for name, *each in zip(PERCENTILES, *by_round, strict=True)}
        found["max"] = max(each[-1] for each in by_round)
        said = ", ".join(f"{name} {number_text(value)}" for name, value in found.items())
        place = [*PERCENTILES.values()].index(judged)
        self.answer("", "ms", [each[place] for each in by_round], goal, "; ".join(filter(None, (said, note))))

    def answer(self, beside: str, unit: str, values: Any, goal: float | None = None, note: str = "") -> None:
        """Add an answer."""
        self.answers.append(Answer(self.name, beside, unit, values, goal, note))
        self.benchmark.extra_info["answers"] = [asdict(each) for each in self.answers]

    def scaled(self, count: int) -> int:
        """Return the share of a number of messages, at least one."""
        return max(1, int(count * self.share))

    @contextmanager
    def _prepared(self, side: Side, load: Load, sync_first: bool) -> Iterator[Work]:
        """Prepare `side` in a new directory. The garbage collector rests until it is closed."""
        gc.collect()  # not between preparation and work: a store's own threads would use the pause
        gc.disable()
        try:
            with scratch() as directory, side.prepare(directory, load) as work:
                if sync_first and self.share > QUICK_SHARE:
                    os.sync()
                yield work
        finally:
            gc.enable()


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty directory below $MQSTORE_BENCH_DIR or ./var/bench, and remove it afterwards.
    It should be on a real disk: /tmp is memory on many systems, where a sync costs nothing.
    """
    root = Path(os.environ.get("MQSTORE_BENCH_DIR") or Path("var", "bench")).absolute()
    root.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=root))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
