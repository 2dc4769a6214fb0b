"""Many at once: threads, processes, forks, more queues than descriptors. Rounds are bounded, no time is measured."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import OutgoingMessage, Retention, SimulatedClock, StoreConfig
from mqstore.errors import (
    FlushTimeoutError,
    OffsetOutOfRangeError,
    ReadOnlyStoreError,
    StoreClosedError,
    StoreIOError,
    StoreLockedError,
)
from mqstore.files.segmentwriter import SegmentWriter
from mqstore.log.store import MessageStore
from tests.children import in_child, speaking_child
from tests.faults import FaultyFileSystem
from tests.holding import linux_only, open_files
from tests.log.support import Unsynced, open_in, open_store
from tests.waiting import in_threads, until

SMALL = StoreConfig(segment_bytes=1 << 14, consumequeue_units=50, index_slots=50, index_entries=200)
STORE = Path(mqstore.__file__).parents[1]


class Program:
    """A Python program in another process, which this one talks to by lines."""

    def __init__(self, source: str, *arguments: object) -> None:
        environment = os.environ | {"PYTHONPATH": str(STORE), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", source, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def finish(self) -> tuple[int, str]:
        out, _ = self.process.communicate()
        return self.process.returncode, out

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run() -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start(source: str, *arguments: object) -> Program:
        programs.append(Program(source, *arguments))
        return programs[-1]

    yield start
    for program in programs:
        if program.process.poll() is None:
            program.kill()


# -- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["append", "flush"])
def test_every_thread_finds_all_messages_in_put_order(tmp_path: Path, durability: Any) -> None:
    writers, each = 4, 240

    with open_in("rw", tmp_path / "s", durability=durability, config=SMALL) as store:

        def write(n: int) -> None:
            i = 0
            while i < each:
                if i % 5 == 0:
                    bodies = [b"%d:%d" % (n, i + j) + bytes(i % 90) for j in range(6)]
                    store.put_many("shared", bodies, n % 2, durability="append" if i % 2 else None)
                    i += 6
                else:
                    store.put("shared", b"%d:%d" % (n, i), n % 2, keys=f"w{n}", durability="append" if i % 3 else None)
                    i += 1
            store.put("done", b"%d" % n, n)

        for queue_id in range(2):
            store.put("shared", b"%d:0" % queue_id, queue_id)  # so that there is a queue to wait for

        def read(queue_id: int) -> None:
            offset, counts = 1, dict.fromkeys(range(queue_id, writers, 2), 0)
            while min(counts.values()) < each:
                assert store.wait("shared", queue_id, offset, timeout=3600)
                for message in store.read("shared", queue_id, offset, 50):
                    assert message.offset == offset
                    writer, number = map(int, message.body.rstrip(b"\0").split(b":"))
                    assert number == counts[writer]
                    counts[writer] += 1
                    offset += 1

        in_threads(*(lambda n=n: write(n) for n in range(writers)), *(lambda q=q: read(q) for q in (0, 1, 0, 1)))
        assert store.offsets("shared", 0)[1] + store.offsets("shared", 1)[1] == writers * each + 2
        spans = sorted((m.physical_offset, m.size) for m in store.iter("shared"))
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        store.flush()
        assert list(store.verify()) == []
    with open_in("rw", tmp_path / "s") as store:
        assert store.recovery.scanned_from is None
        assert len(list(store.iter("shared"))) == writers * each + 2


def test_listeners_hear_of_a_put_once_it_is_on_disk(tmp_path: Path) -> None:
    """In a store that shows only what was flushed the sync wakes the dispatcher, which may be asleep."""
    with open_in("rw", tmp_path / "s", durability="flush", config=StoreConfig()) as store:
        for i in range(3):
            heard = threading.Event()
            store.on_growth[:] = [lambda *_, heard=heard: heard.set()]
            store.put("t", b"%d" % i)
            assert heard.wait(10)


class SlowDisk(Unsynced):
    """Syncs of files begin at once, and end while `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def fdatasync(self, fd: int) -> None:
        self.begun.set()
        assert self.go_on.wait(20)


def test_a_put_that_waits_too_long_for_anothers_sync_says_so(tmp_path: Path) -> None:
    """It is stored, and its receipt says where (format#flush)."""
    fs = SlowDisk()
    with open_store(tmp_path / "s", fs=fs, flush_timeout=0.05) as store:
        store.put("t", b"first")
        fs.begun.clear()
        fs.go_on.clear()
        leader = threading.Thread(target=store.flush)
        leader.start()
        assert fs.begun.wait(20)
        with pytest.raises(FlushTimeoutError, match=r"after 0\.05 s") as caught:
            store.put("t", b"second", durability="flush")
        fs.go_on.set()
        leader.join()
        store.flush()
        assert store.at(caught.value.receipt.physical_offset).body == b"second"


def test_retention_beside_readers_and_writers_loses_nothing_that_is_kept(tmp_path: Path) -> None:
    """A reader sees each message from its start on, or is told that it has been overtaken; never a hole."""
    total = 3000
    with open_in("rw", tmp_path / "s", config=SMALL) as store:
        store.put("t", b"0")
        finished = threading.Event()

        def write() -> None:
            for i in range(1, total):
                store.put("t", b"%d" % i, keys="k")
            finished.set()

        def clean() -> None:
            while not finished.is_set():
                store.flush()
                store.clean(Retention(age=None, max_bytes=4 << 14))

        def read() -> None:
            offset = 0
            while offset < total:
                overtaken = None
                try:
                    messages = store.read("t", 0, offset, 20)
                except OffsetOutOfRangeError as error:
                    overtaken = error.min_offset
                if overtaken is not None:
                    assert overtaken > offset
                    offset = overtaken
                    continue
                assert [m.offset for m in messages] == list(range(offset, offset + len(messages)))
                assert [m.body for m in messages] == [b"%d" % i for i in range(offset, offset + len(messages))]
                offset += len(messages)
                if not messages:
                    store.wait("t", 0, offset, timeout=3600)

        in_threads(write, clean, read, read)
        assert store.stats().bad_records == 0
        assert list(store.verify()) == []


@linux_only
def test_threads_and_descriptors_are_given_back(tmp_path: Path) -> None:
    open_in("rw", tmp_path / "s", config=SMALL).close()
    threads, before = set(threading.enumerate()), open_files()
    for mode in ("rw", "r", "rw"):
        store = open_in(mode, tmp_path / "s", **({"durability": "flush"} if mode == "rw" else {}))
        if mode == "rw":
            store.put_many("t", [OutgoingMessage(b"x" * 100, keys="k")] * 500)
            store.flush()
        assert len(store.read("t")) == 32
        assert store.find("t", key="k")
        store.close()
        assert not set(threading.enumerate()) - threads
        assert not open_files() - before


def test_a_segment_that_is_just_being_removed_is_no_damage(tmp_path: Path) -> None:
    """Read between the removal of its file and that from the list."""
    readers: list[threading.Thread] = []
    overtaken: list[int] = []

    def attempt() -> None:
        try:
            store.read("t", 0, 0, 20)
        except OffsetOutOfRangeError as error:
            overtaken.append(error.min_offset)

    class Slow(FaultyFileSystem):
        def unlink(self, path: Any, *, missing_ok: bool = False) -> None:
            super().unlink(path, missing_ok=missing_ok)
            if "commitlog" in str(path):
                readers.append(threading.Thread(target=attempt))
                readers[-1].start()
                readers[-1].join(0.2)  # it may have to wait for us

    with open_in("rw", tmp_path / "s", config=SMALL, fs=Slow()) as store:
        for _ in range(1000):
            store.put("t", bytes(100))
        store.flush()
        assert len(store.read("t", 0, 999)) == 1  # dispatched, as what retention may take has to be
        store.clean(Retention(age=None, max_bytes=1 << 14))
        for reader in readers:
            reader.join(60)
        assert len(overtaken) == len(readers) > 1
        assert store.stats().bad_records == 0


# -- processes ------------------------------------------------------------------------------------------------------

READER = """
import sys, time, mqstore
from mqstore.log.reading.readonly import ReadOnlyMessageStore
path, total = sys.argv[1], int(sys.argv[2])
with ReadOnlyMessageStore(path) as store:
    print("ready", flush=True)
    seen = {0: 0, 1: 0}
    while min(seen.values()) < total:
        for queue_id in seen:
            try:
                messages = store.read("t", queue_id, seen[queue_id], 100)
            except mqstore.errors.TopicNotFoundError:
                continue
            for message in messages:
                i = seen[queue_id]
                expected = (b"%d/%d;" % (queue_id, i)) * (i % 30 + 1)
                assert (message.offset, message.body, message.tag) == (i, expected, "T%d" % (i % 3)), message
                seen[queue_id] += 1
            if seen[queue_id] % 7 == 0 and seen[queue_id]:
                again = store.read("t", queue_id, 0, seen[queue_id])
                assert [message.offset for message in again] == list(range(seen[queue_id]))
    until = time.monotonic() + 60
    while len(store.find("t", key="k", limit=10 * total)) < 2 * total and time.monotonic() < until:
        time.sleep(0.01)  # entries of the index come behind the units
    assert len(store.find("t", key="k", limit=10 * total)) == 2 * total
    assert store.stats().bad_records == 0
print("all of", seen)
"""


def test_another_process_sees_a_growing_whole_prefix(tmp_path: Path, run: Callable[..., Program]) -> None:
    total = 1200
    with open_in("rw", tmp_path / "s", config=SMALL) as store:
        readers = [run(READER, tmp_path / "s", total) for _ in range(2)]
        assert [reader.line() for reader in readers] == ["ready", "ready"]
        for start in range(0, total, 6):
            for queue_id in (0, 1):
                lot = [
                    OutgoingMessage((b"%d/%d;" % (queue_id, i)) * (i % 30 + 1), tag=f"T{i % 3}", keys="k")
                    for i in range(start, start + 6)
                ]
                if start % 4:
                    store.put_many("t", lot, queue_id)
                else:
                    for item in lot:
                        store.put("t", item.body, queue_id, tag=item.tag, keys=item.keys)
        assert [reader.finish() for reader in readers] == [(0, f"all of {{0: {total}, 1: {total}}}\n")] * 2


def test_a_forked_child_can_do_nothing_with_its_parents_store(tmp_path: Path) -> None:
    with open_in("rw", tmp_path / "s", config=SMALL) as store:
        store.put("t", b"parent")
        (view,) = store.read("t")

        def child() -> None:
            for act in (
                lambda: store.put("t", b"child"),
                lambda: store.put("new", b"child"),
                lambda: store.put_many("t", [b"child"]),
                lambda: store.append("t", 0, b"child"),
                lambda: store.read("t"),
                store.flush,
                store.dispatch,
                store.clean,
            ):
                with pytest.raises(StoreClosedError):
                    act()
            assert store.closed
            store.close()  # as a `with` would; must not touch the parent's files
            with pytest.raises(StoreLockedError):
                open_in("rw", tmp_path / "s")
            with open_in("r", tmp_path / "s") as reader:
                assert reader.read("t")[0].body == b"parent"
            assert view.body == b"parent"

        assert in_child(child) == 0
        assert store.put("t", b"goes on").offset == 1
        assert [m.body for m in store.read("t")] == [b"parent", b"goes on"]
        with pytest.raises(StoreLockedError):
            open_in("rw", tmp_path / "s")
        assert list(store.verify()) == []
    with open_in("rw", tmp_path / "s") as store:
        assert store.clean_shutdown


def test_child_forked_during_a_put_does_not_hang(tmp_path: Path) -> None:
    """The lock of the log was held by a thread that the child does not have."""
    held, done = threading.Event(), threading.Event()

    class Stopping(SimulatedClock):
        def now_ms(self) -> int:
            if threading.current_thread().name == "putter":
                held.set()
                done.wait()
            return super().now_ms()

    with open_in("rw", tmp_path / "s", config=StoreConfig(clock=Stopping())) as store:
        store.put("t", b"parent")
        thread = threading.Thread(target=lambda: store.put("t", b"goes on"), name="putter")
        thread.start()
        held.wait()

        def child() -> None:
            for act in (lambda: store.put("t", b"child"), lambda: store.put_many("t", [b"child"])):
                with pytest.raises(StoreClosedError):
                    act()

        try:
            assert in_child(child) == 0
        finally:
            done.set()
            thread.join()
        assert [m.body for m in store.read("t")] == [b"parent", b"goes on"]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_closing_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The store was neither open nor closed, and no other could be opened in its place before the process ended."""
    store = open_in("rw", tmp_path / "s", config=SMALL)
    store.put("t", b"kept")

    signals = [KeyboardInterrupt] * times
    join = threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        if signals:
            raise signals.pop()
        join(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    with pytest.raises(StoreClosedError):
        store.put("t", b"late")
    if times == 2:  # a thread that still wrote beside the next writer would be a second one
        with pytest.raises(StoreLockedError):
            open_in("rw", tmp_path / "s")
        store.close()
    with open_in("rw", tmp_path / "s") as store:
        assert not store.clean_shutdown
        assert [m.body for m in store.read("t")] == [b"kept"]


def test_no_room_for_a_thread_gives_the_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            open_in("rw", tmp_path / "s", config=SMALL)
    with open_in("rw", tmp_path / "s") as store:
        assert store.put("t", b"x").offset == 0


def test_a_forked_child_that_lives_on_does_not_keep_the_store_locked(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    with speaking_child(lambda pipe: signal.pause()):
        store.close()
        with open_store(tmp_path / "s") as again:
            assert again.put("t", b"x").offset == 0


# -- what the system refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.EROFS, ReadOnlyStoreError), (errno.EACCES, ReadOnlyStoreError), (errno.EPERM, ReadOnlyStoreError),
     (errno.EIO, StoreIOError), (errno.EMFILE, StoreIOError)],
)  # fmt: skip
@pytest.mark.parametrize("part", ["lock", "abort"])
def test_refused_opening_names_the_file(tmp_path: Path, number: int, expected: type[OSError], part: str) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("t", b"x")
    fs = FaultyFileSystem()
    fs.fail(("open", "create"), number, path_part=f"s/{part}", times=None)
    with pytest.raises(expected) as caught:
        open_store(tmp_path / "s", fs=fs)
    assert part in str(caught.value.filename)
    with open_store(tmp_path / "s", "r") as store:
        assert store.read("t")[0].body == b"x"
    with open_store(tmp_path / "s") as store:
        assert store.put("t", b"y").offset == 1


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_read_that_the_disk_refuses_is_an_error_and_the_next_one_works(tmp_path: Path, mode: Any) -> None:
    with open_store(tmp_path / "s") as store:
        store.put_many("t", [b"x"] * 20)
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", mode, fs=fs) as store:
        fs.fail("pread", errno.EIO, path_part="consumequeue")
        with pytest.raises(StoreIOError) as caught:
            store.read("t", 0, 3)
        assert caught.value.errno == errno.EIO
        assert len(store.read("t", 0, 3)) == 17


MANY = """
import os, resource, sys
import mqstore
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
path, limit, topics, queues = sys.argv[1], *map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
config = mqstore.StoreConfig(segment_bytes=1 << 18, consumequeue_units=10, index_slots=100, index_entries=1000)
count = topics * queues
names = [(f"topic-{n}", q) for n in range(topics) for q in range(queues)]
for turn in range(2):
    with MessageStore(path, config=config if turn == 0 else None) as store:
        assert turn == 0 or store.recovery.scanned_from is None
        for i, (topic, queue_id) in enumerate(names):
            assert store.put(topic, b"%d.%d" % (turn, i), queue_id, keys="k").offset == turn
        assert not store.stats().errors
        for i, (topic, queue_id) in enumerate(names):
            assert [m.body for m in store.read(topic, queue_id)] == [b"%d.%d" % (t, i) for t in range(turn + 1)]
        assert len(store.topics()) == topics
        assert not store.stats().errors, store.stats().errors
with ReadOnlyMessageStore(path) as store:
    assert sum(1 for topic in store.topics() for ref in store.queues(topic) for _ in store.iter(*ref)) == 2 * count
    assert list(store.verify()) == []
print("fine")
"""


def test_more_queues_than_descriptors(tmp_path: Path, run: Callable[..., Program]) -> None:
    program = run(MANY, tmp_path / "s", 64, 40, 8)
    assert program.finish() == (0, "fine\n")


INDEX = """
import resource, sys
import mqstore
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
path, mode, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
store_type = MessageStore if mode == "rw" else ReadOnlyMessageStore
with store_type(path) as store:
    assert [m.offset for m in store.find("t", key="all", limit=100_000)] == list(range(1999, -1, -1))
    assert [m.offset for m in store.find("t", key="k1")] == [1]
    if mode == "rw":
        for i in range(60):  # each fills more than a file, and nobody syncs between
            store.put_many("t", [mqstore.OutgoingMessage(b"", keys="more")] * 40)
            store.dispatch()
        assert len(store.find("t", key="more", limit=10_000)) == 2400
        assert not store.stats().errors
print("fine")
"""


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_more_index_files_than_descriptors(tmp_path: Path, run: Callable[..., Program], mode: str) -> None:
    with open_store(tmp_path / "s", segment_bytes=1 << 20, consumequeue_units=5000) as store:
        store.put_many("t", [OutgoingMessage(b"", keys=["all", f"k{i}"]) for i in range(2000)])
        store.dispatch()
    assert len(os.listdir(tmp_path / "s" / "index")) > 120
    assert run(INDEX, tmp_path / "s", mode, 80).finish() == (0, "fine\n")


def test_pages_are_prepared_again_after_a_large_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is written by a call needs no pages, so the flusher rests. The next small put wakes it."""
    positions: list[int] = []
    monkeypatch.setattr(SegmentWriter, "populate", lambda _, segment, position, length: positions.append(position))
    with MessageStore(tmp_path / "s") as store:
        end = store.put_many("t", [b"x" * 1000] * 2000)[-1].physical_offset
        store.put("t", b"x")
        until(lambda: max(positions, default=0) > end)
