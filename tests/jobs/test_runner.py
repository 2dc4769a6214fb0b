"""Tasks run here and in a pool of processes: the same results, the same errors, and an end when somebody ends it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqstore.errors import ConfigError, CorruptStoreError, MQStoreError, OffsetOutOfRangeError, StoreIOError
from mqstore.jobs.plan import StoreName
from mqstore.jobs.runner import Runner
from tests.tools.support import environment
from tests.waiting import until

NAMES = [StoreName(str(number), f"/stores/{number}") for number in range(3)]


def double(number: int) -> int:
    return 2 * number


def fail(kind: str, name: StoreName) -> str:
    if name == NAMES[1]:
        errors: dict[str, Exception] = {
            "range": OffsetOutOfRangeError("gone", 3, 9),
            "named": OffsetOutOfRangeError("/stores/1: gone", 3, 9),
            "corrupt": CorruptStoreError("bad", "commitlog/0", 7),
            "os": FileNotFoundError(2, "No such file", "x"),
            "io": StoreIOError(5, "broken", "y", "read"),
            "bug": ZeroDivisionError("ours"),
        }
        raise errors[kind]
    return name.id


def process_of(_: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def warn(number: int) -> None:
    logging.getLogger("mqstore").warning("task %d", number)


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(jobs: int, tasks: list[Any], function: Any, progress: Any = None) -> list[Any]:
    with Runner(jobs, progress=progress) as runner:
        return runner.run(tasks, function)


@pytest.fixture(scope="module", params=[1, 2])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """One pool for all that a run leaves as it was."""
    with Runner(request.param) as runner:
        yield runner


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_tasks_and_progress_is_told(jobs: int) -> None:
    told: list[tuple[int, int]] = []

    assert run(jobs, [3, 1, 2], double, lambda done, total: told.append((done, total))) == [6, 2, 4]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert run(jobs, [], double) == []


@pytest.mark.parametrize(
    ("kind", "expected", "text", "attributes"),
    [
        ("range", OffsetOutOfRangeError, "/stores/1: gone", {"min_offset": 3, "max_offset": 9}),
        ("named", OffsetOutOfRangeError, "/stores/1: gone", {}),
        ("corrupt", CorruptStoreError, "/stores/1: bad", {"position": 7}),
        ("os", FileNotFoundError, "[Errno 2] No such file: 'x'", {"errno": 2, "filename": "x"}),
        ("io", StoreIOError, "read failed on y: broken", {"operation": "read", "errno": 5}),
        ("bug", ZeroDivisionError, "ours", {}),
    ],
)
def test_an_error_of_a_task_is_raised_with_its_store(
    runner: Runner, kind: str, expected: type[Exception], text: str, attributes: dict[str, Any]
) -> None:
    with pytest.raises(expected) as caught:
        runner.run(NAMES, partial(fail, kind))

    assert str(caught.value) == text
    assert "/stores/1" in " ".join([text, *getattr(caught.value, "__notes__", [])])
    assert {name: getattr(caught.value, name) for name in attributes} == attributes


def test_a_pool_works_in_processes_of_its_own_and_serves_several_runs() -> None:
    with Runner(2) as runner:
        first = {*runner.run([*range(6)], process_of)}
        second = {*runner.run([*range(6)], process_of)}

    assert len(first | second) <= 2
    assert os.getpid() not in first | second


def test_what_tasks_log_reaches_the_loggers_of_this_process(runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    runner.run([1, 2, 3], warn)

    assert sorted(record.getMessage() for record in caplog.records) == ["task 1", "task 2", "task 3"]


def test_one_task_needs_no_pool() -> None:
    assert run(2, [0], process_of) == [os.getpid()]


def test_a_worker_that_is_killed_is_told() -> None:
    with pytest.raises(MQStoreError, match=r"a worker process ended before its task did.*give fewer jobs"):
        run(2, [1, 2, 3], killed)


class Connect:
    """A session of Spark Connect."""

    @property
    def sparkContext(self) -> Any:  # noqa: N802
        raise AttributeError("not here")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"jobs": 0}, "jobs=0 is not a number of processes"),
        ({"jobs": True}, "jobs=True is not a number of processes"),
        ({"jobs": 2, "spark": object()}, "jobs and spark both say where tasks run"),
        ({"spark": Connect()}, "Spark Connect"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Runner(**arguments)


_SCRIPT = """
import json, os, sys, time
from mqstore.jobs.runner import Runner

def wait(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(600)

if __name__ == "__main__":
    with Runner(2) as runner:
        runner.run([sys.argv[1]] * 2, wait)
"""


def test_ctrl_c_ends_all_processes_at_once_and_quietly(tmp_path: Path) -> None:
    """The terminal sends it to all of them. Each worker printed a traceback of its own."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    folder = tmp_path / "workers"
    folder.mkdir()
    main = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(folder)],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until(lambda: len([*folder.iterdir()]) == 2)
        os.killpg(main.pid, signal.SIGINT)
        _, said = main.communicate(timeout=60)
    finally:
        main.kill()

    assert said.count("Traceback") == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt")
    for worker in folder.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(worker.name), 0)
