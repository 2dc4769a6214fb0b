"""What the system refuses is a named error, harms nothing stored, and ends with its cause (reliability#p8).

A scripted run is done once to count its calls of a kind; then it is done again for every n with the n-th of them
failing. A sync that failed is the exception: whoever met it must open the store anew (format#flush).
"""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqstore import Durability, SendReceipt, SimulatedClock, StoreConfig
from mqstore.errors import (
    FlushFailedError,
    FlushTimeoutError,
    MQStoreError,
    StoreFullError,
    StoreIOError,
)
from tests.faults import STEP, FaultyFileSystem
from tests.log.recovering import checkpoint_of
from tests.log.support import open_in
from tests.scarce import limited

SIZES = {"segment_bytes": 4096, "consumequeue_units": 8, "index_slots": 8, "index_entries": 24}
COUNT = 30


def body_of(n: int) -> bytes:
    return b"message %04d " % n * (1 + n % 20)


def config(clock: SimulatedClock | None = None) -> StoreConfig:
    return StoreConfig(clock=clock or SimulatedClock(), **SIZES)


class Run:
    """The scripted run. It goes on after each error as a program would: tries the same put again, reopens after a
    failed sync. `acknowledged` counts messages, `errors` what was raised."""

    def __init__(self, path: Path, fs: Any) -> None:
        self.path = path
        self.fs = fs
        self.clock = SimulatedClock()
        self.acknowledged = 0
        self.errors: list[MQStoreError] = []
        self.store: Any = None

    def attempt(self) -> None:
        """One try at the rest of the run."""
        if self.store is None or self.store.closed:
            self.store = open_in("rw", self.path, config=config(self.clock), fs=self.fs)
        while self.acknowledged < COUNT:
            n = self.acknowledged
            self.store.put("t", body_of(n), keys=f"k{n}", durability="flush" if n % 3 == 0 else "append")
            self.acknowledged += 1
            if n % 4 == 3:
                self.clock.advance(1100)
                self.store.run_once(self.clock.monotonic_ms())
            if n % 6 == 5:
                self.store.dispatch()
        self.store.flush()
        self.store.drop_before(self.store.max_offset // 3)
        self.store.close()

    def through(self) -> None:
        """Attempt until it is done."""
        for _ in range(6):
            try:
                return self.attempt()
            except FlushTimeoutError as error:
                self.errors.append(error)
                self.acknowledged += error.receipt is not None  # stored: not to be put again
            except FlushFailedError as error:
                self.errors.append(error)
                # Stored or not, nobody knows; a program that must know looks for it.
                assert self.store is not None
                self.store.close()
                self.store = open_in("rw", self.path, config=config(self.clock), fs=self.fs)
                self.acknowledged = self.store.offsets("t")[1] if "t" in self.store.topics() else 0
            except MQStoreError as error:
                self.errors.append(error)
        raise AssertionError(f"it does not go on: {self.errors[-1]}")


def check(path: Path, count: int) -> None:
    """Everything acknowledged is there, findable, and in order."""
    with open_in("rw", path, config=config()) as store:
        assert store.recovery.findings == []
        low, high = store.offsets("t")
        assert high == count
        for n, message in zip(range(low, high), store.iter("t"), strict=True):
            assert message.body == body_of(n)
            assert [m.offset for m in store.find("t", key=f"k{n}")] == [n]
    with open_in("r", path) as store:
        assert list(store.verify()) == []


def calls(tmp_path: Path, operation: str) -> int:
    fs = FaultyFileSystem()
    run = Run(tmp_path / "counted", fs)
    run.through()
    assert run.errors == []
    check(tmp_path / "counted", COUNT)
    return sum(call.operation == operation for call in fs.calls)


FAULTS = [
    ("allocate", errno.ENOSPC),
    ("truncate_sparse", errno.EDQUOT),
    ("pwrite", errno.ENOSPC),
    ("pwrite", errno.EIO),
    ("create", errno.EMFILE),
    ("open", errno.EMFILE),
    ("map", errno.ENOMEM),
    ("replace", errno.EIO),
    ("mkdir", errno.ENOSPC),
    ("unlink", errno.EIO),
    ("sync_directory", errno.EIO),
    ("fdatasync", errno.EIO),
]


@pytest.mark.parametrize(("operation", "number"), FAULTS, ids=lambda value: str(value))
def test_one_failing_call_is_a_named_error_and_harms_nothing(tmp_path: Path, operation: str, number: int) -> None:
    total = calls(tmp_path, operation)
    assert total > 0
    for nth in range(1, total + 1, STEP):
        path = tmp_path / f"store-{nth}"
        fs = FaultyFileSystem()
        fs.fail(operation, number, nth=nth)
        run = Run(path, fs)
        run.through()
        for error in run.errors:
            # A sync that could not open its file is not known to have been made, or failed half-way.
            if operation not in ("fdatasync", "sync_directory") and not isinstance(
                error, FlushFailedError | FlushTimeoutError
            ):
                assert isinstance(error, StoreFullError | StoreIOError), f"{operation} {nth}: {error!r}"
                wanted = (errno.ENOSPC, errno.EDQUOT)
                assert isinstance(error, StoreFullError) == (number in wanted), f"{operation} {nth}: {error!r}"
        check(path, COUNT)


def test_a_failed_sync_of_the_log_poisons_until_the_store_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    fs = FaultyFileSystem()
    store = open_in("rw", path, config=config(), fs=fs)
    store.put("t", body_of(0), keys="k0", durability="flush")
    fs.fail("fdatasync", errno.EIO, path_part="commitlog")
    with pytest.raises(FlushFailedError):
        store.put("t", body_of(1), keys="k1", durability="flush")
    end = store.max_offset
    for attempt in (
        lambda: store.put("t", b"x"),
        lambda: store.put("t", b"x", durability="flush"),
        lambda: store.put_many("t", [b"x"]),
        store.flush,
    ):
        with pytest.raises(FlushFailedError):
            attempt()
    assert store.max_offset == end
    assert store.read("t")[0].body == body_of(0)  # what is stored stays readable
    store.close()
    assert (path / "abort").exists()
    with open_in("rw", path, config=config(), fs=fs) as store:
        # What the failed sync left in the cache looks clean to the kernel; so it is written again before it counts.
        written = [c for c in fs.calls if c.operation == "pwrite" and "commitlog" in c.path and c.length > 100]
        assert written
        assert store.offsets("t") == (0, 2)
        store.put("t", body_of(2), keys="k2", durability="flush")
    check(path, 3)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failed_sync_of_any_of_several_segments_poisons_the_log(tmp_path: Path, nth: int) -> None:
    fs = FaultyFileSystem()
    with open_in("rw", tmp_path / "store", config=config(), fs=fs) as store:
        store.put("t", b"", durability="flush")
        while len(store.log_files.segments()) < 3:
            store.put("t", bytes(1000))
        fs.fail("fdatasync", errno.EIO, nth=nth, path_part="commitlog")
        with pytest.raises(FlushFailedError):
            store.flush()
        with pytest.raises(FlushFailedError):
            store.put("t", b"")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("operation", ["open", "sync_directory"])
def test_a_sync_that_finds_no_descriptor_free_is_made_when_there_is_one(
    tmp_path: Path, operation: str, number: int
) -> None:
    """Nothing was synced, so the system has dropped nothing; the store took no more puts until opened anew."""
    path = tmp_path / "store"
    fs = FaultyFileSystem()
    with open_in("rw", path, config=config(), fs=fs) as store:
        first = store.put("t", body_of(0), keys="k0")
        fs.fail(operation, number, path_part="commitlog", times=None)
        for _ in range(2):
            with pytest.raises(FlushTimeoutError) as caught:
                store.flush()
            assert isinstance(caught.value.__cause__, StoreIOError)
            assert caught.value.__cause__.errno == number
        with pytest.raises(FlushTimeoutError) as caught:
            store.put("t", body_of(1), keys="k1", durability="flush")
        receipt = caught.value.receipt
        assert isinstance(receipt, SendReceipt)
        assert receipt.physical_offset == first.physical_offset + first.size
        synced = [call for call in fs.calls if call.operation == "fdatasync" and "commitlog/" in call.path]
        fs.heal()
        store.flush()
        assert len([c for c in fs.calls if c.operation == "fdatasync" and "commitlog/" in c.path]) > len(synced)
        store.put("t", body_of(2), keys="k2", durability="flush")
    assert not (path / "abort").exists()
    check(path, 3)


def test_units_whose_sync_failed_are_not_claimed_by_a_later_sync(tmp_path: Path) -> None:
    """The system may have dropped what it could not write, and the second sync would not know."""
    path = tmp_path / "store"
    fs, clock = FaultyFileSystem(), SimulatedClock()
    with open_in("rw", path, config=config(clock), fs=fs) as store:
        store.put("t", body_of(0), keys="k0", durability="flush")
        store.dispatch()
        store.run_once(clock.monotonic_ms())
        fs.fail("fdatasync", errno.EIO, path_part="consumequeue")
        for _ in range(2):  # the second sync succeeds
            clock.advance(60_000)
            store.run_once(clock.monotonic_ms())
            assert "units" in store.stats().errors
        assert checkpoint_of(path).dispatched == 0
        fs.heal()
    with open_in("rw", path, config=config()) as store:
        assert not store.clean_shutdown
    check(path, 1)


@pytest.mark.parametrize("operation", ["open", "sync_directory"])
def test_queues_that_find_no_descriptor_free_to_sync_by_are_synced_later(tmp_path: Path, operation: str) -> None:
    """Their sync passed for failed, and was never made again: the store could not be closed cleanly any more."""
    path = tmp_path / "store"
    fs, clock = FaultyFileSystem(), SimulatedClock()
    with open_in("rw", path, config=config(clock), fs=fs) as store:
        store.put("t", body_of(0), keys="k0", durability="flush")
        store.dispatch()
        store.run_once(clock.monotonic_ms())
        store.parts.descriptors.release()
        fs.fail(operation, errno.EMFILE, path_part="consumequeue", times=None)
        for failed in (True, False):
            clock.advance(60_000)
            store.run_once(clock.monotonic_ms())
            assert ("units" in store.stats().errors) is failed
            fs.heal()
    check(path, 1)
    with open_in("rw", path, config=config()) as store:
        assert store.clean_shutdown


@pytest.mark.parametrize("length", [0, 1, 19, 100])
def test_short_writes_are_continued(tmp_path: Path, length: int) -> None:
    for nth in range(1, 40, 2 * STEP):
        fs = FaultyFileSystem()
        if length:
            fs.shorten("pwrite", length=length, nth=nth)
        else:
            fs.shorten("pwrite", length=7, nth=nth, fail_rest=errno.ENOSPC)
        run = Run(tmp_path / f"store-{nth}", fs)
        run.through()
        assert bool(run.errors) <= (length == 0)
        check(tmp_path / f"store-{nth}", COUNT)


# --- a disk that is really full ---


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[None]:
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("this machine lets us mount nothing")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)


