"""Options of the questions, the table at the end of a run, and what is saved with it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

from bench.goals import Answer, as_lines, summary
from bench.harness import QUICK_SHARE, Ask

_PACKAGES = {"mqstore", "numpy", "crc32c", "lmdb", "queuelib", "persist-queue", "litequeue", "diskcache", "redis"}
_PACKAGES |= {"pyspark", "pyarrow"}
_ANSWERS = pytest.StashKey[list[Answer]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mqstore", "questions of mqstore")
    group.addoption("--quick", action="store_true", help=f"--share {QUICK_SHARE} and one round: does everything run?")
    group.addoption("--share", type=float, help="share of the messages, queues and seconds (default: 1)")


def _share(config: pytest.Config) -> float:
    return float(config.getoption("--share") or (QUICK_SHARE if config.getoption("--quick") else 1))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ANSWERS] = []
    if config.getoption("--quick"):
        config.option.benchmark_min_rounds = 1
    if _share(config) != 1:
        config.option.benchmark_autosave = None  # other runs could not be compared with it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ask" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(1800))
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # warnings of the peers


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> float:
    return _share(request.config)


@pytest.fixture
def ask(request: pytest.FixtureRequest, benchmark: Any, share: float) -> Iterator[Ask]:
    """Asks the question of this test, and keeps the answers for the table."""
    marker = request.node.get_closest_marker("benchmark")
    timer = marker.kwargs.get("timer", time.perf_counter) if marker else time.perf_counter
    name = request.node.callspec.id if "question" in request.fixturenames else request.node.name.removeprefix("test_")
    made = Ask(benchmark, name, request.config.getoption("benchmark_min_rounds"), share, timer)
    yield made
    request.config.stash[_ANSWERS].extend(made.answers)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    answers = config.stash[_ANSWERS]
    if not answers:
        return
    terminalreporter.section("answers beside their goals")
    for answer, line in zip([None, None, *answers], as_lines(answers), strict=True):
        met = None if answer is None else answer.met
        terminalreporter.write_line(line, green=met is True, red=met is False)
    terminalreporter.write_line(summary(answers))
    if _share(config) != 1:
        terminalreporter.write_line(f"Only {_share(config):g} of the messages: these figures say little.")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Keep what describes the machine, without its name and the clock of its processors at this time."""
    machine_info.pop("node", None)
    machine_info["cpu"] = {name: machine_info["cpu"].get(name) for name in ("arch", "brand_raw", "count")}


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    output_json["share"] = _share(config)
    output_json["rounds"] = config.getoption("benchmark_min_rounds")
    output_json["load"] = os.getloadavg()[0]
    installed = {each.name: each.version for each in metadata.distributions()}
    output_json["packages"] = {name: installed[name] for name in sorted(_PACKAGES & installed.keys())}
