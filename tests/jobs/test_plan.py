"""Plans: which messages a query reads, and that partitions share none and lose none. Without Spark."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import SimulatedClock, StoreConfig
from mqstore.broker.admin.offline import offline
from mqstore.broker.tables.names import QueueKey
from mqstore.errors import ConfigError, NotAStoreError, OffsetOutOfRangeError, TopicNotFoundError
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading import plan as module
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.reading.plan import LogSlice, QueueSlice, Slice, Weighed, partitions, plan, stores_of
from mqstore.jobs.reading.progress import StreamProgress
from mqstore.jobs.reading.store_set import SET_FILE
from mqstore.jobs.reading.tasks import read_slices
from mqstore.jobs.views import view_batch
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.columnar.support import Odd, crashed_store, log_end, many, odd_records, rows_of, write_store
from tests.log.support import open_store, reboot

T0 = 1_700_000_000_000


def planned(path: Any, **options: Any) -> dict[tuple[str, int], tuple[int, int]]:
    """Topic and queue -> what is read of it, of a plan that cuts nothing."""
    given = {"path": str(path), **options}
    slices = [piece for group in plan(SourceOptions.parse(given)) for piece in group]
    found = {(piece.topic, piece.queue_id): (piece.start, piece.stop) for piece in slices}
    assert len(found) == len(slices)
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 messages, 20 in each of two queues of `t` and of `orders`, a millisecond apart; and a retry."""
    records = [*many(80), Odd(topic="%RETRY%g", store_ms=T0 + 100)]
    return write_store(tmp_path_factory.mktemp("plan") / "s", records)


ALL = {("t", 0): (0, 20), ("t", 1): (0, 20), ("orders", 0): (0, 20), ("orders", 1): (0, 20), ("seed", 0): (0, 1)}


def test_all_topics_of_users_are_read_whole(store: Path) -> None:
    assert planned(store) == ALL
    assert planned(store, includeSystemTopics="true") == {**ALL, ("%RETRY%g", 0): (0, 1)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subscribe": "t"}, {("t", 0): (0, 20), ("t", 1): (0, 20)}),
        ({"subscribe": "%RETRY%g"}, {("%RETRY%g", 0): (0, 1)}),
        ({"subscribePattern": "s.*"}, {("seed", 0): (0, 1)}),
        ({"assign": '{"t":[1]}'}, {("t", 1): (0, 20)}),
        ({"assign": '{"t":[1]}', "startingOffsets": '{"t":{"1":5}}'}, {("t", 1): (5, 20)}),
        ({"subscribe": "t", "startingOffsets": '{"t":{"0":-1,"1":-2}}'}, {("t", 1): (0, 20)}),
        ({"subscribe": "t", "endingOffsets": '{"t":{"0":3}}'}, {("t", 0): (0, 3), ("t", 1): (0, 20)}),
        ({"subscribe": "t", "startingOffsets": "latest"}, {}),
        ({"subscribe": "t", "endingOffsets": "earliest"}, {}),
        # Message i has time T0 + i and goes to t if i is even, to queue i // 2 % 2.
        ({"subscribe": "t", "startingTimestamp": str(T0 + 41)}, {("t", 0): (11, 20), ("t", 1): (10, 20)}),
        ({"subscribe": "t", "endingTimestamp": str(T0 + 41)}, {("t", 0): (0, 11), ("t", 1): (0, 10)}),
        (
            {"subscribe": "t", "startingTimestamp": str(T0 + 41), "startingOffsets": "latest"},
            {("t", 0): (11, 20), ("t", 1): (10, 20)},
        ),
    ],
)
def test_options_choose_queues_and_bounds(store: Path, options: dict[str, str], expected: Any) -> None:
    assert planned(store, **options) == expected


def test_a_group_says_where_to_begin(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(40))
    with offline(path) as opened:
        opened.topics.create("t", queues=2)
        opened.groups.create("g")
        opened.offsets.commit(QueueKey("g", "t", 0), 7)
    assert planned(path, subscribe="t", startingGroup="g") == {("t", 0): (7, 10), ("t", 1): (0, 10)}
    with pytest.raises(ConfigError, match="no store has committed offsets"):
        planned(path, startingGroup="nobody")


