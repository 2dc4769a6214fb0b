"""Queries over views of stores, from Python and from the command; a session made by us."""

from __future__ import annotations

import base64
import json
import threading
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqstore.jobs import select
from mqstore.jobs.runner import pack, ship
from mqstore.jobs.views import VIEWS
from mqstore.spark import create_views, session, sql
from tests.jobs.twostores import T0, KeptSession, two_stores
from tests.tools.support import mqstore
from tests.waiting import until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return two_stores(tmp_path_factory.mktemp("stores"))


# -- SQL ---------------------------------------------------------------------------------------------------------------


def test_a_query_has_the_views_it_names(spark: Any, stores: dict[str, Path]) -> None:
    found = sql(spark, stores, "select topic, count(*) as n, sum(length(body)) as size from messages group by topic")
    rows = {row.topic: (row.n, row.size) for row in found.collect()}

    assert rows == {"orders": (60, 2 * sum(i * len(str(i)) for i in range(30)))}
    lags = sql(spark, stores, "select store, lag from groups where `group` = 'g' and topic = 'orders' and queue_id = 0")
    assert {row.store: row.lag for row in lags.collect()} == {"a": 10, "b": 10}
    [delays] = sql(spark, stores["a"], "select level, waiting from delay").collect()
    assert (delays.level, delays.waiting) == (2, 1)
    whole = sql(spark, stores["a"], "select * from messages")
    assert "properties" in whole.columns


def test_a_query_reads_only_the_columns_it_names(spark: Any, stores: dict[str, Path]) -> None:
    sql(spark, stores, "select count(*), max(keys) from messages where queue_id = 1").collect()

    assert spark.table("messages").columns == ["queue_id", "keys"]


def test_bounds_and_options_narrow_what_a_query_reads(spark: Any, stores: dict[str, Path]) -> None:
    def count(**arguments: Any) -> int:
        chosen = select(stores["a"], **arguments)
        return int(sql(spark, chosen, "select count(*) as n from messages").collect()[0].n)

    assert count(options={"startingOffsets": '{"orders":{"0":3}}', "endingOffsets": '{"orders":{"0":5,"1":5}}'}) == 7
    assert count(start=datetime.fromtimestamp(T0 / 1000 + 10, UTC)) == 20
    assert count(options={"tags": "a"}) == 15
    assert count(topics="orders", stop=datetime.fromtimestamp(T0 / 1000 + 10, UTC)) == 10


def test_options_that_choose_messages_narrow_messages_alone(spark: Any, stores: dict[str, Path]) -> None:
    chosen = select(stores["a"], topics="orders", where="n = '2'", options={"tags": "a", "STARTINGOFFSETS": "latest"})

    query = "select (select count(*) from messages) as few, (select sum(messages) from queues) as all"
    assert [*sql(spark, chosen, query).collect()[0]] == [0, 30]


def test_every_view_can_be_had(spark: Any, stores: dict[str, Path]) -> None:
    names = create_views(spark, stores)

    assert names == ("messages", *VIEWS)
    traffic = spark.sql("select sum(messages) as n, sum(bytes) as size from traffic").collect()[0]
    assert (traffic.n, traffic.size) == (60, 2 * sum(i * len(str(i)) for i in range(30)))


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("mqstore.spark.session", lambda app, conf: KeptSession(spark))
    return mqstore


def test_a_query_is_printed_or_written(
    command: Callable[..., Any], spark: Any, stores: dict[str, Path], tmp_path: Path
) -> None:
    query = "select topic, queue_id, tags, body from messages where queue_offset = 3 order by queue_id"
    call = ("spark", "sql", stores["a"], query)

    lines = [json.loads(line) for line in command(*call, "--json").stdout.splitlines()]
    shown = command(*call, "--max-rows", 1)
    written = command(*call, "--out", tmp_path / "rows")

    assert [(row["queue_id"], row["tags"], base64.b64decode(row["body"])) for row in lines] == [
        (0, "a", b"6" * 6),
        (1, "b", b"7" * 7),
    ]
    assert shown.stdout.splitlines()[1].split() == ["orders", "0", "a", "666666"]
    assert len(shown.stdout.splitlines()) == 2
    assert "more than 1 rows" in shown.stderr
    assert written.exit_code == 0
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 2
    assert command("spark", "sql", stores["a"], "select 1 where 1 = 2").stderr == "no rows\n"


def sleeping(gate: str, number: int) -> int:
    while number and not Path(gate).exists():
        time.sleep(0.01)
    return number


def test_progress_counts_tasks_of_stages(spark: Any, tmp_path: Path) -> None:
    """Two of four wait for a file; the tasks of a stage that has not begun are not known yet."""
    from mqstore_tools.spark import _tasks_of

    gate = tmp_path / "gate"
    tasks = _tasks_of(spark)
    assert tasks() == (0, 0)
    numbers = spark.sparkContext.parallelize([0, 0, 1, 1], 4)
    counted: list[list[int]] = []
    running = threading.Thread(target=lambda: counted.append(numbers.map(partial(sleeping, str(gate))).collect()))
    running.start()
    try:
        until(lambda: tasks() == (2, 4), 600)
    finally:
        gate.touch()
        running.join()
    assert counted == [[0, 0, 1, 1]]


def test_wrong_query_is_one_line(command: Callable[..., Any], stores: dict[str, Path]) -> None:
    for query, text in (("select nonsense from messages", "nonsense"), ("selec 1", "selec")):
        result = command("spark", "sql", stores["a"], query)
        assert (result.exit_code, result.stdout) == (2, "")
        [line] = result.stderr.splitlines()
        assert text in line


def test_a_shell_has_the_views(command: Callable[..., Any], stores: dict[str, Path]) -> None:
    result = command(
        "spark", "shell", stores["a"], stdin=b"print('there are', messages.count(), spark.table('queues').count())\n"
    )

    assert result.exit_code == 0
    assert "there are 30 " in result.stdout
    assert "views: messages, queues" in result.stderr


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_running_session_is_given_back(spark: Any) -> None:
    assert session("other", {"spark.master": "local[1]"}) is spark
    assert ship(spark.sparkContext) is False


def test_the_archive_has_the_library_and_nothing_else(tmp_path: Path) -> None:
    names = zipfile.ZipFile(pack(str(tmp_path / "x.zip"))).namelist()

    assert "mqstore/jobs/runner.py" in names
    assert "pyspark_mqstore.py" in names
    assert not [name for name in names if not name.startswith(("mqstore/", "pyspark_mqstore.py"))]
