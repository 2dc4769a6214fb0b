"""Progress of a stream, without Spark: an engine as Spark's is (spark#stream-calls), that may stop anywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import SimulatedClock
from mqstore.broker.background.context import open_tables
from mqstore.errors import ConfigError, NotAStoreError, OffsetOutOfRangeError, TopicNotFoundError
from mqstore.jobs.options.options import Key, SourceOptions
from mqstore.jobs.reading.progress import Limit, StreamProgress, decode_offset, encode_offset
from mqstore.jobs.reading.tasks import read_slices
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.columnar.support import exported, many, write_store
from tests.conftest import Golden
from tests.log.support import open_store

T0 = 1_700_000_000_000
Row = tuple[str, str, int, int]
COLUMNS = ["store", "topic", "queue_id", "queue_offset"]


def options(path: Any, **given: str) -> SourceOptions:
    return SourceOptions.parse({"path": str(path), **given}).for_stream()


class Engine:
    """A checkpoint, a sink that takes each batch once, and runs of a stream between them."""

    def __init__(self, **given: str) -> None:
        self.options = SourceOptions.parse({"columns": ",".join(COLUMNS), **given}).for_stream()
        self.limit: Limit | None = None
        self.logged: list[str] = []
        self.committed: set[int] = set()
        self.sink: dict[int, list[Row]] = {}

    def offset(self, number: int) -> dict[str, Any]:
        return json.loads(self.logged[number])  # type: ignore[no-any-return]

    def run(self, *, stop: str = "", target: bool = False, batches: int = 1000) -> None:
        """Until there is nothing new; with `stop` "logged" or "read" the last batch comes no further than that."""
        progress = StreamProgress(self.options)
        if target:
            progress.fix_target()
        last = len(self.logged) - 1
        if last >= 0 and last not in self.committed:
            start = self.offset(last - 1) if last else progress.initial()
            self._batch(progress, last, start)
        for _ in range(batches):
            number = len(self.logged)
            start = self.offset(number - 1) if number else progress.initial()
            end = progress.latest(start, self.limit)
            if not number:
                assert progress.initial() == start
            if number and json.dumps(end) == self.logged[-1]:
                return
            self.logged.append(json.dumps(end))
            if number:
                progress.commit(self.offset(number - 1))
            if stop == "logged":
                return
            self._batch(progress, number, start, commit=stop != "read")
            if stop:
                return

    def _batch(self, progress: StreamProgress, number: int, start: dict[str, Any], *, commit: bool = True) -> None:
        rows: list[Row] = []
        for group in progress.partitions(start, self.offset(number)):
            for batch in read_slices(self.options, COLUMNS, "binary", group):
                rows += [tuple(row.values()) for row in batch.to_pylist()]
        if self.options.fail_on_data_loss and number in self.sink:
            assert sorted(self.sink[number]) == sorted(rows), "a batch that is replayed is another"
        self.sink[number] = rows
        if commit:
            self.committed.add(number)

    @property
    def rows(self) -> list[Row]:
        return [row for number in sorted(self.sink) for row in self.sink[number]]


class World:
    """Stores in a folder, being written, and what was ever stored in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stores: dict[str, MessageStore] = {}
        self.all: dict[Row, int] = {}
        """Row -> physical offset."""

    def append(self, store: int, topic: str, queue_id: int, count: int) -> None:
        path = str(self.folder / f"s{store}")
        opened = self.stores.get(path)
        if opened is None:
            opened = self.stores[path] = open_store(Path(path))
        for _ in range(count):
            put = opened.put(topic, bytes(500), queue_id)
            self.all[path, topic, queue_id, put.offset] = put.physical_offset
        opened.dispatch()

    def retain(self, store: int) -> None:
        """Drop the older half of a store's log."""
        opened = self.stores.get(str(self.folder / f"s{store}"))
        if opened is not None:
            opened.flush()
            opened.drop_before((opened.min_offset + opened.max_offset) // 2)

    def low(self, row: Row) -> int:
        return self.stores[row[0]].offsets(row[1], row[2])[0]

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "w")
    world.folder.mkdir()
    yield world
    world.close()


@pytest.fixture
def path(world: World) -> Path:
    """A store of `world`, which has ten messages in queue 0 of `t`."""
    world.append(0, "t", 0, 10)
    return world.folder / "s0"


