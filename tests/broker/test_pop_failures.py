"""Popping when a write fails, when a record has the maximum size, and when many messages are in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqstore.errors import ConfigError, InvalidMessageError, ReceiptExpiredError
from tests.broker.popsupport import DLQ, PopBench, bodies

# -- errors half-way --------------------------------------------------------------------------------------------------


def test_pop_from_a_missing_queue_leaves_nothing_in_flight(tmp_path: Path) -> None:
    """When luck had it look at the retry topic first, what it found there was in flight with nobody."""
    with PopBench(tmp_path, rng=lambda: 0.0) as pops:
        pops.put("t", 1)
        pops.pop(invisible_ms=1_000)
        pops.advance(1_000)
        for n in (1, 2):
            with pytest.raises(ConfigError, match="99"):
                pops.pop(queue_id=99, n=n)
        assert pops.service.pending("g") == []


def test_pop_returns_what_it_found_before_a_queue_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was in flight, and its receiver got an exception: it came again when its time was over, an attempt less."""
    with PopBench(tmp_path, rng=lambda: 0.0) as pops:
        pops.put("t", 2)
        pops.put("t", 2, queue_id=1, first=2)
        pops.fail_once(monkeypatch, "put_pop", call=2)
        assert bodies(pops.pop(n=8)) == [b"0", b"1"]
        assert bodies(pops.pop(n=8)) == [b"2", b"3"]
        pops.fail_once(monkeypatch, "put_pop")
        pops.put("t", 1, first=4)
        with pytest.raises(OSError, match="space"):  # nothing was found before it
            pops.pop(n=8)
        assert bodies(pops.pop(n=8)) == [b"4"]


def test_reset_on_a_full_disk_is_completed_by_the_next_pop(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table said 0 and pops went on behind the end: until a restart the group was in two places."""
    pops.put("t", 3)
    pops.ack(*pops.pop(n=3))
    pops.fail_once(monkeypatch, "put_reset")
    with pytest.raises(OSError, match="space"):
        pops.reset(0)
    pops.fail_once(monkeypatch, "put_reset")
    with pytest.raises(OSError, match="space"):
        pops.pop()
    assert pops.committed() == 0
    assert bodies(pops.pop(n=3)) == [b"0", b"1", b"2"]


def test_dead_letter_in_order_is_filed_again_after_a_failure(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody came back to it: a receiver that was parked waited for ever on a queue that was free."""
    woken: list[bool] = []
    pops.parts.groups.create("g", max_attempts=1)
    pops.put("t", 2)
    pops.pop(order=True, invisible_ms=1_000)
    pops.park(woken.append, order=True)
    pops.fail_once(monkeypatch, "file_dead_letter")
    pops.clock.advance(1_000)
    with pytest.raises(OSError, match="space"):
        pops.service.run_once(pops.now_ms)
    pops.advance(1_000)
    assert woken == [True]
    assert bodies(pops.pop(order=True)) == [b"1"]
    assert [letter.body for letter in pops.read("%DLQ%g")] == [b"0"]


# -- records as long as one can be ------------------------------------------------------------------------------------


def put_longest(pops: PopBench) -> int:
    """The longest message that fits a segment of 64 KiB; its copies, whose topics have longer names, do not."""
    size = 1 << 16
    while True:
        try:
            pops.parts.store.put("t", b"x" * size, 0)
        except InvalidMessageError:
            size -= 1
        else:
            return size


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_expired_batch_is_dead_lettered_after_its_last_attempt(pops: PopBench, max_attempts: int) -> None:
    pops.parts.groups.create("g", max_attempts=max_attempts)
    pops.put("t", 3)
    for _ in range(max_attempts):
        assert len(pops.pop(n=3, invisible_ms=1_000)) == 3
        pops.advance(1_000)
    assert sorted(message.body for message in pops.read(DLQ)) == [b"0", b"1", b"2"]
    assert pops.pop(n=3) == []


@pytest.mark.parametrize("max_attempts", [1, 16])
def test_message_too_long_to_copy_is_redelivered_in_place(pops: PopBench, max_attempts: int) -> None:
    """Neither its copy nor its dead letter fit a segment: it stayed in flight for ever, an error every ten seconds."""
    pops.parts.groups.create("g", max_attempts=max_attempts)
    size = put_longest(pops)
    pops.put("t", 1)
    [first, _] = pops.pop(n=2, invisible_ms=1_000)
    pops.advance(1_000)
    again = pops.pop(n=2)
    assert size in [len(delivery.message.body) for delivery in again]
    with pytest.raises(ReceiptExpiredError):
        pops.ack(first)
    pops.reopen()
    pops.settle()
    again = pops.pop(n=2)
    assert size in [len(delivery.message.body) for delivery in again]
    pops.ack(*again)
    pops.advance(100_000)
    assert pops.pop(n=2) == []
    assert pops.committed() == 2


def test_dead_letter_without_room_has_no_added_properties(pops: PopBench) -> None:
    pops.parts.groups.create("g", max_attempts=1)
    longest = put_longest(pops)
    pops.parts.store.put("t", b"y" * (longest - len("%DLQ%g") + len("t")), 0)
    pops.pop(n=2, invisible_ms=1_000)
    pops.advance(1_000)
    assert [(letter.body[:1], letter.stored_properties()) for letter in pops.read("%DLQ%g")] == [(b"y", {})]


def test_message_too_long_to_copy_is_redelivered_in_order(pops: PopBench) -> None:
    """Every pop of the queue raised: all behind it was out of reach."""
    pops.parts.groups.create("g", max_attempts=1)
    size = put_longest(pops)
    pops.put("t", 1)
    pops.pop(order=True, invisible_ms=1_000)
    pops.advance(1_000)
    [again] = pops.pop(order=True)
    assert len(again.message.body) == size
    pops.ack(again)
    assert bodies(pops.pop(order=True)) == [b"0"]


# -- many in flight ---------------------------------------------------------------------------------------------------


def test_redelivery_of_many_messages_is_done_in_steps(pops: PopBench) -> None:
    """A million deliveries that ended at once held the housekeeper for a minute and a half."""
    count = 300
    pops.put("t", count)
    for _ in range(count):
        pops.pop(invisible_ms=1_000)
    pops.clock.advance(1_000)
    due_ms = pops.service.run_once(pops.now_ms)
    assert due_ms == pops.now_ms
    assert 0 < pops.service.in_flight() < count
    pops.settle()
    assert pops.service.in_flight() == 0


def test_settled_renewals_leave_the_timeline(pops: PopBench) -> None:
    pops.put("t", 1_600)
    popped = [delivery for _ in range(50) for delivery in pops.pop(n=32)]
    for i, delivery in enumerate(popped):
        pops.service.change_invisible("g", "t", delivery.receipt, 60_001 + i, renew=True)
    for delivery in popped[:-1]:
        pops.ack(delivery)
    assert pops.state.timeline.entries < 1_200


def test_delivery_far_ahead_is_on_the_agenda_once(pops: PopBench) -> None:
    """Each look at its queue entered it anew: half a million entries a queue in twelve hours."""
    pops.put("t", 31)
    pops.pop(invisible_ms=12 * 3_600_000)
    for _ in range(30):
        pops.ack(*pops.pop(invisible_ms=100))
        pops.advance(100)
    assert pops.announced < 5
    pops.advance(12 * 3_600_000)
    assert [delivery.attempt for delivery in pops.pop()] == [2]
