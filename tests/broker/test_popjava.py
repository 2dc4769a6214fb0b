"""Taking over what a Java broker had handed out (delivery#java-pop).

Two grounds to stand on. `popjava.tar.xz` was written by the broker of RocketMQ 5.3.3, asked over its socket to pop, ack
and change visible times, and halted in the midst of it; `popjava.jsonl.xz` is what its client saw. And for what no run
of an hour contains, `Java` writes records as that broker does, which a test holds against the real ones.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, SimulatedClock
from mqstore.errors import ReceiptExpiredError
from tests.broker.javasupport import (
    INVISIBLE_MS,
    REVIVE,
    REVIVE_GROUP,
    TIMER_TOPIC,
    Java,
    Seen,
    ck_records,
    in_flight,
    killed_in_take_over,
    look_at,
    numbers,
    revived,
    with_timer,
    without_saves,
    without_take_over,
)
from tests.broker.popsupport import PopBench, queue
from tests.conftest import unpack_archive
from tests.faults import STEP
from tests.log.support import files, flip, open_store

HERE = Path(__file__).parent


def retry(group: str, topic: str = "t") -> str:
    """Topic of the copies of popped messages."""
    return f"%RETRY%{group}+{topic}"


# -- what the real broker left ----------------------------------------------------------------------------------------


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    unpack_archive(HERE / "popjava.tar.xz", tmp_path / "java")
    return tmp_path / "java"


@pytest.fixture
def left(folder: Path, seen: Seen) -> Iterator[PopBench]:
    """The real broker's directory, opened the moment it was halted."""
    with PopBench(folder, clock=SimulatedClock(seen.stopped_ms)) as bench:
        yield bench


def test_java_deliveries_in_flight_stay_in_flight(left: PopBench, seen: Seen) -> None:
    assert len(seen.flights()) == 23
    assert in_flight(left) == seen.flights()
    assert {(f[0], f[1], f[3]) for f in in_flight(left, fifo=True)} == {("ordered", "f", 0), ("ordered", "f", 1)}
    # Single acks, a batch of them, a renewed one, a filter's gaps, a retry topic, and what was in the revive queues.
    kinds = {(line["group"], line["real_topic"], line["queue_id"]) for line in seen.open()}
    assert {("part", "t", 0), ("part", "t", 1), ("tagged", "t", 0), ("late", "t", 1)} < kinds
    assert ("retried", "%RETRY%retried_t", 0) in kinds


def test_receipts_of_the_real_broker_are_good(left: PopBench, seen: Seen) -> None:
    for line in seen.open():
        left.service.ack(line["group"], line["topic"], line["receipt"])
    assert in_flight(left) == set()
    cursors = {("retried", "t", 0): 20, ("part", "t", 0): 5, ("part", "t", 1): 6, ("tagged", "t", 0): 16}
    for (group, topic, queue_id), cursor in cursors.items():
        assert left.parts.offsets.committed(queue(group, topic, queue_id)) == cursor
    left.advance(400_000)
    assert left.read(retry("part", "t")) == []


def test_unacknowledged_java_delivery_is_redelivered_once(left: PopBench, seen: Seen) -> None:
    expected: dict[str, list[tuple[int, str, int]]] = {}
    for line in seen.open():
        topic = line["real_topic"] if line["topic"] != line["real_topic"] else retry(line["group"])
        if line["topic"] == "dropped":
            topic = retry(line["group"], "dropped")
        due_ms = max(line["visible_ms"], seen.stopped_ms)
        expected.setdefault(topic, []).append((due_ms, line["body"], line["reconsume_times"] + 1))
    before = {topic: len(left.read(topic)) for topic in expected}
    assert before["%RETRY%retried_t"] == 2
    left.advance(400_000)
    for topic, copies in expected.items():
        found = [(m.store_timestamp_ms, m.text(), m.reconsume_times) for m in left.read(topic)[before[topic] :]]
        assert sorted(found) == sorted(copies), topic
    assert in_flight(left) == set()
    # Consumers get them, the late ones as their second attempt.
    got = left.pop(group="late", n=32) + left.pop(group="late", n=32)
    assert {d.message.text(): d.attempt for d in got if d.attempt > 1} == {"t0-0": 2, "t0-1": 2, "t0-3": 2, "t1-2": 2}


