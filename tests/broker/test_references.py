"""A message that waits for its retry refers to the body in the record that failed (delivery#send-back).

Whatever happens while it waits, it is delivered as if the waiting record had the body itself: same body, properties and
attempt, once. Only if the record that failed is damaged itself is the message lost, and then it is reported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, Retention
from mqstore.errors import FormatError
from tests.broker import support
from tests.broker.referencesupport import BODY, DELAYS, REFERENCE_BYTES, RETRY, SEGMENT, Bench, is_reference
from tests.log.support import flip_log

HOUR_MS = 3_600_000
WAYS = pytest.mark.parametrize("way", DELAYS)


def seen(message: Message) -> tuple[object, ...]:
    properties = dict(message.stored_properties())
    return message.body, message.attempt, message.tag, message.keys, message.properties["p"], properties["RETRY_TOPIC"]


EXPECTED = (BODY, 2, "t", ("k",), "1", "orders")


def restart(bench: Bench) -> None:
    bench.again()


def kill(bench: Bench) -> None:
    bench.kill()


def retention(bench: Bench) -> None:
    first = bench.store.min_offset
    bench.busy()
    bench.clean()
    assert bench.store.min_offset >= first


def shorter_levels(bench: Bench) -> None:
    """A message of level 3 fits it no longer, and is relocated to the timer."""
    relocated = support.messages_of(bench.parts, "rmq_sys_wheel_timer") == []
    bench.again(delay_levels="1s 2s 3s")
    bench.settle()
    [waiting] = support.messages_of(bench.parts, "rmq_sys_wheel_timer")
    assert is_reference(waiting.sys_flag) != relocated


def relocated_by_retention(bench: Bench) -> None:
    [origin] = support.messages_of(bench.parts, "orders")
    bench.busy()
    for _ in range(4):
        bench.jump(2_000)
    bench.clean()
    assert bench.store.min_offset > origin.physical_offset


def killed_after_retention(bench: Bench) -> None:
    retention(bench)
    bench.kill()
    bench.clean()


EVENTS: list[Callable[[Bench], None]] = [
    restart, kill, retention, shorter_levels, relocated_by_retention, killed_after_retention,
]  # fmt: skip


@WAYS
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_retry_is_whole_whatever_happens_while_it_waits(bench: Bench, way: str, event: Callable[[Bench], None]) -> None:
    bench.to_the_edge()
    waiting = bench.fail(way)
    assert waiting.physical_offset % SEGMENT == 0, "else retention might keep the record that failed by chance"
    assert waiting.topic == ("SCHEDULE_TOPIC_XXXX" if way == "level" else "rmq_sys_wheel_timer")
    assert len(waiting.body_view) == REFERENCE_BYTES
    event(bench)
    assert bench.retries() == []
    assert [seen(each) for each in bench.wait()] == [EXPECTED]


def test_each_attempt_refers_to_the_one_before(bench: Bench) -> None:
    offset = bench.fail().physical_offset
    for attempt in range(2, 6):
        bench.jump(3 * HOUR_MS)
        retry = bench.retries()[-1]
        assert (retry.attempt, retry.body) == (attempt, BODY)
        waiting = bench.store.at(bench.broker.send_back("g", retry.physical_offset).physical_offset)
        assert offset < retry.physical_offset < waiting.physical_offset
        assert waiting._whole().body == BODY
        bench.broker.commit("g", RETRY, 0, retry.offset + 1)
        bench.busy()
        bench.clean()


def before_append(bench: Bench, patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Have `call` called before each record that the broker appends: the store does not hold its lock yet."""
    append = bench.store.append

    def late(*arguments: Any, **options: Any) -> Any:
        call()
        return append(*arguments, **options)

    patch.setattr(bench.store, "append", late)


# -- when the body is copied -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["level", "timer"])
@pytest.mark.parametrize("between", [5, 6, 30])
def test_far_record_gets_no_reference(bench: Bench, way: str, between: int) -> None:
    receipt = bench.broker.put("orders", BODY, queue_id=0, tag="t", keys="k", properties={"p": "1"})
    bench.busy(between)
    waiting = bench.store.at(bench.broker.send_back("g", receipt.physical_offset, **DELAYS[way]).physical_offset)
    near = waiting.physical_offset - receipt.physical_offset <= SEGMENT
    assert is_reference(waiting.sys_flag) == near == (between < 6)
    bench.broker.commit("g", "orders", 0, 1)
    bench.busy()
    bench.clean()
    assert [seen(each) for each in bench.wait()] == [EXPECTED]


