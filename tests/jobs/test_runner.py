"""Tasks in this process: results, progress and errors. `test_spark.py` has those of a session."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from mqstore.errors import ConfigError, CorruptStoreError, OffsetOutOfRangeError, StoreIOError
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.runner import Runner

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


def test_results_have_the_order_of_tasks_and_progress_is_reported() -> None:
    told: list[tuple[int, int]] = []
    runner = Runner(progress=lambda done, total: told.append((done, total)))

    assert runner.run([3, 1, 2], double) == [6, 2, 4]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert runner.run([], double) == []


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
    kind: str, expected: type[Exception], text: str, attributes: dict[str, Any]
) -> None:
    with pytest.raises(expected) as caught:
        Runner().run(NAMES, partial(fail, kind))

    assert str(caught.value) == text
    assert "/stores/1" in " ".join([text, *getattr(caught.value, "__notes__", [])])
    assert {name: getattr(caught.value, name) for name in attributes} == attributes


class Connect:
    """A session of Spark Connect."""

    @property
    def sparkContext(self) -> Any:  # noqa: N802
        raise AttributeError("not here")


def test_a_session_of_spark_connect_is_refused() -> None:
    with pytest.raises(ConfigError, match="Spark Connect"):
        Runner(spark=Connect())
