"""`mqstore groups`: settings shown and typed alike; deletion forgets all that the group had."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import mqstore as library
from mqstore import RetryPolicy, exponential
from tests.log.support import open_store
from tests.tools.brokers import broker, tables
from tests.tools.support import mqstore, mqstore_json


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """`billing` has consumed two of five messages and holds a third."""
    path = tmp_path / "s"
    with broker(path) as running:
        for i in range(5):
            running.put("orders", b"%d" % i, queue_id=0)
        running.run_once()
        deliveries = running.pop("billing", "orders", 3)
        running.ack("billing", "orders", [each.receipt for each in deliveries[:2]])
    return path


STANDARD, ORDERED = RetryPolicy(), exponential(1, 2, 60)


@pytest.mark.parametrize(
    ("typed", "policy", "shown", "attempts"),
    [
        ("--retry standard --max-attempts 5", STANDARD, "standard", 5),
        ("--retry '10s 1m 10m' --max-attempts 5", RetryPolicy(delays=[10, 60, 600]), "10s 1m 10m", 5),
        ("--retry 0s --max-attempts 5", RetryPolicy(delays=[0]), "0s", 5),
        ("--retry 90s --max-attempts 5", RetryPolicy(delays=[90]), "90s", 5),
        ("--retry '5s x2 2h' --max-attempts 5", exponential(5, 2, 7200), "5s x2 2h", 5),
        ("", STANDARD, "standard", 17),
        ("--no-fifo --retry 3s", RetryPolicy(delays=[3]), "3s", 17),
        ("--fifo", ORDERED, "1s x2 1m", None),  # an ordered group has no limit by default
        ("--fifo --max-attempts 5", ORDERED, "1s x2 1m", 5),
        ("--fifo --retry 3s", RetryPolicy(delays=[3]), "3s", None),
        ("--fifo --retry standard --max-attempts 17", STANDARD, "standard", 17),
    ],
)
def test_a_retry_policy_is_shown_as_typed(
    path: Path, typed: str, policy: RetryPolicy, shown: str, attempts: int | None
) -> None:
    library.open(path).close()

    row = mqstore_json("groups", "create", path, "billing", *shlex.split(typed))

    assert (row["retry"], row["max_attempts"]) == (shown, attempts)
    with tables(path) as parts:
        assert parts.groups.require("billing").retry_policy == policy.with_attempts(attempts)


def test_one_group_is_shown_as_in_the_list(store: Path) -> None:
    [row] = [each for each in mqstore_json("groups", store)["groups"] if each["name"] == "billing"]

    assert mqstore_json("groups", "show", store, "billing") == row
    refused = mqstore("groups", "show", store, "biling")
    assert refused.exit_code == mqstore("groups", "delete", store, "biling", "--dry-run").exit_code > 1
    assert "no group 'biling'" in refused.stderr


def test_omitted_settings_stay(path: Path) -> None:
    library.open(path).close()
    mqstore_json("groups", "create", path, "billing", "--retry", "1s 2s", "--start", "latest", "--fifo")

    first = mqstore_json("groups", "alter", path, "billing", "--max-attempts", "unlimited")
    second = mqstore_json("groups", "alter", path, "billing", "--no-consume", "--retry", "3s")

    assert (first["retry"], first["max_attempts"], first["start"], first["fifo"]) == ("1s 2s", None, "latest", True)
    assert (second["retry"], second["max_attempts"], second["consume"]) == ("3s", None, False)


def test_a_start_may_be_a_time(path: Path) -> None:
    library.open(path).close()

    row = mqstore_json("groups", "create", path, "billing", "--start", "2026-01-31T13:00:00+01:00")

    assert row["start"] == 1_769_860_800_000
    assert "2026-01-31 12:00:00" in mqstore("groups", path).stdout


def test_groups_are_shown_with_the_topics_that_they_consume(store: Path) -> None:
    [row] = mqstore_json("groups", store)["groups"]

    assert (row["name"], row["registered"], row["topics"]) == ("billing", True, ["orders"])
    assert (row["max_attempts"], row["retry"], row["start"], row["fifo"]) == (17, "standard", "earliest", False)
    assert "billing" in mqstore("groups", "list", store).stdout


def test_a_group_that_has_only_progress_is_shown_and_can_be_deleted(path: Path) -> None:
    """A RocketMQ directory whose subscriptionGroup.json went missing."""
    with open_store(path) as opened:
        opened.put("orders", b"hello")
    (path / "config").mkdir(exist_ok=True)
    (path / "config" / "consumerOffset.json").write_text('{"offsetTable":{"orders@old":{0:1}}}')

    [row] = mqstore_json("groups", path)["groups"]
    assert (row["name"], row["registered"], row["topics"]) == ("old", False, ["orders"])

    assert mqstore("groups", "delete", path, "old", "--yes").exit_code == 0
    assert mqstore_json("groups", path)["groups"] == []


def test_deleting_forgets_settings_progress_and_deliveries(store: Path) -> None:
    deleted = mqstore_json("groups", "delete", store, "billing", "--yes")

    assert (deleted, mqstore_json("groups", store)["groups"]) == ({"name": "billing", "topics": ["orders"]}, [])
    assert mqstore_json("inspect", store)["broker"]["in_flight"] == []
    # The pop log still names what the old group held: nobody who opens the store later can see that there were two.
    assert mqstore("groups", "create", store, "billing").exit_code == 0
    with broker(store) as running:
        assert running.pending("billing") == []
        again = running.pop("billing", "orders", 10)
        assert [each.message.body for each in again] == [b"0", b"1", b"2", b"3", b"4"]
