"""Spark Connect: its Python workers run in a temporary folder of the session, so relative paths are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mqstore

_PROGRAM = r"""
import sys, pathlib
from pyspark.sql import SparkSession
from mqstore.spark import register

spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.addArtifacts(__file__, file=True)  # from now on, workers run in a folder of the session
register(spark)
rows = spark.createDataFrame([("orders", b"one"), ("orders", b"two")], "topic string, body binary")
absolute = str(pathlib.Path("absolute").absolute())
rows.write.format("mqstore").mode("append").save(absolute)
print("absolute", spark.read.format("mqstore").load(absolute).count())

def refused(name, call):
    try:
        call()
    except Exception as error:
        print(name, "give the whole path" in str(error))
    else:
        print(name, "was not refused")

refused("write", lambda: rows.write.format("mqstore").mode("append").save("relative"))
refused("read", lambda: spark.read.format("mqstore").load("absolute").count())

def stream(source, target):
    checkpoint = str(pathlib.Path(f"checkpoint of {pathlib.Path(target).name}").absolute())
    reader = spark.readStream.format("mqstore").option("startingOffsets", "earliest")
    writer = reader.load(source).select("topic", "body").writeStream.format("mqstore")
    query = writer.option("checkpointLocation", checkpoint).start(target)
    query.processAllAvailable()
    query.stop()

refused("stream from", lambda: stream("absolute", str(pathlib.Path("streamed").absolute())))
refused("stream to", lambda: stream(absolute, "relative"))
stream(absolute, str(pathlib.Path("streamed").absolute()))
spark.stop()
"""


@pytest.mark.spark_alone
@pytest.mark.usefixtures("spark_environment")
def test_relative_paths_are_refused_and_absolute_ones_work(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect needs grpcio")
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    run = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.splitlines() == [
        "absolute 2",
        *(f"{name} True" for name in ("write", "read", "stream from", "stream to")),
    ], run.stderr[-4000:]
    with mqstore.open(tmp_path / "streamed", "r") as store:
        bodies = {message.body for queue in store.log.queues("orders") for message in store.log.iter(*queue)}
        assert bodies == {b"one", b"two"}
    assert not list(tmp_path.rglob("relative"))
