"""Batches of a message or two of each of many queues, as streams have them: read together they are what each is alone,
whatever has become of the store between two triggers. Without Spark."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import MQStoreError
from mqstore.columnar.columns import default_columns
from mqstore.columnar.rows import Policy
from mqstore.errors import OffsetOutOfRangeError, TopicNotFoundError
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading import tasks
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.reading.plan import QueueSlice
from mqstore.jobs.reading.progress import StreamProgress
from mqstore.jobs.reading.tasks import read_slices
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.columnar.support import Odd, many, odd_records, rows_of, write_store
from tests.jobs.damages import DAMAGES

NAMES = ("topic", "queue_id", "queue_offset", "body")
Rows = list[dict[str, Any]]


def pieces_of(path: Path, size: int) -> list[QueueSlice]:
    """All of a store, cut small."""
    name = StoreName("s", str(path))
    found = []
    with ReadOnlyMessageStore(path) as store:
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
    tmp_path_factory: pytest.TempPathFactory, records: list[Odd], profile: str, size: int, options: dict[str, str]
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


@pytest.mark.parametrize(
    "harm", [spoil_unit, repeat_unit, *(each.apply for each in DAMAGES)], ids=lambda harm: harm.__name__
)
def test_findings_of_a_set_equal_those_of_each_store(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    path = write_store(tmp_path / "s", many(60))
    pieces = pieces_of(path, 4)
    harm(path)
    for options in ({}, {"failOnDataLoss": "false"}, {"onCorrupt": "skip"}, {"onCorrupt": "keep"}):
        columns = default_columns(keep=options.get("onCorrupt") == "keep")
        together, alone = both_ways(path, pieces, columns, **options)
        assert together == alone, options


def test_only_read_queues_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(OffsetOutOfRangeError, match=r"queue 7: .*offset 9"):
        StreamProgress(options).partitions(start, end)


@pytest.mark.parametrize("topic", ["../t", "..", "a/b", "x" * 300, "t\0", "no", ""])
def test_a_checkpoint_that_names_no_queue_leads_nowhere_else(tmp_path: Path, topic: str) -> None:
    path = write_store(tmp_path / "s", many(20))
    shutil.copytree(path / "consumequeue" / "t", path / "t")
    start, end = ({"v": 1, "s": {str(path): {topic: {"0": n}}}} for n in (0, 2))
    given = {"path": str(path), "failOnDataLoss": "false"}
    assert StreamProgress(SourceOptions.parse(given).for_stream()).partitions(start, end) == []
    with pytest.raises(TopicNotFoundError, match="no longer in"):
        StreamProgress(SourceOptions.parse({"path": str(path)}).for_stream()).partitions(start, end)