def test_the_revive_offsets_are_at_the_end_as_java_counts_them(left: PopBench, seen: Seen) -> None:
    assert seen.read == {0: 0, 1: -1}
    assert seen.ends == {0: 4, 1: 2}
    # The last record that is done with: a Java broker reads on at the next one.
    table = json.loads((left.path / "config" / "consumerOffset.json").read_text())["offsetTable"]
    assert table[f"{REVIVE}@{REVIVE_GROUP}"] == {"0": 3, "1": 1}
    # Before anything can be delivered: also that the groups' own offsets went back to what is in flight.
    assert table["t@part"] == {"0": 1, "1": 0}


@pytest.mark.parametrize("end", ["close", "kill"])
def test_opening_twice_takes_nothing_twice(left: PopBench, seen: Seen, end: str) -> None:
    count = ck_records(left)
    for _ in range(2):
        getattr(left, end)()
        left.open()
        assert in_flight(left) == seen.flights()
        assert ck_records(left) == count
    left.advance(400_000)
    assert len(left.read(retry("tagged", "t"))) == 6
    left.crash()
    assert in_flight(left) == set()
    left.advance(400_000)
    assert len(left.read(retry("tagged", "t"))) == 6


def test_kill_after_a_revive_takes_nothing_twice(left: PopBench, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the arrival of a ck and the save that says so everything may be settled and forgotten by the pop log."""
    for line in seen.open():
        left.service.ack(line["group"], line["topic"], line["receipt"])
    left.close()
    left.open()  # the pop log's replay begins behind all of it now
    assert in_flight(left) == set()
    with_timer(left)
    without_saves(monkeypatch)
    left.advance(400_000)
    left.kill()
    monkeypatch.undo()
    saved = json.loads((left.path / "config" / "consumerOffset.json").read_text())["offsetTable"]
    assert saved[f"{REVIVE}@{REVIVE_GROUP}"] == {"0": 3, "1": 1}
    left.open()
    assert len(left.read(REVIVE, 0)) > 10
    assert in_flight(left) == set()


def test_a_kill_between_a_ck_and_its_answer_takes_nothing_again(left: PopBench, seen: Seen) -> None:
    """The timer brings the ck a second before the answer to it, which may be known from openings ago."""
    for line in seen.open():
        left.service.ack(line["group"], line["topic"], line["receipt"])
    for _ in range(3):
        left.close()
        left.open()
    with_timer(left)
    cks = {"tagged": 0, "retried": 0}
    left.advance(1795274185_500 - left.now_ms)
    left.crash()
    for message in left.read(REVIVE, 1):
        group = message.json()["c"]
        cks[group] = cks.get(group, 0) + (message.tag == "ck") - (message.tag == "bAck")
    assert cks["tagged"] == 1  # it has come, its answer has not
    assert in_flight(left) == set()


def test_looking_at_a_java_directory_changes_no_byte(folder: Path) -> None:
    with open_store(folder):
        pass  # recovered once, as by whoever opens it first
    before = files(folder)
    look_at(folder)
    assert files(folder) == before


# -- a Java broker that comes back ------------------------------------------------------------------------------------


def test_a_java_broker_that_comes_back_revives_nothing_that_was_taken(
    left: PopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    left.close()
    without_take_over(monkeypatch)
    left.open()
    with_timer(left)
    left.advance(400_000)
    # Only of the group that was deleted, which was not taken over.
    assert revived(left) == {("gone", "t", 0): [0, 1, 2]}


# -- records like Java's ----------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PopBench]:
    """A directory as Java's, with 20 messages in each of two queues, whose group stands behind the first 10."""
    with PopBench(tmp_path / "store", profile="rocketmq", queues=2) as bench:
        bench.parts.groups.create("g")
        for queue_id in (0, 1):
            bench.put("t", 20, queue_id=queue_id)
            Java(bench).committed(10, queue_id=queue_id)
        yield bench


@pytest.fixture
def java(bench: PopBench) -> Java:
    return Java(bench)


def test_the_records_of_these_tests_are_as_the_real_brokers(left: PopBench, java: Java, bench: PopBench) -> None:
    ck = java.ck(0, [0, 3, 6])
    java.ack(ck, 0)
    java.ack(ck, 3, 6, batch=True)
    ours = bench.read(TIMER_TOPIC)
    for mine in ours:
        real = next(each for each in left.read(TIMER_TOPIC) if each.tag == mine.tag)
        _assert_alike(mine, real)


def test_answers_are_as_the_real_brokers_acknowledgements(left: PopBench) -> None:
    all_of_them = left.read(TIMER_TOPIC)
    java = [each for each in all_of_them if each.tag == "bAck" and each.store_timestamp_ms < left.now_ms]
    answers = [each for each in all_of_them if each.store_timestamp_ms == left.now_ms]
    assert len(answers) == 10  # one for each batch with something in flight
    for answer in answers:
        _assert_alike(answer, java[0])
        value = answer.json()
        due_ms = int(answer.stored_properties()["TIMER_DELIVER_MS"])
        [ck] = [
            each
            for each in all_of_them
            if each.tag == "ck" and all(each.json()[name] == value[name] for name in ("t", "c", "q", "so", "pt", "bn"))
        ]
        # Behind its ck, to the same queue, and for all of its messages.
        assert due_ms == max(ck.json()["pt"] + ck.json()["it"], left.now_ms + 1000)
        assert answer.stored_properties()["REAL_QID"] == ck.stored_properties()["REAL_QID"]
        assert value["aol"] == [ck.json()["so"] + distance for distance in ck.json()["d"]]


def _assert_alike(mine: Message, real: Message) -> None:
    """Same tag, same properties with values of the same form, same members with values of the same type."""
    mine_properties, real_properties = mine.stored_properties(), real.stored_properties()
    assert mine.tag == real.tag
    assert mine_properties.keys() == real_properties.keys()
    for name in ("TIMER_OUT_MS", "TIMER_DELIVER_MS"):
        assert len(mine_properties[name]) == len(real_properties[name]) == 13
    for each in (mine, real):
        value, properties = each.json(), each.stored_properties()
        out_ms, due_ms = int(properties["TIMER_OUT_MS"]), int(properties["TIMER_DELIVER_MS"])
        assert out_ms == (due_ms - 1) // 1000 * 1000
        named = value["so"] if each.tag == "ck" else value["ao"]
        last = "ck" if each.tag == "ck" else "ack"
        parts = (value["t"], value["q"], named, value["c"], value["pt"], value["bn"], last)
        assert properties["UNIQ_KEY"] == "@".join(map(str, parts))
        assert properties["REAL_TOPIC"] == REVIVE
    mine_value, real_value = mine.json(), real.json()
    mine_value.pop("taken", None)  # our sign; a Java broker passes over members that it does not know
    real_value.pop("reviveTime", None)  # a getter that fastjson takes for a member; nobody reads it
    assert {name: type(member) for name, member in mine_value.items()} == {
        name: type(member) for name, member in real_value.items()
    }


# -- what is in flight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distances", "bitmap", "acks", "batch", "left"),
    [
        ([0, 1, 2, 3], 0, [1], False, [0, 2, 3]),
        ([0, 1, 2, 3], 0, [0, 3], True, [1, 2]),
        ([0, 1, 2, 3], 0b1001, [], False, [1, 2]),
        ([0, 1, 2, 3], 0b0001, [2], True, [1, 3]),
        ([0, 2, 5], 0b010, [], False, [0, 5]),  # a bit is a place in d, not an offset
        ([2, 5, 8], 0, [5], False, [2, 8]),  # the batch was read from before its first message
        ([0, 2, 5], 0, [1, 3, 77, -4], True, [0, 2, 5]),  # of messages that the filter did not pass
        ([0, 1], -(2**31), [], False, [0, 1]),  # Java's sign bit
        ([0, 1, 2], 0, [0, 2, 1], False, []),
        ([0, 1, 2], 0, [0, 1, 2], True, []),
        ([0, 1], 0b11, [], False, []),
        ([], 0, [], False, []),
    ],
)
def test_partial_acknowledgement_is_taken(
    bench: PopBench, java: Java, distances: list[int], bitmap: int, acks: list[int], batch: bool, left: list[int]
) -> None:
    ck = java.ck(0, distances, bm=bitmap)
    if acks:
        java.ack(ck, *acks, batch=batch)
    bench.reopen()
    assert numbers(bench) == left
    assert bench.committed() == (left[0] if left else 10)
    assert ck_records(bench) == bool(left)


