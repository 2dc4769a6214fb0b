"""A snapshot is a store at one moment: all from before, a prefix of what comes meanwhile. It is whole, or not there."""

from __future__ import annotations

import base64
import contextlib
import errno
import itertools
import os
import random
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mqstore import Retention, StoreConfig
from mqstore.broker.tables.external_offsets import publish
from mqstore.errors import ConfigError, NotAStoreError, ReadOnlyStoreError, StoreBusyError, StoreIOError
from mqstore.files.jsonfile import encode_json
from mqstore.files.lock import WriterLock
from mqstore.files.readonly_fs import QUIET
from mqstore.log.bulk.txn import TXN_FILE, Intent, TxnState
from mqstore.log.recovery.tail import Tail
from mqstore.log.snapshot import copy as module
from mqstore.log.snapshot import point_in_time as looking
from mqstore.log.snapshot.copy import SnapshotPlan, SnapshotReport, TreeCopy, plan_snapshot, snapshot_store
from mqstore.log.snapshot.point_in_time import Original
from mqstore.log.store import MessageStore
from tests.children import speaking_child
from tests.conftest import GOLDEN_NAMES, Golden
from tests.crash.recording import RecordingFileSystem, build_image
from tests.faults import CHANGES, STEP, Crash, FaultyFileSystem, deaths
from tests.log.recovering import recover
from tests.log.splicesupport import Row, bodies, bundle, kill_in_splice, stage
from tests.log.support import (
    SEGMENT,
    Unsynced,
    all_queues,
    files,
    flip_log,
    kill,
    note_in_checkpoint,
    open_store,
    overwrite_log,
    reboot,
    segment_of,
    units_of,
)
from tests.scarce import limited
from tests.waiting import is_readable

Bounds = dict[tuple[str, int], tuple[int, int]]


def taken(root: Path, target: Path, **options: object) -> SnapshotReport:
    return snapshot_store(root, target, **{"fs": Unsynced(), **options})  # type: ignore[arg-type]


def states(root: Path) -> dict[str, tuple[bytes, int, int, int]]:
    """Every file with what must not change of a store that is only looked at."""
    found = {}
    for name, content in files(root).items():
        stat = (root / name).stat()
        found[name] = content, stat.st_mtime_ns, stat.st_ino, stat.st_nlink
    return found


def told(path: Path) -> dict[tuple[str, int], list[tuple[int, int, bytes]]]:
    """(offset, physical offset, record) of all that the queues of a store list."""
    with open_store(path, "r") as store:
        return {
            (ref.topic, ref.queue_id): [(m.offset, m.physical_offset, m._record_bytes()) for m in store.iter(*ref)]
            for ref in all_queues(store)
        }


def bounds(path: Path) -> Bounds:
    with open_store(path, "r") as store:
        return {(ref.topic, ref.queue_id): store.offsets(*ref) for ref in all_queues(store)}


def sound(path: Path) -> None:
    """Closed cleanly, and nothing is wrong with it."""
    with open_store(path, "r") as store:
        assert store.clean_shutdown
        assert list(store.verifier().findings()) == []


