"""Delay levels (delivery#levels): when a message comes, what comes, and what failure, damage and restarts change."""

from __future__ import annotations

import errno
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore import Message, SimulatedClock, StoreConfig
from mqstore.broker.background.retention import worth_rolling
from mqstore.broker.delay.route import level_properties, parted, restored
from mqstore.broker.tables.names import HALF_TOPIC, SCHEDULE_GROUP, SCHEDULE_TOPIC
from mqstore.errors import ConfigError, InvalidMessageError, StoreFullError
from mqstore.layout.properties import decode_properties
from mqstore.log.reading.records import RecordReader
from mqstore.options import delay_table_ms
from tests.broker.delaysupport import Delays
from tests.broker.support import START_MS, full
from tests.log.support import Unsynced, flip

DEFAULT_MS = [1_000, 5_000, 10_000, 30_000, *(60_000 * n for n in range(1, 11)), 1_200_000, 1_800_000, 3_600_000]
DEFAULT_MS.append(7_200_000)


@pytest.fixture
def delays(tmp_path: Path) -> Iterator[Delays]:
    with Delays(tmp_path / "store") as delays:
        yield delays


# -- the table (delivery#levels), what is put (delivery#level-put), when it is due (delivery#level-unit) ---------------


@pytest.mark.parametrize("levels", ["", " ", "1", "s", "1s,5s", "-1s", "1.5s", "1s 5", "1S"])
def test_a_table_that_is_none_is_refused_with_the_word_that_is_wrong(levels: str) -> None:
    with pytest.raises(ConfigError, match="delay_levels"):
        delay_table_ms(levels)
    assert delay_table_ms("1s  5m\t2h\n1d") == (1_000, 300_000, 7_200_000, 86_400_000)


# -- on time (delivery#level-delivery, reliability#p4) -----------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 18])
def test_each_level_delivers_at_its_millisecond_and_not_before(delays: Delays, level: int) -> None:
    delays.clock.advance(137)
    delays.put(level)
    due_ms = START_MS + 137 + DEFAULT_MS[level - 1]
    assert delays.settle() == due_ms, "when to come again is exact"
    delays.clock.set_wall(due_ms - 1)
    assert delays.settle() == due_ms
    assert delays.delivered() == []
    delays.clock.set_wall(due_ms)
    delays.settle()
    assert delays.delivered() == [b"m"]
    assert delays.service.waiting() == 0


def test_levels_are_independent_and_ordered_by_time(delays: Delays) -> None:
    for level in (3, 1, 2, 1):
        delays.put(level, b"%d" % level)
        delays.clock.advance(1)
    seen: list[tuple[int, bytes]] = []
    while (due_ms := delays.settle()) is not None and delays.service.waiting():
        delays.clock.set_wall(due_ms)
        delays.settle()
        seen += [(due_ms - START_MS, body) for body in delays.delivered()[len(seen) :]]
    assert seen == [(1_001, b"1"), (1_003, b"1"), (5_002, b"2"), (10_000, b"3")]


DAY_MS = 86_400_000


@pytest.mark.parametrize(("ahead_ms", "restarts"), [(1, False), (400 * DAY_MS, False), (DAY_MS, True)])
def test_message_put_with_clock_ahead_blocks_nothing(delays: Delays, ahead_ms: int, restarts: bool) -> None:
    """RocketMQ delivers it at once (correctDeliverTimestamp). Here it still waits for its level's delay."""
    delays.clock.set_wall(START_MS + ahead_ms)
    delays.put(3, b"ahead")
    delays.clock.set_wall(START_MS)
    if restarts:
        delays.reopen()
    delays.put(3, b"behind")
    delays.settle()
    delays.clock.advance(9_999)
    delays.settle()
    assert delays.delivered() == []
    delays.pass_ms(1)
    assert sorted(delays.delivered()) == [b"ahead", b"behind"]


