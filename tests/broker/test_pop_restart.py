"""Pop across restarts: what a close or a kill leaves, and what the next open makes of it (delivery#pop-replay)."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.broker.admin.inspect import looked_pops
from mqstore.errors import InvalidReceiptError, ReceiptExpiredError
from tests.broker.popsupport import DLQ, POP_LOG_TOPIC, RETRY, PopBench, offsets, queue, tags
from tests.log.support import flip

INVISIBLE_MS = 60_000
DAY_MS = 86_400_000


@pytest.fixture(params=["close", "kill"])
def restart(request: pytest.FixtureRequest, pops: PopBench) -> Any:
    """Both ways in which a process ends: after either the same is known."""

    def restart(**config: Any) -> None:
        (pops.close if request.param == "close" else pops.kill)()
        pops.reopen(**config)

    return restart


def test_nothing_is_released_when_that_is_switched_off(pops: PopBench, restart: Any) -> None:
    pops.put("t", 1)
    pops.pop()
    restart(requeue_on_open=False)
    pops.settle()
    assert pops.read(RETRY) == []
    pops.advance(INVISIBLE_MS)
    assert len(pops.read(RETRY)) == 1


@pytest.mark.parametrize("collects", [True, False])
def test_opening_leaves_garbage_collection_as_it_was(tmp_path: Path, collects: bool) -> None:
    with mqstore.open(tmp_path) as store:
        store.queue("jobs").put(b"item")
        store.queue("jobs").get()
    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with mqstore.open(tmp_path) as store:
            assert (gc.isenabled(), store.queue("jobs").get().attempt) == (collects, 2)
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("order", [False, True])
def test_delayed_release_survives_a_restart(
    pops: PopBench, restart: Any, monkeypatch: pytest.MonkeyPatch, order: bool
) -> None:
    """Nobody holds it: to release it burned its attempts, and a message that was to be tried again in an hour was a
    dead letter after as many restarts. Here its batch was put again."""
    pops.put("t", 2)
    first, second = pops.pop(n=2, order=order)
    pops.service.nack("g", "t", first.receipt, 3_600_000)
    if not order:
        kept = pops.service.change_invisible("g", "t", second.receipt, 3_600_000)  # held for as long
    else:
        kept = second.receipt
    pops.replay_at_most(monkeypatch, 1)
    pops.advance(10_000)
    restart()
    restart()
    pops.settle()
    pending = {each.offset: each.visible_at_ms for each in pops.service.pending("g")}
    assert pending[0] - pops.now_ms > 3_500_000
    if not order:
        assert [copy.body for copy in pops.read(RETRY)] == [b"1"]
    pops.service.ack("g", "t", kept) if order else None
    pops.clock.advance(3_600_000)
    pops.settle()
    again = pops.pop(n=5, order=order) + (pops.pop(n=5) if not order else [])
    assert b"0" in [delivery.message.body for delivery in again]


def test_copies_made_before_the_end_are_not_made_again(pops: PopBench, restart: Any) -> None:
    pops.put("t", 3)
    late = pops.pop(n=2)
    pops.pop(local=False, invisible_ms=3_600_000)
    pops.advance(INVISIBLE_MS)
    restart()
    pops.advance(INVISIBLE_MS)
    assert len(pops.read(RETRY)) == 2
    with pytest.raises(ReceiptExpiredError):
        pops.ack(late[0])


def test_a_crash_between_copy_and_its_record_copies_once_more(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pops.put("t", 1)
    pops.pop()

    def killed(*_: object) -> Any:
        raise KeyboardInterrupt

    pops.refuse(monkeypatch, "put_settled", killed)
    pops.clock.advance(INVISIBLE_MS)
    with pytest.raises(KeyboardInterrupt):
        pops.service.run_once(pops.now_ms)
    monkeypatch.undo()
    pops.crash()
    pops.settle()
    assert len(pops.read(RETRY)) == 2


def test_a_backward_reset_is_not_undone_by_what_the_log_says_of_before(pops: PopBench, restart: Any) -> None:
    pops.put("t", 6)
    pops.ack(*pops.pop(n=6))
    pops.advance(5_000)  # `committed`, 6, and the replay position are on disk
    pops.reset(3)
    restart()
    pops.settle()
    assert pops.service.in_flight() == 0
    found = pops.pop(n=10)
    assert offsets(found) == [3, 4, 5]
    pops.ack(*found)
    restart()
    assert pops.pop(n=10) == []


# -- FIFO -------------------------------------------------------------------------------------------------------------


OLD_ENTRIES: dict[str, tuple[str, str, int, dict[str, Any], bool]] = {
    "acknowledged, a day old": ("t@g", "0", DAY_MS + 1, {"cm": 1}, False),
    "acknowledged, not so old": ("t@g", "0", DAY_MS - 20_000, {"cm": 1}, True),
    "its next delivery counts an attempt": ("t@g", "0", 30 * DAY_MS, {}, True),
    "its next delivery counts none": ("t@g", "0", 30 * DAY_MS, {"rel": 1}, False),
    "released, and invisible": ("t@g", "0", 30 * DAY_MS, {"rel": 1, "ot": {"1": 60_000}}, True),
    "attempts of the queue model": ("t@g", "0", 30 * DAY_MS, {"popTime": 0, "i": None, "oc": {"1": 16}}, True),
    "settled attempts": ("t@g", "0", 0, {"popTime": 0, "i": None, "o": [0], "oc": {"0": 16}}, False),
    "no such queue": ("t@g", "4", 0, {}, False),
    "no such topic": ("gone@g", "0", 0, {}, False),
    "no such group": ("t@nobody", "0", 0, {}, False),
    "key of another form": ("a@b@c", "0", 30 * DAY_MS, {}, True),
}


def test_a_group_deleted_and_made_anew_begins_anew_after_a_restart(pops: PopBench, restart: Any) -> None:
    pops.put("t", 3)
    pops.pop(n=2)
    pops.parts.groups.delete("g")
    pops.parts.offsets.remove_group("g")
    pops.parts.groups.create("g")
    restart()
    pops.settle()
    assert offsets(pops.pop(n=5)) == [0, 1, 2]


@pytest.mark.parametrize(("key", "queue_id", "age_ms", "members", "stays"), OLD_ENTRIES.values(), ids=OLD_ENTRIES)
def test_only_obsolete_order_info_is_dropped(
    pops: PopBench, key: str, queue_id: str, age_ms: int, members: dict[str, Any], stays: bool
) -> None:
    """Order info that nobody had touched for a day was dropped: after each weekend a message on which every consumer
    fails had all its attempts again, and its queue stood still for as long."""
    pops.parts.groups.create("g")
    pops.put("t", 3)
    pops.put("u", 1)
    pops.parts.offsets.commit(queue(), 1)
    pops.close()
    then_ms = pops.now_ms - age_ms
    entry = {"o": [1], "cm": 0, "i": 1_000, "l": then_ms, "popTime": then_ms, **members}
    if "ot" in members:
        entry["ot"] = {"1": pops.now_ms + 60_000}
    (pops.path / "config" / "consumerOrderInfo.json").write_text(json.dumps({"table": {key: {queue_id: entry}}}))
    pops.open()
    pops.pop(topic="u", order=True)  # something that has the file written
    pops.advance(10_000)
    table = json.loads((pops.path / "config" / "consumerOrderInfo.json").read_text())["table"]
    assert (queue_id in table.get(key, {})) is stays
    assert "u@g" in table


def test_ordered_batch_survives_a_restart(pops: PopBench, restart: Any) -> None:
    pops.put("t", 5)
    first = pops.pop(n=4, order=True)
    pops.ack(first[1])
    pops.advance(INVISIBLE_MS)
    assert offsets(pops.pop(n=1, order=True, skip_acked=True)) == [0]
    restart()
    again = pops.pop(n=5, order=True, skip_acked=True)
    assert [(d.message.offset, d.attempt) for d in again] == [(0, 3), (2, 2), (3, 2), (4, 1)]
    pops.ack(*again)
    assert pops.committed() == 5


def test_dead_letter_in_order_is_settled_after_a_restart(pops: PopBench, restart: Any) -> None:
    pops.put("t", 2)
    [first, _] = pops.pop(n=2, order=True)
    pops.change("dead_letter", first.receipt, "no")
    restart()
    assert (offsets(pops.pop(n=2, order=True)), len(pops.read(DLQ))) == ([1], 1)


def test_message_popped_twice_and_released_is_free(pops: PopBench, restart: Any) -> None:
    """The second pop time is ahead of the clock, to differ from the first."""
    pops.put("t", 1)
    for _ in range(2):
        delivery = pops.pop(order=True, local=False)[0]
        pops.release(delivery)
    restart()
    assert offsets(pops.pop(order=True)) == [0]


def test_a_batch_settled_after_the_file_was_written_blocks_nothing(pops: PopBench) -> None:
    pops.put("t", 3)
    first = pops.pop(order=True, n=2, local=False, invisible_ms=3_600_000)
    pops.advance(10_000)  # the file says: two in flight
    pops.ack(*first)
    # The offset table says: settled, and no replay of their records. We write the file first; others may not.
    pops.replay_from(2)
    pops.parts.offsets.save()
    pops.crash()
    assert offsets(pops.pop(order=True)) == [2]


def test_late_receipt_of_a_settled_batch_is_refused(pops: PopBench, restart: Any) -> None:
    """The settled batch was forgotten, and the next in line taken for one whose record was lost: a receipt of an
    older batch settled it."""
    pops.put("t", 3)
    old = pops.pop(order=True, n=2)
    pops.advance(INVISIBLE_MS)
    pops.ack(*pops.pop(order=True))
    pops.advance(60_000)  # the replay position has left them behind; only the file knows
    restart()
    end = pops.parts.store.offsets(POP_LOG_TOPIC)[1]
    with pytest.raises(ReceiptExpiredError):
        pops.ack(old[1])
    for settle in (pops.service.nack, lambda *names: pops.service.dead_letter(*names, "late")):
        with pytest.raises(ReceiptExpiredError):
            settle("g", "t", old[1].receipt)
    assert pops.committed() == 1
    assert pops.parts.store.offsets(POP_LOG_TOPIC)[1] == end  # what is settled is not logged again at each start
    assert [(d.message.offset, d.attempt) for d in pops.pop(order=True)] == [(1, 1)]


def test_a_batch_of_an_older_order_info_file_does_not_come_back(pops: PopBench, restart: Any) -> None:
    """The replay position had passed the batch that took the file's batch's place, and a kill came before the file was
    written anew: the older batch counted again, with its receipts and its attempts."""
    pops.put("t", 3)
    old = pops.pop(order=True, n=2, invisible_ms=1_000)
    pops.advance(12_000)  # the file has it
    pops.ack(*pops.pop(order=True))
    pops.advance(5_000)
    restart()
    with pytest.raises(ReceiptExpiredError):
        pops.ack(old[1])
    assert [(d.message.offset, d.attempt) for d in pops.pop(order=True)] == [(1, 1)]


def test_a_reset_is_not_undone_by_an_older_order_info_file(pops: PopBench, restart: Any) -> None:
    """As above, with a reset that the replay position had passed: the queue stayed blocked by the batch it had ended,
    and began behind what that batch had acknowledged."""
    pops.put("t", 3)
    old = pops.pop(order=True, n=2, local=False, invisible_ms=3_600_000)
    pops.ack(old[0])
    pops.advance(12_000)
    pops.reset(0)
    pops.advance(5_000)
    restart()
    assert offsets(pops.pop(order=True, n=3)) == [0, 1, 2]


def test_a_file_of_a_java_broker_is_taken_over(pops: PopBench) -> None:
    pops.parts.groups.create("g")
    pops.put("t", 6)
    now_ms = pops.now_ms
    pops.parts.offsets.commit(queue(), 1)
    pops.close()
    # cm: offset 3 was acknowledged; integer keys as fastjson writes them
    text = f'{{"table":{{"t@g":{{0:{{"cm":4,"i":60000,"l":{now_ms},"o":[1,1,2],"popTime":{now_ms}}}}}}}}}'
    (pops.path / "config" / "consumerOrderInfo.json").write_text(text)
    pops.reopen()
    assert pops.pop(order=True) == []
    receipt = f"1 {now_ms} 60000 999 0 DefaultCluster_broker 0 1"
    pops.service.ack("g", "t", receipt)
    assert pops.committed() == 2
    pops.crash()
    assert pops.pop(order=True) == []  # 2 is invisible; it is known from our own log now
    pops.advance(INVISIBLE_MS)
    again = pops.pop(order=True, n=5)
    assert offsets(again) == [2, 3, 4, 5]
    assert [d.attempt for d in again] == [2, 2, 1, 1]


def test_without_a_record_nothing_can_be_acknowledged(pops: PopBench) -> None:
    """With the record the order of what was popped is lost; what lies before the message would go with it."""
    pops.put("t", 6)
    pops.parts.groups.create("g")
    pops.parts.offsets.commit(queue(), 2)
    now_ms = pops.now_ms
    for offset in (2, 3, 5):
        with pytest.raises(ReceiptExpiredError):
            pops.service.ack("g", "t", f"2 {now_ms} 60000 999 0 mqstore 0 {offset}")
    with pytest.raises(InvalidReceiptError):
        pops.service.ack("g", "t", f"2 {now_ms} 60000 999 0 mqstore 0 6")
    assert pops.committed() == 2


# -- how long the log is ----------------------------------------------------------------------------------------------


def test_the_replay_position_is_the_oldest_unsettled_batch(pops: PopBench) -> None:
    def position() -> int:
        pops.advance(20_000)  # the order info file is written after 10 s, and the position follows it
        return pops.replay_position or 0

    pops.put("t", 6)
    one, two, three = (pops.pop(invisible_ms=3_600_000, local=False) for _ in range(3))
    ordered = pops.pop(group="fifo", order=True, invisible_ms=3_600_000)
    assert position() == 0
    pops.ack(*one)
    assert position() == 1
    pops.ack(*three)
    assert position() == 1
    pops.release(*two)
    assert position() == 1
    pops.ack(*pops.pop())
    assert position() == 3
    pops.service.ack("fifo", "t", [ordered[0].receipt])
    assert position() == pops.parts.store.offsets(POP_LOG_TOPIC)[1]
    assert [pin.topic for pin in pops.service.pins()] == []


def test_the_replay_position_moves_though_nothing_is_due_for_long(pops: PopBench) -> None:
    """What is settled at once asks nobody to come: with leases of an hour the log was held for an hour, too."""

    def served() -> None:
        pops.put("t", 1)
        pops.ack(*pops.pop(invisible_ms=3_600_000, local=False))
        pops.parts.store.dispatch()

    def next_ms() -> int:
        return pops.service.run_once(pops.now_ms) or 1 << 62

    served()
    while next_ms() < pops.now_ms + 60_000:  # as the housekeeper, until it sleeps
        pops.clock.advance(next_ms() - pops.now_ms)
    for rest_ms in (60_000, 1_000, 10):
        before = pops.wakes
        pops.clock.advance(rest_ms)
        for _ in range(5):
            served()
        assert pops.wakes == before + 1  # once: from then on it knows that it has to come
        assert [pin.topic for pin in pops.service.pins()] == [POP_LOG_TOPIC]
        begun = pops.now_ms
        while next_ms() < pops.now_ms + 60_000:
            pops.clock.advance(next_ms() - pops.now_ms)
        assert pops.now_ms - begun <= 5_000
        assert [pin.topic for pin in pops.service.pins()] == []


def test_ordered_messages_that_a_new_filter_passes_over_hold_nothing(pops: PopBench) -> None:
    pops.put("t", 2, tag="b")
    pops.pop(order=True, n=2, filter=tags("b"), invisible_ms=1_000)
    pops.advance(1_000)
    assert pops.pop(order=True, n=2, filter=tags("a")) == []
    assert pops.committed() == 2
    pops.advance(20_000)
    assert pops.replay_position == 1
    pops.advance(INVISIBLE_MS)
    pops.crash()
    assert pops.pop(order=True, n=2) == []


def test_the_pop_log_is_pinned_from_the_replay_position_on(pops: PopBench) -> None:
    pops.put("t", 2)
    pops.ack(*pops.pop(local=False))
    pops.pop(local=False)
    pops.advance(5_000)
    [pin] = pops.service.pins()
    assert pin.physical_offset == pops.read(POP_LOG_TOPIC)[2].physical_offset
    assert (pin.topic, pin.queue_id, pin.group) == (POP_LOG_TOPIC, 0, "CID_RMQ_SYS_POP_LOG")


def test_old_batches_are_put_again_so_that_a_replay_stays_short(
    pops: PopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pops.replay_at_most(monkeypatch, 20)
    pops.put("t", 60)
    old = pops.pop(n=5, local=False, invisible_ms=3_600_000)
    moved = pops.service.change_invisible("g", "t", old[1].receipt, 7_200_000)
    pops.ack(old[2])
    pops.release(old[3])
    ordered = pops.pop(group="fifo", order=True, n=3, local=False, invisible_ms=3_600_000)
    pops.service.ack("fifo", "t", [ordered[0].receipt])
    before = pops.service.pending("g"), pops.service.pending("fifo")
    rest = [pops.pop(queue_id=0, n=1, local=False, invisible_ms=3_600_000)[0] for _ in range(21)]
    assert rest[0].message.offset == 3  # what was released
    pops.release(rest[0])
    pops.ack(*rest[1:])
    pops.advance(10_000)  # the first look has the order info file written, which the position follows
    low = pops.replay_position
    assert low is not None
    assert low >= pops.parts.store.offsets(POP_LOG_TOPIC)[1] - 20
    assert (pops.service.pending("g"), pops.service.pending("fifo")) == before
    pops.crash()
    assert (pops.service.pending("g"), pops.service.pending("fifo")) == before
    assert pops.committed() == 0
    assert offsets(pops.pop(n=2)) == [3, 25]
    pops.ack(old[0], old[4])
    pops.service.ack("g", "t", moved)
    pops.service.ack("fifo", "t", [ordered[1].receipt])
    assert pops.parts.offsets.committed(queue("fifo")) == 2
    assert pops.committed() == 3


def test_each_of_many_open_batches_is_put_again_once(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the limit were below their number, each look would append them again, for ever."""

    def log_end() -> int:
        return pops.parts.store.offsets(POP_LOG_TOPIC)[1]

    pops.replay_at_most(monkeypatch, 10)
    pops.put("t", 61)
    for _ in range(40):
        pops.pop(local=False, invisible_ms=36_000_000)
    pops.advance(10_000)
    assert (log_end(), pops.replay_position or 0) == (40, 0)
    pops.ack(*[pops.pop(local=False)[0] for _ in range(20)])
    pops.advance(10_000)
    assert (log_end(), pops.replay_position or 0) == (80, 0)
    pops.ack(*pops.pop(local=False))
    for _ in range(60):
        pops.advance(10_000)
    assert (log_end(), pops.replay_position) == (82 + 40, 82)


