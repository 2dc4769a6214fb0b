"""Arbitrary delay (delivery#timer), over small stores with time by hand.

Expected times are computed here from the moments asked for: a message due at D is delivered at D.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.delay.timerfiles import TimerFilesDamaged
from mqstore.errors import InvalidMessageError, StoreFullError, StoreIOError
from tests.broker.support import START_MS
from tests.broker.timersupport import DAY, HOUR, MIN, TIMER_TOPIC, S, Timers, count_looks, small_steps
from tests.faults import FaultyFileSystem
from tests.log.support import flip


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_looks(monkeypatch)


@pytest.mark.parametrize("phase_ms", [0, 1, 999])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_message_comes_at_its_moment(timers: Timers, phase_ms: int, reopened: bool) -> None:
    """A store reopened a millisecond before each moment delivers as one that stays open."""
    timers.clock.advance(phase_ms)
    due = {wait_ms: phase_ms + wait_ms for wait_ms in (1, 500, 999, 1000, 1001, 1999, 2000, 59_999, 60_000, 2 * DAY)}
    for wait_ms in due:
        timers.put(str(wait_ms), wait_ms)
    for done, due_ms in enumerate(due.values()):
        timers.pass_ms(due_ms - 1 - (timers.clock.now_ms() - START_MS))
        if reopened:
            timers.reopen()
        assert (len(timers.texts()), timers.timer.waiting()) == (done, len(due) - done)
        timers.pass_ms(1)
    assert timers.delivered() == [(str(wait_ms), due_ms) for wait_ms, due_ms in due.items()]
    assert len(timers.messages(TIMER_TOPIC)) <= len(due) + 1, "rolled for nothing"
    assert timers.timer.waiting() == 0


def test_estimate_of_waiting_messages_keeps_what_was_read_before_damage(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers.put("later", 5000)
    timers.settle()
    end, units = timers.parts.store.max_offset, timers.timer._units
    whole = units.old

    def damaged(*given: int) -> Any:
        yield from whole(*given)
        raise TimerFilesDamaged("a later segment is missing")

    monkeypatch.setattr(units, "old", damaged)
    assert sum(len(offsets) for offsets, _ in timers.timer.waiting_below(end)) == 1


def test_delivered_copy_has_no_delay_properties(timers: Timers) -> None:
    timers.clock.advance(250)
    properties = {"TAGS": "t", "KEYS": "k", "mine": "x", "UNIQ_KEY": "u"}
    fields: dict[str, Any] = {"flag": 7, "born_timestamp_ms": 123, "born_host": "10.1.2.3:55", "reconsume_times": 4}
    stored = zlib.compress(b"body" * 99)
    delay = {"TIMER_DELAY_MS": "2000", "TIMER_DELIVER_MS": "5"}
    timers.parts.router.append("orders", 0, stored, {**properties, **delay}, sys_flag=1, **fields)
    timers.pass_ms(3000)
    [message] = timers.messages()
    assert bytes(message.body_view) == stored
    times = {"TIMER_OUT_MS": 2000, "TIMER_ENQUEUE_MS": 0, "TIMER_DEQUEUE_MS": 2250}
    times_ms = {name: str(START_MS + ms) for name, ms in times.items()}
    assert message.stored_properties() == {**properties, **times_ms}
    assert (message.text(), message.tag) == ("body" * 99, "t")
    assert {name: getattr(message, name) for name in fields} == fields


@pytest.mark.parametrize("how", ["running", "small steps", "closed", "killed"])
@pytest.mark.parametrize("seed", range(2))
def test_messages_of_one_second_come_each_at_its_own_millisecond(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, how: str, seed: int
) -> None:
    """Put before their second begins and while it runs, also for a time before one that is delivered already."""
    rng = random.Random(seed)
    if how == "small steps":
        small_steps(monkeypatch)
    due: dict[str, int] = {}
    for n in range(60):
        wait_ms = rng.choice((1, 2, 30, 200, 200, 500, 999, 1500))
        due[str(n)] = timers.clock.now_ms() - START_MS + wait_ms
        timers.put(str(n), wait_ms)
        if n % 3:
            timers.pass_ms(rng.choice((0, 1, 19, 70)))
        if n % 7 == 0 and how == "closed":
            timers.reopen()
        if n % 20 == 0 and how == "killed":
            timers.reopen(killed=True)
    timers.pass_ms(2 * S)
    delivered = timers.delivered()
    first = list({body: (body, at) for body, at in reversed(delivered)}.values())[::-1]
    assert first == sorted(due.items(), key=lambda item: item[1])  # of one moment in the order of their puts
    assert len(delivered) == len(first) or how == "killed"
    assert max(Counter(timers.texts()).values()) <= 2
    assert timers.timer.waiting() == 0


def test_steps_of_one_second_are_bounded(timers: Timers, looked: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a slot was looked through in the step that began it: four seconds of a million, with everything else at a
    stop."""
    monkeypatch.setattr("mqstore.broker.delay.timer._STEP", 100)
    monkeypatch.setattr("mqstore.broker.delay.timer._LOOKS", 400)
    for n in range(1_300):
        cancels = {"UNIQ_KEY": f"{n - 1}", "TIMER_DEL_UNIQKEY": f"orders+{n - 1}"} if n % 4 == 3 else {}
        timers.put(str(n), 900, properties={"UNIQ_KEY": str(n), **cancels})
    timers.settle()
    timers.clock.advance(1000)
    looked.clear()
    steps: list[Counter[str]] = []
    while timers.timer.waiting():
        timers.timer.run_once(timers.clock.now_ms())
        steps.append(looked.copy())
        looked.clear()
    timers.settle()
    assert timers.texts() == [str(n) for n in range(1_300) if n % 4 < 2]
    assert max(step["unit"] for step in steps) <= 500
    assert max(step["record"] for step in steps) <= 500
    assert len(steps) <= 4 + 10, "no more of them than are needed"


