"""Broken directories of a Java broker: what `recover` leaves is what the real engine then reads, all of it.

The engine tells what it has after it opened the same directory; what must be there is known from the receipts.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore import SendReceipt, SimulatedClock, StoreConfig
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from tests.interop.comparing import Rows, assert_same, new_store, seen_by_java, seen_by_us
from tests.interop.javaengine import SIZES, JavaEngine, JavaError
from tests.log.support import flip_log, overwrite_log, segment_of

SEGMENT = SIZES["segment_bytes"]
Damage = Callable[[Path, list[SendReceipt]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def make(path: Path) -> list[SendReceipt]:
    """Eight segments, three queues, keys; closed cleanly."""
    draw = random.Random(3)
    with new_store(path) as store:
        return [store.put("t", draw.randbytes(draw.randrange(600)), n % 3, keys=f"k{n}") for n in range(1400)]


def flip(path: Path, receipt: SendReceipt, at: int = 90) -> None:
    flip_log(path, receipt.physical_offset + at, bit=4)


def crash(path: Path) -> None:
    (path / "abort").write_text("1")


def last(path: Path, folder: str) -> Path:
    return max(file for file in (path / folder).iterdir() if file.name.isdigit())


HARMLESS: dict[str, Damage] = {
    "nothing": lambda path, made: None,
    "crashed": lambda path, made: crash(path),
    "no queues": lambda path, made: shutil.rmtree(path / "consumequeue"),
    "a queue": lambda path, made: shutil.rmtree(path / "consumequeue" / "t" / "1"),
    "a queue's last file": lambda path, made: last(path, "consumequeue/t/0").unlink(),
    "a queue's last file cut": lambda path, made: os.truncate(last(path, "consumequeue/t/2"), 130),
    "no index": lambda path, made: shutil.rmtree(path / "index"),
    "an index file": lambda path, made: os.truncate(last(path, "index"), 77),
    "no checkpoint": lambda path, made: (crash(path), (path / "checkpoint").unlink()),
    "units of zeros": lambda path, made: last(path, "consumequeue/t/0").write_bytes(bytes(1000)),
}
"""Nothing of the log is touched: everything has to be there, in queues and index."""


def recovered(path: Path, **options: bool) -> Rows:
    recover_store(path, RecoverOptions(full=True, **options), config=StoreConfig(clock=SimulatedClock(), **SIZES))
    return seen_by_us(path)


@pytest.mark.parametrize("damage", HARMLESS)
def test_java_reads_what_was_rebuilt(path: Path, engine: JavaEngine, damage: str) -> None:
    made = make(path)
    before = seen_by_us(path)
    HARMLESS[damage](path, made)
    ours = recovered(path)
    assert_same(before, ours)
    engine.open(path)
    assert_same(ours, seen_by_java(engine))
    for n in range(0, 1400, 111):
        assert engine.query("t", f"k{n}") == [made[n].physical_offset]
    offset, _ = engine.put("t", 0, b"goes on")
    assert offset == before["t", 0][-1]["queue_offset"] + 1


UNSYNCED: dict[str, Damage] = {
    "no folder": lambda path, made: shutil.rmtree(path / "consumequeue" / "t" / "1"),
    "no file": lambda path, made: [file.unlink() for file in (path / "consumequeue" / "t" / "1").iterdir()],
    "no last file": lambda path, made: last(path, "consumequeue/t/1").unlink(),
    "empty last file": lambda path, made: os.truncate(last(path, "consumequeue/t/1"), 0),
}
"""States in which a power cut may leave the new files of a queue, until a checkpoint has synced them."""


@pytest.mark.parametrize("damage", UNSYNCED)
def test_java_opens_what_a_power_cut_leaves_of_new_queue_files(path: Path, engine: JavaEngine, damage: str) -> None:
    made = make(path)
    expected = seen_by_us(path)
    UNSYNCED[damage](path, made)
    crash(path)
    engine.open(path)
    assert_same(expected, seen_by_java(engine))


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue/t/1"])
def test_java_refuses_a_short_file_until_it_was_opened_here(path: Path, engine: JavaEngine, folder: str) -> None:
    made = make(path)
    expected = seen_by_us(path)
    os.truncate(last(path, folder), made[-1].physical_offset % SEGMENT + made[-1].size if folder == "commitlog" else 20)
    crash(path)
    with pytest.raises(JavaError, match="load"):
        engine.open(path)
    new_store(path).close()
    engine.open(path)
    assert_same(expected, seen_by_java(engine))


TORN: dict[str, Damage] = {
    "the last record": lambda path, made: flip(path, made[-1]),
    "its length": lambda path, made: flip(path, made[-1], 1),
    "the file": lambda path, made: os.truncate(
        segment_of(path, made[-1].physical_offset), made[-1].physical_offset % SEGMENT
    ),
    "zeros": lambda path, made: overwrite_log(
        path, made[-1].physical_offset, bytes(SEGMENT - made[-1].physical_offset % SEGMENT)
    ),
}


@pytest.mark.parametrize("damage", TORN)
def test_a_torn_tail_ends_for_both_at_the_same_record(path: Path, engine: JavaEngine, damage: str) -> None:
    made = make(path)
    expected = seen_by_us(path)
    topic, queue_id = made[-1].queue
    del expected[topic, queue_id][-1]
    TORN[damage](path, made)
    crash(path)
    assert_same(expected, recovered(path))
    engine.open(path)
    assert_same(expected, seen_by_java(engine))
    offset, _ = engine.put(topic, queue_id, b"in its place")
    assert offset == made[-1].offset
    engine.close()
    assert seen_by_us(path)[topic, queue_id][-1]["body"] == b"in its place"


def lost_by(rows: Rows, all_rows: Rows) -> list[tuple[int, int]]:
    """(queue id, offset) of what is missing."""
    there = {(q, row["queue_offset"]) for (_, q), lines in rows.items() for row in lines}
    return sorted({(q, row["queue_offset"]) for (_, q), lines in all_rows.items() for row in lines} - there)


def test_damage_far_from_the_end_costs_java_the_damaged_message_alone(path: Path, engine: JavaEngine) -> None:
    """It checks the last three segments when it opens a directory that was closed cleanly, as a recovered one is."""
    made = make(path)
    before = seen_by_us(path)
    harmed = made[400]
    assert SEGMENT <= harmed.physical_offset < 5 * SEGMENT
    flip(path, harmed)
    lost = [(harmed.queue.queue_id, harmed.offset)]
    assert lost_by(recovered(path), before) == lost
    engine.open(path)
    assert lost_by(seen_by_java(engine), before) == lost


def test_damaged_first_segment_costs_java_its_queue_there(path: Path, engine: JavaEngine) -> None:
    """A unit that stands for nothing points to 0, in the real engine, too; which takes the segment that begins there
    for a deleted one, and goes on behind it. docs/recovery.md says so."""
    made = make(path)
    before = seen_by_us(path)
    harmed = made[100]
    flip(path, harmed)
    assert lost_by(recovered(path), before) == [(harmed.queue.queue_id, harmed.offset)]
    engine.open(path)
    behind = {
        (r.queue.queue_id, r.offset) for r in made[100:] if r.queue == harmed.queue and r.physical_offset < SEGMENT
    }
    lost = set(lost_by(seen_by_java(engine), before))
    assert (harmed.queue.queue_id, harmed.offset) in lost
    assert len(lost) > 1
    assert lost <= behind, "it is over with the read, or the segment"


def test_damage_near_the_end_makes_java_cut_there(path: Path, engine: JavaEngine) -> None:
    """What docs/recovery.md warns of: we pass over damage, and report it; a Java broker ends its log there."""
    made = make(path)
    harmed = made[-30]
    flip(path, harmed)
    ours = recovered(path)
    engine.open(path)
    java = seen_by_java(engine)
    assert sum(map(len, ours.values())) == len(made) - 1
    assert sum(map(len, java.values())) == len(made) - 30
