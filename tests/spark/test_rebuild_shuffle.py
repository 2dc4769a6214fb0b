"""Queues that Spark sorts for `rebuild`: the same files as of the other ways, whatever is wrong with the log."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqstore import MessageStore
from mqstore.errors import ConfigError
from mqstore.layout.consumequeue import UNIT_DTYPE
from mqstore.spark.jobs import rebuild as job
from mqstore.spark.jobs.rebuild import RebuildReport, plan_ways, rebuild
from mqstore.spark.jobs.shuffle import Row
from mqstore.spark.plan import StoreName
from tests.log.support import files, flip
from tests.spark.support import Odd, many, write_store
from tests.spark.test_rebuild_job import below, contents, recovered
from tests.spark.test_verify_job import damage, damages, with_an_image_inside

SEGMENT = 6_000
LEVEL_3 = b"DELAY\x013\x02"


def renumber(path: Path, changes: Sequence[tuple[int, int]]) -> None:
    """Give records other queue offsets: (which, how much more). Profile `rocketmq` has no checksum over these."""
    with MessageStore(path, "r") as store:
        places = sorted(
            m.physical_offset for topic in store.topics() for ref in store.queues(topic) for m in store.iter(*ref)
        )
    for which, more in changes:
        file, at = divmod(places[which % len(places)], SEGMENT)
        with open(path / "commitlog" / f"{file * SEGMENT:020d}", "r+b") as opened:
            opened.seek(at + 20)
            [offset] = struct.unpack(">q", opened.read(8))
            if -99 < offset + more < 0:  # recovery then leaves units before the first slot as they were
                continue
            opened.seek(at + 20)
            opened.write(struct.pack(">q", offset + more))


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Stores of several segments, with messages that no queue lists and delayed ones."""
    root = tmp_path_factory.mktemp("masters")
    records = many(160)
    records[20:20] = [
        Odd(body=b"half", sys_flag=4),
        *(Odd(topic="SCHEDULE_TOPIC_XXXX", queue_id=2, properties=LEVEL_3) for _ in range(4)),
        Odd(body=b"rolled back", sys_flag=12),
        Odd(body=b"committed", sys_flag=8),
    ]
    return [write_store(root / profile, records, profile, segment_bytes=SEGMENT) for profile in ("rocketmq", "mqstore")]


