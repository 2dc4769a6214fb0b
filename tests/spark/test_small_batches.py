"""Batches of a message or two of each of many queues, as streams have them: read together they are what each is alone,
whatever has become of the store between two triggers. Without Spark."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqstore import MQStoreError
from mqstore.engine import MessageStore
from mqstore.errors import CorruptStoreError, NotAStoreError, OffsetOutOfRangeError, TopicNotFoundError
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.spark import tasks
from mqstore.spark.columns import COLUMNS, default_columns
from mqstore.spark.options import SourceOptions
from mqstore.spark.pacing import Limit
from mqstore.spark.plan import QueueSlice, StoreName, plan
from mqstore.spark.progress import StreamProgress
from mqstore.spark.rows import Policy
from mqstore.spark.tasks import read_slices
from tests.holding import held, linux_only, open_files
from tests.log.support import open_store
from tests.spark.support import Odd, many, odd_records, rows_of, write_store

NAMES = ("topic", "queue_id", "queue_offset", "body")
Rows = list[dict[str, Any]]


def pieces_of(path: Path, size: int) -> list[QueueSlice]:
    """All of a store, cut small."""
    name = StoreName("s", str(path))
    found = []
    with MessageStore(path, "r") as store:
        for topic in store.topics():
            for ref in store.queues(topic):
                low, high = store.offsets(*ref)
                found += [QueueSlice(name, *ref, at, min(at + size, high)) for at in range(low, high, size)]
    return found


def read(
    path: Path, runs: Iterable[Sequence[QueueSlice]], columns: Sequence[str], **given: str
) -> tuple[Rows | str, Policy]:
    """Rows of each run of slices that are read together, or an error, and what was counted."""
    options = SourceOptions.parse({"path": str(path), **given})
    policy = tasks.policy_of(options)
    rows: Rows = []
    try:
        for pieces in runs:
            rows += rows_of(read_slices(options, columns, "binary", pieces, policy=policy))
    except MQStoreError as error:
        return f"{type(error).__name__}: {error}", policy
    return rows, policy


def both_ways(path: Path, pieces: Sequence[QueueSlice], columns: Sequence[str], **given: str) -> tuple[Any, Any]:
    """Return the results of `read` for all slices together, and for each of them alone."""
    return read(path, [pieces], columns, **given), read(path, ([piece] for piece in pieces), columns, **given)


# -- reading -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    records=st.lists(odd_records(), min_size=1, max_size=12),
    profile=st.sampled_from(["mqstore", "rocketmq"]),
    size=st.integers(1, 3),
    options=st.sampled_from(
        [
            {},
            {"verify": "false"},
            {"onCorrupt": "keep"},
            {"onCorrupt": "skip", "maxRowsPerBatch": "2"},
            {"onCorrupt": "skip", "decompress": "false"},
            {"onCorrupt": "skip", "filter": "colour IS NOT NULL"},
            {"onCorrupt": "skip", "tags": "a || b"},
        ]
    ),
)
def test_slices_that_are_read_together_are_as_each_alone(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[Odd],
    profile: str,
    size: int,
    options: dict[str, str],
) -> None:
    path = write_store(tmp_path_factory.mktemp("odd") / "s", records, profile)
    pieces = pieces_of(path, size)
    columns = default_columns(keep=options.get("onCorrupt") == "keep")
    together, expected = both_ways(path, pieces, columns, **options)
    assert together == expected


def test_one_batch_has_all_small_slices(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(40))
    options = SourceOptions.parse({"path": str(path)})
    [batch] = read_slices(options, NAMES, "binary", pieces_of(path, 2))
    assert batch.num_rows == 41


@pytest.mark.parametrize("column", [name for name in COLUMNS if name != "error"])
def test_each_column_is_the_same_of_several_queues(tmp_path: Path, column: str) -> None:
    path = write_store(tmp_path / "s", many(40))
    together, alone = both_ways(path, pieces_of(path, 3), [column])
    assert together == alone


def spoil_body(path: Path) -> None:
    log = path / "commitlog" / f"{0:020d}"
    data = log.read_bytes()
    at = data.index(b"000021")
    log.write_bytes(data[:at] + b"x" + data[at + 1 :])


def spoil_unit(path: Path) -> None:
    """It points at a sound record of another queue."""
    ours, theirs = (path / "consumequeue" / topic / "0" / f"{0:020d}" for topic in ("t", "orders"))
    data = ours.read_bytes()
    ours.write_bytes(data[:60] + theirs.read_bytes()[60:80] + data[80:])


def repeat_unit(path: Path) -> None:
    """It points at a later record of its queue."""
    file = path / "consumequeue" / "t" / "0" / f"{0:020d}"
    data = file.read_bytes()
    file.write_bytes(data[:60] + data[100:120] + data[80:])


def cut_hole(path: Path) -> None:
    file = path / "consumequeue" / "t" / "0" / f"{0:020d}"
    data = file.read_bytes()
    file.write_bytes(data[:60] + bytes(20) + data[80:])


def point_far(path: Path) -> None:
    file = path / "consumequeue" / "t" / "0" / f"{0:020d}"
    data = file.read_bytes()
    file.write_bytes(data[:60] + (1 << 50).to_bytes(8, "big") + data[68:])


def lose_log(path: Path) -> None:
    (path / "commitlog" / f"{0:020d}").unlink()


def lose_queue(path: Path) -> None:
    shutil.rmtree(path / "consumequeue" / "t" / "0")


def cut_log(path: Path) -> None:
    log = path / "commitlog" / f"{0:020d}"
    log.write_bytes(log.read_bytes()[:2000])


@pytest.mark.parametrize("given", [{}, {"failOnDataLoss": "false"}, {"onCorrupt": "skip"}, {"onCorrupt": "keep"}])
@pytest.mark.parametrize(
    "harm", [spoil_body, spoil_unit, repeat_unit, cut_hole, point_far, lose_log, lose_queue, cut_log]
)
def test_what_is_not_as_it_should_be_is_told_as_of_each_alone(
    tmp_path: Path, harm: Callable[[Path], None], given: dict[str, str]
) -> None:
    path = write_store(tmp_path / "s", many(60))
    pieces = pieces_of(path, 4)
    harm(path)
    together, alone = both_ways(path, pieces, default_columns(keep=given.get("onCorrupt") == "keep"), **given)
    assert together == alone


def test_only_the_queues_that_are_read_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find the ends of a thousand queues takes longer than to read a few messages of some."""
    path = write_store(tmp_path / "s", [Odd(queue_id=i % 20, body=b"%06d" % i) for i in range(60)])
    pieces = pieces_of(path, 5)
    loaded: list[int] = []
    load = ConsumeQueue.load

    def count(queue: ConsumeQueue, *, exact: bool) -> None:
        loaded.append(queue.queue_id)
        load(queue, exact=exact)

    monkeypatch.setattr(ConsumeQueue, "load", count)
    assert len(read(path, [pieces[:5]], NAMES)[0]) > 5
    assert loaded == [], "their bounds matter only where units are missing"
    start = {"v": 1, "s": {str(path): {"t": {str(q): 0 for q in range(20)}}}}
    end = {"v": 1, "s": {str(path): {"t": {str(q): 1 + (q == 7) for q in range(20)}}}}
    options = SourceOptions.parse({"path": str(path)}).for_stream()
    [group] = StreamProgress(options).partitions(start, end)
    assert sum(piece.stop - piece.start for piece in group) == 21
    assert sorted(loaded) == [*range(20)]
    end["s"][str(path)]["t"]["7"] = 9  # type: ignore[index]
    with pytest.raises(OffsetOutOfRangeError, match=r"queue 7: .*offset 9 is wanted"):
        StreamProgress(options).partitions(start, end)