def fill(store: Any, n: int, durability: Durability = "flush") -> int:
    """Put messages `n` and later until something is refused; the number of the one that was."""
    for number in range(n, n + 10_000):
        try:
            store.put("t", body_of(number), keys=f"k{number}", durability=durability)
        except (StoreFullError, StoreIOError):
            return number
    raise AssertionError("nothing was refused")


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 256 * 1024):
        for n in range(2):
            (disk / f"ballast-{n}").write_bytes(bytes(64 * 1024))
        path = disk / "store"
        # A file has 4 KiB at least, so fewer of them here.
        sizes = {**SIZES, "consumequeue_units": 512, "index_entries": 200}
        store = open_in("rw", path, config=StoreConfig(clock=SimulatedClock(), **sizes))
        count = fill(store, 0)
        assert count > 30
        with pytest.raises(StoreFullError):
            store.put("t", b"x" * 3000)
        assert all(m.body == body_of(n) for n, m in enumerate(store.iter("t")))
        (disk / "ballast-0").unlink()
        store.dispatch()
        assert [m.body for m in store.iter("t")] == [body_of(n) for n in range(count)]
        count = fill(store, count)
        store.close()  # dispatch finds no room either: not a clean end
        with open_in("r", path) as reader:
            assert all(m.body == body_of(n) for n, m in enumerate(reader.iter("t")))
        (disk / "ballast-1").unlink()
        with open_in("rw", path) as store:
            assert [m.body for m in store.iter("t")] == [body_of(n) for n in range(count)]
            assert store.recovery.findings == []


