"""Recovery and verification with compiled parts and without: the same report, and the same bytes in every file."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqstore import Profile, SimulatedClock, StoreConfig
from mqstore.errors import MQStoreError
from mqstore.files.segment import Segment
from mqstore.files.segments import SegmentRun
from mqstore.layout.consumequeue import UNIT_BYTES
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery import recover as recovery
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.scanner import Good, scan_log, used_end
from mqstore.log.store import MessageStore
from tests.damage.kinds import KINDS, Kind, Target
from tests.damage.support import FORMATS, STATES, Made, Shape, write
from tests.damage.support import make as make_store
from tests.log.support import SEGMENT, Unsynced, checkpointed, files, kill, open_store
from tests.without import compiled, compiled_parts_left_out

COUNT = 120
KEYS = (None, ["k"], ["k1", "k2", "订单"])
TAGS = (None, "TagA", "pay-ok", "撤单")
TOPICS = ("orders", "clicks", "logs")


def make(path: Path, profile: Profile) -> list[int]:
    """A store of several segments whose writer was killed in the middle; where its records begin."""
    store = open_store(path, profile=profile)
    source = random.Random(11)
    places = []
    for n in range(COUNT):
        topic, queue_id = source.choice(TOPICS), source.randrange(3)
        body = source.randbytes(source.choice((0, 3, 40, 200)))
        keys, tag = source.choice(KEYS), source.choice(TAGS)
        places.append(store.put(topic, body, queue_id, keys=keys, tag=tag).physical_offset)
        if n == COUNT - 30:
            checkpointed(store)
    store.dispatch()
    kill(store)
    return places


def _written(at: int, shape: str, *values: int) -> Kind:
    """Each of some values at a place in a record, a record a value."""

    def damage(target: Target) -> None:
        for record, value in zip(target.draw.sample(target.made.records, len(values)), values, strict=True):
            write(target.path, record.start + at, struct.pack(shape, value))

    return Kind(damage)


def _blanks(target: Target) -> None:
    """The ends of segments that lead to the next one: of a wrong length, or nonsense."""
    bounds = [(a, b) for a, b in pairwise(target.made.records) if b.start > a.end]
    for n, (before, behind) in enumerate(bounds):
        write(target.path, before.end, [bytes(8), b"\1" * 8, struct.pack(">i", behind.start - before.start)][n % 3])


def _stale(target: Target) -> None:
    """A later file holds what an earlier life of the log left there."""
    last = target.segment(1)
    later = int(last.name) + target.made.segment_bytes
    shutil.copy(target.segment(0), last.with_name(f"{later:020d}"))
    last.with_name(f"{later + target.made.segment_bytes:020d}").write_bytes(bytes(target.made.segment_bytes))


DAMAGES = KINDS | {
    "none": Kind(lambda target: None),
    "flags": _written(36, ">i", 0x10, 0x20, 0x80, 1),
    "wild sizes": _written(0, ">i", 0, -1, 90, 91, 92, 2**31 - 1, 1 << 16),
    "wild queue offsets": _written(20, ">q", -1, 2**62, 0, 7),
    "wild places": _written(28, ">q", -1, 0, 2**62),
    "blanks": Kind(_blanks),
    "stale segments": Kind(_stale),
}


def outcome(path: Path, options: RecoverOptions | None) -> dict[str, Any]:
    """What opening, or `recover`, says of a store and leaves of it; and what verify says before and after."""
    steps: list[tuple[int, int]] = []
    config = StoreConfig(clock=SimulatedClock())
    with ReadOnlyMessageStore(path, config=config, fs=Unsynced()) as reader:
        told: dict[str, Any] = {"before": [each.as_dict() for each in reader.verify()]}
        told["plan"] = reader.plan_recovery(RecoverOptions(full=True, dry_run=True)).as_dict()
        told["unlisted"] = reader.has_unlisted()
    told["plan"]["seconds"] = 0
    try:
        with MessageStore(
            path,
            create=False,
            config=config,
            fs=Unsynced(),
            recover_options=options,
            progress=lambda done, total: steps.append((done, total)),
        ) as store:
            report = store.recovery.as_dict() | {"seconds": 0}
            report["kept"] = [str(Path(each).relative_to(path)) for each in report["kept"]]
            told |= {"report": report, "steps": steps, "end": store.max_offset}
            told["after"] = [each.as_dict() for each in store.verify()]
    except MQStoreError as error:
        told["refused"] = str(error)
    told["files"] = {name: data for name, data in files(path).items() if name != "lock"}
    return told


WAYS: tuple[tuple[RecoverOptions | None, bool], ...] = (
    (None, False),
    (None, True),
    (RecoverOptions(full=True), False),
    (RecoverOptions(full=True, prefix=True), True),
    (RecoverOptions(full=True, rebuild_index=True), False),
)
"""Options, None for an opening; and whether the checkpoint is lost, too."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Made]:
    """`made(form, state)`: a store, of which tests damage copies."""
    folder = tmp_path_factory.mktemp("made")
    return cache(lambda form, state: make_store(folder / f"{form} {state}", form, state))