@pytest.mark.parametrize("topic", ["../t", "..", "a/b", "x" * 300, "t\0", "no", ""])
def test_a_checkpoint_that_names_no_queue_leads_nowhere_else(tmp_path: Path, topic: str) -> None:
    path = write_store(tmp_path / "s", many(20))
    shutil.copytree(path / "consumequeue" / "t", path / "t")
    start, end = ({"v": 1, "s": {str(path): {topic: {"0": n}}}} for n in (0, 2))
    given = {"path": str(path), "failOnDataLoss": "false"}
    assert StreamProgress(SourceOptions.parse(given).for_stream()).partitions(start, end) == []
    with pytest.raises(TopicNotFoundError, match="is not in"):
        StreamProgress(SourceOptions.parse({"path": str(path)}).for_stream()).partitions(start, end)


# -- between two triggers ----------------------------------------------------------------------------------------------


class Run:
    """One run of a stream over a store that things happen to, trigger by trigger."""

    def __init__(self, path: Path, **given: str) -> None:
        self.path = path
        self.options = SourceOptions.parse({"path": str(path), "startingOffsets": "earliest", **given}).for_stream()
        self.progress = StreamProgress(self.options)
        self.at = self.progress.initial()
        self.rows: list[tuple[str, int, int, bytes]] = []

    def trigger(self, before_planning: Callable[[], None] = lambda: None) -> int:
        """A batch; how many messages it has."""
        end = json.loads(json.dumps(self.progress.latest(self.at, Limit(16, "messages"))))
        before_planning()
        groups = self.progress.partitions(self.at, end)
        found = [row for group in groups for row in rows_of(read_slices(self.options, NAMES, "binary", group))]
        self.progress.commit(end)
        self.at = end
        self.rows += [tuple(row.values()) for row in found]
        return len(found)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    with open_store(tmp_path / "s") as opened:
        fill(opened, "t", 4, 4)
        yield opened


