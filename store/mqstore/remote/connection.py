"""One socket of a client process, with any number of calls in flight (remoting-server, section 13.2).

    call    encode -> send -> read until the own answer is there      a lone caller never switches threads
    park    encode -> send -> a background thread reads the answer, and calls back
    gather  kept until 16 are there, somebody waits, or an answer comes -> one frame for many (`remote/messages.py`)

Whoever has the turn reads for all: the first caller that waits. Others wait for a bell. The thread `mqstore-connection`
exists only while something is parked, and reads when no caller does. Gathered calls are read by those who wait for
them: two threads that take turns would take twice the time. The thread looks after them each millisecond.

    nothing received for `timeout_s` while somebody waits: a ping is sent after half of it, then the line is lost
    the server stops -> its last frame says so, and calls without an answer are sent again
    lost   -> calls that may be repeated, and parked ones, are sent again on the next line
           -> other calls raise ConnectionLostError: they are done, or not
    no line within `timeout_s`, with pauses of 0.1 to 5 s -> ConnectionLostError: nothing was sent
    fork   -> the first call of the child opens a line of its own

Whatever interrupts sending or reading, as Ctrl-C does, ends the line, because the next byte could mean anything.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, filterfalse
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from mqstore.errors import ConnectionLostError, FormatError, MQStoreError, StoreBusyError, StoreClosedError
from mqstore.remote.dialing import address_of, dialed, is_ready, limited
from mqstore.remote.gathering import Gathering
from mqstore.remoting.codes import GO_AWAY
from mqstore.remoting.frames import ONE_WAY, Frame, FrameReader, encode
from mqstore.remoting.signing import Signer
from mqstore.signalsafe import Bell, Lock

if TYPE_CHECKING:
    import ssl

_log = logging.getLogger("mqstore")

Answered = Callable[[Frame | None], object]
"""Function that takes the answer of a parked call, or None if it was lost and may not be repeated."""
Pack = Callable[[list[Any]], tuple[Frame, Answered]]
"""Function that makes one call of gathered ones."""

_RECEIVE_BYTES: Final = 256 << 10
_FRAME_BYTES_MAX: Final = 256 << 20
"""Largest answer. A broker may send more than a client may send to us."""
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.1, 5.0
_ATTEMPTS_MAX: Final = 4
"""Number of times that a call which may be repeated is sent."""
_IN_ONE: Final = 64
"""Gathered calls of one frame."""
_STALE_S: Final = 1.0
"""Time after which the next call looks first whether the server has closed the connection meanwhile."""
_connections: WeakSet[Connection] = WeakSet()


def _numbers() -> Iterator[int]:
    """Yield the numbers of requests, which begin again when 30 bits are used up."""
    return (number & 0x3FFF_FFFF for number in count(1))


class _NotSentError(ConnectionResetError):
    """The line was lost before anything of the request was sent."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call in flight: of a thread that waits for the bell, or parked."""

    frame: Frame
    answered: Answered | None
    repeat: bool
    gathered: bool = False
    refused: bool = False
    """True if the server has stopped without a start of the call."""
    bell: Bell = field(default_factory=Bell)
    answer: Frame | None = None


