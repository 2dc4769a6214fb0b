"""Popping without order: what is delivered, what settles it, and what comes again (delivery#pop)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message
from mqstore.broker.pop import unordered
from mqstore.errors import (
    ConfigError,
    GroupNotFoundError,
    InvalidReceiptError,
    NotPermittedError,
    ReceiptExpiredError,
    StoreFullError,
    TopicNotFoundError,
)
from tests.broker.popsupport import DLQ, POP_LOG_TOPIC, RETRY, RETRY_V1, PopBench, bodies, tags
from tests.broker.support import full

INVISIBLE_MS = 60_000


# -- the first delivery -----------------------------------------------------------------------------------------------


def test_one_queue_can_be_named(tmp_path: Path) -> None:
    with PopBench(tmp_path / "store", queues=2) as pops:
        pops.put("t", 1, queue_id=0)
        pops.put("t", 1, queue_id=1)
        assert [d.queue_id for d in pops.pop(queue_id=1, n=5)] == [1]
        with pytest.raises(ConfigError, match=r"0\.\.1"):
            pops.pop(queue_id=2)


@pytest.mark.parametrize(
    ("n", "invisible_ms"), [(0, 60_000), (33, 60_000), (1, 99), (1, 12 * 3_600_000 + 1), (-1, 100)]
)
def test_numbers_out_of_range_are_refused(pops: PopBench, n: int, invisible_ms: int) -> None:
    pops.put("t", 1)
    with pytest.raises(ConfigError):
        pops.pop(n=n, invisible_ms=invisible_ms)
    assert len(pops.pop(n=32, invisible_ms=100)) == 1


def test_unknown_and_forbidden_names_are_refused(pops: PopBench) -> None:
    pops.put("t", 1)
    with pytest.raises(TopicNotFoundError):
        pops.pop(topic="nowhere")
    with pytest.raises(GroupNotFoundError):
        pops.pop(group="a b")
    assert len(pops.pop()) == 1
    pops.parts.groups.alter("g", consume_enable=False)
    with pytest.raises(NotPermittedError):
        pops.pop()
    pops.parts.groups.alter("g", consume_enable=True)
    pops.parts.topics.alter("t", perm=2)
    with pytest.raises(NotPermittedError):
        pops.pop()
    with pytest.raises(ConfigError, match="durability"):
        pops.pop(durability="soon")


# -- acknowledging ----------------------------------------------------------------------------------------------------


def test_only_unacknowledged_messages_are_copied_to_retry(pops: PopBench) -> None:
    pops.put("t", 5, tag="a", keys=["k1", "k2"], properties={"mine": "yes"})
    first = pops.pop(n=5)
    pop_time_ms = pops.now_ms
    pops.ack(first[0], first[2], first[3])
    assert pops.committed() == 1
    pops.advance(INVISIBLE_MS)
    assert pops.committed() == 5
    copies = pops.read(RETRY)
    assert [copy.body for copy in copies] == [b"1", b"4"]
    for copy, original in zip(copies, (first[1], first[4]), strict=True):
        assert copy.reconsume_times == 1
        assert copy.tag == "a"
        assert copy.keys == ("k1", "k2")
        assert copy.properties == {"mine": "yes"}
        assert copy.born_timestamp_ms == original.message.born_timestamp_ms
        assert copy.unique_key == original.message.message_id
        assert copy.stored_properties()["1ST_POP_TIME"] == str(pop_time_ms)
    again = pops.pop(n=5)
    assert bodies(again) == [b"1", b"4"]
    assert [d.attempt for d in again] == [2, 2]
    assert {d.topic for d in again} == {"t"}
    assert {d.receipt.split()[4] for d in again} == {"2"}


def test_late_receipt_settles_until_the_copy_exists(pops: PopBench) -> None:
    pops.put("t", 2)
    first, second = pops.pop(n=2)
    pops.clock.advance(INVISIBLE_MS + 5)  # the housekeeper has not come yet
    pops.ack(first)
    pops.settle()
    assert [copy.body for copy in pops.read(RETRY)] == [b"1"]
    pops.ack(first)
    size = pops.log_size()
    with pytest.raises(ReceiptExpiredError) as caught:
        pops.ack(second)
    assert list(caught.value.receipts) == [second.receipt]
    assert pops.log_size() == size
    assert bodies(pops.pop(n=5)) == [b"1"]


def test_late_receipts_do_not_stop_the_others(pops: PopBench) -> None:
    pops.put("t", 3)
    late = pops.pop(invisible_ms=1_000)
    good = pops.pop(n=2)
    pops.advance(1_000)
    with pytest.raises(ReceiptExpiredError) as caught:
        pops.ack(good[0], *late, good[1])
    assert list(caught.value.receipts) == [late[0].receipt]
    assert pops.service.in_flight() == 0
    pops.ack(*pops.pop())
    pops.advance(INVISIBLE_MS)
    assert pops.pop(n=5) == []


@pytest.mark.parametrize(
    "receipt",
    [
        "nonsense",
        "0 {now} 60000 0 0 mqstore 7 0",
        "0 {now} 60000 0 0 mqstore 0 99",
        "0 {now} 60000 0 1 mqstore 0 0",
        "0 {now} 60000 0 2 mqstore 0 0",
        "0 {now} 60000 0 3 mqstore 0 0",
        "0 {now} 99999999999999999999 0 0 mqstore 0 0",
        "0 {now} 60000 999 0 mqstore 0 99",
    ],
)
def test_invalid_receipt_settles_nothing(pops: PopBench, receipt: str) -> None:
    pops.put("t", 1)
    [delivery] = pops.pop()
    receipt = receipt.format(now=pops.now_ms)
    size = pops.log_size()
    calls: list[Callable[[], object]] = [
        lambda: pops.service.ack("g", "t", [delivery.receipt, receipt]),
        lambda: pops.service.release("g", "t", [delivery.receipt, receipt]),
        lambda: pops.service.change_invisible("g", "t", receipt, 1_000),
        lambda: pops.service.nack("g", "t", receipt),
        lambda: pops.service.dead_letter("g", "t", receipt, "why"),
    ]
    for call in calls:
        with pytest.raises(InvalidReceiptError):
            call()
    assert pops.log_size() == size
    assert pops.service.in_flight() == 1


def test_receipts_of_another_group_or_topic_are_refused(pops: PopBench) -> None:
    pops.put("t", 1)
    [delivery] = pops.pop()
    with pytest.raises(InvalidReceiptError):
        pops.service.ack("stranger", "t", delivery.receipt)
    with pytest.raises(TopicNotFoundError):
        pops.service.ack("g", "nowhere", delivery.receipt)
    assert pops.service.in_flight() == 1


@pytest.mark.parametrize("how", ["change", "reset"])
def test_old_receipt_is_refused_in_its_pop_millisecond(pops: PopBench, how: str) -> None:
    """The pop time alone distinguishes two deliveries of a message."""
    pops.put("t", 2)
    [old] = pops.pop()
    if how == "change":
        new = old._replace(receipt=pops.change("change_invisible", old.receipt, INVISIBLE_MS))
    else:
        pops.reset(0)
        [new] = pops.pop()
    with pytest.raises(ReceiptExpiredError):
        pops.ack(old)
    pops.ack(new)
    assert pops.committed() == 1


@pytest.mark.parametrize("invisible_ms", [-1, 12 * 3_600_000 + 1])
def test_a_time_out_of_range_is_refused(pops: PopBench, invisible_ms: int) -> None:
    pops.put("t", 1)
    [delivery] = pops.pop()
    with pytest.raises(ConfigError):
        pops.service.change_invisible("g", "t", delivery.receipt, invisible_ms)
    with pytest.raises(ConfigError):
        pops.service.nack("g", "t", delivery.receipt, invisible_ms)
    pops.ack(delivery)


# -- dead letters -----------------------------------------------------------------------------------------------------


def test_the_last_attempt_ends_as_a_dead_letter_at_once(pops: PopBench) -> None:
    pops.parts.groups.create("g", retry_max_times=2)  # 3 attempts
    pops.put("t", 1)
    for attempt in (1, 2, 3):
        [delivery] = pops.pop()
        assert delivery.attempt == attempt
        pops.advance(INVISIBLE_MS)
    [dead] = pops.read(DLQ)
    assert dead.body == b"0"
    properties = dead.stored_properties()
    assert properties["DLQ_ORIGIN_TOPIC"] == "t"
    assert "attempt 3 of 3" in properties["dlq_reason"]
    assert [copy.reconsume_times for copy in pops.read(RETRY)] == [1, 2]
    with pytest.raises(ReceiptExpiredError):
        pops.ack(delivery)
    pops.advance(10 * INVISIBLE_MS)
    assert pops.pop() == []
    assert pops.committed(topic=RETRY) == 2


def test_copies_over_the_limit_are_never_delivered(pops: PopBench) -> None:
    pops.put("t", 3)
    for _ in range(3):
        pops.pop(n=3)
        pops.advance(INVISIBLE_MS)
    pops.parts.groups.alter("g", retry_max_times=2)  # what waits has had its three attempts
    assert pops.pop(n=3) == []
    assert [dead.body for dead in pops.read(DLQ)] == [b"0", b"1", b"2"]
    assert pops.committed(topic=RETRY) == pops.parts.store.offsets(RETRY)[1]


# -- filters ----------------------------------------------------------------------------------------------------------


def test_prefetch_of_another_filter_is_discarded(pops: PopBench) -> None:
    for i in range(20):
        pops.put("t", 1, first=i, tag="ab"[i % 2])
    assert bodies(pops.pop(n=2)) == [b"0", b"1"]
    assert bodies(pops.pop(n=2, filter=tags("b"))) == [b"3", b"5"]
    assert bodies(pops.pop(n=2)) == [b"6", b"7"]


def test_copies_are_not_filtered_again(pops: PopBench) -> None:
    pops.put("t", 1, tag="a")
    pops.pop(filter=tags("a"))
    pops.advance(INVISIBLE_MS)
    assert bodies(pops.pop(filter=tags("b"))) == [b"0"]


# -- the retry topic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lucky", "expected"), [(0.19, b"0"), (0.20, b"1")])
def test_one_pop_in_five_looks_at_the_retry_topic_first(tmp_path: Path, lucky: float, expected: bytes) -> None:
    with PopBench(tmp_path / "store", rng=lambda: lucky, queues=1) as pops:
        pops.put("t", 1)
        pops.pop()
        pops.advance(INVISIBLE_MS)
        pops.put("t", 1, first=1)
        assert bodies(pops.pop()) == [expected]


@pytest.mark.parametrize("queues", [1, 2, 7, 99, 100, 101, 128])
def test_each_queue_comes_first_as_often_as_another(tmp_path: Path, queues: int) -> None:
    numbers = [(i + 0.5) / (100 * queues) for i in range(100 * queues)]
    turns = iter([0.5, *numbers])
    with PopBench(tmp_path / "store", rng=lambda: next(turns), queues=queues) as pops:
        pops.parts.groups.create("g")
        pops.parts.topics.ensure(RETRY, 1)
        assert pops.pop() == []
        route = pops.tables.route("g", "t")
        assert route is not None
        found = [route.sources() for _ in numbers]
        firsts = Counter((first[0], (second if first[0] else first)[1].key.queue_id) for first, second, *_ in found)
        assert firsts == {(mark, i): count for mark, count in [(2, 20), (0, 80)] for i in range(queues)}


def test_copies_go_to_version_1_by_option_and_both_are_read(tmp_path: Path) -> None:
    with PopBench(tmp_path / "store", pop_retry_version=1, queues=1) as pops:
        pops.put("t", 1)
        pops.pop()
        pops.advance(INVISIBLE_MS)
        assert [copy.body for copy in pops.read(RETRY_V1)] == [b"0"]
        pops.reopen(pop_retry_version=2)
        pops.put("t", 1, first=1)
        pops.pop()
        pops.advance(INVISIBLE_MS)
        assert [copy.body for copy in pops.read(RETRY)] == [b"1"]
        found = pops.pop(n=5)
        assert sorted(bodies(found)) == [b"0", b"1"]
        assert {d.receipt.split()[4] for d in found} == {"1", "2"}
        pops.ack(*found)
        assert pops.service.in_flight() == 0


def test_ambiguous_retry_topic_of_version_1_is_ignored(pops: PopBench) -> None:
    pops.parts.groups.create("g_t")
    pops.parts.topics.ensure(RETRY_V1, 1)
    pops.parts.store.put(RETRY_V1, b"of the queue model")
    assert pops.pop(n=5) == []


# -- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [False, True])
def test_a_pop_that_cannot_be_logged_hands_out_nothing(
    pops: PopBench, monkeypatch: pytest.MonkeyPatch, order: bool
) -> None:
    pops.put("t", 3)
    pops.refuse(monkeypatch, "put_pop")
    with pytest.raises(StoreFullError):
        pops.pop(n=2, order=order, local=False)
    monkeypatch.undo()
    assert bodies(pops.pop(n=5, order=order)) == [b"0", b"1", b"2"]


def test_a_copy_that_cannot_be_put_is_put_later_and_nothing_is_lost(
    pops: PopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pops.put("t", 200)
    for _ in range(7):
        pops.pop(n=32)
    copy_many = pops.parts.router.copy_many

    def some(copies: list[Any], attempts: int) -> int:
        return copy_many(copies[:70], attempts) if len(copies) == 200 else full()

    monkeypatch.setattr(pops.parts.router, "copy_many", some)
    with pytest.raises(StoreFullError):
        pops.advance(INVISIBLE_MS)
    assert len(pops.read(RETRY)) == 70
    monkeypatch.undo()
    pops.advance(INVISIBLE_MS)
    assert sorted(copy.body for copy in pops.read(RETRY)) == sorted(str(i).encode() for i in range(200))
    assert pops.committed() == 200


def test_copies_that_are_put_together_keep_what_the_message_was(pops: PopBench) -> None:
    for host in ("10.0.0.7:90", "[fe80::1]:91", "10.0.0.8:92"):  # a copy from an IPv6 host is put by itself
        properties = {"TAGS": "a", "KEYS": "k1 k2", "mine": host, "DELAY": "3"}
        pops.parts.store.append("t", 0, host.encode(), properties=properties, flag=7, born_host=host, reconsume_times=1)
    popped = [delivery.message for delivery in pops.pop(n=3)]
    pops.advance(INVISIBLE_MS)

    def kept(message: Message) -> tuple[object, ...]:
        return (
            message.body,
            message.tag,
            message.keys,
            message.flag,
            dict(message.properties),
            message.born_host,
            message.born_timestamp_ms,
        )

    copies = pops.read(RETRY)
    assert len(copies) == 3
    assert sorted(map(kept, copies), key=str) == sorted(map(kept, popped), key=str)
    assert [copy.reconsume_times for copy in copies] == [2, 2, 2]
    assert all("DELAY" not in copy.stored_properties() for copy in copies)


def test_a_copy_has_no_reason_of_an_earlier_failure(pops: PopBench) -> None:
    """Such as a message of the group's own retry topic, or of a client that sets the property."""
    pops.parts.store.append("t", 0, b"1", properties={"mqstore_retry_reason": "earlier"})
    pops.pop()
    pops.advance(INVISIBLE_MS)
    [copy] = pops.read(RETRY)
    assert "mqstore_retry_reason" not in copy.stored_properties()


