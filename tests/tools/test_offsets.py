"""`mqstore offsets`: what is committed, and a reset that holds, whatever the pop log remembers."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from mqstore import SimulatedClock
from tests.conftest import Golden
from tests.log.support import open_store
from tests.tools.brokers import broker, tables
from tests.tools.support import mqstore, mqstore_json

STORED_MS = 1_750_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """`orders`, two queues: ten messages in queue 0, one a second, four consumed; three in queue 1, none consumed."""
    path = tmp_path / "s"
    clock = SimulatedClock(STORED_MS)
    with broker(path, clock) as running:
        running.topics.create("orders", queues=2)
        for i in range(10):
            running.put("orders", b"%d" % i, queue_id=0)
            if i < 3:
                running.put("orders", b"q1-%d" % i, queue_id=1)
            clock.advance(1000)
        running.groups.create("billing")
        running.commit("billing", "orders", 0, 4)
    return path


def committed(path: Path, group: str) -> dict[tuple[str, int], int]:
    with tables(path) as parts:
        return parts.offsets.of_group(group)


def test_offsets_are_shown_beside_the_bounds_of_their_queues(store: Path) -> None:
    rows = mqstore_json("offsets", store)["offsets"]

    assert [list(row.values()) for row in rows] == [
        ["billing", "orders", 0, 0, 4, 10, 6, 0],
        ["billing", "orders", 1, 0, None, 3, None, 0],
    ]
    assert list(rows[0]) == [
        "group", "topic", "queue_id", "min_offset", "committed", "max_offset", "behind", "lost",
    ]  # fmt: skip
    assert mqstore_json("offsets", "show", store, "--group", "billing", "--topic", "orders")["offsets"] == rows
    shown = mqstore("offsets", store).stdout
    assert [line.split()[2:] for line in shown.splitlines() if "billing" in line] == [
        ["0", "0", "4", "10", "6", "0"],
        ["1", "0", "-", "3", "-", "0"],
    ]


def test_messages_before_a_group_are_lost(store: Path) -> None:
    with open_store(store) as opened:
        opened.put("orders", b"x" * 60_000, 0)
        opened.put("orders", b"x" * 60_000, 0)
        opened.put("orders", b"x" * 60_000, 0)
        opened.flush()
        opened.dispatch()
        opened.drop_before(opened.max_offset)
        low, high = opened.offsets("orders", 0)
    assert low > 4

    row = mqstore_json("offsets", store)["offsets"][0]

    assert (row["min_offset"], row["committed"], row["lost"], row["behind"]) == (low, 4, low - 4, high - low)


def test_a_java_store_without_config_has_no_progress(golden: Golden) -> None:
    assert mqstore_json("offsets", golden("clean").path) == {"offsets": []}


ISO = datetime.fromtimestamp((STORED_MS + 7_000) / 1000, UTC).isoformat()
RESETS = [
    (["--to", "earliest"], {0: 0, 1: 0}),
    (["--to", "latest"], {0: 10, 1: 3}),
    (["--to", "3"], {0: 3, 1: 3}),
    (["--to", "7", "--queue-id", "0"], {0: 7}),
    (["--to", ISO], {0: 7, 1: 3}),
    (["--to", ISO.replace("+00:00", "")], {0: 7, 1: 3}),  # UTC unless it says otherwise
    (["--to", "1s"], {0: 10, 1: 3}),
    (["--to", "9999d"], {0: 0, 1: 0}),
]


@pytest.mark.parametrize(("arguments", "expected"), RESETS, ids=[" ".join(each[0]) for each in RESETS])
def test_reset_moves_the_group(store: Path, arguments: list[str], expected: dict[int, int]) -> None:
    where = ["--group", "billing", "--topic", "orders", *arguments]
    planned = mqstore_json("offsets", "reset", store, *where, "--dry-run")

    done = mqstore_json("offsets", "reset", store, *where, "--yes")

    assert done == {**planned, "dry_run": False}
    assert {row["queue_id"]: row["to"] for row in done["queues"]} == expected
    kept = {0: 4} | expected
    assert committed(store, "billing") == {("orders", queue): offset for queue, offset in kept.items()}


def test_a_plan_says_what_is_skipped_and_what_comes_again(store: Path) -> None:
    where = ["--group", "billing", "--topic", "orders", "--dry-run"]
    forth = mqstore_json("offsets", "reset", store, *where, "--to", "latest")["queues"]
    back = mqstore_json("offsets", "reset", store, *where, "--to", "earliest")["queues"]

    assert [(row["from"], row["to"], row["skipped"], row["again"]) for row in forth] == [(4, 10, 6, 0), (None, 3, 3, 0)]
    assert [(row["from"], row["to"], row["skipped"], row["again"]) for row in back] == [(4, 0, 0, 4), (None, 0, 0, 0)]
    assert "would reset group billing" in mqstore("offsets", "reset", store, *where, "--to", "latest").stdout
    refused = mqstore("offsets", "reset", store, *where, "--to", "4", exit_code=2)
    assert "must be 0..3" in refused.stderr  # queue 1 has no more


@pytest.mark.parametrize("order", [False, True], ids=["standard", "fifo"])
@pytest.mark.parametrize("to", [0, 2, 9])
def test_a_reset_holds_against_what_the_pop_log_remembers(path: Path, order: bool, to: int) -> None:
    """The pop log names the batches in flight and where the queue stood behind them. Were it not told of the reset, the
    next start would put the group back there, with the deliveries of before."""
    with broker(path) as running:
        running.topics.create("orders", queues=1)
        for i in range(10):
            running.put("orders", b"%d" % i)
        running.run_once()
        first = running.pop("billing", "orders", 6, order=order, local=False)
        running.ack("billing", "orders", [first[0].receipt])

    result = mqstore("offsets", "reset", path, "--group", "billing", "--topic", "orders", "--to", str(to), "--yes")

    assert result.exit_code == 0, result.output
    with broker(path) as running:
        assert running.pending("billing") == []
        found = running.pop("billing", "orders", 32, order=order)
        assert [int(each.message.body) for each in found] == list(range(to, 10))


@pytest.mark.parametrize("order", [False, True], ids=["standard", "fifo"])
def test_holds_of_other_groups_stay(store: Path, order: bool) -> None:
    """The next broker gives what its predecessor's receivers held to others at once; a command is not a broker."""
    with broker(store) as running:
        running.pop("ledger", "orders", 2, queue_id=0, order=order, local=True, invisible=600)
    found = mqstore_json("inspect", store)
    before, file = found["broker"], found["order_info"]

    where = ["--group", "billing", "--topic", "orders", "--to", "latest"]
    assert mqstore("offsets", "reset", store, *where, "--yes").exit_code == 0

    found = mqstore_json("inspect", store)
    after = found["broker"]
    assert found["order_info"] == file  # which another program may read
    assert after["in_flight"] == before["in_flight"]
    assert [each["messages"] for each in after["in_flight"]] == [2]
    assert after["order_info"] == before["order_info"]
