"""`mqstore.testing` and its fixtures of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mqstore
from mqstore.testing import StoreClock, temporary_store
from tests.pages import ROOT, examples


def _pytest(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a test module elsewhere, as a user would: its plugins are those that are installed."""
    (folder / "test_page.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *options, "test_page.py"]
    return subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)


def test_tests_of_the_page_pass(tmp_path: Path) -> None:
    [page] = [code for code in examples(ROOT / "docs" / "testing.md") if "def test_" in code]
    for fixture in ("mq_store", "mq_clock", "mq_server"):
        assert fixture in page
    done = _pytest(tmp_path, page)
    assert f"{page.count('def test_')} passed" in done.stdout, done.stdout + done.stderr


def test_pytest_does_not_import_mqstore_by_itself(tmp_path: Path) -> None:
    code = 'import sys\ndef test_modules(): assert "pytest_mqstore" in sys.modules and "mqstore" not in sys.modules\n'
    done = _pytest(tmp_path, code)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_fixtures_are_documented(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "", "--fixtures")
    for fixture in ("mq_store", "mq_clock", "mq_server"):
        assert f"{fixture} -- " in done.stdout


def test_mqstore_does_not_import_pytest() -> None:
    code = "import sys, mqstore, mqstore.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("fails", [False, True])
def test_store_is_closed_and_removed(fails: bool) -> None:
    with pytest.raises(KeyError) if fails else temporary_store(), temporary_store(max_message_size=3) as store:
        store.put("t", b"abc")
        with pytest.raises(mqstore.errors.InvalidMessageError):
            store.put("t", b"abcd")
        assert store.path.is_dir()
        if fails:
            raise KeyError
    assert store.closed
    assert not store.path.exists()


def test_time_passes_for_a_store_without_its_clock(mq_store: mqstore.Store) -> None:
    jobs = mq_store.queue("jobs")
    jobs.put(b"later", delay=0.05)
    assert jobs.get(timeout=60).value == b"later"


def test_advance_does_all_that_is_due(mq_store: mqstore.Store, mq_clock: StoreClock) -> None:
    jobs = mq_store.queue("jobs", visibility=60)
    jobs.put(b"first")
    jobs.put(b"later", delay=3600)
    assert jobs.get(block=False).value == b"first"
    mq_clock.advance(59_999)
    assert jobs.get_many(2) == []
    mq_clock.advance(1)
    again = jobs.get(block=False)
    assert (again.value, again.attempt) == (b"first", 2)
    again.ack()
    mq_clock.advance(3_540_000)
    assert [task.value for task in jobs] == [b"later"]


def test_server_serves_the_store_of_the_test(mq_server: str, mq_store: mqstore.Store, mq_clock: StoreClock) -> None:
    with mqstore.connect(mq_server) as client:
        client.queue("jobs").put(b"later", delay=60)
        jobs = mq_store.queue("jobs")
        assert jobs.get_many(1) == []
        mq_clock.advance(60_000)
        assert jobs.get(block=False).value == b"later"


def test_largest_message_fits(mq_store: mqstore.Store) -> None:
    body = bytes(4 << 20)
    receipt = mq_store.put("t", body)
    assert mq_store.read(*receipt.queue, receipt.offset)[0].body == body
