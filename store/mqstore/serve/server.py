"""Name server and broker on one port, for one open store (remoting-server, section 14).

    accept -> connection -> handle(frame) -> handler(server, call) -> call.reply
                                                  |
                                                  +-- parked: a waiter, a sync or a timer answers later

A handler is a plain function, called in the loop's thread. It must not wait for the disk or for a message. Threads of
the engine reach the loop by `post`, whose calls are collected, with one wake-up for all of a turn.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mqstore.broker.routing.selection import RoundRobin
from mqstore.broker.tables.locks import LockList
from mqstore.broker.tables.members import Mode
from mqstore.broker.tables.requestmodes import RequestModes
from mqstore.contract import Event
from mqstore.errors import (
    FormatError,
    MQStoreError,
    NotPermittedError,
    OffsetOutOfRangeError,
    ReceiptExpiredError,
    ResultCode,
    StoreBusyError,
    StoreClosedError,
)
from mqstore.logger import log as _log
from mqstore.remoting.calls import code_of, error_body, is_known
from mqstore.remoting.codes import GO_AWAY, NOT_SUPPORTED, Code, values_of
from mqstore.remoting.frames import FRAME_BYTES_MAX, ONE_WAY, Frame
from mqstore.serve import listening, own
from mqstore.serve.auth import Users
from mqstore.serve.connection import Call, Connection
from mqstore.serve.listening import Address, Listening
from mqstore.serve.metrics import Metrics
from mqstore.serve.registry import Registry
from mqstore.serve.requests import admin, groups, pop, pull, queries, routes, send, transactions
from mqstore.serve.requests.creation import Creation
from mqstore.serve.short import FORMS

if TYPE_CHECKING:
    from mqstore.broker.broker import Broker

Result = TypeVar("Result")
Handler = Callable[["Server", Call], None]
_HANDLERS: Final[Mapping[int, Handler]] = dict(
    chain.from_iterable(
        room.HANDLERS.items() for room in (routes, send, pull, pop, groups, transactions, admin, queries, own)
    )
)
_CODES: Final[Mapping[type[Exception], int]] = {
    OffsetOutOfRangeError: ResultCode.INVALID_PARAMETER,  # its own code makes a client that pulls move its offset
    FormatError: ResultCode.INVALID_PARAMETER,
    ReceiptExpiredError: ResultCode.MESSAGE_ILLEGAL,  # as for a receipt of nothing: "the message is not there"
}
"""Codes of errors whose own code means something else to clients."""
_SWEEP_S: Final = 10
_LOCKS_S: Final = 1
_GRACE_S: Final = 2
"""Seconds that a stopping server waits for the disk. Requests meanwhile are answered with GO_AWAY."""
_CLOSING_S: Final = 0.5
"""Seconds that clients of a stopping server have for their last answers."""
_ANSWER_S: Final = 10
"""Seconds that a client has for the answer to a request of the server."""
_IDLE_S: Final = 120
"""Seconds without a frame after which a connection is closed. Clients send a heartbeat each 30 s."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients can make a server hold. At a limit others are still served."""

    frame_bytes: int = FRAME_BYTES_MAX
    """Largest request. A connection that announces a larger one is closed."""
    connections: int = 10_000
    parked: int = 50_000
    """Calls that wait, of all connections."""
    parked_by_connection: int = 4_096
    syncs: int = 4_096
    """Calls that wait for the disk."""
    creations: int = 600
    """Topics and groups that requests create in a minute by naming them."""
    stalled_s: float = 60
    """Time after which a client that reads nothing of its answers is disconnected."""
    clients: int = 20_000
    groups: int = 10_000
    subscriptions: int = 1_000
    """Topics of a consumer."""