def put(store: MessageStore, numbers: Iterator[int] | range, topic: str = "orders") -> None:
    for i in numbers:
        store.put(topic, b"%05d" % i * 20, queue_id=i % 3, keys=f"k{i}", tag="even" if i % 2 == 0 else "odd")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two hundred messages over eight segments, closed cleanly."""
    with open_store(tmp_path / "mq") as store:
        put(store, range(200))
    (tmp_path / "mq" / "config").mkdir(exist_ok=True)
    return tmp_path / "mq"


# -- what is in it -----------------------------------------------------------------------------------------------------


def test_store_at_rest_is_copied_unchanged(root: Path, tmp_path: Path) -> None:
    (root / "config" / "mine.json").write_text('{"a": 1}')
    (root / "local_offsets" / "one").mkdir(parents=True)
    (root / "local_offsets" / "one" / "g.json").write_text("{}")
    before = states(root)

    report = taken(root, tmp_path / "copy")

    assert states(root) == before
    assert (report.messages, report.findings, report.truncated) == (200, [], [])
    assert report.plan.writer_alive is False
    assert told(tmp_path / "copy") == told(root)
    sound(tmp_path / "copy")
    copied = files(tmp_path / "copy")
    for name in before:
        if name.startswith(("commitlog", "consumequeue", "config", "local_offsets", "mqstore.json")):
            assert copied[name] == before[name][0], name
    with open_store(tmp_path / "copy", "r") as store:
        assert [m.body[:5] for m in store.find("orders", key="k77")] == [b"00077"]
        copy_id = store.manifest.store_id
    with open_store(root, "r") as store:
        assert store.manifest.store_id == copy_id != ""
    assert sorted(os.listdir(tmp_path)) == ["copy", "mq"]


def test_a_segment_keeps_its_times_and_its_mode(root: Path, tmp_path: Path) -> None:
    segment = f"commitlog/{0:020d}"
    os.utime(root / segment, ns=(10**18, 10**18))
    os.chmod(root / segment, 0o666)
    os.chmod(root, 0o777)
    (root / "config" / "mine.json").write_text("{}")
    os.chmod(root / "config" / "mine.json", 0o6706)  # of another's program it would make one that runs as the copier
    before = os.umask(0o077)
    try:
        taken(root, tmp_path / "copy")
    finally:
        os.umask(before)
    found = (tmp_path / "copy" / segment).stat()
    assert (found.st_mtime_ns, found.st_mode & 0o777) == (10**18, 0o666)
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o777
    assert (tmp_path / "copy" / "config" / "mine.json").stat().st_mode & 0o7777 == 0o706


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_a_store_of_the_java_engine(golden: Golden, tmp_path: Path, name: str) -> None:
    java = golden(name)
    with open_store(java.path, "r") as store:
        shape = store.manifest
    report = taken(java.path, tmp_path / "copy")
    assert report.plan.writer_alive is False
    expected: dict[tuple[str, int], list[tuple[int, int, bytes]]] = {}
    for line in java.of("message"):
        expected.setdefault((line["topic"], line["queue_id"]), []).append(
            (line["queue_offset"], line["physical_offset"], base64.b64decode(line["body"]))
        )
    with open_store(tmp_path / "copy", "r") as store:
        found = {
            (ref.topic, ref.queue_id): [(m.offset, m.physical_offset, m.body) for m in store.iter(*ref)]
            for ref in all_queues(store)
        }
        assert {key: value for key, value in found.items() if value} == expected
        assert store.manifest == shape  # the index, which is not copied, has the shape it had
    sound(tmp_path / "copy")
    assert not (tmp_path / "copy" / "mqstore.json").exists()


@pytest.mark.parametrize("name", ["light", "batch", "addresses", "rocksdb"])
def test_java_only_files_are_copied(
    foreign: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    target = tmp_path_factory.mktemp("snapshots") / "copy"
    before = files(foreign(name))
    report = taken(foreign(name), target, config=StoreConfig(index_slots=53, index_entries=200))
    assert report.findings == []
    after = files(target)
    kept = [each for each in before if each.startswith(("batchconsumequeue", "consumequeue", "config/"))]
    assert kept
    assert {each: after[each] for each in kept} == {each: before[each] for each in kept}


def test_rocksdb_in_use_is_left_and_reported(
    foreign: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("snapshots") / "copy"
    lock = WriterLock(foreign("rocksdb"), "a broker")
    lock.acquire()
    try:
        report = taken(foreign("rocksdb"), target, config=StoreConfig(index_slots=53, index_entries=200))
    finally:
        lock.release()
    assert report.plan.left == (
        "consumequeue/: RocksDB, which a broker has open",
        "compaction: not a part of the store",
    )
    assert not (target / "consumequeue" / "CURRENT").exists()
    assert report.messages == 12


def test_numbers_of_a_queue_that_retention_emptied_go_on(tmp_path: Path) -> None:
    with open_store(tmp_path / "mq", retention=Retention(age=None, max_bytes=SEGMENT)) as store:
        for _ in range(5):
            store.put("rare", b"x")
        put(store, range(200))
        store.dispatch()
        store.flush()
        store.clean()
        assert store.offsets("rare", 0) == (5, 5)
        taken(store.path, tmp_path / "copy")
    with open_store(tmp_path / "copy") as copy:
        assert copy.put("rare", b"y").offset == 5


def test_crashed_store_is_copied_as_recovered(tmp_path: Path) -> None:
    store = open_store(tmp_path / "mq")
    put(store, range(100))
    end = store.max_offset
    kill(store)
    overwrite_log(tmp_path / "mq", end, b"\0\0\1\0half a record")
    report = taken(tmp_path / "mq", tmp_path / "copy")
    assert report.messages == 100
    assert report.findings == []  # nothing was promised of it
    assert [cut.start for cut in report.truncated] == [end % SEGMENT]
    assert report.log_end == end
    with open_store(tmp_path / "mq"):
        pass
    assert told(tmp_path / "copy") == told(tmp_path / "mq")
    sound(tmp_path / "copy")


@pytest.mark.parametrize("live", [False, True])
def test_damage_is_copied_and_reported(root: Path, tmp_path: Path, live: bool) -> None:
    with open_store(root, "r") as store:
        (hit,) = store.find("orders", key="k50")
    flip_log(root, hit.physical_offset + 95)
    if live:
        with open_store(root):
            report = taken(root, tmp_path / "copy")
    else:
        report = taken(root, tmp_path / "copy")
    assert [finding.kind for finding in report.findings] == ["bad_record"]
    assert report.messages == 199
    with open_store(tmp_path / "copy", "r") as copy:
        assert sum(1 for queue in range(3) for _ in copy.iter("orders", queue)) == 199


def test_bad_json_file_is_named(root: Path, tmp_path: Path) -> None:
    (root / "config" / "consumerOffset.json").write_text("{")
    (root / "config" / "consumerOffset.json.bak").write_text("{}")
    (finding,) = taken(root, tmp_path / "copy").findings
    assert finding.kind == "bad_json"
    assert str(tmp_path / "copy" / "config") in finding.detail
    assert (root / "config" / "consumerOffset.json").read_text() == "{"


# -- beside a writer ---------------------------------------------------------------------------------------------------


def test_copy_beside_a_writer_is_a_prefix(tmp_path: Path) -> None:
    """A writer in another process puts numbered messages and says which are in; segments roll and are dropped."""
    root = tmp_path / "mq"

    def write(pipe: int) -> None:
        config = StoreConfig(
            segment_bytes=1 << 14, consumequeue_units=64, retention=Retention(age=None, max_bytes=1 << 17)
        )
        with MessageStore(root, config=config) as store:
            for i in range(1 << 60):
                store.put("orders", b"%08d" % i * 10, queue_id=i % 3, keys=f"k{i}")
                if i % 100 == 0:
                    os.write(pipe, struct.pack("q", i))
                if i % 200 == 0:
                    store.clean()

    with speaking_child(write) as (_, pipe):
        newest = 0
        for link in (True, False):
            while newest < 2_000 or is_readable(pipe):  # from there on the oldest go
                (newest,) = struct.unpack("q", os.read(pipe, 8))
            target = tmp_path / f"copy-{link}"
            report = snapshot_store(root, target, link=link)
            assert report.plan.writer_alive
            assert (report.findings, report.truncated) == ([], [])
            sound(target)
            copied = told(target)
            found = sorted(int(record[88:96]) for records in copied.values() for _, _, record in records)
            assert found == list(range(found[0], found[-1] + 1))
            assert found[-1] >= newest
            for (_, queue_id), records in copied.items():
                assert [offset * 3 + queue_id for offset, _, _ in records] == [int(r[2][88:96]) for r in records]
    with MessageStore(root) as store:
        assert {finding.kind for finding in store.recovery.findings} <= {"torn_tail"}


STEPS: dict[str, tuple[type, str]] = {
    "small files": (Original, "_read_small"),
    "end": (Original, "_written_end"),
    "copy": (module._Making, "_bring_rest"),
}
"""Steps of a snapshot: reading the small files, seeking the end of the log, copying queues and segments."""


@contextmanager
def hooked(
    step: str, act: Callable[[int], object], after: Callable[[int, Any], Any] | None = None
) -> Iterator[list[int]]:
    """Let `act(n)` happen before a step is taken for the n-th time, from 0. `after(n, found)` gives what it finds."""
    calls: list[int] = []
    owner, name = STEPS[step]
    real = getattr(owner, name)

    def wrapped(*arguments: object, **named: object) -> object:
        calls.append(len(calls))
        act(calls[-1])
        found = real(*arguments, **named)
        return found if after is None else after(calls[-1], found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        yield calls


def test_a_splice_between_the_looks_is_recorded(root: Path, tmp_path: Path) -> None:
    rows = [Row(b"spliced")]
    with open_store(root) as store:

        def splice(call: int) -> None:
            if call == 0:
                bundle(root, "job", 0, [rows])
                assert store.take_inbox() == 1

        with hooked("end", splice) as calls:
            taken(root, tmp_path / "copy")
        assert len(calls) == 2
    with open_store(tmp_path / "copy") as copy:
        assert bodies(copy).count(b"spliced") == 1
        assert copy.splice([], app="job", version=0).already  # what it has it will not take again


def test_a_splice_without_record_is_in_whole_or_not(root: Path, tmp_path: Path) -> None:
    """The file of splices says behind it what it said before."""
    shards = [stage(tmp_path / "shard", [Row(b"%d" % i) for i in range(20)])]
    with open_store(root) as store:
        store.splice(shards, app="before", version=0)
        record = (root / TXN_FILE).read_bytes()

        def splice(call: int, end: int) -> int:
            if call == 0:
                # Half of it is what a scan could have seen: such a job's intent came after the look at the file.
                store.splice(shards, app="job", version=0, remembered=False)
                return end + 100
            return end

        with hooked("end", lambda call: None, splice) as looks:
            report = taken(root, tmp_path / "copy")
        assert (root / TXN_FILE).read_bytes() == record
        assert len(looks) == 2
    assert (report.findings, report.truncated) == ([], [])
    assert told(tmp_path / "copy") == told(root)


GOOD = '{"offsetTable": {"t@g": {"0": 2}}}'


@pytest.mark.parametrize(
    ("steps", "damaged"),
    [
        ([(None, GOOD), (GOOD, GOOD)], False),
        ([(None, GOOD), (None, GOOD)], True),
        ([(GOOD, ""), (GOOD, GOOD[:9]), (GOOD, GOOD[:20]), (GOOD, GOOD)], False),
        ([(GOOD, ""), (GOOD, GOOD[:9]), (GOOD, GOOD[:9])], True),
    ],
    ids=["replaced", "gone", "written", "half-written"],
)
def test_json_files_in_change_are_looked_at_again(
    root: Path, tmp_path: Path, steps: list[tuple[str | None, str]], damaged: bool
) -> None:
    """A Java broker removes a file before it renames the new one to it, and writes a backup in place. What stays as it
    is, is damaged."""
    file = root / "config" / "consumerOffset.json"

    def change(call: int) -> None:
        content, backup = steps[min(call, len(steps) - 1)]
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        file.with_name(f"{file.name}.bak").write_text(backup)

    with hooked("small files", change) as looks, open_store(root):
        report = taken(root, tmp_path / "copy")
    assert len(looks) == len(steps)
    assert [finding.kind for finding in report.findings] == ["bad_json"] * damaged
    assert (tmp_path / "copy" / "config" / file.name).exists()


def test_java_records_after_a_killed_splice_are_copied(tmp_path: Path) -> None:
    """It knows nothing of an intent, which then is not acted on."""
    root = tmp_path / "mq"
    store = open_store(root, profile="rocketmq")
    put(store, range(20))
    store.flush()
    kill(store)
    checkpoint = (root / "checkpoint").read_bytes()
    intent = Intent("job", 0, store.max_offset, 5)
    store = open_store(root)
    put(store, range(20, 70))
    store.dispatch()
    kill(store)
    (root / TXN_FILE).parent.mkdir(parents=True)
    (root / TXN_FILE).write_bytes(encode_json(TxnState(intent=intent).as_json()))
    (root / "checkpoint").write_bytes(checkpoint)  # a broker leaves the fields that are ours
    lock = WriterLock(root, "a broker")
    lock.acquire()
    try:
        report = taken(root, tmp_path / "copy")
    finally:
        lock.release()
    assert (report.messages, [finding.kind for finding in report.findings]) == (70, ["unfinished_splice"])
    sound(tmp_path / "copy")


@pytest.mark.parametrize("link", [False, True])
def test_a_segment_made_ahead_is_left(root: Path, tmp_path: Path, link: bool) -> None:
    """Or it would copy what comes meanwhile, of topics that are not in the table yet."""
    with open_store(root) as store:
        before, end = told(root), store.max_offset
        (root / "commitlog" / f"{end // SEGMENT * SEGMENT + SEGMENT:020d}").write_bytes(bytes(SEGMENT))
        with hooked("copy", lambda call: store.put("new", b"x")):
            report = taken(root, tmp_path / "copy", link=link)
        assert store.max_offset < end // SEGMENT * SEGMENT + SEGMENT
    assert report.plan.log_end == report.log_end == end
    assert report.plan.linked == (len(links(tmp_path / "copy")) - 1 if link else 0)
    assert told(tmp_path / "copy") == before
    sound(tmp_path / "copy")


def test_a_segment_dropped_during_the_look(root: Path, tmp_path: Path) -> None:
    """As when a splice that rolled is taken back."""
    with open_store(root) as store:
        name = root / "commitlog" / f"{store.max_offset // SEGMENT * SEGMENT + SEGMENT:020d}"
        name.write_bytes(bytes(SEGMENT))
        with hooked("end", lambda call: name.unlink() if call == 0 else None) as calls:
            taken(root, tmp_path / "copy")
    assert len(calls) == 2
    assert told(tmp_path / "copy") == told(root)


def test_progress_that_is_taken_over_is_not_missed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job has published is renamed, saved elsewhere, and removed: a look in between would find it nowhere."""
    offsets = root / "config" / "consumerOffset.json"
    publish(root, "g", {("orders", 0): 5})
    offsets.write_text('{"offsetTable": {}}')
    real = type(QUIET).read_whole
    steps: list[None] = []

    def read(self: Any, path: Any, limit: int) -> bytes:
        path = Path(path)
        if path.name == "g.json" and not steps:
            steps.append(None)
            path.rename(path.with_name("g.json.taken"))
        content = real(self, path, limit)
        if path == offsets:
            offsets.write_text('{"offsetTable": {"orders@g": {"0": 5}}}')
            path.parent.joinpath("spark", "groups", "g.json.taken").unlink(missing_ok=True)
        return content

    with open_store(root):
        monkeypatch.setattr(type(QUIET), "read_whole", read)
        taken(root, tmp_path / "copy")
    found = files(tmp_path / "copy")
    assert b"orders@g" in found["config/consumerOffset.json"] or "config/spark/groups/g.json.taken" in found


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors")
def test_a_bundle_of_more_files_than_may_be_open(root: Path, tmp_path: Path) -> None:
    with open_store(root):
        bundle(root, "job", 0, [[Row(b"%d" % i)] for i in range(120)])
        with limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 70):
            taken(root, tmp_path / "copy")
        assert files(tmp_path / "copy" / "inbox") == files(root / "inbox")


