"""Reasons of redeliveries: their form in records, and which deliveries have one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import RetryPolicy
from mqstore.broker.pop import state as pop_state
from mqstore.broker.pop.poplog.log import CHANGE, POP
from mqstore.broker.redelivery.attempt_journal import Address, AttemptJournal
from mqstore.broker.redelivery.reason import PROCESS_ENDED, REASON_CHARS, Reason, reason_of
from tests.broker.popsupport import DLQ, PopBench

HOUR_MS = 3_600_000
TEXTS = st.text(max_size=REASON_CHARS + 1)


@pytest.fixture
def pops(tmp_path: Path) -> Iterator[PopBench]:
    with PopBench(tmp_path, queues=1) as bench:
        yield bench


@given(text=TEXTS, holder=TEXTS, counts=st.booleans())
def test_reason_is_read_back_from_its_record(text: str, holder: str, counts: bool) -> None:
    reason = Reason(text, holder, counts)
    value = json.loads('{"k":7' + reason.members() + "}")
    assert Reason.of(value) == Reason(text[:REASON_CHARS], holder[:REASON_CHARS], counts)
    assert list(value) == ["k", *[name for name, there in (("g", not counts), ("e", text), ("h", holder)) if there]]


@pytest.mark.parametrize("order", [False, True])
def test_reasons_of_waiting_messages_are_kept(pops: PopBench, monkeypatch: pytest.MonkeyPatch, order: bool) -> None:
    """Those of settled messages are dropped when there are many."""
    monkeypatch.setattr(pop_state, "_COMPACT_FROM", 4)
    for begin in range(0, 40, 4):
        pops.put("t", 4, first=begin)
        found = pops.pop(n=4, order=order)
        receipts = [
            pops.service.nack("g", "t", each.receipt, HOUR_MS, error=str(each.message.offset)) for each in found
        ]
        batches = [pops.state.in_flight.get(each.message.offset, pops.state.fifo) for each in found]
        reasons = [pops.state.reason(*each) for each in zip(batches, range(begin, begin + 4), strict=True)]
        assert [reason.text for reason in reasons if reason] == [str(begin + i) for i in range(4)]
        pops.service.ack("g", "t", [receipt for receipt in receipts if receipt])
    assert len(pops.state.reasons) < 16


@pytest.mark.parametrize("count", [1, 4])
def test_ended_deliveries_without_order_keep_no_reason_and_no_progress(pops: PopBench, count: int) -> None:
    """However many there were: no later failure in the queue is needed to forget them."""
    pops.put("t", 4)
    failed, given, held, acked = [each for _ in range(4 // count) for each in pops.pop(n=count)]
    pops.service.nack("g", "t", failed.receipt, HOUR_MS, error="busy")
    pops.service.release("g", "t", [given.receipt], delay_ms=HOUR_MS)
    pops.service.change_invisible("g", "t", held.receipt, HOUR_MS, progress="half")
    pops.service.change_invisible("g", "t", acked.receipt, HOUR_MS, renew=True, progress="half")
    pops.ack(acked)
    assert (sorted(pops.state.reasons), sorted(pops.state.progress)) == ([0, 1], [2])
    pops.advance(2 * HOUR_MS)
    assert (pops.state.reasons, pops.state.progress, list(pops.state.released)) == ({}, {}, [1])


def test_rewritten_batch_is_one_record_whatever_its_reasons(pops: PopBench) -> None:
    pops.put("t", 4)
    for each in pops.pop(n=4):
        pops.service.nack("g", "t", each.receipt, HOUR_MS, error=str(each.message.offset))
    before = pops.tables.log.bounds()[1]
    pops.service._unordered.rewrite(pops.state, pops.state.in_flight[0])
    records = [*pops.tables.log.records(before)]
    assert [record.kind for record in records] == [POP, *[CHANGE] * 4]
    assert [Reason.of(record.value).text for record in records[1:]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("order", [False, True])
def test_dead_letter_that_meets_a_full_disk_has_its_reason_later(
    pops: PopBench, monkeypatch: pytest.MonkeyPatch, order: bool
) -> None:
    pops.parts.groups.create("g", retry_policy=RetryPolicy(1, [1]))
    pops.put("t", 1)
    assert len(pops.pop(order=order, invisible_ms=1_000)) == 1
    begun = pops.tables.begun = AttemptJournal(pops.parts)
    begun.suspects.add("g", [Address("t", 0, 0)])
    pops.fail_once(monkeypatch, "file_dead_letter")
    with pytest.raises(OSError, match="no space"):
        pops.advance(1_000)
    pops.advance(2_000)
    assert [reason_of(letter) for letter in pops.read(DLQ)] == [PROCESS_ENDED.text]
    assert not begun.suspects.holds("g", Address("t", 0, 0))


@pytest.mark.parametrize("counts", [False, True])
def test_texts_are_kept_of_limited_number_of_messages(
    pops: PopBench, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    monkeypatch.setattr(pop_state, "_TEXTS_KEPT", 2)
    pops.put("t", 4)
    for delivery in pops.pop(n=4):
        if counts:
            pops.service.nack("g", "t", delivery.receipt, HOUR_MS, error="busy")
        else:
            pops.service.release("g", "t", [delivery.receipt], delay_ms=HOUR_MS)
    reasons = [pops.state.reason(batch, offset) for offset, batch in pops.state.in_flight.items()]
    assert [reason and (reason.text, reason.counts) for reason in reasons] == [
        ("busy" * (counts and i < 2), counts) for i in range(4)
    ]


@pytest.mark.parametrize("order", [False, True])
def test_held_delivery_has_no_reason(pops: PopBench, order: bool) -> None:
    """One that is renewed after its failure, and in order the next one of the same message."""
    pops.put("t", 1)
    [first] = pops.pop(order=order)
    receipt = pops.service.nack("g", "t", first.receipt, HOUR_MS, error="busy")
    pops.service.change_invisible("g", "t", str(receipt), HOUR_MS)
    state = pops.state
    assert state.reason(state.in_flight.get(0, state.fifo), 0) is None
    if order:
        pops.service.nack("g", "t", first.receipt, 1, error="busy")
        pops.advance(1)
        assert len(pops.pop(order=True)) == 1
        assert state.reason(state.fifo, 0) is None


def test_delivery_that_is_given_back_suspends_no_queue(pops: PopBench) -> None:
    pops.put("t", 2)
    given, failed = pops.pop(n=2, order=True)
    pops.service.release("g", "t", [given.receipt], delay_ms=HOUR_MS)
    assert pops.tables.orders.suspended("g", lambda key: 0) == {}
    pops.service.nack("g", "t", failed.receipt, HOUR_MS, error="busy")
    [suspended] = pops.tables.orders.suspended("g", lambda key: 0).values()
    assert (suspended.offset, suspended.attempt, suspended.error) == (1, 1, "busy")


@pytest.mark.parametrize("order", [False, True])
def test_failed_and_given_back_are_counted_and_wait_after_reopening(pops: PopBench, order: bool) -> None:
    pops.put("t", 2)
    failed, given = pops.pop(n=2, order=order)
    pops.service.nack("g", "t", failed.receipt, HOUR_MS, error="busy")
    pops.service.release("g", "t", [given.receipt], delay_ms=HOUR_MS)
    assert pops.state.count_failed(pops.tables.order(pops.state), pops.now_ms) == (1, 1)
    pops.reopen()
    pops.advance(1)
    assert pops.state.count_failed(pops.tables.order(pops.state), pops.now_ms) == (1, 1)
