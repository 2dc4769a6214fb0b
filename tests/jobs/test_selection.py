"""What jobs have in common: what is selected, planned, run, and given back. Without pyspark."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mqstore as library
import mqstore.jobs
import mqstore.spark
from mqstore.errors import ConfigError
from mqstore.jobs import export_parquet, lag_report, select, traffic_report, verify
from mqstore.jobs.options.selection import Shaped
from mqstore.jobs.runner import pack
from mqstore.spark.queries import columns_of
from tests.columnar.support import many, write_store

T0 = 1_700_000_000_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 messages in each of two queues of `t` and of `orders`, a millisecond apart, and one of `seed`."""
    return write_store(tmp_path_factory.mktemp("jobs") / "s", many(80))


def bounds(tasks: list[list[Any]]) -> dict[tuple[str, int], tuple[int, int]]:
    return {(piece.topic, piece.queue_id): (piece.start, piece.stop) for task in tasks for piece in task}


# -- selections --------------------------------------------------------------------------------------------------------


def test_a_selection_is_bounded_by_times_exactly(store: Path) -> None:
    start = datetime.fromtimestamp(T0 / 1000, UTC) + timedelta(milliseconds=40)
    tasks = select(store, topics=["t"], start=start, stop=start + timedelta(milliseconds=8)).queue_tasks()
    found = []
    with library.open(store, "r") as opened:
        for (topic, queue_id), (low, high) in bounds(tasks).items():
            found += [m.store_timestamp_ms for m in opened.iter(topic, queue_id, start=low, stop=high)]

    # `t` has every second message.
    assert sorted(found) == [T0 + 40, T0 + 42, T0 + 44, T0 + 46]


def test_bounds_that_leave_nothing_give_no_task(store: Path) -> None:
    assert select(store, start=datetime(2100, 1, 1, tzinfo=UTC)).queue_tasks() == []
    assert select(store, topics="t", start=str(T0 + 7), stop=str(T0 + 7)).queue_tasks() == []


def test_a_selection_passes_through_and_then_says_it_all(store: Path) -> None:
    chosen = select(store, topics="t")

    assert select(chosen) is chosen
    with pytest.raises(ConfigError, match="pass topics, bounds and options to `select`"):
        select(chosen, topics="orders")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"topics": "t", "options": {"Subscribe": "t"}}, "option 'subscribe' is given twice"),
        ({"options": {"view": "queues"}}, "option view='queues': a job reads messages"),
        ({"options": {"nonsense": "1"}}, "no option 'nonsense'"),
        ({"options": {"maxOffsetsPerTrigger": "1"}}, "maxOffsetsPerTrigger is for spark.readStream"),
        ({"start": 5}, "start=5 is not a time; for queue offsets use the option startingOffsets"),
        ({"stop": True}, "stop=True is not a time; for queue offsets use the option endingOffsets"),
        ({"start": datetime(2026, 1, 31)}, "has no time zone; use an aware one"),
        ({"start": "yesterday"}, "option startingTimestamp='yesterday'"),
        ({"stop": "1", "options": {"endingTimestamp": "1"}}, "option 'endingTimestamp' is given twice"),
        ({"where": "level = "}, "option filter='level = '"),
    ],
)
def test_wrong_arguments_are_refused_before_a_store_is_opened(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        select("/nowhere", **arguments)


def test_store_without_queues_is_reported(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / "consumequeue")
    chosen = select(tmp_path / "s")

    for job in (lambda: export_parquet(chosen, tmp_path / "out"), lambda: traffic_report(chosen)):
        with pytest.raises(ConfigError, match=r"consume queues of .* are lost.*: `mqstore recover` rebuilds"):
            job()
    assert not (tmp_path / "out").exists()


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner(Shaped):
    name: str
    share: float | None


@dataclass(frozen=True)
class Outer(Shaped):
    rows: tuple[Inner, ...]
    ends: dict[int, Any]


def test_a_result_is_plain_values() -> None:
    found = Outer((Inner("a", None), Inner("b", 0.5)), {3: {"x": (1, 2)}}).to_dict()

    assert found == {"rows": [{"name": "a", "share": None}, {"name": "b", "share": 0.5}], "ends": {"3": {"x": [1, 2]}}}
    assert json.loads(json.dumps(found)) == found
    with pytest.raises(TypeError, match="int64"):
        Inner("a", np.int64(1)).to_dict()  # type: ignore[arg-type]


# -- what queries name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("select topic, count(*) from messages group by topic", ("topic",)),
        ("SELECT Body FROM messages WHERE Tags='a'", ("body", "tags")),
        ("with x as (select size from messages) select sum(size) from x", ("size",)),
        ("select count( * ) from messages", ("queue_offset",)),
        ("select `queue_id` from messages", ("queue_id",)),
        ("select * from messages", None),
        ("select m.* from messages m", None),
        ("select size * 2 from messages", None),
        ("from messages", None),
        ("table messages", None),
        ("select 1 from (from messages) x", None),
        ("select topic from messages |> where size > 1", None),
        ("select a.topic from messages a natural join messages b", None),
        ("describe messages", None),
        ("select topic -- and body\n, keys from messages", None),
    ],
)
def test_columns_that_a_query_does_not_name_are_left_out(query: str, expected: tuple[str, ...] | None) -> None:
    assert columns_of(query) == expected


# -- the package -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", [mqstore.jobs, mqstore.spark])
def test_functions_are_names_of_the_package(package: Any) -> None:
    if package is mqstore.spark:
        pytest.importorskip("pyspark")
    assert all(callable(getattr(package, name)) for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_the_package_imports_from_the_archive_that_executors_get(tmp_path: Path) -> None:
    archive = pack(str(tmp_path / "mqstore.zip"))
    code = "import mqstore.jobs.traffic, pyspark_mqstore, sys; print(mqstore.__file__)"
    environment = {**os.environ, "PYTHONPATH": archive}

    run_ = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)

    assert run_.returncode == 0, run_.stderr
    assert run_.stdout.startswith(archive)


def test_without_pyspark_a_session_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from mqstore.spark import sessions

    monkeypatch.setitem(sys.modules, "pyspark.sql", None)  # type: ignore[arg-type]
    monkeypatch.setattr(sessions, "find_java", lambda: None)

    with pytest.raises(sessions.SparkMissingError) as caught:
        sessions.session()
    assert "pip install 'mqstore[spark]'" in str(caught.value)
    assert sessions.NO_JAVA in str(caught.value)


def test_empty_set_is_reported(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mqstore-set.json").write_text('{"version": 1, "stores": {}}')

    with pytest.raises(ConfigError, match=r"/set'\]: this store set has no stores"):
        select(tmp_path / "set").stores()
    for job in (lag_report, verify):
        with pytest.raises(ConfigError, match=r"/set'\]: this store set has no stores"):
            job(tmp_path / "set")
