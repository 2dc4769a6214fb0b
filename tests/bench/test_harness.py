"""How the sides of a question take turns, with a clock that only the sides move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.goals import Answer
from bench.harness import RECORDED, Ask, Load, Side, Work, needs_modules, of_both


class Machine:
    """Sides that take a given time, a log of their work, and a benchmark that times them."""

    disabled = False

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, int]] = []
        self.extra_info: dict[str, Any] = {}
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))

    def side(
        self, name: str, *seconds: float, share: float = 1.0, missing: Callable[[], str | None] = lambda: None
    ) -> Side:
        """A side that takes these seconds for a message, round by round; the first are those of the warm-up."""
        turns = iter(seconds)

        @contextmanager
        def prepare(directory: Path, load: Load) -> Iterator[Work]:
            self.now += 100  # preparing does not count
            each = next(turns)

            def work() -> int:
                count = len(load.bodies(share))
                self.log.append((name, count))
                self.now += each * count
                return count

            yield work
            self.now += 100

        return Side(name, prepare, missing)

    def pedantic(self, target: Any, setup: Any, teardown: Any = None, rounds: int = 1) -> None:
        """Do what the fixture of pytest-benchmark documents."""
        for _ in range(rounds):
            args, _ = setup()
            begin = self.now
            target(*args)
            self.stats.stats.data.append(self.now - begin)
            if teardown is not None:
                teardown(*args)

    def ask(self, ours: Side, *beside: Side, rounds: int = 1, share: float = 1.0, **options: Any) -> list[Answer]:
        goals = options.pop("goals", [None] * len(beside))
        asked = Ask(self, "put", rounds, share, lambda: self.now)
        asked(ours, Load(128, 1000), dict(zip(beside, goals, strict=True)), **options)
        assert [Answer(**each) for each in self.extra_info["answers"]] == asked.answers
        return asked.answers


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("MQSTORE_BENCH_DIR", str(tmp_path))
    return Machine()


@pytest.mark.parametrize(("by", "value"), [("rate", 4.0), ("time", 0.25)])
def test_ratio_is_of_rates_or_of_times(machine: Machine, by: str, value: float) -> None:
    """The peer does a tenth of the work in twice the time a message."""
    [answer] = machine.ask(machine.side("ours", 1, 0.5), machine.side("peer", 1, 2, share=0.1), by=by)

    assert (answer.beside, answer.unit, answer.value) == ("peer", f"x {by}", pytest.approx(value))


def test_ratio_is_taken_within_its_round(machine: Machine) -> None:
    ours, peer = machine.side("ours", 1, 1, 2, 3), machine.side("peer", 1, 2, 4, 3)

    [answer] = machine.ask(ours, peer, rounds=3)

    assert answer.values == pytest.approx([2, 2, 1])


def test_sides_take_turns_and_each_round_begins_with_another(machine: Machine) -> None:
    machine.ask(*(machine.side(name, 1, 1, 1, 1) for name in ("ours", "one", "two")), rounds=3)

    names = [name for name, _ in machine.log]
    assert [names[at : at + 3] for at in (3, 6, 9)] == [
        ["ours", "one", "two"],
        ["one", "two", "ours"],
        ["two", "ours", "one"],
    ]


def test_missing_side_is_left_out_with_the_reason(machine: Machine) -> None:
    there, absent = machine.side("there", 1, 1), machine.side("absent", missing=lambda: "no such server")

    answers = machine.ask(machine.side("ours", 1, 1), absent, there, goals=[2, None])

    assert [(each.beside, each.value, each.met) for each in answers] == [("absent", None, None), ("there", 1, None)]
    assert answers[0].note == "left out: no such server"


@pytest.mark.parametrize(
    ("unit", "seconds", "goal", "value", "met"),
    [("ms", 0.02, 30, 20, True), ("ms", 0.02, 10, 20, False), ("k/s", 0.0001, 5, 10, True)],
)
def test_limit_is_an_answer_that_stands_alone(
    machine: Machine, unit: str, seconds: float, goal: float, value: float, met: bool
) -> None:
    [answer] = machine.ask(machine.side("ours", 1, seconds), limit=(goal, unit))

    assert (answer.beside, answer.unit, answer.value, answer.met) == ("", unit, pytest.approx(value), met)


@pytest.mark.parametrize(("share", "rounds"), [(1, [100, 1000]), (0.1, [10, 100]), (0.01, [10]), (0.0001, [1])])
def test_share_of_the_messages_is_at_least_one(machine: Machine, share: float, rounds: list[int]) -> None:
    """A share so small that its figures mean nothing has no warm-up."""
    machine.ask(machine.side("ours", 1, 1), share=share, limit=(1, "ms"))

    assert machine.log == [("ours", messages) for messages in rounds]


def test_directories_of_sides_are_removed(machine: Machine, tmp_path: Path) -> None:
    machine.ask(machine.side("ours", 1, 1), machine.side("peer", 1, 1))

    assert list(tmp_path.iterdir()) == []


def test_percentiles_are_medians_over_the_rounds(machine: Machine) -> None:
    asked = Ask(machine, "load", 3)

    asked.latencies([[float(factor * n) for n in range(1, 2000)] for factor in (3, 1, 2)], 99, 1000)

    assert asked.answers[0].note == "50 % 2000, 90 % 3600, 99 % 3960, 99.9 % 3996, max 5997"
    assert (asked.answers[0].values, asked.answers[0].met) == ([5940, 1980, 3960], False)


def test_recorded_timer_advances_by_what_was_measured() -> None:
    begin = RECORDED()
    RECORDED.advance(0.25)

    assert RECORDED() - begin == 0.25


def test_question_is_asked_for_both_sizes_of_bodies(machine: Machine) -> None:
    rows = of_both("put", machine.side("ours"), (30, 20), {})

    loads = {name: (load.body_bytes, load.messages) for name, (_, load, *_) in rows.items()}
    assert loads == {"put[128]": (128, 30), "put[1024]": (1024, 20)}


def test_missing_modules_are_named() -> None:
    assert needs_modules("json")() is None
    assert (needs_modules("json", "no_such_module")() or "").startswith("no_such_module not installed")
