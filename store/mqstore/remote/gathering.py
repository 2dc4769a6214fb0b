"""Calls that are gathered and sent together, by a connection (`remote/connection.py`).

    gather      kept until 16 are there, somebody waits, the answer to earlier ones comes, or a millisecond has passed
    read_for    a thread waits for one: it sends them, and reads for all
    read_soon   somebody wants to be called back: the background thread reads at once

Neither the gathering nor the reading wakes another thread, which would take as long as ten calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mqstore.errors import StoreClosedError
from mqstore.signalsafe import Bell

if TYPE_CHECKING:
    from mqstore.remote.connection import _Line

_GATHERED: Final = 16
"""Calls that wait at most. The thread that reads sends them, so they must fit the socket's buffer."""
_DOZE_S: Final = 0.001


class Gathering:
    """Part of a connection that gathers calls."""

    address: str
    closed: bool
    _timeout_s: float
    line: _Line | None
    _bell: Bell
    _open_line: Callable[[float], _Line]
    start_reading: Callable[[], None]

    def _gather_none(self) -> None:
        self.gathered: list[Any] = []
        """Calls that wait to be sent: tuples of a key, and what `pack` needs. None as a key: in a frame by itself."""
        self.hurry = False
        """True while the background thread must read the answers of gathered calls at once."""
        self._dozes = False
        """True while the background thread looks after gathered calls."""

    def gather(self, call: tuple[Any, ...]) -> None:
        """Send a call soon, perhaps together with others (`gathered`). If the line is lost before, the next one does.
        Raises ConnectionLostError without a line, and StoreClosedError."""
        line = self.line
        if line is None or line.lost is not None or not self.gathered:
            line = self._open_line(time.monotonic() + self._timeout_s)
        self.gathered.append(call)
        full = len(self.gathered) >= _GATHERED
        if full or line.is_read:  # otherwise the next reader sends it
            line.send_gathered(in_turn=not full)
        if self.closed:
            self._drop_gathered(StoreClosedError(f"the connection to {self.address} was closed"))
        if not self._dozes:
            self._dozes = True
            self.start_reading()

    def read_for(self, is_done: Callable[[], bool], timeout_s: float | None) -> None:
        """Send the gathered calls, and read until one of them `is_done`. Otherwise have the background thread read: if
        another thread reads here, for a time, and after a loss. Raises StoreBusyError in a signal handler that has
        interrupted the reading."""
        if (line := self.line) is not None:
            line.turn.refuse_owner()
            line.send_gathered(in_turn=False)
            if timeout_s is None and line.read_until(is_done):
                return
        self.read_soon()

    def read_soon(self) -> None:
        """Have the background thread send and read gathered calls at once."""
        self.hurry = True
        if (line := self.line) is not None:
            line.send_gathered(in_turn=True)
            if line.is_read:
                return
        self.start_reading()

    def _drop_gathered(self, error: Exception) -> None:
        """Give up calls that were not sent, whose last item is a future."""
        dropped, self.gathered = self.gathered, []
        for *_, future in dropped:
            if not future.done():
                future.set_exception(error)

    def _doze(self, line: _Line) -> None:
        """Wait for the bell. Read for the gathered calls if nobody has done it for a millisecond."""
        self.hurry = False
        if not self.gathered and not any(call.gathered for call in list(line.waiting.values())):
            self._dozes = False
            if not self.gathered:  # a call that was gathered before has rung no bell
                self._bell.wait()
            return
        received_s = line.received_s
        if not self._bell.wait(_DOZE_S) and line.received_s == received_s and not line.is_read:
            self.read_soon()