def in_order(rows: list[Row]) -> bool:
    """Whether each queue's rows come in order, none twice. Rows of one batch come in any order of queues."""
    seen: dict[tuple[str, str, int], int] = {}
    for row in rows:
        if seen.get(row[:3], -1) >= row[3]:
            return False
        seen[row[:3]] = row[3]
    return True


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 1), st.sampled_from("tu"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("retain"), st.integers(0, 1)),
        st.tuples(
            st.just("run"),
            st.sampled_from(["", "", "logged", "read"]),
            st.booleans(),
            st.sampled_from([None, Limit(1, "messages"), Limit(5, "messages"), Limit(1500, "bytes")]),
        ),
    ),
    min_size=3,
    max_size=14,
)


@given(steps=_STEPS, start=st.sampled_from(["earliest", "latest"]), scan=st.sampled_from(["queue", "queue", "log"]))
def test_each_message_comes_once_and_in_order_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any], start: str, scan: str
) -> None:
    """Appends, new queues, new stores, retention, limits, and runs that die between any two steps of a batch."""
    world = World(tmp_path_factory.mktemp("world"))
    try:
        world.append(0, "t", 0, 3)
        engine = Engine(
            path=f"{world.folder}/*",
            startingOffsets=start,
            failOnDataLoss="false",
            readBy=scan,
            columns=",".join(COLUMNS),
        )
        removed: set[Row] = set()
        for kind, *what in [*steps, ("run", "", False, None)]:
            if kind == "append":
                world.append(*what)
            elif kind == "retain":
                world.retain(*what)
                removed |= {row for row in world.all if row[3] < world.low(row)}
            else:
                stop, target, engine.limit = what
                if scan == "log":
                    engine.limit = None
                before = len(engine.logged)
                engine.run(stop=stop, target=target)
                for number in range(before, len(engine.logged)):
                    size = len(engine.sink.get(number, ()))
                    assert engine.limit is None or size <= (engine.limit.most if engine.limit.unit == "messages" else 2)
        assert in_order(engine.rows)
        pinned = decode_offset(engine.offset(0), by_log=scan == "log") if start == "latest" else {}
        if scan == "log":
            wanted = {row for row, physical in world.all.items() if physical >= pinned.get(Key(row[0]), 0)}
        else:
            wanted = {row for row in world.all if row[3] >= pinned.get(Key(*row[:3]), 0)}
        assert set(engine.rows) <= wanted, "read before its start"
        assert wanted - set(engine.rows) <= removed, "lost"
    finally:
        world.close()


@pytest.mark.parametrize(("scan", "limit"), [("queue", None), ("queue", Limit(60_000, "bytes")), ("log", None)])
@pytest.mark.parametrize("name", ["crashed", "rolled"])
def test_a_java_store_streams_as_it_exports(golden: Golden, name: str, scan: str, limit: Limit | None) -> None:
    path = golden(name).path
    engine = Engine(
        path=str(path),
        startingOffsets="earliest",
        readBy=scan,
        includeSystemTopics="true",
        onCorrupt="fail" if scan == "queue" else "skip",
    )
    engine.limit = limit
    engine.run()
    expected = {(str(path), line["topic"], line["queue_id"], line["queue_offset"]) for line in exported(path)}
    assert set(engine.rows) == expected
    assert in_order(engine.rows)


# -- start -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 messages in each of two queues of `t` and of `orders`, message i at T0 + i; and one of `seed`."""
    return write_store(tmp_path_factory.mktemp("progress") / "s", many(80))


def initial(path: Any, **given: str) -> dict[str, Any]:
    value = StreamProgress(options(path, subscribe="t", **given)).initial()
    assert value == json.loads(json.dumps(value))
    assert value["v"] == 1
    return value["s"][str(path)]["t"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"0": 20, "1": 20}),
        ({"startingOffsets": "latest"}, {"0": 20, "1": 20}),
        ({"startingOffsets": "earliest"}, {"0": 0, "1": 0}),
        ({"startingOffsets": '{"t":{"0":7}}'}, {"0": 7, "1": 0}),
        ({"startingOffsets": '{"t":{"0":-1,"1":-2}}'}, {"0": 20, "1": 0}),
        ({"startingTimestamp": str(T0 + 41)}, {"0": 11, "1": 10}),
        ({"startingOffsetsByTimestamp": f'{{"t":{{"0":{T0 + 41},"1":{T0 + 3}}}}}'}, {"0": 11, "1": 1}),
        ({"startingOffsetsByTimestamp": f'{{"t":{{"0":{T0 + 41}}}}}'}, {"0": 11, "1": 20}),
        ({"startingOffsetsByTimestamp": '{"t":{"1":9999999999999}}', "startingOffsets": "earliest"}, {"0": 0, "1": 20}),
    ],
)
def test_stream_begins_at_its_option_or_the_end(store: Path, given: Any, expected: Any) -> None:
    assert initial(store, **given) == expected


