"""Pop across restarts: what a close or a kill leaves, and what the next open makes of it (delivery#pop-replay)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.filters import parse_filter
from mqstore.broker.names import POP_LOG_GROUP, POP_LOG_TOPIC, dlq_topic, pop_retry_topic
from mqstore.broker.pop import keep as popkeep
from mqstore.broker.pop import log as poplog
from mqstore.broker.pop.log import ACK, PopLog
from mqstore.broker.pop.state import QueueState
from mqstore.errors import InvalidReceiptError, ReceiptExpiredError
from tests.broker.popsupport import PopBench, offsets
from tests.log.support import flip, open_store

RETRY = pop_retry_topic("g", "t")
INVISIBLE_MS = 60_000
DAY_MS = 86_400_000


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PopBench]:
    with PopBench(tmp_path / "store") as bench:
        bench.parts.topics.create("t", queues=1)
        yield bench


@pytest.fixture(params=["close", "kill"])
def restart(request: pytest.FixtureRequest, bench: PopBench) -> Any:
    """Both ways in which a process ends: after either the same is known."""

    def restart(**config: Any) -> None:
        (bench.close if request.param == "close" else bench.kill)()
        bench.reopen(**config)

    return restart


def test_nothing_is_released_when_that_is_switched_off(bench: PopBench, restart: Any) -> None:
    bench.put("t", 1)
    bench.pop()
    restart(release_in_flight=False)
    bench.settle()
    assert bench.read(RETRY) == []
    bench.advance(INVISIBLE_MS)
    assert len(bench.read(RETRY)) == 1


@pytest.mark.parametrize("order", [False, True])
def test_what_was_given_back_for_later_comes_later_after_a_restart_too(
    bench: PopBench, restart: Any, monkeypatch: pytest.MonkeyPatch, order: bool
) -> None:
    """Nobody holds it: to release it burned its attempts, and a message that was to be tried again in an hour was a
    dead letter after as many restarts. Here its batch was put again."""
    bench.put("t", 2)
    first, second = bench.pop(n=2, order=order)
    bench.service.nack("g", "t", first.receipt, 3_600_000)
    if not order:
        kept = bench.service.change_invisible("g", "t", second.receipt, 3_600_000)  # held for as long
    else:
        kept = second.receipt
    monkeypatch.setattr(popkeep, "_REPLAY_RECORDS", 1)
    bench.advance(10_000)
    restart()
    restart()
    bench.settle()
    pending = {each.offset: each.visible_at_ms for each in bench.service.pending("g")}
    assert pending[0] - bench.now_ms > 3_500_000
    if not order:
        assert [copy.body for copy in bench.read(RETRY)] == [b"1"]
    bench.service.ack("g", "t", kept) if order else None
    bench.clock.advance(3_600_000)
    bench.settle()
    again = bench.pop(n=5, order=order) + (bench.pop(n=5) if not order else [])
    assert b"0" in [delivery.message.body for delivery in again]


def test_copies_made_before_the_end_are_not_made_again(bench: PopBench, restart: Any) -> None:
    bench.put("t", 3)
    late = bench.pop(n=2)
    bench.pop(local=False, invisible_ms=3_600_000)
    bench.advance(INVISIBLE_MS)
    restart()
    bench.advance(INVISIBLE_MS)
    assert len(bench.read(RETRY)) == 2
    with pytest.raises(ReceiptExpiredError):
        bench.ack(late[0])


def test_a_crash_between_copy_and_its_record_copies_once_more(bench: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("t", 1)
    bench.pop()

    def killed(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.service._tables.log._put, "rev", killed)
    bench.clock.advance(INVISIBLE_MS)
    with pytest.raises(KeyboardInterrupt):
        bench.service.run_once(bench.now_ms)
    monkeypatch.undo()
    bench.crash()
    bench.settle()
    assert len(bench.read(RETRY)) == 2


def test_a_backward_reset_is_not_undone_by_what_the_log_says_of_before(bench: PopBench, restart: Any) -> None:
    bench.put("t", 6)
    bench.ack(*bench.pop(n=6))
    bench.advance(5_000)  # `committed`, 6, and the replay position are on disk
    bench.reset(3)
    restart()
    bench.settle()
    assert bench.service.in_flight() == 0
    found = bench.pop(n=10)
    assert offsets(found) == [3, 4, 5]
    bench.ack(*found)
    restart()
    assert bench.pop(n=10) == []


def test_a_group_deleted_and_made_anew_begins_anew_after_a_restart(bench: PopBench, restart: Any) -> None:
    bench.put("t", 3)
    bench.pop(n=2)
    bench.parts.groups.delete("g")
    bench.parts.offsets.remove_group("g")
    bench.parts.groups.create("g")
    restart()
    bench.settle()
    assert offsets(bench.pop(n=5)) == [0, 1, 2]


# -- FIFO -------------------------------------------------------------------------------------------------------------


def test_what_an_ordered_batch_keeps_of_those_before_it_is_known_after_a_restart(bench: PopBench, restart: Any) -> None:
    bench.put("t", 5)
    first = bench.pop(n=4, order=True)
    bench.ack(first[1])
    bench.advance(INVISIBLE_MS)
    assert offsets(bench.pop(n=1, order=True, skip_acked=True)) == [0]
    restart()
    again = bench.pop(n=5, order=True, skip_acked=True)
    assert [(d.message.offset, d.attempt) for d in again] == [(0, 3), (2, 2), (3, 2), (4, 1)]
    bench.ack(*again)
    assert bench.committed() == 5


def test_attempts_are_counted_on_after_a_weekend(bench: PopBench, restart: Any) -> None:
    """Order info that nobody had touched for a day was dropped at the next save: after each weekend a message on which
    every consumer fails had all its attempts again, and its queue stood still for as long."""
    bench.parts.groups.create("g", retry_max_times=2)
    bench.parts.groups.create("orderly")
    bench.put("t", 2)
    bench.service.note_attempt("orderly", "t", 0, 0, 16)
    for _ in range(2):
        bench.pop(order=True, invisible_ms=1_000)
        bench.advance(1_000)
    bench.advance(10_000)
    restart()
    bench.clock.advance(2 * DAY_MS)

    bench.put("u", 1)
    bench.pop(topic="u", order=True)  # something that has the file written
    bench.advance(30_000)

    assert bench.service.attempts("orderly", "t", 0) == {0: 16}
    assert [delivery.attempt for delivery in bench.pop(order=True)] == [3]
    bench.advance(60_000)
    assert [dead.body for dead in bench.read(dlq_topic("g"))] == [b"0"]

    bench.parts.offsets.commit("orderly", "t", 0, 1)
    bench.parts.groups.delete("g")
    bench.parts.groups.create("g")
    bench.pop(topic="u", order=True)
    bench.clock.advance(2 * DAY_MS)
    bench.advance(30_000)
    assert [key for key in bench.service._orders.records() if key.topic == "t"] == []


def test_what_was_popped_twice_in_a_moment_and_given_back_is_free(bench: PopBench, restart: Any) -> None:
    """The second pop time is ahead of the clock, to differ from the first."""
    bench.put("t", 1)
    for _ in range(2):
        delivery = bench.pop(order=True, local=False)[0]
        bench.release(delivery)
    restart()
    assert offsets(bench.pop(order=True)) == [0]


def test_a_batch_settled_after_the_file_was_written_blocks_nothing(bench: PopBench) -> None:
    bench.put("t", 3)
    first = bench.pop(order=True, n=2, local=False, invisible_ms=3_600_000)
    bench.advance(10_000)  # the file says: two in flight
    bench.ack(*first)
    # The offset table says: settled, and no replay of their records. We write the file first; others may not.
    bench.parts.offsets.commit(POP_LOG_GROUP, POP_LOG_TOPIC, 0, 2)
    bench.parts.offsets.save()
    bench.crash()
    assert offsets(bench.pop(order=True)) == [2]


def test_a_late_receipt_is_refused_after_the_last_ordered_batch_was_settled_as_a_whole(
    bench: PopBench, restart: Any
) -> None:
    """The settled batch was forgotten, and the next in line taken for one whose record was lost: a receipt of an
    older batch settled it."""
    bench.put("t", 3)
    old = bench.pop(order=True, n=2)
    bench.advance(INVISIBLE_MS)
    bench.ack(*bench.pop(order=True))
    bench.advance(60_000)  # the replay position has left them behind; only the file knows
    restart()
    end = bench.parts.store.offsets(POP_LOG_TOPIC)[1]
    with pytest.raises(ReceiptExpiredError):
        bench.ack(old[1])
    for settle in (bench.service.nack, lambda *names: bench.service.dead_letter(*names, "late")):
        with pytest.raises(ReceiptExpiredError):
            settle("g", "t", old[1].receipt)
    assert bench.committed() == 1
    assert bench.parts.store.offsets(POP_LOG_TOPIC)[1] == end  # what is settled is not logged again at each start
    assert [(d.message.offset, d.attempt) for d in bench.pop(order=True)] == [(1, 1)]


def test_a_batch_of_an_older_order_info_file_does_not_come_back(bench: PopBench, restart: Any) -> None:
    """The replay position had passed the batch that took the file's batch's place, and a kill came before the file was
    written anew: the older batch counted again, with its receipts and its attempts."""
    bench.put("t", 3)
    old = bench.pop(order=True, n=2, invisible_ms=1_000)
    bench.advance(12_000)  # the file has it
    bench.ack(*bench.pop(order=True))
    bench.advance(5_000)
    restart()
    with pytest.raises(ReceiptExpiredError):
        bench.ack(old[1])
    assert [(d.message.offset, d.attempt) for d in bench.pop(order=True)] == [(1, 1)]


def test_a_reset_is_not_undone_by_an_older_order_info_file(bench: PopBench, restart: Any) -> None:
    """As above, with a reset that the replay position had passed: the queue stayed blocked by the batch it had ended,
    and began behind what that batch had acknowledged."""
    bench.put("t", 3)
    old = bench.pop(order=True, n=2, local=False, invisible_ms=3_600_000)
    bench.ack(old[0])
    bench.advance(12_000)
    bench.reset(0)
    bench.advance(5_000)
    restart()
    assert offsets(bench.pop(order=True, n=3)) == [0, 1, 2]


@pytest.mark.parametrize("popped", [False, True])
def test_a_reset_outlives_a_crash(bench: PopBench, popped: bool) -> None:
    """The group's position was on disk with the next save, up to five seconds later: a crash before that undid what an
    operator had been told was done."""
    bench.parts.groups.create("g")
    bench.put("t", 5)
    if popped:
        bench.ack(*bench.pop(n=5))
    bench.reset(3)
    bench.crash()
    assert bench.committed() == 3
    assert offsets(bench.pop(n=5)) == [3, 4]


def test_releasing_what_is_settled_changes_nothing(bench: PopBench, restart: Any) -> None:
    bench.put("t", 1)
    [delivery] = bench.pop(order=True)
    bench.ack(delivery)
    bench.advance(60_000)
    restart()
    end = bench.parts.store.offsets(POP_LOG_TOPIC)[1]
    bench.release(delivery)
    assert bench.parts.store.offsets(POP_LOG_TOPIC)[1] == end
    assert bench.pop(order=True) == []


def test_a_file_of_a_java_broker_is_taken_over(bench: PopBench) -> None:
    bench.parts.groups.create("g")
    bench.put("t", 6)
    now_ms = bench.now_ms
    bench.parts.offsets.commit("g", "t", 0, 1)
    bench.close()
    # cm: offset 3 was acknowledged; integer keys as fastjson writes them
    text = f'{{"table":{{"t@g":{{0:{{"cm":4,"i":60000,"l":{now_ms},"o":[1,1,2],"popTime":{now_ms}}}}}}}}}'
    (bench.path / "config" / "consumerOrderInfo.json").write_text(text)
    bench.reopen()
    assert bench.pop(order=True) == []
    receipt = f"1 {now_ms} 60000 999 0 DefaultCluster_broker 0 1"
    bench.service.ack("g", "t", receipt)
    assert bench.committed() == 2
    bench.crash()
    assert bench.pop(order=True) == []  # 2 is invisible; it is known from our own log now
    bench.advance(INVISIBLE_MS)
    again = bench.pop(order=True, n=5)
    assert offsets(again) == [2, 3, 4, 5]
    assert [d.attempt for d in again] == [2, 2, 1, 1]


def test_without_a_record_nothing_can_be_acknowledged(bench: PopBench) -> None:
    """With the record the order of what was popped is lost; what lies before the message would go with it."""
    bench.put("t", 6)
    bench.parts.groups.create("g")
    bench.parts.offsets.commit("g", "t", 0, 2)
    now_ms = bench.now_ms
    for offset in (2, 3, 5):
        with pytest.raises(ReceiptExpiredError):
            bench.service.ack("g", "t", f"2 {now_ms} 60000 999 0 mqstore 0 {offset}")
    with pytest.raises(InvalidReceiptError):
        bench.service.ack("g", "t", f"2 {now_ms} 60000 999 0 mqstore 0 6")
    assert bench.committed() == 2


# -- how long the log is ----------------------------------------------------------------------------------------------


def test_the_replay_position_is_the_oldest_unsettled_batch(bench: PopBench) -> None:
    def position() -> int:
        bench.advance(20_000)  # the order info file is written after 10 s, and the position follows it
        return bench.parts.offsets.committed(POP_LOG_GROUP, POP_LOG_TOPIC, 0) or 0

    bench.put("t", 6)
    one, two, three = (bench.pop(invisible_ms=3_600_000) for _ in range(3))
    ordered = bench.pop(group="fifo", order=True, invisible_ms=3_600_000)
    assert position() == 0
    bench.ack(*one)
    assert position() == 1
    bench.ack(*three)
    assert position() == 1
    bench.release(*two)
    assert position() == 1
    bench.ack(*bench.pop())
    assert position() == 3
    bench.service.ack("fifo", "t", [ordered[0].receipt])
    assert position() == bench.parts.store.offsets(POP_LOG_TOPIC)[1]
    assert [pin.topic for pin in bench.service.pins()] == []


def test_the_replay_position_moves_though_nothing_is_due_for_long(
    bench: PopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is settled at once asks nobody to come: with loans of an hour the log was held for an hour, too."""
    wakes: list[int] = []
    monkeypatch.setattr(bench.service._keeper, "_wake", lambda: wakes.append(bench.now_ms))

    def served() -> None:
        bench.put("t", 1)
        bench.ack(*bench.pop(invisible_ms=3_600_000))
        bench.parts.store.dispatch()

    def next_ms() -> int:
        return bench.service.run_once(bench.now_ms) or 1 << 62

    served()
    while next_ms() < bench.now_ms + 60_000:  # as the housekeeper, until it sleeps
        bench.clock.advance(next_ms() - bench.now_ms)
    for rest_ms in (60_000, 1_000, 10):
        wakes.clear()
        bench.clock.advance(rest_ms)
        for _ in range(5):
            served()
        assert wakes == [bench.now_ms]  # once: from then on it knows that it has to come
        assert [pin.topic for pin in bench.service.pins()] == [POP_LOG_TOPIC]
        begun = bench.now_ms
        while next_ms() < bench.now_ms + 60_000:
            bench.clock.advance(next_ms() - bench.now_ms)
        assert bench.now_ms - begun <= 5_000
        assert [pin.topic for pin in bench.service.pins()] == []


