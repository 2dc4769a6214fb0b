"""The example project of docs/spark-pipeline, run by `spark-pipelines`, where its extras are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import mqstore
from mqstore.spark.sessions import find_java

_ROOT = Path(__file__).parent.parent.parent
_EXTRAS = ("grpc", "grpc_status", "google.rpc", "pandas", "yaml", "zstandard")

pytestmark = [pytest.mark.spark_alone, pytest.mark.usefixtures("spark_environment")]


def _missing() -> list[str]:
    found = []
    for name in _EXTRAS:
        try:
            there = importlib.util.find_spec(name)
        except ImportError:
            there = None
        found += [] if there else [name]
    return found


def test_each_order_comes_once_however_often_it_runs(tmp_path: Path) -> None:
    if missing := _missing():
        pytest.skip(f"no {', '.join(missing)}: pip install 'pyspark[pipelines]'")
    import pyspark

    project = tmp_path / "project"
    shutil.copytree(_ROOT / "docs" / "spark-pipeline", project)
    spec = project / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("/var/lib/", f"{tmp_path}/"))
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java()),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(_ROOT / "store"),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    paid = Counter[bytes]()
    for start in (0, 50):
        with mqstore.open(tmp_path / "shop") as shop:
            for number in range(start, start + 50):
                tag = "paid" if number % 4 else "open"
                shop.put("orders", b"%d" % number, tag=tag, keys=[str(number)])
                paid.update([b"%d" % number] * (tag == "paid"))
        done = subprocess.run(
            [home / "bin" / "spark-pipelines", "run", "--spec", spec],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        with mqstore.open(tmp_path / "shop-reports", mode="r") as reports:
            assert Counter(m.body for ref in reports.log.queues("paid-orders") for m in reports.log.iter(*ref)) == paid