class _Line:
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
        self.waiting: dict[int, _Waiting] = {}
        self._opaque = filterfalse(self.waiting.__contains__, _numbers())
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

    def send(self, call: _Waiting) -> None:
        """Send a request. Raises OSError, and then the line is lost."""
        self.turn.refuse_owner()
        call.frame.opaque = next(self._opaque)
        self.tell(call.frame, call)

    def tell(self, frame: Frame | None = None, call: _Waiting | None = None) -> None:
        """Send the gathered calls, and then a frame that has its number, or needs none."""
        with self._sending:
            if self.lost is not None:
                raise _NotSentError(self.lost)
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
            self.waiting[frame.opaque] = _Waiting(frame, answered, False, True)
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

    def wait(self, call: _Waiting) -> Frame | None:
        """Return the answer to a request that was sent, or None if the line is lost before."""
        while call.answer is None and self.lost is None:
            if not self.read_until(lambda: call.answer is not None):
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
                # Somebody has to read on. A thread that is about to wait finds its bell rung.
                for other in list(self.waiting.values()):
                    if other.answered is None:
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
            self.tell(ping, _Waiting(ping, lambda answer: None, False))

    def _take(self, frame: Frame) -> None:
        if not frame.is_response and frame.code == GO_AWAY:
            self._finished = True
        elif not frame.is_response:
            self._connection.requested(frame)
        elif (call := self._answered(frame.opaque)) is None:
            pass  # it was withdrawn
        elif call.answered is None:
            call.answer = frame
            call.bell.ring()
        elif frame.code == GO_AWAY:
            self.waiting.pop(frame.opaque, None)
            call.refused = True
            self._connection.take_over(call)
        else:
            call.answer = frame
            self.turn.lend(partial(self._connection.call_back, call, frame))
            self.waiting.pop(frame.opaque, None)

    def _answered(self, opaque: int) -> _Waiting | None:
        """Return the call with a number, and forget it. Gathered ones are forgotten when all their futures are done: an
        interrupt of the thread that reads fails the others."""
        call = self.waiting.get(opaque)
        return call if call is not None and call.gathered else self.waiting.pop(opaque, None)

    def has_parked(self) -> bool:
        """Return True if an answer is awaited for which no thread waits, or requests of the server."""
        if self._connection.listens:
            return True
        hurry = self._connection.hurry
        return any(call.answered is not None and (hurry or not call.gathered) for call in list(self.waiting.values()))

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
                    call.bell.ring()
                else:
                    self._connection.take_over(call)
        self._connection.wake()

    def forget(self) -> None:
        """Close the file of a forked child, and leave the connection to the parent."""
        with suppress(OSError):
            os.close(self._socket.detach())


