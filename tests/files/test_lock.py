"""One writer: over processes, threads, other names of the directory, forks, and a Java broker (reliability#p9).

A Java broker is played by a child that takes what it takes: a POSIX record lock on byte 0 of ``lock``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from mqstore import SimulatedClock
from mqstore.errors import StoreIOError, StoreLockedError
from mqstore.files import lock as lock_module
from mqstore.files.lock import WriterLock, writer_alive
from tests.children import speaking_child
from tests.faults import FaultyFileSystem
from tests.waiting import in_threads

NOW_MS = 1_700_000_000_000


@contextmanager
def child(work: Callable[[], str]) -> Iterator[tuple[int, str]]:
    """A forked process that does `work`, reports its result, then holds what it has until the block ends."""

    parent = os.getpid()

    def say(pipe: int) -> None:
        try:
            result = work()
        except BaseException as error:
            result = type(error).__name__
        os.write(pipe, result.encode() + b"\n")
        while os.getppid() == parent:  # and a while longer
            time.sleep(1)

    with speaking_child(say) as (pid, pipe), open(pipe, encoding="utf-8", closefd=False) as said:
        yield pid, said.readline().strip()


def said_by_child(work: Callable[[], str]) -> str:
    with child(work) as (_, result):
        return result


def try_acquire(root: Path) -> str:
    WriterLock(root, "other").acquire()
    return "acquired"


def try_plain(path: Path, kind: str) -> str:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        if kind == "posix":
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            os.pwrite(fd, b"lock", 0)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "acquired"


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[WriterLock]:
    lock = WriterLock(tmp_path, "mqstore test")
    yield lock
    lock.release()


@pytest.fixture(params=["as here", "posix byte lock"])
def byte_lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of byte lock; the second is what a system without open file description locks gets."""
    if request.param == "posix byte lock":
        monkeypatch.setattr(lock_module, "_SET_BYTE", fcntl.F_SETLK)
    return str(request.param)


