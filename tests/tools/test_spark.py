"""`mqstore spark`: plans and reports without pyspark, exit codes, and what is said when Spark is missing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from mqstore import SimulatedClock
from mqstore.spark import java
from mqstore.spark.jobs.dlq import dlq_report
from mqstore.spark.jobs.traffic import traffic_report
from mqstore_tools.main import cli
from mqstore_tools.spark import COMMANDS, spark
from tests.tools.brokers import broker, clock_now
from tests.tools.support import mqstore, mqstore_json, seen_on_a_terminal, snapshot

THERE = [name for name in COMMANDS if name in spark.list_commands(click.Context(spark))]
HERE = ("--master", "none")
"""Run without Spark."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`orders` with 10 messages in each of two queues, of which `billing` has consumed 7 and 2; a dead letter."""
    path = tmp_path_factory.mktemp("store") / "s"
    clock = SimulatedClock(clock_now().now_ms() - 3_600_000)
    with broker(path, clock, dlq_retention=None) as running:
        running.topics.create("orders", queues=2)
        for i in range(20):
            running.put(
                "orders", b"body \x1b[31m %d" % i, queue_id=i % 2, keys=["all", f"k-{i}"], properties={"n": str(i)}
            )
        running.commit("billing", "orders", 0, 7)
        running.commit("billing", "orders", 1, 2)
        running.put("other", b"\x1b[2J body", keys="poison")
        running.run_once()
        [delivery] = running.pop("audit", "other", 1)
        running.dead_letter("audit", "other", delivery.receipt, "no such thing")
        clock.advance(60_000)
        running.run_once()
    return path


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pyspark nor Java."""
    monkeypatch.setitem(sys.modules, "pyspark", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)  # type: ignore[arg-type]
    monkeypatch.setattr(java, "find", lambda: None)


def arguments(name: str, store: Path, tmp_path: Path) -> list[object]:
    """A call of the command that is right."""
    more = {"export": [tmp_path / "out"], "trace": ["k-3"], "sql": ["select 1"]}
    return ["spark", name, store, *more.get(name, [])]


MINE = [name for name in ("export", "lag", "traffic", "trace", "dlq", "sql", "shell") if name in THERE]


# -- help --------------------------------------------------------------------------------------------------------------


def test_the_commands_are_all_there() -> None:
    assert {"export", "lag", "traffic", "trace", "dlq", "sql", "shell"} <= set(THERE)


@pytest.mark.parametrize("name", THERE)
def test_every_command_has_help_with_an_example_and_explains_its_options(name: str) -> None:
    shown = mqstore("spark", name, "--help")

    assert shown.exit_code == 0
    assert f"\n    mqstore spark {name}" in shown.stdout
    assert "--json" in shown.stdout
    command = spark.get_command(click.Context(cli), name)
    assert command is not None
    assert command.short_help
    for option in command.params:
        assert not isinstance(option, click.Option) or option.help, (name, option.name)


def test_the_report_of_dead_letters_is_what_dlq_means(store: Path) -> None:
    assert mqstore_json("spark", "dlq", store, *HERE) == mqstore_json("spark", "dlq", "report", store, *HERE)
    assert "mqstore spark dlq report" in mqstore("spark", "dlq", "report", "--help").stdout


@pytest.mark.parametrize("name", ["export", "lag", "traffic", "trace", "dlq", "verify"])
def test_a_terminal_sees_how_far_a_job_is(name: str, store: Path, tmp_path: Path) -> None:
    call = arguments(name, store, tmp_path)
    code, out, seen = seen_on_a_terminal(*call, "--json", *HERE)
    assert code == 0
    assert json.loads(out)
    assert re.search(rb"[a-z]ing .*[ m](\d+)/\1\b", seen, re.DOTALL), seen  # a bar that has come to its end


# -- plans, and no Spark -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MINE)
@pytest.mark.usefixtures("no_spark")
def test_a_dry_run_prints_the_plan_and_starts_nothing(name: str, store: Path, tmp_path: Path) -> None:
    before = snapshot(store)

    found = mqstore_json(*arguments(name, store, tmp_path), "--dry-run")
    shown = mqstore(*arguments(name, store, tmp_path), "--dry-run").stdout

    assert found["dry_run"] is True
    assert list(found["plan"]) == ["stores", "queues", "messages", "bytes", "tasks"]
    assert found["plan"]["stores"] == 1
    assert "tasks" in shown
    assert snapshot(store) == before
    assert [*tmp_path.iterdir()] == []


@pytest.mark.usefixtures("no_spark")
def test_a_plan_counts_what_is_narrowed(store: Path, tmp_path: Path) -> None:
    call = arguments("export", store, tmp_path)

    def plan(*more: object) -> Any:
        return mqstore_json(*call, "--dry-run", *more)["plan"]

    assert plan("--topics", "orders", "--from", 3, "--to", 5)["messages"] == 4
    assert plan("--topics", "orders", "--from", "2h")["messages"] == 20
    assert plan("--topics", "orders", "--from", "30m")["messages"] == 0
    assert plan("--topics", "orders", "--to", "2020-01-01")["messages"] == 0
    assert plan("--option", "minPartitions=2")["tasks"] == 2


@pytest.mark.parametrize("name", MINE)
@pytest.mark.usefixtures("no_spark")
def test_without_spark_one_line_says_what_to_install(name: str, store: Path, tmp_path: Path) -> None:
    result = mqstore(*arguments(name, store, tmp_path))

    assert result.exit_code == 3
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert "pip install 'mqstore[spark]'" in line
    assert java.MISSING in line
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["sql", "shell"])
def test_what_is_nothing_without_spark_says_so(name: str, store: Path, tmp_path: Path) -> None:
    result = mqstore(*arguments(name, store, tmp_path), *HERE)

    assert result.exit_code == 2
    assert "leave --master none out" in result.stderr


# -- wrong usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MINE)
@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--conf", "nonsense"), "--conf 'nonsense' is not NAME=VALUE"),
        (("--option", "nonsense=1"), "no option 'nonsense'"),
        (("--option", "nonsense"), "--option 'nonsense' is not NAME=VALUE"),
        (("--from", "yesterday"), "'yesterday' is neither a time"),
        (("--where", "a = "), "option filter='a = '"),
    ],
)
@pytest.mark.usefixtures("no_spark")
def test_wrong_usage_ends_before_spark_is_looked_for(
    name: str, more: tuple[str, ...], text: str, store: Path, tmp_path: Path
) -> None:
    result = mqstore(*arguments(name, store, tmp_path), *more)

    if more[0] != "--conf":
        assert (result.exit_code, text in result.stderr) == (2, True), result.stderr
    else:
        assert result.exit_code == 2


def test_a_store_that_is_not_there_ends_with_3(tmp_path: Path) -> None:
    for name in ("lag", "traffic", "dlq"):
        result = mqstore("spark", name, tmp_path / "nowhere", *HERE)
        assert (result.exit_code, "nowhere" in result.stderr) == (3, True)


# -- reports -----------------------------------------------------------------------------------------------------------


def test_export_writes_and_goes_on(store: Path, tmp_path: Path) -> None:
    call = ("spark", "export", store, tmp_path / "out", *HERE)

    first = mqstore_json(*call, "--topics", "orders", "--to", 4)
    second = mqstore(*call, "--partition-by", "topic,date")
    third = mqstore(*call)

    assert (first["messages"], first["folder"], first["high_water"]) == (
        8,
        "export=00000001",
        {str(store): {"orders": {"0": 4, "1": 4}}},
    )
    assert second.exit_code == 0
    assert "export=00000002" in second.stdout
    assert ["orders", "0", "10"] in [line.split()[1:] for line in second.stdout.splitlines()]
    assert (third.exit_code, third.stdout) == (0, "")
    assert "nothing new" in third.stderr


def test_export_takes_a_transaction_and_refuses_another_shape(store: Path, tmp_path: Path) -> None:
    call = ("spark", "export", store, tmp_path / "out", *HERE)

    assert mqstore_json(*call, "--txn", "nightly:7")["skipped"] is False
    assert "nightly:7 was written" in mqstore(*call, "--txn", "nightly:7").stderr
    for more, text in (
        (("--txn", "seven"), "is not NAME:NUMBER"),
        (("--columns", "body"), "was exported with columns="),
        (("--columns", "nonsense"), "no column 'nonsense'"),
        (("--partition-by", "tags"), "partition_by"),
    ):
        result = mqstore(*call, *more)
        assert (result.exit_code, text in result.stderr) == (2, True), result.stderr


def test_lag_is_shown_and_its_limits_are_findings(store: Path) -> None:
    call = ("spark", "lag", store, *HERE, "--group", "billing")

    found = mqstore_json(*call)
    over = mqstore_json(*call, "--max-lag", 10, exit_code=1)

    assert [(row["group"], row["topic"], row["lag"]) for row in found["rows"]] == [("billing", "orders", 11)]
    assert 3_000 < found["rows"][0]["lag_seconds"] < 100_000
    assert found["over"] == []
    assert over["over"] == [{"group": "billing", "topic": "orders"}]
    assert mqstore(*call, "--max-lag", 11).exit_code == 0
    assert mqstore(*call, "--max-age", "30m").exit_code == 1
    assert mqstore(*call, "--max-age", "2d").exit_code == 0
    shown = mqstore(*call, "--max-lag", 10)
    assert ["billing", "orders", "2", "11"] in [line.split()[:4] for line in shown.stdout.splitlines()]
    assert "over the limit: group billing on orders: 11 messages" in shown.stderr


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("lag", "--topics", "nope"), "no store knows the topic 'nope'; there are"),
        (("lag", "--group", "nope"), "no store knows the group 'nope'; there are"),
        (("dlq", "--group", "nope"), "no store knows the group 'nope'; there are"),
        (("lag", "--wait", "foo"), "'foo' is no length of time; as in 36h"),
        (("lag", "--max-age", "foo"), "'foo' is no length of time; as in 36h"),
    ],
)
def test_names_and_times_that_are_none_are_wrong_usage(store: Path, call: tuple[str, ...], says: str) -> None:
    shown = mqstore("spark", call[0], store, *call[1:], *HERE)

    assert (shown.exit_code, says in " ".join(shown.stderr.split())) == (2, True), shown.stderr
    assert shown.stdout == ""


@pytest.mark.parametrize("name", ["lag", "verify", "traffic", "dlq"])
def test_a_set_without_stores_is_wrong_usage(name: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mqstore-set.json").write_text('{"version": 1, "stores": {}}')

    shown = mqstore("spark", name, tmp_path / "set", *HERE)

    assert (shown.exit_code, "has no stores" in shown.stderr) == (2, True), (shown.stdout, shown.stderr)


def test_help_of_dead_letters_tells_of_sending_them() -> None:
    assert "mqstore spark dlq resend 'fleet/*'" in mqstore("spark", "dlq", "--help").stdout


def test_an_earlier_look_can_be_compared_with(store: Path, tmp_path: Path) -> None:
    call = ("spark", "lag", store, *HERE)
    earlier = mqstore_json(*call)
    earlier["taken_ms"] -= 10_000
    (tmp_path / "then.json").write_text(json.dumps(earlier))
    (tmp_path / "wrong.json").write_text("[1]")
    (tmp_path / "worse.json").write_text("{")
    (tmp_path / "null.json").write_text("null")
    (tmp_path / "endless.json").write_text('{"queues": [], "taken_ms": 1e999}')

    found = mqstore_json(*call, "--previous", tmp_path / "then.json")
    shown = mqstore(*call, "--previous", tmp_path / "then.json").stdout

    billing = next(row for row in found["rows"] if row["group"] == "billing")
    assert (billing["stuck_queues"], billing["consumed_per_second"]) == (2, 0)
    assert "consumed/s" in shown
    assert "stays at" in shown
    for name in ("wrong", "worse", "null", "endless"):
        result = mqstore(*call, "--previous", tmp_path / f"{name}.json")
        assert (result.exit_code, "report of lag" in result.stderr or "--previous" in result.stderr) == (2, True)
    assert mqstore(*call, "--previous", tmp_path / "then.json", "--wait", "1s").exit_code == 2
    assert mqstore(*call, "--group", "nobody").exit_code == 2


def test_looking_twice_waits_in_between(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("mqstore_tools.spark.lag.time.sleep", waited.append)

    found = mqstore_json("spark", "lag", store, *HERE, "--wait", "30s")

    assert waited == [30.0]
    assert found["previous_ms"] is not None
    assert all(row["stuck"] is not None for row in found["queues"])


def test_traffic_prints_what_the_library_reports(store: Path) -> None:
    call = ("spark", "traffic", store, *HERE)

    assert mqstore_json(*call, "--interval", "5m", "--by", "topic,queue_id", "--top", 3) == json.loads(
        json.dumps(traffic_report(None, store, interval="5m", by=("topic", "queue_id"), top=3).to_dict())
    )
    shown = mqstore(*call).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert any(line[:2] == ["orders", "20"] for line in lines)
    assert any(line[:2] == ["all", "21"] for line in lines)
    assert ["orders", "all", "20"] in lines
    assert mqstore(*call, "--topics", "orders", "--from", "10m").stderr == "no messages\n"
    for more, text in ((("--interval", "fast"), "interval='fast'"), (("--by", "tag"), "by=")):
        result = mqstore(*call, *more)
        assert (result.exit_code, text in result.stderr) == (2, True)


def test_a_trace_is_in_order_and_none_is_a_finding(store: Path) -> None:
    call = ("spark", "trace", store, *HERE)

    found = mqstore_json(*call, "poison")
    shown = mqstore(*call, "poison").stdout
    nothing = mqstore(*call, "nobody")

    assert [hop["kind"] for hop in found["hops"]] == ["sent", "dead letter"]
    assert [hop["message_id"] for hop in mqstore_json(*call, "poison", "--scan-log")["hops"]] == [
        hop["message_id"] for hop in found["hops"]
    ]
    assert "because no such thing" in shown
    assert (nothing.exit_code, "no message bears nobody" in nothing.stderr) == (1, True)
    assert mqstore(*call, "two words").exit_code == 2


def test_dead_letters_are_counted_and_shown_escaped(store: Path) -> None:
    call = ("spark", "dlq", store, *HERE)

    assert mqstore_json(*call) == json.loads(json.dumps(dlq_report(None, store, reasons=5).to_dict()))
    shown = mqstore(*call).stdout
    assert ["audit", "other", "1"] in [line.split()[:3] for line in shown.splitlines()]
    assert "no such thing" in shown
    assert "x1b[2J body" in shown
    assert mqstore(*call, "--group", "billing").stderr == "no dead letters\n"
