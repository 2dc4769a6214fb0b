"""Where another package's source is broken: Spark then finds none by itself, ours among them. In a Spark of its own,
whose path has such a package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import BRIEF
from tests.spark.staged import bodies
from tests.spark.support import many, write_store

pytestmark = [pytest.mark.spark_alone, pytest.mark.usefixtures("spark_environment")]

_SCRIPT = """
import sys
from pyspark.sql import SparkSession

path, target, options = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.extraJavaOptions", options).getOrCreate()

def count():
    return spark.read.format("mqstore").option("subscribe", "t").load(path).count()

try:
    print("found", count())
except Exception as error:
    print("DATA_SOURCE_NOT_FOUND" if "[DATA_SOURCE_NOT_FOUND]" in str(error) else error)

from mqstore.spark import register
register(spark)
print("read", count())
spark.sql(f"CREATE TEMPORARY VIEW m USING mqstore OPTIONS (path '{path}')")
print("sql", spark.sql("SELECT * FROM m WHERE topic = 'orders'").count())
frame = spark.read.format("mqstore").load(path).select("topic", "body")
frame.write.format("mqstore").mode("append").save(target)
spark.stop()
"""


def test_where_a_broken_package_hides_the_source_registering_it_helps(tmp_path: Path) -> None:
    """As the page says; also once a query has failed for it. Reading, SQL and writing."""
    path = write_store(tmp_path / "s", many(60))
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "pyspark_broken.py").write_text("raise RuntimeError('this package is broken')")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(path), str(tmp_path / "t"), BRIEF],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])},
        timeout=170,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert "this package is broken" in done.stderr
    assert done.stdout.splitlines() == ["DATA_SOURCE_NOT_FOUND", "read 30", "sql 30"]
    assert sorted(bodies(tmp_path / "t")) == sorted(bodies(path))