def test_acknowledgements_count_wherever_they_are(bench: PopBench, java: Java) -> None:
    """In the revive queue or still in the timer, before their ck or behind it."""
    ck = java.ck(0, [0, 1, 2, 3, 4], waits=False)
    java.ack(ck, 0, waits=False)
    java.ack(ck, 1)
    java.ack(ck, 2, batch=True)
    early = {**ck, "so": 5}
    java.ack(early, 5, waits=False)
    java.ck(5, [0, 1])
    bench.reopen()
    assert numbers(bench) == [3, 4, 6]


def test_acknowledgements_of_another_delivery_do_not_count(bench: PopBench, java: Java) -> None:
    ck = java.ck(0, [0, 1, 2])
    for other in ({"pt": ck["pt"] - 1}, {"c": "h"}, {"q": 1}, {"so": 1}, {"bn": "broker-b"}, {"t": "u"}):
        java.ack({**ck, **other}, 0, 1, 2)
        java.ack({**ck, **other}, 0, 1, 2, batch=True)
    bench.reopen()
    assert numbers(bench) == [0, 1, 2]


def test_forms_of_older_brokers_are_understood(bench: PopBench, java: Java) -> None:
    ck = java.ck(0, [], n=3, d=None)  # no distances: the messages follow each other
    java.ack(ck, 1, bn=None)  # no broker: the one that reads it
    bench.reopen()
    assert numbers(bench) == [0, 2]