class Server:
    """Server of a store for RocketMQ's clients.

    >>> import asyncio, mqstore, tempfile
    >>> async def main(folder):
    ...     with mqstore.open(folder) as store:
    ...         async with Server(store.broker, listen=[("127.0.0.1", 0)]) as server:
    ...             return server.endpoints[0].rpartition(":")[0]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    '127.0.0.1'
    """

    def __init__(
        self,
        broker: Broker,
        *,
        listen: Iterable[Address] = (("127.0.0.1", 9876),),
        unix: Path | None = None,
        sockets: Iterable[socket.socket] = (),
        linger_s: float | None = None,
        metrics: Address | None = None,
        users: Users | None = None,
        tls: ssl.SSLContext | None = None,
        advertise: str | None = None,
        broker_name: str = "mqstore",
        cluster: str = "DefaultCluster",
        limits: Limits | None = None,
    ) -> None:
        """Prepare to serve `broker` at TCP addresses, on a Unix socket, and on sockets that listen already. These are
        not closed. `advertise` is the address in routes, where clients reach another one than the socket's own, as from
        outside of a container. Port 0 takes a free one. With `linger_s` the event `ended` is set when no client
        has been connected for so long. Prometheus is answered at `metrics`. With `users` only their
        signed requests are served, except on the Unix socket. With `tls` clients of TCP may use TLS."""
        self.broker = broker
        self.broker_name = broker_name
        self.cluster = cluster
        self.limits = limits or Limits()
        self.auto_create = broker.store.config.auto_create_topics
        self.registry = Registry(
            clients=self.limits.clients, groups=self.limits.groups, subscriptions=self.limits.subscriptions
        )
        self.request_modes = RequestModes(broker.store)
        self.lock_list = LockList(broker.store, broker.locks, broker.clock)
        self.creation = Creation(self)
        self.metrics = Metrics(self)
        self._metrics_address = metrics
        self._users = users
        self._tls = tls
        self.turns = RoundRobin()
        """Queues of sends that name none."""
        self.loop: asyncio.AbstractEventLoop
        self._advertise = advertise
        self._listen, self._unix, self._given = tuple(listen), unix, tuple(sockets)
        self._listening: Listening | None = None
        self._linger_s = linger_s
        self._idle_timer: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()
        """Set when nobody has been connected for `linger_s`, and nobody can find the server any more. The program
        that runs the server waits for it, and may set it, too."""
        self._connections: set[Connection] = set()
        self.stopping = False
        """True once new requests are refused."""
        self.parked = 0
        """Number of calls that wait."""
        self.syncing = 0
        """Number of those that wait for the disk."""
        self._posted: deque[Callable[[], object]] = deque()
        self._posted_lock = threading.Lock()
        self._changed: set[str] = set()
        """Groups whose consumers get a notice."""
        self._unheard: dict[Connection, dict[Call, Callable[[], object]]] = {}
        """Pulls of clients that have not sent a heartbeat."""
        self._opaque = 1 << 20
        self._worker = ThreadPoolExecutor(1, "mqstore-serve")
        self._desk = ThreadPoolExecutor(1, "mqstore-serve-admin")
        self.own = own.Own(self)
        self._listeners: list[tuple[Event, Callable[[str], object]]] = [
            ("topics", self.turns.forget),
            ("members", self._members_changed),
            ("locks", self._members_changed),
            *self.own.listeners,
        ]
        """Functions that the engine calls."""

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen. Raises OSError if an address is taken, and ConfigError if the Unix socket's path is too long."""
        self.loop = asyncio.get_running_loop()
        own = listening.bind_all(self._listen, self._unix)
        self._listening = Listening(self, own, self._given, self._tls)
        try:
            await self.metrics.start(self._metrics_address)
        except OSError:
            listening.close(own)
            raise
        self._every(_SWEEP_S, self._sweep)
        self._every(_LOCKS_S, self._save_locks)
        self.broker.transactions.on_check(None, partial(transactions.ask, self))
        for event, listener in self._listeners:
            self.broker.listen(event, listener)
        self._listening.start()
        listening.announce(self.broker.store.path, self.endpoints)
        self._wait_for_clients()

    async def stop(self) -> None:
        """Accept nothing more, answer what waits, and disconnect every client. The store stays open."""
        accepting = self._listening
        if accepting is None or self.stopping:
            return
        self.stopping = True
        accepting.stop()
        listening.withdraw(self.broker.store.path)
        self.metrics.stop()
        self.broker.transactions.on_check(None, None)
        for event, listener in self._listeners:
            self.broker.unlisten(event, listener)
        await self._until(self._ended_calls, _GRACE_S)
        for connection in list(self._connections):
            if not connection.parked:
                self.own.dismiss(connection)
            connection.finish()
        await self._until(lambda: not accepting.count, _CLOSING_S)
        for connection in list(self._connections):
            connection.abort()
        await self._until(lambda: not accepting.count, _CLOSING_S)
        self.own.stop()
        self._worker.shutdown()
        self._desk.shutdown(cancel_futures=True)

    def _ended_calls(self) -> bool:
        """Answer the calls that wait for a message. Return True once none waits, also not for the disk."""
        for call in list(self.parked_calls()):
            if call.end is not None:
                self._attempt(call, call.end)
        return not self.parked

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        until_s = self.loop.time() + timeout_s
        while not done() and self.loop.time() < until_s:
            await asyncio.sleep(0.01)

    def _wait_for_clients(self) -> None:
        if self._linger_s is not None and not self._connections and not self.stopping:
            self._idle_timer = self.loop.call_later(self._linger_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        assert self._listening is not None
        if not self._listening.count:
            listening.withdraw(self.broker.store.path)
            if not self._listening.hide():
                self.ended.set()
                return
            listening.announce(self.broker.store.path, self.endpoints)
        self._wait_for_clients()  # unless one of those that come now is served

    @property
    def endpoints(self) -> list[str]:
        """Where it listens: `host:port`, and `unix:path`."""
        if self._listening is None:
            raise StoreClosedError("the server does not listen")
        return self._listening.endpoints

    @property
    def connections(self) -> int:
        return len(self._connections)

    def descriptors(self) -> list[int]:
        """Return the descriptors of its sockets, for a forked child, which must not keep them open."""
        listeners = () if self._listening is None else self._listening.sockets
        return [number for each in (*listeners, *self._connections) if (number := each.fileno()) >= 0]

    def address_for(self, connection: Connection) -> str:
        """Return the address of this broker in the routes of a client: where it has reached the server."""
        return self._advertise or connection.address

    def now_ms(self) -> int:
        """Return the time of the loop's clock in ms."""
        return round(self.loop.time() * 1000)

    # -- connections ------------------------------------------------------------------------------------------------

    def admit(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def leave(self, connection: Connection) -> None:
        """Forget a connection, and the clients that it has been the connection of."""
        self._connections.discard(connection)
        self._unheard.pop(connection, None)
        self.own.leave(connection)
        for answer in list(connection.asked.values()):
            answer(Frame(ResultCode.SYSTEM_ERROR, remark="the client has left"))
        for client_id in list(connection.client_ids):
            self._gone(client_id, connection)
        self._wait_for_clients()
        if self._listening is not None:
            self._listening.resume()

    def _gone(self, client_id: str, connection: Connection | None = None) -> None:
        self.dismiss(client_id, self.registry.drop(client_id, connection))

    def join(self, client_id: str) -> None:
        """Make a client a member of its groups, as the consumers of this process are."""
        client = self.registry.clients.get(client_id)
        for group in () if client is None else client.consumes:
            consumer = self.registry.consumers(group)[client_id]
            topics = consumer.subscriptions.values()
            popped = any(self.request_modes.get(topic, group).mode == "POP" for topic, _, _ in topics)
            divides = not popped and not consumer.broadcasting
            mode = Mode("pop" if popped else "queue", False, consumer.broadcasting, "avg" if divides else None)
            self.broker.members.admit(client_id, group, {topic: (kind, text) for topic, text, kind in topics}, mode)

    def dismiss(self, client_id: str, left: Collection[str]) -> None:
        """Release the queues of a client that has left these groups, and let the other members divide them."""
        members = self.broker.members
        # Not the groups of a consumer that has the same client id here.
        gone = [group for group in left if (known := members.get(client_id, group)) is not None and known.remote]
        self.broker.locks.drop(client_id, gone)
        for group in gone:
            members.unregister(client_id, group)
        self.consumers_changed(left)

    def members(self, group: str) -> list[str]:
        """Return the client ids of a group's consumers, sorted: clients, and consumers of this process."""
        return sorted({*self.registry.consumers(group), *self.broker.members.members(group)})

    def consumers_changed(self, changed: Iterable[str]) -> None:
        """Send every consumer of these groups the notice that makes it divide the queues again, once a turn."""
        if not self._changed:
            self.loop.call_soon(self._notify_consumers)
        self._changed.update(changed)

    def _notify_consumers(self) -> None:
        changed, self._changed = self._changed, set()
        for group in changed:
            for connection in {consumer.connection for consumer in self.registry.consumers(group).values()}:
                self.notify(connection, Frame(Code.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group}))

    def _members_changed(self, group: str) -> None:
        """Members of the group, also those of this process, have changed, or have released queues. In any thread."""
        self.post(partial(self.consumers_changed, (group,)))

    def notify(self, connection: Connection, notice: Frame) -> None:
        """Send a request that the client does not answer."""
        self._opaque += 1
        notice.opaque, notice.flag = self._opaque, ONE_WAY
        connection.send(notice, notice.body)

    def forward(
        self, call: Call, connection: Connection, request: Frame, answer: Callable[[Frame], object] | None = None
    ) -> None:
        """Send a request to another client. Its answer is the answer of `call`, or is given to `answer`."""
        self.check_busy(call.connection)
        self._opaque += 1
        request.opaque = opaque = self._opaque
        refuse = partial(call.reply, ResultCode.SYSTEM_ERROR, remark="the client has not answered")
        timer = self.loop.call_later(_ANSWER_S, self.resume, call, refuse)

        def cancel() -> None:
            timer.cancel()
            connection.asked.pop(opaque, None)

        def taken(frame: Frame) -> None:
            pass_back = answer or (lambda frame: call.reply(frame.code, frame.fields, frame.body, frame.remark))
            self.resume(call, partial(pass_back, frame))

        call.connection.park(call, cancel, refuse)
        connection.asked[opaque] = taken
        connection.send(request, request.body)

    def _every(self, pause_s: float, work: Callable[[], object]) -> None:
        """Do `work` again and again until the server stops."""

        def again() -> None:
            if not self.stopping:
                work()
                self._every(pause_s, work)

        self.loop.call_later(pause_s, again)

    def _sweep(self) -> None:
        now_s = self.loop.time()
        for client_id in self.registry.expired(now_s):
            self._gone(client_id)
        for connection in list(self._connections):
            if now_s - connection.last_frame_s > _IDLE_S and not connection.parked:
                connection.abort("it has sent nothing for two minutes")

    def _save_locks(self) -> None:
        self._worker.submit(self.try_quietly, partial(self.lock_list.save, self._is_remote))

    def _is_remote(self, group: str, client_id: str) -> bool:
        member = self.broker.members.get(client_id, group)
        return member is not None and member.remote

    # -- requests ---------------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, frame: Frame) -> None:
        """Handle one received frame. Every error of a request is its answer."""
        if frame.is_response:
            if (taken := connection.asked.pop(frame.opaque, None)) is not None:
                taken(frame)
            return
        call = Call(connection, frame)
        if self.stopping:
            call.reply(GO_AWAY, remark="the server stops")
            return
        trusted = self._users is None or connection.is_trusted
        if frame.code in FORMS and trusted and self._attempt(call, self.own.serve_at_once, call) is not False:
            self.metrics.requests[frame.code] += 1
            return
        if (handler := _HANDLERS.get(frame.code)) is None:
            call.reply(NOT_SUPPORTED, remark=f"the request code {frame.code} is not served")
            return
        self.metrics.requests[frame.code] += 1

        def run() -> None:
            call.values = values_of(frame.code, frame.fields)
            if self._users is not None and not connection.is_trusted:
                self._authorize(self._users, call)
            self.creation.before(call, partial(handler, self, call))

        self._attempt(call, run)

    def _authorize(self, users: Users, call: Call) -> None:
        try:
            users.check(call)
        except NotPermittedError as error:
            self.metrics.refused += 1
            if not call.connection.was_refused:  # one line for each connection
                call.connection.was_refused = True
                _log.warning("requests of %s are refused: %s", call.connection.peer, error)
            raise

    def _attempt(self, call: Call, work: Callable[..., object], *args: object) -> object:
        """Return the result of `work(*args)`, or answer with its error."""
        try:
            return work(*args)
        except Exception as error:
            if call.is_own and is_known(error):
                call.reply(code_of(error), body=error_body(error), remark=str(error)[:1_000])
                return None
            if not isinstance(error, MQStoreError):
                _log.exception("request %d of %s failed", call.frame.code, call.connection.peer)
            code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
            text = str(error) if isinstance(error, MQStoreError) else "the server failed; its log says why"
            call.reply(int(getattr(error, "code", ResultCode.SYSTEM_ERROR)) if code is None else code, remark=text)
            return None

    def try_quietly(self, work: Callable[[], object]) -> None:
        """Do something that a client cannot be refused. An error is only logged."""
        try:
            work()
        except MQStoreError as error:
            _log.warning("a client is served all the same: %s", error)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def post(self, work: Callable[[], object]) -> None:
        """Do `work` in the loop's thread. Any thread may call this."""
        with self._posted_lock:
            self._posted.append(work)
            first = len(self._posted) == 1
        if first:
            try:
                self.loop.call_soon_threadsafe(self._run_posted)
            except RuntimeError:  # the loop is closed, and with it every connection
                self._posted.clear()

    def _run_posted(self) -> None:
        with self._posted_lock:
            posted, self._posted = self._posted, deque()
        for work in posted:
            work()

    def parked_calls(self) -> Iterator[Call]:
        """Yield every call that waits."""
        return chain.from_iterable(connection.parked for connection in self._connections)

    def may_park(self, connection: Connection) -> bool:
        """Return True if another call of the connection may wait."""
        return len(connection.parked) < self.limits.parked_by_connection and self.parked < self.limits.parked

    def resume(self, call: Call, work: Callable[[], object]) -> None:
        """Do `work`, which answers a parked call or parks it again, unless its client is gone."""
        if call in call.connection.parked:
            call.connection.forget(call)
            self._attempt(call, work)

    def do_in_thread(
        self, call: Call, work: Callable[[], Result], answer: Callable[[Result], object], *, long: bool = False
    ) -> None:
        """Do `work`, which may wait for the disk, in a worker thread, then `answer` in the loop's thread. `long` work
        has a thread of its own, so that messages do not wait for it."""
        self.check_busy(call.connection)
        self.when_done(call, (self._desk if long else self._worker).submit(work), answer)

    async def in_desk(self, work: Callable[[], Result]) -> Result:
        """Return the result of long work, done in its own thread."""
        return await self.loop.run_in_executor(self._desk, work)

    def in_thread(self, call: Call, work: Callable[[], Result]) -> Future[Result]:
        """Do `work` in the worker thread. The call is parked: `resume` it in the loop's thread."""
        self._check_syncing()
        done = self._worker.submit(work)
        call.connection.park(call, lambda: None)
        return done

    def when_done(self, call: Call, done: Future[Result], answer: Callable[[Result], object]) -> None:
        """Answer a call when its work is done: now, or in the loop's thread after a wait for the disk."""
        if done.done():
            answer(done.result())
            return
        call.connection.park(call, lambda: None)
        done.add_done_callback(lambda _: self.post(partial(self.resume, call, lambda: answer(done.result()))))

    def park_until(
        self,
        call: Call,
        add: Callable[..., Any],
        then: Callable[[bool], object],
        end: Callable[[], object],
        popping: tuple[str, str, int] | None = None,
    ) -> None:
        """Park a call until a waiter of the engine, which `add(callback=)` makes, calls back: then do `then(worth)`.
        A wake-up for `popping` (group, topic, queue) that its client cannot use is passed on."""
        resumed = False

        def resume(worth: bool) -> None:
            nonlocal resumed
            resumed = True
            self.resume(call, partial(then, worth))

        def cancel() -> None:
            if not resumed and not self.broker.remove_waiter(waiter) and popping is not None:
                self.broker.wake_one(*popping)

        waiter = add(callback=lambda worth: self.post(partial(resume, worth)))  # in the thread that dispatches
        call.connection.park(call, cancel, end)

    def park_for(self, call: Call, pause_ms: int, answer: Callable[[], object]) -> None:
        """Call `answer` after a pause, unless the call is answered earlier or its client is gone."""
        if len(call.connection.parked) >= 2 * self.limits.parked_by_connection:
            answer()  # this client does not wait for answers at all
            return
        timer = self.loop.call_later(pause_ms / 1000, self.resume, call, answer)
        call.connection.park(call, timer.cancel, answer)

    def after_heartbeat(self, call: Call, work: Callable[[], object]) -> None:
        """Do `work` when the call's client has sent a heartbeat."""
        waiting = self._unheard.get(call.connection, {})
        # Without those that were answered meanwhile, since the heartbeat may never come.
        kept = {each: again for each, again in waiting.items() if each in call.connection.parked}
        self._unheard[call.connection] = {**kept, call: work}

    def heard(self, connection: Connection) -> None:
        """Resume what waits for a heartbeat of this connection."""
        for call, work in self._unheard.pop(connection, {}).items():
            self.resume(call, work)

    def check_busy(self, connection: Connection) -> None:
        """Raise StoreBusyError if no other call of the connection may wait for the disk."""
        if not self.may_park(connection):
            raise StoreBusyError(f"{len(connection.parked)} calls of this connection, or too many of all, wait already")
        self._check_syncing()

    def _check_syncing(self) -> None:
        if self.syncing >= self.limits.syncs:
            raise StoreBusyError(f"{self.syncing} calls wait for the disk already")