def fill(store: MessageStore, topic: str, queues: int, each: int, body: bytes = b"x" * 200) -> None:
    for queue_id in range(queues):
        for _ in range(each):
            store.put(topic, body, queue_id)
    store.dispatch()


def drop_half(store: MessageStore) -> None:
    store.flush()
    store.drop_before((store.min_offset + store.max_offset) // 2)


def test_new_messages_queues_and_topics_are_seen_at_the_next_trigger(store: MessageStore) -> None:
    run = Run(store.path)
    assert (run.trigger(), run.trigger()) == (16, 0)
    fill(store, "t", 1, 3)
    assert run.trigger() == 3
    fill(store, "t", 5, 1)
    fill(store, "u", 1, 2)
    assert (run.trigger(), run.trigger()) == (7, 0)
    assert Counter(row[:2] for row in run.rows)["u", 0] == 2
    assert len(run.rows) == len({row[:3] for row in run.rows}) == 26


@pytest.mark.parametrize("more", [3, 20])
@pytest.mark.parametrize("between", ["triggers", "offset and plan"])
def test_retention_is_seen_at_the_next_trigger_and_when_a_batch_is_planned(
    store: MessageStore, between: str, more: int
) -> None:
    """Also where the one file of a queue stays, and still lists what is gone."""
    strict, lenient = Run(store.path), Run(store.path, failOnDataLoss="false")
    fill(store, "t", 4, more, b"x" * (4000 // more))
    if between == "triggers":
        drop_half(store)
        with pytest.raises(OffsetOutOfRangeError, match="messages are lost"):
            strict.trigger()
        while lenient.trigger():
            pass
    else:
        with pytest.raises(OffsetOutOfRangeError, match="messages are lost"):
            strict.trigger(lambda: drop_half(store))
        while lenient.trigger():
            pass
    kept = [("t", q, n) for q in range(4) for n in range(*store.offsets("t", q))]
    assert sorted(row[:3] for row in lenient.rows) == kept


@pytest.mark.parametrize("each", [1, 4, 9])
@pytest.mark.parametrize("between", ["triggers", "offset and plan"])
def test_a_store_that_is_deleted_and_made_anew_is_not_taken_for_the_old_one(
    tmp_path: Path, each: int, between: str
) -> None:
    """Shorter than it was it is a loss; where it is as long or longer, nobody can tell, but what is read is new."""
    path = tmp_path / "s"
    with open_store(path) as opened:
        fill(opened, "t", 4, 4, b"old")
    run = Run(path)
    if between == "triggers":
        assert run.trigger() == 16

    def renew() -> None:
        shutil.rmtree(path)
        with open_store(path) as opened:
            fill(opened, "t", 4, each, b"new")

    if between == "triggers":
        renew()
    if each == 1:
        with pytest.raises(OffsetOutOfRangeError, match="offset 4 is wanted, but there are 0 to 1"):
            run.trigger(renew if between != "triggers" else lambda: None)
    else:
        done = len(run.rows)
        run.trigger(renew if between != "triggers" else lambda: None)
        assert {row[3] for row in run.rows[done:]} <= {b"new"}
        assert len(run.rows) == 16 + (16 if each == 9 and between == "triggers" else 0)
    shutil.rmtree(path)
    with pytest.raises(NotAStoreError):
        run.trigger()


@pytest.mark.parametrize("recovered", [False, True])
def test_a_stream_goes_on_when_its_writer_was_killed_and_the_store_was_recovered(
    tmp_path: Path, recovered: bool
) -> None:
    path, image = tmp_path / "s", tmp_path / "image"
    with open_store(path) as opened:
        fill(opened, "t", 4, 2)
        run = Run(path)
        assert run.trigger() == 8
        fill(opened, "t", 4, 1)
        shutil.copytree(path, image)  # what a kill leaves
    shutil.rmtree(path)
    image.rename(path)
    if not recovered:
        assert run.trigger() == 4
    with open_store(path) as opened:
        assert not opened.clean_shutdown
        fill(opened, "t", 5, 1)
        assert run.trigger() == (9 if recovered else 5)
    assert run.trigger() == 0
    assert sorted(row[:3] for row in run.rows) == sorted(
        ("t", q, n) for q, count in enumerate((4, 4, 4, 4, 1)) for n in range(count)
    )


@pytest.mark.parametrize("between", ["triggers", "offset and plan"])
def test_a_tail_that_a_power_cut_took_is_lost_and_not_waited_for(tmp_path: Path, between: str) -> None:
    path, before = tmp_path / "s", tmp_path / "before"
    with open_store(path) as opened:
        fill(opened, "t", 2, 2)
        shutil.copytree(path, before)
        fill(opened, "t", 2, 3)

    def restore() -> None:
        shutil.rmtree(path)
        shutil.copytree(before, path)
        open_store(path).close()

    run = Run(path)
    if between == "triggers":
        assert run.trigger() == 10
        restore()
    with pytest.raises(
        OffsetOutOfRangeError, match="offset 5 is wanted, but there are 0 to 2: 3 messages are not there"
    ):
        run.trigger(restore if between != "triggers" else lambda: None)


@linux_only
def test_no_descriptor_or_mapping_stays_over_many_triggers(store: MessageStore) -> None:
    """Nor after one that fails."""
    fill(store, "t", 4, 100)
    store.close()
    run = Run(store.path)
    before = open_files()
    for _ in range(20):
        assert run.trigger() == 16
        assert held(store.path) == []
    for segment in (store.path / "commitlog").iterdir():
        segment.write_bytes(b"\xff" * segment.stat().st_size)
    with pytest.raises(CorruptStoreError):
        run.trigger()
    assert held(store.path) == []
    assert not open_files() - before


def test_a_batch_of_a_plan_is_the_same_small_or_large(tmp_path: Path) -> None:
    """A partition may have both."""
    path = write_store(tmp_path / "s", [Odd(queue_id=min(i, 3), body=b"%06d" % i) for i in range(200)])
    options = SourceOptions.parse({"path": str(path)})
    [group] = plan(options)
    rows = rows_of(read_slices(options, NAMES, "binary", group))
    assert Counter(row["queue_id"] for row in rows if row["topic"] == "t") == {0: 1, 1: 1, 2: 1, 3: 197}
    assert [row["queue_offset"] for row in rows if row["queue_id"] == 3] == [*range(197)]