def test_the_log_of_a_store_begins_at_its_end_or_its_oldest_record(store: Path) -> None:
    latest = StreamProgress(options(store, readBy="log")).initial()
    assert StreamProgress(options(store, readBy="log", startingOffsets="earliest")).initial() == {
        "v": 1,
        "p": {str(store): 0},
    }
    assert latest["p"][str(store)] > 80 * 91
    for name, value in (("startingTimestamp", "5"), ("startingOffsets", '{"t":{"0":5}}'), ("assign", '{"t":[0]}')):
        with pytest.raises(ConfigError, match=f"option {name} needs queues, .*: leave .* out, or give readBy"):
            StreamProgress(options(store, readBy="log", **{name: value})).initial()


def test_missing_start_fails_by_default(world: World) -> None:
    world.append(0, "t", 0, 40)
    world.retain(0)
    path = world.folder / "s0"
    low = world.low((str(path), "t", 0, 0))
    with pytest.raises(OffsetOutOfRangeError, match=f"{low} messages are lost"):
        initial(path, startingOffsets='{"t":{"0":0}}')
    assert initial(path, startingOffsets='{"t":{"0":0}}', failOnDataLoss="false") == {"0": low}
    with pytest.raises(NotAStoreError):
        StreamProgress(options(world.folder / "no")).initial()
    assert StreamProgress(options(world.folder / "no", failOnDataLoss="false")).initial() == {"v": 1, "s": {}}


@pytest.mark.parametrize(
    ("given", "pins"),
    [
        ({}, True),
        ({"startingOffsets": "latest"}, True),
        ({"startingTimestamp": str(T0 + 41)}, True),
        ({"startingOffsets": '{"t":{"0":-1}}'}, True),
        ({"startingOffsets": "earliest"}, False),
        ({"startingOffsets": '{"t":{"0":5}}'}, False),
    ],
)
def test_a_start_that_depends_on_the_moment_is_pinned_by_an_empty_batch(
    world: World, path: Path, given: Any, pins: bool
) -> None:
    progress = StreamProgress(options(path, **given))
    start = progress.initial()
    world.append(0, "t", 0, 5)
    assert progress.initial() == start
    assert (progress.latest(start) == start) is pins
    end = progress.latest(start)
    assert end["s"][str(path)]["t"]["0"] == 15


@pytest.mark.parametrize("stop", ["logged", "read"])
def test_a_first_batch_that_fails_loses_nothing_though_latest_moves_on(world: World, path: Path, stop: str) -> None:
    engine = Engine(path=str(path))
    engine.run(stop=stop)
    world.append(0, "t", 0, 5)
    engine.run()
    assert [row[3] for row in engine.rows] == [*range(10, 15)]


def test_repeated_first_batch_continues_the_run(path: Path) -> None:
    engine = Engine(path=str(path), startingTimestamp="0")
    engine.run(stop="logged")
    engine.run(target=True)
    assert [row[3] for row in engine.rows] == [*range(10)]