def test_messages_behind_a_head_with_clock_ahead_come_at_their_times(delays: Delays) -> None:
    """Nobody reports that the clock was set back, so the head may be found only when the next message is due."""
    delays.clock.set_wall(START_MS + DAY_MS)
    for n in range(3):
        delays.put(3, b"ahead %d" % n)
    delays.clock.set_wall(START_MS)
    delays.put(3, b"behind")
    delays.clock.advance(5_000)
    delays.put(3, b"last")
    delays.clock.advance(5_000)
    delays.settle()
    assert delays.delivered() == [b"behind"]
    delays.pass_ms(5_000)
    assert delays.delivered() == [b"behind", b"last"]
    delays.pass_ms(5_000)
    assert delays.delivered() == [b"behind", b"last", *(b"ahead %d" % n for n in range(3))]


@pytest.mark.parametrize("back_ms", [999, 400 * DAY_MS])
def test_message_waits_its_delay_when_the_clock_is_set_back(delays: Delays, back_ms: int) -> None:
    delays.put(2)
    assert delays.settle() == START_MS + 5_000
    delays.clock.set_wall(START_MS - back_ms)
    delays.settle()
    delays.clock.advance(4_999)
    delays.settle()
    assert delays.delivered() == []
    delays.pass_ms(1)
    assert delays.delivered() == [b"m"]


CHANGED_TABLES = [
    ("10s", "9s", 10_000),
    ("10s", "11s", 10_000),
    ("1s 2h", "1s", 7_200_000),
    ("1s 5s 10s", "1s 1s", 10_000),
]


@pytest.mark.parametrize(("before", "after", "due_ms"), CHANGED_TABLES)
def test_message_keeps_its_time_when_the_table_changes(tmp_path: Path, before: str, after: str, due_ms: int) -> None:
    with Delays(tmp_path / "store", delay_levels=before) as delays:
        level = len(before.split())
        for n in range(3):
            delays.put(level, b"%d" % n)
        delays.clock.advance(900)
        delays.reopen(delay_levels=after)
        delays.settle()
        delays.reopen(delay_levels=after, killed=True)
        delays.clock.set_wall(START_MS + due_ms - 1)
        delays.settle()
        assert delays.delivered() == []
        delays.pass_ms(1)
        assert delays.delivered() == [b"0", b"1", b"2"]


def test_head_that_fits_no_other_place_is_delivered_at_once(delays: Delays, monkeypatch: pytest.MonkeyPatch) -> None:
    """As RocketMQ does: a record may have no room for what the timer adds."""
    delays.clock.set_wall(START_MS + DAY_MS)
    delays.put(1, b"ahead")
    delays.put(1, b"ahead too")
    delays.clock.set_wall(START_MS)
    real = delays.parts.router.copy_many

    def no_room(_: object, copies: Any) -> int:
        if copies[0][1] == "rmq_sys_wheel_timer" and copies[0][0].body == b"ahead":
            raise InvalidMessageError("too long", "properties")
        return real(copies)

    monkeypatch.setattr(type(delays.parts.router), "copy_many", no_room)
    delays.settle()
    assert delays.delivered() == [b"ahead"]
    delays.pass_ms(1_000)
    assert delays.delivered() == [b"ahead", b"ahead too"]


def test_the_oldest_overdue_message_of_a_level_is_reported(delays: Delays) -> None:
    delays.put(1)
    delays.put(3)
    delays.store.dispatch()
    assert delays.service.overdue_ms() == {}
    delays.clock.advance(3_000)
    assert delays.service.overdue_ms() == {1: 2_000}
    delays.clock.advance(9_000)
    assert delays.service.overdue_ms() == {1: 11_000, 3: 2_000}
    delays.settle()
    assert delays.service.overdue_ms() == {}


def test_a_message_put_after_the_time_that_run_once_was_given_is_not_early(delays: Delays) -> None:
    """A housekeeper that is busy elsewhere hands over a time some moments old. By that, a message that was put since
    is due later than its level allows."""
    stale_ms = delays.clock.now_ms()
    delays.clock.advance(40)
    delays.put(1)
    assert delays.service.run_once(stale_ms) == START_MS + 1_040
    assert delays.delivered() == []


