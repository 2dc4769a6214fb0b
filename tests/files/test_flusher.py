"""Group commit: who syncs, who waits, and that nobody is forgotten or told of durability that is not there."""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from mqstore.errors import FlushFailedError
from mqstore.files.filesystem import SyncNotBegunError
from mqstore.files.flusher import GroupCommit
from tests.interrupts import run_interrupted

LIMIT_S = 60  # how long a test waits for what must happen before it says that it did not


class Disk:
    """A log and a disk that only counts. `hold()` makes the next syncs wait in the middle until `let_go()`."""

    def __init__(self) -> None:
        self.appended = 0
        self.durable = 0
        self.calls: list[int] = []
        self.threads: list[int] = []
        self.in_sync = threading.Semaphore(0)
        self._gate = threading.Event()
        self._gate.set()
        self.errors: dict[int, BaseException] = {}  # what the n-th call raises, from 1

    def append(self, size: int = 10) -> int:
        self.appended += size
        return self.appended

    def sync(self, flushed: int) -> int:
        self.calls.append(flushed)
        self.threads.append(threading.get_ident())
        number = len(self.calls)
        end = self.appended
        self.in_sync.release()
        assert self._gate.wait(LIMIT_S)
        if number in self.errors:
            raise self.errors[number]
        self.durable = end
        return end

    def hold(self) -> None:
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    def wait_for_sync(self) -> None:
        assert self.in_sync.acquire(timeout=LIMIT_S)


