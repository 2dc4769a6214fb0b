"""What a review with hostile eyes found: races, errors half-way, arguments that spoil a file (reliability#p2).

Each test tells what a user would have seen. They look at the broker as a whole, so they lie apart from the modules'.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.broker.broker import Broker
from mqstore.broker.names import POP_LOG_GROUP, POP_LOG_TOPIC
from mqstore.broker.pop.service import Delivery
from mqstore.broker.pop.state import QueueKey, Timeline
from mqstore.clock import SimulatedClock
from mqstore.errors import (
    ConfigError,
    InvalidMessageError,
    MQStoreError,
    NotPermittedError,
    ReceiptExpiredError,
    TransactionStateError,
)
from mqstore.layout.properties import TIMER_DELAY_MS, UNIQ_KEY
from mqstore.options import StoreConfig
from tests.broker.popsupport import PopBench


def bodies(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.message.body for delivery in deliveries]


def open_broker(path: Path, clock: SimulatedClock | None = None) -> Broker:
    return Broker(mqstore.MessageStore(path, config=StoreConfig(clock=clock or SimulatedClock())))


def fail_once(monkeypatch: pytest.MonkeyPatch, target: object, name: str, *, call: int = 1) -> None:
    """Let the `call`-th coming call of `target.name` meet a full disk."""
    real, calls = getattr(target, name), [0]

    def put(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise OSError("no space left")
        return real(*args, **options)

    monkeypatch.setattr(target, name, put)


# -- receipts that are too late ----------------------------------------------------------------------------------------


def test_a_receipt_from_before_a_reset_acknowledges_nothing_in_order(tmp_path: Path) -> None:
    """A group was reset to have a day's messages again. A worker still had the receipt of the first of them, and its
    acknowledgement, taken for one whose record is lost (delivery#order-missing), made the group skip that message."""
    with PopBench(tmp_path) as bench:
        bench.put("t", 3)
        first = bench.pop(order=True)
        bench.ack(*first)
        bench.pop(order=True)
        bench.reset(0)
        with pytest.raises(ReceiptExpiredError):
            bench.ack(*first)
        assert bodies(bench.pop(order=True, n=3)) == [b"0", b"1", b"2"]


def test_nor_does_one_from_before_a_restart(tmp_path: Path) -> None:
    with PopBench(tmp_path) as bench:
        bench.put("t", 2)
        old = bench.pop(order=True, n=2)
        bench.ack(*old)
        bench.reopen()
        bench.ack(old[0])  # again is harmless; and the queue is known now
        bench.clock.advance(1)
        bench.reset(0)
        with pytest.raises(ReceiptExpiredError):
            bench.ack(old[0])
        assert bodies(bench.pop(order=True, n=2)) == [b"0", b"1"]


def test_a_receipt_in_order_settles_nothing_of_a_group_that_pops_without(tmp_path: Path) -> None:
    """The message that another receiver had in flight was forgotten: it never came again."""
    with PopBench(tmp_path) as bench:
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


def test_who_waited_while_the_topic_was_deleted_is_told_that_it_is_too_late(tmp_path: Path) -> None:
    """`ack` raised ConfigError: offset -1 cannot be committed."""
    with PopBench(tmp_path) as bench:
        bench.put("t", 1)
        [delivery] = bench.pop()
        state = bench.service._tables.states[QueueKey("t", "g", 0)]
        find = bench.service._state_of
        bench.service._state_of = lambda *args: (find(*args), bench.parts.topics.delete("t", force=True))[0]  # type: ignore[method-assign,func-returns-value]
        with pytest.raises(ReceiptExpiredError):
            bench.ack(delivery)
        assert state.gone


# -- errors half-way ---------------------------------------------------------------------------------------------------


def test_a_pop_from_a_queue_that_is_not_there_hands_out_nothing(tmp_path: Path) -> None:
    """When luck had it look at the retry topic first, what it found there was in flight with nobody."""
    with PopBench(tmp_path, rng=lambda: 0.0) as bench:
        bench.put("t", 1)
        bench.pop(invisible_ms=1_000)
        bench.advance(1_000)
        for n in (1, 2):
            with pytest.raises(ConfigError, match="99"):
                bench.pop(queue_id=99, n=n)
        assert bench.service.pending("g") == []


def test_what_one_queue_gave_is_returned_when_another_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was in flight, and its receiver got an exception: it came again when its time was over, an attempt less."""
    with PopBench(tmp_path, rng=lambda: 0.0) as bench:
        bench.put("t", 2)
        bench.put("t", 2, queue_id=1, first=2)
        fail_once(monkeypatch, bench.service._tables.log, "put_pop", call=2)
        assert bodies(bench.pop(n=8)) == [b"0", b"1"]
        assert bodies(bench.pop(n=8)) == [b"2", b"3"]
        fail_once(monkeypatch, bench.service._tables.log, "put_pop")
        bench.put("t", 1, first=4)
        with pytest.raises(OSError, match="space"):  # nothing was found before it
            bench.pop(n=8)
        assert bodies(bench.pop(n=8)) == [b"4"]


def test_a_reset_that_meets_a_full_disk_is_made_up_for_by_the_next_pop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table said 0 and pops went on behind the end: until a restart the group was in two places."""
    with PopBench(tmp_path) as bench:
        bench.put("t", 3)
        bench.ack(*bench.pop(n=3))
        fail_once(monkeypatch, bench.service._tables.log, "put_reset")
        with pytest.raises(OSError, match="space"):
            bench.reset(0)
        fail_once(monkeypatch, bench.service._tables.log, "put_reset")
        with pytest.raises(OSError, match="space"):
            bench.pop()
        assert bench.committed() == 0
        assert bodies(bench.pop(n=3)) == [b"0", b"1", b"2"]


def test_a_topic_is_forgotten_even_if_the_log_cannot_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`delete` raised after the topic was gone, its other queues stayed in flight, and other listeners never heard."""
    told: list[str] = []
    with PopBench(tmp_path) as bench:
        bench.put("t", 1)
        bench.put("t", 1, queue_id=1)
        bench.pop(n=2)
        bench.parts.topics.on_change.append(told.append)
        fail_once(monkeypatch, bench.service._tables.log, "put_reset")
        bench.parts.topics.delete("t", force=True)
        assert told == ["t"]
        assert bench.service.in_flight() == 0
        bench.put("t", 1, first=7)
        assert bodies(bench.pop(n=8)) == [b"7"]


def test_a_dead_letter_in_order_that_could_not_be_filed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody came back to it: a receiver that was parked waited for ever on a queue that was free."""
    woken: list[bool] = []
    with PopBench(tmp_path) as bench:
        bench.parts.groups.create("g", max_attempts=1)
        bench.put("t", 2)
        bench.pop(order=True, invisible_ms=1_000)
        bench.service.add_waiter("g", "t", -1, None, woken.append, order=True)
        fail_once(monkeypatch, bench.service._tables, "dead_letter")
        bench.clock.advance(1_000)
        with pytest.raises(OSError, match="space"):
            bench.service.run_once(bench.now_ms)
        bench.advance(1_000)
        assert woken == [True]
        assert bodies(bench.pop(order=True)) == [b"1"]
        assert [letter.body for letter in bench.read("%DLQ%g")] == [b"0"]


# -- records as long as one can be -------------------------------------------------------------------------------------


def put_longest(bench: PopBench) -> int:
    """The longest message that fits a segment of 64 KiB; its copies, whose topics have longer names, do not."""
    size = 1 << 16
    while True:
        try:
            bench.parts.store.put("t", b"x" * size, 0)
        except InvalidMessageError:
            size -= 1
        else:
            return size


@pytest.mark.parametrize("max_attempts", [1, 16])
def test_a_message_that_no_copy_fits_comes_again_from_where_it_lies(tmp_path: Path, max_attempts: int) -> None:
    """Neither its copy nor its dead letter fit a segment: it stayed in flight for ever, an error every ten seconds."""
    with PopBench(tmp_path) as bench:
        bench.parts.groups.create("g", max_attempts=max_attempts)
        size = put_longest(bench)
        bench.put("t", 1)
        [first, _] = bench.pop(n=2, invisible_ms=1_000)
        bench.advance(1_000)
        again = bench.pop(n=2)
        assert size in [len(delivery.message.body) for delivery in again]
        with pytest.raises(ReceiptExpiredError):
            bench.ack(first)
        bench.reopen()
        bench.settle()
        again = bench.pop(n=2)
        assert size in [len(delivery.message.body) for delivery in again]
        bench.ack(*again)
        bench.advance(100_000)
        assert bench.pop(n=2) == []
        assert bench.committed() == 2


def test_a_dead_letter_goes_without_our_marks_where_the_record_has_no_room_for_them(tmp_path: Path) -> None:
    with PopBench(tmp_path) as bench:
        bench.parts.groups.create("g", max_attempts=1)
        longest = put_longest(bench)
        bench.parts.store.put("t", b"y" * (longest - len("%DLQ%g") + len("t")), 0)
        bench.pop(n=2, invisible_ms=1_000)
        bench.advance(1_000)
        assert [(letter.body[:1], letter.stored_properties()) for letter in bench.read("%DLQ%g")] == [(b"y", {})]


def test_in_order_it_goes_on_being_delivered(tmp_path: Path) -> None:
    """Every pop of the queue raised: all behind it was out of reach."""
    with PopBench(tmp_path) as bench:
        bench.parts.groups.create("g", max_attempts=1)
        size = put_longest(bench)
        bench.put("t", 1)
        bench.pop(order=True, invisible_ms=1_000)
        bench.advance(1_000)
        [again] = bench.pop(order=True)
        assert len(again.message.body) == size
        bench.ack(again)
        assert bodies(bench.pop(order=True)) == [b"0"]


def test_a_transaction_whose_timer_leaves_it_no_room_is_refused_when_it_begins(tmp_path: Path) -> None:
    """The half message fitted, its commit did not: it could only be given up, after 15 questions."""
    with open_broker(tmp_path) as broker:
        refused = 0
        for size in range(32_767, 0, -1):
            properties = {"a": "x" * size, UNIQ_KEY: f"key-{size}", TIMER_DELAY_MS: "5000"}
            try:
                half = broker.transactions.prepare("t", b"", properties, producer_group="p", queue_id=0)
            except InvalidMessageError:
                refused += 1
                continue
            break
        assert refused
        assert broker.transactions.end(half, "commit") is not None


# -- transactions ------------------------------------------------------------------------------------------------------


def test_what_was_committed_before_a_crash_cannot_be_rolled_back(tmp_path: Path) -> None:
    """It was rolled back, said the answer, while everybody could read it."""
    broker = open_broker(tmp_path)
    half = broker.transactions.begin("t", b"paid", producer_group="till", queue_id=0)
    broker.transactions.end(half, "commit")
    broker.store._closed = True  # killed: its op was only gathered
    broker.store._release()
    with open_broker(tmp_path) as broker:
        with pytest.raises(TransactionStateError) as error:
            broker.transactions.end(half.transaction_id, "rollback")
        assert error.value.outcome == "commit"
        assert broker.transactions.end(half.transaction_id, "commit") is None
        assert broker.transactions.open_count() == 0
        assert [message.body for message in broker.store.read("t", 0)] == [b"paid"]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_closing_while_the_housekeeper_delivers(tmp_path: Path) -> None:
    """Both took from the same queue of callbacks; one found it empty, raised, and the store stayed open and locked."""
    called: list[str] = []
    broker = open_broker(tmp_path)
    broker.put("t", b"")

    def housekeeper(_worth_a_read: bool) -> None:
        called.append("first")
        other = threading.Thread(target=broker._waiters.run_once, args=(0,))
        other.start()
        other.join()

    broker.add_waiter("u", 0, 0, housekeeper)
    broker.add_waiter("u", 0, 0, lambda _: called.append("second"))
    broker.close()
    assert called == ["first", "second"]
    open_broker(tmp_path).close()


@pytest.mark.parametrize("order", [False, True])
def test_a_receiver_waits_while_the_group_has_messages_in_flight_the_other_way(tmp_path: Path, order: bool) -> None:
    """It looked again at once, found nothing, and so on: a core at 100% until its time was over."""
    with PopBench(tmp_path) as bench:
        bench.put("t", 4)
        bench.pop(order=not order)
        assert not bench.service.wait_for("g", "t", -1, None, order, 0)
        woken: list[bool] = []
        bench.service.add_waiter("g", "t", -1, None, woken.append, order=order)
        bench.settle()
        assert woken == []
        if not order:  # once the batch in order has ended
            bench.advance(60_000)
            assert woken == [True]


def test_a_receiver_of_another_queue_is_woken_for_a_retry_that_was_given_back(tmp_path: Path) -> None:
    """Whoever waits on a queue is given retries as well, but only who waited on queue 0 was told."""
    woken: list[bool] = []
    with PopBench(tmp_path) as bench:
        bench.put("t", 1, queue_id=3)
        bench.pop(invisible_ms=1_000)
        bench.advance(1_000)
        [retry] = bench.pop()
        bench.service.add_waiter("g", "t", 3, None, woken.append)
        bench.release(retry)
        bench.settle()
        assert woken == [True]
        assert bodies(bench.pop(queue_id=3)) == [b"0"]


# -- many in flight ----------------------------------------------------------------------------------------------------


def test_others_have_their_turn_while_very_many_come_again(tmp_path: Path) -> None:
    """A million deliveries that ended at once held the housekeeper for a minute and a half."""
    count = 1_000
    with PopBench(tmp_path) as bench:
        bench.put("t", count)
        for _ in range(count):
            bench.pop(invisible_ms=1_000)
        bench.clock.advance(1_000)
        due_ms = bench.service.run_once(bench.now_ms)
        assert due_ms == bench.now_ms
        assert 0 < bench.service.in_flight() < count
        bench.settle()
        assert bench.service.in_flight() == 0


def test_changing_times_one_by_one_does_not_look_at_all_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 20,000 messages popped by 32 and each given another time, every change went over all of them: 20 ms each."""
    looks = [0]
    compact = Timeline.compact
    monkeypatch.setattr(Timeline, "compact", lambda self: (looks.__setitem__(0, looks[0] + 1), compact(self))[1])
    with PopBench(tmp_path) as bench:
        bench.put("t", 3_200)
        popped = [delivery for _ in range(100) for delivery in bench.pop(n=32)]
        for i, delivery in enumerate(popped):
            bench.service.renew("g", "t", delivery.receipt, 60_001 + i)
        state = bench.service._tables.states[QueueKey("t", "g", 0)]
        for delivery in popped[:-1]:
            bench.ack(delivery)
        assert looks[0] < 50
        assert state.timeline.entries < 1_500  # and what is settled does go


def test_a_delivery_far_ahead_is_on_the_agenda_once(tmp_path: Path) -> None:
    """Each look at its queue entered it anew: half a million entries a queue in twelve hours."""
    with PopBench(tmp_path) as bench:
        bench.put("t", 101)
        bench.pop(invisible_ms=12 * 3_600_000)
        for _ in range(100):
            bench.ack(*bench.pop(invisible_ms=100))
            bench.advance(100)
        assert len(bench.service._tables._agenda) < 5
        bench.advance(12 * 3_600_000)
        assert [delivery.attempt for delivery in bench.pop()] == [2]


def test_transactions_that_ended_do_not_wait_for_their_immunity(tmp_path: Path) -> None:
    """Each stayed on the list of those to ask about for as long as it might have taken."""
    asked: list[str] = []
    clock = SimulatedClock()
    with open_broker(tmp_path, clock) as broker:
        transactions = broker.transactions
        transactions.on_check("p", lambda message: asked.append(message.body.decode()))
        first = transactions.begin("t", b"open", producer_group="p", immunity=3_600)
        for _ in range(3_000):
            transactions.end(transactions.begin("t", b"", producer_group="p", immunity=86_400), "rollback")
        last = transactions.begin("t", b"too", producer_group="p", immunity=7_200)
        assert len(transactions._due) < 1_100
        clock.advance(7_200_000)
        broker.run_once()
        assert asked == ["open", "too"]
        assert transactions.open_transactions() == [first, last]


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "note",
    [
        ("g", "t", 0, 2**63, 1),
        ("g", "t", 0, 1, 2**31),
        ("g", "t", -1, 1, 1),
        ("g", "t", 2**31, 1, 1),
        ("g", "t", 0, 1.5, 1),
        ("a@b", "t", 0, 1, 1),
    ],
)
def test_no_attempt_is_noted_with_which_the_file_could_not_be_read_again(tmp_path: Path, note: Any) -> None:
    """The file was written, and the next open took it for damaged."""
    clock = SimulatedClock()
    with open_broker(tmp_path, clock) as broker:
        broker.put("t", b"")
        broker.groups.create("g")
        with pytest.raises(ValueError, match="must be"):
            broker.note_attempt(*note)
    open_broker(tmp_path, clock).close()


def test_an_attempt_id_is_a_text(tmp_path: Path) -> None:
    """As above: order info with another one cannot be read."""
    clock = SimulatedClock()
    with open_broker(tmp_path, clock) as broker:
        broker.put("t", b"")
        with pytest.raises(ConfigError, match="attempt id"):
            broker.pop("g", "t", order=True, attempt_id=5)  # type: ignore[arg-type]
        assert len(broker.pop("g", "t", order=True, attempt_id="5")) == 1
    open_broker(tmp_path, clock).close()


def test_a_deleted_group_is_forgotten_over_a_crash(tmp_path: Path) -> None:
    """Its settings were gone and its progress was not: a new group of that name never got what the old had consumed."""
    broker = open_broker(tmp_path)
    broker.put("t", b"", queue_id=0)
    broker.commit("g", "t", 0, 1, durability="flush")
    broker.delete_group("g")
    broker.store._closed = True  # killed
    broker.store._release()
    with open_broker(tmp_path) as broker:
        assert broker.committed("g", "t", 0) is None
        assert len(broker.pop("g", "t", queue_id=0)) == 1


def test_a_group_of_the_same_name_does_not_inherit_failed_attempts(tmp_path: Path) -> None:
    """Its first delivery of a message counted as the seventeenth, and made a dead letter of it."""
    with open_broker(tmp_path) as broker:
        broker.put("t", b"", queue_id=0)
        broker.groups.create("g")
        broker.note_attempt("g", "t", 0, 0, 16)
        broker.delete_group("g")
        broker.groups.create("g")
        assert broker.attempts("g", "t", 0) == {}


@pytest.mark.parametrize(
    "call",
    [
        lambda broker: broker.pop("g", "t", invisible=math.inf),
        lambda broker: broker.change_invisible("g", "t", "0 0 0 0 0 mqstore 0 0", math.inf),
        lambda broker: broker.nack("g", "t", "0 0 0 0 0 mqstore 0 0", math.inf),
        lambda broker: broker.send_back("g", 0, delay=math.inf),
        lambda broker: broker.groups.create("h", retry_policy=mqstore.RetryPolicy(delays=[1, math.inf])),
        lambda broker: broker.groups.create("h", retry_policy=mqstore.RetryPolicy.exponential(maximum=math.inf)),
    ],
)
def test_a_time_without_end_is_refused(tmp_path: Path, call: Callable[[Broker], object]) -> None:
    """OverflowError, from deep inside."""
    with open_broker(tmp_path) as broker:
        broker.put("t", b"")
        with pytest.raises(ConfigError, match="ends"):
            call(broker)
        assert broker.stats().in_flight == 0


def test_but_one_may_wait_without_end(tmp_path: Path) -> None:
    with open_broker(tmp_path) as broker:
        broker.put("t", b"")
        assert len(broker.pop("g", "t", poll=math.inf)) == 1
        woken: list[bool] = []
        broker.add_waiter("u", 0, 0, woken.append, timeout=math.inf)
        broker.put("u", b"", queue_id=0)
        broker.run_once()
        assert woken == [True]


@pytest.mark.parametrize("queues", [0, -1])
def test_a_topic_whose_file_gives_it_no_queues_is_named(tmp_path: Path, queues: int) -> None:
    """ZeroDivisionError, or a message in queue 0 that nobody reads."""
    with open_broker(tmp_path) as broker:
        broker.topics.create("t")
    file = tmp_path / "config" / "topics.json"
    value = json.loads(file.read_bytes())
    value["topicConfigTable"]["t"] |= {"readQueueNums": queues, "writeQueueNums": queues}
    file.write_text(json.dumps(value))
    with open_broker(tmp_path) as broker:
        for call in (lambda: broker.put("t", b""), lambda: broker.put_many("t", [b""]), lambda: broker.pop("g", "t")):
            with pytest.raises(NotPermittedError, match="queues"):
                call()
        broker.topics.alter("t", write_queues=2, read_queues=2)
        broker.put("t", b"")
        assert len(broker.pop("g", "t")) == 1


@pytest.mark.parametrize("group", [5.5, " ", "x" * 64])
def test_a_message_group_is_checked_where_the_queue_is_given_too(tmp_path: Path, group: Any) -> None:
    with open_broker(tmp_path) as broker:
        with pytest.raises(InvalidMessageError, match=r"message.group"):
            broker.put("t", b"", queue_id=0, message_group=group)
        assert broker.store.offsets_or_none("t", 0) is None


def test_an_async_put_checks_its_durability(tmp_path: Path) -> None:
    with open_broker(tmp_path) as broker:
        future = broker.put_async("t", b"", durability="fast")  # type: ignore[arg-type]
        assert isinstance(future.exception(0), MQStoreError | ValueError)


def test_a_callback_of_an_async_put_may_close(tmp_path: Path) -> None:
    """The thread that calls it waited for itself: RuntimeError, and no table was written."""
    closed: Future[None] = Future()
    broker = open_broker(tmp_path)

    def close(_: object) -> None:
        try:
            broker.commit("g", "t", 0, 1)
            broker.close()
        except BaseException as error:
            closed.set_exception(error)
        else:
            closed.set_result(None)

    broker.put("t", b"", queue_id=0)
    broker.put_async("t", b"", durability="flush").add_done_callback(close)
    closed.result(30)
    with open_broker(tmp_path) as broker:
        assert broker.committed("g", "t", 0) == 1


# -- a clock that was set back, then a crash --------------------------------------------------------------------------


def test_order_info_of_before_the_clock_was_set_back_does_not_outlive_the_log(tmp_path: Path) -> None:
    """The file's batch has the later pop time, and is the older one."""
    with PopBench(tmp_path) as bench:
        bench.put("t", 4)
        bench.clock.advance(3_600_000)
        first = bench.pop(order=True, n=1)
        bench.service._keeper.save(bench.now_ms)
        bench.clock.set_wall(bench.clock.now_ms() - 3_600_000)
        bench.ack(*first)
        for _ in range(2):
            bench.ack(*bench.pop(order=True, n=1))
        bench.kill()
        bench.open()
        bench.settle()
        assert bodies(bench.pop(order=True, n=4)) == [b"3"]


def test_the_same_with_a_log_that_begins_behind_the_file(tmp_path: Path) -> None:
    with PopBench(tmp_path) as bench:
        bench.put("t", 4)
        bench.clock.advance(3_600_000)
        first = bench.pop(order=True, n=1)
        bench.service._keeper.save(bench.now_ms)
        bench.clock.set_wall(bench.clock.now_ms() - 3_600_000)
        bench.ack(*first)
        bench.parts.offsets.commit(POP_LOG_GROUP, POP_LOG_TOPIC, 0, bench.parts.store.offsets(POP_LOG_TOPIC)[1])
        bench.parts.offsets.save()
        second = bench.pop(order=True, n=3)
        bench.ack(second[0])
        bench.kill()
        bench.open(release_in_flight=False)
        bench.settle()
        assert bench.pop(order=True, n=4) == []  # two of the batch are still with their receiver
        bench.advance(60_001)
        assert bodies(bench.pop(order=True, n=4)) == [message.message.body for message in second[1:]]