@pytest.mark.parametrize("scan", ["auto", "queue", "log"])
def test_orphan_records_are_reported(tmp_path: Path, scan: str, caplog: pytest.LogCaptureFixture) -> None:
    options = SourceOptions.parse({"path": str(crashed_store(tmp_path / "s", 10, 6)), "readBy": scan})
    plan(options)
    plan(options)
    [warning] = caplog.messages
    assert "lack messages of the log" in warning
    assert "or run `mqstore recover`" in warning
    caplog.clear()
    plan(SourceOptions.parse({"path": str(crashed_store(tmp_path / "t", 10, 0))}))
    plan(SourceOptions.parse({"path": str(tmp_path / "t-alive")}))
    assert caplog.messages == []


def test_log_scan_ends_at_the_recovery_end(tmp_path: Path) -> None:
    """Of a batch that was being put when its writer was killed, what lay behind a hole was read, and the hole called
    damage."""
    with open_store(tmp_path / "s", segment_bytes=1 << 16) as store:
        store.put("t", b"flushed")
        store.flush()
        store.background.save_checkpoint()
        places = [receipt.physical_offset for receipt in store.put_many("t", [b"%d" % i for i in range(9)])]
        shutil.copytree(store.path, tmp_path / "torn")
    reboot(tmp_path / "torn")
    shutil.rmtree(tmp_path / "torn" / "consumequeue", ignore_errors=True)
    log = tmp_path / "torn" / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[places[4] : places[6]] = bytes(places[6] - places[4])
    log.write_bytes(data)

    [[piece]] = plan(SourceOptions.parse({"path": str(tmp_path / "torn"), "readBy": "log"}))

    assert isinstance(piece, LogSlice)
    assert (piece.start, piece.stop) == (0, places[4])
    with open_store(tmp_path / "torn") as recovered:
        assert recovered.max_offset == places[4]


def test_lost_messages_fail_by_default(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(body=bytes(1000))] * 40)
    (path / "commitlog" / f"{0:020d}").unlink()
    with ReadOnlyMessageStore(path) as store:
        low, _ = store.offsets("t", 0)
    assert low > 0
    for offsets, says in (
        ('{"t":{"0":0}}', f"{low} messages are lost"),
        ('{"t":{"0":50}}', "10 messages are missing"),
    ):
        with pytest.raises(OffsetOutOfRangeError, match=says):
            planned(path, startingOffsets=offsets)
    assert planned(path, startingOffsets='{"t":{"0":0}}', failOnDataLoss="false") == {("t", 0): (low, 40)}
    assert planned(path, startingOffsets='{"t":{"0":50}}', failOnDataLoss="false") == {}
    with pytest.raises(TopicNotFoundError, match="'u'"):
        planned(path, subscribe="t,u")
    assert planned(path, subscribe="t,u", failOnDataLoss="false") == {("t", 0): (low, 40)}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"assign": '{"t":[0,9]}'}, "the topic 't', queue 9, which option assign names"),
        ({"assign": '{"no":[0]}'}, "the topic 'no', queue 0, which option assign names"),
        ({"startingOffsets": '{"t":{"0":5,"9":-2}}'}, "the topic 't', queue 9, which option startingOffsets names"),
        ({"startingOffsets": '{"no":{"0":5}}'}, "the topic 'no', queue 0, which option startingOffsets names"),
        ({"startingOffsets": '{"PATH":{"no":{"0":5}}}'}, "the topic 'no', queue 0, which option startingOffsets names"),
        ({"subscribe": "t", "endingOffsets": '{"t":{"2":-1}}'}, "'t', queue 2, which option endingOffsets names"),
        ({"subscribe": "t,no"}, "the topic 'no', which option subscribe names"),
    ],
)
def test_a_queue_that_an_option_names_has_to_be_there(store: Path, given: dict[str, str], says: str) -> None:
    """Offsets of a topic, or of a queue, that was misspelt were passed over, and its messages read from the oldest."""
    given = {name: value.replace("PATH", str(store)) for name, value in given.items()}
    with pytest.raises(TopicNotFoundError, match=says + r".* \(failOnDataLoss=false"):
        planned(store, **given)
    planned(store, **given, failOnDataLoss="false")
    if "startingOffsets" in given:  # a start by time wins, and counts on nothing
        planned(store, **given, startingTimestamp="0")


