"""A process that dies at any change around a splice.

After each death the store is opened, all of a splice is there or nothing, and splicing the same version again says so.
"""

from __future__ import annotations

from pathlib import Path

from mqstore import SimulatedClock, StoreConfig
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.log.store import MessageStore
from tests.faults import STEP, Crash, FaultyFileSystem
from tests.log.splicesupport import Row, bodies, stage
from tests.log.support import kill

SIZES = {"segment_bytes": 16_384, "consumequeue_units": 64, "index_slots": 8, "index_entries": 64}
ROWS = [Row(b"%04d" % i + b"x" * (i * 37 % 900), "t", i % 2) for i in range(80)]


def opened(path: Path, fs: FileSystem = REAL) -> MessageStore:
    return MessageStore(path, config=StoreConfig(clock=SimulatedClock(), **SIZES), fs=fs)


def act(path: Path, shard: Path, fs: FileSystem, done: list[str], stores: list[MessageStore]) -> None:
    store = opened(path, fs)
    stores.append(store)
    store.put("t", b"before", durability="flush")
    done.append("before")
    store.splice([shard], app="a", version=1)
    done.append("splice")
    store.put("t", b"behind", durability="flush")
    done.append("behind")
    store.close()


def test_dying_at_any_change_leaves_all_of_a_splice_or_nothing(tmp_path: Path) -> None:
    """The second death falls into the recovery from the first."""
    shard = stage(tmp_path / "shard", ROWS)
    spliced = sorted(row.body for row in ROWS)
    for nth in range(1, 400, STEP):
        path, done, stores = tmp_path / f"store-{nth}", list[str](), list[MessageStore]()
        path.mkdir()
        fs = FaultyFileSystem()
        fs.crash(nth, torn=nth % 2 == 1)
        try:
            act(path, shard, fs, done, stores)
        except Crash:
            pass
        else:
            break
        for store in stores:
            fs.heal()
            kill(store)
        again = FaultyFileSystem()
        again.crash(1 + nth * 7 % 31, torn=nth % 3 == 0)
        try:
            store = opened(path, again)
        except Crash:
            pass
        else:
            again.heal()
            kill(store)
        with opened(path) as store:
            found = bodies(store)
            marks = [body for body in (b"before", b"behind") if body in found]
            rest = [body for body in found if body not in marks]
            assert rest in ([], spliced), nth
            assert rest or "splice" not in done, nth
            assert {"before", "behind"} & set(done) <= {body.decode() for body in marks}, nth
            assert store.splice([shard], app="a", version=1).already == bool(rest), nth
            assert sorted([*spliced, *marks]) == bodies(store), nth
    assert nth > 40, "the run was too short to tell"