class Caller(threading.Thread):
    """Runs one call and keeps what came of it."""

    def __init__(self, call: Callable[[], bool | None]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.result: bool | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.result = error

    def outcome(self) -> bool | BaseException | None:
        self.join(LIMIT_S)
        assert not self.is_alive(), "forgotten"
        return self.result


def in_a_sync() -> tuple[Disk, GroupCommit, Caller]:
    """A disk with 10 bytes appended, in the middle of the sync that the caller waits for."""
    disk = Disk()
    commit = GroupCommit(disk.sync)
    disk.hold()
    leader = Caller(partial(commit.wait_until, disk.append(), None))
    disk.wait_for_sync()
    return disk, commit, leader


def in_line(commit: GroupCommit) -> int:
    """Number of callers that wait for another's sync."""
    return len(commit._waiters)


def wait_for_line(commit: GroupCommit, length: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while (found := in_line(commit)) != length:
        assert time.monotonic() < deadline, f"{found} in line instead of {length}"
        time.sleep(0)  # no pause: only lets the others run


def at_rest(commit: GroupCommit) -> bool:
    return not commit._turn.locked() and not in_line(commit)


def test_all_that_wait_during_one_sync_share_the_next() -> None:
    disk, commit, leader = in_a_sync()
    targets = [disk.append() for _ in range(8)]
    followers = [Caller(partial(commit.wait_until, target, None)) for target in targets]
    wait_for_line(commit, 8)
    assert commit.busy

    disk.let_go()

    assert leader.outcome() is True
    assert [follower.outcome() for follower in followers] == [True] * 8
    assert disk.calls == [0, 10]
    assert commit.flushed == 90
    assert at_rest(commit)
    assert commit.busy, "the last sync had others in line, so the next is likely to"

    assert commit.wait_until(disk.append(), None)
    assert not commit.busy


@pytest.mark.parametrize("timeout_s", [0, -1, 0.001])
def test_follower_leaves_when_its_time_is_up(timeout_s: float) -> None:
    disk, commit, leader = in_a_sync()
    late = disk.append()

    assert commit.wait_until(late, timeout_s) is False

    wait_for_line(commit, 0)
    disk.let_go()
    assert leader.outcome() is True
    assert at_rest(commit)
    assert commit.wait_until(late, 5) is True


def test_a_follower_that_is_promoted_just_when_its_time_is_up_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, commit, leader = in_a_sync()
    late = disk.append()
    leave = GroupCommit._leave

    def leave_late(self: GroupCommit, waiter: Any) -> bool:
        disk.let_go()
        assert leader.outcome() is True
        return leave(self, waiter)

    monkeypatch.setattr(GroupCommit, "_leave", leave_late)

    assert commit.wait_until(late, 0) is True

    assert disk.durable == late
    assert at_rest(commit)


def test_a_follower_hit_by_ctrl_c_leaves_the_line() -> None:
    disk, commit, leader = in_a_sync()

    struck = threading.Event()

    def strike(number: int, frame: object) -> None:
        if not struck.is_set():
            struck.set()
            raise KeyboardInterrupt

    def strike_once_in_line() -> bool:
        wait_for_line(commit, 1)
        while not struck.is_set():  # a signal that comes just before the wait begins does not end it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            struck.wait(0.01)
        return True

    before = signal.signal(signal.SIGUSR1, strike)
    striker = Caller(strike_once_in_line)
    try:
        with pytest.raises(KeyboardInterrupt):
            commit.wait_until(disk.append(), LIMIT_S)
    finally:
        assert striker.outcome() is True
        signal.signal(signal.SIGUSR1, before)

    wait_for_line(commit, 0)
    disk.let_go()
    assert leader.outcome() is True
    assert at_rest(commit)


def interrupted_leader(at: int) -> list[str]:
    """Raise at one point of a wait whose sync sees another caller join; where that was."""
    leader_syncs = [True]
    begin: SimpleQueue[None] = SimpleQueue()

    def sync(flushed: int) -> int:
        if leader_syncs:
            leader_syncs.clear()
            begin.put(None)
            wait_for_line(commit, 1)
            return 10
        return 30

    def follow() -> bool:
        begin.get()
        return commit.wait_until(20, None)

    commit = GroupCommit(sync)
    follower = Caller(follow)

    stack = run_interrupted(partial(commit.wait_until, 10, None), at)

    leader_syncs.clear()
    begin.put(None)
    assert follower.outcome() is True, stack
    assert commit.wait_until(30, LIMIT_S) is True, stack
    assert at_rest(commit)
    return stack


def test_a_leader_hit_by_ctrl_c_at_any_point_leaves_nobody_waiting() -> None:
    at = 0
    while interrupted_leader(at):
        at += 1
    assert at > 20


def test_the_watermark_never_goes_back() -> None:
    answers = iter([100, 60])
    commit = GroupCommit(lambda flushed: next(answers))

    commit.sync_now()
    commit.sync_now()

    assert commit.flushed == 100


def test_waiting_for_an_unwritten_offset_is_a_caller_error() -> None:
    disk = Disk()
    commit = GroupCommit(disk.sync)

    with pytest.raises(AssertionError, match="waited for 11"):
        commit.wait_until(disk.append() + 1, 5)

    assert at_rest(commit)
    assert commit.wait_until(10, 5) is True


def test_a_failed_sync_is_final_for_all_now_and_later() -> None:
    disk = Disk()
    disk.errors[2] = OSError(5, "Input/output error")
    commit = GroupCommit(disk.sync)
    assert commit.wait_until(disk.append(), 5)
    disk.hold()
    second = disk.append()
    leader = Caller(lambda: commit.wait_until(second, None))
    disk.wait_for_sync()
    disk.wait_for_sync()
    followers = [Caller(lambda: commit.wait_until(second, None)), Caller(commit.sync_now)]
    wait_for_line(commit, 2)

    disk.let_go()

    for caller in (leader, *followers):
        outcome = caller.outcome()
        assert isinstance(outcome, FlushFailedError)
        assert outcome.__cause__ is disk.errors[2]
    assert commit.flushed == 10
    with pytest.raises(FlushFailedError, match="Input/output error"):
        commit.wait_until(second, 5)
    with pytest.raises(FlushFailedError):
        commit.sync_now()
    assert len(disk.calls) == 2, "a failed sync must not be tried again"
    assert commit.wait_until(10, 0) is True, "what was durable before stays so"


def test_poison_stops_those_in_line_and_the_sync_that_is_under_way() -> None:
    disk, commit, leader = in_a_sync()
    follower = Caller(lambda: commit.wait_until(10, None))
    wait_for_line(commit, 1)

    commit.poison(OSError(5, "a write failed"))

    assert isinstance(follower.outcome(), FlushFailedError)
    disk.let_go()
    assert isinstance(leader.outcome(), FlushFailedError)
    assert commit.flushed == 0
    commit.poison(OSError(5, "another"))
    assert "a write failed" in str(commit.failure), "the first failure is the one to look at"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SyncNotBegunError(errno.EMFILE, "Too many open files", "0", "open")], ids=repr
)
def test_silent_sync_of_a_leader_hands_over(error: BaseException) -> None:
    disk, commit, leader = in_a_sync()
    disk.errors[1] = error
    followers = [Caller(lambda: commit.wait_until(10, None)), Caller(commit.sync_now)]
    wait_for_line(commit, 2)

    disk.let_go()

    assert leader.outcome() is error
    assert [follower.outcome() for follower in followers] == [True, None]
    assert disk.durable == commit.flushed == 10, "the interrupted round must not count"
    assert commit.failure is None
    assert at_rest(commit)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_does_not_hide_a_failed_sync() -> None:
    def sync(flushed: int) -> int:
        try:
            raise OSError(5, "Input/output error")
        except OSError:
            interrupt()  # as the interpreter does it: the error becomes the context
        return flushed

    commit = GroupCommit(sync)

    with pytest.raises(KeyboardInterrupt):
        commit.sync_now()

    with pytest.raises(FlushFailedError, match="Input/output error"):
        commit.sync_now()


@pytest.mark.parametrize("handled", [OSError(2, "something of the caller's"), GeneratorExit()])
def test_ctrl_c_in_an_error_handler_is_not_a_failure(handled: BaseException) -> None:
    disk = Disk()
    disk.errors[1] = KeyboardInterrupt()
    commit = GroupCommit(disk.sync)

    def put_while_handling() -> None:
        try:
            try:
                raise OSError(5, "the caller's own")
            finally:
                raise handled
        except type(handled):
            commit.wait_until(disk.append(), 5)

    with pytest.raises(KeyboardInterrupt):
        put_while_handling()

    assert commit.failure is None
    commit.sync_now()
    assert commit.flushed == disk.durable == 10
