"""The view `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.columnar.support import many, write_store
from tests.log.support import flip

pytestmark = pytest.mark.spark


def test_the_view_of_a_fleet_is_a_table(spark: Any, tmp_path: Path) -> None:
    for name in "ab":
        write_store(tmp_path / name, many(60), segment_bytes=6_000)
    flip(tmp_path / "b" / "commitlog" / f"{0:020d}", 1_000)

    frame = spark.read.format("mqstore").option("view", "verify").load([str(tmp_path / name) for name in "ab"])

    rows = frame.groupBy("store").sum("records", "errors").orderBy("store").collect()
    assert [(row[0], row[1], row[2] > 0) for row in rows] == [
        (str(tmp_path / "a"), 61, False),
        (str(tmp_path / "b"), 60, True),
    ]
