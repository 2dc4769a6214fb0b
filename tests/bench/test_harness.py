"""How sides are timed, with a clock that only the sides move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import harness
from bench.harness import Load, Question, Settings, Side, Work, needs_modules
from bench.results import Row


class Machine:
    """Sides that take a given time, and a log of their work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[tuple[str, int]] = []
        monkeypatch.setitem(harness._CLOCKS, "wall", lambda: self.now)
        monkeypatch.setitem(harness._CLOCKS, "cpu", lambda: self.now / 10)

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


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def _ask(tmp_path: Path, rounds: int = 1, share: float = 1.0, **given: object) -> list[Row]:
    said: dict[str, object] = {"name": "put", "title": "put", "group": "engine", "messages": {128: 1000}}
    return Question(**{**said, **given}).ask(Settings(share, rounds, directory=tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize(("ratio", "value", "met"), [("x rate", 4.0, True), ("x time", 0.25, True)])
def test_a_ratio_is_of_rates_or_of_times(tmp_path: Path, machine: Machine, ratio: str, value: float, met: bool) -> None:
    ours, peer = machine.side("ours", 1, 0.5), machine.side("peer", 1, 2, share=0.1)

    [row] = _ask(tmp_path, ours=ours, peers={peer: 1}, ratio=ratio)

    assert (row.value, row.met, row.unit) == (pytest.approx(value), met, ratio)
    assert row.figures == {"our_rate": pytest.approx(2), "their_rate": pytest.approx(0.5)}


def test_the_answer_is_the_median_of_ratios_within_rounds(tmp_path: Path, machine: Machine) -> None:
    ours, peer = machine.side("ours", 1, 1, 4, 2), machine.side("peer", 1, 2, 4, 6)

    [row] = _ask(tmp_path, rounds=3, ours=ours, peers={peer: None})

    assert [row.value, row.low, row.high] == pytest.approx([2, 1, 3])


def test_sides_take_turns_and_each_round_begins_with_another(tmp_path: Path, machine: Machine) -> None:
    ours, one, two = (machine.side(name, 1, 1, 1, 1) for name in ("ours", "one", "two"))

    _ask(tmp_path, rounds=3, ours=ours, peers={one: None, two: None})

    names = [name for name, _ in machine.log]
    assert [names[at : at + 3] for at in (3, 6, 9)] == [
        ["ours", "one", "two"],
        ["one", "two", "ours"],
        ["two", "ours", "one"],
    ]


def test_a_side_that_is_missing_is_left_out_with_the_reason(tmp_path: Path, machine: Machine) -> None:
    there, absent = machine.side("there", 1, 1), machine.side("absent", missing=lambda: "no such server")

    rows = _ask(tmp_path, ours=machine.side("ours", 1, 1), peers={absent: 2, there: None})

    assert [(row.beside, row.value, row.met) for row in rows] == [("absent", None, None), ("there", 1, None)]
    assert rows[0].said == "left out: no such server"


@pytest.mark.parametrize(
    ("unit", "seconds", "goal", "value", "met"),
    [
        ("ms", 0.02, 30, 20, True),
        ("ms", 0.02, 10, 20, False),
        ("k/s", 0.0001, 5, 10, True),
        ("k/s", 0.0001, 20, 10, False),
    ],
)
def test_a_limit_is_a_row_that_stands_alone(
    tmp_path: Path, machine: Machine, unit: str, seconds: float, goal: float, value: float, met: bool
) -> None:
    [row] = _ask(tmp_path, ours=machine.side("ours", 1, seconds), peers={}, limit=(goal, unit))

    assert (row.beside, row.unit, row.value, row.met) == ("", unit, pytest.approx(value), met)


@pytest.mark.parametrize(("share", "messages"), [(1, 1000), (0.01, 10), (0.0001, 1)])
def test_a_share_of_the_messages_is_one_at_least(tmp_path: Path, machine: Machine, share: float, messages: int) -> None:
    _ask(tmp_path, share=share, ours=machine.side("ours", 1, 1), peers={})

    assert machine.log[-1] == ("ours", messages)


def test_cpu_time_is_another_clock(tmp_path: Path, machine: Machine) -> None:
    [row] = _ask(tmp_path, ours=machine.side("ours", 1, 1), peers={}, clock="cpu", limit=(1, "ms"))

    assert row.value == pytest.approx(100)


def test_only_the_chosen_body_sizes_are_asked(tmp_path: Path, machine: Machine) -> None:
    sizes = {128: 10, 1024: 10}
    question = Question(
        name="put", title="", group="", ours=machine.side("ours", *[1] * 4), peers={}, messages=sizes, limit=(1, "ms")
    )

    assert [row.body_bytes for row in question.ask(Settings(1, 1, (1024,), tmp_path))] == [1024]
    assert list(tmp_path.iterdir()) == []


def test_modules_that_are_not_installed_are_named() -> None:
    assert needs_modules("json")() is None
    assert (needs_modules("json", "no_such_module")() or "").startswith("no_such_module not installed")
