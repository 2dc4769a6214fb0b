"""One socket of a client process, with any number of calls in flight (remoting-server, section 13.2).

    call    encode -> send -> read until the own answer is there      a lone caller never switches threads
    park    encode -> send -> a background thread reads the answer, and calls back
    gather  kept until 16 are there, somebody waits, the answer to earlier ones comes, or a millisecond has passed
            -> one frame for many (`remote/messages.py`)

Whoever has the turn reads for all: the first caller that waits. Others wait for a bell. The thread `mqstore-connection`
exists only while something is parked, and reads when no caller does. Gathered calls are read by those who wait for
them: two threads that take turns would take twice the time. The thread looks after them each millisecond, or at once if
somebody wants to be called back. To wake another thread would take as long as ten calls.

    nothing received for `timeout_s` while somebody waits: a ping is sent after half of it, then the line is lost
    the server stops -> its last frame says so, and calls without an answer are sent again
    lost   -> calls that may be repeated, and parked ones, are sent again on the next line
           -> other calls raise ConnectionLostError: they are done, or not
    no line within `timeout_s`, with pauses of 0.1 to 5 s -> ConnectionLostError: nothing was sent
    fork   -> the first call of the child opens a line of its own

Whatever interrupts sending or reading, as Ctrl-C does, ends the line, because the next byte could mean anything.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from mqstore.errors import ConnectionLostError, FormatError, MQStoreError, StoreClosedError
from mqstore.logger import log as _log
from mqstore.remote.dialing import address_of, dialed, limited
from mqstore.remote.line import Answered, Line, NotSentError, Waiting
from mqstore.remoting.codes import GO_AWAY
from mqstore.remoting.frames import ONE_WAY, Frame
from mqstore.remoting.signing import Signer
from mqstore.signalsafe import Bell, Lock, in_each_child

if TYPE_CHECKING:
    import ssl

Pack = Callable[[list[Any]], tuple[Frame, Answered]]
"""Function that makes one call of gathered ones."""

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.1, 5.0
_ATTEMPTS_MAX: Final = 4
"""Number of times that a call which may be repeated is sent."""
_GATHERED: Final = 16
"""Calls that wait at most. The thread that reads sends them, so they must fit the socket's buffer."""
_DOZE_S: Final = 0.001
_connections: WeakSet[Connection] = in_each_child(lambda connection: connection.forget_line())


class Connection:
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
        self.line: Line | None = None
        self._opening = Lock()
        self._failure: tuple[float, ConnectionLostError] | None = None
        self._again: list[Waiting] = []
        """Parked calls whose line was lost."""
        self.gathered: list[Any] = []
        """Calls that wait to be sent: tuples of a key, and what `pack` needs. None as a key: in a frame by itself."""
        self.hurry = False
        """True while the background thread must read the answers of gathered calls at once."""
        self._dozes = False
        """True while the background thread looks after gathered calls."""
        self._bell = Bell()
        self._thread: threading.Thread | None = None
        self._thread_lock = Lock()
        self.closed = False

    # -- calls ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the connection now. Raises ConnectionLostError, and the errors of `greet` and `dial`."""
        self._open_line(self._patience_s)

    def call(
        self, code: int, body: bytes = b"", *, fields: Mapping[str, Any] | None = None, repeat: bool = False
    ) -> Frame:
        """Send a request and return its answer, whatever its code is. With `repeat` it is sent again if the line is
        lost meanwhile. Raises ConnectionLostError, and StoreClosedError after `close`."""
        call = Waiting(Frame(code, fields or {}, body), None, repeat)
        for attempt in count(1):
            line = self._open_line()
            try:
                call.refused = False
                line.send(call)
                if (answer := line.wait(call)) is not None and answer.code != GO_AWAY:
                    return answer
                if answer is not None:  # refused by a server that stops: it answers the others, and closes the line
                    call.answer, line.waiting[call.frame.opaque] = None, call
                    line.wait(call)
                    call.refused = True
            except NotSentError:
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
                    f"the connection to {self.address} was lost ({line.lost}): the call is perhaps done", sent=True
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
        call = Waiting(Frame(code, fields or {}, body), answered, repeat)
        while True:
            line = self._open_line()
            try:
                line.send(call)
            except NotSentError:
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
        assert isinstance(handle, Waiting)
        with suppress(ValueError):
            self._again.remove(handle)
            return 0
        line, number = self.line, handle.frame.opaque
        if line is None or line.waiting.get(number) is not handle:  # answered, or that of a lost line
            return None
        return None if line.waiting.pop(number, None) is None else number

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

    # -- gathered calls ---------------------------------------------------------------------------------------------

    def gather(self, call: tuple[Any, ...]) -> None:
        """Send a call soon, perhaps together with others (`gathered`). If the line is lost before, the next one does.
        Raises ConnectionLostError without a line, and StoreClosedError."""
        line = self.line
        if line is None or line.lost is not None or not self.gathered:
            line = self._open_line()
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
        """Make the background thread send and read gathered calls at once."""
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

    def _doze(self, line: Line) -> None:
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

    # -- lines ------------------------------------------------------------------------------------------------------

    def _open_line(self, patience_s: float | None = None) -> Line:
        """Return the line. Without one, try to open it for `patience_s` (None: the time limit of the connection).
        Raises ConnectionLostError."""
        line = self.line
        if line is not None and not line.is_gone():
            return line
        asked_s = time.monotonic()
        until_s = asked_s + (self._timeout_s if patience_s is None else patience_s)
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

    def _opened(self) -> Line:
        sock = self._dial()
        line = Line(self, limited(sock, self._timeout_s / 2))

        def ask(frame: Frame) -> Frame:
            call = Waiting(frame, None, False)
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

    def call_back(self, call: Waiting, answer: Frame | None) -> None:
        try:
            assert call.answered is not None
            call.answered(answer)
        except Exception:
            _log.exception("%s: the callback of an answer failed", self.address)

    def take_over(self, call: Waiting) -> None:
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
                line = self._open_line(None if somebody_waits else 0)
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