def test_the_end_is_sought_from_what_was_flushed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And from the segment's beginning where that leads nowhere: the log ends at the same place."""
    starts: list[int] = []
    real = looking.scan_log

    def scan(run: Any, start: int, checksum: Any) -> Any:
        starts.append(start)
        return real(run, start, checksum)

    monkeypatch.setattr(looking, "scan_log", scan)
    with open_store(root) as store:
        put(store, range(200, 205))
        flushed = store.max_offset - store.stats().flush_lag_bytes
        store.put("orders", b"not flushed")
        first = taken(root, tmp_path / "first")
        assert starts == [flushed]
        # Somebody wrote nonsense where it says that whole records begin.
        note_in_checkpoint(root, flushed=flushed + 7)
        second = plan_snapshot(root, tmp_path / "second")
        assert starts[1:] == [flushed + 7, flushed // SEGMENT * SEGMENT]
    assert first.plan.log_end == second.log_end == first.log_end
    assert first.messages == 206


def test_linked_folders_are_reported_and_not_followed(root: Path, tmp_path: Path) -> None:
    (root / "config" / "loop").symlink_to("..")
    (root / "config" / "nowhere.json").symlink_to("gone")
    os.mkfifo(root / "config" / "pipe")
    (root / "commitlog" / "notes").write_text("mine")
    report = taken(root, tmp_path / "copy")
    assert report.plan.left == (
        "config/nowhere.json: neither a file nor a folder",
        "config/pipe: neither a file nor a folder",
        "config/loop: a link to a folder",
        "commitlog/notes: not a segment",
    )
    assert not (tmp_path / "copy" / "config" / "loop").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL])
