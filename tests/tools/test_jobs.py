"""Commands that take one store or many: reports, and their limits as exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mqstore.jobs import traffic_report
from tests.log.support import open_store
from tests.tools.support import environment, mqstore, mqstore_json, seen_on_a_terminal


def arguments(name: str, *stores: Path) -> list[object]:
    """A call of the command that is right."""
    return [name, *stores, *{"trace": ["k-3"]}.get(name, [])]


REPORTS = ["lag", "report", "trace", "dlq"]


@pytest.mark.parametrize("name", REPORTS)
def test_terminal_shows_job_progress(name: str, store: Path) -> None:
    code, out, seen = seen_on_a_terminal(*arguments(name, store), "--json")

    assert code == 0
    assert json.loads(out)["version"] == 1
    assert re.search(r"[a-z]ing .*[ m](\d+)/\1\b", seen, re.DOTALL), seen  # a bar that has come to its end


_BARE = """
import json, sys
sys.modules["pyarrow"] = None
from mqstore_tools.main import main
for call in json.loads(sys.argv[1]):
    sys.argv[1:] = call
    try:
        main()
    except SystemExit as end:
        print("ended", call[0], end.code, file=sys.stderr)
"""


def test_only_an_export_to_parquet_needs_pyarrow(store: Path, tmp_path: Path) -> None:
    """It is the only one that says what to install."""
    filtered = ["report", store, "--where", "TAGS is null", "--option", "keys=k-3", "--option", "tags=*"]
    calls = [*(arguments(name, store) for name in (*REPORTS, "verify", "export")), filtered]
    calls.append(["export", store, "--to", tmp_path / "out"])
    words = json.dumps([[*map(str, call)] for call in calls])

    done = subprocess.run([sys.executable, "-c", _BARE, words], env=environment(), capture_output=True, text=True)

    ends = re.findall(r"^ended (\w+) (\d)$", done.stderr, re.MULTILINE)
    assert ends == [*((str(call[0]), "0") for call in calls[:-1]), ("export", "2")], done.stderr
    assert done.stderr.count("pip install 'mqstore[spark]'") == 1


def test_lag_is_shown_and_its_limits_are_findings(store: Path) -> None:
    call = ("lag", store, "--group", "billing")

    found = mqstore_json(*call)
    over = mqstore_json(*call, "--max-lag", 10, exit_code=1)

    assert [(row["group"], row["messages"]) for row in found["groups"]] == [("billing", 11)]
    assert 3_000_000 < found["groups"][0]["oldest_age_ms"] < 100_000_000
    assert found["over"] == []
    assert over["over"] == ["billing"]
    assert mqstore(*call, "--max-lag", 11).exit_code == 0
    assert mqstore(*call, "--max-age", "30m").exit_code == 1
    assert mqstore(*call, "--max-age", "2d").exit_code == 0
    shown = mqstore(*call, "--max-lag", 10)
    assert ["billing", "11", "0", "0"] in [line.split()[:4] for line in shown.stdout.splitlines()]
    assert "over the limit: group billing: 11 messages" in shown.stderr


def test_traffic_prints_what_the_library_reports(store: Path) -> None:
    call = ("report", store)

    assert mqstore_json(*call, "--interval", "5m", "--by", "topic,queue_id")["traffic"] == json.loads(
        json.dumps(traffic_report(store, interval="5m", by=("topic", "queue_id")).to_dict())
    )
    shown = mqstore(*call).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert any(line[:2] == ["orders", "20"] for line in lines)
    assert any(line[:2] == ["all", "21"] for line in lines)
    assert mqstore(*call, "--topic", "orders", "--from", "10m").stderr == "no messages\n"


def test_traffic_reports_damage_alone(tmp_path: Path) -> None:
    with open_store(tmp_path) as damaged:
        damaged.put("orders", b"hello")
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as log:
        log.write(b"spoilt!!")  # length and magic

    found = mqstore("report", tmp_path, "--option", "onCorrupt=skip")
    assert found.stderr == "no messages\n1 damaged messages were skipped\n"


def test_a_trace_is_in_order_and_none_is_a_finding(store: Path) -> None:
    call = ("trace", store)

    found = mqstore_json(*call, "poison")
    shown = mqstore(*call, "poison").stdout
    nothing = mqstore(*call, "nobody")

    [history] = found["messages"]
    assert [event["event"] for event in history["events"]] == ["stored", "delivered", "dead letter"]
    assert "no such thing" in shown
    assert (nothing.exit_code, "no message has the key nobody" in nothing.stderr) == (1, True)
    assert mqstore(*call, " ").exit_code == 2


def test_an_export_to_a_folder_writes_it_once(store: Path, tmp_path: Path) -> None:
    call = ("export", store, "--to", tmp_path / "out")

    some = mqstore_json(*call, "--topic", "orders", "--option", 'endingOffsets={"orders":{"0":4,"1":4}}')
    again = mqstore(*call)
    nothing = mqstore("export", store, "--to", tmp_path / "none", "--from", "1s")

    assert (some["messages"], some["path"]) == (8, str(tmp_path / "out"))
    assert (again.exit_code, "exists and is not an empty folder" in again.stderr) == (2, True)
    assert (nothing.exit_code, "no messages; " in nothing.stderr) == (0, True)
    assert str(tmp_path / "all") in mqstore("export", store, "--to", tmp_path / "all", exit_code=0).stdout
