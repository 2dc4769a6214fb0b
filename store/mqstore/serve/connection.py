"""One connection of a client: requests in, answers out.

    received block -> frames -> handlers -> answers of this turn -> one write

A client that does not read its answers stops the parsing of its own requests, not only their reception: one received
block can hold a thousand. Nobody else is slowed down.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from mqstore.errors import FormatError
from mqstore.logger import log as _log
from mqstore.remoting.frames import ONE_WAY, RESPONSE, Frame, FrameReader, encode

if TYPE_CHECKING:
    from mqstore.serve.server import Server

Body = bytes | memoryview
"""Body of an answer. A view is sent, or copied, before the call that answers returns."""
_OUTPUT_BYTES_MAX: Final = 1 << 20
"""Unsent answers at which the parsing of a connection stops."""
_PIECES_MAX: Final = 1024
"""Pieces that one system call writes."""
_TURN_FRAMES, _TURN_S = 256, 0.002
"""Frames of one connection, and time, after which others get their turn."""


class Call:
    """One request, until it is answered."""

    __slots__ = ("__weakref__", "cancel", "connection", "end", "frame", "is_own", "values")

    def __init__(self, connection: Connection, frame: Frame) -> None:
        self.connection = connection
        self.frame = frame
        self.values: dict[str, Any] = {}
        self.is_own = False
        """True for a call of mqstore's own clients, which get an error as such."""
        self.cancel: Callable[[], object] | None = None
        """Ends its wait. Set while it is parked."""
        self.end: Callable[[], object] | None = None
        """Answers it before its time, when the server stops. None: it waits for the disk, which does not take long."""

    def reply(
        self, code: int = 0, fields: Mapping[str, object] | None = None, body: Body = b"", remark: str | None = None
    ) -> None:
        """Send the answer. Call it once, in the loop's thread."""
        connection, request = self.connection, self.frame
        if self in connection.parked:
            connection.forget(self)
        connection.count_answer(code)
        if not request.flag & ONE_WAY:
            frame = Frame(code, fields or {}, b"", request.opaque, RESPONSE, remark, binary=request.binary)
            connection.send(frame, body)


