"""The engine contract over a connection, by the table of calls (`remoting/calls.py`).

A call of a method is a request, and its result the answer. By hand are only

    put, read, pop, ack   calls of each message (`remote/messages.py`)
    add_waiter, ...       parked calls: the answer calls back
    listen, on_check      callbacks of this process, called in threads of their own
    topics                the settings of a topic are kept until the server says that it has changed
    local_offsets         files of this machine
    begun                 no notes: nobody knows here which message ended a process

After a new connection members, checks and news are registered again, before anything else.
"""

from __future__ import annotations

import hashlib
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from mqstore.broker.admin.operations import Operations
from mqstore.broker.reads.filters.filter import Filter, parse_filter
from mqstore.broker.redelivery.attempt_journal import UNREAD
from mqstore.broker.redelivery.dead_letters import DeadLetters
from mqstore.broker.tables.localoffsets import LocalOffsets
from mqstore.clock import SYSTEM_CLOCK, SystemClock
from mqstore.closing import Closing
from mqstore.contract import BrokerContract, Event, OffsetCalls, Suspects, Waiter
from mqstore.errors import ConnectionLostError, MQStoreError, NotPermittedError, NotSupportedError, StoreClosedError
from mqstore.files.filesystem import REAL
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.logger import log as _log
from mqstore.options import Duration, StoreConfig
from mqstore.remote.connection import Connection
from mqstore.remote.letters import RemoteLetters
from mqstore.remote.messages import MessageCalls, result_of
from mqstore.remoting.calls import CALLS, CHECK, NEWS, PROTOCOL, TABLES, Call, SessionCalls
from mqstore.remoting.codes import NOT_SUPPORTED
from mqstore.remoting.frames import Frame
from mqstore.remoting.signing import Signer
from mqstore.remoting.values import loads, message_of
from mqstore.version import VERSION

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

_SAVED_S: Final = 5.0
"""Time after which a server that is alive has saved a commit by itself. Usually it is a tenth of a second."""
_CACHED: Final = frozenset({"topics.get", "topics.entered", "topics.require", "topics.for_send", "topics.for_priority"})


class _ServerClock(SystemClock):
    """Clock of the server, as of the last connection: due times and leases are its."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


class Later:
    """Calls in a thread of their own, one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, work: Callable[[], object]) -> None:
        self._calls.put(work)
        if self._thread is None or not self._thread.is_alive():  # the first time, and in a forked child
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            try:
                work()
            except Exception as error:
                if not isinstance(error, ConnectionLostError | StoreClosedError):
                    _log.exception("%s: a callback failed", self._name)

    def end(self) -> None:
        """End the thread after its present call."""
        self._calls.put(None)


class _Table:
    """Calls of one table of the broker: topics, groups, members, locks, transactions, the log."""

    def __init__(self, table: str, method: Callable[[str], Callable[..., Any]]) -> None:
        for name, call in CALLS.items():
            if call.table == table:
                setattr(self, call.method, method(name))


class _NoNotes:
    """Attempt notes that nobody keeps."""

    def __init__(self) -> None:
        self.suspects = Suspects()

    def open(self, group: str, workers: int, cells: int) -> Any:
        return SimpleNamespace(workers=[UNREAD] * workers, close=lambda: None)


class RemoteContract(BrokerContract):
    """Parts of the contract that are the same for every broker of other processes."""

    is_remote, own_clock = True, False
    _sender = None
    offsets_folder: Path | None = None
    """Folder of the offsets of broadcasting clients. None: one of the user's, by the id of the store."""
    _store_id: str

    def __init__(self) -> None:
        self.shared = {}
        self.begun = _NoNotes()
        self.pop_at_once = lambda *args: []
        self.ack_at_once = lambda *args: 0
        self.has_room = lambda size: False

    def filter(self, expression: str, kind: Literal["TAG", "SQL92"] = "TAG") -> Filter | None:
        return parse_filter(expression, kind)

    def saved(self, work: Callable[[], T]) -> T:
        for listener in list(self._listeners["save"]):
            listener()
        self.save_offsets()
        return work()

    def local_offsets(self, client_id: str, group: str) -> OffsetCalls:
        folder: Any = SimpleNamespace(
            path=self.offsets_folder or Path.home() / ".mqstore" / "offsets" / self._store_id,
            mode="rw",
            fs=REAL,
            clock=self.clock,
            config=StoreConfig(),
            flush=lambda: None,  # the log is the server's
            check_open=self.check_open,
        )
        folder.path.mkdir(parents=True, exist_ok=True)
        return LocalOffsets(folder, client_id, group)


