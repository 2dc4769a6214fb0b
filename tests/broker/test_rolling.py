"""Messages that wait long do not hold the log: they are put again at its end, and still come on
their day, once, as if nothing had been.

Moments are computed here from what was asked for. What is kept of the log is told from its bounds; what a message looks
like, from the sections on delivery (delivery#restore, delivery#recall).
"""

from __future__ import annotations

import errno
import logging
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, Retention
from mqstore.errors import InvalidMessageError, StoreFullError
from tests.broker import support
from tests.broker.support import START_MS
from tests.faults import FaultyFileSystem
from tests.log.support import flip

TIMER = "rmq_sys_wheel_timer"
S, HOUR, DAY = 1_000, 3_600_000, 86_400_000
SEGMENT = 1 << 14
BODY = bytes(4000)
"""Four to a segment."""
LARGE = bytes(12_000)
"""One to a segment."""
KEPT = 4 * SEGMENT


class Bench(support.Bench):
    """A broker without threads under a policy by size, and a topic that others keep busy."""

    def __init__(self, path: Path, fs: Any = None, **config: Any) -> None:
        policy = Retention(age=None, max_bytes=KEPT, unconsumed=config.pop("unconsumed", "keep"))
        sizes = {"segment_bytes": SEGMENT, "consumequeue_units": 64}
        super().__init__(path, retention=policy, fs=fs, **{"delay_levels": "1s 10s 30d", **sizes, **config})

    @property
    def store(self) -> Any:
        return self.broker.store

    def days(self, count: int) -> None:
        for _ in range(count):
            self.jump(DAY)

    def house(self) -> None:
        """As long as rolling, its checkpoint and the deletion take."""
        for _ in range(4):
            self.jump(10 * S)

    def busy(self, segments: int = 8) -> None:
        """Others put, and consume."""
        for _ in range(segments):
            receipt = self.broker.put("busy", LARGE, queue_id=0)
        self.broker.commit("reader", "busy", 0, receipt.offset + 1)
        self.broker.save()
        self.store.flush()

    @property
    def kept(self) -> int:
        return self.store.max_offset - self.store.min_offset

    def messages(self, topic: str = "orders", queue_id: int = 0) -> list[Message]:
        return support.messages_of(self.parts, topic, queue_id)

    def arrived(self) -> list[tuple[str, int]]:
        """(body, ms from START_MS) of what was delivered."""
        return [(message.text(), message.store_timestamp_ms - START_MS) for message in self.messages()]

    def counted(self, name: str) -> int:
        return support.counted(self.parts, name)


