"""Forked child processes. A child has everything that the test has imported, and starts at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["fork", "in_child", "killed_child", "speaking_child"]


def fork(work: Callable[[], object], limit_s: int = 120) -> int:
    """Start a child that does `work`, and return its process id. Its exit code is 0 if `work` returns, else 1, and what
    was raised is printed. After `limit_s` an alarm ends it."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)
        threading.excepthook = threading.__excepthook__  # pytest's would keep it to itself
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def in_child(work: Callable[[], object], limit_s: int = 120) -> int:
    """Do `work` in a child. Return its exit code, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work, limit_s), 0)[1])


@contextmanager
def speaking_child(work: Callable[[int], object], limit_s: int = 120) -> Iterator[tuple[int, int]]:
    """Do `work(pipe)` in a child. Yield its process id and the other end of that pipe. The end of the block kills it.
    It must still be there then: work that is over has failed."""
    reader, writer = os.pipe()

    def speak() -> None:
        os.close(reader)
        work(writer)

    pid = fork(speak, limit_s)
    os.close(writer)
    try:
        yield pid, reader
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGKILL, f"the child ended by itself, with {code}: its error is above"


def killed_child(work: Callable[[int], object], heard: Callable[[bytes], bool], moment: int = 0) -> None:
    """Do `work(pipe)` in a child, and kill it as soon as `heard` is true of what it has said, or `moment` turns of an
    empty loop later. `heard` is given all of it, in any pieces, also what comes after the kill."""
    killed = False
    with speaking_child(work) as (pid, reader):
        while data := os.read(reader, 1 << 16):
            if heard(data) and not killed:
                while moment:  # so that the kill does not always land right behind a word
                    moment -= 1
                os.kill(pid, signal.SIGKILL)
                killed = True