def test_a_subscribed_topic_that_no_store_has_fails_the_stream(
    world: World, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelt name was no row for ever, with a warning that nobody reads. Kafka's source fails."""
    world.append(1, "u", 0, 10)
    given = {"path": f"{world.folder}/*", "startingOffsets": "earliest"}

    def begin(**more: str) -> None:
        StreamProgress(SourceOptions.parse({**given, **more}).for_stream()).initial()

    begin(subscribe="t,u")
    with pytest.raises(TopicNotFoundError, match=r"the topic 'soon', which option subscribe names \(failOnDataLoss=fa"):
        begin(subscribe="t,soon")
    assert caplog.text == ""
    for _ in range(2):
        begin(subscribe="t,soon", failOnDataLoss="false")
    begin(subscribePattern="t|soon")
    assert [record.message for record in caplog.records] == [
        "no store has the topic 'soon', which option subscribe names; failOnDataLoss=false waits for it; so does "
        "subscribePattern"
    ]


# -- offsets -----------------------------------------------------------------------------------------------------------


def test_a_name_that_a_store_was_given_is_no_path(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.folder)
    world.append(0, "t", 0, 10)
    world.append(1, "t", 0, 10)
    paths = json.dumps({"s0": str(world.folder / "s1"), "s1": str(world.folder / "s0")})
    progress = StreamProgress(SourceOptions.parse({"paths": paths}).for_stream())
    assert progress.latest(at("s0", "t", 0, 4)) == {"v": 1, "s": {name: {"t": {"0": 10}} for name in ("s0", "s1")}}


@pytest.mark.parametrize(
    ("value", "by_log", "says"),
    [
        ({"v": 1, "p": {"s": 5}}, False, "readBy=log, but this one has readBy=queue.*new checkpoint"),
        ({"v": 1, "s": {}}, True, "readBy=queue, but this one has readBy=log"),
        *(
            (value, False, "unknown offset, .*, not one of version 1")
            for value in ({"v": 2, "s": {}}, {"index": 4}, [5])
        ),
        ({"v": 1, "s": {"a": {"t": {"0": "5"}}}}, False, "damaged"),
        ({"v": 1, "s": {"a": {"t": {"x": 5}}}}, False, "damaged"),
        ({"v": 1, "s": {"a": 5}}, False, "damaged"),
        ({"v": 1}, False, "damaged"),
        ({"v": 1, "p": {"s": -1}}, True, "damaged"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(store: Path, value: Any, by_log: bool, says: str) -> None:
    progress = StreamProgress(options(store, readBy="log" if by_log else "queue"))
    with pytest.raises(ConfigError, match=says):
        progress.latest(value)
    with pytest.raises(ConfigError, match=says):
        progress.partitions({"v": 1, "p": {}} if by_log else {"v": 1, "s": {}}, value)


# -- from offset to offset ---------------------------------------------------------------------------------------------


def test_a_run_that_ends_reads_what_was_there_when_it_began(world: World, path: Path) -> None:
    progress = StreamProgress(options(f"{world.folder}/*", startingOffsets="earliest"))
    progress.fix_target()
    world.append(0, "t", 0, 10)
    world.append(0, "u", 0, 10)
    world.append(1, "t", 0, 10)
    start = progress.initial()
    end = progress.latest(start, Limit(6, "messages"))
    end = progress.latest(end, Limit(6, "messages"))
    assert end == {"v": 1, "s": {str(path): {"t": {"0": 10}}}}
    assert progress.latest(end) == end


def test_a_run_that_ends_begins_no_later_than_it_ends(world: World, path: Path) -> None:
    progress = StreamProgress(options(path))
    progress.fix_target()
    world.append(0, "t", 0, 10)
    start = progress.initial()
    assert start["s"][str(path)]["t"]["0"] == 10
    assert progress.latest(start) == start == progress.latest(start)


def test_checkpoint_rules_a_restart(world: World) -> None:
    world.append(0, "t", 0, 40)
    path = world.folder / "s0"
    engine = Engine(path=str(path), startingOffsets='{"t":{"0":0}}')
    engine.run()
    world.retain(0)
    world.append(0, "t", 0, 5)
    engine.run(target=True)
    assert [row[3] for row in engine.rows] == [*range(45)]


def test_stream_without_start_gets_everything(world: World, path: Path) -> None:
    """pyspark 4.1 calls `latestOffset` without arguments, after a restart before anything else."""
    first = StreamProgress(options(path))
    start = first.initial()
    assert first.latest(None) == start
    world.append(0, "t", 0, 3)
    end = first.latest(None)
    [[piece]] = first.partitions(start, end)
    assert (piece.start, piece.stop) == (10, 13)
    world.append(0, "t", 0, 3)
    again = StreamProgress(options(path))
    [[piece]] = again.partitions(end, again.latest(None))
    assert (piece.start, piece.stop) == (13, 16)


def test_a_start_behind_the_end_is_an_empty_batch(store: Path) -> None:
    """Spark asks for that when its first batch is done again, and latest has moved on."""
    start, end = ({"v": 1, "s": {str(store): {"t": {"0": n}}}} for n in (15, 10))
    assert StreamProgress(options(store)).partitions(start, end) == []
    assert StreamProgress(options(store)).partitions(start, start) == []


def test_only_what_no_power_cut_takes_back_is_read_if_so_wished(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as opened:
        for _ in range(10):
            opened.put("t", b"x", 0)
        opened.flush()
        opened.background.save_checkpoint()
        for _ in range(5):
            opened.put("t", b"x", 0)
        opened.dispatch()
        key = Key(str(tmp_path / "s"), "t", 0)

        def end(isolation: str, start: int) -> int:
            progress = StreamProgress(options(tmp_path / "s", isolation=isolation))
            return decode_offset(progress.latest(encode_offset({key: start}, by_log=False)), by_log=False)[key]

        assert (end("dispatched", 0), end("flushed", 0)) == (15, 10)
        # Who has read further before, with another option, has lost nothing and goes on when the disk has come so far.
        assert end("flushed", 13) == 13


def test_batch_waits_for_messages_or_for_the_longest_delay(world: World) -> None:
    clock = SimulatedClock()
    given = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "10", "maxTriggerDelay": "1m"}
    progress = StreamProgress(options(world.folder / "s0", **given), clock)
    world.append(0, "t", 0, 3)
    at = progress.latest(progress.initial())  # the first batch of a run waits for nothing
    steps = ((0, 0, 3), (4, 59_000, 3), (5, 0, 3), (1, 0, 13), (1, 59_999, 13), (0, 1, 14), (10, 1, 24))
    for messages, passed_ms, expected in steps:
        world.append(0, "t", 0, messages)
        clock.advance(passed_ms)
        at = progress.latest(at)
        assert at["s"][str(world.folder / "s0")]["t"]["0"] == expected, (messages, passed_ms)
    world.append(0, "t", 0, 1)
    progress.fix_target()  # a run that ends with what there is does not wait
    assert progress.latest(at)["s"][str(world.folder / "s0")]["t"]["0"] == 25


def test_new_messages_are_reported(path: Path) -> None:
    progress = StreamProgress(options(path, startingOffsets="earliest"))
    assert progress.reported() is None
    end = progress.latest(progress.initial(), Limit(3, "messages"))
    assert end["s"][str(path)]["t"]["0"] == 3
    assert progress.reported() == {"v": 1, "s": {str(path): {"t": {"0": 10}}}}


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "loaded"),
    [({"subscribe": "t3"}, 2), ({"assign": '{"t3": [1]}'}, 1), ({"subscribe": "t3,none"}, 2), ({}, 40)],
)
def test_idle_trigger_loads_only_named_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], loaded: int
) -> None:
    """A stream of one queue cost what all 10,000 of the store cost. The first look of a run sees all, and with them
    whether any are lost."""
    with MessageStore(tmp_path / "s") as store:
        for i in range(40):
            store.put(f"t{i // 2}", b"x", queue_id=i % 2)
    calls: list[str] = []
    load = ConsumeQueue.load

    def noted(queue: ConsumeQueue, *, exact: bool) -> None:
        calls.append(queue.directory)
        load(queue, exact=exact)

    monkeypatch.setattr(ConsumeQueue, "load", noted)
    progress = StreamProgress(options(tmp_path / "s", failOnDataLoss="false", startingOffsets="earliest", **given))
    start = progress.initial()
    for _ in range(3):
        calls.clear()
        end = progress.latest(start)
        assert len(calls) == loaded
        assert progress.latest(end) == end
    assert sum(sum(each.values()) for topics in end["s"].values() for each in topics.values()) == loaded