def test_each_message_that_expires_again_is_looked_at_once(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was looked at with all that follow it, and half of the time of the second expiry was that."""
    pops.put("t", 32)
    pops.pop(n=32)
    pops.advance(INVISIBLE_MS)
    looked = Counter[int]()
    reason = unordered._reason
    monkeypatch.setattr(unordered, "_reason", lambda *delivery: (looked.update([delivery[-1]]), reason(*delivery))[1])
    assert len(pops.pop(n=32)) == 32
    pops.advance(INVISIBLE_MS)
    assert sorted(looked) == [*range(32)]
    assert max(looked.values()) <= 2


def test_an_ack_that_cannot_be_logged_settles_nothing(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pops.put("t", 1)
    [delivery] = pops.pop(local=False)
    pops.refuse(monkeypatch, "put_settled")
    with pytest.raises(StoreFullError):
        pops.ack(delivery)
    monkeypatch.undo()
    assert pops.committed() == 0
    pops.ack(delivery)
    assert pops.committed() == 1


def test_a_message_that_retention_took_in_flight_is_given_up_and_counted(pops: PopBench) -> None:
    pops.put("t", 3, body_bytes=30_000)
    pops.pop(n=3)
    pops.put("t", 2, first=3, body_bytes=30_000)
    pops.parts.store.flush()
    pops.parts.store.dispatch()
    pops.parts.store.drop_before(pops.parts.store.max_offset)
    assert pops.parts.store.offsets("t")[0] > 0
    pops.advance(INVISIBLE_MS)
    assert pops.service.in_flight() == 0
    kept = [copy.body[:1] for copy in pops.read(RETRY)]
    lost = sum(pops.parts.statistics.snapshot().lost.values())
    assert len(kept) + lost == 3
    assert lost > 0


# -- what is shown, and waiting ---------------------------------------------------------------------------------------


def test_a_parked_receiver_is_woken_by_a_message_a_copy_and_a_release(pops: PopBench) -> None:
    fired: list[bool] = []
    assert pops.pop() == []

    def park() -> None:
        fired.clear()
        pops.park(fired.append)
        pops.settle()

    park()
    assert fired == []
    pops.put("t", 1)
    pops.settle()
    assert fired == [True]
    [delivery] = pops.pop()
    park()
    assert fired == []
    pops.release(delivery)
    pops.settle()
    assert fired == [True]
    pops.pop()
    park()
    assert fired == []
    pops.advance(INVISIBLE_MS)
    assert fired == [True]
    park()  # the copy is there already
    assert fired == [True]


def test_the_pop_log_has_the_records_of_delivery_pop_log(pops: PopBench) -> None:
    pops.put("t", 4)
    now_ms = pops.now_ms
    first = pops.pop(n=3, local=False)
    pops.ack(first[0], first[2])
    pops.service.change_invisible("g", "t", first[1].receipt, 1_000)
    pops.release(*pops.pop(local=False))
    pops.advance(1_000)
    log = pops.read(POP_LOG_TOPIC)
    assert [(record.tag, record.json()) for record in log] == [
        ("ck", {"t": "t", "c": "g", "q": 0, "so": 0, "pt": now_ms, "it": 60_000, "d": [0, 1, 2], "nx": 3}),
        ("ack", {"k": 0, "o": [0, 2]}),
        ("chg", {"k": 0, "o": 1, "pt": now_ms + 1, "it": 999}),
        ("ck", {"t": "t", "c": "g", "q": 0, "so": 3, "pt": now_ms, "it": 60_000, "d": [0], "nx": 4}),
        ("rel", {"k": 3, "o": [3]}),
        ("rev", {"k": 0, "o": [1]}),
    ]


@pytest.mark.parametrize("order", [False, True])
def test_receiver_waits_for_deliveries_of_the_other_order(pops: PopBench, order: bool) -> None:
    """It looked again at once, found nothing, and so on: a core at 100% until its time was over."""
    pops.put("t", 4)
    pops.pop(order=not order)
    assert not pops.may_find(order=order)
    woken: list[bool] = []
    pops.park(woken.append, order=order)
    pops.settle()
    assert woken == []
    if not order:  # once the batch in order has ended
        pops.advance(60_000)
        assert woken == [True]


def test_released_retry_wakes_a_receiver_of_another_queue(tmp_path: Path) -> None:
    """Whoever waits on a queue is given retries as well, but only who waited on queue 0 was told."""
    woken: list[bool] = []
    with PopBench(tmp_path) as pops:
        pops.put("t", 1, queue_id=3)
        pops.pop(invisible_ms=1_000)
        pops.advance(1_000)
        [retry] = pops.pop()
        pops.park(woken.append, queue_id=3)
        pops.release(retry)
        pops.settle()
        assert woken == [True]
        assert bodies(pops.pop(queue_id=3)) == [b"0"]


def test_pending_reset_of_exhausted_priorities_is_applied(tmp_path: Path) -> None:
    with PopBench(tmp_path, queues=0) as pops:
        pops.parts.topics.create("t", queues=3, message_type="PRIORITY")
        for queue_id in range(3):
            pops.put("t", 1, queue_id=queue_id)
        assert [delivery.queue_id for delivery in pops.pop(n=9)] == [2, 1, 0]
        pops.reads.reset("g", "t", None, "earliest")
        assert [delivery.queue_id for delivery in pops.pop(n=9)] == [2, 1, 0]