def test_it_is_called_when_there_is_something_to_do_and_not_otherwise(timers: Timers) -> None:
    begin_ms = START_MS + 5 * HOUR
    timers.put("a", 5 * HOUR + 300)
    assert timers.settle() == begin_ms + 1
    timers.put("b", 5 * HOUR + 400)
    assert timers.settle() == START_MS + 1000, "the flush"
    timers.clock.advance(1000)
    assert timers.settle() == begin_ms + 1, "to look through the slot"
    now_ms = begin_ms + 1
    for next_ms, bodies in (
        (begin_ms + 300, []),
        (begin_ms + 400, ["a"]),
        (begin_ms + 1000, ["a", "b"]),  # the slot ends
        (begin_ms + 1300, ["a", "b"]),  # the flush after the first delivery
        (None, ["a", "b"]),
    ):
        timers.clock.set_wall(now_ms)
        assert timers.settle() == next_ms
        assert timers.texts() == bodies
        now_ms = next_ms or 0


@pytest.mark.parametrize(
    ("stopped_ms", "killed"), [(10 * S, True), (30 * HOUR, True), (8 * DAY, False), (400 * DAY, True)]
)
def test_nothing_is_lost_or_early_over_a_stop_of_any_length(timers: Timers, stopped_ms: int, killed: bool) -> None:
    waits = [2 * S, 5 * S, 50 * S, 2 * HOUR, 20 * HOUR, 40 * HOUR]
    waits += [n * DAY for n in (3, 6, 7, 14, 20, 366)]
    for wait in waits:
        timers.put(f"old {wait}", wait)
    timers.pass_ms(3 * S)
    assert timers.texts() == [f"old {2 * S}"]
    timers.leave(killed)
    timers.clock.advance(stopped_ms)
    timers.open()
    begin = timers.clock.now_ms() - START_MS
    timers.put("new", 1500)
    timers.settle()
    timers.pass_ms(2 * S)
    at = dict(timers.delivered())
    for wait in waits[1:]:
        if wait <= begin:
            assert at[f"old {wait}"] == begin, f"{wait} is overdue and comes at once"
        else:
            assert f"old {wait}" not in at or wait <= at[f"old {wait}"]
    assert at["new"] == begin + 1500
    copies = [m.text() for m in timers.messages(TIMER_TOPIC)].count("new")
    assert copies <= 2 + stopped_ms // (6 * DAY), "rolled over what the wheel reaches, no more often"
    timers.pass_ms(367 * DAY)
    assert Counter(timers.texts()) == Counter([f"old {wait}" for wait in waits] + ["new"])
    for wait in waits[1:]:
        delivered = dict(timers.delivered())[f"old {wait}"]
        assert delivered == max(wait, begin if wait <= begin else 0)