class Connection(Gathering):
    """The connection of a process to one server. Thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 10.0,
        ping: int = 31001,
        greet: Callable[[Callable[[Frame], Frame]], object] = lambda ask: None,
        requested: Callable[[Frame], object] = lambda frame: None,
        dial: Callable[[], socket.socket] | None = None,
        sign: Signer | None = None,
        pack: Pack | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare a connection to `address` (`address_of`). The first call opens it. With `dial`, which returns a
        connected socket, the address is only for texts.

        `ping` is the code of a request that any server answers, if only by an error. `greet(ask)` is called with each
        new line, before anything else is sent on it: `ask(frame)` returns an answer. `requested` takes the requests of
        the server, in the thread that reads: it must not block. `sign` adds the signature to a frame. `pack` makes one
        call of gathered ones. With `tls`, TCP has TLS, and the certificate must be that of the address."""
        self.address = address
        self.listens = False
        """True if requests of the server are awaited, even when nothing is parked."""
        self.ping = ping
        self._dial = partial(dialed, address_of(address), timeout_s, tls) if dial is None else dial
        self._pause_max_s = _PAUSE_MAX_S if dial is None else _PAUSE_MIN_S  # `dial` waits for a server by itself
        self._patience_s = 0.0 if dial is None else timeout_s
        """Time for further attempts to open the first line, to a server that may be about to end."""
        self._timeout_s = timeout_s
        self._greet = greet
        self.requested = requested
        self.sign = sign
        self.pack: Any = pack
        self._start()
        _connections.add(self)

    def _start(self) -> None:
        self.line: _Line | None = None
        self._opening = Lock()
        self._failure: tuple[float, ConnectionLostError] | None = None
        self._again: list[_Waiting] = []
        """Parked calls whose line was lost."""
        self._gather_none()
        self._bell = Bell()
        self._thread: threading.Thread | None = None
        self._thread_lock = Lock()
        self.closed = False

    # -- calls ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the connection now. Raises ConnectionLostError, and the errors of `greet` and `dial`."""
        self._open_line(time.monotonic() + self._patience_s)

    def call(
        self, code: int, body: bytes = b"", *, fields: Mapping[str, Any] | None = None, repeat: bool = False
    ) -> Frame:
        """Send a request and return its answer, whatever its code is. With `repeat` it is sent again if the line is
        lost meanwhile. Raises ConnectionLostError, and StoreClosedError after `close`."""
        call = _Waiting(Frame(code, fields or {}, body), None, repeat)
        for attempt in count(1):
            line = self._open_line(time.monotonic() + self._timeout_s)
            try:
                call.refused = False
                line.send(call)
                if (answer := line.wait(call)) is not None and answer.code != GO_AWAY:
                    return answer
                if answer is not None:  # refused by a server that stops: it answers the others, and closes the line
                    call.answer, line.waiting[call.frame.opaque] = None, call
                    line.wait(call)
                    call.refused = True
            except _NotSentError:
                call.refused = True
            except OSError:
                pass  # the line is lost
            finally:
                if call.answer is None:
                    line.waiting.pop(call.frame.opaque, None)
            self._check_open()
            # A call that loses each line is perhaps the reason: it is too large, or kills the server.
            if not call.refused and (not repeat or attempt == _ATTEMPTS_MAX):
                raise ConnectionLostError(
                    f"the connection to {self.address} was lost ({line.lost}): the call is perhaps done",
                    sent=True,
                )
        raise AssertionError

    def park(
        self,
        code: int,
        answered: Answered,
        body: bytes = b"",
        *,
        fields: Mapping[str, Any] | None = None,
        repeat: bool = True,
    ) -> object:
        """Send a request, and have `answered` called with its answer, in the thread that reads. Return a handle for
        `withdraw`. Raises ConnectionLostError without a line, and StoreClosedError."""
        call = _Waiting(Frame(code, fields or {}, body), answered, repeat)
        while True:
            line = self._open_line(time.monotonic() + self._timeout_s)
            try:
                line.send(call)
            except _NotSentError:
                continue
            except OSError:
                pass  # it has been handed over, to be sent again
            break
        if not line.is_read:
            self.start_reading()
        return call

    def attend(self) -> None:
        """Have the background thread take requests of the server from now on, even when nothing is parked."""
        self.listens = True
        self.start_reading()

    def withdraw(self, handle: object) -> int | None:
        """Forget a parked call. Return its number, by which the server knows it, or None if it is answered, or about to
        be."""
        assert isinstance(handle, _Waiting)
        with suppress(ValueError):
            self._again.remove(handle)
            return 0
        line = self.line
        found = None if line is None else line.waiting.pop(handle.frame.opaque, None)
        if found is not None and found is not handle:  # of another line
            line.waiting[handle.frame.opaque] = found  # type: ignore[union-attr]
            return None
        return None if found is None else handle.frame.opaque

    def tell(self, code: int, body: bytes = b"") -> None:
        """Send a request that nobody answers, if there is a line."""
        line = self.line
        if line is not None:
            with suppress(OSError):
                line.tell(Frame(code, {}, body, flag=ONE_WAY))

    def close(self) -> None:
        """End the connection. Calls that wait raise StoreClosedError. Parked calls are forgotten."""
        self.closed = True
        self._again = []
        if self.line is not None:
            self.line.fail("it was closed")
        self._drop_gathered(StoreClosedError(f"the connection to {self.address} was closed"))
        self._bell.ring()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout_s)

    def _check_open(self) -> None:
        if self.closed:
            raise StoreClosedError(f"the connection to {self.address} is closed; connect again")

    # -- lines ------------------------------------------------------------------------------------------------------

    def _open_line(self, until_s: float) -> _Line:
        """Return the line. Without one, open it until `until_s`. Raises ConnectionLostError."""
        line = self.line
        if line is not None and not line.is_gone():
            return line
        asked_s = time.monotonic()
        with self._opening:
            self._check_open()
            line = self.line
            if line is not None and line.lost is None:
                return line
            pause_s = _PAUSE_MIN_S
            tried_s, failure = self._failure or (0.0, None)
            if failure is not None and tried_s > asked_s and time.monotonic() + pause_s > until_s:
                raise failure  # another thread has tried for as long as this one would have
            while True:
                try:
                    self.line = line = self._opened()
                    return line
                except (OSError, FormatError) as error:
                    if self.closed or (isinstance(error, MQStoreError) and not isinstance(error, ConnectionLostError)):
                        raise
                    if time.monotonic() + pause_s > until_s:
                        failure = ConnectionLostError(
                            f"no server answers at {self.address}: {getattr(error, 'strerror', None) or error}",
                            sent=False,
                        )
                        self._failure = time.monotonic(), failure
                        raise failure from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self._pause_max_s)

    def _opened(self) -> _Line:
        sock = self._dial()
        line = _Line(self, limited(sock, self._timeout_s / 2))

        def ask(frame: Frame) -> Frame:
            call = _Waiting(frame, None, False)
            line.send(call)
            answer = line.wait(call)
            if answer is None:
                raise ConnectionResetError(line.lost)
            return answer

        try:
            self._greet(ask)
        except BaseException:
            line.fail("the greeting failed")
            raise
        return line

    @property
    def received_s(self) -> float:
        """Time of the latest sign of the server, of the monotonic clock."""
        return 0.0 if self.line is None else self.line.received_s

    def forget_line(self) -> None:
        """Begin anew in a forked child."""
        line = self.line
        closed = self.closed
        self._start()
        self.closed = closed
        if line is not None:
            line.forget()

    # -- parked calls -------------------------------------------------------------------------------------------------

    def call_back(self, call: _Waiting, answer: Frame | None) -> None:
        """Call the function of a parked call."""
        try:
            assert call.answered is not None
            call.answered(answer)
        except Exception:
            _log.exception("%s: the callback of an answer failed", self.address)

    def take_over(self, call: _Waiting) -> None:
        """Keep a parked call of a lost line for the next one."""
        if (call.repeat or call.refused) and not self.closed:
            self._again.append(call)
        else:
            self.call_back(call, None)

    def wake(self) -> None:
        """Have the background thread, if there is one, look whether it must read."""
        self._bell.ring()

    def start_reading(self) -> None:
        """Have the background thread read, unless a caller does."""
        with self._thread_lock:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._read_on, name="mqstore-connection", daemon=True)
                thread.start()
                self._thread = thread  # only now, because `close` joins it
        self._bell.ring()

    def _read_on(self) -> None:
        pause_s = _PAUSE_MIN_S
        while not self.closed:
            line = self.line
            if line is not None and line.lost is None:
                pause_s = _PAUSE_MIN_S
                if not line.has_parked():
                    self._doze(line)
                elif not line.read_until(lambda line=line: not line.has_parked()):  # type: ignore[misc]
                    self._bell.wait()
                continue
            if not self._again and not self.listens and not self.gathered:
                self._bell.wait()
                continue
            try:
                somebody_waits = self.gathered or any(call.gathered for call in self._again)
                line = self._open_line(time.monotonic() + (self._timeout_s if somebody_waits else 0))
                again, self._again = self._again, []
                for call in again:
                    line.send(call)
                line.send_gathered(in_turn=False)
            except (OSError, MQStoreError) as error:
                _log.debug("%s: %s", self.address, error)
                if isinstance(error, MQStoreError):  # there is no server
                    again, self._again = self._again, []
                    self._again += [call for call in again if not call.gathered]
                    for call in again:
                        if call.gathered:
                            self.call_back(call, None)
                    self._drop_gathered(error)
                self._bell.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _begin_child() -> None:
    for connection in list(_connections):
        connection.forget_line()


os.register_at_fork(after_in_child=_begin_child)
