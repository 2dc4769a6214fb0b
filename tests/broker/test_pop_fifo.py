"""Popping in order: blocking, partial commits, counts, dead letters (delivery#pop-fifo, delivery#order-info)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.filters import parse_filter
from mqstore.broker.names import POP_LOG_GROUP, POP_LOG_TOPIC, dlq_topic, pop_retry_topic
from mqstore.broker.pop.service import Delivery
from mqstore.errors import InvalidReceiptError, ReceiptExpiredError
from tests.broker.popsupport import PopBench, bodies, offsets

DLQ = dlq_topic("g")
INVISIBLE_MS = 60_000


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PopBench]:
    with PopBench(tmp_path / "store") as bench:
        bench.parts.topics.create("t", queues=1)
        yield bench


def pop(bench: PopBench, n: int = 32, **options: Any) -> list[Delivery]:
    return bench.pop(n=n, order=True, **options)


def test_queues_block_each_for_itself(tmp_path: Path) -> None:
    with PopBench(tmp_path / "store") as bench:
        bench.parts.topics.create("t", queues=2)
        bench.put("t", 2, queue_id=0)
        bench.put("t", 2, queue_id=1)
        assert [(d.queue_id, d.message.offset) for d in pop(bench, 3)] == [(0, 0), (0, 1), (1, 0)]
        assert pop(bench) == []


def test_a_batch_with_what_it_keeps_names_no_more_than_63_messages(bench: PopBench) -> None:
    bench.put("t", 200)
    bench.service.pop("g", "t", n=1, order=True, start="earliest")
    handed: list[int] = []
    for _ in range(6):
        bench.advance(INVISIBLE_MS)
        found = pop(bench, skip_acked=True)
        assert found[0].message.offset == 0
        handed += offsets(found[1:])
        bench.ack(*found[1:])
    assert handed == list(range(1, 63))
    bench.ack(found[0])
    assert bench.committed() == 63
    assert offsets(pop(bench, 2)) == [63, 64]


def test_an_offset_that_was_not_in_the_batch_is_refused_and_nothing_settled(bench: PopBench) -> None:
    bench.put("t", 5)
    first = pop(bench, 2)
    forged = first[0].receipt.rsplit(" ", 1)[0] + " 3"
    for call in (bench.service.ack, bench.service.change_invisible, bench.service.nack):
        arguments = ([first[0].receipt, forged],) if call == bench.service.ack else (forged, 500)
        with pytest.raises(InvalidReceiptError):
            call("g", "t", *arguments)  # type: ignore[arg-type]
    assert bench.committed() == 0


def test_a_changed_time_holds_only_its_message(bench: PopBench) -> None:
    bench.put("t", 2)
    now_ms = bench.now_ms
    first = pop(bench)
    bench.advance(1_000)
    receipt = bench.service.change_invisible("g", "t", first[1].receipt, 120_000)
    assert receipt == f"0 {now_ms} 121000 999 0 mqstore 0 1"
    bench.advance(59_000)
    bench.ack(first[0])
    assert pop(bench) == []
    bench.service.ack("g", "t", receipt)
    assert bench.committed() == 2


def test_a_pop_finds_the_dead_letter_due_even_before_the_housekeeper(bench: PopBench) -> None:
    bench.parts.groups.create("g", retry_max_times=0)
    bench.put("t", 2)
    pop(bench, 1)
    bench.clock.advance(INVISIBLE_MS)
    assert offsets(pop(bench)) == [1]
    assert [dead.body for dead in bench.read(DLQ)] == [b"0"]


def test_a_nack_of_the_last_attempt_files_the_dead_letter(bench: PopBench) -> None:
    bench.parts.groups.create("g", retry_max_times=0)
    bench.put("t", 2)
    first = pop(bench)
    assert bench.service.nack("g", "t", first[0].receipt) is None
    assert bench.committed() == 1
    bench.service.dead_letter("g", "t", first[1].receipt, "mine")
    assert [dead.body for dead in bench.read(DLQ)] == [b"0", b"1"]
    assert bench.committed() == 2
    with pytest.raises(ReceiptExpiredError):
        bench.service.dead_letter("g", "t", first[1].receipt, "mine")


def test_a_release_in_the_last_attempt_is_no_dead_letter(bench: PopBench) -> None:
    bench.parts.groups.create("g", retry_max_times=0)
    bench.put("t", 1)
    bench.release(*pop(bench))
    bench.advance(2 * INVISIBLE_MS)
    assert bench.read(DLQ) == []
    assert [d.attempt for d in pop(bench)] == [1]


def test_a_filter_leaves_gaps_that_do_not_hold_the_commit(bench: PopBench) -> None:
    for i, tag in enumerate("abaabbab"):
        bench.put("t", 1, first=i, tag=tag)
    found = pop(bench, 2, filter=parse_filter("b"))
    assert offsets(found) == [1, 4]
    assert bench.committed() == 1
    bench.ack(found[0])
    assert bench.committed() == 4
    bench.ack(found[1])
    found = pop(bench, filter=parse_filter("b"))
    assert offsets(found) == [5, 7]
    bench.ack(*found)
    assert bench.committed() == 8
    bench.put("t", 2, tag="a")
    assert pop(bench, filter=parse_filter("b")) == []
    assert bench.committed() == 10


def test_parked_receivers_are_woken_when_the_queue_is_free(bench: PopBench) -> None:
    bench.put("t", 3)
    fired: list[bool] = []

    def park() -> None:
        fired.clear()
        bench.service.add_waiter("g", "t", -1, None, fired.append, order=True)
        bench.settle()
        assert fired == []

    first = pop(bench, 1)
    park()
    bench.ack(*first)  # acknowledged
    bench.settle()
    assert fired == [True]
    pop(bench, 1)
    park()
    bench.advance(INVISIBLE_MS - 1)
    assert fired == []
    bench.advance(1)  # visible again
    assert fired == [True]
    second = pop(bench, 2)
    park()
    bench.service.change_invisible("g", "t", second[0].receipt, 500)
    bench.ack(second[1])
    bench.advance(500)
    assert fired == [True]
    park_again = pop(bench, 1)
    park()
    bench.release(*park_again)
    bench.settle()
    assert fired == [True]


def test_a_group_that_changes_its_mode_loses_nothing(bench: PopBench) -> None:
    bench.put("t", 6)
    standard = bench.pop(n=2)
    assert pop(bench) == []  # until those deliveries have ended
    bench.ack(standard[0])
    bench.advance(INVISIBLE_MS)
    fifo = pop(bench, 2)
    assert offsets(fifo) == [2, 3]
    bench.ack(fifo[0])
    retried = bench.pop(n=5)
    assert [(d.message.topic, d.message.offset) for d in retried] == [(pop_retry_topic("g", "t"), 0)]
    bench.advance(INVISIBLE_MS)
    rest = [d.message.body for d in bench.pop(n=5)]
    assert sorted(rest) == [b"1", b"3", b"4", b"5"]


def test_the_pop_log_has_the_records_of_delivery_pop_log(bench: PopBench) -> None:
    bench.put("t", 3)
    now_ms = bench.now_ms
    first = pop(bench, 2, attempt_id="A1", local=False)
    bench.ack(first[1])
    bench.service.change_invisible("g", "t", first[0].receipt, 1_000)
    bench.advance(1_000)
    pop(bench, 2)
    log = [(record.tag, record.json()) for record in bench.read(POP_LOG_TOPIC)]
    common = {"t": "t", "c": "g", "q": 0, "so": 0, "d": [0, 1], "nx": 2, "f": 1}
    assert log == [
        ("ck", {**common, "pt": now_ms, "it": 60_000, "a": "A1"}),
        ("ack", {"k": 0, "o": [1]}),
        ("chg", {"k": 0, "o": 0, "pt": now_ms, "it": 1_000}),
        ("ck", {**common, "pt": now_ms + 1_000, "it": 60_000, "oc": {"0": 1, "1": 1}, "l": 1}),
    ]


def test_the_order_info_file_is_written_every_ten_seconds(bench: PopBench) -> None:
    path = bench.path / "config" / "consumerOrderInfo.json"
    bench.put("t", 3)
    first = pop(bench, attempt_id="A1")
    bench.ack(first[0])
    now_ms = bench.now_ms
    bench.advance(9_999)
    assert not path.exists()
    bench.advance(1)
    assert json.loads(path.read_text())["table"] == {
        "t@g": {"0": {"a": "A1", "cm": 1, "i": 60_000, "l": now_ms, "o": [0, 1, 2], "popTime": now_ms}}
    }


def test_attempts_of_the_queue_model_are_on_disk_within_a_second_and_end_with_the_queue(bench: PopBench) -> None:
    bench.parts.groups.create("g")
    bench.put("t", 3)
    bench.service.note_attempt("g", "t", 0, 1, 2)
    bench.settle()
    bench.advance(1_000)
    bench.crash()
    assert bench.service.attempts("g", "t", 0) == {1: 2}
    bench.parts.offsets.commit("g", "t", 0, 2)
    bench.service.note_attempt("g", "t", 0, 2, 1)
    bench.advance(1_000)
    assert bench.service.attempts("g", "t", 0) == {2: 1}


def test_receipt_from_before_a_reset_acknowledges_nothing(bench: PopBench) -> None:
    """A group was reset to have a day's messages again. A worker still had the receipt of the first of them, and its
    acknowledgement, taken for one whose record is lost (delivery#order-missing), made the group skip that message."""
    bench.put("t", 3)
    first = bench.pop(order=True)
    bench.ack(*first)
    bench.pop(order=True)
    bench.reset(0)
    with pytest.raises(ReceiptExpiredError):
        bench.ack(*first)
    assert bodies(bench.pop(order=True, n=3)) == [b"0", b"1", b"2"]


def test_receipt_in_order_settles_nothing_popped_without_order(bench: PopBench) -> None:
    """The message that another receiver had in flight was forgotten: it never came again."""
    bench.put("t", 4)
    ordered = bench.pop(order=True, n=3, invisible_ms=1_000)
    bench.advance(2_000)
    assert bodies(bench.pop()) == [b"0"]
    with pytest.raises(ReceiptExpiredError):
        bench.ack(ordered[1])
    assert [each.offset for each in bench.service.pending("g")] == [0]
    bench.advance(60_000)
    left = bench.pop(n=8)
    assert sorted(bodies(left)) == [b"0", b"1", b"2", b"3"]


def acknowledge_after_clock_was_set_back(bench: PopBench) -> None:
    """Put four messages, and acknowledge the first. The saved order info has its batch, with a pop time an hour later
    than all that follows."""
    bench.put("t", 4)
    bench.clock.advance(3_600_000)
    first = bench.pop(order=True, n=1)
    bench.service._keeper.save(bench.now_ms)
    bench.clock.set_wall(bench.clock.now_ms() - 3_600_000)
    bench.ack(*first)


def test_old_order_info_is_ignored_after_the_clock_was_set_back(bench: PopBench) -> None:
    """The file's batch has the later pop time, and is the older one."""
    acknowledge_after_clock_was_set_back(bench)
    for _ in range(2):
        bench.ack(*bench.pop(order=True, n=1))
    bench.crash()
    bench.settle()
    assert bodies(bench.pop(order=True, n=4)) == [b"3"]


def test_old_order_info_is_ignored_if_the_log_begins_behind_it(bench: PopBench) -> None:
    acknowledge_after_clock_was_set_back(bench)
    bench.parts.offsets.commit(POP_LOG_GROUP, POP_LOG_TOPIC, 0, bench.parts.store.offsets(POP_LOG_TOPIC)[1])
    bench.parts.offsets.save()
    second = bench.pop(order=True, n=3)
    bench.ack(second[0])
    bench.crash(release_in_flight=False)
    bench.settle()
    assert bench.pop(order=True, n=4) == []  # two of the batch are still with their receiver
    bench.advance(60_001)
    assert bodies(bench.pop(order=True, n=4)) == [message.message.body for message in second[1:]]
