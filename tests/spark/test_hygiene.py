"""What reading leaves behind, and what it bears: locks, mappings, little memory, damage. Without Spark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import mqstore
from mqstore import QueueRef, StoreConfig
from mqstore.errors import ConfigError, CorruptStoreError
from mqstore.jobs import export_parquet
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.reading.plan import plan
from mqstore.jobs.reading.tasks import read_slices
from mqstore.jobs.views import VIEWS, view_batch
from mqstore.log.store import MessageStore
from tests.columnar.support import SEGMENT, Odd, many, query, rows_of, write_store
from tests.holding import held, linux_only, open_files
from tests.jobs.damages import (
    DAMAGES,
    Damage,
    Row,
    cut_queue,
    cut_segment,
    lose_queues,
    lose_segment,
    spoil_body,
    spoil_segment,
)
from tests.log.support import flip

NAMES = ("topic", "queue_id", "queue_offset", "body")


@linux_only
def test_nothing_stays_open_or_mapped(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(300))
    before = open_files()
    for _ in range(50):
        assert len(query(path)) == 301
    assert held(path) == []
    assert not open_files() - before


@linux_only
def test_nothing_stays_when_the_reader_is_left_early(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(300))
    given = SourceOptions.parse({"path": str(path), "maxRowsPerBatch": "3"})
    [slices] = plan(given)
    batches = read_slices(given, NAMES, "binary", slices)
    next(batches)
    assert held(path)
    batches.close()  # type: ignore[attr-defined]
    assert held(path) == []


OPENS = "import sys; from mqstore.log.store import MessageStore; MessageStore(sys.argv[1]).close()"


def test_owner_keeps_its_lock_during_a_query(tmp_path: Path) -> None:
    """A POSIX lock is gone with the first descriptor of its file that the process closes, whoever opened it."""
    with mqstore.open(tmp_path / "s") as store:
        store.put("t", b"x")
        for view in VIEWS:
            view_batch(view, StoreName("s", str(tmp_path / "s")), SourceOptions.parse({"path": str(tmp_path / "s")}))
        assert len(query(tmp_path / "s")) == 1
        other = subprocess.run(
            [sys.executable, "-c", OPENS, str(tmp_path / "s")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        assert other.returncode == 1
        assert "StoreLockedError" in other.stderr


# -- little address space ----------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from tests.columnar.support import query
from pathlib import Path
query(Path(sys.argv[1]), subscribe="seed")  # all modules are there
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (40 << 20),) * 2)
import mmap
try:
    mmap.mmap(-1, 60 << 20)
    raise SystemExit("there is room")
except OSError:
    pass
query(Path(sys.argv[1]), subscribe="t")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept to there")
def test_small_address_space_error_has_a_remedy(tmp_path: Path) -> None:
    """As `spark.executor.pyspark.memory` limits it."""
    path = tmp_path / "s"
    with MessageStore(path, config=StoreConfig(segment_bytes=64 << 20)) as store:
        store.put("seed", b"")
        for i in range(200):
            store.put("t", bytes([i]) * 1000)
    found = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    assert "give spark.executor.pyspark.memory more" in found.stderr


# -- damage and retention ----------------------------------------------------------------------------------------------


IN_LOG = (spoil_body, spoil_segment, cut_segment, lose_segment)
PLACES = (*NAMES, "physical_offset", "size", "store_timestamp")


def messages(path: Path, **options: str) -> list[Row]:
    given = SourceOptions.parse({"path": str(path), "includeSystemTopics": "true", **options})
    columns = (*PLACES, "error") if options.get("onCorrupt") == "keep" else PLACES
    found = rows_of(batch for slices in plan(given) for batch in read_slices(given, columns, "binary", slices))
    return sorted(found, key=place_of)


def place_of(row: Row) -> tuple[str, int, int]:
    """Of bytes that hold no record a scan of the log knows none."""
    return row["topic"] or "", row["queue_id"] or 0, row["queue_offset"] or 0


def view_of(path: Path, view: str, **options: str) -> list[Row]:
    options = {"path": str(path), "view": view, "includeSystemTopics": "true", **options}
    batch = view_batch(view, StoreName("s", str(path)), SourceOptions.parse(options))
    batch.validate(full=True)
    return [
        {name: value for name, value in row.items() if name not in ("modified", "lag_seconds")}
        for row in batch.to_pylist()
    ]


@dataclass(frozen=True)
class Undamaged:
    path: Path
    messages: list[Row]
    views: dict[str, list[Row]]


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Undamaged:
    """A store of three segments, with a group that has got to offset 4 of t, queue 0, and a message that waits."""
    path = write_store(
        tmp_path_factory.mktemp("undamaged") / "s", [*many(60), *[Odd(topic="u", body=bytes(3000))] * 12]
    )
    with mqstore.open(path) as store:
        store.broker.groups.create("g")
        store.commit_offset("g", QueueRef("t", 0), 4)
        store.put("u", b"later", delay_level=18)
    whole = Undamaged(path, messages(path), {view: view_of(path, view) for view in VIEWS})
    assert len(whole.messages) == 74
    assert all(whole.views.values())
    return whole


@pytest.fixture(params=DAMAGES, ids=str)
def damage(request: pytest.FixtureRequest) -> Damage:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def damaged(undamaged: Undamaged, damage: Damage, tmp_path: Path) -> Iterator[Path]:
    """The store, damaged; reading it must leave it so."""
    path = tmp_path / "s"
    shutil.copytree(undamaged.path, path)
    damage.apply(path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    yield path
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


SAYS = r": (?:bad_record|missing_segment): commitlog/\d{20} at byte \d+: .*onCorrupt 'skip'"


@pytest.mark.parametrize("scan", ["auto", "queue", "log"])
def test_a_query_of_a_damaged_store_fails_or_has_all_that_was_not_hit(
    damaged: Path, damage: Damage, undamaged: Undamaged, scan: str
) -> None:
    by_log = scan == "log" or (scan == "auto" and damage.apply is lose_queues)
    applies = not by_log or damage.apply in IN_LOG  # a scan of the log does not ask the queues
    listed = [row for row in undamaged.messages if not (applies and damage.unlisted(row))]
    left = [row for row in listed if not (applies and damage.damaged(row))]

    lost = not by_log and damage.apply in (cut_queue, lose_queues)  # of which the checkpoint knows the ends

    if lost:
        with pytest.raises(ConfigError, match=f"consume queues of {re.escape(str(damaged))} are lost"):
            messages(damaged, readBy=scan)
    elif left == listed:
        assert messages(damaged, readBy=scan) == left
    else:
        with pytest.raises(CorruptStoreError, match=re.escape(str(damaged)) + SAYS):
            messages(damaged, readBy=scan)
    for loss in ("true", "false")[lost:]:
        assert messages(damaged, readBy=scan, onCorrupt="skip", failOnDataLoss=loss) == left
    kept = messages(damaged, readBy=scan, onCorrupt="keep", failOnDataLoss=str(not lost).lower())
    assert [{name: row[name] for name in PLACES} for row in kept if row["error"] is None] == left
    told = [row for row in kept if row["error"] is not None]
    assert {row["body"] for row in told} <= {None}
    assert bool(told) == (left != listed)
    if not by_log:
        assert [place_of(row) for row in told] == [place_of(row) for row in listed if row not in left]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_damaged_store_keeps_the_rows_that_were_not_hit(
    damaged: Path, damage: Damage, undamaged: Undamaged, view: str
) -> None:
    """Of what was hit a view of messages says where the damage is, and `verify` that there is some."""
    hit = [row for row in undamaged.messages if damage.unlisted(row) or damage.damaged(row)]
    if view == "traffic" and any(map(damage.damaged, undamaged.messages)):
        with pytest.raises(CorruptStoreError, match=re.escape(str(damaged)) + SAYS):
            view_of(damaged, view)
    whole = undamaged.views[view]
    if view == "segments":
        spared = whole[damage.apply in IN_LOG :]
    elif view in ("verify", "delay"):
        spared = [] if damage.apply is lose_queues else whole[view == "verify" :]
    else:
        queues = {(row["topic"], row["queue_id"]) for row in hit}
        spared = [row for row in whole if (row["topic"], row["queue_id"]) not in queues]

    found = view_of(damaged, view, onCorrupt="skip")

    assert [row for row in found if row in spared] == spared
    if view == "verify" and damage.apply is not lose_segment:
        assert found[0]["errors"] > 0
        assert re.match(r"\w+ at \d+ of (commitlog|consumequeue)/", found[0]["first_error"])
    if view == "traffic":
        left = sum(row["topic"] != "seed" for row in undamaged.messages) - sum(row["topic"] != "seed" for row in hit)
        assert sum(row["messages"] for row in found if row["topic"] != "seed") == left


def test_damage_is_reported_with_its_store(tmp_path: Path) -> None:
    """Of a fleet nobody knew which store the byte was in."""
    for name in "abc":
        write_store(tmp_path / name, many(20))
    log = tmp_path / "b" / "commitlog" / f"{0:020d}"
    flip(log, 1000)
    says = rf"^{re.escape(str(tmp_path / 'b'))}: bad_record: commitlog/0+ at byte \d+: .*onCorrupt 'skip'"
    fleet = f"{tmp_path}/[abc]"
    for options in ({"readBy": "queue"}, {"readBy": "log"}):
        with pytest.raises(CorruptStoreError, match=says):
            query(Path(fleet), **options)
    given = SourceOptions.parse({"path": fleet, "view": "traffic"})
    with pytest.raises(CorruptStoreError, match=says):
        view_batch("traffic", StoreName("b", str(tmp_path / "b")), given)
    with pytest.raises(CorruptStoreError, match=says) as caught:
        export_parquet(fleet, tmp_path / "t")
    assert caught.value.file == f"commitlog/{0:020d}"


def test_omitted_rows_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With onCorrupt=skip, and failOnDataLoss=false, a query had fewer rows, and nobody knew."""
    path = write_store(tmp_path / "s", [Odd(body=bytes(1000))] * 40)
    log = path / "commitlog" / f"{SEGMENT:020d}"
    for at in (500, 1500):
        flip(log, at)
    given = SourceOptions.parse({"path": str(path), "onCorrupt": "skip", "failOnDataLoss": "false"})
    slices = [piece for group in plan(given) for piece in group]
    (path / "commitlog" / f"{0:020d}").unlink()

    found = rows_of(read_slices(given, NAMES, "binary", slices))

    removed = 40 - 2 - sum(row["topic"] == "t" for row in found)
    assert removed > 0
    told = [
        record.message for record in caplog.records if record.levelname == "WARNING" and "skipped" in record.message
    ]
    assert told == [
        f"mqstore: in {path} 2 damaged messages were skipped (onCorrupt=skip)",
        f"mqstore: in {path} {removed + 1} messages deleted by retention were skipped (failOnDataLoss=false)",
    ]


