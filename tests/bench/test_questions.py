"""`pytest bench`: every question is asked and answered. How fast anything is, is not judged here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.goals import Answer, as_lines

ROOT = Path(__file__).parents[2]
MEMORY = "/dev/shm"
MODULES = sorted(f"bench/{path.name}" for path in (ROOT / "bench").glob("test_*.py"))


class Bench:
    """Runs of the questions, and what they save."""

    def __init__(self, folder: Path, stores: Path) -> None:
        self.folder = folder
        self.stores = stores

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the questions in a process of their own. No JVM and no Redis are started: they would take longest."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--quick", "--share", "0.0005", *arguments]
        places = {"PATH": "/nowhere", "MQSTORE_ROCKETMQ": str(self.folder), "MQSTORE_BENCH_DIR": str(self.stores)}
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
        environment.pop("JAVA_HOME", None)
        storage = f"--benchmark-storage={self.folder / 'saved'}"
        return subprocess.run(
            [*command, storage], cwd=ROOT, env=environment | places, capture_output=True, text=True, check=False
        )

    def saved(self) -> list[Path]:
        return sorted((self.folder / "saved").rglob("*.json"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """The stores are in memory where there is room. A question makes dozens of them, and no speed is judged here."""
    roomy = os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 4 << 30
    with tempfile.TemporaryDirectory(dir=MEMORY if roomy else tmp_path) as stores:
        yield Bench(tmp_path, Path(stores))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("third", range(3))
def test_every_question_is_answered(bench: Bench, third: int) -> None:
    """Of a question for two sizes of bodies one is asked: the other differs in a number."""
    done = bench.ask(*MODULES[third::3], "-k", "not test_spark_ and not [1024]", "--benchmark-save=run")

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [path] = bench.saved()
    asked = json.loads(path.read_text())["benchmarks"]
    assert len(asked) == int(re.findall(r"(\d+) passed", done.stdout)[-1])
    for each in asked:
        answers = each["extra_info"]["answers"]
        assert answers, each["name"]
        assert [one for one in answers if not one["values"] and not one["note"].startswith("left out: ")] == []
    lines = as_lines([Answer(**one) for each in asked for one in each["extra_info"]["answers"]])
    assert "\n".join(lines) in done.stdout
    saved = subprocess.run([sys.executable, "-m", "bench.goals", path], cwd=ROOT, capture_output=True, text=True)
    assert saved.stdout.splitlines() == lines
    assert list(bench.stores.iterdir()) == []


@pytest.mark.timeout(900)
def test_saved_run_is_compared_and_worse_fails(bench: Bench) -> None:
    """A run of a share of the messages is saved on request, and not by itself."""
    question = ("bench/test_store.py", "-k", "first_read")
    assert bench.ask(*question, "--benchmark-save=run").returncode == 0
    [path] = bench.saved()
    compare = ("--benchmark-compare=0001", "--benchmark-compare-fail=min:10%", "--benchmark-autosave")
    for least, code in ((1e9, 0), (1e-12, 1)):
        run = json.loads(path.read_text())
        run["benchmarks"][0]["stats"]["min"] = least
        path.write_text(json.dumps(run))

        done = bench.ask(*question, *compare)

        assert (done.returncode != 0) == code, done.stdout[-4000:] + done.stderr[-4000:]
        assert ("Performance has regressed" in done.stderr) == code
        assert "answers beside their goals" in done.stdout
        assert "these figures say little" in done.stdout
        assert bench.saved() == [path]


@pytest.mark.timeout(900)
def test_question_runs_once_untimed_under_xdist(bench: Bench) -> None:
    done = bench.ask("bench/test_store.py", "-k", "first_read or flush_16", "-n", "1")

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "3 passed" in done.stdout