def at(path: Any, topic: str, queue_id: int, offset: int) -> dict[str, Any]:
    return {"v": 1, "s": {str(path): {topic: {str(queue_id): offset}}}}


def test_messages_that_retention_took_fail_the_stream_or_are_passed_over(world: World) -> None:
    world.append(0, "t", 0, 40)
    world.append(0, "t", 1, 1)
    path = world.folder / "s0"
    world.retain(0)
    low = world.low((str(path), "t", 0, 0))
    start, end = at(path, "t", 0, 2), at(path, "t", 0, 40)
    says = (
        rf"s0: t, queue 0: offset 2 is not in {low}..40: {low - 2} messages are lost "
        r"\(failOnDataLoss=false"
    )
    with pytest.raises(OffsetOutOfRangeError, match=says):
        StreamProgress(options(path)).latest(start)
    with pytest.raises(OffsetOutOfRangeError, match=says):  # of a batch that was logged before
        StreamProgress(options(path)).partitions(start, end)
    lenient = StreamProgress(options(path, failOnDataLoss="false", subscribe="t"))
    assert lenient.latest(start) == {"v": 1, "s": {str(path): {"t": {"0": 40, "1": 1}}}}
    [[piece]] = lenient.partitions(start, end)
    assert (piece.start, piece.stop) == (low, 40)
    assert lenient.partitions(start, at(path, "t", 0, 5)) == []