@pytest.mark.usefixtures("byte_lock")
class TestBothKinds:
    def test_another_process_is_refused_until_release(self, tmp_path: Path, lock: WriterLock) -> None:
        lock.acquire()
        assert said_by_child(lambda: try_acquire(tmp_path)) == "StoreLockedError"
        lock.release()
        assert said_by_child(lambda: try_acquire(tmp_path)) == "acquired"

    def test_we_are_refused_by_another_process(self, tmp_path: Path, lock: WriterLock) -> None:
        with child(lambda: try_acquire(tmp_path)) as (pid, result):
            assert result == "acquired"
            with pytest.raises(StoreLockedError, match=f"process {pid}") as caught:
                lock.acquire()
            assert caught.value.pid == pid
            assert caught.value.host == socket.gethostname()
            assert isinstance(caught.value.since, int)
            assert not lock.held
        lock.acquire()

    @pytest.mark.parametrize("kind", ["posix", "flock"])
    def test_either_lock_alone_refuses_us(self, tmp_path: Path, lock: WriterLock, kind: str) -> None:
        with child(lambda: try_plain(tmp_path / "lock", kind)) as (_, result):
            assert result == "acquired"
            with pytest.raises(StoreLockedError):
                lock.acquire()
        lock.acquire()

    @pytest.mark.parametrize("kind", ["posix", "flock"])
    def test_each_lock_alone_is_refused_by_us(self, tmp_path: Path, lock: WriterLock, kind: str) -> None:
        lock.acquire()
        assert said_by_child(lambda: try_plain(tmp_path / "lock", kind)) in ("EAGAIN", "EACCES")
        lock.release()
        assert said_by_child(lambda: try_plain(tmp_path / "lock", kind)) == "acquired"

    def test_a_second_open_in_the_process_is_refused(self, tmp_path: Path, lock: WriterLock) -> None:
        """POSIX locks go when *any* descriptor of the file is closed: the refusal must come before it is touched."""
        link = tmp_path.parent / (tmp_path.name + "-link")
        link.symlink_to(tmp_path)
        lock.acquire()
        for root in (tmp_path, link, tmp_path / "." / ".." / tmp_path.name):
            with pytest.raises(StoreLockedError) as caught:
                WriterLock(root, "second").acquire()
            assert caught.value.pid == os.getpid()
        with pytest.raises(StoreLockedError):
            lock.acquire()
        assert said_by_child(lambda: try_plain(tmp_path / "lock", "posix")) != "acquired"
        lock.release()
        with_link = WriterLock(link, "second")
        with_link.acquire()
        with_link.release()

    def test_probing_own_lock_does_not_weaken_it(self, tmp_path: Path, lock: WriterLock) -> None:
        lock.acquire()
        assert writer_alive(tmp_path)
        assert said_by_child(lambda: try_plain(tmp_path / "lock", "posix")) != "acquired"

    def test_a_forked_child_is_closed_and_does_not_unlock_its_parent(self, tmp_path: Path, lock: WriterLock) -> None:
        lock.acquire()

        def work() -> str:
            held = lock.held
            lock.release()
            return f"{held} {writer_alive(tmp_path)}"

        assert said_by_child(work) == "False True"
        assert lock.held
        assert said_by_child(lambda: try_acquire(tmp_path)) == "StoreLockedError"
        assert said_by_child(lambda: try_plain(tmp_path / "lock", "posix")) != "acquired"

    def test_an_orphaned_child_does_not_keep_the_store_locked(self, tmp_path: Path, lock: WriterLock) -> None:
        with ExitStack() as orphan:

            def work() -> str:
                inherited = WriterLock(tmp_path, "parent")
                inherited.acquire()
                _, held = orphan.enter_context(child(lambda: str(inherited.held)))
                return held

            with child(work) as (pid, held_by_orphan):
                assert held_by_orphan == "False"
                with pytest.raises(StoreLockedError):
                    lock.acquire()
                os.kill(pid, signal.SIGKILL)  # its child lives on, as it never got word to stop
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                lock.acquire()
                assert lock.held

    def test_readers_see_whether_a_writer_lives(self, tmp_path: Path, lock: WriterLock) -> None:
        assert not writer_alive(tmp_path)
        assert not (tmp_path / "lock").exists()  # and write nothing
        with child(lambda: try_acquire(tmp_path)):
            assert writer_alive(tmp_path)
        assert (tmp_path / "lock").exists()
        assert not writer_alive(tmp_path)
        lock.acquire()
        assert said_by_child(lambda: str(writer_alive(tmp_path))) == "True"

    def test_many_threads_at_once_one_wins(self, tmp_path: Path) -> None:
        locks = [WriterLock(tmp_path, f"thread {number}") for number in range(8)]
        refused: list[StoreLockedError] = []

        def work(lock: WriterLock) -> None:
            try:
                lock.acquire()
            except StoreLockedError as error:
                refused.append(error)

        in_threads(*(partial(work, lock) for lock in locks))
        assert [lock.held for lock in locks].count(True) == 1
        assert len(refused) == len(locks) - 1
        for lock in locks:
            lock.release()


def test_a_java_broker_is_named_by_its_process_and_not_by_an_old_line(tmp_path: Path, lock: WriterLock) -> None:
    lock.acquire()
    lock.release()  # leaves our own line, which a Java broker does not remove
    with child(lambda: try_plain(tmp_path / "lock", "posix")) as (pid, _):
        assert writer_alive(tmp_path)
        with pytest.raises(StoreLockedError) as caught:
            lock.acquire()
        assert (caught.value.pid, caught.value.host, caught.value.since) == (pid, None, None)