# --- recall -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_ms", [2 * S, 10 * DAY])
@pytest.mark.parametrize("at", ["once", "half", "last"])
def test_a_recalled_message_is_not_delivered(timers: Timers, wait_ms: int, at: str) -> None:
    handle = timers.put("a", wait_ms)
    timers.put("b", wait_ms)
    timers.pass_ms({"once": 0, "half": wait_ms // 2, "last": wait_ms - S}[at])
    assert timers.timer.recall(handle)
    assert timers.timer.recall(handle), "it stays recalled"
    timers.pass_ms(wait_ms + S)
    assert timers.texts() == ["b"]
    assert not timers.timer.recall(handle)


def test_a_recall_comes_too_late_when_the_moment_has_come(timers: Timers) -> None:
    handles = [timers.put(str(wait_ms), wait_ms) for wait_ms in (4300, 4301, 4302)]
    timers.pass_ms(4301)
    assert [timers.timer.recall(handle) for handle in handles] == [False, False, True]
    timers.pass_ms(2 * S)
    assert timers.texts() == ["4300", "4301"]
    assert not any(map(timers.timer.recall, handles))


@pytest.mark.parametrize("how", ["running", "closed", "killed", "clock set back", "built again"])
@pytest.mark.usefixtures("few_units")
def test_each_of_many_is_found_whatever_lies_between_them(timers: Timers, how: str) -> None:
    """Some were never placed, some were done long ago, some are placed and not written, some not even placed."""
    handles: dict[str, str] = {}

    def put_some(first: int, count: int) -> None:
        for n in range(first, first + count):
            wait_ms = (2 * S, 50 * HOUR, 90 * HOUR)[n % 3]
            handles[str(n)] = timers.put(str(n), wait_ms)
            if n % 7 == 0:
                timers.parts.store.append(TIMER_TOPIC, 0, b"odd", properties={})  # a dead letter, and no unit

    put_some(0, 70)
    timers.pass_ms(10 * S)
    put_some(70, 30)
    match how:
        case "closed":
            timers.reopen()
        case "killed":
            timers.reopen(killed=True)
        case "clock set back":
            timers.settle()
            timers.clock.set_wall(timers.clock.now_ms() - HOUR)
            timers.settle()
        case "built again":
            timers.close()
            _remove(timers.path / "timerlog")
            timers.open()
    timers.settle()
    put_some(100, 5)
    timers.parts.store.dispatch()
    done = set(timers.texts())
    assert len(done) == 24
    recalled = {body for body in handles if int(body) % 5 < 2}
    assert {body for body in recalled if timers.timer.recall(handles[body])} == recalled - done
    timers.pass_ms(5 * DAY)
    assert Counter(timers.texts()) == Counter(done | (set(handles) - recalled))


def test_a_recall_while_a_slot_is_looked_through(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of it is delivered yet, so all can be recalled, and what is to be rolled from this slot."""
    small_steps(monkeypatch)
    far = timers.put("far", 40 * DAY)
    timers.pass_ms(2 * DAY)  # where the far one is to be rolled
    wait_ms = S - timers.clock.now_ms() % S
    handles = [timers.put(str(n), wait_ms) for n in range(10)]
    other = timers.put("other", HOUR)
    timers.settle()
    timers.clock.advance(S)
    timers.timer.run_once(timers.clock.now_ms())
    timers.parts.store.dispatch()
    assert timers.texts() == []
    now_ms = timers.clock.now_ms()
    timers.clock.set_wall(now_ms - S)  # its moment is ahead again
    assert all(map(timers.timer.recall, handles[::2]))
    assert timers.timer.recall(other)
    assert timers.timer.recall(far)
    timers.clock.set_wall(now_ms)
    timers.pass_ms(50 * DAY)
    assert timers.texts() == [str(n) for n in range(1, 10, 2)]


# --- progress and crashes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(1, 12, 2))
def test_damaged_slot_is_continued(timers: Timers, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """While it is looked through, or delivered; some of it is recalled."""
    small_steps(monkeypatch)
    handles = [timers.put(str(n), 1900) for n in range(10)]
    assert all(map(timers.timer.recall, handles[3:5]))
    timers.pass_ms(1000)  # all is written down
    timers.clock.advance(1000)
    for _ in range(steps):
        timers.timer.run_once(timers.clock.now_ms())
        timers.clock.advance(700)  # every other writes down what is done
    timers.parts.store.dispatch()
    flip(timers.path / "timerlog" / f"{0:020d}", 52 + 20)
    timers.pass_ms(5 * S)
    counts = Counter(timers.texts())
    assert list(counts) == [str(n) for n in range(10) if n not in (3, 4)]
    assert max(counts.values()) <= 2
    assert timers.timer.waiting() == 0


# --- damage -----------------------------------------------------------------------------------------------------------


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


HARMS = {
    "log missing": lambda root: _remove(root / "timerlog"),
    "log zero": lambda root: (root / "timerlog" / f"{0:020d}").write_bytes(bytes(8 << 20)),
    "log short": lambda root: os.truncate(root / "timerlog" / f"{0:020d}", 60),
    "unit flipped": lambda root: flip(root / "timerlog" / f"{0:020d}", 52 * 4 + 20),
    "wheel missing": lambda root: _remove(root / "timerwheel"),
    "wheel short": lambda root: os.truncate(root / "timerwheel", 1000),
    "wheel zero": lambda root: (root / "timerwheel").write_bytes(bytes(38_707_200)),
    "wheel ones": lambda root: (root / "timerwheel").write_bytes(b"\xff" * 38_707_200),
    "log and wheel": lambda root: (_remove(root / "timerlog"), _remove(root / "timerwheel")),
    "checkpoint missing": lambda root: _remove(root / "config" / "timercheck"),
}


WAITS = [2 * S, 4 * S, 10 * S, HOUR, 40 * HOUR, 3 * DAY, 5 * DAY, 9 * DAY]


@pytest.mark.parametrize(("harm", "at_ms"), [*((harm, 2 * HOUR) for harm in HARMS), ("log zero", 3 * DAY + 5 * HOUR)])
def test_damaged_files_are_built_again_without_loss_and_without_repeats(timers: Timers, harm: str, at_ms: int) -> None:
    for wait in WAITS:
        timers.put(str(wait), wait)
    recalled = timers.put("recalled", 8 * DAY)
    timers.pass_ms(at_ms)
    assert timers.timer.recall(recalled)
    timers.close()
    HARMS[harm](timers.path)
    timers.clock.advance(HOUR)
    timers.open()
    timers.settle()
    assert timers.timer.waiting() >= sum(wait > at_ms + HOUR for wait in WAITS)
    timers.pass_ms(10 * DAY)
    waits = [str(wait) for wait in WAITS]
    if harm == "checkpoint missing":  # then messages may be repeated
        assert set(timers.texts()) >= set(waits)
    else:
        assert sorted(timers.texts(), key=int) == waits
    for body, at in timers.delivered():
        assert at >= int(body)


def test_a_rebuild_that_is_killed_begins_again(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.broker.delay.timer._STEP", 10)
    for n in range(30):
        timers.put(str(n), 2 * S if n % 2 else HOUR)
    timers.pass_ms(5 * S)
    timers.close()
    for steps in (0, 1, 2):
        if (timers.path / "timerlog").exists():
            _remove(timers.path / "timerlog")
        timers.open()
        for _ in range(steps):
            timers.timer.run_once(timers.clock.now_ms())
            timers.clock.advance(1000)
        timers.kill()
    timers.open()
    timers.pass_ms(2 * HOUR)
    counts = Counter(timers.texts())
    assert len(counts) == 30
    assert set(counts.values()) == {1}


def test_a_late_message_is_not_lost_when_the_files_are(timers: Timers) -> None:
    """Overdue when it is placed, it waits in a later slot than its own. The checkpoint then says that its own slot was
    read, which must not be taken for its delivery when log and wheel are built again."""
    timers.put("first", 100)
    timers.pass_ms(5 * S)
    timers.timer.run_once(timers.clock.now_ms() + 3 * S)  # its slot is read before it comes
    timers.put("late", 1500)
    timers.settle()
    timers.close()
    _remove(timers.path / "timerlog")
    timers.open()
    timers.pass_ms(5 * S)
    assert Counter(timers.texts())["late"] == 1


@pytest.mark.parametrize(("killed", "rebuilt"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("wait_ms", "recalled_after_ms", "stopped_after_ms", "stopped_ms"),
    [
        (60 * HOUR, 22 * HOUR, 0, 41 * HOUR),  # the message is rolled while catching up, its cancellation lies there
        (60 * HOUR, 2 * HOUR, 24 * HOUR, 10 * DAY),  # the cancellation is
        (46 * HOUR, 36 * HOUR, 0, 12 * HOUR),  # it was not even placed
        (60 * HOUR, 22 * HOUR, 5 * S, 41 * HOUR),  # rolled on from the slot after the stop, past what cancelled it
    ],
)
def test_recall_survives_a_long_stop(
    timers: Timers,
    wait_ms: int,
    recalled_after_ms: int,
    stopped_after_ms: int,
    stopped_ms: int,
    killed: bool,
    rebuilt: bool,
) -> None:
    """After more than a day what lay farther ahead was held back, and with it one of the two: they never met."""
    handle = timers.put("recalled", wait_ms)
    timers.put("other", wait_ms)
    timers.pass_ms(recalled_after_ms)
    assert timers.timer.recall(handle)
    if stopped_after_ms:
        timers.pass_ms(stopped_after_ms)
    timers.leave(killed)
    if rebuilt and (timers.path / "timerlog").exists():
        _remove(timers.path / "timerlog")
    timers.clock.advance(stopped_ms)
    timers.open()
    timers.pass_ms(6 * DAY)
    assert timers.texts() == ["other"]


def test_waiting_message_can_be_recalled_after_a_long_stop(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where the wheel reaches to while catching up, not where it belongs."""
    timers.put("overdue", 2 * S)
    timers.close()
    timers.clock.advance(20 * DAY)
    timers.open()
    handle = timers.put("new", HOUR)
    timers.parts.store.dispatch()
    monkeypatch.setattr("mqstore.broker.delay.timer._STEP", 1)
    timers.timer.run_once(timers.clock.now_ms())  # places it, and begins to catch up
    assert timers.timer.recall(handle)
    timers.pass_ms(2 * HOUR)
    assert timers.texts() == ["overdue"]


def test_a_cancellation_does_not_reach_what_is_put_with_its_key_later(timers: Timers) -> None:
    handle = timers.put("first", 60 * S, properties={"UNIQ_KEY": "order-17"})
    timers.settle()
    assert timers.timer.recall(handle)
    timers.pass_ms(10 * S)
    again = timers.put("second", 50 * S, properties={"UNIQ_KEY": "order-17"})
    assert again == handle
    timers.pass_ms(20 * S)
    assert timers.timer.recall(handle), "the second, now"
    timers.put("third", 30 * S, properties={"UNIQ_KEY": "order-17"})
    timers.pass_ms(90 * S)
    assert timers.texts() == ["third"]


@pytest.mark.parametrize("name", ["orders+U1", "U1"])
def test_a_java_brokers_cancellation_is_understood(timers: Timers, name: str) -> None:
    """5.3 names topic and key; 5.4 the key alone, unless it is told otherwise."""
    for key in ("U1", "U2"):
        timers.put(key, 9 * S, properties={"UNIQ_KEY": key})
    timers.put("", 9 * S, properties={"UNIQ_KEY": "U1", "TIMER_DEL_UNIQKEY": name})
    timers.pass_ms(20 * S)
    assert timers.texts() == ["U2"]


def test_a_wheel_that_vanishes_while_running_is_mended(timers: Timers) -> None:
    for n in range(10):
        timers.put(str(n), (n + 3) * S)
    timers.pass_ms(5 * S)
    with (timers.path / "timerwheel").open("r+b") as file:
        file.write(bytes(38_707_200))
    timers.pass_ms(20 * S)
    assert sorted(timers.texts()) == [str(n) for n in range(10)]


def test_a_damaged_record_is_counted_and_passed_over(timers: Timers) -> None:
    for body in "abc":
        timers.put(body, 5 * S)
    timers.pass_ms(2 * S)
    message = timers.messages(TIMER_TOPIC)[1]
    timers.parts.store.flush()
    flip(timers.path / "commitlog" / f"{0:020d}", message.physical_offset + 100)
    timers.pass_ms(5 * S)
    assert timers.texts() == ["a", "c"]
    assert timers.counted("TIMER_UNREADABLE") == 1
    assert timers.timer.waiting() == 0


@pytest.mark.parametrize(
    "properties",
    [
        {"REAL_TOPIC": "orders", "REAL_QID": "0"},
        {"TIMER_OUT_MS": "x", "REAL_TOPIC": "orders", "REAL_QID": "0"},
        {"TIMER_OUT_MS": str(START_MS + S), "REAL_QID": "0"},
        {"TIMER_OUT_MS": str(START_MS + S), "REAL_TOPIC": "orders", "REAL_QID": "q"},
        {"TIMER_OUT_MS": str(START_MS + S), "REAL_TOPIC": "orders", "REAL_QID": "-1"},
        {"TIMER_OUT_MS": str(START_MS + S), "REAL_TOPIC": "a/b", "REAL_QID": "0"},
        {"TIMER_OUT_MS": str(START_MS + S), "REAL_TOPIC": TIMER_TOPIC, "REAL_QID": "0"},
    ],
)
def test_undeliverable_message_is_dead_and_blocks_nothing(timers: Timers, properties: dict[str, str]) -> None:
    timers.parts.store.append(TIMER_TOPIC, 0, b"odd", properties=properties)
    timers.put("fine", S)
    timers.pass_ms(3 * S)
    assert timers.texts() == ["fine"]
    [dead] = timers.messages("%DLQ%CID_RMQ_SYS_SCHEDULE")
    assert dead.text() == "odd"
    assert dead.properties["dlq_reason"]
    assert timers.counted("TIMER_UNDELIVERABLE") == 1
    assert timers.timer.waiting() == 0


def test_a_message_that_fills_its_record_is_delivered_without_our_marks(timers: Timers) -> None:
    room = 32767 - 200
    while True:
        try:
            timers.put("full", 3 * DAY, properties={"mine": "x" * room})
        except InvalidMessageError:
            break
        room += 1
    count = len(timers.messages(TIMER_TOPIC))
    assert count > 1
    timers.pass_ms(4 * DAY)
    assert timers.texts() == ["full"] * count
    assert timers.counted("TIMER_UNDELIVERABLE") == 0


# --- the clock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back_ms", [4 * S, HOUR, 30 * DAY])
def test_a_clock_set_back_repeats_nothing_and_delivers_nothing_early(timers: Timers, back_ms: int) -> None:
    timers.put("done", 2 * S)
    timers.put("waits", 3 * HOUR)
    timers.put("far", 6 * DAY)
    timers.pass_ms(30 * S)
    timers.clock.set_wall(timers.clock.now_ms() - back_ms)
    begin = timers.clock.now_ms() - START_MS
    timers.put("new", 20 * S)
    timers.pass_ms(19 * S)
    assert timers.texts() == ["done"]
    timers.pass_ms(2 * S)
    assert timers.texts() == ["done", "new"]
    timers.pass_ms(max(0, -begin) + 7 * DAY)
    assert timers.texts() == ["done", "new", "waits", "far"]
    at = dict(timers.delivered())
    assert (at["waits"], at["far"], at["new"]) == (3 * HOUR, 6 * DAY, begin + 20 * S)


def test_clock_step_back_stops_a_slot(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thirds of it are delivered when their moment is ahead again. The others can still be recalled."""
    monkeypatch.setattr("mqstore.broker.delay.timer._STEP", 10)
    handles = [timers.put(str(n), 900) for n in range(15)]
    timers.settle()
    timers.clock.advance(1000)
    timers.timer.run_once(timers.clock.now_ms())
    timers.clock.set_wall(START_MS - HOUR)
    assert (timers.timer.recall(handles[14]), timers.timer.recall(handles[4])) == (True, False)
    timers.settle()
    assert len(timers.texts()) == 10
    timers.pass_ms(HOUR + 899)
    assert len(timers.texts()) == 10
    timers.pass_ms(S)
    assert timers.texts() == [str(n) for n in range(14)]


@pytest.mark.parametrize("reopened", [False, True])
def test_a_clock_set_back_within_the_second_that_is_read(timers: Timers, reopened: bool) -> None:
    for wait_ms in (200, 600, 900, 1500):
        timers.put(str(wait_ms), wait_ms)
    timers.pass_ms(700)
    timers.clock.set_wall(START_MS + 300)
    if reopened:
        timers.reopen()
    timers.put("new", 50)  # due before one that is delivered: it waits for the clock to be there again
    timers.pass_ms(200)
    assert timers.texts() == ["200", "600"]
    timers.reopen()
    timers.pass_ms(2 * S)
    assert timers.delivered() == [("200", 200), ("600", 600), ("new", 600), ("900", 900), ("1500", 1500)]


# --- cost -------------------------------------------------------------------------------------------------------------


def test_message_cost_is_independent_of_the_backlog(tmp_path: Path, looked: Counter[str]) -> None:
    """Calls on files, units and records looked at: the same over a hundred that wait and over a thousand."""
    costs = []
    for waiting in (100, 1_000):
        fs = FaultyFileSystem()
        timers = Timers(tmp_path / f"store-{waiting}", fs, segment_bytes=1 << 24)
        for n in range(waiting):
            timers.put("w", 2 * HOUR + n * 7)
        timers.pass_ms(10 * S)
        looked.clear()
        before = len(fs.calls)
        for n in range(50):
            timers.put(str(n), 1 + 400 * n)
            timers.pass_ms(300)
        timers.pass_ms(30 * S)
        assert len(timers.texts()) == 50
        calls = Counter(call.operation for call in fs.calls[before:] if "timer" in call.path)
        costs.append((calls, looked.copy()))
        timers.close()
    assert costs[0] == costs[1]
    assert costs[1][1]["record"] == 50
    assert 50 <= costs[1][1]["unit"] <= 2 * 50, "a unit that is placed into the running second is not looked for"
    assert costs[1][0]["pread"] <= 4 * 50


def test_recall_cost_is_independent_of_the_backlog(tmp_path: Path, looked: Counter[str]) -> None:
    """Units and records looked at, and calls on files: the same among a hundred of one second and among a
    thousand. It looked at all of them."""
    costs = []
    for waiting in (100, 1_000):
        fs = FaultyFileSystem()
        timers = Timers(tmp_path / f"store-{waiting}", fs, segment_bytes=1 << 24)
        handles = [timers.put(str(n), HOUR) for n in range(waiting)]
        timers.pass_ms(10 * S)
        timers.reopen(fs)
        looked.clear()
        recalled = {0, 1, 40, waiting // 2, waiting - 2, waiting - 1}
        before = len(fs.calls)
        for n in recalled:
            assert timers.timer.recall(handles[n])
        timers.settle()  # now their cancellations lie there as well
        for n in recalled:
            assert timers.timer.recall(handles[n])
        calls = Counter(call.operation for call in fs.calls[before:] if "timer" in call.path)
        costs.append((calls, looked.copy()))
        timers.pass_ms(HOUR)
        assert set(timers.texts()) == {str(n) for n in range(waiting) if n not in recalled}
        timers.close()
    assert costs[0] == costs[1]
    assert costs[1][1]["unit"] <= 2 * 12 + 6


# --- trouble with files -----------------------------------------------------------------------------------------------


class Trouble(FaultyFileSystem):
    """Scripted faults, and no syncs, which no test here counts on."""

    def fdatasync(self, fd: int) -> None:
        self._enter("fdatasync", fd)

    def sync_directory(self, path: Any) -> None:
        self._enter("sync_directory", path)


def run_through(timers: Timers, until_ms: int, errors: list[Exception]) -> None:
    """Let time pass in small steps with a housekeeper that tries again after an error."""
    while timers.clock.now_ms() - START_MS < until_ms:
        try:
            timers.settle()
        except (StoreFullError, StoreIOError) as error:
            errors.append(error)
        timers.clock.advance(250)


@pytest.mark.parametrize("nth", range(1, 60, 6))
def test_a_full_disk_at_any_call_delays_and_loses_nothing(tmp_path: Path, nth: int) -> None:
    fs = Trouble()
    timers = Timers(tmp_path / "store", fs)
    waits = [500, 1500, 2500, 2700, 4000, 3 * DAY]
    for wait in waits:
        timers.put(str(wait), wait)
    timers.parts.store.dispatch()
    fs.fail(("create", "pwrite", "allocate", "truncate_sparse", "replace", "mkdir"), errno.ENOSPC, nth=nth, times=3)
    errors: list[Exception] = []
    run_through(timers, 12 * S, errors)
    fs.heal()
    timers.pass_ms(4 * DAY)
    counts = Counter(timers.texts())
    assert counts == Counter(map(str, waits))
    assert all(at >= int(body) for body, at in timers.delivered())
    timers.reopen()
    timers.pass_ms(DAY)
    assert Counter(timers.texts()) == counts
    timers.close()


# --- against a model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_message_comes_once_its_moment_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, seed: int
) -> None:
    """Random puts, recalls, stops, kills and jumps of the clock, held against a list of what was asked for."""
    rng = random.Random(seed)
    if seed % 2:
        request.getfixturevalue("few_units")
    if seed % 3:
        small_steps(monkeypatch)
    timers = Timers(tmp_path / "store", segment_bytes=1 << 20)
    due: dict[str, int] = {}
    handles: dict[str, str] = {}
    recalled: set[str] = set()
    kills = turns = 0
    for step in range(80):
        match rng.choice("pppprttttcksb"):
            case "p":
                for n in range(rng.randrange(1, 5)):
                    body = f"{step}.{n}"
                    wait = rng.choice((1, 900, 1000, 5 * S, MIN, HOUR, 30 * HOUR, 3 * DAY, 12 * DAY)) + rng.randrange(
                        2000
                    )
                    due[body] = timers.clock.now_ms() + wait
                    handles[body] = timers.put(body, wait)
            case "r" if handles:
                body = rng.choice(sorted(handles))
                if timers.timer.recall(handles[body]):
                    recalled.add(body)
                else:  # a clock set back by less than five seconds is waited for
                    over = due[body] - 7 * S < timers.clock.now_ms()
                    assert over or body in recalled or body in timers.texts(), "it waits, and can be recalled"
            case "t":
                timers.pass_ms(rng.choice((100, 700, S, 3 * S, MIN, HOUR, 10 * HOUR, 3 * DAY)))
            case "c":
                timers.reopen()
            case "k":
                timers.kill()
                kills += 1
                timers.open()
            case "s":
                timers.close()
                timers.clock.advance(rng.choice((S, HOUR, 2 * DAY, 9 * DAY, 40 * DAY)))
                timers.open()
            case "b" if rng.random() < 0.3:
                timers.clock.set_wall(timers.clock.now_ms() - rng.choice((300, 3 * S, MIN, 5 * HOUR, 9 * DAY)))
                turns += 1
        counts = Counter(timers.texts())
        assert not set(counts) & recalled
    timers.pass_ms(max(due.values(), default=0) - timers.clock.now_ms() + 2 * S if due else 0)
    counts = Counter(timers.texts())
    assert set(counts) == set(due) - recalled
    if not kills:
        assert set(counts.values()) <= {1}
    for message in timers.messages():
        assert message.store_timestamp_ms >= due[message.text()]
    assert timers.timer.waiting() == 0
    assert list(timers.timer.pins()) == []
    timers.close()