def test_root_that_may_not_give_files_away_keeps_them(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As in a container without CAP_CHOWN, or with an owner whom its user namespace does not know."""
    for path in (root, *root.rglob("*")):
        os.chown(path, 1234, 1234)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "chown", refuse)
    taken(root, tmp_path / "copy")
    assert {path.stat().st_uid for path in (tmp_path / "copy", *(tmp_path / "copy").rglob("*"))} == {0}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("link", [False, True])
def test_files_of_root_keep_their_owner(root: Path, tmp_path: Path, link: bool) -> None:
    """Neither a file elsewhere that the store's owner put a link to, nor one of the original's that the copy shares."""
    (tmp_path / "secret").write_text("{}")
    (root / "config" / "mine.json").symlink_to(tmp_path / "secret")
    segment = f"commitlog/{0:020d}"
    for path in (root, *root.rglob("*")):
        if path not in (root / segment, root / "config" / "mine.json"):
            os.chown(path, 1234, 1234)
    taken(root, tmp_path / "copy", link=link)
    kept = {name for name in files(tmp_path / "copy") if (tmp_path / "copy" / name).stat().st_uid == 0}
    assert kept == {"config/mine.json", segment}
    assert (root / segment).stat().st_uid == 0


def test_a_topic_made_between_the_looks_is_there(root: Path, tmp_path: Path) -> None:
    table = root / "config" / "topics.json"
    with open_store(root) as store:

        def make(call: int) -> None:
            if call == 0:
                table.write_text('{"topicConfigTable": {}}')
                store.put("new", b"x")

        with hooked("end", make):
            taken(root, tmp_path / "copy")
    assert files(tmp_path / "copy")["config/topics.json"] == table.read_bytes()
    assert ("new", 0) in bounds(tmp_path / "copy")


def test_at_each_step_of_a_splice_all_of_it_is_in_or_waits(tmp_path: Path) -> None:
    root = tmp_path / "mq"
    with open_store(root) as store:
        put(store, range(20))
    rows = [Row(b"%d" % i * 40, queue_id=i % 2) for i in range(40)]
    before = told(root)
    fs = FaultyFileSystem()
    copies: list[Path] = []
    looks = itertools.count()

    def look() -> None:
        if next(looks) % 4 and STEP > 1:  # `make crash` looks at each step
            return
        target = tmp_path / f"copy{len(copies)}"
        copies.append(target)
        assert taken(root, target).findings == []

    with open_store(root, fs=fs) as store:
        bundle(root, "job", 0, [rows])
        fs.before_change = look
        assert store.take_inbox() == 1
        fs.before_change = None
    after = told(root)
    kinds = set()
    for copy in copies:
        sound(copy)
        waits = (copy / "inbox" / "job-0").exists()
        held = told(copy)
        assert held in (before, after)
        kinds.add((waits, held == after))
        with open_store(copy):
            pass
        assert told(copy) == after
    assert kinds == {(True, False), (True, True), (False, True)}


def test_a_bundle_that_waits_waits_in_the_copy_too(root: Path, tmp_path: Path) -> None:
    with open_store(root) as store:
        bundle(root, "job", 0, [[Row(b"first")], [Row(b"second")]])
        (root / "inbox" / ".job-1").mkdir()
        waiting = files(root / "inbox")

        def take(call: int) -> None:
            assert store.take_inbox() == 1 - call

        with hooked("copy", take):  # it is gone before its turn comes, and was a part of the moment
            report = taken(root, tmp_path / "copy")
        assert report.plan.bundles == 1
        assert files(tmp_path / "copy" / "inbox") == waiting
        assert bodies(store)[-2:] == [b"first", b"second"]
    with open_store(tmp_path / "copy") as copy:
        assert bodies(copy)[-2:] == [b"first", b"second"]
    assert told(tmp_path / "copy") == told(root)


def test_each_bundle_that_waits_is_copied_once(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their owner takes in one after the other: a look that copied all of them anew would never see it at rest."""
    brought: list[str] = []
    inbox = root / "inbox"
    real = TreeCopy.file
    with open_store(root) as store:
        for version in range(6):
            bundle(root, "job", version, [[Row(b"%d" % version)]])

        def file(self: TreeCopy, name: str, *arguments: Any, **named: Any) -> None:
            real(self, name, *arguments, **named)
            if name.endswith("bundle.json"):
                brought.append(name)
                version = len(brought)
                store.splice([stage(tmp_path / f"shard{version}", [Row(b"other")])], app="other", version=version)
                if version == 3:
                    waiting = [path.rename(path.with_name(f".{path.name}")) for path in sorted(inbox.glob("job-[1-5]"))]
                    assert store.take_inbox() == 1
                    for path in waiting:
                        path.rename(path.with_name(path.name[1:]))

        monkeypatch.setattr(TreeCopy, "file", file)
        report = taken(root, tmp_path / "copy")
        waiting = files(root / "inbox")
    assert sorted(brought) == [f"inbox/job-{version}/bundle.json" for version in range(6)]
    assert report.plan.bundles == 5
    assert files(tmp_path / "copy" / "inbox") == waiting
    with open_store(tmp_path / "copy") as copy:
        found = bodies(copy)
    assert [found.count(b"%d" % version) for version in range(6)] == [1] * 6
    assert found.count(b"other") == 6


def test_an_opening_meanwhile_makes_it_begin_again(root: Path, tmp_path: Path) -> None:
    def come(call: int, _: object) -> None:
        if call == 0:
            with open_store(root) as store:
                put(store, range(500, 520))

    with hooked("copy", lambda call: None, come) as calls:
        report = taken(root, tmp_path / "copy")
    assert len(calls) == 2
    assert report.messages == 220
    assert told(tmp_path / "copy") == told(root)


def test_a_writer_killed_between_looks_is_noticed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store at rest whole files are copied: here with half a splice in them, and no intent."""
    shards = [stage(tmp_path / "shard", [Row(b"half%d" % i) for i in range(8)])]
    came: list[MessageStore] = []
    real = looking.writer_alive

    def alive(*arguments: Any) -> bool:
        found = real(*arguments)
        if not came:
            came.append(open_store(root, fs=FaultyFileSystem()))
        return found

    def splice(call: int) -> None:
        if call == 0:
            kill_in_splice(came[0], shards)

    monkeypatch.setattr(looking, "writer_alive", alive)
    with hooked("copy", splice) as calls:
        report = taken(root, tmp_path / "copy")
    assert report.messages == 200
    assert [cut.reason for cut in report.truncated] == ["unfinished_splice"]
    assert len(calls) == 2


def test_a_store_that_never_rests_is_busy(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "_PATIENCE_S", 0.05)
    topics = root / "config" / "topics.json"
    with (
        open_store(root),
        hooked("end", lambda call: topics.write_text(str(call))) as calls,
        pytest.raises(StoreBusyError, match="Try again when"),
    ):
        taken(root, tmp_path / "copy")
    assert len(calls) > 1
    assert os.listdir(tmp_path) == ["mq"]


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("held", [0, 3, 256])
def test_retention_during_a_copy_is_harmless(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, link: bool
) -> None:
    """What is held open is copied all the same. Else it begins with a new moment, and keeps what it has: what was put
    to make up for what is gone is in it."""
    monkeypatch.setattr(looking, "_HELD", held)
    before = told(root)
    brought: list[str] = []
    with open_store(root, retention=Retention(age=None, max_bytes=3 * SEGMENT)) as store:

        def clean(name: str) -> None:
            if name.startswith("commitlog/0"):
                if len(brought) == 2:
                    store.put("orders", b"what was in the first one, once more")
                    store.dispatch()
                    store.flush()
                    store.clean()
                brought.append(name)

        def after_that(real: Callable[..., None]) -> Callable[..., None]:
            def bring(self: TreeCopy, name: str, *arguments: Any, **named: Any) -> None:
                clean(name)
                real(self, name, *arguments, **named)

            return bring

        for way in ("file", "link"):
            monkeypatch.setattr(TreeCopy, way, after_that(getattr(TreeCopy, way)))
        report = taken(root, tmp_path / "copy", link=link)
        assert store.min_offset > 0
        assert (report.plan.log_start == 0) == (held == 256)
    assert told(tmp_path / "copy") == (before if held == 256 else told(root))
    assert report.findings == []
    sound(tmp_path / "copy")
    last = max(brought)
    if not link:
        assert all(brought.count(name) == 1 for name in brought if name != last)  # what it had it did not copy again


def test_a_log_cut_meanwhile_is_copied_again(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer dies, and a recovery cuts the log; another writer goes on from there."""
    with open_store(root, "r") as store:
        (hit,) = store.find("orders", key="k50")
    calls: list[str] = []
    real = TreeCopy.file
    writer = open_store(root)

    def copy(self: TreeCopy, name: str, *arguments: Any, **named: Any) -> None:
        real(self, name, *arguments, **named)
        if name.startswith("commitlog"):
            calls.append(name)
            if len(calls) == 5:
                kill(writer)
                flip_log(root, hit.physical_offset + 95)
                recover(root, prefix=True)
                with open_store(root) as other:
                    put(other, range(800, 900))

    monkeypatch.setattr(TreeCopy, "file", copy)
    report = taken(root, tmp_path / "copy")
    assert report.findings == []
    assert told(tmp_path / "copy") == told(root)
    sound(tmp_path / "copy")


@pytest.mark.parametrize("at", [100, 195])
def test_a_cut_by_recovery_is_seen(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    with open_store(root, "r") as store:
        (hit,) = store.find("orders", key=f"k{at}")
    flip_log(root, hit.physical_offset + 95)
    copied: list[str] = []
    reports: list[SnapshotReport] = []
    real, copy = Tail.cut, TreeCopy.file

    def cut(self: Tail, *arguments: Any, **named: Any) -> None:
        def file(tree: TreeCopy, name: str, *others: Any, **more: Any) -> None:
            copied.append(name)
            if copied.count(f"commitlog/{2 * SEGMENT:020d}") == 1 and len(copied) < 1000:
                copied.extend([""] * 1000)
                real(self, *arguments, **named)
            copy(tree, name, *others, **more)

        monkeypatch.setattr(Tail, "cut", real)
        with monkeypatch.context() as patch:
            patch.setattr(TreeCopy, "file", file)
            reports.append(taken(root, tmp_path / "copy"))

    monkeypatch.setattr(Tail, "cut", cut)
    recover(root, prefix=True)
    (report,) = reports
    assert [finding.kind for finding in report.findings] == ["lost_tail"]  # as whoever is killed in it would leave it
    assert report.messages == at
    assert told(tmp_path / "copy") == told(root)
    sound(tmp_path / "copy")


@pytest.mark.parametrize("held", [0, 256])
def test_a_last_segment_taken_is_no_cut(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setattr(looking, "_HELD", held)
    with open_store(root, retention=Retention(age=None, max_bytes=SEGMENT)) as store:

        def clean(call: int) -> None:
            if call == 0:
                put(store, range(200, 300))
                store.dispatch()
                store.flush()
                store.clean()

        with hooked("copy", clean) as calls:
            report = taken(root, tmp_path / "copy")
        assert len(calls) == (1 if held else 2)
    assert report.findings == []
    sound(tmp_path / "copy")


# -- links -------------------------------------------------------------------------------------------------------------


def links(root: Path) -> list[int]:
    return [path.stat().st_nlink for path in sorted((root / "commitlog").glob("0*"))]


def test_with_link_closed_segments_are_shared_and_the_last_one_is_not(root: Path, tmp_path: Path) -> None:
    before = told(root)
    report = taken(root, tmp_path / "copy", link=True)
    count = len(links(root))
    assert (report.plan.segments, report.plan.linked) == (count, count - 1)
    assert links(root) == links(tmp_path / "copy") == [2] * (count - 1) + [1]
    with open_store(root) as store, open_store(tmp_path / "copy") as copy:
        put(store, range(200, 230))
        put(copy, range(900, 960))
    for path in (root, tmp_path / "copy"):
        sound(path)
        assert {key: value[: len(before[key])] for key, value in told(path).items()} == before


@pytest.mark.parametrize("cut", ["mq", "copy"])
def test_cut_in_a_shared_segment_copies_it(root: Path, tmp_path: Path, cut: str) -> None:
    with open_store(root, "r") as store:
        (hit,) = store.find("orders", key="k50")
    taken(root, tmp_path / "copy", link=True)
    flip_log(root, hit.physical_offset + 95)  # a bad disk: both have it
    other = tmp_path / ("copy" if cut == "mq" else "mq")
    before = files(other)
    report = recover(tmp_path / cut, prefix=True)
    assert report.log_end == hit.physical_offset
    with open_store(tmp_path / cut) as store:
        put(store, range(700, 800))
    assert files(other) == before
    sound(tmp_path / cut)
    assert links(tmp_path / cut)[hit.physical_offset // SEGMENT] == 1


@pytest.mark.parametrize("durability", ["append", "flush"])
def test_a_second_name_that_others_give_costs_no_message(tmp_path: Path, durability: Any) -> None:
    """`cp -al` of a store in use, prepared segments and all: whoever writes goes on with the files that it has."""
    config = StoreConfig(segment_bytes=1 << 16)
    with MessageStore(tmp_path / "mq", durability=durability, config=config) as store:
        for i in range(900):
            store.put("orders", b"%04d" % i * 50)
            if i % 30 == 0:
                for path in [*(tmp_path / "mq").glob("commitlog/0*"), *(tmp_path / "mq").glob("tmp/0*")]:
                    os.link(path, tmp_path / f"{path.name}-{i}")
    with MessageStore(tmp_path / "mq") as store:
        assert store.recovery.findings == []
        assert [m.body[:4] for m in store.iter("orders", 0)] == [b"%04d" % i for i in range(900)]


def test_a_reader_goes_over_to_the_copy_that_a_recovery_has_made(tmp_path: Path) -> None:
    """Of the file that it had mapped, which is somebody else's now, it would see no message that comes."""
    store = open_store(tmp_path / "mq")
    put(store, range(25))
    store.dispatch()
    end = store.max_offset
    kill(store)
    overwrite_log(tmp_path / "mq", end, b"\0\0\1\0half a record")
    os.link(segment_of(tmp_path / "mq", end), tmp_path / "other")
    with open_store(tmp_path / "mq", "r") as reader:
        assert len(list(reader.iter("orders", 0))) == 9
        with open_store(tmp_path / "mq") as store:
            put(store, range(25, 31))
        reader.news.list_again()
        assert len(list(reader.iter("orders", 0))) == 11


def counts_behind(root: Path, more: range, copy: Path, others: range) -> tuple[int, ...]:
    """How many messages each store has, both of them sound, once messages were put to both side by side."""
    with open_store(root) as store, open_store(copy) as other:
        put(store, more)
        put(other, others)
    for path in (root, copy):
        sound(path)
    return tuple(sum(map(len, told(path).values())) for path in (root, copy))


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
@pytest.mark.parametrize("left", ["a file made ahead", "a splice"])
def test_last_segment_at_rest_is_not_shared(tmp_path: Path, profile: Any, left: str) -> None:
    """It need not be the last file: a Java broker makes the next one ahead, and a kill leaves half a splice."""
    root = tmp_path / "mq"
    store = open_store(root, profile=profile, fs=FaultyFileSystem())
    put(store, range(100))
    store.flush()
    if left == "a splice":
        shards = [stage(tmp_path / "shard", [Row(b"%d" % i * 20) for i in range(100)], profile)]
        kill_in_splice(store, shards)
    else:
        end = store.max_offset
        store.close()
        (root / "commitlog" / f"{end // SEGMENT * SEGMENT + SEGMENT:020d}").write_bytes(bytes(SEGMENT))
    before = files(root)
    report = taken(root, tmp_path / "copy", link=True)
    assert files(root) == before
    assert links(tmp_path / "copy") == [2] * report.plan.linked + [1]
    assert counts_behind(root, range(100, 110), tmp_path / "copy", range(900, 920)) == (110, 120)


def test_shared_segment_ending_in_zeros_is_copied(root: Path, tmp_path: Path) -> None:
    """A power cut took pages of it, and left what lies in the segments behind."""
    kill(open_store(root))
    reboot(root)
    with open_store(root, "r") as store:
        (hit,) = store.find("orders", key="k150")
    overwrite_log(root, hit.physical_offset, bytes(SEGMENT - hit.physical_offset % SEGMENT))
    note_in_checkpoint(root, flushed=hit.physical_offset, dispatched=0)
    taken(root, tmp_path / "copy", link=True)
    copied = told(tmp_path / "copy")  # a recovery reads the copy back: it passes over the zeros
    with open_store(root) as store:
        put(store, range(150, 155))
    sound(root)
    assert sum(map(len, told(root).values())) == 155
    assert told(tmp_path / "copy") == copied


def test_links_to_segments_are_copied_not_linked(root: Path, tmp_path: Path) -> None:
    """A log over two disks, as docs/recovery.md has it for a broker's."""
    (tmp_path / "other").mkdir()
    for path in sorted((root / "commitlog").glob("0*"))[:3]:
        path.rename(tmp_path / "other" / path.name)
        path.symlink_to(Path("..", "..", "other", path.name))
    report = taken(root, tmp_path / "deep" / "copy", link=True)
    assert report.findings == []
    assert report.plan.linked == report.plan.segments - 4
    assert not any(path.is_symlink() for path in (tmp_path / "deep" / "copy" / "commitlog").iterdir())
    assert told(tmp_path / "deep" / "copy") == told(root)
    sound(tmp_path / "deep" / "copy")


def test_links_need_one_file_system(root: Path, tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    target = elsewhere / f"mqstore-test-{os.getpid()}" / "copy"
    with pytest.raises(ConfigError, match="another file system"):
        taken(root, target, link=True)
    assert not target.parent.exists()


# -- the target --------------------------------------------------------------------------------------------------------


def test_targets_that_are_in_the_way_are_refused_before_anything_is_made(root: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("a")
    (tmp_path / "file").write_text("a")
    (tmp_path / "way").symlink_to(root)
    before = files(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target, why in (
        ("full", "already exists"),
        ("file", "already exists"),
        ("link", "already exists"),
        ("mq", "is inside the store"),
        ("mq/copy", "is inside the store"),
        ("way/copy", "is inside the store"),
        (".", "above the store"),
    ):
        for call in (taken, plan_snapshot):
            with pytest.raises(ConfigError, match=why):
                call(root, tmp_path / target)
    (tmp_path / "link").unlink()
    assert files(tmp_path) == before
    with pytest.raises(NotAStoreError):
        taken(tmp_path / "full", tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["file", "full", "mq", "way"]


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue"])
def test_a_target_in_a_folder_that_the_store_has_elsewhere_is_refused(root: Path, tmp_path: Path, folder: str) -> None:
    (root / folder).rename(tmp_path / "elsewhere")
    (root / folder).symlink_to(tmp_path / "elsewhere")
    for target in ("elsewhere/copy", "elsewhere/a/b"):
        for call in (taken, plan_snapshot):
            with pytest.raises(ConfigError, match="is inside the store"):
                call(root, tmp_path / target)
    taken(root, tmp_path / "copy")
    assert told(tmp_path / "copy") == told(root)


def test_a_plan_refuses_what_the_call_would_refuse(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of targets: a bad name, and a folder that is not to be written to."""
    for call in (plan_snapshot, taken):
        for name in (f"{tmp_path}/copy\ud800", "", "a\0b"):
            with pytest.raises(ConfigError, match="is not a folder name"):
                call(root, name)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    for call in (plan_snapshot, taken):
        for target in (tmp_path / "copy", tmp_path / "a" / "copy"):
            with pytest.raises(ReadOnlyStoreError):
                call(root, target)
    assert os.listdir(tmp_path) == ["mq"]


def test_parents_made_meanwhile_are_not_removed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FaultyFileSystem.mkdir

    def mkdir(self: FaultyFileSystem, path: Any, *arguments: Any, **named: Any) -> None:
        if Path(path) == tmp_path / "a" / "b":
            (tmp_path / "a" / "b").mkdir()
        real(self, path, *arguments, **named)

    monkeypatch.setattr(FaultyFileSystem, "mkdir", mkdir)
    monkeypatch.setattr(module, "recover_store", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        taken(root, tmp_path / "a" / "b" / "c" / "copy", fs=FaultyFileSystem())
    assert files(tmp_path / "a") == {}
    assert [str(path.relative_to(tmp_path)) for path in (tmp_path / "a").rglob("*")] == ["a/b"]


def test_target_is_resolved_and_its_parents_made(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "far" / "empty").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "far" / "away")
    monkeypatch.chdir(tmp_path)
    for name in ("way/../copy/", "way/../empty", "way/../a/b/c"):
        report = taken(Path("mq"), name)  # type: ignore[arg-type]
        real = tmp_path / "far" / name.removeprefix("way/../")
        assert report.plan.snapshot == str(real)
        assert told(real) == told(root)
    (tmp_path / "file").write_text("a")
    with pytest.raises(ConfigError, match="is not a folder"):
        taken(root, tmp_path / "file" / "copy")


def test_nothing_that_bears_such_a_name_is_touched(root: Path, tmp_path: Path) -> None:
    """What a killed call has left, or somebody else: be it the very store."""
    (tmp_path / "copy.partial").mkdir()
    root.rename(tmp_path / "copy.partial" / "store")
    root = tmp_path / "copy.partial" / "store"
    (tmp_path / "copy.partial-0a1b2c3d").mkdir()
    (tmp_path / "copy.partial-0a1b2c3d" / "thesis.txt").write_text("years of work")
    before = files(tmp_path)
    taken(root, tmp_path / "copy")
    assert {name: content for name, content in files(tmp_path).items() if not name.startswith("copy/")} == before
    assert told(tmp_path / "copy") == told(root)


def test_second_copy_to_a_target_is_refused(root: Path, tmp_path: Path) -> None:
    def other(call: int) -> None:
        if call == 0:
            taken(root, tmp_path / "copy")

    with hooked("copy", other), pytest.raises(ConfigError, match="was created meanwhile"):
        taken(root, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["copy", "mq"]
    assert told(tmp_path / "copy") == told(root)


def test_a_plan_says_what_will_be_done_and_does_nothing(root: Path, tmp_path: Path) -> None:
    (root / "cut").mkdir()
    for i in range(10):
        (root / f"note{i}").write_text("mine")
    before = states(root)
    plan = plan_snapshot(root, tmp_path / "copy")
    assert states(root) == before
    assert os.listdir(tmp_path) == ["mq"]
    assert plan.left[0] == "cut: not a part of the store"
    assert plan.left[-1] == "and 3 more"
    report = taken(root, tmp_path / "copy")
    free = report.plan.free_bytes
    assert report.plan == replace(plan, free_bytes=free)
    assert not (tmp_path / "copy" / "note0").exists()
    assert plan.segments == len(links(root))
    assert plan.log_end == len(links(root)) * SEGMENT  # of a store at rest: its files
    assert plan.as_dict().keys() == set(SnapshotPlan.__dataclass_fields__)
    assert set(report.as_dict()) == {*plan.as_dict(), "messages", "findings", "truncated", "seconds"}


def test_progress_grows_to_the_whole(root: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    taken(root, tmp_path / "copy", progress=lambda done, total: seen.append((done, total)))
    done = [each for each, _ in seen]
    assert done == sorted(done)
    assert len({total for _, total in seen}) == 1
    assert 0.9 * seen[-1][1] <= done[-1] <= seen[-1][1]


# -- errors, kills, power cuts -----------------------------------------------------------------------------------------


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A store of some files of each kind."""
    root = tmp_path / "mq"
    store = open_store(root)
    put(store, range(30))
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "topics.json").write_text('{"topicConfigTable": {}}')
    kill(store)
    bundle(root, "job", 0, [[Row(b"waits")]])
    return root


def _names(root: Path) -> list[str]:
    """The files of a copy; that of the index bears the time."""
    return sorted(name if not name.startswith("index") else "index" for name in files(root))


@pytest.mark.parametrize("part", range(4))
def test_killed_at_any_change_there_is_a_whole_one_or_none(few: Path, tmp_path: Path, part: int) -> None:
    taken(few, tmp_path / "first", link=True)
    before = files(few)
    for nth, fs in deaths(4 * STEP, first=1 + part * STEP):
        target = tmp_path / f"copy{nth}"
        with contextlib.suppress(Crash):
            taken(few, target, fs=fs, link=True)
        if target.exists():
            assert _names(target) == _names(tmp_path / "first")
            sound(target)
        else:
            taken(few, target, link=True)
        assert len(units_of(target, "orders", 0)) == 10
        assert files(few) == before
    assert nth > 100


@pytest.mark.parametrize("part", range(4))
def test_after_an_error_at_any_change_nothing_is_left(few: Path, tmp_path: Path, part: int) -> None:
    before = files(few)
    for nth in itertools.count(1 + part * STEP, 4 * STEP):
        target = tmp_path / f"a{nth}" / "b" / "copy"
        fs = FaultyFileSystem()
        fs.fail(CHANGES, errno.EIO, nth=nth)
        try:
            taken(few, target, fs=fs)
        except StoreIOError:
            if target.exists():  # what failed was to make its name durable
                sound(target)
            else:
                assert not target.parents[1].exists(), fs.changes()[nth - 1]
        else:
            sound(target)
        assert files(few) == before
        if not fs.failed:
            break
    assert nth > 100


def test_a_read_error_of_the_original_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: FaultyFileSystem, fd: int, *_: object) -> int:
        self._fail(OSError(errno.EIO, os.strerror(errno.EIO)), fd, "pread")

    monkeypatch.setattr(FaultyFileSystem, "read_into", read)
    with pytest.raises(StoreIOError) as caught:
        taken(root, tmp_path / "copy", fs=FaultyFileSystem())
    assert caught.value.filename.startswith(f"{root}/consumequeue/orders/")
    assert os.listdir(tmp_path) == ["mq"]


@pytest.mark.parametrize("crashed", [False, True])
def test_a_power_cut_leaves_a_whole_one_or_none(root: Path, tmp_path: Path, crashed: bool) -> None:
    if crashed:
        kill(open_store(root))
    bundle(root, "job", 0, [[Row(b"waits")]])
    (root / "config" / "topics.json").write_text('{"topicConfigTable": {}}')
    disk = tmp_path / "disk"
    disk.mkdir()
    fs = RecordingFileSystem(disk)
    try:
        snapshot_store(root, disk / "copy", fs=fs)
    finally:
        fs.dispose()
    expected = files(disk / "copy")
    renamed = next(
        i
        for i, event in enumerate(fs.events)
        if event.kind == "names" and any(name == "copy" and node is not None for _, name, node in event.operands)
    )
    done = next(i for i, event in enumerate(fs.events) if i > renamed and event.kind == "sync_folder")
    for seed in range(12):
        image = tmp_path / f"image{seed}"
        build_image(fs.events[: (done if seed % 2 else renamed) + 1], random.Random(seed), image)
        assert (image / "copy").exists() or not seed % 2
        if (image / "copy").exists():
            found = files(image / "copy")
            for name in ("lock", "tmp/room"):  # not synced: neither has content that is read
                expected.pop(name, None)
            assert {name: found.get(name) for name in expected} == expected