def test_a_topic_without_a_message_is_there(tmp_path: Path) -> None:
    """A query of it failed, as of one that no store has."""
    path = write_store(tmp_path / "s", many(8))
    with offline(path) as opened:
        opened.topics.create("empty", queues=2)
    for wanted in ({"subscribe": "empty"}, {"assign": '{"empty":[1]}'}, {"startingOffsets": '{"empty":{"1":0}}'}):
        assert ("empty", 1) not in planned(path, **wanted)
    with pytest.raises(TopicNotFoundError, match="'empty', queue 2"):
        planned(path, assign='{"empty":[2]}')


def test_only_durable_messages_are_planned(tmp_path: Path) -> None:
    config = StoreConfig(segment_bytes=1 << 16, clock=SimulatedClock())  # so nothing is flushed but by us
    with MessageStore(tmp_path / "s", config=config) as store:
        for i in range(10):
            store.put("t", b"%d" % i)
        store.flush()
        store.background.save_checkpoint()
        for i in range(5):
            store.put("t", b"%d" % i)
        store.dispatch()
        assert planned(tmp_path / "s") == {("t", 0): (0, 15)}
        assert planned(tmp_path / "s", isolation="flushed") == {("t", 0): (0, 10)}
    assert planned(tmp_path / "s", isolation="flushed") == {("t", 0): (0, 15)}  # closed cleanly


# -- stores ------------------------------------------------------------------------------------------------------------


