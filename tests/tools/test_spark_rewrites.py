"""`mqstore spark replay`, `mirror`, `import`, `compact`, `dedup`, `dlq resend` without Spark: output and exit codes."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mqstore import MessageStore
from mqstore.jobs.resend import ResendReport
from mqstore.spark.jobs.compact import CompactReport
from mqstore.spark.jobs.importing import ImportReport
from mqstore.spark.jobs.mirror import MirrorReport
from mqstore.spark.jobs.rewrite import RewriteReport
from tests.spark.copies import fail, members, messages, tree
from tests.spark.support import many, write_store
from tests.tools.support import mqstore, mqstore_json, process

HERE = ("--master", "none")
PAGE = Path(__file__).parent.parent.parent / "docs" / "spark-rewrites.md"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "s", many(40))


def arguments(name: str, store: Path, dest: Path) -> list[object]:
    """A call that is right, but for --master."""
    if name == "import":
        (store.parent / "f.csv").write_text("body,topic\nhello,t\n")
        return ["spark", "import", store.parent / "f.csv", dest, "--format", "csv"]
    more = {"mirror": ["--checkpoint", dest.parent / "cp"]}
    return ["spark", name, store, dest, *more.get(name, [])]


NAMES = ("replay", "mirror", "import", "compact", "dedup")
SHAPES: dict[str, Any] = {
    "replay": RewriteReport, "mirror": MirrorReport, "import": ImportReport, "compact": CompactReport,
    "dedup": CompactReport,
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
        ("mirror", ["--from", "3"], "no bounds"),
        ("mirror", ["--max-bytes", "9", "--max-messages", "9"], "exclude"),
        ("import", ["--topic", "t", "--map", "body=nothing"], "names no column"),
        ("import", ["--map", "colour=body"], "no 'colour'"),
        ("compact", ["--retention", "soon"], "as in 36h"),
        ("compact", ["--no-tombstones", "--retention", "1d"], "tombstones"),
        ("compact", ["--key", ","], "key="),
        ("dedup", ["--window", "soon"], "as in 36h"),
        ("replay", ["--from", "24h"], "--id"),
        ("replay", ["--to", "1h"], "--id"),
        ("compact", ["--from", "24h"], "--id"),
        ("dedup", ["--to", "7d"], "--id"),
        ("dedup", ["--target", "inbox"], "inbox"),
    ],
)
def test_wrong_usage_ends_with_2_and_writes_nothing(
    name: str, more: list[str], says: str, store: Path, tmp_path: Path
) -> None:
    call = arguments(name, store, tmp_path / "t")
    before = tree(tmp_path)

    for how in (HERE, ("--dry-run",)):  # which makes the checks of the run
        if name == "import" and how != HERE:
            continue
        shown = mqstore(*call, *more, *how)

        assert (shown.exit_code, says in re.sub(r"\s+", " ", shown.stderr)) == (2, True), (how, shown.stderr)
        assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["replay", "mirror", "compact", "dedup"])
def test_a_target_inside_the_source_is_refused_by_a_dry_run_too(name: str, store: Path) -> None:
    before = tree(store)

    shown = mqstore(*arguments(name, store, store / "t"), "--dry-run")

    assert shown.exit_code == 2
    assert "lie in one another" in re.sub(r"\s+", " ", shown.stderr)
    assert tree(store) == before


@pytest.mark.parametrize("name", ["replay", "compact", "dedup"])
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


def test_refused_rows_are_counted_and_kept_or_end_it(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text('body,tags\nx,a\ny,a|b\n"",c\n')
    call = ["spark", "import", tmp_path / "f.csv", tmp_path / "t", "--format", "csv", "--topic", "t", *HERE]

    ended = mqstore(*call)
    kept = mqstore(*call, "--refused", tmp_path / "no")

    assert ended.exit_code == 2
    assert "row 1" in ended.stderr
    assert kept.exit_code == 0
    assert "refused" in kept.stdout
    assert pq.read_table(tmp_path / "no").num_rows == 1
    with MessageStore(tmp_path / "t", "r") as store:
        assert sum(store.offsets(*ref)[1] for ref in store.queues("t")) == 2


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
    assert len(lines) >= 10

    for _ in range(2):
        for line in lines:
            if line.startswith("mqstore "):
                shown = mqstore(*shlex.split(line)[1:])
                assert shown.exit_code == 0, (line, shown.stderr)
            else:
                subprocess.run(line, shell=True, check=True)

    assert messages(tmp_path / "backup" / "mq") == messages(tmp_path / "var" / "mq")
    with MessageStore("var/latest", "r") as store:
        assert sum(store.offsets(*ref)[1] for ref in store.queues("orders")) == 4


def test_a_mirror_that_goes_on_ends_with_ctrl_c_and_tells_what_it_did(store: Path, tmp_path: Path) -> None:
    call = ["spark", "mirror", store, tmp_path / "t", "--checkpoint", tmp_path / "cp", "--continuous", "--json", *HERE]
    with process(*call) as running:
        try:
            deadline = time.monotonic() + 60
            while running.poll() is None and not (tmp_path / "cp").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            said, errors = running.communicate(timeout=60)
        finally:
            running.kill()

    assert running.returncode == 0, errors.decode()
    assert json.loads(said)["messages"] == sum(map(len, messages(tmp_path / "t").values())) == 41
