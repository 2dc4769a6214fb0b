"""The jobs that copy messages, run by Spark: the same as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import encode_properties
from mqstore.spark.jobs.replay import replay
from mqstore.spark.jobs.resend import dlq_resend
from mqstore.spark.jobs.shape import Selection, select
from tests.spark.copies import joined, members, messages
from tests.spark.support import Odd, many, write_store

pytestmark = pytest.mark.spark


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "s", many(80))


def cut(store: Path) -> Selection:
    """In several tasks."""
    return select(store, options={"minPartitions": "4"})


def test_a_replay_keeps_order_across_tasks(spark: Any, store: Path, tmp_path: Path) -> None:
    done = replay(spark, cut(store), tmp_path / "t")

    assert messages(tmp_path / "t") == messages(store)
    assert done.messages == 81
    assert replay(spark, cut(store), tmp_path / "t").already


def test_a_replay_of_several_targets_into_sets(spark: Any, store: Path, tmp_path: Path) -> None:
    replay(spark, cut(store), [tmp_path / "a", tmp_path / "b"], route="queue", target="set", rate=1e6)

    found = joined([*members(tmp_path / "a"), *members(tmp_path / "b")])
    assert {key: sorted(copies) for key, copies in found.items()} == {
        key: sorted(copies) for key, copies in messages(store).items()
    }


def test_an_error_of_a_task_is_the_one_that_it_raised(spark: Any, tmp_path: Path) -> None:
    full = encode_properties({"x": "y" * 32_700})
    source = write_store(tmp_path / "s", [Odd(), Odd(properties=full)], segment_bytes=1 << 17)

    with pytest.raises(InvalidMessageError, match="offset 1 cannot be copied"):
        replay(spark, source, tmp_path / "t", topics="t", tag=True, id="x" * 90)

    assert not (tmp_path / "t").exists()


def test_dead_letters_are_sent_again_once(spark: Any, tmp_path: Path) -> None:
    marks = encode_properties({"DLQ_ORIGIN_TOPIC": "t"})
    paths = {
        name: write_store(tmp_path / name, [Odd(topic="%DLQ%g", body=b"1", properties=marks), Odd(body=b"2")])
        for name in ("x", "y")
    }

    assert dlq_resend(spark, paths).resent == 2
    assert dlq_resend(spark, paths).resent == 0

    for path in paths.values():
        assert sorted(copy.body for key, found in messages(path).items() if key[0] == "t" for copy in found) == [
            b"1",
            b"2",
        ]