def test_a_time_from_an_extension_address_is_worked_out_anew(delays: Delays) -> None:
    delays.put(3)
    delays.store.dispatch()
    queue = delays.store.queue_table.get(SCHEDULE_TOPIC, 2)
    assert queue is not None
    unit = queue.units(0, 1).copy()
    unit["tags_code"] = -(1 << 31) - 1
    queue.write(0, unit.tobytes())
    assert delays.settle() == START_MS + 10_000
    delays.pass_ms(10_000)
    assert delays.delivered() == [b"m"]


# -- waking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["offsets_or_none", "units"])
def test_a_message_that_comes_while_its_level_is_looked_at_is_not_missed(
    delays: Delays, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Growth between the look and the decision to sleep: either the look or the wake-up has to see it."""
    real: Callable[..., Any] = getattr(delays.store, moment)
    puts = iter([b"late"])

    def then_a_put(*args: Any) -> Any:
        result = real(*args)
        if args[:2] == (SCHEDULE_TOPIC, 0) and (body := next(puts, None)):
            delays.put(1, body)
            delays.store.dispatch()
        return result

    if moment == "units":  # the last unit was just seen
        delays.put(1, b"first")
        delays.store.dispatch()
        delays.clock.advance(1_000)
    monkeypatch.setattr(delays.store, moment, then_a_put)
    due_ms = delays.service.run_once(delays.clock.now_ms())
    assert delays.wakes or (due_ms is not None and due_ms <= delays.clock.now_ms() + 1_000)
    delays.pass_ms(1_000)
    assert delays.delivered()[-1] == b"late"


def test_a_step_is_bounded_and_says_that_there_is_more(delays: Delays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.broker.delay.levels._STEP_UNITS", 20)
    monkeypatch.setattr("mqstore.broker.delay.levels._BATCH_UNITS", 10)
    for n in range(50):
        delays.put(1 + n % 2, b"%d" % n)
    delays.store.dispatch()
    now_ms = START_MS + 5_000
    delays.clock.set_wall(now_ms)
    assert delays.service.run_once(now_ms) == now_ms
    assert len(delays.delivered()) == 20
    assert {int(body) % 2 for body in delays.delivered()} == {0, 1}, "no level waits for all of another"
    delays.settle()
    assert sorted(map(int, delays.delivered())) == list(range(50))


# -- what is delivered (delivery#restore) ------------------------------------------------------------------------------


def test_the_copy_has_everything_of_the_message_but_its_delay(delays: Delays) -> None:
    properties = {"color": "red", "KEYS": "k1 k2", "TAGS": "t", "UNIQ_KEY": "u1", "WAIT": "true", "DELAY": "2"}
    delays.parts.router.append(
        "orders", 3, zlib.compress(b"body" * 100), properties, flag=77, sys_flag=0x1 | 0x2 | 0x8,
        born_timestamp_ms=12345, born_host="10.1.2.3:4567", reconsume_times=6,
    )  # fmt: skip
    delays.pass_ms(5_000)
    [copy] = delays.messages("orders", 3)
    assert copy.body == b"body" * 100
    assert (copy.flag, copy.sys_flag, copy.reconsume_times) == (77, 0x1 | 0x2 | 0x8, 6)
    assert (copy.born_timestamp_ms, copy.born_host) == (12345, "10.1.2.3:4567")
    assert copy.store_timestamp_ms == START_MS + 5_000
    del properties["DELAY"]
    assert copy.stored_properties() == {**properties, "WAIT": "false", "REAL_TOPIC": "orders", "REAL_QID": "3"}
    assert [found.offset for found in delays.store.find("orders", key="k2")] == [0]
    assert [found.queue_id for found in delays.store.find("orders", unique_key="u1")] == [3]
    [hit] = delays.store.get("orders", 3, 0, tags="t").messages
    assert hit.offset == 0


def test_delivery_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    delays = Delays(tmp_path / "store", durability="flush")
    delays.put(1)
    delays.pass_ms(1_000)
    delays.store.run_once(delays.clock.monotonic_ms() + 60_000)  # shows what is flushed
    assert delays.delivered() == [b"m"]


_NAMES = (
    "DELAY",
    "WAIT",
    "REAL_TOPIC",
    "REAL_QID",
    "TIMER_DELIVER_MS",
    "TIMER_DELAY_SEC",
    "__CRC32#",
    "KEYS",
    "MYDELAY",
)
_pieces = st.lists(
    st.tuples(st.sampled_from(_NAMES), st.sampled_from(("", "1", "2", "orders", "true", "\x01"))), max_size=8
)


def restored_or_why_not(properties: bytes) -> tuple[str, int, bytes] | str:
    try:
        return restored(properties)
    except ValueError as error:
        return str(error)


@given(blobs=st.lists(st.tuples(_pieces, st.sampled_from(("", "\x02", "junk", "junk\x02"))), max_size=8))
def test_restoring_by_known_ends_gives_what_restoring_piece_by_piece_gives(
    blobs: list[tuple[list[tuple[str, str]], str]],
) -> None:
    for pieces, end in blobs:
        blob = ("".join(f"{name}\x01{value}\x02" for name, value in pieces) + end).encode()
        wanted = restored_or_why_not(blob)
        begin, rest = parted(blob)
        assert begin + rest == blob
        found = restored_or_why_not(rest)
        assert wanted == (found if isinstance(found, str) else (*found[:2], begin + found[2]))
        if isinstance(wanted, tuple):
            before, after = decode_properties(blob), decode_properties(wanted[2])
            gone = {"DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "__CRC32#"}
            assert after == {k: v for k, v in before.items() if k not in gone} | {"WAIT": "false"}
            assert (wanted[0], wanted[1]) == (before["REAL_TOPIC"], int(before["REAL_QID"]))


# -- what is relocated ---


def test_marks_of_a_delay_that_is_over_do_not_come_back_to_life() -> None:
    """TIMER_DEL_UNIQKEY would make the copy a cancellation, an old TIMER_OUT_MS would be its time."""
    old = b"a\x01b\x02TIMER_OUT_MS\x011\x02TIMER_DEL_UNIQKEY\x01t+u\x02TIMER_ROLL_TIMES\x013\x02REAL_TOPIC\x01t\x02"
    assert decode_properties(level_properties(old, 4, 7001)) == {
        "a": "b",
        "REAL_TOPIC": "t",
        "TIMER_DELIVER_MS": "7001",
        "TIMER_OUT_MS": "7000",
        "TIMER_DELAY_LEVEL": "4",
    }


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(1, 80)), min_size=1), st.integers(0, 10))
def test_it_is_the_last_boundary_that_frees_twice_what_is_copied(records: list[tuple[int, int]], last: int) -> None:
    offsets, sizes = np.array(records, np.int64).T
    front = min(offset for offset, _ in records) // 100 * 100
    good = [
        boundary
        for boundary in range(front + 100, last * 100 + 1, 100)
        if 2 * sum(size for offset, size in records if offset < boundary) <= boundary - front
    ]
    assert worth_rolling(offsets, sizes, last * 100, 100) == (good[-1] if good else None)


# -- what cannot be delivered -----------------------------------------------------------------------------------------

UNRESTORABLE = [
    ({}, "REAL_TOPIC"),
    ({"REAL_TOPIC": "orders"}, "REAL_QID"),
    ({"REAL_TOPIC": "orders", "REAL_QID": "٣"}, "REAL_QID"),
    ({"REAL_TOPIC": "orders", "REAL_QID": "99999999999"}, "REAL_QID"),
    ({"REAL_TOPIC": "orders", "REAL_QID": "-1"}, "got -1"),
    ({"REAL_TOPIC": "orders", "REAL_QID": "16384"}, "got 16384"),
    ({"REAL_TOPIC": "../orders", "REAL_QID": "0"}, "topic"),
    ({"REAL_TOPIC": SCHEDULE_TOPIC, "REAL_QID": "0"}, "for ever"),
]


@pytest.mark.parametrize(("properties", "reason"), UNRESTORABLE)
def test_unrestorable_message_is_dead_and_blocks_nothing(
    delays: Delays, properties: dict[str, str], reason: str
) -> None:
    delays.put(1, b"before")
    at = delays.raw(1, properties)
    delays.put(1, b"behind")
    delays.pass_ms(1_000)
    assert delays.delivered() == [b"before", b"behind"]
    [(offset, group, text)] = delays.dead
    assert (offset, group) == (at, SCHEDULE_GROUP)
    assert reason in text
    assert delays.counted("delay_dead_letters") == 1
    assert delays.service.progress() == {1: (3, 3)}


def test_a_dead_letter_that_cannot_be_stored_is_tried_again(delays: Delays, monkeypatch: pytest.MonkeyPatch) -> None:
    delays.raw(1, {})
    delays.put(1, b"behind")
    errors = iter([InvalidMessageError("too long", "body"), StoreFullError(errno.ENOSPC, "full", "f", "allocate")])
    real = delays.bury

    def bury(message: Message, group: str, reason: str) -> None:
        for error in errors:
            raise error
        real(message, group, reason)

    monkeypatch.setattr(delays, "bury", bury)
    delays.clock.advance(1_000)
    assert delays.settle() == START_MS + 1_100
    assert "too long" in delays.service.errors[1]
    assert delays.delivered() == []
    delays.pass_ms(100 + 200)
    assert [offset for offset, _, _ in delays.dead] == [0]
    assert delays.delivered() == [b"behind"]
    assert delays.service.errors == {}


def test_a_half_message_is_passed_over(delays: Delays) -> None:
    delays.put(1, b"before")
    delays.raw(1, {"REAL_TOPIC": HALF_TOPIC, "REAL_QID": "0"})
    delays.put(1, b"behind")
    delays.pass_ms(1_000)
    assert delays.delivered() == [b"before", b"behind"]
    assert delays.store.offsets_or_none(HALF_TOPIC, 0) is None
    assert delays.dead == []
    assert delays.service.progress() == {1: (3, 3)}


def test_damaged_records_are_passed_over_and_counted_once(delays: Delays) -> None:
    """And a read that goes past the damage must not bring what is not due yet."""
    for n in range(10):
        delays.put(1, b"message %d" % n)
    delays.clock.advance(500)
    delays.put(1, b"later")
    delays.store.dispatch()
    for n in (0, 4, 5, 9):
        units = delays.store.units(SCHEDULE_TOPIC, 0, n, 1)
        flip(delays.path / "commitlog" / f"{0:020d}", int(units["physical_offset"][0]) + 90)
    store = delays.store
    # One that has not verified anything before.
    store.records = RecordReader(store.parts, store.news, store.check_closed, passes_over_bad=True)
    delays.clock.advance(500)
    assert delays.settle() == START_MS + 1_500
    assert delays.delivered() == [b"message %d" % n for n in (1, 2, 3, 6, 7, 8)]
    delays.pass_ms(500)
    assert delays.delivered()[-1] == b"later"
    assert delays.counted("delay_unreadable") == 4


# -- puts that fail (delivery#level-delivery) --------------------------------------------------------------------------


def test_back_off_doubles_from_100_ms_to_10_s(delays: Delays, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(count: int) -> list[int]:
        found = []
        with monkeypatch.context() as patched:
            patched.setattr(type(delays.parts.router), "copy_many", full)
            for _ in range(count):
                due_ms = delays.service.run_once(delays.clock.now_ms())
                assert due_ms is not None
                found.append(due_ms - delays.clock.now_ms())
                delays.clock.set_wall(due_ms)
        return found

    delays.put(1)
    delays.clock.advance(1_000)
    assert waits(9) == [100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000]
    delays.settle()
    delays.put(1)
    delays.pass_ms(999)
    delays.clock.advance(1)
    assert waits(2) == [100, 200]
    delays.settle()
    assert len(delays.delivered()) == 2


# -- progress on disk (delivery#level-progress, delivery#level-crash, delivery#x2) -------------------------------------


def test_unwritable_progress_delays_no_delivery(delays: Delays, monkeypatch: pytest.MonkeyPatch) -> None:
    delays.clock.advance(20_000)
    delays.put(1, b"a")
    delays.clock.advance(1_000)
    delays.store.dispatch()
    with monkeypatch.context() as patched:
        patched.setattr(delays.store, "flush", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            delays.service.run_once(delays.clock.now_ms())
        assert delays.delivered() == [b"a"]
        delays.put(1, b"b")
        delays.pass_ms(1_500)
    assert delays.delivered() == [b"a", b"b"]
    delays.pass_ms(10_000)
    assert delays.file()["offsetTable"] == {"1": 2}


def test_retention_respects_a_quick_save(delays: Delays) -> None:
    """A power cut may take the quick save back, and the level goes on from the last synced one."""
    for _ in range(3):
        delays.put(1)
        delays.pass_ms(1_100)
    [pin] = delays.service.pins()
    assert "on disk at 1" in pin.why
    assert delays.file()["offsetTable"] == {"1": 3}


@pytest.mark.parametrize("lives_ms", [0, 9_000])
def test_a_crash_loop_repeats_no_message_more_than_once(delays: Delays, lives_ms: int) -> None:
    """Each process dies when it has caught up, or before the ten seconds are over after which progress is saved."""
    for n in range(8):
        delays.put(2, b"%d" % n)
        delays.pass_ms(lives_ms)
        delays.reopen(Unsynced(), killed=True)
        delays.clock.advance(9_000 - lives_ms)
        delays.settle()
    delays.pass_ms(10_000)
    counts = Counter(delays.delivered())
    assert set(counts) == {b"%d" % n for n in range(8)}
    assert max(counts.values()) <= 2


def test_progress_beyond_the_queues_end_is_lowered_and_reported(
    delays: Delays, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut took the end of the queue; what comes next gets the numbers that were taken."""
    delays.put(1, b"old")
    delays.pass_ms(1_000)
    delays.close()
    config = delays.path / "config" / "delayOffset.json"
    config.write_text('{"offsetTable":{1:7,2:3}}')
    delays.open()
    assert caplog.text.count("it continues there") == 2
    assert delays.file()["offsetTable"] == {"1": 1, "2": 0}
    delays.put(1, b"new")
    delays.put(2, b"of a queue that was gone")
    delays.pass_ms(5_000)
    assert delays.delivered() == [b"old", b"new", b"of a queue that was gone"]


def test_a_file_of_another_program_is_read_and_what_is_not_ours_is_kept(delays: Delays) -> None:
    delays.put(1, b"a")
    delays.put(1, b"b")
    delays.close()
    config = delays.path / "config"
    config.mkdir(exist_ok=True)
    (config / "delayOffset.json").write_text(
        '{"dataVersion":{"counter":5,"stateVersion":0,"timestamp":9},"offsetTable":{1:1,40:7},"theirs":{"x":[1]}}'
    )
    delays.open()
    delays.pass_ms(1_000)
    delays.service.persist()
    assert delays.delivered() == [b"b"]
    assert delays.file() == {
        "dataVersion": {"counter": 5, "stateVersion": 0, "timestamp": 9},
        "offsetTable": {"1": 2, "40": 7},
        "theirs": {"x": [1]},
    }


# -- retention, orphans -----------------------------------------------------------------------------------------------


def test_expired_messages_count_as_lost(tmp_path: Path) -> None:
    delays = Delays(tmp_path / "store", segment_bytes=4096)
    for n in range(40):
        delays.put(2, b"%02d" % n * 200)
    delays.store.flush()
    delays.store.dispatch()
    delays.store.drop_before(delays.store.max_offset // 2)
    low, high = delays.store.offsets(SCHEDULE_TOPIC, 1)
    assert 0 < low < high == 40
    delays.pass_ms(5_000)
    assert [body[:2] for body in delays.delivered()] == [b"%02d" % n for n in range(low, 40)]
    assert delays.parts.statistics.snapshot().lost == {(SCHEDULE_GROUP, SCHEDULE_TOPIC, 1): low}


def test_a_level_pins_the_first_record_that_a_crash_would_deliver_again(delays: Delays) -> None:
    assert list(delays.service.pins()) == []
    delays.put(1, b"a")
    first = delays.messages(SCHEDULE_TOPIC)[0].physical_offset
    assert [pin.physical_offset for pin in delays.service.pins()] == [first]
    delays.pass_ms(1_000)
    delays.put(1, b"b")
    assert [pin.physical_offset for pin in delays.service.pins()] == [first], "delivered, but not yet on record"
    delays.service.save(delays.clock.now_ms())
    second = delays.messages(SCHEDULE_TOPIC)[1].physical_offset
    [pin] = delays.service.pins()
    assert pin[:4] == (second, SCHEDULE_TOPIC, 0, SCHEDULE_GROUP)
    delays.pass_ms(20_000)
    assert list(delays.service.pins()) == []


def orphaned(path: Path, **options: Any) -> Delays:
    delays = Delays(path, delay_levels="1s 5s 2h")
    delays.put(3, b"done")
    delays.pass_ms(7_200_000)
    for n in range(3):
        delays.put(3, b"orphan %d" % n)
    delays.reopen(delay_levels="1s 5s", **options)
    return delays


def test_messages_of_a_level_that_is_gone_are_reported_and_relocated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with orphaned(tmp_path / "store") as delays:
        assert "3 messages wait in delay level 3, but the table has 2 levels" in caplog.text
        assert [pin.queue_id for pin in delays.service.pins()] == [2]
        delays.put(1, b"of level 1")
        delays.pass_ms(7_199_999)
        assert delays.delivered() == [b"done", b"of level 1"]
        assert list(delays.service.pins()) == []
        delays.reopen(delay_levels="1s 5s 2h")
        delays.pass_ms(1)
        assert delays.delivered() == [b"done", b"of level 1", *(b"orphan %d" % n for n in range(3))]
        assert caplog.text.count("messages wait in delay level") == 1


def test_or_delivered_at_once_if_one_says_so(tmp_path: Path) -> None:
    delays = orphaned(tmp_path / "store", orphan_level_policy="deliver_now")
    delays.settle()
    assert delays.delivered() == [b"done", *(b"orphan %d" % n for n in range(3))]
    delays.reopen(delay_levels="1s 5s", orphan_level_policy="deliver_now")
    delays.settle()
    assert len(delays.delivered()) == 4


# -- by the public API -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay", "looks"), [({"delay_level": 18}, True), ({"delay": timedelta(days=100)}, False)])
def test_closing_with_delayed_messages_and_opening_again_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, delay: dict[str, Any], looks: bool
) -> None:
    clock = SimulatedClock()
    with caplog.at_level(logging.WARNING, "mqstore"):
        for _ in range(3):
            with mqstore.open(tmp_path / "mq", config=StoreConfig(clock=clock)) as store:
                store.put("reminders", b"later", **delay)
                if looks:
                    store.broker.run_once()
    assert caplog.messages == []
    with mqstore.open(tmp_path / "mq", config=StoreConfig(clock=clock)) as store:
        assert not store.broker.pop("mail", "reminders", n=32)
        clock.advance(101 * 86_400_000)
        for _ in range(100):
            store.broker.run_once()
        assert len(store.broker.pop("mail", "reminders", n=32)) == 3
