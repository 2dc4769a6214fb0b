"""Recovery and verification with compiled parts and without: the same report, and the same bytes in every file."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqstore.clock import SimulatedClock
from mqstore.files.segment import Segment
from mqstore.files.segments import SegmentRun
from mqstore.layout.consumequeue import UNIT_BYTES
from mqstore.log.readonly import ReadOnlyMessageStore
from mqstore.log.recovery import recover as recovery
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.scanner import Good, scan_log, used_end
from mqstore.log.store import MessageStore
from mqstore.options import Profile, StoreConfig
from tests.log.support import SEGMENT, Unsynced, files, open_store
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
            store.flush()
            store.dispatch()
            store.run_once(1)
            store.run_once(2000)
    store.dispatch()
    store._closed = True
    store._release()
    return places


def edit(path: Path, place: int, data: bytes) -> None:
    """Put `data` into the log at a physical offset."""
    with open(path / "commitlog" / f"{place - place % SEGMENT:020d}", "r+b") as file:
        file.seek(place % SEGMENT)
        file.write(data[: SEGMENT - place % SEGMENT])


def look(path: Path, place: int, length: int) -> bytes:
    data = (path / "commitlog" / f"{place - place % SEGMENT:020d}").read_bytes()
    return data[place % SEGMENT :][:length]


Damage = Callable[[Path, list[int], random.Random], None]


def _flipped(at: int, length: int) -> Damage:
    def damage(path: Path, places: list[int], source: random.Random) -> None:
        for place in source.sample(places, 3):
            where = place + at + source.randrange(length)
            edit(path, where, bytes([look(path, where, 1)[0] ^ 1 << source.randrange(8)]))

    return damage


def _written(at: int, shape: str, *values: int) -> Damage:
    def damage(path: Path, places: list[int], source: random.Random) -> None:
        for place in source.sample(places, 2):
            edit(path, place + at, struct.pack(shape, source.choice(values)))

    return damage


def _zeroed(path: Path, places: list[int], source: random.Random) -> None:
    edit(path, source.choice(places) + source.randrange(90), bytes(source.randrange(1, 1000)))


def _torn(path: Path, places: list[int], source: random.Random) -> None:
    for place in (places[-1], places[-2])[: source.randrange(1, 3)]:
        edit(path, place + source.randrange(91), bytes(4096))


def _stale(path: Path, places: list[int], source: random.Random) -> None:
    """Whole records where they were never put, one of them saying so."""
    data = look(path, places[3], 200)
    edit(path, places[-1] + 70, data)
    edit(path, places[40], data)


def _segments(path: Path, places: list[int], source: random.Random) -> None:
    """A later file holds what an earlier life of the log left there."""
    last = places[-1] - places[-1] % SEGMENT
    old = (path / "commitlog" / f"{0:020d}").read_bytes()
    (path / "commitlog" / f"{last + SEGMENT:020d}").write_bytes(old)
    (path / "commitlog" / f"{last + 2 * SEGMENT:020d}").write_bytes(bytes(SEGMENT))


def _short(path: Path, places: list[int], source: random.Random) -> None:
    for file in source.sample(sorted((path / "commitlog").glob("[0-9]*")), 2):
        file.write_bytes(file.read_bytes()[: source.randrange(SEGMENT)])


def _lost(path: Path, places: list[int], source: random.Random) -> None:
    source.choice(sorted((path / "commitlog").glob("[0-9]*"))[1:]).unlink()


def _blanks(path: Path, places: list[int], source: random.Random) -> None:
    """The end of a segment that leads to the next one: of a wrong length, or nonsense."""
    bounds = [(a, b) for a, b in pairwise(places) if a // SEGMENT != b // SEGMENT]
    before, behind = source.choice(bounds)
    (size,) = struct.unpack(">i", look(path, before, 4))
    edit(path, before + size, source.choice([bytes(8), b"\x01" * 8, struct.pack(">i", behind - before)]))


def _units(path: Path, places: list[int], source: random.Random) -> None:
    for file in source.sample(sorted(path.glob("consumequeue/*/*/*")), 3):
        data = bytearray(file.read_bytes())
        at = source.randrange(len(data) // UNIT_BYTES) * UNIT_BYTES
        data[at : at + UNIT_BYTES] = source.choice([bytes(UNIT_BYTES), source.randbytes(UNIT_BYTES)])
        file.write_bytes(data)


def _queues(path: Path, places: list[int], source: random.Random) -> None:
    shutil.rmtree(source.choice(sorted(path.glob("consumequeue/*/*"))))


def _index(path: Path, places: list[int], source: random.Random) -> None:
    file = source.choice(sorted((path / "index").iterdir()))
    data = bytearray(file.read_bytes())
    data[source.randrange(len(data))] ^= 0x55
    file.write_bytes(data)


DAMAGES: dict[str, Damage] = {
    "none": lambda path, places, source: None,
    "size": _flipped(0, 4),
    "magic": _flipped(4, 4),
    "checksum": _flipped(8, 4),
    "queue id": _flipped(12, 4),
    "queue offset": _flipped(20, 8),
    "physical offset": _flipped(28, 8),
    "flags": _flipped(36, 4),
    "times and hosts": _flipped(40, 40),
    "body length": _flipped(84, 4),
    "behind the header": _flipped(88, 3),
    "wild size": _written(0, ">i", 0, -1, 90, 91, 92, 2**31 - 1, SEGMENT),
    "wild queue offset": _written(20, ">q", -1, 2**62, 0, 7),
    "wild place": _written(28, ">q", -1, 0, 2**62),
    "zeros": _zeroed,
    "torn tail": _torn,
    "stale records": _stale,
    "stale segments": _segments,
    "short files": _short,
    "lost file": _lost,
    "blank": _blanks,
    "units": _units,
    "queue": _queues,
    "index": _index,
}


def outcome(path: Path, options: RecoverOptions | None) -> dict[str, Any]:
    """What opening, or `recover`, says of a store and leaves of it; and what verify says before and after."""
    steps: list[tuple[int, int]] = []
    config = StoreConfig(clock=SimulatedClock())
    with ReadOnlyMessageStore(path, config=config, fs=Unsynced()) as reader:
        told: dict[str, Any] = {"before": [each.as_dict() for each in reader.verify()]}
        told["plan"] = reader.plan_recovery(RecoverOptions(full=True, dry_run=True)).as_dict()
        told["unlisted"] = reader.has_unlisted()
    with MessageStore(
        path,
        create=False,
        config=config,
        fs=Unsynced(),
        recover_options=options,
        progress=lambda done, total: steps.append((done, total)),
    ) as store:
        told |= {"report": store.recovery.as_dict(), "steps": steps, "end": store.max_offset}
        told["after"] = [each.as_dict() for each in store.verify()]
    for each in told["plan"], told["report"]:
        del each["seconds"]
    told["report"]["kept"] = [str(Path(each).relative_to(path)) for each in told["report"]["kept"]]
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
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[Profile, tuple[Path, list[int]]]:
    """By profile: a store, of which tests damage copies, and where its records begin."""
    folder = tmp_path_factory.mktemp("made")
    profiles: tuple[Profile, ...] = ("mqstore", "rocketmq")
    return {profile: (folder / profile, make(folder / profile, profile)) for profile in profiles}


@compiled
@pytest.mark.parametrize(
    ("name", "profile", "way"),
    # Each damage in two of the five ways, one in each profile.
    [
        (name, profile, (number + step) % 5)
        for number, name in enumerate(DAMAGES)
        for step, profile in enumerate(["mqstore", "rocketmq"])
    ],
)
def test_what_is_done_about_damage_does_not_depend_on_compiled_parts(
    tmp_path: Path, made: dict[Profile, tuple[Path, list[int]]], name: str, profile: Profile, way: int
) -> None:
    whole, places = made[profile]
    options, lost_checkpoint = WAYS[way]
    shutil.copytree(whole, tmp_path / "damaged")
    DAMAGES[name](tmp_path / "damaged", places, random.Random(f"{name} {way}"))
    if lost_checkpoint:
        (tmp_path / "damaged" / "checkpoint").unlink()
    found = []
    for road, take in ((nullcontext, shutil.copytree), (compiled_parts_left_out, shutil.move)):
        # At the same path: findings name it.
        take(tmp_path / "damaged", tmp_path / "store")
        with road():
            found.append(outcome(tmp_path / "store", options))
        shutil.rmtree(tmp_path / "store")
    first, second = found
    assert first == second
    assert first["report"]["messages"] > 0


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