def test_ordered_messages_that_a_new_filter_passes_over_hold_nothing(bench: PopBench) -> None:
    bench.put("t", 2, tag="b")
    bench.pop(order=True, n=2, filter=parse_filter("b"), invisible_ms=1_000)
    bench.advance(1_000)
    assert bench.pop(order=True, n=2, filter=parse_filter("a")) == []
    assert bench.committed() == 2
    bench.advance(20_000)
    assert bench.parts.offsets.committed(POP_LOG_GROUP, POP_LOG_TOPIC, 0) == 1
    bench.advance(INVISIBLE_MS)
    bench.crash()
    assert bench.pop(order=True, n=2) == []


def test_the_pop_log_is_pinned_from_the_replay_position_on(bench: PopBench) -> None:
    bench.put("t", 2)
    bench.ack(*bench.pop())
    bench.pop()
    bench.advance(5_000)
    [pin] = bench.service.pins()
    assert pin.physical_offset == bench.read(POP_LOG_TOPIC)[2].physical_offset
    assert (pin.topic, pin.queue_id, pin.group) == (POP_LOG_TOPIC, 0, POP_LOG_GROUP)


def test_batches_that_are_put_again_are_looked_for_once(bench: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was released was looked at for each batch of it, under the lock of the queue."""
    monkeypatch.setattr(popkeep, "_REPLAY_RECORDS", 1)
    bench.put("t", 60)
    given = [delivery for _ in range(20) for delivery in bench.pop(n=2, local=False)]
    held = bench.pop(n=20, local=False)
    bench.release(*given)
    looks = []
    oldest = QueueState.oldest
    monkeypatch.setattr(QueueState, "oldest", lambda state: [oldest(state), looks.append(state)][0])
    bench.settle()
    assert len(looks) <= 3
    monkeypatch.undo()
    bench.advance(10_000)
    bench.crash()
    assert [pending.offset for pending in bench.service.pending("g")] == offsets(held)
    assert offsets(bench.pop(n=32)) == offsets(given)[:32]


def test_old_batches_are_put_again_so_that_a_replay_stays_short(
    bench: PopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(popkeep, "_REPLAY_RECORDS", 20)
    bench.put("t", 60)
    old = bench.pop(n=5, local=False, invisible_ms=3_600_000)
    moved = bench.service.change_invisible("g", "t", old[1].receipt, 7_200_000)
    bench.ack(old[2])
    bench.release(old[3])
    ordered = bench.pop(group="fifo", order=True, n=3, local=False, invisible_ms=3_600_000)
    bench.service.ack("fifo", "t", [ordered[0].receipt])
    before = bench.service.pending("g"), bench.service.pending("fifo")
    rest = [bench.pop(queue_id=0, n=1, invisible_ms=3_600_000)[0] for _ in range(21)]
    assert rest[0].message.offset == 3  # what was released
    bench.release(rest[0])
    bench.ack(*rest[1:])
    bench.advance(10_000)  # the first look has the order info file written, which the position follows
    low = bench.parts.offsets.committed(POP_LOG_GROUP, POP_LOG_TOPIC, 0)
    assert low is not None
    assert low >= bench.parts.store.offsets(POP_LOG_TOPIC)[1] - 20
    assert (bench.service.pending("g"), bench.service.pending("fifo")) == before
    bench.crash()
    assert (bench.service.pending("g"), bench.service.pending("fifo")) == before
    assert bench.committed() == 0
    assert offsets(bench.pop(n=2)) == [3, 25]
    bench.ack(old[0], old[4])
    bench.service.ack("g", "t", moved)
    bench.service.ack("fifo", "t", [ordered[1].receipt])
    assert bench.parts.offsets.committed("fifo", "t", 0) == 2
    assert bench.committed() == 3


def test_batches_are_put_again_when_many_segments_lie_behind_them(bench: PopBench) -> None:
    bench.put("t", 1)
    [old] = bench.pop(local=False, invisible_ms=3_600_000)
    bench.put("t", 12, first=1, body_bytes=30_000)  # two to a segment
    bench.advance(5_000)
    [pin] = bench.service.pins()
    assert pin.physical_offset > bench.parts.store.max_offset - (4 << 16)
    bench.crash()
    bench.ack(old)
    assert bench.committed() == 1


def test_a_lost_record_of_a_batch_has_its_messages_come_again(bench: PopBench) -> None:
    """What it had handed out was passed over for good as soon as a later batch of the queue showed how far the cursor
    had gone: one flipped byte of the log, and the group never got messages that were all there."""
    bench.put("t", 9)
    for _ in range(3):
        bench.pop(n=3, invisible_ms=60_000)
    lost = bench.parts.store.read(POP_LOG_TOPIC, 0, 1, 1)[0].physical_offset
    bench.close()
    flip(bench.path / "commitlog" / f"{0:020d}", lost + 90)
    bench.reopen()
    bench.crash()  # said once, not with every opening
    assert sorted(p.offset for p in bench.service.pending("g") if p.topic == "t") == [*range(9)]
    bench.settle()
    bodies = sorted(bytes(delivery.message.body) for delivery in bench.pop(n=20))
    assert bodies == [b"%d" % n for n in range(9)]


def test_records_that_make_no_sense_are_passed_over(bench: PopBench) -> None:
    bench.put("t", 3)
    first = bench.pop(n=2, local=False)
    for tag, value in [
        ("ck", {"t": "t", "c": "g"}),
        ("ck", {"t": "t", "c": "g", "q": "x", "so": 0, "pt": 1, "it": 1, "d": [0], "nx": 1}),
        ("ck", {"t": "t", "c": "g", "q": 0, "so": 0, "pt": 1, "it": 1, "d": [], "nx": 1}),
        ("ck", {"t": "t", "c": "g", "q": 0, "so": 900, "pt": 1, "it": 1, "d": [0], "nx": 901, "new": True}),
        ("ck", {"t": "t", "c": "g", "q": 0, "so": 0, "pt": 1, "it": 1, "d": [0], "nx": 1 << 63}),
        ("ck", {"t": "t", "c": "g", "q": 0, "so": -(1 << 63), "pt": 1 << 70, "it": 1, "d": [0], "nx": 1}),
        ("rst", {"t": "t", "c": "g", "q": 0, "o": 1 << 63}),
        ("rst", {"t": "t", "c": "g", "q": 0, "o": "1"}),
        ("ack", {"k": 0, "o": [77]}),
        ("ack", {"k": 10_000, "o": [0]}),
        ("ack", [1]),
        ("chg", {"k": 0}),
        ("new", {"k": 0}),
    ]:
        bench.parts.store.append(POP_LOG_TOPIC, 0, json.dumps(value).encode(), properties={"TAGS": tag})
    bench.parts.store.append(POP_LOG_TOPIC, 0, b"\xff{", properties={"TAGS": "ack"})
    bench.crash()
    assert [(p.topic, p.offset) for p in bench.service.pending("g")] == [("t", 0), ("t", 1)]
    bench.ack(*first)
    assert offsets(bench.pop(n=5)) == []
    bench.put("t", 1)
    assert offsets(bench.pop(n=5)) == [3]


def test_flushed_calls_are_on_disk_when_they_return(bench: PopBench) -> None:
    store = bench.parts.store
    bench.put("t", 1)
    [delivery] = bench.pop(durability="flush")
    assert store._commit.flushed == store.max_offset
    bench.service.ack("g", "t", [delivery.receipt], durability="flush")
    assert store._commit.flushed == store.max_offset


def test_a_store_with_durability_flush_pops_what_is_on_disk(tmp_path: Path) -> None:
    with PopBench(tmp_path / "flushed", durability="flush") as bench:
        bench.parts.topics.create("t", queues=1)
        bench.put("t", 3)
        found = bench.pop(n=2)
        bench.ack(found[0])
        store = bench.parts.store
        assert store._commit.flushed == store.max_offset
        bench.crash()
        bench.settle()
        bench.parts.store.flush()  # as the flusher does: nobody sees what a crash could take back
        assert sorted(d.message.body for d in bench.pop(n=5)) == [b"1", b"2"]


# -- a wall clock that was wrong --------------------------------------------------------------------------------------


@pytest.fixture(params=["running", "close", "kill"])
def set_back(request: pytest.FixtureRequest, bench: PopBench) -> Any:
    """Sets the wall clock back, with the store open or between two openings."""

    def set_back(duration_ms: int) -> None:
        if request.param != "running":
            (bench.close if request.param == "close" else bench.kill)()
        bench.clock.set_wall(bench.now_ms - duration_ms)
        if request.param != "running":
            bench.open()

    return set_back


def test_a_batch_popped_by_a_clock_a_day_ahead_blocks_its_queue_no_longer(bench: PopBench, set_back: Any) -> None:
    """It blocked the queue until that day was over."""
    bench.put("t", 2)
    bench.clock.set_wall(bench.now_ms + DAY_MS)
    [early] = bench.pop(order=True, invisible_ms=INVISIBLE_MS, local=False)
    bench.advance(20_000)  # and the order info file says so
    set_back(DAY_MS)
    assert bench.service.pending("g") == []
    [delivery] = bench.pop(order=True, local=False)
    assert (delivery.message.body, delivery.attempt) == (b"0", 2)
    with pytest.raises(ReceiptExpiredError):
        bench.ack(early)
    assert bench.pop(order=True) == []
    bench.advance(7_000)  # the log is read from that batch on by now, and the order info file still has the one before
    bench.crash()
    bench.settle()
    assert bench.pop(order=True) == []  # blocked for its minute, and still by the same receipt
    bench.ack(delivery)
    assert offsets(bench.pop(order=True)) == [1]


def test_what_was_popped_by_a_clock_a_day_ahead_comes_again(bench: PopBench, set_back: Any) -> None:
    bench.put("t", 3)
    bench.clock.set_wall(bench.now_ms + DAY_MS)
    early = bench.pop(n=3, local=False)
    bench.ack(early[0])
    bench.service.nack("g", "t", early[1].receipt, 120_000)
    bench.settle()
    set_back(DAY_MS)
    bench.settle()
    assert [(copy.body, copy.reconsume_times) for copy in bench.read(RETRY)] == [(b"1", 1), (b"2", 1)]
    assert bench.committed() == 3
    with pytest.raises(ReceiptExpiredError):
        bench.ack(early[2])


def test_the_last_attempt_by_a_clock_a_day_ahead_ends_as_a_dead_letter(bench: PopBench, set_back: Any) -> None:
    bench.parts.groups.create("g", retry_max_times=0)
    bench.put("t", 2)
    bench.clock.set_wall(bench.now_ms + DAY_MS)
    bench.pop(order=True, local=False)
    set_back(DAY_MS)
    bench.settle()
    assert [dead.body for dead in bench.read(dlq_topic("g"))] == [b"0"]
    assert offsets(bench.pop(order=True)) == [1]


@pytest.mark.parametrize("order", [False, True])
def test_a_clock_set_back_by_less_than_the_invisible_time_ends_nothing(
    bench: PopBench, set_back: Any, order: bool
) -> None:
    """The receiver may well be at work: it has the message for as much longer."""
    bench.put("t", 1)
    [delivery] = bench.pop(order=order, invisible_ms=INVISIBLE_MS, local=False)
    set_back(INVISIBLE_MS)
    bench.advance(2 * INVISIBLE_MS - 1)
    assert bench.pop(order=order) == []
    assert len(bench.service.pending("g")) == 1
    bench.advance(1)
    assert [again.attempt for again in bench.pop(order=order)] == [2]
    with pytest.raises(ReceiptExpiredError):
        bench.ack(delivery)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("verb", ["renew", "change_invisible", "nack"])
def test_what_is_changed_after_a_clock_was_set_back_goes_by_the_new_time(
    bench: PopBench, set_back: Any, order: bool, verb: str
) -> None:
    """Popped for twelve hours, by a clock six hours ahead: it could not become visible before those six were over."""
    bench.put("t", 1)
    [delivery] = bench.pop(order=order, invisible_ms=DAY_MS // 2, local=False)
    set_back(DAY_MS // 4)
    receipt = getattr(bench.service, verb)("g", "t", delivery.receipt, 5_000)
    bench.advance(4_999)
    assert bench.pop(order=order) == []
    if verb == "change_invisible":
        bench.ack(delivery._replace(receipt=receipt))
        assert bench.committed() == 1
        return
    bench.crash()
    bench.settle()
    assert bench.pop(order=order) == []
    bench.advance(1)
    assert [again.attempt for again in bench.pop(order=order)] == [2]


def test_who_waits_for_a_queue_is_told_when_the_clock_was_set_back(bench: PopBench) -> None:
    bench.put("t", 1)
    bench.clock.set_wall(bench.now_ms + DAY_MS)
    bench.pop(order=True)
    told: list[bool] = []
    bench.service.add_waiter("g", "t", -1, None, told.append, order=True)
    bench.settle()
    assert told == []
    bench.clock.set_wall(bench.now_ms - DAY_MS)
    bench.settle()
    assert told == [True]


def test_small_steps_back_add_up(bench: PopBench) -> None:
    bench.put("t", 1)
    bench.pop(invisible_ms=1_000)
    for _ in range(5):
        bench.clock.set_wall(bench.now_ms - 900)
        bench.settle()
    assert len(bench.read(RETRY)) == 1


def test_a_look_at_the_pop_log_goes_on_where_retention_has_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mqstore offsets` beside a broker said that an offset of the pop log was out of range."""
    monkeypatch.setattr(poplog, "_CHUNK", 4)
    with open_store(tmp_path / "s") as writer:
        log = PopLog(writer)
        for batch in range(300):
            log.put_settled(ACK, batch, [batch])
        writer.flush()
        writer.dispatch()
        with open_store(tmp_path / "s", "r") as reader:
            records = PopLog(reader).records(0)
            seen = [next(records).position]
            writer.drop_before(writer.max_offset)
            log.put_settled(ACK, 300, [300])
            writer.dispatch()
            seen += [record.position for record in records]
            low = writer.offsets(POP_LOG_TOPIC)[0]

    assert low > 50
    assert seen[-1] == 299  # the last one of when the look began
    assert seen == sorted(seen)
    assert set(range(low, 300)) <= set(seen)
