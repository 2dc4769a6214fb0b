"""Popping in order: blocking, partial commits, counts, dead letters (delivery#pop-fifo, delivery#order-info)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mqstore.errors import InvalidReceiptError, ReceiptExpiredError
from tests.broker.popsupport import DLQ, POP_LOG_TOPIC, RETRY, PopBench, bodies, offsets, queue, tags

INVISIBLE_MS = 60_000


def pop(pops: PopBench, n: int = 32, **options: Any) -> list[Any]:
    return pops.pop(n=n, order=True, **options)


def test_a_batch_with_what_it_keeps_names_no_more_than_63_messages(pops: PopBench) -> None:
    pops.put("t", 200)
    pops.pop(order=True, start="earliest")
    handed: list[int] = []
    for _ in range(6):
        pops.advance(INVISIBLE_MS)
        found = pop(pops, skip_acked=True)
        assert found[0].message.offset == 0
        handed += offsets(found[1:])
        pops.ack(*found[1:])
    assert handed == list(range(1, 63))
    pops.ack(found[0])
    assert pops.committed() == 63
    assert offsets(pop(pops, 2)) == [63, 64]


def test_offset_outside_the_batch_settles_nothing(pops: PopBench) -> None:
    pops.put("t", 5)
    first = pop(pops, 2)
    forged = first[0].receipt.rsplit(" ", 1)[0] + " 3"
    for call in (pops.service.ack, pops.service.change_invisible, pops.service.nack):
        arguments = ([first[0].receipt, forged],) if call == pops.service.ack else (forged, 500)
        with pytest.raises(InvalidReceiptError):
            call("g", "t", *arguments)  # type: ignore[arg-type]
    assert pops.committed() == 0


def test_a_nack_of_the_last_attempt_files_the_dead_letter(pops: PopBench) -> None:
    pops.parts.groups.create("g", retry_max_times=0)
    pops.put("t", 2)
    first = pop(pops)
    assert pops.service.nack("g", "t", first[0].receipt) is None
    assert pops.committed() == 1
    pops.service.dead_letter("g", "t", first[1].receipt, "mine")
    assert [dead.body for dead in pops.read(DLQ)] == [b"0", b"1"]
    assert pops.committed() == 2
    with pytest.raises(ReceiptExpiredError):
        pops.service.dead_letter("g", "t", first[1].receipt, "mine")


def test_a_filter_leaves_gaps_that_do_not_hold_the_commit(pops: PopBench) -> None:
    for i, tag in enumerate("abaabbab"):
        pops.put("t", 1, first=i, tag=tag)
    found = pop(pops, 2, filter=tags("b"))
    assert offsets(found) == [1, 4]
    assert pops.committed() == 1
    pops.ack(found[0])
    assert pops.committed() == 4
    pops.ack(found[1])
    found = pop(pops, filter=tags("b"))
    assert offsets(found) == [5, 7]
    pops.ack(*found)
    assert pops.committed() == 8
    pops.put("t", 2, tag="a")
    assert pop(pops, filter=tags("b")) == []
    assert pops.committed() == 10


def test_parked_receivers_are_woken_when_the_queue_is_free(pops: PopBench) -> None:
    pops.put("t", 3)
    fired: list[bool] = []

    def park() -> None:
        fired.clear()
        pops.park(fired.append, order=True)
        pops.settle()
        assert fired == []

    first = pop(pops, 1)
    park()
    pops.ack(*first)  # acknowledged
    pops.settle()
    assert fired == [True]
    pop(pops, 1)
    park()
    pops.advance(INVISIBLE_MS - 1)
    assert fired == []
    pops.advance(1)  # visible again
    assert fired == [True]
    second = pop(pops, 2)
    park()
    pops.service.change_invisible("g", "t", second[0].receipt, 500)
    pops.ack(second[1])
    pops.advance(500)
    assert fired == [True]
    park_again = pop(pops, 1)
    park()
    pops.release(*park_again)
    pops.settle()
    assert fired == [True]


def test_a_group_that_changes_its_mode_loses_nothing(pops: PopBench) -> None:
    pops.put("t", 6)
    standard = pops.pop(n=2)
    assert pop(pops) == []  # until those deliveries have ended
    pops.ack(standard[0])
    pops.advance(INVISIBLE_MS)
    fifo = pop(pops, 2)
    assert offsets(fifo) == [2, 3]
    pops.ack(fifo[0])
    retried = pops.pop(n=5)
    assert [(d.message.topic, d.message.offset) for d in retried] == [(RETRY, 0)]
    pops.advance(INVISIBLE_MS)
    rest = [d.message.body for d in pops.pop(n=5)]
    assert sorted(rest) == [b"1", b"3", b"4", b"5"]


def test_the_pop_log_has_the_records_of_delivery_pop_log(pops: PopBench) -> None:
    pops.put("t", 3)
    now_ms = pops.now_ms
    first = pop(pops, 2, attempt_id="A1", local=False)
    pops.ack(first[1])
    pops.service.change_invisible("g", "t", first[0].receipt, 1_000)
    pops.advance(1_000)
    pop(pops, 2)
    log = [(record.tag, record.json()) for record in pops.read(POP_LOG_TOPIC)]
    common = {"t": "t", "c": "g", "q": 0, "so": 0, "d": [0, 1], "nx": 2, "f": 1}
    assert log == [
        ("ck", {**common, "pt": now_ms, "it": 60_000, "a": "A1"}),
        ("ack", {"k": 0, "o": [1]}),
        ("chg", {"k": 0, "o": 0, "pt": now_ms, "it": 1_000}),
        ("ck", {**common, "pt": now_ms + 1_000, "it": 60_000, "oc": {"0": 1, "1": 1}, "l": 1}),
    ]


def test_the_order_info_file_is_written_every_ten_seconds(pops: PopBench) -> None:
    path = pops.path / "config" / "consumerOrderInfo.json"
    pops.put("t", 3)
    first = pop(pops, attempt_id="A1")
    pops.ack(first[0])
    now_ms = pops.now_ms
    pops.advance(9_999)
    assert not path.exists()
    pops.advance(1)
    assert json.loads(path.read_text())["table"] == {
        "t@g": {"0": {"a": "A1", "cm": 1, "i": 60_000, "l": now_ms, "o": [0, 1, 2], "popTime": now_ms}}
    }


def test_queue_model_attempts_are_saved_within_a_second(pops: PopBench) -> None:
    pops.parts.groups.create("g")
    pops.put("t", 3)
    pops.service.note_attempt(queue(), 1, 2)
    pops.settle()
    pops.advance(1_000)
    pops.crash()
    assert pops.service.orders.attempts(queue()) == {1: 2}
    pops.parts.offsets.commit(queue(), 2)
    pops.service.note_attempt(queue(), 2, 1)
    pops.advance(1_000)
    assert pops.service.orders.attempts(queue()) == {2: 1}


def test_receipt_from_before_a_reset_acknowledges_nothing(pops: PopBench) -> None:
    """A group was reset to have a day's messages again. A worker still had the receipt of the first of them, and its
    acknowledgement, taken for one whose record is lost (delivery#order-missing), made the group skip that message."""
    pops.put("t", 3)
    first = pops.pop(order=True)
    pops.ack(*first)
    pops.pop(order=True)
    pops.reset(0)
    with pytest.raises(ReceiptExpiredError):
        pops.ack(*first)
    assert bodies(pops.pop(order=True, n=3)) == [b"0", b"1", b"2"]


def test_receipt_in_order_settles_nothing_popped_without_order(pops: PopBench) -> None:
    """The message that another receiver had in flight was forgotten: it never came again."""
    pops.put("t", 4)
    ordered = pops.pop(order=True, n=3, invisible_ms=1_000)
    pops.advance(2_000)
    assert bodies(pops.pop()) == [b"0"]
    with pytest.raises(ReceiptExpiredError):
        pops.ack(ordered[1])
    assert [each.offset for each in pops.service.pending("g")] == [0]
    pops.advance(60_000)
    left = pops.pop(n=8)
    assert sorted(bodies(left)) == [b"0", b"1", b"2", b"3"]


def test_old_order_info_before_the_log_start_is_ignored(pops: PopBench) -> None:
    """The saved batch has a pop time an hour later than all that follows, since the clock was set back: it is older."""
    pops.put("t", 4)
    pops.clock.advance(3_600_000)
    first = pops.pop(order=True, n=1)
    pops.advance(10_000)  # it is saved
    pops.clock.set_wall(pops.now_ms - 3_600_000)
    pops.ack(*first)
    pops.replay_from(pops.parts.store.offsets(POP_LOG_TOPIC)[1])
    pops.parts.offsets.save()
    second = pops.pop(order=True, n=3)
    pops.ack(second[0])
    pops.crash(requeue_on_open=False)
    pops.settle()
    assert pops.pop(order=True, n=4) == []  # two of the batch are still with their receiver
    pops.advance(60_001)
    assert bodies(pops.pop(order=True, n=4)) == [message.message.body for message in second[1:]]
