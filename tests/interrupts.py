"""Raise an exception at a chosen point of a call, as a signal handler does.

CPython runs signal handlers between two bytecodes, but only where the interpreter looks for signals: at the start of a
function, behind a call of compiled code, and where a loop turns back. `run_interrupted` counts these points in all
Python code that a call runs, the standard library included, and raises at the n-th. A test that tries every n needs no
luck with timing.
"""

from __future__ import annotations

import _thread
import dis
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

__all__ = ["Interrupted", "is_with_safe", "points_in", "run_interrupted"]

_RESUME = dis.opmap["RESUME"]
_LOOKS = frozenset(
    [_RESUME, *(number for name, number in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD")))]
)


class _Interrupting:
    """Its `with` is entered by compiled code, as that of a lock, and meanwhile a signal comes."""

    __enter__ = staticmethod(_thread.interrupt_main)

    def __init__(self) -> None:
        self.exits = 0

    def __exit__(self, *_: object) -> None:
        self.exits += 1


def is_with_safe() -> bool:
    """Return False if an exception of a signal handler may come between `__enter__` and the block of a `with`.
    CPython 3.14 has that fault (its issue 148874), and then leaves locks held. For the main thread."""
    interrupting = _Interrupting()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupting:
            sys.getrefcount(None)  # here the exception comes, if not before
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    return interrupting.exits == 1


@cache
def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    return [(entry.start, entry.end, entry.target) for entry in dis._parse_exception_table(code)]  # type: ignore[attr-defined]


def _handler(code: CodeType, offset: int) -> int | None:
    """Return where an exception at this bytecode goes; None: to the caller."""
    return next((target for start, end, target in _handlers(code) if start <= offset < end), None)


class Interrupted(KeyboardInterrupt):
    """KeyboardInterrupt that a test raised, told from one that a person sent."""


def _is_passed_over(frame: FrameType) -> bool:
    """Return True where an exception says nothing of the code under test.

    Whatever a finalizer raises is dropped by its caller. `Thread.start` waits in the standard library's own way, which
    may answer a signal with RuntimeError.
    """
    code = frame.f_code
    if code.co_name in ("__del__", "_remove"):
        return True
    above: FrameType | None = frame
    while above is not None and above.f_code.co_filename == threading.__file__:
        if above.f_code is threading.Thread.start.__code__:
            return True
        above = above.f_back
    return False


class _Points:
    """Counts the points of a call and raises at one of them."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.stack: list[str] = []
        """Where it was raised, innermost first."""
        self._returned_to: FrameType | None = None

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """Global trace function: follow a frame bytecode by bytecode until the exception was raised."""
        if self.stack or event != "call" or _is_passed_over(frame):
            return None
        code = frame.f_code
        before = _RESUME
        behind = 0

        def step(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before, behind
            if self.stack:
                return None
            if event == "opcode":
                # A call of Python code ends without a look for signals. The interpreter raises at the call, and this
                # function behind it: a point where the two have different handlers cannot be tried.
                looked = before in _LOOKS and self._returned_to is not frame
                looked = looked and _handler(code, behind) == _handler(code, frame.f_lasti)
                self._returned_to = None
                before, behind = code.co_code[frame.f_lasti], frame.f_lasti
                if looked:
                    self._reach(frame)
            elif event == "return":
                self._returned_to = frame.f_back
            return step

        # CPython 3.12 to 3.14 report bytecodes only if set in this order, and in any frame before `settrace`.
        frame.f_trace = step
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return step

    def follow(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self.trace)
        try:
            call()
        except Interrupted:
            pass
        finally:
            sys.settrace(before)

    def _reach(self, frame: FrameType) -> None:
        self.left -= 1
        if self.left < 0:
            above: FrameType | None = frame
            while above is not None and len(self.stack) < 12:
                self.stack.append(f"{above.f_code.co_filename}:{above.f_lineno} {above.f_code.co_name}")
                above = above.f_back
            raise Interrupted


def run_interrupted(call: Callable[[], object], at: int) -> list[str]:
    """Run `call`, and raise `Interrupted` at point `at` of it, counted from 0.

    Return the stack of that point, innermost frame first; [] if the call ended before. `Interrupted` is swallowed where
    it leaves the call. Every other exception that leaves it is raised.
    """
    points = _Points(at)
    points.follow(call)
    return points.stack


def points_in(call: Callable[[], object]) -> int:
    """Run `call`, and return how many points it has."""
    points = _Points(sys.maxsize)
    points.follow(call)
    return sys.maxsize - points.left
