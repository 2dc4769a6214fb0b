"""`mqstore spark dlq resend` without Spark: output and exit codes."""

from __future__ import annotations

from pathlib import Path

from mqstore.spark.jobs.resend import ResendReport
from tests.spark.copies import fail, tree
from tests.tools.support import mqstore, mqstore_json

HERE = ("--master", "none")


def test_help_has_examples_and_explains_every_option() -> None:
    shown = mqstore("spark", "dlq", "resend", "--help")

    assert shown.exit_code == 0
    assert "\n    mqstore spark dlq resend" in shown.stdout
    assert "--dry-run" in shown.stdout


def test_dead_letters_are_counted_and_sent(tmp_path: Path) -> None:
    fail(tmp_path / "s", 4)
    before = tree(tmp_path)
    dry = mqstore_json("spark", "dlq", "resend", tmp_path / "s", "--dry-run")
    assert tree(tmp_path) == before
    nobody = mqstore("spark", "dlq", "resend", tmp_path / "s", "--group", "billing", "--group", "nosuch", *HERE)
    assert (nobody.exit_code, "no store knows the group 'nosuch'" in nobody.stderr) == (2, True)
    assert mqstore_json("spark", "dlq", "resend", tmp_path / "s", "--dry-run") == dry  # nothing was sent
    shown = mqstore("spark", "dlq", "resend", tmp_path / "s", "--where", "dlq_reason = 'timeout'", *HERE)
    rest = mqstore_json("spark", "dlq", "resend", tmp_path / "s", "--group", "billing", *HERE)

    assert dry["dry_run"] is True
    assert set(dry["plan"]) == {"stores", "queues", "messages", "bytes", "tasks", "letters"}
    assert (dry["plan"]["messages"], dry["plan"]["letters"][0]["topics"]) == (4, {"orders": 4})
    assert set(rest) == {*ResendReport.__dataclass_fields__}
    assert "orders" in shown.stdout
    assert (rest["resent"], rest["stores"][0]["topics"]) == (2, {"orders": 2})
    assert mqstore("spark", "dlq", "resend", tmp_path / "s", "--to-topic", "%DLQ%x", *HERE).exit_code == 2
