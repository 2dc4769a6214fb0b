"""`mqstore spark clean`, and what `mqstore inspect` shows of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mqstore.engine import MessageStore
from mqstore.spark.publish import Commit, commit
from mqstore.spark.staging import STAGING
from tests.spark.staged import batch_of, options_of, set_bodies, stage, write
from tests.tools.support import mqstore, mqstore_json


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store in which one job left something long ago, and another one is at work."""
    path = tmp_path / "store"
    MessageStore(path).close()
    stage(options_of(path), "crashed", 0, [batch_of(["x"])])
    for each in (path / STAGING).rglob("*"):
        os.utime(each, (0, 0))
    stage(options_of(path), "running", 0, [batch_of(["y"])])
    return path


def test_what_is_old_goes_and_what_is_new_stays(store: Path) -> None:
    planned = mqstore_json("spark", "clean", store, "--dry-run")
    assert [Path(row["path"]).name for row in planned["deleted"]] == ["crashed-0"]
    assert planned["dry_run"] is True
    assert sorted(os.listdir(store / STAGING)) == ["crashed-0", "running-0"]

    shown = mqstore("spark", "clean", store)

    assert (shown.exit_code, "crashed-0" in shown.stdout, "running-0" in shown.stdout) == (0, True, False)
    assert os.listdir(store / STAGING) == ["running-0"]


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


def test_inspect_tells_what_is_staged(store: Path) -> None:
    assert json.loads(mqstore("inspect", store, "--json").stdout)["splice"]["staged"] == ["crashed-0", "running-0"]
    assert "2 folders in _staging/" in mqstore("inspect", store).stdout


@pytest.mark.parametrize(
    ("arguments", "says"), [(("nowhere",), "nowhere is no folder"), ((".", "--older-than", "soon"), "soon")]
)
def test_wrong_usage_is_told(arguments: tuple[str, ...], says: str) -> None:
    found = mqstore("spark", "clean", *arguments)

    assert (found.exit_code, says in found.stderr) == (2, True)
