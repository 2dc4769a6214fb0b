"""`mqstore bench`: runs, counts what it should, and cleans up. How fast it is, is not a test's business."""

from __future__ import annotations

from pathlib import Path

from tests.tools.support import mqstore, mqstore_json

SMALL = ("--messages", 20, "--body-bytes", 10)


def test_every_test_is_run_and_nothing_stays(tmp_path: Path) -> None:
    found = mqstore_json("bench", *SMALL, "--directory", tmp_path)

    assert found["body_bytes"] == 10
    assert [(r["name"], r["messages"]) for r in found["results"]] == [
        ("put, append", 20),
        ("put_many of 1000, append", 20),
        ("put, flush", 20),
        ("read as messages", 20),
        ("verify", 20),
    ]
    assert all(r["per_second"] > 0 for r in found["results"])
    assert "put_many of 1000" in mqstore("bench", *SMALL, "--directory", tmp_path, exit_code=0).stdout
    assert list(tmp_path.iterdir()) == []
