"""Clusters: executors that are processes of their own run the package as it is installed from its wheel.

    wheel -> a folder of its own -> driver and workers, who have nothing else of this tree on their path

`local-cluster` is what Spark's own tests use: pickling, shipping and registration are real. A standalone master with
two workers is started here, on loopback, each process ended by its id.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.spark.sessions import NO_JAVA, find_java
from tests.columnar.support import many, write_store
from tests.spark import speculation_job
from tests.spark.conftest import BRIEF, _unavailable, spark_home

pytestmark = pytest.mark.spark_alone
ROOT = Path(__file__).parent.parent.parent
SETTINGS = [
    "spark.ui.enabled=false",
    "spark.ui.showConsoleProgress=false",
    "spark.log.level=OFF",
    "spark.driver.bindAddress=127.0.0.1",
    "spark.driver.host=127.0.0.1",
    "spark.driver.memory=512m",
    "spark.executor.memory=512m",
    "spark.executor.cores=1",
    "spark.sql.shuffle.partitions=2",
    f"spark.driver.extraJavaOptions={BRIEF}",
    f"spark.executor.extraJavaOptions={BRIEF}",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel of this tree is installed in, without what it requires."""
    for module in ("pyspark", "hatchling", "pip"):
        if importlib.util.find_spec(module) is None:
            _unavailable(f"no {module}")
    if find_java() is None:
        _unavailable(NO_JAVA)
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = (folder / "dist").iterdir()
    target = folder / "site"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    return target


def environment(python: str, folder: Path, *paths: Path) -> dict[str, str]:
    """For processes of Spark: the package only where `paths` have it, all that is written below `folder`."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    return {
        **kept,
        "JAVA_HOME": str(find_java()),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYSPARK_PYTHON": python,
        "OPENBLAS_NUM_THREADS": "1",
        "SPARK_HOME": str(spark_home(folder / "home")),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": BRIEF,
    }


def run_job(name: str, arguments: list[str], folder: Path, env: dict[str, str], *settings: str) -> str:
    job = [env["PYSPARK_PYTHON"], str(Path(__file__).with_name(name)), *arguments]
    where = f"spark.sql.warehouse.dir={folder}/warehouse"
    done = subprocess.run([*job, *SETTINGS, where, *settings], env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run(master: str, store: Path, folder: Path, env: dict[str, str], *settings: str) -> dict[str, Any]:
    said = run_job("cluster_job.py", [master, str(store), str(folder)], folder, env, *settings)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def check(found: dict[str, Any], store: Path, package: Path, origins: set[str]) -> None:
    """What the cluster read, streamed and wrote, against the store's own reader."""
    with ReadOnlyMessageStore(store) as opened:
        expected = [
            [*ref, message.offset, message.tag, message.body.hex()]
            for topic in ("orders", "t")
            for ref in opened.queues(topic)
            for message in opened.iter(*ref)
        ]
    assert Path(found["package"]) == package / "mqstore"
    assert sorted(found["rows"]) == expected
    assert found["tasks"] >= 4
    assert found["executors"] == 2
    assert {where.rpartition("/mqstore")[0].rpartition("/")[2] for where in found["origins"]} == origins
    mine = [(queue, tag, body) for topic, queue, _, tag, body in expected if topic == "t"]
    assert found["streamed"] == len(mine)
    # Each queue in its order, for a task reads a queue from its front; and nothing twice.
    written = [tuple(each) for each in found["written"]]
    assert sorted(written) == sorted(mine)
    # The stream into a set: each message once, after a restart for more and one for a batch that the set had already.
    assert found["batches"] == [[0], [1], [1]]
    texts = [bytes.fromhex(body).decode() for *_, body in mine]
    streamed = [("t", text) for text in texts] + [("more", f"more {text}") for text in texts]
    assert sorted(map(tuple, found["set"])) == sorted(streamed)
    assert found["verified"] == [True, 2 * len(streamed)]  # the copy, and the set


def test_a_local_cluster_is_sent_the_package(installed: Path, tmp_path: Path, bare_python: str) -> None:
    """Its executors lack it: their path is not the driver's."""
    store = write_store(tmp_path / "s", many(200))
    env = environment(bare_python, tmp_path, installed)
    elsewhere = tmp_path / "nothing"
    elsewhere.mkdir()
    settings = ["spark.executorEnv.PYTHONPATH=" + str(elsewhere)]
    found = run("local-cluster[2,1,1024]", store, tmp_path, env, *settings)
    check(found, store, installed, {"mqstore.zip"})


def test_a_standalone_cluster_runs_the_installed_wheel(installed: Path, tmp_path: Path, bare_python: str) -> None:
    store = write_store(tmp_path / "s", many(200))
    env = environment(bare_python, tmp_path, installed)
    with standalone(tmp_path, env) as master:
        check(run(master, store, tmp_path, env, "spark.cores.max=2"), store, installed, {"site"})


def test_a_task_that_is_tried_twice_at_once_writes_once(installed: Path, tmp_path: Path, bare_python: str) -> None:
    """Both attempts have handed on all of their rows when the second one wins."""
    env = environment(bare_python, tmp_path, installed)
    eager = ["spark.cores.max=2", "spark.speculation=true", "spark.speculation.interval=100ms"]
    eager += ["spark.speculation.quantile=0.5", "spark.speculation.multiplier=1.1"]
    with standalone(tmp_path, env) as master:
        run_job("speculation_job.py", [master, str(tmp_path)], tmp_path, env, *eager)
    last = speculation_job.TASKS - 1
    assert {each.name for each in tmp_path.glob(f"attempt-{last}-*")} == {f"attempt-{last}-0", f"attempt-{last}-1"}
    with ReadOnlyMessageStore(tmp_path / "store") as opened:
        bodies = [int(message.body) for ref in opened.queues("t") for message in opened.iter(*ref)]
    assert sorted(bodies) == list(range(speculation_job.ROWS))


@contextlib.contextmanager
def standalone(folder: Path, env: dict[str, str]) -> Iterator[str]:
    """A master and two workers of one core each; the master's address. The workers are hosts of their own: on the host
    of a task Spark does not try it a second time."""
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, kind: str, host: str, *arguments: str) -> None:
        with open(folder / f"{name}.log", "wb") as log:
            command = [f"{env['SPARK_HOME']}/bin/spark-class", f"org.apache.spark.deploy.{kind}", "--host", host]
            # A session of its own: spark-class replaces itself by java, whose executors go with it.
            started.append(subprocess.Popen([*command, *arguments], env=env, stdout=log, stderr=log))

    try:
        start("master", "master.Master", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        await_port(port, started[0])
        for number in range(2):
            worker = ("--port", "0", "--webui-port", "0", "--cores", "1", "--memory", "1g", master)
            start(f"worker-{number}", "worker.Worker", f"127.0.0.{number + 1}", *worker)
        yield master
    finally:
        for process in reversed(started):  # each by its own id, and nothing else
            process.terminate()
        for process in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None, "the master ended; see its log"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
