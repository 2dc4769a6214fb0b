"""Kill -9 around splices: a process that dies at any change, and real ones that are killed at random moments.

After each death the store is opened, all of a splice is there or nothing, and splicing the same version again says so.
"""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

from mqstore.clock import SimulatedClock
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.log.store import MessageStore
from mqstore.options import StoreConfig
from tests.children import killed_child
from tests.faults import STEP, Crash, FaultyFileSystem
from tests.log.splicesupport import Row, bodies, stage

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
            store._closed = True
            fs.heal()
            store._release()
        again = FaultyFileSystem()
        again.crash(1 + nth * 7 % 31, torn=nth % 3 == 0)
        try:
            store = opened(path, again)
        except Crash:
            pass
        else:
            store._closed = True
            again.heal()
            store._release()
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


_WORD = struct.Struct(">ci")


def _child(path: Path, shards: list[Path], writer: int) -> None:
    """Splice and put for ever, telling what is done: a splice that returned, a put that is flushed."""
    with MessageStore(path, config=StoreConfig(**SIZES)) as store:
        for version in range(store._txn.state.version_of("a") + 1, 10_000):
            store.splice([shards[version % len(shards)]], app="a", version=version)
            os.write(writer, _WORD.pack(b"s", version))
            store.put("t", b"put %06d" % version, durability="flush")
            os.write(writer, _WORD.pack(b"p", version))


def test_no_splice_is_lost_halved_or_doubled_by_kill_9(tmp_path: Path) -> None:
    rng = random.Random(20_240_302)
    path = tmp_path / "store"
    shards = [stage(tmp_path / f"{i}", ROWS[i * 9 : i * 9 + 60]) for i in range(3)]
    acknowledged = {b"s": -1, b"p": -1}
    for _ in range(8):
        said = bytearray()
        words = rng.randrange(1, 12)

        def heard(data: bytes) -> bool:
            said.extend(data)  # noqa: B023
            return len(said) >= words * _WORD.size  # noqa: B023

        killed_child(lambda pipe: _child(path, shards, pipe), heard, rng.randrange(30_000))
        for kind, number in _WORD.iter_unpack(said[: len(said) // _WORD.size * _WORD.size]):
            acknowledged[kind] = max(acknowledged[kind], number)
        with opened(path) as store:
            last = store._txn.state.version_of("a")
            assert last >= acknowledged[b"s"]
            wanted = [row.body for v in range(last + 1) for row in ROWS[v % 3 * 9 : v % 3 * 9 + 60]]
            found = bodies(store)
            puts = [body for body in found if body.startswith(b"put")]
            assert [body for body in found if not body.startswith(b"put")] == sorted(wanted)
            assert len(puts) == len(set(puts)) > acknowledged[b"p"] - 8
            assert b"put %06d" % acknowledged[b"p"] in puts or acknowledged[b"p"] < 0
            assert list(store.verify()) == []
