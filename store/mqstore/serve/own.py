"""Calls of mqstore's own clients: the contract by the table in `remoting/calls.py` (remoting-server, section 12).

hello       begins a session: one connection of one process. Its older connections are ended
calls       in the loop; those that wait for the disk in a thread; those that wait for a message are parked
news        events that the session listens to
checks      the engine asks about a half message -> CHECK to a producer's session -> `checked` ends it
end         the connection closes: its members, queue locks and waiters go with it
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from mqstore.broker.items.changes import receipt_of
from mqstore.broker.opening import CONFIG_CHECKS, findings
from mqstore.contract import NOT_ASKED, DeadLetters, Event, NobodyAsked
from mqstore.errors import ConfigError
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.log.recovery.report import Finding
from mqstore.log.snapshot.copy import SnapshotReport, snapshot_store
from mqstore.remoting.calls import BY_CODE, CHECK, NEWS, PROTOCOL, Welcome
from mqstore.remoting.calls import Call as Spec
from mqstore.remoting.codes import GO_AWAY
from mqstore.remoting.frames import Frame
from mqstore.remoting.values import codec_of, dumps
from mqstore.serve import operators
from mqstore.serve.requests.admin import check_group_unused, check_topic_unused, reset_consumers
from mqstore.serve.requests.creation import of_own
from mqstore.serve.short import FORMS

if TYPE_CHECKING:
    from mqstore.broker.broker import Broker
    from mqstore.serve.connection import Call, Connection
    from mqstore.serve.server import Handler, Server

Given = dict[str, Any]
_EVENTS: Final[tuple[Event, ...]] = ("topics", "members", "locks")
_TABLES: Final = ("topics", "groups", "members", "locks", "transactions", "items")
_THREADS: Final = 4
_BUSY_MS: Final = 1_000
"""Delay of an answer that cannot wait, for a client that would ask again at once."""
_ANSWER_BYTES_MAX: Final = 8 << 20
"""Messages of an answer, in bytes. The first may be larger."""
_WAITED_MAX: Final = 1_000
_MESSAGE: Final = codec_of(Message)
_UNUSED: Final[Mapping[str, Callable[[Server, str], None]]] = {
    "admin.delete_topic": check_topic_unused,
    "admin.delete_group": check_group_unused,
}
"""Checks before something is deleted: no connected client may use it."""


@dataclass(eq=False)
class _Session:
    """A connection of an own client."""

    connection: Connection
    client: str
    version: str
    events: set[Event] = field(default_factory=set)
    members: dict[tuple[str, str], str | None] = field(default_factory=dict)
    """Owner by group and client id of its members."""
    clients: set[str] = field(default_factory=set)
    """Client ids that may hold queue locks."""
    working: set[tuple[str, QueueRef]] = field(default_factory=set)
    """Locks at work."""
    groups: set[str] = field(default_factory=set)
    """Producer groups that it answers checks of."""
    receives: set[tuple[str, str, int]] = field(default_factory=set)
    """Group, topic and queue of its waits for a pop."""
    waits: WeakValueDictionary[int, Call] = field(default_factory=WeakValueDictionary)
    """Its waits by number, while there is such a call."""


class Own:
    """Sessions of a server. For the loop's thread, unless a method says otherwise."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.broker: Broker = server.broker
        self._sessions: dict[Connection, _Session] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "mqstore-own")
        self._unknown: set[str] = set()
        """Transactions whose outcome a client did not know. The housekeeper takes them."""
        self.listeners = [(event, partial(self._happened, event)) for event in _EVENTS]
        broker = self.broker
        self._objects: Mapping[str, Any] = {
            "": broker,
            **{name: getattr(broker, name) for name in _TABLES},
            "letters": _Letters(broker),
            "log": _Log(broker),
            "admin": operators.operations(broker),
        }
        self._in_session: Mapping[str, Callable[..., Any]] = {
            "session.listen": self._listen,
            "session.withdraw": self._withdraw,
            "session.check": self._check,
            "session.ping": lambda session: None,
            "session.clients": lambda session: operators.clients(server, self._sessions, session.connection),
            "members.register": self._register,
            "members.unregister": self._unregister,
            "locks.try_lock": partial(self._lock, broker.locks.try_lock),
            "locks.try_lock_batch": partial(self._lock, broker.locks.try_lock_batch),
            "locks.begin_work": self._begin_work,
            "locks.end_work": self._end_work,
        }
        """Calls that concern their session, and return a result as the methods of the engine do."""
        self._special: Mapping[str, Callable[[_Session, Call, Spec, Given], None]] = {
            "session.checked": self._checked,
            "admin.reset": self._reset,
            "put": self._put,
            "pop": self._pop,
            "add_waiter": self._wait,
            "add_pop_waiter": self._wait,
        }
        """Calls that are answered later, or do more than that."""

    def stop(self) -> None:
        for connection in list(self._sessions):
            self.leave(connection)
        self._pool.shutdown()

    def dismiss(self, connection: Connection) -> None:
        """Let an own client know that it has all answers, and may send other calls again, to the next server."""
        if connection in self._sessions:
            self.server.notify(connection, Frame(GO_AWAY))

    def leave(self, connection: Connection) -> None:
        """End the session of a connection: members, locks, waiters."""
        session = self._sessions.pop(connection, None)
        if session is None:
            return
        for call in [call for call in connection.parked if call.end is not None]:
            connection.forget(call)
        for group in session.groups:
            self._withdraw_checks(group)
        for client_id in session.clients:
            self.broker.locks.drop(client_id)
        for (group, client_id), owner in session.members.items():
            self.broker.members.unregister(client_id, group, owner=owner)
        for group, topic, queue_id in session.receives:  # it may have been woken for a message that it has not popped
            self.server.try_quietly(partial(self.broker.wake_one, group, topic, queue_id))

    # -- calls ------------------------------------------------------------------------------------------------------

    def serve(self, call: Call) -> None:
        call.is_own = True
        spec, fields = BY_CODE[call.frame.code], call.frame.fields
        if "topic" in fields and call.connection in self._sessions:
            if (form := FORMS.get(spec.code)) is None:
                raise ConfigError(f"{spec.name} has no short form")
            self._once_created(call, spec, fields, partial(form, self, call, spec, fields))
        else:
            self._begin(call, spec)

    def serve_at_once(self, call: Call) -> bool:
        """Serve a short call that creates nothing and does not wait for the disk. False: it goes the ordinary way, for
        which each message would make a dozen calls more."""
        fields, broker = call.frame.fields, self.broker
        topic, group = fields.get("topic"), fields.get("group")
        if topic is None or broker.durability == "flush" or call.connection not in self._sessions:
            return False
        if self.server.creation.may_lack(topic) or (group is not None and broker.groups.get(group) is None):
            return False
        call.is_own = True
        code = call.frame.code
        FORMS[code](self, call, BY_CODE[code], fields)
        return True

    def _once_created(self, call: Call, spec: Spec, given: Mapping[str, Any], work: Callable[[], object]) -> None:
        """Do `work` once the topic and the group of the call exist: the loop does not wait for the files of tables."""
        wanted = () if spec.thread else of_own(self.server, spec.name, given)
        self.server.creation.ensure(call, wanted, work)

    def _begin(self, call: Call, spec: Spec) -> None:
        given = spec.arguments(call.frame.body)
        if spec.name in ("read", "log.get"):
            given["max_bytes"] = min(given.get("max_bytes") or _ANSWER_BYTES_MAX, _ANSWER_BYTES_MAX)
        session = self._sessions.get(call.connection)
        if spec.name == "session.hello":
            self._hello(call, spec, **given)
            return
        if session is None:
            raise ConfigError(f"{spec.name}: the first call of a connection must be hello")
        if (check_unused := _UNUSED.get(spec.name)) is not None:
            check_unused(self.server, given["name"])
        if (special := self._special.get(spec.name)) is not None:
            work = partial(special, session, call, spec, given)
        elif (method := self._in_session.get(spec.name)) is not None:
            work = partial(self.do, call, spec, given, partial(method, session, **given))
        else:
            work = partial(self.do, call, spec, given, partial(self._method(spec), **given))
        self._once_created(call, spec, given, work)

    def _method(self, spec: Spec) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._objects[spec.table], spec.method)
        return found

    def do(
        self,
        call: Call,
        spec: Spec,
        given: Mapping[str, Any],
        work: Callable[[], Any],
        then: Callable[[Any], object] | None = None,
    ) -> None:
        """Do `work`, in a thread if it waits for the disk, and then answer with its result."""
        then = then or partial(self._reply, call, spec)
        durability = given.get("durability") or self.broker.durability
        if spec.thread or (spec.has_durability and durability == "flush"):
            self.server.check_busy(call.connection)
            self.server.when_done(call, self._pool.submit(work), then)
        else:
            then(work())

    def _reply(self, call: Call, spec: Spec, result: Any) -> None:
        call.reply(body=spec.answer(result))

    # -- sessions ---------------------------------------------------------------------------------------------------

    def _hello(self, call: Call, spec: Spec, protocol: int, client: str, version: str = "") -> None:
        if protocol != PROTOCOL:
            raise ConfigError(
                f"this server speaks number {PROTOCOL} of mqstore's protocol, the client {protocol}: "
                "install the same version of mqstore on both sides"
            )
        here = call.connection
        for connection in [each for each, of in self._sessions.items() if of.client == client or each is here]:
            # What it has sent and nobody has read must not be done after what the client repeats now.
            self.leave(connection)
            if connection is not here:
                connection.abort("its client has connected again")
        self._sessions[here] = _Session(here, client, version[:100])
        here.own_client = client
        broker = self.broker
        store_id, now_ms = broker.store.manifest.store_id, broker.clock.now_ms()
        self._reply(call, spec, Welcome(PROTOCOL, broker.name, store_id, broker.limits, broker.durability, now_ms))

    def _reset(self, session: _Session, call: Call, spec: Spec, given: Given) -> None:
        def then(moved: Any) -> None:
            if not given.get("dry_run"):
                offsets = {each.queue: each.to for each in moved}
                reset_consumers(self.server, given["group"], given["topic"], offsets)
            self._reply(call, spec, moved)

        self.do(call, spec, given, partial(self._method(spec), **given), then)

    def _listen(self, session: _Session, event: Event) -> None:
        session.events.add(event)

    def _happened(self, event: Event, name: str) -> None:
        """Send news, from any thread."""
        self.server.post(partial(self._send_news, event, name))

    def _send_news(self, event: Event, name: str) -> None:
        body = dumps([event, name])
        for session in list(self._sessions.values()):
            if event in session.events:
                self.server.notify(session.connection, Frame(NEWS, {}, body))

    def _register(self, session: _Session, **given: Any) -> bool:
        changed = self.broker.members.register(**given)
        session.members[given["group"], given["client_id"]] = given.get("owner")
        session.clients.add(given["client_id"])
        return changed

    def _unregister(self, session: _Session, **given: Any) -> bool:
        left = self.broker.members.unregister(**given)
        if left:  # else it is still the member of another owner, and goes with the connection
            session.members.pop((given["group"], given["client_id"]), None)
        return left

    def _lock(self, lock: Callable[..., Any], session: _Session, **given: Any) -> Any:
        session.clients.add(given["client_id"])
        return lock(**given)

    def _begin_work(self, session: _Session, group: str, queue: QueueRef, client_id: str) -> bool:
        if begun := self.broker.locks.begin_work(group, queue, client_id):
            session.working.add((group, queue))
        return begun

    def _end_work(self, session: _Session, group: str, queue: QueueRef) -> None:
        if (group, queue) in session.working:  # else the lock was lost with a connection, and may be another client's
            session.working.discard((group, queue))
            self.broker.locks.end_work(group, queue)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _put(self, session: _Session, call: Call, spec: Spec, given: Given) -> None:
        if call.frame.fields.get("again"):
            done = self._pool.submit(self._put_again, given)
        else:
            self.server.check_busy(call.connection)
            done = self.broker.put_async(**given)
        self.server.when_done(call, done, partial(self._reply, call, spec))

    def _put_again(self, given: Given) -> SendReceipt:
        """Put a message whose answer was lost, unless it is stored."""
        for message in self.broker.find(given["topic"], unique_key=given["unique_key"], limit=1):
            return receipt_of(message)
        return self.broker.put(**given)

    def _pop(self, session: _Session, call: Call, spec: Spec, given: Given) -> None:
        until_ms = self.server.now_ms() + round(given.pop("poll", 0) * 1_000)
        given["local"] = False  # a restart of the server ends no receiver
        self._pop_until(call, spec, given, until_ms)

    def _pop_until(self, call: Call, spec: Spec, given: Given, until_ms: int) -> None:
        def then(found: Any) -> None:
            left_ms = until_ms - self.server.now_ms()
            self.broker.items.note_holder(given["group"], found, call.connection.holder)
            if found or left_ms <= 0 or not self.server.may_park(call.connection):
                self._reply(call, spec, found)
                return
            where = {name: given[name] for name in ("group", "topic", "queue_id", "filter", "order") if name in given}
            self.server.park_until(
                call,
                partial(self.broker.add_pop_waiter, **where, timeout=left_ms / 1_000),
                lambda _: self._pop_until(call, spec, given, until_ms),
                partial(self._reply, call, spec, []),
                _turn(given),
            )

        self.do(call, spec, given, partial(self.broker.pop, **given), then)

    # -- waits ------------------------------------------------------------------------------------------------------

    def _wait(self, session: _Session, call: Call, spec: Spec, given: Given) -> None:
        session.waits[call.frame.opaque] = call
        if not self.server.may_park(call.connection):
            self.server.park_for(call, _BUSY_MS, partial(self._reply, call, spec, True))
            return
        turn = _turn(given) if spec.name == "add_pop_waiter" else None
        if turn is not None and len(session.receives) < _WAITED_MAX:
            session.receives.add(turn)
        self.server.park_until(
            call,
            partial(self._method(spec), **given),
            partial(self._reply, call, spec),
            partial(self._reply, call, spec, False),
            turn,
        )

    def _withdraw(self, session: _Session, number: int, turn: tuple[str, str, int] | None = None) -> None:
        if (waiting := session.waits.get(number)) in session.connection.parked:
            session.connection.forget(waiting)
        elif turn is not None:  # its answer was on the way, and wakes nobody
            self.broker.wake_one(*turn)

    # -- checks of half messages ------------------------------------------------------------------------------------

    def _check(self, session: _Session, producer_group: str, on: bool) -> None:
        if on:
            session.groups.add(producer_group)
            self.broker.transactions.on_check(producer_group, partial(self._ask, producer_group))
        else:
            session.groups.discard(producer_group)
            self._withdraw_checks(producer_group)

    def _checkers(self, group: str) -> list[_Session]:
        return [session for session in list(self._sessions.values()) if group in session.groups]

    def _withdraw_checks(self, group: str) -> None:
        if not self._checkers(group):
            self.broker.transactions.on_check(group, None)

    def _ask(self, group: str, message: Message) -> bool | NobodyAsked | None:
        """Ask a client about a half message, in the engine's thread. The answer to the engine is that about the time
        before, which counts as a check if it was "unknown". Another one has ended the half by itself."""
        blobs: list[bytes] = []
        text = _MESSAGE.write(message, blobs)
        self.server.post(partial(self._send_check, group, dumps(text, blobs)))
        try:
            self._unknown.remove(message.unique_key)
        except KeyError:
            return NOT_ASKED
        return None

    def _send_check(self, group: str, body: bytes) -> None:
        if checkers := self._checkers(group):
            self.server.notify(random.choice(checkers).connection, Frame(CHECK, {}, body))

    def _checked(self, session: _Session, call: Call, spec: Spec, given: Given) -> None:
        transactions = self.broker.transactions
        half = transactions.get(given["transaction_id"])
        answer = given["answer"]
        if half is not None and half.producer_group in session.groups and isinstance(answer, bool):
            end = partial(transactions.end, half, "commit" if answer else "rollback", from_check=True)
            self.server.when_done(call, self._pool.submit(end), lambda _: self._reply(call, spec, None))
            return
        if half is not None and answer is None:
            self._unknown.add(half.transaction_id)
        self._reply(call, spec, None)


