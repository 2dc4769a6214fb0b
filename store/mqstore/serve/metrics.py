"""Counters of a server, and its answer to Prometheus (remoting-server, sections 14 and 21).

The loop's lag is measured each second: how much later than asked the loop comes to a timer. A long lag is logged, since
every client waits meanwhile. Labels are codes of requests and answers, so the number of series is bounded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mqstore.logger import log as _log

if TYPE_CHECKING:
    from mqstore.serve.listening import Address
    from mqstore.serve.server import Server

_TICK_S: Final = 1.0
_LAG_S: Final = 0.1
"""Lag above which a line is logged, at most once a minute."""
_MINUTE_S: Final = 60
_REQUEST_BYTES_MAX: Final = 8 << 10
_REQUEST_S: Final = 5
_REQUESTS_MAX: Final = 16
"""Scrapes at a time. Further ones are disconnected."""
_CODES_MAX: Final = 3_000
"""Codes of answers below this are counted one by one. Answers of clients, which are passed on, may have any code."""


class Metrics:
    """Counters of a server. For the loop's thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.requests: Counter[int] = Counter()
        self.answers: Counter[int] = Counter()
        self.refused = 0
        self._lags_s = [0.0, 0.0]
        """Longest lag of the last minute and of this one."""
        self._minute = 0
        self._logged_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._listener: asyncio.Server | None = None
        self._scrapes = 0

    async def start(self, address: Address | None) -> None:
        """Measure the lag, and answer Prometheus at an address. Raises OSError if it is taken."""
        if address is not None:
            self._listener = await asyncio.start_server(self._answer, *address, limit=_REQUEST_BYTES_MAX)
        self._tick(self._server.loop.time())

    def stop(self) -> None:
        """End both."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()

    def count_answer(self, code: int) -> None:
        self.answers[code if 0 <= code < _CODES_MAX else -1] += 1

    def _tick(self, due_s: float) -> None:
        now_s = self._server.loop.time()
        lag_s, minute = now_s - due_s, int(now_s) // _MINUTE_S
        if minute != self._minute:
            self._minute, self._lags_s = minute, [self._lags_s[-1], 0.0]
        self._lags_s[-1] = max(self._lags_s[-1], lag_s)
        if lag_s > _LAG_S and now_s > self._logged_s + _MINUTE_S:
            self._logged_s = now_s
            _log.warning("the server came %d ms late to its clients", lag_s * 1000)
        self._timer = self._server.loop.call_at(now_s + _TICK_S, self._tick, now_s + _TICK_S)

    def text(self) -> str:
        """Return the series of the server, without those of its store."""
        server = self._server
        lag_ms = round(max(self._lags_s) * 1000)
        series: dict[str, tuple[int | Counter[int], str]] = {
            "connections": (server.connections, "Connections of clients."),
            "clients": (len(server.registry.clients), "Clients that send heartbeats."),
            "waiting_calls": (server.parked, "Calls that wait for a message, a sync or time."),
            "loop_lag_milliseconds": (lag_ms, "Longest delay of the event loop in the last minute."),
            "requests_total": (self.requests, "Requests received, by their code."),
            "answers_total": (self.answers, "Answers sent, by their code. 0 is success."),
            "refused_total": (self.refused, "Requests whose signature or rights were not enough."),
        }
        lines = []
        for short, (value, text) in series.items():
            name = f"mqstore_server_{short}"
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {'counter' if 'total' in name else 'gauge'}"]
            if isinstance(value, int):
                lines.append(f"{name} {value}")
            else:
                lines += [f'{name}{{code="{code}"}} {count}' for code, count in sorted(value.items())]
        return "\n".join(lines) + "\n"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._scrapes += 1
        try:
            if self._scrapes <= _REQUESTS_MAX:
                async with asyncio.timeout(_REQUEST_S):
                    writer.write(await self._response(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):  # also after the time
            writer.transport.abort()
        finally:
            self._scrapes -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _response(self, head: bytes) -> bytes:
        method, path = (*head.split(b"\r\n", 1)[0].split(b" "), b"", b"")[:2]
        if method != b"GET":
            return _http("405 Method Not Allowed", b"only GET\n")
        if path.partition(b"?")[0] != b"/metrics":
            return _http("404 Not Found", b"only /metrics\n")
        of_store = await self._server.in_desk(self._server.broker.prometheus)
        return _http("200 OK", (of_store + self.text()).encode())


def _http(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