@compiled
@pytest.mark.parametrize(
    ("name", "form", "state", "way"),
    [(name, FORMATS[n % 3], STATES[n % 2], n % len(WAYS)) for n, name in enumerate(DAMAGES)],
)
def test_damage_handling_is_independent_of_compiled_parts(
    tmp_path: Path, made: Callable[[str, str], Made], name: str, form: str, state: str, way: int
) -> None:
    options, lost_checkpoint = WAYS[way]
    damaged = Path(shutil.copytree(made(form, state).path, tmp_path / "damaged"))
    other = partial(make_store, tmp_path / "other", form, state, Shape(seed=2))
    DAMAGES[name].damage(Target(made(form, state), damaged, random.Random(name), lambda: other().path))
    if lost_checkpoint:
        (damaged / "checkpoint").unlink(missing_ok=True)
    found = []
    for road, take in ((nullcontext, shutil.copytree), (compiled_parts_left_out, shutil.move)):
        # At the same path: findings name it.
        take(damaged, tmp_path / "store")
        with road():
            found.append(outcome(tmp_path / "store", options))
        shutil.rmtree(tmp_path / "store")
    first, second = found
    assert first == second
    assert "report" in first or DAMAGES[name].may_refuse


@pytest.mark.parametrize("batch", [1, 7, 8192])
def test_units_perhaps_not_synced_are_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Those of records below `dispatched` are not, without a checkpoint all are."""
    monkeypatch.setattr("mqstore.log.recovery.scanner._BATCH", batch)
    make(tmp_path, "mqstore")
    (tmp_path / "checkpoint").unlink()
    written: dict[str, set[int]] = {}
    before = recovery.ConsumeQueue.write

    def write(self: Any, offset: int, units: Any) -> None:
        slots = written.setdefault(self.directory, set())
        slots |= set(range(offset, offset + memoryview(units).nbytes // UNIT_BYTES))
        before(self, offset, units)

    monkeypatch.setattr(recovery.ConsumeQueue, "write", write)
    with open_store(tmp_path) as store:
        assert store.recovery.rebuilt.units == 0
        for queue in store.queue_table:
            assert written[queue.directory] == set(range(queue.max_offset))


def test_the_zeros_at_the_end_of_the_log_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be most of a segment."""
    make(tmp_path, "mqstore")
    looks: list[int] = []

    def look(run: SegmentRun, segment: Segment, start: int = 0) -> int:
        looks.append(start)
        return used_end(run, segment, start)

    for module in ("scanner", "tail"):
        monkeypatch.setattr(f"mqstore.log.recovery.{module}.used_end", look)
    with open_store(tmp_path) as store:
        end = store.max_offset
    assert looks == [end % SEGMENT]


def test_a_stretch_keeps_what_it_says_while_the_next_one_is_read(tmp_path: Path) -> None:
    places = make(tmp_path, "mqstore")
    with open_store(tmp_path, "r") as reader:
        events = [event for event in scan_log(reader.log_files, 0, reader.manifest.checksum) if isinstance(event, Good)]
    found = np.concatenate([event.headers.positions + event.base for event in events])
    assert found.tolist() == places


def test_queue_files_are_on_their_way_to_the_disk_when_they_are_full(tmp_path: Path) -> None:
    """Each is synced once, in the end, when all the others are being written too."""
    make(tmp_path, "mqstore")
    (tmp_path / "checkpoint").unlink()
    begun: list[str] = []
    synced: list[str] = []

    class Noting(Unsynced):
        def write_back(self, fd: int) -> None:
            assert not [path for path in synced if "/consumequeue/" in path]
            begun.append(self.path_of(fd))
            super().write_back(fd)

        def fdatasync(self, fd: int) -> None:
            synced.append(self.path_of(fd))

    with open_store(tmp_path, fs=Noting()) as store:
        full = [
            f"{queue.directory}/{name}"
            for queue in store.queue_table
            for name in queue.list_files()
            if int(name) // UNIT_BYTES + store.queue_table.units_per_segment <= queue.max_offset
        ]
    assert len(full) > 3
    assert sorted(begun) == sorted(full)
    files_of_queues = [path for path in synced if "/consumequeue/" in path]
    assert sorted(files_of_queues) == sorted(str(path) for path in tmp_path.glob("consumequeue/*/*/*"))
