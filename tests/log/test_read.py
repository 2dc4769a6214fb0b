"""Reading: statuses, limits, filters, what is passed over and what is never served (format#time-search)."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqstore import OutgoingMessage, Profile, SimulatedClock
from mqstore.errors import FilterError, InvalidMessageError, OffsetOutOfRangeError, StoreClosedError, TopicNotFoundError
from tests.log.support import HEADER, SEGMENT, Unsynced, flip, flip_log, open_store, overwrite, until_parked
from tests.waiting import ended, in_thread

UNIT = struct.Struct(">qiq")
VOID_UNIT = UNIT.pack(0, 0x7FFFFFFF, 0)
T0 = 1_700_000_000_000


def bodies(messages: Any) -> list[bytes]:
    return [message.body for message in messages]


def unit_file(path: Path, topic: str, slot: int, queue_id: int = 0, units: int = 8) -> Path:
    return path / "consumequeue" / topic / str(queue_id) / f"{slot // units * units * 20:020d}"


def write_unit(path: Path, topic: str, slot: int, unit: bytes) -> None:
    overwrite(unit_file(path, topic, slot), slot % 8 * 20, unit)


# -- statuses --------------------------------------------------------------------------------------------------------


@pytest.fixture
def trimmed(store: Any) -> Any:
    """100 messages in `t`, the first of which retention has taken; one topic without retention, `other`."""
    for i in range(100):
        store.put("t", b"%d" % i, tag="even" if i % 2 == 0 else "odd")
    store.put("other", b"")
    store.flush()
    store.dispatch()
    store.drop_before(store.max_offset)
    return store


def test_the_status_of_each_offset(trimmed: Any) -> None:
    low, high = trimmed.offsets("t")
    assert 0 < low < high == 100
    table = {
        -5: ("OFFSET_TOO_SMALL", low),
        -1: ("OFFSET_TOO_SMALL", low),
        0: ("OFFSET_TOO_SMALL", low),
        low - 1: ("OFFSET_TOO_SMALL", low),
        low: ("FOUND", low + 3),
        high - 1: ("FOUND", high),
        high: ("OFFSET_OVERFLOW_ONE", high),
        high + 1: ("OFFSET_OVERFLOW_BADLY", high),
        1 << 62: ("OFFSET_OVERFLOW_BADLY", high),
    }
    for offset, (status, next_offset) in table.items():
        result = trimmed.get("t", 0, offset, 3)
        assert (result.status, result.next_offset) == (status, next_offset), offset
        assert (result.min_offset, result.max_offset) == (low, high)
        assert bool(result.messages) == (status == "FOUND")
        if status in ("OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY"):
            with pytest.raises(OffsetOutOfRangeError) as caught:
                trimmed.read("t", 0, offset)
            assert (caught.value.min_offset, caught.value.max_offset) == (low, high)
        else:
            assert trimmed.read("t", 0, offset, 3) == result.messages


def test_empty_match_continues_behind_the_range(trimmed: Any) -> None:
    low, high = trimmed.offsets("t")
    result = trimmed.get("t", 0, low, tags="none")
    assert (result.status, result.next_offset, result.messages) == ("NO_MATCHED_MESSAGE", high, [])
    assert trimmed.read("t", 0, low, tags="none") == []


def test_a_topic_or_queue_that_is_not_there(store: Any) -> None:
    store.put("t", b"x", 1)
    for topic, queue_id in (("nope", 0), ("t", 0), ("t", -1), ("../t", 1), ("", 0), ("t\0", 1)):
        for read in (store.read, store.offsets, lambda *a: store.wait(*a, 0, 0)):
            with pytest.raises(TopicNotFoundError):
                read(topic, queue_id)
    assert [ref.queue_id for ref in store.queues("t")] == [1]


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 5, 7, 8, 9, 39])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 32, 1000])
def test_a_read_goes_on_across_consume_queue_files_to_its_count(store: Any, offset: int, count: int) -> None:
    store.put_many("t", [b"%d" % i for i in range(40)])
    expected = [b"%d" % i for i in range(40)][offset : offset + count]
    assert bodies(store.read("t", 0, offset, count)) == expected
    result = store.get("t", 0, offset, count)
    assert bodies(result.messages) == expected
    assert result.next_offset == offset + len(expected)
    assert result.status == ("FOUND" if count else "NO_MATCHED_MESSAGE")


@pytest.mark.parametrize("tags", ["*", "T"])
@given(data=st.data())
def test_the_byte_limit_never_refuses_the_first(store: Any, tags: str, data: st.DataObject) -> None:
    if not store.topics():
        store.put_many("t", [OutgoingMessage(bytes(i * 7 % 300), tag="T") for i in range(40)])
    sizes = [m.size for m in store.iter("t", 0)]
    offset = data.draw(st.integers(0, 39))
    max_bytes = data.draw(st.integers(0, sum(sizes) + 1))
    expected, total = [], 0
    for slot in range(offset, 40):
        total += sizes[slot]
        if total > max_bytes and expected:
            break
        expected.append(slot)
    assert [m.offset for m in store.read("t", 0, offset, 100, max_bytes=max_bytes, tags=tags)] == expected
    assert store.get("t", 0, offset, 100, max_bytes=max_bytes, tags=tags).next_offset == expected[-1] + 1


# -- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("*", "abcdef"),
        (None, "abcdef"),
        ("", "abcdef"),
        (" ", "abcdef"),
        ("Aa", "a"),
        ("BB", "b"),
        ("Aa||BB", "ab"),
        (" Aa  ||  C || ", "ac"),
        ("C", "c"),
        ("polygenelubricants", "e"),
        ("订单 || 😀", "f"),
        ("none", ""),
        ("aa", ""),
    ],
)
def test_a_filter_takes_a_tag_by_hash_and_by_string(store: Any, tags: str | None, expected: str) -> None:
    """`Aa` and `BB` have one hash, `polygenelubricants` the least (format#tags-code)."""
    for body, tag in zip("abcdef", ["Aa", "BB", "C", None, "polygenelubricants", "订单"], strict=True):
        store.put("t", body.encode(), tag=tag)
    assert bodies(store.read("t", tags=tags)) == [c.encode() for c in expected]
    assert bodies(store.iter("t", 0, tags=tags)) == [c.encode() for c in expected]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_count_limit_is_filled_in_spite_of_colliding_hashes(store: Any, count: int) -> None:
    store.put_many("t", [OutgoingMessage(b"%d" % i, tag="BB" if i % 7 == 6 else "Aa") for i in range(60)])
    read, offset = [], 0
    while messages := store.read("t", 0, offset, count, tags="BB"):
        assert len(messages) <= count
        read += bodies(messages)
        offset = messages[-1].offset + 1
    assert read == [b"%d" % i for i in range(6, 60, 7)]


def test_filtered_read_steps_800_units(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", segment_bytes=1 << 18, consumequeue_units=500) as store:
        store.put_many("t", [OutgoingMessage(b"", tag="hay")] * 2500 + [OutgoingMessage(b"!", tag="needle")])
        result = store.get("t", 0, 0, tags="needle")
        assert (result.status, result.next_offset) == ("NO_MATCHED_MESSAGE", 800)
        assert [m.offset for m in store.read("t", 0, 0, tags="needle")] == [2500]


@pytest.mark.parametrize("tags", ["* || A", "A || *"])
def test_a_star_cannot_be_joined_with_tags(store: Any, tags: str) -> None:
    store.put("t", b"x")
    with pytest.raises(FilterError):
        store.read("t", tags=tags)
    for bars in ("a|b", "a || b|c", "a|", "|", "a|||b"):
        with pytest.raises(FilterError, match="single bar") as raised:
            store.read("t", tags=bars)
        assert bars[raised.value.position] == "|"


@pytest.mark.parametrize(("tags", "at"), [("||", 0), ("  || ", 2), ("||||", 0), (" ||  || ", 1)])
def test_bars_without_a_tag_between_them_are_refused(store: Any, tags: str, at: int) -> None:
    """They passed everything. RocketMQ refuses "||", too (delivery#tags)."""
    store.put("t", b"a", tag="x")
    with pytest.raises(FilterError, match="no tag between the bars") as raised:
        store.read("t", 0, 0, 10, tags=tags)
    assert raised.value.position == at
    assert len(store.read("t", 0, 0, 10, tags=" ")) == 1


def test_delay_units_are_never_filtered_by_tag(store: Any) -> None:
    topic = "SCHEDULE_TOPIC_XXXX"
    store.append(topic, 2, b"x", properties={"DELAY": "3", "TAGS": "T"})
    (message,) = store.read(topic, 2)
    assert message.tags_code == message.store_timestamp_ms + 10_000  # level 3 is 10 s (format#tags-code)
    assert store.at(message.physical_offset).tags_code == message.tags_code
    with pytest.raises(FilterError, match="cannot filter SCHEDULE_TOPIC_XXXX by tag"):
        store.read(topic, 2, tags="T")


# -- what is passed over, and what is never served -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_no_change_to_any_byte_of_a_message_is_ever_served(tmp_path: Path, mode: Any) -> None:
    """The default profile's promise (reliability.md): detected in a body, a header or a property."""
    with open_store(tmp_path / "s") as store:
        for i in range(3):
            receipt = store.put("t", b"body %d" % i, tag="T", keys="k", properties={"n": "v"}, flag=i)
    with open_store(tmp_path / "s", "r") as store:
        whole = [m._record_bytes() for m in store.read("t")]
    size = receipt.size
    segment = tmp_path / "s" / "commitlog" / f"{0:020d}"
    for position in range(size, 2 * size):
        flip(segment, position, position % 8)
        with open_store(tmp_path / "s", "r") as store:
            # What another process's writer may still be doing is stopped before.
            store.records.passes_over_bad = mode == "rw"
            assert [m._record_bytes() for m in store.read("t")] == [whole[0], whole[2]]
            assert store.stats().bad_records == 1
            with pytest.raises(LookupError):
                store.at(size)
        flip(segment, position, position % 8)


def damaged(tmp_path: Path, slots: list[int], count: int = 10) -> Path:
    """A store of `count` messages, a bit of whose bodies at `slots` has changed since it was closed."""
    with open_store(tmp_path / "s") as store:
        receipts = [store.put("t", b"%02d" % i, tag="T") for i in range(count)]
    for slot in slots:
        flip_log(tmp_path / "s", receipts[slot].physical_offset + 88)
    return tmp_path / "s"


@pytest.mark.parametrize("mode", ["r", "rw"])
@pytest.mark.parametrize("slots", [[0], [4], [3, 4, 5], [0, 2, 4, 6, 8]])
def test_a_damaged_record_is_passed_over_counted_and_reported_once(tmp_path: Path, mode: Any, slots: list[int]) -> None:
    with open_store(damaged(tmp_path, slots), mode) as store:
        expected = [i for i in range(10) if i not in slots]
        for _ in range(2):
            assert [m.offset for m in store.read("t")] == expected
            assert [m.offset for m in store.iter("t", 0)] == expected
            assert [m.offset for m in store.read("t", tags="T")] == expected
        result = store.get("t", 0, slots[0], 1)
        assert result.next_offset > slots[0]
        assert [m.offset for m in store.read("t", 0, slots[0], 1)] == [min(i for i in expected if i > slots[0])]
        assert store.stats().bad_records == len(slots)


@pytest.mark.parametrize("count", [1, 2, 32])
@pytest.mark.parametrize("slots", [[9], [7, 8, 9], list(range(10))])
def test_another_process_stops_where_nothing_verifies(tmp_path: Path, slots: list[int], count: int) -> None:
    """A writer may be at work there (format#readers). It once made `read` loop for ever."""
    with open_store(damaged(tmp_path, slots), "r") as store:
        offset, read = 0, []
        while messages := store.read("t", 0, offset, count):
            read += [m.offset for m in messages]
            offset = read[-1] + 1
        assert read == list(range(slots[0]))
        assert store.get("t", 0, slots[0], count).next_offset == slots[0]
        assert [m.offset for m in store.iter("t")] == read
        assert store.stats().bad_records == 0


def test_verify_reads_can_be_switched_off(tmp_path: Path) -> None:
    with open_store(damaged(tmp_path, [4]), "r", verify_reads=False) as store:
        assert [m.body for m in store.read("t", 0, 4, 1)] == [b"14"]  # b"04" with a bit flipped


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_record_verified_for_its_own_queue_is_not_served_to_another(store: Any, first: str) -> None:
    """Verified records were remembered by their place in the log. After a read of `b`, a damaged unit of `a` that
    pointed there passed for verified, and a message of `b` was served as one of `a`."""
    store.put("a", b"a0")
    store.put("b", b"b0")
    store.put("a", b"a1")
    assert bodies(store.read(first))[0] == first.encode() + b"0"
    write_unit(store.path, "a", 1, unit_file(store.path, "b", 0).read_bytes()[:20])
    assert bodies(store.read("a")) == [b"a0"]
    assert bodies(store.read("b")) == [b"b0"]


@pytest.mark.parametrize(
    ("topic", "queue_id", "other"),
    [("t", 0, 0), ("t", 0, 2), ("t", 1, 1), ("tt", 0, 1)],
    ids=["slot before", "slot behind", "other queue", "topic that begins alike"],
)
@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_a_unit_that_points_at_another_record_is_passed_over(
    tmp_path: Path, profile: Profile, topic: str, queue_id: int, other: int
) -> None:
    with open_store(tmp_path / "s", profile=profile, segment_bytes=1 << 16) as store:
        for i in range(80):
            for name, number in (("t", 0), ("t", 1), ("tt", 0)):
                store.put(name, b"%d" % i, number)
    unit = unit_file(tmp_path / "s", topic, other, queue_id).read_bytes()[20 * other : 20 * other + 20]
    write_unit(tmp_path / "s", "t", 1, unit)
    with open_store(tmp_path / "s", "r") as store:
        assert [m.offset for m in store.read("t", 0, 1, 1)] == [2]
        assert [m.offset for m in store.read("t", 0, 0, 80)] == [0, *range(2, 80)]
        assert store.stats().bad_records == 1


@pytest.mark.parametrize(
    "unit",
    [
        UNIT.pack(0, 100, 0),
        UNIT.pack(-1, 95, 0),
        UNIT.pack(3, 95, 0),
        UNIT.pack(96, 95, 0),
        UNIT.pack(95, 94, 0),
        UNIT.pack(95, 0x7FFFFFFE, 0),
        UNIT.pack(0, 0x7FFFFFFE, 0),
        UNIT.pack(SEGMENT * 9, 95, 0),
        UNIT.pack(1 << 62, 95, 0),
        UNIT.pack((1 << 63) - 1, 0x7FFFFFFF, -1),
        UNIT.pack(0, 0x7FFFFFFF, 0),
        UNIT.pack(95, -5, 0),
        bytes(20),
    ],
    ids=range(13),
)
@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_unit_that_is_void_or_wrong_is_passed_over(tmp_path: Path, mode: Any, unit: bytes) -> None:
    with open_store(tmp_path / "s") as store:
        for i in range(20):
            assert store.put("t", b"%02d" % i).size == HEADER + 3
    write_unit(tmp_path / "s", "t", 3, unit)
    with open_store(tmp_path / "s", mode) as store:
        expected = [i for i in range(20) if i != 3]
        assert [m.offset for m in store.read("t")] == expected
        assert [m.offset for m in store.read("t", 0, 3, 1)] == [4]
        assert [m.offset for m in store.iter("t")] == expected
        assert store.offset_at("t", 0, T0 + 1) == 20
        assert not store.stats().bad_records or unit != VOID_UNIT


# -- iteration -------------------------------------------------------------------------------------------------------


def test_iter_merges_queues_by_store_time(tmp_path: Path) -> None:
    clock = SimulatedClock(T0)
    with open_store(tmp_path / "s", clock=clock) as store:
        order = [2, 0, 1, 1, 0, 2, 2, 0] * 20
        for i, queue_id in enumerate(order):
            store.put("t", b"%d" % i, queue_id)
            clock.advance(i % 2)
        assert bodies(store.iter("t")) == [b"%d" % i for i in range(len(order))]
        assert bodies(store.iter("t", 1)) == [b"%d" % i for i, queue_id in enumerate(order) if queue_id == 1]
        later = datetime.fromtimestamp((T0 + 40) / 1000, UTC)
        assert bodies(store.iter("t", start=later)) == [
            m.body for m in store.iter("t") if m.store_timestamp_ms >= T0 + 40
        ]
        assert list(store.iter("t", start="latest")) == []


@pytest.mark.parametrize(("start", "stop"), [(0, None), (3, None), (0, 0), (5, 9), (9, 5), (0, 1000), (100, None)])
def test_iter_of_one_queue_between_offsets(store: Any, start: int, stop: int | None) -> None:
    store.put_many("t", [b"%d" % i for i in range(100)])
    expected = [b"%d" % i for i in range(100)][start:stop]
    assert bodies(store.iter("t", 0, start=start, stop=stop)) == expected


def test_iter_says_when_its_start_is_out_of_range_or_no_start(trimmed: Any) -> None:
    for offset in (0, -1, 101):
        with pytest.raises(OffsetOutOfRangeError):
            next(trimmed.iter("t", 0, start=offset))
    for arguments in ({"start": 5}, {"stop": 5}):
        with pytest.raises(InvalidMessageError, match="queue_id"):
            next(trimmed.iter("t", **arguments))
    wrong: Any = "first"
    with pytest.raises(InvalidMessageError, match="earliest"):
        next(trimmed.iter("t", 0, start=wrong))


def test_following_one_queue_waits_for_the_next_message(store: Any) -> None:
    store.put("t", b"0")
    follower = store.iter("t", 0, follow=True, tags=None)
    assert next(follower).body == b"0"
    for i in range(1, 50):
        waiting = in_thread(lambda: next(follower).body)
        until_parked(store)
        store.put("t", b"%d" % i)
        store.dispatch()
        assert ended(*waiting) == b"%d" % i


def test_following_all_queues_sleeps_and_finds_new_ones(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last message that the filter did not take once kept it reading without a pause."""
    store.put("t", b"0", tag="A")
    store.put("t", b"skipped", tag="B")
    coming: list[Callable[[], object]] = [
        lambda: None,
        lambda: store.put("t", b"skipped", 3, tag="B"),
        lambda: store.put("t", b"1", 3, tag="A"),
        lambda: store.put("t", b"2", tag="A"),
    ]
    clock = SimpleNamespace(sleep=lambda seconds: coming.pop(0)())
    monkeypatch.setattr("mqstore.log.reading.iteration.time", clock)
    reads = 0
    get = store.get

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        return get(*arguments, **options)

    monkeypatch.setattr(store, "get", counted)
    follower = store.iter("t", follow=True, tags="A")
    assert [next(follower).body for _ in range(3)] == [b"0", b"1", b"2"]
    assert coming == []
    assert reads < 20


def test_following_a_store_that_is_closed_ends_with_an_error(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    store.put("t", b"x")
    follower = store.iter("t", 0, follow=True)
    next(follower)
    waiting = in_thread(lambda: next(follower))
    until_parked(store)
    store.close()
    assert isinstance(ended(*waiting), StoreClosedError)


# -- single messages -------------------------------------------------------------------------------------------------


def test_at_finds_the_starts_of_records_and_nothing_else(store: Any) -> None:
    receipts = [store.put("t", b"x" * i, 3, tag="T", keys="k") for i in range(30)]
    starts = {r.physical_offset: r for r in receipts}
    for position in range(-3, 2 * SEGMENT + 3):
        if position in starts:
            message = store.at(position)
            (same,) = store.read("t", 3, starts[position].offset, 1)
            assert message == same
            assert message.tags_code == same.tags_code == 84  # ord("T")
        else:
            with pytest.raises(LookupError):
                store.at(position)


@pytest.mark.parametrize("message_id", ["", "xyz", "0" * 31, "0" * 33, "G" * 32, "0" * 57, "é" * 32])
def test_invalid_message_id_is_refused(store: Any, message_id: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        store.get_by_id(message_id)
    assert caught.value.field == "message_id"


def test_a_message_id_that_leads_nowhere(trimmed: Any) -> None:
    for offset in (0, 1, 1 << 62, (1 << 63) - 1):
        with pytest.raises(LookupError):
            trimmed.get_by_id(f"7F00000100000000{offset:016X}")


@pytest.fixture
def keyed(tmp_path: Path) -> Any:
    """Over many index files (31 entries each): message i at T0 + 700 i ms bears `all`, `k<i % 5>`, `Aa` or `BB`."""
    clock = SimulatedClock(T0)
    with open_store(tmp_path / "keyed", clock=clock) as store:
        for i in range(100):
            keys = ["all", f"k{i % 5}", "Aa" if i % 2 else "BB"]
            store.put("t" if i % 10 else "u", b"%d" % i, i % 3, keys=keys, unique_key=f"u{i // 2}")
            clock.advance(700)
        yield store


@pytest.mark.parametrize("limit", [0, 1, 3, 32, 1000])
@pytest.mark.parametrize("key", ["all", "k1", "Aa", "BB", "none", "k1 "])
def test_find_by_key_newest_first(keyed: Any, key: str, limit: int) -> None:
    expected = [i for i in range(100) if i % 10 and key in ("all", f"k{i % 5}", "Aa" if i % 2 else "BB")]
    assert [int(m.body) for m in keyed.find("t", key=key, limit=limit)] == expected[::-1][:limit]


def test_find_by_unique_key_is_another_question_than_by_key(keyed: Any) -> None:
    assert [int(m.body) for m in keyed.find("t", unique_key="u7")] == [15, 14]
    assert keyed.find("t", key="u7") == []
    assert keyed.find("t", unique_key="k1") == []
    assert [int(m.body) for m in keyed.find("u", unique_key="u5")] == [10]
    assert keyed.find("nowhere", key="all") == []


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 1 << 62),
        (T0, T0),
        (T0 + 700, T0 + 700),
        (T0 + 701, T0 + 2100),
        (T0 + 7001, T0 + 31_337),
        (T0 + 69_301, 1 << 62),
    ],
)
def test_find_within_times_to_the_millisecond(keyed: Any, start: int, stop: int) -> None:
    """Entries count seconds (format#index-query): what is asked for is compared with the record's own time."""
    expected = [i for i in range(100) if i % 10 and start <= T0 + 700 * i <= stop]
    found = keyed.find("t", key="all", start_ms=start, stop_ms=stop, limit=100)
    assert [int(m.body) for m in found] == expected[::-1]


def test_find_wants_one_of_its_two_keys(store: Any) -> None:
    for arguments in ({}, {"key": "a", "unique_key": "b"}):
        with pytest.raises(InvalidMessageError, match="either key= or unique_key="):
            store.find("t", **arguments)


def test_a_damaged_record_is_not_found(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        receipts = [store.put("t", b"x", keys="k") for _ in range(3)]
    flip_log(tmp_path / "s", receipts[1].physical_offset + 88)
    with open_store(tmp_path / "s", "r") as store:
        assert [m.offset for m in store.find("t", key="k")] == [2, 0]


# -- time ------------------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.integers(0, 3), min_size=1, max_size=40), drop=st.booleans())
@example(steps=[0] * 30, drop=False)
def test_offset_at_against_a_naive_search(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], drop: bool
) -> None:
    clock = SimulatedClock(T0)
    path = tmp_path_factory.mktemp("time")
    with open_store(path / "s", clock=clock, segment_bytes=1024) as store:
        times = []
        for step in steps:
            clock.advance(step)
            store.put("t", b"x" * 200)
            times.append(clock.now_ms())
        store.flush()
        store.dispatch()
        if drop:
            store.drop_before(store.max_offset)
        low, high = store.offsets("t")
        kept = list(range(low, high))
        for stamp in range(T0 - 1, times[-1] + 2):
            at_or_after = [i for i in kept if times[i] >= stamp]
            at_or_before = [i for i in kept if times[i] <= stamp]
            when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=stamp)
            for asked in (stamp, when):
                assert store.offset_at("t", 0, asked) == min(at_or_after, default=high)
                assert store.offset_at("t", 0, asked, "upper") == max(at_or_before, default=low)
    shutil.rmtree(path)


# -- a reader of another process's store -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["read", "iter"])
def test_overtaken_reader_hears_of_retention(tmp_path: Path, way: str) -> None:
    """It once looped over what was gone, or passed over it in silence."""
    with open_store(tmp_path / "s") as writer:
        for i in range(200):
            writer.put("t", b"%d" % i)
        writer.flush()
        writer.dispatch()
        with open_store(tmp_path / "s", "r") as reader:
            _, high = reader.offsets("t")
            assert bodies(reader.read("t", 0, high - 1)) == [b"199"]
            writer.drop_before(writer.max_offset)
            low, _ = writer.offsets("t")
            behind = {"read": lambda: reader.read("t", 0, 0), "iter": lambda: next(reader.iter("t", 0, start=0))}
            with pytest.raises(OffsetOutOfRangeError) as caught:
                behind[way]()
            assert (caught.value.min_offset, caught.value.max_offset) == (low, high)
            assert [m.offset for m in reader.read("t", 0, low, 1000)] == list(range(low, high))


def test_a_reader_finds_new_messages_segments_queues_and_topics(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as writer, open_store(tmp_path / "s", "r") as reader:
        assert reader.topics() == []
        for i in range(100):
            writer.put(f"t{i % 3}", b"%d" % i, i % 2, keys="k")
            writer.dispatch()
            (message,) = reader.read(f"t{i % 3}", i % 2, reader.offsets(f"t{i % 3}", i % 2)[1] - 1)
            assert message.body == b"%d" % i
        assert reader.topics() == ["t0", "t1", "t2"]
        assert len(reader.find("t1", key="k", limit=1000)) == 33


def test_a_read_that_a_close_overtakes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came back empty, with an offset behind messages that it had taken for damaged."""
    store: Any = open_store(tmp_path / "s")
    for i in range(3):
        store.put("t", b"%d" % i)
    store.dispatch()
    queue = type(store.queue_table.get("t", 0))
    read = queue.read

    def closing(self: Any, offset: int, count: int) -> Any:
        found = read(self, offset, count)
        monkeypatch.undo()
        store.close()
        return found

    monkeypatch.setattr(queue, "read", closing)
    with pytest.raises(StoreClosedError):
        store.get("t", 0, 0)
    assert store.closed
    assert not store.records.bad


@pytest.mark.parametrize("follow", [False, True])
def test_a_reader_behind_the_front_goes_on_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, follow: bool
) -> None:
    """Iterating from the start ended with OffsetOutOfRangeError, though nobody had asked for an offset."""
    with open_store(tmp_path / "s") as writer:
        for i in range(400):
            writer.put("t", b"%d" % i)
        writer.flush()
        writer.dispatch()
        with open_store(tmp_path / "s", "r") as reader:
            messages = reader.iter("t", 0, follow=follow)
            given = [next(messages).offset for _ in range(5)]
            writer.drop_before(writer.max_offset)
            low, high = writer.offsets("t")
            while given[-1] < high - 1:
                given.append(next(messages).offset)

    jump = next(i for i, (a, b) in enumerate(pairwise(given)) if b != a + 1)
    assert given == [*range(given[jump] + 1), *range(low, high)]
    assert f"retention deleted offsets {given[jump] + 1} to {low - 1} of t/0" in caplog.text


def test_iter_ends_where_the_queue_ended_when_it_began(store: Any) -> None:
    """Beside a writer that was as fast it never ended."""
    store.put_many("t", [b"before"] * 3)
    seen = []
    for message in store.iter("t", 0):
        seen.append(message.body)
        store.put("t", b"meanwhile")
    assert seen == [b"before"] * 3


@pytest.mark.parametrize("way", ["get", "offset_at"])
def test_expired_range_is_skipped_at_once(tmp_path: Path, way: str) -> None:
    """The log was listed once for each message that was gone, and a command that asked for one did not end."""
    listings = []

    class Counting(Unsynced):
        def scandir_files(self, path: Any, *, own: bool = False) -> list[tuple[str, int]]:
            listings.append(path)
            return super().scandir_files(path)

    with open_store(tmp_path / "s") as writer:
        for i in range(400):
            writer.put("t", b"%d" % i)
        writer.flush()
        writer.dispatch()
        with open_store(tmp_path / "s", "r", fs=Counting()) as reader:
            assert reader.offsets("t") == (0, 400)
            writer.drop_before(writer.max_offset)
            listings.clear()
            low = writer.offsets("t")[0]
            if way == "get":
                found = reader.get("t", 0, 100, 1)
                assert (found.status, found.next_offset, found.min_offset) == ("OFFSET_TOO_SMALL", low, low)
            else:
                assert (reader.offset_at("t", 0, 1 << 50), reader.offset_at("t", 0, 0)) == (400, low)

    assert low > 300
    assert len(listings) < 50