def test_stores_come_by_path_glob_set_and_id(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_store(tmp_path / "many" / name, [])
    every = [str(tmp_path / "many" / name) for name in "ab"]

    def ids(**given: str) -> list[tuple[str, str]]:
        return [(store.id, store.path) for store in stores_of(SourceOptions.parse(given))]

    assert ids(path=str(tmp_path / "many" / "*")) == [(each, each) for each in every]
    assert ids(path=f"file:{every[0]}") == [(every[0], every[0])]
    assert ids(paths=json.dumps({"x": every[1]})) == [("x", every[1])]
    (tmp_path / "many" / SET_FILE).write_text(json.dumps({"version": 1, "stores": {"first": "a"}}))
    assert ids(path=str(tmp_path / "many")) == [("first", every[0])]  # b is not in it, so it does not count
    with pytest.raises(ConfigError, match="matches the glob"):
        ids(path=str(tmp_path / "none*"))
    with pytest.raises(ConfigError, match="two stores have the id"):
        ids(paths=json.dumps([every[0], every[0]]))
    for wrong in ("{}", "[]", "x", '{"version": 2, "stores": {}}'):
        (tmp_path / "many" / SET_FILE).write_text(wrong)
        with pytest.raises(ConfigError, match=SET_FILE):
            ids(path=str(tmp_path / "many"))


def test_a_store_has_one_id_however_its_path_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = str(write_store(tmp_path / "a", []))
    monkeypatch.chdir(tmp_path)

    def named(**given: str) -> list[StoreName]:
        return stores_of(SourceOptions.parse(given))

    for spelled in ("a", "a/", "./a", "file:a", "b/../a", store, f"{store}//", f"file://{store}/", "[a]", "./*"):
        assert named(path=spelled) == [StoreName(store, store)], spelled
    with pytest.raises(ConfigError, match="two stores have the id"):
        named(paths='["a", "a/"]')
    assert named(paths='{"x": "a/", "y": "./a"}') == [StoreName("x", store), StoreName("y", store)]  # ids as given
    (tmp_path / SET_FILE).write_text(json.dumps({"version": 1, "stores": {"one": "a"}}))
    for spelled in (".", f"../{tmp_path.name}"):  # executors have folders of their own
        assert named(path=spelled) == [StoreName("one", store)]


@pytest.mark.parametrize("lax", ["true", "false"])
def test_an_id_is_of_one_store(tmp_path: Path, lax: str) -> None:
    """A set, or a glob, under an id was no store; with failOnDataLoss=false nothing was read of it."""
    write_store(tmp_path / "a", [])
    (tmp_path / SET_FILE).write_text(json.dumps({"version": 1, "stores": {"one": "a"}}))
    for where in (tmp_path, tmp_path / "*"):
        given = {"paths": json.dumps({"x": str(where)}), "failOnDataLoss": lax}
        with pytest.raises(ConfigError, match=r"with the id 'x' is a glob or a store set.*an array"):
            plan(SourceOptions.parse(given))
    (tmp_path / "[a]").symlink_to(tmp_path / "a")  # looks like one, and is none
    assert plan(SourceOptions.parse({"paths": json.dumps({"x": str(tmp_path / "[a]")})}))


def test_path_that_is_not_text_gets_an_id(tmp_path: Path) -> None:
    """A glob finds such; its rows ended in a traceback, since a column is text."""
    write_store(tmp_path / "s", many(8))
    try:
        (tmp_path / "s").rename(os.fsdecode(os.fsencode(tmp_path) + b"/s\xff"))
    except OSError:
        pytest.skip("this file system takes text only")
    options = SourceOptions.parse({"path": f"{tmp_path}/s*"})

    [name] = stores_of(options)
    assert (name.id, os.fsencode(name.path)) == (f"{tmp_path}/s\\xff", os.fsencode(tmp_path) + b"/s\xff")
    [slices] = plan(options)
    rows = rows_of(read_slices(options, ("store", "topic"), "binary", slices))
    assert (len(rows), {row["store"] for row in rows}) == (9, {name.id})
    assert {*view_batch("queues", name, options).column("store").to_pylist()} == {name.id}
    stream = StreamProgress(options.for_stream())
    end = stream.latest(stream.latest(stream.initial()))
    assert json.loads(json.dumps(end)) == end
    assert [*end["s"]] == [name.id]


def test_a_store_that_is_gone_is_data_lost(tmp_path: Path) -> None:
    write_store(tmp_path / "a", [Odd()])
    paths = json.dumps({"a": str(tmp_path / "a"), "b": str(tmp_path / "b")})
    with pytest.raises(NotAStoreError):
        plan(SourceOptions.parse({"paths": paths}))
    [[one, two]] = plan(SourceOptions.parse({"paths": paths, "failOnDataLoss": "false"}))
    assert (one.store, two.store) == (StoreName("a", str(tmp_path / "a")),) * 2
    assert not (tmp_path / "b").exists()


def test_offsets_of_several_stores_have_the_store_on_top(tmp_path: Path) -> None:
    for name in "ab":
        write_store(tmp_path / name, [Odd()] * 10)
    paths = json.dumps({name: str(tmp_path / name) for name in "ab"})

    def starts(offsets: str) -> list[tuple[str, int]]:
        given = {"paths": paths, "subscribe": "t", "startingOffsets": offsets}
        return [(piece.store.id, piece.start) for group in plan(SourceOptions.parse(given)) for piece in group]

    assert starts('{"a":{"t":{"0":3}}}') == [("a", 3), ("b", 0)]
    with pytest.raises(ConfigError, match="queues of unknown stores 'c'; existing: 'a', 'b'"):
        starts('{"c":{"t":{"0":3}}}')
    with pytest.raises(ConfigError, match=r"queues of unknown stores ''; .* With several stores"):
        starts('{"t":{"0":3}}')


# -- readBy=log -------------------------------------------------------------------------------------------------------


def test_a_log_scan_goes_to_the_end_of_what_is_dispatched(store: Path) -> None:
    with ReadOnlyMessageStore(store) as opened:
        end = log_end(opened)
    [[piece]] = plan(SourceOptions.parse({"path": str(store), "readBy": "log"}))
    assert isinstance(piece, LogSlice)
    assert (piece.start, piece.stop) == (0, end)
    with pytest.raises(ConfigError, match=r"option startingTimestamp needs queues, but readBy=log .*leave the option"):
        plan(SourceOptions.parse({"path": str(store), "readBy": "log", "startingTimestamp": "5"}))


def test_a_store_without_queues_is_read_by_its_log(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(30))
    with ReadOnlyMessageStore(path) as store:
        end = log_end(store)
    (path / "consumequeue").rename(tmp_path / "aside")
    for wanted in ({}, {"subscribe": "t"}):  # which topics it has nobody knows before
        [[piece]] = plan(SourceOptions.parse({"path": str(path), **wanted}))
        assert isinstance(piece, LogSlice)
        assert piece.stop == end


# -- partitions --------------------------------------------------------------------------------------------------------


@given(
    queues=st.lists(st.tuples(st.integers(1, 3_000_000), st.integers(100, 70_000)), min_size=1, max_size=30),
    least=st.integers(1, 50),
)
def test_partitions_share_nothing_lose_nothing_and_are_about_equal(queues: list[tuple[int, int]], least: int) -> None:
    name = StoreName("s", "s")
    weighed = [
        Weighed(QueueSlice(name, "t", i, 5, 5 + count), max(size / (128 << 20), 1 / 500_000))
        for i, (count, size) in enumerate(queues)
    ]
    groups = [*partitions(weighed, least)]
    at = dict.fromkeys(range(len(queues)), 5)
    for group in groups:
        assert group
        for piece in group:
            assert isinstance(piece, QueueSlice)
            assert piece.start == at[piece.queue_id] < piece.stop
            at[piece.queue_id] = piece.stop
    assert at == {i: 5 + count for i, (count, _) in enumerate(queues)}
    weights = [sum((p.stop - p.start) * weighed[p.queue_id].each for p in group) for group in groups]
    total = sum(weights)
    whole = -int(-total // 1)
    full = total / max(whole, least)
    largest_message = max(each.each for each in weighed)
    assert max(weights) <= full * (1 + 3 / 64) + largest_message
    assert len(groups) <= max(whole, least)


@pytest.mark.parametrize(
    ("weight", "slots", "number"),
    [
        (2.6, 1, 3),
        (2.6, 2, 2),  # one round, of 1.3 each, not a second one with a third task beside nothing
        (3.1, 2, 4),
        (2.6, 3, 3),
        (2.6, 4, 4),
        (2.6, 8, 5),  # of half the weight, rather than leave slots empty
        (0.9, 8, 1),
        (0.3, 2, 1),
        (9.0, 4, 8),
        (11.0, 4, 12),
    ],
)
def test_parallel_work_finishes_completely(weight: float, slots: int, number: int) -> None:
    found = [Weighed(QueueSlice(StoreName("s", "s"), "t", 0, 0, 1_000_000), weight / 1_000_000)]
    shares = [sum(piece.stop - piece.start for piece in group) for group in partitions(found, 1, slots)]
    assert len(shares) == number
    assert max(shares) - min(shares) <= 2
    assert len([*partitions(found, 20, slots)]) == 20  # what the user asks for


@pytest.fixture
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REGION_BYTES", 4096)
    monkeypatch.setattr(module, "_REGION_MESSAGES", 1)


def by_region(path: Path, **options: str) -> list[list[Slice]]:
    return plan(SourceOptions.parse({"path": str(path), **options}), by_region=True)


def whole(groups: list[list[Slice]]) -> dict[tuple[str, int], tuple[int, int]]:
    """What is read of each queue, whose slices have to follow each other, and miss nothing."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for group in groups:
        for piece in group:
            assert isinstance(piece, QueueSlice)
            assert piece.start < piece.stop
            first, before = found.get((piece.topic, piece.queue_id), (piece.start, piece.start))
            assert piece.start == before
            found[piece.topic, piece.queue_id] = first, piece.stop
    return found


def test_queues_that_share_a_log_are_read_a_region_of_it_at_a_time(tmp_path: Path, small_regions: None) -> None:
    path = write_store(tmp_path / "s", many(4000), segment_bytes=1 << 16)
    groups = by_region(path, minPartitions="5")
    assert len(groups) == 5
    assert whole(groups) == {**{(t, q): (0, 1000) for t in ("t", "orders") for q in (0, 1)}, ("seed", 0): (0, 1)}
    with ReadOnlyMessageStore(path) as store:
        end = store.max_offset
        for group in groups:
            units = [store.units(piece.topic, piece.queue_id, piece.start, piece.stop - piece.start) for piece in group]
            low = min(int(each["physical_offset"][0]) for each in units)
            high = max(int(each["physical_offset"][-1]) for each in units)
            assert high - low < end / 5 + 3 * 4096


def test_a_region_has_no_fewer_messages_than_a_slice_is_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REGION_BYTES", 4096)
    path = write_store(tmp_path / "s", many(4000), segment_bytes=1 << 16)
    alone = plan(SourceOptions.parse({"path": str(path)}))
    assert by_region(path) == alone
    monkeypatch.setattr(module, "_REGION_MESSAGES", 100)
    [group] = by_region(path)
    assert len(alone[0]) < len(group) <= 4000 / 100
    monkeypatch.setattr(module, "_MAX_REGION_BYTES", 4096)  # so that a window would be left before the next queue comes
    assert by_region(path) == alone


def test_partial_reads_go_by_queue(tmp_path: Path, small_regions: None) -> None:
    path = write_store(tmp_path / "s", many(4000), segment_bytes=1 << 16)
    assert len(by_region(path)[0]) > 100
    for groups in (by_region(path, tags="a"), by_region(path, keys="k1,k2")):
        assert sum(map(len, groups)) <= 10


@given(records=st.lists(odd_records(), min_size=1, max_size=60), least=st.integers(1, 4), bytes_=st.integers(1, 3000))
def test_whatever_is_in_a_log_nothing_is_read_twice_or_left_out(records: list[Odd], least: int, bytes_: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_REGION_BYTES", bytes_)
        patch.setattr(module, "_REGION_MESSAGES", 1)
        path = write_store(Path(folder) / "s", records)
        options = {"minPartitions": str(least), "includeSystemTopics": "true"}
        assert whole(by_region(path, **options)) == planned(path, includeSystemTopics="true")


def test_hole_in_a_queue_is_left(tmp_path: Path, small_regions: None) -> None:
    """Of the first, the last and those between, any may say nothing."""
    path = write_store(tmp_path / "s", many(4000), segment_bytes=1 << 16)
    for slots in ((0,), (999,), (400, 500, 600)):
        for slot in slots:
            file = path / "consumequeue" / "t" / "0" / f"{slot // 64 * 64 * 20:020d}"
            data = bytearray(file.read_bytes())
            data[slot % 64 * 20 : (slot % 64 + 1) * 20] = bytes(20)
            file.write_bytes(data)
        found = by_region(path, failOnDataLoss="false")  # without its last unit a queue has lost a message
        assert whole(found) == planned(path, failOnDataLoss="false")
        assert sum(map(len, found)) > 100  # the other queues are cut all the same


@pytest.mark.parametrize("heavy", ["none", "first", "last"])
def test_messages_that_weigh_more_than_a_partition_leave_the_others_theirs(heavy: str) -> None:
    """What they weigh too much was once taken off all partitions behind them, which then had a message each."""
    name = StoreName("s", "/s")
    found = [Weighed(QueueSlice(name, "t", 0, 0, 10_000), 1e-5)]
    if heavy != "none":
        found.insert(heavy == "last", Weighed(QueueSlice(name, "t", 1, 0, 5), 1e-2))
    groups = [*partitions(found, 200)]
    assert 130 < len(groups) <= 200
    assert heavy == "last" or len(groups) == 200  # the last are met when the others have theirs
    sizes = [sum(piece.stop - piece.start for piece in group) for group in groups]
    assert sorted(sizes)[10] > 40


def test_tag_filters_take_fewer_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task costs as much as reading the units of a hundred thousand messages."""
    monkeypatch.setattr(module, "_PARTITION_MESSAGES", 250)
    path = write_store(tmp_path / "s", many(4000), segment_bytes=1 << 16)
    assert [len(by_region(path)), len(by_region(path, tags="a"))] == [17, 5]
    assert whole(by_region(path, tags="a")) == whole(by_region(path))
