"""`mqstore dlq`: what was given up, why; sent again once, let go of for good."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

import mqstore as library
from mqstore import SimulatedClock
from tests.tools.brokers import broker
from tests.tools.support import mqstore, mqstore_json

FILED_MS = 1_760_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Six dead letters of `billing`, a day apart: of topics orders, payments, orders, ..."""
    path = tmp_path / "s"
    clock = SimulatedClock(FILED_MS)
    with broker(path, clock, dlq_retention=None) as running:
        for i in range(6):
            topic = ("orders", "payments")[i % 2]
            running.put(topic, b"body %d" % i, queue_id=0, keys=f"k-{i}")
            running.run_once()
            [delivery] = running.pop("billing", topic, 1)
            running.dead_letter("billing", topic, delivery.receipt, f"reason {i}")
            clock.advance(86_400_000)
    return path


def at(day: float) -> str:
    return datetime.fromtimestamp((FILED_MS + day * 86_400_000) / 1000, UTC).isoformat()


def bodies(path: Path, topic: str) -> list[bytes]:
    with library.open(path, "r") as opened:
        return [message.body for message in opened.iter(topic)] if topic in opened.topics() else []


def left(path: Path) -> list[int]:
    lines = mqstore("dlq", "show", path, "--group", "billing", "--json").stdout.splitlines()
    return [json.loads(line)["queue_offset"] for line in lines]


def test_without_a_group_each_is_counted(store: Path) -> None:
    found = mqstore_json("dlq", store)

    assert (found["total"], [(row["group"], row["origin_topic"], row["count"]) for row in found["rows"]]) == (
        6,
        [("billing", "orders", 3), ("billing", "payments", 3)],
    )
    shown = [line.split() for line in mqstore("dlq", store).stdout.splitlines()]
    assert ["billing", "orders", "3"] in [line[:3] for line in shown]
    assert ["billing", "orders", "reason", "0", "1"] in shown
    found = mqstore_json("dlq", "list", store, "--group", "billing", "--before", at(2))
    assert [(row["origin_topic"], row["count"]) for row in found["rows"]] == [("orders", 1), ("payments", 1)]


def test_a_letter_is_printed_whole(store: Path) -> None:
    result = mqstore("dlq", "show", store, "--group", "billing", "--offset", 3, "--json", exit_code=0)

    assert base64.b64encode(b"body 3").decode() in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert "body 3" in mqstore("dlq", "show", store, "--group", "billing", "--offset", 3).stdout
    assert len(mqstore("dlq", "show", store, "--group", "billing", "--json").stdout.splitlines()) == 6


def test_a_letter_that_is_not_there_is_a_finding(store: Path) -> None:
    result = mqstore("dlq", "show", store, "--group", "billing", "--offset", 1, "--offset", 6, exit_code=1)

    assert "no dead letter at offset 6" in result.stderr
    assert "body 1" in result.stdout


def test_replay_returns_all_letters(store: Path) -> None:
    planned = mqstore_json("dlq", "replay", store, "--group", "billing", "--all-groups", "--dry-run")

    done = mqstore_json("dlq", "replay", store, "--group", "billing", "--all-groups")

    assert planned == {**done, "dry_run": True}
    [letters] = done["letters"]
    assert (done["count"], letters["topics"], letters["min_offset"]) == (6, {"orders": 3, "payments": 3}, 6)
    assert (bodies(store, "orders")[3:], left(store)) == ([b"body 0", b"body 2", b"body 4"], [])
    again = mqstore("dlq", "replay", store, "--group", "billing")
    assert (again.exit_code, "no dead letters" in again.stdout, len(bodies(store, "orders"))) == (0, True, 6)


def test_chosen_letters_go_where_they_are_sent(store: Path) -> None:
    result = mqstore("dlq", "replay", store, "--group", "billing", "--offset", 0, "--offset", 4, "--to", "repaired")

    assert result.stdout == "sent 2 dead letters of billing: 2 to repaired\n"
    assert (bodies(store, "repaired"), left(store)) == ([b"body 0", b"body 4"], [1, 2, 3, 5])
    again = mqstore("dlq", "replay", store, "--group", "billing", "--offset", 4)
    assert (again.exit_code, "no dead letter of 'billing' at offset 4; nothing was sent" in again.stderr) == (2, True)
    assert mqstore_json("dlq", "replay", store, "--group", "billing")["count"] == 4


PURGES = [([], 6, []), (["--before", at(1.5)], 2, [2, 3, 4, 5]), (["--before", at(-1)], 0, [0, 1, 2, 3, 4, 5])]


@pytest.mark.parametrize(("arguments", "count", "rest"), PURGES, ids=[" ".join(each[0]) for each in PURGES])
def test_letters_are_purged(store: Path, arguments: list[str], count: int, rest: list[int]) -> None:
    planned = mqstore_json("dlq", "purge", store, "--group", "billing", *arguments, "--dry-run")

    done = mqstore_json("dlq", "purge", store, "--group", "billing", *arguments, "--yes")

    assert planned == {"dry_run": True, "group": "billing", "count": count}
    assert (done, left(store)) == ({"dry_run": False, "group": "billing", "count": count}, rest)


def test_a_store_without_dead_letters(path: Path) -> None:
    library.open(path).close()
    assert mqstore("groups", "create", path, "billing").exit_code == 0

    assert mqstore_json("dlq", path) == {"total": 0, "rows": []}
    assert mqstore_json("dlq", path, "--group", "billing") == {"total": 0, "rows": []}
    assert mqstore("dlq", "show", path, "--group", "billing").exit_code == 0
    assert mqstore("dlq", path, "--before", "30d").exit_code == 0