def test_first_loss_is_reported_and_others_counted(world: World) -> None:
    for queue_id in range(3):
        world.append(0, "t", queue_id, 20)
    world.append(0, "t", 0, 60)
    world.retain(0)
    start = {"v": 1, "s": {str(world.folder / "s0"): {"t": {"0": 0, "1": 0, "2": 0}}}}
    with pytest.raises(OffsetOutOfRangeError, match=r"queue 0: .*lost\. 2 more queues have lost messages"):
        StreamProgress(options(world.folder / "s0")).latest(start)


def test_allowed_losses_are_reported_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody heard of them: with failOnDataLoss=false a stream just had fewer messages."""
    world.append(0, "t", 0, 40)
    world.retain(0)
    path = world.folder / "s0"
    low = world.low((str(path), "t", 0, 0))
    lenient = StreamProgress(options(path, failOnDataLoss="false"))
    for _ in range(3):
        lenient.latest(at(path, "t", 0, 2))
    [told] = [text for text in caplog.messages if "lost" in text]
    assert f"t, queue 0: offset 2 is not in {low}..40" in told
    assert told.endswith(f"{low - 2} messages are lost; skipped because of failOnDataLoss=false")


def test_a_queue_that_went_back_fails_the_stream_or_is_read_from_its_end(path: Path) -> None:
    ahead = at(path, "t", 0, 15)
    with pytest.raises(OffsetOutOfRangeError, match=r"offset 15 is not in 0..10: 5 messages.*isolation"):
        StreamProgress(options(path)).latest(ahead)
    lenient = StreamProgress(options(path, failOnDataLoss="false"))
    assert lenient.latest(ahead) == at(path, "t", 0, 10)
    assert lenient.partitions(ahead, at(path, "t", 0, 10)) == []
    # A batch that was logged, and whose tail was lost then.
    with pytest.raises(OffsetOutOfRangeError, match="5 messages are missing"):
        StreamProgress(options(path)).partitions(at(path, "t", 0, 8), ahead)
    [[piece]] = lenient.partitions(at(path, "t", 0, 8), ahead)
    assert (piece.start, piece.stop) == (8, 10)


def test_missing_queue_or_store_fails_or_waits(world: World, path: Path) -> None:
    s0, gone = str(path), str(world.folder / "gone")
    for start, error, says in (
        (
            at(s0, "no", 3, 7),
            TopicNotFoundError,
            "no, queue 3 is to be read from offset 7, but it is no longer in .*s0",
        ),
        (at(gone, "t", 0, 7), NotAStoreError, "offset 7, but the options no longer name store '.*gone'"),
    ):
        with pytest.raises(error, match=says):
            StreamProgress(options(s0)).latest(start)
        lenient = StreamProgress(options(s0, failOnDataLoss="false"))
        end = lenient.latest(start)
        assert decode_offset(end, by_log=False) == {**decode_offset(start, by_log=False), Key(s0, "t", 0): 10}
    more = json.loads(json.dumps(start).replace(": 7", ": 9"))
    named = StreamProgress(SourceOptions.parse({"paths": json.dumps([s0, gone])}).for_stream())
    for ask in (lambda: named.latest(start), lambda: named.partitions(start, more)):
        with pytest.raises(NotAStoreError, match=r"offset 7, but .*gone is no longer a store"):
            ask()
    with pytest.raises(NotAStoreError) as caught:
        StreamProgress(options(s0)).partitions(start, more)
    assert str(caught.value).endswith(
        f"They name '{s0}': use the path or id that the query was started with, or paths={{'{gone}': path}}"
    )
    assert "failOnDataLoss" not in str(caught.value)  # which would read the store again, if it is there by another name
    assert lenient.partitions(start, more) == []


def test_store_outside_a_batch_is_not_opened(world: World, path: Path) -> None:
    """A fleet has many; and one that is away does no harm to a batch that was logged without it."""
    s0, gone = str(path), str(world.folder / "gone")
    start, end = ({"v": 1, "s": {gone: {"t": {"0": 7}}, s0: {"t": {"0": n}}}} for n in (5, 9))
    [[piece]] = StreamProgress(options(s0)).partitions(start, end)
    assert (piece.store.path, piece.start, piece.stop) == (s0, 5, 9)


def test_a_store_that_went_away_goes_on_where_it_was_when_it_is_back(world: World, path: Path) -> None:
    world.append(1, "t", 0, 10)
    world.close()
    strict = {"path": f"{world.folder}/*", "startingOffsets": "earliest"}
    engine = Engine(**strict)
    engine.run()
    shutil.move(world.folder / "s1", world.folder.parent / "away")
    with pytest.raises(NotAStoreError, match="s1"):
        engine.run()
    lenient = Engine(**strict, failOnDataLoss="false")
    lenient.logged, lenient.committed, lenient.sink = engine.logged, engine.committed, engine.sink
    lenient.run()
    shutil.move(world.folder.parent / "away", world.folder / "s1")
    with open_store(world.folder / "s1") as opened:
        opened.put("t", b"x", 0)
    lenient.run()
    assert len(lenient.rows) == 21
    assert in_order(lenient.rows)


def test_a_topic_that_is_no_longer_wanted_is_no_loss_and_keeps_its_place(world: World, path: Path) -> None:
    world.append(0, "u", 0, 10)
    start = {"v": 1, "s": {str(path): {"t": {"0": 4}, "u": {"0": 5}}}}
    progress = StreamProgress(options(path, subscribe="t"))
    end = {"v": 1, "s": {str(path): {"t": {"0": 10}, "u": {"0": 5}}}}
    assert progress.latest(start) == end
    assert progress.reported() == end
    assert StreamProgress(options(path, assign='{"t":[0]}')).latest(start)["s"][str(path)]["u"] == {"0": 5}


def test_a_topic_that_is_deleted_takes_nothing_from_a_stream_of_the_log(tmp_path: Path) -> None:
    """Its records stay in the log, though no queue lists them: the stream has come further than the queues tell."""
    path = tmp_path / "s"
    with open_store(path) as opened:
        for topic in ("t", "u"):
            opened.put(topic, b"x", 0)
    start = StreamProgress(options(path, readBy="log")).initial()
    shutil.rmtree(path / "consumequeue" / "u")
    progress = StreamProgress(options(path, readBy="log"))
    assert progress.latest(start) == start
    beyond = {"v": 1, "p": {str(path): start["p"][str(path)] + 50}}
    with pytest.raises(OffsetOutOfRangeError, match=r"the log: .*50 bytes are missing"):
        progress.latest(beyond)


# -- progress as a group -----------------------------------------------------------------------------------------------


def published(path: Path) -> dict[str, dict[str, int]]:
    return json.loads((path / "config/spark/groups/sp.json").read_text())["offsets"]  # type: ignore[no-any-return]


def test_processed_offsets_show_as_a_group(world: World, path: Path) -> None:
    world.append(1, "t", 0, 4)
    engine = Engine(path=f"{world.folder}/*", startingOffsets="earliest", commitGroup="sp")
    engine.run(stop="logged")
    assert [published(world.folder / name) for name in ("s0", "s1")] == [{"t": {"0": 0}}] * 2  # not processed yet
    engine.run()
    assert [published(world.folder / name) for name in ("s0", "s1")] == [{"t": {"0": 10}}, {"t": {"0": 4}}]
    with ReadOnlyMessageStore(path) as opened:
        assert open_tables(opened).offsets.of_group("sp") == {("t", 0): 10}


def test_progress_without_start_is_that_of_commits(path: Path) -> None:
    """Spark 4.1 does not say where the last batch ended."""
    progress = StreamProgress(options(path, startingOffsets="earliest", commitGroup="sp"))
    progress.initial()
    end = progress.latest(None)
    assert not (path / "config/spark").exists()
    progress.commit(end)
    assert published(path) == {"t": {"0": 10}}


def test_topics_that_are_not_read_any_more_are_left_out(path: Path) -> None:
    """They would lag for good, and retention would wait for them."""
    end = {"v": 1, "s": {str(path): {"t": {"0": 4, "1": 5}, "u": {"0": 6}, "%RETRY%g": {"0": 7}}}}
    for chosen, expected in (
        ({"subscribe": "t"}, {"t": {"0": 4, "1": 5}}),
        ({"assign": '{"t":[1],"u":[1]}'}, {"t": {"1": 5}}),
        ({"subscribePattern": "u|%RETRY%.*"}, {"u": {"0": 6}}),
        ({}, {"t": {"0": 4, "1": 5}, "u": {"0": 6}}),
    ):
        StreamProgress(options(path, commitGroup="sp", **chosen)).commit(end)
        assert published(path) == expected


def test_new_stream_may_start_at_a_group(path: Path) -> None:
    """Though its owner has not taken it over."""
    StreamProgress(options(path, commitGroup="sp")).commit(at(path, "t", 0, 6))
    assert StreamProgress(options(path, startingGroup="sp")).initial() == at(path, "t", 0, 6)


def test_progress_is_written_when_it_moves(world: World, path: Path) -> None:
    progress = StreamProgress(options(path, commitGroup="sp"))
    file = path / "config/spark/groups/sp.json"
    for offset, written in ((5, True), (5, False), (6, True), (4, True)):
        progress.commit(at(path, "t", 0, offset))
        assert file.exists() is written
        file.unlink(missing_ok=True)
    progress.commit(at(world.folder / "gone", "t", 0, 5))  # no option names it
    StreamProgress(options(path)).commit(at(path, "t", 0, 9))
    assert not file.exists()


def test_progress_of_a_store_that_is_gone_makes_none(tmp_path: Path) -> None:
    StreamProgress(options(tmp_path / "gone", commitGroup="sp")).commit(at(tmp_path / "gone", "t", 0, 5))
    assert not (tmp_path / "gone").exists()


def test_progress_that_cannot_be_written_says_so(path: Path) -> None:
    (path / "config").mkdir(exist_ok=True)
    (path / "config" / "spark").write_text("in the way")
    progress = StreamProgress(options(path, commitGroup="sp"))
    with pytest.raises(ConfigError, match=r"option commitGroup='sp'.*s0.*leave out the option"):
        progress.commit(at(path, "t", 0, 5))


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"endingOffsets": "earliest"}, "option endingOffsets is for spark.read, not for spark.readStream"),
        ({"endingOffsets": "latest"}, "option endingOffsets is for spark.read, not for spark.readStream"),
        ({"endingTimestamp": "5"}, "option endingTimestamp is for spark.read,"),
        ({"view": "queues"}, "option view is for spark.read,"),
        ({"interval": "5m"}, "option interval is for spark.read,"),
        ({"maxOffsetsPerTrigger": "5", "maxBytesPerTrigger": "5"}, "exclude each other"),
        ({"commitGroup": "g", "readBy": "log"}, "option commitGroup needs queues.*use readBy=queue"),
        ({"maxOffsetsPerTrigger": "5", "readBy": "log"}, "option maxOffsetsPerTrigger needs queues"),
        ({"maxBytesPerTrigger": "5", "readBy": "log"}, "option maxBytesPerTrigger needs queues"),
    ],
)
def test_options_of_a_batch_are_refused_for_a_stream(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SourceOptions.parse({"path": "p", **given}).for_stream()


@pytest.mark.parametrize(
    ("name", "value"), [("maxOffsetsPerTrigger", "5"), ("maxBytesPerTrigger", "5"), ("commitGroup", "g")]
)
def test_options_of_a_stream_are_refused_for_a_batch(name: str, value: str) -> None:
    given = SourceOptions.parse({"path": "p", name: value})
    with pytest.raises(ConfigError, match=r"is for spark\.readStream, not for spark\.read:"):
        given.for_batch()
    given.for_stream()
