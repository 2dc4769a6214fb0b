"""`mqstore spark replay`, `dlq resend` without Spark: output and exit codes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mqstore.spark.jobs.resend import ResendReport
from mqstore.spark.jobs.rewrite import RewriteReport
from tests.spark.copies import fail, members, messages, tree
from tests.spark.support import many, write_store
from tests.tools.support import mqstore, mqstore_json

HERE = ("--master", "none")
PAGE = Path(__file__).parent.parent.parent / "docs" / "spark-rewrites.md"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "s", many(40))


def arguments(name: str, store: Path, dest: Path) -> list[object]:
    """A call that is right, but for --master."""
    return ["spark", name, store, dest]


NAMES = ("replay",)
SHAPES: dict[str, Any] = {
    "replay": RewriteReport,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_json_is_the_report_and_people_see_a_table(name: str, store: Path, tmp_path: Path) -> None:
    found = mqstore_json(*arguments(name, store, tmp_path / "t"), *HERE)
    again = mqstore(*arguments(name, store, tmp_path / "t"), *HERE)
    (tmp_path / "u").mkdir()
    shown = mqstore(*arguments(name, store, tmp_path / "u" / "t"), *HERE)

    extra = {"messages", "already"} if name == "replay" else set()
    assert set(found) == {*SHAPES[name].__dataclass_fields__} | extra
    assert again.exit_code == 0
    assert "nothing" in again.stderr
    assert again.stdout == ""
    assert shown.exit_code == 0
    assert str(found["id"])[:4] in shown.stdout or name in shown.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_prints_a_plan_and_writes_nothing(name: str, store: Path, tmp_path: Path) -> None:
    call = arguments(name, store, tmp_path / "t")
    before = tree(tmp_path)

    found = mqstore_json(*call, "--dry-run")
    shown = mqstore(*call, "--dry-run")

    assert found["dry_run"] is True
    assert found["plan"]["tasks"] >= 1
    assert "tasks" in shown.stdout
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", [*NAMES, "dlq resend"])
def test_help_has_examples_and_explains_every_option(name: str) -> None:
    shown = mqstore("spark", *name.split(), "--help")

    assert shown.exit_code == 0
    assert f"\n    mqstore spark {name}" in shown.stdout
    assert "--dry-run" in shown.stdout


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("replay", ["--queues", "0"], "--queues"),
        ("replay", ["--rename", "t"], "not NAME=VALUE"),
        ("replay", ["--topics", "t", "--rename", "t=%DLQ%x"], "belongs to a group"),
        ("replay", ["--dest", "elsewhere"], "2 targets"),
        ("replay", ["--target", "heap"], "heap"),
        ("replay", ["--from", "24h"], "--id"),
        ("replay", ["--to", "1h"], "--id"),
    ],
)
def test_wrong_usage_ends_with_2_and_writes_nothing(
    name: str, more: list[str], says: str, store: Path, tmp_path: Path
) -> None:
    call = arguments(name, store, tmp_path / "t")
    before = tree(tmp_path)

    for how in (HERE, ("--dry-run",)):  # which makes the checks of the run
        shown = mqstore(*call, *more, *how)

        assert (shown.exit_code, says in re.sub(r"\s+", " ", shown.stderr)) == (2, True), (how, shown.stderr)
        assert tree(tmp_path) == before


@pytest.mark.parametrize("name", NAMES)
def test_a_target_inside_the_source_is_refused_by_a_dry_run_too(name: str, store: Path) -> None:
    before = tree(store)

    shown = mqstore(*arguments(name, store, store / "t"), "--dry-run")

    assert shown.exit_code == 2
    assert "lie in one another" in re.sub(r"\s+", " ", shown.stderr)
    assert tree(store) == before


@pytest.mark.parametrize("name", NAMES)
def test_an_age_as_bound_with_a_name_is_the_same_run_when_it_is_run_again(
    name: str, store: Path, tmp_path: Path
) -> None:
    call = [*arguments(name, store, tmp_path / "t"), "--to", "1s", "--id", "mine", *HERE]

    first, second = mqstore_json(*call), mqstore(*call)
    dry = mqstore(*call, "--dry-run")

    assert first["id"] == "mine"
    assert sum(map(len, messages(tmp_path / "t").values())) >= 40
    assert "written before" in second.stderr
    assert "mine was written before" in dry.stderr
    assert mqstore_json(*call, "--dry-run")["plan"]["already"] is True


def test_routes_renames_and_sets_are_understood(store: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    found = mqstore_json(
        "spark", "replay", store, a, "--dest", b, "--topics", "t,orders", "--route", f"t={a},orders={b}",
        "--rename", "t=x", "--target", "set", "--tag", "--id", "one", *HERE,
    )  # fmt: skip

    assert found["id"] == "one"
    [mine], [its] = members(a), members(b)
    assert {key[0] for key in messages(mine)} == {"x"}
    assert {key[0] for key in messages(its)} == {"orders"}
    assert all(dict(copy.properties)["REPLAY_ID"] == "one" for copies in messages(mine).values() for copy in copies)


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


def test_the_commands_of_the_page_run_one_after_the_other_and_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    [first, *_] = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    exec(compile(first, "page", "exec"), {"__name__": "page"})
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M) for line in block.splitlines()]
    assert len(lines) >= 4

    for _ in range(2):
        for line in lines:
            if line.startswith("mqstore "):
                shown = mqstore(*shlex.split(line)[1:])
                assert shown.exit_code == 0, (line, shown.stderr)
            else:
                subprocess.run(line, shell=True, check=True)
