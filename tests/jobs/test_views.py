"""The small tables without Spark: of which stores they are, and what is no answer of theirs."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.background.context import open_parts
from mqstore.errors import NotAStoreError, TopicNotFoundError
from mqstore.jobs import select
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.views import VIEWS, view_batch, view_stores
from mqstore.spark import create_views
from tests.columnar.support import many, write_store
from tests.log.support import open_store

BY_TOPIC = ("queues", "traffic")


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Two stores with `t` and `orders`, of which `b` also knows the topic `entered`, with two queues and no message."""
    for name in "ab":
        write_store(tmp_path / name, many(8))
    with open_store(tmp_path / "b") as store:
        open_parts(store).topics.create("entered", queues=2)
    return tmp_path


def rows(view: str, *stores: Path, **given: str) -> list[dict[str, Any]]:
    """As a query has them: which stores is looked at first, their rows in tasks."""
    paths = "[" + ",".join(f'"{path}"' for path in stores) + "]"
    options = SourceOptions.parse({"paths": paths, "view": view, **given}).for_batch()
    names = view_stores(options)
    return [row for name in names for row in view_batch(view, name, options).to_pylist()]


# -- topics ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", BY_TOPIC)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"subscribe": "t,nosuch"}, "no store has the topic 'nosuch', which option subscribe names"),
        ({"assign": '{"t": [0, 9]}'}, "no store has the topic 't', queue 9, which option assign names"),
        ({"assign": '{"nosuch": [0]}'}, "no store has the topic 'nosuch', queue 0, which option assign names"),
    ],
)
def test_a_topic_that_no_store_has_is_no_empty_one(fleet: Path, view: str, given: dict[str, str], says: str) -> None:
    """A misspelt topic gave no row, as one does that has had no message."""
    with pytest.raises(TopicNotFoundError, match=says + r" \(failOnDataLoss=false reads the others\)"):
        rows(view, fleet / "a", fleet / "b", **given)
    found = rows(view, fleet / "a", fleet / "b", failOnDataLoss="false", **given)
    assert {row["topic"] for row in found} <= {"t"}


@pytest.mark.parametrize("view", BY_TOPIC)
def test_a_topic_of_one_store_and_one_without_a_message_are_there(fleet: Path, view: str) -> None:
    found = rows(view, fleet / "a", fleet / "b", subscribe="t,entered")
    assert {row["topic"] for row in found} == {"t"}
    assert {row["store"] for row in found} == {str(fleet / name) for name in "ab"}


def test_plan_without_topics_opens_no_store(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand stores that would be half the time."""
    monkeypatch.setattr("mqstore.jobs.views.open_store", None)
    options = SourceOptions.parse({"path": f"{fleet}/[ab]", "view": "queues"})
    assert [name.path for name in view_stores(options)] == [str(fleet / name) for name in "ab"]


# -- SQL ---------------------------------------------------------------------------------------------------------------


class Session:
    """What `create_views` uses of Spark's: checks options as a query does, and keeps them by view."""

    def __init__(self) -> None:
        self.read = self
        self.given: dict[str, str] = {}
        self.views: dict[str, SourceOptions] = {}

    def format(self, name: str) -> Any:
        assert name == "mqstore"
        self.given = {}
        return self

    def options(self, **given: str) -> Any:
        self.given |= {name.lower(): value for name, value in given.items()}
        return self

    def option(self, name: str, value: str) -> Any:
        return self.options(**{name: value})

    def load(self) -> Any:
        return self

    def createOrReplaceTempView(self, name: str) -> None:  # noqa: N802
        self.views[name] = SourceOptions.parse(self.given).for_batch()


@pytest.mark.parametrize(
    "given",
    [
        {"subscribe": "t"},
        {"SUBSCRIBE": "t"},
        {"assign": '{"t": [0]}'},
        {"subscribePattern": "t", "includeSystemTopics": "true"},
        {"tags": "a", "readBy": "queue", "bodyAs": "string", "minPartitions": "8"},
        {"includeProperties": "false", "decompress": "false", "startingOffsets": "latest"},
        {"interval": "5m", "onCorrupt": "keep", "failOnDataLoss": "false"},
    ],
)
def test_every_table_of_a_session_is_made_whatever_the_options(tmp_path: Path, given: dict[str, str]) -> None:
    """Each is given what it can go by."""
    spark = Session()
    assert create_views(spark, select(tmp_path, options=given)) == ("messages", *VIEWS)
    assert [options.view for options in spark.views.values()] == [*spark.views] == ["messages", *VIEWS]
    assert {options.topics for name, options in spark.views.items() if name in BY_TOPIC} == {
        spark.views["messages"].topics
    }


# -- stores that are gone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_missing_store_fails_or_is_skipped(fleet: Path, view: str, caplog: pytest.LogCaptureFixture) -> None:
    """`failOnDataLoss=false` did nothing for views: of a fleet with one store on a disk that was away nothing could be
    had."""
    whole = rows(view, fleet / "b")
    with pytest.raises(NotAStoreError, match="gone"):
        rows(view, fleet / "gone", fleet / "b")

    with caplog.at_level(logging.WARNING, "mqstore"):
        found = rows(view, fleet / "gone", fleet / "b", failOnDataLoss="false")

    assert found == whole
    assert f"{fleet}/gone" in caplog.text
    assert "failOnDataLoss=false" in caplog.text


@pytest.mark.parametrize("view", BY_TOPIC)
def test_a_store_that_is_gone_is_passed_over_where_topics_are_named(fleet: Path, view: str) -> None:
    whole = rows(view, fleet / "b", subscribe="t")
    with pytest.raises(NotAStoreError, match="gone"):
        rows(view, fleet / "gone", fleet / "b", subscribe="t")
    assert rows(view, fleet / "gone", fleet / "b", subscribe="t", failOnDataLoss="false") == whole


def test_a_store_that_goes_between_plan_and_task_has_no_row(fleet: Path) -> None:
    options = SourceOptions.parse({"path": str(fleet / "a"), "view": "queues", "failOnDataLoss": "false"})
    [name] = view_stores(options)
    shutil.rmtree(fleet / "a")

    batch = view_batch("queues", name, options)

    assert (batch.num_rows, batch.schema) == (0, VIEWS["queues"].schema)
    with pytest.raises(NotAStoreError):
        view_batch("queues", StoreName("a", str(fleet / "a")), SourceOptions.parse({"path": str(fleet / "a")}))