def test_timer_deliveries_are_found_in_the_revive_queue(bench: PopBench, java: Java) -> None:
    now_ms = bench.now_ms
    java.ck(0, [0], invisible_ms=5_000)  # delivered by the timer, revived, forgotten
    java.ck(1, [0], invisible_ms=31_000)  # in the slot that is read next
    java.ck(2, [0], invisible_ms=90_000)
    java.ck(3, [0], invisible_ms=5_000)  # came in when its slot was over; the timer has not seen it
    java.timercheck((now_ms + 30_000 - 1) // 1000 * 1000, 3)
    bench.reopen()
    assert numbers(bench) == [1, 2, 3]


def test_the_last_delivery_of_a_message_counts(bench: PopBench, java: Java) -> None:
    """A change of the visible time writes a ck for the new one, then an ack for the old; a crash may come in between.
    And after a crash a Java broker pops again what it has popped before."""
    t0 = java.pop_time_ms
    java.ck(0, [0, 1, 2])
    java.ck(1, [0], pop_time_ms=t0 + 5, invisible_ms=90_000)
    again = java.ck(2, [0], pop_time_ms=t0 + 7)
    java.ack(again, 2)
    bench.reopen()
    assert {f[3:] for f in in_flight(bench)} == {(0, t0, t0 + INVISIBLE_MS), (1, t0 + 5, t0 + 90_005)}
    old, new = (f"{start} {t} {it} 0 0 broker-a 0 1" for start, t, it in ((0, t0, 60_000), (1, t0 + 5, 90_000)))
    with pytest.raises(ReceiptExpiredError):
        bench.service.ack("g", "t", old)
    bench.service.ack("g", "t", new)
    assert numbers(bench) == [0]


def test_a_ck_that_was_put_twice_is_taken_once(bench: PopBench, java: Java) -> None:
    """The timer delivers twice after a crash, and rolls; a revive that failed is put again, for its message alone."""
    java.ck(0, [0, 1], waits=False)
    java.ck(0, [0, 1])
    java.ck(4, [0, 1])
    java.ck(4, [0], rp="1", invisible_ms=INVISIBLE_MS + 10_000)
    bench.reopen()
    assert numbers(bench) == [0, 1, 4, 5]
    assert ck_records(bench) == 2
    assert sorted(m.json()["so"] for m in bench.read(TIMER_TOPIC) if m.tag == "bAck") == [0, 4]


def test_offsets_beyond_the_queue_are_skipped(bench: PopBench, java: Java) -> None:
    java.committed(20)
    java.ck(18, [0, 1, 2, 3])
    bench.reopen()
    assert numbers(bench) == [18, 19]
    assert bench.committed() == 18
    # Nor are they skipped when they come.
    bench.put("t", 4, first=20)
    bench.reopen()
    assert [d.message.offset for d in bench.pop(queue_id=0, n=32)] == [20, 21, 22, 23]


# -- where a group stands ---------------------------------------------------------------------------------------------


def test_a_cursor_that_lags_is_moved_over_what_follows_without_a_gap(bench: PopBench, java: Java) -> None:
    """Offsets are saved every five seconds, checkpoints at once: after a crash the file says less than they."""
    ck = java.ck(10, [0, 1, 2])
    java.ack(ck, 10, 11, 12)
    java.ck(13, [0, 1])
    java.ck(15, [2, 3])  # read from 15 on; the filter passed 17 and 18
    bench.reopen()
    assert numbers(bench) == [13, 14, 17, 18]
    assert bench.committed() == 13
    assert [d.message.offset for d in bench.pop(queue_id=0, n=32)] == [19]


def test_message_behind_a_gap_is_taken_once(bench: PopBench, java: Java) -> None:
    """Our answer acknowledges what was not taken: the next opening must not take that for consumed."""
    java.ck(13, [0, 1])
    bench.reopen()
    found = bench.pop(queue_id=0, n=3)
    assert [(d.message.offset, d.attempt) for d in found] == [(10, 1), (11, 1), (12, 1)]
    assert [m.json()["so"] for m in bench.read(TIMER_TOPIC) if m.tag == "bAck"] == [13]
    bench.ack(*found)
    assert bench.committed() == 13
    bench.reopen()
    assert bench.committed() == 13
    got = bench.pop(queue_id=0, n=3)
    assert [d.message.offset for d in got] == [13, 14, 15]
    bench.ack(*got)
    bench.reopen()
    assert in_flight(bench) == set()


def test_a_group_whose_offsets_were_lost_begins_at_the_first_message(bench: PopBench, java: Java) -> None:
    bench.parts.groups.alter("g", start="latest")
    java.ck(4, [0, 1])
    java.ck(0, [0], queue_id=1)
    bench.close()
    (bench.path / "config" / "consumerOffset.json").unlink()
    for backup in (bench.path / "config").glob("consumerOffset.json?*"):
        backup.unlink()
    bench.open()
    assert numbers(bench) == []
    assert numbers(bench, queue_id=1) == [0]
    assert [d.message.offset for d in bench.pop(queue_id=0, n=32)] == list(range(20))
    assert [d.message.offset for d in bench.pop(queue_id=1, n=32)] == list(range(1, 20))


def test_ordered_queue_keeps_its_position(bench: PopBench, java: Java) -> None:
    first = bench.pop(queue_id=0, n=3, order=True, local=False)
    assert [d.message.offset for d in first] == [10, 11, 12]
    java.ck(10, [0, 1, 2, 3, 4])
    bench.reopen()
    bench.advance(INVISIBLE_MS)
    again = bench.pop(queue_id=0, n=3, order=True)
    assert [(d.message.offset, d.attempt) for d in again] == [(10, 2), (11, 2), (12, 2)]


def test_a_java_broker_that_was_started_in_between_is_taken_over_again(bench: PopBench, java: Java) -> None:
    """It began at our committed offset, so it delivered anew what is in flight here: its deliveries are the later."""
    java.ck(8, [0, 1])
    bench.reopen()
    assert (numbers(bench), bench.committed()) == ([8, 9], 8)
    t1 = java.pop_time_ms + 30_000
    ck = java.ck(8, [0, 1, 2], pop_time_ms=t1)
    java.ack(ck, 8)
    java.ck(11, [0], pop_time_ms=t1 + 1)
    java.committed(12)
    bench.reopen()
    assert {f[3:5] for f in in_flight(bench)} == {(8, java.pop_time_ms), (9, t1), (10, t1), (11, t1 + 1)}
    assert [d.message.offset for d in bench.pop(queue_id=0, n=2)] == [12, 13]


# -- deleted ----------------------------------------------------------------------------------------------------------


def test_of_a_deleted_group_nothing_is_taken(bench: PopBench, java: Java, caplog: pytest.LogCaptureFixture) -> None:
    java.ck(0, [0, 1], group="h")
    java.ck(5, [0])
    bench.reopen()
    assert numbers(bench) == [5]
    assert bench.parts.groups.names() == ["g"]
    assert bench.service.pending("h") == []
    assert "2 messages of t/0 that a Java broker had delivered to group h" in caplog.text


def test_of_a_deleted_topic_nothing_is_taken(bench: PopBench, java: Java, caplog: pytest.LogCaptureFixture) -> None:
    bench.parts.topics.create("u", queues=1)
    bench.put("u", 4)
    java.committed(4, topic="u")
    java.ck(0, [0, 1], topic="u")
    java.ck(0, [0, 1], topic="%RETRY%g_u")
    java.ck(0, [0, 1], topic="never")
    java.ck(5, [0])
    bench.parts.topics.delete("u", force=True)
    bench.reopen()
    assert {f[1] for f in in_flight(bench)} == {"t"}
    assert caplog.text.count("topic or group was deleted") == 3
    assert bench.parts.offsets.committed(queue("g", "u")) is None


def test_of_a_topic_that_was_deleted_and_made_anew_nothing_is_taken(bench: PopBench, java: Java) -> None:
    bench.parts.topics.create("u", queues=1)
    bench.put("u", 4)
    java.committed(4, topic="u")
    java.ck(0, [0, 1, 2, 3], topic="u")
    bench.parts.topics.delete("u", force=True)
    bench.parts.topics.create("u", queues=1)
    bench.put("u", 1)
    bench.reopen()
    assert numbers(bench, topic="u") == []
    assert ck_records(bench) == 0
    assert [d.message.offset for d in bench.pop(topic="u", n=5)] == [4]


@pytest.mark.parametrize(("create", "left"), [(True, [0, 1]), (False, [])])
def test_unknown_groups_are_created(bench: PopBench, java: Java, create: bool, left: list[int]) -> None:
    """The file of groups was lost: not every group can have been deleted."""
    java.ck(0, [0, 1])
    bench.close()
    for file in (bench.path / "config").glob("subscriptionGroup.json*"):
        file.unlink()
    bench.open(auto_create_groups=create)
    assert numbers(bench) == left


# -- what is invalid ----------------------------------------------------------------------------------------------


BAD_MEMBERS: dict[str, list[Any]] = {
    "t": [None, "../x"],
    "c": [7, "a@b"],
    "q": [-1, 1 << 31, True],
    "so": ["6", 1.5],
    "pt": [-1],
    "it": [1 << 63],
    "n": [2],
    "d": [[-1], ["0"], {"0": 0}],
    "bm": ["0"],
    "bn": [4],
}
BAD_CHECKPOINTS = [
    b"",
    b"{",
    b"[1]",
    b"[" * 20_000,
    b"\xff\xfe",
    b'{"t":"t"}',
    *(
        json.dumps({"t": "t", "c": "g", "q": 0, "so": 6, "pt": 5, "it": 5, "n": 1, "d": [0]} | bad).encode()
        for bad in (
            *({name: value} for name, values in BAD_MEMBERS.items() for value in values),
            {"n": 128, "d": [*range(128)]},
            {"n": 2, "d": [1, 1]},
        )
    ),
]


BAD_ACKNOWLEDGEMENTS = [
    ("ack", b'{"t":"t","c":"g","q":0,"so":0,"pt":1}'),
    ("ack", b"nonsense"),
    ("bAck", b'{"t":"t","c":"g","q":0,"so":0,"pt":1,"aol":3}'),
    ("bAck", b'{"t":"t","c":"g","q":0,"so":0,"pt":1,"aol":["0"]}'),
]


@pytest.mark.parametrize("waits", [True, False])
def test_bad_record_is_reported_and_skipped(
    bench: PopBench, java: Java, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    java.ck(0, [0], pop_time_ms=1, invisible_ms=bench.now_ms, waits=waits)
    for tag, body in (*(("ck", body) for body in BAD_CHECKPOINTS), *BAD_ACKNOWLEDGEMENTS):
        java.record(tag, body, bench.now_ms + 50_000, "k", waits=waits)
    java.ck(1, [0], waits=waits)
    bench.reopen()
    assert numbers(bench) == [0, 1]
    told = [int(record) for record in re.findall(r"record (\d+) of .* is invalid", caplog.text)]
    assert told == [*range(1, len(BAD_CHECKPOINTS) + len(BAD_ACKNOWLEDGEMENTS) + 1)]


def test_damaged_record_is_reported_and_skipped(bench: PopBench, java: Java, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(3):
        java.ck(i, [0])
    damaged = bench.read(TIMER_TOPIC)[1].physical_offset
    bench.close()
    flip(bench.path / "commitlog" / f"{0:020d}", damaged + 120)
    bench.open()
    assert numbers(bench) == [0, 2]
    assert "1 records of rmq_sys_wheel_timer/0" in caplog.text


def test_other_messages_of_the_timer_are_none_of_these(bench: PopBench, caplog: pytest.LogCaptureFixture) -> None:
    """Users' tags may be anything: `ck` itself, and `dL`, which has the same hash."""
    for tag in ("ck", "dL", "ack"):
        bench.parts.router.append("t", 0, b"mine", {"TAGS": tag, "TIMER_DELAY_SEC": "60"})
    bench.reopen()
    assert in_flight(bench) == set()
    assert caplog.text == ""
    assert bench.parts.offsets.of_group(REVIVE_GROUP) == {}


def test_a_tag_with_the_same_hash_is_none_of_these(
    bench: PopBench, java: Java, caplog: pytest.LogCaptureFixture
) -> None:
    java.record("dL", b"mine", bench.now_ms, "k", waits=False)
    java.ck(0, [0], waits=False)
    bench.reopen()
    assert numbers(bench) == [0]
    assert "is invalid" not in caplog.text


# -- crashes ----------------------------------------------------------------------------------------------------------


def test_kill_in_a_take_over_loses_and_doubles_nothing(folder: Path, tmp_path: Path, seen: Seen) -> None:
    crashed = 0
    for at in itertools.count(step=STEP):
        copy = tmp_path / f"at-{at}"
        shutil.copytree(folder, copy)
        clock = SimulatedClock(seen.stopped_ms)
        if not killed_in_take_over(copy, clock, at):
            break
        crashed += 1
        with PopBench(copy, clock=clock) as bench:
            assert in_flight(bench) == seen.flights(), at
            assert ck_records(bench) == 11, at  # one of them names the batch in order
            bench.advance(400_000)
            assert len(bench.read(retry("tagged", "t"))) == 6, at
            bench.crash()
            assert in_flight(bench) == set(), at
        shutil.rmtree(copy)
    assert crashed == -(-(11 + 10 + 1) // STEP)  # deliveries, answers, the save


# -- where there was no Java broker -----------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_a_store_that_no_java_broker_popped_from_is_left_alone(tmp_path: Path, profile: Any) -> None:
    with PopBench(tmp_path / "store", profile=profile, queues=1) as bench:
        bench.put("t", 3)
        bench.parts.router.append("t", 0, b"later", {"TIMER_DELAY_SEC": "60"})
        bench.pop(n=2, local=False)
        bench.close()
        size = bench.path / "commitlog" / f"{0:020d}"
        before = (size.read_bytes(), (bench.path / "config" / "consumerOffset.json").read_bytes())
        bench.open()
        assert numbers(bench) == [0, 1]
        assert bench.parts.offsets.of_group(REVIVE_GROUP) == {}
        assert (size.read_bytes(), (bench.path / "config" / "consumerOffset.json").read_bytes()) == before
