"""`mqstore spark`: exit codes, what is said when Spark is missing, and what `clean` deletes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import mqstore as library
from mqstore.spark import sessions
from tests.jobs.staged import Commit, batch_of, commit, options_of, set_bodies, stage, write
from tests.tools.support import mqstore, mqstore_json


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pyspark nor Java."""
    monkeypatch.setitem(sys.modules, "pyspark", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)  # type: ignore[arg-type]
    monkeypatch.setattr(sessions, "find_java", lambda: None)


def arguments(name: str, store: Path) -> list[object]:
    """A call of the command that is right."""
    return ["spark", name, store, *{"sql": ["select 1"]}.get(name, [])]


MINE = ["sql", "shell"]


# -- no Spark --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MINE, "lag"])
@pytest.mark.usefixtures("no_spark")
def test_without_spark_one_line_says_what_to_install(name: str, store: Path) -> None:
    call = arguments(name, store) if name in MINE else [name, store, "--spark", "local[2]"]
    result = mqstore(*call, exit_code=3)

    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert "pip install 'mqstore[spark]'" in line
    assert sessions.NO_JAVA in line


# -- wrong usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MINE)
@pytest.mark.usefixtures("no_spark")
def test_wrong_usage_needs_no_spark(name: str, store: Path) -> None:
    assert mqstore(*arguments(name, store), "--conf", "nonsense").exit_code == 2
    result = mqstore(*arguments(name, store), "--option", "nonsense=1", exit_code=2)
    assert "no option 'nonsense'" in result.stderr


# -- clean -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def left_over(tmp_path: Path) -> Path:
    """A store in which one job left something long ago, and another one is at work."""
    path = tmp_path / "store"
    library.open(path).close()
    stage(options_of(path), "crashed", 0, [batch_of(["x"])])
    for each in (path / "_staging").rglob("*"):
        os.utime(each, (0, 0))
    stage(options_of(path), "running", 0, [batch_of(["y"])])
    return path


def test_only_old_staging_is_removed(left_over: Path) -> None:
    planned = mqstore_json("spark", "clean", left_over, "--dry-run")
    assert [Path(row["path"]).name for row in planned["deleted"]] == ["crashed-0"]
    assert planned["dry_run"] is True
    assert sorted(os.listdir(left_over / "_staging")) == ["crashed-0", "running-0"]

    (left_over / "_staging" / "link").symlink_to(left_over / "commitlog")
    shown = mqstore("spark", "clean", left_over)

    assert (shown.exit_code, "crashed-0" in shown.stdout, "running-0" in shown.stdout) == (0, True, False)
    assert sorted(os.listdir(left_over / "_staging")) == ["link", "running-0"]
    mqstore("spark", "clean", left_over, "--older-than", "0s", exit_code=0)
    assert os.listdir(left_over / "_staging") == ["link"]


def test_a_set_keeps_the_stores_that_count(tmp_path: Path) -> None:
    path = tmp_path / "set"
    options = options_of(path, target="set")
    write(options, "a", 0, ["x"])
    stage(options, "a", 1, [batch_of(["y"])])
    manifest = (path / "mqstore-set.json").read_bytes()
    commit(options, Commit("a", 1, stage(options, "a", 1, [batch_of(["z"])])))
    (path / "mqstore-set.json").write_bytes(manifest)  # as if it had been killed before its last rename

    found = mqstore_json("spark", "clean", path, "--older-than", "0s")

    assert [Path(row["path"]).parent.name for row in found["deleted"]] == ["shards"]
    assert (len(os.listdir(path / "shards")), set_bodies(path)) == (1, ["x"])


def test_inspect_shows_staging(left_over: Path) -> None:
    assert json.loads(mqstore("inspect", left_over, "--json").stdout)["splice"]["staged"] == ["crashed-0", "running-0"]
    assert "2 folders in _staging/" in mqstore("inspect", left_over).stdout
