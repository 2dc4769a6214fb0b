"""What reading leaves behind, and what it bears: locks, mappings, little memory, damage. Without Spark."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import MessageStore, StoreConfig
from mqstore.errors import CorruptStoreError, OffsetOutOfRangeError
from mqstore.spark import replay
from mqstore.spark.options import SourceOptions
from mqstore.spark.plan import StoreName, plan
from mqstore.spark.tasks import read_slices
from mqstore.spark.views import VIEWS, view_batch
from tests.holding import held, linux_only, open_files
from tests.spark.support import SEGMENT, Odd, many, rows_of, write_store

NAMES = ("topic", "queue_id", "queue_offset", "body")


def query(path: Path, **options: str) -> list[dict[str, Any]]:
    """Planned and read, as a query does it."""
    given = SourceOptions.parse({"path": str(path), **options})
    return rows_of(batch for slices in plan(given) for batch in read_slices(given, NAMES, "binary", slices))


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


OPENS = "import sys, mqstore; mqstore.MessageStore(sys.argv[1]).close()"


def test_who_owns_the_store_keeps_its_lock_while_it_is_queried_in_the_same_process(tmp_path: Path) -> None:
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
from tests.spark.test_hygiene import query
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
print(sum(len(row["body"]) for row in query(Path(sys.argv[1]), subscribe="t")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept to there")
def test_where_the_address_space_is_limited_bytes_are_read(tmp_path: Path) -> None:
    """As `spark.executor.pyspark.memory` limits it: a window does not fit, what is in it does."""
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
    assert (found.stdout, found.returncode) == ("200000\n", 0), found.stderr


# -- damage and retention ----------------------------------------------------------------------------------------------


def cut_queue(path: Path) -> None:
    file = path / "consumequeue" / "t" / "0" / f"{0:020d}"
    file.write_bytes(file.read_bytes()[:50])


def spoil_queue(path: Path) -> None:
    file = path / "consumequeue" / "t" / "0" / f"{0:020d}"
    file.write_bytes(b"\xff" * 100 + file.read_bytes()[100:])


def point_past_the_end(path: Path) -> None:
    file = path / "consumequeue" / "t" / "0" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    data[20:40] = (1 << 40).to_bytes(8, "big") + (200).to_bytes(4, "big") + bytes(8)
    file.write_bytes(data)


def spoil_segment(path: Path) -> None:
    file = path / "commitlog" / f"{0:020d}"
    file.write_bytes(b"\xff" * file.stat().st_size)


def cut_segment(path: Path) -> None:
    file = path / "commitlog" / f"{0:020d}"
    file.write_bytes(file.read_bytes()[:333])


def lose_segment(path: Path) -> None:
    (path / "commitlog" / f"{0:020d}").unlink()


def lose_queues(path: Path) -> None:
    shutil.rmtree(path / "consumequeue")


DAMAGES = [cut_queue, spoil_queue, point_past_the_end, spoil_segment, cut_segment, lose_segment, lose_queues]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_stops_no_view_and_shows_in_a_read_as_an_error_of_ours(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = write_store(tmp_path / "s", [*many(60), *[Odd(topic="u", body=bytes(3000))] * 12])
    damage(path)
    before = sorted(tmp_path.rglob("*"))
    for view in VIEWS:
        options = SourceOptions.parse({"path": str(path), "view": view, "onCorrupt": "skip"})
        view_batch(view, StoreName("s", str(path)), options).validate(full=True)
        with contextlib.suppress(CorruptStoreError):  # of those that look at records
            view_batch(view, StoreName("s", str(path)), SourceOptions.parse({"path": str(path), "view": view}))
    with contextlib.suppress(CorruptStoreError, OffsetOutOfRangeError):
        assert len(query(path)) <= 73
    for on_corrupt in ("skip", "keep"):
        found = query(path, onCorrupt=on_corrupt, failOnDataLoss="false")
        assert len([row for row in found if row["body"] is not None]) <= 73
    assert sorted(tmp_path.rglob("*")) == before


def test_damage_is_told_with_the_store_that_it_is_in(tmp_path: Path) -> None:
    """Of a fleet nobody knew which store the byte was in."""
    for name in "abc":
        write_store(tmp_path / name, many(20))
    log = tmp_path / "b" / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[1000] ^= 1
    log.write_bytes(data)
    says = rf"^{re.escape(str(tmp_path / 'b'))}: commitlog/0+ at byte \d+: .*onCorrupt 'skip'"
    fleet = f"{tmp_path}/[abc]"
    for options in ({"scan": "queue"}, {"scan": "log"}):
        with pytest.raises(CorruptStoreError, match=says):
            query(Path(fleet), **options)
    given = SourceOptions.parse({"path": fleet, "view": "traffic"})
    with pytest.raises(CorruptStoreError, match=says):
        view_batch("traffic", StoreName("b", str(tmp_path / "b")), given)
    with pytest.raises(CorruptStoreError, match=says) as caught:
        replay(None, fleet, tmp_path / "t")
    assert caught.value.file == f"commitlog/{0:020d}"


def test_what_a_query_leaves_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With onCorrupt=skip, and failOnDataLoss=false, a query had fewer rows, and nobody knew."""
    path = write_store(tmp_path / "s", [Odd(body=bytes(1000))] * 40)
    log = path / "commitlog" / f"{SEGMENT:020d}"
    data = bytearray(log.read_bytes())
    for at in (500, 1500):
        data[at] ^= 1
    log.write_bytes(data)
    given = SourceOptions.parse({"path": str(path), "onCorrupt": "skip", "failOnDataLoss": "false"})
    slices = [piece for group in plan(given) for piece in group]
    (path / "commitlog" / f"{0:020d}").unlink()

    found = rows_of(read_slices(given, NAMES, "binary", slices))

    removed = 40 - 2 - sum(row["topic"] == "t" for row in found)
    assert removed > 0
    told = [
        record.message for record in caplog.records if record.levelname == "WARNING" and "left out" in record.message
    ]
    assert told == [
        f"mqstore: {path}: 2 damaged messages were left out (onCorrupt=skip)",
        f"mqstore: {path}: {removed + 1} messages that retention has deleted were left out (failOnDataLoss=false)",
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
                store._run.drop_before(int(first[-1].name))
                for queue in store._queues:
                    queue.correct_min(store._run.min_offset)
            rows += rows_of(batches)
            offsets = [row["queue_offset"] for row in rows]
            assert offsets == sorted(set(offsets))
            assert all(row["body"][:5] == b"%05d" % row["queue_offset"] for row in rows)
            assert offsets[-1] == turn * 30 + 29
            assert len(offsets) == offsets[-1] - offsets[0] + 1 or turn % 3 == 2