class Connection(asyncio.Protocol):
    """A socket of a client. All methods run in the loop's thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.count_answer = server.metrics.count_answer
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(server.limits.frame_bytes)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._fd = -1
        """The socket, if what is written there is not encrypted."""
        self._out: list[Body] = []
        self._out_bytes = 0
        self._blocked = False
        """True while the socket takes no more answers."""
        self._finished = False
        self._parsing = False
        self._stall: asyncio.TimerHandle | None = None
        self.parked: set[Call] = set()
        """Calls that wait for a message, a sync or time."""
        self.peer = ""
        """Address of the client, for its messages and for people."""
        self.address = ""
        """Address at which the client has reached the server. Routes name it."""
        self.is_trusted = False
        """True for the Unix socket, which only processes of our user and root can use."""
        self.was_refused = False
        """True once a request was not signed, or its user had not the right."""
        self.own_client = ""
        """Name of a client of mqstore."""
        self.client_ids: set[str] = set()
        """Clients that have sent a heartbeat on it."""
        self.asked: dict[int, Callable[[Frame], object]] = {}
        """Requests of the server that this client has not answered, by their numbers."""
        self.last_frame_s = self._loop.time()

    @property
    def closed(self) -> bool:
        """True once nothing can be sent any more."""
        return self._finished or self._transport.is_closing()

    def fileno(self) -> int:
        """Return the descriptor of its socket, or -1 if it is closed."""
        return cast("socket.socket", self._transport.get_extra_info("socket")).fileno()

    # -- the protocol of asyncio ------------------------------------------------------------------------------------

    @property
    def holder(self) -> str:
        """Name of its client, for people: the client's own, or its address."""
        return self.own_client or min(self.client_ids, default=self.peer)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_OUTPUT_BYTES_MAX)
        if transport.get_extra_info("sslcontext") is None:
            self._fd = transport.get_extra_info("socket").fileno()
        self.peer = address_of(transport.get_extra_info("peername"))
        self.address = endpoint_of(transport.get_extra_info("sockname"))
        self.is_trusted = self.address.startswith("unix:")
        self._server.admit(self)

    def data_received(self, data: bytes) -> None:
        if self._finished:
            return
        self.last_frame_s = self._loop.time()
        self._reader.feed(data)
        self._parse()

    def pause_writing(self) -> None:
        self._blocked = True
        self._transport.pause_reading()
        self._watch_output()

    def resume_writing(self) -> None:
        self._blocked = False
        if self._stall is not None:
            self._stall.cancel()
        self._continue()

    def _watch_output(self, unsent_bytes: int = 0) -> None:
        left_bytes = self._transport.get_write_buffer_size()
        if left_bytes == unsent_bytes:
            self.abort("it reads no answers")
        else:
            self._stall = self._loop.call_later(self._server.limits.stalled_s, self._watch_output, left_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stall is not None:
            self._stall.cancel()
        for call in list(self.parked):
            self.forget(call)
        self._server.leave(self)

    # -- requests and answers ---------------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Handle the received frames, and send their answers together."""
        if self._parsing or not self._takes_answers():
            return
        self._parsing = True
        until_s = self._loop.time() + _TURN_S
        try:
            for count, frame in enumerate(self._reader):
                self._server.handle(self, frame)
                if self._out_bytes > _OUTPUT_BYTES_MAX:
                    self._flush()
                if not self._takes_answers():
                    break
                if count == _TURN_FRAMES or self._loop.time() > until_s:
                    # Receiving stops, too: it may be faster than handling.
                    self._transport.pause_reading()
                    self._loop.call_soon(self._continue)
                    break
        except FormatError as error:
            self.abort(str(error))
        finally:
            self._parsing = False
            self._flush()

    def _continue(self) -> None:
        if self._takes_answers():
            self._transport.resume_reading()
            self._parse()

    def _takes_answers(self) -> bool:
        return not (self._blocked or self._finished or self._transport.is_closing())

    def send(self, frame: Frame, body: Body = b"") -> None:
        """Send an answer or a request of the server."""
        self._out.append(encode(frame, len(body)))
        if body:
            self._out.append(body)
        self._out_bytes += len(self._out[-1])
        if not self._parsing:
            self._flush()

    def _flush(self) -> None:
        out, self._out, self._out_bytes = self._out, [], 0
        if not out or self.closed:
            return
        # By a call of its own, since a transport of asyncio would join the pieces first, or keep views of mappings.
        sent = 0
        if self._fd >= 0 and not self._transport.get_write_buffer_size() and len(out) <= _PIECES_MAX:
            try:
                sent = os.writev(self._fd, out)
            except BlockingIOError:
                pass
            except OSError:  # the client is gone
                self._transport.abort()
                return
        if sent < sum(map(len, out)):
            self._transport.write(b"".join(out)[sent:])

    def park(self, call: Call, cancel: Callable[[], object], end: Callable[[], object] | None = None) -> None:
        """Keep a call that is answered later. `cancel` ends its wait if the client goes first, and `end` answers it if
        the server stops."""
        call.cancel, call.end = cancel, end
        self.parked.add(call)
        self._server.parked += 1
        self._server.syncing += end is None

    def forget(self, call: Call) -> None:
        """End the wait of a call that is answered now, or whose client is gone."""
        if call in self.parked:
            self.parked.discard(call)
            self._server.parked -= 1
            self._server.syncing -= call.end is None
            cancel, call.cancel = call.cancel, None
            if cancel is not None:
                cancel()

    def abort(self, why: str | None = None) -> None:
        if why is not None:
            _log.warning("client %s is disconnected: %s", self.peer, why)
        self._transport.abort()

    def finish(self) -> None:
        """Send nothing after the answers so far. The client closes the connection once it has them: closing it here
        would discard answers that it has not received, if it has sent more requests meanwhile."""
        self._flush()
        if not self.closed and self._transport.can_write_eof():
            with suppress(OSError):  # the client has just closed it
                self._transport.write_eof()
                self._finished = True
                return
        self._transport.close()


def address_of(name: Any) -> str:
    """Return `host:port` of a socket's name. A Unix socket has the address of this machine, as a record needs one."""
    return endpoint_of(name) if isinstance(name, tuple) else "127.0.0.1:0"


def endpoint_of(name: Any) -> str:
    """Return `host:port`, or `unix:path`, of a listening socket's name."""
    if not isinstance(name, tuple):
        return f"unix:{os.fsdecode(name)}"
    host, port = name[0].partition("%")[0], name[1]  # without the zone of IPv6, which a record cannot have
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
