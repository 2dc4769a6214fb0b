"""One socket of a client process, until it is lost (`remote/connection.py`)."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, filterfalse
from typing import TYPE_CHECKING, Any, Final

from mqstore.errors import FormatError, StoreBusyError
from mqstore.remote.dialing import is_ready
from mqstore.remoting.codes import GO_AWAY
from mqstore.remoting.frames import Frame, FrameReader, encode
from mqstore.signalsafe import Bell, Lock

if TYPE_CHECKING:
    from mqstore.remote.connection import Connection

Answered = Callable[[Frame | None], object]
"""Function that takes the answer of a parked call, or None if it was lost and may not be repeated."""
_RECEIVE_BYTES: Final = 64 << 10
_FRAME_BYTES_MAX: Final = 256 << 20
"""Largest answer. A broker may send more than a client may send to us."""
_IN_ONE: Final = 64
"""Gathered calls of one frame."""
_LAST_NUMBER: Final = (1 << 30) - 1
"""Numbers of requests begin again when 30 bits are used up."""
_STALE_S: Final = 1.0
"""Time after which the next call looks first whether the server has closed the connection meanwhile."""


class NotSentError(ConnectionResetError):
    """The line was lost before anything of the request was sent."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A call in flight: of a thread that waits for the bell, or parked."""

    frame: Frame
    answered: Answered | None
    repeat: bool
    gathered: bool = False
    refused: bool = False
    """True if the server has stopped without a start of the call."""
    bell: Bell | None = None
    """Bell of its thread, once another thread reads."""
    answer: Frame | None = None