def test_others_that_append_meanwhile_put_it_out_of_reach(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = bench.broker.put("orders", BODY, queue_id=0)
    others = iter([True])
    before_append(bench, monkeypatch, lambda: next(others, False) and bench.busy(10))
    waiting = bench.store.at(bench.broker.send_back("g", receipt.physical_offset).physical_offset)
    assert (is_reference(waiting.sys_flag), bytes(waiting.body_view)) == (False, BODY)


@pytest.mark.parametrize(("size", "refers"), [(16, False), (17, True)])
def test_body_no_longer_than_a_reference_is_copied(bench: Bench, size: int, refers: bool) -> None:
    waiting = bench.fail(body=BODY[:size])
    assert (is_reference(waiting.sys_flag), waiting.body) == (refers, BODY[:size])


def test_profile_rocketmq_has_bodies_that_java_reads(tmp_path: Path) -> None:
    parts = support.new_parts(tmp_path / "java", profile="rocketmq")
    bench_broker = support.Broker(parts.store)
    receipt = bench_broker.put("orders", BODY, queue_id=0)
    waiting = parts.store.at(bench_broker.send_back("g", receipt.physical_offset).physical_offset)
    assert (waiting.topic, bytes(waiting.body_view), waiting.sys_flag) == ("SCHEDULE_TOPIC_XXXX", BODY, 0)
    bench_broker.close()


# -- retention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unconsumed", ["keep", "drop"])
def test_retention_that_decides_meanwhile_keeps_the_body(tmp_path: Path, unconsumed: str) -> None:
    """The policy keeps nothing unconsumed. Between the look at the record and the append of the waiting one, retention
    decides, and deletes afterwards."""
    bench = Bench(tmp_path / "store", unconsumed=unconsumed)
    policy = Retention(age=None, max_bytes=0, unconsumed=unconsumed)  # type: ignore[arg-type]
    bench.to_the_edge()
    receipt = bench.broker.put("orders", BODY, queue_id=0)
    bench.busy(1)
    bench.broker.commit("g", "orders", 0, 1)
    bound = bench.store.room.bound
    assert bound is not None
    decided: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        before_append(bench, patch, lambda: decided.append(bound(policy)))
        waiting = bench.broker.send_back("g", receipt.physical_offset)
    assert is_reference(bench.store.at(waiting.physical_offset).sys_flag)
    bench.busy(3)
    bench.store.flush()
    bench.store.drop_before(decided[0])
    assert [each.body for each in bench.wait()] == [BODY]
    bench.broker.close()


def test_retention_keeps_bodies_of_waiting_records_that_are_not_dispatched(tmp_path: Path) -> None:
    """With durability "flush" records become visible when they are on disk. Retention must not count on having seen
    them before."""
    bench = Bench(tmp_path / "store", durability="flush")
    bench.to_the_edge()
    receipt = bench.broker.put("orders", BODY, queue_id=0)
    bench.broker.commit("g", "orders", 0, 1)
    bench.broker.commit("reader", "busy", 0, bench.store.offsets("busy")[1])
    waiting = bench.broker.send_back("g", receipt.physical_offset, durability="append")
    assert waiting.physical_offset >= bench.store.dispatched_end
    assert bench.store.room.bound is not None
    bound = bench.store.room.bound(Retention(age=None, max_bytes=0))
    bench.store.dispatch()
    bench.store.drop_before(bound)
    assert [each.body for each in bench.wait()] == [BODY]
    bench.broker.close()


def test_no_reference_during_retention(bench: Bench) -> None:
    first = bench.broker.put("orders", BODY, queue_id=0)
    bench.broker.commit("g", "orders", 0, 1)
    made: list[bool] = []

    def fail() -> None:
        waiting = bench.broker.send_back("g", first.physical_offset).physical_offset
        made.append(is_reference(bench.store.at(waiting).sys_flag))

    class Deciding(type(bench.delay)):  # type: ignore[misc]
        def pins(self) -> Any:
            found = list(super().pins())
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
            return found

    bench.delay.__class__ = Deciding
    assert bench.store.room.bound is not None
    bench.store.room.bound(Retention(age=None, max_bytes=0))
    bench.delay.__class__ = Deciding.__base__
    fail()
    assert made == [False, False]
    second = bench.broker.put("orders", BODY, queue_id=0)
    waiting = bench.store.at(bench.broker.send_back("g", second.physical_offset).physical_offset)
    assert is_reference(waiting.sys_flag)


def test_record_of_a_retry_that_came_loses_its_body_with_the_log(bench: Bench) -> None:
    waiting = bench.fail()
    bench.wait()
    bench.broker.commit("g", RETRY, 0, 1)
    bench.busy()
    place = waiting.physical_offset
    bench.store.drop_before(SEGMENT)
    late = bench.fail()
    bench.store.drop_before(late.physical_offset // SEGMENT * SEGMENT)
    with pytest.raises(FormatError, match="in the deleted record"):
        _ = waiting.body
    assert bench.store.min_offset > place


# -- damage ------------------------------------------------------------------------------------------------------------


@WAYS
def test_damaged_body_loses_that_retry_alone_and_says_so(
    bench: Bench, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = bench.fail(way, unique_key="lost")
    origin = bench.store.read("orders", 0, 0)[0].physical_offset
    bench.fail(way)
    bench.broker.save()
    flip_log(bench.path, origin + 88 + 500)
    with pytest.raises(FormatError, match=f"its body is in the record at {origin}, which cannot be read"):
        _ = first.body
    assert [each.position for each in bench.store.verify() if each.kind == "bad_record"] == [origin]
    with caplog.at_level(logging.ERROR):
        assert [each.body for each in bench.wait()] == [BODY]
    assert "unique key lost" in caplog.text
    assert bench.unreadable() == 1


def test_record_that_cannot_be_restored_and_has_no_body_is_passed_over(bench: Bench) -> None:
    receipt = bench.broker.put("orders", BODY, queue_id=0)
    origin = bench.store.at(receipt.physical_offset)
    properties = {"DELAY": "3", "REAL_TOPIC": "orders", "REAL_QID": "no number"}
    for flags, body in ((0x701, origin._reference()), (0x701, bytes(REFERENCE_BYTES)), (0x701, b"short")):
        bench.store.append("SCHEDULE_TOPIC_XXXX", 2, body, properties=properties, sys_flag=flags)
    bench.jump(HOUR_MS)
    letters = bench.broker.dead_letters("CID_RMQ_SYS_SCHEDULE")
    assert [letter.body for letter in letters] == [BODY]
    assert bench.unreadable() == 2
