"""`mqstore delay`: what the services say that waits, told from their files; cancelling."""

from __future__ import annotations

from pathlib import Path

import pytest

import mqstore as library
from tests.log.support import flip, open_store
from tests.tools.brokers import broker, clock_now
from tests.tools.support import mqstore, mqstore_json, snapshot


def test_levels_are_shown_with_what_waits_and_when_the_first_is_due(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", clock_now()
    begin_ms = clock.now_ms()
    with broker(path, clock) as running:
        running.put("orders", b"1", delay_level=1)
        running.put("orders", b"2", delay_level=3)
        running.run_once()
        clock.advance(1000)
        running.run_once()
        running.put("orders", b"3", delay_level=3)

    levels = mqstore_json("delay", path)["levels"]

    assert [list(level.values()) for level in levels] == [
        [1, 1_000, 1, 1, 0, None, 0],
        [3, 10_000, 0, 2, 2, begin_ms + 10_000, 0],
    ]
    assert list(levels[0]) == ["level", "delay_ms", "offset", "end", "waiting", "next_due_ms", "overdue_ms"]
    shown = [line.split()[:5] for line in mqstore("delay", "show", path).stdout.splitlines()]
    assert ["3", "10s", "0", "2", "2"] in shown
    assert ["timer", "any", "-", "-", "0"] in shown


def test_the_oldest_overdue_message_is_shown(path: Path) -> None:
    clock = clock_now()
    clock.set_wall(clock.now_ms() - 3_600_000)
    with broker(path, clock) as running:
        running.put("orders", b"x", delay_level=5)

    [level] = mqstore_json("delay", path)["levels"]

    assert level["overdue_ms"] >= 3_540_000
    assert "overdue" in mqstore("delay", path).stdout


def test_a_level_that_the_table_lost_is_an_orphan(path: Path) -> None:
    with broker(path, delay_levels="1s 1h") as running:
        running.put("orders", b"x", delay_level=2)
    open_store(path, delay_levels="1s").close()

    [level] = mqstore_json("delay", path)["levels"]

    assert (level["level"], level["delay_ms"], level["waiting"]) == (2, None, 1)
    assert "orphan" in mqstore("delay", path).stdout
    assert "orphan" in mqstore("inspect", path).stdout


def test_a_message_keeps_the_time_it_was_given_when_the_table_changes(tmp_path: Path) -> None:
    """delivery#level-crash: verify finds nothing wrong with it, and recover does not give it another."""
    path, clock = tmp_path / "s", clock_now()
    with broker(path, clock, delay_levels="1s 1h") as running:
        running.put("orders", b"in an hour", queue_id=0, delay_level=2)
    due_ms = clock.now_ms() + 3_600_000
    open_store(path, delay_levels="1s 30m").close()

    assert mqstore_json("verify", path)["findings"] == []
    assert not mqstore_json("recover", path)["changed"]
    (path / "abort").touch()
    with broker(path, clock, delay_levels="1s 30m") as running:
        [unit] = running.store.units("SCHEDULE_TOPIC_XXXX", 1, 0, 9)
        assert unit["tags_code"] == due_ms


def test_a_changed_time_of_delivery_is_found(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", clock_now()
    with broker(path, clock) as running:
        running.put("orders", b"x", delay_level=5)
    [unit_file] = (path / "consumequeue" / "SCHEDULE_TOPIC_XXXX" / "4").iterdir()
    for byte in range(8):
        flip(unit_file, 12 + byte, byte)
        [finding] = mqstore_json("verify", path, exit_code=1)["findings"]
        assert finding["kind"] == "bad_unit"
        flip(unit_file, 12 + byte, byte)
    assert mqstore_json("verify", path)["ok"]


def test_timer_files_agree_with_the_timer(tmp_path: Path) -> None:
    """At each stop: messages placed and not yet placed, a slot half read, rolled ones, cancelled ones."""
    path, clock = tmp_path / "s", clock_now()
    seen = []
    with broker(path, clock) as running:
        handles = []
        for i in range(40):
            delay_s = (2, 2, 3, 90, 3600, 86_400 * 5)[i % 6] + i % 3
            handles.append(running.put("orders", b"%d" % i, delay=delay_s).recall_handle)
        assert running.recall(handles[4])
        running.run_once()
    for pause_ms in (0, 1_500, 1_000, 2_000, 100_000, 3_600_000, 2 * 86_400_000, 4 * 86_400_000):
        clock.advance(pause_ms)
        with broker(path, clock) as running:
            running.run_once()
            running.put("orders", b"more", delay=1000)  # comes in, and is not placed
            waiting = running.stats().timer_waiting
        timer = mqstore_json("delay", path)["timer"]
        seen.append((timer["waiting"], waiting))
        assert timer["next_due_ms"] > clock.now_ms()

    assert all(told == itself for told, itself in seen), seen
    assert len({told for told, _ in seen}) > 4  # they were of different moments indeed


def test_a_slot_that_is_half_read_counts_half(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", clock_now()
    with broker(path, clock, segment_bytes=1 << 20) as running:
        handles = [running.put("orders", b"x", delay=2).recall_handle for _ in range(1_500)]
        assert running.recall(handles[1_200])
        for _ in range(4):
            running.run_once()
        clock.advance(4_000)
        running.run_once()
        waiting = running.stats().timer_waiting
    assert 0 < waiting < 1_500

    assert mqstore_json("delay", path)["timer"]["waiting"] == waiting


@pytest.mark.parametrize("victim", ["timercheck", "timerlog"])
def test_lost_timer_files_hide_nothing_that_waits(tmp_path: Path, victim: str) -> None:
    path, clock = tmp_path / "s", clock_now()
    with broker(path, clock) as running:
        for _ in range(3):
            running.put("orders", b"x", delay=600)
        running.run_once()
    if victim == "timercheck":
        (path / "config" / "timercheck").unlink()
    else:
        for file in (path / "timerlog").iterdir():
            file.unlink()

    timer = mqstore_json("delay", path)["timer"]

    assert timer["waiting"] == 3
    assert clock.now_ms() + 600_000 <= timer["next_due_ms"] <= clock.now_ms() + 601_000


def test_a_message_is_cancelled_by_its_handle_and_is_not_delivered(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", clock_now()
    with broker(path, clock) as running:
        handle = running.put("orders", b"unwanted", delay=600).recall_handle
        running.put("orders", b"wanted", delay=600)
        running.run_once()
    before = snapshot(path)
    assert mqstore_json("delay", "cancel", path, handle, "--dry-run") == {"dry_run": True, "cancelled": True}
    assert snapshot(path) == before

    assert mqstore_json("delay", "cancel", path, handle) == {"dry_run": False, "cancelled": True}

    clock.advance(700_000)
    with broker(path, clock) as running:
        for _ in range(5):
            running.run_once()
        assert [message.body for message in running.store.iter("orders")] == [b"wanted"]


def test_delivered_or_unknown_message_cannot_be_cancelled(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", clock_now()
    clock.set_wall(clock.now_ms() - 3_600_000)
    with broker(path, clock) as running:
        handle = running.put("orders", b"x", delay=60).recall_handle
        running.run_once()

    for dry_run in ([], ["--dry-run"]):
        result = mqstore("delay", "cancel", path, handle, *dry_run, exit_code=1)
        assert "nothing to cancel" in result.stderr
        assert mqstore_json("delay", "cancel", path, handle, *dry_run, exit_code=1)["cancelled"] is False


def test_a_store_in_which_nothing_ever_waited(tmp_path: Path) -> None:
    library.open(tmp_path / "s").close()

    assert mqstore_json("delay", tmp_path / "s") == {"levels": [], "timer": {"waiting": 0, "next_due_ms": None}}


def test_a_damaged_progress_file_is_3_and_is_not_taken_for_none(path: Path) -> None:
    with broker(path) as running:
        running.put("orders", b"x", delay_level=1)
    (path / "config" / "delayOffset.json").write_bytes(b"\0" * 40)
    for backup in (path / "config").glob("delayOffset.json.*"):
        backup.write_bytes(b"\0" * 40)

    result = mqstore("delay", path, exit_code=3)

    assert "delayOffset.json" in result.stderr
    with library.open(path, "r"):
        pass