def test_a_limit_on_file_size_is_an_error_not_a_dead_process(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a quota where nothing can be mounted: the next segment cannot be made."""
    path = tmp_path / "store"
    with open_in("rw", path, config=config()) as store:
        for n in range(3):
            store.put("t", body_of(n))
        store.dispatch()
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with limited(resource.RLIMIT_FSIZE, 2048):
            n = fill(store, 3)
        signal.signal(signal.SIGXFSZ, old)
        store.put("t", body_of(n))
        assert [m.body for m in store.iter("t")] == [body_of(i) for i in range(n + 1)]


def test_too_many_open_files(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_in("rw", path, config=config()) as store:
        for n in range(20):
            store.put("t", body_of(n))
        with limited(resource.RLIMIT_NOFILE, 3):  # what is open stays so
            n = fill(store, 20, "append")
        for i in range(n, n + 20):
            store.put("t", body_of(i))
        assert [m.body for m in store.iter("t")] == [body_of(i) for i in range(n + 20)]


def test_a_wanted_sync_without_a_descriptor_is_tried_again(tmp_path: Path) -> None:
    """A put that does not wait, in a store that shows only what is on disk, has asked the flusher for it."""
    fs, clock = FaultyFileSystem(), SimulatedClock()
    with open_in("rw", tmp_path / "store", durability="flush", config=config(clock), fs=fs) as store:
        store.put("t", body_of(0), durability="append")
        fs.fail("sync_directory", errno.EMFILE, path_part="commitlog", times=None)
        store.run_once(clock.monotonic_ms())
        assert "flush" in store.stats().errors
        fs.heal()
        clock.advance(1_000)
        store.run_once(clock.monotonic_ms())
        assert store.offsets("t") == (0, 1)