class RemoteBroker(Closing, MessageCalls, RemoteContract):
    """Delivery by the broker of a server. Thread-safe."""

    admin: Operations
    session: SessionCalls
    log: Any

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 10.0,
        dial: Callable[[], socket.socket] | None = None,
        sign: Signer | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect, by `dial` if it is given, and sign each request if there is a `sign`. TCP has TLS with `tls`.
        Raises ConnectionLostError, and NotSupportedError for a server that does not speak this protocol."""
        self.clock: Any = _ServerClock()
        self.turns = None
        self._begin()
        tables: Any = {table: _Table(table, self._forwarded) for table in TABLES if table}
        vars(self).update(tables)
        self.save_offsets = self._save
        tables["members"].register = self._register
        tables["members"].unregister = _at_the_end(self._unregister, False)
        for table, name, nothing in (("members", "get", None), ("locks", "unlock_batch", frozenset())):
            setattr(tables[table], name, _at_the_end(getattr(tables[table], name), nothing))
        tables["transactions"].on_check = self._on_check
        self._connection = Connection(
            address,
            timeout_s=timeout_s,
            ping=CALLS["session.ping"].code,
            greet=self._greet,
            requested=self._requested,
            dial=dial,
            sign=sign,
            pack=self.pack,
            tls=tls,
        )
        self._connection.open()

    def _begin(self) -> None:
        """Begin without members, listeners and checks, as a forked child does, which is another client."""
        super().__init__()
        self._client = secrets.token_hex(8)
        self._listeners = {event: [] for event in get_args(Event)}
        self._checks: dict[str | None, Callable[[Message], Any]] = {}
        self._session: dict[tuple[str, ...], tuple[Call, bytes]] = {}
        """Requests to repeat on each new connection, by their subject."""
        self._topics: dict[tuple[str, str], Any] = {}
        self._news, self._asked = Later("mqstore-news"), Later("mqstore-checks")
        self._greeted = 0
        """Number of connections so far."""
        self._commits: dict[tuple[Any, ...], tuple[float, int, dict[str, Any]]] = {}
        """Latest commit of each queue that is perhaps not saved: its time, connection and arguments."""

    # -- the connection ---------------------------------------------------------------------------------------------

    def _greet(self, ask: Callable[[Frame], Frame]) -> None:
        call = CALLS["session.hello"]
        name = f"{socket.gethostname()}@{os.getpid()}@{self._client}"
        given = {"protocol": PROTOCOL, "client": name, "version": VERSION}
        answer = ask(Frame(call.code, {}, call.request(given)))
        if answer.code == NOT_SUPPORTED:
            raise NotSupportedError(f"{self._connection.address} is not a server of mqstore")
        welcome = result_of(call, answer)
        self.name, self.limits, self.durability = welcome.name, welcome.limits, welcome.durability
        if isinstance(self.clock, _ServerClock):  # not that of a test
            self.clock.ahead_ms = welcome.now_ms - SYSTEM_CLOCK.now_ms()
        self._store_id = welcome.store_id or hashlib.sha256(welcome.name.encode()).hexdigest()[:32]
        self._topics.clear()
        for of, (again, body) in list(self._session.items()):
            answer = ask(Frame(again.code, {}, body))
            if answer.code:
                _log.warning("%s: %s cannot be repeated: %s", self.name, " ".join(of), answer.remark)
        if self._greeted:
            saved_s = self._connection.received_s - _SAVED_S
            self._commits = {key: commit for key, commit in self._commits.items() if commit[0] > saved_s}
            _log.info("%s: connected again to %s", self.name, self._connection.address)
            for kind, group, *_ in list(self._session):
                if kind == "member":  # others may have come and gone
                    self._happened("members", group)
        self._greeted += 1

    def _requested(self, frame: Frame) -> None:
        """Take a request of the server, in the thread that reads."""
        value, blobs = loads(frame.body)
        if frame.code == NEWS:
            event, name = value
            if event == "topics":
                for key in [key for key in list(self._topics) if key[1] == name]:
                    self._topics.pop(key, None)
            self._happened(event, name)
        elif frame.code == CHECK:
            self._asked(partial(self._answer_check, message_of(value, blobs)))

    def _happened(self, event: Event, name: str) -> None:
        for listener in tuple(self._listeners.get(event, ())):
            self._news(partial(listener, name))

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        call = CALLS[name]
        return result_of(
            call, self._connection.call(call.code, call.request(call.given(args, options)), repeat=call.repeat)
        )

    def _forwarded(self, name: str) -> Callable[..., Any]:
        if name in _CACHED:
            return self._cached(name)
        return lambda *args, **options: self._call(name, args, options)

    def _cached(self, name: str) -> Callable[[str], Any]:
        def call(topic: str) -> Any:
            try:
                return self._topics[name, topic]
            except KeyError:
                self._hear("topics")  # also of a topic that does not exist: then of its creation
                found = self._topics[name, topic] = self._call(name, (topic,), {})
                return found

        return call

    def _keep(self, key: tuple[str, ...], name: str, given: dict[str, Any]) -> Any:
        """Call, and repeat the call on each new connection."""
        call = CALLS[name]
        body = call.request(given)
        result = result_of(call, self._connection.call(call.code, body, repeat=True))
        self._session[key] = call, body
        return result

    def _hear(self, event: Event) -> None:
        if ("news", event) not in self._session:
            self._keep(("news", event), "session.listen", {"event": event})

    # -- members that the table does not make ------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def check_open(self) -> None:
        if self.closed:
            raise StoreClosedError(f"the connection to {self._connection.address} is closed; connect again")

    def listen(self, event: Event, callback: Callable[..., object]) -> None:
        super().listen(event, callback)
        if event != "save":
            self._hear(event)
            self._look_for_requests()

    def unlisten(self, event: Event, callback: Callable[..., object]) -> None:
        super().unlisten(event, callback)
        self._look_for_requests()

    def _register(self, *args: Any, **options: Any) -> Any:
        given = CALLS["members.register"].given(args, options)
        return self._keep(("member", given["group"], given["client_id"]), "members.register", given)

    def _unregister(self, *args: Any, **options: Any) -> Any:
        given = CALLS["members.unregister"].given(args, options)
        left = self._call("members.unregister", (), given)
        if left:
            self._session.pop(("member", given["group"], given["client_id"]), None)
        return left

    def _on_check(self, producer_group: str | None, callback: Callable[[Message], Any] | None) -> None:
        key = ("check", str(producer_group))
        given = {"producer_group": producer_group, "on": callback is not None}
        if callback is not None:
            self._checks[producer_group] = callback
            self._keep(key, "session.check", given)
        else:
            self._checks.pop(producer_group, None)
            self._session.pop(key, None)
            self._call("session.check", (), given)
        self._look_for_requests()

    def _look_for_requests(self) -> None:
        """Have requests of the server read at once, also while no call waits, if there is a listener."""
        others = any(listeners for event, listeners in self._listeners.items() if event != "save")
        self._connection.listens = bool(self._checks) or others
        if self._connection.listens:
            self._connection.attend()

    def _answer_check(self, message: Message) -> None:
        group = message.stored_properties().get("PGROUP")
        callback = self._checks.get(group) or self._checks.get(None)
        if callback is None:
            return
        try:
            answer = callback(message)
        except Exception:
            _log.exception("%s: the check of transaction %r failed", self.name, message.unique_key)
            answer = None
        try:
            self._call("session.checked", (message.unique_key, answer), {})
        except MQStoreError as error:
            _log.warning("%s: the answer to the check of %r came too late: %s", self.name, message.unique_key, error)

    def send_back(self, group: str, message: Any, **options: Any) -> SendReceipt:
        offset = message if isinstance(message, int) else message.physical_offset
        receipt: SendReceipt = self._call("send_back", (group, offset), options)
        return receipt

    def add_waiter(self, *args: Any, **options: Any) -> Waiter:
        waiter: Waiter = self._park("add_waiter", args, options)
        return waiter

    def add_pop_waiter(self, *args: Any, **options: Any) -> Waiter:
        waiter: Waiter = self._park("add_pop_waiter", args, options)
        return waiter

    def _park(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        call = CALLS[name]
        given = call.given(args, options)
        callback = given.pop("callback")

        def answered(answer: Frame | None) -> None:
            if answer is None:  # closed, or there is no server any more: a read says so
                callback(not self.closed)
            else:  # after an error, a read raises it, too
                callback(answer.code != 0 or result_of(call, answer))

        turn = (given["group"], given["topic"], given.get("queue_id", -1)) if "group" in given else None
        return self._connection.park(call.code, answered, call.request(given)), turn

    def remove_waiter(self, waiter: Any) -> bool:
        handle, turn = waiter
        number = self._connection.withdraw(handle)
        if number:
            call = CALLS["session.withdraw"]
            self._connection.tell(call.code, call.request({"number": number, "turn": turn}))
        return number is not None

    def dead_letters(self, group: str) -> DeadLetters:
        return RemoteLetters(self._call, group)

    def commit(self, *args: Any, **options: Any) -> None:
        given = CALLS["commit"].given(args, options)
        connection = self._greeted
        self._call("commit", (), given)
        self._commits[given["group"], given["topic"], given["queue_id"]] = time.monotonic(), connection, given

    def _save(self) -> None:
        """Save offsets, also those that a server has lost, because it was killed before it has saved them itself."""
        connection = 0
        while connection != self._greeted:
            connection, commits = self._greeted, list(self._commits.items())
            for _, (_, of, given) in commits:
                if of != connection:
                    with suppress(NotPermittedError):  # the queue was lost, too: its new owner began further back
                        self._call("commit", (), given)
            self._call("save_offsets", (), {})
        for key, commit in commits:
            if self._commits.get(key) is commit:
                self._commits.pop(key, None)

    def close(self, timeout: Duration = 30) -> None:
        self._connection.close()
        self._news.end()
        self._asked.end()


def _at_the_end(call: Callable[..., Any], nothing: object) -> Callable[..., Any]:
    """Return a call that a consumer makes when it leaves. Members and locks end with their connection anyway."""

    def leave(*args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except (StoreClosedError, ConnectionLostError):
            return nothing

    return leave


def _method(name: str) -> Callable[..., Any]:
    def call(self: RemoteBroker, *args: Any, **options: Any) -> Any:
        return self._call(name, args, options)

    return call


for _name, _member in vars(BrokerContract).items():
    if isinstance(_member, FunctionType) and not _name.startswith("_") and getattr(RemoteBroker, _name) is _member:
        setattr(RemoteBroker, _name, _method(_name))
