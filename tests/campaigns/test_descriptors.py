"""Few descriptors: a store of 300 segments and 100 queues works with what the process has left (reliability#p8).

Every door of a store, for writing, for reading, and each command that reads, is gone through under every limit from 32
upward, and under one of 1,024 of which the program itself holds 900. With `NEEDED` descriptors free all of it works;
with fewer it works, or ends in an error of mqstore. Never is anything lost, and nothing hangs.

`make descriptors N=2000` tries more cases than `make test` does; a failing one tells the command that repeats it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.scarcity import DOORS

ROOT = Path(__file__).parents[2]
NEEDED = 24
"""What docs/reading.md says."""
ROUNDS = int(os.environ.get("MQSTORE_CAMPAIGN_ROUNDS", "3"))
CHUNK = 10
LIMITS = (*range(8, 97), 128, 200, 256, 512, 1000)
HELD = ((1024, 900), (1024, 960), (1024, 992), (1024, 1010))

Case = tuple[str, int, int]


def _cases() -> list[Case]:
    """All of them, in an order that is the same each time."""
    found = [(door, limit, 0) for door in DOORS for limit in LIMITS]
    found += [(door, *held) for door in DOORS for held in HELD]
    random.Random(64).shuffle(found)
    return found[:ROUNDS]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("descriptors")


def go_through(folder: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """What each case came to; a case whose store is harmed, or that raises what no caller expects, fails the test."""
    program = [sys.executable, "-m", "tests.campaigns.scarcity"]
    path = os.pathsep.join(str(ROOT / part) for part in ("store", "tools", "."))
    wanted = json.dumps({"folder": str(folder), "cases": cases})
    done = subprocess.run(
        [*program, wanted],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(cases)
    for case, each in zip(cases, told, strict=True):
        again = f"PYTHONPATH={path} python -m tests.campaigns.scarcity '" + json.dumps(
            {"folder": "EMPTY-FOLDER", "cases": [case]}
        )
        assert "fault" not in each, f"{each['fault']}\nto see it again: {again}'"
        assert each["free"] < NEEDED or not each["error"], f"{each}\nto see it again: {again}'"
    return told


def test_a_store_needs_no_more_descriptors_than_documented(stores: Path) -> None:
    """The bound itself. Opening after a crash took 40 descriptors for the index alone."""
    assert f"{NEEDED} file descriptors" in (ROOT / "docs" / "reading.md").read_text()
    go_through(stores, [(door, -NEEDED, 0) for door in ("write full", "read", "snapshot")])


@pytest.mark.parametrize("first", range(0, ROUNDS, CHUNK))
def test_a_store_works_with_the_descriptors_that_are_free(stores: Path, first: int) -> None:
    go_through(stores, _cases()[first : first + CHUNK])


def test_without_descriptors_opening_is_refused_by_an_error(stores: Path) -> None:
    told = go_through(stores, [("open killed", 3, 0), ("read", 3, 0), ("verify", 3, 0)])
    assert all("Too many open files" in each["error"] for each in told), told