def _turn(given: Given) -> tuple[str, str, int]:
    return given["group"], given["topic"], given.get("queue_id", -1)


class _Letters:
    """Dead letters by group."""

    def __init__(self, broker: Broker) -> None:
        self._of: Callable[[str], DeadLetters] = broker.dead_letters

    def bounds(self, group: str) -> tuple[int, int]:
        return self._of(group).bounds

    def count(self, group: str) -> int:
        return len(self._of(group))

    def select(self, group: str, **options: Any) -> list[Message]:
        left = _ANSWER_BYTES_MAX
        found = []
        for letter in self._of(group).select(**options):
            found.append(letter)
            left -= letter.size
            if left <= 0:
                break
        return found

    def replay(self, group: str, **options: Any) -> Any:
        return self._of(group).replay(**options)

    def purge(self, group: str, **options: Any) -> int:
        return self._of(group).purge(**options)


class _Log:
    """Reads of the log."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._store = broker.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def verify(self) -> list[Finding]:
        return list(islice(findings(self._store), 10_000))

    def snapshot(self, target: str, *, link: bool = False) -> SnapshotReport:
        store, saved = self._store, self._broker.saved
        return snapshot_store(
            store.path, target, link=link, config=store.config, json_checks=CONFIG_CHECKS, saved=saved
        )


def _serve(server: Server, call: Call) -> None:
    server.own.serve(call)


HANDLERS: Mapping[int, Handler] = dict.fromkeys(BY_CODE, _serve)