def in_one_process(
    spark: None,
    tasks: Sequence[Any],
    scatter: Callable[[Any], Iterator[Row]],
    gather: Callable[[Iterator[Row]], Iterator[Any]],
    keys: int,
    title: str,
) -> list[Any]:
    """As `shuffle`, for a sort in memory and two parts, each of which is tried twice."""
    rows = sorted(row for task in reversed(tasks) for row in scatter(pickle.loads(pickle.dumps(task))))
    parts = [[row for row in rows if row[0] % 2 == part] for part in (0, 1)]
    for part in parts:
        [*gather(iter(part[: len(part) // 2]))] if part and part[len(part) // 2 - 1][2][0] else None
    return [outcome for part in parts for outcome in gather(iter(part))]


@pytest.fixture
def sorted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues go the way `shuffle`, and no Spark is needed for it."""
    monkeypatch.setattr(job, "shuffle", in_one_process)
    monkeypatch.setattr(job, "_checked_shuffle", lambda shuffle, with_spark: (shuffle, 0))


def told(report: RebuildReport) -> list[Any]:
    """All of a report but which way queues went."""
    return [*report.stores, *(replace(queue, way="slots") for queue in report.queues)]


# -- the same files ----------------------------------------------------------------------------------------------------

NUMBERS = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from([-3, -1, -1, 1, 2, 40, -(1 << 33), 1 << 40])), max_size=12
)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(which=st.integers(0, 1), numbers=NUMBERS, changes=st.just([]) | damages(), range_bytes=st.integers(300, 9_000))
def test_every_way_builds_what_recovery_builds(
    masters: list[Path],
    sorted_here: None,
    tmp_path_factory: pytest.TempPathFactory,
    which: int,
    numbers: list[tuple[int, int]],
    changes: list[tuple[int, float, float, str]],
    range_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("same")
    theirs = root / "theirs"
    shutil.copytree(masters[which], theirs)
    if which == 0:
        renumber(theirs, numbers)
    damage(theirs, changes)
    reports = []
    for shuffled in ("never", "auto", "always"):
        shutil.copytree(theirs, root / shuffled)
        reports.append(rebuild(None, root / shuffled, shuffle=shuffled, range_bytes=range_bytes))  # type: ignore[arg-type]
        elsewhere = rebuild(None, theirs, dest=root / f"{shuffled}-new", shuffle=shuffled, range_bytes=range_bytes)  # type: ignore[arg-type]
        assert [q.way for q in elsewhere.queues] == [q.way for q in reports[-1].queues]
    expected = recovered(theirs)

    for shuffled, report in zip(("never", "auto", "always"), reports, strict=True):
        assert (below(root / shuffled, "consumequeue"), contents(root / shuffled)) == expected
        assert below(root / f"{shuffled}-new", "consumequeue") == below(root / "never-new", "consumequeue")
        assert [replace(row, store="") for row in told(report)] == [replace(row, store="") for row in told(reports[0])]
        assert ("shuffle" in {queue.way for queue in report.queues}) <= (shuffled != "never")
    shutil.rmtree(root)


def test_of_two_records_with_one_number_the_first_keeps_the_slot(
    masters: list[Path], sorted_here: None, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    shutil.copytree(masters[0], path)
    with MessageStore(path, "r") as store:
        places = [message.physical_offset for message in store.iter("t", 0)]
        order = sorted(
            m.physical_offset for topic in store.topics() for ref in store.queues(topic) for m in store.iter(*ref)
        )
    renumber(path, [(order.index(places[10]), -1)])

    report = rebuild(None, path, shuffle="always")

    assert report.stores[0].odd_records == 1
    with MessageStore(path, "r") as store:
        assert [m.physical_offset for m in store.iter("t", 0)] == places[:10] + places[11:]


def test_only_queues_whose_records_do_not_follow_each_other_are_sorted_and_only_where_it_pays(
    masters: list[Path], sorted_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    shutil.copytree(masters[1], path)
    with MessageStore(path, "r") as store:
        place = [*store.iter("orders", 0)][20].physical_offset
        size = store.max_offset
    flip(path / "commitlog" / f"{place - place % SEGMENT:020d}", place % SEGMENT + 100)

    def ways() -> dict[str, set[tuple[str, int]]]:
        planned = plan_ways(path, range_bytes=900)
        report = rebuild(None, path, dest=tmp_path / os.urandom(4).hex(), range_bytes=900)
        with_records = {(queue.topic, queue.queue_id, queue.way) for queue in report.queues}
        assert {(each.topic, each.queue_id, each.way) for each in planned} == with_records
        found: dict[str, set[tuple[str, int]]] = {}
        for each in planned:
            found.setdefault(each.way, set()).add((each.topic, each.queue_id))
        return found

    before = files(path)
    assert ways()["shuffle"] == {("orders", 0)}
    monkeypatch.setattr(job, "_checked_shuffle", lambda shuffle, with_spark: (shuffle, size))
    assert ways()["order"] == {("orders", 0)}
    assert files(path) == before

    one_segment = write_store(tmp_path / "one", many(40))
    flip(one_segment / "commitlog" / f"{0:020d}", 1_000)
    monkeypatch.setattr(job, "_checked_shuffle", lambda shuffle, with_spark: (shuffle, 0))
    assert {each.way for each in plan_ways(one_segment)} == {"slots", "order"}


def test_a_queue_that_only_old_files_know_gets_nothing_of_what_a_range_took_for_its_record(
    sorted_here: None, tmp_path: Path
) -> None:
    path = with_an_image_inside(tmp_path / "s", "never")
    before = below(path, "consumequeue")
    known = path / "consumequeue" / "never" / "0"
    known.mkdir(parents=True)
    (known / f"{0:020d}").write_bytes(bytes(64 * 20))

    for shuffled in ("never", "always"):
        for size in (300, 700, 1_100, 1_600):
            dest = tmp_path / f"{shuffled}-{size}"
            rebuild(None, path, dest=dest, shuffle=shuffled, range_bytes=size)  # type: ignore[arg-type]
            assert below(dest, "consumequeue") == before


# -- tasks that run twice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", ["never", "auto", "always"])
def test_a_task_whose_result_was_lost_runs_again_and_makes_the_same(
    masters: list[Path], sorted_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffled: Any
) -> None:
    """Spark runs a task again when the executor that ran it is gone. The one that joins the ranges had deleted new
    files that were like the old ones: the second time it took these queues for empty, and zeros came in their place."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    for path in (once, twice):
        shutil.copytree(masters[0], path)
        renumber(path, [(70, -1)])
        shutil.rmtree(path / "consumequeue" / "orders" / "1")
    run = job.run

    def run_twice(*arguments: Any, **named: Any) -> Any:
        run(*arguments, **named)
        return run(*arguments, **named)

    rebuild(None, once, shuffle=shuffled, range_bytes=900)
    monkeypatch.setattr(job, "run", run_twice)
    rebuild(None, twice, shuffle=shuffled, range_bytes=900)

    assert below(twice, "consumequeue") == below(once, "consumequeue")
    assert contents(twice) == contents(once)


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_a_queue(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with MessageStore(path) as store:
        store.put("t", b"")
    work = job._Work(StoreName("s", str(path)), str(tmp_path / "work"), frozenset({"queues"}), None, "always", 0)
    work.sorted.mkdir(parents=True)
    sorting = job._Sorting(work, {("t", 0): 0}, 0, 1 << 40)
    stretch = 8_192

    def rows(count: int) -> Iterator[Row]:
        for first in range(0, count, stretch):
            sent = np.empty(stretch, job._SENT)
            sent["slot"] = np.arange(first, first + stretch)
            sent["unit"] = np.zeros(1, UNIT_DTYPE)
            sent["unit"]["physical_offset"], sent["unit"]["size"] = sent["slot"] * 100, 100
            for at in range(0, stretch, job._SENT_UNITS):
                last = at + job._SENT_UNITS >= stretch
                yield 0, int(sent["slot"][at]) * 100, bytes([last]) + sent[at : at + job._SENT_UNITS].tobytes()

    def peak(count: int) -> int:
        tracemalloc.start()
        [(_, slots)] = job._gather([sorting], rows(count))
        assert slots.next == count
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(stretch)
    assert peak(stretch * 64) < 1.5 * peak(stretch * 4)


def test_rows_are_small_and_say_where_recovery_would_make_a_break(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(body=b"%d" % i) for i in range(200)], segment_bytes=1 << 16)
    work = job._Work(StoreName("s", str(path)), str(tmp_path), frozenset({"queues"}), None, "always", 0)
    sorting = job._Sorting(work, {("t", 0): 7}, 0, 1 << 40)

    rows = [*job._scatter([sorting], [job._Segment(0, work.name, 0, 0, 1)])]

    assert {key for key, _, _ in rows} == {7}
    assert [position for _, position, _ in rows] == sorted(position for _, position, _ in rows)
    assert [(data[0], len(data) // job._SENT.itemsize) for _, _, data in rows] == [(0, 64), (0, 64), (0, 64), (1, 8)]


def test_wrong_wishes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(3))
    before = files(path)

    with pytest.raises(ConfigError, match="shuffle='sometimes' is none of 'auto', 'always', 'never'"):
        rebuild(None, path, shuffle="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a Spark session"):
        rebuild(None, path, shuffle="always")
    with pytest.raises(ConfigError, match="needs a Spark session"):
        plan_ways(path, shuffle="always", with_spark=False)

    assert files(path) == before


def test_a_machine_that_does_not_see_the_work_is_named(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(3))
    work = job._Work(StoreName("s", str(path)), str(tmp_path / "gone"), frozenset({"queues"}), None, "auto", 0)
    sorting = job._Sorting(work, {("t", 0): 0}, 0, 1 << 40)

    for attempt in (
        lambda: job._build_ranges([job._Piece(work, None)]),  # type: ignore[arg-type]
        lambda: [*job._gather([sorting], iter([(0, 0, b"\1")]))],
    ):
        with pytest.raises(ConfigError, match=r"gone is not there on .*under the same path"):
            attempt()


# -- in Spark ----------------------------------------------------------------------------------------------------------


def crooked(path: Path, master: Path) -> Path:
    shutil.copytree(master, path)
    renumber(path, [(30, -1), (31, 1), (90, 1 << 40), (91, -2), (120, 2)])
    with MessageStore(path, "r") as store:
        place = [*store.iter("t", 1)][8].physical_offset
    flip(path / "commitlog" / f"{place - place % SEGMENT:020d}", place % SEGMENT + 100)
    return path


@pytest.mark.spark
def test_spark_sorts_what_has_to_be_sorted(
    spark: Any, masters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_READ_AGAIN_BYTES", 0)
    theirs = crooked(tmp_path / "theirs", masters[0])
    good = masters[1]
    queues, index = recovered(crooked(tmp_path / "expected", masters[0]))
    expected = {
        **{f"crooked/{k}": v for k, v in queues.items()},
        **{f"good/{k}": v for k, v in below(good, "consumequeue").items()},
    }
    for shuffled in ("never", "auto", "always"):
        stores = {}
        for name, source in (("crooked", theirs), ("good", good)):
            stores[name] = tmp_path / shuffled / name
            shutil.copytree(source, stores[name])
        planned = plan_ways(stores, shuffle=shuffled, range_bytes=4_000)  # type: ignore[arg-type]

        report = rebuild(spark, stores, shuffle=shuffled, range_bytes=4_000)  # type: ignore[arg-type]

        assert {
            f"{name}/{k}": v for name, path in stores.items() for k, v in below(path, "consumequeue").items()
        } == expected
        assert contents(stores["crooked"]) == index
        assert not (stores["crooked"] / "rebuild").exists()
        ways = {(queue.store, queue.topic, queue.queue_id): queue.way for queue in report.queues}
        assert {(each.store, each.topic, each.queue_id): each.way for each in planned} == ways
        assert {way for (store, _, _), way in ways.items() if store == "good"} == (
            {"shuffle"} if shuffled == "always" else {"slots"}
        )
        assert (
            set(ways.values())
            == {
                "never": {"slots", "order"},
                "auto": {"slots", "shuffle"},
                "always": {"shuffle"},
            }[shuffled]
        )


def dying(jobs: Any, rows: Iterator[Row]) -> Iterator[Any]:
    """A task whose process is killed when it has written something."""
    next(job._gather(jobs, iter([next(rows)])))
    os.kill(os.getpid(), signal.SIGKILL)
    yield


def failing(jobs: Any, rows: Iterator[Row]) -> Iterator[Any]:
    yield from job._gather(jobs, iter([next(rows)]))
    raise OSError(28, "the disk is full")


def unreadable(jobs: Any, pieces: Any) -> Iterator[Row]:
    yield from job._scatter(jobs, pieces)
    raise PermissionError(13, "not for you", "commitlog/x")


@pytest.mark.spark
@pytest.mark.parametrize(
    ("part", "instead", "error", "text"),
    [
        ("_gather", dying, Exception, "."),
        ("_gather", failing, OSError, "the disk is full"),
        ("_scatter", unreadable, PermissionError, "not for you"),
    ],
)
def test_a_task_that_fails_leaves_the_store_as_it_was_and_the_next_one_succeeds(
    spark: Any,
    masters: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    instead: Any,
    error: type[Exception],
    text: str,
) -> None:
    path = crooked(tmp_path / "s", masters[0])
    shutil.rmtree(path / "consumequeue" / "t")
    expected = tmp_path / "expected"
    shutil.copytree(path, expected)
    before = files(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, part, instead)
        with pytest.raises(error, match=text):
            rebuild(spark, path, shuffle="always")
    after = {name: data for name, data in files(path).items() if not name.startswith("rebuild/")}
    assert {**after, "lock": b""} == {**before, "lock": b""}

    rebuild(spark, path, shuffle="always")

    assert below(path, "consumequeue") == recovered(expected)[0]
    assert not (path / "rebuild").exists()