def test_readers_beside_a_writer_and_its_retention(tmp_path: Path) -> None:
    """Each query sees what was there when it was planned, or what retention has left of it, in order."""
    path = tmp_path / "s"
    config = StoreConfig(segment_bytes=1 << 14, consumequeue_units=32)
    with MessageStore(path, config=config) as store:
        for turn in range(12):
            for i in range(30):
                store.put("t", b"%05d" % (turn * 30 + i) + bytes(200))
            store.dispatch()
            given = SourceOptions.parse({"path": str(path), "failOnDataLoss": "false", "maxRowsPerBatch": "7"})
            planned = [piece for group in plan(given) for piece in group]
            batches = read_slices(given, NAMES, "binary", planned)
            rows = rows_of([next(batches)])
            if turn % 3 == 2:  # between two batches of one task
                first = sorted((path / "commitlog").iterdir())[:-1]
                store.log_files.drop_before(int(first[-1].name))
                for queue in store.queue_table:
                    queue.correct_min(store.log_files.min_offset)
            rows += rows_of(batches)
            offsets = [row["queue_offset"] for row in rows]
            assert offsets == sorted(set(offsets))
            assert all(row["body"][:5] == b"%05d" % row["queue_offset"] for row in rows)
            assert offsets[-1] == turn * 30 + 29
            assert len(offsets) == offsets[-1] - offsets[0] + 1 or turn % 3 == 2
