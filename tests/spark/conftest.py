"""One Spark for all tests that need one. Without pyspark or Java they are skipped, loudly; MQSTORE_REQUIRE_SPARK=1, as
a build has it that is to run them, makes that a failure."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mqstore.spark.sessions import NO_JAVA, find_java

BRIEF = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options for a Java that does not live long."""
_QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": BRIEF,
    "spark.default.parallelism": "2",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stopTimeout": "10000",
}


def pytest_configure(config: pytest.Config) -> None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        if metadata.version("pyspark").startswith("4.1."):  # leaves its sockets to garbage collection
            config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test with a Spark half an hour. No call in it has a limit: a busy machine starts a Java in minutes."""
    for item in items:
        if item.get_closest_marker("spark") or item.get_closest_marker("spark_alone"):
            item.add_marker(pytest.mark.timeout(1800))


def _unavailable(why: str) -> NoReturn:
    if os.environ.get("MQSTORE_REQUIRE_SPARK") == "1":
        pytest.fail(f"MQSTORE_REQUIRE_SPARK=1, but {why}")
    pytest.skip(f"Spark tests need it: {why}")


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """This interpreter with what is installed, but for what is installed in place: its tree is on nobody's path."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    # Such a line adds a folder; the lines of the files in there, which name trees, are not read.
    (Path(paths["purelib"]) / "all.pth").write_text(sysconfig.get_paths()["purelib"])
    return str(folder / "bin" / "python")


def spark_home(folder: Path) -> Path:
    """Spark as it is installed, but for where a cluster's workers write, and that its Pythons read pyspark and py4j
    where they are compiled, not from archives: half a second for each of the processes that every stream starts."""
    import py4j
    import pyspark

    home = Path(pyspark.__file__).parent
    folder.mkdir()
    for each in home.iterdir():
        if each.name not in ("python", "work"):
            (folder / each.name).symlink_to(each)
    for archive in (home / "python" / "lib").iterdir():
        package = py4j if archive.name.startswith("py4j") else pyspark
        (folder / "python" / "lib" / archive.name).mkdir(parents=True)
        (folder / "python" / "lib" / archive.name / package.__name__).symlink_to(Path(package.__file__).parent)
    return folder


@pytest.fixture(scope="session")
def spark_environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    """pyspark and Java are there, and set up for whoever starts a Spark here: our modules are importable."""
    try:
        import pyspark
    except ImportError:
        _unavailable("no pyspark: pip install 'mqstore[spark]'")
    del pyspark
    home = find_java()
    if home is None:
        _unavailable(NO_JAVA)
    root = Path(__file__).parent.parent.parent
    os.environ["JAVA_HOME"] = str(home)
    os.environ["SPARK_HOME"] = str(spark_home(tmp_path_factory.mktemp("home") / "spark"))
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each Python would start a thread that waits busily for work
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root / "store"), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def limits(spark_environment: None) -> None:
    """Skips, whatever is required: of streams before pyspark 4.2 nobody asks for a part of what there is."""
    if importlib.util.find_spec("pyspark.sql.streaming.datasource") is None:
        pytest.skip("streams have no limits here: pyspark.sql.streaming.datasource came with pyspark 4.2")


@pytest.fixture(scope="session")
def spark(spark_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session with two threads. Our source is not registered, until a test asks `session()` for it."""
    from pyspark.sql import SparkSession

    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # a failing query prints its stack
    builder = SparkSession.builder.master("local[2]").appName("mqstore tests")
    for name, value in _QUIET.items():
        builder = builder.config(name, value)
    folder = tmp_path_factory.mktemp("spark")
    session = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse")).getOrCreate()
    yield session
    session.stop()