def test_lock_file_names_its_holder(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path, 'name "quoted"\n\x1b[2J', clock=SimulatedClock(NOW_MS))
    lock.acquire()
    content = (tmp_path / "lock").read_bytes()
    lock.release()
    first, second, rest = content.split(b"\n")
    assert first == b"lock"
    assert rest == b""
    assert json.loads(second) == {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started_ms": NOW_MS,
        "program": 'name "quoted"\n\x1b[2J',
    }
    assert b"\x1b" not in content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"lock",
        b"lock\n",
        b'lock\n{"pid": "many", "host": 7, "started_ms": [], "program": null}\n',
        b'lock\n{"pid": 1, "host": "\\u001b[2J", "started_ms": 1}\n',
        b"lock\n[1, 2]\n",
        b"lock\n" + b"[" * 4000,
        b"lock\n" + b'{"pid": 1, "host": "a machine with a long name", "started_ms": 1}' + b" " * 300 + b"\nmore\n",
        bytes(range(256)) * 40,
    ],
)
def test_a_stale_file_is_harmless(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    with child(lambda: try_plain(tmp_path / "lock", "flock")), pytest.raises(StoreLockedError) as caught:
        WriterLock(tmp_path, "refused").acquire()  # whatever it says, it can be told
    assert "\x1b" not in str(caught.value)  # nor does it send escapes to a terminal
    lock = WriterLock(tmp_path, "p", clock=SimulatedClock(NOW_MS))
    lock.acquire()
    lines = (tmp_path / "lock").read_bytes().split(b"\n")
    lock.release()
    assert lines[0] == b"lock"
    assert json.loads(lines[1])["started_ms"] == NOW_MS
    if len(content) < 4096:
        assert lines[2:] == [b""]


def test_waiting_ends_when_the_other_lets_go(tmp_path: Path, lock: WriterLock) -> None:
    clock = SimulatedClock()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock.advance(round(seconds * 1000))
        if len(pauses) == 10:
            lock.release()

    lock.acquire()
    waiting = WriterLock(tmp_path, "waiting", clock=clock, sleep=sleep)
    waiting.acquire(timeout_s=60)
    assert waiting.held
    assert len(pauses) == 10
    assert max(pauses) <= 0.05
    waiting.release()


def test_waiting_ends_at_the_timeout(tmp_path: Path) -> None:
    clock = SimulatedClock()
    waiting = WriterLock(
        tmp_path, "waiting", clock=clock, sleep=lambda seconds: clock.advance(max(1, round(seconds * 1000)))
    )
    with child(lambda: try_acquire(tmp_path)), pytest.raises(StoreLockedError):
        waiting.acquire(timeout_s=2.5)
    assert clock.monotonic_ms() == 2500
    waiting.acquire()
    waiting.release()


def test_programs_that_are_executed_do_not_inherit_the_lock(tmp_path: Path, lock: WriterLock) -> None:
    lock.acquire()
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    lock.release()
    assert said_by_child(lambda: try_acquire(tmp_path)) == "acquired"
    program.communicate(b"\n")


def test_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreIOError) as caught:
        WriterLock(tmp_path, "p").acquire()
    assert caught.value.errno == errno.ENOLCK
    assert caught.value.filename == str(tmp_path / "lock")


def test_a_failed_attempt_leaves_no_lock_and_no_descriptor(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    fs.fail("pwrite", errno.EIO)
    lock = WriterLock(tmp_path, "p", fs=fs)
    with pytest.raises(StoreIOError):
        lock.acquire()
    assert not lock.held
    assert [call.operation for call in fs.calls].count("close") == 1
    assert said_by_child(lambda: try_acquire(tmp_path)) == "acquired"
    lock.acquire()
    lock.release()


def test_a_full_disk_does_not_keep_a_store_from_being_opened(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    fs.fail("pwrite", errno.ENOSPC)
    lock = WriterLock(tmp_path, "p", fs=fs)
    lock.acquire()
    assert lock.held
    lock.release()


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_only_a_regular_file_is_taken_for_the_lock(tmp_path: Path, what: str) -> None:
    (tmp_path / "precious").write_bytes(b"data")
    if what == "link":
        (tmp_path / "lock").symlink_to("precious")
    elif what == "pipe":
        os.mkfifo(tmp_path / "lock")
    else:
        (tmp_path / "lock").mkdir()
    with pytest.raises(StoreIOError):
        WriterLock(tmp_path, "p").acquire()
    assert (tmp_path / "precious").read_bytes() == b"data"


def test_a_file_removed_under_us_is_not_the_lock(tmp_path: Path) -> None:
    """Whoever removes ``lock`` between our open and our lock makes room for a second writer on a new file."""

    class Removing(FaultyFileSystem):
        def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
            fd = super().open(path, flags, mode)
            os.unlink(path)
            return fd

    with pytest.raises(StoreLockedError):
        WriterLock(tmp_path, "p", fs=Removing()).acquire()
    lock = WriterLock(tmp_path, "p")
    lock.acquire()
    (tmp_path / "lock").unlink()  # and while it is held: the directory itself is registered
    with pytest.raises(StoreLockedError):
        WriterLock(tmp_path, "second").acquire()
    lock.release()


def test_reading_the_lock_file_does_not_unlock(tmp_path: Path, lock: WriterLock) -> None:
    if sys.platform != "linux":
        pytest.skip("POSIX byte locks go with any close; only flock is left then")
    lock.acquire()
    (tmp_path / "lock").read_bytes()
    assert said_by_child(lambda: try_plain(tmp_path / "lock", "posix")) != "acquired"
    assert said_by_child(lambda: try_plain(tmp_path / "lock", "flock")) != "acquired"
