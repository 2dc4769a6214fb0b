"""What users are told from Spark's workers. Without Spark; with it: test_source.py."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from mqstore.errors import ConfigError, StoreIOError
from mqstore.jobs.errors import of_store, plain_errors
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.opening import StoreName, open_store
from mqstore.jobs.reading.plan import plan
from mqstore.log.reading.change_feed import FileFeed
from tests.columnar.support import many, write_store


def raises_deep_below(error: Exception) -> None:
    try:
        raise KeyError("cause")
    except KeyError as cause:
        raise error from cause


def test_an_error_of_ours_leaves_without_its_cause_and_its_way() -> None:
    with pytest.raises(ConfigError) as caught, plain_errors():
        raises_deep_below(ConfigError("option x='y': no"))
    shown = "".join(traceback.format_exception(caught.value))
    assert "KeyError" not in shown
    assert "raises_deep_below" not in shown
    assert shown.endswith("ConfigError: option x='y': no\n")
    assert "SPARK_HIDE_TRACEBACK" not in os.environ  # this is no worker of Spark


def test_bug_keeps_its_traceback() -> None:
    with pytest.raises(KeyError) as caught, plain_errors():
        raises_deep_below(KeyError("bug"))
    assert "raises_deep_below" in "".join(traceback.format_exception(caught.value))


def test_spark_worker_hides_the_traceback(tmp_path: Path) -> None:
    """A process is one if it was started as a module of pyspark; only then, and only when an error of ours passes."""
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "worker.py").write_text(
        "import os\n"
        "from mqstore.errors import ConfigError\n"
        "from mqstore.jobs.errors import plain_errors\n"
        "for error in (ValueError(), ConfigError('x')):\n"
        "    try:\n"
        "        with plain_errors():\n"
        "            raise error\n"
        "    except Exception:\n"
        "        print(os.environ.get('SPARK_HIDE_TRACEBACK'))\n"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    found = subprocess.run(
        [sys.executable, "-m", "pyspark.worker"], env={"PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["None", "1"]


# -- stores that cannot be read ----------------------------------------------------------------------------------------


def test_unreadable_path_has_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "commitlog"))

    monkeypatch.setattr(FileFeed, "stop_at_splice", refuse)
    path = str(write_store(tmp_path / "s", many(1)))
    with pytest.raises(StoreIOError) as caught:
        open_store(StoreName("s", path))
    assert str(caught.value) == (
        f"read failed on {tmp_path}/commitlog: permission denied; let the user that this process runs as read the "
        "store and all in it"
    )
    with pytest.raises(StoreIOError):
        plan(SourceOptions.parse({"path": path}))
    assert plan(SourceOptions.parse({"path": path, "failOnDataLoss": "false"})) == []
    with pytest.raises(OSError, match="Input/output"), of_store(path):
        raise OSError(errno.EIO, "Input/output error")