@pytest.fixture(autouse=True)
def _files_stay_whole(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Who takes his own files for damaged builds them again, which hides most of what goes wrong here."""
    yield
    told = [record.getMessage() for record in caplog.get_records("call")]
    assert not [text for text in told if "rebuilt" in text and "no checkpoint" not in text]


def at_the_front(bench: Bench, *waits_ms: int) -> list[str]:
    """Messages "0", "1", ... that wait so long, and alone hold the first segment by the time this returns."""
    handles = []
    for number, wait_ms in enumerate(waits_ms):
        receipt = bench.broker.put("orders", b"%d" % number, queue_id=0, delay=wait_ms / 1000)
        assert receipt.recall_handle is not None
        handles.append(receipt.recall_handle)
    bench.settle()
    bench.jump(2 * S)
    bench.busy()
    return handles


def by_level(bench: Bench, first: int, stop: int, **options: Any) -> None:
    """Messages "first", ... that wait for 30 days, in their level unless `options` say otherwise."""
    for number in range(first, stop):
        bench.broker.put("orders", b"%d" % number, queue_id=0, **(options or {"delay_level": 3}))


# -- what it is for ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unconsumed", "restarts"), [("keep", True), ("drop", False)])
@pytest.mark.parametrize(("days", "delay"), [(90, {"delay": 90 * DAY / 1000}), (30, {"delay_level": 3})])
def test_message_that_waits_long_holds_no_log_and_is_on_time(
    tmp_path: Path, days: int, delay: dict[str, Any], unconsumed: str, restarts: bool
) -> None:
    bench = Bench(tmp_path / "store", unconsumed=unconsumed)
    bench.broker.put("orders", b"far", queue_id=0, **delay)
    bench.settle()
    for day in range(2, days - 4, 4):
        bench.busy(5)
        bench.house()
        assert bench.kept <= KEPT + 2 * SEGMENT, f"day {day}"
        if restarts and day % 7 == 6:
            bench.again()
        bench.jump(START_MS + (day + 4) * DAY - bench.clock.now_ms())
    if "delay_level" in delay:
        assert bench.broker.stats().delay_levels == {3: (1, 1)}
        assert bench.broker.stats().timer_waiting == 1
    elif not restarts:
        assert bench.counted("TIMER_ROLLED") >= 20, "else this was no test of rolling"
    bench.jump(START_MS + days * DAY - bench.clock.now_ms() - 1)
    assert bench.arrived() == []
    bench.jump(S)
    bench.jump(10 * DAY)
    assert [body for body, _ in bench.arrived()] == ["far"]
    assert days * DAY <= bench.arrived()[0][1] < days * DAY + S
    assert bench.counted("TIMER_UNREADABLE") == 0
    bench.broker.close()


def test_relocated_level_message_is_delivered_as_usual(bench: Bench) -> None:
    properties = {"TAGS": "t", "KEYS": "k1 k2", "mine": "x", "WAIT": "true", "DELAY": "3"}
    put = bench.parts.router.append
    fields: dict[str, Any] = {"flag": 7, "born_timestamp_ms": 123, "born_host": "10.1.2.3:55", "reconsume_times": 4}
    first = put("orders", 2, b"with a key", {**properties, "UNIQ_KEY": "u"}, **fields)
    second = put("orders", 2, b"without", properties, **fields)
    bench.busy()
    bench.house()
    assert bench.counted("delay_rolled") == 2
    assert bench.store.min_offset > second.physical_offset > first.physical_offset
    bench.days(31)
    with_key, without = bench.messages("orders", 2)
    # 4.5: DELAY is gone, WAIT is false, REAL_TOPIC and REAL_QID stay. A copy without a key names the record that the
    # producer was told of.
    expected = {"TAGS": "t", "KEYS": "k1 k2", "mine": "x", "REAL_TOPIC": "orders", "REAL_QID": "2", "WAIT": "false"}
    assert with_key.stored_properties() == {**expected, "UNIQ_KEY": "u"}
    assert without.stored_properties() == {**expected, "ORIGIN_MESSAGE_ID": second.message_id}
    for message in (with_key, without):
        assert (message.flag, message.born_timestamp_ms, message.born_host) == (7, 123, "10.1.2.3:55")
        assert (message.reconsume_times, message.tag, message.keys) == (4, "t", ("k1", "k2"))
        assert message.tags_code == without.tags_code


def test_a_level_keeps_its_order_where_a_part_of_it_is_rolled(bench: Bench) -> None:
    for number in range(3):
        bench.broker.put("orders", b"%d" % number, queue_id=0, delay_level=3)
        bench.jump(S)
    bench.busy()
    for number in range(3, 6):
        bench.broker.put("orders", b"%d" % number, queue_id=0, delay_level=3)
        bench.jump(S)
    bench.house()
    assert bench.counted("delay_rolled") == 3
    assert bench.broker.stats().delay_levels == {3: (3, 6)}
    bench.jump(START_MS + 30 * DAY - bench.clock.now_ms())
    for _ in range(50):
        bench.jump(S)
    assert [body for body, _ in bench.arrived()] == [*"012345"]
    for number, (_, at_ms) in zip((0, 1, 2, 3, 4, 5), bench.arrived(), strict=True):
        assert at_ms >= 30 * DAY + number * S
    assert bench.counted("delay_rolled") == 3


# -- once --------------------------------------------------------------------------------------------------------------


def test_messages_due_now_are_not_relocated(bench: Bench) -> None:
    """Units are done from the front of the timer's log on, so one that is left there holds the others."""
    for wait_ms in (10 * HOUR, 5900, 20 * HOUR):
        bench.broker.put("orders", str(wait_ms).encode(), queue_id=0, delay=wait_ms / 1000)
    bench.advance(5500)  # the slot of the second one is being read, and all three are written
    assert bench.timer.roll(bench.store.max_offset, 10, bench.clock.now_ms()) == 1
    bench.advance(2000)
    assert bench.arrived() == [("5900", 5900)]
    assert bench.timer.roll(bench.store.max_offset, 10, bench.clock.now_ms()) == 2, "the last one, and the first again"
    bench.again()
    for due_ms in (10 * HOUR - 1, 10 * HOUR, 20 * HOUR - 1, 20 * HOUR):
        bench.jump(START_MS + due_ms - bench.clock.now_ms())
    assert bench.arrived() == [("5900", 5900), (str(10 * HOUR), 10 * HOUR), (str(20 * HOUR), 20 * HOUR)]


def test_a_level_message_in_the_timer_is_nobodys_to_recall(bench: Bench) -> None:
    """Not even with the handle of a message of the same key, topic and second."""
    bench.broker.put("orders", b"level", queue_id=0, delay_level=3, unique_key="u")
    bench.busy()
    bench.house()
    assert bench.counted("delay_rolled") == 1
    receipt = bench.broker.put("orders", b"timer", queue_id=0, deliver_at=(START_MS + 30 * DAY) / 1000, unique_key="u")
    for _ in range(2):
        assert bench.broker.recall(receipt.recall_handle or "") is True
    bench.days(31)
    assert [body for body, _ in bench.arrived()] == ["level"]


def test_a_timer_that_has_rolled_all_it_had_is_not_taken_for_a_damaged_one(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mqstore"):
        at_the_front(bench, HOUR, 3 * DAY, 40 * DAY)
        timer, now_ms = bench.timer, bench.clock.now_ms()
        assert timer.roll(SEGMENT, 100, now_ms) == 3
        assert timer.roll(SEGMENT, 100, now_ms) == 0
        assert timer.waiting() == 3
        bench.jump(S)
        bench.again()
        bench.days(40)
    assert sorted(body for body, _ in bench.arrived()) == ["0", "1", "2"]
    assert caplog.records == []


# -- when it is not done -----------------------------------------------------------------------------------------------


def test_nothing_is_rolled_where_somebody_else_holds_the_log_anyway(bench: Bench) -> None:
    bench.broker.put("slow", b"unconsumed", queue_id=0)
    bench.broker.commit("sleeper", "slow", 0, 0)
    at_the_front(bench, HOUR)
    bench.broker.put("orders", b"level", queue_id=0, delay_level=3)
    bench.house()
    assert (bench.store.min_offset, bench.counted("TIMER_ROLLED"), bench.counted("delay_rolled")) == (0, 0, 0)
    bench.broker.commit("sleeper", "slow", 0, 1)
    bench.house()
    assert bench.counted("TIMER_ROLLED") == 1
    assert bench.kept <= KEPT + 2 * SEGMENT


def test_a_log_full_of_messages_that_wait_is_not_moved_in_circles(bench: Bench) -> None:
    """The policy would delete all that waits, and putting it again would free nothing."""
    for _ in range(8):
        for _ in range(4):
            bench.broker.put("orders", BODY, queue_id=0, delay=10 * DAY / 1000)
        bench.broker.put("orders", BODY, queue_id=0, delay_level=3)
        bench.settle()
    for _ in range(10):
        bench.house()
    assert (bench.counted("TIMER_ROLLED"), bench.counted("delay_rolled")) == (0, 0)
    assert bench.store.min_offset == 0


def test_relocation_is_bounded_by_new_messages(bench: Bench) -> None:
    rng = random.Random("rolling costs")
    waiting = 0
    for _ in range(20):
        for _ in range(rng.randrange(3)):
            bench.broker.put("orders", BODY, queue_id=0, delay=rng.randrange(20, 40) * DAY / 1000)
            waiting += 1
        bench.settle()
        bench.busy(rng.randrange(1, 4))
        bench.house()
        record = len(BODY) + 400
        assert bench.counted("TIMER_ROLLED") * record <= bench.store.offsets("busy", 0)[1] * SEGMENT
        assert bench.kept <= KEPT + 2 * waiting * record + 3 * SEGMENT
    assert bench.counted("TIMER_ROLLED") > 0


# -- recall ------------------------------------------------------------------------------------------------------------


def test_a_recall_between_rolling_and_its_checkpoint_holds_over_a_crash(bench: Bench) -> None:
    gone, _ = at_the_front(bench, 20 * DAY, 20 * DAY)
    assert bench.timer.roll(SEGMENT, 100, bench.clock.now_ms()) == 2
    assert bench.broker.recall(gone) is True
    bench.kill()
    bench.days(21)
    assert {body for body, _ in bench.arrived()} == {"1"}


# -- crashes, restarts, failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rolled", "killed"), [(1, True), (3, False), (5, True)])
def test_a_pass_that_was_cut_short_goes_on_where_it_was(bench: Bench, rolled: int, killed: bool) -> None:
    at_the_front(bench, *[20 * DAY] * 5)
    assert bench.timer.roll(SEGMENT, rolled, bench.clock.now_ms()) == rolled
    bench.jump(S)  # the checkpoint
    (bench.kill if killed else bench.again)()
    bench.house()
    assert bench.counted("TIMER_ROLLED") == 5 - rolled
    bench.days(21)
    assert sorted(body for body, _ in bench.arrived()) == [*"01234"]


@pytest.mark.parametrize("kind", ["timer", "level"])
def test_crash_doubles_only_recent_relocations(bench: Bench, kind: str) -> None:
    by_level(bench, 0, 4, **({"delay": 30 * DAY / 1000} if kind == "timer" else {}))
    bench.settle()
    bench.jump(20 * S)
    bench.busy()
    roller = bench.timer if kind == "timer" else bench.delay
    assert roller.roll(SEGMENT, 2, bench.clock.now_ms()) == 2
    bench.kill()
    bench.days(32)
    assert Counter(body for body, _ in bench.arrived()) == {"0": 2, "1": 2, "2": 1, "3": 1}
    assert all(at_ms >= 30 * DAY for _, at_ms in bench.arrived())


@pytest.mark.parametrize("kind", ["timer", "level"])
def test_a_crash_loop_does_not_roll_again_and_again(bench: Bench, kind: str) -> None:
    """Each process lives as long as it has something to do at once, which a pass of rolling is, and dies."""
    by_level(bench, 0, 4, **({"delay": 30 * DAY / 1000} if kind == "timer" else {}))
    bench.settle()
    bench.clock.advance(20 * S)
    bench.busy()
    for _ in range(5):
        bench.kill()
        bench.settle()
    bench.days(32)
    assert Counter(body for body, _ in bench.arrived()) == {"0": 1, "1": 1, "2": 1, "3": 1}


def test_nothing_is_deleted_before_the_copies_are_on_record(bench: Bench) -> None:
    bench.broker.put("orders", b"level", queue_id=0, delay_level=3)
    at_the_front(bench, 20 * DAY)
    for roller in (bench.timer, bench.delay):
        before = [*roller.pins()]
        assert roller.roll(SEGMENT, 10, bench.clock.now_ms()) == 1
        assert [pin.physical_offset for pin in roller.pins()] == [pin.physical_offset for pin in before]
    bench.store.clean()
    assert bench.store.min_offset == 0
    bench.house()
    assert bench.store.min_offset > 0


def test_a_full_disk_while_rolling_loses_nothing_and_it_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_front(bench, *[20 * DAY] * 3)
    by_level(bench, 3, 6)
    bench.busy()
    append, room = bench.store.append, 1

    def full(*args: Any, **kwargs: Any) -> Any:
        nonlocal room
        if room == 0:
            raise StoreFullError(errno.ENOSPC, "no space", "file", "allocate")
        room -= 1
        return append(*args, **kwargs)

    monkeypatch.setattr(bench.store, "append", full)
    monkeypatch.setattr(bench.store, "copy_many", full)
    for _ in range(5):
        bench.house()
        assert "StoreFullError" in bench.broker.stats().errors["retention"]
    assert bench.store.min_offset == 0
    monkeypatch.undo()
    for _ in range(3):
        bench.house()
    assert bench.broker.stats().errors == {}
    assert bench.kept <= KEPT + 2 * SEGMENT
    bench.days(32)
    assert sorted(body for body, _ in bench.arrived()) == [*"012345"]


def test_full_disk_gets_room_by_relocation(tmp_path: Path) -> None:
    """What was rolled before the disk was full is on record all the same: else it would stay full for ever."""
    fs = FaultyFileSystem()
    bench = Bench(tmp_path / "store", fs)
    at_the_front(bench, 20 * DAY, 20 * DAY)
    fs.fail("allocate", errno.ENOSPC, times=None)
    bench.house()
    bench.house()
    with pytest.raises(StoreFullError):
        bench.busy()
    bench.house()
    assert bench.kept <= KEPT + 2 * SEGMENT
    fs.heal()
    bench.days(21)
    assert sorted(body for body, _ in bench.arrived()) == ["0", "1"]
    bench.broker.close()


def damage(bench: Bench, topic: str, queue_id: int, offset: int) -> None:
    """Change a record that nobody has read yet: what was verified once is not again."""
    [unit] = bench.store.units(topic, queue_id, offset, 1)
    start = int(unit["physical_offset"]) // SEGMENT * SEGMENT
    flip(bench.path / "commitlog" / f"{start:020}", int(unit["physical_offset"] + unit["size"]) - 60 - start)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_broken_record_is_passed_over_and_reported(
    bench: Bench, caplog: pytest.LogCaptureFixture, reopened: bool
) -> None:
    at_the_front(bench, *[20 * DAY] * 3)
    by_level(bench, 3, 6)
    bench.busy()
    bench.settle()
    damage(bench, TIMER, 0, 1)
    damage(bench, "SCHEDULE_TOPIC_XXXX", 2, 1)
    if reopened:
        bench.again()
    bench.house()
    bench.house()
    assert (bench.counted("TIMER_UNREADABLE"), bench.counted("delay_unreadable")) == (1, 1)
    assert (bench.counted("TIMER_ROLLED"), bench.counted("delay_rolled")) == (2, 2)
    assert bench.kept <= KEPT + 2 * SEGMENT
    assert "damaged" in caplog.text
    bench.days(32)
    assert sorted(body for body, _ in bench.arrived()) == ["0", "2", "3", "5"]
    if reopened:  # then the queue does not have the record either, and the timer builds its files again
        caplog.clear()


def test_level_message_without_room_for_marks_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path / "store", segment_bytes=4 * SEGMENT)
    long = {"mine": "x" * 32_650}
    for body, properties in ((b"a", {}), (b"b", long), (b"c", {})):
        bench.broker.put("orders", body, queue_id=0, properties=properties, delay_level=3)
    bench.busy(32)
    for _ in range(4):
        bench.house()
    assert bench.counted("delay_rolled") == 1
    assert bench.broker.stats().errors == {}
    assert caplog.text.count("cannot be relocated") == 1
    pin = bench.broker.stats().oldest_pin
    assert pin is not None
    assert (pin.topic, pin.rolls) == ("SCHEDULE_TOPIC_XXXX", False)
    bench.jump(START_MS + 30 * DAY - bench.clock.now_ms() - 1)
    bench.jump(S)
    assert sorted(body for body, _ in bench.arrived()) == [*"abc"]
    bench.broker.commit("shop", "orders", 0, 3)
    bench.jump(DAY)
    bench.house()
    assert bench.store.min_offset > 0
    bench.broker.close()


def test_a_timer_message_that_cannot_be_put_again_stays(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.broker.put("orders", bytes(3000), queue_id=0, delay=30 * DAY / 1000)
    bench.busy()
    bench.house()
    bench.busy()
    rolled = bench.counted("TIMER_ROLLED")
    assert rolled == 1
    bench.again(max_message_size=2000)  # which is for what is put; this was

    def refuse(*_: Any, **__: Any) -> Any:
        raise InvalidMessageError("too large", "properties")

    monkeypatch.setattr(bench.parts.router, "copy", refuse)
    for _ in range(4):
        bench.house()
    assert bench.counted("TIMER_ROLLED") == 0
    assert caplog.text.count("cannot relocate") == 1
    pin = bench.broker.stats().oldest_pin
    assert pin is not None
    assert (pin.topic, pin.rolls) == (TIMER, False)
    bench.again()
    bench.house()
    assert bench.counted("TIMER_ROLLED") == 1, "it can be, again"


# -- what is told ------------------------------------------------------------------------------------------------------


def test_clock_step_back_finds_relocated_messages(bench: Bench) -> None:
    handles = at_the_front(bench, HOUR, 3 * DAY)
    assert bench.timer.roll(SEGMENT, 1, bench.clock.now_ms()) == 1
    bench.jump(S)
    bench.clock.set_wall(START_MS - HOUR)
    bench.settle()
    bench.again()
    bench.jump(2 * HOUR - 1)
    assert bench.arrived() == []
    bench.jump(S)
    assert [body for body, _ in bench.arrived()] == ["0"]
    assert bench.broker.recall(handles[1]) is True
    bench.days(5)
    assert [body for body, _ in bench.arrived()] == ["0"]


# -- anything ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_each_message_comes_on_its_day_and_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"rolling {seed}")
    bench = Bench(tmp_path / "store", unconsumed=rng.choice(("keep", "drop")))
    due: dict[str, int] = {}
    handles: dict[str, str] = {}
    recalled: set[str] = set()
    bench.broker.topics.create("orders", queues=1)
    for number in range(120):
        choice = rng.random()
        body = str(number)
        if choice < 0.3:
            wait = rng.choice((5 * S, HOUR, DAY, 9 * DAY, 40 * DAY)) + rng.randrange(3 * S)
            receipt = bench.broker.put("orders", body.encode(), queue_id=0, delay=wait / 1000)
            assert receipt.recall_handle is not None
            handles[body] = receipt.recall_handle
            due[body] = bench.clock.now_ms() + wait - START_MS
        elif choice < 0.5:
            level = rng.randrange(1, 4)
            bench.broker.put("orders", body.encode(), queue_id=0, delay_level=level)
            due[body] = bench.clock.now_ms() + (S, 10 * S, 30 * DAY)[level - 1] - START_MS
        elif choice < 0.6 and handles:
            body = rng.choice(sorted(handles))
            before = {arrived for arrived, _ in bench.arrived()}
            if bench.broker.recall(handles[body]):
                assert body not in before
                recalled.add(body)
        elif choice < 0.8:
            bench.busy(rng.randrange(1, 10))
        elif choice < 0.85:
            bench.again()
        elif choice < 0.95:
            bench.house()
        else:
            bench.jump(rng.choice((S, HOUR, DAY, 4 * DAY)))
        bench.broker.commit("shop", "orders", 0, (bench.store.offsets_or_none("orders", 0) or (0, 0))[1])
    assert bench.counted("TIMER_ROLLED") + bench.counted("delay_rolled") > 0 or seed
    arrived: Counter[str] = Counter()
    seen = 0
    bench.days(50)
    bounds = bench.store.offsets("orders", 0)
    seen = bounds[0]
    for body, at_ms in bench.arrived():
        arrived[body] += 1
        assert at_ms >= due[body], f"{body} came early"
    assert not recalled & arrived.keys()
    assert all(count == 1 for count in arrived.values()), arrived
    assert len(due) - len(recalled) == seen + len(arrived)
    assert bench.broker.stats().timer_waiting == 0
    bench.broker.close()
