"""The demo on a small sample: what it claims, and whether a store it left behind bears that out.

The store is read again here with the library alone, without the demo's own readers.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import CliRunner

import mqstore
from examples import demo as demo_module
from examples.demo import demo
from tests.tools.support import environment

CHECKS = {"killed", "acknowledged", "complete", "once", "files", "keys", "verified", "found", "mended", "passed_over"}

LIMIT_MB = "0.3"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The summary of one small run, and the directory that it worked in."""
    folder = tmp_path_factory.mktemp("demo") / "new"
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--limit-mb", LIMIT_MB, "--json", "--dir", str(folder)],
        cwd=Path(__file__).parent.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary, folder


def test_every_check_is_made_and_holds(run: tuple[dict[str, Any], Path]) -> None:
    summary, _ = run
    assert {check["name"]: check["ok"] for check in summary["checks"]} == dict.fromkeys(CHECKS, True)
    assert summary["ok"]


def test_killed_writers_leave_a_store_that_a_third_finishes(run: tuple[dict[str, Any], Path]) -> None:
    summary, _ = run
    runs = summary["runs"]
    assert [each["exit_code"] for each in runs] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert 0 < runs[0]["acknowledged"] < runs[1]["acknowledged"] < runs[2]["acknowledged"] == summary["lines"]
    assert [each["recovery"]["clean_shutdown"] for each in runs] == [True, False, False]


def test_the_next_writer_goes_on_behind_the_last_line_in_the_store(run: tuple[dict[str, Any], Path]) -> None:
    summary, _ = run
    for before, after in zip(summary["runs"], summary["runs"][1:], strict=False):
        assert after["first_line"] == before["acknowledged"] + after["unacknowledged"]


def test_the_store_holds_the_files_line_by_line(run: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    summary, folder = run
    library = Path(sysconfig.get_path("stdlib"))
    lines: dict[str, list[bytes]] = {}
    places: set[tuple[str, int]] = set()
    with mqstore.open(folder / "store", "r") as store:
        for ref in store.queues("stdlib"):
            for message in store.iter(*ref):
                assert message.message_group is not None
                places.add((message.message_group, ref.queue_id))
                lines.setdefault(message.message_group, []).append(message.body)
                assert message.keys == (f"{message.message_group}:{len(lines[message.message_group]) - 1}",)
                assert message.tag == message.message_group.split("/")[0].removesuffix(".py")
    assert sum(map(len, lines.values())) == summary["lines"]
    with mqstore.open(tmp_path) as other:
        other.create_topic("stdlib", queues=8)
        assert places == {(group, other.put("stdlib", b"", message_group=group).queue.queue_id) for group in lines}
    for group, bodies in lines.items():
        data = (library / unquote(group)).read_bytes()
        assert b"".join(bodies) == data
        assert all(body.endswith(b"\n") and body.count(b"\n") == 1 for body in bodies[:-1])


def test_the_mended_copy_has_lost_one_message_and_says_so(run: tuple[dict[str, Any], Path]) -> None:
    summary, folder = run
    with mqstore.open(folder / "copy", "r") as store:
        findings = list(store.verify())
        messages = sum(1 for ref in store.queues("stdlib") for _ in store.iter(*ref))
    assert [finding.kind for finding in findings] == ["bad_record"]
    assert messages == summary["lines"] - 1
    flipped = {flip["kind"]: flip for flip in summary["damage"]["flipped"]}
    assert set(flipped) == {"bad_unit", "bad_index", "bad_record"}
    assert findings[0].file == flipped["bad_record"]["file"]


def test_changed_file_is_reported(
    run: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same sample is read again, from a copy of the store."""
    summary, folder = run

    def one_wrong(*arguments: Any) -> list[demo_module.Source]:
        sources = demo_module_read(*arguments)
        return [replace(sources[0], sha256="0" * 64), *sources[1:]]

    demo_module_read = demo_module.read_sources
    monkeypatch.setattr(demo_module, "read_sources", one_wrong)
    monkeypatch.setattr(demo_module._Demo, "write", lambda work: shutil.copytree(folder / "store", work.store))
    monkeypatch.setattr(demo_module.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    result = CliRunner().invoke(demo, ["--limit-mb", LIMIT_MB, "--seed", str(summary["seed"])])
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert "these do not: files" in result.output
    assert f"{tmp_path} is kept" in result.output
    assert (tmp_path / "store" / "commitlog").is_dir()
    assert not (tmp_path / "copy").exists()


def test_files_whose_path_is_no_message_group_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    for characters in (63, 64):
        (tmp_path / "library" / f"{'a' * (characters - 3)}.py").write_text("line\n")
    sources = demo_module.read_sources(tmp_path / "library", math.inf, random.Random(0))
    assert [len(source.group) for source in sources] == [63]
    with mqstore.open(tmp_path / "store") as store:
        assert store.put("stdlib", b"", message_group=sources[0].group)


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    result = CliRunner().invoke(demo, ["--dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
