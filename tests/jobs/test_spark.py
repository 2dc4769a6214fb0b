"""Jobs in Spark's tasks. The results of each command with --spark are those of this process."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from mqstore.errors import CorruptStoreError
from mqstore.jobs import export_parquet, select
from mqstore.jobs.runner import Runner
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.columnar.support import many, write_store
from tests.jobs.twostores import KeptSession, two_stores
from tests.log.support import all_queues, flip_log
from tests.tools.support import mqstore

pytestmark = pytest.mark.spark


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, Path]:
    return two_stores(tmp_path)


def test_spark_reads_what_an_export_wrote(spark: Any, tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(300))
    told: list[tuple[int, int]] = []
    chosen = select(path, options={"minPartitions": "3"})

    done = export_parquet(chosen, tmp_path / "out", spark=spark, progress=lambda *now: told.append(now))

    frame = spark.read.parquet(str(tmp_path / "out"))
    assert (done.messages, frame.count()) == (301, 301)
    assert {row.topic: row["count"] for row in frame.groupBy("topic").count().collect()} == {
        "t": 150,
        "orders": 150,
        "seed": 1,
    }
    assert (told[0], told[-1]) == ((0, 3), (3, 3))


def double(number: int) -> int:
    return 2 * number


def fail(number: int) -> int:
    if number == 1:
        raise CorruptStoreError("bad", "commitlog/0", 7)
    return number


def test_tasks_keep_their_order_and_errors_come_back_as_they_were(spark: Any) -> None:
    runner = Runner(spark=spark)
    assert runner.run([*range(20)], double) == [*range(0, 40, 2)]
    assert runner.run([], double) == []
    with pytest.raises(CorruptStoreError, match=r"^bad$") as caught:
        runner.run([0, 1, 2], fail)
    assert caught.value.position == 7


def warn(number: int) -> None:
    logging.getLogger("mqstore").warning("task %d", number)


def test_log_records_of_tasks_reach_the_loggers_of_the_driver(spark: Any, caplog: pytest.LogCaptureFixture) -> None:
    Runner(spark=spark).run([1, 2, 3], warn)

    assert [record.getMessage() for record in caplog.records] == ["task 1", "task 2", "task 3"]


def test_a_store_that_is_damaged_ends_a_job_with_one_error_and_no_trace(spark: Any, tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(20))
    shutil.rmtree(path / "commitlog")
    (path / "commitlog").mkdir()

    with pytest.raises((CorruptStoreError, OSError)) as caught:
        export_parquet(path, tmp_path / "out", spark=spark)
    assert "Traceback" not in str(caught.value)


# -- commands ----------------------------------------------------------------------------------------------------------


COMMANDS = {
    "verify": ("verify", "a", "b", "damaged"),
    "recover": ("recover", "a", "b", "damaged"),
    "recover one": ("recover", "damaged"),
    "lag": ("lag", "a", "b"),
    "traffic": ("report", "a", "b", "--interval", "5s", "--by", "store,queue_id"),
    "traffic of a damaged store": ("report", "a", "damaged", "--option", "verify=true"),
    "trace": ("trace", "a", "b", "k-1"),
    "dlq": ("dlq", "a", "b"),
    "dlq replay": ("dlq", "replay", "a", "b"),
    "export": ("export", "a", "b", "--to", "out"),
    "no store": ("lag", "nowhere"),
}
AGES = re.compile(r'"(taken_ms|oldest_age_ms|seconds|file_bytes)": [0-9.]+')
"""Values that differ from run to run. The size of a file depends on the store's path, which is in a column."""


def run_command(
    monkeypatch: pytest.MonkeyPatch, stores: dict[str, Path], folder: Path, words: Sequence[str]
) -> tuple[Any, ...]:
    """Run the command in a folder with copies of the stores. Returns all that can be seen of it."""
    shutil.copytree(stores["a"].parent, folder, symlinks=True)
    shutil.copytree(folder / "b", folder / "damaged")
    flip_log(folder / "damaged", 300)
    monkeypatch.chdir(folder)
    done = mqstore(*words, "--json")
    exported = None
    if (folder / "out").exists():
        exported = (
            ds.dataset(folder / "out").to_table().sort_by([("store", "ascending"), ("physical_offset", "ascending")])
        )
        exported = exported.drop_columns("store")
    moved = [text.replace(str(folder), "") for text in (done.stdout, done.stderr)]
    held = {name: model(folder / name) for name in stores}
    return done.exit_code, *[AGES.sub("", text) for text in moved], exported, held


def model(path: Path) -> list[tuple[str, int, int, bytes]]:
    """The messages that the queues of a store have."""
    with ReadOnlyMessageStore(path) as store:
        refs = all_queues(store)
        return sorted((m.topic, m.queue_id, m.offset, m.body) for ref in refs for m in store.iter(*ref))


@pytest.mark.parametrize("name", COMMANDS)
def test_command_on_spark_equals_command_in_process(
    spark: Any,
    stores: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    asked: list[dict[str, str]] = []
    monkeypatch.setattr("mqstore.spark.session", lambda app, conf: (asked.append(conf), KeptSession(spark))[1])
    folder = tmp_path_factory.mktemp("commands")

    here = run_command(monkeypatch, stores, folder / "here", COMMANDS[name])
    assert asked == []
    there = run_command(monkeypatch, stores, folder / "there", (*COMMANDS[name], "--spark", "local[2]"))

    assert asked == [{"spark.master": "local[2]"}]
    assert there == here
