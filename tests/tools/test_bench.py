"""`mqstore bench`: runs, counts what it should, and cleans up. How fast it is, is not a test's business."""

from __future__ import annotations

from pathlib import Path

from tests.tools.support import mqstore, mqstore_json

SMALL = ("--messages", 500, "--body-bytes", 10, "--syncs", 3)


def test_every_test_is_run_and_nothing_stays(tmp_path: Path) -> None:
    found = mqstore_json("bench", *SMALL, "--directory", tmp_path)

    assert found["body_bytes"] == 10
    assert [(r["name"], r["messages"]) for r in found["results"]] == [
        ("put, append", 500),
        ("put_many of 1000, append", 500),
        ("put, flush", 3),
        ("read as messages", 500),
        ("verify", 500),
    ]
    assert all(r["per_second"] > 0 for r in found["results"])
    assert list(tmp_path.iterdir()) == []


def test_for_people_it_is_a_table(tmp_path: Path) -> None:
    shown = mqstore("bench", *SMALL, "--directory", tmp_path)

    assert shown.exit_code == 0
    assert "put_many of 1000" in shown.stdout


def test_a_directory_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    assert mqstore("bench", "--directory", tmp_path / "nonesuch").exit_code == 2