def test_renewed_delivery_survives_relocation_after_a_clock_step(
    pops: PopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the time of its pop. The replay refused the batch, and the message was lost."""
    pops.put("t", 3)
    [held] = pops.pop(local=False, invisible_ms=600_000)
    pops.clock.set_wall(pops.now_ms - 60_000)
    pops.service.change_invisible("g", "t", held.receipt, 20_000, renew=True)
    pops.ack(*pops.pop(n=2))
    pops.replay_at_most(monkeypatch, 1)
    before = pops.service.pending("g")
    pops.advance(10_000)
    assert (pops.replay_position or 0) > 1
    pops.crash()
    assert pops.service.pending("g") == before
    pops.advance(10_000)
    assert [copy.body for copy in pops.read(RETRY)] == [b"0"]


@pytest.mark.parametrize("order", [False, True])
def test_message_given_back_stays_so_when_its_batch_is_put_again(pops: PopBench, order: bool) -> None:
    pops.put("t", 1)
    [old] = pops.pop(order=order, invisible_ms=60_000)
    pops.service.release("g", "t", [old.receipt], delay_ms=600_000)
    pops.put("t", 12, first=1, body_bytes=30_000)  # two to a segment
    pops.advance(5_000)
    [pin] = pops.service.pins()
    assert pin.physical_offset > pops.parts.store.max_offset - (4 << 16)
    pops.crash()
    pops.advance(594_000)
    assert offsets(pops.pop(order=order)) == ([] if order else [1])
    pops.advance(1_000)
    [again] = pops.pop(order=order)
    assert (again.message.offset, again.attempt) == (0, 1)


def test_a_lost_record_of_a_batch_has_its_messages_come_again(pops: PopBench) -> None:
    """What it had handed out was passed over for good as soon as a later batch of the queue showed how far the cursor
    had gone: one flipped byte of the log, and the group never got messages that were all there."""
    pops.put("t", 9)
    for _ in range(3):
        pops.pop(n=3, invisible_ms=60_000)
        pops.service.flush()  # a record of each
    lost = pops.parts.store.read(POP_LOG_TOPIC, 0, 1, 1)[0].physical_offset
    pops.close()
    flip(pops.path / "commitlog" / f"{0:020d}", lost + 90)
    pops.reopen()
    pops.crash()  # said once, not with every opening
    assert sorted(p.offset for p in pops.service.pending("g") if p.topic == "t") == [*range(9)]
    pops.settle()
    bodies = sorted(bytes(delivery.message.body) for delivery in pops.pop(n=20))
    assert bodies == [b"%d" % n for n in range(9)]


def test_records_that_make_no_sense_are_passed_over(pops: PopBench) -> None:
    pops.put("t", 3)
    first = pops.pop(n=2, local=False)
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
        pops.parts.store.append(POP_LOG_TOPIC, 0, json.dumps(value).encode(), properties={"TAGS": tag})
    pops.parts.store.append(POP_LOG_TOPIC, 0, b"\xff{", properties={"TAGS": "ack"})
    pops.crash()
    assert [(p.topic, p.offset) for p in pops.service.pending("g")] == [("t", 0), ("t", 1)]
    pops.ack(*first)
    assert offsets(pops.pop(n=5)) == []
    pops.put("t", 1)
    assert offsets(pops.pop(n=5)) == [3]


@pytest.mark.parametrize("change", [{"it": 1 << 70}, {"pt": 1 << 70}, {"o": -(1 << 70)}, {"it": 1.5}], ids=str)
def test_damaged_change_does_not_hold_up_the_log(pops: PopBench, change: dict[str, Any]) -> None:
    """The batch was appended again by each run, and the position never moved."""
    pops.put("t", 1)
    pops.pop(local=False)
    value = {"k": 0, "o": 0, "pt": pops.now_ms, "it": 60_000} | change
    pops.parts.store.append(POP_LOG_TOPIC, 0, json.dumps(value).encode(), properties={"TAGS": "chg"})
    pops.crash()
    pops.put("t", 12, first=1, body_bytes=30_000)  # two to a segment
    pops.advance(5_000)
    [pin] = pops.service.pins()
    assert pin.physical_offset > pops.parts.store.max_offset - (4 << 16)
    end = pops.parts.store.offsets(POP_LOG_TOPIC, 0)[1]
    pops.advance(5_000)
    assert pops.parts.store.offsets(POP_LOG_TOPIC, 0)[1] == end


def test_view_of_an_open_store_hides_no_commit_from_the_saving(pops: PopBench) -> None:
    """Compiled settlements count their commits. The counter of a view once took the place of theirs."""
    pops.put("t", 3)
    for _ in range(2):
        pops.ack(*pops.pop(local=False))
    pops.parts.offsets.save()
    pops.ack(*pops.pop(local=False))
    looked_pops(pops.parts)
    pops.parts.offsets.save()
    file = json.loads((pops.path / "config" / "consumerOffset.json").read_text())
    assert file["offsetTable"]["t@g"] == {"0": 3}


@pytest.mark.parametrize("order", [False, True])
def test_batch_put_again_names_no_receiver_of_an_earlier_delivery(pops: PopBench, order: bool) -> None:
    pops.put("t", 1)
    [old] = pops.pop(order=order, local=False)
    pops.state.note_holder([0], "client-1")
    pops.service.release("g", "t", [old.receipt])
    [again] = pops.pop(order=order, local=True)
    pops.service.nack("g", "t", again.receipt, delay_ms=600_000)
    first = pops.parts.store.offsets(POP_LOG_TOPIC, 0)[1]
    pops.put("t", 12, first=1, body_bytes=30_000)  # two to a segment
    pops.advance(5_000)
    rewritten = [message.text() for message in pops.read(POP_LOG_TOPIC) if message.offset >= first]
    assert rewritten
    assert not [text for text in rewritten if "client-1" in text]


def test_flushed_calls_are_on_disk_when_they_return(pops: PopBench) -> None:
    store = pops.parts.store
    pops.put("t", 1)
    [delivery] = pops.pop(durability="flush")
    assert store.stats().flush_lag_bytes == 0
    pops.service.ack("g", "t", [delivery.receipt], durability="flush")
    assert store.stats().flush_lag_bytes == 0


# -- a wall clock that was wrong --------------------------------------------------------------------------------------


@pytest.fixture(params=["running", "kill"])
def set_back(request: pytest.FixtureRequest, pops: PopBench) -> Any:
    """Sets the wall clock back, with the store open or between two openings."""

    def set_back(duration_ms: int) -> None:
        if request.param != "running":
            pops.kill()
        pops.clock.set_wall(pops.now_ms - duration_ms)
        if request.param != "running":
            pops.open()

    return set_back


def test_a_batch_popped_by_a_clock_a_day_ahead_blocks_its_queue_no_longer(pops: PopBench, set_back: Any) -> None:
    """It blocked the queue until that day was over."""
    pops.put("t", 2)
    pops.clock.set_wall(pops.now_ms + DAY_MS)
    [early] = pops.pop(order=True, invisible_ms=INVISIBLE_MS, local=False)
    pops.advance(20_000)  # and the order info file says so
    set_back(DAY_MS)
    assert pops.service.pending("g") == []
    [delivery] = pops.pop(order=True, local=False)
    assert (delivery.message.body, delivery.attempt) == (b"0", 2)
    with pytest.raises(ReceiptExpiredError):
        pops.ack(early)
    assert pops.pop(order=True) == []
    pops.advance(7_000)  # the log is read from that batch on by now, and the order info file still has the one before
    pops.crash()
    pops.settle()
    assert pops.pop(order=True) == []  # blocked for its minute, and still by the same receipt
    pops.ack(delivery)
    assert offsets(pops.pop(order=True)) == [1]


def test_pop_by_a_clock_a_day_ahead_is_redelivered(pops: PopBench, set_back: Any) -> None:
    pops.put("t", 3)
    pops.clock.set_wall(pops.now_ms + DAY_MS)
    early = pops.pop(n=3, local=False)
    pops.ack(early[0])
    pops.service.nack("g", "t", early[1].receipt, 120_000)
    pops.settle()
    set_back(DAY_MS)
    pops.settle()
    assert [(copy.body, copy.reconsume_times) for copy in pops.read(RETRY)] == [(b"1", 1), (b"2", 1)]
    assert pops.committed() == 3
    with pytest.raises(ReceiptExpiredError):
        pops.ack(early[2])


def test_the_last_attempt_by_a_clock_a_day_ahead_ends_as_a_dead_letter(pops: PopBench, set_back: Any) -> None:
    pops.parts.groups.create("g", retry_max_times=0)
    pops.put("t", 2)
    pops.clock.set_wall(pops.now_ms + DAY_MS)
    pops.pop(order=True, local=False)
    set_back(DAY_MS)
    pops.settle()
    assert [dead.body for dead in pops.read(DLQ)] == [b"0"]
    assert offsets(pops.pop(order=True)) == [1]


@pytest.mark.parametrize("order", [False, True])
def test_a_clock_set_back_by_less_than_the_invisible_time_ends_nothing(
    pops: PopBench, set_back: Any, order: bool
) -> None:
    """The receiver may well be at work: it has the message for as much longer."""
    pops.put("t", 1)
    [delivery] = pops.pop(order=order, invisible_ms=INVISIBLE_MS, local=False)
    set_back(INVISIBLE_MS)
    pops.advance(2 * INVISIBLE_MS - 1)
    assert pops.pop(order=order) == []
    assert len(pops.service.pending("g")) == 1
    pops.advance(1)
    assert [again.attempt for again in pops.pop(order=order)] == [2]
    with pytest.raises(ReceiptExpiredError):
        pops.ack(delivery)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("verb", ["renew", "change_invisible", "nack"])
def test_change_after_a_clock_step_uses_the_new_time(pops: PopBench, set_back: Any, order: bool, verb: str) -> None:
    """Popped for twelve hours, by a clock six hours ahead: it could not become visible before those six were over."""
    pops.put("t", 1)
    [delivery] = pops.pop(order=order, invisible_ms=DAY_MS // 2, local=False)
    set_back(DAY_MS // 4)
    renew = {"renew": True} if verb == "renew" else {}
    receipt = pops.change("nack" if verb == "nack" else "change_invisible", delivery.receipt, 5_000, **renew)
    pops.advance(4_999)
    assert pops.pop(order=order) == []
    if verb == "change_invisible":
        pops.ack(delivery._replace(receipt=receipt))
        assert pops.committed() == 1
        return
    pops.crash()
    pops.settle()
    assert pops.pop(order=order) == []
    pops.advance(1)
    assert [again.attempt for again in pops.pop(order=order)] == [2]


def test_waiter_hears_of_a_clock_step(pops: PopBench) -> None:
    pops.put("t", 1)
    pops.clock.set_wall(pops.now_ms + DAY_MS)
    pops.pop(order=True)
    told: list[bool] = []
    pops.park(told.append, order=True)
    pops.settle()
    assert told == []
    pops.clock.set_wall(pops.now_ms - DAY_MS)
    pops.settle()
    assert told == [True]


def test_small_steps_back_add_up(pops: PopBench) -> None:
    pops.put("t", 1)
    pops.pop(invisible_ms=1_000)
    for _ in range(5):
        pops.clock.set_wall(pops.now_ms - 900)
        pops.settle()
    assert len(pops.read(RETRY)) == 1