class Line:
    """One socket, until it is lost."""

    def __init__(self, connection: Connection, sock: Any) -> None:
        self._connection = connection
        self._socket = sock
        self._reader = FrameReader(_FRAME_BYTES_MAX)
        self.turn = Lock()
        """Lock of the thread that reads."""
        self.is_read = False
        """True while a thread reads. When it stops, it wakes another one for all that is `waiting` by then."""
        self._sending = Lock()
        self.waiting: dict[int, Waiting] = {}
        self._opaque = filterfalse(self.waiting.__contains__, map(_LAST_NUMBER.__and__, count(1)))
        self.lost: str | None = None
        """Reason why it cannot be used any more."""
        self.received_s = time.monotonic()
        self._pinged = False
        self._awaited = 0
        """Number of the last gathered call."""
        self._sends = False
        """True while a thread sends."""
        self._finished = False
        """True once the server has said that all calls that it has started are answered."""

    def send(self, call: Waiting) -> None:
        """Send a request. Raises OSError, and then the line is lost."""
        self.turn.refuse_owner()
        call.frame.opaque = next(self._opaque)
        self.tell(call.frame, call)

    def tell(self, frame: Frame | None = None, call: Waiting | None = None) -> None:
        """Send the gathered calls, and then a frame that has its number, or needs none."""
        with self._sending:
            if self.lost is not None:
                raise NotSentError(self.lost)
            try:
                self._sends = True
                if call is not None:
                    self.waiting[call.frame.opaque] = call
                # Not before the greeting: until then the line is not that of the connection.
                data = self._gathered() if self._connection.gathered and self._connection.line is self else []
                if frame is not None:
                    data.append(self._encoded(frame))
                if data:
                    self._socket.sendall(data[0] if len(data) == 1 else b"".join(data))
            except (BrokenPipeError, ConnectionResetError):
                pass  # what the server has sent before it closed the line is still to be read
            except BaseException as error:
                self.fail(f"sending failed: {error!r}")
                raise
            finally:
                self._sends = False

    def _gathered(self) -> list[bytes]:
        """Return the frames of the gathered calls, in order: one for those that have the same key."""
        gathered, frames = self._connection.gathered, list[bytes]()
        while gathered:
            key, most = gathered[0][0], min(len(gathered), _IN_ONE)
            count = next((i for i in range(1, most) if gathered[i][0] != key or key is None), most)
            frame, answered = self._connection.pack(gathered[:count])
            frame.opaque = self._awaited = next(self._opaque)
            self.waiting[frame.opaque] = Waiting(frame, answered, False, True)
            del gathered[:count]
            frames.append(self._encoded(frame))
        return frames

    def _encoded(self, frame: Frame) -> bytes:
        frame.binary = -0x8000 <= frame.code < 0x8000  # the codes that a binary header can have
        if self._connection.sign is not None:
            self._connection.sign(frame)
        return encode(frame)

    def send_gathered(self, *, in_turn: bool) -> None:
        """Send the gathered calls; with `in_turn` only if the ones before are answered, which will do it otherwise."""
        # A reader does not wait for a sender: the server perhaps takes no more until its answers are read.
        if self._connection.gathered and not (in_turn and (self._sends or self._awaited in self.waiting)):
            with suppress(OSError, StoreBusyError):  # of a lost line; of a signal handler: the thread sends them soon
                self.tell()

    def wait(self, call: Waiting) -> Frame | None:
        """Return the answer to a request that was sent, or None if the line is lost before."""
        while call.answer is None and self.lost is None:
            if not self.read_until(lambda: call.answer is not None):
                if call.bell is None:
                    call.bell = Bell()  # and try again: the other thread may have stopped before this line
                else:
                    call.bell.wait()
        return call.answer

    def read_until(self, done: Callable[[], bool]) -> bool:
        """Read for all until `done()` or the line is lost. Return False at once if another thread reads."""
        is_nested = self.turn.is_held_here  # called back by this thread's own reading
        try:
            return self._read_until(done, is_nested)
        except BaseException:  # of a signal handler, perhaps before the turn was given back: the next line has another
            self.fail("reading was interrupted")
            if not is_nested and self.turn.is_held_here:
                self.turn.release()
            raise

    def _read_until(self, done: Callable[[], bool], is_nested: bool) -> bool:
        try:
            if not is_nested and not self.turn.acquire(False):
                return False
            self.is_read = True
            self.send_gathered(in_turn=True)  # a call that was gathered just before waits for its reader
            while self.lost is None and not done():
                self._read()
            return True
        finally:
            if not is_nested and self.turn.is_held_here:
                self.is_read = False  # before the look at `waiting`: see `park`
                self.turn.release()
                # Somebody has to read on. A thread without a bell tries to, before it waits.
                for other in list(self.waiting.values()):
                    if other.answered is None:
                        if other.bell is not None:
                            other.bell.ring()
                        break
                else:
                    if self.has_parked():  # otherwise its thread would wake up after each call
                        self._connection.start_reading()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                self.fail("the server has closed it")
                return
            self.received_s, self._pinged = time.monotonic(), False
            self._reader.feed(data)
            for frame in self._reader:
                self._take(frame)
            if self._connection.gathered:
                self.send_gathered(in_turn=True)
        except (TimeoutError, BlockingIOError):
            self._ping()
        except (OSError, FormatError) as error:
            self.fail(str(error))
        except BaseException:
            self.fail("reading was interrupted")
            raise

    def _ping(self) -> None:
        if self._pinged:
            self.fail(f"nothing was received for {time.monotonic() - self.received_s:.1f} s")
            return
        self._pinged = True
        ping = Frame(self._connection.ping, opaque=next(self._opaque))
        with suppress(OSError):  # not `send`: this thread has the turn
            self.tell(ping, Waiting(ping, lambda answer: None, False))

    def _take(self, frame: Frame) -> None:
        if not frame.is_response:
            if frame.code == GO_AWAY:
                self._finished = True
            else:
                self._connection.requested(frame)
            return
        call = self.waiting.get(frame.opaque)
        if call is not None and not call.gathered:
            call = self.waiting.pop(frame.opaque, None)
        if call is None:
            pass  # it was withdrawn
        elif call.answered is None:
            call.answer = frame
            if call.bell is not None:
                call.bell.ring()
        elif frame.code == GO_AWAY:
            self.waiting.pop(frame.opaque, None)
            call.refused = True
            self._connection.take_over(call)
        else:
            call.answer = frame
            self.turn.lend(partial(self._connection.call_back, call, frame))
            self.waiting.pop(frame.opaque, None)  # a gathered one: an interrupt of the callback fails its other futures

    def has_parked(self) -> bool:
        """Return True if an answer is awaited for which no thread waits, or requests of the server."""
        hurry, calls = self._connection.hurry, list(self.waiting.values())
        return self._connection.listens or any(each.answered and (hurry or not each.gathered) for each in calls)

    def is_gone(self) -> bool:
        """Return True if the line is lost, or the server has closed it and nobody has read that yet."""
        if self.lost is None and time.monotonic() - self.received_s > _STALE_S and not self.waiting:
            try:
                if is_ready(self._socket, select.POLLIN, 0) and not self._socket.recv(1, socket.MSG_PEEK):
                    self.fail("the server has closed it")
            except OSError as error:
                self.fail(str(error))
        return self.lost is not None

    def fail(self, why: str) -> None:
        """End the line. Callers that wait get no answer, and parked calls are handed to the connection."""
        if self.lost is not None:
            return
        self.lost = why
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the `recv` of another thread
        self._socket.close()
        while self.waiting:
            with suppress(KeyError):
                _, call = self.waiting.popitem()
                call.refused = self._finished
                if call.answered is None:
                    if call.bell is not None:
                        call.bell.ring()
                else:
                    self._connection.take_over(call)
        self._connection.wake()

    def forget(self) -> None:
        """Close the file of a forked child, and leave the connection to the parent."""
        with suppress(OSError):
            os.close(self._socket.detach())
